"""Branch outputs to z in one kernel: T small products, biases, ReLU, product, ε and root, with a backward of its own.

The responses v never reach memory: backward forms them once more. A program keeps the weights of a few outputs and goes
over positions. In backward it adds up the weights' gradient as it goes, where registers allow; the gradient of the
branch outputs takes a second kernel, whose programs keep a few positions and go over outputs, or cuBLAS if that is
faster. What these kernels run short of is registers, so they take the quick arithmetic throughout, and a program that
met values too large for it goes over its part once more with care.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_dcl.kernels.arithmetic import (
    careful,
    careful_gradients,
    constants,
    quick,
    quick_gradients,
    respond,
)

__all__ = ["by_branch", "project_backward", "project_forward"]


@triton.jit
def _columns(
    w, bias, n, t: tl.constexpr, N: tl.constexpr, M: tl.constexpr, BIAS: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """The weights and the biases of branch t for the outputs n."""
    k = tl.arange(0, BK)
    weights = tl.load(w + (t * M + k)[:, None] * N + n[None, :], mask=(k < M)[:, None] & (n < N)[None, :], other=0.0)
    if BIAS:
        return weights, tl.load(bias + t * N + n, mask=n < N, other=0.0).to(tl.float32)
    else:
        return weights, tl.zeros((BN,), tl.float32)


@triton.jit
def _rows(y, p, P, t: tl.constexpr, T: tl.constexpr, M: tl.constexpr, BK: tl.constexpr):
    """The outputs of branch t at positions p."""
    k = tl.arange(0, BK)
    return tl.load(y + p[:, None] * (T * M) + t * M + k[None, :], mask=(p < P)[:, None] & (k < M)[None, :], other=0.0)


@triton.jit
def _response(rows, w, bias, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr):
    return respond(tl.dot(rows, w, tl.zeros((BM, BN), tl.float32), input_precision=PRECISION) + bias[None, :])


@triton.jit
def _forward_pass(
    y, w0, w1, w2, b0, b1, b2, out, n, P, eps, floor, CAREFUL: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, LARGEST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All positions of a program; whether everything was moderate, as 0 or NaN."""
    seen = tl.zeros((BM,), tl.float32)
    for m in range(tl.program_id(1), tl.cdiv(P, BM), tl.num_programs(1)):
        p = tl.arange(0, BM).to(tl.int64) + m * BM
        a = _response(_rows(y, p, P, 0, T, M, BK), w0, b0, BM, BN, PRECISION)
        b = _response(_rows(y, p, P, 1, T, M, BK), w1, b1, BM, BN, PRECISION)
        c = b
        if T == 3:
            c = _response(_rows(y, p, P, 2, T, M, BK), w2, b2, BM, BN, PRECISION)
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
    y, w, bias, out, P, eps, floor,
    N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, BIAS: tl.constexpr,
    LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    w0, b0 = _columns(w, bias, n, 0, N, M, BIAS, BN, BK)
    w1, b1 = _columns(w, bias, n, 1, N, M, BIAS, BN, BK)
    w2, b2 = _columns(w, bias, n, T - 1, N, M, BIAS, BN, BK)
    moderate = float("nan")
    if QUICK > 0:
        moderate = _forward_pass(
            y, w0, w1, w2, b0, b1, b2, out, n, P, eps, floor, False,
            N, M, T, PAIRS, QUICK, LARGEST, BM, BN, BK, PRECISION,
        )  # fmt: skip
    if moderate != 0:
        _forward_pass(
            y, w0, w1, w2, b0, b1, b2, out, n, P, eps, floor, True,
            N, M, T, PAIRS, QUICK, LARGEST, BM, BN, BK, PRECISION,
        )  # fmt: skip


@triton.jit
def _pairs_of_rows(x, BM: tl.constexpr, BN: tl.constexpr):
    """Rows p and p + 8 of every 16 added up. A thread holds both after a product, so that it takes no exchange."""
    return tl.sum(tl.reshape(x, (BM // 16, 2, 8, BN)), 1)


@triton.jit
def _backward_pass(
    grad, y, w0, w1, w2, b0, b1, b2, dpre, n, P, eps, floor, CAREFUL: tl.constexpr, INSIDE: tl.constexpr,
    KEEP: tl.constexpr, N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr,
    LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All positions of a program.

    The gradients of the biases; of the weights if they are added up INSIDE; and whether everything was moderate, as 0
    or NaN. The gradients of the responses are written if a later product wants them, which is to KEEP them.
    """
    size = (tl.zeros((), tl.int64) + P) * N  # P = 1 is a constant here, and has no type of its own
    kind = grad.dtype.element_ty
    seen = tl.zeros((BM,), tl.float32)
    sum0 = tl.zeros((BM // 16, 8, BN), tl.float32)
    sum1 = tl.zeros((BM // 16, 8, BN), tl.float32)
    sum2 = tl.zeros((BM // 16, 8, BN), tl.float32)
    dw0 = tl.zeros((BK if INSIDE else 1, BN), tl.float32)
    dw1 = tl.zeros((BK if INSIDE else 1, BN), tl.float32)
    for m in range(tl.program_id(1), tl.cdiv(P, BM), tl.num_programs(1)):
        p = tl.arange(0, BM).to(tl.int64) + m * BM
        mask = (p < P)[:, None] & (n < N)[None, :]
        at = p[:, None] * N + n[None, :]
        g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        rows0 = _rows(y, p, P, 0, T, M, BK)
        rows1 = _rows(y, p, P, 1, T, M, BK)
        a = _response(rows0, w0, b0, BM, BN, PRECISION)
        b = _response(rows1, w1, b1, BM, BN, PRECISION)
        c = b
        if T == 3:
            c = _response(_rows(y, p, P, 2, T, M, BK), w2, b2, BM, BN, PRECISION)
        if CAREFUL:
            da, db, dc = careful_gradients(g, a, b, c, floor, T, PAIRS, LARGEST)
        else:
            da, db, dc, look = quick_gradients(g, a, b, c, eps, T, PAIRS, QUICK, LARGEST)
            seen += tl.sum(look, 1)
        sum0 += _pairs_of_rows(da, BM, BN)  # beyond the last position the gradient was read as zero
        sum1 += _pairs_of_rows(db, BM, BN)
        if KEEP:
            tl.store(dpre + at, da.to(kind), mask=mask)
            tl.store(dpre + size + at, db.to(kind), mask=mask)
        if T == 3:
            tl.store(dpre + 2 * size + at, dc.to(kind), mask=mask)
            sum2 += _pairs_of_rows(dc, BM, BN)
        if INSIDE:
            dw0 = tl.dot(tl.trans(rows0), da.to(kind), dw0, input_precision=PRECISION)
            dw1 = tl.dot(tl.trans(rows1), db.to(kind), dw1, input_precision=PRECISION)
    total0 = tl.sum(tl.sum(sum0, 0), 0)
    total1 = tl.sum(tl.sum(sum1, 0), 0)
    total2 = tl.sum(tl.sum(sum2, 0), 0)
    moderate = tl.sum(seen * 0.0, 0) + tl.sum((total0 + total1 + total2) * 0.0, 0)
    return total0, total1, total2, dw0, dw1, moderate


@triton.jit
def _project_backward(
    grad, y, w, bias, dpre, parts, P, eps, floor, INSIDE: tl.constexpr, KEEP: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, BIAS: tl.constexpr,
    LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Into ``parts`` this program's share of the gradients: T rows for the biases, behind them the weights."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    w0, b0 = _columns(w, bias, n, 0, N, M, BIAS, BN, BK)
    w1, b1 = _columns(w, bias, n, 1, N, M, BIAS, BN, BK)
    w2, b2 = _columns(w, bias, n, T - 1, N, M, BIAS, BN, BK)
    total0 = tl.zeros((BN,), tl.float32)
    total1 = tl.zeros((BN,), tl.float32)
    total2 = tl.zeros((BN,), tl.float32)
    dw0 = tl.zeros((BK if INSIDE else 1, BN), tl.float32)
    dw1 = tl.zeros((BK if INSIDE else 1, BN), tl.float32)
    moderate = float("nan")
    if QUICK > 0:
        total0, total1, total2, dw0, dw1, moderate = _backward_pass(
            grad, y, w0, w1, w2, b0, b1, b2, dpre, n, P, eps, floor, False, INSIDE, KEEP,
            N, M, T, PAIRS, QUICK, LARGEST, BM, BN, BK, PRECISION,
        )  # fmt: skip
    if moderate != 0:
        total0, total1, total2, dw0, dw1, _ = _backward_pass(
            grad, y, w0, w1, w2, b0, b1, b2, dpre, n, P, eps, floor, True, INSIDE, KEEP,
            N, M, T, PAIRS, QUICK, LARGEST, BM, BN, BK, PRECISION,
        )  # fmt: skip
    to = parts + tl.program_id(1).to(tl.int64) * (T * (M + 1) if INSIDE else T) * N + n
    tl.store(to, total0, mask=n < N)
    tl.store(to + N, total1, mask=n < N)
    if T == 3:
        tl.store(to + 2 * N, total2, mask=n < N)
    if INSIDE:
        k = tl.arange(0, BK)
        there = to[None, :] + (T + k)[:, None] * N
        inside = (k < M)[:, None] & (n < N)[None, :]
        tl.store(there, dw0, mask=inside)
        tl.store(there + M * N, dw1, mask=inside)


@triton.jit
def _rows_pass(
    grad, rows0, rows1, w, bias, p, P, eps, floor, CAREFUL: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, QUICK: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All outputs at the positions p: the gradients of the branch outputs, and whether everything was moderate."""
    kind = grad.dtype.element_ty
    seen = tl.zeros((BM,), tl.float32)
    dy0 = tl.zeros((BM, BK), tl.float32)
    dy1 = tl.zeros((BM, BK), tl.float32)
    for first in range(0, N, BN):
        n = first + tl.arange(0, BN)
        w0, b0 = _columns(w, bias, n, 0, N, M, BIAS, BN, BK)
        w1, b1 = _columns(w, bias, n, 1, N, M, BIAS, BN, BK)
        mask = (p < P)[:, None] & (n < N)[None, :]
        g = tl.load(grad + p[:, None] * N + n[None, :], mask=mask, other=0.0).to(tl.float32)
        a = _response(rows0, w0, b0, BM, BN, PRECISION)
        b = _response(rows1, w1, b1, BM, BN, PRECISION)
        if CAREFUL:
            da, db, _ = careful_gradients(g, a, b, b, floor, 2, False, LARGEST)
        else:
            da, db, _, look = quick_gradients(g, a, b, b, eps, 2, False, QUICK, LARGEST)
            seen += tl.sum(look, 1)
        dy0 = tl.dot(da.to(kind), tl.trans(w0), dy0, input_precision=PRECISION)
        dy1 = tl.dot(db.to(kind), tl.trans(w1), dy1, input_precision=PRECISION)
    return dy0, dy1, tl.sum(seen * 0.0, 0) + tl.sum(tl.sum((dy0 + dy1) * 0.0, 1), 0)


@triton.jit
def _project_backward_rows(
    grad, y, w, bias, dy, P, eps, floor,
    N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, BIAS: tl.constexpr,
    LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of two branches' outputs at a few positions."""
    p = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    rows0 = _rows(y, p, P, 0, T, M, BK)
    rows1 = _rows(y, p, P, 1, T, M, BK)
    dy0 = tl.zeros((BM, BK), tl.float32)
    dy1 = tl.zeros((BM, BK), tl.float32)
    moderate = float("nan")
    if QUICK > 0:
        dy0, dy1, moderate = _rows_pass(
            grad, rows0, rows1, w, bias, p, P, eps, floor, False, N, M, QUICK, BIAS, LARGEST, BM, BN, BK, PRECISION
        )
    if moderate != 0:
        dy0, dy1, _ = _rows_pass(
            grad, rows0, rows1, w, bias, p, P, eps, floor, True, N, M, QUICK, BIAS, LARGEST, BM, BN, BK, PRECISION
        )
    k = tl.arange(0, BK)
    to = dy + p[:, None] * (T * M) + k[None, :]
    inside = (p < P)[:, None] & (k < M)[None, :]
    tl.store(to, dy0.to(dy.dtype.element_ty), mask=inside)
    tl.store(to + M, dy1.to(dy.dtype.element_ty), mask=inside)


def _common(y: Tensor, weight: Tensor, bias: Tensor | None, T: int, eps: float, pairs: bool) -> dict[str, Any]:
    """What every kernel of the projection is told, and how large its tiles are in k."""
    M, wide = y.shape[1] // T, y.dtype == torch.float32
    return {
        **constants(eps, 2 if pairs else T, y.dtype), "T": T, "PAIRS": pairs, "BIAS": bias is not None,
        "N": weight.shape[1], "M": M, "BK": max(16, triton.next_power_of_2(M)), "BM": 64,
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 or not wide else "ieee",
    }  # fmt: skip


Tiles = tuple[tuple[int, int], dict[str, Any]]


def _tiles(y: Tensor, T: int, N: int, *, inside: bool | None = None) -> Tiles:
    """The grid of a kernel that keeps outputs, and its tiles, as measured on an H200: forward, and both of backward."""
    half, BK = y.dtype != torch.float32, max(16, triton.next_power_of_2(y.shape[1] // T))
    BN, warps, stages, registers, at_once = 64 if half and BK <= _DEEPEST else 32, 4, 1, None, 2
    scarce = half and _SHALLOW < BK <= _DEEPEST  # more threads with fewer registers each
    if inside:
        BN, stages, registers, at_once = (32, 3, 168, 3) if BK <= _SHALLOW else (32, 2, None, 2)
    elif inside is not None:
        stages = 2 if T == 2 else 1
        warps, registers = (8, 128) if half and BK > _SHALLOW else (4, None)
    elif BK <= _SHALLOW:
        stages = 3
    elif scarce:
        BN, warps, registers = 128 if T == 2 else 64, 8, 128
    else:
        at_once = 3
    BN = min(BN, max(16, triton.next_power_of_2(N)))
    if T * BK * y.element_size() * (BN + stages * 64) > _ON_CHIP:
        stages = 1
    tiles: dict[str, Any] = {"BN": BN, "num_warps": warps, "num_stages": stages}
    if registers is not None:
        tiles["maxnreg"] = registers
    across = triton.cdiv(N, BN)
    return (across, max(1, min(triton.cdiv(len(y), 64), at_once * _processors(y) // across))), tiles


_ON_CHIP = 210_000
"""Bytes of shared memory that a program may take, of 227 KiB."""
_SHALLOW, _DEEPEST = 64, 128
"""Filters of a branch up to which nothing is short; and up to which the weights' gradient fits into registers."""


def _processors(y: Tensor) -> int:
    return torch.cuda.get_device_properties(y.device).multi_processor_count if y.is_cuda else 4


def project_forward(y: Tensor, weight: Tensor, bias: Tensor | None, T: int, eps: float, pairs: bool) -> Tensor:
    """z ``[P, K2]`` of branch outputs ``[P, T·M]`` and weights ``[T·M, K2]``, all contiguous, biases ``[T, K2]``."""
    P, N = len(y), weight.shape[1]
    out = torch.empty(P, N, dtype=y.dtype, device=y.device)
    if P:
        grid, tiles = _tiles(y, T, N)
        _project_forward[grid](y, weight, bias, out, P, **_common(y, weight, bias, T, eps, pairs), **tiles)
    return out


def project_backward(
    grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, T: int, eps: float, pairs: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of branch outputs, weights and biases."""
    (P, width), N = y.shape, weight.shape[1]
    M = width // T
    inside = T == 2 and M <= _DEEPEST and y.dtype != torch.float32
    keep = not (inside and M <= _SHALLOW)
    common = _common(y, weight, bias, T, eps, pairs)
    grid, tiles = _tiles(y, T, N, inside=inside)
    empty = torch.empty if P else torch.zeros  # of no position nothing is written
    dpre = torch.empty(T, P, N, dtype=y.dtype, device=y.device) if keep else grad
    parts = empty(grid[1], T * (M + 1) if inside else T, N, dtype=torch.float32, device=y.device)
    dy = torch.empty_like(y)
    if P:
        _project_backward[grid](grad, y, weight, bias, dpre, parts, P, INSIDE=inside, KEEP=keep, **common, **tiles)
    if keep:
        torch.bmm(dpre, weight.view(T, M, N).transpose(1, 2), out=by_branch(dy, T))
    elif P:
        tiles = {"BN": min(32, max(16, triton.next_power_of_2(N))), "num_warps": 4, "num_stages": 3, "maxnreg": 168}
        _project_backward_rows[(triton.cdiv(P, 64),)](grad, y, weight, bias, dy, P, **common, **tiles)
    total = parts.sum(0)
    dw = total[T:].to(weight.dtype) if inside else _weight_gradient(y, dpre)
    return dy, dw, None if bias is None else total[:T].to(bias.dtype, copy=True)


def _weight_gradient(y: Tensor, dpre: Tensor) -> Tensor:
    """``y_t^T · dpre_t`` of every branch, ``[T·M, K2]``."""
    T, P, N = dpre.shape
    M = y.shape[1] // T
    parts = math.gcd(P, 16) if P >= _MANY else 1
    dw = torch.empty(T, parts, M, N, dtype=y.dtype, device=y.device)
    for t, y_t in enumerate(by_branch(y, T)):
        if parts == 1:
            torch.mm(y_t.t(), dpre[t], out=dw[t, 0])
        else:
            rows, gradients_ = (x.unflatten(0, (parts, -1)) for x in (y_t, dpre[t]))
            torch.bmm(rows.transpose(1, 2), gradients_, out=dw[t])
    return dw.sum(1).view(T * M, N) if parts > 1 else dw.view(T * M, N)


_MANY = 65536
"""Positions from which the weights' gradient is summed in parts: cuBLAS does not divide the work of one by itself."""


def by_branch(y: Tensor, T: int) -> Tensor:
    """``[P, T·M]`` as ``[T, P, M]``, where it lies."""
    return y.view(len(y), T, y.shape[1] // T).transpose(0, 1)
