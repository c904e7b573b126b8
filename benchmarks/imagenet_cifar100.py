"""CIFAR-100 as JPEGs through the whole path of `dcl run imagenet`: prepare, train, kill, resume, evaluate, report.

    python benchmarks/imagenet_cifar100.py --cifar DATA --out results/imagenet_cifar100.json

The images are written as an image folder of JPEGs, enlarged to 128 × 128. The command itself then prepares shards of
256 × 256, trains AlexNet and ResNet-18, plain, converted and low-rank, and writes a report. Each run is killed
(SIGKILL) at its first checkpoint and resumed. Nothing is tuned: the rates are fixed below, the same for all models of a
network. ``--cifar`` is a folder that holds `cifar100`, as for `torch_dcl.data.load`; ``--images`` takes fewer for a
try.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from PIL import Image

from torch_dcl.data import load
from torch_dcl.files import write_text

# What all models of a network are trained with; batches, rates and decay are the usual ones of each network.
COMMON = {"precision": "bfloat16", "channels_last": "yes", "schedule": "cosine", "clip": 5}
NETWORKS = {
    "alexnet": {"lr": 0.02, "batch": 256, "warmup": 200},
    "torchvision:resnet18": {"lr": 0.1, "batch": 256, "warmup": 200, "bias_lr": 1, "smoothing": 0.1},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", type=Path, help="where cifar100 is; by default it is looked for")
    parser.add_argument("--images", type=int, help="training images; all by default")
    parser.add_argument("--epochs", type=int, nargs=2, default=[12, 5], help="of AlexNet and of ResNet-18")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS))
    parser.add_argument("--models", default="plain,dcl,low-rank")
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--set", nargs="*", default=[], help="further settings of every run, KEY=VALUE")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        start = time.perf_counter()
        write_folder(folder / "jpegs", arguments.cifar, arguments.images)
        print(f"JPEGs: {time.perf_counter() - start:.1f} s", flush=True)
        start = time.perf_counter()
        dcl("data", "prepare", "imagenet", str(folder / "jpegs"), str(folder / "shards"), "--size", str(arguments.size))
        prepared = time.perf_counter() - start
        print(f"prepared: {prepared:.1f} s", flush=True)
        results = {"prepare_seconds": prepared, "networks": {}}
        for network, epochs in zip(arguments.networks, arguments.epochs, strict=False):
            results["networks"][network] = train(network, epochs, folder, arguments)
        dcl("report", *(str(folder / name_of(n)) for n in arguments.networks), "-o", str(folder / "report.html"))
        results["report_bytes"] = (folder / "report.html").stat().st_size
        if arguments.out is not None:
            write_text(arguments.out, json.dumps(results, indent=1) + "\n")
            shutil.copy(folder / "report.html", arguments.out.with_suffix(".html"))


def name_of(network: str) -> str:
    return network.removeprefix("torchvision:")


def dcl(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "torch_dcl", *words], check=True)


def write_folder(folder: Path, root: Path | None, count: int | None) -> None:
    """CIFAR-100 as train/CLASS/*.jpg and val/CLASS/*.jpg."""
    data = load("cifar100", root=root)
    splits = {"train": (data.train_images, data.train_labels), "val": (data.test_images, data.test_labels)}

    def write(job: tuple[str, int, torch.Tensor, int]) -> None:
        split, number, image, label = job
        large = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((128, 128), Image.Resampling.BICUBIC)
        large.save(folder / split / f"{label:02d}-{data.classes[label]}" / f"{number:05d}.jpg", quality=95)

    for split, (images, labels) in splits.items():
        for label, name in enumerate(data.classes):
            (folder / split / f"{label:02d}-{name}").mkdir(parents=True)
        chosen = range(0, len(images), max(1, len(images) // (count or len(images))))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(write, ((split, number, images[number], int(labels[number])) for number in chosen)))


def train(network: str, epochs: int, folder: Path, arguments: argparse.Namespace) -> dict[str, object]:
    """Run the recipe, kill it at its first checkpoint, resume it."""
    out = folder / name_of(network)
    crop = [] if arguments.size == 256 else [f"resize={arguments.size}", f"crop={arguments.size * 7 // 8}"]
    settings = [f"{key}={value}" for key, value in {**COMMON, **NETWORKS[network]}.items()]
    settings += [f"epochs={epochs}", "evaluate_every=1", "save_minutes=0.05", "keep=device", *crop, *arguments.set]
    command = [
        sys.executable, "-m", "torch_dcl", "run", "imagenet", "--network", network, "--models", arguments.models,
        "--data", str(folder / "shards"), "--device", arguments.device, "--out", str(out),
        *(word for pair in settings for word in ("--set", pair)),
    ]  # fmt: skip
    start = time.perf_counter()
    first = subprocess.Popen(command)
    while first.poll() is None and not list(out.glob("fleets/*.safetensors")):
        time.sleep(0.05)
    was_killed = first.poll() is None
    first.send_signal(signal.SIGKILL)
    first.wait()
    subprocess.run([*command, "--resume"], check=True)
    result = json.loads((out / "imagenet.json").read_text(encoding="utf-8"))
    if not was_killed:
        raise RuntimeError(f"{network} ended before it could be killed; train longer")
    keep = ("model", "weights", "top1", "top5", "loss", "train_loss", "seconds", "images", "curves", "waiting")
    return {
        "epochs": epochs, "settings": settings, "seconds": time.perf_counter() - start, "killed": was_killed,
        "environment": result["environment"], "models": [{key: row[key] for key in keep} for row in result["models"]],
    }  # fmt: skip


if __name__ == "__main__":
    main()
