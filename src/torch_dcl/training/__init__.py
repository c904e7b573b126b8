"""The former name of `torch_dcl.fleet`."""

import warnings

from torch_dcl import fleet
from torch_dcl.fleet import *

__all__ = fleet.__all__

warnings.warn(
    "torch_dcl.training is now torch_dcl.fleet; import from there, the old name will go in version 0.3",
    DeprecationWarning,
    stacklevel=2,
)
