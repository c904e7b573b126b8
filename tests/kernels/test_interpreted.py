"""The kernels, run as Python by Triton's interpreter on the CPU, against plain torch in float64.

Triton looks at TRITON_INTERPRET when it is imported, so all cases run in one process of their own.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.kernels import cases

from torch_dcl import kernels

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which is not installed"
)


@pytest.fixture(scope="module")
def errors():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, Path(cases.__file__)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", cases.CASES)
def test_an_interpreted_kernel_agrees_with_plain_torch(errors, name):
    assert {what: error for what, error in errors[name].items() if not error <= 1e-5} == {}


def test_without_the_interpreter_the_kernels_do_not_take_what_is_on_the_cpu():
    assert os.environ.get("TRITON_INTERPRET") != "1"
    assert not kernels.usable(torch.zeros(3))
