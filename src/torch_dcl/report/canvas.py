"""Shared by all figures: themes, type, checks of their data, and output files."""

import html
import io
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_dcl.experiments.settings import Reader, are_percents
from torch_dcl.experiments.stats import interval
from torch_dcl.files import replacing, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = ["LIGHT", "Theme", "save", "style", "svg"]

INCH = 25.4  # mm
COLUMN, PAGE = 85.0, 175.0  # widths in mm: one column, and two
BODY, SMALL = 7.5, 6.5  # font sizes in points
_FONTS = ["DejaVu Sans", "Verdana", "Geneva", "sans-serif"]  # of one width, so that labels keep their room
DASHES = (0, (4, 2.2))


@dataclass(frozen=True)
class Theme:
    """Colours by what they are for, and by name."""

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


LIGHT = Theme(
    "#ffffff", "#1f2328", "#59636e", "#8c959f", "#e4e8ec", "#afb8c1",
    "#0072b2", "#d98200", "#00795a", "#cc3311", "#aa4499", "#3a9bd1",
)  # fmt: skip


DARK = Theme(
    "#0d1117", "#f0f6fc", "#9198a1", "#656c76", "#262c34", "#5b646f",
    "#56b4e9", "#f0a24a", "#2dbd94", "#ff6f52", "#e08ad0", "#9fd4f2",
)  # fmt: skip


def svg(figure: "Figure", *, name: str | None = None) -> str:
    """A figure as SVG to embed in an HTML page: without XML header, with unique ids that begin with a name.

    Text stays text, so it can be searched, selected and read aloud. A screen reader reads the caption. Without a name
    ids begin with the kind of the figure; a page with two of a kind, or with a light and a dark one, needs two names.
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
        with style(), replacing(path) as fresh:
            figure.savefig(fresh, format=suffix[1:], dpi=300, metadata=dict.fromkeys(empty))
    else:
        raise ValueError(f"cannot write a figure as {os.fspath(path)!r}; choose a name that ends in .svg, .pdf or .png")


def _svg_file(figure: "Figure") -> str:
    caption = str(figure.get_label())
    with style(), io.StringIO() as file:
        metadata = {"Date": None, "Creator": None, "Description": caption, "Title": caption.partition(". ")[0]}
        figure.savefig(file, format="svg", metadata=metadata)
        text = file.getvalue()
    # matplotlib leaves spaces at the ends of some lines.
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def style() -> AbstractContextManager[None]:
    """Settings for drawing and for saving, which must be the same: tick labels are only made when a figure is drawn."""
    import matplotlib as mpl

    return mpl.rc_context(
        {
            "font.family": "sans-serif",
            "font.sans-serif": _FONTS,
            "font.size": BODY,
            "mathtext.fontset": "dejavusans",
            "svg.fonttype": "none",
            "svg.hashsalt": "torch-dcl",
            "pdf.fonttype": 42,
            "axes.unicode_minus": True,
            "path.simplify": True,
        }
    )


def theme_of(dark: bool) -> Theme:
    """The colours for a light or a dark page."""
    return DARK if dark else LIGHT


def layout(wspace: float = 0, hspace: float = 0) -> Any:
    """Axes as large as their labels allow, with thin margins in inches."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03, wspace=wspace, hspace=hspace)


def id_of(*words: object) -> str:
    """Words as an id."""
    return re.sub(r"[^\w-]+", "-", "-".join(str(word) for word in words))


def empty(name: str, width: float, height: float, layout: Any = None) -> "Figure":
    """A transparent figure without axes, of a size in mm; its id is a name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / INCH, height / INCH), facecolor="none", layout=layout)
    figure.set_gid(name)
    return figure


def one_panel(name: str, height: float, theme: Theme) -> tuple["Figure", "Axes"]:
    """A figure of one column with a dressed pair of axes."""
    figure = empty(name, COLUMN, height, layout())
    axes = figure.add_subplot()
    dress(axes, theme)
    return figure, axes


def dress(axes: "Axes", theme: Theme, *, grid: bool = True) -> None:
    """Two thin spines, short ticks, light lines across."""
    axes.set_facecolor("none")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set(color=theme.edge, linewidth=0.7)
    axes.tick_params(
        which="both", color=theme.edge, labelcolor=theme.muted, labelsize=SMALL, width=0.7, length=2.5, pad=2.5,
        labelfontfamily="sans-serif",
    )  # fmt: skip
    axes.tick_params(which="minor", length=1.5)
    axes.xaxis.label.set(color=theme.text, size=BODY)
    axes.yaxis.label.set(color=theme.text, size=BODY)
    axes.set_axisbelow(True)
    if grid:
        axes.yaxis.grid(visible=True, color=theme.grid, lw=0.6)


def seeds_in_words(groups: Iterable[Sequence[Any]]) -> str:
    """The number of seeds, or its range over the groups."""
    counts = sorted({len(group) for group in groups})
    plural = "" if counts == [1] else "s"
    return f"{counts[0]} seed{plural}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} seeds"


def errors_of(data: object, where: str) -> list[float]:
    """The errors of a network in percent, one a seed."""
    return list(map(float, Reader(where, data).get("errors", are_percents, "at least one number, each from 0 to 100")))


def bounds_of(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % t-interval of a mean; the value alone where there is one."""
    return interval(values) if len(values) > 1 else (values[0], values[0])


def draw_spread(axes: "Axes", x: float, values: Sequence[float], colour: str, aside: float = 0.0) -> None:
    """The 95 % interval of a mean, where there are several values, and a small dot for each."""
    low, high = bounds_of(values)
    if len(values) > 1:
        middle, half = (low + high) / 2, (high - low) / 2
        axes.errorbar(x, middle, half, color=colour, lw=1.1, capsize=2, capthick=1.1, zorder=3)
    axes.plot([x + aside] * len(values), values, "o", ms=2, mfc=colour, mec="none", alpha=0.55, zorder=2)


def decades(axis: "Axis", ticks: Sequence[float]) -> None:
    """Label a logarithmic axis at these multiples of every power of ten, in plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(10, subs=ticks, numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(LogLocator(10, subs="all", numticks=60))
    axis.set_minor_formatter(NullFormatter())


class End(NamedTuple):
    """Where a line or a mark is that is named beside its panel, in units of the data."""

    x: float
    y: float
    name: str
    colour: str
    is_bold: bool = False


def label_ends(figure: "Figure", axes: "Axes", ends: Sequence[End], size: float) -> None:
    """Name lines or marks beside the panel, moved apart where names would overlap, each with a thin leader."""
    figure.draw_without_rendering()
    box, points = axes.get_window_extent(), axes.transData.transform([(end.x, end.y) for end in ends])
    places = {
        end: ((x - box.x0) / box.width, (y - box.y0) / box.height) for end, (x, y) in zip(ends, points, strict=True)
    }
    order = sorted(ends, key=lambda end: places[end][1])
    step = 1.28 * size / 72 * figure.dpi / box.height
    heights = push_apart([places[end][1] for end in order], step, step / 2, 1 - step / 2)
    for end, height in zip(order, heights, strict=True):
        x, y = places[end]
        axes.plot(
            [x, 1.0, 1.045], [y, y, height], transform=axes.transAxes, color=end.colour, lw=0.5, alpha=0.7,
            ls=(0, (1, 1.6)), clip_on=False, zorder=1,
        )  # fmt: skip
        axes.text(
            1.06, height, end.name, transform=axes.transAxes, color=end.colour, size=size, va="center_baseline",
            ha="left", weight="bold" if end.is_bold else "normal",
        )  # fmt: skip


def title_of(column: str) -> str:
    """What a network is called in a figure: the paper writes DCL-A2."""
    return f"DCL-{column}" if re.fullmatch(r"[AB]\d[SD]?", column) else column


def push_apart(places: Sequence[float], step: float, low: float, high: float) -> list[float]:
    """Rising places moved until neighbours are a step apart, between two ends."""
    placed = list(places)
    for _ in range(300):  # neighbours push each other away, a little at a time
        for a in range(len(placed) - 1):
            overlap = placed[a] + step - placed[a + 1]
            if overlap > 0:
                placed[a] -= overlap / 2
                placed[a + 1] += overlap / 2
        placed[0], placed[-1] = max(placed[0], low), min(placed[-1], high)
    return placed


def look_of(name: str, theme: Theme) -> tuple[str, str]:
    """Colour and mark of a layer, the same in all figures."""
    looks = {
        "plain": (theme.text, "s"), "narrow": (theme.muted, "v"), "low-rank": (theme.green, "^"),
        "summed": (theme.orange, "P"), "dcl": (theme.blue, "o"), "A2": (theme.blue, "o"), "dcl3s": (theme.sky, "o"),
        "star": (theme.red, "*"), "glu": (theme.purple, "D"), "bilinear": (theme.muted, "X"),
        "power-0": (theme.sky, "D"), "power-1": (theme.purple, "D"), "A3S": (theme.blue, "X"),
        "GLU": (theme.purple, "p"), "SORT": (theme.sky, "*"),
    }  # fmt: skip
    return looks.get(name, (theme.muted, "h"))
