"""What the cells of ``relations.json`` say: differences to DCL with their tests, images needed, exponents, the answer.

The tests are those of `docs/protocol.md`: a paired t-test over seeds against DCL-A2 for every other column and every
number of images, corrected by Holm's method over all comparisons of a task.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch_dcl.data.relations import TASKS
from torch_dcl.experiments.stats import Difference, holm, interval, mean, paired, signed

__all__ = [
    "CONTROLS", "DCL", "LEVEL", "Compared", "answer", "cell_of", "compare_cells", "details",
    "exponents_in_words", "images_needed", "judge_cell", "needed_in_words",
]  # fmt: skip

DCL, CONTROLS = "A2", ("narrow", "low-rank", "summed")
NEEDED = (DCL, *CONTROLS)
LEVEL = 0.05
Cell = Mapping[str, Any]
"""A cell as JSON has it: task, images, column, errors (one a seed), weights, chosen and more."""


class Compared(NamedTuple):
    """A column against DCL-A2, on the same seeds."""

    task: str
    images: int
    column: str
    gap: Difference
    """The column's error less DCL-A2's, with its uncorrected 95 % interval."""
    corrected: float
    """The p of the paired t-test after Holm's correction over the task's comparisons."""

    @property
    def clear(self) -> int:
        """1 where the column errs clearly more than DCL-A2, −1 where it errs clearly less, 0 otherwise."""
        return 0 if self.corrected >= LEVEL else 1 if self.gap.mean > 0 else -1

    @property
    def sign(self) -> str:
        """▴ where the column errs clearly more than DCL-A2, ▾ where it errs clearly less."""
        return ("▾", "", "▴")[self.clear + 1]


def cell_of(result: Mapping[str, Any], task: str, images: int, column: str) -> Cell | None:
    """A cell, or None where it is not there."""
    wanted = task, images, column
    return next((cell for cell in result["cells"] if (cell["task"], cell["images"], cell["column"]) == wanted), None)


def compare_cells(result: Mapping[str, Any]) -> list[Compared]:
    """All comparisons with DCL-A2; none where a cell has fewer than two seeds."""
    compared: list[Compared] = []
    for task in _tasks(result):
        gaps: list[tuple[int, str, Difference]] = []
        for cell in result["cells"]:
            reference = cell_of(result, task, cell["images"], DCL)
            if cell["task"] != task or cell["column"] == DCL or reference is None or len(cell["errors"]) < 2:
                continue
            gaps.append((cell["images"], cell["column"], paired(cell["errors"], reference["errors"])))
        corrected = holm([gap.p for _, _, gap in gaps])
        compared += [Compared(task, *gap, p) for gap, p in zip(gaps, corrected, strict=True)]
    return compared


def judge_cell(compared: Sequence[Compared], task: str, images: int) -> int:
    """1 where all controls err clearly more than DCL-A2 with these images, −1 where one errs clearly less, else 0."""
    clear = [c.clear for c in compared if (c.task, c.images) == (task, images) and c.column in CONTROLS]
    return -1 if -1 in clear else int(bool(clear) and all(sign == 1 for sign in clear))


def answer(result: Mapping[str, Any]) -> str:
    """The answer in one sentence."""
    compared = compare_cells(result)
    if all(len(cell["errors"]) < 2 for cell in result["cells"]):
        return "One seed cannot say whether DCL-A2 errs less than its controls; run at least two."
    relations = [task for task in _tasks(result) if task != "number"]
    about = f"a relation of the digits ({', '.join(TASKS[task].title for task in relations)})"
    parts = []
    for words, tasks in ((about, relations), ("the number itself", [t for t in _tasks(result) if t == "number"])):
        cells = [(task, images) for task in tasks for images in _sizes(result)]
        judged = [judge_cell(compared, *cell) for cell in cells if all(cell_of(result, *cell, name) for name in NEEDED)]
        if judged:
            parts.append(
                f"where the label is {words}, DCL-A2 errs clearly less than every control of equal weights in "
                f"{judged.count(1)} of {len(judged)} settings and clearly more than one of them in {judged.count(-1)}"
            )
    if not parts:
        return "No task has DCL-A2 and all of its controls with the same number of images yet."
    n = min(each.gap.n for each in compared)
    sentence = f"{'; '.join(parts)} (n = {n} seeds, paired t-tests, Holm, {100 * LEVEL:g} %)."
    return sentence[0].upper() + sentence[1:]


def images_needed(result: Mapping[str, Any], task: str, column: str, images: int) -> float | None:
    """How many images a column needs for the mean error that DCL-A2 reaches with ``images``.

    Between two sizes the logarithm of the mean error is taken to be linear in the logarithm of the images. 0.0 where
    the fewest images that were tried already do; infinity where the most do not; None where the column or DCL-A2 has no
    cell.
    """
    cells = sorted(
        (c for c in result["cells"] if (c["task"], c["column"]) == (task, column)), key=lambda c: int(c["images"])
    )
    reference = cell_of(result, task, images, DCL)
    if not cells or reference is None:
        return None
    target = mean(reference["errors"])
    points = [(float(cell["images"]), mean(cell["errors"])) for cell in cells]
    if points[0][1] <= target:
        return points[0][0] if points[0][1] == target else 0.0
    for (few, high), (many, low) in pairwise(points):
        if low <= target:
            part = math.log(high / target) / math.log(high / low) if low < target else 1.0
            return float(few * (many / few) ** part)
    return math.inf


def needed_in_words(result: Mapping[str, Any], task: str, column: str, images: int) -> str:
    """`images_needed` as a text, to two digits."""
    needed, sizes = images_needed(result, task, column, images), _sizes(result)
    if needed is None:
        return "–"
    if needed == 0:
        return f"fewer than {sizes[0]:,}"
    return f"more than {sizes[-1]:,}" if math.isinf(needed) else f"{float(f'{needed:.2g}'):,.0f}"


def details(result: Mapping[str, Any]) -> list[str]:
    """Images needed, where exponents ended, rates at the edge, and networks that failed, in sentences."""
    sentences, sizes = [], _sizes(result)
    middle = sizes[len(sizes) // 2]
    others = [column for column in dict.fromkeys(cell["column"] for cell in result["cells"]) if column != DCL]
    for task in _tasks(result):
        reference = cell_of(result, task, middle, DCL)
        if reference is not None and len(sizes) > 1:
            needed = ", ".join(f"{column} {needed_in_words(result, task, column, middle)}" for column in others)
            sentences.append(
                f"{TASKS[task].title}: images needed for the {mean(reference['errors']):.2f} % of DCL-A2 with "
                f"{middle:,}: {needed}."
            )
    sentences += [
        f"{TASKS[cell['task']].title}, {cell['images']:,} images: p of {cell['column']} ended at "
        f"{exponents_in_words(cell['exponents'])}."
        for cell in result["cells"]
        if "exponents" in cell
    ]
    at_edge = [_named(cell) + f" ({cell['chosen']:g})" for cell in result["cells"] if cell["at_edge"]]
    if at_edge:
        sentences.append(f"Best at the edge of the rates that were tried, and flagged: {', '.join(at_edge)}.")
    failed = [f"{_named(c)} ({len(c['failed'])} of {len(c['errors'])})" for c in result["cells"] if c["failed"]]
    if failed:
        sentences.append(f"Diverged, or ended within one point of chance: {', '.join(failed)}.")
    return sentences


def exponents_in_words(exponents: Sequence[float]) -> str:
    """Mean, 95 % interval, range and number of the exponents of networks that did not diverge."""
    if not exponents:
        return "no value, since every network diverged"
    words = signed(mean(exponents))
    if len(exponents) > 1:
        low, high, least, most = map(signed, (*interval(exponents), min(exponents), max(exponents)))
        words += f" [{low}, {high}], seeds from {least} to {most}"
    return f"{words} (n = {len(exponents)})"


def _named(cell: Cell) -> str:
    return f"{cell['column']} on {cell['task']} with {cell['images']:,}"


def _tasks(result: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(cell["task"] for cell in result["cells"]))


def _sizes(result: Mapping[str, Any]) -> list[int]:
    return sorted({int(cell["images"]) for cell in result["cells"]})
