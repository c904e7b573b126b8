"""The kernels, run as Python by Triton's interpreter on the CPU, against plain torch in float64."""

import importlib.util
import os
import signal

import pytest
import torch
from tests.halves import slow_where
from tests.kernels import cases
from tests.kernels.interpreter import Interpreter

from torch_dcl import kernels

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which is not installed"
)


@pytest.mark.parametrize("name", slow_where(cases.CASES, "squared norms|several parts|long rows|than a tile"))
def test_an_interpreted_kernel_agrees_with_plain_torch(interpreter, name):
    errors = interpreter(cases.errors_of, name, "cpu", torch.float32)
    assert {what: error for what, error in errors.items() if not error <= 1e-5} == {}


def test_without_the_interpreter_the_kernels_do_not_take_what_is_on_the_cpu():
    assert os.environ.get("TRITON_INTERPRET") != "1"
    assert not kernels.usable(torch.zeros(3))


def test_a_case_that_raises_crashes_or_does_not_end_is_named_and_hides_no_other(capfd):
    run = Interpreter(seconds=1)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run(divmod, 1, 0)
    with pytest.raises(AssertionError, match=r"raise_signal\(.*SIGSEGV.*\) ended its process"):
        run(signal.raise_signal, signal.SIGSEGV)
    assert "Segmentation fault" in capfd.readouterr().err
    with pytest.raises(AssertionError, match=r"exec\('while True: pass',\) .* took more than 1 s of CPU time"):
        run(exec, "while True: pass")
    assert '"<string>", line 1' in capfd.readouterr().err
    assert run(divmod, 7, 2) == (3, 1)
    run.close()
