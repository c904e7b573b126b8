"""Batch norms of the branches: making them, their description for the kernels, plain torch, older state dicts.

One norm of T·K2 channels normalises the pre-activations of all branches.
"""

from collections.abc import Callable, MutableMapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import _has_any_global_hook

from torch_dcl.functional import constant
from torch_dcl.kernels.dispatch import Norm

__all__ = ["called_plainly", "exchanges", "join_norms", "kernel_norm", "make_part", "norm_tensors", "normalise"]


def make_part(
    name: str, factory: Callable[..., nn.Module] | None, example: str, *arguments: int,
    device: torch.device | str | None, dtype: torch.dtype | None,
) -> nn.Module | None:  # fmt: skip
    """The norm or the activation of a layer; TypeError for a module in place of a callable that returns modules."""
    if factory is None:
        return None
    if isinstance(factory, nn.Module) or not callable(factory):
        kind = type(factory).__name__
        raise TypeError(f"{name} must make a module when it is called, for example {example}; got a {kind}")
    with nullcontext() if device is None else torch.device(device):  # whatever the caller's default device is
        return factory(*arguments).to(device=device, dtype=dtype)


def kernel_norm(norm: Any) -> Norm | None:
    """A batch norm without hooks as an argument of the kernels; None if they do not support it."""
    if not _is_plain(type(norm)) or norm._modules:
        return None  # such as a parametrized one
    training, group, ranks = norm.training, None, 1
    if training and _is_synchronised(type(norm)):
        if torch.compiler.is_compiling() and _is_distributed():
            return None  # kernels do not exchange statistics inside a compiled graph
        if not torch.compiler.is_compiling() and (group := _group_of(norm)) is not None:
            ranks = distributed.get_world_size(group)
    fixed = not training and norm.running_mean is not None
    gamma, beta, mean, variance, count = norm_tensors(norm, fixed)
    if (mean is None) != (variance is None) or (mean is not None and count is None and not fixed):
        return None
    return Norm(gamma, beta, mean, variance, count, norm.eps, norm.momentum, fixed, ranks, group)


def norm_tensors(norm: Any, fixed: bool) -> tuple[Tensor | None, ...]:
    """γ, β, and what the kernels read or update: running means, variances, and the count of batches."""
    if fixed:
        return norm.weight, norm.bias, norm.running_mean, norm.running_var, None
    if norm.training and norm.track_running_stats:
        return norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked
    return norm.weight, norm.bias, None, None, None


def normalise(norm: nn.Module, pre: Sequence[Tensor], channels: int) -> list[Tensor]:
    """Normalise the pre-activations of all branches, without concatenating them for a plain batch norm."""
    plain = type(norm).forward is _BatchNorm.forward and not norm._modules and called_plainly(norm)
    if not plain or channels != 1:  # a batch norm expects its channels in the second dimension
        return list(norm(torch.cat(list(pre), channels)).chunk(len(pre), channels))
    assert isinstance(norm, _BatchNorm)
    norm._check_input_dim(pre[0])  # type: ignore[no-untyped-call]
    momentum = norm.momentum or 0.0
    tracks = norm.training and norm.track_running_stats
    if tracks and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:
            momentum = 1.0 / float(norm.num_batches_tracked)
    by_batch = norm.training or (norm.running_mean is None and norm.running_var is None)
    running = (norm.running_mean, norm.running_var) if tracks or not by_batch else (None, None)
    columns = ((None,) * len(pre) if t is None else t.chunk(len(pre)) for t in (*running, norm.weight, norm.bias))
    return [
        F.batch_norm(p, mean, variance, gamma, beta, by_batch, momentum, norm.eps)
        for p, mean, variance, gamma, beta in zip(pre, *columns, strict=True)
    ]


def join_norms(state: MutableMapping[str, Tensor], prefix: str, T: int) -> None:
    """Concatenate the tensors of older state dicts, with one batch norm per branch, to those of one norm."""
    for name in [key.removeprefix(f"{prefix}0.") for key in state if key.startswith(f"{prefix}0.")]:
        keys = [f"{prefix}{t}.{name}" for t in range(T)]
        if all(key in state for key in keys):
            tensors = [state.pop(key) for key in keys]
            state[prefix + name] = torch.cat(tensors) if tensors[0].dim() else tensors[0]


@constant
def _is_plain(kind: type[nn.Module]) -> bool:
    """Whether a batch norm has torch's own forward; a constant for compilers."""
    return issubclass(kind, _BatchNorm) and kind.forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)


@constant
def _is_synchronised(kind: type[nn.Module]) -> bool:
    """Whether a batch norm is synchronised across processes; a constant for compilers."""
    return issubclass(kind, nn.SyncBatchNorm)


def exchanges(norm: nn.Module | None) -> bool:
    """Whether a norm currently shares its statistics with other processes."""
    return norm is not None and _is_synchronised(type(norm)) and _group_of(norm) is not None


def _group_of(norm: nn.Module | None) -> Any:
    """The process group with which a norm exchanges its statistics; None for a single process or in eval mode."""
    if not isinstance(norm, nn.SyncBatchNorm) or not norm.training:
        return None
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    group = norm.process_group or distributed.group.WORLD
    return group if distributed.get_world_size(group) > 1 else None


def _is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def called_plainly(module: nn.Module) -> bool:
    """Whether a call of the module runs its class's forward only: no hook, and no replaced forward."""
    # By attribute: a compiler guards every lookup in a module's dictionary.
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    replaced = "forward" in module.__dict__ or module._compiled_call_impl is not None
    return not (hooked or replaced or _has_any_global_hook())  # type: ignore[no-untyped-call]
