"""The kernels of DCL layers as torch operations (``torch.ops.torch_dcl``), for compilers.

Every operation of stage 2 is registered twice. A compiler traces the open one down to its Triton kernels, which it
launches from the code that it generates; only Gluon kernels remain opaque. The opaque one, ``closed_…``, is replayed by
`host` if that is available: one call instead of several launches from generated Python, with the compiler options that
tracing drops. In eager mode `unit` runs.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_dcl import kernels
from torch_dcl.kernels import launch, unit
from torch_dcl.kernels.launch import Norm
from torch_dcl.kernels.launcher import is_traced
from torch_dcl.kernels.plans import Plan, Saved, plan_for, statistics_for
from torch_dcl.kernels.record import LIBRARY, call_of, operation, prefix_of_operations

__all__ = ["fuse", "linear", "project"]


def fuse(pre: Sequence[Tensor], eps: float, *, pairs: bool) -> Tensor:
    """Pre-activations to z."""
    if torch.compiler.is_compiling():
        compiled: Tensor = torch.ops.torch_dcl.fuse(list(pre), eps, pairs)
        return compiled
    if not torch.is_grad_enabled():
        return launch.fuse(list(pre), eps, pairs)
    z: Tensor = _Fuse.apply(eps, pairs, *pre)
    return z


def project(
    y: Tensor, weight: Tensor, bias: Tensor | None, channels: int, T: int, eps: float, pairs: bool, keep: bool,
    norm: Norm | None,
) -> Tensor:  # fmt: skip
    """Stage 2 as operations: branch outputs to z, with the running statistics of a norm updated in place."""
    rows = launch.flatten_positions(y, channels).contiguous()
    prefix, learns = prefix_of_operations(), torch.is_grad_enabled()
    if norm is None:
        plain = (rows, weight, bias, T, eps, pairs, keep)
        if not learns:
            z = call_of("infer", prefix)(*plain)
        elif prefix:
            z = _ClosedProject.apply(*plain)[0]
        else:
            z = torch.ops.torch_dcl.project(*plain)[0]
        return launch.unflatten_positions(y, channels, z)
    of_norm = (bias, norm.gamma, norm.beta, norm.mean, norm.variance)
    if norm.fixed and not learns:
        z = call_of("normed_infer", prefix)(rows, weight, *of_norm, T, eps, pairs, norm.eps)
        return launch.unflatten_positions(y, channels, z)
    with torch.no_grad():  # a separate operation, since one with gradients must not mutate its inputs
        settings = (T, norm.eps) if norm.fixed else (norm.tracked, T, norm.eps, norm.momentum)
        compute = call_of("fixed_statistics" if norm.fixed else "statistics", prefix)
        stats, low = compute(rows, weight, *of_norm, *settings)
    z = _Normed.apply(prefix, rows, weight, *of_norm[:3], stats, low, T, eps, pairs, norm.fixed)
    return launch.unflatten_positions(y, channels, z)


class _ClosedProject(torch.autograd.Function):
    """Autograd for the opaque operation: registered on the operation itself, it would run through Python each call."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        results = torch.ops.torch_dcl.closed_project(*args)
        _project_setup(ctx, args, results)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _project_autograd("closed_", ctx, grads[0])


class _Normed(torch.autograd.Function):
    """Stage 2 with a norm whose statistics are given; the gradients through them are included."""

    @staticmethod
    def forward(
        ctx: Any, prefix: str, y: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None,
        beta: Tensor | None, stats: Tensor, low: Tensor, T: int, eps: float, pairs: bool, fixed: bool,
    ) -> Any:  # fmt: skip
        ctx.save_for_backward(y, stats, low)
        ctx.settings = prefix, unit.gradient_type(y.dtype, weight.dtype), T, eps, pairs, fixed
        ctx.has = gamma is not None, beta is not None, bias is not None
        return call_of("normed_project", prefix)(y, stats, low, T, eps, pairs, fixed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        prefix, *settings = ctx.settings
        back = call_of("normed_project_backward", prefix)
        dy, dweight, rest = back(grads[0], *ctx.saved_tensors, *settings)
        dgamma, dbeta, dbias = (row if has else None for row, has in zip(rest.unbind(0), ctx.has, strict=False))
        dbias = None if dbias is None else dbias.view(settings[1], -1)
        return None, dy, dweight, dbias, dgamma, dbeta, *(None,) * 6


def linear(x: Tensor, low: Tensor, weight: Tensor) -> Tensor:
    """``F.linear`` with the half-precision copy of a weight; the gradient goes to the weight itself."""
    if torch.compiler.is_compiling():
        compiled: Tensor = torch.ops.torch_dcl.linear(x, low, weight)
        return compiled
    y: Tensor = _Linear.apply(x, low, weight)
    return y


class _Fuse(torch.autograd.Function):
    """``torch.ops.torch_dcl.fuse`` with less overhead per call."""

    @staticmethod
    def forward(ctx: Any, eps: float, pairs: bool, *pre: Tensor) -> Tensor:
        ctx.save_for_backward(*pre)
        ctx.eps, ctx.pairs = eps, pairs
        return launch.fuse(list(pre), eps, pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pre = ctx.saved_tensors
        if torch.is_grad_enabled():  # double backward: differentiate the reference
            return None, None, *unit.double_backward(launch.reference_fuse, grads[0], pre, (ctx.eps, ctx.pairs))
        return None, None, *launch.fuse_backward(grads[0], list(pre), ctx.eps, ctx.pairs)


class _Linear(torch.autograd.Function):
    """``torch.ops.torch_dcl.linear`` with less overhead per call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: Tensor, _weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, low if ctx.needs_input_grad[0] else None)
        return F.linear(x, low)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, low) = grads, ctx.saved_tensors
        dx = grad @ low if ctx.needs_input_grad[0] else None
        if torch.is_grad_enabled():  # double backward: torch's own product is differentiable
            return dx, grad.reshape(-1, grad.shape[-1]).t() @ x.reshape(-1, x.shape[-1]), None
        return dx, None, unit.weight_gradient(grad, x, torch.float32)


@operation("fuse")
def _op_fuse(pre: list[Tensor], eps: float, pairs: bool) -> Tensor:
    return launch.fuse(pre, eps, pairs)


@operation("fuse_backward")
def _op_fuse_backward(grad: Tensor, pre: list[Tensor], eps: float, pairs: bool) -> list[Tensor]:
    return launch.fuse_backward(grad, pre, eps, pairs)


@operation("project", closed=True)
def _op_project(
    y: Tensor, weight: Tensor, bias: Tensor | None, T: int, eps: float, pairs: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """z ``[P, K2]``; the weights in the compute dtype, empty if unchanged; the responses, empty if not saved."""
    plan = plan_for(y, weight, bias, 1, T, eps, pairs, keep, None)
    saved: Saved
    if not keep and is_traced(y) and launch.hopper_kernels_for(plan, y, weight) is not None:
        rounded = weight.to(y.dtype)
        z, saved = torch.ops.torch_dcl.hopper_project(y, rounded, bias, eps), (rounded, None)
    else:
        z, saved = plan.forward(y, weight, bias, None)
    low, pre = saved
    assert low is not None
    return z, y.new_empty(0) if low is weight else low, y.new_empty(0) if pre is None else pre


@operation("infer", closed=True)
def _op_infer(y: Tensor, weight: Tensor, bias: Tensor | None, T: int, eps: float, pairs: bool, keep: bool) -> Tensor:
    """z ``[P, K2]`` without gradients."""
    plan = plan_for(y, weight, bias, 1, T, eps, pairs, keep, None)
    if not keep and is_traced(y) and launch.hopper_kernels_for(plan, y, weight) is not None:
        hopper: Tensor = torch.ops.torch_dcl.hopper_project(y, weight, bias, eps)
        return hopper
    return plan.forward(y, weight, bias, None, learns=False)[0]


@operation("project_backward", closed=True)
def _op_project_backward(
    grad: Tensor, y: Tensor, low: Tensor, bias: Tensor | None, pre: Tensor, dtype: torch.dtype,
    T: int, eps: float, pairs: bool, keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of branch outputs, weights and biases; the latter empty without biases."""
    plan = plan_for(y, low, bias, 1, T, eps, pairs, keep, None)
    if not keep and is_traced(y) and launch.hopper_kernels_for(plan, y, low, backward=True) is not None:
        return torch.ops.torch_dcl.hopper_project_backward(grad, y, low, bias, eps, dtype)
    dy, dweight, dbias, _ = plan.backward(grad.contiguous(), y, bias, (low, pre if keep else None), dtype)
    return dy, dweight, y.new_empty(0) if dbias is None else dbias


@operation("statistics", closed=True, mutates=("mean", "variance", "tracked"))
def _op_statistics(
    y: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, mean: Tensor | None,
    variance: Tensor | None, tracked: Tensor | None, T: int, norm_eps: float, momentum: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The statistics of the batch from `moments`, and the weights; running statistics are updated if given."""
    return _statistics(y, weight, bias, T, Norm(gamma, beta, mean, variance, tracked, norm_eps, momentum, fixed=False))


@operation("fixed_statistics", closed=True)
def _op_fixed_statistics(
    y: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, mean: Tensor | None,
    variance: Tensor | None, T: int, norm_eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`_op_statistics` with running mean and variance."""
    return _statistics(y, weight, bias, T, Norm(gamma, beta, mean, variance, None, norm_eps, 0.0, fixed=True))


def _statistics(y: Tensor, weight: Tensor, bias: Tensor | None, T: int, norm: Norm) -> tuple[Tensor, Tensor]:
    statistics = statistics_for(y, weight, bias, T, norm)
    return statistics(y, weight.contiguous(), None if bias is None else bias.contiguous(), norm)


@operation("normed_project", closed=True)
def _op_normed_project(y: Tensor, stats: Tensor, low: Tensor, T: int, eps: float, pairs: bool, fixed: bool) -> Tensor:
    """z from the statistics of a norm."""
    z = y.new_empty(y.shape[0], low.shape[1])
    _normed_plan(y, low, T, eps, pairs, fixed).projection(y, low, stats, z)
    return z


def _normed_plan(y: Tensor, low: Tensor, T: int, eps: float, pairs: bool, fixed: bool) -> Plan:
    """The plan for a norm whose statistics are given."""
    norm = Norm(None, None, None, None, None, 0.0, 0.0, fixed=fixed)
    return plan_for(y, low, None, 1, T, eps, pairs, False, norm)


@operation("normed_infer", closed=True)
def _op_normed_infer(
    y: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, mean: Tensor | None,
    variance: Tensor | None, T: int, eps: float, pairs: bool, norm_eps: float,
) -> Tensor:  # fmt: skip
    """z with running mean and variance, without gradients."""
    norm = Norm(gamma, beta, mean, variance, None, norm_eps, 0.0, fixed=True)
    plan = plan_for(y, weight, bias, 1, T, eps, pairs, False, norm)
    return plan.forward(y, weight, bias, norm, learns=False)[0]


@operation("normed_project_backward", closed=True)
def _op_normed_project_backward(
    grad: Tensor, y: Tensor, stats: Tensor, low: Tensor, dtype: torch.dtype, T: int, eps: float, pairs: bool,
    fixed: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    plan = _normed_plan(y, low, T, eps, pairs, fixed)
    dy, dweight, _, numbers = plan.backward(grad.contiguous(), y, None, (low, stats), dtype)
    assert numbers is not None
    return dy, dweight, numbers


@operation("linear")
def _op_linear(x: Tensor, low: Tensor, weight: Tensor) -> Tensor:
    return (x.reshape(-1, x.shape[-1]) @ low.t()).view(*x.shape[:-1], len(low))


@operation("linear_weight_gradient")
def _op_linear_weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return unit.weight_gradient(grad, x, torch.float32)


# Gluon kernels are opaque: a compiler would regenerate them as Triton. These registrations have the least overhead.

LIBRARY.define("hopper_project(Tensor y, Tensor weight, Tensor? bias, float eps) -> Tensor")
LIBRARY.define(
    "hopper_project_backward(Tensor grad, Tensor y, Tensor weight, Tensor? bias, float eps, ScalarType dtype)"
    " -> (Tensor, Tensor, Tensor)"
)


def _hopper_project(y: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    with kernels.on_device_of(y):
        plan = plan_for(y, weight, bias, 1, 2, eps, False, False, None)
        return plan.forward(y, weight, bias, None, learns=False)[0]


def _hopper_project_backward(
    grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    with kernels.on_device_of(y):
        plan = plan_for(y, weight, bias, 1, 2, eps, False, False, None)
        dy, dweight, dbias, _ = plan.backward(grad, y, bias, (weight, None), dtype)
    return dy, dweight, y.new_empty(0) if dbias is None else dbias


LIBRARY.impl("hopper_project", _hopper_project, "CUDA")
LIBRARY.impl("hopper_project_backward", _hopper_project_backward, "CUDA")


@torch.library.register_fake("torch_dcl::hopper_project")
def _(y: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return y.new_empty(y.shape[0], weight.shape[1])


@torch.library.register_fake("torch_dcl::hopper_project_backward")
def _(
    grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    dbias = y.new_empty(0) if bias is None else torch.empty_like(bias, dtype=dtype)
    return torch.empty_like(y), torch.empty_like(weight, dtype=dtype), dbias


def _fuse_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pre, ctx.eps, ctx.pairs = inputs
    ctx.save_for_backward(*pre)


def _fuse_autograd(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.torch_dcl.fuse_backward(grad, list(ctx.saved_tensors), ctx.eps, ctx.pairs), None, None


def _project_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    y, weight, bias, *settings = inputs
    _, low, pre = output
    ctx.mark_non_differentiable(low, pre)
    ctx.save_for_backward(y, low if low.numel() else weight, bias, pre)
    ctx.settings, ctx.dtype = settings, unit.gradient_type(y.dtype, weight.dtype)


def _project_autograd(prefix: str, ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    y, low, bias, pre = ctx.saved_tensors
    dy, dweight, dbias = call_of("project_backward", prefix)(grad, y, low, bias, pre, ctx.dtype, *ctx.settings)
    return dy, dweight, None if bias is None else dbias, *(None,) * 4


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, low, _ = inputs
    ctx.save_for_backward(x, low if ctx.needs_input_grad[0] else None)


def _linear_autograd(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, low = ctx.saved_tensors
    dx = grad @ low if ctx.needs_input_grad[0] else None
    return dx, None, torch.ops.torch_dcl.linear_weight_gradient(grad, x)


_op_linear.register_autograd(_linear_autograd, setup_context=_linear_setup)
_op_fuse.register_autograd(_fuse_autograd, setup_context=_fuse_setup)
_op_project.register_autograd(functools.partial(_project_autograd, ""), setup_context=_project_setup)


def _first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """Move the batch dimension of ``torch.vmap`` to the front; expand a tensor without one."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


@_op_fuse.register_vmap
def _(info: Any, in_dims: Any, pre: list[Tensor], eps: float, pairs: bool) -> tuple[Tensor, int]:
    whole = [_first(p, dim, info.batch_size) for p, dim in zip(pre, in_dims[0], strict=True)]
    return torch.ops.torch_dcl.fuse(whole, eps, pairs), 0


def _project_vmap(
    prefix: str, info: Any, in_dims: Any, y: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    rows = _one_by_one((y, weight, bias), in_dims, info.batch_size)
    results = [call_of("project", prefix)(*row, *settings) for row in rows]
    return tuple(torch.stack(column) for column in zip(*results, strict=True)), (0, 0, 0)


for _before in ("", "closed_"):
    torch.library.register_vmap(f"torch_dcl::{_before}project", functools.partial(_project_vmap, _before))


@_op_linear.register_vmap
def _(info: Any, in_dims: Any, x: Tensor, low: Tensor, weight: Tensor) -> tuple[Tensor, int]:
    rows = _one_by_one((x, low, weight), in_dims, info.batch_size)
    return torch.stack([torch.ops.torch_dcl.linear(*row) for row in rows]), 0


def _one_by_one(tensors: Sequence[Tensor | None], in_dims: Any, size: int) -> list[list[Tensor | None]]:
    batched = [None if t is None else _first(t, dim, size) for t, dim in zip(tensors, in_dims, strict=False)]
    return [[None if t is None else t[i] for t in batched] for i in range(size)]
