"""What a person expects of ``plan(select="faster")``: a network that is not slower, and figures for what is left out.

No test measures time. ``measure.race`` is replaced by a clock that runs each contender once, sees which layers it
calls, and makes up a time from them.
"""

import copy
import dataclasses
import json
import math
import random
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from scipy import stats
from tests.halves import slow
from torch import nn
from torch.utils import benchmark
from torch.utils._python_dispatch import TorchDispatchMode

import torch_dcl as dcl
from torch_dcl.convert import measure, planner, selection
from torch_dcl.convert.rows import Choice, Comparison
from torch_dcl.convert.trace import trace
from torch_dcl.module import _DCL

CPU = torch.device("cpu")
PLAIN = 0.4
"""Milliseconds of a plain layer on the clock."""


def rows(plan):
    return {row.name: row for row in plan.rows}


def net(*widths, norm=False):
    """Linear layers with ReLU, and a head of 10."""
    layers = []
    for i, (n, m) in enumerate(zip((256, *widths), widths, strict=False)):
        layers += [(f"fc{i}", nn.Linear(n, m))] + ([(f"bn{i}", nn.BatchNorm1d(m))] if norm else [])
        layers += [(f"relu{i}", nn.ReLU())]
    return nn.Sequential(OrderedDict([*layers, ("head", nn.Linear(widths[-1], 10))]))


class Clock:
    """Stands for ``race``: a plain layer takes 0.4 ms, a DCL layer that by its width, a network what its layers take.

    Args:
        ratios: Time of a DCL layer by its output channels, in plain layers; the first is that of every CUDA graph.
        overhead: What each DCL layer costs a whole network besides, in plain layers.
        wobble: How far the time of DCL varies around its median from round to round.
    """

    def __init__(self, ratios, overhead=0.0, wobble=0.01):
        self.ratios, self.overhead, self.wobble = ratios, overhead, wobble
        self.races = []
        self.calls = []
        """Of every module called: training mode, whether gradients are on, whether autocast is."""

    def __call__(self, contenders, *, rounds=5, seconds=None):
        del seconds
        seen = {name: self.layers_of(run) for name, run in contenders.items()}
        self.races.append(seen)
        middle = (rounds - 1) / 2
        waves = [1 + self.wobble * (i - middle) / middle for i in range(rounds)]
        return {
            name: [self.time(name, layers) * (wave if name == "dcl" else 1) for wave in waves]
            for name, layers in seen.items()
        }

    def layers_of(self, run):
        called = []

        def note(module, *_):
            called.append(module)
            self.calls.append((module.training, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

        handle = nn.modules.module.register_module_forward_hook(note)
        try:
            run()
        finally:
            handle.remove()
        inner = {part for layer in called if isinstance(layer, _DCL) for part in layer.modules() if part is not layer}
        return [m for m in called if isinstance(m, (nn.Linear, nn.Conv2d, _DCL)) and m not in inner]

    def time(self, name, layers):
        if not layers:  # a CUDA graph, in which no module is called: one unit
            return PLAIN * (next(iter(self.ratios.values())) if name == "dcl" else 1)
        dcls = [layer for layer in layers if isinstance(layer, _DCL)]
        whole = any(getattr(layer, "out_features", 0) == 10 for layer in layers)
        units = (
            len(layers)
            - len(dcls)
            + sum(self.ratios[layer.out_features] if isinstance(layer, dcl.DCLLinear) else 0.5 for layer in dcls)
        )
        return PLAIN * (units + (self.overhead * len(dcls) if whole else 0))

    @property
    def networks(self):
        """How many DCL layers each network had that was raced."""
        races = [race["dcl"] for race in self.races if any(getattr(m, "out_features", 0) == 10 for m in race["dcl"])]
        return [sum(isinstance(m, _DCL) for m in layers) for layers in races]


@pytest.fixture
def clock(monkeypatch):
    def start(ratios, **settings):
        made = Clock(ratios, **settings)
        monkeypatch.setattr(measure, "race", made)
        return made

    return start


# Which units stay


def test_units_that_are_slower_are_left_with_their_figures(clock):
    clock({128: 0.5, 96: 1.06, 80: 1.01, 64: 0.9}, wobble=0.02)
    plan = dcl.plan(net(128, 96, 80, 64), (256,), batch=4, ratio=0.1, measure=True, select="faster")
    assert [row.name for row in plan.selected] == ["fc0", "fc2", "fc3"]
    found = rows(plan)
    # Of 9 rounds all but the slowest and the fastest hold the median.
    assert found["fc1"].reason == "slower: 0.424 ms for 0.4 plain (1.06 ± 0.02), eager training step"
    assert found["fc2"].comparison == pytest.approx((0.4, 0.404, 0.02 * 0.75 * 1.01))
    assert found["head"].reason == "head of the network"
    assert found["fc0"].comparison.ratio == pytest.approx(0.5)
    # (1 + 4 plain layers: 5; three of them at 0.5, 1.01 and 0.9: 4.41)
    # Of 21 rounds the 6th to the 16th hold the median, and the wobble is linear: half of it.
    assert plan.choice.network == pytest.approx((2.0, 1.764, 4.41 / 5 * 0.01))
    text = str(plan)
    assert "eager training step: 2 → 1.76 ms, 0.88 ± 0.01 of plain." in text
    assert found["fc1"].reason + " (1): fc1" in text
    assert text.splitlines()[2].split()[-3:] == ["0.4", "0.2", "0.50"]


def test_where_the_times_of_a_unit_do_not_tell_those_of_the_network_decide(clock):
    ratios = {128: 0.9, 96: 1.1}
    clock(ratios, wobble=0.2)  # of a unit 1.1 ± 0.17; the network stays within 5 %
    assert len(dcl.plan(net(*ratios), (256,), batch=4, ratio=0.1, select="faster").selected) == 2
    clock(ratios, overhead=0.2, wobble=0.2)  # 1.13 with both units, 1.03 with one
    plan = dcl.plan(net(*ratios), (256,), batch=4, ratio=0.1, select="faster")
    assert [row.name for row in plan.selected] == ["fc0"]
    assert rows(plan)["fc1"].reason.startswith("slower in the network: 1.13 ± 0.11 with the 2 fastest units")


def test_a_choice_by_time_measures_without_being_told(clock):
    asked = clock({128: 0.5, 64: 0.5})
    plan = dcl.plan(net(128, 64), (256,), batch=4, ratio=0.1, select="faster")
    assert len(asked.races) == 3
    assert len(plan.selected) == 2


def test_the_rule_of_weights_is_what_it_was(clock):
    asked = clock({})
    plan = dcl.plan(net(128, 64), (256,), ratio=0.1)
    assert [row.name for row in plan.selected] == ["fc0", "fc1"]
    assert (asked.races, plan.choice, plan.device) == ([], None, None)


def test_a_network_slower_than_its_units_suggest_loses_the_slowest_of_them(clock):
    ratios = {128: 0.6, 120: 0.9, 112: 0.7, 104: 0.97}
    asked = clock(ratios, overhead=0.2)
    plan = dcl.plan(net(*ratios), (256,), batch=4, ratio=0.1, select="faster")
    # With overhead a unit costs 0.8, 1.1, 0.9 and 1.17 of plain: all four together 0.97, which is faster.
    assert len(plan.selected) == 4
    assert asked.networks == [4]
    asked = clock(ratios, overhead=0.4)
    plan = dcl.plan(net(*ratios), (256,), batch=4, ratio=0.1, select="faster")
    # Now 1.0, 1.3, 1.1 and 1.37: only the first alone is not slower.
    assert [row.name for row in plan.selected] == ["fc0"]
    assert asked.networks == [4, 2, 1]
    assert plan.choice.network.ratio == pytest.approx(1)
    found = rows(plan)
    assert found["fc1"].reason == (
        "slower in the network: 1.15 ± 0.01 with the 4 fastest units, by itself 0.90 ± 0.01, eager training step"
    )
    assert found["fc2"].reason.startswith("slower in the network: 1.02 ± 0.01 with the 2 fastest units, by itself 0.70")
    assert all(not row.selected and row.status == "left" for name, row in found.items() if name != "fc0")


def test_a_network_within_the_spread_of_the_plain_one_keeps_its_units(clock):
    ratios = {128: 0.9, 120: 0.9}
    clock(ratios, overhead=0.16, wobble=0.1)  # 1.04 of plain in the network with both units, 1.02 with one
    assert len(dcl.plan(net(*ratios), (256,), batch=4, ratio=0.1, select="faster").selected) == 2
    clock(ratios, overhead=0.16, wobble=0.01)
    assert not dcl.plan(net(*ratios), (256,), batch=4, ratio=0.1, select="faster").selected


def test_where_no_unit_is_faster_the_plan_says_so(clock):
    asked = clock({128: 1.3, 64: 1.1})
    plan = dcl.plan(net(128, 64), (256,), batch=4, ratio=0.1, select="faster")
    assert plan.selected == ()
    assert str(plan).splitlines()[0] == (
        "No unit is faster here: the best unit, fc1, takes 1.10 ± 0.01 of the plain one's time (eager training step)."
    )
    assert asked.networks == []
    assert plan.weights_after == plan.weights


def test_where_no_unit_makes_the_network_faster_the_plan_says_so(clock):
    asked = clock({128: 0.9, 64: 0.8}, overhead=1.0)
    plan = dcl.plan(net(128, 64), (256,), batch=4, ratio=0.1, select="faster")
    assert plan.selected == ()
    assert asked.networks == [2, 1]
    told = str(plan).splitlines()[0]
    assert told.startswith("No unit makes the network faster here: the best unit, fc1, takes 0.80 ± 0.01 of the plain")
    assert told.endswith("but the network 1.27 ± 0.01.")
    assert "slower in the network: 1.27 ± 0.01 with this unit, by itself 0.80 ± 0.01" in rows(plan)["fc1"].reason


@pytest.mark.parametrize("rounds", [2, 5, 8, 9, 15, 21, 25, 100])
def test_the_spread_holds_the_interval_that_scipy_gives_the_median(rounds):
    plain = torch.rand(rounds, dtype=torch.float64, generator=torch.Generator().manual_seed(rounds)) + 1
    dcl_ms = torch.rand(rounds, dtype=torch.float64, generator=torch.Generator().manual_seed(-rounds)) + 1
    comparison = measure.judge(plain.tolist(), dcl_ms.tolist())
    ratios = (dcl_ms / plain).numpy()
    interval = stats.quantile_test(ratios).confidence_interval(0.95)
    low, high = (interval.low, interval.high) if rounds >= 6 else (ratios.min(), ratios.max())
    assert comparison.plain == pytest.approx(np.median(plain))
    assert comparison.ratio == pytest.approx(np.median(dcl_ms) / np.median(plain))
    assert comparison.spread == pytest.approx(max(comparison.ratio - low, high - comparison.ratio))


def test_a_wide_spread_excuses_five_percent_and_no_more():
    assert not Comparison(1.0, 1.04, 0.3).is_slower
    assert Comparison(1.0, 1.06, 0.3).is_slower
    assert Comparison(1.0, 1.02, 0.01).is_slower
    assert not Comparison(1.0, 0.98, 0.0).is_slower


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 32, 55])
def test_few_networks_are_measured_and_nearly_all_units_kept(count):
    slower, even = Comparison(1.0, 1.1, 0.01), Comparison(1.0, 1.0, 0.01)
    for limit in range(count + 1):
        kept, found = selection._bisect(count, lambda n, most=limit: slower if n > most else even)
        assert next(iter(found)) == count
        assert len(found) <= math.log2(count) + 2
        assert (kept == 0) == (limit == 0)
        assert limit - count // 8 <= kept <= limit
        assert kept == 0 or not found[kept].is_slower


def test_units_alike_are_timed_once(clock):
    asked = clock({128: 0.5})
    model = net(128, 128, 128, 128, norm=True)
    dcl.plan(model, (256,), batch=4, ratio=0.1, select="faster")
    assert len(asked.races) == 3  # the first, one of three, the network
    asked.races.clear()
    model.bn2.momentum = 0.3
    model.fc3.weight.requires_grad_(False)
    dcl.plan(model, (256,), batch=4, ratio=0.1, select="faster")
    assert len(asked.races) == 5


def test_a_long_choice_says_how_far_it_is(clock, monkeypatch, capsys):
    clock({128: 0.5, 64: 0.5, 96: 1.5})
    monkeypatch.setattr(selection, "EVERY", math.inf)
    dcl.plan(net(128, 64, 96), (256,), batch=4, ratio=0.1, select="faster")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(selection, "EVERY", 0)
    dcl.plan(net(128, 64, 96), (256,), batch=4, ratio=0.1, select="faster")
    told = [line.split(" · ")[0] for line in capsys.readouterr().err.splitlines()]
    assert told == [
        *(f"{n} of 3 kinds of units timed, eager training step" for n in (1, 2, 3)),
        "network with 2 of 2 units timed, 0.750 ± 0.004 of plain",
    ]


# How they are timed


@pytest.mark.parametrize(("phase", "state"), [("train", (True, True, False)), ("infer", (False, False, False))])
def test_the_phase_is_what_runs(clock, monkeypatch, phase, state):
    asked, backward = clock({128: 0.5, 64: 0.5}), Counter()
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: (backward.update(n=1), grad(*a, **k))[1])
    with torch.no_grad():  # a caller may have it, a training step does not
        plan = dcl.plan(net(128, 64, norm=True), (256,), batch=4, ratio=0.1, select="faster", phase=phase)
    assert set(asked.calls) == {state}
    assert backward["n"] == (7 if phase == "train" else 0)  # 2 · 2 units, the network twice, and one trial before
    assert plan.choice[:2] == ("eager", phase)
    assert ("fwd+bwd" in str(plan), "fwd ms" in str(plan)) == (phase == "train", phase == "infer")
    assert ("eager training step" in str(plan)) == (phase == "train")


@pytest.fixture
def graphs(monkeypatch):
    """What was compiled: of each graph, whether the shapes of its inputs are fixed."""
    seen, compiling = [], torch.compile

    def backend(graph, inputs):
        sizes = [n for given in inputs if isinstance(given, torch.Tensor) for n in given.shape]
        seen.append(not any(isinstance(n, torch.SymInt) for n in [*inputs, *sizes]))
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda f, **settings: compiling(f, backend=backend, **settings))
    return seen


@pytest.mark.parametrize("phase", ["train", slow("infer")])
def test_compiled_means_that_every_contender_is_compiled_once(clock, graphs, phase):
    asked = clock({128: 0.5, 96: 0.5})
    plan = dcl.plan(net(128, 96), (256,), batch=4, ratio=0.1, select="faster", mode="compile", phase=phase)
    assert len(plan.selected) == 2
    assert graphs == [True] * 6  # two units and the network, plain and converted
    assert len(asked.races) == 3
    assert f"compiled {'training step' if phase == 'train' else 'forward'}: " in str(plan)


def test_many_contenders_are_compiled_each_for_its_own_shape(graphs):
    """Dynamo keeps eight results for one piece of code, and takes a second shape for a dynamic one."""
    runs = [(measure._in_mode(nn.Sequential(nn.ReLU()), "compile"), torch.randn(3, 5 + i)) for i in range(10)]
    for run, x in runs * 2:
        assert torch.equal(run(x), x.relu())
    assert graphs == [True] * 10


@pytest.mark.parametrize(("mode", "torchs"), [("compile", None), ("reduce-overhead", "reduce-overhead")])
def test_the_two_ways_to_compile_are_torchs(mode, torchs, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "compile", lambda run, **settings: asked.append(settings) or run)
    run = measure._in_mode(nn.Sequential(nn.ReLU()), mode)
    assert asked == [{"dynamic": False, "mode": torchs}]
    assert torch.equal(run(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))


def test_in_the_graph_of_a_network_a_unit_has_no_graph_of_its_own(clock, monkeypatch):
    """Where it is captured, only the GPU's time counts."""
    clock({128: 0.5})
    modes, captured = [], []
    monkeypatch.setattr(torch, "compile", lambda run, **settings: modes.append(settings["mode"]) or run)
    monkeypatch.setattr(measure, "_captured", lambda steps, _: captured.append(len(modes)) or steps)
    monkeypatch.setattr(planner, "check_choice", lambda *_: None)
    dcl.plan(net(128), (256,), batch=4, ratio=0.1, select="faster", mode="reduce-overhead")
    assert modes == [None, None, "reduce-overhead", "reduce-overhead"]
    assert captured == [2]
    captured.clear()
    monkeypatch.setattr(measure, "_captured", lambda *_: captured.append(0))  # cannot be captured: timed as it runs
    plan = dcl.plan(net(128), (256,), batch=4, ratio=0.1, select="faster", mode="reduce-overhead")
    assert captured == [0]
    assert rows(plan)["fc0"].comparison.ratio == pytest.approx(0.5)


def test_nothing_is_compiled_in_eager_mode(clock, monkeypatch):
    clock({128: 0.5})
    monkeypatch.setattr(torch, "compile", None)
    dcl.plan(net(128), (256,), batch=4, ratio=0.1, select="faster")


@pytest.mark.parametrize("phase", ["train", "infer"])
def test_a_callers_autocast_holds_as_in_a_loop(clock, monkeypatch, phase):
    """On in the forward, off in the backward, and the weights are cast in every step."""

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            casts[-1] += func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter)
            return func(*args, **(kwargs or {}))

    asked, casts, backward = clock({128: 0.5, 96: 0.5}), [], set()
    grad = torch.autograd.grad

    def watched(*args, **kwargs):
        backward.add(torch.is_autocast_enabled("cpu"))
        return grad(*args, **kwargs)

    def twice(run, look=asked.layers_of):
        for _ in range(2):
            casts.append(0)
            with Casts():
                run()
        return look(run)

    asked.layers_of = twice
    monkeypatch.setattr(torch.autograd, "grad", watched)
    with torch.autocast("cpu", torch.bfloat16):
        plan = dcl.plan(net(128, 96), example=torch.randn(4, 256), ratio=0.1, select="faster", phase=phase)
        assert torch.is_autocast_enabled("cpu")
    assert {autocast for *_, autocast in asked.calls} == {True}
    assert backward == ({False} if phase == "train" else set())
    assert casts[::2] == casts[1::2]
    assert casts[0] >= 2  # weight and bias of the first plain unit
    assert len(plan.selected) == 2


def test_a_unit_has_the_input_and_the_gradients_that_it_has_in_the_network(clock, monkeypatch):
    clock({128: 0.5, 64: 0.5})
    inputs = []
    full = measure._full
    monkeypatch.setattr(measure, "_full", lambda network, x, run: (inputs.append(x), full(network, x, run))[1])
    dcl.plan(net(128, 64), example=torch.randn(7, 256), ratio=0.1, select="faster")
    assert [(tuple(x.shape), x.requires_grad) for x in inputs[::2]] == [((7, 256), False), ((7, 128), True)]


@pytest.mark.parametrize("by_time", [False, True])
def test_a_frozen_unit_is_timed_without_what_no_step_computes(clock, monkeypatch, by_time):
    clock({128: 0.5, 96: 0.5, 64: 0.5})
    trained, grad = [], torch.autograd.grad

    def watched(output, inputs, *args, **kwargs):
        trained.append(len(inputs))
        return grad(output, inputs, *args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", watched)
    model = net(128, 96, 64)
    model.fc0.requires_grad_(False)
    model.fc2.weight.requires_grad_(False)
    if by_time:
        dcl.plan(model, (256,), batch=4, ratio=0.1, select="faster")
        trained = trained[1:-2]  # without a trial before, and the network
    else:
        dcl.plan(model, (256,), batch=4, ratio=0.1, measure=True)
        trained = trained[:-2]
    # Nothing of fc0. Weight and bias of fc1, whose DCL layer has three. The input of fc2 and its bias.
    plain, converted, low_rank = [2, 2], [3, 2], [3, 2]
    assert trained == [
        n for units in zip(plain, converted, *([] if by_time else [low_rank]), strict=True) for n in units
    ]


def test_a_unit_keeps_its_batch_unless_a_batch_norm_would_see_one_value(clock, monkeypatch):
    clock({128: 0.5})
    inputs = []
    forward = measure._forward
    monkeypatch.setattr(measure, "_forward", lambda run, x: (inputs.append(tuple(x.shape)), forward(run, x))[1])
    images = nn.Sequential(nn.Conv2d(32, 64, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.Flatten(),
                           nn.Linear(64 * 36, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))  # fmt: skip
    dcl.plan(images, (32, 8, 8), ratio=0.1, select="faster", phase="infer")
    assert inputs[1:5:2] == [(1, 32, 8, 8), (2, 64 * 36)]  # after one trial of the network


def test_a_backward_pass_goes_to_what_is_trained():
    model = net(128, 64)
    x = torch.randn(2, 256)
    model.fc0.requires_grad_(False)
    needs = {name: trace(model, (x,), {}).calls[module][0].needs_grad for name, module in model.named_children()
             if isinstance(module, nn.Linear)}  # fmt: skip
    assert needs == {"fc0": False, "fc1": False, "head": True}
    assert trace(model, (x.requires_grad_(),), {}).calls[model.fc0][0].needs_grad


@pytest.mark.parametrize("phase", ["train", "infer"])
def test_the_network_is_left_as_it_was(monkeypatch, phase):
    monkeypatch.setattr(measure, "SECONDS", 1e-6)
    model = nn.Sequential(net(128, 64, norm=True)[:-1], nn.Dropout(0.5), nn.Linear(64, 10))
    model[0].bn0.eval()
    before, flags = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    dcl.plan(model, example=torch.randn(4, 256, generator=torch.Generator()), ratio=0.1, select="faster", phase=phase)
    assert [m.training for m in model.modules()] == flags
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not any(isinstance(m, _DCL) for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())


def test_a_real_clock_gives_a_plan_that_holds_its_promise(monkeypatch):
    monkeypatch.setattr(measure, "SECONDS", 1e-6)
    plan = dcl.plan(net(128, 64), (256,), batch=4, ratio=0.05, select="faster")
    timed = [row.comparison for row in plan.rows if row.comparison]
    assert len(timed) == 2
    assert all(time.plain > 0 and time.dcl > 0 and time.spread >= 0 for time in timed)
    assert all(row.comparison.ratio - row.comparison.spread <= 1 for row in plan.selected)
    assert not plan.selected or not plan.choice.network.is_slower


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here")
@pytest.mark.parametrize("phase", ["train", "infer"])
@pytest.mark.parametrize("mode", ["eager", "compile", "reduce-overhead", "graph"])
def test_on_a_gpu_every_mode_has_its_plan(mode, phase):
    model = nn.Sequential(nn.Conv2d(64, 128, 3, bias=False), nn.BatchNorm2d(128), nn.ReLU(), nn.Conv2d(128, 128, 3),
                          nn.ReLU(), nn.Flatten(), nn.Linear(128 * 12 * 12, 10)).cuda()  # fmt: skip
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(64, 64, 16, 16, device="cuda").to(memory_format=torch.channels_last)
    before = copy.deepcopy(model.state_dict())
    with torch.autocast("cuda", torch.bfloat16):
        plan = dcl.plan(model, example=x, measure=True, select="faster", mode=mode, phase=phase)
    assert [row.name for row in plan.rows if row.comparison] == ["0", "3"]
    assert not plan.selected or not plan.choice.network.is_slower
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here")
def test_a_network_that_asks_the_cpu_has_no_graph(clock):
    class Asks(nn.Sequential):
        def forward(self, x):
            y = super().forward(x)
            return y if y.sum().item() > 0 else -y

    clock({128: 0.5})
    with pytest.raises(ValueError, match="cannot be captured as a CUDA graph: it synchronises with the GPU"):
        dcl.plan(Asks(*net(128)).cuda(), (256,), batch=4, ratio=0.1, select="faster", mode="graph")


def test_graphs_in_which_no_module_is_called_have_times_and_their_network_none(clock, monkeypatch):
    """As on a GPU, where the unit is captured and the network is not."""
    clock({128: 0.5})
    captures = iter([{"plain": lambda: None, "dcl": lambda: None}, None])
    monkeypatch.setattr(measure, "_captured", lambda *_: next(captures))
    monkeypatch.setattr(planner, "check_choice", lambda *_: None)
    with pytest.raises(ValueError, match="the network cannot be captured as a CUDA graph: it synchronises"):
        dcl.plan(net(128), (256,), batch=4, ratio=0.1, select="faster", mode="graph")


@pytest.mark.parametrize(("step", "tick"), [(3e-7, 1e-9), (3e-7, 1e-3), (4e-4, 1e-3), (0.5, 1e-3)])
def test_a_step_shorter_than_the_tick_of_the_clock_has_its_time(monkeypatch, step, tick):
    """On a clock that only steps move, and that shows whole ticks."""
    passed = 0.0

    def run(seconds):
        nonlocal passed
        passed += seconds

    class Timer(benchmark.Timer):
        def __init__(self, *args, **settings):
            super().__init__(*args, timer=lambda: passed // tick * tick, **settings)

    monkeypatch.setattr(benchmark, "Timer", Timer)
    steps = {"plain": lambda: run(step), "dcl": lambda: run(step / 2)}
    times = measure.race(steps, seconds=0.02)
    assert all(len(measured) == measure.ROUNDS for measured in times.values())
    for name, expected in (("plain", 1000 * step), ("dcl", 500 * step)):
        assert all(abs(ms / expected - 1) <= 0.2 for ms in times[name]), times[name]
    assert measure.compare(steps, "eager", CPU, seconds=0.02).ratio == pytest.approx(0.5, rel=0.2)
    rounds = {len(measured) for measured in measure.race(steps, rounds=30, seconds=0.02).values()}
    assert rounds == {30 if step < 0.02 else measure.FEWEST}  # no minutes for a step of half a second


# The plan afterwards


def test_the_plan_goes_to_json_and_back(clock):
    clock({128: 0.5, 64: 1.2})
    plan = dcl.plan(net(128, 64), (256,), batch=4, ratio=0.1, select="faster", phase="infer")
    again = dcl.Plan.from_json(plan.to_json())
    assert again == plan
    assert again.choice == Choice("eager", "infer", plan.choice.network)
    assert str(again) == str(plan)
    assert isinstance(rows(again)["fc1"].comparison, Comparison)


def test_a_plan_from_before_is_read():
    plan = dcl.plan(net(128, 64), (256,), ratio=0.1)
    data = json.loads(plan.to_json())
    del data["choice"]
    for row in data["rows"]:
        del row["comparison"]
    assert dcl.Plan.from_json(json.dumps(data)) == plan


def test_a_slower_unit_may_be_named_and_the_network_is_not_measured_with_it(clock):
    clock({128: 0.5, 64: 1.2})
    model = net(128, 64)
    plan = dcl.plan(model, (256,), batch=4, ratio=0.1, select="faster")
    assert plan.only("fc0") == plan
    both = plan.only("fc0", "fc1")
    assert [row.name for row in both.selected] == ["fc0", "fc1"]
    assert both.choice.network is None
    assert "Whole network" not in str(both)
    assert "Slower than the layer it replaces" in str(both)
    with pytest.raises(ValueError, match=r"left alone \(slower: 0.48 ms for 0.4 plain \(1.20 ± 0.01\)"):
        plan.only("*1")
    dcl.convert_(model, both, init="random")
    assert str(plan.without("fc0")).startswith("No unit is selected.")


# What cannot be


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"select": "fastest"}, 'select must be "smaller" or "faster", got \'fastest\''),
        (
            {"select": "faster", "mode": "compiled"},
            'mode must be "eager", "compile", "reduce-overhead" or "graph", got \'compiled\'',
        ),
        ({"select": "faster", "phase": "eval"}, 'phase must be "train" or "infer", got \'eval\''),
        ({"select": ["faster"]}, r"select must be .* got \['faster'\]"),
        (
            {"select": "faster", "mode": "reduce-overhead"},
            'mode = "reduce-overhead" times CUDA graphs, and the network',
        ),
        ({"select": "faster", "mode": "graph"}, 'the network is on cpu; move it to a GPU, or take mode = "eager"'),
        ({"mode": "compile"}, 'mode = "compile" is for a choice by time; add select = "faster"'),
        ({"phase": "infer"}, 'phase = "infer" is for a choice by time; add select = "faster"'),
        ({"select": "faster", "budget": 0.5}, "budget = 0.5 chooses units by their weights.*leave one out"),
    ],
)
def test_what_cannot_be_chosen_is_refused_with_a_remedy(arguments, message):
    with pytest.raises(ValueError, match=message):
        dcl.plan(net(128), (256,), **arguments)


def test_a_network_on_the_meta_device_has_no_time():
    with pytest.raises(ValueError, match="needs a network with values to time, and this one is on the meta device"):
        dcl.plan(net(128).to("meta"), (256,), select="faster")


def test_a_network_that_does_not_train_on_the_example_says_what_to_do(clock):
    asked = clock({128: 0.5})
    told = r'fails on one input of 256: ValueError: Expected more than 1 value.* \(batch=\) .* or phase = "infer"'
    with pytest.raises(ValueError, match=f"eager training step .* {told}"):
        dcl.plan(net(128, norm=True), (256,), ratio=0.1, select="faster")
    frozen = net(128).requires_grad_(False)
    with pytest.raises(ValueError, match=r'fails on 4 inputs of 256: .* or phase = "infer"'):
        dcl.plan(frozen, (256,), batch=4, ratio=0.1, select="faster")
    assert asked.races == []
    assert dcl.plan(frozen, (256,), ratio=0.1, select="faster", phase="infer").selected


def test_outputs_in_a_dataclass_are_trained_too(clock):
    clock({128: 0.5})

    @dataclasses.dataclass
    class Output:
        logits: torch.Tensor
        name: str = "output"

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net(128)

        def forward(self, x):
            return Output(self.net(x))

    assert dcl.plan(Network(), (256,), batch=4, ratio=0.1, select="faster").selected
    timings = dcl.plan(Network(), (256,), batch=4, ratio=0.1, measure=True).timings
    assert timings["dcl"].full is not None


def test_a_frozen_network_has_no_training_step(clock):
    clock({128: 0.5})
    frozen = net(128).requires_grad_(False)
    with pytest.raises(
        ValueError, match=r'^an eager training step .* Give it a parameter to train, or phase = "infer"$'
    ):
        dcl.plan(frozen, (256,), batch=4, ratio=0.1, select="faster")
    assert dcl.plan(frozen, (256,), batch=4, ratio=0.1, select="faster", phase="infer").selected


def test_without_units_nothing_is_timed(clock):
    asked = clock({})
    plan = dcl.plan(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), (8,), select="faster")
    assert not plan.selected
    assert not asked.races
