"""What each recipe does: called by ``dcl run``, with a bar, and with what came out printed at the end.

Each function gives whether the run is complete; it is not where time was up before.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch_dcl.cli.bar import Bar, Listener
from torch_dcl.cli.names import UsageError
from torch_dcl.cli.recipes import as_toml
from torch_dcl.cli.screen import bullets, console, first_rank, several
from torch_dcl.cli.tasks import Sweep, Task, Training, as_kept, jobs_of

if TYPE_CHECKING:
    from torch_dcl.experiments.calibrate import Fitted
    from torch_dcl.experiments.engine import Settings
    from torch_dcl.experiments.runner import StopRequest, Summary
    from torch_dcl.experiments.search import Choice

__all__ = ["WORKS", "run_sweep"]

FEW = 4
SIGNS = "Bold: the best DCL model. ▾ clearly below the baseline, ▴ above. * fitted to the paper. † diverged."


def run_sweep(task: Sweep, stop: "StopRequest") -> "Summary":
    """Run a recipe with a bar, print its result, and say how it ended."""
    from torch_dcl.experiments.runner import run  # noqa: PLC0415

    screen = console()
    with _bar(stop, by_step=True) as bar:
        summary = run(
            task.running, task.out, resume=task.resume, seconds=task.seconds, should_stop=stop,
            listener=Listener(bar, "making networks"), settings=as_toml(task.recipe),
        )  # fmt: skip
    for part in [] if summary.result is None else task.running.shown(summary.result, screen.width):
        if isinstance(part, str) and part:
            bullets(screen, [part])
        else:
            screen.print(part)
    return summary


@contextmanager
def _bar(stop: "StopRequest", *, by_step: bool = False) -> Iterator[Bar]:
    """A bar over networks, which says so when a signal asks to stop."""
    with Bar(console(), 0, "networks, first rank" if several() else "networks", by_step=by_step) as bar:
        stop.on_signal = bar.now
        with stop:
            yield bar


@contextmanager
def _listening(task: Training, stop: "StopRequest") -> "Iterator[tuple[Settings, dict[str, Any]]]":
    """A bar over the networks of a run: the settings that tell it of every epoch, and what a run is told to call."""
    with _bar(stop) as bar:
        listener = Listener(bar)
        settings = dataclasses.replace(task.settings, on_epoch=listener.on_epoch, should_stop=stop)
        yield settings, {"report": listener.report, "begin": listener.begin}


def _table1(task: Training, stop: "StopRequest") -> bool:
    from torch_dcl.experiments import as_html, as_text, save, verdict  # noqa: PLC0415
    from torch_dcl.experiments.table import as_trial, long_table  # noqa: PLC0415
    from torch_dcl.experiments.table1 import run_table1  # noqa: PLC0415
    from torch_dcl.experiments.trial import departures  # noqa: PLC0415
    from torch_dcl.files import write_text  # noqa: PLC0415
    from torch_dcl.fleet.run_folder import RunFolder  # noqa: PLC0415

    recipe, screen = task.recipe, console()
    with _listening(task, stop) as (settings, told):
        table = run_table1(
            task.out, task.digits, settings, columns=recipe["models"], sets=recipe["sets"], seeds=recipe["seeds"],
            images=task.images, resume=task.resume, seconds=task.seconds, **told,
        )  # fmt: skip
    if table is None:
        return not first_rank()
    why = departures(task.digits.source, settings.schedule, task.images)
    table = as_trial(table, why)
    save(table, task.out / "table1.json")
    write_text(task.out / "table1.html", as_html(table, recipe=RunFolder.inspect(task.out).recipe))
    if len(table.sets) <= FEW:
        screen.print(long_table(table, screen.width))
        screen.print(SIGNS, style="dim")
    else:
        styled = screen.is_terminal and not screen.no_color
        screen.out(as_text(table, width=screen.width, styled=styled), highlight=False)
    screen.print()
    spent = "; ".join(f"{phase} {minutes:.3g}" for phase, minutes in table.minutes.items())
    bullets(screen, [*why, *verdict(table), f"Minutes: {spent}."])
    screen.print()
    return True


def _search(task: Training, stop: "StopRequest") -> bool:
    from torch_dcl.experiments.search_run import run_search  # noqa: PLC0415

    with _listening(task, stop) as (settings, told):
        choice = run_search(
            task.out, as_kept(task), task.digits, settings, jobs_of(task), images=task.images, resume=task.resume,
            seconds=task.seconds, **told,
        )  # fmt: skip
    if choice is None:
        return False
    _print_choice(choice)
    return True


def _print_choice(choice: "Choice") -> None:
    from rich.table import Table  # noqa: PLC0415

    console().print("Chosen learning rates, and bounds on the gradient's norm:")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("model")
    counts = sorted({count for by_count in choice.values() for count in by_count})
    for count in counts:
        table.add_column(f"{count} digits", justify="right")
    for column, by_count in choice.items():
        cells = []
        for count in counts:
            trial = by_count.get(count)
            bound = "" if trial is None or math.isinf(trial.clip) else f", norm {trial.clip:g}"
            cells.append("" if trial is None else f"{trial.lr:g}{bound}")
        table.add_row(column, *cells)
    console().print(table)


def _calibration(task: Training, stop: "StopRequest") -> bool:
    from torch_dcl.experiments.calibration_run import run_calibration  # noqa: PLC0415

    with _listening(task, stop) as (settings, told):
        fitted = run_calibration(
            task.out, as_kept(task), task.digits, settings, images=task.images, resume=task.resume,
            seconds=task.seconds, **told,
        )  # fmt: skip
    if fitted is None:
        return False
    _print_fitted(fitted)
    return True


def _print_fitted(fitted: "list[Fitted]") -> None:
    from rich.table import Table  # noqa: PLC0415

    from torch_dcl.experiments.statistics import mean, signed  # noqa: PLC0415

    console().print("Strengths at which the baseline errs as the paper's does:")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("set", "strength", "error % (n)", "paper %", "off"):
        table.add_column(name, justify="left" if name == "set" else "right")
    for each in fitted:
        errors = each.tried[each.best]
        off = f"{signed(100 * each.off(each.best), 1)} %"
        table.add_row(each.name, f"{each.best:g}", f"{mean(errors):.2f} ({len(errors)})", f"{each.target:.2f}", off)
    console().print(table)


def _figures(task: Training, stop: "StopRequest") -> bool:
    from torch_dcl.experiments.parts import run_parts  # noqa: PLC0415
    from torch_dcl.experiments.reading import read_run  # noqa: PLC0415
    from torch_dcl.experiments.report import further_findings  # noqa: PLC0415

    with _listening(task, stop) as (settings, told):
        written = run_parts(
            task.out, as_kept(task), task.digits, settings, images=task.images, resume=task.resume,
            seconds=task.seconds, **told,
        )  # fmt: skip
    if written is None:
        return False
    _say_written(task, written)
    findings = further_findings(read_run(task.out))
    bullets(console(), [f"{finding.claim} {finding.verdict.capitalize()}: {finding.evidence}" for finding in findings])
    return True


def _knowledge(task: Task, _stop: "StopRequest") -> bool:
    from torch_dcl.cli.plans import find_model  # noqa: PLC0415
    from torch_dcl.convert.checkpoint import load_model  # noqa: PLC0415
    from torch_dcl.data import load  # noqa: PLC0415
    from torch_dcl.experiments.looking import look_at  # noqa: PLC0415
    from torch_dcl.files import sha256_file  # noqa: PLC0415

    recipe, screen = task.recipe, console()
    network, _ = find_model(recipe["network"])
    try:
        network = load_model(network, recipe["weights"]).to(task.device)
        data = load(recipe["data"], **({"size": recipe["size"]} if recipe["size"] else {}))
    except (FileNotFoundError, ValueError) as error:
        raise UsageError(str(error)) from error
    kept = {**as_kept(task), "data": data.source, "sha256": sha256_file(recipe["weights"])}
    screen.print(f"Shown: {data}", markup=False, soft_wrap=True)
    try:
        written = look_at(
            task.out, kept, network, data, layers=recipe["layers"], filters=recipe["filters"], images=recipe["images"],
            mean=recipe["mean"], std=recipe["std"], resume=task.resume,
            on_layer=lambda name: screen.print(f"layer {name}", style="dim", markup=False),
        )  # fmt: skip
    except (KeyError, IndexError) as error:
        raise UsageError(str(error.args[0])) from error
    _say_written(task, written)
    return True


def _say_written(task: Task, names: list[str]) -> None:
    if names:
        console().print(f"Drawn in {task.out}: {', '.join(names)}", markup=False, soft_wrap=True)
    else:
        console().print("Everything was there already.")


WORKS: dict[str, Callable[[Any, Any], bool]] = {
    "table1": _table1,
    "table1-search": _search,
    "calibration": _calibration,
    "figures": _figures,
    "knowledge": _knowledge,
}
