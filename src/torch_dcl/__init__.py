"""torch-dcl: Deep Collaborative Learning layers for PyTorch, and the tools to put them into a network.

Names are loaded when they are first used, so that ``dcl --help`` need not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_dcl.convert import Plan, convert_, load_model, plan, recover_, save_model
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
    "recover_",
    "save_model",
    "seed_branches_",
]

_HOME = {
    "convert": ("Plan", "convert_", "load_model", "plan", "recover_", "save_model"),
    "functional": ("fuse_branches", "fuse_pairs"),
    "layers": ("DCLConv1d", "DCLConv2d", "DCLConv3d", "DCLLinear"),
    "stochastic": ("advance_branches_", "follow_optimizer", "seed_branches_"),
}
_ROOMS = (
    *_HOME, "data", "files", "fusion", "kernels", "models", "experiments", "fleet", "report", "paper", "training",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"torch_dcl.{name}")
    for room, names in _HOME.items():
        if name in names:
            value = getattr(importlib.import_module(f"torch_dcl.{room}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'torch_dcl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
