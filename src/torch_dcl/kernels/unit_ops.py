"""A whole unit as torch operations for compiled networks, opaque to the compiler and replayed by `host`.

A compiler would generate several calls from Python for a unit: a cast, a convolution, kernels. One operation avoids
the Python between them. The arithmetic is that of `unit`; without `host`, compilers trace the operations of each stage
instead (`ops`).
"""

import ast
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_dcl.kernels import unit
from torch_dcl.kernels.launch import Norm, max_fused_width
from torch_dcl.kernels.launcher import is_traced
from torch_dcl.kernels.plans import plan_for
from torch_dcl.kernels.record import closed_operation
from torch_dcl.kernels.unit import Settings, Stage

__all__ = ["Closed", "Operand", "encode", "run_closed"]

Closed = tuple[torch.dtype, str, int, bool, bool | None, bool, tuple[bool, bool]]
"""The compute dtype, the settings as text, T, whether responses are saved, ``fixed``; what learns: any, x and θ."""


class Operand(NamedTuple):
    """What decides about a tensor of a unit, and is the same in all calls of what was compiled."""

    kind: type
    dtype: torch.dtype
    device: torch.device
    learns: bool


_NOT, _FIXED, _BATCH = range(3)
"""The norm of the responses: none, by running statistics, or by those of the batch."""


def run_closed(
    x: Tensor, theta: Tensor, weight: Tensor, bias: Tensor | None, of_norm: tuple[Tensor | None, ...], eps: float,
    norm_eps: float, momentum: float | None, settings: Closed,
) -> Tensor:  # fmt: skip
    """z of rows or of images in channels_last; updates running statistics.

    A compiler guards every name that is looked up here, and checks these guards in every call, so there are few.
    """
    dtype, how, T, keeps, fixed, learns, needs = settings
    x = x.to(dtype)
    gamma, beta, mean, variance, tracked = of_norm
    tensors = (x, theta, weight, bias, gamma, beta, mean, variance)
    if fixed is not False and not learns:
        return _infer(*tensors, how, eps, norm_eps)  # type: ignore[no-any-return]
    with torch.no_grad():  # an operation that mutates buffers cannot have gradients
        if fixed is False and mean is not None:
            results = _compute_tracked(*tensors, tracked, how, eps, norm_eps, momentum)
        else:
            results = _compute(*tensors, how, eps, norm_eps)
    z: Tensor = results[0]
    if not learns:
        return z
    y, rest = results[1], [*results[2:]]
    low = rest.pop(0) if weight.dtype != x.dtype or fixed is not None else None
    other = rest.pop(0) if keeps or fixed is not None else None
    theta_low = rest.pop(0) if rest and rest[0].numel() else None
    attached: Tensor = _Attached.apply(
        z, theta_low, y, low, other, x, theta, weight, bias, gamma, beta, fixed is not None, T, needs, how, eps
    )
    return attached


class _Attached(torch.autograd.Function):
    """Attach gradients to a computed z."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, theta_low: Tensor | None, y: Tensor, low: Tensor | None, other: Tensor | None, x: Tensor,
        theta: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, normed: bool,
        T: int, needs: tuple[bool, bool], how: str, eps: float,
    ) -> Tensor:  # fmt: skip
        theta_low, low = theta if theta_low is None else theta_low, weight if low is None else low
        ctx.save_for_backward(x, theta_low, y, low, bias, other)
        ctx.normed, ctx.T, ctx.needs, ctx.how = normed, T, needs, (how, eps)
        ctx.has = gamma is not None, beta is not None, bias is not None
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        results = list(_compute_backward(grads[0], *ctx.saved_tensors, *ctx.how))
        dx = results.pop(0) if ctx.needs[0] else None
        dtheta = results.pop(0) if ctx.needs[1] else None
        dweight = results.pop(0)
        dgamma = dbeta = dbias = None
        if ctx.normed:
            dgamma, dbeta, dbias = results[0][0], results[0][1], results[0][2].view(ctx.T, -1)
        elif ctx.has[2]:
            dbias = results[0]
        return (
            *(None,) * 5, dx, dtheta, dweight, dbias if ctx.has[2] else None, dgamma if ctx.has[0] else None,
            dbeta if ctx.has[1] else None, *(None,) * 5,
        )  # fmt: skip


class _UnitConfig(NamedTuple):
    """The settings of a unit, except numbers that may change.

    Operations receive them as one text, since each argument costs time in each call.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    T: int
    pairs: bool
    keep: bool
    kind: int
    theta_dtype: torch.dtype
    weight_dtype: torch.dtype
    needs_x: bool
    needs_theta: bool

    def settings(self, x: Tensor, eps: float) -> Settings:
        stage = Stage(len(self.stride), self.stride, self.padding, self.dilation)
        channels = 1 if stage.spatial else x.dim() - 1
        return Settings(stage, channels, self.T, eps, self.pairs, self.keep, x.dtype)

    def norm(self, *tensors: Tensor | None, eps: float = 0.0, momentum: float | None = 0.0) -> Norm | None:
        """The norm from γ, β, means, variances and a count."""
        if self.kind == _NOT:
            return None
        return Norm(*tensors, eps, momentum, fixed=self.kind == _FIXED)  # type: ignore[misc, call-arg, arg-type]


def encode(
    dtype: torch.dtype, x: Operand, theta: Operand, weight: Operand, stage: Stage, widths: tuple[int, ...],
    fixed: bool | None, *, pairs: bool,
) -> Closed:  # fmt: skip
    """The settings of `run_closed`; ``fixed`` is None without a norm."""
    learns = torch.is_grad_enabled()
    needs = (x.learns, theta.learns) if learns else (False, False)
    kind = _NOT if fixed is None else _FIXED if fixed else _BATCH
    keeps = fixed is None and (not stage.spatial or widths[0] > max_fused_width(dtype))
    types = (str(t).removeprefix("torch.") for t in (theta.dtype, unit.gradient_type(dtype, weight.dtype)))
    how = repr((stage.stride, stage.padding, stage.dilation, len(widths), pairs, keeps, kind, *types, *needs))
    return dtype, how, len(widths), keeps, fixed, learns, needs


@functools.cache
def _decode(how: str) -> _UnitConfig:
    values = ast.literal_eval(how)
    return _UnitConfig(*(getattr(torch, value) if isinstance(value, str) else value for value in values))


def _last(x: Tensor, spatial: int) -> Tensor:
    """In channels_last; no copy, unless a convolution library returned another layout."""
    return x.contiguous(memory_format=torch.channels_last) if spatial else x


def _forward(
    x: Tensor, theta: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings, norm: Norm | None
) -> list[Tensor]:
    """z, y, and what backward needs besides the inputs: W in the dtype of x, what stage 2 saves, θ in that dtype."""
    if is_traced(x):
        return _shapes(x, theta, weight, settings, norm)
    z, theta_low, y, _, (low, other) = unit.forward(x, theta, weight, bias, settings, norm, True)
    spatial = settings.stage.spatial if settings.stage else 0
    if theta_low is theta:
        theta_low = None
    if weight.dtype == x.dtype and norm is None:
        low = None
    return _existing(_last(z, spatial), _last(y, spatial), low, other, theta_low)


def _existing(*tensors: Tensor | None) -> list[Tensor]:
    """The existing tensors: each result costs time in each call of an operation."""
    return [t for t in tensors if t is not None]


def _shapes(x: Tensor, theta: Tensor, weight: Tensor, settings: Settings, norm: Norm | None) -> list[Tensor]:
    """The results of `_forward` for fake tensors."""
    stage, channels, T, *_, keep, dtype = settings
    assert stage is not None
    theta_low = theta.to(dtype)
    y = _last(unit.construct(x, theta_low, stage), stage.spatial)
    needs_low = theta.dtype != dtype and unit.cells_of(x, theta, stage) is None
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
    return _existing(z, y, low, other, theta_low if needs_low else None)


@closed_operation("unit")
def _op_unit(
    x: Tensor, theta: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None,
    mean: Tensor | None, variance: Tensor | None, how: str, eps: float, norm_eps: float,
) -> list[Tensor]:  # fmt: skip
    config = _decode(how)
    norm = config.norm(gamma, beta, mean, variance, None, eps=norm_eps)
    return _forward(x, theta, weight, bias, config.settings(x, eps), norm)


@closed_operation("unit_tracked", mutates=("mean", "variance", "tracked"))
def _op_unit_tracked(
    x: Tensor, theta: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None,
    mean: Tensor, variance: Tensor, tracked: Tensor, how: str, eps: float, norm_eps: float, momentum: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`_op_unit` with a fixed number of results: torch allows no list from an operation that mutates its inputs."""
    config = _decode(how)
    norm = config.norm(gamma, beta, mean, variance, tracked, eps=norm_eps, momentum=momentum)
    results = _forward(x, theta, weight, bias, config.settings(x, eps), norm)
    return (*results, x.new_empty(0))[:5]  # type: ignore[return-value]


@closed_operation("unit_infer")
def _op_unit_infer(
    x: Tensor, theta: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None,
    mean: Tensor | None, variance: Tensor | None, how: str, eps: float, norm_eps: float,
) -> Tensor:  # fmt: skip
    config = _decode(how)
    norm, settings = config.norm(gamma, beta, mean, variance, None, eps=norm_eps), config.settings(x, eps)
    if is_traced(x):
        return _shapes(x, theta, weight, settings, norm)[0]
    return _last(unit.forward(x, theta, weight, bias, settings, norm, False)[0], len(config.stride))


@closed_operation("unit_backward")
def _op_unit_backward(
    grad: Tensor, x: Tensor, theta_low: Tensor, y: Tensor, low: Tensor, bias: Tensor | None, other: Tensor | None,
    how: str, eps: float,
) -> list[Tensor]:  # fmt: skip
    """The gradients of weights and, if needed, of input, filters and biases; with a norm, the results of `moments`."""
    config = _decode(how)
    norm = config.norm(*(None,) * 5)
    bias = bias if norm is None else None
    if is_traced(x):
        return _shapes_of_gradients(x, theta_low, low, bias, norm, config)
    settings, low = config.settings(x, eps), low.contiguous()
    plan = plan_for(y, low, bias, settings.channels, config.T, eps, config.pairs, config.keep, norm)
    saved = (low, other)
    needs, theta_dtype = (config.needs_x, config.needs_theta), config.theta_dtype
    dx, dtheta, dweight, dbias, numbers = unit.gradients(
        plan, settings, grad, x, theta_low, y, bias, saved, config.weight_dtype, needs, theta_dtype
    )
    if dx is not None:
        dx = _last(dx, len(config.stride))
    if dtheta is not None and (dtheta.dtype != theta_dtype or dtheta.stride() != theta_low.stride()):
        dtheta = torch.empty_like(theta_low, dtype=theta_dtype).copy_(dtheta)
    return _existing(dx, dtheta, dweight, dbias if norm is None else numbers)


def _shapes_of_gradients(
    x: Tensor, theta_low: Tensor, low: Tensor, bias: Tensor | None, norm: Norm | None, config: _UnitConfig
) -> list[Tensor]:
    """The results of `_op_unit_backward` for fake tensors."""
    T, N = config.T, low.shape[1]
    dx = _last(x.new_empty(x.shape), theta_low.dim() - 2) if config.needs_x else None
    dtheta = torch.empty_like(theta_low, dtype=config.theta_dtype) if config.needs_theta else None
    dbias = None if bias is None else x.new_empty(T, N, dtype=config.weight_dtype)
    numbers = None if norm is None else x.new_empty(5, T * N, dtype=torch.float32)
    dweight = low.new_empty(low.shape, dtype=config.weight_dtype)
    return _existing(dx, dtheta, dweight, dbias if norm is None else numbers)


_infer = torch.ops.torch_dcl.closed_unit_infer.default
_compute = torch.ops.torch_dcl.closed_unit.default
_compute_tracked = torch.ops.torch_dcl.closed_unit_tracked.default
_compute_backward = torch.ops.torch_dcl.closed_unit_backward.default
