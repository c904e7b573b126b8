"""The second stage of a small linear layer: one kernel each way, against the products of cuBLAS one by one.

    python benchmarks/small.py --out results/small.csv

Both ways are forced in turn, whatever the layer would choose (`torch_dcl.kernels.kept`), in bfloat16 with T = 2, with
gradients of the weights in bfloat16, as a fleet has them, and in float32, as autocast has them. Microseconds of the
GPU, captured as a CUDA graph; medians. Below 1 the kernel is faster; ``chosen`` says what the layer takes.
"""

import argparse
from contextlib import contextmanager
from pathlib import Path

import torch
from rows import write_rows

from kernels import SETS, time_of
from torch_dcl.kernels import kept

COLUMNS = ["pass", "positions", "filters", "outputs", "gradients", "kernel_us", "products_us", "ratio", "chosen"]
COLUMNS += ["device", "torch"]
LIMITS = ("_FEW", "_VERY_FEW", "_SMALL")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, nargs="+", default=[1, 32, 100, 128, 256, 512])
    parser.add_argument("--filters", type=int, nargs="+", default=[64, 128, 256, 512], help="of a branch, K2/4")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for M in arguments.filters:
        for P in arguments.positions:
            rows += measure(P, M, 4 * M)
            if arguments.out:
                write_rows(arguments.out, COLUMNS, rows)


def measure(P: int, M: int, N: int) -> list[dict[str, object]]:
    few, very_few, small = (getattr(kept, name) for name in LIMITS)
    shapes = ((P, 2 * M), (2 * M, N), (2, N), (P, N))
    sets = [[torch.randn(shape, device="cuda").bfloat16() / 4 for shape in shapes] for _ in range(SETS)]
    for given in sets:
        y, weight, bias, z = given
        given.append(kept.kept_forward(y, weight, bias, torch.empty_like(z), 2, 0.01, False))

    def forward(given):
        y, weight, bias, z, _ = given
        return kept.kept_forward(y, weight, bias, torch.empty_like(z), 2, 0.01, False)

    def backward(dtype):
        def run(given):
            y, weight, bias, grad, pre = given
            return kept.kept_backward(grad, y, weight, bias, pre, 2, 0.01, False, dtype)

        return run

    passes = [("forward", "", forward, few >= P)]
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        passes.append(("backward", name, backward(dtype), very_few >= P and small >= 2 * M * N))
    rows = []
    for what, gradients, run, kernel in passes:
        times = []
        for most in (2**60, 0):
            with limits(most):
                times.append(1000 * time_of(run, sets))
        rows.append(
            {
                "pass": what, "positions": P, "filters": M, "outputs": N, "gradients": gradients,
                "kernel_us": f"{times[0]:.2f}", "products_us": f"{times[1]:.2f}", "ratio": f"{times[0] / times[1]:.3f}",
                "chosen": "kernel" if kernel else "products",
                "device": torch.cuda.get_device_name(), "torch": torch.__version__,
            }
        )  # fmt: skip
        print("  ".join(str(rows[-1][name]) for name in COLUMNS[:9]), flush=True)
    return rows


@contextmanager
def limits(most: int):
    """Take the kernels up to so many positions and weights: for everything, or for nothing."""
    before = {name: getattr(kept, name) for name in LIMITS}
    for name in LIMITS:
        setattr(kept, name, most)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(kept, name, value)


if __name__ == "__main__":
    main()
