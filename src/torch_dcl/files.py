"""Atomic writes and checksums: every file that must survive a crash is written here.

A file written here is either the old one or the complete new one, even if the process is killed or the machine loses
power. The new content is written to a temporary folder next to the target, synced to the disk, and renamed.

A *sealed* file holds tensors (safetensors) and a description, and carries its own SHA-256, computed with these 64
digits set to zero, so a change of any byte is detected. The description is a single entry of the metadata, because
safetensors writes several in arbitrary order, and equal content must give equal files.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "DISK_IS_FULL", "SealedError", "check_seal", "locate_sealed", "read_sealed", "replacing", "sha256_bytes",
    "sha256_file", "user_cache", "write_bytes", "write_sealed", "write_text",
]  # fmt: skip

_SEAL = "seal"
_MARK = rb"\"seal\": \""  # in the header the JSON text is a JSON string
_BLANK = "0" * 64
DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MAX_HEADER = 100_000_000  # of any safetensors file, in bytes


def user_cache() -> Path:
    """This package's folder in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_dcl"


class SealedError(ValueError):
    """A file that is damaged, was altered, or is not a sealed file."""


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path, which replaces `path` when the block succeeds.

    This is for libraries that open files by name themselves. The temporary path does not exist yet, is on the same file
    system, and has the same file name, and so the same suffix. If the block raises, the temporary file is removed and
    `path` is not changed. A replaced file keeps its permission bits; a new one gets the default ones, even if a library
    sets others, as safetensors does. A symbolic link is followed: the file it points to is replaced, the link stays.

    A killed process leaves a folder named `.writing-*` next to the target, which can be deleted.

    Raises:
        FileNotFoundError: The folder of `path` does not exist, or the block wrote nothing.
        NotADirectoryError: The folder of `path` is a file.
        IsADirectoryError: `path` is a folder.
        OSError: Nothing can be written to the folder of `path`.
    """
    target = Path(os.path.realpath(path))
    _check_target(path, target)
    try:
        folder = tempfile.TemporaryDirectory(prefix=".writing-", dir=target.parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise _failure(path, target.parent, error) from error
    try:
        with folder as aside:
            fresh = Path(aside) / target.name
            usual = fresh.with_name("usual" if target.name != "usual" else "bits")
            usual.touch()
            yield fresh
            if not fresh.is_file():
                raise FileNotFoundError(f"nothing to put at {path}: no file was written to {fresh}")
            _sync_file(fresh, mode_of=target if target.exists() else usual)
            # Path.replace is os.replace: atomic on one file system.
            fresh.replace(target)
            _sync_folder(target.parent)
    except OSError as error:
        if error.errno not in DISK_IS_FULL or error.strerror is None:
            raise
        raise _failure(path, target.parent, error) from error


def _failure(path: str | os.PathLike[str], folder: Path, error: OSError) -> OSError:
    """An error with the file's own path, and the same number."""
    remedy = "free space, or choose another path" if error.errno in DISK_IS_FULL else "choose another path"
    named = type(error)(f"cannot write {os.fspath(path)}: {error.strerror}, in the folder {folder}; {remedy}")
    named.errno = error.errno
    return named


def write_bytes(path: str | os.PathLike[str], data: bytes | bytearray | memoryview) -> None:
    """Create or replace a file with `data`, atomically. Its folder must exist."""
    with replacing(path) as fresh:
        fresh.write_bytes(data)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Create or replace a file with `text` in UTF-8, atomically. Line endings are not converted."""
    write_bytes(path, text.encode("utf-8"))


def sha256_file(path: str | os.PathLike[str]) -> str:
    """The SHA-256 of a file in hexadecimal digits, without loading the whole file into memory."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_bytes(*parts: bytes | bytearray | memoryview) -> str:
    """The SHA-256 of the concatenated parts, without concatenating them.

    The boundaries have no effect: `sha256_bytes(b"ab", b"c")` equals `sha256_bytes(b"a", b"bc")`. If they matter, pass
    the lengths as parts too.
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def write_sealed(
    path: str | os.PathLike[str], key: str, tensors: "Mapping[str, Tensor]", about: Mapping[str, Any]
) -> str:
    """Write tensors and a description of plain data to one file, atomically; return the SHA-256 that it carries.

    The key identifies the kind of file, and `read_sealed` expects it. Tensors are moved to the CPU; views are copied.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    text = json.dumps(about)
    if f'"{_SEAL}": "' in text:
        raise ValueError(
            f"the description of a sealed file must not have the key {_SEAL!r}, which the file itself uses"
        )
    whole: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        one = tensor.detach().cpu().contiguous()
        # Copy tensors that share storage: safetensors writes whole storages, each once.
        shared = one.untyped_storage().data_ptr() in seen or one.untyped_storage().nbytes() != one.nbytes
        whole[name] = one.clone() if shared else one
        seen.add(one.untyped_storage().data_ptr())
    metadata = {key: json.dumps({**about, _SEAL: _BLANK}, sort_keys=True)}
    with replacing(path) as aside:
        try:
            save_file(whole, aside, metadata)
        except SafetensorError as error:
            raise OSError(f"cannot write {path}: {error}; free space, or choose another path") from error
        digest, place = _seal(aside)
        with aside.open("r+b") as file:
            file.seek(place)
            file.write(digest.encode())
    return digest


def read_sealed(path: str | os.PathLike[str], key: str) -> "tuple[dict[str, Tensor], dict[str, Any]]":
    """Read a file of `write_sealed`, after checking every byte: tensors by name, on the CPU, and the description.

    Raises:
        FileNotFoundError: There is no such file.
        SealedError: The file is damaged, was altered, or is of another kind.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    carried = check_seal(path)
    try:
        with safe_open(path, "pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}
        about = json.loads(metadata[key])
    except KeyError:
        kinds = ", ".join(sorted(metadata)) or "none"
        raise SealedError(f"{path} is no file of the kind {key}; the kind that it names: {kinds}") from None
    # A file that was sealed again may contain anything, for example deeply nested data.
    except (SafetensorError, ValueError, RecursionError) as error:
        raise SealedError(f"{path} is no file of the kind {key} ({error})") from error
    if not isinstance(about, dict) or about.pop(_SEAL, None) != carried:
        raise SealedError(f"{path} is no file of the kind {key}: its description is not an object with its seal")
    return tensors, about


def check_seal(path: str | os.PathLike[str]) -> str:
    """Hash a sealed file, and return the SHA-256 that it carries; raise SealedError if they differ."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    digest, place = _seal(path)
    with path.open("rb") as file:
        file.seek(place)
        carried = file.read(64).decode("ascii", "replace")
    if digest != carried:
        raise SealedError(f"{path} is damaged or was altered: its SHA-256 is {digest}, it carries {carried}")
    return carried


def locate_sealed(
    path: str | os.PathLike[str], key: str
) -> tuple[dict[str, tuple[str, tuple[int, ...], int]], dict[str, Any]]:
    """The offsets of the tensors in a sealed file, to map them into memory. `check_seal` checks their bytes.

    Returns:
        By name the dtype as safetensors writes it (`"U8"`), the shape, and the offset of the first byte; the
        description.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(length) if length <= min(_MAX_HEADER, size - 8) else b"")
        about = json.loads(header.pop("__metadata__")[key])
        about.pop(_SEAL)
        places = {}
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            places[name] = (str(entry["dtype"]), tuple(map(int, entry["shape"])), 8 + length + int(first))
            if not 0 <= int(first) <= int(last) <= size - 8 - length:
                raise ValueError(f"{name} lies outside of the file")
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SealedError(f"{path} is truncated, damaged, or no file of the kind {key} ({error})") from error
    return places, about


def _seal(path: Path) -> tuple[str, int]:
    """The SHA-256 of a sealed file with its own digits set to zero, and the offset of these digits."""
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX_HEADER + 1
        header = file.read(length) if length <= min(_MAX_HEADER, path.stat().st_size - 8) else b""
        place = header.find(_MARK) + len(_MARK)
        if header.count(_MARK) != 1 or place + 64 > len(header):
            raise SealedError(f"{path} is damaged or not a sealed file")
        digest = hashlib.sha256(start + header[:place] + _BLANK.encode() + header[place + 64 :])
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest(), 8 + place


def _check_target(path: str | os.PathLike[str], target: Path) -> None:
    """Raise an error if the target cannot be written, before its content is computed."""
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


def _sync_file(fresh: Path, mode_of: Path) -> None:
    """Sync a complete file to the disk, with the permission bits of another one."""
    # Opened before the bits change, since the old file may be read-only.
    descriptor = os.open(fresh, os.O_RDWR)
    try:
        shutil.copymode(mode_of, fresh)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """Sync a rename to the disk. If folders cannot be synced, the rename is still atomic."""
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
