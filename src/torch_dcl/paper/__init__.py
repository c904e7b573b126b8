"""The former name of `torch_dcl.experiments`."""

import warnings

from torch_dcl import experiments
from torch_dcl.experiments import *  # noqa: F403

__all__ = experiments.__all__

warnings.warn(
    "torch_dcl.paper is now torch_dcl.experiments; import from there, the old name will go in version 0.3",
    DeprecationWarning,
    stacklevel=2,
)
