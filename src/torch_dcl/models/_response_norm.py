"""Local response normalisation: by a kernel where one can run, by plain torch everywhere else.

The kernel is a torch operation (``torch.ops.torch_dcl.response_norm``). It runs where those of `dispatch` do, if the
channels are contiguous in memory, as in channels_last.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_dcl import kernels
from torch_dcl.kernels import dispatch, unit

__all__ = ["response_norm"]

_LARGEST = 15  # channels in a window; the kernel is unrolled over them


def response_norm(x: Tensor, size: int, alpha: float, beta: float, k: float) -> Tensor:
    """:func:`torch.nn.functional.local_response_norm`, by a kernel where one can run.

    The kernel computes in float32 and returns the type of x, also under autocast, where torch's own returns float32.
    """
    if _kernel_accepts(x, size, alpha, k):
        dispatch.count_path("response_norm", "kernel")
        if torch.compiler.is_compiling():
            compiled: Tensor = torch.ops.torch_dcl.response_norm(x, size, alpha, beta, k)
            return compiled
        z: Tensor = _Norm.apply(x, size, alpha, beta, k)
        return z
    dispatch.count_path("response_norm", "reference")
    return F.local_response_norm(x, size, alpha, beta, k)


def _kernel_accepts(x: Tensor, size: int, alpha: float, k: float) -> bool:
    # A window of even size is not symmetric; and unless s > 0, values beyond the ends may become NaN.
    if size % 2 == 0 or not 0 < size <= _LARGEST or alpha < 0 or k <= 0 or x.dim() < 3:
        return False
    return dispatch.kernels_accept((x,)) and x.movedim(1, -1).is_contiguous()


class _Norm(torch.autograd.Function):
    """The same as ``torch.ops.torch_dcl.response_norm``, with less overhead for each call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, alpha: float, beta: float, k: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.settings = size, alpha, beta, k
        return _forward_kernel(x, size, alpha, beta, k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative, which torch's own has
            (dx,) = unit.double_backward(_reference, grads[0], (x,), ctx.settings)
        else:
            dx = _backward_kernel(grads[0], x, *ctx.settings)
        return dx, None, None, None, None


def _reference(inputs: tuple[Tensor], size: int, alpha: float, beta: float, k: float) -> Tensor:
    return F.local_response_norm(inputs[0], size, alpha, beta, k)


def _forward_kernel(x: Tensor, size: int, alpha: float, beta: float, k: float) -> Tensor:
    from torch_dcl.models import _response_norm_kernels as kernel

    with kernels.on_device_of(x):
        return kernel.norm_forward(x, size, alpha, beta, k)


def _backward_kernel(grad: Tensor, x: Tensor, size: int, alpha: float, beta: float, k: float) -> Tensor:
    from torch_dcl.models import _response_norm_kernels as kernel

    with kernels.on_device_of(x):
        return kernel.norm_backward(grad, x, size, alpha, beta, k)


def _around(x: Tensor, size: int) -> Tensor:
    """Sums over windows of ``size`` channels."""
    return F.pad(x.movedim(1, -1), (size // 2, size // 2)).unfold(-1, size, 1).sum(-1).movedim(-1, 1)


# The torch operations. On a CPU they are computed by plain torch, so that they can be tested there.


@torch.library.custom_op("torch_dcl::response_norm", mutates_args=())
def _op(x: Tensor, size: int, alpha: float, beta: float, k: float) -> Tensor:
    if kernels.usable(x):
        return _forward_kernel(x, size, alpha, beta, k)
    return torch.empty_like(x).copy_(F.local_response_norm(x, size, alpha, beta, k))


@torch.library.custom_op("torch_dcl::response_norm_backward", mutates_args=())
def _op_backward(grad: Tensor, x: Tensor, size: int, alpha: float, beta: float, k: float) -> Tensor:
    if kernels.usable(x):
        return _backward_kernel(grad, x, size, alpha, beta, k)
    s = k + alpha / size * _around(x.square(), size)
    passed = _around(grad * x * s ** (-beta - 1), size)
    return torch.empty_like(x).copy_(grad * s**-beta - 2 * alpha * beta / size * x * passed)


@_op.register_fake
def _(x: Tensor, size: int, alpha: float, beta: float, k: float) -> Tensor:
    return torch.empty_like(x)


@_op_backward.register_fake
def _(grad: Tensor, x: Tensor, size: int, alpha: float, beta: float, k: float) -> Tensor:
    return torch.empty_like(x)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *ctx.settings = inputs
    ctx.save_for_backward(x)


def _autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dx = torch.ops.torch_dcl.response_norm_backward(grad, *ctx.saved_tensors, *ctx.settings)
    return dx, None, None, None, None


_op.register_autograd(_autograd, setup_context=_setup)


@_op.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], x: Tensor, *settings: Any) -> tuple[Tensor, int]:
    whole = x.movedim(in_dims[0], 0)
    z = torch.ops.torch_dcl.response_norm(whole.flatten(0, 1), *settings)
    return z.unflatten(0, whole.shape[:2]), 0
