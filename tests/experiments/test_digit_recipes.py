"""LeNets on multi-digit sets: nothing lost, nothing mixed up, and nothing that depends on who trains with whom."""

import dataclasses
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from torch_dcl.experiments.columns import build
from torch_dcl.experiments.digits import DigitConfig, DigitRecipe, classes_of, find_digits, make_sets, read_mnist
from torch_dcl.experiments.protocol import Job, Trained
from torch_dcl.experiments.recipes.table1 import Table1, Table1Config
from torch_dcl.experiments.runner import plan_fleets
from torch_dcl.experiments.settings import SettingError, with_settings
from torch_dcl.fleet import Fleet, Member, Schedule

TWO, THREE = "MNIST-II-01", "MNIST-III-10"
CONFIG = DigitConfig(
    epochs=1, warmup=0, drops=(), batch=50, precision="float64", train_images=100, test_images=60, data="excerpt"
)


class Plain(DigitRecipe[DigitConfig]):
    """Any jobs."""

    name, config_type = "plain", DigitConfig

    def jobs(self, _outcomes):
        return []

    def result(self, _folder):
        return None

    def shown(self, _result, _width):
        return []


def train(jobs, sets=None, *, curves=False, **changes):
    """Train jobs of one architecture as one fleet, as the runner does."""
    recipe = Plain(dataclasses.replace(CONFIG, **changes))
    recipe.digits = MNIST
    if sets is not None:
        recipe.sets_of = lambda _jobs: sets
    fleet, losses = recipe.fleet(jobs), []
    fleet.train(on_epoch=lambda f: losses.append(f.evaluate(recipe.judge(jobs)).losses.tolist()) if curves else None)
    return recipe.outcomes(jobs, Trained(fleet, fleet.evaluate(recipe.judge(jobs)), losses, 6.0))


MNIST = read_mnist(None)


@pytest.fixture(scope="module")
def sets():
    return make_sets(MNIST, [TWO, "MNIST-II-05", THREE], "report", images=(100, 60))


def close(a, b):
    """The same outcome up to the order of sums in float64."""
    assert a.job == b.job
    assert a.error == b.error
    assert (a.test_loss, a.train_loss) == pytest.approx((b.test_loss, b.train_loss), rel=1e-10)
    assert a.stopped == b.stopped


# Jobs and fleets


def test_a_job_has_a_network_for_each_digit_if_it_is_an_oracle():
    recipe = Plain(CONFIG)
    sizes = {
        (column, data): (recipe.networks(job), classes_of(job))
        for column in ("baseline", "A2", "oracle")
        for data in (TWO, f"{THREE}@0.51")
        for job in [Job(column, data, 0, 0.1)]
    }
    assert sizes == {
        ("baseline", TWO): (1, 100), ("A2", TWO): (1, 100), ("oracle", TWO): (2, 10),
        ("baseline", f"{THREE}@0.51"): (1, 1000), ("A2", f"{THREE}@0.51"): (1, 1000),
        ("oracle", f"{THREE}@0.51"): (3, 10),
    }  # fmt: skip


jobs_of_any_kind = st.builds(
    Job,
    network=st.sampled_from(["baseline", "oracle", "A2", "A3S", "narrow"]),
    data=st.sampled_from([TWO, "MNIST-II-05", THREE, f"{THREE}@1.5"]),
    seed=st.integers(0, 5),
    lr=st.sampled_from([0.02, 0.07]),
    options=st.sampled_from([(), (("clip", 1.0),), (("filters", 10.0),), (("filters", 50.0),)]),
)


@hypothesis_settings(max_examples=200)
@given(jobs=st.lists(jobs_of_any_kind, max_size=60), most=st.integers(3, 20))
def test_fleets_hold_every_job_once_and_are_of_one_architecture_and_not_too_large(jobs, most):
    recipe = Plain(CONFIG)
    fleets = plan_fleets(jobs, recipe.group, most, recipe.networks)
    planned = [job for fleet in fleets for job in fleet]
    assert len(planned) == len(set(planned))
    assert set(planned) == set(jobs)
    kinds = [{(job.network, classes_of(job), job.option("filters", 0)) for job in fleet} for fleet in fleets]
    sizes = [sum(map(recipe.networks, fleet)) for fleet in fleets]
    assert all(len(kind) == 1 for kind in kinds)
    assert all(1 <= size <= most for size in sizes)
    for i, j in itertools.pairwise(range(len(fleets))):
        if kinds[i] == kinds[j]:
            # A fleet is ended only by a job that does not fit.
            assert sizes[i] + recipe.networks(fleets[j][0]) > most


# Training


@pytest.mark.parametrize("column", ["baseline", "oracle", "A3S"])
def test_a_job_errs_as_often_alone_as_among_others(sets, column):
    job = Job(column, TWO, 3, 0.05, options=(("clip", 2.0),))
    others = [Job(column, "MNIST-II-05", 3, 0.05), Job(column, TWO, 1, 0.01)]
    close(train([job], sets)[0], train([*others, job], sets)[-1])


def digit_by_digit(job, sets, digits):
    """Train the oracle's networks one after the other, without the recipe."""
    trained = []
    for place in range(digits):
        learn, judge = (
            {"d": (images, torch.tensor([int(f"{number:0{digits}d}"[place]) for number in labels.tolist()]))}
            for images, labels in (sets.train[job.data], sets.judge[job.data])
        )
        seed = job.seed + 1000 * place
        member = Member("digit", "d", seed, job.lr, Schedule(1))
        fleet = Fleet([build("baseline", 10, seed)], [member], learn, batch=50, precision="float64")
        history = fleet.train()
        seen = fleet.evaluate(judge)
        trained.append((seen.predictions[0].tolist(), float(seen.losses[0]), history.train_loss[-1][0]))
    return trained


@pytest.mark.parametrize(("name", "digits"), [(TWO, 2), (THREE, 3)])
def test_the_oracle_is_right_where_all_of_its_digits_are(sets, name, digits):
    job = Job("oracle", name, 2, 0.05)
    parts = digit_by_digit(job, sets, digits)
    numbers = [int("".join(map(str, each))) for each in zip(*(part[0] for part in parts), strict=True)]
    # The first image has the number that was read, the second another last digit, the third another second to last...
    images = sets.judge[name][0]
    wrong = [0, *(10**place for place in range(digits)), 10**digits - 1]
    labels = [(number + wrong[i % len(wrong)]) % 10**digits for i, number in enumerate(numbers)]
    changed = SimpleNamespace(train=sets.train, judge={name: (images, torch.tensor(labels))})
    outcome = train([job], changed)[0]
    slow = 100 * sum(a != b for a, b in zip(numbers, labels, strict=True)) / len(labels)
    assert 50 < slow < 90
    assert outcome.error == pytest.approx(slow, abs=1e-9)
    assert outcome.train_loss == pytest.approx(sum(part[2] for part in parts), rel=1e-10)
    assert train([job], sets)[0].test_loss == pytest.approx(sum(part[1] for part in parts), rel=1e-10)


def test_curves_have_one_value_an_epoch_and_end_where_the_training_did(sets):
    for column in ("baseline", "oracle"):
        job = Job(column, TWO, 0, 0.05)
        plain, curved = (train([job], sets, curves=wanted, epochs=3, batch=100)[0] for wanted in (False, True))
        assert plain.extra == {}
        curves = curved.extra["curves"]
        assert [len(curve) for curve in curves.values()] == [3, 3]
        assert (curves["train_loss"][-1], curves["test_loss"][-1]) == (curved.train_loss, curved.test_loss)
        close(plain, curved)
        first = train([job], sets, batch=100)[0]  # without drops the first epoch does not know how many follow
        assert curves["test_loss"][0] == pytest.approx(first.test_loss, rel=1e-10)


def test_a_training_that_diverges_is_noted_and_harms_no_other(sets):
    fine, wild = Job("baseline", TWO, 0, 0.02), Job("baseline", TWO, 1, 1e200)
    outcomes = train([wild, fine], sets)
    assert outcomes[0].stopped == 0
    close(outcomes[1], train([fine], sets)[0])


def test_every_setting_of_a_job_counts(sets):
    base = Job("A2", TWO, 0, 0.05)
    changes = (
        {"seed": 1},
        {"lr": 0.06},
        {"options": (("clip", 0.1),)},
        {"options": (("weight_decay", 0.1),)},
        {"data": "MNIST-II-05"},
    )
    jobs = [base, *(dataclasses.replace(base, **change) for change in changes)]
    losses = [outcome.test_loss for outcome in train(jobs, sets)]
    losses += [train([dataclasses.replace(base, options=(("filters", 50.0),))], sets)[0].test_loss]
    assert len(set(losses)) == len(losses)


def test_the_time_of_a_fleet_is_shared_out_by_networks(sets):
    jobs = [Job("oracle", TWO, 0, 0.02), Job("oracle", THREE, 0, 0.02)]
    assert [outcome.seconds for outcome in train(jobs, sets)] == pytest.approx([6 * 2 / 5, 6 * 3 / 5])


def test_a_set_that_is_not_there_is_an_error():
    with pytest.raises(KeyError, match="MNIST-IV-02"):
        train([Job("baseline", "MNIST-IV-02", 0, 0.02)])


def test_sets_are_written_once_a_phase(monkeypatch):
    recipe, written = Plain(CONFIG), []
    recipe.digits = MNIST
    monkeypatch.setattr(
        "torch_dcl.experiments.digits.make_sets",
        lambda _digits, names, *_, **__: (
            written.append(list(names)) or SimpleNamespace(train=dict.fromkeys(names), judge=dict.fromkeys(names))
        ),
    )
    for phase, names in (("a", [TWO, THREE]), ("a", [TWO]), ("b", [TWO]), ("b", [TWO, THREE])):
        recipe.sets_of([Job("A2", name, 0, 0.1, phase) for name in names])
    assert written == [[TWO, THREE], [TWO], [THREE]]


# Settings and data


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"drops": "0.9,0.6"}, "drops must rise"),
        ({"factor": 0}, "factor must be above 0"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"batch": 10**9}, "batch must be at least 1 and at most 100,000"),
        ({"precision": "float23"}, "there is no precision 'float23'"),
        ({"precision": "all"}, "precision is one precision, not 'all'"),
    ],
)
def test_an_invalid_schedule_is_refused(settings, told):
    with pytest.raises(SettingError, match=told):
        with_settings(CONFIG, settings)


def test_there_may_be_no_drop():
    assert with_settings(CONFIG, {"drops": ""}).schedule == Schedule(1, 0, (), 0.1)


def test_a_folder_without_mnist_is_refused(tmp_path):
    with pytest.raises(SettingError, match="has no idx files of MNIST"):
        find_digits(str(tmp_path))
    assert find_digits("excerpt") is None


def test_every_image_is_asked_for_where_all_are():
    assert DigitConfig().images is None
    assert DigitConfig(test_images=10).images == (60_000, 10)
    assert math.isclose(DigitConfig().schedule.factor, 0.1)


def test_an_estimate_counts_the_images_that_a_fleet_copies():
    """With images of its own for every seed a fleet has a second copy of all of them: most of its memory."""
    recipe = Table1(Table1Config(sets=("MNIST-II-01",), models=("baseline",), seeds=20, fresh=True))
    assert recipe.memory(recipe.workloads()) > 2 * 20 * 60_000 * 28 * 28 / 2**30


@pytest.mark.parametrize(("warmup", "said"), [(300, ["all 15 steps are within the warm-up of 300"]), (15, [])])
def test_a_training_that_ends_within_its_warm_up_says_so(warmup, said):
    told = []
    Table1(Table1Config(data="excerpt", epochs=1, train_images=1500, warmup=warmup)).prepare(told.append)
    assert [line.partition(";")[0] for line in told[1:]] == said
