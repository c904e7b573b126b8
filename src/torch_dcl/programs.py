"""The programs of a layer: recordings of its host work, replayed from C++ while their conditions hold.

A program is recorded when a layer is called a second time with the same kind of input. It is valid for the same sizes,
dtypes, layouts and torch settings, which C++ compares, and while the layer has the same modules, without hooks and with
the same attributes. Tensors are looked up in every call, so they may be loaded, moved, tied or optimised at any time.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as modules

from torch_dcl.kernels import dispatch, host, reachable
from torch_dcl.kernels.launcher import recording
from torch_dcl.kernels.record import Recorded
from torch_dcl.norms import exchanges

__all__ = ["recorded", "replayed"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_REPLACED = ("forward", "_compiled_call_impl")
_GLOBAL_HOOKS = [name for name in vars(modules) if name.startswith("_global_") and name.endswith("_hooks")]
_OF_BRANCH = ("stride", "padding", "dilation", "padding_mode")
_SETTINGS_OF_NORM = ("training", "eps", "momentum", "track_running_stats")
_OF_NORM = (("_parameters", "weight"), ("_parameters", "bias"), ("_buffers", "running_mean"),
            ("_buffers", "running_var"), ("_buffers", "num_batches_tracked"))  # fmt: skip
_TRIES = 4
"""The number of failed recordings after which a layer is no longer recorded."""
_REMEMBERED = 64
"""The number of kinds of calls that a layer remembers."""

Condition = tuple[str, Any, str, Any]


def replayed(layer: nn.Module, x: Tensor) -> Tensor | None:
    """z from a program; None if there is none for this call."""
    programs = layer.__dict__.get("_programs")
    return None if programs is None else programs(layer, x)


def recorded(layer: nn.Module, x: Tensor, compute: Callable[[], Tensor | None]) -> Tensor | None:
    """Compute z, and record a program if the layer has been called with this kind of input before."""
    library = host.library() if type(x) is Tensor and reachable(x) else None
    if library is None or not _is_due(layer, x, library):
        return compute()
    units: list[Recorded] = []
    recording.units = units
    try:
        z = compute()
    finally:
        recording.units = None
    programs = layer.__dict__["_programs"]
    program = _program(layer, x, units[0], library) if z is not None and len(units) == 1 else None
    if program is None:
        programs.failed += 1
    else:
        programs.add(program)
    return z


def _is_due(layer: Any, x: Tensor, library: Any) -> bool:
    """Whether to record this call: it is the second of its kind, and does not communicate with other processes."""
    if exchanges(layer.fusion.norm):
        return False
    programs = layer.__dict__.get("_programs")
    if programs is None:
        programs = layer.__dict__["_programs"] = library.Programs(weakref.ref(layer), nn.Parameter)
        programs.seen, programs.failed = set(), 0
    if programs.failed >= _TRIES or not programs.belongs_to(layer):
        return False
    kind = x.shape, x.stride(), x.dtype, torch.is_grad_enabled(), layer.training, _autocast(x)
    if kind in programs.seen:
        return True
    if len(programs.seen) >= _REMEMBERED:
        programs.seen.clear()
    programs.seen.add(kind)
    return False


def _autocast(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _program(layer: nn.Module, x: Tensor, unit: Recorded, library: Any) -> Any | None:
    """A program; None if the unit reads tensors that are not the layer's own, such as those of a drawn pair."""
    sources = list(_sources(layer, unit))
    if len(sources) + 1 != len(unit.inputs) or unit.tape is None:
        return None
    if any(place[key] is not tensor for (place, key), tensor in zip(sources, unit.inputs[1:], strict=True)):
        return None
    first = unit.inputs[0]
    if first is None or (first is not x and (first.shape != x.shape or first.stride() != x.stride())):
        return None
    return library.Program(
        list(_conditions(layer, unit)), sources, [x, *unit.inputs[1:]], unit.learns, _autocast(x), unit.dtype,
        unit.tape, unit.differentiable, unit.saved, unit.held, unit.backward,
    )  # fmt: skip


def _sources(layer: Any, unit: Recorded) -> Iterator[tuple[dict[str, Any], str]]:
    """The dictionary and the key of every input of a unit but the first."""
    yield layer.branch._parameters, "weight"
    yield layer.fusion._parameters, "weight"
    yield layer.fusion._parameters if "bias" in layer.fusion._parameters else vars(layer.fusion), "bias"
    at = 4
    for place, key in _OF_NORM:
        # A tensor that the norm does not have or use is not an input.
        if at < len(unit.inputs) and getattr(layer.fusion.norm, place).get(key) is unit.inputs[at]:
            yield getattr(layer.fusion.norm, place), key
            at += 1


def _conditions(layer: Any, unit: Recorded) -> Iterator[Condition]:
    """The conditions of a program, beyond sizes, dtypes, layouts and settings, which C++ checks itself."""
    branch, fusion, norm = layer.branch, layer.fusion, layer.fusion.norm
    yield "equal", layer._modules, "branch", branch
    yield "equal", layer._modules, "fusion", fusion
    yield "equal", None, "branch_activation", None  # None refers to the layer's own dictionary
    yield "equal", branch._parameters, "bias", None
    if fusion.strategy == "stochastic":
        yield "equal", None, "training", layer.training
        yield "equal", vars(fusion), "training", fusion.training
    yield "equal", vars(fusion), "eps", fusion.eps
    yield from (("equal", vars(branch), name, vars(branch)[name]) for name in _OF_BRANCH if name in vars(branch))
    if norm is not None:
        yield "equal", fusion._modules, "norm", norm
        yield "empty", vars(norm), "_modules", None
        yield from (("equal", vars(norm), name, vars(norm)[name]) for name in _SETTINGS_OF_NORM)
        if isinstance(norm, nn.SyncBatchNorm) and norm.training:
            yield "call", functools.partial(exchanges, norm), "", False
    for module in (branch, fusion) if norm is None else (branch, fusion, norm):
        own = vars(module)
        yield "type", module, "", type(module)
        yield from (("empty", own, name, None) for name in _HOOKS)
        yield from (
            ("equal", own, name, own[name]) if name in own else ("absent", own, name, None) for name in _REPLACED
        )
    yield from (("empty", vars(modules), name, None) for name in _GLOBAL_HOOKS)
    yield "equal", vars(dispatch), "enabled", True
    yield "empty", vars(dispatch), "_watching", None
    yield "equal", vars(forward_ad), "_current_level", -1
    if unit.dtype is torch.float32:
        yield "call", torch._C._get_cublas_allow_tf32, "", torch._C._get_cublas_allow_tf32()
