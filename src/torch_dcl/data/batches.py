"""Batches of images that are kept on the device: no worker processes, no decoding, augmentation of a batch at once.

The order of an epoch, and the flip and crop of every image in it, are hashes of (seed, epoch, index of the image). They
do not depend on the batch size, on the device, or on what ran before, so an epoch can be resumed at any batch.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from torch_dcl.data.draws import below, draw, whole_number

__all__ = ["Batches", "cut", "mean_image"]

_ROOM = 2**26
"""Bytes of the batches that are computed at once."""

Normalise = tuple[Sequence[float], Sequence[float]] | Callable[[Tensor], Tensor]


class Batches:
    """Batches of one split, for training or for evaluation.

    For training, images are shuffled every epoch and randomly flipped and cropped. For evaluation they keep their
    order and are cropped at the centre.

    Args:
        images: uint8 `[N, C, H, W]`. They are moved to the device once.
        labels: int64 `[N]`.
        batch: Images in a batch.
        seed: The seed of order, flips and crops.
        train: Whether to shuffle and augment.
        flip: For training, flip every image horizontally with probability 1/2. For evaluation, return two views of each
            batch, plain and flipped, whose predictions the caller averages: images become `[2, B, C, H, W]`.
        pad: For training, pixels of reflection padding at every border before the crop.
        crop: Height and width of the crop; by default those of the image.
        normalise: Mean and standard deviation of each channel in units of 255, as `Dataset.statistics` gives them; or a
            function from a uint8 batch of whole images to floating-point ones, applied before the crop. By default
            images are divided by 255.
        device: The device of images and batches; by default that of `images`.
        drop_last: Whether to drop the last batch of an epoch when it is not full. By default, only for training.
        dtype: The floating-point type of the batches.

    Raises:
        ValueError: Images, labels or settings do not match.
        TypeError: A setting has the wrong type.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        batch: int,
        seed: int = 0,
        *,
        train: bool = True,
        flip: bool = False,
        pad: int = 0,
        crop: int | None = None,
        normalise: Normalise | None = None,
        device: torch.device | str | None = None,
        drop_last: bool | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        _check(images, labels, batch, pad, crop)
        drop_last = train if drop_last is None else drop_last
        _check_types(seed, dtype, {"train": train, "flip": flip, "drop_last": drop_last})
        device = images.device if device is None else torch.device(device)
        self.images = images.to(device).contiguous()
        self.labels = labels.to(device)
        self.batch, self.seed, self.train, self.flip = int(batch), int(seed), train, flip
        self.pad = int(pad) if train else 0
        height, width = images.shape[2:]
        self.size = (height, width) if crop is None else (int(crop), int(crop))
        self.drop_last = drop_last
        self.dtype = dtype
        if train and self.drop_last and len(labels) < batch:
            raise ValueError(
                f"{len(labels)} images do not fill one batch of {batch}; use a smaller batch or drop_last=False"
            )
        self._function = normalise if callable(normalise) else None
        pair = None if callable(normalise) else normalise
        self._scale, self._shift = scale_and_shift(pair, images.shape[1], device)
        # A function is called with single batches. Otherwise several are computed at once on a GPU, where launches
        # take longer than the work on one.
        room = _ROOM if device.type == "cuda" and self._function is None else 0
        self._at_once = max(1, room // (batch * images.shape[1] * self.size[0] * self.size[1] * dtype.itemsize))

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        count = len(self.labels)
        return count // self.batch if self.drop_last else -(-count // self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of epoch 0, which for evaluation is the only one."""
        return self.epoch(0)

    def order(self, epoch: int) -> Tensor:
        """The order of an epoch: the indices of all images, int64 on the device."""
        epoch = whole_number("epoch", epoch, 0)
        index = torch.arange(len(self.labels), device=self.labels.device)
        return draw(self.seed, "order", epoch, index).argsort(stable=True) if self.train else index

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch.

        Args:
            epoch: Its number.
            start: The batch to begin with, to resume; from 0.

        Returns:
            An iterator of floating images `[B, C, h, w]` (`[2, B, C, h, w]` in evaluation with flips) and labels
            `[B]`.

        Raises:
            TypeError: `epoch` or `start` is not a whole number.
            ValueError: One of them is below 0.
        """
        order, start = self.order(epoch), whole_number("start", start, 0)
        return self._from(order, epoch, start)

    def _from(self, order: Tensor, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(start, len(self), self._at_once):
            index = order[number * self.batch : min(number + self._at_once, len(self)) * self.batch]
            together, labels = self.take(index, epoch), self.labels[index]
            yield from zip(torch.split(together, self.batch, -4), torch.split(labels, self.batch), strict=True)

    def take(self, index: Tensor, epoch: int = 0) -> Tensor:
        """Chosen images, int64 `[B]`, as they appear in an epoch, whatever their batches."""
        images = self.images.index_select(0, index)
        if self._function is not None:
            images = self._function(images)
        if not self.train:
            images = crop_centre(images, self.size)
        elif self.flip or self.pad or images.shape[2:] != self.size:
            images = cut(images, index, self.seed, epoch, self.size, flip=self.flip, pad=self.pad)
        if self._function is None:
            # Scale and shift in float32, then cast.
            images = torch.addcmul(self._shift, images.float(), self._scale)
        images = images.to(self.dtype)
        return torch.stack([images, images.flip(-1)]) if self.flip and not self.train else images


def cut(
    images: Tensor, index: Tensor, seed: int, epoch: int, size: tuple[int, int], *, flip: bool, pad: int = 0
) -> Tensor:
    """Randomly flip and crop images `[B, C, H, W]` to `[B, C, h, w]`, after reflection padding of `pad` pixels.

    Flip (with probability 1/2) and crop are hashes of (seed, epoch, index of the image in the set).
    """
    height, width = images.shape[2:]
    rows = _positions(draw(seed, "crop row", epoch, index), height, size[0], pad)
    columns = _positions(draw(seed, "crop column", epoch, index), width, size[1], pad)
    if flip:
        flipped = draw(seed, "flip", epoch, index) < 0
        columns = torch.where(flipped[:, None], columns.flip(1), columns)
    return pixels_at(images, rows, columns)


def crop_centre(images: Tensor, size: Sequence[int]) -> Tensor:
    """The centre of images `[B, C, H, W]`, of this height and width."""
    top, left = ((have - want) // 2 for have, want in zip(images.shape[2:], size, strict=True))
    return images[:, :, top : top + size[0], left : left + size[1]]


def pixels_at(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The pixels of images `[B, C, H, W]` at rows `[B, h]` and columns `[B, w]`: `[B, C, h, w]`."""
    places = (rows[:, :, None] * images.shape[3] + columns[:, None, :]).flatten(1)[:, None]
    pixels = images.flatten(2).gather(2, places.expand(-1, images.shape[1], -1))
    return pixels.view(*images.shape[:2], rows.shape[1], columns.shape[1])


def reflect(at: Tensor, length: int) -> Tensor:
    """Positions along a side, reflected at its ends."""
    return (length - 1) - ((length - 1) - at.abs()).abs()


def mean_image(images: Tensor) -> Tensor:
    """The mean of uint8 images, pixel by pixel: float32 `[C, H, W]` from 0 to 255. Sums are exact on every device."""
    total = torch.zeros(images.shape[1:], dtype=torch.int64, device=images.device)
    for start in range(0, len(images), 8192):
        total += images[start : start + 8192].sum(0, dtype=torch.int64)
    return (total.double() / len(images)).float()


def _positions(drawn: Tensor, length: int, size: int, pad: int) -> Tensor:
    """The pixels of each crop along one side, `[B, size]`, reflected at the border."""
    first = below(drawn, length + 2 * pad - size + 1) - pad
    return reflect(first[:, None] + torch.arange(size, device=drawn.device), length)


def scale_and_shift(
    normalise: tuple[Sequence[float], Sequence[float]] | None, channels: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Scale and shift, float32 `[1, C, 1, 1]`, that combine /255, − mean and / std; without these, /255 alone."""
    if normalise is None:
        normalise = [0.0] * channels, [1.0] * channels
    try:
        mean, std = (torch.tensor([float(value) for value in values], dtype=torch.float64) for values in normalise)
    except (TypeError, ValueError):
        raise ValueError(f"normalise must be (mean, std) or a function, not {normalise!r}") from None
    if len(mean) != channels or len(std) != channels:
        raise ValueError(f"normalise has {len(mean)} means and {len(std)} deviations for {channels} channels")
    if not bool((std > 0).all()):
        raise ValueError(f"normalise: every standard deviation must be positive, got {std.tolist()}")
    scale, shift = (part.to(device, torch.float32).view(1, -1, 1, 1) for part in (1 / (255 * std), -mean / std))
    return scale, shift


def _check(images: Tensor, labels: Tensor, batch: int, pad: int, crop: int | None) -> None:
    for name, given in (("images", images), ("labels", labels)):
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(given).__name__}; torch.as_tensor makes one")
    if images.dtype != torch.uint8 or images.ndim != 4 or not images.numel():
        raise ValueError(f"images must be uint8 [N, C, H, W] and not empty, not {images.dtype} {list(images.shape)}")
    if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
        raise ValueError(
            f"labels must be int64 [{len(images)}] like the images, not {labels.dtype} {list(labels.shape)}"
        )
    side = min(images.shape[2:])
    whole_number("batch", batch, 1)
    if not 0 <= whole_number("pad", pad) < side:
        raise ValueError(f"pad must be from 0 to {side - 1} for images of {list(images.shape[2:])}, not {pad}")
    if crop is not None and not 1 <= whole_number("crop", crop) <= side:
        raise ValueError(f"crop must be from 1 to {side} for images of {list(images.shape[2:])}, not {crop}")


def _check_types(seed: int, dtype: torch.dtype, flags: dict[str, bool]) -> None:
    whole_number("seed", seed)
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, not {flag!r}")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating type of torch, not {dtype!r}")
