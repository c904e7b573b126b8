"""Differences to the baseline, set by set."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch_dcl.report.figures.canvas import (
    _BODY,
    _COLUMN,
    _INCH,
    _PAGE,
    _dress,
    _get,
    _id,
    _layout,
    _numbers,
    _style,
    _Theme,
    _theme,
)
from torch_dcl.report.figures.lines import _title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["differences_figure"]


def differences_figure(cells: Sequence[Mapping[str, Any]], *, dark: bool = False) -> "Figure":
    """Draw how much each DCL network differs from the baseline on each set, beside what the paper reports.

    One panel a column of the paper's table, one row a set. A dot is our paired difference of the error rates with its
    95 % interval, filled where the interval leaves out zero; a hollow diamond is the paper's.

    Args:
        cells: ``{"set", "column", "difference", "low", "high", "paper_difference"}`` each, in percentage points;
            ``low``, ``high`` and ``paper_difference`` may be None. Rows and panels come in the order in which sets and
            columns first appear.
        dark: For a dark page.

    Raises:
        ValueError: a cell is missing something, is there twice, or has an interval without its difference in it.
    """
    where = "differences_figure"
    table = _cells(cells, where)
    sets, columns = (list(dict.fromkeys(key[i] for key in table)) for i in (0, 1))
    theme = _theme(dark)
    with _style():
        from matplotlib.figure import Figure

        groups = _groups(columns)
        most = max(len(group) for group in groups)
        width = _PAGE if most > 2 else _COLUMN
        height = (14 + len(groups) * (9 + 4.0 * len(sets))) / _INCH
        figure = Figure(figsize=(width, height), facecolor="none", layout=_layout(wspace=0.03, hspace=0.05))
        figure.set_gid("differences")
        panels = figure.subplots(len(groups), most, sharey=True, sharex="row", squeeze=False)
        for row, group in zip(panels, groups, strict=True):
            for axes in row[len(group) :]:
                axes.set_visible(False)
            here = {key: cell for key, cell in table.items() if key[1] in group}
            for axes, column in zip(row, group, strict=False):
                _forest(axes, column, sets, here, theme)
        panels[0][0].set_yticks(range(len(sets)), sets)
        panels[0][0].set_ylim(len(sets) - 0.4, -0.6)
        _differences_words(figure, "\n" if most < 3 else " ", theme)
        figure.set_label(
            "Error rate of DCL minus error rate of the baseline, in percentage points; left of zero DCL is better. "
            "Dots are means of paired differences, bars their 95 % intervals; a dot is filled where the "
            "interval leaves out zero. Diamonds are the differences that the paper reports."
        )
    return figure


def _groups(columns: Sequence[str]) -> list[list[str]]:
    """Columns that go into one row of panels: those of one replaced layer, A or B, and the others."""
    groups: dict[str, list[str]] = {}
    for column in columns:
        groups.setdefault(column[0] if _title(column) != column else "", []).append(column)
    return list(groups.values())


def _forest(
    axes: "Axes",
    column: str,
    sets: Sequence[str],
    table: Mapping[tuple[str, str], Mapping[str, float | None]],
    theme: _Theme,
) -> None:
    """One panel: a row a set, around the line of no difference."""
    from matplotlib.ticker import MaxNLocator

    _dress(axes, theme, grid=False)
    axes.set_title(_title(column), size=_BODY, weight="bold", color=theme.text, pad=4)
    axes.axvline(0, color=theme.edge, lw=0.9, zorder=1, gid=_id("zero", column))
    axes.xaxis.grid(visible=True, color=theme.grid, lw=0.6, zorder=0)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0, labelcolor=theme.text)
    for row, name in enumerate(sets):
        if (name, column) in table:
            _difference(axes, row, table[name, column], theme)
        if row and name.rpartition("-")[0] != sets[row - 1].rpartition("-")[0]:
            axes.axhline(row - 0.5, color=theme.bar, lw=0.6, zorder=0)
    values = [value for cell in table.values() for value in cell.values() if value is not None]
    low, high = min(*values, 0), max(*values, 0)
    margin = 0.06 * (high - low or 1)
    axes.set_xlim(low - margin, high + margin)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}".replace("-", "−"))


def _difference(axes: "Axes", row: int, cell: Mapping[str, Any], theme: _Theme) -> None:
    """One row of a panel."""
    difference, low, high, paper = (cell[key] for key in ("difference", "low", "high", "paper_difference"))
    clear = low is not None and high is not None and not low <= 0 <= high
    if paper is not None:
        axes.plot(paper, row, "D", ms=4.8, mfc="none", mec=theme.orange, mew=1.0, zorder=5)
    if low is not None and high is not None:
        axes.plot((low, high), (row, row), color=theme.blue, lw=1.5, solid_capstyle="butt", zorder=3)
    axes.plot(difference, row, "o", ms=3.6, mfc=theme.blue if clear else theme.page, mec=theme.blue, mew=1.0, zorder=4)


def _differences_words(figure: "Figure", space: str, theme: _Theme) -> None:
    """What the axis means, below, and what the marks mean, above; `space` may break the line."""
    from matplotlib.lines import Line2D

    words = f"error rate of DCL minus baseline (percentage points),{space}left of 0 is better"
    figure.supxlabel(words, size=_BODY, color=theme.text, linespacing=1.35)
    ours = Line2D([], [], color=theme.blue, lw=1.5, marker="o", ms=3.6, label="measured, 95 % interval")
    paper = Line2D([], [], ls="", marker="D", ms=4.8, mfc="none", mec=theme.orange, label="paper")
    figure.legend(
        handles=[ours, paper], loc="outside upper right", ncols=2, frameon=False, labelcolor=theme.muted,
        fontsize=_BODY, handlelength=2.0, columnspacing=1.4, borderpad=0, borderaxespad=0.2,
    )  # fmt: skip


def _cells(cells: Sequence[Mapping[str, Any]], where: str) -> dict[tuple[str, str], dict[str, float | None]]:
    """Check the cells, and give them by set and column."""
    if not cells:
        raise ValueError(f"{where}: there are no cells; give at least one")
    table: dict[tuple[str, str], dict[str, float | None]] = {}
    for cell in cells:
        key = str(_get(cell, "set", where)), str(_get(cell, "column", where))
        place = f"{where}, {key[0]} {key[1]}"
        if key in table:
            raise ValueError(f"{place}: the cell is there twice; give one a set and column")
        number = _numbers([_get(cell, "difference", place)], "difference", place)[0]
        ends: list[float | None] = []
        for name in ("low", "high", "paper_difference"):
            value = _get(cell, name, place)
            ends.append(None if value is None else _numbers([value], name, place)[0])
        low, high, paper = ends
        if (low is None) != (high is None):
            raise ValueError(f"{place}: low is {low} and high is {high}; give both, or None for both")
        if low is not None and high is not None and not low <= number <= high:
            raise ValueError(f"{place}: the difference {number} is outside of its interval {low} to {high}")
        table[key] = {"difference": number, "low": low, "high": high, "paper_difference": paper}
    return table
