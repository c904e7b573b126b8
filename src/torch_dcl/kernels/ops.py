"""The kernels of DCL layers as operations of torch (``torch.ops.torch_dcl``), for compilers.

Each operation of stage 2 is there twice. A compiler looks into the open one and finds Triton's kernels, which it
launches from the code that it generates; only what is written in Gluon stays closed to it. The closed one,
``closed_…``, is replayed by `host` where that is there: one call instead of several launches from generated Python, and
kernels with the options that a compiler drops. Outside a compiler `unit` runs.
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
from torch_dcl.kernels.plans import Known, Plan, plan_for, statistics_for
from torch_dcl.kernels.record import LIBRARY, call_of, operation, prefix_of_operations

__all__ = ["fuse", "linear", "project", "turn"]


def fuse(pre: Sequence[Tensor], eps: float, *, pairs: bool) -> Tensor:
    """Responses before their ReLU to z."""
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
    """Stage 2 as operations: branch outputs to z, and the running statistics of a norm updated."""
    rows, prefix, learns = launch.by_position(y, channels).contiguous(), prefix_of_operations(), torch.is_grad_enabled()
    if norm is None:
        plain = (rows, weight, bias, T, eps, pairs, keep)
        if not learns:
            z = call_of("infer", prefix)(*plain)
        elif prefix:
            z = _ClosedProject.apply(*plain)[0]
        else:
            z = torch.ops.torch_dcl.project(*plain)[0]
        return launch.at_positions(y, channels, z)
    of_norm = (bias, norm.gamma, norm.beta, norm.mean, norm.variance)
    if norm.fixed and not learns:
        z = call_of("normed_infer", prefix)(rows, weight, *of_norm, T, eps, pairs, norm.eps)
        return launch.at_positions(y, channels, z)
    with torch.no_grad():  # an operation of its own, since what has gradients may write into none of its inputs
        settings = (T, norm.eps) if norm.fixed else (norm.tracked, T, norm.eps, norm.momentum)
        found = call_of("fixed_statistics" if norm.fixed else "statistics", prefix)
        known, low = found(rows, weight, *of_norm, *settings)
    z = _Normed.apply(prefix, rows, weight, *of_norm[:3], known, low, T, eps, pairs, norm.fixed)
    return launch.at_positions(y, channels, z)


class _ClosedProject(torch.autograd.Function):
    """The gradients of a closed operation, which has none itself: a call of one that has goes through Python again."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        found = torch.ops.torch_dcl.closed_project(*given)
        _project_setup(ctx, given, found)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _project_autograd("closed_", ctx, grads[0])


class _Normed(torch.autograd.Function):
    """Stage 2 behind a norm whose statistics are known; their gradients are part of it."""

    @staticmethod
    def forward(
        ctx: Any, prefix: str, y: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None,
        beta: Tensor | None, known: Tensor, low: Tensor, T: int, eps: float, pairs: bool, fixed: bool,
    ) -> Any:  # fmt: skip
        ctx.save_for_backward(y, known, low)
        ctx.settings = prefix, unit.gradient_type(y.dtype, weight.dtype), T, eps, pairs, fixed
        ctx.has = gamma is not None, beta is not None, bias is not None
        return call_of("normed_project", prefix)(y, known, low, T, eps, pairs, fixed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        prefix, *settings = ctx.settings
        back = call_of("normed_project_backward", prefix)
        dy, dweight, rest = back(grads[0], *ctx.saved_tensors, *settings)
        dgamma, dbeta, dbias = (found if has else None for found, has in zip(rest.unbind(0), ctx.has, strict=False))
        dbias = None if dbias is None else dbias.view(settings[1], -1)
        return None, dy, dweight, dbias, dgamma, dbeta, *(None,) * 6


def turn(x: Tensor, channels: int, last: bool, dtype: torch.dtype) -> Tensor:
    """The same values with the channels last in memory, or as torch has them by default; no copy where they lie so."""
    there = launch.is_last(x, channels) if last else x.is_contiguous()
    if there or torch.compiler.is_compiling():  # a compiler transposes by itself, along with what is before or behind
        low = x.to(dtype)
        return low.movedim(channels, -1).contiguous().movedim(-1, channels) if last else low.contiguous()
    if not torch.is_grad_enabled():
        return launch.turn(x, channels, last, dtype)
    turned: Tensor = _Turn.apply(x, channels, last, dtype)
    return turned


def linear(x: Tensor, low: Tensor, weight: Tensor) -> Tensor:
    """``F.linear`` with the low copy of a weight, whose gradient goes to the weight itself."""
    if torch.compiler.is_compiling():
        compiled: Tensor = torch.ops.torch_dcl.linear(x, low, weight)
        return compiled
    y: Tensor = _Linear.apply(x, low, weight)
    return y


class _Turn(torch.autograd.Function):
    """Another layout in memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, channels: int, last: bool, dtype: torch.dtype) -> Tensor:
        ctx.back = channels, not last, x.dtype
        return launch.turn(x, channels, last, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return turn(grads[0], *ctx.back), None, None, None


class _Fuse(torch.autograd.Function):
    """What ``torch.ops.torch_dcl.fuse`` is, with less to do for each call."""

    @staticmethod
    def forward(ctx: Any, eps: float, pairs: bool, *pre: Tensor) -> Tensor:
        ctx.save_for_backward(*pre)
        ctx.eps, ctx.pairs = eps, pairs
        return launch.fuse(list(pre), eps, pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pre = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted: the reference has one
            return None, None, *unit.again(launch.reference_fuse, grads[0], pre, (ctx.eps, ctx.pairs))
        return None, None, *launch.fuse_backward(grads[0], list(pre), ctx.eps, ctx.pairs)


class _Linear(torch.autograd.Function):
    """What ``torch.ops.torch_dcl.linear`` is, with less to do for each call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: Tensor, _weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, low if ctx.needs_input_grad[0] else None)
        return F.linear(x, low)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, low) = grads, ctx.saved_tensors
        dx = grad @ low if ctx.needs_input_grad[0] else None
        if torch.is_grad_enabled():  # a second derivative is wanted: only torch's own product has one
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
    """z ``[P, K2]``; the weights as they were computed with, or nothing if they are those given; likewise responses."""
    plan = plan_for(y, weight, bias, 1, T, eps, pairs, keep, None)
    known: Known
    if not keep and is_traced(y) and launch.takes_hopper(plan, y, weight) is not None:
        rounded = weight.to(y.dtype)
        z, known = torch.ops.torch_dcl.hopper_project(y, rounded, bias, eps), (rounded, None)
    else:
        z, known = plan.forward(y, weight, bias, None)
    low, pre = known
    assert low is not None
    return z, y.new_empty(0) if low is weight else low, y.new_empty(0) if pre is None else pre


@operation("infer", closed=True)
def _op_infer(y: Tensor, weight: Tensor, bias: Tensor | None, T: int, eps: float, pairs: bool, keep: bool) -> Tensor:
    """z ``[P, K2]``, where nothing learns."""
    plan = plan_for(y, weight, bias, 1, T, eps, pairs, keep, None)
    if not keep and is_traced(y) and launch.takes_hopper(plan, y, weight) is not None:
        hopper: Tensor = torch.ops.torch_dcl.hopper_project(y, weight.to(y.dtype), bias, eps)
        return hopper
    return plan.forward(y, weight, bias, None, learns=False)[0]


@operation("project_backward", closed=True)
def _op_project_backward(
    grad: Tensor, y: Tensor, low: Tensor, bias: Tensor | None, pre: Tensor, dtype: torch.dtype,
    T: int, eps: float, pairs: bool, keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of branch outputs, weights and biases; if there are none, nothing."""
    plan = plan_for(y, low, bias, 1, T, eps, pairs, keep, None)
    if not keep and is_traced(y) and launch.takes_hopper(plan, y, low) is not None:
        return torch.ops.torch_dcl.hopper_project_backward(grad, y, low, bias, eps, dtype)
    dy, dweight, dbias, _ = plan.backward(grad.contiguous(), y, bias, (low, pre if keep else None), dtype)
    return dy, dweight, y.new_empty(0) if dbias is None else dbias


@operation("statistics", closed=True, mutates=("mean", "variance", "tracked"))
def _op_statistics(
    y: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, mean: Tensor | None,
    variance: Tensor | None, tracked: Tensor | None, T: int, norm_eps: float, momentum: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What `moments` knows of a norm by the batch, and the weights; running statistics follow, if they are given."""
    return _statistics(y, weight, bias, T, Norm(gamma, beta, mean, variance, tracked, norm_eps, momentum, fixed=False))


@operation("fixed_statistics", closed=True)
def _op_fixed_statistics(
    y: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, mean: Tensor | None,
    variance: Tensor | None, T: int, norm_eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same by running mean and variance."""
    return _statistics(y, weight, bias, T, Norm(gamma, beta, mean, variance, None, norm_eps, 0.0, fixed=True))


def _statistics(y: Tensor, weight: Tensor, bias: Tensor | None, T: int, norm: Norm) -> tuple[Tensor, Tensor]:
    statistics = statistics_for(y, weight, bias, T, norm)
    return statistics(y, weight.contiguous(), None if bias is None else bias.contiguous(), norm)


@operation("normed_project", closed=True)
def _op_normed_project(y: Tensor, known: Tensor, low: Tensor, T: int, eps: float, pairs: bool, fixed: bool) -> Tensor:
    """z, from what is known of the norm."""
    z = y.new_empty(y.shape[0], low.shape[1])
    _normed_plan(y, low, T, eps, pairs, fixed).projection(y, low, known, z)
    return z


def _normed_plan(y: Tensor, low: Tensor, T: int, eps: float, pairs: bool, fixed: bool) -> Plan:
    """The plan behind a norm whose statistics are known."""
    norm = Norm(None, None, None, None, None, 0.0, 0.0, fixed=fixed)
    return plan_for(y, low, None, 1, T, eps, pairs, False, norm)


@operation("normed_infer", closed=True)
def _op_normed_infer(
    y: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, mean: Tensor | None,
    variance: Tensor | None, T: int, eps: float, pairs: bool, norm_eps: float,
) -> Tensor:  # fmt: skip
    """z by running mean and variance, where nothing learns."""
    norm = Norm(gamma, beta, mean, variance, None, norm_eps, 0.0, fixed=True)
    plan = plan_for(y, weight, bias, 1, T, eps, pairs, False, norm)
    return plan.forward(y, weight, bias, norm, learns=False)[0]


@operation("normed_project_backward", closed=True)
def _op_normed_project_backward(
    grad: Tensor, y: Tensor, known: Tensor, low: Tensor, dtype: torch.dtype, T: int, eps: float, pairs: bool,
    fixed: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    plan = _normed_plan(y, low, T, eps, pairs, fixed)
    dy, dweight, _, numbers = plan.backward(grad.contiguous(), y, None, (low, known), dtype)
    assert numbers is not None
    return dy, dweight, numbers


@operation("linear")
def _op_linear(x: Tensor, low: Tensor, weight: Tensor) -> Tensor:
    return (x.reshape(-1, x.shape[-1]) @ low.t()).view(*x.shape[:-1], len(low))


@operation("linear_weight_gradient")
def _op_linear_weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return unit.weight_gradient(grad, x, torch.float32)


# Gluon: a compiler would write these kernels anew as Triton, so they stay closed, in the cheapest way that torch has.

LIBRARY.define("hopper_project(Tensor y, Tensor weight, Tensor? bias, float eps) -> Tensor")
LIBRARY.define(
    "hopper_project_backward(Tensor grad, Tensor y, Tensor weight, Tensor? bias, float eps, ScalarType dtype)"
    " -> (Tensor, Tensor, Tensor)"
)


def _hopper_project(y: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    with kernels.on_device_of(y):
        return plan_for(y, weight, bias, 1, 2, eps, False, False, None).forward(y, weight, bias, None)[0]


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
    of_bias = y.new_empty(0) if bias is None else torch.empty_like(bias, dtype=dtype)
    return torch.empty_like(y), torch.empty_like(weight, dtype=dtype), of_bias


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
    found = call_of("project_backward", prefix)(grad, y, low, bias, pre, ctx.dtype, *ctx.settings)
    return *found[:2], None if bias is None else found[2], *(None,) * 4


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
    """The batch of ``torch.vmap`` in front, also where there is none."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


@_op_fuse.register_vmap
def _(info: Any, in_dims: Any, pre: list[Tensor], eps: float, pairs: bool) -> tuple[Tensor, int]:
    whole = [_first(p, dim, info.batch_size) for p, dim in zip(pre, in_dims[0], strict=True)]
    return torch.ops.torch_dcl.fuse(whole, eps, pairs), 0


def _project_vmap(
    prefix: str, info: Any, in_dims: Any, y: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    rows = _one_by_one((y, weight, bias), in_dims, info.batch_size)
    found = [call_of("project", prefix)(*row, *settings) for row in rows]
    return tuple(torch.stack(parts) for parts in zip(*found, strict=True)), (0, 0, 0)


for _before in ("", "closed_"):
    torch.library.register_vmap(f"torch_dcl::{_before}project", functools.partial(_project_vmap, _before))


@_op_linear.register_vmap
def _(info: Any, in_dims: Any, x: Tensor, low: Tensor, weight: Tensor) -> tuple[Tensor, int]:
    rows = _one_by_one((x, low, weight), in_dims, info.batch_size)
    return torch.stack([torch.ops.torch_dcl.linear(*row) for row in rows]), 0


def _one_by_one(tensors: Sequence[Tensor | None], in_dims: Any, size: int) -> list[list[Tensor | None]]:
    given = [None if t is None else _first(t, dim, size) for t, dim in zip(tensors, in_dims, strict=False)]
    return [[None if t is None else t[i] for t in given] for i in range(size)]
