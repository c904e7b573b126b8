"""Whether modules only compute what their class says, and batch norms as what they compute: for the kernels."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import _has_any_global_hook

from torch_dcl.kernels.dispatch import Norms

__all__ = ["batch_norms", "called_plainly"]


def batch_norms(norms: Sequence[nn.Module]) -> Norms | None:
    """Batch norms as what they compute; None where they are not plain ones, or not alike."""
    first = norms[0]
    if not isinstance(first, _BatchNorm):
        return None
    training, momentum = first.training, first.momentum
    alike = training, first.eps, momentum, first.track_running_stats
    columns: list[tuple[Any, ...]] = []
    for norm in norms:
        if not isinstance(norm, _BatchNorm) or type(norm).forward not in _PLAIN_FORWARDS or not called_plainly(norm):
            return None
        if (norm.training, norm.eps, norm.momentum, norm.track_running_stats) != alike or norm._modules:
            return None  # the last is a parametrized one
        columns.append((norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked))
    if isinstance(first, nn.SyncBatchNorm) and training and _is_distributed():
        return None  # it exchanges its statistics with other processes
    gammas, betas, means, variances, counts = zip(*columns, strict=True)
    fixed = not training and means[0] is not None
    if not fixed and not (training and first.track_running_stats):
        means = variances = counts = ()
    groups: list[tuple[Any, ...]] = []
    for group in (gammas, betas, means, variances, counts):
        missing = [t is None for t in group]
        if any(missing):
            if not all(missing) or group is means or group is variances or (group is counts and not fixed):
                return None
            group = ()  # noqa: PLW2901
        groups.append(group)
    gammas, betas, means, variances, counts = groups
    return Norms(gammas, betas, means, variances, counts, alike[1], momentum, fixed)


_PLAIN_FORWARDS = (_BatchNorm.forward, nn.SyncBatchNorm.forward)


def _is_distributed() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def called_plainly(module: nn.Module) -> bool:
    """Whether a call of the module is its class's forward and nothing beside: no hook, and no forward put in place."""
    # By attribute: a compiler guards everything that it looks up in a module's dictionary.
    hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    replaced = "forward" in module.__dict__ or module._compiled_call_impl is not None
    return not (hooked or replaced or _has_any_global_hook())  # type: ignore[no-untyped-call]
