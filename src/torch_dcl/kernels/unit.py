"""A DCL unit, both stages and the batch norms between them, as one node of autograd.

Outside a compiler this is all that runs of a layer whose kernels can. Casts to the type of autocast are part of it, and
the gradients of float32 weights come as float32 straight from the products that add them up so. A second derivative is
that of plain torch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_dcl import kernels
from torch_dcl.kernels import launch
from torch_dcl.kernels.launch import Norms
from torch_dcl.kernels.plans import Known, Plan, plan_for
from torch_dcl.kernels.products import products

__all__ = ["Settings", "Stage", "again", "construct", "gradient_type", "run", "weight_gradient"]

_WIDE = torch.version.hip is None  # of the libraries of GPUs, cuBLAS gives products of half types in float32
_CONVOLUTIONS = (None, F.conv1d, F.conv2d, F.conv3d)


class Stage(NamedTuple):
    """Stage 1 beside its filters: how many spatial dimensions it has, none for a linear layer, and its geometry."""

    spatial: int
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()


class Settings(NamedTuple):
    """What a unit computes beside its tensors."""

    stage: Stage | None
    """None if the input is the output of stage 1."""
    channels: int
    """The dimension of the channels."""
    T: int
    eps: float
    pairs: bool
    keep: bool
    """Whether backward keeps the responses; else it forms them once more."""
    dtype: torch.dtype
    """What to compute in."""


def run(
    x: Tensor, theta: Tensor | None, weight: Tensor, bias: Tensor | None, settings: Settings, norms: Norms | None
) -> Tensor:
    """z of inputs, or of branch outputs, in the type that is computed in.

    Args:
        x: The input of stage 1, or its output if there are no filters.
        theta: The filters of stage 1.
        weight: ``[ΣM, K2]``.
        bias: ``[T, K2]``.
        settings: The rest.
        norms: Of the responses.
    """
    if not torch.is_grad_enabled():
        return _compute(x, theta, weight, bias, settings, norms, False)[0]
    parameters = () if norms is None else (*norms.gammas, *norms.betas)
    z: Tensor = _Unit.apply(x, theta, weight, bias, settings, norms, *parameters)
    return z


def _compute(
    x: Tensor, theta: Tensor | None, weight: Tensor, bias: Tensor | None, settings: Settings, norms: Norms | None,
    learns: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Plan, Known]:  # fmt: skip
    """z; the filters and the branch outputs; how stage 2 was computed, and what it leaves for backward."""
    stage, channels, T, eps, pairs, keep, dtype = settings
    low, y = None, x
    if theta is not None and stage is not None:
        low = theta if theta.dtype is dtype else theta.to(dtype)
        y = construct(x, low, stage)
    plan = plan_for(y, weight, bias, channels, T, eps, pairs, keep, norms)
    if norms is not None and not norms.fixed and plan.P == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {plan.z_shape}")
    with kernels.on_device_of(x):
        z, known = plan.forward(y, weight, bias, norms, learns=learns)
    return z, low, y, plan, known


def construct(x: Tensor, theta: Tensor, stage: Stage) -> Tensor:
    """Stage 1 in plain torch."""
    spatial, stride, padding, dilation = stage
    if not spatial:
        return F.linear(x, theta)
    y: Tensor = _CONVOLUTIONS[spatial](x, theta, None, stride, padding, dilation)  # type: ignore[misc]
    return y


class _Unit(torch.autograd.Function):
    """The unit with its gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, theta: Tensor | None, weight: Tensor, bias: Tensor | None, settings: Settings,
        norms: Norms | None, *parameters: Tensor,
    ) -> Tensor:  # fmt: skip
        z, low, y, ctx.plan, known = _compute(x, theta, weight, bias, settings, norms, True)
        ctx.save_for_backward(x, theta, weight, bias, low, y, *known, *parameters)
        ctx.settings, ctx.norms = settings, norms
        return z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, theta, weight, bias, low, y, *known = ctx.saved_tensors  # once: activation checkpointing allows no more
        settings, norms, needs = ctx.settings, ctx.norms, ctx.needs_input_grad
        if torch.is_grad_enabled():  # a second derivative is wanted: plain torch has one
            return _differentiable(grads[0], x, theta, weight, bias, settings, norms, known[2:])
        dtype = settings.dtype
        to = gradient_type(dtype, weight)
        with kernels.on_device_of(x):
            dx, dweight, dbias, numbers = ctx.plan.backward(grads[0], y, bias, known[:2], to)
            dtheta = None
            if low is not None:
                dx, dtheta = _stage_gradients(dx, x, low, settings.stage, needs, theta.dtype if _WIDE else dtype)
        if numbers is None:
            return dx, dtheta, dweight, dbias, None, None
        T, each = settings.T, numbers.unbind(0)
        dnorm = (*(each[:T] if norms.gammas else ()), *(each[T : 2 * T] if norms.betas else ()))
        return dx, dtheta, dweight, None if bias is None else numbers[2 * T : 3 * T], None, None, *dnorm


def gradient_type(dtype: torch.dtype, weight: Tensor) -> torch.dtype:
    """What the gradients of stage 2's weights are computed in: float32 of float32 weights, although all else is not.

    Not in float16: what a fusion has saturated must still overflow for a GradScaler to find it.
    """
    return torch.float32 if _WIDE and dtype is torch.bfloat16 and weight.dtype is torch.float32 else dtype


def _stage_gradients(
    dy: Tensor, x: Tensor, theta: Tensor, stage: Stage, needs: Sequence[bool], dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the input and of the filters of stage 1."""
    spatial, stride, padding, dilation = stage
    if not (needs[0] or needs[1]):
        return None, None
    if spatial:
        dx, dtheta, _ = torch.ops.aten.convolution_backward.default(
            dy, x, theta, None, stride, padding, dilation, False, (0,) * spatial, 1, (needs[0], needs[1], False)
        )
        return dx, dtheta
    return dy @ theta if needs[0] else None, weight_gradient(dy, x, dtype) if needs[1] else None


def weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of a linear layer's weight, in the type of the inputs or in float32."""
    rows = grad.reshape(-1, grad.shape[-1]).t()[None]
    return products(rows, x.reshape(-1, x.shape[-1])[None], dtype)[0]


def again(reference: Any, grad: Tensor, inputs: Sequence[Tensor], settings: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Gradients that can be differentiated again, from the reference."""
    with torch.enable_grad():
        out = reference(inputs, *settings)
    return torch.autograd.grad(out, list(inputs), grad, create_graph=True)


def _differentiable(
    grad: Tensor, x: Tensor, theta: Tensor | None, weight: Tensor, bias: Tensor | None, settings: Settings,
    norms: Norms | None, parameters: Sequence[Tensor],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of a unit in plain torch, so that they have gradients of their own."""
    inputs = [x, theta, weight, bias, *parameters]
    given = [t for t in inputs if t is not None and t.requires_grad]
    with torch.enable_grad():
        z = _reference(x, theta, weight, bias, settings, norms, parameters)
    found = iter(torch.autograd.grad(z, given, grad, create_graph=True))
    dx, dtheta, dweight, dbias, *rest = [None if t is None or not t.requires_grad else next(found) for t in inputs]
    return dx, dtheta, dweight, dbias, None, None, *rest


def _reference(
    x: Tensor, theta: Tensor | None, weight: Tensor, bias: Tensor | None, settings: Settings, norms: Norms | None,
    parameters: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    """What `run` gives, in plain torch."""
    stage, channels, T, eps, pairs, _, dtype = settings
    y = x if theta is None or stage is None else construct(x, theta.to(dtype), stage)
    low = None if bias is None else bias.to(dtype)
    pre = launch.responses(y, weight.to(dtype), low, [y.shape[channels] // T] * T, channels)
    if norms is not None:
        gammas = parameters[:T] if norms.gammas else [None] * T
        betas = parameters[len(parameters) - T :] if norms.betas else [None] * T
        running = zip(norms.means, norms.variances, strict=True) if norms.fixed else [(None, None)] * T
        pre = [
            F.batch_norm(p.movedim(channels, 1), mean, var, gamma, beta, not norms.fixed, 0.0, norms.eps).movedim(
                1, channels
            )
            for p, gamma, beta, (mean, var) in zip(pre, gammas, betas, running, strict=True)
        ]
    return launch.reference_fuse(pre, eps, pairs)
