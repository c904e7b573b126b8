"""Means, spreads and intervals of a few runs, and columns of a table of errors compared set by set."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean as mean
from statistics import stdev as std
from typing import Any, NamedTuple, TypeAlias

from torch_dcl.experiments.paper_numbers import SETS, Reported

__all__ = [
    "Comparison", "Difference", "Effect", "ErrorTable", "Errors", "Losses", "centre", "compare", "compare_units",
    "difference", "holm", "interval", "is_complete", "join_words", "mean", "mean_std_n", "notation", "p_in_words",
    "p_value", "paired", "pool", "signed", "std", "t_quantile",
]  # fmt: skip


class Difference(NamedTuple):
    """The mean difference of two lists of errors over the same seeds, with its 95 % interval."""

    mean: float
    low: float
    high: float
    n: int
    p: float
    """Of the paired t-test, not corrected for other comparisons."""

    @property
    def clear(self) -> int:
        """-1 where the interval lies below 0, 1 where it lies above, 0 where it holds 0."""
        return (self.low > 0) - (self.high < 0)

    @property
    def sign(self) -> str:
        """▾ where the interval lies below 0, ▴ where it lies above, nothing where it holds 0."""
        return ("▾", "", "▴")[self.clear + 1]

    def __str__(self) -> str:
        """The mean with its interval, as tables have it."""
        return f"{signed(self.mean)} [{signed(self.low)}, {signed(self.high)}]"


class Effect(NamedTuple):
    """A mean over several comparisons, with its standard error over them; None with one."""

    mean: float
    error: float | None
    n: int

    def __str__(self) -> str:
        return signed(self.mean) + ("" if self.error is None else f" ± {self.error:.2f}")


def pool(differences: Sequence[float]) -> Effect:
    """The mean of some differences, such as those of a column on several sets."""
    n = len(differences)
    return Effect(mean(differences), std(differences) / math.sqrt(n) if n > 1 else None, n)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of at least two values, after Student."""
    half = t_quantile(0.975, len(values) - 1) * (std(values) / math.sqrt(len(values)))
    return mean(values) - half, mean(values) + half


def paired(errors: Sequence[float], reference: Sequence[float]) -> Difference:
    """The mean of ``errors - reference`` with its 95 % interval. Entry i of both comes from the same seed.

    Raises:
        ValueError: lists of different lengths, or fewer than two pairs.
    """
    if len(errors) != len(reference):
        raise ValueError(
            f"{len(errors)} errors cannot be paired with {len(reference)}; give two lists over the same seeds"
        )
    if len(errors) < 2:
        raise ValueError(f"a paired interval needs at least 2 seeds, not {len(errors)}")
    differences = [a - b for a, b in zip(errors, reference, strict=True)]
    return Difference(mean(differences), *interval(differences), len(differences), p_value(differences))


def notation(mean: float, std: float | None = None) -> str:
    """The paper's notation: two decimals, and the standard deviation in hundredths in brackets.

    ``1.96(03)`` is 1.96 with a deviation of 0.03. From 1 on the deviation is written out, ``12.30(1.25)``, so that its
    digits cannot be taken for hundredths. Without a deviation there are no brackets.
    """
    if std is None:
        return f"{mean:.2f}"
    hundredths = round(std * 100)
    return f"{mean:.2f}({hundredths:02d})" if hundredths < 100 else f"{mean:.2f}({std:.2f})"


def is_complete(values: Sequence[float | None]) -> bool:
    """Whether all values are finite numbers; a run that diverged has others."""
    return all(value is not None and math.isfinite(value) for value in values)


def mean_std_n(errors: Sequence[float]) -> str:
    """Mean, standard deviation where there is one, and how many: ``1.96 ± 0.03 (5)``."""
    spread = f" ± {std(errors):.2f}" if len(errors) > 1 else ""
    return f"{mean(errors):.2f}{spread} ({len(errors)})"


def join_words(words: Sequence[str]) -> str:
    """Words joined by commas and a final "and"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def signed(value: float, decimals: int = 2) -> str:
    """A difference with its sign; what rounds to zero has none."""
    text = f"{value:+.{decimals}f}"
    return text.replace("-", "−") if float(text) else text[1:]


def t_quantile(p: float, df: int) -> float:
    """The value that Student's t with ``df`` degrees of freedom stays below with probability ``p``."""
    if not 0 < p < 1:
        raise ValueError(f"p is {p}; a quantile exists for 0 < p < 1")
    if df < 1 or df != int(df):
        raise ValueError(f"df is {df}; give a whole number, at least 1")
    if p < 0.5:
        return -t_quantile(1 - p, df)
    target = 2 * p - 1
    # Bisection over the angle atan(t / √df), which is bounded where t is not.
    low, high = 0.0, math.pi / 2
    while low < (middle := (low + high) / 2) < high:
        if _central(middle, int(df)) < target:
            low = middle
        else:
            high = middle
    return math.sqrt(df) * math.tan(low)


def p_value(differences: Sequence[float]) -> float:
    """The two-sided p of the t-test that the mean of at least two paired differences is 0; 1 where all are 0."""
    deviation, n = std(differences), len(differences)
    if deviation == 0:
        return 1.0 if mean(differences) == 0 else 0.0
    t = abs(mean(differences)) * math.sqrt(n) / deviation
    return max(0.0, 1 - _central(math.atan(t / math.sqrt(n - 1)), n - 1))


def p_in_words(p: float) -> str:
    """A p for tables. Below 1e-12 only a bound: there the difference 1 − P(|t| < …) consists of rounding."""
    return f"{p:.2g}" if p >= 1e-12 else "< 1e-12"


def holm(values: Sequence[float]) -> list[float]:
    """Correct the p of several comparisons by Holm's method, in their order.

    The k-th smallest of m is multiplied by m + 1 − k; none is below a smaller one's, and none is above 1.
    """
    corrected, largest = [0.0] * len(values), 0.0
    for k, i in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (len(values) - k) * values[i]))
        corrected[i] = largest
    return corrected


def _central(angle: float, df: int) -> float:
    """P(|t| < √df · tan(angle)), by the finite sums for whole df (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = df % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(odd, df - 1, 2):
        total += term
        term *= cosine * cosine * (k + 1) / (k + 2)
    return (angle + sine * total) * 2 / math.pi if odd else sine * total


# Errors in percent: as the paper prints them, one per seed, or one per position where all lists have the same seeds.
Errors: TypeAlias = Reported | Mapping[int, float] | Sequence[float]
ErrorTable: TypeAlias = Mapping[str, Mapping[str, Errors]]


def seeds(errors: Errors) -> Mapping[int, float] | None:
    """Seed to error, or None where only a mean is known. A list counts its places as seeds."""
    if isinstance(errors, Reported):
        return None
    return errors if isinstance(errors, Mapping) else dict(enumerate(errors))


def centre(errors: Errors) -> float:
    """The mean error, to nine decimals, so that as many wrong answers in total give equal means."""
    runs = seeds(errors)
    return errors.mean if isinstance(errors, Reported) else round(mean(list((runs or {}).values())), 9)


def spread(errors: Errors) -> float:
    """The standard deviation; 0 where it is not known."""
    if isinstance(errors, Reported):
        return errors.std
    runs = seeds(errors) or {}
    return std(runs.values()) if len(runs) > 1 else 0.0


def difference(errors: Errors, reference: Errors) -> Difference | None:
    """``errors - reference`` over the seeds that both have; None where these are fewer than two, or unknown."""
    ours, theirs = seeds(errors) or {}, seeds(reference) or {}
    common = [seed for seed in ours if seed in theirs]
    return paired([ours[seed] for seed in common], [theirs[seed] for seed in common]) if len(common) > 1 else None


@dataclass(frozen=True)
class Comparison:
    """A column of a table against another, set by set.

    Attributes:
        column: The column that is judged.
        reference: The column it is judged against.
        gaps: Mean error of ``column`` minus that of ``reference``, by set.
        beyond: Sets where it is lower by more than the larger of the two standard deviations.
        paired: The paired difference by set, where both have at least two seeds in common.
        absent: Sets of the paper that lack one of the columns.
    """

    column: str
    reference: str
    gaps: Mapping[str, float]
    beyond: tuple[str, ...]
    paired: Mapping[str, Difference]
    absent: tuple[str, ...]

    @property
    def compared(self) -> int:
        """The number of sets that have both columns."""
        return len(self.gaps)

    @property
    def better(self) -> tuple[str, ...]:
        """Sets where the mean of ``column`` is lower."""
        return tuple(name for name, gap in self.gaps.items() if gap < 0)

    @property
    def equal(self) -> tuple[str, ...]:
        """Sets where the means are equal."""
        return tuple(name for name, gap in self.gaps.items() if gap == 0)

    @property
    def worse(self) -> tuple[str, ...]:
        """Sets where the mean of ``column`` is higher."""
        return tuple(name for name, gap in self.gaps.items() if gap > 0)

    def effect(self, sets: Sequence[str] = SETS) -> Effect | None:
        """The difference over some sets, paired by seed where seeds are known; None where none has both columns."""
        gaps = {**self.gaps, **{name: each.mean for name, each in self.paired.items()}}
        chosen = [gap for name, gap in gaps.items() if name in sets]
        return pool(chosen) if chosen else None

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
        parts.append(f"{self.effect()} points on average")
        if self.absent:
            parts.append(f"{len(self.absent)} not run")
        return ", ".join(parts)


def _named(column: str) -> str:
    return f"the {column}" if column in ("baseline", "oracle") else column


def compare(table: ErrorTable, column: str, reference: str, sets: Sequence[str] = SETS) -> Comparison:
    """Compare two columns of a table on some sets; one that lacks a column is counted as absent."""
    both = {name: table[name] for name in sets if {column, reference} <= table.get(name, {}).keys()}
    pairs = {name: (row[column], row[reference]) for name, row in both.items()}
    gaps = {name: centre(ours) - centre(theirs) for name, (ours, theirs) in pairs.items()}
    beyond = tuple(name for name, pair in pairs.items() if gaps[name] < -max(map(spread, pair)))
    paired_by_set = {name: found for name, pair in pairs.items() if (found := difference(*pair)) is not None}
    return Comparison(column, reference, gaps, beyond, paired_by_set, tuple(n for n in sets if n not in both))


@dataclass(frozen=True)
class Losses:
    """Losses at the end of training, one per seed in the same order."""

    train: Sequence[float]
    test: Sequence[float]

    def __post_init__(self) -> None:
        if not self.train or len(self.train) != len(self.test):
            raise ValueError(
                f"{len(self.train)} training losses and {len(self.test)} test losses; give one of each per seed"
            )

    @property
    def gaps(self) -> list[float]:
        """Test loss minus training loss, per seed."""
        return [test - train for train, test in zip(self.train, self.test, strict=True)]


class Unlike(NamedTuple):
    """A unit against another, on the same seeds."""

    gap: Difference
    """Its error minus the other's, with the uncorrected 95 % interval."""
    corrected: float
    """The p of the paired t-test after Holm's correction."""

    @property
    def sign(self) -> str:
        """▴ where the unit errs clearly more, ▾ where it errs clearly less."""
        return "" if self.corrected >= 0.05 else "▴" if self.gap.mean > 0 else "▾"


def compare_units(rows: Sequence[Mapping[str, Any]], reference: str) -> dict[tuple[str, str], Unlike]:
    """Compare every unit with the reference, by kind of question, corrected over all comparisons.

    Rows have a ``unit`` and its ``errors`` by kind, one a seed. With one seed nothing is compared.
    """
    ours = next(row["errors"] for row in rows if row["unit"] == reference)
    pairs = [
        (row["unit"], sort, row["errors"][sort], own)
        for sort, own in ours.items()
        for row in rows
        if row["unit"] != reference and len(own) > 1
    ]
    values = holm([p_value([a - b for a, b in zip(theirs, own, strict=True)]) for *_, theirs, own in pairs])
    return {
        (unit, sort): Unlike(paired(theirs, own), p) for (unit, sort, theirs, own), p in zip(pairs, values, strict=True)
    }
