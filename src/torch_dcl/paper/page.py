"""Table 1 as one page for the browser. The page asks for nothing from outside."""

from collections.abc import Mapping, Sequence
from html import escape

from torch_dcl.paper.claims import Finding
from torch_dcl.paper.reported import SETS
from torch_dcl.paper.statistics import signed
from torch_dcl.paper.strip import strip
from torch_dcl.paper.style import CSS
from torch_dcl.paper.table import CONTROLS, Cell, Table
from torch_dcl.paper.text import mark, notes
from torch_dcl.paper.verdict import Pair, findings, reservations, scores, summary

__all__ = ["as_html"]

# A rule stands before each of these columns: the DCL models of either layer, and the controls.
GROUPS = ("A2", "B2", CONTROLS[0])
HOW_TO_READ = (
    "A point is a run, a bar the mean of the runs, a hollow diamond the paper’s mean; the dashed line is our "
    "baseline’s mean. An arrow at the edge is a run outside the axis. Differences are to the baseline on the same "
    "seeds, in points of error, with their 95 % interval: below 0 is better."
)
HOW_JUDGED = (
    "Each verdict is computed, for the paper’s table and for ours. A difference is clear where its 95 % paired "
    "interval excludes 0; one in twenty does so by chance. The larger deviation is that of the two columns compared."
)
SCORED = ("lower error on", "clearly lower", "clearly higher", "lower in the paper")
TONES = {"holds": "holds", "does not hold": "fails", "not decidable": "open"}


def as_html(table: Table, further: Sequence[Finding] = ()) -> str:
    """The page: verdict, table, every set with its runs, claims, and what is needed to repeat it.

    Args:
        table: The table.
        further: Findings from other data to show among the claims, such as `claims.large_banks_help_little`.
    """
    told = reservations(table)
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escape(table.title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>",
        f'<h1>{escape(table.title)}</h1>\n<p class="soft">{escape(_extent(table))}</p>',
        f'<p class="lead">{_prose(summary(table, further))}</p>',
        _scores(table),
        f"<ul>{''.join(f'<li>{_prose(sentence)}</li>' for sentence in told)}</ul>" if told else "",
        f"<h2>All errors</h2>\n{_overview(table)}",
        *(f'<p class="legend">{_prose(note)}</p>' for note in notes(table)),
        "<h2>Set by set</h2>",
        f'<p class="soft">{HOW_TO_READ}</p>',
        *(_one_set(table, name) for name in table.sets),
        "<h2>Claims</h2>",
        f'<p class="soft">{HOW_JUDGED}</p>',
        *map(_claim, findings(table, further)),
        _how(table),
        "</main>\n</body>\n</html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _extent(table: Table) -> str:
    counts = [len(cell.errors) for cell in table.cells]
    if not counts:
        return "No cell was run."
    seeds = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    word = "seed" if max(counts) == 1 else "seeds"
    columns = len({cell.column for cell in table.cells})
    return f"{len(table.sets)} of {len(SETS)} sets · {columns} columns · {seeds} {word} · test error in percent"


def _scores(table: Table) -> str:
    """In how many sets a column is lower than another: the verdict as a table, since its sentences are all alike."""
    found = scores(table)
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
            parts.append(f'<tr><th scope="row">{_named(name)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>')
    return _box(f'<table class="scores"><tbody>{"".join(parts)}</tbody></table>', "Verdict")


def _overview(table: Table) -> str:
    head = "".join(f'<th scope="col"{_lined(column)}>{escape(column)}<i></i></th>' for column in table.columns)
    rows = []
    for name in SETS:
        best = table.best(name)
        short = name.removeprefix("MNIST-")
        shown = f'<a href="#{name}">{short}</a>' if name in table.sets else short
        cells = [f'<th scope="row">{shown}</th>']
        for column in table.columns:
            cell = table.cell(name, column)
            if cell is None:
                cells.append(f'<td{_lined(column)}><span class="absent">not run</span><i></i></td>')
                continue
            ours = f"<b>{cell.ours}</b>" if column in best else cell.ours
            cells.append(
                f"<td{_lined(column)}>{ours}<i>{mark(table, cell)}</i><small>{cell.theirs}<i></i></small></td>"
            )
        first = ' class="first"' if name == "MNIST-III-01" else ""
        rows.append(f"<tr{first}>{''.join(cells)}</tr>")
    inner = f'<thead><tr><th scope="col">MNIST-</th>{head}</tr></thead><tbody>{"".join(rows)}</tbody>'
    return _box(f'<table class="all">{inner}</table>', "All errors")


def _named(column: str) -> str:
    return f'<span class="c-{escape(column)}"><span class="dot"></span></span>{escape(column)}'


def _lined(column: str) -> str:
    return ' class="lined"' if column in GROUPS else ""


def _one_set(table: Table, name: str) -> str:
    cells = [cell for column in table.columns if (cell := table.cell(name, column)) is not None]
    best = table.best(name)
    rows = "".join(_row(table, cell, bold=cell.column in best) for cell in cells)
    head = "".join(
        f'<th scope="col">{text}</th>'
        for text in ("Column", "Paper", "Ours ± std (n)", "To the baseline, 95 % interval", "Weights")
    )
    inner = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<section class="set" id="{name}"><h3>{name}</h3>{strip(name, cells)}{_box(inner, name)}</section>'


def _row(table: Table, cell: Cell, *, bold: bool) -> str:
    ours = f"{cell.mean:.2f}" if cell.std is None else f"{cell.mean:.2f} ± {cell.std:.2f}"
    ours = f"<b>{ours}</b>" if bold else ours
    found = table.to_baseline(cell)
    gap = ""
    if found is not None:
        sign = ("▾", "", "▴")[found.clear + 1]
        gap = f"{signed(found.mean)} [{signed(found.low)}, {signed(found.high)}]<i>{sign}</i>"
    signs = ("*" if cell.fitted else "") + ("†" if cell.stopped else "")
    return (
        f'<tr><th scope="row">{_named(cell.column)}{signs}</th><td>{cell.theirs}</td>'
        f"<td>{ours} ({len(cell.errors)})</td><td>{gap}</td><td>{cell.weights:,}</td></tr>"
    )


def _claim(pair: Pair) -> str:
    theirs, ours = pair
    return (
        f'<section class="claim"><h3>{_prose(ours.claim)}</h3>'
        f'<p class="rule">Section {escape(ours.section)}. Holds if: {_prose(ours.criterion)}.</p>'
        f"{_judged('The paper’s table', theirs)}{_judged('Ours', ours)}</section>"
    )


def _judged(whose: str, finding: Finding | None) -> str:
    if finding is None:
        return f"<p><span>{whose}: <strong>not decidable</strong></span>The paper prints no numbers for this.</p>"
    evidence = finding.evidence[:1].upper() + finding.evidence[1:]
    tone = TONES[finding.verdict]
    return f'<p><span>{whose}: <strong class="{tone}">{escape(finding.verdict)}</strong></span>{_prose(evidence)}</p>'


def _how(table: Table) -> str:
    parts = []
    if table.protocol:
        parts.append(f"<h2>Protocol</h2>\n{_list(table.protocol)}")
    if table.deviations:
        told = "".join(f"<li>{escape(deviation)}</li>" for deviation in table.deviations)
        parts.append(f"<h2>Deviations from the paper</h2>\n<ul>{told}</ul>")
    again: dict[str, str] = {}
    if table.hardware:
        again["Hardware"] = table.hardware
    if table.versions:
        again["Versions"] = ", ".join(f"{name} {version}" for name, version in table.versions.items())
    if table.minutes:
        phases = ", ".join(f"{phase} {minutes:g}" for phase, minutes in table.minutes.items())
        again["Minutes"] = f"{phases}; together {sum(table.minutes.values()):g}"
    if again or table.command:
        parts.append(f"<h2>To run it again</h2>\n{_list(again) if again else ''}")
    if table.command:
        parts.append(_box(f"<pre>{escape(table.command)}</pre>", "Command", "margin-top:14px"))
    return "\n".join(parts)


def _prose(text: str) -> str:
    """A sentence with the apostrophes of print, and no line break before a per cent sign."""
    return escape(text.replace("'", "’").replace(" %", "\u00a0%"))


def _list(pairs: Mapping[str, str]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(key)}</dt><dd>{escape(value)}</dd>' for key, value in pairs.items())}</dl>"


def _box(inner: str, label: str, style: str = "") -> str:
    """What is too wide scrolls in here, also by keyboard, and the page does not."""
    extra = f' style="{style}"' if style else ""
    return f'<div class="box" tabindex="0" role="region" aria-label="{escape(label)}"{extra}>{inner}</div>'
