"""Convolution, 2 × 2 max pooling and ReLU of E stacked networks: forward and both gradients, without an im2col.

Images are channels last, ``[E, B, H, W, C]``, so that the C·KW values under one row of a filter are contiguous in
memory, and a row of the filter is one contiguous piece of the matrix product. Weights are packed as
``[E, KH, KW, C, N]`` with N padded to whole tiles. The product of a pooled position is computed four times, once for
each of its four places; only the largest is written, with a byte that says which it was (4 where the ReLU is zero).
Backward reads that byte. Image sizes are constants of a kernel, so that no division by them remains.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_dcl.kernels.arithmetic import OPTIONS
from torch_dcl.kernels.launcher import cdiv, next_power_of_2

__all__ = ["conv_backward_input", "conv_backward_weight", "conv_forward", "pack_weight"]


@triton.jit
def _columns(base, k, W: tl.constexpr, C: tl.constexpr, ROW: tl.constexpr, KH: tl.constexpr):
    """Addresses of the values under place k of a filter; k counts rows, then columns, then channels."""
    offset = (k // ROW) * W * C + k % ROW
    return base[:, None] + offset[None, :], (k < KH * ROW)[None, :]


@triton.jit
def _positions(
    p, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, POOL: tl.constexpr
):
    """The first value under the filter at the first place of pooled positions p."""
    image = p // (PH * PW)
    place = p % (PH * PW)
    return ((image * H + place // PW * POOL) * W + place % PW * POOL) * C


@triton.jit
def _product(
    x, w, base, inside, n, W: tl.constexpr, NP: tl.constexpr,
    C: tl.constexpr, ROW: tl.constexpr, KH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FLAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((BM, BN), tl.float32)
    if FLAT:
        for k0 in range(0, KH * ROW, BK):
            k = k0 + tl.arange(0, BK)
            where, real = _columns(base, k, W, C, ROW, KH)
            a = tl.load(x + where, mask=inside[:, None] & real, other=0.0)
            b = tl.load(w + k[:, None] * NP + n[None, :], mask=(k < KH * ROW)[:, None], other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
    else:
        CHUNKS: tl.constexpr = (ROW + BK - 1) // BK
        for step in range(KH * CHUNKS):
            row = step // CHUNKS
            r = step % CHUNKS * BK + tl.arange(0, BK)
            real = r < ROW
            where = base[:, None] + row * W * C + r[None, :]
            a = tl.load(x + where, mask=inside[:, None] & real[None, :], other=0.0)
            b = tl.load(w + (row * ROW + r)[:, None] * NP + n[None, :], mask=real[:, None], other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
    return total


@triton.jit
def _larger(best, which, other, place):
    larger = (other > best) | (other != other)  # NaN wins, and stays
    return tl.where(larger, other, best), tl.where(larger, place, which)


@triton.jit
def _forward(
    x_all, w_all, bias_all, out_all, which_all, positions, image_size, H: tl.constexpr, W: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
    C: tl.constexpr, ROW: tl.constexpr, KH: tl.constexpr, POOL: tl.constexpr, RELU: tl.constexpr, BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(1).to(tl.int64)
    x = x_all + e * image_size
    w = w_all + e * (KH * ROW) * NP
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    p = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = p < positions
    base = _positions(p, H, W, C, PH, PW, POOL)
    best = _product(x, w, base, inside, n, W, NP, C, ROW, KH, BM, BN, BK, FLAT, PRECISION)
    which = tl.zeros((BM, BN), tl.int32)
    if POOL == 2:
        for place in tl.static_range(1, 4):
            shifted = base + (place // 2 * W + place % 2) * C
            other = _product(x, w, shifted, inside, n, W, NP, C, ROW, KH, BM, BN, BK, FLAT, PRECISION)
            best, which = _larger(best, which, other, place)
    _finish(bias_all, out_all, which_all, best, which, e, p, n, inside, positions, N, RELU, BIAS)


@triton.jit
def _forward_pooled(
    x_all, w_all, bias_all, out_all, which_all, positions, image_size, H: tl.constexpr, W: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
    C: tl.constexpr, ROW: tl.constexpr, KH: tl.constexpr, RELU: tl.constexpr, BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The four places of a pooled position at once: the values under all of them are read only once."""
    e = tl.program_id(1).to(tl.int64)
    x = x_all + e * image_size
    w = w_all + e * (KH * ROW) * NP
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    p = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = p < positions
    base = _positions(p, H, W, C, PH, PW, 2)
    WIDE: tl.constexpr = ROW + C
    CHUNKS: tl.constexpr = ((KH + 1) * WIDE + BK - 1) // BK if FLAT else (KH + 1) * ((WIDE + BK - 1) // BK)
    a00 = tl.zeros((BM, BN), tl.float32)
    a01 = tl.zeros((BM, BN), tl.float32)
    a10 = tl.zeros((BM, BN), tl.float32)
    a11 = tl.zeros((BM, BN), tl.float32)
    for step in range(CHUNKS):
        row, r, real, offset = _patch(step, W, C, ROW, KH, BK, FLAT)
        a = tl.load(x + base[:, None] + offset[None, :], mask=inside[:, None] & real[None, :], other=0.0)
        a00 = tl.dot(a, _filter(w, row, r, n, NP, ROW, KH), a00, input_precision=PRECISION)
        a01 = tl.dot(a, _filter(w, row, r - C, n, NP, ROW, KH), a01, input_precision=PRECISION)
        a10 = tl.dot(a, _filter(w, row - 1, r, n, NP, ROW, KH), a10, input_precision=PRECISION)
        a11 = tl.dot(a, _filter(w, row - 1, r - C, n, NP, ROW, KH), a11, input_precision=PRECISION)
    which = tl.zeros((BM, BN), tl.int32)
    best, which = _larger(a00, which, a01, 1)
    best, which = _larger(best, which, a10, 2)
    best, which = _larger(best, which, a11, 3)
    _finish(bias_all, out_all, which_all, best, which, e, p, n, inside, positions, N, RELU, BIAS)


@triton.jit
def _patch(
    step, W: tl.constexpr, C: tl.constexpr, ROW: tl.constexpr, KH: tl.constexpr, BK: tl.constexpr, FLAT: tl.constexpr
):
    """Row, place in the row and address of a piece of the (KH + 1) x (KW + 1) values under four filters."""
    WIDE: tl.constexpr = ROW + C
    if FLAT:
        k = step * BK + tl.arange(0, BK)
        row = k // WIDE
        r = k % WIDE
        real = k < (KH + 1) * WIDE
    else:
        PER: tl.constexpr = (WIDE + BK - 1) // BK
        r = step % PER * BK + tl.arange(0, BK)
        row = step // PER + r * 0
        real = r < WIDE
    return row, r, real, row * W * C + r


@triton.jit
def _filter(w, row, r, n, NP: tl.constexpr, ROW: tl.constexpr, KH: tl.constexpr):
    """The weights at places r of rows of the filter, zero outside of it."""
    real = (row >= 0) & (row < KH) & (r >= 0) & (r < ROW)
    return tl.load(w + (row * ROW + r)[:, None] * NP + n[None, :], mask=real[:, None], other=0.0)


@triton.jit
def _finish(
    bias_all, out_all, which_all, best, which, e, p, n, inside, positions, N: tl.constexpr,
    RELU: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    if BIAS:
        best += tl.load(bias_all + e * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if RELU:
        which = tl.where(best > 0, which, 4)
        # Not a maximum with zero: that would turn NaN into 0 and hide a network that has diverged.
        best = tl.where(best <= 0, 0.0, best)
    to = e * positions * N + p[:, None] * N + n[None, :]
    mask = inside[:, None] & (n < N)[None, :]
    tl.store(out_all + to, best.to(out_all.dtype.element_ty), mask=mask)
    tl.store(which_all + to, which.to(tl.uint8), mask=mask)


@triton.jit
def _weight_gradient(
    x_all, grad_all, which_all, dw_all, db_all, positions, share, image_size, networks, H: tl.constexpr,
    W: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, N: tl.constexpr,
    C: tl.constexpr, ROW: tl.constexpr, KH: tl.constexpr, POOL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, FLAT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    CHUNKS: tl.constexpr = (ROW + BK - 1) // BK
    tiles = tl.cdiv(N, BN)
    tile = tl.program_id(0) // tiles
    n = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    if FLAT:
        k = tile * BK + tl.arange(0, BK)
        real = k < KH * ROW
        columns = k // ROW * W * C + k % ROW
    else:
        r = tile % CHUNKS * BK + tl.arange(0, BK)
        real = r < ROW
        k = tile // CHUNKS * ROW + r
        columns = tile // CHUNKS * W * C + r
    x = x_all + e * image_size
    total = tl.zeros((BK, BN), tl.float32)
    bias = tl.zeros((BN,), tl.float32)
    for p0 in range(split * share, tl.minimum(split * share + share, positions), BM):
        p = p0 + tl.arange(0, BM)
        inside = p < positions
        base = _positions(p, H, W, C, PH, PW, POOL)
        at = e * positions * N + p[:, None] * N + n[None, :]
        mask = inside[:, None] & (n < N)[None, :]
        grad = tl.load(grad_all + at, mask=mask, other=0.0)
        which = tl.load(which_all + at, mask=mask, other=4).to(tl.int32)
        bias += tl.sum(tl.where(which < 4, grad.to(tl.float32), 0.0), 0)
        for place in tl.static_range(POOL * POOL):
            where = base[:, None] + (place // 2 * W + place % 2) * C + columns[None, :]
            a = tl.load(x + where, mask=inside[:, None] & real[None, :], other=0.0)
            part = tl.where(which == place, grad, 0.0).to(a.dtype)
            total = tl.dot(tl.trans(a), part, total, input_precision=PRECISION)
    to = (split * networks + e) * (KH * ROW) * N + k[:, None] * N + n[None, :]
    tl.store(dw_all + to, total, mask=real[:, None] & (n < N)[None, :])
    if tile == 0:
        tl.store(db_all + (split * networks + e) * N + n, bias, mask=n < N)


@triton.jit
def _unpool(
    grad_all, which_all, out_all, rows, OH: tl.constexpr, OW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr,
    POOL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    q = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    image = q // (OH * OW)
    place = q % (OH * OW)
    oh = place // OW
    ow = place % OW
    inside = (q < rows) & (oh // POOL < PH) & (ow // POOL < PW)
    at = ((image * PH + oh // POOL) * PW + ow // POOL)[:, None] * N + n[None, :]
    mask = inside[:, None] & (n < N)[None, :]
    which = tl.load(which_all + at, mask=mask, other=4).to(tl.int32)
    grad = tl.load(grad_all + at, mask=mask, other=0.0)
    mine = (oh % POOL * POOL + ow % POOL).to(tl.int32)
    chosen = tl.where(which == mine[:, None], grad, 0.0)
    tl.store(out_all + q[:, None] * NP + n[None, :], chosen, mask=(q < rows)[:, None])


@triton.jit
def _input_gradient(
    dy_all, w_all, dx_all, columns, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    NP: tl.constexpr,
    C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr,
    CTILES: tl.constexpr, NTILES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(2).to(tl.int64)
    h = tl.program_id(1)
    q = tl.program_id(0) // CTILES * BM + tl.arange(0, BM)
    c = tl.program_id(0) % CTILES * BC + tl.arange(0, BC)
    image = q // W
    w = q % W
    images = columns // W
    dy = dy_all + e * images * OH * OW * NP
    weight = w_all + e * KH * KW * C * NP
    total = tl.zeros((BM, BC), tl.float32)
    # Only the rows of the filter that reach a row of the output.
    first = tl.maximum(0, h - OH + 1)
    last = tl.minimum(KH, h + 1)
    for step in range(first * KW * NTILES, last * KW * NTILES):
        tap = step // NTILES
        n = step % NTILES * BN + tl.arange(0, BN)
        oh = h - tap // KW
        ow = w - tap % KW
        inside = (q < columns) & (ow >= 0) & (ow < OW)
        a = tl.load(dy + (((image * OH + oh) * OW + ow) * NP)[:, None] + n[None, :], mask=inside[:, None], other=0.0)
        b = tl.load(weight + (tap * C + c)[None, :] * NP + n[:, None], mask=(c < C)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    to = ((e * images + image) * H + h) * W + w
    tl.store(
        dx_all + to[:, None] * C + c[None, :],
        total.to(dx_all.dtype.element_ty),
        mask=(q < columns)[:, None] & (c < C)[None, :],
    )


def _tile(size: int) -> int:
    return min(64, max(16, next_power_of_2(size)))


def _padded(N: int) -> int:
    tile = _tile(N)
    return -(-N // tile) * tile


def _precision(x: Tensor) -> str:
    """Float32 stays float32: three TF32 products make up for the bits that one would lose."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


def _depth(row: int, x: Tensor) -> tuple[int, bool]:
    """How much of a filter is multiplied at a time, and whether its rows are joined because they are short."""
    if row < 32:
        return 32, True
    if x.dtype == torch.float32:
        return 32, False
    return (128 if 64 < row <= 128 else 64), False


def _lines(x: Tensor, low: int) -> int:
    """Positions of a tile: fewer of float32, which take twice the space."""
    return low // 2 if x.dtype == torch.float32 else low


def pack_weight(weight: Tensor) -> Tensor:
    """``[E, N, C, KH, KW]`` to ``[E, KH, KW, C, NP]``, padded with zeros."""
    packed = weight.permute(0, 3, 4, 2, 1)
    return torch.nn.functional.pad(packed, (0, _padded(weight.shape[1]) - weight.shape[1])).contiguous()


def conv_forward(
    x: Tensor, packed: Tensor, bias: Tensor | None, filters: int, *, pool: int, relu: bool
) -> tuple[Tensor, Tensor]:
    """Convolve, pool and rectify.

    Args:
        x: ``[E, B, H, W, C]``, contiguous.
        packed: From `pack_weight`, of the type of x.
        bias: ``[E, N]`` or None.
        filters: N.
        pool: 1 or 2.
        relu: Whether to rectify.

    Returns:
        ``[E, B, PH, PW, N]``, and for each value a byte: which of the pooled places it is from, 4 where ReLU cut it.
    """
    E, B, H, W, C = x.shape
    KH, KW, NP = packed.shape[1], packed.shape[2], packed.shape[-1]
    PH, PW = (H - KH + 1) // pool, (W - KW + 1) // pool
    out = torch.empty(E, B, PH, PW, filters, dtype=x.dtype, device=x.device)
    which = torch.empty(out.shape, dtype=torch.uint8, device=x.device)
    BK, flat = _depth(KW * C, x)
    pooled = pool == 2 and not flat
    BM, BN = _lines(x, 64 if pooled else 128), _tile(NP)
    grid = (cdiv(B * PH * PW, BM), E, NP // BN)
    sizes = (B * PH * PW, B * H * W * C, H, W, PH, PW, filters, NP)
    common = {
        "C": C, "ROW": KW * C, "KH": KH, "RELU": relu, "BIAS": bias is not None, "BM": BM, "BN": BN,
        "FLAT": flat, "PRECISION": _precision(x), "num_warps": 4, "num_stages": 3, **OPTIONS,
    }  # fmt: skip
    if pooled:
        _forward_pooled[grid](x, packed, bias, out, which, *sizes, **common, BK=min(BK, 64))
    else:
        _forward[grid](x, packed, bias, out, which, *sizes, **common, BK=BK, POOL=pool)
    return out, which


def conv_backward_weight(
    x: Tensor, grad: Tensor, which: Tensor, kernel: tuple[int, int], *, pool: int
) -> tuple[Tensor, Tensor]:
    """Gradients of the weight, ``[E, N, C, KH, KW]``, and of the bias, ``[E, N]``, in float32."""
    E, B, H, W, C = x.shape
    KH, KW = kernel
    PH, PW, N = grad.shape[2:]
    BK, flat = _depth(KW * C, x)
    BM, BN = _lines(x, 32), _tile(N)
    tiles = cdiv(KH * KW * C, BK) if flat else KH * cdiv(KW * C, BK)
    programs = tiles * cdiv(N, BN) * E
    positions = B * PH * PW
    splits = max(1, min(cdiv(positions, 8 * BM), (2048 if flat else 1024) // programs))
    share = cdiv(cdiv(positions, splits), BM) * BM
    dw = torch.empty(splits, E, KH, KW, C, N, dtype=torch.float32, device=x.device)
    db = torch.empty(splits, E, N, dtype=torch.float32, device=x.device)
    _weight_gradient[(tiles * cdiv(N, BN), E, splits)](
        x, grad, which, dw, db, positions, share, B * H * W * C, E, H, W, PH, PW, N,
        C=C, ROW=KW * C, KH=KH, POOL=pool, BM=BM, BN=BN, BK=BK, FLAT=flat, PRECISION=_precision(x),
        num_warps=4, num_stages=2 if flat else 1, **OPTIONS,
    )  # fmt: skip
    return dw.sum(0).permute(0, 4, 3, 1, 2).contiguous(), db.sum(0)


def conv_backward_input(packed: Tensor, grad: Tensor, which: Tensor, shape: tuple[int, ...], *, pool: int) -> Tensor:
    """The gradient of the input, ``[E, B, H, W, C]``."""
    E, B, H, W, C = shape
    KH, KW, NP = packed.shape[1], packed.shape[2], packed.shape[-1]
    OH, OW = H - KH + 1, W - KW + 1
    PH, PW, N = grad.shape[2:]
    dy = torch.empty(E, B, OH, OW, NP, dtype=grad.dtype, device=grad.device)
    rows, lines, tile = E * B * OH * OW, 32, _tile(NP)
    _unpool[(cdiv(rows, lines), NP // tile)](
        grad, which, dy, rows, OH, OW, PH, PW, N, NP, POOL=pool, BM=lines, BN=tile, num_warps=4, **OPTIONS
    )
    dx = torch.empty(shape, dtype=grad.dtype, device=grad.device)
    BM, BC, BN = _lines(grad, 128), _tile(C), _tile(NP)
    ctiles = cdiv(C, BC)
    _input_gradient[(cdiv(B * W, BM) * ctiles, H, E)](
        dy, packed, dx, B * W, H, W, OH, OW, NP,
        C=C, KH=KH, KW=KW, BM=BM, BC=BC, BN=BN, CTILES=ctiles, NTILES=NP // BN,
        PRECISION=_precision(grad), num_warps=4, num_stages=2, **OPTIONS,
    )  # fmt: skip
    return dx
