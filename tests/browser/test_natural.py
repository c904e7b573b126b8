"""Table 2 and the deciding chart as a person meets them: in a browser."""

import json

import pytest

from torch_dcl.experiments import NaturalTable, save
from torch_dcl.experiments.natural_data import NOT_AVAILABLE
from torch_dcl.experiments.natural_networks import COLUMNS, paper_error, weights
from torch_dcl.experiments.rival_layers import UNITS, unit_weights
from torch_dcl.experiments.table import Cell
from torch_dcl.report import report


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A whole table without SVHN and a whole chart, of numbers that are made up."""
    place = tmp_path_factory.mktemp("natural")
    cells = tuple(
        Cell(name, column, tuple(8 + 0.3 * ((2 * i + s) % 5) for s in range(3)), (0, 1, 2), weights(column, count),
             paper_error(column, name), minutes=12.5)
        for name, count in (("cifar10", 10), ("cifar100", 100)) for i, column in enumerate(COLUMNS)
    )  # fmt: skip
    table = NaturalTable("Table 2 <i>made up</i>", cells, absent={"svhn": NOT_AVAILABLE}, scale=0.5)
    save(table, place / "table2.json")
    points = [
        {"unit": unit, "share": 0.25, "weights": unit_weights(unit, 10), "step_ms": 1 + i / 9, "lr": 0.01,
         "errors": [8 + i / 5, 8.1, 8.2], "seeds": [0, 1, 2], "trials": {"0.01": 9.0}, "what": what}
        for i, (unit, what) in enumerate(UNITS.items())
    ]  # fmt: skip
    chart = {"set": "cifar10", "title": "A chart", "points": points, "told": [], "search_scale": 0.2, "recipe": "all"}
    run = place / "chart"
    run.mkdir()
    asked = {"chart": "deciding", "points": [[unit, 0.25] for unit in UNITS], "rates": [0.01], "seeds": 3}
    (run / "recipe.json").write_text(json.dumps(asked))
    (run / "chart.json").write_text(json.dumps(chart))
    report([place / "table2.json", run], place / "page.html")
    return place / "page.html"


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (1280, "dark")])
def test_the_page_is_quiet_complete_and_no_wider_than_the_window(look, page, width, scheme):
    seen = look(page, width=width, scheme=scheme)
    seen.page.wait_for_load_state("networkidle")
    assert seen.complaints == []
    assert len(seen.requests) == 1
    assert seen.overflow() <= 0
    assert seen.page.locator("figure svg:visible").count() == 1
    names = seen.page.locator("figure svg:visible text").all_text_contents()
    assert {"plain", "DCL", "DCL 3S", "narrowed", "low-rank", "summed", "gated (GLU)", "bilinear"} <= set(names)
    ids = seen.page.locator("[id]").evaluate_all("all => all.map(one => one.id)")
    assert len(ids) == len(set(ids))


def test_a_table_sorts_by_our_error_and_a_set_without_data_says_so(look, page):
    seen = look(page)
    table = seen.page.locator("[aria-label='CIFAR-10'] table")
    assert seen.column(table, 0) == list(COLUMNS)
    table.locator("thead button").nth(2).click()
    means = [float(text.split(" ")[0]) for text in seen.column(table, 2)]
    assert means == sorted(means)
    assert set(seen.column(seen.page.locator("[aria-label='SVHN'] table"), 2)) == {NOT_AVAILABLE}
    assert seen.page.locator("h3 .tag").all_text_contents() == ["shortened", "shortened"]
    wide = seen.page.locator(".box:has(table)").evaluate_all("all => all.map(one => one.scrollWidth - one.clientWidth)")
    assert max(wide) <= 0
