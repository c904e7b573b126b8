"""The file formats of the sources: idx, CIFAR's binary records, numpy's npy.

A reader takes one file and returns arrays, or raises a `DataError` that names the file, what is wrong and what to do.
None of them runs code from a file: npy is read without pickle. None trusts the sizes that a file declares: they are
checked against the file or a bound before anything is allocated.
"""

import gzip
import io
import math
import os
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torch_dcl.data.dataset import DataError

__all__ = ["read_bytes", "read_cifar", "read_idx", "read_npy"]

_GZIP = b"\x1f\x8b"
_LIMIT = 2**30  # bytes of an unpacked idx file; MNIST's largest has 47 million
_PIECE = 2**20
_MAX_NPY_HEADER = 10_000  # numpy's own limit, which it looks at after reading
_PIXELS = 3 * 32 * 32

Bytes = npt.NDArray[np.uint8]


def read_idx(path: Path, dimensions: int) -> Bytes:
    """Read an idx file of bytes, gzipped when its name ends in `.gz`: 3 dimensions for images, 1 for labels."""
    packed = path.suffix == ".gz"
    with path.open("rb") as file:
        if (file.read(2) == _GZIP) != packed:
            if packed:
                raise DataError(f"{path} is not gzipped although its name ends in .gz: rename it to {path.stem}")
            raise DataError(f"{path} is gzipped but its name does not end in .gz: rename it to {path.name}.gz")
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        if not packed:
            return _read_idx(path, file, dimensions, size)
        try:
            with gzip.GzipFile(fileobj=file) as unpacked:
                return _read_idx(path, unpacked, dimensions, None)
        except (EOFError, OSError, zlib.error) as error:
            raise DataError(f"{path} is truncated or damaged ({error}); fetch it again") from error


def _read_idx(path: Path, file: io.BufferedIOBase, dimensions: int, size: int | None) -> Bytes:
    """Read an idx file, whose size is not known where it is packed."""
    start = 4 + 4 * dimensions
    head = file.read(start)
    if head[:4] != bytes([0, 0, 8, dimensions]) or len(head) < start:
        raise DataError(
            f"{path} is not an idx file of bytes with {dimensions} dimension{'s' * (dimensions > 1)}: it starts with "
            f"{head[:4].hex(' ') or 'nothing'}, expected 00 00 08 {dimensions:02x}; fetch it again"
        )
    shape = [int(length) for length in np.frombuffer(head, ">u4", dimensions, 4)]
    expected = start + math.prod(shape)
    content = bytearray()
    if size in (None, expected):
        if expected > _LIMIT:
            raise DataError(
                f"{path} announces {shape}, {expected:,} bytes, and at most {_LIMIT:,} are read; save larger sets as "
                "arrays and load arrays:PATH"
            )
        # One byte more than expected detects a file that is too long.
        while piece := file.read(min(_PIECE, expected + 1 - start - len(content))):
            content += piece
        size = start + len(content)
    if size != expected:
        how, there = ("truncated", f"{size:,}") if size < expected else ("too long", f"{size:,} or more")
        raise DataError(
            f"{path} is {how}: its header announces {shape}, so {expected:,} bytes, and there are {there}; "
            "fetch it again"
        )
    return np.frombuffer(content, np.uint8).reshape(shape)


def read_bytes(path: Path, most: int) -> bytes:
    """Read a whole file of at most `most` bytes."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size > most:
            raise DataError(f"{path} has {size:,} bytes, at most {most:,} are expected; remove it, or fetch it again")
        file.seek(0)
        return file.read(size)


def read_cifar(name: str, content: bytes, label_bytes: int, classes: int) -> tuple[Bytes, Bytes]:
    """Read the records of a binary CIFAR file: images `[N, 3, 32, 32]` and labels `[N]`. The name is for errors.

    CIFAR-100 has two label bytes, of which the second is the fine label.
    """
    record = label_bytes + _PIXELS
    if not content or len(content) % record:
        packed = content[:2] == _GZIP
        raise DataError(
            f"{name} is not a whole number of records of {record} bytes: it has {len(content):,}; "
            + ("it is gzipped, unpack it first" if packed else "it is truncated or another file, fetch it again")
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, record)
    labels = records[:, label_bytes - 1].copy()
    if labels.max() >= classes:
        place = int(np.argmax(labels >= classes))
        raise DataError(
            f"{name}: record {place} has label {labels[place]}, there are {classes} classes (0 to {classes - 1}); "
            "it is damaged or another file, fetch it again"
        )
    return records[:, label_bytes:].reshape(-1, 3, 32, 32).copy(), labels


def read_npy(path: Path) -> npt.NDArray[np.generic]:
    """Open a numpy file as a memory map. Writing to the array changes it in memory and never on the disk."""
    with path.open("rb") as file:
        head = file.read(12)
    if head[:6] != b"\x93NUMPY":
        packed = {_GZIP: ": it is gzipped, unpack it first", b"PK": ": it is an npz archive, save one array a file"}
        raise DataError(f"{path} is not a numpy file{packed.get(head[:2], '; write it with numpy.save')}")
    # The length of the header has two bytes in version 1 of the format, four in later ones.
    length = int.from_bytes(head[8 : 10 if head[6:7] == b"\x01" else 12], "little")
    if length > _MAX_NPY_HEADER:
        raise DataError(
            f"{path} announces a header of {length:,} bytes, at most {_MAX_NPY_HEADER:,} are read; write it again"
        )
    try:
        array: npt.NDArray[np.generic] = np.load(path, mmap_mode="c", allow_pickle=False)
    except Exception as error:  # a header is an expression of Python, and a damaged one raises many kinds
        if "object" in str(error).lower():
            raise DataError(
                f"{path} holds Python objects, which would be run as pickle; save numbers instead"
            ) from error
        raise DataError(f"{path} is truncated or damaged ({error}); write it again") from error
    return array
