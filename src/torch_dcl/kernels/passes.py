"""The projection's kernels: T small products, biases, ReLU, product, ε and root of a tile, forward and backward.

A program that keeps outputs goes over positions, and one that keeps positions goes over outputs. What they run short of
is registers, so they take the quick arithmetic throughout, and a program that met values too large for it goes over its
part once more with care. ``found`` tells a program what another kernel met there, so that it can leave out the first.
"""

import triton
import triton.language as tl

from torch_dcl.kernels.arithmetic import careful, careful_gradients, quick, quick_gradients, respond

__all__ = ["add_parts_", "backward", "backward_rows", "forward"]


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
    y, w, bias, out, P, eps, floor, CAREFUL: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, BIAS: tl.constexpr,
    LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """z of this program's outputs at its positions; whether everything was moderate, as 0 or NaN."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    w0, b0 = _columns(w, bias, n, 0, N, M, BIAS, BN, BK)
    w1, b1 = _columns(w, bias, n, 1, N, M, BIAS, BN, BK)
    w2, b2 = _columns(w, bias, n, T - 1, N, M, BIAS, BN, BK)
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
def _met(found):
    """What another kernel's program met in the part of this one, as 0 or NaN."""
    return tl.load(found + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0))


@triton.jit
def forward(
    y, w, bias, out, found, P, eps, floor,
    N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, BIAS: tl.constexpr,
    LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """z of a few outputs, position by position."""
    moderate = float("nan")
    if found is not None:
        moderate = _met(found)
    elif QUICK > 0:
        moderate = _forward_pass(
            y, w, bias, out, P, eps, floor, False, N, M, T, PAIRS, QUICK, BIAS, LARGEST, BM, BN, BK, PRECISION
        )
    if moderate != 0:
        _forward_pass(y, w, bias, out, P, eps, floor, True, N, M, T, PAIRS, QUICK, BIAS, LARGEST, BM, BN, BK, PRECISION)


@triton.jit
def _pairs_of_rows(x, BM: tl.constexpr, BN: tl.constexpr):
    """Rows p and p + 8 of every 16 added up. A thread holds both after a product, so that it takes no exchange."""
    return tl.sum(tl.reshape(x, (BM // 16, 2, 8, BN)), 1)


@triton.jit
def _store_part(
    parts, total0, total1, total2, dw0, dw1, n, INSIDE: tl.constexpr, N: tl.constexpr, M: tl.constexpr, T: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """This program's share: T rows for the biases, and behind them those for the weights."""
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
def _backward_pass(
    grad, y, w, bias, dpre, parts, P, eps, floor, CAREFUL: tl.constexpr, INSIDE: tl.constexpr, KEEP: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, BIAS: tl.constexpr,
    LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of this program's outputs over its positions; whether everything was moderate, as 0 or NaN.

    Into ``parts`` go the sums for the biases, and those for the weights if they are added up INSIDE. The gradients of
    the responses are written if a later product wants them, which is to KEEP them.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    w0, b0 = _columns(w, bias, n, 0, N, M, BIAS, BN, BK)
    w1, b1 = _columns(w, bias, n, 1, N, M, BIAS, BN, BK)
    w2, b2 = _columns(w, bias, n, T - 1, N, M, BIAS, BN, BK)
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
    _store_part(parts, total0, total1, total2, dw0, dw1, n, INSIDE, N, M, T, BK)
    return tl.sum(seen * 0.0, 0) + tl.sum((total0 + total1 + total2) * 0.0, 0)


@triton.jit
def backward(
    grad, y, w, bias, dpre, parts, found, P, eps, floor, INSIDE: tl.constexpr, KEEP: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, BIAS: tl.constexpr,
    LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of biases and weights, or of the responses, for a few outputs, position by position."""
    moderate = float("nan")
    if found is not None:
        moderate = _met(found)
    elif QUICK > 0:
        moderate = _backward_pass(
            grad, y, w, bias, dpre, parts, P, eps, floor, False, INSIDE, KEEP,
            N, M, T, PAIRS, QUICK, BIAS, LARGEST, BM, BN, BK, PRECISION,
        )  # fmt: skip
    if moderate != 0:
        _backward_pass(
            grad, y, w, bias, dpre, parts, P, eps, floor, True, INSIDE, KEEP,
            N, M, T, PAIRS, QUICK, BIAS, LARGEST, BM, BN, BK, PRECISION,
        )  # fmt: skip


@triton.jit
def _rows_pass(
    grad, y, w, bias, dy, P, eps, floor, CAREFUL: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, QUICK: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of two branches' outputs at this program's positions; whether everything was moderate."""
    p = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    rows0 = _rows(y, p, P, 0, 2, M, BK)
    rows1 = _rows(y, p, P, 1, 2, M, BK)
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
    k = tl.arange(0, BK)
    to = dy + p[:, None] * (2 * M) + k[None, :]
    inside = (p < P)[:, None] & (k < M)[None, :]
    tl.store(to, dy0.to(kind), mask=inside)
    tl.store(to + M, dy1.to(kind), mask=inside)
    return tl.sum(seen * 0.0, 0) + tl.sum(tl.sum((dy0 + dy1) * 0.0, 1), 0)


@triton.jit
def backward_rows(
    grad, y, w, bias, dy, P, eps, floor,
    N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, BIAS: tl.constexpr,
    LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of two branches' outputs at a few positions."""
    moderate = float("nan")
    if QUICK > 0:
        moderate = _rows_pass(
            grad, y, w, bias, dy, P, eps, floor, False, N, M, QUICK, BIAS, LARGEST, BM, BN, BK, PRECISION
        )
    if moderate != 0:
        _rows_pass(grad, y, w, bias, dy, P, eps, floor, True, N, M, QUICK, BIAS, LARGEST, BM, BN, BK, PRECISION)


@triton.jit
def add_parts_(
    parts, dbias, dw, count, size, T: tl.constexpr, N: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr
):
    """The parts of all programs added up, the gradients of the biases apart from those of the weights."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, count, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        at = parts + part.to(tl.int64)[:, None] * size + i[None, :]
        total += tl.sum(tl.load(at, mask=(part < count)[:, None] & (i < size)[None, :], other=0.0), 0)
    rounded = total.to(dbias.dtype.element_ty)
    tl.store(dbias + i, rounded, mask=i < T * N)
    tl.store(dw + i - T * N, rounded, mask=(i >= T * N) & (i < size))
