"""The claims, on the paper's own table and on tables made for each outcome."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_dcl.experiments.claims import (
    best_is_near_oracle,
    difficulty_rises,
    fewer_weights,
    first_layer_improves,
    judge,
    large_banks_help_little,
    loss_gap_shrinks,
    more_filters_help,
    oracle_beats_baseline,
    oracle_is_lowest,
    second_layer_is_unstable,
    stochastic_beats_deterministic,
    three_branches_beat_two,
    three_branches_matter_less_on_two_digits,
)
from torch_dcl.experiments.paper_numbers import COLUMNS, SETS, TABLE1, THREE_DIGITS, TWO_DIGITS, Reported
from torch_dcl.experiments.stats import Losses, compare


def table(**columns):
    """Every set, with the same errors; a number is a mean without spread."""
    return {
        name: {column: Reported(value, 0.0) if isinstance(value, float) else value for column, value in columns.items()}
        for name in SETS
    }


def test_means_of_as_many_wrong_answers_are_equal():
    counts = (24.88, 48.11), (24.89, 48.1)  # percent of 10,000: 7,299 wrong answers each, and other sums of floats
    found = compare(table(A2=dict(enumerate(counts[0])), baseline=dict(enumerate(counts[1]))), "A2", "baseline")
    assert (len(found.better), len(found.equal), len(found.worse)) == (0, 15, 0)


def test_what_the_papers_own_table_says():
    verdicts = [finding.verdict == "holds" for finding in judge(TABLE1)]
    assert all(finding.verdict != "not decidable" for finding in judge(TABLE1))
    #                  rises  oracle lowest first near   unstable
    assert verdicts[:6] == [True, True, True, True, True, True]
    assert verdicts[6:10] == [True, False, False, False]  # three branches against two: A3S, A3D, B3S, B3D
    assert verdicts[10:12] == [True, False]  # less on two digits: A3S, A3D
    assert verdicts[12:] == [True, True]  # stochastic: A, B


def test_the_evidence_from_the_papers_own_table():
    assert "2 of 10 sets, equal on 2" in three_branches_beat_two(TABLE1, "A3D").evidence
    assert "1 equal (B2 on MNIST-III-06)" in oracle_is_lowest(TABLE1).evidence
    assert "15 % of the gap" in best_is_near_oracle(TABLE1).evidence
    assert "13 of 13" in difficulty_rises(TABLE1).evidence
    assert "13 of 15 sets, equal on 1" in stochastic_beats_deterministic(TABLE1, "A").evidence


def test_nothing_can_be_decided_without_columns():
    for empty in ({}, {name: {} for name in SETS}):
        assert {finding.verdict for finding in judge(empty)} == {"not decidable"}


def test_one_exception_refutes_that_the_first_layer_always_improves():
    made = table(baseline=2.0, A2=1.0, A3S=1.0, A3D=1.0)
    assert first_layer_improves(made).verdict == "holds"
    made["MNIST-III-03"]["A3S"] = Reported(2.0, 0.0)
    assert first_layer_improves(made).verdict == "does not hold"
    assert "A3S is better than the baseline on 14 of 15 sets, equal on 1" in first_layer_improves(made).evidence


def test_a_missing_column_leaves_it_open_unless_another_refutes():
    assert first_layer_improves(table(baseline=2.0, A2=1.0, A3S=1.0)).verdict == "not decidable"
    assert first_layer_improves(table(baseline=2.0, A2=1.0, A3S=3.0)).verdict == "does not hold"


def test_sets_that_were_not_run_are_counted():
    made = {"MNIST-II-01": table(baseline=2.0, oracle=1.0)["MNIST-II-01"]}
    found = oracle_beats_baseline(made)
    assert found.verdict == "holds"
    assert "1 of 1 sets" in found.evidence
    assert "14 not run" in found.evidence


def test_clear_differences_are_counted_in_both_directions():
    made = table(baseline=[2.0, 2.1, 2.2], oracle=[1.0, 1.1, 1.2])
    made["MNIST-II-01"]["oracle"] = [3.0, 3.1, 3.2]
    made["MNIST-II-02"]["oracle"] = [1.0, 2.2, 3.0]
    found = compare(made, "oracle", "baseline")
    assert [sum(each.clear == sign for each in found.paired.values()) for sign in (-1, 1)] == [13, 1]
    assert [name for name, gap in compare(made, "baseline", "oracle").paired.items() if gap.clear < 0] == [
        "MNIST-II-01"
    ]


def test_evidence_has_the_mean_difference_over_the_sets_with_its_standard_error():
    made = table(baseline=[2.0, 2.1, 2.2], oracle=[1.0, 1.1, 1.2])
    made["MNIST-II-01"]["oracle"] = [3.0, 3.1, 3.2]
    gaps = [1.0] + 14 * [-1.0]
    mean = sum(gaps) / 15
    error = (sum((gap - mean) ** 2 for gap in gaps) / 14 / 15) ** 0.5
    assert f"on 14 of 15 sets, −{-mean:.2f} ± {error:.2f} points on average" in oracle_beats_baseline(made).evidence
    assert compare(made, "oracle", "baseline").effect(TWO_DIGITS).n == 5
    assert compare({}, "oracle", "baseline").effect() is None


def test_errors_are_paired_by_seed_and_not_by_place():
    made = {"MNIST-II-01": {"baseline": {0: 1.0, 1: 5.0, 2: 9.0}, "A2": {2: 8.5, 0: 0.5, 1: 4.5}}}
    assert [each.clear for each in compare(made, "A2", "baseline").paired.values()] == [-1]


def test_the_oracle_is_lowest_unless_a_model_is_lower():
    columns = {column: 2.0 for column in COLUMNS if column != "oracle"}
    assert oracle_is_lowest(table(**columns, oracle=2.0)).verdict == "holds"
    assert oracle_is_lowest(table(**columns, oracle=2.1)).verdict == "does not hold"
    assert oracle_is_lowest(table(baseline=2.0, oracle=1.0)).verdict == "not decidable"
    assert oracle_is_lowest(table(baseline=1.0, oracle=2.0)).verdict == "does not hold"


@pytest.mark.parametrize(
    ("best", "oracle", "verdict"),
    [
        (1.25, 1.0, "holds"),
        (1.26, 1.0, "does not hold"),
        (0.9, 1.0, "holds"),
        (1.9, 2.0, "holds"),
        (2.1, 2.0, "not decidable"),
    ],
)
def test_near_the_oracle_is_a_quarter_of_the_gap(best, oracle, verdict):
    assert best_is_near_oracle(table(baseline=2.0, oracle=oracle, A2=best, B2=5.0)).verdict == verdict


def test_unstable_needs_both_directions_beyond_the_deviation():
    made = table(baseline=Reported(2.0, 0.1), B2=Reported(1.5, 0.1))
    assert second_layer_is_unstable(made).verdict == "does not hold"
    made["MNIST-II-05"]["B2"] = Reported(2.05, 0.1)
    assert second_layer_is_unstable(made).verdict == "does not hold"
    made["MNIST-II-05"]["B2"] = Reported(2.5, 0.1)
    assert second_layer_is_unstable(made).verdict == "holds"
    assert second_layer_is_unstable(table(baseline=2.0)).verdict == "not decidable"


def test_three_branches_are_judged_on_three_digits_alone():
    made = table(A2=2.0, A3S=1.0)
    for name in TWO_DIGITS:
        made[name]["A3S"] = Reported(9.0, 0.0)
    assert three_branches_beat_two(made, "A3S").verdict == "holds"
    assert three_branches_beat_two(made, "A3D").verdict == "not decidable"
    made["MNIST-III-01"]["A3S"] = Reported(2.0, 0.0)
    assert three_branches_beat_two(made, "A3S").verdict == "does not hold"


@pytest.mark.parametrize(
    ("two", "three", "verdict"),
    [(1.95, 1.8, "holds"), (1.85, 1.8, "does not hold"), (2.5, 2.1, "does not hold")],
)
def test_the_advantage_on_two_digits_is_less_than_half(two, three, verdict):
    made = {name: {"A2": Reported(2.0, 0), "A3S": Reported(two, 0)} for name in TWO_DIGITS}
    made |= {name: {"A2": Reported(2.0, 0), "A3S": Reported(three, 0)} for name in THREE_DIGITS}
    assert three_branches_matter_less_on_two_digits(made, "A3S").verdict == verdict
    only = {name: made[name] for name in TWO_DIGITS}
    assert three_branches_matter_less_on_two_digits(only, "A3S").verdict == "not decidable"


def test_often_is_more_than_half():
    names = list(SETS[:4])
    made = {name: {"A3S": Reported(1.0, 0), "A3D": Reported(2.0, 0)} for name in names}
    made[names[0]]["A3S"] = Reported(3.0, 0)
    assert stochastic_beats_deterministic(made, "A").verdict == "holds"
    made[names[1]]["A3S"] = Reported(2.0, 0)
    assert stochastic_beats_deterministic(made, "A").verdict == "does not hold"
    assert stochastic_beats_deterministic(made, "B").verdict == "not decidable"


def test_the_difficulty_rises_at_every_step_or_it_does_not():
    made = {name: {"baseline": Reported(float(i), 0)} for i, name in enumerate(SETS)}
    assert difficulty_rises(made).verdict == "holds"
    made["MNIST-II-03"], made["MNIST-II-04"] = made["MNIST-II-04"], made["MNIST-II-03"]
    assert difficulty_rises(made).verdict == "does not hold"
    assert "12 of 13" in difficulty_rises(made).evidence


def test_fewer_weights_means_in_every_model():
    assert fewer_weights({"MNIST-II-01": {"baseline": 10, "A2": 9}}).verdict == "holds"
    assert fewer_weights({"MNIST-II-01": {"baseline": 10, "A2": 9, "B2": 10}}).verdict == "does not hold"
    assert fewer_weights({"MNIST-II-01": {"A2": 9}}).verdict == "not decidable"


def test_the_loss_gap_is_compared_seed_by_seed():
    wide, narrow = Losses([0.1, 0.2, 0.3], [0.5, 0.61, 0.7]), Losses([0.1, 0.2, 0.3], [0.2, 0.31, 0.4])
    every = {"baseline": wide, "A2": narrow, "A3S": narrow, "A3D": narrow}
    assert loss_gap_shrinks(every).verdict == "holds"
    assert "A2 0.103 (difference −0.30 [−0.30, −0.30])" in loss_gap_shrinks(every).evidence
    assert loss_gap_shrinks({**every, "A3D": wide}).verdict == "does not hold"
    assert loss_gap_shrinks({"baseline": wide, "A2": narrow}).verdict == "not decidable"
    assert loss_gap_shrinks({"baseline": narrow, "A2": wide}).verdict == "does not hold"
    assert loss_gap_shrinks({"A2": narrow}).verdict == "not decidable"
    with pytest.raises(ValueError, match="2 training losses and 1 test losses"):
        Losses([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("means", "grows", "little"),
    [
        ([4.0, 3.0, 2.8], "holds", "holds"),
        ([4.0, 3.0, 2.0], "holds", "does not hold"),
        ([4.0, 3.0, 3.2], "does not hold", "holds"),
        ([3.0, 3.1, 3.2], "does not hold", "holds"),
        ([3.0, 3.5, 3.2], "does not hold", "does not hold"),
    ],
)
def test_filters_help_and_a_large_bank_helps_little(means, grows, little):
    points = [(n, [m, m + 0.1]) for n, m in zip((25, 100, 400), means, strict=True)]
    assert more_filters_help(points).verdict == grows
    assert large_banks_help_little(points[::-1]).verdict == little


def test_too_few_filters_decide_nothing():
    assert more_filters_help([(25, [1.0])]).verdict == "not decidable"
    assert large_banks_help_little([(25, [1.0]), (50, [0.5])]).verdict == "not decidable"
    assert large_banks_help_little([]).verdict == "not decidable"


cells = st.one_of(
    st.builds(Reported, st.floats(0, 100), st.floats(0, 3)),
    st.lists(st.floats(0, 100), min_size=1, max_size=4),
    st.dictionaries(st.integers(0, 5), st.floats(0, 100), min_size=1, max_size=4),
)
rows = st.dictionaries(st.sampled_from(COLUMNS), cells)


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(SETS), rows))
def test_any_table_gets_a_verdict_and_a_sentence(made):
    for finding in judge(made):
        assert finding.verdict in ("holds", "does not hold", "not decidable")
        assert finding.evidence.endswith(".")
    found, back = compare(made, "A2", "baseline"), compare(made, "baseline", "A2")
    assert (found.better, found.equal, found.worse) == (back.worse, back.equal, back.better)
    assert {n: each.clear for n, each in found.paired.items()} == {n: -each.clear for n, each in back.paired.items()}
    assert found.compared + len(found.absent) == len(SETS)
    assert set(found.beyond) <= set(found.better)
