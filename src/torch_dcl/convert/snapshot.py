"""Snapshots of the modules, attributes and buffers of a network, to restore them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["Snapshot", "all_or_nothing"]


class Snapshot:
    """The modules of a network, their plain attributes, and the content of its buffers.

    Parameters are not copied. Of a scripted module, whose submodules cannot be replaced, only the buffers are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parts: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self._parts += [(part, dict(part)) for part in (vars(module), module._modules, module._buffers)]
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_inference()]

    def restore(self) -> None:
        """Restore modules, attributes and buffers, bypassing ``__setattr__``."""
        for part, saved in self._parts:
            if list(part) != list(saved):
                part.clear()
            part.update(saved)
        for buffer, content in self._buffers:
            buffer.data.copy_(content)  # regardless of its version, which batch norms do not increase


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Restore the network if the block raises."""
    before = Snapshot(model)
    try:
        yield
    except BaseException:
        before.restore()
        raise
