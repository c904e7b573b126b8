"""Concept fusion on the GPU: responses to z, and branch outputs to z, each as one kernel with a backward of its own.

Each kernel reads every value once and writes every result once. The projection forms the T small products of a tile,
adds the biases, rectifies, multiplies and takes the root before anything is written, so that the responses v never
reach memory; its backward forms them once more. What these kernels run short of is registers, so they take the quick
arithmetic throughout, and a program that met values too large for it goes over its positions once more with care. Where
the products are large and the positions few, in a linear layer, they are left to cuBLAS and kept for backward.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_dcl.kernels import pointwise
from torch_dcl.kernels.arithmetic import (
    careful,
    careful_gradients,
    constants,
    fused,
    gradients,
    quick,
    quick_gradients,
    respond,
)  # fmt: skip

__all__ = ["fuse_backward", "fuse_forward", "kept_backward", "kept_forward", "project_backward", "project_forward"]

_BLOCK = 1024


@triton.jit
def _fuse_forward(
    p0, p1, p2, out, size, eps, floor,
    T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    a = respond(tl.load(p0 + i, mask=inside, other=0.0).to(tl.float32))
    b = respond(tl.load(p1 + i, mask=inside, other=0.0).to(tl.float32))
    c = b
    if T == 3:
        c = respond(tl.load(p2 + i, mask=inside, other=0.0).to(tl.float32))
    z = fused(a, b, c, eps, floor, T, PAIRS, QUICK, LARGEST)
    tl.store(out + i, z.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _fuse_backward(
    grad, p0, p1, p2, d0, d1, d2, size, eps, floor,
    T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    g = tl.load(grad + i, mask=inside, other=0.0).to(tl.float32)
    a = respond(tl.load(p0 + i, mask=inside, other=0.0).to(tl.float32))
    b = respond(tl.load(p1 + i, mask=inside, other=0.0).to(tl.float32))
    c = b
    if T == 3:
        c = respond(tl.load(p2 + i, mask=inside, other=0.0).to(tl.float32))
    da, db, dc = gradients(g, a, b, c, eps, floor, T, PAIRS, QUICK, LARGEST)
    kind = d0.dtype.element_ty
    tl.store(d0 + i, da.to(kind), mask=inside)
    tl.store(d1 + i, db.to(kind), mask=inside)
    if T == 3:
        tl.store(d2 + i, dc.to(kind), mask=inside)


@triton.jit
def _columns(w, bias, n, N, t: tl.constexpr, M: tl.constexpr, BIAS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The weights and the biases of branch t for the outputs n."""
    k = tl.arange(0, BK)
    weights = tl.load(w + (t * M + k)[:, None] * N + n[None, :], mask=(k < M)[:, None] & (n < N)[None, :], other=0.0)
    if BIAS:
        return weights, tl.load(bias + t * N + n, mask=n < N, other=0.0).to(tl.float32)
    else:
        return weights, tl.zeros((BN,), tl.float32)


@triton.jit
def _response(y, w, bias, p, P, stride, t: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
              BK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """v of branch t at positions p, with the weights and the bias of a few outputs."""
    k = tl.arange(0, BK)
    rows = tl.load(y + p[:, None] * stride + t * M + k[None, :], mask=(p < P)[:, None] & (k < M)[None, :], other=0.0)
    return respond(tl.dot(rows, w, tl.zeros((BM, BN), tl.float32), input_precision=PRECISION) + bias[None, :])


@triton.jit
def _responses(y, w0, w1, w2, b0, b1, b2, p, P, stride, T: tl.constexpr, M: tl.constexpr, BM: tl.constexpr,
               BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    a = _response(y, w0, b0, p, P, stride, 0, M, BM, BN, BK, PRECISION)
    b = _response(y, w1, b1, p, P, stride, 1, M, BM, BN, BK, PRECISION)
    c = b
    if T == 3:
        c = _response(y, w2, b2, p, P, stride, 2, M, BM, BN, BK, PRECISION)
    return a, b, c


@triton.jit
def _forward_pass(
    y, w0, w1, w2, b0, b1, b2, out, n, P, N, stride, eps, floor, CAREFUL: tl.constexpr,
    M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, LARGEST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All positions of a program; whether everything was moderate, as 0 or NaN."""
    seen = tl.zeros((BM,), tl.float32)
    for m in range(tl.program_id(1), tl.cdiv(P, BM), tl.num_programs(1)):
        p = tl.arange(0, BM).to(tl.int64) + m * BM
        a, b, c = _responses(y, w0, w1, w2, b0, b1, b2, p, P, stride, T, M, BM, BN, BK, PRECISION)
        if CAREFUL:
            z = careful(a, b, c, floor, T, PAIRS, LARGEST)
        else:
            z, look = quick(a, b, c, eps, T, PAIRS, QUICK, LARGEST)
            seen += tl.sum(look, 1)
        to = out + p[:, None] * N + n[None, :]
        tl.store(to, z.to(out.dtype.element_ty), mask=(p < P)[:, None] & (n < N)[None, :])
    return tl.sum(seen * 0.0, 0)


@triton.jit
def _project_forward(
    y, w, bias, out, P, N, stride, eps, floor,
    M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, BIAS: tl.constexpr,
    LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    w0, b0 = _columns(w, bias, n, N, 0, M, BIAS, BN, BK)
    w1, b1 = _columns(w, bias, n, N, 1, M, BIAS, BN, BK)
    w2, b2 = _columns(w, bias, n, N, T - 1, M, BIAS, BN, BK)
    moderate = float("nan")
    if QUICK > 0:
        moderate = _forward_pass(
            y, w0, w1, w2, b0, b1, b2, out, n, P, N, stride, eps, floor, False,
            M, T, PAIRS, QUICK, LARGEST, BM, BN, BK, PRECISION,
        )  # fmt: skip
    if moderate != 0:
        _forward_pass(
            y, w0, w1, w2, b0, b1, b2, out, n, P, N, stride, eps, floor, True,
            M, T, PAIRS, QUICK, LARGEST, BM, BN, BK, PRECISION,
        )  # fmt: skip


@triton.jit
def _pairs_of_rows(x, BM: tl.constexpr, BN: tl.constexpr):
    """Rows p and p + 8 of every 16 added up. A thread holds both after a product, so that it takes no exchange."""
    return tl.sum(tl.reshape(x, (BM // 16, 2, 8, BN)), 1)


@triton.jit
def _backward_pass(
    grad, y, w0, w1, w2, b0, b1, b2, dpre, n, P, N, stride, eps, floor, CAREFUL: tl.constexpr,
    M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, LARGEST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All positions of a program: the sums of the gradients, and whether everything was moderate, as 0 or NaN."""
    size = (tl.zeros((), tl.int64) + P) * N  # P = 1 is a constant here, and has no type of its own
    kind = dpre.dtype.element_ty
    seen = tl.zeros((BM,), tl.float32)
    sum0 = tl.zeros((BM // 16, 8, BN), tl.float32)
    sum1 = tl.zeros((BM // 16, 8, BN), tl.float32)
    sum2 = tl.zeros((BM // 16, 8, BN), tl.float32)
    for m in range(tl.program_id(1), tl.cdiv(P, BM), tl.num_programs(1)):
        p = tl.arange(0, BM).to(tl.int64) + m * BM
        mask = (p < P)[:, None] & (n < N)[None, :]
        at = p[:, None] * N + n[None, :]
        g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        a, b, c = _responses(y, w0, w1, w2, b0, b1, b2, p, P, stride, T, M, BM, BN, BK, PRECISION)
        if CAREFUL:
            da, db, dc = careful_gradients(g, a, b, c, floor, T, PAIRS, LARGEST)
        else:
            da, db, dc, look = quick_gradients(g, a, b, c, eps, T, PAIRS, QUICK, LARGEST)
            seen += tl.sum(look, 1)
        tl.store(dpre + at, da.to(kind), mask=mask)
        tl.store(dpre + size + at, db.to(kind), mask=mask)
        sum0 += _pairs_of_rows(da, BM, BN)  # beyond the last position the gradient was read as zero
        sum1 += _pairs_of_rows(db, BM, BN)
        if T == 3:
            tl.store(dpre + 2 * size + at, dc.to(kind), mask=mask)
            sum2 += _pairs_of_rows(dc, BM, BN)
    total0 = tl.sum(tl.sum(sum0, 0), 0)
    total1 = tl.sum(tl.sum(sum1, 0), 0)
    total2 = tl.sum(tl.sum(sum2, 0), 0)
    moderate = tl.sum(seen * 0.0, 0) + tl.sum((total0 + total1 + total2) * 0.0, 0)
    return total0, total1, total2, moderate


@triton.jit
def _project_backward(
    grad, y, w, bias, dpre, dbias, P, N, stride, eps, floor,
    M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, BIAS: tl.constexpr,
    LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    w0, b0 = _columns(w, bias, n, N, 0, M, BIAS, BN, BK)
    w1, b1 = _columns(w, bias, n, N, 1, M, BIAS, BN, BK)
    w2, b2 = _columns(w, bias, n, N, T - 1, M, BIAS, BN, BK)
    total0 = tl.zeros((BN,), tl.float32)
    total1 = tl.zeros((BN,), tl.float32)
    total2 = tl.zeros((BN,), tl.float32)
    moderate = float("nan")
    if QUICK > 0:
        total0, total1, total2, moderate = _backward_pass(
            grad, y, w0, w1, w2, b0, b1, b2, dpre, n, P, N, stride, eps, floor, False,
            M, T, PAIRS, QUICK, LARGEST, BM, BN, BK, PRECISION,
        )  # fmt: skip
    if moderate != 0:
        total0, total1, total2, _ = _backward_pass(
            grad, y, w0, w1, w2, b0, b1, b2, dpre, n, P, N, stride, eps, floor, True,
            M, T, PAIRS, QUICK, LARGEST, BM, BN, BK, PRECISION,
        )  # fmt: skip
    if BIAS:
        to = dbias + tl.program_id(1).to(tl.int64) * T * N + n
        tl.store(to, total0, mask=n < N)
        tl.store(to + N, total1, mask=n < N)
        if T == 3:
            tl.store(to + 2 * N, total2, mask=n < N)


def _common(x: Tensor, T: int, eps: float, pairs: bool) -> dict[str, object]:
    """What every kernel of the fusion is told."""
    return {**constants(eps, 2 if pairs else T, x.dtype), "T": T, "PAIRS": pairs}


def _in_the_layout_of(like: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """The tensors as they lie in memory where they lie as ``like`` does; copies of the others."""
    strides = like.stride()
    return [t if t.stride() == strides else torch.empty_like(like, dtype=t.dtype).copy_(t) for t in tensors]


def fuse_forward(pre: list[Tensor], eps: float, pairs: bool) -> Tensor:
    """z of two or three responses of one shape; with ``pairs`` the mean over the pairs of three.

    The layout is that of the first, channels_last for example, if it has no gaps.
    """
    T, out = len(pre), torch.empty_like(pre[0])
    size = out.numel()
    if size:
        pre = _in_the_layout_of(out, pre)
        _fuse_forward[(triton.cdiv(size, _BLOCK),)](
            pre[0], pre[1], pre[-1], out, size, **_common(out, T, eps, pairs), BLOCK=_BLOCK
        )
    return out


def fuse_backward(grad: Tensor, pre: list[Tensor], eps: float, pairs: bool) -> list[Tensor]:
    """The gradients of the responses, each in the layout of the first."""
    T, out = len(pre), [torch.empty_like(pre[0]) for _ in pre]
    size = grad.numel()
    if size:
        grad, *pre = _in_the_layout_of(out[0], [grad, *pre])
        _fuse_backward[(triton.cdiv(size, _BLOCK),)](
            grad, pre[0], pre[1], pre[-1], out[0], out[1], out[-1], size, **_common(grad, T, eps, pairs), BLOCK=_BLOCK
        )
    return out


def _tiles(y: Tensor, T: int, M: int, N: int, *, backward: bool) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid, and the sizes of the tiles: a program keeps the weights of a few outputs and goes over positions."""
    wide = y.dtype == torch.float32
    BK = max(16, triton.next_power_of_2(M))
    BM, BN = 64, min(32 if wide or BK > 128 else 64, max(16, triton.next_power_of_2(N)))
    if backward:
        stages, at_once = 2, 2
    elif BK <= 64:
        stages, at_once = 3, 2
    else:
        stages, at_once = 1, 3
    if T * BK * y.element_size() * (BN + stages * BM) > _ON_CHIP:
        stages = 1
    tiles: dict[str, Any] = {"M": M, "BM": BM, "BN": BN, "BK": BK, "num_warps": 4, "num_stages": stages}
    tiles["PRECISION"] = "tf32" if torch.backends.cuda.matmul.allow_tf32 or not wide else "ieee"
    if backward and BK > 64 and not wide:  # more threads with few registers each: the careful pass may run out of them
        tiles |= {"num_warps": 8, "maxnreg": 128}
    across = triton.cdiv(N, BN)
    return (across, max(1, min(triton.cdiv(len(y), BM), at_once * _processors(y) // across))), tiles


_ON_CHIP = 210_000
"""Bytes of shared memory that a program may take, of 227 KiB."""


def _processors(y: Tensor) -> int:
    return torch.cuda.get_device_properties(y.device).multi_processor_count if y.is_cuda else 4


def project_forward(y: Tensor, weight: Tensor, bias: Tensor | None, T: int, eps: float, pairs: bool) -> Tensor:
    """z ``[P, K2]`` of branch outputs ``[P, T·M]`` and weights ``[T·M, K2]``, all contiguous, biases ``[T, K2]``."""
    (P, width), N = y.shape, weight.shape[1]
    out = torch.empty(P, N, dtype=y.dtype, device=y.device)
    if P:
        grid, tiles = _tiles(y, T, width // T, N, backward=False)
        _project_forward[grid](
            y, weight, bias, out, P, N, y.stride(0), BIAS=bias is not None, **_common(y, T, eps, pairs), **tiles
        )
    return out


def project_backward(
    grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, T: int, eps: float, pairs: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of branch outputs, weights and biases."""
    (P, width), N = y.shape, weight.shape[1]
    M = width // T
    grid, tiles = _tiles(y, T, M, N, backward=True)
    dpre = torch.empty(T, P, N, dtype=y.dtype, device=y.device)
    empty = torch.empty if P else torch.zeros  # of no position nothing is written
    parts = None if bias is None else empty(grid[1], T, N, dtype=torch.float32, device=y.device)
    if P:
        _project_backward[grid](
            grad, y, weight, bias, dpre, parts, P, N, y.stride(0),
            BIAS=bias is not None, **_common(y, T, eps, pairs), **tiles,
        )  # fmt: skip
    dy = torch.empty_like(y)
    torch.bmm(dpre, weight.view(T, M, N).transpose(1, 2), out=_by_branch(dy, T))
    return dy, _weight_gradient(y, dpre), None if parts is None else parts.sum(0).to(weight.dtype)


def _weight_gradient(y: Tensor, dpre: Tensor) -> Tensor:
    """``y_t^T · dpre_t`` of every branch, ``[T·M, K2]``."""
    T, P, N = dpre.shape
    M = y.shape[1] // T
    parts = math.gcd(P, 16) if P >= _MANY else 1
    dw = torch.empty(T, parts, M, N, dtype=y.dtype, device=y.device)
    for t, y_t in enumerate(_by_branch(y, T)):
        if parts == 1:
            torch.mm(y_t.t(), dpre[t], out=dw[t, 0])
        else:
            rows, gradients_ = (x.unflatten(0, (parts, -1)) for x in (y_t, dpre[t]))
            torch.bmm(rows.transpose(1, 2), gradients_, out=dw[t])
    return dw.sum(1).view(T * M, N) if parts > 1 else dw.view(T * M, N)


_MANY = 65536
"""Positions from which the weights' gradient is summed in parts: cuBLAS does not divide the work of one by itself."""


def kept_forward(
    y: Tensor, weight: Tensor, bias: Tensor | None, T: int, eps: float, pairs: bool
) -> tuple[Tensor, Tensor]:
    """What `project_forward` gives, by plain products; with it the responses before their ReLU, ``[T, P, K2]``.

    A bias is added before a product is rounded, so that a response keeps its sign.
    """
    parts, weights = _by_branch(y, T), weight.view(T, -1, weight.shape[1])
    if bias is None:
        pre = torch.bmm(parts, weights)
    else:
        pre = torch.empty(T, len(y), weight.shape[1], dtype=y.dtype, device=y.device)
        for t in range(T):
            torch.addmm(bias[t], parts[t], weights[t], out=pre[t])
    return pointwise.fuse_forward(pre[None], None, eps, pairs=pairs)[0], pre


def kept_backward(
    grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, pre: Tensor, T: int, eps: float, pairs: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of branch outputs, weights and biases, from the responses that were kept."""
    dpre = pointwise.fuse_backward(grad[None], pre[None], None, eps, pairs=pairs)[0]
    dy = torch.empty_like(y)
    torch.bmm(dpre, weight.view(T, -1, weight.shape[1]).transpose(1, 2), out=_by_branch(dy, T))
    dw = torch.bmm(_by_branch(y, T).transpose(1, 2), dpre).view_as(weight)
    return dy, dw, None if bias is None else dpre.sum(1)


def _by_branch(y: Tensor, T: int) -> Tensor:
    """``[P, T·M]`` as ``[T, P, M]``, where it lies."""
    return y.view(len(y), T, y.shape[1] // T).transpose(0, 1)
