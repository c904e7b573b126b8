"""Output and input of the command: one console, errors in one line, exit codes, names, files, devices."""

import codecs
import difflib
import functools
import inspect
import json
import os
import re
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from torch_dcl.progress import PLAIN, first_rank

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from torch_dcl.experiments.run_reader import State

Command = TypeVar("Command", bound=Callable[..., Any])
_aside = False


def several() -> bool:
    """Whether torchrun started several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def was_restarted(out: Path) -> bool:
    """Whether torchrun or Slurm started this process again, with the same command, after it began a run in a folder.

    A machine on which no rank failed counts no restart of its ranks, so the id of torchrun's job is compared as well.
    """
    from torch_dcl.fleet.run_folder import RunFolder

    if not (out / "recipe.json").exists():
        return False
    if any(int(os.environ.get(name) or 0) for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")):
        return True
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")  # none: torchrun had no --rdzv-id
    return job != "none" and any(start.get("torchrun") == job for start in RunFolder.inspect(out).read("environment"))


def for_machines(asked: bool) -> None:
    """With ``--json`` messages go to stderr, so that stdout is JSON and nothing else."""
    global _aside
    _aside = asked


def console(*, stderr: bool = False) -> "Console":
    """The console. Where there is no terminal a line has 120 characters, unless COLUMNS says otherwise."""
    stderr = stderr or _aside
    from rich.console import Console

    _tolerate(sys.stderr if stderr else sys.stdout)
    screen = Console(stderr=stderr, highlight=False, soft_wrap=False, quiet=not first_rank())
    if not screen.is_terminal and "COLUMNS" not in os.environ:
        screen.width = 120
    return screen


def _tolerate(stream: Any) -> None:
    """Print a similar character if a terminal cannot show − or ▾, instead of failing."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    if codecs.lookup(encoding).name != "utf-8" and hasattr(stream, "reconfigure"):
        stream.reconfigure(errors=PLAIN)


def print_json(value: Any) -> None:
    """Print plain data for machines."""
    if first_rank():
        ascii_only = codecs.lookup(sys.stdout.encoding or "utf-8").name != "utf-8"
        text = value if isinstance(value, str) else json.dumps(value, indent=1, ensure_ascii=ascii_only)
        print_text(text + "\n")


def print_text(text: str) -> None:
    """Print text without markup, with similar characters for those that the terminal cannot show."""
    _tolerate(sys.stdout)
    sys.stdout.write(text)


def bullets(on: "Console", sentences: Iterable[str]) -> None:
    """Print sentences, one below the other."""
    for sentence in sentences:
        lines = textwrap.wrap(sentence, max(20, on.width - 2), break_on_hyphens=False)
        on.print("• " + "\n  ".join(lines), markup=False, soft_wrap=True)


def table_of(*heads: str, fixed: Sequence[str] = ()) -> "Table":
    """An empty table without lines; fixed columns are not wrapped, and empty heads are not shown."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", show_header=any(heads))
    for head in heads:
        table.add_column(head, no_wrap=head in fixed, overflow="fold")
    return table


def fail(message: str, *, is_usage: bool = True) -> None:
    """Print an error in red.

    Ranks have errors of usage in common, and one rank on each machine prints them, since a machine may differ. An error
    of the run is the rank's own.
    """
    from rich.text import Text

    if not first_rank() and (not is_usage or os.environ.get("LOCAL_RANK") == "0"):
        who = f"rank {os.environ['RANK']} of {os.environ.get('WORLD_SIZE')}"
        sys.stderr.write(f"{message}\n" if message.startswith(who) else f"{who}: {message}\n")
    console(stderr=True).print(Text.assemble(("Error: ", "bold red"), message), soft_wrap=True)


def command(*examples: str) -> Callable[[Command], Command]:
    """Turn a function into a command: errors in one line, exit codes, ``--debug``, and examples in its help.

    1 is an error of the run, 2 wrong usage, 130 an interruption.
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
                message, is_usage = _explained(error)
                fail(message or repr(error), is_usage=is_usage)
                raise typer.Exit(2 if is_usage else 1) from None
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


def _explained(error: Exception) -> tuple[str, bool]:
    """The message of an error, and whether it is a usage error."""
    if hasattr(error, "otherwise"):
        return explain_setting(error), True
    # The text of a KeyError is a repr.
    message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return message, getattr(error, "is_usage", False)


def explain_setting(error: Any) -> str:
    """The message of a `SettingError`, with the nearest known name."""
    if not error.known:
        return str(error)
    near = nearest(error.given, error.known)
    remedy = error.otherwise if error.otherwise and not near.startswith("did you mean") else near
    return f"{error.message}; {remedy}"


ERRORS = (OSError, ValueError, TypeError, LookupError, RuntimeError, ImportError, ArithmeticError)
_DEBUG = inspect.Parameter(
    "debug",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")],
)


def say_state(state: "State") -> str:
    """Describe the state of a run."""
    if state.state == "damaged":
        return f"damaged: {state.problem}"
    unit = state.unit if state.total != 1 else {"entries": "entry"}.get(state.unit, state.unit.removesuffix("s"))
    count = f"{state.done:,} of {state.total:,} {unit}"
    if state.state == "running":
        return f"running (pid {state.pid}), {count}" + (f"; last seen at {state.now}" if state.now else "")
    return f"finished, {state.total:,} {unit}" if state.state == "finished" else f"incomplete, {count}"


# Names


class UsageError(ValueError):
    """An invalid argument; the message says what to type instead. Exit code 2."""

    is_usage = True


def in_options(message: str, options: Iterable[str]) -> str:
    """Replace Python's arguments in a message of the library by options: ``force=True`` by ``--force``."""
    for option in options:
        name = option.replace("-", "_")
        message = re.sub(rf"\b{name}(=True\b|=(?!\w))", f"--{option}", message)
        message = re.sub(rf"\b{name}( = |=)", f"--{option} ", message)
        # A name of one word may be a plain word as well, except where a sentence begins with it.
        before = "()" if "_" in name else "(^|; |leave )"
        message = re.sub(rf"{before}\b{name}\b", rf"\g<1>--{option}", message)
    return message


def nearest(name: str, known: Iterable[str]) -> str:
    """Offer the nearest name for an unknown one, or all names where none is near."""
    known = list(known)
    low = {entry.lower(): entry for entry in known}
    near = difflib.get_close_matches(name.lower(), low, 1, 0.55)
    if near:
        return f"did you mean {low[near[0]]}?"
    listed = ", ".join(known[:20]) + (", …" if len(known) > 20 else "")
    return f"there {'is only' if len(known) == 1 else 'are'} {listed or 'none'}"


def split(text: str | Sequence[str]) -> list[str]:
    """Parts between commas, in one text or in several."""
    texts = [text] if isinstance(text, str) else text
    return [part.strip() for entry in texts for part in str(entry).split(",") if part.strip()]


# Files and devices


def check_output(path: Path) -> None:
    """Raise an error if a file cannot be written, before its content is computed."""
    if not path.parent.is_dir():
        raise UsageError(f"{path} cannot be written: the folder {path.parent} does not exist")
    if path.is_dir():
        raise UsageError(f"{path} cannot be written: it is a folder; name a file inside it")
    try:
        _try_to_write(path.parent)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; choose another folder") from None


def check_folder(path: Path, option: str = "--out") -> None:
    """Raise an error if a folder cannot be made or written to, or there is a file in its place or above it."""
    there = [place for place in (path, *path.parents) if place.exists()]
    if not all(place.is_dir() for place in there):
        raise UsageError(f"{path} cannot be a folder: a file is in the way; choose another {option}")
    try:
        _try_to_write(there[0])
    except OSError as error:
        what = "written to" if there[0] == path else "made"
        raise UsageError(f"{path} cannot be {what}: {error.strerror}; choose another {option}") from None


def _try_to_write(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder):
        pass


def expand_home(text: str) -> str:
    """A text that begins with the home folder, such as ``~/data``, with its path; another as it is, ``./data`` too."""
    return os.path.expanduser(text)  # noqa: PTH111, a Path would drop the "./"


def make_folder(path: Path) -> None:
    """Make a folder to write to, with those above it."""
    check_folder(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be made: {error.strerror}; choose another --out") from None


def read_device(given: str) -> str:
    """Resolve a device; "auto" is the GPU where there is one."""
    import torch

    if given == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(given).type
        torch.empty(1, device=given)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).splitlines()[0]
        raise UsageError(f"the device {given!r} cannot be used ({first}); use --device cpu") from None
    return given if kind != "meta" else "cpu"


# Help


class _PlainFlags:
    """A command whose flags show without a type: ``--json``, where Typer writes ``--json <bool>``."""

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters, with an empty type for flags."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""
        return params


class PlainCommand(_PlainFlags, TyperCommand):
    """A command with plain flags, and no empty arguments: a variable that is not set is not the current folder."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, none of which may be empty."""
        valued = {name for param in self.get_params(ctx) if not getattr(param, "is_flag", False) for name in param.opts}
        for before, given in () if ctx.resilient_parsing else zip(["", *args], args, strict=False):
            option, equals, value = given.partition("=") if given.startswith("--") else (before, "=", given)
            if equals and not value.strip():
                what = option if option in valued else "an argument"
                fail(f"{what} is empty; give a value, or leave it out (is a variable of the shell not set?)")
                raise typer.Exit(2)
        parsed: list[str] = super().parse_args(ctx, [_home(given) for given in args])
        return parsed


def _home(given: str) -> str:
    """An argument such as ``--out=~/runs`` with the home folder in it, which shells leave as it is behind a "="."""
    option, equals, value = given.partition("=")
    return f"{option}={expand_home(value)}" if option.startswith("--") and equals else given


class PlainGroup(_PlainFlags, TyperGroup):
    """A group of commands with plain flags."""


HELP = {"help_option_names": ["-h", "--help"]}
SETTINGS: dict[str, Any] = {"cls": PlainCommand, "context_settings": HELP}
"""For every command."""
