"""How long a unit and a network take, plain and converted: medians of interleaved rounds on the model's device.

On a GPU a unit is timed as a CUDA graph, so that it is the GPU's time: in a network launches run ahead, or are captured
or compiled away. The network itself is timed as it runs, launches included, and as a CUDA graph.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torch_dcl.convert.rows import Plan, Row, Timing
from torch_dcl.convert.trace import Call, evaluating
from torch_dcl.convert.units import build
from torch_dcl.fusion import ConceptFusion

__all__ = ["measure_network", "measure_unit", "race"]

ROUNDS = 5
SECONDS = 0.02
"""How long one contender runs in one round, at least one call."""
BRIEFLY = 0.002
"""The same for a unit captured on a GPU. Large products without a pause reach an H200's power limit after 60 to 190 ms,
and the clock goes down; how far depends on what the other contenders take, and not all slow down alike."""


def race(
    contenders: Mapping[str, Callable[[], object]], *, rounds: int = ROUNDS, seconds: float = SECONDS
) -> dict[str, float]:
    """Median milliseconds of each contender, taken in turns so that a slow spell of the machine meets them all."""
    from torch.utils.benchmark import Timer  # noqa: PLC0415  (it looks for a compiler when it is imported)

    timers = {
        name: Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
        for name, run in contenders.items()
    }
    repeats = {}
    for name, timer in timers.items():
        timer.timeit(2)  # warm-up: allocations, autotuning, lazy initialisation
        repeats[name] = max(1, int(seconds / max(timer.timeit(1).median, 1e-9)))
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name, timer in timers.items():
            times[name].append(timer.timeit(repeats[name]).median)
    return {name: 1000 * median(measured) for name, measured in times.items()}


def measure_unit(module: nn.Module, norm: nn.Module | None, row: Row, call: Call) -> dict[str, Timing]:
    """Time a unit (layer, batch norm, ReLU), the DCL layer in its place, and the low-rank layer of equal weights."""
    weight = next(module.parameters())
    plain = [copy.deepcopy(module)] + ([] if norm is None else [copy.deepcopy(norm)]) + [nn.ReLU()]
    networks = {
        "plain": nn.Sequential(*plain),
        "dcl": build(module, widths=row.widths, strategy=row.strategy, eps=row.eps, norm=norm),
        "low_rank": build(module, widths=(row.low_rank_width,), eps=0.0, norm=norm),
    }
    x = torch.randn(call.input_shape, device=weight.device, dtype=call.dtype)
    if norm is not None and x.shape[0] == 1:
        x = torch.cat([x, torch.randn_like(x)])  # a batch norm in training wants more than one value
    if call.channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    forwards = {name: _forward(network.eval(), x) for name, network in networks.items()}
    forward = _race_on_device(forwards, x)
    for network in networks.values():
        _take_charge(network)
    fulls = {name: _full(network.train(), x) for name, network in networks.items()}
    full = _race_on_device(fulls, x)
    return {name: Timing(forward[name], full[name]) for name in networks}


def measure_network(model: nn.Module, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Timing]:
    """Time the whole network, plain and converted, on the example, in eval mode; on a GPU also as CUDA graphs."""
    from torch_dcl.convert.apply import convert_  # noqa: PLC0415  (it imports the plan, which measures)

    converted = copy.deepcopy(model)
    convert_(converted, plan, init="random")
    networks = {"plain": model, "dcl": converted}

    def outputs(network: nn.Module) -> list[Tensor]:
        leaves = tree_leaves(network(*args, **kwargs))
        return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]

    def forward(network: nn.Module) -> None:
        with torch.no_grad():
            outputs(network)

    def full(network: nn.Module) -> None:
        total = sum((t.float().sum() for t in outputs(network) if t.requires_grad), torch.zeros(()))
        torch.autograd.grad(total, trainable[id(network)], allow_unused=True)

    trainable = {id(n): [p for p in n.parameters() if p.requires_grad] for n in networks.values()}
    runs: list[Mapping[str, Callable[[], None]]] = [{name: partial(forward, n) for name, n in networks.items()}]
    with evaluating(model), evaluating(converted), torch.enable_grad():
        if all(trainable.values()) and any(t.requires_grad for t in outputs(model)):
            runs.append({name: partial(full, n) for name, n in networks.items()})
        times = [race(run) for run in runs]
        captured = [_captured(run, next(model.parameters()).device) for run in runs]
        if all(captured):
            for measured, graphs in zip(times, captured, strict=True):
                measured |= {f"{name}, captured": ms for name, ms in race(graphs or {}).items()}
    forwards, fulls = times if len(times) > 1 else (times[0], {})
    return {name: Timing(ms, fulls.get(name)) for name, ms in forwards.items()}


def _race_on_device(contenders: Mapping[str, Callable[[], None]], x: Tensor) -> dict[str, float]:
    """Race them as CUDA graphs on a GPU; as they are elsewhere, or where one of them cannot be captured."""
    graphs = _captured(contenders, x.device)
    return race(graphs, seconds=BRIEFLY) if graphs else race(contenders)


def _captured(
    contenders: Mapping[str, Callable[[], None]], device: torch.device
) -> Mapping[str, Callable[[], None]] | None:
    """The contenders as CUDA graphs; None where there are none, or where one of them cannot be captured."""
    if device.type != "cuda":
        return None
    graphs: dict[str, Callable[[], None]] = {}
    with torch.cuda.device(device):
        for name, run in contenders.items():
            stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(stream):
                    for _ in range(3):  # allocations, autotuning, compilation
                        run()
                    with _never_waiting():
                        run()
                torch.cuda.current_stream().wait_stream(stream)
                with torch.cuda.graph(graph):
                    run()
            except RuntimeError:  # something in it asks the CPU, or there is no memory for it
                torch.cuda.synchronize()
                _capture_nothing()
                return None
            graphs[name] = graph.replay
    return graphs


@contextlib.contextmanager
def _never_waiting() -> Iterator[None]:
    """Let torch raise what would make the CPU wait for the GPU: cheaper to find out so than by a capture that fails."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _capture_nothing() -> None:
    """Put torch's random numbers right: after a capture that failed they think that it still goes on."""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")


def _take_charge(network: nn.Module) -> None:
    """A timing is not a training: no need to warn that nobody advances the branches."""
    for module in network.modules():
        if isinstance(module, ConceptFusion):
            module.advanced = True


def _forward(network: nn.Module, x: Tensor) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            network(x)

    return run


def _full(network: nn.Module, x: Tensor) -> Callable[[], None]:
    """Forward and backward with a gradient that lies in memory as the output does, as it comes in a network.

    That of a sum is one number seen from everywhere, which some layers read as it is and others copy first.
    """
    x = x.clone().requires_grad_()
    inputs = [x, *(p for p in network.parameters() if p.requires_grad)]
    with torch.no_grad():
        grad = torch.randn_like(network(x))

    def run() -> None:
        torch.autograd.grad(network(x), inputs, grad)

    return run
