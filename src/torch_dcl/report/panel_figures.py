"""Figures of several panels: what a filter and its branches respond to, and differences to the baseline."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch_dcl.experiments.complementary import Complementary, pick_rule
from torch_dcl.experiments.settings import Reader, is_number, is_text
from torch_dcl.report import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["complementary_figure", "differences_figure"]


def complementary_figure(response: Complementary, *, title: str = "", dark: bool = False) -> "Figure":
    """Draw what one fused filter and its branches respond to: the paper's figure of section 4.1.4.

    Above, the mean fused response of every class, the highest in red. Below, a row for each branch and a column for
    each digit of the number: the branch's mean response by digit. Its highest is red. Where the digit of the fused
    maximum is another one, that is green.
    """
    theme = canvas.theme_of(dark)
    branches, positions = response.by_digit.shape[:2]
    top, row, gap, head, foot = 21.0, 14.5, 9.5, 9.5 if title else 5.0, 6.0  # mm
    if response.digits == 1 and _long(response.names) and len(response.names) <= 12:
        gap, foot = gap + 4, foot + 5
    height = head + top + branches * (row + gap) + foot
    left, right, between = 11.0, 1.5, 6.5
    width = canvas.COLUMN if positions < 3 else canvas.PAGE
    panel = (width - left - right - between * (positions - 1)) / positions
    with canvas.style():
        figure = canvas.empty("complementary", width, height)

        def panel_at(x: float, y: float, wide: float, high: float) -> "Axes":
            """Axes with the upper left corner at (x, y) in mm."""
            axes: Axes = figure.add_axes((x / width, 1 - (y + high) / height, wide / width, high / height))
            canvas.dress(axes, theme, grid=False)
            return axes

        if title:
            figure.text(left / width, 1 - 1.2 / height, title, weight="bold", va="top", color=theme.text)
        axes = panel_at(left, head, width - left - right, top)
        _bars(axes, "fused", response.fused.tolist(), response.names, response.highest, None, theme)
        _heading(axes, f"fused response z, filter {response.filter} of {response.layer}", theme)
        if response.digits > 1 or not _long(response.names):
            axes.set_xlabel(
                "number" if response.digits > 1 else "class", labelpad=1, size=canvas.SMALL, color=theme.muted
            )
        names = ["first", "second", "third", "fourth"][:positions] if positions != 2 else ["tens", "units"]
        for t in range(branches):
            scale = float(response.by_digit[t].nan_to_num(0).max())
            for position in range(positions):
                y = head + top + gap + 1.5 + t * (row + gap)
                axes = panel_at(left + position * (panel + between), y, panel, row)
                own, part = response.own[t][position], response.parts[position]
                labels = [str(digit) for digit in range(10)] if response.digits > 1 else response.names
                means = response.by_digit[t, position].tolist()
                _bars(
                    axes,
                    canvas.id_of("branch", t + 1, position + 1),
                    means,
                    labels,
                    own,
                    part if part != own else None,
                    theme,
                    scale,
                )
                by = f", {names[position]} digit" if response.digits > 1 else ""
                first = f"branch {t + 1}, v{_raised(t + 1)}" if position == 0 else f"v{_raised(t + 1)}"
                _heading(axes, f"{first}{by}", theme)
                if position:
                    axes.tick_params(labelleft=False)
        figure.text(
            1.2 / width, 0.5, "mean response", rotation=90, va="center", ha="left", color=theme.muted, size=canvas.SMALL
        )
    figure.set_label(_complementary_caption(response, title))
    return figure


def _complementary_caption(response: Complementary, title: str) -> str:
    what = "number" if response.digits > 1 else "class"
    unit = "digit at each position of the number" if response.digits > 1 else "class"
    chosen = f" The filter was chosen by a rule: {pick_rule(response.digits)}." if response.picked else ""
    place = f"{response.layer}{' in ' + title if title else ''}"
    return (
        f"Mean responses of filter {response.filter} (from 0) of {place}, over {response.images:,} images. Above: the "
        f"fused response z by {what}; it is highest for {response.names[response.highest]} (red). Below: the response "
        f"of each branch by {unit}. Red marks the highest of each plot; green marks the "
        f"{'digit' if response.digits > 1 else 'class'} that contributes to the highest fused response, where it is "
        f"another one.{chosen}"
    )


def _bars(
    axes: "Axes",
    name: str,
    means: Sequence[float],
    names: Sequence[str],
    highest: int,
    part: int | None,
    theme: canvas.Theme,
    scale: float | None = None,
) -> None:
    """Bars of mean responses: the highest red, and the one that takes part in the fused maximum green."""
    count = len(means)
    step = 1 if count <= 12 else 10 ** (len(str(count - 1)) - 1)
    marked = {highest: theme.red} | ({part: theme.green} if part is not None else {})
    plain = [0.0 if math.isnan(mean) else mean for mean in means]
    rest = [i for i in range(count) if i not in marked]
    axes.bar(rest, [plain[i] for i in rest], 0.78 if count <= 100 else 1.0, color=theme.bar, lw=0)
    for i, colour in marked.items():
        kind = "highest" if i == highest else "contributes"
        # The highest is full and the other pale inside an edge. An edge also keeps a bar visible among a thousand.
        fill = (colour, 1.0 if i == highest else 0.35)
        edge = 0.9 if count > 20 or i != highest else 0
        axes.bar(i, plain[i], 0.78, fc=fill, ec=colour, lw=edge, zorder=3, gid=canvas.id_of(name, kind, i))
        if step > 1 or not _long(names):
            axes.annotate(
                names[i], (i, plain[i]), (0, 1.2), textcoords="offset points", ha="center", va="bottom", color=colour,
                weight="bold", size=canvas.SMALL, annotation_clip=False,
            )  # fmt: skip
    limit = scale if scale is not None else max(plain)
    axes.set(xlim=(-0.7, count - 0.3), ylim=(0, 1.28 * limit or 1))
    places = list(range(0, count, step))
    if not _long(names):
        axes.set_xticks(places, [names[i] for i in places])
    elif step == 1:
        for i, label in enumerate(axes.set_xticks(places, names, rotation=30, ha="right", rotation_mode="anchor")):
            label.label1.set(color=marked.get(i, theme.muted), weight="bold" if i in marked else "normal")
    else:
        axes.set_xticks(places, [str(i) for i in places])
    axes.tick_params(axis="x", length=2 if count > 12 else 0, pad=1.5)
    nice = _nice(limit)
    axes.set_yticks([0, nice], ["0", f"{nice:g}"])


def _long(names: Sequence[str]) -> bool:
    """Whether names are too long to stand side by side under bars."""
    return max(len(name) for name in names) > 3


def _nice(limit: float) -> float:
    """The largest of 1, 2, 5 times a power of ten that is no higher."""
    if limit <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(limit))
    return next(float(f"{factor * power:.1g}") for factor in (5, 2, 1, 0.5) if factor * power <= limit)


def _heading(axes: "Axes", words: str, theme: canvas.Theme) -> None:
    axes.set_title(words, loc="left", size=canvas.SMALL, color=theme.text, pad=3)


def _raised(number: int) -> str:
    """The paper's index of a branch: v⁽¹⁾."""
    return f"⁽{str(number).translate(str.maketrans('0123456789', '⁰¹²³⁴⁵⁶⁷⁸⁹'))}⁾"


# Differences to the baseline


def differences_figure(cells: Sequence[Mapping[str, Any]], *, dark: bool = False) -> "Figure":
    """Draw how much each DCL network differs from the baseline on each set, beside what the paper reports.

    One panel a column of the paper's table, one row a set. A dot is our paired difference of the error rates with its
    95 % interval, filled where the interval leaves out zero; a hollow diamond is the paper's.

    Cells have ``set``, ``column``, ``difference``, ``low``, ``high`` and ``paper_difference``, in percentage points;
    the last three may be None. Rows and panels come in the order in which sets and columns first appear.
    """
    where = "differences_figure"
    table = _cells(cells, where)
    sets, columns = (list(dict.fromkeys(key[i] for key in table)) for i in (0, 1))
    theme = canvas.theme_of(dark)
    with canvas.style():
        groups = _groups(columns)
        most = max(len(group) for group in groups)
        width = canvas.PAGE if most > 2 else canvas.COLUMN
        height = 14 + len(groups) * (9 + 4.0 * len(sets))
        figure = canvas.empty("differences", width, height, canvas.layout(wspace=0.03, hspace=0.05))
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
        groups.setdefault(column[0] if canvas.title_of(column) != column else "", []).append(column)
    return list(groups.values())


def _forest(
    axes: "Axes",
    column: str,
    sets: Sequence[str],
    table: Mapping[tuple[str, str], Mapping[str, float | None]],
    theme: canvas.Theme,
) -> None:
    """One panel: a row a set, around the line of no difference."""
    from matplotlib.ticker import MaxNLocator

    canvas.dress(axes, theme, grid=False)
    axes.set_title(canvas.title_of(column), size=canvas.BODY, weight="bold", color=theme.text, pad=4)
    axes.axvline(0, color=theme.edge, lw=0.9, zorder=1, gid=canvas.id_of("zero", column))
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


def _difference(axes: "Axes", row: int, cell: Mapping[str, Any], theme: canvas.Theme) -> None:
    """One row of a panel."""
    difference, low, high, paper = (cell[key] for key in ("difference", "low", "high", "paper_difference"))
    clear = low is not None and high is not None and not low <= 0 <= high
    if paper is not None:
        axes.plot(paper, row, "D", ms=4.8, mfc="none", mec=theme.orange, mew=1.0, zorder=5)
    if low is not None and high is not None:
        axes.plot((low, high), (row, row), color=theme.blue, lw=1.5, solid_capstyle="butt", zorder=3)
    axes.plot(difference, row, "o", ms=3.6, mfc=theme.blue if clear else theme.page, mec=theme.blue, mew=1.0, zorder=4)


def _differences_words(figure: "Figure", space: str, theme: canvas.Theme) -> None:
    """What the axis means, below, and what the marks mean, above; `space` may break the line."""
    from matplotlib.lines import Line2D

    words = f"error rate of DCL minus baseline (percentage points),{space}left of 0 is better"
    figure.supxlabel(words, size=canvas.BODY, color=theme.text, linespacing=1.35)
    ours = Line2D([], [], color=theme.blue, lw=1.5, marker="o", ms=3.6, label="measured, 95 % interval")
    paper = Line2D([], [], ls="", marker="D", ms=4.8, mfc="none", mec=theme.orange, label="paper")
    figure.legend(
        handles=[ours, paper], loc="outside upper right", ncols=2, frameon=False, labelcolor=theme.muted,
        fontsize=canvas.BODY, handlelength=2.0, columnspacing=1.4, borderpad=0, borderaxespad=0.2,
    )  # fmt: skip


def _cells(cells: Sequence[Mapping[str, Any]], where: str) -> dict[tuple[str, str], dict[str, float | None]]:
    """Check the cells, and give them by set and column."""
    if not cells:
        raise ValueError(f"{where}: there are no cells; give at least one")
    table: dict[tuple[str, str], dict[str, float | None]] = {}
    for cell in cells:
        read = Reader(where, cell)
        key = read.get("set", is_text, "its name"), read.get("column", is_text, "its name")
        read.place += f", {key[0]} {key[1]}"
        if key in table:
            read.refuse("the cell is there twice; give one a set and column")
        number = read.get("difference", is_number, "a number")
        ends = {
            name: read.get(name, lambda v: v is None or is_number(v), "a number or None")
            for name in ("low", "high", "paper_difference")
        }
        low, high = ends["low"], ends["high"]
        if (low is None) != (high is None):
            read.refuse(f"low is {low} and high is {high}; give both, or None for both")
        if low is not None and not low <= number <= high:
            read.refuse(f"the difference {number} is outside of its interval {low} to {high}")
        table[key] = {"difference": number, **ends}
    return table
