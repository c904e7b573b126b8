"""Questions about six shapes (Sort-of-CLEVR): units of equal weights in the first layer of the paper's CNN+MLP.

The network is the CNN+MLP of Santoro et al. 2017: four convolutions with batch norm, then eight hidden layers whose
first one sees the image and the question. It is that layer which is replaced. `docs/protocol.md` has what is fixed.

The order is the protocol. Every unit tries the same learning rates with one seed that the result does not use, judged
with images that are drawn for that alone. Then it trains with the result's seeds at its rate, and test images are used
once.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torch_dcl.convert import convert_, plan
from torch_dcl.data.sort_of_clevr import ANSWERS, BITS, SIDE, SortOfClevr, generate_sort_of_clevr
from torch_dcl.experiments.natural_data import training_memory
from torch_dcl.experiments.protocol import (
    Estimate,
    Job,
    Labelled,
    Outcome,
    Recipe,
    Trained,
    TrainingConfig,
    Workload,
    content_hash,
    measure_speed,
)
from torch_dcl.experiments.runner import minutes_of, outcomes_of
from torch_dcl.experiments.settings import SettingError, setting
from torch_dcl.experiments.stats import compare_units, mean, mean_std_n
from torch_dcl.experiments.table import MARK, Grid, Line
from torch_dcl.experiments.unit_recipe import UnitRecipe, check_units
from torch_dcl.fleet import Fleet, Member, Schedule
from torch_dcl.models import count_weights
from torch_dcl.models.controls import SummedLinear
from torch_dcl.models.rivals import GatedLinear

if TYPE_CHECKING:
    from rich.console import RenderableType

    from torch_dcl.fleet.run_folder import RunFolder

__all__ = ["UNITS", "QuestionNet", "SortOfClevrConfig", "SortOfClevrRecipe", "build_network"]

UNITS = {
    "plain": "the layer as it is, with more weights than the others",
    "narrow": "the layer with fewer filters",
    "low-rank": "one branch: relu(W·θ·x)",
    "summed": "two branches averaged",
    "glu": "a branch times the sigmoid of the other",
    "dcl": "two branches, the root of their product",
}
PUBLISHED = {"CNN+MLP": "about 63 % right", "CNN+RN": "above 94 % right"}
"""What Santoro et al. 2017 report for relational questions."""
KERNELS, HIDDEN = (32, 64, 128, 256), (2000, 2000, 2000, 2000, 2000, 1000, 500, 100)
SORTS = ("relational", "not relational")
DATA, DCL = "questions", "dcl"


@dataclasses.dataclass(frozen=True)
class SortOfClevrConfig(TrainingConfig):
    """The settings of Sort-of-CLEVR; the defaults are the protocol."""

    units: tuple[str, ...] = setting(
        tuple(UNITS), "what stands in place of the first fully-connected layer; dcl and a control must be among them",
        choices=tuple(UNITS), what="unit",
    )  # fmt: skip
    rates: tuple[float, ...] = setting(
        (0.005, 0.01, 0.02, 0.04), "learning rates to try, the same for every unit", smoke=(0.02,), above=0, most=1e6
    )
    seeds: int = setting(3, "networks of each unit", smoke=2, least=1, most=1000)
    images: int = setting(9_800, "images to train on, each with 20 questions", smoke=10, least=1, most=1_000_000)
    test_images: int = setting(1_000, "images to judge with", smoke=5, least=1, most=1_000_000)
    epochs: int = setting(20, "passes over all questions", smoke=1, least=1, most=1_000_000)
    batch: int = setting(64, "questions of a step", smoke=20, least=1, most=100_000)
    share: float = setting(0.2, "filters of one of DCL's two branches, as a fraction of the layer's", above=0, most=0.5)
    size: float = setting(
        1.0, "kernels and units of every layer, as a fraction of the paper's", smoke=0.05, above=0, most=1
    )
    clip: float = setting(1.0, "the largest norm of a gradient; larger ones are scaled down", above=0)
    most: int = setting(12, "networks that train at a time on a GPU", least=1, most=100_000, machine=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "rates", tuple(sorted(set(self.rates))))
        check_units(self.units, tuple(UNITS))
        if self.batch > 20 * self.images:
            raise SettingError(
                f"batch is {self.batch:,}, more than the {20 * self.images:,} questions of {self.images:,} images; "
                f"give at most that, such as --set batch={20 * self.images}"
            )


class QuestionNet(nn.Module):
    """The CNN+MLP of Santoro et al. 2017 on images with their question in the last row.

    Four convolutions (3 × 3, stride 2, batch norm, ReLU) and the hidden layers `HIDDEN`; the first sees the flattened
    image and the bits of the question. Kernel size, stride and the start (He's) are ours, and so is the factor on the
    bits, with which the question moves the first hidden layer as much as the image does at the start. Three bits of 1
    among thousands of values are hardly heard: SGD then takes long to use the question at all.

    Args:
        hidden: Units of the hidden layers.
        kernels: Of the convolutions.
    """

    input_size = (3, SIDE + 1, SIDE)

    def __init__(self, hidden: Sequence[int] = HIDDEN, kernels: Sequence[int] = KERNELS) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in zip((3, *kernels), kernels, strict=False):
            layers += [nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        self.convolutions = nn.Sequential(*layers)
        side = SIDE
        for _ in kernels:
            side = (side + 1) // 2
        features = kernels[-1] * side**2
        self.loudness = math.sqrt(features / 6)  # features have a mean square of 1/2, and three bits are set
        self.fc1 = nn.Linear(features + BITS, hidden[0])
        self.relu1 = nn.ReLU()
        rest: list[nn.Module] = []
        for before, after in pairwise(hidden):
            rest += [nn.Linear(before, after), nn.ReLU()]
        self.rest = nn.Sequential(*rest, nn.Linear(hidden[-1], len(ANSWERS)))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.normal_(module.weight, std=math.sqrt(2 / module.weight[0].numel()))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, 3, 76, 75]``, from 0 to 1, to logits of the answers."""
        seen, asked = self.convolutions(x[:, :, :SIDE]).flatten(1), self.loudness * x[:, 0, SIDE, :BITS]
        logits: Tensor = self.rest(self.relu1(self.fc1(torch.cat((seen, asked), 1))))
        return logits


def build_network(unit: str, seed: int, *, share: float = 0.2, size: float = 1.0) -> QuestionNet:
    """A network of a unit, started from a seed; all but the replaced layer starts alike.

    Every unit starts at the scale of the layer that it replaces: the mean square of its output, on white inputs.

    Args:
        unit: One of `UNITS`.
        seed: What the start is drawn from; torch's own generator is left as it was.
        share: Filters of one of DCL's two branches as a fraction of the layer's: the budget of all units but the plain.
        size: Kernels and units as a fraction of the paper's.
    """
    kernels, hidden = ([max(1, round(size * n)) for n in of] for of in (KERNELS, HIDDEN))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = QuestionNet(hidden, kernels)
        K1, K2 = model.fc1.in_features, model.fc1.out_features
        M = max(1, round(share * K2))
        if unit in ("dcl", "low-rank"):
            given: dict[str, Any] = (
                {"branches": 2, "width": M} if unit == "dcl" else {"branches": 1, "width": 2 * M, "eps": 0.0}
            )
            planned = plan(model, model.input_size, **given).only("fc1", force=True)
            torch.default_generator.manual_seed(seed + 1_000_000)  # planning draws an example
            convert_(model, planned, init="random", match=True)
        elif unit == "narrow":
            filters = max(1, round((2 * M * (K1 + K2) + K2 * hidden[1]) / (K1 + hidden[1])))
            first, second = nn.Linear(K1, filters), nn.Linear(filters, hidden[1])
            for layer in (first, second):
                nn.init.normal_(layer.weight, std=math.sqrt(2 / layer.in_features))
                nn.init.zeros_(layer.bias)
            model.fc1, model.rest[0] = first, second
        elif unit in ("summed", "glu"):
            kind = SummedLinear if unit == "summed" else GatedLinear
            fresh = kind(K1, K2, branches=2, width=M)
            _match(fresh, M if unit == "glu" else 2 * M)
            model.fc1 = fresh  # type: ignore[assignment]
            if unit == "glu":
                model.relu1 = nn.Identity()  # type: ignore[assignment]
        elif unit != "plain":
            raise ValueError(f"there is no unit {unit!r}; the units are {', '.join(UNITS)}")
    return model


@torch.no_grad()
def _match(layer: SummedLinear | GatedLinear, rows: int) -> None:
    """Scale the first rows of stage 2, in which z is linear, so that z has the mean square of He's ReLU layer: 1."""
    z = layer(torch.randn(256, layer.branch.weight.shape[1]))
    layer.fusion.weight[:rows] /= float(z.square().mean().sqrt())


class SortOfClevrRecipe(UnitRecipe[SortOfClevrConfig]):
    """Every unit: trials of learning rates, then all seeds."""

    name = "sort-of-clevr"
    config_type = SortOfClevrConfig
    every = 300.0  # a checkpoint of twelve networks has 3 GB
    sets: dict[str, SortOfClevr]

    def prepare(self, report: Callable[[str], None]) -> None:
        """Draw the images."""
        config = self.config
        counts = {"train": config.images, "validation": config.test_images, "test": config.test_images}
        self.sets = {split: generate_sort_of_clevr(n, split, device=self.device) for split, n in counts.items()}
        self._pairs: dict[str, Labelled] = {}
        report(f"{config.images:,} images to train on, each with 20 questions; {config.test_images:,} to judge with")

    def workloads(self) -> list[Workload]:
        """Trials and seeds of every unit; an image is one for each of its questions."""
        config = self.config
        networks = len(config.units) * (len(config.rates) + config.seeds)
        return [Workload("CNN+MLP", DATA, networks, 20 * config.images, config.epochs)]

    def about(self, loads: Sequence[Workload]) -> Estimate:
        """What is compared."""
        words = f"{self.name}: {', '.join(self.config.units)}; assumes that all are as fast as dcl"
        return Estimate({"recipe": words}, {"units": self.config.units})

    def speed(self, network: str, loads: Sequence[Workload]) -> tuple[float, str]:
        """Measured on a few images."""
        config, on_gpu = self.config, self.device.startswith("cuda")
        images = -(-config.batch * (20 if on_gpu else 1) // 20)
        trial = SortOfClevrRecipe(dataclasses.replace(config, images=images, test_images=1, epochs=2), self.device)
        trial.prepare(lambda _: None)
        jobs = [trial.job(DCL, seed, config.rates[0]) for seed in range(4 if on_gpu else 1)]
        return measure_speed(trial.fleet(jobs), 20 * images // config.batch * config.batch)

    def memory(self, loads: Sequence[Workload]) -> float:
        config = self.config
        sample = torch.zeros(1, 3, SIDE + 1, SIDE).expand(config.batch, -1, -1, -1)
        number = 2 if self.device.startswith("cuda") and config.precision in ("auto", "bfloat16") else 4
        model = build_network(DCL, 0, share=config.share, size=config.size)
        return training_memory(model, sample, self.at_once, self.at_once, number)

    def asked(self) -> dict[str, Any]:
        """All settings but those of the machine, and the content of the sets."""
        return {**super().asked(), "sha256": content_hash(part for each in self.sets.values() for part in each)}

    def group(self, job: Job) -> Hashable:
        """Every network is a fleet of its own, and on a GPU several train concurrently.

        A batch of 64 takes as long as reading and writing the weights. A fleet of several would copy their gradients
        side by side, and its networks would wait for each other at every step.
        """
        return job

    def fleet(self, jobs: Sequence[Job]) -> Fleet:
        """The networks of a unit."""
        config = self.config
        schedule = Schedule(config.epochs, 300 if config.images >= 1000 else 0, (0.6, 0.9))
        members = [
            Member(f"{job.network} {job.lr:g} {job.seed}", DATA, job.seed, job.lr, schedule, 1e-4, config.clip)
            for job in jobs
        ]
        networks = [build_network(job.network, job.seed, share=config.share, size=config.size) for job in jobs]
        return Fleet(
            networks, members, {DATA: self._asked_about("train")}, batch=config.batch,
            precision=config.wanted_precision, device=self.device, stacked=False, streams=len(jobs),
        )  # fmt: skip

    def judge(self, jobs: Sequence[Job]) -> Mapping[str, Labelled]:
        """In a trial images that are drawn for it, otherwise test images."""
        return {DATA: self._asked_about(_split(jobs))}

    def _asked_about(self, split: str) -> Labelled:
        if split not in self._pairs:
            self._pairs[split] = self.sets[split].pairs()
        return self._pairs[split]

    def outcomes(self, jobs: Sequence[Job], trained: Trained) -> list[Outcome]:
        """Errors of all questions, and of the relational ones and the others by themselves."""
        split = _split(jobs)
        wrong = trained.evaluation.predictions.cpu() != self._asked_about(split)[1].cpu()
        relational = self.sets[split].relational.flatten().cpu()
        errors = [100 * wrong[:, which].double().mean(1) for which in (relational, ~relational)]
        return [
            dataclasses.replace(outcome, extra={sort: float(e[row]) for sort, e in zip(SORTS, errors, strict=True)})
            for row, outcome in enumerate(super().outcomes(jobs, trained))
        ]

    def result(self, folder: "RunFolder") -> dict[str, Any]:
        """Errors, weights and rates of every unit as JSON."""
        config, outcomes = self.config, outcomes_of(folder)
        rows = self.rows(outcomes, SORTS)
        for row in rows:
            network = build_network(row["unit"], 0, share=config.share, size=config.size)
            row |= {"what": UNITS[row["unit"]], "weights": count_weights(network)}
        default = SortOfClevrConfig()
        asked = Recipe.asked(self)
        other = [f"{name} = {value}" for name, value in asked.items() if value != getattr(default, name)]
        told = [f"Not as docs/protocol.md says: {'; '.join(other)}."] if other else []
        result = {
            "title": f"Sort-of-CLEVR{MARK if other else ''}", "told": told + self.diverged(outcomes), "units": rows,
            "published": PUBLISHED,
            "minutes": minutes_of(folder), "environment": folder.read("environment")[-1],
        }  # fmt: skip
        folder.write_json("sort-of-clevr", result)
        return result

    def shown(self, result: dict[str, Any], width: int) -> "list[RenderableType]":
        """Every unit, and the answer."""
        from rich.text import Text

        compared, lines = compare_units(result["units"], DCL), []
        for row in result["units"]:
            gaps = [compared.get((row["unit"], sort)) for sort in SORTS]
            texts = (
                row["unit"], *(mean_std_n(row["errors"][sort]) for sort in SORTS),
                *("" if each is None else f"{each.gap}{each.sign}" for each in gaps), f"{row['weights']:,}",
                f"{row['chosen']:g}{' edge' if row['at_edge'] else ''}",
            )  # fmt: skip
            lines.append(Line(texts, "bold" if row["unit"] == DCL else ""))
        gaps_of = [f"{sort}: difference to DCL (95 % CI)" for sort in SORTS]
        heads = ("<unit", *(f"{sort} error %" for sort in SORTS), *gaps_of, "weights", "rate")
        published = ", ".join(f"{name} {words}" for name, words in result["published"].items())
        said = [*result["told"], answer(result), f"Published, relational questions: {published} (Santoro et al. 2017)."]
        return [
            Text(result["title"], style="bold"),
            Grid(heads, lines, ("weights", *reversed(gaps_of))).as_rich(width),
            *said,
        ]


def answer(result: Mapping[str, Any]) -> str:
    """The answer in one sentence."""
    compared = compare_units(result["units"], DCL)
    controls = [row["unit"] for row in result["units"] if row["unit"] not in (DCL, "plain")]
    signs = [compared[unit, SORTS[0]].sign for unit in controls if (unit, SORTS[0]) in compared]
    if not signs:
        return "One seed, or no control, cannot say whether DCL errs less than units of equal weights."
    rows = {row["unit"]: mean(row["errors"][SORTS[0]]) for row in result["units"]}
    best = min(rows, key=lambda unit: rows[unit])
    n = len(result["units"][0]["errors"][SORTS[0]])
    return (
        f"On relational questions DCL errs clearly less than {signs.count('▴')} of {len(signs)} units of equal weights "
        f"and clearly more than {signs.count('▾')} (n = {n} seeds, paired t-tests, Holm, 5 %); the lowest mean error "
        f"is that of {best}, {rows[best]:.2f} %, and DCL's is {rows[DCL]:.2f} %."
    )


def _split(jobs: Sequence[Job]) -> str:
    return "validation" if jobs[0].phase == "choose" else "test"
