"""What a recipe is: one file in `torch_dcl.experiments.recipes` with a config and a class, run by `runner.run`.

The class names the jobs (which may depend on the outcomes of earlier ones), builds a fleet for some of them, and
computes a result from all outcomes.
"""

import abc
import dataclasses
import hashlib
import math
import os
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from torch_dcl.experiments.settings import Config, settings_of
from torch_dcl.fleet import Evaluation, Fleet

if TYPE_CHECKING:
    from rich.console import RenderableType

    from torch_dcl.fleet.run_folder import RunFolder

__all__ = [
    "Estimate", "Job", "Labelled", "Listener", "Outcome", "Progress", "Recipe", "Silent", "Trained", "content_hash",
    "finite", "images_per_second",
]  # fmt: skip

Labelled = tuple[Tensor, Tensor]
C = TypeVar("C", bound=Config)


# Jobs and outcomes


@dataclasses.dataclass(frozen=True)
class Job:
    """One entry of a result: the training of a network, or of several that answer together."""

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
    """In percent of the images it was judged with."""
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

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> "Outcome":
        """Read an outcome from plain data, where None stands for a number that is not finite."""
        numbers = {key: math.nan if plain[key] is None else plain[key] for key in ("error", "test_loss", "train_loss")}
        return cls(**{**plain, **numbers, "job": Job.read(plain["job"])})


class Trained(NamedTuple):
    """A fleet at the end of its training."""

    fleet: Fleet
    evaluation: Evaluation
    losses: Sequence[Sequence[float]]
    """Test losses by epoch and network, where the recipe judges every epoch."""
    seconds: float


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far some fleets are. Before the first epoch, ``epoch`` is 0."""

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


class Estimate(NamedTuple):
    """What a run would take: in words, by topic, and as plain data."""

    words: Mapping[str, str]
    plain: Mapping[str, Any]


def images_per_second(fleet: Fleet, images: int) -> float:
    """The throughput of a fleet over all its networks, in the second epoch, the first being slower."""
    fleet.train(1)
    start = time.perf_counter()
    fleet.train(1)
    return len(fleet) * images / (time.perf_counter() - start)


class Listener(Protocol):
    """Whom a run tells of its progress."""

    def begin(self, before: int, total: int) -> None:
        """So many networks were done before, and so many there are in all."""

    def on_epoch(self, at: Progress) -> None:
        """Called before a fleet begins and after each of its epochs."""

    def report(self, line: str) -> None:
        """A line of progress."""


class Silent:
    """A listener that does nothing."""

    def begin(self, before: int, total: int) -> None:
        """Nothing."""

    def on_epoch(self, at: Progress) -> None:
        """Nothing."""

    def report(self, line: str) -> None:
        """Nothing."""


# Recipes


class Recipe(abc.ABC, Generic[C]):
    """A recipe with its config, on a device.

    Args:
        config: Its settings.
        device: Where to compute.
    """

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

    def follow(self, should_stop: Callable[[], bool]) -> bool:
        """Do what the first rank says until it ends; whether it ended well."""
        raise NotImplementedError

    def leading(self, path: "str | os.PathLike[str]", should_stop: Callable[[], bool]) -> AbstractContextManager[Any]:
        """What surrounds a run in the folder."""
        del path, should_stop
        return nullcontext()

    def estimate(self, say_time: Callable[[float], str]) -> Estimate:
        """What a run would take, without running it; its data need not be there.

        Args:
            say_time: Seconds in words.
        """
        del say_time
        settings = {key: value for key, value in Recipe.asked(self).items() if value}
        words = {key: ", ".join(map(str, v)) if isinstance(v, tuple) else str(v) for key, v in settings.items()}
        return Estimate({"recipe": self.name, **words, "device": self.device}, settings)

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
        """All jobs that can be named with these outcomes. It is asked again when all of them are done."""

    @abc.abstractmethod
    def total(self) -> int:
        """How many jobs there will be in all."""

    def fleet(self, jobs: Sequence[Job]) -> Fleet:
        """The networks of some jobs of one `group`, ready to be trained, in the order of the jobs."""
        raise NotImplementedError

    def judge(self, jobs: Sequence[Job]) -> Mapping[str, Labelled]:
        """What a trained fleet is judged with."""
        raise NotImplementedError

    @abc.abstractmethod
    def result(self, folder: "RunFolder") -> Any:
        """The result of a run whose jobs are all done, written to its folder."""

    @classmethod
    def so_far(cls, folder: "RunFolder", outcomes: Mapping[Job, Outcome]) -> dict[str, Callable[[], Any]]:
        """What computes the table (by the recipe's name) and the data of figures of a run that may not have ended."""
        del folder, outcomes
        return {}

    @abc.abstractmethod
    def shown(self, result: Any, width: int) -> "list[RenderableType]":
        """What a terminal of so many characters shows of the result; texts are printed as sentences."""

    @property
    def at_once(self) -> int:
        """How many networks train at a time at most."""
        return int(getattr(self.config, "most", 1))

    def networks(self, job: Job) -> int:
        """How many networks a job trains."""
        del job
        return 1

    def total_networks(self) -> int:
        """How many networks all jobs train together."""
        return self.total()

    def judges_epochs(self, jobs: Sequence[Job]) -> bool:
        """Whether these jobs are judged after every epoch, for curves."""
        del jobs
        return False

    def compute(self, jobs: Sequence[Job]) -> list[Outcome] | None:
        """The outcomes of jobs that train nothing; None where `fleet` is to be trained."""
        del jobs
        return None

    def group(self, job: Job) -> Hashable:
        """Jobs for which this is the same train as one fleet."""
        return job.phase, job.network, job.data, job.options

    def concurrent(self, job: Job) -> Hashable:
        """On a GPU, neighbouring fleets for whose jobs this is the same train concurrently."""
        return self.group(job)

    def describe(self, fleets: Sequence[Sequence[Job]]) -> str:
        """What people call some fleets that train together."""
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


def content_hash(tensors: Iterable[Tensor]) -> str:
    """The SHA-256 of some tensors' values, shapes and types."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()


def finite(value: Any) -> Any:
    """Plain data with None for what is no finite number, since JSON has no word for it."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
