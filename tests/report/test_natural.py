"""Table 2 and the deciding chart on a page, and as a picture."""

import dataclasses
import itertools
import json
import re
from statistics import fmean, stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_dcl.experiments import NaturalTable, join_table2, read_run
from torch_dcl.experiments import save as save_table
from torch_dcl.experiments.natural_data import NOT_AVAILABLE
from torch_dcl.experiments.natural_networks import COLUMNS, paper_error, weights
from torch_dcl.experiments.paper_numbers import TABLE2
from torch_dcl.experiments.recipes.chart import chart_verdict, rates_at_edge
from torch_dcl.experiments.recipes.table2 import verdict
from torch_dcl.experiments.rival_layers import UNITS
from torch_dcl.experiments.stats import signed
from torch_dcl.experiments.table import Cell, TableError
from torch_dcl.report import as_html, report
from torch_dcl.report.document import render
from torch_dcl.report.figures import chart_figure, save, svg
from torch_dcl.report.tables import chart_context


def cell(name, column, errors, **changes):
    classes = 100 if name == "cifar100" else 10
    return Cell(name, column, tuple(errors), tuple(range(len(errors))), weights(column, classes),
                paper_error(column, name), minutes=2.5, **changes)  # fmt: skip


@pytest.fixture
def table():
    """BigNet clearly better with DCL, the LeNet variant clearly worse, one seed of WRN, and no SVHN."""
    cells = (
        cell("cifar10", "lenet", [14.0, 14.2, 14.1]), cell("cifar10", "lenet+dcl", [15.0, 15.2, 15.1]),
        cell("cifar10", "bignet", [7.9, 8.1, 8.0], train_loss=(0.05, 0.06, 0.055), test_loss=(0.3, 0.3, 0.36)),
        cell("cifar10", "bignet+dcl", [7.4, 7.61, 7.5]),
        cell("cifar10", "bignet+dcl3s", [7.5, 8.3, 7.9]),
        cell("cifar10", "wrn", [5.5]), cell("cifar10", "wrn+dcl", [5.25]),
    )  # fmt: skip
    return NaturalTable("Table 2: natural images", cells, absent={"svhn": NOT_AVAILABLE})


def chart_table(chart):
    """The part of a page that shows a chart."""
    nothing = {"drawn": [], "lost": 0, "differences": None, "table": None, "text": None, "tried": None, "missing": []}
    return str(render("figures.html", chart=chart_context(chart, "run"), **nothing))


def rows_of(page, label):
    """The cells of a table, by the head of its row."""
    (inner,) = re.findall(rf'aria-label="{label}".*?<tbody>(.*?)</tbody>', page, re.S)
    inner = re.sub(r"<small>.*?</small>", "", inner)
    plain = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S) for row in inner.split("</tr>")[:-1]]
    return {re.sub("<.*?>", "", row[0]): [re.sub("<.*?>", "", entry) for entry in row[1:]] for row in plain}


def test_a_row_has_paper_ours_difference_losses_weights_and_minutes(table):
    rows = rows_of(as_html(table), "CIFAR-10")
    assert list(rows) == [c.column for c in table.cells]
    assert rows["bignet"] == ["7.88", "8.00 ± 0.10 (3)", "", "", "0.055 · 0.320", "5,742,272", "2.5"]
    theirs, ours, gap, paper_gap, losses, count, minutes = rows["bignet+dcl"]
    assert losses == "– · –"  # of a table without them
    assert (theirs, ours, count, minutes) == ("7.46", "7.50 ± 0.11 (3)", "5,086,912", "2.5")
    assert gap.startswith("−0.50 [−0.5")
    assert gap.endswith("▾")
    assert paper_gap == "−0.42"
    assert rows["lenet+dcl"][2].endswith("▴")
    assert rows["bignet+dcl3s"][0] == "–"
    assert rows["wrn+dcl"][1:3] == ["5.25 (1)", "−0.25"]  # of one seed there is no interval


def test_a_set_without_data_says_so_beside_the_paper_s_number(table):
    rows = rows_of(as_html(table), "SVHN")
    assert {row[1] for row in rows.values()} == {NOT_AVAILABLE}
    assert rows["bignet+dcl"][0] == "2.03"


def test_the_eight_rows_that_the_paper_quotes_are_there(table):
    rows = rows_of(as_html(table), "Literature")
    quoted = [row for row in TABLE2 if row.reference]
    assert len(rows) == len(quoted) == 8
    for row in quoted:
        shown = rows[f"{row.name} {row.reference.split('_')[1]}"]
        assert shown == [f"{row.errors[name]:.2f}" for name in ("CIFAR10", "CIFAR100", "SVHN")]


def test_what_was_won_and_lost_is_told_alike(table):
    told = verdict(table)
    pairs = [(cell, table.cell(cell.set, cell.column[:-4])) for cell in table.cells if cell.column.endswith("+dcl")]
    gaps = [fmean(cell.errors) - fmean(plain.errors) for cell, plain in pairs]
    papers = [cell.paper - plain.paper for cell, plain in pairs]
    mean, error = fmean(gaps), stdev(gaps) / len(gaps) ** 0.5
    assert told[0] == (
        f"DCL (two branches) minus plain: {signed(mean)} ± {error:.2f} points over 3 pairs of network and set, 1 of "
        f"them with one seed (mean ± the standard error over the pairs), lower in 2; in the paper "
        f"{signed(fmean(papers))}, lower in 3."
    )
    assert re.match(r"Three stochastic branches minus plain: −[\d.]+ points over 1 pair of network and set", told[1])
    assert "svhn: not run: data not available." in told


def test_a_deviation_in_the_words_of_an_earlier_version_is_no_departure(table):
    """It stands among the deviations, and not among what makes a table a trial."""
    page = as_html(dataclasses.replace(table, deviations=("WRN: as it was once said.",)))
    assert page.count("WRN: as it was once said.") == 1
    assert page.index("WRN: as it was once said.") > page.index("Deviations")


def test_a_shortened_table_is_marked(table):
    short = as_html(dataclasses.replace(table, scale=0.1))
    assert "Shortened: every recipe was trained for 0.1 of its epochs." in short
    assert short.count(">shortened</small>") == 1  # of the set that was run
    assert "hortened" not in as_html(table)


def test_a_file_by_itself_has_a_page_and_is_told_from_table_1(table, tmp_path):
    save_table(table, tmp_path / "any.json")
    run = read_run(tmp_path / "any.json")
    assert (run.state.recipe, run.table) == ("table2", table)
    page = report([tmp_path / "any.json"])
    assert "Table 2: natural images" in page
    assert "<h2>The sets</h2>" not in page  # the contact sheet is of digits


def part(table, network, **changes):
    """What a run of one network alone would have left."""
    cells = tuple(cell for cell in table.cells if cell.column.startswith(network))
    return dataclasses.replace(
        table, cells=cells, protocol={"precision": "bfloat16", f"{network} on cifar10": "its recipe"},
        hardware="one GPU", minutes={"training": 2.0}, command=f"dcl run table2 --networks {network}", **changes,
    )  # fmt: skip


def test_parts_that_were_run_apart_are_the_same_table_together(table):
    parts = [part(table, network) for network in ("wrn", "lenet", "bignet")]
    whole = join_table2(parts)
    assert whole.cells == table.cells
    assert whole.absent == table.absent
    assert verdict(whole) == verdict(table)
    assert whole.minutes == {"training": 6.0}
    assert whole.hardware == "one GPU"
    assert set(whole.protocol) == {"precision", "lenet on cifar10", "bignet on cifar10", "wrn on cifar10"}
    assert whole.command.count("dcl run") == 3
    assert join_table2([table]) == table


def test_a_set_that_one_part_has_is_not_absent(table):
    other = part(table, "lenet", absent={"cifar100": NOT_AVAILABLE, "svhn": NOT_AVAILABLE})
    more = dataclasses.replace(other, cells=(cell("cifar100", "lenet", [44.0]),), absent={"cifar10": NOT_AVAILABLE})
    whole = join_table2([other, more])
    assert whole.absent == {"svhn": NOT_AVAILABLE}
    assert whole.sets == ("cifar10", "cifar100", "svhn")


def test_parts_that_overlap_or_were_shortened_differently_are_not_joined(table):
    with pytest.raises(TableError, match=r"two of the tables have lenet on cifar10; run all its seeds in one"):
        join_table2([part(table, "lenet"), part(table, "lenet")])
    with pytest.raises(TableError, match="not run alike"):
        join_table2([part(table, "lenet"), part(table, "wrn", title="Table 2, shortened", scale=0.5)])


def test_the_report_shows_parts_as_one_table_and_others_one_by_one(table, tmp_path):
    files = [tmp_path / "lenet.json", tmp_path / "wrn.json", tmp_path / "again.json"]
    for file, network in zip(files, ("lenet", "wrn", "wrn"), strict=True):
        save_table(part(table, network), file)
    page = report(files[:2])
    assert list(rows_of(page, "CIFAR-10")) == ["lenet", "lenet+dcl", "wrn", "wrn+dcl"]
    assert "Report of" not in page
    assert "Report of 3 runs" in report(files)


def test_a_table_without_a_cell_can_be_shown():
    page = as_html(NaturalTable("nothing yet", (), absent={"svhn": NOT_AVAILABLE}))
    assert list(rows_of(page, "SVHN")) == [c for c in COLUMNS if paper_error(c, "svhn") is not None]


# The chart


def point(unit, errors, **changes):
    made = {"unit": unit, "share": 0.25, "weights": 5_086_912, "step_ms": 1.5, "errors": errors, "lr": 0.01,
            "seeds": list(range(len(errors))), "trials": {"0.01": 9.0, "0.03": 8.5}, "what": UNITS[unit]}  # fmt: skip
    return {**made, **changes}


@pytest.fixture
def chart():
    points = [
        point("plain", [8.0, 8.1, 8.2], weights=5_742_272), point("low-rank", [8.5, 8.6, 8.72]),
        point("dcl", [7.9, 8.0, 8.11]), point("star", [7.2, 7.3, 7.42], step_ms=1.4),
    ]  # fmt: skip
    return {"set": "cifar10", "title": "a chart", "points": points, "told": ["Shortened."], "search_scale": 0.2,
            "recipe": "200 epochs"}  # fmt: skip


def test_the_chart_says_what_dcl_wins_and_loses(chart):
    assert chart_verdict(chart) == (
        "The lowest error is that of star: 7.31 % (n = 3). "
        "The plain layer's error minus DCL's is +0.10 [+0.08, +0.11]. "
        "Of 2 comparisons with a layer of the same budget on the same seeds, DCL with two branches errs less in 1 "
        "and more in 1 (paired t-tests, Holm, 5 %)."
    )


def test_who_did_not_learn_is_verdict(chart):
    assert "learn" not in chart_verdict(chart)
    chart["points"] += [point("bilinear", [90.0, 90.0, 89.9]), point("glu", [88.0, 88.0, 88.0])]
    told = chart_verdict(chart)
    assert told.endswith("Did not learn, err as often as guessing does (90 %), and are not counted: bilinear.")
    assert "Of 3 comparisons" in told  # no win over a layer that did not learn
    assert "errs less in 2 and" in told
    chart["set"] = "cifar100"
    told = chart_verdict(chart)
    assert "learn" not in told
    assert "Of 4 comparisons" in told


def test_a_layer_that_did_not_learn_is_called_failed_and_not_compared(chart):
    chart["points"] += [point("bilinear", [90.0, 90.0, 90.0])]
    assert rows_of(chart_table(chart), "Points of the chart")["bilinear"][1:4] == ["90.00 ± 0.00 (3) failed", "", ""]


def test_where_dcl_did_not_learn_nothing_is_compared_with_it(chart):
    chart["points"][2].update(errors=[90.0, 90.0, 90.0])
    assert "comparisons" not in chart_verdict(chart)
    assert "minus DCL" not in chart_verdict(chart)


def test_signs_and_sentence_go_by_the_corrected_tests(chart):
    """By itself an interval without 0; among several comparisons no difference."""
    chart["points"] = [point("dcl", [8.0, 8.1, 8.2]), point("star", [8.3, 8.5, 8.8])]
    assert rows_of(chart_table(chart), "Points of the chart")["star"][1:4] == [
        "8.53 ± 0.25 (3)", "+0.43 [+0.05, +0.81]▴", "0.039",
    ]  # fmt: skip
    chart["points"] += [point("glu", [8.0, 8.3, 8.1])]
    assert rows_of(chart_table(chart), "Points of the chart")["star"][2:4] == ["+0.43 [+0.05, +0.81]", "0.078"]
    assert "errs less in 0 and more in 0" in chart_verdict(chart)


def test_one_seed_is_compared_with_nothing(chart):
    for each in chart["points"]:
        each.update(errors=each["errors"][:1], seeds=[0])
    assert chart_verdict(chart) == "The lowest error is that of star: 7.20 % (n = 1)."
    assert [row[2] for row in rows_of(chart_table(chart), "Points of the chart").values()] == [""] * 4


def test_the_chart_s_table_has_every_point_the_lowest_first(chart):
    page = chart_table(chart)
    rows = rows_of(page, "Points of the chart")
    assert list(rows) == ["star", "dcl", "plain", "low-rank"]
    assert rows["dcl"] == ["0.25", "8.00 ± 0.11 (3)", "", "", "5,086,912", "1.50", "0.01"]
    assert rows["low-rank"][2] == "+0.60 [+0.59, +0.62]▴"
    assert rows["star"][2] == "−0.70 [−0.71, −0.68]▾"
    assert rows["plain"][0] == "–"
    assert rows_of(page, "Learning rates")["dcl"] == ["0.25", "9.00", "8.50"]
    assert page.count("<b>9.00</b>") == 4


def test_a_layer_is_compared_with_dcl_at_its_own_budget(chart):
    chart["points"] += [point("dcl", [9.0, 9.1, 9.2], share=0.125), point("star", [9.0, 9.1, 9.2], share=0.125)]
    told = chart_verdict(chart)
    assert "minus DCL's is +0.10 [+0.08, +0.11]" in told  # the plain layer has no budget: the first
    assert "Of 3 comparisons" in told
    assert "errs less in 1 and more in 1" in told


def test_who_took_the_first_or_the_last_rate_is_verdict(chart):
    for each, rate in zip(chart["points"], (0.01, 0.03, 0.03, 0.01), strict=True):
        each.update(lr=rate, trials={"0.003": 9.0, "0.01": 8.0, "0.03": 8.5})
    told = "Chosen at the end of the learning rates that were tried: 0.03 for low-rank, dcl."
    assert (rates_at_edge(chart) or "").startswith(told)
    assert told in chart_table(chart)
    for each in chart["points"]:
        each["lr"] = 0.01
    assert rates_at_edge(chart) is None
    for each in chart["points"]:
        each["trials"] = {"0.01": 8.0}  # there was no choice
    assert rates_at_edge(chart) is None


def test_two_panels_have_a_mark_for_every_unit_and_the_same_heights(chart):
    figure = chart_figure(chart)
    left, right = figure.axes
    assert left.get_ylim() == right.get_ylim()
    for axes, name in ((left, "weights"), (right, "time")):
        marks = {line.get_gid(): line for line in axes.lines if line.get_gid()}
        assert set(marks) == {f"{name}-{unit}" for unit in ("plain", "low-rank", "dcl", "star")}
        assert float(marks[f"{name}-star"].get_ydata()[0]) == pytest.approx(7.3067, abs=1e-3)
        assert {text.get_text() for text in axes.texts} == {"plain", "low-rank", "DCL", "no root (star)"}
    times = [line.get_xdata()[0] for line in right.lines if line.get_gid() == "time-star"]
    assert times == [1.4]
    assert [tick.get_text() for tick in left.get_xticklabels()] == ["5.09", "5.74"]
    places = {line.get_gid(): line.get_xdata()[0] for line in left.lines if line.get_gid()}
    assert places["weights-star"] < places["weights-dcl"] < places["weights-low-rank"] < places["weights-plain"]
    assert "3 seeds" in figure.get_label()
    assert figure.get_label().endswith("Shortened.")


@settings(max_examples=15)
@given(st.lists(st.floats(0.5, 99), min_size=9, max_size=9), st.integers(1, 3), st.booleans())
def test_names_never_overlap_and_stay_inside(means, seeds, dark):
    points = [
        point(unit, [mean + 0.1 * k for k in range(seeds)], weights=5_086_912 + 655_360 * (unit == "plain"))
        for unit, mean in zip(UNITS, means, strict=True)
    ]
    chart = {"set": "cifar100", "points": points}
    figure = chart_figure(chart, dark=dark)
    figure.draw_without_rendering()
    whole = figure.bbox
    for axes in figure.axes:
        boxes = sorted((text.get_window_extent() for text in axes.texts), key=lambda box: box.y0)
        assert len(boxes) == 9
        assert all(a.y0 + 0.9 * a.height <= b.y0 + 1 for a, b in itertools.pairwise(boxes))
        assert all(whole.x0 <= box.x0 and box.x1 <= whole.x1 and box.y0 >= whole.y0 for box in boxes)


def test_what_is_far_off_the_others_stands_at_the_edge_with_its_error(chart):
    limits = chart_figure(chart).axes[0].get_ylim()
    chart["points"] += [point("bilinear", [99.0, 99.0, 98.6])]
    figure = chart_figure(chart)
    for axes in figure.axes:
        assert axes.get_ylim() == limits
        assert "bilinear 99 ↑" in {text.get_text() for text in axes.texts}
        (mark,) = (line for line in axes.lines if str(line.get_gid()).endswith("-bilinear"))
        assert list(mark.get_ydata()) == [limits[1]]
        assert not mark.get_clip_on()
    assert "at the upper edge, with its error. Shortened." in figure.get_label()


def test_several_budgets_are_joined_and_named_once(chart):
    chart["points"] += [point("dcl", [8.4, 8.5, 8.6], share=0.125, weights=4_200_000, step_ms=1.2)]
    left = chart_figure(chart).axes[0]
    assert [text.get_text() for text in left.texts].count("DCL") == 1
    assert [tick.get_text() for tick in left.get_xticklabels()] == ["4.20", "5.09", "5.74"]
    assert any(len(line.get_xdata()) == 2 and line.get_linestyle() == "-" for line in left.lines)


def test_the_picture_is_the_same_every_time_and_text_stays_text(chart, tmp_path):
    for name in ("a", "b"):
        save(chart_figure(chart), tmp_path / f"{name}.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    light, dark = (svg(chart_figure(chart, dark=each)) for each in (False, True))
    assert "no root (star)</text>" in light
    assert "#0072b2" in light
    assert "#56b4e9" in dark


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"errors": []}, r"errors is \[\]; give at least one number"),
        ({"errors": [120.0]}, "from 0 to 100"),
        ({"errors": [float("nan")]}, r"errors is \[nan\]; give"),
        ({"step_ms": 0.0}, "step_ms is 0.0; give a number above 0"),
        ({"weights": None}, "weights is None; give a number above 0"),
    ],
)
def test_a_chart_that_cannot_be_drawn_is_refused(chart, change, told):
    chart["points"][0] |= change
    with pytest.raises(ValueError, match=told):
        chart_figure(chart)


def test_a_damaged_chart_is_named(chart, tmp_path):
    (tmp_path / "recipe.json").write_text(json.dumps({"chart": "deciding", "points": [["dcl", 0.25]], "rates": [1],
                                                      "seeds": 1}))  # fmt: skip
    del chart["points"][0]["errors"]
    (tmp_path / "chart.json").write_text(json.dumps(chart))
    with pytest.raises(ValueError, match=r"chart\.json cannot be drawn"):
        report([tmp_path])
