"""Runs as one page: `report(["runs/table1", "runs/figures"], "report.html")`.

Every run has a section, and runs of parts of Table 2 have one together: of Table 1 the verdict, the tables, the figures
and the claims; of Table 2 the verdict and its tables; of the chart its picture and its points; of a run of figures
these, with the claims that they answer; and of each the machine that it ran on, and the recipe.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from torch_dcl.experiments.claims import Finding, further_findings, summary
from torch_dcl.experiments.paper_numbers import SETS
from torch_dcl.experiments.recipes import demo
from torch_dcl.experiments.recipes.chart import chart_verdict
from torch_dcl.experiments.recipes.table2 import NaturalTable, join_table2
from torch_dcl.experiments.recipes.table2 import verdict as table2_verdict
from torch_dcl.experiments.relation_findings import answer
from torch_dcl.experiments.run_reader import Run, State, as_argument, read_run
from torch_dcl.experiments.settings import join_texts
from torch_dcl.experiments.table import Table, TableError
from torch_dcl.files import write_text
from torch_dcl.report import figures
from torch_dcl.report.document import Drawn, document, figure, on_page, render, sheet
from torch_dcl.report.tables import (
    chart_context,
    differences,
    markdown_context,
    relations_context,
    table1_context,
    table2_context,
    tried_context,
)

__all__ = ["as_html", "as_markdown", "check", "draw_run", "report"]

TITLES = {
    "chart": "DCL and its rivals on BigNet",
    "demo": "dcl demo",
    "figures": "Figures beside Table 1",
    "knowledge": "What filters and their branches respond to",
    "relations": "Relations of two digits",
}
ABSENT = {
    "filters": ("Accuracy against filters of a branch", "dcl run figures --set parts=filters"),
    "curves": ("Losses by epoch", "dcl run figures --set parts=curves"),
    "knowledge": ("What filters and their branches respond to", "dcl run figures --set parts=knowledge"),
    "tried": ("More branches, and both layers replaced", "dcl run figures --set parts=tried"),
}


def report(
    runs: Sequence[str | os.PathLike[str] | Run], out: str | os.PathLike[str] | None = None, *, images: bool = True
) -> str:
    """The page of one or several runs.

    Args:
        runs: Run folders, also of runs that have not ended; files ``table1.json``, ``table2.json`` or
            ``relations.json``; or what `read_run` gave.
        out: Where to write it, all or nothing; None writes nothing.
        images: Whether to show samples of the sets.

    Returns:
        The page: one file with everything inside.

    Raises:
        RunError: One of them is damaged, or has nothing to show yet.
        ValueError: No run is given, or one has nothing to show yet.
    """
    read = [run if isinstance(run, Run) else read_run(run) for run in runs]
    if not read:
        raise ValueError("a report needs at least one run")
    for run in read:
        check(run)
    read = _joined(read)
    # Figures that one run has are not missing on the page.
    there = {part for run in read for part in run.parts}
    several = len(read) > 1
    title = f"Report of {len(read)} runs" if several else _title(read[0])
    shown = [
        {"path": str(run.path), "gist": _gist(run) if several else "",
         "html": _run(run, f"run{i}", there, prefix=f"run{i}-" if several else "")}
        for i, run in enumerate(read, 1)
    ]  # fmt: skip
    tables = [run.table for run in read if run.table is not None and not isinstance(run.table, NaturalTable)]
    sets = [name for name in SETS if any(name in each.sets for each in tables)]
    picture = sheet(sets) if sets and images else None
    page = document(title, render("runs.html", runs=shown, title=title, picture=picture))
    if out is not None:
        write_text(out, page)
    return page


def as_html(table: Table, further: Sequence[Finding] = (), asked: Mapping[str, Any] | None = None) -> str:
    """The page of a table by itself.

    ``further`` are findings from other data to show among the claims, such as `claims.large_banks_help_little`.
    ``asked`` is what the run folder keeps, for the commands; None for the protocol.
    """
    is_natural = isinstance(table, NaturalTable)
    context = table2_context(table) if isinstance(table, NaturalTable) else table1_context(table, further, asked)
    run = Run(Path(), State("", "", "finished", 0, 0))
    kind = "table2" if is_natural else "table1"
    return document(table.title, render("run.html", run=run, kind=kind, **context))


def as_markdown(table: Table) -> str:
    """A table as Markdown: verdict, numbers, claims, and what is needed to repeat it."""
    return str(render("table.md", **markdown_context(table)))


def draw_run(path: str | os.PathLike[str]) -> list[str]:
    """Write the pages and figures of a finished run into its folder; return the names of the files."""
    run, names = read_run(path), []
    if run.table is not None:
        names.append(f"{run.state.recipe}.html")
        write_text(run.path / names[-1], as_html(run.table, asked=run.recipe))
    if run.state.recipe == "demo":
        names.append("report.html")
        report([run], run.path / names[-1])
    for part in () if run.state.recipe in ("table1", "demo") else run.parts:
        for name, draw in figures.drawings(part, run.parts[part]).items():
            names.append(f"{name}.svg")
            figures.save(draw(False), run.path / names[-1])
    return names


def check(run: Run) -> None:
    """Refuse a run that has nothing to report."""
    if run.table is None and not run.parts:
        resume = f"resume it with dcl run {as_argument(run.path)} --resume"
        remedy = "it is running, wait for it" if run.state.state == "running" else resume
        raise ValueError(f"{run.path} has no results yet; {remedy}")


def _joined(runs: Sequence[Run]) -> list[Run]:
    """Join runs of Table 2 that have no cell in common and the same settings."""
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
    part = run.parts.get(run.state.recipe)
    given = part.get("title") if isinstance(part, Mapping) else None
    return str(given or TITLES.get(run.state.recipe, f"Run of {run.state.recipe}"))


def _gist(run: Run) -> str:
    if isinstance(run.table, NaturalTable):
        return " ".join(table2_verdict(run.table)[:1]) or "nothing to compare yet."
    if run.table is not None:
        return summary(run.table, _further(run))
    if "chart" in run.parts:
        return chart_verdict(run.parts["chart"])
    if "relations" in run.parts:
        return answer(run.parts["relations"])
    if "result" in run.parts:
        return f"{run.state.recipe}, {run.state.done:,} of {run.state.total:,} {run.state.unit}."
    held = [finding.verdict for finding in _further(run)]
    names = f"{', '.join(run.parts)}"
    return f"{names}; {held.count('holds')} of {len(held)} claims hold." if held else f"{names}."


def _further(run: Run) -> list[Finding]:
    try:
        return further_findings(run.parts, with_curves=run.table is None)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{run.path}: filters.json or curves.json lacks {error}; run that part again") from error


def _run(run: Run, name: str, there: set[str], prefix: str) -> Markup:
    common = {
        "run": run, "title": _title(run), "machine_of": _machine, "starts_of": _starts,
        "asked": json.dumps(run.recipe, indent=1, ensure_ascii=False),
    }  # fmt: skip
    if isinstance(run.table, NaturalTable):
        return render("run.html", kind="table2", **common, **table2_context(run.table, prefix))
    if "demo" in run.parts:
        return render("run.html", kind="demo", **common, **_demo(run, name))
    if "relations" in run.parts:
        return render("run.html", kind="relations", **common, **_relations(run, name))
    further = _further(run)
    context = {**common, "further": further, "table": None, **_figures(run, name, there)}
    if run.table is None:
        return render("run.html", kind="figures", **context)
    context |= table1_context(run.table, further, run.recipe or None, prefix) | {"with_figures": True}
    return render("run.html", kind="table1", **context)


def _figures(run: Run, name: str, there: set[str]) -> dict[str, Any]:
    """The figures of the run, and those that no run on the page has."""
    wanted = (run.state.recipe,) if run.state.recipe in ("knowledge", "chart") else tuple(ABSENT)
    if "result" in run.parts:
        wanted = ()
    context: dict[str, Any] = {"drawn": [], "lost": 0, "differences": None, "chart": None, "tried": None}
    context["text"] = run.parts.get("result")
    context["missing"] = [ABSENT[part] for part in wanted if part in ABSENT and part not in there]
    if run.table is not None and (cells := differences(run.table)):
        drawn = figure(lambda dark: figures.differences_figure(cells, dark=dark), f"{name}-differences")
        context["differences"] = drawn
    for part in wanted:
        if part not in run.parts:
            continue
        data = run.parts[part]
        try:
            if part == "chart":
                context["chart"] = chart_context(data, name)
            elif part == "tried":
                context["tried"] = tried_context(data)
            else:
                context["drawn"] += _drawn(part, data, name)
                context["lost"] += figures.lost_runs(data) if part == "curves" else 0
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{run.path / part}.json cannot be drawn: {error}; run that part again") from error
    return context


def _drawn(part: str, data: Mapping[str, Any], name: str) -> list[Drawn]:
    return [figure(draw, f"{name}-{word}") for word, draw in figures.drawings(part, data).items()]


def _demo(run: Run, name: str) -> dict[str, Any]:
    data, asked = run.parts["demo"], run.recipe
    rates = ", ".join(f"{demo.RATES[column]:g} ({word})" for column, word in demo.COLUMNS.items())
    protocol = {
        "Images": f"{data['set']}, {asked['train_images']:,} to train on and {asked['test_images']:,} to test with, "
        f"written with {asked['digits']}",
        "Training": f"{asked['epochs']} epochs, batch {asked['batch']}, {asked['seeds']} seeds; learning rates "
        f"{rates}, chosen for {demo.EPOCHS} epochs on training digits alone",
    }
    return {
        "demo": data, "grid": on_page(demo.demo_grid(data["networks"])),
        "words": demo.filter_in_words(data["knowledge"]), "planned": demo.PLANNED,
        "drawn": _drawn("demo", data, name),
        "picture": sheet([data["set"]]), "protocol": protocol,
    }  # fmt: skip


def _relations(run: Run, name: str) -> dict[str, Any]:
    data = run.parts["relations"]
    try:
        return {"relations": relations_context(data), "drawn": _drawn("relations", data, name)}
    except (KeyError, TypeError, ValueError) as error:
        file = run.path if run.path.is_file() else run.path / "relations.json"
        raise ValueError(f"{file} cannot be drawn: {error}; resume the run") from error


def _machine(starts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The machine of the last start, and the versions and commits of all."""
    last, versions = starts[-1], join_texts([start["versions"] for start in starts])
    commits = dict.fromkeys(start["commit"] or "not from a repository" for start in starts)
    return {
        "Machine": f"{last['machine']}, {last['cpus']} cores" + (f", {last['gpu']}" if last["gpu"] else ", no GPU"),
        "Versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "Commit" if len(commits) == 1 else "Commits": ", ".join(commits),
    }


def _starts(run: Run) -> list[list[Markup | str]]:
    """Time, machine and command of every start."""
    return [
        [
            start["time"].replace("T", " ").removesuffix("+00:00"),
            start["gpu"] or f"CPU, {start['cpus']} cores",
            Markup("<code>{}</code>").format(start["command"]),
        ]
        for start in run.environment
    ]
