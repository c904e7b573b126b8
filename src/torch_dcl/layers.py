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

from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from torch_dcl.functional import transforms
from torch_dcl.fusion import ConceptFusion, Strategy, branch_widths
from torch_dcl.kernels.dispatch import kernels_accept, should_transpose
from torch_dcl.module import _DCL, Responses
from torch_dcl.norms import make_part

__all__ = ["DCLConv1d", "DCLConv2d", "DCLConv3d", "DCLLinear", "Responses"]

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


def _of_branch(name: str) -> property:
    """A read-only attribute of stage 1, which all branches share."""
    return property(lambda layer: getattr(layer.branch, name), doc=f"``{name}`` of stage 1, as in the plain layer.")


class DCLLinear(_DCL):
    """A linear layer with its ReLU, as T branches: ``z = (Π_t relu(W_t·θ_t·x + b_t) + ε)^(1/T)``.

    It replaces ``nn.Linear`` followed by ``nn.ReLU`` and takes the arguments of ``nn.Linear`` first. The output is at
    least ``ε^(1/T)``.

    Args:
        in_features: K1.
        out_features: K2.
        bias: Whether each branch's response has a bias.
        device: Where the parameters live.
        dtype: Of which type they are.
        branches: T, from 1 to 8. T = 1 is the low-rank layer ``relu(W·θ·x + b) + ε``, exactly so with ``eps=0``.
        ratio: Filters of one branch as a fraction of the output channels, rounded to ``round_to``.
        width: The exact number of filters M(t) instead: one number, or one for each branch.
        round_to: The number of filters from ``ratio`` is rounded to a multiple of this; tensor cores prefer 8.
        strategy: "deterministic" fuses all branches. "stochastic" (T > 2) fuses one random pair of branches a
            training step and, in eval, takes the mean over all pairs; see :mod:`torch_dcl.stochastic` for how to
            advance the step.
        eps: ε inside the root; None takes the paper's ``10^-T`` (``10^-2`` for the pairs of the stochastic strategy).
        norm_layer: Called with T·K2, returns the norm of the pre-activations of all branches, for example
            ``nn.BatchNorm1d``.
        branch_activation: Returns an activation after stage 1, for example ``nn.ReLU``. The paper's definition has
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
        self.branch_activation = make_part(
            "branch_activation", branch_activation, "nn.ReLU", device=device, dtype=dtype
        )
        self.branch = nn.Linear(
            in_features, sum(widths), bias=bias and branch_activation is not None, device=device, dtype=dtype
        )
        self.reset_parameters()

    @classmethod
    def like(cls, layer: nn.Linear, **arguments: Any) -> Self:
        """A DCL layer of the sizes, bias, dtype, device and training flag of ``layer``, freshly initialised.

        Args:
            layer: The layer to replace.
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
        self.branch_activation = make_part(
            "branch_activation", branch_activation, "nn.ReLU", device=device, dtype=dtype
        )
        self.branch = self._plain(
            in_channels, sum(widths), kernel_size, stride, padding, dilation, 1,  # type: ignore[arg-type]
            bias and branch_activation is not None, padding_mode, device, dtype,
        )  # fmt: skip
        self.reset_parameters()

    @classmethod
    def like(cls, layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, **arguments: Any) -> Self:
        """A DCL layer of the geometry, bias, dtype, device and training flag of ``layer``, freshly initialised.

        Args:
            layer: The layer to replace.
            **arguments: Arguments of DCL's own (``branches``, ``width``, ``strategy``, …), or ``device``.
        """
        given = {
            "stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation, "groups": layer.groups,
            "bias": layer.bias is not None, "padding_mode": layer.padding_mode,
            "device": layer.weight.device, "dtype": layer.weight.dtype,
        }  # fmt: skip
        new = cls(layer.in_channels, layer.out_channels, layer.kernel_size, **{**given, **arguments})
        return new.train(layer.training)

    def _should_transpose(self, x: Tensor) -> bool:
        """Whether to transpose a batch of images to channels_last, in which kernels and convolutions are faster.

        A 1×1 convolution is equally fast in both layouts; its few outputs are transposed instead of its inputs.
        """
        if self.fusion.spatial != 2 or x.dim() != 4:
            return False
        compiling = torch.compiler.is_compiling()
        if compiling and (transforms() or x.is_contiguous(memory_format=torch.channels_last)):
            return False  # checked first: a compiler guards every later lookup in each call
        branch = self.branch
        assert not isinstance(branch, nn.Linear)
        if not kernels_accept((x, branch.weight), matched=False):
            return False
        if not compiling and x.is_contiguous(memory_format=torch.channels_last):
            return False
        if not branch.weight.is_contiguous() or torch.version.hip is not None:
            return False
        if max(branch.kernel_size) == 1 or branch.padding_mode != "zeros" or not self.fusion.in_kernels:
            return False
        return should_transpose(x, cast=True)


class DCLConv1d(_DCLConv):
    """A 1-d convolution with its ReLU, as T branches fused at each position; see :class:`DCLConv2d`."""

    _plain, _spatial = nn.Conv1d, 1


class DCLConv2d(_DCLConv):
    """A 2-d convolution with its ReLU, as T branches fused at each position.

    It replaces ``nn.Conv2d`` followed by ``nn.ReLU`` and takes every argument of ``nn.Conv2d``: stride, padding
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


def _check_channels(**channels: int) -> None:
    for name, value in channels.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def _check_bias(bias: object) -> None:
    if bias not in (True, False, None):
        raise TypeError(f"bias must be True or False, got {bias!r}; DCL's own arguments go by name, as in branches=3")
