"""The control layer: branches averaged, with the weights of the DCL layer that it stands beside."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.reference import starts_of
from torch import nn

from torch_dcl import DCLLinear
from torch_dcl.experiments import columns
from torch_dcl.models.controls import SummedLinear
from torch_dcl.models.counting import count_weights

RELU_VARIANCE = (1 - 1 / math.pi) / 2 / 3  # of relu(n) with torch's default start, which keeps a third of the variance


def plain_mean(layer, x):
    """(1/T) · Σ_t relu(W_t·θ_t·x + b_t), branch by branch."""
    total = 0
    for t, (start, end) in enumerate(starts_of(layer.widths)):
        y = x @ layer.branch.weight[start:end].t()
        if layer.branch.bias is not None:
            y = y + layer.branch.bias[start:end]
        if layer.branch_activation is not None:
            y = layer.branch_activation(y)
        pre = y @ layer.fusion.weight[start:end]
        if layer.fusion.bias is not None:
            pre = pre + layer.fusion.bias[t]
        total = total + pre.clamp(min=0)
    return total / len(layer.widths)


@settings(max_examples=60)
@given(data=st.data())
def test_the_output_is_the_mean_of_the_rectified_branches(data):
    in_features, out_features = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 9))
    T = data.draw(st.integers(1, 5))
    one = st.integers(1, out_features)
    layer = SummedLinear(
        in_features, out_features, branches=T, width=data.draw(one | st.lists(one, min_size=T, max_size=T)),
        bias=data.draw(st.booleans()), branch_activation=data.draw(st.sampled_from([None, nn.ReLU, nn.Tanh])),
        eps=data.draw(st.sampled_from([None, 0.5])), dtype=torch.float64,
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    x = torch.randn(*data.draw(st.lists(st.integers(1, 4), max_size=2)), in_features, dtype=torch.float64)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    z, expected = layer(mine), plain_mean(layer, other)
    torch.testing.assert_close(z, expected, rtol=1e-12, atol=1e-13)
    incoming = torch.randn_like(z)
    found = torch.autograd.grad(z, [mine, *layer.parameters()], incoming)
    exact = torch.autograd.grad(expected, [other, *layer.parameters()], incoming)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_the_mean_can_be_zero_where_the_product_cannot():
    layer = SummedLinear(3, 4, width=2)
    nn.init.constant_(layer.fusion.bias, -100.0)
    assert not layer(torch.randn(5, 3)).any()


def test_one_branch_is_the_low_rank_layer():
    low_rank = DCLLinear(6, 8, branches=1, width=3, eps=0.0)
    layer = SummedLinear(6, 8, branches=1, width=3)
    layer.load_state_dict(low_rank.state_dict())
    x = torch.randn(5, 6)
    torch.testing.assert_close(layer(x), low_rank(x))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("branches", [2, 3])
def test_weights_and_keys_are_those_of_the_dcl_layer(branches, bias):
    arguments = {"branches": branches, "width": 5, "bias": bias}
    layer, dcl = SummedLinear(12, 20, **arguments), DCLLinear(12, 20, **arguments)
    assert {name: value.shape for name, value in layer.state_dict().items()} == {
        name: value.shape for name, value in dcl.state_dict().items()
    }
    assert count_weights(layer) == count_weights(dcl) == branches * 5 * (12 + 20)
    dcl.load_state_dict(layer.state_dict())


def test_the_column_has_the_weights_of_the_column_that_it_stands_beside():
    assert columns.weights("summed", 100) == columns.weights("A2", 100)
    model = columns.build("summed", 100, 0)
    assert type(model.fc1) is SummedLinear
    assert model.state_dict().keys() == columns.build("A2", 100, 0).state_dict().keys()


def test_it_is_made_like_the_layer_that_it_stands_for():
    layer = SummedLinear.like(nn.Linear(6, 9, bias=False, dtype=torch.float64).eval(), width=2)
    assert type(layer) is SummedLinear
    assert (layer.in_features, layer.out_features, layer.widths) == (6, 9, (2, 2))
    assert layer.fusion.bias is None
    assert layer.fusion.weight.dtype == torch.float64
    assert not layer.training


def test_the_stochastic_strategy_is_refused():
    with pytest.raises(ValueError, match="SummedLinear sums all branches; use the deterministic strategy"):
        SummedLinear(6, 9, branches=3, width=2, strategy="stochastic")


@pytest.mark.parametrize("branches", [1, 2, 3, 5])
def test_it_starts_with_the_variance_of_the_relu_layer_that_it_replaces(branches):
    x = torch.randn(400, 300)
    layers = [SummedLinear(300, 250, branches=branches, width=200) for _ in range(3)]
    with torch.no_grad():
        variance = torch.stack([layer(x) for layer in layers]).var().item()
        replaced = torch.stack([nn.Linear(300, 250)(x).relu() for _ in range(3)]).var().item()
    assert abs(variance / RELU_VARIANCE - 1) < 0.05
    assert abs(variance / replaced - 1) < 0.06


def test_both_stages_start_between_their_bounds_and_biases_at_zero():
    layer = SummedLinear(50, 40, branches=3, width=(4, 9, 25))
    assert layer.branch.weight.abs().max() <= math.sqrt(3 / 50)
    for start, end in starts_of(layer.widths):
        bound = math.sqrt(3 / (end - start))  # times √(T/3), which is 1 for three branches
        largest = layer.fusion.weight[start:end].abs().max().item()
        assert 0.9 * bound < largest <= bound * (1 + 1e-6)
    assert not layer.fusion.bias.any()
