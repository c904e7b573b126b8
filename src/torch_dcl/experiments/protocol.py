"""The interface of a recipe: one file in `torch_dcl.experiments.recipes` with a config and a class for `runner.run`.

The class names the jobs (which may depend on the outcomes of earlier ones), builds a fleet for some of them, and
computes a result from all outcomes.
"""

import abc
import dataclasses
import hashlib
import importlib
import os
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from torch_dcl.experiments.settings import Config, setting, settings_of
from torch_dcl.fleet import Evaluation, Fleet
from torch_dcl.fleet.checkpoint import finite, with_nan
from torch_dcl.fleet.fleet import Precision
from torch_dcl.fleet.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "Estimate", "Job", "Labelled", "Listener", "Outcome", "Progress", "Recipe", "RunFolder", "Shown", "Trained",
    "TrainingConfig", "Workload", "content_hash", "find_recipe_type", "finite", "measure_speed",
]  # fmt: skip

Labelled = tuple[Tensor, Tensor]
Shown: TypeAlias = "list[RenderableType]"
"""What a terminal shows of a result: tables, texts, and strings as bullet points."""
C = TypeVar("C", bound=Config)


# Jobs and outcomes


@dataclasses.dataclass(frozen=True)
class Job:
    """One entry of a result: the training of a network, or of several that form an oracle."""

    network: str
    data: str
    seed: int
    lr: float
    phase: str = "report"
    """Jobs of a later phase may depend on the outcomes of an earlier one."""
    options: tuple[tuple[str, float], ...] = ()
    """Further settings of the job, by name."""

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> "Job":
        """Read a job from plain data."""
        return cls(**{**plain, "options": tuple((name, value) for name, value in plain["options"])})

    def option(self, name: str, default: float | None = None) -> float:
        """An option by name; a KeyError where it has none and there is no default."""
        options = dict(self.options)
        return options[name] if default is None else options.get(name, default)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a job."""

    job: Job
    error: float
    """In percent of the evaluation images."""
    test_loss: float
    train_loss: float
    """Of the last epoch, augmentation and dropout included."""
    stopped: int | None
    """The epoch in which training diverged."""
    seconds: float = dataclasses.field(default=0.0, compare=False)
    """The job's share of the time of its fleet."""
    compiling: float = dataclasses.field(default=0.0, compare=False)
    """The share of these seconds that went into compiling and capturing kernels, on a GPU."""
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further results, as plain data."""

    @property
    def judged_error(self) -> float:
        """The error to choose and compare by: 100 % for a network that diverged."""
        return 100.0 if self.stopped is not None else self.error

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> "Outcome":
        """Read an outcome from plain data, where None stands for a number that is not finite."""
        numbers = {key: with_nan(plain[key]) for key in ("error", "test_loss", "train_loss")}
        return cls(**{**plain, **numbers, "job": Job.read(plain["job"])})


class Trained(NamedTuple):
    """A fleet at the end of its training."""

    fleet: Fleet
    evaluation: Evaluation
    losses: Sequence[Sequence[float]]
    """Test losses by epoch and network, where the recipe evaluates every epoch."""
    seconds: float


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of some fleets. Before the first epoch, ``epoch`` is 0."""

    fleet: int
    fleets: int
    name: str
    networks: int
    epoch: int
    epochs: int
    loss: float | None = None
    """Of the last epoch in training, mean over the networks that have not diverged; None before the first step."""
    part: float = 0.0
    """Of the epoch that is under way, where a fleet pauses inside of one."""
    judged: Mapping[str, Any] | None = None
    """``of`` which network, ``epoch``, ``top1``, ``top5``, …: an evaluation after this epoch, not the last."""


class Listener:
    """Receives the progress of a run. This one ignores it."""

    def begin(self, before: int, total: int) -> None:
        """Called once, with the number of networks that were done before and of all networks."""

    def on_epoch(self, at: Progress) -> None:
        """Called before a fleet begins and after each of its epochs."""

    def report(self, line: str) -> None:
        """Called with a line of progress."""


# Estimates


class Workload(NamedTuple):
    """Networks that are trained alike, for an estimate."""

    network: str
    data: str
    networks: int
    images: int
    """To train one network on for one epoch."""
    epochs: int

    @property
    def seen(self) -> int:
        """Images of all epochs of all networks."""
        return self.networks * self.images * self.epochs


class Estimate(NamedTuple):
    """The estimated cost of a run: in words, by topic, and as plain data."""

    words: Mapping[str, str]
    plain: Mapping[str, Any]


def measure_speed(fleet: Fleet, images: int) -> tuple[float, str]:
    """Images a second over all networks of a fleet, in its second epoch, the first being slower; and where."""
    fleet.train(1)
    start = time.perf_counter()
    fleet.train(1)
    speed = len(fleet) * images / (time.perf_counter() - start)
    if fleet.device.type == "cuda":
        return speed, f"measured just now on {torch.cuda.get_device_name(fleet.device)}"
    threads = torch.get_num_threads()
    return speed, f"measured just now on this CPU, {threads} thread{'s' if threads > 1 else ''}"


# Recipes


@dataclasses.dataclass(frozen=True)
class TrainingConfig(Config):
    """The settings that all recipes that train share."""

    precision: str = setting(
        "auto", 'bfloat16, float32, float64; "auto" is bfloat16 on a GPU and float32 on a CPU', what="precision",
        choices=("auto", "bfloat16", "float32", "float64"),
    )  # fmt: skip
    device: str = setting("auto", 'cpu, cuda, or "auto"', machine=True)
    whole: bool = setting(
        False, "with --minutes, begin only fleets that end in time, at the pace of the last: no checkpoint is left",
        machine=True,
    )  # fmt: skip

    @property
    def wanted_precision(self) -> Precision | None:
        """The precision; None for the device's own."""
        return None if self.precision == "auto" else cast("Precision", self.precision)


class Recipe(abc.ABC, Generic[C]):
    """A recipe with its config, on a device."""

    name: ClassVar[str]
    unit: ClassVar[str] = "entries"
    """What a job is called, in the plural."""
    config_type: ClassVar[type[Config]]
    table_type: ClassVar[type | None] = None
    """The kind of table that it fills, if it fills one."""

    every: float = 60.0
    """Seconds between two checkpoints; they are written at ends of epochs, at pauses, and where a run is stopped."""
    is_shared: ClassVar[bool] = False
    """Whether all ranks train every network together; the first one runs the recipe, and the others `follow`."""

    def __init__(self, config: C, device: str = "cpu") -> None:
        self.config, self.device = config, device

    @classmethod
    def resumed(cls, config: C, folder: Path) -> C:
        """The config with which the run of a folder is resumed, where files that it names may be missing."""
        return config

    def follow(self, should_stop: Callable[[], bool]) -> bool:
        """Obey the first rank until it ends; return whether it succeeded."""
        raise NotImplementedError

    def leading(self, path: "str | os.PathLike[str]", should_stop: Callable[[], bool]) -> AbstractContextManager[Any]:
        """A context manager around a run in the folder."""
        del path, should_stop
        return nullcontext()

    # What a run would take

    def estimate(self, say_time: Callable[[float], str]) -> Estimate:
        """What a run would take: networks, images, memory, and time by a short trial. The data need not be there."""
        loads = self.workloads()
        words, plain = self.about(loads)
        if not loads:
            return Estimate({**words, "device": self.device, "time": "no estimate for this recipe"}, plain)
        networks, images = sum(load.networks for load in loads), sum(load.seen for load in loads)
        trials = {name: self.speed(name, loads) for name in dict.fromkeys(load.network for load in loads)}
        speeds = {name: speed for name, (speed, _) in trials.items()}
        seconds, gib = sum(load.seen / speeds[load.network] for load in loads), self.memory(loads)
        shown = ", ".join(f"{name} {speed:,.0f} images/s" for name, speed in speeds.items())
        words = {
            "recipe": words["recipe"],
            "networks": f"{networks:,}: {', '.join(speeds)}",
            "images": f"{images:,} to train on, over all epochs and networks",
            **words,
            "device": self.device,
            "memory": f"about {gib:.1f} GiB",
            "speed": f"{shown}, {next(where for _, where in trials.values())}",
            "time": f"{say_time(seconds)}, without data preparation and evaluation",
        }
        counts = {"networks": networks, "images": images, "memory_gib": gib, "images_per_s": speeds}
        return Estimate(words, {**counts, "minutes": seconds / 60, **plain})

    def about(self, loads: Sequence[Workload]) -> Estimate:
        """What an estimate says of the recipe and its data."""
        settings = {key: value for key, value in Recipe.asked(self).items() if value}
        words = {key: ", ".join(map(str, v)) if isinstance(v, tuple) else str(v) for key, v in settings.items()}
        return Estimate({"recipe": self.name, **words}, settings)

    def workloads(self) -> list[Workload]:
        """The trainings of the run, for an estimate; empty if there are none."""
        return []

    def speed(self, network: str, loads: Sequence[Workload]) -> tuple[float, str]:
        """Images a second over the networks of this name that train at a time, and where it was measured."""
        raise NotImplementedError

    def memory(self, loads: Sequence[Workload]) -> float:
        """GiB that training takes, about."""
        raise NotImplementedError

    # What a run does

    @abc.abstractmethod
    def prepare(self, report: Callable[[str], None]) -> None:
        """Read the data, and report what it is.

        Raises:
            SettingError: A setting does not fit the data.
        """

    def asked(self) -> dict[str, Any]:
        """Everything that the outcomes depend on, as plain data; a run is resumed only where this is the same.

        By default all settings but those of the machine. Add the content of the data: `content_hash`.
        """
        return {
            name: getattr(self.config, name)
            for name, (_, rules) in settings_of(self.config_type).items()
            if not rules.machine
        }

    @abc.abstractmethod
    def jobs(self, outcomes: Mapping[Job, Outcome]) -> list[Job]:
        """All jobs that are known with these outcomes. It is called again when all of them are done."""

    def total(self) -> int:
        """How many jobs there will be in all; by default none depends on an outcome."""
        return len(self.jobs({}))

    def fleet(self, jobs: Sequence[Job]) -> Fleet:
        """The networks of some jobs of one `group`, ready to be trained, in the order of the jobs."""
        raise NotImplementedError

    def judge(self, jobs: Sequence[Job]) -> Mapping[str, Labelled]:
        """The images to evaluate a trained fleet on."""
        raise NotImplementedError

    @abc.abstractmethod
    def result(self, folder: RunFolder) -> Any:
        """The result of a run whose jobs are all done, written to its folder."""

    @classmethod
    def so_far(cls, folder: RunFolder, outcomes: Mapping[Job, Outcome]) -> dict[str, Callable[[], Any]]:
        """Functions that compute the table (under the recipe's name) and the data of figures of a run so far."""
        return {}

    @abc.abstractmethod
    def shown(self, result: Any, width: int) -> Shown:
        """The result as shown in a terminal of this width."""

    @property
    def at_once(self) -> int:
        """How many networks train at a time, at most."""
        return int(getattr(self.config, "most", 1))

    @property
    def ends_fleets(self) -> bool:
        """Whether fleets are begun only if the time left is enough for them."""
        return bool(getattr(self.config, "whole", False))

    def networks(self, job: Job) -> int:
        """How many networks a job trains."""
        return 1

    def total_networks(self) -> int:
        """How many networks all jobs train together."""
        return self.total()

    def judges_epochs(self, jobs: Sequence[Job]) -> bool:
        """Whether these jobs are evaluated after every epoch, for curves."""
        return False

    def compute(self, jobs: Sequence[Job]) -> list[Outcome] | None:
        """The outcomes of jobs that train nothing; None where `fleet` is to be trained."""
        return None

    def group(self, job: Job) -> Hashable:
        """Jobs for which this is the same train as one fleet."""
        return job.phase, job.network, job.data, job.options

    def concurrent(self, job: Job) -> Hashable:
        """On a GPU, neighbouring fleets for whose jobs this is the same train concurrently."""
        return self.group(job)

    def describe(self, fleets: Sequence[Sequence[Job]]) -> str:
        """The display name of some fleets that train together."""
        return f"{', '.join(dict.fromkeys(jobs[0].network for jobs in fleets))} on {fleets[0][0].data}"

    def outcomes(self, jobs: Sequence[Job], trained: Trained) -> list[Outcome]:
        """The outcomes of a trained fleet, one network a job."""
        fleet, count = trained.fleet, len(jobs)
        errors, losses = trained.evaluation.errors.tolist(), trained.evaluation.losses.tolist()
        last, stopped = fleet.history.train_loss[-1], fleet.history.stopped
        return [
            Outcome(
                job, errors[row], losses[row], last[row], stopped.get(row), trained.seconds / count,
                fleet.setup_seconds / count,
            )
            for row, job in enumerate(jobs)
        ]  # fmt: skip


def find_recipe_type(name: str) -> type[Recipe[Any]]:
    """The class of a recipe, by the recipe's name; a ValueError where there is none."""
    file = name.replace("-", "_")
    if not file.isidentifier() or not Path(__file__).with_name("recipes").joinpath(f"{file}.py").is_file():
        raise ValueError(f"its recipe {name!r} is unknown; it was run with another version, or by another program")
    module = importlib.import_module(f"torch_dcl.experiments.recipes.{file}")
    kinds = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Recipe)]
    return next(kind for kind in kinds if kind.__module__ == module.__name__)


def content_hash(tensors: Iterable[Tensor]) -> str:
    """The SHA-256 of some tensors' values, shapes and types."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()
