"""Prepared data: a dataset in one safetensors file that knows its own SHA-256.

The tensors are the images (uint8) and labels (int64) of every split. The metadata has, under `torch_dcl_data`, a JSON
text with the version of the format, name, class names, statistics of the training images and source, and the SHA-256
of the whole file with these 64 digits set to zero. So a change of any byte is found. It is one entry, because
safetensors writes several in any order, and the same data shall give the same file.
"""

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import torch

from torch_dcl.data.dataset import DataError, Dataset
from torch_dcl.files import replacing

__all__ = ["read_prepared", "write_prepared"]

VERSION = 1
_KEY = "torch_dcl_data"
_MARK = rb"\"sha256\": \""  # in the header the JSON text is a JSON string
_BLANK = "0" * 64
_MAX_HEADER = 100_000_000  # of any safetensors file, in bytes


def write_prepared(dataset: Dataset, path: str | os.PathLike[str]) -> str:
    """Write a dataset to one file, aside and then renamed.

    Args:
        dataset: What to write.
        path: Where to, for example `"cifar10.safetensors"`. Its folder must exist.

    Returns:
        The SHA-256 that the file carries.

    Raises:
        OSError: The folder is missing or read-only, or the disk is full. Nothing is left behind.
    """
    from safetensors import SafetensorError  # noqa: PLC0415  (import torch_dcl.data loads torch and nothing heavier)
    from safetensors.torch import save_file  # noqa: PLC0415

    mean, std = dataset.statistics
    about = {
        "version": VERSION,
        "name": dataset.name,
        "classes": list(dataset.classes),
        "mean": list(mean),
        "std": list(std),
        "source": dataset.source,
        "sha256": _BLANK,
    }
    tensors = {}
    for split, (images, labels) in dataset.splits.items():
        # Copies where they are views: safetensors writes whole storages only.
        tensors[f"{split}_images"] = images.cpu().contiguous()
        tensors[f"{split}_labels"] = labels.cpu().contiguous()
    metadata = {_KEY: json.dumps(about, sort_keys=True)}
    with replacing(path) as aside:
        try:
            save_file(tensors, aside, metadata)
        except SafetensorError as error:
            raise OSError(f"cannot write {path}: {error}; free space, or choose another path") from error
        found, place = _hash(aside)
        with aside.open("r+b") as file:
            file.seek(place)
            file.write(found.encode())
    return found


def read_prepared(path: str | os.PathLike[str]) -> Dataset:
    """Read what `write_prepared` wrote, after checking every byte.

    Args:
        path: The file.

    Returns:
        The dataset.

    Raises:
        FileNotFoundError: There is no such file.
        DataError: The file is damaged, was altered, or is another kind of file; the message says to remove it.
    """
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; prepare the dataset first")
    found, place = _hash(path)
    with path.open("rb") as file:
        file.seek(place)
        carried = file.read(64).decode("ascii", "replace")
    if found != carried:
        raise DataError(
            f"{path} is damaged or was altered: its SHA-256 is {found}, it carries {carried}; remove {path} and "
            "prepare it again"
        )
    try:
        with safe_open(path, "pt") as file:
            about: dict[str, Any] = json.loads((file.metadata() or {})[_KEY])
            if about.get("version") != VERSION:
                raise DataError(
                    f"{path} has version {about.get('version')!r} of the format, this release reads {VERSION}; "
                    f"remove {path} and prepare it again"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
        parts: list[torch.Tensor] = [tensors.pop(f"{s}_{k}") for s in ("train", "test") for k in ("images", "labels")]
        held = (tensors.pop("validation_images", None), tensors.pop("validation_labels", None))
        train, train_labels, test, test_labels = parts
        dataset = Dataset(
            about["name"], train, train_labels, test, test_labels, tuple(about["classes"]), about["source"], *held
        )
        statistics = tuple(about["mean"]), tuple(about["std"])
    except (SafetensorError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} is not prepared data ({error}); remove it and prepare it again") from error
    # What was counted once need not be counted again.
    vars(dataset)["statistics"] = statistics
    return dataset


def _hash(path: Path) -> tuple[str, int]:
    """The SHA-256 of a prepared file with its own digits set to zero, and where these digits are."""
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX_HEADER + 1
        header = file.read(length) if length <= min(_MAX_HEADER, path.stat().st_size - 8) else b""
        place = header.find(_MARK) + len(_MARK)
        if header.count(_MARK) != 1 or place + 64 > len(header):
            raise DataError(f"{path} is damaged or not prepared data; remove it and prepare it again")
        digest = hashlib.sha256(start + header[:place] + _BLANK.encode() + header[place + 64 :])
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest(), 8 + place
