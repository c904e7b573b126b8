"""The optimiser step on stacked parameters: many parameters in one launch, one read and one write of every value.

A small network has a dozen tiny parameters and one or two large ones: a launch for each takes longer than the work.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_dcl.kernels.arithmetic import OPTIONS
from torch_dcl.kernels.launcher import cdiv

__all__ = ["sgd_", "squared_norms"]

_BLOCK = 1024
_NORM_BLOCK = 4096
_TOGETHER = 16
"""Parameters in one launch; the compiled code grows with their number."""


@triton.jit
def _partial_squares(g, out, sizes, first, total, BLOCK: tl.constexpr):
    e = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    to = out + e * total + first + block
    for k in tl.static_range(len(g)):
        blocks = tl.cdiv(sizes[k], BLOCK)
        if (block >= 0) & (block < blocks):
            i = block * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(g[k] + e * sizes[k] + i, mask=i < sizes[k], other=0.0).to(tl.float32)
            tl.store(to, tl.sum(x * x, 0))
        block -= blocks


@triton.jit
def _sum_rows(x, out, size, BLOCK: tl.constexpr):
    e = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        total += tl.load(x + e * size + start + i, mask=start + i < size, other=0.0)
    tl.store(out + e, tl.sum(total, 0))


def squared_norms(gradients: Sequence[Tensor]) -> Tensor:
    """The squared norm of each network's gradients ``[E, ...]``, float32 ``[E]``.

    The order of the sum depends on the shapes of one network alone, so a network has the same norm in any fleet.
    """
    E, sizes = len(gradients[0]), [one[0].numel() for one in gradients]
    blocks = [cdiv(size, _NORM_BLOCK) for size in sizes]
    parts = torch.empty(E, sum(blocks), dtype=torch.float32, device=gradients[0].device)
    out = torch.empty(E, dtype=torch.float32, device=parts.device)
    for first in range(0, len(gradients), _TOGETHER):
        these = slice(first, first + _TOGETHER)
        _partial_squares[(sum(blocks[these]), E)](
            tuple(gradients[these]), parts, tuple(sizes[these]), sum(blocks[:first]), sum(blocks),
            BLOCK=_NORM_BLOCK, **OPTIONS,
        )  # fmt: skip
    _sum_rows[(E,)](parts, out, sum(blocks), BLOCK=_BLOCK, **OPTIONS)
    return out


@triton.jit
def _update(
    p_all, m_all, g_all, low_all, active_all, size, branches, lr, wd, clip_all, momentum, alive_all, e, block,
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
    finite = (tl.abs(p) < float("inf")) & (tl.abs(m) < float("inf"))
    stored = inside & finite
    tl.store(p_all + at, p, mask=stored)
    tl.store(m_all + at, m, mask=stored)
    if low_all is not None:
        tl.store(low_all + at, p.to(low_all.dtype.element_ty), mask=stored)
    # Every writer stores the same value, and nothing in the launch reads it.
    tl.store(alive_all + e + i * 0, tl.zeros((BLOCK,), tl.int1), mask=inside & ~finite)


@triton.jit
def _sgd(
    p, m, g, low, active, sizes, branches, lr_factors, wd_factors, lr_all, wd_all, clip_all, momentum, alive_all,
    NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(1).to(tl.int64)
    lr = tl.load(lr_all + e)
    if lr == 0:  # finished, or stopped
        return
    wd = tl.load(wd_all + e)
    block = tl.program_id(0)
    for k in tl.static_range(len(p)):
        blocks = tl.cdiv(sizes[k], BLOCK)
        if (block >= 0) & (block < blocks):
            _update(
                p[k], m[k], g[k], low[k], active[k], sizes[k], branches[k], lr * lr_factors[k], wd * wd_factors[k],
                clip_all, momentum, alive_all, e, block, NESTEROV, BLOCK,
            )  # fmt: skip
        block -= blocks


def sgd_(
    p: Sequence[Tensor], moments: Sequence[Tensor], gradients: Sequence[Tensor], low: Sequence[Tensor | None],
    lr_factors: Sequence[float], wd_factors: Sequence[float], active: Sequence[Tensor | None], branches: Sequence[int],
    *, lr: Tensor, weight_decay: Tensor, clip: Tensor | None, momentum: float, nesterov: bool, alive: Tensor,
) -> None:  # fmt: skip
    """One step of SGD on stacked parameters ``[E, ...]`` in place, with their copies in a lower type.

    A network whose learning rate is 0 is left as it is, momentum included. Of a parameter with ``active``, ``[E, 2]``,
    only the rows of the two active branches are updated. A value is stored only where it and its moment are finite;
    ``alive``, bool ``[E]``, becomes False for networks where one is not.
    """
    sizes = [one[0].numel() for one in p]
    given = (p, moments, gradients, low, active, sizes, branches, lr_factors, wd_factors)
    for first in range(0, len(p), _TOGETHER):
        these = slice(first, first + _TOGETHER)
        blocks = sum(cdiv(size, _BLOCK) for size in sizes[these])
        _sgd[(blocks, len(lr))](
            *[tuple(values[these]) for values in given], lr, weight_decay, clip, momentum, alive,
            NESTEROV=nesterov, BLOCK=_BLOCK, **OPTIONS,
        )  # fmt: skip
