"""The fusion's kernels, and the layers that use them, against the reference in float64.

For the interpreter on the CPU and for a GPU alike.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable
from copy import deepcopy
from unittest import mock

import torch
from tests.kernels.cases import Errors, relative
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_dcl import DCLConv1d, DCLConv2d, DCLConv3d, DCLLinear, advance_branches_, functional, kernels
from torch_dcl.kernels import dispatch, host, launch, unit

CASES: dict[str, Callable[[str, torch.dtype], Errors]] = {}
WITHOUT = " without kernels"


def reference(pre, eps, pairs):
    return (functional.fuse_pairs if pairs else functional.fuse_branches)(pre, eps)


def _home(inputs, device):
    """Where the reference runs: on the CPU, unless it is large."""
    return device if sum(t.numel() for t in inputs) > 1_000_000 else "cpu"


def compared(fast, exact, inputs, device, dtype):
    """Outputs and gradients of two functions on the same rounded inputs."""
    rounded = [t.to(dtype) for t in inputs]
    given = [t.to(device).requires_grad_() for t in rounded]
    wide = [t.to(_home(inputs, device), torch.float64).requires_grad_() for t in rounded]
    z, expected = fast(*given), exact(*wide)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    found = torch.autograd.grad(z, given, grad.to(device))
    wanted = torch.autograd.grad(expected, wide, grad.to(expected))
    with dispatch.disabled():
        plain_z = fast(*given)
    plain = torch.autograd.grad(plain_z, given, grad.to(device))
    errors = {"z": relative(z, expected), "z" + WITHOUT: relative(plain_z, expected)}
    for i, (a, b, exactly) in enumerate(zip(found, plain, wanted, strict=True)):
        errors |= {f"gradient {i}": relative(a, exactly), f"gradient {i}" + WITHOUT: relative(b, exactly)}
    return errors


def fuse_case(T, pairs, shape, change, device, dtype):
    torch.manual_seed(T)
    pre = [torch.randn(shape) for _ in range(T)]
    if change == "dead":
        pre[0].abs_().neg_()
        pre[1].flatten()[::2] = 0
    if change == "large and small":
        # Apart from each other, so that a norm does not hide the small ones behind the large ones.
        scale = torch.logspace(-4, 4, pre[0].numel()).view(shape)
        pre = [pre[0] * scale, pre[1] / scale, *pre[2:]]
    if change == "huge":
        # The products leave the range of float32 on the way to a z that does not.
        pre = [pre[0] * 1e20, pre[1] * 1e-3, *(p * 1e-20 for p in pre[2:])]
    if change == "strided":
        # Each in a layout of its own, with gaps and without.
        pre = [torch.stack([pre[0], pre[0]], -1)[..., 0], pre[1].movedim(0, -1).contiguous().movedim(-1, 0), *pre[2:]]
    eps = 10.0 ** -(2 if pairs else T)
    fast = dispatch.fuse_pairs if pairs else dispatch.fuse_branches
    with dispatch.watch() as ran:
        errors = compared(lambda *p: fast(p, eps), lambda *p: reference(p, eps, pairs), pre, device, dtype)
    assert sorted(path.split(": ")[1] for path in ran.elements()) == ["kernel", "reference"], ran
    return errors


for _T, _pairs in ((2, False), (3, False), (3, True)):
    for _shape in ((1,), (3, 7), (2, 5, 211)):
        for _change in ("", "dead", "large and small", "huge", "strided"):
            name = f"fuse T={_T}{' pairs' if _pairs else ''} {_shape} {_change}"
            CASES[name] = functools.partial(fuse_case, _T, _pairs, _shape, _change)


def project_case(T, pairs, P, M, K2, bias, keep, device, dtype, eps=None):
    torch.manual_seed(P)
    inputs = [torch.randn(P, T * M), torch.randn(T * M, K2) / M**0.5]
    if bias:
        inputs.append(torch.randn(T, K2))
    eps = eps or 10.0 ** -(2 if pairs else T)

    def exact(y, weight, *rest):
        parts = zip(y.split(M, 1), weight.split(M), rest[0] if rest else [0] * T, strict=True)
        return reference([y_t @ W_t + b_t for y_t, W_t, b_t in parts], eps, pairs)

    def fast(y, weight, *rest):
        return dispatch.project_and_fuse(y, weight, rest[0] if rest else None, [M] * T, eps, pairs=pairs, keep=keep)

    with dispatch.watch() as ran:
        errors = compared(fast, exact, inputs, device, dtype)
    assert ran["project_and_fuse: kernel"] == ran["project_and_fuse: reference"] == 1, ran
    return errors


for _T, _pairs in ((2, False), (3, False), (3, True)):
    for _P, _M, _K2 in ((1, 1, 1), (3, 20, 7), (150, 20, 65), (40, 100, 130)):
        for _bias in (True, False):
            for _keep in (True, False):
                name = f"project T={_T}{' pairs' if _pairs else ''} P={_P} M={_M} K2={_K2}"
                name += f"{' bias' if _bias else ''}{' kept' if _keep else ''}"
                CASES[name] = functools.partial(project_case, _T, _pairs, _P, _M, _K2, _bias, _keep)


# In half precision a backward adds up the weights' gradient as it goes, and few kept responses have their own kernel.
# An ε that float32 could lose takes the careful arithmetic.
HALF = {
    f"project T={T} P={P} M={M} K2={K2} eps={eps}{' bias' if bias else ''}{' kept' if keep else ''}": functools.partial(
        project_case, T, False, P, M, K2, bias, keep, dtype=torch.float16, eps=eps
    )
    for T, P, M, K2, eps, bias, keep in [
        (2, 1, 1, 1, 1e-2, True, False), (2, 150, 20, 65, 1e-2, True, False), (2, 150, 20, 65, 1e-2, False, False),
        (2, 150, 20, 65, 1e-25, True, False), (2, 70, 100, 40, 1e-2, True, False),
        (2, 70, 100, 40, 1e-25, False, False), (2, 70, 150, 40, 1e-2, True, False), (3, 70, 20, 40, 1e-3, True, False),
        (2, 3, 300, 40, 1e-2, True, True), (2, 150, 20, 65, 1e-2, False, True), (3, 150, 20, 65, 1e-3, True, True),
        (2, 300, 20, 65, 1e-2, True, True), (2, 100, 70, 130, 1e-2, True, True), (2, 1, 7, 1, 1e-2, False, True),
        (2, 100, 20, 65, 1e-25, True, True), (3, 100, 70, 130, 1e-3, True, True), (2, 40, 512, 2050, 1e-2, True, True),
        (2, 100, 520, 2050, 1e-2, False, True),
    ]
}  # fmt: skip


def beyond_case(T, pairs, keep, device, dtype, sizes=(150, 20, 65)):
    """One position whose products leave the range of float32 on the way to a z that does not, among others."""
    torch.manual_seed(T)
    P, M, K2 = sizes
    odd = 77
    y, weight = torch.randn(P, T * M).to(dtype), (torch.randn(T * M, K2) / M**0.5).to(dtype)
    y[odd] *= 1e20
    eps, found = 10.0 ** -(2 if pairs else T), []
    grad = torch.randn(P, K2, generator=torch.Generator().manual_seed(9)).to(dtype)
    for place, kind in ((device, dtype), (_home((y, weight), device), torch.float64)):
        given = [t.to(place, kind).requires_grad_() for t in (y, weight)]
        if kind == torch.float64:
            pairs_of = zip(given[0].split(M, 1), given[1].split(M), strict=True)
            z = reference([y_t @ W_t for y_t, W_t in pairs_of], eps, pairs)
        else:
            z = dispatch.project_and_fuse(*given, None, [M] * T, eps, pairs=pairs, keep=keep)
        found.append((z, *torch.autograd.grad(z, given, grad.to(place, kind))))
    errors = {}
    for name, mine, exact in zip(("z", "gradient of y"), *(f[:2] for f in found), strict=True):
        others = torch.arange(P) != odd
        errors[name] = relative(mine.cpu()[others], exact.cpu()[others])
        errors[f"{name} at the odd position"] = relative(mine[odd], exact[odd])
    return errors | {"gradient of the weights": relative(found[0][2], found[1][2])}


for _T, _pairs in ((2, False), (3, False), (3, True)):
    for _keep in (True, False):
        name = f"beyond the range T={_T}{' pairs' if _pairs else ''}{' kept' if _keep else ''}"
        CASES[name] = functools.partial(beyond_case, _T, _pairs, _keep)


def again_case(device, dtype):
    """What a kernel found too large is done once more, with care, and nothing else."""
    from torch_dcl.kernels import project

    torch.manual_seed(0)
    P, M, N = 150, 20, 130
    y, weight, bias, grad = torch.randn(P, 2 * M), torch.randn(2 * M, N) / M**0.5, torch.randn(2, N), torch.randn(P, N)
    given = [t.to(device, dtype) for t in (y, weight, bias)]
    found = torch.zeros(2, 3)  # of two programs over the positions and three over the outputs
    found[1, 2] = torch.nan
    found, incoming = found.to(device), grad.to(device, dtype)
    out = torch.full((P, N), -1.0).to(device, dtype)
    dpre, parts = torch.full((2, P, N), -1.0).to(device, dtype), torch.full((2, 2 * (M + 1), N), -1.0).to(device)
    kind, where = given[0].dtype, given[0].device
    projection = project.Projection(P, M, 2, N, kind, where, 0.01, False, kind, 0, kind != torch.float32)
    projection.redo_forward(found, out, *given)
    projection.redo_backward(found, dpre, parts, incoming, *given)
    wide = [t.to("cpu", torch.float64).requires_grad_() for t in given]
    pre = [y_t @ W_t + b_t for y_t, W_t, b_t in zip(wide[0].split(M, 1), wide[1].split(M), wide[2], strict=True)]
    z = reference(pre, 0.01, False)
    rows, columns = slice(64, 128), slice(128, None)  # the second program's tiles are every other
    part = torch.zeros(P, N, dtype=torch.float64)
    part[rows, columns] = incoming.cpu().double()[rows, columns]
    wanted = torch.autograd.grad(z, [*pre, wide[1], wide[2]], part, retain_graph=True)
    errors = {"z": relative(out[rows, columns], z[rows, columns])}
    for t in range(2):
        errors[f"gradient of response {t}"] = relative(dpre[t, rows, columns], wanted[t][rows, columns])
    errors["gradient of the weights"] = relative(parts[1, 2:, columns], wanted[2][:, columns])
    errors["gradient of the biases"] = relative(parts[1, :2, columns], wanted[3][:, columns])
    untouched = torch.ones(P, N, dtype=torch.bool)
    untouched[rows, columns] = False
    for name, t in (("z", out), ("response 0", dpre[0]), ("response 1", dpre[1])):
        errors[f"{name} elsewhere"] = float((t.cpu()[untouched] != -1).any())
    errors["parts elsewhere"] = float((parts[0] != -1).any() or (parts[1, :, :128] != -1).any())
    return errors


CASES["once more with care"] = again_case


def empty_case(keep, device, dtype):
    """A batch without an image: nothing comes out, and the parameters have gradients of zero."""
    given = [torch.zeros(0, 6), torch.randn(6, 8), torch.randn(2, 8)]
    given = [t.to(device, dtype).requires_grad_() for t in given]
    with dispatch.watch() as ran:
        z = dispatch.project_and_fuse(*given, [3, 3], 0.01, pairs=False, keep=keep)
    assert dict(ran) == {"project_and_fuse: kernel": 1}
    dy, *gradients = torch.autograd.grad(z.sum(), given)
    sizes = z.numel() + dy.numel()
    return {"what comes out": float(sizes), "gradients": max(float(g.abs().max()) for g in gradients)}


CASES["an empty batch"] = functools.partial(empty_case, False)
CASES["an empty batch, kept"] = functools.partial(empty_case, True)


# Too large for the interpreter.
LARGE = {
    f"project T={T} P={P} M={M} K2={K2}{' kept' if keep else ''}": functools.partial(
        project_case, T, False, P, M, K2, True, keep
    )
    for T, P, M, K2, keep in [
        (2, 50_177, 20, 7, False), (3, 50_177, 1, 1, False), (2, 3, 100, 1000, False), (3, 65, 100, 1023, False),
        (2, 70, 256, 48, False), (3, 70, 256, 48, False), (2, 70, 300, 48, False), (2, 50_177, 20, 7, True),
        (3, 65, 100, 1023, True), (2, 784, 128, 512, False), (2, 128, 512, 2048, True), (2, 512, 256, 1024, True),
        (3, 511, 100, 1000, True), (2, 400, 1024, 4096, True),
    ]
}  # fmt: skip
# Large enough for the kernels of Hopper GPUs, most of them with a last tile that is not full.
HOPPER = {
    f"project P={P} M={M} K2={K2}{' bias' if bias else ''}": functools.partial(
        project_case, 2, False, P, M, K2, bias, False, dtype=torch.bfloat16
    )
    for P, M, K2, bias in [
        (16_384, 128, 512, True), (16_500, 128, 512, False), (131_200, 64, 64, True), (65_700, 64, 128, False),
        (43_801, 128, 192, True), (1_048_700, 16, 64, True), (524_300, 32, 128, False), (1_048_700, 32, 64, True),
    ]
}  # fmt: skip
HOPPER |= {
    f"beyond the range {sizes}": functools.partial(beyond_case, 2, False, False, dtype=torch.bfloat16, sizes=sizes)
    for sizes in [(16_500, 128, 512), (65_700, 64, 128), (524_300, 32, 128)]
}


KINDS = {
    "images": (functools.partial(DCLConv2d, 6, 20, 3, padding=1), (6, 6, 11, 13), torch.channels_last),
    "images, many outputs": (functools.partial(DCLConv2d, 6, 68, 3, padding=1), (6, 6, 11, 13), torch.channels_last),
    "linear": (functools.partial(DCLLinear, 24, 40), (9, 24), torch.contiguous_format),
    "linear, one input": (functools.partial(DCLLinear, 24, 40), (24,), torch.contiguous_format),
    "linear, sequences": (functools.partial(DCLLinear, 24, 40), (3, 5, 24), torch.contiguous_format),
    "conv": (functools.partial(DCLConv2d, 6, 20, 3, padding=1), (2, 6, 5, 7), torch.channels_last),
    "conv1d, one position": (functools.partial(DCLConv1d, 6, 20, 3), (2, 6, 3), torch.contiguous_format),
    "conv1d, one position, one input": (functools.partial(DCLConv1d, 6, 20, 3), (6, 3), torch.contiguous_format),
    "conv1d, one input": (functools.partial(DCLConv1d, 6, 20, 3), (6, 5), torch.contiguous_format),
    "conv2d, one position, one input": (functools.partial(DCLConv2d, 6, 20, 3), (6, 3, 3), torch.contiguous_format),
    "conv3d": (functools.partial(DCLConv3d, 3, 20, 2), (2, 3, 4, 3, 5), torch.channels_last_3d),
    "conv, channels apart": (functools.partial(DCLConv2d, 6, 20, 3, padding=1), (2, 6, 5, 7), torch.contiguous_format),
    "conv 1x1, channels apart": (functools.partial(DCLConv2d, 6, 20, 1), (2, 6, 5, 7), torch.contiguous_format),
    "conv of one channel": (functools.partial(DCLConv2d, 1, 20, 3, stride=2), (2, 1, 7, 9), torch.contiguous_format),
    "conv, around the border": (
        functools.partial(DCLConv2d, 6, 20, 3, padding=1, padding_mode="circular"), (2, 6, 5, 7),
        torch.contiguous_format,
    ),
    "conv, one input": (functools.partial(DCLConv2d, 6, 20, 3), (6, 5, 7), torch.contiguous_format),
    "conv1d": (functools.partial(DCLConv1d, 6, 20, 3), (2, 6, 9), torch.contiguous_format),
    "conv3d, channels apart": (functools.partial(DCLConv3d, 3, 20, 2), (2, 3, 4, 3, 5), torch.contiguous_format),
}  # fmt: skip
"""What makes a layer, a shape of inputs, and how both lie in memory; more images for sums that few leave to chance."""


def at_once(kind, dtype):
    """Whether stage 2 is one kernel. Images as torch has them by default are turned for it, but not in full float32.

    Images of one position or of one channel lie in both layouts.
    """
    apart = KINDS[kind][2] == torch.contiguous_format and "conv" in kind and "of one channel" not in kind
    apart = apart and "one position" not in kind
    return not apart or dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32


def in_float64(layer):
    """The same layer in float64 on the CPU, but for its branch outputs: they are rounded as the layer rounds them.

    Where a response is near zero, a branch output's last bit decides whether there is a gradient at all, and how steep
    it is. So both must start stage 2 from the same numbers for their difference to be the error of what comes behind.
    """
    exact = deepcopy(layer).to("cpu", torch.float64)
    stage = layer._plain_stage()

    def branch(x, weight=None, bias=None):  # as the kernels have it, where they do
        if stage is None or x.dim() != stage.spatial + 2 or not kernels.usable(x):
            return layer.branch(x)
        return unit._construct(x, layer.branch.weight.detach(), stage)[1]

    def rounded(construct, low):
        def run(x, *parameters):
            y, like = construct(x, *parameters), layer.branch.weight
            with torch.no_grad():
                error = low(*(None if t is None else t.to(like) for t in (x, *parameters))).to(y) - y
            return y + error

        return run

    exact._construct = rounded(exact._construct, branch)
    exact._run_branch = rounded(exact._run_branch, layer._run_branch)
    return exact


def layer_case(kind, settings, training, device, dtype):
    """A layer with its kernels, and beside it without them, against the same layer in float64."""
    torch.manual_seed(0)
    make, shape, memory = KINDS[kind]
    layer, x = make(**settings).to(memory_format=memory), torch.randn(shape).to(memory_format=memory)
    layer = layer.to(dtype).train(training)
    advance_branches_(layer, 3)
    layer = layer.to(device)
    wide = in_float64(layer)
    given, exact = x.to(device, dtype).requires_grad_(), x.to(dtype).double().requires_grad_()
    with dispatch.watch() as ran:
        z = layer(given)
    assert not [path for path in ran if path.endswith("reference")], ran
    together = at_once(kind, dtype)
    fuse = "fuse_pairs" if layer.strategy == "stochastic" and not training else "fuse_branches"
    assert dict(ran) == {"project_and_fuse: kernel" if together else f"{fuse}: kernel": 1}
    with dispatch.disabled(), dispatch.watch() as unfused:
        expected = wide(exact)
    assert not [path for path in unfused if path.endswith("kernel")], unfused
    assert z.shape == expected.shape
    assert z.is_contiguous(memory_format=memory)
    assert type(torch.relu_(layer(given)).grad_fn).__name__ == "ReluBackward0"  # of a view it would be a copy, or fail
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    found = torch.autograd.grad(z, [given, *layer.parameters()], grad.to(device))
    wanted = torch.autograd.grad(expected, [exact, *wide.parameters()], grad.double())
    with dispatch.disabled():
        plain_z = layer(given)
    plain = torch.autograd.grad(plain_z, [given, *layer.parameters()], grad.to(device))
    names = ["x", *(name for name, _ in layer.named_parameters())]
    errors = {"z": relative(z, expected), "z" + WITHOUT: relative(plain_z, expected)}
    for name, a, b, exactly in zip(names, found, plain, wanted, strict=True):
        errors |= {name: relative(a, exactly), name + WITHOUT: relative(b, exactly)}
    return errors


_SETTINGS = {
    "T=2": {"branches": 2, "width": 8},
    "T=3": {"branches": 3, "width": 8},
    "T=3 stochastic": {"branches": 3, "width": 8, "strategy": "stochastic"},
    "no bias": {"branches": 2, "width": 8, "bias": False},
    "norm": {"branches": 2, "width": 8, "norm_layer": nn.BatchNorm2d, "bias": False},
}
for _kind in ("linear", "conv", "conv, channels apart"):
    for _name, _settings in _SETTINGS.items():
        if (_kind, _name) == ("linear", "norm"):
            continue
        for _training in (True, False):
            name = f"{_kind} {_name} {'training' if _training else 'evaluation'}"
            CASES[name] = functools.partial(layer_case, _kind, _settings, _training)
CASES |= {
    kind: functools.partial(layer_case, kind, _SETTINGS["T=2"], True)
    for kind in KINDS
    if kind not in ("images", "linear", "conv", "conv, channels apart")  # the latter three are above
}


def _as_trained(layer):
    """Statistics and scales as they are after training: none of them 0 or 1."""
    norm, T = layer.fusion.norm, layer.branches
    parts = [
        t if t is None else t.detach().chunk(T) for t in (norm.running_mean, norm.running_var, norm.weight, norm.bias)
    ]
    for t in range(T):
        parts[0][t].normal_()
        parts[1][t].uniform_(0.1, 2)
        if norm.affine:
            parts[2][t].uniform_(0.2, 2)
            parts[3][t].normal_()


def fixed_norm_case(kind, settings, device, dtype):
    """Norms that are fixed to their statistics are a scale and a shift in the kernel, also where something learns."""
    torch.manual_seed(0)
    make, shape, memory = KINDS[kind]
    layer, x = make(**settings).to(memory_format=memory).eval(), torch.randn(shape).to(memory_format=memory)
    _as_trained(layer)
    if layer.fusion.bias is not None:
        nn.init.normal_(layer.fusion.bias)
    layer = layer.to(device, dtype)
    wide = in_float64(layer)
    given, fuse = x.to(device, dtype), "fuse_pairs" if layer.strategy == "stochastic" else "fuse_branches"
    path, errors = {f"{'project_and_fuse' if at_once(kind, dtype) else fuse}: kernel": 1}, {}
    with torch.no_grad(), dispatch.disabled():
        expected, plain = wide(x.to(dtype).double()), layer(given)
    for name, place in (("no gradients", torch.no_grad()), ("inference", torch.inference_mode())):
        with dispatch.watch() as ran, place:
            z = layer(given)
        assert dict(ran) == path
        assert z.is_contiguous(memory_format=memory)
        errors |= {name: relative(z, expected), name + WITHOUT: relative(plain, expected)}
    before = deepcopy(layer.state_dict())
    errors |= _learned(layer, wide, given, x.to(dtype).double(), path)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    return errors


@torch.no_grad()
def _moderate(wide, x):
    """Where no response is so close to zero that a gradient says more of rounding than of its arithmetic."""
    pre = deepcopy(wide.fusion).respond(wide._construct(x))
    return torch.stack([p.abs() > 0.05 for p in pre]).all(0)


def _learned(layer, wide, given, exactly_given, path):
    """z and gradients of a layer, with kernels and without, against another in float64."""
    names, found = ["z", "x", *(name for name, _ in layer.named_parameters())], []
    state, moderate = deepcopy(layer.state_dict()), _moderate(wide, exactly_given)
    for model, x, off in ((layer, given, False), (layer, given, True), (wide, exactly_given, True)):
        if off and model is layer:  # the running statistics were moved
            model.load_state_dict(state)
        own = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        with dispatch.watch() as ran, dispatch.disabled() if off else contextlib.nullcontext():
            z = model(own)
        assert off or dict(ran) == path, ran
        grad = (torch.randn(z.shape, generator=torch.Generator().manual_seed(9)) * moderate).to(given.dtype).to(z)
        buffers = {name: value.clone() for name, value in model.named_buffers() if value.is_floating_point()}
        found.append([z, *torch.autograd.grad(z, [own, *model.parameters()], grad), *buffers.values()])
    errors = {}
    for name, mine, plain, exact in zip([*names, *buffers], *found, strict=True):
        small = float(exact.detach().norm()) < 1e-6 * exact.numel()  # a bias before a norm: of no effect
        errors[name] = float(mine.abs().max()) / 10 if small else relative(mine, exact)
        errors[name + WITHOUT] = float(plain.abs().max()) if small else relative(plain, exact)
    return errors


def _norm(make, **settings):
    return {"branches": 2, "width": 8, "norm_layer": functools.partial(make, **settings), "bias": False}


NORMS = {
    "T=2": ("images", _norm(nn.BatchNorm2d)),
    "T=2 bias": ("images", _norm(nn.BatchNorm2d) | {"bias": True}),
    "T=2 no scales": ("images", _norm(nn.BatchNorm2d, affine=False, eps=0.1)),
    "T=3": ("images", _norm(nn.BatchNorm2d) | {"branches": 3}),
    "T=3 stochastic": ("images", _norm(nn.BatchNorm2d) | {"branches": 3, "strategy": "stochastic"}),
    "many weights": ("images", _norm(nn.BatchNorm2d) | {"width": 20}),
    "many outputs": ("images, many outputs", _norm(nn.BatchNorm2d) | {"width": 17}),
    "synchronised": ("images", _norm(nn.SyncBatchNorm)),
    "linear": ("linear", _norm(nn.BatchNorm1d)),
    "linear T=3 bias": ("linear", _norm(nn.BatchNorm1d) | {"branches": 3, "bias": True}),
    "conv3d": ("conv3d", _norm(nn.BatchNorm3d)),
    "channels apart": ("conv, channels apart", _norm(nn.BatchNorm2d)),
    "channels apart, one channel": ("conv of one channel", _norm(nn.BatchNorm2d)),
}
CASES |= {f"fixed norm, {name}": functools.partial(fixed_norm_case, *what) for name, what in NORMS.items()}


def batch_norm_case(kind, settings, mean, device, dtype):
    """In training norms are a scale and a shift too: their statistics follow from those of the branch outputs."""
    torch.manual_seed(0)
    make, shape, memory = KINDS[kind]
    layer, x = make(**settings).to(memory_format=memory), torch.randn(shape).to(memory_format=memory) + mean
    if layer.fusion.norm.running_mean is not None:
        _as_trained(layer)
    if layer.fusion.bias is not None:
        nn.init.normal_(layer.fusion.bias)
    layer = layer.to(device, dtype)
    wide = in_float64(layer)
    path = {f"{'project_and_fuse' if at_once(kind, dtype) else 'fuse_branches'}: kernel": 1}
    errors = _learned(layer, wide, x.to(device, dtype), x.to(dtype).double(), path)
    counts = [int(value) for name, value in layer.named_buffers() if name.endswith("num_batches_tracked")]
    assert len(set(counts)) <= 1
    return errors


CASES |= {
    f"batch norm, {name}": functools.partial(batch_norm_case, *what, 0.0)
    for name, what in {
        **{name: what for name, what in NORMS.items() if name != "T=3 stochastic"},
        "mean of all batches": ("images", _norm(nn.BatchNorm2d, momentum=None)),
        "no statistics": ("images", _norm(nn.BatchNorm2d, track_running_stats=False)),
        "conv1d": ("conv1d", _norm(nn.BatchNorm1d)),
    }.items()
}
KINDS["images, deep"] = (functools.partial(DCLConv2d, 6, 160, 3), (6, 6, 8, 9), torch.channels_last)
HALF |= {
    f"batch norm, {M} filters T={T}": functools.partial(
        batch_norm_case, "images, deep", _norm(nn.BatchNorm2d) | {"width": M, "branches": T}, 0.0, dtype=torch.float16
    )
    for M, T in ((129, 3), (150, 2))
}


def blocks_case(device, dtype):
    """Statistics block by block, as for more filters than these."""
    from torch_dcl.kernels import moments

    with mock.patch.multiple(moments, MAX_FILTERS_IN_REGISTERS=16, _SIDE=16):
        return batch_norm_case("images, many outputs", _norm(nn.BatchNorm2d) | {"width": 40}, 3.0, device, dtype)


CASES["batch norm, block by block"] = blocks_case
CASES["batch norm, mean of 100 deviations"] = functools.partial(batch_norm_case, "images", _norm(nn.BatchNorm2d), 100.0)


def compiled_norm_case(training, device, dtype):
    """A compiled layer has its norms and its kernel in one graph, and its running statistics follow."""
    torch.compiler.reset()
    torch.manual_seed(0)
    make, shape, memory = KINDS["conv"]
    layer, x = make(**NORMS["T=2 bias"][1]).train(training), torch.randn(shape)
    _as_trained(layer)
    layer = layer.to(device, dtype, memory_format=memory)
    wide = in_float64(layer)
    given = x.to(device, dtype, memory_format=memory)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with dispatch.watch() as ran, torch.set_grad_enabled(training):
        z = compiled(given)
    assert dict(ran) == {"project_and_fuse: kernel": 1}
    with dispatch.disabled():
        expected = wide(x.to(dtype).double())
    errors = {"z": relative(z, expected)}
    for (name, mine), (_, exact) in zip(layer.named_buffers(), wide.named_buffers(), strict=True):
        errors[name] = relative(mine, exact)
    if training:
        found = torch.autograd.grad(z.float().square().sum(), layer.parameters())
        wanted = torch.autograd.grad(expected.square().sum(), wide.parameters())
        for (name, _), mine, exact in zip(layer.named_parameters(), found, wanted, strict=True):
            errors[name] = relative(mine, exact) if name != "fusion.bias" else float(mine.abs().max()) / 10
    return errors


CASES["fixed norm, compiled"] = functools.partial(compiled_norm_case, False)
CASES["batch norm, compiled"] = functools.partial(compiled_norm_case, True)


def two_forwards_case(device, dtype):
    """Two forward passes before one backward pass, the second under activation checkpointing."""
    torch.manual_seed(0)
    layer = DCLConv2d(6, 20, 3, width=8, norm_layer=nn.BatchNorm2d, bias=False)
    layer = layer.to(device, dtype, memory_format=torch.channels_last)
    wide = in_float64(layer)
    x = torch.randn(2, 2, 6, 5, 7).to(dtype)
    found = []
    for model, given, off in ((layer, x.to(device), False), (wide, x.double(), True)):
        with dispatch.disabled() if off else contextlib.nullcontext():
            first, second = model(given[0]), checkpoint(model, given[1], use_reentrant=False)
            found.append(torch.autograd.grad((first * second).float().sum(), model.parameters()))
    names = [name for name, _ in layer.named_parameters()]
    return {name: relative(mine, exact) for name, mine, exact in zip(names, *found, strict=True)}


CASES["batch norm, two forward passes"] = two_forwards_case


def called_norm_case(change, device, dtype):
    """A norm that does more than scale and shift is called, as it is without kernels."""
    torch.manual_seed(0)
    make = {
        "instances": lambda n: nn.InstanceNorm2d(n, track_running_stats=True, affine=True),
        "groups": lambda n: nn.GroupNorm(4, n),
    }.get(change, nn.BatchNorm2d)
    layer = DCLConv2d(6, 20, 3, width=8, norm_layer=make).to(device, dtype, memory_format=torch.channels_last).eval()
    x = torch.randn(2, 6, 5, 7).to(device, dtype, memory_format=torch.channels_last)
    norm, calls = layer.fusion.norm, []
    if change == "hooked":
        norm.register_forward_hook(lambda *_: calls.append(1))
    if change == "replaced":
        norm.forward = lambda v: 2 * v
    wide = deepcopy(layer).double().cpu()
    with dispatch.watch() as ran, torch.no_grad():
        z = layer(x)
    assert dict(ran) == {"fuse_branches: kernel": 1}
    assert len(calls) == (change == "hooked")
    with dispatch.disabled(), torch.no_grad():
        return {"z": relative(z, wide(x.double().cpu())), "z" + WITHOUT: relative(layer(x), wide(x.double().cpu()))}


for _change in ("instances", "groups", "hooked", "replaced"):
    CASES[f"norm that stays by itself, {_change}"] = functools.partial(called_norm_case, _change)


def turned_case(settings, device, dtype):
    """Images as torch has them by default are turned on the way in and out: to the bit what channels_last gives."""
    if not at_once("conv, channels apart", dtype):  # with TF32 they are turned in float32 too
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            return turned_case(settings, device, dtype)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    layer, x = DCLConv2d(6, 20, 3, **settings).to(device), torch.randn(2, 6, 5, 7).to(device)
    advance_branches_(layer, 3)
    grad, found = torch.randn(2, 20, 3, 5).to(device), {}
    for memory in (torch.contiguous_format, torch.channels_last):
        given = x.to(memory_format=memory).requires_grad_()
        with dispatch.watch() as ran, torch.autocast(device, dtype, enabled=dtype != torch.float32):
            z = layer(given)
        assert not [path for path in ran if path.endswith("reference")], ran
        assert z.is_contiguous(memory_format=memory)
        found[memory] = [z, *torch.autograd.grad(z, [given, *layer.parameters()], grad.to(z.dtype))]
        assert found[memory][1].is_contiguous(memory_format=memory)
        assert {t.dtype for t in found[memory][1:]} == {torch.float32}
    (z, *_), (same, *_) = found.values()
    assert z.dtype == same.dtype
    assert z.dtype == (torch.float32 if _Wide in settings.values() else dtype)
    return {str(i): float((a - b).abs().max()) for i, (a, b) in enumerate(zip(*found.values(), strict=True))}


class _Wide(nn.Module):
    """What leaves autocast, as a softplus does on a GPU."""

    def __init__(self, *_):
        super().__init__()

    def forward(self, x):
        return x.float()


TURNED = _SETTINGS | {
    "a wide norm": {"branches": 2, "width": 8, "norm_layer": _Wide},
    "a wide activation": {"branches": 2, "width": 8, "branch_activation": _Wide},
}
CASES |= {f"turned, {name}": functools.partial(turned_case, settings) for name, settings in TURNED.items()}
HALF |= {
    f"turned, {name}": functools.partial(turned_case, settings, dtype=torch.float16)
    for name, settings in TURNED.items()
}


def scaled_loss_case(device, dtype):
    """Gradients of a scaled loss are those of the loss, scaled: what is formed on their way stays in the range too."""
    torch.manual_seed(0)
    layer = DCLConv2d(6, 20, 3, width=8, norm_layer=nn.BatchNorm2d, bias=False)
    nn.init.uniform_(layer.fusion.norm.weight, 2, 3)
    layer = layer.to(device, dtype, memory_format=torch.channels_last)
    x = torch.randn(8, 6, 11, 13).to(device, dtype, memory_format=torch.channels_last).requires_grad_()
    grad = (torch.randn(8, 20, 9, 11) * 0.1 + 0.2).to(device, dtype)
    with dispatch.watch() as ran:
        once, scaled = (torch.autograd.grad(layer(x), x, grad * scale)[0] for scale in (1, 2**11))
    assert dict(ran) == {"project_and_fuse: kernel": 2}
    return {"x": relative(scaled.float() / 2**11, once.double().cpu())}


HALF["batch norm, a scaled loss"] = functools.partial(scaled_loss_case, dtype=torch.float16)


STRIDED = {
    "ResNet": (3, 7, 2, 3, (13, 17)), "AlexNet": (3, 11, 4, 2, (31, 28)), "patches": (3, 4, 4, 0, (12, 15)),
    "one channel": (1, 3, 2, 1, (8, 9)), "a stride of three": (4, 5, 3, 4, (10, 11)), "a point": (2, 1, 2, 0, (5, 6)),
}  # fmt: skip
"""Channels, filters' sides, stride, padding and sizes of images."""


def strided_case(kind, memory, device, dtype):
    """A convolution in cells of pixels, of whole numbers: each result is exact, whatever the order of its sums."""
    from torch_dcl.kernels import elementwise

    torch.manual_seed(0)
    C, side, S, padding, size = STRIDED[kind]
    x = torch.randint(-2, 3, (3, C, *size)).to(device, dtype, memory_format=memory)
    theta = torch.randint(-2, 3, (10, C, side, side)).to(device, dtype, memory_format=memory)
    cells = elementwise.Cells.of(x, theta, (S, S), (padding, padding), (1, 1))
    wide = theta.double().cpu().requires_grad_()
    y = nn.functional.conv2d(x.double().cpu(), wide, None, S, padding)
    images, filters = cells.images(x), cells.filters(theta.float(), dtype)
    assert images.is_contiguous(memory_format=torch.channels_last)
    errors = {"y": relative(nn.functional.conv2d(images.double().cpu(), filters.double().cpu()), y)}
    grad = torch.randint(-2, 3, y.shape).double()
    shape = filters.shape
    dcells = torch.nn.grad.conv2d_weight(images.double().cpu(), shape, grad)
    found = cells.pixels(dcells.to(device, torch.float32), theta, torch.float32)
    assert found.stride() == theta.stride()
    return errors | {"gradient of the filters": relative(found, torch.autograd.grad(y, wide, grad)[0])}


CASES |= {
    f"strided, {kind}, {name}": functools.partial(strided_case, kind, memory)
    for kind in STRIDED
    for name, memory in (("channels last", torch.channels_last), ("channels apart", torch.contiguous_format))
}


def one_channel_case(device, dtype):
    """Images of one channel lie in both layouts, and the output lies as that of a plain convolution."""
    errors, layouts = {}, (torch.contiguous_format, torch.channels_last)
    for kind, of_filters, of_images in itertools.product((torch.float16, torch.float32), layouts, layouts):
        x = torch.randn(2, 1, 7, 9).to(device, kind, memory_format=of_images)
        modules = DCLConv2d(1, 20, 3, stride=2, width=8), nn.Conv2d(1, 20, 3, stride=2)
        z, expected = (module.to(device, kind, memory_format=of_filters)(x) for module in modules)
        errors[f"{kind}, {of_filters}, {of_images}"] = float(z.stride() != expected.stride())
    return errors


CASES["images of one channel"] = one_channel_case


def refused_case(device, dtype):
    """Images that a convolution in cells of pixels cannot have are torch's error."""
    layer = DCLConv2d(3, 20, 7, stride=2, width=8).to(device, torch.float16, memory_format=torch.channels_last)
    errors = {}
    for shape in ((2, 1, 9, 9), (2, 4, 9, 9), (2, 3, 6, 9)):
        try:
            layer(torch.randn(shape).to(device, torch.float16, memory_format=torch.channels_last))
            errors[str(shape)] = 1.0
        except RuntimeError as error:
            errors[str(shape)] = float("channels" not in str(error) and "Kernel size" not in str(error))
    return errors


CASES["images that do not fit"] = refused_case


def cast_case(device, dtype):
    """Values in another type have the bits that torch gives them, in any layout."""
    from torch_dcl.kernels import elementwise

    torch.manual_seed(0)
    x = (torch.randn(6, 5, 3, 431) * 1e3).to(device)
    x[0, 0, 0, :4] = torch.tensor([0.0, -0.0, torch.inf, torch.nan])
    given = {"as it is": x, "channels last": x.contiguous(memory_format=torch.channels_last), "gaps": x[:, ::2]}
    kinds = [torch.float16, dtype] if device == "cuda" else [torch.float16]  # the interpreter truncates to bfloat16
    errors = {"nothing": relative(elementwise.cast(x[:0], torch.float16), x[:0])}
    for name, values in given.items():
        for kind in kinds:
            found, expected = elementwise.cast(values, kind), values.to(kind, copy=True)
            same = torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0)) and found.dtype == kind
            errors[f"{name}, {kind}"] = float(not same or found.stride() != expected.stride())
    return errors


CASES["cast"] = cast_case


def image_case(settings, device, dtype, *, learned=False):
    """A layer with a stride on images of three channels, in a half type; learned images have a gradient."""
    torch.manual_seed(0)
    layer = DCLConv2d(3, 20, 7, stride=2, padding=3, width=8, **settings)
    layer = layer.to(device, dtype, memory_format=torch.channels_last)
    x = torch.randn(4, 3, 21, 18).to(device, dtype, memory_format=torch.channels_last)
    wide, errors = in_float64(layer), {}
    exact, parameters = x.double().cpu().requires_grad_(learned), list(layer.named_parameters())
    expected, of_wide = wide(exact), list(wide.parameters())
    if learned:
        parameters, of_wide = [*parameters, ("x", x.requires_grad_())], [*of_wide, exact]
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    wanted = torch.autograd.grad(expected, of_wide, grad.double())
    for what in ("", WITHOUT):
        with dispatch.disabled() if what else contextlib.nullcontext():
            z = layer(x)
            found = torch.autograd.grad(z, [parameter for _, parameter in parameters], grad.to(device))
        errors["z" + what] = relative(z, expected)
        for (name, _), a, exactly in zip(parameters, found, wanted, strict=True):
            errors[name + what] = relative(a, exactly)
    return errors


HALF |= {
    "images of three channels": functools.partial(image_case, {}, dtype=torch.float16),
    "learned images of three channels": functools.partial(image_case, {}, dtype=torch.float16, learned=True),
    "images of three channels, batch norm": functools.partial(
        image_case, {"norm_layer": nn.BatchNorm2d, "bias": False}, dtype=torch.float16
    ),
}


def transpose_case(shape, channels, device, dtype):
    """A copy in another layout, and its gradient, whatever layout that comes in; also where both are replayed."""
    torch.manual_seed(0)
    host.wait()
    errors = {}
    for wide in (dtype, torch.float32):
        x = torch.randn(shape).to(device, wide)
        last = x.movedim(channels, -1).contiguous().movedim(-1, channels)
        for name, given, other in (("to the end", x, last), ("back", last, x)):
            own = given.clone(memory_format=torch.preserve_format).requires_grad_()
            grad = torch.randn_like(x, dtype=dtype)
            layouts = {
                "apart": grad, "last": grad.movedim(channels, -1).contiguous().movedim(-1, channels),
                "expanded": torch.ones((), dtype=dtype, device=device).expand(shape),
            }  # fmt: skip
            for call in range(3):  # the second is recorded, and the third replayed
                found = launch.to_layout(own, channels, name == "to the end", dtype)
                assert found.stride() == other.stride() or 1 in shape or 0 in shape
                assert found.dtype == dtype
                errors[f"{wide} {name}, call {call}"] = float((found - other.to(dtype)).abs().sum())
                for layout, lies in layouts.items():
                    (back,) = torch.autograd.grad(found, own, lies, retain_graph=True)
                    assert back.stride() == own.stride() or 1 in shape or 0 in shape
                    errors[f"{wide} {name}, gradient {layout}, {call}"] = float((back - lies.to(wide)).abs().sum())
    return errors


CASES |= {
    f"transpose {shape} at {channels}": functools.partial(transpose_case, shape, channels)
    for shape, channels in [
        ((2, 3, 5, 7), 1), ((1, 70, 9, 9), 1), ((3, 1, 4, 4), 1), ((2, 130, 65), 1), ((0, 4, 3, 3), 1),
        ((4, 0, 3, 3), 1), ((70, 5, 30), 0), ((2, 5, 2, 3, 4), 1), ((1, 3, 30, 40), 1), ((2, 5000, 2), 1),
        ((3, 6, 1, 1), 1),
    ]
}  # fmt: skip


def second_derivative(memory, norm, device, dtype):
    """A gradient of a gradient goes through the reference."""
    torch.manual_seed(0)
    layer = DCLConv2d(3, 8, 3, width=4, norm_layer=norm).to(memory_format=memory)
    x = torch.randn(1, 3, 5, 5).to(memory_format=memory)
    found = []
    for place, kind in ((device, dtype), ("cpu", torch.float64)):
        model = layer.to(place, kind)
        given = x.to(dtype).to(place, kind).requires_grad_()
        (first,) = torch.autograd.grad(model(given).square().sum(), given, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), given)[0])
    return {"second derivative": relative(*found)}


CASES["second derivative"] = functools.partial(second_derivative, torch.channels_last, None)
CASES["second derivative, channels apart"] = functools.partial(second_derivative, torch.contiguous_format, None)
CASES["second derivative, batch norm"] = functools.partial(second_derivative, torch.channels_last, nn.BatchNorm2d)


def too_large(errors, tolerance):
    """Errors above a tolerance, and above one and a half times what plain torch has in the same type."""
    mine = {what: error for what, error in errors.items() if not what.endswith(WITHOUT)}
    return {
        what: error for what, error in mine.items() if not error <= max(tolerance, 1.5 * errors.get(what + WITHOUT, 0))
    }


def changes_case(norm, device, dtype):
    """What is decided once and kept is decided anew when anything changes that it depends on."""
    host.wait()
    torch.manual_seed(0)
    layer = DCLConv2d(6, 20, 3, padding=1, width=8, norm_layer=norm, bias=norm is None).to(device, dtype)
    last, x = torch.channels_last, torch.randn(4, 6, 5, 7).to(device, dtype)
    other = torch.float16 if dtype == torch.float32 else torch.float32
    errors = {}

    def look(name, given, *, model=layer, half=None, learn=True):
        """Compare output, gradients and buffers with those of a copy without kernels."""
        copy, found = deepcopy(model), []
        for each, off in ((model, False), (copy, True)):
            own = given.detach().clone(memory_format=torch.preserve_format).requires_grad_(learn)
            cast = torch.autocast(device, half or torch.bfloat16, enabled=half is not None)
            with dispatch.disabled() if off else contextlib.nullcontext(), torch.set_grad_enabled(learn), cast:
                for _ in range(3):  # the second call is recorded, and the third replayed
                    z = each(own)
            parameters = [p for p in each.parameters() if p.requires_grad]
            grads = torch.autograd.grad(z.float().square().sum(), [own, *parameters]) if learn else ()
            found.append([z, *grads, *(b for b in each.buffers() if b.is_floating_point())])
        worst = max(relative(a, b) for a, b in zip(*found, strict=True))
        in_half = half is not None or given.dtype != torch.float32
        errors[name] = worst / 2000 if in_half else worst  # two roundings of a half type, a tenth at the most

    look("as it is", x)
    look("another batch", x[:2])
    look("another size", x[..., :4, :5].contiguous())
    look("channels_last", x.to(memory_format=last))
    layer.to(memory_format=last)
    look("filters in channels_last", x.to(memory_format=last))
    look("a view with gaps", torch.cat([x, x], 3).to(memory_format=last)[..., ::2])
    look("no gradients", x, learn=False)
    look("autocast", x.float(), half=torch.float16, model=deepcopy(layer).float())
    layer.eval()
    look("evaluation", x)
    layer.train()
    look("training again", x)
    look("a copy", x, model=deepcopy(layer))
    layer.load_state_dict({name: value * 1 for name, value in deepcopy(layer).double().state_dict().items()})
    look("a loaded state", x)
    layer.fusion.weight.data.mul_(-0.5)  # leaves no trace
    look("weights changed in place", x)
    layer.fusion.weight.requires_grad_(False)
    look("a frozen weight", x)
    layer.fusion.weight.requires_grad_()
    layer.branch.stride = (2, 2)
    look("another stride", x)
    layer.branch.stride = (1, 1)
    twice = nn.Sequential(layer, nn.Conv2d(20, 6, 1).to(device, dtype), layer)
    look("a shared layer", x, model=twice)
    look("another type", x.to(other), model=deepcopy(layer).to(other))
    handle = layer.branch.register_forward_hook(lambda _, __, y: 2 * y)
    look("a hook", x)
    handle.remove()
    nn.utils.parametrizations.weight_norm(layer.branch)
    look("a parametrized branch", x)
    look("of another", x[:1], model=nn.Sequential(layer, nn.ReLU()))
    return errors


CASES["changes between calls"] = functools.partial(changes_case, None)
CASES["changes between calls, batch norm"] = functools.partial(changes_case, nn.BatchNorm2d)


@contextlib.contextmanager
def tf32(allowed=True):
    """Products in TF32, or not. The interpreter does not round to it, and more goes through kernels with it."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def interpreted(name, dtype):
    """The errors of a case in the interpreter."""
    with tf32():
        return HALF[name]("cpu") if dtype == torch.float16 else CASES[name]("cpu", dtype)
