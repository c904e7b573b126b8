"""What the pages say of relations, and of the shares of filters, is what the files in results/ hold."""

import html
import itertools
import json
import re
import statistics

import pytest
from scipy import stats
from tests.docs.numbers import README, RESULTS, agree, holm, results, table_under
from tests.docs.pages import ROOT

from torch_dcl.data.relations import TASKS
from torch_dcl.experiments.claims import branches_complement
from torch_dcl.experiments.recipes.relations import RelationsConfig
from torch_dcl.experiments.relation_findings import answer, judge_hypotheses
from torch_dcl.experiments.settings import settings_of
from torch_dcl.report.document import prose
from torch_dcl.report.figures import relations_figure

DATA = results("relations.json")
CELLS = {(cell["task"], cell["images"], cell["column"]): cell for cell in DATA["cells"]}
SIZES = (6_000, 20_000, 60_000)
COLUMNS = ("plain", "narrow", "low-rank", "summed", "A2", "power-0", "power-1")
CONTROLS = ("narrow", "low-rank", "summed")
IN_TABLE = ("A2", *CONTROLS, "plain", "power-0", "power-1")
NAMES = {"number": "number", "order": "order", "sum mod 10": "sum"}
TEXT = " ".join(" ".join(RESULTS).split())
SECTION = TEXT[TEXT.index("## Relations ") : TEXT.index("## Table 2: natural")]


def mean(task, images, column):
    return statistics.mean(CELLS[task, images, column]["errors"])


def corrected(task):
    """The p of every comparison of a task with DCL-A2, after Holm."""
    return holm(
        {
            (images, column): stats.ttest_rel(CELLS[task, images, column]["errors"], ours).pvalue
            for images in SIZES
            for ours in [CELLS[task, images, "A2"]["errors"]]
            for column in COLUMNS
            if column != "A2"
        }
    )


P = {task: corrected(task) for task in NAMES.values()}


def sign(task, images, column):
    """1 where a column errs significantly more than DCL-A2, −1 where significantly less, else 0."""
    if column == "A2" or P[task][images, column] >= 0.05:
        return 0
    return 1 if mean(task, images, column) > mean(task, images, "A2") else -1


def gap(task, images, column):
    return mean(task, images, column) - mean(task, images, "A2")


def verdict(task, images):
    signs = [sign(task, images, column) for column in CONTROLS]
    return "contradicted" if -1 in signs else "supported" if signs == [1, 1, 1] else "open"


def interval(values):
    """Mean and 95 % t-interval."""
    middle, error = statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5
    reach = stats.t.ppf(0.975, len(values) - 1) * error
    return middle, middle - reach, middle + reach


def shown(pattern):
    (found,) = re.findall(pattern, SECTION)
    return found if isinstance(found, str) else " ".join(found)


def test_the_run_is_the_protocol():
    """Every cell, 20 seeds, eight rates with two search seeds, and nothing that departs."""
    rules = settings_of(RelationsConfig)
    assert DATA["told"] == []
    assert set(CELLS) == set(itertools.product(rules["tasks"][0], rules["sizes"][0], rules["models"][0]))
    for cell in CELLS.values():
        assert len(cell["errors"]) == rules["seeds"][0] == 20
        assert sorted(map(float, cell["trials"])) == list(rules["rates"][0])
        assert {len(errors) for errors in cell["trials"].values()} == {rules["search_seeds"][0]}
        by_rate = {rate: statistics.mean(errors) for rate, errors in cell["trials"].items()}
        assert cell["chosen"] == float(min(by_rate, key=by_rate.get))
    # These settings only say how trainings are grouped, where, and when they stop.
    assert all(rules[name][1].machine for name in ("whole", "most", "block", "device", "data"))


def test_weights_of_the_controls():
    for (task, images, column), cell in CELLS.items():
        ours = CELLS[task, images, "A2"]["weights"]
        half_a_filter = (800 + TASKS[task].classes) / 2
        assert abs(cell["weights"] - ours) <= half_a_filter or column == "plain"
    agree(
        shown(r"plain network with its (\S+) % more weights"),
        100 * (CELLS["order", 60_000, "plain"]["weights"] / CELLS["order", 60_000, "A2"]["weights"] - 1),
    )


def test_the_table():
    rows = table_under("| task | images | DCL-A2 | narrow |", RESULTS)
    assert [(row[0], int(row[1].replace(",", ""))) for row in rows] == list(itertools.product(NAMES.values(), SIZES))
    for task, images, *texts in rows:
        count = int(images.replace(",", ""))
        for column, text in zip(IN_TABLE, texts, strict=True):
            cell = CELLS[task, count, column]
            numbers, _, failed = text.partition("†")
            agree(numbers, statistics.mean(cell["errors"]), statistics.stdev(cell["errors"]))
            assert int(failed or 0) == len(cell["failed"])
            assert ("▴" in text) - ("▾" in text) == sign(task, count, column), (task, count, column)
    assert all(len(of_task) == 18 for of_task in P.values())


def test_failed_networks_ended_at_chance():
    failed = [cell["errors"][seed] for cell in CELLS.values() for seed in cell["failed"]]
    assert set(failed) == {90.0}
    assert {task for (task, _, _), cell in CELLS.items() if cell["failed"]} == {"sum"}
    of_column = {column: sum(len(CELLS["sum", n, column]["failed"]) for n in SIZES) for column in COLUMNS}
    assert {column for column, count in of_column.items() if not count} == {"summed", "power-0", "power-1"}
    agree(shown(r"on the sum (\d+ of \d+) DCL-A2 networks failed, (\d+) low-rank"), of_column["A2"], 60,
          of_column["low-rank"])  # fmt: skip
    agree(shown(r"narrow (\d+ of \d+), plain (\d+)\. Two search"), of_column["narrow"], 60, of_column["plain"])
    worst = sorted(CELLS["sum", 6_000, "A2"]["errors"])[-2]
    agree(shown(r"with 6,000 images, ended at (\S+) %"), worst)


def test_the_first_hypothesis():
    judged = {(task, n): verdict(task, n) for task in ("order", "sum") for n in SIZES}
    assert [place for place, word in judged.items() if word == "supported"] == [("order", 60_000)]
    assert "contradicted" not in judged.values()
    agree(shown(r"\*\*Relations:\*\* supported in (\d+ of \d+) settings, contradicted in none, open in (\d+)"), 1, 6, 5)
    gaps = [gap("order", 60_000, column) for column in CONTROLS]
    agree(shown(r"DCL-A2 errs (\S+ to \S+) points less than the three controls"), min(gaps), max(gaps))
    assert [sign("order", 20_000, column) for column in CONTROLS] == [1, 1, 0]
    agree(shown(r"but not than summed \(p = (\S+)\)"), P["order"][20_000, "summed"])
    assert [sign("order", 6_000, column) for column in CONTROLS] == [0, 1, 0]
    assert [sign("sum", 60_000, column) for column in CONTROLS] == [0, 1, 1]
    agree(
        shown(r"with 60,000 images it errs (\S+ and \S+) points less than low-rank"),
        *(gap("sum", 60_000, column) for column in ("low-rank", "summed")),
    )
    agree(
        shown(r"(\d+ of 20) narrow networks failed, and the test against narrow finds nothing \(p = (\S+)\)"),
        len(CELLS["sum", 60_000, "narrow"]["failed"]), 20, P["sum"][60_000, "narrow"],
    )  # fmt: skip
    for images in (6_000, 20_000):
        assert CELLS["sum", images, "A2"]["failed"]
        assert not any(sign("sum", images, column) for column in COLUMNS)


def test_the_second_hypothesis():
    assert [verdict("number", n) for n in SIZES] == ["open", "open", "contradicted"]
    assert [sign("number", 60_000, column) for column in CONTROLS] == [0, -1, -1]
    agree(
        shown(r"low-rank \((\S+) points\) and summed \((\S+)\)\. 3\."),
        *(-gap("number", 60_000, column) for column in ("low-rank", "summed")),
    )


def test_the_third_hypothesis():
    ended = {
        (task, n, start): interval(CELLS[task, n, start]["exponents"])
        for task in ("order", "sum") for n in SIZES for start in ("power-0", "power-1")
    }  # fmt: skip
    from_sum = {key[:2]: value for key, value in ended.items() if key[2] == "power-1"}
    assert [place for place, (_, _, high) in from_sum.items() if high < 1] == [("order", 6_000)]
    above = [middle for middle, low, _ in from_sum.values() if low > 1]
    agree(shown(r"contradicted in (\d+ of \d+) settings\. The exponent"), len(above), 6)
    agree(shown(r"rises to between (\S+ and \S+) instead"), min(above), max(above))
    agree(shown(r"meets the rule, (\S+ \[\S+, \S+\])"), *from_sum["order", 6_000])
    seeds = CELLS["order", 6_000, "power-1"]["exponents"]
    low, high = [p for p in seeds if p < 1], [p for p in seeds if p > 1]
    agree(shown(r"there (\d+ of \d+) seeds end near (\S+) and (\d+) near (\S+):"), len(low), 20, statistics.mean(low),
          len(high), statistics.mean(high))  # fmt: skip
    assert max(low) < -5 < 1.9 < min(high)
    from_product = [middle for (_, _, start), (middle, _, _) in ended.items() if start == "power-0"]
    agree(shown(r"falls to between (\S+ and \S+) in these six"), max(from_product), min(from_product))


def test_what_it_means_for_a_user():
    order = [mean("order", 60_000, column) for column in CONTROLS]
    agree(shown(r"DCL-A2 errs in (\S+) % on order, the controls in (\S+) to (\S+), and"), mean("order", 60_000, "A2"),
          min(order), max(order))  # fmt: skip
    agree(shown(r"more weights in (\S+)\. On"), mean("order", 60_000, "plain"))
    agree(shown(r"On the sum it errs in (\S+) %, low-rank in (\S+) and summed in (\S+)\. -"),
          *(mean("sum", 60_000, column) for column in ("A2", "low-rank", "summed")))  # fmt: skip
    agree(shown(r"DCL-A2 errs (\S+) points less than low-rank on order"), gap("order", 6_000, "low-rank"))
    agree(shown(r"plain network errs (\S+) points less than DCL-A2\."), -gap("order", 6_000, "plain"))
    assert [sign("order", 6_000, column) for column in ("low-rank", "summed", "plain")] == [1, 0, -1]
    numbers = [mean("number", 60_000, column) for column in CONTROLS]
    agree(shown(r"\((\S+) % with 60,000 images, the controls (\S+) to (\S+)\)"), mean("number", 60_000, "A2"),
          min(numbers), max(numbers))  # fmt: skip


def test_how_near_the_rate_of_dcl_is_to_one_that_fails():
    cell = CELLS["sum", 20_000, "A2"]
    rates = sorted(cell["trials"], key=float)
    at = rates.index(f"{cell['chosen']:g}")
    assert min(cell["trials"][rates[at + 1]]) == 90.0
    assert max(cell["trials"][rates[at]]) < 10
    lower, taken = (statistics.mean(cell["trials"][rates[k]]) for k in (at - 1, at))
    agree(
        shown(r"DCL-A2's rate, (\S+), is one step below (\S+), where both .*? at (\S+), the validation error was "
              r"(\S+) instead of (\S+) %"),
        *(float(rates[k]) for k in (at, at + 1, at - 1)), lower, taken,
    )  # fmt: skip


def test_the_power_mean_that_starts_at_the_product():
    gaps = [-gap("order", n, "power-0") for n in SIZES]
    agree(shown(r"\(by (\S+, \S+ and \S+) points\) and on the sum with 60,000 images \((\S+)\)"), *gaps,
          -gap("sum", 60_000, "power-0"))  # fmt: skip
    signs = {(task, n): sign(task, n, "power-0") for task in NAMES.values() for n in SIZES}
    assert {place for place, own in signs.items() if own == -1} == {*(("order", n) for n in SIZES), ("sum", 60_000)}
    assert 1 not in signs.values()
    rows = table_under("| power-0 − power-1 | 6,000 images |", RESULTS)
    assert [NAMES[row[0]] for row in rows] == list(NAMES.values())
    for name, *texts in rows:
        for images, text in zip(SIZES, texts, strict=True):
            pair = (CELLS[NAMES[name], images, start] for start in ("power-0", "power-1"))
            agree(text, *interval([a - b for a, b in zip(*(cell["errors"] for cell in pair), strict=True)]))


def test_medians():
    rows = table_under("| median, sum mod 10 |", RESULTS)
    assert [row[0] for row in rows] == [f"{n:,}" for n in SIZES]
    for images, row in zip(SIZES, rows, strict=True):
        medians = [statistics.median(CELLS["sum", images, column]["errors"]) for column in COLUMNS]
        agree(" ".join(row[1:]), *medians)
        by_column = dict(zip(COLUMNS, medians, strict=True))
        assert by_column["power-0"] < by_column["A2"] < min(by_column[column] for column in CONTROLS)


def test_edges_trainings_and_minutes():
    edges = {key for key, cell in CELLS.items() if cell["at_edge"]}
    assert edges == {("number", 6_000, "plain"), ("order", 6_000, "narrow")}
    searched = sum(len(errors) for cell in CELLS.values() for errors in cell["trials"].values())
    trainings = searched + sum(len(cell["errors"]) for cell in CELLS.values())
    agree(shown(r"(\S+) trainings of (\S+) steps, (\S+) of them to choose"), trainings, DATA["steps"], searched)
    agree(shown(r"validation digits, took (\S+) minutes"), DATA["minutes"])
    reproduce = " ".join((ROOT / "docs/reproduce.md").read_text(encoding="utf-8").split())
    (said,) = re.findall(r"Its (\S+) trainings took (\S+) minutes on one H200", reproduce)
    agree(" ".join(said), trainings, DATA["minutes"])
    assert DATA["environment"]["commit"].startswith("e6cbb4e")
    assert "commit e6cbb4e" in " ".join((ROOT / "docs/protocol.md").read_text(encoding="utf-8").split())


def test_the_rate_of_narrow_lies_between_rates_that_fail():
    cell = CELLS["sum", 20_000, "narrow"]
    half = [float(rate) for rate, errors in cell["trials"].items() if sorted(e >= 89 for e in errors) == [False, True]]
    agree(
        shown(r"Narrow got (\S+) on the sum .*? failed at (\S+, \S+ and \S+); (\d+ of \d+) failed then"),
        cell["chosen"], *half, len(cell["failed"]), 20,
    )  # fmt: skip


def test_what_other_pages_say():
    readme = " ".join(" ".join(README).split())
    gaps = [gap(task, 60_000, "low-rank") for task in ("order", "sum", "number")]
    (said,) = re.findall(
        r"with 60,000 images, DCL errs (\S+) \(order\) and (\S+) points \(sum\) .*? (\S+) more", readme
    )
    agree(" ".join(said), *gaps[:2], -gaps[2])
    (said,) = re.findall(r"it beat all controls in (\d+ of \d+) settings; trainings failed in (\d+)\.", readme)
    places = list(itertools.product(("order", "sum"), SIZES))
    failed = [place for place in places if any(CELLS[(*place, column)]["failed"] for column in COLUMNS)]
    agree(" ".join(said), [verdict(*place) for place in places].count("supported"), len(places), len(failed))
    rows = {row[0]: row[1:] for row in table_under("| experiment | paper | ours |", README)}
    _, ours = rows["Relations of two digits, 60,000 images: DCL-A2 minus low-rank"]
    agree(ours, *(-each for each in gaps), 20)
    assert [sign(task, 60_000, "low-rank") for task in ("order", "sum", "number")] == [1, 1, -1]
    numerics = " ".join((ROOT / "docs/numerics.md").read_text(encoding="utf-8").split())
    (said,) = re.findall(r"60,000 images DCL-A2 errs (\S+) points less on their order and (\S+) less", numerics)
    agree(" ".join(said), *gaps[:2])
    # The table of questions: against low-rank on order with every number of images.
    assert [sign("order", n, "low-rank") for n in SIZES] == [1, 1, 1]


def test_the_stored_page_and_figure_are_those_of_the_present_code():
    """CONTRIBUTING.md has the command that writes the page again."""
    page = html.unescape((ROOT / "results/relations.html").read_text(encoding="utf-8"))
    for sentence in [answer(DATA), *(each.said for each in judge_hypotheses(DATA))]:
        assert prose(sentence) in page
    caption = str(relations_figure(DATA).get_label())
    assert prose(caption) in page
    for name in ("relations", "relations-dark"):
        picture = html.unescape((ROOT / f"docs/images/{name}.svg").read_text(encoding="utf-8"))
        assert caption in " ".join(picture.split())


@pytest.mark.parametrize("page", ["docs/protocol.md", "docs/reproduce.md", "docs/results.md", "README.md"])
def test_no_page_says_that_relations_or_shares_were_not_run(page):
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    for sentence in re.findall(r"[^.]*(?:not been run yet|has no results)[^.]*\.", text):
        assert not re.search("relations|shares|summed", sentence), sentence


def test_signed_rank_tests_tell_what_the_medians_do_not():
    p = {
        (images, column): stats.wilcoxon(
            [a - b for a, b in zip(CELLS["sum", images, column]["errors"], ours, strict=True)]
        ).pvalue
        for images in SIZES
        for ours in [CELLS["sum", images, "A2"]["errors"]]
        for column in CONTROLS
    }
    (said,) = re.findall(
        r"narrow at every size \(p at most (\S+)\), and than low-rank and summed with 60,000 .*? most (\S+)\)", SECTION
    )
    agree(said[0], max(p[images, "narrow"] for images in SIZES))
    agree(said[1], max(p[60_000, column] for column in ("low-rank", "summed")))
    (said,) = re.findall(r"from these two \(p from (\S+) to (\S+)\)", SECTION)
    few = [p[images, column] for images in SIZES[:2] for column in ("low-rank", "summed")]
    agree(" ".join(said), min(few), max(few))


def test_the_shares_of_filters():
    columns = results("figures/shares.json")["columns"]
    percent = {
        kind: {name: [100 * one[kind] for one in runs] for name, runs in columns.items()}
        for kind in ("complementary", "together")
    }
    ours, control = percent["complementary"]["A2"], percent["complementary"]["summed"]
    (said,) = re.findall(r"are summed: (\S+ ± \S+) % of the filters in DCL-A2 and (\S+ ± \S+) % in the control", TEXT)
    agree(" ".join(said), *(value for of in (ours, control) for value in (statistics.mean(of), statistics.stdev(of))))
    (said,) = re.findall(r"The difference, (\S+) points with a 95 % interval of (\[\S+, \S+\]),", TEXT)
    apart = interval([a - b for a, b in zip(ours, control, strict=True)])
    agree(" ".join(said), *apart)
    assert apart[1] < 0 < apart[2]
    (said,) = re.findall(r"are fewer in DCL-A2: (\S+) % against (\S+) %", TEXT)
    agree(" ".join(said), *(statistics.mean(percent["together"][name]) for name in ("A2", "summed")))
    finding = branches_complement(columns)
    assert finding.verdict == "not decidable"
    page = html.unescape((ROOT / "results/table1.html").read_text(encoding="utf-8"))
    assert prose(finding.evidence) in page
    # The parts were run at two commits, and the page names both.
    starts = (ROOT / "results/figures/environment.jsonl").read_text(encoding="utf-8").splitlines()
    commits = dict.fromkeys(json.loads(start)["commit"] for start in starts)
    assert f"<dt>Commits</dt><dd>{', '.join(commits)}</dd>" in page
