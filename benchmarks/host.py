"""The host time of one small unit, plain and DCL, which bounds networks of small layers.

    python benchmarks/host.py --out results/host.csv

The units are so small that the GPU is never waited for. Autocast to bfloat16 with float32 weights. ``forward_us`` is a
forward pass without gradients in eval mode, ``full_us`` a forward pass in training and its backward pass, both in
microseconds of wall time; medians over rounds in which the contenders take turns. The ratio is that of ``full_us``.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rows import write_rows
from torch import nn

import torch_dcl as dcl
from torch_dcl.kernels import host

COLUMNS = ["unit", "contender", "forward_us", "full_us", "forward_ratio", "ratio", "rounds", "device", "torch"]


def units() -> dict[str, tuple[nn.Module, nn.Module, torch.Tensor]]:
    """By name: the plain unit, the DCL layer in its place, and an input."""
    conv, bare, linear = nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.Linear(64, 64)
    images, last = torch.randn(2, 64, 8, 8), torch.channels_last
    normed = dcl.DCLConv2d.like(bare, norm_layer=nn.BatchNorm2d)
    return {
        "conv + ReLU": (
            nn.Sequential(conv, nn.ReLU()).to(memory_format=last),
            dcl.DCLConv2d.like(conv).to(memory_format=last),
            images.contiguous(memory_format=last),
        ),
        "conv + BN + ReLU": (
            nn.Sequential(bare, nn.BatchNorm2d(64), nn.ReLU()).to(memory_format=last),
            normed.to(memory_format=last),
            images.contiguous(memory_format=last),
        ),
        "conv + ReLU, contiguous": (
            nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()),
            dcl.DCLConv2d(64, 64, 3, padding=1),
            images,
        ),
        "linear + ReLU": (nn.Sequential(linear, nn.ReLU()), dcl.DCLLinear.like(linear), torch.randn(32, 64)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--calls", type=int, default=100, help="of one contender in one round")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    host.wait()  # what is compiled in the background, once a machine
    rows = []
    for unit, (plain, converted, x) in units().items():
        given = x.to("cuda", torch.bfloat16)
        runs = {name: steps(made.cuda(), given) for name, made in (("plain", plain), ("dcl", converted))}
        times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in runs}
        for _ in range(arguments.rounds):
            for name, both in runs.items():
                for i, run in enumerate(both):
                    times[name][i].append(run(arguments.calls))
        medians = {name: [statistics.median(part) for part in both] for name, both in times.items()}
        for name, (forward, full) in medians.items():
            rows.append({
                "unit": unit, "contender": name, "forward_us": f"{forward:.0f}", "full_us": f"{full:.0f}",
                "forward_ratio": f"{forward / medians['plain'][0]:.2f}", "ratio": f"{full / medians['plain'][1]:.2f}",
                "rounds": arguments.rounds, "device": torch.cuda.get_device_name(), "torch": torch.__version__,
            })  # fmt: skip
            print("  ".join(str(rows[-1][column]) for column in COLUMNS[:6]), flush=True)
    if arguments.out:
        write_rows(arguments.out, COLUMNS, rows)


def steps(unit: nn.Module, x: torch.Tensor) -> tuple[Callable[[int], float], Callable[[int], float]]:
    """The microseconds of a forward pass in eval mode, and of a step of training without its optimiser; both warm."""
    given = x.clone(memory_format=torch.preserve_format).requires_grad_()
    inputs = [given, *unit.parameters()]
    with torch.autocast("cuda", torch.bfloat16):
        grad = torch.randn_like(unit(given))

    def forward() -> None:
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            unit(x)

    def full() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            z = unit(given)
        torch.autograd.grad(z, inputs, grad)

    def timed(run: Callable[[], None], training: bool) -> Callable[[int], float]:
        def microseconds_of(calls: int) -> float:
            unit.train(training)
            return microseconds(run, calls)

        return microseconds_of

    runs = timed(forward, False), timed(full, True)
    for run in runs:
        run(10)
    return runs


def microseconds(run: Callable[[], None], calls: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start) / calls


if __name__ == "__main__":
    main()
