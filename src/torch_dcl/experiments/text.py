"""Tables in a terminal, and as Markdown."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch_dcl.experiments.claims import Finding
from torch_dcl.experiments.natural_networks import paper_error
from torch_dcl.experiments.paper_numbers import SETS, TABLE2
from torch_dcl.experiments.table import NaturalTable, Table, mark
from torch_dcl.experiments.verdict import findings, verdict

if TYPE_CHECKING:
    from rich.table import Table as RichTable

__all__ = ["LEGEND", "as_markdown", "as_markdown2", "as_rich", "as_text", "long_table"]

LEGEND = (
    "Test error in percent: mean(standard deviation in hundredths), the paper's number beneath. Bold: the best DCL "
    "model of the set. ▾ clearly below the baseline, ▴ clearly above it (95 % paired interval of the difference)."
)
ABSENT = "not run"
FIRST_COLUMN = 8
GAP = 1
FITTED = "* The difficulty of the set was fitted to the paper's number in this column."
STOPPED = "† At least one run diverged."


def notes(table: Table) -> list[str]:
    """What the signs mean, those that occur."""
    found = [LEGEND]
    if any(cell.fitted for cell in table.cells):
        found.append(FITTED)
    if any(cell.stopped for cell in table.cells):
        found.append(STOPPED)
    return found


def as_rich(table: Table, columns: Sequence[str] | None = None) -> "RichTable":
    """The table for `rich.print`.

    Args:
        table: The table.
        columns: The columns to show; None for all, which wants a terminal of about 130 characters.
    """
    # Rich is for the terminal alone; reading a table does not need it.
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    made = RichTable(box=SIMPLE_HEAD, padding=0, pad_edge=False)
    made.add_column("MNIST-", no_wrap=True)
    stacks = []
    for column in columns or table.columns:
        head, lines = _stack(table, column)
        made.add_column(head, no_wrap=True)
        stacks.append((column, lines))
    for name in SETS:
        cells = [Text(name.removeprefix("MNIST-"))]
        best = table.best(name)
        for column, lines in stacks:
            ours, theirs = lines[name]
            text = Text(ours, style="dim" if table.cell(name, column) is None else "bold" if column in best else "")
            text.append(f"\n{theirs}", style="not bold dim")
            cells.append(text)
        made.add_row(*cells)
    return made


def _stack(table: Table, column: str) -> tuple[str, dict[str, tuple[str, str]]]:
    """The head of a column and its two lines for every set, filled up so that digits stand under digits."""
    cells = {name: table.cell(name, column) for name in SETS}
    signs = {name: mark(table, cell) if cell else "" for name, cell in cells.items()}
    numbers = {name: (cell.ours, cell.theirs) if cell else (ABSENT, "") for name, cell in cells.items()}
    tail = max(map(len, signs.values()))
    size = max(len(text) for pair in numbers.values() for text in pair)
    size = max(size, len(column) - tail)
    lines = {
        name: (f"{ours:>{size}}{signs[name]:<{tail}}", f"{theirs:>{size}}{'':{tail}}")
        for name, (ours, theirs) in numbers.items()
    }
    return f"{column:>{size + tail}}", lines


def long_table(table: Table, width: int) -> "RichTable":
    """A line for every cell: the paper's number, ours, and the difference to the baseline.

    Args:
        table: The table.
        width: Characters of a line; a narrow terminal can do without the weights, but not with a cut number.
    """
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table as RichTable

    against = "the plain network" if isinstance(table, NaturalTable) else "the baseline"
    absent = table.absent if isinstance(table, NaturalTable) else {}
    weights = width >= 92
    shown = RichTable(box=SIMPLE_HEAD, pad_edge=False, title=table.title, title_justify="left", title_style="bold")
    names = ("set", "model", "paper %", "ours % ± std (n)", "", f"to {against}, 95 %", "weights")
    for name in names if weights else names[:-1]:
        shown.add_column(name, justify="left" if name in ("set", "model", "") else "right", no_wrap=True)
    for name in table.sets:
        cells = [cell for column in table.columns if (cell := table.cell(name, column)) is not None]
        for i, cell in enumerate(cells):
            spread = "" if cell.std is None else f" ± {cell.std:.2f}"
            gap = table.to_baseline(cell)
            told = "" if gap is None else str(gap)
            shown.add_row(
                "" if i else name.removeprefix("MNIST-"), cell.column, cell.theirs,
                f"{cell.mean:.2f}{spread} ({len(cell.errors)})", mark(table, cell), escape(told),
                *([f"{cell.weights:,}"] if weights else []),
                style="bold" if cell.column in table.best(name) else "", end_section=i == len(cells) - 1,
            )  # fmt: skip
    for name, reason in absent.items():
        shown.add_row(name, "", "", reason, "", "", *([""] if weights else []), style="dim")
    return shown


def as_text(table: Table, *, width: int = 140, styled: bool = False) -> str:
    """The table as text. Columns that do not fit beside the others follow below them.

    Args:
        table: The table.
        width: Characters of a line.
        styled: Whether to write the terminal's codes for bold and dim.
    """
    from rich.console import Console

    out = io.StringIO()
    console = Console(
        file=out,
        width=width,
        force_terminal=styled,
        color_system="standard" if styled else None,
        legacy_windows=False,
        highlight=False,
    )
    console.print(table.title, markup=False)
    for columns in _blocks(table, width):
        console.print(as_rich(table, columns))
    for note in notes(table):
        console.print(note, markup=False)
    return out.getvalue()


def _blocks(table: Table, width: int) -> list[list[str]]:
    """The columns, broken into lines of at most ``width`` characters."""
    blocks: list[list[str]] = []
    used = 0
    for column in table.columns:
        size = len(_stack(table, column)[0]) + GAP
        if not blocks or used + size > width:
            blocks.append([])
            used = FIRST_COLUMN
        blocks[-1].append(column)
        used += size
    return blocks


def as_markdown(table: Table, further: Sequence[Finding] = ()) -> str:
    """Verdict, table, claims and what is needed to repeat it, as Markdown.

    Args:
        table: The table.
        further: Findings from other data to show among the claims.
    """
    lines = [f"# {_plain(table.title)}", "", *(f"- {_plain(sentence)}" for sentence in verdict(table, further)), ""]
    lines.append("| set | " + " | ".join(table.columns) + " |")
    lines.append("|---|" + "---:|" * len(table.columns))
    for name in SETS:
        best = table.best(name)
        cells = []
        for column in table.columns:
            cell = table.cell(name, column)
            if cell is None:
                cells.append(ABSENT)
                continue
            ours = f"**{cell.ours}**" if column in best else cell.ours
            cells.append(f"{ours}{_plain(mark(table, cell))}<br>{cell.theirs}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    for note in notes(table):
        lines += ["", _plain(note)]
    lines += ["", "| claim | criterion | the paper's table | here | evidence here |", "|---|---|---|---|---|"]
    for paper, here in findings(table, further):
        row = (here.claim, here.criterion, paper.verdict if paper else "–", here.verdict, here.evidence)
        lines.append("| " + " | ".join(map(_plain, row)) + " |")
    for key, value in table.protocol.items():
        lines += ["", f"{_plain(key)}: {_plain(value)}"]
    for deviation in table.deviations:
        lines += ["", f"Deviation: {_plain(deviation)}"]
    if table.hardware:
        lines += ["", f"Hardware: {_plain(table.hardware)}."]
    if table.versions:
        lines += ["", "Versions: " + ", ".join(_plain(f"{k} {v}") for k, v in table.versions.items()) + "."]
    if table.minutes:
        lines += ["", "Minutes: " + ", ".join(_plain(f"{k} {v:g}") for k, v in table.minutes.items()) + "."]
    if table.command:
        lines += ["", "```", table.command, "```"]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """Text that Markdown leaves alone."""
    for sign in "\\`*_|<>[]":
        text = text.replace(sign, f"&#{ord(sign)};" if sign in "<>" else f"\\{sign}")
    return " ".join(text.split())


def as_markdown2(table: NaturalTable) -> str:
    """The table for people: a row for each column, then the rows that the paper quotes, then how it was made."""
    head = ["network", *table.sets, "weights"]
    rows = [head, ["---"] * len(head)]
    for column in table.columns:
        weights = {cell.set: cell.weights for cell in table.cells if cell.column == column}
        counts = ", ".join(f"{count:,}" for count in dict.fromkeys(weights.values()))
        rows.append([column, *(_shown(table, name, column) for name in table.sets), counts])
    for row in TABLE2:
        if row.reference:
            year = row.reference.split("_")[1]
            rows.append([f"{row.name} {year}", *(f"{row.errors[name.upper()]:.2f}" for name in table.sets), ""])
    lines = [f"# {table.title}", "", *("| " + " | ".join(row) + " |" for row in rows), ""]
    lines += [
        "Test error in percent: mean(standard deviation in hundredths) × seeds; beneath, the paper's number, and the "
        "difference to the plain network on the same seeds with its 95 % interval. Rows with a year: as the paper "
        "quotes them.",
        "",
    ]
    if table.scale < 1:
        lines += [f"**Shortened: every recipe was trained for {table.scale:g} of its epochs.**", ""]
    lines += [f"- {name}: {text}" for name, text in table.protocol.items()]
    lines += [f"- {text}" for text in table.deviations]
    minutes = ", ".join(f"{name} {value:.1f} minutes" for name, value in table.minutes.items())
    lines += [f"- {table.hardware}; {minutes}; `{table.command}`", ""]
    return "\n".join(lines)


def _shown(table: NaturalTable, name: str, column: str) -> str:
    if name in table.absent:
        theirs = paper_error(column, name)
        return table.absent[name] + ("" if theirs is None else f"<br>paper {theirs:.2f}")
    cell = table.cell(name, column)
    if cell is None:
        return "not run"
    parts = [f"{cell.ours} × {len(cell.seeds)}{'†' if cell.stopped else ''}", f"paper {cell.theirs}"]
    gap = table.to_baseline(cell)
    if gap is not None:
        parts.append(f"{gap.mean:+.2f} [{gap.low:+.2f}, {gap.high:+.2f}]")
    return "<br>".join(parts)
