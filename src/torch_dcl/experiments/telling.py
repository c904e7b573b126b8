"""What a run tells while it goes, written into its folder as well: ``metrics.jsonl`` by epoch, ``log.txt`` by line."""

import contextlib
import dataclasses
import datetime
import time
from collections.abc import Iterator

from torch_dcl.experiments.engine import Report, Settings
from torch_dcl.experiments.protocol import Progress
from torch_dcl.fleet.run_folder import RunFolder

__all__ = ["clocked", "minutes_of", "telling"]


def telling(folder: RunFolder, settings: Settings, report: Report, part: str = "") -> tuple[Settings, Report]:
    """The same settings and the same report, which also write down what they are told.

    Args:
        folder: The run's.
        settings: How networks are trained.
        report: Called with lines of progress.
        part: What the files' names end in, where several processes share the folder.
    """
    tell = settings.on_epoch

    def on_epoch(at: Progress) -> None:
        if at.epoch:
            folder.append(f"metrics{part}", {"time": _now(), **dataclasses.asdict(at)})
        if tell is not None:
            tell(at)

    def line(text: str) -> None:
        folder.log(text, part)
        report(text)

    return dataclasses.replace(settings, on_epoch=on_epoch), line


@contextlib.contextmanager
def clocked(folder: RunFolder, part: str = "") -> Iterator[None]:
    """Write down the minutes of a slice, however it ends."""
    start = time.perf_counter()
    try:
        yield
    finally:
        folder.append(f"minutes{part}", {"training": (time.perf_counter() - start) / 60})


def minutes_of(folder: RunFolder) -> float:
    """The minutes of all slices together."""
    return sum(float(record["training"]) for record in folder.read("minutes"))


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
