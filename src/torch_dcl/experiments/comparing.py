"""Two columns of a table of errors beside each other, set by set."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch_dcl.experiments.reported import SETS, Reported
from torch_dcl.experiments.statistics import Difference, by_seed, mean, std

__all__ = ["Comparison", "ErrorTable", "Errors", "centre", "compare", "difference", "margin", "spread"]

# Errors in percent: as the paper prints them, one per seed, or one per position where all lists have the same seeds.
Errors: TypeAlias = Reported | Mapping[int, float] | Sequence[float]
ErrorTable: TypeAlias = Mapping[str, Mapping[str, Errors]]


def seeds(errors: Errors) -> Mapping[int, float] | None:
    """Seed to error, or None where only a mean is known. A list counts its places as seeds."""
    if isinstance(errors, Reported):
        return None
    return errors if isinstance(errors, Mapping) else dict(enumerate(errors))


def centre(errors: Errors) -> float:
    """The mean error."""
    runs = seeds(errors)
    return errors.mean if isinstance(errors, Reported) else mean(list((runs or {}).values()))


def spread(errors: Errors) -> float | None:
    """The standard deviation; None where there is only one run."""
    runs = seeds(errors)
    if isinstance(errors, Reported):
        return errors.std
    return std(list(runs.values())) if runs and len(runs) > 1 else None


def difference(errors: Errors, reference: Errors) -> Difference | None:
    """``errors - reference`` over the seeds that both have; None where these are fewer than two, or unknown."""
    ours, theirs = seeds(errors), seeds(reference)
    return None if ours is None or theirs is None else by_seed(ours, theirs)


def margin(errors: Errors, reference: Errors) -> float:
    """The larger of the two standard deviations; 0 where neither is known."""
    return max(spread(errors) or 0.0, spread(reference) or 0.0)


@dataclass(frozen=True)
class Comparison:
    """On which sets one column has lower errors than another.

    Attributes:
        column: The column that is judged.
        reference: The column it is judged against.
        better: Sets where the mean of ``column`` is lower.
        equal: Sets where the means are equal.
        worse: Sets where the mean of ``column`` is higher.
        beyond: Sets of ``better`` where it is lower by more than the larger of the two standard deviations.
        paired: Sets with at least two seeds in common.
        clear_better: Sets where the 95 % paired interval of the difference lies below 0.
        clear_worse: Sets where it lies above 0.
        absent: Sets of the paper that lack one of the columns.
    """

    column: str
    reference: str
    better: tuple[str, ...]
    equal: tuple[str, ...]
    worse: tuple[str, ...]
    beyond: tuple[str, ...]
    paired: tuple[str, ...]
    clear_better: tuple[str, ...]
    clear_worse: tuple[str, ...]
    absent: tuple[str, ...]

    @property
    def compared(self) -> int:
        """The number of sets that have both columns."""
        return len(self.better) + len(self.equal) + len(self.worse)

    @property
    def named(self) -> str:
        """The reference as it stands in a sentence."""
        return _named(self.reference)

    def __str__(self) -> str:
        column, reference = _named(self.column), self.named
        if not self.compared:
            return f"no set has both {column} and {reference}"
        parts = [f"{column} is better than {reference} on {len(self.better)} of {self.compared} sets"]
        if self.equal:
            parts.append(f"equal on {len(self.equal)}")
        if self.paired:
            parts.append(f"clearly better on {len(self.clear_better)} and clearly worse on {len(self.clear_worse)}")
        elif self.better:
            parts.append(f"by more than the larger deviation on {len(self.beyond)}")
        if self.absent:
            parts.append(f"{len(self.absent)} not run")
        return ", ".join(parts)


def _named(column: str) -> str:
    return f"the {column}" if column in ("baseline", "oracle") else column


def compare(table: ErrorTable, column: str, reference: str, sets: Sequence[str] = SETS) -> Comparison:
    """Compare two columns of a table.

    Args:
        table: Set to column to errors.
        column: The column to judge.
        reference: The column to judge it against.
        sets: The sets to look at; one that lacks a column is counted as absent.
    """
    found: dict[str, list[str]] = {
        key: [] for key in ("better", "equal", "worse", "beyond", "paired", "clear_better", "clear_worse", "absent")
    }
    for name in sets:
        row = table.get(name, {})
        if column not in row or reference not in row:
            found["absent"].append(name)
            continue
        ours, theirs = row[column], row[reference]
        gap = centre(ours) - centre(theirs)
        found["better" if gap < 0 else "worse" if gap > 0 else "equal"].append(name)
        if gap < -margin(ours, theirs):
            found["beyond"].append(name)
        pair = difference(ours, theirs)
        if pair is not None:
            found["paired"].append(name)
            if pair.clear:
                found["clear_better" if pair.clear < 0 else "clear_worse"].append(name)
    return Comparison(column, reference, **{key: tuple(names) for key, names in found.items()})
