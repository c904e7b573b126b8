"""`dcl run` of what is beside Table 1: calibration, figures, and the knowledge of one's own network."""

import json
import os
import signal
from types import SimpleNamespace

import pytest

TINY = ("--set", "train_images=50", "--set", "test_images=50", "--epochs", "2", "--set", "batch=50", "--seeds", "1",
        "--set", "warmup=0", "--device", "cpu")  # fmt: skip
FIGURES = ("run", "figures", "--set", "parts=filters,curves", "--set", "set=II-01", "--set", "filters=10", *TINY)
CALIBRATION = ("run", "calibration", "--sets", "II-01", "--set", "start=0.5,1", "--set", "rounds=2", *TINY)


@pytest.fixture
def epochs(monkeypatch):
    """The epochs that are trained, as networks, sizes and losses; `epochs.then` is called behind each."""
    from torch_dcl.fleet import Fleet

    class Epochs(list):
        then = staticmethod(lambda: None)

    real, trained = Fleet._end_epoch, Epochs()

    def end_epoch(fleet):
        real(fleet)
        size = sum(p.numel() for p in fleet.network(0).parameters())
        trained.append(([m.name for m in fleet.members], size, fleet.epoch, fleet.history.train_loss[-1]))
        trained.then()

    monkeypatch.setattr(Fleet, "_end_epoch", end_epoch)
    return trained


def left(path):
    """What a run leaves, to the last digit, and the names of what it should not leave."""
    content = {name: (path / name).read_text() for name in ("filters.json", "curves.json") if (path / name).exists()}
    if (path / "calibration.json").exists():
        content["calibration"] = json.loads((path / "calibration.json").read_text())["sets"]
    return content, [file.name for file in path.glob("fleets*")]


@pytest.mark.parametrize(
    ("words", "after", "state", "number", "code"),
    [(FIGURES, 3, "1 of 6 trainings", signal.SIGTERM, 75), (FIGURES, 11, "5 of 6 trainings", signal.SIGINT, 130),
     (CALIBRATION, 3, "2 of 4 entries", signal.SIGTERM, 75)],
)  # fmt: skip
def test_a_signal_saves_the_fleet_and_the_run_is_resumed_to_the_same_numbers(
    dcl, folder, epochs, words, after, state, number, code
):
    name = words[1]
    dcl(*words, "--out", f"runs/whole-{name}")
    whole = list(epochs)
    epochs.clear()

    def stop():
        if len(epochs) == after:
            os.kill(os.getpid(), number)

    epochs.then = stop
    before = signal.signal(number, signal.default_int_handler)  # a shell's background has interrupts ignored
    shown = dcl(*words, code=code)
    signal.signal(number, before)
    assert f"Stopped by {number.name}" in shown
    assert f"runs/{name} is incomplete, {state}" in " ".join(shown.split())
    assert f"dcl run runs/{name} --resume" in shown
    assert len(epochs) == after
    assert len(list((folder / f"runs/{name}/fleets").iterdir())) == 1
    shown = dcl("run", f"runs/{name}", "--resume")
    assert "resumed after epoch 1 of 2" in shown
    assert epochs == whole
    assert left(folder / f"runs/{name}") == left(folder / f"runs/whole-{name}")
    assert left(folder / f"runs/{name}")[1] == []


@pytest.mark.parametrize(("words", "calls"), [(FIGURES, 4), (CALIBRATION, 2)])
def test_minutes_end_in_the_middle_of_a_fleet(dcl, folder, epochs, monkeypatch, words, calls):
    from torch_dcl.experiments import runner

    name = words[1]
    dcl(*words, "--out", f"runs/whole-{name}")
    whole = list(epochs)
    epochs.clear()
    # A clock on which every epoch takes a minute, and a little for the seconds of a call to be over.
    monkeypatch.setattr(runner, "time", SimpleNamespace(perf_counter=lambda: 60.1 * len(epochs)))
    shown = dcl(*words, "--minutes", "3")
    for _ in range(calls - 1):
        assert "Time is up." in shown
        shown = dcl("run", f"runs/{name}", "--resume", "--minutes", "3")
    assert "Time is up." not in shown
    assert epochs == whole
    assert left(folder / f"runs/{name}") == left(folder / f"runs/whole-{name}")


def test_calibration_smoke_is_small(dcl, folder):
    dcl("run", "calibration", "--smoke", "--out", "runs/c")
    recipe = json.loads((folder / "runs/c/recipe.json").read_text())
    assert (recipe["train_images"], recipe["test_images"], recipe["rounds"]) == (100, 50, 0)
    assert "finished, 1 entry" in dcl("ls")
    dcl("report", "c")
    assert "Strengths at which the baseline errs as the paper" in (folder / "report.html").read_text()


def test_figures_run_part_by_part_and_have_a_report(dcl, folder):
    words = ("run", "figures", "--smoke", "--out", "runs/f", "--seeds", "1", "--set", "parts=filters,knowledge")
    shown = dcl(*words, "--set", "epochs=1")
    assert "Drawn in runs/f: filters.svg, knowledge-A2.svg, knowledge-B2.svg" in shown
    assert "A large filter bank does not help much." in shown
    assert "finished, 6 trainings" in dcl("ls")
    assert "6 of 6 trainings are done already" in dcl("run", "runs/f", "--resume")
    dcl("report", "f")
    page = (folder / "report.html").read_text()
    assert 'id="run1-knowledge-B2-dark-' in page
    assert "Losses by epoch: not run." in page


def test_the_dry_run_of_figures_counts_all_parts(dcl):
    shown = " ".join(dcl("run", "figures", "--dry-run").split())
    # Filters: the baseline and eight widths, curves: four, tried: eight, shares: two, with five seeds; knowledge: two.
    assert f"networks {5 * (1 + 8 + 4 + 8 + 2) + 2}" in shown


MINE = """
import torch
from torch_dcl.models import lenet

def make():
    torch.manual_seed(0)
    return lenet(100)
"""


@pytest.fixture
def mine(dcl, folder):
    """A converted LeNet, its weights in a file, and labelled images to show it."""
    import torch_dcl

    (folder / "mine.py").write_text(MINE)
    model = torch_dcl.models.lenet(100)
    plan = torch_dcl.plan(model, (1, 28, 28)).only("fc1")
    torch_dcl.convert_(model, plan, init="random")
    torch_dcl.save_model(model, folder / "mine.safetensors")
    dcl("data", "digits", "--sets", "II-01", "--images", "40")
    return ("run", "knowledge", "--set", "network=mine.py:make", "--set", "weights=mine.safetensors", "--data",
            "prepared:data/digits/MNIST-II-01.safetensors")  # fmt: skip


def test_the_knowledge_of_ones_own_network(dcl, folder, mine):
    shown = dcl(*mine, "--set", "filters=7,3")
    assert "knowledge-fc1-3.svg, knowledge-fc1-7.svg" in shown
    assert "finished, 2 filters" in dcl("ls")
    dcl("report", "knowledge")
    page = (folder / "report.html").read_text()
    assert "LeNet on MNIST-II-01, fc1, filter 7" in page
    assert "tens digit" in page  # the classes are numbers, and known as such
    assert "2 of 2 filters are done already" in dcl("run", "runs/knowledge", "--resume")
    assert "other settings" in dcl("run", "runs/knowledge", "--resume", "--set", "filters=8", code=2)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("--set", "layers=fc2"), "has no DCL layer 'fc2'; did you mean fc1?"),
        (("--set", "filters=500"), "has filters 0 to 499, not 500"),
        (("--set", "weights=other.safetensors"), "other.safetensors"),
        (("--set", "network=torch_dcl.models:bignet"), "mine.safetensors"),
        (("--data", "prepared:nothing.safetensors"), "nothing.safetensors"),
        (("--data", "cifar11"), "cifar10"),
    ],
)
def test_knowledge_of_what_is_not_there_is_wrong_usage(dcl, mine, change, told):
    assert told in " ".join(dcl(*mine, *change, code=2).split())


def test_the_dry_run_of_knowledge_writes_nothing(dcl, folder, mine):
    assert "mine.safetensors" in dcl(*mine, "--dry-run")
    assert json.loads(dcl(*mine, "--dry-run", "--json"))["network"] == "mine.py:make"
    assert not (folder / "runs").exists()
