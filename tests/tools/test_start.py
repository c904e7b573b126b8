"""What `benchmarks/start.py` concludes from errors: by its rule, and from nothing where nothing was learned."""

import importlib.util
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("start", BENCHMARKS / "start.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(place="bignet", chance="99", **errors):
    """The rows of DCL's starts: by start the errors of two seeds at each of two rates; None for one that diverged."""
    return [
        {"place": place, "unit": "dcl", "start": start, "rate": rate, "error": 90.0 if error is None else error,
         "stopped": 3 if error is None else "", "chance": chance}
        for start, by_rate in errors.items()
        for rate, of_rate in zip((0.01, 0.1), by_rate, strict=True)
        for error in of_rate
    ]  # fmt: skip


def test_a_lower_error_at_as_many_rates_is_better(tool):
    made = rows(torch=[[60.0, 61.0], [62.0, 62.0]], data=[[55.0, 56.2], [58.0, 58.0]])
    assert tool.judge_start(made, "data")[0] == "better"
    assert tool.decide(made, "data").startswith("By the rule data takes the place")


def test_a_difference_within_two_standard_errors_is_level(tool):
    made = rows(torch=[[60.0, 61.0], [70.0, 70.0]], data=[[59.0, 61.9], [70.0, 70.0]])
    assert tool.judge_start(made, "data")[0] == "level"
    assert "does not take" in tool.decide(made, "data")


def test_a_start_that_diverges_at_a_rate_where_torchs_trains_is_worse(tool):
    made = rows(torch=[[60.0, 61.0], [62.0, 62.0]], data=[[55.0, 56.2], [58.0, None]])
    assert tool.judge_start(made, "data")[0] == "worse"
    better = rows("lenet", torch=[[60.0, 61.0], [62.0, 62.0]], data=[[55.0, 56.2], [58.0, 58.0]])
    assert "does not take" in tool.decide(made + better, "data")


def test_networks_that_learned_nothing_decide_nothing(tool):
    """Ninety-two per cent against ninety-four of a hundred classes is not a better start."""
    made = rows(torch=[[94.0, 94.0], [96.0, 96.0]], data=[[91.9, 92.0], [95.0, 95.0]])
    assert tool.judge_start(made, "data") == ("not decided", "trains at 0 rates, torch's at 0")
    assert "bignet not decided" in tool.decide(made, "data")


@pytest.mark.parametrize(("images", "epochs"), [(45_000, 11), (18_000, 28), (400, 1250), (50, 5000)])
def test_fewer_images_are_passed_over_more_often(tool, images, epochs):
    assert tool.epochs_of(5000, images, 100) == epochs
