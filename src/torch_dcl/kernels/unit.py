"""A DCL unit, both stages and the batch norm between them, as one autograd node.

In eager mode this is the whole forward pass of a layer that the kernels support. It includes the casts of autocast, and
the gradients of float32 weights are the float32 accumulators of their products. Double backward runs in plain torch.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_dcl import kernels
from torch_dcl.functional import transforms
from torch_dcl.kernels import host, launch, record
from torch_dcl.kernels.launch import Norm, products
from torch_dcl.kernels.launcher import is_traced, recording
from torch_dcl.kernels.plans import Plan, Saved, plan_for
from torch_dcl.parts import CPUPlan

if TYPE_CHECKING:
    from torch_dcl.kernels import elementwise

__all__ = [
    "Settings", "Stage", "cells_of", "construct", "double_backward", "forward", "gradient_type", "gradients", "run",
    "weight_gradient",
]  # fmt: skip

_FLOAT32_PRODUCTS = torch.version.hip is None  # cuBLAS can return float32 products of half-precision matrices
_CONVOLUTIONS = (None, F.conv1d, F.conv2d, F.conv3d)


class Stage(NamedTuple):
    """Stage 1 without its filters: the number of spatial dimensions, 0 for a linear layer, and the geometry."""

    spatial: int
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()


class Settings(NamedTuple):
    """The settings of a unit, everything but its tensors."""

    stage: Stage | None
    """None if the input is the output of stage 1."""
    channels: int
    """The channel dimension."""
    T: int
    eps: float
    pairs: bool
    keep: bool
    """Whether to save the responses for backward, instead of recomputing them."""
    dtype: torch.dtype
    """The compute dtype."""


def run(
    x: Tensor, theta: Tensor | None, weight: Tensor, bias: Tensor | None, settings: Settings, norm: Norm | None
) -> Tensor:
    """z of inputs, or of branch outputs, in the compute dtype.

    Args:
        x: The input of stage 1, or its output if ``theta`` is None.
        theta: The filters of stage 1.
        weight: ``[ΣM, K2]``.
        bias: ``[T, K2]``.
        settings: Everything but the tensors.
        norm: The batch norm of the responses.
    """
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return _compute(x, theta, weight, bias, settings, norm, False)[0]
    z: Tensor = _Unit.apply(x, theta, weight, bias, settings, norm, *_norm_tensors(norm, 0, 2))
    return z


def _norm_tensors(norm: Norm | None, first: int, last: int) -> list[Tensor]:
    """The existing tensors in a range of a norm's five: γ, β, mean, variance, count."""
    return [] if norm is None else [t for t in norm[first:last] if isinstance(t, Tensor)]


AnyPlan = Plan | CPUPlan
_Computed = tuple[Tensor, Tensor | None, Tensor, AnyPlan, Saved]
"""z; the filters and the branch outputs; the plan of stage 2, and what it saves for backward."""


def _compute(
    x: Tensor, theta: Tensor | None, weight: Tensor, bias: Tensor | None, settings: Settings, norm: Norm | None,
    learns: bool,
) -> _Computed:  # fmt: skip
    """The forward pass, recorded on request."""
    units = recording.units
    library = None if units is None or recording.log is not None else host.library()
    if units is None or library is None:
        return forward(x, theta, weight, bias, settings, norm, learns)
    inputs = [x, theta, weight, bias, *_norm_tensors(norm, 0, 5)]
    results: _Computed
    results, tape = record.tape_of(
        library, inputs, lambda: forward(x, theta, weight, bias, settings, norm, learns),
        lambda results: [results[0], *_saved_tensors(results, inputs)],
    )  # fmt: skip
    z, low, y, plan, stage2 = results
    numbers = {id(t): i for i, t in enumerate([*inputs, z, *_saved_tensors(results, inputs)]) if t is not None}
    saved = [-1 if t is None else numbers[id(t)] for t in (*inputs[:4], low, y, *stage2)]
    own = list(range(4, 4 + len(_norm_tensors(norm, 0, 2))))
    held = [4 + len(own) + i for i in range(len(_norm_tensors(norm, 2, 4)))]
    backward = functools.partial(_replayed_backward, plan, settings, norm and _Normed.of(norm))
    units.append(record.Recorded(
        inputs, tape, settings.dtype, learns, [0, 1, 2, 3, *own], [*saved, *own], held, backward,
    ))  # fmt: skip
    return results


class _Normed(NamedTuple):
    """The settings of a norm for the backward pass."""

    gamma: bool
    beta: bool
    eps: float
    fixed: bool
    group: Any

    @classmethod
    def of(cls, norm: Norm) -> "_Normed":
        return cls(norm.gamma is not None, norm.beta is not None, norm.eps, norm.fixed, norm.group)


def _saved_tensors(results: _Computed, inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """The tensors that a forward pass saves for backward, except its inputs."""
    _, low, y, _, stage2 = results
    return [t for t in (low, y, *stage2) if t is not None and all(t is not other for other in inputs)]


def forward(
    x: Tensor, theta: Tensor | None, weight: Tensor, bias: Tensor | None, settings: Settings, norm: Norm | None,
    learns: bool,
) -> _Computed:  # fmt: skip
    """z; the filters and the branch outputs; the plan of stage 2, and what it saves for backward."""
    stage, channels, T, eps, pairs, keep, _ = settings
    low, y = None, x
    with kernels.on_device_of(x):
        if theta is not None and stage is not None:
            low, y = _construct(x, theta, stage)
        plan: AnyPlan
        if y.device.type == "cpu" and not kernels.INTERPRETED:
            plan = CPUPlan(y, weight.shape[1], channels, T, eps, pairs, norm)
        else:
            plan = plan_for(y, weight, bias, channels, T, eps, pairs, keep, norm)
        if norm is not None:
            norm.check(plan.P, plan.z_shape)
        z, stage2 = plan.forward(y, weight, bias, norm, learns=learns)
    return z, low, y, plan, stage2


def _construct(x: Tensor, theta: Tensor, stage: Stage) -> tuple[Tensor, Tensor]:
    """The filters, cast to the dtype of x if needed, and the result of stage 1, by space-to-depth if faster."""
    cells = None if is_traced(x) else cells_of(x, theta, stage)
    if cells is not None:
        return theta, F.conv2d(cells.images(x), cells.filters(theta, x.dtype))
    low = launch.cast(theta, x.dtype)
    return low, construct(x, low, stage)


def cells_of(x: Tensor, theta: Tensor, stage: Stage) -> "elementwise.Cells | None":
    """The space-to-depth of a strided convolution of few channels; None for any other stage."""
    if stage.spatial != 2 or x.dtype is torch.float32:  # in float32 the other order of sums would show
        return None
    if 1 not in (x.stride(1), theta.stride(1)):  # torch's own output would have another layout
        return None
    from torch_dcl.kernels import elementwise  # noqa: PLC0415

    return elementwise.Cells.of(x, theta, *stage[1:])


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
        norm: Norm | None, *parameters: Tensor,
    ) -> Tensor:  # fmt: skip
        z, low, y, ctx.plan, stage2 = _compute(x, theta, weight, bias, settings, norm, True)
        ctx.save_for_backward(x, theta, weight, bias, low, y, *stage2, *parameters)
        ctx.settings, ctx.norm = settings, norm
        return z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, norm = ctx.saved_tensors, ctx.norm  # read once: activation checkpointing allows no second access
        compute = functools.partial(
            _gradients, ctx.plan, ctx.settings, norm and _Normed.of(norm), grads[0], saved, _norm_tensors(norm, 2, 4),
            ctx.needs_input_grad,
        )  # fmt: skip
        batched = transforms() or torch._C._functorch.is_legacy_batchedtensor(grads[0])  # is_grads_batched=True
        twice = torch.is_grad_enabled() or batched
        shared = norm is not None and norm.group is not None
        results = _once_differentiable(compute) if twice and shared else compute(twice)
        return *results[:4], None, None, *results[4:]


def _once_differentiable(compute: Callable[[bool], list[Tensor | None]]) -> list[Tensor | None]:
    """Gradients that raise an error in double backward, as those of ``nn.SyncBatchNorm`` do."""
    with torch.no_grad():
        results = compute(False)
    message = b"a DCL layer whose SyncBatchNorm has several processes cannot be differentiated twice"
    refuse = torch._C._functions.DelayedError(message, len(results))
    return list(refuse(*(None if t is None else t.detach().requires_grad_() for t in results)))  # type: ignore[arg-type]


def _gradients(
    plan: AnyPlan, settings: Settings, norm: _Normed | None, grad: Tensor, saved: Sequence[Any],
    running: Sequence[Tensor], needs: Sequence[bool], twice: bool,
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of input, filters, weights, biases, and the norm's γ and β."""
    x, theta, weight, bias, low, y, *stage2 = saved
    if twice:  # double backward, or a batch of gradients: differentiate plain torch
        return _reference_gradients(grad, x, theta, weight, bias, settings, norm, running, stage2[2:])
    to = gradient_type(settings.dtype, weight.dtype)
    theta_dtype = None if theta is None else theta.dtype
    # γ and β alone need only local sums, so no process exchanges any.
    group = norm.group if norm is not None and any(needs[:4]) else None
    dx, dtheta, dweight, dbias, numbers = gradients(
        plan, settings, grad, x, low, y, bias, stage2[:2], to, needs, theta_dtype, group
    )
    if numbers is None or norm is None:
        return [dx, dtheta, dweight, dbias]
    dgamma, dbeta, dbias, *_ = numbers.unbind(0)
    dnorm = ([dgamma] if norm.gamma else []) + ([dbeta] if norm.beta else [])
    return [dx, dtheta, dweight, None if bias is None else dbias.view(settings.T, -1), *dnorm]


def gradients(
    plan: AnyPlan, settings: Settings, grad: Tensor, x: Tensor, low: Tensor | None, y: Tensor, bias: Tensor | None,
    stage2: Sequence[Tensor | None], weight_dtype: torch.dtype, needs: Sequence[bool], theta_dtype: torch.dtype | None,
    group: Any = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of input, filters, weights and biases; with a norm, the results of `moments` for the latter.

    Args:
        plan: The plan of stage 2.
        settings: As given to the forward pass.
        grad: The gradient of z.
        x: The input.
        low: The filters, as returned by `_construct`; None if the input is the output of stage 1.
        y: The branch outputs.
        bias: As given to the forward pass.
        stage2: The tensors that stage 2 saved in the forward pass.
        weight_dtype: The dtype of the gradients of weights and biases.
        needs: Whether the gradients of input and filters are needed.
        theta_dtype: The dtype of the filters, in which a linear layer returns their gradient.
        group: The process group that shares the norm's statistics, if there are several processes.
    """
    with kernels.on_device_of(x):
        dy, dweight, dbias, numbers = plan.backward(grad, y, bias, stage2, weight_dtype, group)
        dx: Tensor | None = dy
        dtheta = None
        if low is not None and settings.stage is not None:
            dx, dtheta = _stage_gradients(dy, x, low, settings.stage, needs, theta_dtype or settings.dtype)
    return dx, dtheta, dweight, dbias, numbers


def _replayed_backward(
    plan: AnyPlan, settings: Settings, norm: _Normed | None, grad: Tensor, saved: list[Tensor | None],
    running: list[Tensor], needs: list[bool], twice: bool,
) -> tuple[list[Tensor | None], Any]:  # fmt: skip
    """The gradients of a replayed forward pass, and the tape of their computation."""
    compute = functools.partial(_gradients, plan, settings, norm, grad, saved, running, needs, twice)
    library = host.library()
    if twice or library is None:
        return compute(), None
    return record.tape_of(library, [grad, *saved], compute, lambda results: results)


def gradient_type(dtype: torch.dtype, weight_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the gradients of stage 2's weights: float32 for float32 weights in bfloat16.

    Not in float16, where a saturated fusion must still overflow for a GradScaler to detect it.
    """
    return torch.float32 if _FLOAT32_PRODUCTS and dtype is torch.bfloat16 and weight_dtype is torch.float32 else dtype


def _stage_gradients(
    dy: Tensor, x: Tensor, theta: Tensor, stage: Stage, needs: Sequence[bool], dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the input and of the filters of stage 1, the latter in ``dtype``."""
    spatial, stride, padding, dilation = stage
    if not (needs[0] or needs[1]):
        return None, None
    cells = None if needs[0] or is_traced(x) else cells_of(x, theta, stage)
    if cells is not None:
        filters = cells.empty_filters(theta, x.dtype)
        dcells = _convolution_gradients(dy, cells.images(x), filters, (1, 1), (0, 0), (1, 1), needs)[1]
        return None, cells.pixels(dcells, theta, dtype)
    theta = launch.cast(theta, x.dtype)
    if spatial:
        dx, dtheta = _convolution_gradients(dy, x, theta, stride, padding, dilation, needs)
        return dx, launch.cast(dtheta, dtype) if needs[1] else None
    wide = weight_gradient(dy, x, dtype if _FLOAT32_PRODUCTS else dy.dtype) if needs[1] else None
    return dy @ theta if needs[0] else None, wide


def _convolution_gradients(
    dy: Tensor, x: Tensor, theta: Tensor, stride: tuple[int, ...], padding: tuple[int, ...], dilation: tuple[int, ...],
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dx, dtheta, _ = torch.ops.aten.convolution_backward.default(
        dy, x, theta, None, stride, padding, dilation, False, (0,) * len(stride), 1, (needs[0], needs[1], False)
    )
    return dx, dtheta


def weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of a linear layer's weight, in the dtype of the inputs or in float32."""
    rows = grad.reshape(-1, grad.shape[-1]).t()[None]
    return products(rows, x.reshape(-1, x.shape[-1])[None], dtype)[0]


def double_backward(
    reference: Any, grad: Tensor, inputs: Sequence[Tensor], settings: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """Differentiable gradients, from the reference."""
    with torch.enable_grad():
        out = reference(inputs, *settings)
    return torch.autograd.grad(out, list(inputs), grad, create_graph=True)


def _reference_gradients(
    grad: Tensor, x: Tensor, theta: Tensor | None, weight: Tensor, bias: Tensor | None, settings: Settings,
    norm: _Normed | None, running: Sequence[Tensor], parameters: Sequence[Tensor],
) -> list[Tensor | None]:  # fmt: skip
    """The differentiable gradients of a unit, in plain torch."""
    inputs = [x, theta, weight, bias, *parameters]
    trained = [t for t in inputs if t is not None and t.requires_grad]
    with torch.enable_grad():
        z = _reference(x, theta, weight, bias, settings, norm, running, parameters)
    results = iter(torch.autograd.grad(z, trained, grad, create_graph=True))
    return [None if t is None or not t.requires_grad else next(results) for t in inputs]


def _reference(
    x: Tensor, theta: Tensor | None, weight: Tensor, bias: Tensor | None, settings: Settings, norm: _Normed | None,
    running: Sequence[Tensor], parameters: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    """`run` in plain torch."""
    stage, channels, T, eps, pairs, _, dtype = settings
    y = x if theta is None or stage is None else construct(x, theta.to(dtype), stage)
    low = None if bias is None else bias.to(dtype)
    pre = launch.responses(y, weight.to(dtype), low, [y.shape[channels] // T] * T, channels)
    if norm is not None:
        side_by_side = torch.cat([p.movedim(channels, 1) for p in pre], 1)
        mean, variance = running if norm.fixed else (None, None)
        gamma = parameters[0] if norm.gamma else None
        beta = parameters[-1] if norm.beta else None
        normed = F.batch_norm(side_by_side, mean, variance, gamma, beta, not norm.fixed, 0.0, norm.eps)
        pre = [p.movedim(1, channels) for p in normed.chunk(T, 1)]
    return launch.reference_fuse(pre, eps, pairs)
