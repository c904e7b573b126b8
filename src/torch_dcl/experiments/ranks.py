"""Processes that share a run, as ``torchrun`` starts them: each has a share of the fleets, and all write one folder."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from torch_dcl.fleet.run_folder import RunFolder

__all__ = ["Rank"]

T = TypeVar("T")


class Rank(NamedTuple):
    """Which process this is, and of how many; without ``torchrun`` the first of one.

    ::

        rank = Rank.here()
        with rank.open("runs/table1", recipe, resume=False) as folder:
            for fleet in rank.share(fleets): ...
            rank.wait()
    """

    number: int = 0
    world: int = 1

    @classmethod
    def here(cls) -> "Rank":
        """This process."""
        return cls(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))

    @property
    def part(self) -> str:
        """What the names of its files end in, where there are several."""
        return f"-{self.number}" if self.world > 1 else ""

    def share(self, things: Sequence[T]) -> Sequence[T]:
        """Its own of what all do together."""
        return things[self.number :: self.world]

    def device(self, asked: str) -> str:
        """Where it computes: its own GPU in the place of ``cuda``, which becomes the one that torch takes by itself."""
        if asked != "cuda":
            return asked
        own = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(own)
        return own

    def wait(self) -> None:
        """Wait until all processes have come here."""
        if self.world == 1:
            return
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo")
        dist.barrier()

    @contextlib.contextmanager
    def open(self, path: str | os.PathLike[str], recipe: Mapping[str, Any], *, resume: bool) -> Iterator[RunFolder]:
        """Open one run folder from all processes: the first one makes it, or goes on in it, and the others follow.

        Args:
            path: Where.
            recipe: What is asked for.
            resume: Whether to go on with what is there.

        Raises:
            RunError: As `RunFolder.open`.
        """
        if self.number:
            self.wait()
        with RunFolder.open(path, recipe, resume=resume or self.number > 0, part=self.part) as folder:
            if not self.number:
                self.wait()
            yield folder
