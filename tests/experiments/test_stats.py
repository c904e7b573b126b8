"""Means, spreads and intervals, against the standard library and SciPy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dcl.experiments.stats import (
    difference,
    interval,
    mean,
    notation,
    p_in_words,
    paired,
    pool,
    signed,
    std,
    t_quantile,
)

errors = st.floats(0, 100, allow_nan=False)
lists = st.lists(errors, min_size=2, max_size=12)


@pytest.mark.parametrize("p", [0.975, 0.6, 0.9, 0.9995, 0.5, 0.025])
def test_the_quantile_agrees_with_scipy(p):
    reference = pytest.importorskip("scipy.stats", reason="SciPy is not installed")
    for df in range(1, 201):
        assert t_quantile(p, df) == pytest.approx(reference.t.ppf(p, df), rel=1e-8, abs=1e-8)


def test_the_quantile_agrees_with_printed_tables():
    assert t_quantile(0.975, 1) == pytest.approx(12.7062, abs=5e-5)
    assert t_quantile(0.975, 4) == pytest.approx(2.7764, abs=5e-5)
    assert t_quantile(0.975, 30) == pytest.approx(2.0423, abs=5e-5)


@pytest.mark.parametrize(("p", "df"), [(0, 3), (1, 3), (0.5, 0), (0.5, 1.5)])
def test_a_quantile_that_does_not_exist_is_refused(p, df):
    with pytest.raises(ValueError, match=r"give a whole number|a quantile exists"):
        t_quantile(p, df)


@given(lists)
def test_a_pooled_effect_has_the_standard_error_of_its_mean(values):
    found = pool(values)
    assert found.mean == pytest.approx(sum(values) / len(values))
    squares = sum((value - found.mean) ** 2 for value in values) / (len(values) - 1)
    assert (found.error, found.n) == (pytest.approx((squares / len(values)) ** 0.5, abs=1e-9), len(values))


def test_an_effect_of_one_comparison_has_no_error():
    assert str(pool([-0.5])) == "−0.50"
    assert str(pool([-0.5, -0.7])) == "−0.60 ± 0.10"


@given(lists, st.data())
def test_a_paired_difference_turns_round_with_its_columns(values, data):
    others = data.draw(st.lists(errors, min_size=len(values), max_size=len(values)))
    one, other = paired(values, others), paired(others, values)
    assert one.low <= one.mean <= one.high
    assert one.mean == pytest.approx(-other.mean, abs=1e-9)
    assert (one.low, one.high) == pytest.approx((-other.high, -other.low), abs=1e-9)
    assert one.clear == -other.clear


def test_an_interval_agrees_with_scipy():
    reference = pytest.importorskip("scipy.stats", reason="SciPy is not installed")
    values = [1.9, 2.1, 2.0, 2.4, 1.7]
    want = reference.t.interval(0.95, 4, loc=mean(values), scale=reference.sem(values))
    assert interval(values) == pytest.approx(want)


def test_a_difference_is_clear_when_its_interval_excludes_zero():
    assert paired([1.0, 2.0, 3.0], [1.5, 2.5, 3.6]).clear == -1
    assert paired([1.5, 2.5, 3.6], [1.0, 2.0, 3.0]).clear == 1
    assert paired([1.0, 2.0, 3.0], [1.5, 1.5, 3.0]).clear == 0


def test_only_the_seeds_that_both_have_are_paired():
    found = difference({3: 1.0, 1: 2.0, 7: 50.0}, {1: 2.5, 3: 1.5, 9: 0.0})
    assert found is not None
    assert (found.mean, found.n) == (-0.5, 2)
    assert difference({1: 2.0, 2: 3.0}, {2: 1.0, 3: 1.0}) is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mean([]), "at least one"),
        (lambda: std([1.0]), "at least two"),
        (lambda: interval([1.0]), "at least 1"),
        (lambda: paired([1.0, 2.0], [1.0]), "2 errors cannot be paired with 1"),
        (lambda: paired([1.0], [1.0]), "at least 2 seeds, not 1"),
    ],
)
def test_too_few_values_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("centre", "deviation", "text"),
    [
        (1.96, 0.03, "1.96(03)"),
        (10.072, 0.431, "10.07(43)"),
        (2.0, 0.0, "2.00(00)"),
        (5.0, 0.994, "5.00(99)"),
        (5.0, 0.996, "5.00(1.00)"),
        (28.07, 40.153, "28.07(40.15)"),
        (7.5, None, "7.50"),
    ],
)
def test_the_notation_of_the_paper(centre, deviation, text):
    assert notation(centre, deviation) == text


def test_a_difference_has_its_sign_and_zero_has_none():
    assert [signed(v) for v in (0.5, -0.5, 0.001, -0.001)] == ["+0.50", "−0.50", "0.00", "0.00"]
    assert signed(-1.66, 1) == "−1.7"


@pytest.mark.parametrize("gap", [0.5, 5.0, 40.0])
def test_no_p_is_printed_as_zero(gap):
    """Of twenty pairs that all differ alike, rounding leaves nothing of a p of 1e-30; it is not 0."""
    ours = [gap + 0.1 * (seed % 3) for seed in range(20)]
    assert p_in_words(paired(ours, [0.0] * 20).p) == "< 1e-12"
    assert p_in_words(3e-10) == "3e-10"
    assert p_in_words(1.0) == "1"
