"""Large sets of images: folders and tar shards become prepared shards; every source gives the same batches."""

import hashlib
import io
import json
import shutil
import sys
import tarfile
from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tests.halves import slow
from typer.testing import CliRunner

from torch_dcl.cli.app import app
from torch_dcl.data import Batches, DataError, ImageNetBatches, open_images, prepare_imagenet
from torch_dcl.data.imagenet import gpu_decode, prepare
from torch_dcl.data.imagenet.batches import share

SIZE = 16
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    """7 + 3 images of each of two classes, of many sizes; one is grey, one CMYK, one of 16 bits."""
    rng = np.random.default_rng(0)
    root = tmp_path / "images"
    for split, count in (("train", 7), ("val", 3)):
        for name in ("n01", "n02"):
            place = root / split / name
            place.mkdir(parents=True)
            for number in range(count):
                image = Image.fromarray(rng.integers(0, 256, (20 + 7 * number, 31, 3), np.uint8))
                image.save(place / f"{number}.jpg", quality=95)
    Image.open(root / "train/n01/1.jpg").convert("L").save(root / "train/n01/1.jpg")
    Image.open(root / "train/n01/2.jpg").convert("CMYK").save(root / "train/n01/2.jpg")
    levels = rng.integers(0, 65536, (20, 30), np.uint16)
    Image.fromarray(levels).save(root / "val/n02/9.png")
    return root


def test_a_folder_below_the_users_home_is_found(folder, monkeypatch):
    """The shell does not expand it behind ``--set data=``."""
    monkeypatch.setenv("HOME", str(folder.parent))
    assert list(open_images("~/images", "train").classes) == ["n01", "n02"]


def expected(path, shape="squash"):
    """One image as Pillow and the definition of the shapes give it."""
    with Image.open(path) as file:
        if file.mode.startswith("I"):
            levels = np.round(np.asarray(file).astype(np.float64) * 255 / 65535)
            image = Image.fromarray(levels.astype(np.uint8)).convert("RGB")
        else:
            image = file.convert("RGB")
    if shape == "crop":
        side = min(image.size)
        left, top = (image.width - side) / 2, (image.height - side) / 2
        image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, (left, top, left + side, top + side))
    else:
        image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def files_of(root, split):
    return [
        (path, label) for label, name in enumerate(("n01", "n02")) for path in sorted((root / split / name).iterdir())
    ]


def hashes(place):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(place.iterdir())}


def pack(root, out, per_archive=4):
    """The images of a folder as WebDataset's tar files."""
    out.mkdir()
    for split in ("train", "val"):
        files = files_of(root, split)
        for number in range(0, len(files), per_archive):
            with tarfile.open(out / f"{split}-{number:06d}.tar", "w") as archive:
                for place, (path, label) in enumerate(files[number : number + per_archive]):
                    kind = ("cls", str(label)) if place % 2 else ("json", json.dumps({"label": label}))
                    for suffix, data in ((path.suffix[1:], path.read_bytes()), (kind[0], kind[1].encode())):
                        member = tarfile.TarInfo(f"{number + place:05d}.{suffix}")
                        member.size = len(data)
                        archive.addfile(member, io.BytesIO(data))
    return out


@pytest.mark.parametrize("shape", ["squash", "crop"])
def test_shards_hold_every_image_as_pillow_resizes_it(folder, tmp_path, shape):
    done = prepare_imagenet(folder, tmp_path / "out", size=SIZE, shape=shape, images_per_shard=4)
    assert (done.images, done.shards, done.written, done.skipped) == ({"train": 14, "val": 7}, 6, 6, ())
    for split in ("train", "val"):
        images = open_images(tmp_path / "out", split, size=SIZE, shape=shape)
        files = files_of(folder, split)
        assert images.labels.tolist() == [label for _, label in files]
        assert images.classes == ("n01", "n02")
        order = list(range(len(files)))[::-1]
        found = torch.cat([made.images for made in images.batches([order[:5], [], order[5:]], CPU, 2)])
        assert torch.equal(found, torch.stack([expected(files[i][0], shape) for i in order]))


def test_shards_are_the_same_bytes_however_they_were_made(folder, tmp_path):
    prepare_imagenet(folder, tmp_path / "one", size=SIZE, images_per_shard=4)
    whole = hashes(tmp_path / "one")
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    prepare_imagenet(moved, tmp_path / "two", size=SIZE, images_per_shard=4)
    for gone in ("imagenet.json", "train-00001.safetensors"):
        (tmp_path / "two" / gone).unlink()
    damaged = tmp_path / "two/val-00000.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    done = prepare_imagenet(moved, tmp_path / "two", size=SIZE, images_per_shard=4)
    assert done.written == 2
    assert hashes(tmp_path / "two") == whole
    assert set(json.loads((tmp_path / "one/imagenet.json").read_text())["splits"]) == {"train", "val"}


@pytest.mark.slow
def test_processes_write_the_same_shards(folder, tmp_path):
    for workers in (1, 2):
        prepare_imagenet(folder, tmp_path / str(workers), size=SIZE, images_per_shard=4, workers=workers)
    assert hashes(tmp_path / "1") == hashes(tmp_path / "2")


def test_tar_shards_are_read_as_they_are(folder, tmp_path):
    packed = pack(folder, tmp_path / "packed")
    (packed / "classes.json").write_text('["n01", "n02"]')
    files = files_of(folder, "train")
    images = open_images(packed, "train", size=SIZE)
    assert images.labels.tolist() == [label for _, label in files]
    found = next(images.batches([[12, 0]], CPU, 0)).images
    assert torch.equal(found, torch.stack([expected(files[12][0]), expected(files[0][0])]))
    prepare_imagenet(packed, tmp_path / "out", size=SIZE)
    shards = open_images(tmp_path / "out", "train", size=SIZE)
    again = next(shards.batches([[12, 0]], CPU, 0)).images
    assert torch.equal(found, again)


def test_every_source_gives_the_same_epoch(folder, tmp_path):
    prepare_imagenet(folder, tmp_path / "out", size=SIZE, images_per_shard=4)
    mapped = open_images(tmp_path / "out", "train", size=SIZE)
    sources = [
        open_images(folder, "train", size=SIZE),
        open_images(pack(folder, tmp_path / "tars"), "train", size=SIZE),
        mapped,
        mapped.resident(torch.device("cpu")),
    ]
    epochs = [
        list(ImageNetBatches(source, "train", 5, 3, resize=SIZE, crop=11, workers=2).epoch(1)) for source in sources
    ]
    assert len(epochs[0]) == 2
    for other in epochs[1:]:
        for (a, a_labels), (b, b_labels) in zip(epochs[0], other, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a_labels, b_labels)
    resident = sources[-1]
    plain = Batches(resident.images, resident.labels, 5, 3, flip=True, crop=11, normalise=lambda x: x.float())
    for (a, a_labels), (b, b_labels) in zip(
        ImageNetBatches(resident, "train", 5, 3, resize=SIZE, crop=11, mean=(0, 0, 0)).epoch(1),
        plain.epoch(1),
        strict=True,
    ):
        assert torch.equal(a, b)
        assert torch.equal(a_labels, b_labels)


@given(count=st.integers(0, 40), world=st.integers(1, 9), unit=st.integers(1, 3))
def test_ranks_share_a_batch_so_that_every_place_is_taken_once(count, world, unit):
    shares = [share(count, rank, world, unit) for rank in range(world)]
    assert [place for part in shares for place in part] == list(range(count))
    assert all(part.start % unit == 0 for part in shares if part)
    assert max(map(len, shares)) - min(map(len, shares)) <= 2 * unit - 1 if count else True


@pytest.mark.parametrize("split", ["train", "val"])
def test_the_shares_of_ranks_are_the_batches_of_one(folder, split):
    images = open_images(folder, split, size=SIZE)
    alone = list(ImageNetBatches(images, split, 4, resize=SIZE, crop=11, workers=0).pieces(2))
    ranks = [
        list(ImageNetBatches(images, split, 4, resize=SIZE, crop=11, workers=0, rank=rank, world=3).pieces(2))
        for rank in range(3)
    ]
    for number, whole in enumerate(alone):
        for field in ("images", "labels", "index"):
            parts = [getattr(pieces[number], field) for pieces in ranks]
            assert torch.equal(torch.cat(parts), getattr(whole, field))


@pytest.mark.parametrize("package", ["torchcodec", "torchvision"])
def test_a_gpus_decoder_is_near_to_pillows_and_leaves_the_rest_to_it(folder, package, monkeypatch):
    if package == "torchcodec":
        pytest.importorskip("torchcodec.decoders", reason="torchcodec is not installed")
    else:
        monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    gpu_decode._decoder.cache_clear()
    files = files_of(folder, "val")
    source = open_images(folder, "val", size=SIZE, decoder="gpu")
    found = next(source.batches([range(7)], CPU, 2)).images
    far = (found.int() - torch.stack([expected(path) for path, _ in files]).int()).abs()
    assert far.max() <= 3  # another resize rounds differently
    odd = open_images(folder, "train", size=SIZE, decoder="gpu")
    found = next(odd.batches([[2]], CPU, 0)).images
    assert torch.equal(found[0], expected(folder / "train/n01/2.jpg"))  # CMYK
    turned = Image.Exif()
    turned[0x112] = 6
    Image.open(folder / "val/n01/1.jpg").save(folder / "val/n01/1.jpg", exif=turned)
    found = next(source.batches([[1]], CPU, 0)).images
    assert torch.equal(found[0], expected(folder / "val/n01/1.jpg"))  # not turned
    (folder / "val/n01/0.jpg").write_bytes(b"\xff\xd8\xff no image")
    with pytest.raises(DataError, match=r"0\.jpg cannot be read as an image"):
        next(source.batches([[1, 0]], CPU, 0))


def corrupt(folder):
    """Truncate one image, and replace another by text."""
    path = folder / "train/n01/3.jpg"
    path.write_bytes(path.read_bytes()[:200])
    (folder / "train/n02/5.jpg").write_bytes(b"no image")


def test_corrupt_images_are_named_and_skipped_only_if_asked(folder, tmp_path):
    corrupt(folder)
    out = tmp_path / "out"
    result = CliRunner().invoke(
        app, ["data", "prepare", "imagenet", str(folder), str(out), "--size", "16", "--workers", "1"]
    )
    assert result.exit_code == 2
    assert "3.jpg cannot be read as an image" in result.output
    assert "5.jpg" in result.output
    assert "--skip-corrupt" in result.output
    assert not (out / "imagenet.json").exists()
    result = CliRunner().invoke(
        app,
        [
            "data",
            "prepare",
            "imagenet",
            str(folder),
            str(out),
            "--size",
            "16",
            "--workers",
            "1",
            "--skip-corrupt",
            "--json",
        ],
    )
    assert result.exit_code == 0, result.output
    done = json.loads(result.stdout)
    assert done["images"] == {"train": 12, "val": 7}
    assert done["skipped"] == ["train/n01/3.jpg", "train/n02/5.jpg"]
    assert "2 corrupt images were skipped" in open_images(out, "train", size=SIZE).about
    assert (prepare.say_skipped(1), prepare.say_skipped(1000)) == (
        "1 corrupt image was skipped",
        "1,000 corrupt images were skipped",
    )
    checked = CliRunner().invoke(app, ["data", "check", str(out)])
    assert (checked.exit_code, checked.output.startswith("sound")) == (0, True)


def test_a_class_without_a_readable_image_is_named(folder, tmp_path):
    for path in (folder / "val/n02").iterdir():
        path.write_bytes(b"no image")
    with pytest.raises(DataError, match=r"no image of 1 classes of val can be decoded \(n02\)"):
        prepare_imagenet(folder, tmp_path / "out", size=SIZE, skip_corrupt=True)


def test_empty_classes_and_classes_that_differ_are_named(folder, tmp_path):
    (folder / "val/n03").mkdir()
    with pytest.raises(DataError, match=r"same class folders as the training set; these differ: \['n03'\]"):
        prepare_imagenet(folder, tmp_path / "out")
    (folder / "train/n03").mkdir()
    with pytest.raises(DataError, match="train/n03 has no images"):
        prepare_imagenet(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_wrong_with_tar_shards_is_named(folder, tmp_path):
    packed = pack(folder, tmp_path / "packed")
    first = packed / "train-000000.tar"
    whole = first.read_bytes()
    for content, message in (
        (whole[:3000], "is truncated, or no tar file"),
        (b"no tar", "is truncated, or no tar file"),
        (b"no tar" + bytes(2000), "cannot be read as a tar file"),
        (whole.replace(b'{"label": 0}', b'{"class": 0}'), "holds no label but"),
        (whole.replace(b'{"label": 0}', b'{"label":-1}'), "label -1, which is no class"),
        (whole.replace(b"00000.json", b"00000.text"), r"00000\.jpg has no label"),
    ):
        first.write_bytes(content)
        with pytest.raises(DataError, match=message):
            open_images(packed, "train", size=SIZE)
    first.write_bytes(whole.replace(b'{"label": 0}', b'{"label": 3}'))
    with pytest.raises(DataError, match=r"1 of 4 classes have no image \(2\)"):
        open_images(packed, "train", size=SIZE)
    for path in packed.glob("val*"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match="none of 'val'"):
        open_images(packed, "val", size=SIZE)


def test_space_is_checked_before_anything_is_written(folder, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(prepare.shutil, "disk_usage", lambda _: usage(0, 0, 2**26 + 21 * (3 * 256 * 256 + 8) - 1))
    with pytest.raises(
        OSError,
        match=r"needs 3\.9 MiB for 2 shards and 64\.0 MiB beside them, and 67\.9 MiB are free; free space, .* size",
    ):
        prepare_imagenet(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(prepare.shutil, "disk_usage", lambda _: usage(0, 0, 2**26 + 21 * (3 * 256 * 256 + 8)))
    prepare_imagenet(folder, tmp_path / "out")


def test_a_folder_of_other_shards_is_left_alone(folder, tmp_path):
    prepare_imagenet(folder, tmp_path / "out", size=SIZE)
    before = hashes(tmp_path / "out")
    with pytest.raises(DataError, match="other images or with other settings; choose another folder"):
        prepare_imagenet(folder, tmp_path / "out", size=SIZE + 1)
    assert hashes(tmp_path / "out") == before
    with pytest.raises(
        DataError, match=r"was prepared with size 16, 32 is asked for; ask for the same \(--set resize=16\)"
    ):
        open_images(tmp_path / "out", "train", size=32)


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_other_images_of_the_same_names_and_sizes_are_another_set_and_a_copy_elsewhere_is_not(tmp_path, kind):
    def written(name, level):
        for split in ("train", "val"):
            for label in ("n01", "n02"):
                place = tmp_path / name / split / label
                place.mkdir(parents=True)
                for number in range(30):
                    Image.new("RGB", (4, 3), (level, number, 0)).save(place / f"{number}.bmp")
        return pack(tmp_path / name, tmp_path / f"{name}-tar") if kind == "tar" else tmp_path / name

    first, copy, other = written("a", 0), written("b", 0), written("c", 1)
    contents = [[open_images(place, split).content() for split in ("train", "val")] for place in (first, copy, other)]
    assert contents[0] == contents[1]
    assert not set(contents[0]) & set(contents[2])
    prepare_imagenet(first, tmp_path / "out", size=SIZE)
    with pytest.raises(DataError, match="was prepared from other images"):
        prepare_imagenet(other, tmp_path / "out", size=SIZE)


def test_a_shard_that_changed_is_found(folder, tmp_path):
    out = tmp_path / "out"
    prepare_imagenet(folder, out, size=SIZE, images_per_shard=4)
    shard = out / "train-00002.safetensors"
    whole = shard.read_bytes()
    changed = bytearray(whole)
    changed[-1] ^= 1
    shard.write_bytes(changed)
    images = open_images(out, "train", size=SIZE)
    images.check(0, 3), images.check(1, 3)
    with pytest.raises(DataError, match=r"train-00002\.safetensors is damaged or was altered"):
        images.check(2, 3)
    assert prepare_imagenet(folder, out, size=SIZE, images_per_shard=4).written == 1, "it replaces the damaged one"
    assert shard.read_bytes() == whole
    shutil.copy(out / "train-00001.safetensors", shard)
    with pytest.raises(
        DataError, match=r"train-00002\.safetensors is not the file that imagenet\.json lists|other tensors"
    ):
        open_images(out, "train", size=SIZE).check()
    shard.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"train-00002\.safetensors is truncated"):
        open_images(out, "train", size=SIZE)
    (out / "imagenet.json").unlink()
    with pytest.raises(DataError, match=r"holds shards without imagenet\.json"):
        open_images(out, "train", size=SIZE)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"torch_dcl_imagenet": 1}', slow('{"torch_dcl_imagenet": 2}')])
def test_a_damaged_list_of_shards_is_named(folder, tmp_path, text):
    prepare_imagenet(folder, tmp_path / "out", size=SIZE)
    (tmp_path / "out/imagenet.json").write_text(text)
    with pytest.raises(DataError, match=r"imagenet\.json is (damaged|of version 2)"):
        open_images(tmp_path / "out", "train", size=SIZE)


def test_a_list_of_shards_names_no_files_elsewhere(folder, tmp_path):
    prepare_imagenet(folder, tmp_path / "out", size=SIZE)
    file = tmp_path / "out/imagenet.json"
    file.write_text(file.read_text().replace("train-00000", "../train-00000"))
    with pytest.raises(DataError, match="damaged"):
        open_images(tmp_path / "out", "train", size=SIZE)


def test_synthetic_images_are_the_same_everywhere_and_tell_their_class():
    images = open_images("synthetic", "train", size=SIZE, classes=5, images=20)
    assert images.images.shape == (20, 3, SIZE, SIZE)
    assert images.labels.tolist() == [i % 5 for i in range(20)]
    means = images.images.float().mean((2, 3))
    assert (means[0] - means[5]).abs().max() < 20 < (means[0] - means[1]).abs().max()
    assert int(images.images.long().sum()) == int(
        open_images("synthetic", "train", size=SIZE, classes=5, images=20).images.long().sum()
    )


def test_a_few_of_each_class_and_wrong_arguments(folder, tmp_path):
    done = prepare_imagenet(folder, tmp_path / "out", size=SIZE, per_class=2)
    assert done.images == {"train": 4, "val": 4}
    for options, message in (
        (["--size", "0"], "--size must be at least 1"),
        (["--shape", "round"], "--shape must be one of squash, crop"),
        (["--per-class", "0"], "--per-class must be at least 1"),
    ):
        result = CliRunner().invoke(app, ["data", "prepare", "imagenet", str(folder), str(tmp_path / "x"), *options])
        assert (result.exit_code, message in result.output) == (2, True), result.output
    result = CliRunner().invoke(app, ["data", "prepare", "imagenets", str(folder), str(tmp_path / "x")])
    assert (result.exit_code, "did you mean imagenet?" in result.output) == (2, True)
    result = CliRunner().invoke(app, ["data", "prepare", "imagenet", str(tmp_path / "gone"), str(tmp_path / "x")])
    assert (result.exit_code, "does not exist" in result.output) == (2, True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_gpu_gives_the_same_batches_from_every_source(folder, tmp_path):
    prepare_imagenet(folder, tmp_path / "out", size=SIZE, images_per_shard=4)
    mapped = open_images(tmp_path / "out", "train", size=SIZE)
    decoded = open_images(folder, "train", size=SIZE)
    here = list(ImageNetBatches(mapped, "train", 5, 3, resize=SIZE, crop=11, workers=0).epoch(1))
    for source in (mapped, mapped.resident(torch.device("cuda")), decoded):
        there = ImageNetBatches(source, "train", 5, 3, resize=SIZE, crop=11, workers=2, device="cuda")
        for (a, a_labels), (b, b_labels) in zip(here, there.epoch(1), strict=True):
            assert torch.equal(a, b.cpu())
            assert torch.equal(a_labels, b_labels.cpu())
    for split in ("train", "val"):  # a grey one, CMYK and 16 bits among them
        files = files_of(folder, split)
        by_gpu = open_images(folder, split, size=SIZE, decoder="gpu")
        found = next(by_gpu.batches([range(len(files))], torch.device("cuda"), 2)).images
        far = (found.cpu().int() - torch.stack([expected(path) for path, _ in files]).int()).abs()
        assert far.float().mean((1, 2, 3)).max() < 8  # nvJPEG upsamples colours differently
