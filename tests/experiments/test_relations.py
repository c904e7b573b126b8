"""The recipe of relations: fresh images, equal weights, rates chosen without test digits, the same after any break."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_dcl.data.relations import TASKS, label_pairs
from torch_dcl.experiments import digits as digit_recipes
from torch_dcl.experiments.protocol import Outcome
from torch_dcl.experiments.recipes.relations import COLUMNS, EXTRAS, Relations, RelationsConfig, build_column
from torch_dcl.experiments.run_reader import read_run
from torch_dcl.experiments.runner import plan_fleets, run
from torch_dcl.experiments.settings import SettingError
from torch_dcl.models import count_weights
from torch_dcl.report import report

ROOT = Path(__file__).parents[2]
FEW = {
    "data": "excerpt", "tasks": ("order",), "sizes": (60, 120), "train_images": 120, "test_images": 30, "epochs": 1,
    "batch": 30, "warmup": 2, "rates": (0.05, 0.1), "search_seeds": 1, "seeds": 2,
    "models": ("narrow", "low-rank", "summed", "A2", "power-1"),
}  # fmt: skip


def small(**settings):
    return RelationsConfig(**{**FEW, **settings})


def prepared(**settings):
    made = Relations(small(**settings))
    made.prepare(lambda _: None)
    return made


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "whole"
    return run(Relations(small()), path).result, path


# The protocol


def test_the_defaults_are_those_of_the_protocol():
    config = RelationsConfig()
    text = " ".join((ROOT / "docs" / "protocol.md").read_text(encoding="utf-8").split())
    assert [config.epochs_of(images) for images in config.sizes] == [240, 72, 24]
    assert "14,400 steps of 100 images: 240, 72 and 24 epochs" in text
    assert ", ".join(f"{rate:g}" for rate in config.rates) + "." in text
    assert all(f"| `{task}` |" in text for task in config.tasks)
    assert all(f"| `{column}` |" in text for column in config.models)
    assert f"n = {config.seeds} seeds" in text
    others, sizes = len(config.models) - 1, len(config.sizes)
    assert f"{others} columns × {sizes} sizes = {others * sizes}" in text
    assert (config.search_seeds, config.clip, config.warmup, config.drops) == (2, 1.0, 300, (0.6, 0.9))
    ratios = [b / a for a, b in zip(config.rates, config.rates[1:], strict=False)]
    assert len(config.rates) == 8
    assert max(abs(ratio - 4 / 3) for ratio in ratios) < 0.015


@pytest.mark.parametrize("task", TASKS)
def test_columns_have_equal_weights_to_within_half_a_filter(task):
    classes = TASKS[task].classes
    weights = {column: count_weights(build_column(column, classes, 0)) for column in COLUMNS}
    budget = weights.pop("A2")
    assert weights.pop("plain") == 500 * (800 + classes) + 25_500 > budget
    assert max(abs(each - budget) for each in weights.values()) <= (800 + classes) / 2


def test_further_columns_have_the_weights_of_dcl_and_no_part_in_the_protocol():
    assert RelationsConfig().models == tuple(COLUMNS)
    weights = {column: count_weights(build_column(column, 10, 0)) for column in (*EXTRAS, "A2")}
    assert weights["GLU"] == weights["SORT"] == weights["A2"]
    assert weights["A3S"] - weights["A2"] == 800 + 500  # 3 × 67 filters for 2 × 100
    assert isinstance(build_column("GLU", 10, 0).relu3, nn.Identity)


def test_further_columns_train_and_are_told_apart_from_the_protocol(tmp_path):
    models = ("narrow", "low-rank", "summed", "A2", *EXTRAS)
    config = small(models=models, sizes=(60,), rates=(0.05,), tasks=("same", "difference"), seeds=1)
    result = run(Relations(config), tmp_path / "run").result
    assert [cell["column"] for cell in result["cells"] if cell["task"] == "difference"] == list(models)
    assert "models = " in result["told"][0]


def test_convolutions_of_a_seed_start_alike_in_all_columns():
    state = torch.get_rng_state()
    starts = [build_column(column, 10, 4).conv2.weight for column in (*COLUMNS, *EXTRAS)]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(start, starts[0]) for start in starts)


def test_every_size_takes_as_many_steps():
    made = prepared()
    steps = []
    for images in made.config.sizes:
        fleet = made.fleet(made._trials(images, "order", "A2"))
        steps.append(fleet.epochs * fleet.steps_per_epoch)
    assert steps == [4, 4]


# Images


def test_every_seed_has_fresh_images_and_a_smaller_size_is_their_beginning():
    made = prepared(tasks=("order", "sum"))
    jobs = [job for job in made._reports(lambda *_: 0.1) if job.network == "A2"]
    sets = made.sets_of(jobs)
    assert not torch.equal(sets.train["MNIST-II-05/0"][0], sets.train["MNIST-II-05/1"][0])
    assert not torch.equal(sets.judge["MNIST-II-05/0"][0], sets.judge["MNIST-II-05/1"][0])
    by_cell = {(job.option("images"), job.data): made.fleet([job]).data for job in jobs if job.seed == 1}
    few, many, other = by_cell[60, "order"], by_cell[120, "order"], by_cell[120, "sum"]
    assert torch.equal(few.images[0], many.images[0, :60])
    assert torch.equal(many.images, other.images)
    numbers = sets.train["MNIST-II-05/1"][1]
    assert torch.equal(other.labels[0], label_pairs("sum", numbers))
    assert torch.equal(few.labels[0], label_pairs("order", numbers[:60]))


def test_rates_are_judged_with_training_digits_that_no_training_image_shows(monkeypatch):
    made, seen = prepared(), []
    real = digit_recipes.segment
    monkeypatch.setattr(digit_recipes, "segment", lambda part, split: seen.append(part[0]) or real(part, split))
    made.sets_of(made._trials(60, "order", "A2"))
    train, judge = seen
    given = made.digits.train[0]
    assert torch.equal(torch.cat([train, judge]), given)
    assert len(train) == len(given) * 5 // 6
    made.sets_of(made._reports(lambda *_: 0.1))
    assert torch.equal(seen[2], given)
    assert torch.equal(seen[3], made.digits.test[0])


# The run


def test_a_cell_takes_the_rate_with_the_lowest_mean_validation_error():
    made = prepared(rates=(0.05, 0.1, 0.2), search_seeds=2)
    trials = [job for cell in made.places() for job in made._trials(*cell)]
    assert made.jobs({}) == trials
    errors = {0.05: (30, 30), 0.1: (20, 35), 0.2: (1, 1)}
    outcomes = {
        job: Outcome(job, errors[job.lr][job.seed - 1000], 1.0, 1.0, 0 if job.lr == 0.2 and job.seed == 1001 else None)
        for job in trials
    }
    # 0.2 diverged with one seed, which counts as 100 %: its mean is 50.5, that of 0.1 is 27.5.
    later = made.jobs(outcomes)[len(trials) :]
    assert {job.lr for job in later} == {0.1}
    assert {job.seed for job in later} == {0, 1}
    assert len(made.planned()) == made.total() == len(trials) + len(later)


def test_every_cell_trains_a_block_of_seeds_before_any_cell_trains_the_next():
    made = prepared(seeds=5, block=2)
    cells = list(made.places())
    seeds = [job.seed for job in made._reports(lambda *_: 0.1)]
    assert seeds == [0, 1] * len(cells) + [2, 3] * len(cells) + [4] * len(cells)
    fleets = plan_fleets(made._reports(lambda *_: 0.1), made.group, 160)
    assert [[job.seed for job in fleet] for fleet in fleets[:: len(cells)]] == [[0, 1], [2, 3], [4]]


def test_the_result_has_a_cell_for_every_task_size_and_column(whole):
    result, path = whole
    assert json.loads((path / "relations.json").read_text()) == result
    assert [(c["task"], c["images"], c["column"]) for c in result["cells"]] == [
        ("order", images, column) for images in (60, 120) for column in FEW["models"]
    ]
    for cell in result["cells"]:
        assert len(cell["errors"]) == 2
        assert all(0 <= error <= 100 for error in cell["errors"])
        means = {float(rate): sum(errors) / len(errors) for rate, errors in cell["trials"].items()}
        assert means[cell["chosen"]] == min(means.values())
        assert cell["at_edge"]  # of two rates each is at an edge
        assert ("exponents" in cell) == (cell["column"] == "power-1")
    assert result["steps"] == 4
    assert "seeds = 2" in result["told"][0]


def test_the_exponent_is_learned_and_does_not_decay():
    made = prepared()
    jobs = made._trials(60, "order", "power-1")
    fleet = made.fleet(jobs)
    assert {name for name, (_, decay) in fleet._factors.items() if decay == 0} == {"fc1.raw_exponent"}
    fleet.train()
    ended = [float(fleet.network(row).fc1.exponent.detach()) for row in range(len(jobs))]
    assert all(abs(p - 1) > 1e-5 for p in ended)


def test_a_run_that_was_killed_ends_with_the_same_numbers(whole, tmp_path, killed_at):
    path = tmp_path / "run"
    with killed_at(25):
        run(Relations(small()), path, every=0)
    assert run(Relations(small()), path, resume=True, seconds=0).complete is False
    result = run(Relations(small()), path, resume=True).result
    assert result["cells"] == whole[0]["cells"]


def test_a_run_before_its_end_shows_the_cells_that_are_there(whole, tmp_path):
    path = tmp_path / "run"
    assert run(Relations(small(block=1)), path).result["cells"] == whole[0]["cells"]  # whatever the blocks are
    lines = (path / "outcomes.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 30  # fleets of five columns and two sizes: of the search, and of each seed
    (path / "relations.json").unlink()
    first = {(cell["images"], cell["column"]): cell for cell in whole[0]["cells"]}
    for fleets, trainings, cells in ((10 + 7, 27, 7), (10 + 10 + 3, 33, 10), (30, 40, 10)):
        (path / "outcomes.jsonl").write_text("".join(lines[:fleets]))
        shown = read_run(path).parts["relations"]
        seeds = 2 if fleets == 30 else 1  # three cells of the fewest images have a second seed, and two do not
        assert len(shown["cells"]) == cells
        for cell in shown["cells"]:
            assert cell["errors"] == first[cell["images"], cell["column"]]["errors"][:seeds]
        if fleets < 30:
            assert shown["told"][0] == f"Not at its end: {trainings} of 40 trainings."
            assert "Not at its end" in report([path])
    (path / "outcomes.jsonl").write_text("".join(lines[:9]))
    assert "relations" not in read_run(path).parts


# Invalid settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": ("product",)}, "there is no task 'product'"),
        ({"sizes": (60, 121)}, "sizes has 121, more than the 120 images of the set; .* such as --set sizes=120"),
        ({"train_images": 60_001}, "train_images must be at least 1 and at most 60,000"),
        ({"sizes": (20,)}, "sizes has 20, less than one batch; give at least 30"),
        ({"models": ("A2",)}, "models lacks narrow, low-rank, summed: .* give --models narrow,low-rank,summed,A2"),
        ({"models": ("plain", "narrow", "low-rank", "summed")}, "models lacks A2"),
        ({"clip": 0}, "clip must be above 0"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(settings, message):
    with pytest.raises(SettingError, match=message):
        small(**settings)
