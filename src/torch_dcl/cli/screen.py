"""What is shown, and how: one console, bars in a terminal, plain lines elsewhere, errors in one line."""

import functools
import inspect
import json
import os
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from torch_dcl.cli.names import UsageError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.progress import Progress

__all__ = ["Bar", "bullets", "command", "console", "first_rank", "print_json", "say_minutes", "several", "world_size"]

Command = TypeVar("Command", bound=Callable[..., Any])
EVERY = 10.0  # seconds between plain lines


def first_rank() -> bool:
    """Whether this process may speak: with torchrun, the first one alone."""
    return os.environ.get("RANK", "0") == "0"


def several() -> bool:
    """Whether torchrun started several processes."""
    return world_size() > 1


def world_size() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def console(*, stderr: bool = False) -> "Console":
    """The console. Where there is no terminal a line has 120 characters, unless COLUMNS says otherwise."""
    from rich.console import Console  # noqa: PLC0415

    made = Console(stderr=stderr, highlight=False, soft_wrap=False, quiet=not first_rank())
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = 120
    return made


def print_json(value: Any) -> None:
    """Print plain data for machines."""
    if first_rank():
        sys.stdout.write((value if isinstance(value, str) else json.dumps(value, indent=1, ensure_ascii=False)) + "\n")


def bullets(on: "Console", sentences: Iterable[str]) -> None:
    """Print sentences, one below the other."""
    for sentence in sentences:
        lines = textwrap.wrap(sentence, max(20, on.width - 2), break_on_hyphens=False)
        on.print("• " + "\n  ".join(lines), markup=False, soft_wrap=True)


def fail(message: str) -> None:
    """Print an error in red."""
    from rich.text import Text  # noqa: PLC0415

    console(stderr=True).print(Text.assemble(("Error: ", "bold red"), message), soft_wrap=True)


def command(*examples: str) -> Callable[[Command], Command]:
    """Make a function a command: errors in one line, exit codes, ``--debug`` for the traceback, examples in its help.

    1 is an error of the run, 2 wrong usage, 130 an interruption.

    Args:
        *examples: Lines for the help.
    """

    def decorate(function: Command) -> Command:
        @functools.wraps(function)
        def guarded(*args: Any, debug: bool = False, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except ERRORS as error:
                # typer.Exit is a RuntimeError.
                if isinstance(error, typer.Exit | BrokenPipeError):
                    raise
                if debug:
                    traceback.print_exc()
                # The text of a KeyError is a repr.
                told = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
                fail(told or repr(error))
                raise typer.Exit(2 if isinstance(error, UsageError) else 1) from None
            except KeyboardInterrupt:
                console(stderr=True).print("Interrupted.")
                raise typer.Exit(130) from None

        signature = inspect.signature(function, eval_str=True)
        parameters = [*signature.parameters.values(), _DEBUG]
        guarded.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        # A paragraph after \b keeps its lines.
        shown = "\n".join(f"  {example}" for example in examples).replace("[", "\\[")
        guarded.__doc__ = f"{function.__doc__}\n\n\b\n[bold]Examples[/bold]\n{shown}"
        return guarded  # type: ignore[return-value]

    return decorate


ERRORS = (OSError, ValueError, TypeError, LookupError, RuntimeError, ImportError, ArithmeticError)
_DEBUG = inspect.Parameter(
    "debug",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")],
)


def say_minutes(seconds: float) -> str:
    """A time for people: ``12 s``, ``3:05 min``, ``2:10 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"


class Bar:
    """Progress: a bar in a terminal, a plain line now and then elsewhere.

    ::

        with Bar(console, total=9, unit="networks") as bar:
            bar.now("A2")
            bar.advance(3)

    The time left is shown once a few steps are done, since the first ones say little.

    Args:
        on: The console.
        total: Steps.
        unit: What a step is, in the plural.
        above: Something to show above the bar, asked for anew at every change; in a terminal alone.
        every: Seconds between plain lines.
    """

    def __init__(
        self,
        on: "Console",
        total: int,
        unit: str,
        *,
        above: "Callable[[], RenderableType] | None" = None,
        every: float = EVERY,
    ) -> None:
        self.console, self.total, self.unit, self.every = on, total, unit, every
        self.done, self.first, self.text = 0, 0, ""
        self._above = above
        self._start = self._said = time.monotonic()
        self._live: Live | None = None
        self._progress: Progress | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Bar":
        self._start = self._said = time.monotonic()
        if self.console.is_terminal and not self.console.quiet:
            self._go_live()
        elif not self.console.quiet:
            self._thread = threading.Thread(target=self._beat, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._live is not None:
            self._live.stop()
        if self._thread is not None:
            self._thread.join()

    def now(self, text: str) -> None:
        """Say what is being done."""
        self.text = text
        self._show()

    def begin_at(self, done: int, total: int | None = None) -> None:
        """Steps that were done before this began, and do not count for the time left."""
        self.done = self.first = done
        self.total = self.total if total is None else total
        self._show()

    def advance(self, steps: int = 1) -> None:
        """Steps are done."""
        self.done = min(self.total, self.done + steps)
        self._show()

    def note(self, line: str) -> None:
        """Print a line that stays."""
        (self._live.console if self._live else self.console).print(line, markup=False, soft_wrap=True)

    @property
    def left(self) -> float | None:
        """Seconds that are left, None while that is a guess."""
        gone, did = time.monotonic() - self._start, self.done - self.first
        few = did < max(2, 0.05 * (self.total - self.first)) or gone < 3
        return None if few else gone / did * (self.total - self.done)

    def line(self) -> str:
        """The state as a plain line."""
        parts = [f"{self.done:,} of {self.total:,} {self.unit}", say_minutes(time.monotonic() - self._start)]
        if self.left is not None and self.done < self.total:
            parts.append(f"about {say_minutes(self.left)} left")
        if self.text:
            parts.append(self.text)
        return " · ".join(parts)

    def _show(self) -> None:
        if self._live is not None and self._progress is not None:
            left = self.left
            eta = f"about {say_minutes(left)} left" if left is not None and self.done < self.total else ""
            self._progress.update(
                self._progress.task_ids[0], total=self.total, completed=self.done, text=self.text, eta=eta
            )
            self._live.update(self._screen())
        elif time.monotonic() - self._said >= self.every:
            self._say()

    def _say(self) -> None:
        self._said = time.monotonic()
        self.console.print(self.line(), markup=False, soft_wrap=True)

    def _beat(self) -> None:
        """A line when nothing was said for a while, so that a long step does not look like a stop."""
        while not self._stop.wait(min(1.0, self.every)):
            if time.monotonic() - self._said >= self.every:
                self._say()

    def _go_live(self) -> None:
        from rich.live import Live  # noqa: PLC0415
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: PLC0415

        self._progress = Progress(
            SpinnerColumn(style="cyan"),
            BarColumn(28, complete_style="cyan"),
            TextColumn(f"{{task.completed:,.0f}} of {{task.total:,.0f}} {self.unit}"),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[eta]}[/dim]"),
            TextColumn("{task.fields[text]}"),
            console=self.console,
        )
        self._progress.add_task("", total=self.total, completed=self.done, text=self.text, eta="")
        self._live = Live(self._screen(), console=self.console, transient=True, refresh_per_second=8)
        self._live.start()

    def _screen(self) -> "RenderableType":
        from rich.console import Group  # noqa: PLC0415

        if self._progress is None:
            return ""
        return self._progress if self._above is None else Group(self._above(), self._progress)
