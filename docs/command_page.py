"""The reference part of the command's page, written from the command itself when the site is built.

It reads only what Typer's commands have carried in every version: names, help, options and defaults.
"""

import re
from collections.abc import Iterator
from typing import Any

import typer.main
from rich.text import Text

from torch_dcl.cli.app import app

MARK = "<!-- reference -->"
"""Where the page `command.md` has the reference."""

EVERYWHERE = {"--help", "-h", "--debug", "--version", "--install-completion", "--show-completion"}
"""Options of every verb, which the page describes once."""


def commands() -> Iterator[tuple[str, Any]]:
    """Every verb with its full name, in the order of the help; a group comes before its verbs."""
    yield from _inside("dcl", typer.main.get_command(app))


def _inside(name: str, group: Any) -> Iterator[tuple[str, Any]]:
    for verb, command in group.commands.items():
        yield f"{name} {verb}", command
        if hasattr(command, "commands"):
            yield from _inside(f"{name} {verb}", command)


def plain(text: str | None) -> str:
    """A help text without the markup of the terminal, on one line."""
    return " ".join(Text.from_markup(text or "").plain.split())


def reference() -> str:
    """All verbs as Markdown: what each does, how it is called, examples, arguments and options."""
    return "\n".join(line for name, command in commands() for line in section(name, command))


def section(name: str, command: Any) -> list[str]:
    """One verb as Markdown."""
    about, _, examples = (command.help or "").partition("\b")
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not set(p.opts) & EVERYWHERE]
    usage = [name, *(["[OPTIONS]"] if options else []), *map(argument, arguments)]
    usage += ["[VERB]"] if hasattr(command, "commands") else []
    lines = [f"{'#' * len(name.split())} `{name}`", "", plain(about), "", "```text", " ".join(usage), "```", ""]
    shown = [line.strip().replace("\\[", "[") for line in examples.strip().splitlines()[1:]]
    lines += ["```", *shown, "```", ""] if shown else []
    rows = [(f"`{argument(p)}`", p) for p in arguments] + [(option(p), p) for p in options]
    if rows:
        lines += ["| option | meaning |", "|---|---|"]
        lines += [*(f"| {cell(left)} | {cell(meaning(p))} |" for left, p in rows), ""]
    return lines


def argument(parameter: Any) -> str:
    """The name of an argument, in brackets where it may be left out."""
    name = parameter.metavar or parameter.name.upper()
    return name if parameter.required else f"[{name}]"


def option(parameter: Any) -> str:
    """The names of an option, the first with what follows it."""
    first, *others = (*parameter.opts, *parameter.secondary_opts)
    first += f" {parameter.metavar}" if parameter.metavar else ""
    return ", ".join(f"`{name}`" for name in (first, *others))


def meaning(parameter: Any) -> str:
    """The help of an argument or option, with its default where the command shows one."""
    text, default = plain(parameter.help), parameter.default
    if getattr(parameter, "show_default", False) and default not in (None, False, ()):
        text += f" [default: {default}]"
    text = re.sub(r" \[default: (\S+)\]$", r" Default: `\1`.", text)
    text = re.sub(r" \[default: (.*)\]$", r" Default: \1.", text)
    return re.sub(r"(?<![\w`])--[a-z]+(?:-[a-z]+)*", r"`\g<0>`", text)


def cell(text: str) -> str:
    """Text as a cell of a table, where a bar would end the cell."""
    return text.replace("|", "\\|")
