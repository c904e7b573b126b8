"""JPEGs decoded on a GPU: nvJPEG through torchcodec or torchvision, resized there; Pillow decodes what it cannot.

nvJPEG rounds differently from the decoder that Pillow uses, so single values differ by a few levels.
"""

import contextlib
import functools
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from torch_dcl.data.imagenet.prepare import decode

if TYPE_CHECKING:
    from torch_dcl.data.imagenet.sources import Decoded

__all__ = ["decode_on"]

_JPEG = b"\xff\xd8\xff"


def decode_on(device: torch.device, source: "Decoded", indices: Sequence[int]) -> Tensor:
    """Decode and resize some images.

    Args:
        device: Where; on the CPU the same code runs with libjpeg.
        source: The encoded images.
        indices: Which.

    Returns:
        uint8 `[B, 3, size, size]` on the device, ready for the stream that asks for it.

    Raises:
        DataError: An image cannot be decoded; the message names it.
    """
    decode_all = _decoder()
    files = [_read(source.samples.file(index)) for index in indices]
    encoded = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in files]
    usual = [place for place, data in enumerate(files) if _is_usual(data)]
    images: list[Tensor | None] = [None] * len(indices)
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        try:
            found = decode_all([encoded[place] for place in usual], device) if usual else []
        except RuntimeError:  # one of them is damaged: Pillow says which, and why
            found, usual = [], []
        for place, image in zip(usual, found, strict=True):
            images[place] = _resize(image, source.size, source.shape)
        for place, index in enumerate(indices):
            if images[place] is None:
                images[place] = torch.from_numpy(decode(source.samples, index, source.size, source.shape)).to(device)
        whole = [image for image in images if image is not None]
        batch = torch.stack(whole) if whole else torch.empty(0, 3, source.size, source.size, dtype=torch.uint8)
    if stream is not None:
        stream.synchronize()
    return batch.to(device)


def _read(file: Path | bytes) -> bytes:
    return file.read_bytes() if isinstance(file, Path) and file.is_file() else file if isinstance(file, bytes) else b""


@functools.cache
def _decoder() -> Callable[[list[Tensor], torch.device], list[Tensor]]:
    """torchcodec's decoder of JPEGs where it is installed, torchvision's otherwise, which is deprecated."""
    if importlib.util.find_spec("torchcodec") is not None:
        with contextlib.suppress(ImportError, RuntimeError):
            from torchcodec.decoders import decode_jpeg

            return lambda data, device: decode_jpeg(data, mode="RGB", device=device)
    from torchvision import io

    def decode_with_torchvision(data: list[Tensor], device: torch.device) -> list[Tensor]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            images: list[Tensor] = io.decode_jpeg(data, io.ImageReadMode.RGB, device)
        return images

    return decode_with_torchvision


def _is_usual(data: bytes) -> bool:
    """Whether data is a grey or RGB JPEG without EXIF, whose orientation torchcodec applies and Pillow does not."""
    return data.startswith(_JPEG) and b"Exif\0" not in data[:65536] and _channels(data) in (1, 3)


def _channels(data: bytes) -> int:
    """The channels of a JPEG by its frame header; 0 where there is none."""
    at = 2
    while at + 10 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return data[at + 9]
        at += 2 + length if marker != 0xFF else 1
    return 0


def _resize(image: Tensor, size: int, shape: str) -> Tensor:
    if shape == "crop":
        height, width = image.shape[1:]
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        image = image[:, top : top + side, left : left + side]
    small = interpolate(image[None].float(), (size, size), mode="bilinear", antialias=True)[0]
    return small.round_().clamp_(0, 255).to(torch.uint8)
