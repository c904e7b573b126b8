"""Tables in a terminal, and in sentences, each of which is computed from the table."""

import io
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch_dcl.experiments.claims import Finding, fewer_weights, judge, loss_gap_shrinks
from torch_dcl.experiments.paper_numbers import DCL_COLUMNS, SETS, TABLE1
from torch_dcl.experiments.stats import Comparison, compare, mean, mean_std_n, signed
from torch_dcl.experiments.table import CONTROLS, Table, mark

if TYPE_CHECKING:
    import rich.table

__all__ = [
    "LEGEND", "Line", "Pair", "as_rich", "as_text", "findings", "fitting_table", "long_table", "notes", "reservations",
    "scores", "summary", "verdict",
]  # fmt: skip

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
    signs = [LEGEND]
    if any(cell.fitted for cell in table.cells):
        signs.append(FITTED)
    if any(cell.stopped for cell in table.cells):
        signs.append(STOPPED)
    return signs


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

    shown = RichTable(box=SIMPLE_HEAD, padding=0, pad_edge=False)
    shown.add_column("MNIST-", no_wrap=True)
    stacks = []
    for column in columns or table.columns:
        head, lines = _stack(table, column)
        shown.add_column(head, no_wrap=True)
        stacks.append((column, lines))
    for name in SETS:
        cells = [Text(name.removeprefix("MNIST-"))]
        best = table.best(name)
        for column, lines in stacks:
            ours, theirs = lines[name]
            text = Text(ours, style="dim" if table.cell(name, column) is None else "bold" if column in best else "")
            text.append(f"\n{theirs}", style="not bold dim")
            cells.append(text)
        shown.add_row(*cells)
    return shown


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


class Line(NamedTuple):
    """A line of a table in a terminal."""

    cells: Sequence[str]
    style: str = ""
    is_last: bool = False
    """Whether a rule follows."""


def fitting_table(
    heads: Sequence[str], lines: Sequence[Line], width: int, optional: Sequence[str]
) -> "rich.table.Table":
    """A table that fits: a narrow terminal goes without some of the columns, and no number is cut.

    Args:
        heads: Of the columns; those that begin with ``<`` are aligned to the left.
        lines: A text for each column.
        width: Characters of a line.
        optional: Heads of the columns that can be left out, the least needed first.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    plain = [head.removeprefix("<") for head in heads]
    sizes = [max(len(head), *(len(line.cells[i]) for line in lines)) for i, head in enumerate(plain)]
    kept = list(range(len(heads)))
    for head in optional:
        if sum(sizes[i] + 3 for i in kept) - 1 > width:
            kept.remove(plain.index(head))
    is_tight = sum(sizes[i] + 3 for i in kept) - 1 > width
    table = RichTable(box=None, padding=(0, 1, 0, 0)) if is_tight else RichTable(box=SIMPLE_HEAD, pad_edge=False)
    for i in kept:
        side = "left" if heads[i].startswith("<") else "right"
        table.add_column(plain[i], justify=side, overflow="fold", no_wrap=not is_tight)  # type: ignore[arg-type]
    for line in lines:
        table.add_row(*(Text(line.cells[i]) for i in kept), style=line.style, end_section=line.is_last)
    return table


def long_table(table: Table, width: int) -> "rich.table.Table":
    """A line for every cell: the paper's number, ours, and the difference to the baseline.

    Args:
        table: The table.
        width: Characters of a line.
    """
    gap_head = f"to {table.against}, 95 %"
    lines = []
    for name in table.sets:
        cells = [cell for column in table.columns if (cell := table.cell(name, column)) is not None]
        for i, cell in enumerate(cells):
            gap = table.to_baseline(cell)
            texts = ("" if i else name.removeprefix("MNIST-"), cell.column, cell.theirs, mean_std_n(cell.errors),
                     mark(table, cell), "" if gap is None else str(gap), f"{cell.weights:,}")  # fmt: skip
            lines.append(Line(texts, "bold" if cell.column in table.best(name) else "", i == len(cells) - 1))
    absent: dict[str, str] = getattr(table, "absent", {})
    lines += [Line((name, "", "", reason, "", "", ""), "dim") for name, reason in absent.items()]
    heads = ("<set", "<model", "paper %", "ours % ± std (n)", "<", gap_head, "weights")
    return fitting_table(heads, lines, width, ("weights", gap_head, "paper %"))


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


# Sentences

Pair = tuple[Finding | None, Finding]


def findings(table: Table, further: Sequence[Finding] = ()) -> list[Pair]:
    """Every claim with what the paper's own table says of it, and what this one says.

    Args:
        table: The table.
        further: Findings about this table's networks from other data, such as `claims.large_banks_help_little`.

    Returns:
        Pairs; the first is None where the paper prints no numbers to judge by.
    """
    pairs: list[Pair] = list(zip(judge(TABLE1), judge(table.errors()), strict=True))
    alone = [fewer_weights(table.weights()), loss_gap_shrinks(table.losses("MNIST-III-10")), *further]
    return pairs + [(None, finding) for finding in alone]


def summary(table: Table, further: Sequence[Finding] = ()) -> str:
    """How many claims hold, here and in the paper's own table.

    Args:
        table: The table.
        further: As in `findings`.
    """
    pairs = findings(table, further)
    here = Counter(ours.verdict for _, ours in pairs)
    paper = Counter(theirs.verdict for theirs, _ in pairs if theirs)
    return (
        f"Section 4.1 of the paper, split into {len(pairs)} claims: {_are(here['holds'], 'holds', 'hold')} here, "
        f"{_are(here['does not hold'], 'does', 'do')} not, and {here['not decidable']} cannot be decided. "
        f"By the paper's own table, {paper['holds']} of {paper.total()} hold."
    )


def _are(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def scores(table: Table) -> list[tuple[Comparison, Comparison | None]]:
    """Every DCL model against the baseline, and A2 against the controls, with the paper's counts where it has any."""
    errors = table.errors()
    pairs: list[tuple[Comparison, Comparison | None]] = [
        (compare(errors, column, "baseline"), compare(TABLE1, column, "baseline")) for column in DCL_COLUMNS
    ]
    pairs += [(compare(errors, "A2", control), None) for control in CONTROLS]
    return [(ours, theirs) for ours, theirs in pairs if ours.compared]


def verdict(table: Table, further: Sequence[Finding] = ()) -> list[str]:
    """The table in a few sentences, what was lost as plainly as what was won.

    Args:
        table: The table.
        further: As in `findings`.
    """
    sentences = [summary(table, further)]
    for ours, theirs in scores(table):
        sentence = f"{ours.column} has a lower error than {ours.named} on {len(ours.better)} of {ours.compared} sets"
        if ours.paired:
            sentence += f", clearly lower on {len(ours.clear_better)} and clearly higher on {len(ours.clear_worse)}"
        if theirs:
            sentence += f"; in the paper on {len(theirs.better)} of {theirs.compared}"
        sentences.append(f"{sentence}.")
    return sentences + reservations(table)


def reservations(table: Table) -> list[str]:
    """What a reader has to know before believing a number."""
    sentences = []
    fitted = [cell for cell in table.cells if cell.fitted]
    if fitted:
        names = ", ".join(sorted({cell.column for cell in fitted}))
        sentences.append(
            f"The difficulty of {len({cell.set for cell in fitted})} sets was fitted to the paper's number in the "
            f"column {names}, so agreement there is no evidence."
        )
    oracle = [cell for cell in table.cells if cell.column == "oracle" and cell.paper is not None and not cell.fitted]
    if oracle:
        off = mean([cell.mean - cell.paper for cell in oracle if cell.paper is not None])
        sentences.append(
            f"The oracle was not fitted: its error is {signed(off)} points from the paper's, on average over "
            f"{len(oracle)} {'set' if len(oracle) == 1 else 'sets'}."
        )
    controls = [cell for cell in table.cells if cell.column in CONTROLS]
    pairs = [(cell.weights, a2.weights) for cell in controls if (a2 := table.cell(cell.set, "A2")) is not None]
    if pairs:
        off = max(abs(weights / target - 1) for weights, target in pairs)
        names = ", ".join(sorted({cell.column for cell in controls}))
        close = f", to within {100 * off:.1g} %" if off else ""
        sentences.append(f"The controls ({names}) have as many weights as A2{close}.")
    absent = sum(table.cell(name, column) is None for name in SETS for column in table.columns)
    if absent:
        sentences.append(f"{absent} of {len(SETS) * len(table.columns)} cells were not run.")
    stopped = [cell for cell in table.cells if cell.stopped]
    if stopped:
        runs = sum(len(cell.stopped) for cell in stopped)
        names = ", ".join(sorted({cell.column for cell in stopped}))
        sentences.append(f"{runs} {'run' if runs == 1 else 'runs'} diverged, in {names}.")
    return sentences
