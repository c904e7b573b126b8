"""Entry points of the kernels, memory layouts, and matrix products with a float32 result."""

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_dcl import functional, kernels
from torch_dcl.kernels.launcher import is_traced
from torch_dcl.kernels.record import closed_operation, replayed_operation
from torch_dcl.parts import Norm, channels_last_strides

if TYPE_CHECKING:
    from torch_dcl.kernels.plans import Plan

__all__ = [
    "MAX_FILTERS_IN_REGISTERS", "Norm", "cast", "channels_last_strides", "flatten_positions", "fuse", "fuse_backward",
    "hopper_kernels_for", "is_channels_last", "matmul_out", "max_fused_width", "products", "reference_fuse",
    "responses", "strides_match", "to_layout", "transpose", "unflatten_positions", "uses_tensor_cores",
]  # fmt: skip


MAX_FILTERS_IN_REGISTERS = 128
"""The largest branch width for which a gradient of the weights, or of the branch outputs, fits into registers."""


def fuse(pre: list[Tensor], eps: float, pairs: bool) -> Tensor:
    """z of the pre-activations."""
    from torch_dcl.kernels import elementwise  # noqa: PLC0415

    with kernels.on_device_of(pre[0]):
        return elementwise.fuse_forward(pre, eps, pairs)


def fuse_backward(grad: Tensor, pre: list[Tensor], eps: float, pairs: bool) -> list[Tensor]:
    """The gradients of the pre-activations."""
    from torch_dcl.kernels import elementwise  # noqa: PLC0415

    with kernels.on_device_of(grad):
        return elementwise.fuse_backward(grad, pre, eps, pairs)


def transpose(x: Tensor, channels: int, last: bool, dtype: torch.dtype) -> Tensor:
    """A copy in channels_last (``last``) or in torch's default layout."""
    from torch_dcl.kernels import elementwise  # noqa: PLC0415

    with kernels.on_device_of(x):
        return elementwise.transpose(x, channels, last, dtype)


def to_layout(x: Tensor, channels: int, last: bool, dtype: torch.dtype) -> Tensor:
    """x in channels_last (``last``) or in torch's default layout; no copy if it has that layout already."""
    has_layout = is_channels_last(x, channels) if last else x.is_contiguous()
    if has_layout or torch.compiler.is_compiling():  # a compiler fuses the transpose with its neighbours
        low = x.to(dtype)
        return low.movedim(channels, -1).contiguous().movedim(-1, channels) if last else low.contiguous()
    if not torch.is_grad_enabled():
        return _transpose(x, channels, last, dtype)
    transposed: Tensor = _Transpose.apply(x, channels, last, dtype)
    return transposed


@closed_operation("transpose")
def _op_transpose(x: Tensor, channels: int, last: bool, dtype: torch.dtype) -> Tensor:
    return transpose(x, channels, last, dtype)


def _transpose(x: Tensor, channels: int, last: bool, dtype: torch.dtype) -> Tensor:
    """Copy x to another layout. A second copy of the same sizes is recorded, and replayed from then on."""
    kind = x.shape, channels, last, dtype, x.dtype
    if kind in _transposed and (operation := replayed_operation("transpose")) is not None:
        copy: Tensor = operation(x, channels, last, dtype)
        return copy
    if len(_transposed) >= _MOST_TRANSPOSED:
        _transposed.clear()
    _transposed.add(kind)
    return transpose(x, channels, last, dtype)


_transposed: set[tuple[object, ...]] = set()
_MOST_TRANSPOSED = 512


class _Transpose(torch.autograd.Function):
    """A copy in another memory layout."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, channels: int, last: bool, dtype: torch.dtype) -> Tensor:
        ctx.back = channels, not last, x.dtype
        return _transpose(x, channels, last, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return to_layout(grads[0], *ctx.back), None, None, None


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to another dtype; no copy if x has it already."""
    if x.dtype is dtype:
        return x
    if is_traced(x) or not x.is_cuda:  # Triton's interpreter truncates to bfloat16
        return x.to(dtype)
    from torch_dcl.kernels import elementwise  # noqa: PLC0415

    return elementwise.cast(x, dtype)


def uses_tensor_cores(dtype: torch.dtype) -> bool:
    """Whether products of this dtype use tensor cores; for float32 torch's TF32 setting decides."""
    return dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32


def max_fused_width(dtype: torch.dtype) -> int:
    """The largest branch width for which a kernel computes the responses on chip, where all filters must fit.

    Without tensor cores the limit is lower: cuBLAS is faster the wider a branch is.
    """
    return 256 if dtype != torch.float32 else 128 if uses_tensor_cores(dtype) else 64


def strides_match(shape: Sequence[int], stride: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether strides are equal in every dimension of more than one element."""
    return all(size == 1 or own == other for size, own, other in zip(shape, stride, expected, strict=True))


def is_channels_last(x: Tensor, channels: int) -> bool:
    """Whether the channels are last in memory, without gaps."""
    if channels == 1 and x.dim() == 4:
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.movedim(channels, -1).is_contiguous()


def flatten_positions(y: Tensor, channels: int) -> Tensor:
    """``[..., C, ...]`` as ``[P, C]``; a view if the channels are last in memory."""
    if y.dim() == 2 and channels == 1:
        return y
    return y.movedim(channels, -1).reshape(-1, y.shape[channels])


def unflatten_positions(y: Tensor, channels: int, rows: Tensor) -> Tensor:
    """``[P, N]`` as ``[..., N, ...]``, with the positions of y ``[..., C, ...]``."""
    if y.dim() == 2 and channels == 1:
        return rows
    return rows.view(*y.shape[:channels], *y.shape[channels + 1 :], rows.shape[1]).movedim(-1, channels)


def hopper_kernels_for(plan: "Plan", y: Tensor, weight: Tensor, *, backward: bool = False) -> ModuleType | None:
    """The module of kernels for Hopper GPUs if the device is one and they support this projection, else None."""
    hopper = _hopper_kernels_on(y.device) if plan.T == 2 and y.is_cuda else None
    if hopper is None or not hopper.accepts(y, plan.P, plan.M, weight.shape[1], plan.eps, backward=backward):
        return None
    return hopper


@functools.cache
def _hopper_kernels_on(device: torch.device) -> ModuleType | None:
    return _hopper_kernels() if torch.cuda.get_device_capability(device) == (9, 0) else None


@functools.cache
def _hopper_kernels() -> ModuleType | None:
    """The module, only for the Triton versions that it was tested with: Gluon's API still changes."""
    import triton  # noqa: PLC0415

    if not (3, 6) <= tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 9):
        return None
    from torch_dcl.kernels import hopper  # noqa: PLC0415

    return hopper


def responses(y: Tensor, weight: Tensor, bias: Tensor | None, widths: Sequence[int], channels: int = 1) -> list[Tensor]:
    """The pre-activations of all branches, in plain torch."""
    rows = flatten_positions(y, channels)
    biases = (None,) * len(widths) if bias is None else bias.unbind(0)
    parts = zip(torch.split(rows, list(widths), -1), torch.split(weight, list(widths)), biases, strict=True)
    return [unflatten_positions(y, channels, F.linear(y_t, W_t.t(), b_t)) for y_t, W_t, b_t in parts]


def reference_fuse(pre: Sequence[Tensor], eps: float, pairs: bool) -> Tensor:
    """z in plain torch."""
    return (functional.fuse_pairs if pairs else functional.fuse_branches)(list(pre), eps)


# Products of half-precision matrices that may return their float32 accumulator.


def matmul_out(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Write ``a · b`` of two matrices of one dtype into ``out``, of that dtype or float32."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:  # torch has no such product on the CPU
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def products(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a_t · b_t`` for every t, of ``[T, M, P]`` and ``[T, P, N]``, in their dtype or in float32."""
    if a.dtype == dtype:
        return torch.bmm(a, b)
    if is_traced(a):
        if not a.is_cuda:
            return torch.bmm(a.to(dtype), b.to(dtype))
        return torch.stack([torch.mm(a[t], b[t], out_dtype=dtype) for t in range(len(a))])
    out = torch.empty(len(a), a.shape[1], b.shape[2], dtype=dtype, device=a.device)
    for t in range(len(a)):  # up to torch 2.11 FlopCounterMode fails on one bmm with out_dtype
        matmul_out(out[t], a[t], b[t])
    return out
