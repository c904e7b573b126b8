"""The numbers of the paper, spot by spot and by their sums."""

import pytest

from torch_dcl.experiments.paper_numbers import (
    COLUMNS,
    IMAGENET,
    IMAGENET_DROPS,
    IMAGENET_SECONDS,
    SETS,
    TABLE1,
    TABLE2,
    TABLE2_DROPS,
    THREE_DIGITS,
    TWO_DIGITS,
    WEIGHTS,
    Reported,
)


def test_table_1_has_fifteen_sets_and_eight_columns():
    assert len(SETS) == 15
    assert (len(TWO_DIGITS), len(THREE_DIGITS)) == (5, 10)
    assert SETS[0] == "MNIST-II-01"
    assert SETS[-1] == "MNIST-III-10"
    assert all(tuple(row) == COLUMNS for row in TABLE1.values())


@pytest.mark.parametrize(
    ("name", "column", "number"),
    [
        ("MNIST-II-01", "baseline", (1.96, 0.03)),
        ("MNIST-II-01", "B3D", (2.12, 0.12)),
        ("MNIST-II-03", "A3D", (2.76, 0.05)),
        ("MNIST-II-05", "B2", (5.86, 0.17)),
        ("MNIST-III-04", "B3S", (5.65, 0.16)),
        ("MNIST-III-05", "A3S", (7.20, 0.19)),
        ("MNIST-III-06", "oracle", (5.52, 0.11)),
        ("MNIST-III-09", "B2", (10.07, 0.43)),
        ("MNIST-III-10", "A2", (9.17, 0.12)),
    ],
)
def test_a_number_of_table_1(name, column, number):
    assert TABLE1[name][column] == number


@pytest.mark.parametrize(
    ("column", "mean", "std"),
    [
        ("baseline", 93.41, 2.38),
        ("oracle", 73.76, 1.93),
        ("A2", 86.66, 1.80),
        ("A3S", 85.58, 1.58),
        ("A3D", 87.14, 1.55),
        ("B2", 88.86, 2.61),
        ("B3S", 88.47, 1.35),
        ("B3D", 90.67, 2.83),
    ],
)
def test_the_sum_of_a_column_of_table_1(column, mean, std):
    assert sum(row[column].mean for row in TABLE1.values()) == pytest.approx(mean, abs=1e-9)
    assert sum(row[column].std for row in TABLE1.values()) == pytest.approx(std, abs=1e-9)


def test_table_2_has_eight_rows_of_others_and_three_pairs():
    assert [row.name for row in TABLE2 if not row.reference] == ["LeNet", "LeNet", "BigNet", "BigNet", "WRN", "WRN"]
    assert sum(bool(row.reference) for row in TABLE2) == 8
    sums = [sum(row.errors[data] for row in TABLE2) for data in ("SVHN", "CIFAR10", "CIFAR100")]
    assert sums == pytest.approx([32.11, 118.97, 464.50], abs=1e-9)


def test_the_drops_that_the_text_states_follow_from_table_2():
    for name, drops in TABLE2_DROPS.items():
        without, with_dcl = [row for row in TABLE2 if row.name == name]
        assert (without.dcl, with_dcl.dcl) == (False, True)
        for data, drop in drops.items():
            relative = 100 * (without.errors[data] - with_dcl.errors[data]) / without.errors[data]
            assert relative == pytest.approx(drop, abs=0.006)


def test_the_savings_that_the_text_states_follow_from_its_numbers():
    for found in (*WEIGHTS.values(), IMAGENET_SECONDS):
        assert 100 * (1 - found.dcl / found.baseline) == pytest.approx(found.saved, abs=0.1)
    for before, after, drop in zip(IMAGENET["baseline"], IMAGENET["dcl"], IMAGENET_DROPS, strict=True):
        assert 100 * (1 - after / before) == pytest.approx(drop, abs=0.05)


def test_another_notation_is_refused():
    assert Reported.parse("10.07(43)") == (10.07, 0.43)
    with pytest.raises(ValueError, match=r"'1\.96' is not a mean"):
        Reported.parse("1.96")
