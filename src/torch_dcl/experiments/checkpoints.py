"""Fleets kept in the run folder while they are trained, so that a run goes on in the middle of one.

::

    runs/figures/
      fleet-filters-1f6e0c2a9b3d.safetensors    a fleet of the part filters, as of its last checkpoint
      checkpoints.jsonl                         which fleets are kept, with their epochs; gone when the run is done

What comes of a fleet is written down when it is trained, and its checkpoint goes. In a part that is written down as a
whole, the fleets that are trained are kept until then.
"""

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_dcl.experiments.protocol import finite
from torch_dcl.fleet import Fleet
from torch_dcl.fleet.run_folder import RunError, RunFolder

if TYPE_CHECKING:
    from torch_dcl.experiments.engine import Job

__all__ = ["Checkpoints"]

EVERY = 120.0  # seconds of training between two checkpoints


class Checkpoints:
    """Keeps fleets, each in a file of its own.

    Args:
        folder: The run's.
        part: What its notes end in, where several processes share the folder.
        of: The part of the run that is written down as a whole, such as ``filters``. Its fleets are kept, also when
            they are trained, until `forget`; and the same jobs in another part are other fleets. "" where what comes of
            every fleet is written down by itself.
        every: Seconds of training between two checkpoints; None for two minutes. What is trained since the last one is
            lost with a kill.
        report: Called with a line when a fleet goes on from a checkpoint.
    """

    def __init__(
        self,
        folder: RunFolder,
        part: str = "",
        *,
        of: str = "",
        every: float | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self.folder, self.part, self.of = folder, part, of
        self._report = report or (lambda _: None)
        self.every = EVERY if every is None else every
        self._key = ""
        self._saved = self._began = time.monotonic()
        self._before = 0.0

    @property
    def file(self) -> Path:
        """Where the fleet is kept that is being trained."""
        return self.folder.path / f"{self._prefix}{self._key[:12]}.safetensors"

    def expect(self, fleets: Sequence[Sequence["Job"]]) -> None:
        """Say which checkpoints none of the fleets goes on from: jobs were shared out otherwise then, by ``most``.

        Args:
            fleets: All that are left to train.
        """
        if self.part:  # the others are another process's
            return
        keys = {self._key_of(jobs) for jobs in fleets}
        for key, note in self._noted().items():
            if key not in keys and note.get("of", "") == self.of:
                self._report(
                    f"{note['file']}, after epoch {note['epoch']}, is of no fleet that is to be trained now, as with "
                    "another setting of most; it is left aside"
                )

    def begin(self, fleet: Fleet, jobs: Sequence["Job"]) -> list[list[float]]:
        """Bring a fleet to where its checkpoint is, if it has one.

        Args:
            fleet: Not trained yet.
            jobs: What it is trained for.

        Returns:
            The losses of the images to judge with, by epoch, that were noted with the checkpoint. After a kill between
            the checkpoint and its note, that of the last epoch is not among them.

        Raises:
            RunError: The run has noted a checkpoint of this fleet, and the file is missing, or damaged, or was written
                with other settings.
        """
        self._key = self._key_of(jobs)
        self._began = self._saved = time.monotonic()
        self._before = 0.0
        last = self._noted().get(self._key)
        if last is None:
            return []
        if not self.file.is_file():
            raise RunError(
                f"{self.folder.path} has noted a checkpoint after epoch {last['epoch']} of a fleet, but "
                f"{self.file.name} is missing; put it back, or remove checkpoints*.jsonl to train that fleet from its "
                "beginning"
            )
        try:
            fleet.load(self.file)
        except ValueError as error:
            raise RunError(
                f"{error}; go on with the settings and on the device of before, or remove checkpoints*.jsonl to train "
                "the fleets that are kept from their beginning"
            ) from error
        self._before = float(last["seconds"])
        if fleet.epoch < fleet.epochs:
            self._report(f"going on in the middle of a fleet, after epoch {fleet.epoch} of {fleet.epochs}")
        return [[math.nan if loss is None else loss for loss in epoch] for epoch in last["judged"][: fleet.epoch]]

    def after_epoch(self, fleet: Fleet, judged: Sequence[Sequence[float]]) -> None:
        """Keep the fleet, if the last checkpoint is some time ago. At its end it is kept for its part alone.

        Args:
            fleet: Between two epochs, or behind its last.
            judged: The losses of the images to judge with so far, by epoch.
        """
        trained = fleet.epoch == fleet.epochs
        if self.of if trained else time.monotonic() - self._saved >= self.every:
            self.save(fleet, judged)

    def save(self, fleet: Fleet, judged: Sequence[Sequence[float]]) -> None:
        """Keep the fleet now.

        Args:
            fleet: As in `after_epoch`.
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

    @property
    def spent(self) -> float:
        """Seconds that the fleets of the part have taken, as far as they are noted."""
        return sum(float(note["seconds"]) for note in self._noted().values() if note.get("of", "") == self.of)

    def end(self) -> None:
        """What came of the fleet is written down: its checkpoint goes."""
        if not self.of and self.file.exists():
            self._note({"epoch": None})
            self.file.unlink()

    def forget(self) -> None:
        """The part is written down, or the whole run: all its checkpoints go."""
        for key, note in self._noted().items():
            if note.get("of", "") == self.of:
                self._note({"fleet": key, "epoch": None})
        for file in self.folder.path.glob(f"{self._prefix}*.safetensors"):
            file.unlink()
        if not self._noted():
            for notes in self.folder.path.glob("checkpoints*.jsonl"):
                notes.unlink()

    @property
    def _prefix(self) -> str:
        return f"fleet-{self.of}-" if self.of else "fleet-"

    def _key_of(self, jobs: Sequence["Job"]) -> str:
        plain = json.dumps([self.of, *(finite(dataclasses.asdict(job)) for job in jobs)])
        return hashlib.sha256(plain.encode()).hexdigest()

    def _noted(self) -> dict[str, dict[str, Any]]:
        """The last note of every fleet that has a checkpoint, also those of other processes."""
        found: dict[str, dict[str, Any]] = {}
        for record in sorted(self.folder.read("checkpoints"), key=lambda record: float(record["time"])):
            found[record["fleet"]] = record
        return {key: note for key, note in found.items() if note["epoch"] is not None}

    def _note(self, what: dict[str, Any]) -> None:
        self.folder.append(f"checkpoints{self.part}", {"fleet": self._key, "of": self.of, "time": time.time(), **what})
