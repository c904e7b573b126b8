"""Many converted convolutions: a ResNet-18 whose units are all DCL, all low-rank, or all narrower, at equal weights.

The network is torchvision's ResNet-18 with a stem for small images: 3 × 3, stride 1, no pooling. Its units are the
convolutions followed by a batch norm and a ReLU that two branches make smaller: the first one of each of its
eight blocks. The question is whether the product helps inside a deep network.

The order is the protocol. Every kind of unit tries the same learning rates with one seed that the result does not use,
on nine tenths of the training images, judged with the rest. Then it trains on all training images with the result's
seeds at its rate, and the test set is used once.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torch_dcl.convert import Plan, convert_, plan
from torch_dcl.data import Dataset
from torch_dcl.experiments.natural_data import (
    MADE_UP,
    SIZES,
    NaturalConfig,
    departures,
    images_memory,
    missing_sets,
    number_size,
    read_sets,
    say_available,
    tensors_of,
    training_memory,
)
from torch_dcl.experiments.natural_networks import TITLES, TrainingRecipe, inputs_of
from torch_dcl.experiments.protocol import (
    Estimate,
    Job,
    Labelled,
    Workload,
    content_hash,
    measure_speed,
)
from torch_dcl.experiments.recipes.chart import hold_out
from torch_dcl.experiments.runner import minutes_of, outcomes_of
from torch_dcl.experiments.settings import setting
from torch_dcl.experiments.stats import compare_units, mean, mean_std_n
from torch_dcl.experiments.table import MARK, Grid, Line
from torch_dcl.experiments.unit_recipe import UnitRecipe, check_units
from torch_dcl.fleet import Fleet, Member, Schedule
from torch_dcl.models import count_weights

if TYPE_CHECKING:
    from rich.console import RenderableType

    from torch_dcl.fleet.run_folder import RunFolder

__all__ = ["UNITS", "Deep", "DeepConfig", "build_network"]

UNITS = {
    "plain": "the network as it is, with more weights than the others",
    "narrow": "fewer filters in the first convolution of every block",
    "low-rank": "one branch of a convolution and a projection",
    "dcl": "two branches, the root of their product",
}
DCL = "dcl"
DATA = ("cifar10", "cifar100")
TRAINING = TrainingRecipe(128, 0.1, Schedule(60, drops=(0.3, 0.6, 0.8), factor=0.2), 5e-4, nesterov=True)


@dataclasses.dataclass(frozen=True)
class DeepConfig(NaturalConfig):
    """The settings of the deep network."""

    data: str = setting("cifar100", "cifar10 or cifar100", choices=DATA, what="set")
    units: tuple[str, ...] = setting(
        tuple(UNITS),
        "what the network's units are; dcl and a control must be among them",
        choices=tuple(UNITS),
        what="unit",
    )
    rates: tuple[float, ...] = setting(
        (0.025, 0.05, 0.1, 0.2), "learning rates to try, the same for every unit", smoke=(0.05,), above=0, most=1e6
    )
    ratio: float = setting(0.25, "filters of one of DCL's two branches, as a fraction of the unit's", above=0, most=0.5)
    eps: float = setting(1.0, "ε of DCL; 1 keeps gradients from growing through many units", above=0, most=1e6)
    width: int = setting(64, "filters of the first stage; the others have 2, 4 and 8 times as many", smoke=8, least=8)
    search_scale: float = setting(
        0.3, "the fraction of the epochs to train to choose a learning rate, also of a shortened recipe", smoke=1.0,
        above=0, most=1,
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "rates", tuple(dict.fromkeys(self.rates)))
        check_units(self.units, tuple(UNITS))

    @property
    def trial_scale(self) -> float:
        """The fraction of the epochs that a trial trains."""
        return self.search_scale * self.scale


def build_network(
    unit: str, classes: int, seed: int, *, ratio: float = 0.25, eps: float = 1.0, width: int = 64
) -> nn.Module:
    """A ResNet-18 of a kind of unit, started from a seed; what is not replaced starts alike.

    Args:
        unit: One of `UNITS`.
        classes: Outputs.
        seed: What the start is drawn from; torch's own generator is left as it was.
        ratio: Filters of one of DCL's two branches as a fraction of the unit's: the budget of all kinds but the plain.
        eps: ε of DCL.
        width: Filters of the first stage.

    Raises:
        ValueError: There is no such unit.
    """
    if unit not in UNITS:
        raise ValueError(f"there is no unit {unit!r}; the units are {', '.join(UNITS)}")
    with torch.random.fork_rng(devices=[]):
        # Before the seed is set: planning makes a network, and only the first time.
        planned = None if unit == "plain" else _plan("low-rank" if unit == "low-rank" else DCL, ratio, eps, width)
        torch.default_generator.manual_seed(seed)
        model = _resnet(classes, width)
        if planned is not None and unit == "narrow":
            _narrow(model, planned)
        elif planned is not None:
            convert_(model, planned, init="random")
    return model


def _resnet(classes: int, width: int) -> nn.Module:
    """torchvision's ResNet-18 for images of 32 × 32."""
    from torchvision.models.resnet import BasicBlock, ResNet

    model: Any = ResNet(BasicBlock, [2, 2, 2, 2], num_classes=classes, width_per_group=64)
    if width != 64:
        model.inplanes = width
        for stage in range(4):
            made = model._make_layer(BasicBlock, width * 2**stage, 2, stride=1 if stage == 0 else 2)
            setattr(model, f"layer{stage + 1}", made)
        model.bn1, model.fc = nn.BatchNorm2d(width), nn.Linear(8 * width, classes)
    model.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
    model.maxpool = nn.Identity()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    network: nn.Module = model
    return network


@functools.cache
def _plan(unit: str, ratio: float, eps: float, width: int) -> Plan:
    """The plan of the first convolution of every block; the stem has too few inputs for two branches."""
    model = _resnet(10, width)
    made = plan(model, (3, 32, 32), branches=2, ratio=ratio, round_to=1, eps=eps)
    names = [row.name for row in made.selected if row.name.startswith("layer")]
    if unit == "low-rank":
        made = plan(model, (3, 32, 32), branches=1, ratio=2 * ratio, round_to=1, eps=0.0)
    return made.only(*names)


def _narrow(model: nn.Module, planned: Plan) -> None:
    """Give the first convolution of each block as many filters as leave the block with the weights of DCL's."""
    for row in planned.selected:
        block = model.get_submodule(row.name.rpartition(".")[0])
        first: nn.Conv2d = block.conv1  # type: ignore[assignment]
        second: nn.Conv2d = block.conv2  # type: ignore[assignment]
        per_filter = first.weight[0].numel() + second.weight[:, 0].numel()
        filters = max(1, round((row.weights_after + second.weight.numel()) / per_filter))
        block.conv1 = nn.Conv2d(first.in_channels, filters, 3, first.stride, 1, bias=False)  # type: ignore[arg-type]
        block.bn1, block.conv2 = nn.BatchNorm2d(filters), nn.Conv2d(filters, second.out_channels, 3, 1, 1, bias=False)
        for layer in (block.conv1, block.conv2):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


class Deep(UnitRecipe[DeepConfig]):
    """Every kind of unit: trials of learning rates, then all seeds."""

    name = "deep"
    config_type = DeepConfig
    data: Dataset
    parted: tuple[Labelled, Labelled]

    def prepare(self, report: Callable[[str], None]) -> None:
        """Read the set."""
        sets, _ = read_sets([self.config.data], self.config, report)
        self.data = sets[self.config.data]
        self.parted = hold_out(self.data)

    def workloads(self) -> list[Workload]:
        """Trials and seeds of every kind of unit."""
        config, kinds = self.config, len(self.config.units)
        images = min(SIZES[config.data][0], (config.images or (None, None))[0] or 10**9)
        short, whole = (TRAINING.scaled(s).schedule.epochs for s in (config.trial_scale, config.scale))
        return [
            Workload("ResNet-18", config.data, kinds * len(config.rates), images * 9 // 10, short),
            Workload("ResNet-18", config.data, kinds * config.seeds, images, whole),
        ]

    def about(self, loads: Sequence[Workload]) -> Estimate:
        """The set, and what is compared."""
        config = self.config
        words = f"{self.name} on {config.data}: {', '.join(config.units)}; assumes that all are as fast as dcl"
        absent = missing_sets([config.data], config)
        return Estimate({"recipe": words, **say_available([config.data], absent, config)}, {"units": config.units})

    def speed(self, network: str, loads: Sequence[Workload]) -> tuple[float, str]:
        """Measured on generated images."""
        config, on_gpu = self.config, self.device.startswith("cuda")
        batch, steps = (config.batch or TRAINING.batch, 20) if on_gpu else (10, 2)
        small = dataclasses.replace(
            config, root=MADE_UP, batch=batch, train_images=batch * steps, test_images=10, scale=1.0
        )
        trial = Deep(small, self.device)
        trial.prepare(lambda _: None)
        jobs = [trial.job(DCL, seed, config.rates[0]) for seed in range(config.streams if on_gpu else 1)]
        return measure_speed(trial.fleet(jobs), batch * steps)

    def memory(self, loads: Sequence[Workload]) -> float:
        config = self.config
        model = build_network(DCL, 100, 0, ratio=config.ratio, eps=config.eps, width=config.width)
        sample = torch.zeros(1, 3, 32, 32).expand(config.batch or TRAINING.batch, -1, -1, -1)
        step = training_memory(model, sample, self.at_once, config.streams, number_size(config, self.device))
        return images_memory(config.data, config) + step

    def asked(self) -> dict[str, Any]:
        """All settings but those of the machine, and the content of the set."""
        trials, images = {"search_scale": self.config.trial_scale}, content_hash(tensors_of(self.data))
        return {**super().asked(), **trials, "source": self.data.source, "sha256": images}

    def fleet(self, jobs: Sequence[Job]) -> Fleet:
        """The networks of a kind of unit."""
        config, data, is_trial = self.config, self.data, jobs[0].phase == "choose"
        recipe = TRAINING.scaled(config.trial_scale if is_trial else config.scale)
        train = self.parted[0] if is_trial else (data.train_images, data.train_labels)
        members = [
            Member(f"{j.network} {j.lr:g} {j.seed}", data.name, j.seed, j.lr, recipe.schedule, recipe.weight_decay)
            for j in jobs
        ]
        return Fleet(
            [self._network(job.network, job.seed) for job in jobs], members, {data.name: train},
            batch=config.batch or recipe.batch, momentum=recipe.momentum, nesterov=recipe.nesterov,
            precision=config.wanted_precision, device=self.device, stacked=False, compile=config.compile,
            inputs=inputs_of("wrn", data, average=config.average), streams=config.streams,
            deterministic=config.deterministic,
        )  # fmt: skip

    def _network(self, unit: str, seed: int) -> nn.Module:
        config = self.config
        return build_network(
            unit, len(self.data.classes), seed, ratio=config.ratio, eps=config.eps, width=config.width
        )  # fmt: skip

    def judge(self, jobs: Sequence[Job]) -> Mapping[str, Labelled]:
        """For a trial the training images that were kept apart; otherwise the test set."""
        test = self.data.test_images, self.data.test_labels
        return {self.data.name: self.parted[1] if jobs[0].phase == "choose" else test}

    def result(self, folder: "RunFolder") -> dict[str, Any]:
        """Errors, weights and rates of every kind as JSON."""
        config, outcomes = self.config, outcomes_of(folder)
        rows = self.rows(outcomes)
        for row in rows:
            row |= {"what": UNITS[row["unit"]], "weights": count_weights(self._network(row["unit"], 0))}
        told = departures([self.data.source], config.images, [config.batch] if config.batch else [])
        if config.scale < 1:
            told.append(f"Shortened: trained for {config.scale:g} of the epochs.")
        result = {
            "title": f"ResNet-18 on {TITLES[config.data]}, all units replaced{MARK if told else ''}",
            "told": told + self.diverged(outcomes),
            "units": rows, "epochs": TRAINING.scaled(config.scale).schedule.epochs, "eps": config.eps,
            "minutes": minutes_of(folder), "environment": folder.read("environment")[-1],
        }  # fmt: skip
        folder.write_json("deep", result)
        return result

    def shown(self, result: dict[str, Any], width: int) -> "list[RenderableType]":
        """Every kind, and the answer."""
        from rich.text import Text

        compared, lines = compare_units(result["units"], DCL), []
        for row in result["units"]:
            each = compared.get((row["unit"], "all"))
            texts = (
                row["unit"], mean_std_n(row["errors"]["all"]), "" if each is None else f"{each.gap}{each.sign}",
                f"{row['weights']:,}", f"{row['chosen']:g}{' edge' if row['at_edge'] else ''}",
            )  # fmt: skip
            lines.append(Line(texts, "bold" if row["unit"] == DCL else ""))
        gap = "difference to DCL (95 % CI)"
        table = Grid(("<unit", "test error %", gap, "weights", "rate"), lines, ("weights", gap)).as_rich(width)
        return [Text(result["title"], style="bold"), table, *result["told"], answer(result)]


def answer(result: Mapping[str, Any]) -> str:
    """The answer in one sentence."""
    compared, errors = compare_units(result["units"], DCL), {r["unit"]: r["errors"]["all"] for r in result["units"]}
    words = {"▴": "clearly more", "▾": "clearly less", "": "neither clearly more nor less"}
    parts = [f"{unit} errs {words[each.sign]}" for (unit, _), each in compared.items()]
    if not parts:
        return "One seed, or no control, cannot say whether the product is worth anything in a deep network."
    n = len(errors[DCL])
    return f"Beside DCL's {mean(errors[DCL]):.2f} %: {', '.join(parts)} (n = {n} seeds, paired t-tests, Holm, 5 %)."
