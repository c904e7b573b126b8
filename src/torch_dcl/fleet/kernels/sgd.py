"""The step of the optimiser on stacked parameters: many of them in one launch, one read of every value, one write.

A small network has a dozen parameters of a few values beside one or two large ones; a launch for each takes longer than
the work.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from torch_dcl.kernels.arithmetic import OPTIONS
from torch_dcl.kernels.sizes import cdiv

__all__ = ["sgd_"]

_BLOCK = 1024
_TOGETHER = 16
"""Parameters of a launch; what is compiled grows with them."""


@triton.jit
def _move(
    p_all, m_all, g_all, low_all, active_all, size, branches, lr, wd, clip_all, momentum, e, block,
    NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of one parameter of network e."""
    i = block * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    if active_all is not None:
        branch = i // (size // branches)
        first = tl.load(active_all + e * 2).to(tl.int32)
        second = tl.load(active_all + e * 2 + 1).to(tl.int32)
        inside = inside & ((branch == first) | (branch == second))
    at = e * size + i
    p = tl.load(p_all + at, mask=inside)
    g = tl.load(g_all + at, mask=inside).to(tl.float32)
    m = tl.load(m_all + at, mask=inside)
    if clip_all is not None:
        g *= tl.load(clip_all + e)
    g += wd * p
    m = momentum * m + g
    if NESTEROV:
        g += momentum * m
    else:
        g = m
    p -= lr * g
    tl.store(p_all + at, p, mask=inside)
    tl.store(m_all + at, m, mask=inside)
    if low_all is not None:
        tl.store(low_all + at, p.to(low_all.dtype.element_ty), mask=inside)


@triton.jit
def _sgd(
    p, m, g, low, active, sizes, branches, lr_factors, wd_factors, lr_all, wd_all, clip_all, momentum,
    NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(1).to(tl.int64)
    lr = tl.load(lr_all + e)
    if lr == 0:  # at rest: finished, or stopped
        return
    wd = tl.load(wd_all + e)
    block = tl.program_id(0)
    for k in tl.static_range(len(p)):
        blocks = tl.cdiv(sizes[k], BLOCK)
        if (block >= 0) & (block < blocks):
            _move(
                p[k], m[k], g[k], low[k], active[k], sizes[k], branches[k], lr * lr_factors[k], wd * wd_factors[k],
                clip_all, momentum, e, block, NESTEROV, BLOCK,
            )  # fmt: skip
        block -= blocks


def sgd_(
    p: Sequence[Tensor], moments: Sequence[Tensor], gradients: Sequence[Tensor], low: Sequence[Tensor | None],
    lr_factors: Sequence[float], wd_factors: Sequence[float], active: Sequence[Tensor | None], branches: Sequence[int],
    *, lr: Tensor, weight_decay: Tensor, clip: Tensor | None, momentum: float, nesterov: bool,
) -> None:  # fmt: skip
    """One step of SGD on stacked parameters ``[E, ...]`` in place, with their copies in a lower type.

    A network whose learning rate is 0 is left as it is, momentum included. Of a parameter with ``active``, ``[E, 2]``,
    only the rows of the two active branches move.
    """
    sizes = [one[0].numel() for one in p]
    given = (p, moments, gradients, low, active, sizes, branches, lr_factors, wd_factors)
    for first in range(0, len(p), _TOGETHER):
        these = slice(first, first + _TOGETHER)
        blocks = sum(cdiv(size, _BLOCK) for size in sizes[these])
        _sgd[(blocks, len(lr))](
            *[tuple(values[these]) for values in given], lr, weight_decay, clip, momentum,
            NESTEROV=nesterov, BLOCK=_BLOCK, **OPTIONS,
        )  # fmt: skip
