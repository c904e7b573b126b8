"""CIFAR-100 as JPEGs through the whole path of `dcl run imagenet`: prepare, train, kill, resume, evaluate, report.

    python benchmarks/imagenet_cifar100.py --cifar DATA --out results/imagenet_cifar100.json

The images are written as an image folder of JPEGs, enlarged to 128 × 128. The command itself then prepares shards of
256 × 256, trains AlexNet and ResNet-18, plain and converted, and writes a report. Each run is killed (SIGKILL) at its
first checkpoint and resumed. At the end the last network is trained for one epoch on the JPEGs themselves, decoded on
the fly. Nothing is tuned: the rates are fixed below, the same for all models of a network.

``--cifar`` is a folder that holds `cifar100`, as for `torch_dcl.data.load`; or one of mosaics of 100 × 100 images
(`train-0.webp`, …, `test-0.webp`, with `labels.npz` and `classes.json`), as many as there are. ``--images`` takes fewer
for a try. Results are written after each network; after ``--minutes`` a run ends where it is, which the results say.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from torch_dcl.data import load
from torch_dcl.files import write_text

# What all models of a network are trained with: the usual rates and decay of each network. AlexNet starts slowly and
# has twice as many steps of half the batch.
COMMON = {"precision": "bfloat16", "channels_last": "yes", "schedule": "cosine", "clip": 5}
NETWORKS = {
    "alexnet": {"lr": 0.01, "batch": 128, "warmup": 100},
    "torchvision:resnet18": {"lr": 0.1, "batch": 256, "warmup": 100, "bias_lr": 1, "smoothing": 0.1},
}
Split = tuple[npt.NDArray[np.uint8], list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", type=Path, help="where the images are; by default cifar100 is looked for")
    parser.add_argument("--images", type=int, help="training images; all by default")
    parser.add_argument("--held-out", type=int, default=5000, help="test images")
    parser.add_argument("--epochs", type=int, nargs=2, default=[30, 18], help="of AlexNet and of ResNet-18")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--models", default="plain,dcl")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--set", nargs="*", default=[], help="further settings of every run, KEY=VALUE")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    until = time.perf_counter() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        folder, start = Path(temporary), time.perf_counter()
        counts = write_folder(folder / "jpegs", arguments)
        print(f"JPEGs: {time.perf_counter() - start:.1f} s", flush=True)
        start = time.perf_counter()
        jpegs, shards = str(folder / "jpegs"), str(folder / "shards")
        dcl("data", "prepare", "imagenet", jpegs, shards, "--workers", str(arguments.workers))
        prepared = time.perf_counter() - start
        print(f"prepared: {prepared:.1f} s", flush=True)
        results = {"images": counts, "prepare_seconds": round(prepared, 1), "networks": {}}
        for number, (network, epochs) in enumerate(zip(arguments.networks, arguments.epochs, strict=False)):
            share = (until - time.perf_counter()) / (len(arguments.networks) - number)
            results["networks"][network] = train(network, epochs, folder, share, arguments)
            write_results(results, folder, arguments)
        runs = [folder / name_of(network) for network in arguments.networks]
        whole = [str(run) for run in runs if (run / "imagenet.json").exists()]
        if whole and dcl("report", *whole, "-o", str(folder / "report.html")):
            results["report_bytes"] = (folder / "report.html").stat().st_size
            write_results(results, folder, arguments)
        if time.perf_counter() < until:
            results["on_the_fly"] = train_on_the_fly(arguments.networks[-1], folder, arguments)
            write_results(results, folder, arguments)


def name_of(network: str) -> str:
    return network.removeprefix("torchvision:")


def dcl(*words: str) -> bool:
    return subprocess.run([sys.executable, "-m", "torch_dcl", *words], check=words[0] == "data").returncode == 0


def write_results(results: dict[str, object], folder: Path, arguments: argparse.Namespace) -> None:
    """The numbers; the page, if it is there; and the run folders without weights, from which it can be made again."""
    if arguments.out is None:
        return
    write_text(arguments.out, json.dumps(results, indent=1) + "\n")
    if (folder / "report.html").exists():
        shutil.copy(folder / "report.html", arguments.out.with_suffix(".html"))
    with tarfile.open(arguments.out.with_suffix(".tar.gz"), "w:gz") as archive:
        for network in arguments.networks:
            for file in sorted((folder / name_of(network)).glob("*")):
                if file.is_file() and file.suffix != ".safetensors":
                    archive.add(file, f"{name_of(network)}/{file.name}")


def read_cifar(root: Path | None) -> tuple[list[str], dict[str, Split]]:
    """The class names, and uint8 `[N, 32, 32, 3]` with labels of train and val."""
    if root is None or not (root / "labels.npz").exists():
        data = load("cifar100", root=root)
        given = {"train": (data.train_images, data.train_labels), "val": (data.test_images, data.test_labels)}
        return list(data.classes), {
            split: (images.permute(0, 2, 3, 1).numpy(), labels.tolist()) for split, (images, labels) in given.items()
        }
    Image.MAX_IMAGE_PIXELS = None
    splits = {}
    with np.load(root / "labels.npz", allow_pickle=False) as labels:
        for split, name in (("train", "train"), ("val", "test")):
            parts = []
            for number in range(len(list(root.glob(f"{name}-*.webp")))):
                pixels = np.asarray(Image.open(root / f"{name}-{number}.webp").convert("RGB"))
                parts.append(pixels.reshape(100, 32, 100, 32, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 32, 32, 3))
            images = np.concatenate(parts)
            splits[split] = images, [int(label) for label in labels[name][: len(images)]]
    return json.loads((root / "classes.json").read_text(encoding="utf-8")), splits


def write_folder(folder: Path, arguments: argparse.Namespace) -> dict[str, int]:
    """CIFAR-100 as train/CLASS/*.jpg and val/CLASS/*.jpg; how many there are."""
    classes, splits = read_cifar(arguments.cifar)
    counts = {}

    def write(job: tuple[Path, npt.NDArray[np.uint8]]) -> None:
        path, image = job
        Image.fromarray(image).resize((128, 128), Image.Resampling.BICUBIC).save(path, quality=95)

    for split, (images, labels) in splits.items():
        places = [folder / split / f"{label:02d}-{name}" for label, name in enumerate(classes)]
        for place in places:
            place.mkdir(parents=True)
        wanted = arguments.images if split == "train" else arguments.held_out
        most = -(-wanted // len(classes)) if wanted else len(images)
        seen, chosen = [0] * len(classes), []
        for number, label in enumerate(labels):  # as many of each class
            seen[label] += 1
            if seen[label] <= most:
                chosen.append((places[label] / f"{number:05d}.jpg", images[number]))
        with ThreadPoolExecutor(arguments.workers) as pool:
            list(pool.map(write, chosen))
        counts[split] = len(chosen)
    return counts


def settings_of(network: str, epochs: int, arguments: argparse.Namespace, *more: str) -> list[str]:
    known = [f"{key}={value}" for key, value in {**COMMON, **NETWORKS[network]}.items()]
    return [*known, f"epochs={epochs}", *more, *arguments.set]


def command_of(
    network: str, models: str, data: Path, out: Path, settings: list[str], arguments: argparse.Namespace
) -> list[str]:
    return [
        sys.executable, "-m", "torch_dcl", "run", "imagenet", "--network", network, "--models", models,
        "--data", str(data), "--device", arguments.device, "--out", str(out),
        *(word for pair in settings for word in ("--set", pair)),
    ]  # fmt: skip


def train_on_the_fly(network: str, folder: Path, arguments: argparse.Namespace) -> dict[str, object]:
    """One epoch of the plain network on the JPEGs, which are decoded for every step."""
    out, start = folder / "on_the_fly", time.perf_counter()
    settings = settings_of(network, 1, arguments, f"workers={arguments.workers}")
    code = subprocess.run(
        command_of(network, "plain", folder / "jpegs", out, settings, arguments), check=False
    ).returncode
    found = {"network": network, "code": code, "seconds": round(time.perf_counter() - start, 1)}
    if code:
        return found
    result = json.loads((out / "imagenet.json").read_text(encoding="utf-8"))
    (row,) = result["models"]
    keep = ("top1", "top5", "train_loss", "seconds", "images", "waiting")
    return {**found, "data": result["data"], **{f"model_{key}": row[key] for key in keep}}


def train(network: str, epochs: int, folder: Path, seconds: float, arguments: argparse.Namespace) -> dict[str, object]:
    """Run the recipe, kill it at its first checkpoint, resume it."""
    out, start = folder / name_of(network), time.perf_counter()
    settings = settings_of(network, epochs, arguments, "evaluate_every=3", "save_minutes=0.04", "keep=device")
    command = command_of(network, arguments.models, folder / "shards", out, settings, arguments)
    first = subprocess.Popen(command)
    while first.poll() is None and not list(out.glob("fleets/*.safetensors")) and time.perf_counter() < start + seconds:
        time.sleep(0.02)
    was_killed = first.poll() is None
    first.send_signal(signal.SIGKILL)
    first.wait()
    left = max(0.1, (start + seconds - time.perf_counter()) / 60)
    code = subprocess.run(
        [*command, "--resume", "--set", "verify=no", "--set", "save_minutes=1", "--minutes", f"{left:.2f}"], check=False
    ).returncode
    spent = round(time.perf_counter() - start, 1)
    found = {"epochs": epochs, "settings": settings, "seconds": spent, "killed": was_killed, "code": code}
    if not (out / "imagenet.json").exists():
        print(f"{network} did not end in {spent:.0f} s", flush=True)
        return {**found, "complete": False}
    result = json.loads((out / "imagenet.json").read_text(encoding="utf-8"))
    keep = ("model", "weights", "top1", "top5", "loss", "train_loss", "seconds", "images", "curves", "waiting")
    models = [{key: row[key] for key in keep} for row in result["models"]]
    return {**found, "complete": True, "environment": result["environment"], "models": models}


if __name__ == "__main__":
    main()
