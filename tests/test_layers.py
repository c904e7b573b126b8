"""The layers: against plain torch layers built from slices of their weights, over all their arguments."""

import copy
import inspect
import io
import math
import re
import shutil
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.reference import norms_of_branches, plain_fusion, plain_pair_fusion, starts_of
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.utils import parametrize, prune

import torch_dcl as dcl
from torch_dcl import DCLConv1d, DCLConv2d, DCLConv3d, DCLLinear, advance_branches_, fuse_branches, seed_branches_
from torch_dcl import layers as layers_module
from torch_dcl.fusion import branch_widths, response_spread
from torch_dcl.models.controls import SummedLinear

PLAIN = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
DCL = {1: DCLConv1d, 2: DCLConv2d, 3: DCLConv3d}
NORM = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


def with_random_biases(layer):
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return layer


class Composition(nn.Module):
    """The same DCL module out of T plain layers, each followed by a plain 1×1 layer, in the paper's order."""

    def __init__(self, layer, make_stage1, make_stage2):
        super().__init__()
        fusion = layer.fusion
        self.eps, self.strategy = layer.eps, layer.strategy
        self.stage1, self.stage2 = nn.ModuleList(), nn.ModuleList()
        self.norms = None if fusion.norm is None else norms_of_branches(fusion.norm, layer.branches)
        self.activation = copy.deepcopy(layer.branch_activation)
        for t, (start, end) in enumerate(starts_of(layer.widths)):
            first = make_stage1(end - start, layer.branch.bias is not None)
            second = make_stage2(end - start, fusion.bias is not None)
            with torch.no_grad():
                first.weight.copy_(layer.branch.weight[start:end])
                second.weight.copy_(fusion.weight[start:end].t().reshape(second.weight.shape))
                if first.bias is not None:
                    first.bias.copy_(layer.branch.bias[start:end])
                if second.bias is not None:
                    second.bias.copy_(fusion.bias[t])
            self.stage1.append(first)
            self.stage2.append(second)

    def pre_activations(self, x):
        pre = []
        for t, (first, second) in enumerate(zip(self.stage1, self.stage2, strict=True)):
            y = first(x) if self.activation is None else self.activation(first(x))
            pre.append(second(y) if self.norms is None else self.norms[t](second(y)))
        return pre

    def forward(self, x):
        return plain_fusion(self.pre_activations(x), self.eps)


def composition_of_linear(layer):
    def stage1(width, bias):
        return nn.Linear(layer.in_features, width, bias=bias, dtype=torch.float64)

    def stage2(width, bias):
        return nn.Linear(width, layer.out_features, bias=bias, dtype=torch.float64)

    return Composition(layer, stage1, stage2)


def composition_of_conv(layer, spatial, **geometry):
    def stage1(width, bias):
        return PLAIN[spatial](layer.in_channels, width, bias=bias, dtype=torch.float64, **geometry)

    def stage2(width, bias):
        return PLAIN[spatial](width, layer.out_channels, 1, bias=bias, dtype=torch.float64)

    return Composition(layer, stage1, stage2)


def assert_layer_equals(layer, composition, x):
    """Output and the gradients of input, weights and biases."""
    torch.testing.assert_close(layer.responses(x).z, composition(x), rtol=1e-11, atol=1e-12)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    z, expected = layer(mine), composition(other)
    assert z.shape == expected.shape
    torch.testing.assert_close(z, expected, rtol=1e-11, atol=1e-12)
    incoming = torch.randn_like(z)
    z.backward(incoming)
    expected.backward(incoming)

    def joined(name, stage):
        return torch.cat([getattr(module, name).grad for module in stage])

    fusion = layer.fusion
    pairs = [
        (mine.grad, other.grad),
        (layer.branch.weight.grad, joined("weight", composition.stage1)),
        (fusion.weight.grad, torch.cat([m.weight.grad.flatten(1).t() for m in composition.stage2])),
    ]
    if layer.branch.bias is not None:
        pairs.append((layer.branch.bias.grad, joined("bias", composition.stage1)))
    if fusion.bias is not None:
        pairs.append((fusion.bias.grad.flatten(), joined("bias", composition.stage2)))
    if fusion.norm is not None:
        pairs += [(getattr(fusion.norm, name).grad, joined(name, composition.norms)) for name in ("weight", "bias")]
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


# Against plain layers


@st.composite
def widths_of(draw, out_channels):
    T = draw(st.integers(1, 8))
    one = st.integers(1, min(out_channels, 5))
    width = draw(one | st.lists(one, min_size=T, max_size=T))
    return {"branches": T, "width": width}


OPTIONS = {
    "bias": st.booleans(),
    "eps": st.none() | st.sampled_from([0.05, 1.0]),
    "branch_activation": st.sampled_from([None, nn.ReLU, nn.Tanh, nn.PReLU]),
}


@settings(max_examples=120)
@given(data=st.data())
def test_linear_equals_plain_linear_layers_multiplied(data):
    in_features, out_features = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 9))
    options = data.draw(st.fixed_dictionaries(OPTIONS)) | data.draw(widths_of(out_features))
    leading = data.draw(st.lists(st.integers(1, 3), max_size=3))
    if len(leading) == 1 and math.prod(leading) > 1:
        options["norm_layer"] = data.draw(st.sampled_from([None, nn.BatchNorm1d]))
    layer = with_random_biases(DCLLinear(in_features, out_features, dtype=torch.float64, **options))
    x = torch.randn(*leading, in_features, dtype=torch.float64)
    assert_layer_equals(layer, composition_of_linear(layer), x)


@st.composite
def geometries(draw, spatial):
    def one_or_each(numbers):
        return draw(numbers | st.tuples(*[numbers] * spatial))

    geometry = {
        "kernel_size": one_or_each(st.integers(1, 3)),
        "dilation": one_or_each(st.integers(1, 2)),
        "padding_mode": draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"])),
    }
    kind = draw(st.sampled_from(["number", "same", "valid"]))
    geometry["padding"] = one_or_each(st.integers(0, 2)) if kind == "number" else kind
    geometry["stride"] = 1 if kind == "same" else one_or_each(st.integers(1, 3))
    return geometry


@pytest.mark.parametrize(("spatial", "examples"), [(1, 80), (2, 150), (3, 60)])
def test_conv_equals_plain_convolutions_multiplied(spatial, examples):
    @settings(max_examples=examples)
    @given(data=st.data())
    def check(data):
        geometry = data.draw(geometries(spatial))
        in_channels, out_channels = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
        options = data.draw(st.fixed_dictionaries(OPTIONS)) | data.draw(widths_of(out_channels))
        batch = data.draw(st.sampled_from([(), (1,), (2,)]))
        if batch == (2,):
            options["norm_layer"] = data.draw(st.sampled_from([None, NORM[spatial]]))
        layer = with_random_biases(DCL[spatial](in_channels, out_channels, dtype=torch.float64, **geometry, **options))
        size = data.draw(st.tuples(*[st.integers(6, 7)] * spatial))
        x = torch.randn(*batch, in_channels, *size, dtype=torch.float64)
        assert_layer_equals(layer, composition_of_conv(layer, spatial, **geometry), x)

    check()


@pytest.mark.parametrize("T", range(1, 9))
def test_every_number_of_branches(T):
    layer = with_random_biases(DCLConv2d(3, 16, 3, padding=1, branches=T, dtype=torch.float64))
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    assert layer.branches == T
    assert layer.widths == (8,) * T
    assert layer.eps == pytest.approx(10.0**-T)
    assert_layer_equals(layer, composition_of_conv(layer, 2, kernel_size=3, padding=1), x)


@pytest.mark.parametrize("spatial", [1, 2, 3])
@pytest.mark.parametrize("T", [3, 5])
def test_stochastic_in_eval_is_the_mean_over_all_pairs(T, spatial):
    layer = with_random_biases(
        DCL[spatial](3, 8, 3, branches=T, strategy="stochastic", norm_layer=NORM[spatial], dtype=torch.float64)
    ).eval()
    x = torch.randn(2, 3, *(5,) * spatial, dtype=torch.float64)
    composition = composition_of_conv(layer, spatial, kernel_size=3).eval()
    expected = plain_pair_fusion(composition.pre_activations(x), 1e-2)
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(layer.responses(x).z, expected, rtol=1e-12, atol=1e-12)


def test_batch_norm_follows_the_training_flag_and_keeps_its_statistics():
    layer = DCLConv2d(3, 8, 3, branches=3, norm_layer=nn.BatchNorm2d, dtype=torch.float64)
    composition = composition_of_conv(layer, 2, kernel_size=3)
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64) * 3 + 1
    for training in (True, True, False):
        torch.testing.assert_close(layer.train(training)(x), composition.train(training)(x), rtol=1e-11, atol=1e-12)
    norm = layer.fusion.norm
    assert norm.num_batches_tracked == 2
    for name in ("running_mean", "running_var"):
        expected = torch.cat([getattr(other, name) for other in composition.norms])
        torch.testing.assert_close(getattr(norm, name), expected, rtol=1e-11, atol=1e-12)


SETTINGS = [
    {},
    {"momentum": None},
    {"momentum": 0.0, "eps": 0.1},
    {"affine": False},
    {"track_running_stats": False},
    {"affine": False, "track_running_stats": False},
]


@pytest.mark.parametrize("arguments", SETTINGS, ids=str)
@pytest.mark.parametrize("called", ["in branches", "whole"])
def test_a_batch_norm_of_any_settings_is_one_for_each_branch(arguments, called):
    """A norm that somebody hooked into is called as it is, with the responses of all branches side by side."""
    layer = DCLConv2d(3, 8, 3, branches=3, norm_layer=partial(nn.BatchNorm2d, **arguments), dtype=torch.float64)
    norm = layer.fusion.norm
    for tensor in norm.parameters():
        nn.init.uniform_(tensor, 0.5, 2)
    composition = composition_of_conv(layer, 2, kernel_size=3)
    shapes = []
    if called == "whole":
        norm.register_forward_hook(lambda _, args, __: shapes.append(tuple(args[0].shape)))
    for training in (True, True, False, True):
        x = torch.randn(4, 3, 6, 6, dtype=torch.float64) * 3 + 1
        torch.testing.assert_close(layer.train(training)(x), composition.train(training)(x), rtol=1e-11, atol=1e-12)
    assert shapes == [(4, 24, 4, 4)] * (4 if called == "whole" else 0)
    if norm.track_running_stats:
        assert norm.num_batches_tracked == 3
        for name in ("running_mean", "running_var"):
            expected = torch.cat([getattr(other, name) for other in composition.norms])
            torch.testing.assert_close(getattr(norm, name), expected, rtol=1e-11, atol=1e-12)


def test_a_batch_norm_of_one_value_a_channel_is_refused_in_training():
    layer = DCLLinear(6, 8, norm_layer=nn.BatchNorm1d)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        layer(torch.randn(1, 6))
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        layer(torch.randn(2, 2, 2, 6))


@pytest.mark.parametrize(
    "norm_layer", [nn.LayerNorm, partial(nn.GroupNorm, 4), lambda n: nn.Sequential(nn.LayerNorm(n))]
)
def test_a_norm_layer_that_is_not_batch_norm_sees_all_responses_side_by_side(norm_layer):
    layer = DCLLinear(6, 8, norm_layer=norm_layer, dtype=torch.float64)
    x = torch.randn(10, 6, dtype=torch.float64)
    norm, layer.fusion.norm = layer.fusion.norm, None
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.5, 2)
    pre = composition_of_linear(layer).pre_activations(x)
    layer.fusion.norm = norm
    first, second = norm(torch.cat(pre, 1)).split(8, 1)
    torch.testing.assert_close(layer(x), plain_fusion([first, second], layer.eps), rtol=1e-11, atol=1e-12)


def test_a_batch_norm_that_normalises_positions_sees_all_responses_side_by_side():
    layer = DCLLinear(6, 8, norm_layer=lambda _: nn.BatchNorm1d(5), dtype=torch.float64)
    x = torch.randn(4, 5, 6, dtype=torch.float64)
    norm, layer.fusion.norm = copy.deepcopy(layer.fusion.norm), None
    pre = composition_of_linear(layer).pre_activations(x)
    layer.fusion.norm = copy.deepcopy(norm)
    first, second = norm(torch.cat(pre, 2)).split(8, 2)
    torch.testing.assert_close(layer(x), plain_fusion([first, second], layer.eps), rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(layer.fusion.norm.running_var, norm.running_var, rtol=1e-11, atol=1e-12)


def test_a_batch_norm_is_not_given_positions_for_channels():
    """As many positions as outputs, where the channels come last, or first without a batch."""
    with pytest.raises(RuntimeError, match="running_mean should contain 8 elements not 16"):
        DCLLinear(6, 8, norm_layer=nn.BatchNorm1d)(torch.randn(4, 8, 6))
    with pytest.raises(RuntimeError, match="running_mean should contain 8 elements not 16"):
        DCLConv1d(6, 8, 1, norm_layer=nn.BatchNorm1d)(torch.randn(6, 8))


@pytest.mark.parametrize("branches", [1, 2, 3])
def test_the_channels_of_the_norm_are_those_of_one_branch_behind_the_others(branches):
    layer = DCLConv2d(3, 8, 3, branches=branches, norm_layer=nn.BatchNorm2d)
    norm, x = layer.fusion.norm, torch.randn(4, 3, 6, 6)
    assert norm.num_features == branches * 8
    before = layer.responses(x).v
    for t in range(branches):
        changed = copy.deepcopy(layer)
        nn.init.constant_(changed.fusion.norm.bias[t * 8 : (t + 1) * 8].detach(), 3)
        after = changed.responses(x).v
        assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [s != t for s in range(branches)]


# Older state dicts, with a batch norm for each branch


def with_a_norm_for_each_branch(state, prefix, branches):
    """A state dict as they were before the norms of a layer became one."""
    old = {}
    for name, value in state.items():
        if not name.startswith(f"{prefix}norm."):
            old[name] = value
            continue
        parts = value.chunk(branches) if value.dim() else (value,) * branches
        for t, part in enumerate(parts):
            old[f"{prefix}norm.{t}.{name.removeprefix(f'{prefix}norm.')}"] = part.clone()
    return old


def trained_norm(layer):
    """Other values than those of the start in everything that the norm has."""
    norm = layer.fusion.norm
    with torch.no_grad():
        for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            tensor.uniform_(0.5, 2)
        norm.num_batches_tracked += 7
    return layer


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("branches", [1, 2, 3])
def test_a_state_dict_with_a_norm_for_each_branch_still_loads(branches, training):
    def make():
        layer = DCLConv2d(3, 8, 3, branches=branches, norm_layer=nn.BatchNorm2d, dtype=torch.float64)
        return nn.Sequential(nn.Identity(), layer)

    model, loaded = make(), make()
    trained_norm(model[1])
    old = with_a_norm_for_each_branch(model.state_dict(), "1.fusion.", branches)
    assert {f"1.fusion.norm.{t}.running_var" for t in range(branches)} < set(old)
    given = dict(old)
    loaded.load_state_dict(old, strict=True)
    assert old.keys() == given.keys(), "the caller's dictionary is left alone"
    torch.testing.assert_close(dict(loaded.state_dict()), dict(model.state_dict()), rtol=0, atol=0)

    # The network as it was: plain layers, and plain norms that load the old entries themselves.
    composition = composition_of_conv(loaded[1], 2, kernel_size=3)
    for t, norm in enumerate(composition.norms):
        start = f"1.fusion.norm.{t}."
        norm.load_state_dict({name.removeprefix(start): old[name] for name in old if name.startswith(start)})
    x = torch.randn(4, 3, 6, 6, dtype=torch.float64)
    loaded.train(training)
    composition.train(training)
    torch.testing.assert_close(loaded(x), composition(x), rtol=1e-11, atol=1e-12)

    steps = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (loaded, composition)]
    for _ in range(2):
        for each, optimizer in zip((loaded, composition), steps, strict=True):
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
    for name in ("weight", "bias", "running_mean", "running_var"):
        expected = torch.cat([getattr(norm, name) for norm in composition.norms])
        torch.testing.assert_close(getattr(loaded[1].fusion.norm, name), expected, rtol=1e-9, atol=1e-11)
    assert loaded[1].fusion.norm.num_batches_tracked == 7 + (3 if training else 0)
    torch.testing.assert_close(loaded.eval()(x), composition.eval()(x), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("strict", [True, False])
def test_an_old_state_dict_that_lacks_a_branch_or_fits_another_layer_is_named(strict):
    layer = DCLConv2d(3, 8, 3, branches=2, norm_layer=nn.BatchNorm2d)
    old = with_a_norm_for_each_branch(layer.state_dict(), "fusion.", 2)
    lacking = {name: value for name, value in old.items() if name != "fusion.norm.1.weight"}
    if strict:
        with pytest.raises(
            RuntimeError, match=r"(?s)Missing.*fusion\.norm\.weight.*Unexpected.*fusion\.norm\.0\.weight"
        ):
            layer.load_state_dict(lacking)
    else:
        missing, unexpected = layer.load_state_dict(lacking, strict=False)
        assert (missing, unexpected) == (["fusion.norm.weight"], ["fusion.norm.0.weight"])
    with pytest.raises(RuntimeError, match=r"size mismatch for fusion\.norm\.weight"):
        DCLConv2d(3, 9, 3, branches=2, width=8, norm_layer=nn.BatchNorm2d).load_state_dict(old, strict=strict)


def test_a_norm_of_several_modules_keeps_its_own_numbered_entries():
    """`nn.Sequential` numbers its parts, as the norms of the branches were once."""

    def make():
        return DCLLinear(6, 8, norm_layer=lambda n: nn.Sequential(nn.BatchNorm1d(n), nn.BatchNorm1d(n)))

    layer, loaded = make(), make()
    nn.init.uniform_(layer.fusion.norm[0].weight)
    loaded.load_state_dict(layer.state_dict())
    torch.testing.assert_close(dict(loaded.state_dict()), dict(layer.state_dict()), rtol=0, atol=0)


def test_one_branch_with_eps_zero_is_the_low_rank_layer():
    """To the bit, with whole numbers: of others a product is rounded as its weights lie in memory, on some CPUs."""
    low_rank = nn.Sequential(nn.Linear(12, 5, bias=False), nn.Linear(5, 20), nn.ReLU())
    layer = DCLLinear(12, 20, branches=1, width=5, eps=0)
    with torch.no_grad():
        for parameter in low_rank.parameters():
            parameter.copy_(torch.randint(-9, 10, parameter.shape))
        layer.branch.weight.copy_(low_rank[0].weight)
        layer.fusion.weight.copy_(low_rank[1].weight.t())
        layer.fusion.bias.copy_(low_rank[1].bias[None])
    x = torch.randint(-9, 10, (9, 12)).float()
    assert torch.equal(layer(x), low_rank(x))


@pytest.mark.parametrize("strategy", ["deterministic", "stochastic"])
def test_responses_show_what_happens_inside(strategy):
    widths = (2, 4, 3)
    layer = with_random_biases(
        DCLConv2d(3, 7, 3, branches=3, width=widths, strategy=strategy, branch_activation=nn.ReLU, dtype=torch.float64)
    )
    x = torch.randn(2, 3, 6, 5, dtype=torch.float64)
    composition = composition_of_conv(layer, 2, kernel_size=3)
    fuse, eps = (plain_fusion, 1e-3) if strategy == "deterministic" else (plain_pair_fusion, 1e-2)
    for training in (True, False):
        y, v, z = layer.train(training).responses(x)
        assert [branch.shape for branch in y] == [(2, width, 4, 3) for width in widths]
        assert [branch.shape for branch in v] == [(2, 7, 4, 3)] * 3
        for t, pre in enumerate(composition.pre_activations(x)):
            torch.testing.assert_close(y[t], composition.stage1[t](x).relu(), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(v[t], pre.relu(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(z, fuse(v, eps), rtol=1e-12, atol=1e-12)


def test_stage_one_is_one_linear_layer_without_bias_unless_it_has_an_activation():
    assert DCLLinear(8, 32).branch.weight.shape == (16, 8)
    assert DCLLinear(8, 32).branch.bias is None
    assert DCLConv2d(8, 32, 3, branches=3).branch.weight.shape == (24, 8, 3, 3)
    assert DCLConv2d(8, 32, 3, branches=3).branch.bias is None
    assert DCLLinear(8, 32, branch_activation=nn.ReLU).branch.bias.shape == (16,)
    assert DCLLinear(8, 32, branch_activation=nn.ReLU, bias=False).branch.bias is None
    assert DCLLinear(8, 32, bias=False).fusion.bias is None


# Widths


@pytest.mark.parametrize(
    ("out_channels", "arguments", "expected"),
    [
        (512, {}, (128, 128)),
        (500, {"ratio": 1 / 5, "round_to": 1}, (100, 100)),
        (500, {"ratio": 1 / 4}, (128, 128)),
        (100, {"ratio": 0.25}, (24, 24)),
        (100, {"ratio": 0.28}, (32, 32)),
        (10, {"ratio": 0.25}, (8, 8)),
        (4, {"ratio": 0.25}, (4, 4)),
        (1, {}, (1, 1)),
        (10, {"ratio": 1.0}, (8, 8)),
        (12, {"ratio": 1}, (12, 12)),
        (64, {"ratio": 0.01}, (8, 8)),
        (64, {"ratio": 0.01, "round_to": 1}, (1, 1)),
        (64, {"ratio": 0.5, "round_to": 100}, (64, 64)),
        (64, {"width": 13}, (13, 13)),
        (64, {"width": 64}, (64, 64)),
        (64, {"width": [13, 7]}, (13, 7)),
        (64, {"width": (13, 7), "ratio": 0.5, "round_to": 32}, (13, 7)),
        (64, {"branches": 3, "width": (1, 2, 3)}, (1, 2, 3)),
        (64, {"branches": 8}, (16,) * 8),
        (64, {"branches": 1}, (16,)),
    ],
)
def test_the_rules_of_width_and_ratio(out_channels, arguments, expected):
    assert branch_widths(out_channels, **arguments) == expected
    assert DCLLinear(3, out_channels, **arguments).widths == expected
    layer = DCLConv2d(3, out_channels, 1, **arguments)
    assert layer.widths == expected
    assert layer.branch.out_channels == sum(expected)


@settings(max_examples=200)
@given(
    out_channels=st.integers(1, 5000),
    branches=st.integers(1, 8),
    ratio=st.floats(0, 1, exclude_min=True),
    round_to=st.integers(1, 256),
)
def test_a_ratio_gives_a_multiple_close_to_it_and_never_more_than_the_output(out_channels, branches, ratio, round_to):
    widths = branch_widths(out_channels, branches=branches, ratio=ratio, round_to=round_to)
    (M,) = set(widths)
    assert len(widths) == branches
    assert 1 <= M <= out_channels
    assert M % round_to == 0 or out_channels == M
    if M not in (round_to, out_channels):
        assert abs(M - ratio * out_channels) <= round_to / 2 + 1e-6


# Wrong arguments

WRONG = [
    ({"branches": 0}, ValueError, "branches must be from 1 to 8, got 0"),
    ({"branches": 9}, ValueError, "branches must be from 1 to 8, got 9"),
    ({"branches": -2}, ValueError, "got -2"),
    ({"branches": 2.0}, TypeError, "branches must be a whole number, got 2.0"),
    ({"branches": "2"}, TypeError, "'2'"),
    ({"branches": True}, TypeError, "True"),
    ({"width": 0}, ValueError, "width 0 .* from 1 to 32"),
    ({"width": 33}, ValueError, "width 33 does not fit a layer of 32 output channels; choose from 1 to 32"),
    ({"width": (4, 40)}, ValueError, "width 40"),
    ({"width": (4, 4, 4)}, ValueError, "names 3 branches, but branches = 2"),
    ({"width": ()}, ValueError, "names 0 branches"),
    ({"width": 2.5}, TypeError, "2.5"),
    ({"width": (4, 2.5)}, TypeError, "2.5"),
    ({"width": "8"}, TypeError, "'8'"),
    ({"width": True}, TypeError, "True"),
    ({"ratio": 0}, ValueError, "ratio must be above 0 and at most 1, got 0"),
    ({"ratio": 1.5}, ValueError, "got 1.5"),
    ({"ratio": -0.25}, ValueError, "got -0.25"),
    ({"ratio": math.nan}, ValueError, "got nan"),
    ({"ratio": "half"}, TypeError, "'half'"),
    ({"ratio": None}, TypeError, "None"),
    ({"round_to": 0}, ValueError, "round_to must be a whole number of at least 1, got 0"),
    ({"round_to": 2.5}, ValueError, "got 2.5"),
    ({"eps": -1.0}, ValueError, "-1.0"),
    ({"eps": math.nan}, ValueError, "nan"),
    ({"eps": 0}, ValueError, "eps = 0"),
    ({"eps": "0.1"}, TypeError, "'0.1'"),
    ({"strategy": "random"}, ValueError, '"deterministic" or "stochastic", got \'random\''),
    ({"strategy": None}, ValueError, "None"),
    ({"strategy": "stochastic"}, ValueError, "three or more branches, got branches = 2"),
    ({"strategy": "stochastic", "branches": 1}, ValueError, "branches = 1"),
    ({"strategy": "stochastic", "branches": 3, "eps": 0}, ValueError, "eps = 0"),
]


@pytest.mark.parametrize("make", [lambda **a: DCLLinear(16, 32, **a), lambda **a: DCLConv2d(16, 32, 3, **a)])
@pytest.mark.parametrize(("arguments", "error", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_argument_is_named(arguments, error, message, make):
    with pytest.raises(error, match=message):
        make(**arguments)


@pytest.mark.parametrize("value", [0, -3, 2.5, "4", None, True])
def test_wrong_channels_are_named(value):
    for name, make in [
        ("in_features", lambda: DCLLinear(value, 4)),
        ("out_features", lambda: DCLLinear(4, value)),
        ("in_channels", lambda: DCLConv1d(value, 4, 3)),
        ("out_channels", lambda: DCLConv3d(4, value, 3)),
    ]:
        with pytest.raises(ValueError, match=f"{name} must be .* got {re.escape(repr(value))}"):
            make()


@pytest.mark.parametrize("layer", [DCLConv1d, DCLConv2d, DCLConv3d])
def test_groups_are_refused_with_the_reason(layer):
    with pytest.raises(ValueError, match=r"groups = 4: a branch sees every input channel.*groups=1"):
        layer(8, 16, 3, groups=4)
    layer(8, 16, 3, groups=1)
    with pytest.raises(ValueError, match="groups = 8"):
        layer.like(PLAIN[layer._spatial](8, 8, 3, groups=8))


def test_wrong_geometry_is_refused_as_the_plain_layer_refuses_it():
    for arguments in ({"padding": "full"}, {"padding_mode": "wrap"}, {"padding": "same", "stride": 2}):
        with pytest.raises(ValueError, match=r"padding"):
            DCLConv2d(4, 8, 3, **arguments)


# Standing in for a plain layer


def test_like_carries_everything_of_a_linear_layer():
    plain = nn.Linear(6, 12, bias=False, dtype=torch.float64).eval()
    layer = DCLLinear.like(plain, branches=3, width=2, strategy="stochastic")
    assert (layer.in_features, layer.out_features, layer.widths) == (6, 12, (2, 2, 2))
    assert layer.strategy == "stochastic"
    assert layer.fusion.bias is None
    assert layer.fusion.weight.dtype == layer.branch.weight.dtype == torch.float64
    assert not layer.training
    assert not layer.fusion.training
    assert DCLLinear.like(nn.Linear(6, 12)).training
    assert DCLLinear.like(nn.Linear(6, 12)).fusion.bias is not None
    assert DCLLinear.like(nn.Linear(6, 12), device="meta").branch.weight.is_meta
    assert DCLLinear.like(nn.Linear(6, 12, device="meta")).fusion.weight.is_meta


@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_like_carries_everything_of_a_convolution(spatial):
    def each(*numbers):
        return numbers[:spatial]

    plain = PLAIN[spatial](
        4, 12, each(3, 2, 1), stride=each(2, 1, 3), padding=each(1, 0, 2), dilation=each(1, 2, 1), bias=False,
        padding_mode="circular", dtype=torch.bfloat16, device="meta",
    ).eval()  # fmt: skip
    layer = DCL[spatial].like(plain, branches=3, norm_layer=NORM[spatial])
    for name in ("kernel_size", "stride", "padding", "dilation", "padding_mode", "groups", "in_channels"):
        assert getattr(layer.branch, name) == getattr(plain, name), name
    assert (layer.in_channels, layer.out_channels) == (4, 12)
    assert layer.fusion.bias is None
    for tensor in (*layer.parameters(), *layer.buffers()):
        assert tensor.is_meta
        assert tensor.dtype in (torch.bfloat16, torch.int64)
    assert not any(module.training for module in layer.modules())
    same = DCL[spatial].like(PLAIN[spatial](4, 12, 3, padding="same"))
    x = torch.randn(2, 4, *(7,) * spatial)
    assert same(x).shape == (2, 12, *(7,) * spatial)
    assert same.fusion.bias is not None


@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_positional_arguments_are_those_of_the_plain_layer(spatial):
    arguments = (3, 2, 1, 2, 1, False, "replicate", "cpu", torch.float64)
    layer = DCL[spatial](4, 8, *arguments)
    plain = PLAIN[spatial](4, 8, *arguments)
    x = torch.randn(2, 4, *(9,) * spatial, dtype=torch.float64)
    assert layer(x).shape == plain(x).shape
    assert layer(x).dtype == torch.float64
    assert layer.branch.padding_mode == "replicate"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("spatial", [1, 2, 3])
def test_the_attributes_of_a_convolution_are_those_of_the_plain_layer(spatial, bias):
    arguments = {"stride": 2, "padding": 1, "dilation": 3, "padding_mode": "reflect", "bias": bias}
    plain = PLAIN[spatial](4, 12, 3, **arguments)
    layer = DCL[spatial](4, 12, 3, **arguments, width=5)
    for name in plain.__constants__:
        assert getattr(layer, name) == getattr(plain, name), name
    for name in ("kernel_size", "transposed", "output_padding"):
        assert getattr(layer, name) == getattr(plain, name), name
    assert layer.weight is layer.branch.weight
    assert layer.weight.shape[1:] == plain.weight.shape[1:]
    assert (layer.bias is None) == (plain.bias is None)
    with pytest.raises(AttributeError, match="stride"):
        layer.stride = 1


@pytest.mark.parametrize("bias", [True, False])
def test_the_attributes_of_a_linear_layer_are_those_of_the_plain_layer(bias):
    layer, plain = DCLLinear(4, 12, bias=bias, branches=3), nn.Linear(4, 12, bias=bias)
    for name in plain.__constants__:
        assert getattr(layer, name) == getattr(plain, name), name
    assert layer.weight is layer.branch.weight
    assert layer.bias is layer.fusion.bias
    assert (layer.bias is None) == (plain.bias is None)
    assert not hasattr(layer, "kernel_size")


def test_weight_and_bias_are_no_parameters_beside_those_of_the_stages():
    layer = DCLLinear(4, 8)
    names = ["fusion.weight", "fusion.bias", "branch.weight"]
    assert [name for name, _ in layer.named_parameters(remove_duplicate=False)] == names
    assert not {"weight", "bias"} & layer.state_dict().keys()
    assert copy.deepcopy(layer).weight is not layer.weight


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda layer, name: prune.l1_unstructured(layer, name, 0.5), ValueError, "prune or parametrize those instead"),
        (lambda layer, name: setattr(layer, name, nn.Parameter(torch.ones(8))), ValueError, "branch.weight"),
        (lambda layer, name: parametrize.register_parametrization(layer, name, nn.ReLU()), ValueError, "parameter"),
        (lambda layer, name: setattr(layer, name, None), AttributeError, "no setter"),
    ],
    ids=["prune", "assign", "parametrize", "remove"],
)
def test_what_would_replace_weight_or_bias_is_refused_and_leaves_the_layer_alone(name, change, error, message):
    layer = DCLLinear(4, 8)
    before = {n: id(p) for n, p in layer.named_parameters()}
    with pytest.raises(error, match=message):
        change(layer, name)
    assert {n: id(p) for n, p in layer.named_parameters()} == before
    assert not layer._forward_pre_hooks


def test_the_stages_can_be_pruned():
    layer = DCLLinear(16, 8)
    prune.l1_unstructured(layer.branch, "weight", 0.5)
    assert (layer.weight == 0).float().mean() == 0.5
    layer.fusion.bias.detach().zero_()
    assert torch.equal(layer(torch.zeros(1, 16)), torch.full((1, 8), 0.1))


class Casting(nn.Module):
    """What forwards in the wild read of their layers."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 32)
        self.head = nn.Linear(32, 2)

    def forward(self, x):
        conv, fc = self.conv, self.fc
        x = x.to(conv.weight.dtype).to(conv.weight.device)
        assert x.shape[1] == conv.in_channels == conv.weight.shape[1] == conv.weight.size(1)
        x = torch.relu(conv(x))[..., :: conv.stride[0], conv.kernel_size[1] // 2 :]
        x = x.mean((2, 3)).view(-1, fc.in_features)
        x = torch.relu(fc(x if fc.bias is not None else -x)).view(-1, fc.out_features)
        return self.head(x)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_forward_that_reads_attributes_of_its_layers_plans_converts_and_runs(compiled):
    model, x = Casting().eval(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    plan = dcl.plan(model, example=x, branches=1, width=16, eps=0)
    dcl.convert_(model, plan.only("conv", "fc"), init="random")
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model

    y = model.conv(x.float())[..., 1:]
    expected = model.head(model.fc(y.mean((2, 3))))
    torch.testing.assert_close(run(x), expected)
    run(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_positional_arguments_are_those_of_the_plain_linear_layer():
    for arguments in ((), (False,), (True, "meta"), (False, "cpu", torch.float64)):
        layer, plain = DCLLinear(64, 32, *arguments), nn.Linear(64, 32, *arguments)
        assert (layer.bias is None) == (plain.bias is None)
        assert (layer.weight.device, layer.weight.dtype) == (plain.weight.device, plain.weight.dtype)
        assert (layer.fusion.weight.device, layer.fusion.weight.dtype) == (plain.weight.device, plain.weight.dtype)
    first = list(inspect.signature(nn.Linear).parameters)
    assert list(inspect.signature(DCLLinear).parameters)[: len(first)] == first
    with pytest.raises(TypeError, match="positional"):
        DCLLinear(64, 32, True, "cpu", torch.float32, 3)


@pytest.mark.parametrize("bias", [3, "no", 0.5])
def test_a_number_of_branches_in_the_place_of_bias_is_refused(bias):
    for make in (lambda: DCLLinear(64, 32, bias), lambda: DCLConv2d(3, 32, 3, 1, 0, 1, 1, bias)):
        with pytest.raises(TypeError, match=rf"bias must be True or False, got {bias!r}.*branches=3"):
            make()


# Keys of the state dict


def keys(layer):
    return sorted(layer.state_dict())


def test_the_keys_of_the_state_dict_are_those_documented():
    eps = "fusion._extra_state"
    assert keys(DCLLinear(4, 8)) == ["branch.weight", eps, "fusion.bias", "fusion.weight"]
    assert keys(DCLConv2d(4, 8, 3, bias=False)) == ["branch.weight", eps, "fusion.weight"]
    stochastic = DCLConv1d(4, 8, 3, branches=3, strategy="stochastic")
    assert keys(stochastic) == ["branch.weight", eps, "fusion.active", "fusion.bias", "fusion.key", "fusion.weight"]
    full = DCLConv3d(4, 8, 3, norm_layer=nn.BatchNorm3d, branch_activation=nn.PReLU)
    norm = ["bias", "num_batches_tracked", "running_mean", "running_var", "weight"]
    assert keys(full) == sorted(
        ["branch.weight", "branch.bias", "branch_activation.weight", "fusion.weight", "fusion.bias", eps]
        + [f"fusion.norm.{name}" for name in norm]
    )
    documented = set(re.findall(r"^``([a-z_.*]+)``", layers_module.__doc__, re.MULTILINE))
    found = {re.sub(r"(fusion\.norm\.|branch_activation\.).*", r"\1*", key) for key in keys(full)}
    assert found | set(keys(stochastic)) == documented


def test_the_shapes_of_the_state_dict_are_those_documented():
    norm, widths = nn.BatchNorm2d, (2, 3, 4)
    layer = DCLConv2d(
        5, 9, (3, 2), branches=3, width=widths, strategy="stochastic", branch_activation=nn.ReLU, norm_layer=norm
    )
    shapes = {key: tuple(tensor.shape) for key, tensor in layer.state_dict().items()}
    assert shapes == {
        "branch.weight": (9, 5, 3, 2),
        "branch.bias": (9,),
        "fusion.weight": (9, 9),
        "fusion.bias": (3, 9),
        "fusion.key": (3,),
        "fusion.active": (2,),
        "fusion._extra_state": (),
        **{f"fusion.norm.{name}": (3 * 9,) for name in ("weight", "bias", "running_mean", "running_var")},
        "fusion.norm.num_batches_tracked": (),
    }


def test_biases_and_only_biases_end_in_bias():
    """A bias is what still moves the output where the input is zero."""
    layer = DCLConv2d(4, 8, 3, norm_layer=nn.BatchNorm2d, branch_activation=nn.PReLU)
    named = {name for name, _ in layer.named_parameters() if name.endswith("bias")}
    assert named == {"branch.bias", "fusion.bias", "fusion.norm.bias"}
    layer = DCLLinear(4, 8, branches=3)
    nn.init.ones_(layer.fusion.bias)
    at_zero = torch.autograd.grad(layer.responses(torch.zeros(1, 4)).z.sum(), list(layer.parameters()))
    for (name, _), gradient in zip(layer.named_parameters(), at_zero, strict=True):
        assert gradient.any().item() == name.endswith("bias"), name


def test_the_rows_of_branch_t_belong_to_branch_t():
    layer = DCLLinear(6, 10, branches=3, width=(2, 3, 4))
    x = torch.randn(5, 6)
    before = layer.responses(x)
    for t, (start, end) in enumerate(starts_of(layer.widths)):
        for name in ("branch", "fusion"):
            changed = copy.deepcopy(layer)
            with torch.no_grad():
                getattr(changed, name).weight[start:end] += 1
            after = changed.responses(x)
            assert [not torch.equal(a, b) for a, b in zip(after.v, before.v, strict=True)] == [i == t for i in range(3)]


@pytest.mark.parametrize("strategy", ["deterministic", "stochastic"])
def test_a_state_dict_goes_round_without_pickle(strategy):
    def make():
        return DCLConv2d(3, 8, 3, branches=3, strategy=strategy, norm_layer=nn.BatchNorm2d, branch_activation=nn.PReLU)

    layer = with_random_biases(make())
    x = torch.randn(4, 3, 6, 6)
    seed_branches_(layer, 3)
    advance_branches_(layer, 17)
    layer(x)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    other = make()
    advance_branches_(other)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other(x), layer(x))
    assert torch.equal(other.eval()(x), layer.eval()(x))


@pytest.mark.parametrize("strategy", ["deterministic", "stochastic"])
def test_a_deep_copy_is_equal_and_independent(strategy):
    layer = DCLConv2d(3, 8, 3, branches=3, strategy=strategy)
    advance_branches_(layer, 4)
    twin = copy.deepcopy(layer)
    x = torch.randn(2, 3, 5, 5)
    before = layer(x)
    assert torch.equal(twin(x), before)
    with torch.no_grad():
        twin.fusion.weight.add_(1)
    advance_branches_(twin, 5)
    assert torch.equal(layer(x), before)
    assert not torch.equal(twin(x), before)


# Types, devices, memory formats


def test_construction_on_the_meta_device_allocates_nothing_and_can_be_filled_later():
    with torch.device("meta"):
        within = DCLConv2d(
            4, 8, 3, branches=3, strategy="stochastic", norm_layer=nn.BatchNorm2d, branch_activation=nn.PReLU
        )
    named = DCLConv2d(
        4, 8, 3, branches=3, strategy="stochastic", norm_layer=nn.BatchNorm2d, branch_activation=nn.PReLU, device="meta"
    )
    for layer in (within, named):
        assert all(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers()))
        layer.to_empty(device="cpu")
        for tensor in layer.state_dict().values():
            tensor.fill_(77)
        layer.reset_parameters()
        advance_branches_(layer, 0)
        fresh = DCLConv2d(
            4, 8, 3, branches=3, strategy="stochastic", norm_layer=nn.BatchNorm2d, branch_activation=nn.PReLU
        )
        advance_branches_(fresh, 0)
        for (name, mine), expected in zip(layer.state_dict().items(), fresh.state_dict().values(), strict=True):
            if name in ("branch.weight", "fusion.weight"):
                assert mine.std() == pytest.approx(expected.std().item(), rel=0.2)
            else:
                assert torch.equal(mine, expected), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("strategy", ["deterministic", "stochastic"])
def test_a_layer_of_another_type(dtype, strategy):
    layer = DCLConv2d(4, 16, 3, branches=3, strategy=strategy, branch_activation=nn.PReLU, dtype=dtype)
    advance_branches_(layer, 1)
    assert {p.dtype for p in layer.parameters()} == {dtype}
    x = torch.randn(2, 4, 6, 6).to(dtype)
    exact = copy.deepcopy(layer).double()
    for training in (True, False):
        z = layer.train(training)(x)
        assert z.dtype == dtype
        rounding = torch.finfo(dtype).eps
        torch.testing.assert_close(z.double(), exact.train(training)(x.double()), rtol=8 * rounding, atol=4 * rounding)
        z.sum().backward()
        assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in layer.parameters())
    for cast in (DCLLinear(4, 8).to(dtype), DCLLinear(4, 8, norm_layer=nn.BatchNorm1d, dtype=dtype)):
        assert {p.dtype for p in cast.parameters()} == {dtype}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"branches": 2},
        {"branches": 3, "width": (2, 4, 8)},
        {"branches": 2, "norm_layer": True},
        {"branches": 3, "strategy": "stochastic"},
        {"branches": 3, "strategy": "stochastic", "width": (2, 4, 8)},
        {"branches": 3, "strategy": "stochastic", "norm_layer": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("spatial", [2, 3])
def test_channels_last_is_kept(spatial, options, training):
    options = {**options, **({"norm_layer": NORM[spatial]} if "norm_layer" in options else {})}
    layer = DCL[spatial](8, 16, 3, padding=1, **options).train(training)
    advance_branches_(layer, 0)
    x = torch.randn(2, 8, 5, 6, 4)[(..., *(0,) * (3 - spatial))]
    last = x.contiguous(memory_format=CHANNELS_LAST[spatial]).requires_grad_()
    assert layer(x).is_contiguous()
    for module in (layer, copy.deepcopy(layer).to(memory_format=CHANNELS_LAST[spatial])):
        z = module(last)
        assert z.is_contiguous(memory_format=CHANNELS_LAST[spatial])
        (gradient,) = torch.autograd.grad(z.sum(), last)
        assert gradient.is_contiguous(memory_format=CHANNELS_LAST[spatial])
        torch.testing.assert_close(z, copy.deepcopy(module)(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spatial", [1, 2, 3])
@pytest.mark.parametrize("strategy", ["deterministic", "stochastic"])
def test_an_input_without_batch_is_a_batch_of_one(spatial, strategy):
    layer = DCL[spatial](3, 8, 3, branches=3, strategy=strategy)
    advance_branches_(layer, 2)
    x = torch.randn(3, *(5,) * spatial)
    for training in (True, False):
        torch.testing.assert_close(layer.train(training)(x), layer(x[None])[0], rtol=1e-6, atol=1e-7)


def test_an_empty_batch_gives_an_empty_output():
    assert DCLLinear(4, 8)(torch.zeros(0, 4)).shape == (0, 8)
    assert DCLConv2d(4, 8, 3)(torch.zeros(0, 4, 5, 5)).shape == (0, 8, 3, 3)


# Initialisation


def variance_ratio(make, plain, x, seeds=6):
    """The variance of the layer's output over that of the ReLU layer it replaces, over a few initialisations."""
    mine = others = 0.0
    with torch.no_grad():
        for seed in range(seeds):
            torch.manual_seed(seed)
            layer = make()
            seed_branches_(layer, seed)
            advance_branches_(layer, seed)
            mine += layer(x).var().item()
            others += plain()(x).var().item()
    return mine / others


def linear_ratio(**arguments):
    return variance_ratio(
        lambda: DCLLinear(256, 256, **arguments),
        lambda: nn.Sequential(nn.Linear(256, 256), nn.ReLU()),
        torch.randn(400, 256),
    )


def conv_ratio(**arguments):
    return variance_ratio(
        lambda: DCLConv2d(64, 128, 3, **arguments), lambda: nn.Sequential(nn.Conv2d(64, 128, 3), nn.ReLU()),
        torch.randn(8, 64, 7, 7),
    )  # fmt: skip


def normalised_ratio(**arguments):
    return variance_ratio(
        lambda: DCLConv2d(64, 128, 3, norm_layer=nn.BatchNorm2d, **arguments),
        lambda: nn.Sequential(nn.Conv2d(64, 128, 3), nn.BatchNorm2d(128), nn.ReLU()),
        torch.randn(8, 64, 7, 7),
    )


MATCHED = [
    *({"branches": T} for T in (1, 2, 3)),
    *({"branches": T, "strategy": "stochastic"} for T in range(3, 9)),
]


@pytest.mark.parametrize("ratio", [linear_ratio, conv_ratio, normalised_ratio])
@pytest.mark.parametrize("arguments", MATCHED, ids=str)
def test_a_new_layer_has_the_variance_of_the_relu_layer_it_replaces(arguments, ratio):
    assert ratio(**arguments) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.PReLU])
@pytest.mark.parametrize("arguments", [MATCHED[0], MATCHED[1], MATCHED[2], MATCHED[3], MATCHED[-1]], ids=str)
def test_the_variance_is_matched_with_an_activation_in_stage_one(arguments, activation):
    assert linear_ratio(**arguments, branch_activation=activation) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    "arguments", [{"eps": 1e-4}, {"eps": 0.5}, {"eps": 1e-4, "branches": 3}, {"width": (40, 90)}], ids=str
)
def test_the_variance_is_matched_for_another_eps_and_width(arguments):
    assert linear_ratio(**arguments) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(("T", "documented"), [(4, 0.66), (5, 0.45), (6, 0.30)])
def test_beyond_three_branches_the_output_varies_as_documented(T, documented):
    assert f"{documented:.2f}" in response_spread.__doc__
    assert linear_ratio(branches=T) == pytest.approx(documented, rel=0.1)
    assert normalised_ratio(branches=T) == pytest.approx(documented, rel=0.1)


@pytest.mark.parametrize(
    "arguments", [{}, {"branches": 3}, {"branches": 3, "strategy": "stochastic"}, {"norm": True}], ids=str
)
def test_responses_start_with_a_mean_of_half_their_deviation(arguments):
    norm = nn.BatchNorm1d if arguments.pop("norm", False) else None
    torch.manual_seed(0)
    layer = DCLLinear(256, 256, norm_layer=norm, **arguments)
    pre = torch.stack(layer.fusion.respond(layer.branch(torch.randn(2000, 256))))
    assert (pre.mean() / pre.std()).item() == pytest.approx(0.5, abs=0.03)


def test_other_biases_start_at_zero():
    layer = DCLLinear(8, 16, branch_activation=nn.ReLU)
    assert not layer.branch.bias.any()
    assert not DCLLinear(8, 16, branches=1).fusion.bias.any()
    assert not SummedLinear(8, 16, branches=2).fusion.bias.any()


@pytest.mark.parametrize("arguments", [{"bias": False}, {"norm_layer": partial(nn.BatchNorm1d, affine=False)}], ids=str)
def test_without_a_bias_the_responses_do_not_lean_and_the_variance_is_matched_where_it_can_be(arguments):
    torch.manual_seed(0)
    layer = DCLLinear(256, 256, **arguments)
    pre = torch.stack(layer.fusion.respond(layer.branch(torch.randn(2000, 256))))
    assert abs((pre.mean() / pre.std()).item()) < 0.03
    if "bias" in arguments:
        assert linear_ratio(**arguments) == pytest.approx(1, abs=0.1)


def test_initialisation_follows_the_random_seed():
    torch.manual_seed(5)
    first = DCLConv2d(3, 8, 3, branches=3).state_dict()
    torch.manual_seed(5)
    second = DCLConv2d(3, 8, 3, branches=3).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


# torch's transforms


def losses_and_gradients(module, x):
    z = module(x)
    gradients = torch.autograd.grad(z.square().sum(), list(module.parameters()))
    return z, gradients


COMPILED = [
    pytest.param(lambda: DCLLinear(8, 16), (5, 8), id="linear"),
    pytest.param(lambda: DCLConv1d(4, 16, 3, branches=3, padding="same"), (2, 4, 6), id="conv1d"),
    pytest.param(lambda: DCLConv2d(4, 16, 3, padding=1, padding_mode="reflect"), (2, 4, 6, 6), id="conv2d"),
    pytest.param(lambda: DCLConv3d(4, 16, 3, branch_activation=nn.ReLU), (2, 4, 4, 5, 3), id="conv3d"),
    pytest.param(lambda: DCLConv2d(4, 16, 3, branches=3, strategy="stochastic"), (2, 4, 6, 6), id="stochastic"),
    pytest.param(
        lambda: DCLConv2d(4, 16, 3, branches=3, strategy="stochastic", norm_layer=nn.BatchNorm2d), (2, 4, 6, 6),
        id="stochastic with norm",
    ),
]  # fmt: skip


def assert_compiled_equals_eager(layer, x, backend):
    torch._dynamo.reset()
    advance_branches_(layer, 0)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend=backend)
    z, gradients = losses_and_gradients(layer, x)
    other_z, other_gradients = losses_and_gradients(compiled, x)
    torch.testing.assert_close(other_z, z, rtol=1e-5, atol=1e-6)
    for a, b in zip(other_gradients, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("make", "shape"), COMPILED)
def test_compile_without_a_graph_break(make, shape):
    assert_compiled_equals_eager(make(), torch.randn(shape), "aot_eager")


@pytest.mark.parametrize(
    ("make", "shape", "backend"),
    [
        pytest.param(lambda **own: DCLLinear(8, 16, **own), (5, 8), "aot_eager", id="linear"),
        pytest.param(
            lambda **own: DCLLinear(8, 16, **own), (5, 8), "inductor", id="linear, machine code", marks=pytest.mark.slow
        ),
        pytest.param(lambda **own: DCLConv2d(4, 16, 3, **own), (2, 4, 6, 6), "aot_eager", id="conv2d"),
    ],
)
def test_compile_layers_that_differ_in_epsilon_without_a_graph_break(make, shape, backend):
    """A number that differs when the same code is compiled again becomes a symbol to the compiler."""
    torch._dynamo.reset()
    x = torch.randn(shape)
    for own in ({"eps": 0.01}, {"eps": 0.02}, {"eps": 0.5}, {"branches": 3}, {"branches": 1, "eps": 0}):
        layer = make(**own)
        compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend=backend)
        for found, expected in zip(*(losses_and_gradients(one, x) for one in (compiled, layer)), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_compile_in_eval_without_a_graph_break():
    layer = DCLConv2d(4, 16, 3, branches=3, strategy="stochastic").eval()
    assert_compiled_equals_eager(layer, torch.randn(2, 4, 6, 6), "aot_eager")


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compile_to_machine_code():
    assert_compiled_equals_eager(DCLLinear(16, 32, branches=3, strategy="stochastic"), torch.randn(8, 16), "inductor")


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"branches": 1}, {"branches": 3, "strategy": "stochastic"}, {"branch_activation": nn.ReLU}, {"bias": False}],
)
def test_a_jagged_tensor_gives_what_each_of_its_sequences_gives(arguments, backend):
    layer = DCLLinear(5, 8, width=2, **arguments)
    dcl.advance_branches_(layer, 0)
    sequences = [torch.randn(n, 5) for n in (3, 1, 7)]
    jagged = torch.nested.nested_tensor(sequences, layout=torch.jagged, requires_grad=True)
    alone = [sequence.clone().requires_grad_() for sequence in sequences]
    z = (torch.compile(layer, backend=backend, dynamic=True) if backend else layer)(jagged)
    weight = jagged.detach() @ torch.ones(5, 8)
    (z * weight).values().sum().backward()
    mine = {name: p.grad for name, p in layer.named_parameters()}
    layer.zero_grad()
    for x, each, gradient in zip(alone, z.unbind(), jagged.grad.unbind(), strict=True):
        expected = layer(x)
        (expected * x.detach().sum(1, keepdim=True)).sum().backward()
        torch.testing.assert_close(each, expected)
        torch.testing.assert_close(gradient, x.grad)
    torch.testing.assert_close(mine, {name: p.grad for name, p in layer.named_parameters()})


@pytest.mark.parametrize("arguments", [{"norm_layer": nn.BatchNorm1d}, {"branch_activation": nn.PReLU}])
def test_the_device_of_a_layer_goes_before_the_default_device(arguments):
    with torch.device("meta"):
        layer = DCLLinear(5, 8, width=2, device="cpu", dtype=torch.float64, **arguments)
        assert {tensor.device.type for tensor in layer.state_dict().values()} == {"cpu"}
    assert {tensor.dtype for tensor in layer.parameters()} == {torch.float64}
    assert layer(torch.randn(3, 5, dtype=torch.float64)).isfinite().all()
    abroad = DCLLinear(5, 8, width=2, device="meta", **arguments)
    assert {tensor.device.type for tensor in (*abroad.parameters(), *abroad.buffers())} == {"meta"}


def test_a_nested_tensor_that_a_layer_cannot_take_is_refused_with_the_remedy():
    strided = torch.nested.nested_tensor([torch.randn(3, 5), torch.randn(2, 5)])
    with pytest.raises(TypeError, match=r"a DCLLinear does not take this nested tensor; .*layout=torch\.jagged"):
        DCLLinear(5, 8, width=2)(strided)
    jagged = torch.nested.nested_tensor([torch.randn(3, 5), torch.randn(2, 5)], layout=torch.jagged)
    with pytest.raises(TypeError, match=r"a DCLConv1d does not take this nested tensor; .*to_padded_tensor"):
        DCLConv1d(5, 8, 1, width=2)(jagged)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: DCLLinear(8, 16, branches=3), (5, 8)),
        (lambda: DCLLinear(8, 16, branches=4, strategy="stochastic"), (5, 8)),
        (lambda: DCLConv2d(3, 16, 3, branches=2, branch_activation=nn.ReLU), (2, 3, 6, 6)),
        (lambda: DCLConv2d(3, 16, 3, branches=3, strategy="stochastic"), (2, 3, 6, 6)),
        (lambda: DCLConv2d(3, 16, 3, branches=3, width=(2, 3, 4), strategy="stochastic"), (2, 3, 6, 6)),
        (lambda: DCLConv3d(3, 16, 3, branches=3, strategy="stochastic"), (2, 3, 4, 5, 4)),
    ],
)
def test_vmap_over_a_stack_of_layers(make, shape, training):
    """Each layer of the stack draws its own pair."""
    stack = [make().train(training) for _ in range(4)]
    for seed, layer in enumerate(stack):
        seed_branches_(layer, seed)
        advance_branches_(layer, 5)
    x = torch.randn(shape)
    parameters, buffers = stack_module_state(stack)
    skeleton = make().train(training).to("meta")
    advance_branches_(skeleton)

    def loss(p, b):
        return functional_call(skeleton, (p, b), (x,)).square().sum()

    z = vmap(lambda p, b: functional_call(skeleton, (p, b), (x,)))(parameters, buffers)
    gradients = vmap(grad(loss))(parameters, buffers)
    for i, layer in enumerate(stack):
        expected_z, expected_gradients = losses_and_gradients(layer, x)
        torch.testing.assert_close(z[i], expected_z, rtol=1e-5, atol=1e-6)
        for (name, _), expected in zip(layer.named_parameters(), expected_gradients, strict=True):
            torch.testing.assert_close(gradients[name][i], expected, rtol=1e-4, atol=1e-5)


def test_gradients_of_a_layer_by_gradcheck():
    for layer, shape in [
        (DCLLinear(3, 4, branches=3, width=2, dtype=torch.float64), (2, 3)),
        (DCLConv1d(2, 3, 2, width=2, branch_activation=nn.Tanh, dtype=torch.float64), (2, 2, 4)),
    ]:
        names = [name for name, _ in layer.named_parameters()]

        def run(x, *values, layer=layer, names=names):
            return functional_call(layer, dict(zip(names, values, strict=True)), (x,))

        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(run, (x, *layer.parameters()))


# Printing


def test_a_printed_layer_shows_its_arguments():
    text = repr(DCLConv2d(3, 64, 3, branches=3, width=(8, 16, 24), strategy="stochastic", bias=False))
    for part in ("3 x (8, 16, 24) -> 64", "eps=0.01", "stochastic", "bias=False"):
        assert part in text
    assert "2 x 16 -> 64" in repr(DCLLinear(3, 64))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("spatial", "strategy"), list(product([2, 3], ["deterministic", "stochastic"])))
def test_channels_last_is_kept_on_a_gpu(spatial, strategy):
    layer = DCL[spatial](16, 32, 3, padding=1, branches=3, strategy=strategy, device="cuda")
    layer = layer.to(memory_format=CHANNELS_LAST[spatial])
    advance_branches_(layer, 0)
    x = torch.randn(2, 16, *(6,) * spatial, device="cuda").to(memory_format=CHANNELS_LAST[spatial])
    for training in (True, False):
        assert layer.train(training)(x).is_contiguous(memory_format=CHANNELS_LAST[spatial])


@pytest.mark.parametrize("arguments", [{}, {"branches": 3, "strategy": "stochastic"}, {"branches": 4}, {"branches": 1}])
@pytest.mark.parametrize("training", [True, False])
def test_a_relu_in_place_behind_a_layer_takes_no_copy(arguments, training):
    """As torchvision's AlexNet and VGG have it; on a view autograd would copy all of it several times."""
    conv = DCLConv2d(6, 8, 3, **arguments).to(memory_format=torch.channels_last)
    image = torch.randn(2, 6, 5, 7)
    cases = [
        (conv, image.to(memory_format=torch.channels_last)),
        (conv, image),
        (DCLLinear(6, 8, **arguments), torch.randn(3, 6)),
        (DCLLinear(6, 8, **arguments), torch.randn(2, 3, 6)),
        (DCLLinear(6, 8, **arguments), torch.randn(6)),
    ]
    for layer, x in cases:
        layer.train(training)
        advance_branches_(layer, 0)
        inplace, plain = torch.relu_(layer(x)), layer(x)
        assert type(inplace.grad_fn).__name__ == "ReluBackward0"
        parameters = list(layer.parameters())
        found, wanted = (torch.autograd.grad(z.square().sum(), parameters) for z in (inplace, plain))
        assert torch.equal(inplace, plain)
        assert all(map(torch.equal, found, wanted))


@pytest.mark.filterwarnings("error::torch.jit.TracerWarning", "ignore:.*torch.jit.*deprecated")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("arguments", [{}, {"branches": 3}, {"branches": 3, "strategy": "stochastic"}, {"width": 1}])
def test_a_traced_layer_takes_other_batches_and_sizes(arguments, memory_format):
    layer = DCLConv2d(6, 8, 3, **arguments).to(memory_format=memory_format).eval()
    traced = torch.jit.trace(layer, torch.randn(2, 6, 7, 7).to(memory_format=memory_format))
    x = torch.randn(5, 6, 9, 4).to(memory_format=memory_format)
    torch.testing.assert_close(traced(x), layer(x))
    linear = DCLLinear(6, 8, **arguments).eval()
    x = torch.randn(5, 6)
    torch.testing.assert_close(torch.jit.trace(linear, torch.randn(2, 6))(x), linear(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated")
@pytest.mark.parametrize("branches", [1, 2, 3, 4])
@pytest.mark.parametrize("trace_grad", [True, False])
def test_a_traced_layer_is_saved_loaded_and_differentiated(branches, trace_grad, tmp_path):
    """Also where branches are dead: the root of their response has no derivative, and their gradient is zero."""
    layer, x = DCLLinear(6, 8, branches=branches, width=3).eval(), torch.randn(5, 6, requires_grad=True)
    with torch.set_grad_enabled(trace_grad):
        torch.jit.trace(layer, torch.randn(2, 6)).save(tmp_path / "traced.pt")
    traced = torch.jit.load(tmp_path / "traced.pt")
    torch.testing.assert_close(traced(x), layer(x))
    parameters = [dict(traced.named_parameters())[name] for name, _ in layer.named_parameters()]
    found = torch.autograd.grad(traced(x).square().sum(), [x, *parameters])
    wanted = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_on_a_gpu_fuses_in_float32(dtype):
    layer = DCLConv2d(16, 32, 3, branches=3, width=(8, 8, 16), device="cuda")  # of one width v is not rounded at all
    x = torch.randn(2, 16, 8, 8, device="cuda")
    with torch.autocast("cuda", dtype=dtype):
        z = layer(x)
        pre = torch.stack(layer.fusion.respond(layer.branch(x)))
    assert z.dtype == pre.dtype == dtype
    exact = fuse_branches(pre.double())
    # Half of the last place of the type, and what a cube root by two of Newton's steps is off.
    assert ((z.double() - exact).abs() / exact).max() <= torch.finfo(dtype).eps / 2 + 2.4e-5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"norm_layer": nn.BatchNorm1d(8)}, r"norm_layer must make a module .* got a BatchNorm1d"),
        ({"branch_activation": nn.ReLU()}, r"branch_activation must make a module .* got a ReLU"),
        ({"norm_layer": "batch"}, r"norm_layer must make a module .* got a str"),
    ],
)
def test_a_module_instead_of_what_makes_one_is_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        DCLLinear(8, 8, **arguments)


@pytest.mark.parametrize("kernel_size", [0, (3, 0)])
def test_an_empty_kernel_is_refused(kernel_size):
    with pytest.raises(ValueError, match="kernel_size must be at least 1"):
        DCLConv2d(8, 8, kernel_size)


@pytest.mark.parametrize(
    ("arguments", "norm", "documented"),
    [
        ({"branches": 1}, False, 1.0),
        ({"branches": 2}, False, 1.27),
        ({"branches": 2}, True, 1.34),
        ({"branches": 2, "eps": 1.0}, False, 1.10),
        ({"branches": 3, "eps": 1.0}, False, 1.33),
        ({"branches": 3}, False, 2.33),
    ],
)
def test_the_gradient_passed_back_at_the_start_is_as_documented(arguments, norm, documented):
    def passed_back(layer):
        x = torch.randn(512, 512, requires_grad=True)
        z = layer(x)
        grad = torch.randn_like(z)
        return (torch.autograd.grad(z, x, grad)[0].norm() / grad.norm()).item()

    torch.manual_seed(3)
    norms = [nn.BatchNorm1d(512)] if norm else []
    plain = [passed_back(nn.Sequential(nn.Linear(512, 512), *norms, nn.ReLU())) for _ in range(5)]
    factory = nn.BatchNorm1d if norm else None
    ours = [passed_back(DCLLinear(512, 512, **arguments, norm_layer=factory)) for _ in range(5)]
    assert sum(ours) / sum(plain) == pytest.approx(documented, rel=0.2 if documented > 2 else 0.05)
