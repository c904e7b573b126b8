"""From images to a network's inputs: normalisation, and in training random crops and flips.

Crops and flips are those of `torch_dcl.data.batches.Batches`: hashes of (seed, epoch, index of the image). They are
drawn for all images at the start of an epoch, so that a step only looks them up.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_dcl import kernels
from torch_dcl.data.batches import crop_centre, pixels_at, reflect, scale_and_shift
from torch_dcl.data.draws import below, draw

__all__ = ["Augmenter", "Inputs"]


@dataclass(frozen=True, eq=False)
class Inputs:
    """How uint8 images become a network's inputs.

    ::

        Inputs(normalise=(mean, std), pad=4, flip=True)           # Wide ResNet on CIFAR
        Inputs(normalise=mean_image(images), flip=True)           # Caffe's: 0 to 255, the mean image subtracted

    Args:
        normalise: Mean and standard deviation of each channel in units of 255, as `Dataset.statistics` gives them; or
            a mean image ``[C, H, W]`` from 0 to 255, which is subtracted without dividing; or a function from a batch
            of whole uint8 images to float32 ones, written with torch operations only, since it is captured on a GPU.
            None divides by 255.
        crop: Height and width of the inputs: a random crop in training, the centre in evaluation. None for the size of
            the image.
        pad: In training, pixels of reflection padding at every border before the crop.
        flip: In training, flip every image horizontally with probability 1/2.
        average: In evaluation, average the probabilities of an image and of its horizontal flip.

    Raises:
        ValueError: ``crop`` or ``pad`` are out of range.
    """

    normalise: tuple[Sequence[float], Sequence[float]] | Tensor | Callable[[Tensor], Tensor] | None = None
    crop: int | None = None
    pad: int = 0
    flip: bool = False
    average: bool = False

    def __post_init__(self) -> None:
        if self.crop is not None and self.crop < 1:
            raise ValueError(f"crop must be at least 1, got {self.crop}")
        if self.pad < 0:
            raise ValueError(f"pad must not be negative, got {self.pad}")

    def size(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Channels, height and width of the inputs from images of a shape ``[C, H, W]``."""
        channels, height, width = shape
        side = min(height, width)
        if self.crop is not None and self.crop > side:
            raise ValueError(f"crop must be from 1 to {side} for images of {height} x {width}, got {self.crop}")
        if self.pad >= side:
            raise ValueError(f"pad must be from 0 to {side - 1} for images of {height} x {width}, got {self.pad}")
        return (channels, height, width) if self.crop is None else (channels, self.crop, self.crop)

    def describe(self) -> dict[str, Any]:
        """The settings as plain data, which a checkpoint must agree with."""
        described: object = self.normalise
        if isinstance(described, Tensor):
            content = described.detach().cpu().contiguous().numpy().tobytes()
            described = f"mean image {list(described.shape)}, SHA-256 {hashlib.sha256(content).hexdigest()}"
        elif callable(described):
            described = f"{described.__module__}.{getattr(described, '__qualname__', type(described).__qualname__)}"
        elif described is not None:
            described = [[float(value) for value in values] for values in self.normalise]  # type: ignore[union-attr]
        return {"normalise": described, "crop": self.crop, "pad": self.pad, "flip": self.flip, "average": self.average}


class Augmenter:
    """`Inputs` on a device, for E networks and images of a shape ``[C, H, W]``; in training with crops and flips."""

    def __init__(
        self, inputs: Inputs, networks: int, count: int, shape: Sequence[int], device: torch.device, *, train: bool
    ) -> None:
        self.size = inputs.size(shape)
        self.pad, self.flip = inputs.pad, inputs.flip
        self.keeps_size = tuple(shape) == self.size
        self._function: Callable[[Tensor], Tensor] | None = None
        self._mean: Tensor | None = None
        normalise, pair = inputs.normalise, None
        if isinstance(normalise, Tensor):
            self._mean = _mean_image(normalise, shape, device)
        elif callable(normalise):
            self._function = normalise
        else:
            pair = normalise
        self._scale, self._shift = scale_and_shift(pair, shape[0], device)
        self.is_random = train and (self.flip or self.pad > 0 or not self.keeps_size)
        if self.is_random:
            self._index = torch.arange(count, device=device)
            self._first = torch.zeros(2, networks, count, dtype=torch.int16, device=device)
            self._flipped = torch.zeros(networks, count, dtype=torch.bool, device=device)

    def begin_epoch(self, seeds: Sequence[int], epoch: int, lengths: Sequence[int]) -> None:
        """Draw the crops and flips of an epoch for images of these heights and widths."""
        if not self.is_random:
            return
        drawn: dict[int, int] = {}
        for row, seed in enumerate(seeds):
            if seed in drawn:
                self._first[:, row] = self._first[:, drawn[seed]]
                self._flipped[row] = self._flipped[drawn[seed]]
                continue
            drawn[seed] = row
            sides = zip(("crop row", "crop column"), lengths, self.size[1:], strict=True)
            for side, (purpose, length, size) in enumerate(sides):
                random = draw(seed, purpose, epoch, self._index)
                self._first[side, row] = (below(random, length + 2 * self.pad - size + 1) - self.pad).to(torch.int16)
            if self.flip:
                self._flipped[row] = draw(seed, "flip", epoch, self._index) < 0

    def kernel_accepts(self, images: Tensor, dtype: torch.dtype) -> bool:
        """Whether a kernel can produce inputs of this type on the device of the images."""
        is_supported = dtype in (torch.bfloat16, torch.float16, torch.float32)
        return is_supported and self._function is None and kernels.reachable(images)

    def gather(
        self, images: Tensor, image_of: Tensor, labels: Tensor, label_of: Tensor, index: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Inputs and labels of the indices ``[E, B]``, by one kernel; ``image_of`` and ``label_of`` choose the set."""
        from torch_dcl.fleet.kernels.augmentation import gather_inputs

        first, flipped = (self._first, self._flipped) if self.is_random else (None, None)
        return gather_inputs(
            images, image_of, labels, label_of, index.contiguous(), first, flipped, self._scale, self._shift,
            self._mean, self.size[1:], dtype,
        )  # fmt: skip

    def augment(self, images: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Training inputs ``[E, B, C, h, w]`` of uint8 images ``[E, B, C, H, W]`` with the indices ``[E, B]``."""
        flat = self._normalise_whole(images)
        if self.is_random:
            flat = self._crop(flat, index)
        return self._scale_and_cast(flat, dtype).view(*images.shape[:2], *self.size)

    def crop_centre(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Evaluation inputs: the centre of each image."""
        flat = crop_centre(self._normalise_whole(images), self.size[1:])
        return self._scale_and_cast(flat, dtype).view(*images.shape[:2], *self.size)

    def _normalise_whole(self, images: Tensor) -> Tensor:
        flat = images.flatten(0, 1)
        if self._mean is not None:
            return flat.float() - self._mean
        return flat if self._function is None else self._function(flat)

    def _scale_and_cast(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Scale and shift in float32, then cast."""
        if self._function is None and self._mean is None:
            images = torch.addcmul(self._shift, images.float(), self._scale)
        return images.to(dtype).contiguous()

    def _crop(self, images: Tensor, index: Tensor) -> Tensor:
        count, _, height, width = images.shape
        row = torch.arange(len(index), device=index.device)[:, None]
        first = self._first[:, row, index].long().view(2, count, 1)
        rows, columns = (
            reflect(first[side] + torch.arange(self.size[1 + side], device=index.device), length)
            for side, length in enumerate((height, width))
        )
        if self.flip:
            flipped = self._flipped[row, index].view(count, 1)
            columns = torch.where(flipped, columns.flip(1), columns)
        return pixels_at(images, rows, columns)


def _mean_image(mean: Tensor, shape: Sequence[int], device: torch.device) -> Tensor:
    if tuple(mean.shape) != tuple(shape):
        raise ValueError(f"the mean image must have the shape of an image, {list(shape)}, got {list(mean.shape)}")
    return mean.to(device, torch.float32).contiguous()
