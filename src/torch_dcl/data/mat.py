"""MATLAB's mat files of level 5, as far as SVHN needs them: two plain arrays, read in pieces within bounds.

A file is a header of 128 bytes and a sequence of elements. An element is a tag (type and length) and data. An array is
an element that contains four others: flags, dimensions, name and numbers. MATLAB compresses each array as a zlib
stream, which may expand to any length; so every length is checked before anything is allocated.
"""

import io
import math
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torch_dcl.data.dataset import DataError

__all__ = ["MOST_IMAGES", "read_mat"]

MOST_IMAGES = 531_131
"""Images of SVHN's largest file, the extra set."""
_MATRIX, _COMPRESSED = 14, 15
_NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_CLASSES = {6: "double", 7: "single", 8: "int8", 9: "uint8", 10: "int16", 11: "uint16", 12: "int32", 13: "uint32",
            14: "int64", 15: "uint64"}  # fmt: skip
_COMPLEX = 0x800
_PIXELS = 3 * 32 * 32
_PIECE = 1 << 20

Bytes = npt.NDArray[np.uint8]
Read = Callable[[int], bytes]
"""Returns exactly this many bytes, or raises EOFError."""


class _Array(NamedTuple):
    """An array up to its numbers, which are next in the stream."""

    name: str
    kind: str
    shape: tuple[int, ...]


def read_mat(path: Path) -> tuple[Bytes, Bytes]:
    """Read a file of SVHN's cropped digits: images `[N, 3, 32, 32]` and labels `[N]` from 0 to 9.

    In the file X has 32 × 32 × 3 × N bytes, and y has N labels from 1 to 10, where 10 is zero.
    """
    with path.open("rb") as file:
        head = file.read(128)
        if head[:19] != b"MATLAB 5.0 MAT-file":
            packed = ": it is gzipped, unpack it first" if head[:2] == b"\x1f\x8b" else "; fetch it again"
            raise DataError(f"{path} is not a MATLAB 5.0 file{packed}")
        try:
            images, labels = _read_arrays(path, file, ">" if head[126:128] == b"MI" else "<")
        except (EOFError, zlib.error, struct.error) as error:
            raise DataError(f"{path} is truncated or damaged ({error}); fetch it again") from error
    if images is None or labels is None:
        raise DataError(f"{path} has no arrays X and y: it is not one of SVHN's *_32x32.mat; fetch it again")
    if not ((labels >= 1) & (labels <= 10) & (labels % 1 == 0)).all():
        raise DataError(f"{path}: y must hold whole numbers from 1 to 10, where 10 stands for zero; fetch it again")
    if len(images) != len(labels):
        raise DataError(f"{path}: {len(images):,} images but {len(labels):,} labels; fetch it again")
    return images, (labels % 10).astype(np.uint8)


def _read_arrays(path: Path, file: io.BufferedReader, order: str) -> tuple[Bytes | None, npt.NDArray[np.number] | None]:
    """X and y, whichever are there; arrays of other names are skipped."""
    images, labels = None, None
    size = path.stat().st_size
    while file.tell() < size and (images is None or labels is None):
        kind, length, _ = _tag(_stored(file), order)
        end = file.tell() + length
        if end > size:
            raise EOFError(f"an element ends at byte {end:,} of {size:,}")
        read = _stored(file)
        if kind == _COMPRESSED:
            read = _inflated(file, length)
            kind, length, _ = _tag(read, order)
        if kind == _MATRIX and length:
            array = _read_head(read, order)
            if array.name == "X":
                images = _read_images(path, read, order, array)
            elif array.name == "y":
                labels = _read_labels(path, read, order, array)
        file.seek(end)
    return images, labels


def _read_head(read: Read, order: str) -> _Array:
    flags = _small(read, order, 8)
    dimensions = _small(read, order, 4 * 32)
    name = _small(read, order, 64)
    (bits,) = struct.unpack_from(f"{order}I", flags)
    kind = _CLASSES.get(bits & 0xFF, "another kind") if not bits & _COMPLEX else "complex"
    return _Array(name.decode("latin-1"), kind, struct.unpack(f"{order}{len(dimensions) // 4}i", dimensions))


def _read_images(path: Path, read: Read, order: str, array: _Array) -> Bytes:
    if array.kind != "uint8" or len(array.shape) not in (3, 4) or array.shape[:3] != (32, 32, 3):
        raise DataError(f"{path}: X must be uint8 of 32 × 32 × 3 × N, not {array.kind} of {list(array.shape)}")
    count = array.shape[3] if len(array.shape) == 4 else 1  # MATLAB drops a last dimension of 1
    _check_count(path, "X", count)
    kind, length, _ = _tag(read, order)
    if (kind, length) != (2, count * _PIXELS):
        raise EOFError(f"X has {length:,} bytes of data for {count:,} images")
    images = np.empty((count, 3, 32, 32), np.uint8)
    step = _PIECE // _PIXELS
    for start in range(0, count, step):
        some = images[start : start + step]
        # The first dimension is the fastest: rows of a channel are columns in memory.
        some[:] = np.frombuffer(read(some.size), np.uint8).reshape(some.shape).swapaxes(2, 3)
    return images


def _read_labels(path: Path, read: Read, order: str, array: _Array) -> npt.NDArray[np.number]:
    count = math.prod(array.shape)
    _check_count(path, "y", count)
    if array.kind not in _CLASSES.values():
        raise DataError(f"{path}: y must hold whole numbers from 1 to 10, not {array.kind}; fetch it again")
    # MATLAB stores whole numbers in the smallest type that holds them, whatever the class.
    kind, length, content = _tag(read, order)
    dtype = np.dtype(order + _NUMBERS.get(kind, "V1"))
    if dtype.kind == "V" or length != count * dtype.itemsize:
        raise EOFError(f"y has {length:,} bytes of data of type {kind} for {count:,} labels")
    return np.frombuffer(read(length) if content is None else content, dtype)


def _check_count(path: Path, name: str, count: int) -> None:
    if not 0 < count <= MOST_IMAGES:
        raise DataError(
            f"{path}: {name} announces {count:,} images, SVHN's largest file has {MOST_IMAGES:,}; fetch it again"
        )


def _small(read: Read, order: str, most: int) -> bytes:
    """The data of a sub-element of at most this many bytes, and past its padding."""
    _, length, content = _tag(read, order)
    if content is not None:
        return content
    if length > most:
        raise EOFError(f"a part of an array's head announces {length:,} bytes, at most {most} are possible")
    return read(length + -length % 8)[:length]


def _tag(read: Read, order: str) -> tuple[int, int, bytes | None]:
    """Type and length of an element, and its data where that is in the tag, as up to 4 bytes may be."""
    tag = read(8)
    kind, length = struct.unpack(f"{order}II", tag)
    if kind >> 16:
        length = kind >> 16
        if length > 4:
            raise EOFError(f"a tag announces {length} bytes in 4")
        return kind & 0xFFFF, length, tag[4 : 4 + length]
    return kind, length, None


def _stored(file: io.BufferedReader) -> Read:
    """A reader of uncompressed data."""

    def read(size: int) -> bytes:
        content = file.read(size)
        if len(content) < size:
            raise EOFError(f"it ends {size - len(content):,} bytes early")
        return content

    return read


def _inflated(file: io.BufferedReader, left: int) -> Read:
    """Unpack a zlib stream of `left` bytes as it is read."""
    unpacker, waiting = zlib.decompressobj(), b""

    def read(size: int) -> bytes:
        nonlocal left, waiting
        content = bytearray()
        while len(content) < size:
            if not waiting and left:
                waiting = _stored(file)(min(left, _PIECE))
                left -= len(waiting)
            piece = unpacker.decompress(waiting, size - len(content))
            waiting = unpacker.unconsumed_tail
            if not piece and (unpacker.eof or not (waiting or left)):
                raise EOFError(f"a packed array ends {size - len(content):,} bytes early")
            content += piece
        return bytes(content)

    return read
