"""Images from one layout to the other at the speed of a copy: each channel by itself in memory, or all of a position's.

Torch's own copies between the two take two to seven times as long on an H200.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_dcl.kernels.arithmetic import OPTIONS
from torch_dcl.kernels.launch import is_last, room_for
from torch_dcl.kernels.launcher import Launch, cdiv, kept, next_power_of_2

__all__ = ["turn"]

_SIDE, _WARPS = 64, 8


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
        _launch(x.numel() // (rows * columns), rows, columns, x.dtype, dtype, x.device)(x, out)
    return out


@kept
def _launch(images: int, rows: int, columns: int, dtype: torch.dtype, to: torch.dtype, device: torch.device) -> Launch:
    # A side that is short, three channels for example, leaves room for more of the other.
    height = min(_SIDE, next_power_of_2(rows))
    width = min(_SIDE * _SIDE // height, next_power_of_2(columns))
    height = min(_SIDE * _SIDE // width, next_power_of_2(rows))
    down, across = cdiv(rows, height), cdiv(columns, width)
    values = {"rows": rows, "columns": columns, "down": down, "across": across, "HEIGHT": height, "WIDTH": width}
    return Launch(_turn, (images * down * across,), values, {"num_warps": _WARPS, **OPTIONS})
