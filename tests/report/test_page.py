"""The page: well formed, complete, and alone."""

import re
from html.parser import HTMLParser
from importlib import resources

import pytest

from torch_dcl.experiments.claims import large_banks_help_little
from torch_dcl.experiments.paper_numbers import COLUMNS
from torch_dcl.experiments.table import CONTROLS, Table, parse
from torch_dcl.report import as_html

CSS = resources.files("torch_dcl.report").joinpath("templates/style.css").read_text(encoding="utf-8")

VOID = {"meta", "br", "link", "img"}


class Page(HTMLParser):
    """Checks that every element is closed in turn, and collects what a test may ask for."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.links, self.ids, self.text = [], [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for key, value in attrs:
            if key in ("src", "href", "srcset", "data", "action", "poster", "xlink:href"):
                self.links.append(value)
            if key == "id":
                self.ids.append(value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, _):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += data


@pytest.fixture
def table(content):
    return parse(content)


def test_the_page_is_well_formed_and_asks_for_nothing(table):
    text = as_html(table)
    page = Page(text)
    assert page.links == ["data:,", "#MNIST-II-01", "#MNIST-III-10"]
    assert set(page.ids) == {"MNIST-II-01", "MNIST-III-10"}
    assert not {"img", "iframe", "object"} & set(page.tags)
    assert "http" not in text
    assert "url(" not in text
    assert "@import" not in text


def test_names_are_escaped(table):
    text = as_html(table)
    for raw in ("<made up>", '<b>"', "<fast>", "<i>anew", "a & b"):
        assert raw not in text
    shown = Page(text).text
    for name in ("Table 1 <made up> & small", "epochs <b>", "24 & no more", "one <fast> GPU", "Layouts <i>anew</i>"):
        assert name in shown
    assert "dcl run table1 --out 'a & b'" in shown


def test_both_colour_schemes_have_a_colour_for_everything(table):
    text = as_html(table)
    assert "@media (prefers-color-scheme:dark)" in text
    light, dark = re.findall(r":root\{(.*?)\}", CSS, re.DOTALL)
    names = re.findall(r"--([\w-]+):", light)
    assert set(names) == set(re.findall(r"--([\w-]+):", dark))
    assert set(re.findall(r"var\(--([\w-]+)\)", CSS)) <= set(names)
    for column in (*COLUMNS, *CONTROLS):
        assert f".c-{column}" in CSS


def test_wide_tables_scroll_in_their_own_box(table):
    text = as_html(table)
    assert 'name="viewport"' in text
    parents = re.findall(r'<div class="box"[^>]*><(\w+)', text)
    assert parents.count("table") == text.count("<table")
    assert re.search(r"\.box\{[^}]*overflow-x:auto", CSS)


def test_the_numbers_are_on_the_page(table):
    shown = Page(as_html(table)).text
    assert "1.51 ± 0.12 (3)" in shown
    assert "−0.50 [−0.50, −0.50]▾" in shown
    assert "[1.22, 1.80]" in shown  # 1.51 ± 4.303 · 0.115 / √3
    assert "335,500" in shown
    assert "together 42.5" in shown
    assert "not run" in shown
    assert (
        shown.index("Section 4.1 of the paper, split into 16 claims")
        < shown.index("All errors")
        < shown.index("Protocol")
    )


def test_a_drawing_has_a_point_a_run_and_a_diamond_a_mean_of_the_paper(table):
    text = as_html(table)
    assert text.count("<svg") == 2
    assert text.count("<circle") == len(table.cells) * 3
    assert text.count('class="paper"') == 2 * len(COLUMNS)  # also where nothing was run


def test_a_diverged_run_is_an_arrow_and_does_not_stretch_the_axis(content):
    content["cells"][3].update(stopped=[2], errors=[1.5, 1.6, 99.9])
    text = as_html(parse(content))
    Page(text)
    assert "A3D, seed 2: 99.90" in text
    assert text.count("<circle") == 35
    assert not re.search(r'class="tick"[^>]*>\d\d', text.split('id="MNIST-III-10"')[0])


def test_a_finding_from_other_data_stands_among_the_claims(table):
    finding = large_banks_help_little([(25, [3.0, 3.1]), (100, [2.0, 2.2]), (200, [1.9, 2.1])])
    assert finding.claim not in Page(as_html(table)).text
    assert finding.claim in Page(as_html(table, [finding])).text


def test_a_page_of_one_run_and_of_none(content):
    cell = content["cells"][0]
    cell.update(errors=[2.0], seeds=[4], train_loss=None, test_loss=None, paper=None, paper_std=None)
    page = Page(as_html(parse({"title": "one", "cells": [cell]})))
    assert "2.00 (1)" in page.text
    assert "No cell was run." in Page(as_html(Table("none", ()))).text


def test_every_column_of_a_set_stands_in_its_table_run_or_not(table):
    first = as_html(table).split('id="MNIST-II-01"')[1].split("</section>")[0]
    rows = [re.sub(r"<[^>]*>", "|", row) for row in first.split("<tbody>")[1].split("<tr>")[1:]]
    named = [next(filter(None, row.split("|"))) for row in rows]
    assert named == list(table.columns)
    assert "not run" in rows[named.index("oracle")]
    assert "1.07(04)" in rows[named.index("oracle")]
    assert "fitted" in rows[0]
    assert "fitted" not in rows[named.index("A2")]


def test_minutes_are_shown_where_they_were_noted(content):
    content["cells"][0]["minutes"] = 12.34
    content["cells"][1]["minutes"] = 0.0567
    shown = Page(as_html(parse(content))).text
    assert "475,50012.3" in shown
    assert "335,5000.057" in shown
    content["cells"][1]["minutes"] = -1
    with pytest.raises(ValueError, match="minutes is -1; give a number from 0 or null"):
        parse(content)


def test_minutes_of_a_smoke_run_have_no_exponent(content):
    content["cells"][0]["minutes"] = 6.7e-05
    content["minutes"] = {"training and evaluation": 0.00123}
    shown = Page(as_html(parse(content))).text
    assert "475,500< 0.01" in shown
    assert "training and evaluation < 0.01" in shown
    assert "e-05" not in shown


def test_a_trial_says_so_before_everything_else_and_has_no_command_it_does_not_know(content):
    content["title"] += " (a trial, not the protocol)"
    shown = Page(as_html(parse(content))).text
    assert shown.index("Layouts <i>anew</i>") < shown.index("All errors")
    assert "--sets II-01" not in shown
