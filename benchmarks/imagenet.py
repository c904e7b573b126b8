"""Images a second of `dcl run imagenet` from every source of images, and the part of a step that waits for them.

    python benchmarks/imagenet.py --out results/imagenet.csv

Every row trains with the recipe's own steps (`Training`): batch 256, bfloat16, channels_last, augmentation, SGD with
momentum. The sources:

- synthetic: the same two batches again and again, ready on the device: what the network can take.
- resident: prepared shards that are kept on the device.
- prepared: prepared shards (`--gib` of them, random bytes), mapped into memory and read by threads.
- pillow: generated JPEGs of ImageNet's sizes (500 × 375 and near, about 110 kB), decoded by worker processes.
- tar: the same JPEGs in tar files.
- gpu: the same JPEGs, decoded on the GPU by torchcodec or torchvision; only where there is one.

``images_per_s`` is the median over rounds, ``of_synthetic`` its ratio to the synthetic source in the same process,
``waiting`` the part of the time in which the loop waited for images, ``loader_per_s`` what the source gives without a
network, and ``dcl_ratio`` the time of a step of the converted network relative to the plain one on the same source.
Reading a file for the first time is not measured: all files fit into the memory of the machine.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import statistics
import tarfile
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rows import write_rows

from torch_dcl.data.imagenet.batches import ImageNetBatches, Piece
from torch_dcl.data.imagenet.prepare import KEY, MANIFEST, VERSION
from torch_dcl.data.imagenet.sources import AHEAD, Decoded, Images, open_images
from torch_dcl.experiments.imagenet.training import Training
from torch_dcl.experiments.protocol import Job
from torch_dcl.experiments.recipes.imagenet import ImageNet, ImageNetConfig
from torch_dcl.files import write_sealed, write_text

COLUMNS = [
    "network",
    "model",
    "source",
    "batch",
    "images_per_s",
    "of_synthetic",
    "waiting",
    "loader_per_s",
    "dcl_ratio",
]
COLUMNS += ["rounds", "workers", "cpus", "device", "torch"]
REPEATED = 50
PLANS = {  # which sources each network is measured with; the first must be synthetic
    ("alexnet", "plain"): ["synthetic", "resident", "prepared", "pillow", "tar", "gpu"],
    ("alexnet", "dcl"): ["synthetic", "resident", "prepared"],
    ("torchvision:resnet50", "plain"): ["synthetic", "prepared", "pillow", "gpu"],
    ("torchvision:resnet50", "dcl"): ["synthetic", "prepared"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="of one source in one round")
    parser.add_argument("--gib", type=float, default=20.0, help="of prepared shards")
    parser.add_argument("--resident-gib", type=float, default=4.0, help="of shards kept on the device")
    parser.add_argument("--jpegs", type=int, default=8192)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--networks", nargs="+", default=["alexnet", "torchvision:resnet50"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", type=Path, help="where to generate images; a temporary folder by default")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        make_shards(folder / "shards", arguments.gib, arguments.workers)
        make_shards(folder / "few", arguments.resident_gib, arguments.workers)
        make_jpegs(folder / "images", folder / "tars", arguments.jpegs, arguments.workers)
        rows: list[dict[str, object]] = []
        for network in arguments.networks:
            rows += measure(network, folder, arguments)
            if arguments.out is not None:
                write_rows(arguments.out, COLUMNS, rows)


# Images


def _shard(path: Path, count: int, number: int) -> str:
    random = np.random.default_rng(number)
    images = torch.from_numpy(random.integers(0, 256, (count, 3, 256, 256), np.uint8))
    labels = torch.from_numpy(random.integers(0, 1000, count))
    return write_sealed(path, KEY, {"images": images, "labels": labels}, {"version": VERSION, "skipped": []})


def make_shards(folder: Path, gib: float, workers: int) -> None:
    """Prepared shards of random bytes, which are as slow to read as any others."""
    folder.mkdir(parents=True)
    total = max(2, int(gib * 2**30 / (3 * 256 * 256)))
    counts = [min(1024, total - first) for first in range(0, total, 1024)]
    paths = [folder / f"train-{number:05d}.safetensors" for number in range(len(counts))]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        hashes = list(pool.map(_shard, paths, counts, range(len(counts))))
    shards = [
        {"file": path.name, "images": count, "sha256": digest}
        for path, count, digest in zip(paths, counts, hashes, strict=True)
    ]
    splits = {split: {"images": total, "shards": shards} for split in ("train", "val")}
    listed = {"torch_dcl_imagenet": VERSION, "size": 256, "shape": "squash", "skipped": [], "splits": splits}
    write_text(folder / MANIFEST, json.dumps({**listed, "classes": [str(number) for number in range(1000)]}))


def _jpeg(number: int) -> bytes:
    """Smooth shapes and fine noise, so that the file has the size of a photograph's."""
    random = np.random.default_rng(number)
    width, height = int(random.integers(400, 600)), int(random.integers(300, 450))
    coarse = Image.fromarray(random.integers(0, 256, (height // 16, width // 16, 3), np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
    pixels = np.clip(pixels + random.normal(0, 14, pixels.shape), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


def _class_of_jpegs(folder: Path, tars: Path, label: int, numbers: range) -> int:
    place = folder / "train" / f"{label:03d}"
    place.mkdir(parents=True)
    size = 0
    with tarfile.open(tars / f"train-{label:06d}.tar", "w") as archive:
        for number in numbers:
            data = _jpeg(number)
            size += len(data)
            (place / f"{number}.jpg").write_bytes(data)
            for name, content in ((f"{number}.jpg", data), (f"{number}.cls", str(label).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return size


def make_jpegs(folder: Path, tars: Path, count: int, workers: int) -> None:
    """JPEGs of ImageNet's sizes, as a folder of 32 classes and as tar files."""
    tars.mkdir(parents=True)
    step = -(-count // 32)
    ranges = [range(first, min(first + step, count)) for first in range(0, count, step)]
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        jobs = [pool.submit(_class_of_jpegs, folder, tars, label, part) for label, part in enumerate(ranges)]
        size = sum(job.result() for job in jobs)
    print(f"{count:,} JPEGs of {size / count / 1000:.0f} kB on average", flush=True)


def source_of(name: str, folder: Path, device: torch.device) -> Images:
    """The images of a source."""
    if name == "resident":
        few = open_images(folder / "few", "train")
        return few.resident(device)  # type: ignore[attr-defined]
    place = {"prepared": "shards", "pillow": "images", "gpu": "images", "tar": "tars"}[name]
    images = open_images(folder / place, "train", decoder="gpu" if name == "gpu" else "pillow")
    if isinstance(images, Decoded):  # an epoch as long as ImageNet's would be, of the same files
        many = images.samples.part(list(range(len(images.samples))) * REPEATED)
        return Decoded(images.root, many, images.size, images.shape, images.decoder)
    return images


# Steps


def endless(batches: ImageNetBatches) -> Iterator[Piece]:
    """Epoch after epoch."""
    for epoch in itertools.count():
        yield from batches.pieces(epoch)


@contextlib.contextmanager
def feed(batches: ImageNetBatches) -> Iterator[Iterator[Piece]]:
    """Batch after batch, without those that were made ahead of the measurement."""
    pieces = endless(batches)
    for _ in range(3):
        next(pieces)
    for _ in range(4 * AHEAD * max(1, batches.workers)):
        before = time.perf_counter()
        next(pieces)
        if time.perf_counter() - before > 0.005:
            break
    yield pieces
    pieces.close()  # type: ignore[attr-defined]


@contextlib.contextmanager
def again(pieces: list[Piece]) -> Iterator[Iterator[Piece]]:
    yield itertools.cycle(pieces)


def rate(
    pieces: Iterator[Piece], training: Training | None, seconds: float, device: torch.device
) -> tuple[float, float]:
    """Images a second, and the part of the time that the loop waited; without a training, of the source alone."""
    images, waited = 0, 0.0
    _synchronise(device)
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        before = time.perf_counter()
        piece = next(pieces)
        waited += time.perf_counter() - before
        if training is not None:
            training.take_step(piece)
        images += len(piece.labels)
    _synchronise(device)
    spent = time.perf_counter() - start
    return images / spent, waited / spent


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(network: str, folder: Path, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """All rows of one network: sources and models take turns in every round."""
    device = torch.device(arguments.device)
    config = ImageNetConfig(
        network=network, data="synthetic", images=2 * arguments.batch, batch=arguments.batch, precision="bfloat16",
        channels_last=True, workers=arguments.workers, device=arguments.device,
    )  # fmt: skip
    recipe = ImageNet(config, arguments.device)
    recipe.prepare(lambda _: None)
    models = [model for name, model in PLANS if name == network]
    trainings = {model: recipe.build(Job(model, "synthetic", 0, config.lr)) for model in models}
    template = trainings["plain"].batches
    ready = list(template.pieces(0))
    sources = [name for name in PLANS[network, "plain"] if name != "gpu" or device.type == "cuda"]
    made = {
        name: ImageNetBatches(
            source_of(name, folder, device), "train", arguments.batch, resize=256, crop=template.crop,
            mean=template.mean.flatten(), std=template.std.flatten().tolist(), device=device, workers=arguments.workers,
        )
        for name in sources[1:]
    }  # fmt: skip
    loaders = {}
    for name, batches in made.items():
        try:
            with feed(batches) as pieces:
                loaders[name] = rate(pieces, None, arguments.seconds, device)[0]
        except RuntimeError as error:  # no decoder on this GPU, or too little shared memory for worker processes
            print(f"{network}: {name} cannot be measured: {str(error).splitlines()[0]}", flush=True)
            sources.remove(name)
            continue
        print(f"{network}: {name} gives {loaders[name]:,.0f} images/s", flush=True)
    for training in trainings.values():
        rate(itertools.cycle(ready), training, min(1.0, arguments.seconds), device)
    cells = [(model, name) for model in models for name in PLANS[network, model] if name in sources]
    found: dict[tuple[str, str], list[tuple[float, float]]] = {cell: [] for cell in cells}
    for _ in range(arguments.rounds):
        for model, name in cells:
            with again(ready) if name == "synthetic" else feed(made[name]) as pieces:
                found[model, name].append(rate(pieces, trainings[model], arguments.seconds, device))
    rows = []
    for model, name in cells:
        speed, waiting = (statistics.median(values) for values in zip(*found[model, name], strict=True))
        limit, plain = (
            statistics.median(v for v, _ in found[cell]) for cell in ((model, "synthetic"), ("plain", name))
        )
        rows.append({
            "network": network.removeprefix("torchvision:"), "model": model, "source": name, "batch": arguments.batch,
            "images_per_s": round(speed, 1), "of_synthetic": round(speed / limit, 3), "waiting": round(waiting, 3),
            "loader_per_s": "" if name == "synthetic" else round(loaders[name], 1),
            "dcl_ratio": "" if model == "plain" else round(plain / speed, 3), "rounds": arguments.rounds,
            "workers": arguments.workers, "cpus": os.cpu_count(), "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    main()
