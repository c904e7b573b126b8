"""Table 1 as a run: stopped, killed, shared or resumed, it gives the same table, and it guards its folder."""

import dataclasses
import fcntl
import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from torch_dcl.data.layouts import LAYOUTS
from torch_dcl.experiments import engine, table, table1
from torch_dcl.experiments.columns import MODELS, weights
from torch_dcl.experiments.digitsets import read_mnist
from torch_dcl.experiments.engine import SCHEDULE, Settings, run_fleets
from torch_dcl.experiments.ranks import Rank
from torch_dcl.experiments.reported import TABLE1
from torch_dcl.experiments.search import Trial, stored_choice, stored_minutes
from torch_dcl.experiments.table1 import estimate, jobs_of, outcome_of, run_table1, table_of
from torch_dcl.fleet import Fleet, Schedule
from torch_dcl.fleet.run_folder import RunError, RunFolder

ROOT = Path(__file__).parents[2]
NAME = "MNIST-II-01"
MNIST = read_mnist(None)
SETTINGS = Settings(Schedule(1), batch=50, precision="float64", most=2)  # a fleet is two networks
COLUMNS = ("baseline", "A2", "oracle")
CHOICE = {column: {2: Trial(0.02), 3: Trial(0.02)} for column in COLUMNS}


def run(path, digits=MNIST, settings=SETTINGS, **changes):
    asked = {"columns": COLUMNS, "sets": [NAME], "seeds": 2, "choice": CHOICE, "images": (100, 50)}
    return run_table1(path, digits, settings, **{"report": lambda _: None, **asked, **changes})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run at once, and its folder."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    return run(path), path


@pytest.fixture
def done(whole, tmp_path):
    """A folder that holds all of the run, to be damaged."""
    folder = tmp_path / "done"
    folder.mkdir()
    for name in ("recipe.json", "outcomes.jsonl", "minutes.jsonl"):
        (folder / name).write_bytes((whole[1] / name).read_bytes())
    return folder


@pytest.fixture
def untrained(monkeypatch):
    """Nothing may be trained any more."""

    def refuse(*_):
        pytest.fail("a network was trained")

    monkeypatch.setattr(Fleet, "_begin_epoch", refuse)


def records(folder, name="outcomes"):
    return RunFolder.inspect(folder).read(name)


# One run


def test_the_table_has_a_cell_for_every_column_and_set_with_every_seed(whole):
    made, folder = whole
    assert [(cell.set, cell.column) for cell in made.cells] == [(NAME, column) for column in COLUMNS]
    assert all(cell.seeds == (0, 1) and len(cell.errors) == 2 and cell.stopped == () for cell in made.cells)
    by_job = {(r["job"]["column"], r["job"]["seed"]): r for r in records(folder)}
    assert len(records(folder)) == len(by_job) == 6
    for cell in made.cells:
        for key, values in (("error", cell.errors), ("train_loss", cell.train_loss), ("test_loss", cell.test_loss)):
            assert [by_job[cell.column, seed][key] for seed in cell.seeds] == list(values)


def test_the_papers_numbers_and_the_weights_stand_beside(whole):
    made, _ = whole
    for cell in made.cells:
        assert (cell.paper, cell.paper_std) == TABLE1[NAME][cell.column]
    assert [cell.weights for cell in made.cells] == [475_500, 335_500, 2 * weights("oracle", 100)]


def test_the_baseline_alone_is_marked_as_fitted(whole):
    assert {cell.column: cell.fitted for cell in whole[0].cells} == {"baseline": True, "A2": False, "oracle": False}


def test_a_table_comes_back_from_its_file_as_it_was(whole, tmp_path):
    table.save(whole[0], tmp_path / "table1.json")
    assert table.load(tmp_path / "table1.json") == whole[0]


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
    lines = [{**record, "compiling": 3.0} for record in records(done)]
    (done / "minutes.jsonl").unlink()
    RunFolder.inspect(done).append("minutes", {"training": 2.0})
    made = table_of([outcome_of(line) for line in lines], "digits", SETTINGS, RunFolder.inspect(done))
    spent = 3.0 * len(lines) / 60
    before = {"calibration of the sets, earlier on an H200": stored_minutes()["calibration"]}
    assert made.minutes == pytest.approx({"training and evaluation": 2.0 - spent, "compiling": spent, **before})


def test_the_minutes_of_what_was_done_before_stand_beside(tmp_path):
    search, fit = (
        json.loads((ROOT / "results" / name).read_text()) for name in ("table1-search.json", "calibration.json")
    )
    made = run(tmp_path / "stored", choice=None, columns=("baseline",), seeds=1)
    assert made.minutes["search of learning rates, earlier on an H200"] == search["minutes"]
    assert made.minutes["calibration of the sets, earlier on an H200"] == fit["repeat"]["minutes"]


def test_every_entry_of_the_paper_is_a_job_with_the_rate_of_its_column():
    choice = stored_choice()
    jobs = jobs_of(MODELS, tuple(LAYOUTS), 5, choice)
    assert len(jobs) == len(set(jobs)) == 11 * 15 * 5
    for job in jobs:
        digits = 2 if "-II-" in job.data else 3
        assert (job.lr, job.clip) == choice[job.column][digits]
    assert {job.seed for job in jobs} == set(range(5))


def test_an_estimate_counts_networks_images_and_fleets():
    jobs = jobs_of(("baseline", "oracle"), (NAME, "MNIST-III-01"), 3, stored_choice())
    found = estimate(jobs, Settings(SCHEDULE, most=4))
    networks = 3 * (1 + 2) + 3 * (1 + 3)
    assert found.networks == networks
    assert found.images == networks * 60_000 * 24
    assert found.fleets == 2 + 5  # three baselines twice; the oracle's in pairs of two, and threes alone
    assert found.minutes(1e6) == pytest.approx(networks * 60_000 * 24 / 1e6 / 60)


# Going on


def test_a_run_in_slices_gives_the_table_of_a_run_at_once(whole, tmp_path, monkeypatch):
    clock = [0.0]  # goes on by one with every epoch, and a fleet has one
    for module in (table1, engine):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def tick(at):
        clock[0] += at.epoch

    settings = dataclasses.replace(SETTINGS, on_epoch=tick)
    lines = []
    path = tmp_path / "slices"
    assert run(path, seconds=0, report=lines.append) is None
    assert not (path / "outcomes.jsonl").exists()
    assert lines == ["time is up: 4 fleets are left; resume with --resume"]
    for count in (2, 4, 5):
        assert run(path, settings=settings, resume=True, seconds=1) is None  # one fleet each
        assert len(records(path)) == count
    made = run(path, resume=True)
    assert made.cells == whole[0].cells
    assert dataclasses.replace(made, minutes={}) == dataclasses.replace(whole[0], minutes={})
    assert made.minutes["training and evaluation"] == sum(r["training"] for r in records(path, "minutes"))


def test_a_run_that_is_broken_off_keeps_the_fleets_that_were_done(whole, tmp_path):
    def stop(line):
        if line.startswith("fleet 2 of 4"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken", report=stop)
    assert len(records(tmp_path / "broken")) == 4
    lines = []
    assert run(tmp_path / "broken", resume=True, report=lines.append).cells == whole[0].cells
    assert lines[0] == "4 of 6 entries are done already"
    assert len(lines) == 1 + 2


def test_a_run_that_is_done_trains_nothing_when_asked_again(whole, done, untrained):
    assert run(done, resume=True).cells == whole[0].cells


def test_every_start_is_noted_with_its_environment(done, untrained):
    run(done, resume=True)
    run(done, resume=True)
    assert len(records(done, "environment")) == 2


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
        ({"images": (100, 40)}, r"images: \[100, 50\] then, \[100, 40\] now"),
        ({"choice": {**CHOICE, "A2": {2: Trial(0.03), 3: Trial(0.02)}}}, r"choice\.A2\.2\.lr: 0\.02 then, 0\.03 now"),
        ({"choice": {**CHOICE, "A2": {2: Trial(0.02, 3.0), 3: Trial(0.02)}}}, r"A2\.2\.clip: null then, 3\.0 now"),
        ({"columns": ("baseline", "A2")}, "columns: .*oracle.* then"),
        ({"settings": dataclasses.replace(SETTINGS, batch=25)}, "batch: 50 then, 25 now"),
        ({"settings": dataclasses.replace(SETTINGS, schedule=Schedule(2))}, r"schedule\.epochs: 1 then, 2 now"),
        ({"settings": dataclasses.replace(SETTINGS, precision="float32")}, 'precision: "float64" then, "float32" now'),
        ({"digits": MNIST._replace(source="others")}, 'then, "others" now'),
    ],
)
def test_a_changed_recipe_is_refused_with_the_difference(done, untrained, change, difference):
    with pytest.raises(RunError, match=rf"(?s)was begun with other settings:\n.*{difference}.*ask for the same"):
        run(done, resume=True, **change)


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
    assert run(done, resume=True, settings=dataclasses.replace(SETTINGS, most=160)).cells == whole[0].cells


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
    path.write_text("".join(lines[:4]) + lines[4][:kept])
    assert run(done, resume=True).cells == whole[0].cells
    assert run(done, resume=True).cells == whole[0].cells


def test_a_last_line_that_was_cut_off_is_left_out_when_reading(done, untrained):
    path = done / "outcomes.jsonl"
    path.write_text(path.read_text()[:-30])
    assert run(done, resume=True, seconds=0) is None  # one entry is missing, and none is damaged


def test_a_damaged_earlier_line_is_an_error_that_names_it(done, untrained):
    path = done / "outcomes.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[2] = lines[2][:50] + "\n"
    path.write_text("".join(lines))
    with pytest.raises(RunError, match=r"outcomes.jsonl, line 3, is damaged .*remove the line, or the folder"):
        run(done, resume=True)


WILD = {column: {2: Trial(1e200)} for column in ("baseline",)}


def test_seeds_that_diverged_are_named_and_stay_so_after_a_break(tmp_path):
    asked = {"columns": ("baseline",), "choice": WILD}
    made = run(tmp_path / "wild", **asked)
    assert made.cells[0].stopped == (0, 1)
    assert all(error > 90 for error in made.cells[0].errors)
    again = run(tmp_path / "wild", resume=True, **asked)
    assert (again.cells[0].stopped, again.cells[0].errors) == (made.cells[0].stopped, made.cells[0].errors)


def test_a_table_with_a_diverged_network_can_be_saved(tmp_path):
    made = run(tmp_path / "wild", columns=("baseline",), choice=WILD)
    table.save(made, tmp_path / "table1.json")


def test_what_a_diverged_network_leaves_is_json(tmp_path):
    def refuse(word):
        raise ValueError(word)

    run(tmp_path / "wild", columns=("baseline",), choice=WILD)
    for line in (tmp_path / "wild" / "outcomes.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_an_outcome_comes_back_from_its_record(whole):
    for record in records(whole[1]):
        outcome = table1.outcome_of(record)
        assert outcome.job.clip == math.inf
        assert json.loads(json.dumps(table1._record(outcome), allow_nan=False)) == record


# Several processes

RANK = """
import runpy
import sys
import torch.distributed as dist
from torch_dcl.experiments import table, table1

make_sets = table1.make_sets

def make_sets_together(*arguments, **options):
    dist.barrier()  # both have looked at what is done before any of them adds to it
    return make_sets(*arguments, **options)

table1.make_sets = make_sets_together
dist.init_process_group("gloo")
made = runpy.run_path(sys.argv[3])["run"](sys.argv[1], columns=("baseline", "oracle"), resume=True)
print("no table" if made is None else "the table")
if made is not None:
    table.save(made, sys.argv[2])
dist.destroy_process_group()
"""


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.slow
def test_two_ranks_share_the_fleets_and_the_first_one_gives_the_whole_table(whole, tmp_path):
    path, out = tmp_path / "shared", tmp_path / "table1.json"
    port = str(free_port())
    ranks = []
    for rank in ("0", "1"):
        there = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(path), str(out), __file__],
                env={**os.environ, **there, "PYTHONPATH": os.pathsep.join(sys.path)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
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
    assert table.load(out).cells == expected
    shares = [{(r["job"]["column"], r["job"]["seed"]) for r in records(path, f"outcomes-{rank}")} for rank in (0, 1)]
    assert shares[0].isdisjoint(shares[1])
    assert [len(share) for share in shares] == [3, 1]  # two baselines and an oracle; an oracle
    # One process goes on with what two have done.
    assert run(path, columns=("baseline", "oracle"), resume=True).cells == expected


def as_rank(monkeypatch, rank):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(Rank, "wait", lambda _: None)


def test_the_other_ranks_wait_until_the_first_has_made_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(table1, "run_fleets", lambda *_: None)
    calls = []

    def barrier(_):
        calls.append((tmp_path / "shared" / "recipe.json").exists())
        if len(calls) == 1:  # rank 1 waits, and meanwhile rank 0 begins
            monkeypatch.setenv("RANK", "0")
            run(tmp_path / "shared")
            monkeypatch.setenv("RANK", "1")

    as_rank(monkeypatch, 1)
    monkeypatch.setattr(Rank, "wait", barrier)
    run(tmp_path / "shared")
    assert calls == [False, True, True, True]


def test_a_rank_that_starts_late_does_its_own_share(tmp_path, monkeypatch):
    planned = []

    def note(fleets, *others):
        planned.extend(job for fleet in fleets for job in fleet)
        return run_fleets(fleets, *others)

    monkeypatch.setattr(table1, "run_fleets", note)
    for rank in (0, 1):  # the first one ends before the second one begins
        as_rank(monkeypatch, rank)
        run(tmp_path / "shared", resume=True)
    assert len(planned) == len(set(planned))
    assert set(planned) == set(jobs_of(COLUMNS, [NAME], 2, CHOICE))
