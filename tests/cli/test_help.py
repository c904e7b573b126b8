"""Help, names, exit codes: what a newcomer meets first."""

import json
import re
import subprocess
import sys

import pytest

import torch_dcl
from torch_dcl.cli.console import in_options, nearest
from torch_dcl.experiments.digits import read_sets
from torch_dcl.experiments.settings import Setting, SettingError, choose_names

NESTED = (("data", "fetch"), ("data", "digits"), ("data", "sheet"), ("data", "check"))
VERBS = ("demo", "plan", "run", "ls", "data", "report", "doctor")


def test_help_lists_the_seven_verbs(dcl):
    shown = dcl("--help")
    assert all(f"│ {verb} " in shown for verb in VERBS)


@pytest.mark.parametrize("words", [(), *((verb,) for verb in VERBS), *NESTED])
def test_flags_show_as_flags(dcl, words):
    shown = dcl(*words, "--help")
    assert "bool" not in shown.lower()
    assert re.search(r"│ --help +-h +Show this message and exit\. +│", shown)


@pytest.mark.parametrize("words", [*((verb,) for verb in VERBS), *NESTED])
def test_every_command_has_examples_in_its_help(dcl, words):
    for option in ("--help", "-h"):
        shown = dcl(*words, option)
        assert "Examples" in shown
        assert f"dcl {' '.join(words)}" in shown.split("Examples")[1]


def test_nothing_typed_shows_the_help(dcl):
    assert "Usage: dcl" in dcl(code=2)


def test_the_version(dcl):
    assert dcl("--version") == f"torch-dcl {torch_dcl.__version__}\n"


def test_the_version_of_a_source_tree_that_was_never_installed(folder, environment):
    program = (
        "import importlib.metadata as m, sys\n"
        "def absent(name): raise m.PackageNotFoundError(name)\n"
        "m.version = m.distribution = absent\n"
        "sys.argv = ['dcl', '--version']\n"
        "from torch_dcl.cli import main\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (0, f"torch-dcl {torch_dcl.__version__}\n"), done.stderr


LEAN = """
import json, sys, types
# The package without its own imports: what is loaded here is loaded by the command.
package = types.ModuleType("torch_dcl")
package.__path__ = [{path!r}]
sys.modules["torch_dcl"] = package
sys.argv = ["dcl", *{words!r}]
from torch_dcl.cli import main
try:
    main()
except SystemExit as done:
    code = done.code
print(json.dumps([code, sorted(sys.modules)]))
"""


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["data", "--help"], ["rn"]])
def test_help_loads_nothing_heavy(words):
    program = LEAN.format(path=torch_dcl.__path__[0], words=words)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    code, loaded = json.loads(done.stdout.splitlines()[-1])
    assert code == (2 if words == ["rn"] else 0)
    assert [name for name in ("torch", "numpy", "torchvision", "matplotlib", "safetensors") if name in loaded] == []


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["rnu"], "run"),
        (["run", "tabel1"], "table1"),
        (["run", "table1", "--sets", "II-1"], "MNIST-II-01"),
        (["run", "table1", "--models", "basline"], "baseline"),
        (["run", "table1", "--set", "epoch=3"], "epochs"),
        (["run", "table1", "--set", "precision=float23"], "float32"),
        (["run", "table1", "--dryrun"], "--dry-run"),
        (["plan", "torchvision:vgg_16"], "vgg16"),
        (["plan", "resnet5O"], "resnet50"),
        (["data", "digits", "--sets", "III-1O"], "MNIST-III-10"),
    ],
)
def test_a_wrong_name_offers_the_nearest(dcl, words, offered):
    shown = dcl(*words, code=2)
    assert offered in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "table1", "--set", "epochs"], "key=value"),
        (["run", "table1", "--set", "epochs=many"], "a whole number"),
        (["run", "table1", "--epochs", "0"], "epochs must be at least 1 and at most 1,000,000, not 0"),
        (["run", "table1", "--seeds", "0"], "at least 1"),
        (["run", "table1", "--sets", ","], "no set is named"),
        (["run", "table1", "--set", "drops=0.9,0.6"], "drops must rise"),
        (["run", "table1", "--minutes", "0"], "above 0"),
        (["run", "table1", "--data", "nowhere"], "no idx files"),
        (["run", "table1", "--device", "quantum"], "--device cpu"),
        (["run", "table1", "--resume"], "no run in runs/table1"),
        (["run", "missing.toml"], "does not exist"),
        (["run", "."], "no recipe.toml"),
        (["run"], "Missing argument"),
        (["run", "table1-search", "--set", "trials=fast"], "0.07 clip 3"),
        (["ls", "table1-serch"], "did you mean table1-search?"),
        (["run", "figures", "--set", "parts=filter"], "did you mean filters?"),
        (["run", "figures", "--set", "set=II-01,II-02"], "set is one set"),
        (["run", "figures", "--set", "filters=0"], "at least 1"),
        (["run", "figures", "--set", "filters="], "filters is empty"),
        (["run", "figures", "--set", "filters=few"], "a list"),
        (["run", "figures", "--sets", "II-01"], "did you mean set?"),
        (["run", "knowledge"], "needs network; give --set network="),
        (["run", "knowledge", "--set", "network=time:time"], "needs weights"),
        (["plan", "vgg16", "--input-size", "big"], "3,224,224"),
        (["plan", "net.py:make", "--branches", "0"], "--branches must be from 1 to 8, got 0"),
        (["plan", "net.py:make", "--ratio", "0"], "--ratio must be above 0 and at most 1"),
        (["plan", "net.py:make", "--ratio", "nan"], "--ratio must be above 0 and at most 1"),
        (["plan", "net.py:make", "--ratio", "half"], "Invalid value for '--ratio'"),
        (["plan", "net.py:make", "--batch", "0"], "--batch must be a whole number of at least 1, got 0"),
        (["plan", "net.py:make", "--budget", "2"], "--budget is the fraction of the weights to keep"),
        (["plan", "net.py:make", "--budget", "0.001"], "--budget 0.001 is out of reach"),
        (["plan", "net.py:make", "--budget", "0.5", "--width", "8"], "leave --width out, or leave --budget out"),
        (["plan", "net.py:make", "--width", "0"], "--width 0 does not fit"),
        (["plan", "net.py:make", "--width", "8,8,8"], "--width names 3 branches, but --branches 2;"),
        (["plan", "net.py:make", "--width", "wide"], "--width 'wide' is not of the form 64, or 64,32"),
        (["plan", "net.py:make", "--strategy", "random"], '--strategy must be "deterministic" or "stochastic"'),
        (["plan", "net.py:make", "--strategy", "stochastic"], "three or more branches, got --branches 2"),
        (["plan", "net.py:make", "--select", "fast"], '--select must be "smaller" or "faster", got \'fast\''),
        (
            ["plan", "net.py:make", "--mode", "compile"],
            '--mode "compile" is for a choice by time; add --select "faster"',
        ),
        (
            ["plan", "net.py:make", "--select", "faster", "--mode", "jit"],
            '--mode must be "eager", "compile", "reduce-overhead" or "graph"',
        ),
        (["plan", "net.py:make", "--select", "faster", "--phase", "eval"], '--phase must be "train" or "infer"'),
        (["plan", "net.py:make", "--select", "faster", "--mode", "graph"], 'move it to a GPU, or take --mode "eager"'),
        (
            ["plan", "net.py:make", "--select", "faster", "--budget", "0.5"],
            "--budget 0.5 chooses units by their weights",
        ),
        (["plan", "net.py:make", "--eps", "-1"], "--eps must be a finite positive number, got -1.0"),
        (["plan", "net.py:make", "--eps", "0"], "--eps 0 leaves the gradient"),
        (["plan", "net.py:make", "--round-to", "0"], "--round-to must be a whole number of at least 1"),
        (["plan", "net.py:make", "--without", "frst"], "'frst' matches no unit; nearest: 'first'"),
        (["plan", "net.py:make", "-o", "missing/plan.json"], "the folder missing does not exist"),
        (["plan", "net.py:make", "-o", "."], "it is a folder; name a file inside it"),
        (["plan", "net.py:needs"], "cannot be called without arguments (missing a required argument: 'width')"),
        (["plan", "net.py:COUNT"], "net.py:COUNT gives int, not a torch network"),
        (["data", "sheet", "-o", "missing/sheet.png"], "the folder missing does not exist"),
        (["data", "digits", "--out", "net.py"], "a file is in the way; choose another --out"),
        (["data", "digits", "--out", "net.py/digits"], "a file is in the way"),
        (["data", "fetch", "mnist", "--out", "net.py"], "a file is in the way"),
        (["demo", "--out", "net.py"], "a file is in the way"),
        (["demo", "--out", "/proc/demo"], "/proc/demo cannot be made: No such file or directory; choose another --out"),
        (["run", "table1", "--smoke", "--out", "/proc/x"], "/proc/x cannot be made: No such file or directory; choose"),
        (["report", "x", "-o", "/proc/x.html"], "/proc/x.html cannot be written: No such file or directory; choose"),
        (["plan", "x", "-o", "/proc/p.json"], "/proc/p.json cannot be written: No such file or directory; choose"),
        (["run", "imagenet", "--smoke", "--out", "net.py/run"], "a file is in the way; choose another --out"),
        (["data", "prepare", "imagenet", "images", "net.py"], "a file is in the way; choose another folder"),
        (["plan", "nowhere:net"], "no module"),
        (["plan", "nowhere.py:net"], "does not exist"),
        (["plan", "json:dump"], "without arguments"),
        (["plan", "json:dumq"], "dump"),
        (["plan", "time:time"], "not a torch network"),
        (["report", "runs/none"], "no run"),
        (["report", "."], "no recipe.json"),
        (["report", ".", "-o", "missing/report.html"], "does not exist"),
        (["data", "check", "nothing.safetensors"], "does not exist"),
        (["data", "check", "."], "no prepared file"),
        (["data", "sheet", "-o", "sheet.gif"], ".png, .svg or .pdf"),
        (["data", "sheet", "--samples", "0"], "at least 1"),
        (["data", "digits", "--images", "0"], "at least 1"),
        (["doctor", "runs/none"], "not a run folder; there are none in runs/"),
        (["demo", "--seeds", "0"], "at least 1"),
    ],
)
def test_wrong_usage_says_what_to_type_and_ends_with_2(dcl, folder, words, told):
    (folder / "net.py").write_text(NET)
    shown = dcl(*words, code=2)
    assert told in " ".join(shown.split())
    assert "Traceback" not in shown


NET = """
from torch import nn

COUNT = 3

def make():
    model = nn.Sequential()
    model.first, model.relu = nn.Linear(784, 256), nn.ReLU()
    model.last = nn.Linear(256, 10)
    model.input_size = (784,)
    return model

def needs(width):
    return nn.Linear(width, width)
"""


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("ratio must be above 0", "--ratio must be above 0"),
        ("width 0 fits no layer; budget is too small", "--width 0 fits no layer; --budget is too small"),
        ("lower round_to (now 8)", "lower --round-to (now 8)"),
        ("'fc' is left alone: a head; force=True converts it", "'fc' is left alone: a head; --force converts it"),
        ("a budget on a network of ratio 3 with force", "a budget on a network of ratio 3 with force"),
        ("pass width=64, or round_to=4", "pass --width 64, or --round-to 4"),
        ("pass width= and no budget", "pass --width and no budget"),
        ("got ratio = 2", "got --ratio 2"),
    ],
)
def test_messages_of_the_library_name_options_where_options_were_typed(message, told):
    assert in_options(message, ["budget", "force", "ratio", "round-to", "width"]) == told


def test_sets_may_be_named_short_or_long_in_any_order():
    assert read_sets("iii-10, MNIST-II-01,II-01") == ["MNIST-II-01", "MNIST-III-10"]
    assert len(read_sets("all")) == 15


def test_models_may_be_named_as_the_paper_does():
    rules = Setting("", choices=("baseline", "oracle", "A2"), what="model", prefix="DCL-")
    assert choose_names(rules, ["DCL-A2", "BASELINE"]) == ("baseline", "A2")
    with pytest.raises(SettingError, match="there is no model 'A22'"):
        choose_names(rules, ["A22"])


def test_where_no_name_is_near_all_are_listed():
    assert nearest("zzzz", ["alpha", "beta"]) == "there are alpha, beta"
    assert nearest("zzzz", []) == "there are none"
    assert nearest("zzzz", ["alpha"]) == "there is only alpha"


def test_debug_shows_the_traceback(dcl, folder, monkeypatch, capfd):
    from torch_dcl.cli import data

    def broken(**_):
        raise RuntimeError("the disk is on fire")

    monkeypatch.setattr(data, "show", broken)
    assert dcl("data", code=1).splitlines() == ["Error: the disk is on fire"]
    assert "Traceback" in dcl("data", "--debug", code=1) + capfd.readouterr().err


def test_python_m_is_the_same_and_usage_ends_with_2(process):
    done = process("run", "tabel1")
    assert done.returncode == 2
    assert done.stderr.strip() == "Error: there is no recipe 'tabel1'; did you mean table1? `dcl ls` lists them"
    assert done.stdout == ""


def test_completion_of_the_shell_knows_the_recipes(process, monkeypatch, environment, folder):
    words = {"_DCL_COMPLETE": "complete_bash", "COMP_WORDS": "dcl run tab", "COMP_CWORD": "2"}
    program = "import sys; sys.argv[0] = 'dcl'; from torch_dcl.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env={**environment, **words}
    )
    assert done.stdout.split() == ["table1", "table1-search", "table2"]
    for name in ("one", "two/inside"):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "recipe.json").write_text("{}")
    words |= {"COMP_WORDS": "dcl report ru", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env={**environment, **words},
        cwd=folder,
    )  # fmt: skip
    assert done.stdout.split() == ["runs/one", "runs/two/inside"]


def test_torchrun_passes_every_option_of_a_run_on():
    from torch.distributed.run import parse_args
    from typer.main import get_command

    from torch_dcl.cli.app import app

    options = [option.opts[0] for option in get_command(app).commands["run"].params if option.opts[0].startswith("--")]
    given = ["run", "imagenet", *options]
    assert "--tracker" in options
    assert parse_args(["--nproc-per-node", "2", "-m", "torch_dcl", *given]).training_script_args == given
