"""What the points of the chart say. A chart is what `torch_dcl.experiments.recipes.chart` made, as JSON has it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch_dcl.experiments.comparing import difference
from torch_dcl.experiments.statistics import Difference, mean, std

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["against_dcl", "as_rich_chart", "chart_said", "edges_said", "lowest_first", "shown_error"]

Point = Mapping[str, Any]
"""A unit at a budget: its errors by seed, weights, time of a step, and the learning rates that were tried."""


_GUESSING = {"cifar10": 90.0, "cifar100": 99.0}
"""Chance-level error in percent."""


def lowest_first(chart: Mapping[str, Any]) -> list[Point]:
    """The points by rising mean error."""
    return sorted(chart["points"], key=lambda point: mean(point["errors"]))


def shown_error(point: Point) -> str:
    """Mean, spread and number of seeds."""
    errors = point["errors"]
    spread = f" ± {std(errors):.2f}" if len(errors) > 1 else ""
    return f"{mean(errors):.2f}{spread} ({len(errors)})"


def against_dcl(chart: Mapping[str, Any], point: Point) -> Difference | None:
    """The point's error less that of DCL with two branches, on the same seeds.

    A layer is compared with DCL at its own budget; the plain one has none and is compared with the chart's first.

    Returns:
        None for DCL itself, and where there are fewer than two seeds to compare.
    """
    rivals = [p for p in chart["points"] if p["unit"] == "dcl"]
    if point["unit"] != "plain":
        rivals = [p for p in rivals if p["share"] == point["share"]]
    if not rivals or point["unit"] == "dcl":
        return None
    runs = [dict(zip(each["seeds"], each["errors"], strict=True)) for each in (point, rivals[0])]
    return difference(*runs)


def chart_said(chart: Mapping[str, Any]) -> str:
    """The deciding chart in a few sentences, what DCL loses as plainly as what it wins."""
    first = lowest_first(chart)[0]
    told = [f"The lowest error is that of {first['unit']}: {mean(first['errors']):.2f} % (n = {len(first['errors'])})."]
    plain = next((point for point in chart["points"] if point["unit"] == "plain"), None)
    if plain is not None and (found := against_dcl(chart, plain)) is not None:
        told.append(f"The plain layer's error minus DCL's is {found}.")
    guessing = _GUESSING.get(chart["set"], 100.0)
    lost = [point for point in lowest_first(chart) if mean(point["errors"]) >= guessing - 1]
    rivals = [point for point in chart["points"] if point["unit"] != "plain" and point not in lost]
    alike = [against_dcl(chart, point) for point in rivals]
    clear = [each.clear for each in alike if each is not None]
    if clear:
        told.append(
            f"Of {len(clear)} comparisons with a layer of the same budget on the same seeds, DCL with two branches is "
            f"clearly lower in {clear.count(1)} and clearly higher in {clear.count(-1)}."
        )
    if lost:
        names = ", ".join(point["unit"] for point in lost)
        told.append(f"Did not learn, err as often as guessing does ({guessing:g} %), and are not counted: {names}.")
    return " ".join(told)


def edges_said(chart: Mapping[str, Any]) -> str | None:
    """Which layers took the smallest or the largest learning rate that was tried; None where none did."""
    ends: dict[float, list[str]] = {}
    for point in chart["points"]:
        rates = sorted(map(float, point["trials"]))
        if len(rates) > 1 and point["lr"] in (rates[0], rates[-1]):
            ends.setdefault(point["lr"], []).append(point["unit"])
    if not ends:
        return None
    told = "; ".join(f"{rate:g} for {', '.join(dict.fromkeys(units))}" for rate, units in sorted(ends.items()))
    return f"Chosen at the end of the learning rates that were tried: {told}. Beyond it they might do better still."


def as_rich_chart(chart: Mapping[str, Any], width: int) -> "Table":
    """The points for a terminal of so many characters; one that is narrow leaves out the differences to DCL."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    is_wide = width >= 100
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    differences = ("difference to DCL (95 % CI)",) if is_wide else ()
    for name in ("unit", "budget", "error % ± std (n)", *differences, "weights", "step ms", "rate"):
        table.add_column(name, justify="left" if name == "unit" else "right", no_wrap=True)
    for point in lowest_first(chart):
        found = against_dcl(chart, point)
        told = "" if found is None else escape(f"{found}{found.sign}")
        budget = "–" if point["unit"] == "plain" else f"{point['share']:g}"
        step = f"{point['step_ms']:.{2 if point['step_ms'] < 10 else 0}f}"
        table.add_row(
            point["unit"], budget, shown_error(point), *([told] if is_wide else []), f"{point['weights']:,}", step,
            f"{point['lr']:g}",
        )  # fmt: skip
    return table
