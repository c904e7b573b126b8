"""Run folders: what was asked for, on what it ran, and what came out, so that a run can be read and resumed.

::

    runs/table1/
      recipe.json        what was asked for; a run that is resumed must be asked for the same
      environment.jsonl  versions, GPU, the state of the repository, for every time that it was started
      *.jsonl            what came out, a line at a time, each on the disk before the next and with a checksum
      log.txt            what the run said of its progress
      lock               held while the run goes, with the number of its process

A folder may come from somebody else: nothing is written through a symbolic link in it. Folders of format 1, without
checksums, are read and not resumed.
"""

import contextlib
import datetime
import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import torch

from torch_dcl.files import write_text

__all__ = ["RunError", "RunFolder", "environment", "lock_folder", "lock_holder"]

FORMAT = 2
_CHECK = "check"
_CHECKED = re.compile(rb'(.*?)(?:, )?"check": "([0-9a-f]{16})"}')


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
        format: In which form it was written.
    """

    def __init__(self, path: Path, recipe: Mapping[str, Any], format: int = FORMAT) -> None:
        self.path, self.recipe, self.format = path, dict(recipe), format

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
            if not part:
                _remove_leftovers(folder)
            _check_recipe(folder, json.loads(json.dumps(recipe)), resume=resume)
            made = cls(folder, recipe)
            made.append(f"environment{part}", environment())
            yield made

    @classmethod
    def inspect(cls, path: str | os.PathLike[str]) -> "RunFolder":
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
        except (ValueError, RecursionError) as error:
            raise RunError(f"{file} is damaged ({error}); remove the folder, or write the recipe again") from error
        if not isinstance(recipe, dict):
            raise RunError(f"{file} is damaged: it holds {type(recipe).__name__} in place of names and values")
        form = recipe.pop("format", 1)
        recipe.pop("version", None)
        return cls(Path(path), recipe, form if isinstance(form, int) else 1)

    def append(self, name: str, *records: Mapping[str, Any]) -> None:
        """Add lines to a file of records in one write, and wait until they are on the disk.

        A line that was cut off by a kill is taken away.
        """
        line = b"".join(map(_line, records))
        with _open_safely(self.path / f"{name}.jsonl", "ab+") as file:
            size, tail = _tail(file)
            if tail and _CHECKED.fullmatch(tail):
                line = b"\n" + line
            elif tail:
                file.truncate(size - len(tail))
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def read(self, name: str) -> list[dict[str, Any]]:
        """All records of a name, from all parts. A last line that was cut off by a kill is left out.

        Raises:
            RunError: A line is damaged; the message names it.
        """
        records = []
        for path in sorted(self.path.glob(f"{name}*.jsonl")):
            lines = path.read_bytes().split(b"\n")
            for number, line in enumerate(lines):
                try:
                    if line:
                        records.append(_record(line, checked=self.format > 1))
                except (ValueError, RecursionError) as error:
                    if number < len(lines) - 1:
                        raise RunError(
                            f"{path}, line {number + 1}, is damaged ({error}); remove the line, or the folder"
                        ) from error
        return records

    def log(self, text: str, part: str = "") -> None:
        """Add a line to ``log.txt``, with the time before it."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with _open_safely(self.path / f"log{part}.txt", "a") as file:
            file.write(f"{now} {text}\n")


def _line(record: Mapping[str, Any]) -> bytes:
    if _CHECK in record:
        raise ValueError(f"a record must not have the key {_CHECK!r}, which the file itself uses")
    text = json.dumps(record)
    return f'{text[:-1]}{", " if record else ""}"{_CHECK}": "{_digest(text.encode())}"}}\n'.encode()


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


def _record(line: bytes, *, checked: bool) -> dict[str, Any]:
    """What a line says.

    Raises:
        ValueError: It is not JSON, or its checksum is missing or wrong.
        RecursionError: It is nested too deep.
    """
    if checked:
        match = _CHECKED.fullmatch(line)
        if match is None:
            raise ValueError("it has no checksum")
        line = match[1] + b"}"
        if _digest(line) != match[2].decode():
            raise ValueError("its checksum is wrong")
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("it holds no names and values")  # noqa: TRY004 - damage, whatever it holds
    return record


def _open_safely(path: Path, mode: str) -> Any:
    """Open a file to write to, unless it is a symbolic link, which may lead anywhere."""
    try:
        # Built in: only that takes an opener.
        return open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise RunError(f"{path} is a symbolic link, which a run does not write through; remove it") from None
        raise


def _remove_leftovers(folder: Path) -> None:
    """Remove what writes left that were interrupted; the lock says that nobody is writing now."""
    for aside in folder.glob("**/.writing-*"):
        if aside.is_dir() and not aside.is_symlink():
            shutil.rmtree(aside, ignore_errors=True)


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
    from importlib import metadata

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


@contextlib.contextmanager
def lock_folder(path: str | os.PathLike[str]) -> Iterator[None]:
    """Make a folder, and hold its lock without beginning a run.

    Raises:
        RunError: Another process holds it.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "lock"):
        yield


def lock_holder(path: str | os.PathLike[str]) -> int | None:
    """The process that holds a folder; None where nobody does, whatever an old lock says.

    Args:
        path: The run folder.
    """
    for lock in sorted(Path(path).glob("lock*")):
        try:
            with lock.open("r", encoding="utf-8", errors="replace") as file:
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
    file: TextIO
    with _open_safely(path, "a+") as file:
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
    if not path.exists():
        from torch_dcl import __version__

        content = {**recipe, "format": FORMAT, "version": __version__}
        write_text(path, json.dumps(content, indent=1, sort_keys=True) + "\n")
        return
    if not resume:
        raise RunError(f"{folder} holds a run already; resume it with --resume, or choose another folder")
    before = RunFolder.inspect(folder)
    if before.format != FORMAT:
        starts = before.read("environment")
        version = starts[0].get("versions", {}).get("torch-dcl", "unknown") if starts else "unknown"
        raise RunError(
            f"{folder} was begun by torch-dcl {version} in another form (format {before.format}, here {FORMAT}), and "
            "cannot be resumed; dcl report reads it, or run it again in another folder"
        )
    if changes := list(_differences(before.recipe, recipe)):
        more = f"\n  and {len(changes) - 8} more" if len(changes) > 8 else ""
        shown = "\n".join(f"  {change}" for change in changes[:8])
        raise RunError(
            f"{folder} was begun with other settings:\n{shown}{more}\nask for the same, or choose another folder"
        )


def _differences(then: Any, now: Any, name: str = "") -> Iterator[str]:
    """Where two pieces of plain data differ, by the names on the way there."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in {**then, **now}:
            yield from _differences(then.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif then != now:
        yield f"{name}: {_short(then)} then, {_short(now)} now"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
