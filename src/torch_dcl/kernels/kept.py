"""The projection with its responses kept for backward: for large products of few positions, as in a linear layer.

The products are cuBLAS's where there are enough positions to fill the GPU. For fewer one kernel forms the products of
all branches side by side and fuses them at once, so that the work is divided further and nothing is launched twice.
Backward too one kernel forms the products of all branches where the layer is small, behind the one that forms the
gradients of the responses: to launch a kernel for each product would take longer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_dcl.kernels import pointwise
from torch_dcl.kernels.arithmetic import OPTIONS, constants, fused, respond, single
from torch_dcl.kernels.launcher import Launch, cdiv, is_traced, kept
from torch_dcl.kernels.project import ON_CHIP, by_branch, by_weights, weight_gradient

__all__ = ["in_one", "kept_backward", "kept_forward"]


@triton.jit
def _products(
    acc, y, w, low, p, n, k, P, ROUNDED: tl.constexpr, t: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
    T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Branch t's products of a few filters, added to the others'."""
    rows = tl.load(y + p[:, None] * (T * M) + t * M + k[None, :], mask=(p < P)[:, None] & (k < M)[None, :], other=0.0)
    at, inside = (t * M + k)[:, None] * N + n[None, :], (k < M)[:, None] & (n < N)[None, :]
    weights = tl.load(w + at, mask=inside, other=0.0).to(rows.dtype)
    if ROUNDED:
        first = tl.where(tl.program_id(0) == 0, M, 0)
        tl.store(low + at, weights, mask=(k < first)[:, None] & (n < N)[None, :])
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
    y, w, bias, pre, out, low, P, eps, floor, ROUNDED: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, BIAS: tl.constexpr,
    LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    eps, floor = single(eps), single(floor)
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
    a = _respond(acc0, bias, pre + at, n, mask, 0, N, BIAS)
    b = _respond(acc1, bias, pre + size + at, n, mask, 1, N, BIAS)
    c = b
    if T == 3:
        c = _respond(acc2, bias, pre + 2 * size + at, n, mask, 2, N, BIAS)
    tl.store(out + at, fused(a, b, c, eps, floor, T, PAIRS, QUICK, LARGEST).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _output_gradient(
    dpre, w, dy, p, k, t, P, N: tl.constexpr, M: tl.constexpr, T: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a few filters' outputs at a few positions."""
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
    """The gradient of a few filters' weights for a few outputs; give that of the outputs' biases."""
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
def _kept_backward(
    dpre, y, w, dy, dw, dbias, P, of_y, N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, BIAS: tl.constexpr,
    YM: tl.constexpr, YN: tl.constexpr, WM: tl.constexpr, WN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A few filters of one branch: their outputs at a few positions, or (from program ``of_y``) their weights.

    Addresses have 32 bits: small layers alone come here.
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


def kept_forward(
    y: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, T: int, eps: float, pairs: bool,
    low: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """What `project.Projection` does; give the responses before their ReLU, ``[T, P, K2]``.

    A bias is added before a product is rounded, so that a response keeps its sign. Weights are of another type than y,
    and ``low`` is written, only where it all is `in_one` kernel.
    """
    P, N = len(y), weight.shape[1]
    if in_one(P, T, y.dtype):
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


@kept
def _forward_launch(
    P: int, M: int, T: int, N: int, dtype: torch.dtype, of_weight: torch.dtype, eps: float, pairs: bool,
    bias: torch.dtype | None, rounded: bool, device: torch.device,
) -> Launch:  # fmt: skip
    del device  # a part of what tells launches apart
    tiles, options = _tiles(P, N, T)
    stage = T * tiles["BK"] * (tiles["BM"] * dtype.itemsize + tiles["BN"] * of_weight.itemsize)
    options["num_stages"] = max(1, min(options["num_stages"], ON_CHIP // stage))
    values = {"P": P, **constants(eps, 2 if pairs else T, dtype), "N": N, "M": M, "T": T, "PAIRS": pairs}
    values |= {"BIAS": bias is not None, "PRECISION": "tf32", "ROUNDED": rounded, **tiles}
    return Launch(_kept_forward, (cdiv(P, tiles["BM"]), cdiv(N, tiles["BN"])), values, {**options, **OPTIONS})


def in_one(P: int, T: int, dtype: torch.dtype) -> bool:
    """Whether one kernel is faster than cuBLAS's products and a fusion; on an H200, see ``results/small.csv``."""
    return 0 < P <= (512 if T == 2 else 128) and dtype is not torch.float32


def _tiles(P: int, N: int, T: int) -> tuple[dict[str, int], dict[str, int]]:
    BM, BN, BK, warps, stages = 128 if P > 128 else 64, 64, 64, 4, 4
    if P > 256 and N > 2048:  # many tiles: larger ones move less
        BN, warps, stages = 128, 8, 3
    elif P <= 128 and cdiv(P, 64) * N <= 2048:  # few tiles: smaller ones keep more of the GPU at work
        BN = 16
    elif P <= 64:
        BN, BK = 32, 128
    options = {"num_warps": warps, "num_stages": stages if T == 2 else stages - 1}
    return {"BM": BM, "BN": BN, "BK": BK}, options


def kept_backward(
    grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, pre: Tensor, T: int, eps: float, pairs: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The gradients of branch outputs, weights and biases, the latter two in ``dtype``, from the kept responses."""
    P, N = grad.shape
    dpre = pointwise.fuse_backward(grad[None], pre[None], None, eps, pairs=pairs)[0]
    if _backward_in_one(P, weight.numel()) and y.dtype != torch.float32:
        dy, dw = torch.empty_like(y), torch.empty_like(weight, dtype=dtype)
        of_bias = torch.empty(T, N, dtype=dtype, device=y.device)
        _backward_launch(P, y.shape[1] // T, T, N, bias is not None, y.dtype, dtype, y.device)(
            dpre, y, weight, dy, dw, of_bias
        )
        return dy, dw, None if bias is None else of_bias
    dbias = None if bias is None else dpre.sum(1, dtype=dtype)
    return by_weights(dpre, weight, y), weight_gradient(y, dpre, dtype), dbias


def _backward_in_one(P: int, weights: int) -> bool:
    """Whether one kernel is faster than cuBLAS's products one by one; on an H200, see ``results/small.csv``.

    With 33 to 128 positions it is as fast for large layers too, and takes the host a fifth of the time.
    """
    return 0 < P <= 512 and ((weights <= 2**21 and P * weights <= 2**28) or (32 < P <= 128 and weights <= 2**24))


def _backward_tiles(P: int, weights: int) -> tuple[dict[str, int], int]:
    """Of that kernel: positions, outputs and filters of a tile, for the branch outputs and for the weights; stages."""
    if P <= 32 or weights < 2**21:  # few tiles: smaller ones keep more of the GPU at work
        return {"YM": 16, "YN": 128, "WM": 128, "WN": 64, "BK": 64}, 4
    return {"YM": 64, "YN": 128, "WM": 64, "WN": 64 if P <= 64 else 128, "BK": 64}, 3


@kept
def _backward_launch(
    P: int, M: int, T: int, N: int, bias: bool, dtype: torch.dtype, to: torch.dtype, device: torch.device
) -> Launch:
    tiles, stages = _backward_tiles(P, T * M * N)
    parts = T * cdiv(M, tiles["BK"])
    of_y = cdiv(P, tiles["YM"]) * parts
    values = {"P": P, "of_y": of_y, "N": N, "M": M, "T": T, "BIAS": bias, "PRECISION": "tf32", **tiles}
    grid = (of_y + cdiv(N, tiles["WN"]) * parts,)
    return Launch(_kept_backward, grid, values, {"num_warps": 4, "num_stages": stages, **OPTIONS})
