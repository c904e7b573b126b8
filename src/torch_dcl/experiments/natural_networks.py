"""Section 4.2.1 as networks, data and recipes: the LeNet variant, BigNet and Wide ResNet on CIFAR and SVHN.

A column is a network's name, with ``+dcl`` behind it for the paper's DCL network (two branches, each with a quarter of
the filters, in place of the first fully-connected layer) and ``+dcl3s`` for three branches with the stochastic
strategy, which section 4.1 promises for natural images and section 4.2 does not use. In a Wide ResNet the first
fully-connected layer is the classifier.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from torch_dcl.convert import Plan, convert_
from torch_dcl.data import Dataset
from torch_dcl.data.batches import mean_image
from torch_dcl.data.svhn import preprocess
from torch_dcl.experiments.paper_numbers import TABLE2
from torch_dcl.fleet import Inputs, Schedule
from torch_dcl.models import bignet, count_weights, lenet_cifar, variant_plan, wide_resnet

__all__ = [
    "COLUMNS", "DATA", "NETWORKS", "TITLES", "TrainingRecipe", "build", "caffe_factors", "inputs_of", "network_of",
    "paper_error", "recipe_of", "weights",
]  # fmt: skip

NETWORKS = ("lenet", "bignet", "wrn")
TITLES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "svhn": "SVHN"}
"""What a reader calls the sets."""

DATA = tuple(TITLES)
_VARIANTS = {"": None, "+dcl": "A2", "+dcl3s": "A3S"}
COLUMNS = tuple(network + variant for network in NETWORKS for variant in _VARIANTS)
"""The columns of Table 2, those of one network together."""

_IMAGES = {"cifar10": 50_000, "cifar100": 50_000, "svhn": 598_388}
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
        return TrainingRecipe(100, 1e-2, Schedule(math.ceil(10_000_000 / _IMAGES[data]), drops=(0.6, 0.9)), 5e-4)
    if network != "wrn":
        raise ValueError(f"there is no network {network!r}; the networks are {', '.join(NETWORKS)}")
    if data == "svhn":
        return TrainingRecipe(128, 1e-2, Schedule(160, drops=(0.5, 0.75)), 5e-4, nesterov=True, dropout=0.4)
    return TrainingRecipe(128, 0.1, Schedule(200, drops=(0.3, 0.6, 0.8), factor=0.2), 5e-4, nesterov=True)


def caffe_factors(name: str) -> tuple[float, float]:
    """Caffe's factors on learning rate and weight decay of a parameter."""
    return (2.0, 0.0) if name.endswith("bias") else (1.0, 1.0)


def inputs_of(network: str, data: Dataset, *, average: bool = False) -> Inputs:
    """The input pipeline of a network on a set; ``average`` evaluates an image and its mirror image.

    CIFAR: the LeNet variant sees raw values without the mean image, the others normalised channels. All are mirrored at
    random; BigNet sees crops of 24 × 24, Wide ResNet crops of the image with 4 pixels reflected at its borders. SVHN:
    local contrast normalisation as the paper says, no mirroring; only BigNet's crops are drawn, since it takes no
    other size.
    """
    crop = 24 if network == "bignet" else None
    if data.name == "svhn":
        return Inputs(_svhn_on_raw_scale if network == "lenet" else preprocess, crop=crop, average=average)
    if network == "lenet":
        return Inputs(mean_image(data.train_images), flip=True, average=average)
    return Inputs(data.statistics, crop=crop, pad=4 if network == "wrn" else 0, flip=True, average=average)


def _svhn_on_raw_scale(images: Tensor) -> Tensor:
    """SVHN's preprocessing scaled to about the spread of raw values, as the LeNet variant expects."""
    return 64 * preprocess(images)


def build(column: str, classes: int, seed: int, *, dropout: float = 0.0) -> nn.Module:
    """A network of a column, started from a seed; torch's own generator is left as it was.

    All but the replaced layer starts alike in the columns of one network. Dropout is in the blocks of a Wide ResNet.
    """
    network = network_of(column)
    with torch.random.fork_rng(devices=[]):
        planned = _plan(column, classes)  # before the seed is set: planning makes a network, and only the first time
        torch.default_generator.manual_seed(seed)
        model = _BUILDERS[network](classes, dropout)
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
    variant = _VARIANTS[column.removeprefix(network)]
    return None if variant is None else variant_plan(_BUILDERS[network](classes, 0.0), variant)
