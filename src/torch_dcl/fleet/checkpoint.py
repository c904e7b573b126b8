"""What a fleet goes on from, as one checked file."""

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from torch_dcl.files import SealedError, read_sealed, write_sealed

__all__ = ["read", "write"]

_KEY = "torch_dcl_fleet"


def write(path: str | os.PathLike[str], state: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    """Write tensors and a description, and give the SHA-256 that the file carries."""
    return write_sealed(path, _KEY, dict(state), _finite(dict(about)))


def read(
    path: str | os.PathLike[str], state: Mapping[str, Tensor], members: Sequence[Mapping[str, Any]], epochs: int,
    steps: int,
) -> dict[str, Any]:  # fmt: skip
    """Copy what `write` wrote into tensors of the same names, and give the description.

    Args:
        path: The file.
        state: The tensors to write into.
        members: What the description must have under that name.
        epochs: Of the fleet's schedules.
        steps: Of an epoch.

    Raises:
        FileNotFoundError: There is no such file.
        SealedError: The file is damaged, or is no checkpoint of a fleet.
        ValueError: It is of another fleet; the message names the first difference.
    """
    tensors, about = read_sealed(path, _KEY)
    about = {"step": 0, "loss": [0.0] * len(members), "was_alive": [True] * len(members), "extra": {}, **about}
    wrong = next((name for name, is_right in _rules(len(members), epochs, steps).items() if not is_right(about)), None)
    if wrong is not None:
        shown = repr(about.get(wrong))[:60]
        raise SealedError(f"{path} is no checkpoint of a fleet: its {wrong} is {shown}; remove the file")
    here = _finite(list(members))
    for row, (then, now) in enumerate(itertools.zip_longest(about["members"], here)):
        if then != now:
            if then is None or now is None:
                raise ValueError(f"{path} is of {len(about['members'])} networks, this fleet has {len(here)}")
            what = next(name for name in {**now, **then} if then.get(name) != now.get(name))
            raise ValueError(
                f"{path} is of another fleet: {what} of network {row} was {then.get(what)!r}, "
                f"here it is {now.get(what)!r}"
            )
    shapes = [{name: (t.shape, t.dtype) for name, t in given.items()} for given in (tensors, state)]
    if shapes[0] != shapes[1]:
        wrong = sorted({name for name, _ in shapes[0].items() ^ shapes[1].items()})[0]
        raise ValueError(f"{path} is of another fleet: {wrong} is not there, or of another shape or type")
    for name, value in state.items():
        value.copy_(tensors[name])
    about["train_loss"] = [_with_nan(epoch) for epoch in about["train_loss"]]
    return {**about, "loss": _with_nan(about["loss"])}


def _rules(count: int, epochs: int, steps: int) -> dict[str, Callable[[Mapping[str, Any]], bool]]:
    """What a description must be like, by name: a seal says that a file is whole, not that it makes sense."""

    def is_count(value: object, most: int) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most

    def are_losses(values: object) -> bool:
        if not isinstance(values, list) or len(values) != count:
            return False
        return all(value is None or isinstance(value, float) for value in values)

    def are_stopped(rows: object) -> bool:
        if not isinstance(rows, dict) or not all(row.isdigit() and int(row) < count for row in rows):
            return False
        return all(is_count(epoch, epochs - 1) for epoch in rows.values())

    return {
        "members": lambda a: isinstance(a.get("members"), list) and all(isinstance(m, dict) for m in a["members"]),
        "epoch": lambda a: is_count(a.get("epoch"), epochs),
        "step": lambda a: is_count(a["step"], steps) and (a["epoch"] < epochs or not a["step"]),
        "train_loss": lambda a: (
            isinstance(a.get("train_loss"), list)
            and len(a["train_loss"]) == a["epoch"]
            and all(map(are_losses, a["train_loss"]))
        ),
        "stopped": lambda a: are_stopped(a.get("stopped")),
        "loss": lambda a: are_losses(a["loss"]),
        "was_alive": lambda a: isinstance(a["was_alive"], list) and [type(v) for v in a["was_alive"]] == [bool] * count,
        "extra": lambda a: isinstance(a["extra"], dict),
    }


def _with_nan(values: Sequence[float | None]) -> list[float]:
    """The way back from None, which stands for what JSON has no word for."""
    return [math.nan if value is None else value for value in values]


def _finite(value: Any) -> Any:
    """Plain data with None for what is no finite number, as JSON wants it."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
