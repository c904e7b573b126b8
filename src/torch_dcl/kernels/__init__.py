"""The same arithmetic fused for the GPU, in Triton. Plain torch does it everywhere else.

`dispatch` says which path a DCL layer takes, `unit` computes it as one node of autograd, and `ops` is the same as
operations of torch, for compilers. `plans` decides once for each size which kernels run; `fused`, `project`, `moments`,
`exchange`, `kept`, `layout` and `hopper` have them, and `launcher` starts them. `pointwise` fuses responses of several
networks; other kernels for stacked networks are in `torch_dcl.fleet.kernels`, whose callers ask `usable` or `reachable`
first. Triton is imported with the first kernel, never with the package.
"""

import contextlib
import importlib.util
import os

import torch
from torch import Tensor

__all__ = ["on_device_of", "reachable", "take", "usable"]

# Looked up once: a compiled network must find constants here.
_HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run as Python on the CPU, as the tests do


def reachable(x: Tensor) -> bool:
    """Whether kernels can run where this tensor lies."""
    return _HAS_TRITON and (x.is_cuda or (INTERPRETED and x.device.type == "cpu"))


def usable(x: Tensor) -> bool:
    """Whether the kernels can take this tensor: on a GPU, of a type that they compute in."""
    return bool(take(x.dtype, x.device.type))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def take(dtype: torch.dtype, kind: str) -> bool:
    """Whether the kernels can take tensors of this type on such a device. A compiler asks once, and guards nothing."""
    there = kind == "cuda" or (INTERPRETED and kind == "cpu")
    return _HAS_TRITON and there and dtype in (torch.bfloat16, torch.float16, torch.float32)


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current GPU, which need not be the one where the tensor lies."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return contextlib.nullcontext()
