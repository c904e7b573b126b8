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

import torch
from torch import Tensor

from torch_dcl.data import Dataset, load
from torch_dcl.files import SealedError
from torch_dcl.paper.natural import (
    COLUMNS,
    DATA,
    NETWORKS,
    Recipe,
    build,
    caffe_factors,
    inputs_of,
    network_of,
    paper_error,
    recipe_of,
    weights,
)  # fmt: skip
from torch_dcl.paper.natural_table import NOT_AVAILABLE, NaturalTable
from torch_dcl.paper.table import Cell
from torch_dcl.training import Fleet, Member
from torch_dcl.training.fleet import Precision
from torch_dcl.training.runs import RunFolder, environment

__all__ = ["Entry", "How", "make_fleet", "read_sets", "run_table2", "train_in_slices"]

DEVIATIONS = (
    "BigNet: the paper gives neither batch, momentum nor weight decay; ours are 100, 0.9 and 5e-4. Crops of 24 × 24 "
    "and cross-entropy are inferred from its weights and rates; nagadomi's own preparation of the data is left out.",
    "WRN: the paper says 16 layers and no width; ours is WRN-16-4. Its only fully-connected layer is the classifier, "
    "so DCL stands there, with branches of a quarter of the classes, rounded up.",
    "LeNet: Caffe's start, mean image and factors are inferred; on SVHN its inputs are 64 times the normalised images.",
    "SVHN: no mirroring; BigNet's random crops are the only augmentation, since the text names none.",
    "dcl3s is not in the paper: section 4.1 promises three stochastic branches for natural images, 4.2 uses two.",
)
Labelled = tuple[Tensor, Tensor]
Report = Callable[[str], None]


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
    stacked: bool | None = None
    """Whether networks train as a stack; None as the recipe has it."""
    compile: bool = False
    """Whether networks that are not stacked are compiled."""
    streams: int = 1
    """How many networks that are not stacked run at a time on a GPU."""
    average: bool = False
    """Whether the test averages over an image and its mirror image."""
    every: float = 60.0
    """Seconds between two checkpoints, roughly: they are written at the ends of epochs."""


def read_sets(
    names: Sequence[str],
    root: str | os.PathLike[str] | None = None,
    images: tuple[int, int] | None = None,
    report: Report = print,
) -> tuple[dict[str, Dataset], dict[str, str]]:
    """Read the sets that are there, and say which are not.

    Args:
        names: Some of `DATA`.
        root: Where they are; None for the usual places.
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
        try:
            whole = load(name, root=root)
        except FileNotFoundError as error:
            absent[name] = NOT_AVAILABLE
            report(f"{name}: {NOT_AVAILABLE} ({error})")
            if len(absent) == len(names):
                raise
            continue
        found[name] = whole if images is None else _first(whole, *images)
        report(str(found[name]))
    return found, absent


def _first(data: Dataset, train: int, test: int) -> Dataset:
    return dataclasses.replace(
        data,
        train_images=data.train_images[:train], train_labels=data.train_labels[:train],
        test_images=data.test_images[:test], test_labels=data.test_labels[:test],
        source=f"{data.source}, of which the first {train:,} and {test:,}",
    )  # fmt: skip


def run_table2(
    path: str | os.PathLike[str],
    *,
    networks: Sequence[str] = NETWORKS,
    columns: Sequence[str] | None = None,
    data: Sequence[str] = DATA,
    seeds: int = 3,
    scale: float = 1.0,
    root: str | os.PathLike[str] | None = None,
    images: tuple[int, int] | None = None,
    batch: int | None = None,
    how: How | None = None,
    resume: bool = False,
    seconds: float = math.inf,
    report: Report = print,
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
        root: Where the data is; None for the usual places.
        images: How many images of a set to train on and to test with; None for all. For trying things out.
        batch: Images of a step, in place of the recipes'. For trying things out.
        how: Device, precision and the like; the rank's own GPU takes the place of ``cuda``.
        resume: Whether to go on with what the folder holds.
        seconds: Stop at the next end of an epoch when so much time has gone, and leave the rest to a later call. Every
            call goes on by one epoch at least.
        report: Called with lines of progress.

    Returns:
        The table, or None where networks are missing: time was up, or this is not the first rank.

    Raises:
        RunError: The folder is in use, or belongs to another recipe.
        FileNotFoundError: None of the sets was found.
    """
    how = how or How()
    start = time.perf_counter()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if how.device == "cuda":
        how = dataclasses.replace(how, device=f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
        torch.cuda.set_device(how.device)
    wanted = _columns(networks, columns)
    sets, absent = read_sets(data, root, images, report if rank == 0 else lambda _: None)
    recipes = {
        (name, column): _recipe(column, sets[name], scale, batch, how) for name in sets for column in wanted
    }  # fmt: skip
    asked = {
        "table": 2, "columns": list(wanted), "seeds": seeds, "scale": scale, "images": images,
        "data": {name: sets[name].source if name in sets else absent[name] for name in data},
        "recipes": {f"{name} {column}": dataclasses.asdict(recipe) for (name, column), recipe in recipes.items()},
        "precision": how.precision, "average": how.average, "most": how.most, "compile": how.compile,
    }  # fmt: skip
    part = f"-{rank}" if world > 1 else ""
    if rank:  # the first rank makes the folder
        _wait_for_all(world)
    with RunFolder.open(path, asked, resume=resume or rank > 0, part=part) as folder:
        if rank == 0:
            _wait_for_all(world)
        entries = [Entry(name, column, seed) for name in sets for column in wanted for seed in range(seeds)]
        known = {entry_of(record) for record in folder.read("outcomes")}
        if known:
            report(f"{len(known)} of {len(entries)} entries are done already")
        mine = _fleets(entries, how.most)[rank::world]
        left = [fleet for fleet in mine if any(entry not in known for entry in fleet)]
        for number, fleet in enumerate(left, 1):
            if number > 1 and time.perf_counter() - start > seconds:  # the first one goes on by an epoch in any case
                report(f"time is up: {len(left) - number + 1} fleets are left; go on with --resume")
                break
            of = (fleet[0].data, fleet[0].column)
            done = _one_fleet(
                fleet, sets[of[0]], recipes[of], how, folder, part, known, start + seconds,
                lambda line, n=number: report(f"{n}/{len(left)} {line}"),  # type: ignore[misc]
            )  # fmt: skip
            if not done:
                report(f"time is up: {len(left) - number + 1} fleets are left; go on with --resume")
                break
        folder.append(f"minutes{part}", {"training": (time.perf_counter() - start) / 60})
        _wait_for_all(world)
        if rank:
            return None
        outcomes = {entry_of(record): record for record in folder.read("outcomes")}
        if any(entry not in outcomes for entry in entries):
            return None
        minutes = sum(record["training"] for record in folder.read("minutes"))
        return _table({e: outcomes[e] for e in entries}, sets, absent, recipes, how, scale, minutes)


def entry_of(record: Mapping[str, Any]) -> Entry:
    """Which entry a line of ``outcomes.jsonl`` is about."""
    return Entry(record["data"], record["column"], record["seed"])


def _columns(networks: Sequence[str], columns: Sequence[str] | None) -> tuple[str, ...]:
    if columns is not None:
        for column in columns:
            network_of(column)
        return tuple(column for column in COLUMNS if column in columns)
    for network in networks:
        if network not in NETWORKS:
            raise ValueError(f"there is no network {network!r}; the networks are {', '.join(NETWORKS)}")
    return tuple(column for column in COLUMNS if network_of(column) in networks)


def _recipe(column: str, data: Dataset, scale: float, batch: int | None, how: How) -> Recipe:
    recipe = recipe_of(network_of(column), data.name).scaled(scale)
    stacked = recipe.stacked if how.stacked is None else how.stacked
    return dataclasses.replace(recipe, batch=batch or recipe.batch, stacked=stacked)


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
        stacked=recipe.stacked, compile=how.compile and not recipe.stacked,
        streams=1 if recipe.stacked else how.streams,
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
        tell: Called after every epoch.

    Returns:
        Whether the training has ended. The checkpoint of its end is there then.

    Raises:
        ValueError: The checkpoint is of another fleet.
        SealedError: It is damaged; remove it to begin anew.
    """
    if path.exists():
        try:
            fleet.load(path)
        except SealedError as error:
            raise SealedError(f"{error}; remove the file to train this fleet from its beginning") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    saved = time.perf_counter()
    while fleet.epoch < fleet.epochs:
        fleet.train(1)
        if tell is not None:
            tell(fleet)
        now = time.perf_counter()
        if fleet.epoch == fleet.epochs or now > until or now - saved > every:
            fleet.save(path)
            saved = now
        if now > until:
            break
    return fleet.epoch == fleet.epochs


def _one_fleet(
    entries: Sequence[Entry], data: Dataset, recipe: Recipe, how: How, folder: RunFolder, part: str,
    known: set[Entry], until: float, report: Report,
) -> bool:  # fmt: skip
    """Train some entries, or go on with them, and write down what came of them; False when time is up before."""
    start, column = time.perf_counter(), entries[0].column
    fleet = make_fleet(column, [entry.seed for entry in entries], data, recipe, how)
    path = folder.path / "fleets" / f"{data.name}-{column}-{entries[0].seed}.safetensors"
    name = f"{column} on {data.name}, {len(entries)} networks"
    if path.exists():
        report(f"{name}: going on")
    done = train_in_slices(fleet, path, until, how.every)
    report(f"{name}: epoch {fleet.epoch} of {fleet.epochs}, {time.perf_counter() - start:.1f} s in this slice")
    if not done:
        return False
    seen = fleet.evaluate({data.name: (data.test_images, data.test_labels)})
    last = fleet.history.train_loss[-1]
    for row, entry in enumerate(entries):
        if entry not in known:  # some may have been written down before a kill
            numbers = {"test_loss": float(seen.losses[row]), "train_loss": last[row]}
            folder.append(
                f"outcomes{part}",
                {
                    **entry._asdict(), "error": float(seen.errors[row]), "stopped": fleet.history.stopped.get(row),
                    **{key: value if math.isfinite(value) else None for key, value in numbers.items()},
                },
            )  # fmt: skip
    path.unlink()
    return True


def _wait_for_all(world: int) -> None:
    if world == 1:
        return
    import torch.distributed as dist  # noqa: PLC0415

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    dist.barrier()


def _table(
    outcomes: Mapping[Entry, Mapping[str, Any]], sets: Mapping[str, Dataset], absent: Mapping[str, str],
    recipes: Mapping[tuple[str, str], Recipe], how: How, scale: float, minutes: float,
) -> NaturalTable:  # fmt: skip
    by_cell: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for entry, record in outcomes.items():
        by_cell.setdefault((entry.data, entry.column), []).append(record)
    cells = []
    for (name, column), group in by_cell.items():
        losses = [tuple(record[key] for record in group) for key in ("train_loss", "test_loss")]
        train, test = (None if None in values else values for values in losses)
        cells.append(
            Cell(
                set=name, column=column, errors=tuple(record["error"] for record in group),
                seeds=tuple(record["seed"] for record in group), weights=weights(column, len(sets[name].classes)),
                paper=paper_error(column, name), train_loss=train, test_loss=test,
                stopped=tuple(record["seed"] for record in group if record["stopped"] is not None),
            )
        )  # fmt: skip
    here = environment()
    protocol = {f"data, {name}": data.source for name, data in sets.items()}
    for (name, column), recipe in recipes.items():
        if "+" not in column:
            protocol[f"{column} on {name}"] = str(recipe)
    protocol["precision"] = how.precision or "bfloat16 on a GPU, float32 on a CPU"
    protocol["test"] = "mean over an image and its mirror image" if how.average else "the middle of each image, once"
    short = "" if scale == 1 else f", shortened to {scale:g} of the epochs"
    return NaturalTable(
        f"Table 2: natural images{short}", tuple(cells), protocol, here["gpu"] or f"CPU, {here['cpus']} cores",
        here["versions"], {"training and evaluation": minutes}, here["command"], DEVIATIONS, dict(absent), scale,
    )  # fmt: skip
