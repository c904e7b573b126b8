"""Prepared files: the same data back, and not one byte that can change unseen."""

import dataclasses
import errno
import os
import resource

import numpy as np
import pytest
import torch

from torch_dcl.data import DataError, Dataset, load, read_prepared, write_prepared


def small(validation=False, **changes):
    generator = torch.Generator().manual_seed(0)

    def split(count):
        return torch.randint(0, 256, (count, 3, 5, 4), dtype=torch.uint8, generator=generator), torch.arange(count) % 3

    held = split(4) if validation else (None, None)
    dataset = Dataset("small", *split(7), *split(5), ("a", "b", 'ü"\\'), "made by the test", *held)
    return dataclasses.replace(dataset, **changes)


@pytest.mark.parametrize("validation", [False, True])
def test_a_dataset_comes_back_as_it_was(tmp_path, validation):
    dataset = small(validation)
    sha256 = write_prepared(dataset, tmp_path / "small.safetensors")
    again = read_prepared(tmp_path / "small.safetensors")
    assert len(sha256) == 64
    assert (again.name, again.classes, again.source) == (dataset.name, dataset.classes, dataset.source)
    assert again.splits.keys() == dataset.splits.keys()
    for split, tensors in dataset.splits.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, again.splits[split], strict=True))
    assert again.statistics == dataset.statistics
    assert load(f"prepared:{tmp_path / 'small.safetensors'}").source == "made by the test"


def test_the_same_data_gives_the_same_file(tmp_path):
    first, second = tmp_path / "1", tmp_path / "2"
    assert write_prepared(small(), first) == write_prepared(small(), second)
    assert first.read_bytes() == second.read_bytes()
    assert write_prepared(small(source="elsewhere"), second) != write_prepared(small(), first)


def test_views_are_written_whole(tmp_path):
    turned = small().train_images.permute(0, 1, 3, 2)
    test = small().test_images.permute(0, 1, 3, 2)
    write_prepared(small(train_images=turned, test_images=test), tmp_path / "x")
    assert torch.equal(read_prepared(tmp_path / "x").train_images, turned)


def test_a_flipped_bit_anywhere_is_found(tmp_path):
    path = tmp_path / "small.safetensors"
    write_prepared(small(True), path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << rng.integers(8))]) + whole[place + 1 :])
        with pytest.raises(DataError, match=r"small\.safetensors.*remove .*prepare it again"):
            read_prepared(path)


def test_blanks_that_json_does_not_see_are_found_too(tmp_path):
    path = tmp_path / "x"
    for length in range(8):  # one of these has a padded header
        write_prepared(small(source="s" * length), path)
        whole = path.read_bytes()
        end = 8 + int.from_bytes(whole[:8], "little")
        if whole[end - 1 : end] == b" ":
            path.write_bytes(whole[: end - 1] + b"\n" + whole[end:])
            with pytest.raises(DataError, match="damaged or was altered"):
                read_prepared(path)
            return
    pytest.fail("no header was padded")


@pytest.mark.parametrize("length", [0, 7, 8, 100, 500, -1])
def test_a_truncated_file_is_found(tmp_path, length):
    path = tmp_path / "x"
    write_prepared(small(), path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DataError, match="remove"):
        read_prepared(path)
    path.write_bytes(path.read_bytes() + b"more")


def test_bytes_at_the_end_are_found(tmp_path):
    write_prepared(small(), tmp_path / "x")
    with (tmp_path / "x").open("ab") as file:
        file.write(b"\0")
    with pytest.raises(DataError, match="damaged or was altered"):
        read_prepared(tmp_path / "x")


def test_other_files_are_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(3)}, tmp_path / "other.safetensors")
    (tmp_path / "text").write_text("a long enough text that is no safetensors file")
    for name in ("other.safetensors", "text"):
        with pytest.raises(DataError, match=f"{name} is damaged or not a sealed file"):
            read_prepared(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="gone does not exist"):
        read_prepared(tmp_path / "gone")


def test_another_version_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("torch_dcl.data.dataset.VERSION", 2)
    write_prepared(small(), tmp_path / "x")
    monkeypatch.undo()
    with pytest.raises(DataError, match=r"has version 2 of the format, this release reads 1; remove"):
        read_prepared(tmp_path / "x")


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "x"
    write_prepared(small(), path)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # a write beyond 1000 bytes fails, as on a full disk
    try:
        with pytest.raises(OSError, match=r"cannot write .*x: .*(too large|No space).*free space"):
            write_prepared(small(True), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_a_read_only_folder_is_refused(tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    if os.access(folder, os.W_OK):
        pytest.skip("this user may write anywhere")
    with pytest.raises(PermissionError):
        write_prepared(small(), folder / "x")
    assert list(folder.iterdir()) == []


def test_a_read_only_disk_leaves_nothing(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system", str(tmp_path))

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with pytest.raises(OSError, match="Read-only file system"):
        write_prepared(small(), tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"the folder .*gone does not exist"):
        write_prepared(small(), tmp_path / "gone" / "x")


# The dataset itself


def test_statistics_are_those_of_the_pixels():
    mean, std = small().statistics
    pixels = small().train_images.double() / 255
    assert mean == pytest.approx(pixels.mean((0, 2, 3)).tolist(), abs=1e-12)
    assert std == pytest.approx(pixels.std((0, 2, 3), unbiased=False).tolist(), abs=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_images": torch.zeros(7, 3, 5, 4)}, "must be uint8"),
        ({"train_labels": torch.zeros(7, dtype=torch.int32)}, "must be int64"),
        ({"train_labels": torch.zeros(6, dtype=torch.int64)}, "7 images but 6 labels"),
        ({"test_labels": torch.full((5,), 3)}, "label 3 is out of range, there are 3 classes"),
        ({"test_labels": torch.full((5,), -1)}, "label -1 is out of range"),
        ({"test_images": torch.zeros(5, 1, 5, 4, dtype=torch.uint8)}, r"\(1, 5, 4\), those of the train split"),
        ({"test_images": torch.zeros(0, 3, 5, 4, dtype=torch.uint8), "test_labels": torch.arange(0)}, "is empty"),
        ({"classes": ("a", "b", "a")}, "class names must be unique"),
        ({"validation_labels": torch.arange(3)}, "validation needs both images and labels"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes, message):
    with pytest.raises(DataError, match=message):
        small(**changes)


def test_it_says_what_it_is():
    assert str(small()) == "made by the test; 3 classes, 3 × 5 × 4"
