"""A table in a terminal, where few sets leave room for a line to every cell."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from torch_dcl.experiments.table import Table

__all__ = ["long_table"]


def long_table(
    table: "Table", *, weights: bool, against: str = "the baseline", absent: "Mapping[str, str] | None" = None
) -> "RichTable":
    """A line for every cell: the paper's number, ours, and the difference to the baseline.

    Args:
        table: The table.
        weights: Whether there is room for the weights; a narrow screen can do without them, but not with a cut number.
        against: What a difference is to.
        absent: Sets of which nothing was run, with the reason.
    """
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415
    from rich.markup import escape  # noqa: PLC0415
    from rich.table import Table as RichTable  # noqa: PLC0415

    from torch_dcl.experiments.text import mark  # noqa: PLC0415

    made = RichTable(box=SIMPLE_HEAD, pad_edge=False, title=table.title, title_justify="left", title_style="bold")
    names = ("set", "model", "paper %", "ours % ± std (n)", "", f"to {against}, 95 %", "weights")
    for name in names if weights else names[:-1]:
        made.add_column(name, justify="left" if name in ("set", "model", "") else "right", no_wrap=True)
    for name in table.sets:
        cells = [cell for column in table.columns if (cell := table.cell(name, column)) is not None]
        for i, cell in enumerate(cells):
            spread = "" if cell.std is None else f" ± {cell.std:.2f}"
            gap = table.to_baseline(cell)
            told = "" if gap is None else str(gap)
            made.add_row(
                "" if i else name.removeprefix("MNIST-"), cell.column, cell.theirs,
                f"{cell.mean:.2f}{spread} ({len(cell.errors)})", mark(table, cell), escape(told),
                *([f"{cell.weights:,}"] if weights else []),
                style="bold" if cell.column in table.best(name) else "", end_section=i == len(cells) - 1,
            )  # fmt: skip
    for name, reason in (absent or {}).items():
        made.add_row(name, "", "", reason, "", "", *([""] if weights else []), style="dim")
    return made
