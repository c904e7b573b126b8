"""Table 2, run: every column on every set with every seed, in slices that can be gone on with.

The seeds of a column train as a fleet, on a GPU the columns of a network abreast. A fleet is written down at the ends
of epochs, so that a slice may end, or a process be killed, in the middle of a training, and the rest gives the same
weights. Recipes are the paper's, and nothing is chosen by looking at a test set: it is looked at once, at the end of
each training.
"""

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch_dcl.data import Dataset
from torch_dcl.experiments.engine import Settings
from torch_dcl.experiments.natural.recipes import (
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
from torch_dcl.experiments.natural.sets import Images, read_sets
from torch_dcl.experiments.natural.slices import How, Report, Slice, Tell, abreast
from torch_dcl.experiments.natural.table import NaturalTable, table2_of
from torch_dcl.experiments.ranks import Rank
from torch_dcl.experiments.telling import telling
from torch_dcl.training import Fleet, Member

__all__ = ["Entry", "columns_of", "make_fleet", "read_sets", "run_table2"]


class Entry(NamedTuple):
    """One entry of the table, for one seed."""

    data: str
    column: str
    seed: int


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
        groups = abreast(left, how, lambda entry: (entry.data, network_of(entry.column)))
        for number, group in enumerate(groups, 1):
            first = number == 1  # goes on by an epoch in any case
            slice_ = Slice(folder, rank.part, start + seconds, how.every, (number, len(groups)), report, told.on_epoch)
            ended = not first and time.perf_counter() - start > seconds
            if ended or not _train_group(group, sets[group[0][0].data], recipes, how, known, slice_):
                fleets = sum(map(len, groups[number - 1 :]))
                report(f"time is up: {fleets} fleet{'s are' if fleets > 1 else ' is'} left; go on with --resume")
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


def _train_group(
    group: Sequence[Sequence[Entry]], data: Dataset, recipes: Mapping[tuple[str, str], Recipe], how: How,
    known: set[Entry], slice_: Slice,
) -> bool:  # fmt: skip
    """Train fleets abreast, or go on with them, and write down what came of them; False when time is up before."""
    named = {f"{data.name}-{entries[0].column}-{entries[0].seed}": entries for entries in group}
    fleets = {}
    for file, entries in named.items():
        column = entries[0].column
        seeds = [entry.seed for entry in entries]
        fleets[file] = make_fleet(column, seeds, data, recipes[data.name, column], how)
    columns = dict.fromkeys(entries[0].column for entries in group)
    spent = slice_.train(fleets, f"{', '.join(columns)} on {data.name}")
    if spent is None:
        return False
    for file, entries in named.items():
        fleet = fleets[file]
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
                        "seconds": spent[file] / len(entries),
                    },
                )  # fmt: skip
        slice_.checkpoint(file).unlink()
    return True
