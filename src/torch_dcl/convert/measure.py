"""Latency of a unit and of a network, plain and converted: medians of interleaved rounds on the model's device.

Without a mode a unit on a GPU is timed as a CUDA graph, so that only the GPU's time counts: in a network, launches run
ahead or are captured or compiled away. The network itself is timed eagerly, launches included, and as a CUDA graph.
Where units are selected by time, both are timed in the mode in which the network will run.

A caller's autocast applies to every forward pass. As in a training loop, it is off in the backward pass, and weights
are cast again in each step.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torch_dcl.convert.apply import convert_
from torch_dcl.convert.rows import Comparison, Mode, Phase, Plan, Row, Timing
from torch_dcl.convert.samples import output_tensors
from torch_dcl.convert.trace import Call, evaluating
from torch_dcl.convert.units import build, copy_flags, is_channels_last, kind_of, layer_weight, norm_settings
from torch_dcl.fusion import ConceptFusion
from torch_dcl.kernels import host

if TYPE_CHECKING:
    from torch.utils.benchmark import Timer

__all__ = [
    "compare", "compare_unit", "device_name", "judge", "measure_network", "measure_unit", "network_step", "race",
    "signature",
]  # fmt: skip

ROUNDS = 5
UNIT_ROUNDS = 9
"""Rounds of a unit in a selection by time: the fewest whose spread leaves out the slowest and the fastest round."""
FEWEST = 7
SECONDS = 0.02
"""The time of each contender in a round; at least one call."""
BRIEFLY = 0.002
"""The same for a captured unit on a GPU. Large products without a pause reach an H200's power limit after 60 to 190 ms
and lower its clock; how far depends on what the other contenders draw, and not all slow down alike."""


def race(
    contenders: Mapping[str, Callable[[], object]], *, rounds: int = ROUNDS, seconds: float | None = None
) -> dict[str, list[float]]:
    """Milliseconds of each contender in each round. They take turns, so that a slow spell of the machine affects all.

    A turn has about this many seconds, at least one call; None for ``SECONDS``. Where calls are longer there are fewer
    rounds, as many as fit into the same time, and at least ``FEWEST``. No time is zero.
    """
    from torch.utils.benchmark import Timer  # it looks for a compiler when it is imported

    if torch.cuda.is_available():
        host.wait()  # networks run with it, except in their first seconds on a machine
    seconds = SECONDS if seconds is None else seconds
    timers = {
        name: Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
        for name, run in contenders.items()
    }
    repeats = {}
    for name, timer in timers.items():
        timer.timeit(2)  # warm-up: allocations, autotuning, lazy initialisation
        repeats[name] = _repeats(timer, seconds)
    times: dict[str, list[float]] = {name: [] for name in timers}
    spent, limit = 0.0, 1.5 * rounds * seconds * len(timers)
    for done in range(rounds):
        if done >= FEWEST and spent > limit:
            break
        for name, timer in timers.items():
            times[name].append(1000 * timer.timeit(repeats[name]).median)
            spent += repeats[name] * times[name][-1] / 1000
    return times


def _repeats(timer: "Timer", seconds: float) -> int:
    """How many calls a turn has: one alone may be shorter than the clock's tick, or mostly wait for the GPU."""
    repeats = 1
    while (took := repeats * timer.timeit(repeats).median) < seconds / 2:
        repeats = min(10 * repeats, math.ceil(repeats * seconds / took))
    return repeats


def compare(
    steps: Mapping[str, Callable[[], None]],
    mode: Mode,
    device: torch.device,
    *,
    rounds: int = ROUNDS,
    seconds: float | None = None,
) -> Comparison | None:
    """Race the steps of "plain" and "dcl"; None in mode "graph" where one of them cannot be captured."""
    contenders = _captured(steps, device) if mode == "graph" else steps
    if contenders is None:
        return None
    times = race(contenders, rounds=rounds, seconds=seconds)
    return judge(times["plain"], times["dcl"])


def judge(plain: Sequence[float], dcl: Sequence[float]) -> Comparison:
    """Compare the times of the same rounds of a plain and a converted unit or network."""
    ratios = sorted(b / a for a, b in zip(plain, dcl, strict=True))
    outside = _outside(len(ratios))
    medians = median(plain), median(dcl)
    ratio = medians[1] / medians[0]
    return Comparison(*medians, max(ratio - ratios[outside], ratios[-1 - outside] - ratio))


def _outside(count: int) -> int:
    """How many of some independent values lie on either side of the 95 % interval of their median.

    Fewer than k of n values lie below the true median as rarely as n fair coins show fewer than k heads.
    """
    k, tail = 0, 2.0**-count
    while 2 * tail <= 0.05:
        k += 1
        tail += math.comb(count, k) / 2.0**count
    return max(0, k - 1)


def signature(module: nn.Module, norm: nn.Module | None, row: Row, call: Call) -> tuple[object, ...]:
    """Everything that the time of a unit depends on: units with equal signatures are timed once."""
    weight = layer_weight(module)
    settings = None if norm is None else (type(norm).__name__, *_settings(norm))
    flags = tuple(p.requires_grad for part in (module, norm) if part is not None for p in part.parameters())
    inputs = (call.input_shape, call.dtype, call.channels_last, call.needs_grad)
    tensor = (weight.dtype, weight.device, is_channels_last(weight))
    return kind_of(module), module.extra_repr(), *tensor, flags, settings, *inputs, row.widths, row.strategy, row.eps


def compare_unit(
    module: nn.Module, norm: nn.Module | None, row: Row, call: Call, mode: Mode, phase: Phase
) -> Comparison | None:
    """Time a unit and the DCL layer that replaces it; None in mode "graph" where one of them cannot be captured.

    In mode "reduce-overhead" the compiled unit is captured: a network launches one graph, not one for each unit.
    """
    networks, x = _contenders(module, norm, row, call)
    del networks["low_rank"]
    steps = {}
    for name, network in networks.items():
        run = _in_mode(network.train(phase == "train"), "compile" if mode == "reduce-overhead" else mode)
        steps[name] = _full(network, x, run) if phase == "train" else _forward(run, x)
    if mode in ("graph", "reduce-overhead"):
        captured = compare(steps, "graph", x.device, rounds=UNIT_ROUNDS, seconds=BRIEFLY)
        if captured is not None or mode == "graph":
            return captured
    return compare(steps, mode, x.device, rounds=UNIT_ROUNDS)


def network_step(
    network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode, phase: Phase
) -> Callable[[], None]:
    """A training step of a network (forward and backward, no optimiser) or a forward pass, in a mode, for a race."""
    _silence_warnings(network)
    run = _in_mode(network, mode)
    return _network_full(network, args, kwargs, run) if phase == "train" else _forward(run, *args, **kwargs)


def measure_unit(module: nn.Module, norm: nn.Module | None, row: Row, call: Call) -> dict[str, Timing]:
    """Time a unit (layer, batch norm, ReLU), its DCL layer, and the low-rank layer of equal weights."""
    networks, x = _contenders(module, norm, row, call)
    forward = _race_on_device({name: _forward(network.eval(), x) for name, network in networks.items()}, x)
    with torch.enable_grad():
        full = _race_on_device({name: _full(network.train(), x) for name, network in networks.items()}, x)
    return {name: Timing(forward[name], full[name]) for name in networks}


def measure_network(model: nn.Module, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Timing]:
    """Time the whole network, plain and converted, on the example, in eval mode; on a GPU also as CUDA graphs."""
    converted = copy.deepcopy(model)
    convert_(converted, plan, init="random")
    networks = {"plain": model, "dcl": converted}
    runs: list[Mapping[str, Callable[[], None]]] = [
        {name: _forward(network, *args, **kwargs) for name, network in networks.items()}
    ]
    with evaluating(model), evaluating(converted), torch.enable_grad():
        trains = all(any(p.requires_grad for p in network.parameters()) for network in networks.values())
        if trains and any(t.requires_grad for t in output_tensors(model(*args, **kwargs))):
            runs.append({name: _network_full(network, args, kwargs) for name, network in networks.items()})
        times = [_medians(race(run)) for run in runs]
        captured = [_captured(run, next(model.parameters()).device) for run in runs]
        if all(captured):
            for measured, graphs in zip(times, captured, strict=True):
                measured |= {f"{name}, captured": ms for name, ms in _medians(race(graphs or {})).items()}
    forwards, fulls = times if len(times) > 1 else (times[0], {})
    return {name: Timing(ms, fulls.get(name)) for name, ms in forwards.items()}


def device_name(model: nn.Module) -> str:
    """The name of the device of a network, for the table."""
    device = next(model.parameters()).device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"cpu, {threads} thread{'s' if threads > 1 else ''}"
    return device.type


def _settings(norm: nn.Module) -> tuple[object, ...]:
    """The settings of a batch norm; torchvision's frozen one has only its ε."""
    return tuple(norm_settings(norm).values()) if hasattr(norm, "momentum") else (norm.eps,)


def _contenders(module: nn.Module, norm: nn.Module | None, row: Row, call: Call) -> tuple[dict[str, nn.Module], Tensor]:
    """A unit, the DCL layer that replaces it and the low-rank layer of equal weights, with an input like the call's."""
    weight = layer_weight(module)
    plain = [copy.deepcopy(module)] + ([] if norm is None else [copy.deepcopy(norm)]) + [nn.ReLU()]
    layers = {
        "dcl": build(module, widths=row.widths, strategy=row.strategy, eps=row.eps, norm=norm),
        "low_rank": build(module, widths=(row.low_rank_width,), eps=0.0, norm=norm),
    }
    for layer in layers.values():
        copy_flags(layer, module, norm)
    networks: dict[str, nn.Module] = {"plain": nn.Sequential(*plain), **layers}
    for network in networks.values():
        _silence_warnings(network)
    x = torch.randn(call.input_shape, device=weight.device, dtype=call.dtype)
    if norm is not None and math.prod(call.output_shape) == len(weight):
        x = torch.cat([x, torch.randn_like(x)])  # a batch norm in training needs more than one value per channel
    if call.channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    return networks, x.requires_grad_(call.needs_grad)


def _in_mode(network: nn.Module, mode: Mode) -> Callable[..., Any]:
    """The network, or a compiled function that calls it. Capture happens later, of the whole step.

    Each network is compiled with a code object of its own: torch keeps at most eight compiled results for a code object
    and runs the rest uncompiled. It also frees the result with the network.
    """
    if mode not in ("compile", "reduce-overhead"):
        return network

    def call(*args: Any, **kwargs: Any) -> Any:
        return network(*args, **kwargs)

    call.__code__ = call.__code__.replace()
    return torch.compile(call, dynamic=False, mode=None if mode == "compile" else mode)


def _medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: median(measured) for name, measured in times.items()}


def _race_on_device(contenders: Mapping[str, Callable[[], None]], x: Tensor) -> dict[str, float]:
    """Race contenders as CUDA graphs on a GPU; eagerly elsewhere, or where one of them cannot be captured."""
    graphs = _captured(contenders, x.device)
    return _medians(race(graphs, seconds=BRIEFLY) if graphs else race(contenders))


def _captured(
    contenders: Mapping[str, Callable[[], None]], device: torch.device
) -> Mapping[str, Callable[[], None]] | None:
    """The contenders as CUDA graphs; None without a GPU, or where one of them cannot be captured."""
    if device.type != "cuda":
        return None
    host.wait()  # a compiler decides by what is there
    graphs: dict[str, Callable[[], None]] = {}
    with torch.cuda.device(device):
        for name, run in contenders.items():
            stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(stream):
                    for _ in range(3):  # allocations, autotuning, compilation
                        run()
                    with _synchronisation_raises():
                        run()
                torch.cuda.current_stream().wait_stream(stream)
                with torch.cuda.graph(graph):
                    run()
            except RuntimeError:  # it synchronises with the CPU, or memory runs out
                torch.cuda.synchronize()
                _reset_generator()
                return None
            graphs[name] = graph.replay
    return graphs


@contextlib.contextmanager
def _synchronisation_raises() -> Iterator[None]:
    """Raise an error where the CPU would wait for the GPU, which is cheaper to find than by a failed capture."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _reset_generator() -> None:
    """Reset torch's generator, which a failed capture leaves in capture mode, by an empty capture."""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")


def _silence_warnings(network: nn.Module) -> None:
    """Silence the warning that nothing advances the branches: a timing is no training."""
    for module in network.modules():
        if isinstance(module, ConceptFusion):
            module.advanced = True


def _forward(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], None]:
    def step() -> None:
        with torch.no_grad():
            run(*args, **kwargs)
        torch.clear_autocast_cache()

    return step


def _full(network: nn.Module, x: Tensor, run: Callable[..., Any] | None = None) -> Callable[[], None]:
    """Forward and backward with a gradient in the memory layout of the output, as in a network.

    The gradient of a sum is one expanded number, which some layers read as it is and others copy first. Where neither
    the unit nor anything before it is trained, a training step has no backward.
    """
    called = run or network
    inputs = [t for t in (x, *network.parameters()) if t.requires_grad]
    if not inputs:
        return _forward(called, x)
    with torch.no_grad():
        grad = torch.randn_like(network(x))
    torch.clear_autocast_cache()

    def step() -> None:
        _differentiate(called(x), inputs, grad)

    return step


def _network_full(
    network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any] | None = None
) -> Callable[[], None]:
    """Forward and backward of a whole network, from the sum of its outputs."""
    called = run or network
    inputs = [p for p in network.parameters() if p.requires_grad]

    def step() -> None:
        outputs = [t for t in output_tensors(called(*args, **kwargs)) if t.requires_grad]
        if not outputs:
            raise ValueError("none of its outputs has a gradient")
        _differentiate(sum((t.float().sum() for t in outputs), torch.zeros(())), inputs, None)

    return step


def _differentiate(output: Tensor, inputs: Sequence[Tensor], grad: Tensor | None) -> None:
    """The backward pass outside of the caller's autocast. Cached casts of weights are dropped, as after a step."""
    kind = output.device.type
    enabled = torch.is_autocast_enabled(kind)
    torch.set_autocast_enabled(kind, False)
    try:
        torch.autograd.grad(output, inputs, grad, allow_unused=True)
    finally:
        torch.set_autocast_enabled(kind, enabled)
        torch.clear_autocast_cache()
