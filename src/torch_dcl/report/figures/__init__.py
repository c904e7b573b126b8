"""The paper's figures, drawn from measured numbers.

Every function gives a matplotlib figure that is readable at the width of a column (85 mm) on paper and in a browser, on
a light or a dark page, with a transparent background. The words for the caption travel with the figure, as its label:
``figure.get_label()``. :func:`save` writes SVG, PDF or PNG, :func:`svg` gives the text to put into an HTML page. The
bytes depend on nothing but the numbers and the version of matplotlib.

Colours are those of Okabe and Ito, which stay apart for colour-blind readers, and no colour is the only sign of what it
means. matplotlib is imported when a figure is drawn.
"""

from torch_dcl.report.figures.bars import complementary_figure
from torch_dcl.report.figures.canvas import save, svg
from torch_dcl.report.figures.chart import chart_figure
from torch_dcl.report.figures.forest import differences_figure
from torch_dcl.report.figures.lines import curves_figure, filters_figure

__all__ = [
    "chart_figure", "complementary_figure", "curves_figure", "differences_figure", "filters_figure", "save", "svg",
]  # fmt: skip
