"""Record the host's work of a unit as a tape: torch's operations and kernel launches, for `host` to replay.

Which operations run depends on sizes, types, layouts and settings alone (`plans`), so a tape holds for every call that
has the same. While one is recorded, everything runs as usual and is written down: operations as torch dispatches them,
below autograd and autocast, and launches by `launcher`.

An operation that compilers cannot look into is done by tapes as well, one for each kind of arguments.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_dcl import kernels
from torch_dcl.kernels import host
from torch_dcl.kernels.launcher import Launch, recording

__all__ = [
    "LIBRARY", "Recorded", "call_of", "closed_operation", "operation", "prefix_of_operations", "replayed_operation",
    "serve", "tape_of",
]  # fmt: skip


_TYPES = {5: torch.float16, 6: torch.float32, 15: torch.bfloat16}
"""Types by their numbers in C++."""
_Step = tuple[str, tuple[Any, ...], list[int], list[int]]
"""A step: its kind, its arguments, and the numbers of the tensors that it reads and writes."""
_ALLOCATIONS = frozenset(
    {
        torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default, torch.ops.aten.empty_like.default,
        torch.ops.aten.new_empty.default, torch.ops.aten.new_empty_strided.default,
    }
)  # fmt: skip


class Recorded(NamedTuple):
    """A unit's forward pass, as `unit` describes it for a program."""

    inputs: list[Tensor | None]
    """Input, filters, weights, biases, and the tensors of the norm."""
    tape: Any
    dtype: torch.dtype
    """What is computed in, and so the type of the first input."""
    learns: bool
    differentiable: list[int]
    """The inputs that have gradients, in the order of the gradients."""
    saved: list[int]
    """What backward is given: inputs, and behind all of them outputs of the tape."""
    held: list[int]
    """Inputs that a second derivative wants, and which have no gradient."""
    backward: Callable[..., Any]


class _RecordError(Exception):
    """Something that a tape cannot hold."""


class _Recorder(TorchDispatchMode):
    """Write every operation into the log of this thread."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._can_decompose():  # as one call less for each operation that is made of others
            with self:
                return func.decompose(*args, **(kwargs or {}))
        log, recording.log = recording.log, None  # what an operation does itself is not a step of its own
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            recording.log = log
        if log is not None:
            log.append((func, args, kwargs or {}, result))
        return result


def tape_of(
    library: ModuleType, inputs: Sequence[Tensor | None], compute: Callable[[], Any],
    outputs_of: Callable[[Any], Sequence[Tensor | None]],
) -> tuple[Any, Any]:  # fmt: skip
    """Run something, and record it.

    Args:
        library: From `host`.
        inputs: All tensors that it reads.
        compute: What to run.
        outputs_of: The tensors that matter, from what it returns.

    Returns:
        What it returned, and the tape; None for the latter if a tape cannot hold it.
    """
    log: list[tuple[Any, ...]] = []
    recording.log = log
    try:
        with _Recorder():
            result = compute()
    finally:
        recording.log = None
    try:
        return result, _made(library, log, inputs, outputs_of(result))
    except (_RecordError, TypeError, ValueError, RuntimeError):  # the latter three are C++'s, of an argument
        return result, None


def serve(library: ModuleType, name: str, function: Callable[..., Any]) -> None:
    """Have an operation of torch done by tapes of a function: one is recorded for each kind of arguments.

    Args:
        library: From `host`.
        name: Of the operation, which is there without a kernel.
        function: What it computes: one new tensor, or a tuple of them.
    """
    names = list(inspect.signature(function).parameters.values())
    of_type = [i for i, name in enumerate(names) if name.annotation is torch.dtype]

    def record(*numbers: Any) -> tuple[list[Tensor], Any]:
        given = [_TYPES[value] if i in of_type else value for i, value in enumerate(numbers)]
        tensors = [
            t for value in given for t in (value if isinstance(value, list) else [value]) if isinstance(t, Tensor)
        ]
        result, tape = tape_of(library, tensors, lambda: function(*given), lambda found: list(_flat(found)))
        return list(_flat(result)), tape

    keys = ["CUDA", "CPU"] if kernels.INTERPRETED else ["CUDA"]
    overload = getattr(torch.ops.torch_dcl, name).default
    overload._op = library.serve(name, keys, record, torch._C._get_cublas_allow_tf32, overload._op)


class _Numbers:
    """Numbers of tensors, by identity: all of them are alive as long as the log is."""

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        self.known = {id(t): i for i, t in enumerate(inputs) if t is not None}
        self.count = len(inputs)

    def of(self, tensor: Tensor) -> int:
        number = self.known.get(id(tensor))
        if number is None:
            raise _RecordError("a tensor from elsewhere")
        return number

    def alias(self, tensor: Tensor, other: Tensor) -> None:
        """Give a tensor the number of one that it is the same as."""
        self.known[id(tensor)] = self.of(other)

    def new(self, tensor: object) -> int:
        """The number of a result; none of what is no tensor."""
        if not isinstance(tensor, Tensor):
            return -1
        if id(tensor) not in self.known:
            self.known[id(tensor)] = self.count
            self.count += 1
        return self.known[id(tensor)]


def _made(
    library: ModuleType, log: Sequence[tuple[Any, ...]], inputs: Sequence[Tensor | None],
    outputs: Sequence[Tensor | None],
) -> Any:  # fmt: skip
    """A tape from a log."""
    numbers = _Numbers(inputs)
    steps: list[_Step] = []
    for what, *rest in log:
        if isinstance(what, Launch):
            steps.append(_launch(what, rest[0], numbers))
            continue
        args, kwargs, result = rest
        if what.is_view:
            steps += _views(args[0], result, numbers, len(inputs))
        elif what in _ALLOCATIONS:
            steps.append(_allocation(result, numbers))
        else:
            steps.append(_operation(library, what, args, kwargs, result, numbers))
    found = [-1 if t is None else numbers.of(t) for t in outputs]
    last = {number: i for i, (_, _, read, written) in enumerate(steps) for number in (*read, *written)}
    tape = library.Tape(len(inputs), numbers.count, found)
    for i, (kind, given, _, _) in enumerate(steps):
        done = [n for n, at in last.items() if at == i and n >= len(inputs) and n not in found]
        getattr(tape, kind)(*given, done)
    return tape


def _allocation(made: Tensor, numbers: _Numbers) -> _Step:
    """Memory of the size, the layout and the type that an operation gave."""
    number = numbers.new(made)
    return "allocation", (number, list(made.shape), list(made.stride()), made.dtype, made.device), [], [number]


def _views(base: Tensor, result: Any, numbers: _Numbers, inputs: int) -> Iterator[_Step]:
    """Views of a tensor, by where they begin; what is no more than the tensor itself needs none, unless it is given."""
    of = numbers.of(base)
    for view in _flat(result):
        if view.dtype != base.dtype:
            raise _RecordError("a view in another type")
        offset = view.storage_offset() - base.storage_offset()
        if of >= inputs and offset == 0 and view.shape == base.shape and view.stride() == base.stride():
            numbers.alias(view, base)
            continue
        number = numbers.new(view)
        yield "view", (of, number, list(view.shape), list(view.stride()), offset), [of], [number]


def _operation(
    library: ModuleType, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, numbers: _Numbers
) -> _Step:
    """An operation of torch, its arguments in the order of its schema."""
    schema, given, read = func._schema, [], []
    for i, argument in enumerate(schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
        tensors = [t for t in value if isinstance(t, Tensor)] if isinstance(value, list | tuple) else []
        if isinstance(value, Tensor):
            read.append(numbers.of(value))
            given.append(library.Slot(read[-1]))
        elif tensors:
            if len(tensors) != len(value):
                raise _RecordError("a list with gaps")
            read += (own := [numbers.of(t) for t in tensors])
            given.append([library.Slot(number) for number in own])
        else:
            given.append(value)
    written = [numbers.new(t) for t in _flat(result)]
    return "operation", (schema.name, schema.overload_name, given, written), read, [n for n in written if n >= 0]


def _flat(result: Any) -> Iterator[Any]:
    """Results one by one, those of lists as well."""
    for item in result if isinstance(result, tuple | list) else (result,):
        if isinstance(item, tuple | list):
            yield from item
        else:
            yield item


def _launch(launch: Launch, given: Sequence[Any], numbers: _Numbers) -> _Step:
    """A launch: by the handle of its kernel if that is all there is to it, else by a call from C++."""
    tensors = [value if isinstance(value, Tensor) else value.base for value in given if value is not None]
    read = [numbers.of(t) for t in tensors]
    direct = _direct(launch) if len(tensors) == len(given) and all(isinstance(v, Tensor) for v in given) else None
    if direct is None:
        return "kernel", (_Call(launch, given), read, 0, (0, 0, 0), 0, 0, 0, []), read, []
    return "kernel", (launch, read, *direct), read, []


class _Call:
    """A launch on tensors some of which are described to it, or are not there."""

    def __init__(self, launch: Launch, given: Sequence[Any]) -> None:
        self.launch = launch
        self.forms = [None if v is None else () if isinstance(v, Tensor) else _form(v) for v in given]

    def __call__(self, *tensors: Tensor) -> None:
        rest = iter(tensors)
        given: list[Any] = [
            None if form is None else form[0](next(rest), *form[1:]) if form else next(rest) for form in self.forms
        ]
        self.launch(*given)


def _form(described: Any) -> tuple[Any, ...]:
    """How the copy engine was told of a tensor."""
    d = described
    return type(d), list(d.shape), list(d.strides), list(d.block_shape), d.layout


def _direct(launch: Launch) -> tuple[Any, ...] | None:
    """Handle, grid, threads, shared memory, device and arguments of a kernel; None where a launch takes more."""
    if launch.binary is None or launch.compiled is None:
        return None
    compiled = launch.compiled
    metadata = compiled.metadata
    special = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    if any(getattr(metadata, name, 0) for name in special) or getattr(metadata, "num_ctas", 1) != 1:
        return None
    values: list[tuple[str, object]] = []
    for name in launch.kernel.arg_names:
        kind = compiled.src.signature.get(name, "constexpr")
        if kind.startswith("*"):
            values.append(("pointer", None))
        elif kind in ("i32", "i64", "fp32"):
            values.append((kind, launch.values[name]))
        elif kind != "constexpr":
            return None
    beyond = _parameters(compiled.asm["ptx"]) - len(
        values
    )  # Triton's own, behind: memory that this kernel does not ask for
    if beyond < 0:
        return None
    values += [("null", None)] * beyond
    _, function, _, device = launch.binary
    return function, launch.grid, 32 * metadata.num_warps, metadata.shared, device, values


def _parameters(ptx: str) -> int:
    """How many parameters a kernel has in its assembly."""
    entry = re.search(r"\.entry\s+\w+\s*\((.*?)\)", ptx, re.DOTALL)
    return 0 if entry is None else entry[1].count(".param")


# Operations of torch: open to compilers, closed to them, or both


LIBRARY = torch.library.Library("torch_dcl", "FRAGMENT")
_closed: dict[str, Callable[..., Any]] = {}
"""What closed operations compute, by name."""


def operation(name: str, *, closed: bool = False, mutates: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Make an operation of a function that launches kernels: open to a compiler, unless kernels are interpreted.

    Args:
        name: Of the operation.
        closed: Whether to have it closed to compilers as well, by another name.
        mutates: Arguments that it writes into.
    """

    def register(function: Callable[..., Any]) -> Any:
        if kernels.INTERPRETED:
            made = torch.library.custom_op(f"torch_dcl::{name}", mutates_args=mutates)(function)
            made.register_fake(function)
        else:
            made = torch.library.triton_op(f"torch_dcl::{name}", mutates_args=mutates)(function)
        if closed:
            closed_operation(name, mutates=mutates)(function)
        return made

    return register


def closed_operation(name: str, *, mutates: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Make an operation of a function that a compiler cannot look into, ``closed_`` before its name.

    Args:
        name: Of the operation.
        mutates: Arguments that it writes into.
    """

    def register(function: Callable[..., Any]) -> Any:
        LIBRARY.define(f"closed_{name}{torch.library.infer_schema(function, mutates_args=mutates)}")
        torch.library.register_fake(f"torch_dcl::closed_{name}", _shapes_of(function))
        LIBRARY.impl(f"closed_{name}", torch.library.fallthrough_kernel, "Autograd")
        _closed[f"closed_{name}"] = function
        return function

    return register


def _shapes_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on fake tensors, without its launches."""

    @functools.wraps(function)
    def fake(*given: Any) -> Any:
        before, recording.silent = recording.silent, True
        try:
            return function(*given)
        finally:
            recording.silent = before

    return fake


@torch.compiler.assume_constant_result
def prefix_of_operations() -> str:
    """Which operations a compiler is to call: the closed ones where they can be replayed."""
    return "closed_" if _serve_all(host.wait()) else ""


def replayed_operation(name: str) -> Any | None:
    """A closed operation, for a call outside of a compiler; None as long as there is no library to replay it."""
    return getattr(torch.ops.torch_dcl, f"closed_{name}").default if _serve_all(host.library()) else None


def _serve_all(library: ModuleType | None) -> bool:
    if library is None:
        return False
    for name in list(_closed):
        serve(library, name, _closed.pop(name))
    return True


def call_of(name: str, prefix: str) -> Any:
    """The open operation, or the closed one."""
    return getattr(torch.ops.torch_dcl, prefix + name)
