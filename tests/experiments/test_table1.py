"""Table 1 as a run: stopped, killed, shared or resumed, it gives the same table, and it guards its folder."""

import dataclasses
import fcntl
import json
import os
import shutil
import socket
import sys
from pathlib import Path

import pytest
import torch
from tests.processes import Process, importing

from torch_dcl.data.layouts import LAYOUTS
from torch_dcl.experiments import load, save
from torch_dcl.experiments.columns import Trial, stored_choice, stored_minutes, weights
from torch_dcl.experiments.digits import make_sets, read_mnist
from torch_dcl.experiments.paper_numbers import TABLE1
from torch_dcl.experiments.protocol import Listener
from torch_dcl.experiments.recipes.table1 import Table1, Table1Config, table1_of
from torch_dcl.experiments.run_reader import read_run
from torch_dcl.experiments.runner import outcomes_of
from torch_dcl.experiments.runner import run as run_recipe
from torch_dcl.experiments.settings import SettingError
from torch_dcl.fleet import Fleet
from torch_dcl.fleet.run_folder import RunError, RunFolder

ROOT = Path(__file__).parents[2]
NAME = "MNIST-II-01"
MNIST = read_mnist(None)
COLUMNS = ("baseline", "oracle", "A2")
CONFIG = Table1Config(
    sets=(NAME,), models=COLUMNS, seeds=2, epochs=1, warmup=0, drops=(), batch=50, precision="float64", most=2,
    train_images=100, test_images=50, data="excerpt",
)  # fmt: skip
CHOICE = {column: {2: Trial(0.02), 3: Trial(0.02)} for column in COLUMNS}


class Lines(Listener):
    """A listener that keeps the lines."""

    def __init__(self):
        self.lines = []

    def report(self, line):
        self.lines.append(line)


def run(path, choice=CHOICE, digits=None, summary=False, lines=None, resume=False, seconds=1e9, every=60.0, **changes):
    recipe = Table1(dataclasses.replace(CONFIG, **changes), choice=choice)
    if digits is not None:
        recipe.prepare = lambda _report: setattr(recipe, "digits", digits)
    listener = Lines()
    done = run_recipe(recipe, path, resume=resume, seconds=seconds, listener=listener, every=every)
    if lines is not None:
        lines += listener.lines
    return done if summary else done.result


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run at once, and its folder."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    return run(path), path


@pytest.fixture
def done(whole, tmp_path):
    """A folder that holds all of the run, to be damaged."""
    return Path(shutil.copytree(whole[1], tmp_path / "done"))


@pytest.fixture
def untrained(monkeypatch):
    """Nothing may be trained any more."""

    def refuse(*_):
        pytest.fail("a network was trained")

    monkeypatch.setattr(Fleet, "_begin_epoch", refuse)


def outcomes(folder):
    return outcomes_of(RunFolder.inspect(folder))


# One run


def test_the_table_has_a_cell_for_every_column_and_set_with_every_seed(whole):
    made, folder = whole
    assert [(cell.set, cell.column) for cell in made.cells] == [(NAME, column) for column in COLUMNS]
    assert all(cell.seeds == (0, 1) and len(cell.errors) == 2 and cell.stopped == () for cell in made.cells)
    by_job = {(job.network, job.seed): outcome for job, outcome in outcomes(folder).items()}
    assert len(by_job) == 6
    for cell in made.cells:
        for key, values in (("error", cell.errors), ("train_loss", cell.train_loss), ("test_loss", cell.test_loss)):
            assert [getattr(by_job[cell.column, seed], key) for seed in cell.seeds] == list(values)


def test_the_papers_numbers_and_the_weights_stand_beside(whole):
    made, _ = whole
    for cell in made.cells:
        assert (cell.paper, cell.paper_std) == TABLE1[NAME][cell.column]
    assert [cell.weights for cell in made.cells] == [475_500, 2 * weights("oracle", 100), 335_500]


def test_the_baseline_alone_is_marked_as_fitted(whole):
    assert {cell.column: cell.fitted for cell in whole[0].cells} == {"baseline": True, "A2": False, "oracle": False}


def test_a_table_comes_back_from_its_file_as_it_was(whole, tmp_path):
    save(whole[0], tmp_path / "table1.json")
    assert load(tmp_path / "table1.json") == whole[0]


def test_it_says_how_it_was_made(whole):
    made, _ = whole
    assert made.protocol["digits"] == MNIST.source
    assert made.protocol["schedule"].startswith("1 epoch, batch 50")
    assert made.protocol["precision"] == "float64"
    assert any("baseline column is fitted" in line for line in made.deviations)
    assert made.versions["torch"]
    assert made.minutes["training and evaluation"] > 0
    assert "compiling" not in made.minutes  # on a CPU nothing is


def test_compiling_has_minutes_of_its_own(done):
    known = {job: dataclasses.replace(o, compiling=3.0) for job, o in outcomes(done).items()}
    (done / "minutes.jsonl").unlink()
    folder = RunFolder.inspect(done)
    folder.append("minutes", {"training": 2.0})
    spent = 3.0 * len(known) / 60
    before = {"calibration of the sets, earlier on an H200": stored_minutes()["calibration"]}
    minutes = {"training and evaluation": 2.0 - spent, "compiling": spent, **before}
    assert table1_of(folder, known).minutes == pytest.approx(minutes)


def test_the_minutes_of_what_was_done_before_stand_beside(tmp_path):
    search, fit = (
        json.loads((ROOT / "results" / name).read_text()) for name in ("table1-search.json", "calibration.json")
    )
    made = run(tmp_path / "stored", choice=None, models=("baseline",), seeds=1)
    assert made.minutes["search of learning rates, earlier on an H200"] == search["minutes"]
    assert made.minutes["calibration of the sets, earlier on an H200"] == fit["repeat"]["minutes"]


def test_every_entry_of_the_paper_is_a_job_with_the_rate_of_its_column():
    choice = stored_choice()
    jobs = Table1(Table1Config()).jobs({})
    assert len(jobs) == len(set(jobs)) == 11 * 15 * 5
    for job in jobs:
        digits = 2 if "-II-" in job.data else 3
        found = Trial(job.lr, job.option("clip", float("inf")), job.option("weight_decay", 5e-4))
        assert found == choice[job.network][digits]
    assert {job.seed for job in jobs} == set(range(5))


def test_columns_without_a_learning_rate_are_refused_with_the_search_to_run(tmp_path):
    with pytest.raises(
        SettingError, match=r"no learning rate was chosen for wide-B2; search one with dcl run table1-se"
    ):
        Table1(Table1Config(models=("baseline", "wide-B2")))
    for text in ("", "{}", '{"choice": 3}', '{"choice": {"baseline": {"2": {}}}}'):
        (tmp_path / "search.json").write_text(text)
        with pytest.raises(SettingError, match=r"has no learning rates .*; give the search\.json of a finished"):
            Table1(Table1Config(choice=str(tmp_path)))
    chosen = {"wide-B2": {"2": {"lr": 0.1, "clip": 1.0, "weight_decay": 0.001}}}
    (tmp_path / "search.json").write_text(json.dumps({"choice": chosen}))
    (job,) = Table1(Table1Config(models=("wide-B2",), sets=(NAME,), seeds=1, choice=str(tmp_path))).jobs({})
    assert (job.lr, dict(job.options)) == (0.1, {"clip": 1.0, "weight_decay": 0.001})


def test_every_seed_has_images_of_its_own_and_all_columns_share_them():
    config = Table1Config(models=("A2", "oracle"), sets=(NAME,), seeds=2, fresh=True, train_images=60, test_images=20,
                          data="excerpt", batch=20, epochs=1)  # fmt: skip
    recipe = Table1(config)
    recipe.prepare(lambda _: None)
    jobs = recipe.jobs({})
    a2, oracle = ([job for job in jobs if job.network == column] for column in ("A2", "oracle"))
    fleet, whole = recipe.fleet(a2), recipe.fleet(oracle)
    assert [member.data for member in fleet.members] == [f"{NAME}/0", f"{NAME}/1"]
    assert len(fleet.data.images) == len(whole.data.images) == 2
    assert not torch.equal(fleet.data.images[0], fleet.data.images[1])
    assert torch.equal(fleet.data.images, whole.data.images)
    first, second = (recipe.judge(a2)[f"{NAME}/{seed}"] for seed in range(2))
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(recipe.sets_of(a2).train[f"{NAME}/0"][0], make_sets(recipe.digits, [NAME], "report",
                           images=(60, 20)).train[NAME][0])  # fmt: skip


def test_an_estimate_counts_networks_images_and_fleets():
    recipe = Table1(Table1Config(models=("baseline", "oracle"), sets=(NAME, "MNIST-III-01"), seeds=3, most=4))
    words, plain = recipe.estimate(lambda seconds: f"{seconds:.0f} s")
    networks = 3 * (1 + 2) + 3 * (1 + 3)
    assert plain["networks"] == networks
    assert plain["images"] == networks * 60_000 * 24
    assert plain["fleets"] == 2 + 5  # three baselines twice; the oracle's in pairs of two, and threes alone
    assert plain["minutes"] == pytest.approx(plain["images"] / plain["images_per_s"]["LeNet"] / 60)
    assert words["networks"] == "21, in 7 fleets of up to 4"


# Breaks


def test_a_run_in_slices_gives_the_table_of_a_run_at_once(whole, tmp_path):
    path, calls, summary = tmp_path / "slices", 0, None
    while summary is None or not summary.complete:
        summary = run(path, resume=calls > 0, seconds=0.0, summary=True)  # an epoch each, and a fleet has one
        calls += 1
        assert len(outcomes(path)) == (2, 3, 4, 6)[calls - 1]
    assert summary.result.cells == whole[0].cells
    same = {"minutes": {}, "command": ""}
    assert dataclasses.replace(summary.result, **same) == dataclasses.replace(whole[0], **same)
    spent = sum(record["training"] for record in RunFolder.inspect(path).read("minutes"))
    assert summary.result.minutes["training and evaluation"] == pytest.approx(spent)


@pytest.mark.parametrize("step", [1, 3, 5, 7])
def test_a_run_that_is_killed_at_any_step_gives_the_same_table(whole, tmp_path, killed_at, step):
    with killed_at(step):
        run(tmp_path / "run", every=0.0)
    lines = []
    assert run(tmp_path / "run", resume=True, lines=lines).cells == whole[0].cells
    assert not (tmp_path / "run" / "fleets").exists()
    done = (0, 2, 3, 4)[step // 2]
    assert (f"{done} of 6 entries are done already" in lines) == bool(done)


@pytest.mark.slow
def test_curves_that_were_interrupted_are_those_of_a_run_at_once(tmp_path, killed_at):
    """The losses of the epochs so far lie in the checkpoint."""
    long = {"models": ("baseline", "oracle"), "epochs": 3, "curves": True, "sets": ("MNIST-III-10",), "most": 6}
    run(tmp_path / "whole", **long)
    with killed_at(3 * 2 + 5):  # in the third epoch of the second fleet
        run(tmp_path / "run", every=0.0, **long)
    assert len(list((tmp_path / "run" / "fleets").iterdir())) == 2
    run(tmp_path / "run", resume=True, **long)
    mine, theirs = outcomes(tmp_path / "run"), outcomes(tmp_path / "whole")
    assert mine == theirs
    for outcome in mine.values():
        curves = outcome.extra["curves"]
        assert [len(curve) for curve in curves.values()] == [3, 3]
        assert (curves["train_loss"][-1], curves["test_loss"][-1]) == (outcome.train_loss, outcome.test_loss)
    series = read_run(tmp_path / "run").parts["curves"]["series"]
    assert [len(runs["test_loss"]) for runs in series.values()] == [2]  # without the oracle, whose losses are sums


def test_a_run_that_is_done_trains_nothing_when_asked_again(whole, done, untrained):
    assert run(done, resume=True).cells == whole[0].cells


def test_every_start_is_noted_with_its_environment(done, untrained):
    run(done, resume=True)
    assert len(RunFolder.inspect(done).read("environment")) == 2


# Refusals


def test_a_run_that_exists_is_refused_without_resume(done, untrained):
    before = {path.name: path.read_bytes() for path in done.glob("*.json*")}
    with pytest.raises(RunError, match="holds a run already; resume it with --resume, or choose another folder"):
        run(done)
    assert {path.name: path.read_bytes() for path in done.glob("*.json*")} == before


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"seeds": 3}, "seeds: 2 then, 3 now"),
        ({"test_images": 40}, r"images: \[100, 50\] then, \[100, 40\] now"),
        ({"choice": {**CHOICE, "A2": {2: Trial(0.03), 3: Trial(0.02)}}}, r"choice\.A2\.2\.lr: 0\.02 then, 0\.03 now"),
        ({"choice": {**CHOICE, "A2": {2: Trial(0.02, 3.0), 3: Trial(0.02)}}}, r"A2\.2\.clip: null then, 3\.0 now"),
        ({"models": ("baseline", "A2")}, "columns: .*oracle.* then"),
        ({"batch": 25}, "batch: 50 then, 25 now"),
        ({"epochs": 2}, r"schedule\.epochs: 1 then, 2 now"),
        ({"precision": "float32"}, 'precision: "float64" then, "float32" now'),
        ({"curves": True}, "curves: false then, true now"),
    ],
)
def test_a_changed_recipe_is_refused_with_the_difference(done, untrained, change, difference):
    with pytest.raises(RunError, match=rf"(?s)begun with other settings or data:\n.*{difference}.*choose the same"):
        run(done, resume=True, **change)


def test_the_same_digits_in_another_folder_are_resumed(done, untrained):
    run(done, resume=True, digits=MNIST._replace(source="others"))


def test_other_digits_in_a_folder_of_the_same_name_are_refused(done, untrained):
    labels = MNIST.train[1].clone()
    labels[7] = (labels[7] + 1) % 10
    with pytest.raises(RunError, match=r"sha256: .* then, .* now"):
        run(done, resume=True, digits=MNIST._replace(train=(MNIST.train[0], labels)))


def test_a_changed_strength_is_refused(done, untrained, monkeypatch):
    monkeypatch.setitem(LAYOUTS, NAME, dataclasses.replace(LAYOUTS[NAME], strength=0.9))
    with pytest.raises(RunError, match=r"strengths\.MNIST-II-01: 0\.7 then, 0\.9 now"):
        run(done, resume=True)


def test_how_many_networks_a_fleet_has_is_no_part_of_the_recipe(done, untrained, whole):
    assert run(done, resume=True, most=160).cells == whole[0].cells


def test_a_second_process_is_refused_while_the_first_one_runs(done, untrained):
    # flock holds between open files, within a process as well as between two.
    with (done / "lock").open("a+") as held:
        held.write("4711\n")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="done is in use by process 4711; wait for it, or give this run another"):
            run(done, resume=True)
    assert run(done, resume=True) is not None


# Damage


@pytest.mark.parametrize("kept", [40, -1])
def test_a_last_line_that_was_cut_off_is_run_again(whole, done, kept):
    path = done / "outcomes.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:kept])
    assert run(done, resume=True).cells == whole[0].cells
    assert run(done, resume=True).cells == whole[0].cells


def test_a_damaged_earlier_line_is_an_error_that_names_it(done, untrained):
    path = done / "outcomes.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[1] = lines[1][:50] + "\n"
    path.write_text("".join(lines))
    with pytest.raises(RunError, match=r"outcomes.jsonl, line 2, is damaged .*remove the line, or the folder"):
        run(done, resume=True)


@pytest.mark.parametrize("at", range(5, 400, 37))
def test_a_flipped_bit_in_the_outcomes_never_changes_the_table(done, untrained, at):
    path = done / "outcomes.jsonl"
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)
    with pytest.raises(RunError, match=r"outcomes.jsonl, line \d, is damaged"):
        run(done, resume=True)


WILD = {"models": ("baseline",), "choice": {"baseline": {2: Trial(1e200)}}}


def test_seeds_that_diverged_are_named_and_stay_so_after_a_break(tmp_path):
    made = run(tmp_path / "wild", **WILD)
    assert made.cells[0].stopped == (0, 1)
    assert all(error > 90 for error in made.cells[0].errors)
    again = run(tmp_path / "wild", resume=True, **WILD)
    assert (again.cells[0].stopped, again.cells[0].errors) == (made.cells[0].stopped, made.cells[0].errors)


def test_what_a_diverged_network_leaves_is_json_and_a_table(tmp_path):
    def refuse(word):
        raise ValueError(word)

    run(tmp_path / "wild", **WILD)
    for line in (tmp_path / "wild" / "outcomes.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    assert load(tmp_path / "wild" / "table1.json").cells[0].train_loss is None


# Several processes

RANK = """
import runpy, sys
made = runpy.run_path(sys.argv[2])["run"](sys.argv[1], models=("baseline", "oracle"), resume=True)
print("no table" if made is None else "the table")
"""


@pytest.mark.slow
def test_two_ranks_share_the_fleets_and_the_first_one_gives_the_whole_table(whole, tmp_path):
    path = tmp_path / "shared"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in ("0", "1"):
        there = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks.append(
            Process(["-c", RANK, str(path), __file__], env=importing(**there, PYTHONPATH=os.pathsep.join(sys.path)))
        )
    said = []
    try:
        said = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert [words.strip() for words, _ in said] == ["the table", "no table"]
    expected = tuple(cell for cell in whole[0].cells if cell.column != "A2")
    assert load(path / "table1.json").cells == expected
    lines = [(path / f"outcomes-{rank}.jsonl").read_text().splitlines() for rank in (0, 1)]
    assert [sum(len(json.loads(line)["outcomes"]) for line in of) for of in lines] == [3, 1]  # three fleets
