"""Run a network and record what follows each of its layers.

Only a run describes a network reliably: modules may be shared, activations functional, and control flow in Python. It
is run on an example, and every operation is recorded with the tensors that it reads and writes. The record answers the
planner's question: is this layer followed by a ReLU, and by nothing else?
"""

import gc
import re
from collections import defaultdict
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from torch_dcl.convert.rows import Inputs
from torch_dcl.convert.snapshot import flags_of, temporary_mode, uncompiled
from torch_dcl.convert.units import RELUS, is_channels_last, is_frozen_norm, is_plain_norm, layer_weight

__all__ = ["Call", "Trace", "record", "trace"]

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

# ReLU commutes with operations that only move, select or drop values, so a unit may contain them.
_MOVES = re.compile(
    r"view|_unsafe_view|reshape|_reshape_alias|permute|transpose|t|flatten|unflatten|squeeze|unsqueeze|contiguous|clone|"
    r"alias|detach|_to_copy|expand|repeat|roll|slice|select|split|split_with_sizes|chunk|unbind|"
    r"max_pool\dd_with_indices|max_pool\dd|native_dropout|dropout"
)
_SIZES = re.compile(r"new_\w+|\w+_like|sym_\w+|dim")
"""What reads the size of a tensor, not its values."""
_FOLLOWERS = {
    "layer": "another layer follows without ReLU",
    "add": "feeds a residual sum", "add_": "feeds a residual sum", "sub": "feeds a difference",
    "softmax": "feeds attention", "_softmax": "feeds attention", "bmm": "feeds attention", "baddbmm": "feeds attention",
    "mul": "is multiplied with another tensor", "mul_": "is multiplied with another tensor",
    "cat": "feeds a concatenation",
    "native_layer_norm": "a layer norm follows", "native_group_norm": "a group norm follows",
    "gelu": "GELU follows", "silu": "SiLU follows",
    "hardswish": "Hardswish follows", "hardsigmoid": "Hardsigmoid follows",
    "sigmoid": "a sigmoid follows", "tanh": "tanh follows", "elu": "ELU follows", "leaky_relu": "LeakyReLU follows",
    "_prelu_kernel": "PReLU follows", "mish": "Mish follows", "softplus": "Softplus follows",
    "hardtanh": "ReLU6 or a clipped activation follows",
}  # fmt: skip

_OUTPUT = "its output is also an output of the network"
_KEPT = "its output is kept after the call, as an attribute or by a hook"


@dataclass(eq=False)
class _Event:
    """One step of the run: a layer, a norm, or an operation, with the values that it reads and writes."""

    op: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    module: nn.Module | None = None


@dataclass
class Call:
    """One call of a layer."""

    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool
    """Whether its input is in channels_last."""
    gives_channels_last: bool = True
    """Whether the channels of its output are last in memory."""
    norm: nn.Module | None = None
    """The batch norm between the layer and its ReLU."""
    relu: nn.Module | None = None
    """The ReLU, if it is a module and the only one."""
    moved: bool = False
    """Whether an operation moves or selects values before the ReLU, which then receives another tensor."""
    needs_grad: bool = True
    """Whether its input requires a gradient; False in the first layer."""
    reason: str = ""
    """Why this call is not a unit as in the paper; empty if it is one."""


@dataclass
class Trace:
    """The result of a run: the calls of every layer, and the layers whose weights were used without a call."""

    calls: dict[nn.Module, list[Call]] = field(default_factory=dict)
    functional: set[nn.Module] = field(default_factory=set)
    part_calls: dict[nn.Module, int] = field(default_factory=lambda: defaultdict(int))
    """The number of calls of batch norms and ReLUs."""

    @property
    def has_outputs(self) -> bool:
        """Whether a layer's output before its ReLU is visible outside of the network."""
        return any(call.reason in (_OUTPUT, _KEPT) for calls in self.calls.values() for call in calls)


def trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    """Run ``model`` once in eval mode, without gradients, and find out what follows each layer.

    The network, its training flags and the random state are restored, and the inputs copied: a forward may change them.
    """
    with temporary_mode(model, training=False):
        return record(model, *copied((args, kwargs)))


def record(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    """Run ``model`` once as it is, without gradients, and find out what follows each layer."""
    recorder = _Recorder(model)
    with torch.no_grad(), without_fast_paths(), uncompiled():
        with recorder.recording():
            outputs = [model(*args, **kwargs)]
        result = recorder.analyse(recorder.live())
        if result.has_outputs:
            gc.collect()  # reference cycles keep garbage alive
            live = recorder.live()
            outputs.clear()
            result = recorder.analyse(live, recorder.live())
    return result


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set eval mode inside the block, and restore the flag of every module afterwards."""
    flags = flags_of(model)
    try:
        for module, _ in flags:
            module.training = False  # not by eval(), which may do more, for example merge weights
        yield
    finally:
        for module, flag in flags:
            module.training = flag


def copied(inputs: Inputs) -> Inputs:
    """The inputs with a copy of every tensor, which a forward may change."""
    copies: Inputs = tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), inputs)
    return copies


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every layer as one step, and every operation outside of layers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers = [m for m in model.modules() if isinstance(m, LAYERS)]
        self.norms = [m for m in model.modules() if isinstance(m, _BatchNorm) or is_frozen_norm(m)]
        self.relus = [m for m in model.modules() if type(m) in RELUS]
        self.owner = {id(p): m for m in self.layers for p in m.parameters(recurse=False)}
        self.events: list[_Event] = []
        self.calls: list[tuple[_Event, Call]] = []
        self.inside: list[nn.Module] = []
        self.functional: set[nn.Module] = set()
        self._values = WeakIdKeyDictionary()
        self._count = 0
        self._masks: set[int] = set()
        """Random zeros and ones, or multiples: where gradients are off, dropout is a product with them."""

    def value(self, tensor: Tensor, *, new: bool = False) -> int:
        """The number of a tensor's current content; an in-place operation creates a new one."""
        if new or tensor not in self._values:
            self._count += 1
            self._values[tensor] = self._count
        number: int = self._values[tensor]
        return number

    def live(self) -> set[int]:
        """The values that are still referenced: after the call these are outputs, whatever object contains them.

        Two kinds of tensors that C++ alone references are excluded: the base of a live view, which the view
        represents, and tensors saved by a graph, in a network that enables gradients itself.
        """
        tensors = list(self._values)
        excluded = {id(t._base) for t in tensors if t._base is not None}
        in_graph = [t for t in tensors if t.grad_fn is not None]
        if in_graph:
            holders = [h for h in gc.get_referrers(*in_graph) if h is not tensors and h is not in_graph]
            excluded |= {id(t) for t in in_graph} - {id(t) for h in holders for t in gc.get_referents(h)}
        return {self.value(t) for t in tensors if id(t) not in excluded}

    @contextmanager
    def recording(self) -> Iterator[None]:
        handles = []
        for module in (*self.layers, *self.norms, *self.relus):
            handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
            handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, _: Any) -> None:
        self.inside.append(module)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.inside.pop()
        atomic = isinstance(module, LAYERS) or is_plain_norm(module)
        x = args[0] if args else kwargs.get("input")
        if not atomic or self._is_in_layer() or not isinstance(x, Tensor) or not isinstance(output, Tensor):
            return
        reads = (self.value(x),)
        op = "layer" if isinstance(module, LAYERS) else "batch_norm"
        event = _Event(op, reads, (self.value(output, new=True),), module)
        self.events.append(event)
        if op == "layer":
            channels = 1 - layer_weight(module).dim()  # from the end: a filter has as many dimensions as an image
            last = output.stride(channels) == 1
            self.calls.append((event, Call(_shape(x), _shape(output), x.dtype, is_channels_last(x), last)))

    def _is_in_layer(self) -> bool:
        return any(isinstance(m, LAYERS) or is_plain_norm(m) for m in self.inside)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if torch._C._current_graph_task_id() != -1:  # a backward pass, for example of forces: it follows the forward
            return func(*args, **kwargs)
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        for tensor in read:
            owner = self.owner.get(id(tensor))
            if owner is not None and owner not in self.inside:
                self.functional.add(owner)
        op = func._schema.name.split("::")[-1]
        if self._is_in_layer():
            return func(*args, **kwargs)
        reads = () if _SIZES.fullmatch(op) else tuple(self.value(t) for t in read)
        result = func(*args, **kwargs)
        written = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        written = written[:1] if op.startswith("max_pool") else written
        changes = func._schema.is_mutable
        if _is_clamp_at_zero(op, args):
            op = "relu"
        elif _adds_zero(op, args):
            op = "alias"
        elif op in ("mul", "mul_") and self._masks.intersection(reads):
            op, reads = "dropout", tuple(value for value in reads if value not in self._masks)
        if "batch_norm" in op:
            op, written = "batch_norm", written[:1]
        module = self.inside[-1] if self.inside and _is_op_of(op, self.inside[-1]) else None
        writes = tuple(self.value(t, new=changes) for t in written)
        if op.startswith("bernoulli") or (op in ("div", "div_") and self._masks.issuperset(reads)):
            self._masks.update(writes)
        self.events.append(_Event(op, reads, writes, module))
        return result

    def analyse(self, live: set[int], kept: Set[int] = frozenset()) -> Trace:
        """Follow the output of every call to its ReLU, or to the reason why there is none.

        Args:
            live: The values that are outputs, or are still referenced.
            kept: Those of them that outlive the outputs.
        """
        readers: dict[int, list[_Event]] = defaultdict(list)
        for event in self.events:
            for value in set(event.reads):
                readers[value].append(event)
        onward: set[int] = set()  # values from which another layer is reached
        for event in reversed(self.events):
            if event.op in ("layer", "mm", "addmm", "bmm", "convolution") or onward.intersection(event.writes):
                onward.update(event.reads)
        result = Trace(functional=self.functional)
        trained = {self.value(tensor) for tensor in self._values if tensor.requires_grad}
        for event in self.events:
            if _is_trained(event.module) or trained.intersection(event.reads):
                trained.update(event.writes)
            if event.op != "layer" and event.module is not None:
                result.part_calls[event.module] += 1
        for event, call in self.calls:
            module = event.module
            if module is None:
                continue
            call.norm, relus, call.reason, call.moved = _follow(event.writes[0], readers, live, kept)
            call.relu = relus.pop() if len(relus) == 1 else None
            call.needs_grad = not trained.isdisjoint(event.reads)
            if not call.reason and call.norm is not None and len(call.output_shape) != layer_weight(module).dim():
                call.reason = "its batch norm normalises another dimension than its channels"
            if call.reason and event.writes[0] not in onward:
                call.reason = "head of the network"
            result.calls.setdefault(module, []).append(call)
        return result


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """The sizes of a tensor; of a jagged one, whose own are symbols, those of its values."""
    values: Any = tensor._values if type(tensor).__name__ == "NestedTensor" else tensor
    return tuple(values.shape)


def _is_trained(module: nn.Module | None) -> bool:
    return module is not None and any(p.requires_grad for p in module.parameters())


def _is_op_of(op: str, module: nn.Module) -> bool:
    """Whether an operation is the one that this batch norm or ReLU performs."""
    return op.removesuffix("_") == "relu" if isinstance(module, nn.ReLU) else op == "batch_norm"


def _follow(
    value: int, readers: dict[int, list[_Event]], live: set[int], kept: Set[int]
) -> tuple[nn.Module | None, set[nn.Module | None], str, bool]:
    """Follow a value: its batch norm, its ReLUs, the reason if there is another reader, whether values are moved."""
    norm: nn.Module | None = None
    relus: set[nn.Module | None] = set()
    todo, moved, scaled = [value], False, False
    while todo:
        value = todo.pop()
        if value in live:
            return norm, relus, _KEPT if value in kept else _OUTPUT, moved
        for event in readers[value]:
            op = event.op.removesuffix("_")
            if op == "relu":
                relus.add(event.module)
                continue
            if op == "batch_norm":
                if norm is not None or moved or len(readers[value]) > 1:
                    return norm, relus, "a batch norm follows, but not it alone", moved
                if event.module is None:
                    return norm, relus, "its batch norm is used functionally", moved
                norm = event.module
                todo.extend(event.writes)
            elif _MOVES.fullmatch(op):
                moved = True
                todo.extend(event.writes)
            elif op in ("mul", "div") and len(event.reads) == 1:
                moved = scaled = True
                todo.extend(event.writes)
            else:
                return norm, relus, _reason(event, op), moved
    if not relus:
        return norm, relus, "its output is not used", moved
    return norm, relus, "is multiplied with a number" if scaled else "", moved


def _reason(event: _Event, op: str) -> str:
    """Why a layer that this operation follows is not a unit."""
    if op.startswith("_scaled_dot_product") or "attention" in op:
        return "feeds attention"
    if op in ("add", "sub", "rsub") and len(event.reads) == 1:
        return "a number is added to it"
    return _FOLLOWERS.get(event.op, _FOLLOWERS.get(op, f"{op.strip('_')} follows, not ReLU"))


def _is_clamp_at_zero(op: str, args: tuple[Any, ...]) -> bool:
    bounds = args[1:] if op.removesuffix("_") in ("clamp", "clamp_min") else (None,)
    return not isinstance(bounds[0], Tensor) and bounds[0] == 0 and bounds[1:] in ((), (None,))


def _adds_zero(op: str, args: tuple[Any, ...]) -> bool:
    """As Python's sum does first."""
    return op.removesuffix("_") == "add" and not isinstance(args[1], Tensor) and args[1] == 0


@contextmanager
def without_fast_paths() -> Iterator[None]:
    """Disable attention's fused inference path, which does not call the layers that training calls."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
