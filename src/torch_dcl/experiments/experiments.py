"""What section 4.1 shows beside its table: filters, loss curves, what a filter has learned; and what else was tried.

Each function trains what it needs with the learning rates that were chosen for the table, and gives plain data, which
`torch_dcl.experiments.figures` draws.
"""

import dataclasses
from collections.abc import Sequence
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from torch_dcl.experiments.columns import weights
from torch_dcl.experiments.complementary import Complementary, complementary
from torch_dcl.experiments.digitsets import Digits, Sets, make_sets
from torch_dcl.experiments.engine import Job, Report, Settings, run_jobs
from torch_dcl.experiments.search import Choice, Trial
from torch_dcl.layers import DCLLinear

__all__ = ["FILTERS", "curves_data", "filters_data", "firing", "knowledge", "tried_data"]

FILTERS = (10, 25, 50, 75, 100, 150, 200, 250)


def _sets(digits: Digits, name: str, settings: Settings, images: tuple[int, int] | None) -> Sets:
    return make_sets(digits, [name], "report", device=settings.device, images=images)


def _trial(choice: Choice, column: str, name: str) -> Trial:
    """The column's own, or for what is not in the table that of its nearest relative."""
    near = {"A4S": "A3S", "A5S": "A3S", "A4D": "A3D", "A5D": "A3D", "AB2": "B2"}
    return choice[near.get(column, column)][2 if "-II-" in name else 3]


def filters_data(
    digits: Digits,
    settings: Settings,
    choice: Choice,
    *,
    name: str = "MNIST-III-10",
    filters: Sequence[int] = FILTERS,
    seeds: int = 5,
    images: tuple[int, int] | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """Errors of DCL-A2 against its filters in a branch, with the baseline beside it."""
    trial, plain = _trial(choice, "A2", name), _trial(choice, "baseline", name)
    jobs = [Job("baseline", name, seed, plain.lr, plain.clip) for seed in range(seeds)]
    jobs += [Job("A2", name, seed, trial.lr, trial.clip, filters=n) for n in filters for seed in range(seeds)]
    outcomes = run_jobs(jobs, _sets(digits, name, settings, images), settings, report)
    classes = jobs[0].classes
    points = [
        {
            "filters": n,
            "errors": [o.error for o in outcomes if o.job.filters == n],
            "weights": weights("A2", classes, filters=n),
        }
        for n in filters
    ]
    return {"set": name, "baseline": {"errors": [o.error for o in outcomes[:seeds]]}, "points": points}


def curves_data(
    digits: Digits,
    settings: Settings,
    choice: Choice,
    *,
    name: str = "MNIST-III-10",
    columns: Sequence[str] = ("baseline", "A2", "A3D", "A3S"),
    seeds: int = 5,
    images: tuple[int, int] | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """Training and test losses by epoch."""
    settings = dataclasses.replace(settings, curves=True)
    jobs = [
        Job(column, name, seed, _trial(choice, column, name).lr, _trial(choice, column, name).clip)
        for column in columns
        for seed in range(seeds)
    ]
    outcomes = run_jobs(jobs, _sets(digits, name, settings, images), settings, report)
    series = {
        column: {
            "train_loss": [o.curves[0] for o in outcomes if o.job.column == column],
            "test_loss": [o.curves[1] for o in outcomes if o.job.column == column],
        }
        for column in columns
    }
    return {"set": name, "series": series}


def knowledge(
    digits: Digits,
    settings: Settings,
    choice: Choice,
    *,
    name: str = "MNIST-II-05",
    images: tuple[int, int] | None = None,
    report: Report | None = None,
) -> dict[str, Complementary]:
    """What a filter of A2 and of B2 responds to, picked by the rule of `complementary.pick_filter`."""
    settings = dataclasses.replace(settings, networks=True)
    sets = _sets(digits, name, settings, images)
    jobs = [
        Job(column, name, 0, _trial(choice, column, name).lr, _trial(choice, column, name).clip)
        for column in ("A2", "B2")
    ]
    shown, labels = (part.cpu() for part in sets.judge[name])
    digits_of = jobs[0].digits
    found = {}
    for outcome in run_jobs(jobs, sets, settings, report):
        assert outcome.network is not None
        layer = "fc1" if outcome.job.column == "A2" else "fc2"
        found[outcome.job.column] = complementary(
            outcome.network, layer, None, _to_show(shown, outcome.network), labels, digits=digits_of
        )
    return found


def tried_data(
    digits: Digits,
    settings: Settings,
    choice: Choice,
    *,
    name: str = "MNIST-III-10",
    columns: Sequence[str] = ("A2", "A3S", "A3D", "A4S", "A4D", "A5S", "A5D", "AB2"),
    seeds: int = 3,
    images: tuple[int, int] | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """More branches, and both layers replaced: errors, weights, and how often branches fire together."""
    settings = dataclasses.replace(settings, networks=True)
    sets = _sets(digits, name, settings, images)
    jobs = [
        Job(column, name, seed, _trial(choice, column, name).lr, _trial(choice, column, name).clip)
        for column in columns
        for seed in range(seeds)
    ]
    rows = []
    outcomes = run_jobs(jobs, sets, settings, report)
    shown = sets.judge[name][0].cpu()[:1000]
    for column in columns:
        group = [o for o in outcomes if o.job.column == column]
        fire = [firing(o.network, _to_show(shown, o.network)) for o in group if o.network is not None]
        rows.append(
            {
                "column": column,
                "errors": [o.error for o in group],
                "weights": weights(column, group[0].job.classes),
                "all_fire": mean(f["all"] for f in fire),
                "one_fires": mean(f["one"] for f in fire),
            }
        )
    return {"set": name, "columns": rows}


def _to_show(images: Tensor, model: nn.Module) -> Tensor:
    """Grey images as the network takes them."""
    return images[:, None].to(next(model.parameters()).dtype) / 255


@torch.no_grad()
def firing(model: nn.Module, images: Tensor) -> dict[str, float]:
    """How often the branches of the first DCL layer respond, and how often all of them do at once.

    Args:
        model: A network with a `DCLLinear`.
        images: What to show it.

    Returns:
        ``one``: the share of responses above zero; ``all``: the share of units whose branches all respond.
    """
    layer = next((module for module in model.modules() if isinstance(module, DCLLinear)), None)
    if layer is None:
        raise ValueError("the network has no DCLLinear whose branches could fire")
    seen: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        model.eval()(images)
    finally:
        hook.remove()
    alive = torch.stack([v > 0 for v in layer.responses(seen[0]).v])
    return {"one": float(alive.double().mean()), "all": float(alive.all(0).double().mean())}
