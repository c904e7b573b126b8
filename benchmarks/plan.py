"""Latency of torchvision networks and their units, plain and converted, as ``plan(measure=True)`` sees them.

    python benchmarks/plan.py --device cuda --batch 64 --dtype bfloat16 --out results/plan.csv

One process; plain, DCL and the low-rank layer of equal weights take turns; medians of rounds. ``memory`` is how images
and filters lie: channels_last, or contiguous, which is torch's default. Whole networks are timed as they run, and
"captured" as CUDA graphs, each beside the plain one of its kind. The networks have random weights, which does not
change their speed.
"""

import argparse
import csv
import itertools
from pathlib import Path

import torch
from torchvision import models as zoo

import torch_dcl as dcl
from torch_dcl.files import replacing

COLUMNS = ["network", "memory", "unit", "layer", "contender", "batch", "dtype", "forward_ms", "full_ms"]
COLUMNS += ["forward_ratio", "full_ratio", "device", "torch"]
FORMATS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["alexnet", "vgg16", "resnet50"])
    parser.add_argument("--memory", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    dtype = getattr(torch, arguments.dtype)
    lines = []
    for name, memory in itertools.product(arguments.networks, arguments.memory):
        torch.manual_seed(0)
        model = zoo.get_model(name, weights=None).to(arguments.device, dtype, memory_format=FORMATS[memory])
        images = torch.randn(arguments.batch, 3, arguments.size, arguments.size, device=arguments.device, dtype=dtype)
        plan = dcl.plan(model, example=images.contiguous(memory_format=FORMATS[memory]), measure=True)
        what = f"{name}, {memory}, batch {arguments.batch}, {arguments.dtype}, torch {torch.__version__}"
        print(f"\n{what}\n{plan}", flush=True)
        entries = [(row.name, f"{row.kind} {row.in_channels}-{row.out_channels}", row.timings) for row in plan.selected]
        for unit, layer, timings in [*entries, ("", "whole network", plan.timings)]:
            for contender, timing in (timings or {}).items():
                plain = timings["plain, captured" if contender.endswith(", captured") else "plain"]
                numbers = [timing.forward, timing.full, timing.forward / plain.forward]
                numbers.append(timing.full / plain.full if timing.full and plain.full else "")
                cells = [f"{n:.4g}" if n else "" for n in numbers]
                where = [plan.device, torch.__version__]
                lines.append([name, memory, unit, layer, contender, arguments.batch, arguments.dtype, *cells, *where])
        if arguments.out:  # after every network, so that a run that is cut off leaves what it has
            with replacing(arguments.out) as aside, aside.open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([COLUMNS, *lines])


if __name__ == "__main__":
    main()
