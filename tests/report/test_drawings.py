"""The data of figures: to JSON and back, and what cannot be drawn."""

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_dcl.experiments.complementary import Complementary, as_plain, from_plain
from torch_dcl.experiments.protocol import finite
from torch_dcl.report.figures import drawings, lost_runs

numbers = st.floats(0, 1e6) | st.just(math.nan)


@st.composite
def filters(draw):
    """Any knowledge of a filter, classes without images included."""
    digits, branches = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    classes = 10**digits
    places = 10 if digits > 1 else classes

    def tensor(*shape):
        count = math.prod(shape)
        values = draw(st.lists(numbers, min_size=count, max_size=count))
        return torch.tensor(values, dtype=torch.float64).view(shape)

    return Complementary(
        layer=draw(st.text(max_size=8)),
        filter=draw(st.integers(0, 500)),
        picked=draw(st.booleans()),
        names=tuple(f"{c:0{digits}d}" for c in range(classes)),
        digits=digits,
        images=draw(st.integers(1, 10**6)),
        fused=tensor(classes),
        branches=tensor(branches, classes),
        by_digit=tensor(branches, digits, places),
        highest=draw(st.integers(0, classes - 1)),
        parts=tuple(range(digits)),
        own=tuple(tuple(range(digits)) for _ in range(branches)),
    )


@given(filters(), st.text(max_size=20))
def test_what_a_filter_answers_to_survives_json(found, title):
    text = json.dumps(as_plain(found, title), allow_nan=False)
    again = from_plain(json.loads(text))
    for field in dataclasses.fields(found):
        before, after = getattr(found, field.name), getattr(again, field.name)
        if isinstance(before, torch.Tensor):
            assert after.dtype == torch.float64
            torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
        else:
            assert after == before
    assert json.loads(text)["title"] == title


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="lack layer, filter"):
        from_plain({"title": "x", "fused": []})


def test_no_number_becomes_null():
    assert finite({"a": [1.0, math.nan, (math.inf, "x")], "b": None}) == {"a": [1.0, None, [None, "x"]], "b": None}


def curves(*, lost):
    good, bad = [1.0, 0.5], [1.0, None]
    series = {"baseline": {"train_loss": [good, good], "test_loss": [good, good]}}
    series["A2"] = {"train_loss": [good, bad if lost else good], "test_loss": [good, good]}
    return {"set": "MNIST-III-10", "series": series}


def test_a_run_that_diverged_is_left_out_of_the_curves_and_counted():
    assert (lost_runs(curves(lost=False)), lost_runs(curves(lost=True))) == (0, 1)
    label = drawings("curves", curves(lost=True))["curves"](False).get_label()
    assert "1 to 2 seeds" in label


def test_where_all_diverged_there_is_no_figure():
    nothing = {"train_loss": [[None]], "test_loss": [[1.0]]}
    assert drawings("curves", {"set": "x", "series": {"baseline": nothing}}) == {}


def test_what_was_tried_is_a_table_and_no_figure():
    assert drawings("tried", {"set": "x", "columns": []}) == {}
