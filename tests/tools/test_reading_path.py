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


def test_the_path_stays_in_the_rooms_that_are_named(tool, tmp_path, monkeypatch):
    package = tmp_path / "torch_dcl"
    for room in ("one", "two"):
        (package / room).mkdir(parents=True)
    (package / "one" / "a.py").write_text("import torch_dcl.two.b\nimport torch_dcl.one.c\n")
    (package / "two" / "b.py").write_text("import torch_dcl.one.d\n")
    for name in "cd":
        (package / "one" / f"{name}.py").write_text("")
    monkeypatch.setattr(tool, "PACKAGE", package)
    names = {path.stem for path in tool.reading_path("torch_dcl.one.a", rooms={"one"})}
    assert names == {"a", "c"}
    assert {path.stem for path in tool.reading_path("torch_dcl.one.a")} == {"a", "b", "c", "d"}


def test_files_and_folders_are_left_out_of_the_count_by_name(tool, tmp_path, monkeypatch, capsys):
    package = tmp_path / "torch_dcl"
    for name in ("one/deep.py", "one/later/a.py", "one/b.py", "two/deep.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("x = 1\n" * 3)
    monkeypatch.setattr(tool, "PACKAGE", package)
    monkeypatch.setattr("sys.argv", ["reading_path.py", "--rooms", "one", "--without", "deep,later"])
    tool.main()
    assert " ".join(capsys.readouterr().out.split()) == "one 1 files 3 lines together 1 files 3 lines"


def test_table_1_is_followed_with_as_many_files_as_the_documentation_says(tool):
    rooms = {"cli", "experiments"}
    opened = tool.reading_path("torch_dcl.cli.run", "torch_dcl.experiments.recipes.table1", rooms=rooms)
    text = " ".join((ROOT / "docs" / "architecture.md").read_text().split())
    said = re.search(r"opens (\d+) files of cli/ and experiments/, of which (\d+) are of experiments/", text)
    assert (len(opened), sum(tool.room_of(path) == "experiments" for path in opened)) == tuple(map(int, said.groups()))


@pytest.mark.parametrize("room", ["cli", "experiments", "report"])
def test_no_room_and_no_file_is_too_large_to_be_read(tool, room):
    """At most 20 files of a folder, and at most 400 lines of a file."""
    files = list((tool.PACKAGE / room).rglob("*.py"))
    assert {path.name: n for path in files if (n := path.read_text().count("\n")) > 400} == {}
    folders = {path.parent for path in files}
    assert all(sum(path.parent == folder for path in files) <= 20 for folder in folders)
