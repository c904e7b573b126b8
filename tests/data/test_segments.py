"""The digits that numbers are written with: where they come from, how they are cut out, and what is refused."""

import gzip

import pytest
import torch

from torch_dcl.data import digits, mnist_excerpt
from torch_dcl.data._segments import INK


def write_idx(path, array):
    content = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    content += array.numpy().tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def test_digits_are_cut_out_by_their_tight_boxes():
    images, labels = mnist_excerpt("test")
    segments = digits.segment((images, labels), "test")
    assert segments.count.tolist() == [100] * 10
    for k in range(0, 1000, 37):
        rows, columns = torch.where(images[segments.original[k]] >= INK)
        top, bottom, left, right = rows.min(), rows.max() + 1, columns.min(), columns.max() + 1
        assert (segments.height[k], segments.width[k]) == (bottom - top, right - left)
        expected = torch.zeros_like(segments.pixels[k])
        expected[: bottom - top, : right - left] = images[segments.original[k], top:bottom, left:right]
        assert torch.equal(segments.pixels[k], expected)
        assert labels[segments.original[k]] == k // 100


def test_train_and_test_are_written_with_their_own_digits_only(tmp_path):
    for prefix, grey in (("train", 100), ("t10k", 200)):
        images, labels = torch.full((10, 28, 28), grey, dtype=torch.uint8), torch.arange(10)
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte.gz", images)
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte", labels.to(torch.uint8))
    for split, grey in (("train", 100), ("test", 200)):
        images, _ = digits.generate("MNIST-II-01", split, mnist=tmp_path, indices=range(200))
        assert abs(images.flatten(1).amax(1).int() - grey).max() <= 3  # weights have 8 bits


@pytest.fixture
def folder(tmp_path):
    images, labels = mnist_excerpt("test")
    write_idx(tmp_path / "t10k-images-idx3-ubyte.gz", images)
    write_idx(tmp_path / "t10k-labels-idx1-ubyte.gz", labels.to(torch.uint8))
    return tmp_path


def test_a_folder_and_its_tensors_give_the_same_images(folder):
    indices = range(50)
    expected, _ = digits.generate("MNIST-II-01", "test", indices=indices)
    for mnist in (folder, str(folder), mnist_excerpt("test"), digits.segment(None, "test")):
        assert torch.equal(digits.generate("MNIST-II-01", "test", mnist=mnist, indices=indices)[0], expected)


def test_what_was_used_is_said(folder):
    assert "embedded excerpt" in digits.source()
    assert digits.source(folder) == f"the idx files in the folder {folder.name!r}"
    assert digits.source(mnist_excerpt("test")) == "1,000 digits given as tensors"
    assert "1,000 test digits" in digits.source(digits.segment(None, "test"))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x, y: (x.float(), y), TypeError, "must be uint8 images from 0 to 255, they are torch.float32"),
        (lambda x, y: (x[:, 1:], y), ValueError, r"must have shape \[n, 28, 28\], they have \[1000, 27, 28\]"),
        (lambda x, y: (x, y[1:]), ValueError, r"1000 test digits need as many labels, there are \[999\]"),
        (lambda x, y: (x, y.float()), TypeError, "labels of the test digits must be integers"),
        (lambda x, y: (x, y + 1), ValueError, "must be 0 to 9, they go from 1 to 10"),
        (lambda x, y: (x[y != 7], y[y != 7]), ValueError, "the test digits have none of class 7"),
        (lambda x, y: (x[:0], y[:0]), ValueError, "there are no test digits"),
        (lambda x, y: (x.index_fill(0, torch.tensor(5), 0), y), ValueError, "image 5 of the test digits has no"),
        (lambda x, y: (x.numpy(), y), TypeError, "must be two tensors, not ndarray, Tensor"),
        (lambda x, y: digits.segment((x, y), "train"), ValueError, "cut out for 'train', not for 'test'"),
        (lambda *pair: list(pair), TypeError, "mnist must be"),
    ],
)
def test_wrong_digits_are_named(change, error, message):
    with pytest.raises(error, match=message):
        digits.generate("MNIST-II-01", "test", mnist=change(*mnist_excerpt("test")))


def test_a_missing_idx_file_is_named(folder):
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks t10k-labels-idx1-ubyte \(or the same with \.gz\)"):
        digits.generate("MNIST-II-01", "test", mnist=folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-100], r"idx3-ubyte\.gz is truncated or damaged"),
        (lambda _: b"not gzip", r"idx3-ubyte\.gz is not gzipped although its name ends in \.gz"),
        (gzip.decompress, r"idx3-ubyte\.gz is not gzipped although its name ends in \.gz"),
        (lambda _: gzip.compress(b"foreign"), "not an idx file of bytes with 3 dimensions"),
        (lambda content: gzip.compress(gzip.decompress(content)[:9]), "not an idx file of bytes with 3 dimensions"),
        (
            lambda content: gzip.compress(gzip.decompress(content)[:-1]),
            r"announces \[1000, 28, 28\], so 784,016 bytes, and there are 784,015;",
        ),
        (
            lambda content: gzip.compress(gzip.decompress(content) + b"x"),
            "784,016 bytes, and there are 784,017 or more",
        ),
    ],
)
def test_a_wrong_idx_file_is_named(folder, change, message):
    path = folder / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        digits.generate("MNIST-II-01", "test", mnist=folder)


def test_a_plain_file_that_is_gzipped_is_named(folder):
    path = folder / "t10k-images-idx3-ubyte.gz"
    path.rename(path.with_suffix(""))
    with pytest.raises(ValueError, match=r"idx3-ubyte is gzipped but its name does not end in \.gz: rename it to"):
        digits.generate("MNIST-II-01", "test", mnist=folder)
