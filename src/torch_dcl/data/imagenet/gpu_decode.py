"""JPEGs decoded on a GPU: nvJPEG through torchcodec or torchvision, resized there; Pillow decodes what it cannot.

nvJPEG rounds differently from the decoder that Pillow uses, so single values differ by a few levels.
"""

import contextlib
import functools
import importlib.util
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from torch_dcl.data.dataset import DataError

if TYPE_CHECKING:
    from torch_dcl.data.imagenet.ahead import Made, Numbers
    from torch_dcl.data.imagenet.decoded import Files

__all__ = ["can_decode_on", "decode_on"]

_START, _END = b"\xff\xd8\xff", b"\xff\xd9"


@functools.cache
def can_decode_on(device: torch.device) -> bool:
    """Whether there is a decoder: some builds of torchvision have none for GPUs."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG")
    try:
        (image,) = _decoder()([_as_tensor(file.getvalue())], device)
    except (ImportError, RuntimeError):
        return False
    return tuple(image.shape) == (3, 16, 16)


def decode_on(device: torch.device, source: "Files", indices: "Numbers") -> "Made":
    """Decode and resize some images.

    Args:
        device: Where; on the CPU the same code runs with libjpeg.
        source: The encoded images.
        indices: Which.

    Returns:
        The images on the device, ready for any stream.

    Raises:
        DataError: An image cannot be decoded and is not to be skipped; the message names it.
    """
    decode_all = _decoder()
    files = [_bytes_of(source, index) for index in indices]
    usual = [place for place, data in enumerate(files) if _is_usual(data)]
    images: dict[int, Tensor] = {}
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        try:
            found = decode_all([_as_tensor(files[place]) for place in usual], device) if usual else []
        except RuntimeError:  # one of them is damaged: Pillow says which, and why
            found, usual = [], []
        if found:
            small = torch.stack([_resize(image, source.size, source.shape) for image in found])
            images = dict(zip(usual, small.round_().to(torch.uint8), strict=True))
        rest = {place: source.read(index) for place, index in enumerate(indices) if place not in images}
        made = source.gather([
            rest[place] if place in rest else (images[place], index, ()) for place, index in enumerate(indices)
        ], device)  # fmt: skip
    if stream is not None:
        stream.synchronize()
    return made


def _bytes_of(source: "Files", index: int) -> bytes:
    """The bytes of an encoded image; none if it cannot be read, for which Pillow then raises the error."""
    try:
        file = source.samples.file(index)
        return file.read_bytes() if isinstance(file, Path) else file
    except (DataError, OSError):
        return b""


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@functools.cache
def _decoder() -> Callable[[list[Tensor], torch.device], list[Tensor]]:
    """torchcodec's decoder of JPEGs where it is installed, torchvision's otherwise, which is deprecated."""
    if importlib.util.find_spec("torchcodec") is not None:
        with contextlib.suppress(ImportError, RuntimeError):
            from torchcodec.decoders import decode_jpeg

            return lambda data, device: decode_jpeg(data, mode="RGB", device=device)
    from torchvision.io import ImageReadMode
    from torchvision.io import decode_jpeg as decode

    def decode_with_torchvision(data: list[Tensor], device: torch.device) -> list[Tensor]:
        # Not warnings.catch_warnings, which threads must not share.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torchvision\.io")
        images: list[Tensor] = decode(data, ImageReadMode.RGB, device)
        return images

    return decode_with_torchvision


def _is_usual(data: bytes) -> bool:
    """Whether data is a whole grey or RGB JPEG without EXIF, whose orientation torchcodec applies and Pillow does not.

    A decoder may fill in what a truncated file lacks, so one without an end is left to Pillow, which refuses it.
    """
    return data.startswith(_START) and data.endswith(_END) and _channels(data) in (1, 3)


def _channels(data: bytes) -> int:
    """The channels of a JPEG by its frame header; 0 where there is none, or EXIF before it."""
    at = 2
    while at + 10 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return data[at + 9]
        if marker == 0xE1 and data.startswith(b"Exif\0", at + 4):
            return 0
        at += 2 + length if marker != 0xFF else 1
    return 0


def _resize(image: Tensor, size: int, shape: str) -> Tensor:
    """float32, not rounded yet: interpolation with positive weights stays between 0 and 255."""
    if shape == "crop":
        height, width = image.shape[1:]
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        image = image[:, top : top + side, left : left + side]
    return interpolate(image[None].float(), (size, size), mode="bilinear", antialias=True)[0]
