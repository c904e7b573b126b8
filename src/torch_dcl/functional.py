"""Section 3 of the paper in plain torch, with the paper's names.

Wang et al., "Deep Collaborative Learning for Visual Recognition", 2017. A DCL module has two stages:

- branch construction: T linear maps of the input, ``y_t = θ_t · x``;
- concept fusion: ``v_t = relu(W_t · y_t)`` and ``z = (Π_t v_t + ε)^(1/T)`` with ``ε = 10^-T``.

This file holds the fusion. It is the reference for every faster version, so it is written for exactness: half
precision is computed in float32, no intermediate value leaves the range of the inputs, and the gradient

    ∂z/∂v_i = (1/T) · Π_{j≠i} (v_j / z)

is formed from the *other* branches, never as output over input, so dead branches give zeros and not NaN.
"""

import math
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import combinations
from operator import mul
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["default_eps", "draw_pair", "fuse_branches", "fuse_pairs"]


def fuse_branches(pre: Tensor | Sequence[Tensor], eps: float | None = None) -> Tensor:
    """Fuse the responses of T branches: ``z = (Π_t relu(pre_t) + eps)^(1/T)``.

    Args:
        pre: Pre-activations ``W_t · y_t`` with the T branches first: a tensor ``[T, ...]``, or a sequence of T
            tensors of one shape.
        eps: The constant inside the root; ``10^-T`` as in the paper when None. Zero is allowed for T = 1 alone,
            where there is no root to protect.

    Returns:
        z of the shape and dtype of one branch. Values beyond the range of the dtype saturate at its largest.

    Raises:
        TypeError: ``pre`` is not of one floating type, or ``eps`` is not a number.
        ValueError: no branch, branches of different shapes, or an ``eps`` that the root cannot take.
    """
    branches = _as_branches(pre)
    T = len(branches)
    return _fuse((tuple(range(T)),), check_eps(eps, T), branches)


def fuse_pairs(pre: Tensor | Sequence[Tensor], eps: float | None = None) -> Tensor:
    """Fuse T ≥ 2 branches pair by pair: the mean of the T = 2 formula over all T(T-1)/2 pairs.

    This is the expectation that the stochastic strategy of section 3.5 takes in the testing phase.

    Args:
        pre: As in :func:`fuse_branches`.
        eps: The constant inside each square root; ``10^-2`` when None.

    Returns:
        The mean, of the shape and dtype of one branch.

    Raises:
        TypeError: ``pre`` is not of one floating type, or ``eps`` is not a number.
        ValueError: fewer than two branches, branches of different shapes, or an ``eps`` that is not positive.
    """
    branches = _as_branches(pre)
    if len(branches) < 2:
        raise ValueError("fuse_pairs needs at least two branches to form a pair, got 1; use fuse_branches")
    return _fuse(tuple(combinations(range(len(branches)), 2)), check_eps(eps, 2), branches)


def draw_pair(key: Tensor, T: int) -> Tensor:
    """Draw the two active branches of a training step (section 3.5) as a pure function of its key.

    The draw is integer arithmetic on the device of the key: no generator, no state, no synchronisation. The same
    key gives the same pair on every device, on every rank and after a resume.

    Args:
        key: ``[..., 3]`` int64: seed, layer and step.
        T: The number of branches, at least 2.

    Returns:
        ``[..., 2]`` int64: two different branches in ascending order, every pair equally likely.
    """
    h = step_key(*key.unbind(-1))
    first = h % T
    second = (first + 1 + mix32(h ^ 0x5BD1E995) % (T - 1)) % T
    return torch.stack((torch.minimum(first, second), torch.maximum(first, second)), -1)


def step_key(seed: Tensor, layer: Tensor | int, step: Tensor) -> Tensor:
    """Hash (seed, layer, step) to 32 bits, as int64."""
    return mix32(mix32(mix32(seed ^ (seed >> 32)) ^ layer) ^ step)


def mix32(x: Tensor) -> Tensor:
    """Hash 32 bits with xor-shifts and odd multipliers below 2^31, whose products fit into int64."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x6C62272F) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0x45D9F3B5) & 0xFFFFFFFF
    return x ^ (x >> 16)


def default_eps(T: int) -> float:
    """The paper's ε for T fused branches: ``10^-T``, so that z is never below 0.1."""
    return 10.0**-T


def check_eps(eps: float | None, T: int) -> float:
    """Return the ε to use for T fused branches, or raise ValueError with the reason."""
    if eps is None:
        return default_eps(T)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"eps must be a number, got {eps!r}; the paper's value is 10^-T = 1e-{T}")
    if not 0 <= eps < math.inf:  # in a compiled network ε may be a symbol, which supports only comparisons
        raise ValueError(f"eps must be a finite positive number, got {eps!r}; the paper's value is 10^-T = 1e-{T}")
    if eps == 0 and T > 1:
        raise ValueError(f"eps = 0 leaves the gradient of the {T}-th root unbounded at 0; use a small positive number")
    return float(eps)


def _as_branches(pre: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    if isinstance(pre, Tensor) and pre.dim() == 0:
        raise ValueError("pre must have the branches in its first dimension, got a tensor without dimensions")
    if not isinstance(pre, (Tensor, Sequence)):
        raise TypeError(f"pre must be a tensor or a sequence of tensors, got {pre!r}")
    branches = pre.unbind(0) if isinstance(pre, Tensor) else tuple(pre)
    if not branches:
        raise ValueError("pre holds no branch; at least one is needed")
    tracing = _is_traced()
    for branch in branches:
        if not isinstance(branch, Tensor):
            raise TypeError(f"every branch must be a tensor, got {branch!r}")
        if not branch.is_floating_point():
            raise TypeError(f"branches must be of a floating type, got {branch.dtype}")
        if branch.dtype != branches[0].dtype:
            raise TypeError(f"all branches must be of one type, got {branches[0].dtype} and {branch.dtype}")
        if not tracing and branch.shape != branches[0].shape:  # sizes that are traced cannot be compared
            shapes = ", ".join(str(tuple(b.shape)) for b in branches)
            raise ValueError(f"all branches must have one shape, got {shapes}")
    return branches


Groups = tuple[tuple[int, ...], ...]
"""Groups of branches; the branches of a group are fused, and the result is the mean over the groups."""


class _Fuse(torch.autograd.Function):
    """The mean over groups of branches of the rooted product, with the gradient from the other branches."""

    generate_vmap_rule = True

    @staticmethod
    def forward(groups: Groups, eps: float, *pre: Tensor) -> Tensor:
        return _by_parts(lambda parts: [fused(parts, groups, eps)], pre, 1)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        del output  # not saved: an in-place ReLU may follow, and rounding z would change v_j / z
        groups, eps, *pre = inputs
        ctx.groups, ctx.eps = groups, eps
        ctx.save_for_backward(*pre)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: activation checkpointing allows no second access
        groups, eps = ctx.groups, ctx.eps
        parts = _by_parts(
            lambda part: fused_gradients(part[0], part[1:], groups, eps), (grad_outputs[0], *saved), len(saved)
        )
        return None, None, *parts


class _FuseWithTangents(_Fuse):
    """`_Fuse` with forward-mode derivatives, which compilers do not support."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _Fuse.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[2:])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        pre = ctx.saved_tensors
        slopes = fused_gradients(torch.ones_like(pre[0]), pre, ctx.groups, ctx.eps)
        changes: list[Tensor] = [s * t for s, t in zip(slopes, tangents[2:], strict=True) if t is not None]
        return reduce(torch.add, changes)


def _fuse(groups: Groups, eps: float, branches: Sequence[Tensor]) -> Tensor:
    compiling = torch.compiler.is_compiling()
    # A trace with a Python function cannot be saved; without gradients torch 2.11 calls one of *args wrongly.
    if _must_decompose() or (compiling and not any(branch.requires_grad for branch in branches)):
        return fused(branches, groups, eps)
    function = _Fuse if compiling else _FuseWithTangents
    z: Tensor = function.apply(groups, eps, *branches)
    return z


def _must_decompose() -> bool:
    """Whether only plain operations are differentiated: compilers ignore a function's own derivatives there."""
    return _is_traced() or (torch.compiler.is_compiling() and transforms())


Function = TypeVar("Function", bound=Callable[..., Any])


def constant(function: Function) -> Function:
    """``torch.compiler.assume_constant_result``, with the type of the function."""
    marked: Function = torch.compiler.assume_constant_result(function)  # type: ignore[no-untyped-call]
    return marked


@constant
def transforms() -> bool:
    """Whether a functorch transform or forward-mode autograd is active; a constant for compilers, which guard both."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def fused(pre: Sequence[Tensor], groups: Groups, eps: float) -> Tensor:
    """The mean over groups of the rooted product of the branches of a group, without autograd."""
    if len(pre) == 1:
        return _rectified(pre[0], eps)
    v = [_respond(p) for p in pre]
    product = _differentiable_rooted_product if _must_decompose() else _rooted_product
    z = [product([v[t] for t in group], eps) for group in groups]
    return _saturate(z[0] if len(z) == 1 else reduce(torch.add, (part / len(z) for part in z)), pre[0].dtype)


def fused_gradients(grad: Tensor, pre: Sequence[Tensor], groups: Groups, eps: float) -> list[Tensor]:
    """The gradients of the pre-activations in `fused`."""
    if len(pre) == 1:
        return [_where_alive(_cast(grad, pre[0].dtype), pre[0])]
    v = [_respond(p) for p in pre]
    grad_z = _cast(grad, v[0].dtype)
    grads: dict[int, Tensor] = {}
    for group in groups:
        parts = _group_gradients(grad_z, [v[t] for t in group], eps, 1 / len(groups))
        for t, part in zip(group, parts, strict=True):
            grads[t] = grads[t] + part if t in grads else part
    return [_saturate(grads[t], pre[0].dtype) for t in range(len(v))]


def part_size() -> int:
    """The number of elements of a part of a large tensor that stays in the caches of a CPU."""
    return max(1 << 19, torch.get_num_threads() << 16)


def _by_parts(
    compute: Callable[[Sequence[Tensor]], list[Tensor]], tensors: Sequence[Tensor], last: int
) -> list[Tensor]:
    """Compute elementwise; large tensors on a CPU in parts, each of which stays in its cache.

    Without parts every operation would also allocate a large tensor, whose memory the system maps anew: together ten
    times the time for 50 MB.

    Args:
        compute: Returns tensors like the last of those given.
        tensors: Tensors of one shape.
        last: How many tensors ``compute`` returns.
    """
    like = tensors[-last:]
    x = like[0]
    if not _is_plain_cpu(x) or x.numel() < 2 * (size := part_size()):
        return compute(tensors)
    d = max(range(x.dim()), key=lambda d: (x.shape[d] > 1, x.stride(d)))
    rows = max(1, size * x.shape[d] // x.numel())
    results = [torch.empty_like(t) for t in like]
    given, into = ([torch.split(t, rows, d) for t in group] for group in (tensors, results))
    for parts, places in zip(zip(*given, strict=True), zip(*into, strict=True), strict=True):
        for place, part in zip(places, compute(parts), strict=True):
            place.copy_(part)
    return results


def _is_plain_cpu(x: Tensor) -> bool:
    """Whether operations on x run on a CPU now, and no compiler, transform, trace or autograd looks at them."""
    if x.device.type != "cpu" or type(x) is not Tensor or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return not (transforms() or _is_traced() or exporting())


def _rectified(pre: Tensor, eps: float) -> Tensor:
    """z of a single branch, without product and root: without ε as quick as the ReLU that it is."""
    if _must_decompose():
        pre = pre.relu()  # clamp alone would pass the gradient of a response of exactly zero
    if eps == 0:
        return pre.clamp(0.0, torch.finfo(pre.dtype).max)
    return _saturate(_respond(pre) + eps, pre.dtype)


def _respond(pre: Tensor) -> Tensor:
    """v = relu(pre) in the type to compute in; an infinite response counts as the largest number."""
    wide = compute_dtype(pre.dtype)
    return _cast(pre, wide).clamp(0.0, torch.finfo(wide).max)


def _rooted_product(v: Sequence[Tensor], eps: float) -> Tensor:
    """(Π v_t + ε)^(1/T), through the geometric mean, which never leaves the range of the v_t."""
    T = len(v)
    floor, largest = _floor(T, eps, v[0].dtype), torch.finfo(v[0].dtype).max
    mean = reduce(mul, (_root(v_t, T) for v_t in v))
    if T == 2 and not exporting():  # √(mean² + floor²) at once; other runtimes may not have it
        return torch.hypot(mean, torch.full((), floor, dtype=mean.dtype, device=mean.device)).clamp(max=largest)
    mean = mean.clamp(max=largest)  # the roots are rounded, perhaps upwards
    scale = mean.clamp(min=floor)
    return scale * _root((mean / scale) ** T + (floor / scale) ** T, T)


def _group_gradients(grad_z: Tensor, v: Sequence[Tensor], eps: float, share: float) -> list[Tensor]:
    """∂z/∂v_i · grad_z · share for every branch i of a group, zero where the branch is dead."""
    T, largest = len(v), torch.finfo(grad_z.dtype).max
    z = _differentiable_rooted_product(v, eps) if torch.is_grad_enabled() else _rooted_product(v, eps)
    if T == 2:
        zero = torch.zeros((), dtype=z.dtype, device=z.device)
        unit = torch.addcdiv(zero, grad_z, z, value=share / 2).clamp(-largest, largest)
        return [_where_alive(unit * v[1 - i], v[i]) for i in range(2)]
    return [_where_alive(grad_z * share * slope, v_i) for slope, v_i in zip(_slopes(v, z), v, strict=True)]


def _where_alive(grad: Tensor, v: Tensor) -> Tensor:
    """The gradient of a ReLU with the response v."""
    passed: Tensor = torch.ops.aten.threshold_backward(grad, v, 0)
    return passed


def _differentiable_rooted_product(v: Sequence[Tensor], eps: float) -> Tensor:
    """The same z in operations that are differentiable where a branch is dead.

    A nested ``_Fuse`` would do, but torch.compile of torch 2.11 traces its backward recursively without end.
    """
    dead = reduce(torch.logical_or, (v_t <= 0 for v_t in v))
    z = _rooted_product([torch.where(dead, 1.0, v_t) for v_t in v], eps)
    return torch.where(dead, _floor(len(v), eps, z.dtype), z)


def _floor(T: int, eps: float, dtype: torch.dtype) -> float:
    """z where a branch is dead: ε^(1/T), at least the smallest normal number of the dtype."""
    return max(math.pow(eps, 1 / T), torch.finfo(dtype).tiny)


def _slopes(v: Sequence[Tensor], z: Tensor) -> list[Tensor]:
    """∂z/∂v_i = (1/T) · Π_{j≠i} (v_j / z) for every i of three or more, as the (T-1)-th power of a geometric mean.

    A dead branch is replaced by 1 under the root and by 0 after it, so that the result is differentiable. The factor
    1/T is distributed over the ratios, so that no intermediate value overflows unless the slope does.
    """
    T, largest = len(v), torch.finfo(z.dtype).max
    unit, share = _root(z, T - 1), T ** (-1 / (T - 1) ** 2)
    ratios = []
    for v_t in v:
        alive = v_t > 0
        root = _root(torch.where(alive, v_t, 1.0), T - 1)
        ratios.append(torch.where(alive, root * share, 0.0) / unit)
    others = (reduce(mul, ratios[:i] + ratios[i + 1 :]) for i in range(T))
    return [(product ** (T - 1)).clamp(max=largest) for product in others]


def _root(x: Tensor, degree: int) -> Tensor:
    if degree == 1:
        return x
    if degree > 2:
        return x ** (1 / degree)
    if x.device.type != "cpu" or x.dtype != torch.float32 or torch.is_grad_enabled() or _is_traced() or exporting():
        return x.sqrt()
    if transforms() if torch.compiler.is_compiling() else torch.autograd.forward_ad._current_level >= 0:
        return x.sqrt()  # torch.func.linearize cannot repeat an operation in place
    return x.rsqrt().reciprocal_()  # MKL's sqrt takes ten times as long where half of the numbers are zero


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a dtype is computed: float32 for half precision."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return _cast(x, dtype).clamp(-largest, largest)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, without a call for the same dtype: compiled by torch 2.11, that call would lose the gradient."""
    return x if x.dtype == dtype else x.to(dtype)


def exporting() -> bool:
    """Whether a network is being exported by torch.export, or traced for ONNX.

    Up to torch 2.11 ``torch.compiler.is_exporting()`` is also true while a network is compiled.
    """
    flag = getattr(torch.compiler, "_is_exporting_flag", None)
    if torch.compiler.is_exporting() if flag is None else flag:
        return True
    return _is_traced() and torch.onnx.is_in_onnx_export()


def _is_traced() -> bool:
    """Whether torch.jit.trace records."""
    return torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call, no-any-return]
