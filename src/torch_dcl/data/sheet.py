"""A contact sheet of the multi-digit sets, after the paper's Figure 2: the configuration and samples of each set."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torch_dcl.data._segments import MnistLike
from torch_dcl.data.digits import generate, segment, source
from torch_dcl.data.layouts import LAYOUTS, Layout
from torch_dcl.files import replacing

__all__ = ["contact_sheet"]

_COLOURS = ("#1b5e8c", "#b3541e", "#4a7c3a")  # first, second, third digit
_GREY = "#666666"
_RANGE_NAMES = {
    "shift": "shift ±{:.2g}",
    "scale": "size ±{:.0%}",
    "rotation": "turn ±{:.3g}°",
    "noise": "noise ±{:.0f}",
}


def contact_sheet(
    path: str | os.PathLike[str],
    *,
    mnist: MnistLike = None,
    seed: int = 0,
    split: str = "test",
    samples: int = 12,
    layouts: Sequence[Layout] | None = None,
) -> None:
    """Draw one row for each set: its name, a sketch of its configuration, its random variation, and samples.

    In the sketch, a box is a digit with its position, size and rotation; the bar marks the top of the digit. A dashed
    box is a mirrored digit. Numbers give the reading order. Samples are drawn with dark ink on white paper.

    Args:
        path: The image file to create or replace. Its suffix chooses the format: `.png`, `.svg` or `.pdf`.
        mnist: The digits to write with, as for `digits.generate`.
        seed: As for `digits.generate`.
        split: As for `digits.generate`.
        samples: Number of images of each set, the first ones of the split.
        layouts: The sets; by default all fifteen.

    Raises:
        ValueError: The suffix of `path` is none of the three, `samples` is below 1, or as for `digits.generate`.
        OSError: As for `files.replacing`.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"a contact sheet must end in .png, .svg or .pdf, got {os.fspath(path)}")
    if samples < 1:
        raise ValueError(f"samples must be at least 1, not {samples}")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = list(LAYOUTS.values() if layouts is None else layouts)
    used, digits = source(mnist), segment(mnist, split)
    # Inches. A row is a sample high; columns are name and variation, sketch, samples.
    tile, gap, text, sketch, top, bottom = 0.62, 0.07, 1.45, 1.0, 0.42, 0.32
    width = 0.15 + text + sketch + samples * (tile + gap) + 0.1
    height = top + len(rows) * (tile + gap) + bottom
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)

    def write(x: float, y: float, words: str, size: float, **style: Any) -> None:
        figure.text(x / width, 1 - y / height, words, fontsize=size, **({"va": "center", "color": "#222222"} | style))

    for x, words in ((0.15, "set, variation"), (0.15 + text, "configuration"), (0.15 + text + sketch, "samples")):
        write(x, top / 2, words, 9, color=_GREY)
    for row, layout in enumerate(rows):
        y = top + row * (tile + gap)
        write(0.15, y + tile * 0.24, layout.name, 9.5, weight="bold")
        for line, words in enumerate(_variation(layout)):
            write(0.15, y + tile * (0.54 + 0.27 * line), words, 6.8, color=_GREY)
        box = (0.15 + text, y, sketch - 0.15, tile)
        _sketch(_axes(figure, box, width, height), layout, box[2] / box[3])
        images, _ = generate(layout, split, seed=seed, mnist=digits, indices=range(samples))
        for k, image in enumerate(images):
            axes = _axes(figure, (0.15 + text + sketch + k * (tile + gap), y, tile, tile), width, height)
            axes.imshow(255 - image.to(torch.int64).numpy(), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            for spine in axes.spines.values():
                spine.set(color="#bbbbbb", linewidth=0.5)
    legend = "Box: a digit, in reading order; bar: its top; dashed: mirrored; shift in digit sizes."
    write(0.15, height - bottom / 2, f"{legend} Written with {used}: {split}, seed {seed}.", 6.8, color=_GREY)
    with replacing(path) as fresh:
        figure.savefig(fresh, format=suffix[1:], dpi=200, metadata={"Date": None} if suffix == ".svg" else None)


def _variation(layout: Layout) -> list[str]:
    """Say in two short lines how far a set varies."""
    words = [form.format(layout.effective(name)) for name, form in _RANGE_NAMES.items() if layout.effective(name) > 0]
    return [", ".join(words[:2]), ", ".join(words[2:])] if words else ["no variation"]


def _axes(figure: Any, box: tuple[float, float, float, float], width: float, height: float) -> Any:
    """Make axes at (left, top, width, height) in inches from the upper left corner."""
    left, top, wide, high = box
    return figure.add_axes((left / width, 1 - (top + high) / height, wide / width, high / height))


def _sketch(axes: Any, layout: Layout, aspect: float) -> None:
    """Draw every digit as a box with its position, size, rotation, mirroring and place in the reading order."""
    from matplotlib.patches import Rectangle
    from matplotlib.transforms import Affine2D

    reach = [(abs(d.x) + d.scale * 0.7, abs(d.y) + d.scale * 0.7) for d in layout.digits]
    half = max(max(y, x / aspect) for x, y in reach)
    axes.set(xlim=(-half * aspect, half * aspect), ylim=(half, -half))
    axes.axis("off")
    for k, digit in enumerate(layout.digits):
        colour = _COLOURS[k]
        place = Affine2D().scale(digit.scale).rotate_deg(digit.rotation).translate(digit.x, digit.y) + axes.transData
        axes.add_patch(Rectangle((-0.5, -0.5), 1, 1, facecolor=colour, alpha=0.12, transform=place))
        edge: dict[str, Any] = {
            "linestyle": (0, (2, 1.2)) if digit.mirror else "-",
            "edgecolor": colour,
            "linewidth": 0.9,
        }
        axes.add_patch(Rectangle((-0.5, -0.5), 1, 1, fill=False, transform=place, **edge))
        axes.plot([-0.28, 0.28], [-0.5, -0.5], color=colour, linewidth=2.2, transform=place, solid_capstyle="butt")
        axes.text(digit.x, digit.y, str(k + 1), ha="center", va="center", fontsize=6, color=colour, clip_on=False)
