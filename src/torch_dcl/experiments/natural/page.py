"""Table 2 and the deciding chart for the browser."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from torch_dcl.experiments.document import document, how, prose, table
from torch_dcl.experiments.natural.points import against_dcl, edges_said, lowest_first, shown_error
from torch_dcl.experiments.natural.recipes import COLUMNS, DATA, TITLES, network_of, paper_error
from torch_dcl.experiments.natural.table import DEVIATIONS, NaturalTable, said
from torch_dcl.experiments.reported import TABLE2
from torch_dcl.experiments.statistics import mean, signed
from torch_dcl.experiments.table import Cell

__all__ = ["as_html2", "chart_table", "sections2"]

HEADS = (
    "Network", "Paper %", "Ours % ± std (n)", "DCL − plain, 95 %", "Paper’s DCL − plain", "Loss, train · test",
    "Weights", "Minutes",
)  # fmt: skip
HOW_TO_READ = (
    "Test error in percent: mean, standard deviation and number of seeds; bold is the lowest of a network. "
    "A difference is to the plain network on the same seeds, in points of error, with the 95 % interval of the paired "
    "differences: below 0 is better, ▾ and ▴ mark an interval without 0. +dcl has two branches, +dcl3s three with the "
    "stochastic strategy, which are not in the paper’s table. Losses are of the last epoch, the training’s with its "
    "augmentation and dropout, mean over the seeds. Minutes are a network’s share of its fleet’s time, "
    "summed over the seeds."
)
QUOTED = "As the paper quotes them, in percent; none was run here."


def as_html2(made: NaturalTable) -> str:
    """The page.

    Args:
        made: The table.
    """
    return document(made.title, [*sections2(made), how(made)])


def sections2(made: NaturalTable, *, prefix: str = "") -> list[str]:
    """The page's sections up to the rows that the paper quotes, for a place on a page.

    Args:
        made: The table.
        prefix: What ids begin with, where several tables stand on one page.
    """
    lead, *rest = said(made) or ["Nothing to compare yet."]
    # What makes it a trial comes before everything else that a reader has to know.
    told = [deviation for deviation in made.deviations if deviation not in DEVIATIONS] + rest
    if made.scale < 1:
        told.insert(0, f"Shortened: every recipe was trained for {made.scale:g} of its epochs.")
    parts = [
        f'<h1>{escape(made.title)}</h1>\n<p class="soft">{escape(_extent(made))}</p>',
        f'<p class="lead">{prose(lead)}</p>',
        f"<ul>{''.join(f'<li>{prose(sentence)}</li>' for sentence in told)}</ul>" if told else "",
        "<h2>Set by set</h2>",
        f'<p class="soft">{HOW_TO_READ}</p>',
        *(_one_set(made, name, prefix) for name in made.sets),
        f'<h2>What the paper sets beside it</h2>\n<p class="soft">{QUOTED}</p>',
        _literature(),
    ]
    return [part for part in parts if part]


def _extent(made: NaturalTable) -> str:
    counts = [len(cell.errors) for cell in made.cells]
    if not counts:
        return "No cell was run."
    seeds = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    sets = len({cell.set for cell in made.cells})
    return (
        f"{sets} of {len(DATA)} sets · {len(made.columns)} columns · {seeds} {'seed' if max(counts) == 1 else 'seeds'} "
        f"· test error in percent{'' if made.scale == 1 else f' · shortened to {made.scale:g} of the epochs'}"
    )


def _one_set(made: NaturalTable, name: str, prefix: str) -> str:
    reason = made.absent.get(name)
    tag = "" if made.scale == 1 or reason else '<small class="tag">shortened</small>'
    # Before anything is run, the paper's own networks are shown.
    columns = made.columns or tuple(column for column in COLUMNS if paper_error(column, name) is not None)
    best = made.best(name)
    rows = []
    for column in columns:
        cell = made.cell(name, column)
        rows.append(_absent(name, column, reason or "not run") if cell is None else _row(made, cell, column in best))
    title = f'<h3 class="small" id="{prefix}{name}">{TITLES[name]}{tag}</h3>'
    return f"<section>{title}{table(HEADS, rows, TITLES[name])}</section>"


def _row(made: NaturalTable, cell: Cell, bold: bool) -> list[str]:
    ours = f"{cell.mean:.2f}" if cell.std is None else f"{cell.mean:.2f} ± {cell.std:.2f}"
    ours = f"<b>{ours}</b>" if bold else ours
    found = made.to_baseline(cell)
    gap = ""
    if found is not None:
        gap = f"{found}<i>{found.sign}</i>"
    elif cell.column != network_of(cell.column) and (plain := made.cell(cell.set, network_of(cell.column))) is not None:
        gap = f"{signed(cell.mean - plain.mean)}<i></i>"
    minutes = "–" if cell.minutes is None else f"{cell.minutes:.1f}" if cell.minutes >= 1 else f"{cell.minutes:.2g}"
    return [f"{escape(cell.column)}{'†' if cell.stopped else ''}", cell.theirs, f"{ours} ({len(cell.errors)})", gap,
            _paper_gap(cell.set, cell.column), f"{_loss(cell.train_loss)} · {_loss(cell.test_loss)}",
            f"{cell.weights:,}", minutes]  # fmt: skip


def _loss(values: Sequence[float] | None) -> str:
    """The mean of those that are finite."""
    finite = [value for value in values or () if math.isfinite(value)]
    return f"{mean(finite):.3f}" if finite else "–"


def _absent(name: str, column: str, reason: str) -> list[str]:
    theirs = paper_error(column, name)
    shown = "–" if theirs is None else f"{theirs:.2f}"
    return [
        escape(column),
        shown,
        f'<span class="absent">{escape(reason)}</span>',
        "",
        _paper_gap(name, column),
        "",
        "",
        "",
    ]


def _paper_gap(name: str, column: str) -> str:
    theirs, plain = paper_error(column, name), paper_error(network_of(column), name)
    return "" if theirs is None or plain is None or "+" not in column else signed(theirs - plain)


def _literature() -> str:
    rows = [
        [f"{escape(row.name)} {row.reference.split('_')[1]}", *(_percent(row.errors[name.upper()]) for name in DATA)]
        for row in TABLE2
        if row.reference
    ]
    return table(("Published by", *(TITLES[name] for name in DATA)), rows, "Literature")


def _percent(error: float | None) -> str:
    return "–" if error is None else f"{error:.2f}"


def chart_table(chart: Mapping[str, Any]) -> str:
    """The points of the deciding chart as a table, and how they were come by.

    Args:
        chart: What `torch_dcl.experiments.recipes.chart` made.
    """
    rows = [
        [
            f"{escape(point['unit'])}<small>{escape(point['what'])}</small>", _budget(point), shown_error(point),
            "" if (found := against_dcl(chart, point)) is None else f"{found}<i>{found.sign}</i>",
            f"{point['weights']:,}", f"{point['step_ms']:.2f}", f"{point['lr']:g}",
        ]
        for point in lowest_first(chart)
    ]  # fmt: skip
    heads = ("Layer", "Budget", "Error % ± std (n)", "Difference to DCL (95 % CI)", "Weights", "Step ms", "Rate")
    words = (
        "The budget is the filters of one of DCL’s two branches as a part of the layer’s. A difference is the layer’s "
        "error minus that of DCL on the same seeds, with the 95 % interval of the paired differences; ▾ and ▴ mark one "
        f"without 0. Trained on all training images: {chart['recipe']}, with each layer’s own rate in place of the "
        "recipe’s. The test set is looked at once."
    )
    told = "".join(f"<li>{prose(str(sentence))}</li>" for sentence in chart.get("told", ()))
    lines = f"<ul>{told}</ul>" if told else ""
    return f'{lines}{table(heads, rows, "Points of the chart")}<p class="legend">{prose(words)}</p>{_tried(chart)}'


def _budget(point: Mapping[str, Any]) -> str:
    return "–" if point["unit"] == "plain" else f"{point['share']:g}"


def _tried(chart: Mapping[str, Any]) -> str:
    """The search of learning rates."""
    rates = sorted({rate for point in chart["points"] for rate in point["trials"]}, key=float)
    rows = []
    for point in lowest_first(chart):
        tried = {rate: f"{error:.2f}" for rate, error in point["trials"].items()}
        found = {rate: f"<b>{error}</b>" if float(rate) == point["lr"] else error for rate, error in tried.items()}
        rows.append([escape(point["unit"]), _budget(point), *(found.get(rate, "–") for rate in rates)])
    words = (
        "Error in percent on a tenth of the training images that was kept apart, one seed that the chart does not use, "
        f"{chart['search_scale']:g} of the recipe’s epochs. Bold is the rate that the layer takes. "
        f"{edges_said(chart) or ''}"
    )
    heads = ("Layer", "Budget", *(f"at {rate}" for rate in rates))
    title = '<h3 class="small">Learning rates that were tried</h3>'
    return (
        f'<section>{title}{table(heads, rows, "Learning rates")}<p class="legend">{prose(words.strip())}</p></section>'
    )
