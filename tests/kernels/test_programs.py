"""What is replayed from C++, where kernels are interpreted; the same on a GPU is in test_gpu.py."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from tests.halves import slow, slow_where
from tests.kernels import program_cases as cases
from torch import nn

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which is not installed"
)
LAYERS = slow_where(
    cases.LAYERS, "without|strided|over all|parameters|many rows|one dimension|norms and biases|all pairs"
)


@pytest.mark.parametrize("half", [None, torch.float16], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_replayed_layer_has_the_bits_of_the_recorded_one(interpreter, name, half):
    found = interpreter(cases.replayed_case, name, half, "cpu")
    assert found.pop("equal")
    if half is None and name in ("convolution in torch's layout", "one dimension"):
        assert found["programs"] == 0  # without tensor cores no kernel takes images whose channels are not last
    elif name == "convolution in torch's layout":  # a unit between two transpositions
        assert (found["programs"], found["node"]) == (2, "_TransposeBackward")
    else:
        assert found == {"programs": 2, "failed": 0, "node": "DCLUnitBackward"}


@pytest.mark.parametrize("half", [None, torch.float16], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_compiled_layer_replays_its_operations(interpreter, name, half):
    assert interpreter(cases.compiled_case, name, half, "cpu") <= (2e-3 if half else 1e-6)


def test_a_compiled_function_has_contexts_of_its_own(interpreter):
    found = interpreter(cases.compiled_contexts_case, "cpu")
    assert found == [(kind, True, False, True) for kind in (torch.float16, torch.float32, torch.float16)]


@pytest.mark.slow
def test_a_compiled_layer_normalises_wide_branches_in_the_kernels(interpreter):
    error, code = interpreter(cases.compiled_wide_case, "cpu")
    assert error <= 2e-3
    assert "closed_unit_tracked" in code


def test_a_compiled_network_compiles_once_more_for_other_batches(interpreter):
    graphs, worst = interpreter(cases.compiled_batches_case, "cpu")
    assert graphs <= 2
    assert worst <= 1e-4


@pytest.mark.parametrize("norm", [slow(None), nn.BatchNorm2d], ids=["plain", "norm"])
def test_a_compiled_layer_notices_what_changes_between_its_calls(interpreter, norm):
    errors = interpreter(cases.compiled_changes_case, norm, "cpu")
    assert {name: error for name, error in errors.items() if not error <= 2e-5} == {}


def test_a_compiled_call_with_other_weights_learns_these(interpreter):
    """`torch.func.functional_call` on a frozen layer."""
    assert interpreter(cases.compiled_functional_case, "cpu") <= 2e-5


def test_a_compiled_layer_can_be_checkpointed(interpreter):
    worst, counted = interpreter(cases.compiled_checkpoint_case, "cpu")
    assert worst <= 1e-4
    assert counted == 1


@pytest.mark.slow
def test_the_operations_of_whole_units_are_what_torch_expects_of_operations(interpreter):
    interpreter(cases.check_unit_operations)


def test_an_operation_called_from_python_is_replayed_and_seen_by_all_that_sees_operations(interpreter):
    interpreter(cases.check_calls_of_operations)


def test_an_error_in_a_replayed_operation_has_the_type_that_torch_gives_it(interpreter):
    interpreter(cases.check_errors_of_operations)


def test_a_replayed_layer_has_second_derivatives(interpreter):
    errors = interpreter(cases.second_derivative_case, "cpu")
    assert {name: error for name, error in errors.items() if not error <= 1e-5} == {}


def test_a_replayed_layer_keeps_what_autograd_promises(interpreter):
    found = interpreter(cases.autograd_case, "cpu")
    assert found.pop("a third backward pass").startswith("Trying to backward through the graph a second time")
    assert {name: value for name, value in found.items() if value is not True} == {}


def test_a_program_holds_as_long_as_nothing_has_changed(interpreter):
    found = interpreter(cases.states_case, "cpu")
    assert {name: value for name, value in found.items() if value is not True} == {}


def test_the_stochastic_strategy_is_right_in_both_modes(interpreter):
    assert interpreter(cases.stochastic_case, "cpu")


def test_a_layer_can_be_released_before_its_graph(interpreter):
    assert interpreter(cases.released_case, "cpu")


def test_a_size_that_comes_once_is_not_recorded_and_sixteen_are_kept(interpreter):
    assert interpreter(cases.sizes_case, "cpu") == (0, 16)


PROGRAM = """
import json
from torch_dcl.kernels import host
print(json.dumps([host.wait() is not None, host.state()]))
"""


def _state(**environment):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_without_a_compiler_or_with_a_broken_one_the_state_says_so(tmp_path):
    empty = str(tmp_path)
    found = _state(PATH=empty, CXX="", TORCH_DCL_CACHE=empty)
    assert found == [False, "no C++ compiler: install g++, or name one in CXX"]
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'x.h:1: error: no such file' >&2\nexit 1\n")
    broken.chmod(0o755)
    assert _state(CXX=str(broken), TORCH_DCL_CACHE=empty) == [False, "unavailable: x.h:1: error: no such file"]
    assert [path for path in tmp_path.rglob("*") if path.suffix == ".so"] == []
    assert _state(TORCH_DCL_HOST="0") == [False, "off (TORCH_DCL_HOST=0)"]
