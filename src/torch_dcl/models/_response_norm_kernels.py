"""Local response normalisation across channels that are contiguous in memory, one pass forward and one backward.

With ``s = k + α/n · Σ x²`` over the window of n channels, ``z = x · s^-β``; backward recomputes s from x. A thread
holds the channels of one wide load as separate variables, so that a sum over neighbours is a sum of variables.
Neighbours beyond the load on either side are loaded again: another thread has just fetched them, so they are in the
cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_dcl.kernels.arithmetic import OPTIONS
from torch_dcl.kernels.launcher import cdiv

__all__ = ["norm_backward", "norm_forward"]

_BLOCK = 128


@triton.jit
def _halves(t, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The even and the odd columns of ``[BLOCK, WIDTH]``, ``[BLOCK, WIDTH // 2]`` each."""
    even, odd = tl.split(tl.reshape(t, (BLOCK, WIDTH // 2, 2)))
    return even, odd


@triton.jit
def _columns(t, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The columns of ``[BLOCK, WIDTH]``."""
    if WIDTH == 1:
        return (tl.reshape(t, (BLOCK,)),)
    elif WIDTH == 2:  # no plain if: what follows a return in a branch is compiled too
        return tl.split(t)
    elif WIDTH == 4:
        even, odd = _halves(t, 4, BLOCK)
        a, c = tl.split(even)
        b, d = tl.split(odd)
        return a, b, c, d
    else:
        even, odd = _halves(t, 8, BLOCK)
        a, c, e, g = _columns(even, 4, BLOCK)
        b, d, f, h = _columns(odd, 4, BLOCK)
        return a, b, c, d, e, f, g, h


@triton.jit
def _from_columns(columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """``[BLOCK, WIDTH]`` from its columns."""
    if WIDTH == 1:
        whole = columns[0]
    elif WIDTH == 2:
        whole = tl.join(columns[0], columns[1])
    elif WIDTH == 4:
        whole = tl.join(tl.join(columns[0], columns[2]), tl.join(columns[1], columns[3]))
    else:
        even = tl.join(tl.join(columns[0], columns[4]), tl.join(columns[2], columns[6]))
        odd = tl.join(tl.join(columns[1], columns[5]), tl.join(columns[3], columns[7]))
        whole = tl.join(even, odd)
    return tl.reshape(whole, (BLOCK, WIDTH))


@triton.jit
def _locate(size, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """The program's first group, the groups relative to it, their indices in their rows, and a mask of valid ones."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    group = tl.arange(0, BLOCK)
    place = (group + (first % GROUPS).to(tl.int32)) % GROUPS
    return first, group, place, group < tl.minimum(size - first, BLOCK).to(tl.int32)


@triton.jit
def _around(
    x, first, group, place, inside,
    REACH: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The channels of each group and of REACH groups on either side, in float32; 0 beyond the row."""
    at = x + first * WIDTH
    within = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    values = ()
    for step in tl.static_range(-REACH, REACH + 1):
        there = inside & (place >= -step) & (place < GROUPS - step)
        loaded = tl.load(at + (within + step * WIDTH), mask=there[:, None], other=0.0)
        values += _columns(loaded.to(tl.float32), WIDTH, BLOCK)
    return values


@triton.jit
def _scale(values, i: tl.constexpr, k, share, HALF: tl.constexpr):
    """s at the i-th value."""
    total = values[i - HALF] * values[i - HALF]
    for j in tl.static_range(i - HALF + 1, i + HALF + 1):
        total += values[j] * values[j]
    return k + share * total


@triton.jit
def _powers(s, beta, THREE_QUARTERS: tl.constexpr):
    """s^-β and 1 / s."""
    if THREE_QUARTERS:
        root = tl.rsqrt(s)
        return root * tl.sqrt(root), root * root
    else:
        return tl.exp2(-beta * tl.log2(s)), 1.0 / s


@triton.jit
def _norm_forward(
    x, out, size, k, share, beta,
    HALF: tl.constexpr, THREE_QUARTERS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    REACH: tl.constexpr = (HALF + WIDTH - 1) // WIDTH
    first, group, place, inside = _locate(size, GROUPS, BLOCK)
    values = _around(x, first, group, place, inside, REACH, GROUPS, WIDTH, BLOCK)
    columns = ()
    for i in tl.static_range(REACH * WIDTH, (REACH + 1) * WIDTH):
        power, _ = _powers(_scale(values, i, k, share, HALF), beta, THREE_QUARTERS)
        columns += ((values[i] * power).to(out.dtype.element_ty),)
    within = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(out + first * WIDTH + within, _from_columns(columns, WIDTH, BLOCK), mask=inside[:, None])


@triton.jit
def _norm_backward(
    grad, x, out, size, k, share, beta, slope,
    HALF: tl.constexpr, THREE_QUARTERS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    REACH: tl.constexpr = (2 * HALF + WIDTH - 1) // WIDTH
    first, group, place, inside = _locate(size, GROUPS, BLOCK)
    values = _around(x, first, group, place, inside, REACH, GROUPS, WIDTH, BLOCK)
    grads = _around(grad, first, group, place, inside, REACH, GROUPS, WIDTH, BLOCK)
    # The direct term of every output, and what every value of the window adds to its neighbours: g · x · s^(-β-1).
    own, passed = (), ()
    for i in tl.static_range(REACH * WIDTH - HALF, (REACH + 1) * WIDTH + HALF):
        power, inverse = _powers(_scale(values, i, k, share, HALF), beta, THREE_QUARTERS)
        direct = grads[i] * power
        own += (direct,)
        passed += (direct * (values[i] * inverse),)
    columns = ()
    for i in tl.static_range(WIDTH):
        total = passed[i]
        for j in tl.static_range(i + 1, i + 2 * HALF + 1):
            total += passed[j]
        columns += ((own[i + HALF] - slope * values[REACH * WIDTH + i] * total).to(out.dtype.element_ty),)
    within = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(out + first * WIDTH + within, _from_columns(columns, WIDTH, BLOCK), mask=inside[:, None])


def _settings(x: Tensor, size: int, alpha: float, beta: float, k: float) -> tuple[tuple[int], dict[str, object]]:
    """The grid, and the arguments of both kernels."""
    C = x.shape[1]
    width = min(16 // x.element_size(), C & -C)  # loads of 16 bytes, where they end with the row
    groups = x.numel() // width
    return (cdiv(groups, _BLOCK),), {
        "size": groups, "k": float(k), "share": alpha / size, "beta": float(beta),
        "HALF": size // 2, "THREE_QUARTERS": beta == 0.75, "GROUPS": C // width, "WIDTH": width, "BLOCK": _BLOCK,
        **OPTIONS,
    }  # fmt: skip


def _rows(x: Tensor) -> Tensor:
    """The same values with contiguous channels; a copy where they are not."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def norm_forward(x: Tensor, size: int, alpha: float, beta: float, k: float) -> Tensor:
    """z of ``[N, C, ...]`` for an odd ``size``, in the layout of x."""
    out = torch.empty_like(x)
    if x.numel():
        rows = _rows(x)
        z = out if rows.stride() == out.stride() else torch.empty_like(rows)
        grid, arguments = _settings(x, size, alpha, beta, k)
        _norm_forward[grid](rows, z, **arguments)
        if z is not out:
            out.copy_(z)
    return out


def norm_backward(grad: Tensor, x: Tensor, size: int, alpha: float, beta: float, k: float) -> Tensor:
    """The gradient of x, in the layout of x."""
    out = torch.empty_like(x)
    if x.numel():
        rows = _rows(x)
        dx = out if rows.stride() == out.stride() else torch.empty_like(rows)
        grid, arguments = _settings(x, size, alpha, beta, k)
        _norm_backward[grid](_rows(grad), rows, dx, slope=2 * alpha * beta / size, **arguments)
        if dx is not out:
            out.copy_(dx)
    return out
