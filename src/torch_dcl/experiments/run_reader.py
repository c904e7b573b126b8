"""Run folders read back: what they are of, how far they are, who is at work in them, and what came out.

::

    run = read_run("runs/table1")
    run.state.state      # "running", "finished", "incomplete" or "damaged"
    run.table            # Table 1 or 2 as far as it is there
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_dcl.experiments.old_runs import Count, count_old
from torch_dcl.experiments.protocol import Outcome
from torch_dcl.experiments.recipes.figures import PARTS, parts_of
from torch_dcl.experiments.recipes.table1 import table1_of
from torch_dcl.experiments.recipes.table2 import table2_of
from torch_dcl.experiments.runner import outcomes_of
from torch_dcl.experiments.table import NaturalTable, Table, load
from torch_dcl.fleet.run_folder import RunError, RunFolder, lock_holder

__all__ = ["Run", "State", "find_runs", "read_run", "state_of"]

FILES = (*PARTS, "chart", "demo")
"""What a run may hold beside a table, each as a file NAME.json."""
CURVES_OF = "MNIST-III-10"
DAMAGE = (RunError, ValueError, LookupError, TypeError, AttributeError, OSError, RecursionError)
"""What reading a folder may raise that somebody damaged, or that is of another program."""


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
    """Every entry that is done."""
    table: Table | None = None
    """As it was written at the run's end, or of what is there so far; None where there is none."""
    parts: Mapping[str, Any] = field(default_factory=dict)
    """The data of figures, by the names of `FILES`, as JSON has them."""


def find_runs(root: str | os.PathLike[str]) -> list[State]:
    """All runs under a folder, two levels deep, by name."""
    place = Path(root)
    if not place.is_dir():
        return []
    folders = {path.parent for pattern in ("*/recipe.json", "*/*/recipe.json") for path in place.glob(pattern)}
    return [state_of(path) for path in sorted(folders)]


def state_of(path: str | os.PathLike[str]) -> State:
    """How one run stands. A run that cannot be read is damaged, and its problem says why."""
    place = os.fspath(path)
    try:
        pid = lock_holder(path)
        folder = RunFolder.inspect(path)
        name, done, total, unit = _count(folder)
        started = next((str(record["time"]) for record in folder.read("environment") if record.get("time")), None)
        now = _last_seen(folder) if pid is not None else None
    except DAMAGE as error:
        told = f"{type(error).__name__}: {error}" if isinstance(error, KeyError | TypeError) else str(error)
        return State(place, "?", "damaged", 0, 0, problem=told)
    state = "running" if pid is not None else "finished" if done >= total else "incomplete"
    return State(place, name, state, done, total, unit, pid, started, now=now)


def _last_seen(folder: RunFolder) -> str | None:
    """The fleet and the epoch that the run told of last."""
    last = max(reversed(folder.read("metrics")), key=lambda record: str(record["time"]), default=None)
    return None if last is None else f"{last['name']}, epoch {last['epoch']} of {last['epochs']}"


def _count(folder: RunFolder) -> Count:
    asked = folder.recipe
    if "total" not in asked:
        return count_old(folder)
    return Count(str(asked["recipe"]), len(outcomes_of(folder)), int(asked["total"]), str(asked["unit"]))


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
        table = load(place)
        count, name = len(table.cells), "table2" if isinstance(table, NaturalTable) else "table1"
        return Run(place, State(str(place), name, "finished", count, count, "cells"), table=table)
    folder = RunFolder.inspect(place)
    state = state_of(place)
    if state.state == "damaged":
        raise RunError(f"{place}: {state.problem}")
    try:
        outcomes = tuple(outcomes_of(folder).values()) if state.recipe != "calibration" else ()
        table_so_far, parts = _table(folder, state), _parts(folder, state, outcomes)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        told = f"{type(error).__name__}: {error}"
        raise RunError(f"{place}: its recipe or its outcomes are damaged ({told}); run it again") from error
    return Run(place, state, folder.recipe, tuple(folder.read("environment")), outcomes, table_so_far, parts)


def _table(folder: RunFolder, state: State) -> Table | None:
    """The table as it was written at the end, or of what is there."""
    makers = {"table1": table1_of, "table2": table2_of}
    if state.recipe not in makers:
        return None
    whole = folder.path / f"{state.recipe}.json"
    return load(whole) if whole.is_file() else makers[state.recipe](folder) if state.done else None


def _parts(folder: RunFolder, state: State, outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """The data of figures: from its files, or from what is done."""
    parts = {name: data for name in FILES if (data := _read(folder.path / f"{name}.json")) is not None}
    if state.recipe == "figures" and "choice" in folder.recipe:
        parts = parts_of(folder) | parts
    if "curves" not in parts and (curves := _curves(outcomes)):
        parts["curves"] = curves
    return parts


def _read(file: Path) -> Any:
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise RunError(f"{file} is not JSON: {error}; remove it, and resume the run") from error


def _curves(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Losses by epoch, of a table that was run with them."""
    series: dict[str, dict[str, list[list[float]]]] = {}
    for outcome in outcomes:
        job, curves = outcome.job, outcome.extra.get("curves")
        if curves and job.data == CURVES_OF and job.network != "oracle" and job.phase == "report":
            runs = series.setdefault(job.network, {"train_loss": [], "test_loss": []})
            for kind, by_epoch in curves.items():
                runs[kind].append(by_epoch)
    return {"set": CURVES_OF, "series": series} if series else {}
