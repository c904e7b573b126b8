"""What surrounds the capture of a step: which algorithms may be taken, and whose memory they use."""

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["cudnn_algorithms", "is_deterministic", "private_workspaces"]


def is_deterministic(asked: bool) -> bool:
    """Whether the same bits are wanted every time, by who asks here or by torch's own settings."""
    return asked or torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()


@contextlib.contextmanager
def cudnn_algorithms(*, deterministic: bool) -> Iterator[None]:
    """Have cuDNN give the same bits every time, here or by torch's own settings; or take its fastest algorithms."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    same = is_deterministic(deterministic)
    cudnn.benchmark, cudnn.deterministic = not same, same
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before


@contextlib.contextmanager
def private_workspaces() -> Iterator[None]:
    """Have cuBLAS take scratch memory anew inside, and leave none behind.

    Torch 2.11 keeps it for each stream, and all graphs are captured on the same one: products of several that run at a
    time would write over each other's partial sums.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
