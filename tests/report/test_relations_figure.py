"""The figure of relations: panels for each task, a line for each column; with seeds, bands and differences."""

import pytest

from torch_dcl.report.canvas import svg
from torch_dcl.report.figures import relations_figure

COLUMNS = ("plain", "narrow", "low-rank", "summed", "A2", "power-0", "power-1")


def data(seeds=3, tasks=("number", "sum")):
    return {
        "cells": [
            {"task": task, "images": images, "column": column, "errors": [60_000 / images + k for k in range(seeds)]}
            for task in tasks
            for images in (60_000, 6_000)
            for column in COLUMNS
        ]
    }  # fmt: skip


def lines_of(axes):
    """The curves of a panel by name; marks stand by themselves."""
    return {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}


def hollow_marks(axes):
    """Where the marks of cells with failed networks stand."""
    return {
        (round(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in axes.lines if line.get_label() == "_failed"
    }


@pytest.mark.parametrize("dark", [False, True])
def test_every_task_has_panels_and_every_column_a_line(dark):
    figure = relations_figure(data(), dark=dark)
    above, below = figure.axes[:2], figure.axes[2:]
    assert [axes.get_title(loc="left") for axes in above] == ["number", "sum mod 10"]
    for axes in above:
        lines = lines_of(axes)
        assert set(lines) == {"DCL-A2" if column == "A2" else column for column in COLUMNS}
        assert list(lines)[-1] == "DCL-A2"  # on top of the others
        # From few to many images, whatever the order of the cells: means over 0, 1, 2 are one above the first seed.
        assert lines["summed"].get_xdata().tolist() == [6_000, 60_000]
        assert lines["summed"].get_ydata().tolist() == pytest.approx([11, 2])
        assert len(axes.collections) == len(COLUMNS)
    assert len(below) == 2
    for axes in below:
        assert len(axes.collections) == 2 * (len(COLUMNS) - 1)  # an interval for each column and size
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["plain", "narrow", "low-rank", "summed", "DCL-A2", "power-0", "power-1"]
    text = svg(figure)
    assert 'id="relations-sum-A2"' in text
    assert "3 seeds" in figure.get_label()
    assert "Hollow" not in figure.get_label()


def test_differences_are_shares_of_the_error_of_dcl():
    """10 % above DCL-A2 in every seed is at 10, and has its asterisk; the same errors are at 0, and have none."""
    cells = [
        {"task": "sum", "images": 6_000, "column": column, "errors": [factor * e for e in (9.0, 10.0, 11.0)]}
        for column, factor in (("A2", 1.0), ("summed", 1.1), ("narrow", 1.0))
    ]
    _, axes = relations_figure({"cells": cells}).axes
    marks = sorted(round(float(line.get_ydata()[0]), 6) for line in axes.lines if line.get_label() == "_mark")
    assert marks == [0, 10]
    assert [text.get_text() for text in axes.texts] == ["*"]


def test_failed_networks_do_not_squash_the_curves():
    """A cell with failed networks is at its median, hollow, and has neither band nor interval."""
    cells = data(seeds=4, tasks=("sum",))["cells"]
    for cell in cells:
        if cell["column"] == "narrow" and cell["images"] == 6_000:
            cell |= {"errors": [10.0, 90.0, 12.0, 11.0], "failed": [1]}
    figure = relations_figure({"cells": cells})
    above, below = figure.axes
    assert lines_of(above)["narrow"].get_ydata().tolist() == pytest.approx([11.5, 2.5])
    assert above.get_ylim()[1] < 20
    assert hollow_marks(above) == {(6_000, 11.5)}
    assert len(above.collections) == len(COLUMNS) - 1
    ((_, share),) = hollow_marks(below)
    assert share == pytest.approx(0, abs=1e-9)  # both medians are 11.5
    assert len(below.collections) == 2 * (len(COLUMNS) - 1) - 1
    assert "Hollow marks are medians" in figure.get_label()
    assert figure.legends[0].get_texts()[-1].get_text() == "median (networks failed)"


def test_where_dcl_failed_every_difference_is_one_of_medians():
    cells = data(seeds=4, tasks=("sum",))["cells"]
    for cell in cells:
        if cell["column"] == "A2" and cell["images"] == 6_000:
            cell |= {"errors": [10.0, 90.0, 90.0, 10.0], "failed": [1, 2]}
    _, below = relations_figure({"cells": cells}).axes
    marks = hollow_marks(below)
    assert len(marks) == len(COLUMNS) - 1
    assert {round(y, 6) for _, y in marks} == {round(100 * (11.5 / 50 - 1), 6)}


def test_a_single_seed_has_neither_bands_nor_differences():
    figure = relations_figure(data(seeds=1, tasks=("order",)))
    (axes,) = figure.axes
    assert not axes.collections


def test_an_error_of_zero_and_one_size_can_be_drawn():
    cells = [{"task": "same", "images": 100, "column": column, "errors": [0.0, 0.0]} for column in COLUMNS]
    assert svg(relations_figure({"cells": cells}))


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([], r"cells is \[\]; give at least one cell"),
        ([{"task": "sum", "images": 6_000, "column": "A2", "errors": [101.0]}], "each from 0 to 100"),
        ([{"task": "sum", "images": 6_000, "column": "A2", "errors": [None]}], r"errors is \[None\]; give"),
        ([{"task": "sum", "column": "A2", "errors": [1.0]}], "images is missing; give a whole number"),
        (
            [{"task": "product", "images": 6_000, "column": "A2", "errors": [1.0]}],
            "task 'product' is unknown; did you mean",
        ),
    ],
)
def test_what_cannot_be_drawn_is_named(cells, message):
    with pytest.raises(ValueError, match=message):
        relations_figure({"cells": cells})
