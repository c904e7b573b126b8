"""DCL layers behind ``nn.SyncBatchNorm`` on two processes, against one process that has all their inputs, in float64.

Every process runs a case and knows the inputs of both. For the interpreter on the CPU and for a GPU alike.
"""

import contextlib
import datetime
import functools
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from tests.kernels.cases import Errors, relative
from torch import distributed, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torch_dcl import DCLConv2d, DCLLinear, convert_, functional, plan
from torch_dcl.kernels import dispatch, host

KERNEL = {"project_and_fuse: kernel": 1}


def join(rank, folder):
    """Make this process one of two. Waiting for a message that does not come ends in an error."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    limit = datetime.timedelta(seconds=120)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=limit)


def leave():
    distributed.destroy_process_group()


def run(name, device, dtype):
    return CASES[name](device, dtype)


def images(*batches, mean=0.0):
    """The inputs of both processes, of different means and deviations."""
    return [torch.randn(b, 6, 5, 7) * (1 + 0.5 * r) + 0.7 * r + mean for r, b in enumerate(batches)]


def vectors(*batches):
    return [torch.randn(b, 40) * (1 + 0.5 * r) + 0.7 * r for r, b in enumerate(batches)]


def place(x, device, dtype):
    return x.to(device, dtype).contiguous(
        memory_format=torch.channels_last if x.dim() == 4 else torch.contiguous_format
    )


def layer_of(make, device, dtype, **norm):
    """A layer as after some training: none of its statistics and scales is 0 or 1."""
    layer = make(norm_layer=functools.partial(nn.SyncBatchNorm, **norm))
    own = layer.fusion.norm
    for tensor, start in (
        (own.running_mean, nn.init.normal_), (own.running_var, nn.init.uniform_), (own.weight, nn.init.uniform_),
        (own.bias, nn.init.normal_), (layer.fusion.bias, nn.init.normal_),
    ):  # fmt: skip
        if tensor is not None:
            start(tensor.detach())
    return layer.to(device, dtype, memory_format=torch.channels_last)


class Whole:
    """The same layer in float64 on the inputs of all, with parameters for each process to have gradients of its own.

    Branch outputs are rounded as the layer rounds them: near zero their last bit decides whether there is a gradient.
    """

    def __init__(self, layer, count=2):
        self.layer = layer
        self.copies = [deepcopy(layer).to("cpu", torch.float64) for _ in range(count)]

    def __call__(self, xs, half=None):
        """z of every process, and where no response is close to zero."""
        pre = [self._responses(*pair, half) for pair in zip(self.copies, xs, strict=True)]
        norm = self.copies[0].fusion.norm
        running, momentum = (None, None), norm.momentum
        if norm.track_running_stats:
            running = norm.running_mean, norm.running_var
            norm.num_batches_tracked += 1
            momentum = 1 / float(norm.num_batches_tracked) if momentum is None else momentum
        normed = F.batch_norm(torch.cat(pre), *running, None, None, True, momentum, norm.eps)
        found = []
        for copy, own in zip(self.copies, normed.split([len(x) for x in xs]), strict=True):
            sides = (-1, *(1,) * (own.dim() - 2))
            gamma, beta = copy.fusion.norm.weight, copy.fusion.norm.bias
            scaled = (own if gamma is None else own * gamma.view(sides) + beta.view(sides)).chunk(copy.branches, 1)
            moderate = torch.stack([response.detach().abs() > 0.05 for response in scaled]).all(0)
            found.append((functional.fuse_branches(list(scaled), copy.eps), moderate))
        return found

    def _responses(self, copy, x, half):
        """Of all branches, before the norm."""
        y, like = copy.branch(x), self.layer.weight
        with torch.no_grad(), _autocast(like.device.type, half):
            error = self.layer.branch(place(x, like.device, like.dtype)).to(y) - y
        parts = zip((y + error).split(copy.widths, 1), copy.fusion.weight.split(copy.widths), strict=True)
        pre = [torch.einsum("bm...,mk->bk...", y_t, W_t) for y_t, W_t in parts]
        if copy.bias is not None:
            pre = [p + b.view(-1, *(1,) * (p.dim() - 2)) for p, b in zip(pre, copy.bias, strict=True)]
        return torch.cat(pre, 1)


def _autocast(kind, half):
    return contextlib.nullcontext() if half is None else torch.autocast(kind, half)


def _disabled(off):
    return dispatch.disabled() if off else contextlib.nullcontext()


def step_errors(layer, whole, xs, half=None, off=False):
    """Errors of z, of all gradients on this process and of the statistics, of one step in training."""
    rank, like = distributed.get_rank(), layer.weight
    dtype = half or like.dtype
    rounded = [x.to(dtype) for x in xs]
    given = place(rounded[rank], like.device, like.dtype).requires_grad_()
    with dispatch.watch() as ran, _autocast(like.device.type, half), _disabled(off):
        z = layer(given)
    assert z.dtype is dtype
    assert off or dict(ran) == KERNEL, ran
    exactly = [x.double().requires_grad_() for x in rounded]
    found = whole(exactly, half)
    grads = [(torch.randn(zs.shape) * moderate).to(dtype) for zs, moderate in found]
    loss = sum((zs * grad).sum() for (zs, _), grad in zip(found, grads, strict=True))
    wanted = torch.autograd.grad(loss, [exactly[rank], *whole.copies[rank].parameters()])
    mine = torch.autograd.grad(z, [given, *layer.parameters()], grads[rank].to(z))
    errors = {"z": relative(z, found[rank][0])}
    names = ["x", *(name for name, _ in layer.named_parameters())]
    errors |= {name: error_of(a, b) for name, a, b in zip(names, mine, wanted, strict=True)}
    return errors | statistics_errors(layer.fusion.norm, whole.copies[0].fusion.norm)


def error_of(found, exact):
    """Relative to what is expected, unless that is nothing: the bias before a norm has no effect on all together."""
    return float(found.abs().max()) / 10 if 0 < float(exact.norm()) < 1e-9 else relative(found, exact)


def statistics_errors(norm, exact):
    if not norm.track_running_stats:
        return {}
    assert norm.num_batches_tracked == exact.num_batches_tracked
    return {name: relative(getattr(norm, name), getattr(exact, name)) for name in ("running_mean", "running_var")}


def steps_case(make, inputs, norm, device, dtype):
    """Two steps in training."""
    layer, errors = layer_of(make, device, dtype, **norm), {}
    whole = Whole(layer)
    for step in range(2):
        errors |= {f"{name}, step {step}": error for name, error in step_errors(layer, whole, inputs()).items()}
    return errors


def beside_torch_case(device, dtype):
    """Kernels on the first process, torch's own norm on the second: both send the same messages."""
    layer = layer_of(_CONV, device, dtype)
    return step_errors(layer, Whole(layer), images(3, 5), off=distributed.get_rank() == 1)


def autocast_case(batches, device, dtype):
    """Weights in float32, which a half type holds as well."""
    layer = layer_of(_CONV, device, dtype).to(torch.float32)
    return step_errors(layer, Whole(layer), images(*batches), half=dtype)


def two_forwards_case(device, dtype):
    """Two forward passes before one backward pass, the second under activation checkpointing."""
    rank, layer = distributed.get_rank(), layer_of(_CONV, device, dtype)
    whole, xs = Whole(layer), [images(2, 3), images(4, 1)]
    given = [place(x[rank], device, dtype) for x in xs]
    z = [layer(given[0]), checkpoint(layer, given[1], use_reentrant=False)]
    found = [whole([x.double() for x in each]) for each in xs]
    grads = [[torch.randn(zs.shape) * moderate for zs, moderate in each] for each in found]
    loss = sum(
        (zs * g).sum() for each, own in zip(found, grads, strict=True) for (zs, _), g in zip(each, own, strict=True)
    )
    wanted = torch.autograd.grad(loss, list(whole.copies[rank].parameters()))
    mine = torch.autograd.grad(z, list(layer.parameters()), [own[rank].to(z[0]) for own in grads])
    names = [name for name, _ in layer.named_parameters()]
    return {name: relative(a, b) for name, a, b in zip(names, mine, wanted, strict=True)}


def evaluation_case(device, dtype):
    """In eval mode a process waits for no other: here the second does not take part."""
    if distributed.get_rank() == 1:
        return {}
    layer = layer_of(_CONV, device, dtype).eval()
    (x,) = images(3)
    with dispatch.watch() as ran, torch.no_grad():
        z = layer(place(x, device, dtype))
    assert dict(ran) == KERNEL
    with dispatch.disabled(), torch.no_grad():
        return {"z": relative(z, deepcopy(layer).to("cpu", torch.float64)(x.double()))}


def scales_alone_case(device, dtype):
    """Gradients of γ and β need no message: here the second process has no backward pass."""
    rank, layer = distributed.get_rank(), layer_of(_CONV, device, dtype)
    whole, xs = Whole(layer), images(2, 3)
    for parameter in (layer.weight, layer.fusion.weight, layer.fusion.bias):
        parameter.requires_grad_(False)
    z = layer(place(xs[rank], device, dtype))
    (expected, moderate), _ = whole([x.double() for x in xs])
    if rank == 1:
        return {}
    grad, norms = torch.randn(expected.shape) * moderate, (layer.fusion.norm, whole.copies[0].fusion.norm)
    mine = torch.autograd.grad(z, list(norms[0].parameters()), grad.to(z))
    wanted = torch.autograd.grad(expected, list(norms[1].parameters()), grad.double())
    return {name: relative(a, b) for name, a, b in zip(("γ", "β"), mine, wanted, strict=True)}


def groups_case(device, dtype):
    """A process in a group of its own is alone, and is replayed; back among all it exchanges messages again."""
    host.wait()
    rank, layer = distributed.get_rank(), layer_of(_CONV, device, dtype)
    groups = [distributed.new_group([r]) for r in range(2)]
    alone, both, xs, errors = Whole(layer, 1), Whole(layer), images(3, 2), {}
    layer.fusion.norm.process_group = groups[rank]
    given = place(xs[rank], device, dtype)
    with torch.no_grad():
        for call in range(4):
            z, ((expected, _),) = layer(given), alone([xs[rank].double()])
            errors[f"alone, call {call}"] = relative(z, expected)
    errors |= statistics_errors(layer.fusion.norm, alone.copies[0].fusion.norm)
    programs = layer.__dict__.get("_programs")
    assert host.library() is None or len(programs) == 1
    layer.fusion.norm.process_group = None
    with torch.no_grad():
        for call in range(6):
            errors[f"both, call {call}"] = relative(layer(given), both([x.double() for x in xs])[rank][0])
    assert programs is None or (len(programs), programs.failed) == (1, 0)
    for group in groups:
        if distributed.get_world_size(group) > 0:
            distributed.destroy_process_group(group)
    return errors


def one_tensor_case(device, dtype):
    """A group of the norm's own, not named gloo, so that messages come as one tensor, as those of NCCL do."""
    layer = layer_of(_CONV, device, dtype)
    whole, group = Whole(layer), distributed.new_group([0, 1], backend=f"{device}:gloo")
    layer.fusion.norm.process_group = group
    errors = step_errors(layer, whole, images(3, 2))
    distributed.destroy_process_group(group)
    return errors


def second_derivative_case(device, dtype):
    """First gradients are right where second ones could follow, and these are refused, as torch's norm refuses them."""
    rank, layer = distributed.get_rank(), layer_of(_CONV, device, dtype)
    whole, xs = Whole(layer), images(2, 3)
    given = place(xs[rank], device, dtype).requires_grad_()
    exactly = [x.double().requires_grad_() for x in xs]
    found = whole(exactly)
    z = layer(given)
    (mine,) = torch.autograd.grad((z * found[rank][1].to(z)).sum(), given, create_graph=True)
    (wanted,) = torch.autograd.grad(sum((zs * moderate).sum() for zs, moderate in found), exactly[rank])
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        mine.sum().backward()
    return {"x": relative(mine, wanted)}


def network_case(compiled, device, dtype):
    """A converted network, its norms replaced as torch does it: gradients add up to those of all images.

    Compiled, its layers run the same kernels beside the graph.
    """
    torch.compiler.reset()
    rank = distributed.get_rank()
    network = nn.Sequential(
        *(nn.Conv2d(6, 32, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3), nn.BatchNorm2d(32), nn.ReLU()),
    )
    convert_(network, plan(network, (6, 9, 9)), init="random")
    exact = deepcopy(network).double()
    network = nn.SyncBatchNorm.convert_sync_batchnorm(network).to(device, dtype, memory_format=torch.channels_last)
    xs = [torch.randn(b, 6, 9, 9) + 0.5 * r for r, b in enumerate((5, 3))]
    run = torch.compile(network, backend="aot_eager" if device == "cpu" else "inductor") if compiled else network
    with dispatch.watch() as ran:
        z = run(place(xs[rank], device, dtype))
    assert dict(ran) == dict.fromkeys(KERNEL, 2)
    with dispatch.disabled():
        expected = exact(torch.cat(xs).double())
    moderate = (expected.detach() > 0.3).split([len(x) for x in xs])
    (z * moderate[rank].to(z)).sum().backward()
    (expected * torch.cat(moderate)).sum().backward()
    errors = {"z": relative(z, expected.split([len(x) for x in xs])[rank])}
    for (name, mine), wanted in zip(network.named_parameters(), exact.parameters(), strict=True):
        distributed.all_reduce(mine.grad)
        errors[name] = error_of(mine.grad, wanted.grad)
    for (name, mine), wanted in zip(network.named_buffers(), exact.buffers(), strict=True):
        errors[name] = relative(mine, wanted)
    return errors


_CONV = functools.partial(DCLConv2d, 6, 20, 3, width=8)
_PLAIN = functools.partial(_CONV, bias=False)
_LINEAR = functools.partial(DCLLinear, 40, 24, width=8)
_STEPS = {
    "unequal batches": (_PLAIN, functools.partial(images, 3, 5), {}),
    "biases": (_CONV, functools.partial(images, 4, 2), {"momentum": 0.4}),
    "many filters": (functools.partial(_PLAIN, width=20), functools.partial(images, 2, 3), {"eps": 0.1}),
    "three branches, mean of all batches": (
        functools.partial(_CONV, branches=3), functools.partial(images, 2, 3), {"momentum": None}
    ),
    "no scales, no statistics": (
        _CONV, functools.partial(images, 3, 2), {"affine": False, "track_running_stats": False}
    ),
    "no input on one process": (_CONV, functools.partial(images, 4, 0), {}),
    "mean of 100 deviations": (_PLAIN, functools.partial(images, 3, 5, mean=100.0), {}),
    "linear": (_LINEAR, functools.partial(vectors, 30, 50), {}),
    "one position on one process": (_LINEAR, functools.partial(vectors, 40, 1), {}),
}  # fmt: skip
CASES: dict[str, Callable[[str, torch.dtype], Errors]] = {
    **{name: functools.partial(steps_case, *what) for name, what in _STEPS.items()},
    "two forward passes": two_forwards_case,
    "evaluation": evaluation_case,
    "scales alone": scales_alone_case,
    "groups": groups_case,
    "one tensor": one_tensor_case,
    "second derivative": second_derivative_case,
    "network": functools.partial(network_case, False),
    "compiled network": functools.partial(network_case, True),
}
LIMITS = {"mean of 100 deviations": 5e-5, "network": 1e-4, "compiled network": 1e-4}
"""Where float32 has fewer digits left than elsewhere: plain torch in one process has no more."""
HALF = ["unequal batches", "biases", "many filters", "no input on one process", "linear"]
AUTOCAST = {"autocast": (3, 5), "autocast, no input on one process": (0, 3)}
CASES |= {name: functools.partial(autocast_case, batches) for name, batches in AUTOCAST.items()}
CASES["beside torch's norm"] = beside_torch_case
ON_GPU = ["beside torch's norm"]
"""Torch's own norm is for GPUs alone."""
IN_FLOAT32 = [name for name in CASES if name not in (*AUTOCAST, *ON_GPU)]
IN_FLOAT16 = [*HALF, *AUTOCAST]
