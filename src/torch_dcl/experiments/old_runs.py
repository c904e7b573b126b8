"""Run folders of earlier versions: they are listed and reported, and not resumed."""

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_dcl.experiments.protocol import Job, Outcome

if TYPE_CHECKING:
    from torch_dcl.fleet.run_folder import RunFolder

__all__ = ["Count", "count_old", "old_outcome"]


class Count(NamedTuple):
    """How far a run is."""

    recipe: str
    done: int
    total: int
    unit: str


def count_old(folder: "RunFolder") -> Count:
    """How far a run is that an earlier version began.

    Raises:
        ValueError: Its recipe is unknown.
        LookupError: Its recipe is damaged.
    """
    asked = folder.recipe
    if asked.get("table") in (1, 2):
        entries = len(asked["columns"]) * len(asked["sets"]) if asked["table"] == 1 else len(asked["recipes"])
        done = {old_outcome(record).job for record in folder.read("outcomes")}
        return Count(f"table{asked['table']}", len(done), entries * asked["seeds"], "entries")
    if asked.get("chart") is not None:
        trials = {old_outcome(record).job for record in folder.read("outcomes")}
        total = len(asked["points"]) * (len(asked["rates"]) + asked["seeds"])
        return Count("chart", len(trials), total, "trainings")
    name = asked["recipe"]
    if name == "table1-search":
        total = len(asked["models"]) * len(asked["sets"]) * len(asked["trials"])
        return Count(name, len(folder.read("trials")), total, "entries")
    if name == "calibration":
        return Count(name, len(folder.read("rounds")), 1 + asked["rounds"], "rounds")
    if name not in ("figures", "knowledge"):
        raise ValueError(f"its recipe {name!r} is unknown; it was run with another version, or by another program")
    wanted = asked["parts"] if name == "figures" else ["knowledge"]
    parts = {record["part"] for record in folder.read("parts")}
    return Count(name, sum(part in parts for part in wanted), len(wanted), "parts")


def old_outcome(record: Mapping[str, Any]) -> Outcome:
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
    numbers = {
        key: math.nan if record.get(key) is None else record[key] for key in ("error", "test_loss", "train_loss")
    }
    return Outcome(
        job=job, **numbers, stopped=record.get("stopped"), seconds=record.get("seconds") or 0.0,
        compiling=record.get("compiling", 0.0),
        extra={"curves": {"train_loss": train, "test_loss": test}} if train else {},
    )  # fmt: skip
