"""The fusion of stacked responses ``[E, T, B, N]``: every value is read once and written once.

The first dimension is the network, which also indexes the active branches.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_dcl.kernels.arithmetic import OPTIONS, as_float32, constants, fused, gradients, relu
from torch_dcl.kernels.launcher import Launch, cached, cdiv, is_traced

__all__ = ["fuse_backward", "fuse_forward"]

_BLOCK = 1024


@triton.jit
def _response(pre, bias, at, row, n, N, BIAS: tl.constexpr, inside):
    """relu(pre + bias) in float32."""
    x = tl.load(pre + at, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        x += tl.load(bias + row * N + n, mask=inside, other=0.0).to(tl.float32)
    return relu(x)


@triton.jit
def _locate(active, T: tl.constexpr, PAIR: tl.constexpr, size, N, BLOCK: tl.constexpr):
    """The network, the indices within it, and the branches to fuse."""
    e = tl.program_id(1).to(tl.int64)
    i = (tl.program_id(0) + 0 * size) * BLOCK + tl.arange(0, BLOCK)  # 64 bits if the size needs them
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
    eps, floor = as_float32(eps), as_float32(floor)
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
    eps, floor = as_float32(eps), as_float32(floor)
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


@cached
def _launch(
    backward: bool, shape: tuple[int, ...], eps: float, dtype: torch.dtype, bias: torch.dtype | None, pair: bool,
    pairs: bool, device: torch.device,
) -> Launch:  # fmt: skip
    E, T, B, N = shape
    values = {"size": B * N, "N": N, **constants(eps, 2 if pair or pairs else T, dtype), "T": T, "PAIR": pair}
    values |= {"PAIRS": pairs, "BIAS": bias is not None, "BLOCK": _BLOCK}
    return Launch(_fuse_backward if backward else _fuse_forward, (cdiv(B * N, _BLOCK), E), values, OPTIONS)


def _placeholder(pre: Tensor) -> Tensor:
    """A tensor for an unused pointer: a small one for a compiler, which would assume that it is written to."""
    return pre.new_empty(1) if is_traced(pre) else pre


def fuse_forward(
    pre: Tensor, bias: Tensor | None, eps: float, active: Tensor | None = None, *, pairs: bool = False,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Fuse ``[E, T, B, N]``, T = 2 or 3, with biases ``[E, T, N]``; or the active pair ``[E, 2]`` of each network.

    With ``pairs``, average over the pairs of three. The result is written to ``out`` ``[E, B, N]`` if it is given.
    """
    E, _, B, N = pre.shape
    if out is None:
        out = torch.empty(E, B, N, dtype=pre.dtype, device=pre.device)
    bias_dtype = None if bias is None else bias.dtype
    launch = _launch(False, pre.shape, eps, pre.dtype, bias_dtype, active is not None, pairs, pre.device)
    unused = _placeholder(pre)
    launch(pre, unused if bias is None else bias, unused if active is None else active, out)
    return out


def fuse_backward(
    grad: Tensor, pre: Tensor, bias: Tensor | None, eps: float, active: Tensor | None = None, *, pairs: bool = False
) -> Tensor:
    """The gradient of ``pre``; zero for dead and for inactive branches."""
    out = torch.empty_like(pre)
    bias_dtype = None if bias is None else bias.dtype
    launch = _launch(True, pre.shape, eps, pre.dtype, bias_dtype, active is not None, pairs, pre.device)
    unused = _placeholder(pre)
    launch(grad, pre, unused if bias is None else bias, unused if active is None else active, out)
    return out
