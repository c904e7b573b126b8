"""Progress: a bar in a terminal, a plain line now and then elsewhere."""

import re
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from torch_dcl.cli.console import say_minutes

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.progress import Progress as RichProgress

    from torch_dcl.experiments.protocol import Progress

__all__ = ["Bar", "Listener"]

EVERY = 5.0  # seconds between plain lines
FLEET = re.compile(r"^fleet \d+ of \d+, ")


class Bar:
    """Progress of a long task, and inside of it of the step that is being done.

    ::

        with Bar(console, total=9, unit="networks") as bar:
            bar.now("A2, 3 networks")
            bar.inside(1, 24, "epochs")
            bar.advance(3)

    The time left is shown once a few steps are done, since the first ones say little.

    Args:
        on: The console.
        total: Steps.
        unit: What a step is, in the plural.
        above: Something to show above the bar, asked for anew at every change; in a terminal alone.
        every: Seconds between plain lines.
        by_step: Whether the time left is that of the step that is being done, where steps differ too much to say more.
    """

    def __init__(
        self,
        on: "Console",
        total: int,
        unit: str,
        *,
        above: "Callable[[], RenderableType] | None" = None,
        every: float = EVERY,
        by_step: bool = False,
    ) -> None:
        self.console, self.total, self.unit, self.every = on, total, unit, every
        self.done, self.first, self.text = 0.0, 0.0, ""
        self.step: tuple[int, int, str] | None = None
        self.by_step = by_step
        self._begun: tuple[float, int] | None = None
        self._above = above
        self._start = self._said = time.monotonic()
        self._live: Live | None = None
        self._outer: RichProgress | None = None
        self._inner: RichProgress | None = None
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
        self.text, self.step, self._begun = text, None, None
        self._show()

    def inside(self, done: int, total: int, unit: str) -> None:
        """How far the step is that is being done.

        Args:
            done: Parts of it that are done.
            total: Its parts.
            unit: What a part is, in the plural.
        """
        self.step = (done, total, unit)
        # What was done before this call says nothing of the time, and a first part takes longer than others.
        if self._begun is None and done:
            self._begun = (time.monotonic(), done)
        self._show()

    def begin_at(self, done: int, total: int | None = None) -> None:
        """Steps that were done before this began, and do not count for the time left."""
        self.done = self.first = float(done)
        self.total = self.total if total is None else total
        self._start = time.monotonic()
        self._show()

    def advance(self, steps: int = 1) -> None:
        """Steps are done."""
        self.reach(self.done + steps)

    def reach(self, done: float) -> None:
        """So many steps are done in all; a part of one counts as a part."""
        self.done = min(float(self.total), done)
        self._show()

    def note(self, line: str) -> None:
        """Print a line that stays."""
        (self._live.console if self._live else self.console).print(line, markup=False, soft_wrap=True)

    @property
    def left(self) -> float | None:
        """Seconds that are left, None while that is a guess."""
        if self.by_step:
            return self._left_of_step()
        gone, did = time.monotonic() - self._start, self.done - self.first
        few = did < max(2, 0.05 * (self.total - self.first)) or gone < 3
        return None if few else gone / did * (self.total - self.done)

    def _left_of_step(self) -> float | None:
        if self._begun is None or self.step is None:
            return None
        since, first = self._begun
        gone, did = time.monotonic() - since, self.step[0] - first
        return None if not did or gone < 3 else gone / did * (self.step[1] - self.step[0])

    def line(self) -> str:
        """The state as a plain line."""
        parts = [f"{int(self.done):,} of {self.total:,} {self.unit}", say_minutes(time.monotonic() - self._start)]
        parts += [self._eta()] if self._eta() else []
        parts += [self.text] if self.text else []
        if self.step is not None:
            done, total, unit = self.step
            parts.append(f"{done} of {total} {unit}")
        return " · ".join(parts)

    def _eta(self) -> str:
        left = self.left
        of = " for this fleet" if self.by_step else ""
        return f"about {say_minutes(left)} left{of}" if left is not None and self.done < self.total else ""

    def _show(self) -> None:
        """Take down how things are. In a terminal they are drawn a few times a second, whatever happens meanwhile."""
        if self._live is not None and self._outer is not None and self._inner is not None:
            first, second = self._outer.task_ids[0], self._inner.task_ids[0]
            self._outer.update(first, total=self.total, completed=self.done, count=int(self.done), eta=self._eta())
            done, total, unit = self.step or (0, None, "")  # without an end it only shows activity
            words = f"{done} of {total} {unit} · {self.text}" if self.step else self.text
            self._inner.update(second, total=total, completed=done, text=words)
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
        from rich.live import Live
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._outer = Progress(
            SpinnerColumn(style="cyan"),
            BarColumn(24, complete_style="cyan", finished_style="cyan"),
            TextColumn(f"{{task.fields[count]:,}} of {{task.total:,.0f}} {self.unit}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[eta]}", style="dim", markup=False),
            console=self.console,
        )
        self._inner = Progress(
            TextColumn(" "),
            BarColumn(24, style="grey23", complete_style="grey58", finished_style="grey58"),
            TextColumn("{task.fields[text]}", style="dim", markup=False),
            console=self.console,
        )
        self._outer.add_task("", total=self.total, completed=int(self.done), count=int(self.done), eta="")
        self._inner.add_task("", total=None, completed=0, text=self.text)
        self._live = Live(
            get_renderable=self._screen, console=self.console, transient=True, refresh_per_second=8
        )  # fmt: skip
        self._live.start()

    def _screen(self) -> "RenderableType":
        from rich.console import Group

        if self._outer is None or self._inner is None:
            return ""
        return Group(*([] if self._above is None else [self._above()]), self._outer, self._inner)


class Listener:
    """Takes what the training rooms tell of their progress, and moves a bar over networks.

    Args:
        bar: The bar; a fleet of 75 networks after a third of its epochs counts as 25 of them.
        first: What is done before the first fleet.
    """

    def __init__(self, bar: Bar, first: str = "building networks") -> None:
        self.bar, self.first = bar, first
        self._before = 0.0
        self._size = 0

    def begin(self, before: int, total: int) -> None:
        """So many networks were done before, and so many there are in all."""
        self.bar.begin_at(before, total)
        self._before, self._size = float(before), 0
        self.bar.now(self.first)

    def on_epoch(self, at: "Progress") -> None:
        """A fleet is so far."""
        if at.epoch == 0:
            self._before, self._size = self._before + self._size, at.networks
            fleet = f"fleet {at.fleet} of {at.fleets}, " if at.fleets > 1 else ""
            self.bar.now(f"{fleet}{at.name}, {at.networks} network{'s' if at.networks > 1 else ''}")
        self.bar.inside(at.epoch, at.epochs, "epochs")
        self.bar.reach(self._before + at.networks * at.epoch / at.epochs)

    def report(self, line: str) -> None:
        """Print a line, unless it only says that a fleet is done, which the bar shows."""
        if not FLEET.match(line):
            self.bar.note(line)
