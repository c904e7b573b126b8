"""Fused Triton kernels for DCL layers. Everywhere else plain torch runs, on a CPU in parts (`torch_dcl.parts`).

`dispatch` chooses kernel or reference, `unit` runs a layer as one autograd node, and `ops` registers the same
computation as torch operations for compilers. `plans` selects the kernels for each size; `elementwise`, `project`,
`saved_responses`, `moments`, `exchange` and `hopper` define them, and `launcher` launches them.
`pointwise` fuses the responses of stacked networks, whose other kernels are in `torch_dcl.fleet.kernels`; callers check
`usable` or `reachable` first. Triton is imported with the first kernel, never with the package.
"""

import contextlib
import importlib.util
import os

import torch
from torch import Tensor

__all__ = ["on_device_of", "reachable", "supports", "usable"]

# Looked up once: a compiled network must find constants here.
_HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run as Python on the CPU, as the tests do


def reachable(x: Tensor) -> bool:
    """Whether kernels can run on the device of this tensor."""
    return _HAS_TRITON and (x.is_cuda or (INTERPRETED and x.device.type == "cpu"))


def usable(x: Tensor) -> bool:
    """Whether the kernels support the device and the dtype of this tensor."""
    return bool(supports(x.dtype, x.device.type))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def supports(dtype: torch.dtype, kind: str) -> bool:
    """Whether the kernels support this dtype on this device type. A constant for compilers: it adds no guard."""
    on_device = kind == "cuda" or (INTERPRETED and kind == "cpu")
    return _HAS_TRITON and on_device and dtype in (torch.bfloat16, torch.float16, torch.float32)


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the tensor's GPU the current one, on which Triton launches."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return contextlib.nullcontext()
