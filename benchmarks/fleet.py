"""Throughput of a fleet of LeNets, compared with other ways to train many small networks on one GPU.

    python benchmarks/fleet.py --out results/fleet.csv

Every contender trains DCL-A2 with 1000 classes on MNIST-III-10 as it is written from the embedded excerpt: gather a
batch from uint8 images on the GPU, forward with dropout, loss, backward, SGD with momentum and weight decay. Products
are in the same precision for all, weights in float32.

- fleet: `torch_dcl.fleet.Fleet`, as a user gets it.
- plain: one network after another, eager torch, autocast.
- cuda-graph: the same, each step captured and replayed.
- vmap: `torch.func.vmap` over stacked weights under `torch.compile`.

The three others use a LeNet-A2 in plain operations of torch, which is faster there than the library's layer. Each is
measured in turns, and the median of the rounds is kept. The fleet is measured over whole epochs, with the drawing of
their order; the others without it.
"""

import argparse
import math
import statistics
import time
from pathlib import Path

import torch
from rows import write_rows
from torch import Tensor, nn
from torch.nn import functional as F

from torch_dcl import convert_
from torch_dcl.data.digits import generate
from torch_dcl.fleet import Fleet, Member, Schedule
from torch_dcl.models import lenet, variant_plan

COLUMNS = [
    "method", "networks", "batch", "classes", "variant", "precision", "images_per_s", "ratio_to_plain",
    "ratio_to_strongest", "peak_gib", "rounds", "device", "torch",
]  # fmt: skip
CLASSES = 1000
LR, MOMENTUM, DECAY = 0.02, 0.9, 5e-4


class PlainA2(nn.Module):
    """LeNet DCL-A2 with the fewest operations that eager torch needs for it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 20, 5), nn.Conv2d(20, 50, 5)
        self.theta = nn.Linear(800, 200, bias=False)
        self.w1, self.w2 = nn.Linear(100, 500), nn.Linear(100, 500)
        self.fc2 = nn.Linear(500, CLASSES)
        for layer in self.children():
            nn.init.uniform_(layer.weight, -(bound := math.sqrt(3 / layer.weight[0].numel())), bound)

    def forward(self, x: Tensor) -> Tensor:
        """Map images to logits."""
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2)).flatten(1)
        y1, y2 = self.theta(x).split(100, -1)
        z = (F.relu(self.w1(y1)).float() * F.relu(self.w2(y2)).float() + 0.01).sqrt().to(x.dtype)
        return self.fc2(F.dropout(z, 0.5, self.training))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, nargs="+", default=[75])
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--precision", nargs="+", default=["bfloat16"], choices=["bfloat16", "float32"])
    parser.add_argument("--methods", nargs="+", default=["fleet", "plain", "cuda-graph", "vmap"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=60_000, help="images of an epoch")
    parser.add_argument("--profile", action="store_true", help="print what a step of the fleet spends its time on")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda")
    data = generate("MNIST-III-10", "train", device=device, indices=range(arguments.images))
    rows: list[dict[str, object]] = []
    for precision in arguments.precision:
        for networks in arguments.networks:
            rows += measure(arguments, data, networks, precision)
    for row in rows:
        print("  ".join(f"{row[c]}" for c in COLUMNS), flush=True)
    if arguments.out:
        write_rows(arguments.out, COLUMNS, rows)


def measure(arguments: argparse.Namespace, data, networks: int, precision: str) -> list[dict[str, object]]:
    makers = {"fleet": fleet, "plain": plain, "cuda-graph": graphed, "vmap": mapped}
    ready, peaks = {}, {}
    for method in arguments.methods:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        try:
            ready[method] = makers[method](data, networks, arguments.batch, precision)
            ready[method]()
        except Exception as error:  # a contender that cannot run is said so, not hidden
            print(f"{method}: did not run: {type(error).__name__}: {str(error)[:300]}", flush=True)
            ready.pop(method, None)
            continue
        torch.cuda.synchronize()
        peaks[method] = (torch.cuda.max_memory_allocated() - before) / 2**30
        print(f"{method} x {networks} {precision}: ready in {time.perf_counter() - start:.1f} s", flush=True)
    speeds: dict[str, list[float]] = {method: [] for method in ready}
    for _ in range(arguments.rounds):
        for method, run in ready.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            images = run()
            torch.cuda.synchronize()
            speeds[method].append(images / (time.perf_counter() - start))
    if arguments.profile and "fleet" in ready:
        profile(ready["fleet"])
    median = {method: statistics.median(values) for method, values in speeds.items()}
    others = [value for method, value in median.items() if method != "fleet"]
    return [
        {
            "method": method, "networks": 1 if method in ("plain", "cuda-graph") else networks,
            "batch": arguments.batch, "classes": CLASSES, "variant": "A2", "precision": precision,
            "images_per_s": round(value),
            "ratio_to_plain": round(value / median["plain"], 2) if "plain" in median else "",
            "ratio_to_strongest": round(value / max(others), 2) if others else "",
            "peak_gib": round(peaks[method], 2), "rounds": arguments.rounds,
            "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        }
        for method, value in median.items()
    ]  # fmt: skip


def fleet(data, networks: int, batch: int, precision: str):
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = lenet(CLASSES)
        convert_(model, plan, init="random")
        return model

    plan = variant_plan(lenet(CLASSES), "A2")
    schedule = Schedule(epochs=1000, warmup=300)
    members = [Member(str(i), "digits", i, LR, schedule, DECAY) for i in range(networks)]
    made = Fleet(
        [build(i) for i in range(networks)], members, {"digits": data}, batch=batch, precision=precision, device="cuda"
    )

    def run() -> int:
        made.train(1)
        return networks * made.steps_per_epoch * batch

    return run


def one(data, batch: int, precision: str):
    """A network, and a function that takes one step with it."""
    images, labels = data
    model = PlainA2().cuda().train()
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM, weight_decay=DECAY, fused=True)
    order = torch.randperm(len(labels), device="cuda")
    step = torch.zeros(1, dtype=torch.int64, device="cuda")
    span = torch.arange(batch, device="cuda")

    def take() -> None:
        index = order[(step * batch + span) % len(labels)]
        x, y = images[index][:, None] / 255, labels[index]
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bfloat16"):
            loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        step.add_(1)

    return take


def plain(data, _: int, batch: int, precision: str, steps: int = 300):
    take = one(data, batch, precision)

    def run() -> int:
        for _ in range(steps):
            take()
        return steps * batch

    return run


def graphed(data, _: int, batch: int, precision: str, steps: int = 300):
    take = one(data, batch, precision)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(5):
            take()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        take()

    def run() -> int:
        for _ in range(steps):
            graph.replay()
        return steps * batch

    run.reads = take  # the graph reads what `take` holds

    return run


def mapped(data, networks: int, batch: int, precision: str, steps: int = 40):
    images, labels = data
    models = [PlainA2().cuda() for _ in range(networks)]
    parameters, _ = torch.func.stack_module_state(models)
    parameters = {name: p.detach() for name, p in parameters.items()}
    moments = {name: torch.zeros_like(p) for name, p in parameters.items()}
    base = models[0].to("meta").train()
    low = torch.bfloat16 if precision == "bfloat16" else torch.float32
    order = torch.stack([torch.randperm(len(labels), device="cuda") for _ in range(networks)])

    def loss(p: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        cast = {name: value.to(low) for name, value in p.items()}
        return F.cross_entropy(torch.func.functional_call(base, cast, x).float(), y)

    gradients = torch.func.vmap(torch.func.grad(loss), randomness="different")

    def take(index: Tensor) -> None:
        x = (images[index][:, :, None] / 255).to(low)
        found = gradients(parameters, x, labels[index])
        for name, p in parameters.items():
            moments[name].mul_(MOMENTUM).add_(found[name] + DECAY * p)
            p.sub_(LR * moments[name])

    compiled = torch.compile(take)

    def run() -> int:
        with torch.no_grad():
            for step in range(steps):
                start = step * batch % (len(labels) - batch + 1)
                compiled(order[:, start : start + batch])
        return steps * batch * networks

    return run


def profile(run) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    print(found.key_averages().table(sort_by="self_device_time_total", row_limit=40, max_name_column_width=60))


if __name__ == "__main__":
    main()
