"""Dataset sources: MNIST, CIFAR, SVHN, a folder of images, arrays, a prepared file.

`load` finds the files, reads and checks them, and describes what it used. It never runs code from a file.
"""

import dataclasses
import difflib
import os
from collections.abc import Callable
from pathlib import Path

from torch_dcl.data.cifar import ADDRESS, CIFAR, read_cifar_set
from torch_dcl.data.content import KNOWN, examine
from torch_dcl.data.dataset import Dataset
from torch_dcl.data.download import fetch, write_members
from torch_dcl.data.draws import whole_number
from torch_dcl.data.folder import read_arrays, read_folder
from torch_dcl.data.mnist import FILES as MNIST_FILES
from torch_dcl.data.mnist import RAW, find_mnist, mnist_excerpt, read_mnist
from torch_dcl.data.prepared import read_prepared
from torch_dcl.data.svhn import FILES as SVHN_FILES
from torch_dcl.data.svhn import read_svhn

__all__ = ["load", "places"]

NAMES = ("mnist", "mnist-excerpt", "cifar10", "cifar100", "svhn")
PREFIXES = ("folder", "arrays", "prepared")
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
        if (found := readers[name](place)) is not None:
            return _examined(found)
    if download:
        target = _download_place(root)
        _fetch(name, target, extra)
        fetched = readers[name](target)
        if fetched is not None:
            return _examined(fetched)
    where = ", ".join(str(place) for place in looked)
    if name == "mnist" and root is None:
        return _excerpt(f"; the whole set was not found in {where}")
    raise FileNotFoundError(f"{name} was not found in {where}; {_remedy(name, looked[0])}")


def places(root: str | os.PathLike[str] | None = None) -> list[Path]:
    """Where named sets are looked for, in order.

    Args:
        root: The only place, when it is given.

    Returns:
        `root` alone; otherwise `$TORCH_DCL_DATA` if it is set, `./data`, and the user's cache.
    """
    if root is not None:
        return [Path(root).expanduser()]
    set_by_user = os.environ.get("TORCH_DCL_DATA")
    return [*([Path(set_by_user).expanduser()] if set_by_user else []), Path("data"), _cache()]


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "torch_dcl"


def _download_place(root: str | os.PathLike[str] | None) -> Path:
    first = places(root)[0]
    return first if root is not None or os.environ.get("TORCH_DCL_DATA") else _cache()


def _check_name(name: str, prefix: str, has_path: bool, path: str) -> None:
    """Refuse a name that is none, with the nearest one."""
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
        raise OSError(f"{name} could not be fetched: {error}; {_remedy(name, target, failed=True)}") from error


def _remedy(name: str, place: Path, *, failed: bool = False) -> str:
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
