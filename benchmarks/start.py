"""Errors by learning rate of three initialisations: torch's default scale, and the scale of the replaced layer.

    python benchmarks/start.py --places digits lenet --mnist FOLDER --root FOLDER --out results/start.csv
    python benchmarks/start.py --places bignet --root FOLDER --out results/start.csv
    python benchmarks/start.py --device cpu --images made-up --steps 4 --count 400 --rates 0.01 0.02 --seeds 2

Each place is the first fully-connected layer of a network: LeNet on three digits, and the LeNet variant and BigNet on
natural images, by the recipes of Table 2 in a few thousand steps. In it stand the layer itself (plain), DCL with two
branches, and the low-rank layer of DCL's weights, from one draw of a seed at three scales:

- torch: that of torch's default layer, as `convert_(…, init="random")` starts;
- weights: `match=True`, the mean square of the layer replaced for white inputs of unit mean square;
- data: `match=True, calibration=…`, its mean square on 200 training images.

Networks train on nine tenths of the training images, or on images written with five sixths of MNIST's training digits,
and are judged with the rest; test images are not used. Every rate has the same seeds. However few images there are, the
steps are the same, since short runs on few images teach a network nothing.

A rate trains where no seed diverges and the mean error is at most halfway from the lowest of the place to chance. A
start is compared with torch's by the lowest mean error, each at its own rate, over the same seeds, and by the number
of rates that train. The rule: in a place it is better where DCL's lowest error is lower by more than two standard
errors and no fewer rates train, worse where it is higher by more than two or fewer rates train, and level otherwise.
It takes the place of torch's if it is better in one place, and better or level in all. Where the lowest error of a
place is above nine tenths of chance nothing was learned, and nothing is decided: give more steps. With ``--out`` the
places of earlier calls are kept and decided on together.

``rms_plain`` and ``rms_start`` are the root mean squares of the output of the layer replaced, after its ReLU, and of
what stands in its place, on the 200 images before training.
"""

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from rows import read_rows, write_rows
from torch import Tensor, nn

from torch_dcl import convert_, plan
from torch_dcl.data import load
from torch_dcl.experiments.digits import find_digits, make_sets, read_mnist
from torch_dcl.experiments.natural_data import MADE_UP, generate_images
from torch_dcl.experiments.natural_networks import caffe_factors, inputs_of, recipe_of
from torch_dcl.experiments.recipes.chart import hold_out
from torch_dcl.experiments.stats import pool
from torch_dcl.fleet import Fleet, Member, Schedule, train_concurrently
from torch_dcl.fleet.augmentation import Inputs
from torch_dcl.fleet.device_data import DeviceData, Labelled
from torch_dcl.models import bignet, lenet, lenet_cifar

FIELDS = [
    "place", "unit", "start", "rate", "seed", "error", "stopped", "chance", "rms_plain", "rms_start", "eps", "steps",
    "images", "data", "device", "torch",
]  # fmt: skip
UNITS = {"dcl": {"branches": 2}, "low-rank": {"branches": 1, "eps": 0.0}}
STARTS = ("torch", "weights", "data")
DIGITS = "MNIST-III-01"
CALIBRATION = 200
PLACES = {
    "digits": (7200, 4, (0.02, 0.035, 0.06, 0.1, 0.17, 0.3)),
    "lenet": (4000, 3, (1e-4, 3e-4, 1e-3, 2e-3, 4e-3, 8e-3)),
    "bignet": (5000, 3, (0.005, 0.01, 0.02, 0.04, 0.08)),
}
"""Steps, seeds and rates of each place."""


class Place(NamedTuple):
    """A network, how it trains, and on what."""

    build: Callable[[int], nn.Module]
    classes: int
    rates: tuple[float, ...]
    seeds: int
    schedule: Schedule
    batch: int
    decay: float
    caffe: bool
    share: float
    train: Labelled
    judge: Labelled
    inputs: Inputs | None
    source: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", nargs="+", default=list(PLACES), choices=list(PLACES))
    parser.add_argument("--units", nargs="+", default=list(UNITS), choices=list(UNITS))
    parser.add_argument("--starts", nargs="+", default=list(STARTS), choices=STARTS)
    parser.add_argument("--rates", type=float, nargs="+", help="in place of each place's own")
    parser.add_argument("--seeds", type=int, help="in place of each place's own")
    parser.add_argument("--steps", type=int, help="in place of each place's own")
    parser.add_argument("--count", type=int, help="training images of a place; all by default")
    parser.add_argument("--images", default="cifar100", help=f"cifar10, cifar100, arrays:PATH, or {MADE_UP}")
    parser.add_argument("--root", help="the folder with the set")
    parser.add_argument("--mnist", default="excerpt", help="the folder with MNIST; the embedded digits by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = [row for row in read_rows(arguments.out) if row["place"] not in arguments.places]
    for name in arguments.places:
        start = time.perf_counter()
        place = make_place(name, arguments)
        new = measure(name, place, arguments)
        rows += new
        print(f"{name}: {len(new)} networks, {place.source}, {time.perf_counter() - start:.1f} s", flush=True)
        summarise(new)
        if arguments.out:
            write_rows(arguments.out, FIELDS, rows)
    if "dcl" in arguments.units and "torch" in arguments.starts:
        for each in arguments.starts:
            if each != "torch":
                print(decide(rows, each), flush=True)


def make_place(name: str, arguments: argparse.Namespace) -> Place:
    """A place with its data, on the device."""
    steps, seeds, rates = PLACES[name]
    steps, seeds = arguments.steps or steps, arguments.seeds or seeds
    rates = tuple(arguments.rates or rates)
    if name == "digits":
        digits = read_mnist(find_digits(arguments.mnist))
        images = arguments.count or 60_000, min(arguments.count or 10_000, 10_000)
        sets = make_sets(digits, [DIGITS], "choose", device=arguments.device, images=images)
        train, judge = sets.train[DIGITS], sets.judge[DIGITS]
        schedule = Schedule(epochs_of(steps, len(train[1]), 100), min(300, steps // 4), (0.6, 0.9))
        return Place(lenet, 1000, rates, seeds, schedule, 100, 5e-4, False, 1 / 5, train, judge, None, digits.source)
    made_up = arguments.images == MADE_UP
    data = generate_images("cifar10", 400, 10) if made_up else load(arguments.images, root=arguments.root)
    train, judge = hold_out(data)
    train = train[0][: arguments.count], train[1][: arguments.count]
    recipe = recipe_of(name, "cifar10")
    schedule = Schedule(epochs_of(steps, len(train[1]), recipe.batch), 0, recipe.schedule.drops)
    return Place(
        bignet if name == "bignet" else lenet_cifar, len(data.classes), rates, seeds, schedule, recipe.batch,
        recipe.weight_decay, recipe.caffe, 1 / 4, train, judge, inputs_of(name, data), data.name,
    )  # fmt: skip


def epochs_of(steps: int, images: int, batch: int) -> int:
    """The passes over some images that take about as many steps."""
    return max(1, round(steps / max(1, images // batch)))


def measure(name: str, place: Place, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Train all columns, rates and seeds of a place together."""
    rates = place.rates
    columns = [("plain", "torch"), *((unit, start) for unit in arguments.units for start in arguments.starts)]
    seen = as_seen(place)
    fleets, about = [], []
    for unit, start in columns:
        for seed in range(place.seeds):
            # A fleet has the rates of one start: all its networks are the same, ε included.
            model, rms_plain, rms_start = build(place, unit, start, seed, seen)
            members = [
                Member(f"{unit} {start} {rate:g}", name, seed, rate, place.schedule, place.decay) for rate in rates
            ]
            fleets.append(
                Fleet(
                    [model] * len(rates), members, {name: place.train}, batch=min(place.batch, len(place.train[1])),
                    factors=caffe_factors if place.caffe else None, device=arguments.device, inputs=place.inputs,
                    stacked=name == "digits", streams=1,
                )
            )  # fmt: skip
            eps = getattr(getattr(model.fc1, "fusion", None), "eps", math.nan)
            about.append(
                {"unit": unit, "start": start, "seed": seed, "rms_plain": rms_plain, "rms_start": rms_start, "eps": eps}
            )
    while any(fleet.epoch < fleet.epochs for fleet in fleets):
        train_concurrently(fleets)
    device = torch.cuda.get_device_name() if str(arguments.device).startswith("cuda") else str(arguments.device)
    common = {
        "place": name, "chance": f"{100 - 100 / place.classes:g}",
        "steps": fleets[0].epochs * fleets[0].steps_per_epoch, "images": len(place.train[1]), "data": place.source,
        "device": device, "torch": torch.__version__,
    }  # fmt: skip
    return [
        {**common, **each, "rate": rate, "error": round(error, 3), "stopped": fleet.history.stopped.get(row, "")}
        for each, fleet in zip(about, fleets, strict=True)
        for row, (rate, error) in enumerate(
            zip(rates, fleet.evaluate({name: place.judge}).errors.tolist(), strict=True)
        )
    ]


def as_seen(place: Place) -> Tensor:
    """The first training images as a network of the place sees them, on the CPU."""
    few = place.train[0][:CALIBRATION].cpu(), place.train[1][:CALIBRATION].cpu()
    data = DeviceData({"": few}, [""], torch.device("cpu"), place.inputs)
    return data.gather(torch.arange(len(few[1]))[None], torch.float32)[0][0]


def build(place: Place, unit: str, start: str, seed: int, seen: Tensor) -> tuple[nn.Module, float, float]:
    """A network of a column, and the scale of its layer before and after the conversion."""
    with torch.random.fork_rng(devices=[]):
        size = tuple(seen.shape[1:])
        width = round(place.build(place.classes).fc1.out_features * place.share)
        torch.default_generator.manual_seed(seed)
        model = place.build(place.classes)
        before = rms(model, seen)
        if unit != "plain":
            filters = width if unit == "dcl" else 2 * width
            planned = plan(model, size, width=filters, **UNITS[unit]).only("fc1", force=True)  # type: ignore[arg-type]
            torch.default_generator.manual_seed(1_000_000 + seed)  # planning draws an example
            data = [seen] if start == "data" else None
            convert_(model, planned, init="random", match=start != "torch", calibration=data)
    return model, before, rms(model, seen)


@torch.no_grad()
def rms(model: nn.Module, x: Tensor) -> float:
    outputs: list[Tensor] = []
    handle = model.fc1.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    model.eval()(x)
    handle.remove()
    model.train()
    return float(outputs[0].relu().double().square().mean().sqrt())


Rows = Sequence[Mapping[str, Any]]


def errors_of(rows: Rows, unit: str, start: str) -> dict[float, list[float]]:
    """Errors of a column by rate, one a seed; none where a seed diverged."""
    of_column = [row for row in rows if (row["unit"], row["start"]) == (unit, start)]
    errors: dict[float, list[float]] = {}
    for rate in sorted({float(row["rate"]) for row in of_column}):
        of_rate = [row for row in of_column if float(row["rate"]) == rate]
        failed = any(row["stopped"] != "" for row in of_rate)
        errors[rate] = [] if failed else [float(row["error"]) for row in of_rate]
    return errors


def trained(rows: Rows, unit: str, start: str) -> dict[float, list[float]]:
    """Errors by rate at the rates that train; none where nothing was learned in the whole place."""
    chance = float(rows[0]["chance"])
    columns = dict.fromkeys((row["unit"], row["start"]) for row in rows)
    lowest = min((fmean(e) for column in columns for e in errors_of(rows, *column).values() if e), default=chance)
    bound = (lowest + chance) / 2 if lowest <= 0.9 * chance else -1.0
    return {rate: e for rate, e in errors_of(rows, unit, start).items() if e and fmean(e) <= bound}


def judge_start(rows: Rows, start: str, unit: str = "dcl") -> tuple[str, str]:
    """A start beside torch's in a place: better, worse, level or not decided, and why."""
    ours, theirs = trained(rows, unit, start), trained(rows, unit, "torch")
    if not ours or not theirs:
        word = "worse" if theirs else "better" if ours else "not decided"
        return word, f"trains at {len(ours)} rates, torch's at {len(theirs)}"
    best, other = (min(each.values(), key=fmean) for each in (ours, theirs))
    gap = pool([a - b for a, b in zip(best, other, strict=True)])
    apart = 0 if gap.error is None or abs(gap.mean) <= 2 * gap.error else 1 if gap.mean > 0 else -1
    more = len(ours) - len(theirs)
    word = "worse" if apart > 0 or more < 0 else "better" if apart < 0 else "level"
    return word, f"{gap} points at its best rate (n = {gap.n}), trains at {len(ours)} rates, torch's at {len(theirs)}"


def summarise(rows: Rows) -> None:
    """Print errors by rate and the range of rates that train, a line a column, and how the starts compare."""
    columns = dict.fromkeys((row["unit"], row["start"]) for row in rows)
    print(f"{'':20}" + "".join(f"{rate:>9g}" for rate in errors_of(rows, *next(iter(columns)))) + "   trains")
    for unit, start in columns:
        first = next(row for row in rows if (row["unit"], row["start"]) == (unit, start))
        good = list(trained(rows, unit, start))
        told = f"{good[0]:g} to {good[-1]:g}, {len(good)} rates" if good else "none"
        scale = f"rms {float(first['rms_start']):.3g} for {float(first['rms_plain']):.3g}"
        errors = errors_of(rows, unit, start).values()
        shown = "".join(f"{f'{fmean(e):.2f}' if e else 'diverged':>9}" for e in errors)
        print(f"{f'{unit} {start}':20}{shown}   {told}; {scale}")
    for unit, start in columns:
        if start != "torch":
            print(f"{unit} {start}: {': '.join(judge_start(rows, start, unit))}")


def decide(rows: Rows, start: str) -> str:
    """Whether a start would take the place of torch's, by DCL in all places."""
    places = dict.fromkeys(row["place"] for row in rows)
    words = {place: judge_start([row for row in rows if row["place"] == place], start)[0] for place in places}
    takes = "better" in words.values() and not {"worse", "not decided"} & set(words.values())
    told = ", ".join(f"{place} {word}" for place, word in words.items())
    return f"By the rule {start} {'takes' if takes else 'does not take'} the place of torch's start: {told}."


if __name__ == "__main__":
    main()
