"""Other ways to multiply branches: what they compute, and that they start with the variance of a ReLU layer."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.reference import starts_of
from torch import nn

from torch_dcl import DCLLinear
from torch_dcl.models.rivals import BilinearLinear, GatedLinear, SortLinear, StarLinear

RELU_VARIANCE = (1 - 1 / math.pi) / 2 / 3  # of relu(n) with torch's default start, which keeps a third of the variance


def responses(layer, x):
    """W_t·θ_t·x + b_t, branch by branch."""
    found = []
    for t, (start, end) in enumerate(starts_of(layer.widths)):
        found.append(x @ layer.branch.weight[start:end].t() @ layer.fusion.weight[start:end] + layer.fusion.bias[t])
    return found


@settings(max_examples=40)
@given(K1=st.integers(1, 7), K2=st.integers(1, 9), T=st.integers(1, 4), rows=st.integers(1, 5), data=st.data())
def test_a_star_is_the_product_of_the_rectified_branches(K1, K2, T, rows, data):
    width = data.draw(st.lists(st.integers(1, K2), min_size=T, max_size=T))
    layer = StarLinear(K1, K2, branches=T, width=width, dtype=torch.float64)
    nn.init.normal_(layer.fusion.bias)
    x = torch.randn(rows, K1, dtype=torch.float64, requires_grad=True)
    expected = torch.stack(responses(layer, x)).clamp(min=0).prod(0)
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-13)
    assert layer.state_dict().keys() == DCLLinear(K1, K2, branches=T, width=width).state_dict().keys()


def test_a_star_without_its_root_is_dcl():
    star = StarLinear(5, 6, branches=2, width=3, dtype=torch.float64)
    dcl = DCLLinear(5, 6, branches=2, width=3, dtype=torch.float64)
    dcl.load_state_dict(star.state_dict())
    x = torch.randn(9, 5, dtype=torch.float64)
    torch.testing.assert_close(dcl(x), (star(x) + dcl.eps).sqrt(), rtol=1e-12, atol=0)


def test_a_gated_unit_is_a_branch_times_the_sigmoid_of_the_other():
    layer = GatedLinear(5, 7, branches=2, width=(2, 3), dtype=torch.float64)
    nn.init.normal_(layer.fusion.bias)
    x = torch.randn(4, 5, dtype=torch.float64)
    value, gate = responses(layer, x)
    torch.testing.assert_close(layer(x), value / (1 + (-gate).exp()), rtol=1e-12, atol=1e-14)


def test_the_bilinear_layer_is_its_double_sum():
    layer = BilinearLinear(5, 7, 2, 3).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    y = x @ layer.branch.weight.t()
    expected = torch.einsum("kij,ni,nj->nk", layer.fusion.weight, y[:, :2], y[:, 2:])
    torch.testing.assert_close(layer(x), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "build",
    [
        lambda: StarLinear(400, 300, branches=2, width=150),
        lambda: StarLinear(400, 300, branches=3, width=150),
        lambda: SortLinear(400, 300, branches=2, width=150, eps=1e-8),
        lambda: GatedLinear(400, 300, branches=2, width=150),
        lambda: BilinearLinear(400, 300, 40, 40),
    ],
    ids=["star of two", "star of three", "sort", "gated", "bilinear"],
)
def test_they_start_with_the_variance_of_the_relu_layer_that_they_replace(build):
    z = build()(torch.randn(2000, 400))
    assert float(z.detach().var()) == pytest.approx(RELU_VARIANCE, rel=0.15)


def test_sort_is_the_sum_and_the_root_of_the_product():
    layer = SortLinear(5, 7, branches=2, width=(2, 3), dtype=torch.float64, eps=0.04)
    nn.init.normal_(layer.fusion.bias)
    x = torch.randn(40, 5, dtype=torch.float64)
    v, w = (response.clamp(min=0) for response in responses(layer, x))
    torch.testing.assert_close(layer(x), v + w + (v * w + 0.04).sqrt(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", [StarLinear, GatedLinear, SortLinear])
def test_in_bfloat16_they_stay_near_what_they_are(kind):
    layer = kind(64, 32, branches=2, width=16)
    x = torch.randn(50, 64)
    exact = layer.double()(x.bfloat16().double())
    low = layer.bfloat16()(x.bfloat16())
    assert low.dtype == torch.bfloat16
    assert float((low.double() - exact).detach().norm() / exact.detach().norm()) < 0.02


def test_what_they_cannot_be_is_refused():
    with pytest.raises(ValueError, match="StarLinear uses all branches; choose the deterministic strategy"):
        StarLinear(4, 4, branches=3, strategy="stochastic")
    with pytest.raises(ValueError, match="needs two branches, one of them the gate, got 3"):
        GatedLinear(4, 4, branches=3)
    with pytest.raises(ValueError, match="SortLinear needs two branches, got 3"):
        SortLinear(4, 4, branches=3)
