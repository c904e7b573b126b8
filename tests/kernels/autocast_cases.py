"""Linear layers with float32 weights under autocast, for the interpreter on the CPU and for a GPU alike.

The interpreter's products in bfloat16 are wrong, so only cases
of more positions than those that a kernel multiplies are compared with plain torch.
"""

import contextlib
import functools
from copy import deepcopy

import torch
from tests.kernels.cases import relative
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_dcl import DCLConv2d, DCLLinear, advance_branches_
from torch_dcl.kernels import dispatch

CASES = {}
KERNEL = "linear: kernel"


def gradients(model, x, dtype, *, inside=False, call=None):
    """The gradients of input and parameters under autocast, by name, and the paths that ran."""
    given = x.detach().requires_grad_()
    with dispatch.watch() as ran, torch.autocast(x.device.type, dtype):
        z = (model if call is None else call)(given)
        grad = torch.randn(z.shape, generator=torch.Generator().manual_seed(9)).to(z)
        with contextlib.nullcontext() if inside else torch.autocast(x.device.type, enabled=False):
            found = torch.autograd.grad(z, [given, *model.parameters()], grad)
    return dict(zip(["x", *(name for name, _ in model.named_parameters())], found, strict=True)), ran


def unlike(found, expected):
    """How far gradients are apart, infinitely where they are of other types."""
    assert found.keys() == expected.keys()
    return {n: relative(g, expected[n]) if g.dtype == expected[n].dtype else float("inf") for n, g in found.items()}


def half(dtype):
    """What makes the rounding of a half type less than 1e-5."""
    return 1e-5 / torch.finfo(dtype).eps


def linear_case(leading, device, dtype):
    """Stage 1: the weights' gradient is the product of what is given, and not rounded."""
    x, weight = torch.randn(*leading, 24).to(device), torch.randn(40, 24).to(device)
    found = []
    for off in (False, True):
        given = [t.clone().requires_grad_() for t in (x, weight)]
        kernels = dispatch.disabled() if off else contextlib.nullcontext()
        with torch.autocast(device, dtype), kernels, dispatch.watch() as ran:
            y = dispatch.linear(*given, None)
        assert ran == ({} if off else {KERNEL: 1})
        grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(9)).to(y)
        found.append((y, *torch.autograd.grad(y, given, grad)))
    (y, dx, dw), (plain, plain_dx, _) = found
    rows, outer = x.to(dtype).double().reshape(-1, 24), grad.double().reshape(-1, 40)
    kinds = (y.dtype, dx.dtype, dw.dtype) == (dtype, torch.float32, torch.float32)
    exact = rows @ weight.to(dtype).double().t(), outer @ weight.to(dtype).double(), outer.t() @ rows
    return {
        "types": float(not kinds), "shapes": float(y.shape != plain.shape or dx.shape != plain_dx.shape),
        "y": relative(_rows(y), exact[0]) * half(dtype), "x": relative(_rows(dx), exact[1]) * half(dtype),
        "weight": relative(dw, exact[2]),
    }  # fmt: skip


def _rows(x):
    return x.reshape(-1, x.shape[-1])


for _leading in ((), (0,), (1,), (700,), (2, 3), (2, 0)):
    CASES[f"linear {_leading}"] = functools.partial(linear_case, _leading)


IN_KERNELS = []
"""Cases whose products are formed in kernels, which the interpreter gets wrong in bfloat16."""


def kept_case(T, P, bias, device, dtype):
    """Stage 2 with its responses kept: the same of the gradients of the responses, as they are rounded.

    In float16 a gradient is rounded and overflows, so that a GradScaler finds it.
    """
    from torch_dcl.kernels import pointwise, saved_responses

    y, grad = torch.randn(P, T * 24).to(device, dtype), torch.randn(P, 40).to(device, dtype)
    wide = [t.to(device).requires_grad_() for t in (torch.randn(T * 24, 40) / 5, torch.randn(T, 40))]
    weight, biases = wide if bias else (wide[0], None)
    z = dispatch.project_and_fuse(y, weight, biases, [24] * T, 0.01, pairs=False, keep=True)
    found = torch.autograd.grad(z, wide[: 1 + bias], grad)
    low = [weight.detach().to(dtype), None if biases is None else biases.detach()]  # a bias is not rounded
    pre = saved_responses.forward(y, *low, torch.empty_like(grad), T, 0.01, False)
    dpre = pointwise.fuse_backward(grad[None], pre[None], None, 0.01, pairs=False)[0].double()
    exact = torch.cat([y_t.double().t() @ d for y_t, d in zip(y.split(24, 1), dpre, strict=True)]), dpre.sum(1)
    rounding = 1.0 if dtype == torch.bfloat16 else half(dtype)
    errors = {name: relative(g, e) * rounding for name, g, e in zip(("weight", "bias"), found, exact, strict=False)}
    dy, *wide_gradients = saved_responses.backward(grad, y, *low, pre, T, 0.01, False, torch.float32)
    errors |= {f"{n}, wide": relative(g, e) for n, g, e in zip(errors, wide_gradients, exact, strict=False)}
    outputs = torch.cat([d @ w.double().t() for d, w in zip(dpre, low[0].split(24), strict=True)], 1)
    kinds = {g.dtype for g in (*found, *wide_gradients) if g is not None}
    return errors | {"output": relative(dy, outputs) * half(dtype), "types": float(kinds != {torch.float32})}


for _T in (2, 3):
    for _P in (0, 1, 100, 150, 600):
        for _bias in (True, False):
            name = f"kept T={_T} P={_P}{' bias' if _bias else ''}"
            CASES[name] = functools.partial(kept_case, _T, _P, _bias)
            if 0 < _P <= 512:
                IN_KERNELS.append(name)


def projected_case(T, M, device, dtype):
    """Stage 2 of a convolution: what is added up in float32 is the gradient, of which the half type is a rounding."""
    y, grad = torch.randn(150, T * M).to(device, dtype), torch.randn(150, 40).to(device, dtype)
    found = []
    for kind in (torch.float32, dtype):
        given = [t.to(device, dtype).to(kind) for t in (_fixed(T * M, 40) / M**0.5, _fixed(T, 40))]
        given = [t.requires_grad_() for t in given]
        z = dispatch.project_and_fuse(y, *given, [M] * T, 0.01, pairs=False, keep=False)
        found.append(torch.autograd.grad(z, given, grad))
    errors = {"types": float({g.dtype for g in found[0]} != {torch.float32})}
    for name, mine, low in zip(("weight", "bias"), *found, strict=True):
        errors[f"{name}, rounded"] = relative(mine.to(dtype), low) * half(dtype)
        errors[f"{name} is rounded, or is not"] = float(rounded(mine, dtype) != (dtype == torch.float16))
    return errors


def rounded(x, dtype):
    """Whether values are such as a half type has."""
    return bool((x.to(dtype) == x).double().mean() > 0.1)


def _fixed(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


for _T, _M in ((2, 20), (2, 100), (2, 150), (3, 20)):
    CASES[f"projected T={_T} M={_M}"] = functools.partial(projected_case, _T, _M)


SETTINGS = {
    "T=2": {"width": 8},
    "T=3": {"branches": 3, "width": 8},
    "T=3 stochastic": {"branches": 3, "width": 8, "strategy": "stochastic"},
    "no bias": {"width": 8, "bias": False},
}


def layer(device, **settings):
    made = DCLLinear(24, 40, **{"width": 8, **settings}).to(device)
    advance_branches_(made, 3)
    return made


def layer_case(settings, device, dtype):
    """A layer gives the gradients that it gives without kernels, but for rounding."""
    model, x = layer(device, **settings), torch.randn(600, 24).to(device)
    found, ran = gradients(model, x, dtype)
    assert ran == {KERNEL: 1, "project_and_fuse: kernel": 1}, ran
    with dispatch.disabled():
        plain, ran = gradients(model, x, dtype)
    assert not [path for path in ran if path.endswith("kernel")], ran
    active = {name: g[g != 0] for name, g in found.items() if name != "x"}
    errors = {name: error * half(dtype) / 2 for name, error in unlike(found, plain).items()}
    for name, g in active.items():
        errors[f"{name} is rounded, or is not"] = float(
            rounded(g, dtype) != (dtype == torch.float16 and name.startswith("fusion"))
        )
    return errors


for _name, _settings in SETTINGS.items():
    CASES[f"layer {_name}"] = functools.partial(layer_case, _settings)


def same_case(device, dtype):
    """Checkpointed, differentiated inside the block, compiled, in deterministic mode: the same gradients."""
    model, x = layer(device), torch.randn(150, 24).to(device)
    expected, _ = gradients(model, x, dtype)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ways = {
        "checkpointed": {"call": lambda given: checkpoint(model, given, use_reentrant=False)},
        "inside": {"inside": True},
        "compiled": {"call": compiled},
    }
    errors = {}
    for way, settings in ways.items():
        found, ran = gradients(model, x, dtype, **settings)
        assert ran.keys() == {KERNEL, "project_and_fuse: kernel"}, (way, ran)
        errors |= {f"{name}, {way}": error for name, error in unlike(found, expected).items()}
    return errors


CASES["the same by other ways"] = same_case


def frozen_case(device, dtype):
    """What asks for no gradient gets none, and the others get theirs."""
    model, x = layer(device), torch.randn(150, 24).to(device)
    expected, _ = gradients(model, x, dtype)
    errors = {}
    for names in (["branch.weight"], ["fusion.weight"], ["fusion.bias"], ["branch.weight", "fusion.weight"]):
        some = deepcopy(model)
        for name in names:
            some.get_parameter(name).requires_grad_(False)
        with dispatch.watch() as ran, torch.autocast(device, dtype):
            z = some(x)
        z.backward(torch.randn(z.shape, generator=torch.Generator().manual_seed(9)).to(z))
        assert (KERNEL in ran) == ("branch.weight" not in names)
        for name, parameter in some.named_parameters():
            error = relative(parameter.grad, expected[name]) if name not in names else parameter.grad is not None
            errors[f"{name} without {names}"] = float(error)
    return errors


CASES["frozen parameters"] = frozen_case


def second_case(device, dtype):
    """A gradient of a gradient is autocast's own, the weights' part in it too."""
    found = []
    x, weight = torch.randn(9, 24).to(device) / 9, torch.randn(40, 24).to(device) / 9
    for off in (False, True):
        given = [t.clone().requires_grad_() for t in (x, weight)]
        with torch.autocast(device, dtype), dispatch.disabled() if off else contextlib.nullcontext():
            y = dispatch.linear(*given, None)
        first = torch.autograd.grad(y.float().square().sum(), given, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), given))
    return {name: relative(a, b) * half(dtype) for name, a, b in zip(("x", "weight"), *found, strict=True)}


CASES["second derivative"] = second_case


def hooked_case(device, dtype):
    """Whatever is hung on stage 1, or put in its place, is called, and then stage 1 is plain."""
    x, calls = torch.randn(3, 24).to(device), []
    model = layer(device)
    errors = {}

    def tell(name):
        def hook(*_):
            calls.append(name)

        return hook

    branch = model.branch
    for register in ("forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"):
        handle = getattr(branch, f"register_{register}")(tell(register))
        _, ran = gradients(model, x, dtype)
        handle.remove()
        errors[register] = float(register not in calls or KERNEL in ran)
    handle = nn.modules.module.register_module_forward_hook(tell("every module"))
    _, ran = gradients(model, x, dtype)
    handle.remove()
    errors["every module"] = float("every module" not in calls or KERNEL in ran)
    plain = branch.forward
    branch.forward = lambda given: tell("forward")() or plain(given)
    _, ran = gradients(model, x, dtype)
    del branch.forward
    errors["forward"] = float("forward" not in calls or KERNEL in ran)
    nn.utils.parametrizations.weight_norm(branch)
    _, ran = gradients(model, x, dtype)
    errors["parametrised"] = float(KERNEL in ran)
    nn.utils.parametrize.remove_parametrizations(branch, "weight")
    _, ran = gradients(model, x, dtype)
    return errors | {"nothing": float(KERNEL not in ran)}


CASES["hooks"] = hooked_case


def plain_case(device, dtype):
    """Where there is nothing to gain, or no way to, stage 1 is a call of its module."""
    x = torch.randn(3, 24).to(device)
    model = layer(device)

    def ran_in(call, enabled=True):
        with dispatch.watch() as ran, torch.autocast(device, dtype, enabled=enabled):
            call()
        return float(KERNEL in ran)

    def without_gradients():
        with torch.no_grad():
            model(x)

    def forward_mode():
        with torch.autograd.forward_ad.dual_level():
            model._construct(torch.autograd.forward_ad.make_dual(x, x))

    activated, low = layer(device, branch_activation=nn.ReLU), layer(device).to(dtype)
    state = dict(model.named_parameters())
    return {
        "no autocast": ran_in(lambda: model(x), enabled=False),
        "no gradients": ran_in(without_gradients),
        "a bias": ran_in(lambda: activated(x)),
        "weights of the low type": ran_in(lambda: low(x)),
        "vmap": ran_in(lambda: torch.vmap(model)(x[None])),
        "torch.func": ran_in(lambda: torch.func.grad(lambda s: torch.func.functional_call(model, s, x).sum())(state)),
        "forward mode": ran_in(forward_mode),
        "exported": ran_in(lambda: torch.export.export(model, (x,))),
        "traced": ran_in(lambda: torch.jit.trace(model, x, check_trace=False)),
        "used where it is": 1 - ran_in(lambda: model(x)),
    }


CASES["plain"] = plain_case


def overflow_case(device, dtype):
    """A gradient that is not finite stays so, for a GradScaler to find."""
    model = layer(device)
    with torch.autocast(device, dtype):
        z = model(torch.randn(5, 24).to(device))
    z.backward(torch.full_like(z, torch.inf))
    errors = {name: float(p.grad.isfinite().all()) for name, p in model.named_parameters()}
    if dtype != torch.float16:  # no scaler is needed
        return errors
    conv = DCLConv2d(3, 8, 3, width=4).to(device, memory_format=torch.channels_last)
    with torch.autocast(device, dtype):
        z = conv(9 * torch.randn(1, 3, 5, 5).to(device, memory_format=torch.channels_last))
    z.backward(torch.full_like(z, torch.inf))
    return errors | {"conv": float(conv.fusion.weight.grad.isfinite().all())}


CASES["not finite"] = overflow_case
IN_KERNELS.append("not finite")


def errors_of(name, device, dtype):
    """Run one case, always from the same random numbers."""
    torch.manual_seed(0)
    return CASES[name](device, dtype)
