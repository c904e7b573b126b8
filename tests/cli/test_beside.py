"""`dcl run` of what is beside Table 1: calibration, figures, and the knowledge of one's own network."""

import json

import pytest


def test_calibration_smoke_is_small(dcl, folder):
    dcl("run", "calibration", "--smoke", "--out", "runs/c")
    recipe = json.loads((folder / "runs/c/recipe.json").read_text())
    assert (recipe["train_images"], recipe["test_images"], recipe["rounds"]) == (100, 50, 0)
    assert "finished, 1 round" in dcl("ls")
    assert "reports are of table1" in dcl("report", "c", code=2)


def test_a_calibration_with_all_images_keeps_the_recipe_that_it_always_had(dcl, folder):
    dcl("run", "calibration", "--minutes", "1e-9")
    assert "train_images" not in json.loads((folder / "runs/calibration/recipe.json").read_text())


def test_figures_run_part_by_part_and_have_a_report(dcl, folder):
    words = ("run", "figures", "--smoke", "--out", "runs/f", "--seeds", "1", "--set", "parts=filters,knowledge")
    shown = dcl(*words, "--set", "epochs=1")
    assert "Drawn in runs/f: filters.svg, knowledge-A2.svg, knowledge-B2.svg" in shown
    assert "A large filter bank does not help much." in shown
    assert "finished, 2 parts" in dcl("ls")
    assert "Everything was there already." in dcl("run", "runs/f", "--resume")
    dcl("report", "f")
    page = (folder / "report.html").read_text()
    assert 'id="run1-knowledge-B2-dark-' in page
    assert "Losses by epoch: not run." in page


def test_the_dry_run_of_figures_counts_all_parts(dcl):
    shown = " ".join(dcl("run", "figures", "--dry-run").split())
    # Filters: the baseline and eight widths, curves: four, tried: eight, each with five seeds; knowledge: two.
    assert f"networks {5 * (1 + 8 + 4 + 8) + 2}" in shown


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
    assert "finished, 1 part" in dcl("ls")
    dcl("report", "knowledge")
    page = (folder / "report.html").read_text()
    assert "LeNet on MNIST-II-01, fc1, filter 7" in page
    assert "tens digit" in page  # the classes are numbers, and known as such
    assert "Everything was there already." in dcl("run", "runs/knowledge", "--resume")
    assert "another recipe" in dcl("run", "runs/knowledge", "--resume", "--set", "filters=8", code=1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("--set", "layers=fc2"), "has no DCL layer 'fc2'; did you mean 'fc1'?"),
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
    assert "one a layer, chosen by a rule" in dcl(*mine, "--dry-run")
    assert json.loads(dcl(*mine, "--dry-run", "--json"))["network"] == "mine.py:make"
    assert not (folder / "runs").exists()
