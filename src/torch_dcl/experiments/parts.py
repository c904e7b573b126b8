"""What section 4.1 shows beside its table, as a run that can be gone on with: part by part.

::

    runs/figures/
      filters.json    accuracy against filters     curves.json   losses by epoch
      knowledge.json  what filters answer to       tried.json    more branches, both layers
      *.svg           the figures                  parts.jsonl   which parts are done, and their minutes

The fleets of a part are kept until it is done, see `torch_dcl.experiments.checkpoints`.
"""

import dataclasses
import inspect
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch_dcl.experiments import experiments, figures
from torch_dcl.experiments.checkpoints import Checkpoints
from torch_dcl.experiments.digitsets import Digits
from torch_dcl.experiments.drawings import drawings, knowledge_of
from torch_dcl.experiments.engine import Job, Report, Settings, TimeUpError
from torch_dcl.experiments.protocol import finite
from torch_dcl.experiments.search import Choice, stored_choice
from torch_dcl.experiments.telling import telling
from torch_dcl.files import write_text
from torch_dcl.fleet.run_folder import RunError, RunFolder

__all__ = ["jobs_of_parts", "keep_part", "run_parts"]


def jobs_of_parts(recipe: Mapping[str, Any]) -> dict[str, list[Job]]:
    """About what every part trains, for an estimate: the networks are the same, their learning rates are not looked up.

    Args:
        recipe: ``parts``, ``set``, ``knowledge_set``, ``filters``, ``seeds``.
    """
    name, seeds = recipe["set"], range(recipe["seeds"])
    found = {}
    for part in recipe["parts"]:
        if part == "filters":
            jobs = [Job("baseline", name, seed, 0.01) for seed in seeds]
            jobs += [Job("A2", name, seed, 0.01, filters=n) for n in recipe["filters"] for seed in seeds]
        elif part == "knowledge":
            jobs = [Job(column, recipe["knowledge_set"], 0, 0.01) for column in ("A2", "B2")]
        else:
            function = experiments.curves_data if part == "curves" else experiments.tried_data
            columns = inspect.signature(function).parameters["columns"].default
            jobs = [Job(column, name, seed, 0.01) for column in columns for seed in seeds]
        found[part] = jobs
    return found


def run_parts(
    path: str | os.PathLike[str],
    recipe: Mapping[str, Any],
    digits: Digits,
    settings: Settings,
    *,
    choice: Choice | None = None,
    images: tuple[int, int] | None = None,
    resume: bool = False,
    seconds: float = math.inf,
    report: Report = print,
    begin: Callable[[int, int], None] | None = None,
) -> list[str] | None:
    """Run the parts that are not yet there; write their data and their figures.

    Args:
        path: The run folder.
        recipe: What was asked for, as the folder keeps it: ``parts``, ``set``, ``knowledge_set``, ``filters``,
            ``seeds``.
        digits: MNIST.
        settings: How networks are trained.
        choice: Learning rates by column; None for those that are stored.
        images: How many images of a set to train on and to test with; None for all.
        resume: Whether to go on with what the folder holds.
        seconds: Stop at the next end of an epoch when so much time has gone.
        report: Called with lines of progress.
        begin: Called once, with the networks that were done before and those that there are in all.

    Returns:
        The names of the figures that were written, or None where time was up before.

    Raises:
        RunError: The folder is in use, belongs to another recipe, or lacks the file of a part that was done.
    """
    start = time.perf_counter()
    choice = stored_choice() if choice is None else choice
    with RunFolder.open(path, recipe, resume=resume) as folder:
        settings, report = telling(folder, settings, report)
        done = {record["part"] for record in folder.read("parts")}
        for part in sorted(done):
            if not (folder.path / f"{part}.json").is_file():
                raise RunError(
                    f"{folder.path} has done the part {part}, but {part}.json is missing; put it back, or take the "
                    "part's line out of parts.jsonl to run it again"
                )
            Checkpoints(folder, of=part).forget()  # a kill may have come in between
        if begin is not None:
            sizes = {part: len(jobs) for part, jobs in jobs_of_parts(recipe).items()}
            begin(sum(size for part, size in sizes.items() if part in done), sum(sizes.values()))
        written = []
        for part in recipe["parts"]:
            if part in done:
                continue
            if time.perf_counter() - start > seconds:
                return None
            kept = Checkpoints(folder, of=part, report=report)
            began = time.perf_counter() - kept.spent
            going = dataclasses.replace(settings, checkpoints=kept, until=start + seconds)
            try:
                data = _run(part, recipe, digits, going, choice, images, report)
            except TimeUpError as error:
                report(f"{part}: {error}")
                return None
            written += keep_part(folder, part, data, (time.perf_counter() - began) / 60)
            kept.forget()
    return written


def _run(
    part: str,
    recipe: Mapping[str, Any],
    digits: Digits,
    settings: Settings,
    choice: Choice,
    images: tuple[int, int] | None,
    report: Report,
) -> dict[str, Any]:
    name, seeds = recipe["set"], recipe["seeds"]
    if part == "filters":
        return experiments.filters_data(
            digits, settings, choice, name=name, filters=recipe["filters"], seeds=seeds, images=images, report=report
        )
    if part == "curves":
        return experiments.curves_data(digits, settings, choice, name=name, seeds=seeds, images=images, report=report)
    if part == "tried":
        return experiments.tried_data(digits, settings, choice, name=name, seeds=seeds, images=images, report=report)
    name = recipe["knowledge_set"]
    found = experiments.knowledge(digits, settings, choice, name=name, images=images, report=report)
    networks = {column: knowledge_of(each, f"DCL-{column} on {name}") for column, each in found.items()}
    return {"set": name, "networks": networks}


def keep_part(folder: RunFolder, part: str, data: Mapping[str, Any], minutes: float) -> list[str]:
    """Write the data of a part and its figures, and note that it is done.

    Args:
        folder: The run's.
        part: Its name.
        data: What its figures are drawn from.
        minutes: What it took.

    Returns:
        The names of the files with figures.
    """
    write_text(folder.path / f"{part}.json", json.dumps(finite(data), indent=1) + "\n")
    names = []
    for name, draw in drawings(part, finite(data)).items():
        figures.save(draw(False), folder.path / f"{name}.svg")
        names.append(f"{name}.svg")
    folder.append("parts", {"part": part, "minutes": minutes})
    return names
