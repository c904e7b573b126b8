"""The projection's kernels whose programs own positions and loop over outputs: gradients of the branch outputs.

Arithmetic and arguments are those of `passes`.
"""

import triton
import triton.language as tl

from torch_dcl.kernels.arithmetic import as_float32, careful_gradients, quick_gradients, relu
from torch_dcl.kernels.passes import affine, load_columns, load_rows, product

__all__ = ["add_statistics_gradient_", "backward_rows"]


@triton.jit
def _through_norm(d, x, scale, slopes, n, t: tl.constexpr, N: tl.constexpr, T: tl.constexpr, NORM: tl.constexpr):
    """The gradient of a product x from that of its pre-activation: through a norm's scale and its statistics."""
    if NORM:
        d *= scale[None, :]
    if NORM == 2:
        slope = tl.load(slopes + (3 * T + t) * N + n, mask=n < N, other=0.0)
        shift = tl.load(slopes + (4 * T + t) * N + n, mask=n < N, other=0.0)
        d += x * slope[None, :] + shift[None, :]
    return d


@triton.jit
def _rows_pass(
    grad, y, w, bias, slopes, dy, P, eps, floor, CAREFUL: tl.constexpr,
    N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, BIAS: tl.constexpr,
    NORM: tl.constexpr, LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the branch outputs at this program's positions; return 0 if all was moderate, else NaN."""
    p = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    rows0 = load_rows(y, p, P, 0, T, M, BK)
    rows1 = load_rows(y, p, P, 1, T, M, BK)
    rows2 = load_rows(y, p, P, T - 1, T, M, BK)
    kind = grad.dtype.element_ty
    checks = tl.zeros((BM,), tl.float32)
    dy0 = tl.zeros((BM, BK), tl.float32)
    dy1 = tl.zeros((BM, BK), tl.float32)
    dy2 = tl.zeros((BM, BK if T == 3 else 1), tl.float32)
    for first in range(0, N, BN):
        n = first + tl.arange(0, BN)
        w0, s0, b0 = load_columns(w, bias, n, y.dtype.element_ty, 0, N, M, T, BIAS, NORM, BN, BK)
        w1, s1, b1 = load_columns(w, bias, n, y.dtype.element_ty, 1, N, M, T, BIAS, NORM, BN, BK)
        mask = (p < P)[:, None] & (n < N)[None, :]
        g = tl.load(grad + p[:, None] * N + n[None, :], mask=mask, other=0.0).to(tl.float32)
        x0 = product(rows0, w0, BM, BN, PRECISION)
        x1 = product(rows1, w1, BM, BN, PRECISION)
        a = relu(affine(x0, s0, b0, NORM))
        b = relu(affine(x1, s1, b1, NORM))
        c = b
        if T == 3:
            w2, s2, b2 = load_columns(w, bias, n, y.dtype.element_ty, 2, N, M, T, BIAS, NORM, BN, BK)
            x2 = product(rows2, w2, BM, BN, PRECISION)
            c = relu(affine(x2, s2, b2, NORM))
        if CAREFUL:
            da, db, dc = careful_gradients(g, a, b, c, floor, T, PAIRS, LARGEST)
        else:
            da, db, dc, check = quick_gradients(g, a, b, c, eps, T, PAIRS, QUICK, LARGEST)
            checks += tl.sum(check, 1)
        da = _through_norm(da, x0, s0, slopes, n, 0, N, T, NORM)
        db = _through_norm(db, x1, s1, slopes, n, 1, N, T, NORM)
        dy0 = tl.dot(da.to(kind), tl.trans(w0), dy0, input_precision=PRECISION)
        dy1 = tl.dot(db.to(kind), tl.trans(w1), dy1, input_precision=PRECISION)
        if T == 3:
            dc = _through_norm(dc, x2, s2, slopes, n, 2, N, T, NORM)
            dy2 = tl.dot(dc.to(kind), tl.trans(w2), dy2, input_precision=PRECISION)
    k = tl.arange(0, BK)
    to = dy + p[:, None] * (T * M) + k[None, :]
    inside = (p < P)[:, None] & (k < M)[None, :]
    tl.store(to, dy0.to(kind), mask=inside)
    tl.store(to + M, dy1.to(kind), mask=inside)
    if T == 3:
        tl.store(to + 2 * M, dy2.to(kind), mask=inside)
    found = tl.sum(tl.sum((dy0 + dy1) * 0.0, 1), 0) + tl.sum(tl.sum(dy2 * 0.0, 1), 0)
    return tl.sum(checks * 0.0, 0) + found


@triton.jit
def backward_rows(
    grad, y, w, bias, slopes, dy, P, eps, floor,
    N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, BIAS: tl.constexpr,
    NORM: tl.constexpr, LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the branch outputs at a block of positions.

    NORM is 0 without a norm, 1 with fixed statistics and 2 with those of the batch, through which a gradient reaches
    every position: the last two of ``slopes`` ``[5, T, N]``.
    """
    eps, floor = as_float32(eps), as_float32(floor)
    moderate = float("nan")
    if QUICK > 0:
        moderate = _rows_pass(
            grad, y, w, bias, slopes, dy, P, eps, floor, False,
            N, M, T, PAIRS, QUICK, BIAS, NORM, LARGEST, BM, BN, BK, PRECISION,
        )  # fmt: skip
    if moderate != 0:
        _rows_pass(
            grad, y, w, bias, slopes, dy, P, eps, floor, True,
            N, M, T, PAIRS, QUICK, BIAS, NORM, LARGEST, BM, BN, BK, PRECISION,
        )  # fmt: skip


@triton.jit
def add_statistics_gradient_(
    y, stats, w, slopes, dy, P, N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of the branch outputs the part through the batch's statistics.

    It is an affine map of a branch's y, the same at every position: W · diag(slope) · Wᵀ and a constant, see
    `moments`. Since the means of y may be large, y is centred first; the map is divided by its largest entry, so that
    half precision can hold it whatever the loss scale.
    """
    n = tl.arange(0, BN)
    k = tl.arange(0, BK)  # the filters of all branches
    kind = y.dtype.element_ty
    inside = (k < T * M)[:, None] & (n < N)[None, :]
    W = tl.load(w + k[:, None] * N + n[None, :], mask=inside, other=0.0).to(tl.float32)
    own = (k // M * N)[:, None] + n[None, :]  # in [T, N]
    slope = tl.load(slopes + 3 * T * N + own, mask=inside, other=0.0)
    shift = tl.load(slopes + 4 * T * N + own, mask=inside, other=0.0)
    mean = tl.load(stats + 2 * T * N + own, mask=inside, other=0.0)
    means = tl.load(stats + 6 * T * N + k, mask=k < T * M, other=0.0)
    linear = tl.dot(W * slope, tl.trans(W), input_precision="tf32x3")
    linear = tl.where((k // M)[:, None] == (k // M)[None, :], linear, 0.0)
    largest = tl.max(tl.max(tl.abs(linear), 1), 0)
    unit = tl.where(largest > 0, largest, 1.0)
    linear = (linear / unit).to(kind)
    constant = tl.sum(W * (slope * mean + shift), 1)
    for m in range(tl.program_id(0), tl.cdiv(P, BM), tl.num_programs(0)):
        p = tl.arange(0, BM).to(tl.int64) + m * BM
        there = (p < P)[:, None] & (k < T * M)[None, :]
        at = p[:, None] * (T * M) + k[None, :]
        centred = (tl.load(y + at, mask=there, other=0.0).to(tl.float32) - means[None, :]).to(kind)
        total = tl.load(dy + at, mask=there, other=0.0).to(tl.float32)
        total += tl.dot(centred, linear) * unit + constant[None, :]
        tl.store(dy + at, total.to(kind), mask=there)
