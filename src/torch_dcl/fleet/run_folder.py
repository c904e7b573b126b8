"""Run folders: the recipe of a run, its environment and its results, so that the run can be read and resumed.

::

    runs/table1/
      recipe.json        the settings of the run; a resume must have the same
      environment.jsonl  versions, GPU and commit, one line for every start
      *.jsonl            results, one line each with a checksum, synced to the disk before the next
      log.txt            messages of the run, with their times
      lock               held while the run is active, with the id of its process

A folder may come from another user: nothing is written through a symbolic link in it. Folders of format 1, without
checksums, can be read but not resumed.
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

__all__ = [
    "MismatchError", "RunError", "RunFolder", "check_recipe", "differences", "environment", "holding", "lock_holder",
    "recipe_text", "utc_now",
]  # fmt: skip

FORMAT = 3
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)
"""Errors of file systems without locks, such as Lustre by default."""
_PLACES = ("data", "digits", "root", "source")  # in a recipe: where the data is; sha256 says what it is
_CHECK = "check"
_CHECKED = re.compile(rb'(.*?)(?:, )?"check": "([0-9a-f]{16})"}')


class RunError(RuntimeError):
    """A run folder that cannot be used; the message says why and what to do."""


class MismatchError(RunError):
    """A run folder that holds another run than the one that was asked for."""

    is_usage = True
    """For a command: its arguments are wrong, not the folder."""


class RunFolder:
    """A folder that belongs to one run.

    ::

        with RunFolder.open("runs/table1", recipe, resume=True) as folder:
            for record in folder.read("outcomes"): ...
            folder.append("outcomes", {"error": 1.96})
    """

    def __init__(self, path: Path, recipe: Mapping[str, Any], format: int = FORMAT) -> None:
        self.path, self.recipe, self.format = path, dict(recipe), format
        self.version: str | None = None

    @classmethod
    @contextlib.contextmanager
    def open(
        cls, path: str | os.PathLike[str], recipe: Mapping[str, Any], *, resume: bool = False, part: str = ""
    ) -> Iterator["RunFolder"]:
        """Create a run folder or, with ``resume``, resume in it, and hold its lock meanwhile.

        ``part`` is a suffix of the lock, where several processes share the folder, each with a part of its own.

        Raises:
            RunError: The folder is in use, or is damaged.
            MismatchError: It holds a run and ``resume`` is not set, or has another recipe.
        """
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        with holding(folder, part):
            if not part:
                _remove_leftovers(folder)
            check_recipe(folder, json.loads(json.dumps(recipe)), resume=resume)
            opened = cls(folder, recipe)
            opened.append(f"environment{part}", environment())
            yield opened

    @classmethod
    def inspect(cls, path: str | os.PathLike[str]) -> "RunFolder":
        """Open a folder for reading, without its lock; another process may write to it meanwhile."""
        file = Path(path) / "recipe.json"
        try:
            recipe = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RunError(f"{os.fspath(path)} is not a run folder: it has no recipe.json") from None
        except (ValueError, RecursionError) as error:
            raise RunError(f"{file} is damaged ({error}); remove the folder, or write the recipe again") from error
        if not isinstance(recipe, dict):
            raise RunError(f"{file} is damaged: it holds {type(recipe).__name__} instead of names and values")
        form = recipe.pop("format", 1)
        if type(form) is not int or not 1 <= form <= FORMAT:
            raise RunError(
                f"{file}: its format is {_short(form)}, from 1 to {FORMAT} can be read; use the version of torch-dcl "
                "that wrote it"
            )
        version = recipe.pop("version", None)
        folder = cls(Path(path), recipe, form)
        folder.version = version if isinstance(version, str) else None
        return folder

    def append(self, name: str, *records: Mapping[str, Any]) -> None:
        """Append records to a file in one write, and sync it to the disk.

        A last line that a kill cut off is removed first.
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
        """All records of a name, from all parts. A last line that a kill cut off is left out.

        Raises:
            RunError: A line is damaged; the message names it.
        """
        records = []
        for path in sorted(self.path.glob(f"{name}*.jsonl")):
            if not path.is_file():  # a pipe or a device may never end
                raise RunError(f"{path} is not a regular file; remove it")
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

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a result to ``NAME.json``, all or nothing."""
        write_text(self.path / f"{name}.json", json.dumps(content, indent=1) + "\n")

    def log(self, text: str, part: str = "") -> None:
        """Append a line to ``log.txt``, with the time in front."""
        with _open_safely(self.path / f"log{part}.txt", "a") as file:
            file.write(f"{utc_now()} {text}\n")


def utc_now() -> str:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _line(record: Mapping[str, Any]) -> bytes:
    if _CHECK in record:
        raise ValueError(f"a record must not have the key {_CHECK!r}, which the file itself uses")
    text = json.dumps(record)
    return f'{text[:-1]}{", " if record else ""}"{_CHECK}": "{_digest(text.encode())}"}}\n'.encode()


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


def _record(line: bytes, *, checked: bool) -> dict[str, Any]:
    """The record of a line."""
    if checked:
        match = _CHECKED.fullmatch(line)
        if match is None:
            raise ValueError("it has no checksum")
        line = match[1] + b"}"
        if _digest(line) != match[2].decode():
            raise ValueError("its checksum is wrong")
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("it holds no names and values")
    return record


def _open_safely(path: Path, mode: str) -> Any:
    """Open a file for writing, unless it is a symbolic link, which may point anywhere."""
    try:
        # The built-in function: Path.open takes no opener.
        return open(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise RunError(f"{path} is a symbolic link, and a run does not write through links; remove it") from None
        raise


def _remove_leftovers(folder: Path) -> None:
    """Remove leftovers of interrupted writes. The lock is held, so no other process is writing."""
    for aside in folder.glob("**/.writing-*"):
        if aside.is_dir() and not aside.is_symlink():
            shutil.rmtree(aside, ignore_errors=True)


def _tail(file: BinaryIO) -> tuple[int, bytes]:
    """The size of a file, and the text after its last line break, which is empty unless a kill cut a line off."""
    size = at = file.seek(0, os.SEEK_END)
    tail = b""
    while at and b"\n" not in tail:
        start = max(0, at - 65536)
        file.seek(start)
        tail = file.read(at - start) + tail
        at = start
    return size, tail[tail.rfind(b"\n") + 1 :]


def environment() -> dict[str, Any]:
    """The environment of a run: time, command, torchrun's id of the job, versions, hardware and commit."""
    return {
        "time": utc_now(),
        "command": _command(),
        "torchrun": os.environ.get("TORCHELASTIC_RUN_ID"),
        "versions": _versions(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpus": os.cpu_count(),
        "machine": platform.platform(),
        "commit": _commit(),
    }


def _command() -> str:
    """The command line, quoted for a shell."""
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
    """The commit of the working tree that contains the package, and whether it has changes; None outside of one."""
    where = Path(__file__).parent
    try:
        answer = [
            subprocess.run(["git", *words], cwd=where, capture_output=True, text=True, check=True, timeout=10).stdout
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no", "."])
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return answer[0].strip() + (", changed" if answer[1].strip() else "")


def lock_holder(path: str | os.PathLike[str]) -> int | None:
    """The id of the process that holds a folder's lock; None if no process does, whatever a stale lock file says."""
    for lock in filter(Path.is_file, sorted(Path(path).glob("lock*"))):
        try:
            with lock.open("r", encoding="utf-8", errors="replace") as file:
                text = file.read().strip()
                # A killed process leaves its id in the file; the system has released the lock itself.
                if text.isdecimal() and _alive(int(text)) and _held(file.fileno()):
                    return int(text)
        except OSError:
            continue
    return None


def _held(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _NO_LOCKS
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


@contextlib.contextmanager
def holding(folder: Path, part: str = "") -> Iterator[None]:
    """Hold a folder's lock: alone, or as a part, which shares it with other parts and with no whole run."""
    with contextlib.ExitStack() as held:
        held.enter_context(_locked(folder / "lock", shared=bool(part)))
        if part:
            held.enter_context(_locked(folder / f"lock{part}"))
        yield


@contextlib.contextmanager
def _locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold a lock that the system releases when the process ends, however it ends; none where it has no locks."""
    file: TextIO
    with _open_safely(path, "a+") as file:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or lock_holder(path.parent) or "unknown"
            raise RunError(
                f"{path.parent} is in use by process {holder}; wait for it, or give this run another folder"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def recipe_text(recipe: Mapping[str, Any]) -> str:
    """The content of recipe.json."""
    from torch_dcl import __version__

    return json.dumps({**recipe, "format": FORMAT, "version": __version__}, indent=1, sort_keys=True) + "\n"


def check_recipe(folder: Path, recipe: dict[str, Any], *, resume: bool) -> None:
    """Write the recipe of a new folder; refuse one that was begun with another recipe, or is not to be resumed."""
    path = folder / "recipe.json"
    if not path.exists():
        write_text(path, recipe_text(recipe))
        return
    if not resume:
        raise MismatchError(f"{folder} holds a run already; resume it with --resume, or choose another folder")
    before = RunFolder.inspect(folder)
    if before.format != FORMAT:
        starts = before.read("environment")
        versions = starts[0].get("versions") if starts else None
        noted = versions.get("torch-dcl", "unknown") if isinstance(versions, dict) else "unknown"
        version = before.version or noted
        raise MismatchError(
            f"{folder} was begun by torch-dcl {version} in another format ({before.format}, here {FORMAT}) and cannot "
            "be resumed; dcl report reads it, or run it again in another folder"
        )
    if (then := before.recipe.get("recipe")) != (now := recipe.get("recipe")):
        raise MismatchError(f"{folder} holds a run of {then}, not of {now}; choose another folder")
    is_same_data = "sha256" in recipe and before.recipe.get("sha256") == recipe["sha256"]
    moved = dict.fromkeys(_PLACES) if is_same_data else {}
    if changes := list(differences(before.recipe | moved, recipe | moved)):
        more = f"\n  and {len(changes) - 8} more" if len(changes) > 8 else ""
        shown = "\n".join(f"  {change}" for change in changes[:8])
        raise MismatchError(
            f"{folder} was begun with other settings or data:\n{shown}{more}\nchoose the same, or another folder"
        )


def differences(then: Any, now: Any, name: str = "", words: tuple[str, str] = ("then", "now")) -> Iterator[str]:
    """The differences of two pieces of plain data, each with its dotted name."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in {**then, **now}:
            yield from differences(then.get(key), now.get(key), f"{name}.{key}" if name else key, words)
    elif then != now:
        pairs = enumerate(zip(_text(then), _text(now), strict=False))
        alike = next((place for place, (one, other) in pairs if one != other), 0)
        start = alike - 20 if alike > 50 else 0
        yield f"{name}: {_short(then, start)} {words[0]}, {_short(now, start)} {words[1]}"


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _short(value: Any, start: int = 0) -> str:
    text = ("..." if start else "") + _text(value)[start:]
    return text if len(text) <= 60 else f"{text[:57]}..."
