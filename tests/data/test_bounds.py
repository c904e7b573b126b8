"""Files that announce more than they may have: refused by name before the memory is taken."""

import contextlib
import gzip
import io
import json
import struct
import tarfile
import tracemalloc
import zlib

import numpy as np
import pytest
import torch

from torch_dcl import files
from torch_dcl.data import DataError, Dataset, cifar, digits, download, load, read_prepared, write_prepared
from torch_dcl.data.mat import MOST_IMAGES, read_mat

RNG = np.random.default_rng(0)
ZEROS = gzip.compress(bytes(2**26))
FOUR_GIB = ZEROS * 64  # a gzip file may have many parts


@contextlib.contextmanager
def little_memory(mib=24):
    """What is done inside must not allocate more than so many MiB."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < mib * 2**20
    finally:
        tracemalloc.stop()


def head_of_idx(*shape):
    return bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)


def sparse(path, size, start=b""):
    """A file of any size that takes no room."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(start)
        file.truncate(size)


# idx


@pytest.fixture
def mnist(tmp_path):
    """MNIST with ten digits a split; the images to train on are the last to be written."""
    images = RNG.integers(100, 256, (10, 28, 28), np.uint8)
    for prefix in ("t10k", "train"):
        for name, array in (("labels-idx1", np.arange(10, dtype=np.uint8)), ("images-idx3", images)):
            path = tmp_path / f"{prefix}-{name}-ubyte.gz"
            path.write_bytes(gzip.compress(head_of_idx(*array.shape) + array.tobytes()))
    return path


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (
            (2**12, 2**10, 2**10),
            r"announces \[4096, 1024, 1024\], 4,294,967,312 bytes, and at most 1,073,741,824 are read",
        ),
        ((10, 28, 28), "too long: its header announces .10, 28, 28., so 7,856 bytes, and there are 7,857 or more"),
    ],
)
def test_a_gzipped_idx_file_of_four_gib(mnist, shape, message):
    mnist.write_bytes(gzip.compress(head_of_idx(*shape)) + FOUR_GIB)
    for read in (lambda: load("mnist", root=mnist.parent), lambda: digits.segment(mnist.parent, "train")):
        with little_memory(), pytest.raises(DataError, match=rf"train-images-idx3-ubyte\.gz (is )?{message}"):
            read()


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2**20, 2**10, 2**10), "1,099,511,627,792 bytes, and at most 1,073,741,824 are read"),
        ((10, 28, 28), "too long: .* 7,856 bytes, and there are 1,099,511,627,792"),
    ],
)
def test_an_idx_file_of_a_terabyte(mnist, shape, message):
    mnist.unlink()
    sparse(mnist.with_suffix(""), 2**40 + 16, head_of_idx(*shape))
    for read in (lambda: load("mnist", root=mnist.parent), lambda: digits.segment(mnist.parent, "train")):
        with little_memory(), pytest.raises(DataError, match=rf"train-images-idx3-ubyte .*{message}"):
            read()


# tar


def block(name, kind, size):
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    "start",
    [
        block("x", tarfile.XHDTYPE, 2**32),
        block("x", tarfile.XGLTYPE, 2**32),
        block("x", tarfile.GNUTYPE_LONGNAME, 2**32),
        block("x", tarfile.GNUTYPE_LONGLINK, 2**32),
        block("x", tarfile.GNUTYPE_SPARSE, 2**32),
        block("x", tarfile.REGTYPE, 2**32),
        block("cifar-100-binary/train.bin", tarfile.REGTYPE, 2**40),
    ],
    ids=["pax", "global", "name", "link", "sparse", "file", "wanted"],
)
def test_an_archive_whose_member_announces_four_gib(tmp_path, start):
    path = tmp_path / "cifar-100-binary.tar.gz"
    path.write_bytes(gzip.compress(start) + FOUR_GIB)
    with (
        little_memory(),
        pytest.raises(DataError, match=r"tar\.gz is far larger .* announce [\d,]+ bytes, at most 184,9"),
    ):
        load("cifar100", root=tmp_path)


def test_an_archive_of_extended_headers_is_read(tmp_path, monkeypatch):
    wanted = {"set/train.bin": RNG.bytes(1000), "set/test.bin": RNG.bytes(1024)}
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz", format=form) as archive:
            for name, content in {
                "a" * 90: b"",
                **wanted,
                ("ü" if form != tarfile.USTAR_FORMAT else "u") * 70: b"x",
            }.items():
                info = tarfile.TarInfo(f"{name}{name}" if len(name) > 60 and form != tarfile.USTAR_FORMAT else name)
                info.size, info.mtime = len(content), 1.5
                archive.addfile(info, io.BytesIO(content))
            folder = tarfile.TarInfo("set")
            folder.type = tarfile.DIRTYPE
            archive.addfile(folder)
        path = tmp_path / "a.tar.gz"
        path.write_bytes(buffer.getvalue())
        assert download.read_members(path, {name: len(content) for name, content in wanted.items()}) == wanted


def test_binary_files_of_a_terabyte(tmp_path):
    for file in (*cifar.CIFAR["cifar10"].train, *cifar.CIFAR["cifar10"].test):
        (tmp_path / file).write_bytes(bytes(3073))
    sparse(tmp_path / "data_batch_2.bin", 3073 * 2**28)
    with (
        little_memory(),
        pytest.raises(DataError, match=r"data_batch_2\.bin has 824,902,156,288 bytes, at most 178,956,970"),
    ):
        load("cifar10", root=tmp_path)


# mat


def element(kind, content, order="<"):
    return struct.pack(f"{order}II", kind, len(content)) + content + bytes(-len(content) % 8)


def array_head(name, shape, mx, order="<"):
    parts = struct.pack(f"{order}II", mx, 0), struct.pack(f"{order}{len(shape)}i", *shape), name
    return b"".join(element(kind, part, order) for kind, part in zip((6, 5, 1), parts, strict=True))


def matrix(name, shape, mx, mi, content, order="<"):
    return element(14, array_head(name, shape, mx, order) + element(mi, content, order), order)


def mat(*elements, order="<"):
    return (
        b"MATLAB 5.0 MAT-file".ljust(124)
        + struct.pack(f"{order}H", 0x100)
        + (b"IM" if order == "<" else b"MI")
        + b"".join(elements)
    )


def packed(start, zeros=2**32):
    """An element whose zlib stream is `start` and gigabytes of zeros."""
    packer = zlib.compressobj(9)
    content = packer.compress(start) + packer.flush(zlib.Z_FULL_FLUSH)
    part = packer.compress(bytes(2**26)) + packer.flush(zlib.Z_FULL_FLUSH)
    content += part * (zeros // 2**26)
    return struct.pack("<II", 15, len(content)) + content


BIG = 2**32 - 8
X, Y = array_head(b"X", (32, 32, 3, 1), 9), array_head(b"y", (1, 1), 9)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (X + struct.pack("<II", 2, BIG), "X has 4,294,967,288 bytes of data for 1 images"),
        (Y + struct.pack("<II", 2, BIG), "y has 4,294,967,288 bytes of data of type 2 for 1 labels"),
        (array_head(b"X", (32, 32, 3, 10**6), 9), r"X announces 1,000,000 images, SVHN's largest file has 531,131"),
        (array_head(b"y", (2**16, 2**16), 9), r"y announces 4,294,967,296 images"),
        (array_head(b"X", (32, 32, 3, -1), 9), "X announces -1 images"),
        (X[:40] + struct.pack("<II", 1, BIG), "truncated or damaged .*announces 4,294,967,288 bytes, at most 64"),
        (X[:16] + struct.pack("<II", 5, BIG), "truncated or damaged .*announces 4,294,967,288 bytes, at most 128"),
        (struct.pack("<II", 6, BIG), "truncated or damaged .*announces 4,294,967,288 bytes, at most 8"),
        (struct.pack("<II", 6 + (5 << 16), 0), "truncated or damaged .*announces 5 bytes in 4"),
    ],
)
def test_a_mat_file_that_unpacks_to_four_gib(tmp_path, start, message):
    path = tmp_path / "test_32x32.mat"
    for content in (
        packed(struct.pack("<II", 14, BIG) + start),
        struct.pack("<II", 14, len(start) + 99) + start + bytes(99),
    ):
        path.write_bytes(mat(content))
        with little_memory(), pytest.raises(DataError, match=rf"test_32x32\.mat.*{message}"):
            read_mat(path)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(
    ("mx", "mi", "dtype"), [(9, 2, "u1"), (6, 2, "u1"), (6, 9, "f8"), (14, 12, "i8"), (12, 3, "i2")]
)
def test_labels_of_every_type_and_byte_order(tmp_path, order, mx, mi, dtype):
    images = RNG.integers(0, 256, (2000, 3, 32, 32), np.uint8)
    labels = RNG.integers(1, 11, 2000)
    content = mat(
        matrix(b"note", (3,), 4, 4, b"a\0b\0c\0", order),
        matrix(b"y", (2000, 1), mx, mi, labels.astype(order + dtype).tobytes(), order),
        matrix(b"X", (32, 32, 3, 2000), 9, 2, images.transpose(2, 3, 1, 0).tobytes("F"), order),
        order=order,
    )
    (tmp_path / "a.mat").write_bytes(content)
    found, names = read_mat(tmp_path / "a.mat")
    assert (found == images).all()
    assert (names == labels % 10).all()


def test_arrays_are_read_as_scipy_reads_them(tmp_path):
    scipy_io = pytest.importorskip("scipy.io", reason="SciPy is not installed")
    path = tmp_path / "a.mat"
    for count in (1, 3, 431):
        for compressed in (True, False):
            content = {
                "before": "text",
                "cells": np.array([["a", 1]], object),
                "nested": {"X": np.zeros(3), "y": 2},
                "X": RNG.integers(0, 256, (32, 32, 3, count), np.uint8),
                "empty": np.zeros((0, 0)),
                "y": RNG.integers(1, 11, (count, 1)).astype(float),
                "after": 1j,
            }
            scipy_io.savemat(path, content, do_compression=compressed)
            images, labels = read_mat(path)
            reference = scipy_io.loadmat(path)
            assert (images.transpose(2, 3, 1, 0) == reference["X"].reshape(32, 32, 3, count)).all()
            assert (labels == reference["y"].ravel() % 10).all()


def test_damaged_mat_files_raise_nothing_else(tmp_path):
    path = tmp_path / "a.mat"
    images = RNG.integers(0, 256, (32, 32, 3, 1), np.uint8)
    whole = mat(matrix(b"X", images.shape, 9, 2, images.tobytes("F")), matrix(b"y", (1, 1), 9, 2, b"\x05"))
    places = [*range(128, 200), *range(len(whole) - 70, len(whole))]
    for place in places:
        for value in (1, 255):
            path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
            with contextlib.suppress(DataError):
                read_mat(path)


def test_the_bound_is_the_largest_file_of_svhn():
    assert MOST_IMAGES == 531_131


# npy


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"\x93NUMPY\x02\0" + struct.pack("<I", 2**32 - 1), "a header of 4,294,967,295 bytes, at most 10,000"),
        (b"\x93NUMPY\x01\0" + struct.pack("<H", 9000) + b"-" * 8999 + b"1", "truncated or damaged"),
        (b"\x93NUMPY\x01\0" + struct.pack("<H", 9000) + b"(" * 9000, "truncated or damaged"),
        (b"\x93NUMPY\x01\0" + struct.pack("<H", 9000) + b"{'descr':" * 1000, "truncated or damaged"),
    ],
)
def test_the_header_of_a_numpy_file(tmp_path, start, message):
    for split in ("train", "test"):
        np.save(tmp_path / f"{split}_images.npy", np.zeros((3, 8, 8), np.uint8))
        np.save(tmp_path / f"{split}_labels.npy", np.arange(3))
    sparse(tmp_path / "test_images.npy", 2**33, start)
    with little_memory(), pytest.raises(DataError, match=rf"test_images\.npy .*{message}"):
        load(f"arrays:{tmp_path}")


# JSON

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("text", [DEEP, "[" + "1" * 5000 + "]", '["a", 1', "\ud800"])
def test_class_names_nested_deep_or_no_text(tmp_path, text):
    for split in ("train", "test"):
        np.save(tmp_path / f"{split}_images.npy", np.zeros((3, 8, 8), np.uint8))
        np.save(tmp_path / f"{split}_labels.npy", np.arange(3))
    (tmp_path / "classes.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(DataError, match=r"classes\.json is not JSON .*write a list of class names"):
        load(f"arrays:{tmp_path}")
    sparse(tmp_path / "classes.json", 2**36)
    with little_memory(), pytest.raises(DataError, match=r"classes\.json has 68,719,476,736 bytes, at most 16,777,216"):
        load(f"arrays:{tmp_path}")


def sealed_again(path, text, key="torch_dcl_data"):
    """A sealed file of one tensor, whose description is any text with room for a seal."""
    head = {"__metadata__": {key: text}, "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    content = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content + b"\0")
    found, place = files._seal(path)
    with path.open("r+b") as file:
        file.seek(place)
        file.write(found.encode())


SEAL = '"seal": "' + "0" * 64 + '"'


@pytest.mark.parametrize(
    "text",
    [
        '{"a": ' + DEEP + ", " + SEAL + "}",
        "[{" + SEAL + "}]",
        '{"a": {' + SEAL + "}}",
        SEAL,
        '{"a": ' + "1" * 5000 + ", " + SEAL + "}",
    ],
    ids=["deep", "list", "inside", "no JSON", "digits"],
)
def test_a_file_that_was_sealed_again_with_another_description(tmp_path, text):
    path = tmp_path / "a.safetensors"
    sealed_again(path, text)
    with pytest.raises(files.SealedError, match=r"a\.safetensors is no file of the kind torch_dcl_data"):
        files.read_sealed(path, "torch_dcl_data")
    with pytest.raises(DataError, match=r"a\.safetensors .* remove .* prepare it again"):
        read_prepared(path)


def test_another_kind_is_named(tmp_path):
    files.write_sealed(tmp_path / "a", "fleet", {"a": torch.zeros(1)}, {})
    with pytest.raises(files.SealedError, match="is no file of the kind checkpoint; the kind that it names: fleet"):
        files.read_sealed(tmp_path / "a", "checkpoint")


@pytest.mark.parametrize(
    "value", [None, 1, 1.5, "abc", True, [], [1], ["a", 1], [["a"]], {}, {"a": 1}, [None], "\ud800", [float("nan"), 1]]
)
@pytest.mark.parametrize("key", ["name", "classes", "mean", "std", "source", "version", "train_images", "test_labels"])
def test_prepared_data_sealed_again_with_other_types(tmp_path, key, value):
    images, labels = torch.zeros(3, 1, 4, 4, dtype=torch.uint8), torch.arange(3)
    path = tmp_path / "a.safetensors"
    write_prepared(Dataset("small", images, labels, images, labels, ("a", "b", "c"), "made here"), path)
    tensors, about = files.read_sealed(path, "torch_dcl_data")
    if key in tensors:
        tensors.pop(key)
    else:
        about[key] = value
    files.write_sealed(path, "torch_dcl_data", tensors, about)
    fits = {"name": isinstance(value, str), "source": isinstance(value, str), "version": value is True or value == 1}
    if fits.get(key):
        return
    with pytest.raises(DataError, match=rf"a\.safetensors .*({key}|class names).* prepare it again"):
        read_prepared(path)
