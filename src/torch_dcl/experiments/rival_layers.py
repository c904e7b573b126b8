"""BigNet with its first fully-connected layer replaced by DCL and its rivals, at equal weights.

The budget is that of DCL with two branches. The others have as many weights, to within one filter.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_dcl.convert import convert_, plan
from torch_dcl.convert.rows import Plan
from torch_dcl.models import BigNet, _common, bignet, count_weights
from torch_dcl.models.controls import SummedLinear
from torch_dcl.models.rivals import BilinearLinear, GatedLinear, StarLinear

__all__ = ["UNITS", "build_unit", "unit_weights"]

UNITS = {
    "plain": "the layer as it is, with more weights than the others",
    "narrow": "the layer with fewer filters",
    "low-rank": "one branch: relu(W·θ·x)",
    "summed": "two branches averaged instead of multiplied",
    "dcl": "two branches, the root of their product",
    "dcl3s": "three narrower branches with the stochastic strategy",
    "star": "two branches, their product without the root",
    "glu": "a branch times the sigmoid of the other",
    "bilinear": "every pair of two branches' filters, each with a weight for every output",
}
"""What replaces the layer."""

_IN, _OUT = 2304, 1024


def build_unit(unit: str, classes: int, seed: int, *, share: float = 1 / 4) -> BigNet:
    """A BigNet of a unit, started from a seed; all but the replaced layer starts alike.

    ``share`` is the budget of all units but the plain: filters of one of DCL's two branches over the layer's, up to
    1/2.
    """
    if unit not in UNITS:
        raise ValueError(f"there is no unit {unit!r}; the units are {', '.join(UNITS)}")
    if not 0 < share <= 1 / 2:
        raise ValueError(f"share must be above 0 and at most 1/2, got {share}")
    with torch.random.fork_rng(devices=[]):
        planned = _plan(unit, share)  # before the seed is set: planning makes a network, and only the first time
        torch.default_generator.manual_seed(seed)
        model = bignet(classes)
        if planned is not None:
            convert_(model, planned, init="random")
        elif unit == "narrow":
            # With so many the layer and the next one have the weights of DCL's and its next.
            filters = round((_budget(share) + _OUT * _OUT) / (_IN + _OUT))
            model.fc1, model.fc2 = nn.Linear(_IN, filters), nn.Linear(filters, _OUT)
            for layer in (model.fc1, model.fc2):
                _common.normal_(layer, std=math.sqrt(2 / layer.in_features))
        elif unit != "plain":
            model.fc1 = _LAYERS[unit](share)  # type: ignore[assignment]
        if unit in ("glu", "bilinear"):  # their own product is what makes them non-linear
            model.relu9 = nn.Identity()  # type: ignore[assignment]
    return model


@functools.cache
def unit_weights(unit: str, classes: int, share: float = 1 / 4) -> int:
    """How many weights a unit's network has, without biases."""
    return count_weights(build_unit(unit, classes, 0, share=share))


def _width(share: float) -> int:
    """Filters of one of two branches."""
    return math.ceil(_OUT * share - 1e-9)


def _budget(share: float) -> int:
    """Weights of DCL's layer."""
    return 2 * _width(share) * (_IN + _OUT)


def _bilinear(share: float) -> tuple[int, int]:
    """Filters of the two maps, equal or one apart, that meet the budget best."""
    pairs = [(m, n) for m in range(1, _OUT) for n in (m, m + 1)]
    return min(pairs, key=lambda pair: abs(sum(pair) * _IN + pair[0] * pair[1] * _OUT - _budget(share)))


_LAYERS: dict[str, Callable[[float], nn.Module]] = {
    "summed": lambda share: SummedLinear(_IN, _OUT, branches=2, width=_width(share)),
    "star": lambda share: StarLinear(_IN, _OUT, branches=2, width=_width(share)),
    "glu": lambda share: GatedLinear(_IN, _OUT, branches=2, width=_width(share)),
    "bilinear": lambda share: BilinearLinear(_IN, _OUT, *_bilinear(share)),
}


@functools.cache
def _plan(unit: str, share: float) -> Plan | None:
    width = _width(share)
    asked: dict[str, dict[str, Any]] = {
        "dcl": {"branches": 2, "width": width},
        "dcl3s": {"branches": 3, "width": max(1, round(2 * width / 3)), "strategy": "stochastic"},
        "low-rank": {"branches": 1, "width": 2 * width, "eps": 0.0},
    }
    return plan(bignet(), BigNet.input_size, **asked[unit]).only("fc1") if unit in asked else None
