"""Measurements of a benchmark as a CSV file."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch_dcl.files import replacing

__all__ = ["read_rows", "write_rows"]


def read_rows(path: Path | None) -> list[dict[str, str]]:
    """The rows of a file; none if there is no file."""
    if path is None or not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(
    path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, object]], key: Sequence[str] = ()
) -> None:
    """Write a file. With ``key``, its rows stay unless a new one has the same values in these columns."""
    new = {tuple(str(row[name]) for name in key): row for row in rows} if key else {}
    old = read_rows(path) if key else []
    kept: list[Mapping[str, object]] = [new.pop(tuple(row[name] for name in key), row) for row in old]
    with replacing(path) as aside, aside.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*kept, *(new.values() if key else rows)])
