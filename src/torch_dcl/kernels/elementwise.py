"""Kernels that read every value once and write every result once: responses to z, and images in another layout.

The fusion of responses has a backward of its own. Images go from one layout to the other, each channel by itself in
memory or all of a position's, at the speed of a copy: torch's own copies take two to seven times as long on an H200.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_dcl.kernels.arithmetic import OPTIONS, constants, fused, gradients, respond, single
from torch_dcl.kernels.launch import is_last, room_for
from torch_dcl.kernels.launcher import Launch, cdiv, kept, next_power_of_2

__all__ = ["fuse_backward", "fuse_forward", "turn"]

_BLOCK = 1024
_SIDE, _WARPS = 64, 8


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


@triton.jit
def _turn(x, out, rows, columns, down, across, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """One tile of a matrix ``[rows, columns]``, of which there is one for each image, to its transpose."""
    tile = tl.program_id(0)
    image = (tile // (down * across)).to(tl.int64) * rows * columns
    i = (tile // across % down).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    j = (tile % across).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    values = tl.load(x + image + i[:, None] * columns + j[None, :], mask=inside, other=0.0)
    to = out + image + j[:, None] * rows + i[None, :]
    tl.store(to, tl.trans(values.to(out.dtype.element_ty)), mask=tl.trans(inside))


def turn(x: Tensor, channels: int, last: bool, dtype: torch.dtype) -> Tensor:
    """A copy of ``[..., C, ...]`` in another layout: the channels last in memory, or as torch has them by default."""
    if last:
        out = torch.empty_strided(x.shape, room_for(x.shape, channels), dtype=dtype, device=x.device)
    else:
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if not (x.is_contiguous() if last else is_last(x, channels)):
        return out.copy_(x)  # neither the one nor the other, as an expanded gradient is
    if out.numel():
        C, positions = x.shape[channels], math.prod(x.shape[channels + 1 :])
        rows, columns = (C, positions) if last else (positions, C)
        _launch_turn(x.numel() // (rows * columns), rows, columns, x.dtype, dtype, x.device)(x, out)
    return out


@kept
def _launch_turn(
    images: int, rows: int, columns: int, dtype: torch.dtype, to: torch.dtype, device: torch.device
) -> Launch:
    # A side that is short, three channels for example, leaves room for more of the other.
    height = min(_SIDE, next_power_of_2(rows))
    width = min(_SIDE * _SIDE // height, next_power_of_2(columns))
    height = min(_SIDE * _SIDE // width, next_power_of_2(rows))
    down, across = cdiv(rows, height), cdiv(columns, width)
    values = {"rows": rows, "columns": columns, "down": down, "across": across, "HEIGHT": height, "WIDTH": width}
    return Launch(_turn, (images * down * across,), values, {"num_warps": _WARPS, **OPTIONS})
