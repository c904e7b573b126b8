"""Repeated compilations: torch autotunes kernels while compiling, and does not always choose the same ones.

A step may differ by a hundredth between compilations. Nothing else may run on the GPU meanwhile.
"""

import torch
import torch._inductor.utils

__all__ = ["forget", "inherit_none"]


def inherit_none() -> None:
    """Take over no trial of an earlier process, which may have had company on the GPU."""
    torch._inductor.config.autotune_local_cache = False


def forget() -> None:
    """Let what is compiled from here on be compiled anew, with trials of its own. What is captured stays."""
    torch.compiler.reset()
    torch._inductor.utils.clear_caches()
