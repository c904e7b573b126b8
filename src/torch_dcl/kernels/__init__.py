"""The arithmetic of stacked networks fused for the GPU, in Triton. Plain torch does the same everywhere else.

Every module here holds kernels and the functions that launch them, and nothing that decides when: the rooms below ask
`usable` first. Triton is imported with the first kernel, never with the package.
"""

import functools
import importlib.util
import os

import torch
from torch import Tensor

__all__ = ["reachable", "usable"]


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _interpreted() -> bool:
    """Whether Triton runs its kernels as Python on the CPU (TRITON_INTERPRET=1), as the tests do without a GPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def reachable(x: Tensor) -> bool:
    """Whether kernels can run where this tensor lies."""
    return (x.is_cuda or (x.device.type == "cpu" and _interpreted())) and _has_triton()


def usable(x: Tensor) -> bool:
    """Whether the kernels can take this tensor: on a GPU, of a type that they compute in."""
    return x.dtype in (torch.bfloat16, torch.float16, torch.float32) and reachable(x)
