"""What a person expects of a fit: close to the trained layer, honest about how close, and never in the way."""

import contextlib
import math
from collections import UserDict, namedtuple

import pytest
import torch
from tests.halves import slow
from torch import nn

import torch_dcl as dcl
from torch_dcl import DCLConv1d, DCLConv2d, DCLConv3d, DCLLinear, convert_, plan
from torch_dcl.convert.assumption import _square, assume
from torch_dcl.convert.branches import is_polished
from torch_dcl.convert.fit import estimate_seconds, fit_
from torch_dcl.convert.samples import collect_samples


def matrix(rows, columns, power=0.5, seed=0, rank=None):
    """A random matrix with the singular values ``i^-power``."""
    generator = torch.Generator().manual_seed(seed)
    size = rank or min(rows, columns)
    U = torch.linalg.qr(torch.randn(rows, size, generator=generator))[0]
    V = torch.linalg.qr(torch.randn(columns, size, generator=generator))[0]
    return (U * torch.arange(1, size + 1) ** -power) @ V.t()


def linear(weight, bias=0.0, seed=1):
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias * torch.randn(len(weight), generator=torch.Generator().manual_seed(seed)))
    return layer


def fill(conv):
    """A convolution with a steep spectrum and small biases."""
    with torch.no_grad():
        conv.weight.copy_(matrix(len(conv.weight), conv.weight[0].numel(), power=1.0).view_as(conv.weight))
        if conv.bias is not None:
            conv.bias.copy_(0.1 * inputs(len(conv.bias)))
    return conv


def inputs(*size, seed=2):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def distance(layer, plain, x, norm=None):
    """The relative squared error against the trained unit, measured from outside."""
    a = plain(x)
    target = torch.relu(a if norm is None else norm(a)).double()
    return float((layer(x).double() - target).square().sum() / target.square().sum())


@pytest.mark.parametrize("branches", [1, 2, 3])
def test_a_layer_that_a_branch_can_hold_is_reproduced(branches):
    plain = linear(matrix(64, 96, rank=14), bias=0.1)
    layer = DCLLinear.like(plain, branches=branches, width=16)
    fit_(layer, plain)
    # What is left is the floor: 0.05² of the mean square where the trained output is zero.
    assert distance(layer, plain, inputs(4096, 96)) < (1e-6 if branches == 1 else 0.003)


def outputs(plain, rows=4096, seed=11):
    """Calibration samples of a linear layer whose inputs are white."""
    return plain(inputs(rows, plain.in_features, seed=seed).to(plain.weight.dtype)).detach()


@pytest.mark.parametrize(("branches", "width", "bound"), [(2, 32, 0.17), (3, 26, 0.19)])
def test_a_fit_beats_a_random_start_by_far(branches, width, bound):
    plain = linear(matrix(128, 128), bias=0.05)
    layer = DCLLinear.like(plain, branches=branches, width=width)
    x = inputs(4096, 128)
    at_random = distance(layer, plain, x)
    fit_(layer, plain)
    assert distance(layer, plain, x) < at_random / 3
    report = fit_(layer, plain, None, outputs(plain))
    fitted = distance(layer, plain, x)
    assert fitted < bound
    assert fitted < at_random / 4
    assert report.error == pytest.approx(fitted, rel=0.05)
    assert report.low_rank_error < fitted


@pytest.mark.parametrize("branches", [2, 3])
def test_without_data_the_fit_holds_at_any_scale_of_the_inputs(branches):
    plain = linear(matrix(64, 64, power=0.8))
    layer = DCLLinear.like(plain, branches=branches, width=16)
    fit_(layer, plain)
    x = inputs(4096, 64)
    expected = distance(layer, plain, x)
    assert distance(layer, plain, 0.3 * x) == pytest.approx(expected, rel=0.2)
    assert distance(layer, plain, 10 * x) == pytest.approx(expected, rel=0.2)


def test_a_large_layer_is_fitted_well_without_many_steps():
    plain = linear(matrix(1792, 1792, power=0.5), bias=0.01)
    assert not is_polished((448, 448), 1792)
    layer = DCLLinear.like(plain, width=448)
    report = fit_(layer, plain)
    assert report.error < 0.058  # 0.0587 after the first start alone, or 149 noisy steps
    assert distance(layer, plain, inputs(2048, 1792)) < 0.135


def test_the_time_of_a_fit_is_estimated_from_its_size():
    def seconds(*size, calibrated=False, normed=False, **arguments):
        return estimate_seconds(DCLLinear(*size, **arguments), 1 / 188e9, calibrated=calibrated, normed=normed)

    small = seconds(64, 64)
    assert 0.1 < small < 1
    assert seconds(256, 256) > small
    assert seconds(1024, 256) > seconds(256, 256)
    assert seconds(256, 256, calibrated=True) > seconds(256, 256)
    assert seconds(256, 256, normed=True) > seconds(256, 256)
    assert seconds(256, 256, branches=1, width=128) < seconds(256, 256)
    # On two cores with 188 billion operations a second: 24 seconds for VGG16's classifier.0.
    assert seconds(25088, 4096, device="meta") == pytest.approx(24, rel=0.2)


@pytest.mark.parametrize("size", [(5, 3), (64, 64), (700, 1300), (513, 513)])
def test_the_square_of_a_weight_is_formed_by_half_and_complete(size):
    weight = inputs(*size)
    wide = weight.double()
    torch.testing.assert_close(_square(weight), wide @ wide.t(), rtol=1e-12, atol=1e-11)


def test_many_branches():
    plain = linear(matrix(64, 64, power=1.0))
    for branches in (4, 8):
        layer = DCLLinear.like(plain, branches=branches, width=16)
        report = fit_(layer, plain, None, outputs(plain))
        assert report.error == pytest.approx(distance(layer, plain, inputs(4096, 64)), rel=0.1)
        assert report.error < 0.05


def test_one_branch_is_at_least_as_good_as_principal_components():
    plain = linear(matrix(128, 128), bias=0.05)
    layer = DCLLinear.like(plain, branches=1, width=40)
    samples = outputs(plain)
    report = fit_(layer, plain, None, samples)
    x = inputs(8192, 128)
    with torch.no_grad():
        mean = samples.mean(0)
        U = torch.linalg.svd((samples - mean).double(), full_matrices=False)[2][:40].t().float()
        low_rank = torch.relu((plain(x) - mean) @ U @ U.t() + mean)
        target = torch.relu(plain(x))
        closed_form = float((low_rank - target).square().sum() / target.square().sum())
    assert distance(layer, plain, x) <= closed_form
    assert layer.eps == report.eps == 0
    assert report.error == report.low_rank_error == pytest.approx(closed_form, rel=0.1)


def test_the_low_rank_layer_beside_it_has_equal_weights():
    plain = linear(matrix(96, 64), bias=0.05)
    beside = fit_(DCLLinear.like(plain, branches=3, width=(8, 12, 10)), plain).low_rank_error
    assert beside == pytest.approx(fit_(DCLLinear.like(plain, branches=1, width=30), plain).error, rel=0.03)


def correlated(rows, seed=3):
    """Inputs whose variance falls off, with a mean, as a layer in a network sees them."""
    return torch.relu(inputs(rows, 96, seed=seed) @ matrix(96, 96, power=1.0, seed=7) * 6 + 0.2)


@pytest.mark.parametrize("rows", [slow(48), 2048])
@pytest.mark.parametrize("branches", [1, 2])
def test_calibration_helps_on_data_that_are_not_white(rows, branches):
    plain = linear(matrix(128, 96, power=0.2), bias=0.1)
    blind, told = (DCLLinear.like(plain, branches=branches, width=24) for _ in range(2))
    fit_(blind, plain)
    report = fit_(told, plain, None, plain(correlated(rows)).detach())
    x = correlated(4096, seed=4)
    assert distance(told, plain, x) < 0.6 * distance(blind, plain, x)
    if rows == 2048:
        assert report.error == pytest.approx(distance(told, plain, x), rel=0.15)


@pytest.mark.parametrize(
    ("kind", "plain"),
    [
        (DCLConv1d, nn.Conv1d(12, 32, 5, stride=2, padding=2, dilation=2)),
        (DCLConv2d, nn.Conv2d(6, 32, 3, stride=(2, 1), padding=(2, 1), dilation=(1, 2), padding_mode="reflect")),
        (DCLConv2d, nn.Conv2d(6, 32, (1, 3), padding="same", bias=False)),
        (DCLConv3d, nn.Conv3d(4, 24, (1, 2, 3))),
    ],
)
def test_convolutions_of_every_geometry(kind, plain):
    fill(plain)
    size = (plain.in_channels, *(14, 12, 10)[: plain.weight.dim() - 2])
    samples = collect_samples(plain, {"it": plain}, [inputs(512, *size)])["it"]
    layer = kind.like(plain, width=8)
    report = fit_(layer, plain, None, samples)
    assert report.error == pytest.approx(distance(layer, plain, inputs(64, *size, seed=5)), rel=0.15)
    assert report.error < 0.15
    assert (layer.fusion.bias is None) == (plain.bias is None)


def batch_norm(channels=48, **arguments):
    norm = nn.BatchNorm2d(channels, **arguments)
    with torch.no_grad():
        for name, low, high in (("weight", -1, 2), ("bias", -1, 1), ("running_mean", -1, 1), ("running_var", 0.1, 3)):
            if getattr(norm, name) is not None:
                random = torch.rand(channels, generator=torch.Generator().manual_seed(ord(name[-1])))
                getattr(norm, name).copy_(low + (high - low) * random)
    return norm.eval()


def conv(bias=False):
    return fill(nn.Conv2d(16, 48, 3, bias=bias))


@pytest.mark.parametrize("arguments", [{}, {"affine": False}])
@pytest.mark.parametrize("calibrated", [True, False])
def test_a_batch_norm_is_exact_in_eval_inside_the_branches_and_folded(arguments, calibrated):
    plain, norm, x = conv(), batch_norm(**arguments), inputs(32, 16, 8, 8)
    samples = collect_samples(plain, {"it": plain}, [x])["it"] if calibrated else None
    inside = DCLConv2d.like(plain, width=12, norm_layer=lambda n: nn.BatchNorm2d(n, **arguments)).eval()
    folded = DCLConv2d.like(plain, width=12, bias=True).eval()
    report = fit_(inside, plain, norm, samples)
    assert fit_(folded, plain, norm, samples) == report
    with torch.no_grad():
        torch.testing.assert_close(inside(x), folded(x), atol=1e-3, rtol=1e-3)
    if calibrated:
        assert report.error < 0.1
        assert distance(inside, plain, inputs(32, 16, 8, 8, seed=9), norm) == pytest.approx(report.error, rel=0.15)


def photos(rows, channels, *size, seed=6):
    """Inputs as a layer in a network sees them: not of zero mean, correlated between channels and positions."""
    x = inputs(rows, channels, *size, seed=seed)
    for axis in range(2, x.dim()):
        x = x + x.roll(1, axis)
    return torch.einsum("ij,nj...->ni...", matrix(channels, channels, power=0.7, seed=8), x) + 0.7


def unit(plain, norm, *, measured, x):
    """The trained unit with statistics of real inputs, or with some that no inputs have."""
    with torch.no_grad():
        for name, low, high in (("weight", 0.5, 1.5), ("bias", -0.5, 0.5), ("running_mean", -1, 1)):
            getattr(norm, name).uniform_(low, high, generator=torch.Generator().manual_seed(12))
        norm.running_var.uniform_(0.3, 3, generator=torch.Generator().manual_seed(13))
        if measured:
            norm.momentum = 1.0
            norm(plain(x))
    return plain, norm.eval()


@pytest.mark.parametrize("measured", [True, slow(False)])
@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize(
    ("kind", "plain", "norm", "width", "size"),
    [
        (DCLConv2d, nn.Conv2d(3, 64, 3), nn.BatchNorm2d, 64, (3, 8, 8)),
        (DCLConv2d, nn.Conv2d(3, 64, 3, bias=False), nn.BatchNorm2d, 27, (3, 8, 8)),
        (DCLConv2d, nn.Conv2d(16, 72, 1, bias=False), nn.BatchNorm2d, 16, (16, 5, 5)),
        (DCLConv2d, nn.Conv2d(8, 24, 3, bias=False), nn.BatchNorm2d, 24, (8, 6, 6)),
        (DCLConv1d, nn.Conv1d(1, 31, 3), nn.BatchNorm1d, 5, (1, 40)),
        (DCLLinear, nn.Linear(12, 50), nn.BatchNorm1d, 12, (12,)),
        (DCLLinear, linear(matrix(50, 20, rank=7)), nn.BatchNorm1d, 7, (20,)),
        (DCLLinear, linear(matrix(60, 24, power=3.0)), nn.BatchNorm1d, 24, (24,)),
    ],
)
def test_a_unit_that_one_branch_can_hold_is_reproduced_for_any_input(
    kind, plain, norm, width, size, calibrated, measured
):
    x = photos(512, *size)
    plain, norm = unit(plain, norm(len(plain.weight)), measured=measured, x=x)
    samples = collect_samples(plain, {"it": plain}, [x])["it"] if calibrated else None
    inside = kind.like(plain, branches=1, width=width, norm_layer=type(norm)).eval()
    folded = kind.like(plain, branches=1, width=width, bias=True).eval()
    other = 3 * photos(64, *size, seed=21) - 1
    for layer in (inside, folded):
        report = fit_(layer, plain, norm, samples)
        assert report.error < 1e-10
        assert distance(layer, plain, other, norm) < 1e-10  # squared: 1e-5 of the output


def test_a_network_with_batch_norms_whose_units_one_branch_can_hold_stays_the_same():
    torch.manual_seed(0)
    channels = [3, 40, 24, 56]
    convs = [nn.Conv2d(a, b, k, padding=k // 2) for a, b, k in zip(channels, channels[1:], (3, 3, 1), strict=False)]
    norms = [nn.BatchNorm2d(c, momentum=None) for c in channels[1:]]
    relus = [nn.ReLU() for _ in norms]
    model = nn.Sequential(*(part for unit in zip(convs, norms, relus, strict=True) for part in unit), nn.Flatten())
    with torch.no_grad():
        for seed in range(3):
            model(photos(64, 3, 10, 10, seed=seed))
        x = photos(32, 3, 10, 10, seed=9)
        expected = model.eval()(x)
        assert expected.count_nonzero() > 0.2 * expected.numel()
        for i, layer, norm in zip(range(0, 9, 3), convs, norms, strict=True):
            width = min(layer.weight.shape[0], layer.weight[0].numel())
            model[i] = DCLConv2d.like(layer, branches=1, width=width, norm_layer=nn.BatchNorm2d).eval()
            assert fit_(model[i], layer, norm).error < 1e-10
            model[i + 1] = model[i + 2] = nn.Identity()
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def folded_weight(plain, norm):
    return nn.utils.fuse_conv_bn_eval(plain.eval(), norm).weight.detach().flatten(1)


@pytest.mark.parametrize("plain", [nn.Conv2d(3, 64, 3), nn.Conv2d(16, 48, 3, bias=False)])
def test_what_is_assumed_could_come_from_inputs_and_has_the_variances_of_the_norm(plain):
    plain, norm = unit(
        fill(plain), nn.BatchNorm2d(len(plain.weight)), measured=True, x=photos(512, *plain.weight[0].shape)
    )
    W = folded_weight(plain, norm)
    basis, whiten = assume(W, norm.weight.detach().abs(), by_channel=True)
    inside = basis.t() - W @ torch.linalg.lstsq(W.double(), basis.t().double()).solution.float()
    assert inside.norm() < 1e-5 * basis.norm()
    torch.testing.assert_close(basis.square().sum(0).sqrt(), norm.weight.detach(), rtol=0.1, atol=0)
    torch.testing.assert_close(basis @ whiten, torch.eye(len(basis)), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("branches", "width"), [(1, 12), (2, 8)])
@pytest.mark.parametrize(("channels", "bias"), [((3, 64), True), ((16, 48), False)])
def test_the_reported_error_is_that_of_the_layer_on_inputs_as_assumed(channels, bias, branches, width):
    torch.manual_seed(0)
    plain = nn.Conv2d(*channels, 3, bias=bias)
    size = plain.weight[0].shape
    plain, norm = unit(plain, nn.BatchNorm2d(len(plain.weight)), measured=True, x=photos(4096, *size))
    layer = DCLConv2d.like(plain, branches=branches, width=width, norm_layer=nn.BatchNorm2d).eval()
    report = fit_(layer, plain, norm)
    basis, _ = assume(folded_weight(plain, norm), norm.weight.detach(), by_channel=True)
    # Inputs that lead there, one for each position, around the mean.
    back = torch.linalg.pinv(folded_weight(plain, norm).double()).t().float()
    x = photos(4096, *size).mean(0) + (inputs(8192, len(basis)) @ basis @ back).view(-1, *size)
    assert report.error > 0.05
    assert report.error == pytest.approx(distance(layer, plain, x, norm), rel=0.03)


@pytest.mark.parametrize(("branches", "width"), [(1, 16), (2, 12)])
def test_the_statistics_of_a_norm_help_where_few_directions_of_the_weight_are_strong(branches, width):
    plain, x = fill(nn.Conv2d(8, 64, 3, bias=False)), photos(512, 8, 8, 8)
    plain, norm = unit(plain, nn.BatchNorm2d(64), measured=True, x=x)
    told = DCLConv2d.like(plain, branches=branches, width=width, norm_layer=nn.BatchNorm2d).eval()
    fit_(told, plain, norm)
    # The same without statistics: the norm as part of a convolution.
    fused = nn.utils.fuse_conv_bn_eval(plain.eval(), norm)
    blind = DCLConv2d.like(fused, branches=branches, width=width)
    fit_(blind, fused)
    x = photos(64, 8, 8, 8, seed=22)
    assert distance(told, plain, x, norm) < distance(blind, fused, x)


def test_a_norm_in_the_branches_does_in_training_what_it_does_in_eval():
    plain, x = conv(), inputs(64, 16, 8, 8)
    norm = nn.BatchNorm2d(48, momentum=1.0)
    norm(plain(x))
    layer = DCLConv2d.like(plain, width=12, norm_layer=nn.BatchNorm2d)
    report = fit_(layer, plain, norm.eval(), collect_samples(plain, {"it": plain}, [x])["it"])
    assert distance(layer.train(), plain, x, norm) == pytest.approx(report.error, rel=0.2)


@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_without_running_statistics(affine):
    plain, x = conv(bias=True), inputs(64, 16, 8, 8)
    norm = batch_norm(affine=affine, track_running_stats=False)
    layer = DCLConv2d.like(
        plain, width=12, norm_layer=lambda n: nn.BatchNorm2d(n, affine=affine, track_running_stats=False)
    )
    fit_(layer, plain, norm)
    assert distance(layer, plain, x, norm) < 0.15
    report = fit_(layer, plain, norm, collect_samples(plain, {"it": plain}, [x])["it"])
    assert distance(layer, plain, x, norm) < 0.15
    assert report.error < 0.15


def test_a_norm_without_a_shift():
    plain, norm = conv(), batch_norm()
    norm.bias = None
    layer = DCLConv2d.like(plain, width=12, norm_layer=nn.BatchNorm2d).eval()
    layer.fusion.norm.bias = None
    folded = DCLConv2d.like(plain, width=12, bias=True).eval()
    assert fit_(layer, plain, norm) == fit_(folded, plain, norm)
    with torch.no_grad():
        torch.testing.assert_close(layer(inputs(4, 16, 8, 8)), folded(inputs(4, 16, 8, 8)), atol=1e-3, rtol=1e-3)


def test_every_pair_of_a_stochastic_layer_is_a_fair_stand_in():
    plain = linear(matrix(96, 96, power=0.8))
    layer = DCLLinear.like(plain, branches=4, width=24, strategy="stochastic").eval()
    report = fit_(layer, plain, None, outputs(plain))
    x = inputs(4096, 96)
    assert report.error == pytest.approx(distance(layer, plain, x), rel=0.05)
    assert report.error < 0.06
    layer.fusion.advanced = True
    for pair in ((0, 1), (1, 3), (2, 3)):
        layer.fusion.active.copy_(torch.tensor(pair))
        assert distance(layer.train(), plain, x) < 1.5 * report.error


def test_unequal_widths():
    plain = linear(matrix(96, 96, power=0.8))
    layer = DCLLinear.like(plain, branches=3, width=(4, 40, 20))
    report = fit_(layer, plain, None, outputs(plain))
    assert report.error == pytest.approx(distance(layer, plain, inputs(4096, 96)), rel=0.05)
    assert report.error < 0.2


@pytest.mark.parametrize(("dtype", "slack"), [(torch.float64, 0.05), (torch.bfloat16, 0.1), (torch.float16, 0.05)])
def test_other_types(dtype, slack):
    plain = linear(matrix(64, 64), bias=0.1).to(dtype)
    layer = DCLLinear.like(plain, width=16)
    report = fit_(layer, plain, None, outputs(plain))
    assert {p.dtype for p in layer.parameters()} == {dtype}
    assert report.error == pytest.approx(distance(layer, plain, inputs(2048, 64).to(dtype)), rel=slack)


@pytest.mark.parametrize("scale", [slow(1e-12), 1e9])
@pytest.mark.parametrize("branches", [2, 3])
def test_the_floor_follows_the_scale_of_the_layer(scale, branches):
    plain = linear(matrix(64, 64), bias=0.1)
    layer = DCLLinear.like(plain, branches=branches, width=16)
    report = fit_(layer, plain)
    rms = torch.relu(plain(inputs(8192, 64))).square().mean().sqrt().item()
    assert report.eps == layer.eps == pytest.approx((0.05 * rms) ** branches, rel=0.1)
    with torch.no_grad():
        plain.weight.mul_(scale)
        plain.bias.mul_(scale)
    scaled = fit_(layer, plain)
    assert scaled.error == pytest.approx(report.error, rel=0.02)
    assert scaled.eps == pytest.approx(report.eps * scale**branches, rel=0.01)


@pytest.mark.parametrize("weight", [0.0, 1e-3])
@pytest.mark.parametrize("bias", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("calibrated", [True, slow(False)])
@pytest.mark.parametrize("branches", [1, 2])
def test_a_dead_or_constant_layer_stays_what_it_is(weight, bias, calibrated, branches):
    plain = nn.Linear(24, 16)
    nn.init.constant_(plain.weight, weight)
    nn.init.constant_(plain.bias, bias)
    layer = DCLLinear.like(plain, branches=branches, width=4)
    report = fit_(layer, plain, None, plain(inputs(64, 24)).detach() if calibrated else None)
    assert all(map(math.isfinite, report))
    assert report.error < 0.01
    assert all(p.isfinite().all() for p in layer.parameters())
    assert layer.branch.weight.square().sum(1).min() > 0  # a filter of zeros would never learn
    with torch.no_grad():
        x = inputs(256, 24)
        a = plain(x)
        scale = a.relu().square().mean().sqrt().item() or a.square().mean().sqrt().item() or 1.0
        assert (layer(x) - a.relu()).abs().max() < 0.06 * scale


def test_a_norm_that_switches_channels_off():
    plain, norm = conv(), batch_norm()
    nn.init.zeros_(norm.weight)
    layer = DCLConv2d.like(plain, width=12, norm_layer=nn.BatchNorm2d).eval()
    assert fit_(layer, plain, norm).error < 0.01
    assert distance(layer, plain, inputs(4, 16, 8, 8), norm) < 0.01


def test_no_filter_is_left_without_a_direction_to_learn():
    plain = linear(matrix(32, 32, rank=3))
    layer = DCLLinear.like(plain, width=8)
    fit_(layer, plain)
    assert layer.branch.weight.norm(dim=1).min() > 0
    both = (layer.branch.weight.norm(dim=1), layer.fusion.weight.norm(dim=1))
    used = both[1] > 1e-3
    torch.testing.assert_close(both[0][used], both[1][used])


def test_the_seed_decides_and_the_global_random_state_is_left_alone():
    plain = linear(matrix(48, 48), bias=0.1)
    layers = [DCLLinear.like(plain, width=12) for _ in range(3)]
    samples = plain(inputs(256, 48)).detach()
    before = torch.get_rng_state()
    reports = [fit_(layer, plain, None, samples, seed=seed) for layer, seed in zip(layers, (0, 0, 1), strict=True)]
    assert torch.equal(before, torch.get_rng_state())
    assert reports[0] == reports[1] != reports[2]
    assert torch.equal(layers[0].branch.weight, layers[1].branch.weight)
    assert torch.equal(layers[0].fusion.weight, layers[1].fusion.weight)
    assert not torch.equal(layers[0].branch.weight, layers[2].branch.weight)


def test_the_trained_layer_and_autocast_are_left_alone():
    plain = linear(matrix(48, 48), bias=0.1)
    weight = plain.weight.detach().clone()
    layer, other = DCLLinear.like(plain, width=12), DCLLinear.like(plain, width=12)
    report = fit_(layer, plain)
    with torch.autocast("cpu"):
        assert fit_(other, plain) == report
    assert torch.equal(plain.weight, weight)
    assert all(p.requires_grad and p.grad is None for p in (*plain.parameters(), *layer.parameters()))


PLAIN = linear(matrix(32, 16))
LAYER = {"layer": DCLLinear.like(PLAIN, width=4), "plain": PLAIN}


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"plain": nn.ReLU()}, TypeError, "a ReLU has no DCL layer to start"),
        ({"plain": nn.ConvTranspose1d(16, 32, 1)}, TypeError, "a ConvTranspose1d has no DCL layer"),
        ({"plain": nn.Linear(16, 30)}, ValueError, r"weight is \(30, 16\), .* one of \(32, 16\); build it with like"),
        ({"norm": nn.LayerNorm(32)}, TypeError, "a LayerNorm cannot be fitted; use a batch norm"),
        ({"norm": nn.BatchNorm1d(16)}, ValueError, "has 16 channels, the layer 32"),
        ({"layer": DCLLinear(16, 32, norm_layer=nn.LayerNorm)}, TypeError, "a LayerNorm cannot be fitted"),
        ({"layer": DCLLinear(16, 32, branch_activation=nn.ReLU)}, ValueError, "build without branch_activation"),
        (
            {"layer": DCLLinear(16, 32, bias=False), "norm": nn.BatchNorm1d(32)},
            ValueError,
            "needs a bias for its constant; build with bias=True",
        ),
        ({"samples": torch.randn(64, 16)}, ValueError, r"samples must be \[N, 32\], got \[64, 16\]"),
        ({"samples": torch.randn(7, 32)}, ValueError, "give 7 of its outputs, and a fit needs at least 8; use more"),
        ({"samples": torch.full((64, 32), math.nan)}, ValueError, "cannot be fitted: samples holds nan"),
        ({"plain": linear(torch.full((32, 16), math.inf))}, ValueError, "cannot be fitted: weight holds inf"),
        ({"plain": linear(torch.full((32, 16), 1e31))}, ValueError, r"weight holds 1e\+31, .* values up to 1e\+30"),
    ],
)
def test_what_cannot_be_fitted_is_refused(arguments, kind, message):
    with pytest.raises(kind, match=message):
        fit_(**{**LAYER, **arguments})


def spoiled(module, name, value):
    getattr(module, name).data.view(-1)[5] = value
    return module


def conv_and_norm():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 64, 3), batch_norm(64), nn.ReLU()).eval()


@pytest.mark.parametrize(
    ("place", "name", "value", "message"),
    [
        (1, "weight", math.nan, "'1' cannot be fitted: weight holds nan"),
        (1, "weight", -math.inf, "'1' cannot be fitted: weight holds -inf"),
        (1, "bias", math.inf, "'1' cannot be fitted: bias holds inf"),
        (1, "weight", -1e20, r"'1' cannot be fitted: weight holds 1e\+20 where the median is 0\.\d+, so that nothing"),
        (1, "bias", 1e20, r"'1' cannot be fitted: bias holds 1e\+20 where the median"),
        (2, "running_mean", math.nan, "'1' cannot be fitted: running_mean of the batch norm holds nan"),
        (2, "running_var", math.inf, "'1' cannot be fitted: running_var of the batch norm holds inf"),
        (
            2,
            "running_var",
            -0.5,
            "'1' cannot be fitted: running_var of the batch norm holds the negative variance -0.5",
        ),
        (2, "running_var", 1e30, r"running_var of the batch norm holds 1e\+15 where the median"),
        (2, "weight", math.nan, "'1' cannot be fitted: weight of the batch norm holds nan"),
        (2, "bias", 1e20, r"'1' cannot be fitted: bias of the batch norm holds 1e\+20"),
    ],
)
def test_values_that_cannot_be_fitted_are_named_and_nothing_changes(place, name, value, message):
    model = conv_and_norm()
    planned = plan(model, (3, 12, 12), width=8).only("1")
    spoiled(model[place], name, value)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        convert_(model, planned, init="fit")
    assert type(model[1]) is nn.Conv2d
    assert all(torch.equal(before[k].nan_to_num(9), v.nan_to_num(9)) for k, v in model.state_dict().items())


def test_samples_that_are_not_finite_are_named():
    model = conv_and_norm()
    with pytest.raises(ValueError, match="'1' cannot be fitted: samples holds nan"):
        convert_(
            model,
            plan(model, (3, 12, 12), width=8).only("1"),
            init="fit",
            calibration=[spoiled(nn.Linear(12, 12), "weight", math.nan).weight.detach().expand(4, 3, 12, 12)],
        )


@pytest.mark.parametrize("value", [-1e15, -1e9])
def test_a_bias_that_switches_a_channel_off_is_fitted(value):
    plain = spoiled(linear(matrix(64, 64), bias=0.1), "bias", value)
    layer, without = (DCLLinear.like(plain, width=16) for _ in range(2))
    error = fit_(layer, plain).error
    assert error == pytest.approx(fit_(without, spoiled(plain, "bias", 0.0)).error, rel=0.1)
    x = inputs(1024, 64)
    assert distance(layer, spoiled(plain, "bias", value), x) == pytest.approx(distance(without, plain, x), rel=0.2)


@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize("branches", [slow(1), 2, slow(3)])
def test_a_layer_whose_weights_are_all_huge_is_fitted_like_any_other(branches, calibrated):
    plain, huge = (linear(matrix(48, 48), bias=0.1) for _ in range(2))
    with torch.no_grad():
        huge.weight.mul_(1e20)
        huge.bias.mul_(1e20)
    x = inputs(1024, 48)
    errors = []
    for each in (plain, huge):
        layer = DCLLinear.like(each, branches=branches, width=12)
        report = fit_(layer, each, None, outputs(each, rows=512) if calibrated else None)
        errors.append((report.error, report.low_rank_error, distance(layer, each, x)))
    assert errors[0] == pytest.approx(errors[1], rel=0.01)


@pytest.fixture
def default_float64():
    """Call it to make float64 the default."""
    yield lambda: torch.set_default_dtype(torch.float64)
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [slow(torch.float32), torch.float64])
@pytest.mark.parametrize("branches", [slow(2), 3])
@pytest.mark.parametrize("calibrated", [True, False])
def test_the_default_dtype_changes_nothing(dtype, branches, calibrated, default_float64):
    models = [conv_and_norm().to(dtype) for _ in range(2)]
    batches = [photos(16, 3, 12, 12).to(dtype)] if calibrated else None
    fits = []
    for model in models:
        planned = plan(model, (3, 12, 12), branches=branches, width=8).only("1")
        fits.append(convert_(model, planned, init="fit", calibration=batches).fits["1"])
        default_float64()
    assert fits[0] == fits[1]
    expected, found = (model.state_dict() for model in models)
    torch.testing.assert_close(found, expected)


class Branching(nn.Module):
    """A convolution, a linear layer over tokens, one that is never called, and a dropout that shows the mode."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(8, 4)
        self.idle = nn.Linear(4, 4)

    def forward(self, x, scale=1.0):
        y = self.conv(x).flatten(2).transpose(1, 2)
        return self.fc(self.drop(y) * scale)


def test_samples_are_rows_of_what_the_layers_put_out():
    model = Branching().double().train()
    model.fc.eval()
    x = inputs(4, 3, 6, 6).double()
    found = collect_samples(model, {"conv": model.conv, "fc": model.fc}, [x])
    rows = model.conv(x).movedim(1, -1).reshape(-1, 8)
    assert found["conv"].shape == (64, 8)
    assert found["conv"].dtype == torch.float32
    assert torch.equal(found["conv"].sort(0).values, rows.detach().float().sort(0).values)
    assert torch.equal(found["fc"].sort(0).values, model.fc(rows).detach().float().sort(0).values)
    assert model.training
    assert model.drop.training
    assert not model.fc.training
    assert not model.conv._forward_hooks


def test_batches_may_be_tensors_tuples_or_keywords():
    model = Branching()
    x, layers = inputs(2, 3, 6, 6), {"fc": model.fc}
    expected = collect_samples(model, layers, [x])["fc"]
    mapping = UserDict(x=x)  # as tokenizers return it
    for calibration in (
        [(x, torch.zeros(2))],
        [[x]],
        [{"x": x, "scale": 1.0}],
        x,
        {"x": x},
        iter([x]),
        [mapping],
        mapping,
    ):
        assert torch.equal(collect_samples(model, layers, calibration)["fc"], expected)


def test_a_batch_that_is_the_dictionary_a_network_takes_is_explained():
    model = Branching()
    model.forward = lambda batch: Branching.forward(model, batch["x"])
    x = inputs(2, 3, 6, 6)
    with pytest.raises(TypeError) as caught:
        collect_samples(model, {"fc": model.fc}, [{"x": x}])
    assert "for a network that takes the dictionary itself, map its argument" in caught.value.__notes__[0]
    found = collect_samples(model, {"fc": model.fc}, [{"batch": {"x": x}}])
    del model.forward
    assert torch.equal(found["fc"], collect_samples(model, {"fc": model.fc}, [x])["fc"])


def test_an_input_of_tensors_keeps_its_kind():
    class Kinds(nn.Linear):
        def forward(self, x, state):
            assert (type(x), type(state), type(state[1])) == (list, tuple, Slots)
            return super().forward(x[0] + state[0] + state[1].value)

    Slots = namedtuple("Slots", "value")
    model, batch = Kinds(2, 3), {"x": [torch.ones(4, 2)], "state": (torch.ones(2), Slots(torch.ones(2)))}
    assert collect_samples(model, {"": model}, [batch])[""].shape == (4, 3)


def test_positions_are_drawn_evenly_from_all_batches():
    layer = nn.Linear(1, 1)
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    batches = [torch.full((size, 1), float(i)) for i, size in enumerate((1000, 3000, 5, 6000))]
    before = torch.get_rng_state()
    found = collect_samples(layer, {"": layer}, batches, limit=500)[""]
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(found, collect_samples(layer, {"": layer}, batches, limit=500)[""])
    assert not torch.equal(found, collect_samples(layer, {"": layer}, batches, limit=500, seed=1)[""])
    assert len(found) == 500
    shares = [(found == i).float().mean().item() for i in range(4)]
    assert shares == pytest.approx([0.1, 0.3, 0.0005, 0.6], abs=0.07)
    spread = collect_samples(layer, {"": layer}, [torch.arange(1000.0)[:, None]], limit=100)[""]
    assert len(spread.unique()) == 100


def test_no_data_is_an_error_that_says_so():
    model = Branching()
    with pytest.raises(ValueError, match="calibration holds no batch"):
        collect_samples(model, {"fc": model.fc}, [])
    with pytest.raises(ValueError, match="'idle' took no part in the 1 calibration batches"):
        collect_samples(model, {"fc": model.fc, "idle": model.idle}, [inputs(1, 3, 6, 6)])


@pytest.mark.parametrize("ends", [True, False])
def test_calibration_leaves_no_trace_of_what_a_forward_does_to_its_network(ends):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.head = nn.Linear(16, 64), nn.Linear(64, 2)
            self.follower = nn.Parameter(torch.zeros(64), requires_grad=False)
            self.register_buffer("peak", torch.zeros(()))
            self.calls, self.log = 0, []

        def forward(self, x):
            self.calls += 1
            self.log.append(len(x))
            self.peak.fill_(x.max().item())
            self.follower.lerp_(self.head.weight[0].detach(), 0.5)
            self.latest = x
            return self.head(self.fc(x).relu())

    def batches():
        yield from (inputs(64, 16) for _ in range(3))
        if not ends:
            raise KeyboardInterrupt

    model = Counting()
    plan = dcl.plan(model, input_size=(16,), width=4)
    with contextlib.nullcontext() if ends else pytest.raises(KeyboardInterrupt):
        dcl.convert_(model, plan, init="fit", calibration=batches())
    assert isinstance(model.fc, dcl.DCLLinear) == ends
    assert (model.calls, model.log, hasattr(model, "latest")) == (0, [], False)
    assert float(model.peak) == 0
    assert not model.follower.any()
    assert model(inputs(2, 16)).shape == (2, 2)


def test_an_error_on_the_way_leaves_the_model_as_it_was():
    model = Branching().train()
    model.drop.eval()
    with pytest.raises(RuntimeError) as caught:
        collect_samples(model, {"fc": model.fc}, [inputs(1, 3, 6, 6), inputs(1, 5, 6, 6)])
    assert caught.value.__notes__[0].startswith("This was calibration batch 2. A batch is a tensor, a tuple that")
    assert model.training
    assert not model.drop.training
    assert not model.fc._forward_hooks
