"""The stored page of relations as a person meets it: in a browser."""

import pytest
from tests.docs.pages import ROOT

PAGE = ROOT / "results/relations.html"


@pytest.mark.parametrize(("width", "scheme"), [(420, "light"), (1300, "dark")])
def test_the_page_is_quiet_complete_and_no_wider_than_the_window(look, width, scheme):
    seen = look(PAGE, width=width, scheme=scheme)
    seen.page.wait_for_load_state("networkidle")
    assert seen.complaints == []
    assert len(seen.requests) == 1
    assert seen.overflow() <= 0
    figure = seen.page.locator("figure svg:visible")
    assert figure.count() == 1
    # On a narrow screen the figure scrolls in its box: letters of 6.5 points stay readable.
    assert figure.bounding_box()["width"] >= 720
    ids = seen.page.locator("[id]").evaluate_all("all => all.map(one => one.id)")
    assert len(ids) == len(set(ids))


def test_the_answer_is_above_the_figure_and_errors_sort(look):
    seen = look(PAGE)
    lead, figure = seen.page.locator(".lead"), seen.page.locator("figure")
    assert lead.bounding_box()["y"] < figure.bounding_box()["y"] < 400
    table = seen.page.locator("[aria-label='Errors'] table")
    table.locator("thead button").nth(3).click()
    means = [float(text.split(" ")[0]) for text in seen.column(table, 3)]
    assert len(means) == 63
    assert means in (sorted(means), sorted(means, reverse=True))
