"""What a person expects of ``convert_``: the planned layers, everything carried over, all or nothing."""

import contextlib
import copy
import io
import itertools
import json
import pickle
import re
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_dcl as dcl
from torch_dcl import models
from torch_dcl.convert import AbsorbedNorm, AbsorbedReLU, SharedReLU, apply


def network(norm=True, **arguments):
    conv = nn.Conv2d(16, 32, 3, **{"padding": 1, **arguments})
    unit = [conv, nn.BatchNorm2d(32), nn.ReLU(inplace=True)] if norm else [conv, nn.ReLU(inplace=True)]
    return nn.Sequential(*unit, nn.Conv2d(32, 4, 1))


def test_the_geometry_is_carried_over():
    model = network(norm=False, stride=(2, 1), padding=(2, 1), dilation=(1, 2), padding_mode="reflect", bias=False)
    expected = model(torch.randn(2, 16, 12, 12)).shape
    dcl.convert_(model, dcl.plan(model, (16, 12, 12)), init="random")
    layer = model[0]
    assert isinstance(layer, dcl.DCLConv2d)
    assert (layer.branch.stride, layer.branch.padding, layer.branch.dilation) == ((2, 1), (2, 1), (1, 2))
    assert layer.branch.padding_mode == "reflect"
    assert layer.fusion.bias is None
    assert model(torch.randn(2, 16, 12, 12)).shape == expected


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
@pytest.mark.parametrize("padding", [1, "same", "valid"])
def test_every_kind_of_convolution_and_padding(kind, padding):
    model = nn.Sequential(kind(16, 32, 3, padding=padding), nn.ReLU(), kind(32, 2, 1))
    size = (16,) + (6,) * (kind(1, 1, 1).weight.dim() - 2)
    expected = model(torch.randn(2, *size)).shape
    plan = dcl.plan(model, size, branches=3, strategy="stochastic", width=(4, 5, 6))
    dcl.convert_(model, plan, init="random")
    assert model[0].widths == (4, 5, 6)
    assert model.eval()(torch.randn(2, *size)).shape == expected


def test_a_channels_last_3d_network_stays_one(tmp_path):
    def volumes():
        model = nn.Sequential(nn.Conv3d(8, 16, 3), nn.BatchNorm3d(16), nn.ReLU(), nn.Conv3d(16, 2, 1))
        return model.to(memory_format=torch.channels_last_3d)

    model = volumes()
    dcl.convert_(model, dcl.plan(model, (8, 5, 5, 5), width=4), init="fit")
    dcl.save_model(model, tmp_path / "volumes.safetensors")
    for each in (model, dcl.load_model(volumes, tmp_path / "volumes.safetensors")):
        assert each[0].branch.weight.is_contiguous(memory_format=torch.channels_last_3d)


def test_dtype_training_flags_memory_format_and_requires_grad_are_carried_over():
    model = network().to(torch.bfloat16).to(memory_format=torch.channels_last)
    model[0].eval()
    model[0].weight.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    dcl.convert_(model, dcl.plan(model, (16, 8, 8)), init="random")
    layer = model[0]
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert not layer.training
    assert layer.fusion.norm.training  # as the batch norm was
    assert model[3].training
    assert layer.branch.weight.is_contiguous(memory_format=torch.channels_last)
    free = {name for name, p in layer.named_parameters() if p.requires_grad}
    assert free == {"fusion.bias", "fusion.norm.weight"}


def test_the_batch_norm_moves_into_the_layer_with_its_settings():
    model = network()
    model[1] = nn.BatchNorm2d(32, eps=1e-3, momentum=0.3)
    dcl.convert_(model, dcl.plan(model, (16, 8, 8)), init="random")
    assert isinstance(model[1], AbsorbedNorm)
    norm = model[0].fusion.norm
    assert (type(norm), norm.num_features, norm.eps, norm.momentum) == (nn.BatchNorm2d, 2 * 32, 1e-3, 0.3)
    out = model(torch.randn(4, 16, 8, 8))
    out.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_float32_batch_norm_in_a_network_of_half_precision_stays_float32(dtype, tmp_path):
    def mixed():
        model = network().to(dtype)
        model[1].float()
        return model

    model, x = mixed(), torch.randn(2, 16, 8, 8).to(dtype)
    dcl.convert_(model, dcl.plan(model, (16, 8, 8)), init="fit")
    norm = model[0].fusion.norm
    assert {t.dtype for t in (norm.weight, norm.bias, norm.running_mean, norm.running_var)} == {torch.float32}
    assert model[0].fusion.weight.dtype is model(x).dtype is dtype
    model(x).sum().backward()
    dcl.save_model(model, tmp_path / "mixed.safetensors")
    again = dcl.load_model(mixed, tmp_path / "mixed.safetensors")
    assert again[0].fusion.norm.running_var.dtype is torch.float32
    assert torch.equal(again.eval()(x), model.eval()(x))


@pytest.mark.parametrize("init", ["random", "fit"])
@pytest.mark.parametrize("strategy", ["deterministic", "stochastic"])
def test_the_statistics_of_a_batch_norm_in_eval_stay_still_in_training(init, strategy, tmp_path):
    def fine_tuned(model):
        """As people freeze batch norms: statistics and parameters."""
        for module in model.train().modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval().requires_grad_(False)
        return model

    model = fine_tuned(network())
    plan = dcl.plan(model, (16, 8, 8), branches=3, width=4, strategy=strategy)
    dcl.convert_(model, plan, init=init)
    dcl.save_model(model, tmp_path / "m.safetensors")
    for each in (model, dcl.load_model(fine_tuned(network()), tmp_path / "m.safetensors")):
        dcl.advance_branches_(each, 0)
        norm = each[0].fusion.norm
        before = copy.deepcopy(norm.state_dict())
        each(torch.randn(4, 16, 8, 8)).sum().backward()
        assert each[0].training
        assert each[0].branch.weight.grad is not None
        assert not any((norm.training, norm.weight.requires_grad, norm.bias.requires_grad))
        torch.testing.assert_close(dict(norm.state_dict()), dict(before), rtol=0, atol=0)


class Freezing(nn.Module):
    """Two units whose train() keeps the first batch norm in eval mode by name; bn2 is registered before it."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.bn2, self.bn1 = nn.BatchNorm2d(32), nn.BatchNorm2d(32)
        self.head = nn.Conv2d(32, 4, 1)

    def forward(self, x):
        return self.head(self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())).relu())

    def train(self, mode=True):
        super().train(mode)
        self.bn1.eval().requires_grad_(False)
        return self


FREEZING_AGAIN = {
    "itself": lambda model, _: model,
    "deep-copied": lambda model, _: copy.deepcopy(model),
    "pickled": lambda model, _: pickle.loads(pickle.dumps(model)),
    "averaged": lambda model, _: torch.optim.swa_utils.AveragedModel(model).module,
    "synchronised": lambda model, _: nn.SyncBatchNorm.convert_sync_batchnorm(model),
    "loaded": lambda model, path: (dcl.save_model(model, path), dcl.load_model(Freezing, path))[1],
    "loaded into itself": lambda model, path: (dcl.save_model(model, path), dcl.load_model(model, path))[1],
    "one after the other": lambda model, _: model,
}


@pytest.mark.parametrize("way", FREEZING_AGAIN)
def test_a_train_that_freezes_a_norm_by_name_freezes_it_in_the_layer(way, tmp_path):
    model = Freezing()
    plan = dcl.plan(model, (16, 8, 8), width=4)
    for part in (["conv2"], ["conv1"]) if way == "one after the other" else (["conv1", "conv2"],):
        dcl.convert_(model, plan.only(part), init="random")
    keys = set(model.state_dict())
    model = FREEZING_AGAIN[way](model, tmp_path / "freezing.safetensors").train()
    frozen, free = model.conv1.fusion.norm, model.conv2.fusion.norm
    assert (frozen.training, free.training) == (False, True)
    assert not any(p.requires_grad for p in frozen.parameters())
    assert all(p.requires_grad for p in free.parameters())
    if way != "synchronised":  # such a norm trains on a GPU only
        mean, other = frozen.running_mean.clone(), free.running_mean.clone()
        model(torch.randn(4, 16, 8, 8)).sum().backward()
        assert torch.equal(frozen.running_mean, mean)
        assert not torch.equal(free.running_mean, other)
    model.bn1.train()
    assert frozen.training
    # The norm is a part of the layer alone.
    assert set(model.state_dict()) == keys
    assert [n for n, m in model.named_modules(remove_duplicate=False) if m is frozen] == ["conv1.fusion.norm"]


def test_a_norm_frozen_by_name_after_compilation_is_frozen_in_the_next_call():
    model = Freezing()
    dcl.convert_(model, dcl.plan(model, (16, 8, 8), width=4), init="random")
    nn.Module.train(model)
    compiled, x, norm = torch.compile(model, backend="eager"), torch.randn(4, 16, 8, 8), model.conv1.fusion.norm
    for mode in (True, False, True):
        model.bn1.train(mode)
        before = norm.running_mean.clone()
        compiled(x)
        assert torch.equal(norm.running_mean, before) is not mode


@pytest.mark.parametrize("of_class", [True, False])
def test_a_batch_norm_with_a_train_of_its_own_keeps_it(of_class):
    class Frozen(nn.BatchNorm2d):
        def train(self, _=True):
            return super().train(False)

    model = network()
    model[1] = Frozen(32) if of_class else nn.BatchNorm2d(32).eval()
    if not of_class:
        model[1].train = lambda _=True: model[1]
    plan = dcl.plan(model, (16, 8, 8))
    assert "a train() of its own" in plan.rows[0].reason
    dcl.convert_(model, plan, init="random")
    assert not model.train()[1].training


def test_a_network_that_collects_the_outputs_of_its_relus_still_does(tmp_path):
    class Features(nn.Module):
        """As the loss of a style transfer does."""

        def __init__(self):
            super().__init__()
            self.layers = network()[:3].append(nn.Conv2d(32, 32, 1)).append(nn.ReLU())

        def forward(self, x):
            found = []
            for layer in self.layers:
                x = layer(x)
                if isinstance(layer, nn.ReLU):
                    found.append(x)
            return found

    model, x = Features(), torch.randn(2, 16, 8, 8)
    dcl.convert_(model, dcl.plan(model, (16, 8, 8), width=4), init="random")
    dcl.save_model(model.eval(), tmp_path / "m.safetensors")
    loaded = dcl.load_model(Features().eval(), tmp_path / "m.safetensors")
    for each in (model, copy.deepcopy(model), loaded):
        first = each.layers[0](x)
        torch.testing.assert_close(each(x), [first, each.layers[3](first)])


def test_a_layer_that_is_compiled_by_itself_is_refused_and_left_alone():
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    model[2] = torch.compile(model[2], backend="eager")
    plan = dcl.plan(model, (32,), width=2)
    with left_as_it_was(model), pytest.raises(ValueError, match=r"'2\._orig_mod' is compiled by itself.*before torch"):
        dcl.convert_(model, plan, init="random")


def test_a_relu_behind_a_layer_is_not_run_any_more():
    model = network()
    plan = dcl.plan(model, (16, 8, 8))
    assert plan.selected[0].relu == "2"
    assert dcl.Plan.from_json(plan.to_json()).selected[0].relu == "2"
    dcl.convert_(model, plan, init="random")
    assert type(model[2]) is AbsorbedReLU
    x = torch.randn(2, 16, 8, 8)
    model.eval()
    assert torch.equal(model(x), model[3](model[0](x)))


class Shared(nn.Module):
    """One ReLU behind two layers and, if asked to, behind a sum."""

    def __init__(self, *, functional=False, summed=False):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 2)
        self.relu, self.functional, self.summed = nn.ReLU(inplace=True), functional, summed

    def forward(self, x):
        relu = F.relu if self.functional else self.relu
        y = relu(self.second(relu(self.first(x))))
        return self.head(self.relu(y - 1) if self.summed else y)


@pytest.mark.parametrize("settings", [{}, {"summed": True}, {"functional": True}])
def test_a_relu_that_others_use_stays_and_does_nothing(settings):
    model = Shared(**settings)
    plan = dcl.plan(model, (64,), ratio=0.125)
    dcl.convert_(model, plan, init="random")
    name, kind = (None, nn.ReLU) if model.functional else ("relu", SharedReLU)
    found = {row.name: (row.relu, row.shares_relu) for row in plan.selected}
    assert found == dict.fromkeys(("first", "second"), (name, name is not None))
    assert type(model.relu) is kind
    assert model.relu.inplace
    assert model.first.marks_output == model.second.marks_output == (name is not None)
    x = torch.randn(3, 64)
    z = model.second(model.first(x))
    torch.testing.assert_close(model(x), model.head(F.relu(z - 1) if model.summed else z))


def test_a_plan_with_relus_fits_a_network_that_has_none_as_modules():
    class Functional(nn.Sequential):
        def forward(self, x):
            return self[2](F.relu(self[0](x)))

    layers = nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
    plan = dcl.plan(nn.Sequential(*layers), (64,), ratio=0.125)
    assert plan.selected[0].relu == "1"
    other = Functional(*layers)
    other[1] = nn.Identity()
    dcl.convert_(other, plan, init="random")
    assert isinstance(other[0], dcl.DCLLinear)
    del (gone := nn.Sequential(*layers))[1]
    dcl.convert_(gone, dcl.Plan.from_json(plan.to_json().replace('"relu": "1"', '"relu": "relu"')), init="random")
    assert isinstance(gone[0], dcl.DCLLinear)


def test_a_relu_of_a_layer_that_is_left_out_stays():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    dcl.convert_(model, dcl.plan(model, (64,), ratio=0.125).without("2"), init="random")
    assert [type(model[i]) for i in (1, 3)] == [AbsorbedReLU, nn.ReLU]


@pytest.mark.parametrize("when", ["before the plan", "after it"])
def test_a_relu_that_somebody_hooked_into_stays(when):
    model, seen = network(), []

    def hook():
        model[2].register_forward_hook(lambda *_: seen.append(1))

    if when == "before the plan":
        hook()
    plan = dcl.plan(model, (16, 8, 8))
    if when == "after it":
        hook()
    dcl.convert_(model, plan, init="random")
    seen.clear()
    model(torch.randn(2, 16, 8, 8))
    assert seen == [1]
    assert type(model[2]) is nn.ReLU


def test_a_shared_layer_with_its_own_relu_is_one_unit():
    unit = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    model = nn.Sequential(unit, unit, nn.Linear(64, 2))
    dcl.convert_(model, dcl.plan(model, (64,), ratio=0.125), init="random")
    assert type(unit[1]) is AbsorbedReLU
    x = torch.randn(3, 64)
    assert torch.equal(model(x), model[2](unit[0](unit[0](x))))


def test_a_budget_keeps_what_is_known_of_the_relus():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    assert [row.relu for row in dcl.plan(model, (64,), budget=0.6).selected] == ["1"]


def test_a_layer_left_alone_can_be_named_and_keeps_its_batch_norm():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn, self.head = nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.Conv2d(32, 2, 1)

        def forward(self, x):
            return self.head(F.relu(self.bn(self.conv(x)) + x))

    model = Residual()
    dcl.convert_(model, dcl.plan(model, (32, 8, 8)).only("conv", force=True), init="random")
    assert isinstance(model.conv, dcl.DCLConv2d)
    assert model.conv.fusion.norm is None
    assert isinstance(model.bn, nn.BatchNorm2d)


def test_a_module_shared_by_two_parents_is_swapped_once_and_stays_shared():
    shared = nn.Linear(64, 64)
    model = nn.Sequential(nn.Sequential(shared, nn.ReLU()), nn.Sequential(shared, nn.ReLU()), nn.Linear(64, 2))
    dcl.convert_(model, dcl.plan(model, (64,), ratio=0.125), init="random")
    assert isinstance(model[0][0], dcl.DCLLinear)
    assert model[0][0] is model[1][0]


def test_stochastic_layers_draw_apart_and_from_the_seed():
    def keys(seed):
        model = models.bignet(10)
        plan = dcl.plan(model, model.input_size, branches=3, strategy="stochastic")
        dcl.convert_(model, plan, init="random", seed=seed)
        dcl.advance_branches_(model, 7)
        return {n: tuple(b.tolist()) for n, b in model.named_buffers() if n.endswith("key")}

    first = keys(3)
    assert len(first) > 2
    assert len({layer for _, layer, _ in first.values()}) == len(first)
    assert {(seed, step) for seed, _, step in first.values()} == {(3, 7)}
    assert keys(3) == first
    assert keys(4) != first


def test_a_random_start_is_reproducible_and_not_the_trained_one():
    def converted():
        torch.manual_seed(5)
        model = network(norm=False)
        dcl.convert_(model, dcl.plan(model, (16, 8, 8)), init="random")
        return model.state_dict()

    first, second = converted(), converted()
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_a_converted_network_is_not_converted_again():
    model = network(norm=False)
    plan = dcl.plan(model, (16, 8, 8))
    dcl.convert_(model, plan, init="random")
    with pytest.raises(ValueError, match="'0' cannot be converted: already a DCL layer"):
        dcl.convert_(model, plan, init="random")
    again = dcl.plan(model, (16, 8, 8))
    assert again.selected == ()
    assert next(row.reason for row in again.rows if row.name == "0") == "already a DCL layer"


def test_an_error_leaves_the_network_untouched():
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 2))
    plan = dcl.plan(model, (64,), ratio=0.2, round_to=1)
    assert len(plan.selected) == 2
    model[2].register_forward_hook(lambda *_: None)
    modules = list(model)
    with pytest.raises(ValueError, match="'2' cannot be converted: carries hooks"):
        dcl.convert_(model, plan, init="random")
    assert all(a is b for a, b in zip(model, modules, strict=True))


@contextlib.contextmanager
def left_as_it_was(model):
    """The same modules in the same places and order, the same tensors, values, flags and attributes."""

    def look():
        modules = [(name, id(module)) for name, module in model.named_modules(remove_duplicate=False)]
        plain = {
            name: {k: v for k, v in vars(module).items() if isinstance(v, bool | int | float | str)}
            for name, module in model.named_modules(remove_duplicate=False)
        }
        tensors = (*model.named_parameters(), *model.named_buffers())
        return modules, plain, [(name, id(tensor), tensor.requires_grad) for name, tensor in tensors]

    before, values = look(), copy.deepcopy(model.state_dict())
    yield
    assert look() == before
    torch.testing.assert_close(dict(model.state_dict()), dict(values), rtol=0, atol=0)


@pytest.mark.parametrize("init", ["random", "fit"])
@pytest.mark.parametrize("seed", [None, 1.5, "a", True, 2**64, -(2**63) - 1])
def test_a_bad_seed_is_refused_before_anything_else(seed, init):
    model = network(norm=False)
    plan = dcl.plan(model, (16, 8, 8), branches=3, width=4, strategy="stochastic")
    state = torch.get_rng_state()
    with left_as_it_was(model), pytest.raises((TypeError, ValueError), match=r"seed must be .*, got"):
        dcl.convert_(model, plan, init=init, seed=seed)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**64 - 1])
@pytest.mark.parametrize("init", ["random", "fit"])
def test_any_whole_number_of_64_bits_is_a_seed(seed, init):
    model = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 2))
    plan = dcl.plan(model, (24,), branches=3, width=2, strategy="stochastic")
    dcl.convert_(model, plan, init=init, seed=seed)
    assert isinstance(model[0], dcl.DCLLinear)


class Sealed(nn.Sequential):
    """Takes no other module, once it is sealed."""

    sealed = False

    def __setattr__(self, name, value):
        if self.sealed and isinstance(value, nn.Module):
            raise PermissionError("sealed")
        super().__setattr__(name, value)


class Composite(nn.Module):
    """A shared unit, a batch norm, a transformer, a layer converted before, and a parent that may refuse."""

    def __init__(self):
        super().__init__()
        unit = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())
        self.first, self.again = unit, nn.Sequential(unit, nn.Identity())
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 2, 128, batch_first=True), 1)
        self.earlier = dcl.DCLLinear(64, 64, branches=3, width=4, strategy="stochastic")
        self.last = Sealed(nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 2)

    def forward(self, x):
        return self.head(self.last(self.earlier(self.encoder(self.again(self.first(x))[None])[0])))


def composite():
    model = Composite()
    dcl.seed_branches_(model, 5)
    dcl.advance_branches_(model, 9)
    plan = dcl.plan(model, (64,), batch=2, branches=3, width=4, strategy="stochastic")
    assert [row.name for row in plan.selected] == ["first.0", "encoder.layers.0.linear1", "last.0"]
    return model, plan


def test_a_parent_that_refuses_leaves_the_whole_network_as_it_was():
    model, plan = composite()
    model.last.sealed = True
    with left_as_it_was(model), pytest.raises(PermissionError):
        dcl.convert_(model, plan, init="random")
    model.last.sealed = False
    dcl.convert_(model, plan, init="random")
    assert model.first[0] is model.again[0][0]
    assert isinstance(model.first[0], dcl.DCLLinear)
    assert isinstance(model.last[0], dcl.DCLLinear)
    assert not model.encoder.use_nested_tensor
    assert model.earlier.fusion.key[0] == 0


@pytest.mark.parametrize("where", range(2 * (6 + 1 + 1)))  # before and after: three layers, a norm, two ReLUs swapped
def test_an_interruption_anywhere_leaves_the_whole_network_as_it_was(monkeypatch, where):
    model, plan = composite()
    taken = itertools.count()

    def interrupting(function):
        def maybe(*args, **kwargs):
            if next(taken) == where:
                raise KeyboardInterrupt
            result = function(*args, **kwargs)
            if next(taken) == where:
                raise KeyboardInterrupt
            return result

        return maybe

    for name in ("swap", "disable_fast_paths", "seed_branches_"):
        monkeypatch.setattr(apply, name, interrupting(getattr(apply, name)))
    with left_as_it_was(model), pytest.raises(KeyboardInterrupt):
        dcl.convert_(model, plan, init="random", seed=3)


def test_a_plan_for_another_network_is_refused():
    plan = dcl.plan(models.lenet(10), (1, 28, 28)).only("fc1")
    with pytest.raises(ValueError, match=r"'fc1' is a Linear of \(512, 2048\), the plan has a Linear of \(500, 800\)"):
        dcl.convert_(models.lenet_cifar(10), plan, init="random")
    with pytest.raises(ValueError, match="the network has no 'fc1'"):
        dcl.convert_(network(), plan, init="random")


def test_a_plan_travels_as_json_to_a_network_of_the_same_architecture():
    text = dcl.plan(models.lenet(10), (1, 28, 28)).to_json()
    model = models.lenet(10)
    dcl.convert_(model, dcl.Plan.from_json(text), init="random")
    assert isinstance(model.fc1, dcl.DCLLinear)


def test_wrong_arguments_name_the_remedy():
    model = network(norm=False)
    plan = dcl.plan(model, (16, 8, 8))
    with pytest.raises(TypeError, match="init"):
        dcl.convert_(model, plan)
    with pytest.raises(ValueError, match=r'init must be "random" .* or "fit" .* got \'svd\''):
        dcl.convert_(model, plan, init="svd")
    with pytest.raises(ValueError, match='calibration is for init="fit"'):
        dcl.convert_(model, plan, init="random", calibration=[torch.zeros(1, 16, 8, 8)])
    with pytest.raises(TypeError, match=r"before it is wrapped in DataParallel \(it is in .module\)"):
        dcl.convert_(nn.DataParallel(model), plan, init="random")
    with pytest.raises(ValueError, match="the network has no '0'; the plan was made for another network"):
        dcl.convert_(nn.Sequential(), plan, init="random")
    with pytest.raises(TypeError, match="takes the network and then a Plan, got dict"):
        dcl.convert_(model, {}, init="random")
    with pytest.raises(TypeError, match=r"takes a network, an nn.Module, first; got a Plan"):
        dcl.convert_(plan, model, init="random")


def test_too_little_calibration_data_for_one_layer_names_it_before_any_fit(monkeypatch):
    monkeypatch.setattr(apply, "fit_", lambda *_, **__: pytest.fail("fitted before the check"))
    model = nn.Sequential(
        nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 64), nn.ReLU(), nn.Linear(64, 2)
    )
    plan = dcl.plan(model, (16, 8, 8))
    with pytest.raises(ValueError, match=r"'3' cannot be fitted: the calibration data give 4 .* at least 8"):
        dcl.convert_(model, plan, init="fit", calibration=torch.randn(4, 16, 8, 8))
    dcl.convert_(model, plan, init="random", match=True, calibration=torch.randn(4, 16, 8, 8))


@pytest.mark.parametrize("init", ["random", "fit"])
def test_a_network_that_is_converted_or_loaded_in_inference_mode_can_be_trained(init, tmp_path):
    model, loaded, x = network(), network(), torch.randn(4, 16, 8, 8)
    with torch.inference_mode():
        dcl.convert_(model, dcl.plan(model, (16, 8, 8)), init=init)
        dcl.save_model(model, tmp_path / "net.safetensors")
        dcl.load_model(loaded, tmp_path / "net.safetensors")
        dcl.load_model(network(), tmp_path / "net.safetensors")
        assert torch.equal(model.eval()(x), loaded.eval()(x))
    for each in (model, loaded):
        each.train()(x).sum().backward()
        assert all(parameter.grad is not None for parameter in each[0].parameters())


@pytest.mark.parametrize(
    ("edits", "told"),
    [
        ({"widths": [0, 8]}, "width 0 does not fit a layer of 64 output channels"),
        ({"widths": []}, "branches must be from 1 to 8, got 0"),
        ({"eps": -1}, "eps must be a finite positive number, got -1"),
        ({"strategy": "both"}, 'strategy must be "deterministic" or "stochastic"'),
    ],
)
def test_a_plan_that_was_edited_wrongly_says_in_which_layer(edits, told):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    data = json.loads(dcl.plan(model, (64,), width=8).to_json())
    data["rows"][0].update(edits)
    with pytest.raises(ValueError, match=f"'0' cannot be converted: {told}"):
        dcl.convert_(model, dcl.Plan.from_json(json.dumps(data)), init="random")


def test_a_layer_that_was_refused_is_not_converted_by_an_edited_plan():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    model[2].weight = model[0].weight
    data = json.loads(dcl.plan(model, (64,), width=8).to_json())
    data["rows"][0]["selected"] = True
    with pytest.raises(ValueError, match="'0' cannot be converted: its weight is shared with another module"):
        dcl.convert_(model, dcl.Plan.from_json(json.dumps(data)), init="random")


def test_an_empty_plan_converts_nothing_and_says_so():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2))
    before = copy.deepcopy(model.state_dict())
    report = dcl.convert_(model, dcl.plan(model, (8,)), init="random")
    assert str(report) == "Nothing was converted: the plan selects no unit."
    assert before.keys() == model.state_dict().keys()


def test_sync_batch_norm_stays_one():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(network())
    dcl.convert_(model, dcl.plan(model.eval(), (16, 8, 8)), init="random")
    assert isinstance(model[0].fusion.norm, nn.SyncBatchNorm)


# Starting from trained weights


@pytest.fixture(scope="module")
def trained():
    """A small network that has learned something: which of eight fixed patterns lies under the noise."""
    torch.manual_seed(0)
    patterns = torch.randn(8, 16, 8, 8)

    def batch(n):
        labels = torch.randint(8, (n,))
        return patterns[labels] + torch.randn(n, 16, 8, 8), labels

    model = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 8),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    for _ in range(60):
        images, labels = batch(128)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), batch


def test_fit_starts_close_to_the_trained_network_and_random_does_not(trained):
    model, batch = trained
    images, _ = batch(512)
    target = model(images)

    def distance(**how):
        new = copy.deepcopy(model)
        report = dcl.convert_(new, dcl.plan(new, (16, 8, 8), ratio=0.25), **how)
        assert len(report.rows) == 2
        return ((new(images) - target).square().mean() / target.square().mean()).item(), report

    fitted, report = distance(init="fit")
    calibrated, calibrated_report = distance(init="fit", calibration=[batch(256)[0], batch(256)])
    at_random, _ = distance(init="random")
    assert fitted < 0.25 * at_random
    assert calibrated < 0.2 * at_random
    assert calibrated < fitted
    assert set(report.fits) == {"0", "5"}
    assert all(0 <= fit.error < 0.5 for fit in calibrated_report.fits.values())
    assert "low-rank's" in str(report)


def test_fit_does_not_touch_the_random_state(trained):
    model, _ = trained
    new = copy.deepcopy(model)
    plan = dcl.plan(new, (16, 8, 8)).only("5")
    dcl.convert_(new, plan, init="fit")
    again = copy.deepcopy(model)
    torch.manual_seed(11)
    dcl.convert_(again, plan, init="fit")
    assert all(torch.equal(a, b) for a, b in zip(new.state_dict().values(), again.state_dict().values(), strict=True))


def test_a_frozen_batch_norm_becomes_part_of_the_weights(trained, tmp_path):
    from torchvision.ops import FrozenBatchNorm2d

    model, batch = trained
    frozen = copy.deepcopy(model)
    frozen[1] = FrozenBatchNorm2d(32)
    frozen[1].load_state_dict({k: v for k, v in model[1].state_dict().items() if k in frozen[1].state_dict()})
    images, _ = batch(256)
    target = frozen(images)
    torch.testing.assert_close(target, model(images))
    new, other, calibration = copy.deepcopy(frozen), copy.deepcopy(model), [batch(256)[0]]
    plan = dcl.plan(new, (16, 8, 8)).only("0")
    dcl.convert_(new, plan, init="fit", calibration=calibration)
    dcl.convert_(other, dcl.plan(other, (16, 8, 8)).only("0"), init="fit", calibration=calibration)
    assert isinstance(new[1], AbsorbedNorm)
    assert new[0].fusion.norm is None
    assert plan.parameters_after == sum(p.numel() for p in new.parameters())
    assert (new(images) - target).square().mean() < 1.1 * (other(images) - target).square().mean()
    dcl.save_model(new, tmp_path / "frozen.safetensors")
    again = dcl.load_model(copy.deepcopy(frozen), tmp_path / "frozen.safetensors")
    assert torch.equal(again(images), new(images))


def test_a_network_without_layers_is_refused_by_name():
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
    made, x = dcl.plan(model, input_size=(32,), width=4), torch.randn(2, 32)
    exported = torch.export.export(model, (x,))
    for other in (exported, exported.module(), torch.jit.trace(model, x), print):
        with pytest.raises(TypeError, match=r"no layers to convert|convert_ takes a network"):
            dcl.convert_(other, made, init="random")


def test_planning_leaves_the_statistics_of_a_norm_that_always_trains():
    class Always(nn.BatchNorm2d):
        def train(self, _=True):
            return super().train(True)

    model = nn.Sequential(nn.Conv2d(3, 32, 3), Always(32), nn.ReLU())
    before = {name: value.clone() for name, value in model.named_buffers()}
    dcl.plan(model, input_size=(3, 8, 8), batch=2)
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


def fitted(**arguments):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    return dcl.convert_(model, dcl.plan(model, (16,), width=4), init="fit", **arguments)


def test_a_quick_fit_is_silent(capsys):
    fitted()
    fitted(progress=False)
    assert capsys.readouterr() == ("", "")


def test_without_a_terminal_a_fit_begins_with_its_estimate_on_stderr(capsys):
    assert fitted(progress=True).fits == fitted().fits
    out, err = capsys.readouterr()
    assert out == ""
    assert re.match(r"0 of 2 layers fitted · 0 s · about \d+ s left\n", err), err


def test_a_fit_that_will_take_long_shows_its_progress(capsys, monkeypatch):
    monkeypatch.setattr(apply, "measure_pace", lambda _: 1e-6)
    fitted()
    assert "0 of 2 layers fitted · 0 s · about " in capsys.readouterr().err
    fitted(progress=False)
    monkeypatch.setenv("RANK", "1")
    fitted()
    assert capsys.readouterr() == ("", "")


def test_in_a_terminal_a_fit_shows_a_bar_and_takes_it_away(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    fitted(progress=True)
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", terminal.getvalue())
    assert "of 2 layers fitted" in shown
    assert terminal.getvalue().rstrip("\r\n").endswith("\x1b[2K")


@pytest.mark.parametrize("progress", [1, "yes", 0.0])
def test_progress_is_a_flag_or_none(progress):
    with pytest.raises(TypeError, match=f"progress must be True, False or None .*, got {progress!r}"):
        fitted(progress=progress)
