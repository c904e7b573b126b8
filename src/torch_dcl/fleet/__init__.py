"""One loop, which drives a network or a stack of networks (a fleet)."""

from torch_dcl.fleet.abreast import train_abreast
from torch_dcl.fleet.beside import SideBySide
from torch_dcl.fleet.fleet import Fleet
from torch_dcl.fleet.inputs import Inputs
from torch_dcl.fleet.member import Evaluation, Member
from torch_dcl.fleet.schedule import Schedule
from torch_dcl.fleet.stack import Stack
from torch_dcl.fleet.stacked import StackedLayer, register_stacked

__all__ = [
    "Evaluation", "Fleet", "Inputs", "Member", "Schedule", "SideBySide", "Stack", "StackedLayer", "register_stacked",
    "train_abreast",
]  # fmt: skip
