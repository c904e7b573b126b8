"""The projection's kernels: T small products, biases, ReLU, product, ε and root of a tile, forward and backward.

A response is ``y · W + bias`` or, behind a batch norm, ``(y · W) · scale + shift`` with scale and shift in float32:
then ``bias`` points to both, ``[2 or more, T, N]``.

A program keeps outputs and loops over positions; in `rows` are kernels whose programs keep positions. Registers are
scarce, so programs take the quick arithmetic throughout, and one that met values too large for it repeats its part with
care. With FOUND a program reads what another kernel met in its part, and leaves out the quick pass.

Pointers that a kernel does not use are given as any tensor: a compiler that traces the call takes no None.
"""

import triton
import triton.language as tl

from torch_dcl.kernels.arithmetic import (
    careful,
    careful_gradients,
    fixed_statistics,
    quick,
    quick_gradients,
    respond,
    scale_and_shift,
    single,
)

__all__ = ["add_parts_", "affine", "backward", "columns_of", "forward", "infer", "product", "rows_of"]


@triton.jit
def columns_of(
    w, bias, n, kind: tl.constexpr, t: tl.constexpr, N: tl.constexpr, M: tl.constexpr, T: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The weights of branch t for the outputs n, and the scale and the shift of their responses."""
    k = tl.arange(0, BK)
    weights = tl.load(w + (t * M + k)[:, None] * N + n[None, :], mask=(k < M)[:, None] & (n < N)[None, :], other=0.0)
    weights = weights.to(kind)
    if NORM:
        scale = tl.load(bias + t * N + n, mask=n < N, other=0.0)
        return weights, scale, tl.load(bias + (T + t) * N + n, mask=n < N, other=0.0)
    elif BIAS:
        shift = tl.load(bias + t * N + n, mask=n < N, other=0.0).to(tl.float32)
        return weights, shift, shift
    else:
        shift = tl.zeros((BN,), tl.float32)
        return weights, shift, shift


@triton.jit
def rows_of(y, p, P, t: tl.constexpr, T: tl.constexpr, M: tl.constexpr, BK: tl.constexpr):
    """The outputs of branch t at positions p."""
    k = tl.arange(0, BK)
    return tl.load(y + p[:, None] * (T * M) + t * M + k[None, :], mask=(p < P)[:, None] & (k < M)[None, :], other=0.0)


@triton.jit
def product(rows, w, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr):
    """A branch's outputs times weights, in float32."""
    return tl.dot(rows, w, tl.zeros((BM, BN), tl.float32), input_precision=PRECISION)


@triton.jit
def affine(x, scale, shift, NORM: tl.constexpr):
    """The response before its ReLU."""
    if NORM:
        return x * scale[None, :] + shift[None, :]
    else:
        return x + shift[None, :]


@triton.jit
def _response(rows, w, scale, shift, NORM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr):
    return respond(affine(product(rows, w, BM, BN, PRECISION), scale, shift, NORM))


@triton.jit
def _keep(low, weights, n, t: tl.constexpr, N: tl.constexpr, M: tl.constexpr, BK: tl.constexpr):
    """Write weights as they were computed with; the first program of every few outputs does it."""
    k = tl.arange(0, BK)
    first = tl.where(tl.program_id(1) == 0, M, 0)
    tl.store(low + (t * M + k)[:, None] * N + n[None, :], weights, mask=(k < first)[:, None] & (n < N)[None, :])


@triton.jit
def _forward_pass(
    y, out, n, w0, s0, b0, w1, s1, b1, w2, s2, b2, P, eps, floor, CAREFUL: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, NORM: tl.constexpr,
    LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """z of this program's outputs at its positions; whether everything was moderate, as 0 or NaN."""
    seen = tl.zeros((BM,), tl.float32)
    for m in range(tl.program_id(1), tl.cdiv(P, BM), tl.num_programs(1)):
        p = tl.arange(0, BM).to(tl.int64) + m * BM
        a = _response(rows_of(y, p, P, 0, T, M, BK), w0, s0, b0, NORM, BM, BN, PRECISION)
        b = _response(rows_of(y, p, P, 1, T, M, BK), w1, s1, b1, NORM, BM, BN, PRECISION)
        c = b
        if T == 3:
            c = _response(rows_of(y, p, P, 2, T, M, BK), w2, s2, b2, NORM, BM, BN, PRECISION)
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
    y, w, bias, out, low, found, P, eps, floor, FOUND: tl.constexpr, ROUNDED: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, BIAS: tl.constexpr,
    NORM: tl.constexpr, LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """z of a few outputs, position by position; with ROUNDED the weights in the type of y, as well."""
    eps, floor = single(eps), single(floor)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    w0, s0, b0 = columns_of(w, bias, n, y.dtype.element_ty, 0, N, M, T, BIAS, NORM, BN, BK)
    w1, s1, b1 = columns_of(w, bias, n, y.dtype.element_ty, 1, N, M, T, BIAS, NORM, BN, BK)
    w2, s2, b2 = columns_of(w, bias, n, y.dtype.element_ty, T - 1, N, M, T, BIAS, NORM, BN, BK)
    if ROUNDED:
        _keep(low, w0, n, 0, N, M, BK)
        _keep(low, w1, n, 1, N, M, BK)
        if T == 3:
            _keep(low, w2, n, 2, N, M, BK)
    moderate = float("nan")
    if FOUND:
        moderate = _met(found)
    elif QUICK > 0:
        moderate = _forward_pass(
            y, out, n, w0, s0, b0, w1, s1, b1, w2, s2, b2, P, eps, floor, False,
            N, M, T, PAIRS, QUICK, NORM, LARGEST, BM, BN, BK, PRECISION,
        )  # fmt: skip
    if moderate != 0:
        _forward_pass(
            y, out, n, w0, s0, b0, w1, s1, b1, w2, s2, b2, P, eps, floor, True,
            N, M, T, PAIRS, QUICK, NORM, LARGEST, BM, BN, BK, PRECISION,
        )  # fmt: skip


@triton.jit
def _normed_columns(
    w, bias, gamma, beta, mean, variance, epsilon, n, kind: tl.constexpr, t: tl.constexpr, N: tl.constexpr,
    M: tl.constexpr, T: tl.constexpr, BIAS: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """`columns_of` behind a norm of fixed statistics, from the norm itself."""
    weights, _, _ = columns_of(w, bias, n, kind, t, N, M, T, False, 0, BN, BK)
    of, rstd = fixed_statistics(mean, variance, bias, epsilon, n, t, N, BIAS)
    scale, shift = scale_and_shift(of, rstd, gamma, beta, n, t, N, GAMMA, BETA)
    return weights, scale, shift


@triton.jit
def infer(
    y, w, bias, out, gamma, beta, mean, variance, P, eps, floor, epsilon,
    N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, BIAS: tl.constexpr,
    GAMMA: tl.constexpr, BETA: tl.constexpr, LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """z behind a norm of fixed statistics, where nothing learns: every program looks at the norm itself."""
    eps, floor, epsilon = single(eps), single(floor), single(epsilon)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    w0, s0, b0 = _normed_columns(
        w, bias, gamma, beta, mean, variance, epsilon, n, y.dtype.element_ty, 0, N, M, T, BIAS, GAMMA, BETA, BN, BK
    )
    w1, s1, b1 = _normed_columns(
        w, bias, gamma, beta, mean, variance, epsilon, n, y.dtype.element_ty, 1, N, M, T, BIAS, GAMMA, BETA, BN, BK
    )
    w2, s2, b2 = w1, s1, b1
    if T == 3:
        w2, s2, b2 = _normed_columns(
            w, bias, gamma, beta, mean, variance, epsilon, n, y.dtype.element_ty, 2, N, M, T, BIAS, GAMMA, BETA, BN, BK
        )
    moderate = float("nan")
    if QUICK > 0:
        moderate = _forward_pass(
            y, out, n, w0, s0, b0, w1, s1, b1, w2, s2, b2, P, eps, floor, False,
            N, M, T, PAIRS, QUICK, 1, LARGEST, BM, BN, BK, PRECISION,
        )  # fmt: skip
    if moderate != 0:
        _forward_pass(
            y, out, n, w0, s0, b0, w1, s1, b1, w2, s2, b2, P, eps, floor, True,
            N, M, T, PAIRS, QUICK, 1, LARGEST, BM, BN, BK, PRECISION,
        )  # fmt: skip


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
    grad, y, w, bias, dpre, parts, dy, P, eps, floor, CAREFUL: tl.constexpr, INSIDE: tl.constexpr, KEEP: tl.constexpr,
    WHOLE: tl.constexpr, N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of this program's outputs over its positions; whether everything was moderate, as 0 or NaN.

    Into ``parts`` go the sums for the biases, and those for the weights if they are added up INSIDE. The gradients of
    the responses are written if a later product wants them, which is to KEEP them. A program that has the WHOLE of the
    outputs writes the gradients of the branches' outputs as well, but for what comes through the batch's statistics.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    w0, s0, b0 = columns_of(w, bias, n, y.dtype.element_ty, 0, N, M, T, BIAS, NORM, BN, BK)
    w1, s1, b1 = columns_of(w, bias, n, y.dtype.element_ty, 1, N, M, T, BIAS, NORM, BN, BK)
    w2, s2, b2 = columns_of(w, bias, n, y.dtype.element_ty, T - 1, N, M, T, BIAS, NORM, BN, BK)
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
        rows0 = rows_of(y, p, P, 0, T, M, BK)
        rows1 = rows_of(y, p, P, 1, T, M, BK)
        a = _response(rows0, w0, s0, b0, NORM, BM, BN, PRECISION)
        b = _response(rows1, w1, s1, b1, NORM, BM, BN, PRECISION)
        c = b
        if T == 3:
            c = _response(rows_of(y, p, P, 2, T, M, BK), w2, s2, b2, NORM, BM, BN, PRECISION)
        if CAREFUL:
            da, db, dc = careful_gradients(g, a, b, c, floor, T, PAIRS, LARGEST)
        else:
            da, db, dc, look = quick_gradients(g, a, b, c, eps, T, PAIRS, QUICK, LARGEST)
            seen += tl.sum(look, 1)
        if NORM:  # what is summed for a norm's shift must be what is multiplied for its scale
            da = da.to(kind).to(tl.float32)
            db = db.to(kind).to(tl.float32)
            dc = dc.to(kind).to(tl.float32)
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
        if WHOLE:
            if NORM:
                da *= s0[None, :]
                db *= s1[None, :]
            k = tl.arange(0, BK)
            to = dy + p[:, None] * (T * M) + k[None, :]
            inside = (p < P)[:, None] & (k < M)[None, :]
            tl.store(to, tl.dot(da.to(kind), tl.trans(w0), input_precision=PRECISION).to(kind), mask=inside)
            tl.store(to + M, tl.dot(db.to(kind), tl.trans(w1), input_precision=PRECISION).to(kind), mask=inside)
    total0 = tl.sum(tl.sum(sum0, 0), 0)
    total1 = tl.sum(tl.sum(sum1, 0), 0)
    total2 = tl.sum(tl.sum(sum2, 0), 0)
    _store_part(parts, total0, total1, total2, dw0, dw1, n, INSIDE, N, M, T, BK)
    return tl.sum(seen * 0.0, 0) + tl.sum((total0 + total1 + total2) * 0.0, 0)


@triton.jit
def backward(
    grad, y, w, bias, dpre, parts, dy, found, P, eps, floor, FOUND: tl.constexpr, INSIDE: tl.constexpr,
    KEEP: tl.constexpr, WHOLE: tl.constexpr, N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr,
    QUICK: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, LARGEST: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of biases and weights, or of the responses, for a few outputs, position by position."""
    eps, floor = single(eps), single(floor)
    moderate = float("nan")
    if FOUND:
        moderate = _met(found)
    elif QUICK > 0:
        moderate = _backward_pass(
            grad, y, w, bias, dpre, parts, dy, P, eps, floor, False, INSIDE, KEEP, WHOLE,
            N, M, T, PAIRS, QUICK, BIAS, NORM, LARGEST, BM, BN, BK, PRECISION,
        )  # fmt: skip
    if moderate != 0:
        _backward_pass(
            grad, y, w, bias, dpre, parts, dy, P, eps, floor, True, INSIDE, KEEP, WHOLE,
            N, M, T, PAIRS, QUICK, BIAS, NORM, LARGEST, BM, BN, BK, PRECISION,
        )  # fmt: skip


@triton.jit
def add_parts_(
    parts, dbias, dw, count, size, T: tl.constexpr, N: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr
):
    """The parts of all programs added up, the gradients of the biases apart from those of the weights."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    totals = tl.zeros((AT_ONCE, BLOCK), tl.float32)
    for first in range(0, count, AT_ONCE):  # several parts at once, for their loads to overlap
        part = first + tl.arange(0, AT_ONCE)
        at = parts + part.to(tl.int64)[:, None] * size + i[None, :]
        totals += tl.load(at, mask=(part < count)[:, None] & (i < size)[None, :], other=0.0)
    rounded = tl.sum(totals, 0).to(dbias.dtype.element_ty)
    tl.store(dbias + i, rounded, mask=i < T * N)
    tl.store(dw + i - T * N, rounded, mask=(i >= T * N) & (i < size))
