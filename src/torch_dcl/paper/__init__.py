"""What the paper reports, and the runs, tables and figures that answer it."""

from torch_dcl.paper.claims import Finding, judge
from torch_dcl.paper.page import as_html
from torch_dcl.paper.reading import Run, find_runs, read_run
from torch_dcl.paper.report import report
from torch_dcl.paper.reported import TABLE1, TABLE2, Reported
from torch_dcl.paper.table import Cell, Table, TableError, load, save
from torch_dcl.paper.text import as_markdown, as_rich, as_text
from torch_dcl.paper.verdict import findings, verdict

__all__ = [
    "TABLE1",
    "TABLE2",
    "Cell",
    "Finding",
    "Reported",
    "Run",
    "Table",
    "TableError",
    "as_html",
    "as_markdown",
    "as_rich",
    "as_text",
    "find_runs",
    "findings",
    "judge",
    "load",
    "read_run",
    "report",
    "save",
    "verdict",
]
