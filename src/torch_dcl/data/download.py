"""Download the original files, and extract the expected files of an archive and nothing else."""

import gzip
import http.client
import io
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from torch_dcl.data.dataset import DataError
from torch_dcl.files import replacing, write_bytes

__all__ = ["fetch", "read_members", "write_members"]

_BLOCK = tarfile.BLOCKSIZE
_MAX_OTHERS = 2**19  # bytes of members that are not asked for, and of all headers: room for about a thousand members
_WITHOUT_DATA = (
    tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE
)  # fmt: skip


def fetch(addresses: list[str], target: Path, md5: str) -> None:
    """Download one file with torchvision's downloader, which shows a progress bar. An existing file is kept.

    The addresses are tried in order, and folders are created as needed. Where all fail nothing is left behind.
    """
    from torchvision.datasets.utils import check_integrity, download_url

    if target.exists():
        if not check_integrity(target, md5):
            raise DataError(f"{target} is there but is not the published file (MD5 {md5}); remove it and try again")
        return
    reasons = []
    for address in addresses:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with replacing(target) as aside:
                download_url(address, aside.parent, aside.name, md5)
        except (OSError, RuntimeError, http.client.HTTPException) as error:
            reasons.append(f"{address}: {error or type(error).__name__}")
        else:
            return
    raise OSError(f"could not fetch {target.name} ({'; '.join(reasons)}); put the file at {target} by hand")


def read_members(archive: Path, expected: Mapping[str, int]) -> dict[str, bytes]:
    """Read the expected files of a gzipped tar archive, by name and size, into memory. Nothing is written.

    A DataError where the archive is damaged or far larger than it may be, or a file is missing, there twice, no regular
    file or of another size.
    """
    contents: dict[str, bytes] = {}
    announced, most = 0, sum(expected.values()) + _MAX_OTHERS
    with archive.open("rb") as packed:
        try:
            with gzip.GzipFile(fileobj=packed) as file:
                while (member := _header(file)) is not None:
                    # Pax headers and long names are members like others, and are not interpreted.
                    size = 0 if member.type in _WITHOUT_DATA else member.size
                    announced += _BLOCK + size
                    if size < 0 or announced > most:
                        raise DataError(
                            f"{archive} is far larger than the published archive: its members announce "
                            f"{announced:,} bytes, at most {most:,} are expected; remove it and fetch it again"
                        )
                    if member.name not in expected:
                        _skip(file, size + -size % _BLOCK)
                        continue
                    if member.name in contents:
                        raise DataError(f"{archive} holds {member.name} twice; remove it and fetch it again")
                    _check_member(archive, member, expected[member.name])
                    contents[member.name] = content = file.read(size)
                    _skip(file, size - len(content) + -size % _BLOCK)
        except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
            raise DataError(
                f"{archive} is not a whole gzipped tar archive ({error}); remove it and fetch it again"
            ) from error
    missing = [name for name in expected if name not in contents]
    if missing:
        raise DataError(f"{archive} lacks {', '.join(missing)}; remove it and fetch it again")
    return contents


def write_members(archive: Path, expected: Mapping[str, int], folder: Path) -> None:
    """Unpack the expected files of an archive to a folder, each whole or not at all."""
    for name, content in read_members(archive, expected).items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(target, content)


def _header(file: io.BufferedIOBase) -> tarfile.TarInfo | None:
    """The header of the next member, and None at the end of the archive."""
    block = file.read(_BLOCK)
    if not block.strip(b"\0"):
        return None
    return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")


def _skip(file: io.BufferedIOBase, size: int) -> None:
    while size > 0:
        skipped = len(file.read(min(size, 2**20)))
        if not skipped:
            raise EOFError(f"it ends {size:,} bytes early")
        size -= skipped


def _check_member(archive: Path, member: tarfile.TarInfo, size: int) -> None:
    """Refuse an expected member that is not what it must be."""
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        raise DataError(f"{archive}: {member.name} is not a regular file; remove the archive and fetch it again")
    if member.size != size:
        raise DataError(
            f"{archive}: {member.name} has {member.size:,} bytes, expected {size:,}; remove the archive and fetch it "
            "again"
        )
