"""Sort-of-CLEVR as a recipe: fair units, honest splits, and a result that can be resumed and read."""

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_dcl.data.sort_of_clevr import ANSWERS, generate_sort_of_clevr
from torch_dcl.experiments.protocol import Job
from torch_dcl.experiments.recipes.sort_of_clevr import (
    HIDDEN,
    KERNELS,
    UNITS,
    QuestionNet,
    SortOfClevrConfig,
    SortOfClevrRecipe,
    answer,
    build_network,
)
from torch_dcl.experiments.runner import concurrent_groups, outcomes_of, plan_fleets, run
from torch_dcl.experiments.settings import SettingError
from torch_dcl.experiments.stats import compare_units
from torch_dcl.fleet.run_folder import RunFolder
from torch_dcl.models import count_weights

ROOT = Path(__file__).parents[2]
FEW = {
    "images": 4, "test_images": 3, "epochs": 2, "batch": 20, "seeds": 2, "rates": (0.01, 0.02), "size": 0.02,
    "units": ("plain", "low-rank", "dcl"),
}  # fmt: skip


def small(**settings):
    return SortOfClevrConfig(**{**FEW, **settings})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "whole"
    return run(SortOfClevrRecipe(small()), path).result, path


# Networks


def test_the_defaults_are_those_of_the_protocol():
    config, text = SortOfClevrConfig(), " ".join((ROOT / "docs" / "protocol.md").read_text(encoding="utf-8").split())
    assert f"{config.images:,} images" in text
    assert ", ".join(f"{rate:g}" for rate in config.rates) in text
    assert ", ".join(map(str, KERNELS)) in text
    assert ", ".join(map(str, HIDDEN)) in text
    assert f"{config.epochs} epochs" in text
    assert all(f"`{unit}`" in text for unit in config.units)


def test_units_have_equal_weights_to_within_half_a_filter():
    sizes = {unit: count_weights(build_network(unit, 0, size=0.25)) for unit in UNITS}
    budget, plain = sizes.pop("dcl"), sizes.pop("plain")
    assert plain > budget
    network = build_network("plain", 0, size=0.25)
    filter_of_the_layer = network.fc1.in_features + network.rest[0].out_features
    assert max(abs(each - budget) for each in sizes.values()) <= filter_of_the_layer / 2


@pytest.mark.parametrize("unit", UNITS)
def test_every_unit_starts_at_the_scale_of_the_layer_it_replaces(unit):
    network = build_network(unit, 3, size=0.25)
    x = torch.randn(400, network.fc1.in_features)
    with torch.no_grad():
        z = network.relu1(network.fc1(x))
    # He's start keeps the mean square of white inputs: relu of a variance of 2 has a mean square of 1.
    assert float(z.square().mean()) == pytest.approx(1, rel=0.15)


def test_all_but_the_replaced_layer_starts_alike_and_torchs_generator_is_left_alone():
    state = torch.get_rng_state()
    networks = [build_network(unit, 5, size=0.05) for unit in UNITS]
    assert torch.equal(torch.get_rng_state(), state)
    for part in ("convolutions.0.weight", "convolutions.9.weight", "rest.2.weight", "rest.14.weight"):
        assert all(torch.equal(n.get_parameter(part), networks[0].get_parameter(part)) for n in networks)


def test_the_first_layer_sees_the_image_and_the_question_and_the_convolutions_no_question():
    network = QuestionNet((30, 20), (4, 5)).eval()
    images = torch.rand(2, 3, 76, 75)
    changed = images.clone()
    changed[:, 0, 75, 3] += 1
    seen = []
    network.fc1.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0]))
    network(images), network(changed)
    differs = (seen[0] != seen[1]).any(0)
    assert differs.nonzero().flatten().tolist() == [seen[0].shape[1] - 11 + 3]
    assert network(images).shape == (2, len(ANSWERS))


@pytest.mark.parametrize("size", [0.05, 0.25])
def test_at_the_start_the_question_moves_the_first_layer_as_much_as_the_image_does(size):
    inputs, _ = generate_sort_of_clevr(30, "some").pairs()
    network = build_network("plain", 0, size=size)
    seen = []
    network.fc1.register_forward_hook(lambda _module, given, _output: seen.append(given[0]))
    with torch.no_grad():
        network(inputs / 255)  # batch norms by the batch
    image, question = (part.square().sum(1).mean() for part in (seen[0][:, :-11], seen[0][:, -11:]))
    assert float(question / image) == pytest.approx(1, rel=0.1)


# The run


def test_rates_are_judged_with_images_that_neither_training_nor_the_result_uses():
    made = SortOfClevrRecipe(small())
    made.prepare(lambda _: None)
    trial, report = (
        made.judge([Job("dcl", "questions", 0, 0.1, phase)])["questions"] for phase in ("choose", "report")
    )
    train = made.fleet([Job("dcl", "questions", 0, 0.1)]).data
    assert torch.equal(train.images[0], made.sets["train"].pairs()[0])
    assert len(trial[1]) == len(report[1]) == 60
    drawn = [{image.numpy().tobytes() for image in each.images} for each in made.sets.values()]
    assert len(set.union(*drawn)) == sum(map(len, drawn))


def test_the_result_has_errors_of_both_sorts_of_questions(whole):
    result, path = whole
    assert json.loads((path / "sort-of-clevr.json").read_text()) == result
    assert [row["unit"] for row in result["units"]] == list(FEW["units"])
    for row in result["units"]:
        means = {float(rate): error for rate, error in row["trials"].items()}
        assert means[row["chosen"]] == min(means.values())
        for errors in row["errors"].values():
            assert len(errors) == 2
            # 30 questions of a sort
            assert all(math.isclose(error * 0.3, round(error * 0.3), abs_tol=1e-9) for error in errors)
    assert result["told"][0].startswith("Not as docs/protocol.md says: ")


def test_a_run_that_was_killed_ends_with_the_same_numbers(whole, tmp_path, killed_at):
    path = tmp_path / "run"
    with killed_at(9):
        run(SortOfClevrRecipe(small()), path, every=0)
    assert run(SortOfClevrRecipe(small()), path, resume=True, seconds=0).complete is False
    assert run(SortOfClevrRecipe(small()), path, resume=True).result["units"] == whole[0]["units"]


def test_a_run_in_whole_fleets_leaves_a_small_folder_that_resumes_elsewhere(whole, tmp_path):
    path, other = tmp_path / "run", tmp_path / "other"
    config = small(whole=True)
    assert run(SortOfClevrRecipe(config), path, seconds=0.0).complete is False
    shutil.copytree(path, other, ignore=shutil.ignore_patterns("fleets"))
    assert sum(file.stat().st_size for file in other.rglob("*")) < 100_000
    assert run(SortOfClevrRecipe(config), other, resume=True).result["units"] == whole[0]["units"]


def test_networks_train_as_fleets_of_one_and_on_a_gpu_side_by_side():
    made = SortOfClevrRecipe(small(most=5))
    fleets = plan_fleets(made.jobs({}), made.group, made.at_once, made.networks)
    assert list(map(len, fleets)) == [1] * 6
    groups = concurrent_groups(fleets, made.concurrent, made.at_once, "cuda", made.networks)
    assert list(map(len, groups)) == [5, 1]
    assert made.describe(groups[0]) == "learning rates of plain, low-rank, dcl"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here")
def test_on_a_gpu_networks_side_by_side_end_as_one_after_another(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    results = [
        run(SortOfClevrRecipe(small(units=tuple(UNITS), most=most), "cuda"), tmp_path / str(most)).result["units"]
        for most in (1, 9)
    ]
    assert results[0] == results[1]


def test_the_answer_counts_clear_differences_after_correction():
    def unit(name, relational):
        return {"unit": name, "errors": {"relational": relational, "not relational": [5.0, 5.1, 4.9]}}

    rows = [unit("plain", [29.0, 30.0, 31.0]), unit("summed", [40.0, 41.1, 42.0]), unit("dcl", [30.0, 31.0, 32.0])]
    compared = compare_units(rows, "dcl")
    assert compared["summed", "relational"].sign == "▴"
    assert compared["summed", "not relational"].corrected == 1
    said = answer({"units": rows})
    assert "clearly less than 1 of 1 units of equal weights and clearly more than 0 (n = 3 seeds" in said
    assert "that of plain, 30.00 %, and DCL's is 31.00 %" in said
    one = [{**row, "errors": {sort: errors[:1] for sort, errors in row["errors"].items()}} for row in rows]
    assert answer({"units": one}).startswith("One seed")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"units": ("plain", "glu")}, r"units lacks dcl, .* give --set units=plain,glu,dcl"),
        ({"units": ("star",)}, "there is no unit 'star'"),
        ({"batch": 100}, "batch is 100, more than the 80 questions of 4 images"),
        ({"share": 0.6}, "share must be above 0 and at most 0.5"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(SettingError, match=message):
        small(**settings)


def test_an_unknown_unit_is_named():
    with pytest.raises(ValueError, match="there is no unit 'star'; the units are plain"):
        build_network("star", 0, size=0.02)
    assert isinstance(build_network("glu", 0, size=0.02).relu1, nn.Identity)


def test_units_with_networks_that_diverged_are_named_with_how_many(whole):
    recipe, outcomes = SortOfClevrRecipe(small()), outcomes_of(RunFolder.inspect(whole[1]))
    assert recipe.diverged(outcomes) == [] == whole[0]["told"][1:]
    lost = recipe.reports("low-rank", outcomes)[1]
    outcomes[lost] = dataclasses.replace(outcomes[lost], stopped=0)
    assert recipe.diverged(outcomes) == ["Networks that diverged count with an error of 100 %: low-rank (1 of 2)."]
