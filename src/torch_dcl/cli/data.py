"""``dcl data``: list and download datasets, write and draw multi-digit sets, check prepared files."""

from pathlib import Path
from typing import Annotated, Any

import typer

from torch_dcl.cli.console import (
    HELP,
    SETTINGS,
    PlainGroup,
    UsageError,
    check_folder,
    check_output,
    command,
    console,
    for_machines,
    in_options,
    make_folder,
    nearest,
    print_json,
    read_device,
    table_of,
)
from torch_dcl.progress import Bar

NAMED = {
    "mnist": "60,000 + 10,000 digits",
    "cifar10": "50,000 + 10,000 images",
    "cifar100": "50,000 + 10,000 images",
    "svhn": "604,388 + 26,032 images",
}

data_app = typer.Typer(
    cls=PlainGroup, context_settings=HELP, rich_markup_mode="rich", invoke_without_command=True,
    pretty_exceptions_enable=False,
)  # fmt: skip
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
AsJsonEnd = Annotated[bool, typer.Option("--json", help="Print JSON on stdout at the end; messages go to stderr.")]
Sets = Annotated[str, typer.Option(help="Which sets: II-01,III-10 or all.", metavar="NAMES")]
Mnist = Annotated[
    str | None, typer.Option(help="A folder with the idx files of MNIST. Without it: looked for, else the excerpt.")
]


@data_app.callback()
@command(
    "dcl data",
    "dcl data fetch cifar10",
    "dcl data digits --sets II-01,III-10 --mnist mnist/ --out data/digits",
    "dcl data sheet -o sheet.png",
    "dcl data check data/digits",
    "dcl data prepare imagenet ILSVRC2012/ data/imagenet",
)
def data(context: typer.Context, as_json: AsJson = False) -> None:
    """List datasets and where they are searched. Download, generate, draw and check them."""
    if context.invoked_subcommand is None:
        show(as_json=as_json)


@data_app.command(**SETTINGS)
@command("dcl data fetch mnist", "dcl data fetch cifar10 --out data")
def fetch(
    name: Annotated[str, typer.Argument(help="mnist, cifar10, cifar100 or svhn.", metavar="NAME")],
    out: Annotated[Path, typer.Option("--out", help="The folder to write to.")] = Path("data"),
) -> None:
    """Download a set from where its authors offer it, unless it is here, and check it."""
    from torch_dcl.data import load

    if name not in NAMED:
        raise UsageError(f"there is no set {name!r} to fetch; {nearest(name, NAMED)}")
    make_folder(out)
    console().print(str(load(name, root=out, download=True)), markup=False)


@data_app.command(**SETTINGS)
@command("dcl data digits --sets II-01", "dcl data digits --mnist mnist/ --out data/digits")
def digits(
    sets: Sets = "all",
    mnist: Mnist = None,
    out: Annotated[Path, typer.Option("--out", help="The folder to write to.")] = Path("data/digits"),
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda, auto. The bytes are the same.")] = "auto",
    images: Annotated[int | None, typer.Option(help="Only the first images of each part, to try things out.")] = None,
    as_json: AsJsonEnd = False,
) -> None:
    """Write multi-digit sets as checked files: 60,000 images to train on, 10,000 to test with."""
    from torch_dcl.data import Dataset, write_prepared
    from torch_dcl.data.digits import SIZES, generate, segment, source
    from torch_dcl.data.layouts import LAYOUTS
    from torch_dcl.experiments.digits import find_digits, read_sets

    for_machines(as_json)
    names = read_sets(sets)
    if images is not None and images < 1:
        raise UsageError(f"--images must be at least 1, not {images}")
    place, folder = read_device(device), find_digits(mnist)
    make_folder(out)
    cut = {split: segment(folder, split) for split in SIZES}
    screen = console()
    screen.print(f"Writing with {source(folder)} to {out}", markup=False)
    written: list[dict[str, str]] = []
    with Bar(screen, len(names), "sets") as bar:
        for name in names:
            bar.now(name)
            parts = []
            for split, size in SIZES.items():
                chosen = range(min(size, images)) if images else None
                images_of, labels = generate(name, split, device=place, mnist=cut[split], indices=chosen)
                parts += [images_of[:, None].cpu(), labels.cpu()]
            count = len(LAYOUTS[name].digits)
            classes = tuple(f"{number:0{count}d}" for number in range(10**count))
            train, train_labels, test, test_labels = parts
            words = f"{name}, {len(train):,} + {len(test):,}, written with {source(folder)}"
            data = Dataset(name, train, train_labels, test, test_labels, classes, words)
            digest = write_prepared(data, out / f"{name}.safetensors")
            written.append({"set": name, "file": str(out / f"{name}.safetensors"), "sha256": digest})
            bar.note(f"{out / name}.safetensors  sha256 {digest[:16]}…")
            bar.advance()
    first = f"prepared:{out / names[0]}.safetensors"
    screen.print(f"{len(names)} sets written. Read one with torch_dcl.data.load({first!r})", markup=False)
    if as_json:
        print_json(written)


@data_app.command(**SETTINGS)
@command("dcl data sheet -o sheet.png", "dcl data sheet --sets II-05,III-10 --samples 20 -o two.svg")
def sheet(
    output: Annotated[Path, typer.Option("--output", "-o", help="The picture: .png, .svg or .pdf.")] = Path(
        "sheet.png"
    ),
    sets: Sets = "all",
    mnist: Mnist = None,
    samples: Annotated[int, typer.Option(help="Images of each set.")] = 12,
    as_json: AsJsonEnd = False,
) -> None:
    """Draw the sets: where the digits stand, how they vary, and samples."""
    from torch_dcl.data.layouts import LAYOUTS
    from torch_dcl.data.sheet import contact_sheet
    from torch_dcl.experiments.digits import find_digits, read_sets

    for_machines(as_json)
    names = read_sets(sets)
    if output.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"a contact sheet ends in .png, .svg or .pdf, {output} does not")
    check_output(output)
    if samples < 1:
        raise UsageError(f"--samples must be at least 1, not {samples}")
    contact_sheet(output, mnist=find_digits(mnist), samples=samples, layouts=[LAYOUTS[name] for name in names])
    console().print(f"{len(names)} sets drawn in {output}", markup=False)
    if as_json:
        print_json({"sheet": str(output), "sets": names})


@data_app.command(**SETTINGS)
@command(
    "dcl data prepare imagenet ILSVRC2012/ data/imagenet --workers 16",
    "dcl data prepare imagenet ILSVRC2012/ data/small --size 128 --per-class 100 --skip-corrupt",
)
def prepare(
    name: Annotated[str, typer.Argument(help="imagenet: any images in its layout.", metavar="imagenet")],
    source: Annotated[Path, typer.Argument(help="A folder with train/CLASS/* and val/CLASS/*, or with tar shards.")],
    folder: Annotated[Path, typer.Argument(help="The folder to write to; what is there is completed.")],
    size: Annotated[int, typer.Option(help="Height and width of the prepared images.")] = 256,
    shape: Annotated[
        str, typer.Option(help="squash ignores the aspect ratio, as Caffe does; crop keeps it and cuts the centre.")
    ] = "squash",
    per_class: Annotated[int | None, typer.Option(help="Only the first images of each class.")] = None,
    skip_corrupt: Annotated[
        bool, typer.Option("--skip-corrupt", help="Leave out images that cannot be decoded, and count them.")
    ] = False,
    images_per_shard: Annotated[int, typer.Option(help="Images in a file.")] = 1024,
    workers: Annotated[int, typer.Option(help="Processes that decode; 0 for one on every core.")] = 0,
    as_json: AsJsonEnd = False,
) -> None:
    """Decode and resize images once, into hashed shards that `dcl run imagenet` reads without decoding."""
    for_machines(as_json)
    if name != "imagenet":
        raise UsageError(f"there is nothing to prepare for {name!r}; {nearest(name, ['imagenet'])}")
    result = prepare_shards(
        source, folder, workers, size=size, shape=shape, per_class=per_class, skip_corrupt=skip_corrupt,
        images_per_shard=images_per_shard,
    )  # fmt: skip
    if as_json:
        print_json(result)


@data_app.command("check", **SETTINGS)
@command("dcl data check data/digits", "dcl data check data/digits/MNIST-II-01.safetensors")
def check_data(
    paths: Annotated[list[Path], typer.Argument(help="Prepared files, or folders with some.")], as_json: AsJson = False
) -> None:
    """Check prepared files, byte for byte."""
    from rich.text import Text

    from torch_dcl.data import DataError, read_prepared

    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path} does not exist; `dcl data digits` writes prepared files")
        shards = path.is_dir() and (path / "imagenet.json").is_file()
        inside = [path] if shards or not path.is_dir() else sorted(path.rglob("*.safetensors"))
        if not inside:
            raise UsageError(f"{path} holds no prepared file (*.safetensors)")
        files += inside
    rows, screen = [], console()
    for file in files:
        try:
            words, sound = check_shards(file) if file.is_dir() else str(read_prepared(file)), True
        except DataError as error:
            words, sound = str(error), False
        rows.append({"file": str(file), "sound": sound, "about": words})
        if not as_json:
            state = ("sound", "green") if sound else ("damaged", "red")
            screen.print(Text.assemble(state, f" {file}: {words}"), soft_wrap=True)
    if as_json:
        print_json(rows)
    if not all(row["sound"] for row in rows):
        raise typer.Exit(1)


def available_data() -> list[dict[str, Any]]:
    """Every named set with its location, or with the remedy if it is missing."""
    from torch_dcl.data.sources import is_here, places, remedy

    rows: list[dict[str, Any]] = [
        {"name": "mnist-excerpt", "found": "inside the package", "about": "6,000 + 1,000 digits", "remedy": None}
    ]
    looked = places()
    for name, about in NAMED.items():
        there = next((str(place) for place in looked if is_here(name, place)), None)
        fetch = f"dcl data fetch {name}, or {remedy(name, looked[0], failed=True)}"
        rows.append({"name": name, "found": there, "about": about, "remedy": None if there else fetch})
    for place in looked:
        files = [file for file in sorted(place.rglob("*.safetensors")) if file.is_file()] if place.is_dir() else []
        if files:
            size = sum(file.stat().st_size for file in files) / 2**20
            about = f"{len(files)} prepared files, {size:,.0f} MiB"
            rows.append({"name": "prepared", "found": str(place), "about": about, "remedy": None})
    return rows


def show(*, as_json: bool) -> None:
    """Print the available data, and the folders that are searched."""
    from rich.text import Text

    from torch_dcl.data.sources import places

    rows = available_data()
    if as_json:
        print_json({"places": [str(place) for place in places()], "data": rows})
        return
    screen = console()
    heads = ("data", "what", "where") if screen.width >= 60 else ("data", "where")
    table = table_of(*heads, fixed=("data",))
    for row in rows:
        there, remedy = row["found"], f"not found; {row['remedy']}"
        where = Text(there, "green") if there else Text(remedy, "dim")
        cells = {"data": row["name"], "what": row["about"], "where": where}
        table.add_row(*(cells[head] for head in heads))
    screen.print(table)
    screen.print()
    looked = ", ".join(str(place) for place in places())
    screen.print(f"Searched in {looked}  (set TORCH_DCL_DATA to add a folder)", markup=False)
    screen.print("Multi-digit sets are generated when needed.")
    screen.print("Download a set: dcl data fetch NAME · multi-digit files: dcl data digits · a picture: dcl data sheet")


def prepare_shards(source: Path, folder: Path, workers: int, **settings: Any) -> dict[str, Any]:
    """Write prepared shards with a bar; give counts, bytes and what was skipped."""
    import dataclasses
    import os

    from torch_dcl.data import DataError, prepare_imagenet
    from torch_dcl.data.imagenet.prepare import say_skipped

    check_folder(folder, "folder")
    screen = console()
    screen.print(f"Preparing {source} in {folder}", markup=False)
    with Bar(screen, 0, "shards") as bar:

        def report(done: int, total: int) -> None:
            if not done:
                bar.begin_at(0, total)
            bar.reach(done)

        try:
            result = prepare_imagenet(source, folder, workers=workers or os.cpu_count() or 1, report=report, **settings)
        except (FileNotFoundError, DataError) as error:
            raise UsageError(str(error)) from error
        except ValueError as error:
            options = ("size", "shape", "per-class", "images-per-shard", "workers")
            raise UsageError(in_options(str(error), options)) from error
    images = " + ".join(f"{count:,}" for count in result.images.values())
    screen.print(
        f"{images} images in {result.shards:,} shards, {result.bytes / 2**30:,.2f} GiB; {result.written:,} written "
        f"now. Train on them: dcl run imagenet --data {folder}", markup=False, soft_wrap=True,
    )  # fmt: skip
    if result.skipped:
        screen.print(f"{say_skipped(len(result.skipped))}, such as {result.skipped[0]}", markup=False)
    return {**dataclasses.asdict(result), "folder": str(folder)}


def check_shards(folder: Path) -> str:
    """Hash all shards of a folder that `dcl data prepare` wrote; what they are, in words."""
    from torch_dcl.data.imagenet.sources import Mapped

    splits = [Mapped(folder, split) for split in ("train", "val")]
    for split in splits:
        split.check()
    return "; ".join(split.about for split in splits)
