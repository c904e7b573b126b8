"""The sources: every format as its publisher has it, and what a person is told when a file is wrong."""

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from torch_dcl.data import DataError, cifar, download, load, sources
from torch_dcl.data.sources import places

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def nothing_at_hand(tmp_path, monkeypatch):
    """No data of this machine: an empty working folder, an empty cache, no variable."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCH_DCL_DATA", raising=False)


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def write_mnist(folder, train=30, test=20, packed=True):
    folder.mkdir(parents=True)
    arrays = {}
    for prefix, count in (("train", train), ("t10k", test)):
        arrays[f"{prefix}-images-idx3-ubyte"] = RNG.integers(0, 256, (count, 28, 28), np.uint8)
        arrays[f"{prefix}-labels-idx1-ubyte"] = (np.arange(count) % 10).astype(np.uint8)
    for name, array in arrays.items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / name).write_bytes(idx(array))
    return arrays


def records(count, name, seed=0):
    rng = np.random.default_rng(seed)
    classes = 10 if name == "cifar10" else 100
    labels = rng.integers(0, classes, count).astype(np.uint8)
    images = rng.integers(0, 256, (count, 3, 32, 32), np.uint8)
    columns = [labels[:, None], images.reshape(count, -1)]
    if name == "cifar100":
        columns.insert(0, (labels // 5)[:, None])
    return np.concatenate(columns, 1).tobytes(), images, labels


def write_cifar(folder, name, count=4):
    folder.mkdir(parents=True)
    parts = {}
    for seed, file in enumerate((*cifar.CIFAR[name].train, *cifar.CIFAR[name].test)):
        raw, images, labels = records(count, name, seed)
        (folder / file).write_bytes(raw)
        parts[file] = (images, labels)
    return parts


def write_arrays(folder, train, test, labels=None, dtype=np.uint8):
    folder.mkdir(parents=True, exist_ok=True)
    for split, images in (("train", train), ("test", test)):
        np.save(folder / f"{split}_images.npy", images)
        np.save(
            folder / f"{split}_labels.npy", (np.arange(len(images)) % 3 if labels is None else labels).astype(dtype)
        )


# MNIST


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("place", ["MNIST/raw", "mnist", "."])
def test_mnist_is_read_from_every_usual_place(tmp_path, place, packed):
    arrays = write_mnist(tmp_path / "root" / place, packed=packed)
    found = load("mnist", root=tmp_path / "root")
    assert found.train_images.shape == (30, 1, 28, 28)
    assert found.train_images.dtype == torch.uint8
    assert (found.test_images[:, 0].numpy() == arrays["t10k-images-idx3-ubyte"]).all()
    assert found.test_labels.tolist() == arrays["t10k-labels-idx1-ubyte"].tolist()
    assert found.classes == tuple("0123456789")
    assert found.source.startswith("MNIST, 30 + 20, from ")
    assert "unknown content: 30 + 20 images, and MNIST has 60,000 + 10,000" in found.source


def test_without_files_the_excerpt_takes_the_place_of_mnist_and_says_so(tmp_path):
    found = load("mnist")
    assert found.source.startswith("embedded excerpt of MNIST, 6,000 + 1,000; the whole set was not found in data, ")
    assert found.train_images.shape == (6000, 1, 28, 28)
    assert load("mnist-excerpt").source == "embedded excerpt of MNIST, 6,000 + 1,000"
    write_mnist(tmp_path / "data" / "MNIST" / "raw")
    assert load("mnist").source.startswith("MNIST, 30 + 20, from data")


def test_a_place_that_was_named_is_the_only_one(tmp_path):
    write_mnist(tmp_path / "data")
    with pytest.raises(FileNotFoundError, match=r"not found in .*elsewhere; put train-images-idx3-ubyte\.gz, .*MNIST"):
        load("mnist", root=tmp_path / "elsewhere")


def test_places_in_order(tmp_path, monkeypatch):
    assert places() == [Path("data"), tmp_path / "cache" / "torch_dcl"]
    monkeypatch.setenv("TORCH_DCL_DATA", str(tmp_path / "mine"))
    assert places()[0] == tmp_path / "mine"
    assert places(tmp_path / "root") == [tmp_path / "root"]


def test_a_missing_file_of_four_is_named_and_not_replaced_by_the_excerpt(tmp_path):
    write_mnist(tmp_path / "data" / "mnist")
    (tmp_path / "data/mnist/t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"mnist lacks t10k-labels-idx1-ubyte \(or the same with \.gz\)"):
        load("mnist")


WHOLE = idx(RNG.integers(0, 256, (30, 28, 28), np.uint8))


@pytest.mark.parametrize(
    ("suffix", "bytes_", "message"),
    [
        ("", WHOLE[:-1], "truncated: its header announces .30, 28, 28."),
        ("", WHOLE + b"x", "too long"),
        ("", WHOLE[:7], "not an idx file"),
        ("", b"", "starts with nothing"),
        ("", b"<html>not found</html>", "not an idx file"),
        ("", idx(np.zeros(30, np.uint8)), "3 dimensions"),
        ("", b"\x00\x00\x08\x03" + b"\xff" * 12, "truncated"),
        ("", gzip.compress(WHOLE), r"gzipped but its name does not end in \.gz: rename it to train-images"),
        (".gz", WHOLE, r"not gzipped although its name ends in \.gz"),
        (".gz", gzip.compress(WHOLE)[:-900], "truncated or damaged"),
        (".gz", gzip.compress(WHOLE)[:500] + b"x" * 500, "truncated or damaged"),
    ],
)
def test_a_wrong_idx_file_is_named_with_what_is_wrong(tmp_path, suffix, bytes_, message):
    write_mnist(tmp_path / "root")
    (tmp_path / "root/train-images-idx3-ubyte.gz").unlink()
    (tmp_path / "root" / f"train-images-idx3-ubyte{suffix}").write_bytes(bytes_)
    with pytest.raises(DataError, match=f"train-images-idx3-ubyte.*{message}"):
        load("mnist", root=tmp_path / "root")


def test_labels_out_of_range_and_counts_that_differ_are_named(tmp_path):
    write_mnist(tmp_path / "root", packed=False)
    labels = tmp_path / "root/train-labels-idx1-ubyte"
    labels.write_bytes(idx(np.full(30, 10, np.uint8)))
    with pytest.raises(DataError, match=r"mnist, train split: label 10 is out of range, there are 10 classes"):
        load("mnist", root=tmp_path / "root")
    labels.write_bytes(idx(np.zeros(29, np.uint8)))
    with pytest.raises(DataError, match="30 images but 29 labels"):
        load("mnist", root=tmp_path / "root")


# Known content


def test_a_copy_that_claims_to_be_whole_is_held_against_its_hash(tmp_path, monkeypatch):
    write_mnist(tmp_path / "root", packed=False)
    first = load("mnist", root=tmp_path / "root")
    splits = [first.splits["train"], first.splits["test"]]
    hashes, order = zip(*(sources.content_hashes(*split) for split in splits), strict=True)
    monkeypatch.setitem(sources.KNOWN, "mnist", sources.Known("MNIST", (30, 20), hashes, order))
    assert load("mnist", root=tmp_path / "root").source.endswith("(known content)")

    for file in ("train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        path = tmp_path / "root" / file
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(DataError, match=r"damaged or not MNIST: the SHA-256 of its content is"):
            load("mnist", root=tmp_path / "root")
        path.write_bytes(whole)

    for kind, dims in (("images-idx3", 3), ("labels-idx1", 1)):
        path = tmp_path / "root" / f"train-{kind}-ubyte"
        turned = np.frombuffer(path.read_bytes(), np.uint8, offset=4 + 4 * dims)
        path.write_bytes(idx(turned.reshape((30, 28, 28)[:dims])[::-1].copy()))
    assert load("mnist", root=tmp_path / "root").source.endswith("(known content in another order)")


def test_the_hash_is_what_its_text_says():
    import hashlib

    images = torch.from_numpy(RNG.integers(0, 256, (7, 3, 5, 4), np.uint8))
    labels = torch.tensor([0, 1, 2, 300, 4, 5, 65_535])
    pairs = [
        int(label).to_bytes(2, "little") + image.numpy().tobytes() for image, label in zip(images, labels, strict=True)
    ]
    each = [hashlib.sha256(pair).digest() for pair in pairs]
    content, order = sources.content_hashes(images, labels)
    assert order == hashlib.sha256(b"".join(each)).hexdigest()
    assert content == hashlib.sha256(b"".join(sorted(each))).hexdigest()
    mixed = torch.randperm(7)
    assert sources.content_hashes(images[mixed], labels[mixed])[0] == content


@pytest.mark.skipif("TORCH_DCL_TEST_DATA" not in os.environ, reason="TORCH_DCL_TEST_DATA names no folder of real data")
@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar100"])
def test_real_data_has_the_known_content(name):
    try:
        found = load(name, root=os.environ["TORCH_DCL_TEST_DATA"])
    except FileNotFoundError as error:
        pytest.skip(str(error))
    assert "(known content" in found.source


# CIFAR


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_binary_files_are_read(tmp_path, name):
    form = cifar.CIFAR[name]
    parts = write_cifar(tmp_path / "root" / form.folder, name)
    found = load(name, root=tmp_path / "root")
    assert (found.train_images.numpy() == np.concatenate([parts[file][0] for file in form.train])).all()
    assert found.train_labels.tolist() == np.concatenate([parts[file][1] for file in form.train]).tolist()
    assert (found.test_images.numpy() == parts[form.test[0]][0]).all()
    assert len(found.classes) == (10 if name == "cifar10" else 100)
    assert found.source.startswith(form.title)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw[:-1], "truncated or another file"),
        (lambda _: b"", "it has 0; it is truncated"),
        (gzip.compress, "it is gzipped, unpack it first"),
        (lambda raw: b"\x0b" + raw[1:], "record 0 has label 11, there are 10 classes"),
    ],
)
def test_a_wrong_bin_file_is_named_with_what_is_wrong(tmp_path, change, message):
    write_cifar(tmp_path / "root", "cifar10")
    path = tmp_path / "root/data_batch_3.bin"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=rf"data_batch_3\.bin.*{message}"):
        load("cifar10", root=tmp_path / "root")


def test_a_missing_batch_is_named(tmp_path):
    write_cifar(tmp_path / "root/cifar-10-batches-bin", "cifar10")
    (tmp_path / "root/cifar-10-batches-bin/data_batch_2.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks data_batch_2\.bin"):
        load("cifar10", root=tmp_path / "root")


def test_arrays_in_a_folder_of_that_name_are_read(tmp_path):
    images = RNG.integers(0, 256, (9, 32, 32, 3), np.uint8)
    write_arrays(tmp_path / "root/cifar100", images, images[:4])
    found = load("cifar100", root=tmp_path / "root")
    assert (found.train_images.permute(0, 2, 3, 1).numpy() == images).all()
    assert found.classes[:2] == ("apple", "aquarium_fish")
    assert "as arrays" in found.source


def small_form(monkeypatch):
    """CIFAR-100's archive with four training and three test images."""
    import dataclasses

    form = dataclasses.replace(cifar.CIFAR["cifar100"], records=(4, 3))
    monkeypatch.setitem(cifar.CIFAR, "cifar100", form)
    return form


def tar(members):
    """An archive of (name, content, or the type of a link)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, what in members:
            info = tarfile.TarInfo(name)
            if what in (tarfile.SYMTYPE, tarfile.LNKTYPE):
                info.type, info.linkname = what, "/etc/passwd"
                archive.addfile(info)
            else:
                info.size = len(what)
                archive.addfile(info, io.BytesIO(what))
    return buffer.getvalue()


TRAIN, TEST = records(4, "cifar100")[0], records(3, "cifar100")[0]
GOOD = [("cifar-100-binary/train.bin", TRAIN), ("cifar-100-binary/test.bin", TEST)]


def test_an_archive_is_read_without_being_unpacked(tmp_path, monkeypatch):
    small_form(monkeypatch)
    (tmp_path / "cifar-100-binary.tar.gz").write_bytes(tar([("../evil", b"x"), *GOOD, ("cifar-100-binary/x", b"y")]))
    found = load("cifar100", root=tmp_path)
    assert found.train_images.shape == (4, 3, 32, 32)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cifar-100-binary.tar.gz"]
    assert not (tmp_path.parent / "evil").exists()


@pytest.mark.parametrize(
    ("bytes_", "message"),
    [
        (tar(GOOD[:1]), "lacks cifar-100-binary/test.bin"),
        (tar([("cifar-100-binary/train.bin", tarfile.SYMTYPE), GOOD[1]]), "train.bin is not a regular file"),
        (tar([("cifar-100-binary/train.bin", tarfile.LNKTYPE), GOOD[1]]), "train.bin is not a regular file"),
        (tar([("cifar-100-binary/train.bin", TRAIN[:-1]), GOOD[1]]), "has 12,295 bytes, expected 12,296"),
        (tar([GOOD[0], GOOD[0], GOOD[1]]), "train.bin twice"),
        (tar([(f"f{n}", b"") for n in range(1100)]), "far larger"),
        (tar(GOOD)[:9000], "whole gzipped tar archive|lacks"),
        (b"<html>", "not a whole gzipped tar archive"),
        (TRAIN, "not a whole gzipped tar archive"),
    ],
    ids=["missing", "symlink", "hardlink", "size", "twice", "many", "truncated", "html", "bin"],
)
def test_an_archive_that_is_not_as_expected_is_refused(tmp_path, monkeypatch, bytes_, message):
    small_form(monkeypatch)
    (tmp_path / "cifar-100-binary.tar.gz").write_bytes(bytes_)
    with pytest.raises(DataError, match=message):
        load("cifar100", root=tmp_path)


# Download, with torchvision's helper replaced: no test needs a network


@pytest.fixture
def remote(monkeypatch):
    """Addresses that were asked for; what they give is set by the test, by file name."""
    asked, files = [], {}

    def download_url(url, root, filename=None, md5=None):
        asked.append(url)
        what = files.get(url.rsplit("/", 1)[1], OSError("no route to host"))
        if isinstance(what, Exception):
            (Path(root) / filename).write_bytes(b"half")
            raise what
        (Path(root) / filename).write_bytes(what)

    monkeypatch.setattr("torchvision.datasets.utils.download_url", download_url)
    return asked, files


def test_a_download_is_unpacked_and_read(tmp_path, monkeypatch, remote):
    asked, files = remote
    small_form(monkeypatch)
    files["cifar-100-binary.tar.gz"] = tar(GOOD)
    found = load("cifar100", download=True)
    assert asked == ["https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"]
    place = tmp_path / "cache/torch_dcl"
    assert sorted(str(path.relative_to(place)) for path in place.rglob("*.*")) == [
        "cifar-100-binary.tar.gz", "cifar-100-binary/test.bin", "cifar-100-binary/train.bin",
    ]  # fmt: skip
    assert found.train_images.shape == (4, 3, 32, 32)


def test_mnist_tries_the_next_mirror_and_keeps_what_is_there(tmp_path, monkeypatch, remote):
    asked, files = remote
    write_mnist(tmp_path / "made")
    files |= {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    assert load("mnist", root=tmp_path / "root", download=True).source.startswith("MNIST, 30 + 20")
    assert len(asked) == 4
    asked.clear()
    files.clear()
    with pytest.raises(OSError, match=r"put train-images-idx3-ubyte\.gz, .* into .*other/MNIST/raw"):
        load("mnist", root=tmp_path / "other", download=True)
    assert len(asked) == 2  # both mirrors
    assert list((tmp_path / "other").rglob("*.gz")) == []


@pytest.mark.parametrize("error", [OSError("no space left"), RuntimeError("File not found or corrupted.")])
def test_a_failed_download_says_what_to_put_where_and_leaves_nothing(tmp_path, remote, error):
    remote[1]["cifar-10-binary.tar.gz"] = error
    with pytest.raises(OSError, match=rf"{error}.*put cifar-10-binary\.tar\.gz into .*root"):
        load("cifar10", root=tmp_path / "root", download=True)
    assert list((tmp_path / "root").rglob("*")) == []


def test_a_file_in_the_way_of_a_download_is_named(tmp_path):
    pytest.importorskip("torchvision")
    (tmp_path / "x.gz").write_bytes(b"another")
    with pytest.raises(DataError, match=r"x\.gz is there but is not the published file .* remove it"):
        download.fetch(["http://nowhere/x.gz"], tmp_path / "x.gz", "0" * 32)


# Arrays


@pytest.mark.parametrize("shape", [(5, 3, 8, 9), (5, 8, 9, 3), (5, 8, 9), (5, 1, 8, 9), (5, 8, 9, 1)])
def test_arrays_of_every_layout_become_channels_first(tmp_path, shape):
    images = RNG.integers(0, 256, shape, np.uint8)
    write_arrays(tmp_path / "set", images, images[:2], dtype=np.int32)
    found = load(f"arrays:{tmp_path / 'set'}")
    channels = 3 if 3 in shape else 1
    assert found.shape == (channels, 8, 9)
    expected = (
        images.reshape(5, 8, 9, channels) if shape[1] == 8 else images.reshape(5, channels, 8, 9).transpose(0, 2, 3, 1)
    )
    assert (found.train_images.permute(0, 2, 3, 1).numpy() == expected).all()
    assert found.classes == ("0", "1", "2")
    assert found.source == f"arrays, 5 + 2, from {tmp_path / 'set'}"


def test_writing_to_the_tensors_never_reaches_the_file(tmp_path):
    images = RNG.integers(0, 256, (5, 8, 9), np.uint8)
    write_arrays(tmp_path / "set", images, images)
    load(f"arrays:{tmp_path / 'set'}").train_images.zero_()
    assert (np.load(tmp_path / "set/train_images.npy") == images).all()


def test_class_names_of_arrays(tmp_path):
    images = RNG.integers(0, 256, (5, 8, 9), np.uint8)
    write_arrays(tmp_path / "set", images, images)
    names = tmp_path / "set/classes.json"
    names.write_text(json.dumps(["a", "b", "c", "d"]))
    assert load(f"arrays:{tmp_path / 'set'}").classes == ("a", "b", "c", "d")
    names.write_text(json.dumps(["a", "b"]))
    with pytest.raises(DataError, match=r"label 2 is out of range, there are 2 classes"):
        load(f"arrays:{tmp_path / 'set'}")
    for wrong in ("{", "{}", "[1]"):
        names.write_text(wrong)
        with pytest.raises(DataError, match=r"classes\.json"):
            load(f"arrays:{tmp_path / 'set'}")


IMAGES = RNG.integers(0, 256, (5, 8, 9), np.uint8)


def npy(array, **options):
    buffer = io.BytesIO()
    np.save(buffer, array, **options)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("file", "bytes_", "message"),
    [
        ("train_images", npy(IMAGES)[:-1], "truncated or damaged"),
        ("train_images", npy(IMAGES)[:20], "truncated or damaged"),
        ("train_images", b"", "is not a numpy file"),
        ("train_images", gzip.compress(npy(IMAGES)), "gzipped, unpack it first"),
        ("train_images", b"PK\x03\x04....", "npz archive"),
        ("train_images", npy(np.array([{}], object), allow_pickle=True), "Python objects"),
        ("train_images", npy(IMAGES.astype(np.float32)), "must be uint8 .* not float32"),
        ("train_images", npy(IMAGES[0]), "must be uint8"),
        ("train_images", npy(np.zeros((5, 8, 9, 2), np.uint8)), "neither 1 nor 3 channels"),
        ("train_images", npy(np.zeros((5, 3, 9, 3), np.uint8)), "channels first or last"),
        ("train_images", npy(np.zeros((5, 8, 8), np.uint8)), "shape .1, 8, 9., those of the train split .1, 8, 8."),
        ("train_images", npy(IMAGES[:4]), "4 images but 5 labels"),
        ("train_labels", npy(np.zeros((5, 1), np.uint8)), "whole numbers in one dimension"),
        ("train_labels", npy(np.zeros(5)), "whole numbers in one dimension, not float64"),
        ("train_labels", npy(np.array([0, 1, -1, 1, 0])), "label -1 is out of range"),
        ("train_labels", npy(np.array([0, 1, 2**40, 1, 0])), "at most 65,535"),
    ],
)
def test_a_wrong_array_is_named_with_what_is_wrong(tmp_path, file, bytes_, message):
    write_arrays(tmp_path / "set", IMAGES, IMAGES)
    (tmp_path / "set" / f"{file}.npy").write_bytes(bytes_)
    with pytest.raises(DataError, match=message):
        load(f"arrays:{tmp_path / 'set'}")


def test_a_pickle_is_not_run(tmp_path):
    import pickle

    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    write_arrays(tmp_path / "set", IMAGES, IMAGES)
    for trap in (pickle.dumps(Trap()), npy(np.array([Trap()], object), allow_pickle=True)):
        (tmp_path / "set/train_labels.npy").write_bytes(trap)
        with pytest.raises(DataError):
            load(f"arrays:{tmp_path / 'set'}")
    assert not (tmp_path / "sprung").exists()


def test_missing_arrays_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"lacks train_images\.npy, train_labels\.npy, test_images\.npy"):
        load(f"arrays:{tmp_path}")


# Folders


def picture(path, size=(10, 8), mode="RGB", value=100):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode in ("L", "P") else (value, 0, 255)[: len(mode)]).save(path)


@pytest.fixture
def folder(tmp_path):
    for split, count in (("train", 3), ("test", 2)):
        for label, name in enumerate(["cat", "dog"]):
            for number in range(count):
                picture(tmp_path / "pets" / split / name / f"{number}.png", value=50 * label + number)
    return tmp_path / "pets"


def test_a_folder_is_read_in_order_of_class_and_name(folder):
    found = load(f"folder:{folder}")
    assert found.train_images.shape == (6, 3, 8, 10)
    assert found.classes == ("cat", "dog")
    assert found.train_labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.train_images[:, 0, 0, 0].tolist() == [0, 1, 2, 50, 51, 52]
    assert found.train_images[:, 2].unique().tolist() == [255]
    assert found.source == f"image folder, 6 + 4, from {folder}"
    assert found.validation_images is None


def test_hidden_files_and_folders_are_no_images(folder):
    expected = load(f"folder:{folder}")
    for name in ("._0.png", ".ipynb_checkpoints/0-checkpoint.png"):
        hidden = next((folder / "train").iterdir()) / name
        hidden.parent.mkdir(exist_ok=True)
        hidden.write_bytes(b"resource fork")
    assert torch.equal(load(f"folder:{folder}").train_images, expected.train_images)


def test_val_is_the_test_set_or_the_validation_set(folder):
    (folder / "test").rename(folder / "val")
    assert len(load(f"folder:{folder}").test_labels) == 4
    for name in ("cat", "dog"):
        picture(folder / "test" / name / "0.png")
    found = load(f"folder:{folder}")
    assert len(found.test_labels) == 2
    assert len(found.validation_labels) == 4


def test_a_folder_is_resized_and_converted(folder):
    picture(folder / "train/cat/9.png", (31, 17), "L")
    picture(folder / "train/cat/8.png", (7, 5), "P")
    found = load(f"folder:{folder}", size=(6, 5), mode="L")
    assert found.train_images.shape == (8, 1, 6, 5)
    assert "resized to 6 × 5, converted to L" in found.source
    assert load(f"folder:{folder}", size=4, mode="RGB").shape == (3, 4, 4)


def test_a_folder_with_wrong_images_is_refused(folder):
    odd = folder / "test/dog/9.png"
    picture(odd, (10, 9))
    with pytest.raises(DataError, match=r"mixed size: .*0\.png is 8 × 10 .*9\.png is 9 × 10; pass size="):
        load(f"folder:{folder}")
    picture(odd, mode="L")
    with pytest.raises(DataError, match=r"mixed mode: .*0\.png is RGB, .*9\.png is L; pass mode="):
        load(f"folder:{folder}")
    odd.write_bytes((folder / "test/dog/0.png").read_bytes()[:40])
    with pytest.raises(DataError, match=r"9\.png cannot be read as an image .* repair or remove"):
        load(f"folder:{folder}")
    odd.unlink()
    for path in folder.rglob("*.png"):
        picture(path, mode="P")
    with pytest.raises(DataError, match=r"has mode P; pass mode="):
        load(f"folder:{folder}")


def test_a_folder_with_wrong_classes_is_refused(folder):
    (folder / "train/emu").mkdir()
    with pytest.raises(DataError, match=r"train/emu has no images"):
        load(f"folder:{folder}")
    picture(folder / "train/emu/0.png")
    with pytest.raises(DataError, match=r"test must have the same class folders .* differ: \['emu'\]"):
        load(f"folder:{folder}")


def test_folders_that_are_missing_are_named(tmp_path, folder):
    with pytest.raises(FileNotFoundError, match=r"gone does not exist"):
        load(f"folder:{tmp_path / 'gone'}")
    (folder / "test").rename(folder / "tset")
    with pytest.raises(FileNotFoundError, match=r"neither test/ nor val/"):
        load(f"folder:{folder}")
    (folder / "train").rename(folder / "trian")
    with pytest.raises(FileNotFoundError, match=r"pets/train does not exist"):
        load(f"folder:{folder}")


def test_options_are_checked(folder):
    with pytest.raises(ValueError, match="mode must be"):
        load(f"folder:{folder}", mode="CMYK")
    with pytest.raises(ValueError, match="size must be at least 1, not 0"):
        load(f"folder:{folder}", size=0)
    for wrong in (1.5, "8", True, (8, 8.0), (8, None)):
        with pytest.raises(TypeError, match="size must be a whole number, not"):
            load(f"folder:{folder}", size=wrong)
    for wrong in ((8,), (3, 8, 8), []):
        with pytest.raises(ValueError, match="size must be one whole number, or height and width, not"):
            load(f"folder:{folder}", size=wrong)
    for wrong in (1.5, "a", None, True):
        with pytest.raises(TypeError, match=f"seed must be a whole number, not {wrong!r}"):
            load("mnist-excerpt", seed=wrong)
    with pytest.raises(ValueError, match="size and mode are for folder:PATH"):
        load("mnist", size=28)


# What is said of a wrong name, and what an import costs


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("cifar-10", "cifar10"), ("MNIST", "mnist"), ("array:x", "arrays:x"), ("cifar10:x", "cifar10"), ("svnh", "svhn")],
)
def test_a_wrong_name_offers_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=f"no source '{name}'; did you mean '{nearest}'"):
        load(name)


def test_a_prefix_without_a_path_is_refused():
    with pytest.raises(ValueError, match="'folder:' names no path"):
        load("folder:")


@pytest.mark.slow
def test_the_import_stays_lean():
    program = (
        f"import sys; sys.path.insert(0, {str(Path(cifar.__file__).parents[2])!r}); import torch_dcl.data; "
        "print(*sorted({'torchvision', 'scipy', 'matplotlib', 'PIL', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.split() == []
