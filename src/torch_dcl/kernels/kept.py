"""The projection with its responses kept for backward: for large products of few positions, as in a linear layer.

The products are cuBLAS's where there are enough positions to fill the GPU. For fewer one kernel forms the products of
all branches side by side and fuses them at once, so that the work is divided further and nothing is launched twice.
Backward is one kernel too where the layer is small: it forms the responses' gradients wherever it wants them, which
takes less time than to launch a kernel for each of its products, as long as there are few.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_dcl.kernels import pointwise
from torch_dcl.kernels.arithmetic import constants, fused, gradients, respond
from torch_dcl.kernels.products import products
from torch_dcl.kernels.project import by_branch, by_weights
from torch_dcl.kernels.sizes import cdiv

__all__ = ["kept_backward", "kept_forward"]


@triton.jit
def _products(
    acc, y, w, p, n, k, P, t: tl.constexpr, N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr
):
    """Branch t's products of a few filters, added to the others'."""
    rows = tl.load(y + p[:, None] * (T * M) + t * M + k[None, :], mask=(p < P)[:, None] & (k < M)[None, :], other=0.0)
    weights = tl.load(w + (t * M + k)[:, None] * N + n[None, :], mask=(k < M)[:, None] & (n < N)[None, :], other=0.0)
    return tl.dot(rows, weights, acc, input_precision=PRECISION)


@triton.jit
def _respond(acc, bias, pre, n, mask, t: tl.constexpr, N: tl.constexpr, BIAS: tl.constexpr):
    """Write the response before its ReLU, and give it as it was written."""
    if BIAS:
        acc += tl.load(bias + t * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    rounded = acc.to(pre.dtype.element_ty)
    tl.store(pre, rounded, mask=mask)
    return respond(rounded.to(tl.float32))


@triton.jit
def _kept_forward(
    y, w, bias, pre, out, P, eps, floor,
    N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, BIAS: tl.constexpr,
    LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0) * BM + tl.arange(0, BM).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc0 = tl.zeros((BM, BN), tl.float32)
    acc1 = tl.zeros((BM, BN), tl.float32)
    acc2 = tl.zeros((BM, BN), tl.float32)
    for first in range(0, M, BK):
        k = first + tl.arange(0, BK)
        acc0 = _products(acc0, y, w, p, n, k, P, 0, N, M, T, PRECISION)
        acc1 = _products(acc1, y, w, p, n, k, P, 1, N, M, T, PRECISION)
        if T == 3:
            acc2 = _products(acc2, y, w, p, n, k, P, 2, N, M, T, PRECISION)
    mask = (p < P)[:, None] & (n < N)[None, :]
    at = p[:, None] * N + n[None, :]
    size = (tl.zeros((), tl.int64) + P) * N
    a = _respond(acc0, bias, pre + at, n, mask, 0, N, BIAS)
    b = _respond(acc1, bias, pre + size + at, n, mask, 1, N, BIAS)
    c = b
    if T == 3:
        c = _respond(acc2, bias, pre + 2 * size + at, n, mask, 2, N, BIAS)
    tl.store(out + at, fused(a, b, c, eps, floor, T, PAIRS, QUICK, LARGEST).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _response_gradient(grad, pre, p, n, t, P, eps, floor, N: tl.constexpr, QUICK: tl.constexpr, LARGEST: tl.constexpr):
    """The rounded gradient of responses of branch t, of two, before their ReLU; zero beyond the last ones."""
    mask = (p < P)[:, None] & (n < N)[None, :]
    at = p[:, None] * N + n[None, :]
    size = P * N
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    a = respond(tl.load(pre + at, mask=mask, other=0.0).to(tl.float32))
    b = respond(tl.load(pre + size + at, mask=mask, other=0.0).to(tl.float32))
    da, db, _ = gradients(g, a, b, b, eps, floor, 2, False, QUICK, LARGEST)
    return tl.where(t == 0, da, db).to(grad.dtype.element_ty)


@triton.jit
def _output_gradient(
    grad, w, pre, dy, p, k, t, P, eps, floor,
    N: tl.constexpr, M: tl.constexpr, QUICK: tl.constexpr, LARGEST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a few filters' outputs at a few positions."""
    total = tl.zeros((BM, BK), tl.float32)
    for first in range(0, N, BN):
        n = first + tl.arange(0, BN)
        inside = (k < M)[None, :] & (n < N)[:, None]
        weights = tl.load(w + (t * M + k)[None, :] * N + n[:, None], mask=inside, other=0.0)
        dpre = _response_gradient(grad, pre, p, n, t, P, eps, floor, N, QUICK, LARGEST)
        total = tl.dot(dpre, weights, total, input_precision=PRECISION)
    to = dy + p[:, None] * (2 * M) + t * M + k[None, :]
    tl.store(to, total.to(dy.dtype.element_ty), mask=(p < P)[:, None] & (k < M)[None, :])


@triton.jit
def _weight_gradient(
    grad, y, pre, dw, n, k, t, P, eps, floor,
    N: tl.constexpr, M: tl.constexpr, QUICK: tl.constexpr, LARGEST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a few filters' weights for a few outputs; give that of the outputs' biases."""
    total = tl.zeros((BK, BN), tl.float32)
    biases = tl.zeros((BN,), tl.float32)
    for first in range(0, P, BM):
        p = first + tl.arange(0, BM)
        inside = (k < M)[:, None] & (p < P)[None, :]
        rows = tl.load(y + p[None, :] * (2 * M) + t * M + k[:, None], mask=inside, other=0.0)
        dpre = _response_gradient(grad, pre, p, n, t, P, eps, floor, N, QUICK, LARGEST)
        total = tl.dot(rows, dpre, total, input_precision=PRECISION)
        biases += tl.sum(dpre.to(tl.float32), 0)
    to = dw + (t * M + k)[:, None] * N + n[None, :]
    tl.store(to, total.to(dw.dtype.element_ty), mask=(k < M)[:, None] & (n < N)[None, :])
    return biases


@triton.jit
def _kept_backward(
    grad, y, w, pre, dy, dw, dbias, P, of_y, eps, floor,
    N: tl.constexpr, M: tl.constexpr, QUICK: tl.constexpr, BIAS: tl.constexpr,
    LARGEST: tl.constexpr, YM: tl.constexpr, YN: tl.constexpr, WM: tl.constexpr, WN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A few filters of one of two branches: their outputs at a few positions, or (from program ``of_y``) weights.

    What a product takes from memory is asked for before the gradients are formed, so that it comes meanwhile. Addresses
    have 32 bits: `kept_backward` takes small layers alone here.
    """
    FILTERS: tl.constexpr = (M + BK - 1) // BK
    part = tl.program_id(0)
    outputs = part < of_y
    part = tl.where(outputs, part, part - of_y)
    t, filters, tile = part % 2, part // 2 % FILTERS, part // 2 // FILTERS
    k = filters * BK + tl.arange(0, BK)
    if outputs:
        p = tile * YM + tl.arange(0, YM)
        _output_gradient(grad, w, pre, dy, p, k, t, P, eps, floor, N, M, QUICK, LARGEST, YM, YN, BK, PRECISION)
    else:
        n = tile * WN + tl.arange(0, WN)
        biases = _weight_gradient(grad, y, pre, dw, n, k, t, P, eps, floor, N, M, QUICK, LARGEST, WM, WN, BK, PRECISION)
        if BIAS:
            tl.store(dbias + t * N + n, biases.to(dbias.dtype.element_ty), mask=n < tl.where(filters == 0, N, 0))


def kept_forward(y: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, T: int, eps: float, pairs: bool) -> Tensor:
    """What `project.project_forward` does; give the responses before their ReLU, ``[T, P, K2]``.

    A bias is added before a product is rounded, so that a response keeps its sign.
    """
    P, N = len(y), weight.shape[1]
    if 0 < P <= _FEW and y.dtype != torch.float32:
        pre = torch.empty(T, P, N, dtype=y.dtype, device=y.device)
        tiles = _tiles(P, N, T)
        _kept_forward[(cdiv(P, tiles["BM"]), cdiv(N, tiles["BN"]))](
            y, weight, bias, pre, z, P, N=N, M=y.shape[1] // T, T=T, PAIRS=pairs, BIAS=bias is not None,
            PRECISION="tf32", **constants(eps, 2 if pairs else T, y.dtype), **tiles,
        )  # fmt: skip
        return pre
    parts, weights = by_branch(y, T), weight.view(T, -1, N)
    if bias is None:
        pre = torch.bmm(parts, weights)
    else:
        pre = torch.empty(T, P, N, dtype=y.dtype, device=y.device)
        for t in range(T):
            torch.addmm(bias[t], parts[t], weights[t], out=pre[t])
    pointwise.fuse_forward(pre[None], None, eps, pairs=pairs, out=z[None])
    return pre


_FEW = 512
"""Positions up to which the kernel is faster than one product of cuBLAS after the other, as measured on an H200."""


def _tiles(P: int, N: int, T: int) -> dict[str, Any]:
    small = {64: (64, 32, 128, 4, 4), 128: (64, 64, 64, 4, 4), 256: (128, 64, 64, 4, 4)}
    BM, BN, BK, warps, stages = next((tiles for most, tiles in small.items() if most >= P), (128, 128, 64, 8, 3))
    if P <= 128 and N <= 2048:  # few tiles: smaller ones keep more of the GPU at work
        BM, BN, BK, warps, stages = 64, 16, 64, 4, 4
    return {"BM": BM, "BN": BN, "BK": BK, "num_warps": warps, "num_stages": stages if T == 2 else stages - 1}


def kept_backward(
    grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, pre: Tensor, T: int, eps: float, pairs: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The gradients of branch outputs, weights and biases, the latter two in ``dtype``, from the kept responses."""
    P, N = grad.shape
    if T == 2 and 0 < P <= _VERY_FEW and weight.numel() <= _SMALL and y.dtype != torch.float32:
        M, dy, dw = y.shape[1] // 2, torch.empty_like(y), torch.empty_like(weight, dtype=dtype)
        dbias = None if bias is None else torch.empty_like(bias, dtype=dtype)
        parts = 2 * cdiv(M, _TILES["BK"])
        of_y = cdiv(P, _TILES["YM"]) * parts
        _kept_backward[(of_y + cdiv(N, _TILES["WN"]) * parts,)](
            grad, y, weight, pre, dy, dw, dbias, P, of_y, N=N, M=M, BIAS=bias is not None, PRECISION="tf32",
            **constants(eps, 2, y.dtype), **_TILES,
        )  # fmt: skip
        return dy, dw, dbias
    dpre = pointwise.fuse_backward(grad[None], pre[None], None, eps, pairs=pairs)[0]
    dw = products(by_branch(y, T).transpose(1, 2), dpre, dtype).view_as(weight)
    return by_weights(dpre, weight), dw, None if bias is None else dpre.sum(1, dtype=dtype)


_VERY_FEW, _SMALL = 128, 2**19
"""Positions, and weights of two branches, up to which one kernel for all gradients is faster than cuBLAS's products.

Measured on an H200, see ``results/small.csv``. For three branches the products are faster.
"""
_TILES = {"YM": 16, "YN": 512, "WM": 128, "WN": 64, "BK": 64, "num_warps": 8, "num_stages": 1}
"""Of that kernel: positions, outputs and filters of a tile, for the branch outputs and for the weights."""
