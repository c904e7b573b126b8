"""Every recipe at its smoke size on the CPU: the same networks, the same outcomes, the same numbers on the page.

What is compared is stored in `recipes.json`. `python -m tests.golden.test_golden` writes it anew; do so only where a
change of the numbers is meant, and say why in the commit.
"""

import html
import json
import math
import re
from pathlib import Path

import pytest
import torch
from tests.halves import slow_where
from typer.testing import CliRunner

from torch_dcl import DCLLinear, convert_, plan, save_model
from torch_dcl.cli.app import app
from torch_dcl.fleet import Fleet
from torch_dcl.models import lenet

STORED = Path(__file__).with_name("recipes.json")
SMOKE: dict[str, tuple[str, ...]] = {  # a recipe's name, and behind a space what else is tried of it
    "table1": ("--data", "excerpt", "--set", "curves=yes"),
    "table1-search": ("--data", "excerpt", "--set", "trials=0.02,0.07 clip 3"),
    "table1 of fresh images": ("--data", "excerpt", "--set", "fresh=yes"),
    "table1-search of further columns": (
        "--data",
        "excerpt",
        "--models",
        "low-rank-B2,summed-B2,summed-B3,wide-B3,baseline-matched,narrow-matched",
        "--set",
        "trials=0.02,0.1 clip 1 decay 0.001",
        "--set",
        "seeds=2",
        "--set",
        "fresh=yes",
    ),
    "calibration": ("--data", "excerpt", "--set", "start=0.5,1", "--set", "rounds=1"),
    "calibration of two columns": (
        "--data",
        "excerpt",
        "--models",
        "baseline,oracle",
        "--set",
        "lengths=1,2",
        "--set",
        "start=0.5,1",
        "--set",
        "rounds=1",
    ),
    "figures": ("--data", "excerpt", "--set", "parts=filters,curves,knowledge,tried"),
    "figures of shares": ("--data", "excerpt", "--set", "parts=shares"),
    "table2": ("--networks", "lenet,bignet"),
    "table2 of LeNet's options": (
        "--models",
        "lenet,lenet+dcl,wrn+dcl-classes,wrn+dcl-group3",
        "--set",
        "factorial=yes",
    ),
    "chart": ("--set", "units=plain,dcl,star", "--set", "rates=0.01,0.03"),
    "demo": ("--set", "train_images=500", "--set", "epochs=2", "--seeds", "2"),
    "knowledge": ("--set", "network=net.py:make", "--set", "weights=net.safetensors", "--data", "mnist"),
    "imagenet": ("--models", "plain,dcl"),
    "relations": ("--data", "excerpt", "--models", "narrow,low-rank,summed,A2,power-1", "--set", "sizes=100,200"),
    "sort-of-clevr": ("--set", "units=plain,summed,glu,dcl"),
    "deep": (),
}
CLOCK = re.compile(r"minutes|time|step ms", re.IGNORECASE)
"""Columns of a page that no two runs have in common."""


def numbers_of(page):
    """The numbers of every table of a page, row by row; columns that hold times are left out."""
    tables = []
    for table in re.findall(r"<table.*?</table>", page, re.DOTALL):
        rows = [
            re.findall(r"<t[hd].*?</t[hd]>", row, re.DOTALL) for row in re.findall(r"<tr.*?</tr>", table, re.DOTALL)
        ]
        texts = [[html.unescape(re.sub(r"<[^>]*>", " ", cell)) for cell in row] for row in rows]
        clocks = {i for i, head in enumerate(texts[0]) if CLOCK.search(head)}
        if "command" in " ".join(texts[0]).lower():
            continue
        body = [text for row, text in zip(rows, texts, strict=True) if any(cell.startswith("<td") for cell in row)]
        kept = [[cell for i, cell in enumerate(row) if i not in clocks] for row in body]
        tables.append([_floats(" ".join(row)) for row in kept if _floats(" ".join(row))])
    return [table for table in tables if table]


def _floats(text):
    plain = text.replace("−", "-").replace("\u00a0", " ")
    return [float(n.replace(",", "")) for n in re.findall(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?", plain)]


def results_of(run):
    """What a run leaves in its files, without what depends on the clock and the machine."""
    names = ("table1", "search", "calibration", "filters", "curves", "knowledge", "tried", "table2", "chart", "demo",
             "relations", "sort-of-clevr", "deep", "imagenet")  # fmt: skip
    found = {}
    for name in names:
        file = run / f"{name}.json"
        if file.exists():
            content = json.loads(file.read_text(encoding="utf-8"))
            keys = {"table1": ["cells"], "table2": ["cells", "absent", "scale"], "search": ["choice", "trials"],
                    "calibration": ["sets"], "chart": ["set", "points", "scale", "search_scale"],
                    "demo": ["set", "networks", "verdict", "knowledge"],
                    "relations": ["set", "steps", "cells"], "sort-of-clevr": ["units"], "deep": ["units"],
                    "imagenet": ["network", "models"]}  # fmt: skip
            content = {key: content[key] for key in keys.get(name, content)}
            found[name] = _without_clock(content)
    return found


def _without_clock(value):
    if isinstance(value, dict):
        return {
            k: _without_clock(v)
            for k, v in value.items()
            if k not in ("minutes", "seconds", "step_ms", "source", "title", "what", "waiting", "commit", "recipe")
        }
    return [_without_clock(v) for v in value] if isinstance(value, list) else value


def trained(run, monkeypatch):
    """Every epoch of every network while `run` is called: weights, seed, learning rate, epoch, loss."""
    rows, real = [], Fleet._end_epoch

    def end_epoch(fleet):
        sizes = [sum(p.numel() for p in fleet.network(0).parameters())] * len(fleet)
        real(fleet)
        for size, member, loss in zip(sizes, fleet.members, fleet.history.train_loss[-1], strict=True):
            rows.append([size, member.seed, member.lr, fleet.epoch, loss])

    with monkeypatch.context() as patched:
        patched.setattr(Fleet, "_end_epoch", end_epoch)
        run()
    return sorted(rows)


def run_recipe(name, monkeypatch):
    """Run a recipe at its smoke size in the current folder, and give everything that golden tests compare."""
    if name == "knowledge":
        Path("net.py").write_text("from torch_dcl.models import lenet\n\ndef make():\n    return lenet(10)\n")
        torch.manual_seed(0)
        network = lenet(10)
        convert_(network, plan(network, network.input_size).only("fc1"), init="random")
        assert any(isinstance(module, DCLLinear) for module in network.modules())
        save_model(network, "net.safetensors")
    words = [
        "run",
        name.partition(" ")[0],
        "--smoke",
        "--device",
        *(["auto"] if name == "knowledge" else ["cpu"]),
        "--out",
        "run",
    ]

    def run():
        done = CliRunner().invoke(app, [*words, *SMOKE[name]], prog_name="dcl")
        assert done.exit_code == 0, f"{done.output}\n{done.exception!r}"

    epochs = trained(run, monkeypatch)
    pages = {}
    if name.partition(" ")[0] not in ("table1-search", "calibration"):
        done = CliRunner().invoke(app, ["report", "run", "-o", "page.html"], prog_name="dcl")
        assert done.exit_code == 0, done.output
        pages["report"] = numbers_of(Path("page.html").read_text(encoding="utf-8"))
    return {"epochs": epochs, "results": results_of(Path("run")), "pages": pages}


def compare(now, then, where=""):
    """Losses to 1e-5 of their value, since sums differ between processors; everything else as it is printed."""
    if isinstance(then, dict):
        assert list(now) == list(then), where
        for key, value in then.items():
            compare(now[key], value, f"{where}.{key}")
    elif isinstance(then, list):
        assert len(now) == len(then), where
        for i, value in enumerate(then):
            compare(now[i], value, f"{where}[{i}]")
    elif isinstance(then, float) and not isinstance(now, bool):
        assert math.isclose(now, then, rel_tol=1e-5, abs_tol=1e-7), f"{where} is {now}, was {then}"
    else:
        assert now == then, f"{where} is {now!r}, was {then!r}"


@pytest.mark.parametrize("name", slow_where(SMOKE, "figures|chart|deep|imagenet"))
def test_a_recipe_gives_the_numbers_it_always_gave(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for variable in ("TORCH_DCL_DATA", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stored = json.loads(STORED.read_text(encoding="utf-8"))[name]
    compare(json.loads(json.dumps(run_recipe(name, monkeypatch))), stored, name)


def test_a_number_that_changes_is_found():
    stored = json.loads(STORED.read_text(encoding="utf-8"))["table1"]
    changed = json.loads(json.dumps(stored))
    changed["epochs"][0][-1] *= 1 + 1e-4
    with pytest.raises(AssertionError, match="epochs"):
        compare(changed, stored)


def _write():
    """Store what the recipes give now."""
    import os
    import tempfile

    found = {}
    for name in SMOKE:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            os.chdir(folder)
            found[name] = run_recipe(name, patch)
            os.chdir(STORED.parent)
    lines = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in found.items()
    )
    STORED.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    _write()
