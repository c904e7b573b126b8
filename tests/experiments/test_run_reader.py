"""Run folders read back."""

import dataclasses
import fcntl
import json
import os
import shutil

import pytest

from torch_dcl.experiments import find_runs, read_run, save
from torch_dcl.experiments.natural_data import MADE_UP
from torch_dcl.experiments.recipes.table1 import Table1, Table1Config
from torch_dcl.experiments.recipes.table2 import Table2, Table2Config
from torch_dcl.experiments.run_reader import as_argument, state_of
from torch_dcl.experiments.runner import outcomes_of
from torch_dcl.experiments.runner import run as run_recipe
from torch_dcl.experiments.table import is_trial
from torch_dcl.fleet.run_folder import RunError, RunFolder, lock_holder

TINY = Table1Config(
    sets=("MNIST-III-10",), models=("baseline", "A2"), seeds=2, epochs=2, warmup=0, drops=(), batch=50, curves=True,
    train_images=50, test_images=50, data="excerpt",
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    path = tmp_path_factory.mktemp("finished") / "run"
    return path, run_recipe(Table1(TINY), path).result


@pytest.fixture
def run(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "runs" / "a")
    return tmp_path / "runs" / "a"


def test_a_run_has_its_recipe_environment_outcomes_and_table(finished, run):
    found = read_run(run)
    assert (found.state.state, found.state.done, found.state.total) == ("finished", 4, 4)
    assert found.recipe["columns"] == ["baseline", "A2"]
    assert found.environment[0]["versions"]["torch"]
    assert {(o.job.network, o.job.seed) for o in found.outcomes} == {(c, s) for c in ("baseline", "A2") for s in (0, 1)}
    assert found.table.cells == finished[1].cells
    assert found.table.hardware == finished[1].hardware
    assert is_trial(found.table)  # fifty images are not the protocol, whoever wrote the table down
    assert set(found.parts) == {"curves"}
    assert len(found.parts["curves"]["series"]["A2"]["test_loss"]) == 2


def test_the_table_that_was_written_at_the_end_is_taken_as_it_is(finished, run):
    changed = dataclasses.replace(finished[1], hardware="as it was written")
    save(changed, run / "table1.json")
    assert read_run(run).table == changed
    save(finished[1], run / "table1.json")
    assert read_run(run / "table1.json").table == finished[1]
    assert read_run(run / "table1.json").recipe == {}


def test_a_run_that_has_not_ended_has_the_table_so_far(run):
    lines = (run / "outcomes.jsonl").read_text().splitlines(keepends=True)
    (run / "outcomes.jsonl").write_text("".join(lines[:1]))
    (run / "table1.json").unlink()
    found = read_run(run)
    assert (found.state.state, found.state.done) == ("incomplete", 2)
    assert [(cell.column, len(cell.errors)) for cell in found.table.cells] == [("baseline", 2)]
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
        (lambda run: (run / "recipe.json").unlink(), "is not a run folder: it has no recipe.json"),
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
        test_images=5, batch=5, factorial=False,
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
    known = outcomes_of(RunFolder.inspect(run))
    for cell in read_run(run).table.cells:
        seconds = [outcome.seconds for job, outcome in known.items() if job.network == cell.column]
        assert cell.minutes == pytest.approx(sum(seconds) / 60)
        assert cell.minutes > 0


# Runs of earlier versions


@pytest.fixture
def old(run):
    """The same run as format 1 had it: a line an entry, without checksums, and the recipe under other names."""
    folder = RunFolder.inspect(run)
    known = outcomes_of(folder)
    recipe = {key: value for key, value in folder.recipe.items() if key not in ("recipe", "total", "unit", "curves")}
    starts = [
        {**start, "versions": {**start["versions"], "torch-dcl": "0.1.0"}} for start in folder.read("environment")
    ]
    lines = []
    for job, outcome in known.items():
        plain = {"column": job.network, "data": job.data, "seed": job.seed, "lr": job.lr, "clip": None,
                 "weight_decay": 5e-4, "filters": None}  # fmt: skip
        curves = list(outcome.extra["curves"].values())
        losses = {"test_loss": outcome.test_loss, "train_loss": outcome.train_loss}
        lines.append(
            {"job": plain, "error": outcome.error, "stopped": None, **losses, "curves": curves, "seconds": 3.0}
        )
    for name, records in (("outcomes", lines), ("environment", starts), ("minutes", [{"training": 2.0}])):
        (run / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (run / "recipe.json").write_text(json.dumps({"table": 1, **recipe}))
    (run / "table1.json").unlink()
    return run


def test_a_run_of_an_earlier_version_is_listed_and_reported(finished, old):
    state = state_of(old)
    assert (state.recipe, state.state, state.done, state.total) == ("table1", "finished", 4, 4)
    found = read_run(old)
    same = {"minutes": {}, "versions": {}}
    assert dataclasses.replace(found.table, **same) == dataclasses.replace(finished[1], **same)
    assert found.parts["curves"] == read_run(finished[0]).parts["curves"]
    assert [cell.minutes for cell in found.table.cells] == pytest.approx([0.1, 0.1])


def test_a_run_of_an_earlier_version_is_not_resumed_and_the_version_is_named(old):
    with pytest.raises(RunError, match=r"was begun by torch-dcl 0\.1\.0 in another format .* cannot be resumed"):
        run_recipe(Table1(TINY), old, resume=True)


def test_a_run_of_format_2_names_the_version_of_its_recipe(run):
    recipe = json.loads((run / "recipe.json").read_text())
    (run / "recipe.json").write_text(json.dumps({**recipe, "format": 2, "version": "0.1.7"}))
    assert read_run(run).table is not None
    with pytest.raises(RunError, match=r"begun by torch-dcl 0\.1\.7 in another format \(2, here 3\)"):
        run_recipe(Table1(TINY), run, resume=True)


@pytest.mark.parametrize(
    ("recipe", "records", "state"),
    [
        (
            {"chart": "deciding", "points": [["dcl", 0.25], ["star", 0.25]], "rates": [0.1], "seeds": 2},
            {"outcomes": [{"purpose": "choose", "unit": "dcl", "share": 0.25, "lr": 0.1, "seed": 100, "error": 1.0}]},
            ("chart", "incomplete", 1, 6, "trainings"),
        ),
        (
            {"recipe": "table1-search", "models": ["A2"], "sets": ["MNIST-II-01"], "trials": ["0.1", "0.2"]},
            {"trials": [{}, {}]},
            ("table1-search", "finished", 2, 2, "entries"),
        ),
        ({"recipe": "calibration", "rounds": 3}, {"rounds": [{}]}, ("calibration", "incomplete", 1, 4, "rounds")),
        (
            {"recipe": "figures", "parts": ["filters", "curves"]},
            {"parts": [{"part": "curves"}]},
            ("figures", "incomplete", 1, 2, "parts"),
        ),
        ({"recipe": "knowledge"}, {}, ("knowledge", "incomplete", 0, 1, "parts")),
    ],
)
def test_old_runs_of_other_recipes_are_counted_as_they_were(tmp_path, recipe, records, state):
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    for name, lines in records.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = state_of(tmp_path)
    assert (found.recipe, found.state, found.done, found.total, found.unit) == state


@pytest.mark.parametrize(
    ("path", "typed"),
    [("runs/a", "runs/a"), ("/tmp/a", "/tmp/a"), ("table1", "./table1"), ("-a/b", "./-a/b"), ("my run", "'./my run'")],
)
def test_a_folder_is_typed_so_that_it_is_no_recipe_and_no_option(path, typed):
    assert as_argument(path) == typed
