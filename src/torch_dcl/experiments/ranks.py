"""The process of a run: its rank where ``torchrun`` starts several, and the signals that ask it to stop.

Every rank trains a share of the fleets, and all write one folder.
"""

import atexit
import contextlib
import datetime
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from torch_dcl.fleet.run_folder import RunError, RunFolder

__all__ = ["Rank", "StopRequest", "join_group", "leave_group"]

T = TypeVar("T")
TIMEOUT = "TORCH_DCL_TIMEOUT"
"""The environment's word on how many seconds a rank waits for the others."""
PATIENCE = 30 * 24 * 3600  # seconds: who ends early waits for the longest fleet; a rank that dies is noticed at once


class Rank(NamedTuple):
    """The number of this process, and how many there are; 0 of 1 without ``torchrun``.

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
        """The suffix of its files, with several processes."""
        return f"-{self.number}" if self.world > 1 else ""

    def share(self, things: Sequence[T]) -> Sequence[T]:
        """The share of this rank."""
        return things[self.number :: self.world]

    def device(self, asked: str) -> str:
        """The device of this rank: for ``cuda`` its own GPU, which becomes torch's current device."""
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
            join_group("gloo", float(os.environ.get(TIMEOUT, PATIENCE)))
        dist.barrier()

    @contextlib.contextmanager
    def open(self, path: str | os.PathLike[str], recipe: Mapping[str, Any], *, resume: bool) -> Iterator[RunFolder]:
        """Open one run folder from all processes: the first one creates or resumes it, and the others follow.

        Raises:
            RunError: As `RunFolder.open`; or the folder has a symbolic link in it.
        """
        if self.number:
            self.wait()
        _refuse_links(Path(path))
        with RunFolder.open(path, recipe, resume=resume or self.number > 0, part=self.part) as folder:
            if not self.number:
                self.wait()
            yield folder


def join_group(backend: str, seconds: float) -> None:
    """Meet the other ranks.

    Args:
        backend: Of torch.distributed.
        seconds: How long a rank waits for another, here and later.
    """
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=seconds)
    store, rank, world = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
    # A store of torchrun still has the addresses of ranks that ended before a restart.
    name = f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    attempt = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=attempt, rank=rank, world_size=world, timeout=timeout)
    atexit.register(leave_group)


def leave_group() -> None:
    """Leave the other ranks; without this a process that ends early may crash in a thread of gloo."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _refuse_links(folder: Path) -> None:
    """Refuse a folder with symbolic links: a folder from another user may point anywhere."""
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise RunError(f"{path} is a symbolic link, which a run does not write through; remove it")


class StopRequest:
    """A request to stop, made by SIGINT or SIGTERM: ``with StopRequest() as stop: run(..., should_stop=stop)``.

    The first signal asks, and calls ``on_signal`` with a sentence for people; a second SIGINT interrupts at once.
    Signals that are ignored stay ignored, as SIGINT is for what a shell runs in the background. Elsewhere than in the
    main thread nothing is changed.
    """

    def __init__(self, on_signal: Callable[[str], None] | None = None) -> None:
        self.signal: signal.Signals | None = None
        self.on_signal = on_signal
        self._before: dict[signal.Signals, Any] = {}

    def __call__(self) -> bool:
        """Whether to stop."""
        return self.signal is not None

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before = signal.getsignal(number)
                if before is not signal.SIG_IGN:
                    self._before[number] = before
                    signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def take(self, number: int) -> None:
        """Stop as if this process had the signal that another one had."""
        self.signal = signal.Signals(number)

    def _ask(self, number: int, _frame: object) -> None:
        self.signal = signal.Signals(number)
        if signal.SIGINT in self._before:
            signal.signal(signal.SIGINT, self._before[signal.SIGINT])
        if self.on_signal is not None:
            self.on_signal("stopping after this step; Ctrl-C again stops at once")
