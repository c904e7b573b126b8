"""Inputs of stacked networks in one kernel: gather images and labels, crop, flip and normalise.

The plain torch version is `torch_dcl.fleet.augmentation.Augmenter`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_dcl.kernels.arithmetic import OPTIONS
from torch_dcl.kernels.launcher import cdiv

__all__ = ["gather_inputs"]

_BLOCK = 1024


@triton.jit
def _reflect(at, LENGTH: tl.constexpr):
    """Indices along a side, reflected at its ends."""
    return (LENGTH - 1) - tl.abs((LENGTH - 1) - tl.abs(at))


@triton.jit
def _gather_inputs(
    images, image_of, labels, label_of, index, first, flipped, scale, shift, mean, out, out_labels, count, batch,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DRAWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(1).to(tl.int64)
    to = e * batch + tl.program_id(0)
    place = tl.load(index + to)
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = i < C * ROWS * COLUMNS
    c = i // (ROWS * COLUMNS)
    row = i // COLUMNS % ROWS
    column = i % COLUMNS
    if DRAWN:
        own = e * count + place
        top = tl.load(first + own).to(tl.int32)
        left = tl.load(first + tl.num_programs(1).to(tl.int64) * count + own).to(tl.int32)
        column = tl.where(tl.load(flipped + own), COLUMNS - 1 - column, column)
    else:
        top = (H - ROWS) // 2
        left = (W - COLUMNS) // 2
    start = (tl.load(image_of + e) * count + place) * (C * H * W)
    at = (c * H + _reflect(top + row, H)) * W + _reflect(left + column, W)
    x = tl.load(images + start + at, mask=inside, other=0).to(tl.float32)
    if mean is not None:
        y = x - tl.load(mean + at, mask=inside, other=0.0)
    else:  # rounded once, as torch.addcmul does
        y = tl.fma(x, tl.load(scale + c, mask=inside, other=0.0), tl.load(shift + c, mask=inside, other=0.0))
    tl.store(out + to * (C * ROWS * COLUMNS) + i, y.to(out.dtype.element_ty), mask=inside)
    if tl.program_id(2) == 0:
        tl.store(out_labels + to, tl.load(labels + tl.load(label_of + e) * count + place))


def gather_inputs(
    images: Tensor, image_of: Tensor, labels: Tensor, label_of: Tensor, index: Tensor, first: Tensor | None,
    flipped: Tensor | None, scale: Tensor, shift: Tensor, mean: Tensor | None, size: Sequence[int], dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Inputs ``[E, B, C, h, w]`` and labels ``[E, B]`` of the images at ``index``.

    Args:
        images: Images of all datasets, uint8 ``[D, N, C, H, W]``.
        image_of: The dataset of each network's images, ``[E]``.
        labels: Labels of all datasets, ``[L, N]``.
        label_of: The dataset of each network's labels, ``[E]``.
        index: Indices of the images, ``[E, B]``.
        first: First row and first column of the crop of every image, int16 ``[2, E, N]``, negative within the padding;
            None for crops from the centre.
        flipped: Whether an image is flipped horizontally, bool ``[E, N]``; None where ``first`` is None.
        scale: Factor on pixels, float32 ``[C]``.
        shift: What is added to the scaled pixels, float32 ``[C]``.
        mean: A mean image to subtract instead, float32 ``[C, H, W]``, or None.
        size: Height and width of the inputs, ``[h, w]``.
        dtype: Type of the inputs; they are computed in float32.
    """
    E, B = index.shape
    N, C, H, W = images.shape[1:]
    out = torch.empty(E, B, C, *size, dtype=dtype, device=images.device)
    out_labels = torch.empty(E, B, dtype=labels.dtype, device=images.device)
    _gather_inputs[(B, E, cdiv(C * size[0] * size[1], _BLOCK))](
        images, image_of, labels, label_of, index, first, flipped, scale, shift, mean, out, out_labels, N, B,
        C=C, H=H, W=W, ROWS=size[0], COLUMNS=size[1], DRAWN=first is not None, BLOCK=_BLOCK, **OPTIONS,
    )  # fmt: skip
    return out, out_labels
