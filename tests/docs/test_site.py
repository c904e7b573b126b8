"""What the pages say of the package is so: names, options, links."""

import ast
import importlib
import re
import shlex
import tomllib
from typing import Annotated

import pytest
import typer
import typer.main
from tests.docs.pages import PAGES, ROOT, blocks_of, spans_of, text_of

import torch_dcl as dcl
from docs import command_page
from torch_dcl.cli.app import app

ROOMS = ["", ".convert", ".data", ".fleet", ".models", ".experiments", ".report", ".kernels"]
COMMAND = typer.main.get_command(app)
HELP = {"--help", "-h", "--debug", "--version", "--install-completion", "--show-completion"}


def documented(room):
    """The names that the page of a room describes."""
    text = (ROOT / f"docs/api/{room.removeprefix('.') or 'torch_dcl'}.md").read_text()
    names = set(re.findall(r"^\.\. (?:auto\w+|py:data):: (?:torch_dcl\S*\.)?(\w+)(?:\(\))?$", text, re.M))
    members = re.findall(r"^\.\. automodule:: (\S+)\n   :members:(.*)$", text, re.M)
    for module, listed in members:
        names |= {name.strip() for name in listed.split(",") if name.strip()}
        if not listed.strip():
            names |= set(importlib.import_module(module).__all__)
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_is_in_the_reference(room):
    public = set(importlib.import_module(f"torch_dcl{room}").__all__)
    elsewhere = documented("") if room == ".convert" else {"digits", "layouts"} if room == ".data" else set()
    missing = sorted(public - documented(room) - elsewhere)
    assert missing == [], f"describe them in docs/api/{room.removeprefix('.') or 'torch_dcl'}.md"


def options_of(command):
    found = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    for inner in getattr(command, "commands", {}).values():
        found |= options_of(inner)
    return {name for name in found if name.startswith("-")}


@pytest.mark.parametrize("verb", sorted(COMMAND.commands))
def test_the_page_of_the_command_has_every_option(verb):
    (section,) = re.findall(rf"^## `dcl {verb}`\n.*?(?=^## |\Z)", text_of("docs/command.md") + "\n", re.M | re.S)
    rows = " ".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `-"))
    assert set(re.findall(r"`(-[\w-]+)", rows)) == options_of(COMMAND.commands[verb]) - HELP


def test_the_page_of_the_command_has_a_section_for_every_verb():
    text = text_of("docs/command.md")
    assert command_page.MARK not in text
    sections = re.findall(r"^(##+) `(dcl .*)`\n\n[A-Z].*\.$", text, re.M)
    inner = [f"dcl data {verb}" for verb in COMMAND.commands["data"].commands]
    assert sorted(name for _, name in sections) == sorted([*(f"dcl {verb}" for verb in COMMAND.commands), *inner])
    assert all(len(marks) == len(name.split()) for marks, name in sections)


def test_a_verb_as_markdown():
    app = typer.Typer(rich_markup_mode="rich")

    @app.callback()
    def main() -> None:
        """A group."""

    @app.command()
    def bake(
        flour: Annotated[str, typer.Argument(help="Of what.", metavar="RYE|WHEAT")],
        salt: Annotated[int, typer.Option("--salt", "-s", help="Grams.", metavar="G")] = 9,
        oven: Annotated[str, typer.Option(help="Where.  [dim]\\[default: the hot one][/dim]", show_default=False)] = "",
        dry: Annotated[bool, typer.Option("--dry-run", help="As --salt says.")] = False,
    ) -> None:
        """Bake [bold]bread[/bold].

        \b
        [bold]Examples[/bold]
          dcl bake rye \\[soon]
        """

    assert command_page.section("dcl bake", typer.main.get_command(app).commands["bake"]) == [
        "## `dcl bake`", "", "Bake bread.", "",
        "```text", "dcl bake [OPTIONS] RYE|WHEAT", "```", "",
        "```", "dcl bake rye [soon]", "```", "",
        "| option | meaning |", "|---|---|",
        r"| `RYE\|WHEAT` | Of what. |",
        "| `--salt G`, `-s` | Grams. Default: `9`. |",
        "| `--oven` | Where. Default: the hot one. |",
        "| `--dry-run` | As `--salt` says. |", "",
    ]  # fmt: skip


def test_no_table_of_options_is_written_by_hand():
    rows = re.findall(r"^\| `-.*", (ROOT / "docs/command.md").read_text(), re.M)
    assert rows == []


def targets():
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))


def trouble_with(span):
    """What is wrong with a command inside of a sentence; it is looked at, not run."""
    if span.split()[0] not in ("dcl", "make", "python"):
        return ""
    try:
        words = shlex.split(span)
    except ValueError as error:
        return str(error)
    options = {word.partition("=")[0] for word in words[1:] if re.match(r"--?[a-z]", word)}
    if words[0] == "dcl":
        command, rest = COMMAND, [word for word in words[1:] if word not in ("VERB", "…")]
        while rest and rest[0] in getattr(command, "commands", {}):
            command = command.commands[rest.pop(0)]
        if command is COMMAND and rest and not rest[0].startswith("-"):
            return f"dcl has no {rest[0]}"
        unknown = options - options_of(command) - HELP
    elif words[0] == "make":
        unknown = {word for word in words[1:] if re.fullmatch(r"[a-z-]+", word)} - targets()
    elif re.match(r"python \S+\.py\b", span):
        if not (ROOT / words[1]).is_file():
            return f"there is no {words[1]}"
        source = (ROOT / words[1]).read_text()
        unknown = {option for option in options if f'"{option}"' not in source}
    else:
        return ""
    return f"unknown: {', '.join(sorted(unknown))}" if unknown else ""


@pytest.mark.parametrize("page", PAGES)
def test_commands_inside_of_sentences_exist(page):
    wrong = {span: told for span in spans_of(page) if (told := trouble_with(span))}
    assert wrong == {}


@pytest.mark.parametrize(
    ("span", "told"),
    [
        ("dcl rnu", "dcl has no rnu"),
        ("dcl data digts", ""),  # may be a word of the reader's
        ("dcl run table1 --dryrun", "--dryrun"),
        ("make tset", "tset"),
        ("python benchmarks/none.py", "there is no"),
        ("python benchmarks/plan.py --dtyp x", "--dtyp"),
        ("dcl run table1 --set epochs=3", ""),
    ],
)
def test_a_wrong_command_inside_of_a_sentence_is_found(span, told):
    assert told in trouble_with(span)
    assert bool(told) == bool(trouble_with(span))


@pytest.mark.parametrize("page", PAGES)
def test_links_to_files_lead_somewhere(page):
    text = text_of(page)
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    broken = [link for link in links if "://" not in link and not (ROOT / page).parent.joinpath(link).exists()]
    assert broken == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")])
def test_every_page_can_be_reached(page):
    """Sphinx says so too, when the site is built; this says it without it."""
    if page in ("docs/index.md", "docs/api/index.md"):
        return
    index = (ROOT / page).parent / "index.md"
    assert re.search(rf"^{(ROOT / page).stem}$", index.read_text(), re.M)


def test_the_rooms_of_the_picture_are_those_of_the_package():
    text = (ROOT / "docs/architecture.md").read_text()
    drawn = re.findall(r"^  (\w+)(?:\.py|/)", text, re.M)
    there = {path.stem for path in (ROOT / "src/torch_dcl").iterdir() if not path.name.startswith(("_", "py"))}
    assert set(drawn) == there


def test_the_files_of_the_picture_exist():
    text = (ROOT / "docs/architecture.md").read_text().split("```")[1]
    rooms, missing = ["", ""], []
    for line in text.splitlines():
        if found := re.match(r"(  |    )(\w+)/ ", line):
            rooms[len(found[1]) // 2 - 1] = found[2]
        names = re.findall(r"\b(\w+\.py)\b", line)
        depth = min(2, max(0, (len(line) - len(line.lstrip())) // 2 - 1))
        home = (ROOT / "src/torch_dcl").joinpath(*rooms[:depth])
        if not line.startswith("docs/"):
            missing += [str(home / name) for name in names if not (home / name).is_file()]
    assert missing == []


def test_the_files_to_open_for_a_change_exist():
    (table,) = re.findall(
        r"^\| to change \| open \|\n.*?\n\n", (ROOT / "docs/architecture.md").read_text(), re.M | re.S
    )
    named = re.findall(r"`([\w/]+(?:\.py|/))`", table)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / "src/torch_dcl" / name).exists()] == []


def messages():
    """Every text in the package's sources, with … for what is filled in."""
    for path in (ROOT / "src/torch_dcl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_the_messages_on_the_page_of_trouble_are_those_of_the_package():
    quoted = re.findall(r"^`(.+)`\n: ", (ROOT / "docs/troubleshooting.md").read_text(), re.M)
    assert len(quoted) > 20
    known = list(messages())
    patterns = {text: re.compile(".*".join(map(re.escape, text.split("…"))), re.S) for text in quoted}
    assert [text for text, pattern in patterns.items() if not any(map(pattern.search, known))] == []


def test_the_readme_is_short():
    """At most 900 words beside the code, as a newcomer has two minutes."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    assert len(text.split()) <= 900


def test_the_plan_in_the_readme_is_that_of_vgg16():
    from torchvision.models import vgg16

    plan = dcl.plan(vgg16(), input_size=(3, 224, 224))
    printed = [line.rstrip() for line in plan.table(120).splitlines()]
    (block,) = [block for block in blocks_of("README.md") if block.language == "text"]
    assert [line for line in block.text.splitlines() if line not in printed] == []
    assert len(block.text.splitlines()) == 6
    saved = [100 * (1 - row.weights_after / row.weights) for row in plan.rows if row.selected]
    whole = 100 * (1 - plan.weights_after / plan.weights)
    (shown,) = re.findall(
        r"\*\*Weights:\*\* (\d+) to (\d+) % fewer.*?, (\d+) % fewer", (ROOT / "README.md").read_text()
    )
    assert [int(number) for number in shown] == [round(min(saved)), round(max(saved)), round(whole)]


def test_the_workflow_calls_targets_that_exist_with_pythons_that_are_supported():
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    called = set(re.findall(r"run: make ([a-z-]+)", text))
    assert {"lint", "docs", "test"} <= called <= targets()
    versions = set(re.findall(r'"(3\.\d+)"', text))
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    assert {"3.11", "3.13"} <= versions
    assert {f"Programming Language :: Python :: {version}" for version in versions} <= set(classifiers)
