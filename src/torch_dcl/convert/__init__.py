"""Plan, convert, fit, recover, save and load: DCL layers in a network that is already there."""

from torch_dcl.convert.apply import Conversion, convert_
from torch_dcl.convert.checkpoint import CheckpointError, load_model, save_model
from torch_dcl.convert.fit import FitReport
from torch_dcl.convert.planner import plan
from torch_dcl.convert.recover import Recovery, recover_
from torch_dcl.convert.rows import Choice, Comparison, Plan, Row, Timing
from torch_dcl.convert.units import AbsorbedNorm, AbsorbedReLU, SharedReLU

__all__ = [
    "AbsorbedNorm",
    "AbsorbedReLU",
    "CheckpointError",
    "Choice",
    "Comparison",
    "Conversion",
    "FitReport",
    "Plan",
    "Recovery",
    "Row",
    "SharedReLU",
    "Timing",
    "convert_",
    "load_model",
    "plan",
    "recover_",
    "save_model",
]
