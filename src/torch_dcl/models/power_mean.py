"""Two branches fused by a power mean whose exponent is learned: a product at p = 0, a sum at p = 1.

``M_p(a, b) = ((a^p + b^p) / 2)^(1/p)`` is the geometric mean at p = 0 and the arithmetic mean at p = 1. As p falls it
tends to the minimum ("and"), as p rises to the maximum ("or").
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_dcl.functional import transforms
from torch_dcl.layers import DCLLinear, Responses
from torch_dcl.models.controls import SummedLinear

__all__ = ["BOUND", "SHIFT", "PowerMeanLinear", "bounded", "fuse_power_mean", "power_mean"]

BOUND = 8.0
"""The exponent lies between −8 and 8."""
SHIFT = 0.01
"""What is added to both responses: with p ≤ 0 a response of 0 would be the mean, and have no gradient."""

_NEAR = 0.25
# log cosh(u) / u² in powers of u², to 1e-9 of its value where u² is below `_NEAR`.
_SERIES = (
    1 / 2, -1 / 12, 1 / 45, -17 / 2520, 31 / 14175, -691 / 935550, 10922 / 42567525, -929569 / 10216206000,
    3202291 / 97692469875,
)  # fmt: skip


def power_mean(a: Tensor, b: Tensor, p: Tensor) -> Tensor:
    """``M_p(a, b)`` of positive tensors; value and gradients have float32's precision, also where p is 0 or near it.

    With d = log(a / b) / 2 and u = p·d the mean is ``√a·√b · exp(d · L(u))``, ``L(u) = log cosh(u) / u``. Its gradients
    are ``∂M/∂a = M·σ(2u) / a``, ``∂M/∂b = M·σ(−2u) / b`` and ``∂M/∂p = M·d²·L'(u)``. L and L' are series where u is
    small. Transforms of ``torch.func`` differentiate the mean's own operations.
    """
    mean: Tensor = (_mean if transforms() else _PowerMean.apply)(a, b, p)
    return mean


def _mean(a: Tensor, b: Tensor, p: Tensor) -> Tensor:
    d = (a / b).log() / 2
    return a.sqrt() * b.sqrt() * (d * _log_cosh_over(p * d)).exp()


class _PowerMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, p: Tensor) -> Tensor:
        mean = _mean(a, b, p)
        ctx.save_for_backward(a, b, p, mean)
        return mean

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b, p, mean = ctx.saved_tensors
        d = (a / b).log() / 2
        u, scaled = p * d, grad * mean
        by_p = (scaled * d.square() * _log_cosh_over(u, slope=True)).sum_to_size(p.shape)
        return scaled * torch.sigmoid(2 * u) / a, scaled * torch.sigmoid(-2 * u) / b, by_p


def _log_cosh_over(u: Tensor, *, slope: bool = False) -> Tensor:
    """L(u) = log cosh(u) / u, or its derivative."""
    square, series = u.square(), torch.zeros_like(u)
    is_near = square < _NEAR
    for n in reversed(range(len(_SERIES))):
        series = series * square + (2 * n + 1 if slope else 1) * _SERIES[n]
    near = series if slope else u * series
    u = torch.where(is_near, 1.0, u)  # away from 0, so that the half that is not chosen is differentiable
    over = (u.abs() + F.softplus(-2 * u.abs()) - math.log(2)) / u
    return torch.where(is_near, near, (u.tanh() - over) / u if slope else over)


def bounded(raw: Tensor) -> Tensor:
    """The exponent of a free parameter: ``8·tanh(raw / 8)``, which is raw itself near 0."""
    return BOUND * torch.tanh(raw / BOUND)


def fuse_power_mean(pre: Tensor, other: Tensor, p: Tensor) -> Tensor:
    """``M_p(relu(pre) + 0.01, relu(other) + 0.01)``, computed in float32 or wider, in the type of the responses."""
    wide = torch.promote_types(pre.dtype, torch.float32)
    a, b = (F.relu(response.to(wide)) + SHIFT for response in (pre, other))
    return power_mean(a, b, p.to(wide)).to(pre.dtype)


class PowerMeanLinear(SummedLinear):
    """Two branches fused by a learned power mean: ``z = M_p(v_1 + 0.01, v_2 + 0.01)``, ``v_t = relu(W_t·θ_t·x + b_t)``.

    The layer has one exponent p for all its outputs. Weights, shapes and state-dict keys are otherwise those of
    :class:`~torch_dcl.DCLLinear` with two branches; ε plays no part. ``raw_exponent`` is the parameter behind p. A
    weight decay would pull p to 0, so leave it out of the decay.

    Args:
        in_features: K1.
        out_features: K2.
        start: Where p starts: 0, with the start of a DCL layer, or 1, with that of `SummedLinear`.
        **arguments: As for `DCLLinear`.

    Raises:
        ValueError: Another start, more or fewer than two branches, or the stochastic strategy.
    """

    start: int

    def __init__(self, in_features: int, out_features: int, *, start: Literal[0, 1] = 0, **arguments: Any) -> None:
        if start not in (0, 1):
            raise ValueError(f"p must start at 0, the product, or at 1, the sum, got {start!r}")
        object.__setattr__(self, "start", start)  # needed before the module is made: it starts its weights in between
        super().__init__(in_features, out_features, **arguments)
        if self.branches != 2:
            raise ValueError(f"PowerMeanLinear is for two branches, got {self.branches}; use branches=2")
        like = self.branch.weight
        self.raw_exponent = nn.Parameter(torch.empty(1, device=like.device, dtype=like.dtype))
        self._reset_exponent()

    @property
    def exponent(self) -> Tensor:
        """p, of shape [1]."""
        return bounded(self.raw_exponent)

    def reset_parameters(self) -> None:
        """Initialise the weights as the layer with the mean at which p starts, and p itself."""
        (SummedLinear if self.start else DCLLinear).reset_parameters(self)
        if "raw_exponent" in self._parameters:
            self._reset_exponent()

    def _reset_exponent(self) -> None:
        nn.init.constant_(self.raw_exponent, BOUND * math.atanh(self.start / BOUND))

    def responses(self, x: Tensor) -> Responses:
        """Look inside: both branches y, their responses v and the mean z."""
        y = self._activate(self.branch(x))
        pre = self.fusion.respond(y)
        z = fuse_power_mean(pre[0], pre[1], self.exponent)
        return Responses(self.fusion.split(y), tuple(F.relu(response) for response in pre), z)
