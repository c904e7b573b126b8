"""Where a product may win: labels that are relations of two digits, with few and with many images.

The sets are two-digit numbers; only the labels change from task to task. A LeNet's first fully-connected layer is
replaced, and all columns but the plain one have DCL-A2's weights. `docs/protocol.md` has the hypotheses and the tests.

The order is the protocol. For every task, size and column the learning rate is chosen by validation error: networks
train on images written with five sixths of MNIST's training digits and are judged with the others. Then networks with
other seeds train on images written with all training digits, and the test digits are used once. Every seed has images
of its own, the same for all columns, and every training takes the same number of steps whatever its number of images.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from torch_dcl.data.relations import TASKS, label_pairs
from torch_dcl.experiments import columns
from torch_dcl.experiments.digits import IMAGES, PER_NETWORK, SCHEDULE, DigitConfig, DigitRecipe
from torch_dcl.experiments.protocol import Estimate, Job, Labelled, Outcome, Recipe, Trained, Workload
from torch_dcl.experiments.relation_findings import CONTROLS, DCL, answer, compare_cells, details, judge_hypotheses
from torch_dcl.experiments.runner import minutes_of, outcomes_of
from torch_dcl.experiments.settings import SettingError, setting, settings_of
from torch_dcl.experiments.stats import mean, mean_std_n, p_in_words
from torch_dcl.experiments.table import MARK, Grid, Line
from torch_dcl.fleet import Fleet, Member, Schedule
from torch_dcl.layers import DCLLinear
from torch_dcl.models import count_weights, lenet
from torch_dcl.models.power_mean import PowerMeanLinear
from torch_dcl.models.rivals import GatedLinear, SortLinear

if TYPE_CHECKING:
    from rich.console import RenderableType

    from torch_dcl.fleet.run_folder import RunFolder

__all__ = ["COLUMNS", "EXTRAS", "Relations", "RelationsConfig", "build_column", "cells_grid"]

SET = "MNIST-II-05"
CORE = ("number", "order", "sum")
SIZES = (6_000, 20_000, 60_000)
RATES = (0.03, 0.04, 0.053, 0.071, 0.095, 0.126, 0.169, 0.225)
FIRST_SEARCH_SEED = 1000
COLUMNS = {
    "plain": "the layer as it is, with more weights than the others",
    "narrow": "the layer with fewer filters",
    "low-rank": "one branch: relu(W·θ·x)",
    "summed": "two branches averaged",
    "A2": "two branches, the root of their product",
    "power-0": "two branches, a learned power mean that starts as a product (p = 0)",
    "power-1": "two branches, a learned power mean that starts as a sum (p = 1)",
}
"""What replaces the first fully-connected layer."""
EXTRAS = {
    "A3S": "three branches of a third of the filters, one pair of them a step (201 filters in all, one more than A2)",
    "GLU": "a branch times the sigmoid of the other, without a ReLU behind it",
    "SORT": "the sum of two branches and the root of their product",
}
"""Further columns of DCL-A2's weights, beside the protocol."""


@dataclasses.dataclass(frozen=True)
class RelationsConfig(DigitConfig):
    """The settings of the relations; the defaults are the protocol."""

    tasks: tuple[str, ...] = setting(
        CORE, "what to ask about two digits", choices=tuple(TASKS), what="task", smoke=("sum",)
    )
    sizes: tuple[int, ...] = setting(SIZES, "numbers of images to train on", smoke=(100, 200), least=1)
    models: tuple[str, ...] = setting(
        tuple(COLUMNS), "which columns; DCL-A2 and its three controls must be among them",
        choices=(*COLUMNS, *EXTRAS), what="model", prefix="DCL-",
    )  # fmt: skip
    rates: tuple[float, ...] = setting(
        RATES, "learning rates to try, the same for every column", smoke=(0.04, 0.095), above=0, most=1e6
    )
    search_seeds: int = setting(2, "networks of each learning rate", smoke=1, least=1, most=1000)
    seeds: int = setting(20, "networks of each column with the chosen rate", smoke=2, least=1, most=1000)
    block: int = setting(
        10, "seeds of a column that train at a time; all columns train these before the next ones", least=1, most=1000,
        machine=True,
    )  # fmt: skip
    clip: float = setting(1.0, "the largest norm of a gradient; larger ones are scaled down", above=0)
    train_images: int = setting(60_000, "images of a whole set", smoke=200, least=1, most=60_000)
    epochs: int = setting(
        SCHEDULE.epochs, "passes over a whole set; fewer images are passed over as many steps", smoke=1, least=1,
        most=1_000_000,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "sizes", tuple(sorted(set(self.sizes))))
        object.__setattr__(self, "rates", tuple(sorted(set(self.rates))))
        if self.sizes[-1] > self.train_images:
            raise SettingError(
                f"sizes has {self.sizes[-1]:,}, more than the {self.train_images:,} images of the set; "
                f"give at most that, such as --set sizes={self.train_images}"
            )
        if self.sizes[0] < self.batch:
            raise SettingError(f"sizes has {self.sizes[0]:,}, less than one batch; give at least {self.batch}")
        missing = [name for name in (*CONTROLS, DCL) if name not in self.models]
        if missing:
            needed = ",".join(name for name in (*COLUMNS, *EXTRAS) if name in (*self.models, *CONTROLS, DCL))
            raise SettingError(
                f"models lacks {', '.join(missing)}: no column stands without DCL-A2 and controls of its weights; "
                f"give --models {needed}"
            )

    def epochs_of(self, images: int) -> int:
        """The passes over this many images that take as many steps as ``epochs`` over the whole set."""
        return max(1, round(self.epochs * (self.train_images // self.batch) / (images // self.batch)))


class Relations(DigitRecipe[RelationsConfig]):
    """Every column on every task with every number of images: trials of learning rates, then all seeds."""

    name = "relations"
    unit = "trainings"
    config_type = RelationsConfig
    every = 300.0  # fleets that train at a time end within a minute or two, and their checkpoints have some 300 MB

    # Jobs

    def jobs(self, outcomes: Mapping[Job, Outcome]) -> list[Job]:
        """The trials; and when they are done, all seeds at the rate that each cell takes."""
        trials = [job for cell in self.places() for job in self._trials(*cell)]
        if any(job not in outcomes for job in trials):
            return trials
        return trials + self._reports(lambda *cell: self._chosen(outcomes, *cell))

    def planned(self) -> list[Job]:
        """All jobs, with the first rate instead of the chosen one."""
        return self.jobs({}) + self._reports(lambda *_: self.config.rates[0])

    def places(self) -> Iterator[tuple[int, str, str]]:
        """Images, task and column of every cell."""
        config = self.config
        return ((size, task, name) for size in config.sizes for task in config.tasks for name in config.models)

    def _trials(self, images: int, task: str, column: str) -> list[Job]:
        seeds = range(FIRST_SEARCH_SEED, FIRST_SEARCH_SEED + self.config.search_seeds)
        return [_job(images, task, column, seed, lr, "choose") for lr in self.config.rates for seed in seeds]

    def _reports(self, rate_of: Callable[[int, str, str], float]) -> list[Job]:
        """All seeds, in blocks: a run that ends early has the same seeds in every cell, but for the last block."""
        seeds = range(self.config.seeds)
        blocks = [seeds[start : start + self.config.block] for start in seeds[:: self.config.block]]
        return [
            _job(*cell, seed, rate_of(*cell), "report") for block in blocks for cell in self.places() for seed in block
        ]

    def _chosen(self, outcomes: Mapping[Job, Outcome], images: int, task: str, column: str) -> float:
        errors = self._validation(outcomes, images, task, column)
        return min(errors, key=lambda lr: mean(errors[lr]))

    def _validation(
        self, outcomes: Mapping[Job, Outcome], images: int, task: str, column: str
    ) -> dict[float, list[float]]:
        """Errors on validation digits by learning rate, one for each search seed."""
        errors: dict[float, list[float]] = {}
        for job in self._trials(images, task, column):
            errors.setdefault(job.lr, []).append(outcomes[job].judged_error)
        return errors

    # Fleets

    def group(self, job: Job) -> Hashable:
        """A fleet has the networks of one cell; of its seeds, those of one block."""
        block = job.seed // self.config.block if job.phase == "report" else 0
        return job.phase, job.option("images"), job.data, job.network, block

    def concurrent(self, job: Job) -> Hashable:
        """Fleets of one phase and size have epochs of one length."""
        return job.phase, job.option("images")

    def describe(self, fleets: Sequence[Sequence[Job]]) -> str:
        """Trials or seeds, of which columns and tasks, with how many images."""
        aim = "learning rates of" if fleets[0][0].phase == "choose" else "seeds of"
        cells = ", ".join(f"{jobs[0].network} on {jobs[0].data}" for jobs in fleets)
        return f"{aim} {cells} with {fleets[0][0].option('images'):,.0f} images"

    def fleet(self, jobs: Sequence[Job]) -> Fleet:
        """The networks of a cell, each with the images of its seed. The exponent of a power mean does not decay."""
        config, first = self.config, jobs[0]
        schedule = Schedule(config.epochs_of(_images(first)), config.warmup, config.drops, config.factor)
        members = [
            Member(f"{job.network} {job.lr:g}", self.set_of(job), job.seed, job.lr, schedule, clip=config.clip)
            for job in jobs
        ]
        return Fleet(
            [build_column(job.network, TASKS[job.data].classes, job.seed) for job in jobs], members,
            self.labelled(jobs, "train"), batch=config.batch, precision=config.wanted_precision, device=self.device,
            factors=lambda name: (1.0, 0.0 if name.endswith("raw_exponent") else 1.0),
        )  # fmt: skip

    def written(self) -> tuple[int, int]:
        """As many as the largest size; a smaller one is their beginning."""
        return self.config.sizes[-1], self.config.test_images or IMAGES[1]

    def set_of(self, job: Job) -> str:
        """Every seed has images of its own, the same for all tasks and columns."""
        return f"{SET}/{job.seed}"

    def labelled(self, jobs: Sequence[Job], part: Literal["train", "judge"]) -> dict[str, Labelled]:
        """The first images of every seed, labelled with the answers of the task."""
        most = _images(jobs[0]) if part == "train" else None
        sets = super().labelled(jobs, part).items()
        return {name: (images[:most], label_pairs(jobs[0].data, numbers[:most])) for name, (images, numbers) in sets}

    def outcomes(self, jobs: Sequence[Job], trained: Trained) -> list[Outcome]:
        """Errors, and where the exponent of a power mean ended."""
        outcomes = Recipe.outcomes(self, jobs, trained)
        if not jobs[0].network.startswith("power"):
            return outcomes
        layers: list[Any] = [trained.fleet.network(row).fc1 for row in range(len(jobs))]
        ended = [float(layer.exponent.detach()) for layer in layers]
        return [dataclasses.replace(o, extra={"exponent": p}) for o, p in zip(outcomes, ended, strict=True)]

    def about(self, loads: Sequence[Workload]) -> Estimate:
        """Tasks, images, columns, fleets and digits."""
        (words, plain), config = super().about(loads), self.config
        sizes = ", ".join(f"{images:,}" for images in config.sizes)
        cells = f"{', '.join(config.tasks)} with {sizes} images, {len(config.models)} columns"
        recipe = f"{self.name}: {cells}; {plain['entries']:,} {self.unit} of equal length"
        return Estimate({**words, "recipe": recipe}, plain)

    def memory(self, loads: Sequence[Workload]) -> float:
        """The networks of a fleet, and images: every fleet has a copy of its seeds' images."""
        config = self.config
        return config.most * PER_NETWORK + (config.most + config.seeds) * config.sizes[-1] * 28 * 28 / 2**30

    # Result

    def result(self, folder: "RunFolder") -> dict[str, Any]:
        result = relations_of(folder, outcomes_of(folder))
        folder.write_json("relations", result)
        return result

    @classmethod
    def so_far(cls, folder: "RunFolder", outcomes: Mapping[Job, Outcome]) -> dict[str, Callable[[], Any]]:
        return {"relations": lambda: relations_of(folder, outcomes)}

    def known_jobs(self, outcomes: Mapping[Job, Outcome]) -> dict[tuple[int, str, str], list[Job]]:
        """The jobs of each cell to show, whose rate is chosen: the same seeds for all columns of a task and a size."""
        jobs: dict[tuple[int, str, str], list[Job]] = {}
        seeds: dict[tuple[int, str], list[set[int]]] = {}
        for images, task, column in sorted(self.places(), key=lambda place: self.config.tasks.index(place[1])):
            if all(job in outcomes for job in self._trials(images, task, column)):
                lr = self._chosen(outcomes, images, task, column)
                of_cell = [_job(images, task, column, seed, lr, "report") for seed in range(self.config.seeds)]
                if there := [job for job in of_cell if job in outcomes]:
                    jobs[images, task, column] = there
                    seeds.setdefault((images, task), []).append({job.seed for job in there})
        common = {place: set.intersection(*of_place) for place, of_place in seeds.items()}
        return {
            cell: [job for job in of_cell if job.seed in common[cell[:2]]]
            for cell, of_cell in jobs.items()
            if common[cell[:2]]
        }

    def cell(
        self, outcomes: Mapping[Job, Outcome], jobs: Sequence[Job], images: int, task: str, column: str
    ) -> dict[str, Any]:
        """A cell as JSON has it, of these jobs."""
        config, lr, tried = self.config, jobs[0].lr, self._validation(outcomes, images, task, column)
        errors = [outcomes[job].judged_error for job in jobs]
        cell = {
            "task": task, "images": images, "column": column, "errors": errors,
            "failed": [job.seed for job, e in zip(jobs, errors, strict=True) if e >= TASKS[task].chance - 1],
            "weights": count_weights(build_column(column, TASKS[task].classes, 0)), "chosen": lr,
            "at_edge": len(tried) > 1 and lr in (config.rates[0], config.rates[-1]),
            "trials": {f"{rate:g}": values for rate, values in tried.items()},
        }  # fmt: skip
        if column.startswith("power"):
            cell["exponents"] = [outcomes[job].extra["exponent"] for job in jobs if outcomes[job].stopped is None]
        return cell

    def shown(self, result: dict[str, Any], width: int) -> "list[RenderableType]":
        from rich.text import Text

        return [
            Text(result["title"], style="bold"),
            cells_grid(result).as_rich(width),
            *result["told"],
            answer(result),
            *(f"{each.name}. {each.said}" for each in judge_hypotheses(result)),
            *details(result),
        ]


def relations_of(folder: "RunFolder", outcomes: Mapping[Job, Outcome]) -> dict[str, Any]:
    """The cells that are done, also before the end of a run; nothing where none is."""
    asked, rules = folder.recipe, settings_of(RelationsConfig)
    config = RelationsConfig(**{name: asked[name] for name, (_, rule) in rules.items() if not rule.machine})
    recipe = Relations(config)
    cells = [recipe.cell(outcomes, jobs, *place) for place, jobs in recipe.known_jobs(outcomes).items()]
    departures = _departures(config, str(asked["digits"]))
    done = f"Not at its end: {len(outcomes):,} of {recipe.total():,} {recipe.unit}."
    return {} if not cells else {
        "title": f"Relations of two digits{MARK if departures else ''}", "set": SET, "digits": asked["digits"],
        "told": [*([done] if len(outcomes) < recipe.total() else ()), *departures],
        "steps": config.epochs_of(config.sizes[-1]) * (config.sizes[-1] // config.batch), "cells": cells,
        "minutes": minutes_of(folder), "environment": folder.read("environment")[-1],
    }  # fmt: skip


def _departures(config: RelationsConfig, digits: str) -> list[str]:
    """How a run departs from the protocol, in sentences."""
    rules = settings_of(RelationsConfig)
    other = {name: getattr(config, name) for name, (_, rule) in rules.items() if not rule.machine}
    named = [f"{name} = {value}" for name, value in other.items() if value != rules[name][0] and name != "tasks"]
    sentences = [f"Not as docs/protocol.md says: {'; '.join(named)}."] if named else []
    if digits.startswith("the embedded"):
        sentences.append("Written with an excerpt of MNIST, not with all of it.")
    return sentences


def cells_grid(result: Mapping[str, Any]) -> Grid:
    """The cells as a grid."""
    compared = {(each.task, each.images, each.column): each for each in compare_cells(result)}
    lines = []
    for i, cell in enumerate(result["cells"]):
        each = compared.get((cell["task"], cell["images"], cell["column"]))
        is_last = i + 1 == len(result["cells"]) or result["cells"][i + 1]["task"] != cell["task"]
        failed = f" † {len(cell['failed'])}" if cell["failed"] else ""
        texts = (
            TASKS[cell["task"]].title, f"{cell['images']:,}", cell["column"], mean_std_n(cell["errors"]) + failed,
            "" if each is None else f"{each.gap}{each.sign}", "" if each is None else p_in_words(each.corrected),
            f"{cell['weights']:,}", f"{cell['chosen']:g}{' (edge)' if cell['at_edge'] else ''}",
        )  # fmt: skip
        lines.append(Line(texts, "bold" if cell["column"] == DCL else "", is_last))
    gap = "difference to DCL (95 % CI)"
    heads = ("<task", "images", "<column", "error % ± std (n)", gap, "p (Holm)", "weights", "rate")
    return Grid(heads, lines, ("weights", "p (Holm)", "rate", gap))


def _job(images: int, task: str, column: str, seed: int, lr: float, phase: str) -> Job:
    return Job(column, task, seed, lr, phase, (("images", float(images)),))


def _images(job: Job) -> int:
    return int(job.option("images"))


def build_column(column: str, classes: int, seed: int) -> torch.nn.Module:
    """A LeNet of one of `COLUMNS` or `EXTRAS`, started from a seed; the convolutions start alike in all columns."""
    if column not in _OWN:
        filters = 67 if column == "A3S" else None
        return columns.build("baseline" if column == "plain" else column, classes, seed, filters=filters)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = lenet(classes)
        kind, options = _OWN[column]
        model.fc1 = kind.like(model.fc1, branches=2, width=model.fc1.out_features // 5, **options)  # type: ignore[assignment]
        if kind is GatedLinear:
            model.relu3 = torch.nn.Identity()  # type: ignore[assignment]
    return model


_OWN: dict[str, tuple[type[DCLLinear], dict[str, Any]]] = {
    "power-0": (PowerMeanLinear, {"start": 0}),
    "power-1": (PowerMeanLinear, {"start": 1}),
    "GLU": (GatedLinear, {}),
    "SORT": (SortLinear, {}),
}
