"""What a person expects of ``plan``: the right units, the right reasons, the right numbers."""

import contextlib
import copy
import itertools
import json
import pickle
import re
from collections import Counter, OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.halves import slow
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.utils.flop_counter import FlopCounterMode

import torch_dcl as dcl
from torch_dcl import models
from torch_dcl.convert import measure
from torch_dcl.convert.rows import Timing


def rows(plan):
    return {row.name: row for row in plan.rows}


class Block(nn.Module):
    """A residual block, with one shared and in-place ReLU as torchvision writes it."""

    def __init__(self, channels=32):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + x)


class Lambda(nn.Module):
    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.function(self, x)


def linear_plan(function, size=(32,), **modules):
    modules = modules or {"a": nn.Linear(32, 32)}
    return rows(dcl.plan(Lambda(function, head=nn.Linear(32, 4), **modules), size))


# Which layers are units


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.head(F.relu(m.a(x))),
        lambda m, x: m.head(torch.relu(m.a(x))),
        lambda m, x: m.head(m.a(x).relu_()),
        lambda m, x: m.head(m.a(x).clamp(min=0)),
        lambda m, x: m.head(m.a(x).clamp_min(0)),
        lambda m, x: m.head(F.relu(m.a(x).view(-1, 4, 8)).flatten(1)),
        lambda m, x: m.head(F.dropout(F.relu(m.a(x)), training=m.training)),
        lambda m, x: m.head(torch.cat([F.relu(h) for h in m.a(x).chunk(2, -1)], -1)),
        lambda m, x: m.head(F.relu(sum(branch(x) for branch in [m.a]))),
    ],
)
def test_a_layer_with_its_relu_is_a_unit_however_the_relu_is_written(function):
    row = linear_plan(function)["a"]
    assert (row.status, row.reason, row.selected) == ("left", "would not shrink (1,024 → 1,024 weights)", False)
    row = linear_plan(function, a=nn.Linear(64, 32), size=(64,))["a"]
    assert (row.status, row.reason, row.selected) == ("pays", "", True)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda m, x: m.head(F.gelu(m.a(x))), "GELU follows"),
        (lambda m, x: m.head(F.silu(m.a(x), inplace=True)), "SiLU follows"),
        (lambda m, x: m.head(F.relu6(m.a(x))), "ReLU6 or a clipped activation follows"),
        (lambda m, x: m.head(m.a(x) + x), "feeds a residual sum"),
        (lambda m, x: m.head(F.relu(m.a(x) + x)), "feeds a residual sum"),
        (lambda m, x: m.head(F.relu(sum([m.a(x), x]))), "feeds a residual sum"),
        (lambda m, x: m.head(F.relu(m.a(x) + 3)), "a number is added to it"),
        (lambda m, x: m.head(F.relu(1 - m.a(x))), "a number is added to it"),
        (lambda m, x: m.head(m.a(x) * x), "is multiplied with another tensor"),
        (lambda m, x: m.head(F.layer_norm(m.a(x), (32,))), "a layer norm follows"),
        (lambda m, x: m.head(m.a(x)), "another layer follows without ReLU"),
        (lambda m, x: m.head(torch.cat([m.a(x)[:, :16], x[:, :16]], 1)), "feeds a concatenation"),
        (lambda m, x: m.head(x), "not called in the run (in eval mode)"),
        (lambda m, x: m.head(F.relu(F.linear(x, m.a.weight))), "its weight is used functionally, without calling it"),
        (lambda m, x: m.head(F.relu(m.a(x)) + m.a(x)), "feeds a residual sum (in 1 of 2 calls)"),
        (lambda m, x: (m.head(F.relu(h := m.a(x))), h), "its output is also an output of the network"),
        (
            lambda m, x: m.head(F.scaled_dot_product_attention(*(m.a(x)[:, None],) * 3).flatten(1)),
            "feeds attention",
        ),
    ],
)
def test_every_other_layer_says_why_it_is_left_alone(function, reason):
    row = linear_plan(function)["a"]
    assert row.reason == reason
    assert not row.selected


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda m, y: (m.head(F.relu(y)), m.other(y)), "another layer follows without ReLU in training"),
        (lambda m, y: (m.head(F.relu(y)), y), "its output is also an output of the network in training"),
        (lambda m, y: m.head(F.relu(y + torch.randn_like(y))), "feeds a residual sum in training"),
        (lambda m, y: m.head(F.relu(y * torch.rand_like(y))), "is multiplied with another tensor in training"),
        (lambda m, y: m.head(F.relu(m.norm(y))), "another batch norm follows in training"),
        (lambda m, y: m.head(m.norm(y).relu_() if len(y) > 1 else 1 / 0), "another batch norm follows in training"),
        (lambda m, y: m.head(F.relu(F.dropout(y))), ""),
        (lambda m, y: m.head(F.dropout(y, inplace=True).relu_()), ""),
        (lambda m, y: m.head(F.relu(F.dropout1d(y[None], 0.3)[0])), ""),
        (lambda m, y: m.head(F.relu(torch.native_dropout(y, 0.5, True)[0])), ""),
        (lambda m, y: m.head(F.relu(y)).missing, ""),
    ],
)
def test_what_reads_a_layer_only_in_training_counts_too(function, reason):
    """With dropout between a layer and its ReLU, before or after is the same; a network may not run in training."""
    layers = {"a": nn.Linear(64, 32), "other": nn.Linear(32, 4), "norm": nn.BatchNorm1d(32)}
    row = linear_plan(lambda m, x: function(m, m.a(x)) if m.training else m.head(F.relu(m.a(x))), size=(64,), **layers)[
        "a"
    ]
    assert (row.reason, row.selected) == (reason, not reason)


class Auxiliary(nn.Module):
    """A second head in training, whose hidden layer has the ReLU, and perhaps the norm, of the first."""

    def __init__(self, *, normed):
        super().__init__()
        self.a, self.b = nn.Linear(64, 32), nn.Linear(64, 32)
        self.head, self.other = nn.Linear(32, 4), nn.Linear(32, 4)
        self.norm, self.relu = nn.BatchNorm1d(32) if normed else nn.Identity(), nn.ReLU()

    def forward(self, x):
        y = self.head(self.relu(self.norm(self.a(x))))
        return (y, self.other(self.relu(self.norm(self.b(x))))) if self.training else y


def test_a_relu_that_another_layer_shares_only_in_training_still_serves_it():
    model, x = Auxiliary(normed=False), torch.randn(8, 64)
    wanted = model(x)[1]
    plan = dcl.plan(model, (64,))
    assert [(row.name, row.relu, row.shares_relu) for row in plan.selected] == [("a", "relu", True)]
    dcl.convert_(model, plan, init="random")
    assert torch.equal(model(x)[1], wanted)


def test_a_batch_norm_that_another_layer_shares_only_in_training_stays():
    row = rows(dcl.plan(Auxiliary(normed=True), (64,)))["a"]
    assert (row.selected, row.reason) == (False, "its batch norm serves other layers too in training")


@dataclass
class Output:
    logits: torch.Tensor
    hidden: object = None


class Slots:
    __slots__ = ("hidden",)

    def __init__(self, hidden):
        self.hidden = hidden


class Pair(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor


class ModelOutput(OrderedDict):
    """As model libraries have it: a dictionary whose entries are attributes too."""


def cyclic(h):
    """What refers to itself lives until the garbage collector comes by."""
    cycle = [h]
    cycle.append(cycle)


LOG = []
RELU = "would not shrink (1,024 → 1,024 weights)"
OUTPUT = "its output is also an output of the network"
KEPT = "its output is kept after the call, as an attribute or by a hook"


def looked_at(look):
    """The row of a layer whose output, before its ReLU, somebody looks at; the network returns what that gives."""

    def forward(m, x):
        h = m.a(x)
        y = m.head(F.relu(h))
        return Output(y, look(m, h))

    model = Lambda(forward, a=nn.Linear(32, 32), head=nn.Linear(32, 4), log=[])
    model.register_buffer("buffer", torch.zeros(3))
    model.register_buffer("empty", None)
    row = rows(dcl.plan(model, (32,)))["a"]
    assert (model.buffer.shape, model.empty) == ((3,), None)
    return row


@pytest.mark.parametrize(
    ("wrap", "reason"),
    [
        (lambda h: h, OUTPUT),
        (lambda h: [Output(h, Output(h, (h,)))], OUTPUT),
        (lambda h: {"before": [h.view(-1)[3:]]}, OUTPUT),
        (lambda h: SimpleNamespace(hidden=h.detach()), OUTPUT),
        (Slots, OUTPUT),
        (lambda h: Pair(h, h), OUTPUT),
        (lambda h: ModelOutput(hidden=h), OUTPUT),
        (lambda h: torch.distributions.Normal(h, 1.0, validate_args=False), OUTPUT),
        (lambda h: lambda: h, OUTPUT),
        (lambda h: h.numpy(), OUTPUT),
        (F.relu, RELU),
        (lambda h: h.relu_(), RELU),
    ],
)
def test_what_is_returned_from_before_the_relu_is_an_output_in_whatever_object(wrap, reason):
    row = looked_at(lambda _, h: wrap(h))
    assert (row.status, row.reason) == ("left", reason)


@pytest.mark.parametrize(
    ("keep", "reason"),
    [
        (lambda m, h: setattr(m, "last", h), KEPT),
        (lambda m, h: setattr(m.head, "last", [{"h": h.clone()}]), KEPT),
        (lambda m, h: m.log.append(h), KEPT),
        (lambda m, h: m.log.append(h) or h, KEPT),
        (lambda m, h: setattr(m, "buffer", h), KEPT),
        (lambda m, h: setattr(m, "empty", h), KEPT),
        (lambda _, h: LOG.append(h), KEPT),
        (lambda m, h: setattr(m, "last", F.relu(h)), RELU),
        (lambda m, h: setattr(m, "last", h.relu_()), RELU),
        (lambda m, h: setattr(m, "last", h.view(-1).relu_()), RELU),
        (lambda _, h: cyclic(h), RELU),
    ],
)
def test_what_is_kept_from_before_the_relu_is_an_output_too(keep, reason):
    row = looked_at(keep)
    LOG.clear()
    assert (row.status, row.reason) == ("left", reason)


@pytest.mark.parametrize(("inplace", "reason"), [(False, KEPT), (True, RELU)])
def test_what_a_hook_takes_out_before_the_relu_is_an_output(inplace, reason):
    """Unless the ReLU works in place: then the hook has what comes out of it."""
    features = {}
    model = nn.Sequential(nn.Linear(32, 32), nn.Identity(), nn.ReLU(inplace), nn.Linear(32, 4))
    model[1].register_forward_hook(lambda _module, _x, y: features.update(before=y))
    assert rows(dcl.plan(model, (32,)))["0"].reason == reason


def test_what_a_graph_saves_is_no_output():
    """A network that needs gradients in eval holds what its batch norms have seen, and nobody looks at that."""

    def forward(m, x):
        with torch.enable_grad():
            return m.head(F.relu(m.bn(m.a(x))))

    plan = linear_plan(forward, a=nn.Linear(64, 32), bn=nn.BatchNorm1d(32), size=(64,))
    assert (plan["a"].selected, plan["a"].norm) == (True, "bn")

    def returning(m, x):
        with torch.enable_grad():
            h = m.a(x)
            return Output(m.head(F.relu(m.bn(h))), h)

    assert linear_plan(returning, a=nn.Linear(64, 32), bn=nn.BatchNorm1d(32), size=(64,))["a"].reason == OUTPUT


def test_the_last_layer_is_the_head_even_behind_a_softmax():
    plan = linear_plan(lambda m, x: m.head(F.relu(m.a(x))).softmax(-1))
    assert plan["head"].reason == "head of the network"


def test_in_a_residual_block_the_first_convolution_is_a_unit_with_its_batch_norm_and_the_second_is_not():
    plan = rows(dcl.plan(nn.Sequential(Block(), nn.Conv2d(32, 4, 1)), (32, 8, 8)))
    assert plan["0.conv1"].status == "pays"
    assert plan["0.conv1"].norm == "0.bn1"
    assert plan["0.conv2"].reason == "feeds a residual sum"


def test_max_pooling_between_a_layer_and_its_relu_commutes_and_average_pooling_does_not():
    def network(pool):
        return nn.Sequential(nn.Conv2d(32, 32, 3), pool, nn.ReLU(), nn.Flatten(), nn.Linear(32 * 9, 4))

    assert rows(dcl.plan(network(nn.MaxPool2d(2)), (32, 8, 8)))["0"].status == "pays"
    assert rows(dcl.plan(network(nn.AvgPool2d(2)), (32, 8, 8)))["0"].reason == "avg_pool2d follows, not ReLU"


def test_a_batch_norm_that_serves_two_layers_stays():
    def forward(m, x):
        return m.head(F.relu(m.bn(m.a(x))) + F.relu(m.bn(m.b(x))))

    plan = linear_plan(forward, a=nn.Linear(64, 32), b=nn.Linear(64, 32), bn=nn.BatchNorm1d(32), size=(64,))
    assert plan["a"].reason == "its batch norm serves other layers too"


def test_a_functional_batch_norm_cannot_be_taken_in():
    def forward(m, x):
        return m.head(F.relu(F.batch_norm(m.a(x), m.mean, m.var)))

    modules = {"a": nn.Linear(64, 32), "mean": nn.Buffer(torch.zeros(32)), "var": nn.Buffer(torch.ones(32))}
    assert linear_plan(forward, size=(64,), **modules)["a"].reason == "its batch norm is used functionally"


@pytest.mark.parametrize("length", [7, 32])
def test_a_batch_norm_over_the_positions_of_a_linear_layer_is_not_taken_in(length):
    """BatchNorm1d on [N, L, C] normalises L, also where L = C makes the shapes agree."""
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(length), nn.ReLU(), nn.Linear(32, 4))
    row = rows(dcl.plan(model, (length, 64)))["0"]
    assert (row.selected, row.norm) == (False, None)
    assert row.reason == "its batch norm normalises another dimension than its channels"


@pytest.mark.parametrize(
    ("layer", "norm", "shape"),
    [
        (nn.Conv1d(16, 6, 3), nn.BatchNorm1d(6), (16, 8)),
        (nn.Conv2d(16, 6, 3), nn.BatchNorm1d(6), (16, 8, 8)),
        (nn.Conv3d(16, 6, 3), nn.BatchNorm2d(6), (16, 8, 8, 8)),
        (nn.Linear(16, 6), nn.BatchNorm2d(6), (2, 6, 6, 16)),
    ],
)
def test_nor_is_one_over_the_positions_of_a_convolution_without_a_batch(layer, norm, shape):
    model = Lambda(lambda m, x: m.head(F.relu(m.bn(m.a(x)))), a=layer, bn=norm, head=nn.Linear(6, 2))
    row = rows(dcl.plan(model, example=torch.randn(shape), width=2))["a"]
    assert row.reason == "its batch norm normalises another dimension than its channels"


def test_a_batch_norm_over_the_channels_is_taken_in_whatever_the_layer():
    for layer, norm, shape in [
        (nn.Linear(16, 6), nn.BatchNorm1d(6), (3, 16)),
        (nn.Conv1d(16, 6, 3), nn.BatchNorm1d(6), (3, 16, 8)),
        (nn.Conv2d(16, 6, 3), nn.BatchNorm2d(6), (3, 16, 8, 8)),
        (nn.Conv3d(16, 6, 3), nn.SyncBatchNorm(6), (3, 16, 8, 8, 8)),
    ]:
        head = nn.Linear(6, 2)
        model = Lambda(lambda m, x: m.head(F.relu(m.bn(m.a(x))).movedim(1, -1)), a=layer, bn=norm, head=head)
        row = rows(dcl.plan(model, example=torch.randn(shape), width=2))["a"]
        assert (row.selected, row.norm) == (True, "bn")


def refused(module, size=(16, 8, 8)):
    head = nn.Conv2d(32, 2, 1)
    return rows(dcl.plan(nn.Sequential(module, nn.ReLU(), head), size))["0"]


class OwnForward(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) * 2


def test_what_cannot_be_replaced_is_refused_with_the_reason():
    conv = nn.Conv2d(16, 32, 3)
    hooked = copy.deepcopy(conv)
    hooked.register_forward_hook(lambda *_: None)
    patched, frozen = copy.deepcopy(conv), copy.deepcopy(conv)
    patched.forward = lambda x: conv(x) * 2
    del frozen.weight
    frozen.register_buffer("weight", conv.weight.detach())
    for module, reason in [
        (nn.Conv2d(16, 32, 3, groups=4), "grouped (4 groups)"),
        (OwnForward(16, 32, 3), "a OwnForward with a forward of its own"),
        (nn.utils.parametrizations.weight_norm(copy.deepcopy(conv)), "parametrized: remove the parametrization first"),
        (hooked, "carries hooks, which would be lost: remove them first"),
        (patched, "carries a replaced forward, which would be lost: remove it first"),
        (frozen, "its weight is not a parameter"),
        (nn.ConvTranspose2d(16, 32, 3), "a transposed convolution"),
        (dcl.DCLConv2d(16, 32, 3), "already a DCL layer"),
    ]:
        row = refused(module)
        assert (row.status, row.reason) == ("refused", reason)


def test_a_norm_or_a_relu_whose_forward_was_replaced_stays():
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    norm, relu = model[1].forward, model[2].forward
    model[2].forward = lambda x: relu(x) + 1
    row = rows(dcl.plan(model, (16,), width=2))["0"]
    assert (row.status, row.norm, row.relu) == ("pays", "1", None)
    model[1].forward = lambda x: norm(x) + 1
    assert "batch norm" in rows(dcl.plan(model, (16,), width=2))["0"].reason


def test_a_plain_subclass_without_a_forward_of_its_own_is_a_unit():
    class Named(nn.Conv2d):
        pass

    assert refused(Named(16, 32, 3)).status == "pays"


def test_tied_weights_are_refused():
    a, b = nn.Linear(64, 64), nn.Linear(64, 64)
    b.weight = a.weight
    plan = rows(dcl.plan(nn.Sequential(a, nn.ReLU(), b, nn.ReLU(), nn.Linear(64, 4)), (64,)))
    assert plan["0"].reason == plan["2"].reason == "its weight is shared with another module"


def test_a_shared_bias_is_refused_too():
    a, b = nn.Linear(64, 32), nn.Linear(64, 32)
    b.bias = a.bias
    plan = linear_plan(lambda m, x: m.head(F.relu(m.a(x)) + F.relu(m.b(x))), a=a, b=b, size=(64,))
    refusal = "refused", "its bias is shared with another module"
    assert [(plan[name].status, plan[name].reason) for name in "ab"] == [refusal] * 2


def convolutions():
    return nn.Sequential(
        nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 2, 1),
    )  # fmt: skip


@pytest.mark.parametrize("part", ["weight", "bias", "running_mean"])
def test_a_layer_whose_batch_norm_shares_a_tensor_with_another_is_left_alone(part):
    model = convolutions()
    setattr(model[4], part, getattr(model[1], part))
    plan = rows(dcl.plan(model, (16, 8, 8), width=4))
    refusal = "left", f"the {part} of its batch norm is shared with another module"
    assert [(plan[name].status, plan[name].reason) for name in "03"] == [refusal] * 2


def test_a_layer_whose_batch_norm_is_parametrized_is_left_alone():
    model = convolutions()
    nn.utils.parametrizations.weight_norm(model[1])
    plan = rows(dcl.plan(model, (16, 8, 8), width=4))
    assert plan["0"].reason == "its batch norm is parametrized: remove the parametrization first"
    assert plan["3"].selected


def test_attention_modules_are_seen_through_and_a_relu_feed_forward_is_found():
    layer = nn.TransformerEncoderLayer(32, 4, 128, batch_first=True)
    plan = rows(dcl.plan(nn.Sequential(layer, nn.Linear(32, 2)), (5, 32), width=8))
    assert plan["0.self_attn.out_proj"].reason == "a NonDynamicallyQuantizableLinear with a forward of its own" or (
        plan["0.self_attn.out_proj"].reason == "its weight is used functionally, without calling it"
    )
    assert plan["0.linear1"].status == "pays"
    assert plan["0.linear2"].reason == "feeds a residual sum"


# Numbers


@given(
    K1=st.integers(1, 40), K2=st.integers(1, 40), kernel=st.sampled_from([1, 3, (3, 1)]), stride=st.integers(1, 2),
    branches=st.integers(1, 4), norm=st.booleans(), bias=st.booleans(),
)  # fmt: skip
@settings(max_examples=40)
def test_the_numbers_of_a_row_are_those_of_the_layers(K1, K2, kernel, stride, branches, norm, bias):
    conv = nn.Conv2d(K1, K2, kernel, stride, bias=bias)
    unit = [conv, nn.BatchNorm2d(K2), nn.ReLU()] if norm else [conv, nn.ReLU()]
    model = nn.Sequential(*unit, nn.Conv2d(K2, 2, 1))
    plan = dcl.plan(model, (K1, 9, 9), branches=branches).only("0")
    row = plan.selected[0]
    positions = conv(torch.zeros(1, K1, 9, 9))[0, 0].numel()
    assert row.macs == positions * conv.weight.numel()
    assert plan.weights == sum(p.numel() for n, p in model.named_parameters() if not n.endswith("bias"))
    assert plan.parameters == sum(p.numel() for p in model.parameters())
    dcl.convert_(model, plan, init="random")
    layer = model[0]
    assert plan.parameters_after == sum(p.numel() for p in model.parameters())
    assert plan.weights_after == sum(p.numel() for n, p in model.named_parameters() if not n.endswith("bias"))
    assert row.macs_after == positions * (layer.branch.weight.numel() + layer.fusion.weight.numel())
    u2, M = conv.weight[0, 0].numel(), sum(layer.widths)
    assert row.smaller == (u2 * K1 * M + K2 * M <= u2 * K1 * K2)


@pytest.mark.parametrize("branches", [1, 2, 3])
@pytest.mark.parametrize("size", [9, 96])  # at the larger size stage 2 runs by parts
def test_torch_counts_two_flops_for_each_mac_of_a_plan(branches, size):
    model = nn.Sequential(
        nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 3),
    )  # fmt: skip
    plan = dcl.plan(model, (16, size, size), branches=branches)
    x = torch.randn(2, 16, size, size)
    for macs in (plan.macs, plan.macs_after):
        with FlopCounterMode(display=False) as counter:
            model(x)
        assert counter.get_total_flops() == 2 * len(x) * macs
        if macs == plan.macs:
            dcl.convert_(model, plan, init="random")


def test_a_shared_layer_counts_once_in_weights_and_every_time_in_work():
    conv = nn.Conv2d(32, 32, 3, padding=1)
    model = nn.Sequential(conv, nn.ReLU(), conv, nn.ReLU(), nn.Conv2d(32, 2, 1))
    plan = dcl.plan(model, (32, 8, 8))
    row = rows(plan)["0"]
    assert row.aliases == ("2",)
    assert row.calls == 2
    assert row.macs == 2 * 64 * conv.weight.numel()
    assert plan.weights == conv.weight.numel() + 64
    dcl.convert_(model, plan, init="random")
    assert model[0] is model[2]
    assert isinstance(model[0], dcl.DCLConv2d)
    assert plan.parameters_after == sum(p.numel() for p in model.parameters())


def test_the_low_rank_layer_beside_a_unit_has_equal_weights():
    plan = dcl.plan(models.lenet(100), (1, 28, 28), width=100).only("fc1")
    row = plan.selected[0]
    low_rank = dcl.DCLLinear(800, 500, branches=1, width=row.low_rank_width)
    assert low_rank.branch.weight.numel() + low_rank.fusion.weight.numel() == row.weights_after == 260_000


def test_three_fifths_break_the_papers_own_rule_and_are_reported_not_refused():
    plan = models.variant_plan(models.lenet(100), "A3D")
    assert plan.selected[0].smaller
    assert not plan.selected[0].within_half
    assert "* ΣM is above K2/2" in str(plan)


def test_a_width_that_does_not_fit_marks_its_row_alone():
    plan = rows(dcl.plan(models.lenet(100), (1, 28, 28), width=100))
    assert plan["conv1"].reason == "width 100 does not fit its 20 output channels"
    assert plan["fc1"].status == "pays"


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("branches", [1, 2, 3])
@pytest.mark.parametrize("round_to", [1, 8])
@pytest.mark.parametrize(("K1", "K2"), [(64, 256), (96, 384), (16, 100), (3, 431), (8, 8)])
def test_a_unit_that_would_not_shrink_says_at_which_ratio_it_would(K1, K2, round_to, branches, norm):
    between = [nn.BatchNorm1d(K2), nn.ReLU()] if norm else [nn.ReLU()]
    model = nn.Sequential(nn.Linear(K1, K2), *between, nn.Linear(K2, 2))

    def planned(**arguments):
        return dcl.plan(model, (K1,), branches=branches, **arguments).rows[0]

    ratio = planned(ratio=1.0, round_to=round_to).paying_ratio
    if ratio is None:
        assert planned(width=round_to).status == "left"
        return
    row = planned(ratio=ratio, round_to=round_to)
    assert (row.status, row.paying_ratio) == ("pays", None)
    assert planned(width=row.widths[0] + round_to).status == "left"  # no wider one would


def test_a_transformer_says_which_ratio_would_pay():
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    plan = dcl.plan(nn.Sequential(layer, nn.Linear(64, 2)), (5, 64))
    assert rows(plan)["0.linear1"].reason == "would not shrink (16,384 → 40,960 weights)"
    assert str(plan).startswith("Nothing here is worth converting at these widths.\n")
    assert "\nWould shrink at ratio=0.09 or less (1): 0.linear1" in str(plan)
    assert dcl.Plan.from_json(plan.to_json()) == plan
    narrow = dcl.plan(nn.Sequential(layer, nn.Linear(64, 2)), (5, 64), ratio=0.09)
    assert names(narrow) == ["0.linear1"]
    assert "Would shrink" not in str(narrow)


@pytest.mark.parametrize("budget", [0.95, 0.8, 0.6, 0.5])
@pytest.mark.parametrize("branches", [2, 3])
def test_a_budget_is_met_on_as_few_units_as_it_takes(budget, branches):
    model = models.bignet(10)
    plan = dcl.plan(model, model.input_size, branches=branches, budget=budget)
    assert plan.weights_after <= budget * plan.weights
    least = min(row.saved for row in plan.selected)
    assert plan.weights_after + least > budget * plan.weights
    dcl.convert_(model, plan, init="random")
    assert models.count_weights(model) == plan.weights_after
    converted = dcl.plan(model, model.input_size)
    assert converted.macs == plan.macs_after


def test_a_budget_out_of_reach_says_what_can_be_reached():
    def least(budget=0.01, **arguments):
        with pytest.raises(ValueError, match=r"budget 0.01 is out of reach.*least that can be kept is") as error:
            dcl.plan(models.lenet(100), (1, 28, 28), budget=budget, **arguments)
        assert "not converted: head of the network (1)" in str(error.value)
        assert ("lower round_to" in str(error.value)) == (arguments.get("round_to") != 1)
        assert ("take fewer branches (now 2)" in str(error.value)) == (arguments.get("branches") != 1)
        return float(re.search(r"can be kept is (\d\.\d+)", str(error.value))[1])

    for arguments in ({}, {"round_to": 1}, {"round_to": 1, "branches": 1}):
        kept = least(**arguments)
        plan = dcl.plan(models.lenet(100), (1, 28, 28), budget=kept, **arguments)
        assert kept - 0.001 < plan.weights_after / plan.weights <= kept
    assert kept < 0.112  # the head alone is 0.105 of the weights


def test_a_budget_goes_down_to_the_narrowest_branches():
    model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 2))
    plan = dcl.plan(model, example=torch.zeros(1, 4096), budget=0.01)
    assert plan.selected[0].widths == (8, 8)


def test_a_budget_where_nothing_can_be_converted_says_that():
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 2))
    told = r"budget 0\.5 is out of reach: no layer of the network can be converted: GELU follows \(2\), head"
    with pytest.raises(ValueError, match=told) as error:
        dcl.plan(model, (8,), budget=0.5)
    assert "round_to" not in str(error.value)
    small = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    told = r"with 2 branches of 8 filters no unit of the network gets smaller; lower round_to \(now 8\) or take fewer"
    with pytest.raises(ValueError, match=told):
        dcl.plan(small, (8,), budget=0.9)
    assert dcl.plan(small, (8,), budget=0.9, round_to=1).weights_after <= 0.9 * 80


# Choosing


@pytest.fixture
def bignet_plan():
    model = models.bignet(10)
    yield dcl.plan(model, model.input_size)
    del model  # a plan does not keep its network alive


def names(plan):
    return [row.name for row in plan.selected]


def test_only_and_without_take_names_globs_and_predicates(bignet_plan):
    assert names(bignet_plan.only("fc1", "conv[34]")) == ["conv3", "conv4", "fc1"]
    assert names(bignet_plan.only(lambda _, module: isinstance(module, nn.Linear))) == ["fc1"]
    assert "fc1" not in names(bignet_plan.without("fc*"))
    assert names(bignet_plan.only("fc1").without("fc1")) == []
    assert names(bignet_plan.only("fc1").only("conv7*")) == ["conv7"]


def test_a_layer_that_was_left_alone_is_taken_by_force_only(bignet_plan):
    with pytest.raises(ValueError, match=r"^'fc3' is left alone: head of the network; force=True converts it"):
        bignet_plan.only("fc1", "fc3")
    assert names(bignet_plan.only("fc1", "fc3", force=True)) == ["fc1", "fc3"]
    assert names(bignet_plan.only("fc*", force=True)) == ["fc1"]
    with pytest.raises(
        ValueError, match=r"'fc3\*' matches 'fc3', but it is left alone \(head.*\); name it exactly, with force=True"
    ):
        bignet_plan.only("fc3*")
    with pytest.raises(ValueError, match=r"'fc3\*' matches 'fc3', but it is left alone \(head of the network\)$"):
        bignet_plan.without("fc3*")


def test_a_width_that_does_not_fit_a_layer_that_was_left_alone_is_the_reason_that_is_given():
    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    plan = dcl.plan(model, input_size=(256,), width=16)
    assert plan.rows[-1].reason == "head of the network"
    for force in (False, True):
        with pytest.raises(ValueError, match=r"^'2' has 10 outputs, less than the width; plan a smaller one$"):
            plan.only("2", force=force)
    plan = dcl.plan(model, input_size=(256,), width=8).only("2", force=True)
    dcl.convert_(model, plan, init="random")
    assert model[2].widths == (8, 8)


def test_in_a_residual_network_the_layer_before_the_sum_is_not_taken_by_its_name():
    model = nn.Sequential(Block(), nn.Conv2d(32, 4, 1))
    plan = dcl.plan(model, (32, 8, 8))
    with pytest.raises(ValueError, match=r"'0\.conv2' is left alone: feeds a residual sum; force=True"):
        plan.only("0.conv2")
    forced = plan.only("0.conv2", force=True)
    assert names(forced) == ["0.conv2"]
    assert dcl.Plan.from_json(forced.to_json()) == forced
    dcl.convert_(model, forced, init="random")
    assert isinstance(model[0].conv2, dcl.DCLConv2d)


def test_an_exact_name_takes_a_unit_that_would_not_shrink(bignet_plan):
    assert rows(bignet_plan)["fc2"].reason.startswith("would not shrink")
    assert names(bignet_plan.only("fc2")) == ["fc2"]
    assert names(bignet_plan.only("fc*")) == ["fc1"]
    with pytest.raises(ValueError, match=r"'fc2\*' matches 'fc2', but it is left alone .*; name it exactly$"):
        bignet_plan.only("fc2*")


def test_patterns_may_come_in_a_list(bignet_plan):
    assert names(bignet_plan.only(["fc1", "conv[34]"])) == ["conv3", "conv4", "fc1"]
    assert names(bignet_plan.only(name for name in ("fc1", "conv3"))) == ["conv3", "fc1"]
    assert names(bignet_plan.only("fc1", {"conv3"})) == ["conv3", "fc1"]
    assert names(bignet_plan.only("fc1", "conv3").without(["conv3"])) == ["fc1"]


@pytest.mark.parametrize("method", ["only", "without"])
@pytest.mark.parametrize(("given", "kind"), [(3, "int"), (None, "NoneType"), (nn.Sequential(nn.ReLU()), "Sequential")])
def test_what_is_no_pattern_is_named(bignet_plan, method, given, kind):
    with pytest.raises(TypeError, match=rf"a name, a glob or a predicate .* got {kind}; .* example \['conv1'"):
        getattr(bignet_plan, method)(given)


@pytest.mark.parametrize("method", ["only", "without"])
def test_an_unmatched_pattern_offers_the_nearest(bignet_plan, method):
    with pytest.raises(ValueError, match=r"'fcc1' matches no unit; nearest: 'fc1'"):
        getattr(bignet_plan, method)("fcc1")
    for none in ((), ([],)):
        with pytest.raises(ValueError, match="no pattern given"):
            getattr(bignet_plan, method)(*none)
    with pytest.raises(ValueError, match="holds for no unit"):
        getattr(bignet_plan, method)(lambda name, _: name == "nothing")


def test_a_refused_layer_cannot_be_named():
    model = nn.Sequential(nn.Conv2d(16, 32, 3, groups=4), nn.ReLU(), nn.Conv2d(32, 2, 1))
    with pytest.raises(ValueError, match=r"'0' cannot be converted: grouped \(4 groups\)"):
        dcl.plan(model, (16, 8, 8)).only("0")


def test_a_container_points_to_its_units():
    model = nn.Sequential(Block(), nn.Conv2d(32, 4, 1))
    with pytest.raises(ValueError, match=r"'0' is no unit, but units lie below it; use '0\.\*'"):
        dcl.plan(model, (32, 8, 8)).only("0")


# Printing and JSON


def test_json_goes_out_and_in_and_is_versioned(bignet_plan):
    text = bignet_plan.only("fc1").to_json()
    again = dcl.Plan.from_json(text)
    assert again == bignet_plan.only("fc1")
    assert str(again) == str(bignet_plan.only("fc1"))
    data = json.loads(text)
    assert data["torch_dcl_plan"] == 1
    with pytest.raises(ValueError, match="version 99, this torch-dcl reads up to 1; update"):
        dcl.Plan.from_json(json.dumps({**data, "torch_dcl_plan": 99}))
    with pytest.raises(ValueError, match="a predicate needs the network"):
        again.only(lambda *_: True)


def test_in_inference_mode_a_plan_is_the_same():
    model = Lambda(
        lambda m, x: m.head(F.relu6(m.b(F.relu(F.dropout(m.a(x), training=m.training))))),
        a=nn.Linear(64, 64), b=nn.Linear(64, 64), head=nn.Linear(64, 2),
    )  # fmt: skip
    plan = dcl.plan(model, (64,), width=4)
    with torch.inference_mode():
        assert dcl.plan(model, (64,), width=4) == plan
    assert rows(plan)["a"].selected


def test_a_plan_can_be_pickled_for_another_process_and_copied():
    model = models.lenet(100)
    plan = dcl.plan(model, (1, 28, 28), width=100)
    for again in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan), copy.copy(plan)):
        assert again == plan
        assert torch.equal(again.inputs[0][0], plan.inputs[0][0])
    assert copy.deepcopy(plan).only(lambda _, module: module is model.fc1).selected[0].name == "fc1"
    with pytest.raises(ValueError, match="a predicate needs the network"):
        pickle.loads(pickle.dumps(plan)).only(lambda *_: True)


@pytest.mark.parametrize(
    ("given", "told"), [("plan.json", "the text is not JSON"), (Path("plan.json"), r"a \w+Path is not a text")]
)
def test_the_name_of_a_file_is_no_plan_and_the_message_says_what_is(given, told):
    with pytest.raises(ValueError, match=rf"not a plan: {told} .*; from_json takes what a file holds, .*read_text\(\)"):
        dcl.Plan.from_json(given)


@pytest.mark.parametrize("text", ["", "[]", "{}", "3", '{"torch_dcl_plan": 1}', '{"torch_dcl_plan": 1, "rows": [{}]}'])
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(ValueError, match=r"not a (complete )?plan"):
        dcl.Plan.from_json(text)


def test_the_table_tells_what_happens():
    text = str(dcl.plan(models.lenet(100), (1, 28, 28), width=100).only("fc1"))
    assert "fc1   800→500  DCL 2 x 100      400k   260k   0.65" in text
    assert "low-rank 200" in text
    assert "475,500 → 335,500 (-29.4 %)" in text
    assert "head of the network (1): fc2" in text


@pytest.fixture
def wide_names():
    """A plan with long names, notes of every kind and times, which is wider than any terminal should be asked to be."""
    model = nn.ModuleDict({f"encoder_stage_{i}": Block() for i in range(6)})
    model["head"] = nn.Conv2d(32, 4, 1)
    plan = dcl.plan(Lambda(lambda m, x: [x := b(x) for b in m.net.values()][-1], net=model), (32, 8, 8))
    timings = {"plain": Timing(1.0, 4.0), "dcl": Timing(2.0, 5.0), "low_rank": Timing(0.5, None)}
    timed = tuple(replace(row, timings=timings if row.selected else None) for row in plan.rows)
    network = {"plain": timings["plain"], "dcl": timings["dcl"]}
    return replace(plan, rows=timed, device="an accelerator of some length", timings=network)


@pytest.mark.parametrize(("measured", "narrowest"), [(False, 50), (True, 60)])
def test_the_table_fits_the_width_it_is_given(wide_names, measured, narrowest):
    plan = wide_names if measured else replace(wide_names, device=None, timings=None)
    for width in (400, 160, 112, 100, 80, 72, narrowest):
        text = plan.table(width)
        assert max(map(len, text.splitlines())) <= width
        assert "low-rank 16" in text
        assert all(row.name in text for row in plan.rows if not row.selected)
        assert ("the paper's inequality" in text) == ("≤" in text.splitlines()[0])
    assert text.splitlines()[2].endswith("×0.56  ×0.56   ×2.00    ×1.25" if measured else "×0.56  ×0.56")


def test_columns_go_one_after_the_other_and_names_are_cut_last(wide_names):
    plan = replace(wide_names, device=None, timings=None)
    heads = [plan.table(width).splitlines()[0].split() for width in range(120, 30, -1)]
    assert heads[0] == ["unit", "layer", "becomes", "weights", "after", "ratio", "MACs", "after", "ratio", "≤"]
    assert heads[-1] == ["unit", "becomes", "weights", "MACs"]
    assert {len(head) for head in heads} == {10, 8, 7, 5, 4}
    assert all(len(a) >= len(b) for a, b in itertools.pairwise(heads))
    unit = [plan.table(width).splitlines()[2].split()[0] for width in (60, 48)]
    assert unit[0] == plan.selected[0].name
    assert unit[1].startswith("…")
    assert unit[0].endswith(unit[1][1:])


def test_a_terminal_gets_what_fits_and_a_file_everything(wide_names, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert str(wide_names) == wide_names.table(80)
    monkeypatch.delenv("COLUMNS")
    assert str(wide_names) == wide_names.table(10_000)  # the tests' output is no terminal
    assert max(map(len, str(wide_names).splitlines())) > 112


def test_nothing_to_convert_is_an_answer():
    plan = dcl.plan(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)), (8,))
    assert str(plan).startswith("Nothing here is worth converting.")
    assert plan.selected == ()
    assert plan.weights_after == plan.weights


# Measuring


@pytest.mark.parametrize(
    ("whole", "captured", "told", "waited"),
    [
        ((1.8, 5.0), (0.9, 3.0), "forward 0.9 → 0.9 ms (+0.0 %), forward + backward 3.5 → 3 ms (-14.3 %).",
         "forward and forward + backward"),
        ((0.9, 5.0), (0.8, 3.5), "forward 0.9 → 0.8 ms (-11.1 %), forward + backward 3.5 → 3.5 ms (+0.0 %).",
         "forward + backward"),
        ((1.8, None), (0.45, None), "forward 0.9 → 0.45 ms (-50.0 %).", "forward"),
        ((1.8, 5.0), (1.8, 3.0), "forward 0.9 → 1.8 ms (+100.0 %), forward + backward 3.5 → 3 ms (-14.3 %).",
         "forward + backward"),
        ((1.8, 5.0), (1.8, 3.6), "forward 0.9 → 1.8 ms (+100.0 %), forward + backward 3.5 → 3.6 ms (+2.9 %).", None),
        ((0.9, 2.0), (0.45, 1.75), "forward 0.9 → 0.45 ms (-50.0 %), forward + backward 3.5 → 1.75 ms", None),
        ((1.8, 5.0), None, None, None),  # on a CPU, or where it cannot be captured
    ],
)  # fmt: skip
def test_a_network_that_waits_for_launches_is_told_from_one_that_is_slower_by_itself(whole, captured, told, waited):
    plan = dcl.plan(nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 4)), (512,))
    has_full = whole[1] is not None
    network = {"plain": Timing(1.0, 4.0 if has_full else None), "dcl": Timing(*whole)}
    if captured:
        network |= {"plain, captured": Timing(0.9, 3.5 if has_full else None), "dcl, captured": Timing(*captured)}
    text = str(replace(plan, device="NVIDIA H200", timings=network))
    assert ("The same as CUDA graphs" in text) == (captured is not None)
    assert (told or "") in text
    assert re.findall("It is launches that (.*) waited for: compile", text) == ([waited] if waited else [])


@pytest.mark.parametrize("strategy", [slow("deterministic"), "stochastic"])
def test_measured_latencies_stand_beside_each_unit_and_the_network(strategy):
    model = nn.Sequential(Block(), nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 4))
    plan = dcl.plan(model, (32, 4, 4), branches=3, ratio=0.1, strategy=strategy, measure=True)
    assert {row.name for row in plan.selected} == {"0.conv1", "2"}
    for row in plan.selected:
        assert set(row.timings) == {"plain", "dcl", "low_rank"}
        assert all(t.forward > 0 and t.full > 0 for t in row.timings.values())
    assert plan.timings["plain"].full > 0
    text = str(plan)
    assert "Whole network on cpu" in text
    slower = [
        r.name for r in plan.selected if any(b > a for a, b in zip(r.timings["plain"], r.timings["dcl"], strict=True))
    ]
    assert ("Slower than the layer it replaces" in text) == bool(slower)
    assert plan.only("2").timings is None
    assert dcl.Plan.from_json(plan.to_json()) == plan


def test_a_unit_is_timed_with_a_gradient_that_lies_in_memory_as_its_output_does():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).to(memory_format=torch.channels_last)
    x, seen = torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last), []
    network[1].register_full_backward_pre_hook(lambda _, grads: seen.append(grads[0]))
    measure._full(network, x)()
    assert [(g.shape, g.stride()) for g in seen] == [(network(x).shape, network(x).stride())]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here")
def test_on_a_gpu_units_are_timed_as_graphs_unless_one_asks_the_cpu():
    x = torch.ones(3, device="cuda")
    runs = {"alone": lambda: x.mul_(1)}
    assert measure._captured(runs, x.device)
    asking = {**runs, "asks": lambda: x.sum().item()}
    assert measure._captured(asking, x.device) is None
    assert set(measure._race_on_device(asking, x)) == {"alone", "asks"}
    assert torch.cuda.get_sync_debug_mode() == 0
    assert measure._captured(runs, x.device), "a failed capture should leave no trace"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here")
def test_random_numbers_outlive_a_capture_that_fails(monkeypatch):
    x = torch.ones(3, device="cuda")
    monkeypatch.setattr(measure, "_synchronisation_raises", contextlib.nullcontext)
    asking = {"asks": lambda: torch.rand_like(x).sum().item()}
    assert measure._captured(asking, x.device) is None
    assert 0 < torch.rand(1000, device="cuda").mean().item() < 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here")
def test_on_a_gpu_a_network_is_timed_with_launches_and_without_unless_it_asks_the_cpu():
    network = nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 4)).cuda()
    plan = dcl.plan(network, (512,), batch=2, measure=True)
    assert set(plan.timings) == {"plain", "dcl", "plain, captured", "dcl, captured"}
    assert all(timing.forward > 0 and timing.full > timing.forward for timing in plan.timings.values())
    assert "The same as CUDA graphs" in str(plan)

    class Asks(nn.Sequential):
        def forward(self, x):
            y = super().forward(x)
            return y if y.sum().item() > 0 else -y

    plan = dcl.plan(Asks(*network), (512,), batch=2, measure=True)
    assert set(plan.timings) == {"plain", "dcl"}


def test_convolutions_that_a_gpu_would_take_in_another_format_are_counted():
    model = nn.Sequential(Block(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(),
                          nn.Linear(64, 4))  # fmt: skip
    plan = dcl.plan(model, (32, 4, 4), batch=2)
    assert {row.name: row.channels_last for row in plan.selected} == {"0.conv1": False, "1": False, "4": True}
    told = "model.to(memory_format=torch.channels_last)"
    assert told in str(plan)
    assert "2 of these are in another" in str(plan)
    assert "1 of these is in another" in str(plan.without("1"))
    assert told not in str(plan.only("4"))
    assert dcl.Plan.from_json(plan.to_json()) == plan
    assert told in str(dcl.plan(model, (32, 4, 4), budget=0.9).only("0.conv1"))
    # The images need not be: what a convolution gives lies as its filters do.
    assert told not in str(dcl.plan(model.to(memory_format=torch.channels_last), (32, 4, 4), batch=2))


def test_one_position_lies_in_every_format():
    model = nn.Sequential(nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4))
    assert all(row.channels_last for row in dcl.plan(model, (32, 3, 3)).rows)


def test_a_batch_is_run_and_counted():
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    one, many = (dcl.plan(model, (32,), batch=batch) for batch in (1, 7))
    assert (one.example, many.example) == ("one input of 32", "7 inputs of 32")
    assert (many.macs, many.weights_after) == (7 * one.macs, one.weights_after)
    with pytest.raises(ValueError, match="batch must be a whole number of at least 1, got 0"):
        dcl.plan(model, (32,), batch=0)
    with pytest.raises(ValueError, match="an example is a batch by itself"):
        dcl.plan(model, example=torch.randn(3, 32), batch=3)


# The network is left as it was; wrong input is an error that helps


def test_planning_leaves_no_trace():
    model = nn.Sequential(Block(), nn.Dropout(), nn.Conv2d(32, 4, 1))
    model[0].eval()
    before = copy.deepcopy(model.state_dict())
    flags = [m.training for m in model.modules()]
    rng = torch.get_rng_state()
    dcl.plan(model, (32, 8, 8), measure=True)
    assert [m.training for m in model.modules()] == flags
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    dcl.plan(model, (32, 8, 8))
    torch.set_rng_state(rng)


class Momentum(nn.Module):
    """A forward that changes whatever it can: parameters, buffers, attributes, containers, modules and its input."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)
        self.slow, self.teacher = nn.Parameter(torch.zeros(4), requires_grad=False), nn.Linear(32, 4)
        self.register_buffer("lowest", torch.empty(0))
        self.log, self.counts, self.late, self.merged = [], Counter(calls=3), None, False

    def train(self, mode=True):
        if not mode and not self.merged:
            self.merged = True
            self.head.weight.data.add_(1)
        return super().train(mode)

    def forward(self, x):
        self.log.append(x.sum().item())
        self.counts["calls"] += 1
        self.late = self.late or nn.Linear(32, 4)
        self.lowest.resize_(32).fill_(1)
        self.slow.data.lerp_(self.head.bias.data + 1, 0.5)
        self.teacher.weight.data = self.teacher.weight.data * 0.9
        with torch.enable_grad():
            self.head(x[:, :32]).sum().backward()
        return self.head(F.relu(self.norm(self.layer(x.sub_(1))))) + self.late(x[:, :32]) + self.slow


@pytest.mark.parametrize("arguments", [{}, {"measure": True}, {"select": "faster"}])
@pytest.mark.parametrize("training", [True, False])
def test_a_forward_that_changes_its_network_or_its_input_leaves_no_trace(arguments, training, monkeypatch):
    monkeypatch.setattr(measure, "SECONDS", 0.0)
    model, example = Momentum(), torch.randn(4, 64)
    for module in model.modules():
        module.training = training
    state, given, tensors = copy.deepcopy(model.state_dict()), example.clone(), list(model.parameters())
    plan = dcl.plan(model, example=example, **arguments)
    dcl.convert_(copy.deepcopy(model), plan.only("layer"), init="random")
    torch.testing.assert_close(dict(model.state_dict()), dict(state), rtol=0, atol=0)
    assert all(a is b for a, b in zip(model.parameters(), tensors, strict=True))
    assert (model.log, model.counts, model.late, model.merged) == ([], {"calls": 3}, None, False)
    assert all(parameter.grad is None for parameter in tensors)
    assert torch.equal(example, given)


def test_a_frozen_scripted_part_stays_as_it_is():
    """It has no training flag any more."""
    with pytest.warns(FutureWarning, match="deprecated"):
        frozen = torch.jit.freeze(torch.jit.script(nn.Sequential(nn.Linear(64, 64), nn.Dropout()).eval()))
    model = nn.Sequential(frozen, nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
    dcl.convert_(model, dcl.plan(model, (64,)), init="random")
    assert isinstance(model[1], dcl.DCLLinear)
    assert model[0] is frozen
    assert not hasattr(frozen, "training")


@pytest.mark.parametrize("trains", [True, False])
def test_an_example_that_cannot_be_concatenated_is_planned_and_converted(trains):
    """A batch norm in training needs two inputs, so the example is tried twice in one batch."""
    layers = {"a": nn.Linear(64, 32), "head": nn.Linear(32, 4)}
    model = Lambda(lambda m, x: m.head(F.relu(m.a(x))) if trains or not m.training else 1 / 0, **layers)
    example = torch.nested.nested_tensor([torch.randn(3, 64), torch.randn(5, 64)], layout=torch.jagged)
    plan = dcl.plan(model, example=example)
    assert [(row.name, row.macs) for row in plan.selected] == [("a", 8 * 64 * 32)]
    sequences = example.unbind()
    for arguments in ({"init": "fit"}, {"init": "random", "match": True}):
        weights = []
        for batch in (example, torch.cat(sequences)):
            converted = copy.deepcopy(model).eval()
            torch.manual_seed(0)
            dcl.convert_(converted, plan, **arguments, calibration=[batch] * 10)
            weights.append(converted.a.state_dict())
            for each, alone in zip(converted(example).unbind(), sequences, strict=True):
                torch.testing.assert_close(each, converted(alone))
        torch.testing.assert_close(*weights)


@pytest.mark.parametrize("layer", [nn.Linear(64, 32), nn.Conv1d(64, 32, 1)])
def test_a_network_that_returns_a_derivative_is_planned_by_its_forward(layer):
    """Such as forces, the derivative of an energy: its backward reads the weights, and the outputs of the norms."""

    def forward(m, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = m.head(F.relu(m.norm(m.a(x))).flatten(1)).sum()
            return energy, -torch.autograd.grad(energy, x, create_graph=m.training)[0]

    model = Lambda(forward, a=layer, norm=nn.BatchNorm1d(32), head=nn.Linear(32, 1))
    example = torch.randn(4, 64, *(1,) * (layer.weight.dim() - 2))
    plan = dcl.plan(model, example=example)
    assert [(row.name, row.norm) for row in plan.selected] == [("a", "norm")]
    dcl.convert_(model, plan, init="fit")
    assert model(example)[1].shape == example.shape


def test_planning_does_not_disturb_the_random_state():
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
    before = torch.get_rng_state()
    dcl.plan(model, (64,))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"branches": 0}, "branches must be from 1 to 8, got 0"),
        ({"branches": 9}, "branches must be from 1 to 8, got 9"),
        ({"ratio": 0.0}, "ratio must be above 0"),
        ({"ratio": 1.5}, "ratio must be above 0"),
        ({"width": 0}, "width 0 does not fit any layer; a branch has one filter or more$"),
        ({"width": (8, -3)}, "width -3 does not fit any layer"),
        ({"width": (3, 3, 3)}, "width names 3 branches, but branches = 2"),
        ({"round_to": 0}, "round_to must be a whole number"),
        ({"eps": -1.0}, "eps must be a finite positive number, got -1.0"),
        ({"eps": 0.0}, "eps = 0 leaves the gradient"),
        ({"strategy": "random"}, "strategy must be .* got 'random'"),
        ({"strategy": "stochastic"}, "needs three or more branches, got branches = 2"),
        ({"budget": 1.2}, r"budget is the fraction of the weights to keep.*got 1\.2"),
        ({"budget": 0.5, "width": 8}, "budget chooses the widths itself"),
        ({"input_size": (3, 28, 28)}, "LeNet does not run on one input of 3×28×28"),
        ({"input_size": (1, 0, 28)}, "input_size must be whole numbers above 0"),
        ({"input_size": None}, "give input_size, for example"),
        ({"example": torch.zeros(1, 1, 28, 28)}, "give input_size, for example .* not both"),
    ],
)
def test_wrong_arguments_name_the_value_and_the_remedy(arguments, message):
    with pytest.raises(ValueError, match=message):
        dcl.plan(models.lenet(10), **{"input_size": (1, 28, 28), **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_size": torch.zeros(2, 1, 28, 28)}, r"got a tensor of \(2, 1, 28, 28\)\. Pass it as example="),
        ({"input_size": 784}, r"input_size is a tuple, without the batch; got 784\. Write \(784,\)"),
        ({"budget": "0.5"}, "budget is the fraction of the weights to keep, .*; got '0.5'"),
        ({"budget": True}, "budget is the fraction of the weights to keep, .*; got True"),
        ({"budget": {"latency": 0.8}}, "budget is the fraction of the weights to keep, .*; got {'latency': 0.8}"),
        ({"width": 8.0}, "width must be a whole number, or one for each branch, got 8.0"),
        ({"width": "8"}, "width must be a whole number, or one for each branch, got '8'"),
    ],
)
def test_arguments_of_the_wrong_kind_name_the_value_and_the_remedy(arguments, message):
    with pytest.raises(TypeError, match=message):
        dcl.plan(models.lenet(10), **{"input_size": (1, 28, 28), **arguments})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "an nn.Module, first; got None"),
        (models.lenet, r"got the function lenet; call it: plan\(lenet\(\), \.\.\.\)"),
        (nn.Sequential, r"got the class Sequential; make one: plan\(Sequential\("),
        ({"weight": torch.zeros(3)}, "got a dict"),
        ((3, 224, 224), "got a tuple"),
    ],
)
def test_what_is_no_network_is_named(given, message):
    with pytest.raises(TypeError, match=message):
        dcl.plan(given, (1, 28, 28))


def test_a_width_that_fits_no_layer_is_said_in_every_row():
    plan = dcl.plan(models.lenet(10), (1, 28, 28), width=1 << 31)
    assert rows(plan)["fc1"].reason == "width 2147483648 does not fit its 500 output channels"


def test_a_named_tuple_is_one_input():
    model = Lambda(
        lambda m, x: m.head(F.relu(m.a(pad_packed_sequence(x)[0]))), a=nn.Linear(32, 32), head=nn.Linear(32, 2)
    )
    plan = dcl.plan(model, example=pack_sequence([torch.zeros(3, 32), torch.zeros(2, 32)]), width=4)
    assert rows(plan)["a"].selected
    dcl.convert_(model, plan, init="random")


def test_a_network_that_does_not_run_says_why_even_without_words():
    class Fails(nn.Linear):
        def forward(self, *_):
            raise AssertionError

    for example, shown in [((torch.zeros(2, 3), "text"), r"\(\(2, 3\), str\)"), ([torch.zeros(2)], r"\(list\)")]:
        with pytest.raises(ValueError, match=f"does not run on the example given {shown}: AssertionError. An"):
            dcl.plan(Fails(3, 3), example=example)


def test_an_example_that_is_none_says_what_one_is():
    with pytest.raises(ValueError, match="An example is a tensor, a tuple of arguments, or a dictionary"):
        dcl.plan(models.lenet(10), example=torch.zeros(2, 1, 28, 28).numpy())


def test_an_example_may_be_a_tensor_a_tuple_or_keywords():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.head = nn.Linear(64, 32), nn.Linear(32, 2)

        def forward(self, x, y):
            return {"logits": self.head(F.relu(self.a(x + y)))}

    x = torch.randn(3, 64)
    assert rows(dcl.plan(Two(), example=(x, x)))["a"].status == "pays"
    assert rows(dcl.plan(Two(), example={"x": x, "y": x}))["a"].macs == 3 * 64 * 32
    assert rows(dcl.plan(models.lenet(10), example=torch.randn(2, 1, 28, 28)))["fc1"].macs == 2 * 400_000


def test_wrapped_scripted_compiled_and_lazy_networks_say_what_to_do_first():
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
    with pytest.raises(TypeError, match=r"before torch\.compile"):
        dcl.plan(torch.compile(model), (64,))
    with pytest.raises(TypeError, match="before it is wrapped in DataParallel"):
        dcl.plan(nn.DataParallel(model), (64,))
    with pytest.raises(ValueError, match="lazy and has no size yet"):
        dcl.plan(nn.Sequential(nn.LazyLinear(32), nn.ReLU(), nn.Linear(32, 4)), (64,))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated")
def test_scripted_traced_and_exported_networks_have_no_layers_any_more():
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    x = torch.zeros(2, 64)
    for scripted in (torch.jit.script(model), torch.jit.trace(model, x)):
        with pytest.raises(TypeError, match=r"a scripted or traced network has no layers .* the network itself"):
            dcl.plan(scripted, (64,))
    program = torch.export.export(model, (x,))
    for exported in (program, program.module()):
        with pytest.raises(TypeError, match=r"an exported network has no layers .* export it after that"):
            dcl.plan(exported, (64,))
    assert names(dcl.plan(torch.fx.symbolic_trace(model), (64,))) == ["0"]


def test_the_network_itself_cannot_be_its_own_unit():
    assert rows(dcl.plan(nn.Linear(64, 32), (64,)))[""].reason == "the network itself, not a part of it"
