"""The DCL module as drop-in layers: :class:`DCLLinear` and :class:`DCLConv1d`, ``2d``, ``3d``.

A layer is two stages, as in section 3.1 of the paper, and so are its state-dict keys:

=======================  =========================  =======================================================
key                      shape                      what it is
=======================  =========================  =======================================================
``branch.weight``        ``[ΣM, K1, *kernel]``      θ: the filters of all branches, one branch after another
``branch.bias``          ``[ΣM]``                   only with a ``branch_activation``
``branch_activation.*``  as the activation has it   only with a ``branch_activation`` that has parameters
``fusion.weight``        ``[ΣM, K2]``               W: row m of branch t weighs ``y_m`` in all K2 outputs
``fusion.bias``          ``[T, K2]``                one bias a branch, unless ``bias=False``
``fusion.norm.t.*``      as ``norm_layer`` has it   the normalisation of branch t, with ``norm_layer``
``fusion.key``           ``[3]`` int64              seed, layer, step of the draw (stochastic strategy)
``fusion.active``        ``[2]`` int64              the two branches drawn for this step (stochastic strategy)
=======================  =========================  =======================================================

Biases, and only biases, end in ``bias``.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_dcl.functional import check_eps, draw_pair, fuse_branches, fuse_pairs

__all__ = ["MAX_BRANCHES", "ConceptFusion", "DCLConv1d", "DCLConv2d", "DCLConv3d", "DCLLinear", "Responses", "Strategy"]

MAX_BRANCHES = 8
Strategy = Literal["deterministic", "stochastic"]
PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


class Responses(NamedTuple):
    """What a DCL layer computes on the way: for looking inside."""

    y: tuple[Tensor, ...]
    """The T branches, ``M_t`` channels each."""
    v: tuple[Tensor, ...]
    """The T responses after ReLU, ``K2`` channels each."""
    z: Tensor
    """Their fusion: over all branches (deterministic), or the mean over all pairs (stochastic)."""


def branch_widths(
    out_channels: int,
    *,
    branches: int = 2,
    ratio: float = 0.25,
    width: int | Sequence[int] | None = None,
    round_to: int = 8,
) -> tuple[int, ...]:
    """The number of filters M(t) of each branch.

    Args:
        out_channels: K2 of the layer.
        branches: T, from 1 to 8.
        ratio: Filters of one branch as a fraction of ``out_channels``, used when ``width`` is None.
        width: The exact number of filters: one for all branches, or one for each.
        round_to: ``ratio`` is rounded to a multiple of this, at least one multiple, never above ``out_channels``.

    Raises:
        TypeError: a number of the wrong kind.
        ValueError: a number out of its range.
    """
    if isinstance(branches, bool) or not isinstance(branches, int):
        raise TypeError(f"branches must be a whole number, got {branches!r}")
    if not 1 <= branches <= MAX_BRANCHES:
        raise ValueError(f"branches must be from 1 to {MAX_BRANCHES}, got {branches}")
    if width is not None:
        if isinstance(width, str) or not isinstance(width, (int, Sequence)):
            raise TypeError(f"width must be a whole number, or one for each branch, got {width!r}")
        widths = (width,) * branches if isinstance(width, int) else tuple(width)
        if len(widths) != branches:
            raise ValueError(
                f"width names {len(widths)} branches, but branches = {branches}; give one number or {branches}"
            )
        for w in widths:
            if isinstance(w, bool) or not isinstance(w, int):
                raise TypeError(f"width must be whole numbers, got {w!r}")
            if not 1 <= w <= out_channels:
                raise ValueError(
                    f"width {w} does not fit a layer of {out_channels} output channels; choose from 1 to {out_channels}"
                )
        return widths
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)):
        raise TypeError(f"ratio must be a number above 0 and at most 1, got {ratio!r}")
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio must be above 0 and at most 1, got {ratio!r}; the paper uses 1/5 and 1/4")
    if isinstance(round_to, bool) or not isinstance(round_to, int) or round_to < 1:
        raise ValueError(f"round_to must be a whole number of at least 1, got {round_to!r}")
    rounded = max(1, math.floor(ratio * out_channels / round_to + 0.5)) * round_to
    return (min(rounded, out_channels),) * branches


class ConceptFusion(nn.Module):
    """The second stage: every branch is projected to K2 channels, rectified, and the branches are fused.

    Args:
        widths: M(t), the channels of each branch.
        out_channels: K2.
        spatial: How many spatial dimensions follow the channels; 0 puts the channels last, as in ``nn.Linear``.
        strategy: "deterministic" fuses all branches; "stochastic" one drawn pair in training, all pairs in eval.
        eps: ε of the fusion; None takes the paper's.
        norm_layer: Called with K2, makes the normalisation of one branch's response before its ReLU.
        bias: Whether each branch has a bias.
        device: Where the parameters live.
        dtype: Of which type they are.
    """

    def __init__(
        self,
        widths: tuple[int, ...],
        out_channels: int,
        *,
        spatial: int,
        strategy: Strategy = "deterministic",
        eps: float | None = None,
        norm_layer: Callable[[int], nn.Module] | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        T = len(widths)
        if strategy not in get_args(Strategy):
            raise ValueError(f'strategy must be "deterministic" or "stochastic", got {strategy!r}')
        if strategy == "stochastic" and T < 3:
            raise ValueError(f"the stochastic strategy draws a pair from three or more branches, got branches = {T}")
        self.widths, self.out_channels, self.spatial, self.strategy = widths, out_channels, spatial, strategy
        self.eps = check_eps(eps, 2 if strategy == "stochastic" else T)
        self.weight = nn.Parameter(torch.empty(sum(widths), out_channels, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(T, out_channels, device=device, dtype=dtype)) if bias else None
        self.norm = None
        if norm_layer is not None:
            norms = [norm_layer(out_channels) for _ in widths]
            self.norm = nn.ModuleList(norm.to(device=device, dtype=dtype) for norm in norms)
        self.advanced = False  # whether somebody has taken charge of the step, see torch_dcl.stochastic
        if strategy == "stochastic":
            self.register_buffer("key", torch.zeros(3, dtype=torch.int64, device=device))
            self.register_buffer("active", torch.zeros(2, dtype=torch.int64, device=device))
        self.reset_parameters()

    key: Tensor
    active: Tensor

    @property
    def branches(self) -> int:
        """T."""
        return len(self.widths)

    def reset_parameters(self, incoming: float = 1.0) -> None:
        """Initialise so that z has the variance of the ReLU layer that the module replaces, for unit inputs.

        Args:
            incoming: The mean square of a branch's output y, 1 unless an activation changed it.
        """
        fused = 2 if self.strategy == "stochastic" else self.branches
        # torch's default layer keeps a third of its input's mean square; a normalised one has unit variance.
        spread = response_spread(fused, self.eps, 1.0 if self.norm else 1 / 3)
        for W, M in zip(torch.split(self.weight, list(self.widths)), self.widths, strict=True):
            bound = math.sqrt(3 / (M * incoming)) * (1.0 if self.norm else spread)
            nn.init.uniform_(W.detach(), -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        for norm in self.norm or ():
            _reset(norm)
            gamma = getattr(norm, "weight", None)
            if isinstance(gamma, Tensor):
                nn.init.constant_(gamma, spread)
        if self.strategy == "stochastic":
            self.key.zero_()
            self.active.copy_(draw_pair(self.key, self.branches))

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """The branches of stage 1, one by one."""
        return torch.split(y, list(self.widths), dim=-1 - self.spatial)

    def project(self, t: int, y: Tensor) -> Tensor:
        """The response of branch t before its ReLU."""
        start = sum(self.widths[:t])
        W = self.weight[start : start + self.widths[t]]
        pre = _project(y, W, None if self.bias is None else self.bias[t], self.spatial)
        return pre if self.norm is None else self.norm[t](pre)

    def respond(self, y: Tensor) -> list[Tensor]:
        """All T responses before their ReLU, from the output of stage 1."""
        return [self.project(t, y_t) for t, y_t in enumerate(self.split(y))]

    def forward(self, y: Tensor) -> Tensor:
        """Fuse the output of stage 1, all branches in it."""
        pre = self.respond(y)
        if self.strategy == "deterministic":
            return fuse_branches(pre, self.eps)
        if self.training:
            return fuse_branches([_pick(pre, index) for index in self.active.unbind(0)], self.eps)
        return fuse_pairs(pre, self.eps)

    @property
    def gathers(self) -> bool:
        """Whether the drawn pair can be computed alone: equal branches, and no statistics that want all of them."""
        return len(set(self.widths)) == 1 and self.norm is None

    def gather(self, parameter: Tensor) -> Tensor:
        """The rows of a stage 1 or stage 2 parameter that belong to the two active branches."""
        by_branch = parameter.view(self.branches, -1, *parameter.shape[1:])
        return by_branch.index_select(0, self.active).flatten(0, 1)

    def forward_pair(self, y: Tensor) -> Tensor:
        """Fuse the output of a stage 1 that computed the two active branches alone."""
        M = self.widths[0]
        W = self.gather(self.weight)
        bias = (None, None) if self.bias is None else self.bias.index_select(0, self.active).unbind(0)
        halves = zip(torch.split(y, M, dim=-1 - self.spatial), torch.split(W, M), bias, strict=True)
        return fuse_branches([_project(y_t, W_t, b_t, self.spatial) for y_t, W_t, b_t in halves], self.eps)

    def extra_repr(self) -> str:
        """The arguments, for printing."""
        widths = str(self.widths[0]) if len(set(self.widths)) == 1 else str(self.widths)
        parts = [f"{self.branches} x {widths} -> {self.out_channels}", f"eps={self.eps:.3g}"]
        if self.strategy != "deterministic":
            parts.append(f"strategy={self.strategy}")
        if self.bias is None:
            parts.append("bias=False")
        return ", ".join(parts)


def _project(y: Tensor, W: Tensor, bias: Tensor | None, spatial: int) -> Tensor:
    """W^T·y at every position: a linear map of the channels."""
    weight = W.t()
    if spatial == 0:
        return F.linear(y, weight, bias)
    if spatial == 3:  # the same map over [D·H, W]: a 1×1×1 convolution on the CPU would lose channels_last_3d
        flat = _project(y.flatten(-3, -2), W, bias, 2)
        return flat.view(*flat.shape[:-2], *y.shape[-3:])
    conv: Callable[..., Tensor] = F.conv1d if spatial == 1 else F.conv2d
    return conv(y, weight.reshape(*weight.shape, *(1,) * spatial), bias)


def _pick(responses: Sequence[Tensor], index: Tensor) -> Tensor:
    """``responses[index]`` for an index on the device, without a copy that would lose channels_last."""
    picked = responses[0]
    for t, response in enumerate(responses[1:], 1):
        picked = torch.where(index == t, response, picked)
    return picked


def _reset(module: nn.Module | None) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


class _DCL(nn.Module):
    """What the linear and the convolutional layers share: stage 1 in ``branch``, stage 2 in ``fusion``."""

    branch: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
    fusion: ConceptFusion
    branch_activation: nn.Module | None

    def reset_parameters(self) -> None:
        """Initialise both stages; see :meth:`ConceptFusion.reset_parameters`."""
        weight, bias = self.branch.weight, self.branch.bias
        bound = math.sqrt(3 / weight[0].numel())
        nn.init.uniform_(weight, -bound, bound)
        if bias is not None:
            nn.init.zeros_(bias)
        _reset(self.branch_activation)
        self.fusion.reset_parameters(_mean_square(self.branch_activation))

    def forward(self, x: Tensor) -> Tensor:
        """Map the input to z."""
        fusion = self.fusion
        if fusion.strategy == "stochastic" and self.training:
            _warn_if_nobody_advances(fusion)
            if fusion.gathers:
                weight, bias = self.branch.weight, self.branch.bias
                y = self._run_branch(x, fusion.gather(weight), None if bias is None else fusion.gather(bias))
                return fusion.forward_pair(self._activate(y))
        z: Tensor = fusion(self._activate(self.branch(x)))
        return z

    def responses(self, x: Tensor) -> Responses:
        """Look inside: all branches y, their responses v and the fusion z, whatever the training flag says."""
        y = self._activate(self.branch(x))
        pre = self.fusion.respond(y)
        fuse = fuse_branches if self.fusion.strategy == "deterministic" else fuse_pairs
        return Responses(self.fusion.split(y), tuple(F.relu(p) for p in pre), fuse(pre, self.fusion.eps))

    @property
    def branches(self) -> int:
        """T."""
        return self.fusion.branches

    @property
    def widths(self) -> tuple[int, ...]:
        """M(t)."""
        return self.fusion.widths

    @property
    def strategy(self) -> Strategy:
        """How more than two branches are trained."""
        return self.fusion.strategy

    @property
    def eps(self) -> float:
        """ε."""
        return self.fusion.eps

    def _activate(self, y: Tensor) -> Tensor:
        return y if self.branch_activation is None else self.branch_activation(y)

    def _run_branch(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Stage 1 with these filters instead of its own."""
        if isinstance(self.branch, nn.Linear):
            return F.linear(x, weight, bias)
        y: Tensor = self.branch._conv_forward(x, weight, bias)
        return y


class DCLLinear(_DCL):
    """A linear layer with its ReLU, as T branches: ``z = (Π_t relu(W_t·θ_t·x + b_t) + ε)^(1/T)``.

    It stands for ``nn.Linear`` followed by ``nn.ReLU``. The output is positive: at least ``ε^(1/T)``.

    Args:
        in_features: K1.
        out_features: K2.
        branches: T, from 1 to 8. T = 1 is the low-rank layer ``relu(W·θ·x + b) + ε``: a comparison for free
            (with ``eps=0`` exactly the low-rank layer).
        ratio: Filters of one branch as a fraction of the output channels, rounded to ``round_to``.
        width: The exact number of filters M(t) instead: one number, or one for each branch.
        round_to: What ``ratio`` is rounded to a multiple of; matrix units like 8.
        strategy: "deterministic" fuses all branches. "stochastic" (T > 2) fuses one random pair of branches a
            training step and, in eval, takes the mean over all pairs; see :mod:`torch_dcl.stochastic` for who
            advances the step.
        eps: ε inside the root; None takes the paper's ``10^-T`` (``10^-2`` for the pairs of the stochastic strategy).
        norm_layer: Makes a normalisation of K2 channels for each branch's response before its ReLU, for example
            ``nn.BatchNorm1d``.
        branch_activation: Makes an activation after stage 1, for example ``nn.ReLU``. The paper's definition has
            none, the last line of its derivation shows one. With it, stage 1 has a bias.
        bias: Whether each branch's response has a bias.
        device: Where the parameters live.
        dtype: Of which type they are.

    Shape:
        Input ``[*, in_features]``, output ``[*, out_features]``.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: an argument out of its range; the message names the value and the remedy.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        branches: int = 2,
        ratio: float = 0.25,
        width: int | Sequence[int] | None = None,
        round_to: int = 8,
        strategy: Strategy = "deterministic",
        eps: float | None = None,
        norm_layer: Callable[[int], nn.Module] | None = None,
        branch_activation: Callable[[], nn.Module] | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_channels(in_features=in_features, out_features=out_features)
        widths = branch_widths(out_features, branches=branches, ratio=ratio, width=width, round_to=round_to)
        self.in_features, self.out_features = in_features, out_features
        self.fusion = ConceptFusion(
            widths, out_features, spatial=0, strategy=strategy, eps=eps, norm_layer=norm_layer, bias=bias,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.branch_activation = None
        if branch_activation is not None:
            self.branch_activation = branch_activation().to(device=device, dtype=dtype)
        self.branch = nn.Linear(
            in_features, sum(widths), bias=bias and branch_activation is not None, device=device, dtype=dtype
        )
        self.reset_parameters()

    @classmethod
    def like(cls, layer: nn.Linear, **arguments: Any) -> Self:
        """A DCL layer of the sizes, bias, dtype, device and training flag of ``layer``, freshly initialised.

        Args:
            layer: The layer to stand in for.
            **arguments: Arguments of DCL's own (``branches``, ``width``, ``strategy``, …), or ``device``.
        """
        given = {"bias": layer.bias is not None, "device": layer.weight.device, "dtype": layer.weight.dtype}
        return cls(layer.in_features, layer.out_features, **{**given, **arguments}).train(layer.training)


class _DCLConv(_DCL):
    """A convolution with its ReLU as T branches, over any number of spatial dimensions."""

    _plain: type[nn.Conv1d | nn.Conv2d | nn.Conv3d]
    _spatial: int

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] | str = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        branches: int = 2,
        ratio: float = 0.25,
        width: int | Sequence[int] | None = None,
        round_to: int = 8,
        strategy: Strategy = "deterministic",
        eps: float | None = None,
        norm_layer: Callable[[int], nn.Module] | None = None,
        branch_activation: Callable[[], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        _check_channels(in_channels=in_channels, out_channels=out_channels)
        if groups != 1:
            raise ValueError(
                f"groups = {groups}: a branch sees every input channel and feeds every output, so a DCL layer cannot "
                "keep groups apart; leave a grouped convolution as it is, or use groups=1"
            )
        widths = branch_widths(out_channels, branches=branches, ratio=ratio, width=width, round_to=round_to)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.fusion = ConceptFusion(
            widths, out_channels, spatial=self._spatial, strategy=strategy, eps=eps, norm_layer=norm_layer, bias=bias,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.branch_activation = None
        if branch_activation is not None:
            self.branch_activation = branch_activation().to(device=device, dtype=dtype)
        self.branch = self._plain(
            in_channels, sum(widths), kernel_size, stride, padding, dilation, 1,  # type: ignore[arg-type]
            bias and branch_activation is not None, padding_mode, device, dtype,
        )  # fmt: skip
        self.reset_parameters()

    @classmethod
    def like(cls, layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, **arguments: Any) -> Self:
        """A DCL layer of the geometry, bias, dtype, device and training flag of ``layer``, freshly initialised.

        Args:
            layer: The layer to stand in for.
            **arguments: Arguments of DCL's own (``branches``, ``width``, ``strategy``, …), or ``device``.
        """
        given = {
            "stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation, "groups": layer.groups,
            "bias": layer.bias is not None, "padding_mode": layer.padding_mode,
            "device": layer.weight.device, "dtype": layer.weight.dtype,
        }  # fmt: skip
        new = cls(layer.in_channels, layer.out_channels, layer.kernel_size, **{**given, **arguments})
        return new.train(layer.training)


class DCLConv1d(_DCLConv):
    """A 1-d convolution with its ReLU, as T branches fused at each position; see :class:`DCLConv2d`."""

    _plain, _spatial = nn.Conv1d, 1


class DCLConv2d(_DCLConv):
    """A 2-d convolution with its ReLU, as T branches fused at each position.

    It stands for ``nn.Conv2d`` followed by ``nn.ReLU`` and takes every argument of ``nn.Conv2d``: stride, padding
    (numbers, "same", "valid"), dilation, bias, padding_mode, device, dtype; ``groups`` other than 1 is refused. All
    branches share kernel size, stride, padding and dilation, and stage 1 is one convolution of ΣM filters. The
    arguments after ``dtype`` are those of :class:`DCLLinear`.

    Shape:
        Input ``[N, in_channels, H, W]`` or without N, output as ``nn.Conv2d`` gives it.
    """

    _plain, _spatial = nn.Conv2d, 2


class DCLConv3d(_DCLConv):
    """A 3-d convolution with its ReLU, as T branches fused at each position; see :class:`DCLConv2d`."""

    _plain, _spatial = nn.Conv3d, 3


def _check_channels(**channels: int) -> None:
    for name, value in channels.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def _warn_if_nobody_advances(fusion: ConceptFusion) -> None:
    # In this order: a compiled forward must not depend on `advanced`, or the first advance would recompile it.
    if torch.compiler.is_compiling() or fusion.advanced:
        return
    fusion.advanced = True
    warnings.warn(
        "a DCL layer with the stochastic strategy is in training, but nobody advances its step, so it would train "
        "the same pair of branches for ever: call advance_branches_(model, step) at every step, or "
        "follow_optimizer(model, optimizer) once",
        stacklevel=4,
    )


@lru_cache(maxsize=64)
def response_spread(T: int, eps: float, variance: float) -> float:
    """The standard deviation of the T pre-activations for which z has the variance of a ReLU layer's output.

    The pre-activations are taken as independent and normal. Three branches are the most that are matched: beyond,
    all T fire so rarely (once in 2^T) that the variance could be met by rare large responses only, so the spread
    of three is kept and z varies less (about 0.5, 0.2 and 0.1 of it for T = 4, 5 and 6).

    Args:
        T: How many branches are fused at once.
        eps: ε of the fusion.
        variance: Of the pre-activations of the ReLU layer that is replaced.
    """
    if T == 1:
        return math.sqrt(variance)
    if T > 3:
        return response_spread(3, eps ** (3 / T), variance)
    target = variance * (1 - 1 / math.pi) / 2  # the variance of relu(n), n ~ N(0, variance)
    t = np.linspace(-9.0, 1.9, 48)  # log of a half-normal response: smooth, so that few points are exact
    one = np.exp(t - np.exp(2 * t) / 2)
    density, product = one / one.sum(), np.exp(t)
    joint = density
    for _ in range(T - 1):
        joint, product = np.multiply.outer(joint, density), np.multiply.outer(product, np.exp(t))
    alive = 0.5**T
    dead: float = eps ** (1 / T)

    def excess(spread: float) -> float:
        z = (product * spread**T + eps) ** (1 / T)
        mean = alive * float((joint * z).sum()) + (1 - alive) * dead
        square = alive * float((joint * z * z).sum()) + (1 - alive) * dead**2
        return square - mean**2 - target

    low, high = 0.0, 64.0 * math.sqrt(variance)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return (low + high) / 2


def _mean_square(activation: nn.Module | None) -> float:
    """E[a(n)²] of an activation a for n ~ N(0, 1), over a grid of quantiles; 1 without one."""
    if activation is None:
        return 1.0
    like: Tensor = next(activation.parameters(), torch.empty(0, device="cpu", dtype=torch.float32))
    if like.is_meta:
        return 1.0  # nothing to measure yet; reset_parameters() after materialising does
    with torch.no_grad():
        quantiles = torch.linspace(0.5 / 1024, 1 - 0.5 / 1024, 1024, device="cpu", dtype=torch.float32)
        response = activation((math.sqrt(2) * torch.erfinv(2 * quantiles - 1)).to(like))
        return max(float(response.float().square().mean()), 1e-6)
