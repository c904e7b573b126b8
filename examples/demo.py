"""The idea in about two minutes on a laptop: plan AlexNet, then train a plain and a converted LeNet on real digits.

The digits are an excerpt of MNIST that comes with the package: 6,000 to train on, 1,000 to test on. So the errors
below are those of a small set and few epochs. They show how the tool is used, not what the paper claims.
"""

import argparse
import sys
import time
from collections.abc import Callable
from statistics import mean, stdev

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import torch_dcl as dcl
from torch_dcl import models
from torch_dcl.data import mnist_excerpt

BATCH = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4, help="passes over the 6,000 digits (default 4)")
    parser.add_argument("--seeds", type=int, default=3, help="networks of each kind (default 3)")
    arguments = parser.parse_args()
    if arguments.epochs < 1 or arguments.seeds < 1:
        parser.error("--epochs and --seeds must be at least 1")
    console = Console()
    console.rule("1. Which layers of AlexNet are worth it?", align="left")
    console.print("plan(alexnet()) runs the network once and looks at what follows every layer:\n")
    model = models.alexnet()
    console.print(str(dcl.plan(model, model.input_size)), highlight=False, soft_wrap=True)
    console.print()
    console.rule("2. LeNet on 6,000 real digits: plain, DCL, and low-rank of equal weights", align="left")
    train_all(console, arguments.epochs, arguments.seeds)


def plain() -> nn.Module:
    return models.lenet(10)


def collaborative() -> nn.Module:
    model = models.lenet(10)
    dcl.convert_(model, models.variant_plan(model, "A2"), init="random")
    return model


def low_rank() -> nn.Module:
    model = models.lenet(10)
    dcl.convert_(model, dcl.plan(model, model.input_size, branches=1, width=200).only("fc1"), init="random")
    return model


KINDS: dict[str, Callable[[], nn.Module]] = {"plain": plain, "DCL-A2": collaborative, "low-rank": low_rank}


def train_all(console: Console, epochs: int, seeds: int) -> None:
    train, test = (prepare(split) for split in ("train", "test"))
    errors: dict[str, list[float]] = {kind: [] for kind in KINDS}
    weights: dict[str, int] = {}
    start = time.perf_counter()
    steps = len(KINDS) * seeds * epochs
    columns = (TextColumn("{task.description:<22}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("training", total=steps)
        for seed in range(seeds):
            for kind, build in KINDS.items():
                torch.manual_seed(seed)
                model = build()
                weights[kind] = models.count_weights(model)
                progress.update(task, description=f"{kind}, seed {seed}")
                for done in fit(model, train, epochs, seed):
                    progress.advance(task)
                    if not console.is_terminal and done == epochs:
                        console.print(f"{kind}, seed {seed}: {epochs} epochs trained")
                errors[kind].append(test_error(model, test))
        minutes = (time.perf_counter() - start) / 60
    console.print(result_table(errors, weights, epochs))
    console.print(verdict(errors, weights), highlight=False)
    console.print(
        f"[dim]{seeds} seeds, {epochs} epochs, {minutes:.1f} minutes, torch {torch.__version__}, CPU with "
        f"{torch.get_num_threads()} threads, Python {sys.version.split()[0]}[/dim]",
        highlight=False,
    )


def prepare(split: str) -> tuple[Tensor, Tensor]:
    images, labels = mnist_excerpt(split)
    return images[:, None] / 255, labels


def fit(model: nn.Module, data: tuple[Tensor, Tensor], epochs: int, seed: int):
    """Train, and yield the number of epochs done after each."""
    images, labels = data
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.03, total_steps=epochs * len(images) // BATCH)
    for epoch in range(epochs):
        model.train()
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1000 * seed + epoch))
        for index in order.split(BATCH):
            loss = F.cross_entropy(model(images[index]), labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        yield epoch + 1


@torch.no_grad()
def test_error(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    images, labels = data
    return 100 * (model.eval()(images).argmax(1) != labels).float().mean().item()


def result_table(errors: dict[str, list[float]], weights: dict[str, int], epochs: int) -> Table:
    table = Table(title=f"Test error on 1,000 digits after {epochs} epochs", title_justify="left")
    for name in ("network", "weights", "error, mean ± std (n)", "every seed"):
        table.add_column(name, justify="left" if name == "network" else "right")
    for kind, values in errors.items():
        spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
        table.add_row(
            kind,
            f"{weights[kind]:,}",
            f"{mean(values):.2f} %{spread} ({len(values)})",
            " ".join(f"{value:.1f}" for value in values),
        )
    return table


def verdict(errors: dict[str, list[float]], weights: dict[str, int]) -> str:
    """What the numbers say, and no more."""
    fewer = 100 * (1 - weights["DCL-A2"] / weights["plain"])
    parts = [f"DCL has {fewer:.0f} % fewer weights than the plain network."]
    for rival in ("plain", "low-rank"):
        differences = [a - b for a, b in zip(errors["DCL-A2"], errors[rival], strict=True)]
        difference = mean(differences)
        spread = stdev(differences) if len(differences) > 1 else float("inf")
        # Two standard errors of the paired difference: a plain rule for few seeds.
        clear = abs(difference) > 2 * spread / len(differences) ** 0.5
        word = ("fewer" if difference < 0 else "more") if clear else "about as many"
        parts.append(
            f"It makes {word} errors {'as' if not clear else 'than'} the {rival} one ({difference:+.2f} points)."
        )
    return " ".join([*parts, "A small excerpt and few epochs: this neither confirms nor refutes the paper."])


if __name__ == "__main__":
    main()
