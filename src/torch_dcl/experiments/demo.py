"""The idea in two minutes on a laptop: three networks on two-digit numbers, a verdict, the plan of a network, a page.

The digits are the excerpt of MNIST that comes with the package. So the errors are those of few images and few epochs.
They show how the tool is used, not what the paper claims.

The learning rates are chosen for these epochs on the excerpt's training digits alone: `choose_rates` trains every
network at every rate of `TRIED` and takes the lowest error, with seeds that the demo does not use. ``python -m
torch_dcl.experiments.demo`` does it again.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from html import escape

from torch import nn

from torch_dcl.experiments.columns import build
from torch_dcl.experiments.complementary import Complementary, complementary
from torch_dcl.experiments.digitsets import Digits, Sets, make_sets, read_mnist
from torch_dcl.experiments.document import box, document, figure, listed, prose, sheet, table
from torch_dcl.experiments.statistics import mean, paired, signed, std
from torch_dcl.fleet import Fleet, Member, Schedule
from torch_dcl.fleet.run_folder import environment

__all__ = [
    "CAVEAT", "COLUMNS", "PLANNED", "RATES", "SET", "WORDS", "Entry", "choose_rates", "demo_page", "plan_of_a_network",
    "responses", "train_entry", "verdict",
]  # fmt: skip

SET = "MNIST-II-01"
COLUMNS = {"baseline": "plain", "A2": "DCL-A2", "low-rank": "low-rank"}
WORDS = {
    "baseline": "LeNet as it is",
    "A2": "fc1 as two multiplied branches",
    "low-rank": "fc1 as one branch of equal weights",
}
CAVEAT = "A small excerpt and few epochs: this shows the tool, and neither confirms nor refutes the paper."
# Less than two minutes on one core, so that two cores need not be idle.
IMAGES, TEST_IMAGES, EPOCHS, SEEDS, BATCH, CLIP = 5000, 1000, 6, 3, 50, 1.0
TRIED = (0.1, 0.2, 0.3)
RATES = {"baseline": 0.3, "A2": 0.2, "low-rank": 0.2}
"""What `choose_rates` chose."""
PLANNED = "alexnet"
"""The network of torchvision whose plan is shown."""


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

    @property
    def error(self) -> str:
        """Mean, deviation and n; nothing before there are errors."""
        if not self.errors:
            return ""
        spread = f" ± {std(self.errors):.2f}" if len(self.errors) > 1 else ""
        return f"{mean(self.errors):.2f}{spread} ({len(self.errors)})"


def train_entry(
    entry: Entry, sets: Sets, epochs: int, seeds: int, on_epoch: Callable[[int], None] | None = None
) -> nn.Module:
    """Train the networks of a row as one fleet, fill the row in, and give the first of them.

    Args:
        entry: The row.
        sets: `SET`, from `make_sets`.
        epochs: Passes over the images.
        seeds: How many networks.
        on_epoch: Called after every epoch with how many are done.
    """
    start = time.perf_counter()
    fleet = _fleet(entry.column, RATES[entry.column], sets, epochs, range(seeds))

    def after_epoch(trained: Fleet) -> None:
        entry.loss = mean(trained.history.train_loss[-1])
        if on_epoch is not None:
            on_epoch(trained.epoch)

    fleet.train(on_epoch=after_epoch)
    entry.errors = fleet.evaluate(sets.judge).errors.tolist()
    entry.seconds = time.perf_counter() - start
    return fleet.network(0)


def _fleet(column: str, lr: float, sets: Sets, epochs: int, seeds: Iterable[int]) -> Fleet:
    schedule = Schedule(epochs, warmup=60, drops=(0.6, 0.9))
    members = [Member(COLUMNS[column], SET, seed, lr, schedule, clip=CLIP) for seed in seeds]
    networks = [build(column, 100, member.seed) for member in members]
    # On a CPU networks run faster one by one than as a stack.
    return Fleet(networks, members, sets.train, batch=BATCH, stacked=False)


def choose_rates(
    digits: Digits, *, rates: Sequence[float] = TRIED, images: int = IMAGES, epochs: int = EPOCHS,
    seeds: Sequence[int] = (100, 101), report: Callable[[str], None] = print,
) -> dict[str, float]:  # fmt: skip
    """The learning rate of every network with the lowest error on training digits that are kept apart.

    Args:
        digits: From `read_mnist`; its test part is not looked at.
        rates: What to try, the same for every network.
        images: How many to train on.
        epochs: How often.
        seeds: None that the demo uses.
        report: Called with a line for every network and rate.
    """
    sets = make_sets(digits, [SET], "choose", images=(images, TEST_IMAGES))
    found = {}
    for column in COLUMNS:
        errors = {}
        for lr in rates:
            fleet = _fleet(column, lr, sets, epochs, seeds)
            fleet.train()
            errors[lr] = mean(fleet.evaluate(sets.judge).errors.tolist())
            report(f"{column} at {lr:g}: {errors[lr]:.2f} %")
        found[column] = min(errors, key=lambda lr: errors[lr])
    return found


def plan_of_a_network() -> str:
    """The plan of `PLANNED` as its table: which layers of a network that people use pay."""
    import torchvision

    from torch_dcl.convert import plan

    return str(plan(torchvision.models.get_model(PLANNED), (3, 224, 224)))


def verdict(entries: Sequence[Entry]) -> list[str]:
    """What the numbers say, and no more."""
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


def responses(model: nn.Module, sets: Sets) -> tuple[Complementary | None, str]:
    """One filter of the DCL layer: what its fusion and its branches answer to, and that in words."""
    images, labels = sets.judge[SET]
    try:
        found = complementary(model, "fc1", None, images[:, None] / 255, labels)
    except ValueError as error:
        return None, f"No filter can be shown: {error}."
    own = "; ".join(f"branch {t} to tens {tens} and units {units}" for t, (tens, units) in enumerate(found.own, 1))
    words = f"Filter {found.filter} of the DCL layer answers most to the number {found.names[found.highest]}"
    return found, f"{words}. By themselves its branches answer most: {own}."


def demo_page(
    entries: Sequence[Entry], found: Complementary | None, words: str, images: int, epochs: int, seeds: int,
    planned: str,
) -> str:  # fmt: skip
    """The page.

    Args:
        entries: The rows.
        found: What a filter answers to.
        words: That in words.
        images: How many were trained on.
        epochs: How often.
        seeds: How many networks of each kind.
        planned: From `plan_of_a_network`.
    """
    here, told = environment(), verdict(entries)
    again = {
        "Protocol": f"{SET}, {images:,} images to train on and {TEST_IMAGES:,} to test with, written with the embedded "
        f"excerpt of MNIST; {epochs} epochs, batch {BATCH}, {seeds} seeds; learning rates "
        + ", ".join(f"{RATES[column]:g} ({name})" for column, name in COLUMNS.items())
        + f", chosen for {EPOCHS} epochs on training digits alone",
        "Hardware": here["gpu"] or f"CPU, {here['cpus']} cores",
        "Versions": ", ".join(f"{name} {version}" for name, version in here["versions"].items()),
        "Command": f"dcl demo --images {images} --epochs {epochs} --seeds {seeds}",
    }
    rows = [
        [
            f"<b>{escape(entry.named)}</b><small>{escape(WORDS[entry.column])}</small>",
            f"{entry.weights:,}",
            entry.error,
            " ".join(f"{error:.1f}" for error in entry.errors),
            f"{entry.seconds:.0f} s",
        ]
        for entry in entries
    ]
    heads = ("network", "weights", "test error %, mean ± std (n)", "every seed", "time")
    parts = [
        "<h1>dcl demo: two-digit numbers, three networks</h1>",
        f'<p class="lead">{prose(" ".join(told[:-1]))}</p><p class="soft">{prose(told[-1])}</p>',
        f"<h2>Errors</h2>{table(heads, rows, 'Errors')}",
        f"<h2>What a filter and its branches answer to</h2><p>{prose(words)}</p>",
    ]
    if found is not None:
        from torch_dcl.experiments.figures import complementary_figure

        title = f"DCL-A2 on {SET}, the network of seed 0"
        parts.append(figure(lambda dark: complementary_figure(found, title=title, dark=dark), "complementary"))
    title = f"The plan of {PLANNED}"
    parts += [f"<h2>{title}</h2>{box(f'<pre>{escape(planned)}</pre>', title)}"]
    parts += [f"<h2>The images</h2>{sheet([SET])}", f"<h2>To run it again</h2>{listed(again)}"]
    return document("dcl demo", parts)


if __name__ == "__main__":
    print(choose_rates(read_mnist(None)))
