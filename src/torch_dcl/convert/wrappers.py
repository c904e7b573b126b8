"""Wrappers of modules, which add a prefix to every name below them, and names without these prefixes."""

from torch import nn
from torch.optim.swa_utils import AveragedModel

from torch_dcl.convert.units import names_of

__all__ = ["OwnNames", "bare"]

_INNER = ("_orig_mod", "_checkpoint_wrapped_module")
"""The attributes in which ``torch.compile`` and activation checkpointing store the wrapped module."""


def bare(model: nn.Module) -> nn.Module:
    """The network inside the wrappers of compilation, checkpointing, data parallelism and weight averaging."""
    inner = _inner(model)
    return bare(model.get_submodule(inner)) if inner else model


class OwnNames:
    """The names of modules and tensors of a network without the prefixes of wrappers."""

    def __init__(self, model: nn.Module) -> None:
        places = names_of(model)
        inner = [(name, _inner(module)) for module, names in places.items() for name in names]
        self._wrapped = {f"{name}.{part}".removeprefix(".") for name, part in inner if part}
        self.of = {module: [self(name) for name in names] for module, names in places.items()}
        """All own names of every module."""
        self.modules = {name: module for module, names in self.of.items() if not _inner(module) for name in names}
        """The module of a name, unwrapped."""

    def __call__(self, name: str) -> str:
        """The own name of a module or tensor."""
        path = name.split(".")
        return ".".join(part for i, part in enumerate(path) if ".".join(path[: i + 1]) not in self._wrapped)


def _inner(module: nn.Module) -> str:
    """The attribute in which a wrapper stores the wrapped module; empty if this is no wrapper."""
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel | AveragedModel):
        return "module"
    return next((name for name in _INNER if name in module._modules), "")
