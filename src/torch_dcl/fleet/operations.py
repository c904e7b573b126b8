"""The arithmetic of stacked networks: the first dimension of every tensor is the E networks, ``[E, B, ...]``.

Each operation has a plain torch version, and GPU kernels where they are faster. In a low precision the optimiser
maintains a low-precision copy of every large parameter; products read the copy, and gradients are taken with respect to
it (`leaf`), so that a step casts no weights.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_dcl import kernels
from torch_dcl.functional import draw_pair, fuse_branches, fuse_pairs, mix32, step_key

__all__ = [
    "advance_", "branch_parameters", "conv", "cross_entropy", "draw_pairs_", "dropout", "fuse", "gather_images",
    "keep_low_copy", "leaf", "linear", "low_copy", "lowered", "project",
]  # fmt: skip


def keep_low_copy(parameter: Tensor, dtype: torch.dtype | None) -> None:
    """Attach a copy of another type to a parameter, or with None remove it. The optimiser updates the copy."""
    copy = None if dtype is None else parameter.detach().to(dtype).requires_grad_(parameter.requires_grad)
    parameter.low = copy  # type: ignore[attr-defined]


def low_copy(parameter: Tensor) -> Tensor | None:
    """The low-precision copy of a parameter; None where there is none."""
    copy: Tensor | None = getattr(parameter, "low", None)
    return copy


def leaf(parameter: Tensor) -> Tensor:
    """The tensor that the forward pass reads and that gradients refer to: the low copy, or the parameter itself."""
    copy = low_copy(parameter)
    return parameter if copy is None else copy


def lowered(parameter: Tensor, like: Tensor) -> Tensor:
    """A parameter in the type of another tensor; a low copy saves the cast."""
    return leaf(parameter).to(like.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x · weightᵀ + bias`` for ``[E, B, K]``, weights ``[E, N, K]`` and biases ``[E, N]``."""
    y: Tensor = _Linear.apply(x, lowered(weight, x), None if bias is None else lowered(bias, x))
    return y


class _Linear(torch.autograd.Function):
    """A batched product whose weight gradient has the layout of the weight; autograd's own is transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        transposed = weight.transpose(1, 2)
        return torch.bmm(x, transposed) if bias is None else torch.baddbmm(bias[:, None], x, transposed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        dx = torch.bmm(grad, weight) if ctx.needs_input_grad[0] else None
        return dx, torch.bmm(grad.transpose(1, 2), x), grad.sum(1) if ctx.has_bias else None


def project(x: Tensor, weight: Tensor, branches: int) -> Tensor:
    """Stage 2 without its bias: ``[E, B, T·M]`` and weights ``[E, T·M, N]`` to ``[E, T, B, N]``."""
    E, B, width = x.shape
    M, N = width // branches, weight.shape[-1]
    by_branch = x.view(E, B, branches, M).transpose(1, 2).reshape(E * branches, B, M)
    return torch.bmm(by_branch, lowered(weight, x).view(E * branches, M, N)).view(E, branches, B, N)


def conv(x: Tensor, weight: Tensor, bias: Tensor | None, *, pool: int = 1, relu: bool = False) -> Tensor:
    """Convolution with stride 1 and no padding, then max pooling and ReLU.

    Args:
        x: ``[E, B, C, H, W]``; on a GPU fastest with the channels last in memory.
        weight: ``[E, N, C, KH, KW]``.
        bias: ``[E, N]`` or None.
        pool: Size and stride of the max pooling: 1 for none, or 2.
        relu: Whether to apply a ReLU.

    Returns:
        ``[E, B, N, PH, PW]``; from the kernels with the channels last in memory.
    """
    if kernels.usable(x):
        last = x.permute(0, 1, 3, 4, 2).contiguous()
        y: Tensor = _Conv.apply(last, lowered(weight, x), None if bias is None else lowered(bias, x), pool, relu)
        return y.permute(0, 1, 4, 2, 3)
    E, B, C, H, W = x.shape
    weight, bias = lowered(weight, x), None if bias is None else lowered(bias, x)
    grouped = x.transpose(0, 1).reshape(B, E * C, H, W)
    y = F.conv2d(grouped, weight.flatten(0, 1), None if bias is None else bias.flatten(), groups=E)
    if pool > 1:
        y = F.max_pool2d(y, pool)
    if relu:
        y = F.relu(y)
    return y.view(B, E, -1, *y.shape[2:]).transpose(0, 1)


class _Conv(torch.autograd.Function):
    """`conv` by the kernels, channels last."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, pool: int, relu: bool) -> Tensor:
        from torch_dcl.fleet.kernels.conv import conv_forward, pack_weight

        packed = pack_weight(weight)
        y, which = conv_forward(x, packed, bias, weight.shape[1], pool=pool, relu=relu)
        ctx.save_for_backward(x, packed, which)
        ctx.kernel, ctx.pool, ctx.has_bias = weight.shape[3:], pool, bias is not None
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from torch_dcl.fleet.kernels.conv import conv_backward_input, conv_backward_weight

        grad = grads[0].contiguous()
        x, packed, which = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[0]:
            dx = conv_backward_input(packed, grad, which, tuple(x.shape), pool=ctx.pool)
        dw, db = conv_backward_weight(x, grad, which, tuple(ctx.kernel), pool=ctx.pool)
        return dx, dw.to(x.dtype), db.to(x.dtype) if ctx.has_bias else None, None, None


def fuse(pre: Tensor, bias: Tensor | None, eps: float, *, active: Tensor | None = None, pairs: bool = False) -> Tensor:
    """Fuse responses ``[E, T, B, N]``, before bias and ReLU, with biases ``[E, T, N]`` to ``[E, B, N]``.

    With ``active`` ``[E, 2]`` only these two branches of each network; with ``pairs`` the mean over all pairs.
    """
    T = pre.shape[1]
    if not pairs and kernels.usable(pre) and (active is not None or T in (2, 3)):
        z: Tensor = _Fuse.apply(pre.contiguous(), None if bias is None else lowered(bias, pre), eps, active)
        return z
    if bias is not None:
        pre = pre + lowered(bias, pre)[:, :, None]
    if active is not None:
        index = active[:, :, None, None].expand(-1, -1, *pre.shape[2:])
        return fuse_branches(pre.gather(1, index).unbind(1), eps)
    return (fuse_pairs if pairs else fuse_branches)(pre.unbind(1), eps)


class _Fuse(torch.autograd.Function):
    """`fuse` by the kernels; backward recomputes the responses."""

    @staticmethod
    def forward(ctx: Any, pre: Tensor, bias: Tensor | None, eps: float, active: Tensor | None) -> Tensor:
        from torch_dcl.kernels.pointwise import fuse_forward

        ctx.save_for_backward(pre, bias, active)
        ctx.eps = eps
        return fuse_forward(pre, bias, eps, active)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from torch_dcl.kernels.pointwise import fuse_backward

        pre, bias, active = ctx.saved_tensors
        dpre = fuse_backward(grads[0].contiguous(), pre, bias, ctx.eps, active)
        return dpre, None if bias is None else dpre.sum(2), None, None


def dropout(x: Tensor, seed: Tensor, layer: int, step: Tensor, p: float) -> Tensor:
    """Dropout whose mask is a function of the network's (seed, layer, step) and the position alone.

    Args:
        x: ``[E, B, ...]``; positions within an image are counted channels last.
        seed: ``[E]`` int64.
        layer: A 32-bit number that is unique to the layer.
        step: ``[1]`` int64; it must not change between forward and backward.
        p: The probability of dropping a value, from 0 to 1.
    """
    if p >= 1:
        return torch.zeros_like(x) * x  # keeps a gradient, of zeros
    if x.dim() == 5:
        last = x.permute(0, 1, 3, 4, 2)
        return dropout(last.flatten(2), seed, layer, step, p).view(last.shape).permute(0, 1, 4, 2, 3)
    if kernels.usable(x) and not torch.compiler.is_compiling():  # a compiler fuses the plain version
        kept: Tensor = _Dropout.apply(x.contiguous(), seed, layer, step, p)
        return kept
    position = torch.arange(x[0].numel(), device=x.device)
    key = mix32(step_key(seed, layer, step) ^ 0x68E31DA4)
    drawn = mix32(mix32(position) ^ key[:, None]) >> 1
    return torch.where((drawn >= int(p * 2**31)).view(x.shape), x / (1 - p), 0)


class _Dropout(torch.autograd.Function):
    """`dropout` by the kernel; backward draws the mask again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: Tensor, layer: int, step: Tensor, p: float) -> Tensor:
        from torch_dcl.fleet.kernels.pointwise import dropout as drop

        ctx.save_for_backward(seed, step)
        ctx.layer, ctx.p = layer, p
        return drop(x, seed, layer, step, p)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from torch_dcl.fleet.kernels.pointwise import dropout as drop

        seed, step = ctx.saved_tensors  # torch raises an error if the step has changed
        return drop(grads[0].contiguous(), seed, ctx.layer, step, ctx.p), None, None, None, None


def advance_(fusion: Any, seed: Tensor, layer: int, step: Tensor, branches: int) -> None:
    """Draw the active branches of a stochastic layer for a step, and note what they were drawn from."""
    fusion.key[:, 0].copy_(seed)
    fusion.key[:, 1].fill_(layer)
    fusion.key[:, 2].copy_(step.expand_as(seed))
    draw_pairs_(fusion.active, seed, layer, step, branches)


def branch_parameters(fusions: Iterable[tuple[str, Any, Any]], what: str) -> dict[str, tuple[Any, int]]:
    """Parameters of which a step updates only the active branches, with the layer that draws these.

    ``fusions`` are stochastic: the name of the DCL layer, the fusion, and its plain one. A message names ``what``.
    """
    by_name = {}
    for name, fusion, plain in fusions:
        if len(set(plain.widths)) > 1 or fusion.norm is not None:
            raise TypeError(
                f"layer {name!r}: the stochastic strategy in a {what} needs branches of one width and no norm_layer; "
                f"give the layer one width, or train it outside of a {what}"
            )
        for part in ("branch.weight", "branch.bias", "fusion.weight", "fusion.bias"):
            by_name[f"{name}.{part}"] = (fusion, plain.branches)
    return by_name


def draw_pairs_(active: Tensor, seed: Tensor, layer: int, step: Tensor, branches: int) -> None:
    """Draw each network's two active branches of a step into ``[E, 2]``."""
    if kernels.reachable(active):
        from torch_dcl.fleet.kernels.pointwise import draw_pairs_ as draw

        draw(active, seed, layer, step, branches)
        return
    key = torch.stack((seed, torch.full_like(seed, layer), step.expand_as(seed)), -1)
    active.copy_(draw_pair(key, branches))


_MOST_CLASSES = 16_384


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Losses ``[E, B]`` of logits ``[E, B, classes]``, in float32 or float64."""
    E, B, classes = logits.shape
    if kernels.usable(logits) and classes <= _MOST_CLASSES:
        losses: Tensor = _CrossEntropy.apply(logits.reshape(E * B, classes), labels.reshape(-1))
    else:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        losses = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view(E, B)


class _CrossEntropy(torch.autograd.Function):
    """`cross_entropy` by the kernels, which read logits twice and write their gradient once."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        from torch_dcl.fleet.kernels.pointwise import entropy_forward

        logits = logits.contiguous()
        losses, lse = entropy_forward(logits, labels)
        ctx.save_for_backward(logits, labels, lse)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from torch_dcl.fleet.kernels.pointwise import entropy_backward

        return entropy_backward(grads[0].contiguous(), *ctx.saved_tensors), None


def gather_images(images: Tensor, image_of: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather uint8 images ``[D, N, C, H, W]`` of datasets ``[E]`` at ``[E, B]``, from 0 to 1: ``[E, B, C, H, W]``."""
    if kernels.reachable(images) and dtype in (torch.bfloat16, torch.float32):
        from torch_dcl.fleet.kernels.pointwise import gather_images as gather

        return gather(images, image_of, index.contiguous(), dtype)
    return images[image_of[:, None], index].to(dtype) / 255
