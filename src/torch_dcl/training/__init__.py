"""One loop, which drives a network or a stack of networks (a fleet)."""

from torch_dcl.training.abreast import train_abreast
from torch_dcl.training.beside import SideBySide
from torch_dcl.training.fleet import Fleet
from torch_dcl.training.inputs import Inputs
from torch_dcl.training.member import Evaluation, Member
from torch_dcl.training.schedule import Schedule
from torch_dcl.training.stack import Stack
from torch_dcl.training.stacked import StackedLayer, register_stacked

__all__ = [
    "Evaluation", "Fleet", "Inputs", "Member", "Schedule", "SideBySide", "Stack", "StackedLayer", "register_stacked",
    "train_abreast",
]  # fmt: skip
