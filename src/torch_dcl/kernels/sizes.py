"""Sizes of grids and tiles, as Triton's functions of these names give them, in plain integers and without their cost.

Triton's can be called inside a kernel as well, for which each call takes microseconds on the way to a launch.
"""

import functools

import torch

__all__ = ["cdiv", "next_power_of_2", "processors"]


@functools.cache
def processors(device: torch.device) -> int:
    """How many programs run side by side at least."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def cdiv(size: int, block: int) -> int:
    """How many blocks it takes."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """The least power of two from ``size``, which is at least 1."""
    return 1 << (size - 1).bit_length()
