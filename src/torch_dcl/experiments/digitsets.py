"""The multi-digit sets as the protocol uses them: for choosing, and once for the table.

For choosing (learning rates, and how hard a set is) the digits of MNIST's training set are parted: the first five
sixths are written with to train on, the last sixth to judge with, with another seed. The test set's digits play no part
in it.
"""

import os
from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torch_dcl.data._segments import read_digits
from torch_dcl.data.digits import generate, segment, source
from torch_dcl.data.layouts import LAYOUTS, Layout
from torch_dcl.experiments.protocol import content_hash

__all__ = ["Digits", "Labelled", "Purpose", "make_sets", "read_mnist"]

Labelled = tuple[Tensor, Tensor]
Purpose = Literal["choose", "report"]


class Digits(NamedTuple):
    """MNIST, or what stands for it."""

    train: Labelled
    test: Labelled
    source: str

    @property
    def sha256(self) -> str:
        """The hash of all digits and labels, by which a run knows them whatever their folder is called."""
        return content_hash([*self.train, *self.test])


class Sets(NamedTuple):
    """Images and labels by name of the set."""

    train: dict[str, Labelled]
    judge: dict[str, Labelled]


def read_mnist(folder: str | os.PathLike[str] | None) -> Digits:
    """Read MNIST from a folder with its idx files; without one, the embedded excerpt."""
    return Digits(read_digits(folder, "train"), read_digits(folder, "test"), source(folder))


def make_sets(
    digits: Digits,
    layouts: Iterable[str | Layout],
    purpose: Purpose,
    *,
    device: torch.device | str = "cpu",
    images: tuple[int, int] | None = None,
) -> Sets:
    """Write sets to train on and to judge with.

    Args:
        digits: From `read_mnist`.
        layouts: Names, or layouts of any name.
        purpose: "choose" writes both from training digits alone; "report" writes the sets of the table.
        device: Where.
        images: How many to train on and to judge with, the first ones of the set; None for all.
    """
    chosen = [LAYOUTS[layout] if isinstance(layout, str) else layout for layout in layouts]
    count = len(digits.train[0]) * 5 // 6
    if purpose == "choose":
        given = [(part[:count], part[count:]) for part in digits.train]
        parts = [(given[0][i], given[1][i]) for i in range(2)]
        seed = 1
    else:
        parts, seed = [digits.train, digits.test], 0
    cut = [segment(part, split).to(torch.device(device)) for part, split in zip(parts, ("train", "test"), strict=True)]
    sets = Sets({}, {})
    for layout in chosen:
        for split, segments, into, most in zip(
            ("train", "test"), cut, (sets.train, sets.judge), images or (None, None), strict=True
        ):
            indices = None if most is None else range(most)
            into[layout.name] = generate(layout, split, seed=seed, device=device, mnist=segments, indices=indices)
    return sets
