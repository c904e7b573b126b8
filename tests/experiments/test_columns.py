"""The columns of Table 1: the weights that the paper counts, and starts that depend on the seed alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torch_dcl import DCLLinear
from torch_dcl.experiments import columns
from torch_dcl.experiments.columns import CONTROLS, EXTRAS, MODELS, MORE, build, weights
from torch_dcl.models.controls import SummedLinear

PUBLISHED = {
    "baseline": (475_500, 925_500),
    "A2": (335_500, 785_500),
    "A3S": (465_500, 915_500),
    "A3D": (465_500, 915_500),
    "B2": (449_500, 1_025_500),
    "B3S": (461_500, 1_325_500),
    "B3D": (461_500, 1_325_500),
}
CONVOLUTIONS = 20 * 25 + 50 * 20 * 25
ALL = (*MODELS, *MORE, *EXTRAS)


def counted(model):
    """Weights by their shape: a bias has one axis, or in a fusion one row for each branch."""
    return sum(p.numel() for name, p in model.named_parameters() if name.split(".")[-1] == "weight")


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("column", PUBLISHED)
def test_a_column_has_the_weights_that_the_paper_counts(column):
    for classes, count in zip((100, 1000), PUBLISHED[column], strict=True):
        assert weights(column, classes) == count
        assert counted(build(column, classes, 3)) == count


def test_every_column_of_the_paper_is_there_in_its_order():
    assert MODELS == ("baseline", "oracle", "A2", "A3S", "A3D", "B2", "B3S", "B3D", "narrow", "low-rank", "summed")


def test_a_network_of_the_oracle_is_a_baseline_of_ten_classes():
    assert weights("oracle", 100) == weights("oracle", 1000) == weights("baseline", 10) == CONVOLUTIONS + 500 * 810
    assert same(build("oracle", 10, 5), build("baseline", 10, 5))


@pytest.mark.parametrize("classes", [100, 1000])
@pytest.mark.parametrize("column", CONTROLS)
def test_a_control_has_the_weights_of_a2_to_within_half_a_filter(column, classes):
    filter_weights = 800 + classes
    assert abs(weights(column, classes) - weights("A2", classes)) <= filter_weights / 2


@pytest.mark.parametrize("classes", [100, 1000])
@pytest.mark.parametrize(("column", "of"), [(c, "B2" if c.endswith("B2") else "B3S") for c in MORE if "-B" in c])
def test_a_control_of_b_has_its_weights_to_within_half_a_filter(column, of, classes):
    off = abs(weights(column, classes) - weights(of, classes))
    assert off <= ((800 + classes) / 2 if column.startswith("wide") else 0)
    model = build(column, classes, 0)
    layers = {"low-rank": DCLLinear, "summed": SummedLinear, "wide": nn.Linear}
    assert type(model.fc2) is layers[column.partition("-B")[0]]
    if column.startswith("low-rank"):
        assert (model.fc2.branches, model.fc2.widths) == (1, (int(column[-1]) * classes // 5,))


@pytest.mark.parametrize("column", ["baseline", "narrow"])
def test_a_matched_start_has_the_variance_of_a_factorised_layer(column):
    x = torch.randn(2000, 800, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain, matched, low_rank = (
            torch.relu(build(name, 1000, 1).fc1(x)).var() for name in (column, f"{column}-matched", "low-rank")
        )
    assert float(plain / matched) == pytest.approx(3, rel=0.02)
    assert float(matched / low_rank) == pytest.approx(1, rel=0.1)
    for one, other in zip(*(build(name, 100, 2).parameters() for name in (column, f"{column}-matched")), strict=True):
        assert torch.equal(one, other) or one.shape[-1] == 800


@pytest.mark.parametrize("classes", [100, 1000])
def test_what_was_tried_beside_the_table_has_the_weights_of_its_branches(classes):
    fifth = classes // 5
    for column in ("A4S", "A5S", "A4D", "A5D"):
        expected = CONVOLUTIONS + int(column[1]) * 100 * (800 + 500) + 500 * classes
        assert weights(column, classes) == expected
    assert weights("AB2", classes) == CONVOLUTIONS + 2 * 100 * (800 + 500) + 2 * fifth * (500 + classes)


@pytest.mark.parametrize("filters", [1, 3, 100, 431])
def test_filters_of_a_branch_are_as_many_as_asked_for(filters):
    assert weights("A2", 1000, filters=filters) == CONVOLUTIONS + 2 * filters * (800 + 500) + 500 * 1000
    assert weights("B2", 1000, filters=filters) == CONVOLUTIONS + 800 * 500 + 2 * filters * (500 + 1000)


@pytest.mark.parametrize("column", ALL)
def test_every_column_gives_one_logit_a_class(column):
    model = build(column, 100, 0).eval()
    out = model(torch.rand(3, 1, 28, 28))
    assert out.shape == (3, 100)
    assert out.isfinite().all()


# Starts


@pytest.mark.parametrize("column", ALL)
def test_a_start_depends_on_the_seed_alone(column):
    columns._plans.cache_clear()
    columns.weights.cache_clear()
    first = build(column, 100, 7)  # what is planned the first time must not matter
    torch.manual_seed(99)
    build("B3S", 100, 1)
    torch.rand(13)
    assert same(first, build(column, 100, 7))
    assert not same(first, build(column, 100, 8))


PLAIN, FEW = ("baseline", "oracle", "summed"), ("A2", "B3S", "narrow", "low-rank", "AB2")


@pytest.mark.parametrize("column", [*PLAIN, *(c for c in FEW)])
def test_torchs_generator_is_left_as_it_was_the_first_time(column):
    columns._plans.cache_clear()
    columns.weights.cache_clear()
    torch.manual_seed(41)
    before = torch.get_rng_state()
    build(column, 100, 5)
    assert torch.equal(torch.get_rng_state(), before)


@settings(max_examples=15)
@given(column=st.sampled_from(ALL), seed=st.integers(0, 2**40), mine=st.integers(0, 2**40))
def test_torchs_generator_is_left_as_it_was_later(column, seed, mine):
    build(column, 10, 0)
    torch.manual_seed(mine)
    before = torch.get_rng_state()
    build(column, 10, seed)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("column", ALL)
def test_convolutions_of_one_seed_start_alike_in_all_columns(column):
    plain, model = build("baseline", 100, 11), build(column, 100, 11)
    for layer in ("conv1", "conv2"):
        expected, found = getattr(plain, layer), getattr(model, layer)
        assert torch.equal(found.weight, expected.weight)
        assert torch.equal(found.bias, expected.bias)


@pytest.mark.parametrize("column", ["baseline", "narrow"])
def test_a_plain_network_starts_within_the_bounds_of_its_layers(column):
    model = build(column, 100, 0)
    for layer in (model.conv1, model.conv2, model.fc1, model.fc2):
        bound = (3 / layer.weight[0].numel()) ** 0.5
        assert 0.95 * bound < layer.weight.abs().max() <= bound
        assert not layer.bias.any()


def test_an_unknown_column_is_named_with_the_columns_that_there_are():
    with pytest.raises(ValueError, match=r"no column 'C2'; the columns are baseline, oracle, A2, .*AB2"):
        build("C2", 100, 0)
