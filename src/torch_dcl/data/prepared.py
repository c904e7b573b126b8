"""Prepared data: a dataset in one safetensors file that carries its own SHA-256.

The tensors are the images (uint8) and labels (int64) of every split. The metadata has, under `torch_dcl_data`, a JSON
text with the version of the format, name, class names, statistics of the training images and source. The file is
sealed (`torch_dcl.files.write_sealed`): a change of any byte is detected.
"""

import os
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from torch_dcl.data.dataset import DataError, Dataset
from torch_dcl.files import SealedError, read_sealed, write_sealed

__all__ = ["read_prepared", "write_prepared"]

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

    Args:
        path: The file.

    Returns:
        The dataset.

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
        _check(tensors, about)
        train, train_labels, test, test_labels = (tensors[name] for name in _REQUIRED)
        held = (tensors.get("validation_images"), tensors.get("validation_labels"))
        classes = tuple(about["classes"])
        dataset = Dataset(about["name"], train, train_labels, test, test_labels, classes, about["source"], *held)
        statistics = tuple(about["mean"]), tuple(about["std"])
        if {len(values) for values in statistics} != {dataset.shape[0]}:
            raise DataError(f"mean and std must have {dataset.shape[0]} numbers each")  # noqa: TRY301
    except DataError as error:
        raise DataError(f"{path} is not prepared data ({error}); remove it and prepare it again") from error
    # Cached: no need to compute them again.
    vars(dataset)["statistics"] = statistics
    return dataset


def _check(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
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
