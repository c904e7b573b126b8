"""`Batches` on the device compared with a torchvision DataLoader: CIFAR-10, flip, reflect-pad-4 crop, normalised.

    python benchmarks/loader.py PATH --device cuda --out results/loader.csv

PATH is a folder with CIFAR-10, or {train,test}_{images,labels}.npy with images of that size. The loader is the usual
one: an image at a time through torchvision's transforms on PIL images, `--workers` processes, pinned memory, copied to
the device. Both take turns in one process; a round is a number of batches after the first, and medians of rounds count.
"""

import argparse
import csv
import itertools
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from torchvision import transforms

from torch_dcl.data import Batches, Dataset, load
from torch_dcl.files import replacing

COLUMNS = ["contender", "workers", "batch", "images", "rounds", "images_per_s", "lowest", "highest", "ratio"]
COLUMNS += ["device", "threads", "torch"]


class OneByOne(TorchDataset[tuple[Tensor, int]]):
    """An image at a time, as torchvision's CIFAR10 gives them."""

    def __init__(self, dataset: Dataset):
        self.images = dataset.train_images.permute(0, 2, 3, 1).contiguous().numpy()
        self.labels = dataset.train_labels.tolist()
        self.transform = transforms.Compose([
            transforms.RandomCrop(32, padding=4, padding_mode="reflect"),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(*dataset.statistics),
        ])  # fmt: skip

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def usual(loader: DataLoader[tuple[Tensor, int]], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    for images, labels in loader:
        yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def speed(batches: Iterator[tuple[Tensor, Tensor]], count: int, device: torch.device) -> float:
    """Images a second; the first batch, with the start of workers or the epoch's order, is not counted."""
    next(batches)
    wait(device)
    start = time.perf_counter()
    seen = sum(len(labels) for _, labels in itertools.islice(batches, count))
    wait(device)
    return seen / (time.perf_counter() - start)


def whole_epoch(batches: Batches, epoch: int, device: torch.device) -> float:
    """Images a second over all of an epoch, its order included."""
    wait(device)
    start = time.perf_counter()
    seen = sum(len(labels) for _, labels in batches.epoch(epoch))
    wait(device)
    return seen / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, torch.get_num_threads()])
    parser.add_argument("--count", type=int, default=100, help="batches of the DataLoader to a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    try:
        dataset = load("cifar10", root=arguments.path)
    except FileNotFoundError:
        dataset = load(f"arrays:{arguments.path}")
    print(dataset)
    ours = Batches(
        dataset.train_images, dataset.train_labels, arguments.batch,
        flip=True, pad=4, normalise=dataset.statistics, device=device,
    )  # fmt: skip
    one_by_one = OneByOne(dataset)
    found: dict[tuple[str, int], list[float]] = {}
    list(itertools.islice(ours.epoch(0), 10))
    for number in range(arguments.rounds):
        found.setdefault(("torch_dcl Batches", 0), []).append(whole_epoch(ours, number, device))
        for workers in sorted(set(arguments.workers)):
            loader = DataLoader(
                one_by_one, arguments.batch, shuffle=True, drop_last=True, num_workers=workers,
                pin_memory=device.type == "cuda",
            )  # fmt: skip
            rate = speed(usual(loader, device), arguments.count, device)
            found.setdefault(("torchvision DataLoader", workers), []).append(rate)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    best = max(statistics.median(rates) for (name, _), rates in found.items() if "DataLoader" in name)
    lines = []
    for (name, workers), rates in found.items():
        middle = statistics.median(rates)
        images = len(ours) * arguments.batch if "Batches" in name else arguments.count * arguments.batch
        numbers = [f"{rate:.0f}" for rate in (middle, min(rates), max(rates))]
        lines.append([name, workers, arguments.batch, images, len(rates), *numbers, f"{middle / best:.2f}", where,
                      torch.get_num_threads(), torch.__version__])  # fmt: skip
        print(f"{name}, {workers} workers: {middle:,.0f} images/s ({min(rates):,.0f} to {max(rates):,.0f}, "
              f"n = {len(rates)}), {middle / best:.2f} × the faster DataLoader")  # fmt: skip
    if arguments.out:
        with replacing(arguments.out) as aside, aside.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *lines])


if __name__ == "__main__":
    main()
