"""Table 1 in a terminal, and as Markdown."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch_dcl.experiments.claims import Finding
from torch_dcl.experiments.reported import SETS
from torch_dcl.experiments.table import Table, mark
from torch_dcl.experiments.verdict import findings, verdict

if TYPE_CHECKING:
    import rich.table

__all__ = ["LEGEND", "as_markdown", "as_rich", "as_text"]

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


def as_rich(table: Table, columns: Sequence[str] | None = None) -> "rich.table.Table":
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
