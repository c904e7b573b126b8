"""A dataset: checked images and labels for training and testing, with a description of their source; and its file.

Prepared data is a dataset in one safetensors file that carries its own SHA-256. The tensors are the images (uint8) and
labels (int64) of every split. The metadata has, under `torch_dcl_data`, a JSON text with the version of the format,
name, class names, statistics of the training images and source. The file is sealed (`torch_dcl.files.write_sealed`): a
change of any byte is detected.
"""

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torch_dcl.files import SealedError, read_sealed, write_sealed

__all__ = ["DataError", "Dataset", "read_prepared", "write_prepared"]

_CHUNK = 4096  # images at a time, so that memory-mapped data is not read at once


class DataError(ValueError):
    """A file that is damaged or has another format, or data that cannot be used."""


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Images and labels for training, testing and possibly validation.

    Images are uint8, channels first: `[N, C, H, W]`, with the same C, H and W in all splits. They may be a view of a
    memory-mapped file, in which case they need not be contiguous. Labels are int64 `[N]`, from 0.

    Args:
        name: Its name, for example `"cifar10"`.
        train_images: Images to train on.
        train_labels: Their labels.
        test_images: Images to report an error from.
        test_labels: Their labels.
        classes: The name of every class, in the order of the labels.
        source: A description for reports: name, counts, place, and whether the content is known.
        validation_images: Images to choose settings with, where the source reserves some.
        validation_labels: Their labels.

    Raises:
        DataError: Types, shapes, counts or labels do not match.
    """

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: tuple[str, ...]
    source: str
    validation_images: Tensor | None = None
    validation_labels: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.validation_images is None) != (self.validation_labels is None):
            raise DataError(f"{self.name}: validation needs both images and labels, one of them is missing")
        if not self.classes or len(set(self.classes)) != len(self.classes):
            raise DataError(f"{self.name}: class names must be unique and at least one, got {self.classes!r}")
        shape = self.train_images.shape[1:]
        for split, (images, labels) in self.splits.items():
            _check(f"{self.name}, {split} split", images, labels, len(self.classes))
            if images.shape[1:] != shape:
                raise DataError(
                    f"{self.name}: images of the {split} split have shape {tuple(images.shape[1:])}, "
                    f"those of the train split {tuple(shape)}; they must agree"
                )

    @property
    def splits(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Images and labels by split: train, validation if there is one, test."""
        found = {"train": (self.train_images, self.train_labels)}
        if self.validation_images is not None and self.validation_labels is not None:
            found["validation"] = (self.validation_images, self.validation_labels)
        found["test"] = (self.test_images, self.test_labels)
        return found

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        channels, height, width = self.train_images.shape[1:]
        return channels, height, width

    @functools.cached_property
    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel over the training images, in units of 255.

        They are computed from counts of levels, not summed in floating point, so they are the same on every machine.
        """
        means, deviations = [], []
        levels = torch.arange(256, dtype=torch.float64)
        for channel in range(self.train_images.shape[1]):
            counts = torch.zeros(256, dtype=torch.int64)
            for start in range(0, len(self.train_images), _CHUNK):
                part = self.train_images[start : start + _CHUNK, channel]
                counts += part.reshape(-1).bincount(minlength=256).cpu()
            total = counts.sum().item()
            mean = (counts * levels).sum().item() / total
            variance = (counts * (levels - mean) ** 2).sum().item() / total
            means.append(mean / 255)
            deviations.append(variance**0.5 / 255)
        return tuple(means), tuple(deviations)

    def __str__(self) -> str:
        channels, height, width = self.shape
        return f"{self.source}; {len(self.classes)} classes, {channels} × {height} × {width}"


def _check(what: str, images: Tensor, labels: Tensor, classes: int) -> None:
    """Refuse a split whose images or labels cannot be used."""
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise DataError(
            f"{what}: images must be uint8 [N, C, H, W], not {images.dtype} {list(images.shape)}; convert them first"
        )
    if labels.dtype != torch.int64 or labels.ndim != 1:
        raise DataError(
            f"{what}: labels must be int64 [N], not {labels.dtype} {list(labels.shape)}; convert them first"
        )
    if len(images) != len(labels):
        raise DataError(f"{what}: {len(images):,} images but {len(labels):,} labels; the files do not belong together")
    if images.numel() == 0:
        raise DataError(f"{what} is empty, shape {list(images.shape)}; at least one image is needed")
    low, high = (int(extreme) for extreme in torch.aminmax(labels))
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        raise DataError(f"{what}: label {wrong} is out of range, there are {classes} classes (0 to {classes - 1})")


# Prepared files

VERSION = 1
_KEY = "torch_dcl_data"
_REQUIRED = ("train_images", "train_labels", "test_images", "test_labels")


def write_prepared(dataset: Dataset, path: str | os.PathLike[str]) -> str:
    """Write a dataset to one file, atomically.

    Args:
        dataset: The dataset.
        path: The file, for example `"cifar10.safetensors"`. Its folder must exist.

    Returns:
        The SHA-256 that the file carries.

    Raises:
        OSError: The folder is missing or read-only, or the disk is full. Nothing is left behind.
    """
    mean, std = dataset.statistics
    about = {
        "version": VERSION,
        "name": dataset.name,
        "classes": list(dataset.classes),
        "mean": list(mean),
        "std": list(std),
        "source": dataset.source,
    }
    tensors = {}
    for split, (images, labels) in dataset.splits.items():
        tensors[f"{split}_images"], tensors[f"{split}_labels"] = images, labels
    return write_sealed(path, _KEY, tensors, about)


def read_prepared(path: str | os.PathLike[str]) -> Dataset:
    """Read a file of `write_prepared`, after checking every byte.

    Raises:
        FileNotFoundError: There is no such file.
        DataError: The file is damaged, was altered, or is another kind of file; the message says to remove it.
    """
    try:
        tensors, about = read_sealed(path, _KEY)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; prepare the dataset first") from None
    except SealedError as error:
        raise DataError(f"{error}; remove {path} and prepare it again") from error
    if about.get("version") != VERSION:
        raise DataError(
            f"{path} has version {about.get('version')!r} of the format, this release reads {VERSION}; "
            f"remove {path} and prepare it again"
        )
    try:
        _check_description(tensors, about)
        train, train_labels, test, test_labels = (tensors[name] for name in _REQUIRED)
        held = (tensors.get("validation_images"), tensors.get("validation_labels"))
        classes = tuple(about["classes"])
        dataset = Dataset(about["name"], train, train_labels, test, test_labels, classes, about["source"], *held)
        statistics = tuple(about["mean"]), tuple(about["std"])
        if {len(values) for values in statistics} != {dataset.shape[0]}:
            raise DataError(f"mean and std must have {dataset.shape[0]} numbers each")
    except DataError as error:
        raise DataError(f"{path} is not prepared data ({error}); remove it and prepare it again") from error
    # Cached: no need to compute them again.
    vars(dataset)["statistics"] = statistics
    return dataset


def _check_description(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Refuse a description of the wrong types: a seal says that the file is whole, not that it makes sense."""
    missing = [name for name in _REQUIRED if name not in tensors]
    if missing:
        raise DataError(f"it lacks {', '.join(missing)}")
    for key in ("name", "source"):
        if not isinstance(about.get(key), str):
            raise DataError(f"{key} must be a text, not {about.get(key)!r:.80}")
    for key, kind, what in (("classes", str, "texts"), ("mean", float, "numbers"), ("std", float, "numbers")):
        values = about.get(key)
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise DataError(f"{key} must be a list of {what}, not {values!r:.80}")
