"""The images of Table 2 and of the deciding chart: read from where they lie, or made up to try the path."""

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from torch_dcl.data import Dataset, load
from torch_dcl.experiments.natural.recipes import DATA

__all__ = ["MADE_UP", "NOT_AVAILABLE", "Images", "departures", "made_up", "read_sets", "remedy"]

NOT_AVAILABLE = "not run: data not available"
MADE_UP = "made-up"
"""In place of a folder: generated images."""
Images = tuple[int | None, int | None]
"""How many images to train on and to test with, the first ones of a set; None for all."""


def read_sets(
    names: Sequence[str],
    root: str | os.PathLike[str] | None = None,
    images: Images | None = None,
    report: Callable[[str], None] = print,
) -> tuple[dict[str, Dataset], dict[str, str]]:
    """Read the sets that are there, and say which are not.

    Args:
        names: Some of `DATA`.
        root: Where they are; None for the usual places, `MADE_UP` for generated images.
        images: How many images to train on and to test with, the first ones of a set; None for all.
        report: Called with a line for each set: what was found, or what to put where.

    Returns:
        Sets by name, and by name why one is absent.

    Raises:
        ValueError: There is no such set in the table.
        FileNotFoundError: None of them was found.
    """
    unknown = [name for name in names if name not in DATA]
    if unknown:
        raise ValueError(f"Table 2 has no set {unknown[0]!r}; its sets are {', '.join(DATA)}")
    found: dict[str, Dataset] = {}
    absent: dict[str, str] = {}
    for name in names:
        if root == MADE_UP:
            train, test = images or (None, None)
            found[name] = made_up(name, train or 400, test or 100)
            report(str(found[name]))
            continue
        try:
            whole = load(name, root=root)
        except FileNotFoundError as error:
            absent[name] = NOT_AVAILABLE
            report(f"{name}: {NOT_AVAILABLE}; {remedy(error)}")
            if len(absent) == len(names):
                raise
            continue
        found[name] = whole if images is None else _first(whole, *images)
        report(str(found[name]))
    return found, absent


def remedy(error: FileNotFoundError) -> str:
    """What `load` says of a set that is not there, without what only a caller in Python can do."""
    return str(error).replace(" (pass extra=False to do without the extra images)", "")


def _first(data: Dataset, train: int | None, test: int | None) -> Dataset:
    made = dataclasses.replace(
        data,
        train_images=data.train_images[:train], train_labels=data.train_labels[:train],
        test_images=data.test_images[:test], test_labels=data.test_labels[:test],
    )  # fmt: skip
    count = f"the first {len(made.train_labels):,} and {len(made.test_labels):,}"
    return dataclasses.replace(made, source=f"{data.source}, of which {count}")


def made_up(name: str, train: int, test: int) -> Dataset:
    """Images that nobody took: a pattern of colours for each class, under noise. They are the same every time.

    Every class that occurs has ten images to train on where there are so many.

    Args:
        name: One of `DATA`, whose number of classes it has.
        train: Images to train on.
        test: Images to test with.
    """
    classes = 100 if name == "cifar100" else 10
    drawn = torch.Generator().manual_seed(DATA.index(name))
    used = max(1, min(classes, train // 10))
    patterns = torch.randint(40, 216, (classes, 3, 4, 4), generator=drawn).repeat_interleave(8, 2)
    patterns = patterns.repeat_interleave(8, 3)

    def some(count: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(count) % used
        noise = torch.randint(-40, 40, (count, 3, 32, 32), generator=drawn)
        return (patterns[labels] + noise).to(torch.uint8), labels

    names = tuple(f"pattern {number}" for number in range(classes))
    return Dataset(name, *some(train), *some(test), names, f"made-up images, {train:,} + {test:,}")


def departures(sources: Iterable[str], images: Sequence[int | None] | None, batches: Iterable[int]) -> list[str]:
    """What a run does otherwise than the protocol, in sentences; none where it follows it.

    Args:
        sources: What its images are.
        images: As it was asked for.
        batches: Images of a step, where that is not the recipe's number.
    """
    told = []
    if any(source.startswith("made-up") for source in sources):
        told.append("The images are made up: the errors show that the path runs, and nothing else.")
    elif images:
        train, test = ("all" if count is None else f"the first {count:,}" for count in images)
        told.append(f"Of each set {train} images were trained on, and {test} tested with.")
    if sizes := sorted(set(batches)):
        told.append(f"Batches of {', '.join(map(str, sizes))} images, in place of the recipe's.")
    return told
