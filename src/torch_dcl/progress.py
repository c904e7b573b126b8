"""Progress: a bar in a terminal, periodic plain lines elsewhere."""

import codecs
import os
import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.progress import Progress as RichProgress

__all__ = ["Bar", "error_console", "first_rank", "say_about", "say_minutes"]

EVERY = 5.0  # seconds between plain lines
PLAIN = "torch_dcl.plain"
"""An error handler for `str.encode` that replaces unsupported characters by similar ones, so that no minus is lost."""
_SIMILAR = dict(zip("−–·•×→…’▾▴†", "---*x>.'v^+", strict=True))


def _similar(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_SIMILAR.get(sign, "?") for sign in error.object[error.start : error.end]), error.end


codecs.register_error(PLAIN, _similar)


def first_rank() -> bool:
    """Whether this process prints: with torchrun, only the first rank."""
    return os.environ.get("RANK", "0") == "0"


def say_minutes(seconds: float) -> str:
    """Format a duration: ``12 s``, ``3:05 min``, ``2:10 h``, ``3.5 days``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    if whole < 48 * 3600:
        return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
    return f"{seconds / 86400:.1f} days"


def say_about(seconds: float) -> str:
    """Format an estimate, to two digits: ``less than a second``, ``about 12 s``, ``about 7.6 min``, ``about 2.5 h``."""
    if seconds < 1:
        return "less than a second"
    limits = ((100, 1, "s"), (600 * 60, 60, "min"), (48 * 3600, 3600, "h"), (float("inf"), 86400, "days"))
    size, unit = next((size, unit) for most, size, unit in limits if seconds < most)
    return f"about {float(f'{seconds / size:.2g}'):,g} {unit}"


class _Lines:
    """A console without a terminal, and without rich."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet

    def print(self, line: str, **_: bool) -> None:
        """Print a line on stderr, with similar characters for those that its encoding does not support."""
        if not self.quiet:
            encoding = sys.stderr.encoding or "utf-8"
            print(line.encode(encoding, PLAIN).decode(encoding), file=sys.stderr, flush=True)


def error_console(*, quiet: bool = False) -> "Console | _Lines":
    """A console on stderr, quiet in all ranks but the first. Rich is imported only for a terminal."""
    quiet = quiet or sys.stderr is None or not first_rank()
    if quiet or not sys.stderr.isatty():
        return _Lines(quiet=quiet)
    from rich.console import Console

    return Console(stderr=True, highlight=False)


class Bar:
    """Progress of a long task, and of its current step.

    ::

        with Bar(console, total=9, unit="networks") as bar:
            bar.now("A2, 3 networks")
            bar.inside(1, 24, "epochs")
            bar.advance(3)

    The remaining time is shown after a few steps, since the first ones are not representative.

    Args:
        on: The console.
        total: The number of steps; 0 while it is unknown.
        unit: The name of a step, in the plural.
        every: Seconds between plain lines.
        by_step: Whether to show the remaining time of the current step only, if steps differ too much.
        expected: An estimate of the seconds of all steps; `expect` corrects it.
    """

    def __init__(
        self,
        on: "Console | _Lines",
        total: int,
        unit: str,
        *,
        every: float = EVERY,
        by_step: bool = False,
        expected: float | None = None,
    ) -> None:
        self.console, self.total, self.unit, self.every = on, total, unit, every
        self.done, self.first, self.text = 0.0, 0.0, ""
        self.step: tuple[int, int, str] | None = None
        self.by_step, self.expected = by_step, expected
        self._begun: tuple[float, int] | None = None
        self._start = self._said = time.monotonic()
        self._live: Live | None = None
        self._outer: RichProgress | None = None
        self._inner: RichProgress | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Bar":
        self._start = self._said = time.monotonic()
        if self.console.quiet:
            return self
        if not isinstance(self.console, _Lines) and self.console.is_terminal:
            self._go_live(self.console)
        else:
            if self.expected is not None:
                self._say()
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
        """Show a description of the current step."""
        self.text, self.step, self._begun = text, None, None
        self._show()

    def inside(self, done: int, total: int, unit: str) -> None:
        """Show the progress of the current step: parts done, their number, and the name of a part in the plural."""
        self.step = (done, total, unit)
        # Parts done before this call have no time, and a first part takes longer than others.
        if self._begun is None and done:
            self._begun = (time.monotonic(), done)
        self._show()

    def begin_at(self, done: int, total: int | None = None) -> None:
        """Set the number of steps done before the start, which do not count for the remaining time."""
        self.done = self.first = float(done)
        self.total = self.total if total is None else total
        self._start = time.monotonic()
        self._show()

    def advance(self, steps: int = 1) -> None:
        """Add completed steps."""
        self.reach(self.done + steps)

    def reach(self, done: float) -> None:
        """Set the number of completed steps, possibly fractional."""
        self.done = min(float(self.total), done)
        self._show()

    def expect(self, share: float) -> None:
        """Correct the expected time from the fraction of the work that is done, once it is at least a fifth."""
        if share >= 0.2:
            self.expected = (time.monotonic() - self._start) / share
        self._show()

    def note(self, line: str) -> None:
        """Print a permanent line."""
        (self._live.console if self._live else self.console).print(line, markup=False, soft_wrap=True)

    @property
    def left(self) -> float | None:
        """The remaining seconds; None while an estimate would be unreliable."""
        if self.by_step:
            return self._left_of_step()
        elapsed, completed = time.monotonic() - self._start, self.done - self.first
        if self.expected is not None:
            return max(0.0, self.expected - elapsed)
        few = completed < max(2, 0.05 * (self.total - self.first)) or elapsed < 3
        return None if few else elapsed / completed * (self.total - self.done)

    def _left_of_step(self) -> float | None:
        if self._begun is None or self.step is None:
            return None
        since, first = self._begun
        elapsed, completed = time.monotonic() - since, self.step[0] - first
        return None if not completed or elapsed < 3 else elapsed / completed * (self.step[1] - self.step[0])

    def line(self) -> str:
        """The state as a plain line."""
        shown = (self._count(), say_minutes(time.monotonic() - self._start), self._eta(), self.text)
        parts = [part for part in shown if part]
        if self.step is not None:
            done, total, unit = self.step
            parts.append(f"{done} of {total} {unit}")
        return " · ".join(parts)

    def _count(self) -> str:
        return f"{int(self.done):,} of {self.total:,} {self.unit}" if self.total else ""

    def _eta(self) -> str:
        left = self.left
        of = " for this fleet" if self.by_step else ""
        return f"about {say_minutes(left)} left{of}" if left is not None and self.done < self.total else ""

    def _show(self) -> None:
        """Update the display. A terminal redraws it a few times a second in another thread."""
        if self._live is not None and self._outer is not None and self._inner is not None:
            first, second = self._outer.task_ids[0], self._inner.task_ids[0]
            self._outer.update(first, total=self.total, completed=self.done, count=self._count(), eta=self._eta())
            done, total, unit = self.step or (0, None, "")  # without a total it only shows activity
            words = f"{done} of {total} {unit} · {self.text}" if self.step else self.text
            self._inner.update(second, total=total, completed=done, text=words)
        elif time.monotonic() - self._said >= self.every:
            self._say()

    def _say(self) -> None:
        self._said = time.monotonic()
        self.console.print(self.line(), markup=False, soft_wrap=True)

    def _beat(self) -> None:
        """Print a line periodically, so that a long step does not look stuck."""
        while not self._stop.wait(min(1.0, self.every)):
            if time.monotonic() - self._said >= self.every:
                self._say()

    def _go_live(self, console: "Console") -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._outer = Progress(
            SpinnerColumn(style="cyan"),
            BarColumn(24, complete_style="cyan", finished_style="cyan"),
            TextColumn("{task.fields[count]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[eta]}", style="dim", markup=False),
            console=console,
        )
        self._inner = Progress(
            TextColumn(" "),
            BarColumn(24, style="grey23", complete_style="grey58", finished_style="grey58"),
            TextColumn("{task.fields[text]}", style="dim", markup=False),
            console=console,
        )
        self._outer.add_task("", total=self.total, completed=int(self.done), count=self._count(), eta="")
        self._inner.add_task("", total=None, completed=0, text=self.text)
        both = Group(self._outer, self._inner)
        self._live = Live(both, console=console, transient=True, refresh_per_second=8)
        self._live.start()
