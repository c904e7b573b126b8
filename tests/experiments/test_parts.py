"""What is beside the table, as a run: part by part, kept, and gone on with."""

import json

import pytest

from torch_dcl.experiments import experiments, parts
from torch_dcl.experiments.digitsets import read_mnist
from torch_dcl.experiments.engine import Outcome, Settings
from torch_dcl.experiments.reading import PARTS, read_run, state_of
from torch_dcl.fleet import Schedule
from torch_dcl.fleet.run_folder import RunError

MNIST = read_mnist(None)
TINY = Settings(Schedule(1), batch=50)
RECIPE = {
    "recipe": "figures", "parts": list(PARTS), "set": "MNIST-II-01", "knowledge_set": "MNIST-II-05",
    "filters": [10, 25, 50], "seeds": 2,
}  # fmt: skip


def run(path, recipe=RECIPE, **options):
    return parts.run_parts(path, recipe, MNIST, TINY, **{"images": (50, 50), "report": lambda _: None, **options})


@pytest.fixture
def counted(monkeypatch):
    """Nothing is trained; the jobs that would have been are noted."""
    asked = []

    def fake(jobs, sets, settings, report):
        asked.append(list(jobs))
        losses = ([0.5, 0.25], [0.6, 0.3])
        return [Outcome(job, 10.0 + job.seed, 0.3, 0.25, None, losses) for job in asked[-1]]

    monkeypatch.setattr(experiments, "run_jobs", fake)
    monkeypatch.setattr(experiments, "firing", lambda *_: {"one": 0.8, "all": 0.6})
    return asked


def test_the_estimate_counts_what_is_trained(counted, tmp_path):
    few = {**RECIPE, "parts": ["filters", "curves"]}
    run(tmp_path / "run", few)
    expected = parts.jobs_of_parts(RECIPE)
    for part, jobs in zip(("filters", "curves"), counted, strict=True):
        assert [(j.column, j.data, j.seed, j.filters) for j in jobs] == [
            (j.column, j.data, j.seed, j.filters) for j in expected[part]
        ]
    assert {part: len(jobs) for part, jobs in expected.items()} == {
        "filters": 8, "curves": 8, "knowledge": 2, "tried": 16,
    }  # fmt: skip


def test_a_part_that_is_done_is_not_run_again(counted, tmp_path):
    few = {**RECIPE, "parts": ["filters", "curves"]}
    path = tmp_path / "run"
    assert run(path, few, seconds=-1.0) is None
    assert state_of(path).state == "incomplete"
    begun = []
    assert run(path, few, resume=True, begin=lambda *n: begun.append(n)) == ["filters.svg", "curves.svg"]
    assert len(counted) == 2
    assert run(path, few, resume=True, begin=lambda *n: begun.append(n)) == []
    assert len(counted) == 2
    assert begun == [(0, 16), (16, 16)]
    state = state_of(path)
    assert (state.state, state.done, state.total, state.unit) == ("finished", 2, 2, "parts")


def test_a_broken_part_leaves_those_before_it(counted, tmp_path, monkeypatch):
    path = tmp_path / "run"

    def broken(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(experiments, "curves_data", broken)
    few = {**RECIPE, "parts": ["filters", "curves"]}
    with pytest.raises(KeyboardInterrupt):
        run(path, few)
    assert (state_of(path).done, state_of(path).state) == (1, "incomplete")
    assert set(read_run(path).parts) == {"filters"}


def test_the_missing_file_of_a_part_is_an_error(counted, tmp_path):
    path = tmp_path / "run"
    few = {**RECIPE, "parts": ["filters"]}
    run(path, few)
    (path / "filters.json").unlink()
    with pytest.raises(RunError, match=r"filters\.json is missing; put it back"):
        run(path, few, resume=True)


def test_all_parts_run_and_are_drawn(tmp_path):
    path = tmp_path / "run"
    assert run(path) == ["filters.svg", "curves.svg", "knowledge-A2.svg", "knowledge-B2.svg"]
    found = read_run(path)
    assert list(found.parts) == list(PARTS)
    assert found.parts["knowledge"]["set"] == "MNIST-II-05"
    assert [row["column"] for row in found.parts["tried"]["columns"]][-1] == "AB2"
    for name in PARTS:
        json.loads((path / f"{name}.json").read_text(), parse_constant=pytest.fail)
    assert (path / "knowledge-A2.svg").read_text().startswith("<?xml")
    minutes = [json.loads(line) for line in (path / "parts.jsonl").read_text().splitlines()]
    assert [entry["part"] for entry in minutes] == list(PARTS)
    assert all(entry["minutes"] > 0 for entry in minutes)
