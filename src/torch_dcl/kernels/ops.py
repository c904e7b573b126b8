"""The kernels of DCL layers as operations of torch (``torch.ops.torch_dcl``), with their gradients.

Each is there twice: as an operation, which ``torch.compile`` knows, and as a function of autograd with less to do for
each call. A second derivative is the reference's.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_dcl import functional, kernels
from torch_dcl.kernels import launch
from torch_dcl.kernels.products import products

__all__ = ["again", "fuse", "linear", "project", "turn"]


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
    y: Tensor, weight: Tensor, bias: Tensor | None, wide: Tensor | None, wide_bias: Tensor | None,
    channels: int, T: int, eps: float, pairs: bool, keep: bool,
) -> Tensor:  # fmt: skip
    """Branch outputs to z, with weights of their type; gradients go to the wide ones, if they are given."""
    parameters, settings = (weight, bias, wide, wide_bias), (T, eps, pairs, keep)
    if torch.compiler.is_compiling():
        rows = launch.by_position(y, channels).contiguous()
        return launch.at_positions(y, channels, torch.ops.torch_dcl.project(rows, *parameters, *settings)[0])
    if not torch.is_grad_enabled():
        return _projected(y, weight, bias, channels, *settings)[0]
    z: Tensor = _Project.apply(y, *parameters, channels, *settings)
    return z


def _projected(
    y: Tensor, weight: Tensor, bias: Tensor | None, channels: int, T: int, eps: float, pairs: bool, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """z, and the responses if they are kept."""
    shape, rows = [*y.shape], launch.by_position(y, channels).contiguous()
    shape[channels] = weight.shape[1]
    z = launch.room(shape, channels, y.dtype, y.device)
    return z, launch.project(rows, weight, bias, launch.by_position(z, channels), T, eps, pairs, keep)


def turn(x: Tensor, channels: int, last: bool, dtype: torch.dtype) -> Tensor:
    """The same values with the channels last in memory, or as torch has them by default; no copy where they lie so."""
    there = launch.is_last(x, channels) if last else x.is_contiguous()
    if there or torch.compiler.is_compiling():  # a compiler turns by itself, along with what comes before or behind
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
            return None, None, *again(launch.reference_fuse, grads[0], pre, (ctx.eps, ctx.pairs))
        return None, None, *launch.fuse_backward(grads[0], list(pre), ctx.eps, ctx.pairs)


class _Project(torch.autograd.Function):
    """What ``torch.ops.torch_dcl.project`` is, with less to do for each call."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weight: Tensor, bias: Tensor | None, wide: Tensor | None, _wide_bias: Tensor | None,
        channels: int, T: int, eps: float, pairs: bool, keep: bool,
    ) -> Tensor:  # fmt: skip
        z, pre = _projected(y, weight, bias, channels, T, eps, pairs, keep)
        ctx.save_for_backward(y, weight, bias, pre)
        ctx.channels, ctx.settings, ctx.wide = channels, (T, eps, pairs), wide is not None
        return z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, weight, bias, pre = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted: the reference has one
            given = [t for t in (y, weight, bias) if t is not None]
            twice = again(launch.reference_project, grads[0], given, (ctx.channels, *ctx.settings))
            return (*twice, *(None,) * (10 - len(twice)))
        dtype = torch.float32 if ctx.wide else y.dtype
        grad, rows = (launch.by_position(t, ctx.channels).contiguous() for t in (grads[0], y))
        dy, *found = launch.project_backward(grad, rows, weight, bias, pre, dtype, *ctx.settings)
        return *_placed((launch.at_positions(y, ctx.channels, dy), *found), ctx.wide), *(None,) * 5


def _placed(found: Sequence[Tensor | None], wide: bool) -> tuple[Tensor | None, ...]:
    """The projection's gradients in the order of its tensors: the parameters' go to the wide ones, if any."""
    dy, *parameters = found
    none = (None, None)
    return (dy, *none, *parameters) if wide else (dy, *parameters, *none)


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
            return dx, _rows(grad).t() @ _rows(x), None
        return dx, None, _linear_weight_gradient(grad, x)


def _linear_weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return products(_rows(grad).t()[None], _rows(x)[None], torch.float32)[0]


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def again(reference: Any, grad: Tensor, inputs: Sequence[Tensor], settings: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Gradients that can be differentiated again, from the reference."""
    with torch.enable_grad():
        out = reference(inputs, *settings)
    return torch.autograd.grad(out, list(inputs), grad, create_graph=True)


# The operations of torch. On a CPU they are the reference, so that they can be checked there.


@torch.library.custom_op("torch_dcl::fuse", mutates_args=())
def _op_fuse(pre: list[Tensor], eps: float, pairs: bool) -> Tensor:
    if kernels.usable(pre[0]):
        return launch.fuse(pre, eps, pairs)
    return launch.reference_fuse(pre, eps, pairs)


@torch.library.custom_op("torch_dcl::fuse_backward", mutates_args=())
def _op_fuse_backward(grad: Tensor, pre: list[Tensor], eps: float, pairs: bool) -> list[Tensor]:
    if kernels.usable(grad):
        return launch.fuse_backward(grad, pre, eps, pairs)
    return functional.fuse_gradients(grad, pre, eps, pairs=pairs)


@torch.library.custom_op("torch_dcl::project", mutates_args=())
def _op_project(
    y: Tensor, weight: Tensor, bias: Tensor | None, wide: Tensor | None, wide_bias: Tensor | None,
    T: int, eps: float, pairs: bool, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if kernels.usable(y):
        z = y.new_empty(y.shape[0], weight.shape[1])
        pre = launch.project(y, weight, bias, z, T, eps, pairs, keep)
        return z, y.new_empty(0) if pre is None else pre
    M = y.shape[1] // T
    formed = launch.responses(y, weight, bias, [M] * T)
    return launch.reference_fuse(formed, eps, pairs), torch.stack(formed) if keep else y.new_empty(0)


@torch.library.custom_op("torch_dcl::project_backward", mutates_args=())
def _op_project_backward(
    grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, pre: Tensor, dtype: torch.dtype,
    T: int, eps: float, pairs: bool,
) -> list[Tensor]:  # fmt: skip
    if kernels.usable(grad):
        kept = pre if pre.numel() else None
        found = launch.project_backward(grad.contiguous(), y, weight, bias, kept, dtype, T, eps, pairs)
        return [t for t in found if t is not None]
    M = y.shape[1] // T
    dpre = functional.fuse_gradients(grad, launch.responses(y, weight, bias, [M] * T), eps, pairs=pairs)
    parts = [
        torch.cat([d @ W.t() for d, W in zip(dpre, torch.split(weight, M), strict=True)], 1),
        products(y.view(-1, T, M).permute(1, 2, 0), torch.stack(dpre), dtype).view(T * M, -1),
    ]
    return parts if bias is None else [*parts, torch.stack([d.sum(0, dtype=dtype) for d in dpre])]


@torch.library.custom_op("torch_dcl::linear", mutates_args=())
def _op_linear(x: Tensor, low: Tensor, weight: Tensor) -> Tensor:
    return (_rows(x) @ low.t()).view(*x.shape[:-1], len(low))


@torch.library.custom_op("torch_dcl::linear_weight_gradient", mutates_args=())
def _op_linear_weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return _linear_weight_gradient(grad, x)


@_op_fuse.register_fake
def _(pre: list[Tensor], eps: float, pairs: bool) -> Tensor:
    return torch.empty_like(pre[0])


@_op_fuse_backward.register_fake
def _(grad: Tensor, pre: list[Tensor], eps: float, pairs: bool) -> list[Tensor]:
    return [torch.empty_like(pre[0]) for _ in pre]


@_op_project.register_fake
def _(
    y: Tensor, weight: Tensor, bias: Tensor | None, wide: Tensor | None, wide_bias: Tensor | None,
    T: int, eps: float, pairs: bool, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    P, N = y.shape[0], weight.shape[1]
    return y.new_empty(P, N), y.new_empty(T, P, N) if keep else y.new_empty(0)


@_op_project_backward.register_fake
def _(
    grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, pre: Tensor, dtype: torch.dtype,
    T: int, eps: float, pairs: bool,
) -> list[Tensor]:  # fmt: skip
    return [torch.empty_like(y), *(torch.empty_like(t, dtype=dtype) for t in (weight, bias) if t is not None)]


@_op_linear.register_fake
def _(x: Tensor, low: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], low.shape[0])


@_op_linear_weight_gradient.register_fake
def _(grad: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(grad.shape[-1], x.shape[-1], dtype=torch.float32)


def _fuse_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pre, ctx.eps, ctx.pairs = inputs
    ctx.save_for_backward(*pre)


def _fuse_autograd(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    found = torch.ops.torch_dcl.fuse_backward(grad, list(ctx.saved_tensors), ctx.eps, ctx.pairs)
    return found, None, None


def _project_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    y, weight, bias, wide, _, *settings, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(y, weight, bias, output[1])
    ctx.settings, ctx.wide = settings, wide is not None


def _project_autograd(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    y, *saved = ctx.saved_tensors
    dtype = torch.float32 if ctx.wide else y.dtype
    found = torch.ops.torch_dcl.project_backward(grad, y, *saved, dtype, *ctx.settings)
    return *_placed((*found, None)[:3], ctx.wide), *(None,) * 4


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, low, _ = inputs
    ctx.save_for_backward(x, low if ctx.needs_input_grad[0] else None)


def _linear_autograd(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, low = ctx.saved_tensors
    dx = grad @ low if ctx.needs_input_grad[0] else None
    return dx, None, torch.ops.torch_dcl.linear_weight_gradient(grad, x)


_op_linear.register_autograd(_linear_autograd, setup_context=_linear_setup)
_op_fuse.register_autograd(_fuse_autograd, setup_context=_fuse_setup)
_op_project.register_autograd(_project_autograd, setup_context=_project_setup)


def _first(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The batch of ``torch.vmap`` in front, also where there is none."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


@_op_fuse.register_vmap
def _(info: Any, in_dims: Any, pre: list[Tensor], eps: float, pairs: bool) -> tuple[Tensor, int]:
    whole = [_first(p, dim, info.batch_size) for p, dim in zip(pre, in_dims[0], strict=True)]
    return torch.ops.torch_dcl.fuse(whole, eps, pairs), 0


@_op_project.register_vmap
def _(
    info: Any, in_dims: Any, y: Tensor, weight: Tensor, bias: Tensor | None, wide: Tensor | None,
    wide_bias: Tensor | None, *settings: Any,
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:  # fmt: skip
    rows = _one_by_one((y, weight, bias, wide, wide_bias), in_dims, info.batch_size)
    found = [torch.ops.torch_dcl.project(*row, *settings) for row in rows]
    return (torch.stack([z for z, _ in found]), torch.stack([pre for _, pre in found])), (0, 0)


@_op_linear.register_vmap
def _(info: Any, in_dims: Any, x: Tensor, low: Tensor, weight: Tensor) -> tuple[Tensor, int]:
    rows = _one_by_one((x, low, weight), in_dims, info.batch_size)
    return torch.stack([torch.ops.torch_dcl.linear(*row) for row in rows]), 0


def _one_by_one(tensors: Sequence[Tensor | None], in_dims: Any, size: int) -> list[list[Tensor | None]]:
    given = [None if t is None else _first(t, dim, size) for t, dim in zip(tensors, in_dims, strict=False)]
    return [[None if t is None else t[i] for t in given] for i in range(size)]
