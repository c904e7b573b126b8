"""The search for learning rates as a run that can be gone on with: fleet by fleet, each kept when it is done."""

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_dcl.experiments.checkpoints import Checkpoints
from torch_dcl.experiments.digitsets import Digits, make_sets
from torch_dcl.experiments.engine import Job, Outcome, Report, Settings, TimeUpError, plan_fleets, run_fleets
from torch_dcl.experiments.search import Choice, Trial, as_json, choose
from torch_dcl.experiments.telling import clocked, minutes_of, telling
from torch_dcl.files import write_text
from torch_dcl.fleet.run_folder import RunFolder, environment

__all__ = ["jobs_of_search", "run_search"]


def jobs_of_search(
    columns: Sequence[str], sets: Sequence[str], trials: Sequence[tuple[float, float]], seed: int
) -> list[Job]:
    """Every trial as a job."""
    return [Job(column, name, seed, *trial) for column in columns for name in sets for trial in trials]


def run_search(
    path: str | os.PathLike[str],
    recipe: Mapping[str, Any],
    digits: Digits,
    settings: Settings,
    jobs: Sequence[Job],
    *,
    images: tuple[int, int] | None = None,
    resume: bool = False,
    seconds: float = math.inf,
    report: Report = print,
    begin: Callable[[int, int], None] | None = None,
) -> Choice | None:
    """Train what is not yet there, choose, and write ``search.json``.

    Args:
        path: The run folder.
        recipe: What was asked for, as the folder keeps it.
        digits: MNIST; its test part is not looked at.
        settings: How networks are trained.
        jobs: From `jobs_of_search`.
        images: How many images of a set to train on and to judge with; None for all.
        resume: Whether to go on with what the folder holds.
        seconds: Stop at the next end of an epoch when so much time has gone.
        report: Called with lines of progress.
        begin: Called once, with the networks that were done before and those that there are in all.

    Returns:
        The choice, or None where time was up before.

    Raises:
        RunError: The folder is in use, or belongs to another recipe.
    """
    start = time.perf_counter()
    with RunFolder.open(path, recipe, resume=resume) as folder:
        settings, report = telling(folder, settings, report)

        def keep(found: list[Outcome]) -> None:
            folder.append("trials", *as_json(found))

        known = {_outcome(row).job for row in folder.read("trials")}
        fleets = plan_fleets([job for job in jobs if job not in known], settings.most)
        if begin is not None:
            begin(sum(job.networks for job in jobs if job in known), sum(job.networks for job in jobs))
        kept = Checkpoints(folder, report=report)
        settings = dataclasses.replace(settings, checkpoints=kept, until=start + seconds)
        if fleets:
            names = list(dict.fromkeys(job.data for job in jobs))
            written = make_sets(digits, names, "choose", device=settings.device, images=images)
            try:
                with clocked(folder):
                    run_fleets(fleets, written, settings, report, keep)
            except TimeUpError as error:
                report(str(error))
                return None
        kept.forget()
        rows = folder.read("trials")
        choice = choose([_outcome(row) for row in rows])
        content = {"title": "The search for learning rates behind Table 1", "recipe": folder.recipe,
                   "environment": environment(), "minutes": minutes_of(folder), "choice": _plain(choice),
                   "trials": rows}  # fmt: skip
        write_text(Path(path) / "search.json", json.dumps(content, indent=1) + "\n")
    return choice


def _plain(choice: Choice) -> dict[str, dict[str, dict[str, float | None]]]:
    def entry(trial: Trial) -> dict[str, float | None]:
        return {"lr": trial.lr, "clip": None if math.isinf(trial.clip) else trial.clip}

    return {column: {str(count): entry(trial) for count, trial in by.items()} for column, by in choice.items()}


def _outcome(row: Mapping[str, Any]) -> Outcome:
    names = {field.name for field in dataclasses.fields(Job)}
    job = {key: value for key, value in row.items() if key in names}
    job["clip"] = math.inf if job.get("clip") is None else job["clip"]
    return Outcome(Job(**job), row["error"], row["test_loss"], math.nan, row["stopped"])
