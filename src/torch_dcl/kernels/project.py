"""Branch outputs to z in one kernel, and its backward.

The responses v are never stored: backward recomputes them. There a program accumulates the weight gradient in
registers if they suffice; a second kernel computes the gradient of the branch outputs, or cuBLAS where it is faster.
"""

import math
from typing import Any

import torch
from torch import Tensor

from torch_dcl.kernels import passes
from torch_dcl.kernels.arithmetic import OPTIONS, constants
from torch_dcl.kernels.launch import MAX_FILTERS_IN_REGISTERS, Norm, matmul_out, products
from torch_dcl.kernels.launcher import Launch, cached, cdiv, is_traced, multiprocessors, next_power_of_2
from torch_dcl.kernels.rows import add_statistics_gradient_, backward_rows

__all__ = [
    "ON_CHIP",
    "Projection",
    "as_rows",
    "branch_gradient",
    "by_branch",
    "projection",
    "sum_of_partials",
    "sum_partials",
    "weight_gradient",
]

_FEW_FILTERS = 64
"""The largest branch width for which neither registers nor shared memory are scarce."""
_MAX_FULL = 64
"""The most outputs that one program owns completely, with a quarter as many filters. Faster with 64 outputs (325
instead of 757 µs on an H200, 3,211,264 positions), slower with 128 (134 instead of 56 µs, 50,176 positions)."""
ON_CHIP = 210_000
"""Bytes of shared memory that a program may use, of 227 KiB."""
_MANY_POSITIONS = 2048
"""The number of positions from which one product for each branch is faster than a batched one."""

Tiles = tuple[tuple[int, int], int, dict[str, Any]]


def _tiles(
    P: int, M: int, T: int, N: int, size: int, processors: int, accumulates: bool | None = None, *, full: bool = False
) -> Tiles:
    """Grid, outputs of a tile and options of a kernel whose programs own outputs; the fastest on an H200."""
    half, BK = size == 2, max(16, next_power_of_2(M))
    BN, warps, stages, registers, at_once = 64 if half and BK <= MAX_FILTERS_IN_REGISTERS else 32, 4, 1, None, 2
    scarce = half and _FEW_FILTERS < BK <= MAX_FILTERS_IN_REGISTERS  # more threads with fewer registers each
    if full:
        BN, stages = max(16, next_power_of_2(N)), 3
    elif accumulates:
        BN, stages, registers, at_once = (32, 3, 168, 3) if BK <= _FEW_FILTERS else (32, 2, None, 2)
    elif accumulates is not None:
        stages = 2 if T == 2 else 1
        warps, registers = (8, 128) if half and BK > _FEW_FILTERS else (4, None)
    elif BK <= _FEW_FILTERS:
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
    return (across, max(1, min(cdiv(P, 64), at_once * processors // across))), BN, options


class Projection:
    """The launches of the projection for one size.

    Args:
        P: Positions.
        M: Filters of a branch.
        T: Branches.
        N: Outputs.
        dtype: The dtype of branch outputs, weights and z.
        device: The device of the tensors.
        eps: ε.
        pairs: Whether to average over pairs instead of fusing all branches.
        bias: The dtype of the biases, or None.
        norm: 0 without a norm, 1 with fixed statistics, 2 with those of the batch. With a norm, ``bias`` is the result
            of `moments.Statistics`.
        tf32: Whether float32 products may use TF32.
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
        self._sizes = P, M, T, N, dtype.itemsize, multiprocessors(device)
        self.accumulates = T == 2 and M <= MAX_FILTERS_IN_REGISTERS and dtype.itemsize == 2
        """Whether a program accumulates the weight gradient in registers."""
        self.keep = not self.accumulates or (M > _FEW_FILTERS and not norm)
        """Whether the gradients of the pre-activations are written for a later product."""
        self.fuses_rows = bool(norm) or not self.keep
        """Whether a kernel computes the gradients of the branch outputs directly from those of z."""
        self.is_full = self.accumulates and self.fuses_rows and M <= _MAX_FULL // 4 and N <= _MAX_FULL
        """Whether that is the same kernel, whose programs own all outputs."""
        self._launches: dict[object, Launch] = {}

    def __call__(self, y: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, low: Tensor | None = None) -> None:
        """Write z ``[P, K2]`` of branch outputs ``[P, T·M]``, weights ``[T·M, K2]`` and biases ``[T, K2]``.

        All are contiguous; y and z may have other shapes in channels_last. Weights of another dtype are rounded to
        that of y, and written to ``low`` if it is given.
        """
        rounded = low is not None
        launch = self._launches.get((weight.dtype, rounded))
        if launch is None:
            grid, BN, options = _tiles(*self._sizes)
            values = {**self._values, "BN": BN, "FLAGGED": False, "ROUNDED": rounded}
            self._launches[weight.dtype, rounded] = launch = Launch(passes.forward, grid, values, options)
        if self.P:
            launch(y, weight, y if bias is None else bias, z, y if low is None else low, y)

    def launch_inference(self, norm: Norm, *, bias: bool) -> Launch:
        """The launch for inference with a norm of fixed statistics; ``norm`` only says which tensors exist.

        Its arguments are y, weights, biases, z, and the norm's γ, β, means and variances.
        """
        grid, BN, options = _tiles(*self._sizes)
        values = {name: value for name, value in self._values.items() if name != "NORM"}
        values |= {"BN": BN, "BIAS": bias, "GAMMA": norm.gamma is not None, "BETA": norm.beta is not None}
        return Launch(passes.infer, grid, {**values, "epsilon": norm.eps}, options)

    def redo_forward(self, flags: Tensor, z: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Recompute z with the careful arithmetic in the 64 × 64 tiles that another kernel has flagged."""
        launch = self._launches.get(("redo forward", weight.dtype))
        if launch is None:
            values = {**self._values, "BN": 64, "FLAGGED": True, "ROUNDED": False}
            launch = Launch(passes.forward, (flags.shape[1], flags.shape[0]), values, {"num_warps": 4, **OPTIONS})
            self._launches["redo forward", weight.dtype] = launch
        launch(y, weight, y if bias is None else bias, z, y, flags)

    def gradients(
        self, grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The gradients of branch outputs, weights and biases, the latter two in ``dtype``."""
        dpre, parts, dy = self.response_gradients(grad, y, weight, bias)
        if dy is None and self.fuses_rows:
            dy = self.branch_gradient(grad, y, weight, bias, None)
        elif dy is None:
            dy = branch_gradient(dpre, weight, y)
        if self.accumulates:
            dbias, dw = sum_partials(parts, self.T, dtype)
        else:
            dbias, dw = parts.sum(0).to(dtype), weight_gradient(as_rows(y, len(weight)), dpre, dtype)
        return dy, dw, None if bias is None else dbias

    def response_gradients(
        self, grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The gradients of the pre-activations ``[T, P, K2]`` if they are stored; the partial sums of all programs.

        If programs own all outputs, also the gradients of the branch outputs, without the part through the batch's
        statistics of a norm.
        """
        launch = self._launches.get("backward")
        if launch is None:
            grid, BN, options = _tiles(*self._sizes, self.accumulates, full=self.is_full)
            values = {**self._values, "BN": BN, "FLAGGED": False, "ACCUMULATE": self.accumulates, "KEEP": self.keep}
            values["FULL"] = self.is_full
            self._launches["backward"] = launch = Launch(passes.backward, grid, values, options)
        P, T, N = self.P, self.T, self.N
        dpre = torch.empty(T, P, N, dtype=y.dtype, device=y.device) if self.keep else grad
        empty = torch.empty if P else torch.zeros  # without positions no kernel writes
        rows = T * (self.M + 1) if self.accumulates else T
        parts = empty(launch.grid[1], rows, N, dtype=torch.float32, device=y.device)
        dy = torch.empty_like(y) if self.is_full else None
        if P:
            launch(grad, y, weight, y if bias is None else bias, dpre, parts, y if dy is None else dy, y)
        return dpre, parts, dy

    def add_statistics_gradient(self, dy: Tensor, y: Tensor, weight: Tensor, about: Tensor, slopes: Tensor) -> None:
        """Add to the gradients of the branch outputs the part through the batch's statistics of a norm."""
        launch = self._launches.get("statistics")
        if launch is None:
            P, M, T, N, _, processors = self._sizes
            values = {"P": P, "N": N, "M": M, "T": T, "BM": 128}
            values |= {"BN": max(16, next_power_of_2(N)), "BK": max(16, next_power_of_2(T * M))}
            grid = (max(1, min(cdiv(P, 128), 4 * processors)),)
            options = {"num_warps": 4, "num_stages": 3, **OPTIONS}
            self._launches["statistics"] = launch = Launch(add_statistics_gradient_, grid, values, options)
        if self.P:
            launch(y, about, weight, slopes, dy)

    def redo_backward(
        self, flags: Tensor, dpre: Tensor | None, parts: Tensor, grad: Tensor, y: Tensor, weight: Tensor,
        bias: Tensor | None,
    ) -> None:  # fmt: skip
        """Recompute gradients with the careful arithmetic in the 64 × 64 tiles that another kernel has flagged."""
        launch = self._launches.get("redo backward")
        if launch is None:
            values = {**self._values, "BN": 64, "FLAGGED": True, "ACCUMULATE": True, "KEEP": dpre is not None}
            values["FULL"] = False
            options = {"num_warps": 4, "num_stages": 1, **OPTIONS}
            launch = Launch(passes.backward, (flags.shape[1], flags.shape[0]), values, options)
            self._launches["redo backward"] = launch
        launch(grad, y, weight, y if bias is None else bias, grad if dpre is None else dpre, parts, y, flags)

    def branch_gradient(
        self, grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, slopes: Tensor | None
    ) -> Tensor:
        """The gradient of the branch outputs, directly from that of z."""
        dy = torch.empty_like(y)
        launch = self._launches.get("rows")
        if launch is None:
            self._launches["rows"] = launch = self._launch_rows()
        if self.P:
            launch(grad, y, weight, y if bias is None else bias, y if slopes is None else slopes, dy)
        return dy

    def _launch_rows(self) -> Launch:
        P, M, T, N, size, processors = self._sizes
        filters = max(16, next_power_of_2(M)) * T * size
        BM, BN, stages, registers = 64, 32, 3, None
        warps = 4
        if M > MAX_FILTERS_IN_REGISTERS:
            BM, stages, warps = 32, 2, 8  # a program holds the gradients of all filters in registers
        elif filters <= _FEW_FILTERS * 2:
            registers = 168
        elif filters > _FEW_FILTERS * 4 and cdiv(P, BM) < processors:
            BM, BN, stages = 32, 64, 2  # few positions: smaller tiles occupy more of the GPU
        options: dict[str, Any] = {"num_warps": warps, "num_stages": stages, **OPTIONS}
        if registers is not None:
            options["maxnreg"] = registers
        BN = min(BN, max(16, next_power_of_2(N)))
        return Launch(backward_rows, (cdiv(P, BM),), {**self._values, "BM": BM, "BN": BN}, options)


projection = cached(Projection)
"""`Projection`, one instance for equal arguments."""


def as_rows(y: Tensor, channels: int) -> Tensor:
    """A tensor in channels_last as ``[P, channels]``."""
    if y.dim() == 2 and y.shape[1] == channels and y.is_contiguous():
        return y
    return y.as_strided((y.numel() // channels, channels), (channels, 1))


def branch_gradient(dpre: Tensor, weight: Tensor, y: Tensor) -> Tensor:
    """The gradient of the branch outputs, in their shape, from that of the pre-activations ``[T, P, K2]``."""
    T, P, N = dpre.shape
    if is_traced(y):
        dy = torch.bmm(dpre, weight.view(T, -1, N).transpose(1, 2))
        return dy.transpose(0, 1).reshape(P, len(weight))
    dy = torch.empty_like(y)
    torch.bmm(dpre, weight.view(T, -1, N).transpose(1, 2), out=by_branch(as_rows(dy, len(weight)), T))
    return dy


@cached
def _sum_partials(count: int, rows: int, T: int, N: int, dtype: torch.dtype, device: torch.device) -> Launch:
    BLOCK = 64 if count > 16 else 256  # many partial sums: smaller blocks read more of them at once
    values = {"count": count, "size": rows * N, "T": T, "N": N, "AT_ONCE": 4096 // BLOCK, "BLOCK": BLOCK}
    return Launch(passes.sum_partials_, (cdiv(rows * N, BLOCK),), values, {"num_warps": 4, **OPTIONS})


def sum_partials(parts: Tensor, T: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The gradients of biases ``[T, K2]`` and weights ``[T·M, K2]`` from the partial sums of all programs."""
    count, rows, N = parts.shape
    dbias = torch.empty(T, N, dtype=dtype, device=parts.device)
    dw = torch.empty(rows - T, N, dtype=dtype, device=parts.device)
    _sum_partials(count, rows, T, N, dtype, parts.device)(parts, dbias, dw)
    return dbias, dw


def sum_of_partials(parts: Tensor, count: int) -> Tensor:
    """The sum of ``count`` consecutive parts of a buffer."""
    size = parts.numel() // count
    total = torch.empty(size, dtype=parts.dtype, device=parts.device)
    _sum_partials(count, size, 0, 1, parts.dtype, parts.device)(parts, total, total)
    return total


def weight_gradient(y: Tensor, dpre: Tensor, dtype: torch.dtype) -> Tensor:
    """``y_t^T · dpre_t`` of every branch, ``[T·M, K2]``."""
    T, P, N = dpre.shape
    M = y.shape[1] // T
    if P < _MANY_POSITIONS or is_traced(y):
        return products(by_branch(y, T).transpose(1, 2), dpre, dtype).view(T * M, N)
    parts = _parts(P, M, N) if y.dtype == torch.float32 else 1  # half-precision parts would be rounded
    dw = torch.empty(T, parts, M, N, dtype=dtype, device=y.device)
    for t, y_t in enumerate(by_branch(y, T)):
        if parts == 1:
            matmul_out(dw[t, 0], y_t.t(), dpre[t])
        else:
            rows, gradients_ = (x.unflatten(0, (parts, -1)) for x in (y_t, dpre[t]))
            torch.bmm(rows.transpose(1, 2), gradients_, out=dw[t])
    return dw.sum(1).view(T * M, N) if parts > 1 else dw.view(T * M, N)


def _parts(P: int, M: int, N: int) -> int:
    """The number of parts into which to split a sum over positions: cuBLAS splits too little if there are few tiles."""
    return math.gcd(P, next_power_of_2(cdiv(128, cdiv(M, 128) * cdiv(N, 128))))


def by_branch(y: Tensor, T: int) -> Tensor:
    """``[P, T·M]`` viewed as ``[T, P, M]``."""
    return y.view(len(y), T, y.shape[1] // T).transpose(0, 1)
