"""Elementwise kernels, which read and write every value once: the fusion of responses, transposes and casts.

`transpose` copies images between torch's default layout and channels_last at the speed of a copy, where torch's own
copies take two to seven times as long on an H200. `cast` has less host overhead than torch's own.

A strided convolution of images of three channels has no fast kernel, since tensor cores need at least eight channels.
`Cells` applies space-to-depth: S × S pixels become one position with all of their channels, and the convolution has no
stride. `models/_quick.py` does the same for a plain layer, in operations that a compiler can fuse.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_dcl.kernels.arithmetic import OPTIONS, as_float32, constants, fused, gradients, relu
from torch_dcl.kernels.launch import channels_last_strides, is_channels_last
from torch_dcl.kernels.launcher import Launch, cached, cdiv, next_power_of_2

__all__ = ["Cells", "cast", "fuse_backward", "fuse_forward", "transpose"]

_BLOCK = 1024
_SIDE, _WARPS = 64, 8


@triton.jit
def _fuse_forward(
    p0, p1, p2, out, size, eps, floor,
    T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    eps, floor = as_float32(eps), as_float32(floor)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    a = relu(tl.load(p0 + i, mask=inside, other=0.0).to(tl.float32))
    b = relu(tl.load(p1 + i, mask=inside, other=0.0).to(tl.float32))
    c = b
    if T == 3:
        c = relu(tl.load(p2 + i, mask=inside, other=0.0).to(tl.float32))
    z = fused(a, b, c, eps, floor, T, PAIRS, QUICK, LARGEST)
    tl.store(out + i, z.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _fuse_backward(
    grad, p0, p1, p2, d0, d1, d2, size, eps, floor,
    T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    eps, floor = as_float32(eps), as_float32(floor)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    g = tl.load(grad + i, mask=inside, other=0.0).to(tl.float32)
    a = relu(tl.load(p0 + i, mask=inside, other=0.0).to(tl.float32))
    b = relu(tl.load(p1 + i, mask=inside, other=0.0).to(tl.float32))
    c = b
    if T == 3:
        c = relu(tl.load(p2 + i, mask=inside, other=0.0).to(tl.float32))
    da, db, dc = gradients(g, a, b, c, eps, floor, T, PAIRS, QUICK, LARGEST)
    kind = d0.dtype.element_ty
    tl.store(d0 + i, da.to(kind), mask=inside)
    tl.store(d1 + i, db.to(kind), mask=inside)
    if T == 3:
        tl.store(d2 + i, dc.to(kind), mask=inside)


@cached
def _launch(
    backward: bool, size: int, T: int, eps: float, pairs: bool, dtype: torch.dtype, device: torch.device
) -> Launch:
    values = {"size": size, **constants(eps, 2 if pairs else T, dtype), "T": T, "PAIRS": pairs, "BLOCK": _BLOCK}
    return Launch(_fuse_backward if backward else _fuse_forward, (cdiv(size, _BLOCK),), values, OPTIONS)


def _in_the_layout_of(like: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Tensors that have the strides of ``like``, and copies with these strides of the others."""
    strides = like.stride()
    return [t if t.stride() == strides else torch.empty_like(like, dtype=t.dtype).copy_(t) for t in tensors]


def fuse_forward(pre: list[Tensor], eps: float, pairs: bool) -> Tensor:
    """z of two or three pre-activations of one shape; with ``pairs`` the mean over the pairs of three.

    z has the layout of the first, for example channels_last, if that one is dense.
    """
    T, out = len(pre), torch.empty_like(pre[0])
    size = out.numel()
    if size:
        pre = _in_the_layout_of(out, pre)
        _launch(False, size, T, eps, pairs, out.dtype, out.device)(pre[0], pre[1], pre[-1], out)
    return out


def fuse_backward(grad: Tensor, pre: list[Tensor], eps: float, pairs: bool) -> list[Tensor]:
    """The gradients of the pre-activations, all in the layout of the first."""
    T, out = len(pre), [torch.empty_like(pre[0]) for _ in pre]
    size = grad.numel()
    if size:
        grad, *pre = _in_the_layout_of(out[0], [grad, *pre])
        _launch(True, size, T, eps, pairs, grad.dtype, grad.device)(
            grad, pre[0], pre[1], pre[-1], out[0], out[1], out[-1]
        )
    return out


@triton.jit
def _transpose(x, out, rows, columns, down, across, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Transpose one tile of the matrix ``[rows, columns]`` of an image."""
    tile = tl.program_id(0)
    image = (tile // (down * across)).to(tl.int64) * rows * columns
    i = (tile // across % down).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
    j = (tile % across).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    values = tl.load(x + image + i[:, None] * columns + j[None, :], mask=inside, other=0.0)
    to = out + image + j[:, None] * rows + i[None, :]
    tl.store(to, tl.trans(values.to(out.dtype.element_ty)), mask=tl.trans(inside))


def transpose(x: Tensor, channels: int, last: bool, dtype: torch.dtype) -> Tensor:
    """A copy of ``[..., C, ...]`` in channels_last (``last``) or in torch's default layout."""
    if last:
        out = torch.empty_strided(x.shape, channels_last_strides(x.shape, channels), dtype=dtype, device=x.device)
    else:
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if not (x.is_contiguous() if last else is_channels_last(x, channels)):
        return out.copy_(x)  # another layout, such as an expanded gradient
    if out.numel():
        C, positions = x.shape[channels], math.prod(x.shape[channels + 1 :])
        rows, columns = (C, positions) if last else (positions, C)
        _launch_transpose(x.numel() // (rows * columns), rows, columns, x.dtype, dtype, x.device)(x, out)
    return out


@cached
def _launch_transpose(
    images: int, rows: int, columns: int, dtype: torch.dtype, to: torch.dtype, device: torch.device
) -> Launch:
    # A short side, for example three channels, allows a longer other side.
    height = min(_SIDE, next_power_of_2(rows))
    width = min(_SIDE * _SIDE // height, next_power_of_2(columns))
    height = min(_SIDE * _SIDE // width, next_power_of_2(rows))
    down, across = cdiv(rows, height), cdiv(columns, width)
    values = {"rows": rows, "columns": columns, "down": down, "across": across, "HEIGHT": height, "WIDTH": width}
    return Launch(_transpose, (images * down * across,), values, {"num_warps": _WARPS, **OPTIONS})


@triton.jit
def _cast(x, out, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < size, other=0.0).to(out.dtype.element_ty), mask=i < size)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in another dtype, in the same layout."""
    out = torch.empty_like(x, dtype=dtype)
    if out.stride() != x.stride():
        return out.copy_(x)  # x is not dense
    if out.numel():
        _launch_cast(out.numel(), x.dtype, dtype, x.device)(x, out)
    return out


@cached
def _launch_cast(size: int, dtype: torch.dtype, to: torch.dtype, device: torch.device) -> Launch:
    return Launch(_cast, (cdiv(size, _BLOCK),), {"size": size, "BLOCK": _BLOCK}, {"num_warps": 4, **OPTIONS})


@triton.jit
def _image_cells(
    x, out, height, width, of_image, of_channel, of_row, of_pixel,
    C: tl.constexpr, S: tl.constexpr, BEFORE: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a part of a row of cells; zero outside of the image."""
    line = tl.program_id(0)
    image, down = (line // DOWN).to(tl.int64), line % DOWN
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    across, channel = i // CHANNELS, i % CHANNELS
    row = (down - BEFORE) * S + channel // (S * C)
    pixel = (across - BEFORE) * S + channel // C % S
    inside = (channel < S * S * C) & (row >= 0) & (row < height) & (pixel >= 0) & (pixel < width) & (across < ACROSS)
    at = image * of_image + row * of_row + pixel * of_pixel + channel % C * of_channel
    to = out + line.to(tl.int64) * (ACROSS * CHANNELS) + i
    tl.store(to, tl.load(x + at, mask=inside, other=0.0), mask=i < ACROSS * CHANNELS)


@triton.jit
def _filter_cells(
    cells, theta, size, of_filter, of_channel, of_row, of_pixel, cell_filter, cell_channel, cell_row, cell_pixel,
    C: tl.constexpr, S: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, PADDING: tl.constexpr,
    BEFORE: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, CHANNELS: tl.constexpr, BACK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write filters as filters of cells, padded with zeros; or, with BACK, filters from filters of cells."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = i % CHANNELS
    across, down, f = i // CHANNELS % ACROSS, i // (CHANNELS * ACROSS) % DOWN, i // (CHANNELS * ACROSS * DOWN)
    row = (down - BEFORE) * S + channel // (S * C) + PADDING
    pixel = (across - BEFORE) * S + channel // C % S + PADDING
    there = (channel < S * S * C) & (row >= 0) & (row < HEIGHT) & (pixel >= 0) & (pixel < WIDTH) & (i < size)
    at = theta + f * of_filter + channel % C * of_channel + row * of_row + pixel * of_pixel
    cell = cells + f * cell_filter + channel * cell_channel + down * cell_row + across * cell_pixel
    if BACK:
        tl.store(at, tl.load(cell, mask=there, other=0.0).to(theta.dtype.element_ty), mask=there)
    else:
        tl.store(cell, tl.load(at, mask=there, other=0.0).to(cells.dtype.element_ty), mask=i < size)


class Cells(NamedTuple):
    """Space-to-depth for a convolution with stride S of few channels: one without stride, of cells of S × S pixels.

    With i - padding = S · a + r and 0 ≤ r < S, filter row i becomes pixel r of cell row a.
    """

    side: int
    """S."""
    padding: int
    before: int
    """Padding in rows of cells."""
    kernel: tuple[int, int]
    """The kernel size in cells."""
    channels: int
    """The channels of a cell, padded with zeros to a multiple of eight."""
    outputs: tuple[int, int]

    @classmethod
    def of(
        cls, x: Tensor, theta: Tensor, stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...]
    ) -> "Cells | None":
        """The cells of a 2-d convolution; None if they do not pay off, or torch raises an error for the arguments."""
        S, p = stride[0], padding[0]
        if x.shape[1] != theta.shape[1]:
            return None
        if x.shape[1] > _FEW or not 1 < S <= _FEW or set(stride) != {S} or set(padding) != {p} or set(dilation) != {1}:
            return None
        before = cdiv(p, S)
        height, width = (before + (k - 1 - p) // S + 1 for k in theta.shape[2:])
        down, across = ((size + 2 * p - k) // S + 1 for size, k in zip(x.shape[2:], theta.shape[2:], strict=True))
        if min(down, across, x.shape[0]) < 1 or theta.numel() * 2 >= 2**31:
            return None
        return cls(S, p, before, (height, width), 8 * cdiv(S * S * x.shape[1], 8), (down, across))

    def images(self, x: Tensor) -> Tensor:
        """Images ``[B, C, H, W]`` as padded cells in channels_last."""
        down, across = (o + k - 1 for o, k in zip(self.outputs, self.kernel, strict=True))
        shape = (len(x), self.channels, down, across)
        out = torch.empty_strided(shape, channels_last_strides(shape, 1), dtype=x.dtype, device=x.device)
        _launch_images(self, tuple(x.shape), x.stride(), down, across, x.dtype, x.device)(x, out)
        return out

    def empty_filters(self, theta: Tensor, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor for filters of cells."""
        shape = (len(theta), self.channels, *self.kernel)
        return torch.empty_strided(shape, channels_last_strides(shape, 1), dtype=dtype, device=theta.device)

    def filters(self, theta: Tensor, dtype: torch.dtype) -> Tensor:
        """The filters as filters of cells, in this dtype."""
        out = self.empty_filters(theta, dtype)
        self._launch(theta, out, back=False)(out, theta)
        return out

    def pixels(self, cells: Tensor, theta: Tensor, dtype: torch.dtype) -> Tensor:
        """The inverse of `filters`, in the layout of ``theta``."""
        out = torch.empty_like(theta, dtype=dtype)
        self._launch(out, cells, back=True)(cells, out)
        return out

    def _launch(self, theta: Tensor, cells: Tensor, *, back: bool) -> Launch:
        return _launch_filters(
            self, tuple(theta.shape), theta.stride(), cells.stride(), back, theta.dtype, cells.dtype, theta.device
        )


_FEW = 4
"""The largest number of channels, and the largest stride, for which cells pay off."""


@cached
def _launch_images(
    cells: Cells, shape: tuple[int, ...], stride: tuple[int, ...], down: int, across: int, dtype: torch.dtype,
    device: torch.device,
) -> Launch:  # fmt: skip
    values = {"height": shape[2], "width": shape[3]}
    values |= dict(zip(("of_image", "of_channel", "of_row", "of_pixel"), stride, strict=True))
    values |= {"C": shape[1], "S": cells.side, "BEFORE": cells.before, "DOWN": down, "ACROSS": across}
    values |= {"CHANNELS": cells.channels, "BLOCK": _BLOCK}
    grid = (shape[0] * down, cdiv(across * cells.channels, _BLOCK))
    return Launch(_image_cells, grid, values, {"num_warps": 4, **OPTIONS})


@cached
def _launch_filters(
    cells: Cells, shape: tuple[int, ...], stride: tuple[int, ...], of_cells: tuple[int, ...], back: bool,
    dtype: torch.dtype, to: torch.dtype, device: torch.device,
) -> Launch:  # fmt: skip
    down, across = cells.kernel
    size = shape[0] * down * across * cells.channels
    names = ("of_filter", "of_channel", "of_row", "of_pixel")
    values = {"size": size, **dict(zip(names, stride, strict=True))}
    names = ("cell_filter", "cell_channel", "cell_row", "cell_pixel")
    values |= {**dict(zip(names, of_cells, strict=True)), "C": shape[1], "S": cells.side}
    values |= {"HEIGHT": shape[2], "WIDTH": shape[3], "PADDING": cells.padding, "BEFORE": cells.before}
    values |= {"DOWN": down, "ACROSS": across, "CHANNELS": cells.channels, "BACK": back, "BLOCK": 256}
    return Launch(_filter_cells, (cdiv(size, 256),), values, {"num_warps": 4, **OPTIONS})
