"""Cases of the kernel for local response normalisation: errors of results and gradients against torch in float64."""

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from tests.kernels.cases import Errors, relative
from torch import Tensor, nn
from torch.nn import functional as F

from torch_dcl.kernels import dispatch
from torch_dcl.models import AlexNet, alexnet
from torch_dcl.models._quick import QuickConv2d, QuickResponseNorm, conv_of_cells
from torch_dcl.models._response_norm import response_norm

LAST = torch.channels_last


class Case(NamedTuple):
    channels: int
    rows: int
    size: int = 5
    alpha: float = 0.01
    beta: float = 0.75
    k: float = 1.0
    spread: float = 10.0


CASES = {
    "AlexNet's first": Case(96, 63, 5, 1e-4, spread=100.0),
    "AlexNet's second": Case(256, 35, 5, 1e-4, spread=100.0),
    "one channel": Case(1, 1000),
    "one row of three channels": Case(3, 1),
    "three channels, window wider than the row": Case(3, 1000, 7),
    "five channels": Case(5, 3),
    "five channels, window of 15": Case(5, 7, 15),
    "two channels": Case(2, 33, 3),
    "four channels, window of 9": Case(4, 33, 9),
    "a hundred channels": Case(100, 3),
    "a hundred and one": Case(101, 3, 3),
    "a thousand channels": Case(1000, 3),
    "a thousand rows": Case(96, 1000),
    "window of one": Case(96, 3, 1),
    "window of three": Case(256, 3, 3),
    "window of seven": Case(24, 11, 7),
    "window of eleven": Case(24, 11, 11),
    "another power": Case(96, 5, 5, 0.5, 0.5, 2.0),
    "a power above one": Case(40, 5, 3, 1.0, 1.3, 0.1),
    "power zero": Case(8, 5, 3, 1.0, 0.0),
    "alpha zero": Case(8, 5, 3, 0.0),
    "large values": Case(96, 5, 5, 1e-4, spread=1e4),
    "large values, another power": Case(96, 5, 5, 1e-4, 0.6, spread=1e4),
    "small values": Case(96, 5, 5, spread=1e-3),
}


def errors_of(case: Case, device: str, dtype: torch.dtype) -> Errors:
    """Result and gradient of one case; a path that is not the kernel's is an error too."""
    torch.manual_seed(0)
    settings = case[2:6]
    drawn = (case.spread * torch.randn(1, case.rows, case.channels)).clamp(-1e4, 1e4)
    drawn *= torch.rand_like(drawn) > 0.2  # zeros, as after a ReLU
    x = drawn.to(device, dtype).transpose(1, 2).requires_grad_()
    g = torch.randn(1, case.rows, case.channels).to(device, dtype).transpose(1, 2)
    with dispatch.watch() as ran:
        z = response_norm(x, *settings)
    (dx,) = torch.autograd.grad(z, x, g)
    exact_x = x.detach().double().requires_grad_()
    exact = F.local_response_norm(exact_x, *settings)
    (exact_dx,) = torch.autograd.grad(exact, exact_x, g.double())
    return {
        "z": relative(z, exact), "dx": relative(dx, exact_dx),
        "another path": float(ran != {"response_norm: kernel": 1}), "another type": float(z.dtype != dtype),
        "another layout": float(z.stride() != x.stride() or dx.stride() != x.stride()),
    }  # fmt: skip


def _images(device: str, channels: int = 12) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, g = 10 * torch.randn(2, 2, channels, 3, 5).to(device)
    return x.to(memory_format=LAST).requires_grad_(), g


def _layouts(device: str) -> Errors:
    """Images, volumes, an empty batch, and a gradient that lies otherwise than the input."""
    errors = {}
    for name, shape, layout in (
        ("images", (2, 12, 3, 5), LAST), ("volumes", (2, 12, 3, 2, 5), torch.channels_last_3d),
        ("empty", (0, 12, 3, 5), LAST), ("one pixel", (2, 12, 1, 1), torch.contiguous_format),
    ):  # fmt: skip
        x = (10 * torch.randn(shape, device=device)).to(memory_format=layout).requires_grad_()
        g = torch.randn(shape, device=device)
        with dispatch.watch() as ran:
            z = response_norm(x, 5, 0.01, 0.75, 1.0)
        found = torch.autograd.grad(z, x, g)[0]
        exact = torch.autograd.grad(F.local_response_norm(x.double(), 5, 0.01, 0.75, 1.0), x, g.double())[0]
        errors |= {name: relative(found, exact), f"{name}, path": float(not ran["response_norm: kernel"])}
        errors[f"{name}, layout"] = float(z.stride() != x.stride() or found.stride() != x.stride())
    return errors


def _left_to_torch(device: str) -> Errors:
    """What the kernel does not take, with torch's results."""
    x, _ = _images(device)
    given = {
        "even size": (x, 4, 0.01, 0.75, 1.0), "k = 0": (x, 5, 0.01, 0.75, 0.0), "alpha < 0": (x, 5, -1e-9, 0.75, 1.0),
        "large size": (x, 17, 0.01, 0.75, 1.0), "float64": (x.double(), 5, 0.01, 0.75, 1.0),
        "channels apart": (x.contiguous(), 5, 0.01, 0.75, 1.0),
        "every other image": (torch.cat((x, x))[:, ::2], 5, 0.01, 0.75, 1.0),
    }  # fmt: skip
    errors = {}
    for name, arguments in given.items():
        with dispatch.watch() as ran:
            z = response_norm(*arguments)
        errors[name] = float(ran != {"response_norm: reference": 1} or not z.equal(F.local_response_norm(*arguments)))
    with dispatch.disabled(), dispatch.watch() as ran:
        response_norm(x, 5, 0.01, 0.75, 1.0)
    errors["disabled"] = float(ran != {"response_norm: reference": 1})
    with dispatch.watch() as ran:
        torch.vmap(lambda each: response_norm(each, 5, 0.01, 0.75, 1.0))(x.detach()[None])
    errors["vmap"] = float(ran != {"response_norm: reference": 1})
    return errors


def _operation(device: str) -> Errors:
    """The operation by itself: in any layout, through vmap, and as torch expects of operations."""
    x, g = _images(device)
    torch.library.opcheck(torch.ops.torch_dcl.response_norm.default, (x, 5, 0.01, 0.75, 1.0))
    errors = {}
    for name, layout in (("channels_last", LAST), ("contiguous", torch.contiguous_format)):
        own = x.detach().contiguous(memory_format=layout).requires_grad_()
        z = torch.ops.torch_dcl.response_norm(own, 5, 0.01, 0.75, 1.0)
        exact = F.local_response_norm(x.double(), 5, 0.01, 0.75, 1.0)
        found, expected = (torch.autograd.grad(y, at, g.to(y.dtype))[0] for y, at in ((z, own), (exact, x)))
        errors |= {name: relative(z, exact), f"{name}, gradient": relative(found, expected)}
        errors[f"{name}, layout"] = float(z.stride() != own.stride() or found.stride() != own.stride())
    each = torch.stack((x.detach(), 2 * x.detach()), 1)
    mapped = torch.vmap(lambda t: torch.ops.torch_dcl.response_norm(t, 5, 0.01, 0.75, 1.0), 1)(each)
    expected = torch.stack([F.local_response_norm(t, 5, 0.01, 0.75, 1.0) for t in each.unbind(1)])
    return {**errors, "vmap": relative(mapped, expected)}


def _second_derivative(device: str) -> Errors:
    found = []
    for kind in (torch.float32, torch.float64):
        x, g = _images(device)
        own = x.detach().to(kind).requires_grad_()
        z = response_norm(own, 5, 0.01, 0.75, 1.0)
        (first,) = torch.autograd.grad(z, own, g.to(kind), create_graph=True)
        found.append((first, torch.autograd.grad(first.square().sum(), own)[0]))
    return {name: relative(*pair) for name, pair in zip(("first", "second"), zip(*found, strict=True), strict=True)}


def _compiled(device: str) -> Errors:
    """In one graph, and without a graph of its own for every batch size."""
    layer = QuickResponseNorm(5, alpha=0.01)
    compiled = torch.compile(layer, backend="inductor" if device == "cuda" else "aot_eager", fullgraph=True)
    errors = {}
    for n in (2, 3):
        x = (10 * torch.randn(n, 12, 3, 5, device=device)).to(memory_format=LAST).requires_grad_()
        with dispatch.watch() as ran:
            z = compiled(x)
        exact = F.local_response_norm(x.double(), 5, 0.01, 0.75, 1.0)
        g = torch.randn_like(z)
        found, expected = (torch.autograd.grad(y, x, g.to(y.dtype))[0] for y in (z, exact))
        errors |= {f"{n}, z": relative(z, exact), f"{n}, dx": relative(found, expected)}
        errors[f"{n}, path"] = float(bool(ran["response_norm: reference"]))
    return errors


def _under_autocast(device: str) -> Errors:
    x, _ = _images(device)
    with torch.autocast(device, torch.bfloat16):
        z = QuickResponseNorm(5, alpha=0.01)(x.bfloat16())
    exact = F.local_response_norm(x.bfloat16().double(), 5, 0.01, 0.75, 1.0)
    close = relative(z, exact) < (2.5e-3 if device == "cuda" else 5e-3)  # the interpreter cuts bits off
    return {"another type": float(z.dtype != torch.bfloat16), "far": float(not close)}


def plain_twin(model: AlexNet) -> AlexNet:
    """The same network of torch's own layers alone."""
    twin = copy.deepcopy(model)
    for name in ("norm1", "norm2"):
        norm = getattr(model, name)
        setattr(twin, name, nn.LocalResponseNorm(norm.size, norm.alpha, norm.beta, norm.k))
    twin.conv1 = nn.Conv2d(3, 96, 11, stride=4).to(model.conv1.weight)
    twin.load_state_dict(model.state_dict())
    return twin.to(memory_format=LAST)


def alexnet_errors(device: str, *, compiled: bool = False) -> Errors:
    """Logits and gradients of AlexNet in float32 beside those of its plain twin; dropout left out."""
    torch.manual_seed(0)
    model = alexnet(10).to(device, memory_format=LAST).eval()
    x = (60 * torch.randn(1, 3, 227, 227, device=device)).to(memory_format=LAST)
    results = []
    for network in (model, plain_twin(model)):
        run = torch.compile(network) if compiled and network is model else network
        with dispatch.watch() as ran:
            logits = run(x)
        results.append((logits, *torch.autograd.grad(logits.square().sum(), network.parameters())))
        if network is model:
            kernels_ran = ran["response_norm: kernel"]
    names = ("logits", *(name for name, _ in model.named_parameters()))
    errors = {name: relative(a, b) for name, a, b in zip(names, *results, strict=True)}
    return {**errors, "norms that took another path": float(kernels_ran != 2)}


def _convolution(device: str) -> Errors:
    """The layer takes cells where it should, and torch's way elsewhere, to the same results."""
    torch.manual_seed(0)
    errors = {}
    for name, layout, settings, taken in (
        ("AlexNet's", LAST, {}, True), ("contiguous", torch.contiguous_format, {}, False),
        ("padded", LAST, {"padding": 1}, False), ("dilated", LAST, {"dilation": 2}, False),
        ("stride of one", LAST, {"stride": 1}, False), ("unequal", LAST, {"stride": (2, 3)}, True),
    ):  # fmt: skip
        layer = QuickConv2d(3, 8, 7, **{"stride": 4, **settings}).to(device, memory_format=layout)
        x = torch.randn(2, 3, 25, 31, device=device).contiguous(memory_format=layout)
        errors[f"{name}, path"] = float(layer._is_faster(x, layer.weight) != taken)
        exact = copy.deepcopy(layer).double()(x.double())
        errors[name] = relative(layer(x), exact)
    small = torch.randn(2, 3, 5, 5, device=device).to(memory_format=LAST)
    errors["smaller than the kernel"] = float(layer._is_faster(small, layer.weight))
    weight = layer.weight.detach()
    with torch.autocast(device, torch.bfloat16):
        errors["autocast"] = float(conv_of_cells(x, weight, None, (4, 4)).dtype != torch.bfloat16)
    return errors


OTHERS: dict[str, Callable[[str], Errors]] = {
    "layouts": _layouts, "left to torch": _left_to_torch, "operation": _operation, "compiled": _compiled,
    "second derivative": _second_derivative, "autocast": _under_autocast, "convolution": _convolution,
}  # fmt: skip
