"""Which kernels run for a fusion and for a projection, and the same in plain torch: `ops` makes operations of them."""

import functools
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_dcl import functional, kernels

__all__ = [
    "at_positions", "by_position", "fuse", "fuse_backward", "is_last", "project", "project_backward", "reference_fuse",
    "reference_project", "responses", "room", "turn",
]  # fmt: skip


def fuse(pre: list[Tensor], eps: float, pairs: bool) -> Tensor:
    """z of the responses before their ReLU."""
    from torch_dcl.kernels import fused  # noqa: PLC0415

    with kernels.on_device_of(pre[0]):
        return fused.fuse_forward(pre, eps, pairs)


def fuse_backward(grad: Tensor, pre: list[Tensor], eps: float, pairs: bool) -> list[Tensor]:
    """Their gradients."""
    from torch_dcl.kernels import fused  # noqa: PLC0415

    with kernels.on_device_of(grad):
        return fused.fuse_backward(grad, pre, eps, pairs)


def project(
    y: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, T: int, eps: float, pairs: bool, keep: bool
) -> Tensor | None:
    """Write z ``[P, K2]``; give the responses, if they are kept."""
    from torch_dcl.kernels import kept, project  # noqa: PLC0415

    with kernels.on_device_of(y):
        if keep:
            return kept.kept_forward(y, weight, bias, z, T, eps, pairs)
        hopper = _hopper(y)
        if hopper is not None and hopper.takes(y, weight, T, eps):
            hopper.project_forward(y, weight, bias, z, eps)
        else:
            project.project_forward(y, weight, bias, z, T, eps, pairs)
    return None


def project_backward(
    grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, pre: Tensor | None, dtype: torch.dtype,
    T: int, eps: float, pairs: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The gradients of branch outputs, weights and biases, the latter two in ``dtype``."""
    from torch_dcl.kernels import kept, project  # noqa: PLC0415

    with kernels.on_device_of(y):
        if pre is not None:
            return kept.kept_backward(grad, y, weight, bias, pre, T, eps, pairs, dtype)
        hopper = _hopper(y)
        if hopper is not None and hopper.takes(y, weight, T, eps):
            return hopper.project_backward(grad, y, weight, bias, eps, dtype)  # type: ignore[no-any-return]
        return project.project_backward(grad, y, weight, bias, T, eps, pairs, dtype)


def turn(x: Tensor, channels: int, last: bool, dtype: torch.dtype) -> Tensor:
    """A copy with the channels last in memory, or as torch has them by default."""
    from torch_dcl.kernels import layout  # noqa: PLC0415

    with kernels.on_device_of(x):
        return layout.turn(x, channels, last, dtype)


def room(shape: Sequence[int], channels: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for ``[..., C, ...]`` with the channels last, and not as a view."""
    strides, size = [0] * len(shape), shape[channels]
    strides[channels] = 1
    for d in reversed(range(len(shape))):
        if d != channels:
            strides[d], size = size, size * max(shape[d], 1)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def is_last(x: Tensor, channels: int) -> bool:
    """Whether the channels are last in memory, without gaps."""
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


def _hopper(y: Tensor) -> ModuleType | None:
    """The kernels of Hopper GPUs, on one of these."""
    return _hopper_on(y.device) if y.is_cuda else None


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


def reference_project(inputs: Sequence[Tensor], channels: int, T: int, eps: float, pairs: bool) -> Tensor:
    """z in plain torch from branch outputs, weights and perhaps biases."""
    y, weight, *rest = inputs
    widths = [y.shape[channels] // T] * T
    return reference_fuse(responses(y, weight, rest[0] if rest else None, widths, channels), eps, pairs)
