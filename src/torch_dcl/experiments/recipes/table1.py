"""Table 1: every network on the fifteen multi-digit sets, beside the paper's numbers.

The order of things is the protocol: the sets are frozen (`torch_dcl.data.layouts`), the learning rates were chosen on
digits that are not the test set's (`torch_dcl.experiments.recipes.table1_search`), and the test set is evaluated once,
at the end of each training.
"""

import dataclasses
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch_dcl.data.layouts import LAYOUTS
from torch_dcl.experiments.columns import (
    CONTROLS,
    MODELS,
    Choice,
    choice_as_plain,
    stored_choice,
    stored_minutes,
    weights,
)
from torch_dcl.experiments.digits import (
    BATCH,
    MODEL_RULES,
    SCHEDULE,
    SETS_RULES,
    TWO,
    DigitConfig,
    DigitRecipe,
    classes_of,
    digits_of,
    trial_job,
)
from torch_dcl.experiments.paper_numbers import SETS, TABLE1
from torch_dcl.experiments.protocol import Job, Outcome
from torch_dcl.experiments.runner import minutes_of, outcomes_of
from torch_dcl.experiments.settings import setting
from torch_dcl.experiments.table import Cell, Table, as_trial, save
from torch_dcl.experiments.text import as_text, long_table, verdict

if TYPE_CHECKING:
    from rich.console import RenderableType

    from torch_dcl.fleet.run_folder import RunFolder

__all__ = ["DEVIATIONS", "Table1", "Table1Config", "command_for", "table1_of"]

DEVIATIONS = (
    "The paper gives no schedule for LeNet; ours is under protocol, with SGD, momentum 0.9 and weight decay 5e-4.",
    "The paper shows its layouts in a figure only. Ours follow its description, and how difficult each set is was "
    "fitted so that the baseline errs as often as the paper's, on digits of MNIST's training set. So the baseline "
    "column is fitted and proves nothing; the other columns are compared with it.",
    "The ReLU behind each pooling, and the start of the DCL layers, are inferred; the paper does not say.",
)
SIGNS = "Bold: the best DCL model. ▾ clearly below the baseline, ▴ above. * fitted to the paper. † diverged."
CURVES_OF = "MNIST-III-10"
FEW = 4  # sets of which every cell has a line in the terminal


@dataclasses.dataclass(frozen=True)
class Table1Config(DigitConfig):
    """The settings of Table 1."""

    sets: tuple[str, ...] = setting(SETS, "which of the fifteen", smoke=TWO, **SETS_RULES)
    models: tuple[str, ...] = setting(
        MODELS, "which columns; the last three are controls, not in the paper", **MODEL_RULES
    )
    seeds: int = setting(5, "networks of each column on each set", smoke=2, least=1, most=1000)
    curves: bool = setting(False, "judge after every epoch, for the figure of losses")


class Table1(DigitRecipe[Table1Config]):
    """Every column on every set with every seed, at the column's learning rate."""

    name = "table1"
    config_type = Table1Config
    table_type = Table

    def __init__(self, config: Table1Config, device: str = "cpu", choice: Choice | None = None) -> None:
        super().__init__(config, device)
        self.choice = stored_choice() if choice is None else choice

    def asked(self) -> dict[str, Any]:
        """Columns, sets, schedule, learning rates, strengths of the sets, and the content of MNIST."""
        config, digits = self.config, self.digits
        return {
            "digits": digits.source, "sha256": digits.sha256, "columns": config.models, "sets": config.sets,
            "seeds": config.seeds, "images": config.images, "schedule": dataclasses.asdict(config.schedule),
            "batch": config.batch, "precision": config.wanted_precision, "curves": config.curves,
            "strengths": {name: LAYOUTS[name].strength for name in config.sets},
            "choice": choice_as_plain(self.choice, config.models),
        }  # fmt: skip

    def jobs(self, outcomes: Mapping[Job, Outcome]) -> list[Job]:
        """One for every column, set and seed; a seed is the same in every column."""
        return [
            trial_job(column, name, seed, self.choice[column][digits_of(name)])
            for column in self.config.models
            for name in self.config.sets
            for seed in range(self.config.seeds)
        ]

    def judges_epochs(self, jobs: Sequence[Job]) -> bool:
        """As the config says."""
        return self.config.curves

    def result(self, folder: "RunFolder") -> Table:
        """The table, as JSON."""
        table = table1_of(folder, outcomes_of(folder))
        save(table, folder.path / "table1.json")
        return table

    @classmethod
    def so_far(cls, folder: "RunFolder", outcomes: Mapping[Job, Outcome]) -> dict[str, Callable[[], Any]]:
        """The table, and losses by epoch where they were asked for."""
        return {"table1": lambda: table1_of(folder, outcomes), "curves": lambda: _curves(outcomes)}

    def shown(self, result: Table, width: int) -> "list[RenderableType]":
        """The table, and what it says."""
        from rich.text import Text

        spent = "; ".join(f"{phase} {minutes:.3g}" for phase, minutes in result.minutes.items())
        sentences = [text for text in result.deviations if text not in DEVIATIONS] + verdict(result)
        if len(result.sets) <= FEW:
            table: list[RenderableType] = [
                Text(result.title, style="bold"),
                long_table(result, width),
                Text(SIGNS, style="dim"),
                Text(),
            ]
        else:
            table = [Text.from_ansi(as_text(result, width=width, styled=True))]
        return [*table, *sentences, f"Minutes: {spent}."]


def table1_of(folder: "RunFolder", outcomes: Mapping[Job, Outcome]) -> Table:
    """The table of a run, also before its end; what is missing is not run."""
    asked = folder.recipe
    columns, sets = list(asked["columns"]), list(asked["sets"])
    by_cell: dict[tuple[str, str], list[Outcome]] = {}
    for job in sorted(outcomes, key=lambda job: (columns.index(job.network), sets.index(job.data), job.seed)):
        by_cell.setdefault((job.data, job.network), []).append(outcomes[job])
    starts, schedule = folder.read("environment"), asked["schedule"]
    epochs = f"{schedule['epochs']} epoch{'s' if schedule['epochs'] > 1 else ''}"
    protocol = {
        "digits": str(asked["digits"]),
        "schedule": f"{epochs}, batch {asked['batch']}, "
        f"warm-up over {schedule['warmup']} step{'' if schedule['warmup'] == 1 else 's'}, rate times "
        f"{schedule['factor']:g} after {' and '.join(f'{100 * drop:.0f} %' for drop in schedule['drops']) or 'none'}",
        "precision": asked["precision"] or "bfloat16 on a GPU, float32 on a CPU",
        "learning rates": "chosen on digits of the training set by the same trials for every column",
        "controls": f"{', '.join(CONTROLS)}: networks with DCL-A2's weights, not in the paper",
    }
    machines = dict.fromkeys(start["gpu"] or f"CPU, {start['cpus']} cores" for start in starts)
    table = Table(
        "Table 1: multi-digit numbers", tuple(_cell(group) for group in by_cell.values()), protocol,
        "; ".join(machines), starts[-1]["versions"] if starts else {}, _phases(folder, outcomes),
        starts[0]["command"] if starts else "", DEVIATIONS,
    )  # fmt: skip
    return as_trial(table, _departures(asked))


def _curves(outcomes: Mapping[Job, Outcome]) -> dict[str, Any]:
    """Losses by epoch on the set whose curves the paper shows."""
    series: dict[str, dict[str, list[Any]]] = {}
    for job, outcome in outcomes.items():
        curves = outcome.extra.get("curves")
        if curves and job.data == CURVES_OF and job.network != "oracle":
            runs = series.setdefault(job.network, {"train_loss": [], "test_loss": []})
            for kind, by_epoch in curves.items():
                runs[kind].append(by_epoch)
    return {"set": CURVES_OF, "series": series} if series else {}


def _cell(group: Sequence[Outcome]) -> Cell:
    job = group[0].job
    paper = TABLE1[job.data].get(job.network)
    losses = [tuple(getattr(o, name) for o in group) for name in ("train_loss", "test_loss")]
    # There is no loss to average of a network that diverged.
    train, test = (values if all(map(math.isfinite, values)) else None for values in losses)
    networks = digits_of(job.data) if job.network == "oracle" else 1
    return Cell(
        job.data, job.network, tuple(o.error for o in group), tuple(o.job.seed for o in group),
        weights(job.network, classes_of(job)) * networks,
        None if paper is None else paper.mean, None if paper is None else paper.std,
        train, test, tuple(o.job.seed for o in group if o.stopped is not None), job.network == "baseline",
        sum(o.seconds for o in group) / 60 or None,
    )  # fmt: skip


def _phases(folder: "RunFolder", outcomes: Mapping[Job, Outcome]) -> dict[str, float]:
    """Minutes of the run, compiling apart from the rest; and of what was done once before it."""
    compiling = sum(outcome.compiling for outcome in outcomes.values()) / 60
    earlier = stored_minutes()
    phases = {"training and evaluation": max(0.0, minutes_of(folder) - compiling), "compiling": compiling}
    if folder.recipe.get("choice") == choice_as_plain(stored_choice(), folder.recipe["columns"]):
        phases["search of learning rates, earlier on an H200"] = earlier["search"]
    phases["calibration of the sets, earlier on an H200"] = earlier["calibration"]
    return {phase: minutes for phase, minutes in phases.items() if minutes}


def _departures(asked: Mapping[str, Any]) -> list[str]:
    """What a run does otherwise than the protocol, in sentences; none where it follows it."""
    sentences = []
    if asked["images"]:
        train, test = asked["images"]
        sentences.append(f"Only the first {train:,} images of a set to train on and {test:,} to test with.")
    epochs = asked["schedule"]["epochs"]
    if epochs != SCHEDULE.epochs:
        count = f"{epochs} epoch{'s' if epochs > 1 else ''}"
        sentences.append(f"Trained for {count}, while the learning rates were chosen for {SCHEDULE.epochs}.")
    if str(asked["digits"]).startswith("the embedded"):
        sentences.append(
            "Written with an excerpt of MNIST, while how difficult the sets are was fitted with all of it."
        )
    return sentences


def command_for(asked: Mapping[str, Any], sets: Sequence[str], columns: Sequence[str], seeds: int | None = None) -> str:
    """The command that repeats a part of the table, with every setting in which its run was not the protocol's.

    Args:
        asked: What the run folder keeps; empty for the protocol.
        sets: Which.
        columns: Which.
        seeds: How many; None for as many as the run asked for.
    """
    words = ["dcl", "run", "table1", "--sets", ",".join(name.removeprefix("MNIST-") for name in sets)]
    words += ["--models", ",".join(columns)]
    words += ["--seeds", str(asked.get("seeds", 5) if seeds is None else seeds)]
    settings: dict[str, str] = {}
    if asked:
        schedule = asked["schedule"]
        if schedule["epochs"] != SCHEDULE.epochs:
            words += ["--epochs", str(schedule["epochs"])]
        if str(asked["digits"]).startswith("the embedded"):
            words += ["--data", "excerpt"]
        if schedule["warmup"] != SCHEDULE.warmup:
            settings["warmup"] = str(schedule["warmup"])
        if tuple(schedule["drops"]) != SCHEDULE.drops:
            settings["drops"] = ",".join(f"{drop:g}" for drop in schedule["drops"])
        if schedule["factor"] != SCHEDULE.factor:
            settings["factor"] = f"{schedule['factor']:g}"
        if asked["batch"] != BATCH:
            settings["batch"] = str(asked["batch"])
        if asked["precision"] is not None:
            settings["precision"] = asked["precision"]
        if asked["images"]:
            settings["train_images"], settings["test_images"] = map(str, asked["images"])
    for key, value in settings.items():
        words += ["--set", f"{key}={value}"]
    return shlex.join(words)
