"""``plan``: find the units of a network that DCL can replace, with their cost before and after."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torch_dcl.convert.arguments import Select, UnitOptions, check_choice, check_model, check_unit_options, read_example
from torch_dcl.convert.measure import device_name, measure_network, measure_unit, signature
from torch_dcl.convert.rows import GROWS, Mode, Modules, Phase, Plan, Row, Status, Timing
from torch_dcl.convert.selection import select_faster
from torch_dcl.convert.snapshot import restored, undone
from torch_dcl.convert.trace import LAYERS, Call, Trace, copied, trace
from torch_dcl.convert.trial import trace_training
from torch_dcl.convert.units import SharedReLU, build, is_removable, kind_of, names_of, norm_obstacle, obstacle
from torch_dcl.fusion import Strategy, branch_widths
from torch_dcl.module import _DCL

__all__ = ["plan"]


@torch.inference_mode(False)  # in it torch records composite operations, and no step could be timed with its backward
def plan(
    model: nn.Module,
    input_size: Sequence[int] | None = None,
    example: Any = None,
    *,
    batch: int = 1,
    branches: int = 2,
    ratio: float = 0.25,
    width: int | Sequence[int] | None = None,
    strategy: Strategy = "deterministic",
    eps: float | None = None,
    round_to: int = 8,
    budget: float | None = None,
    measure: bool = False,
    select: Select = "smaller",
    mode: Mode = "eager",
    phase: Phase = "train",
) -> Plan:
    """Find the units worth converting: a Conv or Linear with the ReLU, or batch norm and ReLU, that follows it.

    The network runs on an example without gradients, in eval mode and, where it can, in training mode. It is not
    changed.

    Args:
        model: The network, on any device.
        input_size: The size of one input without the batch, for example ``(3, 224, 224)``; its values are random.
        example: An input instead of a size: a tensor, a tuple of arguments, or a dictionary of keyword arguments.
        batch: The number of inputs of ``input_size`` for the run and for timings; best the batch size of your training.
        branches: T of every unit.
        ratio: Filters of one branch as a fraction of the unit's output channels.
        width: The exact number of filters instead: one number, or one for each branch. A unit that it does not fit
            is not converted.
        strategy: "deterministic", or "stochastic" for three or more branches.
        eps: ε; None takes the paper's.
        round_to: The number of filters from ``ratio`` is rounded to a multiple of this.
        budget: The maximum fraction of the network's weights to keep. It selects units and their widths: the widest
            common ratio that meets it, on as few units as possible.
        measure: Whether to time every unit and the whole network, plain and converted, on the model's device.
        select: "smaller" selects every unit that has fewer weights as a DCL layer. "faster" times these units in the
            mode and the phase below (instead of the timings of ``measure``) and deselects those that are slower by more
            than the spread. Then it times the network and deselects the slowest units until the network is not slower
            than the plain one, within the spread of the measurement and 5 %. A caller's autocast applies.
        mode: How the network will run: "eager", "compile" (``torch.compile``), "reduce-overhead" (the same with CUDA
            graphs), or "graph", captured as a CUDA graph without a compiler.
        phase: The step to speed up: "train", forward and backward in training mode, or "infer", a forward pass in
            eval mode without gradients.

    Returns:
        The plan, to print, to narrow down, and to pass to ``convert_``.

    Raises:
        ValueError: an argument out of its range, an input that does not fit the model, a budget out of reach.
        TypeError: an argument of the wrong kind.
    """
    options = UnitOptions(branches, ratio, width, round_to, strategy, eps)
    check_unit_options(options, budget)
    check_model(model)
    check_choice(model, select, mode, phase, budget)
    args, kwargs, description = read_example(model, input_size, example, batch)
    with undone(model) as written:
        traced = _run(model, args, kwargs, description, sized=example is None)
        training = trace_training(model, (args, kwargs))
    rows, modules = _rows(model, traced, training, options)
    weights = sum(p.numel() for name, p in model.named_parameters() if not name.endswith("bias"))
    result = Plan(
        rows=tuple(rows),
        weights=weights,
        parameters=sum(p.numel() for p in model.parameters()),
        example=description,
        modules=Modules({row.name: modules[row.name] for row in rows}),
        inputs=(args if input_size is None else (args[0][:1].clone(),), kwargs),
    )
    if budget is not None:
        result = _meet_budget(result, options, budget, model)
    if select == "smaller" and not measure:
        return result
    with restored(model, written):
        inputs = copied((args, kwargs))
        if select == "faster":
            return select_faster(result, model, traced, inputs, mode, phase)
        return _measured(result, model, traced, *inputs)


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], description: str, *, sized: bool) -> Trace:
    try:
        return trace(model, args, kwargs)
    except Exception as error:
        remedy = (
            "Check input_size (without the batch), or pass example= with a real input"
            if sized
            else "An example is a tensor, a tuple of arguments, or a dictionary of keyword arguments"
        )
        problem = str(error) or type(error).__name__
        raise ValueError(f"{type(model).__name__} does not run on {description}: {problem}. {remedy}") from error


def _rows(
    model: nn.Module, traced: Trace, training: Trace, options: UnitOptions
) -> tuple[list[Row], dict[str, nn.Module]]:
    names = names_of(model)
    inner = {m for layer in model.modules() if isinstance(layer, _DCL) for m in layer.modules() if m is not layer}
    sharers = _sharers(model)
    rows: list[Row] = []
    modules: dict[str, nn.Module] = {}
    for module, (name, *aliases) in names.items():
        if not isinstance(module, (*LAYERS, _DCL)) or module in inner:
            continue
        layer = module.branch if isinstance(module, _DCL) else module
        calls = traced.calls.get(layer, [])
        refusal = obstacle(module) or ("the network itself, not a part of it" if not name else "")
        if not refusal and (shared := _shared(module, sharers)):
            refusal = f"its {shared} is shared with another module"
        if not refusal and module in traced.functional:
            refusal = "its weight is used functionally, without calling it"
        norm, reason = (None, refusal) if refusal else _unit(calls, traced)
        if norm is not None and not reason and (shared := _shared(norm, sharers)):
            reason = f"the {shared} of its batch norm is shared with another module"
        if not reason:
            reason = _obstacle_in_training(layer, training, norm)
        row = _row(name, tuple(aliases), module, calls, None if reason else norm, names, options)
        if not reason:
            relu, shares = _relu_behind(layer, traced, training, names)
            row = replace(row, relu=relu, shares_relu=shares)
        if not reason and not row.widths:
            reason = refusal = f"width {options.width} does not fit its {row.out_channels} output channels"
        if not reason and row.weights_after >= row.weights:
            reason = f"{GROWS} ({row.weights:,} → {row.weights_after:,} weights)"
            row = replace(row, paying_ratio=_paying_ratio(row, options.round_to))
        status: Status = "refused" if refusal else "left" if reason else "pays"
        rows.append(replace(row, status=status, reason=reason, selected=status == "pays"))
        modules[name] = module
    return rows, modules


def _unit(calls: Sequence[Call], traced: Trace) -> tuple[nn.Module | None, str]:
    """The batch norm of the unit, and the reason if the layer is not one."""
    if not calls:
        return None, "not called in the run (in eval mode)"
    reasons = [call.reason for call in calls if call.reason]
    if reasons:
        some = "" if len(reasons) == len(calls) else f" (in {len(reasons)} of {len(calls)} calls)"
        return None, reasons[0] + some
    norm = calls[0].norm
    if any(call.norm is not norm for call in calls):
        return None, "its calls are followed by different batch norms"
    if norm is None:
        return None, ""
    if traced.part_calls[norm] != len(calls):
        return None, "its batch norm serves other layers too"
    return norm, norm_obstacle(norm)


def _obstacle_in_training(layer: nn.Module, training: Trace, norm: nn.Module | None) -> str:
    """Why a unit in eval mode is none in training: its output may have more readers there, such as a second loss."""
    calls = training.calls.get(layer, [])
    reasons = [call.reason or ("another batch norm follows" if call.norm is not norm else "") for call in calls]
    if norm is not None and training.part_calls[norm] != len(calls):
        reasons.append("its batch norm serves other layers too")
    return next((f"{reason} in training" for reason in reasons if reason), "")


def _paying_ratio(row: Row, round_to: int) -> float | None:
    """The largest ratio at which a unit shrinks, with as few digits as yield that width; None if there is none."""
    per_filter = row.in_channels * math.prod(row.kernel) + row.out_channels
    fixed = row.weights_after - per_filter * sum(row.widths)  # of the batch norm of the branches
    width = (row.weights - fixed - 1) // (per_filter * row.branches) // round_to * round_to
    if width < 1:
        return None
    rounded = (round(width / row.out_channels, digits) for digits in range(2, 17))
    return next(r for r in rounded if r and branch_widths(row.out_channels, ratio=r, round_to=round_to)[0] == width)


def _relu_behind(
    layer: nn.Module, traced: Trace, training: Trace, names: dict[nn.Module, list[str]]
) -> tuple[str | None, bool]:
    """The name of the ReLU after a unit, if it is removable; whether other layers share it, in any mode."""
    calls = traced.calls[layer]
    relu = calls[0].relu
    if relu is None or any(call.relu is not relu for call in calls) or not is_removable(relu):
        return None, False
    in_training = sum(call.relu is relu for call in training.calls.get(layer, []))
    counts = traced.part_calls[relu], training.part_calls[relu]
    shares = isinstance(relu, SharedReLU) or counts != (len(calls), in_training)
    if shares and any(call.moved for call in calls):  # the ReLU receives another tensor, without the mark
        return None, False
    return names[relu][0], shares


def _sharers(model: nn.Module) -> Counter[int]:
    """The number of modules that hold each parameter and buffer; a shared module counts once."""
    return Counter(id(tensor) for module in model.modules() for tensor in _own_tensors(module).values())


def _shared(module: nn.Module, sharers: Mapping[int, int]) -> str:
    """The name of a parameter or buffer of this module that another one holds, too; empty if there is none."""
    return next((name for name, tensor in _own_tensors(module).items() if sharers[id(tensor)] > 1), "")


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def _row(
    name: str,
    aliases: tuple[str, ...],
    module: nn.Module,
    calls: Sequence[Call],
    norm: nn.Module | None,
    names: dict[nn.Module, list[str]],
    options: UnitOptions,
) -> Row:
    """The numbers of one layer before and after a conversion; the caller decides whether to convert it."""
    weight: Tensor = module.branch.weight if isinstance(module, _DCL) else module.weight  # type: ignore[assignment]
    transposed = isinstance(module, nn.modules.conv._ConvTransposeNd)
    out_channels = int(getattr(module, "out_channels", getattr(module, "out_features", 0)))
    in_channels = int(getattr(module, "in_channels", getattr(module, "in_features", 0)))
    positions = sum(math.prod(call.input_shape if transposed else call.output_shape) for call in calls)
    positions //= len(weight)
    macs = positions * (weight.numel() + (module.fusion.weight.numel() if isinstance(module, _DCL) else 0))
    parts = [module] if norm is None else [module, norm]
    before = [(n, p.numel()) for part in parts for n, p in part.named_parameters()]
    after, macs_after = before, macs
    widths: tuple[int, ...] = ()
    if not obstacle(module):
        try:
            widths = options.widths(out_channels)
        except ValueError:
            widths = ()
    if widths:
        layer = build(module, widths=widths, strategy=options.strategy, eps=options.eps, norm=norm, device="meta")
        after = [(n, p.numel()) for n, p in layer.named_parameters()]
        macs_after = positions * sum(widths) * (weight[0].numel() + out_channels)
    return Row(
        name=name,
        aliases=aliases,
        kind=kind_of(module),
        in_channels=in_channels,
        out_channels=out_channels,
        kernel=tuple(weight.shape[2:]),
        norm=None if norm is None else names[norm][0],
        calls=len(calls),
        status="left",
        reason="",
        selected=False,
        widths=widths,
        strategy=options.strategy,
        eps=options.eps,
        weights=sum(n for key, n in before if not key.endswith("bias")),
        weights_after=sum(n for key, n in after if not key.endswith("bias")),
        parameters=sum(n for _, n in before),
        parameters_after=sum(n for _, n in after),
        macs=macs,
        macs_after=macs_after,
        channels_last=all(call.gives_channels_last for call in calls),
    )


def _meet_budget(planned: Plan, options: UnitOptions, budget: float, model: nn.Module) -> Plan:
    """Select the widest common ratio that meets the budget, then as few units as possible."""
    units = [row for row in planned.rows if row.is_unit]
    allowed = budget * planned.weights
    smallest = planned.weights
    names = names_of(model)
    for ratio in _ratios(units, options):
        tried = replace(options, ratio=ratio)
        resized = {}
        for row in units:
            module = model.get_submodule(row.name)
            norm = None if row.norm is None else model.get_submodule(row.norm)
            new = _row(row.name, row.aliases, module, (), norm, names, tried)
            positions = row.macs // (math.prod(row.kernel) * row.in_channels * row.out_channels)
            macs = positions * sum(new.widths) * (math.prod(row.kernel) * row.in_channels + row.out_channels)
            changed = {name: getattr(new, name) for name in ("widths", "weights_after", "parameters_after")}
            new = replace(row, **changed, macs_after=macs, status="pays", reason="", selected=True, paying_ratio=None)
            if new.saved > 0:
                resized[row.name] = new
        after = planned.weights - sum(row.saved for row in resized.values())
        smallest = min(smallest, after)
        if after > allowed:
            continue
        slack = allowed - after
        for row in sorted(resized.values(), key=lambda row: row.saved):
            if row.saved <= slack:
                slack -= row.saved
                resized[row.name] = replace(row, selected=False)
        rows = tuple(resized.get(row.name, replace(row, selected=False)) for row in planned.rows)
        return replace(planned, rows=rows)
    raise ValueError(f"budget {budget} is out of reach: {_shortfall(planned, smallest, options)}")


def _ratios(units: Sequence[Row], options: UnitOptions) -> Iterator[float]:
    """Ratios to try, from all channels down to the narrowest branch that ``round_to`` allows."""
    steps = 64
    yield from (step / steps / options.branches for step in range(steps, 0, -1))
    ratio, widest = 1 / steps / options.branches, max((row.out_channels for row in units), default=0)
    while ratio * widest >= 1.5 * options.round_to:
        ratio /= 2
        yield ratio


def _shortfall(planned: Plan, smallest: int, options: UnitOptions) -> str:
    """Why this budget, or any, cannot be met, and the remedy."""
    reasons = Counter(row.reason for row in planned.rows if not row.is_unit)
    why = ", ".join(f"{reason} ({n})" for reason, n in reasons.most_common(3)) or "it has no Conv and no Linear"
    if not any(row.is_unit for row in planned.rows):
        return f"no layer of the network can be converted: {why}. Plan without a budget for the whole list"
    branches = "1 branch" if options.branches == 1 else f"{options.branches} branches"
    narrower = [f"lower round_to (now {options.round_to})"] if options.round_to > 1 else []
    narrower += [f"take fewer branches (now {options.branches})"] if options.branches > 1 else []
    if smallest == planned.weights:
        remedy = " or ".join(narrower) or "leave the budget out"
        return f"with {branches} of {options.round_to} filters no unit of the network gets smaller; {remedy}"
    least = math.ceil(1000 * smallest / planned.weights) / 1000
    remedy = ", or ".join(["allow more", *narrower])
    rest = f" (not converted: {why})" if reasons else ""
    return f"with {branches} the least that can be kept is {least}{rest}; {remedy}"


def _measured(planned: Plan, model: nn.Module, traced: Trace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
    timings: dict[tuple[object, ...], dict[str, Timing]] = {}
    rows = []
    for row in planned.rows:
        if row.status != "pays":
            rows.append(row)
            continue
        module = model.get_submodule(row.name)
        norm = None if row.norm is None else model.get_submodule(row.norm)
        call = traced.calls[module][0]
        key = signature(module, norm, row, call)
        if key not in timings:
            timings[key] = measure_unit(module, norm, row, call)
        rows.append(replace(row, timings=timings[key]))
    measured = replace(planned, rows=tuple(rows), device=device_name(model))
    return replace(measured, timings=measure_network(model, measured, args, kwargs) if measured.selected else None)
