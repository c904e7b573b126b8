"""``dcl report``: runs by the names that people type, as one page."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch_dcl.cli.names import UsageError, nearest

if TYPE_CHECKING:
    from torch_dcl.experiments.reading import Run

__all__ = ["find_run", "write_report"]


def write_report(runs: Sequence[str], output: Path) -> Path:
    """Write the page of some runs, and say where it is.

    Args:
        runs: Run folders, names of runs in ``runs/``, or files ``table1.json`` and ``table2.json``.
        output: The page; or a file that ends in ``.json``, for runs of parts of Table 2 as one table.

    Raises:
        UsageError: There is no such run, or nothing to report of it, or no such folder to write to; or the runs are not
            parts of one table.
    """
    from torch_dcl.experiments.reading import read_run  # noqa: PLC0415
    from torch_dcl.experiments.report import check, report  # noqa: PLC0415

    if not output.parent.is_dir():
        raise UsageError(f"{output} cannot be written: the folder {output.parent} does not exist")
    found = [read_run(find_run(run)) for run in runs]
    for run in found:
        try:
            check(run)
        except ValueError as error:
            raise UsageError(str(error)) from None
    if output.suffix == ".json":
        _write_table(found, output)
    else:
        report(found, output)
    return output.resolve()


def _write_table(runs: "Sequence[Run]", output: Path) -> None:
    from torch_dcl.experiments.natural.table import NaturalTable, join_table2, save_table2  # noqa: PLC0415
    from torch_dcl.experiments.table import TableError  # noqa: PLC0415

    tables = [run.table for run in runs if isinstance(run.table, NaturalTable)]
    if len(tables) < len(runs):
        other = next(run.path for run in runs if not isinstance(run.table, NaturalTable))
        raise UsageError(f"{other} is no run of table2, and only those are joined in a file; name a page, x.html")
    try:
        save_table2(join_table2(tables), output)
    except TableError as error:
        raise UsageError(str(error)) from None


def find_run(run: str) -> Path:
    """The run that is meant: a folder, a file, or a name in ``runs/``.

    Raises:
        UsageError: There is none; the nearest is offered.
    """
    from torch_dcl.experiments.reading import find_runs  # noqa: PLC0415

    for path in (Path(run), Path("runs", run)):
        if path.is_file() or (path / "recipe.json").is_file():
            return path
        if path.is_dir():
            raise UsageError(f"{path} is no run folder: it has no recipe.json")
    known = [state.path for state in find_runs("runs")]
    raise UsageError(f"there is no run {run!r}; {nearest(run, known)}" + ("" if known else " in runs/"))
