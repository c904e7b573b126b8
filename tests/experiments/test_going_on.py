"""Figures and the calibration, stopped in the middle of a fleet, go on there and come to the same numbers."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from tests.halves import slow

from torch_dcl.experiments import calibration_run, checkpoints, engine, parts
from torch_dcl.experiments.calibration_run import run_calibration
from torch_dcl.experiments.checkpoints import Checkpoints
from torch_dcl.experiments.digitsets import read_mnist
from torch_dcl.experiments.engine import Settings
from torch_dcl.experiments.parts import run_parts
from torch_dcl.experiments.reading import PARTS, state_of
from torch_dcl.fleet import Fleet, Schedule
from torch_dcl.fleet.run_folder import RunError

MNIST = read_mnist(None)
SETTINGS = Settings(Schedule(2), batch=25)
FIGURES = {
    "recipe": "figures", "parts": list(PARTS), "set": "MNIST-II-01", "knowledge_set": "MNIST-II-05",
    "filters": [10], "seeds": 1,
}  # fmt: skip
# Fleets of two epochs. Filters: ten filters, the baseline. Curves: A2, A3D, A3S, the baseline. Two, and eight.
EPOCHS = {"filters": 4, "curves": 8, "knowledge": 4, "tried": 16}
CALIBRATION = {
    "recipe": "calibration", "sets": ["MNIST-II-01", "MNIST-III-01"], "start": [0.5, 1.0], "rounds": 2, "seeds": 2,
    "lr": 0.02,
}  # fmt: skip
ROUND = 4  # numbers of two digits are one fleet and those of three another, with two epochs each


class KilledError(Exception):
    """As if the process were killed."""


def noting(patch):
    """Note every epoch that a fleet is trained: its networks, how large they are, which epoch, and the losses."""
    real, trained = Fleet._end_epoch, []

    def end_epoch(fleet):
        size = sum(p.numel() for p in fleet.network(0).parameters())
        real(fleet)
        members = [(m.name, m.seed, m.lr) for m in fleet.members]
        trained.append((members, size, fleet.epoch, fleet.history.train_loss[-1]))

    patch.setattr(Fleet, "_end_epoch", end_epoch)
    return trained


@pytest.fixture
def epochs(monkeypatch):
    """The epochs that are trained."""
    return noting(monkeypatch)


def stopping(after, error=None):
    """Settings that stop behind so many epochs, as Ctrl-C does; or raise an error, as if the process were killed."""
    count = 0

    def on_epoch(at):
        nonlocal count
        count += bool(at.epoch)
        if error is not None and at.epoch and count == after:
            raise error

    return dataclasses.replace(SETTINGS, on_epoch=on_epoch, should_stop=lambda: error is None and count >= after)


def draw(path, settings=SETTINGS, **changes):
    options = {"resume": path.exists(), "images": (50, 50), "report": lambda _: None, **changes}
    return run_parts(path, options.pop("recipe", FIGURES), MNIST, settings, **options)


def fit(path, settings=SETTINGS, **changes):
    options = {"resume": path.exists(), "images": (50, 50), "report": lambda _: None, **changes}
    return run_calibration(path, CALIBRATION, MNIST, settings, **options)


def drawn(path):
    """What a run of figures leaves, to the last digit."""
    return {name: (path / f"{name}.json").read_text() for name in PARTS if (path / f"{name}.json").exists()}


def some(figures, *names):
    """A recipe of these parts alone, what it shall leave, and the epochs that it shall train."""
    left, trained, at, by_part = *figures, 0, {}
    for name, count in EPOCHS.items():
        by_part[name] = trained[at : at + count]
        at += count
    expected = [epoch for name in names for epoch in by_part[name]]
    return {**FIGURES, "parts": list(names)}, {name: left[name] for name in names}, expected


def fitted(path):
    """What a calibration leaves, to the last digit."""
    return (path / "rounds.jsonl").read_text(), json.loads((path / "calibration.json").read_text())["sets"]


def kept(path):
    return sorted(file.name for pattern in ("fleet*", "checkpoints*") for file in path.glob(pattern))


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """A run of figures at once: what it leaves, and the epochs that it trained."""
    return at_once(tmp_path_factory, draw, drawn)


@pytest.fixture(scope="module")
def calibration(tmp_path_factory):
    """A calibration at once: what it leaves, and the epochs that it trained."""
    return at_once(tmp_path_factory, fit, fitted)


def at_once(folders, run, left):
    path = folders.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        trained = noting(patch)
        run(path)
    assert kept(path) == []
    return left(path), trained


# Figures


def test_the_epochs_are_those_that_the_tests_count_on(figures, calibration):
    assert len(figures[1]) == sum(EPOCHS.values())
    assert len(calibration[1]) == 3 * ROUND
    # Filters and curves train the same baseline, each last.
    assert figures[1][2:4] == figures[1][10:12]


@pytest.mark.parametrize(
    ("names", "after", "fleets"),
    [
        (("filters", "curves"), 3, ["filters"] * 2),  # in the second fleet, which curves has too
        (("filters", "curves"), 4, []),  # behind its last epoch: the part is written down
        slow(("filters", "curves"), 5, ["curves"]),
        (("filters", "curves"), 4 + 7, ["curves"] * 4),  # in the fleet that filters has too
        slow(("knowledge",), 3, ["knowledge"] * 2),
        slow(("tried",), 7, ["tried"] * 4),
    ],
)
def test_figures_that_are_interrupted_go_on_in_the_middle_of_a_fleet(figures, epochs, tmp_path, names, after, fleets):
    recipe, left, trained = some(figures, *names)
    path, lines = tmp_path / "run", []
    assert draw(path, stopping(after), recipe=recipe) is None
    assert len(epochs) == after
    files = [name for name in kept(path) if name.startswith("fleet")]
    assert [name.split("-")[1] for name in files] == fleets
    assert state_of(path).state == "incomplete"
    draw(path, recipe=recipe, report=lines.append)
    assert epochs == trained  # in the same order, and none twice
    assert drawn(path) == left
    assert kept(path) == []
    gone_on = ["going on in the middle of a fleet, after epoch 1 of 2"] if after % 2 else []
    assert [line for line in lines if line.startswith("going on")] == gone_on


def test_a_part_that_is_asked_for_again_leaves_the_fleets_of_another_alone(figures, epochs, tmp_path):
    """Filters and curves have a job in common, and the one that is kept is of curves."""
    recipe, left, trained = some(figures, "filters", "curves")
    path = tmp_path / "run"
    assert draw(path, stopping(11), recipe=recipe) is None
    (path / "parts.jsonl").unlink()
    draw(path, recipe=recipe)
    assert epochs == trained[:11] + trained[:4] + trained[11:]
    assert drawn(path) == left
    assert kept(path) == []


@pytest.mark.slow
def test_figures_in_slices_that_end_anywhere_give_the_figures_of_one_run(figures, epochs, tmp_path, monkeypatch):
    # The clock is how many epochs were trained.
    for module in (parts, engine):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: float(len(epochs))))
    path, slices, lines, written = tmp_path / "run", 0, [], None
    while written is None:
        written = draw(path, seconds=3, report=lines.append)
        slices += 1
        assert slices < 20
    assert slices == 11  # 32 epochs, three to a slice
    assert "filters: time is up: 1 fleet is left; resume with --resume" in lines
    assert epochs == figures[1]
    assert drawn(path) == figures[0]
    assert kept(path) == []


def test_a_kill_loses_what_was_trained_since_the_last_checkpoint_and_no_fleet_that_was_done(figures, epochs, tmp_path):
    recipe, left, trained = some(figures, "filters")
    path = tmp_path / "run"
    with pytest.raises(KilledError):
        draw(path, stopping(3, KilledError), recipe=recipe)
    draw(path, recipe=recipe)
    assert epochs == trained[:3] + trained[2:]  # the second fleet from its beginning, and not the first
    assert drawn(path) == left


def test_a_kill_goes_on_from_a_checkpoint_between(figures, epochs, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "EVERY", 0.0)
    recipe, left, trained = some(figures, "filters")
    path = tmp_path / "run"
    with pytest.raises(KilledError):
        draw(path, stopping(3, KilledError), recipe=recipe)
    draw(path, recipe=recipe)
    assert epochs == trained
    assert drawn(path) == left


@pytest.fixture
def no_cleaning():
    """As if the process were killed before the checkpoints of a part or round go."""

    def killed(_):
        raise KilledError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "forget", killed)
        yield patch


def test_a_kill_between_a_part_and_its_checkpoints_leaves_nothing_behind(figures, epochs, tmp_path, no_cleaning):
    recipe, left, trained = some(figures, "filters", "knowledge")
    path = tmp_path / "run"
    with pytest.raises(KilledError):
        draw(path, recipe=recipe)
    assert state_of(path).done == 1
    assert len(kept(path)) == 3  # two fleets of filters, and the notes
    no_cleaning.undo()
    draw(path, recipe=recipe)
    assert epochs == trained
    assert drawn(path) == left
    assert kept(path) == []


def test_the_minutes_of_a_part_are_those_of_all_its_slices(epochs, tmp_path, monkeypatch):
    path, lain = tmp_path / "run", 0.0
    now = dict.fromkeys(("perf_counter", "monotonic", "time"), lambda: 60.0 * len(epochs) + lain)  # a minute an epoch
    for module in (parts, engine, checkpoints):
        monkeypatch.setattr(module, "time", SimpleNamespace(**now))
    few = {**FIGURES, "parts": ["filters"]}
    assert draw(path, recipe=few, seconds=180) is None
    lain = 1e6
    assert draw(path, recipe=few) == ["filters.svg"]
    assert json.loads((path / "parts.jsonl").read_text())["minutes"] == pytest.approx(4)


def test_other_figures_are_refused_and_what_is_kept_stays(epochs, tmp_path):
    path = tmp_path / "run"
    assert draw(path, stopping(3)) is None
    before = kept(path)
    with pytest.raises(RunError, match=r"other settings:\n  filters: \[10\] then, \[25\] now"):
        draw(path, recipe={**FIGURES, "filters": [25]})
    with pytest.raises(RunError, match=r"precision of network 0 was 'float32', here it is 'float64'; go on with the"):
        draw(path, dataclasses.replace(SETTINGS, precision="float64"))
    assert len(epochs) == 3
    assert kept(path) == before


def test_fleets_of_another_size_leave_what_is_kept_aside_and_say_so(epochs, tmp_path):
    path, lines = tmp_path / "run", []
    few = {**FIGURES, "parts": ["filters"], "seeds": 2}
    assert draw(path, stopping(3), recipe=few) is None
    names = kept(path)[1:]
    assert draw(path, dataclasses.replace(SETTINGS, most=1), recipe=few, report=lines.append) == ["filters.svg"]
    aside = [line for line in lines if line.endswith("it is left aside")]
    assert sorted(line.split(",")[0] for line in aside) == names
    assert len(epochs) == 3 + 4 * 2  # two networks of two kinds, each by itself
    assert kept(path) == []


# The calibration


@pytest.mark.parametrize("after", [slow(3), slow(ROUND + 1), ROUND + 3, slow(2 * ROUND), slow(2 * ROUND + 3)])
def test_a_calibration_that_is_interrupted_goes_on_in_the_middle_of_a_fleet(calibration, epochs, tmp_path, after):
    path = tmp_path / "run"
    assert fit(path, stopping(after)) is None
    assert len(epochs) == after
    number, inside = divmod(after, ROUND)
    files = [name for name in kept(path) if name.startswith("fleet")]
    assert [name.rsplit("-", 1)[0] for name in files] == [f"fleet-round-{number}"] * ((inside + 1) // 2)
    assert state_of(path).done == number
    assert fit(path) is not None
    assert epochs == calibration[1]
    assert fitted(path) == calibration[0]
    assert kept(path) == []


def test_a_calibration_in_slices_gives_that_of_one_run(calibration, epochs, tmp_path, monkeypatch):
    for module in (calibration_run, engine):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: float(len(epochs))))
    path, slices, lines, found = tmp_path / "run", 0, [], None
    while found is None:
        found = fit(path, seconds=3, report=lines.append)
        slices += 1
        assert slices < 20
    assert slices == 4  # 12 epochs, three to a slice
    assert "round 0: time is up: 1 fleet is left; resume with --resume" in lines
    assert epochs == calibration[1]
    assert fitted(path) == calibration[0]
    assert kept(path) == []


def test_a_kill_between_a_round_and_its_checkpoints_leaves_nothing_behind(calibration, epochs, tmp_path, no_cleaning):
    path = tmp_path / "run"
    with pytest.raises(KilledError):
        fit(path)
    assert len(kept(path)) == 3
    no_cleaning.undo()
    fit(path)
    assert epochs == calibration[1]
    assert fitted(path) == calibration[0]
    assert kept(path) == []
