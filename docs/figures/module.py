"""Draw a plain convolution beside the DCL module, with weights and multiply-adds.

Writes ``dcl-module.svg`` and ``dcl-module-dark.svg`` into ``docs/images``. The files depend on nothing but this script
and the version of matplotlib::

    python docs/figures/module.py
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Polygon, Rectangle

IMAGES = Path(__file__).resolve().parent.parent / "images"
WIDTH, HEIGHT = 900, 500  # of the drawing; one unit is one pixel at 100 dots an inch
FACE = 44  # edge of the front of a cube: the image
CELLS = 4  # grid cells along that edge
SLANT = 0.5  # how far the channels of a cube rise for each unit that they go back
BODY, SMALL, HEADING = 8.6, 8.0, 10.5  # font sizes in points
MIDDLE, STAGES, RULES = 166, 284, (341, 408)  # heights of the flow, its brackets, and the lines across a card

# The example: fc6 of AlexNet sees 6 x 6 positions of 256 channels and has 4096 filters.
K1, U, K2, FILTERS = 256, 6, 4096, (1024, 1024)
PLAIN = U * U * K1 * K2


@dataclass(frozen=True)
class Theme:
    """Colours: those of Okabe and Ito, which stay apart for colour-blind readers, on a light or a dark page."""

    page: str
    card: str
    edge: str
    text: str
    muted: str
    ink: str  # text inside a filled bar
    layer: str
    first: str
    second: str
    result: str
    tint: float  # how much of the card shows through the front of a cube


LIGHT = Theme(
    "#ffffff", "#f6f8fa", "#d0d7de", "#1f2328", "#59636e", "#ffffff", "#6e7781", "#0072b2", "#d55e00", "#00795a", 0.72
)
DARK = Theme(
    "#0d1117", "#151b23", "#3d444d", "#f0f6fc", "#9198a1", "#0d1117", "#9198a1", "#56b4e9", "#f0a24a", "#2dbd94", 0.70
)


def mix(colour: str, other: str, share: float) -> tuple[float, float, float]:
    """``colour`` with a ``share`` of ``other`` in it."""
    a, b = mpl.colors.to_rgb(colour), mpl.colors.to_rgb(other)
    return tuple((1 - share) * p + share * q for p, q in zip(a, b, strict=True))  # type: ignore[return-value]


@dataclass(frozen=True)
class Cube:
    """A block of neurons: a square image with its channels going back to the right."""

    x: float
    y: float  # of the middle of the front
    depth: float
    colour: str

    @property
    def left(self) -> tuple[float, float]:
        """Where an arrow arrives."""
        return self.x, self.y

    @property
    def right(self) -> tuple[float, float]:
        """Where an arrow leaves: the back edge, at the height of the middle of the front."""
        return self.x + FACE + self.depth, self.y

    @property
    def centre(self) -> float:
        """Where a label stands."""
        return self.x + FACE / 2

    def cell(self, column: float, row: float) -> tuple[float, float]:
        """A corner of the grid on the front."""
        step = FACE / CELLS
        return self.x + column * step, self.y - FACE / 2 + row * step


class Drawing:
    """The figure in one theme; y runs down."""

    def __init__(self, theme: Theme) -> None:
        """Start with an empty page."""
        self.theme = theme
        self.figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=100, facecolor=theme.page)
        self.axes: Axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, WIDTH), ylim=(HEIGHT, 0))
        self.axes.axis("off")

    def text(self, x: float, y: float, words: str, size: float = BODY, colour: str | None = None, **style: Any) -> None:
        """Write ``words``, centred on (x, y) unless ``ha`` says otherwise."""
        style = {"ha": "center", "va": "center", **style}
        self.axes.text(x, y, words, fontsize=size, color=colour or self.theme.text, **style)

    def card(self, x: float, width: float, heading: str) -> None:
        """A panel over the height of the page, with its heading."""
        box = FancyBboxPatch(
            (x, 16),
            width,
            HEIGHT - 32,
            boxstyle="round,pad=0,rounding_size=10",
            fc=self.theme.card,
            ec=self.theme.edge,
            lw=1,
        )
        self.axes.add_patch(box)
        self.text(x + 20, 42, heading, HEADING, ha="left", weight="bold")

    def rule(self, x: float, width: float, y: float) -> None:
        """A thin line across a card."""
        self.axes.plot((x + 20, x + width - 20), (y, y), color=self.theme.edge, lw=1, solid_capstyle="butt")

    def cube(self, cube: Cube, name: str, size: str, patch: tuple[int, int, int]) -> None:
        """Draw a block with ``patch`` (column, row, edge, in cells) marked on its front, its name and size below."""
        theme, step, rise = self.theme, FACE / CELLS, cube.depth * SLANT
        top, bottom = cube.y - FACE / 2, cube.y + FACE / 2
        right, back = cube.x + FACE, cube.x + FACE + cube.depth
        edge: dict[str, Any] = {"ec": cube.colour, "lw": 1.1, "joinstyle": "round"}
        roof = [(cube.x, top), (cube.x + cube.depth, top - rise), (back, top - rise), (right, top)]
        side = [(right, top), (back, top - rise), (back, bottom - rise), (right, bottom)]
        self.axes.add_patch(Polygon(roof, fc=mix(cube.colour, theme.card, theme.tint - 0.12), **edge))
        self.axes.add_patch(Polygon(side, fc=mix(cube.colour, theme.card, theme.tint - 0.3), **edge))
        self.axes.add_patch(
            Rectangle((cube.x, top), FACE, FACE, fc=mix(cube.colour, theme.card, theme.tint + 0.1), lw=0)
        )
        grid: dict[str, Any] = {"color": mix(cube.colour, theme.card, 0.5), "lw": 0.6, "solid_capstyle": "butt"}
        for i in range(1, CELLS):
            self.axes.plot((cube.x + i * step,) * 2, (top, bottom), **grid)
            self.axes.plot((cube.x, right), (top + i * step,) * 2, **grid)
        column, row, cells = patch
        self.axes.add_patch(Rectangle(cube.cell(column, row), cells * step, cells * step, fc=cube.colour, lw=0))
        self.axes.add_patch(Rectangle((cube.x, top), FACE, FACE, fill=False, **edge))
        self.text(cube.centre, bottom + 12, name, BODY + 1)
        self.text(cube.centre, bottom + 28, size, SMALL, theme.muted)

    def arrow(self, start: tuple[float, float], end: tuple[float, float], colour: str | None = None) -> None:
        """A straight arrow that touches both ends."""
        self.axes.add_patch(
            FancyArrowPatch(
                start, end, arrowstyle="-|>,head_length=4.5,head_width=2.4", shrinkA=1.5, shrinkB=0.5, lw=1.4,
                color=colour or self.theme.muted, joinstyle="miter", capstyle="butt",
            )
        )  # fmt: skip

    def stage(self, x1: float, x2: float, y: float, title: str, formula: str) -> None:
        """A bracket under a part of the flow, with what happens there."""
        self.axes.plot((x1, x1, x2, x2), (y - 6, y, y, y - 6), color=self.theme.muted, lw=1, solid_joinstyle="miter")
        self.text((x1 + x2) / 2, y + 18, title, SMALL, self.theme.muted, va="baseline")
        self.text((x1 + x2) / 2, y + 39, formula, BODY + 1, va="baseline")

    def costs(self, x: float, weights: str, multiply_adds: str) -> None:
        """The two formulas of section 3.4."""
        for y, label, formula in ((366, "weights", weights), (390, "multiply-adds", multiply_adds)):
            self.text(x + 20, y, label, SMALL, self.theme.muted, ha="left", va="baseline")
            self.text(x + 112, y, formula, BODY + 1, ha="left", va="baseline")

    def bar(self, x: float, parts: list[tuple[int, str, str]], caption: str, total: str = "") -> None:
        """Weights of the example as a bar, and their total behind it; all bars share one scale."""
        self.text(x + 20, 432, caption, SMALL, self.theme.muted, ha="left", va="baseline")
        scale, start = 276 / PLAIN, x + 20
        for weights, label, colour in parts:
            width = weights * scale
            self.axes.add_patch(Rectangle((start, 442), width, 22, fc=colour, ec=self.theme.card, lw=1))
            self.text(start + width / 2, 453.5, label, SMALL, self.theme.ink)
            start += width
        self.text(start + 10, 453.5, total, BODY, ha="left", weight="bold")

    def save(self, path: Path) -> None:
        """Write the file without date and version, so that a second run gives the same bytes."""
        self.figure.savefig(path, facecolor=self.theme.page, metadata={"Date": None, "Creator": None})


def millions(weights: int) -> str:
    """``weights`` as the paper writes it, for example 37.75 M."""
    return f"{weights / 1e6:.2f} M"


def draw_convolution(draw: Drawing) -> None:
    """The left card: one layer of K2 filters."""
    theme, x, width, middle = draw.theme, 16, 316, MIDDLE
    draw.card(x, width, "Convolution + ReLU")
    source = Cube(x + 46, middle, 24, theme.layer)
    target = Cube(x + 190, middle, 42, theme.result)
    draw.cube(source, r"$\mathbf{X}$", r"$W_1\!\times\!H_1\!\times\!K_1$", (1, 1, 2))
    draw.cube(target, r"$\mathbf{Z}$", r"$W_2\!\times\!H_2\!\times\!K_2$", (1, 1, 1))
    draw.arrow(source.right, target.left)
    between = (source.right[0] + target.left[0]) / 2
    draw.text(between, middle - 12, r"$\theta$", BODY + 1)
    draw.text(between, middle + 12, "ReLU", SMALL, theme.muted)
    draw.stage(
        source.x, target.right[0], STAGES, r"one layer of $K_2$ filters, $u\times u$", r"$z=\sigma(\theta\cdot x)$"
    )
    draw.rule(x, width, RULES[0])
    draw.costs(x, r"$u^2K_1K_2$", r"$W_2H_2\cdot u^2K_1K_2$")
    draw.rule(x, width, RULES[1])
    caption = f"AlexNet fc6, {K2} filters: {U * U * K1} · {K2}"
    draw.bar(x, [(PLAIN, f"{millions(PLAIN)} weights", theme.layer)], caption)


def draw_module(draw: Drawing) -> None:
    """The right card: two small branches, multiplied and rooted."""
    theme, x, width, middle = draw.theme, 348, 536, MIDDLE
    draw.card(x, width, "DCL module")
    draw.text(x + width - 20, 42, r"shown for $T=2$ branches", SMALL, theme.muted, ha="right")
    rows, colours = (112, 216), (theme.first, theme.second)
    source = Cube(x + 32, middle, 24, theme.layer)
    target = Cube(x + 428, middle, 42, theme.result)
    knot = (x + 382, middle)
    draw.cube(source, r"$\mathbf{X}$", r"$W_1\!\times\!H_1\!\times\!K_1$", (1, 1, 2))
    for t, (y, colour) in enumerate(zip(rows, colours, strict=True), start=1):
        branch, response = Cube(x + 152, y, 10, colour), Cube(x + 258, y, 42, colour)
        draw.arrow(source.right, branch.left, colour)
        draw.arrow(branch.right, response.left, colour)
        draw.arrow(response.right, (knot[0] - 9, knot[1] + (-6 if t == 1 else 6)), colour)
        draw.cube(branch, rf"$\mathbf{{Y}}^{{({t})}}$", r"$M$ channels", (1, 1, 1))
        draw.cube(response, rf"$\mathbf{{V}}^{{({t})}}$", r"$K_2$ channels", (1, 1, 1))
        draw.text(x + 120, y + (8 if t == 1 else -6), rf"$\theta^{{({t})}}$", BODY + 1)
        draw.text((branch.right[0] + response.left[0]) / 2, y - 12, rf"$W^{{({t})}}$", BODY + 1)
        draw.text((branch.right[0] + response.left[0]) / 2, y + 12, "ReLU", SMALL, theme.muted)
    draw.arrow((knot[0] + 11, middle), target.left)
    draw.axes.add_patch(Circle(knot, 11, fc=theme.card, ec=theme.muted, lw=1.4))
    draw.text(knot[0], knot[1] - 0.5, r"$\times$", HEADING)
    draw.cube(target, r"$\mathbf{Z}$", r"$W_2\!\times\!H_2\!\times\!K_2$", (1, 1, 1))
    draw.text((knot[0] + 11 + target.x) / 2, middle + 12, "root", SMALL, theme.muted)
    fusion = r"$v^{(t)}=\sigma(W^{(t)}\cdot y^{(t)})\qquad z=(\Pi_t\,v^{(t)}+\varepsilon)^{1/T}$"
    draw.stage(source.x, x + 206, STAGES, r"1  branch construction, $u\times u$", r"$y^{(t)}=\theta^{(t)}\cdot x$")
    draw.stage(x + 218, target.right[0], STAGES, r"2  concept fusion, $1\times 1$", fusion)
    draw.rule(x, width, RULES[0])
    draw.costs(x, r"$u^2K_1\,\Sigma M+K_2\,\Sigma M$", r"$W_2H_2\cdot(u^2K_1\,\Sigma M+K_2\,\Sigma M)$")
    draw.rule(x, width, RULES[1])
    filters = sum(FILTERS)
    weights = [U * U * K1 * m + K2 * m for m in FILTERS]
    saved = 1 - sum(weights) / PLAIN
    draw.bar(
        x,
        [(w, millions(w), colour) for w, colour in zip(weights, colours, strict=True)],
        f"AlexNet fc6, {len(FILTERS)} × {FILTERS[0]} filters: {U * U * K1} · {filters} + {K2} · {filters}",
        f"{millions(sum(weights))} weights, {saved:.0%} fewer",
    )


def main() -> None:
    """Draw both themes."""
    mpl.rcParams.update(
        {
            "svg.hashsalt": "torch-dcl",
            "svg.fonttype": "path",
            "font.family": "DejaVu Sans",
            "mathtext.fontset": "dejavusans",
        }
    )
    for theme, suffix in ((LIGHT, ""), (DARK, "-dark")):
        draw = Drawing(theme)
        draw_convolution(draw)
        draw_module(draw)
        draw.save(IMAGES / f"dcl-module{suffix}.svg")


if __name__ == "__main__":
    main()
