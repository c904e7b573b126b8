"""The count of files that a reader opens, and the figure that the documentation gives."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("reading_path", ROOT / "tools" / "reading_path.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_imports_are_followed_and_those_for_type_checkers_are_not(tool, tmp_path, monkeypatch):
    package = tmp_path / "torch_dcl"
    (package / "room").mkdir(parents=True)
    files = {
        "__init__.py": "",
        "room/__init__.py": "from torch_dcl.room.one import name\n",
        "room/one.py": "import torch\nname = 1\ndef late():\n    from torch_dcl.room import two\n",
        "room/two.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch_dcl.room import three\n",
        "room/three.py": "",
    }
    for name, text in files.items():
        (package / name).write_text(text)
    monkeypatch.setattr(tool, "PACKAGE", package)
    assert {path.name for path in tool.reading_path("torch_dcl.room.one")} == {"one.py", "two.py"}
    assert {str(p.relative_to(package)) for p in tool.reading_path("torch_dcl.room")} == {
        "room/__init__.py", "room/one.py", "room/two.py",
    }  # fmt: skip


@pytest.mark.parametrize("recipe", ["table2", "chart"])
def test_a_recipe_is_followed_with_no_more_files_than_the_documentation_says(tool, recipe):
    found = tool.reading_path(f"torch_dcl.experiments.recipes.{recipe}", "torch_dcl.experiments.runner")
    count = sum(tool.room_of(path) == "experiments" for path in found)
    said = int(re.search(r"opens (\d+) files of experiments/", (ROOT / "docs" / "architecture.md").read_text())[1])
    assert count <= said
    assert count == said or recipe == "chart"
