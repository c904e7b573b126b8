"""How the documentation is built: Markdown pages, docstrings in the Google style, no network."""

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import torch_dcl

sys.path.insert(0, str(Path(__file__).parent))
import command_page

project = "torch-dcl"
author = "The torch-dcl authors"
copyright = author
release = version = torch_dcl.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["figures"]
nitpicky = True

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
highlight_language = "none"  # a block without a language is for the shell

# Docstrings say in words what types already say in the signature.
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autoclass_content = "class"
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes as one list, each with its type
napoleon_custom_sections = ["Shape"]
default_role = "code"  # `x` in a docstring is code
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"torch-dcl {release}"
html_static_path = ["_static"]
html_css_files = ["own.css"]
html_copy_source = False
html_show_sphinx = False
pygments_dark_style = "github-dark"
html_theme_options = {
    "navigation_with_keys": True,
    # The blue and the orange of the figure.
    "light_css_variables": {
        "color-brand-primary": "#0072b2",
        "color-brand-content": "#0072b2",
        "color-brand-visited": "#0072b2",
        "color-api-name": "#b34f00",
        "color-api-pre-name": "#b34f00",
    },
    "dark_css_variables": {
        "color-background-primary": "#0d1117",  # the ground of the figure
        "color-background-secondary": "#151b23",
        "color-background-border": "#2a313c",
        "color-code-background": "#151b23",
        "color-brand-primary": "#6cb8ea",
        "color-brand-content": "#6cb8ea",
        "color-brand-visited": "#6cb8ea",
        "color-api-name": "#f0a35e",
        "color-api-pre-name": "#f0a35e",
    },
}

# What is not ours cannot be linked without the network; what is ours must be found.
nitpick_ignore_regex = [("py:.*", r"(torch|nn|numpy|npt|collections|contextlib|weakref|pathlib|os|typing|rich)\..*")]
nitpick_ignore = [("py:class", name) for name in ("torch.Tensor", "Tensor", "Path", "Any", "RenderableType")]
nitpick_ignore += [("py:class", "torch_dcl.module._DCL")]  # the private base class of the layers
nitpick_ignore += [
    ("py:class", f"torch_dcl.experiments.{module}.C") for module in ("protocol", "digits")
]  # type variables

ROOMS = ("", ".convert", ".data", ".data.digits", ".data.layouts", ".fleet", ".models", ".experiments", ".kernels")


def public_names() -> dict[str, str]:
    """Where an object is defined, to the name under which it is documented: the shortest public one."""
    found: dict[str, str] = {}
    for room in ROOMS:
        module = importlib.import_module(f"torch_dcl{room}")
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isroutine(value):
                found.setdefault(f"{value.__module__}.{value.__qualname__}", f"torch_dcl{room}.{name}")
    return found


PUBLIC = public_names()
SHORT = {name.rpartition(".")[2]: name for name in PUBLIC.values()}


def find_public(app: Any, env: Any, node: Any, text: Any) -> Any:
    """Link a name to where it is documented, when it was written as the place of its definition."""
    if node.get("refdomain") != "py":
        return None
    target = PUBLIC.get(node["reftarget"]) or SHORT.get(node["reftarget"])
    if target is None:
        return None
    domain = env.domains["py"]
    return domain.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], target, node, text)


def plain_words(_app: Any, what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Keep napoleon from reading words before a colon as a type: attributes and returned values have theirs already."""
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]
    for i, line in enumerate(lines[:-1]):
        if line in ("Returns:", "Yields:"):
            indent = len(lines[i + 1]) - len(lines[i + 1].lstrip())
            lines[i + 1] = f"{' ' * indent}: {lines[i + 1].lstrip()}"


def table_of_markdown(_app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Turn tables as Markdown has them, which read well in a docstring, into those of reStructuredText."""
    rows = [i for i, line in enumerate(lines) if line.startswith("|") and line.endswith("|")]
    if not rows:
        return
    cells = [[cell.strip() for cell in lines[i].strip("|").split("|")] for i in rows]
    made = [".. list-table::", "   :header-rows: 1", ""]
    for row in cells:
        if not re.fullmatch(r"-+", "".join(row)):
            made += [f"   {'*' if not n else ' '} - {cell}" for n, cell in enumerate(row)]
    lines[rows[0] : rows[-1] + 1] = made


def add_reference(_app: Any, page: str, source: list[str]) -> None:
    """Put the command's reference where its page has the mark."""
    if page == "command":
        source[0] = source[0].replace(command_page.MARK, command_page.reference())


def setup(app: Any) -> None:
    """Add the above to the build."""
    app.connect("source-read", add_reference)
    app.connect("missing-reference", find_public)
    app.connect("autodoc-process-docstring", plain_words, priority=400)  # before napoleon, at 500
    app.connect("autodoc-process-docstring", table_of_markdown)
