"""The data of a run's figures, stored as JSON, and the figures that are drawn from it."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from torch_dcl.experiments import figures
from torch_dcl.experiments.complementary import Complementary
from torch_dcl.experiments.protocol import finite

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["drawings", "knowledge_from", "knowledge_of", "lost_runs"]

_TENSORS = ("fused", "branches", "by_digit")


def knowledge_of(found: Complementary, title: str) -> dict[str, Any]:
    """What a filter and its branches answer to, as JSON has it.

    Args:
        found: From `torch_dcl.experiments.complementary.complementary`.
        title: What stands above its figure.
    """
    plain = {f.name: getattr(found, f.name) for f in dataclasses.fields(found)}
    plain |= {name: plain[name].tolist() for name in _TENSORS}
    return {"title": title, **finite(plain)}


def knowledge_from(stored: Mapping[str, Any]) -> Complementary:
    """The way back from `knowledge_of`.

    Raises:
        ValueError: Something is missing.
    """
    names = [f.name for f in dataclasses.fields(Complementary)]
    if missing := [name for name in names if name not in stored]:
        raise ValueError(f"the knowledge of a filter lacks {', '.join(missing)}; run it again")
    read = {name: stored[name] for name in names}
    read |= {name: torch.tensor(_with_nan(stored[name]), dtype=torch.float64) for name in _TENSORS}
    read["names"], read["parts"] = tuple(read["names"]), tuple(read["parts"])
    read["own"] = tuple(map(tuple, read["own"]))
    return Complementary(**read)


def _with_nan(values: Any) -> Any:
    if isinstance(values, list):
        return [_with_nan(value) for value in values]
    return math.nan if values is None else values


def drawings(part: str, data: Mapping[str, Any]) -> dict[str, Callable[[bool], "Figure"]]:
    """The figures of a part, by name: functions of whether the page is dark.

    Args:
        part: One of `torch_dcl.experiments.reading.PARTS`, of which ``tried`` has none, it is a table; or ``chart``.
        data: What its file holds.
    """
    if part == "filters":
        return {"filters": lambda dark: figures.filters_figure(data, dark=dark)}
    if part == "curves":
        whole = _without_lost(data)
        return {"curves": lambda dark: figures.curves_figure(whole, dark=dark)} if whole["series"] else {}
    if part == "chart":
        return {"chart": lambda dark: figures.chart_figure(data, dark=dark)}
    if part == "knowledge":
        return {f"knowledge-{name}": _knowledge(stored) for name, stored in data["networks"].items()}
    return {}


def _knowledge(stored: Mapping[str, Any]) -> Callable[[bool], "Figure"]:
    found = knowledge_from(stored)
    return lambda dark: figures.complementary_figure(found, title=stored["title"], dark=dark)


def _is_lost(run: list[Any]) -> bool:
    return any(value is None or not math.isfinite(value) for value in run)


def lost_runs(data: Mapping[str, Any]) -> int:
    """How many runs of the curves diverged, and can therefore not be drawn."""
    series = data["series"].values()
    return sum(_is_lost([*a, *b]) for s in series for a, b in zip(s["train_loss"], s["test_loss"], strict=True))


def _without_lost(data: Mapping[str, Any]) -> dict[str, Any]:
    """The curves of the runs that did not diverge."""
    series = {}
    for name, runs in data["series"].items():
        pairs = zip(runs["train_loss"], runs["test_loss"], strict=True)
        whole = [(a, b) for a, b in pairs if not _is_lost([*a, *b])]
        if whole:
            series[name] = {"train_loss": [a for a, _ in whole], "test_loss": [b for _, b in whole]}
    return {**data, "series": series}
