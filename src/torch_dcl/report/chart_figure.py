"""The chart of DCL and its rivals: error against weights, and against the time of a step."""

import itertools
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_dcl.experiments.natural_networks import TITLES
from torch_dcl.experiments.settings import Reader, is_number, is_text
from torch_dcl.report import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["chart_figure"]

_ALIKE = 0.01  # weights that differ by less are one budget
_NAMES = {
    "dcl": "DCL", "dcl3s": "DCL 3S", "star": "no root (star)",
    "glu": "gated (GLU)", "narrow": "narrowed",
}  # fmt: skip
_HEIGHT, _TOP, _BOTTOM = 78.0, 7.0, 10.0  # mm
_LEFT, _NAMED, _BETWEEN = 13.0, 21.5, 10.0


class _Point(NamedTuple):
    unit: str
    weights: float
    step: float
    errors: list[float]

    @property
    def mean(self) -> float:
        return fmean(self.errors)


def chart_figure(data: Mapping[str, Any], *, dark: bool = False) -> "Figure":
    """Draw test error against weights, and beside it against the time of a training step, a mark for each unit.

    ``data`` is ``{"set": "cifar10", "points": [{"unit": "dcl", "weights": 5086912, "step_ms": 1.2, "errors": [...]},
    ...], "told": [...]}``. Errors are in percent, one per seed; ``told`` holds remarks for the reader, and is optional.
    A unit may have several points, for several budgets; they are joined.
    """
    read = Reader("chart_figure", data)
    points = [_read(point) for point in read.get("points", bool, "at least one point")]
    theme, width = canvas.theme_of(dark), canvas.PAGE
    panel = (width - _LEFT - _BETWEEN) / 2 - _NAMED
    with canvas.style():
        figure = canvas.empty("chart", width, _HEIGHT)
        high = (_HEIGHT - _TOP - _BOTTOM) / _HEIGHT
        seen = [bound for point in _on_scale(points) for bound in (*canvas.bounds_of(point.errors), *point.errors)]
        room = 0.06 * (min(100.0, max(seen)) - max(0.0, min(seen)) or 1)
        limits = (max(0.0, min(seen) - room), min(100.0 + room, max(seen) + room))
        budgets = _budgets(points)
        places = [_side_by_side(points, budgets), [point.step for point in points]]
        heads = (("weights", "weights of the network (millions)"), ("time", "time of a training step (ms)"))
        for i, (places_of, (name, label)) in enumerate(zip(places, heads, strict=True)):
            left = _LEFT + i * (panel + _NAMED + _BETWEEN)
            axes: Axes = figure.add_axes((left / width, _BOTTOM / _HEIGHT, panel / width, high))
            canvas.dress(axes, theme)
            axes.set_ylim(*limits)
            span = max(places_of) - min(places_of)
            axes.set_xlim(min(places_of) - (0.1 * span or 0.5), max(places_of) + (0.1 * span or 0.5))
            axes.set_xlabel(label, labelpad=2)
            axes.set_title(
                f"error against {name}", loc="left", size=canvas.BODY, color=theme.text, pad=5, weight="bold"
            )
            if i == 0:
                axes.set_ylabel("test error (%)", labelpad=2)
                _ticks(axes, points, budgets, places_of, theme)
            _marks(axes, points, places_of, theme, name)
            canvas.label_ends(figure, axes, _ends(axes, points, places_of, theme), canvas.SMALL)
    notes = " ".join(map(str, data.get("told", ())))
    if len(_on_scale(points)) < len(points):
        notes = f"What errs more than twice as often as the median is at the upper edge, with its error. {notes}"
    images = read.get("set", is_text, "the name of the set")
    many = canvas.seeds_in_words([point.errors for point in points])
    network = f"BigNet on {TITLES.get(images, images)}"
    figure.set_label(
        f"Test error (%) of {network} with different layers instead of the first fully-connected one, against the "
        f"network's weights and against the measured time of a training step. Large marks are means over "
        f"{many}, small dots are seeds, bars are 95 % t-intervals of the mean. "
        "On the left, layers of one budget (weights within 1 %) stand side by side on a band, the lowest error first. "
        f"DCL 3S: three narrower branches, stochastic. {notes}".strip()
    )  # fmt: skip
    return figure


def _read(point: Mapping[str, Any]) -> _Point:
    read = Reader("chart_figure", point)
    unit = read.get("unit", is_text, "the layer's name")
    read.place += f", {unit}"
    above_0: tuple[Any, str] = (lambda v: is_number(v) and v > 0, "a number above 0")
    weights, step = read.get("weights", *above_0), read.get("step_ms", *above_0)
    return _Point(unit, weights / 1e6, step, canvas.errors_of(point, read.place))


def _on_scale(points: Sequence[_Point]) -> list[_Point]:
    """The points that set the scale: all but those with more than twice the median error."""
    most = 2 * median(point.mean for point in points)
    return [point for point in points if point.mean <= most]


def _budgets(points: Sequence[_Point]) -> list[list[int]]:
    """Points of one budget together, by rising weights; in each by rising error."""
    groups: list[list[int]] = []
    for i in sorted(range(len(points)), key=lambda i: points[i].weights):
        if groups and points[i].weights <= (1 + _ALIKE) * points[groups[-1][0]].weights:
            groups[-1].append(i)
        else:
            groups.append([i])
    return [sorted(group, key=lambda i: points[i].mean) for group in groups]


def _side_by_side(points: Sequence[_Point], budgets: Sequence[Sequence[int]]) -> list[float]:
    """Weights in millions, and points of one budget moved apart about their common place."""
    centres = [fmean(points[i].weights for i in group) for group in budgets]
    gaps = [b - a for a, b in itertools.pairwise(centres)]
    step = min(gaps) * 0.7 / max(map(len, budgets)) if gaps else 0.02 * centres[0]
    places = [0.0] * len(points)
    for group, centre in zip(budgets, centres, strict=True):
        for k, i in enumerate(group):
            places[i] = centre + (k - (len(group) - 1) / 2) * step
    return places


def _ticks(
    axes: "Axes",
    points: Sequence[_Point],
    budgets: Sequence[Sequence[int]],
    places: Sequence[float],
    theme: canvas.Theme,
) -> None:
    """A number for each budget, and a band behind those that share one; the order inside of it has no meaning."""
    margin = 0.03 * (max(places) - min(places))
    for group in budgets:
        if len(group) > 1:
            inside = [places[i] for i in group]
            axes.axvspan(min(inside) - margin, max(inside) + margin, color=theme.muted, alpha=0.08, lw=0, zorder=0)
    middles = [fmean(places[i] for i in group) for group in budgets]
    axes.set_xticks(middles, [f"{fmean(points[i].weights for i in group):.2f}" for group in budgets])


def _marks(axes: "Axes", points: Sequence[_Point], places: Sequence[float], theme: canvas.Theme, panel: str) -> None:
    for unit in dict.fromkeys(point.unit for point in points):
        colour, mark = canvas.look_of(unit, theme)
        mine = sorted((x, _height(axes, point)) for x, point in zip(places, points, strict=True) if point.unit == unit)
        if len(mine) > 1:
            axes.plot(*zip(*mine, strict=True), color=colour, lw=0.9, alpha=0.6, zorder=2)
        size = {"*": 6.6, "P": 5.2, "X": 5.2}.get(mark, 4.6)
        for x, point in zip(places, points, strict=True):
            if point.unit != unit:
                continue
            if len(point.errors) > 1 and _height(axes, point) == point.mean:
                canvas.draw_spread(axes, x, point.errors, colour)
            axes.plot(x, _height(axes, point), mark, ms=size, mfc=colour, mec=theme.page, mew=0.6, zorder=4,
                      clip_on=False, gid=canvas.id_of(panel, unit))  # fmt: skip


def _height(axes: "Axes", point: _Point) -> float:
    """Where a mark stands: at its mean, or at the upper edge if that is beyond it."""
    return min(point.mean, axes.get_ylim()[1])


def _ends(axes: "Axes", points: Sequence[_Point], places: Sequence[float], theme: canvas.Theme) -> list[canvas.End]:
    """The last mark of each unit, with the unit's name; beyond the upper edge, with its error too."""
    ends: dict[str, canvas.End] = {}
    for x, point in sorted(zip(places, points, strict=True)):
        unit, height = point.unit, _height(axes, point)
        name = _NAMES.get(unit, unit)
        name = f"{name.split(' (')[0]} {point.mean:.0f} ↑" if point.mean > height else name
        ends[unit] = canvas.End(x, height, name, canvas.look_of(unit, theme)[0], unit.startswith("dcl"))
    return list(ends.values())
