"""Run folders: what was asked for, on what it ran, and what came out, so that a run can be looked at and gone on with.

::

    runs/table1/
      recipe.json        what was asked for; a run that goes on must be asked for the same
      environment.jsonl  versions, GPU, the state of the repository, for every time that it was started
      *.jsonl            what came out, a line at a time, each on the disk before the next
      log.txt            what the run said of its progress
      lock               held while the run goes, with the number of its process
"""

import contextlib
import datetime
import difflib
import fcntl
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from torch_dcl.files import write_text

__all__ = ["RunError", "RunFolder", "environment", "holder"]


class RunError(RuntimeError):
    """A run folder that cannot be used; the message says why and what to do."""


class RunFolder:
    """A folder that belongs to one run.

    ::

        with RunFolder.open("runs/table1", recipe, resume=True) as folder:
            for record in folder.read("outcomes"): ...
            folder.append("outcomes", {"error": 1.96})

    Args:
        path: Where.
        recipe: What was asked for, as plain data.
    """

    def __init__(self, path: Path, recipe: Mapping[str, Any]) -> None:
        self.path, self.recipe = path, dict(recipe)

    @classmethod
    @contextlib.contextmanager
    def open(
        cls, path: str | os.PathLike[str], recipe: Mapping[str, Any], *, resume: bool = False, part: str = ""
    ) -> Iterator["RunFolder"]:
        """Make the folder, or go on in it, and hold its lock meanwhile.

        Args:
            path: Where.
            recipe: What is asked for.
            resume: Whether to go on with what is there.
            part: A name for the lock, where several processes share the folder, each with a part of its own.

        Raises:
            RunError: The folder is in use, or has results and ``resume`` is not set, or has another recipe.
        """
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        # Parts share the folder with each other, and with nobody else.
        with contextlib.ExitStack() as held:
            held.enter_context(_locked(folder / "lock", shared=bool(part)))
            if part:
                held.enter_context(_locked(folder / f"lock{part}"))
            _check_recipe(folder, json.loads(json.dumps(recipe)), resume=resume)
            made = cls(folder, recipe)
            made.append(f"environment{part}", environment())
            yield made

    @classmethod
    def look(cls, path: str | os.PathLike[str]) -> "RunFolder":
        """Look into a folder without holding it, also while another process writes to it.

        Args:
            path: Where.

        Raises:
            RunError: It is no run folder, or its recipe is damaged.
        """
        file = Path(path) / "recipe.json"
        try:
            recipe = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RunError(f"{os.fspath(path)} is no run folder: it has no recipe.json") from None
        except ValueError as error:
            raise RunError(f"{file} is damaged ({error}); remove the folder, or write the recipe again") from error
        if not isinstance(recipe, dict):
            raise RunError(f"{file} is damaged: it holds {type(recipe).__name__} in place of names and values")
        return cls(Path(path), recipe)

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Add a line to a file of records, and wait until it is on the disk. A line cut off by a kill is taken away."""
        with (self.path / f"{name}.jsonl").open("ab+") as file:
            size, tail = _tail(file)
            if tail and _is_record(tail):
                file.write(b"\n")
            elif tail:
                file.truncate(size - len(tail))
            file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self, name: str) -> list[dict[str, Any]]:
        """All records of a name, from all parts. A last line that was cut off by a kill is left out."""
        records = []
        for path in sorted(self.path.glob(f"{name}*.jsonl")):
            lines = path.read_text(encoding="utf-8").split("\n")
            for number, line in enumerate(lines):
                if not line:
                    continue
                try:
                    records.append(json.loads(line))
                except json.JSONDecodeError as error:
                    if number < len(lines) - 1:
                        raise RunError(
                            f"{path}, line {number + 1}, is damaged ({error}); remove the line, or the folder"
                        ) from error
        return records


def _tail(file: BinaryIO, step: int = 65536) -> tuple[int, bytes]:
    """The size of a file, and what follows its last line break: nothing, unless a kill cut a line off."""
    size = at = file.seek(0, os.SEEK_END)
    tail = b""
    while at and b"\n" not in tail:
        start = max(0, at - step)
        file.seek(start)
        tail = file.read(at - start) + tail
        at = start
    return size, tail[tail.rfind(b"\n") + 1 :]


def _is_record(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def environment() -> dict[str, Any]:
    """On what a run runs: versions, hardware, the state of the repository, the command."""
    gpu = None
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_name()
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(),
        "versions": _versions(),
        "gpu": gpu,
        "cpus": os.cpu_count(),
        "machine": platform.platform(),
        "commit": _commit(),
    }


def _command() -> str:
    """What was typed, quoted for a shell."""
    program = Path(sys.argv[0]).name
    if program == "__main__.py":
        program = f"python -m {Path(sys.argv[0]).parent.name}"
    return " ".join([program, shlex.join(sys.argv[1:])]).strip()


def _versions() -> dict[str, str]:
    from importlib import metadata  # noqa: PLC0415 - slow, and wanted once a run

    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("torch-dcl", "triton", "torchvision", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def _commit() -> str | None:
    """The commit of the working tree that the package lies in, and whether it was changed; None outside of one."""
    where = Path(__file__).parent
    try:
        answer = [
            subprocess.run(["git", *words], cwd=where, capture_output=True, text=True, check=True, timeout=10).stdout
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no", "."])
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return answer[0].strip() + (", changed" if answer[1].strip() else "")


def holder(path: str | os.PathLike[str]) -> int | None:
    """The process that holds a folder; None where nobody does, whatever an old lock says.

    Args:
        path: The run folder.
    """
    for lock in sorted(Path(path).glob("lock*")):
        try:
            with lock.open("r", encoding="utf-8") as file:
                text = file.read().strip()
                # A process that was killed leaves its number; the lock itself is gone with it.
                if text.isdigit() and _alive(int(text)) and _held(file.fileno()):
                    return int(text)
        except OSError:
            continue
    return None


def _held(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


@contextlib.contextmanager
def _locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold a lock that the system lets go when the process ends, however it ends."""
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise RunError(
                f"{path.parent} is in use by process {holder}; wait for it, or give this run another folder"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)
            fcntl.flock(file, fcntl.LOCK_UN)


def _check_recipe(folder: Path, recipe: dict[str, Any], *, resume: bool) -> None:
    path = folder / "recipe.json"
    text = json.dumps(recipe, indent=1, sort_keys=True) + "\n"
    if not path.exists():
        write_text(path, text)
        return
    before = path.read_text(encoding="utf-8")
    if not resume:
        raise RunError(f"{folder} holds a run already; go on with it by --resume, or choose another folder")
    if before != text:
        changes = difflib.unified_diff(before.splitlines(), text.splitlines(), "then", "now", lineterm="", n=0)
        shown = "\n".join(list(changes)[2:])
        raise RunError(f"{folder} was begun with another recipe:\n{shown}\nask for the same, or choose another folder")
