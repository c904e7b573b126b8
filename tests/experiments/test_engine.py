"""Jobs in, errors out: nothing lost, nothing mixed up, and nothing that depends on who trains beside whom."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from torch_dcl.experiments.columns import build
from torch_dcl.experiments.digits import Sets, make_sets, read_mnist
from torch_dcl.experiments.engine import Job, Settings, plan_fleets, run_jobs
from torch_dcl.fleet import Fleet, Member, Schedule

TWO, THREE = "MNIST-II-01", "MNIST-III-10"
EXACT = Settings(Schedule(1), batch=50, precision="float64")


@pytest.fixture(scope="module")
def sets():
    return make_sets(read_mnist(None), [TWO, "MNIST-II-05", THREE], "report", images=(100, 60))


def close(a, b):
    """The same outcome up to the order of sums in float64."""
    assert a.job == b.job
    assert a.error == b.error
    assert (a.test_loss, a.train_loss) == pytest.approx((b.test_loss, b.train_loss), rel=1e-10)
    assert a.stopped == b.stopped


# Jobs and fleets


def test_a_job_knows_its_networks_and_classes():
    sizes = {
        (column, data): (job.digits, job.networks, job.classes)
        for column in ("baseline", "A2", "oracle")
        for data in (TWO, f"{THREE}@0.51")
        for job in [Job(column, data, 0, 0.1)]
    }
    assert sizes == {
        ("baseline", TWO): (2, 1, 100), ("A2", TWO): (2, 1, 100), ("oracle", TWO): (2, 2, 10),
        ("baseline", f"{THREE}@0.51"): (3, 1, 1000), ("A2", f"{THREE}@0.51"): (3, 1, 1000),
        ("oracle", f"{THREE}@0.51"): (3, 3, 10),
    }  # fmt: skip


jobs_of_any_kind = st.builds(
    Job,
    column=st.sampled_from(["baseline", "oracle", "A2", "A3S", "narrow"]),
    data=st.sampled_from([TWO, "MNIST-II-05", THREE, f"{THREE}@1.5"]),
    seed=st.integers(0, 5),
    lr=st.sampled_from([0.02, 0.07]),
    clip=st.sampled_from([1.0, math.inf]),
    filters=st.sampled_from([None, 10, 50]),
)


@hypothesis_settings(max_examples=200)
@given(jobs=st.lists(jobs_of_any_kind, max_size=60), most=st.integers(3, 20))
def test_fleets_hold_every_job_once_and_are_of_one_architecture_and_not_too_large(jobs, most):
    fleets = plan_fleets(jobs, most)
    planned = [job for fleet in fleets for job in fleet]
    assert len(planned) == len(set(planned))
    assert set(planned) == set(jobs)
    for fleet in fleets:
        assert len({(job.column, job.classes, job.filters) for job in fleet}) == 1
        assert 1 <= sum(job.networks for job in fleet) <= most
    for first, second in itertools.pairwise(fleets):
        kinds = {(job.column, job.classes, job.filters) for job in (first[0], second[0])}
        if len(kinds) == 1:
            # A fleet is ended only by a job that does not fit.
            assert sum(job.networks for job in first) + second[0].networks > most


@given(st.lists(jobs_of_any_kind, max_size=30), st.randoms())
def test_fleets_of_one_architecture_do_not_depend_on_how_columns_are_mixed(jobs, random):
    by_column = sorted(dict.fromkeys(jobs), key=lambda job: job.column)
    mixed = {column: [job for job in by_column if job.column == column] for column in {j.column for j in jobs}}
    order = [job.column for job in by_column]
    random.shuffle(order)
    woven = [mixed[column].pop(0) for column in order]
    assert plan_fleets(woven, 7) == plan_fleets(by_column, 7)


# Training


def test_outcomes_come_in_the_order_of_the_jobs_and_are_kept_fleet_by_fleet(sets):
    jobs = [
        Job("A2", TWO, 1, 0.02), Job("baseline", TWO, 0, 0.02), Job("A2", "MNIST-II-05", 0, 0.02),
        Job("oracle", TWO, 0, 0.02), Job("A2", TWO, 0, 0.02), Job("A2", TWO, 1, 0.02),
    ]  # fmt: skip
    lines, kept = [], []
    outcomes = run_jobs(jobs, sets, dataclasses.replace(EXACT, most=2), lines.append, kept.append)
    assert [outcome.job for outcome in outcomes] == jobs
    assert sorted(len(part) for part in kept) == [1, 1, 1, 2]
    assert {outcome.job for part in kept for outcome in part} == set(jobs)
    assert [line.split(",")[0] for line in lines] == [f"fleet {i} of 4" for i in (1, 2, 3, 4)]
    assert "A2, 100 classes: 2 networks" in "\n".join(lines)


@pytest.mark.parametrize("column", ["baseline", "oracle", "A3S"])
def test_a_job_errs_as_often_alone_as_among_others(sets, column):
    job = Job(column, TWO, 3, 0.05, 2.0)
    others = [Job(column, "MNIST-II-05", 3, 0.05), Job(column, TWO, 1, 0.01)]
    close(run_jobs([job], sets, EXACT)[0], run_jobs([*others, job], sets, EXACT)[-1])


def digit_by_digit(job, sets, digit_of):
    """Train the oracle's networks one after the other, without the engine."""
    found = []
    for place in range(job.digits):
        train, judge = (
            {"d": (images, torch.tensor([digit_of(number, place) for number in labels.tolist()]))}
            for images, labels in (sets.train[job.data], sets.judge[job.data])
        )
        seed = job.seed + 1000 * place
        member = Member("digit", "d", seed, job.lr, EXACT.schedule, job.weight_decay, job.clip)
        fleet = Fleet([build("baseline", 10, seed)], [member], train, batch=50, precision="float64")
        history = fleet.train()
        seen = fleet.evaluate(judge)
        found.append((seen.predictions[0].tolist(), float(seen.losses[0]), history.train_loss[-1][0]))
    return found


@pytest.mark.parametrize("name", [TWO, THREE])
def test_the_oracle_is_right_where_all_of_its_digits_are(sets, name):
    job = Job("oracle", name, 2, 0.05)
    parts = digit_by_digit(job, sets, lambda number, place: int(f"{number:0{job.digits}d}"[place]))
    numbers = [int("".join(map(str, digits))) for digits in zip(*(part[0] for part in parts), strict=True)]
    # The first image has the number that was read, the second another last digit, the third another second to last...
    images = sets.judge[name][0]
    wrong = [0, *(10**place for place in range(job.digits)), 10**job.digits - 1]
    labels = [(number + wrong[i % len(wrong)]) % 10**job.digits for i, number in enumerate(numbers)]
    made_up = Sets(sets.train, {name: (images, torch.tensor(labels))})
    outcome = run_jobs([job], made_up, EXACT)[0]
    slow = 100 * sum(a != b for a, b in zip(numbers, labels, strict=True)) / len(labels)
    assert 50 < slow < 90
    assert outcome.error == pytest.approx(slow, abs=1e-9)
    assert outcome.train_loss == pytest.approx(sum(part[2] for part in parts), rel=1e-10)
    judged = run_jobs([job], sets, EXACT)[0]
    assert judged.test_loss == pytest.approx(sum(part[1] for part in parts), rel=1e-10)


def test_networks_are_given_when_they_are_asked_for_and_judge_as_was_noted(sets):
    jobs = [Job("A2", TWO, 0, 0.05), Job("oracle", TWO, 0, 0.05)]
    given, oracle = run_jobs(jobs, sets, dataclasses.replace(EXACT, networks=True))
    assert oracle.network is None
    assert all(outcome.network is None for outcome in run_jobs(jobs, sets, EXACT))
    images, labels = sets.judge[TWO]
    with torch.no_grad():
        logits = given.network(images[:, None].double() / 255)
    assert not given.network.training
    assert given.error == pytest.approx(100 * float((logits.argmax(1) != labels).double().mean()), abs=1e-9)
    assert given.test_loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-10)


def test_curves_have_one_value_an_epoch_and_end_where_the_training_did(sets):
    long = dataclasses.replace(EXACT, schedule=Schedule(3), batch=100)
    job = Job("baseline", TWO, 0, 0.05)
    plain, curved = (run_jobs([job], sets, dataclasses.replace(long, curves=wanted))[0] for wanted in (False, True))
    assert plain.curves == ([], [])
    assert [len(curve) for curve in curved.curves] == [3, 3]
    assert (curved.curves[0][-1], curved.curves[1][-1]) == (curved.train_loss, curved.test_loss)
    close(plain, curved)
    first = run_jobs([job], sets, dataclasses.replace(EXACT, batch=100))[
        0
    ]  # without drops the first epoch does not know how many follow
    assert (curved.curves[0][0], curved.curves[1][0]) == pytest.approx((first.train_loss, first.test_loss), rel=1e-10)


def test_curves_of_an_oracle_end_where_its_losses_do(sets):
    outcome = run_jobs([Job("oracle", TWO, 0, 0.05)], sets, dataclasses.replace(EXACT, curves=True))[0]
    assert outcome.curves[1][-1] == pytest.approx(outcome.test_loss, rel=1e-10)


def test_a_training_that_diverges_is_noted_and_harms_no_other(sets):
    fine, wild = Job("baseline", TWO, 0, 0.02), Job("baseline", TWO, 1, 1e200)
    outcomes = run_jobs([wild, fine], sets, EXACT)
    assert outcomes[0].stopped == 0
    close(outcomes[1], run_jobs([fine], sets, EXACT)[0])


def test_every_setting_of_a_job_counts(sets):
    base = Job("A2", TWO, 0, 0.05)
    changes = (
        {"seed": 1},
        {"lr": 0.06},
        {"clip": 0.1},
        {"weight_decay": 0.1},
        {"filters": 50},
        {"data": "MNIST-II-05"},
    )
    jobs = [base, *(dataclasses.replace(base, **change) for change in changes)]
    losses = [outcome.test_loss for outcome in run_jobs(jobs, sets, EXACT)]
    assert len(set(losses)) == len(losses)


def test_progress_is_told_before_a_fleet_and_after_each_of_its_epochs(sets):
    jobs = [Job("A2", TWO, 0, 0.02), Job("A2", TWO, 1, 0.02), Job("oracle", TWO, 0, 0.02)]
    seen = []
    told = dataclasses.replace(EXACT, schedule=Schedule(2), on_epoch=seen.append)
    outcomes = run_jobs(jobs, sets, told)
    assert [(at.fleet, at.fleets, at.name, at.networks) for at in seen[::3]] == [
        (1, 2, "A2, 100 classes", 2), (2, 2, "oracle, 10 classes", 2),
    ]  # fmt: skip
    assert [(at.epoch, at.epochs) for at in seen] == 2 * [(0, 2), (1, 2), (2, 2)]
    assert outcomes == run_jobs(jobs, sets, dataclasses.replace(told, on_epoch=None))


def test_the_time_of_a_fleet_is_shared_out_by_networks(sets):
    jobs = [Job("oracle", TWO, 0, 0.02), Job("oracle", "MNIST-II-05", 0, 0.02)]
    lines = []
    first, second = run_jobs(jobs, sets, EXACT, lines.append)
    assert first.seconds == second.seconds > 0
    assert first.seconds + second.seconds == pytest.approx(float(lines[0].split()[-2]), abs=0.06)


def test_a_set_that_is_not_there_is_an_error(sets):
    with pytest.raises(KeyError, match="MNIST-II-02"):
        run_jobs([Job("baseline", "MNIST-II-02", 0, 0.02)], sets, EXACT)
