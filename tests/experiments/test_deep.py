"""Many converted convolutions as a recipe: equal weights, and every unit replaced."""

import json

import pytest
import torch
from torch import nn

from torch_dcl import DCLConv2d
from torch_dcl.experiments.recipes import deep
from torch_dcl.experiments.recipes.deep import UNITS, Deep, DeepConfig, answer, build_network
from torch_dcl.experiments.runner import run
from torch_dcl.experiments.settings import SettingError

FEW = {
    "root": "made-up", "train_images": 20, "test_images": 10, "batch": 10, "scale": 0.005, "search_scale": 0.005,
    "seeds": 2, "rates": (0.05, 0.1), "width": 8, "units": ("narrow", "dcl"),
}  # fmt: skip
BLOCKS = [f"layer{stage}.{block}" for stage in range(1, 5) for block in range(2)]


def convolution_weights(network):
    """Weights of convolutions, projections and the classifier, without norms and biases."""
    return sum(p.numel() for p in network.parameters() if p.dim() > 1)


@pytest.mark.parametrize("width", [8, 64])
def test_kinds_of_units_have_equal_weights_to_within_half_a_filter_of_every_block(width):
    weights = {unit: convolution_weights(build_network(unit, 100, 0, width=width)) for unit in UNITS}
    assert weights["plain"] > weights["dcl"] == weights["low-rank"]
    plain = build_network("plain", 100, 0, width=width)
    halves = [
        (block.conv1.weight[0].numel() + block.conv2.weight[:, 0].numel()) / 2
        for block in map(plain.get_submodule, BLOCKS)
    ]
    assert abs(weights["narrow"] - weights["dcl"]) <= sum(halves)


def test_a_kind_of_unit_can_take_a_rate_that_is_not_the_lowest_or_the_highest():
    """Of two rates each is at an edge, and the better one may lie beyond it."""
    assert len(DeepConfig().rates) >= 4


def test_the_plain_network_is_torchvisions_with_another_stem():
    from torchvision.models import resnet18

    ours, theirs = build_network("plain", 100, 0), resnet18(num_classes=100)
    shapes = {name: tuple(p.shape) for name, p in theirs.named_parameters()}
    assert {name: tuple(p.shape) for name, p in ours.named_parameters()} == {**shapes, "conv1.weight": (64, 3, 3, 3)}
    assert ours(torch.zeros(2, 3, 32, 32)).shape == (2, 100)


@pytest.mark.parametrize(("unit", "branches"), [("dcl", 2), ("low-rank", 1)])
def test_the_first_convolution_of_every_block_is_replaced_with_norms_in_its_branches(unit, branches):
    network = build_network(unit, 10, 0, width=8)
    found = {name: module for name, module in network.named_modules() if isinstance(module, DCLConv2d)}
    assert list(found) == [f"{block}.conv1" for block in BLOCKS]
    assert all(layer.branches == branches for layer in found.values())
    assert all(isinstance(layer.fusion.norm, nn.BatchNorm2d) for layer in found.values())
    assert all(layer.fusion.norm.num_features == branches * layer.out_channels for layer in found.values())
    assert {layer.fusion.eps for layer in found.values()} == {1.0 if unit == "dcl" else 0.0}


def test_what_is_not_replaced_starts_alike_and_torchs_generator_is_left_alone():
    state = torch.get_rng_state()
    networks = [build_network(unit, 10, 4, width=8) for unit in UNITS]
    assert torch.equal(torch.get_rng_state(), state)
    for part in ("conv1.weight", "layer2.0.downsample.0.weight", "fc.weight"):
        assert all(torch.equal(n.get_parameter(part), networks[0].get_parameter(part)) for n in networks)


@pytest.mark.parametrize("unit", UNITS)
def test_a_seed_gives_the_same_network_whatever_was_built_before(unit):
    first, again = (build_network(unit, 10, 4, width=9).state_dict() for _ in range(2))
    assert all(torch.equal(value, again[name]) for name, value in first.items())


def test_a_run_that_was_stopped_ends_with_the_same_numbers(tmp_path):
    result = run(Deep(DeepConfig(**FEW)), tmp_path / "whole").result
    assert json.loads((tmp_path / "whole" / "deep.json").read_text()) == result
    assert [row["unit"] for row in result["units"]] == ["narrow", "dcl"]
    assert "The images are synthetic" in result["told"][0]
    for resume in (False, True, True):
        assert run(Deep(DeepConfig(**FEW)), tmp_path / "cut", resume=resume, seconds=0).complete is False
    assert run(Deep(DeepConfig(**FEW)), tmp_path / "cut", resume=True).result["units"] == result["units"]


def test_the_answer_says_what_is_clear():
    rows = [{"unit": unit, "errors": {"all": errors}} for unit, errors in (
        ("narrow", [30.0, 31.1, 32.0]), ("low-rank", [19.0, 22.0, 21.0]), ("dcl", [20.0, 21.0, 22.0]),
    )]  # fmt: skip
    said = answer({"units": rows})
    assert "Beside DCL's 21.00 %: narrow errs clearly more, low-rank errs neither clearly more nor less" in said


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(SettingError, match=r"units lacks dcl, .* give --set units=plain,dcl"):
        DeepConfig(units=("plain",))
    with pytest.raises(SettingError, match=r"units has no control of dcl's weights \(narrow, low-rank\); give"):
        DeepConfig(units=("dcl",))
    with pytest.raises(ValueError, match="there is no unit 'star'; the units are plain, narrow"):
        build_network("star", 10, 0)


@pytest.mark.parametrize("scale", [0.001, 1.0])
def test_the_speed_of_an_estimate_is_that_of_a_second_epoch_however_short_the_run_is(scale, monkeypatch):
    measured = []
    monkeypatch.setattr(deep, "measure_speed", lambda fleet, _: (measured.append(fleet.epochs), ""))
    recipe = Deep(DeepConfig(width=8, scale=scale, root="made-up"))
    recipe.speed("ResNet-18", recipe.workloads())
    assert measured[0] >= 2
