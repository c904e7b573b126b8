"""The modules, attributes and buffers of a network at one moment, to put them back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["Snapshot", "all_or_nothing"]


class Snapshot:
    """Which modules a network consists of, their plain attributes, and the content of its buffers.

    Parameters are not copied. Of a scripted module, which nothing can be swapped into, only the buffers are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parts: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                parts = (vars(module), module._modules, module._buffers)
                self._parts += [(part, dict(part)) for part in parts]
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers() if not buffer.is_inference()]

    def restore(self) -> None:
        """Make the network what it was: the same modules in the same places, without asking their ``__setattr__``."""
        for part, saved in self._parts:
            if list(part) != list(saved):
                part.clear()
            part.update(saved)
        for buffer, content in self._buffers:
            buffer.data.copy_(content)  # whether its version says so or not: batch norms change theirs in silence


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Put the network back if the block does not come to its end."""
    before = Snapshot(model)
    try:
        yield
    except BaseException:
        before.restore()
        raise
