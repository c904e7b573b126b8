"""Run folders as they lie there: what they are of, how far they are, and who is at work in them."""

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["State", "as_row", "find_runs", "state_of"]


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


def find_runs(root: Path) -> list[State]:
    """All runs under a folder, two levels deep, by name."""
    if not root.is_dir():
        return []
    found = {path.parent for pattern in ("*/recipe.json", "*/*/recipe.json") for path in root.glob(pattern)}
    return [state_of(path) for path in sorted(found)]


def state_of(path: Path) -> State:
    """How one run stands."""
    from torch_dcl.training.runs import RunError, RunFolder  # noqa: PLC0415

    pid = holder(path)
    try:
        recipe = json.loads((path / "recipe.json").read_text(encoding="utf-8"))
        folder = RunFolder(path, recipe)
        name, done, total, unit = _count(recipe, folder)
        started = next((record.get("time") for record in folder.read("environment")), None)
    except (RunError, ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        return State(str(path), "?", "damaged", 0, 0, pid=pid, problem=str(error))
    state = "running" if pid is not None else "finished" if done >= total else "incomplete"
    return State(str(path), name, state, done, total, unit, pid, started)


def _count(recipe: dict[str, Any], folder: Any) -> tuple[str, int, int, str]:
    """The recipe's name, what is done, what there is to do, and its unit."""
    if recipe.get("table") == 1:
        total = len(recipe["columns"]) * len(recipe["sets"]) * recipe["seeds"]
        jobs = {json.dumps(record["job"], sort_keys=True) for record in folder.read("outcomes")}
        return "table1", len(jobs), total, "entries"
    name = recipe["recipe"]
    if name == "table1-search":
        total = len(recipe["models"]) * len(recipe["sets"]) * len(recipe["trials"])
        return name, len(folder.read("trials")), total, "entries"
    return name, len(folder.read("rounds")), 1 + recipe["rounds"], "rounds"


def holder(path: Path) -> int | None:
    """The process that holds the folder's lock; None where nobody does."""
    for lock in sorted(path.glob("lock*")):
        try:
            with lock.open("r", encoding="utf-8") as file:
                text = file.read().strip()
                # A process that was killed leaves its number; the lock itself is gone with it.
                if text.isdigit() and _alive(int(text)) and _held(file.fileno()):
                    return int(text)
        except OSError:
            continue
    return None


def _held(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def as_row(state: State) -> dict[str, Any]:
    """A state as plain data."""
    return asdict(state)


def say(state: State) -> str:
    """A state in words."""
    if state.state == "damaged":
        return f"damaged: {state.problem}"
    count = f"{state.done:,} of {state.total:,} {state.unit}"
    if state.state == "running":
        return f"running (pid {state.pid}), {count}"
    return f"finished, {state.total:,} {state.unit}" if state.state == "finished" else f"incomplete, {count}"
