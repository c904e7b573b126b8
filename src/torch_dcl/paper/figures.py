"""The paper's figures, drawn from measured numbers.

Every function gives a matplotlib figure that is readable at the width of a column (85 mm) on paper and in a browser, on
a light or a dark page, with a transparent background. The words for the caption travel with the figure, as its label:
``figure.get_label()``. :func:`save` writes SVG, PDF or PNG, :func:`svg` gives the text to put into an HTML page. The
bytes depend on nothing but the numbers and the version of matplotlib.

Colours are those of Okabe and Ito, which stay apart for colour-blind readers, and no colour is the only sign of what it
means. matplotlib is imported when a figure is drawn.
"""

import html
import io
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from torch_dcl.files import replacing, write_text
from torch_dcl.paper.complementary import Complementary, pick_rule
from torch_dcl.paper.statistics import interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["complementary_figure", "curves_figure", "differences_figure", "filters_figure", "save", "svg"]

_INCH = 25.4  # mm
_COLUMN, _PAGE = 85 / _INCH, 175 / _INCH  # widths in inches: one column, and two
_BODY, _SMALL = 7.5, 6.5  # font sizes in points
_FONTS = ["DejaVu Sans", "Verdana", "Geneva", "sans-serif"]  # of one width, so that labels keep their room
_DASHES = (0, (4, 2.2))


@dataclass(frozen=True)
class _Theme:
    page: str  # what the figure will stand on; only to mix tints with
    text: str
    muted: str
    edge: str  # axes
    grid: str
    bar: str
    blue: str
    orange: str
    green: str
    red: str
    purple: str
    sky: str


_LIGHT = _Theme(
    "#ffffff", "#1f2328", "#59636e", "#8c959f", "#e4e8ec", "#afb8c1",
    "#0072b2", "#d98200", "#00795a", "#cc3311", "#aa4499", "#3a9bd1",
)  # fmt: skip
_DARK = _Theme(
    "#0d1117", "#f0f6fc", "#9198a1", "#656c76", "#262c34", "#5b646f",
    "#56b4e9", "#f0a24a", "#2dbd94", "#ff6f52", "#e08ad0", "#9fd4f2",
)  # fmt: skip


# Saving


def svg(figure: "Figure", *, name: str | None = None) -> str:
    """Give a figure as SVG for a place inside an HTML page: without XML header, with ids that no other figure has.

    Text stays text, so it can be searched, selected and read aloud. A screen reader reads the caption.

    Args:
        figure: From one of the functions of this module.
        name: What its ids begin with. None takes the kind of the figure; a page with two of a kind, or with a light and
            a dark one, needs two names.

    Returns:
        One ``<svg>`` element. Its width is the one on paper; the page may set another in CSS.

    Raises:
        ValueError: ``name`` is no plain word.
    """
    text = _svg_file(figure)
    prefix = name or figure.get_gid() or "figure"
    if not re.fullmatch(r"[A-Za-z][\w-]*", prefix):
        raise ValueError(f"name {prefix!r} cannot begin ids; use letters, digits and hyphens, a letter first")
    text = re.sub(r"\n *<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(str(figure.get_label()))}" ', 1)


def save(figure: "Figure", path: str | os.PathLike[str]) -> None:
    """Write a figure as SVG, PDF or PNG, all or nothing; the same numbers give the same bytes.

    Args:
        figure: From one of the functions of this module.
        path: Ends in ``.svg``, ``.pdf`` or ``.png`` (300 dots an inch). Its folder must exist.

    Raises:
        ValueError: another ending.
        OSError: the folder does not exist, or cannot be written to.
    """
    suffix = Path(path).suffix.lower()
    if suffix == ".svg":
        write_text(path, _svg_file(figure))
    elif suffix in (".pdf", ".png"):
        empty = ("CreationDate", "Creator", "Producer") if suffix == ".pdf" else ("Software",)
        with _style(), replacing(path) as fresh:
            figure.savefig(fresh, format=suffix[1:], dpi=300, metadata=dict.fromkeys(empty))
    else:
        raise ValueError(f"cannot write a figure as {os.fspath(path)!r}; choose a name that ends in .svg, .pdf or .png")


def _svg_file(figure: "Figure") -> str:
    caption = str(figure.get_label())
    with _style(), io.StringIO() as file:
        metadata = {"Date": None, "Creator": None, "Description": caption, "Title": caption.partition(". ")[0]}
        figure.savefig(file, format="svg", metadata=metadata)
        text = file.getvalue()
    # matplotlib leaves spaces at the ends of some lines.
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def _style() -> AbstractContextManager[None]:
    """Settings for drawing and for saving, which must be the same: tick labels are only made when a figure is drawn."""
    import matplotlib as mpl  # noqa: PLC0415

    return mpl.rc_context(
        {
            "font.family": "sans-serif",
            "font.sans-serif": _FONTS,
            "font.size": _BODY,
            "mathtext.fontset": "dejavusans",
            "svg.fonttype": "none",
            "svg.hashsalt": "torch-dcl",
            "pdf.fonttype": 42,
            "axes.unicode_minus": True,
            "path.simplify": True,
        }
    )


# Filters


def filters_figure(data: Mapping[str, Any], *, dark: bool = False) -> "Figure":
    """Draw accuracy against filters per branch, and the baseline as a dashed line: the paper's figure in 4.1.3.

    Args:
        data: ``{"set": "MNIST-III-10", "baseline": {"errors": [...]}, "points": [{"filters": 100, "errors": [...],
            "weights": 905000}, ...]}``. Errors are in percent, one a seed; ``weights`` may be missing.
        dark: For a dark page.

    Raises:
        ValueError: something is missing, empty or out of range.
    """
    from matplotlib.ticker import NullLocator  # noqa: PLC0415

    where = "filters_figure"
    points = sorted(_list(data, "points", where), key=lambda point: int(_get(point, "filters", where)))
    widths = [int(point["filters"]) for point in points]
    if len(set(widths)) < len(widths) or widths[0] < 1:
        raise ValueError(f"{where}: filters must be different and at least 1, got {widths}; merge the errors of equals")
    seeds = [_accuracies(point, f"{where}, {point['filters']} filters") for point in points]
    base = _accuracies(_get(data, "baseline", where), f"{where}, baseline")
    theme = _theme(dark)
    with _style():
        figure, axes = _figure("filters", _COLUMN, 58 / _INCH, theme)
        place = dict(zip(widths, _places(widths), strict=True))
        axes.set_xlim(-0.35, max(place.values()) + 0.35)
        middle, half = fmean(base), _half_width(base)
        if half:
            axes.axhspan(middle - half, middle + half, color=theme.muted, alpha=0.13, lw=0)
        axes.axhline(middle, color=theme.text, lw=1.1, ls=_DASHES, gid="baseline")
        means = [fmean(values) for values in seeds]
        axes.plot(list(place.values()), means, color=theme.blue, lw=1.3, zorder=3)
        for x, mean, values in zip(place.values(), means, seeds, strict=True):
            if len(values) > 1:
                axes.errorbar(x, mean, _half_width(values), color=theme.blue, lw=1.1, capsize=2.2, capthick=1.1)
            spread = [x + 0.15] * len(values)
            axes.plot(spread, values, "o", ms=2.1, mfc=theme.blue, mec="none", alpha=0.55, zorder=2)
            axes.plot(x, mean, "o", ms=4.4, mfc=theme.blue, mec=theme.page, mew=0.7, zorder=4)
        labels = [f"{point['filters']}\n{_short(point.get('weights'))}".rstrip() for point in points]
        axes.set_xticks(list(place.values()), labels, linespacing=1.35)
        axes.xaxis.set_minor_locator(NullLocator())
        second = "\nweights of the network (millions)" if any(point.get("weights") for point in points) else ""
        axes.set_xlabel(f"filters per branch{second}", linespacing=1.35)
        axes.set_ylabel("test accuracy (%)")
        _room(axes, [*base, *(a for values in seeds for a in values)], (middle - half, middle + half))
        ends = [(middle, "baseline", theme.text), (means[-1], "DCL-A2", theme.blue)]
        _end_labels(figure, axes, ends, axes.get_xlim()[1])
        many = _n([base, *seeds])
        figure.set_label(
            f"Test accuracy (%) of DCL-A2 on {_get(data, 'set', where)} with different numbers of filters per branch. "
            f"Large dots are means over {many}, small dots are seeds, bars are 95 % t-intervals of the mean. The "
            "dashed line is the mean of the baseline, the band its 95 % interval."
        )
    return figure


def _places(widths: Sequence[int]) -> list[float]:
    """Where numbers of filters stand: by their logarithm, neighbours one unit apart on average."""
    if len(widths) == 1:
        return [0.0]
    first, span = math.log(widths[0]), math.log(widths[-1] / widths[0])
    return [(math.log(width) - first) / span * (len(widths) - 1) for width in widths]


# Curves


def curves_figure(data: Mapping[str, Any], *, dark: bool = False) -> "Figure":
    """Draw training and test loss by epoch, one colour a network: the paper's loss curves of section 4.1.3.

    Args:
        data: ``{"set": "MNIST-III-10", "series": {"baseline": {"train_loss": [[...], ...], "test_loss": [[...],
            ...]}, "A2": ..., ...}}``: one list a seed, one number an epoch.
        dark: For a dark page.

    Raises:
        ValueError: something is missing, empty, not finite or of unequal length.
    """
    from matplotlib.lines import Line2D  # noqa: PLC0415
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    where = "curves_figure"
    series = _get(data, "series", where)
    if not series:
        raise ValueError(f"{where}: series is empty; give at least the baseline")
    curves = {
        name: {kind: _curves(runs, kind, f"{where}, {name}") for kind in ("train_loss", "test_loss")}
        for name, runs in series.items()
    }
    theme = _theme(dark)
    values = [v for kinds in curves.values() for seeds in kinds.values() for seed in seeds for v in seed]
    epochs = max(len(seed) for kinds in curves.values() for seeds in kinds.values() for seed in seeds)
    with _style():
        figure, axes = _figure("curves", _COLUMN, 64 / _INCH, theme)
        logarithmic = min(values) > 0 and max(values) / min(values) > 5
        if logarithmic:
            axes.set_yscale("log")
        ends: list[tuple[float, str, str]] = []
        for name, colour in zip(curves, _series_colours(curves, theme), strict=True):
            for kind, width, dashes in (("train_loss", 0.8, _DASHES), ("test_loss", 1.5, "-")):
                seeds = curves[name][kind]
                steps = range(1, len(seeds[0]) + 1)
                by_epoch = list(zip(*seeds, strict=True))
                mean = [fmean(epoch) for epoch in by_epoch]
                if len(seeds) > 1:
                    low, high = [min(epoch) for epoch in by_epoch], [max(epoch) for epoch in by_epoch]
                    axes.fill_between(steps, low, high, color=colour, alpha=0.16, lw=0)
                front = 3 if kind == "test_loss" else 2.5
                axes.plot(
                    steps,
                    mean,
                    color=colour,
                    zorder=front,
                    solid_capstyle="round",
                    gid=_id(name, kind),
                    lw=width,
                    ls=dashes,
                )
            ends.append((mean[-1], _title(name), colour))
        axes.set_xlim(1, max(epochs, 2))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if logarithmic:
            _decades(axes)
        axes.set(xlabel="epoch", ylabel="loss" + (" (log scale)" if logarithmic else ""))
        _end_labels(figure, axes, ends, epochs)
        keys = [
            Line2D([], [], color=theme.muted, lw=1.5, label="test"),
            Line2D([], [], color=theme.muted, lw=0.8, ls=_DASHES, label="training"),
        ]
        axes.legend(
            handles=keys, loc="upper right", frameon=False, handlelength=2.6, borderpad=0, labelcolor=theme.muted,
            borderaxespad=0.2, fontsize=_BODY,
        )  # fmt: skip
        many = _n([kinds["test_loss"] for kinds in curves.values()])
        figure.set_label(
            f"Training and test loss by epoch on {_get(data, 'set', where)}: {_and([_title(n) for n in curves])}. "
            f"Lines are means over {many}, bands reach from the lowest to the highest seed. Solid: test; dashed: "
            "training."
        )
    return figure


def _title(name: str) -> str:
    """What a network is called in a figure: the paper writes DCL-A2."""
    return f"DCL-{name}" if re.fullmatch(r"[AB]\d[SD]?", name) else name


def _series_colours(names: Iterable[str], theme: _Theme) -> list[str]:
    """Give the paper's networks colours of their own, and the others what is left."""
    fixed = {"baseline": theme.text, "A2": theme.blue, "A3D": theme.green, "A3S": theme.orange, "oracle": theme.muted}
    rest = [theme.purple, theme.sky, theme.red]
    names = list(names)
    others = [name for name in names if name not in fixed]
    return [fixed[name] if name in fixed else rest[others.index(name) % len(rest)] for name in names]


def _decades(axes: "Axes") -> None:
    """Label a logarithmic axis at 1, 2 and 5 of every decade, in plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: PLC0415

    axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5), numticks=20))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(LogLocator(10, subs="all", numticks=60))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _end_labels(figure: "Figure", axes: "Axes", ends: Sequence[tuple[float, str, str]], last: float) -> None:
    """Name lines at their ends, moved apart where they would overlap; a thin leader shows which line is meant."""
    figure.draw_without_rendering()
    box = axes.get_window_extent()
    point = figure.dpi / 72
    heights = [axes.transData.transform((last, value))[1] for value, _, _ in ends]
    order = sorted(range(len(ends)), key=heights.__getitem__)
    step = 1.25 * _BODY * point
    placed = [heights[i] for i in order]
    for _ in range(200):  # neighbours push each other away, a little at a time
        for a in range(len(placed) - 1):
            overlap = placed[a] + step - placed[a + 1]
            if overlap > 0:
                placed[a] -= overlap / 2
                placed[a + 1] += overlap / 2
        placed[0] = max(placed[0], box.y0 + step / 2)
        placed[-1] = min(placed[-1], box.y1 - step / 2)
    for i, y in zip(order, placed, strict=True):
        _, name, colour = ends[i]
        start, end = (1.012, (heights[i] - box.y0) / box.height), (1.055, (y - box.y0) / box.height)
        axes.plot(
            *zip(start, end, strict=True), transform=axes.transAxes, color=colour, lw=0.6, clip_on=False,
            solid_capstyle="round",
        )  # fmt: skip
        axes.text(1.07, end[1], name, transform=axes.transAxes, color=colour, va="center_baseline", ha="left")


# Complementary knowledge


def complementary_figure(found: Complementary, *, title: str = "", dark: bool = False) -> "Figure":
    """Draw what one fused filter and its branches answer to: the paper's figure of section 4.1.4.

    Above, the mean fused response of every class, the highest in red. Below, a row for each branch and a column for
    each digit of the number: the branch's mean response by digit. Its highest is red. Where the digit of the fused
    maximum is another one, that is green.

    Args:
        found: What :func:`torch_dcl.paper.complementary.complementary` gives.
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
        from matplotlib.figure import Figure  # noqa: PLC0415

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


# Differences


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
        from matplotlib.figure import Figure  # noqa: PLC0415

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
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

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
    from matplotlib.lines import Line2D  # noqa: PLC0415

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


# What the figures share


def _theme(dark: bool) -> _Theme:
    return _DARK if dark else _LIGHT


def _layout(wspace: float = 0, hspace: float = 0) -> Any:
    """Axes as large as their labels allow, with thin margins in inches."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine  # noqa: PLC0415

    return ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03, wspace=wspace, hspace=hspace)


def _id(*words: object) -> str:
    """Words as an id."""
    return re.sub(r"[^\w-]+", "-", "-".join(str(word) for word in words))


def _figure(name: str, width: float, height: float, theme: _Theme) -> tuple["Figure", "Axes"]:
    """An empty figure with one dressed pair of axes."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(width, height), facecolor="none", layout=_layout())
    figure.set_gid(name)
    axes = figure.add_subplot()
    _dress(axes, theme)
    return figure, axes


def _dress(axes: "Axes", theme: _Theme, *, grid: bool = True) -> None:
    """Two thin spines, short ticks, light lines across."""
    axes.set_facecolor("none")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set(color=theme.edge, linewidth=0.7)
    axes.tick_params(
        which="both", color=theme.edge, labelcolor=theme.muted, labelsize=_SMALL, width=0.7, length=2.5, pad=2.5,
        labelfontfamily="sans-serif",
    )  # fmt: skip
    axes.tick_params(which="minor", length=1.5)
    axes.xaxis.label.set(color=theme.text, size=_BODY)
    axes.yaxis.label.set(color=theme.text, size=_BODY)
    axes.set_axisbelow(True)
    if grid:
        axes.yaxis.grid(visible=True, color=theme.grid, lw=0.6)


def _room(axes: "Axes", values: Iterable[float], band: tuple[float, float]) -> None:
    """Limits of y with everything inside and some room."""
    low, high = axes.get_ylim()
    inside = [*values, *band, low, high]
    margin = 0.05 * (max(inside) - min(inside) or 1)
    axes.set_ylim(min(inside) - margin, max(inside) + margin)


def _half_width(values: Sequence[float]) -> float:
    """Half of the 95 % t-interval of a mean; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    low, high = interval(values)
    return (high - low) / 2


def _short(weights: int | None) -> str:
    """A number of weights in millions."""
    if not weights:
        return ""
    return f"{weights / 1e6:.2f}"


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _n(groups: Iterable[Sequence[Any]]) -> str:
    """How many seeds, in words that are true for all groups."""
    counts = sorted({len(group) for group in groups})
    plural = "" if counts == [1] else "s"
    return f"{counts[0]} seed{plural}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"


def _get(data: Mapping[str, Any], key: str, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise TypeError(f"{where}: expected a dictionary with {key!r}, got {type(data).__name__}")
    if key not in data:
        raise ValueError(f"{where}: {key!r} is missing; it has {', '.join(map(repr, data)) or 'nothing'}")
    return data[key]


def _list(data: Mapping[str, Any], key: str, where: str) -> list[Any]:
    values = list(_get(data, key, where))
    if not values:
        raise ValueError(f"{where}: {key!r} is empty; give at least one")
    return values


def _numbers(values: Iterable[Any], key: str, where: str) -> list[float]:
    """Finite numbers."""
    numbers = []
    for value in values:
        if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
            raise ValueError(f"{where}: {key} holds {value!r}, which cannot be drawn; give finite numbers")
        numbers.append(float(value))
    return numbers


def _accuracies(data: Mapping[str, Any], where: str) -> list[float]:
    """Accuracies from errors in percent."""
    errors = _numbers(_list(data, "errors", where), "errors", where)
    for error in errors:
        if not 0 <= error <= 100:
            raise ValueError(f"{where}: an error of {error} is not between 0 and 100; give errors in percent")
    return [100 - error for error in errors]


def _curves(data: Mapping[str, Any], key: str, where: str) -> list[list[float]]:
    """One list of losses a seed, all of one length."""
    seeds = [_numbers(seed, key, where) for seed in _list(data, key, where)]
    lengths = sorted({len(seed) for seed in seeds})
    if len(lengths) > 1 or lengths[0] == 0:
        raise ValueError(
            f"{where}: {key} has seeds of {_and([str(n) for n in lengths])} epochs; give as many epochs for every seed"
        )
    return seeds
