"""The units of a plan that make the network faster, by time measured in the way that it will run."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from torch_dcl.convert import measure
from torch_dcl.convert.apply import convert_
from torch_dcl.convert.measure import compare, compare_unit, device_name, network_step, signature
from torch_dcl.convert.rows import SLOWER, UNCAPTURED, Choice, Comparison, Inputs, Mode, Phase, Plan, Row
from torch_dcl.convert.trace import Trace
from torch_dcl.convert.trial import undisturbed

__all__ = ["select_faster"]

ROUNDS = 7
TURN = 5
"""A turn of a network is this many times as long as one of a unit."""


def select_faster(given: Plan, model: nn.Module, seen: Trace, inputs: Inputs, mode: Mode, phase: Phase) -> Plan:
    """Of the units that a plan selects, keep those that are faster, and of these as many as the network is with.

    The network is left as it was.

    Raises:
        ValueError: the network does not run in the mode and the phase.
    """
    choice = Choice(mode, phase, None)
    with undisturbed(model, training=phase == "train"), torch.enable_grad():
        _try(model, inputs, choice, given.example)
        timed = replace(given, rows=_timed(given.rows, model, seen, choice), device=device_name(model), choice=choice)
        return _checked(timed, model, inputs)


def _try(model: nn.Module, inputs: Inputs, choice: Choice, example: str) -> None:
    """Run one step before minutes are spent on units."""
    try:
        network_step(model, *inputs, "eager", choice.phase)()
    except Exception as error:
        remedy = (
            'two inputs or more (batch=) for batch norms, targets where it takes them, or phase = "infer"'
            if choice.phase == "train"
            else "an example that it runs on in eval mode"
        )
        raise ValueError(
            f"a {choice._replace(mode='eager').step} of the network fails on {example}: {type(error).__name__}: "
            f"{error}. Give it {remedy}"
        ) from None  # the message has it


def _timed(rows: Sequence[Row], model: nn.Module, seen: Trace, choice: Choice) -> tuple[Row, ...]:
    """The rows with the time of every unit that is selected, and without those that are not faster."""
    known: dict[tuple[object, ...], Comparison | None] = {}
    result = []
    for row in rows:
        if not row.selected:
            result.append(row)
            continue
        module = model.get_submodule(row.name)
        norm = None if row.norm is None else model.get_submodule(row.norm)
        call = seen.calls[module][0]
        alike = signature(module, norm, row, call)
        if alike not in known:
            known[alike] = compare_unit(module, norm, row, call, choice.mode, choice.phase)
        result.append(_judged(replace(row, comparison=known[alike]), choice))
    return tuple(result)


def _judged(row: Row, choice: Choice) -> Row:
    """The unit as it is where it is faster, or left alone with its times as the reason."""
    time = row.comparison
    if time is None:
        return _left(row, UNCAPTURED)
    if time.ratio < 1:
        return row
    return _left(row, f"{SLOWER}: {time.dcl:.3g} ms for {time.plain:.3g} plain ({time}), {choice.step}")


def _left(row: Row, reason: str) -> Row:
    return replace(row, status="left", reason=reason, selected=False)


def _checked(timed: Plan, model: nn.Module, inputs: Inputs) -> Plan:
    """The plan with as many of its units, the fastest first, as leave the network no slower than it is."""
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
        found = compare(steps, choice.mode, device, rounds=ROUNDS, seconds=TURN * measure.SECONDS)
        if found is None:
            raise ValueError(
                f"the network {UNCAPTURED}: something in it waits for the GPU, or memory is short; take "
                'mode = "eager" or mode = "compile"'
            )
        return found

    kept, found = _most(len(units), compared)
    left = {}
    for place, row in enumerate(units[kept:], kept):
        count = min(n for n in found if n > place)
        among = "this unit" if count == 1 else f"the {count} fastest units"
        left[row.name] = _left(
            row, f"{SLOWER} in the network: {found[count]} with {among}, by itself {row.comparison}, {choice.step}"
        )
    network = found[kept] if kept else min(found.values(), key=lambda time: time.ratio)
    rows = tuple(left.get(row.name, row) for row in timed.rows)
    return replace(timed, rows=rows, choice=choice._replace(network=network))


def _most(count: int, compared: Callable[[int], Comparison]) -> tuple[int, dict[int, Comparison]]:
    """How many units the network takes without being slower, and what was found with how many.

    All of them are tried first, then by bisection, to an eighth of them or to one: that is log2(count) + 1 networks at
    most, each of which may have to be compiled.
    """
    found: dict[int, Comparison] = {}
    kept, slower, tried = 0, count + 1, count
    while kept < tried < slower:
        found[tried] = compared(tried)
        if found[tried].is_slower:
            slower = tried
        else:
            kept = tried
        if kept and slower - kept <= count // 8:
            break
        tried = (kept + slower) // 2
    return kept, found
