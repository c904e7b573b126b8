"""A run that is broken off in the middle of a fleet goes on there, and comes to the same numbers."""

import dataclasses
from types import SimpleNamespace

import pytest

from torch_dcl.experiments import checkpoints, engine, table1
from torch_dcl.experiments.digitsets import read_mnist
from torch_dcl.experiments.engine import Settings
from torch_dcl.experiments.reading import read_run
from torch_dcl.experiments.table1 import run_table1
from torch_dcl.fleet import Schedule
from torch_dcl.fleet.run_folder import RunError

MNIST = read_mnist(None)
EXACT = Settings(Schedule(4), batch=25, precision="float64", curves=True)
ASKED = {"columns": ("baseline", "A3S"), "sets": ("MNIST-II-01",), "seeds": 2, "images": (50, 20)}


class StopError(Exception):
    """As if the process were killed."""


def run(path, *, stop=None, resume=False, error=StopError):
    """Run, noting every epoch; `stop` is a fleet and an epoch to break off after, by an error or by being asked to."""
    seen, lines = [], []

    def on_epoch(at):
        seen.append((at.fleet, at.epoch))
        if (at.fleet, at.epoch) == stop and error is not None:
            raise error

    settings = dataclasses.replace(EXACT, on_epoch=on_epoch, should_stop=lambda: error is None and stop in seen)
    try:
        table = run_table1(path, MNIST, settings, resume=resume, report=lines.append, **ASKED)
    except StopError:
        table = None
    return table, seen, lines


def kept(path):
    """The one fleet that is kept."""
    (file,) = path.glob("fleet*")
    return file


def leftovers(path):
    return [*path.glob("fleet*"), *path.glob("checkpoints*")]


@pytest.fixture(autouse=True)
def after_every_epoch(monkeypatch):
    monkeypatch.setattr(checkpoints, "EVERY", 0.0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "EVERY", 0.0)
        table, seen, _ = run(path)
    assert seen == [(fleet, epoch) for fleet in (1, 2) for epoch in range(5)]
    return table, read_run(path).outcomes, path


def test_a_run_that_ended_leaves_no_checkpoint(whole):
    assert leftovers(whole[2]) == []


@pytest.mark.parametrize("stop", [(1, 2), (2, 3)])
def test_a_broken_run_goes_on_in_the_middle_of_a_fleet_to_the_same_numbers(whole, tmp_path, stop):
    path = tmp_path / "run"
    assert run(path, stop=stop)[0] is None
    assert kept(path).is_file()
    table, seen, lines = run(path, resume=True)
    # The epochs that were done are not trained again; a fleet tells of itself first with epoch 0.
    fleets = [(1, e) for e in range(5)] + [(2, e) for e in range(5)] if stop[0] == 1 else [(1, e) for e in range(5)]
    assert seen == [(f, e) for f, e in fleets if e == 0 or f != 1 or e > stop[1]]
    assert f"after epoch {stop[1]} of 4" in "\n".join(lines)
    assert table == dataclasses.replace(whole[0], minutes=table.minutes, command=table.command)
    expected = {outcome.job: outcome for outcome in whole[1]}
    found = {outcome.job: outcome for outcome in read_run(path).outcomes}
    assert {job: outcome.curves for job, outcome in found.items()} == {j: o.curves for j, o in expected.items()}
    assert leftovers(path) == []


def test_a_kill_between_the_checkpoint_and_its_note_loses_no_curve(whole, tmp_path):
    path = tmp_path / "run"
    run(path, stop=(1, 3))
    notes = (path / "checkpoints.jsonl").read_text().splitlines(keepends=True)
    (path / "checkpoints.jsonl").write_text("".join(notes[:-1]))  # the file is of epoch 3, the note of epoch 2
    run(path, resume=True)
    expected = {outcome.job: outcome.curves for outcome in whole[1]}
    assert {outcome.job: outcome.curves for outcome in read_run(path).outcomes} == expected


def test_a_missing_checkpoint_is_an_error_and_no_silent_restart(tmp_path):
    path = tmp_path / "run"
    run(path, stop=(1, 2))
    kept(path).unlink()
    with pytest.raises(RunError, match=r"checkpoint after epoch 2 .* fleet-\w+\.safetensors is missing; put it back"):
        run(path, resume=True)


def test_a_damaged_checkpoint_is_an_error(tmp_path):
    path = tmp_path / "run"
    run(path, stop=(1, 2))
    file = kept(path)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(RunError, match=rf"{file.name} is damaged .*; go on with .* or remove checkpoints"):
        run(path, resume=True)


def test_between_two_checkpoints_there_is_some_time(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "EVERY", 3600.0)
    run(tmp_path / "run", stop=(2, 3))
    assert leftovers(tmp_path / "run") == []


def test_an_interrupt_between_two_epochs_keeps_the_fleet_however_new_the_last_checkpoint_is(
    whole, tmp_path, monkeypatch
):
    monkeypatch.setattr(checkpoints, "EVERY", 3600.0)
    path = tmp_path / "run"
    run(path, stop=(2, 3), error=None)
    assert kept(path).is_file()
    table, seen, _ = run(path, resume=True)
    assert seen == [(1, 0), (1, 4)]
    assert table.cells == whole[0].cells


def test_the_checkpoint_of_another_process_is_taken(whole, tmp_path):
    """As after a run on two ranks that goes on on one."""
    path = tmp_path / "run"
    run(path, stop=(1, 2))
    (path / "checkpoints.jsonl").rename(path / "checkpoints-1.jsonl")
    table, seen, _ = run(path, resume=True)
    assert seen[:3] == [(1, 0), (1, 3), (1, 4)]
    assert table.cells == whole[0].cells
    assert leftovers(path) == []


def test_fleets_of_another_size_leave_the_checkpoint_aside_and_say_so(whole, tmp_path):
    path = tmp_path / "run"
    run(path, stop=(1, 2))
    before = kept(path)
    lines = []
    alone = dataclasses.replace(EXACT, most=1)
    table = run_table1(path, MNIST, alone, resume=True, report=lines.append, **ASKED)
    told = f"{before.name}, after epoch 2, is of no fleet that is to be trained now"
    assert [line.startswith(told) for line in lines[:2]] == [True, False]
    assert table.cells == whole[0].cells
    assert leftovers(path) == []


def test_a_slice_ends_in_the_middle_of_a_fleet(whole, tmp_path, monkeypatch):
    clock = [0.0]  # goes on by one with every epoch
    for module in (table1, engine):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    seen, lines = [], []

    def on_epoch(at):
        seen.append(at.epoch)
        clock[0] += bool(at.epoch)

    settings, path = dataclasses.replace(EXACT, on_epoch=on_epoch), tmp_path / "run"
    table, slices = None, 0
    while table is None:
        table = run_table1(path, MNIST, settings, resume=slices > 0, seconds=3, report=lines.append, **ASKED)
        slices += 1
    assert slices == 3  # eight epochs, three to a slice
    assert [epoch for epoch in seen if epoch] == [1, 2, 3, 4, 1, 2, 3, 4]
    assert [line for line in lines if "time is up" in line] == [
        "time is up: 2 fleets are left; resume with --resume",
        "time is up: 1 fleet is left; resume with --resume",
    ]
    assert table.cells == whole[0].cells
    assert leftovers(path) == []
