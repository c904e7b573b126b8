"""Settings around the capture of a step as a CUDA graph: cuDNN algorithms and cuBLAS workspaces."""

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["cudnn_algorithms", "is_deterministic", "private_workspaces"]


def is_deterministic(requested: bool) -> bool:
    """Whether results must be deterministic, by request or by torch's global settings."""
    return requested or torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()


@contextlib.contextmanager
def cudnn_algorithms(*, deterministic: bool) -> Iterator[None]:
    """Let cuDNN choose its fastest algorithms, or deterministic ones by request or by torch's global settings."""
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
    """Give cuBLAS fresh workspaces inside, and keep none of them afterwards.

    Torch 2.11 caches a workspace for each stream, and all graphs are captured on the same stream: graphs that run
    concurrently would overwrite each other's partial sums.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
