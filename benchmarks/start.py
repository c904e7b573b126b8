"""Errors by learning rate of three initialisations: torch's default scale, and the scale of the replaced layer.

    python benchmarks/start.py --mnist FOLDER --images cifar100 --root FOLDER --out results/start.csv
    python benchmarks/start.py --device cpu --images made-up --epochs 1 --count 400 --rates 0.01 --seeds 1

Each place is the first fully-connected layer of a network: BigNet and the LeNet variant on natural images, by the
recipes of Table 2 in a few epochs, and LeNet on three digits. In it stand the layer itself (plain), DCL with two
branches, and the low-rank layer of DCL's weights, from one draw of a seed at three scales:

- torch: that of torch's default layer, as `convert_(…, init="random")` starts;
- weights: `match=True`, the mean square of the layer replaced for white inputs of unit mean square;
- data: `match=True, calibration=…`, its mean square on 200 training images.

Networks train on nine tenths of the training images, or on images written with five sixths of MNIST's training digits,
and are judged with the rest; test images are not used. Every rate has the same seeds. A rate trains where no seed
diverges and the mean error is below chance, and at most halfway there from the lowest of its column. The summary names
the lowest and the highest such rate and their ratio. ``rms_plain`` and ``rms_start`` are the root mean squares of the
output of the layer replaced, after its ReLU, and of what stands in its place, on the 200 images before training.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rows import write_rows
from torch import Tensor, nn

from torch_dcl import convert_, plan
from torch_dcl.data import load
from torch_dcl.experiments.digits import find_digits, make_sets, read_mnist
from torch_dcl.experiments.natural_data import MADE_UP, generate_images
from torch_dcl.experiments.natural_networks import caffe_factors, inputs_of, recipe_of
from torch_dcl.experiments.recipes.chart import hold_out
from torch_dcl.fleet import Fleet, Member, Schedule, train_concurrently
from torch_dcl.fleet.augmentation import Inputs
from torch_dcl.fleet.device_data import DeviceData, Labelled
from torch_dcl.models import bignet, lenet, lenet_cifar

FIELDS = [
    "place", "unit", "start", "rate", "seed", "error", "stopped", "chance", "rms_plain", "rms_start", "eps", "epochs",
    "images", "data", "device", "torch",
]  # fmt: skip
UNITS = {"dcl": {"branches": 2}, "low-rank": {"branches": 1, "eps": 0.0}}
STARTS = ("torch", "weights", "data")
DIGITS = "MNIST-III-01"
CALIBRATION = 200


class Place(NamedTuple):
    """A network, how it trains, and on what."""

    build: Callable[[int], nn.Module]
    classes: int
    rates: tuple[float, ...]
    epochs: int
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
    parser.add_argument(
        "--places", nargs="+", default=["bignet", "lenet", "digits"], choices=["bignet", "lenet", "digits"]
    )
    parser.add_argument("--units", nargs="+", default=list(UNITS), choices=list(UNITS))
    parser.add_argument("--starts", nargs="+", default=list(STARTS), choices=STARTS)
    parser.add_argument("--rates", type=float, nargs="+", help="in place of each place's own")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epochs", type=int, help="in place of each place's own")
    parser.add_argument("--count", type=int, help="training images of a place; all by default")
    parser.add_argument("--images", default="cifar100", help=f"cifar10, cifar100, arrays:PATH, or {MADE_UP}")
    parser.add_argument("--root", help="the folder with the set")
    parser.add_argument("--mnist", default="excerpt", help="the folder with MNIST; the embedded digits by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    for name in arguments.places:
        start = time.perf_counter()
        place = make_place(name, arguments)
        new = measure(name, place, arguments)
        rows += new
        print(f"{name}: {len(new)} networks, {place.source}, {time.perf_counter() - start:.1f} s", flush=True)
        summarise(new)
        if arguments.out:
            write_rows(arguments.out, FIELDS, rows)


def make_place(name: str, arguments: argparse.Namespace) -> Place:
    """A place with its data, on the device."""
    if name == "digits":
        digits = read_mnist(find_digits(arguments.mnist))
        images = arguments.count or 60_000, min(arguments.count or 10_000, 10_000)
        sets = make_sets(digits, [DIGITS], "choose", device=arguments.device, images=images)
        epochs = arguments.epochs or 12
        return Place(
            lenet, 1000, (0.02, 0.035, 0.06, 0.1, 0.17, 0.3), epochs, Schedule(epochs, 300, (0.6, 0.9)), 100, 5e-4,
            False, 1 / 5, sets.train[DIGITS], sets.judge[DIGITS], None, digits.source,
        )  # fmt: skip
    made_up = arguments.images == MADE_UP
    data = generate_images("cifar10", 400, 10) if made_up else load(arguments.images, root=arguments.root)
    train, judge = hold_out(data)
    train = train[0][: arguments.count], train[1][: arguments.count]
    recipe = recipe_of(name, "cifar10")
    epochs = arguments.epochs or (8 if name == "bignet" else 20)
    rates = (0.003, 0.01, 0.02, 0.04, 0.08, 0.16) if name == "bignet" else (1e-4, 3e-4, 1e-3, 2e-3, 4e-3, 8e-3)
    drops = recipe.schedule.drops
    return Place(
        bignet if name == "bignet" else lenet_cifar, len(data.classes), rates, epochs, Schedule(epochs, 0, drops),
        recipe.batch, recipe.weight_decay, recipe.caffe, 1 / 4, train, judge, inputs_of(name, data), data.name,
    )  # fmt: skip


def measure(name: str, place: Place, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Train all columns, rates and seeds of a place together."""
    rates = arguments.rates or place.rates
    columns = [("plain", "torch"), *((unit, start) for unit in arguments.units for start in arguments.starts)]
    seen = as_seen(place)
    fleets, about = [], []
    for unit, start in columns:
        for seed in range(arguments.seeds):
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
        "place": name, "chance": f"{100 - 100 / place.classes:g}", "epochs": place.epochs,
        "images": len(place.train[1]), "data": place.source, "device": device, "torch": torch.__version__,
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


def summarise(rows: Sequence[dict[str, object]]) -> None:
    """Print errors by rate and the range of rates that train, a line a column."""
    rates = sorted({float(row["rate"]) for row in rows})  # type: ignore[arg-type]
    print(f"{'':20}" + "".join(f"{rate:>9g}" for rate in rates) + "   trains")
    for unit, start in dict.fromkeys((row["unit"], row["start"]) for row in rows):
        of_column = [row for row in rows if (row["unit"], row["start"]) == (unit, start)]
        errors = {}
        for rate in rates:
            of_rate = [row for row in of_column if row["rate"] == rate]
            failed = any(row["stopped"] != "" for row in of_rate)
            errors[rate] = math.nan if failed else statistics.fmean(float(row["error"]) for row in of_rate)  # type: ignore[arg-type]
        finite = [error for error in errors.values() if not math.isnan(error)]
        chance = float(of_column[0]["chance"])  # type: ignore[arg-type]
        bound = min((min(finite, default=0.0) + chance) / 2, chance - 1)
        good = [rate for rate, error in errors.items() if error <= bound]
        told = f"{good[0]:g} to {good[-1]:g}, {good[-1] / good[0]:.0f} times" if good else "none"
        scale = f"rms {of_column[0]['rms_start']:.3g} for {of_column[0]['rms_plain']:.3g}"
        shown = "".join(f"{'diverged' if math.isnan(e) else f'{e:.2f}':>9}" for e in errors.values())
        print(f"{f'{unit} {start}':20}{shown}   {told}; {scale}")


if __name__ == "__main__":
    main()
