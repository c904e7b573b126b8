"""Labels of two-digit images that are relations of the two digits: their order, their sum, whether they are the same.

A label is a function of the two digits and of nothing else, so that one set of images serves every task.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["TASKS", "Task", "label_pairs"]


class Task(NamedTuple):
    """A question about two digits."""

    title: str
    """Its name in a text."""
    classes: int
    label: Callable[[Tensor, Tensor], Tensor]
    """The class, int64, of the first and the second digit."""

    @property
    def chance(self) -> float:
        """Chance-level error in percent: of always answering the most frequent class over all 100 pairs."""
        labels = self.label(*_digits(torch.arange(100)))
        return 100 - float(torch.bincount(labels).max())


TASKS = {
    "number": Task("number", 100, lambda a, b: 10 * a + b),
    "order": Task("order (<, =, >)", 3, lambda a, b: (a >= b).long() + (a > b).long()),
    "sum": Task("sum mod 10", 10, lambda a, b: (a + b) % 10),
    "same": Task("same or different", 2, lambda a, b: (a == b).long()),
    "difference": Task("absolute difference", 10, lambda a, b: (a - b).abs()),
}
"""Tasks by name. The classes of ``order`` are 0 for <, 1 for = and 2 for >; of ``same``, 1 is for equal digits."""


def label_pairs(task: str, numbers: Tensor) -> Tensor:
    """The labels of a task.

    Args:
        task: One of `TASKS`.
        numbers: What two-digit images show: int64 from 0 to 99, ten times the first digit plus the second, as
            `digits.generate` labels them.

    Returns:
        int64 of the same shape and device, from 0 to the task's classes − 1.

    Raises:
        ValueError: There is no such task, or a number does not have two digits.
    """
    if task not in TASKS:
        raise ValueError(f"there is no task {task!r}; the tasks are {', '.join(TASKS)}")
    if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) <= 99:
        wrong = next(int(n) for n in (numbers.min(), numbers.max()) if not 0 <= int(n) <= 99)
        raise ValueError(f"{wrong} is no number of two digits; use a set of two digits, such as MNIST-II-05")
    return TASKS[task].label(*_digits(numbers))


def _digits(numbers: Tensor) -> tuple[Tensor, Tensor]:
    return numbers // 10, numbers % 10
