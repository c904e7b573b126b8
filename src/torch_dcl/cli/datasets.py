"""``dcl data``: what is here, multi-digit sets as files, their picture, and a check of prepared files."""

from pathlib import Path
from typing import Any

from torch_dcl.cli.bar import Bar
from torch_dcl.cli.names import UsageError, nearest
from torch_dcl.cli.places import check_output, find_mnist, make_folder, mnist_in, read_device
from torch_dcl.cli.screen import console, print_json

__all__ = ["check", "fetch_set", "is_here", "show", "what_is_here", "write_digits", "write_sheet"]


def what_is_here() -> list[dict[str, Any]]:
    """Every named set with where it was found, if anywhere, and what to do if not."""
    from torch_dcl.data.sources import places  # noqa: PLC0415

    rows: list[dict[str, Any]] = [
        {"name": "mnist-excerpt", "found": "inside the package", "about": "6,000 + 1,000 digits", "remedy": None}
    ]
    looked = places()
    for name, about, marks in _NAMED:
        found = next((str(place) for place in looked if _has(place, name, marks)), None)
        folder = looked[0] / _FOLDERS.get(name, "")
        remedy = f"dcl data fetch {name}, or put {_FILES.get(name, marks[0])} into {folder}"
        rows.append({"name": name, "found": found, "about": about, "remedy": None if found else remedy})
    for place in looked:
        files = [file for file in sorted(place.rglob("*.safetensors")) if file.is_file()] if place.is_dir() else []
        if files:
            size = sum(file.stat().st_size for file in files) / 2**20
            about = f"{len(files)} prepared files, {size:,.0f} MiB"
            rows.append({"name": "prepared", "found": str(place), "about": about, "remedy": None})
    return rows


_NAMED = (
    ("mnist", "60,000 + 10,000 digits", ("train-images-idx3-ubyte.gz",)),
    ("cifar10", "50,000 + 10,000 images", ("cifar-10-binary.tar.gz", "cifar-10-batches-bin", "cifar10")),
    ("cifar100", "50,000 + 10,000 images", ("cifar-100-binary.tar.gz", "cifar-100-binary", "cifar100")),
    ("svhn", "604,388 + 26,032 images", ("train_32x32.mat", "svhn/train_32x32.mat", "SVHN/train_32x32.mat")),
)
FETCHED = tuple(name for name, _, _ in _NAMED)


_FILES = {"mnist": "its four idx files", "svhn": "train_32x32.mat, test_32x32.mat and extra_32x32.mat"}
_FOLDERS = {"mnist": "mnist", "svhn": "svhn"}


def is_here(name: str, root: str | None = None) -> bool:
    """Whether files of a named set are in the usual places, or in a folder alone."""
    from torch_dcl.data.sources import places  # noqa: PLC0415

    marks = next(marks for known, _, marks in _NAMED if known == name)
    return any(_has(place, name, marks) for place in places(root))


def _has(place: Path, name: str, marks: tuple[str, ...]) -> bool:
    return mnist_in(place) is not None if name == "mnist" else any((place / mark).exists() for mark in marks)


def show(*, as_json: bool) -> None:
    """Print what is here, and where it is looked for."""
    from rich.table import Table  # noqa: PLC0415

    from torch_dcl.data.sources import places  # noqa: PLC0415

    rows = what_is_here()
    if as_json:
        print_json({"places": [str(place) for place in places()], "data": rows})
        return
    screen = console()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("data", "what", "where"):
        table.add_column(name)
    for row in rows:
        where = f"[green]{row['found']}[/green]" if row["found"] else f"[dim]not found; {row['remedy']}[/dim]"
        table.add_row(row["name"], row["about"], where)
    screen.print(table)
    screen.print()
    screen.print(f"Looked for in {', '.join(str(place) for place in places())}  (set TORCH_DCL_DATA to add a place)")
    screen.print("Multi-digit sets are written when needed.")
    screen.print("Download a set: dcl data fetch NAME · multi-digit files: dcl data digits · a picture: dcl data sheet")


def write_digits(
    sets: list[str], mnist: str | None, out: Path, device: str, images: int | None
) -> list[dict[str, str]]:
    """Write multi-digit sets as prepared files; give their names, paths and SHA-256."""
    from torch_dcl.data import Dataset, write_prepared  # noqa: PLC0415
    from torch_dcl.data.digits import SIZES, generate, segment, source  # noqa: PLC0415
    from torch_dcl.data.layouts import LAYOUTS  # noqa: PLC0415

    if images is not None and images < 1:
        raise UsageError(f"--images must be at least 1, not {images}")
    place, folder = read_device(device), find_mnist(mnist)
    make_folder(out)
    cut = {split: segment(folder, split) for split in SIZES}
    screen = console()
    screen.print(f"Writing with {source(folder)} to {out}")
    written: list[dict[str, str]] = []
    with Bar(screen, len(sets), "sets") as bar:
        for name in sets:
            bar.now(name)
            parts = []
            for split, size in SIZES.items():
                chosen = range(min(size, images)) if images else None
                made, labels = generate(name, split, device=place, mnist=cut[split], indices=chosen)
                parts += [made[:, None].cpu(), labels.cpu()]
            digits = len(LAYOUTS[name].digits)
            classes = tuple(f"{number:0{digits}d}" for number in range(10**digits))
            train, train_labels, test, test_labels = parts
            words = f"{name}, {len(train):,} + {len(test):,}, written with {source(folder)}"
            data = Dataset(name, train, train_labels, test, test_labels, classes, words)
            found = write_prepared(data, out / f"{name}.safetensors")
            written.append({"set": name, "file": str(out / f"{name}.safetensors"), "sha256": found})
            bar.note(f"{out / name}.safetensors  sha256 {found[:16]}…")
            bar.advance()
    screen.print(f"{len(sets)} sets written. Read one with torch_dcl.data.load('prepared:{out / sets[0]}.safetensors')")
    return written


def fetch_set(name: str, out: Path) -> None:
    """Download a set unless it is in the folder, and read it, which checks it."""
    from torch_dcl.data import load  # noqa: PLC0415

    if name not in FETCHED:
        raise UsageError(f"there is no set {name!r} to fetch; {nearest(name, FETCHED)}")
    make_folder(out)
    console().print(str(load(name, root=out, download=True)))


def write_sheet(path: Path, sets: list[str], mnist: str | None, samples: int) -> None:
    """Draw the contact sheet."""
    from torch_dcl.data.layouts import LAYOUTS  # noqa: PLC0415
    from torch_dcl.data.sheet import contact_sheet  # noqa: PLC0415

    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"a contact sheet ends in .png, .svg or .pdf, {path} does not")
    check_output(path)
    if samples < 1:
        raise UsageError(f"--samples must be at least 1, not {samples}")
    contact_sheet(path, mnist=find_mnist(mnist), samples=samples, layouts=[LAYOUTS[name] for name in sets])
    console().print(f"{len(sets)} sets drawn in [bold]{path}[/bold]")


def check(paths: list[Path], *, as_json: bool) -> bool:
    """Check prepared files byte for byte; whether all are sound."""
    from torch_dcl.data import DataError, read_prepared  # noqa: PLC0415

    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path} does not exist; `dcl data digits` writes prepared files")
        inside = sorted(path.rglob("*.safetensors")) if path.is_dir() else [path]
        if not inside:
            raise UsageError(f"{path} holds no prepared file (*.safetensors)")
        files += inside
    rows, screen = [], console()
    for file in files:
        try:
            words, sound = str(read_prepared(file)), True
        except DataError as error:
            words, sound = str(error), False
        rows.append({"file": str(file), "sound": sound, "about": words})
        if not as_json:
            screen.print(f"[{'green' if sound else 'red'}]{'sound' if sound else 'damaged'}[/] {file}: ", end="")
            screen.print(words, markup=False, soft_wrap=True)
    if as_json:
        print_json(rows)
    return all(row["sound"] for row in rows)
