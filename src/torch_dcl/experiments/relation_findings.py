"""Findings from the cells of ``relations.json``: differences to DCL with tests, hypotheses, exponents, the answer.

The tests are those of `docs/protocol.md`: a paired t-test over seeds against DCL-A2 for every other column and every
number of images, corrected by Holm's method over all comparisons of a task.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from torch_dcl.data.relations import TASKS
from torch_dcl.experiments.stats import Difference, centre, holm, interval, join_words, mean, paired, signed
from torch_dcl.experiments.table import CONTROLS

__all__ = [
    "CONTROLS", "DCL", "LEVEL", "Compared", "Hypothesis", "answer", "cell_of", "compare_cells", "details",
    "exponents_in_words", "images_needed", "judge_cell", "judge_exponent", "judge_hypotheses", "medians_in_words",
    "needed_in_words",
]  # fmt: skip

DCL = "A2"
NEEDED = (DCL, *CONTROLS)
RELATIONS = ("order", "sum")
"""The tasks of hypotheses 1 and 3."""
LEVEL = 0.05
Cell = Mapping[str, Any]
"""A cell as JSON has it: task, images, column, errors (one a seed), weights, chosen and more."""


class Compared(NamedTuple):
    """A column against DCL-A2, on the same seeds."""

    task: str
    images: int
    column: str
    gap: Difference
    """The column's error minus DCL-A2's, with its uncorrected 95 % interval."""
    corrected: float
    """The p of the paired t-test after Holm's correction over the task's comparisons."""

    @property
    def clear(self) -> int:
        """1 where the column errs significantly more than DCL-A2, −1 where it errs significantly less, 0 otherwise."""
        return 0 if self.corrected >= LEVEL else 1 if self.gap.mean > 0 else -1

    @property
    def sign(self) -> str:
        """▴ where the column errs significantly more than DCL-A2, ▾ where it errs significantly less."""
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
    """1 where all controls err significantly more than DCL-A2, −1 where one errs significantly less, else 0."""
    clear = [c.clear for c in compared if (c.task, c.images) == (task, images) and c.column in CONTROLS]
    return -1 if -1 in clear else int(bool(clear) and all(sign == 1 for sign in clear))


def answer(result: Mapping[str, Any]) -> str:
    """The answer in one sentence."""
    compared = compare_cells(result)
    if all(len(cell["errors"]) < 2 for cell in result["cells"]):
        return "One seed cannot say whether DCL-A2 errs less than its controls; run at least two."
    relations = [task for task in _tasks(result) if task != "number"]
    about = f"a relation of the digits ({', '.join(map(_short, relations))})"
    less, more = [], []
    for words, tasks in ((about, relations), ("the number itself", [t for t in _tasks(result) if t == "number"])):
        if judged := [judge_cell(compared, *place) for place in _settings(result, tasks)]:
            less.append(f"in {judged.count(1)} of {_count(len(judged), 'setting')} where the label is {words}")
            more.append(f"in {judged.count(-1)} of {len(judged)}")
    if not less:
        return "No task has DCL-A2 and all of its controls with the same number of images yet."
    n = min(each.gap.n for each in compared)
    return (
        f"DCL-A2 errs significantly less than every control of equal weights {' and '.join(less)}; it errs "
        f"significantly more than one of them {' and '.join(more)} (n = {n} seeds, paired t-tests, Holm, "
        f"{100 * LEVEL:g} %)."
    )


class Hypothesis(NamedTuple):
    """A hypothesis of the protocol, and its evidence from the cells."""

    name: str
    said: str


def judge_hypotheses(result: Mapping[str, Any]) -> list[Hypothesis]:
    """The three hypotheses of `docs/protocol.md`, each judged by its own rule; none that has no cell to judge it by."""
    return [each for each in (_relations(result), _numbers(result), _and_or_or(result)) if each is not None]


def _relations(result: Mapping[str, Any]) -> Hypothesis | None:
    """DCL-A2 errs less than every control where the label is a relation."""
    judged = _judged(result, RELATIONS)
    if not judged:
        return None
    said = f"DCL-A2 errs less than every control of equal weights where the label is a relation: {_verdicts(judged)}."
    failed = {place: _failed_in(result, *place) for place, verdict in judged.items() if verdict == 0}
    unclear = [f"{_places([place])} ({counts})" for place, counts in failed.items() if counts]
    if unclear:
        said += f" Networks that failed decide means and leave the t-tests little power on {join_words(unclear)}."
    return Hypothesis("1. Relations", said)


def _numbers(result: Mapping[str, Any]) -> Hypothesis | None:
    """The same rule finds no support where the label is the number."""
    judged = _judged(result, ("number",))
    if not judged:
        return None
    supported = [place for place, verdict in judged.items() if verdict == 1]
    words = f"does not hold, since it finds support on {_places(supported)}" if supported else "holds as stated"
    said = f"The same rule finds no support where the label is the number: {words}."
    compared = compare_cells(result)
    for place in (place for place, verdict in judged.items() if verdict == -1):
        better = [c.column for c in compared if (c.task, c.images) == place and c.column in CONTROLS and c.clear == -1]
        said += f" With {place[1]:,} images DCL-A2 errs significantly more than {join_words(better)}."
    return Hypothesis("2. Numbers", said)


def judge_exponent(exponents: Sequence[float]) -> int:
    """1 where the 95 % interval of the mean lies below 1, −1 where it lies above 1, 0 otherwise."""
    if len(exponents) < 2:
        return 0
    low, high = interval(exponents)
    return (high < 1) - (low > 1)


def _and_or_or(result: Mapping[str, Any]) -> Hypothesis | None:
    """The exponent that starts at 1 ends below 1."""
    cells = {
        (task, images): cell["exponents"]
        for task in RELATIONS
        for images in _sizes(result)
        if (cell := cell_of(result, task, images, "power-1")) is not None
    }
    if not cells:
        return None
    judged = {place: judge_exponent(exponents) for place, exponents in cells.items()}
    said = f"The exponent p of the power mean that starts at 1 (a sum) ends below 1: {_verdicts(judged)}."
    for place, exponents in cells.items():
        below = sum(p < 1 for p in exponents)
        if 0 < below < len(exponents):
            said += (
                f" On {_places([place])}, {below} of {len(exponents)} seeds end below 1 and the others above it: "
                "their mean describes neither."
            )
    return Hypothesis("3. And or or", said)


def _judged(result: Mapping[str, Any], tasks: Sequence[str]) -> dict[tuple[str, int], int]:
    """`judge_cell` of every setting that can be judged."""
    compared = compare_cells(result)
    there = {(each.task, each.images) for each in compared}
    return {place: judge_cell(compared, *place) for place in _settings(result, tasks) if place in there}


def _settings(result: Mapping[str, Any], tasks: Sequence[str]) -> list[tuple[str, int]]:
    """Tasks and numbers of images that have DCL-A2 and all of its controls."""
    places = [(task, images) for task in tasks for images in _sizes(result)]
    return [place for place in places if all(cell_of(result, *place, name) for name in NEEDED)]


def _verdicts(judged: Mapping[tuple[str, int], int]) -> str:
    """How many settings support a hypothesis, contradict it, or leave it open, and which."""
    parts = []
    for verdict, word in ((1, "supported"), (-1, "contradicted"), (0, "open")):
        places = [place for place, own in judged.items() if own == verdict]
        many = f" of {_count(len(judged), 'setting')}" if verdict == 1 else ""
        parts.append(f"{word} in {len(places)}{many}{f' ({_places(places)})' if places else ''}")
    return ", ".join(parts)


def _places(places: Sequence[tuple[str, int]]) -> str:
    """Tasks with their numbers of images."""
    by_task: dict[str, list[str]] = {}
    for task, images in places:
        by_task.setdefault(task, []).append(f"{images:,}")
    return "; ".join(f"{_short(task)} with {join_words(sizes)}" for task, sizes in by_task.items())


def _failed_in(result: Mapping[str, Any], task: str, images: int) -> str:
    """How many networks of DCL-A2 and its controls failed with a task and a number of images; nothing where none."""
    cells = [cell_of(result, task, images, column) for column in NEEDED]
    counts = [(cell["column"], len(cell["failed"]), len(cell["errors"])) for cell in cells if cell is not None]
    return ", ".join(f"{column} {failed} of {many}" for column, failed, many in counts if failed)


def medians_in_words(result: Mapping[str, Any]) -> list[str]:
    """The medians of all columns of the settings in which networks failed. They are not part of the protocol."""
    sentences = []
    for task in _tasks(result):
        for images in _sizes(result):
            cells = [cell for cell in result["cells"] if (cell["task"], cell["images"]) == (task, images)]
            if any(cell["failed"] for cell in cells):
                medians = ", ".join(f"{cell['column']} {median(cell['errors']):.2f}" for cell in cells)
                sentences.append(f"{TASKS[task].title}, {images:,} images: median errors {medians}.")
    return sentences


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
    target = centre(reference["errors"])
    points = [(float(cell["images"]), centre(cell["errors"])) for cell in cells]
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
    """Images needed, where exponents ended, rates at the edge, networks that failed and medians, in sentences."""
    sentences, sizes = [], _sizes(result)
    middle = sizes[len(sizes) // 2]
    others = [column for column in dict.fromkeys(cell["column"] for cell in result["cells"]) if column != DCL]
    for task in _tasks(result):
        reference = cell_of(result, task, middle, DCL)
        if reference is not None and len(sizes) > 1:
            needed = ", ".join(f"{column} {needed_in_words(result, task, column, middle)}" for column in others)
            note = any(cell["failed"] for cell in result["cells"] if cell["task"] == task)
            sentences.append(
                f"{TASKS[task].title}: images needed for the {mean(reference['errors']):.2f} % of DCL-A2 with "
                f"{middle:,}: {needed}.{' These means include networks that failed.' if note else ''}"
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
    return sentences + [f"Not part of the protocol. {sentence}" for sentence in medians_in_words(result)]


def exponents_in_words(exponents: Sequence[float]) -> str:
    """Mean, 95 % interval, range and number of the exponents of networks that did not diverge."""
    if not exponents:
        return "no value, since every network diverged"
    words = signed(mean(exponents))
    if len(exponents) > 1:
        low, high, least, most = map(signed, (*interval(exponents), min(exponents), max(exponents)))
        words += f" [{low}, {high}], seeds from {least} to {most}"
    return f"{words} (n = {len(exponents)})"


def _short(task: str) -> str:
    """The title of a task without what stands in brackets."""
    return TASKS[task].title.partition(" (")[0]


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _named(cell: Cell) -> str:
    return f"{cell['column']} on {cell['task']} with {cell['images']:,}"


def _tasks(result: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(cell["task"] for cell in result["cells"]))


def _sizes(result: Mapping[str, Any]) -> list[int]:
    return sorted({int(cell["images"]) for cell in result["cells"]})
