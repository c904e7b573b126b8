"""``dcl run table2`` and ``dcl run chart``: with a bar, and with what came out printed at the end."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from torch_dcl.cli.bar import Bar, Listener
from torch_dcl.cli.screen import bullets, console, first_rank, several

if TYPE_CHECKING:
    from torch_dcl.cli.tasks import Natural

__all__ = ["run_natural_chart", "run_natural_table"]

SIGNS = "Bold: the lowest error of each network. ▾ clearly below the plain network, ▴ above. † diverged."


@contextmanager
def _listening() -> Iterator[dict[str, Any]]:
    """A bar over the networks of a run: what the run is told to call."""
    unit = "networks, first rank" if several() else "networks"
    with Bar(console(), 0, unit, by_step=True) as bar:
        listener = Listener(bar, "making networks")
        # With torchrun the other ranks would wait for this one.
        with nullcontext() if several() else listener.stopping_softly():
            yield {"report": listener.report, "begin": listener.begin, "on_epoch": listener.on_epoch}


def _asked(task: "Natural") -> dict[str, Any]:
    """What both recipes are run with."""
    recipe = task.recipe
    return {
        "data": recipe["data"], "seeds": recipe["seeds"], "scale": recipe["scale"], "root": task.root,
        "images": task.images, "batch": recipe["batch"] or None, "how": task.how, "resume": task.resume,
        "seconds": task.seconds,
    }  # fmt: skip


def run_natural_table(task: "Natural") -> bool:
    """Run Table 2, or go on with it; whether it is complete."""
    from torch_dcl.cli.tables import long_table  # noqa: PLC0415
    from torch_dcl.experiments.natural.page import as_html2  # noqa: PLC0415
    from torch_dcl.experiments.natural.table import DEVIATIONS, said, save_table2  # noqa: PLC0415
    from torch_dcl.experiments.natural.table2 import run_table2  # noqa: PLC0415
    from torch_dcl.files import write_text  # noqa: PLC0415

    screen = console()
    with _listening() as told:
        table = run_table2(task.out, columns=task.columns, **_asked(task), **told)
    if table is None:
        return not first_rank()
    save_table2(table, task.out / "table2.json")
    write_text(task.out / "table2.html", as_html2(table))
    against = "the plain network"
    screen.print(long_table(table, weights=screen.width >= 92, against=against, absent=table.absent))
    screen.print(SIGNS, style="dim")
    screen.print()
    why = [told for told in table.deviations if told not in DEVIATIONS]
    bullets(screen, [*why, *said(table)])
    screen.print()
    return True


def run_natural_chart(task: "Natural") -> bool:
    """Run the deciding chart, or go on with it; whether it is complete."""
    from torch_dcl.experiments.figures import chart_figure, save  # noqa: PLC0415
    from torch_dcl.experiments.natural.deciding import run_deciding  # noqa: PLC0415
    from torch_dcl.experiments.natural.points import chart_said, edges_said  # noqa: PLC0415
    from torch_dcl.files import write_text  # noqa: PLC0415

    recipe, screen = task.recipe, console()
    with _listening() as told:
        chart = run_deciding(
            task.out, units=recipe["units"], shares=recipe["shares"], rates=recipe["rates"],
            search_scale=recipe["search_scale"], rounds=recipe["rounds"], **_asked(task), **told,
        )  # fmt: skip
    if chart is None:
        return not first_rank()
    write_text(task.out / "chart.json", json.dumps(chart, indent=1) + "\n")
    save(chart_figure(chart), task.out / "chart.svg")
    _print_chart(chart)
    bullets(screen, [*chart["told"], chart_said(chart), *filter(None, [edges_said(chart)])])
    screen.print(f"Drawn in {task.out}: chart.svg", markup=False, soft_wrap=True)
    return True


def _print_chart(chart: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415
    from rich.markup import escape  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from torch_dcl.experiments.natural import points  # noqa: PLC0415

    screen = console()
    screen.print(chart["title"], style="bold", markup=False, soft_wrap=True)
    wide = screen.width >= 100
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    names = ("unit", "budget", "error % ± std (n)", *(("less DCL's, 95 %",) if wide else ()), "weights", "step ms",
             "rate")  # fmt: skip
    for name in names:
        table.add_column(name, justify="left" if name == "unit" else "right", no_wrap=True)
    for point in points.lowest_first(chart):
        found = points.against_dcl(chart, point)
        told = "" if found is None else escape(f"{found}{found.sign}")
        budget = "–" if point["unit"] == "plain" else f"{point['share']:g}"
        step = f"{point['step_ms']:.{2 if point['step_ms'] < 10 else 0}f}"
        table.add_row(
            point["unit"], budget, points.shown_error(point), *([told] if wide else []), f"{point['weights']:,}", step,
            f"{point['lr']:g}",
        )  # fmt: skip
    screen.print(table)
