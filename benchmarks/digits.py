"""Seconds to write all fifteen multi-digit sets, compared with a generator that uses PIL, image by image.

    python benchmarks/digits.py --mnist FOLDER --device cuda --out results/digits.csv

Every set is written whole, 60,000 training and 10,000 test images: 1,050,000 in all. Reading MNIST is not timed; the
digits are cut out once a split, and that is. The PIL generator comes from the tests and draws the same images (without
noise). It is timed on the first images of every set, right after that set, in one thread, and its speed is
extrapolated to the whole: `pil_images_per_s`. Its random numbers are drawn beforehand and not timed, in its favour.
"""

import argparse
import csv
import os
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.data.test_digits import PilWriter

from torch_dcl.data import digits
from torch_dcl.data._segments import read_digits
from torch_dcl.data.layouts import LAYOUTS
from torch_dcl.files import replacing

COLUMNS = ["device", "torch", "sets", "images", "seconds", "images_per_s", "pil_images_per_s", "ratio", "threads"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", default=None, help="folder with the idx files; the embedded excerpt when not given")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=None, help="threads of torch on the CPU")
    parser.add_argument("--sets", nargs="+", default=list(LAYOUTS))
    parser.add_argument("--pil-sample", type=int, default=200, help="images a set for the PIL generator")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {os.cpu_count()} cores"
    load = os.getloadavg()[0]
    print(f"{name}, torch {torch.__version__}, load {load:.1f} at the start; {digits.source(arguments.mnist)}")
    given = {split: read_digits(arguments.mnist, split) for split in digits.SIZES}
    digits.generate("MNIST-III-10", "test", device=device, mnist=given["test"], indices=range(100))  # first use
    images, pil_seconds = 0, 0.0
    start, spent = time.perf_counter(), time.process_time()
    segments = {split: digits.segment(pair, split).to(device) for split, pair in given.items()}
    _wait(device)
    total, cpu = time.perf_counter() - start, time.process_time() - spent
    print(f"cutting out: {total:.2f} s")
    for set_name in arguments.sets:
        start, spent = time.perf_counter(), time.process_time()
        for split, size in digits.SIZES.items():
            digits.generate(set_name, split, device=device, mnist=segments[split])
            images += size
        _wait(device)
        seconds = time.perf_counter() - start
        total, cpu = total + seconds, cpu + time.process_time() - spent
        pil_seconds += _pil_seconds(set_name, given["test"], arguments.pil_sample)
        print(f"{set_name}: {seconds:.2f} s", flush=True)
    pil = arguments.pil_sample * len(arguments.sets) / pil_seconds
    speed = images / total
    print(f"{len(arguments.sets)} sets, {images:,} images: {total:.1f} s ({cpu:.1f} s of CPU), {speed:,.0f} images/s")
    print(f"PIL: {pil:,.0f} images/s (from {arguments.pil_sample} images a set), ratio {speed / pil:.1f}")
    print(f"load {os.getloadavg()[0]:.1f} at the end")
    if arguments.out:
        row = [name, torch.__version__, len(arguments.sets), images, f"{total:.2f}", f"{speed:.0f}", f"{pil:.0f}"]
        _keep(arguments.out, [*map(str, row), f"{speed / pil:.1f}", str(torch.get_num_threads())])


def _keep(path: Path, row: list[str]) -> None:
    """Put a row into the table, in place of an earlier one of the same device and as many threads."""
    rows = []
    if path.exists():
        with path.open(newline="") as file:
            rows = [old for old in csv.reader(file) if old != COLUMNS and (old[0], old[-1]) != (row[0], row[-1])]
    with replacing(path) as aside, aside.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows, row])


def _pil_seconds(name: str, mnist: tuple[torch.Tensor, torch.Tensor], sample: int) -> float:
    """Time the PIL generator on the first test images of a set."""
    writer = PilWriter(LAYOUTS[name], "test", mnist, count=sample)
    start = time.perf_counter()
    for index in range(sample):
        writer.image(index)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
