"""Every command and every Python snippet of the pages is run, in order, one page after another.

`changes.py` lists what is made smaller. A block in a language that nobody handles, a command that nobody knows, and a
change that no page needs are errors.
"""

import contextlib
import io
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.docs import changes
from tests.docs.pages import PAGES, PROSE, ROOT, SHELL, Block, blocks_of
from tests.docs.test_site import trouble_with
from tests.halves import slow_where
from typer.testing import CliRunner

from torch_dcl.cli.app import app

DONE: set[str] = set()


class Reader:
    """Somebody who goes through a page and does what it says."""

    def __init__(self, page: str) -> None:
        self.page = page
        self.names: dict[str, object] = {}
        self.printed = ""

    def do(self, block: Block) -> None:
        if block.is_output:
            shown = [line.rstrip() for line in self.printed.strip("\n").splitlines()]
            assert block.text.splitlines() == shown, f"{block.place} shows something else"
        elif block.language == "python":
            self.python(block)
        elif block.language == "toml":
            name = re.match(r"# (\w+\.toml)\n", block.text)
            assert name, f"{block.place}: the first line of a file is a comment with its name"
            Path(name[1]).write_text(block.text)
        elif block.language in SHELL:
            for command in block.commands():
                self.shell(command, block.place)
        else:
            assert block.language in PROSE, f"{block.place}: nobody knows what to do with {block.language!r}"

    def python(self, block: Block) -> None:
        code = block.text
        for old, new in {**changes.TEXT.get(self.page, {}), **changes.ANYWHERE}.items():
            code = code.replace(old, new)
        # Empty lines in front, so that a traceback names the line of the page.
        compiled = compile("\n" * (block.line - 1) + code, self.page, "exec")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compiled, self.names)
        self.printed = out.getvalue()

    def shell(self, command: str, place: str) -> None:
        if command in changes.CHECKED:
            assert trouble_with(command) == "", place
            return
        if command in changes.ONCE:
            if command in DONE:
                return
            DONE.add(command)
        given = changes.FILLED.get(command, command)
        given += f" {changes.ADDED[command]}" if command in changes.ADDED else ""
        words = shlex.split(given)
        to = None
        if ">" in words:
            words, to = words[: words.index(">")], words[-1]
        kind = words[0]
        if kind == "dcl":
            self.printed = run_dcl(words[1:], place)
        elif kind == "torchrun":
            self.printed = run_dcl(behind_torchrun(words[1:]), place)
        elif kind == "python":
            self.printed = run_script(words[1:], place)
        else:
            assert kind in changes.LOOKED_AT, f"{place}: nobody knows how to try {command!r}"
            {"make": look_at_make, "pip": look_at_pip}[kind](words[1:], place)
        if to is not None:
            Path(to).write_text(self.printed)


def read(page: str) -> None:
    reader = Reader(page)
    for block in blocks_of(page):
        reader.do(block)


def run_dcl(words: list[str], place: str) -> str:
    done = CliRunner().invoke(app, words, prog_name="dcl")
    assert done.exit_code == 0, f"{place}: dcl {shlex.join(words)}\n{done.output}\n{done.exception!r}"
    return done.stdout


def behind_torchrun(words: list[str]) -> list[str]:
    """What torchrun would start, by its own reading of the command: the ranks are tried in tests/cli/test_run.py."""
    from torch.distributed.run import parse_args

    asked = parse_args(words)
    assert asked.module
    assert asked.training_script == "torch_dcl"
    return asked.training_script_args


def run_script(words: list[str], place: str) -> str:
    """In this process, which has loaded torch already."""
    assert (ROOT / words[0]).is_file(), f"{place}: there is no {words[0]}"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", words)
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")
    return out.getvalue()


def look_at_make(words: list[str], place: str) -> None:
    done = subprocess.run(["make", "-n", *words], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, f"{place}: make {shlex.join(words)}\n{done.stderr}"


def look_at_pip(words: list[str], place: str) -> None:
    assert words[0] == "install", f"{place}: nobody knows how to try pip {words[0]}"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words[1:]:
        found = re.fullmatch(r"\.(?:\[([\w,]+)\])?", word)
        assert found, f"{place}: pip install {word} is not the package"
        assert set((found[1] or "").split(",")) - {""} <= set(extras), (
            f"{place}: {word} names an extra that is not there"
        )


@pytest.mark.parametrize("page", slow_where(filter(blocks_of, PAGES), "cluster|convert|command|reproduce"))
def test_what_a_page_tells_to_do_can_be_done(page, workplace, without_downloads):
    for name in changes.NEEDS.get(page, ()):
        pytest.importorskip(name, reason="needs the extras torch-dcl[timm,onnx]")
    for command in changes.BEFORE.get(page, ()):
        run_dcl(shlex.split(command)[1:], f"before {page}")
    read(page)


def test_every_change_is_needed():
    commands = {c for page in PAGES for b in blocks_of(page) if b.language in SHELL for c in b.commands()}
    assert sorted({*changes.ADDED, *changes.FILLED, *changes.ONCE, *changes.CHECKED} - commands) == []
    assert set(changes.BEFORE) <= set(PAGES)
    for page, texts in changes.TEXT.items():
        code = "\n".join(block.text for block in blocks_of(page) if block.language == "python")
        assert [old for old in texts if old not in code] == [], page


BAD = [
    ("```ruby\nputs 1\n```", "nobody knows what to do with 'ruby'"),
    ("```toml\nrecipe = 1\n```", "a comment with its name"),
    ("```\nrm -r /\n```", "nobody knows how to try 'rm -r /'"),
    ("```\ndcl rnu table1\n```", "dcl rnu table1"),
    ("```\nmake tset\n```", "make tset"),
    ("```\npip install '.[onxx]'\n```", "names an extra"),
    ("```\npython examples/missing.py\n```", r"there is no examples/missing\.py"),
    ("```python\nassert 1 == 2\n```", "^$|1 == 2"),
    ("```python\nprint(1)\n```\n\n<!-- output -->\n```text\n2\n```", "shows something else"),
    ("```python\nprint(1)", "does not end"),
]


@pytest.mark.parametrize(("text", "told"), BAD)
def test_what_cannot_be_done_is_found(text, told, workplace):
    page = workplace / "page.md"
    page.write_text(text)
    with pytest.raises(AssertionError, match=told):
        read(str(page))


def test_comments_dots_and_quotes_are_read_as_a_shell_reads_them():
    text = "dcl ls · dcl doctor   # both\n# only words\ndcl plan net --only 'a # b'  &&  dcl data"
    wanted = ["dcl ls", "dcl doctor", "dcl plan net --only 'a # b'", "dcl data"]
    assert Block("x", 1, "", text, False).commands() == wanted
