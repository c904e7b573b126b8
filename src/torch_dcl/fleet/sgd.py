"""One step of SGD on stacked parameters."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dcl import kernels
from torch_dcl.fleet.operations import low_copy

__all__ = ["Learning", "are_finite", "may_step", "sgd_"]


class Learning(NamedTuple):
    """A stacked parameter ``[E, ...]`` in a step."""

    parameter: Tensor
    moment: Tensor
    gradient: Tensor
    factors: tuple[float, float] = (1.0, 1.0)
    """On the networks' learning rates and weight decays."""
    active: Tensor | None = None
    """The two branches of each network that move, ``[E, 2]``; None for all."""
    branches: int = 1


def are_finite(values: Sequence[Tensor], networks: int) -> Tensor:
    """Of which networks all values are finite, bool ``[E]``; ``values`` are ``[E, ...]`` each."""
    largest = [torch.linalg.vector_norm(value.reshape(networks, -1), math.inf, dim=1) for value in values]
    return torch.stack(largest).isfinite().all(0)


def may_step(losses: Tensor, gradients: Sequence[Tensor | None]) -> Tensor:
    """Which networks may take a step, bool ``[E]``: those whose losses and gradients are finite.

    On a GPU only the gradients of biases and scales are looked at: to look at all of them took 5 % of a step of small
    networks. A value that is not finite on its way back through a layer reaches that
    layer's bias. What escapes this, a sum that overflows in a weight alone, is found at the end of the epoch.

    Args:
        losses: Of each network.
        gradients: ``[E, ...]`` each; None for a parameter that is not used.
    """
    there = [gradient for gradient in gradients if gradient is not None]
    if losses.is_cuda and there:
        there = [g for g in there if g.dim() <= 2] or [min(there, key=Tensor.numel)]
    # A sum is finite only where all its terms are, and 0 times anything else is NaN.
    rows = [losses[:, None], *(gradient.reshape(len(losses), -1).to(losses.dtype) for gradient in there)]
    sums = torch.cat(rows, 1).sum(1) if losses.is_cuda else torch.stack([row.sum(1) for row in rows]).sum(0)
    return sums * 0 == 0


def sgd_(
    parameters: Sequence[Learning], rate: Tensor, decay: Tensor, scale: Tensor | None, momentum: float, nesterov: bool
) -> None:
    """One step of SGD in place, as torch.optim.SGD does it; a network at rate 0 and an idle branch stay as they are.

    Args:
        parameters: At least one.
        rate: Learning rates, ``[E]``.
        decay: Weight decays.
        scale: What gradients are multiplied by; None for 1.
        momentum: Of all.
        nesterov: Whether momentum looks ahead.
    """
    if kernels.usable(parameters[0].parameter):
        from torch_dcl.fleet.kernels import sgd

        sgd.sgd_(
            [one.parameter.detach() for one in parameters], [one.moment for one in parameters],
            [one.gradient.contiguous() for one in parameters], [low_copy(one.parameter) for one in parameters],
            [one.factors[0] for one in parameters], [one.factors[1] for one in parameters],
            [one.active for one in parameters], [one.branches for one in parameters],
            lr=rate, weight_decay=decay, clip=scale, momentum=momentum, nesterov=nesterov,
        )  # fmt: skip
        return
    for learning in parameters:
        _move(learning, rate, decay, scale, momentum, nesterov)


def _move(
    learning: Learning, rate: Tensor, decay: Tensor, scale: Tensor | None, momentum: float, nesterov: bool
) -> None:
    parameter, m, g, (lr_factor, wd_factor), active, branches = learning
    p = parameter.detach()

    def across(values: Tensor) -> Tensor:
        return values.view(-1, *(1,) * (p.dim() - 1))

    moves = across(rate != 0)
    if active is not None:
        row = torch.arange(p.shape[1], device=p.device) // (p.shape[1] // branches)
        drawn = (row[None, :, None] == active[:, None]).any(-1)
        moves = moves & drawn.view(*drawn.shape, *(1,) * (p.dim() - 2))
    if scale is not None:
        g = g * across(scale)
    g = g + across(decay) * wd_factor * p
    fresh = momentum * m + g
    step = g + momentum * fresh if nesterov else fresh
    m.copy_(torch.where(moves, fresh, m))
    p.copy_(torch.where(moves, p - across(rate) * lr_factor * step, p))
    copy = low_copy(parameter)
    if copy is not None:
        copy.detach().copy_(p)
