"""Whole networks, plain and converted, as users run them: ``model(x)``, ``torch.compile`` and its CUDA graphs.

    python benchmarks/networks.py --out results/networks.csv
    python benchmarks/networks.py --out results/networks-cpu.csv --device cpu --modes eager --batch 8 --dtype float32

224 × 224 images; by default batch 64, channels_last, autocast to bfloat16. ``train`` is a whole step: forward, cross-
entropy, backward and SGD with momentum, launches included; ``infer`` is a forward pass without gradients in eval mode.
Modes are ``eager``, ``compile`` (``torch.compile(model)``) and ``reduce-overhead`` (the same with CUDA graphs); the
plain network runs in the same mode. Selection ``all`` converts every unit that ``plan`` selects, ``faster`` those that
it keeps with ``select="faster"`` for that mode and phase.

A network in a mode and a phase has a process of its own, in which the plain and the converted networks take turns.
``--at-once`` processes prepare at the same time: they plan, compile and run for the first time. Units and networks
alike are timed alone: the other processes are stopped meanwhile. Times are medians over rounds, the ratio is that of
the medians, and ratio ± ``spread`` holds the 95 % interval of the median of the rounds' ratios. For ``faster``,
``plan_ratio`` and ``plan_spread`` are what the plan measured, without loss and optimiser; where no unit is left, of the
best network seen. A plan that keeps all units is the network of ``all``, which is timed once for both rows. Weights are
random, which does not change the speed. Rows are written as they come, the most telling first, and a second call
measures only what is missing, or with ``--anew`` all, row by row. ``--minutes`` ends a call in time, counted from its
start.
"""

import argparse
import contextlib
import copy
import functools
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from rows import read_rows, write_rows
from torch import nn
from torch.nn import functional as F
from torchvision import models as zoo

import torch_dcl as dcl
from torch_dcl.convert import measure as measuring
from torch_dcl.convert.measure import signature
from torch_dcl.convert.rows import Comparison
from torch_dcl.convert.trace import trace
from torch_dcl.kernels import host
from torch_dcl.models import count_weights

COLUMNS = ["network", "batch", "mode", "phase", "selection", "units", "weights_ratio", "plain_ms", "dcl_ms", "ratio"]
COLUMNS += ["spread", "rounds", "device", "torch", "plan_ratio", "plan_spread", "dtype", "layout"]
NETWORKS = ["alexnet", "vgg16", "resnet18", "resnet50", "densenet121"]
MODES = ["eager", "compile", "reduce-overhead"]
PHASES = ["train", "infer"]
SELECTIONS = ["all", "faster"]
DTYPES = ["bfloat16", "float32"]
LAYOUTS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
KEY = ["network", "batch", "mode", "phase", "selection", "dtype", "layout"]

IMPORTANCE = ["compile", "eager", "reduce-overhead"]
COMPILATION = {"train": 4.0, "infer": 2.0}
"""Roughly, seconds to compile a unit in one thread."""
PART = {"train": 0.8, "infer": 0.4}
"""Likewise a convolution or linear layer of a network with what follows it."""
START = 20
"""Seconds until a process plans, and its eager share."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=NETWORKS[:4])
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--phases", nargs="+", default=PHASES, choices=PHASES)
    parser.add_argument("--selections", nargs="+", default=SELECTIONS, choices=SELECTIONS)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="bfloat16 by autocast")
    parser.add_argument("--layout", default="channels_last", choices=LAYOUTS)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=0.05, help="of one contender in one round")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--at-once", type=int, default=1, help="processes that prepare at the same time")
    parser.add_argument("--minutes", type=float, help="after these, give up what is not measured")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--anew", action="store_true", help="measure what the file has, too, and replace it")
    parser.add_argument("--job", nargs=3, help="measure these rows in this process, a turn for each line on its input")
    began, arguments = time.monotonic(), parser.parse_args()
    host.wait()  # what is compiled in the background, once a machine
    if arguments.job:
        torch.backends.cudnn.benchmark = True
        measure(*arguments.job, arguments)
        return
    jobs = itertools.product(arguments.networks, arguments.modes, arguments.phases)
    seconds = {job: estimate(job, arguments) for job in jobs if missing(job, arguments)}
    todo = sorted(seconds, key=lambda job: (PHASES.index(job[2]), IMPORTANCE.index(job[1]), -seconds[job]))
    longest, share = max(seconds.values(), default=0), sum(seconds.values()) / arguments.at_once
    print(f"{len(todo)} processes; with preparing alone roughly {max(longest, share):.0f} s", flush=True)
    Machine(arguments, began).measure(todo)


Job = tuple[str, str, str]
"""A network, a mode and a phase."""


def missing(job: Job, arguments: argparse.Namespace) -> list[str]:
    """The selections whose rows are not there yet, or all."""
    done = {tuple(row[name] for name in KEY) for row in read_rows(arguments.out) if not arguments.anew}
    of_job, settings = (job[0], str(arguments.batch), *job[1:]), (arguments.dtype, arguments.layout)
    return [name for name in arguments.selections if (*of_job, name, *settings) not in done]


def estimate(job: Job, arguments: argparse.Namespace) -> float:
    """Roughly, the seconds of a process; and says what they are made of."""
    network, mode, phase = job
    selections = missing(job, arguments)
    units, parts = parts_of(network, arguments.size)
    if mode == "eager":
        seconds = START + (0.5 * units if "faster" in selections else 0)
    else:
        seconds = START + 2 * PART[phase] * parts  # plain and converted
        if "faster" in selections:  # again, from caches in part, and each unit twice
            seconds += 1.5 * PART[phase] * parts + 2 * COMPILATION[phase] * units
    print(f"{' '.join(job)}: {units} kinds of units, {parts} layers, roughly {seconds:.0f} s", flush=True)
    return seconds


@functools.cache
def parts_of(network: str, size: int) -> tuple[int, int]:
    """How many kinds of units are planned in a network, and how many layers it has."""
    model = getattr(zoo, network)(weights=None).to(memory_format=torch.channels_last)
    x = torch.zeros(2, 3, size, size).contiguous(memory_format=torch.channels_last)
    plan, seen = dcl.plan(model, example=x), trace(model, (x,), {})
    units = set()
    for unit in plan.selected:
        module = model.get_submodule(unit.name)
        units.add(signature(module, unit.norm and model.get_submodule(unit.norm), unit, seen.calls[module][0]))
    return len(units), len(plan.rows)


class Machine:
    """Processes that prepare beside each other, and time one at a time, while the others are stopped."""

    def __init__(self, arguments: argparse.Namespace, start: float) -> None:
        self.arguments, self.start = arguments, start
        self._turn = threading.Lock()
        self._running: dict[int, subprocess.Popen[str]] = {}
        self._over = False

    def measure(self, jobs: list[Job]) -> None:
        """Run processes in this order, as many at once as is asked for."""
        signal.signal(signal.SIGTERM, leave)
        minutes = self.arguments.minutes
        if minutes is not None:
            clock = threading.Timer(60 * minutes - (time.monotonic() - self.start), self._end)
            clock.daemon = True
            clock.start()
        threads = ThreadPoolExecutor(self.arguments.at_once)
        try:
            waiting = [threads.submit(self._measure, job) for job in jobs]
            for each in waiting:
                each.result()
        finally:
            self._end()
            threads.shutdown()

    def _measure(self, job: Job) -> None:
        with self._turn:
            if self._over:
                print(*job, "not measured: the time is up", flush=True)
                return
            process = self._running.setdefault(len(self._running), start(job, self.arguments))
        name = " ".join(job)
        for line in process.stdout or ():
            if line != TURN:
                print(f"[{time.monotonic() - self.start:4.0f} s] {name}: {line}", end="", flush=True)
                continue
            with self._turn, self._stopped(process):
                self._give_turn(process)
        if process.wait():
            print(f"{name} not measured: {'the time is up' if self._over else 'see above'}", flush=True)

    def _give_turn(self, process: subprocess.Popen[str]) -> None:
        if self._over or process.stdin is None or process.stdout is None:
            return
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(TURN)
            process.stdin.flush()
            while process.stdout.readline() not in (DONE, ""):
                pass

    @contextlib.contextmanager
    def _stopped(self, but: subprocess.Popen[str]) -> Iterator[None]:
        others = [process for process in self._running.values() if process is not but and process.poll() is None]
        for process in others:
            notify(process, signal.SIGSTOP)
        time.sleep(0.05)  # what they launched ends
        try:
            yield
        finally:
            for process in others:
                notify(process, signal.SIGCONT)

    def _end(self) -> None:
        self._over = True
        for process in list(self._running.values()):
            notify(process, signal.SIGKILL)


def leave(*_: object) -> None:
    """Exit, which ends the processes, without a second signal to interrupt that."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(1)


def notify(process: subprocess.Popen[str], what: signal.Signals) -> None:
    """Send a signal to a process and to those that compile for it."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, what)


TURN, DONE = "turn\n", "done\n"


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Wait for a turn, in which nothing else runs."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    print(TURN, end="", flush=True)
    if not sys.stdin.readline():
        raise SystemExit("nobody gives turns any more")
    try:
        yield
    finally:
        print(DONE, end="", flush=True)


def start(job: Job, arguments: argparse.Namespace) -> subprocess.Popen[str]:
    """A process that measures the rows of a network, in turns."""
    command = [sys.executable, __file__, "--job", *job, "--device", arguments.device]
    command += ["--selections", *arguments.selections]
    command += ["--out", str(arguments.out)] if arguments.out else []
    command += ["--anew"] if arguments.anew else []
    for name in ("batch", "size", "rounds", "seconds", "dtype", "layout"):
        command += [f"--{name}", str(getattr(arguments, name))]
    threads = str(max(2, (os.cpu_count() or 1) // arguments.at_once))
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": threads, **os.environ}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, process_group=0)


def measure(network: str, mode: str, phase: str, arguments: argparse.Namespace) -> None:
    """The rows of a network that are missing, with all units first."""
    batch = arguments.batch
    torch.manual_seed(0)
    layout = LAYOUTS[arguments.layout]
    plain = getattr(zoo, network)(weights=None).to(arguments.device, memory_format=layout)
    x = torch.randn(batch, 3, arguments.size, arguments.size, device=arguments.device).contiguous(memory_format=layout)
    labels = torch.randint(1000, (batch,), device=arguments.device)
    measured: dict[tuple[str, ...], tuple[Comparison, int]] = {}
    for selection in missing((network, mode, phase), arguments):
        with autocast(arguments):
            plan = choose(plain, x, mode, phase) if selection == "faster" else dcl.plan(plain, example=x[:2])
        networks = {"plain": copy.deepcopy(plain), "dcl": copy.deepcopy(plain)}
        if plan.selected:
            dcl.convert_(networks["dcl"], plan, init="random")
        weights = count_weights(networks["dcl"]) / count_weights(networks["plain"])
        units = tuple(unit.name for unit in plan.selected)
        if units not in measured:
            runs = {name: prepare(made, mode, phase, x, labels, arguments) for name, made in networks.items()}
            with alone():
                times = measuring.race(runs, rounds=arguments.rounds, seconds=arguments.seconds)
            measured[units] = measuring.judge(times["plain"], times["dcl"]), len(times["plain"])
            del runs
        del networks
        forget_compiled()
        (time, rounds), chosen = measured[units], plan.choice and plan.choice.network
        row = {
            "network": network, "batch": batch, "mode": mode, "phase": phase, "selection": selection,
            "units": len(units), "weights_ratio": f"{weights:.3f}", "plain_ms": f"{time.plain:.3f}",
            "dcl_ms": f"{time.dcl:.3f}", "ratio": f"{time.ratio:.3f}", "spread": f"{time.spread:.3f}",
            "rounds": rounds, "device": _name(arguments.device), "torch": torch.__version__,
            "plan_ratio": f"{chosen.ratio:.3f}" if chosen else "",
            "plan_spread": f"{chosen.spread:.3f}" if chosen else "",
            "dtype": arguments.dtype, "layout": arguments.layout,
        }  # fmt: skip
        print("  ".join(f"{row[name]}" for name in COLUMNS[4:-6]), flush=True)
        if arguments.out:
            with alone():  # and nobody else writes
                write_rows(arguments.out, COLUMNS, [row], KEY)


def forget_compiled() -> None:
    """Give back the memory of what was compiled and captured."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def choose(network: nn.Module, x: torch.Tensor, mode: str, phase: str) -> dcl.Plan:
    """The plan of what is faster. Contenders are compiled and warm before their turn, which others wait for."""
    timing, count = measuring.race, itertools.count(1)

    def turn(contenders: Mapping[str, Callable[[], object]], **settings: Any) -> dict[str, list[float]]:
        for run in contenders.values():
            for _ in range(3):
                run()
        with alone():
            times = timing(contenders, **settings)
        print(f"comparison {next(count)}: {measuring.judge(times['plain'], times['dcl'])} of plain", flush=True)
        return times

    measuring.race = turn
    try:
        plan = dcl.plan(network, example=x, select="faster", mode=mode, phase=phase)
    finally:
        measuring.race = timing
    forget_compiled()
    timed = [row for row in plan.rows if row.comparison]
    told = f": {plan.choice.network} of plain" if plan.choice and plan.choice.network else ""
    print(f"{len(plan.selected)} of {len(timed)} units kept{told}", flush=True)
    for row in timed:
        if not row.selected:
            print(f"without {row.name}: {row.reason}", flush=True)
    if not plan.selected:
        print(str(plan).splitlines()[0], flush=True)
    return plan


def _name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else f"CPU, {torch.get_num_threads()} threads"


def autocast(arguments: argparse.Namespace) -> torch.autocast:
    kind = arguments.device.split(":", maxsplit=1)[0]
    return torch.autocast(kind, torch.bfloat16, enabled=arguments.dtype == "bfloat16")


def prepare(
    network: nn.Module, mode: str, phase: str, x: torch.Tensor, labels: torch.Tensor, arguments: argparse.Namespace
) -> Callable[[], None]:
    """One step of the network in a mode, warm."""
    network.train(phase == "train")
    run = network
    if mode != "eager":
        run = torch.compile(network, mode=None if mode == "compile" else mode)
    optimizer = torch.optim.SGD(network.parameters(), 1e-3, momentum=0.9, weight_decay=5e-4)

    def train() -> None:
        optimizer.zero_grad()
        with autocast(arguments):
            loss = F.cross_entropy(run(x), labels)
        loss.backward()
        optimizer.step()

    def infer() -> None:
        with torch.no_grad(), autocast(arguments):
            run(x)

    step = train if phase == "train" else infer
    for _ in range(4):
        step()
    return step


if __name__ == "__main__":
    main()
