"""Accuracy against filters, and losses against epochs."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from torch_dcl.experiments.settings import Reader, is_count, is_list_of, is_number, is_text
from torch_dcl.experiments.stats import join_words
from torch_dcl.report import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["curves_figure", "filters_figure"]


def filters_figure(data: Mapping[str, Any], *, dark: bool = False) -> "Figure":
    """Draw accuracy against filters per branch, and the baseline as a dashed line: the paper's figure in 4.1.3.

    ``data`` is ``{"set": "MNIST-III-10", "baseline": {"errors": [...]}, "points": [{"filters": 100, "errors": [...],
    "weights": 905000}, ...]}``. Errors are in percent, one a seed; ``weights`` may be missing.
    """
    from matplotlib.ticker import NullLocator

    where = "filters_figure"
    read = Reader(where, data)
    points = read.get("points", bool, "at least one point")
    by_width = {Reader(where, point).get("filters", is_count, "a whole number"): point for point in points}
    widths = sorted(by_width)
    if len(widths) < len(points) or widths[0] < 1:
        read.refuse(f"filters must be different and at least 1, got {widths}; merge the errors of equals")
    points = [by_width[width] for width in widths]
    seeds = [_accuracies(point, f"{where}, {point['filters']} filters") for point in points]
    images = read.get("set", is_text, "the name of the set")
    base = _accuracies(read.get("baseline", lambda _: True, "its errors"), f"{where}, baseline")
    theme = canvas.theme_of(dark)
    with canvas.style():
        figure, axes = canvas.one_panel("filters", 58, theme)
        place = dict(zip(widths, _places(widths), strict=True))
        axes.set_xlim(-0.35, max(place.values()) + 0.35)
        middle, band = fmean(base), canvas.bounds_of(base)
        if len(base) > 1:
            axes.axhspan(*band, color=theme.muted, alpha=0.13, lw=0)
        axes.axhline(middle, color=theme.text, lw=1.1, ls=canvas.DASHES, gid="baseline")
        means = [fmean(values) for values in seeds]
        axes.plot(list(place.values()), means, color=theme.blue, lw=1.3, zorder=3)
        for x, mean, values in zip(place.values(), means, seeds, strict=True):
            canvas.draw_spread(axes, x, values, theme.blue, aside=0.15)
            axes.plot(x, mean, "o", ms=4.4, mfc=theme.blue, mec=theme.page, mew=0.7, zorder=4)
        shown = _with_room(list(place.values()))
        labels = [
            f"{point['filters']}\n{_millions(point.get('weights'))}".rstrip() if has_room else ""
            for point, has_room in zip(points, shown, strict=True)
        ]
        axes.set_xticks(list(place.values()), labels, linespacing=1.35)
        axes.xaxis.set_minor_locator(NullLocator())
        second = "\nweights of the network (millions)" if any(point.get("weights") for point in points) else ""
        axes.set_xlabel(f"filters per branch{second}", linespacing=1.35)
        axes.set_ylabel("test accuracy (%)")
        _room(axes, [*base, *(a for values in seeds for a in values), *band])
        right = axes.get_xlim()[1]
        lines = canvas.End(right, middle, "baseline", theme.text), canvas.End(right, means[-1], "DCL-A2", theme.blue)
        canvas.label_ends(figure, axes, lines, canvas.BODY)
        many = canvas.seeds_in_words([base, *seeds])
        figure.set_label(
            f"Test accuracy (%) of DCL-A2 on {images} with different numbers of filters per branch. "
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


def _with_room(places: Sequence[float]) -> list[bool]:
    """Which labels can be read beside their neighbours; the last one always."""
    shown, nearest = [], math.inf
    for place in reversed(places):
        shown.append(nearest - place >= 0.8)
        nearest = place if shown[-1] else nearest
    return shown[::-1]


def curves_figure(data: Mapping[str, Any], *, dark: bool = False) -> "Figure":
    """Draw training and test loss by epoch, one colour a network: the paper's loss curves of section 4.1.3.

    ``data`` is ``{"set": "MNIST-III-10", "series": {"baseline": {"train_loss": [[...], ...], "test_loss": [[...],
    ...]}, "A2": ..., ...}}``: one list a seed, one number an epoch.
    """
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    read = Reader("curves_figure", data)
    series = read.get("series", bool, "the losses of at least one network")
    curves = {
        name: {kind: _curves(Reader(f"curves_figure, {name}", runs), kind) for kind in ("train_loss", "test_loss")}
        for name, runs in series.items()
    }
    images, theme = read.get("set", is_text, "the name of the set"), canvas.theme_of(dark)
    values = [v for kinds in curves.values() for seeds in kinds.values() for seed in seeds for v in seed]
    epochs = max(len(seed) for kinds in curves.values() for seeds in kinds.values() for seed in seeds)
    with canvas.style():
        figure, axes = canvas.one_panel("curves", 64, theme)
        logarithmic = min(values) > 0 and max(values) / min(values) > 5
        if logarithmic:
            axes.set_yscale("log")
        ends: list[canvas.End] = []
        for name, colour in zip(curves, _series_colours(curves, theme), strict=True):
            for kind, width, dashes in (("train_loss", 0.8, canvas.DASHES), ("test_loss", 1.5, "-")):
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
                    gid=canvas.id_of(name, kind),
                    lw=width,
                    ls=dashes,
                )
            ends.append(canvas.End(epochs, mean[-1], canvas.title_of(name), colour))
        axes.set_xlim(1, max(epochs, 2))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if logarithmic:
            canvas.decades(axes.yaxis, (1, 2, 5))
        axes.set(xlabel="epoch", ylabel="loss" + (" (log scale)" if logarithmic else ""))
        canvas.label_ends(figure, axes, ends, canvas.BODY)
        keys = [
            Line2D([], [], color=theme.muted, lw=1.5, label="test"),
            Line2D([], [], color=theme.muted, lw=0.8, ls=canvas.DASHES, label="training"),
        ]
        axes.legend(
            handles=keys, loc="upper right", frameon=False, handlelength=2.6, borderpad=0, labelcolor=theme.muted,
            borderaxespad=0.2, fontsize=canvas.BODY,
        )  # fmt: skip
        many = canvas.seeds_in_words([kinds["test_loss"] for kinds in curves.values()])
        figure.set_label(
            f"Training and test loss by epoch on {images}: {join_words([canvas.title_of(n) for n in curves])}. "
            f"Lines are means over {many}, bands reach from the lowest to the highest seed. Solid: test; dashed: "
            "training."
        )
    return figure


def _series_colours(names: Iterable[str], theme: canvas.Theme) -> list[str]:
    """Give the paper's networks colours of their own, and the others what is left."""
    fixed = {"baseline": theme.text, "A2": theme.blue, "A3D": theme.green, "A3S": theme.orange, "oracle": theme.muted}
    rest = [theme.purple, theme.sky, theme.red]
    names = list(names)
    others = [name for name in names if name not in fixed]
    return [fixed[name] if name in fixed else rest[others.index(name) % len(rest)] for name in names]


def _room(axes: "Axes", values: Iterable[float]) -> None:
    """Limits of y with everything inside and some room."""
    inside = [*values, *axes.get_ylim()]
    margin = 0.05 * (max(inside) - min(inside) or 1)
    axes.set_ylim(min(inside) - margin, max(inside) + margin)


def _millions(weights: int | None) -> str:
    return f"{weights / 1e6:.2f}" if weights else ""


def _accuracies(data: object, where: str) -> list[float]:
    """Accuracies from errors in percent."""
    return [100 - error for error in canvas.errors_of(data, where)]


def _curves(read: Reader, kind: str) -> list[list[float]]:
    """One list of losses a seed, all of one length."""
    seeds: list[list[float]] = read.get(
        kind, is_list_of(is_list_of(is_number)), "a list of finite numbers for each seed"
    )
    lengths = sorted({len(seed) for seed in seeds})
    if len(lengths) != 1 or lengths[0] == 0:
        found = join_words([str(n) for n in lengths or [0]])
        read.refuse(f"{kind} has seeds of {found} epochs; give as many epochs for every seed")
    return seeds
