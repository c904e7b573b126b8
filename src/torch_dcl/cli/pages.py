"""Pages for the browser: one file that asks for nothing from outside, with figures inside and tables that sort."""

import base64
import re
import tempfile
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure", "inner", "not_run", "page", "sheet", "with_prefix"]

SCALE = 1.5

EXTRA = """
figure{margin:22px 0 30px}
figure svg{display:block;max-width:100%;height:auto}
figure img{display:block;width:100%;min-width:640px;height:auto;border-radius:4px}
th small{display:block;color:var(--soft);font-size:13px}
figcaption{color:var(--soft);font-size:13.5px;line-height:1.5;margin-top:10px;max-width:80ch}
.dark{display:none}
@media (prefers-color-scheme:dark){.dark{display:block}.light{display:none}
figure img{filter:invert(1) hue-rotate(180deg)}}
.run{margin-top:72px;padding-top:10px;border-top:3px solid var(--ink)}
.run h1{font-size:24px}
thead th[data-sort]{cursor:pointer;user-select:none}
thead th[data-sort]:hover{color:var(--ink)}
thead th[data-sort]:focus-visible{outline:2px solid var(--A2);outline-offset:-2px}
thead th[aria-sort=ascending]::after{content:" ↑"}
thead th[aria-sort=descending]::after{content:" ↓"}
"""

SORT = """
(() => {
  const value = (row, i) => {
    const cell = row.cells[i];
    if (!cell) return "";
    const text = cell.textContent.trim().replace(/\\u2212/g, "-").replace(/,/g, "");
    const number = parseFloat(text);
    return Number.isNaN(number) ? (i ? null : text) : i ? number : text;
  };
  for (const table of document.querySelectorAll("table")) {
    const heads = table.tHead ? [...table.tHead.rows[0].cells] : [];
    const body = table.tBodies[0];
    if (!body || body.rows.length < 2) continue;
    heads.forEach((head, i) => {
      head.dataset.sort = "";
      head.tabIndex = 0;
      head.title = "Sort";
      const sort = () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach(other => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const rows = [...body.rows].map(row => [value(row, i), row]);
        rows.sort(([a], [b]) => {
          if (a === null || b === null) return (a === null) - (b === null);
          const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
          return down ? -order : order;
        });
        for (const [, row] of rows) body.append(row);
      };
      head.addEventListener("click", sort);
      head.addEventListener("keydown", event => {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); sort(); }
      });
    });
  }
})();
"""


def page(title: str, parts: Sequence[str]) -> str:
    """A whole page.

    Args:
        title: Its title, which is escaped.
        parts: HTML for its body.
    """
    from torch_dcl.paper.style import CSS  # noqa: PLC0415

    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            '<link rel="icon" href="data:,">',
            f"<title>{escape(title)}</title>\n<style>{CSS}{EXTRA}</style>\n</head>\n<body>\n<main>",
            *parts,
            f"</main>\n<script>{SORT}</script>\n</body>\n</html>\n",
        ]
    )


def inner(whole: str) -> str:
    """What stands inside of ``<main>``."""
    return whole.partition("<main>")[2].rpartition("</main>")[0].strip()


def with_prefix(html: str, prefix: str) -> str:
    """The same with ids that begin with a prefix, so that several runs can stand on one page."""
    return re.sub(r'(\bid="|href="#)(?=MNIST-)', rf"\g<1>{prefix}", html)


def figure(draw: "Callable[[bool], Figure]", name: str) -> str:
    """A figure, light and dark, with its caption.

    Args:
        draw: Called with whether it is for a dark page.
        name: What its ids begin with.
    """
    from torch_dcl.paper.figures import svg  # noqa: PLC0415

    drawn = [draw(dark) for dark in (False, True)]
    parts = [
        f'<div class="{kind}">{_larger(svg(made, name=f"{name}-{kind}"))}</div>'
        for made, kind in zip(drawn, ("light", "dark"), strict=True)
    ]
    return f"<figure>{''.join(parts)}<figcaption>{escape(str(drawn[0].get_label()))}</figcaption></figure>"


def _larger(svg: str) -> str:
    """The same, larger than on paper: a screen is read from farther away."""
    head, close, rest = svg.partition(">")
    head = re.sub(r'\b(width|height)="([\d.]+)pt"', lambda m: f'{m[1]}="{SCALE * float(m[2]):g}pt"', head)
    return head + close + rest


def not_run(what: str) -> str:
    """A line in place of a figure whose data is not there."""
    return f'<p class="absent">{escape(what)}: not run.</p>'


def sheet(names: Sequence[str], mnist: Path | None = None, samples: int = 12) -> str:
    """The contact sheet of some sets, inside the page."""
    from torch_dcl.data.layouts import LAYOUTS  # noqa: PLC0415
    from torch_dcl.data.sheet import contact_sheet  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "sheet.png")
        contact_sheet(path, mnist=mnist, samples=samples, layouts=[LAYOUTS[name] for name in names])
        picture = base64.b64encode(path.read_bytes()).decode("ascii")
    words = "Each set: its name and variation, where the digits stand, and the first images of its test part."
    return (
        '<figure><div class="box" tabindex="0" role="region" aria-label="Contact sheet">'
        f'<img alt="Contact sheet of {escape(", ".join(names))}" src="data:image/png;base64,{picture}"></div>'
        f"<figcaption>{words}</figcaption></figure>"
    )
