"""What the loop of large networks is made of: rates, groups of parameters, dropout, mixed images, averages."""

import operator

import numpy as np
import pytest
import torch
from tests.halves import slow
from torch import nn
from torch.nn import functional as F

from torch_dcl.experiments.imagenet import networks
from torch_dcl.experiments.imagenet.parts import (
    Averaged,
    KeyedDropout,
    dropout_keys,
    key_dropouts_,
    mix_images,
    parameter_groups,
    rate_at,
)
from torch_dcl.experiments.imagenet.team import Team
from torch_dcl.experiments.ranks import Rank
from torch_dcl.experiments.recipes.imagenet import ImageNet, ImageNetConfig
from torch_dcl.experiments.settings import SettingError
from torch_dcl.models import alexnet


def test_rates_are_the_papers_and_those_of_cosine():
    paper = ImageNetConfig()
    rates = [rate_at(step, 450_000, paper) for step in (0, 99_999, 100_000, 250_000, 449_999)]
    assert rates == pytest.approx([1e-2, 1e-2, 1e-3, 1e-4, 1e-6])
    cosine = ImageNetConfig(schedule="cosine", warmup=4, lr=0.4)
    assert [rate_at(step, 12, cosine) for step in (0, 1, 3, 4, 8)] == pytest.approx([0.1, 0.2, 0.4, 0.4, 0.2])
    assert rate_at(12, 12, cosine) == pytest.approx(0)


def test_biases_of_alexnet_learn_twice_as_fast_without_decay():
    network = alexnet(3)
    groups = parameter_groups(network, 5e-4, 2.0)
    kinds = {id(p): (group["weight_decay"], group["factor"]) for group in groups for p in group["params"]}
    assert {name: kinds[id(p)] for name, p in network.named_parameters()} == {
        name: (0.0, 2.0) if name.endswith("bias") else (5e-4, 1.0) for name, _ in network.named_parameters()
    }


def test_norms_and_scales_have_no_decay_and_the_rate_of_weights():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(3, 3), nn.RMSNorm(3)
            self.gamma = nn.Parameter(torch.ones(3))  # a layer scale

    network = nn.Sequential(Block(), nn.LayerNorm(3))
    groups = parameter_groups(network, 0.05, 2.0)
    kinds = {id(p): (group["weight_decay"], group["factor"]) for group in groups for p in group["params"]}
    assert {name: kinds[id(p)] for name, p in network.named_parameters()} == {
        "0.gamma": (0.0, 1.0), "0.linear.weight": (0.05, 1.0), "0.linear.bias": (0.0, 2.0), "0.norm.weight": (0.0, 1.0),
        "1.weight": (0.0, 1.0), "1.bias": (0.0, 1.0),
    }  # fmt: skip


def test_dropout_depends_on_the_image_and_not_on_its_neighbours():
    layer = KeyedDropout(0.25, 3)
    x = torch.ones(40, 500)
    layer.keys = dropout_keys(1, 2, torch.arange(40))
    whole = layer(x)
    assert whole.unique().tolist() == pytest.approx([0, 4 / 3])
    assert (whole == 0).double().mean().item() == pytest.approx(0.25, abs=0.01)
    layer.keys = dropout_keys(1, 2, torch.tensor([7, 3]))
    assert torch.equal(layer(x[:2]), whole[[7, 3]])
    for other in (dropout_keys(1, 3, torch.arange(40)), dropout_keys(2, 2, torch.arange(40))):
        layer.keys = other
        assert (layer(x) != whole).double().mean().item() == pytest.approx(2 * 0.25 * 0.75, abs=0.02)
    assert torch.equal(layer.eval()(x), x)
    network = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2)))
    first, second = key_dropouts_(network)
    first.keys = second.keys = torch.arange(40)
    assert network[0] is first
    assert (first(x) != second(x)).any()


@pytest.mark.parametrize("shape", [(431,), (5, 3, 3)])
def test_a_compiler_adds_no_wide_number_to_a_count(shape):
    layer, sums = KeyedDropout(0.5, 1), []
    layer.keys = dropout_keys(1, 2, torch.arange(3))

    def note(graph, _):
        nodes = graph.graph.nodes
        sums.extend(node for node in nodes if node.target in (torch.add, operator.add, "add"))
        return graph.forward

    x = torch.ones(3, *shape)
    assert torch.equal(torch.compile(layer, backend=note, fullgraph=True)(x), layer(x))
    assert any(abs(other) > 2**32 for node in sums for other in node.args if isinstance(other, int))
    for node in sums:  # a count of features would be one row
        if any(isinstance(other, int) for other in node.args):
            assert node.meta["example_value"].shape == x.shape


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_dropout_compiled_for_a_gpu_drops_the_same_values():
    for number in range(3):
        layer, x = KeyedDropout(0.5, number), torch.ones(40, 431)
        layer.keys = dropout_keys(1, 2, torch.arange(40))
        here = layer(x)
        layer.keys = layer.keys.cuda()
        assert torch.equal(layer(x.cuda()).cpu(), here)
        assert torch.equal(torch.compile(layer)(x.cuda()).cpu(), here)


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_neighbours_are_mixed_and_the_labels_in_the_same_parts(kind):
    images = torch.stack([torch.full((1, 20, 20), float(value)) for value in (0, 1, 0, 1)])
    labels = torch.tensor([0, 1, 2, 0])
    weights_seen = set()
    for step in range(20):
        mixed = mix_images(images, labels, kind, 1.0, 5, step)
        assert mixed.others.tolist() == [1, 0, 0, 2]
        assert mixed.images.mean((1, 2, 3)).tolist() == pytest.approx(
            [1 - mixed.weight, mixed.weight, 1 - mixed.weight, mixed.weight], abs=1e-5
        )
        weights_seen.add(mixed.weight)
        logits = torch.randn(4, 3)
        soft = mixed.weight * F.one_hot(labels, 3) + (1 - mixed.weight) * F.one_hot(mixed.others, 3)
        expected = F.cross_entropy(logits, soft.float(), reduction="sum", label_smoothing=0.1)
        torch.testing.assert_close(mixed.loss(logits, 0.1), expected)
    assert len(weights_seen) > 10
    assert 0.3 < np.mean(list(weights_seen)) < 0.7


def test_averages_follow_the_parameters_and_take_their_place_for_a_while():
    parameter = nn.Parameter(torch.tensor([1.0]))
    average = Averaged([parameter], 0.9)
    parameter.data += 1
    average.update()
    with average.in_place():
        assert parameter.item() == pytest.approx(1.1)
    assert parameter.item() == 2


@pytest.mark.parametrize(("name", "side"), [("googlenet", 64), slow("inception_v3", 96)])
@pytest.mark.filterwarnings("ignore:.*default weight initialization")
def test_networks_with_further_classifiers_in_training_are_trained_without_them(name, side):
    network = networks.build(ImageNetConfig(network=f"torchvision:{name}"), "plain", 0, 6, side)
    assert network.training
    assert network(torch.randn(2, 3, side, side)).shape == (2, 6)


@pytest.fixture
def second_of_two(monkeypatch):
    """Makes one of two ranks; what the second one tells the first is in the list."""
    told = []
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr(Team, "gather", lambda _, text: told.append(text) or ["", told[0]])
    return told


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory\nmore"), KeyError("gone"), ValueError()])
def test_the_first_rank_says_what_failed_on_another_while_it_prepared(second_of_two, error):
    with pytest.raises(type(error)), Team(Rank(1, 2)).together():
        raise error
    (reason,) = second_of_two
    assert reason in ("CUDA out of memory", "KeyError: 'gone'", "ValueError")
    with pytest.raises(SettingError) as said, Team(Rank(0, 2)).together():
        pass
    assert str(said.value) == f"rank 1 of 2: {reason}"


@pytest.mark.slow
def test_ranks_compare_the_device_and_what_each_would_send(monkeypatch):
    compared = []
    monkeypatch.setattr(Team, "compare", lambda _, asked: compared.append(asked))
    for changes in ({}, {"backend": "gloo"}, {"compile": True}, {"channels_last": True}, {"workers": 3}):
        ImageNet(ImageNetConfig(data="synthetic", images=4, batch=4, classes=3, **changes)).prepare(lambda _: None)
    usual, *others, workers = compared
    assert (usual["device"], workers) == ("cpu", usual)
    assert all(other != usual for other in others)
