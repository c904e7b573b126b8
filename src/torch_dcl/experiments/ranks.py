"""The processes of a run, which all write one folder, and the signals that ask them to stop.

`Rank`: ``torchrun`` starts all processes, and each trains a fixed share of the fleets.

`Worker`: any number of processes run the same command with ``--join``, and claim free fleets. A fleet is claimed by
creating a file in ``claims`` that must not exist (``O_CREAT | O_EXCL``), which is atomic on network file systems too.
Its holder increments a counter in the file while it trains. A claim whose counter did not change for a while, on the
clock of the process that checks it, is stale: another process takes over by creating the next file, and resumes the
fleet from its last checkpoint. Clocks of machines are never compared. If a holder was only slow, two processes train
the same fleet, to the same outcomes. No claim needs a lock of the system; the shared one that a worker holds where
there are locks keeps a run without ``--join`` out, and says that the run is running.
"""

import atexit
import contextlib
import datetime
import json
import math
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from torch_dcl.files import write_bytes
from torch_dcl.fleet.run_folder import RunError, RunFolder, check_recipe, environment, holding, recipe_text

__all__ = ["Claims", "Rank", "StopRequest", "Worker", "agree", "join_group", "leave_group"]

T = TypeVar("T")
TIMEOUT = "TORCH_DCL_TIMEOUT"
"""The environment variable that sets how many seconds a process waits for the others."""
PATIENCE = 30 * 24 * 3600  # seconds that a rank waits for the longest fleet; one that dies is noticed at once
BEAT = 5.0  # seconds between two increments of a claim's counter, at most
STALE = 600.0  # seconds without an increment after which a claim is stale
POLL = 1.0  # seconds between two polls of an idle worker
_DONE = b"done\n"  # instead of a counter, in the claim of a result that is written
MEET = 0.02  # seconds between two polls of the first rank for others that start


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

    def take(self, fleets: Sequence[str], left: Collection[str]) -> list[str]:
        """The fleets to train now, by key: those of its share that are left."""
        return [key for key in self.share(fleets) if key in left]

    def settle(self, left: Collection[str], taken: Collection[str], *, is_late: bool) -> Collection[str]:
        """Wait for the others; return the fleets that are not to be tried again: some rank has tried each."""
        del taken, is_late
        self.wait()
        return left

    def makes_result(self, should_stop: Callable[[], bool]) -> bool:
        """Whether this process makes the result of a complete run."""
        del should_stop
        return self.number == 0

    def watch(self, should_stop: Callable[[], bool]) -> Callable[[], bool]:
        """The function to call before every step."""
        return should_stop

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


class Claims:
    """The claims of one process, whose name no other has, on the fleets of a run.

    A claim whose counter stands still for ``patience`` seconds is stale.
    """

    def __init__(self, folder: Path, worker: str, patience: float) -> None:
        self.place, self.worker, self.patience = folder / "claims", worker, patience
        self.mine: dict[str, Path] = {}
        self._count, self._beaten = 0, -math.inf
        self._seen: dict[str, tuple[bytes, float]] = {}
        self.place.mkdir(parents=True, exist_ok=True)

    def take(self, key: str) -> bool:
        """Claim something, unless another process works on it; whether it is this process's now."""
        if key in self.mine:
            return True
        last = self._last(key)
        if last and not self._is_stale(self.place / f"{key}.{last}"):
            return False
        path = self.place / f"{key}.{last + 1}"
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            return False  # another process was faster
        with os.fdopen(descriptor, "wb") as file:
            file.write(self._text())
        self.mine[key] = path
        return True

    def finish(self, key: str) -> None:
        """Say that what this process claimed is done, and never to be claimed again."""
        self.mine.pop(key).write_bytes(_DONE)

    def is_done(self, key: str) -> bool:
        """Whether its last holder said so."""
        try:
            return (self.place / f"{key}.{self._last(key)}").read_bytes() == _DONE
        except FileNotFoundError:
            return False

    def _last(self, key: str) -> int:
        """The number of the last claim; 0 where there is none."""
        return max((int(path.name.rpartition(".")[2]) for path in self.place.glob(f"{key}.*")), default=0)

    def _text(self) -> bytes:
        return f"{self._count:020d} {self.worker}\n".encode()

    def _is_stale(self, path: Path) -> bool:
        try:
            now = path.read_bytes()
        except FileNotFoundError:
            return False  # given back in this moment
        if now == _DONE:
            return False
        before, since = self._seen.get(path.name, (None, 0.0))
        if now != before:
            self._seen[path.name] = now, time.monotonic()
            return False
        return time.monotonic() - since >= self.patience

    def beat(self) -> None:
        """Increment the counter of all claims of this process, now and then."""
        if time.monotonic() - self._beaten < min(BEAT, self.patience / 4):  # a live claim is never stale
            return
        self._beaten, self._count = time.monotonic(), self._count + 1
        for path in self.mine.values():
            with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
                file.write(self._text())

    def give_back(self) -> None:
        """Let others take at once what this process has not finished."""
        for path in self.mine.values():
            path.unlink(missing_ok=True)
        self.mine.clear()


class Worker(Rank):
    """A process that joined a run: it takes one fleet after the other, until none is left. It does what `Rank` does."""

    claims: Claims
    _part: str

    @classmethod
    def here(cls) -> "Worker":
        """This process."""
        worker = cls()
        worker._part = f"-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        return worker

    @property
    def part(self) -> str:
        """The suffix of its files, which no other process has."""
        return self._part

    def take(self, fleets: Sequence[str], left: Collection[str]) -> list[str]:
        """Claim the first free fleet; none if all are claimed."""
        taken = next((key for key in fleets if key in left and self.claims.take(key)), None)
        return [] if taken is None else [taken]

    def settle(self, left: Collection[str], taken: Collection[str], *, is_late: bool) -> Collection[str]:
        """Wait a little where nothing could be taken; a fleet that this process trained is not tried again."""
        if not taken and not is_late:
            time.sleep(POLL)
        return left if is_late else taken

    def makes_result(self, should_stop: Callable[[], bool]) -> bool:
        """Whether this process is the first to claim the result; others wait for it, since it may die."""
        while not self.claims.take("result"):
            if self.claims.is_done("result") or should_stop():
                return False
            time.sleep(POLL)
        return True

    def watch(self, should_stop: Callable[[], bool]) -> Callable[[], bool]:
        """Keep the claims alive before every step."""

        def beat_and_ask() -> bool:
            self.claims.beat()
            return should_stop()

        return beat_and_ask

    @contextlib.contextmanager
    def open(self, path: str | os.PathLike[str], recipe: Mapping[str, Any], *, resume: bool) -> Iterator[RunFolder]:
        """Open the folder, created by the first process: a hard link to a finished file cannot replace another's."""
        del resume
        place, plain = Path(path), json.loads(json.dumps(recipe))
        place.mkdir(parents=True, exist_ok=True)
        _refuse_links(place)
        if not (place / "recipe.json").exists():
            aside = place / f".recipe{self.part}"
            write_bytes(aside, recipe_text(plain).encode())
            with contextlib.suppress(FileExistsError):
                os.link(aside, place / "recipe.json")
            aside.unlink()
        with holding(place, self.part):
            check_recipe(place, plain, resume=True)
            folder = RunFolder(place, recipe)
            folder.append(f"environment{self.part}", environment())
            self.claims = Claims(place, self.part, float(os.environ.get(TIMEOUT, STALE)))
            try:
                yield folder
                if "result" in self.claims.mine:
                    self.claims.finish("result")
            finally:
                self.claims.give_back()
                (place / f"lock{self.part}").unlink(missing_ok=True)


def join_group(backend: str, seconds: float) -> None:
    """Meet the other ranks; a rank waits for another for as many seconds, here and later."""
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=seconds)
    store, rank, world = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
    attempt = dist.PrefixStore(agree(store, rank, world, seconds), store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=attempt, rank=rank, world_size=world, timeout=timeout)
    atexit.register(leave_group)


def agree(store: Any, rank: int, world: int, seconds: float) -> str:
    """A new name for this start of all ranks, which they agree on.

    A store of torchrun still has the addresses of ranks that ended before a restart, and each machine counts restarts
    for itself. So a rank asks under a name that no other process had. The first one gives its own name to all that ask,
    until every rank has taken it: one that asked and ended does not.

    Args:
        store: What all ranks read and write.
        rank: The number of this one.
        world: How many there are.
        seconds: How long the first rank waits; the others wait as long as the store does.
    """
    own, until = secrets.token_hex(8), time.monotonic() + seconds
    if rank:
        store.set(f"asks {rank}", own)
        name: str = store.get(f"answer to {own}").decode()
        store.set(f"{name} taken by {rank}", "")
        return name
    left = list(range(1, world))
    while left:
        for asks in filter(lambda key: store.check([key]), [f"asks {number}" for number in left]):
            store.set(f"answer to {store.get(asks).decode()}", own)
        left = [number for number in left if not store.check([f"{own} taken by {number}"])]
        if left and time.monotonic() > until:
            raise RuntimeError(f"no sign of rank {left[0]}")
        time.sleep(MEET if left else 0)
    return own


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
