"""The columns of Table 1 as networks: the paper's, and the controls that a reader asks for.

A DCL network is always the baseline after `convert_`. The controls have DCL-A2's weights, to within half a filter.
"""

import functools
import math

import torch
from torch import nn

from torch_dcl.convert import Plan, convert_, plan
from torch_dcl.models import _common, lenet, variant_plan
from torch_dcl.models.controls import SummedLinear
from torch_dcl.models.variants import VARIANTS

__all__ = ["CONTROLS", "EXTRAS", "MODELS", "build", "weights"]

CONTROLS = ("narrow", "low-rank", "summed")
"""At A2's weights: the layer narrowed, of low rank (T = 1), and with its branches averaged instead of multiplied."""

EXTRAS = ("A4S", "A5S", "A4D", "A5D", "AB2")
"""Tried beside the table: more branches in the first layer, and both layers replaced."""

MODELS = ("baseline", "oracle", *VARIANTS, *CONTROLS)
"""The columns in the order of the table."""

_FC1, _FC1_IN, _SHARE = 500, 800, 1 / 5


def build(column: str, classes: int, seed: int, *, filters: int | None = None) -> nn.Module:
    """A LeNet of a column, started from a seed.

    The convolutions of one seed start alike in all columns.

    Args:
        column: One of `MODELS` or `EXTRAS`; the oracle's networks are the baseline with ten classes.
        classes: Outputs.
        seed: What the start is drawn from; torch's own generator is left as it was.
        filters: Filters of a branch in place of the paper's fifth; for the DCL columns alone.
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
    """So few filters in the first fully-connected layer that the network has the weights of DCL-A2."""
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
