"""Which path a fusion takes: the kernels where they can, `torch_dcl.functional` everywhere else.

The kernels are operations of torch (``torch.ops.torch_dcl``), so that ``torch.compile`` and CUDA graphs know them. They
take part on a GPU, for two or three branches of one width, in float32, bfloat16 and float16. While a network is
exported, under ``torch.func`` transforms, in float64, and for other T, the reference runs.
"""

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_dcl import functional, kernels

__all__ = ["disabled", "fuse_branches", "fuse_pairs", "project_and_fuse", "watch"]

_enabled = os.environ.get("TORCH_DCL_KERNELS", "1") != "0"
_watching: list[Counter[str]] = []


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Take the reference path inside the block. ``TORCH_DCL_KERNELS=0`` in the environment does so for good."""
    global _enabled  # noqa: PLW0603 - a plain flag, which a compiled network can guard on
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


@contextlib.contextmanager
def watch() -> Iterator[Counter[str]]:
    """Count which paths run inside the block.

    ::

        with kernels.watch() as ran:
            model(x)
        ran["project_and_fuse: kernel"], ran["project_and_fuse: reference"]

    A compiled network runs its kernels without coming through here again; what it was compiled with is counted.
    """
    counter: Counter[str] = Counter()
    _watching.append(counter)
    try:
        yield counter
    finally:
        _watching.remove(counter)


def _note(what: str, path: str) -> None:
    for counter in _watching:
        counter[f"{what}: {path}"] += 1


def fuse_branches(pre: Sequence[Tensor], eps: float) -> Tensor:
    """:func:`torch_dcl.functional.fuse_branches`, by a kernel where there is one."""
    if _fits(pre, len(pre)):
        _note("fuse_branches", "kernel")
        return _fuse(pre, eps, pairs=False)
    _note("fuse_branches", "reference")
    return functional.fuse_branches(pre, eps)


def fuse_pairs(pre: Sequence[Tensor], eps: float) -> Tensor:
    """:func:`torch_dcl.functional.fuse_pairs`, by a kernel where there is one."""
    if len(pre) == 3 and _fits(pre, 3):
        _note("fuse_pairs", "kernel")
        return _fuse(pre, eps, pairs=True)
    _note("fuse_pairs", "reference")
    return functional.fuse_pairs(pre, eps)


def project_and_fuse(
    y: Tensor, weight: Tensor, bias: Tensor | None, widths: Sequence[int], eps: float, *, pairs: bool, keep: bool
) -> Tensor:
    """Stage 2 at every position: ``z = fuse_t(y_t · W_t + b_t)``.

    Args:
        y: ``[P, ΣM]``: the branches' outputs at P positions.
        weight: ``[ΣM, K2]``.
        bias: ``[T, K2]`` or None.
        widths: M(t).
        eps: ε.
        pairs: Whether to take the mean over pairs instead of fusing all.
        keep: Whether backward keeps the responses. Else it forms them once more, which takes less memory, and less time
            where there are many positions for each weight.

    Returns:
        z ``[P, K2]``.
    """
    T = len(widths)
    if len(set(widths)) == 1 and (not pairs or T == 3) and _fits((y, weight), T, matched=False):
        _note("project_and_fuse", "kernel")
        weight = weight.to(y.dtype)
        bias = None if bias is None else bias.to(y.dtype)
        keep = keep or widths[0] > _widest(y.dtype)
        arguments = (y.contiguous(), weight.contiguous(), bias, T, eps, pairs, keep)
        if torch.compiler.is_compiling():
            compiled: Tensor = torch.ops.torch_dcl.project(*arguments)[0]
            return compiled
        z: Tensor = _Project.apply(*arguments)
        return z
    _note("project_and_fuse", "reference")
    pre = _responses(y, weight, bias, widths)
    return fuse_pairs(pre, eps) if pairs else fuse_branches(pre, eps)


def _widest(dtype: torch.dtype) -> int:
    """The most channels of a branch whose responses are formed on the chip: all of a position's must fit there."""
    return 128 if dtype == torch.float32 else 256


def _responses(y: Tensor, weight: Tensor, bias: Tensor | None, widths: Sequence[int]) -> list[Tensor]:
    biases = (None,) * len(widths) if bias is None else bias.unbind(0)
    parts = zip(torch.split(y, list(widths), -1), torch.split(weight, list(widths)), biases, strict=True)
    return [F.linear(y_t, W_t.t(), b_t) for y_t, W_t, b_t in parts]


def _fits(tensors: Sequence[Tensor], T: int, *, matched: bool = True) -> bool:
    """Whether the kernels can take these tensors, here and now."""
    first = tensors[0]
    if T not in (2, 3) or not kernels.usable(first) or not _enabled or functional.exporting():
        return False
    if any(t.device != first.device or (matched and t.dtype != first.dtype) for t in tensors):
        return False
    if torch.compiler.is_compiling():
        return True
    wrapped = any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors)
    return not wrapped and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def _fuse(pre: Sequence[Tensor], eps: float, *, pairs: bool) -> Tensor:
    if torch.compiler.is_compiling():
        compiled: Tensor = torch.ops.torch_dcl.fuse(list(pre), eps, pairs)
        return compiled
    z: Tensor = _Fuse.apply(eps, pairs, *pre)
    return z


class _Fuse(torch.autograd.Function):
    """What ``torch.ops.torch_dcl.fuse`` is, with less to do for each call."""

    @staticmethod
    def forward(ctx: Any, eps: float, pairs: bool, *pre: Tensor) -> Tensor:
        ctx.save_for_backward(*pre)
        ctx.eps, ctx.pairs = eps, pairs
        return _fuse_kernels(list(pre), eps, pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        pre = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted: the reference has one
            return None, None, *_again(_reference_fuse, grads[0], pre, (ctx.eps, ctx.pairs))
        return None, None, *_fuse_backward_kernels(grads[0], list(pre), ctx.eps, ctx.pairs)


def _fuse_kernels(pre: list[Tensor], eps: float, pairs: bool) -> Tensor:
    from torch_dcl.kernels import fused  # noqa: PLC0415

    with kernels.on_device_of(pre[0]):
        return fused.fuse_forward(pre, eps, pairs)


def _fuse_backward_kernels(grad: Tensor, pre: list[Tensor], eps: float, pairs: bool) -> list[Tensor]:
    from torch_dcl.kernels import fused  # noqa: PLC0415

    with kernels.on_device_of(grad):
        return fused.fuse_backward(grad, pre, eps, pairs)


class _Project(torch.autograd.Function):
    """What ``torch.ops.torch_dcl.project`` is, with less to do for each call."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weight: Tensor, bias: Tensor | None, T: int, eps: float, pairs: bool, keep: bool
    ) -> Tensor:
        z, pre = _project_kernels(y, weight, bias, T, eps, pairs, keep)
        ctx.save_for_backward(y, weight, bias, pre)
        ctx.settings = (T, eps, pairs)
        return z

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        y, weight, bias, pre = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted: the reference has one
            given = [t for t in (y, weight, bias) if t is not None]
            again = _again(_reference_project, grads[0], given, ctx.settings)
            return (*again, *(None,) * (7 - len(again)))
        found = _project_backward_kernels(grads[0].contiguous(), y, weight, bias, pre, *ctx.settings)
        return *found, None, None, None, None


def _project_kernels(
    y: Tensor, weight: Tensor, bias: Tensor | None, T: int, eps: float, pairs: bool, keep: bool
) -> tuple[Tensor, Tensor | None]:
    from torch_dcl.kernels import kept, project  # noqa: PLC0415

    with kernels.on_device_of(y):
        if keep:
            return kept.kept_forward(y, weight, bias, T, eps, pairs)
        hopper = _hopper(y)
        if hopper is not None and hopper.takes(y, weight, T, eps):
            return hopper.project_forward(y, weight, bias, eps), None
        return project.project_forward(y, weight, bias, T, eps, pairs), None


def _project_backward_kernels(
    grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, pre: Tensor | None, T: int, eps: float, pairs: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    from torch_dcl.kernels import kept, project  # noqa: PLC0415

    with kernels.on_device_of(y):
        if pre is not None:
            return kept.kept_backward(grad, y, weight, bias, pre, T, eps, pairs)
        hopper = _hopper(y)
        if hopper is not None and hopper.takes(y, weight, T, eps):
            return hopper.project_backward(grad, y, weight, bias, eps)  # type: ignore[no-any-return]
        return project.project_backward(grad, y, weight, bias, T, eps, pairs)


def _hopper(y: Tensor) -> ModuleType | None:
    """The kernels of Hopper GPUs, on one of these."""
    return _hopper_on(y.device) if y.is_cuda else None


@functools.cache
def _hopper_on(device: torch.device) -> ModuleType | None:
    return _hopper_kernels() if torch.cuda.get_device_capability(device) == (9, 0) else None


@functools.cache
def _hopper_kernels() -> ModuleType | None:
    """Gluon is young and its names change: these kernels run with the versions of Triton that they were tried with."""
    import triton  # noqa: PLC0415

    if not (3, 6) <= tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 9):
        return None
    from torch_dcl.kernels import hopper  # noqa: PLC0415

    return hopper


def _again(reference: Any, grad: Tensor, inputs: Sequence[Tensor], settings: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Gradients that can be differentiated again, from the reference."""
    with torch.enable_grad():
        out = reference(inputs, *settings)
    return torch.autograd.grad(out, list(inputs), grad, create_graph=True)


def _reference_fuse(pre: Sequence[Tensor], eps: float, pairs: bool) -> Tensor:
    return (functional.fuse_pairs if pairs else functional.fuse_branches)(list(pre), eps)


def _reference_project(inputs: Sequence[Tensor], T: int, eps: float, pairs: bool) -> Tensor:
    y, weight, *rest = inputs
    widths = [y.shape[1] // T] * T
    return _reference_fuse(_responses(y, weight, rest[0] if rest else None, widths), eps, pairs)


# The operations of torch. On a CPU they are the reference, so that they can be checked there.


@torch.library.custom_op("torch_dcl::fuse", mutates_args=())
def _op_fuse(pre: list[Tensor], eps: float, pairs: bool) -> Tensor:
    if kernels.usable(pre[0]):
        return _fuse_kernels(pre, eps, pairs)
    return _reference_fuse(pre, eps, pairs)


@torch.library.custom_op("torch_dcl::fuse_backward", mutates_args=())
def _op_fuse_backward(grad: Tensor, pre: list[Tensor], eps: float, pairs: bool) -> list[Tensor]:
    if kernels.usable(grad):
        return _fuse_backward_kernels(grad, pre, eps, pairs)
    return functional.fuse_gradients(grad, pre, eps, pairs=pairs)


@torch.library.custom_op("torch_dcl::project", mutates_args=())
def _op_project(
    y: Tensor, weight: Tensor, bias: Tensor | None, T: int, eps: float, pairs: bool, keep: bool
) -> tuple[Tensor, Tensor]:
    if kernels.usable(y):
        z, pre = _project_kernels(y, weight, bias, T, eps, pairs, keep)
        return z, y.new_empty(0) if pre is None else pre
    M = y.shape[1] // T
    responses = _responses(y, weight, bias, [M] * T)
    return _reference_fuse(responses, eps, pairs), torch.stack(responses) if keep else y.new_empty(0)


@torch.library.custom_op("torch_dcl::project_backward", mutates_args=())
def _op_project_backward(
    grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, pre: Tensor, T: int, eps: float, pairs: bool
) -> list[Tensor]:
    if kernels.usable(grad):
        kept = pre if pre.numel() else None
        found = _project_backward_kernels(grad.contiguous(), y, weight, bias, kept, T, eps, pairs)
        return [t for t in found if t is not None]
    M = y.shape[1] // T
    dpre = functional.fuse_gradients(grad, _responses(y, weight, bias, [M] * T), eps, pairs=pairs)
    parts = [
        torch.cat([d @ W.t() for d, W in zip(dpre, torch.split(weight, M), strict=True)], 1),
        torch.cat([y_t.t() @ d for y_t, d in zip(torch.split(y, M, 1), dpre, strict=True)]),
    ]
    return parts if bias is None else [*parts, torch.stack([d.sum(0) for d in dpre])]


@_op_fuse.register_fake
def _(pre: list[Tensor], eps: float, pairs: bool) -> Tensor:
    return torch.empty_like(pre[0])


@_op_fuse_backward.register_fake
def _(grad: Tensor, pre: list[Tensor], eps: float, pairs: bool) -> list[Tensor]:
    return [torch.empty_like(pre[0]) for _ in pre]


@_op_project.register_fake
def _(
    y: Tensor, weight: Tensor, bias: Tensor | None, T: int, eps: float, pairs: bool, keep: bool
) -> tuple[Tensor, Tensor]:
    P, N = y.shape[0], weight.shape[1]
    return y.new_empty(P, N), y.new_empty(T, P, N) if keep else y.new_empty(0)


@_op_project_backward.register_fake
def _(
    grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, pre: Tensor, T: int, eps: float, pairs: bool
) -> list[Tensor]:
    return [torch.empty_like(t) for t in (y, weight, bias) if t is not None]


def _fuse_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pre, ctx.eps, ctx.pairs = inputs
    ctx.save_for_backward(*pre)


def _fuse_autograd(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    found = torch.ops.torch_dcl.fuse_backward(grad, list(ctx.saved_tensors), ctx.eps, ctx.pairs)
    return found, None, None


def _project_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    y, weight, bias, *settings, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(y, weight, bias, output[1])
    ctx.settings = settings


def _project_autograd(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    found = torch.ops.torch_dcl.project_backward(grad, *ctx.saved_tensors, *ctx.settings)
    return found[0], found[1], found[2] if len(found) > 2 else None, None, None, None, None


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
    info: Any, in_dims: Any, y: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    given = [
        None if t is None else _first(t, d, info.batch_size) for t, d in zip((y, weight, bias), in_dims, strict=False)
    ]
    rows = [[None if t is None else t[i] for t in given] for i in range(info.batch_size)]
    found = [torch.ops.torch_dcl.project(*row, *settings) for row in rows]
    return (torch.stack([z for z, _ in found]), torch.stack([pre for _, pre in found])), (0, 0)
