"""The paper's numbers as plain data: its tables, its results on ImageNet, the weight counts in its text.

Errors are in percent. Nothing here was computed; every number is as printed, even if text and tables disagree.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

__all__ = [
    "COLUMNS", "DCL_COLUMNS", "IMAGENET", "IMAGENET_DROPS", "IMAGENET_SECONDS", "SETS", "TABLE1", "TABLE2",
    "TABLE2_DROPS", "THREE_DIGITS", "TWO_DIGITS", "WEIGHTS", "Reported", "Row", "Shrinkage", "TopErrors",
]  # fmt: skip

COLUMNS = ("baseline", "oracle", "A2", "A3S", "A3D", "B2", "B3S", "B3D")
DCL_COLUMNS = COLUMNS[2:]


class Reported(NamedTuple):
    """A mean error and its standard deviation, both in percent. The paper does not say over how many runs."""

    mean: float
    std: float

    @classmethod
    def parse(cls, text: str) -> "Reported":
        """Read the paper's notation: ``1.96(03)`` is 1.96 with a standard deviation of 0.03."""
        match = re.fullmatch(r"(\d+\.\d\d)\((\d\d)\)", text)
        if match is None:
            raise ValueError(f"{text!r} is not a mean with its deviation; write it like 1.96(03)")
        return cls(float(match[1]), int(match[2]) / 100)


class Row(NamedTuple):
    """A row of Table 2.

    Attributes:
        name: The authors, or the network.
        reference: The paper's key for the publication; empty for the paper's own rows.
        dcl: Whether the network has a DCL layer.
        errors: Dataset to error, None where the paper prints a dash.
    """

    name: str
    reference: str
    dcl: bool
    errors: Mapping[str, float | None]


class TopErrors(NamedTuple):
    """Top-1 and top-5 error."""

    top1: float
    top5: float


class Shrinkage(NamedTuple):
    """A size or a time without and with DCL, and the saving in percent as the paper states it."""

    baseline: float
    dcl: float
    saved: float


# Table 1, one line a set, in the order of COLUMNS.
_TABLE1 = """
MNIST-II-01    1.96(03)  1.07(04)  1.76(03)  1.73(04)  1.85(09)   2.15(06)  2.11(07)   2.12(12)
MNIST-II-02    2.58(07)  2.02(11)  2.38(05)  2.36(06)  2.40(10)   2.56(06)  2.46(04)   2.50(05)
MNIST-II-03    2.99(07)  2.12(15)  2.80(06)  2.76(14)  2.76(05)   3.17(15)  3.09(05)   3.08(15)
MNIST-II-04    3.55(11)  2.85(09)  3.31(10)  3.31(06)  3.44(06)   3.67(15)  3.44(02)   3.54(11)
MNIST-II-05    5.10(14)  4.23(06)  4.86(15)  4.86(13)  4.94(14)   5.86(17)  5.81(05)   5.91(18)
MNIST-III-01   3.08(14)  2.15(08)  2.82(07)  2.71(06)  2.82(05)   2.96(14)  2.91(08)   3.00(10)
MNIST-III-02   5.38(16)  3.39(09)  4.73(15)  4.54(09)  4.81(05)   5.09(08)  5.08(05)   5.46(22)
MNIST-III-03   6.30(13)  4.93(18)  5.76(12)  5.73(08)  5.72(05)   6.14(17)  6.31(12)   6.48(10)
MNIST-III-04   7.81(16)  5.64(22)  7.22(11)  7.19(05)  7.25(16)   5.75(17)  5.65(16)   5.79(24)
MNIST-III-05   7.88(20)  7.08(15)  7.33(11)  7.20(19)  7.39(10)   7.71(09)  7.64(13)   7.98(21)
MNIST-III-06   8.03(16)  5.52(11)  7.31(12)  7.08(20)  7.26(07)   5.52(20)  5.63(05)   5.79(28)
MNIST-III-07   8.98(30)  7.59(22)  8.41(25)  8.38(14)  8.47(34)   8.87(30)  8.95(21)   9.09(28)
MNIST-III-08   9.57(19)  8.22(16)  8.94(19)  8.88(11)  8.94(08)   9.60(17)  9.49(14)   9.79(20)
MNIST-III-09  10.08(27)  9.34(15)  9.86(17)  9.71(16)  9.90(14)  10.07(43)  9.93(08)  10.03(28)
MNIST-III-10  10.12(25)  7.61(12)  9.17(12)  9.14(07)  9.19(07)   9.74(27)  9.97(10)  10.11(31)
"""

TABLE1: dict[str, dict[str, Reported]] = {
    name: dict(zip(COLUMNS, map(Reported.parse, cells), strict=True))
    for name, *cells in map(str.split, _TABLE1.strip().splitlines())
}

SETS = tuple(TABLE1)
TWO_DIGITS = tuple(name for name in SETS if name.startswith("MNIST-II-"))
THREE_DIGITS = tuple(name for name in SETS if name.startswith("MNIST-III-"))


def _row(name: str, reference: str, dcl: bool, svhn: float, cifar10: float, cifar100: float) -> Row:
    return Row(name, reference, dcl, {"SVHN": svhn, "CIFAR10": cifar10, "CIFAR100": cifar100})


TABLE2: tuple[Row, ...] = (
    _row("Zeiler et al.", "Zeiler_2013_Stochastic", False, 2.80, 15.13, 42.51),
    _row("Goodfellow et al.", "Goodfellow_2013_Maxout", False, 2.47, 9.38, 38.57),
    _row("Lin et al.", "Lin_2014_Network", False, 2.35, 8.81, 35.68),
    _row("Lee et al.", "Lee_2015_Deeply", False, 1.92, 7.97, 34.57),
    _row("Liang et al.", "Liang_2015_Recurrent", False, 1.77, 7.09, 31.75),
    _row("Lee et al.", "Lee_2016_Generalizing", False, 1.69, 6.05, 32.37),
    _row("Xie et al.", "Xie_2016_Geometric", False, 1.67, 5.31, 25.01),
    _row("Huang et al.", "Huang_2016_Deep", False, 1.75, 5.25, 24.98),
    _row("LeNet", "", False, 4.21, 14.18, 44.77),
    _row("LeNet", "", True, 3.80, 13.55, 42.81),
    _row("BigNet", "", False, 2.19, 7.88, 31.03),
    _row("BigNet", "", True, 2.03, 7.46, 29.83),
    _row("WRN", "", False, 1.77, 5.54, 25.52),
    _row("WRN", "", True, 1.69, 5.37, 25.10),
)

# The relative drops of the error that the text of section 4.2.1 states.
TABLE2_DROPS: dict[str, dict[str, float]] = {
    "LeNet": {"SVHN": 9.74, "CIFAR10": 4.44, "CIFAR100": 4.38},
    "BigNet": {"SVHN": 7.31, "CIFAR10": 5.33, "CIFAR100": 3.87},
    "WRN": {"SVHN": 4.52, "CIFAR10": 3.07, "CIFAR100": 1.65},
}

# Section 4.2.2, AlexNet. The drops are relative, in percent, and the text says "about".
IMAGENET: dict[str, TopErrors] = {"baseline": TopErrors(43.19, 19.87), "dcl": TopErrors(42.98, 19.69)}
IMAGENET_DROPS = TopErrors(0.5, 0.9)
# Seconds for 20 iterations of training.
IMAGENET_SECONDS = Shrinkage(6.04, 5.67, 6.13)

# Millions of weights. The paper states none for LeNet and for WRN.
WEIGHTS: dict[str, Shrinkage] = {"BigNet": Shrinkage(5.74, 5.09, 11.41), "AlexNet": Shrinkage(62.35, 51.86, 16.82)}
