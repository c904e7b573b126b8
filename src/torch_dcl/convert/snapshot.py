"""Snapshots of the modules, attributes and tensors of a network, to restore them after a trial run or an error."""

import random
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

__all__ = [
    "Snapshot",
    "all_or_nothing",
    "flags_of",
    "restore_content",
    "restored",
    "temporary_mode",
    "uncompiled",
    "undone",
]

Copies = dict[nn.Parameter, Tensor]
_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)


class Snapshot:
    """The modules of a network, their plain attributes with the entries of containers, and the content of its buffers.

    Parameters are not copied, only what they refer to; see `undone` for what is written into them. Of a scripted
    module, whose submodules cannot be replaced, only the buffers are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parts: list[tuple[Any, Any]] = []
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                kept = [vars(module), *(value for value in vars(module).values() if type(value) in _CONTAINERS)]
                self._parts += [(part, part.copy()) for part in kept]
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_inference()]
        self._parameters = [(p, p.data, p.grad) for p in _plain_parameters(model)]

    def restore(self) -> None:
        """Restore modules, attributes, buffers and what parameters refer to, bypassing ``__setattr__``."""
        for part, saved in self._parts:
            if not isinstance(part, dict) or list(part) != list(saved):
                part.clear()
            if isinstance(part, dict):
                dict.update(part, saved)  # a Counter's own update adds
            elif isinstance(part, set):
                part.update(saved)
            else:
                part.extend(saved)
        for buffer, content in self._buffers:
            if buffer.shape != content.shape:  # as observers do
                buffer.data = content
            else:
                buffer.data.copy_(content)  # regardless of its version, which batch norms do not increase
        for parameter, data, grad in self._parameters:
            if parameter.untyped_storage()._cdata != data.untyped_storage()._cdata:
                parameter.data = data
            parameter.grad = grad


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Restore the network if the block raises."""
    before = Snapshot(model)
    try:
        yield
    except BaseException:
        before.restore()
        raise


@contextmanager
def temporary_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Set the mode of every module inside the block, without warnings, and restore the network afterwards.

    The flags are set directly: a network's own ``train()`` may do more, for example merge weights. Buffers get their
    content back, so their versions too: a graph that saved them is still right.
    """
    buffers = tuple(buffer for buffer in model.buffers() if not buffer.is_inference())
    before, flags = Snapshot(model), flags_of(model)
    states = random.getstate(), np.random.get_state()
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    forked = torch.random.fork_rng(devices=[d for d in devices if d is not None])
    unchanged = torch.autograd._unsafe_preserve_version_counter(buffers)  # type: ignore[attr-defined]
    with forked, unchanged, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for module, _ in flags:
                module.training = training
            yield
        finally:
            for module, flag in flags:
                module.training = flag
            before.restore()
            random.setstate(states[0])
            np.random.set_state(states[1])


def flags_of(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    """The training flag of every module; a frozen scripted module has none."""
    return [(module, module.training) for module in model.modules() if hasattr(module, "training")]


def uncompiled() -> AbstractContextManager[Any]:
    """Run compiled parts eagerly: compiled code calls no new hooks, and none is made while operations are recorded."""
    compiles = "torch._dynamo" in sys.modules  # do not import the compiler
    return torch.compiler.set_stance("force_eager") if compiles else nullcontext()


@contextmanager
def undone(model: nn.Module) -> Iterator[Copies]:
    """Undo what the block writes into parameters, as the forward of a momentum encoder does; `Snapshot` does not.

    Only these parameters are copied, right before the first write. The copies are yielded.
    """
    writes = _Writes(model)
    try:
        with writes:
            yield writes.copies
    finally:
        restore_content(writes.copies)


@contextmanager
def restored(model: nn.Module, written: Copies) -> Iterator[None]:
    """Restore the network after the block, and the parameters that it is known to write into, from these copies."""
    before = Snapshot(model)
    try:
        yield
    finally:
        before.restore()
        restore_content(written)


def _plain_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that hold their values themselves: no shards, and none that is still to get its size."""
    return [p for p in model.parameters() if not is_traceable_wrapper_subclass(p) and not is_lazy(p)]


def restore_content(copies: Copies) -> None:
    """Restore the values of parameters, and leave their versions unchanged."""
    for parameter, content in copies.items():
        parameter.data.copy_(content)


class _Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Copies a parameter before an operation writes into its memory."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: Copies = {}
        self._parameters: dict[int, list[nn.Parameter]] = {}
        for parameter in _plain_parameters(model):
            self._parameters.setdefault(parameter.untyped_storage()._cdata, []).append(parameter)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for place, argument in enumerate(func._schema.arguments):
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                if argument.is_write:
                    self._copy(value)
        return func(*args, **kwargs)

    def _copy(self, written: Any) -> None:
        for tensor in tree_leaves(written):
            if isinstance(tensor, Tensor) and not is_traceable_wrapper_subclass(tensor):
                for parameter in self._parameters.get(tensor.untyped_storage()._cdata, ()):
                    if parameter not in self.copies:
                        self.copies[parameter] = parameter.detach().clone()
