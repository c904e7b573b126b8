"""One loop, which drives a network or a stack of networks (a fleet)."""

from torch_dcl.training.fleet import Evaluation, Fleet, Member
from torch_dcl.training.schedule import Schedule
from torch_dcl.training.stack import Stack
from torch_dcl.training.stacked import StackedLayer, register_stacked

__all__ = ["Evaluation", "Fleet", "Member", "Schedule", "Stack", "StackedLayer", "register_stacked"]
