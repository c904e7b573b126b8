"""DCL against its rivals on BigNet: test error against weights and against the time of a step.

The order is the protocol. Every unit goes through the same trials, learning rates with one seed that the chart does not
use, on training images alone: a tenth of them is held out to judge with. Each takes the rate with the lowest error
there. Then it is trained on all training images with the chart's seeds, and the test set is evaluated once.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dcl.data import Dataset
from torch_dcl.data.draws import draw
from torch_dcl.experiments.natural_data import NaturalConfig, NaturalRecipe, departures, read_sets, tensors_of
from torch_dcl.experiments.natural_networks import TITLES, TrainingRecipe, inputs_of, recipe_of
from torch_dcl.experiments.protocol import Job, Labelled, Outcome, RunFolder, Shown, Workload, content_hash
from torch_dcl.experiments.rival_layers import UNITS, build_unit, unit_weights
from torch_dcl.experiments.runner import outcomes_of
from torch_dcl.experiments.settings import setting
from torch_dcl.experiments.stats import Difference, Unlike, difference, holm, mean, mean_std_n, p_in_words
from torch_dcl.experiments.table import MARK, Grid, Line
from torch_dcl.experiments.unit_recipe import UnitRecipe
from torch_dcl.fleet import Fleet, Member

__all__ = [
    "Chart", "ChartConfig", "against_dcl", "budget_of", "chart_grid", "chart_verdict", "compare_layers", "hold_out",
    "lowest_first", "points_of", "rates_at_edge", "step_times",
]  # fmt: skip

DATA = ("cifar10", "cifar100")
RATES = (0.003, 0.01, 0.03)
Point = tuple[str, float]
"""A unit and its budget: filters of one of DCL's two branches as a fraction of the layer's."""


@dataclasses.dataclass(frozen=True)
class ChartConfig(NaturalConfig):
    """The settings of the chart."""

    data: str = setting("cifar10", "cifar10 or cifar100", choices=DATA, what="set")
    units: tuple[str, ...] = setting(
        tuple(UNITS), "what replaces BigNet's first fully-connected layer", choices=tuple(UNITS), what="unit",
        smoke=("plain", "low-rank", "dcl", "star"),
    )  # fmt: skip
    shares: tuple[float, ...] = setting(
        (0.25,), "budgets: filters of one of DCL's two branches, as a fraction of the layer's", above=0, most=0.5
    )
    rates: tuple[float, ...] = setting(
        RATES, "learning rates to try, the same for every unit", smoke=(0.01,), above=0, most=1e6
    )
    search_scale: float = setting(
        0.2, "the fraction of the epochs to train to choose a learning rate, also of a shortened recipe", smoke=1.0,
        above=0, most=1,
    )  # fmt: skip
    rounds: int = setting(5, "rounds whose median is the time of a step", smoke=1, least=1, most=10_000)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "shares", tuple(dict.fromkeys(self.shares)))
        object.__setattr__(self, "rates", tuple(dict.fromkeys(self.rates)))

    @property
    def trial_scale(self) -> float:
        """The fraction of the recipe's epochs that a trial trains."""
        return self.search_scale * self.scale

    @property
    def points(self) -> list[Point]:
        """Units and budgets."""
        return points_of(self.units, self.shares)


class Chart(UnitRecipe[ChartConfig], NaturalRecipe[ChartConfig]):
    """Every unit at every budget: trials to choose a learning rate, then all seeds at that rate."""

    name = "chart"
    config_type = ChartConfig
    data: Dataset
    whole: TrainingRecipe
    parted: tuple[Labelled, Labelled]

    def prepare(self, report: Callable[[str], None]) -> None:
        config = self.config
        sets, _ = read_sets([config.data], config, report)
        self.data, recipe = sets[config.data], recipe_of("bignet", config.data)
        self.whole = dataclasses.replace(recipe, batch=config.batch or recipe.batch)
        self.parted = hold_out(self.data)

    def workloads_on(self, name: str, images: int) -> list[Workload]:
        """The trials, and the seeds of every point."""
        config, whole, points = self.config, recipe_of("bignet", name), len(self.config.points)
        tried, epochs = (whole.scaled(scale).schedule.epochs for scale in (config.trial_scale, config.scale))
        trials = Workload("bignet", name, points * len(config.rates), images - images // 10, tried)
        return [trials, Workload("bignet", name, points * config.seeds, images, epochs)]

    def asked(self) -> dict[str, Any]:
        """Points, rates, the training recipe, and the content of the set."""
        config = self.config
        return {
            "data": self.data.source, "sha256": content_hash(tensors_of(self.data)),
            "points": [list(point) for point in config.points], "rates": list(config.rates), "seeds": config.seeds,
            "scale": config.scale, "search_scale": config.trial_scale, "images": config.images,
            "training": dataclasses.asdict(self.whole), "precision": config.wanted_precision,
            "compile": config.compile, "rounds": config.rounds, "average": config.average,
            "deterministic": config.deterministic,
        }  # fmt: skip

    @property
    def points(self) -> Sequence[Point]:
        return self.config.points

    def job(self, point: Point, seed: int, lr: float, phase: str = "report") -> Job:
        return Job(point[0], self.data.name, seed, lr, phase, (("share", point[1]),))

    def named(self, job: Job) -> str:
        return f"{job.network} at {job.option('share'):g}"

    def fleet(self, jobs: Sequence[Job]) -> Fleet:
        is_trial, data = jobs[0].phase == "choose", self.data
        train = self.parted[0] if is_trial else (data.train_images, data.train_labels)
        scale = self.config.trial_scale if is_trial else self.config.scale
        return _fleet(jobs, train, data, self.whole.scaled(scale), self.config, self.device)

    def judge(self, jobs: Sequence[Job]) -> Mapping[str, Labelled]:
        """For a trial the training images that were held out; otherwise the test set."""
        data = self.data
        test = (data.test_images, data.test_labels)
        return {data.name: self.parted[1] if jobs[0].phase == "choose" else test}

    def result(self, folder: RunFolder) -> dict[str, Any]:
        """The chart as JSON: errors, weights, time of a step and trials of each point."""
        config, outcomes = self.config, outcomes_of(folder)
        folder.log("measuring the time of a step")
        times = step_times(config.points, self.data, self.whole, config, self.device)
        rows = []
        for point in config.points:
            reports = self.reports(point, outcomes)
            rows.append(
                {
                    "unit": point[0], "share": point[1],
                    "weights": unit_weights(point[0], len(self.data.classes), point[1]), "lr": reports[0].lr,
                    "errors": [outcomes[job].judged_error for job in reports],
                    "seeds": list(range(config.seeds)), "step_ms": times[point],
                    "trials": {f"{job.lr:g}": outcomes[job].judged_error for job in self.trials(point)},
                    "what": UNITS[point[0]],
                }
            )  # fmt: skip
        chart = {"set": self.data.name, "points": rows, **self._described(folder, outcomes)}
        folder.write_json("chart", chart)
        return chart

    def _described(self, folder: RunFolder, outcomes: Mapping[Job, Outcome]) -> dict[str, Any]:
        """Title, deviations and settings of the chart."""
        config = self.config
        batches = [self.whole.batch] if config.batch else []
        sentences = departures([self.data.source], config.images, batches)
        if config.scale < 1:
            sentences.append(f"Shortened: the recipe was trained for {config.scale:g} of its epochs.")
        title = f"BigNet on {TITLES[config.data]}: error against weights and time of a step{MARK if sentences else ''}"
        return {
            "title": title, "told": sentences + self.diverged(outcomes), "scale": config.scale,
            "search_scale": config.trial_scale,
            "recipe": str(self.whole.scaled(config.scale)), "data": self.data.source,
            "environment": folder.read("environment")[-1],
        }  # fmt: skip

    def shown(self, result: dict[str, Any], width: int) -> Shown:
        from rich.text import Text

        said = [*result["told"], chart_verdict(result), *filter(None, [rates_at_edge(result)])]
        return [Text(result["title"], style="bold"), chart_grid(result).as_rich(width), *said]


def points_of(units: Sequence[str], shares: Sequence[float]) -> list[Point]:
    """Units and budgets; the plain layer is there once, since it has no budget."""
    return [(unit, share) for unit in units for share in (shares if unit != "plain" else shares[:1])]


def hold_out(data: Dataset) -> tuple[Labelled, Labelled]:
    """Split the training images: nine tenths of each class to train on, a tenth for validation.

    The hash of an image's place decides, so the split is always the same. Where no class has ten images, as in a trial,
    it is a tenth of all.
    """
    order = draw(0, "deciding validation", 0, torch.arange(len(data.train_labels))).argsort(stable=True)
    judged = torch.zeros(len(order), dtype=torch.bool)
    for label in range(len(data.classes)):
        of_class = order[data.train_labels[order] == label]
        judged[of_class[: len(of_class) // 10]] = True
    if not judged.any():
        if len(order) < 2:
            raise ValueError(f"{data.name} has no training image to spare; at least 2 are needed, one to judge with")
        judged[order[: max(1, len(order) // 10)]] = True
    images, labels = data.train_images, data.train_labels
    return (images[~judged], labels[~judged]), (images[judged], labels[judged])


def _fleet(
    jobs: Sequence[Job], train: tuple[Tensor, Tensor], data: Dataset, recipe: TrainingRecipe, config: NaturalConfig,
    device: str,
) -> Fleet:  # fmt: skip
    networks = [build_unit(j.network, len(data.classes), j.seed, share=j.option("share")) for j in jobs]
    members = [
        Member(f"{j.network} {j.lr:g} {j.seed}", data.name, j.seed, j.lr, recipe.schedule, recipe.weight_decay)
        for j in jobs
    ]
    return Fleet(
        networks, members, {data.name: train}, batch=recipe.batch, momentum=recipe.momentum,
        precision=config.wanted_precision, device=device, inputs=inputs_of("bignet", data, average=config.average),
        stacked=False, compile=config.compile, streams=config.streams, deterministic=config.deterministic,
    )  # fmt: skip


def step_times(
    points: Sequence[Point], data: Dataset, recipe: TrainingRecipe, config: ChartConfig, device: str = "cpu"
) -> dict[Point, float]:
    """Milliseconds of a training step of one network of each unit: the median of rounds, the units taking turns."""
    steps = min(len(data.train_labels) // recipe.batch, 100)
    some = (data.train_images[: steps * recipe.batch], data.train_labels[: steps * recipe.batch])
    schedule = dataclasses.replace(recipe.schedule, epochs=config.rounds + 1)
    short = dataclasses.replace(recipe, schedule=schedule)
    jobs = {
        point: Job(point[0], data.name, UnitRecipe.search_seed, recipe.lr, "time", (("share", point[1]),))
        for point in points
    }
    fleets = {point: _fleet([job], some, data, short, config, device) for point, job in jobs.items()}
    times: dict[Point, list[float]] = {point: [] for point in points}
    for turn in range(config.rounds + 1):
        for point, fleet in fleets.items():
            _synchronize(device)
            start = time.perf_counter()
            fleet.train(1)
            _synchronize(device)
            if turn:  # the first one captures, or compiles
                times[point].append(1000 * (time.perf_counter() - start) / steps)
    return {point: statistics.median(values) for point, values in times.items()}


def _synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


Row = Mapping[str, Any]
"""A point as JSON has it: its errors by seed, weights, time of a step, and the learning rates that were tried."""
_GUESSING = {"cifar10": 90.0, "cifar100": 99.0}
"""Chance-level error in percent."""


def lowest_first(chart: Mapping[str, Any]) -> list[Row]:
    """The points by rising mean error."""
    return sorted(chart["points"], key=lambda point: mean(point["errors"]))


def against_dcl(chart: Mapping[str, Any], point: Row) -> Difference | None:
    """The point's error minus that of DCL with two branches, on the same seeds; None where that cannot be compared.

    A layer is compared with DCL at its own budget; the plain one has none and is compared with the chart's first.
    """
    rivals = [p for p in chart["points"] if p["unit"] == "dcl"]
    if point["unit"] != "plain":
        rivals = [p for p in rivals if p["share"] == point["share"]]
    if not rivals or point["unit"] == "dcl" or any(_is_lost(chart, each) for each in (point, rivals[0])):
        return None
    runs = [dict(zip(each["seeds"], each["errors"], strict=True)) for each in (point, rivals[0])]
    return difference(*runs)


def compare_layers(chart: Mapping[str, Any]) -> list[tuple[Row, Unlike | None]]:
    """The points by rising mean error, each compared with DCL, corrected over all comparisons of the chart.

    None for DCL itself, and where one of both did not learn: that says nothing about the difference between two layers.
    """
    pairs = [(point, against_dcl(chart, point)) for point in lowest_first(chart)]
    values = iter(holm([gap.p for _, gap in pairs if gap is not None]))
    return [(point, None if gap is None else Unlike(gap, next(values))) for point, gap in pairs]


def _is_lost(chart: Mapping[str, Any], point: Row) -> bool:
    """Whether a layer errs as often as guessing does, to within a point."""
    return mean(point["errors"]) >= _GUESSING.get(chart.get("set", ""), 100.0) - 1


def chart_verdict(chart: Mapping[str, Any]) -> str:
    """The chart in a few sentences, losses of DCL as prominently as gains."""
    compared = compare_layers(chart)
    first = compared[0][0]
    sentences = [
        f"The lowest error is that of {first['unit']}: {mean(first['errors']):.2f} % (n = {len(first['errors'])})."
    ]
    plain = next((each for point, each in compared if point["unit"] == "plain" and each is not None), None)
    if plain is not None:
        sentences.append(f"The plain layer's error minus DCL's is {plain.gap}.")
    signs = [each.sign for point, each in compared if point["unit"] != "plain" and each is not None]
    if signs:
        sentences.append(
            f"Of {len(signs)} comparisons with a layer of the same budget on the same seeds, DCL with two branches "
            f"errs less in {signs.count('▴')} and more in {signs.count('▾')} (paired t-tests, Holm, 5 %)."
        )
    if lost := [point["unit"] for point, _ in compared if _is_lost(chart, point)]:
        sentences.append(
            f"Did not learn, err as often as guessing does ({_GUESSING.get(chart['set'], 100.0):g} %), and are not "
            f"counted: {', '.join(lost)}."
        )
    return " ".join(sentences)


def rates_at_edge(chart: Mapping[str, Any]) -> str | None:
    """Which layers took the smallest or the largest learning rate that was tried; None where none did."""
    ends: dict[float, list[str]] = {}
    for point in chart["points"]:
        rates = sorted(map(float, point["trials"]))
        if len(rates) > 1 and point["lr"] in (rates[0], rates[-1]):
            ends.setdefault(point["lr"], []).append(point["unit"])
    if not ends:
        return None
    chosen = "; ".join(f"{rate:g} for {', '.join(dict.fromkeys(units))}" for rate, units in sorted(ends.items()))
    return f"Chosen at the end of the learning rates that were tried: {chosen}. Beyond it they might do better still."


def chart_grid(chart: Mapping[str, Any]) -> Grid:
    """The points as a grid, the lowest error first."""
    lines = []
    for point, each in compare_layers(chart):
        step, failed = point["step_ms"], " failed" if _is_lost(chart, point) else ""
        texts = (
            point["unit"], budget_of(point), mean_std_n(point["errors"]) + failed,
            "" if each is None else f"{each.gap}{each.sign}", "" if each is None else p_in_words(each.corrected),
            f"{point['weights']:,}", f"{step:.{2 if step < 10 else 0}f}", f"{point['lr']:g}",
        )  # fmt: skip
        lines.append(Line(texts, note=point.get("what", "")))
    difference = "difference to DCL (95 % CI)"
    heads = ("<layer", "budget", "error % ± std (n)", difference, "p (Holm)", "weights", "step ms", "rate")
    return Grid(heads, lines, ("p (Holm)", difference, "rate", "budget", "weights"))


def budget_of(point: Row) -> str:
    """The budget of a point; the plain layer has none."""
    return "–" if point["unit"] == "plain" else f"{point['share']:g}"
