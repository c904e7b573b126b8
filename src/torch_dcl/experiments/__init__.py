"""What the paper reports, and the runs, tables and figures that answer it."""

from torch_dcl.experiments.claims import Finding, judge
from torch_dcl.experiments.natural.table import NaturalTable, as_markdown2, join_table2, load_table2, save_table2
from torch_dcl.experiments.page import as_html
from torch_dcl.experiments.reading import Run, find_runs, read_run
from torch_dcl.experiments.report import report
from torch_dcl.experiments.reported import TABLE1, TABLE2, Reported
from torch_dcl.experiments.table import Cell, Table, TableError, load, save
from torch_dcl.experiments.text import as_markdown, as_rich, as_text
from torch_dcl.experiments.verdict import findings, verdict

__all__ = [
    "TABLE1",
    "TABLE2",
    "Cell",
    "Finding",
    "NaturalTable",
    "Reported",
    "Run",
    "Table",
    "TableError",
    "as_html",
    "as_markdown",
    "as_markdown2",
    "as_rich",
    "as_text",
    "find_runs",
    "findings",
    "join_table2",
    "judge",
    "load",
    "load_table2",
    "read_run",
    "report",
    "save",
    "save_table2",
    "verdict",
]
