"""Concept fusion on the GPU: responses to z as one kernel, with a backward of its own.

Each kernel reads every value once and writes every result once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_dcl.kernels.arithmetic import OPTIONS, constants, fused, gradients, respond, single
from torch_dcl.kernels.launcher import Launch, cdiv, kept

__all__ = ["fuse_backward", "fuse_forward"]

_BLOCK = 1024


@triton.jit
def _fuse_forward(
    p0, p1, p2, out, size, eps, floor,
    T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    eps, floor = single(eps), single(floor)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    a = respond(tl.load(p0 + i, mask=inside, other=0.0).to(tl.float32))
    b = respond(tl.load(p1 + i, mask=inside, other=0.0).to(tl.float32))
    c = b
    if T == 3:
        c = respond(tl.load(p2 + i, mask=inside, other=0.0).to(tl.float32))
    z = fused(a, b, c, eps, floor, T, PAIRS, QUICK, LARGEST)
    tl.store(out + i, z.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _fuse_backward(
    grad, p0, p1, p2, d0, d1, d2, size, eps, floor,
    T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    eps, floor = single(eps), single(floor)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    g = tl.load(grad + i, mask=inside, other=0.0).to(tl.float32)
    a = respond(tl.load(p0 + i, mask=inside, other=0.0).to(tl.float32))
    b = respond(tl.load(p1 + i, mask=inside, other=0.0).to(tl.float32))
    c = b
    if T == 3:
        c = respond(tl.load(p2 + i, mask=inside, other=0.0).to(tl.float32))
    da, db, dc = gradients(g, a, b, c, eps, floor, T, PAIRS, QUICK, LARGEST)
    kind = d0.dtype.element_ty
    tl.store(d0 + i, da.to(kind), mask=inside)
    tl.store(d1 + i, db.to(kind), mask=inside)
    if T == 3:
        tl.store(d2 + i, dc.to(kind), mask=inside)


@kept
def _launch(
    backward: bool, size: int, T: int, eps: float, pairs: bool, dtype: torch.dtype, device: torch.device
) -> Launch:
    values = {"size": size, **constants(eps, 2 if pairs else T, dtype), "T": T, "PAIRS": pairs, "BLOCK": _BLOCK}
    return Launch(_fuse_backward if backward else _fuse_forward, (cdiv(size, _BLOCK),), values, OPTIONS)


def _in_the_layout_of(like: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """The tensors as they lie in memory where they lie as ``like`` does; copies of the others."""
    strides = like.stride()
    return [t if t.stride() == strides else torch.empty_like(like, dtype=t.dtype).copy_(t) for t in tensors]


def fuse_forward(pre: list[Tensor], eps: float, pairs: bool) -> Tensor:
    """z of two or three responses of one shape; with ``pairs`` the mean over the pairs of three.

    The layout is that of the first, channels_last for example, if it has no gaps.
    """
    T, out = len(pre), torch.empty_like(pre[0])
    size = out.numel()
    if size:
        pre = _in_the_layout_of(out, pre)
        _launch(False, size, T, eps, pairs, out.dtype, out.device)(pre[0], pre[1], pre[-1], out)
    return out


def fuse_backward(grad: Tensor, pre: list[Tensor], eps: float, pairs: bool) -> list[Tensor]:
    """The gradients of the responses, each in the layout of the first."""
    T, out = len(pre), [torch.empty_like(pre[0]) for _ in pre]
    size = grad.numel()
    if size:
        grad, *pre = _in_the_layout_of(out[0], [grad, *pre])
        _launch(True, size, T, eps, pairs, grad.dtype, grad.device)(
            grad, pre[0], pre[1], pre[-1], out[0], out[1], out[-1]
        )
    return out
