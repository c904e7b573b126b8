"""The projection's kernels: T small products, biases, ReLU, product, ε and root of a tile, forward and backward.

The pre-activation is ``y · W + bias`` or, with a batch norm, ``(y · W) · scale + shift`` with scale and shift in
float32; then ``bias`` points to both, ``[2 or more, T, N]``.

A program owns a block of outputs and loops over positions; programs of the kernels in `rows` own positions. Registers
are scarce, so programs run the quick arithmetic throughout, and repeat their tiles with the careful one if a value was
too large. With FLAGGED a program skips the quick pass and reads from ``flags`` whether to run the careful one.

Any tensor stands in for an unused pointer, since a traced launch accepts no None.
"""

import triton
import triton.language as tl

from torch_dcl.kernels.arithmetic import (
    as_float32,
    careful,
    careful_gradients,
    fixed_statistics,
    quick,
    quick_gradients,
    relu,
    scale_and_shift,
)

__all__ = ["affine", "backward", "forward", "infer", "load_columns", "load_rows", "product", "sum_partials_"]


@triton.jit
def load_columns(
    w, bias, n, kind: tl.constexpr, t: tl.constexpr, N: tl.constexpr, M: tl.constexpr, T: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Load the weights of branch t for the outputs n, and the scale and the shift of their responses."""
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
def load_rows(y, p, P, t: tl.constexpr, T: tl.constexpr, M: tl.constexpr, BK: tl.constexpr):
    """Load the outputs of branch t at positions p."""
    k = tl.arange(0, BK)
    return tl.load(y + p[:, None] * (T * M) + t * M + k[None, :], mask=(p < P)[:, None] & (k < M)[None, :], other=0.0)


@triton.jit
def product(rows, w, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr):
    """A branch's outputs times weights, in float32."""
    return tl.dot(rows, w, tl.zeros((BM, BN), tl.float32), input_precision=PRECISION)


@triton.jit
def affine(x, scale, shift, NORM: tl.constexpr):
    """The pre-activation."""
    if NORM:
        return x * scale[None, :] + shift[None, :]
    else:
        return x + shift[None, :]


@triton.jit
def _response(rows, w, scale, shift, NORM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr):
    return relu(affine(product(rows, w, BM, BN, PRECISION), scale, shift, NORM))


@triton.jit
def _keep(low, weights, n, t: tl.constexpr, N: tl.constexpr, M: tl.constexpr, BK: tl.constexpr):
    """Write the rounded weights, once for each block of outputs."""
    k = tl.arange(0, BK)
    first = tl.where(tl.program_id(1) == 0, M, 0)
    tl.store(low + (t * M + k)[:, None] * N + n[None, :], weights, mask=(k < first)[:, None] & (n < N)[None, :])


@triton.jit
def _forward_pass(
    y, out, n, w0, s0, b0, w1, s1, b1, w2, s2, b2, P, eps, floor, CAREFUL: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, NORM: tl.constexpr,
    LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write z of this program's tiles; return 0 if all values were moderate, else NaN."""
    checks = tl.zeros((BM,), tl.float32)
    for m in range(tl.program_id(1), tl.cdiv(P, BM), tl.num_programs(1)):
        p = tl.arange(0, BM).to(tl.int64) + m * BM
        a = _response(load_rows(y, p, P, 0, T, M, BK), w0, s0, b0, NORM, BM, BN, PRECISION)
        b = _response(load_rows(y, p, P, 1, T, M, BK), w1, s1, b1, NORM, BM, BN, PRECISION)
        c = b
        if T == 3:
            c = _response(load_rows(y, p, P, 2, T, M, BK), w2, s2, b2, NORM, BM, BN, PRECISION)
        if CAREFUL:
            z = careful(a, b, c, floor, T, PAIRS, LARGEST)
        else:
            z, check = quick(a, b, c, eps, T, PAIRS, QUICK, LARGEST)
            checks += tl.sum(check, 1)
        to = out + p[:, None] * N + n[None, :]
        tl.store(to, z.to(out.dtype.element_ty), mask=(p < P)[:, None] & (n < N)[None, :])
    return tl.sum(checks * 0.0, 0)


@triton.jit
def _load_flag(flags):
    """The range check of another kernel for the tiles of this program: 0 or NaN."""
    return tl.load(flags + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0))


@triton.jit
def forward(
    y, w, bias, out, low, flags, P, eps, floor, FLAGGED: tl.constexpr, ROUNDED: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, BIAS: tl.constexpr,
    NORM: tl.constexpr, LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write z of a block of outputs, looping over positions; with ROUNDED also the weights in the dtype of y."""
    eps, floor = as_float32(eps), as_float32(floor)
    if FLAGGED:  # noqa: SIM102 (known when compiled, unlike the flag)
        if _load_flag(flags) == 0:
            return
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    w0, s0, b0 = load_columns(w, bias, n, y.dtype.element_ty, 0, N, M, T, BIAS, NORM, BN, BK)
    w1, s1, b1 = load_columns(w, bias, n, y.dtype.element_ty, 1, N, M, T, BIAS, NORM, BN, BK)
    w2, s2, b2 = load_columns(w, bias, n, y.dtype.element_ty, T - 1, N, M, T, BIAS, NORM, BN, BK)
    if ROUNDED:
        _keep(low, w0, n, 0, N, M, BK)
        _keep(low, w1, n, 1, N, M, BK)
        if T == 3:
            _keep(low, w2, n, 2, N, M, BK)
    moderate = float("nan")
    if QUICK > 0 and not FLAGGED:
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
    """`load_columns` with a norm of fixed statistics, computed from its tensors."""
    weights, _, _ = load_columns(w, bias, n, kind, t, N, M, T, False, 0, BN, BK)
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
    """Write z with a norm of fixed statistics, without gradients: every program reads the norm's tensors."""
    eps, floor, epsilon = as_float32(eps), as_float32(floor), as_float32(epsilon)
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
    """Sums of rows p and p + 8 of every 16, which one thread holds after a product: no exchange between threads."""
    return tl.sum(tl.reshape(x, (BM // 16, 2, 8, BN)), 1)


@triton.jit
def _store_partial(
    parts, total0, total1, total2, dw0, dw1, n, ACCUMULATE: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
    T: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write this program's partial sums: T rows for the biases, followed by those for the weights."""
    to = parts + tl.program_id(1).to(tl.int64) * (T * (M + 1) if ACCUMULATE else T) * N + n
    tl.store(to, total0, mask=n < N)
    tl.store(to + N, total1, mask=n < N)
    if T == 3:
        tl.store(to + 2 * N, total2, mask=n < N)
    if ACCUMULATE:
        k = tl.arange(0, BK)
        there = to[None, :] + (T + k)[:, None] * N
        inside = (k < M)[:, None] & (n < N)[None, :]
        tl.store(there, dw0, mask=inside)
        tl.store(there + M * N, dw1, mask=inside)


@triton.jit
def _backward_pass(
    grad, y, w, bias, dpre, parts, dy, P, eps, floor, CAREFUL: tl.constexpr, ACCUMULATE: tl.constexpr,
    KEEP: tl.constexpr, FULL: tl.constexpr, N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr,
    QUICK: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, LARGEST: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of this program's tiles; return 0 if all values were moderate, else NaN.

    ``parts`` receives the partial sums for the biases and, with ACCUMULATE, for the weights. With KEEP the gradients of
    the pre-activations are written for a later product. With FULL a program has all outputs and also writes the
    gradients of the branch outputs, without the part through the batch's statistics.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    w0, s0, b0 = load_columns(w, bias, n, y.dtype.element_ty, 0, N, M, T, BIAS, NORM, BN, BK)
    w1, s1, b1 = load_columns(w, bias, n, y.dtype.element_ty, 1, N, M, T, BIAS, NORM, BN, BK)
    w2, s2, b2 = load_columns(w, bias, n, y.dtype.element_ty, T - 1, N, M, T, BIAS, NORM, BN, BK)
    size = (tl.zeros((), tl.int64) + P) * N  # P = 1 is a constant here, and has no type of its own
    kind = grad.dtype.element_ty
    checks = tl.zeros((BM,), tl.float32)
    sum0 = tl.zeros((BM // 16, 8, BN), tl.float32)
    sum1 = tl.zeros((BM // 16, 8, BN), tl.float32)
    sum2 = tl.zeros((BM // 16, 8, BN), tl.float32)
    dw0 = tl.zeros((BK if ACCUMULATE else 1, BN), tl.float32)
    dw1 = tl.zeros((BK if ACCUMULATE else 1, BN), tl.float32)
    for m in range(tl.program_id(1), tl.cdiv(P, BM), tl.num_programs(1)):
        p = tl.arange(0, BM).to(tl.int64) + m * BM
        mask = (p < P)[:, None] & (n < N)[None, :]
        at = p[:, None] * N + n[None, :]
        g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        rows0 = load_rows(y, p, P, 0, T, M, BK)
        rows1 = load_rows(y, p, P, 1, T, M, BK)
        a = _response(rows0, w0, s0, b0, NORM, BM, BN, PRECISION)
        b = _response(rows1, w1, s1, b1, NORM, BM, BN, PRECISION)
        c = b
        if T == 3:
            c = _response(load_rows(y, p, P, 2, T, M, BK), w2, s2, b2, NORM, BM, BN, PRECISION)
        if CAREFUL:
            da, db, dc = careful_gradients(g, a, b, c, floor, T, PAIRS, LARGEST)
        else:
            da, db, dc, check = quick_gradients(g, a, b, c, eps, T, PAIRS, QUICK, LARGEST)
            checks += tl.sum(check, 1)
        if NORM:  # the sums for a norm's shift must use the rounded values that its scale is multiplied with
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
        if ACCUMULATE:
            dw0 = tl.dot(tl.trans(rows0), da.to(kind), dw0, input_precision=PRECISION)
            dw1 = tl.dot(tl.trans(rows1), db.to(kind), dw1, input_precision=PRECISION)
        if FULL:
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
    _store_partial(parts, total0, total1, total2, dw0, dw1, n, ACCUMULATE, N, M, T, BK)
    return tl.sum(checks * 0.0, 0) + tl.sum((total0 + total1 + total2) * 0.0, 0)


@triton.jit
def backward(
    grad, y, w, bias, dpre, parts, dy, flags, P, eps, floor, FLAGGED: tl.constexpr, ACCUMULATE: tl.constexpr,
    KEEP: tl.constexpr, FULL: tl.constexpr, N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr,
    QUICK: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr, LARGEST: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write gradients of biases and weights, or of the pre-activations, for a block of outputs."""
    eps, floor = as_float32(eps), as_float32(floor)
    if FLAGGED:  # noqa: SIM102 (known when compiled, unlike the flag)
        if _load_flag(flags) == 0:
            return
    moderate = float("nan")
    if QUICK > 0 and not FLAGGED:
        moderate = _backward_pass(
            grad, y, w, bias, dpre, parts, dy, P, eps, floor, False, ACCUMULATE, KEEP, FULL,
            N, M, T, PAIRS, QUICK, BIAS, NORM, LARGEST, BM, BN, BK, PRECISION,
        )  # fmt: skip
    if moderate != 0:
        _backward_pass(
            grad, y, w, bias, dpre, parts, dy, P, eps, floor, True, ACCUMULATE, KEEP, FULL,
            N, M, T, PAIRS, QUICK, BIAS, NORM, LARGEST, BM, BN, BK, PRECISION,
        )  # fmt: skip


@triton.jit
def sum_partials_(
    parts, dbias, dw, count, size, T: tl.constexpr, N: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum the partial sums of all programs into the gradients of biases and weights."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    totals = tl.zeros((AT_ONCE, BLOCK), tl.float32)
    for first in range(0, count, AT_ONCE):  # several at once, to overlap their loads
        part = first + tl.arange(0, AT_ONCE)
        at = parts + part.to(tl.int64)[:, None] * size + i[None, :]
        totals += tl.load(at, mask=(part < count)[:, None] & (i < size)[None, :], other=0.0)
    rounded = tl.sum(totals, 0).to(dbias.dtype.element_ty)
    tl.store(dbias + i, rounded, mask=i < T * N)
    tl.store(dw + i - T * N, rounded, mask=(i >= T * N) & (i < size))
