"""Prepared shards that are read by threads: the rows of the files, in order, and nothing is left behind."""

import gc
import itertools
import json
import mmap
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from torch_dcl.data import DataError, ImageNetBatches, open_images
from torch_dcl.data.batches import cut
from torch_dcl.data.imagenet import sources
from torch_dcl.data.imagenet.ahead import NAME, in_order
from torch_dcl.data.imagenet.prepare import KEY, MANIFEST, VERSION
from torch_dcl.files import write_sealed

COUNTS = (3, 1, 431, 0, 7)  # images of each shard
TOTAL = sum(COUNTS)
CPU = torch.device("cpu")
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


def write_shards(folder, size):
    """Shards of random bytes, of very different lengths."""
    generator = torch.Generator().manual_seed(size)
    shards = []
    for number, count in enumerate(COUNTS):
        images = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)
        tensors = {"images": images, "labels": torch.arange(count) % 5}
        name = f"train-{number:05d}.safetensors"
        sha256 = write_sealed(folder / name, KEY, tensors, {"version": VERSION, "skipped": []})
        shards.append({"file": name, "images": count, "sha256": sha256})
    splits = {split: {"images": TOTAL, "shards": shards} for split in ("train", "val")}
    listed = {"torch_dcl_imagenet": VERSION, "size": size, "shape": "squash", "skipped": [], "splits": splits}
    (folder / MANIFEST).write_text(json.dumps({**listed, "classes": list("abcde")}))


def rows_of(folder, size):
    """All images as numpy maps them, by the header of safetensors alone."""
    parts = []
    for path, count in zip(sorted(folder.glob("train-*")), COUNTS, strict=True):
        if count:
            length = int.from_bytes(path.read_bytes()[:8], "little")
            first, _ = json.loads(path.read_bytes()[8 : 8 + length])["images"]["data_offsets"]
            parts.append(np.memmap(path, np.uint8, "r", 8 + length + first, (count, 3, size, size)))
    return np.concatenate(parts)


@pytest.fixture
def folder(tmp_path):
    write_shards(tmp_path, 7)
    return tmp_path


def readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"{NAME}_")]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("size", [1, 7, 32])
def test_batches_are_the_rows_of_the_files(tmp_path, size, workers, device):
    write_shards(tmp_path, size)
    rows, rng = rows_of(tmp_path, size), np.random.default_rng(0)
    lengths = [1, 3, 431, 0, *[5] * 20, 1023]
    wanted = [rng.integers(0, TOTAL, length).tolist() for length in lengths] + [range(TOTAL)]
    images = open_images(tmp_path, "train", size=size)
    made = list(images.batches(wanted, torch.device(device), workers))  # all at once: none may overwrite another
    assert [list(batch.numbers) for batch in made] == [list(indices) for indices in wanted]
    for batch, indices in zip(made, wanted, strict=True):
        assert batch.images.device.type == device
        assert np.array_equal(batch.images.cpu().numpy(), rows[list(indices)])


@pytest.mark.parametrize("device", DEVICES)
def test_an_epoch_can_be_resumed_at_any_batch_by_any_rank(folder, device):
    images, world = open_images(folder, "train", size=7), 3
    settings = {"resize": 7, "crop": 5, "device": device}
    whole = list(ImageNetBatches(images, "train", 60, **settings, workers=0).pieces(2))
    for start, rank in itertools.product((0, 3, len(whole) - 1, len(whole)), range(world)):
        batches = ImageNetBatches(images, "train", 60, **settings, workers=2, rank=rank, world=world)
        resumed = list(batches.pieces(2, start))
        assert len(resumed) == len(whole) - start
        for piece, expected in zip(resumed, whole[start:], strict=True):
            for field in ("images", "labels", "index"):
                assert torch.equal(getattr(piece, field), getattr(expected, field)[20 * rank : 20 * (rank + 1)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("crop", [1, 5, 7])
def test_crops_are_those_that_are_drawn_for_a_batch(folder, crop, device):
    images = open_images(folder, "train", size=7)
    batches = ImageNetBatches(images, "train", 431, 3, resize=7, crop=crop, mean=(0, 0, 0), device=device, workers=0)
    for epoch in (0, 2):
        (piece,) = batches.pieces(epoch)
        whole = torch.from_numpy(rows_of(folder, 7))[piece.index.cpu()]
        expected = cut(whole, piece.index.cpu(), 3, epoch, (crop, crop), flip=True)
        assert torch.equal(piece.images.cpu(), expected.float())


@pytest.mark.parametrize("device", DEVICES)
def test_an_epoch_that_is_left_early_leaves_no_thread(folder, device):
    before = readers()
    batches = ImageNetBatches(open_images(folder, "train", size=7), "train", 5, resize=7, crop=5, device=device)
    pieces = batches.pieces(0)
    first = next(pieces)
    assert readers() != before
    pieces.close()
    assert readers() == before
    again = next(batches.pieces(0))
    assert torch.equal(first.images, again.images)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ["pieces", "epoch"])
def test_closing_an_epoch_ends_its_threads_whoever_holds_on_to_its_parts(folder, way, device, monkeypatch):
    """A traceback, a debugger or a profiler may keep the frames of an epoch alive."""
    held = []

    def holding(make):
        def holds(*arguments):
            held.append(make(*arguments))
            return held[-1]

        return holds

    before, images = readers(), open_images(folder, "train", size=7)
    for name in ("in_order", "copied"):
        monkeypatch.setattr(sources, name, holding(getattr(sources, name)))
    monkeypatch.setattr(images, "batches", holding(images.batches))
    batches = ImageNetBatches(images, "train", 5, resize=7, crop=5, device=device)
    monkeypatch.setattr(batches, "pieces", holding(batches.pieces))
    for taken in (1, 2, 50):
        epoch = getattr(batches, way)(0)
        for _ in range(taken):
            next(epoch)
        assert readers() != before
        epoch.close()
        assert readers() == before
    assert len(held) == 3 * (4 if device == "cuda" else 3)


def test_an_image_that_does_not_exist_is_an_error_and_leaves_no_thread(folder):
    before, images = readers(), open_images(folder, "train", size=7)
    for workers in (0, 2):
        with pytest.raises(IndexError):
            list(images.batches([[0], [TOTAL]], CPU, workers))
    assert readers() == before


def test_the_error_of_a_thread_comes_in_its_turn_and_ends_the_others():
    def make(number):
        if number == 2:
            raise ValueError("number 2")
        return number

    before, made = readers(), in_order(make, range(100), 3)
    assert [next(made), next(made)] == [0, 1]
    with pytest.raises(ValueError, match="number 2"):
        next(made)
    assert readers() == before


def test_threads_compute_on_one_core_each_and_no_other_thread_does():
    def threads_of_a_new_thread():
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(torch.get_num_threads).result()

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        made = in_order(lambda _: torch.get_num_threads(), range(9), 2)
        assert next(made) == 1
        assert torch.get_num_threads() == 3
        assert set(made) == {1}
        assert (torch.get_num_threads(), threads_of_a_new_thread()) == (3, 3)
    finally:
        torch.set_num_threads(before)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_copies_neither_overtake_the_gpu_nor_outlive_their_memory(tmp_path):
    write_shards(tmp_path, 32)
    rows, images = torch.from_numpy(rows_of(tmp_path, 32)), open_images(tmp_path, "train", size=32)
    rng, busy = np.random.default_rng(0), torch.ones(4096, 4096, device="cuda")
    wanted = [rng.integers(0, TOTAL, 256).tolist() for _ in range(60)]
    sums = []
    for batch in images.batches(wanted, torch.device("cuda"), 4):
        for _ in range(3):  # the GPU falls behind, so memory is given back before it was used
            busy = (busy @ busy).clamp_(0, 1)
        sums.append(batch.images.long().mul(torch.arange(1, 33, device="cuda")).sum((1, 2, 3)))
    expected = [rows[indices].long().mul(torch.arange(1, 33)).sum((1, 2, 3)) for indices in wanted]
    assert torch.equal(torch.stack(sums).cpu(), torch.stack(expected))
    for _ in range(20):
        busy = (busy @ busy).clamp_(0, 1)  # copies begin after this
        left = images.batches(wanted, torch.device("cuda"), 4)
        shape = next(left).images.shape
        left.close()  # with a copy on its way, whose memory is taken next
        zeros = [torch.zeros(shape, dtype=torch.uint8, device="cuda") for _ in range(3)]
        assert not any(zero.any() for zero in zeros)


def test_more_shards_than_a_process_may_open(folder):
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(list(Path("/proc/self/fd").iterdir())) + 2  # fewer than the shards
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, most))
        opened = [open_images(folder, split, size=7) for split in ("train", "val")]
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (few, most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    for images in opened:
        (batch,) = images.batches([range(TOTAL)], CPU, 0)
        assert np.array_equal(batch.images.numpy(), rows_of(folder, 7))


def test_a_file_that_cannot_be_mapped_is_named(folder, monkeypatch):
    monkeypatch.setattr(sources, "_MAP_FIXED", 0x10 | mmap.MAP_ANONYMOUS | mmap.MAP_SHARED | mmap.MAP_PRIVATE)
    with pytest.raises(DataError, match=r"train-00000\.safetensors cannot be mapped into memory: "):
        open_images(folder, "train", size=7)


def test_a_shard_whose_header_promises_more_than_its_bytes_is_named(folder):
    path = folder / "train-00000.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    header["images"]["data_offsets"] = [len(whole) - 8 - length - 1] * 2  # as long as before, in the last byte
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
    with pytest.raises(DataError, match=r"train-00000\.safetensors is truncated; remove it and run"):
        open_images(folder, "train", size=7)


def test_the_images_outlive_what_opened_them(folder):
    made = open_images(folder, "train", size=7).batches([[0], range(TOTAL)], CPU, 1)
    next(made)
    gc.collect()
    assert np.array_equal(next(made).images.numpy(), rows_of(folder, 7))
