"""How every column of Table 1 gets its learning rate: the same trials for all, on digits that are not the test set's.

A trial is a learning rate and a bound on the gradient's norm. Each is trained with one seed on five of the fifteen
sets, and judged on digits of MNIST's training set that were kept apart. A column takes, for two and for three digits,
the trial with the lowest mean error. Baseline, oracle and controls go through the same trials as the DCL networks.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib import resources
from statistics import mean
from typing import Any, NamedTuple

from torch_dcl.experiments.columns import MODELS
from torch_dcl.experiments.digitsets import Digits, make_sets
from torch_dcl.experiments.engine import Job, Outcome, Report, Settings, run_jobs

__all__ = ["SEARCHED_ON", "TRIALS", "Trial", "choose", "search", "stored_choice", "stored_minutes"]


class Trial(NamedTuple):
    """What is tuned."""

    lr: float
    clip: float = math.inf


TRIALS = (
    Trial(0.02), Trial(0.04), Trial(0.07), Trial(0.12),
    Trial(0.07, 3.0), Trial(0.12, 3.0), Trial(0.07, 1.0), Trial(0.12, 1.0),
)  # fmt: skip
SEARCHED_ON = ("MNIST-II-02", "MNIST-II-05", "MNIST-III-02", "MNIST-III-06", "MNIST-III-10")

Choice = dict[str, dict[int, Trial]]
"""By column and number of digits."""


def search(
    digits: Digits,
    settings: Settings,
    *,
    columns: Sequence[str] = MODELS,
    sets: Sequence[str] = SEARCHED_ON,
    trials: Iterable[Trial] = TRIALS,
    seed: int = 100,
    report: Report | None = None,
) -> list[Outcome]:
    """Train every trial of every column.

    Args:
        digits: MNIST; its test part is not looked at.
        settings: How networks are trained.
        columns: Which.
        sets: On which sets.
        trials: What to try.
        seed: One that the table does not use.
        report: Called with lines of progress.
    """
    written = make_sets(digits, sets, "choose", device=settings.device)
    trials = list(trials)
    jobs = [Job(column, name, seed, t.lr, t.clip) for column in columns for name in sets for t in trials]
    return run_jobs(jobs, written, settings, report)


def choose(outcomes: Iterable[Outcome]) -> Choice:
    """For every column and number of digits the trial with the lowest mean error; a network that diverged erred."""
    errors: dict[str, dict[int, dict[Trial, list[float]]]] = {}
    for outcome in outcomes:
        job = outcome.job
        by_trial = errors.setdefault(job.column, {}).setdefault(job.digits, {})
        by_trial.setdefault(Trial(job.lr, job.clip), []).append(100.0 if outcome.stopped is not None else outcome.error)
    return {
        column: {count: min(trials, key=lambda trial: mean(trials[trial])) for count, trials in by_count.items()}
        for column, by_count in errors.items()
    }


def as_json(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Every trial as plain data."""
    rows = []
    for outcome in outcomes:
        job = {name: value for name, value in asdict(outcome.job).items() if value is not None}
        job["clip"] = None if math.isinf(job["clip"]) else job["clip"]
        rows.append({**job, "error": outcome.error, "test_loss": outcome.test_loss, "stopped": outcome.stopped})
    return rows


def stored_choice() -> Choice:
    """What the search chose when it was last run for this release."""
    stored = _stored()["choice"]
    return {
        column: {int(count): Trial(t["lr"], t["clip"] or math.inf) for count, t in by_count.items()}
        for column, by_count in stored.items()
    }


def stored_minutes() -> dict[str, float]:
    """What the ``calibration`` of the sets and that ``search`` took, on the machines that their results name."""
    return dict(_stored()["minutes"])


def _stored() -> dict[str, Any]:
    text = resources.files("torch_dcl.experiments").joinpath("chosen.json").read_text(encoding="utf-8")
    return dict(json.loads(text))
