"""The modules and attributes of a network at one moment, to put them back after a change that failed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torch_dcl.fusion import ConceptFusion

__all__ = ["Snapshot", "all_or_nothing"]


class Snapshot:
    """Which modules a network consists of, their plain attributes, and the draws of its stochastic layers.

    Parameters and other buffers are not copied. A scripted module, which nothing can be swapped into, is left out.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        self._modules = [(module, dict(vars(module)), dict(module._modules)) for module in modules]
        fusions = [module for module in modules if isinstance(module, ConceptFusion)]
        self._draws: list[tuple[Tensor, Tensor]] = [
            (buffer, buffer.clone()) for fusion in fusions for buffer in fusion.buffers(recurse=False)
        ]

    def restore(self) -> None:
        """Make the network what it was: the same modules in the same places, without asking their ``__setattr__``."""
        for module, attributes, children in self._modules:
            _put_back(vars(module), attributes)
            _put_back(module._modules, children)
        with torch.no_grad():
            for buffer, content in self._draws:
                buffer.copy_(content)


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Put the modules of ``model`` back if the block does not come to its end."""
    before = Snapshot(model)
    try:
        yield
    except BaseException:
        before.restore()
        raise


def _put_back(current: dict[str, Any], saved: dict[str, Any]) -> None:
    if list(current) != list(saved):
        current.clear()
    current.update(saved)
