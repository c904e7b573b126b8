"""How a run stands, in words and as plain data."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_dcl.experiments.reading import State

__all__ = ["as_row", "say"]


def as_row(state: "State") -> dict[str, Any]:
    """A state as plain data."""
    return asdict(state)


def say(state: "State") -> str:
    """A state in words."""
    if state.state == "damaged":
        return f"damaged: {state.problem}"
    unit = state.unit if state.total != 1 else {"entries": "entry"}.get(state.unit, state.unit.removesuffix("s"))
    count = f"{state.done:,} of {state.total:,} {unit}"
    if state.state == "running":
        return f"running (pid {state.pid}), {count}" + (f"; last seen at {state.now}" if state.now else "")
    return f"finished, {state.total:,} {unit}" if state.state == "finished" else f"incomplete, {count}"
