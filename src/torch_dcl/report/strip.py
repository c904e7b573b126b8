"""The runs of one set as a small drawing: a lane per column, a point per seed."""

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from torch_dcl.experiments.paper_numbers import TABLE1
from torch_dcl.experiments.table import Cell

__all__ = ["strip"]

WIDTH = 300
LANE = 26
HEAD = 30
FOOT = 24
LEFT = 66
RIGHT = 16


def strip(name: str, cells: Mapping[str, Cell | None]) -> str:
    """An inline SVG with the errors of one set.

    A filled point is a run, the bar is their mean, a hollow diamond is the paper's mean, and the dashed line stands at
    the mean of the baseline. Runs that diverged do not stretch the axis; outside of it they are arrows at its edge. A
    column that was not run has the paper's diamond alone.

    Args:
        name: The set.
        cells: Its columns from top to bottom, with None for those that were not run.
    """
    paper = {column: reported.mean for column in cells if (reported := TABLE1[name].get(column)) is not None}
    run = [cell for cell in cells.values() if cell is not None]
    low, high, ticks = _axis(run, list(paper.values()))
    height = HEAD + LANE * len(cells) + FOOT
    bottom = HEAD + LANE * len(cells)

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / (high - low)

    parts = [
        f'<svg class="strip" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'aria-label="{escape(name)}: errors of every run in percent, by column">'
    ]
    for tick in ticks:
        parts.append(f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{HEAD}" y2="{bottom}"/>')
        parts.append(f'<text class="tick" x="{x(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    for cell in run:
        if cell.column == "baseline" and low <= cell.mean <= high:
            at = f"{x(cell.mean):.1f}"
            parts.append(f'<line class="base" x1="{at}" x2="{at}" y1="{HEAD}" y2="{bottom}"/>')
    for i, (column, lane) in enumerate(cells.items()):
        y = HEAD + LANE * i + LANE / 2
        parts.append(f'<g class="c-{escape(column)}">')
        kind = "lane" if lane is not None else "lane tick"
        parts.append(f'<text class="{kind}" x="0" y="{y + 4:g}">{escape(column)}</text>')
        if lane is not None:
            parts += _runs(lane, y, low, high, x)
        if column in paper:
            title = f"<title>{escape(column)} in the paper: {paper[column]:.2f}</title>"
            parts.append(f'<path class="paper" d="M{x(paper[column]):.1f} {y - 5:g}l5 5l-5 5l-5 -5z">{title}</path>')
        parts.append("</g>")
    parts.append("</svg>")
    return "".join(parts)


def _runs(cell: Cell, y: float, low: float, high: float, x: Callable[[float], float]) -> list[str]:
    """A point a run, and the bar of their mean."""
    parts = []
    for seed, error in cell.runs.items():
        title = f"<title>{escape(cell.column)}, seed {seed}: {error:.2f}</title>"
        if error > high:
            edge = WIDTH - RIGHT + 4
            parts.append(f'<path d="M{edge} {y - 4:g}l7 4l-7 4z">{title}</path>')
        else:
            parts.append(f'<circle cx="{x(error):.1f}" cy="{y:g}" r="3">{title}</circle>')
    if low <= cell.mean <= high:
        at = f"{x(cell.mean):.1f}"
        parts.append(f'<line class="mean" x1="{at}" x2="{at}" y1="{y - 8:g}" y2="{y + 8:g}"/>')
    return parts


def _axis(cells: Sequence[Cell], paper: Sequence[float]) -> tuple[float, float, list[float]]:
    """Both ends and the ticks, over the paper's means and the runs that did not diverge."""
    values = [error for cell in cells for seed, error in cell.runs.items() if seed not in cell.stopped]
    values += paper
    if not values:
        values = [error for cell in cells for error in cell.errors]
    low, high = min(values), max(values)
    pad = max(0.06 * (high - low), 0.02)
    low, high = max(low - pad, 0.0), high + pad
    rough = (high - low) / 4
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(m * scale for m in (1, 2, 2.5, 5, 10) if m * scale >= rough)
    first = math.ceil(low / step)
    return low, high, [round(k * step, 6) for k in range(first, math.floor(high / step) + 1)]
