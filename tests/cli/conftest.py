import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import torch_dcl
from torch_dcl.cli.app import app

SOURCE = Path(torch_dcl.__file__).parents[1]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to stand in, with no data anywhere and no colours."""
    monkeypatch.chdir(tmp_path)
    for name in ("TORCH_DCL_DATA", "RANK", "WORLD_SIZE", "FORCE_COLOR", "COLUMNS", "_TYPER_FORCE_DISABLE_TERMINAL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_COLOR", "1")
    return tmp_path


@pytest.fixture
def dcl(folder):
    """Run `dcl` inside this process: `dcl("ls", code=0)` gives what was printed."""

    def run(*words, code=0):
        done = CliRunner().invoke(app, [str(word) for word in words], prog_name="dcl")
        assert done.exit_code == code, f"exit code {done.exit_code}\n{done.output}\n{done.exception!r}"
        return done.output

    return run


@pytest.fixture
def dcl_for_machines(folder):
    """The same with `--json`: what stdout says, read, and what stderr says."""

    def run(*words):
        done = CliRunner().invoke(app, [str(word) for word in words], prog_name="dcl")
        assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"
        return json.loads(done.stdout), done.stderr

    return run


@pytest.fixture
def environment(folder):
    """What a process of its own needs to find the package."""
    return {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def process(folder, environment):
    """Run `python -m torch_dcl` as a process of its own."""

    def run(*words):
        command = [sys.executable, "-m", "torch_dcl", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder)

    return run
