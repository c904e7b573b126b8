"""The search: the lowest mean wins, by the same trials for every column, and what is stored is what was found."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_dcl.experiments.columns import MODELS, MORE, Trial, stored_choice
from torch_dcl.experiments.digits import trial_job
from torch_dcl.experiments.protocol import Outcome
from torch_dcl.experiments.recipes.table1_search import (
    SEARCHED_ON,
    TRIALS,
    Search,
    SearchConfig,
    choose,
    read_trial,
)
from torch_dcl.experiments.runner import run
from torch_dcl.experiments.settings import SettingError
from torch_dcl.fusion import LEAN
from torch_dcl.models.variants import VARIANTS

STORED = (
    Trial(0.02), Trial(0.04), Trial(0.07), Trial(0.12),
    Trial(0.07, 3.0), Trial(0.12, 3.0), Trial(0.07, 1.0), Trial(0.12, 1.0),
)  # fmt: skip
"""The trials behind the choice of this release."""
RECORD = Path(__file__).parents[2] / "results" / "table1-search.json"


def outcome(column, data, trial, error, stopped=None):
    return Outcome(trial_job(column, data, 100, Trial(*trial), "choose"), error, 0.1, 0.1, stopped)


@pytest.fixture(scope="module")
def record():
    return json.loads(RECORD.read_text(encoding="utf-8"))


def recorded(record):
    """The trials of the record as outcomes."""
    return [
        outcome(row["column"], row["data"], (row["lr"], row["clip"] or math.inf), row["error"], row["stopped"])
        for row in record["trials"]
    ]


# Choosing


@settings(max_examples=100)
@given(st.data())
def test_the_lowest_mean_error_is_taken_and_a_diverged_network_counts_as_100(data):
    names = ("MNIST-II-02", "MNIST-II-05", "MNIST-III-02", "MNIST-III-10")
    columns = ("baseline", "A2")
    # Whole numbers, so that means can be compared exactly.
    drawn = {
        (column, name, trial): (data.draw(st.integers(0, 99)), data.draw(st.sampled_from([None, None, 0, 3])))
        for column in columns
        for name in names
        for trial in TRIALS[:3]
    }
    outcomes = [outcome(*where, float(error), stopped) for where, (error, stopped) in drawn.items()]
    found = choose(data.draw(st.permutations(outcomes)))
    assert set(found) == set(columns)
    for column in columns:
        for digits, mine in ((2, names[:2]), (3, names[2:])):
            cost = {}
            for trial in TRIALS[:3]:
                seen = [drawn[column, name, trial] for name in mine]
                cost[trial] = sum(100 if stopped is not None else error for error, stopped in seen)
            assert cost[found[column][digits]] == min(cost.values())


def test_a_network_that_diverged_at_a_low_error_is_not_chosen():
    outcomes = [outcome("A2", "MNIST-II-02", TRIALS[0], 1.0, stopped=4), outcome("A2", "MNIST-II-02", TRIALS[1], 60.0)]
    assert choose(outcomes) == {"A2": {2: TRIALS[1]}}


def test_the_bound_on_the_gradient_is_part_of_a_trial():
    tight, loose = Trial(0.07, 1.0), Trial(0.07)
    outcomes = [outcome("A2", "MNIST-III-02", tight, 2.0), outcome("A2", "MNIST-III-02", loose, 1.0)]
    assert choose(outcomes) == {"A2": {3: loose}}


# Searching


def test_a_search_trains_every_trial_of_every_column_once_on_training_digits(tmp_path):
    names, trials = ("MNIST-II-02", "MNIST-III-02"), ("0.02", "0.02 clip 1")
    config = SearchConfig(
        models=("baseline", "narrow"), sets=names, trials=trials, epochs=1, warmup=0, batch=50, train_images=100,
        test_images=50, data="excerpt", seeds=2,
    )  # fmt: skip
    recipe = Search(config)
    choice = run(recipe, tmp_path / "run").result
    assert recipe.purpose == "choose"
    assert {count for by_count in choice.values() for count in by_count} == {2, 3}
    found = json.loads((tmp_path / "run" / "search.json").read_text())
    rows = [(row["column"], row["data"], row["seed"], row["lr"], row["clip"]) for row in found["trials"]]
    assert sorted(rows, key=str) == sorted(
        ((c, n, s, *t) for c in ("baseline", "narrow") for n in names for s in (100, 101)
         for t in ((0.02, None), (0.02, 1.0))), key=str,
    )  # fmt: skip
    assert found["at_edge"] == []  # one rate
    assert found["minutes"] > 0
    assert {column: set(by) for column, by in found["choice"].items()} == {"baseline": {"2", "3"}, "narrow": {"2", "3"}}


@pytest.mark.parametrize("trial", [*TRIALS, *STORED, Trial(1e-9, 0.5), Trial(0.1, decay=0.0)])
def test_a_trial_survives_being_written(trial):
    assert read_trial(str(trial)) == trial


@pytest.mark.parametrize("text", ["fast", "", "0.1 clip", "0.1 clop 3", "0.1 clip 0", "-1", "nan", "inf", "1 2",
                                  "0.1 decay -1", "0.1 decay 1e-3 clip 1", "0.1 clip 1 decay"])  # fmt: skip
def test_a_text_that_is_no_trial_is_refused(text):
    with pytest.raises(
        SettingError, match=r"is not of the form '0\.07', '0\.07 clip 3' or '0\.07 clip 3 decay 0\.001'"
    ):
        read_trial(text)


def test_a_trial_that_is_given_twice_is_trained_and_counted_once():
    config = SearchConfig(models=("baseline",), sets=("MNIST-II-02",), trials=("0.1", "0.02", "0.10"), seeds=1)
    assert config.trials == ("0.1", "0.02")
    assert Search(config).total() == 2


def test_twelve_trials_of_rate_clip_and_decay_are_the_same_for_every_column():
    config = SearchConfig()
    assert len(config.trials) == len(set(TRIALS)) == 12
    assert (config.seeds, config.fresh) == (2, True)
    assert all(len({getattr(trial, part) for trial in TRIALS}) > 1 for part in ("lr", "clip", "decay"))
    jobs = Search(config).jobs({})
    of = {column: {(j.data, j.seed, j.lr, j.options) for j in jobs if j.network == column} for column in config.models}
    assert config.models == (*MODELS, *MORE)
    assert all(each == of["baseline"] and len(each) == 5 * 12 * 2 for each in of.values())


def test_columns_at_the_edge_of_the_rates_are_named():
    search = Search(SearchConfig(models=("baseline", "A2")))
    choice = {"baseline": {2: Trial(0.1, 1.0), 3: Trial(0.25, 1.0)}, "A2": {2: Trial(0.04, 1.0), 3: Trial(0.016, 3.0)}}
    assert search.at_edge(choice) == ["baseline, 3 digits: 0.25 clip 1", "A2, 3 digits: 0.016 clip 3"]
    shown = search.shown(choice, 100)
    assert shown[-1].startswith("At the edge of the rates that were tried: baseline, 3 digits: 0.25 clip 1; A2")
    assert search.shown({"A2": {2: Trial(0.1)}}, 100)[-1] == "No column is at the edge."


# What is stored


def test_every_column_has_a_stored_choice_for_two_and_for_three_digits():
    stored = stored_choice()
    assert list(stored) == list(MODELS)
    for by_count in stored.values():
        assert set(by_count) == {2, 3}
        assert set(by_count.values()) <= set(STORED)


def test_the_trials_on_record_give_exactly_the_stored_choice(record):
    assert choose(recorded(record)) == stored_choice()
    in_words = {
        column: {int(count): Trial(t["lr"], t["clip"] or math.inf) for count, t in by_count.items()}
        for column, by_count in record["choice"].items()
    }
    assert in_words == stored_choice()


def test_every_column_had_the_same_trials_on_the_sets_of_the_search(record):
    for column in MODELS:
        tried = {}
        for found in recorded(record):
            if found.job.network == column:
                tried.setdefault(found.job.data, []).append(Trial(found.job.lr, found.job.option("clip", math.inf)))
        assert set(tried) == set(SEARCHED_ON)
        assert all(sorted(trials) == sorted(STORED) for trials in tried.values())


def test_what_was_tried_before_is_kept_and_said(record):
    more = [row for row in record["earlier"] if (row["lr"], row["clip"]) == (0.04, 1.0)]
    assert {row["column"] for row in more} == {"baseline", "A2"}
    assert "a ninth trial of baseline and A2 that was not chosen" in record["protocol"]
    starts = {row["lean"] for row in record["earlier"] if "lean" in row}
    assert starts == {0.0, 1.0}
    assert {row["lean"] for row in record["trials"] if row["column"] in VARIANTS} == {LEAN}


def test_all_trials_on_record_have_the_seed_that_the_table_does_not_use(record):
    assert {row["seed"] for row in record["trials"]} == {100}
    assert {row["data"] for row in record["trials"]} == set(SEARCHED_ON)
    assert all(0 < row["error"] < 100 for row in record["trials"])
