"""The fusion: its values and gradients against 60-digit arithmetic, at the extremes, and under torch's transforms."""

import contextlib
import functools
import math
import shutil
from itertools import product

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.reference import exact_over, plain_fusion, plain_pair_fusion, starts_of, worst_error
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from torch_dcl import DCLLinear, fuse_branches, fuse_pairs
from torch_dcl.functional import default_eps, draw_pair

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
INF, NAN = math.inf, math.nan
LARGEST = torch.finfo(torch.float32).max


def fused_with_gradient(fuse, pre, *args):
    pre = pre.detach().clone().requires_grad_()
    z = fuse(pre, *args)
    (gradient,) = torch.autograd.grad(z.sum(), pre)
    return z.detach(), gradient


def allowed_errors(dtype, T, *, pairs=False):
    """How many eps of the type z and its gradient may be off: a few roundings, and of half types the last one alone."""
    if dtype == torch.float64:
        return 1e-12 / torch.finfo(dtype).eps, 1e-12 / torch.finfo(dtype).eps
    if dtype == torch.float32:
        return 8 if pairs else 4, 10 * T
    return 0.51, 0.52


def assert_exact(pre, eps=None, *, pairs=False):
    T = len(pre)
    fused = 2 if pairs else T
    z, gradient = fused_with_gradient(fuse_pairs if pairs else fuse_branches, pre, eps)
    assert z.dtype == gradient.dtype == pre.dtype
    exact_z, exact_gradient = exact_over(pre, 10.0**-fused if eps is None else eps, pairs=pairs)
    allowed_z, allowed_gradient = allowed_errors(pre.dtype, T, pairs=pairs)
    assert worst_error(z, exact_z) <= allowed_z
    assert worst_error(gradient, exact_gradient) <= allowed_gradient


# Values and gradients


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", range(1, 9))
def test_z_and_its_gradient_are_those_of_the_paper(T, dtype):
    pre = torch.randn(T, 40).to(dtype) + (0.5 if T > 2 else 0.0)
    assert_exact(pre)
    assert_exact(pre.abs())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [2, 3, 5, 8])
def test_pairs_are_the_mean_over_all_pairs_of_the_formula_for_two(T, dtype):
    pre = torch.randn(T, 20).to(dtype) + 0.3
    assert_exact(pre, pairs=True)


@pytest.mark.parametrize("T", [1, 2, 3, 8])
@pytest.mark.parametrize("eps", [1e-30, 1e-6, 0.25, 7.0, 3])
def test_another_eps(T, eps):
    pre = torch.randn(T, 15)
    assert_exact(pre, eps)
    assert_exact(pre.double(), eps)
    if T > 1:
        assert_exact(pre, eps, pairs=True)


def test_the_eps_of_the_paper_is_ten_to_the_minus_t():
    for T in range(1, 9):
        assert default_eps(T) == pytest.approx(10.0**-T, rel=1e-15)
        dead = fuse_branches(torch.zeros(T, 1, dtype=torch.float64))
        assert dead.item() == pytest.approx(0.1, rel=1e-14)
        if T > 1:
            assert fuse_pairs(torch.zeros(T, 1, dtype=torch.float64)).item() == pytest.approx(0.1, rel=1e-14)


def test_one_branch_with_eps_zero_is_relu():
    pre = torch.randn(1, 50).requires_grad_()
    z = fuse_branches(pre, eps=0)
    assert torch.equal(z, pre[0].relu())
    assert torch.equal(torch.autograd.grad(z.sum(), pre)[0], (pre > 0).float())


def test_pairs_of_two_branches_are_the_two_branches():
    pre = torch.randn(2, 100)
    for a, b in zip(fused_with_gradient(fuse_pairs, pre), fused_with_gradient(fuse_branches, pre), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("T", range(1, 9))
def test_the_gradient_is_that_of_the_other_branches_over_z(T):
    """∂z/∂v_i = (1/T) · Π_{j≠i} (v_j / z), section 3 differentiated by hand, for an incoming gradient as well."""
    pre = torch.rand(T, 30, dtype=torch.float64).add(0.1).requires_grad_()
    incoming = torch.randn(30, dtype=torch.float64)
    z = fuse_branches(pre)
    z.backward(incoming)
    v, z = pre.detach(), z.detach()
    for i in range(T):
        others = torch.cat([v[:i], v[i + 1 :]]) / z
        torch.testing.assert_close(pre.grad[i], incoming * others.prod(0) / T, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("fuse", "T"), [*((fuse_branches, T) for T in range(1, 9)), *((fuse_pairs, T) for T in (2, 3, 5))]
)
def test_gradcheck_and_gradgradcheck(fuse, T):
    magnitude = torch.rand(T, 4, dtype=torch.float64) + 0.2
    sign = torch.ones(T, 4, dtype=torch.float64)
    sign[0, 1], sign[:, 2] = -1, -1  # one branch dead, all branches dead
    pre = (magnitude * sign).requires_grad_()
    assert gradcheck(fuse, (pre,))
    assert gradgradcheck(fuse, (pre,))


@pytest.mark.parametrize("T", [2, 3, 8])
def test_second_derivatives_are_finite_at_exact_zeros(T):
    pre = torch.ones(T, 4, dtype=torch.float64)
    pre[0, 0], pre[:, 1], pre[-1, 2] = 0, 0, -1
    pre.requires_grad_()
    (gradient,) = torch.autograd.grad(fuse_branches(pre).sum(), pre, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), pre)
    assert gradient.isfinite().all()
    assert second.isfinite().all()


@pytest.mark.parametrize(
    ("T", "widths"), [(1, (5,)), (2, (3, 4)), (3, (2, 3, 4)), (4, (2, 2, 2, 2)), (5, (2, 1, 2, 3, 2))]
)
def test_the_expansion_over_all_compositions(T, widths):
    """Section 3.2: z^T - ε = Σ_{m1} … Σ_{mT} Π_t W_{k,mt} Π_t y_{mt}, where all responses are positive."""
    layer = DCLLinear(6, 10, branches=T, width=widths, bias=False, dtype=torch.float64)
    x = torch.rand(7, 6, dtype=torch.float64)
    with torch.no_grad():
        layer.branch.weight.abs_()
        layer.fusion.weight.abs_()
        z = layer(x)
        rows = [range(start, end) for start, end in starts_of(widths)]
        y = x @ layer.branch.weight.t()
        total = torch.zeros_like(z)
        for composition in product(*rows):
            chosen = list(composition)
            total += y[:, chosen].prod(1, keepdim=True) * layer.fusion.weight[chosen].prod(0)
    assert math.prod(widths) == len(list(product(*rows)))
    torch.testing.assert_close(z**T - 10.0**-T, total, rtol=1e-10, atol=1e-12)


# Extreme values


def column(*values):
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


EXTREMES = {
    "dead": column(0.0, 0.0),
    "negative zero": column(-0.0, 5.0),
    "one dead, one huge": column(-1.0, 1e38),
    "zero and huge": column(0.0, 3e38),
    "both huge": column(1e38, 3e38),
    "huge and tiny": column(1e38, 1e-38),
    "huge and the smallest": column(3e38, 1e-45),
    "slope beyond the largest before its half": column(3e38, 1e-45),
    "both the smallest": column(1e-45, 1e-45),
    "infinite": column(INF, 1.0),
    "infinite and dead": column(INF, -1.0),
    "infinite and the smallest": column(INF, 1e-45),
    "minus infinity": column(-INF, 1e38),
    "both infinite": column(INF, INF),
    "three huge": column(1e38, 2e38, 3e38),
    "three, moderate product": column(1e38, 1e-30, 1e-8),
    "three, tiny product": column(1e-45, 1e-38, 1e-10),
    "eight at 1e30": column(*[1e30] * 8),
    "eight at the largest": column(*[LARGEST] * 8),
    "eight at the smallest": column(*[1e-45] * 8),
    "eight mixed": column(1e38, 1e-38, 1e30, 1e-30, 1e20, 1e-20, 2.0, 3.0),
    "eight, one dead": column(1e38, 1e38, 1e38, 1e38, 1e38, 1e38, 1e38, 0.0),
    "one branch, huge": column(3e38),
    "one branch, infinite": column(INF),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_values_are_exact_where_representable_and_saturate_beyond(name, dtype):
    pre = EXTREMES[name].to(dtype)
    assert_exact(pre)
    if len(pre) > 1:
        assert_exact(pre, pairs=True)


@pytest.mark.parametrize("T", range(2, 9))
def test_the_largest_double_does_not_overflow(T):
    pre = torch.full((T, 1), torch.finfo(torch.float64).max, dtype=torch.float64)
    assert_exact(pre)
    pre[0] = 5e-324
    assert_exact(pre)


def floats(dtype):
    width = {torch.float64: 64, torch.float32: 32, torch.bfloat16: 32, torch.float16: 16}[dtype]
    anything = st.floats(width=width, allow_nan=False)
    moderate = st.floats(-4.0, 4.0, width=width)
    return st.one_of(anything, anything.map(abs), moderate)


@st.composite
def responses_of_branches(draw, max_branches=8):
    dtype = draw(st.sampled_from(DTYPES))
    T = draw(st.integers(1, max_branches))
    return torch.tensor([[draw(floats(dtype))] for _ in range(T)], dtype=torch.float64).to(dtype)


@settings(max_examples=300)
@given(responses_of_branches())
@example(torch.tensor([[2.3e35], [1.4e12], [6.9e-35]]))
def test_any_values_give_the_exact_fusion_or_saturate(pre):
    assert_exact(pre)


@settings(max_examples=100)
@given(responses_of_branches(max_branches=4).filter(lambda pre: len(pre) > 1))
def test_any_values_give_the_exact_mean_over_pairs(pre):
    assert_exact(pre, pairs=True)


def test_a_position_with_a_dead_branch_is_left_alone():
    pre = torch.tensor([[-1.0, 0.0, 2.0], [3.0, 0.0, 2.0]])
    z, gradient = fused_with_gradient(fuse_branches, pre)
    assert torch.equal(gradient[:, :2], torch.zeros(2, 2))
    assert (gradient[:, 2] > 0).all()
    torch.testing.assert_close(z[:2], torch.tensor([0.1, 0.1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", range(2, 9))
def test_dead_branches_get_exactly_zero_gradient(T, dtype):
    dead = -torch.rand(T, 50).to(dtype)
    for pre in (dead, torch.zeros(T, 50, dtype=dtype), torch.cat([dead[:1], dead[1:].abs() * 100])):
        z, gradient = fused_with_gradient(fuse_branches, pre)
        assert torch.equal(gradient, torch.zeros_like(gradient))
        assert worst_error(z, exact_over(pre, 10.0**-T)[0]) <= allowed_errors(dtype, T)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fuse", [fuse_branches, fuse_pairs])
@pytest.mark.parametrize("companion", [1.0, 0.0, -1.0, INF])
def test_nan_stays_nan_and_stays_where_it_is(companion, fuse, dtype):
    pre = torch.ones(3, 4, dtype=dtype)
    pre[0, 1], pre[1, 1] = NAN, companion
    z = fuse(pre)
    assert z.isnan().tolist() == [False, True, False, False]
    gradient = fused_with_gradient(fuse, pre)[1]
    assert gradient[:, [0, 2, 3]].isfinite().all()


# Types and shapes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_computed_in_float32(dtype):
    """The same bits as computing in float32 and rounding once: neither the product nor v / z is rounded on the way."""
    pre = (torch.randn(4, 1000) + 1).to(dtype)
    z, gradient = fused_with_gradient(fuse_branches, pre)
    wide_z, wide_gradient = fused_with_gradient(fuse_branches, pre.float())
    assert torch.equal(z, wide_z.to(dtype))
    assert torch.equal(gradient, wide_gradient.to(dtype))


@pytest.mark.parametrize("fuse", [fuse_branches, fuse_pairs])
def test_autocast_does_not_reach_inside(fuse):
    pre = torch.randn(3, 200) + 1
    plain = fused_with_gradient(fuse, pre)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = fused_with_gradient(fuse, pre)
    for a, b in zip(plain, inside, strict=True):
        assert b.dtype == torch.float32
        assert torch.equal(a, b)


def test_under_autocast_a_layer_computes_its_fusion_in_float32():
    layer = DCLLinear(20, 30, branches=3)
    x = torch.randn(16, 20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = layer(x)
        y = layer.branch(x)
        pre = torch.stack(layer.fusion.respond(y))
    assert y.dtype == pre.dtype == z.dtype == torch.bfloat16
    assert torch.equal(z, fuse_branches(pre.float()).bfloat16())


@settings(max_examples=60)
@given(
    T=st.integers(1, 8),
    shape=st.lists(st.integers(0, 4), max_size=4).map(tuple),
    dtype=st.sampled_from(DTYPES),
    as_list=st.booleans(),
)
def test_any_shape_as_tensor_and_as_sequence(T, shape, dtype, as_list):
    pre = torch.randn(T, *shape).to(dtype)
    rows = list(pre) if as_list else tuple(pre)
    z = fuse_branches(pre)
    assert z.shape == shape
    assert z.dtype == dtype
    assert torch.equal(z, fuse_branches(rows))
    torch.testing.assert_close(
        z.double(), plain_fusion(pre.double(), 10.0**-T), rtol=4 * torch.finfo(dtype).eps + 1e-14, atol=0
    )
    if T > 1:
        mean = fuse_pairs(pre)
        assert torch.equal(mean, fuse_pairs(rows))
        torch.testing.assert_close(
            mean.double(), plain_pair_fusion(pre.double(), 1e-2), rtol=10 * torch.finfo(dtype).eps + 1e-14, atol=0
        )


@pytest.mark.parametrize("T", [2, 3, 8])
def test_the_order_of_the_branches_does_not_matter(T):
    pre = torch.randn(T, 200, dtype=torch.float64) + 0.5
    for fuse in (fuse_branches, fuse_pairs):
        torch.testing.assert_close(fuse(pre.flip(0)), fuse(pre), rtol=1e-14, atol=0)


def test_only_branches_that_want_a_gradient_get_one():
    a, b, c = (torch.rand(5) + 0.1 for _ in range(3))
    b.requires_grad_()
    fuse_branches([a, b, c]).sum().backward()
    assert a.grad is None
    assert c.grad is None
    assert (b.grad > 0).all()


LARGE = {  # above a million numbers, which a CPU computes in parts
    "rows": lambda T: torch.randn(T, 4097, 300),
    "channels_last": lambda T: torch.randn(T, 3, 101, 100, 37).movedim(-1, 2),
    "one image": lambda T: torch.randn(T, 1, 128, 93, 90),
    "one image, channels_last": lambda T: torch.randn(T, 1, 93, 90, 128).movedim(-1, 2),
    "transposed": lambda T: torch.randn(T, 300, 4097).mT,
    "every second": lambda T: torch.randn(T, 8, 131_999)[..., ::2],
    "one dimension": lambda T: torch.randn(T, 1_100_003),
}


@pytest.mark.parametrize("T", [2, 3])
@pytest.mark.parametrize("large", LARGE.values(), ids=LARGE)
def test_large_tensors_are_fused_as_small_ones(T, large):
    pre = large(T)
    fuse = fuse_branches if T == 2 else fuse_pairs
    z, gradient = fused_with_gradient(fuse, pre)
    positions = pre.flatten(1)
    values, slopes = z.flatten(), gradient.flatten(1)
    for part in torch.arange(positions.shape[1]).split(60_000)[:: 1 if T == 2 else 7]:
        expected, expected_gradient = fused_with_gradient(fuse, positions[:, part])
        assert torch.equal(values[part], expected)
        assert torch.equal(slopes[:, part], expected_gradient)


def test_strided_and_expanded_inputs():
    pre = torch.randn(6, 3, 4).transpose(0, 2)
    assert torch.equal(fuse_branches(pre), fuse_branches(pre.contiguous()))
    one = torch.randn(7)
    torch.testing.assert_close(fuse_branches(one.expand(3, 7), eps=1e-30), one.relu(), rtol=1e-6, atol=1.1e-10)


@pytest.mark.parametrize("fuse", [fuse_branches, fuse_pairs])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_follows_may_work_in_place(dtype, fuse):
    pre = (torch.randn(3, 50) + 0.5).to(dtype).requires_grad_()
    (expected,) = torch.autograd.grad(fuse(pre).mul(2).relu().sum(), pre)
    (gradient,) = torch.autograd.grad(fuse(pre).mul_(2).relu_().sum(), pre)
    assert torch.equal(gradient, expected)


# torch's transforms


@pytest.mark.parametrize("fuse", [fuse_branches, fuse_pairs])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(fuse, reentrant):
    pre = torch.randn(3, 20).requires_grad_()
    checkpoint(fuse, pre, use_reentrant=reentrant).sum().backward()
    assert torch.equal(pre.grad, fused_with_gradient(fuse, pre)[1])


@pytest.mark.parametrize("fuse", [fuse_branches, fuse_pairs])
@pytest.mark.parametrize("in_dim", [0, 1, 2])
def test_vmap(fuse, in_dim):
    pre = torch.randn(5, 3, 6)
    mapped = torch.func.vmap(fuse, in_dims=in_dim)(pre)
    expected = torch.stack([fuse(one) for one in pre.unbind(in_dim)])
    assert torch.equal(mapped, expected)


@pytest.mark.parametrize("fuse", [fuse_branches, fuse_pairs])
def test_func_grad_alone_and_per_sample(fuse):
    pre = torch.randn(4, 3, 6, dtype=torch.float64)
    gradient = torch.func.grad(lambda p: fuse(p).sum())
    expected = torch.stack([fused_with_gradient(fuse, one)[1] for one in pre])
    assert torch.equal(gradient(pre[0]), expected[0])
    assert torch.equal(torch.func.vmap(gradient)(pre), expected)


def test_func_hessian_agrees_with_the_plain_formula():
    pre = torch.rand(3, 2, dtype=torch.float64) + 0.2
    mine = torch.func.jacrev(torch.func.grad(lambda p: fuse_branches(p).sum()))(pre)
    plain = torch.func.hessian(lambda p: plain_fusion(p, 1e-3).sum())(pre)
    torch.testing.assert_close(mine, plain, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("T", [1, 2, 3])
@pytest.mark.parametrize("fuse", [fuse_branches, fuse_pairs])
def test_forward_mode_agrees_with_reverse_mode(fuse, T):
    if fuse is fuse_pairs and T == 1:
        return
    pre, direction = torch.randn(2, T, 7, dtype=torch.float64).unbind(0)
    _, change = torch.func.jvp(fuse, (pre,), (direction,))
    jacobian = torch.autograd.functional.jacobian(fuse, pre)
    torch.testing.assert_close(change, (jacobian * direction).sum((1, 2)), rtol=1e-13, atol=1e-14)
    hessian = torch.func.hessian(lambda p: fuse(p).sum())(pre)
    expected = torch.autograd.functional.hessian(lambda p: fuse(p).sum(), pre)
    torch.testing.assert_close(hessian, expected, rtol=1e-12, atol=1e-12)


def test_forward_mode_goes_through_a_layer():
    layer, x = DCLLinear(6, 4, width=3).double(), torch.randn(5, 6, dtype=torch.float64)
    _, change = torch.func.jvp(layer, (x,), (torch.ones_like(x),))
    step = 1e-6
    torch.testing.assert_close(change, (layer(x + step) - layer(x - step)) / (2 * step), rtol=1e-6, atol=1e-8)


def test_a_layer_is_linearised_as_its_forward_mode_derivative():
    layer, x, direction = DCLLinear(6, 4, width=3), torch.randn(5, 6), torch.randn(5, 6)
    z, linear = torch.func.linearize(layer, x)
    wanted = torch.func.jvp(layer, (x,), (direction,))
    torch.testing.assert_close((z, linear(direction)), wanted)


def assert_compiled_equals_eager(fuse, pre, backend):
    torch._dynamo.reset()
    compiled = torch.compile(fuse, fullgraph=True, backend=backend)
    for a, b in zip(fused_with_gradient(compiled, pre), fused_with_gradient(fuse, pre), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("fuse", "T"), [(fuse_branches, 1), (fuse_branches, 2), (fuse_branches, 3), (fuse_pairs, 3)])
def test_compile_without_a_graph_break(fuse, T):
    assert_compiled_equals_eager(fuse, torch.randn(T, 8, 5), "aot_eager")


def the_whole_graph(function, *args):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")(*args)


@pytest.mark.parametrize(("fuse", "T"), [(fuse_branches, 1), (fuse_branches, 2), (fuse_branches, 4), (fuse_pairs, 3)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_compile_without_gradients_without_a_graph_break(fuse, T, mode):
    pre = torch.randn(T, 8, 5)
    with mode():
        torch.testing.assert_close(the_whole_graph(fuse, pre), fuse(pre))


TRANSFORMED = {
    "gradient": lambda fuse, pre, v: torch.func.grad(lambda p: (fuse(p).square() * v[0]).sum())(pre),
    "per sample": lambda fuse, pre, v: torch.func.vmap(lambda p, w: fuse(p) * w[0], in_dims=-1)(pre, v),
    "forward mode": lambda fuse, pre, v: torch.func.jvp(lambda *p: fuse(p), tuple(pre), tuple(v))[1],
    "second order": lambda fuse, pre, v: torch.func.grad(
        lambda p: (v * torch.func.grad(lambda q: fuse(q).square().sum())(p)).sum()
    )(pre),
}


@pytest.mark.parametrize(("fuse", "T"), [(fuse_branches, 1), (fuse_branches, 2), (fuse_branches, 4), (fuse_pairs, 3)])
@pytest.mark.parametrize("transform", TRANSFORMED)
def test_transforms_inside_of_a_compiled_function(fuse, T, transform):
    pre, v = torch.randn(2, T, 8, 5, dtype=torch.float64).unbind(0)
    pre[0, 0], pre[:, 1] = -1.0, 0.0  # dead branches, and responses of exactly zero, which pass no gradient
    run = functools.partial(TRANSFORMED[transform], fuse)
    torch.testing.assert_close(the_whole_graph(run, pre, v), run(pre, v), rtol=1e-12, atol=1e-12)


def tangent_of(fuse, pre, tangents):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(fuse(forward_ad.make_dual(pre, tangents))).tangent


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("where", ["around", "inside"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_forward_mode_autograd_around_and_inside_of_a_compiled_function(T, where, mode):
    pre, tangents = (torch.randn(T, 8, 5, dtype=torch.float64) for _ in range(2))
    pre[0, 0], pre[:, 1] = -1.0, 0.0
    torch._dynamo.reset()
    compile_ = functools.partial(torch.compile, backend="aot_eager")
    with mode():
        around = where == "around"
        outer, inner = (tangent_of, compile_(fuse_branches)) if around else (compile_(tangent_of), fuse_branches)
        torch.testing.assert_close(outer(inner, pre, tangents), tangent_of(fuse_branches, pre, tangents))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_compile_of_other_types_without_a_graph_break(dtype):
    assert_compiled_equals_eager(fuse_branches, torch.randn(2, 8, 5).to(dtype), "aot_eager")


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compile_to_machine_code():
    pre = torch.randn(3, 64)
    pre[0, :8], pre[:, 8:12], pre[1, 12:16], pre[:, 16] = 0.0, -1.0, 1e38, 1e30
    assert_compiled_equals_eager(fuse_branches, pre, "inductor")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", range(1, 9))
def test_values_and_gradients_on_a_gpu(T, dtype):
    pre = torch.randn(T, 40).to(dtype)
    for cpu in (pre, pre.abs(), pre.abs() * 1e4, EXTREMES["eight mixed"][:T].to(dtype)):
        z, gradient = fused_with_gradient(fuse_branches, cpu.cuda())
        exact_z, exact_gradient = exact_over(cpu, 10.0**-T)
        allowed_z, allowed_gradient = allowed_errors(dtype, T)
        assert worst_error(z.cpu(), exact_z) <= 2 * allowed_z
        assert worst_error(gradient.cpu(), exact_gradient) <= 2 * allowed_gradient


# Wrong input


@pytest.mark.parametrize("fuse", [fuse_branches, fuse_pairs])
@pytest.mark.parametrize(
    ("eps", "error", "named"),
    [
        (-0.5, ValueError, "-0.5"),
        (NAN, ValueError, "nan"),
        (INF, ValueError, "inf"),
        (0, ValueError, "eps = 0"),
        (0.0, ValueError, "eps = 0"),
        ("0.1", TypeError, "'0.1'"),
        (True, TypeError, "True"),
    ],
)
def test_a_wrong_eps_is_named(eps, error, named, fuse):
    with pytest.raises(error, match=named):
        fuse(torch.ones(2, 3), eps)


@pytest.mark.parametrize("fuse", [fuse_branches, fuse_pairs])
@pytest.mark.parametrize(
    ("pre", "error", "named"),
    [
        (torch.ones(2, 3, dtype=torch.int32), TypeError, "torch.int32"),
        (torch.ones(2, 3, dtype=torch.bool), TypeError, "torch.bool"),
        (torch.ones(2, 3, dtype=torch.complex64), TypeError, "torch.complex64"),
        ([torch.ones(3), torch.ones(3, dtype=torch.int64)], TypeError, "torch.int64"),
        ([torch.ones(3), torch.ones(3, dtype=torch.float64)], TypeError, "torch.float32 and torch.float64"),
        ([torch.ones(3), 2.5], TypeError, "2.5"),
        (2.5, TypeError, "2.5"),
        (None, TypeError, "None"),
        ([torch.ones(3), torch.ones(4)], ValueError, r"\(3,\), \(4,\)"),
        ([torch.ones(3), torch.ones(1)], ValueError, r"\(3,\), \(1,\)"),
        (torch.tensor(1.0), ValueError, "without dimensions"),
        (torch.ones(0, 3), ValueError, "no branch"),
        ([], ValueError, "no branch"),
        ((), ValueError, "no branch"),
    ],
)
def test_wrong_branches_are_named(pre, error, named, fuse):
    with pytest.raises(error, match=named):
        fuse(pre)


def test_one_branch_forms_no_pair():
    with pytest.raises(ValueError, match=r"at least two branches.*fuse_branches"):
        fuse_pairs(torch.ones(1, 3))


# The draw of a pair

CHI_SQUARE_999 = {3: 13.82, 4: 20.52, 5: 27.88, 6: 36.12, 7: 45.31, 8: 55.48}
"""The 99.9 % point of chi-square with T(T-1)/2 - 1 degrees of freedom."""


def draw_keys(n, **fixed):
    """n keys that count up in the one of seed, layer, step that is not fixed."""
    columns = [
        torch.full((n,), fixed[name]) if name in fixed else torch.arange(n) for name in ("seed", "layer", "step")
    ]
    return torch.stack(columns, -1)


def pair_numbers(keys, T):
    first, second = draw_pair(keys, T).unbind(-1)
    return first * T + second


@pytest.mark.parametrize("T", range(3, 9))
@pytest.mark.parametrize(
    "fixed",
    [{"seed": 0, "layer": 0}, {"seed": 12345, "layer": 0xDEADBEEF}, {"seed": 7, "step": 3}, {"layer": 1, "step": 100}],
    ids=lambda fixed: "-".join(f"{k}{v}" for k, v in fixed.items()),
)
def test_every_pair_is_equally_likely(T, fixed):
    n, pairs = 30_000, T * (T - 1) // 2
    drawn = draw_pair(draw_keys(n, **fixed), T)
    assert (drawn[:, 0] < drawn[:, 1]).all()
    assert (drawn >= 0).all()
    assert (drawn < T).all()
    counts = torch.unique(drawn, dim=0, return_counts=True)[1].double()
    assert len(counts) == pairs
    statistic = ((counts - n / pairs) ** 2 / (n / pairs)).sum().item()
    assert statistic < CHI_SQUARE_999[T]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"seed": 1, "layer": 2}, {"seed": 1, "layer": 3}),
        ({"seed": 1, "layer": 2}, {"seed": 2, "layer": 2}),
        ({"seed": 1, "layer": 2}, {"seed": 2, "layer": 1}),
        ({"seed": 0, "layer": 0}, {"seed": 1 << 40, "layer": 0}),
    ],
)
def test_layers_and_seeds_draw_independently(one, other):
    """The joint counts of two layers' pairs against n/9 in each of 9 cells; 26.12 is the 99.9 % point of chi²(8)."""
    n = 30_000
    cells = pair_numbers(draw_keys(n, **one), 3) * 9 + pair_numbers(draw_keys(n, **other), 3)
    counts = torch.unique(cells, return_counts=True)[1].double()
    assert len(counts) == 9
    assert ((counts - n / 9) ** 2 / (n / 9)).sum().item() < 26.12


def test_successive_steps_draw_independently():
    n = 30_000
    numbers = pair_numbers(draw_keys(n, seed=5, layer=6), 3)
    counts = torch.unique(numbers[:-1] * 9 + numbers[1:], return_counts=True)[1].double()
    assert len(counts) == 9
    assert ((counts - n / 9) ** 2 / (n / 9)).sum().item() < 26.12


def mix(x):
    x &= 0xFFFFFFFF
    for shift, odd in ((16, 0x7FEB352D), (15, 0x6C62272F), (13, 0x45D9F3B5)):
        x = (x ^ (x >> shift)) * odd % 2**32
    return x ^ (x >> 16)


@settings(max_examples=200)
@given(seed=st.integers(0, 2**63 - 1), layer=st.integers(0, 2**32 - 1), step=st.integers(0, 2**40), T=st.integers(2, 8))
def test_the_draw_is_whole_number_arithmetic_that_never_leaves_64_bits(seed, layer, step, T):
    h = mix(mix(mix(seed ^ (seed >> 32)) ^ layer) ^ step)
    first = h % T
    second = (first + 1 + mix(h ^ 0x5BD1E995) % (T - 1)) % T
    assert draw_pair(torch.tensor([seed, layer, step]), T).tolist() == sorted([first, second])


def test_the_draw_does_not_change_from_release_to_release():
    """A resumed run draws what it would have drawn; these values were fixed once."""
    keys = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 0, 2], [1, 0, 0], [0, 1, 0], [2**62 + 12345, 4_000_000_000, 10**6]])
    drawn = {T: draw_pair(keys, T).tolist() for T in (3, 8)}
    assert drawn == {
        3: [[0, 1], [1, 2], [0, 1], [0, 2], [0, 2], [0, 1]],
        8: [[0, 5], [3, 7], [5, 6], [0, 4], [0, 3], [0, 5]],
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_one_branch_without_eps_costs_what_a_relu_does(dtype):
    """It is the rival that others are compared with, so it must not be held back by casts that a ReLU does not have."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.written = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and func is not torch.ops.aten.detach.default:
                self.written.append((func.overloadpacket.__name__, out.dtype))
            return out

    pre, grad = torch.randn(50).to(dtype).requires_grad_(), torch.randn(50).to(dtype)
    with Watch() as watch:
        z = fuse_branches([pre], 0)
        (found,) = torch.autograd.grad(z, pre, grad)
    assert watch.written == [("clamp", dtype), ("threshold_backward", dtype)]
    other = pre.detach().requires_grad_()
    (expected,) = torch.autograd.grad(torch.relu(other), other, grad)
    assert torch.equal(z, torch.relu(pre))
    assert torch.equal(found, expected)
