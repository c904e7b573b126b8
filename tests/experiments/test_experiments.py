"""What section 4.1 shows beside its table: data of the right shape, counted right, that the figures can draw."""

import dataclasses
import json

import pytest
import torch

from torch_dcl.experiments import experiments, figures
from torch_dcl.experiments.columns import EXTRAS, MODELS, build, weights
from torch_dcl.experiments.digits import read_mnist
from torch_dcl.experiments.engine import Outcome, Settings
from torch_dcl.experiments.search import Trial, stored_choice
from torch_dcl.fleet import Schedule

MNIST = read_mnist(None)
SETTINGS = Settings(Schedule(1), batch=50)
CHOICE = {column: {2: Trial(0.02), 3: Trial(0.03)} for column in MODELS}
TWO = {"name": "MNIST-II-01", "images": (100, 100)}


def responses_slowly(layer, x):
    """Every response of a DCL layer after its ReLU, from its parameters, one unit at a time: ``[T][K2]``."""
    y = [float(x @ w) for w in layer.branch.weight]
    found, start = [], 0
    for t, width in enumerate(layer.widths):
        mine = torch.tensor(y[start : start + width], dtype=x.dtype)
        columns = layer.fusion.weight[start : start + width].unbind(1)
        found.append([max(0.0, float(mine @ w) + float(layer.fusion.bias[t, k])) for k, w in enumerate(columns)])
        start += width
    return found


# Firing


@pytest.mark.parametrize("column", ["A2", "A3D"])
@torch.no_grad()
def test_firing_is_what_a_slow_loop_counts(column):
    model = build(column, 10, 1, filters=4).double()
    assert model.fc1.branch_activation is model.fc1.branch.bias is None  # as the slow loop has it
    torch.nn.init.normal_(model.fc1.fusion.bias, std=0.3)
    images = torch.rand(5, 1, 28, 28, dtype=torch.float64)
    one = everyone = units = 0
    for image in images:
        x = model.relu1(model.pool1(model.conv1(image[None])))
        x = model.relu2(model.pool2(model.conv2(x))).flatten()
        for unit in zip(*responses_slowly(model.fc1, x), strict=True):
            one += sum(response > 0 for response in unit)
            everyone += all(response > 0 for response in unit)
            units += 1
    assert units == 5 * 500
    found = experiments.firing(model, images)
    assert found["one"] == pytest.approx(one / units / model.fc1.branches, abs=1e-9)
    assert found["all"] == pytest.approx(everyone / units, abs=1e-9)
    assert 0.1 < found["all"] < found["one"] < 0.9


def test_firing_knows_its_extremes():
    model = build("A2", 10, 0)
    images = torch.rand(3, 1, 28, 28)
    with torch.no_grad():
        model.fc1.fusion.weight.zero_()
        model.fc1.fusion.bias[0], model.fc1.fusion.bias[1] = 1.0, -1.0
    assert experiments.firing(model, images) == {"one": 0.5, "all": 0.0}
    with torch.no_grad():
        model.fc1.fusion.bias.fill_(1.0)
    assert experiments.firing(model, images) == {"one": 1.0, "all": 1.0}


def test_firing_looks_at_the_first_of_two_layers_and_leaves_no_hook():
    model = build("AB2", 10, 0)
    with torch.no_grad():
        model.fc2.fusion.bias.fill_(-100.0)
    assert experiments.firing(model, torch.rand(3, 1, 28, 28))["one"] > 0.1
    assert not model.fc1._forward_pre_hooks
    assert not model.fc2._forward_pre_hooks


def test_a_network_without_branches_cannot_fire():
    with pytest.raises(ValueError, match="has no DCLLinear"):
        experiments.firing(build("baseline", 10, 0), torch.rand(1, 1, 28, 28))


# Data and figures


@pytest.fixture(scope="module")
def filters():
    return experiments.filters_data(MNIST, SETTINGS, CHOICE, filters=(10, 25), seeds=2, **TWO)


def test_filters_have_errors_of_every_seed_and_weights(filters):
    assert filters["set"] == "MNIST-II-01"
    assert len(filters["baseline"]["errors"]) == 2
    assert [point["filters"] for point in filters["points"]] == [10, 25]
    for point in filters["points"]:
        assert len(point["errors"]) == 2
        assert point["weights"] == 25_500 + 2 * point["filters"] * 1300 + 500 * 100


def test_all_seeds_are_trained_with_the_rates_that_were_chosen(monkeypatch):
    asked = []

    def run(jobs, sets, settings, report):
        asked.extend(jobs)
        return [Outcome(job, 1.0, 0.1, 0.1, None, ([0.1], [0.1])) for job in jobs]

    monkeypatch.setattr(experiments, "run_jobs", run)
    monkeypatch.setattr(experiments, "make_sets", lambda *_, **__: None)
    choice = stored_choice()
    for name, digits in (("MNIST-II-05", 2), ("MNIST-III-10", 3)):
        asked.clear()
        experiments.filters_data(MNIST, SETTINGS, choice, name=name)
        experiments.curves_data(MNIST, SETTINGS, choice, name=name)
        assert len(asked) == 5 + 8 * 5 + 4 * 5
        assert all((job.lr, job.clip) == choice[job.column][digits] for job in asked)
        assert {job.seed for job in asked} == set(range(5))
        assert {job.filters for job in asked if job.column == "A2"} == {None, *experiments.FILTERS}
        assert {job.data for job in asked} == {name}


def test_curves_have_a_list_a_seed_and_a_value_an_epoch():
    long = dataclasses.replace(SETTINGS, schedule=Schedule(2), batch=100)
    curves = experiments.curves_data(MNIST, long, CHOICE, columns=("baseline", "A2"), seeds=2, **TWO)
    assert curves["set"] == "MNIST-II-01"
    assert list(curves["series"]) == ["baseline", "A2"]
    for kinds in curves["series"].values():
        assert set(kinds) == {"train_loss", "test_loss"}
        assert all([len(seed) for seed in seeds] == [2, 2] for seeds in kinds.values())
        assert kinds["test_loss"][0] != kinds["test_loss"][1]
    again = json.loads(json.dumps(curves, allow_nan=False))
    assert b"DCL-A2" in figures.svg(figures.curves_figure(again)).encode()


def test_the_figure_of_filters_takes_the_data(filters):
    again = json.loads(json.dumps(filters, allow_nan=False))
    assert "filters per branch" in figures.svg(figures.filters_figure(again))


def test_knowledge_is_of_a_filter_of_each_network_and_can_be_drawn():
    found = experiments.knowledge(MNIST, SETTINGS, CHOICE, images=(200, 100))
    assert {column: (part.layer, part.digits, part.images) for column, part in found.items()} == {
        "A2": ("fc1", 2, 100),
        "B2": ("fc2", 2, 100),
    }
    for column, part in found.items():
        assert part.picked
        assert part.by_digit.shape == (2, 2, 10)
        assert "branch 1" in figures.svg(figures.complementary_figure(part, title=f"DCL-{column}"))


def test_what_was_tried_has_a_row_a_column():
    found = experiments.tried_data(MNIST, SETTINGS, CHOICE, columns=("A4S", "AB2"), seeds=2, **TWO)
    assert found["set"] == "MNIST-II-01"
    assert [row["column"] for row in found["columns"]] == ["A4S", "AB2"]
    for row in found["columns"]:
        assert len(row["errors"]) == 2
        assert row["weights"] == weights(row["column"], 100)
        assert 0 <= row["all_fire"] <= row["one_fires"] <= 1


def test_every_network_has_a_rate_for_two_and_for_three_digits():
    choice = stored_choice()
    for column in (*MODELS, *EXTRAS):
        two, three = (experiments._trial(choice, column, name) for name in ("MNIST-II-01", "MNIST-III-01"))
        near = choice[column if column in choice else {"S": "A3S", "D": "A3D", "2": "B2"}[column[-1]]]
        assert (two, three) == (near[2], near[3])


EXACT = dataclasses.replace(SETTINGS, precision="float64")


def test_firing_can_be_counted_in_float64():
    experiments.tried_data(MNIST, EXACT, CHOICE, columns=("A2",), seeds=1, name="MNIST-II-01", images=(50, 50))


def test_knowledge_can_be_had_in_float64():
    experiments.knowledge(MNIST, EXACT, CHOICE, images=(50, 50))


def test_knowledge_can_be_had_of_three_digits():
    experiments.knowledge(MNIST, SETTINGS, CHOICE, name="MNIST-III-01", images=(50, 50))
