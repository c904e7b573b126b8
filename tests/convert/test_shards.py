"""What a person expects of ``save_model`` with ``fully_shard``: one file, the same as without it."""

import json

import pytest
import torch
from safetensors import safe_open
from tests.processes import Process, importing
from torch import distributed, nn

import torch_dcl as dcl


class Net(nn.Module):
    """Tied weights, batch norms, a stochastic layer, a frozen layer, and sizes that do not divide by two."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 31, 3), nn.BatchNorm2d(31), nn.ReLU())
        self.body = nn.Sequential(nn.Linear(31, 63), nn.ReLU(), nn.Linear(63, 9))
        self.one, self.tied = nn.Linear(9, 1), nn.Linear(9, 1)
        self.tied.weight = self.one.weight

    def forward(self, x):
        y = self.body(self.conv(x).mean((2, 3)))
        return self.one(y) + self.tied(y.flip(0))


def converted():
    torch.manual_seed(0)
    model = Net()
    plan = dcl.plan(model, (3, 6, 6), branches=3, width=5, strategy="stochastic")
    dcl.convert_(model, plan.only("conv.0", "body.0"), init="random")
    with torch.no_grad():
        model.conv[0].fusion.norm.running_mean.normal_()
    model.conv[0].branch.weight.requires_grad_(False)
    return model


def sharded():
    """Every block and its DCL layer apart, as people do it, after a step in which all parameters were gathered."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    model = converted()
    for part in (model.conv[0], model.conv, model.body[0], model.body, model):
        fully_shard(part, mesh=mesh)
    model.eval()(torch.randn(2, 3, 6, 6))
    return model


def save_as_rank(folder, rank, world):
    """What every process does: save, and save where the first process cannot."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        model = sharded()
        dcl.save_model(model, folder / "sharded.safetensors")
        assert (folder / "sharded.safetensors").exists()  # in every process, once save_model is back
        with pytest.raises(FileNotFoundError if rank == 0 else RuntimeError) as caught:
            dcl.save_model(model, folder / "missing" / "m.safetensors")
        with pytest.raises(ValueError, match="is sharded; call load_model first"):
            dcl.load_model(model, folder / "sharded.safetensors")
        return str(caught.value)
    finally:
        distributed.destroy_process_group()


def assert_the_file_is_that_of_one_process(folder):
    model = converted()
    dcl.save_model(model, folder / "whole.safetensors")
    files = [folder / "whole.safetensors", folder / "sharded.safetensors"]
    tensors = []
    for path in files:
        with safe_open(path, framework="pt") as file:
            description = json.loads(file.metadata()["torch_dcl"])
            tensors.append((description, {name: file.get_tensor(name) for name in file.keys()}))
    assert tensors[0][0] == tensors[1][0]
    torch.testing.assert_close(tensors[0][1], tensors[1][1], rtol=0, atol=0)
    x = torch.randn(2, 3, 6, 6)
    loaded = dcl.load_model(Net, files[1])
    assert loaded.one.weight is loaded.tied.weight
    assert torch.equal(loaded.eval()(x), model.eval()(x))


def test_one_process_writes_its_shards_as_whole_tensors(tmp_path):
    save_as_rank(tmp_path, 0, 1)
    assert_the_file_is_that_of_one_process(tmp_path)


@pytest.mark.slow
def test_two_processes_write_one_file_together(tmp_path):
    program = (
        "import runpy, sys; from pathlib import Path; "
        f"save = runpy.run_path({__file__!r})['save_as_rank']; "
        f"print(save(Path({str(tmp_path)!r}), int(sys.argv[1]), 2))"
    )
    processes = [Process(["-c", program, str(rank)], env=importing()) for rank in range(2)]
    try:
        ends = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], ends
    assert "could not write the network" in ends[1][0]
    assert_the_file_is_that_of_one_process(tmp_path)


def test_a_weight_in_other_tensors_is_named(tmp_path):
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(TwoTensor(torch.zeros(2, 3), torch.zeros(2, 3)))
    with pytest.raises(TypeError, match=r"'weight' .* is a TwoTensor, which keeps its values in other tensors"):
        dcl.save_model(model, tmp_path / "m.safetensors")
