"""Encoded images with labels: a folder of files in torchvision's layout, or tar files in WebDataset's.

A tar file is read as it is. Its members are listed once, and an image is then read by its place in the file, so the
order of an epoch is the same function of (seed, epoch, index) as for a folder.
"""

import dataclasses
import hashlib
import json
import os
import stat
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch_dcl.data.dataset import DataError
from torch_dcl.data.folder import class_folders, image_files
from torch_dcl.data.images import MAX_BYTES, SUFFIXES

__all__ = ["Samples", "find_samples"]

_MAX_CLASSES = 1_000_000
_MAX_LABEL_BYTES = 1_000_000
_END = 1024  # bytes of zeros that end a tar file
# Of one image in so many the content is hashed, of so many images at least, and so many bytes of each at most.
_ONE_READ_IN, _LEAST_READ, _MOST_READ = 1024, 16, 2**20


@dataclasses.dataclass(frozen=True)
class Samples:
    """The encoded images of one split.

    Args:
        classes: The class names.
        paths: The files; several images may share one.
        places: For each image the number of its file, the offset in it and the size in bytes; a whole file has size -1.
        labels: The class of each image.
        members: The name of each image inside of its file; empty for whole files.
    """

    classes: tuple[str, ...]
    paths: Sequence[str]
    places: Sequence[tuple[int, int, int]]
    labels: Sequence[int]
    members: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.places)

    def name(self, index: int) -> str:
        """The name of an image in messages: its path, or archive and member."""
        path = self.paths[self.places[index][0]]
        return f"{path}:{self.members[index]}" if self.members else path

    def file(self, index: int) -> Path | bytes:
        """A file of its own, or the bytes of a member.

        Raises:
            DataError: The archive has become shorter.
        """
        number, offset, size = self.places[index]
        if size < 0:
            return Path(self.paths[number])
        with Path(self.paths[number]).open("rb") as file:
            file.seek(offset)
            data = file.read(size)
        if len(data) != size:
            raise DataError(f"{self.name(index)} is truncated: {len(data):,} of {size:,} bytes; copy the archive again")
        return data

    def part(self, chosen: Sequence[int]) -> "Samples":
        """Some of the images, with the files that hold them."""
        numbers = {number: place for place, number in enumerate(dict.fromkeys(self.places[i][0] for i in chosen))}
        return Samples(
            self.classes,
            [self.paths[number] for number in numbers],
            [(numbers[self.places[i][0]], *self.places[i][1:]) for i in chosen],
            [self.labels[i] for i in chosen],
            [self.members[i] for i in chosen] if self.members else (),
        )

    def signature(self, below: Path) -> str:
        """The SHA-256 of all names, sizes and labels, and of the content of some images, spread over the list.

        A million files are not read at every start, so a change in a few of them that keeps their sizes is not found.
        Other images of the same names and sizes are, as in formats without compression.

        Args:
            below: The folder that names are relative to, so that a copy elsewhere is the same set.
        """
        digest = hashlib.sha256(json.dumps(self.classes).encode())
        read = max(min(_LEAST_READ, len(self)), len(self) // _ONE_READ_IN)
        chosen = {number * len(self) // read for number in range(read)}
        for index, ((number, offset, size), label) in enumerate(zip(self.places, self.labels, strict=True)):
            path = self.paths[number]
            member = self.members[index] if self.members else ""
            length = _size_of(path) if size < 0 else size
            digest.update(f"{os.path.relpath(path, below)}|{member}|{offset}|{length}|{label}\n".encode())
            if index in chosen and length >= 0:
                with Path(path).open("rb") as file:
                    file.seek(offset)
                    digest.update(file.read(min(length, _MOST_READ)))
        return digest.hexdigest()


def _size_of(path: str) -> int:
    """The bytes of a file; -1 for a link to nothing and for what is no file, which are refused where they are read."""
    try:
        about = os.stat(path)  # noqa: PTH116 - a million of them
    except FileNotFoundError:
        return -1
    return about.st_size if stat.S_ISREG(about.st_mode) else -1


def find_samples(root: Path, split: str) -> Samples:
    """List the images of one split.

    Args:
        root: The folder above `train` and `val`: class folders in each, or tar files. Tar files may also lie in the
            folder itself, with names that begin with the split (`train-000123.tar`).
        split: `"train"` or `"val"`.

    Raises:
        FileNotFoundError: There is no such split.
        DataError: A class is empty or differs from those of the training split, or an archive is damaged.
    """
    tars = {name: _archives(root, name) for name in ("train", "val")}
    if tars[split]:
        return _in_archives(tars[split], _class_names(root))
    if any(tars.values()):
        raise FileNotFoundError(
            f"{root} has tar files of one split and none of {split!r}; name them {split}-*.tar, or put them into "
            f"{split}/"
        )
    classes = class_folders(root / "train")
    files = image_files(root / split, classes)
    places = [(number, 0, -1) for number in range(len(files))]
    return Samples(tuple(classes), [str(path) for path, _ in files], places, [label for _, label in files])


def _archives(root: Path, split: str) -> list[Path]:
    return sorted(root.glob(f"{split}[-_]*.tar")) or sorted((root / split).glob("*.tar"))


def _class_names(root: Path) -> list[str] | None:
    """The names of `classes.json`, if it is there."""
    file = root / "classes.json"
    if not file.is_file():
        return None
    try:
        names = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not JSON ({error}); write a list of the class names, or remove it") from error
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise DataError(f"{file} is not a list of class names; write one, or remove it")
    return names


def _in_archives(archives: Sequence[Path], names: Sequence[str] | None) -> Samples:
    """The images of WebDataset's tar files: `KEY.jpg` with its label in `KEY.cls` or `KEY.json`."""
    places, labels, members = [], [], []
    for number, path in enumerate(archives):
        for member, offset, size, label in _members(path):
            if not 0 <= label < (len(names) if names else _MAX_CLASSES):
                raise DataError(f"{path}:{member} has label {label}, which is no class; labels count from 0")
            places.append((number, offset, size))
            labels.append(label)
            members.append(member)
    if not places:
        raise DataError(f"{archives[0]} and its neighbours hold no images with labels; pack KEY.jpg with KEY.cls")
    classes = tuple(names or (str(label) for label in range(max(labels) + 1)))
    if missing := sorted(set(range(len(classes))) - set(labels)):
        few = ", ".join(classes[label] for label in missing[:5])
        raise DataError(f"{archives[0].parent}: {len(missing)} of {len(classes)} classes have no image ({few})")
    return Samples(classes, [str(path) for path in archives], places, labels, members)


def _members(path: Path) -> Iterator[tuple[str, int, int, int]]:
    """Name, offset, size and label of every image of an archive, in its order."""
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, int] = {}
    length = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, length - _END))
        if file.read() != bytes(_END):
            raise DataError(f"{path} is truncated, or no tar file: it does not end in {_END:,} zeros; copy it again")
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                if not member.isreg():
                    continue
                folder, _, base = member.name.rpartition("/")
                key, _, suffix = base.partition(".")
                key, suffix = f"{folder}/{key}", f".{suffix.lower()}"
                if member.offset_data + member.size > length:
                    raise DataError(f"{path} is truncated at {member.name}; copy it again")
                if suffix in SUFFIXES:
                    if member.size > MAX_BYTES:
                        raise DataError(f"{path}:{member.name} has {member.size:,} bytes; remove it")
                    images[key] = member.name, member.offset_data, member.size
                elif suffix in (".cls", ".json") and member.size <= _MAX_LABEL_BYTES:
                    text = archive.extractfile(member)
                    labels[key] = _label(path, member.name, suffix, text.read() if text else b"")
    except (tarfile.TarError, EOFError) as error:
        raise DataError(f"{path} cannot be read as a tar file ({error}); copy it again") from error
    for key, (name, offset, size) in images.items():
        if key not in labels:
            raise DataError(f"{path}:{name} has no label; put a .cls or .json file of the same name beside it")
        yield name, offset, size, labels[key]


def _label(path: Path, name: str, suffix: str, text: bytes) -> int:
    try:
        value = json.loads(text)
        label = value if suffix == ".cls" else value["label"] if "label" in value else value["cls"]
        if type(label) is not int:
            raise TypeError(label)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise DataError(f"{path}:{name} holds no label but {text[:40]!r}; write a whole number") from None
    else:
        return label
