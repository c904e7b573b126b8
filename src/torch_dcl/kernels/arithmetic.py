"""The fusion's arithmetic inside a kernel, in float32, for two and for three responses.

It is that of `torch_dcl.functional`: ``z = (Π v_t + ε)^(1/T)``, gradients from the other branches; nothing overflows on
the way to a result that does not. As long as all values of a tile are of moderate size, as they are unless a training
is about to diverge, the product is formed as it stands. Otherwise the geometric mean is formed first, and ε joins it
through the larger of the two. `fused` and `gradients` look at the values first. A kernel that is short of registers
goes the quick way everywhere, adds up what `quick` and `quick_gradients` give it to look at, and goes the careful way
once more if the sum is not finite.
"""

import functools
from collections.abc import Mapping

import torch
import triton
import triton.language as tl

__all__ = [
    "OPTIONS",
    "careful",
    "careful_gradients",
    "constants",
    "fixed_statistics",
    "fused",
    "gradients",
    "know",
    "quick",
    "quick_gradients",
    "respond",
    "scale_and_shift",
    "single",
    "track_",
]  # fmt: skip

_MAX = tl.constexpr(3.4028234663852886e38)
_MODERATE = tl.constexpr(1e8)
_TOO_LARGE = tl.constexpr(1e28)
_LEAST_EPS = 1e-20


OPTIONS = {"enable_fp_fusion": True}
"""What every kernel is compiled with: a product and a sum may be one instruction. Triton's own default is to change."""


@functools.cache
def constants(eps: float, count: int, dtype: torch.dtype) -> Mapping[str, object]:
    """What a kernel is told about ε, and about the type that it writes.

    ``QUICK`` is 0 where ε is so small that it could be lost beside a product that underflows; then the geometric mean
    is always formed first. Else it is the number of Newton's steps that a cube root takes.
    """
    floor = max(float(eps ** (1 / count)), float(torch.finfo(torch.float32).tiny))
    steps = 3 if dtype == torch.float32 else 2
    quick = steps if eps >= _LEAST_EPS else 0
    return {"eps": float(eps), "floor": floor, "QUICK": quick, "LARGEST": torch.finfo(dtype).max}


@triton.jit
def single(x):
    """A number in float32: a compiler that traces a launch may give it in float64, and all that it meets with it."""
    return tl.cast(x, tl.float32)


@triton.jit
def respond(x):
    """relu; NaN stays."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _narrow(x, LARGEST: tl.constexpr):
    """Saturate at the largest number of the type that is written."""
    return tl.maximum(
        tl.minimum(x, LARGEST, propagate_nan=tl.PropagateNan.ALL), -LARGEST, propagate_nan=tl.PropagateNan.ALL
    )


@triton.jit
def _fitted(x, LARGEST: tl.constexpr):
    """Saturate where moderate values can be too large, which is in float16 alone."""
    if LARGEST < 1e30:
        x = _narrow(x, LARGEST)
    return x


@triton.jit
def _inverse_cube_root(x, STEPS: tl.constexpr):
    """x^(-1/3) of a normal number: a first guess from its exponent, good to 4 %, then 1e-5 after two steps."""
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
    return _narrow(_narrow(g / z, _MAX) * other, _MAX)


@triton.jit
def _slope3(g, z, b, c):
    """g · (b / z) · (c / z), through square roots: b / z alone may be out of range."""
    half = (tl.sqrt(b) / tl.sqrt(z)) * (tl.sqrt(c) / tl.sqrt(z))
    return _narrow(g * half * half, _MAX)


@triton.jit
def _careful(a, b, c, floor, T: tl.constexpr, PAIRS: tl.constexpr):
    a = _narrow(a, _MAX)
    b = _narrow(b, _MAX)
    c = _narrow(c, _MAX)
    if T == 2:
        return _careful2(a, b, floor)
    elif PAIRS:
        return (_careful2(a, b, floor) + _careful2(a, c, floor) + _careful2(b, c, floor)) / 3
    else:
        return _careful3(a, b, c, floor)


@triton.jit
def _careful_gradients(g, a, b, c, floor, T: tl.constexpr, PAIRS: tl.constexpr):
    a = _narrow(a, _MAX)
    b = _narrow(b, _MAX)
    c = _narrow(c, _MAX)
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
def _alive(a, b, c, da, db, dc, LARGEST: tl.constexpr):
    """Gradients before the ReLU, zero where a response is, in the range of the type that is written."""
    da = tl.where(a == 0, 0.0, _narrow(da, LARGEST))
    db = tl.where(b == 0, 0.0, _narrow(db, LARGEST))
    return da, db, tl.where(c == 0, 0.0, _narrow(dc, LARGEST))


@triton.jit
def careful(a, b, c, floor, T: tl.constexpr, PAIRS: tl.constexpr, LARGEST: tl.constexpr):
    """z of any responses that there are."""
    return _narrow(_careful(a, b, c, floor, T, PAIRS), LARGEST)


@triton.jit
def careful_gradients(g, a, b, c, floor, T: tl.constexpr, PAIRS: tl.constexpr, LARGEST: tl.constexpr):
    """Gradients of the responses before their ReLU, whatever the responses are."""
    da, db, dc = _careful_gradients(g, a, b, c, floor, T, PAIRS)
    return _alive(a, b, c, da, db, dc, LARGEST)


@triton.jit
def _look(a, b, c, T: tl.constexpr, PAIRS: tl.constexpr):
    """A number that is finite as long as products of these responses can be trusted."""
    if T == 2:
        return a * b
    elif PAIRS:
        return a * b + a * c + b * c
    else:  # the product of the small ones may be lost beside a large one
        return (a + b + c) * _TOO_LARGE


@triton.jit
def quick(a, b, c, eps, T: tl.constexpr, PAIRS: tl.constexpr, STEPS: tl.constexpr, LARGEST: tl.constexpr):
    """z of moderate responses, and a number that is not finite where they are not moderate."""
    return _fitted(_quick(a, b, c, eps, T, PAIRS, STEPS), LARGEST), _look(a, b, c, T, PAIRS)


@triton.jit
def quick_gradients(g, a, b, c, eps, T: tl.constexpr, PAIRS: tl.constexpr, STEPS: tl.constexpr, LARGEST: tl.constexpr):
    """Gradients for moderate responses, and the number of `quick`; look at the gradients as well."""
    da, db, dc = _quick_gradients(g, a, b, c, eps, T, PAIRS, STEPS)
    da = tl.where(a == 0, 0.0, _fitted(da, LARGEST))
    db = tl.where(b == 0, 0.0, _fitted(db, LARGEST))
    return da, db, tl.where(c == 0, 0.0, _fitted(dc, LARGEST)), _look(a, b, c, T, PAIRS)


@triton.jit
def fused(a, b, c, eps, floor, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, LARGEST: tl.constexpr):
    """z of a tile of responses; ``c`` counts for T = 3 alone, ``PAIRS`` takes the mean over the pairs of three."""
    if QUICK == 0:
        z = careful(a, b, c, floor, T, PAIRS, LARGEST)
    elif _moderate(a, b, c):
        z = _fitted(_quick(a, b, c, eps, T, PAIRS, QUICK), LARGEST)
    else:
        z = careful(a, b, c, floor, T, PAIRS, LARGEST)
    return z


@triton.jit
def gradients(g, a, b, c, eps, floor, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, LARGEST: tl.constexpr):
    """Gradients of the responses before their ReLU: zero where a response is."""
    if QUICK == 0:
        da, db, dc = careful_gradients(g, a, b, c, floor, T, PAIRS, LARGEST)
    elif _moderate(tl.maximum(a, tl.abs(g)), b, c):
        da, db, dc, _ = quick_gradients(g, a, b, c, eps, T, PAIRS, QUICK, LARGEST)
    else:
        da, db, dc = careful_gradients(g, a, b, c, floor, T, PAIRS, LARGEST)
    return da, db, dc


@triton.jit
def scale_and_shift(mean, rstd, gamma, beta, n, t, N: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr):
    """A norm of the outputs n of branch t, as what it does to responses."""
    scale = rstd
    if GAMMA:
        scale *= tl.load(gamma + t * N + n, mask=n < N, other=0.0).to(tl.float32)
    shift = -mean * scale
    if BETA:
        shift += tl.load(beta + t * N + n, mask=n < N, other=0.0).to(tl.float32)
    return scale, shift


@triton.jit
def fixed_statistics(mean, variance, bias, epsilon, n, t, N: tl.constexpr, BIAS: tl.constexpr):
    """The running mean of the outputs n of branch t, less the bias before it, and the inverse of their deviation."""
    of = tl.load(mean + t * N + n, mask=n < N, other=0.0).to(tl.float32)
    if BIAS:
        of -= tl.load(bias + t * N + n, mask=n < N, other=0.0).to(tl.float32)
    return of, 1.0 / tl.sqrt_rn(tl.load(variance + t * N + n, mask=n < N, other=1.0).to(tl.float32) + epsilon)


@triton.jit
def know(
    known, mean, rstd, gamma, beta, n, t, N: tl.constexpr, T: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr
):
    """Write what the projection's kernels read of a norm, and what its backward kernel does."""
    scale, shift = scale_and_shift(mean, rstd, gamma, beta, n, t, N, GAMMA, BETA)
    inside, to = n < N, known + t * N + n
    tl.store(to, scale, mask=inside)
    tl.store(to + T * N, shift, mask=inside)
    tl.store(to + 2 * T * N, mean, mask=inside)
    tl.store(to + 3 * T * N, rstd, mask=inside)


@triton.jit
def track_(running_mean, running_var, tracked, mean, variance, momentum, n, t, N: tl.constexpr, TRACK: tl.constexpr):
    """Move running statistics towards those of a batch: TRACK is 1 for ``momentum``, 2 for the mean of all batches."""
    inside = n < N
    factor = tl.zeros((), tl.float32) + momentum
    if TRACK == 2:  # the mean over all batches; whoever launches counts them, for other programs read the count too
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
