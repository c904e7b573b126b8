"""Stage 2 on a CPU by parts inside compiled networks: against the eager layer, whose results `test_parts` checks."""

import copy

import pytest
import torch
from tests.test_parts import NORMS, images_of, layer_of
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import torch_dcl as dcl
from torch_dcl.kernels import dispatch


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Small layers run in parts too, and no compiled code remains from another test."""
    monkeypatch.setattr(dispatch, "LEAST_IN_PARTS", 1)
    torch.compiler.reset()


def results_of(run, layer, x, grad):
    """z, all gradients, and the buffers after two steps."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    run(x).sum().backward()
    z = run(x)
    return [z.detach(), *torch.autograd.grad(z, [x, *layer.parameters()], grad), *layer.buffers()]


def assert_equals_eager(layer, x, backend, *, tolerance=1e-12):
    compiled = copy.deepcopy(layer)
    counter = CompileCounterWithBackend(backend)
    call = torch.compile(compiled, backend=counter, fullgraph=True)
    grad = torch.randn_like(copy.deepcopy(layer)(x))
    expected = results_of(layer, layer, x, grad)
    with dispatch.watch() as ran:
        found = results_of(call, compiled, x, grad)
    assert ran == {"project_and_fuse: parts": counter.frame_count}
    assert counter.frame_count == 1
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    with torch.no_grad():
        torch.testing.assert_close(call(x), layer(x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("norm", NORMS)
def test_values_gradients_and_statistics_are_those_of_the_eager_layer(norm, training, last):
    layer = layer_of(2, NORMS[norm], last=last).train(training)
    assert_equals_eager(layer, images_of(2, last=last), "aot_eager")


OTHERS = {
    "1-d": (1, {}),
    "3-d": (3, {}),
    "three branches": (2, {"branches": 3}),
    "no bias": (2, {"bias": False}),
    "a drawn pair": (2, {"branches": 3, "strategy": "stochastic"}),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_branches_strategies_and_dimensions(what):
    spatial, arguments = OTHERS[what]
    layer = layer_of(spatial, None, last=False, **arguments)
    layer.fusion.advanced = True  # an optimiser's step would advance the pair
    assert_equals_eager(layer, images_of(spatial, last=False), "aot_eager")


@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
def test_the_compiler_may_choose_the_layout_of_a_network(last):
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(5, 5, 3, padding=1), nn.ReLU(), layer_of(2, {}, last=last).float(), nn.MaxPool2d(2),
        dcl.DCLConv2d(24, 16, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip
    images = images_of(2, last=last, dtype=torch.float32)
    compiled = copy.deepcopy(network)
    call = torch.compile(compiled, fullgraph=True)
    expected = results_of(network, network, images, torch.ones(6, 3))
    found = results_of(call, compiled, images, torch.ones(6, 3))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    layer = layer_of(2, {}, dtype=torch.float32)
    x = images_of(2, dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        assert_equals_eager(layer, x, "aot_eager", tolerance=torch.finfo(dtype).eps)


def test_a_smaller_last_batch_compiles_once_more_at_most():
    layer = layer_of(2, {})
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(copy.deepcopy(layer), backend=counter)
    for batch in (6, 4, 3, 5):
        x = images_of(2, batch=batch)
        torch.testing.assert_close(call(x), layer(x), rtol=1e-12, atol=1e-12)
    assert counter.frame_count == 2


def test_transforms_inside_a_compiled_function_run_the_reference():
    layer = layer_of(2, None)
    x = images_of(2)
    call = torch.compile(torch.vmap(lambda image: layer(image[None])[0]), backend="aot_eager")
    with dispatch.watch() as ran:
        z = call(x)
    assert ran["project_and_fuse: parts"] == 0
    torch.testing.assert_close(z, layer(x), rtol=1e-12, atol=1e-12)


def test_one_value_per_channel_is_torchs_error():
    layer = layer_of(2, {})
    call = torch.compile(layer, backend="aot_eager")
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        call(torch.rand(1, 5, 1, 1, dtype=torch.float64))


def test_switching_parts_off_recompiles():
    layer, x = layer_of(2, None), images_of(2)
    call = torch.compile(layer, backend="aot_eager")
    call(x)
    with dispatch.disabled(), dispatch.watch() as ran:
        call(x)
    assert ran["project_and_fuse: reference"] == 1


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="the compiler refuses it")
def test_what_follows_may_work_in_place():
    layer, x = layer_of(2, None), images_of(2).requires_grad_()
    doubled = torch.compile(lambda given: layer(given).mul_(2), backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(
        torch.autograd.grad(doubled.sum(), x)[0], torch.autograd.grad(2 * layer(x).sum(), x)[0], rtol=1e-12, atol=1e-12
    )
