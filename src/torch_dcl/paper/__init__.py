"""The former name of `torch_dcl.experiments` and `torch_dcl.report`."""

import warnings

from torch_dcl import experiments
from torch_dcl.experiments import *
from torch_dcl.report import as_html as as_html
from torch_dcl.report import as_markdown as as_markdown
from torch_dcl.report import report as report

__all__ = experiments.__all__

warnings.warn(
    "torch_dcl.paper is now torch_dcl.experiments and torch_dcl.report; import from there, the old name will go in "
    "version 0.3",
    DeprecationWarning,
    stacklevel=2,
)
