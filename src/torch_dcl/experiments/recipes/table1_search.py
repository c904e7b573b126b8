"""The learning rates behind Table 1, chosen on digits that are not the test set's.

A trial is a learning rate, a bound on the gradient's norm and a weight decay. Each is trained with two seeds on five of
the fifteen sets, and evaluated on held-out digits of MNIST's training set. A column takes, for two and for three
digits, the trial with the lowest mean error. Baseline, oracle and controls go through the same trials as the DCL
networks. Columns that take the lowest or the highest rate are named: a wider search might serve them better.

This release's choice (`chosen.json`) is of an earlier search, with eight trials and one seed.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from statistics import mean
from typing import TYPE_CHECKING, Any

from torch_dcl.experiments.columns import DECAY, MODELS, MORE, Choice, Trial, choice_as_plain
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


TRIALS = tuple(
    Trial(lr, clip, decay) for lr in (0.016, 0.04, 0.1, 0.25) for clip, decay in ((3.0, 5e-4), (1.0, 5e-4), (1.0, 1e-3))
)
"""The rates that an earlier search chose, 0.02 to 0.12, lie between the lowest and the highest."""
SEARCHED_ON = ("MNIST-II-02", "MNIST-II-05", "MNIST-III-02", "MNIST-III-06", "MNIST-III-10")


@dataclasses.dataclass(frozen=True)
class SearchConfig(DigitConfig):
    """The settings of the search."""

    sets: tuple[str, ...] = setting(SEARCHED_ON, "on which sets", smoke=TWO, **SETS_RULES)
    models: tuple[str, ...] = setting((*MODELS, *MORE), "which columns", **MODEL_RULES)
    trials: tuple[str, ...] = setting(
        tuple(map(str, TRIALS)), "learning rates, and where they are set the gradient's bound and the weight decay",
        smoke=("0.02",),
    )  # fmt: skip
    seed: int = setting(100, "the first one, which the table does not use", least=0)
    seeds: int = setting(2, "networks of each trial on each set", smoke=1, least=1, most=100)
    fresh: bool = setting(True, "images of its own for every seed", smoke=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "trials", tuple(dict.fromkeys(str(read_trial(text)) for text in self.trials)))


class Search(DigitRecipe[SearchConfig]):
    """Every trial of every column on every set, with the same seeds."""

    name = "table1-search"
    config_type = SearchConfig
    purpose = "choose"

    def jobs(self, outcomes: Mapping[Job, Outcome]) -> list[Job]:
        """None depends on another."""
        config = self.config
        return [
            trial_job(column, name, seed, read_trial(text), "choose")
            for column in config.models
            for name in config.sets
            for text in config.trials
            for seed in range(config.seed, config.seed + config.seeds)
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
            "choice": choice_as_plain(choice, choice), "at_edge": self.at_edge(choice),
            "trials": [_row(outcome) for outcome in outcomes],
        }  # fmt: skip
        folder.write_json("search", content)
        return choice

    def at_edge(self, choice: Choice) -> list[str]:
        """Columns that took the lowest or the highest of several rates, with the number of digits and the trial."""
        rates = sorted({read_trial(text).lr for text in self.config.trials})
        return [
            f"{column}, {count} digits: {trial}"
            for column, by_count in choice.items()
            for count, trial in by_count.items()
            if len(rates) > 1 and trial.lr in (rates[0], rates[-1])
        ]

    def shown(self, result: Choice, width: int) -> "list[RenderableType]":
        counts = sorted({count for by_count in result.values() for count in by_count})
        lines = [
            Line((column, *(str(by_count.get(count, "")) for count in counts))) for column, by_count in result.items()
        ]
        grid = Grid(("<model", *(f"{count} digits" for count in counts)), lines)
        edge = self.at_edge(result)
        words = f"At the edge of the rates that were tried: {'; '.join(edge)}." if edge else "No column is at the edge."
        return ["Chosen learning rates, bounds on the gradient's norm and weight decays:", grid.as_rich(width), words]


def read_trial(text: str) -> Trial:
    """A learning rate from a text such as ``0.07``, with a bound, a weight decay or both: ``0.07 clip 3 decay 0.001``.

    Raises:
        SettingError: The text is not of this form.
    """
    rate, *words = text.split() or [""]
    names = words[::2]
    try:
        given = dict(zip(names, map(float, words[1::2]), strict=True))
        trial = Trial(float(rate), given.get("clip", math.inf), given.get("decay", DECAY))
    except ValueError:
        trial = Trial(0.0)
    is_known = names in ([], ["clip"], ["decay"], ["clip", "decay"])
    if not is_known or not 0 < trial.lr < math.inf or not trial.clip > 0 or not 0 <= trial.decay < math.inf:
        raise SettingError(f"the trial {text!r} is not of the form '0.07', '0.07 clip 3' or '0.07 clip 3 decay 0.001'")
    return trial


def choose(outcomes: Iterable[Outcome]) -> Choice:
    """For every column and number of digits the trial with the lowest mean error."""
    errors: dict[str, dict[int, dict[Trial, list[float]]]] = {}
    for outcome in outcomes:
        job = outcome.job
        by_trial = errors.setdefault(job.network, {}).setdefault(digits_of(job.data), {})
        trial = _trial(job)
        by_trial.setdefault(trial, []).append(outcome.judged_error)
    return {
        column: {count: min(trials, key=lambda trial: mean(trials[trial])) for count, trials in by_count.items()}
        for column, by_count in errors.items()
    }


def _trial(job: Job) -> Trial:
    return Trial(job.lr, job.option("clip", math.inf), job.option("weight_decay", DECAY))


def _row(outcome: Outcome) -> dict[str, Any]:
    job = outcome.job
    return {
        "column": job.network, "data": job.data, "seed": job.seed, **_trial(job).as_plain(),
        "weight_decay": job.option("weight_decay", DECAY), "error": outcome.error, "test_loss": outcome.test_loss,
        "stopped": outcome.stopped,
    }  # fmt: skip
