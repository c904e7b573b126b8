"""Trackers: listeners that forward the records of a run folder, for example to TensorBoard.

A custom tracker derives from `Tracker` and handles records of ``metrics`` and of ``outcomes``.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_dcl.experiments.protocol import Listener, Progress
from torch_dcl.experiments.settings import SettingError
from torch_dcl.fleet.run_folder import RunError, RunFolder

__all__ = ["TensorBoard", "Tracker", "open_tracker"]


class Tracker(Listener):
    """Passes every new record of a run folder to `metrics` or `outcomes` once, and forwards progress to a listener."""

    def __init__(self, path: str | os.PathLike[str], listener: Listener) -> None:
        self.path, self.listener = Path(path), listener
        # By their text: with several ranks or workers, new records are not the last ones of all.
        self._seen: dict[str, set[str]] = {"metrics": set(), "outcomes": set()}

    def metrics(self, record: Mapping[str, Any]) -> None:
        """The progress of some networks: ``name``, ``epoch``, ``part`` of the next one, ``loss``, ``judged``."""

    def outcomes(self, record: Mapping[str, Any]) -> None:
        """The ``outcomes`` of networks that are trained, each with its ``job`` and its ``error``."""

    def begin(self, before: int, total: int) -> None:
        """Forward the start of the run."""
        self.listener.begin(before, total)

    def on_epoch(self, at: Progress) -> None:
        """Forward progress, and handle new records."""
        self.listener.on_epoch(at)
        self.update()

    def report(self, line: str) -> None:
        """Forward a line, and handle new records."""
        self.listener.report(line)
        self.update()

    def update(self) -> None:
        """Handle the new records in the folder."""
        try:
            folder = RunFolder.inspect(self.path)
        except RunError:  # not created yet
            return
        for name, seen in self._seen.items():
            for record in folder.read(name):
                if (text := json.dumps(record)) not in seen:
                    seen.add(text)
                    getattr(self, name)(record)


class TensorBoard(Tracker):
    """Losses, errors and curves as scalars, in the folder ``tensorboard`` of the run."""

    def __init__(self, path: str | os.PathLike[str], listener: Listener) -> None:
        super().__init__(path, listener)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise SettingError("--tracker tensorboard needs the package: pip install tensorboard") from None
        self._open: Any = SummaryWriter
        self._told: set[tuple[str, int]] = set()
        self._writer: Any = None

    @property
    def writer(self) -> Any:
        """The writer of scalars; its folder is created with the first one.

        It is told every record, also those from before a resume: what an earlier writer was told is purged.
        """
        self._writer = self._writer or self._open(os.fspath(self.path / "tensorboard"), purge_step=0)
        return self._writer

    def metrics(self, record: Mapping[str, Any]) -> None:
        """The loss, by thousandths of an epoch, and what an evaluation found."""
        if record["loss"] is not None:
            at = round(1000 * (record["epoch"] + record.get("part", 0.0)))
            self.writer.add_scalar(f"loss/{record['name']}", record["loss"], at)
        if judged := record.get("judged"):
            self._add_point(judged["of"], judged)

    def outcomes(self, record: Mapping[str, Any]) -> None:
        """The error of each network, by its seed, and its curve by epochs."""
        for outcome in record["outcomes"]:
            job = outcome["job"]
            name = f"{job['network']} on {job['data']}"
            if outcome["error"] is not None:
                self.writer.add_scalar(f"error/{name}", outcome["error"], job["seed"])
            for point in outcome["extra"].get("curve", ()):
                self._add_point(f"{name}, seed {job['seed']}", point)

    def _add_point(self, name: str, point: Mapping[str, Any]) -> None:
        """Add a point of a curve, unless it was added before."""
        epoch = int(point["epoch"])
        if (name, epoch) not in self._told:
            self._told.add((name, epoch))
            for key in ("top1", "top5", "train_loss"):
                if point.get(key) is not None:
                    self.writer.add_scalar(f"{key}/{name}", point[key], epoch)

    def update(self) -> None:
        """Handle the new records, and flush them."""
        super().update()
        if self._writer is not None:
            self._writer.flush()


TRACKERS = {"tensorboard": TensorBoard}


def open_tracker(name: str, path: str | os.PathLike[str], listener: Listener) -> Tracker:
    """A tracker by its name."""
    if name not in TRACKERS:
        raise SettingError(f"there is no tracker {name!r}", name, list(TRACKERS))
    return TRACKERS[name](path, listener)
