"""Figures on a page, and the files in results/ that they come from."""

import csv
import json
import re
import statistics

from tests.docs.pages import ROOT


def lines_of(page):
    return (ROOT / page).read_text(encoding="utf-8").splitlines()


README, RESULTS, SPEED = map(lines_of, ("README.md", "docs/results.md", "docs/speed.md"))
NUMBER = re.compile(r"[+−-]?\d[\d,]*(?:\.\d+)?")
T_95 = {3: 4.3027, 5: 2.7764}  # of Student's distribution, by the number of seeds


def table_under(header, page):
    """The rows of the table with this first line, as cells without emphasis; an empty first cell is that above."""
    (start,) = [number for number, line in enumerate(page) if line.startswith(header)]
    rows, first = [], ""
    for line in [*page[start + 2 :], ""]:
        if not line.startswith("|"):
            return rows
        cells = [cell.strip().replace("**", "") for cell in line.strip().strip("|").split("|")]
        first = cells[0] = cells[0] or first
        rows.append(cells)
    return rows


def results(name):
    path = ROOT / "results" / name
    if path.suffix == ".csv":
        with path.open(newline="") as lines:
            return list(csv.DictReader(lines))
    return json.loads(path.read_text())


def agree(text, *values):
    """The numbers of a cell are these, to the digits that it shows."""
    shown = NUMBER.findall(text)
    assert len(shown) == len(values), text
    for one, value in zip(shown, values, strict=True):
        plain = one.replace(",", "").replace("−", "-")
        half_a_digit = 0.5 * 10.0 ** -len(plain.partition(".")[2])
        assert abs(float(plain) - value) <= half_a_digit + 1e-9, f"{text}: {one} is not {value}"


def paired(cell, plain):
    """Mean and 95 % interval of the differences of the same seeds; of one seed the difference alone."""
    assert cell["seeds"] == plain["seeds"]
    apart = [a - b for a, b in zip(cell["errors"], plain["errors"], strict=True)]
    mean, n = statistics.mean(apart), len(apart)
    if n == 1:
        return (mean,)
    reach = T_95[n] * statistics.stdev(apart) / n**0.5
    return mean, mean - reach, mean + reach


def holm(compared):
    """Correct several p, by name, as Holm does: the k-th smallest of m times m + 1 - k, never below the one before."""
    corrected, highest = {}, 0.0
    for rank, key in enumerate(sorted(compared, key=compared.get)):
        highest = max(highest, min(1.0, (len(compared) - rank) * compared[key]))
        corrected[key] = highest
    return corrected
