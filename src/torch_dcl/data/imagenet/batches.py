"""Batches of images of ILSVRC2012's size: any source, a share for every rank; crops and flips on the device.

As in Caffe's AlexNet, every image is resized to 256 × 256 without keeping its aspect ratio. Training uses random 227 ×
227 crops and flips; testing uses the centre crop. The order of an epoch, crops and flips are hashes of (seed, epoch,
index), as in `Batches`, and do not depend on the source or on the number of ranks.
"""

import contextlib
import dataclasses
from collections.abc import Generator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from torch_dcl.data.batches import pixels_at
from torch_dcl.data.draws import below, draw, whole_number
from torch_dcl.data.imagenet.sources import Decoded, Images, open_images

__all__ = ["CAFFE_MEAN", "ImageNetBatches", "Piece", "share"]

# The channel means of Caffe's mean image of ILSVRC2012, red, green, blue, from 0 to 255.
CAFFE_MEAN = (122.67891434, 116.66876762, 104.00698793)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A rank's share of a batch."""

    images: Tensor
    """float32 `[B, 3, crop, crop]` on the device."""
    labels: Tensor
    """int64 `[B]` on the device."""
    index: Tensor
    """The numbers of the images in the split, int64 `[B]` on the device."""
    corrupt: tuple[str, ...] = ()
    """The names of images that were skipped."""


def share(count: int, rank: int, world: int, unit: int = 1) -> range:
    """The places of a batch that a rank takes: contiguous, in whole units, every place once.

    Args:
        count: Images in the batch.
        rank: Which rank.
        world: Of how many.
        unit: Places that stay together.
    """
    units = -(-count // unit)
    return range(units * rank // world * unit, min(units * (rank + 1) // world * unit, count))


class ImageNetBatches:
    """Batches of one split of a large set of images.

    Args:
        root: A folder for `open_images`, or what that returned.
        split: `"train"` to shuffle and augment, `"val"` for evaluation in order.
        batch: Images in a batch, of all ranks together. The last batch of a training epoch is dropped when it is not
            full.
        seed: The seed of order, crops and flips.
        resize: Height and width that every image is resized to, by antialiased bilinear interpolation.
        crop: Height and width of the inputs.
        mean: The mean to subtract, from 0 to 255: one number for each channel, or a mean image `[3, resize, resize]`,
            of which each crop subtracts its own part.
        std: What to divide each channel by after that.
        device: The device of crops and batches.
        workers: Number of worker processes or threads; 0 decodes in this process.
        rank: Which share of every batch to give.
        world: Of how many.
        unit: Neighbours in a batch that stay on one rank.

    Raises:
        FileNotFoundError: The folder is missing.
        DataError: A class folder is missing or empty.
        ValueError: A setting is out of range.
        TypeError: A setting that must be a whole number is not.
    """

    def __init__(
        self,
        root: str | Path | Images,
        split: str,
        batch: int,
        seed: int = 0,
        *,
        resize: int = 256,
        crop: int = 227,
        mean: Sequence[float] | Tensor = CAFFE_MEAN,
        std: Sequence[float] = (1.0, 1.0, 1.0),
        device: torch.device | str = "cpu",
        workers: int = 4,
        rank: int = 0,
        world: int = 1,
        unit: int = 1,
    ):
        if split not in ("train", "val"):
            raise ValueError(f"split must be 'train' or 'val', not {split!r}")
        for name, given, least in (
            ("seed", seed, None), ("batch", batch, 1), ("workers", workers, 0), ("crop", crop, 1), ("world", world, 1),
            ("rank", rank, 0), ("unit", unit, 1),
        ):  # fmt: skip
            whole_number(name, given, least)
        if whole_number("resize", resize) < crop:
            raise ValueError(f"a crop must lie within the image: crop {crop}, resize {resize}")
        self.images = open_images(root, split, size=resize) if isinstance(root, str | Path) else root
        self.classes, self.labels = self.images.classes, self.images.labels
        self.train, self.batch, self.seed, self.crop, self.workers = split == "train", batch, seed, crop, workers
        if self.train and len(self.labels) < batch:
            raise ValueError(f"{len(self.labels)} images do not fill one batch of {batch}; use a smaller batch")
        self.resize, self.device = resize, torch.device(device)
        self.rank, self.world, self.unit = rank, world, unit
        self.mean = torch.as_tensor(mean, dtype=torch.float32, device=self.device)
        if tuple(self.mean.shape) not in ((3,), (3, resize, resize)):
            raise ValueError(f"mean must have shape [3] or [3, {resize}, {resize}], not {list(self.mean.shape)}")
        self.mean = self.mean.view(3, 1, 1) if self.mean.ndim == 1 else self.mean
        self._is_unscaled = all(value == 1 for value in std)
        self.std = torch.tensor(std, dtype=torch.float32, device=self.device).view(3, 1, 1)
        self._labels_there = self.labels.to(self.device)
        self._count = torch.arange(crop, device=self.device)

    @property
    def files(self) -> list[tuple[Path, int]]:
        """The files with their labels, where there is one for each image."""
        samples = self.images.samples if isinstance(self.images, Decoded) else None
        if samples is None or samples.members:
            raise ValueError(f"{self.images.about} has no file for each image")
        return [
            (Path(samples.paths[place[0]]), label) for place, label in zip(samples.places, samples.labels, strict=True)
        ]

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        count = len(self.labels)
        return count // self.batch if self.train else -(-count // self.batch)

    def epoch(self, epoch: int, start: int = 0) -> Generator[tuple[Tensor, Tensor]]:
        """The batches of an epoch.

        Args:
            epoch: Its number.
            start: The batch to begin with, to resume; from 0.

        Returns:
            A generator of float32 images `[B, 3, crop, crop]` and int64 labels `[B]`, on the device. It raises
            `DataError` where an image cannot be read. Closing it ends the threads that read ahead.

        Raises:
            TypeError: `epoch` or `start` is not a whole number.
            ValueError: One of them is below 0.
        """
        return self._pairs(self.pieces(epoch, start))

    @staticmethod
    def _pairs(pieces: Generator[Piece]) -> Generator[tuple[Tensor, Tensor]]:
        with contextlib.closing(pieces):
            for piece in pieces:
                yield piece.images, piece.labels

    def pieces(self, epoch: int, start: int = 0) -> Generator[Piece]:
        """As `epoch`, with the numbers of the images."""
        return self._from(whole_number("epoch", epoch, 0), whole_number("start", start, 0))

    def _from(self, epoch: int, start: int) -> Generator[Piece]:
        index = torch.arange(len(self.labels))
        order = draw(self.seed, "order", epoch, index).argsort(stable=True) if self.train else index
        wanted = []
        for number in range(start, len(self)):
            places = order[number * self.batch : (number + 1) * self.batch]
            mine = share(len(places), self.rank, self.world, self.unit)
            wanted.append(places[mine.start : mine.stop].numpy())
        crops = self._draw_crops(epoch) if self.train else None
        with contextlib.closing(self.images.batches(wanted, self.device, self.workers)) as batches:
            for made in batches:
                there = torch.as_tensor(made.numbers, dtype=torch.int64).to(self.device, non_blocking=True)
                images = self._crop(made.images, None if crops is None else crops.index_select(1, there))
                yield Piece(images, self._labels_there.index_select(0, there), there, made.corrupt)

    def _draw_crops(self, epoch: int) -> Tensor:
        """The crops of all images, as `cut` draws them: the first row, the first column, and the step to the next one.

        Once an epoch: drawn for each batch, they would be dozens of small kernels in every step.
        """
        index = torch.arange(len(self.labels), device=self.device)
        rows, columns = (
            below(draw(self.seed, f"crop {side}", epoch, index), self.resize - self.crop + 1)
            for side in ("row", "column")
        )
        flipped = draw(self.seed, "flip", epoch, index) < 0
        return torch.stack([rows, columns + flipped * (self.crop - 1), 1 - 2 * flipped.long()])

    def _crop(self, images: Tensor, crops: Tensor | None) -> Tensor:
        """Crop and subtract the mean; a mean image is subtracted first, which is Caffe's order."""
        if self.mean.shape[-1] > 1:
            centred = self._cut(images - self.mean, crops)
        else:
            centred = self._cut(images, crops) - self.mean  # from bytes to float32 in one pass
        return (centred if self._is_unscaled else centred.div_(self.std)).contiguous()

    def _cut(self, images: Tensor, crops: Tensor | None) -> Tensor:
        if crops is None:
            first = (self.resize - self.crop) // 2
            return images[:, :, first : first + self.crop, first : first + self.crop]
        row, column, step = crops[:, :, None]
        return pixels_at(images, row + self._count, torch.addcmul(column, step, self._count))
