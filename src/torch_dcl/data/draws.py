"""Stateless random numbers: a hash of (seed, purpose, epoch, index).

The number of a sample does not change with the batch size, the order, the device or what ran before.
"""

import hashlib
import operator
from typing import Any

from torch import Tensor

__all__ = ["below", "draw", "draw_key", "mix", "whole_number"]

_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def draw(seed: int, purpose: str, epoch: int, index: Tensor) -> Tensor:
    """Draw one number for every index, int64 of the same shape and device; two purposes get different ones.

    All 64 bits are uniform, so half of the numbers are negative. They are the mixing function of splitmix64 on the
    index, seeded with the SHA-256 of the other arguments.
    """
    return mix(index * _signed(_GOLDEN) + draw_key(seed, purpose, epoch))


def draw_key(seed: int, purpose: str, epoch: int) -> int:
    """The 64 bits that seed, purpose and epoch are to `draw`."""
    seed, epoch = whole_number("seed", seed), whole_number("epoch", epoch)
    return _signed(int.from_bytes(hashlib.sha256(f"{seed}|{epoch}|{purpose}".encode()).digest()[:8], "little"))


def mix(x: Tensor) -> Tensor:
    """The mixing function of splitmix64: every bit of the result depends on every bit of the argument."""
    for shift, factor in _FACTORS:
        x = (x ^ _right(x, shift)) * _signed(factor)
    return x ^ _right(x, 31)


def below(drawn: Tensor, bound: int) -> Tensor:
    """Map drawn numbers to int64 from 0 to bound − 1, uniform to about bound / 2³²; the bound is at most 2³¹."""
    return _right(drawn, 32) * bound >> 32


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """Check an argument that must be a whole number. Numpy integers are accepted, True and False are not."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, not {number}")
    return number


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    return value - 2**64 if value >= 2**63 else value


def _right(x: Tensor, shift: int) -> Tensor:
    """Shift to the right and fill with zeros; torch fills with the sign."""
    return (x >> shift) & ((1 << (64 - shift)) - 1)
