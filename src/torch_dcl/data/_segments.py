"""The digits of multi-digit numbers: read, checked, and cropped to their tight boxes."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_dcl.data.mnist import FILES, mnist_excerpt, read_mnist

__all__ = ["INK", "MnistLike", "Segments", "read_digits", "segment", "source"]

INK = 32  # a pixel at least this dark counts for the tight box of a digit

_TENSORS = ("pixels", "height", "width", "first", "count", "original")


@dataclass(frozen=True)
class Segments:
    """The digits of one split, each cropped to its tight box, in the upper left corner.

    Args:
        split: The split they belong to.
        pixels: uint8 `[n, S, S]`, ordered by class; S is the longest side of any box.
        height: Rows of each box, int64 `[n]`.
        width: Columns of each box, int64 `[n]`.
        first: Where each class begins, int64 `[10]`.
        count: How many digits each class has, int64 `[10]`.
        original: The index of each digit in the given images, int64 `[n]`.
    """

    split: str
    pixels: Tensor
    height: Tensor
    width: Tensor
    first: Tensor
    count: Tensor
    original: Tensor

    def to(self, device: torch.device) -> "Segments":
        """The same digits on a device."""
        if self.pixels.device == device:
            return self
        moved: dict[str, Any] = {name: value.to(device) for name, value in vars(self).items() if name in _TENSORS}
        return replace(self, **moved)

    def draw(self, value: Tensor, bits: Tensor) -> Tensor:
        """Choose a digit of class `value` by 32 random bits."""
        return self.first[value] + ((bits * self.count[value]) >> 32)


MnistLike = str | os.PathLike[str] | tuple[Tensor, Tensor] | Segments | None


def source(mnist: MnistLike = None) -> str:
    """Describe the digits that `generate` and `segment` use for `mnist`, in a phrase for a report."""
    if mnist is None:
        return "the embedded excerpt of MNIST (6,000 training and 1,000 test digits)"
    if isinstance(mnist, Segments):
        return f"{len(mnist.pixels):,} {mnist.split} digits, cut out before"
    if isinstance(mnist, str | os.PathLike):
        return f"the idx files in the folder {Path(mnist).resolve().name!r}"
    return f"{len(mnist[0]):,} digits given as tensors"


def segment(mnist: MnistLike, split: str) -> Segments:
    """Read the digits of a split and crop them. Do this once and pass the result on, to generate many sets quickly.

    Digits of the wrong type are a TypeError; of the wrong shape, range or split a ValueError.
    """
    if split not in FILES:
        raise ValueError(f"split must be 'train' or 'test', not {split!r}")
    if isinstance(mnist, Segments):
        if mnist.split != split:
            raise ValueError(f"the given digits were cut out for {mnist.split!r}, not for {split!r}; segment those")
        return mnist
    images, labels = read_digits(mnist, split)
    original = labels.argsort(stable=True)
    images, count = images[original], labels.bincount(minlength=10)
    if int(count.min()) == 0:
        raise ValueError(f"the {split} digits have none of class {int(count.argmin())}; every class needs at least one")
    return _cut(images, count, original, split)


def read_digits(mnist: str | os.PathLike[str] | tuple[Tensor, Tensor] | None, split: str) -> tuple[Tensor, Tensor]:
    """Read and check the digits of a split, uint8 `[n, 28, 28]`, and their labels, int64 `[n]`, without cropping."""
    if mnist is None:
        images, labels = mnist_excerpt(split)
    elif isinstance(mnist, str | os.PathLike):
        images, labels = read_mnist(Path(mnist), split)
    elif isinstance(mnist, tuple) and len(mnist) == 2:
        images, labels = mnist
    else:
        raise TypeError(
            f"mnist must be a folder, a pair (images, labels), Segments or None; it is {type(mnist).__name__}"
        )
    return _checked(images, labels, split)


def _cut(images: Tensor, count: Tensor, original: Tensor, split: str) -> Segments:
    """Move every digit's tight box into the upper left corner and clear everything outside of it."""
    side = images.shape[1]
    place = torch.arange(side)
    boxes = []
    for axis in (2, 1):
        inked = images.amax(axis) >= INK
        low = torch.where(inked, place, side).amin(1)
        boxes.append((low, torch.where(inked, place + 1, 0).amax(1) - low))
    (top, height), (left, width) = boxes
    if int(height.min()) < 0:
        blank = int(original[height.argmin()])
        raise ValueError(
            f"image {blank} of the {split} digits has no pixel of {INK} or more, so no tight box; remove it"
        )
    longest = int(torch.maximum(height, width).max())
    at = torch.arange(longest)
    rows, columns = (top[:, None] + at).clamp_(max=side - 1), (left[:, None] + at).clamp_(max=side - 1)
    pixels = torch.empty(len(images), longest, longest, dtype=torch.uint8)
    for start in range(0, len(images), 4096):
        part = slice(start, start + 4096)
        which = (rows[part] * side)[:, :, None] + columns[part][:, None, :]
        inside = (at < height[part][:, None])[:, :, None] & (at < width[part][:, None])[:, None, :]
        pixels[part] = images[part].flatten(1).gather(1, which.flatten(1)).view_as(inside) * inside
    return Segments(split, pixels, height, width, count.cumsum(0) - count, count, original)


def _checked(images: Tensor, labels: Tensor, split: str) -> tuple[Tensor, Tensor]:
    """Refuse digits of the wrong type, shape or range."""
    if not isinstance(images, Tensor) or not isinstance(labels, Tensor):
        raise TypeError(f"the {split} digits must be two tensors, not {type(images).__name__}, {type(labels).__name__}")
    images, labels = images.cpu(), labels.cpu()
    if images.dtype != torch.uint8:
        raise TypeError(f"the {split} digits must be uint8 images from 0 to 255, they are {images.dtype}")
    if images.ndim != 3 or images.shape[1:] != (28, 28):
        raise ValueError(f"the {split} digits must have shape [n, 28, 28], they have {list(images.shape)}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"the labels of the {split} digits must be integers, they are {labels.dtype}")
    if labels.shape != images.shape[:1]:
        raise ValueError(f"{len(images)} {split} digits need as many labels, there are {list(labels.shape)}")
    if len(labels) == 0:
        raise ValueError(f"there are no {split} digits; every class needs at least one")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high > 9:
        raise ValueError(f"the labels of the {split} digits must be 0 to 9, they go from {low} to {high}")
    return images, labels.long()
