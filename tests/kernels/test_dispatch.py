"""Which path a fusion takes, and that every path gives the same."""

import functools
import importlib.util
import pickle
from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.halves import slow, slow_where
from tests.kernels import autocast_cases, layer_cases
from tests.kernels.interpreter import Interpreter
from torch import nn

from torch_dcl import DCLConv2d, DCLLinear, functional, kernels
from torch_dcl.kernels import dispatch, launch, ops  # noqa: F401 - the operations

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which is not installed"
)
# One of each kind stays quick: every branch count and shape, and norms on images, on rows and compiled.
SLOW = (
    r"(fixed|batch) norm, (?!T=2$|T=3 stoch|linear$|channels apart$|compiled$|two)|between calls, batch norm"
    r"|project T=3.* P=(3|40)|project .* P=40 .* bias$|fuse T=3 .*(dead|strided)|second derivative,"
    r"|beyond the range T=3|turned, (?!T=2)|evaluation$|^strided, (?!ResNet, channels last|AlexNet, channels apart)"
    r"|^transpose (?!\(2, 3, 5, 7\)|\(0, |\(70, |\(2, 5, 2)"
)


@needs_triton
@pytest.mark.parametrize("name", slow_where(layer_cases.CASES, SLOW))
def test_an_interpreted_kernel_agrees_with_the_reference_in_float64(interpreter, name):
    errors = interpreter(layer_cases.interpreted, name, torch.float32)
    # A response near zero carries its rounding into the slopes of the others.
    assert layer_cases.too_large(errors, 5e-5) == {}
    assert errors.get("z", 0) <= 1e-5


@needs_triton
@pytest.mark.parametrize(
    "name", slow_where(layer_cases.HALF, r"eps=1e-25|P=(1|3|300) |T=3 P=100|turned, (?!T=2)|129|M=5[12]")
)
def test_an_interpreted_kernel_in_half_precision_is_as_close_as_plain_torch(interpreter, name):
    assert layer_cases.too_large(interpreter(layer_cases.interpreted, name, torch.float16), 5e-4) == {}


@needs_triton
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float16) for name in autocast_cases.IN_KERNELS if "P=150" not in name),
        *(slow(name, torch.float16) for name in autocast_cases.IN_KERNELS if "P=150" in name),
        *(slow(name, torch.float16) for name in autocast_cases.CASES if name not in autocast_cases.IN_KERNELS),
        *(
            slow(name, torch.bfloat16) if name.endswith("P=600") else (name, torch.bfloat16)
            for name in autocast_cases.CASES
            if name not in autocast_cases.IN_KERNELS
        ),
    ],
    ids=str,
)
def test_under_autocast_the_gradients_of_float32_weights_are_not_rounded(interpreter, name, dtype):
    found = interpreter(autocast_cases.errors_of, name, "cpu", dtype)
    assert {what: error for what, error in found.items() if not error <= 1e-5} == {}


@needs_triton
@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((12, 0), True)]
)
def test_kernels_run_only_on_gpus_that_triton_supports(capability, expected, monkeypatch):
    """A T4 or V100 computes in plain torch, where Triton would fail to compile or ask for too much shared memory."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    kernels.runs_on.cache_clear()
    try:
        assert [kernels.supports(dtype, device) for dtype in (torch.float16, torch.float32)] == [expected] * 2
    finally:
        kernels.runs_on.cache_clear()


def test_the_first_stage_of_a_linear_layer_is_a_plain_layer_of_torch():
    layer = DCLLinear(6, 8, width=3)
    assert type(layer.branch) is nn.Linear
    assert repr(layer.branch) == "Linear(in_features=6, out_features=6, bias=False)"
    copies = (deepcopy(layer), pickle.loads(pickle.dumps(layer)))
    x = torch.randn(2, 6)
    for copy in copies:
        assert list(copy.state_dict()) == ["fusion.weight", "fusion.bias", "fusion._extra_state", "branch.weight"]
        assert torch.equal(copy(x), layer(x))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_without_kernels_a_compiled_layer_under_autocast_is_plain(backend):
    layer, x = DCLLinear(6, 8, width=3), torch.randn(5, 6)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    found = []
    for call in (layer, compiled):
        with dispatch.watch() as ran, torch.autocast("cpu", torch.bfloat16):
            z = call(x)
        assert "linear: kernel" not in ran
        found.append(torch.autograd.grad(z.float().square().sum(), layer.parameters()))
    for plain, same in zip(*found, strict=True):
        torch.testing.assert_close(plain, same, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("shape", [(6,), (0, 6), (4, 6), (2, 3, 6)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_first_stage_is_what_torch_expects_of_an_operation(shape, dtype):
    weight = torch.randn(8, 6, requires_grad=True)
    for needs_grad in (True, False):
        x = torch.randn(shape).to(dtype).requires_grad_(needs_grad)
        low = weight.detach().to(dtype).requires_grad_()
        torch.library.opcheck(torch.ops.torch_dcl.linear.default, (x, low, weight), rtol=1e-2, atol=1e-2)
    grad = torch.randn(*shape[:-1], 8).to(dtype)
    torch.library.opcheck(torch.ops.torch_dcl.linear_weight_gradient.default, (grad, x.detach()))


def test_the_first_stage_goes_through_vmap():
    x, weight = torch.randn(3, 5, 6), torch.randn(8, 6)
    mapped = torch.vmap(lambda given: torch.ops.torch_dcl.linear(given, weight, weight))(x)
    torch.testing.assert_close(mapped, x @ weight.t())


def test_what_runs_on_the_cpu_says_so():
    layer = DCLConv2d(3, 8, 3, width=4).to(memory_format=torch.channels_last)
    x = torch.randn(20, 3, 30, 30).to(memory_format=torch.channels_last)
    with dispatch.watch() as ran:
        layer(x)
    assert ran == {"project_and_fuse: parts": 1}
    reference = {"project_and_fuse: reference": 1, "fuse_branches: reference": 1}
    with dispatch.watch() as ran:
        DCLLinear(3, 8, width=4)(torch.randn(5, 3))
    assert ran == reference
    with dispatch.watch() as ran, dispatch.disabled():
        layer(x)
    assert ran == reference


def test_watching_ends_with_the_block():
    with dispatch.watch() as ran:
        pass
    dispatch.fuse_branches([torch.ones(2), torch.ones(2)], 0.01)
    assert not ran


def paths_of_a_block_without_kernels_among_others():
    pre = [torch.ones(4), torch.ones(4)]
    with dispatch.watch() as ran:
        dispatch.fuse_branches(pre, 0.01)
        with dispatch.disabled():
            dispatch.fuse_branches(pre, 0.01)
        dispatch.fuse_branches(pre, 0.01)
    return dict(ran)


@needs_triton
def test_the_environment_and_the_block_turn_kernels_off(interpreter):
    kernel, reference = "fuse_branches: kernel", "fuse_branches: reference"
    assert interpreter(paths_of_a_block_without_kernels_among_others) == {kernel: 2, reference: 1}
    without = Interpreter(TORCH_DCL_KERNELS="0")
    assert without(paths_of_a_block_without_kernels_among_others) == {reference: 3}
    without.close()


def compiled_beside_plain(memory):
    """The paths of a compiled network, and the worst relative difference of its gradients to those without kernels."""
    model = nn.Sequential(
        DCLConv2d(4, 8, 3, branches=3, width=2).to(memory_format=memory), nn.Flatten(), DCLLinear(32, 8, width=3)
    )
    x = torch.randn(2, 4, 4, 4).to(memory_format=memory)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with layer_cases.tf32(), dispatch.watch() as ran:
        same = torch.autograd.grad(compiled(x).square().sum(), model.parameters())
    with dispatch.disabled():
        exact = torch.autograd.grad(model(x).square().sum(), model.parameters())
    return dict(ran), max(float((a - b).norm() / b.norm()) for a, b in zip(same, exact, strict=True))


@needs_triton
@pytest.mark.parametrize("memory", [torch.channels_last, torch.contiguous_format], ids=str)
def test_a_compiled_network_has_the_kernels_in_one_graph_and_the_same_gradients(interpreter, memory):
    ran, worst = interpreter(compiled_beside_plain, memory)
    assert ran == {"project_and_fuse: kernel": 2}
    assert worst < 1e-5


def paths_and_kept_responses():
    from torch_dcl.kernels import unit

    found, run = {}, unit.run
    images = torch.randn(2, 3, 4, 4)
    for allowed in (False, True):
        for memory in ("contiguous_format", "channels_last"):
            for width in (64, 65, 129):
                layer, kept = DCLConv2d(3, 260, 3, width=width), []
                with pytest.MonkeyPatch.context() as patch, layer_cases.tf32(allowed), dispatch.watch() as ran:
                    patch.setattr(unit, "run", lambda *given, kept=kept: kept.append(given[4].keep) or run(*given))
                    with torch.no_grad():
                        layer(images.to(memory_format=getattr(torch, memory)))
                found[f"{allowed} {memory} {width}"] = [next(iter(ran)).split(":")[0], *kept]
    return found


@needs_triton
def test_where_products_are_not_on_tensor_cores_nothing_is_turned_and_wide_responses_are_kept(interpreter):
    at_once, apart = "project_and_fuse", ["fuse_branches"]
    assert interpreter(paths_and_kept_responses) == {
        "False contiguous_format 64": apart,
        "False contiguous_format 65": apart,
        "False contiguous_format 129": apart,
        "False channels_last 64": [at_once, False],
        "False channels_last 65": [at_once, True],
        "False channels_last 129": [at_once, True],
        "True contiguous_format 64": [at_once, False],
        "True contiguous_format 65": [at_once, False],
        "True contiguous_format 129": [at_once, True],
        "True channels_last 64": [at_once, False],
        "True channels_last 65": [at_once, False],
        "True channels_last 129": [at_once, True],
    }


def transforms_of_something_else():
    """The paths of each layer, and how far its results are off."""
    found, one = {}, torch.tensor(1.5)
    bodies = {
        "linear": (DCLLinear(6, 8, width=3), torch.randn(4, 6)),
        "conv": (DCLConv2d(3, 8, 3, width=4), torch.randn(2, 3, 5, 5)),
        "conv, channels last": (
            DCLConv2d(3, 8, 3, width=4).to(memory_format=torch.channels_last), torch.randn(2, 3, 5, 5)
        ),
        "norms": (DCLConv2d(3, 8, 3, width=4, norm_layer=nn.BatchNorm2d).eval(), torch.randn(2, 3, 5, 5)),
    }  # fmt: skip
    for name, (body, x) in bodies.items():

        def scaled(s, body=body, x=x):
            return body(x).sum() * s

        with layer_cases.tf32():
            total = body(x).sum()
            with dispatch.watch() as ran:
                slope = torch.func.grad(scaled)(one)
                mapped = torch.vmap(scaled)(one.expand(3))
                _, pushed = torch.func.jvp(scaled, (one,), (one,))
        off = [slope / total - 1, (mapped / total / 1.5 - 1).abs().max(), pushed / total / 1.5 - 1]
        found[name] = [sorted({path.split(": ")[1] for path in ran}), max(abs(float(part)) for part in off)]
    return found


@needs_triton
def test_a_transform_of_something_else_leaves_a_layer_to_the_reference(interpreter):
    """As when the head of a network is differentiated by torch.func, and the body is closed over."""
    for name, (paths, off) in interpreter(transforms_of_something_else).items():
        assert paths == ["reference"], name
        assert off < 1e-5, name


def check_operations(T, pairs):
    own, check = torch.ops.torch_dcl, functools.partial(torch.library.opcheck, rtol=1e-4, atol=1e-5)

    def new(*shape):
        return torch.randn(shape, requires_grad=True)

    check(own.fuse.default, ([new(3, 5) for _ in range(T)], 0.01, pairs))
    y, weight = new(6, T * 4), new(T * 4, 7)
    for bias in (None, new(T, 7)):
        for keep in (True, False):
            check(own.project.default, (y, weight, bias, T, 0.01, pairs, keep))
            z = own.project(y.detach().half(), weight, bias, T, 0.01, pairs, keep)[0]
            of_weight = torch.autograd.grad(z.float().sum(), weight)[0]
            assert (z.dtype, of_weight.dtype, of_weight.shape) == (torch.half, torch.float32, weight.shape)
    y, weight = y.detach(), weight.detach()
    of_norm = (None, *(torch.rand(7 * T) for _ in range(4)))
    for tracked in (None, torch.tensor(3)):
        running = of_norm[3:] if tracked is not None else (None, None)
        # Where running statistics follow, those of the batch are not written, and so not compared.
        tests = ("test_schema", "test_faketensor", *(["test_aot_dispatch_dynamic"] if tracked is None else []))
        for momentum in (0.1, None):
            given = (y, weight, *of_norm[:3], *running, tracked, T, 1e-5, momentum)
            check(own.statistics.default, given, test_utils=tests)
    check(own.fixed_statistics.default, (y, weight, *of_norm, T, 1e-5))
    known, low = own.fixed_statistics(y, weight, *of_norm, T, 1e-5)
    check(own.normed_project.default, (y, known, low, T, 0.01, pairs, True))


@needs_triton
@pytest.mark.parametrize(("T", "pairs"), [slow(2, False), slow(3, False), (3, True)])
def test_the_operations_are_what_torch_expects_of_operations(interpreter, T, pairs):
    interpreter(check_operations, T, pairs)


def mapped_beside_plain():
    """How far operations under vmap are from plain torch."""
    own, off = torch.ops.torch_dcl, []
    a, b = torch.rand(4, 4), torch.rand(4, 4)
    for dims in ((0, 1), (0, None), (1, 0)):
        c = b[0] if dims[1] is None else b
        mapped = torch.vmap(lambda p, q: own.fuse([p, q], 0.01, False), dims)(a, c)
        plain = torch.vmap(lambda p, q: functional.fuse_branches([p, q], 0.01), dims)(a, c)
        off.append(float((mapped - plain).abs().max()))
    y, weight, bias = torch.randn(3, 5, 8), torch.randn(3, 8, 6), torch.randn(2, 6)
    for keep in (True, False):
        mapped = torch.vmap(lambda v, w, keep=keep: own.project(v, w, bias, 2, 0.01, False, keep)[0])(y, weight)
        for i in range(3):
            pre = [y[i, :, 4 * t : 4 * t + 4] @ weight[i, 4 * t : 4 * t + 4] + bias[t] for t in range(2)]
            off.append(float((mapped[i] - functional.fuse_branches(pre, 0.01)).abs().max()))
    return max(off)


@needs_triton
def test_the_operations_go_through_vmap(interpreter):
    assert interpreter(mapped_beside_plain) < 1e-5


@needs_triton
@pytest.mark.parametrize(
    ("P", "M", "N", "settings", "taken"),
    [
        (50_176, 128, 512, {}, True),
        (200_704, 64, 256, {}, True),
        (3_211_264, 16, 64, {}, True),
        (200_704, 16, 64, {}, False),
        (3_211_264, 16, 64, {"backward": True}, False),
        (784, 128, 512, {}, False),
        (50_176, 96, 512, {}, False),
        (50_176, 128, 500, {}, False),
        (50_176, 128, 512, {"dtype": torch.float16}, False),
        (50_176, 128, 512, {"eps": 1e-30}, False),
    ],
)
def test_the_kernels_of_hopper_gpus_take_large_projections_and_leave_the_others(P, M, N, settings, taken):
    hopper = launch._hopper_kernels()
    given = {"dtype": torch.bfloat16, "eps": 0.01, "backward": False, **settings}
    y = torch.empty(P, 2 * M, dtype=given["dtype"], device="meta")
    assert hopper.accepts(y, P, M, N, given["eps"], backward=given["backward"]) == taken


@needs_triton
@given(
    P=st.one_of(st.integers(1, 4100), st.sampled_from([2048, 3136, 4096, 6272])), M=st.integers(1, 9),
    N=st.integers(1, 9), T=st.sampled_from([2, 3]), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_the_gradient_of_weights_is_the_same_sum_in_parts(P, M, N, T, dtype):
    from torch_dcl.kernels import project

    y, dpre = torch.randn(P, T * M).to(dtype), torch.randn(T, P, N).to(dtype)
    exact = torch.einsum("ptm,tpn->tmn", y.double().view(P, T, M), dpre.double()).reshape(T * M, N)
    found = project.weight_gradient(y, dpre, torch.float32)  # float32 also of a half type, without rounding on the way
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5 * P**0.5)


@needs_triton
def test_where_triton_is_of_another_age_the_kernels_of_hopper_gpus_are_left_alone(monkeypatch):
    import triton

    monkeypatch.setattr(triton, "__version__", "3.42.0")
    launch._hopper_kernels.cache_clear()
    assert launch._hopper_kernels() is None
    monkeypatch.undo()
    launch._hopper_kernels.cache_clear()
    assert launch._hopper_kernels() is not None


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_layer_on_a_gpu_that_is_not_the_current_one_runs_there(dtype):
    layer = DCLConv2d(6, 20, 3, padding=1, width=8).to("cuda:1", dtype, memory_format=torch.channels_last)
    x = torch.randn(2, 6, 5, 7, device="cuda:1", dtype=dtype).to(memory_format=torch.channels_last)
    with torch.cuda.device(1):
        expected = layer(x)
    with torch.cuda.device(0):
        found = layer(x)
        found.sum().backward()
    assert torch.equal(found, expected)
    assert layer.fusion.weight.grad.isfinite().all()
