"""A fleet in the middle of its training, kept in the run folder, so that a run goes on there and not at its beginning.

::

    runs/table1/
      fleet.safetensors    the fleet that is being trained, as of its last checkpoint
      checkpoints.jsonl    which fleet that is, and its epoch; a fleet that is done says so
"""

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch_dcl.paper.drawings import finite
from torch_dcl.training import Fleet
from torch_dcl.training.runs import RunError, RunFolder

if TYPE_CHECKING:
    from torch_dcl.paper.engine import Job

__all__ = ["Checkpoints"]

EVERY = 120.0  # seconds of training between two checkpoints


class Checkpoints:
    """Keeps one fleet at a time.

    Args:
        folder: The run's.
        part: What its files end in, where several processes share the folder.
        every: Seconds of training between two checkpoints; None for two minutes. What is trained since the last one is
            lost with a kill.
        report: Called with a line when a fleet goes on from a checkpoint.
    """

    def __init__(
        self,
        folder: RunFolder,
        part: str = "",
        *,
        every: float | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self.folder, self.part, self._report = folder, part, report
        self.every = EVERY if every is None else every
        self.file = self._found = folder.path / f"fleet{part}.safetensors"
        self._key = ""
        self._saved = self._began = time.monotonic()
        self._before = 0.0

    def begin(self, fleet: Fleet, jobs: Sequence["Job"]) -> list[list[float]]:
        """Bring a fleet to where its checkpoint is, if it has one.

        Args:
            fleet: Not trained yet.
            jobs: What it is trained for.

        Returns:
            The losses of the images to judge with, by epoch, that were noted with the checkpoint. After a kill between
            the checkpoint and its note, that of the last epoch is not among them.

        Raises:
            RunError: The run has noted a checkpoint of this fleet, and the file is missing.
        """
        plain = json.dumps([finite(dataclasses.asdict(job)) for job in jobs])
        self._key = hashlib.sha256(plain.encode()).hexdigest()
        self._began = self._saved = time.monotonic()
        self._before = 0.0
        records = [record for record in self.folder.read("checkpoints") if record["fleet"] == self._key]
        last = max(records, key=lambda record: float(record["time"]), default=None)
        if last is None or last["epoch"] is None:
            return []
        # Another process may have written it, when the fleets were shared out otherwise.
        self._found = self.folder.path / last["file"]
        if not self._found.is_file():
            raise RunError(
                f"{self.folder.path} has noted a checkpoint after epoch {last['epoch']} of a fleet, but {last['file']} "
                "is missing; put it back, or remove checkpoints*.jsonl to train that fleet from its beginning"
            )
        fleet.load(self._found)
        self._before = float(last["seconds"])
        if self._report is not None:
            self._report(f"going on in the middle of a fleet, after epoch {fleet.epoch} of {fleet.epochs}")
        return [[math.nan if loss is None else loss for loss in epoch] for epoch in last["judged"][: fleet.epoch]]

    def after_epoch(self, fleet: Fleet, judged: Sequence[Sequence[float]]) -> None:
        """Keep the fleet, if the last checkpoint is some time ago; the last epoch needs none.

        Args:
            fleet: Between two epochs.
            judged: The losses of the images to judge with so far, by epoch.
        """
        if fleet.epoch < fleet.epochs and time.monotonic() - self._saved >= self.every:
            self.save(fleet, judged)

    def save(self, fleet: Fleet, judged: Sequence[Sequence[float]]) -> None:
        """Keep the fleet now.

        Args:
            fleet: Between two epochs.
            judged: As in `after_epoch`.
        """
        digest = fleet.save(self.file)
        self._note({"epoch": fleet.epoch, "file": self.file.name, "sha256": digest, "seconds": self.seconds,
                    "judged": finite(judged)})  # fmt: skip
        self._saved = time.monotonic()

    @property
    def seconds(self) -> float:
        """What the fleet has taken, also before a break."""
        return self._before + time.monotonic() - self._began

    def end(self) -> None:
        """The fleet is done, and what came out is written down: its checkpoint goes."""
        for file in {self.file, self._found}:
            if file.exists():
                self._note({"epoch": None})
                file.unlink()
        self._found = self.file

    def _note(self, what: dict[str, Any]) -> None:
        self.folder.append(f"checkpoints{self.part}", {"fleet": self._key, "time": time.time(), **what})
