"""The pages that people read, and the blocks of code in them."""

import contextlib
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from docs import command_page

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]

SHELL = ("", "console", "sh", "bash")  # a block without a language is for the shell
PROSE = ("text",)
OUTPUT = "<!-- output -->"  # before a block of text: it is what the block above prints

_FENCE = re.compile(r"^(`{3,}|:{3,})\s*(\S*)")


def text_of(page: str) -> str:
    """A page as the site has it: the command's page with its generated reference."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return text.replace(command_page.MARK, command_page.reference()) if command_page.MARK in text else text


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    is_output: bool

    @property
    def place(self) -> str:
        return f"{self.page}, line {self.line}"

    def commands(self) -> list[str]:
        """The commands of a block for the shell, one a line or between dots or &&, without comments."""
        found = []
        for line in self.text.splitlines():
            bare = line[: _comment(line)].strip()
            found += [part.strip() for part in re.split(r" · | && ", bare)] if bare else []
        return found


def _comment(line: str) -> int:
    """Where the comment of a line for the shell begins: at a # behind a space that is not inside of quotes."""
    for found in re.finditer(r"(?:^|(?<=\s))#", line):
        with contextlib.suppress(ValueError):  # a quote that is still open
            shlex.split(line[: found.start()])
            return found.start()
    return len(line)


def blocks_of(page: str) -> list[Block]:
    """Every fenced block of a page, in order; directives of Sphinx are no code."""
    blocks: list[Block] = []
    fence, start, kept, output = None, 0, [], False
    for number, line in enumerate(text_of(page).splitlines(), 1):
        if fence is None:
            if found := _FENCE.match(line):
                fence, start, kept = found, number, []
            elif line.strip():
                output = line.strip() == OUTPUT
        elif line.strip() == fence[1]:
            if not fence[2].startswith("{"):
                blocks.append(Block(page, start + 1, fence[2], "\n".join(kept), output))
            fence, output = None, False
        else:
            kept.append(line)
    assert fence is None, f"{page}: the block that begins in line {start} does not end"
    return blocks


def spans_of(page: str) -> list[str]:
    """Code inside of sentences."""
    text = re.sub(r"^(`{3,})[^\n]*\n.*?^\1$", "", text_of(page), flags=re.M | re.S)
    return [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
