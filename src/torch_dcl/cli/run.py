"""``dcl run``: begin a run or go on with it, and say how it ended."""

import dataclasses
import shlex
import time
from pathlib import Path

import typer

from torch_dcl.cli.folders import as_row, say
from torch_dcl.cli.names import UsageError
from torch_dcl.cli.naturals import NATURAL
from torch_dcl.cli.recipes import as_toml
from torch_dcl.cli.screen import console, first_rank, print_json, say_minutes, several
from torch_dcl.cli.tasks import Task, Training

__all__ = ["run_task"]


def run_task(task: Task, *, as_json: bool = False) -> None:
    """Run, print what came out, and say where it is.

    Args:
        task: What to run.
        as_json: Whether to end with the run's state for a machine.
    """
    from torch_dcl.cli.works import WORKS  # noqa: PLC0415
    from torch_dcl.experiments.reading import state_of  # noqa: PLC0415

    if several() and task.recipe.name not in ("table1", *NATURAL):
        raise UsageError("this recipe runs in one process; start it without torchrun")
    screen = console()
    if first_rank() and not (task.out / "recipe.json").exists():
        from torch_dcl.files import write_text  # noqa: PLC0415

        task.out.mkdir(parents=True, exist_ok=True)
        write_text(task.out / "recipe.toml", as_toml(task.recipe))
    elif not first_rank():
        _wait_for(task.out / "recipe.json")
    start = time.perf_counter()
    source = f", written with {task.digits.source}" if isinstance(task, Training) else ""
    screen.print(f"[bold]{task.recipe.name}[/bold] on {task.device}{source}")
    try:
        finished = WORKS[task.recipe.name](task)
    except KeyboardInterrupt:
        _say_stopped(task, "Interrupted.")
        raise typer.Exit(130) from None
    if finished:
        spent = say_minutes(time.perf_counter() - start)
        screen.print(f"{spent}, in [bold]{task.out}[/bold].{_next(task)}", soft_wrap=True)
    else:
        _say_stopped(task, "Time is up.")
    if as_json:
        print_json(as_row(state_of(task.out)))


def _next(task: Task) -> str:
    if task.recipe.name in ("table1", "figures", "knowledge", *NATURAL):
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
    console().print(f"{why} {task.out} is {told}; what is done is saved.\nGo on with:  {task.go_on}", soft_wrap=True)
