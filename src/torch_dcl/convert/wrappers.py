"""Wrapped networks: names without the prefixes that wrappers add, and sharded parameters.

Shards (``fully_shard``, DTensor) are gathered to be written by one process.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from torch_dcl.convert.units import names_of

__all__ = ["OwnNames", "Shards", "bare", "is_sharded", "own_class"]

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


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor, without importing that class."""
    return hasattr(tensor, "full_tensor")


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, ignoring the subclass that ``fully_shard`` creates."""
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.distributed."))


class Shards:
    """The sharded tensors of a state dict, and the process that writes them: the first of their mesh.

    All methods are collective: every process of the mesh calls them, in the same order.
    """

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        meshes: list[Any] = [tensor.device_mesh for tensor in state.values() if is_sharded(tensor)]  # type: ignore[attr-defined]
        places = [mesh.get_coordinate() for mesh in meshes]
        self._mesh = max(meshes, key=lambda mesh: mesh.size(), default=None)
        self.writes = all(place is not None and not any(place) for place in places)

    def gather(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state dict with sharded tensors gathered on the CPU; empty tensors in processes that do not write."""
        gathered: dict[int, Tensor] = {}  # by identity, so that tied parameters stay tied
        for tensor in state.values():
            if is_sharded(tensor) and id(tensor) not in gathered:
                sharded: Any = tensor.detach()
                whole = sharded.to(sharded.device_mesh.device_type).full_tensor()  # from the CPU, if offloaded
                gathered[id(tensor)] = whole.cpu() if self.writes else torch.empty(0)
        return {name: gathered.get(id(tensor), tensor) for name, tensor in state.items()}

    @contextmanager
    def one_writer(self) -> Iterator[bool]:
        """Whether this process writes. All processes leave the block together, and all fail if the writer fails.

        Raises:
            RuntimeError: in the other processes, after an error of the writer.
        """
        failed = True
        try:
            yield self.writes
            failed = False
        finally:
            failures = self._count(failed)
        if failures:
            raise RuntimeError("the first process of the mesh could not write the network; see its error")

    def _count(self, failed: bool) -> int:
        """The number of processes that failed, after a barrier."""
        if self._mesh is None:
            return int(failed)
        count = torch.tensor(int(failed), device=self._mesh.device_type)
        for dimension in range(self._mesh.ndim):
            torch.distributed.all_reduce(count, group=self._mesh.get_group(dimension))
        return int(count)
