"""Fleets: many networks of one architecture trained as one program. A single network is a fleet of one."""

from torch_dcl.fleet.augmentation import Inputs
from torch_dcl.fleet.concurrent import train_concurrently
from torch_dcl.fleet.fleet import Fleet
from torch_dcl.fleet.member import Evaluation, Member
from torch_dcl.fleet.schedule import Schedule
from torch_dcl.fleet.stacked_layers import StackedLayer, register_stacked
from torch_dcl.fleet.stacked_network import Stack
from torch_dcl.fleet.unstacked import Unstacked

__all__ = [
    "Evaluation", "Fleet", "Inputs", "Member", "Schedule", "Stack", "StackedLayer", "Unstacked", "register_stacked",
    "train_concurrently",
]  # fmt: skip
