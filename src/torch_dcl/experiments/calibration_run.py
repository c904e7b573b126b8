"""The fit of how hard the sets are, as a run that can be gone on with: round by round, and inside of a round."""

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_dcl.experiments import calibrate
from torch_dcl.experiments.calibrate import Fitted
from torch_dcl.experiments.checkpoints import Checkpoints
from torch_dcl.experiments.digitsets import Digits
from torch_dcl.experiments.engine import Job, Report, Settings, TimeUpError
from torch_dcl.experiments.reported import TABLE1
from torch_dcl.experiments.telling import clocked, minutes_of, telling
from torch_dcl.files import write_text
from torch_dcl.fleet.run_folder import RunFolder, environment

__all__ = ["jobs_of_calibration", "run_calibration"]

Tried = dict[str, dict[float, list[float]]]


def jobs_of_calibration(sets: Sequence[str], start: Sequence[float], rounds: int, seeds: int, lr: float) -> list[Job]:
    """About what is trained, for an estimate: the strengths of further rounds are not known before."""
    first = [Job("baseline", f"{name}@{strength}", 0, lr) for name in sets for strength in start]
    return first + [
        Job("baseline", f"{name}@round {number}", seed, lr)
        for number in range(rounds) for name in sets for seed in range(seeds)
    ]  # fmt: skip


def run_calibration(
    path: str | os.PathLike[str],
    recipe: Mapping[str, Any],
    digits: Digits,
    settings: Settings,
    *,
    images: tuple[int, int] | None = None,
    resume: bool = False,
    seconds: float = math.inf,
    report: Report = print,
    begin: Callable[[int, int], None] | None = None,
) -> list[Fitted] | None:
    """Run the rounds that are not yet there, and write ``calibration.json``.

    Args:
        path: The run folder.
        recipe: What was asked for, as the folder keeps it: ``sets``, ``start``, ``rounds``, ``seeds``, ``lr``.
        digits: MNIST; its test part is not looked at.
        settings: How the baseline is trained.
        images: How many images of a set to train on and to judge with; None for all.
        resume: Whether to go on with what the folder holds.
        seconds: Stop at the next end of an epoch when so much time has gone.
        report: Called with lines of progress.
        begin: Called once, with the networks that were done before and those that there are in all.

    Returns:
        What was fitted, set by set, or None where time was up before.

    Raises:
        RunError: The folder is in use, or belongs to another recipe.
    """
    began = time.perf_counter()
    sets, start = recipe["sets"], recipe["start"]
    with RunFolder.open(path, recipe, resume=resume) as folder:
        settings, report = telling(folder, settings, report)
        rounds = folder.read("rounds")
        tried: Tried | None = _tried(rounds[-1]["tried"]) if rounds else None
        each, first = len(sets) * recipe["seeds"], len(sets) * len(start)
        if begin is not None:
            begin(first + (len(rounds) - 1) * each if rounds else 0, first + recipe["rounds"] * each)
        for number in range(len(rounds)):
            _kept(folder, number).forget()  # a kill may have come in between
        for number in range(len(rounds), 1 + recipe["rounds"]):
            if time.perf_counter() - began > seconds:
                return None
            kept = _kept(folder, number, report)
            going = dataclasses.replace(settings, checkpoints=kept, until=began + seconds)
            try:
                with clocked(folder):
                    found = calibrate.calibrate(
                        digits, going, lr=lambda _name: float(recipe["lr"]), sets=sets, start=start,
                        rounds=min(number, 1), seeds=recipe["seeds"], tried=tried, report=report, images=images,
                    )  # fmt: skip
            except TimeUpError as error:
                report(f"round {number}: {error}")
                return None
            tried = {name: fitted.tried for name, fitted in found.items()}
            folder.append("rounds", {"round": number, "tried": tried})
            kept.forget()
        made = [Fitted(name, TABLE1[name]["baseline"].mean, by_strength) for name, by_strength in (tried or {}).items()]
        rows = [
            {"set": fitted.name, "paper": fitted.target, "strength": fitted.best, "errors": fitted.tried[fitted.best],
             "tried": {f"{strength:g}": errors for strength, errors in fitted.tried.items()}}
            for fitted in made
        ]  # fmt: skip
        content = {"title": "How hard the multi-digit sets are, fitted to the paper's baseline column",
                   "recipe": folder.recipe, "environment": environment(), "minutes": minutes_of(folder),
                   "sets": rows}  # fmt: skip
        write_text(Path(path) / "calibration.json", json.dumps(content, indent=1) + "\n")
    return made


def _kept(folder: RunFolder, number: int, report: Report | None = None) -> Checkpoints:
    """Where the fleets of a round are kept."""
    return Checkpoints(folder, of=f"round-{number}", report=report)


def _tried(stored: Mapping[str, Mapping[str, list[float]]]) -> Tried:
    return {name: {float(strength): errors for strength, errors in by.items()} for name, by in stored.items()}
