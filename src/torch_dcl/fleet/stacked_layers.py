"""Stacked layers: E layers of one class, one from each network, as one module over ``[E, B, ...]``.

A stacked layer has the parameters and buffers of the plain one under the same names, with the networks as a first
dimension, so that row i of a stack's state is the state of network i. `register_stacked` adds further classes.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_dcl.fleet import operations
from torch_dcl.layers import DCLConv2d, DCLLinear
from torch_dcl.models._quick import QuickConv2d, QuickResponseNorm
from torch_dcl.models.controls import SummedLinear
from torch_dcl.models.power_mean import PowerMeanLinear, bounded, fuse_power_mean
from torch_dcl.models.rivals import GatedLinear, SortLinear

__all__ = ["StackedLayer", "build_stacked", "is_registered", "register_stacked"]

Build = Callable[[Sequence[Any]], nn.Module]

_BUILDERS: dict[type[nn.Module], Build] = {}


def register_stacked(kind: type[nn.Module], build: Build) -> None:
    """Register how layers of a class are stacked.

    ::

        class StackedScale(StackedLayer):
            def forward(self, x):                       # x is [E, B, ...]
                return x * self.factor[:, None, None]   # factor is [E, features]

        register_stacked(Scale, StackedScale)

    Args:
        kind: The class of the plain layer. Subclasses are not included: they may compute something else.
        build: Called with the E plain layers, one from each network; returns the stacked module. Its parameters and
            buffers must have their names in the plain layer, as in a `StackedLayer`. If it has a method
            ``advance(seed, step)``, it is called at the start of every step, with int64 ``[E]`` and the step's number.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise TypeError(f"register_stacked needs the class of a layer, got {kind!r}")
    _BUILDERS[kind] = build


def is_registered(layer: nn.Module) -> bool:
    """Whether layers of this class can be stacked."""
    return type(layer) in _BUILDERS


def build_stacked(layers: Sequence[nn.Module], name: str) -> nn.Module:
    """Stack layers of a registered class."""
    kind = type(layers[0])
    if kind not in _BUILDERS:
        known = sorted(known.__name__ for known in _BUILDERS)
        raise TypeError(
            f"layer {name!r} is a {kind.__name__}, which is not registered for stacking; "
            f"call register_stacked({kind.__name__}, build) first. Registered: {', '.join(known)}"
        )
    return _BUILDERS[kind](layers)


class StackedLayer(nn.Module):
    """Base class of stacked layers: stacks the parameters and buffers of the plain layers under their names.

    Args:
        layers: The plain layers, one from each network. The first one is available as ``plain`` for its settings; it is
            not a submodule.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        object.__setattr__(self, "plain", layers[0])
        for name, parameter in layers[0].named_parameters(recurse=False):
            values = torch.stack([getattr(layer, name).detach() for layer in layers])
            self.register_parameter(name, nn.Parameter(values, requires_grad=parameter.requires_grad))
        for name, _ in layers[0].named_buffers(recurse=False):
            keep = name not in layers[0]._non_persistent_buffers_set
            self.register_buffer(name, torch.stack([getattr(layer, name) for layer in layers]), persistent=keep)

    plain: Any
    lowers = False
    """Whether the forward pass reads its parameters through `operations.lowered`, and so can use low copies."""


class _Each(StackedLayer):
    """A layer without parameters that treats every image alike: networks and images are one batch."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.plain(x.flatten(0, 1))
        return y.view(*x.shape[:2], *y.shape[1:])


class _Elementwise(StackedLayer):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.plain(x)
        return y


class _Flatten(StackedLayer):
    def __init__(self, layers: Sequence[nn.Flatten]) -> None:
        super().__init__(layers)
        if layers[0].start_dim < 1:
            raise ValueError("nn.Flatten over the batch cannot be stacked; use start_dim=1")

    def forward(self, x: Tensor) -> Tensor:
        end = self.plain.end_dim
        return x.flatten(self.plain.start_dim + 1, end if end < 0 else end + 1)


class StackedLinear(StackedLayer):
    """Linear layers as one batched product."""

    lowers = True
    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """``[E, B, ..., K]`` to ``[E, B, ..., N]``."""
        y = operations.linear(x.flatten(1, -2), self.weight, getattr(self, "bias", None))
        return y.view(*x.shape[:-1], -1)


class StackedConv2d(StackedLayer):
    """Convolutions; on a GPU those with stride 1, without dilation and groups, run as our kernels.

    The stack sets ``pool`` and ``relu`` where 2 × 2 max pooling and a ReLU follow: one kernel computes all three.
    """

    lowers = True
    weight: Tensor
    bias: Tensor | None

    def __init__(self, layers: Sequence[nn.Conv2d]) -> None:
        super().__init__(layers)
        self.pool, self.relu = 1, False

    @property
    def simple(self) -> bool:
        """Whether `operations.conv` supports it."""
        plain = self.plain
        return bool(plain.stride == (1, 1) and plain.dilation == (1, 1) and plain.groups == 1)

    def forward(self, x: Tensor) -> Tensor:
        """``[E, B, C, H, W]`` to ``[E, B, N, H', W']``."""
        plain, bias = self.plain, getattr(self, "bias", None)
        E, B = x.shape[:2]
        if self.simple:
            return operations.conv(self._padded(x), self.weight, bias, pool=self.pool, relu=self.relu)
        weight = operations.lowered(self.weight, x)
        bias = None if bias is None else operations.lowered(bias, x).flatten()
        grouped = self._padded(x).transpose(0, 1).flatten(1, 2)
        y = F.conv2d(grouped, weight.flatten(0, 1), bias, plain.stride, 0, plain.dilation, E * plain.groups)
        return y.view(B, E, -1, *y.shape[2:]).transpose(0, 1)

    def _padded(self, x: Tensor) -> Tensor:
        plain = self.plain
        if plain.padding == "valid" or not any(plain._reversed_padding_repeated_twice):
            return x
        mode = "constant" if plain.padding_mode == "zeros" else plain.padding_mode
        padded = F.pad(x.flatten(0, 1), plain._reversed_padding_repeated_twice, mode)
        return padded.view(*x.shape[:2], *padded.shape[1:])


class StackedBatchNorm(StackedLayer):
    """Batch norms, each with the statistics of its own network."""

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[E, B, C, ...]``."""
        plain, shape = self.plain, x.shape
        by_channel = x.transpose(0, 1).flatten(1, 2)
        mean, var = getattr(self, "running_mean", None), getattr(self, "running_var", None)
        use_batch = self.training or mean is None
        momentum = plain.momentum
        if self.training and mean is not None:
            self.num_batches_tracked += 1
            if momentum is None:
                momentum = 1 / int(self.num_batches_tracked[0])
        flat = [None if t is None else t.flatten() for t in (mean, var, getattr(self, "weight", None))]
        bias = getattr(self, "bias", None)
        y = F.batch_norm(
            by_channel, flat[0], flat[1], flat[2], None if bias is None else bias.flatten(),
            use_batch, momentum or 0.0, plain.eps,
        )  # fmt: skip
        return y.view(shape[1], shape[0], *shape[2:]).transpose(0, 1)


class StackedDropout(StackedLayer):
    """Dropout whose mask is a function of each network's seed, the layer and the step."""

    def __init__(self, layers: Sequence[nn.Dropout]) -> None:
        super().__init__(layers)
        self.layer = 0  # set by the stack: a hash of the layer's name
        self.drawn_from: tuple[Tensor, Tensor] | None = None

    def advance(self, seed: Tensor, step: Tensor) -> None:
        """Set the seeds and the step; they are read when the mask is drawn."""
        self.drawn_from = (seed, step)

    def forward(self, x: Tensor) -> Tensor:
        """Drop and scale in training; in evaluation do nothing."""
        p = self.plain.p
        if not self.training or p == 0:
            return x
        if self.drawn_from is None:
            raise RuntimeError("dropout of a stack needs seeds and a step: call stack.advance(seed, step) first")
        seed, step = self.drawn_from
        return operations.dropout(x, seed, self.layer, step, p)


class StackedFusion(StackedLayer):
    """Stage 2 of stacked DCL layers, channels last: ``[E, B, ΣM]`` to ``[E, B, K2]``."""

    lowers = True
    weight: Tensor
    bias: Tensor | None
    key: Tensor
    active: Tensor

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__(layers)
        self.layer = 0
        norms = [layer.norm for layer in layers]
        self.norm = None if norms[0] is None else build_stacked(norms, "fusion.norm")

    def advance(self, seed: Tensor, step: Tensor) -> None:
        """Draw the active branches of a step, as `torch_dcl.advance_branches_` does in a plain network."""
        if self.plain.strategy == "stochastic":
            operations.advance_(self, seed, self.layer, step, self.plain.branches)

    def respond(self, y: Tensor) -> Tensor:
        """All responses ``[E, T, B, K2]`` before the ReLU."""
        pre, bias = self._project(y)
        return pre if bias is None else pre + operations.lowered(bias, pre)[:, :, None]

    def _project(self, y: Tensor) -> tuple[Tensor, Tensor | None]:
        """All responses, and the biases that are not added yet."""
        plain, bias = self.plain, getattr(self, "bias", None)
        if len(set(plain.widths)) == 1:
            pre = operations.project(y, self.weight, plain.branches)
        else:
            widths = list(plain.widths)
            W = operations.lowered(self.weight, y)
            parts = zip(torch.split(y, widths, -1), torch.split(W, widths, 1), strict=True)
            pre = torch.stack([torch.bmm(y_t, W_t) for y_t, W_t in parts], 1)
        if self.norm is not None:
            if bias is not None:
                pre, bias = pre + operations.lowered(bias, pre)[:, :, None], None
            normed = self.norm(pre.transpose(1, 2).flatten(2))
            pre = normed.unflatten(2, (plain.branches, -1)).transpose(1, 2).contiguous()
        return pre, bias

    def forward(self, y: Tensor) -> Tensor:
        """Project, rectify, fuse."""
        pre, bias = self._project(y)
        stochastic = self.plain.strategy == "stochastic"
        active = self.active if stochastic and self.training else None
        return operations.fuse(pre, bias, self.plain.eps, active=active, pairs=stochastic and not self.training)


class _StackedDCL(StackedLayer):
    """Stage 1 of DCL layers, and the fusion of stage 2."""

    kind: ClassVar[type[StackedLayer]]

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__(layers)
        self.branch = self.kind([layer.branch for layer in layers])
        self.fusion = StackedFusion([layer.fusion for layer in layers])
        activations = [layer.branch_activation for layer in layers]
        has_none = activations[0] is None
        self.branch_activation = None if has_none else build_stacked(activations, "branch_activation")

    def branches(self, x: Tensor) -> Tensor:
        """The outputs of all branches."""
        y: Tensor = self.branch(x)
        return y if self.branch_activation is None else self.branch_activation(y)


class StackedDCLLinear(_StackedDCL):
    """DCL linear layers."""

    kind = StackedLinear

    def forward(self, x: Tensor) -> Tensor:
        """``[E, B, ..., K1]`` to ``[E, B, ..., K2]``."""
        return self._fused(self.branches(x).flatten(1, -2)).view(*x.shape[:-1], -1)

    def _fused(self, y: Tensor) -> Tensor:
        z: Tensor = self.fusion(y)
        return z


class StackedSummed(StackedDCLLinear):
    """Branches averaged instead of multiplied."""

    def _fused(self, y: Tensor) -> Tensor:
        return F.relu(self.fusion.respond(y)).mean(1)


class StackedProduct(StackedDCLLinear):
    """Branches fused as a rival of DCL does it, element by element."""

    def _fused(self, y: Tensor) -> Tensor:
        pre = self.fusion.respond(y)
        wide = torch.promote_types(pre.dtype, torch.float32)
        z: Tensor = self.plain._fused([response.to(wide) for response in pre.unbind(1)])
        return z.to(pre.dtype)


class StackedPowerMean(StackedDCLLinear):
    """Two branches fused by a power mean, each network with an exponent of its own."""

    raw_exponent: Tensor

    def _fused(self, y: Tensor) -> Tensor:
        pre = self.fusion.respond(y)
        return fuse_power_mean(pre[:, 0], pre[:, 1], bounded(self.raw_exponent)[..., None])


class StackedDCLConv2d(_StackedDCL):
    """DCL convolutions: stage 1 a convolution of ΣM filters, stage 2 the same product at every position."""

    kind = StackedConv2d

    def forward(self, x: Tensor) -> Tensor:
        """``[E, B, C, H, W]`` to ``[E, B, K2, H', W']``."""
        y = self.branches(x)
        E, B, width, H, W = y.shape
        z: Tensor = self.fusion(y.permute(0, 1, 3, 4, 2).reshape(E, B * H * W, width))
        return z.view(E, B, H, W, -1).permute(0, 1, 4, 2, 3)


_KINDS: dict[Build, tuple[type[nn.Module], ...]] = {
    _Elementwise: (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Identity),
    _Each: (
        nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.LocalResponseNorm, QuickResponseNorm,
    ),
    _Flatten: (nn.Flatten,),
    StackedBatchNorm: (nn.BatchNorm1d, nn.BatchNorm2d),
    StackedDropout: (nn.Dropout,),
    StackedLinear: (nn.Linear,),
    StackedConv2d: (nn.Conv2d, QuickConv2d),
    StackedDCLLinear: (DCLLinear,),
    StackedDCLConv2d: (DCLConv2d,),
    StackedSummed: (SummedLinear,),
    StackedPowerMean: (PowerMeanLinear,),
    StackedProduct: (GatedLinear, SortLinear),
}  # fmt: skip
for _build, _kinds in _KINDS.items():
    for _kind in _kinds:
        register_stacked(_kind, _build)
