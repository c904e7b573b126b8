"""`dcl plan`, `dcl data`, `dcl demo`, and what the screen shows where there is no terminal."""

import io
import json
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from torch_dcl.cli import plan
from torch_dcl.cli.console import console, fail, for_machines
from torch_dcl.cli.run import Listener
from torch_dcl.data import read_prepared
from torch_dcl.experiments.digits import read_mnist
from torch_dcl.experiments.protocol import Progress
from torch_dcl.experiments.recipes.demo import CAVEAT, COLUMNS, RATES, TRIED, choose_rates, verdict
from torch_dcl.progress import Bar, say_about, say_minutes

NET = """
from torch import nn

def make():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))

def sized():
    model = make()
    model.input_size = (1, 28, 28)
    return model

def boom():
    raise KeyError("boom")

def torn():
    return nn.Linear("wide", 3)

def unnamed():
    return nn.Lineal(3, 3)

def inner():
    return len(3)
"""


def test_plan_of_a_torchvision_network(dcl):
    shown = dcl("plan", "torchvision:alexnet", "--only", "classifier.*")
    assert "classifier.1" in shown
    assert "Weights (no biases): 61," in shown
    assert dcl("plan", "alexnet", "--only", "classifier.*") == shown


def test_plan_of_a_timm_network_as_json(dcl, folder):
    pytest.importorskip("timm")
    shown = json.loads(dcl("plan", "timm:resnet18", "--json", "-o", "plan.json", "--branches", "3", "--ratio", "0.2"))
    assert shown["torch_dcl_plan"] == 1
    assert json.loads((folder / "plan.json").read_text()) == shown
    assert {len(row["widths"]) for row in shown["rows"] if row["selected"]} == {3}


def test_plan_of_ones_own_network(dcl, folder):
    (folder / "my_own_net.py").write_text(NET)
    assert "--input-size" in dcl("plan", "my_own_net.py:make", code=2)
    shown = dcl("plan", "my_own_net.py:make", "--input-size", "1,28,28")
    assert "784→512" in shown
    assert dcl("plan", "my_own_net:sized") == shown
    assert "ms" in dcl("plan", "my_own_net.py:sized", "--measure")


def test_plan_by_time_in_the_mode_and_phase_that_are_asked_for(dcl, folder, monkeypatch):
    from torch_dcl.convert import measure

    (folder / "my_own_net.py").write_text(NET)
    compiled = []
    monkeypatch.setattr("torch.compile", lambda run, **_: compiled.append(run) or run)
    monkeypatch.setattr(measure, "race", lambda contenders, **_: {name: [len(name) / 4] * 3 for name in contenders})
    options = ("--select", "faster", "--mode", "compile", "--phase", "infer")
    shown = dcl("plan", "my_own_net.py:sized", *options)
    assert "compiled forward: 1.25 → 0.75 ms, 0.600 ± 0.000 of plain." in shown
    assert compiled
    made = json.loads(dcl("plan", "my_own_net.py:sized", *options, "--json"))
    assert made["choice"] == {"mode": "compile", "phase": "infer", "network": [1.25, 0.75, 0.0]}
    monkeypatch.setattr(measure, "race", lambda contenders, **_: {name: [9 - len(name)] * 3 for name in contenders})
    assert "slower: 6 ms for 4 plain (1.500 ± 0.000), eager training step" in dcl(
        "plan", "my_own_net.py:sized", "--select", "faster", "--batch", "2"
    )


@pytest.mark.parametrize("home", ["theirs.py", "theirs"])
@pytest.mark.parametrize(
    ("function", "kind", "line"),
    [
        ("boom", "KeyError: 'boom'", 13),
        ("torn", "TypeError: ", 16),
        ("unnamed", "AttributeError: ", 19),
        ("inner", "TypeError: object of type 'int' has no len", 22),
    ],
)
def test_an_error_in_ones_own_factory_says_whose_it_is_and_where(dcl, folder, monkeypatch, home, function, kind, line):
    monkeypatch.delitem(sys.modules, "theirs", raising=False)
    monkeypatch.syspath_prepend(folder)
    (folder / "theirs.py").write_text(NET)
    told = dcl("plan", f"{home}:{function}", code=1)
    assert told.startswith(f"Error: {home}:{function} raised {kind}")
    assert f"theirs.py, line {line})" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("def make(:", "SyntaxError: invalid syntax (broken.py, line 1)"),
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("x = 1\nassert x == 2, 'no'", "AssertionError: no"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
@pytest.mark.parametrize("home", ["broken.py", "broken"])
def test_an_error_in_ones_own_module_says_whose_it_is_and_where(dcl, folder, monkeypatch, home, source, told):
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    monkeypatch.syspath_prepend(folder)
    (folder / "broken.py").write_text(source)
    shown = dcl("plan", f"{home}:make", code=1)
    assert shown.startswith(f"Error: the import of {home} raised {told}")
    assert f"broken.py, line {len(source.splitlines())})" in shown


def test_budget_strategy_width_eps_and_without_reach_the_plan(dcl, folder):
    (folder / "three.py").write_text(THREE)

    def rows(*words):
        return {row["name"]: row for row in json.loads(dcl("plan", "three.py:make", *words, "--json"))["rows"]}

    def kept(found):
        after = sum(row["weights_after"] if row["selected"] else row["weights"] for row in found.values())
        return after / sum(row["weights"] for row in found.values())

    plain = rows()
    assert [name for name, row in plain.items() if row["selected"]] == ["a", "b", "c"]
    assert kept(rows("--budget", 0.4)) <= 0.4 < kept(rows("--budget", 0.6)) <= 0.6
    assert [rows("--round-to", 100)[name]["widths"] for name in "abc"] == [[100, 100]] * 3
    three = rows("--branches", 3, "--width", "32,16,8", "--strategy", "stochastic", "--eps", 0.5)
    assert (three["b"]["widths"], three["b"]["strategy"], three["b"]["eps"]) == ([32, 16, 8], "stochastic", 0.5)
    assert rows("--width", 24)["b"]["widths"] == [24, 24]
    assert [name for name, row in rows("--without", "b").items() if row["selected"]] == ["a", "c"]
    assert [name for name, row in rows("--without", "a,c").items() if row["selected"]] == ["b"]
    assert [name for name, row in rows("--without", "a", "--without", "b").items() if row["selected"]] == ["c"]
    assert [name for name, row in rows("--only", "[ab]", "--without", "a").items() if row["selected"]] == ["b"]


def test_a_layer_that_is_left_alone_is_taken_by_force_alone(dcl, folder):
    (folder / "three.py").write_text(THREE)
    told = dcl("plan", "three.py:make", "--only", "head", code=2)
    assert "'head' is left alone: head of the network; --force converts it" in told
    shown = json.loads(dcl("plan", "three.py:make", "--only", "head", "--force", "--json"))
    assert [row["name"] for row in shown["rows"] if row["selected"]] == ["head"]
    assert "--force goes with --only" in dcl("plan", "three.py:make", "--force", code=2)


THREE = """
from collections import OrderedDict
from torch import nn

def make():
    model = nn.Sequential(OrderedDict(
        a=nn.Linear(800, 400), r=nn.ReLU(), b=nn.Linear(400, 200), s=nn.ReLU(), c=nn.Linear(200, 100), t=nn.ReLU(),
        head=nn.Linear(100, 10),
    ))
    model.input_size = (800,)
    return model
"""


def test_plan_of_a_batch_in_another_type_and_memory_format(dcl):
    words = ("plan", "alexnet", "--only", "features.10", "--dtype", "bfloat16", "--batch", "2")
    shown = dcl(*words)
    assert "MACs on 2 inputs of 3×224×224" in shown
    assert "1 of these is in another" in shown
    assert "in another" not in dcl(*words, "--memory", "channels_last")
    told = dcl("plan", "alexnet", "--dtype", "half", code=2)
    assert "--dtype is one of float32, bfloat16, float16, not 'half'" in told
    told = dcl("plan", "alexnet", "--memory", "nhwc", code=2)
    assert "--memory is one of auto, channels_last, contiguous, not 'nhwc'" in told


@pytest.mark.parametrize(
    ("device", "memory", "last"),
    [("cuda", "auto", True), ("cuda:1", "auto", True), ("cuda", "contiguous", False), ("cpu", "auto", None),
     ("cpu", "channels_last", True)],
)  # fmt: skip
def test_on_a_gpu_a_network_is_planned_in_channels_last(device, memory, last):
    class Network:
        def __init__(self):
            self.asked = {}

        def to(self, *_, **asked):
            self.asked |= asked
            return self

    formats = {True: {"memory_format": torch.channels_last}, False: {"memory_format": torch.contiguous_format}}
    assert plan.prepared(Network(), device, "bfloat16", memory).asked == formats.get(last, {})


def test_plan_refuses_a_unit_that_is_not_there(dcl):
    assert "clasifier" in dcl("plan", "alexnet", "--only", "clasifier.*", code=2)


def test_plan_of_an_input_that_does_not_fit_is_an_error_of_the_run(dcl):
    shown = dcl("plan", "alexnet", "--input-size", "3,8,8", code=1)
    assert shown.startswith("Error: alexnet does not run on an input of 3×8×8: RuntimeError: ")
    assert "check --input-size, which is without the batch; an input of whole numbers, or several" in shown
    assert "example=" not in shown


def test_a_rank_prints_an_error_of_its_own_and_one_on_each_machine_errors_of_usage(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    printed = []
    for rank, local in (("0", "0"), ("1", "1"), ("2", "0")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", local)
        for is_usage in (True, False):
            fail("it failed", is_usage=is_usage)
            printed.append(capsys.readouterr().err)
    assert printed == [
        "Error: it failed\n", "Error: it failed\n", "", "rank 1 of 4: it failed\n", "rank 2 of 4: it failed\n",
        "rank 2 of 4: it failed\n",
    ]  # fmt: skip


def test_data_says_what_is_here_and_where_it_looks(dcl, folder):
    shown = json.loads(dcl("data", "--json"))
    rows = {row["name"]: row for row in shown["data"]}
    assert rows["mnist-excerpt"]["found"]
    assert rows["mnist"]["found"] is None
    assert shown["places"] == ["data", str(folder / "cache" / "torch_dcl")]
    told = " ".join(dcl("data").split())
    assert (
        "not found; dcl data fetch mnist, or put train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-" in told
    )
    assert "into data/MNIST/raw" in told
    assert all(f"dcl data fetch {name}" in told for name in ("mnist", "cifar10", "cifar100", "svhn", "NAME"))
    (folder / "data").mkdir()
    (folder / "data/gone.safetensors").symlink_to("nowhere")
    assert "prepared" not in {row["name"] for row in json.loads(dcl("data", "--json"))["data"]}


def test_digits_are_written_and_checked(dcl, folder):
    dcl("data", "digits", "--sets", "II-01,III-10", "--images", "30")
    assert sorted(p.name for p in (folder / "data/digits").iterdir()) == [
        "MNIST-II-01.safetensors", "MNIST-III-10.safetensors",
    ]  # fmt: skip
    assert dcl("data", "check", "data/digits").count("sound") == 2
    assert "2 prepared files" in dcl("data")
    file = folder / "data/digits/MNIST-II-01.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    shown = dcl("data", "check", "data/digits", code=1)
    assert "damaged" in shown
    assert shown.count("sound") == 1
    assert [row["sound"] for row in json.loads(dcl("data", "check", file, "--json", code=1))] == [False]


def test_the_sheet_is_drawn(dcl, folder):
    dcl("data", "sheet", "--sets", "II-01", "--samples", "2", "-o", "sheet.png")
    assert (folder / "sheet.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_trains_three_kinds_and_writes_a_page(dcl, folder):
    shown = dcl("demo", "--images", "100", "--epochs", "1", "--seeds", "2")
    assert all(name in shown for name in ("plain", "DCL-A2", "low-rank", "335,500", CAVEAT[:30]))
    assert "of the DCL layer" in shown or "No filter can be shown" in shown
    assert "classifier.1" in shown  # of the plan of a network that people use
    page = (folder / "runs/demo/report.html").read_text()
    assert str((folder / "runs/demo/report.html").resolve()) in shown.replace("\n", "")
    assert "data:image/png;base64," in page
    assert "classifier.1" in page
    assert not re.search(r'(src|href)="(?!data:|#)', page)


def test_the_demo_for_machines(dcl_for_machines, folder):
    shown, told = dcl_for_machines("demo", "--images", "100", "--epochs", "1", "--seeds", "1", "--json")
    assert [network["column"] for network in shown["networks"]] == ["baseline", "A2", "low-rank"]
    assert shown["verdict"][-1] == CAVEAT
    assert shown["page"] == str(folder / "runs/demo/report.html")
    assert "DCL-A2" in told


def test_the_demo_chooses_its_rates_without_the_test_digits(monkeypatch):
    digits = read_mnist(None)
    blind = digits._replace(test=(digits.test[0][:0], digits.test[1][:0]))
    lines = []
    found = choose_rates(blind, rates=(1e-4, 0.05), images=300, epochs=1, seeds=(100,), report=lines.append)
    assert list(found) == ["baseline", "A2", "low-rank"]
    assert len(lines) == 6
    by_line = {tuple(line.split(":")[0].split(" at ")): float(line.split()[-2]) for line in lines}
    for column, rate in found.items():
        assert by_line[column, f"{rate:g}"] == min(by_line[column, "0.0001"], by_line[column, "0.05"])


def test_the_rates_of_the_demo_are_some_that_were_tried():
    assert list(RATES) == list(COLUMNS)
    assert set(RATES.values()) <= set(TRIED)


def entries(plain, ours, low_rank):
    columns = (("baseline", 1000, plain), ("A2", 700, ours), ("low-rank", 700, low_rank))
    return [{"column": column, "weights": weights, "errors": errors} for column, weights, errors in columns]


def test_the_verdict_follows_the_numbers():
    told = verdict(entries([10.0, 11.0, 12.0], [9.0, 10.1, 10.9], [8.0, 9.0, 10.0]))
    assert told[0] == "DCL-A2 has 30 % fewer weights than the plain network."
    assert told[1].startswith("It errs less often than the plain one (−1.00 points")
    assert told[2].startswith("It errs more often than the low-rank one (+1.00 points")
    assert told[-1] == CAVEAT


def test_the_verdict_does_not_claim_what_is_not_clear():
    told = verdict(entries([10.0, 11.0, 12.0], [12.0, 8.0, 12.0], [10.0, 10.0, 12.5]))
    assert all(sentence.startswith("Its errors cannot be told") for sentence in told[1:3])
    assert "one seed cannot say more" in verdict(entries([10.0], [9.0], [8.0]))[1]


def test_without_a_terminal_there_are_plain_lines_and_no_early_guess():
    out = io.StringIO()
    console = Console(file=out, width=100)
    with Bar(console, 4, "networks", every=0.05) as bar:
        bar.now("A2")
        assert bar.left is None
        for _ in range(20):
            if out.getvalue():
                break
            time.sleep(0.05)
        bar.advance()
        assert bar.left is None
    assert out.getvalue().startswith("0 of 4 networks · 0 s · A2\n")
    assert "\x1b" not in out.getvalue()
    bar.advance()
    bar._start -= 60
    assert bar.left == pytest.approx(60, rel=0.1)
    assert "about 1:0" in bar.line()


def test_what_was_done_before_does_not_count_for_the_time_left():
    bar = Bar(Console(file=io.StringIO()), 100, "networks")
    bar.begin_at(90)
    bar.advance(2)
    bar._start -= 10
    assert bar.left == pytest.approx(40, rel=0.1)


def test_in_a_terminal_the_bar_goes_away():
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True)
    with Bar(console, 2, "sets") as bar:
        bar.now("II-01")
        bar.note("written")
        bar.advance()
        bar._live.refresh()
    shown = out.getvalue()
    assert "1 of 2 sets" in shown
    assert "written" in shown


def told(listener, *epochs, fleet=1, fleets=2, networks=4):
    for epoch in epochs:
        listener.on_epoch(Progress(fleet, fleets, "A2, 100 classes", networks, epoch, 8))


def test_a_fleet_moves_the_bar_epoch_by_epoch():
    bar = Bar(Console(file=io.StringIO()), 0, "networks")
    listener = Listener(bar)
    listener.begin(2, 12)
    assert (bar.done, bar.total, bar.text) == (2, 12, "building networks")
    told(listener, 0)
    assert (bar.done, bar.step) == (2, (0, 8, "epochs"))
    assert bar.text == "fleet 1 of 2, A2, 100 classes, 4 networks"
    told(listener, 1, 2, 3)
    assert bar.done == pytest.approx(3.5)
    assert bar.line().startswith("3 of 12 networks · 0 s · fleet 1 of 2")
    assert bar.line().endswith("· 3 of 8 epochs")
    told(listener, 8)
    told(listener, 0, 4, fleet=2, networks=6)
    assert bar.done == pytest.approx(2 + 4 + 3)
    told(listener, 8, fleet=2, networks=6)
    assert bar.done == 12


def test_a_fleet_that_goes_on_in_its_middle_does_not_run_over(capsys):
    bar = Bar(Console(file=io.StringIO()), 0, "networks")
    listener = Listener(bar)
    listener.begin(0, 4)
    told(listener, 0, 7, 8, fleets=1)
    assert (bar.done, bar.text) == (4, "A2, 100 classes, 4 networks")


def test_a_terminal_without_unicode_shows_what_it_can(monkeypatch):
    for_machines(False)
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    console().print("1.96 ± 0.03 ▾, −0.20, ü")
    assert raw.getvalue() == b"1.96 ? 0.03 v, -0.20, ?\n"


def test_a_line_of_the_run_is_printed_as_it_is():
    out = io.StringIO()
    Listener(Bar(Console(file=out, width=100), 4, "networks")).report("4 of 12 [b]entries[/b] are done already")
    assert out.getvalue() == "4 of 12 [b]entries[/b] are done already\n"


def test_in_a_terminal_the_fleet_has_a_bar_of_its_own():
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True)
    with Bar(console, 0, "networks") as bar:
        listener = Listener(bar)
        listener.begin(0, 8)
        told(listener, 0, 1, 2)
        bar._live.refresh()
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", out.getvalue())
    assert "1 of 8 networks" in shown
    assert "2 of 8 epochs · fleet 1 of 2, A2, 100 classes, 4 networks" in shown
    assert "left" not in shown


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1:00 min"), (3725, "1:02 h"), (260_000, "3.0 days")]
)
def test_times_are_for_people(seconds, words):
    assert say_minutes(seconds) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0004, "less than a second"),
        (12.3, "about 12 s"),
        (456, "about 7.6 min"),
        (27_600, "about 460 min"),
        (147_000, "about 41 h"),
        (260_000, "about 3 days"),
        (56_358_720, "about 650 days"),
    ],
)
def test_an_estimated_time_has_two_digits_and_no_exponent(seconds, words):
    assert say_about(seconds) == words


def test_a_set_is_fetched_into_a_folder_that_is_looked_in(dcl, monkeypatch):
    asked = []
    monkeypatch.setattr("torch_dcl.data.load", lambda name, **how: asked.append((name, how)) or "CIFAR-10, all of it")
    assert "CIFAR-10, all of it" in dcl("data", "fetch", "cifar10")
    assert asked == [("cifar10", {"root": Path("data"), "download": True})]


def test_a_set_that_nobody_offers_is_refused_with_the_nearest(dcl):
    said = dcl("data", "fetch", "cifar1000", code=2)
    assert "there is no set 'cifar1000' to fetch; did you mean cifar100?" in said


def test_a_failed_download_speaks_of_no_arguments_of_python(dcl, monkeypatch):
    pytest.importorskip("torchvision")

    def refuse(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr("torchvision.datasets.utils.download_url", refuse)
    for name in ("mnist", "svhn", "cifar10"):
        told = dcl("data", "fetch", name, code=1)
        assert "no route to host" in told
        assert "put " in told
        assert not re.search(r"\broot\b|\w=", told.replace("data/", ""))


def test_files_that_were_written_are_told_to_machines(dcl_for_machines):
    found, people = dcl_for_machines("data", "digits", "--sets", "II-01", "--images", 5, "--json")
    (row,) = found
    assert row["set"] == "MNIST-II-01"
    assert read_prepared(row["file"]).train_images.shape == (5, 1, 28, 28)
    assert row["sha256"][:16] in people
    found, _ = dcl_for_machines("data", "sheet", "--sets", "II-01", "--samples", 1, "-o", "one.svg", "--json")
    assert found == {"sheet": "one.svg", "sets": ["MNIST-II-01"]}
    assert Path("one.svg").is_file()
