"""Training that stops between two steps, and values that must not be applied."""

import math

import pytest
import torch
from torch import nn

from torch_dcl.files import read_sealed
from torch_dcl.fleet import Fleet, Member, Schedule
from torch_dcl.fleet.concurrent import train_concurrently

STEPS = 4  # of an epoch
KEY = "torch_dcl_fleet"


def make_fleet(*, epochs=3, lr=0.05, stacked=True, networks=3, device="cpu"):
    torch.manual_seed(5)
    data = torch.randint(0, 256, (20, 6, 6), dtype=torch.uint8), torch.randint(0, 4, (20,))
    made = [
        nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4))
        for _ in range(networks)
    ]
    members = [Member(f"network {i}", "data", i, lr, Schedule(epochs, drops=(0.7,))) for i in range(networks)]
    return Fleet(made, members, {"data": data}, batch=5, stacked=stacked, device=device, deterministic=True)


def weights(fleet, row=None):
    rows = range(len(fleet)) if row is None else [row]
    return torch.cat([p.detach().flatten() for i in rows for p in fleet.network(i).parameters()])


def after(count):
    """Says to stop when it was asked so often."""
    asked = iter(range(count))
    return lambda: next(asked, None) is None


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("stop", [1, 3, STEPS, STEPS + 2, 3 * STEPS - 1])
def test_a_fleet_that_stops_at_any_step_and_resumes_ends_with_the_same_bits(tmp_path, stacked, stop):
    whole, stopped, resumed = (make_fleet(stacked=stacked) for _ in range(3))
    whole.train()
    stopped.train(should_stop=after(stop))
    assert stopped.epoch * STEPS + stopped.step == stop
    stopped.save(tmp_path / "fleet.safetensors", {"seconds": 1.5})
    assert resumed.load(tmp_path / "fleet.safetensors") == {"seconds": 1.5}
    resumed.train()
    assert torch.equal(weights(resumed), weights(whole))
    assert resumed.history == whole.history
    # The one that stopped resumes without a checkpoint as well.
    stopped.train()
    assert torch.equal(weights(stopped), weights(whole))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("stacked", [True, False])
def test_on_a_gpu_a_fleet_stops_resumes_and_refuses_what_is_not_finite_inside_of_its_graph(tmp_path, stacked):
    whole, stopped, resumed = (make_fleet(stacked=stacked, device="cuda") for _ in range(3))
    whole.train()
    stopped.train(should_stop=after(STEPS + 2))
    stopped.save(tmp_path / "fleet.safetensors")
    resumed.load(tmp_path / "fleet.safetensors")
    resumed.train()
    assert torch.equal(weights(resumed), weights(whole))
    assert resumed.history == whole.history
    wild = make_fleet(stacked=stacked, device="cuda", lr=1e30)
    wild.train()
    assert set(wild.history.stopped) == {0, 1, 2}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_fleets_that_train_concurrently_stop_together_and_go_on():
    whole, stopped = ([make_fleet(device="cuda"), make_fleet(stacked=False, device="cuda")] for _ in range(2))
    for fleet in whole:
        fleet.train(1)
    train_concurrently(stopped, after(2))
    assert [fleet.step for fleet in stopped] == [2, 2]
    train_concurrently(stopped)
    assert all(torch.equal(weights(a), weights(b)) for a, b in zip(whole, stopped, strict=True))


def test_fleets_that_train_concurrently_stop_together_and_go_on():
    whole, stopped = [make_fleet(), make_fleet(lr=0.01)], [make_fleet(), make_fleet(lr=0.01)]
    for fleet in whole:
        fleet.train(1)
    train_concurrently(stopped, after(2))
    assert [fleet.epoch for fleet in stopped] == [0, 0]
    train_concurrently(stopped)
    assert all(torch.equal(weights(a), weights(b)) for a, b in zip(whole, stopped, strict=True))


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_not_applied_and_touches_no_other_network(monkeypatch, stacked, value):
    fleet, others = make_fleet(stacked=stacked), make_fleet(stacked=stacked)
    others.train()
    real, before = fleet.stack.gradients, []

    def broken(images, labels):
        losses, gradients = real(images, labels)
        if int(fleet._step) == STEPS + 1:
            before.append(weights(fleet, 1))
            gradients[0][1].view(-1)[3] = value
        return losses, gradients

    monkeypatch.setattr(fleet.stack, "gradients", broken)
    fleet.train()
    assert fleet.history.stopped == {1: 1}
    assert torch.equal(weights(fleet, 1), before[0])
    assert torch.equal(weights(fleet, 0), weights(others, 0))
    assert torch.equal(weights(fleet, 2), weights(others, 2))


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("overflowing", ["gradient", "moment", "weight"])
def test_what_overflows_in_the_very_last_step_is_noticed_and_neither_applied_nor_saved(
    monkeypatch, tmp_path, stacked, overflowing
):
    fleet = make_fleet(epochs=1, networks=2, stacked=stacked)
    real, name = fleet.stack.gradients, next(iter(fleet._moments))
    weight, moment = (values[name].detach()[1].view(-1) for values in (fleet._parameters, fleet._moments))

    def steep(images, labels):
        losses, gradients = real(images, labels)
        if int(fleet._step) == STEPS - 1:
            if overflowing == "gradient":
                gradients[0][1].view(-1)[0] = math.inf
            elif overflowing == "moment":  # 1.9 times the largest number
                moment[0], fleet.momentum = 3.4e38, 1.9
            else:
                weight[0], moment[0] = 3.4e38, -3.4e38
        return losses, gradients

    monkeypatch.setattr(fleet.stack, "gradients", steep)
    fleet.train()
    assert fleet.history.stopped == {1: 0}
    assert [math.isnan(loss) for loss in fleet.history.train_loss[0]] == [False, True]
    fleet.save(tmp_path / "fleet.safetensors")
    tensors, _ = read_sealed(tmp_path / "fleet.safetensors", KEY)
    assert all(value.isfinite().all() for value in tensors.values() if value.is_floating_point())
