"""Batch norms of two processes: ``nn.SyncBatchNorm`` in a DCL layer."""

import importlib.util
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.halves import slow_where
from tests.kernels import shared_cases
from tests.kernels.interpreter import Interpreter

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not torch.distributed.is_available(),
    reason="needs triton and torch.distributed",
)


class Pair:
    """Call functions in two processes at the same time, which exchange messages by gloo."""

    def __init__(self, folder, **environment):
        self._both = [Interpreter(**environment) for _ in range(2)]
        self._threads = ThreadPoolExecutor(2)
        self(shared_cases.join, [(rank, str(folder)) for rank in range(2)])

    def __call__(self, case, given):
        """What both return, each called with its own arguments."""
        calls = [self._threads.submit(run, case, *own) for run, own in zip(self._both, given, strict=True)]
        return [call.result() for call in calls]

    def close(self):
        self(shared_cases.leave, [(), ()])
        for run in self._both:
            run.close()
        self._threads.shutdown()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    pair = Pair(tmp_path_factory.mktemp("interpreted"), OMP_NUM_THREADS="1")
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def pair_on_gpu(tmp_path_factory):
    pair = Pair(tmp_path_factory.mktemp("gpu"), TRITON_INTERPRET="0")
    yield pair
    pair.close()


def too_large(pair, name, device, dtype, limit):
    found = pair(shared_cases.run, [(name, device, dtype)] * 2)
    return {
        f"{what}, process {rank}": error
        for rank, errors in enumerate(found)
        for what, error in errors.items()
        if not error <= limit
    }


@pytest.mark.parametrize(
    "name",
    slow_where(shared_cases.IN_FLOAT32, "many filters|no scales|linear|three|100|evaluation|alone|one tensor|second"),
)
def test_interpreted_kernels_agree_with_one_process_that_has_all_inputs(pair, name):
    assert too_large(pair, name, "cpu", torch.float32, shared_cases.LIMITS.get(name, 3e-6)) == {}


@pytest.mark.parametrize("name", slow_where(shared_cases.IN_FLOAT16, "biases|linear|no input|many"))
def test_interpreted_kernels_agree_in_half_precision(pair, name):
    assert too_large(pair, name, "cpu", torch.float16, 1e-3) == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here")
@pytest.mark.parametrize("name", [*shared_cases.IN_FLOAT32, *shared_cases.ON_GPU])
def test_two_processes_on_a_gpu_agree_with_one_that_has_all_inputs(pair_on_gpu, name):
    assert too_large(pair_on_gpu, name, "cuda", torch.float32, 4 * shared_cases.LIMITS.get(name, 5e-6)) == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here")
@pytest.mark.parametrize("name", shared_cases.IN_FLOAT16)
def test_two_processes_on_a_gpu_agree_in_half_precision(pair_on_gpu, name):
    assert too_large(pair_on_gpu, name, "cuda", torch.bfloat16, 1e-2) == {}
