"""Which kernels run for a fusion and for a projection, and where their results lie."""

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_dcl import functional, kernels
from torch_dcl.kernels.launcher import is_traced

if TYPE_CHECKING:
    from torch_dcl.kernels.plans import Plan

__all__ = [
    "DEEPEST", "Norm", "at_positions", "by_position", "cast", "fuse", "fuse_backward", "is_last", "lies_as",
    "on_tensor_cores", "product_", "products", "reference_fuse", "responses", "room_for", "takes_hopper", "turn",
    "widest",
]  # fmt: skip


DEEPEST = 128
"""Filters of a branch up to which a gradient of its weights, or of its outputs, fits into registers."""


class Norm(NamedTuple):
    """The batch norm of all branches: its tensors, ``[T·K2]`` if they are there, and its settings."""

    gamma: Tensor | None
    beta: Tensor | None
    mean: Tensor | None
    variance: Tensor | None
    tracked: Tensor | None
    eps: float
    momentum: float | None
    fixed: bool
    """Whether it normalises by its running statistics; else by the batch's, and the running ones, if any, follow."""
    ranks: int = 1
    """How many processes have a share of the batch."""
    group: Any = None
    """These processes, if there are several."""


def fuse(pre: list[Tensor], eps: float, pairs: bool) -> Tensor:
    """z of the responses before their ReLU."""
    from torch_dcl.kernels import elementwise  # noqa: PLC0415

    with kernels.on_device_of(pre[0]):
        return elementwise.fuse_forward(pre, eps, pairs)


def fuse_backward(grad: Tensor, pre: list[Tensor], eps: float, pairs: bool) -> list[Tensor]:
    """Their gradients."""
    from torch_dcl.kernels import elementwise  # noqa: PLC0415

    with kernels.on_device_of(grad):
        return elementwise.fuse_backward(grad, pre, eps, pairs)


def turn(x: Tensor, channels: int, last: bool, dtype: torch.dtype) -> Tensor:
    """A copy with the channels last in memory, or as torch has them by default."""
    from torch_dcl.kernels import elementwise  # noqa: PLC0415

    with kernels.on_device_of(x):
        return elementwise.turn(x, channels, last, dtype)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same values in another type: no copy where they have it already."""
    if x.dtype is dtype:
        return x
    if is_traced(x) or not x.is_cuda:  # Triton's interpreter truncates to bfloat16
        return x.to(dtype)
    from torch_dcl.kernels import elementwise  # noqa: PLC0415

    return elementwise.cast(x, dtype)


def on_tensor_cores(dtype: torch.dtype) -> bool:
    """Whether products are: float32 by torch's setting for it."""
    return dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32


def widest(dtype: torch.dtype) -> int:
    """The most channels of a branch whose responses are formed on the chip: all of a position's must fit there.

    And it must be worth it: without tensor cores cuBLAS is faster, and more so the more channels there are.
    """
    return 256 if dtype != torch.float32 else 128 if on_tensor_cores(dtype) else 64


def room_for(shape: Sequence[int], channels: int) -> tuple[int, ...]:
    """The strides of ``[..., C, ...]`` with the channels last in memory."""
    strides, size = [0] * len(shape), shape[channels]
    strides[channels] = 1
    for d in reversed(range(len(shape))):
        if d != channels:
            strides[d], size = size, size * max(shape[d], 1)
    return tuple(strides)


def lies_as(shape: Sequence[int], stride: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether strides are as expected, where there is more than one place along a dimension."""
    return all(size == 1 or own == other for size, own, other in zip(shape, stride, expected, strict=True))


def is_last(x: Tensor, channels: int) -> bool:
    """Whether the channels are last in memory, without gaps."""
    if channels == 1 and x.dim() == 4:
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.movedim(channels, -1).is_contiguous()


def by_position(y: Tensor, channels: int) -> Tensor:
    """``[..., C, ...]`` as ``[P, C]``, where it lies if the channels are last in memory."""
    if y.dim() == 2 and channels == 1:
        return y
    return y.movedim(channels, -1).reshape(-1, y.shape[channels])


def at_positions(y: Tensor, channels: int, rows: Tensor) -> Tensor:
    """``[P, N]`` at the positions of ``[..., C, ...]``."""
    if y.dim() == 2 and channels == 1:
        return rows
    return rows.view(*y.shape[:channels], *y.shape[channels + 1 :], rows.shape[1]).movedim(-1, channels)


def takes_hopper(plan: "Plan", y: Tensor, weight: Tensor) -> ModuleType | None:
    """The kernels of Hopper GPUs, on one of these, if they are for such a projection."""
    hopper = _hopper_on(y.device) if plan.T == 2 and y.is_cuda else None
    return hopper if hopper is not None and hopper.takes(y, plan.P, plan.M, weight.shape[1], plan.eps) else None


@functools.cache
def _hopper_on(device: torch.device) -> ModuleType | None:
    return _hopper_kernels() if torch.cuda.get_device_capability(device) == (9, 0) else None


@functools.cache
def _hopper_kernels() -> ModuleType | None:
    """Gluon is young and its names change: these kernels run with the versions of Triton that they were tried with."""
    import triton  # noqa: PLC0415

    if not (3, 6) <= tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 9):
        return None
    from torch_dcl.kernels import hopper  # noqa: PLC0415

    return hopper


def responses(y: Tensor, weight: Tensor, bias: Tensor | None, widths: Sequence[int], channels: int = 1) -> list[Tensor]:
    """The responses of all branches before their ReLU, by plain products."""
    rows = by_position(y, channels)
    biases = (None,) * len(widths) if bias is None else bias.unbind(0)
    parts = zip(torch.split(rows, list(widths), -1), torch.split(weight, list(widths)), biases, strict=True)
    return [at_positions(y, channels, F.linear(y_t, W_t.t(), b_t)) for y_t, W_t, b_t in parts]


def reference_fuse(pre: Sequence[Tensor], eps: float, pairs: bool) -> Tensor:
    """z in plain torch."""
    return (functional.fuse_pairs if pairs else functional.fuse_branches)(list(pre), eps)


# Products of half types whose result may be float32, which is what they are added up in anyway.


def product_(out: Tensor, a: Tensor, b: Tensor) -> None:
    """``a · b`` of two matrices of one type, written into a matrix of that type or of float32."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:  # only a GPU has such a product
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def products(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a_t · b_t`` of every t, of ``[T, M, P]`` and ``[T, P, N]``, in their type or in float32."""
    if a.dtype == dtype:
        return torch.bmm(a, b)
    if is_traced(a):
        if not a.is_cuda:
            return torch.bmm(a.to(dtype), b.to(dtype))
        return torch.stack([torch.mm(a[t], b[t], out_dtype=dtype) for t in range(len(a))])
    out = torch.empty(len(a), a.shape[1], b.shape[2], dtype=dtype, device=a.device)
    for t in range(len(a)):  # up to torch 2.11 FlopCounterMode stumbles over one bmm of two types
        product_(out[t], a[t], b[t])
    return out
