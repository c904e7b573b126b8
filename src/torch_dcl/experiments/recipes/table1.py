"""Table 1: every network on the fifteen multi-digit sets, compared with the paper's numbers.

The order of things is the protocol: the sets are frozen (`torch_dcl.data.layouts`), the learning rates were chosen on
digits that are not the test set's (`torch_dcl.experiments.recipes.table1_search`), and the test set is evaluated once,
at the end of each training.
"""

import dataclasses
import io
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_dcl.data.layouts import LAYOUTS
from torch_dcl.experiments.claims import summary
from torch_dcl.experiments.columns import (
    CONTROLS,
    MODELS,
    Choice,
    choice_as_plain,
    find_choice,
    stored_choice,
    stored_minutes,
)
from torch_dcl.experiments.digits import (
    MODEL_RULES,
    SCHEDULE,
    SETS_RULES,
    TWO,
    DigitConfig,
    DigitRecipe,
    digits_of,
    trial_job,
    weights_of,
)
from torch_dcl.experiments.paper_numbers import DCL_COLUMNS, SETS, TABLE1, THREE_DIGITS, TWO_DIGITS
from torch_dcl.experiments.protocol import Job, Outcome
from torch_dcl.experiments.runner import minutes_of, outcomes_of
from torch_dcl.experiments.settings import setting
from torch_dcl.experiments.stats import Comparison, compare, mean, signed
from torch_dcl.experiments.table import B_CONTROLS, Cell, Table, as_trial, long_table, mark, origin, run_facts, save
from torch_dcl.progress import say_minutes

if TYPE_CHECKING:
    import rich.table
    from rich.console import RenderableType

    from torch_dcl.fleet.run_folder import RunFolder

__all__ = [
    "DEVIATIONS", "Table1", "Table1Config", "as_rich", "as_text", "command_for", "effects", "notes", "reservations",
    "scores", "table1_of", "verdict",
]  # fmt: skip

DEVIATIONS = (
    "The paper gives no schedule for LeNet; ours is under protocol, with SGD, momentum 0.9 and weight decay 5e-4 where "
    "the search chose no other.",
    "The paper shows its layouts in a figure only. Ours follow its description, and how difficult each set is was "
    "fitted so that the baseline errs as often as the paper's, on digits of MNIST's training set. So the baseline "
    "column is fitted and proves nothing; the other columns are compared with it.",
    "The ReLU behind each pooling, and the start of the DCL layers, are inferred; the paper does not say.",
)
SIGNS = (
    "Bold: the best DCL model. ▾ below the baseline, ▴ above it, by the 95 % interval of this cell alone, not "
    "corrected. * fitted to the paper. † diverged."
)
CURVES_OF = "MNIST-III-10"
OPTIONS = ("sets", "models", "seeds", "epochs", "data")  # of dcl run
FEW = 4  # sets of which every cell has a line in the terminal


@dataclasses.dataclass(frozen=True)
class Table1Config(DigitConfig):
    """The settings of Table 1."""

    sets: tuple[str, ...] = setting(SETS, "which of the fifteen", smoke=TWO, **SETS_RULES)
    models: tuple[str, ...] = setting(
        MODELS, "which columns; all for controls of B2 and B3 and matched starts too, which need choice", **MODEL_RULES
    )
    seeds: int = setting(5, "networks of each column on each set", smoke=2, least=1, most=1000)
    fresh: bool = setting(False, "images of its own for every seed, to train on and to test with")
    choice: str = setting("", "search.json of dcl run table1-search; none for the choice of this release")
    curves: bool = setting(False, "judge after every epoch, for the figure of losses")


class Table1(DigitRecipe[Table1Config]):
    """Every column on every set with every seed, at the column's learning rate."""

    name = "table1"
    config_type = Table1Config
    table_type = Table

    def __init__(self, config: Table1Config, device: str = "cpu", choice: Choice | None = None) -> None:
        super().__init__(config, device)
        wanted = {(column, digits_of(name)) for column in config.models for name in config.sets}
        self.choice = choice or find_choice(config.choice, wanted)

    @classmethod
    def resumed(cls, config: Table1Config, folder: Path) -> Table1Config:
        """On another machine, where the search may be missing, the folder's own record of the choice."""
        is_missing = bool(config.choice) and not Path(config.choice).expanduser().exists()
        return dataclasses.replace(config, choice=str(folder / "recipe.json")) if is_missing else config

    def asked(self) -> dict[str, Any]:
        """Columns, sets, schedule, learning rates, strengths of the sets, and the content of MNIST."""
        config, digits = self.config, self.digits
        return {
            "digits": digits.source, "sha256": digits.sha256, "columns": config.models, "sets": config.sets,
            "seeds": config.seeds, "images": config.images, "schedule": dataclasses.asdict(config.schedule),
            "batch": config.batch, "precision": config.wanted_precision, "curves": config.curves,
            "strengths": {name: LAYOUTS[name].strength for name in config.sets},
            "choice": choice_as_plain(self.choice, config.models), **({"fresh": True} if config.fresh else {}),
        }  # fmt: skip

    def jobs(self, outcomes: Mapping[Job, Outcome]) -> list[Job]:
        """One for every column, set and seed; a seed is the same in every column."""
        return [
            trial_job(column, name, seed, self.choice[column][digits_of(name)])
            for column in self.config.models
            for name in self.config.sets
            for seed in range(self.config.seeds)
        ]

    def judges_epochs(self, jobs: Sequence[Job]) -> bool:
        return self.config.curves

    def result(self, folder: "RunFolder") -> Table:
        table = table1_of(folder, outcomes_of(folder))
        save(table, folder.path / "table1.json")
        return table

    @classmethod
    def so_far(cls, folder: "RunFolder", outcomes: Mapping[Job, Outcome]) -> dict[str, Callable[[], Any]]:
        """The table, and losses by epoch where they were asked for."""
        return {"table1": lambda: table1_of(folder, outcomes), "curves": lambda: _curves(outcomes)}

    def shown(self, result: Table, width: int) -> "list[RenderableType]":
        from rich.text import Text

        spent = (f"{phase} {say_minutes(60 * minutes)}" for phase, minutes in result.minutes.items())
        sentences = [text for text in result.deviations if text not in DEVIATIONS] + verdict(result)
        table: list[RenderableType] = [Text.from_ansi(as_text(result, width=width, styled=True))]
        if len(result.sets) <= FEW:
            table = [Text(result.title, style="bold"), long_table(result, width), Text(SIGNS, style="dim"), Text()]
        return [*table, *sentences, f"Time: {'; '.join(spent)}."]


def table1_of(folder: "RunFolder", outcomes: Mapping[Job, Outcome]) -> Table:
    """The table of a run, also before its end; what is missing is not run."""
    asked = folder.recipe
    columns, sets = list(asked["columns"]), list(asked["sets"])
    by_cell: dict[tuple[str, str], list[Outcome]] = {}
    for job in sorted(outcomes, key=lambda job: (columns.index(job.network), sets.index(job.data), job.seed)):
        by_cell.setdefault((job.data, job.network), []).append(outcomes[job])
    shared = {key: asked.get(key) for key in ("sha256", "images", "schedule", "batch", "precision", "fresh")}
    cells = [
        Cell.of(
            group, weights_of(group[0].job), Table.paper_of(column, name), fitted=column == "baseline",
            origin=origin(folder, {**shared, "strength": asked["strengths"][name], "trial": asked["choice"][column]}),
        )
        for (name, column), group in by_cell.items()
    ]  # fmt: skip
    schedule = asked["schedule"]
    epochs = f"{schedule['epochs']} epoch{'s' if schedule['epochs'] > 1 else ''}"
    protocol = {
        "digits": str(asked["digits"]),
        "schedule": f"{epochs}, batch {asked['batch']}, "
        f"warm-up over {schedule['warmup']} step{'' if schedule['warmup'] == 1 else 's'}, rate times "
        f"{schedule['factor']:g} after {' and '.join(f'{100 * drop:.0f} %' for drop in schedule['drops']) or 'none'}",
        "precision": asked["precision"] or "bfloat16 on a GPU, float32 on a CPU",
        "learning rates": "chosen together with bounds on the gradient's norm and, in newer searches, with weight "
        "decays, on digits of the training set, by the same trials for every column",
        "controls": f"{', '.join(CONTROLS)}: networks with DCL-A2's weights, not in the paper{_more(columns)}",
        **({"images": "every seed has its own, to train on and to test with"} if asked.get("fresh") else {}),
    }
    table = Table(
        "Table 1: multi-digit numbers", tuple(cells), protocol, minutes=_phases(folder, outcomes),
        deviations=DEVIATIONS, **run_facts(folder),
    )  # fmt: skip
    return as_trial(table, _departures(asked))


def _more(columns: Sequence[str]) -> str:
    """Descriptions of the control columns, for the text of the table."""
    of_b = [column for kind in B_CONTROLS.values() for column in kind if column in columns]
    matched = [column for column in columns if column.endswith("-matched")]
    words = f"; {', '.join(of_b)}: with the weights of B2 or of B3" if of_b else ""
    return words + (f"; {', '.join(matched)}: with the start of the factorised layers" if matched else "")


def _curves(outcomes: Mapping[Job, Outcome]) -> dict[str, Any]:
    """Losses by epoch on the set whose curves the paper shows."""
    series: dict[str, dict[str, list[Any]]] = {}
    for job, outcome in outcomes.items():
        curves = outcome.extra.get("curves")
        if curves and job.data == CURVES_OF and job.network != "oracle":
            runs = series.setdefault(job.network, {"train_loss": [], "test_loss": []})
            for kind, by_epoch in curves.items():
                runs[kind].append(by_epoch)
    return {"set": CURVES_OF, "series": series} if series else {}


def _phases(folder: "RunFolder", outcomes: Mapping[Job, Outcome]) -> dict[str, float]:
    """Minutes of the run, with compiling apart, and of the search and the calibration before it."""
    compiling = sum(outcome.compiling for outcome in outcomes.values()) / 60
    earlier = stored_minutes()
    phases = {"training and evaluation": max(0.0, minutes_of(folder) - compiling), "compiling": compiling}
    if _is_stored(folder.recipe):
        phases["search of learning rates, earlier on an H200"] = earlier["search"]
    phases["calibration of the sets, earlier on an H200"] = earlier["calibration"]
    return {phase: minutes for phase, minutes in phases.items() if minutes}


def _is_stored(asked: Mapping[str, Any]) -> bool:
    """Whether a run has the learning rates of this release."""
    choice, stored = asked.get("choice"), stored_choice()
    return isinstance(choice, dict) and choice == choice_as_plain(stored, [c for c in choice if c in stored])


def _departures(asked: Mapping[str, Any]) -> list[str]:
    """How a run departs from the protocol, in sentences."""
    sentences = []
    if asked["images"]:
        train, test = asked["images"]
        sentences.append(f"Only the first {train:,} images of a set to train on and {test:,} to test with.")
    epochs = asked["schedule"]["epochs"]
    if epochs != SCHEDULE.epochs:
        count = f"{epochs} epoch{'s' if epochs > 1 else ''}"
        sentences.append(f"Trained for {count}, while the learning rates were chosen for {SCHEDULE.epochs}.")
    if str(asked["digits"]).startswith("the embedded"):
        excerpt = "Written with an excerpt of MNIST"
        sentences.append(f"{excerpt}, while how difficult the sets are was fitted with all of it.")
    return sentences


def command_for(asked: Mapping[str, Any], sets: Sequence[str], columns: Sequence[str], seeds: int | None = None) -> str:
    """The command that repeats a part of the table, with every setting in which its run was not the protocol's.

    What was ``asked`` is what the run folder keeps, and empty for the protocol.
    """
    options: dict[str, Any] = {"sets": [name.removeprefix("MNIST-") for name in sets], "models": columns}
    options["seeds"] = asked.get("seeds", 5) if seeds is None else seeds
    if asked:
        protocol = Table1Config()
        settings = {**asked["schedule"], "batch": asked["batch"], "precision": asked["precision"] or "auto"}
        settings["drops"] = tuple(settings["drops"])
        options |= {key: value for key, value in settings.items() if value != getattr(protocol, key)}
        if str(asked["digits"]).startswith("the embedded"):
            options["data"] = "excerpt"
        if asked["images"]:
            options["train_images"], options["test_images"] = asked["images"]
        options |= {"fresh": "yes"} if asked.get("fresh") else {}
        options |= {} if _is_stored(asked) else {"choice": "search.json"}
    words = ["dcl", "run", "table1"]
    for key, value in options.items():
        text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        words += [f"--{key}", text] if key in OPTIONS else ["--set", f"{key}={text}"]
    return shlex.join(words)


# In a terminal

LEGEND = (
    "Test error in percent: mean(standard deviation in hundredths), the paper's number beneath. Bold: the best DCL "
    "model of the set. ▾ below the baseline, ▴ above it, by the 95 % paired interval of the cell alone, not corrected."
)


def notes(table: Table) -> list[str]:
    """What the signs mean, those that occur."""
    signs = [LEGEND]
    if any(cell.fitted for cell in table.cells):
        signs.append("* The difficulty of the set was fitted to the paper's number in this column.")
    if any(cell.stopped for cell in table.cells):
        signs.append("† At least one run diverged.")
    return signs


def as_rich(table: Table, columns: Sequence[str] | None = None) -> "rich.table.Table":
    """The table for `rich.print`, with some of its columns; all of them want a terminal of about 130 characters."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(box=SIMPLE_HEAD, padding=0, pad_edge=False)
    shown.add_column("MNIST-", no_wrap=True)
    tail = max((len(mark(table, cell)) for cell in table.cells), default=0)  # signs, behind digits under digits
    by_column = []
    for column in columns or table.columns:
        cells = {name: table.cell(name, column) for name in SETS}
        ours = [f"{cell.ours}{mark(table, cell):{tail}}" if cell else f"not run{'':{tail}}" for cell in cells.values()]
        theirs = [f"{cell.theirs if cell else ''}{'':{tail}}" for cell in cells.values()]
        size = max(map(len, [column, *ours, *theirs]))
        shown.add_column(f"{column:>{size}}", no_wrap=True)
        styles = ["dim" if not cell else "bold" if column in table.best(name) else "" for name, cell in cells.items()]
        texts = [Text(f"{text:>{size}}", style=style) for text, style in zip(ours, styles, strict=True)]
        by_column.append([t.append(f"\n{b:>{size}}", style="not bold dim") for t, b in zip(texts, theirs, strict=True)])
    for name, *texts in zip(SETS, *by_column, strict=True):
        shown.add_row(name.removeprefix("MNIST-"), *texts)
    return shown


def as_text(table: Table, *, width: int = 140, styled: bool = False) -> str:
    """The table as text in lines of this width. Columns that do not fit beside the others follow below them.

    ``styled`` writes the terminal's codes for bold and dim.
    """
    from rich.console import Console

    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=styled, color_system="standard" if styled else None, legacy_windows=False,
        highlight=False,
    )  # fmt: skip
    console.print(table.title, markup=False)
    left, endless = list(table.columns), console.options.update(max_width=10_000)
    while left:
        count = len(left)
        while count > 1 and console.measure(as_rich(table, left[:count]), options=endless).maximum > width:
            count -= 1
        console.print(as_rich(table, left[:count]))
        left = left[count:]
    for note in notes(table):
        console.print(note, markup=False)
    return out.getvalue()


# In sentences, each of which is computed from the table


def scores(table: Table) -> list[tuple[Comparison, Comparison | None]]:
    """Every DCL model against the baseline, and A2 against the controls, with the paper's counts where it has any."""
    errors = table.errors()
    pairs: list[tuple[Comparison, Comparison | None]] = [
        (compare(errors, column, "baseline"), compare(TABLE1, column, "baseline")) for column in DCL_COLUMNS
    ]
    pairs += [(compare(errors, "A2", control), None) for control in CONTROLS]
    for column in ("B2", "B3S", "B3D"):
        pairs += [(compare(errors, column, control), None) for control in B_CONTROLS[column[:2]]]
    pairs += [(compare(errors, column, "baseline-matched"), None) for column in ("baseline", "A2", "narrow-matched")]
    return [(ours, theirs) for ours, theirs in pairs if ours.compared]


def verdict(table: Table) -> list[str]:
    """The table in a few sentences, what was lost as plainly as what was won."""
    return [summary(table), *effects(table), *reservations(table)]


def effects(table: Table) -> list[str]:
    """Mean differences over the sets of two and of three digits, with their standard errors."""
    sentences = []
    for ours, theirs in scores(table):
        kinds = (("two", TWO_DIGITS), ("three", THREE_DIGITS))
        pooled = [(effect, digits) for digits, sets in kinds if (effect := ours.effect(sets)) is not None]
        parts = [f"{e} points on {e.n} set{'s' if e.n > 1 else ''} of {digits} digits" for e, digits in pooled]
        sentence = (
            f"{ours.column} minus {ours.named}: {', '.join(parts)}; lower on {len(ours.better)} of {ours.compared}"
        )
        if theirs:
            sentence += f", in the paper on {len(theirs.better)} of {theirs.compared}"
        sentences.append(f"{sentence}.")
    if sentences:
        sentences.append("Differences are means over sets of paired differences, ± the standard error over the sets.")
    return sentences


def reservations(table: Table) -> list[str]:
    """What a reader has to know before believing a number."""
    sentences = []
    fitted = [cell for cell in table.cells if cell.fitted]
    if fitted:
        names = ", ".join(sorted({cell.column for cell in fitted}))
        sentences.append(
            f"The difficulty of {len({cell.set for cell in fitted})} sets was fitted to the paper's number in the "
            f"column {names}, so agreement there is no evidence."
        )
    oracle = [cell for cell in table.cells if cell.column == "oracle" and cell.paper is not None and not cell.fitted]
    if oracle:
        off = mean([cell.mean - cell.paper for cell in oracle if cell.paper is not None])
        sentences.append(
            f"The oracle was not fitted: its error is {signed(off)} points from the paper's, on average over "
            f"{len(oracle)} {'set' if len(oracle) == 1 else 'sets'}."
        )
    controls = [cell for cell in table.cells if cell.column in CONTROLS]
    pairs = [(cell.weights, a2.weights) for cell in controls if (a2 := table.cell(cell.set, "A2")) is not None]
    if pairs:
        off = max(abs(weights / target - 1) for weights, target in pairs)
        names = ", ".join(sorted({cell.column for cell in controls}))
        close = f", to within {100 * off:.1g} %" if off else ""
        sentences.append(f"The controls ({names}) have as many weights as A2{close}.")
    absent = sum(table.cell(name, column) is None for name in SETS for column in table.columns)
    if absent:
        sentences.append(f"{absent} of {len(SETS) * len(table.columns)} cells were not run.")
    stopped = [cell for cell in table.cells if cell.stopped]
    if stopped:
        runs = sum(len(cell.stopped) for cell in stopped)
        names = ", ".join(sorted({cell.column for cell in stopped}))
        sentences.append(f"{runs} {'run' if runs == 1 else 'runs'} diverged, in {names}.")
    return sentences
