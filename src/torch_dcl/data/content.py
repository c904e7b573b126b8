"""Known content: the SHA-256 of MNIST, CIFAR-10 and CIFAR-100, which identifies a complete copy.

Every image is hashed with its label. The hash of the sorted hashes identifies a split whatever its order; the hash of
the hashes in the order of the files identifies the order too. A copy with the right number of images and another hash
is damaged.
"""

import dataclasses
import hashlib

import torch
from torch import Tensor

from torch_dcl.data.dataset import DataError, Dataset
from torch_dcl.files import sha256_bytes

__all__ = ["KNOWN", "content_hash", "examine", "ordered_hash"]

_CHUNK = 4096


@dataclasses.dataclass(frozen=True)
class Known:
    """Counts and hashes of a set, train and test.

    Args:
        title: Its usual name.
        counts: Number of images.
        content: Hashes that do not depend on the order.
        order: Hashes in the order of the original files, where these were available.
    """

    title: str
    counts: tuple[int, int]
    content: tuple[str, str]
    order: tuple[str, str] | None


KNOWN = {
    "mnist": Known(
        "MNIST",
        (60_000, 10_000),
        (
            "4e35f5e69bd16b1a92409f186af4625c081c64b4c17acfa161b296088786cf51",
            "15f179fc8064b3885ce612239b7bc451486775946a7c64c70562b061ff716383",
        ),
        (
            "1be66601a65f455ac9bf1812772f9643f822adba0af3ff63651448e8535e8399",
            "020a316a55e4a5c571afffc18a9dac5c069bdb40c5fd2b9449e4727409505e4f",
        ),
    ),
    "cifar10": Known(
        "CIFAR-10",
        (50_000, 10_000),
        (
            "464110d38d180886da2fbfd74b60e8311bf0055b69563716abbbf3627d3fac80",
            "f01877e81dae1f55f260d1d23c98e51b5128033a34a0a92b88a125f256bb7851",
        ),
        (
            "a5d7223f53ff3ca861f5e2e1d881399e48d9a34a38003fa9ebf64b6ba1fe80aa",
            "02524cf3d186570506fe0bc97ca2c19d8873bd47c7d6dfc4add5ef6bf5c761e2",
        ),
    ),
    "cifar100": Known(
        "CIFAR-100",
        (50_000, 10_000),
        (
            "778c4f3ac479801d3de95fb630041ebccaf4f71f8188eac3452f574a56a837d0",
            "1072eb731d00e5beb7d6feab3b4d44dbed02b77a78f39f47b3c37613ff3b5c58",
        ),
        None,
    ),
}


def content_hash(images: Tensor, labels: Tensor) -> str:
    """Hash images with their labels, independent of their order.

    Args:
        images: uint8 `[N, C, H, W]`.
        labels: int64 `[N]`, each from 0 to 65,535.

    Returns:
        The SHA-256 of the sorted SHA-256 of each label (two bytes, the lower first) and image.
    """
    return sha256_bytes(*sorted(_digests(images, labels)))


def ordered_hash(images: Tensor, labels: Tensor) -> str:
    """Hash images with their labels in their order.

    Args:
        images: uint8 `[N, C, H, W]`.
        labels: int64 `[N]`, each from 0 to 65,535.

    Returns:
        The SHA-256 of the SHA-256 of each label (two bytes, the lower first) and image, in order.
    """
    return sha256_bytes(*_digests(images, labels))


def examine(dataset: Dataset) -> str:
    """Compare the content of a named set with the known one.

    Args:
        dataset: The set; its name says which known set it is compared with.

    Returns:
        `"known content"`, with a note where the order is not the original one, or `"unknown content: …"` with the
        reason.

    Raises:
        DataError: It has as many images as the known set, so it claims to be that set, and its hash differs.
    """
    known = KNOWN.get(dataset.name)
    if known is None:
        return "unknown content: no hash is on record"
    counts = (len(dataset.train_labels), len(dataset.test_labels))
    if counts != known.counts:
        return (
            f"unknown content: {counts[0]:,} + {counts[1]:,} images, and {known.title} has "
            f"{known.counts[0]:,} + {known.counts[1]:,}"
        )
    in_order = True
    for position, split in enumerate(("train", "test")):
        digests = list(_digests(*dataset.splits[split]))
        found = sha256_bytes(*sorted(digests))
        if found != known.content[position]:
            raise DataError(
                f"{dataset.source}: the {split} split is damaged or not {known.title}: the SHA-256 of its content is "
                f"{found}, expected {known.content[position]}; fetch the files again, or load another set of this "
                "form as arrays:PATH"
            )
        in_order &= known.order is None or sha256_bytes(*digests) == known.order[position]
    return "known content" if in_order else "known content in another order"


def _digests(images: Tensor, labels: Tensor) -> list[bytes]:
    """The SHA-256 of every label and image."""
    found = []
    for start in range(0, len(images), _CHUNK):
        some, these = images[start : start + _CHUNK], labels[start : start + _CHUNK, None]
        rows = torch.cat([(these % 256).byte(), (these // 256).byte(), some.reshape(len(some), -1)], 1).cpu()
        content, width = rows.numpy().tobytes(), rows.shape[1]
        found += [hashlib.sha256(content[at : at + width]).digest() for at in range(0, len(content), width)]
    return found
