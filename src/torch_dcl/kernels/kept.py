"""The projection with its responses kept for backward: for large products of few positions, as in a linear layer.

The products are cuBLAS's where there are enough positions to fill the GPU. For fewer one kernel forms the products of
all branches side by side and fuses them at once, so that the work is divided further and nothing is launched twice.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_dcl.kernels import pointwise
from torch_dcl.kernels.arithmetic import constants, fused, respond
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


def kept_forward(y: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, T: int, eps: float, pairs: bool) -> Tensor:
    """What `project.project_forward` does; give the responses before their ReLU, ``[T, P, K2]``.

    A bias is added before a product is rounded, so that a response keeps its sign.
    """
    P, N = len(y), weight.shape[1]
    if 0 < P <= _FEW and y.dtype != torch.float32:
        pre = torch.empty(T, P, N, dtype=y.dtype, device=y.device)
        tiles = _tiles(P, T)
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


def _tiles(P: int, T: int) -> dict[str, Any]:
    small = {64: (64, 32, 128, 4, 4), 128: (64, 64, 64, 4, 4), 256: (128, 64, 64, 4, 4)}
    BM, BN, BK, warps, stages = next((tiles for most, tiles in small.items() if most >= P), (128, 128, 64, 8, 3))
    return {"BM": BM, "BN": BN, "BK": BK, "num_warps": warps, "num_stages": stages if T == 2 else stages - 1}


def kept_backward(
    grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, pre: Tensor, T: int, eps: float, pairs: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The gradients of branch outputs, weights and biases, the latter two in ``dtype``, from the kept responses."""
    dpre = pointwise.fuse_backward(grad[None], pre[None], None, eps, pairs=pairs)[0]
    dw = products(by_branch(y, T).transpose(1, 2), dpre, dtype).view_as(weight)
    return by_weights(dpre, weight), dw, None if bias is None else dpre.sum(1, dtype=dtype)
