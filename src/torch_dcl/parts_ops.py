"""Stage 2 by parts (`torch_dcl.parts`) as torch operations, opaque to compilers.

The convolution before it remains visible to a compiler. Operations take and return any memory layout, so that it
chooses that of the convolutions.
"""

from typing import Any

import torch
from torch import Tensor

from torch_dcl.parts import CPUPlan, Norm

__all__ = ["run"]

_NOT, _FIXED, _BATCH = range(3)
"""The norm of the responses: none, by running statistics, or by those of the batch."""
_TAGS = (torch.Tag.flexible_layout,)


def run(
    y: Tensor, weight: Tensor, bias: Tensor | None, channels: int, T: int, eps: float, pairs: bool, norm: Norm | None,
    to: torch.dtype,
) -> Tensor:  # fmt: skip
    """z of branch outputs, with the running statistics of a norm updated in place.

    Args:
        y: Branch outputs of a convolution.
        weight: ``[ΣM, K2]``.
        bias: ``[T, K2]`` or None.
        channels: The channel dimension.
        T: Branches.
        eps: ε.
        pairs: Whether to average over pairs instead of fusing all branches.
        norm: The batch norm of the responses.
        to: The dtype of the gradients of weights and biases.
    """
    kind = _NOT if norm is None else _FIXED if norm.fixed else _BATCH
    gamma, beta, mean, variance, tracked = (None,) * 5 if norm is None else norm[:5]
    norm_eps, momentum = (0.0, 0.0) if norm is None else (norm.eps, norm.momentum)
    with torch.no_grad():  # an operation that mutates buffers cannot have gradients
        z, stats = torch.ops.torch_dcl.parts(
            y, weight, bias, gamma, beta, mean, variance, tracked, channels, T, eps, pairs, kind, norm_eps, momentum
        )
    if not torch.is_grad_enabled():
        return z  # type: ignore[no-any-return]
    attached: Tensor = _Attached.apply(z, stats, y, weight, bias, gamma, beta, channels, T, eps, pairs, kind, to)
    return attached


class _Attached(torch.autograd.Function):
    """Attach gradients to a computed z."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, stats: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None,
        beta: Tensor | None, channels: int, T: int, eps: float, pairs: bool, kind: int, to: torch.dtype,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(y, weight, bias, stats)
        ctx.settings = channels, T, eps, pairs, kind, to
        ctx.has = bias is not None, gamma is not None, beta is not None
        ctx.mark_dirty(z)  # z itself, not a view: what follows may work in place
        return z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        dy, dweight, rest = torch.ops.torch_dcl.parts_backward(grads[0], *ctx.saved_tensors, *ctx.settings)
        _, T, _, _, kind, _ = ctx.settings
        dgamma, dbeta, dbias = (None, None, rest) if kind == _NOT else (rest[0], rest[1], rest[2].view(T, -1))
        has_bias, has_gamma, has_beta = ctx.has
        of_norm = dgamma if has_gamma else None, dbeta if has_beta else None
        return None, None, dy, dweight, dbias if has_bias else None, *of_norm, *(None,) * 6


@torch.library.custom_op(
    "torch_dcl::parts", mutates_args=("mean", "variance", "tracked"), device_types="cpu", tags=_TAGS
)
def _parts(
    y: Tensor, weight: Tensor, bias: Tensor | None, gamma: Tensor | None, beta: Tensor | None, mean: Tensor | None,
    variance: Tensor | None, tracked: Tensor | None, channels: int, T: int, eps: float, pairs: bool, kind: int,
    norm_eps: float, momentum: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """z, and the norm's statistics, empty without one."""
    y = _dense(y, channels)
    norm = _norm(kind, gamma, beta, mean, variance, tracked, eps=norm_eps, momentum=momentum)
    plan = CPUPlan(y, weight.shape[1], channels, T, eps, pairs, norm)
    if norm is not None:
        norm.check(plan.P, plan.z_shape)
    z, (_, stats) = plan.forward(y, weight, bias, norm)
    return z, weight.new_empty(0) if stats is None else stats


@_parts.register_fake
def _(y: Tensor, weight: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    channels, T, eps, pairs, kind = arguments[6:11]
    plan = CPUPlan(_dense(y, channels), weight.shape[1], channels, T, eps, pairs, _norm(kind))
    return plan.empty(plan.z_shape, y.dtype), weight.new_empty(plan.statistics_size if kind else 0, dtype=plan.dtype)


@torch.library.custom_op("torch_dcl::parts_backward", mutates_args=(), device_types="cpu", tags=_TAGS)
def _parts_backward(
    grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, stats: Tensor, channels: int, T: int, eps: float,
    pairs: bool, kind: int, to: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of branch outputs, of weights, and of the biases; with a norm, of γ, β and biases in one tensor."""
    y = _dense(y, channels)
    plan = CPUPlan(y, weight.shape[1], channels, T, eps, pairs, _norm(kind))
    saved = weight.to(plan.dtype).contiguous(), stats if kind else None
    dy, dweight, dbias, numbers = plan.backward(grad, y, bias, saved, to)
    if numbers is not None:
        return dy, dweight, numbers
    return dy, dweight, weight.new_empty(0) if dbias is None else dbias


@_parts_backward.register_fake
def _(
    grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, stats: Tensor, channels: int, T: int, eps: float,
    pairs: bool, kind: int, to: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    del grad, stats
    plan = CPUPlan(_dense(y, channels), weight.shape[1], channels, T, eps, pairs, _norm(kind))
    numbers = weight.new_empty(3, T * plan.N, dtype=plan.dtype)
    dbias = weight.new_empty(0) if bias is None else weight.new_empty(T, plan.N, dtype=to)
    return plan.empty(y.shape, y.dtype), weight.new_empty(weight.shape, dtype=to), numbers if kind else dbias


def _dense(y: Tensor, channels: int) -> Tensor:
    """Branch outputs in a layout that a plan takes."""
    last = y.movedim(channels, -1)
    return y if y.is_contiguous() or last.is_contiguous() else last.contiguous().movedim(-1, channels)


def _norm(kind: int, *tensors: Tensor | None, eps: float = 0.0, momentum: float | None = 0.0) -> Norm | None:
    """The norm from γ, β, means, variances and a count."""
    if kind == _NOT:
        return None
    return Norm(*(tensors or (None,) * 5), eps, momentum, fixed=kind == _FIXED)  # type: ignore[misc, call-arg, arg-type]
