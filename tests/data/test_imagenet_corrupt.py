"""Images that cannot be decoded on the fly: named, or skipped where that is asked for, the same way for every rank."""

import numpy as np
import pytest
import torch
from PIL import Image

from torch_dcl.data import DataError, ImageNetBatches, open_images, prepare_imagenet
from torch_dcl.data.imagenet import decoded

SIZE = 16
BAD = ("train/b/3.jpg", "train/b/4.jpg", "val/a/1.jpg")
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]


@pytest.fixture
def folder(tmp_path):
    """Six training images of each of two classes, and three to validate with; of these one class has corrupt ones."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 3)):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = np.full((30 + number, 40, 3), rng.integers(0, 256, 3), np.uint8)
                Image.fromarray(pixels).save(tmp_path / split / name / f"{number}.jpg", quality=95)
    whole = (tmp_path / BAD[0]).read_bytes()
    (tmp_path / BAD[0]).write_bytes(whole[: len(whole) // 2])
    (tmp_path / BAD[1]).write_bytes(b"no image")
    (tmp_path / BAD[2]).write_bytes(whole[:4] + bytes(200) + b"\xff\xd9")
    return tmp_path


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("decoder", ["pillow", "gpu"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_corrupt_image_is_named(folder, decoder, workers, device):
    images = open_images(folder, "train", size=SIZE, decoder=decoder)
    with pytest.raises(DataError, match=r"train/b/3\.jpg cannot be read as an image .*skip_corrupt"):
        list(images.batches([[0, 1], [8, 9]], torch.device(device), workers))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("decoder", ["pillow", "gpu"])
def test_the_next_image_takes_its_place_in_training_and_none_in_validation(folder, decoder, device):
    where = torch.device(device)
    train = open_images(folder, "train", size=SIZE, decoder=decoder, skip_corrupt=True)
    sound = open_images(folder, "train", size=SIZE, decoder=decoder)
    made = list(train.batches([[0, 9, 8], [10, 11]], where, 2))
    assert [list(batch.numbers) for batch in made] == [[0, 11, 8], [11, 11]]
    assert [tuple(batch.corrupt) for batch in made] == [("train/b/3.jpg", "train/b/4.jpg"), ("train/b/4.jpg",)]
    expected = next(sound.batches([[0, 11, 8]], where, 0)).images
    assert (made[0].images.int() - expected.int()).abs().max() <= 3  # Pillow decodes what takes a place
    val = open_images(folder, "val", size=SIZE, decoder=decoder, skip_corrupt=True)
    (batch,) = val.batches([[0, 1, 2, 3]], where, 0)
    assert (list(batch.numbers), tuple(batch.corrupt)) == ([0, 2, 3], ("val/a/1.jpg",))
    (folder / BAD[2]).write_bytes(b"")
    (nothing,) = val.batches([[1]], where, 0)
    assert tuple(nothing.corrupt) == ("val/a/1.jpg",)
    assert nothing.images.shape == (0, 3, SIZE, SIZE)


def test_ranks_and_epochs_that_begin_later_see_the_same_images(folder):
    def epoch(start=0, **share):
        images = open_images(folder, "train", size=SIZE, skip_corrupt=True)
        return list(ImageNetBatches(images, "train", 4, resize=SIZE, crop=11, workers=0, **share).pieces(1, start))

    whole, ranks = epoch(), [epoch(rank=rank, world=2) for rank in range(2)]
    assert {name for piece in whole for name in piece.corrupt} == {"train/b/3.jpg", "train/b/4.jpg"}
    for number, piece in enumerate(whole):
        parts = [pieces[number] for pieces in ranks]
        assert torch.equal(torch.cat([part.images for part in parts]), piece.images)
        assert torch.equal(torch.cat([part.labels for part in parts]), piece.labels)
        assert sum((part.corrupt for part in parts), ()) == piece.corrupt
    assert torch.equal(epoch(start=1)[0].images, whole[1].images)


def test_a_folder_of_corrupt_images_ends(folder, monkeypatch):
    monkeypatch.setattr(decoded, "TRIES", 2)
    images = open_images(folder, "train", size=SIZE, skip_corrupt=True)
    with pytest.raises(DataError, match=r"2 images in a row cannot be decoded, from train/b/3\.jpg on"):
        list(images.batches([[9]], torch.device("cpu"), 0))


def test_shards_that_were_prepared_before_a_corrupt_image_was_met_are_kept(folder, tmp_path_factory):
    place = tmp_path_factory.mktemp("shards")
    with pytest.raises(DataError, match=r"train/b/3\.jpg .*--skip-corrupt"):
        prepare_imagenet(folder, place, size=SIZE, images_per_shard=4)
    done = prepare_imagenet(folder, place, size=SIZE, images_per_shard=4, skip_corrupt=True)
    assert (done.shards, done.written, done.skipped) == (5, 3, BAD), "two were there"
    with pytest.raises(DataError, match=r"train/b/3\.jpg .*--skip-corrupt"):
        prepare_imagenet(folder, place, size=SIZE, images_per_shard=4)


def test_a_link_to_nothing_is_named_and_skipped_as_a_corrupt_image_is(folder, tmp_path_factory):
    place = tmp_path_factory.mktemp("shards")
    (folder / "train/a/9.jpg").symlink_to("gone.jpg")
    with pytest.raises(
        DataError, match=r"train/a/9\.jpg cannot be read as an image \(No such file or directory\); rep"
    ):
        prepare_imagenet(folder, place, size=SIZE, images_per_shard=4)
    assert "train/a/9.jpg" in prepare_imagenet(folder, place, size=SIZE, images_per_shard=4, skip_corrupt=True).skipped
    assert len(open_images(folder, "train", size=SIZE).content()) == 64
