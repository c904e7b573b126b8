"""``dcl data``, with its options and examples."""

from pathlib import Path
from typing import Annotated

import typer

from torch_dcl.cli.help import HELP, SETTINGS, PlainGroup
from torch_dcl.cli.names import read_sets
from torch_dcl.cli.screen import command, for_machines, print_json

__all__ = ["AsJson", "AsJsonEnd", "data_app"]

data_app = typer.Typer(
    cls=PlainGroup, context_settings=HELP, rich_markup_mode="rich", invoke_without_command=True,
    pretty_exceptions_enable=False,
)  # fmt: skip
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
AsJsonEnd = Annotated[bool, typer.Option("--json", help="End with JSON on stdout; what is for people goes to stderr.")]
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
)
def data(context: typer.Context, as_json: AsJson = False) -> None:
    """What data is here, and where it is looked for. Fetch it, make it, draw it, check it."""
    if context.invoked_subcommand is None:
        from torch_dcl.cli.datasets import show  # noqa: PLC0415

        show(as_json=as_json)


@data_app.command(**SETTINGS)
@command(
    "dcl data fetch mnist",
    "dcl data fetch cifar10 --out data",
)
def fetch(
    name: Annotated[str, typer.Argument(help="mnist, cifar10, cifar100 or svhn.", metavar="NAME")],
    out: Annotated[Path, typer.Option("--out", help="The folder to write to.")] = Path("data"),
) -> None:
    """Download a set from where its authors offer it, unless it is here, and check it."""
    from torch_dcl.cli.datasets import fetch_set  # noqa: PLC0415

    fetch_set(name, out)


@data_app.command(**SETTINGS)
@command(
    "dcl data digits --sets II-01",
    "dcl data digits --mnist mnist/ --out data/digits",
)
def digits(
    sets: Sets = "all",
    mnist: Mnist = None,
    out: Annotated[Path, typer.Option("--out", help="The folder to write to.")] = Path("data/digits"),
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda, auto. The bytes are the same.")] = "auto",
    images: Annotated[int | None, typer.Option(help="Only the first images of each part, to try things out.")] = None,
    as_json: AsJsonEnd = False,
) -> None:
    """Write multi-digit sets as checked files: 60,000 images to train on, 10,000 to test with."""
    from torch_dcl.cli.datasets import write_digits  # noqa: PLC0415

    for_machines(as_json)
    files = write_digits(read_sets(sets), mnist, out, device, images)
    if as_json:
        print_json(files)


@data_app.command(**SETTINGS)
@command(
    "dcl data sheet -o sheet.png",
    "dcl data sheet --sets II-05,III-10 --samples 20 -o two.svg",
)
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
    from torch_dcl.cli.datasets import write_sheet  # noqa: PLC0415

    for_machines(as_json)
    write_sheet(output, read_sets(sets), mnist, samples)
    if as_json:
        print_json({"sheet": str(output), "sets": read_sets(sets)})


@data_app.command("check", **SETTINGS)
@command(
    "dcl data check data/digits",
    "dcl data check data/digits/MNIST-II-01.safetensors",
)
def check_data(
    paths: Annotated[list[Path], typer.Argument(help="Prepared files, or folders with some.")], as_json: AsJson = False
) -> None:
    """Check prepared files, byte for byte."""
    from torch_dcl.cli.datasets import check  # noqa: PLC0415

    if not check(paths, as_json=as_json):
        raise typer.Exit(1)
