"""What a person expects of a network in a wrapper, or with wrapped parts: the file is that of the network itself."""

import copy
import json

import pytest
import torch
from safetensors import safe_open
from tests.halves import slow
from torch import distributed, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import torch_dcl as dcl


def compiled(module):
    return torch.compile(module, backend="eager")


def network():
    """Two blocks, a layer by itself, and one block in two places."""
    block = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU())
    other = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
    return nn.Sequential(block, other, nn.Linear(32, 32), nn.ReLU(), other, nn.Linear(32, 3))


def converted(seed=1, **arguments):
    torch.manual_seed(seed)
    model = network()
    plan = dcl.plan(model, (32,), **{"branches": 3, "width": 2, "strategy": "stochastic", **arguments})
    assert len(plan.selected) == 3
    dcl.convert_(model, plan, init="random", seed=seed)
    with torch.no_grad():
        model[0][0].fusion.norm.running_mean.normal_()
    return model


def same(a, b):
    torch.testing.assert_close(dict(a.state_dict()), dict(b.state_dict()), rtol=0, atol=0)
    x = torch.randn(2, 32)
    with torch.no_grad():
        return torch.equal(a.eval()(x), b.eval()(x))


def description(path):
    """All names and layers, and a hash of every tensor."""
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["torch_dcl"])


def block(model, wrap):
    model[0] = wrap(model[0])


def layer(model, wrap):
    model[2] = wrap(model[2])


def deep(model, wrap):
    model[0][0] = wrap(model[0][0])
    model[0] = wrap(model[0])


def one_of_two_places(model, wrap):
    model[4] = wrap(model[4])


def absorbed(model, wrap):
    model[0][1] = wrap(model[0][1])
    model[3] = wrap(model[3])


WRAPS = {"compiled": compiled, "checkpointed": checkpoint_wrapper, "parallel": nn.DataParallel}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("part", [block, layer, deep, one_of_two_places, absorbed])
def test_a_network_with_a_wrapped_part_gives_the_same_file(tmp_path, part, wrap):
    model, wrapped = converted(), converted()
    part(wrapped, WRAPS[wrap])
    dcl.save_model(model, tmp_path / "plain.safetensors")
    dcl.save_model(wrapped, tmp_path / "wrapped.safetensors")
    assert description(tmp_path / "wrapped.safetensors") == description(tmp_path / "plain.safetensors")
    loaded = dcl.load_model(network, tmp_path / "wrapped.safetensors")
    assert loaded[1] is loaded[4]
    assert same(loaded, model)


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("part", [block, layer, deep, one_of_two_places, absorbed])
def test_a_file_loads_into_a_network_with_a_wrapped_part(tmp_path, part, wrap):
    model, mine = converted(), converted(seed=2)
    dcl.save_model(model, tmp_path / "m.safetensors")
    part(mine, WRAPS[wrap])
    modules = list(mine.modules())
    assert dcl.load_model(mine, tmp_path / "m.safetensors") is mine
    assert all(a is b for a, b in zip(mine.modules(), modules, strict=True))
    x = torch.randn(2, 32)
    with torch.no_grad():
        torch.testing.assert_close(mine.eval()(x), model.eval()(x))


def test_a_plain_network_with_a_compiled_block_is_rebuilt_inside(tmp_path):
    model, mine = converted(), network()
    dcl.save_model(model, tmp_path / "m.safetensors")
    mine[0] = compiled(mine[0])
    dcl.load_model(mine, tmp_path / "m.safetensors")
    x = torch.randn(2, 32)
    with torch.no_grad():
        torch.testing.assert_close(mine.eval()(x), model.eval()(x))


def test_a_plain_layer_compiled_by_itself_is_refused_and_left_alone(tmp_path):
    mine = network()
    dcl.save_model(converted(), tmp_path / "m.safetensors")
    layer(mine, compiled)
    modules, state = list(mine.modules()), copy.deepcopy(mine.state_dict())
    with pytest.raises(ValueError, match=r"'2\._orig_mod' is compiled by itself"):
        dcl.load_model(mine, tmp_path / "m.safetensors")
    assert all(a is b for a, b in zip(mine.modules(), modules, strict=True))
    torch.testing.assert_close(dict(mine.state_dict()), dict(state), rtol=0, atol=0)


@pytest.mark.parametrize("wrap", [compiled, nn.DataParallel, AveragedModel, lambda m: AveragedModel(compiled(m))])
def test_a_file_loads_into_the_network_inside_a_wrapper(tmp_path, wrap):
    model = converted()
    dcl.save_model(model, tmp_path / "m.safetensors")
    for inside in (network(), converted(seed=2)):
        mine = wrap(inside)
        assert dcl.load_model(mine, tmp_path / "m.safetensors") is mine
        x = torch.randn(2, 32)
        with torch.no_grad():
            torch.testing.assert_close(mine.eval()(x), model.eval()(x))


def test_an_average_of_weights_is_saved_as_the_network_that_it_is(tmp_path):
    model = converted(branches=2, strategy="deterministic")
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    average.update_parameters(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    average.update_parameters(model)
    dcl.save_model(average, tmp_path / "m.safetensors")
    loaded = dcl.load_model(network, tmp_path / "m.safetensors")
    assert same(loaded, average.module)
    for name, parameter in loaded.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name] + 0.5)


def test_data_parallelism_over_processes_is_loaded_into_but_not_rebuilt(tmp_path):
    model = converted()
    dcl.save_model(model, tmp_path / "m.safetensors")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mine = nn.parallel.DistributedDataParallel(converted(seed=2))
        dcl.load_model(mine, tmp_path / "m.safetensors")
        assert same(mine.module, model)
        plain = nn.parallel.DistributedDataParallel(network())
        modules = list(plain.modules())
        with pytest.raises(ValueError, match="load the network before it"):
            dcl.load_model(plain, tmp_path / "m.safetensors")
        assert all(a is b for a, b in zip(plain.modules(), modules, strict=True))
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("wrap", [True, slow(False)])
def test_a_network_with_a_compiled_block_is_fitted_to_calibration_data(wrap):
    mine, plain = network(), network()
    plain.load_state_dict(mine.state_dict())
    if wrap:
        mine[0] = compiled(mine[0])
    else:
        mine[0].compile(backend="eager")
    x = torch.randn(64, 32)
    fits = []
    for model in (mine.eval(), plain.eval()):
        with torch.no_grad():
            model(x)  # compiles it, as calibration runs it
        plan = dcl.plan(model, (32,), width=4)
        fits.append(list(dcl.convert_(model, plan, init="fit", calibration=[x]).fits.values()))
    assert fits[0] == fits[1]
    with torch.no_grad():
        torch.testing.assert_close(mine(x), plain(x))


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_network_with_a_compiled_part_is_planned_and_converted(fullgraph, in_place):
    def make():
        model = network()
        if in_place:
            model[0].compile(backend="eager", fullgraph=fullgraph)
        else:
            model[0] = torch.compile(model[0], backend="eager", fullgraph=fullgraph)
        return model

    model, x = make(), torch.randn(4, 32)
    model(x)  # the compiler is imported
    plan = dcl.plan(model, (32,), width=2)
    assert len(plan.selected) == 3
    dcl.convert_(model, plan, init="fit", calibration=[torch.randn(64, 32)])
    part = model[0] if in_place else model[0]._orig_mod
    expected = part[0](x)
    torch.testing.assert_close(model[0](x), expected)
    model(x).sum().backward()
    assert part[0].branch.weight.grad is not None
