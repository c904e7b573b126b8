"""The time of a compiler's guards: what ``torch.compile`` checks before every call of a network, plain and converted.

    python benchmarks/guards.py --out results/guards.csv

A backend that computes nothing leaves the guards and the call around them. ``between`` is how many MiB are written
between two calls, which empties the processor's caches as the work of a network does; with 0 all is in the cache. Runs
on the CPU, where kernels are interpreted so that a converted network is traced as on a GPU. Networks take turns, and
are compiled anew in every round; a time is the median over rounds of medians over calls, and ``spread`` is half the
range of the rounds' ratios. Rows of other versions of torch stay in the file.
"""

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import torch
from rows import write_rows
from torch import nn
from torchvision import models as zoo

import torch_dcl as dcl
from torch_dcl.kernels import host

COLUMNS = ["network", "phase", "between", "plain_us", "dcl_us", "ratio", "spread", "rounds", "calls", "torch"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["alexnet", "resnet18", "resnet50"])
    parser.add_argument("--between", nargs="+", type=int, default=[0, 64], help="MiB written between two calls")
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    host.wait()
    rows = []
    for name in arguments.networks:
        torch.manual_seed(0)
        networks = {"plain": getattr(zoo, name)(weights=None), "dcl": getattr(zoo, name)(weights=None)}
        dcl.convert_(networks["dcl"], dcl.plan(networks["dcl"], input_size=(3, 64, 64)), init="random")
        for phase in ("train", "infer"):
            times = measure(networks, phase, arguments)
            for between in arguments.between:
                plain, converted = (times[kind, between] for kind in ("plain", "dcl"))
                ratios = [b / a for a, b in zip(plain, converted, strict=True)]
                medians = statistics.median(plain), statistics.median(converted)
                row = {
                    "network": name, "phase": phase, "between": between, "plain_us": f"{medians[0]:.1f}",
                    "dcl_us": f"{medians[1]:.1f}", "ratio": f"{medians[1] / medians[0]:.2f}",
                    "spread": f"{(max(ratios) - min(ratios)) / 2:.2f}", "rounds": arguments.rounds,
                    "calls": arguments.calls, "torch": torch.__version__,
                }  # fmt: skip
                rows.append(row)
                print(*(row[column] for column in COLUMNS), sep="  ", flush=True)
    if arguments.out:
        write_rows(arguments.out, COLUMNS, rows, key=["network", "phase", "between", "torch"])


def measure(
    networks: dict[str, nn.Module], phase: str, arguments: argparse.Namespace
) -> dict[tuple[str, int], list[float]]:
    """Microseconds of a call in every round, by network and by what is written between calls."""
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(arguments.rounds):
        for kind, network in networks.items():
            run = compiled(network, phase)
            for between in arguments.between:
                times[kind, between].append(timed(run, between, arguments.calls))
    return times


def compiled(network: nn.Module, phase: str) -> Callable[[], None]:
    """A call of the network whose graph computes nothing."""
    network = network.to(memory_format=torch.channels_last).train(phase == "train")
    x = torch.randn(2, 3, 64, 64).contiguous(memory_format=torch.channels_last)
    torch.compiler.reset()  # no other network's guards are tried first

    def nothing(graph: torch.fx.GraphModule, _example: list[torch.Tensor]) -> Callable[..., tuple[torch.Tensor, ...]]:
        results = tuple(torch.zeros(1) for _ in next(iter(reversed(graph.graph.nodes))).args[0])
        return lambda *_: results

    run = torch.compile(network, backend=nothing, fullgraph=True)

    def call() -> None:
        with torch.set_grad_enabled(phase == "train"), torch.autocast("cpu", torch.bfloat16):
            run(x)

    call()
    return call


def timed(call: Callable[[], None], between: int, calls: int) -> float:
    """Microseconds of a call, the median of many."""
    other, times = torch.zeros(between * 2**18), []
    for _ in range(20):
        call()
    for _ in range(calls):
        other.add_(1)
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times)


if __name__ == "__main__":
    main()
