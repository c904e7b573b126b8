"""Branch outputs to z in one kernel, with a backward of its own.

The responses v never reach memory: backward forms them once more. In backward a program adds up the weights' gradient
as it goes, where registers allow; the gradient of the branch outputs takes a second kernel, or cuBLAS if it is faster.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from torch_dcl.kernels import passes
from torch_dcl.kernels.arithmetic import OPTIONS, constants
from torch_dcl.kernels.products import product_, products
from torch_dcl.kernels.sizes import cdiv, next_power_of_2

__all__ = [
    "add_parts", "backward_again", "by_branch", "by_rows", "by_weights", "common", "forward_again", "processors",
    "project_backward", "project_forward", "weight_gradient",
]  # fmt: skip


def common(y: Tensor, weight: Tensor, bias: Tensor | None, T: int, eps: float, pairs: bool) -> dict[str, Any]:
    """What every kernel of the projection is told, and how large its tiles are in k."""
    M, wide = y.shape[1] // T, y.dtype == torch.float32
    return {
        **constants(eps, 2 if pairs else T, y.dtype), "T": T, "PAIRS": pairs, "BIAS": bias is not None,
        "N": weight.shape[1], "M": M, "BK": max(16, next_power_of_2(M)), "BM": 64,
        "PRECISION": "tf32" if torch.backends.cuda.matmul.allow_tf32 or not wide else "ieee",
    }  # fmt: skip


Tiles = tuple[tuple[int, int], dict[str, Any]]


def _tiles(y: Tensor, T: int, N: int, *, inside: bool | None = None) -> Tiles:
    """The grid of a kernel that keeps outputs, and its tiles: forward, and both of backward."""
    return _measured(len(y), y.shape[1] // T, T, N, y.element_size(), processors(y.device), inside)


@functools.lru_cache(1024)
def _measured(P: int, M: int, T: int, N: int, size: int, side_by_side: int, inside: bool | None) -> Tiles:
    """What did best on an H200."""
    half, BK = size == 2, max(16, next_power_of_2(M))
    BN, warps, stages, registers, at_once = 64 if half and BK <= _DEEPEST else 32, 4, 1, None, 2
    scarce = half and _SHALLOW < BK <= _DEEPEST  # more threads with fewer registers each
    if inside:
        BN, stages, registers, at_once = (32, 3, 168, 3) if BK <= _SHALLOW else (32, 2, None, 2)
    elif inside is not None:
        stages = 2 if T == 2 else 1
        warps, registers = (8, 128) if half and BK > _SHALLOW else (4, None)
    elif BK <= _SHALLOW:
        stages = 3
    elif scarce:
        BN, warps, registers = 128 if T == 2 else 64, 8, 128
    else:
        at_once = 3
    BN = min(BN, max(16, next_power_of_2(N)))
    if T * BK * size * (BN + stages * 64) > _ON_CHIP:
        stages = 1
    tiles: dict[str, Any] = {"BN": BN, "num_warps": warps, "num_stages": stages}
    if registers is not None:
        tiles["maxnreg"] = registers
    across = cdiv(N, BN)
    return (across, max(1, min(cdiv(P, 64), at_once * side_by_side // across))), tiles


_ON_CHIP = 210_000
"""Bytes of shared memory that a program may take, of 227 KiB."""
_SHALLOW, _DEEPEST = 64, 128
"""Filters of a branch up to which nothing is short; and up to which the weights' gradient fits into registers."""


@functools.cache
def processors(device: torch.device) -> int:
    """How many programs run side by side at least."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def project_forward(y: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, T: int, eps: float, pairs: bool) -> None:
    """Write z ``[P, K2]`` of branch outputs ``[P, T·M]``, weights ``[T·M, K2]`` and biases ``[T, K2]``; contiguous."""
    if len(y):
        grid, tiles = _tiles(y, T, weight.shape[1])
        passes.forward[grid](y, weight, bias, z, None, len(y), **common(y, weight, bias, T, eps, pairs), **tiles)


def forward_again(found: Tensor, z: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> None:
    """z once more with care where another kernel's programs, of tiles of 64 by 64, found values that are too large."""
    settings = common(y, weight, bias, 2, eps, False) | {"BN": 64, "num_warps": 4}
    passes.forward[(found.shape[1], found.shape[0])](y, weight, bias, z, found, len(y), **settings)


def project_backward(
    grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, T: int, eps: float, pairs: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of branch outputs, weights and biases, the latter two in ``dtype``."""
    (P, width), N = y.shape, weight.shape[1]
    M = width // T
    inside = T == 2 and M <= _DEEPEST and y.dtype != torch.float32
    keep = not (inside and M <= _SHALLOW)
    settings = common(y, weight, bias, T, eps, pairs)
    grid, tiles = _tiles(y, T, N, inside=inside)
    empty = torch.empty if P else torch.zeros  # of no position nothing is written
    dpre = torch.empty(T, P, N, dtype=y.dtype, device=y.device) if keep else grad
    parts = empty(grid[1], T * (M + 1) if inside else T, N, dtype=torch.float32, device=y.device)
    if P:
        passes.backward[grid](
            grad, y, weight, bias, dpre, parts, None, P, INSIDE=inside, KEEP=keep, **settings, **tiles
        )
    dy = by_weights(dpre, weight) if keep else by_rows(grad, y, weight, bias, eps)
    if inside:
        dbias, dw = add_parts(parts, T, dtype)
    else:
        dbias, dw = parts.sum(0).to(dtype), weight_gradient(y, dpre, dtype)
    return dy, dw, None if bias is None else dbias


def backward_again(
    found: Tensor, dpre: Tensor | None, parts: Tensor, grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None,
    eps: float,
) -> None:  # fmt: skip
    """Gradients once more with care where another kernel's programs, of tiles of 64 by 64, found too large values."""
    settings = common(y, weight, bias, 2, eps, False) | {"BN": 64, "num_warps": 4, "num_stages": 1}
    passes.backward[(found.shape[1], found.shape[0])](
        grad, y, weight, bias, grad if dpre is None else dpre, parts, found, len(y),
        INSIDE=True, KEEP=dpre is not None, **settings,
    )  # fmt: skip


def by_weights(dpre: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the branch outputs ``[P, T·M]`` from those of the responses ``[T, P, K2]``."""
    T, P, N = dpre.shape
    dy = torch.empty(P, len(weight), dtype=dpre.dtype, device=dpre.device)
    torch.bmm(dpre, weight.view(T, -1, N).transpose(1, 2), out=by_branch(dy, T))
    return dy


def by_rows(grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """The gradient of two branches' outputs, without the gradients of the responses."""
    P, N, dy = len(y), weight.shape[1], torch.empty_like(y)
    if P:
        tiles = {"BN": min(32, max(16, next_power_of_2(N))), "num_warps": 4, "num_stages": 3, "maxnreg": 168}
        passes.backward_rows[(cdiv(P, 64),)](
            grad, y, weight, bias, dy, P, **common(y, weight, bias, 2, eps, False), **tiles
        )
    return dy


def add_parts(parts: Tensor, T: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The gradients of the biases ``[T, K2]`` and of the weights ``[T·M, K2]`` from the shares of all programs."""
    count, rows, N = parts.shape
    dbias = torch.empty(T, N, dtype=dtype, device=parts.device)
    dw = torch.empty(rows - T, N, dtype=dtype, device=parts.device)
    passes.add_parts_[(cdiv(rows * N, 256),)](
        parts, dbias, dw, count, rows * N, T=T, N=N, AT_ONCE=16, BLOCK=256, num_warps=4, **OPTIONS
    )
    return dbias, dw


def weight_gradient(y: Tensor, dpre: Tensor, dtype: torch.dtype) -> Tensor:
    """``y_t^T · dpre_t`` of every branch, ``[T·M, K2]``."""
    T, P, N = dpre.shape
    M = y.shape[1] // T
    if P < _MANY:
        return products(by_branch(y, T).transpose(1, 2), dpre, dtype).view(T * M, N)
    parts = _parts(P, M, N) if y.dtype == torch.float32 else 1  # in a half type each part would be rounded
    dw = torch.empty(T, parts, M, N, dtype=dtype, device=y.device)
    for t, y_t in enumerate(by_branch(y, T)):
        if parts == 1:
            product_(dw[t, 0], y_t.t(), dpre[t])
        else:
            rows, gradients_ = (x.unflatten(0, (parts, -1)) for x in (y_t, dpre[t]))
            torch.bmm(rows.transpose(1, 2), gradients_, out=dw[t])
    return dw.sum(1).view(T * M, N) if parts > 1 else dw.view(T * M, N)


_MANY = 2048
"""Positions from which the products of the branches do better one by one."""


def _parts(P: int, M: int, N: int) -> int:
    """In how many parts a sum over positions is formed: cuBLAS does not divide the work of few tiles as it should."""
    return math.gcd(P, next_power_of_2(cdiv(128, cdiv(M, 128) * cdiv(N, 128))))


def by_branch(y: Tensor, T: int) -> Tensor:
    """``[P, T·M]`` as ``[T, P, M]``, where it lies."""
    return y.view(len(y), T, y.shape[1] // T).transpose(0, 1)
