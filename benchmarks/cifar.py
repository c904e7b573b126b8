"""Throughput of Table 2's networks on CIFAR, plain and with DCL, compared with a plain DataLoader loop.

    python benchmarks/cifar.py --out results/cifar.csv
    python benchmarks/cifar.py --device cpu --images 500 --networks lenet --batch 50 --rounds 1 --compile no

Images are random bytes of CIFAR's size: speed does not depend on what they show. Each network is trained by the recipe
of Table 2 (`torch_dcl.experiments.natural_networks`), in its precision, as a user of `dcl run table2` gets it: order,
crops and mirrorings drawn on the device, forward, loss, backward, SGD.

- fleet: `torch_dcl.fleet.Fleet` with ``--seeds`` networks, by itself and compiled; an epoch is one pass of each over
  the images.
- concurrent: the fleets of all columns at the same time, as `dcl run table2` trains them.
- loader: torchvision's transforms on PIL images in worker processes of a DataLoader, one network in eager torch with
  autocast, torch's fused SGD; the same augmentation, batch and precision. It is for the plain column only.

All columns of a network, and its loader, are measured in turns in one process; the median of the rounds is kept.
``ratio_to_plain`` is the time of an image over that of the plain network's, both compiled or both not, so below 1 DCL
is faster; ``ratio_low`` and ``ratio_high`` are the least and the greatest of a round. ``minutes_full_recipe`` is for
all networks of the row and 50,000 images an epoch. Floating-point operations are those of products and convolutions,
forward and backward, counted by `torch.utils.flop_counter`.

``--compilations`` compiles each network so often (see ``trials.py``). All take turns, and medians are over all.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import trials
from rows import write_rows
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from torch_dcl.data import Dataset
from torch_dcl.experiments.natural_data import NaturalConfig, make_fleet
from torch_dcl.experiments.natural_networks import COLUMNS, NETWORKS, build, network_of, recipe_of
from torch_dcl.fleet import Fleet, train_concurrently
from torch_dcl.stochastic import advance_branches_

FIELDS = [
    "column", "method", "networks", "batch", "precision", "stacked", "compile", "streams",
    "epochs_per_s", "images_per_s", "ratio_to_plain", "ratio_low", "ratio_high", "ratio_to_loader",
    "minutes_full_recipe", "tflops", "share_of_peak", "peak_gib", "images", "rounds", "compilations", "device", "torch",
]  # fmt: skip
# Dense bfloat16 products, operations a second, from the makers' sheets.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--variants", nargs="+", default=["", "+dcl", "+dcl3s"], choices=["", "+dcl", "+dcl3s"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="networks of a fleet")
    parser.add_argument("--images", type=int, default=50_000, help="images of an epoch")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--batch", type=int, help="in place of the recipe's")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", choices=["bfloat16", "float32"])
    parser.add_argument("--stacked", action="store_true", help="networks of a fleet as one stack")
    parser.add_argument("--compile", nargs="+", default=["no", "yes"], choices=["no", "yes"])
    parser.add_argument("--compilations", type=int, default=1, help="of each network, with trials of their own")
    parser.add_argument("--streams", type=int, default=8, help="networks of a fleet that run at a time")
    parser.add_argument("--loader", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--loader-images", type=int, help="images that the loader is measured over; all by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", type=float, help="operations a second that the device could do at most")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    trials.inherit_none()
    data = random_images(arguments.images, arguments.classes)
    rows = []
    for network in arguments.networks:
        for seeds in arguments.seeds:
            found = measure(arguments, data, network, seeds)
            print("\n".join("  ".join(f"{row[f]}" for f in FIELDS) for row in found), flush=True)
            rows += found
            if arguments.out:  # after every network, so that a run that is cut off leaves what it has
                write_rows(arguments.out, FIELDS, rows)


class Contender(NamedTuple):
    """What is measured."""

    method: str
    columns: tuple[str, ...]
    seeds: int
    compiled: bool
    turn: int = 0
    """Which compilation of several."""


def random_images(count: int, classes: int) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, classes, (count,), generator=generator)
    names = tuple(str(i) for i in range(classes))
    return Dataset("cifar10", images, labels, images[:classes], labels[:classes], names, "random bytes")


def measure(arguments: argparse.Namespace, data: Dataset, network: str, seeds: int) -> list[dict[str, object]]:
    device = torch.device(arguments.device)
    precision = arguments.precision or ("bfloat16" if device.type == "cuda" else "float32")
    recipe = recipe_of(network, "cifar10")
    recipe = replace(recipe, batch=arguments.batch or recipe.batch)
    wanted = [column for column in COLUMNS if network_of(column) == network]
    wanted = [column for column in wanted if column.removeprefix(network) in arguments.variants]
    ready: dict[Contender, Callable[[], int]] = {}
    peaks: dict[Contender, float | None] = {}
    often = {"no": 1, "yes": arguments.compilations}
    for compiled, turn in [(word == "yes", turn) for word in arguments.compile for turn in range(often[word])]:
        if turn:
            trials.forget()
        how = NaturalConfig(precision=precision, compile=compiled, streams=arguments.streams)
        fleets: list[Fleet] = []
        for column in wanted:
            who = Contender("fleet", (column,), seeds, compiled, turn)
            peaks[who] = _prepare(
                ready, who, device,
                lambda c=column, how=how, into=fleets: fleet(c, seeds, data, recipe, how, into, arguments),
            )  # fmt: skip
        if len(fleets) > 1 and device.type == "cuda":
            both = Contender("concurrent", tuple(wanted), seeds, compiled, turn)
            _prepare(ready, both, device, lambda fleets=fleets: train_epoch(fleets))
            peaks[both] = None  # its memory was taken before, by each fleet
    by_loader = Contender("loader", (network,), 1, compiled=False)
    if arguments.loader and network in wanted:
        most = min(arguments.loader_images or arguments.images, arguments.images)
        peaks[by_loader] = _prepare(
            ready, by_loader, device,
            lambda: loader(network, data, recipe, device, precision, arguments.workers, most),
        )  # fmt: skip
    times: dict[Contender, list[float]] = {who: [] for who in ready}
    for _ in range(arguments.rounds):
        for who, run in ready.items():
            times[who].append(timed(run, device))
    by_a_loader = statistics.median(times[by_loader]) if by_loader in times else None
    rows = []
    for who in [who for who in ready if who.turn == 0]:
        seconds = statistics.median(_of_all_turns(times, who))
        speed = 1 / seconds  # images a second; `timed` gives seconds an image
        plain = _of_all_turns(times, Contender("fleet", (network,), seeds, who.compiled))
        ratios = [own / other for own, other in zip(_of_all_turns(times, who), plain, strict=False)]
        per_image = statistics.mean(operations(column, arguments.classes) for column in who.columns)
        together = who.seeds * len(who.columns)
        peak = arguments.peak or next(
            (value for key, value in PEAKS.items() if device.type == "cuda" and key in torch.cuda.get_device_name()), 0
        )
        rows.append(
            {
                "column": " ".join(who.columns), "method": who.method, "networks": together, "batch": recipe.batch,
                "precision": precision, "stacked": arguments.stacked and who != by_loader, "compile": who.compiled,
                "streams": 1 if who == by_loader or arguments.stacked else min(seeds, arguments.streams),
                "epochs_per_s": float(f"{speed / arguments.images:.4g}"), "images_per_s": round(speed),
                "ratio_to_plain": round(seconds / statistics.median(plain), 3) if ratios else "",
                "ratio_low": round(min(ratios), 3) if ratios else "",
                "ratio_high": round(max(ratios), 3) if ratios else "",
                "ratio_to_loader": round(by_a_loader / seconds, 2) if by_a_loader else "",
                "minutes_full_recipe": round(recipe.schedule.epochs * 50_000 * together / speed / 60, 2),
                "tflops": float(f"{speed * per_image / 1e12:.4g}"),
                "share_of_peak": round(speed * per_image / peak, 4) if peak else "",
                "peak_gib": "" if peaks[who] is None else round(peaks[who], 2), "images": arguments.images,
                "rounds": arguments.rounds, "compilations": arguments.compilations if who.compiled else "",
                "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "torch": torch.__version__,
            }
        )  # fmt: skip
    return rows


def _of_all_turns(times: dict[Contender, list[float]], who: Contender) -> list[float]:
    """The times of a contender, whichever time it was compiled, one compilation's after the other's."""
    return [value for other, values in times.items() if other._replace(turn=0) == who for value in values]


def _prepare(ready: dict, who: Contender, device: torch.device, make) -> float | None:
    """Make a contender and run it once; give the memory that it took at most, in GiB."""
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if gpu else 0
    start = time.perf_counter()
    try:
        run = make()
        run()
    except Exception as error:  # a contender that cannot run is said so, not hidden
        print(f"{who}: did not run: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return None
    ready[who] = run
    print(f"{who}: ready in {time.perf_counter() - start:.1f} s", flush=True)
    return (torch.cuda.max_memory_allocated() - before) / 2**30 if gpu else None


def timed(run, device: torch.device) -> float:
    """Seconds an image."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    images = run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / images


def fleet(column: str, seeds: int, data: Dataset, recipe, how: NaturalConfig, into: list[Fleet], arguments):
    """A fleet's epochs; the fleet itself is added to a list."""
    long = replace(recipe, schedule=replace(recipe.schedule, epochs=1000))
    made = make_fleet(column, range(seeds), data, long, how, arguments.device, stacked=arguments.stacked)

    def run() -> int:
        made.train(1)
        return seeds * made.steps_per_epoch * recipe.batch

    into.append(made)
    return run


def train_epoch(fleets: list[Fleet]):
    """An epoch of several fleets at the same time."""

    def run() -> int:
        train_concurrently(fleets)
        return sum(len(made) * made.steps_per_epoch * made.batch for made in fleets)

    return run


def loader(network: str, data: Dataset, recipe, device: torch.device, precision: str, workers: int, most: int):
    """One network as a tutorial trains it."""
    from PIL import Image
    from torchvision import transforms

    mean, std = data.statistics
    first = {
        "lenet": [], "bignet": [transforms.RandomCrop(24)],
        "wrn": [transforms.RandomCrop(32, padding=4, padding_mode="reflect")],
    }[network]  # fmt: skip
    steps = [*first, transforms.RandomHorizontalFlip(), transforms.ToTensor(), transforms.Normalize(mean, std)]
    transform = transforms.Compose(steps)
    images, labels = data.train_images.permute(0, 2, 3, 1).numpy(), data.train_labels.tolist()

    class Images(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return most

        def __getitem__(self, index: int):
            return transform(Image.fromarray(images[index])), labels[index]

    batches = torch.utils.data.DataLoader(
        Images(), recipe.batch, shuffle=True, drop_last=True, num_workers=workers, pin_memory=device.type == "cuda",
        persistent_workers=workers > 0,
    )  # fmt: skip
    model = build(network, len(data.classes), 0).to(device).train()
    optimizer = torch.optim.SGD(
        model.parameters(), recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay, nesterov=recipe.nesterov,
        fused=True,
    )  # fmt: skip

    def run() -> int:
        count = 0
        for batch in batches:
            x, y = (given.to(device, non_blocking=True) for given in batch)
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                loss = F.cross_entropy(model(x).float(), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            count += len(y)
        return count

    return run


def operations(column: str, classes: int) -> float:
    """Floating-point operations of one image, forward and backward."""
    model: nn.Module = build(column, classes, 0).train()
    advance_branches_(model, 0)
    count = 2
    size = model.input_size
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(count, *size)).sum().backward()
    return counter.get_total_flops() / count


if __name__ == "__main__":
    main()
