"""Fleets of a run in slices that can be gone on with: some abreast on a GPU, with a checkpoint behind each."""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from torch_dcl.experiments.engine import Progress
from torch_dcl.files import SealedError
from torch_dcl.training import Fleet
from torch_dcl.training.abreast import train_abreast
from torch_dcl.training.fleet import Precision
from torch_dcl.training.runs import RunFolder

__all__ = ["How", "Report", "Slice", "Tell", "abreast", "train_in_slices"]

Report = Callable[[str], None]
Tell = Callable[[Progress], None]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class How:
    """How fleets are run; none of it is the recipe's."""

    device: str = "cpu"
    precision: Precision | None = None
    most: int = 12
    """Networks that train at a time: the seeds of a column, and on a GPU several columns."""
    stacked: bool = False
    """Whether networks train as a stack. Measured slower for the networks of Table 2, which fill a GPU side by side."""
    compile: bool = False
    """Whether networks that are not stacked are compiled."""
    streams: int = 8
    """How many networks of a fleet that are not stacked run at a time on a GPU."""
    deterministic: bool = False
    """Whether a GPU must give the same bits every time, so that a run in slices ends as one in a piece does."""
    average: bool = False
    """Whether the test averages over an image and its mirror image."""
    every: float = 60.0
    """Seconds between two checkpoints, roughly: they are written at the ends of epochs."""


def abreast(fleets: Sequence[Sequence[T]], how: How, alike: Callable[[T], object]) -> list[list[Sequence[T]]]:
    """Which fleets train at the same time: on a GPU neighbours that are alike, elsewhere each by itself.

    Args:
        fleets: What each fleet trains, one thing a network.
        how: Says where, and how many networks at most; a fleet that has more by itself is alone.
        alike: Fleets may be together if it gives the same for what they train.
    """
    groups: list[list[Sequence[T]]] = []
    for fleet in fleets:
        room = bool(groups) and sum(map(len, groups[-1])) + len(fleet) <= how.most
        if room and how.device.startswith("cuda") and alike(groups[-1][0][0]) == alike(fleet[0]):
            groups[-1].append(fleet)
        else:
            groups.append([fleet])
    return groups


def train_in_slices(
    fleets: Mapping[Path, Fleet], until: float, every: float = 60.0, tell: Callable[[], None] | None = None
) -> bool:
    """Train from checkpoints, if there are any, to the end or until time is up, with checkpoints behind it.

    Args:
        fleets: Fresh; by the place of the checkpoint that is read, and written at the end of an epoch when ``every``
            seconds have gone.
        until: When to stop, by `time.perf_counter`; at least one epoch is trained.
        every: Seconds.
        tell: Called when a checkpoint has been read and after every epoch. When it raises KeyboardInterrupt the fleets
            are written down first.

    Returns:
        Whether the training of all has ended. The checkpoints of their ends are there then.

    Raises:
        ValueError: A checkpoint is of another fleet.
        SealedError: It is damaged; remove it to begin anew.
    """
    tell = tell or (lambda: None)

    def save() -> None:
        for path, fleet in fleets.items():
            fleet.save(path)

    def ended() -> bool:
        return all(fleet.epoch == fleet.epochs for fleet in fleets.values())

    for path, fleet in fleets.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            try:
                fleet.load(path)
            except SealedError as error:
                raise SealedError(f"{error}; remove the file to train this fleet from its beginning") from error
    if any(fleet.epoch for fleet in fleets.values()):
        tell()
    saved = time.perf_counter()
    while not ended():
        train_abreast(list(fleets.values()))
        try:
            tell()
        except KeyboardInterrupt:
            save()
            raise
        now = time.perf_counter()
        if ended() or now > until or now - saved > every:
            save()
            saved = now
        if now > until:
            break
    return ended()


class Slice(NamedTuple):
    """What a process does of a run in one call: where it writes, how long it has, whom it tells."""

    folder: RunFolder
    part: str
    until: float
    every: float
    which: tuple[int, int]
    """Which fleets these are, of how many."""
    report: Report
    tell: Tell | None

    def train(self, fleets: Mapping[str, Fleet], name: str) -> dict[str, float] | None:
        """Train fleets abreast, or go on with them.

        Args:
            fleets: Fresh, by what their checkpoints are called.
            name: What they are called for people.

        Returns:
            The seconds of each in all its slices, its networks' share of the time; None when time is up before the end.
        """
        start, paths = time.perf_counter(), {file: self.checkpoint(file) for file in fleets}
        number, count = self.which
        networks = sum(map(len, fleets.values()))
        which = f"{number}/{count} {name}, {networks} network{'s' if networks > 1 else ''}"

        def epochs() -> tuple[int, int]:
            last = min(fleets.values(), key=lambda fleet: fleet.epoch / fleet.epochs)
            return last.epoch, last.epochs

        def tell() -> None:
            if self.tell is not None:
                seen = [(fleet.history.train_loss or [[]])[-1] for fleet in fleets.values()]
                loss = [value for values in seen for value in values if math.isfinite(value)]
                self.tell(Progress(number, count, name, networks, *epochs(), sum(loss) / len(loss) if loss else None))

        tell()
        if any(path.exists() for path in paths.values()):
            self.report(f"{which}: going on")
        done = train_in_slices({paths[file]: fleet for file, fleet in fleets.items()}, self.until, self.every, tell)
        spent = time.perf_counter() - start
        self.report(f"{which}: epoch {epochs()[0]} of {epochs()[1]}, {spent:.1f} s in this slice")
        for file, fleet in fleets.items():
            share = {"fleet": file, "epoch": fleet.epoch, "seconds": spent * len(fleet) / networks}
            self.folder.append(f"slices{self.part}", share)
        if not done:
            return None
        seconds = dict.fromkeys(fleets, 0.0)
        for record in self.folder.read("slices"):
            if record["fleet"] in seconds:
                seconds[record["fleet"]] += float(record["seconds"])
        return seconds

    def checkpoint(self, file: str) -> Path:
        """Where a fleet is kept while it is trained."""
        return self.folder.path / "fleets" / f"{file}.safetensors"
