"""Table 1, run: every column on every set with every seed, in slices that can be gone on with.

The order of things is the protocol: the sets are frozen (`torch_dcl.data.layouts`), the learning rates were chosen on
digits that are not the test set's (`torch_dcl.experiments.search`), and the test set is looked at once, at the end of
each training.
"""

import dataclasses
import itertools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch_dcl.data.layouts import LAYOUTS
from torch_dcl.experiments.checkpoints import Checkpoints
from torch_dcl.experiments.columns import CONTROLS, MODELS, weights
from torch_dcl.experiments.digitsets import Digits, make_sets
from torch_dcl.experiments.engine import Job, Outcome, Report, Settings, TimeUpError, plan_fleets, run_fleets
from torch_dcl.experiments.protocol import finite
from torch_dcl.experiments.ranks import Rank
from torch_dcl.experiments.reported import TABLE1
from torch_dcl.experiments.search import Choice, stored_choice, stored_minutes
from torch_dcl.experiments.table import Cell, Table
from torch_dcl.experiments.telling import clocked, minutes_of, telling
from torch_dcl.fleet.run_folder import RunFolder, environment

__all__ = ["Estimate", "estimate", "jobs_of", "outcome_of", "run_table1", "table_of"]

DEVIATIONS = (
    "The paper gives no schedule for LeNet; ours is under protocol, with SGD, momentum 0.9 and weight decay 5e-4.",
    "The paper shows its layouts in a figure only. Ours follow its description, and how hard each set is was fitted so "
    "that the baseline errs as often as the paper's, on digits of MNIST's training set. So the baseline column is "
    "fitted and proves nothing; the other columns are compared with it.",
    "The ReLU behind each pooling, and the start of the DCL layers, are inferred; the paper does not say.",
)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a run will take."""

    networks: int
    images: int
    fleets: int

    def minutes(self, images_per_second: float) -> float:
        """At a speed that was measured or assumed."""
        return self.images / images_per_second / 60


def jobs_of(columns: Sequence[str], sets: Sequence[str], seeds: int, choice: Choice) -> list[Job]:
    """Every entry of the table as a job; a seed is the same in every column."""
    jobs = []
    for column in columns:
        for name in sets:
            trial = choice[column][len(LAYOUTS[name].digits)]
            jobs += [Job(column, name, seed, trial.lr, trial.clip) for seed in range(seeds)]
    return jobs


def estimate(jobs: Sequence[Job], settings: Settings, images: int = 60_000) -> Estimate:
    """How many networks and images a run has."""
    networks = sum(job.networks for job in jobs)
    return Estimate(networks, networks * images * settings.schedule.epochs, len(plan_fleets(jobs, settings.most)))


def run_table1(
    path: str | os.PathLike[str],
    digits: Digits,
    settings: Settings,
    *,
    columns: Sequence[str] = MODELS,
    sets: Sequence[str] = tuple(LAYOUTS),
    seeds: int = 5,
    choice: Choice | None = None,
    images: tuple[int, int] | None = None,
    resume: bool = False,
    seconds: float = math.inf,
    report: Report = print,
    begin: Callable[[int, int], None] | None = None,
) -> Table | None:
    """Run the table, or go on with it.

    Started by ``torchrun``, every rank takes a share of the fleets, and the first one puts the table together.

    Args:
        path: The run folder.
        digits: MNIST.
        settings: How networks are trained; the rank's own GPU takes the place of ``cuda``.
        columns: Which.
        sets: Which.
        seeds: How many, from 0.
        choice: Learning rates by column; None for those that are stored.
        images: How many images of a set to train on and to test with; None for all. For trying things out.
        resume: Whether to go on with what the folder holds.
        seconds: Stop at the next end of an epoch when so much time has gone, and leave the rest to a later call.
        report: Called with lines of progress.
        begin: Called once, with the networks that were done before and those that this process has in all.

    Returns:
        The table, or None where networks are missing: time was up, or this is not the first rank.

    Raises:
        RunError: The folder is in use, or belongs to another recipe.
    """
    choice = stored_choice() if choice is None else choice
    jobs = jobs_of(columns, sets, seeds, choice)
    rank = Rank.here()
    settings = dataclasses.replace(settings, device=rank.device(settings.device))
    recipe = {
        "table": 1, "digits": digits.source, "sha256": digits.sha256, "columns": list(columns), "sets": list(sets),
        "seeds": seeds, "images": images, "schedule": dataclasses.asdict(settings.schedule), "batch": settings.batch,
        "precision": settings.precision, "strengths": {name: LAYOUTS[name].strength for name in sets},
        "choice": _kept_choice(choice, columns),
    }  # fmt: skip
    start = time.perf_counter()
    with rank.open(path, recipe, resume=resume) as folder:
        settings, report = telling(folder, settings, report, rank.part)
        known = {_job(record["job"]): outcome_of(record) for record in folder.read("outcomes")}
        # Shared out before what is known is taken away, so that every rank sees the same shares whenever it looks.
        mine = rank.share(plan_fleets(jobs, settings.most))
        fleets = [left for fleet in mine if (left := [job for job in fleet if job not in known])]
        if begin is not None:
            before, here = (sum(job.networks for job in some) for some in (known, itertools.chain(*fleets)))
            begin(before, before + here)
        if known:
            report(f"{len(known)} of {len(jobs)} entries are done already")
        kept = Checkpoints(folder, rank.part, report=report)
        settings = dataclasses.replace(settings, checkpoints=kept, until=start + seconds)

        def keep(outcomes: list[Outcome]) -> None:
            folder.append(f"outcomes{rank.part}", *map(_record, outcomes))

        if fleets:
            with clocked(folder, rank.part):
                written = make_sets(digits, sets, "report", device=settings.device, images=images)
                try:
                    run_fleets(fleets, written, settings, report, keep)
                except TimeUpError as error:
                    report(str(error))
        rank.wait()
        if rank.number:
            return None
        found = {_job(record["job"]): outcome_of(record) for record in folder.read("outcomes")}
        if any(job not in found for job in jobs):
            return None
        kept.forget()
        return table_of([found[job] for job in jobs], digits.source, settings, folder)


def table_of(outcomes: Sequence[Outcome], source: str, settings: Settings, folder: RunFolder) -> Table:
    """The table of what a run folder holds.

    Args:
        outcomes: The entries that are there, in any order.
        source: What the sets were written with.
        settings: How the networks were trained.
        folder: Where: its minutes, and the machines that it was started on.
    """
    by_cell: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        by_cell.setdefault((outcome.job.data, outcome.job.column), []).append(outcome)
    cells = []
    for (name, column), group in by_cell.items():
        classes = 10 ** len(LAYOUTS[name].digits)
        paper = TABLE1[name].get(column)
        networks = len(LAYOUTS[name].digits) if column == "oracle" else 1
        losses = [tuple(getattr(o, name) for o in group) for name in ("train_loss", "test_loss")]
        # Of a network that diverged there is no loss to average.
        train, test = (values if all(map(math.isfinite, values)) else None for values in losses)
        cell = Cell(
            name, column, tuple(o.error for o in group), tuple(o.job.seed for o in group),
            weights(column, classes) * networks,
            None if paper is None else paper.mean, None if paper is None else paper.std,
            train, test, tuple(o.job.seed for o in group if o.stopped is not None), column == "baseline",
            _minutes(group),
        )  # fmt: skip
        cells.append(cell)
    here = folder.read("environment") or [environment()]
    schedule = settings.schedule
    protocol = {
        "digits": source,
        "schedule": f"{schedule.epochs} epoch{'s' if schedule.epochs > 1 else ''}, batch {settings.batch}, "
        f"warm-up over {schedule.warmup} step{'' if schedule.warmup == 1 else 's'}, rate "
        f"times {schedule.factor:g} after {' and '.join(f'{100 * drop:.0f} %' for drop in schedule.drops) or 'none'}",
        "precision": settings.precision or "bfloat16 on a GPU, float32 on a CPU",
        "learning rates": "chosen on digits of the training set by the same trials for every column",
        "controls": f"{', '.join(CONTROLS)}: networks with DCL-A2's weights, not in the paper",
    }
    machines = dict.fromkeys(start["gpu"] or f"CPU, {start['cpus']} cores" for start in here)
    return Table(
        "Table 1: multi-digit numbers", tuple(cells), protocol, "; ".join(machines), here[-1]["versions"],
        _phases(outcomes, folder), here[0]["command"], DEVIATIONS,
    )  # fmt: skip


def _phases(outcomes: Sequence[Outcome], folder: RunFolder) -> dict[str, float]:
    """Minutes of the run, compiling apart from the rest; and of what was done once before it."""
    spent, compiling = minutes_of(folder), sum(outcome.compiling for outcome in outcomes) / 60
    earlier = stored_minutes()
    phases = {"training and evaluation": max(0.0, spent - compiling), "compiling": compiling}
    if folder.recipe.get("choice") == _stored(folder.recipe["columns"]):
        phases["search of learning rates, earlier on an H200"] = earlier["search"]
    phases["calibration of the sets, earlier on an H200"] = earlier["calibration"]
    return {phase: minutes for phase, minutes in phases.items() if minutes}


def _stored(columns: Sequence[str]) -> Any:
    """The stored choice, as a recipe keeps it."""
    return _kept_choice(stored_choice(), columns)


def _kept_choice(choice: Choice, columns: Sequence[str]) -> Any:
    return finite({column: {str(d): t._asdict() for d, t in choice[column].items()} for column in columns})


def _minutes(outcomes: Sequence[Outcome]) -> float | None:
    seconds = [outcome.seconds for outcome in outcomes]
    return sum(s for s in seconds if s is not None) / 60 if None not in seconds else None


def _record(outcome: Outcome) -> dict[str, Any]:
    record = dataclasses.asdict(dataclasses.replace(outcome, network=None))
    del record["network"]
    record["curves"] = [list(curve) for curve in outcome.curves]
    return dict(finite(record))


def _job(record: Mapping[str, Any]) -> Job:
    return Job(**{**record, "clip": math.inf if record["clip"] is None else record["clip"]})


def outcome_of(record: Mapping[str, Any]) -> Outcome:
    """What a line of ``outcomes.jsonl`` says."""
    train, test = (_number(record[name]) for name in ("train_loss", "test_loss"))
    curves = ([_number(x) for x in record["curves"][0]], [_number(x) for x in record["curves"][1]])
    return Outcome(
        _job(record["job"]), record["error"], test, train, record["stopped"], curves, seconds=record.get("seconds"),
        compiling=record.get("compiling", 0.0),
    )  # fmt: skip


def _number(value: float | None) -> float:
    return math.nan if value is None else value
