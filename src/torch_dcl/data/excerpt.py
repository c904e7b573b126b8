"""The embedded digits: a balanced excerpt of MNIST, so that a first run needs no download.

600 training and 100 test digits of each class, drawn from the training and the test set of MNIST by a fixed rule
(`tools/make_mnist_excerpt.py`), in mixed order, pixels unchanged. The excerpt is large enough to see a network learn
and too small to report an error rate from: for that, use the whole set.

MNIST is by Yann LeCun, Corinna Cortes and Christopher J. C. Burges. The excerpt is licensed under CC BY-SA 3.0.
"""

import io
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torch_dcl.files import sha256_bytes

__all__ = ["mnist_excerpt"]

_FILE = Path(__file__).with_name("mnist_excerpt.npz")
_SHA256 = "114f639aa2ad9fa856bbe7513c8983a31d2634d83b57a6becbe538c5979d60e6"
_SPLITS = ("train", "test")


def mnist_excerpt(split: str) -> tuple[Tensor, Tensor]:
    """Load the embedded digits.

    Args:
        split: `"train"` for 6,000 digits or `"test"` for 1,000, equally many of each class.

    Returns:
        Images, uint8 `[N, 28, 28]` with 0 for paper and 255 for full ink, and labels, int64 `[N]` from 0 to 9. Both are
        new tensors at every call.

    Raises:
        ValueError: There is no such split, or the embedded file is not the one that was shipped.
        FileNotFoundError: The embedded file is missing from the installation.
    """
    if split not in _SPLITS:
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
