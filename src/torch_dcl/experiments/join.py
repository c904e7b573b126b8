"""A run folder as a queue: any number of processes run the same command and take what nobody works on.

A fleet is claimed by creating a file in ``claims`` that must not exist (``O_CREAT | O_EXCL``), which is atomic on
network file systems too; no lock of the system is held. Its holder counts up a number in the file while it trains. A
claim whose number did not change for a while, on the clock of the one who looks, is stale, and is taken over by
creating the next file; the fleet then goes on from its last checkpoint. Clocks of machines are never compared. Where a
holder was only slow two processes train the same fleet, to the same outcomes.
"""

import contextlib
import dataclasses
import json
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_dcl.experiments.protocol import Job, Listener, Recipe
from torch_dcl.experiments.ranks import TIMEOUT, Rank
from torch_dcl.experiments.runner import Summary, _key, _Sweep, outcomes_of, plan_fleets
from torch_dcl.experiments.settings import SettingError
from torch_dcl.files import write_bytes
from torch_dcl.fleet.run_folder import RunFolder, check_recipe, environment, recipe_text

__all__ = ["Claims", "run_joined"]

BEAT = 5.0  # seconds between two counts of a holder
PATIENCE = 600.0  # seconds without a count after which a claim is stale; TORCH_DCL_TIMEOUT sets another number
POLL = 1.0  # seconds between two looks of a process that has nothing to do


class Claims:
    """The claims of one process on the fleets of a run.

    Args:
        folder: The run folder.
        worker: A name that no other process has.
        patience: Seconds after which a claim that does not count is stale.
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
        last = max((int(path.name.rpartition(".")[2]) for path in self.place.glob(f"{key}.*")), default=0)
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

    def _text(self) -> bytes:
        return f"{self._count:020d} {self.worker}\n".encode()

    def _is_stale(self, path: Path) -> bool:
        """Whether a claim has not changed for as long as this process has patience."""
        try:
            now = path.read_bytes()
        except FileNotFoundError:
            return False  # given back in this moment
        before, since = self._seen.get(path.name, (None, 0.0))
        if now != before:
            self._seen[path.name] = now, time.monotonic()
            return False
        return time.monotonic() - since >= self.patience

    def beat(self) -> None:
        """Count on, in all claims of this process, now and then."""
        if time.monotonic() - self._beaten < BEAT:
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


@dataclasses.dataclass
class _Joined(_Sweep):
    """One process that takes fleets from a queue until none is left."""

    claims: Claims | None = None

    def train_all(self) -> bool:
        """Train what can be claimed, and wait for the others; whether all jobs are done."""
        recipe, begun, failed = self.recipe, False, set[str]()
        while True:
            known = outcomes_of(self.folder)
            jobs = recipe.jobs(known)
            if not begun:
                self._begin(known)
                begun = True
            if all(job in known for job in jobs):
                return True
            fleets = plan_fleets(jobs, recipe.group, recipe.at_once, recipe.networks)
            open_ones = {_key(fleet): fleet for fleet in fleets if any(job not in known for job in fleet)}
            if all(key in failed for key in open_ones) or self.should_stop() or self._is_late():
                return False
            taken = next((key for key in open_ones if key not in failed and self._take(key)), None)
            if taken is None:
                time.sleep(POLL)
                continue
            before = len(self.failures)
            # Another process may have finished it before its claim was given back.
            known = outcomes_of(self.folder)
            self._train_phase([rest] if (rest := [job for job in open_ones[taken] if job not in known]) else [])
            if len(self.failures) > before:
                failed.add(taken)

    def _is_late(self) -> bool:
        return self.started and time.perf_counter() > self.until

    def _take(self, key: str) -> bool:
        return self.claims is not None and self.claims.take(key)

    def _report_unused(self, jobs: Sequence[Job], known: Mapping[Job, Any]) -> None:
        """Nothing: checkpoints of others are in the same folder."""


def run_joined(
    recipe: Recipe[Any],
    path: str | os.PathLike[str],
    *,
    seconds: float = math.inf,
    should_stop: Callable[[], bool] | None = None,
    listener: Listener | None = None,
    files: Mapping[str, bytes] | None = None,
    patience: float | None = None,
) -> Summary:
    """Join a run: begin it if nobody has, take fleets that nobody trains, and help until all are done.

    Args:
        recipe: What to run; the same in all processes.
        path: The run folder, shared by all.
        seconds: Take no further fleet, and stop at the end of an epoch, when so much time has gone.
        should_stop: Asked before every step.
        listener: Told of the progress.
        files: Further files for a new folder.
        patience: Seconds after which a process that does not count on is taken for dead.

    Returns:
        The process that finishes the run has its result.

    Raises:
        SettingError: The recipe trains one network on all ranks.
        RunError: The folder was begun with other settings or data.
    """
    if recipe.is_shared:
        raise SettingError(f"{recipe.name} trains each network on all ranks together; start it with torchrun instead")
    start, listener, stop = time.perf_counter(), listener or Listener(), should_stop or (lambda: False)
    recipe.device = Rank.here().device(recipe.device)
    recipe.prepare(listener.report)
    asked = {"recipe": recipe.name, "total": recipe.total(), "unit": recipe.unit, **recipe.asked()}
    worker = f"-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    folder = _open(Path(path), asked, worker, files or {})
    claims = Claims(folder.path, worker, _patience() if patience is None else patience)

    def stop_and_count() -> bool:
        claims.beat()
        return stop()

    part = _Worker(worker)
    sweep = _Joined(
        recipe, folder, part, start + seconds, recipe.every, stop_and_count, listener, noted=start, claims=claims
    )
    try:
        complete = sweep.train_all()
    except BaseException:
        claims.give_back()
        raise
    finally:
        sweep.note_minutes()
    failures = tuple(sweep.failures)
    if not complete or not claims.take("result"):
        claims.give_back()
        return Summary(complete, None, failures)
    sweep.kept.forget_all()
    return Summary(True, recipe.result(folder), failures)


def _patience() -> float:
    return float(os.environ.get(TIMEOUT, PATIENCE))


class _Worker(Rank):
    """A process that is the first of one, with names of files of its own."""

    name: str

    def __new__(cls, name: str) -> "_Worker":
        worker = super().__new__(cls, 0, 1)
        worker.name = name
        return worker

    @property
    def part(self) -> str:
        """What the names of its files end in."""
        return self.name


def _open(path: Path, asked: dict[str, Any], worker: str, files: Mapping[str, bytes]) -> RunFolder:
    """The folder, begun by whoever comes first: a link to a finished file cannot replace another's."""
    path.mkdir(parents=True, exist_ok=True)
    plain = json.loads(json.dumps(asked))
    if not (path / "recipe.json").exists():
        aside = path / f".recipe{worker}"
        write_bytes(aside, recipe_text(plain).encode())
        with contextlib.suppress(FileExistsError):
            os.link(aside, path / "recipe.json")
        aside.unlink()
    check_recipe(path, plain, resume=True)
    for name, content in files.items():
        if not (path / name).exists():
            write_bytes(path / name, content)
    folder = RunFolder(path, asked)
    folder.append(f"environment{worker}", environment())
    return folder
