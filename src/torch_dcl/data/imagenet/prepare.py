"""Prepared shards: every image decoded once, resized, and written as uint8 RGB in hashed files.

A shard is a sealed safetensors file (`torch_dcl.files.write_sealed`) with `images` `[N, 3, size, size]` and `labels`
`[N]`. The same images and settings give the same bytes, so preparation can be interrupted at any time: shards that are
there are checked and kept. `imagenet.json` is written last, with the SHA-256 of each shard.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torch_dcl.data.dataset import DataError
from torch_dcl.data.draws import whole_number
from torch_dcl.data.imagenet.samples import Samples, find_samples
from torch_dcl.data.images import read_image
from torch_dcl.files import SealedError, check_seal, locate_sealed, write_sealed, write_text

__all__ = [
    "KEY",
    "MANIFEST",
    "VERSION",
    "Prepared",
    "check_classes",
    "decode",
    "prepare_imagenet",
    "say_skipped",
    "shard_bytes",
]

KEY = "torch_dcl_images"
MANIFEST = "imagenet.json"
VERSION = 1
SPLITS = ("train", "val")
SHAPES = ("squash", "crop")
_ROOM = 2**26  # bytes that must stay free beside the shards


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What `prepare_imagenet` did."""

    folder: Path
    images: dict[str, int]
    """By split."""
    shards: int
    written: int
    """Shards that were missing or damaged."""
    skipped: tuple[str, ...]
    """Images that cannot be decoded; without ``skip_corrupt`` the first one is an error."""
    bytes: int


@dataclasses.dataclass(frozen=True)
class _Shard:
    """What a worker needs to write one shard."""

    path: Path
    root: Path
    samples: Samples
    size: int
    shape: str
    skip: bool
    key: str


def decode(samples: Samples, index: int, size: int, shape: str = "squash") -> npt.NDArray[np.uint8]:
    """Decode and resize one image, by antialiased bilinear interpolation.

    Args:
        samples: Where it is.
        index: Its number.
        size: Height and width of the result.
        shape: `"squash"` ignores the aspect ratio, as Caffe does. `"crop"` keeps it, and cuts the centre.

    Returns:
        uint8 `[3, size, size]`.

    Raises:
        DataError: It cannot be decoded; the message names it.
    """
    from PIL.Image import Resampling

    file = samples.file(index)
    image = read_image(file, "RGB") if isinstance(file, Path) else read_image(samples.name(index), "RGB", data=file)
    box = None
    if shape == "crop":
        side = min(image.size)
        left, top = ((length - side) / 2 for length in image.size)
        box = (left, top, left + side, top + side)
    small = image.resize((size, size), Resampling.BILINEAR, box=box)
    return np.ascontiguousarray(np.asarray(small).transpose(2, 0, 1))


def prepare_imagenet(
    source: str | Path,
    folder: str | Path,
    *,
    size: int = 256,
    shape: str = "squash",
    images_per_shard: int = 1024,
    per_class: int | None = None,
    skip_corrupt: bool = False,
    workers: int = 1,
    report: Callable[[int, int], None] | None = None,
) -> Prepared:
    """Write the training and validation images of a folder, or of tar files, as prepared shards.

    Args:
        source: As for `find_samples`.
        folder: Where to write; one that holds some of these shards is completed.
        size: Height and width of the prepared images.
        shape: As for `decode`.
        images_per_shard: Images in a shard.
        per_class: Only the first images of each class.
        skip_corrupt: Whether to leave out images that cannot be decoded; by default they are an error.
        workers: Number of processes.
        report: Called with the number of shards that are done and that there are.

    Raises:
        FileNotFoundError: A split is missing.
        DataError: An image cannot be decoded, classes are empty or differ, or the folder holds other shards.
        OSError: There is not enough space for the shards, which is checked before anything is written.
    """
    for name, given in (("size", size), ("images_per_shard", images_per_shard), ("workers", workers)):
        whole_number(name, given, 1)
    if per_class is not None:
        whole_number("per_class", per_class, 1)
    if shape not in SHAPES:
        raise ValueError(f"shape must be one of {', '.join(SHAPES)}, not {shape!r}")
    root, place = Path(source), Path(folder)
    if not root.is_dir():
        raise FileNotFoundError(f"{root} does not exist; name the folder with train/ and val/, or with tar files")
    splits = {split: _first_of_each(find_samples(root, split), per_class) for split in SPLITS}
    check_classes({split: samples.classes for split, samples in splits.items()})
    shards = {
        split: _plan(samples, root, place / split, size, shape, images_per_shard, skip=skip_corrupt)
        for split, samples in splits.items()
    }
    every = [shard for part in shards.values() for shard in part]
    _check_space(place, [shard for shard in every if not shard.path.exists()], size)
    place.mkdir(parents=True, exist_ok=True)
    results = _write_all(every, workers, report or (lambda *_: None))
    return _finish(place, splits, shards, results, size, shape)


def _first_of_each(samples: Samples, count: int | None) -> Samples:
    if count is None:
        return samples
    seen = [0] * len(samples.classes)
    chosen = []
    for index, label in enumerate(samples.labels):
        seen[label] += 1
        if seen[label] <= count:
            chosen.append(index)
    return samples.part(chosen)


def check_classes(splits: Mapping[str, Sequence[str]]) -> None:
    """Refuse splits whose classes differ; a folder's are checked where it is read.

    Raises:
        DataError: They do; the message names some.
    """
    train, val = (tuple(splits[split]) for split in SPLITS)
    if train != val:
        differ = sorted(set(train) ^ set(val))[:5]
        raise DataError(f"train and val must have the same classes; these differ: {', '.join(differ)}")


def _plan(samples: Samples, root: Path, prefix: Path, size: int, shape: str, count: int, *, skip: bool) -> list[_Shard]:
    """The shards of a split. A shard's key names its images and the settings that its bytes depend on."""
    shards = []
    for number, first in enumerate(range(0, len(samples), count)):
        part = samples.part(range(first, min(first + count, len(samples))))
        settings = json.dumps([VERSION, size, shape, part.signature(root)])
        key = hashlib.sha256(settings.encode()).hexdigest()
        shards.append(
            _Shard(prefix.with_name(f"{prefix.name}-{number:05d}.safetensors"), root, part, size, shape, skip, key)
        )
    return shards


def shard_bytes(images: int, size: int) -> int:
    """The bytes of so many prepared images with their labels, without headers."""
    return images * (3 * size * size + 8)


def say_skipped(count: int) -> str:
    """How many corrupt images were skipped, in words."""
    return f"{count:,} corrupt image{' was' if count == 1 else 's were'} skipped"


def _check_space(place: Path, missing: Sequence[_Shard], size: int) -> None:
    needed = shard_bytes(sum(len(shard.samples) for shard in missing), size)
    there = next(path for path in (place.absolute(), *place.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if missing and needed + _ROOM > free:
        raise OSError(
            f"{place} needs {_size(needed)} for {len(missing):,} shards and {_size(_ROOM)} beside them, and "
            f"{_size(free)} are free; free space, choose another disk, a smaller size, or fewer images of each class"
        )


def _size(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


Result = tuple[str, list[int], list[str], bool]
"""The SHA-256 of a shard, the labels in it, the images that were skipped, and whether it was written now."""


def _write_all(shards: Sequence[_Shard], workers: int, report: Callable[[int, int], None]) -> list[Result]:
    report(0, len(shards))
    results: dict[int, Result] = {}
    if workers == 1:
        for number, shard in enumerate(shards):
            results[number] = _write_shard(shard)
            report(len(results), len(shards))
        return [results[number] for number in range(len(shards))]
    # Spawned: torch's threads do not survive a fork.
    with ProcessPoolExecutor(min(workers, len(shards)), get_context("spawn")) as pool:
        left = iter(enumerate(shards))
        running: dict[Future[Result], int] = {}
        try:
            while len(results) < len(shards):
                for number, shard in left:
                    running[pool.submit(_write_shard, shard)] = number
                    if len(running) >= 2 * workers:
                        break
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    results[running.pop(done)] = done.result()
                report(len(results), len(shards))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [results[number] for number in range(len(shards))]


def _write_shard(shard: _Shard) -> Result:
    """Write a shard, unless it is there and whole."""
    if shard.path.exists() and (existing := _read_shard(shard)) is not None:
        return existing
    images, labels, skipped, reasons = [], [], [], []
    for index in range(len(shard.samples)):
        try:
            images.append(decode(shard.samples, index, shard.size, shard.shape))
            labels.append(shard.samples.labels[index])
        except DataError as error:
            skipped.append(os.path.relpath(shard.samples.name(index), shard.root))
            reasons.append(str(error))
    if skipped and not shard.skip:
        more = f" (and {len(reasons) - 1} more of this shard: {', '.join(skipped[1:4])})" if len(reasons) > 1 else ""
        raise DataError(f"{reasons[0]}{more}, or skip such images and have them counted (--skip-corrupt)")
    stacked = np.stack(images) if images else np.empty((0, 3, shard.size, shard.size), np.uint8)
    tensors = {"images": torch.from_numpy(stacked), "labels": torch.tensor(labels, dtype=torch.int64)}
    about = {"version": VERSION, "key": shard.key, "labels": sorted(set(labels)), "skipped": skipped}
    return write_sealed(shard.path, KEY, tensors, about), labels, skipped, True


def _read_shard(shard: _Shard) -> Result | None:
    """What an earlier call wrote; None where it is damaged and must be written again.

    Raises:
        DataError: It is of other images or settings.
    """
    try:
        places, about = locate_sealed(shard.path, KEY)
        if about.get("key") != shard.key:
            raise DataError(
                f"{shard.path} was prepared from other images or with other settings; choose another folder, "
                "or remove it"
            )
        digest = check_seal(shard.path)
    except SealedError:
        return None
    if about["skipped"] and not shard.skip:
        return None  # what was left out before is an error now
    _, shape, first = places["labels"]
    labels = np.memmap(shard.path, "<i8", "r", first, shape).tolist() if shape[0] else []
    return digest, labels, list(about["skipped"]), False


def _finish(
    place: Path, splits: dict[str, Samples], shards: dict[str, list[_Shard]], results: list[Result], size: int,
    shape: str,
) -> Prepared:  # fmt: skip
    """Check that every class is left, and write the list of shards."""
    import PIL

    classes = splits["train"].classes
    content: dict[str, Any] = {
        "torch_dcl_imagenet": VERSION, "size": size, "shape": shape, "classes": list(classes), "splits": {},
        "pillow": PIL.__version__,
    }  # fmt: skip
    left, images, skipped = iter(results), {}, []
    for split, part in shards.items():
        rows: list[dict[str, Any]] = []
        seen: set[int] = set()
        for shard in part:
            digest, labels, gone, _ = next(left)
            rows.append({"file": shard.path.name, "images": len(labels), "sha256": digest})
            seen.update(labels)
            skipped += gone
        if missing := sorted(set(range(len(classes))) - seen):
            few = ", ".join(classes[label] for label in missing[:5])
            raise DataError(f"no image of {len(missing)} classes of {split} can be decoded ({few}); repair some")
        images[split] = sum(row["images"] for row in rows)
        content["splits"][split] = {"images": images[split], "shards": rows}
    content["skipped"] = skipped
    write_text(place / MANIFEST, json.dumps(content, indent=1) + "\n")
    total, written = sum(shard_bytes(count, size) for count in images.values()), sum(result[3] for result in results)
    return Prepared(place, images, sum(map(len, shards.values())), written, tuple(skipped), total)
