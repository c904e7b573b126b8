"""What a table says, in sentences. Every sentence is computed from the table."""

from collections import Counter
from collections.abc import Sequence

from torch_dcl.experiments.claims import Finding, fewer_weights, judge, loss_gap_shrinks
from torch_dcl.experiments.paper_numbers import DCL_COLUMNS, SETS, TABLE1
from torch_dcl.experiments.stats import Comparison, compare, mean, signed
from torch_dcl.experiments.table import CONTROLS, Table

__all__ = ["Pair", "findings", "reservations", "scores", "summary", "verdict"]

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
    found: list[tuple[Comparison, Comparison | None]] = [
        (compare(errors, column, "baseline"), compare(TABLE1, column, "baseline")) for column in DCL_COLUMNS
    ]
    found += [(compare(errors, "A2", control), None) for control in CONTROLS]
    return [(ours, theirs) for ours, theirs in found if ours.compared]


def verdict(table: Table, further: Sequence[Finding] = ()) -> list[str]:
    """The table in a few sentences, what was lost as plainly as what was won.

    Args:
        table: The table.
        further: As in `findings`.
    """
    sentences = [summary(table, further)]
    for ours, theirs in scores(table):
        told = f"{ours.column} has a lower error than {ours.named} on {len(ours.better)} of {ours.compared} sets"
        if ours.paired:
            told += f", clearly lower on {len(ours.clear_better)} and clearly higher on {len(ours.clear_worse)}"
        if theirs:
            told += f"; in the paper on {len(theirs.better)} of {theirs.compared}"
        sentences.append(f"{told}.")
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
