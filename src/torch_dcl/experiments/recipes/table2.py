"""Table 2: LeNet, BigNet and WRN on CIFAR and SVHN, without and with DCL, compared with the paper's numbers.

The seeds of a column train as a fleet, on a GPU the columns of a network concurrently. The training recipes are the
paper's, and nothing is chosen on a test set: it is evaluated once, at the end of each training.

The paper does not say how much of Caffe's ``cifar10_full`` its LeNet variant took over. So the plain network is first
trained with every combination of what is open (`LENET_OPTIONS`), on nine tenths of the training images, and judged with
the rest. All LeNet columns take the combination whose errors are nearest to the paper's *plain* network. DCL has no
part in the choice.
"""

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
    LENET_OPTIONS,
    NETWORKS,
    NaturalTable,
    TrainingRecipe,
    check_recipes,
    distance,
    nearest,
    network_of,
    paper_error,
    recipe_of,
    validation_errors,
    weights,
)
from torch_dcl.experiments.protocol import Estimate, Job, Labelled, Outcome, Workload, content_hash
from torch_dcl.experiments.recipes.chart import hold_out
from torch_dcl.experiments.runner import minutes_of, outcomes_of
from torch_dcl.experiments.settings import SettingError, join_texts, setting
from torch_dcl.experiments.stats import mean, pool, signed
from torch_dcl.experiments.table import Cell, TableError, as_trial, long_table, origin, run_facts, save
from torch_dcl.fleet import Fleet, Schedule
from torch_dcl.progress import say_about

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from torch_dcl.fleet.run_folder import RunFolder

__all__ = [
    "DEVIATIONS",
    "NaturalTable",
    "Table2",
    "Table2Config",
    "check_recipes",
    "join_table2",
    "table2_of",
    "verdict",
]

DEVIATIONS = (
    "BigNet: the paper gives neither batch, momentum nor weight decay; ours are 100, 0.9 and 5e-4. Crops of 24 × 24 "
    "and cross-entropy are inferred from its weights and rates; nagadomi's own preparation of the data is left out.",
    "WRN: the paper says 16 layers and no width; ours is WRN-16-4. Its only fully-connected layer is the classifier, "
    "so DCL stands there, with branches of a quarter of the classes, rounded up. +dcl-classes has as many filters a "
    "branch as classes, +dcl-group3 has DCL with batch norms in the last group instead; neither is in the paper.",
    "LeNet: Caffe's start, mean image and factors are inferred; on SVHN its inputs are 64 times the normalised images.",
    "SVHN: no mirroring; BigNet's random crops are the only augmentation, since the text names none.",
    "dcl3s is not in the paper: section 4.1 promises three stochastic branches for natural images, 4.2 uses two.",
)
VARIANTS = {
    "+dcl": "DCL (two branches)", "+dcl3s": "Three stochastic branches",
    "+dcl-classes": "DCL with as many filters a branch as classes", "+dcl-group3": "DCL in WRN's last group",
}  # fmt: skip
SHARED = ("precision", "average", "compile", "deterministic", "images")
"""What a cell's recipe takes from the settings of its run."""
SEARCH_SEED = 100
H200 = {"lenet": 361e3, "bignet": 208e3, "wrn": 84e3}  # images a second, compiled and concurrent: results/cifar.csv
SIGNS = (
    "Bold: the lowest error of each network. ▾ below the plain network, ▴ above it, by the 95 % interval of this cell "
    "alone, not corrected. † diverged."
)


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
    seeds: int = setting(5, "networks of each column; of WRN at most wrn_seeds", smoke=2, least=1, most=1000)
    wrn_seeds: int = setting(3, "networks of each column of WRN", least=1, most=1000)
    factorial: bool = setting(
        True, "choose LeNet's options: every combination on validation images, nearest to the paper's plain LeNet",
        smoke=False,
    )  # fmt: skip
    lenet: tuple[str, ...] = setting(
        (), "LeNet's options where factorial=no; none for the network as the paper describes it", what="option",
        choices=tuple(LENET_OPTIONS),
    )  # fmt: skip
    search_seeds: int = setting(1, "networks of each combination", least=1, most=100)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lenet and self.factorial:
            raise SettingError(
                f"the factorial chooses LeNet's options; give factorial=no with lenet={','.join(self.lenet)}"
            )

    def seeds_of(self, column: str) -> int:
        """How many networks a column has."""
        return min(self.seeds, self.wrn_seeds) if network_of(column) == "wrn" else self.seeds

    @property
    def has_trials(self) -> bool:
        """Whether LeNet's options are to be chosen."""
        return self.factorial and any(network_of(column) == "lenet" for column in self.columns)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns, in the table's order."""
        return self.models or tuple(column for column in COLUMNS if network_of(column) in self.networks)


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
        self.recipes = {(name, each): self._recipe(name, each) for name in self.sets for each in config.columns}
        self._validation: dict[str, Dataset] = {}

    def _recipe(self, name: str, column: str) -> TrainingRecipe:
        recipe = recipe_of(network_of(column), name).scaled(self.config.scale)
        return dataclasses.replace(recipe, batch=self.config.batch or recipe.batch)

    def workloads_on(self, name: str, images: int) -> list[Workload]:
        """The seeds of every column, and the trials of LeNet's options."""
        config = self.config
        epochs = {n: recipe_of(n, name).scaled(config.scale).schedule.epochs for n in map(network_of, config.columns)}
        loads = [
            Workload(network_of(each), name, config.seeds_of(each), images, epochs[network_of(each)])
            for each in config.columns
        ]
        if config.has_trials and name != "svhn":
            loads.append(Workload("lenet", name, 8 * config.search_seeds, images * 9 // 10, epochs["lenet"]))
        return loads

    def about(self, loads: Sequence[Workload]) -> Estimate:
        """With the time on an H200, by the speeds that were measured there."""
        words, plain = super().about(loads)
        seconds = sum(load.seen / H200[load.network] for load in loads)
        return Estimate({**words, "on a GPU": f"{say_about(seconds)} on an H200, compiled"}, plain)

    def asked(self) -> dict[str, Any]:
        """Columns, training recipes, and the content of the sets."""
        config = self.config
        return {
            "columns": list(config.columns), "seeds": config.seeds, "scale": config.scale, "images": config.images,
            "data": {name: self.sets[name].source if name in self.sets else self.absent[name] for name in config.data},
            "sha256": {name: content_hash(tensors_of(data)) for name, data in self.sets.items()},
            "recipes": {f"{name} {column}": dataclasses.asdict(r) for (name, column), r in self.recipes.items()},
            "precision": config.wanted_precision, "average": config.average, "compile": config.compile,
            "deterministic": config.deterministic, "wrn_seeds": config.wrn_seeds, "factorial": config.factorial,
            "lenet": config.lenet, "search_seeds": config.search_seeds,
        }  # fmt: skip

    def jobs(self, outcomes: Mapping[Job, Outcome]) -> list[Job]:
        """The trials of LeNet's options; then one for every set, column and seed."""
        trials = self._trials()
        if any(job not in outcomes for job in trials):
            return trials
        chosen = nearest(validation_errors(outcomes[job] for job in trials)) if trials else self.config.lenet
        return trials + self._reports(chosen)

    def total(self) -> int:
        """Trials and entries."""
        return len(self._trials()) + len(self._reports(()))

    def _trials(self) -> list[Job]:
        combinations = [c for n in range(len(LENET_OPTIONS) + 1) for c in itertools.combinations(LENET_OPTIONS, n)]
        return [
            Job("lenet", name, seed, recipe_of("lenet", name).lr, "choose", _options(combination))
            for name in self.sets
            for combination in combinations
            for seed in range(SEARCH_SEED, SEARCH_SEED + self.config.search_seeds)
            if self.config.has_trials and name != "svhn"
        ]

    def _reports(self, lenet: Sequence[str]) -> list[Job]:
        return [
            Job(each, name, seed, recipe.lr, options=_options(lenet if network_of(each) == "lenet" else ()))
            for (name, each), recipe in self.recipes.items()
            for seed in range(self.config.seeds_of(each))
        ]

    def concurrent(self, job: Job) -> Hashable:
        return job.phase, job.data, network_of(job.network)

    def describe(self, fleets: Sequence[Sequence[Job]]) -> str:
        """The columns, or LeNet's options."""
        names = super().describe(fleets)
        return f"options of {names}" if fleets[0][0].phase == "choose" else names

    def fleet(self, jobs: Sequence[Job]) -> Fleet:
        job, seeds = jobs[0], [job.seed for job in jobs]
        recipe = self._recipe(job.data, job.network).with_options(name for name, _ in job.options)
        return make_fleet(job.network, seeds, self._images(jobs), recipe, self.config, self.device)

    def judge(self, jobs: Sequence[Job]) -> Mapping[str, Labelled]:
        """The test set, evaluated once; in a trial the training images that were held out."""
        data = self._images(jobs)
        return {data.name: (data.test_images, data.test_labels)}

    def _images(self, jobs: Sequence[Job]) -> Dataset:
        """A set; for a trial its training images alone, in the places of both parts."""
        name = jobs[0].data
        if jobs[0].phase != "choose":
            return self.sets[name]
        if name not in self._validation:
            (images, labels), (judged, theirs) = hold_out(self.sets[name])
            self._validation[name] = dataclasses.replace(
                self.sets[name], train_images=images, train_labels=labels, test_images=judged, test_labels=theirs
            )
        return self._validation[name]

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


def _options(names: Iterable[str]) -> tuple[tuple[str, float], ...]:
    return tuple((name, 1.0) for name in names)


def table2_of(folder: "RunFolder", outcomes: Mapping[Job, Outcome]) -> NaturalTable:
    """The table of a run, also before its end; what is missing is not run."""
    asked = folder.recipe
    sources, columns = dict(asked["data"]), list(asked["columns"])
    absent = {name: source for name, source in sources.items() if source == NOT_AVAILABLE}
    recipes = {tuple(key.split(" ")): _stored(recipe) for key, recipe in asked["recipes"].items()}
    by_cell: dict[tuple[str, str], dict[int, Outcome]] = {}
    for job, outcome in outcomes.items():
        if job.phase == "report":
            place = job.data, job.network
            by_cell.setdefault(place, {})[job.seed] = outcome
            recipes[place] = recipes[place].with_options(name for name, _ in job.options)
    cells = []
    for place in itertools.product(sources, columns):
        if place in by_cell:
            (name, column), shared = place, {key: asked.get(key) for key in SHARED}
            recipe = {
                **shared,
                "sha256": asked.get("sha256", {}).get(name),
                "training": dataclasses.asdict(recipes[place]),
            }
            group = [outcome for _, outcome in sorted(by_cell[place].items())]
            paper, count = NaturalTable.paper_of(column, name), weights(column, 100 if name == "cifar100" else 10)
            cells.append(Cell.of(group, count, paper, origin=origin(folder, recipe)))
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
        lenet=validation_errors(outcome for job, outcome in outcomes.items() if job.phase == "choose"),
    )  # fmt: skip
    batches = [r.batch for (name, column), r in recipes.items() if r.batch != recipe_of(network_of(column), name).batch]
    images = [text for key, text in protocol.items() if key.startswith("data, ")]
    return as_trial(table, departures(images, asked["images"], batches))


def _stored(recipe: Mapping[str, Any]) -> TrainingRecipe:
    schedule = recipe["schedule"]
    given = {**recipe, "options": tuple(recipe.get("options", ()))}
    return TrainingRecipe(**{**given, "schedule": Schedule(**{**schedule, "drops": tuple(schedule["drops"])})})


def verdict(table: NaturalTable) -> list[str]:
    """The table in sentences, what was lost as plainly as what was won."""
    sentences = []
    for variant, words in VARIANTS.items():
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
        single = sum(gap is None for _, _, gap in pairs)
        alone = f", {single} of them with one seed" if single else ""
        sentence = f"{words} minus plain: {pool(gaps)} points over {count} of network and set{alone} (mean{error}), "
        sentence += f"lower in {sum(gap < 0 for gap in gaps)}"
        theirs = [c.paper - p.paper for c, p, _ in pairs if c.paper is not None and p.paper is not None]
        if theirs:
            sentence += f"; in the paper {signed(mean(theirs))}, lower in {sum(gap < 0 for gap in theirs)}"
        sentences.append(f"{sentence}.")
    if table.lenet:
        sets = list(next(iter(table.lenet.values())))
        tried = [f"{o} {', '.join(f'{e:.2f}' for e in by_set.values())}" for o, by_set in table.lenet.items()]
        best, theirs = min(table.lenet.values(), key=distance), [paper_error("lenet", name) or 0.0 for name in sets]
        sentences.append(
            f"LeNet's options by validation error on {' and '.join(sets)}: {'; '.join(tried)}. Nearest to the paper's "
            f"plain LeNet ({', '.join(f'{error:.2f}' for error in theirs)}), to within "
            f"{100 * distance(best):.1f} % on average: {' and '.join(nearest(table.lenet)) or 'none'}."
        )
    sentences += [f"{name}: {reason}." for name, reason in table.absent.items()]
    if stopped := sum(len(cell.stopped) for cell in table.cells):
        sentences.append(f"{stopped} {'run' if stopped == 1 else 'runs'} diverged.")
    return sentences


def join_table2(tables: Sequence[NaturalTable]) -> NaturalTable:
    """One table of several that were run apart, such as a network or a set on each of several machines.

    Raises:
        TableError: Two of them have the same column on the same set, or were not run alike.
    """
    first, cells = tables[0], [cell for table in tables for cell in table.cells]
    for i, cell in enumerate(cells):
        if any((cell.set, cell.column) == (other.set, other.column) for other in cells[:i]):
            raise TableError(f"two of the tables have {cell.column} on {cell.set}; run all its seeds in one")
    if len({(table.scale, table.title) for table in tables}) > 1:
        raise TableError("the tables were not run alike: " + ", ".join(repr(table.title) for table in tables))
    check_recipes(cells)
    places = {(name, column): place for place, (name, column) in enumerate(itertools.product(DATA, COLUMNS))}
    there = {cell.set for cell in cells}
    minutes: dict[str, float] = {}
    for phase, spent in (item for table in tables for item in table.minutes.items()):
        minutes[phase] = minutes.get(phase, 0.0) + spent
    return dataclasses.replace(
        first,
        cells=tuple(sorted(cells, key=lambda cell: places[cell.set, cell.column])),
        protocol=join_texts([table.protocol for table in tables]),
        hardware="; ".join(dict.fromkeys(table.hardware for table in tables)),
        versions=join_texts([table.versions for table in tables]),
        minutes=minutes,
        command="\n".join(dict.fromkeys(table.command for table in tables)),
        deviations=tuple(dict.fromkeys(text for table in tables for text in table.deviations)),
        absent={name: why for table in tables for name, why in table.absent.items() if name not in there},
        lenet={options: by_set for table in tables for options, by_set in table.lenet.items()},
    )
