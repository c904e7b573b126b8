"""Write aside, sync, rename, hash: the only place that writes what must last.

A file written here is either the old one or the whole new one, even when the process is killed or the machine
loses power half way. The new content goes into a private folder beside the target, is synced to the disk, and
then takes the target's name in one step.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["replacing", "sha256_bytes", "sha256_file", "write_bytes", "write_text"]


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a path to write to, which becomes `path` when the block ends well.

    This is for libraries that open files by name themselves. The path that is given does not exist yet and ends in
    the same file name, so a library that looks at the suffix sees the right one. When the block raises, whatever was
    written is removed and `path` stays as it was. A file that is replaced keeps its permission bits; a new one has
    those its writer gave it. A symbolic link is followed: the file it points to is replaced, the link stays.

    A killed process leaves a folder named `.writing-*` beside the target, which can be deleted.

    Args:
        path: The file to create or replace. Its folder must exist.

    Yields:
        The path to write to, on the same file system as `path`.

    Raises:
        FileNotFoundError: The folder of `path` does not exist, or the block wrote nothing.
        NotADirectoryError: The folder of `path` is a file.
        IsADirectoryError: `path` is a folder.
    """
    target = Path(os.path.realpath(path))
    _check_target(path, target)
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=target.parent, ignore_cleanup_errors=True) as aside:
        fresh = Path(aside) / target.name
        yield fresh
        if not fresh.is_file():
            raise FileNotFoundError(f"nothing to put at {path}: no file was written to {fresh}")
        _sync_file(fresh, mode_of=target if target.exists() else None)
        # Path.replace is os.replace: atomic on one file system.
        fresh.replace(target)
        _sync_folder(target.parent)


def write_bytes(path: str | os.PathLike[str], data: bytes | bytearray | memoryview) -> None:
    """Create or replace a file with `data`, all or nothing.

    Args:
        path: The file to create or replace. Its folder must exist.
        data: The whole new content.

    Raises:
        OSError: As `replacing`, or the disk refused the data.
    """
    with replacing(path) as fresh:
        fresh.write_bytes(data)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Create or replace a file with `text` in UTF-8, all or nothing. Line ends are written as they are.

    Args:
        path: The file to create or replace. Its folder must exist.
        text: The whole new content.

    Raises:
        OSError: As `replacing`, or the disk refused the data.
    """
    write_bytes(path, text.encode("utf-8"))


def sha256_file(path: str | os.PathLike[str]) -> str:
    """Hash a file of any size without reading it into memory at once.

    Args:
        path: The file to read.

    Returns:
        The SHA-256 as 64 lowercase hexadecimal digits.
    """
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_bytes(*parts: bytes | bytearray | memoryview) -> str:
    """Hash the parts one after the other, as if they were joined, without joining them.

    The borders between parts leave no trace: `sha256_bytes(b"ab", b"c")` equals `sha256_bytes(b"a", b"bc")`. A caller
    to whom the borders matter puts the lengths among the parts.

    Args:
        *parts: What to hash, in order.

    Returns:
        The SHA-256 as 64 lowercase hexadecimal digits.
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _check_target(path: str | os.PathLike[str], target: Path) -> None:
    """Refuse a target that cannot be written, before any work goes into its content."""
    folder = target.parent
    if not folder.exists():
        raise FileNotFoundError(
            f"cannot write {os.fspath(path)}: the folder {folder} does not exist; create it, or choose another path"
        )
    if not folder.is_dir():
        raise NotADirectoryError(
            f"cannot write {os.fspath(path)}: {folder} is a file, not a folder; choose another path"
        )
    if target.is_dir():
        raise IsADirectoryError(f"cannot write {os.fspath(path)}: it is a folder; name a file inside it")


def _sync_file(fresh: Path, mode_of: Path | None) -> None:
    """Bring a finished file to the disk, with the permission bits of the file it will replace."""
    # Opened before the bits change, since the old file may have been read-only.
    descriptor = os.open(fresh, os.O_RDWR)
    try:
        if mode_of is not None:
            shutil.copymode(mode_of, fresh)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """Bring a rename to the disk. Where folders cannot be synced the rename is still atomic."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
