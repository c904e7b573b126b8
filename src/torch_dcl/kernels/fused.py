"""Concept fusion on the GPU: responses to z, and branch outputs to z, each as one kernel with a backward of its own.

Each kernel reads every value once and writes every result once. The projection forms the T small products of a tile,
adds the biases, rectifies, multiplies and takes the root before anything is written, so that the responses v never
reach memory; its backward forms them once more. The arithmetic is that of `torch_dcl.functional`, in float32: the
geometric mean first, then ε through the larger of the two, so that nothing overflows on the way to a result that does
not.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["fuse_backward", "fuse_forward", "project_backward", "project_forward"]

_BLOCK = 1024
_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _respond(x):
    """relu, with an infinite response counted as the largest number; NaN stays."""
    x = tl.where(x <= 0, 0.0, x)
    return tl.where(x > _MAX, _MAX, x)


@triton.jit
def _cube_root(x):
    return tl.exp2(tl.log2(x) / 3)


@triton.jit
def _fuse2(a, b, floor):
    """√(a·b + floor²)."""
    mean = tl.sqrt(a) * tl.sqrt(b)
    large = tl.where(mean > floor, mean, floor)
    ratio = tl.where(mean > floor, floor / mean, mean / floor)
    return tl.where(mean != mean, mean, large * tl.sqrt(1 + ratio * ratio))


@triton.jit
def _fuse3(a, b, c, floor):
    """∛(a·b·c + floor³)."""
    mean = _cube_root(a) * _cube_root(b) * _cube_root(c)
    large = tl.where(mean > floor, mean, floor)
    ratio = tl.where(mean > floor, floor / mean, mean / floor)
    return tl.where(mean != mean, mean, large * _cube_root(1 + ratio * ratio * ratio))


@triton.jit
def _bounded(x):
    x = tl.where(x > _MAX, _MAX, x)
    return tl.where(x < -_MAX, -_MAX, x)


@triton.jit
def _slope2(g, z, other, own):
    """g · other / z where the branch is alive."""
    return tl.where(own == 0, 0.0, _bounded(_bounded(g / z) * other))


@triton.jit
def _slope3(g, z, b, c, own):
    """g · (b / z) · (c / z) where the branch is alive, through square roots: b / z alone may be out of range."""
    half = (tl.sqrt(b) / tl.sqrt(z)) * (tl.sqrt(c) / tl.sqrt(z))
    return tl.where(own == 0, 0.0, _bounded(g * half * half))


@triton.jit
def _fused(a, b, c, floor, T: tl.constexpr, PAIRS: tl.constexpr):
    if T == 2:
        return _fuse2(a, b, floor)
    elif PAIRS:
        return (_fuse2(a, b, floor) + _fuse2(a, c, floor) + _fuse2(b, c, floor)) / 3
    else:
        return _fuse3(a, b, c, floor)


@triton.jit
def _gradients(g, a, b, c, floor, T: tl.constexpr, PAIRS: tl.constexpr):
    if T == 2:
        z = _fuse2(a, b, floor)
        return _slope2(g / 2, z, b, a), _slope2(g / 2, z, a, b), c
    elif PAIRS:
        ab = _fuse2(a, b, floor)
        ac = _fuse2(a, c, floor)
        bc = _fuse2(b, c, floor)
        da = _slope2(g / 6, ab, b, a) + _slope2(g / 6, ac, c, a)
        db = _slope2(g / 6, ab, a, b) + _slope2(g / 6, bc, c, b)
        return da, db, _slope2(g / 6, ac, a, c) + _slope2(g / 6, bc, b, c)
    else:
        z = _fuse3(a, b, c, floor)
        return _slope3(g / 3, z, b, c, a), _slope3(g / 3, z, a, c, b), _slope3(g / 3, z, a, b, c)


@triton.jit
def _narrow(x, LARGEST: tl.constexpr):
    """Saturate at the largest number of the type that is written."""
    x = tl.where(x > LARGEST, LARGEST, x)
    return tl.where(x < -LARGEST, -LARGEST, x)


@triton.jit
def _fuse_forward(
    p0, p1, p2, out, size, floor,
    T: tl.constexpr, PAIRS: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    a = _respond(tl.load(p0 + i, mask=inside, other=0.0).to(tl.float32))
    b = _respond(tl.load(p1 + i, mask=inside, other=0.0).to(tl.float32))
    c = b
    if T == 3:
        c = _respond(tl.load(p2 + i, mask=inside, other=0.0).to(tl.float32))
    z = _narrow(_fused(a, b, c, floor, T, PAIRS), LARGEST)
    tl.store(out + i, z.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _fuse_backward(
    grad, p0, p1, p2, d0, d1, d2, size, floor,
    T: tl.constexpr, PAIRS: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    g = tl.load(grad + i, mask=inside, other=0.0).to(tl.float32)
    a = _respond(tl.load(p0 + i, mask=inside, other=0.0).to(tl.float32))
    b = _respond(tl.load(p1 + i, mask=inside, other=0.0).to(tl.float32))
    c = b
    if T == 3:
        c = _respond(tl.load(p2 + i, mask=inside, other=0.0).to(tl.float32))
    da, db, dc = _gradients(g, a, b, c, floor, T, PAIRS)
    kind = d0.dtype.element_ty
    tl.store(d0 + i, _narrow(da, LARGEST).to(kind), mask=inside)
    tl.store(d1 + i, _narrow(db, LARGEST).to(kind), mask=inside)
    if T == 3:
        tl.store(d2 + i, _narrow(dc, LARGEST).to(kind), mask=inside)


@triton.jit
def _response(
    y, w, bias, p, n, P, N, stride, M: tl.constexpr, t: tl.constexpr,
    BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """v of branch t on a tile: positions p, outputs n."""
    total = tl.zeros((BM, BN), tl.float32)
    rows = y + p.to(tl.int64)[:, None] * stride + t * M
    for k0 in range(0, M, BK):
        k = k0 + tl.arange(0, BK)
        a = tl.load(rows + k[None, :], mask=(p < P)[:, None] & (k < M)[None, :], other=0.0)
        b = tl.load(w + (t * M + k)[:, None] * N + n[None, :], mask=(k < M)[:, None] & (n < N)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + t * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    return _respond(total)


@triton.jit
def _tile(P, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Positions and outputs of a program; neighbours share positions, so that y is read from the cache."""
    pid = tl.program_id(0)
    across = tl.cdiv(N, BN)
    m, n = tl.swizzle2d(pid // across, pid % across, tl.cdiv(P, BM), across, GROUP)
    return m, m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)


@triton.jit
def _project_forward(
    y, w, bias, out, P, N, stride, floor,
    M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    _, p, n = _tile(P, N, BM, BN, GROUP)
    a = _response(y, w, bias, p, n, P, N, stride, M, 0, BIAS, BM, BN, BK, PRECISION)
    b = _response(y, w, bias, p, n, P, N, stride, M, 1, BIAS, BM, BN, BK, PRECISION)
    c = b
    if T == 3:
        c = _response(y, w, bias, p, n, P, N, stride, M, 2, BIAS, BM, BN, BK, PRECISION)
    z = _narrow(_fused(a, b, c, floor, T, PAIRS), LARGEST)
    to = out + p.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(to, z.to(out.dtype.element_ty), mask=(p < P)[:, None] & (n < N)[None, :])


@triton.jit
def _project_backward(
    grad, y, w, bias, dpre, dbias, P, N, stride, floor,
    M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    m, p, n = _tile(P, N, BM, BN, GROUP)
    a = _response(y, w, bias, p, n, P, N, stride, M, 0, BIAS, BM, BN, BK, PRECISION)
    b = _response(y, w, bias, p, n, P, N, stride, M, 1, BIAS, BM, BN, BK, PRECISION)
    c = b
    if T == 3:
        c = _response(y, w, bias, p, n, P, N, stride, M, 2, BIAS, BM, BN, BK, PRECISION)
    mask = (p < P)[:, None] & (n < N)[None, :]
    at = p.to(tl.int64)[:, None] * N + n[None, :]
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    da, db, dc = _gradients(g, a, b, c, floor, T, PAIRS)
    size = (tl.zeros((), tl.int64) + P) * N  # P = 1 is a constant here, and has no type of its own
    _keep(dpre, dbias, da, at, m, n, N, 0, T, mask, BIAS, LARGEST)
    _keep(dpre + size, dbias, db, at, m, n, N, 1, T, mask, BIAS, LARGEST)
    if T == 3:
        _keep(dpre + 2 * size, dbias, dc, at, m, n, N, 2, T, mask, BIAS, LARGEST)


@triton.jit
def _keep(dpre, dbias, d, at, m, n, N, t, T: tl.constexpr, mask, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    tl.store(dpre + at, _narrow(d, LARGEST).to(dpre.dtype.element_ty), mask=mask)
    if BIAS:
        part = tl.sum(tl.where(mask, d, 0.0), 0)
        tl.store(dbias + (m.to(tl.int64) * T + t) * N + n, part, mask=n < N)


def _floor(eps: float, fused: int) -> float:
    return max(float(eps ** (1 / fused)), float(torch.finfo(torch.float32).tiny))


def _common(x: Tensor, T: int, pairs: bool) -> dict[str, object]:
    return {"T": T, "PAIRS": pairs, "LARGEST": torch.finfo(x.dtype).max}


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
        floor = _floor(eps, 2 if pairs else T)
        _fuse_forward[(triton.cdiv(size, _BLOCK),)](
            pre[0], pre[1], pre[-1], out, size, floor, **_common(out, T, pairs), BLOCK=_BLOCK
        )
    return out


def fuse_backward(grad: Tensor, pre: list[Tensor], eps: float, pairs: bool) -> list[Tensor]:
    """The gradients of the responses, each in the layout of the first."""
    T, out = len(pre), [torch.empty_like(pre[0]) for _ in pre]
    size = grad.numel()
    if size:
        grad, *pre = _in_the_layout_of(out[0], [grad, *pre])
        floor = _floor(eps, 2 if pairs else T)
        _fuse_backward[(triton.cdiv(size, _BLOCK),)](
            grad, pre[0], pre[1], pre[-1], out[0], out[1], out[-1], size, floor, **_common(grad, T, pairs), BLOCK=_BLOCK
        )
    return out


def _tiles(y: Tensor, M: int, N: int, T: int) -> dict[str, object]:
    """Sizes of the tiles: whole products where they are small."""
    wide = y.dtype == torch.float32
    BN = min(64 if wide or T == 3 else 128, max(16, triton.next_power_of_2(N)))
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 or not wide else "ieee"
    return {
        "M": M, "BM": 64 if wide else 128, "BN": BN, "BK": min(32 if wide else 64, max(16, triton.next_power_of_2(M))),
        "GROUP": 8, "PRECISION": precision, "num_warps": 8 if not wide else 4, "num_stages": 3 if not wide else 2,
    }  # fmt: skip


def project_forward(y: Tensor, weight: Tensor, bias: Tensor | None, T: int, eps: float, pairs: bool) -> Tensor:
    """z ``[P, K2]`` of branch outputs ``[P, T·M]`` and weights ``[T·M, K2]``, all contiguous, biases ``[T, K2]``."""
    (P, width), N = y.shape, weight.shape[1]
    out = torch.empty(P, N, dtype=y.dtype, device=y.device)
    if P:
        tiles = _tiles(y, width // T, N, T)
        grid = (triton.cdiv(P, tiles["BM"]) * triton.cdiv(N, tiles["BN"]),)
        _project_forward[grid](
            y, weight, bias, out, P, N, y.stride(0), _floor(eps, 2 if pairs else T),
            BIAS=bias is not None, **_common(y, T, pairs), **tiles,
        )  # fmt: skip
    return out


def project_backward(
    grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, T: int, eps: float, pairs: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of branch outputs, weights and biases."""
    (P, width), N = y.shape, weight.shape[1]
    M = width // T
    tiles = _tiles(y, M, N, T)
    lines = triton.cdiv(P, tiles["BM"])
    dpre = torch.empty(T, P, N, dtype=y.dtype, device=y.device)
    parts = None if bias is None else torch.empty(lines, T, N, dtype=torch.float32, device=y.device)
    if P:
        grid = (lines * triton.cdiv(N, tiles["BN"]),)
        _project_backward[grid](
            grad, y, weight, bias, dpre, parts, P, N, y.stride(0), _floor(eps, 2 if pairs else T),
            BIAS=bias is not None, **_common(y, T, pairs), **tiles,
        )  # fmt: skip
    dy, dw = torch.empty_like(y), torch.empty_like(weight)
    for t in range(T):
        rows = slice(t * M, (t + 1) * M)
        torch.mm(dpre[t], weight[rows].t(), out=dy[:, rows])
        torch.mm(y[:, rows].t(), dpre[t], out=dw[rows])
    return dy, dw, None if parts is None else parts.sum(0).to(weight.dtype)
