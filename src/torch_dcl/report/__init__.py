"""Runs as pages for the browser, and their figures: `report(["runs/table1", "runs/figures"], "report.html")`."""

from torch_dcl.report.page import as_html, as_markdown, draw_run, report

__all__ = ["as_html", "as_markdown", "draw_run", "report"]
