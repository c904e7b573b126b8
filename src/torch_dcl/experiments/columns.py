"""The columns of Table 1: the paper's networks, the controls that a reader asks for, and their learning rates.

A DCL network is always the baseline after `convert_`. The controls have DCL-A2's weights, to within half a filter. The
learning rates were chosen by `torch_dcl.experiments.recipes.table1_search`.
"""

import functools
import json
import math
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any, NamedTuple

import torch
from torch import nn

from torch_dcl.convert import Plan, convert_, plan
from torch_dcl.models import _common, lenet, variant_plan
from torch_dcl.models.controls import SummedLinear
from torch_dcl.models.variants import VARIANTS

__all__ = [
    "CONTROLS", "EXTRAS", "MODELS", "Choice", "Trial", "build", "choice_as_plain", "read_choice", "stored_choice",
    "stored_minutes", "weights",
]  # fmt: skip

CONTROLS = ("narrow", "low-rank", "summed")
"""At A2's weights: the layer narrowed, of low rank (T = 1), and with its branches averaged instead of multiplied."""

EXTRAS = ("A4S", "A5S", "A4D", "A5D", "AB2")
"""Tried beside the table: more branches in the first layer, and both layers replaced."""

MODELS = ("baseline", "oracle", *VARIANTS, *CONTROLS)
"""The columns in the order of the table."""

_FC1, _FC1_IN, _SHARE = 500, 800, 1 / 5


def build(column: str, classes: int, seed: int, *, filters: int | None = None) -> nn.Module:
    """A LeNet of a column, one of `MODELS` or `EXTRAS`, started from a seed.

    The convolutions of one seed start alike in all columns, and torch's own generator is left as it was. The oracle's
    networks are the baseline with ten classes. ``filters`` of a branch may take the place of the paper's fifth, in the
    DCL columns alone.
    """
    with torch.random.fork_rng(devices=[]):
        # Before the seed is set: planning makes a network of its own, and only the first time.
        plain = column in ("baseline", "oracle", "narrow", "summed")
        plans = () if plain else _plans(column, classes, filters)
        narrow = _narrow_filters(classes) if column == "narrow" else 0
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which seeds GPUs as well
        model = lenet(classes)
        if column == "narrow":
            model.fc1, model.fc2 = nn.Linear(_FC1_IN, narrow), nn.Linear(narrow, classes)
            for layer in (model.fc1, model.fc2):
                _common.uniform_(layer, bound=math.sqrt(3 / layer.in_features))
        if column == "summed":
            model.fc1 = SummedLinear.like(model.fc1, branches=2, width=_FC1 // 5)  # type: ignore[assignment]
        for each in plans:
            convert_(model, each, init="random")
    return model


@functools.cache
def weights(column: str, classes: int, *, filters: int | None = None) -> int:
    """How many weights a network of the column has, without biases; of the oracle, one of its networks."""
    model = build(column, 10 if column == "oracle" else classes, 0, filters=filters)
    return sum(p.numel() for name, p in model.named_parameters() if not name.endswith("bias"))


def _narrow_filters(classes: int) -> int:
    """Filters of the first fully-connected layer with which the network has the weights of DCL-A2."""
    fixed = weights("baseline", classes) - _FC1 * (_FC1_IN + classes)
    return round((weights("A2", classes) - fixed) / (_FC1_IN + classes))


@functools.cache
def _plans(column: str, classes: int, filters: int | None) -> tuple[Plan, ...]:
    """What turns the baseline into the network of a column."""
    model = lenet(classes)
    if column == "low-rank":
        return (plan(model, model.input_size, branches=1, width=2 * _FC1 // 5, eps=0.0).only("fc1"),)
    if column == "AB2":
        return variant_plan(model, "A2"), variant_plan(model, "B2")
    if column in EXTRAS:
        strategy = "stochastic" if column.endswith("S") else "deterministic"
        width = filters or _FC1 // 5
        planned = plan(model, model.input_size, branches=int(column[1]), width=width, strategy=strategy)  # type: ignore[arg-type]
        return (planned.only("fc1"),)
    if column in VARIANTS:
        layer = model.fc1 if column[0] == "A" else model.fc2
        share = _SHARE if filters is None else filters / layer.out_features
        return (variant_plan(model, column, fraction=share),)
    raise ValueError(f"there is no column {column!r}; the columns are {', '.join((*MODELS, *EXTRAS))}")


# Learning rates


class Trial(NamedTuple):
    """What is tuned: the learning rate, and a bound on the gradient's norm."""

    lr: float
    clip: float = math.inf

    def __str__(self) -> str:
        return f"{self.lr:g}" + ("" if math.isinf(self.clip) else f" clip {self.clip:g}")

    def as_plain(self) -> dict[str, float | None]:
        """The trial as JSON has it."""
        return {"lr": self.lr, "clip": None if math.isinf(self.clip) else self.clip}


Choice = dict[str, dict[int, Trial]]
"""By column and number of digits."""


def read_choice(plain: Mapping[str, Any]) -> Choice:
    """Read what `choice_as_plain` gave."""
    return {
        column: {int(count): Trial(t["lr"], t["clip"] or math.inf) for count, t in by_count.items()}
        for column, by_count in plain.items()
    }


def choice_as_plain(choice: Choice, columns: Iterable[str]) -> dict[str, Any]:
    """The choice for some columns, as JSON has it."""
    return {column: {str(n): trial.as_plain() for n, trial in choice[column].items()} for column in columns}


def stored_choice() -> Choice:
    """What the search chose when it was last run for this release."""
    return read_choice(_stored()["choice"])


def stored_minutes() -> dict[str, float]:
    """Minutes of the ``calibration`` of the sets and of that ``search``, on the machines that their results name."""
    return dict(_stored()["minutes"])


def _stored() -> dict[str, Any]:
    text = resources.files("torch_dcl.experiments").joinpath("chosen.json").read_text(encoding="utf-8")
    return dict(json.loads(text))
