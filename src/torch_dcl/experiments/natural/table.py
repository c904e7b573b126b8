"""Table 2 as it was run here: the file `results/table2.json`, and its face in Markdown.

It has the form of Table 1's file, with the sets and columns of section 4.2.1 and, under ``absent``, what was not run.
"""

import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch_dcl.experiments.comparing import difference
from torch_dcl.experiments.natural.recipes import COLUMNS, DATA, Recipe, network_of, paper_error, recipe_of, weights
from torch_dcl.experiments.natural.sets import NOT_AVAILABLE, departures
from torch_dcl.experiments.reported import TABLE2
from torch_dcl.experiments.statistics import Difference
from torch_dcl.experiments.table import Cell, Table, TableError, as_trial
from torch_dcl.files import write_text
from torch_dcl.fleet import Schedule
from torch_dcl.fleet.run_folder import RunFolder

__all__ = [
    "NOT_AVAILABLE", "NaturalTable", "as_markdown2", "join_table2", "load_table2", "said", "save_table2", "table2_of",
]  # fmt: skip

DEVIATIONS = (
    "BigNet: the paper gives neither batch, momentum nor weight decay; ours are 100, 0.9 and 5e-4. Crops of 24 × 24 "
    "and cross-entropy are inferred from its weights and rates; nagadomi's own preparation of the data is left out.",
    "WRN: the paper says 16 layers and no width; ours is WRN-16-4. Its only fully-connected layer is the classifier, "
    "so DCL stands there, with branches of a quarter of the classes, rounded up.",
    "LeNet: Caffe's start, mean image and factors are inferred; on SVHN its inputs are 64 times the normalised images.",
    "SVHN: no mirroring; BigNet's random crops are the only augmentation, since the text names none.",
    "dcl3s is not in the paper: section 4.1 promises three stochastic branches for natural images, 4.2 uses two.",
)


@dataclass(frozen=True)
class NaturalTable(Table):
    """Table 2 as it was run here.

    Attributes:
        absent: Sets of which nothing was run, with the reason.
        scale: What part of each recipe's epochs was trained; below 1 the run is shortened.
    """

    absent: Mapping[str, str] = field(default_factory=dict)
    scale: float = 1.0

    @property
    def sets(self) -> tuple[str, ...]:
        """The sets that have a cell or are noted as absent, in a fixed order."""
        there = {cell.set for cell in self.cells} | set(self.absent)
        return tuple(name for name in DATA if name in there)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that have a cell."""
        there = {cell.column for cell in self.cells}
        return tuple(name for name in COLUMNS if name in there)

    def to_baseline(self, cell: Cell) -> Difference | None:
        """The cell's errors minus those of the plain network on the same seeds; None for that network itself."""
        network = network_of(cell.column)
        plain = self.cell(cell.set, network)
        if plain is None or cell.column == network:
            return None
        return difference(cell.runs, plain.runs)

    def best(self, name: str) -> tuple[str, ...]:
        """Of each network the columns with the lowest error on a set, as it is printed."""
        found = []
        for network in dict.fromkeys(network_of(column) for column in self.columns):
            means = {
                c.column: round(c.mean, 2) for c in self.cells if c.set == name and network_of(c.column) == network
            }
            found += [column for column, value in means.items() if value == min(means.values())]
        return tuple(found)


def table2_of(folder: RunFolder) -> NaturalTable:
    """The table of what a run folder holds, also before its end; what is missing is not run.

    Args:
        folder: The run's.
    """
    asked = folder.recipe
    sources, columns = dict(asked["data"]), list(asked["columns"])
    absent = {name: source for name, source in sources.items() if source == NOT_AVAILABLE}
    by_cell: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for record in records_of(folder):
        by_cell.setdefault((record["data"], record["column"]), {})[record["seed"]] = record
    cells = []
    for name in sources:
        for column in columns:
            group = [record for _, record in sorted(by_cell.get((name, column), {}).items())]
            if group:
                cells.append(_cell_of(name, column, group))
    recipes = {tuple(key.split(" ")): _stored(recipe) for key, recipe in asked["recipes"].items()}
    protocol = {f"data, {name}": source for name, source in sources.items() if name not in absent}
    protocol |= {f"{column} on {name}": str(recipe) for (name, column), recipe in recipes.items() if "+" not in column}
    protocol["precision"] = asked["precision"] or "bfloat16 on a GPU, float32 on a CPU"
    protocol["test"] = (
        "mean over an image and its mirror image" if asked["average"] else "the middle of each image, once"
    )
    scale, starts = asked["scale"], folder.read("environment")
    short = "" if scale == 1 else f", shortened to {scale:g} of the epochs"
    spent = sum(record["training"] for record in folder.read("minutes"))
    machines = dict.fromkeys(start["gpu"] or f"CPU, {start['cpus']} cores" for start in starts)
    table = NaturalTable(
        f"Table 2: natural images{short}", tuple(cells), protocol, "; ".join(machines), starts[-1]["versions"],
        {"training and evaluation": spent} if spent else {}, starts[0]["command"], DEVIATIONS, absent, scale,
    )  # fmt: skip
    batches = [r.batch for (name, column), r in recipes.items() if r.batch != recipe_of(network_of(column), name).batch]
    made = as_trial(table, departures(protocol_sources(protocol), asked["images"], batches))
    return made if isinstance(made, NaturalTable) else table


def records_of(folder: RunFolder) -> list[dict[str, Any]]:
    """What came of every entry, by ``data``, ``column`` and ``seed``; also in folders of format 1."""
    if folder.format == 1:
        return folder.read("outcomes")
    found = []
    for record in folder.read("outcomes"):
        for outcome in record["outcomes"]:
            job = outcome["job"]
            found.append({**outcome, "data": job["data"], "column": job["network"], "seed": job["seed"]})
    return found


def protocol_sources(protocol: Mapping[str, str]) -> list[str]:
    """What the images of a table are, out of its protocol."""
    return [text for key, text in protocol.items() if key.startswith("data, ")]


def _cell_of(name: str, column: str, group: list[Mapping[str, Any]]) -> Cell:
    losses = [tuple(record[key] for record in group) for key in ("train_loss", "test_loss")]
    train, test = (None if None in values else values for values in losses)
    seconds = [record.get("seconds") for record in group]
    return Cell(
        set=name, column=column, errors=tuple(record["error"] for record in group),
        seeds=tuple(record["seed"] for record in group), weights=weights(column, 100 if name == "cifar100" else 10),
        paper=paper_error(column, name), train_loss=train, test_loss=test,
        stopped=tuple(record["seed"] for record in group if record["stopped"] is not None),
        minutes=None if None in seconds else sum(s for s in seconds if s is not None) / 60,
    )  # fmt: skip


def _stored(recipe: Mapping[str, Any]) -> Recipe:
    schedule = recipe["schedule"]
    return Recipe(**{**recipe, "schedule": Schedule(**{**schedule, "drops": tuple(schedule["drops"])})})


def said(table: NaturalTable) -> list[str]:
    """The table in sentences, what was lost as plainly as what was won."""
    told = []
    for variant, words in (("+dcl", "With DCL (two branches)"), ("+dcl3s", "With three stochastic branches")):
        pairs = [
            (cell, plain, table.to_baseline(cell))
            for cell in table.cells
            if cell.column.endswith(variant) and (plain := table.cell(cell.set, network_of(cell.column))) is not None
        ]
        if not pairs:
            continue
        lower = sum(cell.mean < plain.mean for cell, plain, _ in pairs)
        known = [found.clear for _, _, found in pairs if found is not None]
        sentence = f"{words} the error is lower than the plain network's in {lower} of {len(pairs)} "
        sentence += "pair of network and set" if len(pairs) == 1 else "pairs of network and set"
        if known:
            sentence += f", clearly lower in {known.count(-1)} and clearly higher in {known.count(1)}"
        theirs = [(c.paper, p.paper) for c, p, _ in pairs if c.paper is not None and p.paper is not None]
        if theirs:
            sentence += f"; in the paper in {sum(a < b for a, b in theirs)} of {len(theirs)}"
        told.append(f"{sentence}.")
    told += [f"{name}: {reason}." for name, reason in table.absent.items()]
    if stopped := sum(len(cell.stopped) for cell in table.cells):
        told.append(f"{stopped} {'run' if stopped == 1 else 'runs'} diverged.")
    return told


def join_table2(tables: Sequence[NaturalTable]) -> NaturalTable:
    """One table of several that were run apart, such as a network or a set on each of several machines.

    Args:
        tables: At least one.

    Raises:
        TableError: Two of them have the same column on the same set, or were shortened differently.
    """
    first, cells = tables[0], [cell for table in tables for cell in table.cells]
    for i, cell in enumerate(cells):
        if any((cell.set, cell.column) == (other.set, other.column) for other in cells[:i]):
            raise TableError(f"two of the tables have {cell.column} on {cell.set}; run all its seeds in one")
    if len({(table.scale, table.title) for table in tables}) > 1:
        raise TableError("the tables were not run alike: " + ", ".join(repr(table.title) for table in tables))
    places = {(name, column): place for place, (name, column) in enumerate(itertools.product(DATA, COLUMNS))}
    there = {cell.set for cell in cells}
    minutes: dict[str, float] = {}
    for phase, spent in (item for table in tables for item in table.minutes.items()):
        minutes[phase] = minutes.get(phase, 0.0) + spent
    return replace(
        first,
        cells=tuple(sorted(cells, key=lambda cell: places[cell.set, cell.column])),
        protocol=_together([table.protocol for table in tables]),
        hardware="; ".join(dict.fromkeys(table.hardware for table in tables)),
        versions=_together([table.versions for table in tables]),
        minutes=minutes,
        command="\n".join(dict.fromkeys(table.command for table in tables)),
        deviations=tuple(dict.fromkeys(text for table in tables for text in table.deviations)),
        absent={name: why for table in tables for name, why in table.absent.items() if name not in there},
    )


def _together(parts: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """What all of them say, each word of it once."""
    found: dict[str, dict[str, None]] = {}
    for key, text in (item for part in parts for item in part.items()):
        found.setdefault(key, {})[text] = None
    return {key: "; ".join(texts) for key, texts in found.items()}


def save_table2(table: NaturalTable, path: str | os.PathLike[str]) -> None:
    """Write a table in the form that `load_table2` reads, all or nothing."""
    content = json.loads(json.dumps(asdict(table)))
    _parse(content, os.fspath(path))
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def load_table2(path: str | os.PathLike[str]) -> NaturalTable:
    """Read a table and check it.

    Raises:
        FileNotFoundError: There is no such file.
        TableError: It is no such table; the message says where and what is wrong.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise TableError(f"{os.fspath(path)} is not JSON: {error}") from error
    return _parse(content, os.fspath(path))


def as_markdown2(table: NaturalTable) -> str:
    """The table for people: a row for each column, then the rows that the paper quotes, then how it was made."""
    head = ["network", *table.sets, "weights"]
    rows = [head, ["---"] * len(head)]
    for column in table.columns:
        weights = {cell.set: cell.weights for cell in table.cells if cell.column == column}
        counts = ", ".join(f"{count:,}" for count in dict.fromkeys(weights.values()))
        rows.append([column, *(_shown(table, name, column) for name in table.sets), counts])
    for row in TABLE2:
        if row.reference:
            year = row.reference.split("_")[1]
            rows.append([f"{row.name} {year}", *(f"{row.errors[name.upper()]:.2f}" for name in table.sets), ""])
    lines = [f"# {table.title}", "", *("| " + " | ".join(row) + " |" for row in rows), ""]
    lines += [
        "Test error in percent: mean(standard deviation in hundredths) × seeds; beneath, the paper's number, and the "
        "difference to the plain network on the same seeds with its 95 % interval. Rows with a year: as the paper "
        "quotes them.",
        "",
    ]
    if table.scale < 1:
        lines += [f"**Shortened: every recipe was trained for {table.scale:g} of its epochs.**", ""]
    lines += [f"- {name}: {text}" for name, text in table.protocol.items()]
    lines += [f"- {text}" for text in table.deviations]
    minutes = ", ".join(f"{name} {value:.1f} minutes" for name, value in table.minutes.items())
    lines += [f"- {table.hardware}; {minutes}; `{table.command}`", ""]
    return "\n".join(lines)


def _shown(table: NaturalTable, name: str, column: str) -> str:
    if name in table.absent:
        theirs = paper_error(column, name)
        return table.absent[name] + ("" if theirs is None else f"<br>paper {theirs:.2f}")
    cell = table.cell(name, column)
    if cell is None:
        return "not run"
    parts = [f"{cell.ours} × {len(cell.seeds)}{'†' if cell.stopped else ''}", f"paper {cell.theirs}"]
    found = table.to_baseline(cell)
    if found is not None:
        parts.append(f"{found.mean:+.2f} [{found.low:+.2f}, {found.high:+.2f}]")
    return "<br>".join(parts)


def _parse(content: Any, source: str) -> NaturalTable:
    if not isinstance(content, dict) or not isinstance(content.get("cells"), list):
        raise TableError(f"{source}: an object with a list of cells is needed")
    cells = [_cell(cell, f"{source}: cells[{i}]") for i, cell in enumerate(content["cells"])]
    for i, cell in enumerate(cells):
        if any((cell.set, cell.column) == (other.set, other.column) for other in cells[:i]):
            raise TableError(f"{source}: cells[{i}] is a second {cell.column} on {cell.set}; put all seeds into one")
    absent, scale = content.get("absent", {}), content.get("scale", 1.0)
    if not isinstance(absent, dict) or any(name not in DATA for name in absent):
        raise TableError(f"{source}: absent must name some of {', '.join(DATA)}, got {absent!r}")
    if not isinstance(scale, int | float) or not 0 < scale <= 1:
        raise TableError(f"{source}: scale must be above 0 and at most 1, got {scale!r}")
    words = {key: content.get(key, "") for key in ("title", "hardware", "command")}
    for key, value in words.items():
        if not isinstance(value, str):
            raise TableError(f"{source}: {key} is {value!r}; give text")
    named = {key: content.get(key, {}) for key in ("protocol", "versions", "minutes")}
    for key, value in named.items():
        if not isinstance(value, dict):
            raise TableError(f"{source}: {key} is {value!r}; give names and values")
    deviations = tuple(content.get("deviations", ()))
    return NaturalTable(cells=tuple(cells), deviations=deviations, absent=absent, scale=scale, **words, **named)


def _cell(given: Any, place: str) -> Cell:
    if not isinstance(given, dict):
        raise TableError(f"{place}: an object with names is needed, not {given!r}")
    missing = [key for key in ("set", "column", "errors", "seeds", "weights") if key not in given]
    if missing:
        raise TableError(f"{place}: {missing[0]} is missing")
    known = {item.name for item in fields(Cell)}
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if k in known}
    cell = Cell(**values)
    place = f"{place} ({cell.set}, {cell.column})"
    for what, names in (("set", DATA), ("column", COLUMNS)):
        if given[what] not in names:
            raise TableError(f"{place}: {what} {given[what]!r} is unknown; known are {', '.join(names)}")
    right = all(isinstance(e, int | float) and math.isfinite(e) and 0 <= e <= 100 for e in cell.errors)
    if not cell.errors or not right:
        raise TableError(f"{place}: errors are {list(cell.errors)}; give at least one number, each from 0 to 100")
    if len(cell.seeds) != len(cell.errors) or len(set(cell.seeds)) != len(cell.seeds):
        raise TableError(f"{place}: give each error a seed of its own, not {list(cell.seeds)}")
    if not isinstance(cell.weights, int) or cell.weights < 1:
        raise TableError(f"{place}: weights is {cell.weights!r}; give a whole number above 0")
    if cell.paper != paper_error(cell.column, cell.set):
        raise TableError(f"{place}: paper is {cell.paper}, but it has {paper_error(cell.column, cell.set)}; correct it")
    return cell
