"""A whole unit as operations of torch that compiled networks call, closed to the compiler and replayed by `host`.

What a compiler would generate for a unit is a few calls from Python: a cast, a convolution, kernels. In one operation
there is no Python between them. The arithmetic is that of `unit`; where `host` is not there, compilers see the parts
instead (`ops`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dcl.kernels import unit
from torch_dcl.kernels.launch import Norm
from torch_dcl.kernels.launcher import is_traced
from torch_dcl.kernels.plans import plan_for
from torch_dcl.kernels.record import closed_operation
from torch_dcl.kernels.unit import Settings, Stage

__all__ = ["fits", "run"]

_NOT, _FIXED, _BATCH = range(3)
"""What normalises the responses: nothing, running statistics, those of the batch."""


def fits(x: Tensor, stage: Stage) -> bool:
    """Whether there are operations for a unit with such an input: a matrix, or images in channels_last."""
    return not stage.spatial or (stage.spatial == 2 and x.is_contiguous(memory_format=torch.channels_last))


def run(
    x: Tensor, theta: Tensor, weight: Tensor, bias: Tensor | None, stage: Stage, T: int, eps: float, pairs: bool,
    keep: bool, norm: Norm | None,
) -> Tensor:  # fmt: skip
    """z of an input in the type that is computed in; running statistics are updated."""
    own = torch.ops.torch_dcl
    shape = (list(stage.stride), list(stage.padding), list(stage.dilation), T, eps, pairs, keep)
    kind = _NOT if norm is None else _FIXED if norm.fixed else _BATCH
    gamma, beta, mean, variance, tracked = (None,) * 5 if norm is None else norm[:5]
    norm_eps, momentum = (0.0, 0.0) if norm is None else (norm.eps, norm.momentum)
    given = (x, theta, weight, bias, gamma, beta, mean, variance)
    if kind != _BATCH and not torch.is_grad_enabled():
        z: Tensor = own.closed_unit_infer(*given, *shape, norm_eps)
        return z
    with torch.no_grad():  # what writes into buffers can have no gradients itself
        if kind == _BATCH and mean is not None:
            found = own.closed_unit_tracked(*given, tracked, *shape, norm_eps, momentum)
        else:
            found = own.closed_unit(*given, *shape, kind, norm_eps)
    if not torch.is_grad_enabled():
        return found[0]  # type: ignore[no-any-return]
    attached: Tensor = _Attached.apply(*found, x, theta, weight, bias, gamma, beta, kind, *shape)
    return attached


class _Attached(torch.autograd.Function):
    """z, found already, with its gradients."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, theta_low: Tensor, y: Tensor, low: Tensor, other: Tensor, x: Tensor, theta: Tensor,
        weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, kind: int, *shape: Any,
    ) -> Tensor:  # fmt: skip
        theta_low = theta if theta.dtype == x.dtype else theta_low
        low = weight if weight.dtype == x.dtype and kind == _NOT else low
        ctx.save_for_backward(x, theta_low, y, low, bias, other)
        ctx.settings = theta.dtype, unit.gradient_type(x.dtype, weight), kind, *shape
        ctx.needs = x.requires_grad, theta.requires_grad
        ctx.has = gamma is not None, beta is not None, bias is not None
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        kind, T = ctx.settings[2], ctx.settings[6]
        back = torch.ops.torch_dcl.closed_unit_backward
        dx, dtheta, dweight, dbias, numbers = back(grads[0], *ctx.saved_tensors, *ctx.settings, *ctx.needs)
        dgamma = dbeta = None
        if kind != _NOT:
            dgamma, dbeta, of_bias = numbers[0], numbers[1], numbers[2].view(T, -1)
            dgamma, dbeta = dgamma if ctx.has[0] else None, dbeta if ctx.has[1] else None
            dbias = of_bias
        return (
            *(None,) * 5, dx if ctx.needs[0] else None, dtheta if ctx.needs[1] else None, dweight,
            dbias if ctx.has[2] else None, dgamma, dbeta, *(None,) * 8,
        )  # fmt: skip


def _norm_of(
    kind: int, gamma: Tensor | None, beta: Tensor | None, mean: Tensor | None, variance: Tensor | None,
    tracked: Tensor | None, norm_eps: float, momentum: float | None,
) -> Norm | None:  # fmt: skip
    if kind == _NOT:
        return None
    return Norm(gamma, beta, mean, variance, tracked, norm_eps, momentum, fixed=kind == _FIXED)


def _settings(
    x: Tensor, stride: list[int], padding: list[int], dilation: list[int], T: int, eps: float, pairs: bool, keep: bool
) -> Settings:
    stage = Stage(len(stride), tuple(stride), tuple(padding), tuple(dilation))
    return Settings(stage, 1 if stage.spatial else x.dim() - 1, T, eps, pairs, keep, x.dtype)


def _last(x: Tensor, spatial: int) -> Tensor:
    """In channels_last, as it is already unless a library of convolutions does otherwise."""
    return x.contiguous(memory_format=torch.channels_last) if spatial else x


def _forward(
    x: Tensor, theta: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings, norm: Norm | None
) -> tuple[Tensor, ...]:
    """z, what backward wants of both stages, and nothing in the place of what it has already."""
    if is_traced(x):
        return _shapes(x, theta, weight, settings, norm)
    z, theta_low, y, _, (low, other) = unit.forward(x, theta, weight, bias, settings, norm, True)
    spatial = settings.stage.spatial if settings.stage else 0
    if theta_low is theta:
        theta_low = None
    if weight.dtype == x.dtype and norm is None:
        low = None
    return _all((_last(z, spatial), theta_low, _last(y, spatial), low, other), x)


def _all(found: Sequence[Tensor | None], x: Tensor) -> tuple[Tensor, ...]:
    """An operation returns tensors, each its own: an empty one stands for none."""
    return tuple(x.new_empty(0) if t is None else t for t in found)


def _shapes(x: Tensor, theta: Tensor, weight: Tensor, settings: Settings, norm: Norm | None) -> tuple[Tensor, ...]:
    """What `_forward` gives, for fake tensors."""
    stage, channels, T, *_, keep, dtype = settings
    assert stage is not None
    theta_low = theta.to(dtype)
    y = _last(unit.construct(x, theta_low, stage), stage.spatial)
    M, N = y.shape[channels] // T, weight.shape[1]
    z_shape = list(y.shape)
    z_shape[channels] = N
    z = _last(y.new_empty(z_shape), stage.spatial)
    low: Tensor | None = None
    other: Tensor | None = None
    if norm is not None or weight.dtype != dtype:
        low = torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
    if norm is not None:
        size = 4 * T * N if norm.fixed else 6 * T * N + T * M * (N + 1)
        other = x.new_empty(size, dtype=torch.float32)
    elif keep:
        other = x.new_empty(T, y.numel() // y.shape[channels], N)
    return _all((z, None if theta.dtype == dtype else theta_low, y, low, other), x)


@closed_operation("unit")
def _op_unit(
    x: Tensor, theta: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None,
    mean: Tensor | None, variance: Tensor | None, stride: list[int], padding: list[int], dilation: list[int], T: int,
    eps: float, pairs: bool, keep: bool, kind: int, norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    norm = _norm_of(kind, gamma, beta, mean, variance, None, norm_eps, 0.0)
    settings = _settings(x, stride, padding, dilation, T, eps, pairs, keep)
    return _forward(x, theta, weight, bias, settings, norm)  # type: ignore[return-value]


@closed_operation("unit_tracked", mutates=("mean", "variance", "tracked"))
def _op_unit_tracked(
    x: Tensor, theta: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None,
    mean: Tensor, variance: Tensor, tracked: Tensor, stride: list[int], padding: list[int], dilation: list[int],
    T: int, eps: float, pairs: bool, keep: bool, norm_eps: float, momentum: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    norm = _norm_of(_BATCH, gamma, beta, mean, variance, tracked, norm_eps, momentum)
    settings = _settings(x, stride, padding, dilation, T, eps, pairs, keep)
    return _forward(x, theta, weight, bias, settings, norm)  # type: ignore[return-value]


@closed_operation("unit_infer")
def _op_unit_infer(
    x: Tensor, theta: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None,
    mean: Tensor | None, variance: Tensor | None, stride: list[int], padding: list[int], dilation: list[int], T: int,
    eps: float, pairs: bool, keep: bool, norm_eps: float,
) -> Tensor:  # fmt: skip
    norm = _norm_of(_NOT if mean is None else _FIXED, gamma, beta, mean, variance, None, norm_eps, 0.0)
    settings = _settings(x, stride, padding, dilation, T, eps, pairs, keep)
    if is_traced(x):
        return _shapes(x, theta, weight, settings, norm)[0]
    return _last(unit.forward(x, theta, weight, bias, settings, norm, False)[0], len(stride))


@closed_operation("unit_backward")
def _op_unit_backward(
    grad: Tensor, x: Tensor, theta_low: Tensor, y: Tensor, low: Tensor, bias: Tensor | None, other: Tensor,
    of_theta: torch.dtype, of_weight: torch.dtype, kind: int, stride: list[int], padding: list[int],
    dilation: list[int], T: int, eps: float, pairs: bool, keep: bool, needs_x: bool, needs_theta: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of the input, the filters, the weights and the biases; and, behind a norm, what `moments` gives."""
    norm = _norm_of(kind, None, None, None, None, None, 0.0, 0.0)
    bias = bias if norm is None else None
    if is_traced(x):
        return _shapes_of_gradients(x, theta_low, low, bias, of_theta, of_weight, norm, T, needs_x, needs_theta)
    settings, low = _settings(x, stride, padding, dilation, T, eps, pairs, keep), low.contiguous()
    plan = plan_for(y, low, bias, settings.channels, T, eps, pairs, keep, norm)
    known = (low, other if keep or norm is not None else None)
    needs = (needs_x, needs_theta)
    dx, dtheta, dweight, dbias, numbers = unit.gradients(
        plan, settings, grad, x, theta_low, y, bias, known, of_weight, needs, of_theta
    )
    if dx is not None:
        dx = _last(dx, len(stride))
    if dtheta is not None and (dtheta.dtype != of_theta or dtheta.stride() != theta_low.stride()):
        dtheta = torch.empty_like(theta_low, dtype=of_theta).copy_(dtheta)
    return _all((dx, dtheta, dweight, dbias, numbers), x)  # type: ignore[return-value]


def _shapes_of_gradients(
    x: Tensor, theta_low: Tensor, low: Tensor, bias: Tensor | None, of_theta: torch.dtype, of_weight: torch.dtype,
    norm: Norm | None, T: int, needs_x: bool, needs_theta: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What the operation above gives, for fake tensors."""
    N = low.shape[1]
    dx = _last(x.new_empty(x.shape), theta_low.dim() - 2) if needs_x else None
    dtheta = torch.empty_like(theta_low, dtype=of_theta) if needs_theta else None
    dbias = None if bias is None else x.new_empty(T, N, dtype=of_weight)
    numbers = None if norm is None else x.new_empty(5, T * N, dtype=torch.float32)
    found = (dx, dtheta, low.new_empty(low.shape, dtype=of_weight), dbias, numbers)
    return _all(found, x)  # type: ignore[return-value]
