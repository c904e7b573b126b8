"""Runs a recipe: jobs become fleets, fleets are trained in slices that can be resumed, outcomes go to the run folder.

::

    runs/table2/
      recipe.toml, recipe.json      the settings as they can be edited, and everything that outcomes depend on
      outcomes.jsonl                the outcomes of each fleet, one line with a checksum
      fleets/KEY-EPOCH-STEP.safetensors   the last two checkpoints of each fleet that is being trained
      environment.jsonl, metrics.jsonl, minutes.jsonl, failures.jsonl, log.txt

Nothing is thrown to steer a run: it asks ``should_stop()`` before every step, and the clock after every epoch.
"""

import dataclasses
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from torch_dcl.experiments.protocol import Job, Listener, Outcome, Progress, Recipe, Trained, finite
from torch_dcl.experiments.ranks import Rank, Worker
from torch_dcl.experiments.settings import SettingError
from torch_dcl.files import write_bytes
from torch_dcl.fleet import Fleet
from torch_dcl.fleet.checkpoint import Checkpoints
from torch_dcl.fleet.concurrent import train_concurrently
from torch_dcl.fleet.run_folder import RunError, RunFolder, utc_now
from torch_dcl.progress import say_minutes

__all__ = ["Failure", "Summary", "concurrent_groups", "key_of", "minutes_of", "outcomes_of", "plan_fleets", "run"]


class Failure(NamedTuple):
    """Jobs whose fleet raised an error."""

    jobs: tuple[Job, ...]
    error: str


class Summary(NamedTuple):
    """The outcome of a call of `run`."""

    complete: bool
    """Whether all jobs are done; on another rank than the first, whether its share is."""
    result: Any = None
    failures: tuple[Failure, ...] = ()


def run(
    recipe: Recipe[Any],
    path: str | os.PathLike[str],
    *,
    resume: bool = False,
    join: bool = False,
    seconds: float = math.inf,
    every: float | None = None,
    should_stop: Callable[[], bool] | None = None,
    listener: Listener | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Summary:
    """Run a recipe, or resume it.

    Started by ``torchrun``, every rank trains a share of the fleets, and the first one makes the result. A fleet that
    raises an error does not end the run: its jobs are recorded as failed, and a resumed run tries them again.

    Args:
        recipe: What to run. The rank's own GPU takes the place of ``cuda``.
        path: The run folder.
        resume: Whether to resume the run that the folder holds.
        join: Whether to share the run with other processes started with the same command; the first one creates it.
            Each claims free fleets until all are done, and the last one to finish writes the result.
        seconds: Stop at the first end of an epoch after this time. Every call trains at least one epoch.
        every: Seconds between two checkpoints; None for what the recipe says.
        should_stop: Called before every step; when it returns True the fleets are saved and the run ends.
        listener: Receives the progress.
        files: Further files for a new folder, by name, such as the settings as TOML.

    Raises:
        RunError: The folder is in use, was begun with other settings or other data, or is damaged.
        SettingError: All ranks train each network of the recipe together, and it is to be joined.
    """
    if join and recipe.is_shared:
        raise SettingError(f"{recipe.name} trains each network on all ranks together; start it with torchrun instead")
    start, rank = time.perf_counter(), Worker.here() if join else Rank.here()
    listener, should_stop = listener or Listener(), rank.watch(should_stop or (lambda: False))
    recipe.device = rank.device(recipe.device)
    recipe.prepare(listener.report if not rank.number else Listener().report)
    asked = {"recipe": recipe.name, "total": recipe.total(), "unit": recipe.unit, **recipe.asked()}
    if recipe.is_shared and rank.number:
        return Summary(recipe.follow(should_stop))
    rank = Rank() if recipe.is_shared else rank
    with recipe.leading(path, should_stop), rank.open(path, asked, resume=resume) as folder:
        for name, content in (files or {}).items() if not rank.number else ():
            if not (folder.path / name).exists():
                write_bytes(folder.path / name, content)
        often = recipe.every if every is None else every
        sweep = _Sweep(recipe, folder, rank, start + seconds, often, should_stop, listener, noted=start)
        try:
            complete = sweep.train_all()
        finally:
            sweep.note_minutes()
        failures = tuple(sweep.failures)
        if not complete or not rank.makes_result(lambda: sweep.should_stop() or sweep.is_late()):
            return Summary(complete, None, failures)
        sweep.checkpoints.forget_all()
        return Summary(True, recipe.result(folder), failures)


def outcomes_of(folder: RunFolder) -> dict[Job, Outcome]:
    """All outcomes in a run folder, by job."""
    outcomes = [Outcome.read(plain) for record in folder.read("outcomes") for plain in record["outcomes"]]
    return {outcome.job: outcome for outcome in outcomes}


def minutes_of(folder: RunFolder) -> float:
    """The minutes of all calls together, those before an interruption included."""
    return sum(float(record["training"]) for record in folder.read("minutes"))


def plan_fleets(
    jobs: Sequence[Job], group: Callable[[Job], Hashable], most: int, networks: Callable[[Job], int] = lambda _: 1
) -> list[list[Job]]:
    """Divide jobs among fleets: those of one group together, in the order of the jobs, each once.

    A fleet has at most ``most`` networks, unless a single job has more.
    """
    groups: dict[Hashable, list[list[Job]]] = {}
    room: dict[Hashable, int] = {}
    for job in dict.fromkeys(jobs):
        key, size = group(job), networks(job)
        fleets = groups.setdefault(key, [])
        if not fleets or size > room[key]:
            fleets.append([])
            room[key] = most
        fleets[-1].append(job)
        room[key] -= size
    return [fleet for fleets in groups.values() for fleet in fleets]


def concurrent_groups(
    fleets: Sequence[Sequence[Job]],
    alike: Callable[[Job], Hashable],
    most: int,
    device: str,
    networks: Callable[[Job], int] = lambda _: 1,
) -> list[list[Sequence[Job]]]:
    """Which fleets train at the same time: on a GPU neighbours that are alike, on a CPU one after the other.

    They have at most ``most`` networks together, unless a single fleet has more.
    """
    groups: list[list[Sequence[Job]]] = []
    for fleet in fleets:
        training = [job for other in groups[-1] for job in other] if groups else []
        has_room = bool(groups) and sum(map(networks, [*training, *fleet])) <= most
        if has_room and device.startswith("cuda") and alike(groups[-1][0][0]) == alike(fleet[0]):
            groups[-1].append(fleet)
        else:
            groups.append([fleet])
    return groups


@dataclasses.dataclass
class _Sweep:
    """One call of `run` inside of its folder."""

    recipe: Recipe[Any]
    folder: RunFolder
    rank: Rank
    until: float
    every: float
    should_stop: Callable[[], bool]
    listener: Listener
    failures: list[Failure] = dataclasses.field(default_factory=list)
    noted: float = 0.0
    """Until when the time of this call is in the folder."""
    started: bool = False
    """Whether a fleet was trained; the first one is trained for an epoch even after the time is up."""
    pace: float = 0.0
    """Seconds that the last fleets took, for each network."""

    def __post_init__(self) -> None:
        self.checkpoints = Checkpoints(self.folder.path / "fleets", self.report)

    def report(self, line: str) -> None:
        self.folder.log(line, self.rank.part)
        self.listener.report(line)

    def note_minutes(self) -> None:
        """Record the time since the last record; a kill loses only the time since the last checkpoint."""
        now = time.perf_counter()
        self.folder.append(f"minutes{self.rank.part}", {"training": (now - self.noted) / 60})
        self.noted = now

    def train_all(self) -> bool:
        """Train phase by phase; whether all jobs are done."""
        recipe, begun, settled = self.recipe, False, set[str]()
        while True:
            # Every rank sees the same outcomes here: each has waited for the others.
            outcomes = outcomes_of(self.folder)
            fleets = plan_fleets(recipe.jobs(outcomes), recipe.group, recipe.at_once, recipe.networks)
            by_key = {key_of(fleet): fleet for fleet in fleets}
            left = [key for key, fleet in by_key.items() if any(job not in outcomes for job in fleet)]
            if not begun:
                self._begin(fleets, outcomes)
                begun = True
            if not left:
                return True
            if settled.issuperset(left):
                return False
            taken = self.rank.take(list(by_key), [key for key in left if key not in settled])
            outcomes = outcomes_of(self.folder)  # another worker may have finished a fleet
            rests = [[job for job in by_key[key] if job not in outcomes] for key in taken]
            self._train_phase(list(filter(None, rests)))
            if self.should_stop():
                return False  # the other ranks were told to stop as well
            settled.update(self.rank.settle(left, taken, is_late=self.is_late()))

    def is_late(self) -> bool:
        return self.started and time.perf_counter() > self.until

    def _begin(self, fleets: Sequence[Sequence[Job]], outcomes: Mapping[Job, Outcome]) -> None:
        self.listener.begin(sum(map(self.recipe.networks, outcomes)), self.recipe.total_networks())
        if outcomes:
            self.report(f"{len(outcomes)} of {self.recipe.total()} {self.recipe.unit} are done already")
        if isinstance(self.rank, Worker) or self.rank.number:
            return
        keys = {key_of([job for job in fleet if job not in outcomes]) for fleet in fleets}
        for file in self.checkpoints.others(keys):
            self.report(f"{file.name} belongs to no fleet of this run; was the setting most changed?")

    def _train_phase(self, fleets: Sequence[Sequence[Job]]) -> None:
        recipe = self.recipe
        groups = concurrent_groups(fleets, recipe.concurrent, recipe.at_once, recipe.device, recipe.networks)
        for number, group in enumerate(groups, 1):
            start, networks = time.perf_counter(), sum(recipe.networks(job) for fleet in group for job in fleet)
            needed = self.pace * networks if recipe.ends_fleets else 0.0
            is_late = self.started and start + needed > self.until
            self.until = -math.inf if is_late else self.until  # so that it stays late before the time is up
            if not is_late and not self.should_stop():
                self.started = True
                is_late = not self._train_or_fail(group, number, len(groups))
                self.pace = (time.perf_counter() - start) / networks
            if is_late or self.should_stop():
                left = sum(map(len, groups[number - 1 :]))
                why = "stopped" if self.should_stop() else "time is up"
                self.report(f"{why}: {left} fleet{'s are' if left > 1 else ' is'} left; resume with --resume")
                return

    def _train_or_fail(self, group: Sequence[Sequence[Job]], number: int, count: int) -> bool:
        """Train fleets concurrently; False when time is up before the end. An error is recorded with their jobs."""
        try:
            return self._train(group, number, count)
        except (RunError, OSError):
            raise  # the folder's, and true of every fleet
        except Exception as error:
            jobs = tuple(job for fleet in group for job in fleet)
            message = f"{type(error).__name__}: {error}".splitlines()[0]
            self.failures.append(Failure(jobs, message))
            plain = [dataclasses.asdict(job) for job in jobs]
            self.folder.append(f"failures{self.rank.part}", {"error": message, "jobs": finite(plain)})
            self.report(f"{self.recipe.describe(group)} failed: {message}")
            return True

    def _train(self, group: Sequence[Sequence[Job]], number: int, count: int) -> bool:
        recipe, keys = self.recipe, [key_of(jobs) for jobs in group]
        computed = [recipe.compute(jobs) for jobs in group]
        if all(outcomes is not None for outcomes in computed):
            for key, outcomes in zip(keys, computed, strict=True):
                self._keep(key, outcomes or [])
            for epoch in (0, 1):
                at = Progress(number, count, recipe.describe(group), sum(map(len, group)), epoch, 1)
                self.listener.on_epoch(at)
            return True
        fleets = [recipe.fleet(jobs) for jobs in group]
        name, networks = recipe.describe(group), sum(map(len, fleets))
        shown = f"{number}/{count} {name}, {networks} network{'s' if networks > 1 else ''}"
        at = Progress(number, count, name, networks, 0, max(fleet.epochs for fleet in fleets))
        self.listener.on_epoch(at)
        loaded = [self.checkpoints.load(key, fleet) for key, fleet in zip(keys, fleets, strict=True)]
        spent, losses = [seconds for seconds, _ in loaded], [by_epoch for _, by_epoch in loaded]
        if any(fleet.epoch or fleet.step for fleet in fleets):
            self.report(f"{shown}: resumed after epoch {_slowest(fleets).epoch} of {at.epochs}")
            self._report_epoch(at, fleets, write=False)
        start = saved = time.perf_counter()

        def seconds_of(i: int) -> float:
            return spent[i] + (time.perf_counter() - start) * len(fleets[i]) / networks

        def save() -> None:
            for i, key in enumerate(keys):
                self.checkpoints.save(key, fleets[i], seconds_of(i), losses[i])
            self.note_minutes()

        while any(fleet.epoch < fleet.epochs for fleet in fleets):
            train_concurrently(fleets, self.should_stop)
            for jobs, fleet, by_epoch in zip(group, fleets, losses, strict=True):
                if recipe.judges_epochs(jobs) and len(by_epoch) < fleet.epoch:
                    by_epoch.append(fleet.evaluate(recipe.judge(jobs)).losses.tolist())
            if self.should_stop():
                save()
                return False
            self._report_epoch(dataclasses.replace(at, judged=_judged(group, fleets)), fleets)
            now, is_done = time.perf_counter(), all(fleet.epoch == fleet.epochs for fleet in fleets)
            if not is_done and (now > self.until or now - saved > self.every):
                save()
                saved = now
            if not is_done and now > self.until:
                self.report(
                    f"{shown}: epoch {_slowest(fleets).epoch} of {at.epochs}, {say_minutes(now - start)} in this call"
                )
                return False
        for i, (key, jobs, fleet) in enumerate(zip(keys, group, fleets, strict=True)):
            trained = Trained(fleet, fleet.evaluate(recipe.judge(jobs)), losses[i], seconds_of(i))
            self._keep(key, recipe.outcomes(jobs, trained))
        self.report(
            f"{shown}: {at.epochs} epoch{'s' if at.epochs > 1 else ''}, {sum(map(seconds_of, range(len(group)))):.1f} s"
        )
        return True

    def _keep(self, key: str, outcomes: Sequence[Outcome]) -> None:
        """Write the outcomes of a fleet as one line, and remove its checkpoints."""
        plain = [finite(dataclasses.asdict(outcome)) for outcome in outcomes]
        self.folder.append(f"outcomes{self.rank.part}", {"fleet": key, "outcomes": plain})
        self.checkpoints.forget(key)

    def _report_epoch(self, at: Progress, fleets: Sequence[Fleet], *, write: bool = True) -> None:
        slowest = _slowest(fleets)
        last = [(fleet.history.train_loss or [[]])[-1] for fleet in fleets]
        losses = [loss for of_fleet in last for loss in of_fleet if math.isfinite(loss)]
        mean, part = sum(losses) / len(losses) if losses else None, slowest.step / slowest.steps_per_epoch
        now = dataclasses.replace(at, epoch=slowest.epoch, epochs=slowest.epochs, loss=mean, part=part)
        if write:
            self.folder.append(f"metrics{self.rank.part}", {"time": utc_now(), **dataclasses.asdict(now)})
        self.listener.on_epoch(now)
        if now.judged is not None:
            errors = f"top-1 error {now.judged['top1']:.2f} %, top-5 error {now.judged['top5']:.2f} %"
            self.report(f"{now.name}: epoch {now.epoch} of {now.epochs}, {errors}")


def _judged(group: Sequence[Sequence[Job]], fleets: Sequence[Fleet]) -> dict[str, Any] | None:
    """The evaluation of a fleet that has just evaluated inside of its training."""
    fleet, job = fleets[0], group[0][0]
    curve = getattr(fleet, "curve", ())
    if not curve or fleet.step or curve[-1]["epoch"] != fleet.epoch:
        return None
    return dict(finite({"of": f"{job.network} on {job.data}, seed {job.seed}", **curve[-1]}))


def _slowest(fleets: Sequence[Fleet]) -> Fleet:
    return min(fleets, key=lambda fleet: fleet.epoch / fleet.epochs)


def key_of(jobs: Sequence[Job]) -> str:
    """The name of a fleet's checkpoints: the hash of its jobs."""
    plain = json.dumps([dataclasses.asdict(job) for job in jobs], sort_keys=True)
    return hashlib.sha256(plain.encode()).hexdigest()[:12]
