"""The figure of relations: a panel a task, a line a column, a band where there are seeds."""

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


@pytest.mark.parametrize("dark", [False, True])
def test_every_task_has_a_panel_and_every_column_a_line(dark):
    figure = relations_figure(data(), dark=dark)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["number", "sum mod 10"]
    for axes in figure.axes:
        lines = {line.get_label(): line for line in axes.lines}
        assert list(lines) == ["DCL-A2" if column == "A2" else column for column in COLUMNS]
        # From few to many images, whatever the order of the cells: means over 0, 1, 2 are one above the first seed.
        assert lines["summed"].get_xdata().tolist() == [6_000, 60_000]
        assert lines["summed"].get_ydata().tolist() == pytest.approx([11, 2])
        assert len(axes.collections) == len(COLUMNS)
    text = svg(figure)
    assert 'id="relations-sum-A2"' in text
    assert "3 seeds" in figure.get_label()


def test_a_single_seed_has_no_band():
    figure = relations_figure(data(seeds=1, tasks=("order",)))
    assert not figure.axes[0].collections


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
