"""The kernel for local response normalisation, by Triton's interpreter on the CPU, against torch in float64."""

import importlib.util

import pytest
import torch
from tests.halves import slow_where
from tests.models import response_norm_cases as cases
from torch.nn import functional as F

from torch_dcl.kernels import dispatch
from torch_dcl.models._response_norm import response_norm

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which is not installed"
)


def too_large(found, limit):
    return {what: error for what, error in found.items() if not error <= limit}


@needs_triton
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float16, 1e-3)], ids=str)
@pytest.mark.parametrize("name", slow_where(cases.CASES, "a thousand rows|wider than the row"))
def test_an_interpreted_kernel_agrees_with_torch_in_float64(interpreter, name, dtype, limit):
    assert too_large(interpreter(cases.errors_of, cases.CASES[name], "cpu", dtype), limit) == {}


@needs_triton
@pytest.mark.parametrize("name", cases.OTHERS)
def test_where_it_runs_and_what_it_leaves_to_torch(interpreter, name):
    assert too_large(interpreter(cases.OTHERS[name], "cpu"), 1e-6) == {}


@needs_triton
@pytest.mark.slow
def test_alexnet_gives_the_logits_and_gradients_of_torchs_own_layers(interpreter):
    assert too_large(interpreter(cases.alexnet_errors, "cpu"), 1e-5) == {}


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
