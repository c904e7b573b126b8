"""Stage 2 on a CPU by parts of the positions: its values, gradients and statistics against plain torch in float64."""

import contextlib
import copy
import math

import pytest
import torch
from tests.reference import exact_over, norms_of_branches, plain_fusion, plain_pair_fusion, worst_error
from torch import nn
from torch.autograd import gradgradcheck
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torch_dcl as dcl
from torch_dcl import functional
from torch_dcl.kernels import dispatch

LAYERS = {1: (dcl.DCLConv1d, nn.BatchNorm1d), 2: (dcl.DCLConv2d, nn.BatchNorm2d), 3: (dcl.DCLConv3d, nn.BatchNorm3d)}
SIZES = {1: (37,), 2: (7, 9), 3: (4, 3, 5)}
NORMS = {
    "no norm": None,
    "norm": {},
    "cumulative": {"momentum": None},
    "not affine": {"affine": False},
    "not tracked": {"track_running_stats": False},
}
LARGEST = torch.finfo(torch.float32).max
PARTS = {"one part": 10**9, "parts of images": 4000, "parts of rows": 500}


def layer_of(spatial, norm, *, last=True, dtype=torch.float64, seed=0, **arguments):
    """A layer with random biases, norms and running statistics."""
    torch.manual_seed(seed)
    make, batch_norm = LAYERS[spatial]
    norm_layer = None if norm is None else lambda channels: batch_norm(channels, **norm)
    layer = make(5, 24, 3, padding=1, width=6, norm_layer=norm_layer, **arguments).to(dtype)
    for tensor in [*layer.parameters(), *layer.buffers()]:
        if tensor.is_floating_point():
            tensor.data += 0.2 * torch.rand_like(tensor)
    return layer.to(memory_format=torch.channels_last) if last and spatial == 2 else layer


def images_of(spatial, *, last=True, dtype=torch.float64, batch=6):
    x = torch.randn(batch, 5, *SIZES[spatial], dtype=dtype) + 1
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x


def plain(layer, x):
    """The layer as the paper writes it."""
    return plain_stage2(layer.fusion, layer.branch(x))


def plain_stage2(fusion, y):
    biases = [None] * fusion.branches if fusion.bias is None else fusion.bias
    weights = fusion.weight.split(list(fusion.widths))
    branches = zip(fusion.split(y), weights, biases, strict=True)
    pre = [F.linear(a.movedim(1, -1), W.t(), b).movedim(-1, 1) for a, W, b in branches]
    if fusion.norm is not None:
        norm = fusion.norm
        by_batch = norm.training or norm.running_mean is None
        running = (None, None) if by_batch else (norm.running_mean, norm.running_var)
        normed = F.batch_norm(torch.cat(pre, 1), *running, norm.weight, norm.bias, by_batch, 0.0, norm.eps)
        pre = list(normed.chunk(len(pre), 1))
    fuse = plain_pair_fusion if fusion.strategy == "stochastic" and not fusion.training else plain_fusion
    return fuse(pre, fusion.eps)


def gradients(z, x, layer, grad):
    return torch.autograd.grad(z, [x, *layer.parameters()], grad)


def run(layer, x):
    with dispatch.watch() as ran:
        z = layer(x)
    assert ran == {"project_and_fuse: parts": 1}
    return z


@pytest.fixture(autouse=True)
def small_layers_too(monkeypatch):
    monkeypatch.setattr(dispatch, "LEAST_IN_PARTS", 1)


@pytest.fixture(params=PARTS.values(), ids=PARTS)
def part(monkeypatch, request):
    monkeypatch.setattr(functional, "part_size", lambda: request.param)


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
@pytest.mark.usefixtures("part")
def test_values_and_gradients_are_those_of_the_formula(norm, training, last):
    layer = layer_of(2, norm, last=last).train(training)
    x = images_of(2, last=last).requires_grad_()
    expected = plain(layer, x)
    z = run(layer, x)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(z, expected, rtol=1e-12, atol=1e-13)
    for ours, theirs in zip(gradients(z, x, layer, grad), gradients(expected, x, layer, grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "arguments",  # with the paper's ε of 0.001 the gradient of three branches varies by 1e5 times a response's error
    [{"branches": 1}, {"branches": 3, "eps": 0.25}, {"branches": 3, "strategy": "stochastic"}],
)
@pytest.mark.parametrize("norm", [None, {}], ids=["no norm", "norm"])
@pytest.mark.parametrize("spatial", LAYERS)
@pytest.mark.usefixtures("part")
def test_other_branches_strategies_and_dimensions(spatial, norm, arguments):
    layer = layer_of(spatial, norm, last=False, **arguments).train(arguments.get("strategy") is None)
    x = images_of(spatial, last=False).requires_grad_()
    z, expected = run(layer, x), plain(layer, x)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(z, expected, rtol=1e-12, atol=1e-13)
    for ours, theirs in zip(gradients(z, x, layer, grad), gradients(expected, x, layer, grad), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.usefixtures("part")
def test_a_single_image(bias):
    layer, x = layer_of(2, None, last=False, bias=bias), images_of(2, last=False)[0]
    torch.testing.assert_close(run(layer, x), plain(layer, x[None])[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("norm", [{}, {"momentum": None}, {"momentum": 0.3, "affine": False}])
@pytest.mark.usefixtures("part")
def test_running_statistics_are_those_of_a_batch_norm_for_each_branch(norm):
    layer = layer_of(2, norm)
    norms = norms_of_branches(layer.fusion.norm, layer.branches)
    for _ in range(3):
        x = images_of(2)
        ys = layer.fusion.split(layer.branch(x))
        for y, W, b, own in zip(ys, layer.fusion.weight.chunk(2), layer.fusion.bias, norms, strict=True):
            own(torch.einsum("nmhw,mk->nkhw", y, W) + b[:, None, None])
        run(layer, x)
    for name in ("running_mean", "running_var"):
        expected = torch.cat([getattr(own, name) for own in norms])
        torch.testing.assert_close(getattr(layer.fusion.norm, name), expected, rtol=1e-12, atol=1e-12)
    assert layer.fusion.norm.num_batches_tracked == norms[0].num_batches_tracked


@pytest.mark.parametrize("offset", [0, 100, 1000])
def test_in_float32_means_of_many_deviations_do_not_cancel(offset):
    layer = layer_of(2, {}, dtype=torch.float32)
    nn.init.constant_(layer.fusion.norm.bias, 0.5)
    x = images_of(2, dtype=torch.float32, batch=16) + offset
    exact = plain(copy.deepcopy(layer).double(), x.double())
    with dispatch.disabled():
        reference = copy.deepcopy(layer)(x)
    error, allowed = (float((z.double() - exact).abs().max()) for z in (run(layer, x), reference))
    assert error <= 2 * allowed + 2e-6


def test_several_forward_passes_before_one_backward():
    layer, xs = layer_of(2, {}), [images_of(2).requires_grad_() for _ in range(3)]
    torch.stack([run(layer, x).square().mean() for x in xs]).sum().backward()
    for x in xs:
        (expected,) = torch.autograd.grad(plain(layer, x).square().mean(), x)
        torch.testing.assert_close(x.grad, expected, rtol=1e-10, atol=1e-12)


def test_running_statistics_may_be_views_of_one_tensor_that_autograd_has_saved():
    layer, other = layer_of(2, {}), nn.BatchNorm2d(5).double()
    shared = torch.cat([layer.fusion.norm.running_mean, other.running_mean])
    layer.fusion.norm.running_mean, other.running_mean = shared[:48], shared[48:]
    x = images_of(2).requires_grad_()
    run(layer, other(x)).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("norm", [None, {}], ids=["no norm", "norm"])
def test_second_derivatives(norm):
    layer = layer_of(2, norm)
    x = images_of(2, batch=2)[:, :, :2, :2].contiguous(memory_format=torch.channels_last).requires_grad_()
    assert gradgradcheck(lambda given: layer(given).square().sum(), x, nondet_tol=0.0)


@pytest.mark.parametrize("norm", [None, {}], ids=["no norm", "norm"])
def test_several_gradients_at_once_are_those_of_one_at_a_time(norm):
    layer, x = layer_of(2, norm), images_of(2).requires_grad_()
    inputs = [x, *layer.parameters()]
    z = run(layer, x)
    outer = torch.rand(2, *z.shape, dtype=z.dtype)
    at_once = torch.autograd.grad(z, inputs, outer, is_grads_batched=True)
    expected = zip(*(torch.autograd.grad(plain(layer, x), inputs, each) for each in outer), strict=True)
    torch.testing.assert_close(at_once, tuple(torch.stack(each) for each in expected))


def test_what_follows_may_work_in_place():
    layer, x = layer_of(2, {}), images_of(2).requires_grad_()
    doubled = run(layer, x).mul_(2)
    torch.testing.assert_close(
        torch.autograd.grad(doubled.sum(), x)[0], torch.autograd.grad(2 * plain(layer, x).sum(), x)[0]
    )


def test_weights_that_are_not_contiguous():
    layer, x = layer_of(2, {}), images_of(2)
    expected = run(layer, x)
    layer.fusion.weight = nn.Parameter(layer.fusion.weight.detach().t().contiguous().t())
    assert not layer.fusion.weight.is_contiguous()
    z = run(layer, x)
    torch.testing.assert_close(z, expected, rtol=1e-12, atol=1e-13)
    z.sum().backward()
    assert layer.fusion.weight.grad.shape == layer.fusion.weight.shape


@pytest.mark.parametrize("batch", [1, 2])
def test_one_value_per_channel_is_torchs_error(batch):
    layer, x = layer_of(2, {}), images_of(2, batch=batch)[:, :, :1, :1]
    if batch == 2:
        assert run(layer, x).shape == (2, 24, 1, 1)
        return
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(x)


def identity_layer(N, eps):
    """A layer whose responses are its input's channels, the first branch's first."""
    layer = dcl.DCLConv2d(2 * N, N, 1, width=N, bias=False, eps=eps)
    layer.branch.weight.data.copy_(torch.eye(2 * N)[:, :, None, None])
    layer.fusion.weight.data.copy_(torch.eye(N).repeat(2, 1))
    return layer


@pytest.mark.parametrize("eps", [1e-36, 1e-20, None, 100.0])
@pytest.mark.parametrize("scale", [1e-36, 1e-25, 1e-12, 1.0, 1e12, 1e18, 1e25, 1e37])
def test_z_and_its_gradient_are_exact_in_float32_or_saturate(scale, eps):
    layer = identity_layer(8, eps)
    spread = torch.exp(2 * torch.randn(2, 16, 3, 4, generator=torch.Generator().manual_seed(0)))
    signs = torch.where(torch.rand_like(spread) < 0.7, 1.0, -1.0)
    x = (scale * signs * spread).clamp(-LARGEST, LARGEST)
    x[0, 3] = x[1, 9] = 0.0
    x[0, 5] = 1.0 / max(scale, 1e-30)  # a small one beside a large one
    x.requires_grad_()
    z = run(layer, x)
    (gradient,) = torch.autograd.grad(z.sum(), x)
    pre = torch.stack(x.detach().chunk(2, 1)).flatten(1)
    exact_z, exact_gradient = exact_over(pre, layer.eps)
    assert worst_error(z, exact_z) <= 4
    assert worst_error(torch.stack(gradient.chunk(2, 1)), exact_gradient) <= 20


@pytest.mark.parametrize("grad", [1e-30, 1e30, 3e38])
def test_large_gradients_saturate_as_in_the_reference(grad):
    layer = layer_of(2, None, dtype=torch.float32)
    x = images_of(2, dtype=torch.float32)
    ys = layer.branch(x).detach().requires_grad_()
    with dispatch.disabled():
        (expected,) = torch.autograd.grad(layer.fusion(ys), ys, torch.full((6, 24, 7, 9), grad))
    (ours,) = torch.autograd.grad(layer.fusion(ys), ys, torch.full((6, 24, 7, 9), grad))
    assert torch.equal(ours.isfinite(), expected.isfinite())
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-4 * min(grad, 1e30))


def test_responses_that_are_not_finite_are_those_of_the_reference():
    layer, x = layer_of(2, None, dtype=torch.float32), images_of(2, dtype=torch.float32)
    x[0, 0, 0, 0], x[1, 2, 3, 4], x[2, 1, 5, 5] = math.nan, math.inf, -math.inf
    z = run(layer, x)
    with dispatch.disabled():
        expected = layer(x)
    torch.testing.assert_close(z, expected, equal_nan=True)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for t in tree_leaves(results):
            if isinstance(t, torch.Tensor):
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return results


def test_no_tensor_is_as_large_as_all_responses():
    layer = layer_of(2, {}, dtype=torch.float32)
    x = images_of(2, dtype=torch.float32, batch=40).requires_grad_()
    with Largest() as largest:
        z = run(layer, x)
        z.sum().backward()
    assert largest.elements == math.prod(z.shape)


UNSUPPORTED = {
    "widths that differ": {"width": (4, 6)},
    "another norm": {"norm_layer": lambda channels: nn.GroupNorm(2, channels)},
    "an empty batch": {},
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_what_parts_do_not_support_runs_the_reference(what):
    layer = dcl.DCLConv2d(5, 24, 3, **{"width": 6, **UNSUPPORTED[what]})
    x = images_of(2, dtype=torch.float32, batch=0 if what == "an empty batch" else 2)
    with dispatch.watch() as ran:
        layer(x)
    assert ran["project_and_fuse: parts"] == 0
    assert ran["fuse_branches: reference"] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cast", [True, False], ids=["autocast", "all in half"])
@pytest.mark.parametrize("norm", [None, {}], ids=["no norm", "norm"])
@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
@pytest.mark.usefixtures("part")
def test_half_precision_is_at_least_as_exact_as_the_reference(dtype, cast, norm, last):
    fusion = layer_of(2, norm, last=last, dtype=torch.float32).fusion
    y = torch.relu(layer_of(2, None, last=last).branch(images_of(2, last=last))).to(dtype).detach()
    fusion = fusion if cast else fusion.to(dtype)
    exact, grad = copy.deepcopy(fusion).double(), torch.rand(6, 24, 7, 9).to(dtype) + 1
    errors = {}
    for name, enabled in (("parts", True), ("reference", False)):
        own, given = copy.deepcopy(fusion), y.clone().requires_grad_()
        arithmetic = contextlib.nullcontext() if enabled else dispatch.disabled()
        with arithmetic, torch.autocast("cpu", dtype, enabled=cast), dispatch.watch() as ran:
            z = own(given)
        assert ran[f"project_and_fuse: {name}"] == 1 or name == "reference"
        assert z.dtype is dtype
        results = [z, *torch.autograd.grad(z, [given, *own.parameters()], grad)]
        wide = y.double().requires_grad_()
        expected = plain_stage2(exact, wide)
        theirs = [expected, *torch.autograd.grad(expected, [wide, *exact.parameters()], grad.double())]
        errors[name] = [
            float((a.double() - b).norm() / b.norm().clamp(min=1e-2)) for a, b in zip(results, theirs, strict=True)
        ]
    for ours, allowed in zip(errors["parts"], errors["reference"], strict=True):
        assert ours <= 1.05 * allowed + 1e-6
    assert errors["parts"][0] <= 0.3 * torch.finfo(dtype).eps


@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
def test_backward_may_run_under_autocast(last):
    layer, x = layer_of(2, {}, last=last, dtype=torch.float32), images_of(2, last=last, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        z = run(layer, x)
        inside = torch.autograd.grad(z.float().sum(), [*layer.parameters()], retain_graph=True)
    outside = torch.autograd.grad(z.float().sum(), [*layer.parameters()])
    for ours, theirs in zip(inside, outside, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("norm", [None, {}], ids=["no norm", "norm"])
def test_inference_mode_has_no_gradients_even_if_they_are_enabled(norm):
    layer = layer_of(2, norm)
    with torch.inference_mode(), torch.enable_grad():
        x = images_of(2)
        torch.testing.assert_close(run(layer, x), plain(layer, x), rtol=1e-12, atol=1e-13)


def test_hooks_of_the_norm_are_called():
    layer, seen = layer_of(2, {}), []
    layer.fusion.norm.register_forward_hook(lambda *given: seen.append(given[2].shape))
    x = images_of(2)
    torch.testing.assert_close(layer(x), plain(layer, x), rtol=1e-12, atol=1e-13)
    assert len(seen) == 1


def test_small_layers_run_the_reference_which_is_faster_there(monkeypatch):
    monkeypatch.undo()
    layer = layer_of(2, None, dtype=torch.float32)
    for batch, path in ((6, "reference"), (60, "parts")):
        with dispatch.watch() as ran:
            layer(images_of(2, dtype=torch.float32, batch=batch))
        assert ran[f"project_and_fuse: {path}"] == 1
