"""How long ``init="fit"`` takes for two layers of VGG16, without calibration, and how close it comes.

    python benchmarks/fit_speed.py --threads 2 --out results/fit_speed.csv
    python benchmarks/fit_speed.py --device cuda --out results/fit_speed.csv

``classifier.0`` (25088 -> 4096) and ``features.28`` (512 -> 512, 3x3) become T = 2 branches at the default ratio. No
trained weights are needed: "normal" is torchvision's initialisation, and "falling" has singular values that fall off
like those of trained layers, i^-0.5. ``cpu_seconds`` is the time of all threads of the process. It says more than
``wall_seconds`` where other work shares the cores, and more with one thread, since threads that wait for each other
count. ``load`` is the machine's load average before the fit, this process included. ``--label`` names the version that
is measured: an older one by PYTHONPATH. Rows are added to the file.
"""

import argparse
import os
import platform
import time
from pathlib import Path

import torch
from rows import read_rows, write_rows
from torch import nn

from torch_dcl import DCLConv2d, DCLLinear
from torch_dcl.convert.fit import fit_

SHAPES = {"features.28": (512, 512, 3, 3), "classifier.0": (4096, 25088)}
SPECTRA = ("normal", "falling")
TIMES = ["wall_seconds", "cpu_seconds"]
COLUMNS = ["version", "layer", "weights", *TIMES, "error", "low_rank_error", "device", "threads", "load", "torch"]


def plain_layer(shape, spectrum, device):
    """The layer that is replaced."""
    generator = torch.Generator().manual_seed(0)
    K2, inputs = shape[0], torch.Size(shape[1:]).numel()
    weight = torch.randn(K2, inputs, generator=generator)
    if spectrum == "falling":
        turn = torch.randn(K2, K2, generator=generator)
        weight = (turn * torch.arange(1, K2 + 1) ** -0.5) @ weight / 100
    plain = nn.Linear(inputs, K2) if len(shape) == 2 else nn.Conv2d(*shape[1::-1], shape[2])
    with torch.no_grad():
        plain.weight.copy_(0.01 * weight.view(shape))
        plain.bias.zero_()
    return plain.to(device)


def fit_once(plain):
    """The report of a fit, its wall time and its CPU time."""
    kind = DCLLinear if isinstance(plain, nn.Linear) else DCLConv2d
    layer = kind.like(plain)
    wall, cpu = time.perf_counter(), time.process_time()
    report = fit_(layer, plain)  # ends with numbers on the host, so that a GPU has finished
    return report, time.perf_counter() - wall, time.process_time() - cpu


def processor():
    """The name of the CPU."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layers", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--weights", nargs="+", choices=SPECTRA, default=list(SPECTRA))
    parser.add_argument("--label", default="this")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    fit_once(plain_layer((64, 64), "normal", device))  # what a device does once
    for layer in arguments.layers:
        for spectrum in arguments.weights:
            plain, load = plain_layer(SHAPES[layer], spectrum, device), os.getloadavg()[0]
            report, wall, cpu = fit_once(plain)
            numbers = [f"{wall:.2f}", f"{cpu:.2f}", f"{report.error:.5f}", f"{report.low_rank_error:.5f}"]
            where = [place, arguments.threads, f"{load:.1f}", torch.__version__]
            row = dict(zip(COLUMNS, [arguments.label, layer, spectrum, *numbers, *where], strict=True))
            print("  ".join(map(str, row.values())), flush=True)
            if arguments.out:
                write_rows(arguments.out, COLUMNS, [*read_rows(arguments.out), row])


if __name__ == "__main__":
    main()
