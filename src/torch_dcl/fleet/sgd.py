"""One step of SGD on stacked parameters, which never stores a value that is not finite."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dcl import kernels
from torch_dcl.fleet.operations import low_copy

__all__ = ["Update", "sgd_", "squared_norms"]


class Update(NamedTuple):
    """A stacked parameter ``[E, ...]``, its moment and its gradient in a step."""

    parameter: Tensor
    moment: Tensor
    gradient: Tensor
    factors: tuple[float, float] = (1.0, 1.0)
    """On the networks' learning rates and weight decays."""
    active: Tensor | None = None
    """The two branches of each network that are updated, ``[E, 2]``; None for all."""
    branches: int = 1


def squared_norms(updates: Sequence[Update], dtype: torch.dtype) -> Tensor:
    """The squared norm of each network's gradient, ``[E]``; not finite where a value of the gradient is not."""
    if kernels.usable(updates[0].parameter):
        from torch_dcl.fleet.kernels import sgd

        return sgd.squared_norms([update.gradient for update in updates])
    return torch.stack([update.gradient.to(dtype).flatten(1).square().sum(1) for update in updates]).sum(0)


def sgd_(
    updates: Sequence[Update], rate: Tensor, decay: Tensor, scale: Tensor | None, momentum: float, nesterov: bool,
    alive: Tensor,
) -> None:  # fmt: skip
    """One step of SGD in place, as torch.optim.SGD does it. Networks at rate 0 and idle branches are not updated.

    New weights or moments that are not finite are not stored, and their network is no longer alive.

    Args:
        updates: At least one.
        rate: Learning rates, ``[E]``.
        decay: Weight decays, ``[E]``.
        scale: Factors on the gradients, ``[E]``; None for 1.
        momentum: Momentum of all networks.
        nesterov: Whether to use Nesterov momentum.
        alive: Set to False for networks whose update is not finite, bool ``[E]``.
    """
    if kernels.usable(updates[0].parameter):
        from torch_dcl.fleet.kernels import sgd

        sgd.sgd_(
            [update.parameter.detach() for update in updates], [update.moment for update in updates],
            [update.gradient for update in updates], [low_copy(update.parameter) for update in updates],
            [update.factors[0] for update in updates], [update.factors[1] for update in updates],
            [update.active for update in updates], [update.branches for update in updates],
            lr=rate, weight_decay=decay, clip=scale, momentum=momentum, nesterov=nesterov, alive=alive,
        )  # fmt: skip
        return
    for update in updates:
        _apply(update, rate, decay, scale, momentum, nesterov, alive)


def _apply(
    update: Update, rate: Tensor, decay: Tensor, scale: Tensor | None, momentum: float, nesterov: bool, alive: Tensor
) -> None:
    parameter, m, g, (lr_factor, wd_factor), active, branches = update
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
    new_m = momentum * m + g
    new_p = p - across(rate) * lr_factor * (g + momentum * new_m if nesterov else new_m)
    finite = (new_p.flatten(1).sum(1) + new_m.flatten(1).sum(1)) * 0 == 0  # quicker than isfinite of every value
    alive &= finite | (rate == 0)
    moves = moves & across(finite)
    m.copy_(torch.where(moves, new_m, m))
    p.copy_(torch.where(moves, new_p, p))
    copy = low_copy(parameter)
    if copy is not None:
        copy.detach().copy_(p)
