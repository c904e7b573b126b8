"""What stands between the matrix products of stacked networks: the fusion, dropout, the loss.

One read of every value, one write. The first dimension is always the network, and what is a network's own (its key, its
active branches) is looked up by it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_dcl.kernels.arithmetic import OPTIONS, constants, fused, gradients, respond, single
from torch_dcl.kernels.launcher import Launch, is_traced, kept
from torch_dcl.kernels.sizes import cdiv, next_power_of_2

__all__ = [
    "draw_pairs_", "dropout", "entropy_backward", "entropy_forward", "fuse_backward", "fuse_forward", "gather_images",
]  # fmt: skip

_BLOCK = 1024


@triton.jit
def _response(pre, bias, at, row, n, N, BIAS: tl.constexpr, inside):
    """relu(pre + bias) in float32."""
    x = tl.load(pre + at, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        x += tl.load(bias + row * N + n, mask=inside, other=0.0).to(tl.float32)
    return respond(x)


@triton.jit
def _locate(active, T: tl.constexpr, PAIR: tl.constexpr, size, N, BLOCK: tl.constexpr):
    """Network, places within it, and the branches to fuse."""
    e = tl.program_id(1).to(tl.int64)
    i = (tl.program_id(0) + 0 * size) * BLOCK + tl.arange(0, BLOCK)  # in 64 bits where the size takes them
    if PAIR:
        first = tl.load(active + e * 2).to(tl.int64)
        second = tl.load(active + e * 2 + 1).to(tl.int64)
    else:
        first = e * 0
        second = e * 0 + 1
    return e, i, i % N, i < size, e * T + first, e * T + second


@triton.jit
def _fuse_forward(
    pre, bias, active, out, size, N, eps, floor,
    T: tl.constexpr, PAIR: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, LARGEST: tl.constexpr,
    BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    eps, floor = single(eps), single(floor)
    e, i, n, inside, first, second = _locate(active, T, PAIR, size, N, BLOCK)
    a = _response(pre, bias, first * size + i, first, n, N, BIAS, inside)
    b = _response(pre, bias, second * size + i, second, n, N, BIAS, inside)
    c = b
    COUNT: tl.constexpr = 2 if PAIR else T
    if COUNT == 3:
        c = _response(pre, bias, (e * T + 2) * size + i, e * T + 2, n, N, BIAS, inside)
    z = fused(a, b, c, eps, floor, COUNT, PAIRS, QUICK, LARGEST)
    tl.store(out + e * size + i, z.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _fuse_backward(
    grad, pre, bias, active, out, size, N, eps, floor,
    T: tl.constexpr, PAIR: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, LARGEST: tl.constexpr,
    BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    eps, floor = single(eps), single(floor)
    e, i, n, inside, first, second = _locate(active, T, PAIR, size, N, BLOCK)
    g = tl.load(grad + e * size + i, mask=inside, other=0.0).to(tl.float32)
    a = _response(pre, bias, first * size + i, first, n, N, BIAS, inside)
    b = _response(pre, bias, second * size + i, second, n, N, BIAS, inside)
    c = b
    COUNT: tl.constexpr = 2 if PAIR else T
    if COUNT == 3:
        c = _response(pre, bias, (e * T + 2) * size + i, e * T + 2, n, N, BIAS, inside)
    da, db, dc = gradients(g, a, b, c, eps, floor, COUNT, PAIRS, QUICK, LARGEST)
    kind = out.dtype.element_ty
    tl.store(out + first * size + i, da.to(kind), mask=inside)
    tl.store(out + second * size + i, db.to(kind), mask=inside)
    if COUNT == 3:
        tl.store(out + (e * T + 2) * size + i, dc.to(kind), mask=inside)
    if PAIR:
        for t in tl.static_range(T):
            row = e * T + t
            if (row != first) & (row != second):
                tl.store(out + row * size + i, tl.zeros((BLOCK,), kind), mask=inside)


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


@kept
def _launch(
    backward: bool, shape: tuple[int, ...], eps: float, dtype: torch.dtype, bias: torch.dtype | None, pair: bool,
    pairs: bool, device: torch.device,
) -> Launch:  # fmt: skip
    E, T, B, N = shape
    values = {"size": B * N, "N": N, **constants(eps, 2 if pair or pairs else T, dtype), "T": T, "PAIR": pair}
    values |= {"PAIRS": pairs, "BIAS": bias is not None, "BLOCK": _BLOCK}
    return Launch(_fuse_backward if backward else _fuse_forward, (cdiv(B * N, _BLOCK), E), values, OPTIONS)


def _unused(pre: Tensor) -> Tensor:
    """What to give for a pointer that is not used: little, where a compiler takes it for one that is written to."""
    return pre.new_empty(1) if is_traced(pre) else pre


def fuse_forward(
    pre: Tensor, bias: Tensor | None, eps: float, active: Tensor | None = None, *, pairs: bool = False,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Fuse ``[E, T, B, N]``, T = 2 or 3, with biases ``[E, T, N]``; or each network's active pair, ``[E, 2]``, of T.

    With ``pairs`` the mean over the pairs of three. ``out`` is where to, ``[E, B, N]``.
    """
    E, _, B, N = pre.shape
    if out is None:
        out = torch.empty(E, B, N, dtype=pre.dtype, device=pre.device)
    of_bias = None if bias is None else bias.dtype
    launch = _launch(False, pre.shape, eps, pre.dtype, of_bias, active is not None, pairs, pre.device)
    nothing = _unused(pre)
    launch(pre, nothing if bias is None else bias, nothing if active is None else active, out)
    return out


def fuse_backward(
    grad: Tensor, pre: Tensor, bias: Tensor | None, eps: float, active: Tensor | None = None, *, pairs: bool = False
) -> Tensor:
    """The gradient of ``pre``, zero for a branch that is dead or idle."""
    out = torch.empty_like(pre)
    of_bias = None if bias is None else bias.dtype
    launch = _launch(True, pre.shape, eps, pre.dtype, of_bias, active is not None, pairs, pre.device)
    nothing = _unused(pre)
    launch(grad, pre, nothing if bias is None else bias, nothing if active is None else active, out)
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
