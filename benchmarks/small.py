"""The second stage of a linear layer at few positions: one kernel for its products, against cuBLAS's one by one.

    python benchmarks/small.py --out results/small.csv

Both ways are forced, whatever the layer would choose (`torch_dcl.kernels.saved_responses`), in bfloat16, with gradients
of the weights in bfloat16, as a fleet has them, and in float32, as autocast has them. Microseconds of the GPU, captured
as a CUDA graph; medians. Below 1 the kernel is faster; ``chosen`` says what the layer takes.
"""

import argparse
import itertools
from pathlib import Path
from unittest.mock import patch

import torch
from rows import write_rows

from kernels import SETS, time_of
from torch_dcl.kernels import saved_responses

COLUMNS = ["pass", "branches", "positions", "filters", "outputs", "gradients"]
COLUMNS += ["kernel_us", "products_us", "ratio", "chosen", "device", "torch"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--branches", type=int, nargs="+", default=[2, 3], choices=[2, 3])
    parser.add_argument("--positions", type=int, nargs="+", default=[1, 32, 100, 128, 256, 512])
    parser.add_argument("--filters", type=int, nargs="+", default=[64, 128, 256, 512, 1024], help="of a branch, K2/4")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for M in arguments.filters:
        for T, P in itertools.product(arguments.branches, arguments.positions):
            rows += measure(T, P, M, 4 * M)
            if arguments.out:
                write_rows(arguments.out, COLUMNS, rows)


def measure(T: int, P: int, M: int, N: int) -> list[dict[str, object]]:
    shapes = ((P, T * M), (T * M, N), (T, N), (P, N))
    sets = [[torch.randn(shape, device="cuda").bfloat16() / 4 for shape in shapes] for _ in range(SETS)]
    for given in sets:
        y, weight, bias, z = given
        given.append(saved_responses.forward(y, weight, bias, torch.empty_like(z), T, 0.01, False))

    def forward(given):
        y, weight, bias, z, _ = given
        return saved_responses.forward(y, weight, bias, torch.empty_like(z), T, 0.01, False)

    def backward(dtype):
        def run(given):
            y, weight, bias, grad, pre = given
            return saved_responses.backward(grad, y, weight, bias, pre, T, 0.01, False, dtype)

        return run

    passes = [("forward", "", forward, saved_responses.uses_one_kernel(P, T, torch.bfloat16))]
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        passes.append(("backward", name, backward(dtype), saved_responses._backward_uses_one_kernel(P, T * M * N)))
    rows = []
    for what, gradients, run, kernel in passes:
        times = []
        for forced in (lambda *_: True, lambda *_: False):
            with patch.multiple(saved_responses, uses_one_kernel=forced, _backward_uses_one_kernel=forced):
                times.append(1000 * time_of(run, sets))
        rows.append(
            {
                "pass": what, "branches": T, "positions": P, "filters": M, "outputs": N, "gradients": gradients,
                "kernel_us": f"{times[0]:.2f}", "products_us": f"{times[1]:.2f}", "ratio": f"{times[0] / times[1]:.3f}",
                "chosen": "kernel" if kernel else "products",
                "device": torch.cuda.get_device_name(), "torch": torch.__version__,
            }
        )  # fmt: skip
        print("  ".join(str(rows[-1][name]) for name in COLUMNS[:-2]), flush=True)
    return rows


if __name__ == "__main__":
    main()
