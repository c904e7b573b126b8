"""The learning rates behind Table 1, chosen on digits that are not the test set's.

A trial is a learning rate and a bound on the gradient's norm. Each is trained with one seed on five of the fifteen
sets, and evaluated on held-out digits of MNIST's training set. A column takes, for two and for three digits,
the trial with the lowest mean error. Baseline, oracle and controls go through the same trials as the DCL networks.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from statistics import mean
from typing import TYPE_CHECKING, Any

from torch_dcl.experiments.columns import MODELS, Choice, Trial, choice_as_plain
from torch_dcl.experiments.digits import (
    MODEL_RULES,
    SETS_RULES,
    TWO,
    DigitConfig,
    DigitRecipe,
    classes_of,
    digits_of,
    trial_job,
)
from torch_dcl.experiments.protocol import Job, Outcome
from torch_dcl.experiments.runner import minutes_of, outcomes_of
from torch_dcl.experiments.settings import SettingError, setting
from torch_dcl.experiments.table import Grid, Line
from torch_dcl.fleet.run_folder import environment

if TYPE_CHECKING:
    from rich.console import RenderableType

    from torch_dcl.fleet.run_folder import RunFolder

__all__ = ["SEARCHED_ON", "TRIALS", "Search", "SearchConfig", "choose", "read_trial"]


TRIALS = (
    Trial(0.02), Trial(0.04), Trial(0.07), Trial(0.12),
    Trial(0.07, 3.0), Trial(0.12, 3.0), Trial(0.07, 1.0), Trial(0.12, 1.0),
)  # fmt: skip
SEARCHED_ON = ("MNIST-II-02", "MNIST-II-05", "MNIST-III-02", "MNIST-III-06", "MNIST-III-10")


@dataclasses.dataclass(frozen=True)
class SearchConfig(DigitConfig):
    """The settings of the search."""

    sets: tuple[str, ...] = setting(SEARCHED_ON, "on which sets", smoke=TWO, **SETS_RULES)
    models: tuple[str, ...] = setting(MODELS, "which columns", **MODEL_RULES)
    trials: tuple[str, ...] = setting(
        tuple(map(str, TRIALS)), "learning rates, and where it is bounded the gradient's norm", smoke=("0.02",)
    )
    seed: int = setting(100, "one that the table does not use", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for text in self.trials:
            read_trial(text)


class Search(DigitRecipe[SearchConfig]):
    """Every trial of every column on every set, with one seed."""

    name = "table1-search"
    config_type = SearchConfig
    purpose = "choose"

    def jobs(self, outcomes: Mapping[Job, Outcome]) -> list[Job]:
        """None depends on another."""
        config = self.config
        return [
            trial_job(column, name, config.seed, read_trial(text), "choose")
            for column in config.models
            for name in config.sets
            for text in config.trials
        ]

    def result(self, folder: "RunFolder") -> Choice:
        """The choice, and every trial, as JSON."""
        known = outcomes_of(folder)
        # The rows of one architecture stand together.
        outcomes = sorted((known[job] for job in self.jobs({})), key=lambda o: (o.job.network, classes_of(o.job)))
        choice = choose(outcomes)
        content = {
            "title": "The search for learning rates behind Table 1", "recipe": folder.recipe,
            "environment": environment(), "minutes": minutes_of(folder),
            "choice": choice_as_plain(choice, choice),
            "trials": [_row(outcome) for outcome in outcomes],
        }  # fmt: skip
        folder.write_json("search", content)
        return choice

    def shown(self, result: Choice, width: int) -> "list[RenderableType]":
        counts = sorted({count for by_count in result.values() for count in by_count})
        lines = [
            Line((column, *(str(by_count.get(count, "")) for count in counts))) for column, by_count in result.items()
        ]
        grid = Grid(("<model", *(f"{count} digits" for count in counts)), lines)
        return ["Chosen learning rates, and bounds on the gradient's norm:", grid.as_rich(width)]


def read_trial(text: str) -> Trial:
    """A learning rate and a bound from a text such as ``0.07`` or ``0.07 clip 3``.

    Raises:
        SettingError: The text says something else.
    """
    words = text.split()
    try:
        trial = Trial(float(words[0]), math.inf if len(words) == 1 else float(words[2]))
    except (ValueError, IndexError):
        trial = Trial(0.0)
    if words[1:2] not in ([], ["clip"]) or len(words) > 3 or not 0 < trial.lr < math.inf or not trial.clip > 0:
        raise SettingError(f"the trial {text!r} is not of the form '0.07' or '0.07 clip 3'")
    return trial


def choose(outcomes: Iterable[Outcome]) -> Choice:
    """For every column and number of digits the trial with the lowest mean error."""
    errors: dict[str, dict[int, dict[Trial, list[float]]]] = {}
    for outcome in outcomes:
        job = outcome.job
        by_trial = errors.setdefault(job.network, {}).setdefault(digits_of(job.data), {})
        trial = Trial(job.lr, job.option("clip", math.inf))
        by_trial.setdefault(trial, []).append(outcome.judged_error)
    return {
        column: {count: min(trials, key=lambda trial: mean(trials[trial])) for count, trials in by_count.items()}
        for column, by_count in errors.items()
    }


def _row(outcome: Outcome) -> dict[str, Any]:
    job = outcome.job
    trial = Trial(job.lr, job.option("clip", math.inf)).as_plain()
    return {
        "column": job.network, "data": job.data, "seed": job.seed, **trial,
        "weight_decay": job.option("weight_decay", 5e-4), "error": outcome.error, "test_loss": outcome.test_loss,
        "stopped": outcome.stopped,
    }  # fmt: skip
