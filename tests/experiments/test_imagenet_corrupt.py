"""Runs on images of which some cannot be decoded: named, or skipped and counted, on any number of ranks."""

import io
import json
import tarfile
from pathlib import Path

import pytest
from tests.experiments.test_imagenet import NET, after
from tests.experiments.test_imagenet_ranks import alone, nearly, rows, started_by_hand, together, words, write_images
from typer.testing import CliRunner

from torch_dcl.cli.app import app
from torch_dcl.experiments.imagenet import team as ranks
from torch_dcl.experiments.recipes.imagenet import ImageNet, ImageNetConfig
from torch_dcl.experiments.runner import run

BAD = ["train/b/2.png", "train/f/3.png", "val/c/0.png"]


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET.replace("nn.BatchNorm2d(8)", "nn.Identity()"))
    write_images(tmp_path / "images")
    for name in BAD:
        path = tmp_path / "images" / name
        path.write_bytes(path.read_bytes()[:-40])
    return tmp_path


def dcl(*args):
    return CliRunner().invoke(app, list(args), prog_name="dcl")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_names_the_image_and_skips_it_only_if_asked(workers):
    settings = words("run", "--models", "plain", data="images", workers=workers)[2:]
    done = dcl(*settings)
    assert done.exit_code == 1, done.output
    assert ".png cannot be read as an image" in " ".join(done.output.split())
    assert "skip_corrupt" in done.output
    done = dcl(*words("skipped", "--models", "plain,dcl", data="images", workers=workers, skip_corrupt="yes")[2:])
    assert done.exit_code == 0, done.output
    said = "3 corrupt images were skipped: train/b/2.png, train/f/3.png, val/c/0.png"
    assert said in " ".join(done.output.split())
    result = json.loads(Path("skipped/imagenet.json").read_text())
    assert result["skipped"] == BAD
    assert [row["images"] for row in result["models"]] == [11, 11]
    assert dcl("report", "skipped", "-o", "page.html").exit_code == 0
    assert said in " ".join(Path("page.html").read_text().split())


def test_a_run_that_met_a_corrupt_image_goes_on_when_it_may_skip_it():
    asked = {"data": "images", "skip_corrupt": "yes"}
    assert dcl(*words("whole", "--models", "plain", **asked)[2:]).exit_code == 0
    assert dcl(*words("run", "--models", "plain", data="images")[2:]).exit_code == 1
    done = dcl("run", "run", "--resume", "--set", "skip_corrupt=yes")
    assert done.exit_code == 0, done.output
    assert rows("run") == rows("whole")


def test_a_run_without_a_readable_validation_image_says_so(place):
    for path in (place / "images/val").rglob("*.png"):
        path.write_bytes(b"no image")
    done = dcl(*words("run", "--models", "plain", data="images", skip_corrupt="yes")[2:])
    assert done.exit_code == 1, done.output
    assert "no validation image can be decoded; copy the images again" in " ".join(done.output.split())


def test_tar_files_whose_classes_differ_are_refused_at_the_start(place):
    """Without the check the first evaluation would meet a label that the network has no output for."""
    (place / "tars").mkdir()
    for split, labels in (("train", 6), ("val", 7)):
        with tarfile.open(place / f"tars/{split}-0.tar", "w") as archive:
            for label in range(labels):
                picture = (place / "images/train/a/0.png").read_bytes()
                for suffix, data in (("png", picture), ("cls", str(label).encode())):
                    member = tarfile.TarInfo(f"{label}.{suffix}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    done = dcl(*words("run", data="tars")[2:])
    assert done.exit_code == 2, done.output
    assert "train and val must have the same classes; these differ: 6" in " ".join(done.output.split())
    assert not (place / "run").exists()


def test_a_run_that_is_stopped_after_every_step_skips_the_same_images(place, monkeypatch):
    monkeypatch.setattr(ranks, "PAUSE", 0.0)
    settings = ImageNetConfig(
        network="net.py:make", models=("plain",), data="images", batch=5, steps=9, resize=16, crop=12, workers=0,
        save_minutes=0.0, skip_corrupt=True, device="cpu",
    )  # fmt: skip
    whole = run(ImageNet(settings), "whole").result
    calls = 0
    while not (done := run(ImageNet(settings), "parts", resume=bool(calls), should_stop=after(1))).complete:
        calls += 1
    assert calls >= 7
    assert done.result["skipped"] == whole["skipped"] == BAD
    assert rows("parts") == rows("whole")


@pytest.mark.slow
def test_ranks_skip_the_same_images_as_one_process():
    options = {"data": "images", "skip_corrupt": "yes"}
    alone(*words("one", **options))
    together(2, "two", **options)
    nearly("one", "two", images=11)
    assert all(json.loads(Path(name, "imagenet.json").read_text())["skipped"] == BAD for name in ("one", "two"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train/a/0.png", "val/a/0.png"])
def test_a_corrupt_image_that_the_first_rank_alone_reads_ends_all_at_once(place, name):
    for other in BAD:
        path = place / "images" / other
        path.write_bytes(path.with_name("1.png").read_bytes())
    path = place / "images" / name
    path.write_bytes(path.read_bytes()[:-40])
    codes, texts = started_by_hand([words("run", data="images")] * 2)
    assert codes == [1, 1], texts
    assert (
        f"rank 0 of 2 failed in step {1 if name.startswith('train') else 4}: images/{name} cannot be read" in texts[0]
    )


def test_images_that_are_not_prepared_cannot_be_kept_on_a_gpu():
    done = dcl(*words("run", "--models", "plain", data="images", keep="device")[2:])
    assert done.exit_code == 2, done.output
    assert "make shards of them with dcl data prepare imagenet images FOLDER" in " ".join(done.output.split())
    assert not Path("run").exists()
