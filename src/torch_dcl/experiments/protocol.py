"""What a recipe is: one file in `torch_dcl.experiments.recipes` with a config and a class, run by `runner.run`.

The config is a frozen dataclass whose fields carry help, the value of a smoke run, and bounds. The class names the jobs
(which may depend on the outcomes of earlier ones), builds a fleet for some of them, and makes a result of all outcomes.
"""

import abc
import dataclasses
import hashlib
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from torch_dcl.fleet import Evaluation, Fleet

if TYPE_CHECKING:
    from rich.console import RenderableType

    from torch_dcl.fleet.run_folder import RunFolder

__all__ = [
    "Config", "Job", "Listener", "Outcome", "Progress", "Recipe", "SettingError", "content_hash", "finite", "setting",
    "settings_of", "with_settings",
]  # fmt: skip

Labelled = tuple[Tensor, Tensor]


class SettingError(ValueError):
    """A setting that a recipe does not have, or a value that it cannot take.

    Args:
        message: What is wrong.
        given: A name that is unknown, if that is the mistake.
        known: The names that there are.
    """

    def __init__(self, message: str, given: str = "", known: Sequence[str] = ()) -> None:
        super().__init__(message + (f"; known are {', '.join(known)}" if known else ""))
        self.message, self.given, self.known = message, given, tuple(known)


# Settings


class Setting(NamedTuple):
    """What a field of a config carries beside its default."""

    help: str
    smoke: Any = None
    """What takes its place in a smoke run; None for the default."""
    choices: tuple[str, ...] = ()
    what: str = ""
    """What a choice is called, in the singular."""
    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    machine: bool = False
    """Whether it says where and how fast to compute, and changes no result."""


def setting(default: Any, help: str, **rules: Any) -> Any:
    """A field of a config: its default, a line of help, and the rules of `Setting`."""
    return dataclasses.field(default=default, metadata={"setting": Setting(help, **rules)})


@dataclasses.dataclass(frozen=True)
class Config:
    """The settings of a recipe. Lists are tuples, and a choice of yes and no is a bool."""

    @classmethod
    def typed(cls, key: str, value: Any) -> dict[str, Any] | None:
        """What a setting means that stands for several fields; None where it is one field."""
        del key, value
        return None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _read(field, getattr(self, field.name)))


def settings_of(config: type[Config]) -> dict[str, tuple[Any, Setting]]:
    """The settings of a config by name: default and rules, in the order in which they are printed."""
    return {field.name: (field.default, field.metadata["setting"]) for field in dataclasses.fields(config)}


C = TypeVar("C", bound=Config)


def with_settings(config: C, settings: Mapping[str, Any]) -> C:
    """A config with some settings changed; texts are read as what the setting is.

    Raises:
        SettingError: There is no such setting, or it cannot have this value.
    """
    known = [field.name for field in dataclasses.fields(config)]
    changes: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in known:
            raise SettingError(f"there is no setting {key!r}", key, known)
        changes |= type(config).typed(key, value) or {key: value}
    return dataclasses.replace(config, **changes)


_KINDS = {bool: '"yes" or "no"', int: "a whole number", float: "a number", tuple: "a list", str: "a text"}


def _read(field: "dataclasses.Field[Any]", value: Any) -> Any:
    """A value of the kind that a field has, inside of its bounds."""
    name, rules = field.name, field.metadata["setting"]
    default: Any = field.default
    kind = type(default)
    try:
        if kind is not tuple:
            return _one(name, rules, kind, value)
        parts = value.split(",") if isinstance(value, str) else list(value)
        parts = [part.strip() if isinstance(part, str) else part for part in parts]
        parts = [part for part in parts if part != ""]
        if rules.choices:
            return _chosen(rules, parts) if parts or default else ()
        inner = type(default[0]) if default else str
        if not parts and default:
            shown = ",".join(f"{part:g}" if inner is float else str(part) for part in default)
            raise SettingError(f"{name} is empty; give some, such as --set {name}={shown}")
        return tuple(_one(name, rules, inner, part) for part in parts)
    except (TypeError, ValueError) as error:
        if isinstance(error, SettingError):
            raise
        raise SettingError(f"{name} must be {_KINDS[kind]}, not {value!r}") from None


def _one(name: str, rules: Setting, kind: type, value: Any) -> Any:
    if kind is bool:
        found = {"yes": True, "no": False}.get(value, value) if isinstance(value, str) else value
        if not isinstance(found, bool):
            raise TypeError
        return found
    if kind is str:
        if not isinstance(value, str):
            raise TypeError
        return _chosen(rules, [value])[0] if rules.choices else value
    if isinstance(value, bool) or (kind is int and isinstance(value, float)):
        raise TypeError
    number = kind(value)
    if not rules.least <= number <= rules.most or not number > rules.above or math.isnan(number):
        low = f"above {rules.above:g}" if rules.above > -math.inf else f"at least {rules.least:g}"
        high = f" and at most {rules.most:,g}" if rules.most < math.inf else ""
        raise SettingError(f"{name} must be {low}{high}, not {number:g}")
    return number


def _chosen(rules: Setting, given: Sequence[Any]) -> tuple[str, ...]:
    """Names out of the choices, or ``all``, each once and in the order of the choices."""
    by_low = {name.lower(): name for name in rules.choices}
    found: set[str] = set()
    for name in map(str, given):
        if name.lower() == "all":
            found.update(rules.choices)
        elif name.lower() in by_low:
            found.add(by_low[name.lower()])
        else:
            raise SettingError(f"there is no {rules.what} {name!r}", name, rules.choices)
    if not found:
        raise SettingError(f"no {rules.what} is named", "", rules.choices)
    return tuple(name for name in rules.choices if name in found)


# Jobs and outcomes


@dataclasses.dataclass(frozen=True)
class Job:
    """One training of one network."""

    network: str
    data: str
    seed: int
    lr: float
    phase: str = "report"
    """Jobs of a later phase may depend on the outcomes of an earlier one."""
    options: tuple[tuple[str, float], ...] = ()
    """What else makes it this job, by name."""

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> "Job":
        """The way back from plain data."""
        return cls(**{**plain, "options": tuple((name, value) for name, value in plain["options"])})

    def option(self, name: str) -> float:
        """An option by name."""
        return dict(self.options)[name]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a job."""

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

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> "Outcome":
        """The way back from plain data, where None stands for a loss that is not finite."""
        losses = {key: math.nan if plain[key] is None else plain[key] for key in ("test_loss", "train_loss")}
        return cls(**{**plain, **losses, "job": Job.read(plain["job"])})


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
    """Of the last epoch in training, mean over the networks that have not diverged."""


class Listener(Protocol):
    """Whom a run tells of its progress."""

    def begin(self, before: int, total: int) -> None:
        """So many networks were done before, and so many there are in all."""

    def on_epoch(self, at: Progress) -> None:
        """Called before a fleet begins and after each of its epochs."""

    def report(self, line: str) -> None:
        """A line of progress."""


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

    def __init__(self, config: C, device: str = "cpu") -> None:
        self.config, self.device = config, device

    @abc.abstractmethod
    def prepare(self, report: Callable[[str], None]) -> None:
        """Read the data, and report what was found."""

    @abc.abstractmethod
    def asked(self) -> dict[str, Any]:
        """Everything that the outcomes depend on, as plain data; a run is resumed only where this is the same.

        Data is known by its content: `content_hash`.
        """

    @abc.abstractmethod
    def jobs(self, outcomes: Mapping[Job, Outcome]) -> list[Job]:
        """All jobs that can be named with these outcomes. It is asked again when all of them are done."""

    @abc.abstractmethod
    def total(self) -> int:
        """How many jobs there will be in all."""

    @abc.abstractmethod
    def fleet(self, jobs: Sequence[Job]) -> Fleet:
        """The networks of some jobs of one `group`, ready to be trained, one for each job."""

    @abc.abstractmethod
    def judge(self, jobs: Sequence[Job]) -> Mapping[str, Labelled]:
        """What a trained fleet is judged with."""

    @abc.abstractmethod
    def result(self, folder: "RunFolder") -> Any:
        """The result of a run whose jobs are all done, written to its folder."""

    @abc.abstractmethod
    def shown(self, result: Any, width: int) -> "list[RenderableType]":
        """What a terminal of so many characters shows of the result."""

    @property
    @abc.abstractmethod
    def at_once(self) -> int:
        """How many networks train at a time at most."""

    def group(self, job: Job) -> Hashable:
        """Jobs for which this is the same train as one fleet."""
        return job.phase, job.network, job.data, job.options

    def concurrent(self, job: Job) -> Hashable:
        """On a GPU, neighbouring fleets for whose jobs this is the same train concurrently."""
        return self.group(job)

    def describe(self, fleets: Sequence[Sequence[Job]]) -> str:
        """What people call some fleets that train together."""
        return f"{', '.join(dict.fromkeys(jobs[0].network for jobs in fleets))} on {fleets[0][0].data}"

    def outcomes(self, jobs: Sequence[Job], fleet: Fleet, seen: Evaluation, seconds: float) -> list[Outcome]:
        """What came of the jobs of a trained fleet."""
        last, stopped = fleet.history.train_loss[-1], fleet.history.stopped
        errors, losses = seen.errors.tolist(), seen.losses.tolist()
        return [
            Outcome(job, errors[row], losses[row], last[row], stopped.get(row), seconds / len(jobs))
            for row, job in enumerate(jobs)
        ]


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
