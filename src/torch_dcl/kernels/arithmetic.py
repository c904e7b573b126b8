"""The fusion's arithmetic inside a kernel, in float32, for two and for three responses.

It matches `torch_dcl.functional`: ``z = (Π v_t + ε)^(1/T)``, with gradients from the other branches and no intermediate
overflow. There are two versions. The quick one multiplies the responses directly and is safe for moderate values, which
all are unless training is about to diverge. The careful one forms the geometric mean first, then adds ε relative to the
larger of the two. `fused` and `gradients` choose per tile. A kernel short of registers runs the quick version
throughout, sums the range checks that `quick` and `quick_gradients` return, and repeats its tiles with the careful
version if the sum is not finite.
"""

import functools
from collections.abc import Mapping

import torch
import triton
import triton.language as tl

__all__ = [
    "OPTIONS",
    "as_float32",
    "careful",
    "careful_gradients",
    "constants",
    "fixed_statistics",
    "fused",
    "gradients",
    "quick",
    "quick_gradients",
    "relu",
    "scale_and_shift",
    "store_norm",
    "track_",
]  # fmt: skip

_MAX = tl.constexpr(3.4028234663852886e38)
_MODERATE = tl.constexpr(1e8)
_TOO_LARGE = tl.constexpr(1e28)
_LEAST_EPS = 1e-20


OPTIONS = {"enable_fp_fusion": True}
"""Compiler options of every kernel: allow fused multiply-add, whose default in Triton is about to change."""


@functools.cache
def constants(eps: float, count: int, dtype: torch.dtype) -> Mapping[str, object]:
    """The arguments of a kernel that depend on ε and on the dtype of its result.

    ``QUICK`` is the number of Newton steps of a cube root, or 0 if ε is too small for the quick version: next to a
    product that underflows it could be lost.
    """
    floor = max(float(eps ** (1 / count)), float(torch.finfo(torch.float32).tiny))
    steps = 3 if dtype == torch.float32 else 2
    quick = steps if eps >= _LEAST_EPS else 0
    return {"eps": float(eps), "floor": floor, "QUICK": quick, "LARGEST": torch.finfo(dtype).max}


@triton.jit
def as_float32(x):
    """Cast a scalar to float32: a compiler that traces a launch may pass float64, which would promote every operand."""
    return tl.cast(x, tl.float32)


@triton.jit
def relu(x):
    """ReLU that propagates NaN."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _saturate(x, LARGEST: tl.constexpr):
    """Saturate at the largest number of the result's dtype."""
    return tl.maximum(
        tl.minimum(x, LARGEST, propagate_nan=tl.PropagateNan.ALL), -LARGEST, propagate_nan=tl.PropagateNan.ALL
    )


@triton.jit
def _saturate_float16(x, LARGEST: tl.constexpr):
    """Saturate if moderate values can exceed the dtype, which only float16 does."""
    if LARGEST < 1e30:
        x = _saturate(x, LARGEST)
    return x


@triton.jit
def _inverse_cube_root(x, STEPS: tl.constexpr):
    """x^(-1/3) of a normal number: an initial guess from its exponent (4 % error), then 1e-5 after two Newton steps."""
    y = (0x54A20000 - x.to(tl.int32, bitcast=True) // 3).to(tl.float32, bitcast=True)
    third = x * (1.0 / 3.0)
    for _ in tl.static_range(STEPS):
        y *= 4.0 / 3.0 - (third * y) * (y * y)  # in this order nothing leaves the range
    return y


@triton.jit
def _moderate(a, b, c):
    """Whether no product of this tile can leave the range."""
    return tl.max(tl.maximum(tl.maximum(a, b), c)) <= _MODERATE


@triton.jit
def _quick(a, b, c, eps, T: tl.constexpr, PAIRS: tl.constexpr, STEPS: tl.constexpr):
    if T == 2:
        return tl.sqrt(a * b + eps)
    elif PAIRS:
        return (tl.sqrt(a * b + eps) + tl.sqrt(a * c + eps) + tl.sqrt(b * c + eps)) * (1.0 / 3.0)
    else:
        product = a * b * c + eps
        y = _inverse_cube_root(product, STEPS)
        return product * y * y


@triton.jit
def _quick_gradients(g, a, b, c, eps, T: tl.constexpr, PAIRS: tl.constexpr, STEPS: tl.constexpr):
    if T == 2:
        share = 0.5 * g * tl.rsqrt(a * b + eps)
        return share * b, share * a, c
    elif PAIRS:
        ab = tl.rsqrt(a * b + eps)
        ac = tl.rsqrt(a * c + eps)
        bc = tl.rsqrt(b * c + eps)
        share = g * (1.0 / 6.0)
        return share * (b * ab + c * ac), share * (a * ab + c * bc), share * (a * ac + b * bc)
    else:
        y = _inverse_cube_root(a * b * c + eps, STEPS)
        share = g * (1.0 / 3.0)
        a *= y
        b *= y
        c *= y
        return share * (b * c), share * (a * c), share * (a * b)


@triton.jit
def _cube_root(x):
    y = _inverse_cube_root(x, 3)
    return x * y * y


@triton.jit
def _careful2(a, b, floor):
    """√(a·b + floor²)."""
    mean = tl.sqrt(a) * tl.sqrt(b)
    large = tl.where(mean > floor, mean, floor)
    ratio = tl.where(mean > floor, floor / mean, mean / floor)
    return tl.where(mean != mean, mean, large * tl.sqrt(1 + ratio * ratio))


@triton.jit
def _careful3(a, b, c, floor):
    """∛(a·b·c + floor³)."""
    mean = _cube_root(a) * _cube_root(b) * _cube_root(c)
    large = tl.where(mean > floor, mean, floor)
    ratio = tl.where(mean > floor, floor / mean, mean / floor)
    return tl.where(mean != mean, mean, large * _cube_root(1 + ratio * ratio * ratio))


@triton.jit
def _slope2(g, z, other):
    """g · other / z."""
    return _saturate(_saturate(g / z, _MAX) * other, _MAX)


@triton.jit
def _slope3(g, z, b, c):
    """g · (b / z) · (c / z), through square roots: b / z alone may be out of range."""
    half = (tl.sqrt(b) / tl.sqrt(z)) * (tl.sqrt(c) / tl.sqrt(z))
    return _saturate(g * half * half, _MAX)


@triton.jit
def _careful(a, b, c, floor, T: tl.constexpr, PAIRS: tl.constexpr):
    a = _saturate(a, _MAX)
    b = _saturate(b, _MAX)
    c = _saturate(c, _MAX)
    if T == 2:
        return _careful2(a, b, floor)
    elif PAIRS:
        return (_careful2(a, b, floor) + _careful2(a, c, floor) + _careful2(b, c, floor)) / 3
    else:
        return _careful3(a, b, c, floor)


@triton.jit
def _careful_gradients(g, a, b, c, floor, T: tl.constexpr, PAIRS: tl.constexpr):
    a = _saturate(a, _MAX)
    b = _saturate(b, _MAX)
    c = _saturate(c, _MAX)
    if T == 2:
        z = _careful2(a, b, floor)
        return _slope2(g / 2, z, b), _slope2(g / 2, z, a), c
    elif PAIRS:
        ab = _careful2(a, b, floor)
        ac = _careful2(a, c, floor)
        bc = _careful2(b, c, floor)
        da = _slope2(g / 6, ab, b) + _slope2(g / 6, ac, c)
        db = _slope2(g / 6, ab, a) + _slope2(g / 6, bc, c)
        return da, db, _slope2(g / 6, ac, a) + _slope2(g / 6, bc, b)
    else:
        z = _careful3(a, b, c, floor)
        return _slope3(g / 3, z, b, c), _slope3(g / 3, z, a, c), _slope3(g / 3, z, a, b)


@triton.jit
def _through_relu(a, b, c, da, db, dc, LARGEST: tl.constexpr):
    """Backward of the ReLU: zero where a response is zero, saturated at the largest number of the dtype."""
    da = tl.where(a == 0, 0.0, _saturate(da, LARGEST))
    db = tl.where(b == 0, 0.0, _saturate(db, LARGEST))
    return da, db, tl.where(c == 0, 0.0, _saturate(dc, LARGEST))


@triton.jit
def careful(a, b, c, floor, T: tl.constexpr, PAIRS: tl.constexpr, LARGEST: tl.constexpr):
    """z of responses of any size."""
    return _saturate(_careful(a, b, c, floor, T, PAIRS), LARGEST)


@triton.jit
def careful_gradients(g, a, b, c, floor, T: tl.constexpr, PAIRS: tl.constexpr, LARGEST: tl.constexpr):
    """Gradients of the pre-activations, for responses of any size."""
    da, db, dc = _careful_gradients(g, a, b, c, floor, T, PAIRS)
    return _through_relu(a, b, c, da, db, dc, LARGEST)


@triton.jit
def _range_check(a, b, c, T: tl.constexpr, PAIRS: tl.constexpr):
    """A number that is finite if the direct product of these responses is accurate."""
    if T == 2:
        return a * b
    elif PAIRS:
        return a * b + a * c + b * c
    else:  # the product of the small ones may be lost beside a large one
        return (a + b + c) * _TOO_LARGE


@triton.jit
def quick(a, b, c, eps, T: tl.constexpr, PAIRS: tl.constexpr, STEPS: tl.constexpr, LARGEST: tl.constexpr):
    """z of moderate responses, and the range check: not finite where a response is too large."""
    return _saturate_float16(_quick(a, b, c, eps, T, PAIRS, STEPS), LARGEST), _range_check(a, b, c, T, PAIRS)


@triton.jit
def quick_gradients(g, a, b, c, eps, T: tl.constexpr, PAIRS: tl.constexpr, STEPS: tl.constexpr, LARGEST: tl.constexpr):
    """Gradients for moderate responses, and the range check of `quick`; the caller must check the gradients as well."""
    da, db, dc = _quick_gradients(g, a, b, c, eps, T, PAIRS, STEPS)
    da = tl.where(a == 0, 0.0, _saturate_float16(da, LARGEST))
    db = tl.where(b == 0, 0.0, _saturate_float16(db, LARGEST))
    return da, db, tl.where(c == 0, 0.0, _saturate_float16(dc, LARGEST)), _range_check(a, b, c, T, PAIRS)


@triton.jit
def fused(a, b, c, eps, floor, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, LARGEST: tl.constexpr):
    """z of a tile of responses. ``c`` is used for T = 3 alone; ``PAIRS`` averages over the pairs of three."""
    if QUICK == 0:
        z = careful(a, b, c, floor, T, PAIRS, LARGEST)
    elif _moderate(a, b, c):
        z = _saturate_float16(_quick(a, b, c, eps, T, PAIRS, QUICK), LARGEST)
    else:
        z = careful(a, b, c, floor, T, PAIRS, LARGEST)
    return z


@triton.jit
def gradients(g, a, b, c, eps, floor, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, LARGEST: tl.constexpr):
    """Gradients of the pre-activations: zero where a response is zero."""
    if QUICK == 0:
        da, db, dc = careful_gradients(g, a, b, c, floor, T, PAIRS, LARGEST)
    elif _moderate(tl.maximum(a, tl.abs(g)), b, c):
        da, db, dc, _ = quick_gradients(g, a, b, c, eps, T, PAIRS, QUICK, LARGEST)
    else:
        da, db, dc = careful_gradients(g, a, b, c, floor, T, PAIRS, LARGEST)
    return da, db, dc


@triton.jit
def scale_and_shift(mean, rstd, gamma, beta, n, t, N: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr):
    """The scale and the shift that a norm applies to the outputs n of branch t."""
    scale = rstd
    if GAMMA:
        scale *= tl.load(gamma + t * N + n, mask=n < N, other=0.0).to(tl.float32)
    shift = -mean * scale
    if BETA:
        shift += tl.load(beta + t * N + n, mask=n < N, other=0.0).to(tl.float32)
    return scale, shift


@triton.jit
def fixed_statistics(mean, variance, bias, epsilon, n, t, N: tl.constexpr, BIAS: tl.constexpr):
    """The running mean of the outputs n of branch t minus their bias, and their inverse standard deviation."""
    of = tl.load(mean + t * N + n, mask=n < N, other=0.0).to(tl.float32)
    if BIAS:
        of -= tl.load(bias + t * N + n, mask=n < N, other=0.0).to(tl.float32)
    return of, 1.0 / tl.sqrt_rn(tl.load(variance + t * N + n, mask=n < N, other=1.0).to(tl.float32) + epsilon)


@triton.jit
def store_norm(
    stats, mean, rstd, gamma, beta, n, t, N: tl.constexpr, T: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr
):
    """Write scale, shift, mean and inverse standard deviation, which the projection's kernels read."""
    scale, shift = scale_and_shift(mean, rstd, gamma, beta, n, t, N, GAMMA, BETA)
    inside, to = n < N, stats + t * N + n
    tl.store(to, scale, mask=inside)
    tl.store(to + T * N, shift, mask=inside)
    tl.store(to + 2 * T * N, mean, mask=inside)
    tl.store(to + 3 * T * N, rstd, mask=inside)


@triton.jit
def track_(running_mean, running_var, tracked, mean, variance, momentum, n, t, N: tl.constexpr, TRACK: tl.constexpr):
    """Update running statistics: TRACK is 1 for ``momentum``, 2 for the cumulative average over all batches."""
    inside = n < N
    factor = tl.zeros((), tl.float32) + momentum
    if TRACK == 2:  # the host increments the count afterwards, since other programs read it too
        factor = 1.0 / (tl.load(tracked) + 1).to(tl.float32)
    elif (tl.program_id(0) == 0) & (t == 0):
        tl.store(tracked, tl.load(tracked) + 1)
    of_mean, of_var = running_mean + t * N + n, running_var + t * N + n
    before = tl.load(of_mean, mask=inside, other=0.0).to(tl.float32)
    after = before + factor * (mean - before)
    tl.store(of_mean, after.to(running_mean.dtype.element_ty), mask=inside)
    before = tl.load(of_var, mask=inside, other=0.0).to(tl.float32)
    after = before + factor * (variance - before)
    tl.store(of_var, after.to(running_var.dtype.element_ty), mask=inside)
