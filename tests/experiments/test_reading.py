"""Run folders read back."""

import fcntl
import json
import os
import shutil

import pytest

from torch_dcl.experiments import find_runs, read_run, save
from torch_dcl.experiments.digitsets import read_mnist
from torch_dcl.experiments.engine import Settings
from torch_dcl.experiments.natural.sets import MADE_UP
from torch_dcl.experiments.reading import state_of
from torch_dcl.experiments.recipes.table2 import Table2, Table2Config
from torch_dcl.experiments.runner import run as run_recipe
from torch_dcl.experiments.table import is_trial
from torch_dcl.experiments.table1 import run_table1
from torch_dcl.fleet import Schedule
from torch_dcl.fleet.run_folder import RunError, RunFolder, lock_holder

MNIST = read_mnist(None)
TINY = Settings(Schedule(2), batch=50, curves=True)
ASKED = {"columns": ("baseline", "A2"), "sets": ("MNIST-III-10",), "seeds": 2, "images": (50, 50)}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("finished") / "run"
    return path, run_table1(path, MNIST, TINY, report=lambda _: None, **ASKED)


@pytest.fixture
def run(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "runs" / "a")
    return tmp_path / "runs" / "a"


def test_a_run_has_its_recipe_environment_outcomes_and_table(finished, run):
    found = read_run(run)
    assert (found.state.state, found.state.done, found.state.total) == ("finished", 4, 4)
    assert found.recipe["columns"] == ["baseline", "A2"]
    assert found.environment[0]["versions"]["torch"]
    assert {(o.job.column, o.job.seed) for o in found.outcomes} == {(c, s) for c in ("baseline", "A2") for s in (0, 1)}
    assert found.table.cells == finished[1].cells
    assert found.table.hardware == finished[1].hardware
    assert is_trial(found.table)  # fifty images are not the protocol, whoever wrote the table down
    assert set(found.parts) == {"curves"}
    assert len(found.parts["curves"]["series"]["A2"]["test_loss"]) == 2


def test_the_table_that_was_written_at_the_end_is_taken_as_it_is(finished, run):
    save(finished[1], run / "table1.json")
    assert read_run(run).table == finished[1]
    assert read_run(run / "table1.json").table == finished[1]
    assert read_run(run / "table1.json").recipe == {}


def test_a_run_that_has_not_ended_has_the_table_so_far(run):
    lines = (run / "outcomes.jsonl").read_text().splitlines(keepends=True)
    (run / "outcomes.jsonl").write_text("".join(lines[:3]))
    found = read_run(run)
    assert (found.state.state, found.state.done) == ("incomplete", 3)
    assert sum(len(cell.errors) for cell in found.table.cells) == 3
    (run / "outcomes.jsonl").unlink()
    assert read_run(run).table is None


def test_a_run_can_be_read_while_it_is_written(run):
    with RunFolder.open(run, RunFolder.inspect(run).recipe, resume=True):
        assert lock_holder(run) == os.getpid()
        assert (state_of(run).state, state_of(run).pid) == ("running", os.getpid())
        assert read_run(run).table is not None
    assert lock_holder(run) is None
    (run / "lock").write_text(f"{os.getpid()}\n")  # as a kill leaves it
    assert lock_holder(run) is None


def test_only_a_lock_that_is_held_counts(run):
    with (run / "lock").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("999999999\n")
        file.flush()
        assert lock_holder(run) is None  # there is no such process


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda run: (run / "recipe.json").write_text("{"), "recipe.json is damaged"),
        (lambda run: (run / "recipe.json").write_text("[]"), "recipe.json is damaged: it holds list"),
        (lambda run: (run / "recipe.json").unlink(), "is no run folder: it has no recipe.json"),
        (lambda run: (run / "recipe.json").write_text('{"table": 1}'), "KeyError: 'columns'"),
        (lambda run: (run / "curves.json").write_text("{"), "curves.json is not JSON"),
    ],
)
def test_a_damaged_run_says_where(run, spoil, told):
    spoil(run)
    with pytest.raises(RunError) as caught:
        read_run(run)
    assert told in str(caught.value)


def test_runs_are_found_two_levels_deep_by_name(run, tmp_path):
    shutil.copytree(run, tmp_path / "runs" / "b" / "c")
    (tmp_path / "runs" / "empty").mkdir()
    found = find_runs(tmp_path / "runs")
    assert [state.path for state in found] == [str(run), str(tmp_path / "runs" / "b" / "c")]
    assert find_runs(tmp_path / "nowhere") == []


def test_a_damaged_run_is_listed_with_its_problem(run):
    (run / "recipe.json").write_text(json.dumps({"recipe": "figures"}))
    state = state_of(run)
    assert (state.state, state.recipe) == ("damaged", "?")
    assert "parts" in state.problem


@pytest.mark.parametrize(
    "recipe", [b"[" * 100_000, b"\xff\xfe", b"[]", b'{"table": 1}', b'{"total": "x", "recipe": 1}', b""]
)
def test_one_bad_folder_does_not_hide_the_others(run, recipe):
    bad = run.parent / "bad"
    bad.mkdir()
    (bad / "recipe.json").write_bytes(recipe)
    (bad / "lock").write_bytes(b"\xff\x00")
    states = {state.path: state.state for state in find_runs(run.parent)}
    assert states == {str(run): "finished", str(bad): "damaged"}


def test_a_run_of_table_2_is_counted_by_its_entries(tmp_path):
    recipe = {"table": 2, "seeds": 3, "recipes": {"cifar10 lenet": {}, "cifar10 lenet+dcl": {}}, "columns": []}
    lines = [{"data": "cifar10", "column": "lenet", "seed": seed, "error": 1.0} for seed in (0, 1, 1)]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.json").write_text(json.dumps(recipe))
    (tmp_path / "run" / "outcomes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    state = state_of(tmp_path / "run")
    assert (state.recipe, state.state, state.done, state.total) == ("table2", "incomplete", 2, 6)
    with pytest.raises(RunError, match=r"recipe or its outcomes are damaged \(KeyError: 'data'\)"):
        read_run(tmp_path / "run")


def test_a_run_of_table_2_that_has_not_ended_has_the_table_so_far(tmp_path):
    path = tmp_path / "run"
    config = Table2Config(
        models=("lenet", "lenet+dcl"), data=("cifar10",), seeds=2, scale=1e-9, root=MADE_UP, train_images=10,
        test_images=5, batch=5,
    )  # fmt: skip
    made = run_recipe(Table2(config), path).result
    assert read_run(path).table == made
    (path / "table2.json").unlink()
    lines = (path / "outcomes.jsonl").read_text().splitlines(keepends=True)
    (path / "outcomes.jsonl").write_text("".join(lines[:1]))
    found = read_run(path)
    assert (found.state.done, found.state.total) == (2, 4)
    assert [(cell.column, cell.seeds) for cell in found.table.cells] == [("lenet", (0, 1))]
    assert found.table.cells[0] == made.cells[0]
    assert is_trial(found.table)
    (path / "outcomes.jsonl").unlink()
    assert read_run(path).table is None


def test_an_unknown_recipe_is_named(tmp_path):
    with RunFolder.open(tmp_path / "run", {"recipe": "tea"}):
        pass
    assert "its recipe 'tea' is unknown" in state_of(tmp_path / "run").problem


def test_minutes_of_a_cell_are_the_share_of_its_fleets(run):
    folder = RunFolder.inspect(run)
    records = folder.read("outcomes")
    table = read_run(run).table
    for cell in table.cells:
        seconds = [r["seconds"] for r in records if r["job"]["column"] == cell.column]
        assert cell.minutes == pytest.approx(sum(seconds) / 60)
        assert cell.minutes > 0
    (run / "outcomes.jsonl").unlink()
    for record in records:
        del record["seconds"]  # as runs before this was noted
        folder.append("outcomes", record)
    assert {cell.minutes for cell in read_run(run).table.cells} == {None}
