"""Train many LeNets for a table: jobs in, errors out. Jobs of one architecture become fleets."""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean

import torch
from torch import nn

from torch_dcl.data.layouts import LAYOUTS
from torch_dcl.experiments.checkpoints import Checkpoints
from torch_dcl.experiments.columns import build
from torch_dcl.experiments.digitsets import Labelled, Sets
from torch_dcl.experiments.protocol import Progress
from torch_dcl.fleet import Fleet, Member, Schedule
from torch_dcl.fleet.fleet import Precision

__all__ = [
    "BATCH",
    "SCHEDULE",
    "Job",
    "Outcome",
    "Settings",
    "TimeUpError",
    "plan_fleets",
    "run_fleets",
    "run_jobs",
]

BATCH = 100
SCHEDULE = Schedule(epochs=24, warmup=300, drops=(0.6, 0.9), factor=0.1)


@dataclass(frozen=True)
class Job:
    """One entry of a table, for one seed: a network, or for the oracle one for each digit."""

    column: str
    data: str
    """The set's name, before an ``@`` if anything follows."""
    seed: int
    lr: float
    clip: float = float("inf")
    weight_decay: float = 5e-4
    filters: int | None = None

    @property
    def digits(self) -> int:
        """How many digits the numbers of its set have."""
        return len(LAYOUTS[self.data.split("@")[0]].digits)

    @property
    def networks(self) -> int:
        """How many networks it takes."""
        return self.digits if self.column == "oracle" else 1

    @property
    def classes(self) -> int:
        """How many classes its networks tell apart."""
        return 10 if self.column == "oracle" else 10**self.digits


@dataclass(frozen=True)
class Outcome:
    """What came of a job."""

    job: Job
    error: float
    """Per cent of the images to judge with."""
    test_loss: float
    train_loss: float
    """Of the last epoch, dropout included. Of an oracle both losses are sums over its networks."""
    stopped: int | None
    """The epoch in which training diverged."""
    curves: tuple[list[float], list[float]] = field(default=([], []), repr=False)
    """Training and test loss by epoch, where they were asked for."""
    network: nn.Module | None = field(default=None, repr=False, compare=False)
    """The trained network, where it was asked for; never of an oracle."""
    seconds: float | None = field(default=None, repr=False, compare=False)
    """Its share of the time that its fleet took, by networks; None where that was not noted."""
    compiling: float = field(default=0.0, repr=False, compare=False)
    """Its share of the seconds of these that went into compiling and capturing kernels, on a GPU."""


@dataclass(frozen=True)
class Settings:
    """How jobs are trained."""

    schedule: Schedule = SCHEDULE
    batch: int = BATCH
    device: str = "cpu"
    precision: Precision | None = None
    most: int = 160
    """Networks of a fleet."""
    curves: bool = False
    """Whether to judge after every epoch."""
    networks: bool = False
    """Whether to give the trained networks."""
    on_epoch: Callable[[Progress], None] | None = field(default=None, repr=False, compare=False)
    """Called before a fleet begins and after each of its epochs, to show how far it is; it changes no result."""
    should_stop: Callable[[], bool] | None = field(default=None, repr=False, compare=False)
    """Asked before every step. Where it says so the fleet is saved, if there are checkpoints, and training ends."""
    checkpoints: Checkpoints | None = field(default=None, repr=False, compare=False)
    """Where a fleet is kept while it is trained, to go on in the middle of it; None for nowhere."""
    until: float = field(default=math.inf, repr=False, compare=False)
    """When to stop, by `time.perf_counter`: no further fleet is begun then, and where there are checkpoints the fleet
    that is being trained is kept at the end of its epoch."""


class TimeUpError(Exception):
    """Time is up, or it was asked to stop, and some fleets are not trained yet.

    Args:
        left: How many.
        why: In words.
    """

    def __init__(self, left: int, why: str = "time is up") -> None:
        super().__init__(f"{why}: {left} fleet{'s are' if left > 1 else ' is'} left; resume with --resume")


Report = Callable[[str], None]


def plan_fleets(jobs: Iterable[Job], most: int) -> list[list[Job]]:
    """Share jobs out among fleets of one architecture and at most so many networks, each job once."""

    def kind(job: Job) -> tuple[str, int, int]:
        return job.column, job.classes, job.filters or 0

    fleets: list[list[Job]] = []
    for _, group in itertools.groupby(sorted(dict.fromkeys(jobs), key=kind), key=kind):
        size = most + 1
        for job in group:
            if size + job.networks > most:
                fleets.append([])
                size = 0
            fleets[-1].append(job)
            size += job.networks
    return fleets


def run_jobs(
    jobs: Iterable[Job],
    sets: Sets,
    settings: Settings,
    report: Report | None = None,
    keep: Callable[[list[Outcome]], None] | None = None,
) -> list[Outcome]:
    """Train and judge. The outcomes come in the order of the jobs.

    Args:
        jobs: Any mixture.
        sets: The data, by the names that the jobs use.
        settings: How.
        report: Called with a line after every fleet.
        keep: Called with the outcomes of every fleet, so that they can be written down.

    Raises:
        TimeUpError: As `run_fleets`.
    """
    jobs = list(jobs)
    outcomes = run_fleets(plan_fleets(jobs, settings.most), sets, settings, report, keep)
    found = {outcome.job: outcome for outcome in outcomes}
    return [found[job] for job in jobs]


def run_fleets(
    fleets: Sequence[Sequence[Job]],
    sets: Sets,
    settings: Settings,
    report: Report | None = None,
    keep: Callable[[list[Outcome]], None] | None = None,
) -> list[Outcome]:
    """Train and judge fleets, one after another. A fleet that its checkpoint has trained already is only judged.

    Args:
        fleets: From `plan_fleets`.
        sets: As in `run_jobs`.
        settings: As in `run_jobs`.
        report: As in `run_jobs`.
        keep: As in `run_jobs`.

    Raises:
        TimeUpError: Time was up before the end of the last one.
    """
    found: list[Outcome] = []
    kept = settings.checkpoints
    if kept is not None:
        kept.expect(fleets)
    for count, fleet in enumerate(fleets, 1):
        if time.perf_counter() >= settings.until or _is_stopped(settings):
            raise _ended(settings, len(fleets) - count + 1)
        start, size = time.perf_counter(), sum(job.networks for job in fleet)
        wide = f", {fleet[0].filters} filters" if fleet[0].filters else ""
        name = f"{fleet[0].column}, {fleet[0].classes} classes{wide}"
        at = Progress(count, len(fleets), name, size, 0, settings.schedule.epochs)
        outcomes = _one_fleet(fleet, sets, settings, at)
        seconds = time.perf_counter() - start if kept is None else kept.seconds
        outcomes = [replace(o, seconds=seconds * o.job.networks / size) for o in outcomes]
        found += outcomes
        if keep is not None:
            keep(outcomes)
            if kept is not None:
                kept.end()
        if report is not None:
            report(f"fleet {count} of {len(fleets)}, {name}: {size} networks in {seconds:.1f} s")
    return found


def _one_fleet(jobs: Sequence[Job], sets: Sets, settings: Settings, at: Progress) -> list[Outcome]:
    if settings.on_epoch is not None:
        settings.on_epoch(at)
    train: dict[str, Labelled] = {}
    judge: dict[str, Labelled] = {}
    members, networks, owner = [], [], []
    for job in jobs:
        oracle = job.column == "oracle"
        for digit in range(job.networks):
            name = f"{job.data}#{digit}" if oracle else job.data
            for into, given in ((train, sets.train), (judge, sets.judge)):
                images, labels = given[job.data]
                into[name] = (images, labels // 10 ** (job.digits - 1 - digit) % 10) if oracle else (images, labels)
            # A digit's network has its own start, order and dropout.
            seed = job.seed + 1000 * digit
            members.append(
                Member(f"{job.column} {name}", name, seed, job.lr, settings.schedule, job.weight_decay, job.clip)
            )
            networks.append(build(job.column, job.classes, seed, filters=job.filters))
            owner.append(job)
    fleet = Fleet(networks, members, train, batch=settings.batch, precision=settings.precision, device=settings.device)
    kept = settings.checkpoints
    judged = kept.begin(fleet, jobs) if kept is not None else []

    if settings.curves and len(judged) < fleet.epoch:
        judged.append(fleet.evaluate(judge).losses.tolist())

    late = False

    def after_epoch(trained: Fleet) -> None:
        nonlocal late
        if settings.curves:
            judged.append(trained.evaluate(judge).losses.tolist())
        if kept is not None:
            kept.after_epoch(trained, judged)
        if settings.on_epoch is not None:
            losses = [loss for loss in trained.history.train_loss[-1] if math.isfinite(loss)]
            settings.on_epoch(replace(at, epoch=trained.epoch, loss=mean(losses) if losses else None))
        late = kept is not None and time.perf_counter() >= settings.until

    fleet.train(on_epoch=after_epoch, should_stop=lambda: late or _is_stopped(settings))
    if fleet.epoch < fleet.epochs:
        if kept is not None:
            kept.save(fleet, judged)
        raise _ended(settings, at.fleets - at.fleet + 1)
    rows_of = {job: [row for row, whose in enumerate(owner) if whose is job] for job in jobs}
    return _outcomes(fleet, rows_of, sets, judge, judged, settings)


def _is_stopped(settings: Settings) -> bool:
    return settings.should_stop is not None and settings.should_stop()


def _ended(settings: Settings, left: int) -> TimeUpError:
    return TimeUpError(left, "stopped" if _is_stopped(settings) else "time is up")


def _outcomes(
    fleet: Fleet,
    rows_of: Mapping[Job, Sequence[int]],
    sets: Sets,
    judge: Mapping[str, Labelled],
    judged: Sequence[Sequence[float]],
    settings: Settings,
) -> list[Outcome]:
    """What came of every job of a trained fleet; ``rows_of`` says which of its networks are a job's."""
    seen = fleet.evaluate(judge)
    last = fleet.history.train_loss[-1]
    losses = seen.losses.tolist()
    outcomes = []
    for job, rows in rows_of.items():
        labels = sets.judge[job.data][1].to(seen.predictions.device)
        number = torch.zeros_like(labels)
        for row in rows:
            number = number * 10 + seen.predictions[row] if job.column == "oracle" else seen.predictions[row]
        stopped = [fleet.history.stopped[row] for row in rows if row in fleet.history.stopped]
        outcome = Outcome(
            job,
            100 * float((number != labels).double().mean()),
            sum(losses[row] for row in rows),
            sum(last[row] for row in rows),
            min(stopped, default=None),
            compiling=fleet.setup_seconds * len(rows) / len(fleet),
        )
        if settings.curves:
            curves = (_summed(fleet.history.train_loss, rows), _summed(judged, rows))
            outcome = replace(outcome, curves=curves)
        if settings.networks and job.column != "oracle":
            outcome = replace(outcome, network=fleet.network(rows[0]))
        outcomes.append(outcome)
    return outcomes


def _summed(by_epoch: Sequence[Sequence[float]], rows: Sequence[int]) -> list[float]:
    """A value an epoch: of an oracle the sum over its networks."""
    return [sum(epoch[row] for row in rows) for epoch in by_epoch]
