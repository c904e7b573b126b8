"""Dataset sources: MNIST, CIFAR, SVHN, a folder of images, arrays, a prepared file.

`load` finds the files, reads and checks them, and describes what it used. It never runs code from a file.
"""

import dataclasses
import difflib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from torch_dcl.data.cifar import ADDRESS, CIFAR, read_cifar_set
from torch_dcl.data.dataset import DataError, Dataset, read_prepared
from torch_dcl.data.download import fetch, write_members
from torch_dcl.data.draws import whole_number
from torch_dcl.data.folder import read_arrays, read_folder
from torch_dcl.data.mnist import FILES as MNIST_FILES
from torch_dcl.data.mnist import RAW, find_mnist, mnist_excerpt, read_mnist
from torch_dcl.data.svhn import FILES as SVHN_FILES
from torch_dcl.data.svhn import read_svhn
from torch_dcl.files import sha256_bytes, user_cache

__all__ = ["KNOWN", "content_hashes", "examine", "is_here", "load", "places", "remedy"]

NAMES = ("mnist", "mnist-excerpt", "cifar10", "cifar100", "svhn")
PREFIXES = ("folder", "arrays", "prepared")
_CHUNK = 4096  # images at a time, so that memory-mapped data is not read at once
_DIGITS = tuple(str(digit) for digit in range(10))


def load(
    name: str,
    *,
    root: str | os.PathLike[str] | None = None,
    download: bool = False,
    size: int | tuple[int, int] | None = None,
    mode: str | None = None,
    extra: bool = True,
    seed: int = 0,
) -> Dataset:
    """Load a dataset from its files.

    | name | files |
    |---|---|
    | `mnist` | the four idx files, gzipped or not, in `MNIST/raw`, `mnist` or the place itself |
    | `mnist-excerpt` | the digits inside the package |
    | `cifar10`, `cifar100` | the official binary files or archive, or arrays in a folder of that name |
    | `svhn` | `{train,test,extra}_32x32.mat` in `svhn`, `SVHN` or the place itself |
    | `folder:PATH` | `train/CLASS/*` and `test/CLASS/*` or `val/CLASS/*` |
    | `arrays:PATH` | `{train,test}_{images,labels}.npy`, memory-mapped |
    | `prepared:PATH` | a file of `write_prepared` |

    Named sets are searched in `root` alone when it is given, otherwise in `$TORCH_DCL_DATA`, `./data` and the user's
    cache. When MNIST is not found and no `root` is given, the embedded excerpt replaces it; `source` says so.

    Args:
        name: One of the table above.
        root: Where a named set is.
        download: Fetch a named set that is not found, into `root`, `$TORCH_DCL_DATA` or the user's cache.
        size: For `folder:`, height and width to resize every image to.
        mode: For `folder:`, `"RGB"` or `"L"` to convert every image to; `images.read_image` says how.
        extra: For `svhn`, whether its extra images take part, as in the paper.
        seed: For `svhn`, which images are set aside for validation.

    Returns:
        The dataset: images uint8 `[N, C, H, W]`, labels int64, class names, and what was used.

    Raises:
        ValueError: There is no such source, or an option that it does not have.
        FileNotFoundError: Files are missing; the message says where it looked and what to put where.
        DataError: A file is damaged or not what it claims to be.
        OSError: A download failed; the message says which files to put where.
    """
    prefix, colon, path = name.partition(":")
    _check_name(name, prefix, bool(colon), path)
    whole_number("seed", seed)
    if prefix != "folder" and (size is not None or mode is not None):
        raise ValueError(f"size and mode are for folder:PATH, not for {name!r}")
    if prefix == "folder":
        return read_folder(Path(path), size, mode)
    if prefix == "arrays":
        return read_arrays(Path(path), Path(path).name or "arrays")
    if prefix == "prepared":
        return read_prepared(path)
    if name == "mnist-excerpt":
        return _excerpt("")
    readers: dict[str, Callable[[Path], Dataset | None]] = {
        "mnist": _mnist,
        "cifar10": lambda place: read_cifar_set("cifar10", place),
        "cifar100": lambda place: read_cifar_set("cifar100", place),
        "svhn": lambda place: read_svhn(place, extra=extra, seed=seed),
    }
    looked = places(root)
    for place in looked:
        if (dataset := readers[name](place)) is not None:
            return _examined(dataset)
    if download:
        target = looked[0] if root is not None or os.environ.get("TORCH_DCL_DATA") else user_cache()
        _fetch(name, target, extra)
        fetched = readers[name](target)
        if fetched is not None:
            return _examined(fetched)
    where = ", ".join(str(place) for place in looked)
    if name == "mnist" and root is None:
        return _excerpt(f"; the whole set was not found in {where}")
    raise FileNotFoundError(f"{name} was not found in {where}; {remedy(name, looked[0])}")


def places(root: str | os.PathLike[str] | None = None) -> list[Path]:
    """Where named sets are looked for: `root` alone if given, else `$TORCH_DCL_DATA`, `./data` and the user's cache."""
    if root is not None:
        return [Path(root).expanduser()]
    set_by_user = os.environ.get("TORCH_DCL_DATA")
    return [*([Path(set_by_user).expanduser()] if set_by_user else []), Path("data"), user_cache()]


def is_here(name: str, root: str | os.PathLike[str] | None = None) -> bool:
    """Whether files of a named set are in the usual places, or in `root` alone, by their names."""
    if name == "mnist":
        return any(find_mnist(place) is not None for place in places(root))
    if name == "svhn":
        files = [f"{folder}{SVHN_FILES['train']}" for folder in ("", "svhn/", "SVHN/")]
    else:
        files = [CIFAR[name].archive, CIFAR[name].folder, name]
    return any((place / file).exists() for place in places(root) for file in files)


def _check_name(name: str, prefix: str, has_path: bool, path: str) -> None:
    """Raise an error for an unknown name, with the nearest known one."""
    if has_path and prefix in PREFIXES:
        if not path:
            raise ValueError(f"{name!r} names no path; write {prefix}:PATH")
        return
    if not has_path and name in NAMES:
        return
    known = [*NAMES, *(f"{start}:PATH" for start in PREFIXES)]
    near = difflib.get_close_matches(prefix.lower(), [*NAMES, *PREFIXES], 1, 0.5)
    hint = f" did you mean {near[0] + ':' + (path or 'PATH') if near[0] in PREFIXES else near[0]!r}?" if near else ""
    raise ValueError(f"there is no source {name!r};{hint} known: {', '.join(known)}")


def _examined(dataset: Dataset) -> Dataset:
    """The dataset with a word on its content in the source."""
    if dataset.name not in KNOWN:
        return dataset
    return dataclasses.replace(dataset, source=f"{dataset.source} ({examine(dataset)})")


def _excerpt(why: str) -> Dataset:
    (train, train_labels), (test, test_labels) = mnist_excerpt("train"), mnist_excerpt("test")
    source = f"embedded excerpt of MNIST, {len(train):,} + {len(test):,}{why}"
    return Dataset("mnist-excerpt", train[:, None], train_labels, test[:, None], test_labels, _DIGITS, source)


def _mnist(place: Path) -> Dataset | None:
    """MNIST in one place, or None when no file of it is there."""
    folder = find_mnist(place)
    if folder is None:
        return None
    (train, train_labels), (test, test_labels) = (read_mnist(folder, split) for split in MNIST_FILES)
    source = f"MNIST, {len(train):,} + {len(test):,}, from {folder}"
    return Dataset("mnist", train[:, None], train_labels, test[:, None], test_labels, _DIGITS, source)


def _fetch(name: str, target: Path, extra: bool) -> None:
    """Bring the original files of a named set to where its reader looks for them."""
    from torchvision.datasets import MNIST, SVHN

    try:
        if name == "mnist":
            for file, md5 in MNIST.resources:
                fetch([mirror + file for mirror in MNIST.mirrors], target / RAW / file, md5)
        elif name == "svhn":
            for split in SVHN_FILES if extra else ("train", "test"):
                address, file, md5 = SVHN.split_list[split]
                fetch([address], target / "svhn" / file, md5)
        else:
            form = CIFAR[name]
            fetch([ADDRESS + form.archive], target / form.archive, form.md5)
            write_members(target / form.archive, form.members, target)
    except OSError as error:
        raise OSError(f"{name} could not be fetched: {error}; {remedy(name, target, failed=True)}") from error


def remedy(name: str, place: Path, *, failed: bool = False) -> str:
    """Which files to put where; and unless that failed, how they are fetched."""
    if name == "mnist":
        files, folder = [f"{file}.gz" for pair in MNIST_FILES.values() for file in pair], place / RAW
        rest = "leave root out to use the embedded excerpt"
    elif name == "svhn":
        files, folder = list(SVHN_FILES.values()), place / "svhn"
        rest = "pass extra=False to do without the extra images"
    else:
        files, folder = [CIFAR[name].archive], place
        rest = "or arrays into a folder of that name"
    if failed:
        return f"put {', '.join(files)} into {folder}"
    return f"put {', '.join(files)} into {folder}, or fetch them with `dcl data fetch {name}` ({rest})"


# Known content: the SHA-256 of MNIST, CIFAR-10 and CIFAR-100, which identifies a complete copy. A copy with the right
# number of images and another hash is damaged.


@dataclasses.dataclass(frozen=True)
class Known:
    """Counts and hashes of a set, train and test: of the content in any order, and in that of the original files."""

    title: str
    counts: tuple[int, int]
    content: tuple[str, str]
    order: tuple[str, str] | None


KNOWN = {
    "mnist": Known(
        "MNIST",
        (60_000, 10_000),
        (
            "4e35f5e69bd16b1a92409f186af4625c081c64b4c17acfa161b296088786cf51",
            "15f179fc8064b3885ce612239b7bc451486775946a7c64c70562b061ff716383",
        ),
        (
            "1be66601a65f455ac9bf1812772f9643f822adba0af3ff63651448e8535e8399",
            "020a316a55e4a5c571afffc18a9dac5c069bdb40c5fd2b9449e4727409505e4f",
        ),
    ),
    "cifar10": Known(
        "CIFAR-10",
        (50_000, 10_000),
        (
            "464110d38d180886da2fbfd74b60e8311bf0055b69563716abbbf3627d3fac80",
            "f01877e81dae1f55f260d1d23c98e51b5128033a34a0a92b88a125f256bb7851",
        ),
        (
            "a5d7223f53ff3ca861f5e2e1d881399e48d9a34a38003fa9ebf64b6ba1fe80aa",
            "02524cf3d186570506fe0bc97ca2c19d8873bd47c7d6dfc4add5ef6bf5c761e2",
        ),
    ),
    "cifar100": Known(
        "CIFAR-100",
        (50_000, 10_000),
        (
            "778c4f3ac479801d3de95fb630041ebccaf4f71f8188eac3452f574a56a837d0",
            "1072eb731d00e5beb7d6feab3b4d44dbed02b77a78f39f47b3c37613ff3b5c58",
        ),
        None,
    ),
}


def examine(dataset: Dataset) -> str:
    """Compare the content of a named set with the known one, by its name; the answer in words.

    A DataError where it has as many images as the known set, so it claims to be that set, and its hash differs.
    """
    known = KNOWN.get(dataset.name)
    if known is None:
        return "unknown content: no hash is on record"
    counts = (len(dataset.train_labels), len(dataset.test_labels))
    if counts != known.counts:
        return (
            f"unknown content: {counts[0]:,} + {counts[1]:,} images, and {known.title} has "
            f"{known.counts[0]:,} + {known.counts[1]:,}"
        )
    in_order = True
    for position, split in enumerate(("train", "test")):
        digest, order = content_hashes(*dataset.splits[split])
        if digest != known.content[position]:
            raise DataError(
                f"{dataset.source}: the {split} split is damaged or not {known.title}: the SHA-256 of its content is "
                f"{digest}, expected {known.content[position]}; fetch the files again, or load another set of this "
                "form as arrays:PATH"
            )
        in_order &= known.order is None or order == known.order[position]
    return "known content" if in_order else "known content in another order"


def content_hashes(images: Tensor, labels: Tensor) -> tuple[str, str]:
    """Hash images with their labels: a SHA-256 that does not depend on their order, and one that does.

    Both are over the SHA-256 of each label (two bytes, the lower first) and image, for the first of them sorted.
    """
    digests: list[bytes] = []
    for start in range(0, len(images), _CHUNK):
        some, these = images[start : start + _CHUNK], labels[start : start + _CHUNK, None]
        rows = torch.cat([(these % 256).byte(), (these // 256).byte(), some.reshape(len(some), -1)], 1).cpu()
        content, width = rows.numpy().tobytes(), rows.shape[1]
        digests += [hashlib.sha256(content[at : at + width]).digest() for at in range(0, len(content), width)]
    return sha256_bytes(*sorted(digests)), sha256_bytes(*digests)
