"""torch-dcl: Deep Collaborative Learning layers for PyTorch, and the tools to put them into a network."""

from torch_dcl.convert import Plan, convert_, load_model, plan, save_model
from torch_dcl.functional import fuse_branches, fuse_pairs
from torch_dcl.layers import DCLConv1d, DCLConv2d, DCLConv3d, DCLLinear
from torch_dcl.stochastic import advance_branches_, follow_optimizer, seed_branches_

__version__ = "0.1.0"

__all__ = [
    "DCLConv1d",
    "DCLConv2d",
    "DCLConv3d",
    "DCLLinear",
    "Plan",
    "advance_branches_",
    "convert_",
    "follow_optimizer",
    "fuse_branches",
    "fuse_pairs",
    "load_model",
    "plan",
    "save_model",
    "seed_branches_",
]
