"""A page for the browser: one file that asks for nothing from outside, with figures inside and tables that sort."""

import base64
import functools
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup, escape

from torch_dcl.experiments.table import Grid, Table, mark
from torch_dcl.report.figures import svg

if TYPE_CHECKING:
    from jinja2 import Environment
    from matplotlib.figure import Figure

__all__ = ["Drawn", "Picture", "bold", "document", "figure", "on_page", "prose", "render", "sheet"]

SCALE = 1.5
GROUPS = ("A2", "B2", "narrow")
"""A rule stands before each of these columns: the DCL models of either layer, and the controls."""
TONES = {"holds": "holds", "does not hold": "fails", "not decidable": "open"}


@functools.cache
def _environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader("torch_dcl.report"), autoescape=select_autoescape(), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"prose": prose, "md": _markdown}
    environment.globals |= {
        "bold": bold, "groups": GROUPS, "mark": mark, "repeated": _repeated, "tones": TONES,
    }  # fmt: skip
    return environment


def render(template: str, **context: Any) -> Markup:
    """A template as HTML; texts in the context are escaped."""
    return Markup(_environment().get_template(template).render(context))


def document(title: str, body: Markup) -> str:
    """A whole page."""
    files = resources.files("torch_dcl.report") / "templates"
    css, js = (Markup((files / name).read_text(encoding="utf-8")) for name in ("style.css", "sort.js"))
    return str(render("page.html", title=title, body=body, css=css, js=js))


def prose(text: str) -> str:
    """A sentence with the apostrophes of print, and no line break before a per cent sign or around ``=``."""
    return text.replace("'", "’").replace(" %", "\u00a0%").replace("n = ", "n\u00a0=\u00a0")


def _markdown(text: str) -> str:
    """Text that Markdown leaves alone."""
    for sign in "\\`*_|<>[]":
        text = text.replace(sign, f"&#{ord(sign)};" if sign in "<>" else f"\\{sign}")
    return " ".join(text.split())


def bold(text: str, is_bold: bool = True) -> Markup:
    """A text, in bold or not."""
    return Markup("<b>{}</b>" if is_bold else "{}").format(text)


def on_page(grid: Grid) -> dict[str, Any]:
    """Heads and rows of a grid, for the macro ``table``."""
    rows = [
        [
            escape(line.cells[0]) + Markup("<small>{}</small>" if line.note else "").format(line.note),
            *(bold(text, line.style == "bold") for text in line.cells[1:]),
        ]
        for line in grid.lines
    ]
    heads = [head.removeprefix("<") for head in grid.heads]
    left = [i for i, head in enumerate(grid.heads) if head.startswith("<")]
    return {"heads": [head[:1].upper() + head[1:] for head in heads], "rows": rows, "left": left}


def _repeated(table: Table, machine: bool) -> dict[str, str]:
    """Hardware, versions and minutes of a table; the first two may be elsewhere on the page."""
    facts: dict[str, str] = {}
    if table.hardware and machine:
        facts["Hardware"] = table.hardware
    if table.versions and machine:
        facts["Versions"] = ", ".join(f"{name} {version}" for name, version in table.versions.items())
    if table.minutes:
        phases = ", ".join(f"{phase} {_count(minutes)}" for phase, minutes in table.minutes.items())
        together = f"; together {_count(sum(table.minutes.values()))}" if len(table.minutes) > 1 else ""
        facts["Minutes"] = phases + together
    return facts


def _count(minutes: float) -> str:
    return f"{minutes:.4g}" if minutes >= 0.01 else "< 0.01"


class Drawn(NamedTuple):
    """A figure for a light and for a dark page, and its caption."""

    images: dict[str, Markup]
    caption: str


def figure(draw: "Callable[[bool], Figure]", name: str) -> Drawn:
    """Draw a figure, by a function of whether the page is dark; its ids begin with a name."""
    drawn = {"light": draw(False), "dark": draw(True)}
    images = {kind: Markup(_larger(svg(each, name=f"{name}-{kind}"))) for kind, each in drawn.items()}
    return Drawn(images, str(drawn["light"].get_label()))


def _larger(text: str) -> str:
    """Scale an SVG up for a screen, which is read from farther away than paper."""
    head, close, rest = text.partition(">")
    head = re.sub(r'\b(width|height)="([\d.]+)pt"', lambda m: f'{m[1]}="{SCALE * float(m[2]):g}pt"', head)
    return head + close + rest


class Picture(NamedTuple):
    """A contact sheet."""

    names: Sequence[str]
    png: str
    caption: str


def sheet(names: Sequence[str], mnist: str | os.PathLike[str] | None = None, samples: int = 12) -> Picture:
    """The contact sheet of some sets, to stand inside a page; without a folder of MNIST, with the embedded digits."""
    from torch_dcl.data.layouts import LAYOUTS
    from torch_dcl.data.sheet import contact_sheet

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "sheet.png")
        contact_sheet(path, mnist=mnist, samples=samples, layouts=[LAYOUTS[name] for name in names])
        png = base64.b64encode(path.read_bytes()).decode("ascii")
    words = "Each set: its name and variation, where the digits stand, and the first images of its test part."
    return Picture(names, png, words + (" They are written with the embedded digits." if mnist is None else ""))
