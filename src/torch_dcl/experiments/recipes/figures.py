"""The figures of section 4.1: filters of a branch, loss curves, what filters respond to, and more branches.

``shares`` has no figure: it counts the filters that are as the one which ``knowledge`` shows, in DCL-A2 and in the same
layer with its branches summed.

Each part trains what it needs with the learning rates of Table 1, and leaves plain data in a file of its name, from
which `torch_dcl.report` draws.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from torch_dcl.experiments.claims import Finding, further_findings
from torch_dcl.experiments.columns import Choice, Trial, choice_as_plain, read_choice, stored_choice, weights
from torch_dcl.experiments.complementary import as_plain, class_responses, complementary, shares
from torch_dcl.experiments.digits import (
    SCHEDULE,
    SETS_RULES,
    TWO,
    DigitConfig,
    DigitRecipe,
    classes_of,
    digits_of,
    trial_job,
)
from torch_dcl.experiments.protocol import Job, Outcome, RunFolder, Shown, Trained, finite
from torch_dcl.experiments.runner import outcomes_of
from torch_dcl.experiments.settings import setting
from torch_dcl.layers import DCLLinear

__all__ = ["FILTERS", "PARTS", "Figures", "FiguresConfig", "firing", "parts_of"]

PARTS = ("filters", "curves", "knowledge", "tried", "shares")
FILTERS = (10, 25, 50, 75, 100, 150, 200, 250)
COLUMNS = {
    "curves": ("baseline", "A2", "A3D", "A3S"),
    "knowledge": ("A2", "B2"),
    "tried": ("A2", "A3S", "A3D", "A4S", "A4D", "A5S", "A5D", "AB2"),
    "shares": ("A2", "summed"),
}
FIRING_IMAGES = 1000


@dataclasses.dataclass(frozen=True)
class FiguresConfig(DigitConfig):
    """The settings of the figures."""

    parts: tuple[str, ...] = setting(PARTS, "which", choices=PARTS, what="part")
    set: str = setting("MNIST-III-10", "the set of filters, curves and tried", smoke=TWO[0], **SETS_RULES)
    knowledge_set: str = setting("MNIST-II-05", "the set of knowledge and shares", smoke=TWO[0], **SETS_RULES)
    filters: tuple[int, ...] = setting(FILTERS, "numbers of filters in a branch", smoke=(10, 25, 50), least=1, most=500)
    seeds: int = setting(5, "networks of each kind; knowledge looks at one", smoke=2, least=1, most=1000)
    # One epoch gives no curve to draw.
    epochs: int = setting(SCHEDULE.epochs, "passes over a set", smoke=2, least=1, most=1_000_000)


class Figures(DigitRecipe[FiguresConfig]):
    """The networks of every part; a part is a phase."""

    name = "figures"
    unit = "trainings"
    config_type = FiguresConfig

    def __init__(self, config: FiguresConfig, device: str = "cpu", choice: Choice | None = None) -> None:
        super().__init__(config, device)
        self.choice = stored_choice() if choice is None else choice

    def asked(self) -> dict[str, Any]:
        """The settings, the content of MNIST, and the learning rates."""
        return {**super().asked(), "choice": choice_as_plain(self.choice, self.choice)}

    def jobs(self, outcomes: Mapping[Job, Outcome]) -> list[Job]:
        """The jobs of all parts; none depends on another."""
        return [job for part in self.config.parts for job in self.jobs_of(part)]

    def jobs_of(self, part: str) -> list[Job]:
        """The jobs of a part."""
        config, seeds = self.config, range(self.config.seeds)
        if part == "filters":
            plain = [self._job("baseline", config.set, seed, part) for seed in seeds]
            widths = sorted(set(config.filters))
            return plain + [self._job("A2", config.set, seed, part, width) for width in widths for seed in seeds]
        if part == "knowledge":
            return [self._job(column, config.knowledge_set, 0, part) for column in COLUMNS[part]]
        name = config.knowledge_set if part == "shares" else config.set
        return [self._job(column, name, seed, part) for column in COLUMNS[part] for seed in seeds]

    def _job(self, column: str, name: str, seed: int, part: str, filters: int | None = None) -> Job:
        return trial_job(column, name, seed, trial_of(self.choice, column, name), part, filters=filters)

    def judges_epochs(self, jobs: Sequence[Job]) -> bool:
        return jobs[0].phase == "curves"

    def outcomes(self, jobs: Sequence[Job], trained: Trained) -> list[Outcome]:
        """Errors and losses, and what is measured in the trained networks."""
        outcomes = super().outcomes(jobs, trained)
        if jobs[0].phase not in ("knowledge", "tried", "shares"):
            return outcomes
        with_extra = []
        for row, outcome in enumerate(outcomes):
            network, job = trained.fleet.network(row), outcome.job
            images, labels = (part.cpu() for part in self.sets_of(jobs).judge[job.data])
            if job.phase == "tried":
                extra: dict[str, Any] = firing(network, as_inputs(images[:FIRING_IMAGES], network))
            elif job.phase == "shares":
                inputs = as_inputs(images, network)
                extra = shares(class_responses(network, "fc1", inputs, labels, digits=digits_of(job.data)))
            else:
                layer = "fc1" if job.network == "A2" else "fc2"
                inputs, digits = as_inputs(images, network), digits_of(job.data)
                response = complementary(network, layer, None, inputs, labels, digits=digits)
                extra = as_plain(response, f"DCL-{job.network} on {job.data}")
            with_extra.append(dataclasses.replace(outcome, extra={job.phase: extra}))
        return with_extra

    def result(self, folder: RunFolder) -> dict[str, Any]:
        parts = parts_of(folder, outcomes_of(folder))
        for part, data in parts.items():
            folder.write_json(part, data)
        return parts

    @classmethod
    def so_far(cls, folder: RunFolder, outcomes: Mapping[Job, Outcome]) -> dict[str, Callable[[], Any]]:
        parts = folder.recipe["parts"] if "choice" in folder.recipe else ()  # an earlier version noted no rates
        return {part: functools.partial(_part_of, folder, outcomes, part) for part in parts}

    def shown(self, result: dict[str, Any], width: int) -> Shown:
        """The claims that the figures answer."""
        findings: list[Finding] = further_findings(result)
        return [f"{finding.claim} {finding.verdict.capitalize()}: {finding.evidence}" for finding in findings]


def trial_of(choice: Choice, column: str, name: str) -> Trial:
    """The trial of a column; columns outside of the table use that of the nearest one."""
    near = {"A4S": "A3S", "A5S": "A3S", "A4D": "A3D", "A5D": "A3D", "AB2": "B2"}
    return choice[near.get(column, column)][digits_of(name)]


def parts_of(folder: RunFolder, known: Mapping[Job, Outcome]) -> dict[str, Any]:
    """The data of the parts whose jobs are all done in a run folder."""
    asked = folder.recipe
    config = FiguresConfig(**{key: asked[key] for key in ("parts", "set", "knowledge_set", "filters", "seeds")})
    recipe = Figures(config, choice=read_choice(asked["choice"]))
    parts = {}
    for part in config.parts:
        jobs = recipe.jobs_of(part)
        if all(job in known for job in jobs):
            name = config.knowledge_set if part in ("knowledge", "shares") else config.set
            parts[part] = {"set": name, **finite(_DATA[part]([known[job] for job in jobs]))}
    return parts


def _part_of(folder: RunFolder, known: Mapping[Job, Outcome], part: str) -> Any:
    return parts_of(folder, known).get(part)


def _by(outcomes: Sequence[Outcome], key: str) -> dict[Any, list[Outcome]]:
    groups: dict[Any, list[Outcome]] = {}
    for outcome in outcomes:
        job = outcome.job
        groups.setdefault(job.network if key == "network" else int(job.option(key, 0)), []).append(outcome)
    return groups


def _filters(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Errors of DCL-A2 by filters of a branch, and of the baseline."""
    by_width, classes = _by(outcomes, "filters"), classes_of(outcomes[0].job)
    baseline = [o.error for o in by_width.pop(0)]
    points = [
        {"filters": width, "errors": [o.error for o in group], "weights": weights("A2", classes, filters=width)}
        for width, group in by_width.items()
    ]
    return {"baseline": {"errors": baseline}, "points": points}


def _curves(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Training and test losses by epoch."""
    kinds = ("train_loss", "test_loss")
    return {
        "series": {
            column: {kind: [o.extra["curves"][kind] for o in group] for kind in kinds}
            for column, group in _by(outcomes, "network").items()
        }
    }


def _knowledge(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What a filter of A2 and of B2 responds to, picked by the rule of `complementary.pick_filter`."""
    return {"networks": {outcome.job.network: outcome.extra["knowledge"] for outcome in outcomes}}


def _tried(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """More branches, and both layers replaced: errors, weights, and how often branches fire together."""
    rows = [
        {
            "column": column,
            "errors": [o.error for o in group],
            "weights": weights(column, classes_of(group[0].job)),
            "all_fire": mean(o.extra["tried"]["all"] for o in group),
            "one_fires": mean(o.extra["tried"]["one"] for o in group),
        }
        for column, group in _by(outcomes, "network").items()
    ]
    return {"columns": rows}


def _shares(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Of each column and seed: filters, the shares of them that satisfy the rule, and the error."""
    return {
        "columns": {
            column: [{**o.extra["shares"], "error": o.error} for o in group]
            for column, group in _by(outcomes, "network").items()
        }
    }


_DATA = {"filters": _filters, "curves": _curves, "knowledge": _knowledge, "tried": _tried, "shares": _shares}


def as_inputs(images: Tensor, model: nn.Module) -> Tensor:
    """Grey images of bytes as a network takes them."""
    return images[:, None].to(next(model.parameters()).dtype) / 255


@torch.no_grad()
def firing(model: nn.Module, images: Tensor) -> dict[str, float]:
    """The fraction of branch responses of the first DCL layer above zero, and of units whose branches all are."""
    layer = next((module for module in model.modules() if isinstance(module, DCLLinear)), None)
    if layer is None:
        raise ValueError("the network has no DCLLinear whose branches could fire")
    inputs_seen: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: inputs_seen.append(inputs[0]))
    try:
        model.eval()(images)
    finally:
        hook.remove()
    alive = torch.stack([v > 0 for v in layer.responses(inputs_seen[0]).v])
    return {"one": float(alive.double().mean()), "all": float(alive.all(0).double().mean())}
