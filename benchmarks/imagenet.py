"""Images a second of `dcl run imagenet` from every source of images, and the part of a step that waits for them.

    python benchmarks/imagenet.py --out results/imagenet.csv

Every row trains with the recipe's own steps (`Training`): batch 256, bfloat16, channels_last, augmentation, SGD with
momentum. The sources:

- ready: the same batches again and again, cropped beforehand: the network alone.
- synthetic: `--data synthetic`, images on the device, cropped in every step: what a perfect source would give.
- resident: prepared shards that are kept on the device.
- prepared: prepared shards (`--gib` of them, random bytes), mapped into memory; threads copy whole batches from there.
- gpu: generated JPEGs of ImageNet's sizes (500 × 375 and near, about 110 kB), decoded on the GPU by torchcodec or
  torchvision; only where there is one.
- pillow: the same JPEGs, decoded by worker processes.
- tar: the same JPEGs in tar files.

``images_per_s`` is the median over rounds, ``of_synthetic`` its ratio to the synthetic source in the same process,
``waiting`` the part of the time in which the loop waited for images, ``loader_per_s`` what the source gives without a
network, ``core_per_s`` what one core decodes by Pillow, ``bound_by`` what keeps a row below 95 % of synthetic, and
``dcl_ratio`` the time of a step of the converted network relative to the plain one on the same source. Sources and
models take turns in every round, those that decode come one after the other. Workers return batches in bursts, so their
rounds are whole multiples of one batch from each. Reading a file for the first time is not measured: all files fit into
the memory of the machine. Rows are written as they come, in place of the same rows of earlier calls; after `--minutes`
no other is begun.
"""

import argparse
import io
import itertools
import json
import os
import shutil
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

from torch_dcl.data import DataError
from torch_dcl.data.imagenet.ahead import AHEAD
from torch_dcl.data.imagenet.batches import ImageNetBatches, Piece
from torch_dcl.data.imagenet.prepare import KEY, MANIFEST, VERSION, decode
from torch_dcl.data.imagenet.sources import Decoded, Images, open_images
from torch_dcl.experiments.imagenet.training import Training
from torch_dcl.experiments.protocol import Job
from torch_dcl.experiments.recipes.imagenet import ImageNet, ImageNetConfig
from torch_dcl.files import write_sealed, write_text

COLUMNS = ["network", "model", "source", "batch", "images_per_s", "of_synthetic", "waiting", "loader_per_s"]
COLUMNS += ["core_per_s", "bound_by", "dcl_ratio", "rounds", "gib", "workers", "cpus", "device", "torch"]
REPEATED = 50  # times that the JPEGs are listed, so that an epoch is as long as ImageNet's
PER_SHARD = 1024
LIGHT = ["ready", "synthetic", "resident", "prepared"]
DECODED = ["gpu", "pillow", "tar"]
PHASES = [  # in this order, as far as the time goes
    ("alexnet", ["plain", "dcl"], LIGHT),
    ("alexnet", ["plain"], ["gpu", "pillow", "tar"]),
    ("torchvision:resnet50", ["plain"], ["ready", "synthetic", "prepared"]),
    ("torchvision:resnet50", ["plain"], ["gpu", "pillow"]),
    ("torchvision:resnet50", ["plain", "dcl"], ["ready", "synthetic", "prepared"]),
]
Found = dict[tuple[str, str, str], list[tuple[float, float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.7, help="after which no row is begun; a third for files")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="of one source in one round; three times that to decode"
    )
    parser.add_argument("--gib", type=float, default=20.0, help="of prepared shards")
    parser.add_argument("--resident-gib", type=float, default=4.0, help="of these that are kept on the device")
    parser.add_argument("--jpegs", type=int, default=4096)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--networks", nargs="+", default=["alexnet", "torchvision:resnet50"])
    parser.add_argument("--models", nargs="+", default=["plain", "dcl"], choices=["plain", "dcl"])
    parser.add_argument("--sources", nargs="+", default=[*LIGHT, *DECODED], choices=[*LIGHT, *DECODED])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", type=Path, help="where to generate images; a temporary folder by default")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    until = time.perf_counter() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        folder = Path(temporary)
        # Forked: processes that import torch again would take longer than the files.
        with ProcessPoolExecutor(arguments.workers, get_context("fork")) as pool:
            if set(arguments.sources) & set(DECODED):
                make_jpegs(pool, folder, arguments.jpegs)
            make_shards(pool, folder, arguments, until - 40 * arguments.minutes)
        bench = Bench(folder, arguments, until)
        for network, models, sources in PHASES:
            chosen = [model for model in models if model in arguments.models]
            some = [source for source in sources if source in arguments.sources]
            if network in arguments.networks and chosen and some:
                bench.measure(network, chosen, some)


# Images


def _shard(path: Path, count: int, number: int) -> str:
    random = np.random.default_rng(number)
    pixels = random.integers(0, 2**64, count * 3 * 256 * 256 // 8, np.uint64).view(np.uint8).reshape(count, 3, 256, 256)
    labels = torch.from_numpy(random.integers(0, 1000, count))
    tensors = {"images": torch.from_numpy(pixels), "labels": labels}
    return write_sealed(path, KEY, tensors, {"version": VERSION, "skipped": []})


def make_shards(pool: ProcessPoolExecutor, folder: Path, arguments: argparse.Namespace, until: float) -> None:
    """Prepared shards of random bytes, which are as slow to read as any others, as many as there is time for."""
    start, room = time.perf_counter(), 0.6 * shutil.disk_usage(folder).free
    total = max(arguments.batch, int(min(arguments.gib * 2**30, room) / (3 * 256 * 256)))
    few = max(arguments.batch, int(arguments.resident_gib * 2**30 / (3 * 256 * 256)))
    for name in ("shards", "few"):
        (folder / name).mkdir()
    shards: list[dict[str, object]] = []
    images = 0
    left = iter([(number, min(PER_SHARD, total - first)) for number, first in enumerate(range(0, total, PER_SHARD))])
    while part := list(itertools.islice(left, arguments.workers)):
        paths = [folder / "shards" / f"train-{number:05d}.safetensors" for number, _ in part]
        jobs = [pool.submit(_shard, path, count, number) for path, (number, count) in zip(paths, part, strict=True)]
        for path, (_, count), job in zip(paths, part, jobs, strict=True):
            shards.append({"file": path.name, "images": count, "sha256": job.result()})
            images += count
        if time.perf_counter() > until:
            break
    arguments.gib = images * 3 * 256 * 256 / 2**30
    resident = shards[: -(-few // PER_SHARD)]
    for shard in resident:
        os.link(folder / "shards" / str(shard["file"]), folder / "few" / str(shard["file"]))
    for name, chosen in (("shards", shards), ("few", resident)):
        splits = {split: {"images": 0, "shards": chosen} for split in ("train", "val")}
        listed = {"torch_dcl_imagenet": VERSION, "size": 256, "shape": "squash", "skipped": [], "splits": splits}
        classes = [str(number) for number in range(1000)]
        write_text(folder / name / MANIFEST, json.dumps({**listed, "classes": classes}))
    print(f"{arguments.gib:.1f} GiB of shards in {time.perf_counter() - start:.1f} s", flush=True)


def _jpeg(number: int) -> bytes:
    """Smooth shapes and fine noise, so that the file has the size of a photograph's."""
    random = np.random.default_rng(number)
    width, height = int(random.integers(400, 600)), int(random.integers(300, 450))
    coarse = Image.fromarray(random.integers(0, 256, (height // 16, width // 16, 3), np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(np.float32)
    pixels = np.clip(pixels + 14 * random.standard_normal(pixels.shape, np.float32), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


def _class_of_jpegs(folder: Path, label: int, numbers: range) -> int:
    place = folder / "images" / "train" / f"{label:03d}"
    place.mkdir(parents=True)
    size = 0
    with tarfile.open(folder / "tars" / f"train-{label:06d}.tar", "w") as archive:
        for number in numbers:
            data = _jpeg(number)
            size += len(data)
            (place / f"{number}.jpg").write_bytes(data)
            for name, content in ((f"{number}.jpg", data), (f"{number}.cls", str(label).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return size


def make_jpegs(pool: ProcessPoolExecutor, folder: Path, count: int) -> None:
    """JPEGs of ImageNet's sizes, as a folder of 32 classes and as tar files."""
    (folder / "tars").mkdir()
    start, step = time.perf_counter(), -(-count // 32)
    ranges = [range(first, min(first + step, count)) for first in range(0, count, step)]
    jobs = [pool.submit(_class_of_jpegs, folder, label, part) for label, part in enumerate(ranges)]
    size, spent = sum(job.result() for job in jobs), time.perf_counter() - start
    print(f"{count:,} JPEGs of {size / count / 1000:.0f} kB on average in {spent:.1f} s", flush=True)


# Steps


def endless(batches: ImageNetBatches) -> Iterator[Piece]:
    """Epoch after epoch."""
    for epoch in itertools.count():
        yield from batches.pieces(epoch)


def without_those_ahead(pieces: Iterator[Piece], workers: int) -> None:
    """Take the batches that were made ahead of the measurement."""
    for _ in range(3):
        next(pieces)
    for _ in range(2 * AHEAD * max(1, workers)):
        before = time.perf_counter()
        next(pieces)
        if time.perf_counter() - before > 0.005:
            break


class Bench:
    """What has been measured so far."""

    def __init__(self, folder: Path, arguments: argparse.Namespace, until: float) -> None:
        self.folder, self.arguments, self.until = folder, arguments, until
        self.device = torch.device(arguments.device)
        self.found: Found = {}
        self.shown: dict[tuple[str, str, str], int] = {}
        self.loaders: dict[str, float] = {}
        self.recipes: dict[str, ImageNet] = {}
        self.trainings: dict[tuple[str, str], Training] = {}
        self.core = self._core() if set(arguments.sources) & set(DECODED) else 0.0

    def _core(self) -> float:
        """Images a second that one core decodes and resizes by Pillow."""
        samples, start = self._images("pillow").pillow.samples, time.perf_counter()  # type: ignore[attr-defined]
        for number in itertools.count(1):
            decode(samples, number % len(samples), 256)
            if (spent := time.perf_counter() - start) > self.arguments.seconds:
                break
        print(f"one core decodes {number / spent:,.0f} images/s", flush=True)
        return number / spent

    def _images(self, source: str) -> Images:
        if source == "resident":
            return open_images(self.folder / "few", "train").resident(self.device)  # type: ignore[attr-defined]
        place = {"prepared": "shards", "pillow": "images", "gpu": "images", "tar": "tars"}[source]
        images = open_images(self.folder / place, "train", decoder="gpu" if source == "gpu" else "pillow")
        if isinstance(images, Decoded):
            many = images.samples.part(list(range(len(images.samples))) * REPEATED)
            return Decoded(images.root, many, images.size, "squash", images.decoder)
        return images

    def training(self, network: str, model: str) -> Training:
        """The training of the recipe, on synthetic images, with a second of steps to compile and to settle."""
        if (network, model) not in self.trainings:
            start, batch = time.perf_counter(), self.arguments.batch
            config = ImageNetConfig(
                network=network, models=(model,), data="synthetic", images=8 * batch, batch=batch,
                precision="bfloat16", channels_last=True, workers=self.arguments.workers, device=self.arguments.device,
            )  # fmt: skip
            recipe = self.recipes.setdefault(network, ImageNet(config, self.arguments.device))
            if not hasattr(recipe, "splits"):
                recipe.prepare(lambda _: None)
            made = self.trainings[network, model] = recipe.build(Job(model, "synthetic", 0, config.lr))
            self._rate(endless(made.batches), made, min(1.0, self.arguments.seconds))
            print(f"{network} {model} is ready after {time.perf_counter() - start:.1f} s", flush=True)
        return self.trainings[network, model]

    def _feed(self, source: str, training: Training, images: dict[str, Images]) -> Iterator[Piece]:
        """Batch after batch of a source, as the training itself would have them."""
        own = training.batches
        if source == "ready":
            return itertools.cycle([piece for piece, _ in zip(own.pieces(0), range(2), strict=False)])
        if source == "synthetic":
            return endless(own)
        return endless(ImageNetBatches(
            images[source], "train", own.batch, resize=256, crop=own.crop, mean=own.mean.flatten(),
            std=own.std.flatten().tolist(), device=self.device, workers=self.arguments.workers,
        ))  # fmt: skip

    def _rate(
        self, pieces: Iterator[Piece], training: Training | None, seconds: float, multiple: int = 1
    ) -> tuple[float, float]:
        """Images a second, and the part of the time that the loop waited; without a training, of the source alone."""
        images, waited = 0, 0.0
        self._synchronise()
        start = time.perf_counter()
        for number in itertools.count(1):
            before = time.perf_counter()
            piece = next(pieces)
            waited += time.perf_counter() - before
            if training is not None:
                training.take_step(piece)
            images += len(piece.labels)
            if time.perf_counter() - start > seconds and number % multiple == 0:
                break
        self._synchronise()
        spent = time.perf_counter() - start
        return images / spent, waited / spent

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def measure(self, network: str, models: list[str], sources: list[str]) -> None:
        """Some cells of the table, and all rows so far."""
        if time.perf_counter() > self.until:
            print(f"{network}, {', '.join(models)}: no time left for {', '.join(sources)}", flush=True)
            return
        trainings = {}
        try:
            for model in models:
                trainings[model] = self.training(network, model)
        except Exception as error:  # what cannot be converted or compiled must not cost the other rows
            print(f"{network} {model}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            if not trainings:
                return
        for some in [sources] if sources[0] in LIGHT else [[source] for source in sources]:
            try:
                images = {source: self._images(source) for source in some if source not in ("ready", "synthetic")}
                if some[0] in LIGHT:
                    self._take_turns(network, trainings, some, images)
                else:
                    self._decode(network, trainings["plain"], some[0], images)
            except (DataError, RuntimeError) as error:  # no decoder, or too little memory for workers to share
                print(f"{network}: {', '.join(some)}: {str(error).splitlines()[0]}", flush=True)
            self._write()

    def _take_turns(
        self, network: str, trainings: dict[str, Training], sources: list[str], images: dict[str, Images]
    ) -> None:
        for number in range(self.arguments.rounds):
            for source, (model, training) in itertools.product(sources, trainings.items()):
                if number and time.perf_counter() > self.until:
                    return
                pieces = self._feed(source, training, images)
                if source in images:
                    without_those_ahead(pieces, self.arguments.workers)
                    if source not in self.loaders:
                        self.loaders[source] = self._rate(pieces, None, self.arguments.seconds / 2)[0]
                        without_those_ahead(pieces, self.arguments.workers)
                found = self.found.setdefault((network, model, source), [])
                found.append(self._rate(pieces, training, self.arguments.seconds))
                if hasattr(pieces, "close"):
                    pieces.close()

    def _decode(self, network: str, training: Training, source: str, images: dict[str, Images]) -> None:
        if time.perf_counter() > self.until or (source == "gpu" and self.device.type != "cuda"):
            return
        pieces = self._feed(source, training, images)
        without_those_ahead(pieces, self.arguments.workers)
        multiple = max(1, self.arguments.workers) if source != "gpu" else 1
        if source not in self.loaders:
            self.loaders[source] = self._rate(pieces, None, self.arguments.seconds, multiple)[0]
        for _ in range(max(1, self.arguments.rounds - 1)):
            found = self.found.setdefault((network, "plain", source), [])
            found.append(self._rate(pieces, training, 2 * self.arguments.seconds, multiple))
        pieces.close()  # type: ignore[attr-defined]

    def _write(self) -> None:
        speeds = {cell: statistics.median(speed for speed, _ in found) for cell, found in self.found.items()}
        rows = []
        for (network, model, source), found in self.found.items():
            speed, limit = speeds[network, model, source], speeds.get((network, model, "synthetic"))
            plain, decodes = speeds.get((network, "plain", source)), source in ("pillow", "tar")
            rows.append({
                "network": network.removeprefix("torchvision:"), "model": model, "source": source,
                "batch": self.arguments.batch, "images_per_s": round(speed, 1),
                "of_synthetic": round(speed / limit, 3) if limit else "",
                "waiting": round(statistics.median(waited for _, waited in found), 3),
                "loader_per_s": round(self.loaders[source], 1) if source in self.loaders else "",
                "core_per_s": round(self.core, 1) if decodes else "",
                "bound_by": self._bound(source, speed, limit) if limit else "",
                "dcl_ratio": round(plain / speed, 3) if plain and model == "dcl" else "", "rounds": len(found),
                "gib": round(self.arguments.gib, 1) if source == "prepared" else "", "workers": self.arguments.workers,
                "cpus": len(os.sched_getaffinity(0)), "torch": torch.__version__,
                "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            })  # fmt: skip
            if len(found) != self.shown.get((network, model, source)):
                print(*(rows[-1][name] for name in COLUMNS[:11]), sep=", ", flush=True)
                self.shown[network, model, source] = len(found)
        if self.arguments.out is not None:
            write_rows(self.arguments.out, COLUMNS, rows, key=["network", "model", "source"])

    def _bound(self, source: str, speed: float, limit: float) -> str:
        """What the row waits for: the network, or a source that gives less than the network takes."""
        if speed >= 0.95 * limit or source == "ready":
            return "network"
        loader, workers = self.loaders.get(source, 0.0), self.arguments.workers
        if loader >= limit:
            return f"threads beside the loop: the source gives {loader:.0f} of {limit:.0f} images/s"
        if source in ("pillow", "tar"):
            return f"decoding: {workers} workers give {loader:.0f} of {limit:.0f} images/s; one core {self.core:.0f}"
        return f"{'decoding' if source == 'gpu' else 'reading'}: {loader:.0f} of {limit:.0f} images/s"


if __name__ == "__main__":
    main()
