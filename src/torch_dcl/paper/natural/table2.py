"""Table 2, run: every column on every set with every seed, in slices that can be gone on with.

The seeds of a column train as a fleet. A fleet is written down at the ends of epochs, so that a slice may end, or a
process be killed, in the middle of a training, and the rest gives the same weights. Recipes are the paper's, and
nothing is chosen by looking at a test set: it is looked at once, at the end of each training.
"""

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch_dcl.data import Dataset
from torch_dcl.files import SealedError
from torch_dcl.paper.engine import Progress, Settings
from torch_dcl.paper.natural.recipes import (
    COLUMNS,
    DATA,
    NETWORKS,
    Recipe,
    build,
    caffe_factors,
    inputs_of,
    network_of,
    recipe_of,
)  # fmt: skip
from torch_dcl.paper.natural.sets import Images, read_sets
from torch_dcl.paper.natural.table import NaturalTable, table2_of
from torch_dcl.paper.ranks import Rank
from torch_dcl.paper.telling import telling
from torch_dcl.training import Fleet, Member
from torch_dcl.training.fleet import Precision
from torch_dcl.training.runs import RunFolder

__all__ = ["Entry", "How", "columns_of", "make_fleet", "read_sets", "run_table2", "train_in_slices"]

Report = Callable[[str], None]
Tell = Callable[[Progress], None]


class Entry(NamedTuple):
    """One entry of the table, for one seed."""

    data: str
    column: str
    seed: int


@dataclasses.dataclass(frozen=True)
class How:
    """How fleets are run; none of it is the recipe's."""

    device: str = "cpu"
    precision: Precision | None = None
    most: int = 8
    """Networks of a fleet."""
    stacked: bool = False
    """Whether networks train as a stack. Measured slower for the networks of Table 2, which fill a GPU side by side."""
    compile: bool = False
    """Whether networks that are not stacked are compiled."""
    streams: int = 8
    """How many networks that are not stacked run at a time on a GPU."""
    deterministic: bool = False
    """Whether a GPU must give the same bits every time, so that a run in slices ends as one in a piece does."""
    average: bool = False
    """Whether the test averages over an image and its mirror image."""
    every: float = 60.0
    """Seconds between two checkpoints, roughly: they are written at the ends of epochs."""


def run_table2(
    path: str | os.PathLike[str],
    *,
    networks: Sequence[str] = NETWORKS,
    columns: Sequence[str] | None = None,
    data: Sequence[str] = DATA,
    seeds: int = 3,
    scale: float = 1.0,
    root: str | os.PathLike[str] | None = None,
    images: Images | None = None,
    batch: int | None = None,
    how: How | None = None,
    resume: bool = False,
    seconds: float = math.inf,
    report: Report = print,
    begin: Callable[[int, int], None] | None = None,
    on_epoch: Tell | None = None,
) -> NaturalTable | None:
    """Run the table, or go on with it.

    Started by ``torchrun``, every rank takes a share of the fleets, and the first one puts the table together.

    Args:
        path: The run folder.
        networks: Which, each without and with DCL.
        columns: Which columns exactly, in place of ``networks``.
        data: Which sets. One that is not found is noted as absent.
        seeds: How many, from 0.
        scale: What part of each recipe's epochs to train; a shortened run is marked so.
        root: Where the data is; None for the usual places, `MADE_UP` for generated images.
        images: How many images of a set to train on and to test with; None for all. For trying things out.
        batch: Images of a step, in place of the recipes'. For trying things out.
        how: Device, precision and the like; the rank's own GPU takes the place of ``cuda``.
        resume: Whether to go on with what the folder holds.
        seconds: Stop at the next end of an epoch when so much time has gone, and leave the rest to a later call. Every
            call goes on by one epoch at least.
        report: Called with lines of progress.
        begin: Called once, with the networks that were done before and those that this process has in all.
        on_epoch: Called before a fleet begins and after each of its epochs. When it raises KeyboardInterrupt the fleet
            is kept first.

    Returns:
        The table, or None where networks are missing: time was up, or this is not the first rank.

    Raises:
        RunError: The folder is in use, or belongs to another recipe.
        FileNotFoundError: None of the sets was found.
    """
    how = how or How()
    start = time.perf_counter()
    rank = Rank.here()
    how = dataclasses.replace(how, device=rank.device(how.device))
    wanted = columns_of(networks, columns)
    sets, absent = read_sets(data, root, images, report if not rank.number else lambda _: None)
    recipes = {
        (name, column): _recipe(column, sets[name], scale, batch) for name in sets for column in wanted
    }  # fmt: skip
    asked = {
        "table": 2, "columns": list(wanted), "seeds": seeds, "scale": scale, "images": images,
        "data": {name: sets[name].source if name in sets else absent[name] for name in data},
        "recipes": {f"{name} {column}": dataclasses.asdict(recipe) for (name, column), recipe in recipes.items()},
        "precision": how.precision, "average": how.average, "most": how.most, "compile": how.compile,
        "deterministic": how.deterministic,
    }  # fmt: skip
    with rank.open(path, asked, resume=resume) as folder:
        told, report = telling(folder, Settings(on_epoch=on_epoch), report, rank.part)
        entries = [Entry(name, column, seed) for name in sets for column in wanted for seed in range(seeds)]
        known = {entry_of(record) for record in folder.read("outcomes")}
        mine = rank.share(_fleets(entries, how.most))
        left = [fleet for fleet in mine if any(entry not in known for entry in fleet)]
        if begin is not None:
            begin(len(known), len(known) + sum(map(len, left)))
        if known:
            report(f"{len(known)} of {len(entries)} entries are done already")
        for number, fleet in enumerate(left, 1):
            if number > 1 and time.perf_counter() - start > seconds:  # the first one goes on by an epoch in any case
                report(f"time is up: {len(left) - number + 1} fleets are left; go on with --resume")
                break
            of = (fleet[0].data, fleet[0].column)
            slice_ = Slice(folder, rank.part, start + seconds, how.every, (number, len(left)), report, told.on_epoch)
            if not _one_fleet(fleet, sets[of[0]], recipes[of], how, known, slice_):
                report(f"time is up: {len(left) - number + 1} fleets are left; go on with --resume")
                break
        folder.append(f"minutes{rank.part}", {"training": (time.perf_counter() - start) / 60})
        rank.wait()
        if rank.number:
            return None
        done = {entry_of(record) for record in folder.read("outcomes")}
        return table2_of(folder) if done.issuperset(entries) else None


def entry_of(record: Mapping[str, Any]) -> Entry:
    """Which entry a line of ``outcomes.jsonl`` is about."""
    return Entry(record["data"], record["column"], record["seed"])


def columns_of(networks: Sequence[str], columns: Sequence[str] | None = None) -> tuple[str, ...]:
    """The columns of some networks, or those that are named, in the table's order.

    Raises:
        ValueError: There is no such network or column.
    """
    if columns is not None:
        for column in columns:
            network_of(column)
        return tuple(column for column in COLUMNS if column in columns)
    for network in networks:
        if network not in NETWORKS:
            raise ValueError(f"there is no network {network!r}; the networks are {', '.join(NETWORKS)}")
    return tuple(column for column in COLUMNS if network_of(column) in networks)


def _recipe(column: str, data: Dataset, scale: float, batch: int | None) -> Recipe:
    recipe = recipe_of(network_of(column), data.name).scaled(scale)
    return dataclasses.replace(recipe, batch=batch or recipe.batch)


def _fleets(entries: Sequence[Entry], most: int) -> list[list[Entry]]:
    """Entries of one set and one column together, at most so many."""
    fleets: list[list[Entry]] = []
    for entry in entries:
        if not fleets or fleets[-1][0][:2] != entry[:2] or len(fleets[-1]) == most:
            fleets.append([])
        fleets[-1].append(entry)
    return fleets


def make_fleet(column: str, seeds: Sequence[int], data: Dataset, recipe: Recipe, how: How) -> Fleet:
    """The networks of a column with these seeds, ready to be trained on a set."""
    networks = [build(column, len(data.classes), seed, dropout=recipe.dropout) for seed in seeds]
    members = [
        Member(f"{column} {data.name} {seed}", data.name, seed, recipe.lr, recipe.schedule, recipe.weight_decay)
        for seed in seeds
    ]
    return Fleet(
        networks, members, {data.name: (data.train_images, data.train_labels)}, batch=recipe.batch,
        momentum=recipe.momentum, nesterov=recipe.nesterov, factors=caffe_factors if recipe.caffe else None,
        precision=how.precision, device=how.device, inputs=inputs_of(network_of(column), data, average=how.average),
        stacked=how.stacked, compile=how.compile and not how.stacked, streams=1 if how.stacked else how.streams,
        deterministic=how.deterministic,
    )  # fmt: skip


def train_in_slices(
    fleet: Fleet, path: Path, until: float, every: float = 60.0, tell: Callable[[Fleet], None] | None = None
) -> bool:
    """Train from a checkpoint, if there is one, to the end or until time is up, with a checkpoint behind it.

    Args:
        fleet: Fresh.
        path: Where the checkpoint is, and is written at the end of an epoch when ``every`` seconds have gone.
        until: When to stop, by `time.perf_counter`; at least one epoch is trained.
        every: Seconds.
        tell: Called when the checkpoint has been read and after every epoch. When it raises KeyboardInterrupt the fleet
            is written down first.

    Returns:
        Whether the training has ended. The checkpoint of its end is there then.

    Raises:
        ValueError: The checkpoint is of another fleet.
        SealedError: It is damaged; remove it to begin anew.
    """
    tell = tell or (lambda _: None)
    if path.exists():
        try:
            fleet.load(path)
        except SealedError as error:
            raise SealedError(f"{error}; remove the file to train this fleet from its beginning") from error
        tell(fleet)
    path.parent.mkdir(parents=True, exist_ok=True)
    saved = time.perf_counter()
    while fleet.epoch < fleet.epochs:
        fleet.train(1)
        try:
            tell(fleet)
        except KeyboardInterrupt:
            fleet.save(path)
            raise
        now = time.perf_counter()
        if fleet.epoch == fleet.epochs or now > until or now - saved > every:
            fleet.save(path)
            saved = now
        if now > until:
            break
    return fleet.epoch == fleet.epochs


class Slice(NamedTuple):
    """What a process does of a run in one call: where it writes, how long it has, whom it tells."""

    folder: RunFolder
    part: str
    until: float
    every: float
    which: tuple[int, int]
    """Which fleet it is, of how many."""
    report: Report
    tell: Tell | None

    def train(self, fleet: Fleet, file: str, name: str) -> float | None:
        """Train a fleet, or go on with it.

        Args:
            fleet: Fresh.
            file: What its checkpoint is called.
            name: What it is called for people.

        Returns:
            The seconds that it took in all its slices; None when time is up before its end.
        """
        start, path = time.perf_counter(), self.checkpoint(file)
        number, count = self.which
        networks = f"{len(fleet.members)} network{'s' if len(fleet.members) > 1 else ''}"

        def tell(at: Fleet) -> None:
            if self.tell is not None:
                loss = [value for value in (at.history.train_loss or [[]])[-1] if math.isfinite(value)]
                mean = sum(loss) / len(loss) if loss else None
                self.tell(Progress(number, count, name, len(at.members), at.epoch, at.epochs, mean))

        tell(fleet)
        if path.exists():
            self.report(f"{number}/{count} {name}, {networks}: going on")
        done = train_in_slices(fleet, path, self.until, self.every, tell)
        spent = time.perf_counter() - start
        self.report(
            f"{number}/{count} {name}, {networks}: epoch {fleet.epoch} of {fleet.epochs}, {spent:.1f} s in this slice"
        )
        self.folder.append(f"slices{self.part}", {"fleet": file, "epoch": fleet.epoch, "seconds": spent})
        if not done:
            return None
        return sum(float(record["seconds"]) for record in self.folder.read("slices") if record["fleet"] == file)

    def checkpoint(self, file: str) -> Path:
        """Where a fleet is kept while it is trained."""
        return self.folder.path / "fleets" / f"{file}.safetensors"


def _one_fleet(
    entries: Sequence[Entry], data: Dataset, recipe: Recipe, how: How, known: set[Entry], slice_: Slice
) -> bool:
    """Train some entries, or go on with them, and write down what came of them; False when time is up before."""
    column = entries[0].column
    fleet = make_fleet(column, [entry.seed for entry in entries], data, recipe, how)
    file = f"{data.name}-{column}-{entries[0].seed}"
    spent = slice_.train(fleet, file, f"{column} on {data.name}")
    if spent is None:
        return False
    seen = fleet.evaluate({data.name: (data.test_images, data.test_labels)})
    last = fleet.history.train_loss[-1]
    for row, entry in enumerate(entries):
        if entry not in known:  # some may have been written down before a kill
            numbers = {"test_loss": float(seen.losses[row]), "train_loss": last[row]}
            slice_.folder.append(
                f"outcomes{slice_.part}",
                {
                    **entry._asdict(), "error": float(seen.errors[row]), "stopped": fleet.history.stopped.get(row),
                    **{key: value if math.isfinite(value) else None for key, value in numbers.items()},
                    "seconds": spent / len(entries),
                },
            )  # fmt: skip
    slice_.checkpoint(file).unlink()
    return True
