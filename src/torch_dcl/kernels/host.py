"""The C++ extension that replays the host's work of a unit, compiled once for each machine.

A small unit takes longer on the host than on the GPU, and most of that is Python. `host.cpp` does the same work in C++.
It is compiled in the background when the first unit runs on a GPU, which takes some fifteen seconds, and cached in the
user's cache folder. Until then, and without a compiler, units run from Python with the same results.
``TORCH_DCL_HOST=0`` disables it; ``TORCH_DCL_CACHE`` sets another folder.
"""

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path
from types import ModuleType

import torch

from torch_dcl import files

__all__ = ["library", "state", "wait"]

_SOURCE = Path(__file__).with_name("host.cpp")
_NAME = "torch_dcl_host"
_lock = threading.Lock()
_work: threading.Thread | None = None
_library: ModuleType | None = None
_state = "off (TORCH_DCL_HOST=0)" if os.environ.get("TORCH_DCL_HOST") == "0" else "not needed so far"


def library() -> ModuleType | None:
    """The compiled module, or None if there is none yet; the first call starts the compiler in the background."""
    global _work  # noqa: PLW0603 - compiled once per process
    if _work is None and _state == "not needed so far":
        with _lock:
            if _work is None:
                _work = threading.Thread(target=_build, name="torch-dcl compiles host.cpp", daemon=True)
                _work.start()
    return _library


def wait() -> ModuleType | None:
    """Wait for the compiled module; None if it cannot be compiled."""
    library()
    if _work is not None:
        _work.join()
    return _library


def state() -> str:
    """The state of the extension, for `dcl doctor`."""
    return _state


def _build() -> None:
    global _library, _state  # noqa: PLW0603 - see library()
    try:
        command = _command()
        if command is None:
            _state = "no C++ compiler: install g++, or name one in CXX"
            return
        path = _place(command)
        if not path.exists():
            _state = "compiling"
            _compile(command, path)
        _library = _load(path)
        _state = f"ready ({path})"
    except Exception as error:  # units run from Python
        _state = f"unavailable: {_last_line(error)}"


def _last_line(error: Exception) -> str:
    text = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    lines = [line for line in (text or repr(error)).splitlines() if "error" in line] or [repr(error)]
    return lines[0]


def _command() -> list[str] | None:
    """The compiler and its arguments, without the output."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        return None
    root = Path(torch.__file__).parent
    include = [root / "include", root / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    return [
        *compiler.split(), "-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-w",
        f"-DTORCH_EXTENSION_NAME={_NAME}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{folder}" for folder in include), str(_SOURCE), f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu",
        "-ltorch_python", "-ldl",
    ]  # fmt: skip


def _place(command: list[str]) -> Path:
    """The path of the compiled file, which depends on the source, torch, Python and the compiler."""
    versions = (_SOURCE.read_text(), " ".join(command), torch.__version__, sys.version, platform.machine())
    key = hashlib.sha256("\0".join(versions).encode()).hexdigest()[:16]
    base = os.environ.get("TORCH_DCL_CACHE")
    return (Path(base, "torch_dcl") if base else files.user_cache()) / key / f"{_NAME}.so"


def _compile(command: list[str], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with files.replacing(path) as fresh:
        subprocess.run(
            [*command, "-o", str(fresh)], check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_NAME, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
