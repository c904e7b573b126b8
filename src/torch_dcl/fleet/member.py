"""What is a network's own in a fleet, what a fleet reports, and which networks it takes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from torch_dcl.fleet.schedule import Schedule

__all__ = ["Evaluation", "History", "Member", "check_networks"]


@dataclass(frozen=True)
class Member:
    """What is a network's own in a fleet.

    Args:
        name: How it is called in reports.
        data: The name of its data among those that the fleet is given.
        seed: What its order, dropout and branches are drawn from.
        lr: Its learning rate at the height of the schedule.
        schedule: How that goes over the training. A network whose schedule ends earlier than others' rests.
        weight_decay: L2 penalty.
        clip: The largest norm of its gradient; larger ones are scaled down.
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
    """What a fleet makes of labelled data."""

    predictions: Tensor
    """``[E, N]``: the class that each network chose for each image."""
    errors: Tensor
    """``[E]``: per cent of images that each network got wrong."""
    losses: Tensor
    """``[E]``: mean cross-entropy."""


@dataclass
class History:
    """What happened, epoch by epoch."""

    train_loss: list[list[float]] = field(default_factory=list)
    """By epoch, by network: the mean loss over the steps of the epoch, dropout included; NaN once a network stopped."""
    stopped: dict[int, int] = field(default_factory=dict)
    """Networks whose loss, gradient or update was not finite, with the epoch (from 0) in which they stopped."""


def check_networks(networks: Sequence[nn.Module], members: Sequence[Member]) -> None:
    """Refuse networks that a fleet cannot train together.

    Args:
        networks: One for each member.
        members: Whose they are.

    Raises:
        TypeError: One of them is not a network.
        ValueError: One of them has no parameters, or a parameter is frozen in some of them.
    """
    learns: dict[str, bool] = {}
    for member, network in zip(members, networks, strict=True):
        if not isinstance(network, nn.Module):
            raise TypeError(f"the network of {member.name!r} must be a torch module, got {type(network).__name__}")
        flags = {name: parameter.requires_grad for name, parameter in network.named_parameters()}
        if not flags:
            raise ValueError(f"the network of {member.name!r} has no parameters; a fleet is for networks that learn")
        # A parameter of a fleet has one flag for all networks.
        differ = next((name for name, flag in flags.items() if learns.setdefault(name, flag) != flag), None)
        if differ is not None:
            frozen, other = (members[0], member) if flags[differ] else (member, members[0])
            raise ValueError(
                f"{differ!r} is frozen in the network of {frozen.name!r} and not in that of {other.name!r}; freeze it "
                "in all networks of a fleet or in none"
            )
