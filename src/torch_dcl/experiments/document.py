"""A page for the browser: one file that asks for nothing from outside, with figures inside and tables that sort."""

import base64
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from torch_dcl.experiments.style import CSS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from torch_dcl.experiments.table import Table

__all__ = ["box", "column", "document", "figure", "how", "listed", "not_run", "prose", "sheet", "table"]

SCALE = 1.5

SORT = """
(() => {
  const order = new Intl.Collator("en", {numeric: true});
  const words = cell => cell ? cell.textContent.trim() : "";
  const number = text => {
    const found = text.replace(/\\u2212/g, "-").replace(/(\\d),(?=\\d{3})/g, "$1").match(/[-+]?\\d+(\\.\\d+)?/);
    return found ? parseFloat(found[0]) : NaN;
  };
  for (const table of document.querySelectorAll("table.sort")) {
    const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0], before = [...body.rows];
    heads.forEach((head, i) => {
      const button = document.createElement("button");
      button.type = "button";
      button.title = "Sort";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const next = {ascending: "descending", descending: null}[head.getAttribute("aria-sort")];
        const way = next === undefined ? "ascending" : next;
        heads.forEach(other => other.removeAttribute("aria-sort"));
        table.classList.toggle("sorted", way !== null);
        if (way === null) { body.append(...before); return; }
        head.setAttribute("aria-sort", way);
        const down = way === "descending" ? -1 : 1;
        const rows = before.map(row => ({row, text: words(row.cells[i]), number: number(words(row.cells[i]))}));
        const empty = entry => i > 0 && Number.isNaN(entry.number);
        rows.sort((a, b) => empty(a) - empty(b) || (empty(a) ? 0 :
          down * (i > 0 ? a.number - b.number : order.compare(a.text, b.text))));
        body.append(...rows.map(entry => entry.row));
      });
    });
  }
})();
"""


def document(title: str, parts: Sequence[str]) -> str:
    """A whole page.

    Args:
        title: Its title, which is escaped.
        parts: HTML for its body.
    """
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            # Without this a browser asks the server for an icon.
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>",
            *(part for part in parts if part),
            f"</main>\n<script>{SORT}</script>\n</body>\n</html>\n",
        ]
    )


def prose(text: str) -> str:
    """A sentence with the apostrophes of print, escaped, and no line break before a per cent sign or around ``=``."""
    return escape(text.replace("'", "’").replace(" %", "\u00a0%").replace("n = ", "n\u00a0=\u00a0"))


def box(inner: str, label: str, style: str = "") -> str:
    """What is too wide scrolls in here, also by keyboard, and the page does not."""
    extra = f' style="{style}"' if style else ""
    return f'<div class="box" tabindex="0" role="region" aria-label="{escape(label)}"{extra}>{inner}</div>'


def listed(pairs: Mapping[str, str]) -> str:
    """Names and what they stand for."""
    return f"<dl>{''.join(f'<dt>{escape(key)}</dt><dd>{escape(value)}</dd>' for key, value in pairs.items())}</dl>"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], label: str, kind: str = "sort") -> str:
    """A table that sorts, in a box.

    Args:
        heads: HTML of the heads of its columns.
        rows: HTML of its cells; the first of each row is the row's head.
        label: What it is called, for those who do not see it.
        kind: Its classes.
    """
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>' for first, *rest in rows
    )
    inner = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return box(f'<table class="{escape(kind)}">{inner}</table>', label)


def column(name: str) -> str:
    """The name of a network, with the dot of its colour."""
    return f'<span class="c-{escape(name)}"><span class="dot"></span></span>{escape(name)}'


def figure(draw: "Callable[[bool], Figure]", name: str) -> str:
    """A figure, light and dark, with its caption.

    Args:
        draw: Called with whether it is for a dark page.
        name: What its ids begin with.
    """
    from torch_dcl.experiments.figures import svg

    drawn = [draw(dark) for dark in (False, True)]
    parts = [
        f'<div class="{kind}">{_larger(svg(made, name=f"{name}-{kind}"))}</div>'
        for made, kind in zip(drawn, ("light", "dark"), strict=True)
    ]
    return f"<figure>{''.join(parts)}<figcaption>{prose(str(drawn[0].get_label()))}</figcaption></figure>"


def _larger(svg: str) -> str:
    """The same, larger than on paper: a screen is read from farther away."""
    head, close, rest = svg.partition(">")
    head = re.sub(r'\b(width|height)="([\d.]+)pt"', lambda m: f'{m[1]}="{SCALE * float(m[2]):g}pt"', head)
    return head + close + rest


def not_run(what: str, how: str = "") -> str:
    """A line in place of a figure whose data is not there.

    Args:
        what: The figure.
        how: The command that gives it.
    """
    told = f" It is given by <code>{escape(how)}</code>." if how else ""
    return f'<p class="absent">{prose(what)}: not run.{told}</p>'


def sheet(names: Sequence[str], mnist: str | os.PathLike[str] | None = None, samples: int = 12) -> str:
    """The contact sheet of some sets, inside the page.

    Args:
        names: The sets.
        mnist: A folder with the idx files of MNIST; None for the embedded digits.
        samples: Images of each set.
    """
    from torch_dcl.data.layouts import LAYOUTS
    from torch_dcl.data.sheet import contact_sheet

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "sheet.png")
        contact_sheet(path, mnist=mnist, samples=samples, layouts=[LAYOUTS[name] for name in names])
        picture = base64.b64encode(path.read_bytes()).decode("ascii")
    words = "Each set: its name and variation, where the digits stand, and the first images of its test part."
    if mnist is None:
        words += " They are written with the embedded digits."
    inner = f'<img alt="Contact sheet of {escape(", ".join(names))}" src="data:image/png;base64,{picture}">'
    return f"<figure>{box(inner, 'Contact sheet')}<figcaption>{words}</figcaption></figure>"


def how(made: "Table", *, machine: bool = True) -> str:
    """Protocol, deviations, and what is needed to run it again.

    Args:
        made: The table.
        machine: Whether to name hardware and versions, which may stand elsewhere.
    """
    parts = []
    if made.protocol:
        parts.append(f"<h2>Protocol</h2>\n{listed(made.protocol)}")
    if made.deviations:
        told = "".join(f"<li>{escape(deviation)}</li>" for deviation in made.deviations)
        parts.append(f"<h2>Deviations from the paper</h2>\n<ul>{told}</ul>")
    again: dict[str, str] = {}
    if made.hardware and machine:
        again["Hardware"] = made.hardware
    if made.versions and machine:
        again["Versions"] = ", ".join(f"{name} {version}" for name, version in made.versions.items())
    if made.minutes:
        phases = ", ".join(f"{phase} {minutes:.4g}" for phase, minutes in made.minutes.items())
        together = f"; together {sum(made.minutes.values()):.4g}" if len(made.minutes) > 1 else ""
        again["Minutes"] = phases + together
    if again or made.command:
        parts.append(f"<h2>To run it again</h2>\n{listed(again) if again else ''}")
    if made.command:
        parts.append(box(f"<pre>{escape(made.command)}</pre>", "Command", "margin-top:14px"))
    return "\n".join(parts)
