"""Table 2 as a run: on files of the right form, stopped, killed, shared or resumed, it gives the same table."""

import dataclasses
import itertools
import json
import math
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.data.test_sources import write_cifar

from torch_dcl.data import load, svhn
from torch_dcl.experiments.natural import table2
from torch_dcl.experiments.natural.recipes import (
    COLUMNS,
    build,
    caffe_factors,
    inputs_of,
    paper_error,
    recipe_of,
    weights,
)
from torch_dcl.experiments.natural.slices import How, abreast
from torch_dcl.experiments.natural.table import NOT_AVAILABLE, as_markdown2, load_table2, save_table2
from torch_dcl.experiments.natural.table2 import run_table2
from torch_dcl.experiments.reported import TABLE2
from torch_dcl.experiments.table import Table, TableError
from torch_dcl.models import count_weights
from torch_dcl.training import Fleet, Member, Schedule
from torch_dcl.training.abreast import train_abreast
from torch_dcl.training.runs import RunError, RunFolder

LENETS = ("lenet", "lenet+dcl", "lenet+dcl3s")
SHORT = 0.02  # three epochs of the LeNet variant


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """CIFAR-10 in its official files, 20 images to train on and 4 to test with."""
    place = tmp_path_factory.mktemp("data")
    write_cifar(place / "cifar-10-batches-bin", "cifar10")
    return place


def run(path, root, **changes):
    asked = {"columns": ("lenet", "lenet+dcl"), "data": ["cifar10", "svhn"], "seeds": 2, "scale": SHORT, "batch": 5}
    return run_table2(path, root=root, **{"report": lambda _: None, **asked, **changes})


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
    assert list((path / "fleets").iterdir()) == []


def test_a_set_that_is_not_there_is_noted_and_nothing_else(whole):
    table, _ = whole
    assert table.absent == {"svhn": NOT_AVAILABLE} == {"svhn": "not run: data not available"}
    assert table.sets == ("cifar10", "svhn")
    text = as_markdown2(table)
    assert text.count(NOT_AVAILABLE) == len(table.columns)


def test_none_of_the_sets_there_is_an_error_with_the_remedy(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"svhn was not found.*put train_32x32\.mat"):
        run(tmp_path / "run", tmp_path, data=["cifar10", "svhn"])


def test_a_shortened_run_is_marked(whole):
    table, _ = whole
    assert table.scale == SHORT
    assert "shortened to 0.02 of the epochs" in table.title
    assert "**Shortened: every recipe was trained for 0.02 of its epochs.**" in as_markdown2(table)
    assert "3 epochs" in table.protocol["lenet on cifar10"]


def test_the_rows_that_the_paper_quotes_are_shown(whole):
    text = as_markdown2(whole[0])
    for row in TABLE2:
        if row.reference:
            assert f"{row.name} {row.reference.split('_')[1]} | {row.errors['CIFAR10']:.2f}" in text


def test_a_network_ends_as_it_would_in_a_fleet_by_hand(whole, root):
    data = load("cifar10", root=root)
    how = How()
    recipe = dataclasses.replace(recipe_of("lenet", "cifar10").scaled(SHORT), batch=5)
    fleet = table2.make_fleet("lenet+dcl", [1], data, recipe, how)
    fleet.train()
    found = fleet.evaluate({"cifar10": (data.test_images, data.test_labels)})
    cell = whole[0].cell("cifar10", "lenet+dcl")
    assert float(found.losses[0]) == pytest.approx(cell.test_loss[1], rel=1e-4)


def test_a_table_comes_back_from_its_file_as_it_was(whole, tmp_path):
    save_table2(whole[0], tmp_path / "table2.json")
    assert load_table2(tmp_path / "table2.json") == whole[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"set": "mnist"}, "set 'mnist' is unknown; known are cifar10, cifar100, svhn"),
        ({"column": "vgg"}, "column 'vgg' is unknown"),
        ({"errors": [10, 120]}, "each from 0 to 100"),
        ({"seeds": [0, 0]}, "a seed of its own"),
        ({"weights": 0}, "weights is 0"),
        ({"paper": 1.0}, "paper is 1.0, but it has 14.18"),
    ],
)
def test_a_file_that_is_no_table_is_refused_with_the_place(whole, tmp_path, change, message):
    content = json.loads(json.dumps(dataclasses.asdict(whole[0])))
    content["cells"][0].update(change)
    (tmp_path / "table2.json").write_text(json.dumps(content))
    with pytest.raises(TableError, match=rf"cells\[0\].*{message}"):
        load_table2(tmp_path / "table2.json")


# Slices, kills, ranks


def test_slices_give_the_table_of_one_run(whole, root, tmp_path):
    slices = 0
    table = None
    while table is None:
        table = run(tmp_path / "run", root, seconds=0.0, resume=slices > 0)
        slices += 1
        assert slices < 20
    assert slices == 6  # two fleets of three epochs, and every call goes on by one
    assert compared(table) == compared(whole[0])


@pytest.fixture
def together(monkeypatch):
    """The columns of a network train abreast here as well, as they do on a GPU."""
    monkeypatch.setattr(
        table2, "abreast", lambda fleets, how, alike: abreast(fleets, dataclasses.replace(how, device="cuda"), alike)
    )


def test_columns_abreast_give_the_table_of_columns_one_by_one(whole, root, tmp_path, together):
    lines, slices, table = [], 0, None
    while table is None:
        table = run(tmp_path / "run", root, seconds=0.0, resume=slices > 0, report=lines.append)
        slices += 1
        assert slices < 20
    assert slices == 3  # one group of two fleets, three epochs
    assert compared(table) == compared(whole[0])
    assert any(line.startswith("1/1 lenet, lenet+dcl on cifar10, 4 networks: epoch 2 of 3") for line in lines)
    assert list((tmp_path / "run" / "fleets").iterdir()) == []


@pytest.mark.parametrize("step", [3, 7, 17])  # in one column or the other, of the first epoch and later ones
def test_columns_abreast_killed_at_any_step_give_the_same_table(step, whole, root, tmp_path, killed_at, together):
    with killed_at(step):
        run(tmp_path / "run", root, how=How(every=0.0))
    assert compared(run(tmp_path / "run", root, resume=True)) == compared(whole[0])


def test_a_kill_between_two_checkpoints_leaves_fleets_at_two_epochs_and_changes_nothing(
    whole, root, tmp_path, monkeypatch, together
):
    save, saved = Fleet.save, []

    def once(self, path):
        saved.append(path)
        if len(saved) == 4:  # the second fleet's of the second epoch
            raise KeyboardInterrupt
        return save(self, path)

    with monkeypatch.context() as patched:
        patched.setattr(Fleet, "save", once)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "run", root, how=How(every=0.0))
    assert compared(run(tmp_path / "run", root, resume=True)) == compared(whole[0])


def test_which_fleets_train_abreast():
    """Neighbours of one kind, on a GPU, as far as there is room."""
    fleets = [["a1", "a2"], ["a3", "a4"], ["a5"], ["b1"], ["b2", "b3", "b4", "b5", "b6", "b7"], ["b8"]]
    gpu = How("cuda", most=5)
    assert abreast(fleets, gpu, lambda name: name[0]) == [fleets[:3], fleets[3:4], fleets[4:5], fleets[5:]]
    assert abreast(fleets, How("cuda:1", most=4), lambda name: name[0])[0] == fleets[:2]
    assert abreast(fleets, How("cpu"), lambda name: name[0]) == [[fleet] for fleet in fleets]
    assert abreast([], gpu, lambda name: name[0]) == []


def test_fleets_abreast_end_as_they_do_alone():
    """Of other architectures, lengths and numbers of images; one is at its end before the other."""

    def made():
        fleets = []
        for column, epochs, images in (("lenet", 1, 20), ("lenet+dcl", 3, 10)):
            generator = torch.Generator().manual_seed(images)
            data = torch.randint(0, 256, (images, 3, 32, 32), dtype=torch.uint8, generator=generator)
            labels = torch.arange(images) % 10
            member = Member(column, "set", 1, 1e-3, Schedule(epochs), 0.0)
            networks = [build(column, 10, 1)]
            fleets.append(Fleet(networks, [member], {"set": (data, labels)}, batch=5, stacked=False))
        return fleets

    alone, together = made(), made()
    for fleet in alone:
        fleet.train()
    epochs = []
    while any(fleet.epoch < fleet.epochs for fleet in together):
        train_abreast(together)
        epochs.append([fleet.epoch for fleet in together])
    assert epochs == [[1, 1], [1, 2], [1, 3]]
    for one, other in zip(alone, together, strict=True):
        assert one.history == other.history
        for (name, mine), theirs in zip(one.network(0).named_parameters(), other.network(0).parameters(), strict=True):
            assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("step", [0, 7, 12, 23])
def test_a_run_killed_at_any_step_and_resumed_gives_the_same_table(step, whole, root, tmp_path, killed_at):
    with killed_at(step):
        run(tmp_path / "run", root, how=How(every=0.0))
    assert compared(run(tmp_path / "run", root, resume=True)) == compared(whole[0])


def test_a_kill_between_two_outcomes_of_a_fleet_loses_and_doubles_nothing(whole, root, tmp_path, monkeypatch):
    append = RunFolder.append

    def once(self, name, record):
        if name == "outcomes" and record["seed"] == 1:
            raise KeyboardInterrupt
        append(self, name, record)

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "append", once)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "run", root)
    assert compared(run(tmp_path / "run", root, resume=True)) == compared(whole[0])
    lines = (tmp_path / "run" / "outcomes.jsonl").read_text().splitlines()
    assert len(lines) == 4


def test_a_damaged_checkpoint_is_named_with_the_remedy(root, tmp_path):
    run(tmp_path / "run", root, seconds=0.0)
    (path,) = (tmp_path / "run" / "fleets").iterdir()
    bytes_ = bytearray(path.read_bytes())
    bytes_[-5] ^= 1
    path.write_bytes(bytes_)
    with pytest.raises(ValueError, match="remove the file to train this fleet from its beginning"):
        run(tmp_path / "run", root, resume=True)


def test_another_recipe_in_the_same_folder_is_refused(whole, root):
    with pytest.raises(RunError, match="another recipe"):
        run(whole[1], root, scale=0.5, resume=True)


def test_names_that_do_not_exist_are_refused(root, tmp_path):
    with pytest.raises(ValueError, match="there is no network 'vgg'; the networks are lenet, bignet, wrn"):
        run(tmp_path / "run", root, columns=None, networks=["vgg"])
    with pytest.raises(ValueError, match="Table 2 has no set 'mnist'"):
        run(tmp_path / "run", root, data=["mnist"])


def test_two_processes_share_a_run(whole, root, tmp_path):
    program = f"""
import torch
torch.set_num_threads(1)
from torch_dcl.experiments.natural.table import save_table2
from torch_dcl.experiments.natural.table2 import run_table2
table = run_table2({str(tmp_path / "run")!r}, root={str(root)!r}, columns=("lenet", "lenet+dcl"),
                   data=["cifar10", "svhn"], seeds=2, scale={SHORT}, batch=5)
if table is not None:
    save_table2(table, {str(tmp_path / "table2.json")!r})
"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", program], env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    assert [process.wait(timeout=300) for process in ranks] == [0, 0]
    parts = [len((tmp_path / "run" / f"outcomes-{rank}.jsonl").read_text().splitlines()) for rank in range(2)]
    assert parts == [2, 2]
    table = load_table2(tmp_path / "table2.json")
    for mine, theirs in zip(table.cells, whole[0].cells, strict=True):
        assert (mine.set, mine.column, mine.seeds) == (theirs.set, theirs.column, theirs.seeds)
        assert mine.test_loss == pytest.approx(theirs.test_loss, rel=1e-4)


# Every network, and SVHN from its files


def test_every_column_trains_on_cifar_and_on_svhn_from_files_of_the_right_form(root, tmp_path, monkeypatch):
    savemat = pytest.importorskip("scipy.io", reason="the extra svhn is not installed").savemat
    monkeypatch.setattr(svhn, "PER_CLASS", {"train": 1, "extra": 1})
    place = tmp_path / "data"
    write_cifar(place / "cifar-100-binary", "cifar100", count=4)
    (place / "svhn").mkdir()
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("extra", 12), ("test", 3)):
        labels = np.arange(count) % 10
        images = rng.integers(0, 256, (32, 32, 3, count), np.uint8)
        savemat(place / "svhn" / f"{split}_32x32.mat", {"X": images, "y": np.where(labels == 0, 10, labels)[:, None]})
    table = run_table2(
        tmp_path / "run", root=place, data=["cifar100", "svhn"], seeds=1, scale=1e-9, batch=2, images=(4, 3),
        report=lambda _: None,
    )  # fmt: skip
    assert table.absent == {}
    assert [(cell.set, cell.column) for cell in table.cells] == list(itertools.product(("cifar100", "svhn"), COLUMNS))
    assert all(cell.stopped == () and math.isfinite(cell.test_loss[0]) for cell in table.cells)
    assert table.cell("svhn", "wrn").paper == 1.77
    assert "dropout 0.4 in the blocks" in table.protocol["wrn on svhn"]
    assert "SVHN, 4 + 3" in table.protocol["data, svhn"] or "first 4 and 3" in table.protocol["data, svhn"]
