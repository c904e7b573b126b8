"""Runs as pages for the browser, and their figures: `report(["runs/table1", "runs/figures"], "report.html")`."""

from torch_dcl.report.page import as_html, draw_run, report

__all__ = ["as_html", "draw_run", "report"]
