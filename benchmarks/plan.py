"""Latency of torchvision networks and their units, plain and converted, as ``plan(measure=True)`` sees them.

    python benchmarks/plan.py --device cuda --batch 64 --dtype bfloat16 --out results/plan.csv

One process; plain, DCL and the low-rank layer of equal weights take turns; medians of rounds, channels_last. Whole
networks are timed as they run, and "captured" as CUDA graphs, each beside the plain one of its kind. The networks have
random weights, which does not change their speed.
"""

import argparse
import csv
from pathlib import Path

import torch
from torchvision import models as zoo

import torch_dcl as dcl
from torch_dcl.files import replacing

COLUMNS = ["network", "unit", "layer", "contender", "batch", "dtype", "forward_ms", "full_ms", "forward_ratio"]
COLUMNS += ["full_ratio", "device", "torch"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["alexnet", "vgg16", "resnet50"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    dtype = getattr(torch, arguments.dtype)
    lines = []
    for name in arguments.networks:
        torch.manual_seed(0)
        model = zoo.get_model(name, weights=None).to(arguments.device, dtype, memory_format=torch.channels_last)
        images = torch.randn(arguments.batch, 3, arguments.size, arguments.size, device=arguments.device, dtype=dtype)
        plan = dcl.plan(model, example=images.contiguous(memory_format=torch.channels_last), measure=True)
        print(f"\n{name}, batch {arguments.batch}, {arguments.dtype}, torch {torch.__version__}\n{plan}", flush=True)
        entries = [(row.name, f"{row.kind} {row.in_channels}-{row.out_channels}", row.timings) for row in plan.selected]
        for unit, layer, timings in [*entries, ("", "whole network", plan.timings)]:
            for contender, timing in (timings or {}).items():
                plain = timings["plain, captured" if contender.endswith(", captured") else "plain"]
                numbers = [timing.forward, timing.full, timing.forward / plain.forward]
                numbers.append(timing.full / plain.full if timing.full and plain.full else "")
                cells = [f"{n:.4g}" if n else "" for n in numbers]
                where = [plan.device, torch.__version__]
                lines.append([name, unit, layer, contender, arguments.batch, arguments.dtype, *cells, *where])
        if arguments.out:  # after every network, so that a run that is cut off leaves what it has
            with replacing(arguments.out) as aside, aside.open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([COLUMNS, *lines])


if __name__ == "__main__":
    main()
