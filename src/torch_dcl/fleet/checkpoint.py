"""The state of a fleet as one file, checked byte by byte and then value by value.

A seal says that a file is whole, not that it makes sense: a file that was sealed again may contain anything.
"""

import contextlib
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torch_dcl.files import SealedError, read_sealed, write_sealed
from torch_dcl.fleet.run_folder import RunError

if TYPE_CHECKING:
    from torch_dcl.fleet.fleet import Fleet

__all__ = ["ALIVE", "Checkpoints", "read", "write"]

ALIVE = "alive"
"""The name of the tensor that says which networks are still trained, bool ``[E]``."""
_KEY = "torch_dcl_fleet"
_INSIDE_AN_EPOCH = ("step", "loss", "was_alive")
_NAME = re.compile(r"([0-9a-f]{12})-(\d+)-(\d+)\.safetensors")
KEPT = 2


class Checkpoints:
    """The last two checkpoints of each fleet of a run, as files ``KEY-EPOCH-STEP.safetensors`` in one folder."""

    def __init__(self, place: Path, report: Callable[[str], None]) -> None:
        self.place, self._report = place, report

    def of(self, key: str) -> list[Path]:
        """The checkpoints of a fleet, the last one first."""
        files = [(match, file) for file in self.place.glob(f"{key}-*") if (match := _NAME.fullmatch(file.name))]
        return [file for _, file in sorted(files, key=lambda each: (int(each[0][2]), int(each[0][3])), reverse=True)]

    def others(self, keys: Collection[str]) -> list[Path]:
        """The checkpoints of fleets without one of these keys."""
        return [file for file in sorted(self.place.glob("*.safetensors")) if file.name[:12] not in keys]

    def load(self, key: str, fleet: "Fleet") -> tuple[float, list[list[float]]]:
        """Load the last valid checkpoint of a fleet: its seconds of training, and losses of epochs, if evaluated."""
        files = self.of(key)
        for file, earlier in itertools.zip_longest(files, files[1:]):
            try:
                extra = fleet.load(file)
                return float(extra.get("seconds", 0.0)), with_nan(extra.get("losses", []))
            except SealedError as error:
                then = f"the earlier {earlier.name} is used" if earlier else "the fleet starts from the beginning"
                self._report(f"{error}; {then}")
                file.unlink(missing_ok=True)
            except ValueError as error:
                raise RunError(f"{error}; resume with the same settings, or remove {file}") from error
        return 0.0, []

    def save(self, key: str, fleet: "Fleet", seconds: float, losses: Sequence[Sequence[float]]) -> None:
        """Save a fleet, and remove its checkpoints but the last two."""
        self.place.mkdir(exist_ok=True)
        name = f"{key}-{fleet.epoch:05d}-{fleet.step:06d}.safetensors"
        fleet.save(self.place / name, {"seconds": seconds, "losses": finite(losses)})
        for file in self.of(key)[KEPT:]:
            file.unlink(missing_ok=True)

    def forget(self, key: str) -> None:
        """Remove the checkpoints of a fleet."""
        for file in self.of(key):
            file.unlink(missing_ok=True)

    def forget_all(self) -> None:
        """Remove all checkpoints."""
        for file in self.place.glob("*.safetensors"):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.place.rmdir()


def write(path: str | os.PathLike[str], state: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    """Write tensors and a description, and return the SHA-256 that the file carries."""
    return write_sealed(path, _KEY, dict(state), finite(dict(about)))


def read(
    path: str | os.PathLike[str], state: Mapping[str, Tensor], members: Sequence[Mapping[str, Any]], epochs: int,
    steps: int,
) -> dict[str, Any]:  # fmt: skip
    """Copy what `write` wrote into tensors of the same names, and return the description.

    Nothing is copied unless everything in the file is as it must be, by the members, epochs and steps of the fleet: a
    SealedError where it is damaged or no checkpoint, a ValueError that names the first difference where it belongs to
    another fleet.
    """
    tensors, about = read_sealed(path, _KEY)
    _check_members(path, about.get("members"), finite(list(members)))
    kinds, wanted = ({name: (t.shape, t.dtype) for name, t in given.items()} for given in (tensors, state))
    if kinds != wanted:
        first = min(name for name, _ in kinds.items() ^ wanted.items())
        raise ValueError(f"{path} belongs to another fleet: {first} is missing, or has another shape or type")
    alive = tensors[ALIVE].tolist()
    wrong = _wrong_value(about, alive, epochs, steps)
    if wrong is not None:
        raise _refusal(path, wrong, about.get(wrong))
    for name, value in state.items():
        value.copy_(tensors[name])
    about = {"step": 0, "loss": [0.0] * len(members), "was_alive": alive, **about}
    return {**about, "train_loss": with_nan(about["train_loss"]), "loss": with_nan(about["loss"])}


def _refusal(path: str | os.PathLike[str], name: str, value: object) -> SealedError:
    shown = repr(value)[:60]
    return SealedError(f"{path} is not a checkpoint of a fleet: its {name} is {shown}; remove the file")


def _check_members(path: str | os.PathLike[str], then: object, now: list[dict[str, Any]]) -> None:
    if not isinstance(then, list) or not all(isinstance(member, dict) for member in then):
        raise _refusal(path, "members", then)
    if len(then) != len(now):
        raise ValueError(f"{path} is of {len(then)} networks, this fleet has {len(now)}")
    for row, (before, here) in enumerate(zip(then, now, strict=True)):
        for name in {**here, **before}:
            # Compared as text: for Python False equals 0, but it is another setting.
            texts = [json.dumps(member.get(name), sort_keys=True) for member in (before, here)]
            if texts[0] != texts[1] or (name in before) != (name in here):
                old, new = (repr(member[name]) if name in member else "missing" for member in (before, here))
                raise ValueError(
                    f"{path} belongs to another fleet: {name} of network {row} was {old}, here it is {new}"
                )


def _wrong_value(about: Mapping[str, Any], alive: Sequence[bool], epochs: int, steps: int) -> str | None:
    """The name of the first value that no fleet writes, without the members; None where all are right."""
    count = len(alive)
    unknown = about.keys() - {"members", "epoch", "train_loss", "stopped", "extra", *_INSIDE_AN_EPOCH}
    if unknown:
        return min(unknown)
    epoch: Any = about.get("epoch")
    stopped, losses = about.get("stopped"), about.get("train_loss")
    if not _is_count(epoch, 0, epochs):
        return "epoch"
    was_alive: Any = alive
    if any(name in about for name in _INSIDE_AN_EPOCH):
        if not _is_count(about.get("step"), 1, steps) or epoch == epochs:
            return "step"
        was_alive = about.get("was_alive")
        if not isinstance(was_alive, list) or [type(before) for before in was_alive] != [bool] * count:
            return "was_alive"
        if any(now and not before for before, now in zip(was_alive, alive, strict=True)):
            return "was_alive"
        if not _are_losses(about.get("loss"), [not now for now in alive]):
            return "loss"
    at_rest = {str(row) for row, before in enumerate(was_alive) if not before}
    if not isinstance(stopped, dict) or stopped.keys() != at_rest:
        return "stopped"
    if not all(_is_count(when, 0, epoch - 1) for when in stopped.values()):
        return "stopped"
    if not isinstance(losses, list) or len(losses) != epoch:
        return "train_loss"
    for number, values in enumerate(losses):
        if not _are_losses(values, [stopped.get(str(row), epochs) <= number for row in range(count)]):
            return "train_loss"
    return None if isinstance(about.get("extra"), dict) else "extra"


def _is_count(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _are_losses(values: object, stopped: Sequence[bool]) -> bool:
    """Whether there is a finite loss for each network, or None for one that stopped."""
    if not isinstance(values, list) or len(values) != len(stopped):
        return False
    return all(
        may_be_none if value is None else isinstance(value, float) and math.isfinite(value)
        for value, may_be_none in zip(values, stopped, strict=True)
    )


def finite(value: Any) -> Any:
    """Plain data with None for numbers that are not finite, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def with_nan(values: Any) -> Any:
    """Lists of numbers as they were before `finite`: with NaN for None."""
    if isinstance(values, list):
        return [with_nan(value) for value in values]
    return math.nan if values is None else values
