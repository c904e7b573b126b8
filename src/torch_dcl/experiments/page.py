"""Table 1 for the browser: verdict, table, every set with its runs, claims, and what is needed to repeat it."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from torch_dcl.experiments.again import command_for
from torch_dcl.experiments.claims import Finding
from torch_dcl.experiments.document import box, column, document, how, prose, table
from torch_dcl.experiments.reported import SETS, TABLE1
from torch_dcl.experiments.statistics import interval, notation
from torch_dcl.experiments.strip import strip
from torch_dcl.experiments.table import CONTROLS, Cell, Table, is_trial, mark
from torch_dcl.experiments.table1 import DEVIATIONS
from torch_dcl.experiments.text import notes
from torch_dcl.experiments.verdict import Pair, findings, reservations, scores, summary

__all__ = ["as_html", "claim", "sections"]

# A rule stands before each of these columns: the DCL models of either layer, and the controls.
GROUPS = ("A2", "B2", CONTROLS[0])
HOW_TO_READ = (
    "A point is a run, a bar the mean of the runs, a hollow diamond the paper’s mean; the dashed line is our "
    "baseline’s mean. An arrow at the edge is a run outside the axis. Differences are to the baseline on the same "
    "seeds, in points of error, with their 95 % interval: below 0 is better. Minutes are a network’s share of its "
    "fleet’s time, summed over the seeds."
)
HOW_JUDGED = (
    "Each verdict is computed, for the paper’s table and for ours. A difference is clear where its 95 % paired "
    "interval excludes 0; one in twenty does so by chance. The larger deviation is that of the two columns compared."
)
SCORED = ("lower error on", "clearly lower", "clearly higher", "lower in the paper")
TONES = {"holds": "holds", "does not hold": "fails", "not decidable": "open"}
HEADS = (
    "Network", "Paper", "Ours ± std (n)", "95 % interval", "To the baseline, 95 %", "Weights", "Minutes",
)  # fmt: skip
FITTED = '<small class="tag">fitted</small>'


def as_html(made: Table, further: Sequence[Finding] = (), recipe: Mapping[str, Any] | None = None) -> str:
    """The page.

    Args:
        made: The table.
        further: Findings from other data to show among the claims, such as `claims.large_banks_help_little`.
        recipe: What the run folder keeps, for the commands; None for the protocol.
    """
    return document(made.title, [*sections(made, further, recipe), how(made)])


def sections(
    made: Table,
    further: Sequence[Finding] = (),
    recipe: Mapping[str, Any] | None = None,
    *,
    prefix: str = "",
    figures: str = "",
) -> list[str]:
    """The page's sections up to the claims, for a place on a page.

    Args:
        made: The table.
        further: Findings from other data.
        recipe: What the run folder keeps, for the commands; None for the protocol.
        prefix: What ids begin with, where several tables stand on one page.
        figures: HTML to stand between the sets and the claims.
    """
    # What makes it a trial comes before everything else that a reader has to know.
    told = [told for told in made.deviations if is_trial(made) and told not in DEVIATIONS] + reservations(made)
    parts = [
        f'<h1>{escape(made.title)}</h1>\n<p class="soft">{escape(_extent(made))}</p>',
        f'<p class="lead">{prose(summary(made, further))}</p>',
        _scores(made),
        f"<ul>{''.join(f'<li>{prose(sentence)}</li>' for sentence in told)}</ul>" if told else "",
        f"<h2>All errors</h2>\n{_overview(made, prefix)}",
        *(f'<p class="legend">{prose(note)}</p>' for note in notes(made)),
        "<h2>Set by set</h2>",
        f'<p class="soft">{HOW_TO_READ}</p>',
        *(_one_set(made, name, prefix, recipe) for name in made.sets),
        figures,
        "<h2>Claims</h2>",
        f'<p class="soft">{HOW_JUDGED}</p>',
        *map(claim, findings(made, further)),
    ]
    return [part for part in parts if part]


def _extent(made: Table) -> str:
    counts = [len(cell.errors) for cell in made.cells]
    if not counts:
        return "No cell was run."
    seeds = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    word = "seed" if max(counts) == 1 else "seeds"
    columns = len({cell.column for cell in made.cells})
    return f"{len(made.sets)} of {len(SETS)} sets · {columns} columns · {seeds} {word} · test error in percent"


def _scores(made: Table) -> str:
    """In how many sets a column is lower than another: the verdict as a table, since its sentences are all alike."""
    found = scores(made)
    if not found:
        return ""
    groups = {
        "DCL against the baseline": [(c.column, c, paper) for c, paper in found if c.reference == "baseline"],
        "A2 against a control": [(c.reference, c, paper) for c, paper in found if c.reference in CONTROLS],
    }
    parts: list[str] = []
    for title, rows in groups.items():
        head = "".join(f'<th scope="col">{text}</th>' for text in SCORED) if not parts else "<th></th>" * len(SCORED)
        parts.append(f'<tr class="head"><th scope="col">{title}</th>{head}</tr>' if rows else "")
        for name, ours, paper in rows:
            cells = [f"{len(ours.better)} of {ours.compared}"]
            cells += [f"{len(ours.clear_better)}", f"{len(ours.clear_worse)}"] if ours.paired else ["–", "–"]
            cells.append(f"{len(paper.better)} of {paper.compared}" if paper else "–")
            parts.append(f'<tr><th scope="row">{column(name)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>')
    return box(f'<table class="scores"><tbody>{"".join(parts)}</tbody></table>', "Verdict")


def _overview(made: Table, prefix: str) -> str:
    fitted = {cell.column for cell in made.cells if cell.fitted}
    head = "".join(
        f'<th scope="col"{_lined(name)}>{escape(name)}<i></i>{FITTED if name in fitted else ""}</th>'
        for name in made.columns
    )
    rows = []
    for name in SETS:
        best = made.best(name)
        short = name.removeprefix("MNIST-")
        shown = f'<a href="#{prefix}{name}">{short}</a>' if name in made.sets else short
        cells = [f'<th scope="row">{shown}</th>']
        for each in made.columns:
            cell = made.cell(name, each)
            if cell is None:
                cells.append(f'<td{_lined(each)}><span class="absent">not run</span><i></i></td>')
                continue
            ours = f"<b>{cell.ours}</b>" if each in best else cell.ours
            cells.append(f"<td{_lined(each)}>{ours}<i>{mark(made, cell)}</i><small>{cell.theirs}<i></i></small></td>")
        first = ' class="first"' if name == "MNIST-III-01" else ""
        rows.append(f"<tr{first}>{''.join(cells)}</tr>")
    inner = f'<thead><tr><th scope="col">MNIST-</th>{head}</tr></thead><tbody>{"".join(rows)}</tbody>'
    return box(f'<table class="all sort">{inner}</table>', "All errors")


def _lined(name: str) -> str:
    return ' class="lined"' if name in GROUPS else ""


def _one_set(made: Table, name: str, prefix: str, recipe: Mapping[str, Any] | None) -> str:
    """The runs of a set, drawn and as a table; what was not run says so beside the paper's number."""
    lanes = {each: made.cell(name, each) for each in made.columns}
    cells = [cell for cell in lanes.values() if cell is not None]
    best = made.best(name)
    rows = [
        _row(made, cell, bold=each in best) if cell is not None else _absent(name, each) for each, cell in lanes.items()
    ]
    drawn, shown = strip(name, lanes), table(HEADS, rows, name)
    # Of a trial without its recipe nobody knows the settings.
    again = "" if recipe is None and is_trial(made) else _again(cells, recipe or {})
    return f'<section class="set" id="{prefix}{name}"><h3>{name}</h3>{drawn}<div>{shown}{again}</div></section>'


def _row(made: Table, cell: Cell, *, bold: bool) -> list[str]:
    ours = f"{cell.mean:.2f}" if cell.std is None else f"{cell.mean:.2f} ± {cell.std:.2f}"
    ours = f"<b>{ours}</b>" if bold else ours
    within = "–"
    if len(cell.errors) > 1:
        low, high = interval(cell.errors)
        within = f"[{low:.2f}, {high:.2f}]"
    found = made.to_baseline(cell)
    gap = ""
    if found is not None:
        gap = f"{found}<i>{found.sign}</i>"
    signs = (FITTED if cell.fitted else "") + ("†" if cell.stopped else "")
    minutes = "–" if cell.minutes is None else f"{cell.minutes:.1f}" if cell.minutes >= 1 else f"{cell.minutes:.2g}"
    return [f"{column(cell.column)}{signs}", cell.theirs, f"{ours} ({len(cell.errors)})", within, gap,
            f"{cell.weights:,}", minutes]  # fmt: skip


def _absent(name: str, each: str) -> list[str]:
    paper = TABLE1[name].get(each)
    theirs = "–" if paper is None else notation(paper.mean, paper.std)
    return [column(each), theirs, '<span class="absent">not run</span>', "", "", "", ""]


def _again(cells: Sequence[Cell], recipe: Mapping[str, Any]) -> str:
    """The command that gives the set again."""
    seeds = max(len(cell.errors) for cell in cells)
    words = command_for(recipe, [cells[0].set], [cell.column for cell in cells], seeds)
    return box(f"<code>{escape(words)}</code>", f"Command for {cells[0].set}")


def claim(pair: Pair) -> str:
    """A claim: what the paper's table says of it, and what ours does."""
    theirs, ours = pair
    return (
        f'<section class="claim"><h3>{prose(ours.claim)}</h3>'
        f'<p class="rule">Section {escape(ours.section)}. Holds if: {prose(ours.criterion)}.</p>'
        f"{_judged('The paper’s table', theirs)}{_judged('Ours', ours)}</section>"
    )


def _judged(whose: str, finding: Finding | None) -> str:
    if finding is None:
        return f"<p><span>{whose}: <strong>not decidable</strong></span>The paper prints no numbers for this.</p>"
    evidence = finding.evidence[:1].upper() + finding.evidence[1:]
    tone = TONES[finding.verdict]
    return f'<p><span>{whose}: <strong class="{tone}">{escape(finding.verdict)}</strong></span>{prose(evidence)}</p>'
