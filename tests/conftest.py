"""What every test starts from: the same random numbers, and no clock."""

import contextlib
import gc
import itertools
import sys
from collections.abc import Callable, Iterator

import hypothesis
import pytest
import torch
from tests.kernels.interpreter import Interpreter

hypothesis.settings.register_profile("no clock", deadline=None)
hypothesis.settings.load_profile("no clock")


def pytest_collection_finish() -> None:
    """Planning collects garbage, which takes a third of a second where all modules and tests are looked through."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def a_backward_pass_before_the_first() -> None:
    """On a GPU torch warns where the very first thing that a backward pass does is a product of matrices."""
    if torch.cuda.is_available():
        torch.ones(1, device="cuda", requires_grad=True).exp().backward()


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """A compiler counts how often a function was compiled, and refuses the ninth, whichever tests came before."""
    yield
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """One process for all interpreted kernels: a second import of torch and Triton takes seconds."""
    interpreter = Interpreter()
    yield interpreter
    interpreter.close()


@pytest.fixture
def killed_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], contextlib.AbstractContextManager[None]]:
    """A block in which fleets are stopped, from outside, before a step."""
    from torch_dcl.fleet import Fleet

    @contextlib.contextmanager
    def killed(step: int) -> Iterator[None]:
        taken, one_step = itertools.count(), Fleet._one_step

        def until(fleet: Fleet) -> None:
            if next(taken) == step:
                raise KeyboardInterrupt
            one_step(fleet)

        with monkeypatch.context() as patched:
            patched.setattr(Fleet, "_one_step", until)
            with pytest.raises(KeyboardInterrupt):
                yield

    return killed


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    """Tests print to no terminal: the workers of pytest-xdist say that they have one of 80 columns."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("LINES", raising=False)
