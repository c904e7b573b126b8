"""The learning rate by step: a linear warm-up, then drops by a factor."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """The schedule of the learning rate.

    Args:
        epochs: Number of epochs.
        warmup: Number of steps in which the rate rises linearly to its peak.
        drops: Fractions of the training, between 0 and 1, after which the rate is multiplied by ``factor``.
        factor: The factor of each drop.
    """

    epochs: int
    warmup: int = 0
    drops: tuple[float, ...] = ()
    factor: float = 0.1

    def __post_init__(self) -> None:
        if not isinstance(self.epochs, int) or self.epochs < 1:
            raise ValueError(f"epochs must be a whole number of at least 1, got {self.epochs!r}")
        if not isinstance(self.warmup, int) or self.warmup < 0:
            raise ValueError(f"warmup must be a whole number of steps, got {self.warmup!r}")
        if not 0 < self.factor <= 1:
            raise ValueError(f"factor must be above 0 and at most 1, got {self.factor!r}")
        if list(self.drops) != sorted(self.drops) or any(not 0 < drop < 1 for drop in self.drops):
            raise ValueError(f"drops must rise and lie between 0 and 1, got {self.drops}")

    def rates(self, lr: float, steps_per_epoch: int) -> Tensor:
        """The learning rate of every step, float64."""
        steps = self.epochs * steps_per_epoch
        step = torch.arange(steps, dtype=torch.float64)
        rate = torch.full_like(step, lr)
        if self.warmup:
            rate *= ((step + 1) / self.warmup).clamp(max=1)
        for drop in self.drops:
            rate[round(drop * steps) :] *= self.factor
        return rate
