"""Trial runs of the plan's example through the plain and the converted network, in training and in eval mode."""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_dcl.convert.rows import Inputs
from torch_dcl.convert.snapshot import Copies, restore_content, temporary_mode, uncompiled, undone
from torch_dcl.convert.trace import Trace, copied, record
from torch_dcl.convert.units import names_of

__all__ = ["Trial", "trace_training"]


class Trial:
    """Runs of one example, in training mode, and in eval mode without gradients.

    The plain network runs in the constructor. A mode in which it fails is skipped: a detector needs targets in
    training, and a network may have another dtype than when it was planned. Nothing runs without an example or on the
    meta device. Each run restores modules, attributes, flags, parameters, buffers and the random state.
    """

    def __init__(self, model: nn.Module, inputs: Inputs | None, layers: Collection[nn.Module] = ()) -> None:
        self._runs: list[tuple[bool, Inputs, set[nn.Module]]] = []
        self._layers = layers
        self._written: Copies = {}
        if inputs is None or any(
            t.is_meta for t in (*model.parameters(), *model.buffers(), *tree_leaves(inputs)) if isinstance(t, Tensor)
        ):
            return
        for training in (True, False):
            if not self._runs_plain(model, inputs, training=training) and training:
                with contextlib.suppress(Exception):  # not all inputs can be concatenated
                    self._runs_plain(model, _twice(inputs), training=True)

    def _runs_plain(self, model: nn.Module, inputs: Inputs, *, training: bool) -> bool:
        """Whether the plain network runs on these inputs; if so, the converted one will be run on them, too."""
        with (
            undone(model) as written,
            _Alone() if training else contextlib.nullcontext(),  # type: ignore[no-untyped-call]
            _seen_calls(self._layers) as called,
        ):
            error = _failure(model, inputs, training=training)
        self._written |= written
        if error is None:
            self._runs.append((training, inputs, called))
        return error is None

    def verify(
        self, model: nn.Module, replaced: Mapping[nn.Module, str], layers: Mapping[nn.Module, nn.Module]
    ) -> None:
        """Run the converted network in the modes in which the plain one ran.

        Args:
            model: The converted network.
            replaced: The old modules and their names.
            layers: The old layers and the new ones.

        Raises:
            ValueError: it fails in a mode, still calls an old module, or in eval mode no longer calls the layers of a
                class.
        """
        for training, inputs, called_before in self._runs:
            with _seen_calls((*replaced, *layers.values())) as called:
                error = _failure(model, inputs, training=training)
            restore_content(self._written)
            if not called.isdisjoint(replaced):
                names = ", ".join(repr(replaced[module]) for module in replaced if module in called)
                raise ValueError(
                    f"the converted network still calls the old {names}: it also holds it in a list, a dictionary or "
                    "a function, where a DCL layer does not replace it. Nothing was changed. Look it up by its name "
                    "there (or use nn.ModuleList), or leave it out with plan.without(...)"
                )
            found = {type(old) for old, new in layers.items() if new in called}
            # Values choose the layers of a mixture of experts, and chance may choose those of a network in training.
            missed = sorted(replaced[old] for old in called_before if type(old) not in found)
            if missed and error is None and not training:
                raise ValueError(
                    f"the converted network does not call the new {', '.join(map(repr, missed))}, as if its forward "
                    "chose layers by their class, which has changed. Nothing was changed. Call them by name, or leave "
                    "them out with plan.without(...), or convert all the same with check=False"
                )
            if error is None or isinstance(error, torch.OutOfMemoryError):
                continue
            mode = "training mode" if training else "eval mode"
            raise ValueError(
                f"the converted network fails on the plan's example in {mode}, the plain one does not. "
                f"{_failing_module(error, model)}{type(error).__name__}: {error}. Nothing was changed. "
                "Leave out the layer with plan.without(...), or convert all the same with check=False"
            ) from error


def trace_training(model: nn.Module, inputs: Inputs) -> Trace:
    """What follows each layer in training mode; nothing if the network does not run in it on these inputs."""
    for prepare in (copied, _twice):
        with contextlib.suppress(Exception), temporary_mode(model, training=True), _Alone():  # type: ignore[no-untyped-call]
            return record(model, *prepare(inputs))
    return Trace()


def _twice(inputs: Inputs) -> Inputs:
    """A batch with every input twice: a batch norm in training needs more than one value per channel."""
    doubled: Inputs = tree_map_only(Tensor, lambda t: torch.cat((t, t)) if t.dim() else t, inputs)
    return doubled


@contextmanager
def _seen_calls(modules: Iterable[nn.Module]) -> Iterator[set[nn.Module]]:
    """The modules among these that are called inside the block."""
    called: set[nn.Module] = set()
    handles = [module.register_forward_pre_hook(lambda module, _: called.add(module)) for module in modules]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


def _failure(model: nn.Module, inputs: Inputs, *, training: bool) -> Exception | None:
    """The exception of a run; None if it succeeds."""
    devices = {parameter.device for parameter in model.parameters()}
    device = devices.pop() if len(devices) == 1 else None
    with temporary_mode(model, training=training), torch.set_grad_enabled(training), uncompiled():
        try:
            args, kwargs = tree_map_only(Tensor, lambda t: t.to(device or t.device, copy=True), inputs)
            model(*args, **kwargs)
        except Exception as error:
            return error
    return None


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises an error where a run in training would wait for other processes, which may not be converting."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if "c10d" in func.namespace:
            raise RuntimeError(f"{func} waits for other processes")
        return func(*args, **(kwargs or {}))


def _failing_module(error: Exception, model: nn.Module) -> str:
    """The innermost module of the network in the traceback, as the start of a message."""
    names, place, step = names_of(model), "", error.__traceback__
    while step is not None:
        module: Any = step.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and names.get(module, [""])[0]:
            place = f"In {names[module][0]!r} ({type(module).__name__}): "
        step = step.tb_next
    return place
