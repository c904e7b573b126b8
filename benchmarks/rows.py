"""Measurements of a benchmark as a CSV file."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch_dcl.files import replacing


def write_rows(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    with replacing(path) as aside, aside.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
