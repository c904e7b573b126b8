"""The kernels of the fusion against the bandwidth of a copy.

    python benchmarks/kernels.py --out results/kernels.csv

Bytes are counted once for every value read and every value written; the share is of the bytes a second that a large
device-to-device copy moves in the same run. Runs over several sets of inputs are captured as a CUDA graph, so that the
time is the GPU's and no run finds its inputs in the cache. Medians.
"""

import argparse
import statistics
from pathlib import Path

import torch
from rows import write_rows

from torch_dcl.kernels import elementwise

COLUMNS = ["kernel", "branches", "precision", "mib", "forward_ms", "full_ms", "forward_share", "full_share"]
COLUMNS += ["copy_tb_s", "device", "torch"]
SETS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256], help="of one response")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    bandwidth = copy_bandwidth()
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        for mib in arguments.mib:
            for branches, pairs in ((2, False), (3, False), (3, True)):
                size = mib * 2**20 // dtype.itemsize
                sets = [[torch.randn(size, device="cuda", dtype=dtype) for _ in range(branches)] for _ in range(SETS)]
                grad = torch.randn(size, device="cuda", dtype=dtype)
                eps = 10.0 ** -(2 if pairs else branches)

                def forward(pre, eps=eps, pairs=pairs):
                    return elementwise.fuse_forward(pre, eps, pairs)

                def backward(pre, eps=eps, pairs=pairs, grad=grad):
                    return elementwise.fuse_backward(grad, pre, eps, pairs)

                one, two = time_of(forward, sets), time_of(backward, sets)
                moved = [(branches + 1) * mib * 2**20, (2 * branches + 1) * mib * 2**20]
                row = {
                    "kernel": "fuse_pairs" if pairs else "fuse_branches", "branches": branches,
                    "precision": str(dtype).removeprefix("torch."), "mib": mib,
                    "forward_ms": f"{one:.4f}", "full_ms": f"{one + two:.4f}",
                    "forward_share": f"{moved[0] / (1e-3 * one) / bandwidth:.3f}",
                    "full_share": f"{sum(moved) / (1e-3 * (one + two)) / bandwidth:.3f}",
                    "copy_tb_s": f"{bandwidth / 1e12:.2f}",
                    "device": torch.cuda.get_device_name(), "torch": torch.__version__,
                }  # fmt: skip
                rows.append(row)
                print("  ".join(str(rows[-1][name]) for name in COLUMNS[:9]), flush=True)
    if arguments.out:
        write_rows(arguments.out, COLUMNS, rows)


def copy_bandwidth() -> float:
    """Bytes a second that a copy reads and writes."""
    sources = [torch.randn(2**27, device="cuda").to(torch.bfloat16) for _ in range(SETS)]
    target = torch.empty_like(sources[0])
    return 2 * target.nbytes / (1e-3 * time_of(target.copy_, sources))


def time_of(work, sets, rounds: int = 20) -> float:
    """Median milliseconds of one run."""
    work(sets[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for given in sets:
            work(given)
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / len(sets))
    return statistics.median(times)


if __name__ == "__main__":
    main()
