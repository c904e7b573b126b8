"""MNIST: where its idx files are, how a split is read, and the excerpt inside the package.

The excerpt lets a first run do without a download: 600 training and 100 test digits of each class, drawn from the
training and the test set by a fixed rule (`tools/make_mnist_excerpt.py`), in mixed order, pixels unchanged. It is large
enough to see a network learn and too small to report an error rate from: for that, use the whole set.

MNIST is by Yann LeCun, Corinna Cortes and Christopher J. C. Burges. The excerpt is licensed under CC BY-SA 3.0.
"""

import io
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torch_dcl.data.formats import read_idx
from torch_dcl.files import sha256_bytes

__all__ = ["FILES", "RAW", "find_mnist", "mnist_excerpt", "read_mnist"]

FILES = {
    split: (f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte")
    for split, prefix in (("train", "train"), ("test", "t10k"))
}
"""The idx files of each split, images and labels; each may be gzipped, with the suffix `.gz`."""
RAW = Path("MNIST", "raw")
"""The folder that downloads go to, as torchvision has it."""
_FOLDERS = (RAW, Path("mnist"), Path())

_FILE = Path(__file__).with_name("mnist_excerpt.npz")
_SHA256 = "114f639aa2ad9fa856bbe7513c8983a31d2634d83b57a6becbe538c5979d60e6"


def find_mnist(place: Path) -> Path | None:
    """The folder with an idx file of MNIST: `MNIST/raw`, `mnist`, or the place itself; None where none has one."""
    files = [file for pair in FILES.values() for file in pair]
    folders = (place / folder for folder in _FOLDERS)
    return next((folder for folder in folders if any(_packed_or_not(folder, file) for file in files)), None)


def read_mnist(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Read one split of MNIST from a folder with its idx files: images, uint8 `[N, H, W]`, and labels, int64 `[N]`."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; give the folder with the idx files of MNIST")
    missing = [file for file in FILES[split] if _packed_or_not(folder, file) is None]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)} (or the same with .gz); put them there")
    images, labels = (_packed_or_not(folder, file) or folder / file for file in FILES[split])
    return torch.from_numpy(read_idx(images, 3)), torch.from_numpy(read_idx(labels, 1)).long()


def _packed_or_not(folder: Path, file: str) -> Path | None:
    return next((path for path in (folder / file, folder / f"{file}.gz") if path.is_file()), None)


def mnist_excerpt(split: str) -> tuple[Tensor, Tensor]:
    """Load the embedded digits: 6,000 to train on or 1,000 to test with, equally many of each class.

    Returns:
        Images, uint8 `[N, 28, 28]` with 0 for paper and 255 for full ink, and labels, int64 `[N]` from 0 to 9. Both are
        new tensors at every call.

    Raises:
        ValueError: There is no such split, or the embedded file is not the one that was shipped.
        FileNotFoundError: The embedded file is missing from the installation.
    """
    if split not in FILES:
        raise ValueError(f"split must be 'train' or 'test', not {split!r}")
    try:
        content = _FILE.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"{_FILE} is missing: install torch-dcl again") from None
    found = sha256_bytes(content)
    if found != _SHA256:
        raise ValueError(
            f"{_FILE} is damaged or was altered: its SHA-256 is {found}, expected {_SHA256}; install torch-dcl again"
        )
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
    return torch.from_numpy(images), torch.from_numpy(labels).long()
