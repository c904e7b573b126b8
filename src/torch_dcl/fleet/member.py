"""The members of a fleet: their settings, their results, and checks of their networks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from torch_dcl.fleet.schedule import Schedule

__all__ = ["Evaluation", "History", "Member", "check_networks"]


@dataclass(frozen=True)
class Member:
    """The settings of one network in a fleet.

    Args:
        name: Its name in reports.
        data: The name of its training data.
        seed: The seed of its order, augmentation, dropout and branches.
        lr: Its peak learning rate.
        schedule: The schedule of its learning rate. After its end the network is not updated, while others still are.
        weight_decay: Factor of the L2 penalty.
        clip: Maximum norm of its gradient.
    """

    name: str
    data: str
    seed: int
    lr: float
    schedule: Schedule
    weight_decay: float = 5e-4
    clip: float = math.inf

    def __post_init__(self) -> None:
        if not self.lr > 0 or not math.isfinite(self.lr):
            raise ValueError(f"the learning rate of {self.name!r} must be a positive number, got {self.lr}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"the weight decay of {self.name!r} must not be negative, got {self.weight_decay}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"the seed of {self.name!r} must be a whole number, got {self.seed!r}")
        if not self.clip > 0:
            raise ValueError(f"clip of {self.name!r} must be positive, got {self.clip}")


@dataclass(frozen=True)
class Evaluation:
    """Predictions, errors and losses of a fleet on labelled data."""

    predictions: Tensor
    """``[E, N]``: the class that each network predicts for each image."""
    errors: Tensor
    """``[E]``: error of each network in per cent."""
    losses: Tensor
    """``[E]``: mean cross-entropy of each network."""


@dataclass
class History:
    """Training losses by epoch, and the networks that stopped."""

    train_loss: list[list[float]] = field(default_factory=list)
    """By epoch, by network: the mean loss over the steps of the epoch, dropout included; NaN once a network stopped."""
    stopped: dict[int, int] = field(default_factory=dict)
    """Networks whose loss, gradient or update was not finite, with the epoch (from 0) in which they stopped."""


def check_networks(networks: Sequence[nn.Module], members: Sequence[Member]) -> None:
    """Refuse networks that a fleet cannot train together."""
    is_trained: dict[str, bool] = {}
    for member, network in zip(members, networks, strict=True):
        if not isinstance(network, nn.Module):
            raise TypeError(f"the network of {member.name!r} must be a torch module, got {type(network).__name__}")
        flags = {name: parameter.requires_grad for name, parameter in network.named_parameters()}
        if not flags:
            raise ValueError(f"the network of {member.name!r} has no parameters, so there is nothing to train")
        # A stacked parameter has one requires_grad flag for all networks.
        differ = next((name for name, flag in flags.items() if is_trained.setdefault(name, flag) != flag), None)
        if differ is not None:
            frozen, other = (members[0], member) if flags[differ] else (member, members[0])
            raise ValueError(
                f"{differ!r} is frozen in the network of {frozen.name!r} and not in that of {other.name!r}; freeze it "
                "in all networks of a fleet or in none"
            )
