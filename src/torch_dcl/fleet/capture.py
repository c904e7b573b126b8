"""What surrounds the capture of a step: which algorithms may be taken, and whose memory they use."""

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["convolutions", "same_bits", "scratch_of_its_own"]


def same_bits(asked: bool) -> bool:
    """Whether the same bits are wanted every time, by who asks here or by torch's own settings."""
    return asked or torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()


@contextlib.contextmanager
def convolutions(*, deterministic: bool) -> Iterator[None]:
    """Have cuDNN give the same bits every time, here or by torch's own settings; or take its fastest algorithms."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    same = same_bits(deterministic)
    cudnn.benchmark, cudnn.deterministic = not same, same
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before


@contextlib.contextmanager
def scratch_of_its_own() -> Iterator[None]:
    """Have cuBLAS take scratch memory anew inside, and leave none behind.

    Torch 2.11 keeps it for each stream, and all graphs are captured on the same one: products of several that run at a
    time would write over each other's partial sums.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
