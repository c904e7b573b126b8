"""Relations of two digits: error against the number of images, and the tables beside it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch_dcl.data.relations import TASKS
from torch_dcl.experiments.recipes.relations import COLUMNS, cells_grid
from torch_dcl.experiments.relation_findings import (
    DCL,
    answer,
    details,
    exponents_in_words,
    needed_in_words,
)
from torch_dcl.experiments.stats import interval, mean
from torch_dcl.report.canvas import (
    _BODY,
    _DASHES,
    _INCH,
    _PAGE,
    _SMALL,
    _dress,
    _get,
    _id,
    _layout,
    _list,
    _n,
    _numbers,
    _style,
    _Theme,
    _theme,
)
from torch_dcl.report.document import bold, on_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["relations_context", "relations_figure"]

_HEIGHT = 72.0  # mm


def relations_figure(data: Mapping[str, Any], *, dark: bool = False) -> "Figure":
    """Draw test error against the number of images, a panel for each task and a line for each column.

    Args:
        data: ``{"cells": [{"task": "sum", "images": 6000, "column": "A2", "errors": [...]}, ...]}``; errors are in
            percent, one a seed.
        dark: For a dark page.

    Raises:
        ValueError: something is missing, empty or out of range.
    """
    where = "relations_figure"
    curves: dict[str, dict[str, dict[int, list[float]]]] = {}
    for cell in _list(data, "cells", where):
        errors = _numbers(_list(cell, "errors", where), "errors", where)
        if any(not 0 <= error <= 100 for error in errors):
            raise ValueError(f"{where}: errors are {errors}; give percent, from 0 to 100")
        task = str(_get(cell, "task", where))
        if task not in TASKS:
            raise ValueError(f"{where}: there is no task {task!r}; the tasks are {', '.join(TASKS)}")
        of_task = curves.setdefault(task, {})
        of_task.setdefault(str(_get(cell, "column", where)), {})[int(_get(cell, "images", where))] = errors
    theme = _theme(dark)
    with _style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(_PAGE, _HEIGHT / _INCH), facecolor="none", layout=_layout(wspace=0.05))
        figure.set_gid("relations")
        panels = figure.subplots(1, len(curves), squeeze=False)[0]
        for axes, (task, by_column) in zip(panels, curves.items(), strict=True):
            _draw_task(axes, task, by_column, theme)
        panels[0].set_ylabel("test error (%)")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=_SMALL,
            labelcolor=theme.text, handlelength=2.2, columnspacing=1.2,
        )  # fmt: skip
        many = _n(
            [errors for of_task in curves.values() for by_size in of_task.values() for errors in by_size.values()]
        )
        figure.set_label(
            f"Test error (%) against images to train on, for labels that are functions of two digits. Lines are means "
            f"over {many}, bands are 95 % t-intervals of the mean, not corrected. All columns but the plain one have "
            "the weights of DCL-A2; every training takes the same number of steps. Both axes are logarithmic."
        )
    return figure


def _draw_task(axes: "Axes", task: str, by_column: Mapping[str, Mapping[int, list[float]]], theme: _Theme) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    _dress(axes, theme)
    axes.set_title(TASKS[task].title, loc="left", size=_BODY, color=theme.text, pad=5, weight="bold")
    axes.set_xscale("log")
    axes.set_yscale("log")
    sizes = sorted({images for by_size in by_column.values() for images in by_size})
    for column, by_size in by_column.items():
        colour, mark = _look(column, theme)
        places = sorted(by_size)
        means = [mean(by_size[images]) for images in places]
        bands = [interval(by_size[images]) for images in places if len(by_size[images]) > 1]
        is_ours = column == DCL
        if len(bands) == len(places):
            floor = min(means) / 10 or 1e-3  # an interval may reach below 0, which has no logarithm
            lows, highs = [max(low, floor) for low, _ in bands], [high for _, high in bands]
            axes.fill_between(places, lows, highs, color=colour, alpha=0.16, lw=0)
        axes.plot(
            places, means, marker=mark, ms=3.6, color=colour, lw=1.7 if is_ours else 1.0, mec=theme.page, mew=0.5,
            ls=_DASHES if column in ("plain", "power-0", "power-1") else "-", zorder=4 if is_ours else 3,
            label=f"DCL-{column}" if is_ours else column, gid=_id(task, column),
        )  # fmt: skip
    axes.set_xticks(sizes, [f"{images:,}" for images in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 3, 5, 7), numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("images to train on", labelpad=2)


def _look(column: str, theme: _Theme) -> tuple[str, str]:
    """Colour and mark of a column, those of the chart where it has them."""
    looks = {
        "plain": (theme.text, "s"), "narrow": (theme.muted, "v"), "low-rank": (theme.green, "^"),
        "summed": (theme.orange, "P"), "A2": (theme.blue, "o"), "power-0": (theme.sky, "D"),
        "power-1": (theme.purple, "D"),
    }  # fmt: skip
    return looks.get(column, (theme.muted, "h"))


def relations_context(data: Mapping[str, Any]) -> dict[str, Any]:
    """The answer, and the rows of the tables.

    Args:
        data: What `torch_dcl.experiments.recipes.relations` wrote.
    """
    needed, trials, exponents = [], [], []
    rates = sorted({rate for cell in data["cells"] for rate in cell["trials"]}, key=float)
    for cell in data["cells"]:
        task, images, column = cell["task"], cell["images"], cell["column"]
        place = [TASKS[task].title, f"{images:,}"]
        tried = {r: bold(f"{mean(errors):.2f}", float(r) == cell["chosen"]) for r, errors in cell["trials"].items()}
        trials.append([*place, column, *(tried.get(rate, "–") for rate in rates)])
        if "exponents" in cell:
            exponents.append([*place, column, exponents_in_words(cell["exponents"])])
        if column == DCL:
            others = dict.fromkeys(other["column"] for other in data["cells"] if other["column"] != DCL)
            words = [needed_in_words(data, task, other, images) for other in others]
            needed.append([*place, f"{mean(cell['errors']):.2f}", *words])
    columns = list(dict.fromkeys(cell["column"] for cell in data["cells"] if cell["column"] != DCL))
    meant = {name: COLUMNS[name] for name in dict.fromkeys(cell["column"] for cell in data["cells"]) if name in COLUMNS}
    flags = [text for text in details(data) if text.startswith(("Best at", "Diverged"))]
    return {
        "said": answer(data), "told": list(data["told"]), "flags": flags, "grid": on_page(cells_grid(data)),
        "needed": needed, "columns": columns, "exponents": exponents, "meant": meant, "trials": trials,
        "rates": [f"at {rate}" for rate in rates],
    }  # fmt: skip
