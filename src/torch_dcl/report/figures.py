"""The paper's figures, drawn from measured numbers.

Every function gives a matplotlib figure that is readable at the width of a column (85 mm) on paper and in a browser, on
a light or a dark page, with a transparent background. The words for the caption travel with the figure, as its label:
``figure.get_label()``. :func:`save` writes SVG, PDF or PNG, :func:`svg` gives the text to put into an HTML page. The
bytes depend on nothing but the numbers and the version of matplotlib.

Colours are those of Okabe and Ito, which stay apart for colour-blind readers, and no colour is the only sign of what it
means. matplotlib is imported when a figure is drawn.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch_dcl.experiments.complementary import from_plain
from torch_dcl.experiments.stats import is_complete
from torch_dcl.report.canvas import save, svg
from torch_dcl.report.chart_figure import chart_figure
from torch_dcl.report.line_figures import curves_figure, filters_figure
from torch_dcl.report.panel_figures import complementary_figure, differences_figure
from torch_dcl.report.relations_figure import relations_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "chart_figure", "complementary_figure", "curves_figure", "differences_figure", "drawings", "filters_figure",
    "lost_runs", "relations_figure", "save", "svg",
]  # fmt: skip


def drawings(part: str, data: Mapping[str, Any]) -> dict[str, Callable[[bool], "Figure"]]:
    """The figures of a part, by name: functions of whether the page is dark. Some parts have none."""
    single = {"filters": filters_figure, "chart": chart_figure, "relations": relations_figure}
    if part in single:
        return {part: lambda dark: single[part](data, dark=dark)}
    if part == "curves":
        whole = _without_lost(data)
        return {"curves": lambda dark: curves_figure(whole, dark=dark)} if whole["series"] else {}
    if part == "knowledge":
        return {f"knowledge-{name}": _responses(stored) for name, stored in data["networks"].items()}
    if part == "demo" and "reason" not in data["knowledge"]:
        return {"complementary": _responses(data["knowledge"])}
    return {}


def _responses(stored: Mapping[str, Any]) -> Callable[[bool], "Figure"]:
    response = from_plain(stored)
    return lambda dark: complementary_figure(response, title=stored["title"], dark=dark)


def lost_runs(data: Mapping[str, Any]) -> int:
    """How many runs of the curves diverged, and can therefore not be drawn."""
    series = data["series"].values()
    return sum(not is_complete([*a, *b]) for s in series for a, b in zip(s["train_loss"], s["test_loss"], strict=True))


def _without_lost(data: Mapping[str, Any]) -> dict[str, Any]:
    """The curves of the runs that did not diverge."""
    series = {}
    for name, runs in data["series"].items():
        pairs = zip(runs["train_loss"], runs["test_loss"], strict=True)
        whole = [(a, b) for a, b in pairs if is_complete([*a, *b])]
        if whole:
            series[name] = {"train_loss": [a for a, _ in whole], "test_loss": [b for _, b in whole]}
    return {**data, "series": series}
