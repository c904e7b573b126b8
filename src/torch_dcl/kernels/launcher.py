"""Launch kernels with little host overhead.

Triton's ``kernel[grid](...)`` inspects every argument of every call to find the compiled binary. A `Launch` does so in
the first call and caches what depends on sizes, dtypes and settings alone. Later calls read the addresses of the
tensors and launch the binary by its handle (7 µs instead of 31, on the host of an H200).

`cdiv` and `next_power_of_2` are those of Triton on plain integers: Triton's own take microseconds a call, since they
also work inside kernels.
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

__all__ = [
    "Launch", "cached", "cdiv", "has_large_shared_memory", "is_traced", "multiprocessors", "next_power_of_2",
    "recording",
]  # fmt: skip

_P = ParamSpec("_P")
_R = TypeVar("_R")
_NOT_TRACED = ("maxnreg", "enable_fp_fusion")  # options that torch.compile rejects in a traced launch


class _Recording(threading.local):
    """The recording state of this thread; see `record`."""

    units: list[Any] | None = None
    """The recorded units; None while `programs` does not record."""
    log: list[tuple[Any, ...]] | None = None
    """Operations and launches in order; None while no tape is recorded."""
    silent: bool = False
    """Whether launches on fake tensors are skipped: only the shapes of results matter."""


recording = _Recording()


def is_traced(tensor: Tensor) -> bool:
    """Whether this is a compiler's fake tensor, which has no address and supports no ``out=``."""
    return type(tensor) is not Tensor and type(tensor) is not Parameter


class Launch:
    """One kernel for one set of sizes, dtypes and settings, on one device.

    Args:
        kernel: From ``triton.jit``, with pointers first, then numbers, then constants.
        grid: The number of programs, in up to three dimensions.
        values: The numbers and the constants by name.
        options: Compiler options such as ``num_warps``.
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

    def start(self, arguments: Sequence[Any], addresses: Sequence[Any]) -> None:
        """Launch on addresses, descriptors or None; cache the binary if all addresses are multiples of 16."""
        log = recording.log
        if log is not None:
            log.append((self, arguments))
        aligned = not any(address & 15 for address in addresses if isinstance(address, int))
        if self.binary is None or not aligned:
            recording.log = None  # Triton's interpreter runs torch operations of its own
            try:
                compiled = self.kernel[self.grid](*arguments, **self.values, **self.options)
            finally:
                recording.log = log
            if aligned and compiled is not None:
                device = next(value.device for value in arguments if isinstance(value, Tensor))
                self.binary = compiled.run, compiled.function, compiled.packed_metadata, device.index
                self.compiled = compiled
            return
        run, function, metadata, index = self.binary
        stream = torch._C._cuda_getCurrentRawStream(index)
        run(*self.grid, stream, function, metadata, None, None, None, *addresses, *self.tail)

    def _trace(self, *tensors: Tensor) -> None:
        """Let a compiler trace the launch into the code that it generates."""
        if kernels.INTERPRETED or recording.silent:  # the operation is opaque: only the shapes of its results matter
            return
        options = {name: value for name, value in self.options.items() if name not in _NOT_TRACED}
        torch.library.wrap_triton(self.kernel)[self.grid](*tensors, **self.values, **options)


def cached(make: Callable[_P, _R]) -> Callable[_P, _R]:
    """Cache the results of a function of sizes and settings, except for a compiler's symbolic sizes."""
    lookup = functools.lru_cache(4096)(make)

    @functools.wraps(make)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return lookup(*args, **kwargs)  # type: ignore[arg-type]
        except TypeError:  # symbolic sizes are not hashable
            return make(*args, **kwargs)

    return call


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors, each of which runs at least one program at a time."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def has_large_shared_memory(device: torch.device) -> bool:
    """Whether a program may use 160 KiB of shared memory, as on data-centre GPUs; others allow 99."""
    if device.type != "cuda":
        return True
    # Only NVIDIA GPUs have this property.
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0) >= 160_000


def cdiv(size: int, block: int) -> int:
    """The number of blocks that cover ``size``."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is at least ``size`` ≥ 1."""
    return 1 << (size - 1).bit_length()
