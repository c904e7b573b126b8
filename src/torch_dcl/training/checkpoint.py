"""What a fleet goes on from, as one checked file."""

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from torch_dcl.files import read_sealed, write_sealed

__all__ = ["read", "write"]

_KEY = "torch_dcl_fleet"


def write(path: str | os.PathLike[str], state: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    """Write tensors and a description, and give the SHA-256 that the file carries."""
    return write_sealed(path, _KEY, dict(state), _finite(dict(about)))


def read(
    path: str | os.PathLike[str], state: Mapping[str, Tensor], members: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Copy what `write` wrote into tensors of the same names, and give the description.

    Args:
        path: The file.
        state: The tensors to write into.
        members: What the description must have under that name.

    Raises:
        FileNotFoundError: There is no such file.
        SealedError: The file is damaged, or is no checkpoint of a fleet.
        ValueError: It is of another fleet; the message names the first difference.
    """
    tensors, about = read_sealed(path, _KEY)
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
    return dict(about)


def _finite(value: Any) -> Any:
    """Plain data with None for what is no finite number, as JSON wants it."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
