"""The embedded digits: what a person expects of them, and that nothing else passes for them."""

import gzip
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from torch_dcl.data import mnist, mnist_excerpt

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("split", "per_class"), [("train", 600), ("test", 100)])
def test_every_class_has_equally_many_digits(split, per_class):
    images, labels = mnist_excerpt(split)
    assert images.shape == (10 * per_class, 28, 28)
    assert images.dtype == torch.uint8
    assert labels.dtype == torch.int64
    assert labels.bincount().tolist() == [per_class] * 10


@pytest.mark.parametrize("split", ["train", "test"])
def test_classes_are_mixed_to_the_end(split):
    _, labels = mnist_excerpt(split)
    # A tenth of the digits, at the front, in the middle and at the end: each class there, none with half of them.
    for part in labels.split(len(labels) // 10):
        counts = part.bincount(minlength=10)
        assert counts.min() > 0
        assert counts.max() < len(part) / 3


def test_no_digit_is_there_twice_and_none_is_in_both_splits():
    train, _ = mnist_excerpt("train")
    test, _ = mnist_excerpt("test")
    together = torch.cat([train, test]).flatten(1)
    assert len(together.unique(dim=0)) == 7000


def test_images_are_digits_with_their_labels():
    train, train_labels = mnist_excerpt("train")
    test, test_labels = mnist_excerpt("test")
    assert train.min() == 0
    assert train.max() == 255
    # The mean of MNIST is 33.3 of 255. Ink is in the middle, as in all of MNIST: the outermost pixels are blank.
    assert train.float().mean().item() == pytest.approx(33.3, abs=1.5)
    assert train[:, 0].float().mean() < 0.1
    # The nearest class mean is right for about 82 % of the MNIST test set; wrong labels would give 10 %.
    means = torch.stack([train[train_labels == digit].float().flatten(1).mean(0) for digit in range(10)])
    nearest = torch.cdist(test.float().flatten(1), means).argmin(1)
    assert (nearest == test_labels).float().mean() > 0.75


def test_every_call_gives_tensors_of_its_own():
    images, labels = mnist_excerpt("test")
    images.zero_()
    labels.zero_()
    again, again_labels = mnist_excerpt("test")
    assert again.any()
    assert again_labels.any()


@pytest.mark.parametrize("split", ["val", "Train", ""])
def test_a_wrong_split_is_named_with_the_choices(split):
    with pytest.raises(ValueError, match=f"'train' or 'test', not '{split}'"):
        mnist_excerpt(split)


def test_an_altered_file_is_refused(tmp_path, monkeypatch):
    content = bytearray(mnist._FILE.read_bytes())
    content[len(content) // 2] ^= 1
    altered = tmp_path / "altered.npz"
    altered.write_bytes(content)
    monkeypatch.setattr(mnist, "_FILE", altered)
    with pytest.raises(ValueError, match=r"altered\.npz is damaged or was altered: .* install torch-dcl again"):
        mnist_excerpt("train")


def test_a_missing_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(mnist, "_FILE", tmp_path / "gone.npz")
    with pytest.raises(FileNotFoundError, match=r"gone\.npz is missing: install torch-dcl again"):
        mnist_excerpt("train")


def test_the_file_stays_small():
    assert mnist._FILE.stat().st_size < 1_500_000


@pytest.mark.slow
def test_the_import_stays_lean():
    program = (
        "import sys, torch_dcl.data; print(*sorted({'torchvision', 'matplotlib', 'timm', 'PIL'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []


# The script that draws it


@pytest.fixture(scope="module")
def maker():
    spec = importlib.util.spec_from_file_location("make_mnist_excerpt", ROOT / "tools" / "make_mnist_excerpt.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small_mnist(tmp_path):
    """A folder like MNIST's with images of 2 × 2; the pixels spell split and index."""
    generator = np.random.default_rng(0)
    for code, (prefix, count) in enumerate([("train", 7000), ("t10k", 1500)]):
        index = np.arange(count)
        images = np.stack([np.full(count, code), index // 256, index % 256, np.zeros(count)], 1).astype(np.uint8)
        labels = generator.permutation(index % 10).astype(np.uint8)
        for kind, array in (("images-idx3", images.reshape(-1, 2, 2)), ("labels-idx1", labels)):
            header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            (tmp_path / f"{prefix}-{kind}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))
        np.save(tmp_path / f"{prefix}.npy", labels)
    return tmp_path


def test_the_draw_is_balanced_and_keeps_images_with_labels(maker, small_mnist):
    arrays = maker.excerpt(small_mnist)
    for code, (split, prefix, per_class) in enumerate([("train", "train", 600), ("test", "t10k", 100)]):
        images, labels = arrays[f"{split}_images"].reshape(-1, 4), arrays[f"{split}_labels"]
        index = images[:, 1].astype(int) * 256 + images[:, 2]
        assert (images[:, 0] == code).all()
        assert len(set(index)) == 10 * per_class
        assert (labels == np.load(small_mnist / f"{prefix}.npy")[index]).all()
        assert np.bincount(labels).tolist() == [per_class] * 10


def test_the_same_input_gives_the_same_bytes(maker, small_mnist):
    assert maker.pack(maker.excerpt(small_mnist)) == maker.pack(maker.excerpt(small_mnist))


def test_too_few_digits_are_named(maker):
    with pytest.raises(ValueError, match="the test set has 3 digits of class 0, 4 are needed"):
        maker.choose(np.zeros(3, np.uint8), "test", 4)


def test_a_file_of_another_format_is_named(maker, small_mnist):
    (small_mnist / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"something else"))
    with pytest.raises(ValueError, match=r"t10k-labels-idx1-ubyte\.gz is not an idx file"):
        maker.excerpt(small_mnist)
