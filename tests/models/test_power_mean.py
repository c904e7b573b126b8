"""The learned power mean: value and gradients against closed forms, near p = 0 too, alone and in a fleet."""

import pytest
import torch
from torch import nn

from torch_dcl import DCLLinear
from torch_dcl.experiments.recipes.relations import build_column
from torch_dcl.fleet import Fleet, Member, Schedule
from torch_dcl.models import count_weights
from torch_dcl.models.controls import SummedLinear
from torch_dcl.models.power_mean import PowerMeanLinear, bounded, power_mean

POWERS = [0.0, 1e-30, 1e-6, -1e-4, 1e-3, -0.01, 0.1, 0.3, 1.0, -1.0, 2.0, -5.0, 8.0, -8.0]


def plain_mean(a, b, p):
    """((a^p + b^p) / 2)^(1/p) by powers; for small p by log M = m + p·d²/2 − p³·d⁴/12, float64."""
    if abs(p) < 1e-3:
        m, d = (a.log() + b.log()) / 2, (a.log() - b.log()) / 2
        return (m + p * d**2 / 2 - p**3 * d**4 / 12).exp()
    return ((a**p + b**p) / 2) ** (1 / p)


def responses(dtype, n=4000):
    """Pairs from 0.01 to 3, some of them equal; their values are float32's whatever the type is."""
    drawn = torch.Generator().manual_seed(1)
    a, b = (torch.rand(n, generator=drawn) ** 3 * 3 + 0.01 for _ in range(2))
    b[:40] = a[:40]
    return a.to(dtype), b.to(dtype)


@pytest.mark.parametrize("p", POWERS)
def test_the_value_is_exact_to_float32(p):
    p = float(torch.tensor(p))  # as float32 has it
    a, b = responses(torch.float64)
    found = power_mean(a.float(), b.float(), torch.tensor(p))
    torch.testing.assert_close(found.double(), plain_mean(a, b, p), rtol=1e-6, atol=0)


@pytest.mark.parametrize("p", POWERS)
def test_gradients_are_exact_to_float32(p):
    p = float(torch.tensor(p))
    a, b = responses(torch.float64)
    M, h = plain_mean(a, b, p), 1e-3
    exact = [M ** (1 - p) * a ** (p - 1) / 2, M ** (1 - p) * b ** (p - 1) / 2]
    # Central differences of order four, around a p where the plain formula is as good as float64.
    steps = [plain_mean(a, b, p + k * h) for k in (-2, -1, 1, 2)]
    by_p = (steps[0] - 8 * steps[1] + 8 * steps[2] - steps[3]) / (12 * h)
    inputs = [a.float().requires_grad_(), b.float().requires_grad_(), torch.full(a.shape, p).requires_grad_()]
    found = torch.autograd.grad(power_mean(*inputs).sum(), inputs)
    for gradient, expected in zip(found[:2], exact, strict=True):
        torch.testing.assert_close(gradient.double(), expected, rtol=3e-6, atol=1e-9)
    torch.testing.assert_close(found[2].double(), by_p, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("p", [0.0, 0.002, 1.0, -3.0])
def test_one_exponent_gathers_the_gradient_of_all_outputs(p):
    a, b = (value[50:80].view(5, 6).requires_grad_() for value in responses(torch.float64))
    assert torch.autograd.gradcheck(power_mean, (a, b, torch.tensor([p], dtype=torch.float64, requires_grad=True)))


@pytest.mark.parametrize("p", [0.0, 0.002, 1.0, -3.0])
def test_second_derivatives_by_autograd_and_by_torch_func(p):
    a, b = (value[50:56].requires_grad_() for value in responses(torch.float64))
    inputs = a, b, torch.tensor([p], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(power_mean, inputs)
    found = torch.func.hessian(lambda *given: power_mean(*given).sum(), argnums=2)(*inputs)
    torch.testing.assert_close(found, torch.autograd.functional.hessian(lambda q: power_mean(a, b, q).sum(), inputs[2]))


def test_it_lies_between_the_responses_and_rises_with_p():
    a, b = responses(torch.float64)
    means = torch.stack([power_mean(a, b, torch.tensor(p, dtype=torch.float64)) for p in sorted(POWERS)])
    assert (means >= torch.minimum(a, b) * (1 - 1e-12)).all()
    assert (means <= torch.maximum(a, b) * (1 + 1e-12)).all()
    assert (means.diff(dim=0) >= -1e-12).all()


def test_far_apart_responses_stay_finite():
    a, b = torch.tensor([1e30, 0.01], requires_grad=True), torch.tensor([0.01, 1e30], requires_grad=True)
    p = torch.tensor([8.0], requires_grad=True)
    z = power_mean(a, b, p)
    torch.testing.assert_close(z, torch.full((2,), 1e30) * 2 ** (-1 / 8), rtol=1e-4, atol=0)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(z.sum() / 1e30, [a, b, p]))


def test_the_exponent_stays_inside_its_bounds_and_moves_freely_near_zero():
    raw = torch.tensor([-1e4, 0.0, 1e4], dtype=torch.float64, requires_grad=True)
    p = bounded(raw)
    assert p.tolist() == [-8, 0, 8]
    assert torch.autograd.grad(p[1], raw)[0][1] == 1


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("start", [0, 1])
def test_the_layer_is_the_mean_of_its_rectified_branches(start, bias):
    layer = PowerMeanLinear(7, 9, width=3, start=start, bias=bias, dtype=torch.float64)
    x = torch.randn(5, 7, dtype=torch.float64)
    v = []
    for t in range(2):
        pre = x @ layer.branch.weight[3 * t : 3 * t + 3].t() @ layer.fusion.weight[3 * t : 3 * t + 3]
        v.append((pre if not bias else pre + layer.fusion.bias[t]).clamp(min=0) + 0.01)
    expected = (v[0] * v[1]).sqrt() if start == 0 else (v[0] + v[1]) / 2
    torch.testing.assert_close(layer(x), expected, rtol=1e-10, atol=1e-12)
    assert abs(float(layer.exponent.detach()) - start) < 1e-12


def test_it_starts_with_the_spread_of_the_layer_whose_mean_it_starts_as():
    x = torch.randn(400, 300)
    with torch.no_grad():
        torch.manual_seed(3)
        summed = SummedLinear(300, 250, width=200)
        torch.manual_seed(3)
        layer = PowerMeanLinear(300, 250, width=200, start=1)
        torch.testing.assert_close(layer(x), summed(x) + 0.01, rtol=1e-4, atol=1e-5)
        # At p = 0 the shift stands inside of the product and not beside it, so the spread differs a little.
        ratio = PowerMeanLinear(300, 250, width=200)(x).var() / DCLLinear(300, 250, width=200)(x).var()
    assert 0.9 < ratio < 1.2


def test_reset_brings_back_weights_and_exponent():
    layer = PowerMeanLinear(6, 8, width=2, start=1)
    nn.init.constant_(layer.raw_exponent, 5.0)
    nn.init.constant_(layer.fusion.weight, 0.0)
    layer.reset_parameters()
    assert abs(float(layer.exponent.detach()) - 1) < 1e-6
    assert layer.fusion.weight.any()


def test_weights_are_those_of_the_dcl_layer_and_one():
    layer, dcl = (kind(12, 20, width=5) for kind in (PowerMeanLinear, DCLLinear))
    assert count_weights(layer) == count_weights(dcl) + 1
    assert {*layer.state_dict()} - {*dcl.state_dict()} == {"raw_exponent"}


def test_what_it_cannot_be_is_refused():
    with pytest.raises(ValueError, match="p must start at 0, the product, or at 1, the sum, got 2"):
        PowerMeanLinear(6, 8, width=2, start=2)
    with pytest.raises(ValueError, match="PowerMeanLinear is for two branches, got 3; use branches=2"):
        PowerMeanLinear(6, 8, width=2, branches=3)


def test_low_precision_is_computed_in_float32():
    layer = PowerMeanLinear(16, 8, width=4)
    x = torch.randn(20, 16)
    with torch.autocast("cpu", torch.bfloat16):
        z = layer(x)
    assert z.dtype == torch.bfloat16
    torch.testing.assert_close(z.float(), layer(x), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("column", ["power-0", "power-1"])
def test_a_network_ends_the_same_alone_and_in_a_fleet(column):
    drawn = torch.Generator().manual_seed(0)
    images = torch.randint(256, (40, 28, 28), dtype=torch.uint8, generator=drawn)
    data = {"some": (images, torch.randint(10, (40,), generator=drawn))}

    def trained(seeds, stacked):
        members = [Member(str(seed), "some", seed, 0.1, Schedule(2)) for seed in seeds]
        networks = [build_column(column, 10, seed) for seed in seeds]
        fleet = Fleet(networks, members, data, batch=10, precision="float64", stacked=stacked)
        fleet.train()
        return fleet.network(len(seeds) - 1)

    alone, stacked = trained([3], stacked=False), trained([1, 2, 3], stacked=True)
    start = float(column[-1])
    assert abs(float(alone.fc1.exponent.detach()) - start) > 1e-6
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(stacked.state_dict()[name], value, rtol=1e-8, atol=1e-10, msg=name)
