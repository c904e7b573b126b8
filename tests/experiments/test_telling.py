"""What a run tells is in its folder as well, while it goes."""

import dataclasses
import json

from torch_dcl.experiments.engine import Settings
from torch_dcl.experiments.protocol import Progress
from torch_dcl.experiments.reading import state_of
from torch_dcl.experiments.telling import telling
from torch_dcl.fleet.run_folder import RunFolder

RECIPE = {"recipe": "figures", "parts": ["filters"]}
AT = Progress(1, 2, "A2, 100 classes", 3, 0, 4)


def test_epochs_and_lines_are_written_down_and_passed_on(tmp_path):
    heard, lines = [], []
    with RunFolder.open(tmp_path / "run", RECIPE) as folder:
        settings, report = telling(folder, Settings(on_epoch=heard.append), lines.append, part="-1")
        for epoch, loss in enumerate([None, 2.5, None]):
            settings.on_epoch(dataclasses.replace(AT, epoch=epoch, loss=loss))
        report("time is up")
        assert state_of(tmp_path / "run").now == "A2, 100 classes, epoch 2 of 4"
    assert [at.epoch for at in heard] == [0, 1, 2]
    assert lines == ["time is up"]
    notes = [json.loads(line) for line in (tmp_path / "run" / "metrics-1.jsonl").read_text().splitlines()]
    assert [(note["epoch"], note["loss"], note["networks"]) for note in notes] == [(1, 2.5, 3), (2, None, 3)]
    assert (tmp_path / "run" / "log-1.txt").read_text().endswith(" time is up\n")
    assert state_of(tmp_path / "run").now is None  # nobody is at work


def test_who_does_not_listen_hears_nothing(tmp_path):
    with RunFolder.open(tmp_path / "run", RECIPE) as folder:
        settings, report = telling(folder, Settings(), lambda _: None)
        settings.on_epoch(dataclasses.replace(AT, epoch=1, loss=1.0))
        report("x")
    assert len(folder.read("metrics")) == 1
