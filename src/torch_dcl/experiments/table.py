"""Tables as they were run here: the files `results/table1.json` and `results/table2.json`, read and checked.

`text.py` prints them in a terminal and as Markdown, `torch_dcl.report` as pages for the browser.
"""

import difflib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar, cast

from torch_dcl.experiments.paper_numbers import COLUMNS, DCL_COLUMNS, SETS, TABLE1
from torch_dcl.experiments.protocol import find_recipe_type
from torch_dcl.experiments.stats import Difference, Losses, difference, mean, notation, std
from torch_dcl.files import write_text

__all__ = [
    "CONTROLS", "MARK", "Cell", "Reader", "Table", "TableError", "as_trial", "is_trial", "load", "mark",
    "parse", "save",
]  # fmt: skip

CONTROLS = ("narrow", "low-rank", "summed")
MARK = " (a trial, not the protocol)"


class TableError(ValueError):
    """A table that cannot be read. The message says where, what is there, and what should be."""


@dataclass(frozen=True)
class Cell:
    """The runs of one column on one set.

    Attributes:
        set: The set, such as ``MNIST-II-01``.
        column: One of the paper's columns, or a control.
        errors: Test errors in percent, one per seed.
        seeds: The seeds, in the order of ``errors``.
        weights: The network's weights, without biases.
        paper: The paper's mean, None where it has none.
        paper_std: The paper's standard deviation.
        train_loss: Final training losses, one per seed, or None.
        test_loss: Final test losses, one per seed, or None.
        stopped: Seeds whose training diverged. One that is also in ``seeds`` counts with its error.
        fitted: Whether the difficulty of the set was fitted to the paper's number in this column.
        minutes: The share of its fleets' time that its networks took, None where that was not noted.
    """

    set: str
    column: str
    errors: tuple[float, ...]
    seeds: tuple[int, ...]
    weights: int
    paper: float | None = None
    paper_std: float | None = None
    train_loss: tuple[float, ...] | None = None
    test_loss: tuple[float, ...] | None = None
    stopped: tuple[int, ...] = ()
    fitted: bool = False
    minutes: float | None = field(default=None, compare=False)

    @property
    def runs(self) -> dict[int, float]:
        """Seed to error."""
        return dict(zip(self.seeds, self.errors, strict=True))

    @property
    def mean(self) -> float:
        """The mean error."""
        return mean(self.errors)

    @property
    def std(self) -> float | None:
        """The standard deviation; None with a single run."""
        return std(self.errors) if len(self.errors) > 1 else None

    @property
    def ours(self) -> str:
        """Mean and deviation in the paper's notation."""
        return notation(self.mean, self.std)

    @property
    def theirs(self) -> str:
        """The paper's number in its notation; a dash where it has none."""
        return "–" if self.paper is None else notation(self.paper, self.paper_std)


@dataclass(frozen=True)
class Table:
    """Table 1 as it was run here, with everything that is needed to judge and to repeat it."""

    title: str
    cells: tuple[Cell, ...]
    protocol: Mapping[str, str] = field(default_factory=dict)
    hardware: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    minutes: Mapping[str, float] = field(default_factory=dict)
    command: str = ""
    deviations: tuple[str, ...] = ()

    against: ClassVar[str] = "the baseline"
    """What differences are to."""
    known_sets: ClassVar[tuple[str, ...]] = SETS
    known_columns: ClassVar[tuple[str, ...]] = (*COLUMNS, *CONTROLS)

    @property
    def sets(self) -> tuple[str, ...]:
        """The sets that have a cell, in the paper's order."""
        there = {cell.set for cell in self.cells}
        return tuple(name for name in self.known_sets if name in there)

    @property
    def columns(self) -> tuple[str, ...]:
        """The paper's columns, and the controls that have a cell."""
        there = {cell.column for cell in self.cells}
        return (*COLUMNS, *(name for name in CONTROLS if name in there))

    @classmethod
    def baseline_of(cls, column: str) -> str:
        """The column that another is compared with."""
        return "baseline"

    @classmethod
    def paper_of(cls, column: str, name: str) -> tuple[float | None, float | None]:
        """The paper's mean and deviation of a column on a set; None where it has none."""
        reported = TABLE1[name].get(column)
        return (None, None) if reported is None else (reported.mean, reported.std)

    @classmethod
    def read_more(cls, read: "Reader") -> dict[str, Any]:
        """The fields that a kind of table has beside the common ones."""
        return {}

    def cell(self, name: str, column: str) -> Cell | None:
        """The cell of a set and a column; None where it was not run."""
        return next((cell for cell in self.cells if (cell.set, cell.column) == (name, column)), None)

    def errors(self) -> dict[str, dict[str, dict[int, float]]]:
        """Set to column to seed to error: what `claims.judge` takes."""
        return {name: {cell.column: cell.runs for cell in self.cells if cell.set == name} for name in self.sets}

    def weights(self) -> dict[str, dict[str, int]]:
        """Set to column to weights: what `claims.fewer_weights` takes."""
        return {name: {cell.column: cell.weights for cell in self.cells if cell.set == name} for name in self.sets}

    def losses(self, name: str) -> dict[str, Losses]:
        """Column to final losses on one set: what `claims.loss_gap_shrinks` takes.

        Only columns that noted them are there, and only the seeds that all of these have.
        """
        noted = {
            cell.column: {s: (a, b) for s, a, b in zip(cell.seeds, cell.train_loss, cell.test_loss, strict=True)}
            for cell in self.cells
            if cell.set == name and cell.train_loss is not None and cell.test_loss is not None
        }
        common = [seed for seed in next(iter(noted.values()), {}) if all(seed in runs for runs in noted.values())]
        if not common:
            return {}
        return {c: Losses([runs[s][0] for s in common], [runs[s][1] for s in common]) for c, runs in noted.items()}

    def to_baseline(self, cell: Cell) -> Difference | None:
        """The cell's errors minus the baseline's on the same seeds; None for the baseline, and without common seeds."""
        baseline = self.cell(cell.set, self.baseline_of(cell.column))
        if baseline is None or baseline is cell:
            return None
        return difference(cell.runs, baseline.runs)

    def best(self, name: str) -> tuple[str, ...]:
        """The DCL columns with the lowest error on a set, as it is printed: equal to two decimals is equal."""
        means = {c.column: round(c.mean, 2) for c in self.cells if c.set == name and c.column in DCL_COLUMNS}
        return tuple(column for column, value in means.items() if value == min(means.values()))


T = TypeVar("T", bound=Table)


def load(path: str | os.PathLike[str]) -> Table:
    """Read a table and check it: a `NaturalTable` where it says which sets are absent.

    Raises:
        FileNotFoundError: no such file.
        TableError: a file that is not a table; the message names the place, the value and what should be there.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TableError(f"{os.fspath(path)} is not JSON: {error}") from error
    return parse(data, os.fspath(path))


def save(table: Table, path: str | os.PathLike[str]) -> None:
    """Write a table in the form that `load` reads, all or nothing.

    Raises:
        TableError: a table that `load` would refuse.
        OSError: the file cannot be written.
    """
    content = asdict(table)
    for cell in content["cells"]:
        for key in ("train_loss", "test_loss", "minutes"):
            if cell[key] is None:
                del cell[key]
    parse(json.loads(json.dumps(content)), os.fspath(path))
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def parse(data: object, source: str = "table") -> Table:
    """Check what JSON holds, and make a table of it.

    Args:
        data: The content of the file.
        source: The name of the file, for messages.

    Raises:
        TableError: as `load`.
    """
    top = Reader(source, data)
    kind = _kind(top.data)
    cells = top.get("cells", _is_list, "a list of cells")
    table = kind(
        title=top.get("title", _is_text, "text"),
        cells=tuple(_cell(Reader(f"{source}: cells[{i}]", cell), kind) for i, cell in enumerate(cells)),
        protocol={key: str(value) for key, value in top.get("protocol", _is_dict, "names and texts", {}).items()},
        hardware=top.get("hardware", _is_text, "text", ""),
        versions={key: str(value) for key, value in top.get("versions", _is_dict, "names and versions", {}).items()},
        minutes=top.get("minutes", lambda v: _is_dict(v) and all(map(is_number, v.values())), "phases and numbers", {}),
        command=top.get("command", _is_text, "text", ""),
        deviations=tuple(top.get("deviations", lambda v: _is_list(v) and all(map(_is_text, v)), "a list of texts", [])),
        **kind.read_more(top),
    )
    seen: set[tuple[str, str]] = set()
    for i, cell in enumerate(table.cells):
        if (cell.set, cell.column) in seen:
            raise TableError(f"{source}: cells[{i}] is a second {cell.column} on {cell.set}; put all seeds into one")
        seen.add((cell.set, cell.column))
    return table


def _kind(data: Mapping[str, Any]) -> type[Table]:
    """The kind of table that JSON holds: of Table 2, which says what is absent, or of Table 1."""
    name = "table2" if "absent" in data else "table1"
    return cast("type[Table]", find_recipe_type(name).table_type)


def as_trial(table: T, departures: list[str]) -> T:
    """The table marked as a trial, with what it departs in first among its deviations; itself where it does not."""
    if not departures:
        return table
    return replace(table, title=table.title + MARK, deviations=(*departures, *table.deviations))


def is_trial(table: Table) -> bool:
    """Whether the table says of itself that it is a trial."""
    return table.title.endswith(MARK)


def mark(table: Table, cell: Cell) -> str:
    """The signs behind a number: clearly below or above the baseline, fitted, diverged."""
    gap = table.to_baseline(cell)
    clear = "" if gap is None else gap.sign
    return clear + ("*" if cell.fitted else "") + ("†" if cell.stopped else "")


class Reader:
    """Takes named values out of a JSON object and says where one is wrong."""

    def __init__(self, place: str, data: object) -> None:
        self.place = place
        if not isinstance(data, dict):
            self.refuse(f"an object with names is needed, not {_short(data)}")
        self.data: dict[str, Any] = data

    def get(self, key: str, right: Callable[[Any], bool], what: str, *default: object) -> Any:
        """A value that is right, or the default; anything else is refused."""
        if key not in self.data:
            if default:
                return default[0]
            self.refuse(f"{key} is missing; give {what}")
        value = self.data[key]
        if not right(value):
            self.refuse(f"{key} is {_short(value)}; give {what}")
        return value

    def name(self, key: str, known: Sequence[str]) -> str:
        """A name out of those that are known."""
        value: str = self.get(key, _is_text, "a name")
        if value not in known:
            near = difflib.get_close_matches(value, known, 1, 0)
            self.refuse(f"{key} {value!r} is unknown; did you mean {near[0]!r}? Known: {', '.join(known)}")
        return value

    def refuse(self, why: str) -> NoReturn:
        """Raise an error that names the place."""
        raise TableError(f"{self.place}: {why}")


def _cell(read: Reader, kind: type[Table]) -> Cell:
    name, column = read.name("set", kind.known_sets), read.name("column", kind.known_columns)
    read.place += f" ({name}, {column})"
    seeds = read.get("seeds", lambda v: _is_list(v) and all(map(_is_count, v)), "a list of whole numbers")
    if len(set(seeds)) != len(seeds):
        read.refuse(f"seeds {seeds} names one twice; give each run its own")
    errors = read.get("errors", _are_percents, "at least one number, each from 0 to 100")

    def per_seed(values: object) -> bool:
        if not isinstance(values, list):
            return values is None
        return all(map(is_number, values)) and len(values) == len(seeds)

    if len(errors) != len(seeds):
        read.refuse(f"{len(errors)} errors and {len(seeds)} seeds; give one error per seed")
    losses = [
        read.get(key, per_seed, f"one number per seed ({len(seeds)}), or leave it out", None)
        for key in ("train_loss", "test_loss")
    ]
    paper = read.get("paper", lambda v: v is None or is_number(v), "a number or null", None)
    paper_std = read.get("paper_std", lambda v: v is None or is_number(v), "a number or null", None)
    reported = kind.paper_of(column, name)
    if paper is not None and (paper, paper_std) != reported:
        has = "no such column" if reported[0] is None else notation(reported[0], reported[1])
        read.refuse(f"paper is {paper} with {paper_std}, but the paper has {has}; correct it")
    return Cell(
        set=name,
        column=column,
        errors=tuple(map(float, errors)),
        seeds=tuple(seeds),
        weights=read.get("weights", lambda v: _is_count(v) and v > 0, "a whole number above 0"),
        paper=paper,
        paper_std=paper_std,
        train_loss=None if losses[0] is None else tuple(map(float, losses[0])),
        test_loss=None if losses[1] is None else tuple(map(float, losses[1])),
        stopped=tuple(read.get("stopped", lambda v: _is_list(v) and all(map(_is_count, v)), "a list of seeds", [])),
        fitted=read.get("fitted", lambda v: isinstance(v, bool), "true or false", False),
        minutes=read.get("minutes", lambda v: v is None or (is_number(v) and v >= 0), "a number from 0 or null", None),
    )


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _is_dict(value: object) -> bool:
    return isinstance(value, dict)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_percents(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(is_number(v) and 0 <= v <= 100 for v in value)
