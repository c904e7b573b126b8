"""Runs as one page: `report(["runs/table1", "runs/figures"], "report.html")`.

Every run has a section, and runs of parts of Table 2 have one together: of Table 1 the verdict, the tables, the figures
and the claims; of Table 2 the verdict and its tables; of the deciding chart its picture and its points; of a run of
figures these, with the claims that they answer; and of each the machine that it ran on, and the recipe.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from torch_dcl.experiments import figures
from torch_dcl.experiments.claims import Finding, Losses, large_banks_help_little, loss_gap_shrinks, more_filters_help
from torch_dcl.experiments.document import box, column, document, figure, how, listed, not_run, prose, sheet, table
from torch_dcl.experiments.drawings import drawings, lost_runs
from torch_dcl.experiments.natural.page import chart_table, sections2
from torch_dcl.experiments.natural.points import chart_said
from torch_dcl.experiments.natural.table import NaturalTable, join_table2, said
from torch_dcl.experiments.page import claim, sections
from torch_dcl.experiments.reading import Run, read_run
from torch_dcl.experiments.reported import DCL_COLUMNS, SETS, TABLE1
from torch_dcl.experiments.statistics import mean, std
from torch_dcl.experiments.table import Table, TableError
from torch_dcl.experiments.verdict import summary
from torch_dcl.files import write_text

__all__ = ["check", "differences", "further_findings", "report"]

TITLES = {
    "chart": "DCL and its rivals on BigNet",
    "figures": "Figures beside Table 1",
    "knowledge": "What filters and their branches answer to",
}
ABSENT = {
    "filters": ("Accuracy against filters of a branch", "dcl run figures --set parts=filters"),
    "curves": ("Losses by epoch", "dcl run figures --set parts=curves"),
    "knowledge": ("What filters and their branches answer to", "dcl run figures --set parts=knowledge"),
    "tried": ("More branches, and both layers replaced", "dcl run figures --set parts=tried"),
}


def report(
    runs: Sequence[str | os.PathLike[str] | Run], out: str | os.PathLike[str] | None = None, *, images: bool = True
) -> str:
    """The page of one or several runs.

    Args:
        runs: Run folders, also of runs that have not ended; files ``table1.json`` or ``table2.json``; or what
            `read_run` gave.
        out: Where to write it, all or nothing; None writes nothing.
        images: Whether to show samples of the sets.

    Returns:
        The page: one file with everything inside.

    Raises:
        RunError: One of them is damaged, or has nothing to show yet.
        ValueError: No run is given, or one is of a recipe that has no report.
    """
    found = [run if isinstance(run, Run) else read_run(run) for run in runs]
    if not found:
        raise ValueError("a report needs at least one run")
    for run in found:
        check(run)
    found = _joined(found)
    # Figures that one run has are not missing on the page.
    there = {part for run in found for part in run.parts}
    parts = []
    several = len(found) > 1
    title = f"Report of {len(found)} runs" if several else _title(found[0])
    if several:
        lines = "".join(
            f'<li><a href="#run-{i}">{escape(str(run.path))}</a>: {prose(_gist(run))}</li>'
            for i, run in enumerate(found, 1)
        )
        parts.append(f"<h1>{escape(title)}</h1>\n<ul>{lines}</ul>")
    for i, run in enumerate(found, 1):
        body = "\n".join(_run(run, f"run{i}", there, prefix=f"run{i}-" if several else ""))
        parts.append(f'<section class="run" id="run-{i}">{body}</section>' if several else body)
    tables = [run.table for run in found if run.table is not None and not isinstance(run.table, NaturalTable)]
    sets = [name for name in SETS if any(name in each.sets for each in tables)]
    if sets and images:
        parts.append(f"<h2>The sets</h2>\n{sheet(sets)}")
    page = document(title, parts)
    if out is not None:
        write_text(out, page)
    return page


def check(run: Run) -> None:
    """Refuse a run that has nothing to report.

    Raises:
        ValueError: It has no results yet, or is of a recipe without a report; the message says what to do.
    """
    if run.table is None and not run.parts:
        if run.state.recipe in ("table1", "table2", *TITLES):
            raise ValueError(f"{run.path} has no results yet; go on with dcl run {run.path} --resume")
        raise ValueError(
            f"{run.path} is a run of {run.state.recipe}; reports are of table1, table2, {', '.join(TITLES)}"
        )


def _joined(runs: Sequence[Run]) -> list[Run]:
    """The runs, those of Table 2 as one where they have no cell in common and were run alike."""
    natural = [run for run in runs if isinstance(run.table, NaturalTable)]
    if len(natural) < 2:
        return list(runs)
    try:
        table = join_table2([run.table for run in natural if isinstance(run.table, NaturalTable)])
    except TableError:
        return list(runs)
    states = [run.state for run in natural]
    paths = ", ".join(str(run.path) for run in natural)
    state = dataclasses.replace(
        states[0], path=paths, done=sum(state.done for state in states), total=sum(state.total for state in states),
        state=", ".join(dict.fromkeys(state.state for state in states)),
    )  # fmt: skip
    starts = tuple(start for run in natural for start in run.environment)
    whole = Run(Path(paths), state, natural[0].recipe, starts, table=table)
    return [whole if run is natural[0] else run for run in runs if run is natural[0] or run not in natural]


def _title(run: Run) -> str:
    if run.table is not None:
        return run.table.title
    return str(run.parts.get("chart", {}).get("title") or TITLES.get(run.state.recipe, "Report"))


def _gist(run: Run) -> str:
    if isinstance(run.table, NaturalTable):
        return " ".join(said(run.table)[:1]) or "nothing to compare yet."
    if run.table is not None:
        return summary(run.table, further_findings(run))
    if "chart" in run.parts:
        return chart_said(run.parts["chart"])
    held = [finding.verdict for finding in further_findings(run)]
    told = f"{', '.join(run.parts)}"
    return f"{told}; {held.count('holds')} of {len(held)} claims hold." if held else f"{told}."


def _run(run: Run, name: str, there: set[str], prefix: str) -> list[str]:
    parts = []
    state = run.state
    if run.recipe:
        told = f"{run.path}, {state.state}, {state.done:,} of {state.total:,} {state.unit}"
        parts.append(f'<p class="where">{escape(told)}</p>')
    if isinstance(run.table, NaturalTable):
        parts += [*sections2(run.table, prefix=prefix), how(run.table, machine=not run.environment)]
        return [*parts, _environment(run)]
    further = further_findings(run)
    drawn = _figures(run, name, there)
    if run.table is not None:
        parts += sections(run.table, further, run.recipe or None, prefix=prefix, figures=f"<h2>Figures</h2>\n{drawn}")
        parts.append(how(run.table, machine=not run.environment))
    else:
        source = str(run.recipe.get("digits") or run.recipe.get("data") or "")
        parts.append(f'<h1>{escape(_title(run))}</h1>\n<p class="soft">{escape(source)}</p>\n{drawn}')
        parts += ["<h2>Claims</h2>", *(claim((None, finding)) for finding in further)] if further else []
    parts.append(_environment(run))
    return parts


def _figures(run: Run, name: str, there: set[str]) -> str:
    """What can be drawn from the run, and "not run" for what no run on the page has."""
    parts = []
    alone = run.state.recipe in ("knowledge", "chart")
    wanted: Sequence[str] = (run.state.recipe,) if alone else tuple(ABSENT)
    if run.table is not None:
        cells = differences(run.table)
        parts.append(
            figure(lambda dark: figures.differences_figure(cells, dark=dark), f"{name}-differences")
            if cells else not_run("Differences to the baseline, which need two seeds of it and of a DCL model")
        )  # fmt: skip
    together = []
    for part in wanted:
        if part not in run.parts:
            parts += [not_run(*ABSENT[part])] if part not in there else []
            continue
        data = run.parts[part]
        try:
            if part == "chart":  # as wide as the page
                parts.append(f'<p class="lead">{prose(chart_said(data))}</p>')
                parts += [*(figure(draw, f"{name}-{word}") for word, draw in drawings(part, data).items())]
                parts.append(chart_table(data))
                continue
            together += [figure(draw, f"{name}-{word}") for word, draw in drawings(part, data).items()]
            if part == "curves" and (lost := lost_runs(data)):
                together.append(f"<p>{lost} {'run' if lost == 1 else 'runs'} diverged and cannot be drawn.</p>")
            if part == "tried":
                parts.append(_tried(data))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{run.path / part}.json cannot be drawn: {error}; run that part again") from error
    return "\n".join([f'<div class="figures">{"".join(together)}</div>' if together else "", *parts]).strip()


def _tried(data: Mapping[str, Any]) -> str:
    rows = []
    for row in data["columns"]:
        errors = row["errors"]
        spread = f" ± {std(errors):.2f}" if len(errors) > 1 else ""
        rows.append(
            [
                column(row["column"]),
                f"{mean(errors):.2f}{spread} ({len(errors)})",
                f"{row['weights']:,}",
                f"{100 * row['one_fires']:.0f} %",
                f"{100 * row['all_fire']:.1f} %",
            ]
        )
    heads = ("Network", "Error % ± std (n)", "Weights", "A branch fires", "All branches fire")
    words = (
        "A4 and A5 have four and five branches in the first fully-connected layer, D deterministic, S stochastic; AB2 "
        "has both layers replaced. How often branches respond is counted over units and test images."
    )
    return (
        f'<h3>Also tried, on {escape(data["set"])}</h3>{table(heads, rows, "Also tried")}<p class="legend">{words}</p>'
    )


def differences(made: Table) -> list[dict[str, Any]]:
    """Every DCL cell's difference to the baseline, with the paper's beside it: what `differences_figure` draws."""
    cells = []
    for each in DCL_COLUMNS:
        for name in made.sets:
            cell = made.cell(name, each)
            found = made.to_baseline(cell) if cell is not None else None
            if found is None:
                continue
            paper = TABLE1[name]
            cells.append({"set": name, "column": each, "difference": found.mean, "low": found.low, "high": found.high,
                          "paper_difference": paper[each].mean - paper["baseline"].mean})  # fmt: skip
    return cells


def further_findings(run: Run) -> list[Finding]:
    """What a run's figures say of the claims that a table cannot answer."""
    found = []
    if (filters := run.parts.get("filters")) is not None:
        try:
            points = [(point["filters"], point["errors"]) for point in filters["points"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{run.path / 'filters.json'} has no points with filters and errors: {error}") from error
        found += [more_filters_help(points), large_banks_help_little(points)]
    curves = run.parts.get("curves")
    if curves is not None and run.table is None and not lost_runs(curves):
        losses = {
            name: Losses([run[-1] for run in runs["train_loss"]], [run[-1] for run in runs["test_loss"]])
            for name, runs in curves["series"].items()
        }
        found.append(loss_gap_shrinks(losses, curves["set"]))
    return found


def _environment(run: Run) -> str:
    """On what it ran, every time that it was started, and what was asked for."""
    if not run.environment:
        return ""
    last = run.environment[-1]
    known = {
        "Machine": f"{last['machine']}, {last['cpus']} cores" + (f", {last['gpu']}" if last["gpu"] else ", no GPU"),
        "Versions": ", ".join(f"{name} {version}" for name, version in last["versions"].items()),
        "Commit": last["commit"] or "not from a repository",
    }
    starts = []
    for start in run.environment:
        when = start["time"].replace("T", " ").removesuffix("+00:00")
        where = start["gpu"] or f"CPU, {start['cpus']} cores"
        starts.append([escape(when), escape(where), f"<code>{escape(start['command'])}</code>"])
    recipe = json.dumps(run.recipe, indent=1, ensure_ascii=False)
    return (
        f"<h2>Environment</h2>\n{listed(known)}"
        f'<h3 class="small">Started</h3>{table(("Time (UTC)", "On", "Command"), starts, "Started", "starts")}'
        f"<details><summary>The recipe</summary>{box(f'<pre>{escape(recipe)}</pre>', 'Recipe')}</details>"
    )
