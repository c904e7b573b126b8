"""What a person expects of the check of ``convert_``: a network that would fail is left alone, and no trace is left."""

import contextlib
import copy
import itertools
import random

import numpy as np
import pytest
import torch
from torch import nn

import torch_dcl as dcl
from torch_dcl.convert import apply


class Network(nn.Module):
    """Linear, batch norm, ReLU, and whatever a test wants to happen in a forward."""

    def __init__(self, happening=lambda _: None, norm=True):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32) if norm else nn.Identity(), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
        self.drop, self.head = nn.Dropout(), nn.Linear(32, 2)
        self.happening = happening

    def forward(self, x):
        self.happening(self)
        return self.head(self.drop(self.second(self.first(x))))

    @property
    def converted(self):
        return not isinstance(self.first[0], nn.Linear)


def planned(model, **arguments):
    plan = dcl.plan(model, (32,), **{"branches": 3, "width": 2, "strategy": "stochastic", **arguments})
    assert [row.name for row in plan.selected] == ["first.0", "second.0"]
    return plan


def in_training(model):
    return model.training and torch.is_grad_enabled()


def in_inference(model):
    return not model.training and not torch.is_grad_enabled()


@pytest.mark.parametrize(("when", "mode"), [(in_training, "training mode"), (in_inference, "eval mode")])
@pytest.mark.parametrize("norm", [True, False])
def test_a_network_that_would_fail_in_one_mode_is_left_alone(monkeypatch, when, mode, norm):
    def reads_what_a_linear_has(model):
        if when(model):
            model.second[0].a_thing_of_linear_alone  # noqa: B018

    monkeypatch.setattr(nn.Linear, "a_thing_of_linear_alone", 1, raising=False)
    monkeypatch.setattr(apply, "fit_", lambda *_, **__: pytest.fail("fitted before the check"))
    model = Network(reads_what_a_linear_has, norm=norm)
    plan, modules, state = planned(model), list(model.modules()), copy.deepcopy(model.state_dict())
    for init in ("random", "fit"):
        with pytest.raises(
            ValueError, match=rf"fails on the plan's example in {mode}, the plain one does not"
        ) as caught:
            dcl.convert_(model, plan, init=init)
        message = str(caught.value)
        assert "In 'second.0' (DCLLinear): AttributeError" in message
        assert "Nothing was changed" in message
        assert "check=False" in message
        assert isinstance(caught.value.__cause__, AttributeError)
        assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
        torch.testing.assert_close(dict(model.state_dict()), dict(state), rtol=0, atol=0)
    dcl.convert_(model, plan, init="random", check=False)
    assert model.converted


class Listed(nn.Module):
    """A network that calls some of its modules by a list, which torch does not know."""

    def __init__(self, *, listed):
        super().__init__()
        self.layer, self.norm, self.relu, self.head = nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2)
        self.kept = {name: getattr(self, name) for name in listed}

    def forward(self, x):
        for name in ("layer", "norm", "relu", "head"):
            x = (self.kept.get(name) or getattr(self, name))(x)
        return x


@pytest.mark.parametrize(("listed", "named"), [(["layer"], "'layer'"), (["norm", "layer"], "'layer', 'norm'")])
def test_a_network_that_holds_its_layers_in_a_list_besides_is_left_alone(listed, named):
    model = Listed(listed=listed)
    plan, modules, state = dcl.plan(model, (32,), width=2), list(model.modules()), copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=f"still calls the old {named}: .* Nothing was changed. .* nn.ModuleList"):
        dcl.convert_(model, plan, init="fit")
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    torch.testing.assert_close(dict(model.state_dict()), dict(state), rtol=0, atol=0)


class Chosen(nn.Module):
    """A network that calls its layers by their class."""

    def __init__(self, by_class):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(32, 32, 1) for _ in range(2))
        self.last, self.head, self.by_class = nn.Linear(32, 32), nn.Linear(32, 2), by_class

    def forward(self, x):
        x = x[..., None]
        for layer in self.layers:
            if isinstance(layer, self.by_class):
                x = layer(x).relu()
        return self.head(self.last(x[..., 0]).relu())


def test_a_network_that_would_skip_the_new_layers_is_left_alone():
    model = Chosen(nn.Conv1d)
    plan, modules = dcl.plan(model, (32,), width=2), list(model.modules())
    with pytest.raises(ValueError, match=r"does not call the new 'layers\.0', 'layers\.1', .* Nothing was changed"):
        dcl.convert_(model, plan, init="fit")
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    dcl.convert_(model, plan.only("last"), init="fit")
    other = Chosen(nn.Module)
    dcl.convert_(other, plan, init="fit")
    assert isinstance(other.layers[0], dcl.DCLConv1d)


class Experts(nn.Module):
    """A mixture of experts, of which values choose one, and in training a dice throws one out."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
        self.head = nn.Linear(32, 2)

    def forward(self, x):
        x = self.body(x)
        for _ in range(2):
            chosen = [int(x.argmax()) % 8] if not self.training else torch.randperm(8)[:4].tolist()
            x = sum(self.experts[i](x).relu() for i in (chosen if self.chooses else range(8)))
        return self.head(x)


def test_a_network_whose_values_choose_other_layers_is_converted():
    for seed in range(6):
        torch.manual_seed(seed)
        model = Experts()
        model.chooses = False
        plan = dcl.plan(model, (32,), width=2)
        assert len(plan.selected) == 8
        model.chooses = True
        dcl.convert_(model, plan, init="random")
        assert isinstance(model.experts[7], dcl.DCLLinear)


def test_a_relu_or_a_head_in_a_list_is_no_obstacle():
    model = Listed(listed=["relu", "head"])
    dcl.convert_(model, dcl.plan(model, (32,), width=2), init="random")
    assert isinstance(model.layer, dcl.DCLLinear)


@pytest.mark.parametrize("when", [in_training, in_inference])
def test_a_mode_in_which_the_plain_network_fails_too_says_nothing(when):
    def fails(model):
        if when(model) and planning_is_over:
            raise ValueError("In training mode, targets should be passed")

    planning_is_over = False
    model = Network(fails)
    plan = planned(model)
    planning_is_over = True
    dcl.convert_(model, plan, init="random")
    assert model.converted


def test_a_network_in_another_dtype_than_the_plan_is_converted():
    model = Network()
    plan = planned(model)
    dcl.convert_(model.double(), plan, init="random")
    assert model.converted


def test_too_little_memory_is_no_reason_to_refuse():
    def runs_out(model):
        if model.converted:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model = Network(runs_out)
    dcl.convert_(model, planned(model), init="random")
    assert model.converted


def disturb(model):
    """Draws from every generator, keeps what it saw, counts, and sets flags."""
    model.last = model.head.weight * 2 + torch.rand(()) + random.random() + np.random.rand()
    model.calls = getattr(model, "calls", 0) + 1
    model.drop.eval()


@pytest.mark.parametrize("init", ["random", "fit"])
def test_the_check_leaves_no_trace(init):
    def converted(check):
        torch.manual_seed(4)
        random.seed(4)
        np.random.seed(4)
        model = Network(disturb)
        model.hand_built = dcl.DCLLinear(32, 32, branches=3, width=2, strategy="stochastic")
        dcl.advance_branches_(model, 11)
        model.hand_built.fusion.advanced = False
        model.first[1].eval()
        model.calls = 0
        plan = planned(model)
        assert (model.calls, hasattr(model, "last"), model.drop.training) == (0, False, True)
        dcl.convert_(model, plan, init=init, check=check)
        return model, (torch.rand(3), random.random(), np.random.rand())

    def look(model):
        names = [name for name, _ in model.named_modules()]
        flags = [(m.training, getattr(m, "advanced", None)) for m in model.modules()]
        return names, flags, model.calls, hasattr(model, "last")

    (checked, after), (unchecked, expected) = converted(True), converted(False)
    assert look(checked) == look(unchecked)
    assert checked.calls == 0
    assert not checked.second[0].fusion.advanced
    torch.testing.assert_close(dict(checked.state_dict()), dict(unchecked.state_dict()), rtol=0, atol=0)
    assert torch.equal(after[0], expected[0])
    assert after[1:] == expected[1:]
    copy.deepcopy(checked)


def test_the_example_is_not_changed_by_a_forward_in_place():
    class InPlace(nn.Sequential):
        def forward(self, x):
            return super().forward(x.add_(1))

    model, example = InPlace(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)), torch.zeros(2, 32)
    plan = dcl.plan(model, example=example, width=2)
    dcl.convert_(model, plan, init="random")
    assert not example.any()


@pytest.mark.parametrize("fails", [True, False])
def test_parameters_that_a_forward_changes_are_as_before(fails):
    """As the teacher of a momentum encoder does in training."""

    def follow(model):
        if model.training:
            model.head.weight.data.mul_(0.9)
            model.head.bias.data = model.head.bias.data + 1
        if fails and model.converted:
            raise ValueError("no DCL here")

    model = Network(follow, norm=False)
    before, plan = copy.deepcopy(model.head.state_dict()), planned(model)
    with pytest.raises(ValueError, match="no DCL here") if fails else contextlib.nullcontext():
        dcl.convert_(model, plan, init="random")
    torch.testing.assert_close(dict(model.head.state_dict()), dict(before), rtol=0, atol=0)


def counting():
    calls = itertools.count()
    return calls, Network(lambda _: next(calls))


@pytest.mark.parametrize("batch", [1, 64])
def test_every_mode_is_run_once_on_each_network_with_one_input(batch):
    sizes = []
    model = Network(norm=False)
    plan = planned(model, batch=batch)
    model.first.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    dcl.convert_(model, plan, init="random")
    assert sizes == [1] * 4


def test_without_an_example_nothing_is_run():
    calls, model = counting()
    plan = planned(model)
    taken = next(calls)
    dcl.convert_(model, dcl.Plan.from_json(plan.to_json()), init="random")
    _, empty = counting()
    dcl.convert_(empty, plan.without("*"), init="random")
    _, skipped = counting()
    dcl.convert_(skipped, plan, init="random", check=False)
    assert next(calls) == taken + 1


def test_a_network_on_the_meta_device_is_converted_without_a_run():
    with torch.device("meta"):
        calls, model = counting()
    plan = planned(model)
    taken = next(calls)
    dcl.convert_(model, plan, init="random")
    assert model.converted
    _, real = counting()
    dcl.convert_(real, plan, init="random")
    assert real.converted
    assert next(calls) == taken + 1


def test_a_network_converted_on_the_meta_device_is_initialised_by_apply():
    def network():
        return nn.Sequential(nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 2, 1))

    def initialise(module):
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    with torch.device("meta"):
        empty = network()
    plan, real = dcl.plan(network(), (64, 8, 8)), network()
    for model in (empty, real):
        dcl.convert_(model, plan, init="random")
    empty.to_empty(device="cpu").apply(initialise)
    for (name, tensor), expected in zip(empty.state_dict().items(), real.state_dict().values(), strict=True):
        if name.startswith("0."):
            drawn = tensor.dim() > 1  # from one distribution
            pair = (tensor.std(), expected.std()) if drawn else (tensor, expected)
            torch.testing.assert_close(*pair, rtol=0.05, atol=0.0)


def test_an_interruption_of_the_check_leaves_the_network_alone():
    def interrupted(model):
        if model.converted and not model.training:
            raise KeyboardInterrupt

    model = Network(interrupted)
    plan, modules = planned(model), list(model.modules())
    with pytest.raises(KeyboardInterrupt):
        dcl.convert_(model, plan, init="random")
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert all(module.training for module in modules)


def test_a_network_that_waits_for_other_processes_in_training_is_planned_and_converted_by_one_of_them(tmp_path):
    """As a momentum encoder gathers the keys of all processes: the others may not be planning."""
    sums = []

    def gathers(model):
        if model.training:
            sums.append(torch.ones(1))
            torch.distributed.all_reduce(sums[-1])
            sums.append("ran")

    model = Network(gathers, norm=False)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        dcl.convert_(model, planned(model), init="random")
    finally:
        torch.distributed.destroy_process_group()
    assert model.converted
    assert sums
    assert "ran" not in sums
