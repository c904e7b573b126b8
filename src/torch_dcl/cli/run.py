"""``dcl run`` and ``dcl demo``: start or resume a run, print its result, and return its exit code."""

import dataclasses
import io
import math
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from torch_dcl.cli.config import Task, make_task
from torch_dcl.cli.console import bullets, console, print_json, say_state, several, table_of
from torch_dcl.experiments import protocol
from torch_dcl.progress import Bar, first_rank, say_about, say_minutes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_dcl.experiments.runner import Failure, Summary

RESUME_ME = 75
"""The exit code of a run that was stopped by SIGTERM and saved: EX_TEMPFAIL, try again."""


def run_task(task: Task, *, as_json: bool = False, log: str | None = None) -> None:
    """Run, print the result, and say where it is; with ``as_json`` end with the run's state.

    ``log`` names a tracker that receives what the run records.
    """
    from rich.text import Text

    from torch_dcl.experiments.ranks import StopRequest
    from torch_dcl.experiments.run_reader import as_argument, state_of
    from torch_dcl.files import DISK_IS_FULL

    screen, start, stop = console(), time.perf_counter(), StopRequest()
    screen.print(Text.assemble((task.asked.name, "bold"), f" on {task.recipe.device}"))
    try:
        summary = _train(task, stop, log)
    except KeyboardInterrupt:
        _say_stopped(task, "Interrupted.")
        raise typer.Exit(130) from None
    except OSError as error:
        if error.errno not in DISK_IS_FULL:
            raise
        raise OSError(
            f"{task.out} cannot be written: {os.strerror(error.errno)}; free space, then resume: {task.resume_command}"
        ) from error
    code = 0
    if summary.complete:
        spent = say_minutes(time.perf_counter() - start)
        page = f". A page of it: dcl report {as_argument(task.out)}"
        screen.print(Text.assemble(f"{spent}, in ", (str(task.out), "bold"), page), soft_wrap=True)
    else:
        code, why = _ending(stop.signal, summary.failures, is_limited=math.isfinite(task.seconds))
        _say_stopped(task, why)
    if as_json:
        print_json(dataclasses.asdict(state_of(task.out)))
    if code:
        raise typer.Exit(code)


def _train(task: Task, stop: Any, log: str | None = None) -> "Summary":
    """Run with a bar, and print and draw the result."""
    from torch_dcl.experiments.runner import run
    from torch_dcl.files import write_text
    from torch_dcl.report import draw_run
    from torch_dcl.report.trackers import open_tracker

    screen = console()
    with Bar(screen, 0, "networks, first rank" if several() else "networks", by_step=True) as bar:
        stop.on_signal = bar.now
        bar.now("reading data")
        on_bar = Listener(bar)
        tracker = open_tracker(log, task.out, on_bar) if log and first_rank() else None
        with stop:
            summary = run(
                task.recipe, task.out, resume=task.resume, join=task.join, seconds=task.seconds, should_stop=stop,
                listener=tracker or on_bar, files=task.files(),
            )  # fmt: skip
    if tracker is not None:
        tracker.update()
    if summary.result is not None:
        _print(screen, task.recipe.shown(summary.result, screen.width))
        write_text(task.out / "result.txt", _as_text(task.recipe.shown(summary.result, 100)))
        drawn = draw_run(task.out)
        if drawn:
            screen.print(f"Drawn in {task.out}: {', '.join(drawn)}", markup=False, soft_wrap=True)
    return summary


def _print(screen: Any, shown: "Sequence[Any]") -> None:
    for part in shown:
        if isinstance(part, str):
            bullets(screen, [part])
        else:
            screen.print(part)


def _as_text(shown: "Sequence[Any]") -> str:
    """The terminal's view of a result as plain text, for pages of recipes without a template."""
    from rich.console import Console

    text = io.StringIO()  # in plain text also where FORCE_COLOR asks a terminal for more
    _print(Console(width=100, file=text, highlight=False, force_terminal=False, color_system=None), shown)
    return text.getvalue()


def _ending(stopped_by: signal.Signals | None, failures: "Sequence[Failure]", *, is_limited: bool) -> tuple[int, str]:
    """The exit code of an incomplete run, and the reason."""
    if stopped_by is not None:
        return RESUME_ME if stopped_by == signal.SIGTERM else 130, f"Stopped by {stopped_by.name}."
    if not failures:
        return (0, "Time is up.") if is_limited else (1, "Jobs of another process failed; failures-*.jsonl names them.")
    sentences = []
    for jobs, error in failures:
        names = ", ".join(dict.fromkeys(f"{job.network} on {job.data}" for job in jobs))
        sentences.append(f"{names} ({len(jobs)} job{'s' if len(jobs) > 1 else ''}) failed: {error}.")
    return 1, "\n".join(sentences)


def _say_stopped(task: Task, why: str) -> None:
    from torch_dcl.experiments.run_reader import state_of

    state = state_of(task.out)
    # This process may still be the holder of the lock.
    stands = say_state(dataclasses.replace(state, state="incomplete") if state.state == "running" else state)
    words = f"{why} {task.out} is {stands}; what is done is saved.\nResume with:  {task.resume_command}"
    console().print(words, markup=False, soft_wrap=True)


def dry_run(task: Task, *, as_json: bool = False) -> None:
    """Print an estimate of the run."""
    words, plain = task.recipe.estimate(say_about)
    if as_json:
        print_json({"recipe": task.asked.name, **plain, "device": task.recipe.device, "folder": str(task.out)})
        return
    from rich.text import Text

    table = table_of("", "")
    for topic, text in {**words, "folder": str(task.out)}.items():
        table.add_row(Text(topic, style="dim"), Text(text))
    console().print(table)
    console().print("Nothing was run or written.", style="dim")


def run_demo(out: Path | None, settings: dict[str, Any], *, as_json: bool = False) -> None:
    """Train three networks, print a verdict, and write a page; without a folder, to one that is not there yet."""
    from rich.text import Text

    from torch_dcl.cli.console import make_folder

    task = make_task("demo", settings, out=out)
    make_folder(task.out)
    screen, threads = console(), _use_free_cores()
    screen.print(
        "[bold]Two-digit numbers, three networks.[/bold] The digits are inside the package; the networks of "
        f"each kind are trained together, as one fleet, on {threads} CPU thread{'s' if threads > 1 else ''}."
    )
    run_task(task)
    page = (task.out / "report.html").resolve()
    screen.print(Text.assemble("The report, for a browser: ", (str(page), "bold")), soft_wrap=True)
    screen.print("Next:  dcl plan torchvision:vgg16 · dcl run table1 --smoke · dcl --help", style="dim")
    if as_json:
        from torch_dcl.experiments.run_reader import read_run

        result = read_run(task.out).parts["demo"]
        print_json({"page": str(page), **{key: result[key] for key in ("set", "networks", "verdict")}})


def _use_free_cores() -> int:
    """Take no more threads than there are idle cores, and say how many.

    Threads of torch wait for each other at every step. Where another process holds a core, two threads on two cores are
    many times slower than one.
    """
    import torch

    busy = round(os.getloadavg()[0])
    threads = max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) - busy))
    torch.set_num_threads(threads)
    return threads


class Listener(protocol.Listener):
    """Moves a bar over networks with the progress of a run.

    A fleet of 75 networks after a third of its epochs counts as 25 of them.
    """

    def __init__(self, bar: Bar) -> None:
        self.bar = bar
        self._before = 0.0
        self._size = 0

    def begin(self, before: int, total: int) -> None:
        """Start the bar at the networks that are done."""
        self.bar.begin_at(before, total)
        self._before, self._size = float(before), 0
        self.bar.now("building networks")

    def on_epoch(self, at: protocol.Progress) -> None:
        """Move the bar by the epochs of a fleet."""
        if at.epoch == 0 and at.loss is None:
            self._before, self._size = self._before + self._size, at.networks
            fleet = f"fleet {at.fleet} of {at.fleets}, " if at.fleets > 1 else ""
            self.bar.now(f"{fleet}{at.name}, {at.networks} network{'s' if at.networks > 1 else ''}")
        self.bar.inside(at.epoch, at.epochs, "epochs")
        self.bar.reach(self._before + at.networks * (at.epoch + at.part) / at.epochs)

    def report(self, line: str) -> None:
        """Print a permanent line."""
        self.bar.note(line)
