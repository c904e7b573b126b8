"""Concept fusion on the GPU: responses to z, and branch outputs to z, each as one kernel with a backward of its own.

Each kernel reads every value once and writes every result once. The projection forms the T small products of a tile,
adds the biases, rectifies, multiplies and takes the root before anything is written, so that the responses v never
reach memory; its backward forms them once more. Where the products are large and the positions few, in a linear layer,
they are left to cuBLAS and kept for backward.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_dcl.kernels import pointwise
from torch_dcl.kernels.arithmetic import constants, fused, gradients, respond

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
def _response(y, w, bias, p, P, stride, t: tl.constexpr, M: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr,
              BN: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """v of branch t at positions p, with the weights and the bias of a few outputs."""
    k = tl.arange(0, BK)
    rows = tl.load(y + p[:, None] * stride + t * M + k[None, :], mask=(p < P)[:, None] & (k < M)[None, :], other=0.0)
    return respond(tl.dot(rows, w, tl.zeros((BM, BN), tl.float32), input_precision=PRECISION) + bias[None, :])


@triton.jit
def _columns(w, n, N, t: tl.constexpr, M: tl.constexpr, BK: tl.constexpr):
    """The weights of branch t for the outputs n."""
    k = tl.arange(0, BK)
    return tl.load(w + (t * M + k)[:, None] * N + n[None, :], mask=(k < M)[:, None] & (n < N)[None, :], other=0.0)


@triton.jit
def _bias(bias, n, N, t: tl.constexpr, BIAS: tl.constexpr, BN: tl.constexpr):
    if BIAS:
        return tl.load(bias + t * N + n, mask=n < N, other=0.0).to(tl.float32)
    else:
        return tl.zeros((BN,), tl.float32)


@triton.jit
def _project_forward(
    y, w, bias, out, P, N, stride, eps, floor,
    M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, BIAS: tl.constexpr,
    LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    w0 = _columns(w, n, N, 0, M, BK)
    w1 = _columns(w, n, N, 1, M, BK)
    w2 = w1
    b0 = _bias(bias, n, N, 0, BIAS, BN)
    b1 = _bias(bias, n, N, 1, BIAS, BN)
    b2 = b1
    if T == 3:
        w2 = _columns(w, n, N, 2, M, BK)
        b2 = _bias(bias, n, N, 2, BIAS, BN)
    for m in range(tl.program_id(1), tl.cdiv(P, BM), tl.num_programs(1)):
        p = tl.arange(0, BM).to(tl.int64) + m * BM
        a = _response(y, w0, b0, p, P, stride, 0, M, BK, BM, BN, PRECISION)
        b = _response(y, w1, b1, p, P, stride, 1, M, BK, BM, BN, PRECISION)
        c = b
        if T == 3:
            c = _response(y, w2, b2, p, P, stride, 2, M, BK, BM, BN, PRECISION)
        z = fused(a, b, c, eps, floor, T, PAIRS, QUICK, LARGEST)
        to = out + p[:, None] * N + n[None, :]
        tl.store(to, z.to(out.dtype.element_ty), mask=(p < P)[:, None] & (n < N)[None, :])


@triton.jit
def _project_backward(
    grad, y, w, bias, dpre, dbias, P, N, stride, eps, floor,
    M: tl.constexpr, T: tl.constexpr, PAIRS: tl.constexpr, QUICK: tl.constexpr, BIAS: tl.constexpr,
    LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    w0 = _columns(w, n, N, 0, M, BK)
    w1 = _columns(w, n, N, 1, M, BK)
    w2 = w1
    b0 = _bias(bias, n, N, 0, BIAS, BN)
    b1 = _bias(bias, n, N, 1, BIAS, BN)
    b2 = b1
    if T == 3:
        w2 = _columns(w, n, N, 2, M, BK)
        b2 = _bias(bias, n, N, 2, BIAS, BN)
    size = (tl.zeros((), tl.int64) + P) * N  # P = 1 is a constant here, and has no type of its own
    sum0 = tl.zeros((BM, BN), tl.float32)
    sum1 = tl.zeros((BM, BN), tl.float32)
    sum2 = tl.zeros((BM, BN), tl.float32)
    kind = dpre.dtype.element_ty
    for m in range(tl.program_id(1), tl.cdiv(P, BM), tl.num_programs(1)):
        p = tl.arange(0, BM).to(tl.int64) + m * BM
        mask = (p < P)[:, None] & (n < N)[None, :]
        at = p[:, None] * N + n[None, :]
        g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        a = _response(y, w0, b0, p, P, stride, 0, M, BK, BM, BN, PRECISION)
        b = _response(y, w1, b1, p, P, stride, 1, M, BK, BM, BN, PRECISION)
        c = b
        if T == 3:
            c = _response(y, w2, b2, p, P, stride, 2, M, BK, BM, BN, PRECISION)
        da, db, dc = gradients(g, a, b, c, eps, floor, T, PAIRS, QUICK, LARGEST)
        tl.store(dpre + at, da.to(kind), mask=mask)
        tl.store(dpre + size + at, db.to(kind), mask=mask)
        if T == 3:
            tl.store(dpre + 2 * size + at, dc.to(kind), mask=mask)
        if BIAS:  # beyond the last position the gradient was read as zero
            sum0 += da
            sum1 += db
            if T == 3:
                sum2 += dc
    if BIAS:
        to = dbias + tl.program_id(1).to(tl.int64) * T * N + n
        tl.store(to, tl.sum(sum0, 0), mask=n < N)
        tl.store(to + N, tl.sum(sum1, 0), mask=n < N)
        if T == 3:
            tl.store(to + 2 * N, tl.sum(sum2, 0), mask=n < N)


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
    BM, BN = 64, min(32 if backward or wide or BK > 128 else 64, max(16, triton.next_power_of_2(N)))
    stages = 3 if BK <= 64 else 2
    if T * BK * y.element_size() * (BN + stages * BM) > _ON_CHIP:
        stages = 1
    across, at_once = triton.cdiv(N, BN), 3 if BK <= 64 and not backward else 2
    grid = across, max(1, min(triton.cdiv(len(y), BM), at_once * _processors(y) // across))
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 or not wide else "ieee"
    return grid, {
        "M": M, "BM": BM, "BN": BN, "BK": BK, "PRECISION": precision, "num_warps": 4, "num_stages": stages,
    }  # fmt: skip


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
    parts = None if bias is None else torch.empty(grid[1], T, N, dtype=torch.float32, device=y.device)
    if P:
        _project_backward[grid](
            grad, y, weight, bias, dpre, parts, P, N, y.stride(0),
            BIAS=bias is not None, **_common(y, T, eps, pairs), **tiles,
        )  # fmt: skip
    dy, dw = torch.empty_like(y), torch.empty_like(weight)
    for t in range(T):
        rows = slice(t * M, (t + 1) * M)
        torch.mm(dpre[t], weight[rows].t(), out=dy[:, rows])
        torch.mm(y[:, rows].t(), dpre[t], out=dw[rows])
    return dy, dw, None if parts is None else parts.sum(0).to(weight.dtype)


def kept_forward(
    y: Tensor, weight: Tensor, bias: Tensor | None, T: int, eps: float, pairs: bool
) -> tuple[Tensor, Tensor]:
    """What `project_forward` gives, by one batched product; with it the responses before their bias, ``[T, P, K2]``."""
    pre = torch.bmm(_by_branch(y, T), weight.view(T, -1, weight.shape[1]))
    return pointwise.fuse_forward(pre[None], None if bias is None else bias[None], eps, pairs=pairs)[0], pre


def kept_backward(
    grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, pre: Tensor, T: int, eps: float, pairs: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of branch outputs, weights and biases, from the responses that were kept."""
    by_branch = weight.view(T, -1, weight.shape[1])
    dpre = pointwise.fuse_backward(grad[None], pre[None], None if bias is None else bias[None], eps, pairs=pairs)[0]
    dy = torch.empty_like(y)
    torch.bmm(dpre, by_branch.transpose(1, 2), out=_by_branch(dy, T))
    dw = torch.bmm(_by_branch(y, T).transpose(1, 2), dpre).view_as(weight)
    return dy, dw, None if bias is None else dpre.sum(1)


def _by_branch(y: Tensor, T: int) -> Tensor:
    """``[P, T·M]`` as ``[T, P, M]``, where it lies."""
    return y.view(len(y), T, -1).transpose(0, 1)
