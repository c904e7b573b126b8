"""Run folders read back: what they are of, how far they are, who is at work in them, and what came out.

::

    run = read_run("runs/table1")
    run.state.state      # "running", "finished", "incomplete" or "damaged"
    run.table            # Table 1 or 2 as far as it is there
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_dcl.experiments import table1
from torch_dcl.experiments.engine import Outcome, Settings
from torch_dcl.experiments.natural.table import NaturalTable, load_table2, table2_of
from torch_dcl.experiments.runner import outcomes_of
from torch_dcl.experiments.table import Table, as_trial, load
from torch_dcl.experiments.trial import departures
from torch_dcl.fleet import Schedule
from torch_dcl.fleet.run_folder import RunError, RunFolder, lock_holder

__all__ = ["PARTS", "Run", "State", "find_runs", "read_run", "state_of"]

PARTS = ("filters", "curves", "knowledge", "tried")
"""What a run may hold beside the table, each as a file NAME.json."""
CURVES_OF = "MNIST-III-10"
_TRIAL = ("purpose", "unit", "share", "lr", "seed")


@dataclass(frozen=True)
class State:
    """How a run stands."""

    path: str
    recipe: str
    state: str
    """running, finished, incomplete, damaged."""
    done: int
    total: int
    unit: str = "entries"
    pid: int | None = None
    started: str | None = None
    problem: str | None = None
    now: str | None = None
    """What a run that is running was last seen at."""


@dataclass(frozen=True)
class Run:
    """A run, as far as it is there."""

    path: Path
    state: State
    recipe: Mapping[str, Any] = field(default_factory=dict)
    """What was asked for; empty for a file ``table1.json`` or ``table2.json`` by itself."""
    environment: tuple[Mapping[str, Any], ...] = ()
    """Versions, hardware and command, for every time that it was started."""
    outcomes: tuple[Outcome, ...] = ()
    """Of Table 1: every entry that is done."""
    table: Table | None = None
    """As it was written at the run's end, or of what is there so far; None where there is none."""
    parts: Mapping[str, Any] = field(default_factory=dict)
    """The data of figures, by the names of `PARTS` and ``chart``, as JSON has them."""


def find_runs(root: str | os.PathLike[str]) -> list[State]:
    """All runs under a folder, two levels deep, by name."""
    place = Path(root)
    if not place.is_dir():
        return []
    found = {path.parent for pattern in ("*/recipe.json", "*/*/recipe.json") for path in place.glob(pattern)}
    return [state_of(path) for path in sorted(found)]


def state_of(path: str | os.PathLike[str]) -> State:
    """How one run stands. A run that cannot be read is damaged, and its problem says why."""
    pid = lock_holder(path)
    try:
        folder = RunFolder.inspect(path)
        name, done, total, unit = _count(folder)
        started = next((record.get("time") for record in folder.read("environment")), None)
        now = _last_seen(folder) if pid is not None else None
    except (RunError, ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError) as error:
        told = f"{type(error).__name__}: {error}" if isinstance(error, KeyError | TypeError) else str(error)
        return State(os.fspath(path), "?", "damaged", 0, 0, pid=pid, problem=told)
    state = "running" if pid is not None else "finished" if done >= total else "incomplete"
    return State(os.fspath(path), name, state, done, total, unit, pid, started, now=now)


def _last_seen(folder: RunFolder) -> str | None:
    """The fleet and the epoch that the run told of last."""
    last = max(reversed(folder.read("metrics")), key=lambda record: str(record["time"]), default=None)
    return None if last is None else f"{last['name']}, epoch {last['epoch']} of {last['epochs']}"


def _count(folder: RunFolder) -> tuple[str, int, int, str]:
    """The recipe's name, what is done, what there is to do, and its unit."""
    recipe = folder.recipe
    if recipe.get("table") == 1:
        total = len(recipe["columns"]) * len(recipe["sets"]) * recipe["seeds"]
        jobs = {json.dumps(record["job"], sort_keys=True) for record in folder.read("outcomes")}
        return "table1", len(jobs), total, "entries"
    if "total" in recipe:  # a run of the runner's
        return str(recipe["recipe"]), len(outcomes_of(folder)), int(recipe["total"]), str(recipe["unit"])
    if recipe.get("table") == 2:
        entries = {(record["data"], record["column"], record["seed"]) for record in folder.read("outcomes")}
        return "table2", len(entries), len(recipe["recipes"]) * recipe["seeds"], "entries"
    if recipe.get("chart") is not None:
        trials = {json.dumps([record[key] for key in _TRIAL]) for record in folder.read("outcomes")}
        return "chart", len(trials), len(recipe["points"]) * (len(recipe["rates"]) + recipe["seeds"]), "trainings"
    name = recipe["recipe"]
    if name == "table1-search":
        total = len(recipe["models"]) * len(recipe["sets"]) * len(recipe["trials"])
        return name, len(folder.read("trials")), total, "entries"
    if name == "calibration":
        return name, len(folder.read("rounds")), 1 + recipe["rounds"], "rounds"
    if name not in ("figures", "knowledge"):
        raise ValueError(f"its recipe {name!r} is unknown; it was run with another version, or by another program")
    wanted = recipe["parts"] if name == "figures" else ["knowledge"]
    done = {record["part"] for record in folder.read("parts")}
    return name, sum(part in done for part in wanted), len(wanted), "parts"


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read a run folder, also while it runs; or a file ``table1.json`` or ``table2.json`` by itself.

    Args:
        path: The folder, or the file.

    Raises:
        RunError: It is neither, or damaged; the message says where.
        TableError: Its table is damaged.
        OSError: It cannot be read.
    """
    place = Path(path)
    if place.is_file():
        table = load_table2(place) if _is_table2(place) else load(place)
        count, name = len(table.cells), "table2" if isinstance(table, NaturalTable) else "table1"
        return Run(place, State(str(place), name, "finished", count, count, "cells"), table=table)
    folder = RunFolder.inspect(place)
    state = state_of(place)
    if state.state == "damaged":
        raise RunError(f"{place}: {state.problem}")
    outcomes: tuple[Outcome, ...] = ()
    if state.recipe == "table1":
        outcomes = tuple(table1.outcome_of(record) for record in folder.read("outcomes"))
    table_here = _table(folder, state, outcomes)
    parts = {name: data for name in (*PARTS, "chart") if (data := _part(place / f"{name}.json")) is not None}
    if "curves" not in parts and (curves := _curves(outcomes)):
        parts["curves"] = curves
    return Run(place, state, folder.recipe, tuple(folder.read("environment")), outcomes, table_here, parts)


def _is_table2(file: Path) -> bool:
    """Whether a file says which sets are absent, as Table 2's does. What is not JSON is refused later."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(content, dict) and "absent" in content


def _table(folder: RunFolder, state: State, outcomes: tuple[Outcome, ...]) -> Table | None:
    """The table as it was written at the end, or of what is there."""
    if state.recipe == "table2":
        whole = folder.path / "table2.json"
        try:
            return load_table2(whole) if whole.is_file() else table2_of(folder) if state.done else None
        except (KeyError, TypeError, IndexError) as error:
            told = f"{type(error).__name__}: {error}"
            raise RunError(f"{folder.path}: its recipe or its outcomes are damaged ({told}); run it again") from error
    whole = folder.path / "table1.json"
    return load(whole) if whole.is_file() else _so_far(folder, outcomes) if outcomes else None


def _so_far(folder: RunFolder, outcomes: tuple[Outcome, ...]) -> Table:
    """The table of a run that has not ended; what is missing is not run."""
    recipe = folder.recipe
    schedule = Schedule(**{**recipe["schedule"], "drops": tuple(recipe["schedule"]["drops"])})
    settings = Settings(schedule, recipe["batch"], precision=recipe["precision"])
    images = tuple(recipe["images"]) if recipe["images"] else None
    by_job = {outcome.job: outcome for outcome in outcomes}
    columns, sets = recipe["columns"], recipe["sets"]
    inside = sorted(by_job, key=lambda job: (columns.index(job.column), sets.index(job.data), job.seed))
    made = table1.table_of([by_job[job] for job in inside], recipe["digits"], settings, folder)
    return as_trial(made, departures(recipe["digits"], schedule, images))


def _part(file: Path) -> Any:
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{file} is not JSON: {error}; remove it, and go on with --resume") from error


def _curves(outcomes: tuple[Outcome, ...]) -> dict[str, Any]:
    """Losses by epoch, of a table that was run with them."""
    series: dict[str, dict[str, list[list[float]]]] = {}
    for outcome in outcomes:
        train, test = outcome.curves
        if outcome.job.data == CURVES_OF and outcome.job.column != "oracle" and train and test:
            runs = series.setdefault(outcome.job.column, {"train_loss": [], "test_loss": []})
            runs["train_loss"].append(train)
            runs["test_loss"].append(test)
    return {"set": CURVES_OF, "series": series} if series else {}
