"""Errors against the number of images, and the differences to DCL-A2 that the tests are about."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_dcl.data.relations import TASKS
from torch_dcl.experiments.relation_findings import DCL, Compared, compare_cells
from torch_dcl.experiments.settings import Reader, is_count, is_list_of, is_text
from torch_dcl.experiments.stats import interval
from torch_dcl.report import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["relations_figure"]

DASHED = ("plain", "power-0", "power-1")


class _Cell(NamedTuple):
    """The errors of a cell, and whether networks failed among them."""

    errors: list[float]
    failed: bool

    @property
    def middle(self) -> float:
        """The mean; the median where networks failed, since these alone would decide the mean."""
        return median(self.errors) if self.failed else fmean(self.errors)


_Curves = Mapping[str, Mapping[int, _Cell]]
"""The cells of a task, by column and images."""
STEP = 0.135  # between neighbouring columns at one size, in the logarithm of the images


def relations_figure(data: Mapping[str, Any], *, dark: bool = False) -> "Figure":
    """Draw test error against the number of images, and below it the differences to DCL-A2; a panel for each task.

    A cell in which networks failed has a hollow mark at its median, without an interval: a few networks at chance level
    would decide its mean, and squash all other curves.

    ``data`` is ``{"cells": [{"task": "sum", "images": 6000, "column": "A2", "errors": [...], "failed": [...]}, ...]}``;
    errors are in percent, one a seed; ``failed`` has the seeds that failed, and may be missing.
    """
    where = "relations_figure"
    curves: dict[str, dict[str, dict[int, _Cell]]] = {}
    for cell in Reader(where, data).get("cells", bool, "at least one cell"):
        read = Reader(where, cell)
        task, column = read.name("task", tuple(TASKS)), read.get("column", is_text, "its name")
        images = read.get("images", is_count, "a whole number")
        failed = read.get("failed", is_list_of(is_count), "a list of seeds", [])
        place = curves.setdefault(task, {}).setdefault(column, {})
        place[images] = _Cell(canvas.errors_of(cell, where), bool(failed))
    compared = compare_cells(data)
    has_failed = any(cell.failed for of in curves.values() for by_size in of.values() for cell in by_size.values())
    columns = list(dict.fromkeys(column for by_column in curves.values() for column in by_column))
    theme = canvas.theme_of(dark)
    with canvas.style():
        rows = 2 if compared else 1
        figure = canvas.empty("relations", canvas.PAGE, 10 + 58 * rows, canvas.layout(wspace=0.05, hspace=0.05))
        panels = figure.subplots(rows, len(curves), squeeze=False)
        for k, (task, by_column) in enumerate(curves.items()):
            _draw_errors(panels[0][k], task, by_column, theme)
            if compared:
                _draw_differences(panels[1][k], by_column, [each for each in compared if each.task == task], theme)
            _dress_sizes([row[k] for row in panels], by_column)
        panels[0][0].set_ylabel("test error (%)")
        if compared:
            panels[1][0].set_ylabel("difference to DCL-A2\n(% of its error)")
        _add_legend(figure, columns, theme, has_failed=has_failed)
        figure.set_label(_caption(curves, has_compared=bool(compared), has_failed=has_failed))
    return figure


def _caption(curves: Mapping[str, _Curves], *, has_compared: bool, has_failed: bool) -> str:
    many = canvas.seeds_in_words(
        [cell.errors for of_task in curves.values() for by_size in of_task.values() for cell in by_size.values()]
    )
    words = (
        "Test error (%) against images to train on, for labels that are functions of two digits. Lines are means over "
        f"{many}, bands are 95 % t-intervals of the mean, not corrected. All columns but the plain one have the "
        "weights of DCL-A2; every training takes the same number of steps."
    )
    if has_compared:
        words += (
            " Below: the column's error minus DCL-A2's on the same seeds, as a share of DCL-A2's mean error, with 95 % "
            "t-intervals that are not corrected; an asterisk marks a difference that is significant after Holm's "
            "correction. Above the line the column errs more than DCL-A2."
        )
    if has_failed:
        words += (
            " Hollow marks are medians, without intervals: networks failed in that cell, or in DCL-A2's, and would "
            "decide its mean."
        )
    return words


def _draw_errors(axes: "Axes", task: str, by_column: _Curves, theme: canvas.Theme) -> None:
    canvas.dress(axes, theme)
    axes.set_title(TASKS[task].title, loc="left", size=canvas.BODY, color=theme.text, pad=5, weight="bold")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for column, by_size in sorted(by_column.items(), key=lambda item: item[0] == DCL):  # DCL-A2 on top
        colour, mark = canvas.look_of(column, theme)
        places = sorted(by_size)
        middles = [by_size[images].middle for images in places]
        width, dashes = _line_of(column)
        has_band = all(len(by_size[images].errors) > 1 for images in places)
        for few, many in zip(places, places[1:] or places, strict=False) if has_band else ():
            _draw_band(axes, {images: by_size[images] for images in (few, many)}, colour, floor=min(middles) / 10)
        axes.plot(
            places, middles, color=colour, lw=width, ls=dashes, zorder=3, gid=canvas.id_of(task, column),
            label=canvas.title_of(column),
        )  # fmt: skip
        for images in places:
            _mark(axes, images, by_size[images].middle, colour, mark, theme, hollow=by_size[images].failed)
    canvas.decades(axes.yaxis, (1, 1.5, 2, 3, 4, 5, 7))


def _draw_band(axes: "Axes", ends: Mapping[int, _Cell], colour: str, floor: float) -> None:
    """The intervals of two neighbouring sizes, joined; none where networks failed in one of them."""
    if any(cell.failed for cell in ends.values()):
        return
    bounds = [interval(cell.errors) for cell in ends.values()]
    floor = floor or 1e-3  # an interval may reach below 0, which has no logarithm
    axes.fill_between(
        list(ends), [max(low, floor) for low, _ in bounds], [max(high, floor) for _, high in bounds], color=colour,
        alpha=0.16, lw=0,
    )  # fmt: skip


def _draw_differences(axes: "Axes", by_column: _Curves, compared: Sequence[Compared], theme: canvas.Theme) -> None:
    """Every column's difference to DCL-A2 in percent of DCL-A2's error, side by side at each size."""
    canvas.dress(axes, theme)
    axes.set_xscale("log")
    sizes = sorted({each.images for each in compared})
    for few, many in pairwise(sizes):
        axes.axvline(math.sqrt(few * many), color=theme.grid, lw=0.6, zorder=1)
    axes.axhline(0, color=canvas.look_of(DCL, theme)[0], lw=1.2, zorder=2)
    others = [column for column in by_column if column != DCL]
    for each in compared:
        colour, mark = canvas.look_of(each.column, theme)
        ours, theirs = by_column[DCL][each.images], by_column[each.column][each.images]
        place = each.images * math.exp(STEP * (others.index(each.column) - (len(others) - 1) / 2))
        if hollow := ours.failed or theirs.failed:
            share = 100 / (median(ours.errors) or 1)
            middle = share * (median(theirs.errors) - median(ours.errors))
        else:
            share = 100 / (fmean(ours.errors) or 1)
            middle = share * each.gap.mean
            axes.vlines(place, share * each.gap.low, share * each.gap.high, color=colour, lw=1.0, zorder=3)
        _mark(axes, place, middle, colour, mark, theme, hollow=hollow)
        if each.clear:
            up = middle > 0
            end = middle if hollow else share * (each.gap.high if up else each.gap.low)
            axes.annotate(
                "*", (place, end), (0, 1 if up else -8), textcoords="offset points", ha="center", va="bottom",
                color=theme.text, size=canvas.BODY,
            )  # fmt: skip
    axes.margins(y=0.14)


def _mark(axes: "Axes", x: float, y: float, colour: str, mark: str, theme: canvas.Theme, *, hollow: bool) -> None:
    axes.plot(
        [x], [y], marker=mark, ls="", ms=3.8, color=colour, zorder=5, mfc=theme.page if hollow else colour,
        mec=colour if hollow else theme.page, mew=0.9 if hollow else 0.5, label="_failed" if hollow else "_mark",
    )  # fmt: skip


def _dress_sizes(panels: Sequence["Axes"], by_column: _Curves) -> None:
    """The numbers of images below the panels of a task."""
    from matplotlib.ticker import NullLocator

    sizes = sorted({images for by_size in by_column.values() for images in by_size})
    for axes in panels:
        axes.set_xlim(sizes[0] / 1.7, sizes[-1] * 1.7)
        axes.set_xticks(sizes, [f"{images:,}" for images in sizes])
        axes.xaxis.set_minor_locator(NullLocator())
    panels[-1].set_xlabel("images to train on", labelpad=2)


def _line_of(column: str) -> tuple[float, Any]:
    """Width and dashes of a column's line."""
    return 1.7 if column == DCL else 1.0, canvas.DASHES if column in DASHED else "-"


def _add_legend(figure: "Figure", columns: Sequence[str], theme: canvas.Theme, *, has_failed: bool) -> None:
    from matplotlib.lines import Line2D

    handles, labels = [], [canvas.title_of(column) for column in columns]
    for column in columns:
        (colour, mark), (width, dashes) = canvas.look_of(column, theme), _line_of(column)
        handles.append(
            Line2D([], [], color=colour, lw=width, ls=dashes, marker=mark, ms=3.8, mec=theme.page, mew=0.5)
        )  # fmt: skip
    if has_failed:
        handles.append(Line2D([], [], ls="", marker="o", ms=3.8, mfc=theme.page, mec=theme.muted, mew=0.9))
        labels.append("median (networks failed)")
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=canvas.SMALL,
        labelcolor=theme.text, handlelength=2.2, columnspacing=1.0, handletextpad=0.5,
    )  # fmt: skip
