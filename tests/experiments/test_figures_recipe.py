"""The figures of section 4.1 as a run: data of the right form, of the right networks, the same after a break."""

import dataclasses
import json

import pytest
import torch

from torch_dcl.experiments.columns import EXTRAS, MODELS, Trial, build, stored_choice, weights
from torch_dcl.experiments.recipes.figures import FILTERS, PARTS, Figures, FiguresConfig, firing, trial_of
from torch_dcl.experiments.run_reader import read_run, state_of
from torch_dcl.experiments.runner import run
from torch_dcl.report import draw_run
from torch_dcl.report import figures as draw

CHOICE = {column: {2: Trial(0.02), 3: Trial(0.03)} for column in MODELS}
TINY = FiguresConfig(
    set="MNIST-II-01", knowledge_set="MNIST-II-05", filters=(25, 10), seeds=2, epochs=2, warmup=0, drops=(), batch=50,
    train_images=100, test_images=100, data="excerpt",
)  # fmt: skip
STEPS = {"filters": 3 * 4, "curves": 4 * 4, "knowledge": 2 * 4, "tried": 8 * 4}  # fleets of two epochs of two steps


def figures(**changes):
    return Figures(dataclasses.replace(TINY, **changes), choice=CHOICE)


def files(path):
    """What a run of figures leaves, to the last digit."""
    return {name: (path / f"{name}.json").read_text() for name in PARTS if (path / f"{name}.json").exists()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run at once: its folder, and its parts."""
    path = tmp_path_factory.mktemp("figures") / "run"
    return path, run(figures(), path).result


# What every part holds


def test_filters_have_errors_of_every_seed_and_weights(whole):
    data = whole[1]["filters"]
    assert data["set"] == "MNIST-II-01"
    assert len(data["baseline"]["errors"]) == 2
    assert [point["filters"] for point in data["points"]] == [10, 25]
    for point in data["points"]:
        assert len(point["errors"]) == 2
        assert point["weights"] == 25_500 + 2 * point["filters"] * 1300 + 500 * 100
    assert "filters per branch" in draw.svg(draw.filters_figure(data))


def test_curves_have_a_list_a_seed_and_a_value_an_epoch(whole):
    data = whole[1]["curves"]
    assert list(data["series"]) == ["baseline", "A2", "A3D", "A3S"]
    for kinds in data["series"].values():
        assert set(kinds) == {"train_loss", "test_loss"}
        assert all([len(seed) for seed in seeds] == [2, 2] for seeds in kinds.values())
        assert kinds["test_loss"][0] != kinds["test_loss"][1]
    assert "DCL-A2" in draw.svg(draw.curves_figure(data))


def test_knowledge_is_of_a_filter_of_each_network(whole):
    data = whole[1]["knowledge"]
    assert data["set"] == "MNIST-II-05"
    shown = {column: (part["layer"], part["digits"], part["images"]) for column, part in data["networks"].items()}
    assert shown == {"A2": ("fc1", 2, 100), "B2": ("fc2", 2, 100)}
    for part in data["networks"].values():
        assert part["picked"]
        assert torch.tensor(part["by_digit"]).shape == (2, 2, 10)


def test_what_was_tried_has_a_row_a_column(whole):
    rows = whole[1]["tried"]["columns"]
    assert [row["column"] for row in rows] == ["A2", "A3S", "A3D", *("A4S", "A4D", "A5S", "A5D"), "AB2"]
    for row in rows:
        assert len(row["errors"]) == 2
        assert row["weights"] == weights(row["column"], 100)
        assert 0 <= row["all_fire"] <= row["one_fires"] <= 1


def test_shares_are_counted_in_the_layer_and_in_its_control(whole):
    data = whole[1]["shares"]
    assert data["set"] == "MNIST-II-05"
    assert {column: len(seeds) for column, seeds in data["columns"].items()} == {"A2": 2, "summed": 2}
    for one in (one for seeds in data["columns"].values() for one in seeds):
        assert 0 < one["filters"] <= 500
        assert 0 <= one["complementary"] <= one["together"] <= 1


def test_a_run_leaves_json_and_figures_and_a_state(whole):
    path, parts = whole
    assert {name: json.loads(text, parse_constant=pytest.fail) for name, text in files(path).items()} == parts
    assert draw_run(path) == ["filters.svg", "curves.svg", "knowledge-A2.svg", "knowledge-B2.svg"]
    assert (path / "knowledge-A2.svg").read_text().startswith("<?xml")
    state = state_of(path)
    assert (state.state, state.done, state.total, state.unit) == ("finished", 6 + 8 + 2 + 16 + 4, 36, "trainings")


def test_all_networks_are_trained_with_the_rates_that_were_chosen():
    choice = stored_choice()
    for name, digits in (("MNIST-II-05", 2), ("MNIST-III-10", 3)):
        recipe = Figures(FiguresConfig(set=name, parts=("filters", "curves")))
        jobs = recipe.jobs({})
        assert len(jobs) == len(set(jobs)) == 5 + 8 * 5 + 4 * 5
        assert all((job.lr, job.option("clip", float("inf"))) == choice[job.network][digits][:2] for job in jobs)
        assert {job.seed for job in jobs} == set(range(5))
        assert {job.option("filters", 0) for job in jobs if job.network == "A2"} == {0, *FILTERS}
        assert {job.data for job in jobs} == {name}


def test_every_network_has_a_rate_for_two_and_for_three_digits():
    choice = stored_choice()
    for column in (*MODELS, *EXTRAS):
        two, three = (trial_of(choice, column, name) for name in ("MNIST-II-01", "MNIST-III-01"))
        near = choice[column if column in choice else {"S": "A3S", "D": "A3D", "2": "B2"}[column[-1]]]
        assert (two, three) == (near[2], near[3])


@pytest.mark.parametrize("changes", [{"precision": "float64"}, {"knowledge_set": "MNIST-III-01"}])
def test_networks_are_measured_in_float64_and_on_three_digits_too(tmp_path, changes):
    recipe = figures(parts=("knowledge", "tried"), seeds=1, epochs=1, train_images=50, test_images=50, **changes)
    assert set(run(recipe, tmp_path / "run").result) == {"knowledge", "tried"}


# Breaks


@pytest.mark.parametrize(
    ("part", "step", "every"),
    [("filters", 5, 0.0), ("filters", 5, 1e9), ("curves", 7, 0.0), ("curves", 15, 0.0), ("knowledge", 6, 0.0)],
)
def test_figures_that_are_killed_in_a_fleet_are_those_of_one_run(whole, tmp_path, killed_at, part, step, every):
    with killed_at(step):
        run(figures(parts=(part,)), tmp_path / "run", every=every)
    assert run(figures(parts=(part,)), tmp_path / "run", resume=True).result == {part: whole[1][part]}
    assert not (tmp_path / "run" / "fleets").exists()


def test_a_run_that_has_not_ended_has_the_parts_that_are_done(whole, tmp_path, killed_at):
    """Filters and curves train the same baseline; each is a job of its own."""
    with killed_at(STEPS["filters"] + 3):
        run(figures(parts=("filters", "curves")), tmp_path / "run")
    assert read_run(tmp_path / "run").parts == {"filters": whole[1]["filters"]}
    assert state_of(tmp_path / "run").state == "incomplete"


# Firing


def responses_slowly(layer, x):
    """Every response of a DCL layer after its ReLU, from its parameters, one unit at a time: ``[T][K2]``."""
    y = [float(x @ w) for w in layer.branch.weight]
    responses, start = [], 0
    for t, width in enumerate(layer.widths):
        mine = torch.tensor(y[start : start + width], dtype=x.dtype)
        columns = layer.fusion.weight[start : start + width].unbind(1)
        responses.append([max(0.0, float(mine @ w) + float(layer.fusion.bias[t, k])) for k, w in enumerate(columns)])
        start += width
    return responses


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
    measured = firing(model, images)
    assert measured["one"] == pytest.approx(one / units / model.fc1.branches, abs=1e-9)
    assert measured["all"] == pytest.approx(everyone / units, abs=1e-9)
    assert 0.1 < measured["all"] < measured["one"] < 0.9


def test_firing_knows_its_extremes():
    model = build("A2", 10, 0)
    images = torch.rand(3, 1, 28, 28)
    with torch.no_grad():
        model.fc1.fusion.weight.zero_()
        model.fc1.fusion.bias[0], model.fc1.fusion.bias[1] = 1.0, -1.0
    assert firing(model, images) == {"one": 0.5, "all": 0.0}
    with torch.no_grad():
        model.fc1.fusion.bias.fill_(1.0)
    assert firing(model, images) == {"one": 1.0, "all": 1.0}


def test_firing_looks_at_the_first_of_two_layers_and_leaves_no_hook():
    model = build("AB2", 10, 0)
    with torch.no_grad():
        model.fc2.fusion.bias.fill_(-100.0)
    assert firing(model, torch.rand(3, 1, 28, 28))["one"] > 0.1
    assert not model.fc1._forward_pre_hooks
    assert not model.fc2._forward_pre_hooks


def test_a_network_without_branches_cannot_fire():
    with pytest.raises(ValueError, match="has no DCLLinear"):
        firing(build("baseline", 10, 0), torch.rand(1, 1, 28, 28))
