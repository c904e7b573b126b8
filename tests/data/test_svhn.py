"""SVHN: files as MATLAB writes them, the paper's split, and the preprocessing against scipy."""

import gzip

import numpy as np
import pytest
import torch

from torch_dcl.data import DataError, load, svhn

scipy_io = pytest.importorskip("scipy.io", reason="SciPy is not installed")
RNG = np.random.default_rng(0)


def write_mat(path, labels, images=None, **more):
    """A file like the original: X of 32 × 32 × 3 × N, y of N × 1 from 1 to 10."""
    labels = np.asarray(labels)
    images = RNG.integers(0, 256, (len(labels), 3, 32, 32), np.uint8) if images is None else images
    y = np.where(labels == 0, 10, labels).astype(np.uint8)[:, None]
    path.parent.mkdir(exist_ok=True)
    scipy_io.savemat(path, {"X": images.transpose(2, 3, 1, 0), "y": y, **more}, do_compression=True)
    return images


@pytest.fixture
def small(tmp_path, monkeypatch):
    """All three files, with 2 and 1 images of each class set aside."""
    monkeypatch.setattr(svhn, "PER_CLASS", {"train": 2, "extra": 1})
    labels = {"train": RNG.permutation(np.arange(43) % 10), "extra": np.arange(57) % 10, "test": np.arange(11) % 10}
    images = {split: write_mat(tmp_path / "svhn" / f"{split}_32x32.mat", labels[split]) for split in labels}
    return tmp_path, images, labels


def test_the_paper_s_split_of_train_and_extra(small):
    root, images, labels = small
    found = load("svhn", root=root)
    assert len(found.train_labels) == 43 + 57 - 30
    assert found.validation_labels.bincount().tolist() == [3] * 10
    assert (found.test_images.numpy() == images["test"]).all()
    assert found.test_labels.tolist() == labels["test"].tolist()
    assert found.source == f"SVHN, 70 + 11, validation 30, from {root / 'svhn'}"
    # Every image is there once, with its label.
    both = torch.cat([found.train_images, found.validation_images]).flatten(1)
    names = torch.cat([found.train_labels, found.validation_labels])
    given = {i.tobytes(): n for s in ("train", "extra") for i, n in zip(images[s], labels[s], strict=True)}
    assert {i.numpy().tobytes(): int(n) for i, n in zip(both, names, strict=True)} == given


def test_the_paper_s_counts():
    # 73,257 training and 531,131 extra images give 598,388 + 6,000.
    train, extra = torch.arange(73_257) % 10, torch.arange(531_131) % 10
    aside = (
        svhn.set_aside(train, svhn.PER_CLASS["train"], "train"),
        svhn.set_aside(extra, svhn.PER_CLASS["extra"], "extra"),
    )
    assert sum(int(part.sum()) for part in aside) == 6_000
    assert sum(int((~part).sum()) for part in aside) == 598_388
    assert train[aside[0]].bincount().tolist() == [400] * 10
    assert extra[aside[1]].bincount().tolist() == [200] * 10


def test_the_choice_depends_on_seed_part_and_index_alone():
    labels = torch.arange(2000) % 10
    chosen = svhn.set_aside(labels, 20, "train", 3)
    assert torch.equal(chosen, svhn.set_aside(labels, 20, "train", 3))
    assert not torch.equal(chosen, svhn.set_aside(labels, 20, "train", 4))
    assert not torch.equal(chosen, svhn.set_aside(labels, 20, "extra", 3))
    # Pinned: a change of the rule changes everybody's validation set.
    assert svhn.set_aside(labels, 1, "train", 0).nonzero().flatten().tolist() == PINNED


PINNED = [136, 165, 550, 678, 1094, 1181, 1262, 1607, 1649, 1653]


def test_without_the_extra_images(small):
    root, _, _ = small
    (root / "svhn/extra_32x32.mat").unlink()
    with pytest.raises(FileNotFoundError, match=r"svhn lacks extra_32x32\.mat; put them there; or pass extra=False"):
        load("svhn", root=root)
    found = load("svhn", root=root, extra=False)
    assert (len(found.train_labels), len(found.validation_labels)) == (23, 20)
    assert found.source.startswith("SVHN without extra, 23 + 11, validation 20")


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"put train_32x32\.mat, test_32x32\.mat, extra_32x32\.mat into .*svhn"):
        load("svhn", root=tmp_path)


def test_too_few_of_a_class_are_named(small, monkeypatch):
    monkeypatch.setattr(svhn, "PER_CLASS", {"train": 5, "extra": 1})
    with pytest.raises(DataError, match=r"train set has 4 images of class 3, 5 are needed"):
        load("svhn", root=small[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw[: len(raw) // 2], "truncated or damaged"),
        (lambda raw: raw[:200], "truncated or damaged|no arrays"),
        (gzip.compress, "not a MATLAB 5.0 file: it is gzipped"),
        (lambda _: b"", "not a MATLAB 5.0 file"),
        (lambda raw: b"\x89HDF\r\n\x1a\n" + raw, "not a MATLAB 5.0 file"),
    ],
)
def test_a_damaged_or_foreign_file_is_named(small, change, message):
    path = small[0] / "svhn/test_32x32.mat"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=rf"test_32x32\.mat.*({message})"):
        load("svhn", root=small[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"Z": np.zeros(3)}, "no arrays X and y"),
        ({"X": np.zeros((32, 32, 3, 2)), "y": np.ones((2, 1))}, "X must be uint8"),
        ({"X": np.zeros((28, 28, 3, 2), np.uint8), "y": np.ones((2, 1))}, "X must be uint8 of 32 × 32 × 3"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[0], [1]])}, "from 1 to 10"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[11], [1]])}, "from 1 to 10"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([[1.5], [1]])}, "from 1 to 10"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.ones((3, 1))}, "2 images but 3 labels"),
    ],
)
def test_other_arrays_are_named(small, content, message):
    scipy_io.savemat(small[0] / "svhn/test_32x32.mat", content)
    with pytest.raises(DataError, match=message):
        load("svhn", root=small[0])


# Preprocessing


def directly(image):
    """One image in float64, channel by channel, with scipy's two-dimensional convolution."""
    from scipy.signal import convolve2d

    x = image.astype(np.float64) - image.mean()
    norm = np.sqrt((x**2).sum())
    x = x / norm if norm >= 1e-8 else x
    at = np.arange(-3, 4)
    gaussian = np.exp(-(at[:, None] ** 2 + at[None] ** 2) / (2 * 2.0**2)) / (2 * np.pi * 2.0**2)
    gaussian /= gaussian.sum()
    out = np.empty_like(x)
    for channel in range(3):
        centred = x[channel] - convolve2d(x[channel], gaussian, mode="same")
        d = np.sqrt(convolve2d(x[channel] ** 2, gaussian, mode="same"))
        out[channel] = centred / np.maximum(np.maximum(d, d.mean()), 1e-4)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_preprocessing_is_the_direct_one_in_all_three_channels(dtype):
    images = RNG.integers(0, 256, (9, 3, 32, 32), np.uint8)
    images[1] //= 8
    images[2, 1] = 77  # a flat channel
    images[3] = 5  # a flat image
    images[4, :, :16] = 0
    found = svhn.preprocess(torch.from_numpy(images).to(dtype) if dtype == torch.float64 else torch.from_numpy(images))
    assert found.dtype == dtype
    expected = np.stack([directly(image) for image in images])
    tolerance = 1e-11 if dtype == torch.float64 else 2e-5
    np.testing.assert_allclose(found.numpy(), expected, rtol=tolerance, atol=tolerance)
    assert (found[3] == 0).all()


def test_an_image_does_not_depend_on_its_batch():
    images = torch.from_numpy(RNG.integers(0, 256, (5, 3, 32, 32), np.uint8))
    together = svhn.preprocess(images)
    alone = torch.cat([svhn.preprocess(image[None]) for image in images])
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_gpu_agrees():
    images = torch.from_numpy(RNG.integers(0, 256, (65, 3, 32, 32), np.uint8))
    torch.testing.assert_close(svhn.preprocess(images.cuda()).cpu(), svhn.preprocess(images), rtol=1e-5, atol=1e-5)
