"""The projection of two branches for Hopper GPUs, in Gluon, with explicit copies and waits.

In Triton the products of a tile wait for its copies, the arithmetic for the products, and the next copy for the
arithmetic. Here the copy engine loads the next tile in the meantime, and the products of both branches are issued
together, with one wait. A tile has 64 positions and 64 outputs; two or more programs share a multiprocessor. A program
with values too large for the quick arithmetic writes NaN to ``flags``, and `project` recomputes its tiles with the
careful one.

The columns of the weights are permuted in shared memory (see `_swap`), so that each thread holds eight neighbouring
outputs of a product: 16 bytes, read and written at once without an exchange between threads.
"""

import functools
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from torch_dcl.kernels import project
from torch_dcl.kernels.arithmetic import OPTIONS, constants
from torch_dcl.kernels.launcher import Launch, cached, cdiv, multiprocessors

__all__ = ["accepts", "project_backward", "project_forward"]

# Names of Triton 3.9, and of 3.6.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_ALL = gl.constexpr(tl.PropagateNan.ALL)
_SIDE = 64
_FILTERS = (64, 128)
"""The filters of a branch for which there is a backward kernel: its products have at least 64 rows."""
_MIN_OUTPUTS = {16: 2**25, 32: 2**25, 64: 2**23, 128: 2**23}
"""The number of outputs over all positions from which the additional launches pay off, by filters of a branch."""


@gluon.constexpr_function
def _product(columns):
    """The layout of a product of at least 64 rows in four warps."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def _shared(rows, columns):
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)


@gluon.constexpr_function
def _in_order(layout):
    """The same threads, with their registers in the order of the columns."""
    return gl.DistributedLinearLayout(
        sorted(layout.reg_bases, key=lambda base: (base[0], base[1])), layout.lane_bases, layout.warp_bases,
        layout.block_bases, layout.shape,
    )  # fmt: skip


@gluon.jit
def _swap(x, R: gl.constexpr, C: gl.constexpr):
    """Permute columns (h, q, j, i) to (h, j, q, i), of sizes (C / 32, 4, 4, 2). The permutation is its own inverse."""
    return gl.reshape(gl.permute(gl.reshape(x, (R, C // 32, 4, 4, 2)), (0, 1, 3, 2, 4)), (R, C))


@gluon.jit
def _swapped(c):
    return (c // 32) * 32 + ((c // 2) % 4) * 8 + ((c // 8) % 4) * 2 + c % 2


@gluon.jit
def _weights(w, first, N: gl.constexpr, M: gl.constexpr, BN: gl.constexpr):
    """Load the weights of both branches for a block of outputs into shared memory."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (BN // 8), BN // 8], [4, 1], [1, 0])
    k = gl.arange(0, M, layout=gl.SliceLayout(1, L))
    n = gl.arange(0, BN, layout=gl.SliceLayout(0, L))
    at = w + k[:, None] * N + (first + n)[None, :]
    first_branch = _swap(gl.load(at).to(gl.bfloat16), M, BN)
    second_branch = _swap(gl.load(at + M * N).to(gl.bfloat16), M, BN)
    w0 = gl.allocate_shared_memory(gl.bfloat16, [M, BN], _shared(M, BN), first_branch)
    return w0, gl.allocate_shared_memory(gl.bfloat16, [M, BN], _shared(M, BN), second_branch)


@gluon.jit
def _biases(bias, first, N: gl.constexpr, BN: gl.constexpr, L: gl.constexpr):
    """Load the biases of both branches into shared memory.

    Reading them after a copy was issued keeps the arithmetic behind it: the assembler moves arithmetic ahead of a
    copy, but not reads of shared memory.
    """
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    n = first + _swapped(gl.arange(0, BN, layout=gl.SliceLayout(0, L)))
    if bias is None:
        b0 = gl.zeros([BN], gl.float32, gl.SliceLayout(0, L))
        b1 = b0
    else:
        b0 = gl.load(bias + n).to(gl.float32)
        b1 = gl.load(bias + N + n).to(gl.float32)
    shared0 = gl.allocate_shared_memory(gl.float32, [BN], S, b0)
    return shared0, gl.allocate_shared_memory(gl.float32, [BN], S, b1)


@gluon.jit
def _load_tile(y, buffers, arrived, i, m, tiles, M: gl.constexpr, BM: gl.constexpr):
    """Start the copy of tile m into buffer i, if there is such a tile."""
    mbarrier.expect(arrived.index(i), BM * 2 * M * 2, pred=m < tiles)
    _load(y, [m * BM, 0], arrived.index(i), buffers.index(i), pred=m < tiles)


@gluon.jit
def _first_tiles(y, tiles, AHEAD: gl.constexpr, M: gl.constexpr, BM: gl.constexpr, BUFFERS: gl.constexpr):
    """Allocate buffers and their barriers, and start the copies of the program's first tiles."""
    buffers = gl.allocate_shared_memory(gl.bfloat16, [BUFFERS, BM, 2 * M], y.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    for j in gl.static_range(BUFFERS):
        mbarrier.init(arrived.index(j), count=1)
    fence_async_shared()
    _barrier()
    for j in gl.static_range(AHEAD):
        _load_tile(y, buffers, arrived, j, gl.program_id(1) + j * gl.num_programs(1), tiles, M, BM)
    return buffers, arrived


@gluon.jit
def _tile_pointers(start, m, n0, P, N: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, L: gl.constexpr):
    """Pointers to the values of tile m, and their mask."""
    p = gl.arange(0, BM, layout=gl.SliceLayout(1, L))
    n = gl.arange(0, BN, layout=gl.SliceLayout(0, L))
    return start + m.to(gl.int64) * (BM * N) + n0 + (p[:, None] * N + n[None, :]), (p < P - m * BM)[:, None]


@gluon.jit
def _relu(x, bias):
    at: gl.constexpr = gl.SliceLayout(0, x.type.layout)
    return gl.maximum(x + bias.load(at)[None, :], 0.0, propagate_nan=_ALL)


@gluon.jit
def _row_sums(x, R: gl.constexpr, C: gl.constexpr):
    """Sums of the elements of a row that each thread holds, without an exchange between threads."""
    return gl.sum(gl.sum(gl.reshape(x, (R, C // 8, 4, 2)), 3), 1)


@gluon.jit
def _forward(
    y, w, bias, out, flags, P, eps,
    N: gl.constexpr, M: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    L: gl.constexpr = _product(BN)
    step = gl.num_programs(1)
    tiles = gl.cdiv(P, BM)
    n0 = gl.program_id(0) * BN
    buffers, arrived = _first_tiles(y, tiles, BUFFERS, M, BM, BUFFERS)
    w0, w1 = _weights(w, n0, N, M, BN)
    b0, b1 = _biases(bias, n0, N, BN, L)
    fence_async_shared()
    _barrier()
    nothing = gl.zeros((BM, BN), gl.float32, L)
    checks = _row_sums(nothing, BM, BN)
    i = 0
    phase = 0
    for m in range(gl.program_id(1), tiles, step):
        mbarrier.wait(arrived.index(i), phase)
        a = warpgroup_mma(buffers.index(i).slice(0, M, 1), w0, nothing, use_acc=False, is_async=True)
        b = warpgroup_mma(buffers.index(i).slice(M, M, 1), w1, nothing, use_acc=False, is_async=True)
        a, b = warpgroup_mma_wait(0, deps=[a, b])
        _barrier()  # all warps have read this tile
        _load_tile(y, buffers, arrived, i, m + BUFFERS * step, tiles, M, BM)
        product = _relu(a, b0) * _relu(b, b1)
        checks += _row_sums(product, BM, BN)
        z = _swap(gl.sqrt(product + eps).to(gl.bfloat16), BM, BN)
        Z: gl.constexpr = _in_order(z.type.layout)
        to, there = _tile_pointers(out, m, n0, P, N, BM, BN, Z)
        gl.store(to, gl.convert_layout(z, Z), mask=there)
        i += 1
        if i == BUFFERS:
            i = 0
            phase ^= 1
    _barrier()
    for j in gl.static_range(BUFFERS):
        mbarrier.invalidate(arrived.index(j))
    gl.store(flags + gl.program_id(1) * gl.num_programs(0) + gl.program_id(0), gl.sum(gl.sum(checks * 0.0, 1), 0))


@gluon.jit
def _backward(
    grad, y, w, bias, dpre0, dpre1, parts, flags, P, eps,
    N: gl.constexpr, M: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BUFFERS: gl.constexpr,
):  # fmt: skip
    """Write partial sums of the gradients of biases and weights, and to ``dpre`` those of the pre-activations.

    The products for the weights of one tile and those for the responses of the next are issued together. The sums for
    the biases are products with ones, which need fewer registers than sums.
    """
    L: gl.constexpr = _product(BN)
    step = gl.num_programs(1)
    tiles = gl.cdiv(P, BM)
    n0 = gl.program_id(0) * BN
    buffers, arrived = _first_tiles(y, tiles, BUFFERS - 1, M, BM, BUFFERS)
    d0 = gl.allocate_shared_memory(gl.bfloat16, [BM, BN], _shared(BM, BN))
    d1 = gl.allocate_shared_memory(gl.bfloat16, [BM, BN], _shared(BM, BN))
    nothing = gl.zeros((BM, BN), gl.float32, L)
    permuted: gl.constexpr = _swap(nothing, BM, BN).type.layout
    G: gl.constexpr = _in_order(permuted)
    at, there = _tile_pointers(grad, gl.program_id(1), n0, P, N, BM, BN, G)
    g = gl.load(at, mask=there, other=0.0)
    w0, w1 = _weights(w, n0, N, M, BN)
    b0, b1 = _biases(bias, n0, N, BN, L)
    few: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    ones = gl.allocate_shared_memory(gl.bfloat16, [8, 16], _shared(8, 16), gl.full((8, 16), 1.0, gl.bfloat16, few))
    sum0 = warpgroup_mma_init(gl.zeros((BN, 8), gl.float32, _product(8)))
    sum1 = warpgroup_mma_init(gl.zeros((BN, 8), gl.float32, _product(8)))
    dw0 = warpgroup_mma_init(gl.zeros((M, BN), gl.float32, _product(BN)))
    dw1 = warpgroup_mma_init(gl.zeros((M, BN), gl.float32, _product(BN)))
    fence_async_shared()
    checks = _row_sums(nothing, BM, BN)
    nowhere = flags + gl.full(checks.shape, 0, gl.int32, checks.type.layout)
    never = gl.full(checks.shape, 0, gl.int32, checks.type.layout) > P
    mbarrier.wait(arrived.index(0), 0)
    _barrier()
    a = warpgroup_mma(buffers.index(0).slice(0, M, 1), w0, nothing, use_acc=False, is_async=True)
    b = warpgroup_mma(buffers.index(0).slice(M, M, 1), w1, nothing, use_acc=False, is_async=True)
    a, b = warpgroup_mma_wait(0, deps=[a, b])
    a = warpgroup_mma_init(a)
    b = warpgroup_mma_init(b)
    i = 0
    phase = 0
    for m in range(gl.program_id(1), tiles, step):
        dw0, dw1, sum0, sum1, a, b = warpgroup_mma_wait(0, deps=[dw0, dw1, sum0, sum1, a, b])
        if dpre0 is not None:
            tma.store_wait(0)
        _barrier()  # products and copies of the previous tile have read what is overwritten now
        after = (i + 1) % BUFFERS
        _load_tile(y, buffers, arrived, (i + BUFFERS - 1) % BUFFERS, m + (BUFFERS - 1) * step, tiles, M, BM)
        h = gl.convert_layout(_swap(gl.convert_layout(g, permuted), BM, BN), L).to(gl.float32)
        va = _relu(a, b0)
        vb = _relu(b, b1)
        square = va * vb * 4.0 + 4.0 * eps  # its inverse root includes the factor 1/2 of the derivative
        share = h * gl.rsqrt(square)
        da = gl.where(va == 0, 0.0, share * vb)
        db = gl.where(vb == 0, 0.0, share * va)
        checks += _row_sums(square, BM, BN)
        d0.store(_swap(da.to(gl.bfloat16), BM, BN))
        d1.store(_swap(db.to(gl.bfloat16), BM, BN))
        gl.store(nowhere, checks, mask=never)  # never executed: it frees the registers of the checks
        fence_async_shared()
        if after == 0:
            phase ^= 1
        mbarrier.wait(arrived.index(after), phase, pred=m + step < tiles)
        _barrier()
        if dpre0 is not None:
            _store(dpre0, [m * BM, n0], d0)
            _store(dpre1, [m * BM, n0], d1)
        dw0 = warpgroup_mma(buffers.index(i).slice(0, M, 1).permute((1, 0)), d0, dw0, is_async=True)
        dw1 = warpgroup_mma(buffers.index(i).slice(M, M, 1).permute((1, 0)), d1, dw1, is_async=True)
        for k in gl.static_range(BM // 16):
            sum0 = warpgroup_mma(d0.slice(16 * k, 16, 0).permute((1, 0)), ones.permute((1, 0)), sum0, is_async=True)
            sum1 = warpgroup_mma(d1.slice(16 * k, 16, 0).permute((1, 0)), ones.permute((1, 0)), sum1, is_async=True)
        a = warpgroup_mma(buffers.index(after).slice(0, M, 1), w0, nothing, use_acc=False, is_async=True)
        b = warpgroup_mma(buffers.index(after).slice(M, M, 1), w1, nothing, use_acc=False, is_async=True)
        at, there = _tile_pointers(grad, m + step, n0, P, N, BM, BN, G)
        g = gl.load(at, mask=there, other=0.0)
        i = after
    dw0, dw1, sum0, sum1, a, b = warpgroup_mma_wait(0, deps=[dw0, dw1, sum0, sum1, a, b])
    if dpre0 is not None:
        tma.store_wait(0)
    _barrier()
    for j in gl.static_range(BUFFERS):
        mbarrier.invalidate(arrived.index(j))
    total0 = gl.max(sum0, 1)  # its columns are equal
    total1 = gl.max(sum1, 1)
    to = parts + gl.program_id(1).to(gl.int64) * (2 * (M + 1) * N) + n0
    n = gl.arange(0, BN, layout=total0.type.layout)
    gl.store(to + n, total0)
    gl.store(to + N + n, total1)
    W: gl.constexpr = dw0.type.layout
    k = gl.arange(0, M, layout=gl.SliceLayout(1, W))
    n = gl.arange(0, BN, layout=gl.SliceLayout(0, W))
    to = to + 2 * N + (k[:, None] * N + n[None, :])
    gl.store(to, dw0)
    gl.store(to + M * N, dw1)
    moderate = gl.sum(gl.sum(checks * 0.0, 1), 0) + gl.sum((total0 + total1) * 0.0, 0)
    gl.store(flags + gl.program_id(1) * gl.num_programs(0) + gl.program_id(0), moderate)


def accepts(y: Tensor, P: int, M: int, N: int, eps: float, *, backward: bool = False) -> bool:
    """Whether these kernels support a projection of two branches of this dtype and size, and pay off for it."""
    return (
        M in (_FILTERS if backward else _MIN_OUTPUTS) and N % _SIDE == 0 and _MIN_OUTPUTS[M] <= P * N
        and y.dtype == torch.bfloat16 and bool(constants(eps, 2, y.dtype)["QUICK"])
        and (type(y) is not Tensor or y.data_ptr() % 16 == 0)
    )  # fmt: skip


class _DescriptorLaunch(Launch):
    """A launch whose arguments include tensor descriptors for the copy engine and None."""

    __slots__ = ()

    def __call__(self, *given: Any) -> None:
        """Launch on tensors, descriptors and None."""
        addresses = [value.data_ptr() if isinstance(value, Tensor) else value for value in given]
        self.start(given, addresses)


@cached
def _launch(
    backward: bool, P: int, M: int, N: int, eps: float, dtypes: tuple[torch.dtype | None, ...], device: torch.device
) -> _DescriptorLaunch:
    del dtypes  # part of the cache key: of the weights and biases
    across = N // _SIDE
    together = (4 if _FILTERS[0] >= M and not backward else 2) * multiprocessors(device)
    grid = (across, max(1, min(cdiv(P, _SIDE), together // across)))
    values = {"P": P, "eps": eps, "N": N, "M": M, "BM": _SIDE, "BN": _SIDE, "BUFFERS": 2}
    return _DescriptorLaunch(_backward if backward else _forward, grid, values, {"num_warps": 4, **OPTIONS})


def _empty_flags(launch: Launch, y: Tensor) -> Tensor:
    """Uninitialised range checks, one for each program."""
    return torch.empty(launch.grid[1], launch.grid[0], dtype=torch.float32, device=y.device)


def _descriptor(x: Tensor, columns: int) -> Any:
    """The copy engine's descriptor of tiles of 64 rows."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [_SIDE, columns], _in_shared_memory(columns))


@functools.cache
def _in_shared_memory(columns: int) -> Any:
    return gl.NVMMASharedLayout.get_default_for([_SIDE, columns], gl.bfloat16)


def _projection(y: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> project.Projection:
    """The Triton kernels that recompute flagged tiles with the careful arithmetic."""
    bias_dtype = None if bias is None else bias.dtype
    P, M, N = len(y), y.shape[1] // 2, weight.shape[1]
    return project.projection(P, M, 2, N, y.dtype, y.device, eps, False, bias_dtype, 0, True)


def project_forward(y: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, eps: float) -> None:
    """Write z of two branches' outputs ``[P, 2·M]``; z may have another shape in channels_last.

    Weights of another dtype are rounded to that of y.
    """
    M, dtypes = y.shape[1] // 2, (weight.dtype, None if bias is None else bias.dtype)
    launch = _launch(False, len(y), M, weight.shape[1], eps, dtypes, y.device)
    flags = _empty_flags(launch, y)
    launch(_descriptor(y, 2 * M), weight, bias, z, flags)
    _projection(y, weight, bias, eps).redo_forward(flags, z, y, weight, bias)


def project_backward(
    grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of two branches' outputs ``[P, 2·M]``, weights and biases, the latter two in ``dtype``."""
    P, N, M, dtypes = len(y), weight.shape[1], y.shape[1] // 2, (weight.dtype, None if bias is None else bias.dtype)
    dpre = torch.empty(2, P, N, dtype=y.dtype, device=y.device) if _FILTERS[0] != M else None
    launch = _launch(True, P, M, N, eps, dtypes, y.device)
    flags = _empty_flags(launch, y)
    parts = torch.empty(launch.grid[1], 2 * (M + 1), N, dtype=torch.float32, device=y.device)
    descriptors = (None, None) if dpre is None else tuple(_descriptor(d, _SIDE) for d in dpre)
    launch(grad, _descriptor(y, 2 * M), weight, bias, *descriptors, parts, flags)
    careful = _projection(y, weight, bias, eps)
    careful.redo_backward(flags, dpre, parts, grad, y, weight, bias)
    if dpre is None:
        dy = careful.branch_gradient(grad, y, weight, bias, None)
    else:
        dy = project.branch_gradient(dpre, weight, y)
    dbias, dw = project.sum_partials(parts, 2, dtype)
    return dy, dw, None if bias is None else dbias
