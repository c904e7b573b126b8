"""What is damaged, absurd, or from a stranger: one line with the remedy, and nothing half written."""

import io
import json
import os
import shutil
import subprocess
import sys

import pytest
from rich.console import Console

from torch_dcl.experiments.recipes.chart import chart_grid
from torch_dcl.experiments.recipes.table2 import NaturalTable
from torch_dcl.experiments.table import Cell, long_table

TINY = (
    "--sets", "II-01", "--models", "baseline", "--seeds", "1", "--epochs", "1", "--set", "batch=50", "--set",
    "warmup=0", "--set", "train_images=50", "--set", "test_images=50", "--data", "excerpt", "--device", "cpu",
)  # fmt: skip
NET = "from torch_dcl.models import lenet\n\nprint('the code ran')\n\ndef make():\n    return lenet(10)\n"


# Code that a file names


@pytest.fixture
def network(folder):
    """A converted LeNet, the file with its code, and the words that look at a filter of it."""
    import torch_dcl

    (folder / "net.py").write_text(NET)
    model = torch_dcl.models.lenet(10)
    torch_dcl.convert_(model, torch_dcl.plan(model, (1, 28, 28)).only("fc1"), init="random")
    torch_dcl.save_model(model, folder / "net.safetensors")
    return ("run", "knowledge", "--set", "network=net.py:make", "--set", "weights=net.safetensors", "--data",
            "mnist-excerpt", "--set", "images=20", "--set", "filters=3")  # fmt: skip


def test_a_file_that_names_code_wants_trust(dcl, folder, network, capfd):
    toml = 'recipe = "knowledge"\nnetwork = "net.py:make"\nweights = "net.safetensors"\ndata = "mnist-excerpt"\n'
    (folder / "stranger.toml").write_text(f"{toml}images = 20\nfilters = [3]\n")
    told = " ".join(dcl("run", "stranger.toml", code=2).split())
    assert "stranger.toml names code to run, network = 'net.py:make'; look at it, and add --trust" in told
    assert "the code ran" not in capfd.readouterr().out
    assert not (folder / "runs").exists()
    dcl("run", "stranger.toml", "--trust")
    # Who types the name of the code trusts it.
    dcl("run", "stranger.toml", "--set", "network=net.py:make", "--out", "runs/typed")


def test_ones_own_run_is_resumed_without_trust_and_a_strangers_is_not(dcl, folder, network, monkeypatch):
    dcl(*network)
    assert "1 of 1 filters are done already" in dcl("run", "runs/knowledge", "--resume")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "somebody else"))
    assert "add --trust" in dcl("run", "runs/knowledge", "--resume", code=2)
    assert "1 of 1 filters are done already" in dcl("run", "runs/knowledge", "--resume", "--trust")


def test_a_folder_whose_code_was_exchanged_wants_trust_again(dcl, folder, network):
    dcl(*network)
    file = folder / "runs/knowledge/recipe.toml"
    (folder / "other.py").write_text(NET)
    file.write_text(file.read_text().replace("net.py:make", "other.py:make"))
    assert "names code to run, network = 'other.py:make'" in dcl("run", "runs/knowledge", "--resume", code=2)
    os.chdir(shutil.copytree(folder, folder.parent / "moved"))  # the same name is another file there
    assert "add --trust" in dcl("run", "runs/knowledge", "--resume", code=2)


def test_networks_of_libraries_want_no_trust(dcl, folder):
    (folder / "mine.toml").write_text('recipe = "knowledge"\nnetwork = "torchvision:alexnet"\n')
    assert "needs weights" in dcl("run", "mine.toml", code=2)


# Absurd settings


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('recipe = "table1"\nseeds = 1000000000', "seeds must be at least 1 and at most 1,000, not 1,000,000,000"),
        ('recipe = "calibration"\nrounds = 1000000000', "rounds must be at least 0 and at most 100"),
        ('recipe = "calibration"\nseeds = 1000000000', "seeds must be at least 1 and at most 100"),
        ('recipe = "figures"\nseeds = 1000000000', "seeds must be at least 1 and at most 1,000"),
        ('recipe = "chart"\nseeds = 1000000000', "seeds must be at least 1 and at most 1,000"),
        ('recipe = "demo"\nseeds = 1000000000', "seeds must be at least 1 and at most 1,000"),
        (f'recipe = "table1-search"\ntrials = {["0.1"] * 50_000}', "trials has 50,000 elements; give at most 100"),
        (f'recipe = "chart"\nrates = {[0.1] * 50_000}', "rates has 50,000 elements; give at most 100"),
        (f'recipe = "table1"\nsets = {"[" * 5000}{"]" * 5000}', "nested too deeply for a recipe"),
        ('recipe = "table1"\nsets = [["II-01"]]', "there is no set \"['II-01']\""),
        ('recipe = "table1"\nepochs = {a = 1}', "epochs must be a whole number, not {'a': 1}"),
        ('recipe = ["table1"]', "names the unknown recipe ['table1']"),
        ("x = 1\n" * 200_000, "a recipe has some thousands"),
        ('recipe = "table1"\nfactor = nan', "factor must be"),
        ('recipe = "table1"\ndrops = [inf]', "drops must rise and lie between 0 and 1"),
    ],
)
def test_absurd_settings_are_refused_before_they_take_memory(dcl, folder, text, told):
    (folder / "mine.toml").write_text(text)
    assert told in " ".join(dcl("run", "mine.toml", "--dry-run", code=2).split())
    assert [path.name for path in folder.iterdir()] == ["mine.toml"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("run", "table1", "--smoke", "--out", ""), "--out"),
        (("run", "table1", "--smoke", "--out= "), "--out"),
        (("run", "table1", "--smoke", "--data", ""), "--data"),
        (("run", "--smoke", ""), "an argument"),
        (("demo", "--out", ""), "--out"),
        (("report", "runs/t", "-o", ""), "-o"),
        (("ls", "--runs", ""), "--runs"),
        (("doctor", ""), "an argument"),
        (("data", "digits", "--out", ""), "--out"),
        (("data", "prepare", "imagenet", "", "shards"), "an argument"),
        (("plan", "alexnet", "-o", ""), "-o"),
    ],
)
def test_an_empty_text_is_not_the_current_folder(dcl, folder, words, named):
    told = dcl(*words, code=2)
    assert told.splitlines() == [
        f"Error: {named} is empty; give a value, or leave it out (is a variable of the shell not set?)"
    ]
    assert list(folder.iterdir()) == []


# Data that a run refuses


def short_mnist(folder):
    (folder / "mnist").mkdir()
    (folder / "mnist/train-images-idx3-ubyte").write_bytes(b"junk")


def damaged_mnist(folder):
    (folder / "mnist").mkdir()
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / f"mnist/{name}-ubyte").write_bytes(b"junk")


def damaged_cifar(folder):
    for name in ("cifar-10-binary.tar.gz", "cifar-100-binary.tar.gz"):
        (folder / name).write_bytes(b"junk")


@pytest.mark.parametrize(
    ("name", "make", "data", "told"),
    [
        ("table1", short_mnist, "mnist", "mnist lacks train-labels-idx1-ubyte"),
        ("table1", damaged_mnist, "mnist", "mnist/train-images-idx3-ubyte is not an idx file"),
        ("table1-search", damaged_mnist, "mnist", "is not an idx file"),
        ("calibration", damaged_mnist, "mnist", "is not an idx file"),
        ("figures", damaged_mnist, "mnist", "is not an idx file"),
        ("relations", damaged_mnist, "mnist", "is not an idx file"),
        ("demo", damaged_mnist, "mnist", "is not an idx file"),
        ("table2", damaged_cifar, "cifar10,.", "cifar-10-binary.tar.gz is"),
        ("chart", damaged_cifar, ".", "cifar-10-binary.tar.gz is"),
        ("deep", damaged_cifar, ".", "cifar-100-binary.tar.gz is"),
        ("deep", damaged_cifar, "root=nowhere", "there is no such folder"),
    ],
)
def test_a_dry_run_refuses_damaged_data_as_a_run_does(dcl, folder, name, make, data, told):
    make(folder)
    setting = data if "=" in data else f"data={data}"
    words = ("run", name, "--smoke", "--device", "cpu", "--set", setting)
    dry, wet = (dcl(*words, *more, code=2).splitlines()[-1] for more in (("--dry-run",), ("--out", "runs/t")))
    assert told in dry
    assert dry == wet
    assert not (folder / "runs").exists()


# Names and terminals


def test_names_with_markup_and_line_breaks_are_printed_as_they_are(dcl, folder):
    for name in ("run[/b]", "a\nb"):
        shown = dcl("run", "table1", *TINY, "--out", name)
        assert f"in {name}." in shown
        dcl("report", name, "-o", f"{name}.html")
        (folder / "runs").mkdir(exist_ok=True)
        shutil.move(name, folder / "runs" / name)
    listed = dcl("ls")
    assert "runs/run[/b]" in listed
    assert [run["path"] for run in json.loads(dcl("ls", "--json"))["runs"]] == ["runs/a\nb", "runs/run[/b]"]
    assert "runs/run[/b]" in dcl("doctor")


@pytest.mark.slow
@pytest.mark.parametrize("words", [("table1", *TINY), ("demo", "--smoke")], ids=["table1", "demo"])
def test_a_terminal_without_unicode_shows_what_it_can(folder, environment, words):
    ascii_only = {**environment, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    for each in (("run", *words, "--out", "ünï"), ("ls", "ünï"), ("ls", "--runs", ".", "--json"), ("report", "ünï")):
        command = [sys.executable, "-m", "torch_dcl", *each]
        done = subprocess.run(command, capture_output=True, check=False, env=ascii_only, cwd=folder)
        assert done.returncode == 0, done.stderr
        done.stdout.decode("ascii")
    assert (folder / "report.html").is_file()


def cell(column, **changes):
    return Cell("cifar10", column, (14.25, 14.5, 14.75), (0, 1, 2), 1_312_096, paper=13.55, **changes)


@pytest.mark.parametrize("width", [40, 48, 60, 80, 92, 120])
def test_a_narrow_terminal_gets_a_table_that_it_can_show(width):
    table = NaturalTable("Table 2", (cell("lenet"), cell("lenet+dcl3s", stopped=(1,))), absent={"svhn": "not run"})
    points = [
        {"unit": unit, "share": 0.25, "errors": [14.25, 14.5, 14.75], "seeds": [0, 1, 2], "weights": 5_742_272,
         "step_ms": 123.4, "lr": 0.003}
        for unit in ("dcl", "low-rank")
    ]  # fmt: skip
    for shown in (long_table(table, width), chart_grid({"points": points}).as_rich(width)):
        out = io.StringIO()
        Console(width=width, file=out).print(shown)
        text = out.getvalue()
        assert "14.50 ± 0.25 (3)" in text
        assert "…" not in text
        assert max(map(len, text.splitlines())) <= width


# Damaged folders


@pytest.mark.parametrize(
    "spoil",
    [
        lambda run: (run / "outcomes.jsonl").write_bytes(b"\xff\xfe\x00" * 100),
        lambda run: (run / "outcomes.jsonl").write_text("[" * 100_000 + "\n\n"),
        lambda run: (run / "recipe.json").write_text('{"total": {}, "recipe": [], "unit": 3, "format": 3}'),
        lambda run: (run / "environment.jsonl").write_text('{"time": 3}\n{}\n'),
        lambda run: (run / "recipe.json").write_text("[" * 100_000),
        lambda run: ((run / "lock").unlink(), (run / "lock").mkdir()),
        lambda run: ((run / "lock").unlink(), os.mkfifo(run / "lock")),
        lambda run: ((run / "outcomes.jsonl").unlink(), (run / "outcomes.jsonl").symlink_to("/dev/zero")),
        lambda run: os.mkfifo(run / "outcomes-1.jsonl"),
        lambda run: (shutil.rmtree(run), os.mkfifo(run.parent / "fifo"), run.mkdir(), os.mkfifo(run / "recipe.json")),
    ],
)
def test_one_bad_folder_breaks_neither_ls_nor_doctor(dcl, folder, spoil):
    dcl("run", "table1", *TINY, "--out", "runs/good")
    shutil.copytree(folder / "runs/good", folder / "runs/bad")
    spoil(folder / "runs/bad")
    states = {run["path"]: run["state"] for run in json.loads(dcl("ls", "--json"))["runs"]}
    assert states["runs/good"] == "finished"
    assert "runs/good" in dcl("ls")
    assert "Traceback" not in dcl("doctor", "runs/good")


def test_a_resume_of_another_run_names_what_differs(dcl, folder):
    dcl("run", "table1", *TINY, "--out", "runs/t")
    told = dcl("run", "table1", *TINY, "--set", "batch=25", "--out", "runs/t", "--resume", code=2)
    assert "batch: 50 then, 25 now" in told
    assert len(told.splitlines()) < 8
    told = dcl("run", "calibration", "--smoke", "--out", "runs/t", "--resume", code=2)
    assert "runs/t holds a run of table1, not of calibration" in told
    assert len(told.splitlines()) < 5


def test_a_narrow_terminal_lists_runs_a_line_each(dcl, folder, monkeypatch):
    dcl("run", "table1", *TINY, "--out", "runs/t")
    for width, heads in (("40", "run state"), ("60", "run state begun"), ("80", "run recipe state begun")):
        monkeypatch.setenv("COLUMNS", width)
        lines = dcl("ls").splitlines()
        assert lines[-2].split() == heads.split()
        assert lines[-1].startswith("runs/t  table1  finished, " if width == "80" else "runs/t  finished, ")


def test_a_report_of_a_recipe_that_there_is_not_says_so(dcl, folder):
    dcl("run", "table1", *TINY, "--out", "runs/t")
    for name in ("tea", "../tea", "os.path"):
        asked = json.loads((folder / "runs/t/recipe.json").read_text())
        (folder / "runs/t/recipe.json").write_text(json.dumps({**asked, "recipe": name}))
        assert f"its recipe {name!r} is unknown" in dcl("report", "runs/t", code=1)


def test_the_home_folder_behind_an_equals_sign_is_expanded(dcl, folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder / "home"))
    (folder / "home").mkdir()
    assert str(folder / "home" / "mine") in dcl("run", "table1", "--smoke", "--dry-run", "--out=~/mine")
    dcl("plan", "alexnet", "--output=~/plan.json")
    assert (folder / "home" / "plan.json").is_file()
    assert not (folder / "~").exists()
