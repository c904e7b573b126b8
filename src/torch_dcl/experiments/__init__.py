"""The paper's results, and the recipes and tables that reproduce them."""

from torch_dcl.experiments.claims import Finding, findings, judge
from torch_dcl.experiments.paper_numbers import TABLE1, TABLE2, Reported
from torch_dcl.experiments.recipes.table1 import as_rich, as_text, verdict
from torch_dcl.experiments.recipes.table2 import NaturalTable, join_table2
from torch_dcl.experiments.run_reader import Run, find_runs, read_run
from torch_dcl.experiments.runner import run
from torch_dcl.experiments.settings import SettingError
from torch_dcl.experiments.table import Cell, Table, TableError, load, save

__all__ = [
    "TABLE1", "TABLE2", "Cell", "Finding", "NaturalTable", "Reported", "Run", "SettingError", "Table", "TableError",
    "as_rich", "as_text", "find_runs", "findings", "join_table2", "judge", "load", "read_run", "run", "save", "verdict",
]  # fmt: skip
