"""Kernels run as Python by Triton's interpreter, in a process of their own.

Triton looks at TRITON_INTERPRET when it is imported, so the process of the tests cannot turn it on. A case that raises
an error, ends the process or does not end fails alone: the next one runs, in a new process where it has to.
"""

import faulthandler
import functools
import inspect
import multiprocessing
import os
import signal
import sys
import traceback
import types
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool


class Interpreter:
    """Call functions in a process where kernels are interpreted; it starts with the first call.

    Args:
        environment: Variables of that process.
        seconds: CPU time after which a case is taken to run for ever.
    """

    def __init__(self, *, seconds: float = 300, **environment: str) -> None:
        self._seconds = seconds
        self._environment = {"TRITON_INTERPRET": "1", **environment}
        self._pool: ProcessPoolExecutor | None = None

    def __call__(self, case: Callable[..., object], *given: object) -> object:
        """What a function of a module returns, called from the same random numbers each time."""
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, context, initializer=_start, initargs=(self._environment,))
        try:
            result, error = self._pool.submit(_run, case, given, self._seconds).result()
        except BrokenProcessPool:
            self.close()
            told = f"ended its process, or took more than {self._seconds} s of CPU time; its stderr says where"
            raise AssertionError(f"{case.__qualname__}{given} {told}") from None
        assert error is None, error
        return result

    def close(self) -> None:
        """End the process."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _start(environment: dict[str, str]) -> None:
    os.environ.update(environment)
    faulthandler.enable()
    faulthandler.register(signal.SIGPROF, chain=True)  # say where it was, and end the process


@functools.cache
def _remember_the_language() -> None:
    """Triton lists the language's functions anew whenever a kernel calls a function: half of the interpreter's time."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @functools.cache
    def names(where: object) -> list[str]:
        return [name for name, member in inspect.getmembers(where) if is_builtin(member)]

    def getmembers(where: object) -> list[tuple[str, object]]:
        return [(name, getattr(where, name)) for name in names(where)]

    interpreter.inspect = types.SimpleNamespace(**{**vars(inspect), "getmembers": getmembers})


def _run(case: Callable[..., object], given: tuple[object, ...], seconds: float) -> tuple[object, str | None]:
    if "torch" in sys.modules:  # as it is where the case's own module needs it
        sys.modules["torch"].manual_seed(0)
    if "triton.runtime.interpreter" in sys.modules:
        _remember_the_language()
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        return case(*given), None
    except Exception:  # whatever it is: not every error can be sent to another process
        return None, traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
