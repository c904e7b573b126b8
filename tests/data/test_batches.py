"""Batches: what each image becomes is a function of seed, epoch and index, and of nothing else."""

import hashlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from torch_dcl.data import Batches, DataError, ImageNetBatches, mnist_excerpt, svhn
from torch_dcl.data.batches import cut, mean_image
from torch_dcl.data.draws import below, draw

MASK = 2**64 - 1


def images_of(count, channels=3, height=32, width=32):
    images = torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8)
    return images, torch.arange(count) % 7


def plainly_drawn(seed, purpose, epoch, index):
    """splitmix64 in Python's whole numbers."""
    key = int.from_bytes(hashlib.sha256(f"{seed}|{epoch}|{purpose}".encode()).digest()[:8], "little")
    x = (index * 0x9E3779B97F4A7C15 + key) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def plainly_cut(image, index, seed, epoch, size, flip, pad):
    """One image: pad, crop, flip, with torch's own operations."""
    padded = F.pad(image[None].float(), (pad,) * 4, mode="reflect")[0] if pad else image.float()
    top, left = (
        (plainly_drawn(seed, what, epoch, index) >> 32) * (side - size + 1) >> 32
        for what, side in (("crop row", padded.shape[1]), ("crop column", padded.shape[2]))
    )
    piece = padded[:, top : top + size, left : left + size]
    return piece.flip(-1) if flip and plainly_drawn(seed, "flip", epoch, index) >= 2**63 else piece


# Draws


def test_draws_are_splitmix64():
    index = torch.tensor([0, 1, 2, 431, 1023, 2**40, 2**62])
    found = [number % 2**64 for number in draw(7, "test", 3, index).tolist()]
    assert found == [plainly_drawn(7, "test", 3, number) for number in index.tolist()]


def test_draws_are_uniform_and_purposes_differ():
    index = torch.arange(100_000)
    drawn = draw(0, "a", 0, index)
    # 9 boxes of 11,111 each: the standard deviation of a count is 99.
    assert (below(drawn, 9).bincount(minlength=9) - 100_000 / 9).abs().max() < 500
    for other in (draw(1, "a", 0, index), draw(0, "b", 0, index), draw(0, "a", 1, index)):
        assert abs(((drawn < 0) == (other < 0)).double().mean().item() - 0.5) < 0.01
    assert below(drawn, 1).max() == 0


# Training batches


@pytest.mark.parametrize(("pad", "crop"), [(4, None), (0, 24), (2, 31), (0, None), (0, 1)])
@pytest.mark.parametrize("flip", [True, False])
def test_flips_and_crops_are_the_plain_ones(pad, crop, flip):
    images, labels = images_of(23)
    batches = Batches(images, labels, 5, 11, flip=flip, pad=pad, crop=crop, drop_last=False)
    index = torch.tensor([3, 22, 0, 3])
    expected = torch.stack([plainly_cut(images[i], i, 11, 2, crop or 32, flip, pad) for i in index.tolist()])
    torch.testing.assert_close(batches.take(index, 2), expected / 255)


def test_an_image_does_not_depend_on_batch_size_or_order():
    images, labels = images_of(53, 1, 9, 9)
    seen = {}
    for batch in (1, 8, 53):
        batches = Batches(images, labels, batch, 5, flip=True, pad=2, drop_last=False)
        order = batches.order(4)
        made = torch.cat([some for some, _ in batches.epoch(4)])
        back = torch.empty_like(made)
        back[order] = made
        seen[batch] = back
    assert torch.equal(seen[1], seen[8])
    assert torch.equal(seen[1], seen[53])


def test_an_epoch_has_every_image_once_with_its_label_and_can_be_resumed():
    images, labels = images_of(41, 1, 4, 4)
    images[:, 0, 0, 0] = torch.arange(41, dtype=torch.uint8)
    batches = Batches(images, labels, 8, drop_last=False)
    assert len(batches) == 6
    parts = list(batches.epoch(0))
    which = torch.cat([some[:, 0, 0, 0] for some, _ in parts]).mul(255).round().long()
    assert which.sort().values.tolist() == list(range(41))
    assert torch.equal(torch.cat([names for _, names in parts]), labels[which])
    rest = list(batches.epoch(0, start=4))
    assert len(rest) == 2
    assert all(
        torch.equal(a, b) for one, two in zip(rest, parts[4:], strict=True) for a, b in zip(one, two, strict=True)
    )
    assert not torch.equal(batches.order(0), batches.order(1))
    assert not torch.equal(batches.order(0), Batches(images, labels, 8, 1).order(0))


@settings(max_examples=40)
@given(
    count=st.integers(1, 23), batch=st.integers(1, 9), at_once=st.integers(1, 30), start=st.integers(0, 5),
    train=st.booleans(), flip=st.booleans(), drop_last=st.booleans(),
)  # fmt: skip
def test_batches_made_together_are_those_made_one_by_one(count, batch, at_once, start, train, flip, drop_last):
    assume(count >= batch or not (train and drop_last))
    given = {"train": train, "flip": flip, "drop_last": drop_last, "crop": 5}
    images, labels = images_of(count, height=8, width=7)
    one_by_one, together = (Batches(images, labels, batch, seed=3, **given) for _ in range(2))
    together._at_once = at_once
    found, wanted = list(together.epoch(2, start)), list(one_by_one.epoch(2, start))
    assert len(found) == len(wanted) == max(0, len(together) - start)
    for (mine, mine_of), (theirs, theirs_of) in zip(found, wanted, strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(mine_of, theirs_of)


def test_the_last_batch():
    images, labels = images_of(10, 1, 4, 4)
    assert [len(names) for _, names in Batches(images, labels, 4)] == [4, 4]
    assert [len(names) for _, names in Batches(images, labels, 4, drop_last=False)] == [4, 4, 2]
    assert [len(names) for _, names in Batches(images, labels, 4, train=False)] == [4, 4, 2]
    assert len(Batches(images, labels, 4)) == 2


def test_the_same_bytes_on_every_machine():
    images, labels = mnist_excerpt("train")
    batches = Batches(images[:500, None], labels[:500], 500, 3, flip=True, pad=4)
    made, names = next(batches.epoch(2))
    content = made.mul(255).round().byte().numpy().tobytes() + names.numpy().tobytes()
    assert hashlib.sha256(content).hexdigest() == PINNED


PINNED = "d07b28fad80cdc92ce198970bbf6f0af4a10e153be21fe1446f89709cd9ad079"


def test_every_epoch_augments_anew():
    images, labels = images_of(200)
    batches = Batches(images, labels, 10, flip=True, pad=4)
    index = torch.arange(200)
    same = (batches.take(index, 0) == batches.take(index, 1)).flatten(1).all(1).sum()
    assert same < 10  # one in 162 by chance


# Values


def test_normalisation_in_one_step_is_the_usual_one():
    images, labels = images_of(6)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    made = next(iter(Batches(images, labels, 6, train=False, normalise=(mean, std))))[0]
    expected = (images / 255 - torch.tensor(mean).view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-6)
    half = Batches(images, labels, 6, train=False, normalise=(mean, std), dtype=torch.bfloat16)
    assert torch.equal(next(iter(half))[0], made.bfloat16())


def test_a_function_sees_whole_images_before_the_crop():
    images, labels = images_of(6)
    mean = mean_image(images)
    torch.testing.assert_close(mean, images.float().mean(0))
    made = next(iter(Batches(images, labels, 6, train=False, crop=24, normalise=lambda x: x.float() - mean)))[0]
    torch.testing.assert_close(made, (images.float() - mean)[:, :, 4:28, 4:28])
    prepared = next(iter(Batches(images, labels, 6, train=False, normalise=svhn.preprocess)))[0]
    torch.testing.assert_close(prepared, svhn.preprocess(images))


def test_evaluation_is_in_order_cropped_in_the_middle_with_two_views_on_demand():
    images, labels = images_of(7)
    batches = Batches(images, labels, 4, train=False, crop=24, pad=4, flip=True)
    made = [*batches]
    assert [tuple(some.shape) for some, _ in made] == [(2, 4, 3, 24, 24), (2, 3, 3, 24, 24)]
    assert torch.equal(torch.cat([names for _, names in made]), labels)
    plain = torch.cat([some[0] for some, _ in made])
    torch.testing.assert_close(plain, images[:, :, 4:28, 4:28] / 255)
    assert torch.equal(torch.cat([some[1] for some, _ in made]), plain.flip(-1))


def test_views_of_other_layouts_are_taken():
    images, labels = images_of(8, 3, 5, 6)
    last = images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    one, two = (next(Batches(some, labels, 8, flip=True, pad=1).epoch(0))[0] for some in (images, last))
    assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": torch.zeros(4, 1, 8, 8)}, "images must be uint8"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"labels must be int64 \[4\]"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"batch": 5}, "4 images do not fill one batch of 5"),
        ({"pad": 8}, "pad must be from 0 to 7"),
        ({"crop": 9}, "crop must be from 1 to 8"),
        ({"normalise": 3}, "must be .mean, std. or a function"),
        ({"normalise": ((0.1, 0.2), (1.0, 1.0))}, "2 means and 2 deviations for 1 channels"),
        ({"normalise": ((0.1,), (0.0,))}, "must be positive"),
    ],
)
def test_wrong_settings_are_named(change, message):
    settings = {"images": torch.zeros(4, 1, 8, 8, dtype=torch.uint8), "labels": torch.arange(4), "batch": 2} | change
    with pytest.raises(ValueError, match=message):
        Batches(**settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({"seed": wrong}, f"seed must be a whole number, not {wrong!r}") for wrong in (1.5, "a", None, True)),
        ({"batch": 2.0}, "batch must be a whole number, not 2.0"),
        ({"pad": 0.5}, "pad must be a whole number"),
        ({"crop": "8"}, "crop must be a whole number, not '8'"),
        ({"train": "no"}, "train must be True or False, not 'no'"),
        ({"flip": 1}, "flip must be True or False"),
        ({"drop_last": "x"}, "drop_last must be True or False"),
        ({"dtype": torch.int64}, "dtype must be a floating type of torch, not torch.int64"),
        ({"dtype": float}, "dtype must be a floating type of torch"),
        ({"images": np.zeros((4, 1, 8, 8), np.uint8)}, "images must be a tensor, not ndarray"),
        ({"labels": [0, 1, 2, 3]}, "labels must be a tensor, not list"),
    ],
)
def test_settings_of_another_type_are_named(change, message):
    settings = {"images": torch.zeros(4, 1, 8, 8, dtype=torch.uint8), "labels": torch.arange(4), "batch": 2} | change
    with pytest.raises(TypeError, match=message):
        Batches(**settings)


@pytest.mark.parametrize("shape", [(0, 1, 8, 8), (4, 0, 8, 8), (4, 1, 0, 8)])
def test_images_without_pixels_are_refused(shape):
    with pytest.raises(ValueError, match=r"images must be uint8 \[N, C, H, W\] and not empty"):
        Batches(torch.zeros(shape, dtype=torch.uint8), torch.zeros(shape[0], dtype=torch.int64), 1)


def test_whole_numbers_of_numpy_are_those_of_python():
    images, labels = images_of(8)
    theirs = Batches(images, labels, np.int64(4), np.int32(3), flip=True, pad=np.uint8(2))
    for (a, _), (b, _) in zip(
        theirs.epoch(np.int64(2)), Batches(images, labels, 4, 3, flip=True, pad=2).epoch(2), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("epoch", "start", "error", "message"),
    [
        (0, -1, ValueError, "start must be at least 0, not -1"),
        (-1, 0, ValueError, "epoch must be at least 0, not -1"),
        (0, 1.0, TypeError, "start must be a whole number, not 1.0"),
        (0, None, TypeError, "start must be a whole number"),
        (0, True, TypeError, "start must be a whole number, not True"),
        ("0", 0, TypeError, "epoch must be a whole number, not '0'"),
        (0.5, 0, TypeError, "epoch must be a whole number"),
    ],
)
def test_an_epoch_is_checked_when_it_is_asked_for(folder, epoch, start, error, message):
    images, labels = images_of(8)
    for batches in (
        Batches(images, labels, 4),
        Batches(images, labels, 4, train=False),
        ImageNetBatches(folder, "train", 4, resize=8, crop=8, workers=0),
    ):
        with pytest.raises(error, match=message):
            batches.epoch(epoch, start)


def test_a_draw_needs_whole_numbers():
    for wrong in (1.5, "a", None, True):
        with pytest.raises(TypeError, match=f"seed must be a whole number, not {wrong!r}"):
            draw(wrong, "x", 0, torch.arange(3))
        with pytest.raises(TypeError, match=f"epoch must be a whole number, not {wrong!r}"):
            draw(0, "x", wrong, torch.arange(3))
        with pytest.raises(TypeError, match=f"seed must be a whole number, not {wrong!r}"):
            svhn.set_aside(torch.arange(10), 1, "train", wrong)
    assert torch.equal(draw(-1, "x", 0, torch.arange(3)), draw(np.int64(-1), "x", np.uint8(0), torch.arange(3)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_gpu_gives_the_same_images():
    images, labels = images_of(100)
    here, there = (Batches(images, labels, 33, flip=True, pad=4, device=device) for device in ("cpu", "cuda"))
    for (a, names), (b, others) in zip(here.epoch(1), there.epoch(1), strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=1e-6, atol=1e-6)
        assert torch.equal(others.cpu(), names)


# Data of the size of ILSVRC2012


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 3)):
        for name in ("n01", "n02"):
            place = tmp_path / split / name
            place.mkdir(parents=True)
            for number in range(count):
                shape = (20 + 7 * number, 31, 3) if number else (33, 20)  # one is grey
                Image.fromarray(rng.integers(0, 256, shape, np.uint8)).save(place / f"{number}.png")
    return tmp_path


def decoded(path, size):
    with Image.open(path) as image:
        small = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(small)).permute(2, 0, 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_training_crops_and_mirrors_by_index(folder, workers):
    batches = ImageNetBatches(folder, "train", 3, 9, resize=16, crop=11, mean=(1, 2, 3), workers=workers)
    assert len(batches) == 2
    order = draw(9, "order", 5, torch.arange(8)).argsort(stable=True)
    made = list(batches.epoch(5))
    assert len(made) == 2
    mean = torch.tensor([1.0, 2, 3]).view(3, 1, 1)
    for number, (images, labels) in enumerate(made):
        for place, index in enumerate(order[3 * number : 3 * number + 3].tolist()):
            path, label = batches.files[index]
            expected = plainly_cut(decoded(path, 16).float() - mean, index, 9, 5, 11, True, 0)
            torch.testing.assert_close(images[place], expected)
            assert labels[place] == label
    rest = list(batches.epoch(5, start=1))
    assert len(rest) == 1
    assert torch.equal(rest[0][0], made[1][0])


def test_the_test_takes_the_centre_and_its_part_of_a_mean_image(folder):
    mean = torch.rand(3, 16, 16) * 255
    batches = ImageNetBatches(folder, "val", 4, resize=16, crop=11, mean=mean, workers=0)
    made = list(batches.epoch(0))
    assert [len(labels) for _, labels in made] == [4, 2]
    assert torch.cat([labels for _, labels in made]).tolist() == [0, 0, 0, 1, 1, 1]
    expected = torch.stack([(decoded(path, 16) - mean)[:, 2:13, 2:13] for path, _ in batches.files])
    torch.testing.assert_close(torch.cat([images for images, _ in made]), expected)


def test_the_defaults_are_those_of_alexnet(folder):
    images, _ = next(ImageNetBatches(folder, "val", 1, workers=0).epoch(0))
    assert images.shape == (1, 3, 227, 227)


def test_what_is_wrong_with_a_large_folder_is_named(folder):
    with pytest.raises(ValueError, match="'train' or 'val', not 'test'"):
        ImageNetBatches(folder, "test", 1)
    with pytest.raises(ValueError, match="crop 300, resize 256"):
        ImageNetBatches(folder, "train", 1, crop=300)
    for name, wrong in (
        ("seed", 1.5),
        ("seed", None),
        ("batch", 1.0),
        ("crop", "8"),
        ("workers", True),
        ("resize", 8.0),
    ):
        with pytest.raises(TypeError, match=f"{name} must be a whole number, not {wrong!r}"):
            ImageNetBatches(**({"root": folder, "split": "train", "batch": 1} | {name: wrong}))
    for name, wrong, least in (("batch", 0, 1), ("workers", -1, 0), ("crop", 0, 1)):
        with pytest.raises(ValueError, match=f"{name} must be at least {least}, not {wrong}"):
            ImageNetBatches(**({"root": folder, "split": "train", "batch": 1} | {name: wrong}))
    with pytest.raises(ValueError, match=r"mean must have shape \[3\] or \[3, 256, 256\]"):
        ImageNetBatches(folder, "train", 1, mean=(1, 2))
    with pytest.raises(ValueError, match="8 images do not fill one batch of 9"):
        ImageNetBatches(folder, "train", 9)
    with pytest.raises(FileNotFoundError, match="gone/train does not exist"):
        ImageNetBatches(folder / "gone", "train", 1)
    (folder / "val/n02/1.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"1\.png cannot be read as an image"):
        list(ImageNetBatches(folder, "val", 2, resize=8, crop=8, workers=0).epoch(0))
    for path in (folder / "val/n02").iterdir():
        path.unlink()
    with pytest.raises(DataError, match="val/n02 has no images"):
        ImageNetBatches(folder, "val", 1)


def test_a_crop_may_be_as_large_as_the_image():
    images, _ = images_of(3, 1, 5, 5)
    assert torch.equal(cut(images, torch.arange(3), 0, 0, (5, 5), flip=False), images)
