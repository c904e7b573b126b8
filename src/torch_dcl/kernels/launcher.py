"""Launch a kernel with the least work on the host.

Triton's own way, ``kernel[grid](...)``, looks at every argument of every call to find the binary for it. Here that is
done in the first call, and what depends on sizes, types and settings alone is kept in a `Launch`: later calls read the
addresses of the tensors and start the binary by its handle (7 µs for 31, on the host of an H200).

The sizes of grids and tiles are here too, as Triton's functions of these names give them, in plain integers: Triton's
can be called inside a kernel as well, for which each call takes microseconds on the way to a launch.
"""

import functools
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from torch_dcl import kernels

__all__ = ["Launch", "cdiv", "has_room", "is_traced", "kept", "next_power_of_2", "processors", "recording"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_NOT_TRACED = ("maxnreg", "enable_fp_fusion")  # options that a compiler which traces a launch does not take


class _Recording(threading.local):
    """What this thread writes down while it computes a unit; see `record`."""

    units: list[Any] | None = None
    """Units, for who wants them."""
    log: list[tuple[Any, ...]] | None = None
    """Operations and launches, in their order."""
    silent: bool = False
    """Whether a launch on fake tensors is nothing: only the shapes of results matter."""


recording = _Recording()


def is_traced(tensor: Tensor) -> bool:
    """Whether this stands for a tensor in the hands of a compiler, which knows no ``out=`` and no addresses."""
    return type(tensor) is not Tensor and type(tensor) is not Parameter


class Launch:
    """One kernel for one set of sizes, types and settings, on one device.

    Args:
        kernel: From ``triton.jit``. Its pointers come first, then numbers, then constants.
        grid: How many programs, in up to three dimensions.
        values: The numbers and the constants by name.
        options: Of the compiler: ``num_warps`` and the like.
    """

    __slots__ = ("binary", "compiled", "grid", "kernel", "options", "tail", "values")

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], values: Mapping[str, object], options: Mapping[str, object]
    ) -> None:
        self.kernel, self.values, self.options = kernel, dict(values), dict(options)
        self.grid = (*grid, 1, 1)[:3]
        names = kernel.arg_names[len(kernel.arg_names) - len(self.values) :]
        self.tail = tuple(self.values[name] for name in names)
        self.binary: tuple[Any, Any, Any, int] | None = None
        self.compiled: Any = None

    def __call__(self, *tensors: Tensor) -> None:
        """Launch on these tensors, whose device must be the current one."""
        kind = type(tensors[0])
        if kind is not Tensor and kind is not Parameter:
            self._trace(*tensors)
            return
        addresses = [tensor.data_ptr() for tensor in tensors]
        binary = self.binary
        if binary is None or functools.reduce(operator.or_, addresses) & 15:
            self.start(tensors, addresses)
            return
        if recording.log is not None:
            recording.log.append((self, tensors))
        run, function, metadata, index = binary
        run(
            *self.grid, torch._C._cuda_getCurrentRawStream(index), function, metadata, None, None, None,
            *addresses, *self.tail,
        )  # fmt: skip

    def start(self, given: Sequence[Any], addresses: Sequence[Any]) -> None:
        """Start the kernel from addresses, or None and descriptions; keep its binary if they are multiples of 16."""
        log = recording.log
        if log is not None:
            log.append((self, given))
        aligned = not any(address & 15 for address in addresses if isinstance(address, int))
        if self.binary is None or not aligned:
            recording.log = None  # an interpreter has operations of its own
            try:
                found = self.kernel[self.grid](*given, **self.values, **self.options)
            finally:
                recording.log = log
            if aligned and found is not None:
                device = next(value.device for value in given if isinstance(value, Tensor))
                self.binary = found.run, found.function, found.packed_metadata, device.index
                self.compiled = found
            return
        run, function, metadata, index = self.binary
        stream = torch._C._cuda_getCurrentRawStream(index)
        run(*self.grid, stream, function, metadata, None, None, None, *addresses, *self.tail)

    def _trace(self, *tensors: Tensor) -> None:
        """Record the launch for a compiler, which makes it a part of the code that it generates."""
        if (
            kernels.INTERPRETED or recording.silent
        ):  # where an operation is closed, and its results' shapes matter alone
            return
        options = {name: value for name, value in self.options.items() if name not in _NOT_TRACED}
        torch.library.wrap_triton(self.kernel)[self.grid](*tensors, **self.values, **options)


def kept(make: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keep what a function of sizes and settings returns; not for sizes that are symbols of a compiler."""
    known = functools.lru_cache(4096)(make)

    @functools.wraps(make)
    def find(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return known(*args, **kwargs)  # type: ignore[arg-type]
        except TypeError:  # a symbol has no hash
            return make(*args, **kwargs)

    return find


@functools.cache
def processors(device: torch.device) -> int:
    """How many programs run side by side at least."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def has_room(device: torch.device) -> bool:
    """Whether a program may take as much shared memory as on GPUs for data centres: 160 KiB, where others have 99."""
    if device.type != "cuda":
        return True
    # Only NVIDIA's have a limit that a program may ask for.
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0) >= 160_000


def cdiv(size: int, block: int) -> int:
    """How many blocks it takes."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """The least power of two from ``size``, which is at least 1."""
    return 1 << (size - 1).bit_length()
