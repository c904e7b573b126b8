"""A DCL unit, both stages and the batch norm between them, as one node of autograd.

Outside a compiler this is all that runs of a layer whose kernels can. Casts to the type of autocast are part of it, and
the gradients of float32 weights come as float32 straight from the products that add them up so. A second derivative is
that of plain torch.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_dcl import kernels
from torch_dcl.kernels import host, launch, record
from torch_dcl.kernels.launch import Norm, products
from torch_dcl.kernels.launcher import is_traced, recording
from torch_dcl.kernels.plans import Plan, Saved, plan_for

if TYPE_CHECKING:
    from torch_dcl.kernels import elementwise

__all__ = [
    "Settings", "Stage", "again", "cells_of", "construct", "forward", "gradient_type", "gradients", "run",
    "weight_gradient",
]  # fmt: skip

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
    x: Tensor, theta: Tensor | None, weight: Tensor, bias: Tensor | None, settings: Settings, norm: Norm | None
) -> Tensor:
    """z of inputs, or of branch outputs, in the type that is computed in.

    Args:
        x: The input of stage 1, or its output if there are no filters.
        theta: The filters of stage 1.
        weight: ``[ΣM, K2]``.
        bias: ``[T, K2]``.
        settings: The rest.
        norm: Of the responses.
    """
    if not torch.is_grad_enabled():
        return _compute(x, theta, weight, bias, settings, norm, False)[0]
    z: Tensor = _Unit.apply(x, theta, weight, bias, settings, norm, *_given(norm, 0, 2))
    return z


def _given(norm: Norm | None, first: int, last: int) -> list[Tensor]:
    """Those of a norm's five tensors that are there, from one to another: γ, β, mean, variance, count."""
    return [] if norm is None else [t for t in norm[first:last] if isinstance(t, Tensor)]


_Computed = tuple[Tensor, Tensor | None, Tensor, Plan, Saved]
"""z; the filters and the branch outputs; how stage 2 was computed, and what it leaves for backward."""


def _compute(
    x: Tensor, theta: Tensor | None, weight: Tensor, bias: Tensor | None, settings: Settings, norm: Norm | None,
    learns: bool,
) -> _Computed:  # fmt: skip
    """The forward pass, recorded if it is wanted."""
    units = recording.units
    library = None if units is None or recording.log is not None else host.library()
    if units is None or library is None:
        return forward(x, theta, weight, bias, settings, norm, learns)
    inputs = [x, theta, weight, bias, *_given(norm, 0, 5)]
    found: _Computed
    found, tape = record.tape_of(
        library, inputs, lambda: forward(x, theta, weight, bias, settings, norm, learns),
        lambda found: [found[0], *_kept_of(found, inputs)],
    )  # fmt: skip
    z, low, y, plan, known = found
    numbers = {id(t): i for i, t in enumerate([*inputs, z, *_kept_of(found, inputs)]) if t is not None}
    saved = [-1 if t is None else numbers[id(t)] for t in (*inputs[:4], low, y, *known)]
    own = list(range(4, 4 + len(_given(norm, 0, 2))))
    held = [4 + len(own) + i for i in range(len(_given(norm, 2, 4)))]
    backward = functools.partial(_replayed_backward, plan, settings, norm and _Normed.of(norm))
    units.append(record.Recorded(
        inputs, tape, settings.dtype, learns, [0, 1, 2, 3, *own], [*saved, *own], held, backward,
    ))  # fmt: skip
    return found


class _Normed(NamedTuple):
    """What a backward pass knows of a norm besides its tensors."""

    gamma: bool
    beta: bool
    eps: float
    fixed: bool
    group: Any

    @classmethod
    def of(cls, norm: Norm) -> "_Normed":
        return cls(norm.gamma is not None, norm.beta is not None, norm.eps, norm.fixed, norm.group)


def _kept_of(found: _Computed, inputs: Sequence[Tensor | None]) -> list[Tensor]:
    """What a forward pass leaves for backward, but for its inputs."""
    _, low, y, _, known = found
    return [t for t in (low, y, *known) if t is not None and all(t is not other for other in inputs)]


def forward(
    x: Tensor, theta: Tensor | None, weight: Tensor, bias: Tensor | None, settings: Settings, norm: Norm | None,
    learns: bool,
) -> _Computed:  # fmt: skip
    """z; the filters and the branch outputs; how stage 2 was computed, and what it leaves for backward."""
    stage, channels, T, eps, pairs, keep, _ = settings
    low, y = None, x
    with kernels.on_device_of(x):
        if theta is not None and stage is not None:
            low, y = _construct(x, theta, stage)
        plan = plan_for(y, weight, bias, channels, T, eps, pairs, keep, norm)
        if norm is not None and not norm.fixed and norm.ranks == 1 and plan.P == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {plan.z_shape}")
        z, known = plan.forward(y, weight, bias, norm, learns=learns)
    return z, low, y, plan, known


def _construct(x: Tensor, theta: Tensor, stage: Stage) -> tuple[Tensor, Tensor]:
    """The filters, in the type of x where they are needed in it, and stage 1: in cells of pixels if that is faster."""
    cells = None if is_traced(x) else cells_of(x, theta, stage)
    if cells is not None:
        return theta, F.conv2d(cells.images(x), cells.filters(theta, x.dtype))
    low = launch.cast(theta, x.dtype)
    return low, construct(x, low, stage)


def cells_of(x: Tensor, theta: Tensor, stage: Stage) -> "elementwise.Cells | None":
    """The cells of pixels in which images of few channels are convolved with a stride; None for other stages."""
    if stage.spatial != 2 or x.dtype is torch.float32:  # float32 would be rounded otherwise
        return None
    if 1 not in (x.stride(1), theta.stride(1)):  # the output would lie otherwise than torch has it
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
        z, low, y, ctx.plan, known = _compute(x, theta, weight, bias, settings, norm, True)
        ctx.save_for_backward(x, theta, weight, bias, low, y, *known, *parameters)
        ctx.settings, ctx.norm = settings, norm
        return z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved, norm = ctx.saved_tensors, ctx.norm  # once: activation checkpointing allows no more
        compute = functools.partial(
            _gradients, ctx.plan, ctx.settings, norm and _Normed.of(norm), grads[0], saved, _given(norm, 2, 4),
            ctx.needs_input_grad,
        )  # fmt: skip
        twice = torch.is_grad_enabled()
        found = _once(compute) if twice and norm is not None and norm.group is not None else compute(twice)
        return *found[:4], None, None, *found[4:]


def _once(compute: Callable[[bool], list[Tensor | None]]) -> list[Tensor | None]:
    """Gradients whose own gradients are an error, as those of torch's norm of several processes are."""
    with torch.no_grad():
        found = compute(False)
    told = b"a DCL layer whose SyncBatchNorm has several processes cannot be differentiated twice"
    refuse = torch._C._functions.DelayedError(told, len(found))
    return list(refuse(*(None if t is None else t.detach().requires_grad_() for t in found)))  # type: ignore[arg-type]


def _gradients(
    plan: Plan, settings: Settings, norm: _Normed | None, grad: Tensor, saved: Sequence[Any], running: Sequence[Tensor],
    needs: Sequence[bool], twice: bool,
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of input, filters, weights and biases, and of the norm's γ and β."""
    x, theta, weight, bias, low, y, *known = saved
    if twice:  # a second derivative is wanted: plain torch has one
        return _differentiable(grad, x, theta, weight, bias, settings, norm, running, known[2:])
    to = gradient_type(settings.dtype, weight.dtype)
    of_theta = None if theta is None else theta.dtype
    # γ and β alone need no more than what this process has: then the others wait for nothing, either.
    group = norm.group if norm is not None and any(needs[:4]) else None
    dx, dtheta, dweight, dbias, numbers = gradients(
        plan, settings, grad, x, low, y, bias, known[:2], to, needs, of_theta, group
    )
    if numbers is None or norm is None:
        return [dx, dtheta, dweight, dbias]
    dgamma, dbeta, dbias, *_ = numbers.unbind(0)
    dnorm = ([dgamma] if norm.gamma else []) + ([dbeta] if norm.beta else [])
    return [dx, dtheta, dweight, None if bias is None else dbias.view(settings.T, -1), *dnorm]


def gradients(
    plan: Plan, settings: Settings, grad: Tensor, x: Tensor, low: Tensor | None, y: Tensor, bias: Tensor | None,
    known: Sequence[Tensor | None], of_weight: torch.dtype, needs: Sequence[bool], of_theta: torch.dtype | None,
    group: Any = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of input, filters, weights and biases, and behind a norm all that `moments` gives.

    Args:
        plan: Of stage 2.
        settings: As given to the forward pass.
        grad: Of z.
        x: The input.
        low: The filters, as `_construct` gives them; None if the input is the output of stage 1.
        y: The branch outputs.
        bias: As given to the forward pass.
        known: From the forward pass of stage 2.
        of_weight: The type of the gradients of weights and biases.
        needs: Whether the gradients of input and filters are wanted.
        of_theta: The type of the filters, in which a linear layer gives their gradient.
        group: The processes whose gradients go through the same statistics, if there are several.
    """
    with kernels.on_device_of(x):
        dy, dweight, dbias, numbers = plan.backward(grad, y, bias, known, of_weight, group)
        dx: Tensor | None = dy
        dtheta = None
        if low is not None and settings.stage is not None:
            dx, dtheta = _stage_gradients(dy, x, low, settings.stage, needs, of_theta or settings.dtype)
    return dx, dtheta, dweight, dbias, numbers


def _replayed_backward(
    plan: Plan, settings: Settings, norm: _Normed | None, grad: Tensor, saved: list[Tensor | None],
    running: list[Tensor], needs: list[bool], twice: bool,
) -> tuple[list[Tensor | None], Any]:  # fmt: skip
    """The gradients of a replayed forward pass, and a tape of how they were computed."""
    compute = functools.partial(_gradients, plan, settings, norm, grad, saved, running, needs, twice)
    library = host.library()
    if twice or library is None:
        return compute(), None
    return record.tape_of(library, [grad, *saved], compute, lambda found: found)


def gradient_type(dtype: torch.dtype, of_weight: torch.dtype) -> torch.dtype:
    """What the gradients of stage 2's weights are computed in: float32 of float32 weights, although all else is not.

    Not in float16: what a fusion has saturated must still overflow for a GradScaler to find it.
    """
    return torch.float32 if _WIDE and dtype is torch.bfloat16 and of_weight is torch.float32 else dtype


def _stage_gradients(
    dy: Tensor, x: Tensor, theta: Tensor, stage: Stage, needs: Sequence[bool], dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the input and of the filters of stage 1, the latter in ``dtype``."""
    spatial, stride, padding, dilation = stage
    if not (needs[0] or needs[1]):
        return None, None
    cells = None if needs[0] or is_traced(x) else cells_of(x, theta, stage)
    if cells is not None:
        room = cells.room(theta, x.dtype)
        dcells = _convolution_gradients(dy, cells.images(x), room, (1, 1), (0, 0), (1, 1), needs)[1]
        return None, cells.pixels(dcells, theta, dtype)
    theta = launch.cast(theta, x.dtype)
    if spatial:
        dx, dtheta = _convolution_gradients(dy, x, theta, stride, padding, dilation, needs)
        return dx, launch.cast(dtheta, dtype) if needs[1] else None
    wide = weight_gradient(dy, x, dtype if _WIDE else dy.dtype) if needs[1] else None
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
    norm: _Normed | None, running: Sequence[Tensor], parameters: Sequence[Tensor],
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of a unit in plain torch, so that they have gradients of their own."""
    inputs = [x, theta, weight, bias, *parameters]
    given = [t for t in inputs if t is not None and t.requires_grad]
    with torch.enable_grad():
        z = _reference(x, theta, weight, bias, settings, norm, running, parameters)
    found = iter(torch.autograd.grad(z, given, grad, create_graph=True))
    return [None if t is None or not t.requires_grad else next(found) for t in inputs]


def _reference(
    x: Tensor, theta: Tensor | None, weight: Tensor, bias: Tensor | None, settings: Settings, norm: _Normed | None,
    running: Sequence[Tensor], parameters: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    """What `run` gives, in plain torch."""
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
