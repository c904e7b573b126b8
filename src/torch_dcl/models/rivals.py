"""Layers that multiply branches in other ways than DCL, for comparison at equal weights."""

import abc
import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_dcl.functional import fuse_branches
from torch_dcl.layers import DCLLinear
from torch_dcl.models.bilinear import BilinearFusion
from torch_dcl.models.controls import start_responses_

__all__ = ["BilinearLinear", "GatedLinear", "SortLinear", "StarLinear"]

_TARGET = (1 - 1 / math.pi) / 6
"""The output variance of a ReLU layer whose pre-activations have variance 1/3, as torch's initialisation gives them."""


class _Product(DCLLinear, abc.ABC):
    """Base class: the branches and weights of a DCL layer with another fusion."""

    pair: ClassVar[str] = "two branches"
    """What it needs where it is for two branches alone."""

    def __init__(self, in_features: int, out_features: int, **arguments: Any) -> None:
        if arguments.get("strategy", "deterministic") != "deterministic":
            raise ValueError(f"{type(self).__name__} uses all branches; choose the deterministic strategy")
        super().__init__(in_features, out_features, **arguments)
        if self.pair and self.branches != 2:
            raise ValueError(f"{type(self).__name__} needs {self.pair}, got {self.branches}; pass branches=2")

    def reset_parameters(self) -> None:
        """Initialise to the output variance of the ReLU layer that is replaced, biases 0."""
        super().reset_parameters()
        start_responses_(self, self._spread())

    def forward(self, x: Tensor) -> Tensor:
        """Map the input to z."""
        pre = self.fusion.respond(self._activate(self.branch(x)))
        wide = torch.promote_types(pre[0].dtype, torch.float32)
        return self._fused([response.to(wide) for response in pre]).to(pre[0].dtype)

    @abc.abstractmethod
    def _spread(self) -> float:
        """The standard deviation of the responses at initialisation."""

    @abc.abstractmethod
    def _fused(self, pre: list[Tensor]) -> Tensor:
        """z from the responses before any ReLU, in float32 or wider."""


class StarLinear(_Product):
    """The product of the branches without the root, StarNet's star operation: ``z = Π_t relu(W_t·θ_t·x + b_t)``.

    Weights, shapes and state-dict keys are those of :class:`~torch_dcl.DCLLinear`; ε plays no part. Without the root z
    grows with the T-th power of the input.

    Args:
        in_features: K1.
        out_features: K2.
        **arguments: As for `DCLLinear`.

    Raises:
        ValueError: The stochastic strategy.
    """

    pair = ""

    def _spread(self) -> float:
        """The σ of n_t for which Π relu(n_t) has the target variance σ^2T · (2^-T − (2π)^-T)."""
        T = self.branches
        return float((_TARGET / (0.5**T - (2 * math.pi) ** -T)) ** (1 / (2 * T)))

    def _fused(self, pre: list[Tensor]) -> Tensor:
        z = F.relu(pre[0])
        for response in pre[1:]:
            z = z * F.relu(response)
        return z


class SortLinear(_Product):
    """The sum of two branches and the root of their product: ``z = v_1 + v_2 + √(v_1·v_2 + ε)``.

    The form of Wang et al., "SORT: Second-Order Response Transform for Visual Recognition", 2017, for two rectified
    branches ``v_t = relu(W_t·θ_t·x + b_t)``. Weights, shapes and state-dict keys are those of
    :class:`~torch_dcl.DCLLinear` with two branches.

    Args:
        in_features: K1.
        out_features: K2.
        **arguments: As for `DCLLinear`.

    Raises:
        ValueError: Not two branches, or the stochastic strategy.
    """

    def _spread(self) -> float:
        """The standard deviation of n_t for which z has the target variance, without ε."""
        half, one, more, two = (_rectified_moment(power) for power in (0.5, 1.0, 1.5, 2.0))
        root = one**2 - half**4  # the variance of √(v_1·v_2)
        return math.sqrt(_TARGET / (2 * (two - one**2) + root + 4 * (more * half - one * half**2)))

    def _fused(self, pre: list[Tensor]) -> Tensor:
        return F.relu(pre[0]) + F.relu(pre[1]) + fuse_branches(pre, self.fusion.eps)


def _rectified_moment(power: float) -> float:
    """The mean of relu(n)^power for a standard normal n."""
    return 2 ** (power / 2 - 1) * math.gamma((power + 1) / 2) / math.sqrt(math.pi)


class GatedLinear(_Product):
    """A gated linear unit of two branches: ``z = (W_1·θ_1·x + b_1) · σ(W_2·θ_2·x + b_2)``, without a ReLU after it.

    Weights, shapes and state-dict keys are those of :class:`~torch_dcl.DCLLinear` with two branches.

    Args:
        in_features: K1.
        out_features: K2.
        **arguments: As for `DCLLinear`.

    Raises:
        ValueError: Not two branches, or the stochastic strategy.
    """

    pair = "two branches, one of them the gate"

    def _spread(self) -> float:
        """The standard deviation of n_t for which n_1 · σ(n_2) has the target variance, with σ(n) ≈ 1/2 + n/4."""
        return math.sqrt(8 * (math.sqrt(1 / 16 + _TARGET / 4) - 1 / 4))

    def _fused(self, pre: list[Tensor]) -> Tensor:
        return pre[0] * torch.sigmoid(pre[1])


class BilinearLinear(nn.Module):
    """The bilinear form of two linear maps of m1 and m2 filters: ``z_k = Σ_ij U_ijk · (θ_1·x)_i · (θ_2·x)_j``.

    There is no root, no activation and no bias, and no ReLU after it. An output costs m1 · m2 weights, where DCL's
    costs m1 + m2.
    """

    def __init__(self, in_features: int, out_features: int, m1: int, m2: int) -> None:
        super().__init__()
        self.branch = nn.Linear(in_features, m1 + m2, bias=False)
        self.fusion = BilinearFusion(m1, m2, out_features)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise to the output variance of the ReLU layer that is replaced."""
        bound = math.sqrt(3 / self.branch.in_features)
        nn.init.uniform_(self.branch.weight, -bound, bound)
        self.fusion.reset_parameters()
        self.fusion.weight.mul_(math.sqrt(_TARGET))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, in_features]`` to ``[N, out_features]``."""
        y = self.branch(x)
        z: Tensor = self.fusion(y[:, : self.fusion.m1], y[:, self.fusion.m1 :])
        return z
