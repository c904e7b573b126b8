"""Encoded images that are decoded on the fly: by Pillow in worker processes, or on a GPU.

An image that cannot be decoded is an error or, on request, is skipped. Its replacement depends on the files alone, so
ranks and resumed runs agree.
"""

import contextlib
import os
import signal
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from torch_dcl.data.dataset import DataError
from torch_dcl.data.imagenet.ahead import Made, Numbers, Wanted, for_this_stream, in_order
from torch_dcl.data.imagenet.gpu_decode import can_decode_on, decode_on
from torch_dcl.data.imagenet.prepare import decode
from torch_dcl.data.imagenet.samples import Samples

__all__ = ["Decoded", "Files"]

THREADS = 4  # that feed the decoder of a GPU, at most: it takes one batch at a time
TRIES = 100  # images in a row that may be corrupt


class Files(Dataset[Made | DataError]):
    """Encoded images, decoded by Pillow to one size, in a worker.

    Args:
        root: The folder that names are relative to.
        samples: The images.
        size: Height and width.
        shape: As for `prepare.decode`.
        corrupt: How to treat an image that cannot be decoded: "refuse" raises an error, "replace" uses the next valid
            image, "omit" leaves it out.
    """

    def __init__(self, root: Path, samples: Samples, size: int, shape: str, corrupt: str):
        self.root, self.samples, self.size, self.shape, self.corrupt = root, samples, size, shape, corrupt

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, indices: Numbers) -> Made | DataError:
        """All images of a batch; or the error, whose message would be lost if a worker raised it."""
        try:
            return self.gather([self.read(index) for index in indices])
        except DataError as error:
            return error

    def read(self, index: int) -> tuple[Tensor | None, int, tuple[str, ...]]:
        """The image, or the one that takes its place; its number; and the names of what was skipped."""
        skipped: list[str] = []
        for place in range(index, index + TRIES):
            number = place % len(self.samples)
            try:
                image = torch.from_numpy(decode(self.samples, number, self.size, self.shape))
            except DataError as error:
                if self.corrupt == "refuse":
                    raise DataError(
                        f"{error}, or skip such images and have them counted (--set skip_corrupt=yes)"
                    ) from error
                skipped.append(os.path.relpath(self.samples.name(number), self.root))
                if self.corrupt == "omit":
                    return None, index, tuple(skipped)
            else:
                return image, number, tuple(skipped)
        raise DataError(f"{TRIES} images in a row cannot be decoded, from {skipped[0]} on; copy the images again")

    def gather(
        self, found: Sequence[tuple[Tensor | None, int, tuple[str, ...]]], device: torch.device | str = "cpu"
    ) -> Made:
        """One batch of what `read` returned, on a device."""
        images = [image.to(device) for image, _, _ in found if image is not None]
        numbers = [number for image, number, _ in found if image is not None]
        empty = torch.empty(0, 3, self.size, self.size, dtype=torch.uint8, device=device)
        return Made(
            torch.stack(images) if images else empty, numbers, tuple(name for _, _, bad in found for name in bad)
        )


def _as_it_is(batch: Any) -> Any:
    return batch


def _leave_signals_to_the_loader(_worker: int) -> None:
    """Ignore signals, which Slurm sends to every process: the current step needs its workers before it is saved."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


class Decoded:
    """Encoded images, decoded and resized batch by batch."""

    def __init__(self, root: Path, samples: Samples, size: int, shape: str, decoder: str, corrupt: str = "refuse"):
        if decoder not in ("auto", "pillow", "gpu"):
            raise ValueError(f"decoder must be auto, pillow or gpu, not {decoder!r}")
        self.root, self.samples, self.size, self.decoder = root, samples, size, decoder
        self.pillow = Files(root, samples, size, shape, corrupt)
        self.classes, self.labels = samples.classes, torch.tensor(samples.labels)
        what = "tar shards" if samples.members else "image folder"
        self.about = f"{len(samples):,} images, {len(samples.classes):,} classes, {what} {root}, decoded on the fly"

    def decoder_on(self, device: torch.device) -> str:
        """Which decoder is used: pillow or gpu.

        Raises:
            DataError: The decoder must be the GPU's, and this device has none.
        """
        if self.decoder == "gpu" and not can_decode_on(device):
            raise DataError(f"JPEGs cannot be decoded on {device}: install torchcodec, or ask for the decoder pillow")
        has_gpu = device.type == "cuda" and self.decoder == "auto" and can_decode_on(device)
        return "gpu" if has_gpu or self.decoder == "gpu" else "pillow"

    def content(self) -> str:
        """The SHA-256 of the names, sizes and labels of the files, and of the content of some."""
        return self.samples.signature(self.root)

    def batches(self, wanted: Wanted, device: torch.device, workers: int) -> Generator[Made]:
        """The images of every list of indices, on the device."""
        if self.decoder_on(device) == "gpu":
            made = in_order(lambda indices: decode_on(device, self.pillow, indices), wanted, min(workers, THREADS))
            with contextlib.closing(made):
                yield from for_this_stream(made, device)
            return
        loader = DataLoader(
            self.pillow,
            batch_sampler=[list(map(int, indices)) for indices in wanted],
            num_workers=workers,
            pin_memory=device.type == "cuda",
            collate_fn=_as_it_is,
            worker_init_fn=_leave_signals_to_the_loader,
        )
        for batch in loader:
            if isinstance(batch, DataError):
                raise batch
            yield batch._replace(images=batch.images.to(device, non_blocking=True))
