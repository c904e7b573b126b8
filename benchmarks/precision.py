"""Whether products in bfloat16 cost a fleet accuracy: the same networks in bfloat16 and in float32.

    python benchmarks/precision.py --mnist FOLDER --out results/precision.csv

The recipe of Table 1 with its stored learning rates, on digits of the training set that were kept apart, so that the
test set is not looked at. The same seeds in both precisions; the difference is paired.
"""

import argparse
import csv
import tempfile
import time
from pathlib import Path

import torch

from torch_dcl.experiments.recipes.table1 import Table1, Table1Config
from torch_dcl.experiments.runner import run
from torch_dcl.experiments.stats import paired
from torch_dcl.files import replacing

HEADS = ["column", "set", "seed", "bfloat16", "float32", "device", "torch"]


class HeldOut(Table1):
    """Table 1, judged on training digits that were kept apart."""

    purpose = "choose"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", default="excerpt", help="folder with the idx files; without it the embedded excerpt")
    parser.add_argument("--columns", nargs="+", default=["baseline", "A2"])
    parser.add_argument("--sets", nargs="+", default=["MNIST-II-05", "MNIST-III-10"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    errors = {}
    for precision in ("bfloat16", "float32"):
        config = Table1Config(
            models=tuple(asked.columns), sets=tuple(asked.sets), seeds=asked.seeds, data=asked.mnist,
            precision=precision,
        )  # fmt: skip
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            table = run(HeldOut(config, "cuda"), Path(folder, "run")).result
        errors[precision] = {(cell.column, cell.set): cell.runs for cell in table.cells}
        print(f"{precision}: {len(table.cells)} cells in {time.perf_counter() - start:.0f} s", flush=True)
    rows, where = [], [torch.cuda.get_device_name(), torch.__version__]
    for (column, name), low in errors["bfloat16"].items():
        high = errors["float32"][column, name]
        rows += [[column, name, seed, f"{low[seed]:.2f}", f"{high[seed]:.2f}", *where] for seed in low]
        gap = paired(list(low.values()), list(high.values()))
        print(f"{column} {name}: bfloat16 - float32 {gap.mean:+.2f} ({gap.low:+.2f} to {gap.high:+.2f})")
    if asked.out:
        with replacing(asked.out) as aside, aside.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([HEADS, *rows])


if __name__ == "__main__":
    main()
