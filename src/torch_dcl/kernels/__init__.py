"""Fused Triton kernels for DCL layers. Everywhere else plain torch runs, on a CPU in parts (`torch_dcl.parts`).

`dispatch` chooses kernel or reference, `unit` runs a layer as one autograd node, and `ops` registers the same
computation as torch operations for compilers. `plans` selects the kernels for each size. They are in `elementwise`,
`project` (with `passes`, `rows` and `hopper`), `saved_responses`, `moments` and `exchange`. `launcher` launches them,
`record` records the launches of a unit, and `host` replays them.
`pointwise` fuses the responses of stacked networks, whose other kernels are in `torch_dcl.fleet.kernels`; callers check
`usable` or `reachable` first. Triton is imported with the first kernel, never with the package.
"""

import contextlib
import functools
import importlib.util
import os

import torch
from torch import Tensor

from torch_dcl.functional import constant

__all__ = ["on_device_of", "reachable", "runs_on", "supports", "usable"]

# Looked up once: a compiled network must find constants here.
_HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run as Python on the CPU, as the tests do


def reachable(x: Tensor) -> bool:
    """Whether kernels can run on the device of this tensor."""
    return _HAS_TRITON and runs_on(x.device)


def usable(x: Tensor) -> bool:
    """Whether the kernels support the device and the dtype of this tensor."""
    return bool(supports(x.dtype, x.device))


@constant
def supports(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels support this dtype on this device. A constant for compilers: it adds no guard."""
    return _HAS_TRITON and dtype in (torch.bfloat16, torch.float16, torch.float32) and runs_on(device)


@functools.cache
def runs_on(device: torch.device) -> bool:
    """Whether Triton supports a device. It dropped NVIDIA's GPUs before compute capability 8.0, such as the T4."""
    if device.type != "cuda":
        return INTERPRETED and device.type == "cpu"
    traced = not torch.cuda.is_available()  # a fake tensor of a GPU that is elsewhere
    return traced or torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the tensor's GPU the current one, on which Triton launches."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return contextlib.nullcontext()
