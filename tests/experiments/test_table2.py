"""Table 2 as a run: on files of the right form, stopped, killed, shared or resumed, it gives the same table."""

import dataclasses
import itertools
import json
import math
import re
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.data.test_sources import write_cifar
from tests.halves import slow
from tests.processes import Process, importing

from torch_dcl import DCLConv2d
from torch_dcl.data import load, svhn
from torch_dcl.experiments.natural_data import NOT_AVAILABLE, NaturalConfig, make_fleet
from torch_dcl.experiments.natural_networks import (
    COLUMNS,
    LENET_OPTIONS,
    build,
    caffe_factors,
    check_recipes,
    inputs_of,
    nearest,
    network_of,
    paper_error,
    recipe_of,
    weights,
)
from torch_dcl.experiments.paper_numbers import TABLE2
from torch_dcl.experiments.recipes.table2 import Table2, Table2Config, join_table2
from torch_dcl.experiments.runner import run as run_recipe
from torch_dcl.experiments.settings import SettingError
from torch_dcl.experiments.table import Table, TableError
from torch_dcl.experiments.table import load as load_table
from torch_dcl.experiments.table import save as save_table
from torch_dcl.fleet.run_folder import RunError
from torch_dcl.models import count_weights
from torch_dcl.models.lenet_cifar import WithinChannelNorm
from torch_dcl.report import as_markdown

ROOT = Path(__file__).parents[2]
LENETS = ("lenet", "lenet+dcl", "lenet+dcl3s")
SHORT = 0.02  # three epochs of the LeNet variant


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """CIFAR-10 in its official files, 20 images to train on and 4 to test with."""
    place = tmp_path_factory.mktemp("data")
    write_cifar(place / "cifar-10-batches-bin", "cifar10")
    return place


def run(path, root, *, settings=None, **options):
    asked = {
        "models": ("lenet", "lenet+dcl"), "data": ("cifar10", "svhn"), "seeds": 2, "scale": SHORT, "batch": 5,
        "factorial": False,
    }  # fmt: skip
    return run_recipe(Table2(Table2Config(root=str(root), **(asked | (settings or {})))), path, **options).result


@pytest.fixture(scope="module")
def whole(root, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "whole"
    return run(path, root), path


def compared(table):
    """All of a table that another run of the same must have."""
    return table.cells, table.protocol, table.absent, table.scale, table.title


# Recipes and networks


@pytest.mark.parametrize(
    ("network", "data", "epochs", "rates"),
    [
        ("lenet", "cifar10", 150, {0: 1e-3, 119: 1e-3, 120: 1e-4, 139: 1e-4, 140: 1e-5, 149: 1e-5}),
        ("lenet", "svhn", 150, {0: 1e-3, 120: 1e-4, 140: 1e-5}),
        ("bignet", "cifar100", 200, {0: 1e-2, 119: 1e-2, 120: 1e-3, 179: 1e-3, 180: 1e-4, 199: 1e-4}),
        ("bignet", "svhn", 17, {0: 1e-2, 16: 1e-4}),
        ("wrn", "cifar10", 200, {0: 0.1, 59: 0.1, 60: 0.02, 119: 0.02, 120: 0.004, 159: 0.004, 160: 0.0008}),
        ("wrn", "svhn", 160, {0: 0.01, 79: 0.01, 80: 0.001, 119: 0.001, 120: 0.0001, 159: 0.0001}),
    ],
)
def test_the_learning_rates_are_those_of_the_paper(network, data, epochs, rates):
    recipe = recipe_of(network, data)
    assert recipe.schedule.epochs == epochs
    by_epoch = recipe.schedule.rates(recipe.lr, 1)
    for epoch, rate in rates.items():
        assert float(by_epoch[epoch]) == pytest.approx(rate)


def test_a_shortened_recipe_keeps_its_phases_in_proportion():
    recipe = recipe_of("bignet", "cifar10").scaled(0.05)
    assert recipe.schedule.rates(recipe.lr, 1).tolist() == pytest.approx([1e-2] * 6 + [1e-3] * 3 + [1e-4])
    assert recipe_of("lenet", "cifar10").scaled(1e-9).schedule.epochs == 1
    for wrong in (0, -1, 1.5, math.nan):
        with pytest.raises(ValueError, match="scale must be above 0 and at most 1"):
            recipe.scaled(wrong)


def test_caffes_biases_learn_twice_as_fast_and_do_not_decay():
    assert caffe_factors("fc1.fusion.bias") == (2.0, 0.0)
    assert caffe_factors("conv1.weight") == (1.0, 1.0)
    assert caffe_factors("fc2.weight", classifier=250.0) == (1.0, 250.0)


@pytest.mark.parametrize(
    ("column", "count"),
    [("lenet", 1_312_096), ("lenet+dcl", 918_880), ("bignet", 5_742_272), ("bignet+dcl", 5_086_912),
     ("wrn", 2_747_072), ("wrn+dcl", 2_747_072 - 2560 + 6 * 256 + 60), ("bignet+dcl3s", 5_742_272 - 2304 * 1024
     + 768 * (2304 + 1024))],
)  # fmt: skip
def test_the_weights_are_those_of_the_paper(column, count):
    assert weights(column, 10) == count == count_weights(build(column, 10, 3))


def test_the_columns_of_a_network_start_alike_but_for_the_replaced_layer():
    state = torch.get_rng_state()
    starts = [dict(build(column, 10, 5).named_parameters()) for column in LENETS]
    assert torch.equal(torch.get_rng_state(), state)
    for name in ("conv1.weight", "conv2.weight", "conv3.weight"):
        assert all(torch.equal(start[name], starts[0][name]) for start in starts)
    assert not torch.equal(dict(build("lenet", 10, 6).named_parameters())["conv1.weight"], starts[0]["conv1.weight"])


def test_the_paper_s_numbers_stand_beside_ours():
    assert paper_error("bignet", "cifar10") == 7.88
    assert paper_error("bignet+dcl", "cifar100") == 29.83
    assert paper_error("wrn", "svhn") == 1.77
    assert all(paper_error(f"{name}+dcl3s", "svhn") is None for name in ("lenet", "bignet", "wrn"))
    with pytest.raises(ValueError, match="there is no column 'resnet'"):
        paper_error("resnet", "svhn")


def test_what_the_networks_see(root):
    data = load("cifar10", root=root)
    lenet, bignet, wrn = (inputs_of(network, data) for network in ("lenet", "bignet", "wrn"))
    mean = data.train_images.double().mean(0)
    torch.testing.assert_close(lenet.normalise.double(), mean, rtol=0, atol=1e-4)
    assert (bignet.crop, bignet.flip, bignet.pad, bignet.normalise) == (24, True, 0, data.statistics)
    assert (wrn.crop, wrn.flip, wrn.pad) == (None, True, 4)
    assert all(inputs_of(n, data, average=True).average for n in ("lenet", "bignet", "wrn"))
    digits = dataclasses.replace(data, name="svhn")
    for network in ("lenet", "bignet", "wrn"):
        inputs = inputs_of(network, digits)
        assert (inputs.flip, inputs.pad) == (False, 0)
        factor = 64 if network == "lenet" else 1
        assert torch.equal(inputs.normalise(data.test_images), factor * svhn.preprocess(data.test_images))


# One run


def test_the_table_has_a_cell_for_every_column_with_every_seed(whole):
    table, path = whole
    assert isinstance(table, Table)
    assert [(cell.set, cell.column) for cell in table.cells] == [("cifar10", "lenet"), ("cifar10", "lenet+dcl")]
    for cell in table.cells:
        assert cell.seeds == (0, 1)
        assert all(error in (0, 25, 50, 75, 100) for error in cell.errors)  # of four images
        assert cell.weights == weights(cell.column, 10)
        assert cell.paper == (14.18 if cell.column == "lenet" else 13.55)
        assert all(map(math.isfinite, cell.train_loss + cell.test_loss))
    assert not (path / "fleets").exists()


def test_a_set_that_is_not_there_is_noted_and_nothing_else(whole):
    table, _ = whole
    assert table.absent == {"svhn": NOT_AVAILABLE} == {"svhn": "not run: data not available"}
    assert table.sets == ("cifar10", "svhn")
    text = as_markdown(table)
    assert text.count(NOT_AVAILABLE) == 1 + len(table.columns)  # a sentence, and a cell for each column


def test_none_of_the_sets_there_is_an_error_with_the_remedy(tmp_path):
    with pytest.raises(SettingError, match=r"svhn was not found.*put train_32x32\.mat"):
        run(tmp_path / "run", tmp_path)


def test_a_shortened_run_is_marked(whole):
    table, _ = whole
    assert table.scale == SHORT
    assert "shortened to 0.02 of the epochs" in table.title
    assert "**Shortened: every recipe was trained for 0.02 of its epochs.**" in as_markdown(table)
    assert "3 epochs" in table.protocol["lenet on cifar10"]


def test_the_rows_that_the_paper_quotes_are_shown(whole):
    text = as_markdown(whole[0])
    for row in TABLE2:
        if row.reference:
            assert f"{row.name} {row.reference.split('_')[1]} | {row.errors['CIFAR10']:.2f}" in text


def test_a_network_ends_as_it_would_in_a_fleet_by_hand(whole, root):
    data = load("cifar10", root=root)
    recipe = dataclasses.replace(recipe_of("lenet", "cifar10").scaled(SHORT), batch=5)
    fleet = make_fleet("lenet+dcl", [1], data, recipe, NaturalConfig())
    fleet.train()
    found = fleet.evaluate({"cifar10": (data.test_images, data.test_labels)})
    cell = whole[0].cell("cifar10", "lenet+dcl")
    assert float(found.losses[0]) == pytest.approx(cell.test_loss[1], rel=1e-4)


def test_a_table_comes_back_from_its_file_as_it_was(whole, tmp_path):
    save_table(whole[0], tmp_path / "table2.json")
    assert load_table(tmp_path / "table2.json") == whole[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"set": "mnist"}, "set 'mnist' is unknown; did you mean .*Known: cifar10, cifar100, svhn"),
        ({"column": "vgg"}, "column 'vgg' is unknown"),
        ({"errors": [10, 120]}, "each from 0 to 100"),
        ({"seeds": [0, 0]}, "names one twice; give each run its own"),
        ({"weights": 0}, "weights is 0"),
        ({"paper": 1.0}, "paper is 1.0 with None, but the paper has 14.18"),
    ],
)
def test_a_file_that_is_no_table_is_refused_with_the_place(whole, tmp_path, change, message):
    content = json.loads(json.dumps(dataclasses.asdict(whole[0])))
    content["cells"][0].update(change)
    (tmp_path / "table2.json").write_text(json.dumps(content))
    with pytest.raises(TableError, match=rf"cells\[0\].*{message}"):
        load_table(tmp_path / "table2.json")


# LeNet's options


def test_a_norm_within_channels_is_caffe_s():
    x = 40 * torch.randn(2, 3, 5, 4, dtype=torch.float64)
    found = WithinChannelNorm()(x)
    for place in ((0, 0, 0, 0), (1, 2, 4, 3), (0, 1, 2, 2)):
        n, c, h, w = place
        around = x[n, c, max(0, h - 1) : h + 2, max(0, w - 1) : w + 2]
        assert float(found[place]) == pytest.approx(float(x[place] / (1 + 5e-5 / 9 * around.square().sum()) ** 0.75))
    low = x.bfloat16()
    assert torch.equal(WithinChannelNorm()(low), WithinChannelNorm()(low.float()).bfloat16())


def test_options_change_network_decay_and_crops_and_nothing_else(root):
    data, plain = load("cifar10", root=root), dataclasses.replace(recipe_of("lenet", "cifar10"), batch=5)
    fleets = {
        option: make_fleet("lenet+dcl", [3], data, plain.with_options([option]), NaturalConfig())
        for option in ("none", *LENET_OPTIONS)
    }
    starts = [dict(fleet.network(0).named_parameters()) for fleet in fleets.values()]
    assert all(torch.equal(start[name], value) for start in starts for name, value in starts[0].items())
    norms = {o: sum(isinstance(m, WithinChannelNorm) for m in f.network(0).modules()) for o, f in fleets.items()}
    assert norms == {"none": 0, "norms": 2, "decay": 0, "crops": 0}
    assert {option: fleet.inputs.pad for option, fleet in fleets.items()} == {**dict.fromkeys(fleets, 0), "crops": 4}
    for option, fleet in fleets.items():
        factors = {name: decay for name, (_, decay) in fleet._factors.items() if name.endswith("weight")}
        assert factors.pop("fc2.weight") == (250.0 if option == "decay" else 1.0)
        assert set(factors.values()) == {1.0}


def test_options_are_chosen_by_the_plain_network_on_training_images_nearest_to_the_paper(root, tmp_path, monkeypatch):
    seen = []
    real = Table2.judge
    monkeypatch.setattr(Table2, "judge", lambda recipe, jobs: seen.append((jobs, real(recipe, jobs))) or seen[-1][1])
    table = run(tmp_path / "run", root, settings={"factorial": True})
    data = load("cifar10", root=root)
    trials = [(jobs, judged["cifar10"][0]) for jobs, judged in seen if jobs[0].phase == "choose"]
    assert [jobs[0].network for jobs, _ in trials] == ["lenet"] * 8
    known = {image.numpy().tobytes() for image in data.train_images}
    assert all(image.numpy().tobytes() in known for _, images in trials for image in images)
    assert len(table.lenet) == 8
    assert next(iter(table.lenet)) == "none"
    assert len({cell.recipe for cell in table.cells}) == 1
    chosen = nearest(table.lenet)
    assert all(
        (LENET_OPTIONS[name] in table.protocol["lenet on cifar10"]) == (name in chosen) for name in LENET_OPTIONS
    )


def test_the_nearest_options_are_those_with_the_least_relative_distance_over_the_sets():
    errors = {
        "none": {"cifar10": 16.62, "cifar100": 43.15}, "norms": {"cifar10": 14.0, "cifar100": 30.0},
        "norms+crops": {"cifar10": 14.5, "cifar100": 44.0}, "decay": {"cifar10": 100.0, "cifar100": 44.77},
    }  # fmt: skip
    assert nearest(errors) == ("norms", "crops")
    assert nearest({"none": errors["none"], "decay": errors["decay"]}) == ()


def test_wrn_has_fewer_seeds_and_two_columns_of_its_own():
    config = Table2Config()
    assert [config.seeds_of(column) for column in ("lenet", "bignet+dcl", "wrn+dcl-group3")] == [5, 5, 3]
    assert Table2Config(seeds=2).seeds_of("wrn") == 2
    classes, group = (build(f"wrn+{name}", 10, 0) for name in ("dcl-classes", "dcl-group3"))
    assert classes.fc.widths == (10, 10)
    replaced = {name: module for name, module in group.named_modules() if isinstance(module, DCLConv2d)}
    assert list(replaced) == ["group3.0.conv1", "group3.1.conv1"]
    assert all(module.fusion.norm is not None for module in replaced.values())
    assert all(paper_error(f"wrn+{name}", "cifar10") is None for name in ("dcl-classes", "dcl-group3"))


# Where a cell comes from


def test_cells_name_their_commit_and_their_recipe_and_agree_within_a_network(whole, root, tmp_path):
    table, _ = whole
    assert len({cell.recipe for cell in table.cells}) == 1
    assert all(len(cell.recipe) == 12 and cell.commit for cell in table.cells)
    other = run(tmp_path / "run", root, settings={"models": ("lenet+dcl3s",), "scale": SHORT / 2})
    alone = dataclasses.replace(other, scale=SHORT, title=table.title)
    assert other.cells[0].recipe != table.cells[0].recipe
    with pytest.raises(
        TableError, match=r"lenet on cifar10 was trained by different recipes \(lenet by .*; run its col"
    ):
        join_table2([table, alone])


def test_an_estimate_of_hours_is_a_whole_number_of_minutes():
    recipe = Table2(Table2Config())
    (minutes,) = re.findall(r"about (\S+) min", recipe.about(recipe.workloads()).words["on a GPU"])
    assert int(minutes.replace(",", "")) > 100


def test_the_stored_table_s_recipes_agree_with_each_other_and_with_the_code():
    table = load_table(ROOT / "results" / "table2.json")
    check_recipes(table.cells)
    for cell in table.cells:
        assert (
            str(recipe_of(network_of(cell.column), cell.set))
            in table.protocol[f"{network_of(cell.column)} on {cell.set}"]
        )


# Breaks, other data, ranks


@pytest.mark.parametrize("step", [slow(0), slow(7), 12, slow(23)])
def test_a_run_killed_at_any_step_and_resumed_gives_the_same_table(step, whole, root, tmp_path, killed_at):
    with killed_at(step):
        run(tmp_path / "run", root, every=0.0)
    assert compared(run(tmp_path / "run", root, resume=True)) == compared(whole[0])


def test_a_resume_on_other_images_in_a_folder_of_the_same_name_is_refused(root, tmp_path):
    place = tmp_path / "data"
    shutil.copytree(root, place)
    run(tmp_path / "run", place, seconds=0.0)
    file = place / "cifar-10-batches-bin" / "data_batch_3.bin"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    with pytest.raises(RunError, match=r"other settings or data:\n  sha256\.cifar10: "):
        run(tmp_path / "run", place, resume=True)


def test_another_recipe_in_the_same_folder_is_refused(whole, root):
    with pytest.raises(RunError, match=r"scale: 0\.02 then, 0\.5 now"):
        run(whole[1], root, settings={"scale": 0.5}, resume=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"networks": ["vgg"]}, "there is no network 'vgg'; known are lenet, bignet, wrn"),
        ({"data": ["mnist"]}, "there is no set 'mnist'; known are cifar10, cifar100, svhn"),
        ({"seeds": 10**9}, "seeds must be at least 1 and at most 1,000, not 1,000,000,000"),
        ({"lenet": ["crop"]}, "there is no option 'crop'; known are norms, decay, crops"),
        ({"lenet": ["crops"]}, "the factorial chooses LeNet's options; give factorial=no with lenet=crops"),
    ],
)
def test_settings_that_do_not_exist_are_refused(settings, message):
    with pytest.raises(SettingError, match=message):
        Table2Config(**settings)


@pytest.mark.slow
def test_two_processes_share_a_run(whole, root, tmp_path):
    program = f"""
import torch
torch.set_num_threads(1)
from torch_dcl.experiments.recipes.table2 import Table2, Table2Config
from torch_dcl.experiments.runner import run
config = Table2Config(root={str(root)!r}, models=("lenet", "lenet+dcl"), data=("cifar10", "svhn"), seeds=2,
                      scale={SHORT}, batch=5, factorial=False)
run(Table2(config), {str(tmp_path / "run")!r})
"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = importing(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    ranks = [Process(["-c", program], env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    assert [process.wait(timeout=300) for process in ranks] == [0, 0]
    parts = [len((tmp_path / "run" / f"outcomes-{rank}.jsonl").read_text().splitlines()) for rank in range(2)]
    assert parts == [1, 1]  # a fleet each
    table = load_table(tmp_path / "run" / "table2.json")
    for mine, theirs in zip(table.cells, whole[0].cells, strict=True):
        assert (mine.set, mine.column, mine.seeds) == (theirs.set, theirs.column, theirs.seeds)
        assert mine.test_loss == pytest.approx(theirs.test_loss, rel=1e-4)


# Every network, and SVHN from its files


@pytest.mark.slow
def test_every_column_trains_on_cifar_and_on_svhn_from_files_of_the_right_form(root, tmp_path, monkeypatch):
    savemat = pytest.importorskip("scipy.io", reason="SciPy is not installed").savemat
    monkeypatch.setattr(svhn, "PER_CLASS", {"train": 1, "extra": 1})
    place = tmp_path / "data"
    write_cifar(place / "cifar-100-binary", "cifar100", count=4)
    (place / "svhn").mkdir()
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("extra", 12), ("test", 3)):
        labels = np.arange(count) % 10
        images = rng.integers(0, 256, (32, 32, 3, count), np.uint8)
        savemat(place / "svhn" / f"{split}_32x32.mat", {"X": images, "y": np.where(labels == 0, 10, labels)[:, None]})
    few = {"seeds": 1, "scale": 1e-9, "batch": 2, "train_images": 4, "test_images": 3, "factorial": False}
    config = Table2Config(root=str(place), data=("cifar100", "svhn"), **few)
    table = run_recipe(Table2(config), tmp_path / "run").result
    assert table.absent == {}
    assert [(cell.set, cell.column) for cell in table.cells] == list(itertools.product(("cifar100", "svhn"), COLUMNS))
    assert all(cell.stopped == () and math.isfinite(cell.test_loss[0]) for cell in table.cells)
    assert table.cell("svhn", "wrn").paper == 1.77
    assert "dropout 0.4 in the blocks" in table.protocol["wrn on svhn"]
    assert "SVHN, 4 + 3" in table.protocol["data, svhn"] or "first 4 and 3" in table.protocol["data, svhn"]
