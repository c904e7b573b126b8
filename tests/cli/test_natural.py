"""`dcl run table2` and `dcl run chart`: on files of the right form, on made-up images, and without any."""

import itertools
import json
import math
import os
import re
import shutil
import signal
import socket

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.data.test_sources import write_cifar
from tests.processes import Process
from typer.testing import CliRunner

from torch_dcl.cli.app import app
from torch_dcl.cli.config import recipe
from torch_dcl.cli.config import with_settings as change
from torch_dcl.cli.console import console
from torch_dcl.experiments import load as load_table2
from torch_dcl.experiments.natural_data import NOT_AVAILABLE, read_data
from torch_dcl.experiments.natural_networks import DATA, weights
from torch_dcl.experiments.recipes import table2
from torch_dcl.experiments.recipes.chart import chart_grid
from torch_dcl.experiments.rival_layers import unit_weights
from torch_dcl.experiments.settings import SettingError
from torch_dcl.fleet import Fleet


def with_settings(asked, settings):
    return change(asked, settings).config


# 20 images to train on, two epochs of the LeNet variant
SHORT = (
    "--models", "lenet,lenet+dcl", "--seeds", "2", "--set", "scale=0.0134", "--set", "batch=5", "--set", "factorial=no",
)  # fmt: skip


def put_cifar(folder, name="cifar10"):
    write_cifar(folder / {"cifar10": "cifar-10-batches-bin", "cifar100": "cifar-100-binary"}[name], name)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of Table 2 on CIFAR-10 and without SVHN, and what was printed."""
    place = tmp_path_factory.mktemp("table2")
    put_cifar(place / "images")
    words = ["run", "table2", *SHORT, "--data", f"cifar10,svhn,{place / 'images'}", "--out", str(place / "run")]
    done = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "120"}).invoke(app, words)
    assert done.exit_code == 0, done.output
    return place / "run", done.output


@pytest.fixture
def run(finished, folder):
    shutil.copytree(finished[0], folder / "runs" / "mine")
    return folder / "runs" / "mine"


@pytest.fixture(scope="module")
def chart(tmp_path_factory):
    """A smoke run of the chart with two units, and what was printed."""
    out = tmp_path_factory.mktemp("chart") / "run"
    words = ["run", "chart", "--smoke", "--set", "units=star,dcl", "--out", str(out)]
    done = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "120"}).invoke(app, words)
    assert done.exit_code == 0, done.output
    return out, done.output


# Table 2


def test_a_run_prints_its_table_and_leaves_it(finished):
    out, shown = finished
    table = load_table2(out / "table2.json")
    assert [(cell.set, cell.column, cell.seeds) for cell in table.cells] == [
        ("cifar10", "lenet", (0, 1)), ("cifar10", "lenet+dcl", (0, 1)),
    ]  # fmt: skip
    for cell in table.cells:
        spread = f"{cell.mean:.2f} ± {cell.std:.2f} (2)"
        assert re.search(rf"{re.escape(cell.column)} +{cell.paper} +{re.escape(spread)}.* {cell.weights:,}", shown)
        assert cell.minutes > 0
    assert "…" not in shown
    assert (out / "table2.html").read_text().startswith("<!doctype html>")


def test_data_that_is_not_there_is_noted_with_where_to_put_it(finished):
    out, shown = finished
    assert re.search(rf"svhn +{NOT_AVAILABLE}", shown)
    assert "put train_32x32.mat, test_32x32.mat, extra_32x32.mat into" in shown
    assert "download=True" not in shown  # that is for Python
    assert load_table2(out / "table2.json").absent == {"svhn": NOT_AVAILABLE}


def test_a_shortened_run_and_other_batches_are_marked(finished):
    out, shown = finished
    title = load_table2(out / "table2.json").title
    assert "shortened to 0.0134 of the epochs" in title
    assert "a trial, not the protocol" in title
    assert "Batches of 5 images instead of the recipe's." in shown


def test_without_any_data_nothing_is_begun_and_the_files_are_named(dcl, folder):
    shown = dcl("run", "table2", "--data", "cifar10,svhn", code=2)
    assert "put cifar-10-binary.tar.gz into data" in shown
    assert "put train_32x32.mat" in shown
    assert "--smoke" in shown
    assert not (folder / "runs").exists()


def test_a_dry_run_counts_and_writes_nothing(dcl, dcl_for_machines, folder):
    put_cifar(folder / "data")
    words = ("run", "table2", "--networks", "lenet", "--data", "cifar10,svhn", "--seeds", "4", "--set", "scale=0.1")
    found, _ = dcl_for_machines(*words, "--dry-run", "--json")
    assert found["networks"] == 12 + 8  # three columns, and the combinations of LeNet's options
    assert found["images"] == 12 * 15 * 50_000 + 8 * 15 * 45_000
    assert found["available"] == ["cifar10"]
    assert "train_32x32.mat" in found["absent"]["svhn"]
    assert found["minutes"] == pytest.approx(found["images"] / found["images_per_s"]["lenet"] / 60)
    assert 0.1 < found["memory_gib"] < 10
    assert not (folder / "runs").exists()


def test_smoke_takes_no_data_and_says_that_it_is_a_trial(dcl, folder):
    shown = dcl("run", "table2", "--smoke", "--networks", "lenet", "--models", "lenet", "--seeds", "1")
    assert "a trial, not the protocol" in shown
    assert "The images are synthetic" in shown
    assert "table2-smoke  table2  finished, 1 entry" in dcl("ls")
    assert "runs/table2-smoke-2" in dcl("run", "table2", "--smoke", "--models", "lenet", "--seeds", "1")


def test_slices_end_in_the_middle_of_a_training_and_give_the_same_table(dcl, finished, folder):
    put_cifar(folder / "images")
    words = ("run", "table2", *SHORT, "--data", "cifar10,svhn,images", "--minutes", "1e-9")
    shown = dcl(*words)
    assert "epoch 1 of 2" in shown
    assert "Time is up" in shown
    assert "0 of 4 entries" in shown
    assert len(list((folder / "runs/table2/fleets").iterdir())) == 1
    assert "incomplete, 0 of 4 entries" in dcl("ls")
    assert "has no results yet" in dcl("report", "runs/table2", code=2)
    assert "resumed after epoch 1 of 2" in dcl("run", "runs/table2", "--resume")
    mine, whole = (load_table2(path / "table2.json") for path in (folder / "runs/table2", finished[0]))
    assert mine.cells == whole.cells
    assert (mine.absent, mine.title) == (whole.absent, whole.title)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_stops_between_two_steps_saves_and_says_how_to_resume(
    dcl, finished, folder, monkeypatch, number, code
):
    put_cifar(folder / "images")
    before = signal.signal(number, signal.default_int_handler)  # a shell's background has interrupts ignored
    real, taken = Fleet._one_step, itertools.count()

    def one_step(fleet):
        real(fleet)
        if next(taken) == 5:  # in the middle of the second epoch
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patched:
        patched.setattr(Fleet, "_one_step", one_step)
        shown = dcl("run", "table2", *SHORT, "--data", "cifar10,svhn,images", code=code)
    signal.signal(number, before)
    assert f"Stopped by {number.name}" in shown
    assert "dcl run runs/table2 --resume" in shown
    assert next(taken) == 6
    (kept,) = (folder / "runs/table2/fleets").iterdir()
    assert kept.name.endswith("-00001-000002.safetensors")
    dcl("run", "runs/table2", "--resume")
    mine, whole = (load_table2(path / "table2.json") for path in (folder / "runs/table2", finished[0]))
    assert mine.cells == whole.cells


def test_a_network_that_fails_does_not_end_the_run_and_is_named(dcl, folder, monkeypatch):
    put_cifar(folder / "images")
    real = table2.make_fleet

    def broken(column, *arguments):
        if column == "lenet":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(column, *arguments)

    words = ("run", "table2", *SHORT, "--data", "cifar10,images", "--out", "runs/[/b]")
    with monkeypatch.context() as patched:
        patched.setattr(table2, "make_fleet", broken)
        shown = dcl(*words, code=1)
    assert "lenet on cifar10 (2 jobs) failed: OutOfMemoryError: CUDA out of memory." in shown
    assert "runs/[/b] is incomplete, 2 of 4 entries" in " ".join(shown.split())
    assert "2 of 4 entries are done already" in dcl("run", "runs/[/b]", "--resume")


def test_a_resume_of_a_finished_run_trains_nothing(dcl, run, folder, finished):
    before = (run / "outcomes.jsonl").read_text()
    assert "4 of 4 entries are done already" in dcl("run", "runs/mine", "--resume")
    assert (run / "outcomes.jsonl").read_text() == before
    assert "seeds: 2 then, 3 now" in dcl("run", "runs/mine", "--resume", "--seeds", "3", code=2)


def test_ls_report_and_doctor_know_the_run(dcl, dcl_for_machines, run, folder):
    row = dcl_for_machines("ls", "--json")[0]["runs"][0]
    assert (row["recipe"], row["state"], row["done"], row["total"]) == ("table2", "finished", 4, 4)
    settings = json.loads(dcl("ls", "mine", "--json"))
    assert (settings["models"], settings["data"]) == (["lenet", "lenet+dcl"], ["cifar10", "svhn"])
    dcl("report", "mine", "-o", "page.html")
    page = (folder / "page.html").read_text()
    assert page.split("<summary>The recipe")[0].count(NOT_AVAILABLE) == 3  # a sentence, and two cells
    assert "Goodfellow et al. 2013" in page
    dcl("doctor", "runs/mine")
    dcl("report", "mine", "-o", "both.json")
    assert load_table2(folder / "both.json") == load_table2(run / "table2.json")
    assert "two of the tables have lenet on cifar10" in dcl("report", "mine", "both.json", "-o", "twice.json", code=2)
    assert not (folder / "twice.json").exists()


@pytest.mark.slow
def test_two_processes_share_a_run(finished, folder, environment):
    put_cifar(folder / "images")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = ["-m", "torch_dcl", "run", "table2", *SHORT, "--data", "cifar10,svhn,images"]
    shared = {**environment, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        Process(words, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=folder) for rank in range(2)
    ]
    assert [process.wait(timeout=300) for process in ranks] == [0, 0]
    table, whole = (load_table2(path / "table2.json") for path in (folder / "runs/table2", finished[0]))
    for mine, theirs in zip(table.cells, whole.cells, strict=True):
        assert (mine.set, mine.column, mine.seeds) == (theirs.set, theirs.column, theirs.seeds)
        assert mine.test_loss == pytest.approx(theirs.test_loss, rel=1e-4)
    assert len((folder / "runs/table2/outcomes-1.jsonl").read_text().splitlines()) == 1  # a fleet


def test_the_time_left_is_that_of_the_fleet_and_counts_only_what_was_done_now(monkeypatch):
    from torch_dcl import progress as bar

    clock = [0.0]
    monkeypatch.setattr(bar.time, "monotonic", lambda: clock[0])
    shown = bar.Bar(console(), 6, "networks", by_step=True, every=1e9)
    shown.now("wrn on cifar10")
    shown.inside(0, 200, "epochs")
    assert shown.left is None
    shown.inside(50, 200, "epochs")  # from a checkpoint
    assert shown.left is None
    clock[0] = 20.0
    shown.inside(60, 200, "epochs")
    assert shown.left == pytest.approx(2.0 * 140)
    assert "about 4:40 min left for this fleet" in shown.line()


# What --data means


def test_data_is_sets_or_a_folder_or_both(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    (tmp_path / "svhn").mkdir()
    assert read_data("svhn,cifar10", DATA) == (["cifar10", "svhn"], None)
    assert read_data("CIFAR-100,images", DATA) == (["cifar100"], "images")
    assert read_data("images", DATA, one=True) == ([], "images")
    assert read_data("svhn", DATA) == (["svhn"], None)  # the set, though a folder is called so
    assert read_data("./svhn", DATA) == ([], "./svhn")
    assert read_data("all", DATA) == (list(DATA), None)
    made = with_settings(recipe("table2"), {"data": "images"})
    assert (made.data, made.root) == (DATA, "images")
    made = with_settings(recipe("chart"), {"data": "cifar100,images"})
    assert (made.data, made.root) == ("cifar100", "images")


@pytest.mark.parametrize(
    ("given", "one", "told"),
    [
        ("cifar11", False, "there is no set 'cifar11', and no folder of that name"),
        ("no/such", False, "no folder either"),
        ("mnist", False, "there is no set 'mnist'"),
        ("cifar10,cifar100", True, "one set"),
        ("", False, "no data is named"),
        ("a,b", False, "2 folders"),
    ],
)
def test_data_that_is_invalid_is_refused(tmp_path, monkeypatch, given, one, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with pytest.raises(SettingError, match=re.escape(told)):
        read_data(given, DATA, one=one)


@given(st.sets(st.sampled_from(DATA), min_size=1), st.randoms())
def test_sets_come_in_the_table_s_order_whatever_was_typed(names, random):
    typed = [random.choice([name, name.upper()]) for name in names]
    random.shuffle(typed)
    assert read_data(",".join(typed), DATA) == ([name for name in DATA if name in names], None)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("table2", "--networks", "vgg"), "there is no network 'vgg'"),
        (("table2", "--networks", "wrm"), "did you mean wrn?"),
        (("table2", "--data", "cifar11"), "did you mean cifar10?"),
        (("chart", "--data", "svhn"), "there is no set 'svhn'"),
        (("table2", "--seeds", "1000000000"), "seeds must be at least 1 and at most 1,000"),
        (("table1", "--seeds", "1000000000"), "seeds must be at least 1 and at most 1,000, not 1,000,000,000"),
        (("table2", "--models", "bignet+dlc"), "did you mean bignet+dcl?"),
        (("table2", "--set", "scale=0"), "scale must be above 0 and at most 1, not 0"),
        (("table2", "--set", "scale=2"), "scale must be above 0 and at most 1, not 2"),
        (("table2", "--set", "scale=half"), "scale must be a number"),
        (("table2", "--set", "root=nowhere"), "root is 'nowhere', and there is no such folder"),
        (("table2", "--set", "batch=-1"), "batch must be at least 0"),
        (("table2", "--epochs", "3"), "table2 has no setting 'epochs'"),
        (("chart", "--set", "shares=0.6"), "shares must be above 0 and at most 0.5, not 0.6"),
        (("chart", "--set", "rates="), "rates is empty"),
        (("chart", "--set", "units=maxout"), "there is no unit 'maxout'"),
        (("table1", "--networks", "lenet"), "table1 has no setting 'networks'"),
        (("table1", "--set", "train_images=60001"), "train_images must be at least 0 and at most 60,000, not 60,001"),
        (
            ("table1", "--smoke", "--set", "batch=101"),
            "batch is 101, more than the 100 images to train on; give at most",
        ),
        (("relations", "--set", "test_images=10001"), "test_images must be at least 0 and at most 10,000, not 10,001"),
        (("table2", "--data", "cifar10,cifar100", "--set", "test_images=10001"), "the 10,000 of cifar10 and cifar100"),
        (
            ("deep", "--set", "train_images=50001"),
            "train_images is 50,001, more than the 50,000 of cifar100; give at most",
        ),
        (("deep", "--smoke", "--set", "batch=21"), "batch is 21, more than the 20 images to train on"),
        (("deep", "--set", "units=plain,dcl"), "give --set units=plain,dcl,low-rank"),
        (
            ("sort-of-clevr", "--set", "units=dcl"),
            "units has no control of dcl's weights (narrow, low-rank, summed, glu)",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_remedy(dcl, words, told):
    assert told in " ".join(dcl("run", *words, code=2).split())


@given(st.floats(1e-6, 1), st.integers(1, 50), st.sets(st.sampled_from(["lenet", "bignet", "wrn"]), min_size=1))
def test_settings_of_table2_take_their_type(scale, seeds, networks):
    made = with_settings(recipe("table2"), {"scale": str(scale), "seeds": str(seeds), "networks": ",".join(networks)})
    assert math.isclose(made.scale, scale)
    assert made.seeds == seeds
    assert set(made.networks) == networks


# The chart


def test_the_chart_is_drawn_and_told(chart):
    out, shown = chart
    found = json.loads((out / "chart.json").read_text())
    assert [(point["unit"], point["weights"]) for point in found["points"]] == [
        ("dcl", unit_weights("dcl", 10)), ("star", unit_weights("star", 10)),
    ]  # fmt: skip
    svg = (out / "chart.svg").read_text()
    assert "error against weights" in svg
    assert "error against time" in svg
    assert "5,086,912" in shown
    assert weights("bignet+dcl", 10) == 5_086_912
    assert "The images are synthetic" in shown
    assert "a trial" in shown


@pytest.mark.parametrize(("columns", "fits"), [("80", False), ("90", False), ("100", True), ("120", True)])
def test_differences_to_dcl_are_printed_where_there_is_room(monkeypatch, capsys, columns, fits):
    monkeypatch.setenv("COLUMNS", columns)
    points = [
        {"unit": unit, "share": 0.25, "errors": errors, "seeds": [0, 1, 2], "weights": 5_742_272, "step_ms": 0.75,
         "lr": 0.003}
        for unit, errors in (("dcl", [17.5, 17.7, 17.9]), ("low-rank", [28.5, 29.75, 32.85]))
    ]  # fmt: skip
    console().print(chart_grid({"title": "a chart", "points": points}).as_rich(int(columns)))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= int(columns)
    row = next(line for line in shown.splitlines() if line.split()[:1] == ["low-rank"])
    assert ("+12.67 [+7.58, +17.75]▴" in row) == fits
    assert row.split()[-1] == "0.003"


def test_the_chart_has_a_state_and_a_page(dcl, dcl_for_machines, chart, folder):
    shutil.copytree(chart[0], folder / "runs" / "chart")
    row = dcl_for_machines("ls", "--json")[0]["runs"][0]
    assert (row["recipe"], row["state"], row["done"], row["total"]) == ("chart", "finished", 6, 6)
    dcl("report", "chart", "-o", "page.html")
    page = (folder / "page.html").read_text()
    assert "their product without the root" in page.replace("\n", " ")
    assert page.count("<svg") == 2  # light and dark
    lines = (folder / "runs/chart/outcomes.jsonl").read_text().splitlines(keepends=True)
    (folder / "runs/chart/outcomes.jsonl").write_text("".join(lines[:-1]))
    assert "incomplete, 4 of 6 trainings" in dcl("ls")  # a line is a fleet, here of two seeds


@pytest.mark.parametrize(
    ("name", "settings", "networks", "images"),
    [
        ("deep", ("width=8",), 4 * (4 + 3), 4 * 4 * 45_000 * 18 + 4 * 3 * 50_000 * 60),
        ("sort-of-clevr", ("size=0.05",), 6 * (4 + 3), 6 * 7 * 20 * 9_800 * 20),
    ],
)
def test_a_dry_run_of_units_says_how_long_it_takes(dcl_for_machines, folder, name, settings, networks, images):
    words = [word for given in settings for word in ("--set", given)]
    found, _ = dcl_for_machines("run", name, "--dry-run", "--json", "--device", "cpu", *words)
    assert (found["networks"], found["images"]) == (networks, images)
    assert found["minutes"] > 0
    assert 0 < found["memory_gib"] < 16
    assert list(folder.iterdir()) == []


def test_a_dry_run_of_the_chart_counts_search_and_seeds(dcl_for_machines, folder):
    found, _ = dcl_for_machines("run", "chart", "--dry-run", "--json", "--set", "units=plain,dcl,glu")
    assert found["networks"] == 3 * (3 + 3)
    assert found["images"] == 3 * 3 * 45_000 * 40 + 3 * 3 * 50_000 * 200
    assert list(found["absent"]) == ["cifar10"]
