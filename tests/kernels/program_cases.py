"""Layers replayed from C++ against the same layers run from Python: for the interpreter on the CPU and for a GPU.

A layer's first call is seen, its second recorded, and its third replayed; the first gradient of a replayed call is
recorded, and the second replayed. So five calls show all, and every one must give the bits of the first.
"""

import contextlib
import gc
import io
import pickle
import threading
import weakref
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from torch_dcl import DCLConv1d, DCLConv2d, DCLLinear, advance_branches_
from torch_dcl.kernels import dispatch, host
from torch_dcl.kernels.record import closed_operation, prefix_of_operations, serve

LAST = torch.channels_last
CALLS = 5


def _images(*shape, last=True):
    x = torch.randn(*shape)
    return x.contiguous(memory_format=LAST) if last else x


def _conv(**arguments):
    return DCLConv2d(6, 20, 3, padding=1, width=8, **arguments).to(memory_format=LAST)


LAYERS = {
    "convolution": lambda: (_conv(), _images(4, 6, 5, 7)),
    "convolution without biases": lambda: (_conv(bias=False), _images(4, 6, 5, 7)),
    "convolution in torch's layout": lambda: (DCLConv2d(6, 20, 3, padding=1), _images(4, 6, 5, 7, last=False)),
    "strided convolution": lambda: (DCLConv2d(6, 20, 3, stride=2, width=8).to(memory_format=LAST), _images(4, 6, 9, 7)),
    "strided convolution of three channels": lambda: (
        DCLConv2d(3, 20, 7, stride=2, padding=3, width=8).to(memory_format=LAST), _images(4, 3, 9, 7)
    ),
    "batch norms": lambda: (_conv(norm_layer=nn.BatchNorm2d, bias=False), _images(4, 6, 5, 7)),
    "batch norms and biases": lambda: (_conv(norm_layer=nn.BatchNorm2d), _images(4, 6, 5, 7)),
    "batch norms over all batches": lambda: (
        _conv(norm_layer=lambda n: nn.BatchNorm2d(n, momentum=None)), _images(4, 6, 5, 7)
    ),
    "norms without parameters": lambda: (
        _conv(norm_layer=lambda n: nn.BatchNorm2d(n, affine=False)), _images(4, 6, 5, 7)
    ),
    "norms of fixed statistics": lambda: (_conv(norm_layer=nn.BatchNorm2d, bias=False).eval(), _images(4, 6, 5, 7)),
    "three branches": lambda: (_conv(branches=3), _images(4, 6, 5, 7)),
    "all pairs of three branches": lambda: (_conv(branches=3, strategy="stochastic").eval(), _images(4, 6, 5, 7)),
    "linear": lambda: (DCLLinear(40, 24), torch.randn(5, 40)),
    "linear of many rows": lambda: (DCLLinear(40, 24), torch.randn(3, 300, 40)),
    "one dimension": lambda: (DCLConv1d(6, 20, 3, width=8), torch.randn(4, 6, 11)),
}  # fmt: skip


def _programs(layer):
    return layer.__dict__.get("_programs")


def _call(layer, x, half, learn, grad):
    given = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(learn)
    cast = torch.autocast(x.device.type, half) if half else contextlib.nullcontext()
    with cast, torch.set_grad_enabled(learn):
        z = layer(given)
    found = [z.detach().clone()]
    if learn:
        found += torch.autograd.grad(z, [given, *layer.parameters()], grad(z))
    return z, found


def replayed_case(name, half, device):
    """Whether every call has the bits of the first, for gradients and without; and how the last one ran."""
    host.wait()
    torch.manual_seed(0)
    layer, x = LAYERS[name]()
    layer, x = layer.to(device), x.to(device)
    start, equal = deepcopy(layer.state_dict()), []
    noise = {}

    def grad(z):
        return noise.setdefault("grad", torch.randn(z.shape, device=device).to(z.dtype))

    for learn in (True, False):
        first = None
        for _ in range(CALLS):
            layer.load_state_dict(start)
            z, found = _call(layer, x, half, learn, grad)
            found += [b.clone() for b in layer.buffers()]
            first = first or found
            equal.append(all(torch.equal(a, b) for a, b in zip(found, first, strict=True)))
        if learn:
            kind = z.grad_fn.name()
    programs = _programs(layer)
    return {"equal": all(equal), "programs": len(programs), "failed": programs.failed, "node": kind}


def _warm(layer, x):
    for _ in range(CALLS):
        layer(x).sum().backward()
    layer.zero_grad()
    assert len(_programs(layer)) > 0
    return layer


def _small(device, norm=None):
    host.wait()
    torch.manual_seed(0)
    layer = _conv(norm_layer=norm, bias=norm is None).to(device)
    x = _images(4, 6, 5, 7).to(device).requires_grad_()
    return _warm(layer, x), x


def _is_replayed(z):
    return z.grad_fn.name() == "DCLUnitBackward"


def second_derivative_case(device):
    """A replayed call has the second derivative of plain torch."""
    errors = {}
    for norm in (None, nn.BatchNorm2d):
        layer, x = _small(device, norm)
        for training in (True, False):
            layer.train(training)
            with torch.no_grad():
                bare = deepcopy(layer)
            _warm(layer, x)
            bare.load_state_dict(layer.state_dict())
            found = []
            for each in (layer, bare):
                z = each(x)
                found.append(_is_replayed(z))
                first = torch.autograd.grad(z.square().sum(), [x, *each.parameters()], create_graph=True)
                found += torch.autograd.grad(sum(g.square().sum() for g in first), [x, *each.parameters()])
            half = len(found) // 2
            assert found[0]
            assert not found[half]
            pairs = zip(found[1:half], found[half + 1 :], strict=True)
            errors[f"{norm} {training}"] = max(((a - b).norm() / b.norm().clamp(min=1e-9)).item() for a, b in pairs)
    return errors


def autograd_case(device):
    """What autograd promises of any node."""
    layer, x = _small(device)
    plain = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    found = {}

    z = layer(x)
    z.sum().backward(retain_graph=True)
    z.sum().backward()
    try:
        z.sum().backward()
        found["a third backward pass"] = "nothing"
    except RuntimeError as error:
        found["a third backward pass"] = str(error)[:50]

    z = layer(x)
    with torch.no_grad():
        layer.fusion.weight.mul_(1.0)
    try:
        z.sum().backward()
        found["a weight changed in between"] = "nothing"
    except RuntimeError as error:
        found["a weight changed in between"] = "modified by an inplace operation" in str(error)

    def same(name, grads, wanted=plain):
        found[name] = all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))

    z = checkpoint(layer, x, use_reentrant=False)
    same("activation checkpointing", torch.autograd.grad(z.square().sum(), [x, *layer.parameters()]))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        z = layer(x)
    same("saved tensors with hooks", torch.autograd.grad(z.square().sum(), [x, *layer.parameters()]))
    found["saved tensors"] = len(kept) > 4
    z = layer(x)
    grad = torch.ones((), device=device).expand(z.shape)
    for _ in range(3):
        expanded = torch.autograd.grad(z, [x], grad, retain_graph=True)
    same("an expanded gradient", expanded, torch.autograd.grad(z, [x], torch.ones_like(z)))

    layer.branch.weight.requires_grad_(False)
    rest = [layer.fusion.weight, layer.fusion.bias]
    for _ in range(3):
        grads = torch.autograd.grad(layer(x.detach()).square().sum(), rest)
    same("frozen filters", grads, plain[1:3])
    layer.branch.weight.requires_grad_()
    found["nothing learns"] = not layer.requires_grad_(False)(x.detach()).requires_grad
    return found


def states_case(device):
    """A replay looks up tensors anew, and takes place only where nothing has changed."""
    layer, x = _small(device)
    with torch.no_grad():
        z = layer(x).clone()
    found = {}

    def differs(name, each=layer, given=x):
        found[name] = not torch.equal(each(given), z)

    state = {name: 2 * value if value.dim() else value for name, value in layer.state_dict().items()}
    swapped = functional_call(layer, {"fusion.weight": 2 * layer.fusion.weight.detach()}, (x,))
    found["other weights for one call"] = not torch.equal(swapped, z)
    found["which are forgotten"] = torch.equal(layer(x), z)
    before = layer.fusion.eps
    layer.fusion.eps = 0.5
    differs("another ε")
    layer.fusion.eps = before
    handle = layer.fusion.register_forward_hook(lambda *_: calls.append(1))
    calls = []
    found["a hook does not change it"] = torch.equal(layer(x), z)
    found["a hook is called"] = len(calls) == 1
    handle.remove()
    with FlopCounterMode(display=False) as counter:
        found["under a mode"] = torch.equal(layer(x), z)
    found["a mode sees its operations"] = counter.get_total_flops() > 0
    layer.load_state_dict(state)
    differs("another state")

    copied = deepcopy(layer)
    found["a copy"] = torch.equal(copied(x), layer(x))
    found["a copy has programs of its own"] = _programs(copied) is not _programs(layer)
    file = io.BytesIO()
    pickle.dump(layer, file)
    file.seek(0)
    found["a pickled layer"] = torch.equal(pickle.load(file)(x), layer(x))
    replica = layer._replicate_for_data_parallel()
    replica._modules = dict(layer._modules)
    other = deepcopy(layer.fusion)
    other.weight.data.mul_(3)
    replica._modules["fusion"] = other
    found["a replica with other weights"] = not torch.equal(replica(x), layer(x))

    half = torch.bfloat16 if device != "cpu" else torch.float16
    with torch.autocast(device, half):
        found["autocast"] = layer(x).dtype == half
    found["and then none"] = layer(x).dtype == torch.float32
    found["a transform of torch.func"] = torch.func.vmap(layer)(x.detach()[None])[0].shape == z.shape
    with torch.inference_mode():
        for _ in range(3):
            inside = layer(x)
    found["inference mode"] = torch.equal(inside, layer(x)) and inside.is_inference()
    return found


def stochastic_case(device):
    """Pairs of branches are drawn as before, and a network that alternates between both modes is right in both."""
    host.wait()
    torch.manual_seed(0)
    layer = _conv(branches=3, strategy="stochastic").to(device)
    x, found = _images(4, 6, 5, 7).to(device), []
    for _ in range(4):
        layer.train()
        advance_branches_(layer)
        pair = layer.fusion.active.clone()
        found.append(torch.allclose(layer(x), layer.fusion.forward_pair(_of_pair(layer, x)), atol=1e-5))
        layer.eval()
        found.append(torch.allclose(layer(x), layer.responses(x).z, atol=1e-5))
        found.append(torch.equal(layer.fusion.active, pair))
    return all(found)


def _of_pair(layer, x):
    return layer._run_branch(x, layer.fusion.gather(layer.branch.weight), None)


def threads_case(device):
    """Threads that share a layer all have its result."""
    layer, x = _small(device)
    wanted = torch.autograd.grad(layer(x).sum(), [x])[0]
    found = []

    def work():
        own = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        found.extend(torch.equal(torch.autograd.grad(layer(own).sum(), [own])[0], wanted) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(found) == 15 and all(found)


def released_case(device):
    """A layer that nobody holds is gone, and with it what was recorded of it; a graph outlives it."""
    layer, x = _small(device)
    z = layer(x)
    alive = weakref.ref(layer)
    del layer
    gc.collect()
    gone = alive() is None
    z.sum().backward()
    return gone and x.grad is not None


def sizes_case(device):
    """A layer that sees another size in every call records none; more sizes than it keeps cost nothing but time."""
    host.wait()
    torch.manual_seed(0)
    layer = _conv().to(device)
    for n in range(1, 80):
        layer(_images(1, 6, 3, n + 2).to(device))
    once = len(_programs(layer))
    for n in range(1, 21):
        for _ in range(2):
            layer(_images(1, 6, 3, n + 2).to(device))
    return once, len(_programs(layer))


def compiled_case(name, half, device):
    """A compiled layer, whose operations are replayed, against the same layer without a compiler."""
    host.wait()
    torch.compiler.reset()
    torch.manual_seed(0)
    layer, x = LAYERS[name]()
    layer, x = layer.to(device), x.to(device)
    compiled = torch.compile(layer, backend="aot_eager" if device == "cpu" else "inductor", fullgraph=True)
    start, worst = deepcopy(layer.state_dict()), 0.0
    noise = {}

    def grad(z):
        return noise.setdefault("grad", torch.randn(z.shape, device=device).to(z.dtype))

    for learn in (True, False):
        first = None
        for each in (layer, compiled, compiled, compiled):
            layer.load_state_dict(start)
            _, found = _call(each, x, half, learn, grad)
            found += [b.clone().float() for b in layer.buffers()]
            first = first or found
            errors = [
                (a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-6)
                for a, b in zip(found, first, strict=True)
            ]
            worst = max(worst, *(e.item() for e in errors))
    return worst


def compiled_wide_case(device):
    """A compiled layer of more than 128 filters a branch behind norms: how far it is from plain torch, and its code."""
    host.wait()
    torch.compiler.reset()
    torch.manual_seed(0)
    layer = DCLConv2d(6, 140, 3, padding=1, width=136, norm_layer=nn.BatchNorm2d, bias=False)
    layer, x = layer.to(device, memory_format=LAST), _images(4, 6, 5, 7).to(device)
    counter = CompileCounterWithBackend("aot_eager" if device == "cpu" else "inductor")
    with torch.autocast(device, torch.float16):
        z = torch.compile(layer, backend=counter, fullgraph=True)(x)
        with dispatch.disabled():
            expected = layer(x)
    return ((z - expected).float().norm() / expected.float().norm()).item(), counter.graphs[0].code


def compiled_contexts_case(device):
    """Autocast and grad mode inside of a compiled function: types, whether there are gradients, and how far z is."""
    host.wait()
    torch.compiler.reset()
    torch.manual_seed(0)
    layer, x = _conv().to(device), _images(4, 6, 5, 7).to(device)

    def run(given, half):
        with torch.autocast(device, torch.float16, enabled=half):
            z = layer(given)
        with torch.no_grad():
            return z, layer(given)

    compiled = torch.compile(run, backend="aot_eager" if device == "cpu" else "inductor", fullgraph=True)
    found = []
    for half in (True, False, True):
        pairs = list(zip(compiled(x, half), run(x, half), strict=True))
        assert all((a.dtype, a.requires_grad) == (b.dtype, b.requires_grad) for a, b in pairs)
        errors = [((a - b).float().norm() / b.float().norm()).item() for a, b in pairs]
        found.append((pairs[0][0].dtype, pairs[0][0].requires_grad, pairs[1][0].requires_grad, max(errors) <= 2e-3))
    return found


def compiled_batches_case(device):
    """A compiled network with norms over batches of other sizes: graphs, and how far it is from plain torch.

    Where a response is zero but for a rounding, that decides whether it has a gradient: with a seed of 0 one is 2e-7.
    """
    host.wait()
    torch.compiler.reset()
    torch.manual_seed(1)
    norm = {"norm_layer": nn.BatchNorm2d, "bias": False}
    layers = [_conv(**norm), nn.Conv2d(20, 6, 3, padding=1), _conv(**norm), nn.Flatten(), DCLLinear(20 * 5 * 7, 24)]
    model = nn.Sequential(*layers).to(device, memory_format=LAST)
    reference, counter = deepcopy(model), CompileCounterWithBackend("aot_eager" if device == "cpu" else "inductor")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    worst = 0.0
    for size in (4, 3, 2, 4):
        x = _images(size, 6, 5, 7).to(device)
        assert _nearest_to_zero(reference, x) > 1e-4
        found = []
        for run, own, off in ((compiled, model, False), (reference, reference, True)):
            with dispatch.disabled() if off else contextlib.nullcontext():
                z = run(x)
            found.append([z, *torch.autograd.grad(z.sum(), list(own.parameters())), *own.buffers()])
        errors = [(a - b).abs().max() / b.abs().max().clamp(min=1e-3) for a, b in zip(*found, strict=True)]
        worst = max(worst, *(e.item() for e in errors))
    return counter.frame_count, worst


def _nearest_to_zero(model, x):
    """The smallest magnitude of a response before its ReLU, in float64."""
    h, found = x.double().cpu(), []
    for layer in deepcopy(model).double().cpu():
        if hasattr(layer, "responses"):
            found += [p.abs().min().item() for p in layer.fusion.respond(layer.branch(h))]
        h = layer(h)
    return min(found)


def compiled_changes_case(norm, device):
    """A compiled layer notices what changes between its calls: how far it is from the layer without a compiler."""
    with torch._dynamo.config.patch(recompile_limit=32):
        return _compiled_changes(norm, device)


def _compiled_changes(norm, device):
    host.wait()
    torch.compiler.reset()
    torch.manual_seed(0)
    layer = _conv(norm_layer=norm, bias=norm is None).to(device)
    compiled = torch.compile(layer, backend="aot_eager" if device == "cpu" else "inductor", fullgraph=True)
    x, errors = _images(4, 6, 5, 7).to(device), {}

    def look(name, given, *, learn=True, half=None):
        start, found = deepcopy(layer.state_dict()), []
        for run in (layer, compiled):
            layer.load_state_dict(start)
            own = given.detach().clone(memory_format=torch.preserve_format).requires_grad_(learn)
            cast = torch.autocast(device, half) if half else contextlib.nullcontext()
            with cast, torch.set_grad_enabled(learn):
                z = run(own)
            wanted = [p for p in (own, *layer.parameters()) if p.requires_grad]
            grads = torch.autograd.grad(z.float().square().sum(), wanted) if learn else ()
            found.append([z, *grads, *(b.float() for b in layer.buffers())])
        pairs = list(zip(*found, strict=True))
        assert all(a.dtype == b.dtype and a.shape == b.shape for a, b in pairs), name
        assert found[0][0].stride() == found[1][0].stride(), name
        worst = max(((a - b).abs().max() / b.abs().max().clamp(min=1e-3)).item() for a, b in pairs)
        errors[name] = worst / 100 if half else worst

    look("as it is", x)
    look("torch's layout", x.contiguous())
    look("no gradients", x, learn=False)
    look("autocast", x, half=torch.float16)
    layer.eval()
    look("evaluation", x)
    look("evaluation without gradients", x, learn=False)
    layer.train()
    if norm is not None:
        layer.fusion.norm.eval()
        look("a frozen norm", x)
        layer.fusion.norm.train()
        layer.fusion.norm.momentum = None
        look("statistics over all batches", x)
        layer.fusion.norm.weight.requires_grad_(False)
        look("a norm that does not learn", x)
        layer.fusion.norm.eps = 0.5
        look("another epsilon of the norm", x)
        layer.fusion.norm.track_running_stats = False
        look("statistics that are not tracked", x)
    layer.fusion.eps = 0.25
    look("another epsilon", x)
    layer.branch.weight.requires_grad_(False)
    look("frozen filters", x)
    layer.branch.weight.requires_grad_()
    layer.branch.stride = (2, 1)
    look("another stride", x)
    layer.fusion.weight.data.mul_(-0.5)
    look("weights changed in place", x)
    layer.branch.padding = (0, 1)
    look("another padding", x)
    with dispatch.disabled(), dispatch.watch() as ran:
        compiled(x)
    assert ran
    assert not any(path.endswith("kernel") for path in ran), ran
    layer.branch_activation = nn.Tanh()
    look("an activation between the stages", x)
    layer.branch.bias = nn.Parameter(torch.randn(layer.branch.out_channels, device=device))
    look("biases of stage 1", x)
    return errors


def compiled_functional_case(device):
    """A compiled call with other weights than the layer's own: how far results and gradients are from the reference."""
    host.wait()
    torch.compiler.reset()
    torch.manual_seed(0)
    layer = _conv(norm_layer=nn.BatchNorm2d, bias=False).to(device).eval().requires_grad_(False)
    x = _images(4, 6, 5, 7).to(device)

    def run(given, others):
        return torch.func.functional_call(layer, others, (given,))

    compiled = torch.compile(run, backend="aot_eager" if device == "cpu" else "inductor", fullgraph=True)
    worst = 0.0
    for learned in (["branch.weight"], ["fusion.weight"], ["branch.weight", "fusion.weight"], []):
        others = {name: p + 0.1 for name, p in layer.named_parameters()}
        found = []
        for call, off in ((compiled, False), (run, True)):
            given = {name: p.detach().requires_grad_(name in learned) for name, p in others.items()}
            with dispatch.disabled() if off else contextlib.nullcontext():
                z = call(x, given)
            assert z.requires_grad == bool(learned)
            grads = torch.autograd.grad(z.square().sum(), [given[name] for name in learned]) if learned else ()
            found.append([z, *grads])
        worst = max(worst, *(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(*found, strict=True)))
    return worst


def compiled_checkpoint_case(device):
    """A compiled layer under activation checkpointing: how far its gradients are, and how often its norm counted."""
    host.wait()
    torch.compiler.reset()
    torch.manual_seed(0)
    layer = _conv(norm_layer=nn.BatchNorm2d, bias=False).to(device)
    reference, x = deepcopy(layer), _images(4, 6, 5, 7).to(device)

    def run(given):
        return checkpoint(layer, given, use_reentrant=False)

    compiled = torch.compile(run, backend="aot_eager" if device == "cpu" else "inductor", fullgraph=True)
    found = torch.autograd.grad(compiled(x).square().sum(), list(layer.parameters()))
    with dispatch.disabled():
        expected = torch.autograd.grad(reference(x).square().sum(), list(reference.parameters()))
    errors = [(a - b).abs().max() / b.abs().max() for a, b in zip(found, expected, strict=True)]
    return max(e.item() for e in errors), layer.fusion.norm.num_batches_tracked.item()


def check_unit_operations():
    """The operations of whole units, by torch's own checks of operations."""
    host.wait()
    assert prefix_of_operations()
    own = torch.ops.torch_dcl
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.manual_seed(0)
    x, theta, weight = _images(2, 3, 5, 6), torch.randn(8, 3, 3, 3).contiguous(memory_format=LAST), torch.randn(8, 7)
    numbers = [torch.rand(14) + 0.5 for _ in range(4)]
    shape = ((2, 1), (1, 1), (1, 1), 2, False, False)
    for half in (False, True):
        given = x.half() if half else x
        for bias in (None, torch.randn(2, 7)):
            parts = (given, theta, weight, bias)
            for norm, kind in (((None,) * 4, 0), (numbers, 1), ((*numbers[:2], None, None), 2)):
                types = ("float32", "float16" if half and kind == 0 else "float32")
                how = (repr((*shape, kind, *types, True, True)), 0.01)
                torch.library.opcheck(own.closed_unit.default, (*parts, *norm, *how, 1e-5), test_utils=tests)
                z, y, *rest = own.closed_unit(*parts, *norm, *how, 1e-5)
                low, other = rest.pop(0) if half or kind else weight, rest.pop(0) if kind else None
                kept = (rest.pop(0) if half else theta, y, low, bias, other)
                assert not rest
                back = (torch.randn_like(z), given, *kept, *how)
                # With running statistics two rows of the result are nobody's, and are left unwritten.
                torch.library.opcheck(own.closed_unit_backward.default, back, test_utils=tests[: 2 if kind == 1 else 3])
                if kind != 2:
                    torch.library.opcheck(own.closed_unit_infer.default, (*parts, *norm, *how, 1e-5), test_utils=tests)
            how = repr((*shape, 2, "float32", "float32", True, True))
            tracked = (*parts, *numbers, torch.tensor(3), how, 0.01, 1e-5, 0.1)
            torch.library.opcheck(own.closed_unit_tracked.default, tracked, test_utils=tests[:2])  # likewise


def check_calls_of_operations():
    """An operation that is called from Python a second time is replayed, and seen by all that sees operations."""
    host.wait()
    assert prefix_of_operations()
    operation = torch.ops.torch_dcl.closed_unit_infer.default
    torch.manual_seed(0)
    how = repr(((1, 1), (1, 1), (1, 1), 2, False, False, 0, "float32", "float32", False, False))

    def arguments(channels):
        x, theta = _images(2, channels, 5, 6), torch.randn(8, channels, 3, 3).contiguous(memory_format=LAST)
        return x, theta, torch.randn(8, 7), torch.randn(2, 7), None, None, None, None, how, 0.01, 1e-5

    few, many = arguments(3), arguments(5)
    first = [operation(*few), operation(*many)]
    for _ in range(2):
        for given, expected in zip((few, many), first, strict=True):
            assert torch.equal(operation(*given), expected)
    assert not torch.equal(operation(*few[:9], 0.1, 1e-5), first[0])
    named = dict(zip([argument.name for argument in operation._schema.arguments], few, strict=True))
    assert torch.equal(operation(**named), first[0])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        operation(*few)
    assert any("closed_unit_infer" in event.key for event in profile.key_averages())
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert operation(*few).shape == first[0].shape
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        again = operation(*few)
    assert seen == [operation]
    assert torch.equal(again, first[0])
    with pytest.raises(RuntimeError, match="missing value for argument"):
        operation(*few[:8])


def check_errors_of_operations():
    """An error in a replay is the one that torch raises without it: a handler of memory errors, say, depends on it."""
    library = host.wait()

    @closed_operation("chosen_rows")
    def _chosen_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, rows)

    serve(library, "closed_chosen_rows", _chosen_rows)
    operation = torch.ops.torch_dcl.closed_chosen_rows.default
    x = torch.randn(3, 4)
    for rows in ([0, 2], [1, 1]):
        assert torch.equal(operation(x, torch.tensor(rows)), x[rows])
    with pytest.raises(IndexError, match="out of range"):
        operation(x, torch.tensor([0, 9]))
    assert torch.equal(operation(x, torch.tensor([2, 0])), x[[2, 0]])
