"""What a filter and its branches respond to."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch_dcl.experiments.complementary import Complementary, pick_rule
from torch_dcl.report.figures.canvas import _COLUMN, _INCH, _PAGE, _SMALL, _dress, _id, _style, _Theme, _theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["complementary_figure"]


def complementary_figure(found: Complementary, *, title: str = "", dark: bool = False) -> "Figure":
    """Draw what one fused filter and its branches answer to: the paper's figure of section 4.1.4.

    Above, the mean fused response of every class, the highest in red. Below, a row for each branch and a column for
    each digit of the number: the branch's mean response by digit. Its highest is red. Where the digit of the fused
    maximum is another one, that is green.

    Args:
        found: What :func:`torch_dcl.experiments.complementary.complementary` gives.
        title: What stands above, for example "DCL-A2 on MNIST-II-05".
        dark: For a dark page.
    """
    theme = _theme(dark)
    branches, positions = found.by_digit.shape[:2]
    top, row, gap, head, foot = 21.0, 14.5, 9.5, 9.5 if title else 5.0, 6.0  # mm
    if found.digits == 1 and _long(found.names) and len(found.names) <= 12:
        gap, foot = gap + 4, foot + 5
    height = head + top + branches * (row + gap) + foot
    left, right, between = 11.0, 1.5, 6.5
    width = (_COLUMN if positions < 3 else _PAGE) * _INCH
    panel = (width - left - right - between * (positions - 1)) / positions
    with _style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width / _INCH, height / _INCH), facecolor="none")
        figure.set_gid("complementary")

        def panel_at(x: float, y: float, wide: float, high: float) -> "Axes":
            """Axes with the upper left corner at (x, y) in mm."""
            axes: Axes = figure.add_axes((x / width, 1 - (y + high) / height, wide / width, high / height))
            _dress(axes, theme, grid=False)
            return axes

        if title:
            figure.text(left / width, 1 - 1.2 / height, title, weight="bold", va="top", color=theme.text)
        axes = panel_at(left, head, width - left - right, top)
        _bars(axes, "fused", found.fused.tolist(), found.names, found.highest, None, theme)
        _heading(axes, f"fused response z, filter {found.filter} of {found.layer}", theme)
        if found.digits > 1 or not _long(found.names):
            axes.set_xlabel("number" if found.digits > 1 else "class", labelpad=1, size=_SMALL, color=theme.muted)
        names = ["first", "second", "third", "fourth"][:positions] if positions != 2 else ["tens", "units"]
        for t in range(branches):
            scale = float(found.by_digit[t].nan_to_num(0).max())
            for position in range(positions):
                y = head + top + gap + 1.5 + t * (row + gap)
                axes = panel_at(left + position * (panel + between), y, panel, row)
                own, part = found.own[t][position], found.parts[position]
                labels = [str(digit) for digit in range(10)] if found.digits > 1 else found.names
                means = found.by_digit[t, position].tolist()
                _bars(
                    axes,
                    _id("branch", t + 1, position + 1),
                    means,
                    labels,
                    own,
                    part if part != own else None,
                    theme,
                    scale,
                )
                by = f", {names[position]} digit" if found.digits > 1 else ""
                first = f"branch {t + 1}, v{_raised(t + 1)}" if position == 0 else f"v{_raised(t + 1)}"
                _heading(axes, f"{first}{by}", theme)
                if position:
                    axes.tick_params(labelleft=False)
        figure.text(
            1.2 / width, 0.5, "mean response", rotation=90, va="center", ha="left", color=theme.muted, size=_SMALL
        )
    figure.set_label(_complementary_caption(found, title))
    return figure


def _complementary_caption(found: Complementary, title: str) -> str:
    what = "number" if found.digits > 1 else "class"
    unit = "digit at each position of the number" if found.digits > 1 else "class"
    chosen = f" The filter was chosen by a rule: {pick_rule(found.digits)}." if found.picked else ""
    return (
        f"Mean responses of filter {found.filter} (from 0) of {found.layer}{' in ' + title if title else ''}, over "
        f"{found.images:,} images. Above: the fused response z by {what}; it is highest for "
        f"{found.names[found.highest]} (red). Below: the response of each branch by {unit}. Red marks the highest of "
        f"each plot; green marks the {'digit' if found.digits > 1 else 'class'} that contributes to the highest fused "
        f"response, where it is another one.{chosen}"
    )


def _bars(
    axes: "Axes",
    name: str,
    means: Sequence[float],
    names: Sequence[str],
    highest: int,
    part: int | None,
    theme: _Theme,
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
        axes.bar(i, plain[i], 0.78, fc=fill, ec=colour, lw=edge, zorder=3, gid=_id(name, kind, i))
        if step > 1 or not _long(names):
            axes.annotate(
                names[i], (i, plain[i]), (0, 1.2), textcoords="offset points", ha="center", va="bottom", color=colour,
                weight="bold", size=_SMALL, annotation_clip=False,
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


def _heading(axes: "Axes", words: str, theme: _Theme) -> None:
    axes.set_title(words, loc="left", size=_SMALL, color=theme.text, pad=3)


def _raised(number: int) -> str:
    """The paper's index of a branch: v⁽¹⁾."""
    return f"⁽{str(number).translate(str.maketrans('0123456789', '⁰¹²³⁴⁵⁶⁷⁸⁹'))}⁾"
