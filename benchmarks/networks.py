"""Whole networks, plain and converted, as users run them: ``model(x)``, ``torch.compile`` and its CUDA graphs.

    python benchmarks/networks.py --out results/networks.csv

Batch 64, 224 × 224 images in channels_last, autocast to bfloat16. ``train`` is a whole step: forward, cross-entropy,
backward and SGD with momentum, launches included; ``infer`` is a forward pass without gradients in eval mode. Modes are
``eager``, ``compile`` (``torch.compile(model)``) and ``reduce-overhead`` (the same with CUDA graphs); the plain network
runs in the same mode. Selection ``all`` converts every unit that ``plan`` selects, ``faster`` those that it keeps with
``select="faster"`` for that mode and phase.

Each row has a process of its own, in which the plain and the converted network take turns. ``--at-once`` processes
compile at the same time; then one measures after the other, while the others wait. Times are medians over rounds, the
ratio is that of the medians, and ``spread`` is half the range of the rounds' ratios. Weights are random, which does not
change the speed. Rows are written as they come, and a second call measures only what is missing; delete the file, or
name another, to measure anew.
"""

import argparse
import copy
import csv
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rows import write_rows
from torch import nn
from torch.nn import functional as F
from torchvision import models as zoo

import torch_dcl as dcl
from torch_dcl.kernels import host
from torch_dcl.models import count_weights

COLUMNS = ["network", "batch", "mode", "phase", "selection", "units", "weights_ratio", "plain_ms", "dcl_ms", "ratio"]
COLUMNS += ["spread", "rounds", "device", "torch"]
NETWORKS = ["alexnet", "vgg16", "resnet18", "resnet50", "densenet121"]
MODES = ["eager", "compile", "reduce-overhead"]
PHASES = ["train", "infer"]
KEY = ["network", "batch", "mode", "phase", "selection"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=NETWORKS[:4])
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--phases", nargs="+", default=PHASES, choices=PHASES)
    parser.add_argument("--selections", nargs="+", default=["all"], choices=["all", "faster"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.15, help="of one contender in one round")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--at-once", type=int, default=1, help="processes that compile at the same time")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--row", nargs=4, help="measure this row in this process, when a line comes on its input")
    arguments = parser.parse_args()
    host.wait()  # what is compiled in the background, once a machine
    if arguments.row:
        torch.backends.cudnn.benchmark = True
        measure(*arguments.row, arguments)
        return
    rows = itertools.product(arguments.networks, arguments.modes, arguments.phases, arguments.selections)
    done = {tuple(row[name] for name in KEY) for row in read(arguments.out)}
    todo = [row for row in rows if (row[0], str(arguments.batch), *row[1:]) not in done]
    for first in range(0, len(todo), arguments.at_once):
        group = todo[first : first + arguments.at_once]
        started = [(row, start(row, arguments)) for row in group]
        for row, process in started:
            if process.stdout.readline() != READY:
                print(*row, "could not be prepared", flush=True)
        for _, process in started:
            print(process.communicate("\n")[0], end="", flush=True)


READY = "ready\n"


def start(row: tuple[str, ...], arguments: argparse.Namespace) -> subprocess.Popen[str]:
    """A process that prepares a row."""
    command = [sys.executable, __file__, "--row", *row, "--device", arguments.device]
    command += ["--out", str(arguments.out)] if arguments.out else []
    for name in ("batch", "size", "rounds", "seconds"):
        command += [f"--{name}", str(getattr(arguments, name))]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def read(path: Path | None) -> list[dict[str, str]]:
    """The rows that are there."""
    if path is None or not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def measure(network: str, mode: str, phase: str, selection: str, arguments: argparse.Namespace) -> None:
    batch = arguments.batch
    torch.manual_seed(0)
    plain = getattr(zoo, network)(weights=None).to(arguments.device, memory_format=torch.channels_last)
    x = torch.randn(batch, 3, arguments.size, arguments.size, device=arguments.device)
    x = x.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(1000, (batch,), device=arguments.device)
    plan = dcl.plan(plain, example=x[:2])
    if selection == "faster":
        with autocast(arguments.device):
            plan = dcl.plan(plain, example=x, measure=True, select="faster", mode=mode, phase=phase)
    networks = {"plain": copy.deepcopy(plain), "dcl": copy.deepcopy(plain)}
    dcl.convert_(networks["dcl"], plan, init="random")
    weights = count_weights(networks["dcl"]) / count_weights(networks["plain"])
    runs = {name: prepare(made, mode, phase, x, labels) for name, made in networks.items()}
    print(READY, end="", flush=True)
    sys.stdin.readline()
    ratio, spread, medians = race(runs, arguments)
    row = {
        "network": network, "batch": batch, "mode": mode, "phase": phase, "selection": selection,
        "units": len(plan.selected), "weights_ratio": f"{weights:.3f}", "plain_ms": f"{medians['plain']:.3f}",
        "dcl_ms": f"{medians['dcl']:.3f}", "ratio": f"{ratio:.3f}", "spread": f"{spread:.3f}",
        "rounds": arguments.rounds, "device": _name(arguments.device), "torch": torch.__version__,
    }  # fmt: skip
    print("  ".join(f"{row[name]}" for name in COLUMNS[:-2]), flush=True)
    if arguments.out:
        write_rows(arguments.out, COLUMNS, [*read(arguments.out), row])


def _name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"


def autocast(device: str) -> torch.autocast:
    return torch.autocast(device.split(":", maxsplit=1)[0], torch.bfloat16)


def prepare(network: nn.Module, mode: str, phase: str, x: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    """One step of the network in a mode, warm."""
    network.train(phase == "train")
    run = network
    if mode != "eager":
        run = torch.compile(network, mode=None if mode == "compile" else mode)
    optimizer = torch.optim.SGD(network.parameters(), 1e-3, momentum=0.9, weight_decay=5e-4)

    def train() -> None:
        optimizer.zero_grad()
        with autocast(str(x.device)):
            loss = F.cross_entropy(run(x), labels)
        loss.backward()
        optimizer.step()

    def infer() -> None:
        with torch.no_grad(), autocast(str(x.device)):
            run(x)

    step = train if phase == "train" else infer
    for _ in range(4):
        step()
    return step


def race(runs: dict[str, Callable[[], None]], arguments: argparse.Namespace) -> tuple[float, float, dict[str, float]]:
    """The ratio of the medians, half the range of the rounds' ratios, and the medians in milliseconds."""
    repeats = {name: max(3, int(1000 * arguments.seconds / timed(run, 3))) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(arguments.rounds):
        for name, run in runs.items():
            times[name].append(timed(run, repeats[name]))
    ratios = [dcl_ms / plain_ms for dcl_ms, plain_ms in zip(times["dcl"], times["plain"], strict=True)]
    medians = {name: statistics.median(values) for name, values in times.items()}
    return medians["dcl"] / medians["plain"], (max(ratios) - min(ratios)) / 2, medians


def timed(run: Callable[[], None], repeats: int) -> float:
    """Milliseconds of one call of several in a row."""
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronize()
    return 1000 * (time.perf_counter() - start) / repeats


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
