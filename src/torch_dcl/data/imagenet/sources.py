"""Where the images of a split come from: decoded on the fly, mapped from prepared shards, or kept on the device.

A source gives uint8 images `[B, 3, size, size]` on the device, batch by batch, for lists of indices that the caller
names. So the order is the caller's, and every source gives the same images for the same indices.
"""

import contextlib
import ctypes
import dataclasses
import itertools
import json
import mmap
import os
import warnings
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from torch_dcl.data.dataset import DataError
from torch_dcl.data.draws import draw
from torch_dcl.data.imagenet.ahead import Made, Numbers, Wanted, copied, in_order
from torch_dcl.data.imagenet.decoded import Decoded
from torch_dcl.data.imagenet.prepare import KEY, MANIFEST, VERSION, say_skipped
from torch_dcl.data.imagenet.samples import find_samples
from torch_dcl.files import SealedError, check_seal, locate_sealed, sha256_bytes, sha256_file

__all__ = ["Decoded", "Images", "Mapped", "Resident", "open_images", "synthetic_images"]

READERS = 8  # threads that read shards, at most; each keeps AHEAD batches in memory


class Images(Protocol):
    """The images of one split."""

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names."""

    @property
    def size(self) -> int:
        """Height and width."""

    @property
    def labels(self) -> Tensor:
        """int64 `[N]`, on the CPU."""

    @property
    def about(self) -> str:
        """A description for reports."""

    def content(self) -> str:
        """A SHA-256 that is equal for equal images."""

    def batches(self, wanted: Wanted, device: torch.device, workers: int) -> Generator[Made]:
        """The images of every list of indices, on the device."""


def open_images(
    root: str | Path, split: str, *, size: int = 256, shape: str = "squash", decoder: str = "pillow",
    classes: int = 1000, images: int = 0, skip_corrupt: bool = False,
) -> Images:  # fmt: skip
    """Open the images of one split.

    Args:
        root: A folder of class folders, of tar files or of prepared shards; or `"synthetic"`.
        split: `"train"` or `"val"`.
        size: Height and width that images are resized to. Prepared shards must have it.
        shape: As for `prepare.decode`; prepared shards must have it.
        decoder: `"pillow"` decodes in worker processes, `"gpu"` with nvJPEG, `"auto"` with the second where it is.
        classes: Of synthetic images.
        images: How many synthetic images there are; 0 for two batches of 256 of each split.
        skip_corrupt: Whether images that cannot be decoded on the fly are skipped and named; by default they are an
            error. In training the next image that can be decoded takes the place of one, in validation none does.

    Raises:
        FileNotFoundError: There is no such folder or split.
        DataError: It holds something else.
    """
    if split not in ("train", "val"):
        raise ValueError(f"split must be 'train' or 'val', not {split!r}")
    if str(root) == "synthetic":
        return synthetic_images(split, classes, size, images or 512)
    place = Path(root).expanduser()
    if (place / MANIFEST).is_file():
        return Mapped(place, split, size, shape)
    if any(place.glob("train-*.safetensors")):
        raise DataError(f"{place} holds shards without {MANIFEST}: run `dcl data prepare` again to complete them")
    corrupt = ("replace" if split == "train" else "omit") if skip_corrupt else "refuse"
    return Decoded(place, find_samples(place, split), size, shape, decoder, corrupt)


# Prepared shards


class Mapped:
    """Prepared shards, mapped into memory: the system reads pages on demand, and caches as many as fit."""

    def __init__(self, folder: Path, split: str, size: int | None = None, shape: str | None = None):
        self.folder, listed = folder, read_manifest(folder)
        self.size, self.classes = int(listed["size"]), tuple(listed["classes"])
        for name, given, option in (("size", size, "resize"), ("shape", shape, "shape")):
            if given is not None and listed[name] != given:
                raise DataError(
                    f"{folder} was prepared with {name} {listed[name]}, {given} is asked for; ask for the same "
                    f"(--set {option}={listed[name]}), or prepare it again in another folder"
                )
        self.shards = listed["splits"][split]["shards"]
        paths = [folder / shard["file"] for shard in self.shards]
        self.counts = [int(shard["images"]) for shard in self.shards]
        found = [_open_shard(path, count, self.size) for path, count in zip(paths, self.counts, strict=True)]
        self.labels = torch.cat([labels for _, labels in found])
        low, high = (int(extreme) for extreme in torch.aminmax(self.labels))
        if low < 0 or high >= len(self.classes):
            raise DataError(
                f"{folder} has labels from {low} to {high} for {len(self.classes)} classes; prepare it again"
            )
        mapped, starts = _map_together(paths)
        length = 3 * self.size**2
        self.places = torch.cat([  # the first byte of every image
            torch.arange(count) * length + start + place
            for start, (place, _), count in zip(starts, found, self.counts, strict=True)
        ])  # fmt: skip
        # An image is a window of these bytes; windows overlap, since a file's images may begin at any byte.
        self.windows = mapped.as_strided((max(0, len(mapped) - length + 1), length), (1, 1))
        self.about = (
            f"{len(self.labels):,} images, {len(self.classes):,} classes, {len(self.shards):,} "
            f"shard{'' if len(self.shards) == 1 else 's'} in {folder}"
            + (f"; {say_skipped(len(listed['skipped']))}" if listed["skipped"] else "")
        )

    def content(self) -> str:
        """The SHA-256 of the list of shards, which has theirs."""
        return sha256_file(self.folder / MANIFEST)

    def check(self, rank: int = 0, world: int = 1, threads: int = 4) -> None:
        """Hash this rank's share of the shards.

        Raises:
            DataError: A shard changed since it was written; the message names it.
        """

        def one(shard: dict[str, Any]) -> None:
            path = self.folder / shard["file"]
            try:
                digest = check_seal(path)
            except SealedError as error:
                raise DataError(f"{error}; remove it and run `dcl data prepare` again") from error
            if digest != shard["sha256"]:
                raise DataError(
                    f"{path} is not the file that {MANIFEST} lists: its SHA-256 is {digest}, not {shard['sha256']}; "
                    "remove it and run `dcl data prepare` again"
                )

        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(one, self.shards[rank::world]):
                pass

    def batches(self, wanted: Wanted, device: torch.device, workers: int) -> Generator[Made]:
        """The images of every list of indices, on the device."""
        is_cuda = device.type == "cuda"

        # A reader that waits for Python's lock delays the training loop. So it copies all images of a batch in one
        # call, which does not need the lock, and no Python object is made for an image.
        def find(indices: Numbers) -> tuple[Made, Tensor]:
            images = torch.empty(len(indices), 3, self.size, self.size, dtype=torch.uint8, pin_memory=is_cuda)
            return Made(images, indices), self.places.index_select(0, torch.as_tensor(indices, dtype=torch.int64))

        def read(located: tuple[Made, Tensor]) -> Made:
            batch, places = located
            torch.index_select(self.windows, 0, places, out=batch.images.flatten(1))
            return batch

        with contextlib.closing(in_order(read, map(find, wanted), min(workers, READERS))) as batches:
            yield from copied(batches, device) if is_cuda else batches

    def resident(self, device: torch.device) -> "Resident":
        """All images on the device.

        Raises:
            DataError: They do not fit.
        """
        needed = len(self.labels) * 3 * self.size**2
        if device.type == "cuda" and needed > (free := torch.cuda.mem_get_info(device)[0]) * 0.9:
            raise DataError(
                f"{self.folder} has {needed / 2**30:,.1f} GiB of images and the GPU has {free / 2**30:,.1f} GiB free; "
                "leave them on the disk, or prepare fewer or smaller ones"
            )
        images = torch.empty(len(self.labels), 3, self.size, self.size, dtype=torch.uint8, device=device)
        for start, count in zip(itertools.accumulate(self.counts, initial=0), self.counts, strict=False):
            if count:
                first, length = int(self.places[start]), self.windows.shape[1]
                part = self.windows[first : first + count * length : length]
                images[start : start + count].copy_(part.view(-1, 3, self.size, self.size))
        return Resident(images, self.labels, self.classes, f"{self.about}, kept on {device}", self.content())


def read_manifest(folder: Path) -> dict[str, Any]:
    """The list of shards of a folder.

    Raises:
        DataError: It is damaged, or of another version.
    """
    file = folder / MANIFEST
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))
        if listed["torch_dcl_imagenet"] != VERSION:
            raise DataError(f"{file} is of version {listed['torch_dcl_imagenet']}, this release reads {VERSION}")
        names = [shard["file"] for part in listed["splits"].values() for shard in part["shards"]]
        sizes = [int(listed["size"]), *(int(s["images"]) for part in listed["splits"].values() for s in part["shards"])]
        sound = all(os.path.basename(name) == name for name in names) and min(sizes) >= 0  # noqa: PTH119
        sound = sound and set(listed["splits"]) == {"train", "val"} and isinstance(listed["skipped"], list)
        if not sound or not all(isinstance(name, str) for name in listed["classes"]):
            raise ValueError("its values make no sense")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{file} is damaged ({error}); remove it and run `dcl data prepare` again") from error
    return dict(listed)


def _open_shard(path: Path, count: int, size: int) -> tuple[int, Tensor]:
    """The offset of the images in a shard, and the labels."""
    try:
        places, _ = locate_sealed(path, KEY)
    except (FileNotFoundError, SealedError) as error:
        raise DataError(f"{error}; run `dcl data prepare` again") from error
    kinds = {name: place[:2] for name, place in places.items()}
    if kinds != {"images": ("U8", (count, 3, size, size)), "labels": ("I64", (count,))}:
        raise DataError(f"{path} has other tensors than {MANIFEST} lists; remove it and run `dcl data prepare` again")
    first, labels = places["images"][2], np.fromfile(path, "<i8", count, offset=places["labels"][2])
    if len(labels) < count or path.stat().st_size < first + count * 3 * size**2:
        raise DataError(f"{path} is truncated; remove it and run `dcl data prepare` again")
    return first, torch.from_numpy(labels)


_MAP_FIXED = 0x10  # which Python's mmap does not name


def _map_together(paths: Sequence[Path]) -> tuple[Tensor, list[int]]:
    """Map files into one range of addresses, each from the start of a page. None of them stays open.

    Returns:
        The bytes of the range, uint8, and where each file begins. Bytes behind the end of a file must not be read.
    """
    page = mmap.ALLOCATIONGRANULARITY
    sizes = [path.stat().st_size for path in paths]
    starts = list(itertools.accumulate((-(-size // page) * page for size in sizes), initial=0))
    kept = mmap.mmap(-1, max(1, starts.pop()), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
    bytes_of_range = np.frombuffer(kept, np.uint8)
    map_file = ctypes.CDLL(None, use_errno=True).mmap
    map_file.restype = ctypes.c_void_p
    map_file.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    for path, start, size in zip(paths, starts, sizes, strict=True):
        address, flags = bytes_of_range.ctypes.data + start, mmap.MAP_SHARED | _MAP_FIXED
        with path.open("rb") as file:
            if map_file(address, size, mmap.PROT_READ, flags, file.fileno(), 0) != address:
                raise DataError(f"{path} cannot be mapped into memory: {os.strerror(ctypes.get_errno())}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writ", UserWarning)
        return torch.from_numpy(bytes_of_range), starts  # which is only read


# On the device


@dataclasses.dataclass(frozen=True)
class Resident:
    """Images that are kept on a device as a tensor, for which no loader is needed."""

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    about: str
    hash: str

    @property
    def size(self) -> int:
        """Height and width."""
        return int(self.images.shape[-1])

    def content(self) -> str:
        """The SHA-256 of what they were made of."""
        return self.hash

    def batches(self, wanted: Wanted, device: torch.device, workers: int) -> Generator[Made]:
        """The images of every list of indices, on the device."""
        del workers
        images = self.images.to(device)
        for indices in wanted:
            there = torch.as_tensor(indices, dtype=torch.int64).to(device, non_blocking=True)
            yield Made(images.index_select(0, there), indices)


def synthetic_images(split: str, classes: int, size: int, count: int) -> Resident:
    """Random images whose colour tells the class, the same on every machine; they are kept in memory."""
    index = torch.arange(count)
    labels = index % classes
    colours = draw(0, "synthetic colour", 0, torch.arange(3 * classes)).view(classes, 3) & 127
    side = -(-size // 4)  # of noise in blocks of 4 × 4 pixels
    noise = draw(0, f"synthetic {split}", 0, torch.arange(count * 3 * side * side)).view(count, 3, side, side) & 63
    noise = noise.to(torch.uint8).repeat_interleave(4, 2).repeat_interleave(4, 3)[:, :, :size, :size]
    images = colours.to(torch.uint8)[labels][:, :, None, None] + noise
    about = f"{count:,} synthetic images, {classes:,} classes"
    return Resident(
        images, labels, tuple(map(str, range(classes))), about, sha256_bytes(about.encode(), split.encode())
    )
