"""While it compiles, torch tries kernels on the GPU and keeps the fastest; not the same ones every time.

A compilation is one draw, and a step may differ by a hundredth for it. Let nothing else run on the GPU meanwhile.
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
