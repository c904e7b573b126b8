"""A DCL layer compared with the layer that it replaces, and with other layers of equal weights.

    python benchmarks/layers.py --out results/layers.csv

bf16 weights and activations (or float32 with TF32), cudnn.benchmark on, channels_last but for `-contiguous`, which is
torch's default. Forward, and forward with backward, are captured as CUDA graphs, so that the time is the GPU's; medians
of rounds in which the contenders take turns, each for a few replays and with a pause behind them. Without pauses large
products reach the GPU's power limit and its clock goes down, for one contender by what the others take. How a step does
at that limit is measured by itself: ``sustained`` is the contender alone, replayed without a pause for a quarter of a
second, the second half of it. The ratio is always to the fastest plain variant of the case, eager or compiled. `dcl`
is the layer as a user gets it, and the run fails if its kernels did not run; `dcl-reference` is the same without them.
`plan` is what ``plan(measure=True)`` says of the same layer by its own clock, beside the eager plain layer. `tensorly`
is a Tucker convolution of about the same weights, where tensorly-torch is installed.

AlexNet's cases are whole training steps with SGD, momentum and weight decay: as networks are trained, compiled (`plain`
and `dcl`; eager ones are `plain-eager`, `dcl-eager`), with float32 weights under bf16 autocast, and in `-pure` with
weights and momenta in bf16. The norms and the first convolution are the library's own in the plain network too, so
that what the two have in common is as fast as we can make it.

``--compilations`` compiles each contender that is compiled so often (see ``trials.py``); the median is over all.
"""

import argparse
import importlib.util
import math
import statistics
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import torch
import trials
from rows import write_rows
from torch import nn

import torch_dcl as dcl
from torch_dcl.kernels import dispatch
from torch_dcl.models import alexnet, count_weights, variant_plan

COLUMNS = ["case", "contender", "precision", "forward_ms", "full_ms", "forward_ratio", "full_ratio", "peak_mib"]
COLUMNS += ["sustained_ms", "sustained_ratio", "compilations", "device", "torch"]
QUARTERS = {"branches": 2, "ratio": 1 / 4}


def conv(channels: int, side: int, batch: int, kernel: int = 3, **settings) -> Callable:
    def build():
        plain = nn.Sequential(nn.Conv2d(channels, channels, kernel, padding=kernel // 2), nn.ReLU())
        made = {
            "plain": plain,
            "dcl": dcl.DCLConv2d.like(plain[0], **{**QUARTERS, **settings}),
            "low-rank": nn.Sequential(
                nn.Conv2d(channels, channels // 2, kernel, padding=kernel // 2, bias=False),
                nn.Conv2d(channels // 2, channels, 1), nn.ReLU(),
            ),
        }  # fmt: skip
        if importlib.util.find_spec("tltorch"):
            made["tensorly"] = nn.Sequential(tucker(plain[0], made["dcl"]), nn.ReLU())
        return made, torch.randn(batch, channels, side, side), {**QUARTERS, **settings}

    return build


def tucker(plain: nn.Conv2d, like: nn.Module) -> nn.Module:
    """A factorised convolution with no more weights than another layer."""
    import tltorch

    share = count_weights(like) / count_weights(plain)
    return tltorch.FactorizedConv.from_conv(
        plain, rank=share, factorization="tucker", implementation="factorized", decompose_weights=False
    )


def linear(features: int, outputs: int, batch: int, **settings) -> Callable:
    def build():
        plain = nn.Sequential(nn.Linear(features, outputs), nn.ReLU())
        made = {
            "plain": plain,
            "dcl": dcl.DCLLinear.like(plain[0], **{**QUARTERS, **settings}),
            "low-rank": nn.Sequential(
                nn.Linear(features, outputs // 2, bias=False), nn.Linear(outputs // 2, outputs), nn.ReLU()
            ),
        }
        return made, torch.randn(batch, features), {**QUARTERS, **settings}

    return build


def whole_alexnet(batch: int) -> Callable:
    def build():
        plain = alexnet()
        converted = deepcopy(plain)
        dcl.convert_(converted, variant_plan(converted, "A2"), init="random")
        return {"plain": plain, "dcl": converted}, torch.randn(batch, 3, 227, 227), None

    return build


CASES: dict[str, Callable] = {
    "conv512": conv(512, 28, 64),
    "conv256": conv(256, 56, 64),
    "fc-b1024": linear(9216, 4096, 1024),
    "fc-b256": linear(9216, 4096, 256),
    "conv512-t3": conv(512, 28, 64, branches=3, ratio=1 / 6, round_to=16),
    "conv512-t3s": conv(512, 28, 64, branches=3, ratio=1 / 6, round_to=16, strategy="stochastic"),
    "conv512-1x1": conv(512, 28, 64, kernel=1),
    "conv512-b1": conv(512, 28, 1),
    "conv512-b8": conv(512, 28, 8),
    "conv512-contiguous": conv(512, 28, 64),
    "conv256-contiguous": conv(256, 56, 64),
    "fc-b1": linear(9216, 4096, 1),
    "fc-b32": linear(9216, 4096, 32),
    "alexnet-b256": whole_alexnet(256),
    "alexnet-b32": whole_alexnet(32),
    "alexnet-b256-pure": whole_alexnet(256),
    "alexnet-b32-pure": whole_alexnet(32),
}
PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32}
IN_FLOAT32 = ["conv512", "conv256", "fc-b1024", "fc-b256"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), help="all; in float32 the main ones")
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--precision", nargs="+", default=list(PRECISIONS), choices=list(PRECISIONS))
    parser.add_argument("--compilations", type=int, default=1, help="of each contender, with trials of their own")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    trials.inherit_none()
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True  # of float32
    rows = []
    for precision in arguments.precision:
        for case in arguments.cases or (IN_FLOAT32 if precision == "float32" else CASES):
            found = measure(case, precision, arguments)
            rows += found
            for row in found:
                print("  ".join(str(row[name]) for name in COLUMNS[:8]), flush=True)
            if arguments.out:  # after every case, so that a run that is cut off leaves what it has
                write_rows(arguments.out, COLUMNS, rows)


def measure(case: str, precision: str, arguments: argparse.Namespace) -> list[dict[str, object]]:
    torch.manual_seed(0)
    trials.forget()
    made, x, settings = CASES[case]()
    last = x.dim() == 4 and not case.endswith("-contiguous")
    layout = torch.channels_last if last else torch.contiguous_format
    training = settings is None
    mixed = training and precision == "bfloat16" and not case.endswith("-pure")
    dtype = torch.float32 if mixed else PRECISIONS[precision]
    x = x.to("cuda", dtype).contiguous(memory_format=layout)
    ready: dict[str, nn.Module] = {}
    compiled: dict[str, nn.Module] = {}
    for name, given in made.items():
        module = given.to("cuda", dtype, memory_format=layout).train()
        if name == "dcl":
            dcl.advance_branches_(module, 0)
            with dispatch.watch() as ran, autocast(mixed):
                module(x)
            if any(path.endswith("reference") for path in ran) or not ran:
                raise SystemExit(f"{case}: the kernels were meant to run, but {dict(ran)}")
            if not training:
                ready["dcl-reference"] = deepcopy(module)
        both = arguments.compiled and name in ("plain", "dcl")
        ready[f"{name}-eager" if training and both else name] = module
        if both:  # under the plain name, as whole networks are trained
            compiled[name if training else f"{name}-compiled"] = deepcopy(module)
    graphs = [(name, *capture(name, module, x, training=training, mixed=mixed)) for name, module in ready.items()]
    for turn in range(arguments.compilations):
        if turn:
            trials.forget()
        for name, module in compiled.items():
            again = torch.compile(deepcopy(module))
            graphs.append((name, *capture(name, again, x, training=training, mixed=mixed)))
    median = in_turns(graphs, arguments.rounds)
    fastest = [min(median[name][i] for name in median if name.startswith("plain")) for i in range(3)]
    peaks = {name: peak for name, _, _, peak in graphs}
    found = [(name, both, fastest, f"{peaks[name]:.0f}") for name, both in median.items()]
    if settings is not None:
        timings = dcl.plan(made["plain"], example=x.detach(), measure=True, **settings).rows[0].timings
        if timings:  # a unit that is not worth converting is not timed
            found.append(("plan", timings["dcl"], timings["plain"], ""))
    return [
        {
            "case": case, "contender": name, "precision": precision,
            "forward_ms": f"{forward:.4f}", "full_ms": f"{full:.4f}",
            "forward_ratio": f"{forward / beside[0]:.3f}", "full_ratio": f"{full / beside[1]:.3f}", "peak_mib": peak,
            "sustained_ms": f"{limit[0]:.4f}" if limit else "",
            "sustained_ratio": f"{limit[0] / beside[2]:.3f}" if limit else "",
            "compilations": arguments.compilations if name in compiled else "",
            "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        }
        for name, (forward, full, *limit), beside, peak in found
    ]  # fmt: skip


def autocast(enabled: bool) -> torch.autocast:
    """What is cast is not kept for a second use: a graph must find it cast anew."""
    return torch.autocast("cuda", torch.bfloat16, enabled=enabled, cache_enabled=False)


def capture(name: str, module: nn.Module, x: torch.Tensor, *, training: bool, mixed: bool):
    """Graphs of a forward pass and of a whole step, and the memory of a step in MiB."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(not training)
    optimizer = torch.optim.SGD(module.parameters(), 1e-4, 0.9, weight_decay=5e-4, fused=True) if training else None
    grad: torch.Tensor | None = None
    quiet = dispatch.disabled() if name == "dcl-reference" else None

    def forward() -> torch.Tensor:
        with autocast(mixed):
            return module(x)

    def full() -> None:
        nonlocal grad
        for parameter in (*module.parameters(), x):
            parameter.grad = None
        z = forward()
        grad = torch.randn_like(z) if grad is None else grad
        z.backward(grad)
        if optimizer is not None:
            optimizer.step()

    if quiet is not None:
        quiet.__enter__()
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(5):
                full()
                no_grad(forward)()  # a compiled network is compiled once more for it
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        full()
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        graphs = []
        for work in (no_grad(forward), full):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                work()
            graphs.append(graph)
    finally:
        if quiet is not None:
            quiet.__exit__(None, None, None)
    graphs[1].keep = (module, optimizer, x, grad)  # what the graph reads
    return graphs[0], graphs[1], peak


def in_turns(graphs: list[tuple], rounds: int) -> dict[str, list[float]]:
    """Median milliseconds of each contender, over all its compilations: forward, full, and full at the power limit."""
    times: dict[str, tuple[list[float], ...]] = {name: ([], [], []) for name, *_ in graphs}
    for _ in range(rounds):
        for name, forward, full, _ in graphs:
            times[name][0].append(spent(forward))
            times[name][1].append(spent(full))
    for name, _, full, _ in graphs:
        times[name][2].append(sustained(full, statistics.median(times[name][1])))
    return {name: [statistics.median(values) for values in measured] for name, measured in times.items()}


def no_grad(work: Callable) -> Callable:
    def run() -> None:
        with torch.no_grad():
            work()

    return run


def spent(graph: torch.cuda.CUDAGraph, repeats: int = 5) -> float:
    """Milliseconds of one replay; with a pause twice as long as all of them, so that power stays below its limit."""
    graph.replay()
    ms = replayed(graph, repeats)
    time.sleep(2 * (repeats + 1) * ms / 1000)
    return ms


def sustained(graph: torch.cuda.CUDAGraph, ms: float, seconds: float = 0.25) -> float:
    """Milliseconds of one replay in the second half of so many seconds."""
    repeats = math.ceil(500 * seconds / ms)
    for _ in range(repeats):
        graph.replay()
    return replayed(graph, repeats)


def replayed(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    """Milliseconds of one replay of several in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


if __name__ == "__main__":
    main()
