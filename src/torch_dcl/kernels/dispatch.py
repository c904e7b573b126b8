"""Choose between the kernels and the reference, `torch_dcl.functional`.

The kernels run on a GPU, for two or three branches of equal width, in float32, bfloat16 and float16. The reference runs
during export, under ``torch.func`` transforms, in float64 and for any other T. The kernels are registered torch
operations (`ops`), so ``torch.compile`` and CUDA graphs support them.

On a CPU stage 2 of a convolution runs in plain torch, part by part (`torch_dcl.parts`).

In eager mode a layer is one autograd node (`unit`), which casts weights to the autocast dtype and returns their
gradients in the dtype of the weights.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_dcl import functional, kernels, parts_ops
from torch_dcl.functional import constant, transforms
from torch_dcl.kernels import launch, ops, supports
from torch_dcl.kernels import unit as unit_
from torch_dcl.kernels.launch import Norm, max_fused_width, uses_tensor_cores
from torch_dcl.kernels.launcher import has_large_shared_memory
from torch_dcl.kernels.record import prefix_of_operations
from torch_dcl.kernels.unit import Settings, Stage
from torch_dcl.kernels.unit_ops import Closed, Operand, encode

__all__ = [
    "Norm", "Stage", "can_project", "closed_settings", "count_path", "disabled", "enabled", "fuse_branches",
    "fuse_pairs", "kernels_accept", "linear", "may_run", "project_and_fuse", "runs_in_parts", "should_transpose",
    "transpose", "unit", "watch",
]  # fmt: skip

LEAST_IN_PARTS = 1 << 16
"""The elements of z from which on parts are faster than the reference, which has fewer and larger operations."""
enabled = os.environ.get("TORCH_DCL_KERNELS", "1") != "0"
_FLOAT32_PRODUCTS = torch.version.hip is None  # cuBLAS can return float32 products of half-precision matrices
_PLAIN = (Tensor, nn.Parameter)  # other tensor classes (sharded, quantised, traced) dispatch by themselves
_watching: list[Counter[str]] = []


def may_run(x: Tensor) -> bool:
    """Whether kernels can run on a layer's input at all."""
    return enabled and supports(x.dtype, x.device)


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Run the reference inside the block. ``TORCH_DCL_KERNELS=0`` in the environment disables kernels permanently."""
    global enabled  # noqa: PLW0603 - compiled networks guard on this plain flag
    before, enabled = enabled, False
    try:
        yield
    finally:
        enabled = before


@contextlib.contextmanager
def watch() -> Iterator[Counter[str]]:
    """Count the paths that run inside the block.

    ::

        with dispatch.watch() as ran:
            model(x)
        ran["project_and_fuse: kernel"], ran["project_and_fuse: reference"]

    For a compiled network the counts are those of its compilation: later calls bypass this module.
    """
    counter: Counter[str] = Counter()
    _watching.append(counter)
    try:
        yield counter
    finally:
        _watching.remove(counter)


@constant
def count_path(what: str, path: str) -> None:
    """Count a path in every open `watch`; during the compilation of a compiled network, which does not guard counts."""
    for counter in _watching:
        counter[f"{what}: {path}"] += 1


def fuse_branches(pre: Sequence[Tensor], eps: float) -> Tensor:
    """:func:`torch_dcl.functional.fuse_branches`, with a kernel where possible."""
    if len(pre) in (2, 3) and kernels_accept(pre):
        count_path("fuse_branches", "kernel")
        return ops.fuse(pre, eps, pairs=False)
    count_path("fuse_branches", "reference")
    return functional.fuse_branches(pre, eps)


def fuse_pairs(pre: Sequence[Tensor], eps: float) -> Tensor:
    """:func:`torch_dcl.functional.fuse_pairs`, with a kernel where possible."""
    if len(pre) == 3 and kernels_accept(pre):
        count_path("fuse_pairs", "kernel")
        return ops.fuse(pre, eps, pairs=True)
    count_path("fuse_pairs", "reference")
    return functional.fuse_pairs(pre, eps)


def unit(
    x: Tensor, theta: Tensor, stage: Stage, weight: Tensor, bias: Tensor | None, widths: Sequence[int], eps: float,
    norm: Norm | None, *, pairs: bool,
) -> Tensor | None:  # fmt: skip
    """Run both stages of a layer as one operation; None if the kernels do not support it.

    Args:
        x: The input of stage 1, preferably in channels_last.
        theta: The filters of stage 1, which has no bias.
        stage: The geometry of stage 1.
        weight: ``[ΣM, K2]``.
        bias: ``[T, K2]`` or None.
        widths: M(t).
        eps: ε.
        norm: The batch norm of the responses.
        pairs: Whether to average over pairs instead of fusing all branches.
    """
    spatial, compiling = stage[0], torch.compiler.is_compiling()
    if x.device != weight.device or x.device != theta.device or _transformed():
        return None
    if compiling:
        last = not spatial or (spatial == 2 and x.is_contiguous(memory_format=torch.channels_last))
    else:
        last = not spatial or launch.is_channels_last(x, 1)
    ranks = None if norm is None else norm.ranks
    if ranks == 1 and x.shape[0] == 0:
        return None
    dtype = _compute_dtype(
        (type(x), type(theta), type(weight)), x.dtype, x.device, x.dim(), last, theta.dtype, theta.requires_grad,
        spatial, tuple(widths), ranks, pairs, compiling,
    )  # fmt: skip
    if dtype is None:
        return None
    T, channels = len(widths), x.dim() - 1 - spatial
    keep = norm is None and (not spatial or widths[0] > max_fused_width(dtype))
    if compiling:
        y = _compiled_stage(x, theta, stage, dtype)
        z = ops.project(y, weight, bias, channels, T, eps, pairs, keep, norm)
        return transpose(z, channels, last=False) if spatial and _is_channels_first(y, channels) else z
    settings = Settings(stage, channels, T, eps, pairs, keep, dtype)
    return unit_.run(x if x.dtype is dtype else x.to(dtype), theta, weight, bias, settings, norm)


def closed_settings(
    x: Operand, theta: Operand, weight: Operand, dim: int, stage: Stage, widths: tuple[int, ...], fixed: bool | None,
    *, pairs: bool,
) -> Closed | None:  # fmt: skip
    """The settings of a unit as one opaque operation; None if the kernels do not support it.

    Args:
        x: The input, of rows or of images in channels_last.
        theta: The filters of stage 1.
        weight: The weights of stage 2.
        dim: The number of dimensions of the input.
        stage: The geometry of stage 1.
        widths: M(t) of the fused branches.
        fixed: Whether the norm uses running statistics; None without a norm.
        pairs: Whether to average over pairs.
    """
    if functional.exporting() or not supports(x.dtype, x.device) or not x.device == theta.device == weight.device:
        return None
    if not prefix_of_operations():  # asked last: it waits for the library
        return None
    dtype = _compute_dtype(
        (x.kind, theta.kind, weight.kind), x.dtype, x.device, dim, True, theta.dtype, theta.learns, stage.spatial,
        widths, None if fixed is None else 1, pairs, False,
    )  # fmt: skip
    return None if dtype is None else encode(dtype, x, theta, weight, stage, widths, fixed, pairs=pairs)


@constant
def _compute_dtype(
    kinds: tuple[type, ...], dtype: torch.dtype, device: torch.device, dim: int, last: bool, theta: torch.dtype,
    learns: bool, spatial: int, widths: tuple[int, ...], ranks: int | None, pairs: bool, traced: bool,
) -> torch.dtype | None:  # fmt: skip
    """The dtype in which the kernels compute a unit; None if they do not support it.

    A constant for compilers, which guard the arguments alone: guards on every lookup in here would slow each call.

    Args:
        kinds: The classes of the input, the filters and the weights.
        dtype: The dtype of the input.
        device: The device of the input.
        dim: The number of dimensions of the input.
        last: Whether the channels are last in memory.
        theta: The dtype of the filters.
        learns: Whether the filters require gradients.
        spatial: The number of spatial dimensions.
        widths: M(t).
        ranks: The number of processes that share the norm's batch; None without a norm.
        pairs: Whether to average over pairs.
        traced: Whether a compiler traces the operations of the unit one by one.
    """
    T = len(widths)
    if not (T == 3 or (T == 2 and not pairs)) or any(widths[0] != M for M in widths):
        return None
    if functional.exporting() or any(kind not in _PLAIN for kind in kinds):
        return None
    cast = _autocasts(device.type)
    to = torch.get_autocast_dtype(device.type) if cast else dtype
    if not cast and theta is not to:
        return None  # torch raises the error for mixed dtypes
    if spatial and dim != spatial + 2:
        return None  # a single image, for example
    if ranks is not None and (dim != spatial + 2 or widths[0] > _max_normed_width(to, device, traced)):
        return None
    if spatial and not uses_tensor_cores(to) and not last:
        return None
    count_path("project_and_fuse", "kernel")
    if not spatial and theta is not to and learns and torch.is_grad_enabled():
        count_path("linear", "kernel")
    return to


def _compiled_stage(x: Tensor, theta: Tensor, stage: Stage, dtype: torch.dtype) -> Tensor:
    """Stage 1 for a compiler to trace. Here too the weight gradient of a linear layer is not rounded."""
    x, low = x.to(dtype), theta.to(dtype)
    if not stage.spatial and dtype != theta.dtype and theta.requires_grad and torch.is_grad_enabled():
        return ops.linear(x, low, theta)
    return unit_.construct(x, low, stage)


def _max_normed_width(dtype: torch.dtype, device: torch.device, traced: bool) -> int:
    """The largest branch width that the kernels can normalise."""
    deepest = max_fused_width(dtype)
    return min(deepest, launch.MAX_FILTERS_IN_REGISTERS) if traced or not has_large_shared_memory(device) else deepest


def project_and_fuse(
    y: Tensor, weight: Tensor, bias: Tensor | None, widths: Sequence[int], eps: float, channels: int = 1,
    *, pairs: bool, keep: bool, norm: Norm | None = None,
) -> Tensor:  # fmt: skip
    """Stage 2 at every position: ``z = fuse_t(y_t · W_t + b_t)``.

    Args:
        y: The branch outputs ``[..., ΣM, ...]``, preferably in channels_last, the layout of the kernels.
        weight: ``[ΣM, K2]``.
        bias: ``[T, K2]`` or None.
        widths: M(t).
        eps: ε.
        channels: The channel dimension.
        pairs: Whether to average over pairs instead of fusing all branches.
        keep: Whether to save the responses for backward. Recomputing them needs less memory, and less time if there
            are many positions for each weight.
        norm: The batch norm of the responses, where `runs_in_parts`.

    Returns:
        z ``[..., K2, ...]`` with the channels last in memory, or in the layout of y if a kernel had to transpose it.
        Never a view, so the next layer may modify it in place.
    """
    if can_project(y, weight, widths, pairs=pairs):
        count_path("project_and_fuse", "kernel")
        keep = keep or widths[0] > max_fused_width(y.dtype)
        if torch.compiler.is_compiling():
            return ops.project(y, weight, bias, channels, len(widths), eps, pairs, keep, None)
        return unit_.run(y, None, weight, bias, Settings(None, channels, len(widths), eps, pairs, keep, y.dtype), None)
    if runs_in_parts(y, weight, widths, channels):
        count_path("project_and_fuse", "parts")
        if torch.compiler.is_compiling():
            to = unit_.gradient_type(y.dtype, weight.dtype)
            return parts_ops.run(y, weight, bias, channels, len(widths), eps, pairs, norm, to)
        return unit_.run(y, None, weight, bias, Settings(None, channels, len(widths), eps, pairs, False, y.dtype), norm)
    count_path("project_and_fuse", "reference")
    pre = launch.responses(y, weight, bias, widths, channels)
    return fuse_pairs(pre, eps) if pairs else fuse_branches(pre, eps)


def can_project(y: Tensor, weight: Tensor, widths: Sequence[int], *, pairs: bool) -> bool:
    """Whether `project_and_fuse` runs a kernel for these arguments."""
    supported = (3,) if pairs else (2, 3)
    return len(set(widths)) == 1 and len(widths) in supported and kernels_accept((y, weight), matched=False)


def runs_in_parts(y: Tensor, weight: Tensor, widths: Sequence[int], channels: int) -> bool:
    """Whether stage 2 of a convolution runs on a CPU by parts of the positions, with its batch norm."""
    if y.device.type != "cpu" or not enabled or channels == y.dim() - 1 or _transformed():
        return False
    if not _supports_parts((type(y), type(weight)), y.dtype, weight.dtype, weight.device, tuple(widths)):
        return False  # checked first: an exported network must not depend on sizes
    if y.numel() // y.shape[channels] * weight.shape[1] < LEAST_IN_PARTS:
        return False
    return torch.compiler.is_compiling() or launch.is_channels_last(y, channels) or y.is_contiguous()


@constant
def _supports_parts(
    kinds: tuple[type, ...], dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device,
    widths: tuple[int, ...],
) -> bool:  # fmt: skip
    """Whether parts support branch outputs on a CPU of these classes and types; a constant for compilers."""
    if kernels.INTERPRETED or functional.exporting() or transforms():
        return False
    casts = torch.is_autocast_enabled("cpu")
    dtypes = (torch.get_autocast_dtype("cpu"), torch.float32) if casts else (dtype, dtype)
    if dtype is not dtypes[0] or weight_dtype not in dtypes or device.type != "cpu":
        return False
    return all(kind in _PLAIN for kind in kinds) and all(width == widths[0] for width in widths)


def should_transpose(x: Tensor, channels: int = 1, *, cast: bool = False) -> bool:
    """Whether x is in torch's default layout, which no kernel accepts, and `transpose` pays off."""
    return kernels_accept((x,)) and _is_channels_first(x, channels) and uses_tensor_cores(_type_of(x, cast))


def transpose(x: Tensor, channels: int = 1, *, last: bool, cast: bool = False) -> Tensor:
    """Copy x to channels_last (``last``) or to torch's default layout; with ``cast`` in the autocast dtype."""
    return launch.to_layout(x, channels, last, _type_of(x, cast))


def _is_channels_first(x: Tensor, channels: int) -> bool:
    return x.stride(channels) != 1 and x.shape[channels] > 1 and x.is_contiguous()


def _type_of(x: Tensor, cast: bool) -> torch.dtype:
    """The dtype of x, or the one that autocast casts it to."""
    return torch.get_autocast_dtype(x.device.type) if cast and _autocasts(x.device.type) else x.dtype


def _autocasts(kind: str) -> bool:
    """Whether autocast to a half-precision dtype is enabled for this device type."""
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) in (torch.bfloat16, torch.float16)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, otherwise: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Stage 1 of a linear layer: ``F.linear``, with a float32 gradient for a float32 weight under autocast.

    Args:
        x: ``[*, K1]``.
        weight: ``[ΣM, K1]``.
        bias: ``[ΣM]`` or None.
        otherwise: Called with x if the kernel has no advantage; None calls ``F.linear``.

    Returns:
        y ``[*, ΣM]``.
    """
    low = _low_type(x, weight, bias)
    if low is None:
        return F.linear(x, weight, bias) if otherwise is None else otherwise(x)
    count_path("linear", "kernel")
    return ops.linear(x if x.dtype == low else x.to(low), weight.to(low), weight)


def _low_type(x: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """The autocast dtype of a product whose weight gradient can be returned in float32; None for other products."""
    if not (enabled and _FLOAT32_PRODUCTS) or bias is not None or any(type(t) not in _PLAIN for t in (x, weight)):
        return None
    if not (weight.requires_grad and torch.is_grad_enabled() and weight.dtype == torch.float32):
        return None
    if not kernels.usable(x) or x.device != weight.device or functional.exporting() or _transformed():
        return None
    if not torch.is_autocast_enabled(x.device.type):
        return None
    low = torch.get_autocast_dtype(x.device.type)
    return low if low in (torch.bfloat16, torch.float16) else None


def kernels_accept(tensors: Sequence[Tensor], *, matched: bool = True) -> bool:
    """Whether the kernels accept these tensors: on one device and, if ``matched``, of one dtype."""
    first = tensors[0]
    if not kernels.usable(first) or not enabled or functional.exporting():
        return False
    if any(t.device != first.device or (matched and t.dtype != first.dtype) for t in tensors):
        return False
    return not _transformed()


def _transformed() -> bool:
    """Whether a functorch transform, forward-mode autograd or a JIT trace is active, which kernels do not support."""
    if torch.compiler.is_compiling():
        return transforms()
    return transforms() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
