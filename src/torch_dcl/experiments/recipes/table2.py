"""Table 2: LeNet, BigNet and WRN on CIFAR and SVHN, without and with DCL, beside the paper's numbers.

The seeds of a column train as a fleet, on a GPU the columns of a network concurrently. The training recipes are the
paper's, and nothing is chosen by looking at a test set: it is looked at once, at the end of each training.
"""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch_dcl.data import Dataset
from torch_dcl.experiments.natural.page import as_html2
from torch_dcl.experiments.natural.recipes import (
    COLUMNS,
    DATA,
    NETWORKS,
    build,
    caffe_factors,
    inputs_of,
    network_of,
    recipe_of,
)  # fmt: skip
from torch_dcl.experiments.natural.recipes import Recipe as TrainingRecipe
from torch_dcl.experiments.natural.sets import NaturalConfig, read_sets, tensors_of
from torch_dcl.experiments.natural.table import DEVIATIONS, NaturalTable, said, save_table2, table2_of
from torch_dcl.experiments.protocol import Job, Labelled, Outcome, Recipe, content_hash, setting
from torch_dcl.experiments.table import long_table
from torch_dcl.files import write_text
from torch_dcl.fleet import Fleet, Member
from torch_dcl.fleet.fleet import Precision

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from torch_dcl.fleet.run_folder import RunFolder

__all__ = ["Table2", "Table2Config", "make_fleet"]

SIGNS = "Bold: the lowest error of each network. ▾ clearly below the plain network, ▴ above. † diverged."


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
        DATA, "which sets; one that is not found is noted as not run", smoke=("cifar10",), choices=DATA, what="set"
    )

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns, in the table's order."""
        return self.models or tuple(column for column in COLUMNS if network_of(column) in self.networks)


class Table2(Recipe[Table2Config]):
    """Every column on every set with every seed."""

    name = "table2"
    config_type = Table2Config
    sets: dict[str, Dataset]
    absent: dict[str, str]
    recipes: dict[tuple[str, str], TrainingRecipe]

    def prepare(self, report: "Callable[[str], None]") -> None:
        """Read the sets that are there."""
        config = self.config
        self.sets, self.absent = read_sets(config.data, config.place, config.images, report)
        self.recipes = {}
        for name in self.sets:
            for column in config.columns:
                recipe = recipe_of(network_of(column), name).scaled(config.scale)
                self.recipes[name, column] = dataclasses.replace(recipe, batch=config.batch or recipe.batch)

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
        del outcomes
        return [
            Job(column, name, seed, recipe.lr)
            for (name, column), recipe in self.recipes.items()
            for seed in range(self.config.seeds)
        ]

    def total(self) -> int:
        """All entries of the table."""
        return len(self.recipes) * self.config.seeds

    @property
    def at_once(self) -> int:
        """As the config says."""
        return self.config.most

    def concurrent(self, job: Job) -> Hashable:
        """The columns of a network on a set."""
        return job.data, network_of(job.network)

    def fleet(self, jobs: Sequence[Job]) -> Fleet:
        """The seeds of a column on a set."""
        column, name = jobs[0].network, jobs[0].data
        seeds = [job.seed for job in jobs]
        return make_fleet(column, seeds, self.sets[name], self.recipes[name, column], self.config, self.device)

    def judge(self, jobs: Sequence[Job]) -> Mapping[str, Labelled]:
        """The test set, looked at once."""
        data = self.sets[jobs[0].data]
        return {data.name: (data.test_images, data.test_labels)}

    def result(self, folder: "RunFolder") -> NaturalTable:
        """The table, as JSON and as a page."""
        table = table2_of(folder)
        save_table2(table, folder.path / "table2.json")
        write_text(folder.path / "table2.html", as_html2(table))
        return table

    def shown(self, result: NaturalTable, width: int) -> "list[RenderableType]":
        """The table, what its signs mean, and what it says."""
        from rich.text import Text

        why = [told for told in result.deviations if told not in DEVIATIONS]
        table = long_table(result, width, against="the plain network", absent=result.absent)
        return [table, Text(SIGNS, style="dim"), "", *why, *said(result), ""]


def make_fleet(
    column: str, seeds: Sequence[int], data: Dataset, recipe: TrainingRecipe, config: NaturalConfig,
    device: str = "cpu", *, stacked: bool = False,
) -> Fleet:  # fmt: skip
    """The networks of a column with these seeds, ready to be trained on a set.

    Stacked they were measured slower: they fill a GPU side by side.
    """
    networks = [build(column, len(data.classes), seed, dropout=recipe.dropout) for seed in seeds]
    members = [
        Member(f"{column} {data.name} {seed}", data.name, seed, recipe.lr, recipe.schedule, recipe.weight_decay)
        for seed in seeds
    ]
    precision: Precision | None = config.wanted_precision
    return Fleet(
        networks, members, {data.name: (data.train_images, data.train_labels)}, batch=recipe.batch,
        momentum=recipe.momentum, nesterov=recipe.nesterov, factors=caffe_factors if recipe.caffe else None,
        precision=precision, device=device, inputs=inputs_of(network_of(column), data, average=config.average),
        stacked=stacked, compile=config.compile and not stacked, streams=1 if stacked else config.streams,
        deterministic=config.deterministic,
    )  # fmt: skip
