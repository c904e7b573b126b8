"""CIFAR-10 and CIFAR-100: the official binary files, their archive, or arrays. No pickle is read."""

import dataclasses
from pathlib import Path

import numpy as np
import torch

from torch_dcl.data.dataset import Dataset
from torch_dcl.data.download import read_members
from torch_dcl.data.folder import has_arrays, read_arrays
from torch_dcl.data.formats import read_bytes, read_cifar

__all__ = ["ADDRESS", "CIFAR", "read_cifar_set"]

_CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR100_CLASSES = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl",
    "boy", "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair",
    "chimpanzee", "clock", "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin",
    "elephant", "flatfish", "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp",
    "lawn_mower", "leopard", "lion", "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain",
    "mouse", "mushroom", "oak_tree", "orange", "orchid", "otter", "palm_tree", "pear", "pickup_truck",
    "pine_tree", "plain", "plate", "poppy", "porcupine", "possum", "rabbit", "raccoon", "ray", "road", "rocket",
    "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper", "snail", "snake", "spider", "squirrel",
    "streetcar", "sunflower", "sweet_pepper", "table", "tank", "telephone", "television", "tiger", "tractor",
    "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf", "woman", "worm",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Cifar:
    """The official binary archive of a CIFAR set; `records` are the images of a training and of a test file.

    A record starts with some bytes of labels, of which the last is used.
    """

    title: str
    folder: str
    archive: str
    md5: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    classes: tuple[str, ...]
    label_bytes: int
    records: tuple[int, int]

    @property
    def members(self) -> dict[str, int]:
        """The files to read from the archive, with their sizes."""
        each = self.label_bytes + 3072
        wanted = {f"{self.folder}/{name}": self.records[0] * each for name in self.train}
        return wanted | {f"{self.folder}/{name}": self.records[1] * each for name in self.test}


CIFAR = {
    "cifar10": Cifar(
        "CIFAR-10",
        "cifar-10-batches-bin",
        "cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d87530",
        tuple(f"data_batch_{part}.bin" for part in range(1, 6)),
        ("test_batch.bin",),
        _CIFAR10_CLASSES,
        1,
        (10_000, 10_000),
    ),
    "cifar100": Cifar(
        "CIFAR-100",
        "cifar-100-binary",
        "cifar-100-binary.tar.gz",
        "03b5dce01913d631647c71ecec9e9cb8",
        ("train.bin",),
        ("test.bin",),
        _CIFAR100_CLASSES,
        2,
        (50_000, 10_000),
    ),
}
_MAX_BYTES = 2**30  # of all files together; CIFAR-10's have 184 million
ADDRESS = "https://www.cs.toronto.edu/~kriz/"


def read_cifar_set(name: str, place: Path) -> Dataset | None:
    """Read a CIFAR set: the official binary files, the official archive, or arrays; None where it is not there."""
    form = CIFAR[name]
    files = (*form.train, *form.test)
    for folder in (place / form.folder, place / name, place):
        missing = [file for file in files if not (folder / file).is_file()]
        if len(missing) < len(files):
            if missing:
                raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}; put them there, or unpack them again")
            contents = {file: read_bytes(folder / file, _MAX_BYTES // len(files)) for file in files}
            return _from_records(name, contents, folder)
        archive = folder / form.archive
        if archive.is_file():
            found = read_members(archive, form.members)
            contents = {file: found[f"{form.folder}/{file}"] for file in files}
            return _from_records(name, contents, archive)
        if has_arrays(folder):
            opened = read_arrays(folder, name, form.classes)
            source = opened.source.replace("arrays", f"{form.title}", 1) + " as arrays"
            return dataclasses.replace(opened, source=source)
    return None


def _from_records(name: str, contents: dict[str, bytes], origin: Path) -> Dataset:
    form = CIFAR[name]
    tensors = []
    for files in (form.train, form.test):
        parts = [read_cifar(str(origin / file), contents[file], form.label_bytes, len(form.classes)) for file in files]
        tensors.append(torch.from_numpy(np.concatenate([images for images, _ in parts])))
        tensors.append(torch.from_numpy(np.concatenate([labels for _, labels in parts])).long())
    train, train_labels, test, test_labels = tensors
    source = f"{form.title}, {len(train):,} + {len(test):,}, from {origin}"
    return Dataset(name, train, train_labels, test, test_labels, form.classes, source)
