"""The kernel for local response normalisation, by Triton's interpreter on the CPU, against torch in float64."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.models import response_norm_cases
from torch.nn import functional as F

from torch_dcl.kernels import dispatch
from torch_dcl.models._response_norm import response_norm

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which is not installed"
)


@pytest.fixture(scope="module")
def errors():
    done = subprocess.run(
        [sys.executable, Path(response_norm_cases.__file__)], capture_output=True, text=True, check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def too_large(found, limit):
    return {what: error for what, error in found.items() if not error <= limit}


@needs_triton
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-6), ("float16", 1e-3)])
@pytest.mark.parametrize("name", response_norm_cases.CASES)
def test_an_interpreted_kernel_agrees_with_torch_in_float64(errors, name, dtype, limit):
    assert too_large(errors[f"{dtype}, {name}"], limit) == {}


@needs_triton
@pytest.mark.parametrize("name", response_norm_cases.OTHERS)
def test_where_it_runs_and_what_it_leaves_to_torch(errors, name):
    assert too_large(errors[name], 1e-6) == {}


@needs_triton
def test_alexnet_gives_the_logits_and_gradients_of_torchs_own_layers(errors):
    assert too_large(errors["alexnet"], 1e-5) == {}


def test_on_the_cpu_torch_runs_and_says_so():
    x = torch.randn(2, 8, 3, 3).to(memory_format=torch.channels_last)
    with dispatch.watch() as ran:
        z = response_norm(x, 5, 1e-4, 0.75, 1.0)
    assert ran == {"response_norm: reference": 1}
    assert z.equal(F.local_response_norm(x, 5))


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_operation_is_what_torch_expects_of_operations(layout, dtype):
    x = torch.randn(2, 8, 3, 3, dtype=dtype).contiguous(memory_format=layout).requires_grad_()
    torch.library.opcheck(torch.ops.torch_dcl.response_norm.default, (x, 5, 0.01, 0.75, 1.0))
