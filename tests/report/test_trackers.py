"""Trackers: every record of a run reaches them once, whatever the recipe."""

import json
import sys
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

from torch_dcl.cli.app import app
from torch_dcl.experiments.protocol import Listener
from torch_dcl.experiments.recipes.imagenet import ImageNet, ImageNetConfig
from torch_dcl.experiments.runner import run
from torch_dcl.fleet.run_folder import RunFolder
from torch_dcl.report.trackers import Tracker

NET = """
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(27, 20), nn.ReLU(), nn.Linear(20, 4))
"""
SMALL = {"classes": 4, "images": 12, "batch": 4, "steps": 6, "resize": 4, "crop": 3, "workers": 0, "evaluate_every": 1}
COMMAND = ["run", "imagenet", "--network", "net.py:make", "--data", "synthetic", "--device", "cpu", "--models", "plain",
           *(word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")), "--out", "run"]  # fmt: skip


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)


class Noting(Tracker):
    def __init__(self, *args):
        super().__init__(*args)
        self.noted = []

    def metrics(self, record):
        self.noted.append(("metrics", record["epoch"], record["loss"]))

    def outcomes(self, record):
        self.noted += [("outcome", outcome["job"]["seed"], outcome["error"]) for outcome in record["outcomes"]]


def test_every_record_reaches_a_tracker_once(tmp_path):
    config = ImageNetConfig(network="net.py:make", data="synthetic", models=("plain",), seeds=2, device="cpu", **SMALL)
    tracker = Noting(tmp_path / "run", Listener())
    done = run(ImageNet(config), tmp_path / "run", listener=tracker)
    tracker.update()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [note[1:] for note in tracker.noted if note[0] == "metrics"] == [(r["epoch"], r["loss"]) for r in lines]
    assert len(lines) == 4
    curve = done.result["models"][0]["curves"]
    judged = [record["judged"] for record in lines]
    assert [point and point["of"] for point in judged] == [
        "plain on synthetic, seed 0", None, "plain on synthetic, seed 1", None,
    ]  # fmt: skip
    for point, wanted in zip(judged[::2], curve, strict=True):
        assert {key: value for key, value in point.items() if key != "of"} == wanted[0], "the last is an outcome"
    errors = done.result["models"][0]["top1"]
    assert [note[1:] for note in tracker.noted if note[0] == "outcome"] == list(enumerate(errors))


def test_records_of_several_ranks_are_told_once_each_however_they_alternate(tmp_path):
    tracker = Noting(tmp_path / "run", Listener())
    with RunFolder.open(tmp_path / "run", {}) as folder:
        for epoch in range(3):
            for rank in range(2):
                folder.append(f"metrics-{rank}", {"epoch": epoch, "loss": float(rank)})
                tracker.update()
    assert tracker.noted == [("metrics", epoch, float(rank)) for epoch in range(3) for rank in range(2)]


def test_tensorboard_is_told_losses_errors_and_curves(monkeypatch):
    told = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            assert purge_step == 0, "every record is told again after a resume"
            self.folder = folder

        def add_scalar(self, name, value, at):
            told.append((name, value, at))

        def flush(self):
            Path(self.folder).mkdir(exist_ok=True)

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=SummaryWriter))
    done = CliRunner().invoke(app, [*COMMAND, "--log", "tensorboard"], prog_name="dcl")
    assert done.exit_code == 0, done.output
    row = json.loads(Path("run/imagenet.json").read_text())["models"][0]
    names = {name for name, _, _ in told}
    assert names == {
        "loss/net.py:make plain, seed 0", "error/plain on synthetic", "top1/plain on synthetic, seed 0",
        "top5/plain on synthetic, seed 0", "train_loss/plain on synthetic, seed 0",
    }  # fmt: skip
    assert ("error/plain on synthetic", row["top1"][0], 0) in told
    assert [value for name, value, _ in told if name.startswith("top5")] == [
        point["top5"] for point in row["curves"][0]
    ]
    assert Path("run/tensorboard").is_dir()
    tops = [at for at, (name, _, _) in enumerate(told) if name.startswith("top1")]
    assert tops[0] < [name for name, _, _ in told].index("error/plain on synthetic"), "while the network trains"
    assert f"seed 0: epoch 1 of 2, top-1 error {row['curves'][0][0]['top1']:.2f} %" in " ".join(done.output.split())


def test_an_unknown_tracker_and_a_missing_package_are_named(monkeypatch):
    done = CliRunner().invoke(app, [*COMMAND, "--log", "tensorbord"], prog_name="dcl")
    assert (done.exit_code, "did you mean tensorboard?" in done.output) == (2, True), done.output
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    done = CliRunner().invoke(app, [*COMMAND, "--log", "tensorboard"], prog_name="dcl")
    assert (done.exit_code, "pip install tensorboard" in done.output) == (2, True), done.output
    assert not Path("run").exists()
