"""What Table 2 and the deciding chart would take: networks, images, memory, and minutes by a short trial."""

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_dcl.cli.naturals import found_of, sets_of
from torch_dcl.cli.screen import say_minutes

if TYPE_CHECKING:
    from torch import nn

    from torch_dcl.cli.tasks import Sweep

__all__ = ["Work", "estimate", "works_of"]

SIZES = {"cifar10": (50_000, 10_000), "cifar100": (50_000, 10_000), "svhn": (598_388, 26_032)}
"""Images to train on and to test with."""


class Work(NamedTuple):
    """Networks that are trained alike."""

    network: str
    data: str
    networks: int
    images: int
    epochs: int

    @property
    def seen(self) -> int:
        """Images that all of them are trained with."""
        return self.networks * self.images * self.epochs


def works_of(task: "Sweep", sets: list[str]) -> list[Work]:
    """Everything that a recipe trains on some sets."""
    from torch_dcl.experiments.natural.recipes import network_of, recipe_of  # noqa: PLC0415

    recipe, config = task.recipe, task.running.config
    asked = config.images or (None, None)
    found = []
    for name in sets:
        images = min(SIZES[name][0], asked[0] or SIZES[name][0])
        if recipe.name == "table2":
            for column in config.columns:
                network = network_of(column)
                epochs = recipe_of(network, name).scaled(recipe["scale"]).schedule.epochs
                found.append(Work(network, name, recipe["seeds"], images, epochs))
            continue
        points, whole = len(config.points), recipe_of("bignet", name)
        tried = whole.scaled(recipe["search_scale"]).schedule.epochs
        found.append(Work("bignet", name, points * len(recipe["rates"]), images - images // 10, tried))
        epochs = whole.scaled(recipe["scale"]).schedule.epochs
        found.append(Work("bignet", name, points * recipe["seeds"], images, epochs))
    return found


def estimate(task: "Sweep") -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """What the run would take, in words and as plain data; of other recipes than these two the number of jobs alone."""
    if task.recipe.name not in ("table2", "chart"):
        total, unit = task.running.total(), task.running.unit
        return [("recipe", f"{task.recipe.name}: {total:,} {unit}"), ("device", task.device)], {unit: total}
    return _natural(task)


def _natural(task: "Sweep") -> tuple[list[tuple[str, str]], dict[str, Any]]:
    recipe, config = task.recipe, task.running.config
    sets = sets_of(config)
    told = found_of(sets, config.place)
    there = [name for name in sets if told[name] is None]
    works = works_of(task, there or sets)
    networks, seen = sum(work.networks for work in works), sum(work.seen for work in works)
    names = list(dict.fromkeys(work.network for work in works))
    abreast = {name: _at_a_time([work for work in works if work.network == name], task) for name in names}
    speeds = {name: _speed(name, abreast[name], task) for name in names}
    minutes = sum(work.seen / speeds[work.network] for work in works) / 60
    gib = max(_memory(work.network, work.data, abreast[work.network], task) for work in works)
    what = f"{len(config.columns)} columns" if recipe.name == "table2" else f"{len(recipe['units'])} layers"
    short = "" if recipe["scale"] == 1 else f", shortened to {recipe['scale']:g} of the epochs"
    then = ", its cells will say so" if there else ""
    rows = [
        ("recipe", f"{recipe.name}: {what} on {', '.join(there or sets)}, {recipe['seeds']} seeds{short}"),
        ("networks", f"{networks:,}: {', '.join(names)}"),
        ("images", f"{seen:,} to train on, all epochs of all networks together"),
        *(("data", f"{name}: {'generated' if config.place == 'made-up' else 'found'}") for name in there),
        *(("data", f"{name}: not available{then}; {words}") for name, words in told.items() if words),
        ("device", task.device),
        ("memory", f"about {gib:.1f} GiB"),
        ("speed", ", ".join(f"{name} {speed:,.0f} images/s" for name, speed in speeds.items()) + ", measured just now"),
        ("time", f"about {say_minutes(60 * minutes)}, without reading and judging; DCL taken to be as fast as plain"),
    ]
    plain = {
        "networks": networks, "images": seen, "available": there,
        "absent": {name: words for name, words in told.items() if words}, "memory_gib": gib, "images_per_s": speeds,
        "minutes": minutes,
    }  # fmt: skip
    return rows, plain


def _at_a_time(works: list[Work], task: "Sweep") -> int:
    """How many networks train at the same time, of those of one architecture, DCL taken to be as plain."""
    most = int(task.recipe["most"])
    fleet = min(int(task.recipe["seeds"]), most)
    if not task.device.startswith("cuda"):
        return fleet
    of_a_set = max(sum(work.networks for work in works if work.data == name) for name in {w.data for w in works})
    return min(most // fleet * fleet, of_a_set)


def _speed(network: str, at_a_time: int, task: "Sweep") -> float:
    """Images a second over so many networks: one epoch on generated images, after a first one."""
    import dataclasses  # noqa: PLC0415

    from torch_dcl.experiments.natural.recipes import recipe_of  # noqa: PLC0415
    from torch_dcl.experiments.natural.sets import made_up  # noqa: PLC0415
    from torch_dcl.experiments.recipes.table2 import make_fleet  # noqa: PLC0415
    from torch_dcl.fleet import Schedule  # noqa: PLC0415

    recipe = recipe_of(network, "cifar10")
    gpu = task.device.startswith("cuda")
    batch, steps = (task.recipe["batch"] or recipe.batch, 50) if gpu else (10, 2)
    recipe = dataclasses.replace(recipe, batch=batch, schedule=Schedule(2))
    seeds = range(at_a_time if gpu else 1)
    fleet = make_fleet(network, seeds, made_up("cifar10", batch * steps, 10), recipe, task.running.config, task.device)
    fleet.train(1)
    start = time.perf_counter()
    fleet.train(1)
    return len(seeds) * batch * steps / (time.perf_counter() - start)


def _memory(network: str, data: str, networks: int, task: "Sweep") -> float:
    """GiB, about: images, weights with gradient, momentum and a copy, and what a step keeps for its backward pass."""
    from torch_dcl.experiments.natural.recipes import build, recipe_of  # noqa: PLC0415

    recipe = recipe_of(network, data)
    model = build(network, 100 if data == "cifar100" else 10, 0)
    kept = _outputs(model, 24 if network == "bignet" else 32)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    number = 2 if task.device.startswith("cuda") and task.running.config.wanted_precision in (None, "bfloat16") else 4
    at_a_time = min(networks, task.running.config.streams)
    asked = task.running.config.images or (None, None)
    images = sum(min(size, count or size) for size, count in zip(SIZES[data], asked, strict=True))
    batch = task.recipe["batch"] or recipe.batch
    return float(images * 3 * 32 * 32 + networks * parameters * 16 + at_a_time * batch * kept * number) / 2**30


def _outputs(model: "nn.Module", size: int) -> int:
    """How many numbers the layers of a network put out for one image."""
    import torch  # noqa: PLC0415

    count = 0

    def add(_module: object, _inputs: object, output: torch.Tensor) -> None:
        nonlocal count
        count += output.numel()

    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(add)
    with torch.no_grad():
        model.eval()(torch.zeros(1, 3, size, size))
    return count
