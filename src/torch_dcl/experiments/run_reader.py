"""Run folders read back: their recipe, their progress, the process that holds them, and their results.

::

    run = read_run("runs/table1")
    run.state.state      # "running", "finished", "incomplete" or "damaged"
    run.table            # Table 1 or 2 as far as it is there
"""

import json
import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_dcl.experiments.protocol import Job, Outcome, find_recipe_type
from torch_dcl.experiments.runner import outcomes_of
from torch_dcl.experiments.table import Table, load
from torch_dcl.fleet.checkpoint import with_nan
from torch_dcl.fleet.run_folder import RunError, RunFolder, lock_holder

__all__ = ["Run", "State", "as_argument", "find_runs", "read_run", "state_of"]

FILES = ("filters", "curves", "knowledge", "tried", "shares", "chart", "demo", "relations")
"""The data of figures that a run may hold, each as a file NAME.json."""
DAMAGE = (RunError, ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError)
"""What reading a damaged folder, or one of another program, may raise."""


@dataclass(frozen=True)
class State:
    """The state of a run."""

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
    """The settings of the run; empty for a single file such as ``table1.json``."""
    environment: tuple[Mapping[str, Any], ...] = ()
    """Versions, hardware and command, for every time that it was started."""
    outcomes: tuple[Outcome, ...] = ()
    """Every entry that is done."""
    table: Table | None = None
    """As it was written at the run's end, or of what is there so far; None where there is none."""
    parts: Mapping[str, Any] = field(default_factory=dict)
    """The data of figures, by the names of `FILES`, as JSON has them; or the ``result`` as text where there is none."""


def as_argument(path: str | os.PathLike[str]) -> str:
    """A run folder as it is typed: quoted, and with "./" where its name alone could be a recipe's, or an option."""
    text = os.fspath(path)
    return shlex.quote(text if "/" in text and not text.startswith("-") else f"./{text}")


def find_runs(root: str | os.PathLike[str]) -> list[State]:
    """All runs under a folder, two levels deep, by name."""
    place = Path(root)
    if not place.is_dir():
        return []
    files = [path for pattern in ("*/recipe.json", "*/*/recipe.json") for path in place.glob(pattern)]
    return [state_of(folder) for folder in sorted({path.parent for path in files if path.is_file()})]


def state_of(path: str | os.PathLike[str]) -> State:
    """The state of one run. A run that cannot be read is damaged, with the reason in its problem."""
    place = os.fspath(path)
    try:
        pid = lock_holder(path)
        folder = RunFolder.inspect(path)
        name, done, total, unit = _count(folder)
        started = next((str(record["time"]) for record in folder.read("environment") if record.get("time")), None)
        now = _last_seen(folder) if pid is not None else None
    except DAMAGE as error:
        message = f"{type(error).__name__}: {error}" if isinstance(error, KeyError | TypeError) else str(error)
        return State(place, "?", "damaged", 0, 0, problem=message)
    state = "running" if pid is not None else "finished" if done >= total else "incomplete"
    return State(place, name, state, done, total, unit, pid, started, now=now)


def _last_seen(folder: RunFolder) -> str | None:
    """The fleet and the epoch that the run reported last."""
    last = max(reversed(folder.read("metrics")), key=lambda record: str(record["time"]), default=None)
    return None if last is None else f"{last['name']}, epoch {last['epoch']} of {last['epochs']}"


Count = tuple[str, int, int, str]
"""How far a run is: its recipe, what is done, of how many, and their unit."""


def _count(folder: RunFolder) -> Count:
    asked = folder.recipe
    if "total" not in asked:
        return _count_old(folder)
    if type(total := asked["total"]) is not int:
        raise RunError(f"{folder.path / 'recipe.json'}: total is {total!r}, not a whole number; remove the folder")
    return str(asked["recipe"]), len(outcomes_of(folder)), total, str(asked["unit"])


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read a run folder, also while it runs; or a single file ``table1.json``, ``table2.json`` or ``relations.json``.

    Raises:
        RunError: It is neither, or damaged; the message says where.
        TableError: Its table is damaged.
        OSError: It cannot be read.
    """
    place = Path(path)
    if place.is_file():
        if (relations := _relations_in(place)) is not None:
            count = len(relations["cells"])
            state = State(str(place), "relations", "finished", count, count, "cells")
            return Run(place, state, environment=(relations["environment"],), parts={"relations": relations})
        table = load(place)
        count, name = len(table.cells), "table1" if type(table) is Table else "table2"
        return Run(place, State(str(place), name, "finished", count, count, "cells"), table=table)
    folder = RunFolder.inspect(place)
    state = state_of(place)
    if state.state == "damaged":
        raise RunError(f"{place}: {state.problem}")
    is_old = "total" not in folder.recipe
    try:
        outcomes = _old_outcomes(folder) if is_old else outcomes_of(folder)
        so_far, parts = _results(folder, state, outcomes)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        message = f"{type(error).__name__}: {error}"
        raise RunError(f"{place}: its recipe or its outcomes are damaged ({message}); run it again") from error
    starts = tuple(folder.read("environment"))
    return Run(place, state, folder.recipe, starts, tuple(outcomes.values()), so_far, parts)


def _relations_in(file: Path) -> Any:
    """What ``relations.json`` holds; None for other files, which `load` reads or refuses."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None
    cells = data.get("cells") if isinstance(data, dict) else None
    is_relations = isinstance(cells, list) and bool(cells) and all(isinstance(c, dict) and "task" in c for c in cells)
    if is_relations and not isinstance(data.get("environment"), dict):
        raise RunError(f"{file} lacks environment, which a run writes; resume the run")
    return data if is_relations else None


def _results(folder: RunFolder, state: State, outcomes: Mapping[Job, Outcome]) -> tuple[Table | None, dict[str, Any]]:
    """The table and the data of figures: from their files, or from what is done."""
    kind = find_recipe_type(state.recipe)
    parts = {name: data for name in FILES if (data := _read(folder.path / f"{name}.json")) is not None}
    file = folder.path / f"{state.recipe}.json"
    table = load(file) if kind.table_type is not None and file.is_file() else None
    for name, compute in kind.so_far(folder, outcomes).items() if outcomes else ():
        if name == state.recipe and kind.table_type is not None:
            table = table or compute()
        elif name not in parts and (data := compute()):
            parts[name] = data
    text = folder.path / "result.txt"
    if table is None and not parts and text.is_file():
        parts["result"] = text.read_text(encoding="utf-8", errors="replace")
    return table, parts


def _read(file: Path) -> Any:
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{file} is not JSON: {error}; remove it, and resume the run") from error


# Runs of earlier versions: they are listed and reported, and not resumed.


def _count_old(folder: RunFolder) -> Count:
    """How far a run is that an earlier version began."""
    asked = folder.recipe
    if asked.get("table") in (1, 2):
        entries = len(asked["columns"]) * len(asked["sets"]) if asked["table"] == 1 else len(asked["recipes"])
        done = _old_outcomes(folder)
        return f"table{asked['table']}", len(done), entries * asked["seeds"], "entries"
    if asked.get("chart") is not None:
        trials = _old_outcomes(folder)
        total = len(asked["points"]) * (len(asked["rates"]) + asked["seeds"])
        return "chart", len(trials), total, "trainings"
    name = asked["recipe"]
    if name == "table1-search":
        total = len(asked["models"]) * len(asked["sets"]) * len(asked["trials"])
        return name, len(folder.read("trials")), total, "entries"
    if name == "calibration":
        return name, len(folder.read("rounds")), 1 + asked["rounds"], "rounds"
    if name not in ("figures", "knowledge"):
        raise ValueError(f"its recipe {name!r} is unknown; it was run with another version, or by another program")
    wanted = asked["parts"] if name == "figures" else ["knowledge"]
    parts = {record["part"] for record in folder.read("parts")}
    return name, sum(part in parts for part in wanted), len(wanted), "parts"


def _old_outcome(record: Mapping[str, Any]) -> Outcome:
    """An entry of Table 1, Table 2 or the chart as earlier versions wrote it, a line each."""
    if "job" in record:
        old = record["job"]
        options = [(name, float(old[name])) for name in ("clip", "filters") if old.get(name)]
        job = Job(old["column"], old["data"], old["seed"], old["lr"], options=tuple(options))
    elif "unit" in record:
        phase = "choose" if record["purpose"] == "choose" else "report"
        share = (("share", record["share"]),)
        job = Job(record["unit"], json.dumps(record.get("data")), record["seed"], record["lr"], phase, share)
    else:
        job = Job(record["column"], record["data"], record["seed"], record.get("lr", math.nan))
    train, test = (record.get("curves") or ([], []))[:2]
    numbers = {key: with_nan(record.get(key)) for key in ("error", "test_loss", "train_loss")}
    return Outcome(
        job=job, **numbers, stopped=record.get("stopped"), seconds=record.get("seconds") or 0.0,
        compiling=record.get("compiling", 0.0),
        extra={"curves": {"train_loss": train, "test_loss": test}} if train else {},
    )  # fmt: skip


def _old_outcomes(folder: RunFolder) -> dict[Job, Outcome]:
    outcomes = map(_old_outcome, folder.read("outcomes"))
    return {outcome.job: outcome for outcome in outcomes}
