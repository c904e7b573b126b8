"""What importing costs, and which room may import from which."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import torch_dcl

PACKAGE = Path(torch_dcl.__file__).parent
ROOMS = [
    "files", "progress", "functional", "parts", "parts_ops", "kernels", "norms", "programs", "fusion", "module",
    "layers", "stochastic", "convert", "models", "data", "fleet", "training", "experiments", "report", "paper", "cli",
]  # fmt: skip
HEAVY = [
    "torchvision", "matplotlib", "safetensors", "rich", "typer", "timm", "onnx", "onnxscript", "onnxruntime", "scipy",
    "PIL", "jinja2",
]  # fmt: skip


@pytest.fixture(scope="module")
def fresh():
    """What a new interpreter says that imports the package, then torch, a layer, and rooms by their former names."""
    program = f"""
import json, sys, warnings
sys.path[:0] = {[str(PACKAGE.parent)]}
import torch_dcl
bare = sorted(sys.modules)
import torch
def settings():
    return [str(torch.get_default_dtype()), torch.get_num_threads(), torch.initial_seed() % 97, torch.is_grad_enabled(),
            torch.get_rng_state().sum().item(), torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()]
torch.manual_seed(3)
before = settings()
alone = sorted(sys.modules)
torch_dcl.DCLLinear
after, loaded = settings(), sorted(sys.modules)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from torch_dcl.paper import TABLE1, Table
    from torch_dcl.training import Fleet, Member
from torch_dcl import experiments, fleet
told = [str(w.message) for w in caught if w.category is DeprecationWarning and "torch_dcl" in str(w.message)]
same = [Table is experiments.Table, TABLE1 is experiments.TABLE1, Fleet is fleet.Fleet, Member is fleet.Member]
print(json.dumps(dict(bare=bare, before=before, alone=alone, after=after, loaded=loaded, told=told, same=same)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_import_loads_nothing_and_a_layer_loads_torch_and_nothing_heavier(fresh):
    assert "torch" not in fresh["bare"]
    assert [name for name in fresh["alone"] if name.startswith("torch_dcl")] == ["torch_dcl"]
    assert {"torch", "torch_dcl.layers"} <= set(fresh["loaded"])
    assert [name for name in HEAVY if name in fresh["loaded"]] == []


def test_a_name_that_is_not_there_is_said_so():
    with pytest.raises(AttributeError, match="module 'torch_dcl' has no attribute 'DCLLiner'"):
        _ = torch_dcl.DCLLiner
    assert {"DCLLinear", "plan", "models", "fleet"} <= set(dir(torch_dcl))
    assert torch_dcl.fleet.Fleet.__name__ == "Fleet"


def test_the_import_changes_no_setting_of_torch(fresh):
    assert fresh["before"] == fresh["after"]


def test_every_public_name_exists():
    assert len(set(torch_dcl.__all__)) == len(torch_dcl.__all__)
    for name in torch_dcl.__all__:
        assert getattr(torch_dcl, name) is not None
    assert torch_dcl.__version__


def room_of(path):
    """The room that a file of the package stands in; None for the package's own __init__ and __main__."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return None if first in ("__init__", "__main__") else first


def imported_rooms(path):
    """(line, room) for every import of another part of the package, also inside functions."""
    here = ["torch_dcl", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{source}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "torch_dcl" and len(parts) > 1:
                yield node.lineno, parts[1]


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_imports_only_from_rooms_above_it(path):
    room = room_of(path)
    if room is None:
        return
    assert room in ROOMS, f"{room} is no room of the house; add it to the list in docs/architecture.md and here"
    allowed = {"files"} if room == "data" else set(ROOMS[: ROOMS.index(room)])
    allowed |= {room, "__version__"}
    wrong = [f"line {line}: {other}" for line, other in imported_rooms(path) if other not in allowed]
    assert wrong == []


def test_the_check_of_the_rooms_sees_every_way_to_import(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    folder = tmp_path / "models"
    folder.mkdir()
    path = folder / "example.py"
    path.write_text(
        "import torch\nimport torch_dcl.cli\nfrom torch_dcl.paper import tables\nfrom torch_dcl import fleet\n"
        "from . import lenet\nfrom .. import data\nfrom ..convert.plan import Plan\n"
        "def late():\n    from torch_dcl import cli\n"
    )
    assert sorted(imported_rooms(path)) == [
        (2, "cli"), (3, "paper"), (4, "fleet"), (5, "models"), (6, "data"), (7, "convert"), (9, "cli"),
    ]  # fmt: skip


def test_the_former_names_of_rooms_still_import_and_say_the_new_ones(fresh):
    assert [new in message for new, message in zip(("experiments", "fleet"), fresh["told"], strict=True)] == [True] * 2
    assert fresh["same"] == [True] * 4
