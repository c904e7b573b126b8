"""The projection with its responses saved for backward: for large products at few positions, as in a linear layer.

With enough positions to fill the GPU, cuBLAS computes the products. With fewer, one kernel computes and fuses the
products of all branches: the work is split further, and there is one launch. In backward of a small layer one kernel
computes the gradients of the responses and a second one all products, which is faster than a launch for each product.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_dcl.kernels import pointwise
from torch_dcl.kernels.arithmetic import OPTIONS, as_float32, constants, fused, relu
from torch_dcl.kernels.launcher import Launch, cached, cdiv, is_traced
from torch_dcl.kernels.project import ON_CHIP, branch_gradient, by_branch, weight_gradient

__all__ = ["backward", "forward", "uses_one_kernel"]


@triton.jit
def _products(
    acc, y, w, low, p, n, k, P, ROUNDED: tl.constexpr, t: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
    T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add branch t's products for a block of filters to the accumulator."""
    rows = tl.load(y + p[:, None] * (T * M) + t * M + k[None, :], mask=(p < P)[:, None] & (k < M)[None, :], other=0.0)
    at, inside = (t * M + k)[:, None] * N + n[None, :], (k < M)[:, None] & (n < N)[None, :]
    weights = tl.load(w + at, mask=inside, other=0.0).to(rows.dtype)
    if ROUNDED:
        first = tl.where(tl.program_id(0) == 0, M, 0)
        tl.store(low + at, weights, mask=(k < first)[:, None] & (n < N)[None, :])
    return tl.dot(rows, weights, acc, input_precision=PRECISION)


@triton.jit
def _store_response(acc, bias, pre, n, mask, t: tl.constexpr, N: tl.constexpr, BIAS: tl.constexpr):
    """Write the pre-activation and return its response, rounded as written."""
    if BIAS:
        acc += tl.load(bias + t * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    rounded = acc.to(pre.dtype.element_ty)
    tl.store(pre, rounded, mask=mask)
    return relu(rounded.to(tl.float32))


@triton.jit
def _saved_forward(
    y, w, bias, pre, out, low, P, eps, floor, ROUNDED: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, BIAS: tl.constexpr,
    LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    eps, floor = as_float32(eps), as_float32(floor)
    p = tl.program_id(0) * BM + tl.arange(0, BM).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc0 = tl.zeros((BM, BN), tl.float32)
    acc1 = tl.zeros((BM, BN), tl.float32)
    acc2 = tl.zeros((BM, BN), tl.float32)
    for first in range(0, M, BK):
        k = first + tl.arange(0, BK)
        acc0 = _products(acc0, y, w, low, p, n, k, P, ROUNDED, 0, N, M, T, PRECISION)
        acc1 = _products(acc1, y, w, low, p, n, k, P, ROUNDED, 1, N, M, T, PRECISION)
        if T == 3:
            acc2 = _products(acc2, y, w, low, p, n, k, P, ROUNDED, 2, N, M, T, PRECISION)
    mask = (p < P)[:, None] & (n < N)[None, :]
    at = p[:, None] * N + n[None, :]
    size = (tl.zeros((), tl.int64) + P) * N
    a = _store_response(acc0, bias, pre + at, n, mask, 0, N, BIAS)
    b = _store_response(acc1, bias, pre + size + at, n, mask, 1, N, BIAS)
    c = b
    if T == 3:
        c = _store_response(acc2, bias, pre + 2 * size + at, n, mask, 2, N, BIAS)
    tl.store(out + at, fused(a, b, c, eps, floor, T, PAIRS, QUICK, LARGEST).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _output_gradient(
    dpre, w, dy, p, k, t, P, N: tl.constexpr, M: tl.constexpr, T: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of branch outputs: some positions, some filters."""
    total = tl.zeros((BM, BK), tl.float32)
    for first in range(0, N, BN):
        n = first + tl.arange(0, BN)
        inside = (p < P)[:, None] & (n < N)[None, :]
        rows = tl.load(dpre + t * P * N + p[:, None] * N + n[None, :], mask=inside, other=0.0)
        inside = (k < M)[None, :] & (n < N)[:, None]
        weights = tl.load(w + (t * M + k)[None, :] * N + n[:, None], mask=inside, other=0.0)
        total = tl.dot(rows, weights, total, input_precision=PRECISION)
    to = dy + p[:, None] * (T * M) + t * M + k[None, :]
    tl.store(to, total.to(dy.dtype.element_ty), mask=(p < P)[:, None] & (k < M)[None, :])


@triton.jit
def _weight_gradient(
    dpre, y, dw, n, k, t, P, N: tl.constexpr, M: tl.constexpr, T: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of weights: some filters, some outputs. Return that of the outputs' biases."""
    total = tl.zeros((BK, BN), tl.float32)
    biases = tl.zeros((BN,), tl.float32)
    for first in range(0, P, BM):
        p = first + tl.arange(0, BM)
        inside = (p < P)[:, None] & (n < N)[None, :]
        responses = tl.load(dpre + t * P * N + p[:, None] * N + n[None, :], mask=inside, other=0.0)
        inside = (k < M)[:, None] & (p < P)[None, :]
        rows = tl.load(y + p[None, :] * (T * M) + t * M + k[:, None], mask=inside, other=0.0)
        total = tl.dot(rows, responses, total, input_precision=PRECISION)
        biases += tl.sum(responses.to(tl.float32), 0)
    to = dw + (t * M + k)[:, None] * N + n[None, :]
    tl.store(to, total.to(dw.dtype.element_ty), mask=(k < M)[:, None] & (n < N)[None, :])
    return biases


@triton.jit
def _saved_backward(
    dpre, y, w, dy, dw, dbias, P, of_y, N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, BIAS: tl.constexpr,
    YM: tl.constexpr, YN: tl.constexpr, WM: tl.constexpr, WN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of branch outputs (programs below ``of_y``) or of weights (the rest), for some filters of one branch.

    Addresses have 32 bits, since the kernel runs for small layers only.
    """
    FILTERS: tl.constexpr = (M + BK - 1) // BK
    part = tl.program_id(0)
    outputs = part < of_y
    part = tl.where(outputs, part, part - of_y)
    t, filters, tile = part % T, part // T % FILTERS, part // T // FILTERS
    k = filters * BK + tl.arange(0, BK)
    if outputs:
        p = tile * YM + tl.arange(0, YM)
        _output_gradient(dpre, w, dy, p, k, t, P, N, M, T, YM, YN, BK, PRECISION)
    else:
        n = tile * WN + tl.arange(0, WN)
        biases = _weight_gradient(dpre, y, dw, n, k, t, P, N, M, T, WM, WN, BK, PRECISION)
        if BIAS:
            tl.store(dbias + t * N + n, biases.to(dbias.dtype.element_ty), mask=n < tl.where(filters == 0, N, 0))


def forward(
    y: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, T: int, eps: float, pairs: bool,
    low: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write z as `project.Projection` does, and return the pre-activations ``[T, P, K2]``.

    The bias is added before the product is rounded, so that rounding keeps the sign of a response. With
    `uses_one_kernel`, weights may have another dtype than y and are written to ``low`` in that of y.
    """
    P, N = len(y), weight.shape[1]
    if uses_one_kernel(P, T, y.dtype):
        pre = torch.empty(T, P, N, dtype=y.dtype, device=y.device)
        launch = _forward_launch(
            P, y.shape[1] // T, T, N, y.dtype, weight.dtype, eps, pairs, None if bias is None else bias.dtype,
            low is not None, y.device,
        )  # fmt: skip
        launch(y, weight, y if bias is None else bias, pre, z, y if low is None else low)
        return pre
    parts, weights = by_branch(y, T), weight.view(T, -1, N)
    if bias is None:
        pre = torch.bmm(parts, weights)
    else:
        low = bias.to(y.dtype)
        if is_traced(y):
            pre = torch.stack([torch.addmm(low[t], parts[t], weights[t]) for t in range(T)])
        else:
            pre = torch.empty(T, P, N, dtype=y.dtype, device=y.device)
            for t in range(T):
                torch.addmm(low[t], parts[t], weights[t], out=pre[t])
    pointwise.fuse_forward(pre[None], None, eps, pairs=pairs, out=z[None])
    return pre


@cached
def _forward_launch(
    P: int, M: int, T: int, N: int, dtype: torch.dtype, weight_dtype: torch.dtype, eps: float, pairs: bool,
    bias: torch.dtype | None, rounded: bool, device: torch.device,
) -> Launch:  # fmt: skip
    del device  # part of the cache key
    tiles, options = _tiles(P, N, T)
    stage = T * tiles["BK"] * (tiles["BM"] * dtype.itemsize + tiles["BN"] * weight_dtype.itemsize)
    options["num_stages"] = max(1, min(options["num_stages"], ON_CHIP // stage))
    values = {"P": P, **constants(eps, 2 if pairs else T, dtype), "N": N, "M": M, "T": T, "PAIRS": pairs}
    values |= {"BIAS": bias is not None, "PRECISION": "tf32", "ROUNDED": rounded, **tiles}
    return Launch(_saved_forward, (cdiv(P, tiles["BM"]), cdiv(N, tiles["BN"])), values, {**options, **OPTIONS})


def uses_one_kernel(P: int, T: int, dtype: torch.dtype) -> bool:
    """Whether one kernel is faster than cuBLAS and a fusion; measured on an H200, see ``results/small.csv``."""
    return 0 < P <= (512 if T == 2 else 128) and dtype is not torch.float32


def _tiles(P: int, N: int, T: int) -> tuple[dict[str, int], dict[str, int]]:
    BM, BN, BK, warps, stages = 128 if P > 128 else 64, 64, 64, 4, 4
    if P > 256 and N > 2048:  # many tiles: larger ones need less memory traffic
        BN, warps, stages = 128, 8, 3
    elif P <= 128 and cdiv(P, 64) * N <= 2048:  # few tiles: smaller ones occupy more of the GPU
        BN = 16
    elif P <= 64:
        BN, BK = 32, 128
    options = {"num_warps": warps, "num_stages": stages if T == 2 else stages - 1}
    return {"BM": BM, "BN": BN, "BK": BK}, options


def backward(
    grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, pre: Tensor, T: int, eps: float, pairs: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The gradients of branch outputs, weights and biases (the latter two in ``dtype``) from the pre-activations."""
    P, N = grad.shape
    dpre = pointwise.fuse_backward(grad[None], pre[None], None, eps, pairs=pairs)[0]
    if _backward_uses_one_kernel(P, weight.numel()) and y.dtype != torch.float32:
        dy, dw = torch.empty_like(y), torch.empty_like(weight, dtype=dtype)
        sums = torch.empty(T, N, dtype=dtype, device=y.device)
        _backward_launch(P, y.shape[1] // T, T, N, bias is not None, y.dtype, dtype, y.device)(
            dpre, y, weight, dy, dw, sums
        )
        return dy, dw, None if bias is None else sums
    dbias = None if bias is None else dpre.sum(1, dtype=dtype)
    return branch_gradient(dpre, weight, y), weight_gradient(y, dpre, dtype), dbias


def _backward_uses_one_kernel(P: int, weights: int) -> bool:
    """Whether one kernel is faster than separate cuBLAS products; measured on an H200, see ``results/small.csv``.

    With 33 to 128 positions it is as fast for large layers too, with a fifth of the host time.
    """
    return 0 < P <= 512 and ((weights <= 2**21 and P * weights <= 2**28) or (32 < P <= 128 and weights <= 2**24))


def _backward_tiles(P: int, weights: int) -> tuple[dict[str, int], int]:
    """The tile sizes of that kernel, for branch outputs (Y) and weights (W), and its number of stages."""
    if P <= 32 or weights < 2**21:  # few tiles: smaller ones occupy more of the GPU
        return {"YM": 16, "YN": 128, "WM": 128, "WN": 64, "BK": 64}, 4
    return {"YM": 64, "YN": 128, "WM": 64, "WN": 64 if P <= 64 else 128, "BK": 64}, 3


@cached
def _backward_launch(
    P: int, M: int, T: int, N: int, bias: bool, dtype: torch.dtype, to: torch.dtype, device: torch.device
) -> Launch:
    tiles, stages = _backward_tiles(P, T * M * N)
    parts = T * cdiv(M, tiles["BK"])
    of_y = cdiv(P, tiles["YM"]) * parts
    values = {"P": P, "of_y": of_y, "N": N, "M": M, "T": T, "BIAS": bias, "PRECISION": "tf32", **tiles}
    grid = (of_y + cdiv(N, tiles["WN"]) * parts,)
    return Launch(_saved_backward, grid, values, {"num_warps": 4, "num_stages": stages, **OPTIONS})
