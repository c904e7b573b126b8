"""Branch outputs to z in one kernel, with a backward of its own.

The responses v never reach memory: backward forms them once more. In backward a program adds up the weights' gradient
as it goes, where registers allow; the gradient of the branch outputs takes a second kernel, or cuBLAS if it is faster.
"""

import math
from typing import Any

import torch
from torch import Tensor

from torch_dcl.kernels import passes
from torch_dcl.kernels.arithmetic import OPTIONS, constants
from torch_dcl.kernels.launch import DEEPEST, Norm, product_, products
from torch_dcl.kernels.launcher import Launch, cdiv, is_traced, kept, next_power_of_2, processors
from torch_dcl.kernels.rows import add_through_statistics_, backward_rows

__all__ = [
    "ON_CHIP",
    "Projection",
    "add_parts",
    "as_rows",
    "by_branch",
    "by_weights",
    "projection",
    "total_of",
    "weight_gradient",
]

_SHALLOW = 64
"""Filters of a branch up to which nothing is short."""
_WHOLE = 64
"""Outputs up to which a program can have all of them, with four times fewer filters of a branch; it is faster with 64
(325 for 757 µs on an H200, 3,211,264 positions), and with 128 it is not (134 for 56, 50,176 positions)."""
ON_CHIP = 210_000
"""Bytes of shared memory that a program may take, of 227 KiB."""
_MANY = 2048
"""Positions from which the products of the branches do better one by one."""

Tiles = tuple[tuple[int, int], int, dict[str, Any]]


def _tiles(
    P: int, M: int, T: int, N: int, size: int, side_by_side: int, inside: bool | None = None, *, whole: bool = False
) -> Tiles:
    """Grid, outputs of a tile and options of a kernel that keeps outputs; what did best on an H200."""
    half, BK = size == 2, max(16, next_power_of_2(M))
    BN, warps, stages, registers, at_once = 64 if half and BK <= DEEPEST else 32, 4, 1, None, 2
    scarce = half and _SHALLOW < BK <= DEEPEST  # more threads with fewer registers each
    if whole:
        BN, stages = max(16, next_power_of_2(N)), 3
    elif inside:
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
    if T * BK * size * (BN + stages * 64) > ON_CHIP:
        stages = 1
    options: dict[str, Any] = {"num_warps": warps, "num_stages": stages, **OPTIONS}
    if registers is not None:
        options["maxnreg"] = registers
    across = cdiv(N, BN)
    return (across, max(1, min(cdiv(P, 64), at_once * side_by_side // across))), BN, options


class Projection:
    """The launches of the projection for one size.

    Args:
        P: Positions.
        M: Filters of a branch.
        T: Branches.
        N: Outputs.
        dtype: Of branch outputs, weights and z.
        device: Where.
        eps: ε.
        pairs: Whether to take the mean over pairs instead of fusing all.
        bias: The type of the biases, or None.
        norm: 0 without a norm, 1 behind one of fixed statistics, 2 behind one of the batch's: then biases are what
            `moments.Statistics` gives.
        tf32: Whether products of float32 may be of TF32.
    """

    def __init__(
        self, P: int, M: int, T: int, N: int, dtype: torch.dtype, device: torch.device, eps: float, pairs: bool,
        bias: torch.dtype | None, norm: int, tf32: bool,
    ) -> None:  # fmt: skip
        self.P, self.M, self.T, self.N, self.norm = P, M, T, N, norm
        self._values = {
            "P": P, **constants(eps, 2 if pairs else T, dtype), "T": T, "PAIRS": pairs, "BIAS": bias is not None,
            "NORM": norm, "N": N, "M": M, "BK": max(16, next_power_of_2(M)), "BM": 64,
            "PRECISION": "tf32" if tf32 else "ieee",
        }  # fmt: skip
        self._sizes = P, M, T, N, dtype.itemsize, processors(device)
        self.inside = T == 2 and M <= DEEPEST and dtype.itemsize == 2
        """Whether a program adds up the weights' gradient as it goes."""
        self.keep = not self.inside or (M > _SHALLOW and not norm)
        """Whether the gradients of the responses are written for products to come."""
        self.rows = bool(norm) or not self.keep
        """Whether a kernel forms the gradients of the branch outputs, from those of z."""
        self.whole = self.inside and self.rows and M <= _WHOLE // 4 and N <= _WHOLE
        """Whether it is the same kernel, whose programs have all outputs."""
        self._made: dict[object, Launch] = {}

    def __call__(self, y: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, low: Tensor | None = None) -> None:
        """Write z ``[P, K2]`` of branch outputs ``[P, T·M]``, weights ``[T·M, K2]`` and biases ``[T, K2]``.

        All without gaps; y and z may have other shapes with the channels last in memory. Weights of another type are
        rounded to that of y on their way, and written to ``low`` if it is given.
        """
        rounded = low is not None
        launch = self._made.get((weight.dtype, rounded))
        if launch is None:
            grid, BN, options = _tiles(*self._sizes)
            values = {**self._values, "BN": BN, "FOUND": False, "ROUNDED": rounded}
            self._made[weight.dtype, rounded] = launch = Launch(passes.forward, grid, values, options)
        if self.P:
            launch(y, weight, y if bias is None else bias, z, y if low is None else low, y)

    def launch_inference(self, norm: Norm, *, bias: bool) -> Launch:
        """The same behind a norm of fixed statistics, from the norm itself: of its tensors only which there are.

        The launch takes y, weights, biases, z, and of the norm γ, β, means and variances.
        """
        grid, BN, options = _tiles(*self._sizes)
        values = {name: value for name, value in self._values.items() if name != "NORM"}
        values |= {"BN": BN, "BIAS": bias, "GAMMA": norm.gamma is not None, "BETA": norm.beta is not None}
        return Launch(passes.infer, grid, {**values, "epsilon": norm.eps}, options)

    def again(self, found: Tensor, z: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """z once more with care where another kernel's programs, of 64 by 64, found values that are too large."""
        launch = self._made.get("again")
        if launch is None:
            values = {**self._values, "BN": 64, "FOUND": True, "ROUNDED": False}
            launch = Launch(passes.forward, (found.shape[1], found.shape[0]), values, {"num_warps": 4, **OPTIONS})
            self._made["again"] = launch
        launch(y, weight, y if bias is None else bias, z, y, found)

    def gradients(
        self, grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The gradients of branch outputs, weights and biases, the latter two in ``dtype``."""
        dpre, parts, dy = self.response_gradients(grad, y, weight, bias)
        if dy is None:
            dy = self.by_rows(grad, y, weight, bias, None) if self.rows else by_weights(dpre, weight, y)
        if self.inside:
            dbias, dw = add_parts(parts, self.T, dtype)
        else:
            dbias, dw = parts.sum(0).to(dtype), weight_gradient(as_rows(y, len(weight)), dpre, dtype)
        return dy, dw, None if bias is None else dbias

    def response_gradients(
        self, grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The gradients of the responses ``[T, P, K2]``, if they are kept; the sums of all programs.

        And, where programs have all outputs, the gradients of the branch outputs: behind a norm of the batch's
        statistics without what comes through these.
        """
        launch = self._made.get("backward")
        if launch is None:
            grid, BN, options = _tiles(*self._sizes, self.inside, whole=self.whole)
            values = {**self._values, "BN": BN, "FOUND": False, "INSIDE": self.inside, "KEEP": self.keep}
            values["WHOLE"] = self.whole
            self._made["backward"] = launch = Launch(passes.backward, grid, values, options)
        P, T, N = self.P, self.T, self.N
        dpre = torch.empty(T, P, N, dtype=y.dtype, device=y.device) if self.keep else grad
        empty = torch.empty if P else torch.zeros  # of no position nothing is written
        rows = T * (self.M + 1) if self.inside else T
        parts = empty(launch.grid[1], rows, N, dtype=torch.float32, device=y.device)
        dy = torch.empty_like(y) if self.whole else None
        if P:
            launch(grad, y, weight, y if bias is None else bias, dpre, parts, y if dy is None else dy, y)
        return dpre, parts, dy

    def add_through_statistics(self, dy: Tensor, y: Tensor, weight: Tensor, about: Tensor, slopes: Tensor) -> None:
        """Complete the gradients of the branch outputs behind a norm of the batch's statistics."""
        launch = self._made.get("statistics")
        if launch is None:
            P, M, T, N, _, side_by_side = self._sizes
            values = {"P": P, "N": N, "M": M, "T": T, "BM": 128}
            values |= {"BN": max(16, next_power_of_2(N)), "BK": max(16, next_power_of_2(T * M))}
            grid = (max(1, min(cdiv(P, 128), 4 * side_by_side)),)
            options = {"num_warps": 4, "num_stages": 3, **OPTIONS}
            self._made["statistics"] = launch = Launch(add_through_statistics_, grid, values, options)
        if self.P:
            launch(y, about, weight, slopes, dy)

    def gradients_again(
        self, found: Tensor, dpre: Tensor | None, parts: Tensor, grad: Tensor, y: Tensor, weight: Tensor,
        bias: Tensor | None,
    ) -> None:  # fmt: skip
        """Gradients once more with care where another kernel's programs, of 64 by 64, found too large values."""
        launch = self._made.get("gradients again")
        if launch is None:
            values = {**self._values, "BN": 64, "FOUND": True, "INSIDE": True, "KEEP": dpre is not None, "WHOLE": False}
            options = {"num_warps": 4, "num_stages": 1, **OPTIONS}
            launch = Launch(passes.backward, (found.shape[1], found.shape[0]), values, options)
            self._made["gradients again"] = launch
        launch(grad, y, weight, y if bias is None else bias, grad if dpre is None else dpre, parts, y, found)

    def by_rows(self, grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, slopes: Tensor | None) -> Tensor:
        """The gradient of the branch outputs, without the gradients of the responses."""
        dy = torch.empty_like(y)
        launch = self._made.get("rows")
        if launch is None:
            self._made["rows"] = launch = self._launch_rows()
        if self.P:
            launch(grad, y, weight, y if bias is None else bias, y if slopes is None else slopes, dy)
        return dy

    def _launch_rows(self) -> Launch:
        P, M, T, N, size, side_by_side = self._sizes
        filters = max(16, next_power_of_2(M)) * T * size
        BM, BN, stages, registers = 64, 32, 3, None
        warps = 4
        if M > DEEPEST:
            BM, stages, warps = 32, 2, 8  # a program has the gradients of all filters in registers
        elif filters <= _SHALLOW * 2:
            registers = 168
        elif filters > _SHALLOW * 4 and cdiv(P, BM) < side_by_side:
            BM, BN, stages = 32, 64, 2  # few positions: smaller tiles keep more of the GPU at work
        options: dict[str, Any] = {"num_warps": warps, "num_stages": stages, **OPTIONS}
        if registers is not None:
            options["maxnreg"] = registers
        BN = min(BN, max(16, next_power_of_2(N)))
        return Launch(backward_rows, (cdiv(P, BM),), {**self._values, "BM": BM, "BN": BN}, options)


projection = kept(Projection)
"""The same, made once."""


def as_rows(y: Tensor, channels: int) -> Tensor:
    """``[P, channels]`` of what has its channels last in memory without gaps."""
    if y.dim() == 2 and y.shape[1] == channels and y.is_contiguous():
        return y
    return y.as_strided((y.numel() // channels, channels), (channels, 1))


def by_weights(dpre: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    """The gradient of the branch outputs, in their shape, from those of the responses ``[T, P, K2]``."""
    T, P, N = dpre.shape
    if is_traced(y):
        dy = torch.bmm(dpre, weight.view(T, -1, N).transpose(1, 2))
        return dy.transpose(0, 1).reshape(P, len(weight))
    dy = torch.empty_like(y)
    torch.bmm(dpre, weight.view(T, -1, N).transpose(1, 2), out=by_branch(as_rows(dy, len(weight)), T))
    return dy


@kept
def _add_parts(count: int, rows: int, T: int, N: int, dtype: torch.dtype, device: torch.device) -> Launch:
    BLOCK = 64 if count > 16 else 256  # more parts than sums: more of the former at once
    values = {"count": count, "size": rows * N, "T": T, "N": N, "AT_ONCE": 4096 // BLOCK, "BLOCK": BLOCK}
    return Launch(passes.add_parts_, (cdiv(rows * N, BLOCK),), values, {"num_warps": 4, **OPTIONS})


def add_parts(parts: Tensor, T: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The gradients of the biases ``[T, K2]`` and of the weights ``[T·M, K2]`` from the shares of all programs."""
    count, rows, N = parts.shape
    dbias = torch.empty(T, N, dtype=dtype, device=parts.device)
    dw = torch.empty(rows - T, N, dtype=dtype, device=parts.device)
    _add_parts(count, rows, T, N, dtype, parts.device)(parts, dbias, dw)
    return dbias, dw


def total_of(parts: Tensor, count: int) -> Tensor:
    """The sum of so many parts of a buffer, one behind the other."""
    size = parts.numel() // count
    total = torch.empty(size, dtype=parts.dtype, device=parts.device)
    _add_parts(count, size, 0, 1, parts.dtype, parts.device)(parts, total, total)
    return total


def weight_gradient(y: Tensor, dpre: Tensor, dtype: torch.dtype) -> Tensor:
    """``y_t^T · dpre_t`` of every branch, ``[T·M, K2]``."""
    T, P, N = dpre.shape
    M = y.shape[1] // T
    if P < _MANY or is_traced(y):
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


def _parts(P: int, M: int, N: int) -> int:
    """In how many parts a sum over positions is formed: cuBLAS does not divide the work of few tiles as it should."""
    return math.gcd(P, next_power_of_2(cdiv(128, cdiv(M, 128) * cdiv(N, 128))))


def by_branch(y: Tensor, T: int) -> Tensor:
    """``[P, T·M]`` as ``[T, P, M]``, where it lies."""
    return y.view(len(y), T, y.shape[1] // T).transpose(0, 1)
