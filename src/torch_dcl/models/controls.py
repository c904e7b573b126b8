"""Control layers with the weights of a DCL layer, which show what the product contributes."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_dcl.layers import DCLLinear, Responses
from torch_dcl.module import _mean_square

__all__ = ["SummedLinear", "start_responses_"]


@torch.no_grad()
def start_responses_(layer: DCLLinear, spread: float) -> None:
    """Give the responses of all branches this standard deviation at the start, and biases of 0."""
    for W, M in zip(torch.split(layer.fusion.weight, list(layer.widths)), layer.widths, strict=True):
        bound = math.sqrt(3 / (M * _mean_square(layer.branch_activation))) * spread
        nn.init.uniform_(W, -bound, bound)
    if layer.fusion.bias is not None:
        nn.init.zeros_(layer.fusion.bias)


class SummedLinear(DCLLinear):
    """The branches of a DCL layer with their responses averaged: ``z = (1/T) · Σ_t relu(W_t·θ_t·x + b_t)``.

    Weights, shapes and state-dict keys are those of :class:`~torch_dcl.DCLLinear` with the deterministic strategy; ε
    plays no part.

    Args:
        in_features: K1.
        out_features: K2.
        **arguments: As for `DCLLinear`.

    Raises:
        ValueError: The stochastic strategy, which a sum does not have.
    """

    def __init__(self, in_features: int, out_features: int, **arguments: Any) -> None:
        if arguments.get("strategy", "deterministic") != "deterministic":
            raise ValueError("SummedLinear sums all branches; use the deterministic strategy")
        super().__init__(in_features, out_features, **arguments)

    def reset_parameters(self) -> None:
        """Initialise as the DCL layer, but with the variance that the mean of T responses needs."""
        super().reset_parameters()
        start_responses_(self, math.sqrt(self.branches / 3))

    def forward(self, x: Tensor) -> Tensor:
        """Map the input to the mean response."""
        return self.responses(x).z

    def responses(self, x: Tensor) -> Responses:
        """All branches y, their responses v and the mean z."""
        y = self._activate(self.branch(x))
        v = tuple(F.relu(pre) for pre in self.fusion.respond(y))
        return Responses(self.fusion.split(y), v, torch.stack(v).mean(0))
