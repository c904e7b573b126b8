"""What a run would take, without running it: networks, images, memory, and minutes by a short trial."""

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from torch_dcl.data.digits import source
from torch_dcl.experiments import columns, natural_networks
from torch_dcl.experiments.digits import IMAGES, DigitRecipe, find_mnist
from torch_dcl.experiments.natural_data import SIZES, NaturalConfig, generate_images, missing_sets
from torch_dcl.experiments.protocol import Recipe
from torch_dcl.experiments.recipes.table2 import make_fleet
from torch_dcl.experiments.runner import plan_fleets
from torch_dcl.fleet import Fleet, Member, Schedule

if TYPE_CHECKING:
    from torch import nn

__all__ = ["estimate"]

H200 = 3.0e6  # images a second over the whole of Table 1, judging included: results/table1.json, 950 networks, 7.6 min
PER_NETWORK = 1.03 / 75  # GiB: results/fleet.csv, 75 networks, batch 100, 1,000 classes, DCL-A2, bfloat16

Rows = list[tuple[str, str]]


def estimate(recipe: Recipe[Any], say_time: Callable[[float], str]) -> tuple[Rows, dict[str, Any]]:
    """What a run would take, in words and as plain data.

    Args:
        recipe: The recipe; its data need not be there.
        say_time: Seconds in words.
    """
    if isinstance(recipe, DigitRecipe):
        return _digits(recipe, say_time)
    if isinstance(recipe.config, NaturalConfig):
        return _natural(recipe, say_time)
    recipe.check()
    plain = {name: value for name, value in Recipe.asked(recipe).items() if value}
    rows = [(name, ", ".join(map(str, value)) if isinstance(value, tuple) else str(value))
            for name, value in plain.items()]  # fmt: skip
    return [("recipe", recipe.name), *rows, ("device", recipe.device)], plain


def _digits(recipe: DigitRecipe[Any], say_time: Callable[[float], str]) -> tuple[Rows, dict[str, Any]]:
    config, jobs, device = recipe.config, recipe.planned(), recipe.device
    networks, per_network = recipe.total_networks(), (config.images or IMAGES)[0]
    images = networks * per_network * config.epochs
    fleets = plan_fleets(jobs, recipe.group, recipe.at_once, recipe.networks)
    largest = max(sum(map(recipe.networks, fleet)) for fleet in fleets)
    sets = len({job.data.partition("@")[0] for job in jobs})
    gib = largest * PER_NETWORK + sets * per_network * 28 * 28 / 2**30
    speed, words = _digit_speed(device)
    seconds, digits = images / speed, source(find_mnist(config.data))
    epochs = f"{config.epochs} epoch{'s' if config.epochs > 1 else ''}"
    rows = [
        ("recipe", f"{recipe.name}: {sets} set{'s' if sets > 1 else ''}, {len(jobs):,} entries"),
        ("networks", f"{networks:,}, in {len(fleets)} fleets of up to {largest}"),
        ("images", f"{images:,} to train on: {per_network:,} a network, {epochs}"),
        ("digits", digits),
        ("device", device),
        ("memory", f"about {gib:.1f} GiB"),
        ("speed", f"{speed:,.0f} images/s ({words})"),
        ("time", f"about {say_time(seconds)}, without writing the sets and judging"),
    ]
    if device == "cpu":
        rows.append(("", f"about {say_time(images / H200)} on an H200"))
    plain = {
        "entries": len(jobs), "networks": networks, "fleets": len(fleets), "images": images, "digits": digits,
        "memory_gib": gib, "images_per_s": speed, "speed": words, "minutes": seconds / 60,
    }  # fmt: skip
    return rows, plain


def _digit_speed(device: str) -> tuple[float, str]:
    """Images a second over all networks of a fleet, and where the number is from."""
    if device.startswith("cuda"):
        name = torch.cuda.get_device_name(device)
        if "H200" in name:
            return H200, "as measured on an H200, results/table1.json"
        return _timed(_digit_fleet(device, 64, 2000), 2000), f"measured just now on {name}"
    threads = torch.get_num_threads()
    words = f"measured just now on this CPU, {threads} thread{'s' if threads > 1 else ''}"
    return _timed(_digit_fleet(device, 6, 200), 200), words


def _digit_fleet(device: str, networks: int, images: int) -> Fleet:
    drawn = torch.Generator().manual_seed(0)
    data = (
        torch.randint(256, (images, 28, 28), dtype=torch.uint8, generator=drawn),
        torch.randint(100, (images,), generator=drawn),
    )
    members = [Member("trial", "noise", seed, 0.01, Schedule(2)) for seed in range(networks)]
    return Fleet([columns.build("A2", 100, m.seed) for m in members], members, {"noise": data}, device=device)


def _timed(fleet: Fleet, images: int) -> float:
    """Images a second over all networks, in the second epoch."""
    fleet.train(1)
    start = time.perf_counter()
    fleet.train(1)
    return len(fleet) * images / (time.perf_counter() - start)


def _natural(recipe: Recipe[Any], say_time: Callable[[float], str]) -> tuple[Rows, dict[str, Any]]:
    config: NaturalConfig = recipe.config
    sets = [config.data] if isinstance(config.data, str) else list(config.data)
    absent = missing_sets(sets, config)
    there = [name for name in sets if name not in absent]
    works = recipe.works(there or sets)
    networks, seen = sum(w.networks for w in works), sum(w.networks * w.images * w.epochs for w in works)
    names = list(dict.fromkeys(work.network for work in works))
    at_once = {}
    for name in names:
        fleet = min(config.seeds, config.most)
        of_a_set = max(sum(w.networks for w in works if (w.network, w.data) == (name, data)) for data in there or sets)
        at_once[name] = min(config.most // fleet * fleet, of_a_set) if recipe.device.startswith("cuda") else fleet
    speeds = {name: _natural_speed(name, at_once[name], config, recipe.device) for name in names}
    seconds = sum(w.networks * w.images * w.epochs / speeds[w.network] for w in works)
    gib = max(_natural_memory(work.network, work.data, at_once[work.network], config, recipe.device) for work in works)
    short = "" if config.scale == 1 else f", shortened to {config.scale:g} of the epochs"
    then = ", its cells will say so" if there else ""
    rows = [
        ("recipe", f"{recipe.name} on {', '.join(there or sets)}, {config.seeds} seeds{short}"),
        ("networks", f"{networks:,}: {', '.join(names)}"),
        ("images", f"{seen:,} to train on, all epochs of all networks together"),
        *(("data", f"{name}: {'generated' if config.place == 'made-up' else 'found'}") for name in there),
        *(("data", f"{name}: not available{then}; {words}") for name, words in absent.items()),
        ("device", recipe.device),
        ("memory", f"about {gib:.1f} GiB"),
        ("speed", ", ".join(f"{name} {speed:,.0f} images/s" for name, speed in speeds.items()) + ", measured just now"),
        ("time", f"about {say_time(seconds)}, without reading and judging; DCL taken to be as fast as plain"),
    ]
    plain = {
        "networks": networks, "images": seen, "available": there, "absent": absent, "memory_gib": gib,
        "images_per_s": speeds, "minutes": seconds / 60,
    }  # fmt: skip
    return rows, plain


def _natural_speed(network: str, at_once: int, config: NaturalConfig, device: str) -> float:
    """Images a second over so many networks, on generated images."""
    recipe, on_gpu = natural_networks.recipe_of(network, "cifar10"), device.startswith("cuda")
    batch, steps = (config.batch or recipe.batch, 50) if on_gpu else (10, 2)
    recipe = dataclasses.replace(recipe, batch=batch, schedule=Schedule(2))
    data = generate_images("cifar10", batch * steps, 10)
    return _timed(make_fleet(network, range(at_once if on_gpu else 1), data, recipe, config, device), batch * steps)


def _natural_memory(network: str, data: str, networks: int, config: NaturalConfig, device: str) -> float:
    """GiB, about: images, weights with gradient, momentum and a copy, and what a step keeps for its backward pass."""
    model = natural_networks.build(network, 100 if data == "cifar100" else 10, 0)
    kept = _outputs(model, 24 if network == "bignet" else 32)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    number = 2 if device.startswith("cuda") and config.wanted_precision in (None, "bfloat16") else 4
    images = sum(min(size, count or size) for size, count in zip(SIZES[data], config.images or (0, 0), strict=True))
    batch = config.batch or natural_networks.recipe_of(network, data).batch
    step = min(networks, config.streams) * batch * kept * number
    return float(images * 3 * 32 * 32 + networks * parameters * 16 + step) / 2**30


def _outputs(model: "nn.Module", size: int) -> int:
    """How many numbers the layers of a network put out for one image."""
    counts: list[int] = []
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(lambda _module, _inputs, output: counts.append(output.numel()))
    with torch.no_grad():
        model.eval()(torch.zeros(1, 3, size, size))
    return sum(counts)
