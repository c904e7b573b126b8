"""The learning rate by step, against the formula written for one step at a time."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_dcl.fleet import Schedule


def plain_rate(schedule, lr, step, steps):
    """The rate of one step: a straight rise, then a factor for every drop that lies behind."""
    rise = min(1.0, (step + 1) / schedule.warmup) if schedule.warmup else 1.0
    behind = sum(step >= round(drop * steps) for drop in schedule.drops)
    return lr * rise * schedule.factor**behind


drops = st.lists(st.floats(0.001, 0.999), max_size=4).map(lambda values: tuple(sorted(values)))


@settings(max_examples=200)
@given(
    epochs=st.integers(1, 12),
    per_epoch=st.integers(1, 20),
    warmup=st.integers(0, 300),
    drops=drops,
    factor=st.floats(0.01, 1.0),
    lr=st.floats(1e-5, 10.0),
)
def test_every_step_has_the_rate_of_the_formula(epochs, per_epoch, warmup, drops, factor, lr):
    schedule = Schedule(epochs, warmup=warmup, drops=drops, factor=factor)
    rates = schedule.rates(lr, per_epoch)
    assert rates.dtype == torch.float64
    steps = epochs * per_epoch
    assert len(rates) == steps
    for step, rate in enumerate(rates.tolist()):
        assert math.isclose(rate, plain_rate(schedule, lr, step, steps), rel_tol=1e-12)


def test_without_warmup_and_drops_the_rate_stays():
    assert Schedule(3).rates(0.25, 4).tolist() == [0.25] * 12


def test_the_rate_rises_in_a_straight_line_to_its_full_value_and_stays():
    assert Schedule(2, warmup=4).rates(1.0, 3).tolist() == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_the_rate_drops_after_parts_of_the_training():
    rates = Schedule(4, drops=(0.5, 0.75), factor=0.5).rates(1.0, 2)
    assert rates.tolist() == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize("epochs", [0, -3])
def test_a_training_without_epochs_is_refused(epochs):
    with pytest.raises(ValueError, match=f"epochs must be a whole number of at least 1, got {epochs}"):
        Schedule(epochs)


def test_a_negative_warmup_is_refused():
    with pytest.raises(ValueError, match="warmup must be a whole number of steps, got -1"):
        Schedule(1, warmup=-1)


@pytest.mark.parametrize("drops", [(0.0,), (1.0,), (0.5, 0.4), (-0.5,), (0.5, 1.5), (math.nan,)])
def test_drops_that_do_not_rise_between_0_and_1_are_refused(drops):
    with pytest.raises(ValueError, match="drops must rise and lie between 0 and 1, got"):
        Schedule(1, drops=drops)
