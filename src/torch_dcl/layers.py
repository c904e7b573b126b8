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
``fusion.norm.*``        ``[T·K2]``, usually        the normalisation of all responses, with ``norm_layer``
``fusion.key``           ``[3]`` int64              seed, layer, step of the draw (stochastic strategy)
``fusion.active``        ``[2]`` int64              the two branches drawn for this step (stochastic strategy)
``fusion._extra_state``  ``[]`` float64             ε, on the CPU; a state dict without it leaves ε as it is
=======================  =========================  =======================================================

Biases, and only biases, end in ``bias``.
"""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_dcl.fusion import ConceptFusion, Strategy, branch_widths, check_factory, reset
from torch_dcl.kernels.dispatch import Stage, fits, fuse_branches, fuse_pairs, linear, may_run, turn, turns
from torch_dcl.norms import called_plainly
from torch_dcl.programs import recorded, replayed

__all__ = ["DCLConv1d", "DCLConv2d", "DCLConv3d", "DCLLinear", "Responses"]

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


class Responses(NamedTuple):
    """What a DCL layer computes on the way: for looking inside."""

    y: tuple[Tensor, ...]
    """The T branches, ``M_t`` channels each."""
    v: tuple[Tensor, ...]
    """The T responses after ReLU, ``K2`` channels each."""
    z: Tensor
    """Their fusion: over all branches (deterministic), or the mean over all pairs (stochastic)."""


def _of_branch(name: str) -> property:
    """An attribute that all branches have in common: stage 1's, read only."""
    return property(lambda layer: getattr(layer.branch, name), doc=f"``{name}`` of stage 1, as in the plain layer.")


class _DCL(nn.Module):
    """What the linear and the convolutional layers share: stage 1 in ``branch``, stage 2 in ``fusion``."""

    branch: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
    fusion: ConceptFusion
    branch_activation: nn.Module | None
    marks_output = False
    """Whether z is marked for a ReLU behind the layer that serves other places too; see `passes_relu`."""

    def reset_parameters(self) -> None:
        """Initialise both stages; see :meth:`ConceptFusion.reset_parameters`."""
        weight, bias = self.branch.weight, self.branch.bias
        bound = math.sqrt(3 / weight[0].numel())
        nn.init.uniform_(weight, -bound, bound)
        if bias is not None:
            nn.init.zeros_(bias)
        reset(self.branch_activation)
        self.fusion.reset_parameters(_mean_square(self.branch_activation))

    def forward(self, x: Tensor) -> Tensor:
        """Map the input to z."""
        z = self._compute(x)
        if self.marks_output:
            z._dcl_positive = True  # type: ignore[attr-defined]
        return z

    def _compute(self, x: Tensor) -> Tensor:
        compiling = torch.compiler.is_compiling()
        if not compiling and (z := replayed(self, x)) is not None:
            return z
        fusion = self.fusion
        pair = fusion.strategy == "stochastic" and self.training
        if pair:
            _warn_if_nobody_advances(fusion)
            pair = fusion.gathers
        stage = self._plain_stage() if may_run(x) else None
        if stage is not None and (pair or fusion.strategy == "deterministic" or not self.training):
            theta = fusion.gather(self.branch.weight) if pair else self.branch.weight
            compute = functools.partial(fusion.with_stage, x, theta, stage)
            z = compute() if compiling or pair else recorded(self, x, compute)
            if z is not None:
                return z
        if pair:
            weight, bias = self.branch.weight, self.branch.bias
            y = self._run_branch(x, fusion.gather(weight), None if bias is None else fusion.gather(bias))
            return fusion.forward_pair(self._activate(y))
        return fusion(self._activate(self._construct(x)))  # type: ignore[no-any-return]

    def _plain_stage(self) -> Stage | None:
        """Stage 1 beside its filters, where calling the modules of both stages does no more than their arithmetic."""
        branch, fusion = self.branch, self.fusion
        if self.branch_activation is not None or branch.bias is not None or type(fusion) is not ConceptFusion:
            return None
        if not (called_plainly(branch) and called_plainly(fusion)):
            return None
        if isinstance(branch, nn.Linear):
            return Stage(0) if type(branch) is nn.Linear else None
        if type(branch) not in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
            return None
        if branch.padding_mode != "zeros" or isinstance(branch.padding, str):
            return None
        return Stage(len(branch.kernel_size), branch.stride, branch.padding, branch.dilation)

    def responses(self, x: Tensor) -> Responses:
        """Look inside: all branches y, their responses v and the fusion z, whatever the training flag says."""
        y = self._activate(self.branch(x))
        pre = self.fusion.respond(y)
        fuse = fuse_branches if self.fusion.strategy == "deterministic" else fuse_pairs
        return Responses(self.fusion.split(y), tuple(F.relu(p) for p in pre), fuse(pre, self.fusion.eps))

    def __prepare_scriptable__(self) -> Self:
        """Asked by torch.jit.script before it reads the source, which it could not."""
        raise TypeError(
            f"a {type(self).__name__} cannot be scripted; export the network with torch.export or torch.onnx.export, "
            "or trace it with torch.jit.trace"
        )

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

    @property
    def weight(self) -> Tensor:
        """θ, which is ``branch.weight``: of the plain layer's dtype, device and shape, but with ΣM filters, not K2."""
        return self.branch.weight

    @property
    def bias(self) -> Tensor | None:
        """``fusion.bias``, one bias a branch; None where the layer has no bias."""
        return self.fusion.bias

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As torch does it, but nothing takes the place of θ or of the biases, as pruning would."""
        if name.startswith(("weight", "bias")):
            raise ValueError(
                f"{name!r} cannot become a parameter of a {type(self).__name__}: its weights are the submodules' "
                "branch.weight (θ) and fusion.weight (W), its biases fusion.bias; prune or parametrize those instead"
            )
        super().register_parameter(name, param)

    def _activate(self, y: Tensor) -> Tensor:
        return y if self.branch_activation is None else self.branch_activation(y)

    def _construct(self, x: Tensor) -> Tensor:
        """Stage 1: a call of ``branch``, unless that does no more than a product which can be had with more."""
        branch = self.branch
        if type(branch) is nn.Linear and called_plainly(branch):
            return linear(x, branch.weight, branch.bias, otherwise=branch)
        y: Tensor = branch(x)
        return y

    def _run_branch(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Stage 1 with these filters instead of its own."""
        if isinstance(self.branch, nn.Linear):
            return linear(x, weight, bias)
        y: Tensor = self.branch._conv_forward(x, weight, bias)
        return y


class DCLLinear(_DCL):
    """A linear layer with its ReLU, as T branches: ``z = (Π_t relu(W_t·θ_t·x + b_t) + ε)^(1/T)``.

    It stands for ``nn.Linear`` followed by ``nn.ReLU`` and takes its arguments first. The output is positive: at least
    ``ε^(1/T)``.

    Args:
        in_features: K1.
        out_features: K2.
        bias: Whether each branch's response has a bias.
        device: Where the parameters live.
        dtype: Of which type they are.
        branches: T, from 1 to 8. T = 1 is the low-rank layer ``relu(W·θ·x + b) + ε``: a comparison for free
            (with ``eps=0`` exactly the low-rank layer).
        ratio: Filters of one branch as a fraction of the output channels, rounded to ``round_to``.
        width: The exact number of filters M(t) instead: one number, or one for each branch.
        round_to: What ``ratio`` is rounded to a multiple of; matrix units like 8.
        strategy: "deterministic" fuses all branches. "stochastic" (T > 2) fuses one random pair of branches a
            training step and, in eval, takes the mean over all pairs; see :mod:`torch_dcl.stochastic` for who
            advances the step.
        eps: ε inside the root; None takes the paper's ``10^-T`` (``10^-2`` for the pairs of the stochastic strategy).
        norm_layer: Called with T·K2, makes a normalisation of the responses of all branches before their ReLU, for
            example ``nn.BatchNorm1d``.
        branch_activation: Makes an activation after stage 1, for example ``nn.ReLU``. The paper's definition has
            none, the last line of its derivation shows one. With it, stage 1 has a bias.

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
        bias: bool = True,
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
        _check_channels(in_features=in_features, out_features=out_features)
        _check_bias(bias)
        widths = branch_widths(out_features, branches=branches, ratio=ratio, width=width, round_to=round_to)
        self.in_features, self.out_features = in_features, out_features
        self.fusion = ConceptFusion(
            widths, out_features, spatial=0, strategy=strategy, eps=eps, norm_layer=norm_layer, bias=bias,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.branch_activation = None
        check_factory("branch_activation", branch_activation, "nn.ReLU")
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
    kernel_size, stride, padding, dilation = map(_of_branch, ("kernel_size", "stride", "padding", "dilation"))
    groups, padding_mode = map(_of_branch, ("groups", "padding_mode"))
    transposed, output_padding = map(_of_branch, ("transposed", "output_padding"))

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
        _check_bias(bias)
        sizes = (kernel_size,) if isinstance(kernel_size, int) else tuple(kernel_size)
        if any(size < 1 for size in sizes):
            raise ValueError(f"kernel_size must be at least 1 in every direction, got {kernel_size!r}")
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
        check_factory("branch_activation", branch_activation, "nn.ReLU")
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

    def forward(self, x: Tensor) -> Tensor:
        """Map the input to z, which lies in memory as ``nn.Conv2d`` would give it."""
        if self._turns(x):
            return turn(super().forward(turn(x, last=True, cast=True)), last=False)
        return super().forward(x)

    def _turns(self, x: Tensor) -> bool:
        """Whether a batch of images is worth turning to channels_last, and z back: kernels and convolutions want it so.

        A 1×1 convolution does not care, and its few outputs are turned instead of all its inputs (`_project_and_fuse`).
        """
        branch = self.branch
        assert not isinstance(branch, nn.Linear)
        if self._spatial != 2 or x.dim() != 4 or not fits((x, branch.weight), matched=False):
            return False
        if x.is_contiguous(memory_format=torch.channels_last):
            return False
        if not branch.weight.is_contiguous() or torch.version.hip is not None:
            return False
        if max(branch.kernel_size) == 1 or branch.padding_mode != "zeros" or not self.fusion.in_kernels:
            return False
        return turns(x, cast=True)


class DCLConv1d(_DCLConv):
    """A 1-d convolution with its ReLU, as T branches fused at each position; see :class:`DCLConv2d`."""

    _plain, _spatial = nn.Conv1d, 1


class DCLConv2d(_DCLConv):
    """A 2-d convolution with its ReLU, as T branches fused at each position.

    It stands for ``nn.Conv2d`` followed by ``nn.ReLU`` and takes every argument of ``nn.Conv2d``: stride, padding
    (numbers, "same", "valid"), dilation, bias, padding_mode, device, dtype; ``groups`` other than 1 is refused. All
    branches share kernel size, stride, padding and dilation, and stage 1 is one convolution of ΣM filters. The
    arguments after ``dtype`` are those of :class:`DCLLinear`. The attributes are those of ``nn.Conv2d``; ``weight``
    is θ, and ``bias`` has one row a branch.

    Shape:
        Input ``[N, in_channels, H, W]`` or without N, output as ``nn.Conv2d`` gives it.
    """

    _plain, _spatial = nn.Conv2d, 2


class DCLConv3d(_DCLConv):
    """A 3-d convolution with its ReLU, as T branches fused at each position; see :class:`DCLConv2d`."""

    _plain, _spatial = nn.Conv3d, 3


def passes_relu(z: Tensor) -> bool:
    """Whether z comes straight from a layer that marked it as positive. The mark is taken away: it is for one ReLU."""
    if not getattr(z, "_dcl_positive", False):
        return False
    z._dcl_positive = False  # type: ignore[attr-defined]
    return True


def _check_channels(**channels: int) -> None:
    for name, value in channels.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def _check_bias(bias: object) -> None:
    if bias not in (True, False, None):
        raise TypeError(f"bias must be True or False, got {bias!r}; DCL's own arguments go by name, as in branches=3")


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
