"""``dcl ls`` and ``dcl report``: recipes and runs, listed and reported."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch_dcl.cli.config import ABOUT, as_toml, find_recipe, plain_settings
from torch_dcl.cli.console import (
    UsageError,
    check_output,
    console,
    nearest,
    print_json,
    print_text,
    say_state,
    table_of,
)

if TYPE_CHECKING:
    from torch_dcl.experiments.run_reader import Run

COLOURS = {"running": "cyan", "finished": "green", "incomplete": "yellow", "damaged": "red"}


def print_recipe(name: str, runs: Path, *, as_json: bool) -> None:
    """Print a recipe, or the recipe of a run, as TOML."""
    known = name in ABOUT or Path(name).exists() or not (runs / name).is_dir()
    asked, _ = find_recipe(name if known else str(runs / name))
    if as_json:
        print_json({"recipe": asked.name, **plain_settings(asked.config)})
    else:
        print_text(as_toml(asked))


def list_all(runs: Path, *, as_json: bool) -> None:
    """Print the recipes, and the runs with their state."""
    from rich.text import Text

    from torch_dcl.experiments.run_reader import find_runs

    states = find_runs(runs)
    if as_json:
        print_json({"recipes": ABOUT, "runs": [dataclasses.asdict(state) for state in states]})
        return
    screen = console()
    table = table_of("recipe", "what it runs", fixed=("recipe",))
    for name, about in ABOUT.items():
        table.add_row(Text(name, style="bold"), about)
    screen.print(table)
    screen.print()
    if not states:
        hint = "Try: dcl run table1 --smoke · what a recipe takes: dcl run NAME --dry-run"
        screen.print(Text.assemble(f"No runs in {runs}/ yet. ", (hint, "dim")))
        return
    # A narrow terminal goes without the recipe, and then without the time.
    least = {"run": 0, "recipe": 80, "state": 0, "begun": 60}
    heads = [head for head, width in least.items() if screen.width >= width]
    table = table_of(*heads, fixed=("recipe", "begun"))
    for state in states:
        begun = (state.started or "")[:16].replace("T", " ")
        words = Text(say_state(state), style=COLOURS[state.state])
        cells = {
            "run": Text(state.path, style="bold"),
            "recipe": Text(state.recipe),
            "state": words,
            "begun": Text(begun),
        }
        table.add_row(*(cells[head] for head in heads))
    screen.print(table)


def write_report(runs: Sequence[str], output: Path) -> Path:
    """Write the page of some runs; or, to a file that ends in ``.json``, the runs of parts of Table 2 as one table."""
    from torch_dcl.experiments import read_run
    from torch_dcl.report.page import check, report

    check_output(output)
    read = [read_run(find_run(run)) for run in runs]
    for run in read:
        try:
            check(run)
        except ValueError as error:
            raise UsageError(str(error)) from None
    if output.suffix == ".json":
        _write_table(read, output)
    else:
        report(read, output)
    return output.resolve()


def _write_table(runs: "Sequence[Run]", output: Path) -> None:
    from torch_dcl.experiments import NaturalTable, TableError, join_table2, save

    tables = [run.table for run in runs if isinstance(run.table, NaturalTable)]
    if len(tables) < len(runs):
        other = next(run.path for run in runs if not isinstance(run.table, NaturalTable))
        raise UsageError(f"{other} is not a run of table2, and only those are joined in a file; name a page, x.html")
    try:
        save(join_table2(tables), output)
    except TableError as error:
        raise UsageError(str(error)) from None


def find_run(run: str) -> Path:
    """Find a run: a folder, a file, or a name in ``runs/``."""
    from torch_dcl.experiments import find_runs

    for path in (Path(run), Path("runs", run)):
        if path.is_file() or (path / "recipe.json").is_file():
            return path
        if path.is_dir():
            raise UsageError(f"{path} is not a run folder: it has no recipe.json")
    known = [state.path for state in find_runs("runs")]
    raise UsageError(f"there is no run {run!r}; {nearest(run, known)}" + ("" if known else " in runs/"))
