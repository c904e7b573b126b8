"""Which path a fusion takes: the kernels where they can, `torch_dcl.functional` everywhere else.

The kernels are operations of torch (`ops`), so that ``torch.compile`` and CUDA graphs know them. They take part on a
GPU, for two or three branches of one width, in float32, bfloat16 and float16. While a network is exported, under
``torch.func`` transforms, in float64, and for other T, the reference runs.

Outside a compiler a layer is one node of autograd (`unit`), which casts weights to the type of autocast and gives their
gradients in their own.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_dcl import functional, kernels
from torch_dcl.kernels import launch, ops, take, unit_ops
from torch_dcl.kernels import unit as unit_
from torch_dcl.kernels.launch import Norm, on_tensor_cores, widest
from torch_dcl.kernels.launcher import has_room
from torch_dcl.kernels.record import prefix_of_operations
from torch_dcl.kernels.unit import Settings, Stage

__all__ = [
    "Norm", "Stage", "disabled", "fits", "fuse_branches", "fuse_pairs", "linear", "may_run", "note",
    "project_and_fuse", "projects", "turn", "turns", "unit", "watch",
]  # fmt: skip

_enabled = os.environ.get("TORCH_DCL_KERNELS", "1") != "0"
_WIDE = torch.version.hip is None  # of the libraries of GPUs, cuBLAS gives products of half types in float32
_PLAIN = (Tensor, nn.Parameter)  # what is sharded, quantised or traced has a way of its own
_watching: list[Counter[str]] = []


def may_run(x: Tensor) -> bool:
    """Whether kernels can run on a layer's input at all."""
    return _enabled and take(x.dtype, x.device.type)


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Take the reference path inside the block. ``TORCH_DCL_KERNELS=0`` in the environment does so for good."""
    global _enabled  # noqa: PLW0603 - a plain flag, which a compiled network can guard on
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


@contextlib.contextmanager
def watch() -> Iterator[Counter[str]]:
    """Count which paths run inside the block.

    ::

        with dispatch.watch() as ran:
            model(x)
        ran["project_and_fuse: kernel"], ran["project_and_fuse: reference"]

    A compiled network runs its kernels without coming through here again; what it was compiled with is counted.
    """
    counter: Counter[str] = Counter()
    _watching.append(counter)
    try:
        yield counter
    finally:
        _watching.remove(counter)


def note(what: str, path: str) -> None:
    """Count a path for those who watch."""
    for counter in _watching:
        counter[f"{what}: {path}"] += 1


def fuse_branches(pre: Sequence[Tensor], eps: float) -> Tensor:
    """:func:`torch_dcl.functional.fuse_branches`, by a kernel where there is one."""
    if len(pre) in (2, 3) and fits(pre):
        note("fuse_branches", "kernel")
        return ops.fuse(pre, eps, pairs=False)
    note("fuse_branches", "reference")
    return functional.fuse_branches(pre, eps)


def fuse_pairs(pre: Sequence[Tensor], eps: float) -> Tensor:
    """:func:`torch_dcl.functional.fuse_pairs`, by a kernel where there is one."""
    if len(pre) == 3 and fits(pre):
        note("fuse_pairs", "kernel")
        return ops.fuse(pre, eps, pairs=True)
    note("fuse_pairs", "reference")
    return functional.fuse_pairs(pre, eps)


def unit(
    x: Tensor, theta: Tensor, stage: Stage, weight: Tensor, bias: Tensor | None, widths: Sequence[int], eps: float,
    norm: Norm | None, *, pairs: bool,
) -> Tensor | None:  # fmt: skip
    """Both stages of a layer as one operation; None where kernels cannot compute them.

    Args:
        x: The input of stage 1: best with the channels last in memory.
        theta: Its filters; there is no bias.
        stage: Its geometry.
        weight: ``[ΣM, K2]``.
        bias: ``[T, K2]`` or None.
        widths: M(t).
        eps: ε.
        norm: Of the responses.
        pairs: Whether to take the mean over pairs instead of fusing all.
    """
    spatial, compiling = stage[0], torch.compiler.is_compiling()
    if x.device != weight.device or x.device != theta.device or (not compiling and _transformed()):
        return None
    if compiling:
        last = not spatial or (spatial == 2 and x.is_contiguous(memory_format=torch.channels_last))
    else:
        last = not spatial or launch.is_last(x, 1)
    closed = compiling and last and prefix_of_operations() != ""
    ranks = None if norm is None else norm.ranks
    if ranks == 1 and x.shape[0] == 0:
        return None
    dtype = _computed_in(
        (type(x), type(theta), type(weight)), x.dtype, x.device, x.dim(), last, theta.dtype, theta.requires_grad,
        spatial, tuple(widths), ranks, pairs, compiling and not closed,
    )  # fmt: skip
    if dtype is None:
        return None
    if closed:
        return unit_ops.run(x.to(dtype), theta, weight, bias, stage, tuple(widths), eps, pairs, norm)
    T, channels = len(widths), x.dim() - 1 - spatial
    keep = norm is None and (not spatial or widths[0] > widest(dtype))
    if compiling:
        y = _compiled_stage(x, theta, stage, dtype)
        z = ops.project(y, weight, bias, channels, T, eps, pairs, keep, norm)
        return turn(z, channels, last=False) if spatial and _apart(y, channels) else z
    settings = Settings(stage, channels, T, eps, pairs, keep, dtype)
    return unit_.run(x if x.dtype is dtype else x.to(dtype), theta, weight, bias, settings, norm)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _computed_in(
    kinds: tuple[type, ...], dtype: torch.dtype, device: torch.device, dim: int, last: bool, theta: torch.dtype,
    learns: bool, spatial: int, widths: tuple[int, ...], ranks: int | None, pairs: bool, traced: bool,
) -> torch.dtype | None:  # fmt: skip
    """The type that kernels compute a unit in; None where they cannot.

    A compiler asks once, and guards what it is asked with: what is looked up in here would be looked up in every call.

    Args:
        kinds: The classes of the input, the filters and the weights.
        dtype: Of the input.
        device: Its device.
        dim: Its dimensions.
        last: Whether the channels are last in memory.
        theta: The type of the filters.
        learns: Whether they have gradients.
        spatial: The spatial dimensions.
        widths: M(t).
        ranks: How many processes a norm has a share of; None without a norm.
        pairs: Whether to take the mean over pairs.
        traced: Whether a compiler will see the parts of the unit.
    """
    T = len(widths)
    if not (T == 3 or (T == 2 and not pairs)) or any(widths[0] != M for M in widths):
        return None
    if functional.exporting() or any(kind not in _PLAIN for kind in kinds):
        return None
    cast = _autocasts(device.type)
    to = torch.get_autocast_dtype(device.type) if cast else dtype
    if not cast and theta is not to:
        return None  # torch has an error for it
    if spatial and dim != spatial + 2:
        return None  # a single image, for example
    if ranks is not None and (dim != spatial + 2 or widths[0] > _widest_normed(to, device, traced)):
        return None
    if spatial and not on_tensor_cores(to) and not last:
        return None
    note("project_and_fuse", "kernel")
    if not spatial and theta is not to and learns and torch.is_grad_enabled():
        note("linear", "kernel")
    return to


def _compiled_stage(x: Tensor, theta: Tensor, stage: Stage, dtype: torch.dtype) -> Tensor:
    """Stage 1 for a compiler to trace; the gradient of a linear layer's weight is not rounded here either."""
    x, low = x.to(dtype), theta.to(dtype)
    if not stage.spatial and dtype != theta.dtype and theta.requires_grad and torch.is_grad_enabled():
        return ops.linear(x, low, theta)
    return unit_.construct(x, low, stage)


def _widest_normed(dtype: torch.dtype, device: torch.device, traced: bool) -> int:
    """The most channels of a branch that the kernels can normalise."""
    deepest = widest(dtype)
    return min(deepest, launch.DEEPEST) if traced or not has_room(device) else deepest


def project_and_fuse(
    y: Tensor, weight: Tensor, bias: Tensor | None, widths: Sequence[int], eps: float, channels: int = 1,
    *, pairs: bool, keep: bool,
) -> Tensor:  # fmt: skip
    """Stage 2 at every position: ``z = fuse_t(y_t · W_t + b_t)``.

    Args:
        y: The branches' outputs, ``[..., ΣM, ...]``, best with the channels last in memory: kernels want them so.
        weight: ``[ΣM, K2]``.
        bias: ``[T, K2]`` or None.
        widths: M(t).
        eps: ε.
        channels: The dimension of the channels.
        pairs: Whether to take the mean over pairs instead of fusing all.
        keep: Whether backward keeps the responses. Else it forms them once more, which takes less memory, and less time
            where there are many positions for each weight.

    Returns:
        z ``[..., K2, ...]``, with the channels last in memory, unless a kernel had to transpose y: then it lies as y.
        No view, so that what comes next may write into it.
    """
    if projects(y, weight, widths, pairs=pairs):
        note("project_and_fuse", "kernel")
        keep = keep or widths[0] > widest(y.dtype)
        if torch.compiler.is_compiling():
            return ops.project(y, weight, bias, channels, len(widths), eps, pairs, keep, None)
        return unit_.run(y, None, weight, bias, Settings(None, channels, len(widths), eps, pairs, keep, y.dtype), None)
    note("project_and_fuse", "reference")
    pre = launch.responses(y, weight, bias, widths, channels)
    return fuse_pairs(pre, eps) if pairs else fuse_branches(pre, eps)


def projects(y: Tensor, weight: Tensor, widths: Sequence[int], *, pairs: bool) -> bool:
    """Whether `project_and_fuse` of these is a kernel's, here and now."""
    there = (3,) if pairs else (2, 3)
    return len(set(widths)) == 1 and len(widths) in there and fits((y, weight), matched=False)


def turns(x: Tensor, channels: int = 1, *, cast: bool = False) -> bool:
    """Whether x lies as torch has images by default, in which no kernel takes it, and `turn` is worth its time."""
    return fits((x,)) and _apart(x, channels) and on_tensor_cores(_type_of(x, cast))


def turn(x: Tensor, channels: int = 1, *, last: bool, cast: bool = False) -> Tensor:
    """The same values with the channels last in memory, or as torch has them by default.

    With ``cast`` in the type that autocast, if it is on, will have them in anyway.
    """
    return ops.turn(x, channels, last, _type_of(x, cast))


def _apart(x: Tensor, channels: int) -> bool:
    return x.stride(channels) != 1 and x.shape[channels] > 1 and x.is_contiguous()


def _type_of(x: Tensor, cast: bool) -> torch.dtype:
    """The type of x, or what autocast makes of it."""
    return torch.get_autocast_dtype(x.device.type) if cast and _autocasts(x.device.type) else x.dtype


def _autocasts(kind: str) -> bool:
    """Whether products on such a device are in the type of autocast, one of the half types."""
    return torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) in (torch.bfloat16, torch.float16)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, otherwise: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Stage 1 of a linear layer: ``F.linear``. Under autocast the gradient of a float32 weight comes as float32.

    Args:
        x: ``[*, K1]``.
        weight: ``[ΣM, K1]``.
        bias: ``[ΣM]`` or None.
        otherwise: What to call with x where there is nothing to gain; None calls ``F.linear``.

    Returns:
        y ``[*, ΣM]``.
    """
    low = _low_type(x, weight, bias)
    if low is None:
        return F.linear(x, weight, bias) if otherwise is None else otherwise(x)
    note("linear", "kernel")
    return ops.linear(x if x.dtype == low else x.to(low), weight.to(low), weight)


def _low_type(x: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """The half type that autocast computes a product in, where the weight's gradient can be had in float32."""
    if not (_enabled and _WIDE) or bias is not None or any(type(t) not in _PLAIN for t in (x, weight)):
        return None
    if not (weight.requires_grad and torch.is_grad_enabled() and weight.dtype == torch.float32):
        return None
    if not kernels.usable(x) or x.device != weight.device or functional.exporting() or _transformed():
        return None
    if not torch.is_autocast_enabled(x.device.type):
        return None
    low = torch.get_autocast_dtype(x.device.type)
    return low if low in (torch.bfloat16, torch.float16) else None


def fits(tensors: Sequence[Tensor], *, matched: bool = True) -> bool:
    """Whether kernels can take these tensors, here and now: on one device, and of one type unless not ``matched``."""
    first = tensors[0]
    if not kernels.usable(first) or not _enabled or functional.exporting():
        return False
    if any(t.device != first.device or (matched and t.dtype != first.dtype) for t in tensors):
        return False
    return not _transformed()


def _transformed() -> bool:
    """Whether something is at work that cannot look into an operation, nor call it, on these tensors or others."""
    if torch.compiler.is_compiling():
        return False
    active = torch._C._are_functorch_transforms_active()
    forward_mode = torch.autograd.forward_ad._current_level >= 0
    return active or forward_mode or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
