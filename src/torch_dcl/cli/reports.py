"""``dcl report``: runs as one page."""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_dcl.cli import pages
from torch_dcl.cli.names import UsageError, nearest

if TYPE_CHECKING:
    from torch_dcl.paper.claims import Finding
    from torch_dcl.paper.table import Table

__all__ = ["make_report", "read_table"]

CURVES_OF = "MNIST-III-10"


def make_report(runs: Sequence[str]) -> str:
    """The page of one or several runs.

    Args:
        runs: Run folders, or files ``table1.json``.

    Raises:
        UsageError: One is neither.
    """
    from torch_dcl.paper import as_html  # noqa: PLC0415
    from torch_dcl.paper.verdict import summary  # noqa: PLC0415

    found = [(Path(run), read_table(run)) for run in runs]
    title = found[0][1].title if len(found) == 1 else f"Report of {len(found)} runs"
    parts = []
    if len(found) > 1:
        lines = "".join(
            f'<li><a href="#run-{i}">{escape(str(path))}</a>: {escape(summary(table, _further(path)))}</li>'
            for i, (path, table) in enumerate(found, 1)
        )
        parts.append(f"<h1>{title}</h1><ul>{lines}</ul>")
    for i, (path, table) in enumerate(found, 1):
        body = pages.inner(as_html(table, _further(path)))
        drawn = _figures(path, table, f"run{i}")
        where = "<h2>Claims</h2>"
        body = body.replace(where, f"{drawn}\n{where}", 1) if where in body else f"{body}\n{drawn}"
        if len(found) > 1:
            told = f'<p class="soft">{escape(str(path))}</p>'
            body = f'<section class="run" id="run-{i}">{told}{pages.with_prefix(body, f"run{i}-")}</section>'
        parts.append(body)
    sets = [name for name in _all_sets() if any(name in table.sets for _, table in found)]
    if sets:
        parts.append(f"<h2>The sets</h2>\n{pages.sheet(sets)}")
    return pages.page(title, parts)


def _all_sets() -> tuple[str, ...]:
    from torch_dcl.paper.reported import SETS  # noqa: PLC0415

    return tuple(SETS)


def read_table(run: str) -> "Table":
    """The table of a run: as it was written at its end, or of what is there so far.

    Raises:
        UsageError: There is no run, or one without a table.
    """
    from torch_dcl.cli.folders import find_runs  # noqa: PLC0415
    from torch_dcl.paper import load  # noqa: PLC0415

    path = Path(run)
    if path.is_file():
        return load(path)
    if not path.is_dir():
        known = [state.path for state in find_runs(Path("runs"))]
        raise UsageError(f"there is no run {run!r}; {nearest(run, known)}" + ("" if known else " in runs/"))
    if (path / "table1.json").is_file():
        return load(path / "table1.json")
    if not (path / "recipe.json").is_file():
        raise UsageError(f"{run} is no run folder: it has no recipe.json")
    return _so_far(path)


def _so_far(path: Path) -> "Table":
    """The table of a run that has not ended; what is missing is not run."""
    from torch_dcl.paper import table1  # noqa: PLC0415
    from torch_dcl.paper.digitsets import Digits  # noqa: PLC0415
    from torch_dcl.paper.engine import Settings  # noqa: PLC0415
    from torch_dcl.training import Schedule  # noqa: PLC0415
    from torch_dcl.training.runs import RunFolder  # noqa: PLC0415

    recipe: dict[str, Any] = json.loads((path / "recipe.json").read_text(encoding="utf-8"))
    if recipe.get("table") != 1:
        raise UsageError(f"{path} is a run of {recipe.get('recipe', 'something else')}; reports are of table1")
    folder = RunFolder(path, recipe)
    outcomes = [table1._outcome(record) for record in folder.read("outcomes")]
    if not outcomes:
        raise UsageError(f"{path} has no results yet; go on with dcl run {path} --resume")
    schedule = Schedule(**{**recipe["schedule"], "drops": tuple(recipe["schedule"]["drops"])})
    settings = Settings(schedule, recipe["batch"], precision=recipe["precision"])
    minutes = sum(record["training"] for record in folder.read("minutes"))
    nothing: Any = None
    digits = Digits(nothing, nothing, recipe["digits"])
    return table1._table(outcomes, digits, settings, {"training and evaluation": minutes} if minutes else {})


def _figures(path: Path, table: "Table", name: str) -> str:
    """What can be drawn from the run, and "not run" for the rest."""
    from torch_dcl.paper import figures  # noqa: PLC0415

    cells, losses, filters = _differences(table), _losses(path), _read(path, "filters.json")
    parts = ["<h2>Figures</h2>"]
    parts.append(
        pages.figure(lambda dark: figures.differences_figure(cells, dark=dark), f"{name}-differences")
        if cells else pages.not_run("Differences to the baseline")
    )  # fmt: skip
    parts.append(
        pages.figure(lambda dark: figures.curves_figure(losses, dark=dark), f"{name}-curves")
        if losses else pages.not_run(f"Losses by epoch on {CURVES_OF} (--set curves=yes)")
    )  # fmt: skip
    parts.append(
        pages.figure(lambda dark: figures.filters_figure(filters, dark=dark), f"{name}-filters")
        if filters else pages.not_run("Filters of a branch")
    )  # fmt: skip
    return "\n".join(parts)


def _differences(table: "Table") -> list[dict[str, Any]]:
    from torch_dcl.paper.reported import DCL_COLUMNS, TABLE1  # noqa: PLC0415

    cells = []
    for column in DCL_COLUMNS:
        for name in table.sets:
            cell = table.cell(name, column)
            found = table.to_baseline(cell) if cell is not None else None
            if found is None:
                continue
            paper = TABLE1[name]
            cells.append({"set": name, "column": column, "difference": found.mean, "low": found.low, "high": found.high,
                          "paper_difference": paper[column].mean - paper["baseline"].mean})  # fmt: skip
    return cells


def _losses(path: Path) -> dict[str, Any]:
    from torch_dcl.training.runs import RunFolder  # noqa: PLC0415

    if found := _read(path, "curves.json"):
        return found
    if not path.is_dir():
        return {}
    series: dict[str, dict[str, list[list[float]]]] = {}
    for record in RunFolder(path, {}).read("outcomes"):
        train, test = record["curves"]
        if record["job"]["data"] == CURVES_OF and record["job"]["column"] != "oracle" and train and test:
            runs = series.setdefault(record["job"]["column"], {"train_loss": [], "test_loss": []})
            runs["train_loss"].append(train)
            runs["test_loss"].append(test)
    return {"set": CURVES_OF, "series": series} if series else {}


def _read(path: Path, name: str) -> dict[str, Any]:
    """What an experiment beside the table left in the run folder; nothing where it was not run."""
    file = path / name
    if not path.is_dir() or not file.is_file():
        return {}
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}; remove it, or write it again") from error
    return found


def _further(path: Path) -> list["Finding"]:
    """Findings from other data than the table's."""
    from torch_dcl.paper.claims import large_banks_help_little  # noqa: PLC0415

    filters = _read(path, "filters.json")
    if not filters:
        return []
    return [large_banks_help_little([(point["filters"], point["errors"]) for point in filters["points"]])]
