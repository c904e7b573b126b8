"""Result tables: built from outcomes, written, read and checked, and printed in a terminal.

`torch_dcl.report` shows them as pages for the browser.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, cast

from torch_dcl.experiments.paper_numbers import COLUMNS, DCL_COLUMNS, SETS, TABLE1
from torch_dcl.experiments.protocol import Outcome, find_recipe_type
from torch_dcl.experiments.settings import Reader, are_percents, is_count, is_list_of, is_number, is_text, join_texts
from torch_dcl.experiments.stats import Difference, Losses, difference, is_complete, mean, mean_std_n, notation, std
from torch_dcl.files import write_text

if TYPE_CHECKING:
    import rich.table

    from torch_dcl.fleet.run_folder import RunFolder

__all__ = [
    "B_CONTROLS", "CONTROLS", "MARK", "MORE", "Cell", "Grid", "Line", "Table", "TableError", "as_trial", "is_trial",
    "load", "long_table", "mark", "origin", "parse", "run_facts", "save",
]  # fmt: skip

CONTROLS = ("narrow", "low-rank", "summed")
"""At A2's weights: the layer narrowed, of low rank (T = 1), and with its branches averaged instead of multiplied."""
B_CONTROLS = {kind: (f"low-rank-{kind}", f"summed-{kind}", f"wide-{kind}") for kind in ("B2", "B3")}
MORE = (*B_CONTROLS["B2"], *B_CONTROLS["B3"], "baseline-matched", "narrow-matched")
"""At the weights of B2 or B3: the classifier of low rank, with its branches averaged, or plain behind another number of
filters. Matched: the first fully-connected layer starts at the scale of the factorised layers."""
MARK = " (a trial, not the protocol)"


class TableError(ValueError):
    """A table that cannot be read. The message names the place, the value and what is expected."""


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
        commit: The commit, or the commits, of the run; empty where that was not noted.
        recipe: The hash of the recipe that its networks were trained by; empty where that was not noted.
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
    commit: str = ""
    recipe: str = ""

    @classmethod
    def of(
        cls, group: Sequence[Outcome], weights: int, paper: tuple[float | None, float | None], *, fitted: bool = False,
        origin: tuple[str, str] = ("", ""),
    ) -> "Cell":  # fmt: skip
        """The cell of some outcomes that differ by their seeds alone; losses are left out where a run diverged."""
        job = group[0].job
        losses = [tuple(getattr(outcome, key) for outcome in group) for key in ("train_loss", "test_loss")]
        train, test = (values if is_complete(values) else None for values in losses)
        return cls(
            job.data, job.network, tuple(o.error for o in group), tuple(o.job.seed for o in group), weights, *paper,
            train, test, tuple(o.job.seed for o in group if o.stopped is not None), fitted,
            sum(o.seconds for o in group) / 60 or None, *origin,
        )  # fmt: skip

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
    """The column to which differences are computed."""
    known_sets: ClassVar[tuple[str, ...]] = SETS
    known_columns: ClassVar[tuple[str, ...]] = (*COLUMNS, *CONTROLS, *MORE)

    @property
    def sets(self) -> tuple[str, ...]:
        """The sets that have a cell, in the paper's order."""
        there = {cell.set for cell in self.cells}
        return tuple(name for name in self.known_sets if name in there)

    @property
    def columns(self) -> tuple[str, ...]:
        """The paper's columns, and the controls that have a cell."""
        there = {cell.column for cell in self.cells}
        return (*COLUMNS, *(name for name in (*CONTROLS, *MORE) if name in there))

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
        """The additional fields of a kind of table."""
        return {}

    def cell(self, name: str, column: str) -> Cell | None:
        """The cell of a set and a column; None where it was not run."""
        return next((cell for cell in self.cells if (cell.set, cell.column) == (name, column)), None)

    def errors(self) -> dict[str, dict[str, dict[int, float]]]:
        """Errors by set, column and seed, for `claims.judge`."""
        return {name: {cell.column: cell.runs for cell in self.cells if cell.set == name} for name in self.sets}

    def weights(self) -> dict[str, dict[str, int]]:
        """Weights by set and column, for `claims.fewer_weights`."""
        return {name: {cell.column: cell.weights for cell in self.cells if cell.set == name} for name in self.sets}

    def losses(self, name: str) -> dict[str, Losses]:
        """Final losses by column on one set, for `claims.loss_gap_shrinks`.

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
        raise TableError(f"{os.fspath(path)} is not JSON: {error}; resume its run, which writes it again") from error
    return parse(data, os.fspath(path))


def save(table: Table, path: str | os.PathLike[str]) -> None:
    """Write a table in the form that `load` reads, all or nothing.

    Raises:
        TableError: a table that `load` would refuse.
        OSError: the file cannot be written.
    """
    content = asdict(table)
    for cell in content["cells"]:
        for key in ("train_loss", "test_loss", "minutes", "commit", "recipe"):
            if cell[key] in (None, ""):
                del cell[key]
    parse(json.loads(json.dumps(content)), os.fspath(path))
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def parse(data: object, source: str = "table") -> Table:
    """Check what JSON holds, and make a table of it; messages name the source."""
    top = Reader(source, data, TableError)
    kind = _kind(top.data)
    cells = top.get("cells", lambda v: isinstance(v, list), "a list of cells")
    table = kind(
        title=top.get("title", is_text, "text"),
        cells=tuple(_cell(Reader(f"{source}: cells[{i}]", cell, TableError), kind) for i, cell in enumerate(cells)),
        protocol=top.named("protocol", lambda _: True, "names and texts", str),
        hardware=top.get("hardware", is_text, "text", ""),
        versions=top.named("versions", lambda _: True, "names and versions", str),
        minutes=top.named("minutes", is_number, "phases and numbers"),
        command=top.get("command", is_text, "text", ""),
        deviations=tuple(top.get("deviations", is_list_of(is_text), "a list of texts", [])),
        **kind.read_more(top),
    )
    seen: set[tuple[str, str]] = set()
    for i, cell in enumerate(table.cells):
        if (cell.set, cell.column) in seen:
            raise TableError(f"{source}: cells[{i}] is a second {cell.column} on {cell.set}; put all seeds into one")
        seen.add((cell.set, cell.column))
    return table


def _kind(data: Mapping[str, Any]) -> type[Table]:
    """The type of table in JSON: Table 2 where it has ``absent``, otherwise Table 1."""
    name = "table2" if "absent" in data else "table1"
    return cast("type[Table]", find_recipe_type(name).table_type)


def run_facts(folder: "RunFolder") -> dict[str, Any]:
    """Hardware, versions and command of a run, for its table."""
    starts = folder.read("environment")
    machines = dict.fromkeys(start["gpu"] or f"CPU, {start['cpus']} cores" for start in starts)
    versions, command = join_texts([start["versions"] for start in starts]), starts[0]["command"] if starts else ""
    return {"hardware": "; ".join(machines), "versions": versions, "command": command}


def origin(folder: "RunFolder", recipe: Mapping[str, Any]) -> tuple[str, str]:
    """The commits of a run, and the hash of a recipe that is given as plain data: where a cell comes from."""
    starts = folder.read("environment")
    text = json.dumps(recipe, sort_keys=True)
    commits = "; ".join(dict.fromkeys(str(start.get("commit") or "unknown") for start in starts))
    return commits, hashlib.sha256(text.encode()).hexdigest()[:12]


def as_trial(table: T, departures: list[str]) -> T:
    """Mark a table as a trial if it departs from the protocol, with the departures first among its deviations."""
    if not departures:
        return table
    return replace(table, title=table.title + MARK, deviations=(*departures, *table.deviations))


def is_trial(table: Table) -> bool:
    """Whether the table is marked as a trial."""
    return table.title.endswith(MARK)


def mark(table: Table, cell: Cell) -> str:
    """The signs behind a number: an interval below or above the baseline, fitted, diverged."""
    gap = table.to_baseline(cell)
    clear = "" if gap is None else gap.sign
    return clear + ("*" if cell.fitted else "") + ("†" if cell.stopped else "")


def _cell(read: Reader, kind: type[Table]) -> Cell:
    name, column = read.name("set", kind.known_sets), read.name("column", kind.known_columns)
    read.place += f" ({name}, {column})"
    seeds = read.get("seeds", is_list_of(is_count), "a list of whole numbers")
    per_seed = f"one number per seed ({len(seeds)}), or leave it out"

    def are_per_seed(values: Any) -> bool:
        return values is None or (is_list_of(is_number)(values) and len(values) == len(seeds))

    rules: dict[str, Any] = {
        "errors": (are_percents, "at least one number, each from 0 to 100"),
        "weights": (lambda v: is_count(v) and v > 0, "a whole number above 0"),
        "paper": (lambda v: v is None or is_number(v), "a number or null", None),
        "paper_std": (lambda v: v is None or is_number(v), "a number or null", None),
        "train_loss": (are_per_seed, per_seed, None),
        "test_loss": (are_per_seed, per_seed, None),
        "stopped": (is_list_of(is_count), "a list of seeds", []),
        "fitted": (lambda v: isinstance(v, bool), "true or false", False),
        "minutes": (lambda v: v is None or (is_number(v) and v >= 0), "a number from 0 or null", None),
        "commit": (is_text, "text, or leave it out", ""),
        "recipe": (is_text, "text, or leave it out", ""),
    }
    fields = {key: read.get(key, *rule) for key, rule in rules.items()}
    if len(set(seeds)) != len(seeds):
        read.refuse(f"seeds {seeds} names one twice; give each run its own")
    if len(fields["errors"]) != len(seeds):
        read.refuse(f"{len(fields['errors'])} errors and {len(seeds)} seeds; give one error per seed")
    paper, reported = (fields["paper"], fields["paper_std"]), kind.paper_of(column, name)
    if paper[0] is not None and paper != reported:
        has = "no such column" if reported[0] is None else notation(reported[0], reported[1])
        read.refuse(f"paper is {paper[0]} with {paper[1]}, but the paper has {has}; correct it")
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    return Cell(set=name, column=column, seeds=tuple(seeds), **fields)


# In a terminal


class Line(NamedTuple):
    """A line of a grid."""

    cells: Sequence[str]
    style: str = ""
    is_last: bool = False
    """Whether a rule follows in a terminal."""
    note: str = ""
    """The explanation of the first cell on a page."""


class Grid(NamedTuple):
    """Texts in lines and columns, for a terminal and for a page."""

    heads: Sequence[str]
    """Of the columns; those that begin with ``<`` are aligned to the left."""
    lines: Sequence[Line]
    optional: Sequence[str] = ()
    """Heads of the columns that a narrow terminal goes without, the least needed first; no number is cut."""

    def as_rich(self, width: int) -> "rich.table.Table":
        """The grid for a terminal of this width."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        plain = [head.removeprefix("<") for head in self.heads]
        sizes = [max(len(head), *(len(line.cells[i]) for line in self.lines)) for i, head in enumerate(plain)]
        shown = list(range(len(plain)))
        for head in self.optional:
            if sum(sizes[i] + 3 for i in shown) - 1 > width:
                shown.remove(plain.index(head))
        is_tight = sum(sizes[i] + 3 for i in shown) - 1 > width
        table = RichTable(box=None, padding=(0, 1, 0, 0)) if is_tight else RichTable(box=SIMPLE_HEAD, pad_edge=False)
        for i in shown:
            side = "left" if self.heads[i].startswith("<") else "right"
            table.add_column(plain[i], justify=side, overflow="fold", no_wrap=not is_tight)  # type: ignore[arg-type]
        for line in self.lines:
            table.add_row(*(Text(line.cells[i]) for i in shown), style=line.style, end_section=line.is_last)
        return table


def long_table(table: Table, width: int) -> "rich.table.Table":
    """A line for every cell: the paper's number, ours, and the difference to the baseline."""
    gap_head = f"to {table.against}, 95 %"
    lines = []
    for name in table.sets:
        cells = [cell for column in table.columns if (cell := table.cell(name, column)) is not None]
        for i, cell in enumerate(cells):
            gap = table.to_baseline(cell)
            texts = ("" if i else name.removeprefix("MNIST-"), cell.column, cell.theirs, mean_std_n(cell.errors),
                     mark(table, cell), "" if gap is None else str(gap), f"{cell.weights:,}")  # fmt: skip
            lines.append(Line(texts, "bold" if cell.column in table.best(name) else "", i == len(cells) - 1))
    absent: dict[str, str] = getattr(table, "absent", {})
    lines += [Line((name, "", "", reason, "", "", ""), "dim") for name, reason in absent.items()]
    heads = ("<set", "<model", "paper %", "ours % ± std (n)", "<", gap_head, "weights")
    return Grid(heads, lines, ("weights", gap_head, "paper %")).as_rich(width)
