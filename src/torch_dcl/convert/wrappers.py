"""Modules around modules, which put a part of their own into every name below them, and the names without it."""

from torch import nn
from torch.optim.swa_utils import AveragedModel

from torch_dcl.convert.units import names_of

__all__ = ["OwnNames", "bare"]

_INNER = ("_orig_mod", "_checkpoint_wrapped_module")
"""Where ``torch.compile`` and activation checkpointing keep the module that they wrap."""


def bare(model: nn.Module) -> nn.Module:
    """The network inside the wrappers of compilation, checkpointing, data parallelism and weight averaging."""
    inner = _inner(model)
    return bare(model.get_submodule(inner)) if inner else model


class OwnNames:
    """The names that the modules and tensors of a network have whatever parts of it are wrapped."""

    def __init__(self, model: nn.Module) -> None:
        places = names_of(model)
        inner = [(name, _inner(module)) for module, names in places.items() for name in names]
        self._wrapped = {f"{name}.{part}".removeprefix(".") for name, part in inner if part}
        self.of = {module: [self(name) for name in names] for module, names in places.items()}
        """All own names of every module."""
        self.modules = {name: module for module, names in self.of.items() if not _inner(module) for name in names}
        """The module of a name: what is inside, where it is wrapped."""

    def __call__(self, name: str) -> str:
        """The own name of a module or tensor."""
        parts = name.split(".")
        return ".".join(part for i, part in enumerate(parts) if ".".join(parts[: i + 1]) not in self._wrapped)


def _inner(module: nn.Module) -> str:
    """Under which name a wrapper keeps the module that it wraps; empty if it is none."""
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel | AveragedModel):
        return "module"
    return next((name for name in _INNER if name in module._modules), "")
