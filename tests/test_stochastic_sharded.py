"""The stochastic strategy and ε under FSDP2, on the CPU with gloo: as the same network trained in one process."""

import os

import pytest
import torch
from tests.processes import spawn
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torch_dcl import DCLConv2d, DCLLinear, follow_optimizer, seed_branches_

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1, amsgrad=True),
}


def network():
    """Rows of a branch lie on two ranks, and the last rank of two has fewer: 3 × 3, 1 + 2 + 4 and 3 biases."""
    torch.manual_seed(0)
    strategy = {"branches": 3, "strategy": "stochastic"}
    model = nn.Sequential(
        DCLConv2d(3, 8, 3, width=3, norm_layer=nn.BatchNorm2d, **strategy),
        nn.Flatten(),
        DCLLinear(32, 8, width=(1, 2, 4), eps=0.0123, **strategy),
        nn.Linear(8, 2),
    )
    seed_branches_(model, 1)
    return model


def sharded(mesh, model=None):
    model = network() if model is None else model
    for module in (model[0], model):
        fully_shard(module, mesh=mesh)
    assert isinstance(model[0].fusion.weight, DTensor)
    return model


def trained(model, make, hold_idle=True):
    optimizer = make(model.parameters())
    follow_optimizer(model, optimizer, hold_idle=hold_idle)
    for step in range(5):
        x = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model, optimizer


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_training(mesh, make, hold_idle):
    ours, our_optimizer = trained(sharded(mesh), make, hold_idle)
    plain, optimizer = trained(network(), make, hold_idle)
    for (name, mine), expected in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(whole(mine), expected, rtol=1e-5, atol=1e-6, msg=name)
        for what, moment in optimizer.state[expected].items():
            found = whole(our_optimizer.state[mine][what])
            torch.testing.assert_close(found, moment, rtol=1e-5, atol=1e-6, msg=f"{what} of {name}")
    for mine, expected in zip(ours.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


def check_epsilon(mesh):
    """The full state of a sharded network, as rank 0 would save it, given to networks with another ε on all ranks."""
    state = get_model_state_dict(sharded(mesh), options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if distributed.get_rank() == 0:
        assert state["2.fusion._extra_state"].item() == 0.0123
    else:
        assert state == {}
    other = network()
    other[2].fusion.eps = 0.5
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(sharded(mesh, other), state, options=options)
    assert other[2].eps == 0.0123


@pytest.fixture
def mesh(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("hold_idle", [True, False])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_one_rank_trains_as_without_sharding(mesh, make, hold_idle):
    check_training(mesh, make, hold_idle)


def test_the_full_state_of_one_rank_has_epsilon(mesh):
    check_epsilon(mesh)


def run_rank(rank, folder):
    os.environ["OMP_NUM_THREADS"] = "1"
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for make in OPTIMIZERS.values():
        check_training(mesh, make, hold_idle=True)
    check_epsilon(mesh)
    distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_train_as_without_sharding(tmp_path):
    spawn(run_rank, (str(tmp_path),), 2)
