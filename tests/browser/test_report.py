"""The report and the demo's page as a person meets them: in a browser."""

import json
import re

import pytest
from tests.halves import slow

from torch_dcl.experiments import load, run, save
from torch_dcl.experiments.paper_numbers import COLUMNS, SETS, TABLE1
from torch_dcl.experiments.recipes.demo import Demo, DemoConfig
from torch_dcl.experiments.recipes.figures import Figures, FiguresConfig
from torch_dcl.experiments.recipes.table1 import Table1, Table1Config
from torch_dcl.experiments.table import Cell, Table
from torch_dcl.report import draw_run, report

TINY = {"epochs": 2, "warmup": 0, "batch": 50, "train_images": 50, "test_images": 50, "data": "excerpt"}


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A run of Table 1 and a run of figures, tiny."""
    place = tmp_path_factory.mktemp("runs")
    asked = {"models": ("baseline", "A2", "low-rank"), "sets": ("MNIST-II-01",), "seeds": 2}
    run(Table1(Table1Config(**asked, **TINY)), place / "table <b>1")
    asked = {"set": "MNIST-II-01", "knowledge_set": "MNIST-II-01", "filters": (10, 25, 50), "seeds": 1}
    run(Figures(FiguresConfig(**asked, **TINY)), place / "figures")
    return [place / "table <b>1", place / "figures"]


@pytest.fixture(scope="session")
def both(runs, tmp_path_factory):
    """The page of both."""
    path = tmp_path_factory.mktemp("pages") / "report.html"
    report(runs, path)
    return path


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The page of a whole table, of numbers that are made up."""
    cells = []
    for i, name in enumerate(SETS):
        for k, column in enumerate((*COLUMNS, "narrow", "low-rank", "summed")):
            paper = TABLE1[name].get(column)
            errors = tuple(1.0 + 0.5 * i + 0.1 * ((3 * k + seed) % 7) for seed in range(5))
            cells.append(
                Cell(name, column, errors, tuple(range(5)), 900_000 - 1000 * k, paper and paper.mean,
                     paper and paper.std, fitted=column == "baseline", minutes=0.5 * k)
            )  # fmt: skip
    path = tmp_path_factory.mktemp("whole") / "table1.json"
    save(Table("Table 1 <i>made up</i>", tuple(cells)), path)
    assert len(load(path).cells) == 165
    report([path], path.with_name("whole.html"), images=False)
    return path.with_name("whole.html")


@pytest.fixture(params=["both", "whole"])
def page(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("scheme", ["light", slow("dark")])
def test_it_is_quiet_and_asks_for_nothing(look, page, scheme):
    seen = look(page, scheme=scheme)
    seen.page.wait_for_load_state("networkidle")
    assert seen.complaints == []
    assert seen.requests == [page.resolve().as_uri()]


@pytest.mark.parametrize("width", [360, slow(768), slow(1280)])
def test_it_does_not_scroll_sideways(look, page, width):
    seen = look(page, width=width)
    assert seen.overflow() <= 0
    seen.page.locator("details").evaluate_all("all => all.forEach(one => { one.open = true; })")
    assert seen.overflow() <= 0


def test_what_is_too_wide_scrolls_in_its_own_box(look, whole):
    seen = look(whole, width=360)
    wider = seen.page.locator(".box").evaluate_all("all => all.filter(one => one.scrollWidth > one.clientWidth).length")
    assert wider >= 16
    first = seen.page.locator(".box").nth(1)
    first.focus()
    seen.page.keyboard.press("ArrowRight")
    seen.page.wait_for_function("document.activeElement.scrollLeft > 0")


def test_the_verdict_comes_first(look, whole):
    seen = look(whole)
    top = seen.page.locator(".lead").bounding_box()
    assert top["y"] + top["height"] < 300
    assert re.search(r"\d+ claims: \d+ holds? here", seen.page.locator(".lead").inner_text())


def test_dark_changes_the_colours_and_the_figures(look, both):
    light, dark = look(both), look(both, scheme="dark")
    assert light.colours("body") != dark.colours("body")
    for seen, shown, hidden in ((light, "light", "dark"), (dark, "dark", "light")):
        figures = seen.page.locator("figure")
        assert figures.count() == 6  # differences, filters, curves, two filters' knowledge, the sheet
        assert seen.page.locator(f"figure .{shown} svg").evaluate_all(
            "all => all.every(one => one.getBBox().width > 50)"
        )
        assert not seen.page.locator(f"figure .{hidden}").first.is_visible()
        assert seen.page.locator(f"figure .{shown}").count() == 5
        assert seen.page.locator("figcaption").evaluate_all("all => all.every(one => one.textContent.length > 40)")


def numbers(texts):
    found = [re.search(r"[-+]?\d[\d,]*(\.\d+)?", text.replace("−", "-")) for text in texts]
    return [float(match[0].replace(",", "")) if match else None for match in found]


def rising(values, *, down=False):
    """Numbers in order, and then those that are none."""
    there = [value for value in values if value is not None]
    assert values == [*sorted(there, reverse=down), *[None] * (len(values) - len(there))]


@pytest.mark.parametrize("index", [1, *map(slow, range(2, 7))])
def test_a_table_sorts_on_click_up_down_and_back(look, both, index):
    seen = look(both)
    table = seen.page.locator(".set table").first
    before = seen.column(table, 0)
    assert before[0].startswith("baseline")
    head = table.locator("thead th").nth(index)
    assert head.get_attribute("aria-sort") is None
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    rising(numbers(seen.column(table, index)))
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    rising(numbers(seen.column(table, index)), down=True)
    head.locator("button").click()
    assert head.get_attribute("aria-sort") is None
    assert seen.column(table, 0) == before


def test_a_table_sorts_by_keyboard_and_one_column_at_a_time(look, whole):
    seen = look(whole)
    table = seen.page.locator("table.all")
    heads = table.locator("thead th")
    heads.nth(1).locator("button").focus()
    seen.page.keyboard.press("Enter")
    assert heads.nth(1).get_attribute("aria-sort") == "ascending"
    seen.page.keyboard.press("Space")
    assert heads.nth(1).get_attribute("aria-sort") == "descending"
    rising(numbers(seen.column(table, 1)), down=True)
    assert seen.column(table, 0)[0] == "III-10"
    seen.page.keyboard.press("Tab")
    seen.page.keyboard.press("Enter")
    assert [heads.nth(i).get_attribute("aria-sort") for i in (1, 2)] == [None, "ascending"]
    heads.nth(0).locator("button").click()
    assert seen.column(table, 0) == [name.removeprefix("MNIST-") for name in SETS]


def test_names_are_shown_and_not_obeyed(look, both, whole):
    assert "table <b>1" in look(both).page.locator(".where").first.inner_text()
    assert look(whole).page.title() == "Table 1 <i>made up</i>"
    assert look(whole).page.locator("h1 i").count() == 0


def test_links_lead_to_places_on_the_page(look, both):
    seen = look(both)
    links = seen.page.locator("a[href^='#']")
    assert links.count() == 3
    ids = seen.page.locator("[id]").evaluate_all("all => all.map(one => one.id)")
    assert len(ids) == len(set(ids))
    assert {
        link.removeprefix("#") for link in links.evaluate_all("all => all.map(a => a.getAttribute('href'))")
    } <= set(ids)


def test_what_was_not_run_and_what_was_fitted_say_so(look, both):
    seen = look(both)
    table = seen.page.locator(".set table").first
    rows = dict(zip(seen.column(table, 0), seen.column(table, 2), strict=True))
    assert rows["oracle"] == "not run"
    assert "baselinefitted" in rows
    assert seen.page.locator("table.all thead th", has_text="baseline").locator(".tag").inner_text() == "fitted"


def test_a_whole_table_fits_a_wide_window_without_scrolling_its_boxes(look, whole):
    seen = look(whole, width=1280)
    wide = seen.page.locator(".set .box:has(table)").evaluate_all(
        "all => all.map(one => one.scrollWidth - one.clientWidth)"
    )
    assert len(wide) == 15
    assert max(wide) <= 0


def test_a_long_command_is_printed_whole(look, both):
    page = look(both, width=700).page
    page.emulate_media(media="print")
    code = page.locator(".set code").first
    code.evaluate("code => code.append(' --set train_images=100'.repeat(20))")
    assert code.evaluate("code => code.getBoundingClientRect().right - document.body.clientWidth") <= 0


def test_the_page_of_a_broken_part_is_refused_with_its_name(runs, tmp_path):
    import shutil

    place = tmp_path / "run"
    shutil.copytree(runs[1], place)
    data = json.loads((place / "knowledge.json").read_text())
    del data["networks"]["A2"]["fused"]
    (place / "knowledge.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"knowledge\.json cannot be drawn.*lack fused"):
        report([place])


def test_the_demo_has_a_page_of_the_same_kind(look, tmp_path):
    run(Demo(DemoConfig(train_images=100, test_images=50, epochs=1, seeds=2)), tmp_path / "demo")
    assert draw_run(tmp_path / "demo") == ["report.html"]
    seen = look(tmp_path / "demo" / "report.html", width=360)
    assert (seen.complaints, len(seen.requests), seen.overflow()) == ([], 1, 0)
    table = seen.page.locator("[aria-label='Errors'] table")
    table.locator("thead button").nth(2).click()
    rising(numbers(seen.column(table, 2)))
