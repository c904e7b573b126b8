"""Recipes on multi-digit numbers: where MNIST is, the sets that are written with it, and how LeNets train on them.

To choose learning rates, and how difficult a set is, the digits of MNIST's training set are split: the first five
sixths make the training images, the last sixth the validation images, with another seed. The test digits are not used.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch

from torch_dcl.data._segments import read_digits
from torch_dcl.data.digits import SIZES, generate, segment, source
from torch_dcl.data.layouts import LAYOUTS, Layout
from torch_dcl.data.mnist import FILES, find_mnist
from torch_dcl.data.sources import places
from torch_dcl.experiments.columns import DECAY, MODELS, MORE, Trial, build, weights
from torch_dcl.experiments.paper_numbers import SETS
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
    finite,
    measure_speed,
)
from torch_dcl.experiments.runner import plan_fleets
from torch_dcl.experiments.settings import Setting, SettingError, check_batch, choose_names, reading_data, setting
from torch_dcl.fleet import Fleet, Member, Schedule
from torch_dcl.progress import say_about

__all__ = [
    "BATCH", "IMAGES", "SCHEDULE", "DigitConfig", "DigitRecipe", "Digits", "Purpose", "Sets", "classes_of", "digits_of",
    "find_digits", "make_sets", "read_mnist", "read_sets", "trial_job", "weights_of",
]  # fmt: skip

BATCH = 100
SCHEDULE = Schedule(epochs=24, warmup=300, drops=(0.6, 0.9), factor=0.1)
IMAGES = SIZES["train"], SIZES["test"]
H200 = 3.0e6  # images a second over the whole of Table 1, judging included: results/table1.json, 950 networks, 7.6 min
PER_NETWORK = 1.03 / 75  # GiB: results/fleet.csv, 75 networks, batch 100, 1,000 classes, DCL-A2, bfloat16
Purpose = Literal["choose", "report"]

# MNIST


class Digits(NamedTuple):
    """MNIST, or its excerpt."""

    train: Labelled
    test: Labelled
    source: str

    @property
    def sha256(self) -> str:
        """The hash of all digits and labels: a run identifies its data by content."""
        return content_hash([*self.train, *self.test])


def read_mnist(folder: str | os.PathLike[str] | None) -> Digits:
    """Read MNIST from a folder with its idx files; without one, the embedded excerpt."""
    with reading_data():
        return Digits(read_digits(folder, "train"), read_digits(folder, "test"), source(folder))


def find_digits(given: str | None) -> Path | None:
    """The folder with MNIST's idx files, given or ("auto", None) in the usual places; None for the embedded digits."""
    if given == "excerpt":
        return None
    if given in (None, "", "auto"):
        return next((folder for place in places() if (folder := find_mnist(place)) is not None), None)
    folder = find_mnist(Path(str(given)).expanduser())
    if folder is None:
        raise SettingError(
            f"{given} has no idx files of MNIST ({FILES['train'][0]}, gzipped or not, there or in MNIST/raw); "
            "leave the option out for the embedded excerpt"
        )
    return folder


# Sets


class Sets(NamedTuple):
    """Images and labels by name of the set."""

    train: dict[str, Labelled]
    judge: dict[str, Labelled]


def make_sets(
    digits: Digits,
    layouts: Sequence[str | Layout],
    purpose: Purpose,
    *,
    device: torch.device | str = "cpu",
    images: tuple[int, int] | None = None,
) -> Sets:
    """Generate training and evaluation sets, all of their images or the first ones.

    The purpose "choose" writes both with training digits alone, "report" writes the sets of the table.
    ``MNIST-II-01@0.5`` is a layout at another strength.
    """
    count, seed = len(digits.train[0]) * 5 // 6, 0
    parts = [digits.train, digits.test]
    if purpose == "choose":
        (images_of, labels), seed = digits.train, 1
        parts = [(images_of[:count], labels[:count]), (images_of[count:], labels[count:])]
    cut = [segment(part, split).to(torch.device(device)) for part, split in zip(parts, ("train", "test"), strict=True)]
    sets = Sets({}, {})
    for given in layouts:
        name, layout = (given, _layout(given)) if isinstance(given, str) else (given.name, given)
        for split, segments, into, most in zip(("train", "test"), cut, sets, images or (None, None), strict=True):
            indices = None if most is None else range(most)
            into[name] = generate(layout, split, seed=seed, device=device, mnist=segments, indices=indices)
    return sets


def _layout(name: str) -> Layout:
    """A layout by name, ``MNIST-II-01``, at another strength, ``…@0.5``, or with images of a seed's own, ``…/7``.

    Random numbers are drawn from a layout's name: another strength has the same digits, another seed has not.
    """
    (kind, _, seed), given = name.partition("/"), LAYOUTS[name.partition("/")[0].partition("@")[0]]
    strength = float(kind.partition("@")[2] or given.strength)
    return dataclasses.replace(given, strength=strength, name=f"{given.name}/{seed}" if seed else given.name)


def digits_of(name: str) -> int:
    """How many digits the numbers of a set have."""
    return len(LAYOUTS[name.partition("@")[0]].digits)


def classes_of(job: Job) -> int:
    """The number of classes of a job's networks; each network of the oracle reads one digit."""
    return int(10 if job.network == "oracle" else 10 ** digits_of(job.data))


def weights_of(job: Job) -> int:
    """The weights of all networks of a job, without biases."""
    return weights(job.network, classes_of(job)) * (digits_of(job.data) if job.network == "oracle" else 1)


def trial_job(
    column: str, name: str, seed: int, trial: Trial, phase: str = "report", *, filters: int | None = None
) -> Job:
    """A training with the learning rate and the bound of a trial."""
    options = [] if math.isinf(trial.clip) else [("clip", trial.clip)]
    options += [] if trial.decay == DECAY else [("weight_decay", trial.decay)]
    options += [] if filters is None else [("filters", float(filters))]
    return Job(column, name, seed, trial.lr, phase, tuple(options))


# Recipes


@dataclasses.dataclass(frozen=True)
class DigitConfig(TrainingConfig):
    """The settings that recipes on multi-digit numbers share."""

    data: str = setting(
        "auto", 'a folder with the idx files of MNIST; "auto" looks for it, "excerpt" is the embedded one', machine=True
    )
    epochs: int = setting(SCHEDULE.epochs, "passes over a set", smoke=1, least=1, most=1_000_000)
    warmup: int = setting(
        SCHEDULE.warmup, "steps until the learning rate is reached", smoke=2, least=0, most=1_000_000_000
    )
    drops: tuple[float, ...] = setting(
        SCHEDULE.drops, "fractions of the training after which the rate is multiplied by factor", may_be_empty=True
    )
    factor: float = setting(SCHEDULE.factor, "see drops")
    batch: int = setting(BATCH, "images of a step", smoke=50, least=1, most=100_000)
    train_images: int = setting(
        0, "the first images of a set to train on; 0 for all 60,000", smoke=100, least=0, most=IMAGES[0]
    )
    test_images: int = setting(
        0, "the first images of a set to test with; 0 for all 10,000", smoke=50, least=0, most=IMAGES[1]
    )
    most: int = setting(160, "networks of a fleet at most", least=1, most=100_000, machine=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            _ = self.schedule
        except ValueError as error:
            raise SettingError(str(error)) from None
        check_batch(self.batch, self.train_images or IMAGES[0])

    @property
    def schedule(self) -> Schedule:
        """How the learning rate changes."""
        return Schedule(self.epochs, self.warmup, self.drops, self.factor)

    @property
    def has_own_images(self) -> bool:
        """Whether every seed has images of its own."""
        return bool(getattr(self, "fresh", False))

    @property
    def images(self) -> tuple[int, int] | None:
        """How many images to train on and to test with; None for all."""
        images = self.train_images or IMAGES[0], self.test_images or IMAGES[1]
        return None if images == IMAGES else images


SETS_RULES: dict[str, Any] = {"choices": SETS, "what": "set", "prefix": "MNIST-"}
MODEL_RULES: dict[str, Any] = {
    "choices": (*MODELS, *MORE), "what": "model", "prefix": "DCL-", "smoke": ("baseline", "A2", "low-rank"),
}  # fmt: skip
TWO = ("MNIST-II-01", "MNIST-III-01")
C = TypeVar("C", bound=DigitConfig)


def read_sets(given: str) -> list[str]:
    """Names of multi-digit sets: ``II-01`` or ``MNIST-II-01``, or ``all``, each once and in the paper's order."""
    return list(choose_names(Setting("", **SETS_RULES), [part.strip() for part in given.split(",") if part.strip()]))


class DigitRecipe(Recipe[C]):
    """LeNets on multi-digit numbers: a fleet holds jobs of one architecture, on any sets."""

    purpose: ClassVar[Purpose] = "report"
    digits: Digits
    stacked: ClassVar[bool] = True

    def __init__(self, config: C, device: str = "cpu") -> None:
        super().__init__(config, device)
        self._sets, self._phase = Sets({}, {}), ""

    def prepare(self, report: Callable[[str], None]) -> None:
        """Read MNIST."""
        config = self.config
        self.digits = read_mnist(find_digits(config.data))
        report(f"written with {self.digits.source}")
        if (steps := config.epochs * ((config.train_images or IMAGES[0]) // config.batch)) < config.warmup:
            report(f"all {steps:,} steps are within the warm-up of {config.warmup:,}; train longer, or shorten it")

    def asked(self) -> dict[str, Any]:
        """All settings but those of the machine, and the content of MNIST."""
        return {"digits": self.digits.source, "sha256": self.digits.sha256, **super().asked()}

    def planned(self) -> list[Job]:
        """The jobs, for an estimate, with placeholders for those that depend on outcomes."""
        return self.jobs({})

    def total(self) -> int:
        """All planned jobs."""
        return len(self.planned())

    def networks(self, job: Job) -> int:
        """One, and for the oracle one for each digit."""
        return digits_of(job.data) if job.network == "oracle" else 1

    def total_networks(self) -> int:
        """The networks of all planned jobs."""
        return sum(map(self.networks, self.planned()))

    def workloads(self) -> list[Workload]:
        """All networks as one workload: the columns take about the same time."""
        images, networks = (self.config.images or IMAGES)[0], self.total_networks()
        return [Workload("LeNet", "", networks, images, self.config.epochs)]

    def about(self, loads: Sequence[Workload]) -> Estimate:
        """Sets, entries, fleets and digits."""
        jobs, digits = self.planned(), read_mnist(find_digits(self.config.data)).source
        fleets, sets = self._fleets(jobs), len({job.data.partition("@")[0] for job in jobs})
        largest, seen = max(sum(map(self.networks, fleet)) for fleet in fleets), sum(load.seen for load in loads)
        words = {
            "recipe": f"{self.name}: {sets} set{'s' if sets > 1 else ''}, {len(jobs):,} {self.unit}",
            "networks": f"{sum(load.networks for load in loads):,}, in {len(fleets)} fleets of up to {largest}",
            "digits": digits,
            **({"on a GPU": f"{say_about(seen / H200)} on an H200"} if self.device == "cpu" else {}),
        }
        return Estimate(words, {"entries": len(jobs), "fleets": len(fleets), "digits": digits})

    def _fleets(self, jobs: Sequence[Job]) -> list[list[Job]]:
        return plan_fleets(jobs, self.group, self.at_once, self.networks)

    def speed(self, network: str, loads: Sequence[Workload]) -> tuple[float, str]:
        """Measured on noise; on an H200 the speed of Table 1."""
        on_gpu = self.device.startswith("cuda")
        if on_gpu and "H200" in torch.cuda.get_device_name(self.device):
            return H200, "as measured on an H200, results/table1.json"
        networks, images = (64, 2000) if on_gpu else (6, 200)
        drawn = torch.Generator().manual_seed(0)
        noise = torch.randint(256, (images, 28, 28), dtype=torch.uint8, generator=drawn)
        labels = torch.randint(100, (images,), generator=drawn)
        members = [Member("trial", "noise", seed, 0.01, Schedule(2)) for seed in range(networks)]
        lenets = [build("A2", 100, member.seed) for member in members]
        return measure_speed(Fleet(lenets, members, {"noise": (noise, labels)}, device=self.device), images)

    def memory(self, loads: Sequence[Workload]) -> float:
        """The networks of the largest fleet, the images of all sets, and the fleet's copy of its own."""
        jobs = self.planned()
        largest = max(sum(map(self.networks, fleet)) for fleet in self._fleets(jobs))
        sets = len({self.set_of(job).partition("@")[0] for job in jobs})
        copied = min(largest, sets) if sets > 1 else 0
        return largest * PER_NETWORK + (sets + copied) * loads[0].images * 28 * 28 / 2**30

    def group(self, job: Job) -> Hashable:
        """Jobs of one architecture."""
        return job.phase, job.network, classes_of(job), job.option("filters", 0), job.option("epochs", 0)

    def describe(self, fleets: Sequence[Sequence[Job]]) -> str:
        """The architecture."""
        job = fleets[0][0]
        filters = f", {job.option('filters'):g} filters" if job.option("filters", 0) else ""
        return f"{job.network}, {classes_of(job)} classes{filters}"

    def fleet(self, jobs: Sequence[Job]) -> Fleet:
        """The networks of the jobs; each digit's network of an oracle has its own start, order and dropout."""
        config, members, networks = self.config, [], []
        for job in jobs:
            decay, clip = job.option("weight_decay", DECAY), job.option("clip", math.inf)
            schedule = dataclasses.replace(config.schedule, epochs=int(job.option("epochs", config.epochs)))
            for place, name in enumerate(self._names(job)):
                seed = job.seed + 1000 * place
                members.append(Member(f"{job.network} {name}", name, seed, job.lr, schedule, decay, clip))
                filters = int(job.option("filters", 0)) or None
                networks.append(build(job.network, classes_of(job), seed, filters=filters))
        return Fleet(
            networks, members, self.labelled(jobs, "train"), batch=config.batch, precision=config.wanted_precision,
            device=self.device, stacked=self.stacked,
        )  # fmt: skip

    def judge(self, jobs: Sequence[Job]) -> Mapping[str, Labelled]:
        """The evaluation images; each network of an oracle sees one digit of the labels."""
        return self.labelled(jobs, "judge")

    def outcomes(self, jobs: Sequence[Job], trained: Trained) -> list[Outcome]:
        """The outcomes; an oracle is right where all of its digits are, and its losses are sums."""
        fleet, evaluation = trained.fleet, trained.evaluation
        losses, last, stopped = evaluation.losses.tolist(), fleet.history.train_loss[-1], fleet.history.stopped
        outcomes, first = [], 0
        for job in jobs:
            rows = range(first, first + self.networks(job))
            first = rows.stop
            labels = self.sets_of([job]).judge[self.set_of(job)][1].to(evaluation.predictions.device)
            number = torch.zeros_like(labels)
            for row in rows:
                number = 10 * number + evaluation.predictions[row] if len(rows) > 1 else evaluation.predictions[row]
            share = len(rows) / len(fleet)
            by_epoch = {"train_loss": fleet.history.train_loss, "test_loss": trained.losses} if trained.losses else {}
            curves = {kind: [sum(epoch[row] for row in rows) for epoch in of] for kind, of in by_epoch.items()}
            outcomes.append(
                Outcome(
                    job, 100 * float((number != labels).double().mean()), sum(losses[row] for row in rows),
                    sum(last[row] for row in rows), min((stopped[row] for row in rows if row in stopped), default=None),
                    trained.seconds * share, fleet.setup_seconds * share, {"curves": finite(curves)} if curves else {},
                )
            )  # fmt: skip
        return outcomes

    def sets_of(self, jobs: Sequence[Job]) -> Sets:
        """The sets of some jobs, written where they are not yet; those of an earlier phase are dropped."""
        if jobs[0].phase != self._phase:
            self._sets, self._phase = Sets({}, {}), jobs[0].phase
        missing = [name for name in dict.fromkeys(map(self.set_of, jobs)) if name not in self._sets.train]
        if missing:
            purpose = "choose" if self._phase == "choose" else self.purpose
            written = make_sets(self.digits, missing, purpose, device=self.device, images=self.written())
            self._sets.train.update(written.train)
            self._sets.judge.update(written.judge)
        return self._sets

    def written(self) -> tuple[int, int] | None:
        """How many images of a set are written, to train on and to test with; None for all."""
        return self.config.images

    def set_of(self, job: Job) -> str:
        """The name of a job's set; with images of its own, the seed's."""
        return f"{job.data}/{job.seed}" if self.config.has_own_images else job.data

    def _names(self, job: Job) -> list[str]:
        """The names of the data of a job's networks."""
        name = self.set_of(job)
        return [f"{name}#{place}" for place in range(self.networks(job))] if job.network == "oracle" else [name]

    def labelled(self, jobs: Sequence[Job], part: Literal["train", "judge"]) -> dict[str, Labelled]:
        """The images of some jobs by the names of their networks' data, each with the labels that a network sees."""
        sets: dict[str, Labelled] = getattr(self.sets_of(jobs), part)
        labelled: dict[str, Labelled] = {}
        for job in jobs:
            images, labels = sets[self.set_of(job)]
            for place, name in enumerate(self._names(job)):
                power = 10 ** (self.networks(job) - 1 - place)  # of the digit, counted from the most significant
                labelled[name] = images, labels // power % 10 if "#" in name else labels
        return labelled
