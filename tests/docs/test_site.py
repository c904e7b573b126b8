"""What the pages say of the package is so: names, options, links."""

import importlib
import re
import shlex

import pytest
import typer.main
from tests.docs.pages import PAGES, ROOT, spans_of

from torch_dcl.cli.app import app

ROOMS = ["", ".convert", ".data", ".training", ".models", ".experiments", ".kernels"]
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
    text = (ROOT / "docs/command.md").read_text()
    (section,) = re.findall(rf"^## `dcl {verb}\b.*?(?=^## )", text, re.M | re.S)
    rows = " ".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`(-[\w-]+)`", rows)) == options_of(COMMAND.commands[verb]) - HELP


def targets():
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))


def trouble_with(span):
    """What is wrong with a command inside of a sentence; it is looked at, not run."""
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
    text = (ROOT / page).read_text()
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
