"""The content of the pages of Table 1, Table 2 and the chart: numbers and sentences for their templates."""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from markupsafe import Markup

from torch_dcl.data.relations import TASKS
from torch_dcl.experiments.claims import Finding, findings, summary
from torch_dcl.experiments.natural_networks import COLUMNS, DATA, TITLES, network_of, paper_error
from torch_dcl.experiments.paper_numbers import DCL_COLUMNS, SETS, TABLE1, TABLE2, THREE_DIGITS, TWO_DIGITS
from torch_dcl.experiments.recipes import table1, table2
from torch_dcl.experiments.recipes.chart import budget_of, chart_grid, chart_verdict, lowest_first, rates_at_edge
from torch_dcl.experiments.recipes.relations import COLUMNS as RELATION_COLUMNS
from torch_dcl.experiments.recipes.relations import EXTRAS, cells_grid
from torch_dcl.experiments.recipes.table1 import effects, notes, reservations, scores, verdict
from torch_dcl.experiments.relation_findings import (
    DCL,
    answer,
    details,
    exponents_in_words,
    judge_hypotheses,
    needed_in_words,
)
from torch_dcl.experiments.stats import Difference, interval, is_complete, mean, mean_std_n, notation, signed
from torch_dcl.experiments.table import B_CONTROLS, CONTROLS, Cell, Table, is_trial, mark
from torch_dcl.report.document import bold, figure, on_page
from torch_dcl.report.figures import chart_figure

__all__ = [
    "chart_context", "column", "differences", "markdown_context", "relations_context", "table1_context",
    "table2_context", "tried_context",
]  # fmt: skip

NOT_RUN = Markup('<span class="absent">{}</span>')
SIGN = Markup("{}<i>{}</i>")


def column(name: str) -> Markup:
    """The name of a network, with the dot of its colour."""
    return Markup('<span class="c-{0}"><span class="dot"></span></span>{0}').format(name)


def table1_context(
    table: Table, further: Sequence[Finding] = (), asked: Mapping[str, Any] | None = None, prefix: str = ""
) -> dict[str, Any]:
    """What ``table1.html`` shows; ids begin with a prefix where several tables stand on one page."""
    # What makes it a trial comes before everything else that a reader has to know.
    departures = [text for text in table.deviations if is_trial(table) and text not in table1.DEVIATIONS]
    return {
        "table": table, "prefix": prefix, "extent": _extent(table, len(SETS)), "summary": summary(table, further),
        "scored": _scored(table), "notes": notes(table), "all_sets": SETS,
        "sentences": departures + effects(table)[-1:] + reservations(table),
        "fitted": {cell.column for cell in table.cells if cell.fitted}, "findings": findings(table, further),
        "by_set": [_one_set(table, name, asked) for name in table.sets], "with_figures": False,
    }  # fmt: skip


def _scored(table: Table) -> dict[str, list[list[Markup | str]]]:
    """Mean differences over the sets of two and of three digits, and on how many sets the error is lower, by group."""
    scored: dict[str, list[list[Markup | str]]] = {}
    for ours, paper in scores(table):
        reference, name = ours.reference, column(ours.column)
        group = f"Minus {ours.named}"
        if reference in CONTROLS:
            group, name = "A2 minus a control", column(reference)
        elif any(reference in controls for controls in B_CONTROLS.values()):
            group, name = "Minus a control of its weights", name + f" − {reference}"
        pooled = [ours.effect(sets) for sets in (TWO_DIGITS, THREE_DIGITS)]
        lower = [f"{len(of.better)} of {of.compared}" if of else "–" for of in (ours, paper)]
        scored.setdefault(group, []).append([name, *("–" if e is None else str(e) for e in pooled), *lower])
    return scored


def _extent(table: Table, sets: int) -> str:
    counts = [len(cell.errors) for cell in table.cells]
    if not counts:
        return "No cell was run."
    seeds = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    columns, there = len({cell.column for cell in table.cells}), len({cell.set for cell in table.cells})
    word = "seed" if max(counts) == 1 else "seeds"
    scale = getattr(table, "scale", 1)
    short = "" if scale == 1 else f" · shortened to {scale:g} of the epochs"
    return f"{there} of {sets} sets · {columns} columns · {seeds} {word} · test error in percent{short}"


def _one_set(table: Table, name: str, asked: Mapping[str, Any] | None) -> dict[str, Any]:
    """The runs of a set, drawn and as a table; a column that was not run has a note beside the paper's number."""
    lanes = {each: table.cell(name, each) for each in table.columns}
    cells = [cell for cell in lanes.values() if cell is not None]
    rows = []
    for each, cell in lanes.items():
        if cell is None:
            paper = TABLE1[name].get(each)
            theirs = "–" if paper is None else notation(paper.mean, paper.std)
            rows.append([column(each), theirs, NOT_RUN.format("not run"), "", "", "", ""])
            continue
        within = "–" if len(cell.errors) < 2 else "[{:.2f}, {:.2f}]".format(*interval(cell.errors))
        signs = Markup('<small class="tag">fitted</small>' if cell.fitted else "") + ("†" if cell.stopped else "")
        rows.append([column(each) + signs, cell.theirs, _ours(cell, each in table.best(name)), within,
                     _gap(table.to_baseline(cell)), f"{cell.weights:,}", _minutes(cell)])  # fmt: skip
    command = ""
    # Without its recipe the settings of a trial are unknown.
    if asked is not None or not is_trial(table):
        seeds = max(len(cell.errors) for cell in cells)
        command = table1.command_for(asked or {}, [name], [cell.column for cell in cells], seeds)
    return {"name": name, "strip": strip(name, lanes), "rows": rows, "command": command}


def _ours(cell: Cell, is_best: bool) -> Markup:
    ours = f"{cell.mean:.2f}" if cell.std is None else f"{cell.mean:.2f} ± {cell.std:.2f}"
    return bold(ours, is_best) + f" ({len(cell.errors)})"


def _gap(gap: Difference | None) -> Markup | str:
    return "" if gap is None else SIGN.format(str(gap), gap.sign)


def _minutes(cell: Cell) -> str:
    if cell.minutes is None:
        return "–"
    if cell.minutes < 0.01:
        return "< 0.01"
    return f"{cell.minutes:.1f}" if cell.minutes >= 1 else f"{cell.minutes:.2g}"


def differences(table: Table) -> list[dict[str, Any]]:
    """Every DCL cell's difference to the baseline, with the paper's beside it: what `differences_figure` draws."""
    cells = []
    for each in DCL_COLUMNS:
        for name in table.sets:
            cell = table.cell(name, each)
            gap = table.to_baseline(cell) if cell is not None else None
            if gap is not None:
                paper = TABLE1[name]
                cells.append({"set": name, "column": each, "difference": gap.mean, "low": gap.low, "high": gap.high,
                              "paper_difference": paper[each].mean - paper["baseline"].mean})  # fmt: skip
    return cells


def table2_context(table: table2.NaturalTable, prefix: str = "") -> dict[str, Any]:
    """What ``table2.html`` shows."""
    lead, *rest = table2.verdict(table) or ["Nothing to compare yet."]
    departures = [text for text in table.deviations if is_trial(table) and text not in table2.DEVIATIONS]
    sentences = departures + rest
    if table.scale < 1:
        sentences.insert(0, f"Shortened: every recipe was trained for {table.scale:g} of its epochs.")
    # Before anything is run, the paper's own networks are shown.
    by_set = []
    for name in table.sets:
        columns = table.columns or tuple(each for each in COLUMNS if paper_error(each, name) is not None)
        reason = table.absent.get(name)
        rows = [_natural_row(table, name, each, reason or "not run") for each in columns]
        shortened = table.scale != 1 and not reason
        by_set.append({"name": name, "title": TITLES[name], "shortened": shortened, "rows": rows})
    return {
        "table": table, "prefix": prefix, "extent": _extent(table, len(DATA)), "lead": lead, "sentences": sentences,
        "by_set": by_set, "quoted": _quoted(DATA), "titles": [TITLES[name] for name in DATA],
    }  # fmt: skip


def _quoted(sets: Sequence[str]) -> list[list[str]]:
    """The rows of Table 2 that the paper quotes."""
    return [
        [f"{row.name} {row.reference.split('_')[1]}", *(_percent(row.errors[name.upper()]) for name in sets)]
        for row in TABLE2
        if row.reference
    ]


def markdown_context(table: Table) -> dict[str, Any]:
    """What ``table.md`` shows."""
    is_natural = isinstance(table, table2.NaturalTable)
    return {
        "table": table, "is_natural": is_natural, "notes": notes(table), "shown": _in_markdown, "weights": _weights,
        "sentences": table2.verdict(table) if isinstance(table, table2.NaturalTable) else verdict(table),
        "findings": () if is_natural else findings(table), "quoted": _quoted(table.sets) if is_natural else (),
    }  # fmt: skip


def _in_markdown(table: Table, name: str, each: str) -> str:
    """A cell: our number, and the paper's beneath; of Table 2 the difference to the plain network as well."""
    cell, theirs = table.cell(name, each), table.paper_of(each, name)[0]
    if isinstance(table, table2.NaturalTable):
        if cell is None:
            paper = "" if theirs is None else f"<br>paper {theirs:.2f}"
            return table.absent.get(name, "not run") + (paper if name in table.absent else "")
        gap = table.to_baseline(cell)
        lines = [f"{cell.ours} × {len(cell.seeds)}{'†' if cell.stopped else ''}", f"paper {cell.theirs}"]
        return "<br>".join([*lines, *([str(gap)] if gap is not None else [])])
    if cell is None:
        return "not run"
    ours = f"**{cell.ours}**" if each in table.best(name) else cell.ours
    return f"{ours}{mark(table, cell)}<br>{cell.theirs}".replace("*†", r"\*†")


def _weights(table: Table, each: str) -> str:
    counts = dict.fromkeys(cell.weights for cell in table.cells if cell.column == each)
    return ", ".join(f"{count:,}" for count in counts)


def _natural_row(table: table2.NaturalTable, name: str, each: str, reason: str) -> list[Markup | str]:
    cell, plain = table.cell(name, each), table.cell(name, network_of(each))
    paper, paper_plain = paper_error(each, name), paper_error(network_of(each), name)
    paper_gap = "" if paper is None or paper_plain is None or "+" not in each else signed(paper - paper_plain)
    if cell is None:
        return [each, _percent(paper), NOT_RUN.format(reason), "", paper_gap, "", "", ""]
    gap = _gap(table.to_baseline(cell))
    if not gap and each != network_of(each) and plain is not None:
        gap = SIGN.format(signed(cell.mean - plain.mean), "")
    losses = f"{_loss(cell.train_loss)} · {_loss(cell.test_loss)}"
    return [f"{each}{'†' if cell.stopped else ''}", cell.theirs, _ours(cell, each in table.best(name)), gap, paper_gap,
            losses, f"{cell.weights:,}", _minutes(cell)]  # fmt: skip


def _loss(values: Sequence[float] | None) -> str:
    """The mean of those that are finite."""
    finite = [value for value in values or () if is_complete([value])]
    return f"{mean(finite):.3f}" if finite else "–"


def _percent(error: float | None) -> str:
    return "–" if error is None else f"{error:.2f}"


def chart_context(chart: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The points of the chart, how they were measured, and its figure."""
    points = lowest_first(chart)
    rates = sorted({rate for point in points for rate in point["trials"]}, key=float)
    trials = []
    for point in points:
        tried = {rate: bold(f"{error:.2f}", float(rate) == point["lr"]) for rate, error in point["trials"].items()}
        trials.append([point["unit"], budget_of(point), *(tried.get(rate, "–") for rate in rates)])
    words = (
        "The budget is the filters of one of DCL’s two branches as a fraction of the layer’s. A difference is the "
        "layer’s error minus that of DCL on the same seeds, with the 95 % confidence interval of the paired "
        "differences, not corrected. p is of the paired t-test after Holm’s correction over all comparisons of the "
        "chart; ▴ marks a layer that errs more than DCL (p below 0.05), ▾ one that errs less. Trained on all training "
        f"images: {chart['recipe']}, with each layer’s own rate instead of the recipe’s. The test set is evaluated "
        "once."
    )
    search = (
        "Error in percent on a tenth of the training images that was held out, one seed that the chart does not use, "
        f"{chart['search_scale']:g} of the recipe’s epochs. Bold is the rate that the layer takes. "
        f"{rates_at_edge(chart) or ''}"
    )
    return {
        "said": chart_verdict(chart), "drawn": figure(lambda dark: chart_figure(chart, dark=dark), f"{name}-chart"),
        "told": [str(sentence) for sentence in chart.get("told", ())], "grid": on_page(chart_grid(chart)),
        "words": words, "rates": [f"at {rate}" for rate in rates], "trials": trials, "search": search.strip(),
    }  # fmt: skip


def relations_context(data: Mapping[str, Any]) -> dict[str, Any]:
    """The answer, the hypotheses, and the rows of the tables."""
    needed, trials, exponents = [], [], []
    rates = sorted({rate for cell in data["cells"] for rate in cell["trials"]}, key=float)
    columns = list(dict.fromkeys(cell["column"] for cell in data["cells"]))
    others = [column for column in columns if column != DCL]
    for cell in data["cells"]:
        task, images, column = cell["task"], cell["images"], cell["column"]
        place = [TASKS[task].title, f"{images:,}"]
        tried = {rate: _trial(cell, rate) for rate in cell["trials"]}
        trials.append([*place, column, *(tried.get(rate, "–") for rate in rates)])
        if "exponents" in cell:
            exponents.append([*place, column, exponents_in_words(cell["exponents"])])
        if column == DCL:
            words = [needed_in_words(data, task, other, images) for other in others]
            words = [text.replace("fewer than", "<").replace("more than", ">") for text in words]
            failed = any(other["failed"] for other in data["cells"] if other["task"] == task)
            needed.append([*place, f"{mean(cell['errors']):.2f}{' †' if failed else ''}", *words])
    meant = {name: what for name, what in (RELATION_COLUMNS | EXTRAS).items() if name in columns}
    flags = [text for text in details(data) if text.startswith(("Best at", "Diverged"))]
    trainings = sum(len(cell["errors"]) + sum(map(len, cell["trials"].values())) for cell in data["cells"])
    return {
        "said": answer(data), "told": list(data["told"]), "flags": flags, "grid": on_page(cells_grid(data)),
        "hypotheses": {each.name: each.said for each in judge_hypotheses(data)}, "medians": _medians(data, columns),
        "needed": needed, "columns": columns, "others": others, "exponents": exponents, "meant": meant,
        "trials": trials, "rates": [f"at {rate}" for rate in rates], "digits": data["digits"],
        "extent": f"{trainings:,} trainings of {data['steps']:,} steps, {data['minutes']:.1f} minutes",
    }  # fmt: skip


def _trial(cell: Mapping[str, Any], rate: str) -> Markup:
    """The mean validation error at a rate; bold where it was chosen, with a sign where a network failed."""
    errors = cell["trials"][rate]
    failed = any(error >= TASKS[cell["task"]].chance - 1 for error in errors)
    return bold(f"{mean(errors):.2f}{' †' if failed else ''}", float(rate) == cell["chosen"])


def _medians(data: Mapping[str, Any], columns: Sequence[str]) -> list[list[str]]:
    """The medians of all columns in the settings in which networks failed, with how many did."""
    places = dict.fromkeys((cell["task"], cell["images"]) for cell in data["cells"] if cell["failed"])
    rows = []
    for task, images in places:
        cells = {c["column"]: c for c in data["cells"] if (c["task"], c["images"]) == (task, images)}
        texts = [
            f"{median(cells[column]['errors']):.2f}"
            + (f" † {len(cells[column]['failed'])}" if cells[column]["failed"] else "")
            if column in cells
            else "–"
            for column in columns
        ]
        rows.append([TASKS[task].title, f"{images:,}", *texts])
    return rows


def tried_context(data: Mapping[str, Any]) -> dict[str, Any]:
    """More branches, and both layers replaced."""
    rows = [
        [column(row["column"]), mean_std_n(row["errors"]), f"{row['weights']:,}", f"{100 * row['one_fires']:.0f} %",
         f"{100 * row['all_fire']:.1f} %"]
        for row in data["columns"]
    ]  # fmt: skip
    return {"set": data["set"], "rows": rows}


# The runs of one set as a small drawing: a lane per column, a point per seed.

WIDTH, LANE, HEAD, LEFT, RIGHT = 300, 26, 30, 66, 16


def strip(name: str, cells: Mapping[str, Cell | None]) -> dict[str, Any]:
    """Where everything stands in the drawing of a set, for the macro ``strip``; columns from top to bottom.

    Runs that diverged do not stretch the axis; outside of it they are arrows at its edge. A column that was not run has
    the paper's diamond alone.
    """
    paper = {column: reported.mean for column in cells if (reported := TABLE1[name].get(column)) is not None}
    low, high, ticks = _axis([cell for cell in cells.values() if cell is not None], list(paper.values()))

    def x(value: float | None) -> str:
        """Where a value stands; nothing outside of the axis."""
        if value is None or not low <= value <= high:
            return ""
        return f"{LEFT + (WIDTH - LEFT - RIGHT) * (value - low) / (high - low):.1f}"

    base = cells.get("baseline")
    lanes = [
        {"column": column, "y": HEAD + LANE * i + LANE / 2, "is_run": cell is not None,
         "mean": x(cell.mean if cell else None),
         "runs": [(seed, error, x(error)) for seed, error in (cell.runs.items() if cell else ())],
         "paper": paper.get(column), "diamond": x(paper.get(column))}
        for i, (column, cell) in enumerate(cells.items())
    ]  # fmt: skip
    return {
        "name": name, "width": WIDTH, "top": HEAD, "bottom": HEAD + LANE * len(cells), "edge": WIDTH - RIGHT + 4,
        "ticks": [(x(tick), tick) for tick in ticks], "base": x(base.mean if base else None), "lanes": lanes,
    }  # fmt: skip


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
