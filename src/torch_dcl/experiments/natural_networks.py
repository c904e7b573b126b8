"""Section 4.2.1 as networks, recipes and a table: the LeNet variant, BigNet and Wide ResNet on CIFAR and SVHN.

A column is a network's name, with the suffix ``+dcl`` for the paper's DCL network (two branches, each with a quarter of
the filters, in place of the first fully-connected layer) and ``+dcl3s`` for three branches with the stochastic
strategy, which section 4.1 promises for natural images and section 4.2 does not use. In a Wide ResNet the first
fully-connected layer is the classifier, and a quarter of ten outputs is no filter count that anyone would choose. So
``+dcl-classes`` has as many filters a branch as there are classes, and ``+dcl-group3`` replaces the first convolution
of each block of the last group, together with its batch norm.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torch_dcl.convert import Plan, convert_, plan
from torch_dcl.data import Dataset
from torch_dcl.data.batches import mean_image
from torch_dcl.data.svhn import preprocess
from torch_dcl.experiments.paper_numbers import TABLE2
from torch_dcl.experiments.protocol import Outcome
from torch_dcl.experiments.settings import Reader, is_number
from torch_dcl.experiments.stats import mean
from torch_dcl.experiments.table import Cell, Table, TableError
from torch_dcl.fleet import Inputs, Schedule
from torch_dcl.models import bignet, count_weights, lenet_cifar, variant_plan, wide_resnet

__all__ = [
    "COLUMNS", "DATA", "LENET_OPTIONS", "NETWORKS", "SIZES", "TITLES", "NaturalTable", "TrainingRecipe", "build",
    "caffe_factors", "check_recipes", "distance", "inputs_of", "nearest", "network_of", "paper_error", "recipe_of",
    "validation_errors", "weights",
]  # fmt: skip

NETWORKS = ("lenet", "bignet", "wrn")
TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "svhn": "SVHN"}
"""What a reader calls the sets."""

DATA = tuple(TITLES)
_VARIANTS = {"": None, "+dcl": "A2", "+dcl3s": "A3S"}
_OF_WRN = ("+dcl-classes", "+dcl-group3")
COLUMNS = tuple(n + variant for n in NETWORKS for variant in (*_VARIANTS, *(_OF_WRN if n == "wrn" else ())))
"""The columns of Table 2, those of one network together."""

LENET_OPTIONS = {
    "norms": "local response norms within channels behind the first two poolings",
    "decay": "weight decay times 250 on the classifier",
    "crops": "crops of the image with 4 pixels reflected at its borders",
}
"""What the LeNet variant may have taken over from Caffe's ``cifar10_full``, or from common practice (crops)."""

SIZES = {"cifar10": (50_000, 10_000), "cifar100": (50_000, 10_000), "svhn": (598_388, 26_032)}
"""Images to train on and to test with."""
_REPORTED = {"lenet": "LeNet", "bignet": "BigNet", "wrn": "WRN"}


@dataclasses.dataclass(frozen=True)
class TrainingRecipe:
    """How a network is trained on a set."""

    batch: int
    lr: float
    schedule: Schedule
    weight_decay: float
    nesterov: bool = False
    caffe: bool = False
    """Whether biases learn twice as fast and do not decay, as in Caffe's networks."""
    dropout: float = 0.0
    """Inside the blocks of a Wide ResNet."""
    momentum: float = 0.9
    options: tuple[str, ...] = ()
    """Out of `LENET_OPTIONS`, for the LeNet variant."""

    def with_options(self, options: Iterable[str]) -> "TrainingRecipe":
        """The recipe with these of the options, in a fixed order."""
        chosen = set(options)
        return dataclasses.replace(self, options=tuple(name for name in LENET_OPTIONS if name in chosen))

    def scaled(self, scale: float) -> "TrainingRecipe":
        """The recipe with its epochs shortened, all phases in proportion; at least one epoch stays."""
        if not 0 < scale <= 1:
            raise ValueError(f"scale must be above 0 and at most 1, got {scale}")
        epochs = max(1, round(self.schedule.epochs * scale))
        return dataclasses.replace(self, schedule=dataclasses.replace(self.schedule, epochs=epochs))

    def __str__(self) -> str:
        drops = ", ".join(f"{100 * drop:.0f} %" for drop in self.schedule.drops)
        epochs = "1 epoch" if self.schedule.epochs == 1 else f"{self.schedule.epochs} epochs"
        return (
            f"{epochs}, batch {self.batch}, rate {self.lr:g} times {self.schedule.factor:g} after "
            f"{drops}, momentum {self.momentum:g}{' (nesterov)' if self.nesterov else ''}, weight decay "
            f"{self.weight_decay:g}{', biases at twice the rate without decay' if self.caffe else ''}"
            f"{f', dropout {self.dropout:g} in the blocks' if self.dropout else ''}"
            f"{''.join(f', {LENET_OPTIONS[name]}' for name in self.options)}"
        )


def network_of(column: str) -> str:
    """The network of a column."""
    if column not in COLUMNS:
        raise ValueError(f"there is no column {column!r}; the columns are {', '.join(COLUMNS)}")
    return column.partition("+")[0]


def recipe_of(network: str, data: str) -> TrainingRecipe:
    """The recipe of a network on a set, at its full length."""
    if network == "lenet":  # 120, 20 and 10 epochs at 1e-3, 1e-4 and 1e-5
        return TrainingRecipe(100, 1e-3, Schedule(150, drops=(120 / 150, 140 / 150)), 4e-3, caffe=True)
    if network == "bignet":  # 6e6, 3e6 and 1e6 samples at 1e-2, 1e-3 and 1e-4
        return TrainingRecipe(100, 1e-2, Schedule(math.ceil(10_000_000 / SIZES[data][0]), drops=(0.6, 0.9)), 5e-4)
    if network != "wrn":
        raise ValueError(f"there is no network {network!r}; the networks are {', '.join(NETWORKS)}")
    if data == "svhn":
        return TrainingRecipe(128, 1e-2, Schedule(160, drops=(0.5, 0.75)), 5e-4, nesterov=True, dropout=0.4)
    return TrainingRecipe(128, 0.1, Schedule(200, drops=(0.3, 0.6, 0.8), factor=0.2), 5e-4, nesterov=True)


def caffe_factors(name: str, classifier: float = 1.0) -> tuple[float, float]:
    """Caffe's factors on learning rate and weight decay of a parameter; ``classifier`` is that of ``fc2``'s weights."""
    return (2.0, 0.0) if name.endswith("bias") else (1.0, classifier if name == "fc2.weight" else 1.0)


def inputs_of(network: str, data: Dataset, *, average: bool = False, crops: bool = False) -> Inputs:
    """The input pipeline of a network on a set; ``average`` evaluates an image and its mirror image.

    CIFAR: the LeNet variant sees raw values without the mean image, the others normalised channels. All are mirrored at
    random; BigNet sees crops of 24 × 24, Wide ResNet, and with ``crops`` the LeNet variant, crops of the image with 4
    pixels reflected at its borders. SVHN: local contrast normalisation as the paper says, no mirroring; only BigNet's
    crops are drawn, since it takes no other size.
    """
    crop = 24 if network == "bignet" else None
    if data.name == "svhn":
        return Inputs(_svhn_on_raw_scale if network == "lenet" else preprocess, crop=crop, average=average)
    if network == "lenet":
        return Inputs(mean_image(data.train_images), pad=4 if crops else 0, flip=True, average=average)
    return Inputs(data.statistics, crop=crop, pad=4 if network == "wrn" else 0, flip=True, average=average)


def _svhn_on_raw_scale(images: Tensor) -> Tensor:
    """SVHN's preprocessing scaled to about the spread of raw values, as the LeNet variant expects."""
    return 64 * preprocess(images)


def build(column: str, classes: int, seed: int, *, dropout: float = 0.0, norms: bool = False) -> nn.Module:
    """A network of a column, started from a seed; torch's own generator is left as it was.

    All but what is replaced starts alike in the columns of one network. Dropout is in the blocks of a Wide ResNet,
    local response norms are in the LeNet variant.
    """
    network = network_of(column)
    with torch.random.fork_rng(devices=[]):
        planned = _plan(column, classes)  # before the seed is set: planning makes a network, and only the first time
        torch.default_generator.manual_seed(seed)
        model = lenet_cifar(classes, norms=norms) if network == "lenet" else _BUILDERS[network](classes, dropout)
        if planned is not None:
            convert_(model, planned, init="random")
    return model


@functools.cache
def weights(column: str, classes: int) -> int:
    """How many weights a network of the column has, without biases."""
    return count_weights(build(column, classes, 0))


def paper_error(column: str, data: str) -> float | None:
    """The paper's error of a column on a set; None where it has none."""
    network, variant = network_of(column), column.partition("+")[2]
    if variant not in ("", "dcl"):
        return None
    name = _REPORTED[network]
    row = next(row for row in TABLE2 if row.name == name and not row.reference and row.dcl == bool(variant))
    return row.errors[data.upper()]


_BUILDERS: dict[str, Callable[[int, float], nn.Module]] = {
    "lenet": lambda classes, _: lenet_cifar(classes),
    "bignet": lambda classes, _: bignet(classes),
    "wrn": lambda classes, dropout: wide_resnet(16, 4, classes, dropout),
}


@functools.cache
def _plan(column: str, classes: int) -> Plan | None:
    network = network_of(column)
    model, variant = _BUILDERS[network](classes, 0.0), column.removeprefix(network)
    if variant == "+dcl-group3":
        return plan(model, (3, 32, 32), branches=2, ratio=1 / 4).only("group3.*.conv1")
    if variant == "+dcl-classes":
        return variant_plan(model, "A2", fraction=1.0)
    name = _VARIANTS[variant]
    return None if name is None else variant_plan(model, name)


# LeNet's options


def validation_errors(trials: Iterable[Outcome]) -> dict[str, dict[str, float]]:
    """Mean validation errors by LeNet's options, ``none`` or joined by ``+``, and the set."""
    errors: dict[str, dict[str, list[float]]] = {}
    for outcome in trials:
        options = "+".join(name for name, _ in outcome.job.options) or "none"
        errors.setdefault(options, {}).setdefault(outcome.job.data, []).append(outcome.judged_error)
    return {options: {name: mean(of) for name, of in by_set.items()} for options, by_set in errors.items()}


def distance(by_set: Mapping[str, float]) -> float:
    """How far errors are from those of the paper's plain LeNet: relative, mean over the sets."""
    return mean([abs(error / (paper_error("lenet", name) or math.nan) - 1) for name, error in by_set.items()])


def nearest(errors: Mapping[str, Mapping[str, float]]) -> tuple[str, ...]:
    """The options whose errors are nearest to the paper's."""
    best = min(errors, key=lambda options: distance(errors[options]))
    return tuple(name for name in LENET_OPTIONS if name in best.split("+"))


# The table


@dataclasses.dataclass(frozen=True)
class NaturalTable(Table):
    """Table 2 as it was run here.

    Attributes:
        absent: Sets of which nothing was run, with the reason.
        scale: The fraction of each recipe's epochs that was trained; below 1 the run is shortened.
        lenet: Validation errors of LeNet by its options and the set, where options were chosen.
    """

    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)
    scale: float = 1.0
    lenet: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)

    against: ClassVar[str] = "the plain network"
    known_sets: ClassVar[tuple[str, ...]] = DATA
    known_columns: ClassVar[tuple[str, ...]] = COLUMNS

    @property
    def sets(self) -> tuple[str, ...]:
        """The sets that have a cell or are marked as absent, in a fixed order."""
        there = {cell.set for cell in self.cells} | set(self.absent)
        return tuple(name for name in DATA if name in there)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that have a cell."""
        there = {cell.column for cell in self.cells}
        return tuple(name for name in COLUMNS if name in there)

    @classmethod
    def baseline_of(cls, column: str) -> str:
        """The plain network."""
        return network_of(column)

    @classmethod
    def paper_of(cls, column: str, name: str) -> tuple[float | None, float | None]:
        """The paper's error, which it gives without a deviation."""
        return paper_error(column, name), None

    @classmethod
    def read_more(cls, read: Reader) -> dict[str, Any]:
        """What is absent, and whether it was shortened."""

        def are_reasons(value: Any) -> bool:
            return isinstance(value, dict) and all(k in DATA and isinstance(v, str) for k, v in value.items())

        absent = read.get("absent", are_reasons, f"some of {', '.join(DATA)} with the reason")
        scale = read.get("scale", lambda v: is_number(v) and 0 < v <= 1, "a number above 0 and at most 1", 1.0)
        lenet = read.get("lenet", lambda v: isinstance(v, dict), "validation errors by options and set", {})
        return {"absent": absent, "scale": scale, "lenet": lenet}

    def best(self, name: str) -> tuple[str, ...]:
        """Of each network the columns with the lowest error on a set, as it is printed."""
        best: list[str] = []
        cells = [cell for cell in self.cells if cell.set == name]
        for network in dict.fromkeys(map(network_of, self.columns)):
            means = {c.column: round(c.mean, 2) for c in cells if network_of(c.column) == network}
            best += [column for column, value in means.items() if value == min(means.values())]
        return tuple(best)


def check_recipes(cells: Iterable[Cell]) -> None:
    """Refuse cells that are compared with each other and were not trained by one recipe.

    Raises:
        TableError: The columns of a network on a set have different hashes.
    """
    noted: dict[tuple[str, str], dict[str, str]] = {}
    for cell in cells:
        noted.setdefault((cell.set, network_of(cell.column)), {}).setdefault(cell.recipe, cell.column)
    for (name, network), by_hash in noted.items():
        if len(by_hash) > 1:
            shown = ", ".join(f"{column} by {which or 'an unknown one'}" for which, column in by_hash.items())
            raise TableError(f"{network} on {name} was trained by different recipes ({shown}); run its columns alike")
