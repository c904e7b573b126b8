"""Processes of their own that begin where torch and the package are imported: to import them takes four seconds.

They are forked from a process that did nothing else. What they are given is what `python` is given on a command line.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch.multiprocessing

import torch_dcl

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch_dcl.cli.run", "torch.distributed.fsdp", "torch.nn.parallel", "PIL.Image"])


class Process:
    """As ``subprocess.Popen([sys.executable, *words])`` with pipes, for ``-m module …`` and ``-c program …``."""

    def __init__(self, words: Sequence[str], *, env: Mapping[str, str], cwd: str | Path = ".") -> None:
        self._said = tempfile.TemporaryDirectory()
        paths = tuple(Path(self._said.name, name) for name in ("stdout", "stderr"))
        where = os.path.realpath(cwd)
        self._process = CONTEXT.Process(target=_run, args=(tuple(words), dict(env), where, *map(str, paths)))
        self._paths = paths
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a process", timeout)
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What was written to stdout and stderr, once the process has ended."""
        self.wait(timeout)
        out, err = (path.read_text() if path.exists() else "" for path in self._paths)
        return out, err

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def importing(**more: str) -> dict[str, str]:
    """The environment of a process that imports the package from where it is, on one thread."""
    return {**os.environ, "PYTHONPATH": str(Path(torch_dcl.__file__).parents[1]), "OMP_NUM_THREADS": "1", **more}


def _run(words: tuple[str, ...], env: dict[str, str], cwd: str, out: str, err: str) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path.insert(0, cwd)
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), stream)
    kind, what, *rest = words
    sys.argv = [kind, *rest]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


def spawn(function: Callable[..., None], args: tuple[object, ...], nprocs: int) -> None:
    """As ``torch.multiprocessing.spawn``; the environment is that in which the first of all processes began."""
    torch.multiprocessing.start_processes(function, args, nprocs, start_method="forkserver")
