"""The chart: every unit at the same weights, chosen without the test set, the same after any break."""

import dataclasses

import numpy as np
import pytest
import torch

from torch_dcl.data import cifar, load
from torch_dcl.experiments.natural_data import generate_images
from torch_dcl.experiments.recipes import chart as recipe
from torch_dcl.experiments.recipes.chart import Chart, ChartConfig, hold_out
from torch_dcl.experiments.recipes.deep import Deep, DeepConfig
from torch_dcl.experiments.rival_layers import UNITS, build_unit, unit_weights
from torch_dcl.experiments.runner import run as run_recipe
from torch_dcl.fleet import Fleet, Inputs, Member, Schedule
from torch_dcl.models import count_weights

BUDGET = 5_086_912


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """CIFAR-10 in its official files, with 15 images of class 3 to train on and 3 to test with."""
    place = tmp_path_factory.mktemp("data")
    folder = place / "cifar-10-batches-bin"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for file in (*cifar.CIFAR["cifar10"].train, *cifar.CIFAR["cifar10"].test):
        images = rng.integers(0, 256, (3, 3072), np.uint8)
        (folder / file).write_bytes(np.concatenate([np.full((3, 1), 3, np.uint8), images], 1).tobytes())
    return place


def run(path, root, *, units=("star", "dcl"), **options):
    config = ChartConfig(
        root=str(root), units=units, rates=(0.001, 0.01), seeds=2, scale=0.01, search_scale=0.005, batch=6, rounds=1
    )
    return run_recipe(Chart(config), path, **options).result


@pytest.fixture(scope="module")
def whole(root, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "whole"
    return run(path, root), path


@pytest.fixture
def no_clock(monkeypatch):
    monkeypatch.setattr(recipe, "step_times", lambda points, *_, **__: dict.fromkeys(points, 1.0))


def compared(chart):
    """What does not depend on the clock."""
    return [{key: value for key, value in point.items() if key != "step_ms"} for point in chart["points"]]


# Units


def test_every_unit_has_the_weights_of_dcl_to_within_a_filter():
    for unit in UNITS:
        weights = count_weights(build_unit(unit, 10, 0))
        assert weights == unit_weights(unit, 10)
        if unit != "plain":
            assert abs(weights - BUDGET) <= 3328 * (3 if unit == "bilinear" else 1)
    assert unit_weights("plain", 10) == 5_742_272


@pytest.mark.parametrize("share", [1 / 16, 1 / 8, 1 / 2])
def test_other_budgets_are_met_as_well(share):
    budget = unit_weights("dcl", 10, share)
    for unit in UNITS:
        if unit != "plain":
            assert abs(unit_weights(unit, 10, share) / budget - 1) < 0.005


def test_what_is_no_unit_is_refused():
    with pytest.raises(ValueError, match="there is no unit 'maxout'; the units are plain, narrow"):
        build_unit("maxout", 10, 0)
    with pytest.raises(ValueError, match=r"share must be above 0 and at most 1/2, got 0\.6"):
        build_unit("dcl", 10, 0, share=0.6)


def test_the_convolutions_of_a_seed_start_alike_in_all_units():
    state = torch.get_rng_state()
    starts = [build_unit(unit, 10, 4).conv8.weight for unit in UNITS]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(start, starts[0]) for start in starts)
    assert not torch.equal(build_unit("dcl", 10, 5).conv8.weight, starts[0])


@pytest.mark.parametrize("unit", UNITS)
def test_a_fleet_trains_every_unit(unit):
    data = {"one": (torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8), torch.randint(0, 10, (4,)))}
    network = build_unit(unit, 10, 0)
    members = [Member("one", "one", 0, 0.01, Schedule(1))]
    fleet = Fleet([network], members, data, batch=2, inputs=Inputs(crop=24), stacked=False)
    fleet.train()
    assert fleet.history.stopped == {}
    trained = dict(fleet.network(0).named_parameters())
    for name, before in network.named_parameters():
        if name.startswith("fc1") and name.endswith("weight"):
            assert not torch.equal(trained[name], before)


# The run


def test_a_tenth_of_each_class_is_kept_apart_and_the_test_set_is_not_touched(root):
    data = load("cifar10", root=root)
    (train, labels), (judge, of_judge) = hold_out(data)
    assert (len(train), len(judge)) == (14, 1)
    both = sorted(image.numpy().tobytes() for image in torch.cat([train, judge]))
    assert both == sorted(image.numpy().tobytes() for image in data.train_images)
    assert labels.tolist() + of_judge.tolist() == [3] * 15


@pytest.mark.parametrize(("count", "apart"), [(2, 1), (9, 1), (20, 2)])
def test_of_few_images_a_tenth_of_all_is_kept_apart(count, apart):
    data = generate_images("cifar10", 100, 10)
    labels = torch.arange(count) % 10
    few = dataclasses.replace(data, train_images=data.train_images[:count], train_labels=labels)
    (train, _), (judge, of_judge) = hold_out(few)
    assert (len(train), len(judge)) == (count - apart, apart)
    both = sorted(image.numpy().tobytes() for image in torch.cat([train, judge]))
    assert both == sorted(image.numpy().tobytes() for image in few.train_images)
    for image, label in zip(judge, of_judge, strict=True):
        (place,) = [i for i, own in enumerate(few.train_images) if own.equal(image)]
        assert label == labels[place]


def test_one_image_cannot_be_parted():
    data = generate_images("cifar10", 1, 1)
    with pytest.raises(ValueError, match="at least 2 are needed, one to judge with"):
        hold_out(data)


def test_each_unit_takes_the_rate_with_the_lowest_error_and_is_tested_with_every_seed(whole):
    chart, path = whole
    assert [point["unit"] for point in chart["points"]] == ["dcl", "star"]
    for point in chart["points"]:
        assert point["weights"] == BUDGET
        assert point["seeds"] == [0, 1]
        assert len(point["errors"]) == 2
        assert f"{point['lr']:g}" == min(point["trials"], key=point["trials"].get)
        assert point["step_ms"] > 0
    assert not (path / "fleets").exists()


def test_the_rate_is_chosen_on_training_images_alone(root, tmp_path, monkeypatch, no_clock):
    seen = []
    evaluate = Fleet.evaluate

    def watched(self, data, **options):
        seen.append((self.members[0].seed, len(data["cifar10"][0])))
        return evaluate(self, data, **options)

    monkeypatch.setattr(Fleet, "evaluate", watched)
    run(tmp_path / "run", root, units=("dcl",))
    assert seen == [(100, 1), (0, 3)]  # one image kept apart to choose by, then three of the test set


@pytest.mark.slow
def test_calls_cut_short_and_a_kill_give_the_chart_of_one_run(whole, root, tmp_path, no_clock, killed_at):
    with killed_at(3):
        run(tmp_path / "run", root, every=0.0)
    chart, slices = None, 0
    while chart is None:
        chart = run(tmp_path / "run", root, seconds=0.0, resume=True)
        slices += 1
        assert slices < 12
    assert slices > 3
    assert compared(chart) == compared(whole[0])


@pytest.mark.parametrize(("kind", "config"), [(Chart, ChartConfig), (Deep, DeepConfig)])
def test_a_shortened_recipe_shortens_its_search_in_proportion(kind, config):
    loads = {scale: kind(config(data="cifar10", scale=scale), "cpu").workloads() for scale in (1.0, 0.1)}
    assert [(long.epochs, short.epochs) for long, short in zip(*loads.values(), strict=True)] == [
        (each.epochs, round(each.epochs / 10)) for each in loads[1.0]
    ]
