"""One step of SGD on stacked parameters."""

import torch
from torch import Tensor

from torch_dcl import kernels
from torch_dcl.training.operations import low_copy

__all__ = ["sgd_"]


def sgd_(
    p: Tensor, m: Tensor, g: Tensor, rate: Tensor, decay: Tensor, scale: Tensor | None,
    momentum: float, nesterov: bool, factors: tuple[float, float], active: Tensor | None, branches: int,
) -> None:  # fmt: skip
    """One step of SGD in place, as torch.optim.SGD does it; a network at rate 0 and an idle branch stay as they are."""
    lr_factor, wd_factor = factors
    if kernels.usable(p):
        from torch_dcl.kernels import pointwise  # noqa: PLC0415

        pointwise.sgd_(
            p.detach(), m, g, low_copy(p), lr=rate, weight_decay=decay, clip=scale, momentum=momentum,
            nesterov=nesterov, lr_factor=lr_factor, wd_factor=wd_factor, active=active, branches=branches,
        )  # fmt: skip
        return

    def across(values: Tensor) -> Tensor:
        return values.view(-1, *(1,) * (p.dim() - 1))

    moves = across(rate != 0)
    if active is not None:
        row = torch.arange(p.shape[1], device=p.device) // (p.shape[1] // branches)
        drawn = (row[None, :, None] == active[:, None]).any(-1)
        moves = moves & drawn.view(*drawn.shape, *(1,) * (p.dim() - 2))
    if scale is not None:
        g = g * across(scale)
    g = g + across(decay) * wd_factor * p.detach()
    fresh = momentum * m + g
    step = g + momentum * fresh if nesterov else fresh
    m.copy_(torch.where(moves, fresh, m))
    p.detach().copy_(torch.where(moves, p.detach() - across(rate) * lr_factor * step, p.detach()))
    copy = low_copy(p)
    if copy is not None:
        copy.detach().copy_(p.detach())
