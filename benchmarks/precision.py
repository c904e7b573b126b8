"""Whether products in bfloat16 cost a fleet accuracy: the same networks in bfloat16 and in float32.

    python benchmarks/precision.py --mnist FOLDER --out results/precision.csv

The recipe of Table 1 with its stored learning rates, on digits of the training set that were kept apart, so that the
test set is not looked at. The same seeds in both precisions; the difference is paired.
"""

import argparse
import csv
import time
from pathlib import Path

import torch

from torch_dcl.experiments.digits import make_sets, read_mnist
from torch_dcl.experiments.engine import Job, Settings, run_jobs
from torch_dcl.experiments.search import stored_choice
from torch_dcl.experiments.stats import paired
from torch_dcl.files import replacing

COLUMNS = ["column", "set", "seed", "bfloat16", "float32", "device", "torch"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", default=None, help="folder with the idx files; the embedded excerpt when not given")
    parser.add_argument("--columns", nargs="+", default=["baseline", "A2"])
    parser.add_argument("--sets", nargs="+", default=["MNIST-II-05", "MNIST-III-10"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    choice = stored_choice()
    sets = make_sets(read_mnist(arguments.mnist), arguments.sets, "choose", device="cuda")
    jobs = []
    for column in arguments.columns:
        for name in arguments.sets:
            trial = choice[column][2 if "-II-" in name else 3]
            jobs += [Job(column, name, seed, trial.lr, trial.clip) for seed in range(arguments.seeds)]
    errors = {}
    for precision in ("bfloat16", "float32"):
        start = time.perf_counter()
        errors[precision] = run_jobs(jobs, sets, Settings(device="cuda", precision=precision))
        print(f"{precision}: {len(jobs)} networks in {time.perf_counter() - start:.0f} s", flush=True)
    rows = []
    for low, high in zip(errors["bfloat16"], errors["float32"], strict=True):
        job, where = low.job, [torch.cuda.get_device_name(), torch.__version__]
        rows.append([job.column, job.data, job.seed, f"{low.error:.2f}", f"{high.error:.2f}", *where])
    for column in arguments.columns:
        for name in arguments.sets:
            both = [[o.error for o in errors[p] if (o.job.column, o.job.data) == (column, name)] for p in errors]
            found = paired(*both)
            print(f"{column} {name}: bfloat16 - float32 {found.mean:+.2f} ({found.low:+.2f} to {found.high:+.2f})")
    if arguments.out:
        with replacing(arguments.out) as aside, aside.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])


if __name__ == "__main__":
    main()
