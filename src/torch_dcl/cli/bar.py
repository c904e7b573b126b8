"""Moves a progress bar by what the training rooms tell."""

import re
from typing import TYPE_CHECKING

from torch_dcl.progress import Bar

if TYPE_CHECKING:
    from torch_dcl.experiments.protocol import Progress

__all__ = ["Bar", "Listener"]

FLEET = re.compile(r"^fleet \d+ of \d+, ")


class Listener:
    """Takes what the training rooms tell of their progress, and moves a bar over networks.

    Args:
        bar: The bar; a fleet of 75 networks after a third of its epochs counts as 25 of them.
        first: What is done before the first fleet.
    """

    def __init__(self, bar: Bar, first: str = "writing the sets") -> None:
        self.bar, self.first = bar, first
        self._before = 0.0
        self._size = 0

    def begin(self, before: int, total: int) -> None:
        """So many networks were done before, and so many there are in all."""
        self.bar.begin_at(before, total)
        self._before, self._size = float(before), 0
        self.bar.now(self.first)

    def on_epoch(self, at: "Progress") -> None:
        """A fleet is so far."""
        if at.epoch == 0:
            self._before, self._size = self._before + self._size, at.networks
            fleet = f"fleet {at.fleet} of {at.fleets}, " if at.fleets > 1 else ""
            self.bar.now(f"{fleet}{at.name}, {at.networks} network{'s' if at.networks > 1 else ''}")
        self.bar.inside(at.epoch, at.epochs, "epochs")
        self.bar.reach(self._before + at.networks * at.epoch / at.epochs)

    def report(self, line: str) -> None:
        """Print a line, unless it only says that a fleet is done, which the bar shows."""
        if not FLEET.match(line):
            self.bar.note(line)
