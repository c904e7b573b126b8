"""The file formats of the sources: idx, CIFAR's binary records, MATLAB's mat, numpy's npy.

A reader takes one file and gives arrays, or a `DataError` that names the file, what is wrong and what to do. None of
them runs code from a file: npy is read without pickle, mat by scipy's reader of plain arrays.
"""

import gzip
import io
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torch_dcl.data.dataset import DataError

__all__ = ["read_cifar", "read_idx", "read_mat", "read_npy"]

_GZIP = b"\x1f\x8b"
_LIMIT = 2**31  # bytes of an unpacked idx file; MNIST's largest has 47 million
_PIXELS = 3 * 32 * 32

Bytes = npt.NDArray[np.uint8]


def read_idx(path: Path, dimensions: int) -> Bytes:
    """Read an idx file of unsigned bytes, gzipped when its name ends in `.gz`.

    Args:
        path: The file.
        dimensions: How many the array must have: 3 for images, 1 for labels.

    Returns:
        The array, a copy in memory.

    Raises:
        DataError: The file is truncated, too long, wrongly packed or of another format.
    """
    content = _unpacked(path)
    start = 4 + 4 * dimensions
    if content[:4] != bytes([0, 0, 8, dimensions]) or len(content) < start:
        raise DataError(
            f"{path} is not an idx file of bytes with {dimensions} dimension{'s' * (dimensions > 1)}: it starts with "
            f"{content[:4].hex(' ') or 'nothing'}, expected 00 00 08 {dimensions:02x}; fetch it again"
        )
    shape = [int(size) for size in np.frombuffer(content, ">u4", dimensions, 4)]
    expected = start + int(np.prod(shape, dtype=object))
    if len(content) != expected:
        how = "truncated" if len(content) < expected else "too long"
        raise DataError(
            f"{path} is {how}: its header announces {shape}, so {expected:,} bytes, and there are {len(content):,}; "
            "fetch it again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()


def read_cifar(name: str, content: bytes, label_bytes: int, classes: int) -> tuple[Bytes, Bytes]:
    """Read the records of a binary CIFAR file: one or two bytes of labels, then 3 × 32 × 32 pixels.

    Args:
        name: What to call the file in an error.
        content: All of its bytes.
        label_bytes: 1 for CIFAR-10; 2 for CIFAR-100, whose second byte is the fine label.
        classes: How many there are.

    Returns:
        Images `[N, 3, 32, 32]` and labels `[N]`.

    Raises:
        DataError: The file is empty, truncated, packed, or has a label that does not exist.
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


def read_mat(path: Path) -> tuple[Bytes, Bytes]:
    """Read a file of SVHN's cropped digits: X of 32 × 32 × 3 × N bytes, y of N labels from 1 to 10, where 10 is zero.

    Args:
        path: The file.

    Returns:
        Images `[N, 3, 32, 32]` and labels `[N]` from 0 to 9.

    Raises:
        DataError: The file is truncated, of another format, or does not hold such arrays.
        ModuleNotFoundError: scipy is not installed.
    """
    try:
        from scipy.io import loadmat  # noqa: PLC0415  (needed for this format alone)
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            f"scipy is needed to read {path}: install it with `pip install torch-dcl[svhn]`", name="scipy"
        ) from None
    with path.open("rb") as file:
        head = file.read(19)
    if head != b"MATLAB 5.0 MAT-file":
        packed = ": it is gzipped, unpack it first" if head[:2] == _GZIP else "; fetch it again"
        raise DataError(f"{path} is not a MATLAB 5.0 file{packed}")
    try:
        found = loadmat(path, variable_names=("X", "y"))
    except Exception as error:  # scipy raises many kinds on damaged files
        raise DataError(f"{path} is truncated or damaged ({type(error).__name__}: {error}); fetch it again") from error
    images, labels = found.get("X"), found.get("y")
    if images is None or labels is None:
        raise DataError(f"{path} has no arrays X and y: it is not one of SVHN's *_32x32.mat; fetch it again")
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or images.shape[:3] != (32, 32, 3):
        raise DataError(f"{path}: X must be uint8 of 32 × 32 × 3 × N, not {images.dtype} of {list(images.shape)}")
    images = images.reshape(32, 32, 3, -1)  # MATLAB drops a last dimension of 1
    labels = labels.reshape(-1)
    if not np.issubdtype(labels.dtype, np.number) or not ((labels >= 1) & (labels <= 10) & (labels % 1 == 0)).all():
        raise DataError(f"{path}: y must hold whole numbers from 1 to 10, where 10 stands for zero; fetch it again")
    if images.shape[3] != len(labels):
        raise DataError(f"{path}: {images.shape[3]:,} images but {len(labels):,} labels; fetch it again")
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), (labels % 10).astype(np.uint8)


def read_npy(path: Path) -> npt.NDArray[np.generic]:
    """Open a numpy file as a memory map. Writing to the array changes it in memory and never on the disk.

    Args:
        path: The file.

    Returns:
        The array.

    Raises:
        DataError: The file is truncated, packed, pickled, or of another format.
    """
    with path.open("rb") as file:
        head = file.read(6)
    if head != b"\x93NUMPY":
        packed = {_GZIP: ": it is gzipped, unpack it first", b"PK": ": it is an npz archive, save one array a file"}
        raise DataError(f"{path} is not a numpy file{packed.get(head[:2], '; write it with numpy.save')}")
    try:
        array: npt.NDArray[np.generic] = np.load(path, mmap_mode="c", allow_pickle=False)
    except (ValueError, EOFError, OSError, OverflowError) as error:
        if "object" in str(error).lower():
            raise DataError(
                f"{path} holds Python objects, which would be run as pickle; save numbers instead"
            ) from error
        raise DataError(f"{path} is truncated or damaged ({error}); write it again") from error
    return array


def _unpacked(path: Path) -> bytes:
    """The bytes of a file that is gzipped exactly when its name says so."""
    content = path.read_bytes()
    if path.suffix != ".gz":
        if content[:2] == _GZIP:
            raise DataError(f"{path} is gzipped but its name does not end in .gz: rename it to {path.name}.gz")
        return content
    if content[:2] != _GZIP:
        raise DataError(f"{path} is not gzipped although its name ends in .gz: rename it to {path.stem}")
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            unpacked = file.read(_LIMIT + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path} is truncated or damaged ({error}); fetch it again") from error
    if len(unpacked) > _LIMIT:
        raise DataError(f"{path} unpacks to more than {_LIMIT:,} bytes: it is not an idx file of this kind")
    return unpacked
