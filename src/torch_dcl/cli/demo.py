"""``dcl demo``: the bar, and a table that fills in. What it does is done in `torch_dcl.experiments.demo`."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from torch_dcl.cli.bar import Bar
from torch_dcl.cli.names import UsageError
from torch_dcl.cli.places import make_folder
from torch_dcl.cli.screen import bullets, console, print_json, say_minutes

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

    from torch_dcl.experiments.demo import Entry

__all__ = ["result_table", "run_demo", "use_free_cores"]


def run_demo(out: Path, *, images: int = 0, epochs: int = 0, seeds: int = 3, as_json: bool = False) -> None:
    """Train, print, draw, and write the page.

    Args:
        out: The folder to write ``report.html`` to.
        images: Images to train on; 0 for as many as fit into two minutes.
        epochs: Passes over them; 0 for the same.
        seeds: Networks of each kind.
        as_json: Whether to end with the result for a machine.
    """
    from rich.markup import escape  # noqa: PLC0415

    from torch_dcl.experiments import demo  # noqa: PLC0415
    from torch_dcl.experiments.columns import weights  # noqa: PLC0415
    from torch_dcl.experiments.digitsets import make_sets, read_mnist  # noqa: PLC0415
    from torch_dcl.files import write_text  # noqa: PLC0415

    images, epochs = images or demo.IMAGES, epochs or demo.EPOCHS
    for name, value, least in (("--images", images, 100), ("--epochs", epochs, 1), ("--seeds", seeds, 1)):
        if value < least:
            raise UsageError(f"{name} must be at least {least}, not {value}")
    make_folder(out)
    screen, start = console(), time.perf_counter()
    threads = use_free_cores()
    screen.print(
        f"[bold]Two-digit numbers, three networks.[/bold] {demo.SET} is written with the digits inside the package; "
        f"{seeds} networks of each kind are trained together, as one fleet."
    )
    sets = make_sets(read_mnist(None), [demo.SET], "report", images=(images, demo.TEST_IMAGES))
    entries = [demo.Entry(column, weights(column, 100)) for column in demo.COLUMNS]
    networks: dict[str, nn.Module] = {}
    with Bar(screen, len(entries) * epochs, "epochs", above=lambda: result_table(entries)) as bar:
        for entry in entries:
            before = bar.done
            bar.now(f"{entry.named}, {seeds} networks")
            bar.inside(0, epochs, "epochs")

            def after_epoch(done: int, before: float = before) -> None:
                bar.inside(done, epochs, "epochs")
                bar.reach(before + done)

            networks[entry.column] = demo.train_entry(entry, sets, epochs, seeds, after_epoch)
            if not screen.is_terminal:
                bar.note(f"{entry.named}: test error {entry.error}, {say_minutes(entry.seconds)}")
    screen.print(result_table(entries))
    found, words = demo.responses(networks["A2"], sets)
    *told, caveat = demo.verdict(entries)
    bullets(screen, [*told, words, caveat])
    path = out / "report.html"
    planned = demo.plan_of_a_network()
    screen.print(f"\nWhich layers of {demo.PLANNED} pay, by dcl plan {demo.PLANNED}:", style="bold")
    screen.print(planned, markup=False, soft_wrap=True)
    write_text(path, demo.demo_page(entries, found, words, images, epochs, seeds, planned))
    spent = say_minutes(time.perf_counter() - start)
    spent += f" on {threads} CPU thread{'s' if threads > 1 else ''}"
    screen.print(f"\n{spent}. The report, for a browser: [bold]{escape(str(path.resolve()))}[/bold]", soft_wrap=True)
    screen.print("Next:  dcl plan torchvision:vgg16 · dcl run table1 --smoke · dcl --help", style="dim")
    if as_json:
        rows = [{"column": e.column, "weights": e.weights, "errors": e.errors, "seconds": e.seconds} for e in entries]
        print_json({"page": str(path.resolve()), "set": demo.SET, "networks": rows, "verdict": [*told, caveat]})


def use_free_cores() -> int:
    """Take no more threads than there are idle cores, and say how many.

    Threads of torch wait for each other at every step. Where another process holds a core, two threads on two cores are
    many times slower than one.
    """
    import torch  # noqa: PLC0415

    busy = round(os.getloadavg()[0])
    threads = max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) - busy))
    torch.set_num_threads(threads)
    return threads


def result_table(entries: "list[Entry]") -> "Table":
    """The table, with what is known so far."""
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from torch_dcl.experiments.demo import WORDS  # noqa: PLC0415

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("network", "weights", "test error % (n)", "every seed", "time"):
        table.add_column(name, justify="left" if name == "network" else "right", no_wrap=name != "network")
    for entry in entries:
        state = entry.error
        if not entry.errors:
            state = "[dim]…[/dim]" if entry.loss is None else f"[dim]training, loss {entry.loss:.2f}[/dim]"
        each = " ".join(f"{error:.1f}" for error in entry.errors)
        spent = say_minutes(entry.seconds) if entry.errors else ""
        name = f"[bold]{entry.named}[/bold]\n[dim]{WORDS[entry.column]}[/dim]"
        table.add_row(name, f"{entry.weights:,}", state, each, spent)
    return table
