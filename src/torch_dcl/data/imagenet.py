"""Datasets of the size of ILSVRC2012: decoded by worker processes; cropped, flipped and centred on the device.

The layout is torchvision's: `train/CLASS/*` and `val/CLASS/*`. As in Caffe's AlexNet, every image is resized to 256 ×
256 without keeping its aspect ratio. Training uses random 227 × 227 crops and flips; testing uses the centre crop. The
order of an epoch, crops and flips are hashes of (seed, epoch, index), as in `Batches`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from torch_dcl.data.batches import cut
from torch_dcl.data.draws import draw, whole_number
from torch_dcl.data.folder import class_folders, image_files
from torch_dcl.data.images import read_image

__all__ = ["ImageNetBatches"]

# The channel means of Caffe's mean image of ILSVRC2012, red, green, blue, from 0 to 255.
CAFFE_MEAN = (122.67891434, 116.66876762, 104.00698793)


class ImageNetBatches:
    """Batches of one split of a folder of images, decoded on the fly.

    Args:
        root: The folder above `train` and `val`.
        split: `"train"` to shuffle and augment, `"val"` for evaluation in order.
        batch: Images in a batch. The last batch of a training epoch is dropped when it is not full.
        seed: The seed of order, crops and flips.
        resize: Height and width that every image is resized to, by antialiased bilinear interpolation.
        crop: Height and width of the inputs.
        mean: The mean to subtract, from 0 to 255: one number for each channel, or a mean image `[3, resize, resize]`,
            of which each crop subtracts its own part.
        device: The device of crops and batches.
        workers: Number of worker processes; 0 decodes in this process.

    Raises:
        FileNotFoundError: The folder is missing.
        DataError: A class folder is missing or empty.
        ValueError: A setting is out of range.
        TypeError: A setting that must be a whole number is not.
    """

    def __init__(
        self,
        root: str | Path,
        split: str,
        batch: int,
        seed: int = 0,
        *,
        resize: int = 256,
        crop: int = 227,
        mean: Sequence[float] | Tensor = CAFFE_MEAN,
        device: torch.device | str = "cpu",
        workers: int = 4,
    ):
        if split not in ("train", "val"):
            raise ValueError(f"split must be 'train' or 'val', not {split!r}")
        for name, given, least in (
            ("seed", seed, None),
            ("batch", batch, 1),
            ("workers", workers, 0),
            ("crop", crop, 1),
        ):
            whole_number(name, given, least)
        if whole_number("resize", resize) < crop:
            raise ValueError(f"a crop must lie within the image: crop {crop}, resize {resize}")
        self.classes = tuple(class_folders(Path(root) / "train"))
        self.files = image_files(Path(root) / split, list(self.classes))
        self.train, self.batch, self.seed, self.crop, self.workers = split == "train", batch, seed, crop, workers
        if self.train and len(self.files) < batch:
            raise ValueError(f"{len(self.files)} images do not fill one batch of {batch}; use a smaller batch")
        self.resize, self.device = resize, torch.device(device)
        self.mean = torch.as_tensor(mean, dtype=torch.float32, device=self.device)
        if tuple(self.mean.shape) not in ((3,), (3, resize, resize)):
            raise ValueError(f"mean must have shape [3] or [3, {resize}, {resize}], not {list(self.mean.shape)}")
        self.mean = self.mean.view(3, 1, 1) if self.mean.ndim == 1 else self.mean

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        count = len(self.files)
        return count // self.batch if self.train else -(-count // self.batch)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch.

        Args:
            epoch: Its number.
            start: The batch to begin with, to resume; from 0.

        Returns:
            An iterator of float32 images `[B, 3, crop, crop]` and int64 labels `[B]`, on the device. It raises
            `DataError` where an image cannot be read.

        Raises:
            TypeError: `epoch` or `start` is not a whole number.
            ValueError: One of them is below 0.
        """
        return self._from(whole_number("epoch", epoch, 0), whole_number("start", start, 0))

    def _from(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        index = torch.arange(len(self.files))
        order = draw(self.seed, "order", epoch, index).argsort(stable=True) if self.train else index
        wanted = [order[n * self.batch : (n + 1) * self.batch].tolist() for n in range(start, len(self))]
        loader = DataLoader(
            _Decoded(self.files, self.resize),
            batch_sampler=wanted,
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
        )
        for images, labels, which in loader:
            moved = images.to(self.device, non_blocking=True)
            yield self._crop(moved, which.to(self.device), epoch), labels.to(self.device, non_blocking=True)

    def _crop(self, images: Tensor, index: Tensor, epoch: int) -> Tensor:
        """Subtract the mean, then crop: Caffe's order, which a mean image needs."""
        centred = images.float() - self.mean
        if self.train:
            return cut(centred, index, self.seed, epoch, (self.crop, self.crop), flip=True)
        first = (self.resize - self.crop) // 2
        return centred[:, :, first : first + self.crop, first : first + self.crop].contiguous()


class _Decoded(Dataset[tuple[Tensor, int, int]]):
    """The images of a list of files, decoded and resized in a worker."""

    def __init__(self, files: list[tuple[Path, int]], resize: int):
        self.files, self.resize = files, resize

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        from PIL.Image import Resampling

        path, label = self.files[index]
        image = read_image(path, "RGB").resize((self.resize, self.resize), Resampling.BILINEAR)
        return torch.from_numpy(np.array(image).transpose(2, 0, 1).copy()), label, index
