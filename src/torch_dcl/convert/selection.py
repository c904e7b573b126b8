"""Select the units of a plan that do not make the network slower, timed in the mode in which it will run."""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from torch_dcl.convert import measure
from torch_dcl.convert.apply import convert_
from torch_dcl.convert.measure import compare, compare_unit, device_name, network_step, signature
from torch_dcl.convert.rows import SLOWER, UNCAPTURED, Choice, Comparison, Inputs, Mode, Phase, Plan, Row
from torch_dcl.convert.snapshot import temporary_mode
from torch_dcl.convert.trace import Trace
from torch_dcl.progress import EVERY, error_console, say_minutes

__all__ = ["select_faster"]

ROUNDS = 21
TURN = 2.5
"""The time of a network in a round, in units of that of a unit."""


def select_faster(planned: Plan, model: nn.Module, traced: Trace, inputs: Inputs, mode: Mode, phase: Phase) -> Plan:
    """Keep the selected units of a plan that are not slower by themselves and do not make the network slower together.

    The network is not changed.

    Raises:
        ValueError: The network does not run in the mode and the phase.
    """
    choice, progress = Choice(mode, phase, None), _Progress()
    if not planned.selected:
        return replace(planned, choice=choice)
    with temporary_mode(model, training=phase == "train"), torch.enable_grad():
        _try(model, inputs, choice, planned.example)
        rows = _time_units(planned.rows, model, traced, choice, progress)
        timed = replace(planned, rows=rows, device=device_name(model), choice=choice)
        return _time_network(timed, model, inputs, progress)


class _Progress:
    """A line on stderr now and then, between measurements: a bar that moves would be measured too."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()

    def say(self, what: str) -> None:
        """Print what is done, if nothing was printed for a while."""
        now = time.monotonic()
        if now - self._last >= EVERY:
            self._last = now
            error_console().print(f"{what} · {say_minutes(now - self._start)}", markup=False, soft_wrap=True)


def _try(model: nn.Module, inputs: Inputs, choice: Choice, example: str) -> None:
    """Run one step, so that an error shows before minutes are spent on units."""
    try:
        network_step(model, *inputs, "eager", choice.phase)()
    except Exception as error:
        if choice.phase == "infer":
            remedy = "an example that it runs on in eval mode"
        elif not any(p.requires_grad for p in model.parameters()):
            remedy = 'a parameter to train, or phase = "infer"'
        else:
            remedy = 'at least two inputs (batch=) for batch norms, targets where it needs them, or phase = "infer"'
        raise ValueError(
            f"an {choice._replace(mode='eager').step} of the network fails on {example}: {type(error).__name__}: "
            f"{error}. Give it {remedy}"
        ) from None  # the message contains the error


def _time_units(
    rows: Sequence[Row], model: nn.Module, traced: Trace, choice: Choice, progress: _Progress
) -> tuple[Row, ...]:
    """The rows with the time of every selected unit; those that are surely slower are no longer selected."""
    units = {}
    for row in rows:
        if row.selected:
            module = model.get_submodule(row.name)
            norm = None if row.norm is None else model.get_submodule(row.norm)
            call = traced.calls[module][0]
            units[row.name] = signature(module, norm, row, call), (module, norm, row, call)
    distinct = dict(units.values())
    comparisons: dict[tuple[object, ...], Comparison | None] = {}
    for key, unit in distinct.items():
        comparisons[key] = compare_unit(*unit, choice.mode, choice.phase)
        progress.say(f"{len(comparisons)} of {len(distinct)} kinds of units timed, {choice.step}")
    return tuple(
        _keep_unless_slower(replace(row, comparison=comparisons[units[row.name][0]]), choice) if row.selected else row
        for row in rows
    )


def _keep_unless_slower(row: Row, choice: Choice) -> Row:
    """The row of a unit that is surely slower deselected, with the times as the reason; other rows unchanged.

    A unit by itself waits longer for the host than in a network, and its times vary more. Where they do not tell, it is
    converted, which saves weights, and the times of the network decide.
    """
    time = row.comparison
    if time is None:
        return _deselect(row, UNCAPTURED)
    if time.ratio - time.spread <= 1:
        return row
    return _deselect(row, f"{SLOWER}: {time.dcl:.3g} ms for {time.plain:.3g} plain ({time}), {choice.step}")


def _deselect(row: Row, reason: str) -> Row:
    return replace(row, status="left", reason=reason, selected=False)


def _time_network(timed: Plan, model: nn.Module, inputs: Inputs, progress: _Progress) -> Plan:
    """The plan with as many of its units, the fastest first, as do not make the network slower."""
    choice = timed.choice
    units = sorted(timed.selected, key=lambda row: row.comparison.ratio if row.comparison else 1.0)
    if choice is None or not units:
        return timed
    device = next(model.parameters()).device
    plain = network_step(model, *inputs, choice.mode, choice.phase)

    def compared(count: int) -> Comparison:
        converted = copy.deepcopy(model)
        convert_(converted, timed.only([row.name for row in units[:count]]), init="random")
        steps = {"plain": plain, "dcl": network_step(converted, *inputs, choice.mode, choice.phase)}
        comparison = compare(steps, choice.mode, device, rounds=ROUNDS, seconds=TURN * measure.SECONDS)
        if comparison is None:
            raise ValueError(
                f"the network {UNCAPTURED}: it synchronises with the GPU, or memory is short; choose "
                'mode = "eager" or mode = "compile"'
            )
        progress.say(f"network with {count} of {len(units)} units timed, {comparison} of plain")
        return comparison

    faster, comparisons = _bisect(len(units), compared)
    deselected = {}
    for place, row in enumerate(units[faster:], faster):
        count = min(n for n in comparisons if n > place)
        among = "this unit" if count == 1 else f"the {count} fastest units"
        times = f"{comparisons[count]} with {among}, by itself {row.comparison}"
        deselected[row.name] = _deselect(row, f"{SLOWER} in the network: {times}, {choice.step}")
    network = comparisons[faster] if faster else min(comparisons.values(), key=lambda time: time.ratio)
    rows = tuple(deselected.get(row.name, row) for row in timed.rows)
    return replace(timed, rows=rows, choice=choice._replace(network=network))


def _bisect(count: int, compared: Callable[[int], Comparison]) -> tuple[int, dict[int, Comparison]]:
    """How many units can be converted without making the network slower, and the comparisons by number of units.

    All units are tried first, then bisection follows down to an eighth of them or to one: at most log2(count) + 1
    networks, each of which may have to be compiled.
    """
    comparisons: dict[int, Comparison] = {}
    faster, slower, tried = 0, count + 1, count
    while faster < tried < slower:
        comparisons[tried] = compared(tried)
        if comparisons[tried].is_slower:
            slower = tried
        else:
            faster = tried
        if faster and slower - faster <= count // 8:
            break
        tried = (faster + slower) // 2
    return faster, comparisons
