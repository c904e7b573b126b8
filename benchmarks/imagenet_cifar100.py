"""CIFAR-100 as JPEGs through the whole path of `dcl run imagenet`: prepare, train, kill, resume, evaluate, report.

    python benchmarks/imagenet_cifar100.py --cifar DATA --minutes 4 --out results/imagenet_cifar100.json

The images are written as an image folder of JPEGs, enlarged to 128 × 128. The command itself then prepares shards of
256 × 256, trains AlexNet and ResNet-18, plain and converted, and writes a report. Each run is killed (SIGKILL) at its
first checkpoint and resumed. Both networks train at the same time, as two runs on one device: much of a short run is
its start, and then one starts while the other trains. So the seconds of a model are not those that it takes alone. At
the end the last network is trained for one epoch on the JPEGs themselves, decoded on the fly. Nothing is tuned: the
rates are fixed below, the same for all models of a network.

``--cifar`` is a folder that holds `cifar100`, as for `torch_dcl.data.load`; or one of mosaics of 100 × 100 images
(`train-0.webp`, …, `test-0.webp`, with `labels.npz` and `classes.json`), as many as there are. The defaults take about
three minutes on an H200 with 16 cores. A sixth of ``--minutes`` is kept for the report and the epoch on JPEGs; a run
that has not ended by then ends where it is, and the results say what it had reached.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from torch_dcl.data import load
from torch_dcl.files import write_text
from torch_dcl.fleet.run_folder import RunFolder

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
    parser.add_argument("--images", type=int, default=25_000, help="training images; 0 for all")
    parser.add_argument("--held-out", type=int, default=5000, help="test images")
    parser.add_argument("--epochs", type=int, nargs=2, default=[16, 6], help="of AlexNet and of ResNet-18")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--models", default="plain,dcl")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--set", nargs="*", default=[], help="further settings of every run, KEY=VALUE")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    start = time.perf_counter()
    until = start + 60 * arguments.minutes
    spent: dict[str, float] = {}
    results: dict[str, Any] = {"minutes": arguments.minutes, "seconds": spent}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        folder = Path(temporary)
        with timed("jpegs", spent):
            results["images"] = write_folder(folder / "jpegs", arguments)
        with timed("prepare", spent):
            jpegs, shards = str(folder / "jpegs"), str(folder / "shards")
            dcl("data", "prepare", "imagenet", jpegs, shards, "--workers", str(arguments.workers))
        chosen = {
            name: epochs for name, epochs in zip(NETWORKS, arguments.epochs, strict=True) if name in arguments.networks
        }
        last = until - 10 * arguments.minutes
        with timed("train", spent), ThreadPoolExecutor(len(chosen)) as pool:
            jobs = {name: pool.submit(train, name, epochs, folder, last, arguments) for name, epochs in chosen.items()}
            results["networks"] = {name: job.result() for name, job in jobs.items()}
        write_results(results, folder, arguments)
        with timed("report", spent):
            runs = [folder / name_of(network) for network in chosen]
            whole = [str(run) for run in runs if (run / "imagenet.json").exists()]
            if whole and dcl("report", *whole, "-o", str(folder / "report.html")):
                results["report_bytes"] = (folder / "report.html").stat().st_size
        write_results(results, folder, arguments)
        if time.perf_counter() < until:
            with timed("on the fly", spent):
                results["on_the_fly"] = train_on_the_fly(list(chosen)[-1], folder, until, arguments)
        spent["all"] = round(time.perf_counter() - start, 1)
        write_results(results, folder, arguments)
    print(
        f"all: {spent['all']} s of {60 * arguments.minutes:.0f}", *table_of(results["networks"]), sep="\n", flush=True
    )


def table_of(networks: dict[str, dict[str, Any]]) -> list[str]:
    """The table of docs/results.md; what did not end is named in place of its numbers."""
    lines = ["| | weights | epochs | top-1 error | top-5 error | train loss |", "|---|---:|---:|---:|---:|---:|"]
    names = {"alexnet": "AlexNet", "torchvision:resnet18": "ResNet-18"}
    for network, found in networks.items():
        if not found["complete"]:
            lines.append(f"{names[network]} did not end; it had reached {found['reached']}")
            continue
        lines += [
            f"| {names[network]}{', DCL' if row['model'] == 'dcl' else ''} | {row['weights']:,} | {found['epochs']} "
            f"| {row['top1'][0]:.1f} | {row['top5'][0]:.1f} | {row['train_loss'][0]:.2f} |"
            for row in found["models"]
        ]
    return lines


@contextmanager
def timed(name: str, spent: dict[str, float]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    spent[name] = round(time.perf_counter() - start, 1)
    print(f"{name}: {spent[name]} s", flush=True)


def name_of(network: str) -> str:
    return network.removeprefix("torchvision:")


def dcl(*words: str) -> bool:
    return subprocess.run([sys.executable, "-m", "torch_dcl", *words], check=words[0] == "data").returncode == 0


def write_results(results: dict[str, Any], folder: Path, arguments: argparse.Namespace) -> None:
    """The numbers; the page, if it is there; and the run folders without weights, from which it can be made again."""
    if arguments.out is None:
        return
    here = f"{folder}/"  # where this machine keeps temporary files is nobody's business
    write_text(arguments.out, json.dumps(results, indent=1).replace(here, "") + "\n")
    if (folder / "report.html").exists():
        page = (folder / "report.html").read_text(encoding="utf-8")
        write_text(arguments.out.with_suffix(".html"), page.replace(here, ""))
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
            files = [root / f"{name}-{number}.webp" for number in range(len(list(root.glob(f"{name}-*.webp"))))]
            with ThreadPoolExecutor() as pool:
                images = np.concatenate(list(pool.map(read_mosaic, files)))
            splits[split] = images, [int(label) for label in labels[name][: len(images)]]
    return json.loads((root / "classes.json").read_text(encoding="utf-8")), splits


def read_mosaic(file: Path) -> npt.NDArray[np.uint8]:
    pixels = np.asarray(Image.open(file).convert("RGB"))
    return pixels.reshape(100, 32, 100, 32, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 32, 32, 3)


def write_jpeg(path: Path, image: npt.NDArray[np.uint8]) -> None:
    Image.fromarray(image).resize((128, 128), Image.Resampling.BICUBIC).save(path, quality=95)


def write_folder(folder: Path, arguments: argparse.Namespace) -> dict[str, int]:
    """CIFAR-100 as train/CLASS/*.jpg and val/CLASS/*.jpg; how many there are."""
    classes, splits = read_cifar(arguments.cifar)
    counts = {}

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
        with ProcessPoolExecutor(arguments.workers, get_context("fork")) as pool:  # threads would share one lock
            list(pool.map(write_jpeg, *zip(*chosen, strict=True), chunksize=100))
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


def train_on_the_fly(network: str, folder: Path, until: float, arguments: argparse.Namespace) -> dict[str, object]:
    """One epoch of the plain network on the JPEGs, which are decoded for every step."""
    out = folder / "on_the_fly"
    settings = settings_of(network, 1, arguments, f"workers={arguments.workers}")
    command = command_of(network, "plain", folder / "jpegs", out, settings, arguments)
    code = subprocess.run([*command, "--minutes", minutes_until(until)], check=False).returncode
    return {"network": network, "code": code, **read_run(out)}


def train(network: str, epochs: int, folder: Path, until: float, arguments: argparse.Namespace) -> dict[str, object]:
    """Run the recipe, kill it at its first checkpoint, resume it."""
    out, start = folder / name_of(network), time.perf_counter()
    settings = settings_of(network, epochs, arguments, "evaluate_every=3", "save_minutes=0.04", "keep=device")
    command = command_of(network, arguments.models, folder / "shards", out, settings, arguments)
    first = subprocess.Popen(command)
    while first.poll() is None and not list(out.glob("fleets/*.safetensors")) and time.perf_counter() < until:
        time.sleep(0.02)
    was_killed = first.poll() is None
    first.send_signal(signal.SIGKILL)
    first.wait()
    killed_at = time.perf_counter() - start
    print(f"{network}: {'killed' if was_killed else 'ended'} after {killed_at:.1f} s", flush=True)
    again = ["--resume", "--set", "verify=no", "--set", "save_minutes=1", "--minutes", minutes_until(until)]
    code = subprocess.run([*command, *again], check=False).returncode
    spent = time.perf_counter() - start
    found = read_run(out)
    print(f"{network}: {'complete' if found['complete'] else 'NOT complete'} after {spent:.1f} s", flush=True)
    return {
        "epochs": epochs, "settings": settings, "killed": was_killed, "killed_at": round(killed_at, 1),
        "seconds": round(spent, 1), "code": code, **found,
    }  # fmt: skip


def minutes_until(until: float) -> str:
    return f"{max(0.1, until - time.perf_counter()) / 60:.3f}"


def read_run(out: Path) -> dict[str, object]:
    """What a run has found; of one that did not end, the last epoch that each model has reached, with its loss."""
    if not (out / "imagenet.json").exists():
        metrics = RunFolder.inspect(out).read("metrics") if (out / "recipe.json").exists() else []
        reached = {str(record["name"]): {key: record[key] for key in ("epoch", "loss")} for record in metrics}
        return {"complete": False, "reached": reached}
    result = json.loads((out / "imagenet.json").read_text(encoding="utf-8"))
    keep = ("model", "weights", "top1", "top5", "loss", "train_loss", "seconds", "images", "curves", "waiting")
    rows = [{key: row[key] for key in keep} for row in result["models"]]
    return {"complete": True, "data": result["data"], "environment": result["environment"], "models": rows}


if __name__ == "__main__":
    main()
