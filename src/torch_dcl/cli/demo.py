"""``dcl demo``: the idea in two minutes on a laptop, without a GPU and without a network.

The digits are the excerpt of MNIST that comes with the package. So the errors are those of few images and few epochs.
They show how the tool is used, not what the paper claims.
"""

import dataclasses
import os
import time
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_dcl.cli import pages
from torch_dcl.cli.names import UsageError
from torch_dcl.cli.screen import Bar, bullets, console, say_minutes

if TYPE_CHECKING:
    from rich.table import Table
    from torch import nn

    from torch_dcl.paper.digitsets import Sets

__all__ = ["COLUMNS", "Entry", "run_demo", "verdict"]

SET = "MNIST-II-01"
COLUMNS = {"baseline": "plain", "A2": "DCL-A2", "low-rank": "low-rank"}
WORDS = {
    "baseline": "LeNet as it is",
    "A2": "fc1 as two multiplied branches",
    "low-rank": "fc1 as one branch of equal weights",
}
CAVEAT = "A small excerpt and few epochs: this shows the tool, and neither confirms nor refutes the paper."
# By time alone, never by what came out: about 75 seconds on two idle cores, about 100 on one.
IMAGES, TEST_IMAGES, EPOCHS, SEEDS = 3600, 1000, 4, 3


@dataclasses.dataclass
class Entry:
    """One row of the table, as it fills in."""

    column: str
    weights: int
    errors: list[float] = dataclasses.field(default_factory=list)
    loss: float | None = None
    """Of the last epoch, mean over the seeds, while it is trained."""
    seconds: float = 0.0

    @property
    def named(self) -> str:
        """How it is called."""
        return COLUMNS[self.column]


def run_demo(out: Path, *, images: int = IMAGES, epochs: int = EPOCHS, seeds: int = SEEDS) -> None:
    """Train, print, draw, and write the page.

    Args:
        out: The folder to write ``report.html`` to.
        images: Images to train on.
        epochs: Passes over them.
        seeds: Networks of each kind.
    """
    from torch_dcl.paper.columns import weights  # noqa: PLC0415
    from torch_dcl.paper.digitsets import make_sets, read_mnist  # noqa: PLC0415

    for name, value, least in (("--images", images, 100), ("--epochs", epochs, 1), ("--seeds", seeds, 1)):
        if value < least:
            raise UsageError(f"{name} must be at least {least}, not {value}")
    screen, start = console(), time.perf_counter()
    threads = use_free_cores()
    screen.print(
        f"[bold]Two-digit numbers, three networks.[/bold] {SET} is written with the digits inside the package; "
        f"{seeds} networks of each kind are trained together, as one fleet."
    )
    sets = make_sets(read_mnist(None), [SET], "report", images=(images, TEST_IMAGES))
    entries = [Entry(column, weights(column, 100)) for column in COLUMNS]
    shown: nn.Module | None = None
    with Bar(screen, len(entries) * epochs, "epochs", above=lambda: result_table(entries), every=5.0) as bar:
        for entry in entries:
            bar.now(f"{entry.named}, {seeds} networks")
            network = _train(entry, sets, epochs, seeds, bar)
            if entry.column == "A2":
                shown = network
            if not screen.is_terminal:
                bar.note(f"{entry.named}: test error {_error(entry)}, {say_minutes(entry.seconds)}")
    screen.print(result_table(entries))
    told = verdict(entries)
    found, words = _responses(shown, sets)
    bullets(screen, [*told[:-1], words, told[-1]])
    out.mkdir(parents=True, exist_ok=True)
    path = out / "report.html"
    _write_page(path, entries, told, found, words, images, epochs, seeds)
    spent = say_minutes(time.perf_counter() - start)
    spent += f" on {threads} CPU thread{'s' if threads > 1 else ''}"
    screen.print(f"\n{spent}. The report, for a browser: [bold]{path.resolve()}[/bold]", soft_wrap=True)
    screen.print("Next:  dcl plan torchvision:vgg16 · dcl run table1 --smoke · dcl --help", style="dim")


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


def _train(entry: Entry, sets: "Sets", epochs: int, seeds: int, bar: Bar) -> "nn.Module":
    """Train the networks of a row as one fleet, and give the first of them."""
    from torch_dcl.paper.columns import build  # noqa: PLC0415
    from torch_dcl.paper.search import stored_choice  # noqa: PLC0415
    from torch_dcl.paper.statistics import mean  # noqa: PLC0415
    from torch_dcl.training import Fleet, Member, Schedule  # noqa: PLC0415

    trial = stored_choice()[entry.column][2]
    schedule = Schedule(epochs, warmup=20, drops=(0.6, 0.9))
    members = [Member(entry.named, SET, seed, trial.lr, schedule, clip=trial.clip) for seed in range(seeds)]
    start = time.perf_counter()
    fleet = Fleet([build(entry.column, 100, seed) for seed in range(seeds)], members, sets.train, batch=50)

    def after_epoch(trained: Fleet) -> None:
        entry.loss = mean(trained.history.train_loss[-1])
        bar.advance()

    fleet.train(on_epoch=after_epoch)
    entry.errors = fleet.evaluate(sets.judge).errors.tolist()
    entry.seconds = time.perf_counter() - start
    return fleet.network(0)


def result_table(entries: list[Entry]) -> "Table":
    """The table, with what is known so far."""
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("network", "weights", "test error % (n)", "every seed", "time"):
        table.add_column(name, justify="left" if name == "network" else "right", no_wrap=name != "network")
    for entry in entries:
        state = _error(entry)
        if not entry.errors:
            state = "[dim]…[/dim]" if entry.loss is None else f"[dim]training, loss {entry.loss:.2f}[/dim]"
        each = " ".join(f"{error:.1f}" for error in entry.errors)
        spent = say_minutes(entry.seconds) if entry.errors else ""
        name = f"[bold]{entry.named}[/bold]\n[dim]{WORDS[entry.column]}[/dim]"
        table.add_row(name, f"{entry.weights:,}", state, each, spent)
    return table


def _error(entry: Entry) -> str:
    from torch_dcl.paper.statistics import mean, std  # noqa: PLC0415

    if not entry.errors:
        return ""
    spread = f" ± {std(entry.errors):.2f}" if len(entry.errors) > 1 else ""
    return f"{mean(entry.errors):.2f}{spread} ({len(entry.errors)})"


def verdict(entries: list[Entry]) -> list[str]:
    """What the numbers say, and no more."""
    from torch_dcl.paper.statistics import mean, paired, signed  # noqa: PLC0415

    by_column = {entry.column: entry for entry in entries}
    ours = by_column["A2"]
    fewer = 100 * (1 - ours.weights / by_column["baseline"].weights)
    told = [f"DCL-A2 has {fewer:.0f} % fewer weights than the plain network."]
    for column in ("baseline", "low-rank"):
        rival = by_column[column]
        if len(ours.errors) < 2:
            gap = signed(mean(ours.errors) - mean(rival.errors))
            told.append(f"Against the {rival.named} one its error differs by {gap} points; one seed cannot say more.")
            continue
        found = paired(ours.errors, rival.errors)
        interval = (
            f"{signed(found.mean)} points, 95 % interval {signed(found.low)} to {signed(found.high)}, n = {found.n}"
        )
        if found.clear:
            told.append(
                f"It errs {'less' if found.clear < 0 else 'more'} often than the {rival.named} one ({interval})."
            )
        else:
            told.append(f"Its errors cannot be told from those of the {rival.named} one ({interval}).")
    return [*told, CAVEAT]


def _responses(model: "nn.Module | None", sets: "Sets") -> tuple[Any, str]:
    """One filter of the DCL layer: what its fusion and its branches answer to, and that in words."""
    from torch_dcl.paper.complementary import complementary  # noqa: PLC0415

    if model is None:
        return None, "No filter was looked at."
    images, labels = sets.judge[SET]
    try:
        found = complementary(model, "fc1", None, images[:, None] / 255, labels)
    except ValueError as error:
        return None, f"No filter can be shown: {error}."
    own = "; ".join(f"branch {t} to tens {tens} and units {units}" for t, (tens, units) in enumerate(found.own, 1))
    words = f"Filter {found.filter} of the DCL layer answers most to the number {found.names[found.highest]}"
    return found, f"{words}. By themselves its branches answer most: {own}."


def _write_page(
    path: Path, entries: list[Entry], told: list[str], found: Any, words: str, images: int, epochs: int, seeds: int
) -> None:
    from torch_dcl.files import write_text  # noqa: PLC0415
    from torch_dcl.training.runs import environment  # noqa: PLC0415

    head = "".join(f'<th scope="col">{name}</th>' for name in ("network", "weights", "test error %, mean ± std (n)",
                                                               "every seed"))  # fmt: skip
    rows = "".join(
        f'<tr><th scope="row"><b>{escape(entry.named)}</b><small>{escape(WORDS[entry.column])}</small></th>'
        f"<td>{entry.weights:,}</td><td>{_error(entry)}</td><td>{' '.join(f'{e:.1f}' for e in entry.errors)}</td></tr>"
        for entry in entries
    )
    here = environment()
    again = {
        "Protocol": f"{SET}, {images:,} images to train on and {TEST_IMAGES:,} to test with, written with the embedded "
        f"excerpt of MNIST; {epochs} epochs, batch 50, {seeds} seeds; learning rates as chosen for Table 1",
        "Hardware": here["gpu"] or f"CPU, {here['cpus']} cores",
        "Versions": ", ".join(f"{name} {version}" for name, version in here["versions"].items()),
        "Command": f"dcl demo --images {images} --epochs {epochs} --seeds {seeds}",
    }
    listed = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in again.items())
    lead = escape(" ".join(told[:-1])).replace("n = ", "n\u00a0=\u00a0").replace(" %", "\u00a0%")
    parts = [
        "<h1>dcl demo: two-digit numbers, three networks</h1>",
        f'<p class="lead">{lead}</p><p class="soft">{escape(told[-1])}</p>',
        "<h2>Errors</h2>",
        f'<div class="box" tabindex="0" role="region" aria-label="Errors"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>",
        "<h2>What a filter and its branches answer to</h2>", f"<p>{escape(words)}</p>",
    ]  # fmt: skip
    if found is not None:
        from torch_dcl.paper.figures import complementary_figure  # noqa: PLC0415

        title = f"DCL-A2 on {SET}, the network of seed 0"
        parts.append(pages.figure(lambda dark: complementary_figure(found, title=title, dark=dark), "complementary"))
    parts += [f"<h2>The images</h2>{pages.sheet([SET])}", f"<h2>To run it again</h2><dl>{listed}</dl>"]
    write_text(path, pages.page("dcl demo", parts))
