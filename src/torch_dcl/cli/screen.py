"""What is shown, and how: one console, errors in one line, exit codes."""

import codecs
import functools
import inspect
import json
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from torch_dcl.cli.names import UsageError
from torch_dcl.progress import first_rank, say_minutes

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "bullets",
    "command",
    "console",
    "first_rank",
    "for_machines",
    "print_json",
    "say_minutes",
    "several",
    "world_size",
]

Command = TypeVar("Command", bound=Callable[..., Any])
_aside = False


def several() -> bool:
    """Whether torchrun started several processes."""
    return world_size() > 1


def world_size() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def for_machines(asked: bool) -> None:
    """With ``--json`` what is for people goes to stderr, so that stdout is JSON and nothing else.

    Args:
        asked: Whether it was asked for.
    """
    global _aside  # noqa: PLW0603 - one process, one command
    _aside = asked


def console(*, stderr: bool = False) -> "Console":
    """The console. Where there is no terminal a line has 120 characters, unless COLUMNS says otherwise."""
    stderr = stderr or _aside
    from rich.console import Console  # noqa: PLC0415

    _tolerate(sys.stderr if stderr else sys.stdout)
    made = Console(stderr=stderr, highlight=False, soft_wrap=False, quiet=not first_rank())
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = 120
    return made


def _tolerate(stream: Any) -> None:
    """Let a terminal that cannot show ± or ▾ show a question mark: a finished run is no error."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    if codecs.lookup(encoding).name != "utf-8" and hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")


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
            for_machines(False)
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
