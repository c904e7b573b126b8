"""Means, spreads and intervals of a few runs, in the standard library alone."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["Difference", "Interval", "by_seed", "interval", "mean", "notation", "paired", "signed", "std", "t_quantile"]


class Interval(NamedTuple):
    """A 95 % interval of a mean."""

    low: float
    high: float


class Difference(NamedTuple):
    """The mean difference of two lists of errors over the same seeds, with its 95 % interval."""

    mean: float
    low: float
    high: float
    n: int

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


def mean(values: Sequence[float]) -> float:
    """The mean.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("the mean of no values does not exist; give at least one")
    return math.fsum(values) / len(values)


def std(values: Sequence[float]) -> float:
    """The sample standard deviation, with n - 1 in the denominator.

    Raises:
        ValueError: fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"a standard deviation needs at least 2 values, not {len(values)}")
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


def interval(values: Sequence[float]) -> Interval:
    """The 95 % interval of the mean after Student.

    Raises:
        ValueError: fewer than two values.
    """
    error_of_mean = std(values) / math.sqrt(len(values))
    half = t_quantile(0.975, len(values) - 1) * error_of_mean
    return Interval(mean(values) - half, mean(values) + half)


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
    low, high = interval(differences)
    return Difference(mean(differences), low, high, len(differences))


def by_seed(errors: Mapping[int, float], reference: Mapping[int, float]) -> Difference | None:
    """The paired difference over the seeds that both have; None where that is fewer than two."""
    common = [seed for seed in errors if seed in reference]
    if len(common) < 2:
        return None
    return paired([errors[seed] for seed in common], [reference[seed] for seed in common])


def notation(mean: float, std: float | None = None) -> str:
    """The paper's notation: two decimals, and the standard deviation in hundredths in brackets.

    ``1.96(03)`` is 1.96 with a deviation of 0.03. From 1 on the deviation is written out, ``12.30(1.25)``, so that its
    digits cannot be taken for hundredths. Without a deviation there are no brackets.
    """
    if std is None:
        return f"{mean:.2f}"
    hundredths = round(std * 100)
    return f"{mean:.2f}({hundredths:02d})" if hundredths < 100 else f"{mean:.2f}({std:.2f})"


def signed(value: float, decimals: int = 2) -> str:
    """A difference with its sign; what rounds to zero has none."""
    text = f"{value:+.{decimals}f}"
    return text.replace("-", "−") if float(text) else text[1:]


def t_quantile(p: float, df: int) -> float:
    """The value that Student's t with ``df`` degrees of freedom stays below with probability ``p``.

    Args:
        p: Between 0 and 1, both excluded.
        df: A whole number, at least 1.

    Raises:
        ValueError: arguments out of range.
    """
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
