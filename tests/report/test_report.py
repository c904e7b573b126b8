"""Runs on one page: what stands there, and in which order."""

import json
import re

import pytest

from torch_dcl.experiments import read_run, save
from torch_dcl.experiments.claims import further_findings, loss_gap_shrinks, more_filters_help
from torch_dcl.experiments.paper_numbers import TABLE1
from torch_dcl.experiments.stats import Losses, paired
from torch_dcl.experiments.table import parse
from torch_dcl.fleet.run_folder import RunFolder
from torch_dcl.report import report
from torch_dcl.report.tables import differences

POINTS = [{"filters": n, "errors": [100 / n, 101 / n], "weights": 1000 * n} for n in (10, 50, 100)]
FILTERS = {"set": "MNIST-III-10", "baseline": {"errors": [1.5, 1.6]}, "points": POINTS}
TRIED = {
    "set": "MNIST-III-10",
    "columns": [
        {"column": "A4S", "errors": [1.0, 2.0], "weights": 123456, "all_fire": 0.123, "one_fires": 0.456},
        {"column": "AB2", "errors": [3.0], "weights": 99, "all_fire": 0.5, "one_fires": 0.75},
    ],
}


def losses(train, test):
    return {"train_loss": [[2.0, train]], "test_loss": [[2.0, test]]}


CURVES = {
    "set": "MNIST-III-10",
    "series": {"baseline": losses(0.1, 0.4), "A2": losses(0.1, 0.3), "A3S": losses(0.2, 0.3), "A3D": losses(0, 0.2)},
}


@pytest.fixture
def figures(tmp_path):
    """A run of figures that is not finished."""
    recipe = {"recipe": "figures", "digits": "MNIST <all>", "parts": ["filters", "curves", "tried"]}
    path = tmp_path / "figures"
    with RunFolder.open(path, recipe) as folder:
        for name, data in (("filters", FILTERS), ("curves", CURVES), ("tried", TRIED)):
            (path / f"{name}.json").write_text(json.dumps(data))
            folder.append("parts", {"part": name, "minutes": 1.0})
    return path


@pytest.fixture
def table(content, tmp_path):
    path = tmp_path / "table1.json"
    save(parse(content), path)
    return path


def text_of(page):
    return " ".join(re.sub(r"<(style|script).*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL).split())


def test_a_run_of_figures_has_its_figures_its_claims_and_its_machine(figures):
    page = report([figures])
    shown = text_of(page)
    assert all(f'id="run1-{name}-{kind}-' in page for name in ("filters", "curves") for kind in ("light", "dark"))
    assert "A4S 1.50 ± 0.71 (2) 123,456 46 % 12.3 %" in shown
    assert "AB2 3.00 (1) 99 75 % 50.0 %" in shown
    assert "What filters and their branches respond to: not run." in shown
    assert "The accuracy goes up with the number of filters" in shown
    assert "MNIST &lt;all&gt;" in page
    assert shown.index("Claims") < shown.index("Environment")


def test_the_claims_are_those_of_the_numbers(figures):
    found = further_findings(read_run(figures).parts)
    points = [(point["filters"], point["errors"]) for point in POINTS]
    gaps = {name: Losses([s["train_loss"][0][-1]], [s["test_loss"][0][-1]]) for name, s in CURVES["series"].items()}
    assert found[0] == more_filters_help(points)
    assert found[-1] == loss_gap_shrinks(gaps)
    assert [finding.verdict for finding in found] == ["holds", "holds", "holds"]


def test_what_one_run_has_is_not_missing_on_the_page_of_two(figures, table):
    alone, both = text_of(report([table], images=False)), text_of(report([table, figures], images=False))
    assert "Accuracy against filters of a branch: not run." in alone
    assert "dcl run figures --set parts=filters" in alone
    assert "Accuracy against filters of a branch: not run." not in both
    assert both.startswith("Report of 2 runs Report of 2 runs")
    assert "filters, curves, tried; 3 of 3 claims hold." in both


def test_differences_are_paired_by_seed_and_stand_beside_the_papers(content):
    made = parse(content)
    found = {(cell["set"], cell["column"]): cell for cell in differences(made)}
    assert {column for _, column in found} == {"A2", "A3S", "A3D", "B2"}
    ours, base = (made.cell("MNIST-III-10", column).errors for column in ("B2", "baseline"))
    pair = paired(ours, base)
    cell = found["MNIST-III-10", "B2"]
    assert (cell["difference"], cell["low"], cell["high"]) == (pair.mean, pair.low, pair.high)
    row = TABLE1["MNIST-III-10"]
    assert cell["paper_difference"] == row["B2"].mean - row["baseline"].mean


def test_the_page_is_written_all_or_nothing(table, tmp_path):
    out = tmp_path / "page.html"
    assert report([table], out, images=False) == out.read_text()
    with pytest.raises(OSError, match="nowhere"):
        report([table], tmp_path / "nowhere" / "page.html", images=False)


def test_a_table_by_itself_names_its_machine_and_its_commands(table):
    shown = text_of(report([table], images=False))
    assert "one &lt;fast&gt; GPU" in shown
    assert "dcl run table1 --sets II-01 --models baseline,A2,A3S,A3D,B2,low-rank --seeds 3" in shown
    assert "To run it again" in shown


def test_a_recipe_without_a_page_of_its_own_shows_what_the_terminal_did(tmp_path):
    recipe = {"recipe": "table1-search", "total": 0, "unit": "entries", "digits": "MNIST <all>"}
    with RunFolder.open(tmp_path / "run", recipe):
        (tmp_path / "run" / "result.txt").write_text("model  2 digits\nA2 <b>  0.02\n")
    page = report([tmp_path / "run"])
    assert "<h1>Run of table1-search</h1>" in page
    assert "model  2 digits\nA2 &lt;b&gt;  0.02" in page
    assert "not run" not in page
    assert "</a>: table1-search, 0 of 0 entries.</li>" in report([tmp_path / "run", tmp_path / "run"])
    (tmp_path / "run" / "result.txt").unlink()
    with pytest.raises(ValueError, match="has no results yet"):
        report([tmp_path / "run"])


def test_a_run_without_results_says_how_to_go_on(tmp_path):
    running = pytest.raises(ValueError, match="has no results yet; it is running, wait for it")
    with RunFolder.open(tmp_path / "run", {"recipe": "figures", "parts": ["filters"]}), running:
        report([tmp_path / "run"])
    with pytest.raises(ValueError, match=r"has no results yet; resume it with dcl run .*run --resume"):
        report([tmp_path / "run"])
    with pytest.raises(ValueError, match="at least one run"):
        report([])


def test_a_run_that_diverged_is_said_to_be_left_out(figures):
    spoilt = {**CURVES, "series": {**CURVES["series"], "A2": losses(None, 0.3)}}
    (figures / "curves.json").write_text(json.dumps(spoilt))
    shown = text_of(report([figures]))
    assert "1 run diverged and cannot be drawn." in shown
    assert "over-fitting" not in shown
