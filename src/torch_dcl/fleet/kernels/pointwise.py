"""Stacked networks between their matrix products: gather images, drop values, draw branches, the loss.

Every kernel reads each value once and writes it once. The first dimension is always the network, and what differs
between networks, such as the seed, is looked up by it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_dcl.kernels.arithmetic import OPTIONS
from torch_dcl.kernels.launcher import cdiv, next_power_of_2

__all__ = ["draw_pairs_", "dropout", "entropy_backward", "entropy_forward", "gather_images"]

_BLOCK = 1024


@triton.jit
def _mix(x):
    """The hash of functional.mix32, in 32 bits."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x6C62272F
    x = (x ^ (x >> 13)) * 0x45D9F3B5
    return x ^ (x >> 16)


@triton.jit
def _step_key(seed, step, layer, e):
    """The hash of (seed, layer, step) of a network; see functional.step_key."""
    own = tl.load(seed + e)
    x = _mix((own ^ (own >> 32)).to(tl.uint32))
    return _mix(_mix(x ^ layer.to(tl.uint32)) ^ tl.load(step).to(tl.uint32))


@triton.jit(do_not_specialize=["layer", "T"])
def _draw_pairs(seed, step, active, layer, T):
    e = tl.program_id(0)
    drawn = _step_key(seed, step, layer, e)
    again = _mix(drawn ^ 0x5BD1E995)
    first = drawn.to(tl.int64) % T
    second = (first + 1 + again.to(tl.int64) % (T - 1)) % T
    tl.store(active + e * 2, tl.minimum(first, second))
    tl.store(active + e * 2 + 1, tl.maximum(first, second))


@triton.jit(do_not_specialize=["layer"])
def _dropout(x, seed, step, out, layer, size, threshold, scale, BLOCK: tl.constexpr):
    e = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    drawn = _mix(_mix(i.to(tl.uint32)) ^ _mix(_step_key(seed, step, layer, e) ^ 0x68E31DA4))
    value = tl.load(x + e * size + i, mask=inside, other=0.0)
    # Half of the bits, so that the comparison is one of positive numbers wherever it is computed.
    keep = (drawn >> 1).to(tl.int32) >= threshold
    tl.store(out + e * size + i, tl.where(keep, value * scale, 0.0).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gather(images, image_of, index, out, count, batch, size, scale, BLOCK: tl.constexpr):
    e = tl.program_id(1).to(tl.int64)
    b = tl.program_id(0)
    row = tl.load(image_of + e) * count + tl.load(index + e * batch + b)
    i = tl.arange(0, BLOCK)
    for start in range(0, size, BLOCK):
        inside = start + i < size
        value = tl.load(images + row * size + start + i, mask=inside).to(tl.float32) * scale
        tl.store(out + (e * batch + b) * size + start + i, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _entropy_forward(logits, labels, losses, lse, classes, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    x = tl.load(logits + row * classes + n, mask=n < classes, other=-float("inf")).to(tl.float32)
    top = tl.max(x, 0)
    total = tl.log(tl.sum(tl.exp(x - top), 0)) + top
    own = tl.load(logits + row * classes + tl.load(labels + row)).to(tl.float32)
    tl.store(losses + row, total - own)
    tl.store(lse + row, total)


@triton.jit
def _entropy_backward(grad, logits, labels, lse, out, classes, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    x = tl.load(logits + row * classes + n, mask=n < classes, other=-float("inf")).to(tl.float32)
    chance = tl.exp(x - tl.load(lse + row))
    d = tl.where(n == tl.load(labels + row), chance - 1, chance) * tl.load(grad + row)
    tl.store(out + row * classes + n, d.to(out.dtype.element_ty), mask=n < classes)


def gather_images(images: Tensor, image_of: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Images ``[D, N, ...]`` uint8 of datasets ``[E]`` at places ``[E, B]``, as ``[E, B, ...]`` from 0 to 1."""
    E, B = index.shape
    size = images[0, 0].numel()
    out = torch.empty(E, B, *images.shape[2:], dtype=dtype, device=images.device)
    block = min(4096, next_power_of_2(size))
    _gather[(B, E)](images, image_of, index, out, images.shape[1], B, size, 1 / 255, BLOCK=block, **OPTIONS)
    return out


def entropy_forward(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of every row ``[rows, classes]``, and the logarithm of its sum of exponentials, in float32."""
    rows, classes = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(losses)
    block = next_power_of_2(classes)
    _entropy_forward[(rows,)](logits, labels, losses, lse, classes, BLOCK=block, num_warps=4, **OPTIONS)
    return losses, lse


def entropy_backward(grad: Tensor, logits: Tensor, labels: Tensor, lse: Tensor) -> Tensor:
    """The gradient of the logits for a gradient ``[rows]`` of the losses."""
    out = torch.empty_like(logits)
    rows, classes = logits.shape
    block = next_power_of_2(classes)
    _entropy_backward[(rows,)](grad, logits, labels, lse, out, classes, BLOCK=block, num_warps=4, **OPTIONS)
    return out


def draw_pairs_(active: Tensor, seed: Tensor, layer: int, step: Tensor, branches: int) -> None:
    """Draw the two active branches of each network, as functional.draw_pair does, into ``[E, 2]``."""
    _draw_pairs[(len(active),)](seed, step, active, layer, branches, **OPTIONS)


def dropout(x: Tensor, seed: Tensor, layer: int, step: Tensor, p: float) -> Tensor:
    """Drop values of ``[E, ...]`` with probability p by each network's (seed, layer, step), and scale the others.

    Its own backward: the same call with the gradient.
    """
    out = torch.empty_like(x)
    size = x[0].numel()
    _dropout[(cdiv(size, _BLOCK), len(x))](
        x, seed, step, out, layer, size, int(p * 2**31), 1 / (1 - p), BLOCK=_BLOCK, **OPTIONS
    )
    return out
