"""The images of Table 2 and of the chart, read or generated, and the settings that both share."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torch_dcl.data import Dataset, load
from torch_dcl.experiments.natural_networks import (
    DATA,
    LENET_OPTIONS,
    SIZES,
    TrainingRecipe,
    build,
    caffe_factors,
    inputs_of,
    network_of,
    recipe_of,
)
from torch_dcl.experiments.protocol import Estimate, Recipe, TrainingConfig, Workload, measure_speed
from torch_dcl.experiments.settings import SettingError, check_batch, reading_data, setting, settings_of
from torch_dcl.fleet import Fleet, Member, Schedule

__all__ = [
    "AUTO", "MADE_UP", "NOT_AVAILABLE", "SIZES", "Images", "NaturalConfig", "NaturalRecipe", "departures",
    "generate_images", "images_memory", "make_fleet", "missing_sets", "number_size", "read_data", "read_sets",
    "say_available", "tensors_of", "training_memory",
]  # fmt: skip

NOT_AVAILABLE = "not run: data not available"
MADE_UP = "made-up"
"""In place of a folder: generated images."""
AUTO = "auto"
"""In place of a folder: the usual places."""
Images = tuple[int | None, int | None]
"""How many images to train on and to test with, the first ones of a set; None for all."""


@dataclasses.dataclass(frozen=True)
class NaturalConfig(TrainingConfig):
    """The settings that the recipes on natural images share."""

    data: Any = setting(DATA, "which sets", choices=DATA, what="set")
    root: str = setting(
        AUTO, f'the folder with the sets; "{AUTO}" for the usual places, "{MADE_UP}" for generated images',
        smoke=MADE_UP,
    )  # fmt: skip
    seeds: int = setting(3, "networks of each kind", smoke=2, least=1, most=1000)
    scale: float = setting(
        1.0, "the fraction of each recipe's epochs to train; a shortened run is marked so", smoke=0.005, above=0, most=1
    )
    train_images: int = setting(0, "the first images of a set to train on; 0 for all", smoke=20, least=0)
    test_images: int = setting(0, "the first images of a set to test with; 0 for all", smoke=10, least=0)
    batch: int = setting(0, "images of a step; 0 for the recipe's", smoke=10, least=0, most=100_000)
    most: int = setting(
        12, "networks that train at a time: seeds of a column, on a GPU several columns", least=1, most=100_000,
        machine=True,
    )  # fmt: skip
    compile: bool = setting(False, "compile the networks")
    streams: int = setting(8, "how many networks of a fleet run at a time on a GPU", least=1, most=1000, machine=True)
    deterministic: bool = setting(False, "the same bits every time, also on a GPU and after a resume")
    average: bool = setting(False, "test with the mean over an image and its mirror image")

    def __post_init__(self) -> None:
        super().__post_init__()
        names = (self.data,) if isinstance(self.data, str) else self.data
        largest = [max(SIZES[name][split] for name in names) for split in range(2)]
        for key, most in zip(("train_images", "test_images"), largest, strict=True):
            if self.root != MADE_UP and getattr(self, key) > most:
                raise SettingError(
                    f"{key} is {getattr(self, key):,}, more than the {most:,} of {' and '.join(names)}; give at most "
                    "that, or 0 for all"
                )
        check_batch(self.batch, self.train_images or largest[0])

    @classmethod
    def typed(cls, key: str, value: Any) -> dict[str, Any] | None:
        """``data`` names sets, their folder, or both."""
        if key != "data":
            return None
        default, rules = settings_of(cls)["data"]
        is_one = isinstance(default, str)
        names, folder = read_data(value, rules.choices, one=is_one)
        changes: dict[str, Any] = {"root": folder} if folder is not None else {}
        return changes | ({"data": names[0] if is_one else names} if names else {})

    @property
    def place(self) -> str | None:
        """Where the sets are; None for the usual places."""
        return None if self.root in ("", AUTO) else self.root

    def check_root(self) -> None:
        """Refuse a folder that does not exist."""
        if self.place not in (None, MADE_UP) and not Path(self.root).expanduser().is_dir():
            raise SettingError(f"root is {self.root!r}, and there is no such folder; name one, {AUTO} or {MADE_UP}")

    @property
    def images(self) -> Images | None:
        """How many images to train on and to test with; None for all."""
        train, test = self.train_images or None, self.test_images or None
        return None if train is None and test is None else (train, test)


def read_data(given: str | Sequence[str], known: Sequence[str], *, one: bool = False) -> tuple[list[str], str | None]:
    """Parse ``--data``: names of sets, a folder to search for them, or both, separated by commas.

    A word that is a set's name is that set, also where a folder is called so; ``./cifar10`` is the folder.
    """
    names: set[str] = set()
    folders: list[str] = []
    words = [part.strip() for text in ([given] if isinstance(given, str) else given) for part in str(text).split(",")]
    for word in filter(None, words):
        plain = word.lower().replace("-", "").replace("_", "")
        if plain == "all" and not one:
            names.update(known)
        elif plain in known:
            names.add(plain)
        elif Path(word).expanduser().is_dir():
            folders.append(word)
        else:
            what = "no folder either" if "/" in word or "\\" in word else "no folder of that name"
            raise SettingError(f"there is no set {word!r}, and {what}", plain, known)
    if len(folders) > 1:
        raise SettingError(f"--data names {len(folders)} folders, {', '.join(folders)}; name one")
    if one and len(names) > 1:
        raise SettingError(f"data is one set, not {', '.join(sorted(names))}; run it once for each")
    if not names and not folders:
        raise SettingError(f"no data is named; give some of {', '.join(known)}, or a folder")
    return [name for name in known if name in names], folders[0] if folders else None


def tensors_of(data: Dataset) -> list[Tensor]:
    """Everything in a set that a network sees."""
    return [tensor for split in data.splits.values() for tensor in split]


def missing_sets(names: Sequence[str], config: NaturalConfig) -> dict[str, str]:
    """The sets that are not there, with what to put where; the others are read, since a run refuses damaged ones."""
    config.check_root()
    missing: dict[str, str] = {}
    for name in names if config.place != MADE_UP else ():
        missing |= _load(name, config)[1]
    return missing


def say_available(names: Sequence[str], absent: Mapping[str, str], config: NaturalConfig) -> dict[str, str]:
    """For an estimate, which of the sets are there, by name; ``absent`` has what to put where."""
    there = [name for name in names if name not in absent]
    then = ", its cells will say so" if there else ""
    return {
        **dict.fromkeys(there, "generated" if config.place == MADE_UP else "found"),
        **{name: f"not available{then}; {remedy}" for name, remedy in absent.items()},
    }


def read_sets(
    names: Sequence[str], config: NaturalConfig, report: Callable[[str], None] = print
) -> tuple[dict[str, Dataset], dict[str, str]]:
    """Read the sets that are there, and report which are not: sets by name, and by name why one is absent."""
    config.check_root()
    sets: dict[str, Dataset] = {}
    absent: dict[str, str] = {}
    for name in names:
        if config.place == MADE_UP:
            train, test = config.images or (None, None)
            sets[name] = generate_images(name, train or 400, test or 100)
        else:
            whole, reason = _load(name, config)
            absent |= reason
            if whole is None:
                continue
            sets[name] = whole if config.images is None else _first(whole, *config.images)
        report(str(sets[name]))
    if not sets:
        raise SettingError(
            f"{'; '.join(absent.values())}; or name their folder with --data. Without any, --smoke tries the path on "
            "generated images"
        )
    for name, words in absent.items():
        report(f"{name}: {NOT_AVAILABLE}; {words}")
    return sets, dict.fromkeys(absent, NOT_AVAILABLE)


def _load(name: str, config: NaturalConfig) -> tuple[Dataset | None, dict[str, str]]:
    """A set; or by its name what to put where, without the hint that applies in Python only."""
    with reading_data():
        try:
            return load(name, root=config.place), {}
        except FileNotFoundError as error:
            return None, {name: str(error).replace(" (pass extra=False to do without the extra images)", "")}


def _first(data: Dataset, train: int | None, test: int | None) -> Dataset:
    first = dataclasses.replace(
        data,
        train_images=data.train_images[:train], train_labels=data.train_labels[:train],
        test_images=data.test_images[:test], test_labels=data.test_labels[:test],
    )  # fmt: skip
    count = f"the first {len(first.train_labels):,} and {len(first.test_labels):,}"
    return dataclasses.replace(first, source=f"{data.source}, of which {count}")


def generate_images(name: str, train: int, test: int) -> Dataset:
    """Synthetic images with the classes of a set: a pattern of colours for each, under noise, the same every time.

    Every class that occurs has ten training images, if there are enough.
    """
    classes = 100 if name == "cifar100" else 10
    drawn = torch.Generator().manual_seed(DATA.index(name))
    used = max(1, min(classes, train // 10))
    patterns = torch.randint(40, 216, (classes, 3, 4, 4), generator=drawn).repeat_interleave(8, 2)
    patterns = patterns.repeat_interleave(8, 3)

    def some(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(count) % used
        noise = torch.randint(-40, 40, (count, 3, 32, 32), generator=drawn)
        return (patterns[labels] + noise).to(torch.uint8), labels

    names = tuple(f"pattern {number}" for number in range(classes))
    return Dataset(name, *some(train), *some(test), names, f"synthetic images, {train:,} + {test:,}")


def departures(sources: Iterable[str], images: Sequence[int | None] | None, batches: Iterable[int]) -> list[str]:
    """The deviations of a run from the protocol in images and batches, in sentences."""
    sentences = []
    if any(source.startswith(("synthetic", "made-up")) for source in sources):
        sentences.append("The images are synthetic: the errors show that the path runs, and nothing else.")
    elif images:
        train, test = ("all" if count is None else f"the first {count:,}" for count in images)
        sentences.append(f"Of each set {train} images were trained on, and {test} tested with.")
    if sizes := sorted(set(batches)):
        sentences.append(f"Batches of {', '.join(map(str, sizes))} images instead of the recipe's.")
    return sentences


# Fleets, and what they take


def make_fleet(
    column: str, seeds: Sequence[int], data: Dataset, recipe: TrainingRecipe, config: NaturalConfig,
    device: str = "cpu", *, stacked: bool = False,
) -> Fleet:  # fmt: skip
    """The networks of a column with these seeds, ready to be trained on a set.

    Stacked they were measured slower: they fill a GPU side by side.
    """
    norms, decay, crops = (name in recipe.options for name in LENET_OPTIONS)
    networks = [build(column, len(data.classes), seed, dropout=recipe.dropout, norms=norms) for seed in seeds]
    factors = functools.partial(caffe_factors, classifier=250.0 if decay else 1.0)
    members = [
        Member(f"{column} {data.name} {seed}", data.name, seed, recipe.lr, recipe.schedule, recipe.weight_decay)
        for seed in seeds
    ]
    return Fleet(
        networks, members, {data.name: (data.train_images, data.train_labels)}, batch=recipe.batch,
        momentum=recipe.momentum, nesterov=recipe.nesterov, factors=factors if recipe.caffe else None,
        precision=config.wanted_precision, device=device,
        inputs=inputs_of(network_of(column), data, average=config.average, crops=crops),
        stacked=stacked,
        compile=config.compile and not stacked, streams=1 if stacked else config.streams,
        deterministic=config.deterministic,
    )  # fmt: skip


C = TypeVar("C", bound=NaturalConfig)


class NaturalRecipe(Recipe[C]):
    """A recipe on natural images."""

    @abc.abstractmethod
    def workloads_on(self, name: str, images: int) -> list[Workload]:
        """What is trained on a set with this many images."""

    @functools.cached_property
    def _absent(self) -> dict[str, str]:
        """The sets that are not there, with what to put where."""
        config = self.config
        return missing_sets([config.data] if isinstance(config.data, str) else config.data, config)

    def workloads(self) -> list[Workload]:
        """What is trained on the sets that are there; on all of them where none is."""
        config, most = self.config, (self.config.images or (None, None))[0]
        sets = [config.data] if isinstance(config.data, str) else list(config.data)
        there = [name for name in sets if name not in self._absent] or sets
        return [each for name in there for each in self.workloads_on(name, min(SIZES[name][0], most or 10**9))]

    def about(self, loads: Sequence[Workload]) -> Estimate:
        """Sets, seeds, and which of the sets are there."""
        config, absent = self.config, self._absent
        sets = list(dict.fromkeys(each.data for each in loads))
        there = [name for name in sets if name not in absent]
        short = "" if config.scale == 1 else f", shortened to {config.scale:g} of the epochs"
        words = {
            "recipe": f"{self.name} on {', '.join(sets)}, {config.seeds} seeds{short}; assumes that DCL is as fast",
            **say_available(sets, absent, config),
        }
        return Estimate(words, {"available": there, "absent": absent})

    def _networks_at_once(self, network: str, loads: Sequence[Workload]) -> int:
        """How many networks of a name train at a time: on a CPU a fleet, on a GPU as many fleets as there is room."""
        config = self.config
        fleet = min(config.seeds, config.most)
        if not self.device.startswith("cuda"):
            return fleet
        of = [each for each in loads if each.network == network]
        of_a_set = max(sum(each.networks for each in of if each.data == name) for name in {each.data for each in of})
        return min(config.most // fleet * fleet, of_a_set)

    def speed(self, network: str, loads: Sequence[Workload]) -> tuple[float, str]:
        """Measured on generated images."""
        config, recipe, on_gpu = self.config, recipe_of(network, "cifar10"), self.device.startswith("cuda")
        batch, steps = (config.batch or recipe.batch, 50) if on_gpu else (10, 2)
        recipe = dataclasses.replace(recipe, batch=batch, schedule=Schedule(2))
        data = generate_images("cifar10", batch * steps, 10)
        seeds = range(self._networks_at_once(network, loads) if on_gpu else 1)
        return measure_speed(make_fleet(network, seeds, data, recipe, config, self.device), batch * steps)

    def memory(self, loads: Sequence[Workload]) -> float:
        """Of the workload that needs most."""
        return max(
            _memory(each.network, each.data, self._networks_at_once(each.network, loads), self.config, self.device)
            for each in loads
        )


def _memory(network: str, data: str, networks: int, config: NaturalConfig, device: str) -> float:
    """GiB, about, with the images."""
    size = 24 if network == "bignet" else 32
    sample = torch.zeros(1, 3, size, size).expand(config.batch or recipe_of(network, data).batch, -1, -1, -1)
    model = build(network, 100 if data == "cifar100" else 10, 0)
    return images_memory(data, config) + training_memory(
        model, sample, networks, config.streams, number_size(config, device)
    )


def images_memory(data: str, config: NaturalConfig) -> float:
    """GiB of a set's images."""
    images = sum(min(size, count or size) for size, count in zip(SIZES[data], config.images or (0, 0), strict=True))
    return images * 3 * 32 * 32 / 2**30


def number_size(config: NaturalConfig, device: str) -> int:
    """Bytes of a number that a step keeps."""
    return 2 if device.startswith("cuda") and config.wanted_precision in (None, "bfloat16") else 4


def training_memory(model: nn.Module, sample: Tensor, networks: int, at_once: int, number: int) -> float:
    """GiB, about: weights with gradient, momentum and a copy, and what a step keeps for its backward pass.

    The batch dimension of the sample says how many inputs a step has, and is expanded from one. Of all networks
    ``at_once`` run at a time. ``number`` is the bytes of a number.
    """
    outputs: list[int] = []
    handles = [
        module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output.numel()))
        for module in model.modules()
        if not list(module.children())
    ]
    with torch.no_grad():
        model.eval()(sample[:1])
    for handle in handles:
        handle.remove()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return float(networks * parameters * 16 + min(networks, at_once) * len(sample) * sum(outputs) * number) / 2**30
