"""What the page of results says against its own numbers is true as well."""

import re
import statistics

import torch
from scipy import stats
from tests.docs.numbers import RESULTS, agree, paired, results

from torch_dcl.experiments.columns import build

TEXT = " ".join(" ".join(RESULTS).split())


def test_what_is_said_of_the_start_of_the_baseline():
    x = torch.randn(2000, 800, generator=torch.Generator().manual_seed(0))

    def scale(column):
        with torch.no_grad():
            return (
                statistics.mean(float(build(column, 100, seed).fc1(x).relu().square().mean()) for seed in range(5))
                ** 0.5
            )

    (shown,) = re.findall(
        r"first layer starts at (\S+) times the scale of low-rank, and at (\S+) times that of DCL-A2 and summed",
        TEXT,
    )
    for column, text in (("low-rank", shown[0]), ("A2", shown[1]), ("summed", shown[1])):
        agree(text, scale("baseline") / scale(column))


def test_the_rates_at_the_edge_of_the_search():
    found = results("table1-search.json")
    rates = {trial["lr"] for trial in found["trials"]}
    taken = {count: {c: t[count]["lr"] for c, t in found["choice"].items()} for count in "23"}
    assert (min(rates), max(rates)) == (0.02, 0.12)
    assert sum(rate == 0.12 for rate in taken["2"].values()) == 7
    assert len(taken["2"]) == 11
    assert {c: rate for c, rate in taken["3"].items() if rate in (0.02, 0.12)} == {"oracle": 0.12, "A3D": 0.02}
    assert "On two digits seven of the eleven columns took the highest rate that was tried, 0.12; on" in TEXT


def test_the_pairs_of_table_2_that_have_several_seeds():
    cells = {(cell["set"], cell["column"]): cell for cell in results("table2.json")["cells"]}
    pairs = [(cell, cells[data, column[:-4]]) for (data, column), cell in cells.items() if column.endswith("+dcl")]
    apart = [paired(*pair)[0] for pair in pairs if len(pair[0]["errors"]) > 1]
    (shown,) = re.findall(r"doubtful runs \(below\), it is (.*?) \(n = 4\)", TEXT)
    agree(shown, statistics.mean(apart), statistics.stdev(apart) / len(apart) ** 0.5)
    assert (len(pairs), len(apart)) == (6, 4)


def test_a_fitted_and_calibrated_layer_errs_as_the_network_before():
    runs = [r for r in results("fit.csv") if (r["branches"], r["init"]) == ("2", "fit+calibration")]
    apart = [float(r["error_after_convert"]) - float(r["error_before"]) for r in runs]
    interval = stats.t.interval(0.95, len(apart) - 1, statistics.mean(apart), stats.sem(apart))
    text = TEXT
    (shown,) = re.findall(r"right after is (\S+) points from that before \(95 % paired interval (\[.*?\])", text)
    agree(" ".join(shown), statistics.mean(apart), *interval)
    assert max(map(abs, interval)) < 0.05
