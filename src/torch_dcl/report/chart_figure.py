"""The deciding chart: error against weights, and against the time of a step."""

import itertools
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_dcl.experiments.natural_networks import TITLES
from torch_dcl.experiments.stats import interval
from torch_dcl.report.canvas import (
    _BODY,
    _INCH,
    _PAGE,
    _SMALL,
    _dress,
    _get,
    _id,
    _list,
    _n,
    _numbers,
    _style,
    _Theme,
    _theme,
)

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

    @property
    def bounds(self) -> tuple[float, float]:
        """The 95 % t-interval of the mean; the mean alone for a single seed."""
        return interval(self.errors) if len(self.errors) > 1 else (self.mean, self.mean)


def chart_figure(data: Mapping[str, Any], *, dark: bool = False) -> "Figure":
    """Draw test error against weights, and beside it against the time of a training step, a mark for each unit.

    Args:
        data: ``{"set": "cifar10", "points": [{"unit": "dcl", "weights": 5086912, "step_ms": 1.2, "errors": [...]},
            ...], "told": [...]}``. Errors are in percent, one a seed; ``told`` is what a reader has to know, and may be
            missing. A unit may have several points, for several budgets; they are joined.
        dark: For a dark page.

    Raises:
        ValueError: something is missing, empty or out of range.
    """
    points = [_read(point) for point in _list(data, "points", "chart_figure")]
    theme, width = _theme(dark), _PAGE * _INCH
    panel = (width - _LEFT - _BETWEEN) / 2 - _NAMED
    with _style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(_PAGE, _HEIGHT / _INCH), facecolor="none")
        figure.set_gid("chart")
        high = (_HEIGHT - _TOP - _BOTTOM) / _HEIGHT
        seen = [bound for point in _on_scale(points) for bound in (*point.bounds, *point.errors)]
        room = 0.06 * (min(100.0, max(seen)) - max(0.0, min(seen)) or 1)
        limits = (max(0.0, min(seen) - room), min(100.0 + room, max(seen) + room))
        budgets = _budgets(points)
        places = [_side_by_side(points, budgets), [point.step for point in points]]
        heads = (("weights", "weights of the network (millions)"), ("time", "time of a training step (ms)"))
        for i, (places_of, (name, label)) in enumerate(zip(places, heads, strict=True)):
            left = _LEFT + i * (panel + _NAMED + _BETWEEN)
            axes: Axes = figure.add_axes((left / width, _BOTTOM / _HEIGHT, panel / width, high))
            _dress(axes, theme)
            axes.set_ylim(*limits)
            span = max(places_of) - min(places_of)
            axes.set_xlim(min(places_of) - (0.1 * span or 0.5), max(places_of) + (0.1 * span or 0.5))
            axes.set_xlabel(label, labelpad=2)
            axes.set_title(f"error against {name}", loc="left", size=_BODY, color=theme.text, pad=5, weight="bold")
            if i == 0:
                axes.set_ylabel("test error (%)", labelpad=2)
                _ticks(axes, points, budgets, places_of, theme)
            _marks(axes, points, places_of, theme, name)
            _names(figure, axes, points, places_of, theme)
    notes = " ".join(map(str, data.get("told", ())))
    if len(_on_scale(points)) < len(points):
        notes = f"What errs more than twice as often as the median is at the upper edge, with its error. {notes}"
    images = str(_get(data, "set", "chart_figure"))
    network = f"BigNet on {TITLES.get(images, images)}"
    figure.set_label(
        f"Test error (%) of {network} with different layers in place of the first fully-connected one, against the "
        f"network's weights and against the measured time of a training step. Large marks are means over "
        f"{_n([point.errors for point in points])}, small dots are seeds, bars are 95 % t-intervals of the mean. "
        "On the left, layers of one budget (weights within 1 %) stand side by side on a band, the lowest error first. "
        f"DCL 3S: three narrower branches, stochastic. {notes}".strip()
    )  # fmt: skip
    return figure


def _read(point: Mapping[str, Any]) -> _Point:
    where = f"chart_figure, {_get(point, 'unit', 'chart_figure')}"
    errors = _numbers(_list(point, "errors", where), "errors", where)
    weights, step = _numbers([_get(point, "weights", where), _get(point, "step_ms", where)], "weights, step_ms", where)
    if any(not 0 <= error <= 100 for error in errors):
        raise ValueError(f"{where}: errors are {errors}; give percent, from 0 to 100")
    if weights <= 0 or step <= 0:
        raise ValueError(f"{where}: weights are {weights:g} and step_ms {step:g}; both must be above 0")
    return _Point(str(point["unit"]), weights / 1e6, step, errors)


def _on_scale(points: Sequence[_Point]) -> list[_Point]:
    """Those that the axis is for: without what errs more than twice as often as the median, if it learned at all."""
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
    axes: "Axes", points: Sequence[_Point], budgets: Sequence[Sequence[int]], places: Sequence[float], theme: _Theme
) -> None:
    """A number for each budget, and a band behind those that share one: their places inside of it mean nothing."""
    margin = 0.03 * (max(places) - min(places))
    for group in budgets:
        if len(group) > 1:
            inside = [places[i] for i in group]
            axes.axvspan(min(inside) - margin, max(inside) + margin, color=theme.muted, alpha=0.08, lw=0, zorder=0)
    middles = [fmean(places[i] for i in group) for group in budgets]
    axes.set_xticks(middles, [f"{fmean(points[i].weights for i in group):.2f}" for group in budgets])


def _look(unit: str, theme: _Theme) -> tuple[str, str]:
    """Colour and mark of a unit."""
    looks = {
        "plain": (theme.text, "s"), "narrow": (theme.muted, "v"), "low-rank": (theme.green, "^"),
        "summed": (theme.orange, "P"), "dcl": (theme.blue, "o"), "dcl3s": (theme.sky, "o"), "star": (theme.red, "*"),
        "glu": (theme.purple, "D"), "bilinear": (theme.muted, "X"),
    }  # fmt: skip
    return looks.get(unit, (theme.muted, "h"))


def _marks(axes: "Axes", points: Sequence[_Point], places: Sequence[float], theme: _Theme, panel: str) -> None:
    for unit in dict.fromkeys(point.unit for point in points):
        colour, mark = _look(unit, theme)
        mine = sorted((x, _height(axes, point)) for x, point in zip(places, points, strict=True) if point.unit == unit)
        if len(mine) > 1:
            axes.plot(*zip(*mine, strict=True), color=colour, lw=0.9, alpha=0.6, zorder=2)
        size = {"*": 6.6, "P": 5.2, "X": 5.2}.get(mark, 4.6)
        for x, point in zip(places, points, strict=True):
            if point.unit != unit:
                continue
            low, high = point.bounds
            if low < high and _height(axes, point) == point.mean:
                axes.errorbar(
                    x, point.mean, [[point.mean - low], [high - point.mean]], color=colour, lw=1.0, capsize=1.8,
                    capthick=1.0, zorder=3,
                )  # fmt: skip
                axes.plot([x] * len(point.errors), point.errors, "o", ms=1.9, mfc=colour, mec="none", alpha=0.55)
            axes.plot(x, _height(axes, point), mark, ms=size, mfc=colour, mec=theme.page, mew=0.6, zorder=4,
                      clip_on=False, gid=_id(panel, unit))  # fmt: skip


def _height(axes: "Axes", point: _Point) -> float:
    """Where a mark stands: at its mean, or at the upper edge if that is beyond it."""
    return min(point.mean, axes.get_ylim()[1])


def _names(figure: "Figure", axes: "Axes", points: Sequence[_Point], places: Sequence[float], theme: _Theme) -> None:
    """Name the units beside the panel, moved apart where names would overlap, each with a thin line from its mark."""
    ends: dict[str, tuple[float, float]] = {}
    named: dict[str, str] = {}
    for x, point in zip(places, points, strict=True):
        if point.unit not in ends or x > ends[point.unit][0]:
            ends[point.unit] = (x, _height(axes, point))
            name = _NAMES.get(point.unit, point.unit)
            beyond = point.mean > ends[point.unit][1]
            named[point.unit] = f"{name.split(' (')[0]} {point.mean:.0f} ↑" if beyond else name
    box, high = axes.get_window_extent(), axes.transData
    order = sorted(ends, key=lambda unit: ends[unit][1])
    heights = [(high.transform(ends[unit])[1] - box.y0) / box.height for unit in order]
    step = 1.28 * _SMALL / 72 * figure.dpi / box.height
    placed = list(heights)
    for _ in range(300):  # neighbours push each other away, a little at a time
        for a in range(len(placed) - 1):
            overlap = placed[a] + step - placed[a + 1]
            if overlap > 0:
                placed[a] -= overlap / 2
                placed[a + 1] += overlap / 2
        placed[0], placed[-1] = max(placed[0], 0.0), min(placed[-1], 1.0)
    for unit, start, end in zip(order, heights, placed, strict=True):
        colour, _ = _look(unit, theme)
        x = (high.transform(ends[unit])[0] - box.x0) / box.width
        axes.plot(
            [x, 1.0, 1.045], [start, start, end], transform=axes.transAxes, color=colour, lw=0.5, alpha=0.7,
            ls=(0, (1, 1.6)), clip_on=False, zorder=1,
        )  # fmt: skip
        axes.text(
            1.06, end, named[unit], transform=axes.transAxes, color=colour, size=_SMALL,
            va="center_baseline", ha="left", weight="bold" if unit.startswith("dcl") else "normal",
        )  # fmt: skip
