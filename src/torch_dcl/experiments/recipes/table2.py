"""Table 2: LeNet, BigNet and WRN on CIFAR and SVHN, without and with DCL, beside the paper's numbers.

The seeds of a column train as a fleet, on a GPU the columns of a network concurrently. The training recipes are the
paper's, and nothing is chosen on a test set: it is evaluated once, at the end of each training.
"""

import dataclasses
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch_dcl.data import Dataset
from torch_dcl.experiments.natural_data import (
    NOT_AVAILABLE,
    NaturalConfig,
    NaturalRecipe,
    departures,
    make_fleet,
    read_sets,
    tensors_of,
)
from torch_dcl.experiments.natural_networks import (
    COLUMNS,
    DATA,
    NETWORKS,
    TrainingRecipe,
    network_of,
    paper_error,
    recipe_of,
    weights,
)
from torch_dcl.experiments.protocol import Job, Labelled, Outcome, Workload, content_hash
from torch_dcl.experiments.runner import minutes_of, outcomes_of
from torch_dcl.experiments.settings import Reader, is_number, setting
from torch_dcl.experiments.stats import mean, pool, signed
from torch_dcl.experiments.table import Cell, Table, TableError, as_trial, long_table, run_facts, save
from torch_dcl.fleet import Fleet, Schedule

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from torch_dcl.fleet.run_folder import RunFolder

__all__ = ["DEVIATIONS", "NaturalTable", "Table2", "Table2Config", "join_table2", "table2_of", "verdict"]

DEVIATIONS = (
    "BigNet: the paper gives neither batch, momentum nor weight decay; ours are 100, 0.9 and 5e-4. Crops of 24 × 24 "
    "and cross-entropy are inferred from its weights and rates; nagadomi's own preparation of the data is left out.",
    "WRN: the paper says 16 layers and no width; ours is WRN-16-4. Its only fully-connected layer is the classifier, "
    "so DCL stands there, with branches of a quarter of the classes, rounded up.",
    "LeNet: Caffe's start, mean image and factors are inferred; on SVHN its inputs are 64 times the normalised images.",
    "SVHN: no mirroring; BigNet's random crops are the only augmentation, since the text names none.",
    "dcl3s is not in the paper: section 4.1 promises three stochastic branches for natural images, 4.2 uses two.",
)
SIGNS = "Bold: the lowest error of each network. ▾ below the plain network, by the 95 % interval, ▴ above. † diverged."


@dataclasses.dataclass(frozen=True)
class Table2Config(NaturalConfig):
    """The settings of Table 2."""

    networks: tuple[str, ...] = setting(
        NETWORKS, "which networks, each without and with DCL", smoke=("lenet", "bignet"), choices=NETWORKS,
        what="network",
    )  # fmt: skip
    models: tuple[str, ...] = setting(
        (), "which columns exactly, such as bignet,bignet+dcl; none for the networks'", choices=COLUMNS, what="model"
    )
    data: tuple[str, ...] = setting(
        DATA, "which sets; one that is missing is marked as not run", smoke=("cifar10",), choices=DATA, what="set"
    )

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns, in the table's order."""
        return self.models or tuple(column for column in COLUMNS if network_of(column) in self.networks)


@dataclasses.dataclass(frozen=True)
class NaturalTable(Table):
    """Table 2 as it was run here.

    Attributes:
        absent: Sets of which nothing was run, with the reason.
        scale: The fraction of each recipe's epochs that was trained; below 1 the run is shortened.
    """

    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)
    scale: float = 1.0

    against: ClassVar[str] = "the plain network"
    known_sets: ClassVar[tuple[str, ...]] = DATA
    known_columns: ClassVar[tuple[str, ...]] = COLUMNS

    @property
    def sets(self) -> tuple[str, ...]:
        """The sets that have a cell or are marked as absent, in a fixed order."""
        there = {cell.set for cell in self.cells} | set(self.absent)
        return tuple(name for name in DATA if name in there)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that have a cell."""
        there = {cell.column for cell in self.cells}
        return tuple(name for name in COLUMNS if name in there)

    @classmethod
    def baseline_of(cls, column: str) -> str:
        """The plain network."""
        return network_of(column)

    @classmethod
    def paper_of(cls, column: str, name: str) -> tuple[float | None, float | None]:
        """The paper's error, which it gives without a deviation."""
        return paper_error(column, name), None

    @classmethod
    def read_more(cls, read: Reader) -> dict[str, Any]:
        """What is absent, and whether it was shortened."""

        def are_reasons(value: Any) -> bool:
            return isinstance(value, dict) and all(k in DATA and isinstance(v, str) for k, v in value.items())

        absent = read.get("absent", are_reasons, f"some of {', '.join(DATA)} with the reason")
        scale = read.get("scale", lambda v: is_number(v) and 0 < v <= 1, "a number above 0 and at most 1", 1.0)
        return {"absent": absent, "scale": scale}

    def best(self, name: str) -> tuple[str, ...]:
        """Of each network the columns with the lowest error on a set, as it is printed."""
        best: list[str] = []
        cells = [cell for cell in self.cells if cell.set == name]
        for network in dict.fromkeys(map(network_of, self.columns)):
            means = {c.column: round(c.mean, 2) for c in cells if network_of(c.column) == network}
            best += [column for column, value in means.items() if value == min(means.values())]
        return tuple(best)


class Table2(NaturalRecipe[Table2Config]):
    """Every column on every set with every seed."""

    name = "table2"
    config_type = Table2Config
    table_type = NaturalTable
    sets: dict[str, Dataset]
    absent: dict[str, str]
    recipes: dict[tuple[str, str], TrainingRecipe]

    def prepare(self, report: "Callable[[str], None]") -> None:
        config = self.config
        self.sets, self.absent = read_sets(config.data, config, report)
        self.recipes = {}
        for name in self.sets:
            for column in config.columns:
                recipe = recipe_of(network_of(column), name).scaled(config.scale)
                self.recipes[name, column] = dataclasses.replace(recipe, batch=config.batch or recipe.batch)

    def workloads_on(self, name: str, images: int) -> list[Workload]:
        """The seeds of every column."""
        config = self.config
        networks = [network_of(column) for column in config.columns]
        epochs = {network: recipe_of(network, name).scaled(config.scale).schedule.epochs for network in networks}
        return [Workload(network, name, config.seeds, images, epochs[network]) for network in networks]

    def asked(self) -> dict[str, Any]:
        """Columns, training recipes, and the content of the sets."""
        config = self.config
        return {
            "columns": list(config.columns), "seeds": config.seeds, "scale": config.scale, "images": config.images,
            "data": {name: self.sets[name].source if name in self.sets else self.absent[name] for name in config.data},
            "sha256": {name: content_hash(tensors_of(data)) for name, data in self.sets.items()},
            "recipes": {f"{name} {column}": dataclasses.asdict(r) for (name, column), r in self.recipes.items()},
            "precision": config.wanted_precision, "average": config.average, "compile": config.compile,
            "deterministic": config.deterministic,
        }  # fmt: skip

    def jobs(self, outcomes: Mapping[Job, Outcome]) -> list[Job]:
        """One for every set, column and seed; none depends on another."""
        return [
            Job(column, name, seed, recipe.lr)
            for (name, column), recipe in self.recipes.items()
            for seed in range(self.config.seeds)
        ]

    def concurrent(self, job: Job) -> Hashable:
        return job.data, network_of(job.network)

    def fleet(self, jobs: Sequence[Job]) -> Fleet:
        column, name = jobs[0].network, jobs[0].data
        seeds = [job.seed for job in jobs]
        return make_fleet(column, seeds, self.sets[name], self.recipes[name, column], self.config, self.device)

    def judge(self, jobs: Sequence[Job]) -> Mapping[str, Labelled]:
        """The test set, evaluated once."""
        data = self.sets[jobs[0].data]
        return {data.name: (data.test_images, data.test_labels)}

    def result(self, folder: "RunFolder") -> NaturalTable:
        table = table2_of(folder, outcomes_of(folder))
        save(table, folder.path / "table2.json")
        return table

    @classmethod
    def so_far(cls, folder: "RunFolder", outcomes: Mapping[Job, Outcome]) -> "dict[str, Callable[[], Any]]":
        return {"table2": lambda: table2_of(folder, outcomes)}

    def shown(self, result: NaturalTable, width: int) -> "list[RenderableType]":
        """The table, what its signs mean, and what it says."""
        from rich.text import Text

        why = [text for text in result.deviations if text not in DEVIATIONS]
        title = Text(result.title, style="bold")
        return [title, long_table(result, width), Text(SIGNS, style="dim"), Text(), *why, *verdict(result)]


def table2_of(folder: "RunFolder", outcomes: Mapping[Job, Outcome]) -> NaturalTable:
    """The table of a run, also before its end; what is missing is not run."""
    asked = folder.recipe
    sources, columns = dict(asked["data"]), list(asked["columns"])
    absent = {name: source for name, source in sources.items() if source == NOT_AVAILABLE}
    by_cell: dict[tuple[str, str], dict[int, Outcome]] = {}
    for job, outcome in outcomes.items():
        by_cell.setdefault((job.data, job.network), {})[job.seed] = outcome
    cells = [
        Cell.of(
            [outcome for _, outcome in sorted(by_cell[name, column].items())],
            weights(column, 100 if name == "cifar100" else 10), NaturalTable.paper_of(column, name),
        )
        for name in sources
        for column in columns
        if (name, column) in by_cell
    ]  # fmt: skip
    recipes = {tuple(key.split(" ")): _stored(recipe) for key, recipe in asked["recipes"].items()}
    protocol = {f"data, {name}": source for name, source in sources.items() if name not in absent}
    protocol |= {f"{column} on {name}": str(recipe) for (name, column), recipe in recipes.items() if "+" not in column}
    protocol["precision"] = asked["precision"] or "bfloat16 on a GPU, float32 on a CPU"
    protocol["test"] = (
        "mean over an image and its mirror image" if asked["average"] else "the middle of each image, once"
    )
    scale, spent = asked["scale"], minutes_of(folder)
    short = "" if scale == 1 else f", shortened to {scale:g} of the epochs"
    table = NaturalTable(
        f"Table 2: natural images{short}", tuple(cells), protocol, deviations=DEVIATIONS, absent=absent, scale=scale,
        minutes={"training and evaluation": spent} if spent else {}, **run_facts(folder),
    )  # fmt: skip
    batches = [r.batch for (name, column), r in recipes.items() if r.batch != recipe_of(network_of(column), name).batch]
    images = [text for key, text in protocol.items() if key.startswith("data, ")]
    return as_trial(table, departures(images, asked["images"], batches))


def _stored(recipe: Mapping[str, Any]) -> TrainingRecipe:
    schedule = recipe["schedule"]
    return TrainingRecipe(**{**recipe, "schedule": Schedule(**{**schedule, "drops": tuple(schedule["drops"])})})


def verdict(table: NaturalTable) -> list[str]:
    """The table in sentences, what was lost as plainly as what was won."""
    sentences = []
    for variant, words in (("+dcl", "DCL (two branches)"), ("+dcl3s", "Three stochastic branches")):
        pairs = [
            (cell, plain, table.to_baseline(cell))
            for cell in table.cells
            if cell.column.endswith(variant) and (plain := table.cell(cell.set, network_of(cell.column))) is not None
        ]
        if not pairs:
            continue
        gaps = [cell.mean - plain.mean if gap is None else gap.mean for cell, plain, gap in pairs]
        count = "1 pair" if len(gaps) == 1 else f"{len(gaps)} pairs"
        error = "" if len(gaps) == 1 else " ± the standard error over the pairs"
        sentence = f"{words} minus plain: {pool(gaps)} points over {count} of network and set (mean{error}), lower in "
        sentence += f"{sum(gap < 0 for gap in gaps)}"
        theirs = [c.paper - p.paper for c, p, _ in pairs if c.paper is not None and p.paper is not None]
        if theirs:
            sentence += f"; in the paper {signed(mean(theirs))}, lower in {sum(gap < 0 for gap in theirs)}"
        sentences.append(f"{sentence}.")
    sentences += [f"{name}: {reason}." for name, reason in table.absent.items()]
    if stopped := sum(len(cell.stopped) for cell in table.cells):
        sentences.append(f"{stopped} {'run' if stopped == 1 else 'runs'} diverged.")
    return sentences


def join_table2(tables: Sequence[NaturalTable]) -> NaturalTable:
    """One table of several that were run apart, such as a network or a set on each of several machines.

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
    return dataclasses.replace(
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
    """The texts of all parts by key, without repetitions."""
    texts: dict[str, dict[str, None]] = {}
    for key, text in (item for part in parts for item in part.items()):
        texts.setdefault(key, {})[text] = None
    return {key: "; ".join(by_key) for key, by_key in texts.items()}
