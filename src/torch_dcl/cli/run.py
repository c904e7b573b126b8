"""``dcl run``: begin or resume a run, and say how it ended."""

import dataclasses
import math
import shlex
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from torch_dcl.cli.folders import as_row, say
from torch_dcl.cli.names import UsageError
from torch_dcl.cli.recipes import RUN, as_toml
from torch_dcl.cli.screen import console, first_rank, print_json, say_minutes, several
from torch_dcl.cli.tasks import Sweep, Task, Training

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_dcl.experiments.runner import Failure

__all__ = ["RESUME_ME", "run_task"]

RESUME_ME = 75
"""The exit code of a run that was stopped by SIGTERM and saved: EX_TEMPFAIL, try again."""


def run_task(task: Task, *, as_json: bool = False) -> None:
    """Run, print what came out, and say where it is.

    Args:
        task: What to run.
        as_json: Whether to end with the run's state for a machine.
    """
    from rich.markup import escape  # noqa: PLC0415

    from torch_dcl.cli.works import WORKS, run_sweep  # noqa: PLC0415
    from torch_dcl.experiments.reading import state_of  # noqa: PLC0415
    from torch_dcl.experiments.runner import StopRequest  # noqa: PLC0415

    if several() and task.recipe.name not in ("table1", *RUN):
        raise UsageError("this recipe runs in one process; start it without torchrun")
    screen = console()
    if isinstance(task, Sweep):
        pass  # the runner writes the recipe, once it holds the folder's lock
    elif first_rank() and not (task.out / "recipe.json").exists():
        _write_recipe(task)
    elif not first_rank():
        _wait_for(task.out / "recipe.json")
    start = time.perf_counter()
    source = f", written with {task.digits.source}" if isinstance(task, Training) else ""
    screen.print(f"[bold]{task.recipe.name}[/bold] on {task.device}{escape(source)}")
    stop = StopRequest()
    failures: tuple[Failure, ...] = ()
    try:
        if isinstance(task, Sweep):
            summary = run_sweep(task, stop)
            finished, failures = summary.complete, summary.failures
        else:
            finished = WORKS[task.recipe.name](task, stop)
    except KeyboardInterrupt:
        _say_stopped(task, "Interrupted.")
        raise typer.Exit(130) from None
    code = 0
    if finished:
        spent = say_minutes(time.perf_counter() - start)
        screen.print(f"{spent}, in [bold]{escape(str(task.out))}[/bold].{escape(_next(task))}", soft_wrap=True)
    else:
        code, why = _ending(stop.signal, failures, is_limited=math.isfinite(task.seconds))
        _say_stopped(task, why)
    if as_json:
        print_json(as_row(state_of(task.out)))
    if code:
        raise typer.Exit(code)


def _write_recipe(task: Task) -> None:
    """Write the recipe under the folder's lock, so that the loser of two starts writes nothing."""
    from torch_dcl.files import write_text  # noqa: PLC0415
    from torch_dcl.fleet.run_folder import lock_folder  # noqa: PLC0415

    with lock_folder(task.out):
        if not (task.out / "recipe.json").exists():
            write_text(task.out / "recipe.toml", as_toml(task.recipe))


def _ending(stopped_by: signal.Signals | None, failures: "Sequence[Failure]", *, is_limited: bool) -> tuple[int, str]:
    """The exit code of a run that is not complete, and why it is not."""
    if stopped_by is not None:
        return RESUME_ME if stopped_by == signal.SIGTERM else 130, f"Stopped by {stopped_by.name}."
    if not failures:
        return (0, "Time is up.") if is_limited else (1, "Jobs of another process failed; failures-*.jsonl names them.")
    told = []
    for jobs, error in failures:
        names = ", ".join(dict.fromkeys(f"{job.network} on {job.data}" for job in jobs))
        told.append(f"{names} ({len(jobs)} job{'s' if len(jobs) > 1 else ''}) failed: {error}.")
    return 1, "\n".join(told)


def _next(task: Task) -> str:
    if task.recipe.name in ("table1", "figures", "knowledge", *RUN):
        return f" A page of it: dcl report {shlex.quote(str(task.out))}"
    return ""


def _wait_for(path: Path, seconds: float = 120) -> None:
    """Let the first rank make the folder."""
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)


def _say_stopped(task: Task, why: str) -> None:
    from torch_dcl.experiments.reading import state_of  # noqa: PLC0415

    state = state_of(task.out)
    # This process may still be the holder of the lock.
    told = say(dataclasses.replace(state, state="incomplete") if state.state == "running" else state)
    words = f"{why} {task.out} is {told}; what is done is saved.\nResume with:  {task.go_on}"
    console().print(words, markup=False, soft_wrap=True)
