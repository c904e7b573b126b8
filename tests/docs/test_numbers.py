"""The figures of README and the page of results are those of the files in results/, as far as they are rounded."""

import html
import json
import re
import statistics

import pytest
from scipy import stats
from tests.docs.numbers import README, RESULTS, agree, holm, paired, results, table_under
from tests.docs.pages import ROOT

from torch_dcl import convert_, models
from torch_dcl.experiments import load
from torch_dcl.experiments.recipes import table1, table2
from torch_dcl.experiments.recipes.chart import chart_verdict
from torch_dcl.experiments.stats import Effect
from torch_dcl.report.document import prose


def test_the_recovery_of_a_whole_network():
    runs = results("recover.csv")

    def errors(column="error", **cell):
        return [float(r[column]) for r in runs if all(r[name] == value for name, value in cell.items())]

    rows = table_under("| all units become |", RESULTS)
    assert [row[0] for row in rows] == ["DCL", "low-rank"]
    for (_, after, *cells), layer in zip(rows, ("dcl", "low-rank"), strict=True):
        same = {"layer": layer, "images": "1000", "method": "recover"}
        agree(
            after,
            statistics.mean(errors("error_converted", **same)),
            statistics.stdev(errors("error_converted", **same)),
        )
        kinds = [(images, method) for images in ("1000", "5000", "45000") for method in ("recover", "labels")]
        for cell, (images, method) in zip(cells, kinds, strict=True):
            found = errors(layer=layer, images=images, method=method)
            assert len(found) == 3
            agree(cell, statistics.mean(found), statistics.stdev(found))


def test_the_scale_of_the_start():
    """The lowest mean error over rates without a failed seed, the paired differences, and the rates that train."""
    runs = results("start.csv")
    places = {"LeNet, three digits": "digits", "LeNet, CIFAR-100": "lenet"}

    def errors(place, unit, start):
        of = [r for r in runs if (r["place"], r["unit"], r["start"]) == (place, unit, start)]
        by_rate = {}
        for r in of:
            by_rate.setdefault(r["rate"], []).append(None if r["stopped"] else float(r["error"]))
        by_rate = {rate: found for rate, found in by_rate.items() if None not in found}
        lowest = min(statistics.mean(found) for found in by_rate.values())
        return min(by_rate.values(), key=statistics.mean), by_rate, lowest

    rows = table_under("| error %, validation images |", (ROOT / "docs" / "numerics.md").read_text().splitlines())
    assert len(rows) == 4
    for name, torch, *cells in rows:
        place, unit = places[name.rpartition(", ")[0]], name.rpartition(", ")[2].lower()
        columns = {(r["unit"], r["start"]) for r in runs if r["place"] == place}
        chance = float(next(r["chance"] for r in runs if r["place"] == place))
        bound = (min(errors(place, *column)[2] for column in columns) + chance) / 2
        theirs, _, _ = errors(place, unit, "torch")
        agree(torch, statistics.mean(theirs))
        for start, (error, apart, count) in zip(
            ("torch", "weights", "data"), ((torch, None, cells[0]), cells[1:4], cells[4:]), strict=True
        ):
            ours, by_rate, _ = errors(place, unit, start)
            agree(error, statistics.mean(ours))
            agree(count, sum(statistics.mean(found) <= bound for found in by_rate.values()))
            if apart is not None:
                gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
                agree(apart, statistics.mean(gaps), statistics.stdev(gaps) / len(gaps) ** 0.5)


def test_the_start_from_trained_weights():
    runs = results("fit.csv")
    kinds = {
        "unchanged": ("0", "unchanged"), "low-rank 200, fitted and calibrated": ("1", "fit+calibration", "200"),
        "low-rank 300, fitted and calibrated": ("1", "fit+calibration", "300"),
    }  # fmt: skip
    for branches in "23":
        own = f"DCL {branches} × 100"
        kinds |= {
            f'{own}, `init="random"`': (branches, "random"), f'{own}, `init="fit"`': (branches, "fit"),
            f'{own}, `init="fit"`, `calibration`': (branches, "fit+calibration"),
        }  # fmt: skip
    rows = table_under("| `fc1` becomes | weights", RESULTS)
    assert {row[0] for row in rows} == set(kinds)
    for name, weights, *errors in rows:
        branches, init, *width = kinds[name]
        of = [
            r for r in runs if (r["branches"], r["init"]) == (branches, init) and r["width"] in (width or [r["width"]])
        ]
        assert len(of) == 5, name
        agree(weights, int(of[0]["weights"]))
        for text, column in zip(errors, ("error_before", "error_after_convert", "error_after_epoch"), strict=True):
            if text:
                values = [float(row[column]) for row in of]
                agree(text, statistics.mean(values), statistics.stdev(values))
    fits = [
        statistics.mean(
            float(r["relative_error_test"])
            for r in runs
            if (r["branches"], r["width"], r["init"]) == (branches, width, "fit+calibration")
        )
        for branches, width in (("1", "200"), ("2", "100"))
    ]
    for page in ("docs/results.md", "docs/numerics.md"):
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        (shown,) = re.findall(
            r"relative squared error (?:on the test images )?is (0\.\d+) (?:against|where) .*?(0\.\d+)", text
        )
        agree(" ".join(shown), *fits)


COLUMNS = {
    "baseline (fitted)": "baseline", "narrowed, A2's weights": "narrow", "low-rank, A2's weights": "low-rank",
    "branches summed, A2's weights": "summed", "oracle": "oracle",
    **{f"DCL-{name}": name for name in ("A2", "A3S", "A3D", "B2", "B3S", "B3D")},
}  # fmt: skip


TABLE_1 = {(cell["set"], cell["column"]): cell for cell in results("table1.json")["cells"]}


def pooled(column, reference, kind):
    """The difference of two columns over the sets of a kind: estimate, its standard error, and how many sets.

    Errors are paired by seed, a set has the mean of its pairs, and the sets are the sample.
    """
    sets = sorted(data for data, name in TABLE_1 if name == column and data.startswith(kind))
    apart = [paired(TABLE_1[data, column], TABLE_1[data, reference])[0] for data in sets]
    return statistics.mean(apart), statistics.stdev(apart) / len(apart) ** 0.5, len(apart)


def test_table_1():
    rows = table_under("| | weights (1000 classes) | two digits", RESULTS)
    assert {COLUMNS[row[0]] for row in rows} == {column for _, column in TABLE_1}
    for name, weights, *by_digits in rows:
        column = COLUMNS[name]
        for kind, error, difference in (("MNIST-II-", *by_digits[:2]), ("MNIST-III-", *by_digits[2:])):
            of = [cell for (data, own), cell in TABLE_1.items() if own == column and data.startswith(kind)]
            papers = [cell["paper"] for cell in of if cell["paper"] is not None]
            mean = statistics.mean(statistics.mean(cell["errors"]) for cell in of)
            agree(error, mean, *([statistics.mean(papers)] if papers else []))
            agree(difference, *(pooled(column, "baseline", kind)[:2] if column != "baseline" else ()))
        agree(weights, TABLE_1["MNIST-III-01", column]["weights"])
    assert [pooled("A2", "baseline", kind)[2] for kind in ("MNIST-II-", "MNIST-III-")] == [5, 10]
    assert {len(cell["seeds"]) for cell in TABLE_1.values()} == {5}


def test_what_is_said_of_table_1():
    text = " ".join(RESULTS)
    gain, _, _ = pooled("A2", "baseline", "MNIST-III-")
    (shown,) = re.findall(r"A2 errs (\S+) points less than the baseline, with (\S+) % fewer", text)
    weights = [TABLE_1["MNIST-III-01", column]["weights"] for column in ("A2", "baseline")]
    agree(" ".join(shown), -gain, 100 * (1 - weights[0] / weights[1]))
    rivals = [
        pooled(column, "A2", kind)[:2] for kind in ("MNIST-III-", "MNIST-II-") for column in ("low-rank", "summed")
    ]
    (three,) = re.findall(r"less than A2 on three digits, by (.*?) points \(n = 10 sets\)", text)
    (two,) = re.findall(r"On two digits the differences are (.*?) \(n = 5\)", text)
    agree(f"{three} {two}", *(number for mean, error in rivals for number in (-mean, error)))
    numerics = " ".join((ROOT / "docs/numerics.md").read_text(encoding="utf-8").split())
    (shown,) = re.findall(r"On the three-digit sets it errs (.*?) points less", numerics)
    agree(shown, -rivals[0][0], rivals[0][1])
    (shown,) = re.findall(r"branches that are summed instead of multiplied (.*?)\. In BigNet", numerics)
    agree(shown, -rivals[1][0], rivals[1][1])
    lead = (ROOT / "results/table1.html").read_text(encoding="utf-8")
    claims = re.search(
        r"split into (\d+) claims: (\d+) hold here.*?By the paper’s own table, (\d+) of (\d+) hold", lead
    )
    ours, here, there, theirs = map(int, claims.groups())
    (shown,) = re.findall(r"for the paper's own table and for ours: (.*?) here\.", text)
    agree(shown, there, theirs, here, ours)


def test_what_table_1_took():
    """The oracle is a network for each digit of a number."""
    sets = {data for data, _ in TABLE_1}
    networks = sum(5 * (data.count("I") - 1 if column == "oracle" else 1) for data, column in TABLE_1)
    text, minutes = " ".join(RESULTS), results("table1.json")["minutes"]
    (shown,) = re.findall(r"trained these (.*?) seconds of them", text)
    agree(shown, networks, minutes["training and evaluation"] + minutes["compiling"], 60 * minutes["compiling"])
    (shown,) = re.findall(r"Fitting the sets took (.*?)\. ", text)
    agree(
        shown,
        *(minutes[f"{what}, earlier on an H200"] for what in ("calibration of the sets", "search of learning rates")),
    )
    assert len(sets) == 15


def test_how_near_the_fitted_baseline_is():
    off = {
        data: 100 * (statistics.mean(cell["errors"]) / cell["paper"] - 1)
        for (data, column), cell in TABLE_1.items()
        if column == "baseline"
    }
    far = sorted(share for share in off.values() if abs(share) >= 10)
    assert len(off) - len(far) == 12
    (shown,) = re.findall(r"twelve sets, (.*?) on MNIST-III-01", " ".join(" ".join(RESULTS).split()))
    agree(shown, -far[1], -far[0], off["MNIST-III-01"])


def test_what_took_part_in_the_search():
    choice = json.loads((ROOT / "src/torch_dcl/experiments/chosen.json").read_text())["choice"]
    assert all(by_digits["2"]["clip"] for by_digits in choice.values())
    assert {column for column, by_digits in choice.items() if not by_digits["3"]["clip"]} == {
        "A2",
        "A3S",
        "A3D",
        "low-rank",
    }
    assert not {"A4S", "A4D", "A5S", "A5D"} & set(choice)


def test_more_branches():
    errors = {row["column"]: row["errors"] for row in results("figures/tried.json")["columns"]}
    means = {column: statistics.mean(values) for column, values in errors.items()}
    text = " ".join(" ".join(RESULTS).split())
    (shown,) = re.findall(r"four deterministic branches err in (.*?) from seed to seed", text)
    agree(shown, means["A4D"], means["A5D"], min(errors["A5D"]), max(errors["A5D"]))
    (shown,) = re.findall(r"Four and five stochastic branches err in (.*?) %", text)
    agree(shown, means["A4S"], means["A5S"])
    numerics = " ".join((ROOT / "docs/numerics.md").read_text(encoding="utf-8").split())
    (shown,) = re.findall(r"three, four and five err in (.*?) \(3 seeds", numerics)
    agree(shown, *(means[column] for column in ("A3D", "A4D", "A5D", "A2")))
    (shown,) = re.findall(r"strategy suffers less: (.*?)\. - In half", numerics)
    agree(shown, *(means[column] for column in ("A3S", "A4S", "A5S")))


def test_bfloat16_against_float32():
    """No interval leaves out 0, and each reaches further than A2's effect on sets of that kind."""
    rows, reaches = results("precision.csv"), []
    for column in ("baseline", "A2"):
        for kind in ("MNIST-II-", "MNIST-III-"):
            of = [row for row in rows if row["column"] == column and row["set"].startswith(kind)]
            errors = {what: [float(row[what]) for row in of] for what in ("bfloat16", "float32")}
            seeds = [row["seed"] for row in of]
            mean, low, high = paired(*({"errors": errors[what], "seeds": seeds} for what in errors))
            assert low < 0 < high
            assert high - mean > abs(pooled("A2", "baseline", kind)[0])
            reaches.append(high - mean)
    (shown,) = re.findall(
        r"the four 95 % intervals reach (.*?) points to either side", " ".join(" ".join(RESULTS).split())
    )
    agree(shown, min(reaches), max(reaches))


TABLE_2 = {(cell["set"], cell["column"]): cell for cell in results("table2.json")["cells"]}
PAIRS = [(data, network) for data in ("cifar10", "cifar100") for network in ("lenet", "bignet", "wrn")]


def pooled_pairs(without=()):
    """DCL less plain over the pairs of Table 2: estimate, standard error over the pairs, and the paper's mean."""
    pairs = [pair for pair in PAIRS if pair[1] not in without]
    both = [(TABLE_2[data, f"{network}+dcl"], TABLE_2[data, network]) for data, network in pairs]
    apart = [paired(dcl, plain)[0] for dcl, plain in both]
    papers = [dcl["paper"] - plain["paper"] for dcl, plain in both]
    return statistics.mean(apart), statistics.stdev(apart) / len(apart) ** 0.5, statistics.mean(papers)


def test_table_2():
    rows = table_under("| | | weights | error | difference", RESULTS)
    endings = {"": "", ", DCL": "+dcl", ", three stochastic branches": "+dcl3s"}
    shown = []
    for data, name, weights, error, difference in rows:
        network, comma, rest = name.partition(",")
        key = data.replace("-", "").lower(), network.lower() + endings[comma + rest]
        shown.append(key)
        cell, plain = TABLE_2[key], TABLE_2[key[0], network.lower()]
        papers = [cell["paper"]] if cell["paper"] is not None else []
        agree(weights, cell["weights"])
        spread = [statistics.stdev(cell["errors"])] if len(cell["errors"]) > 1 else []
        agree(error, statistics.mean(cell["errors"]), *spread, *papers)
        if cell is not plain:
            papers = [cell["paper"] - plain["paper"]] if papers else []
            # The minus of a difference is written, the interval's comma and brackets are not numbers.
            agree(difference, *paired(cell, plain), *papers)
    assert sorted(shown) == sorted(TABLE_2)


def test_what_is_said_of_table_2():
    text = " ".join(" ".join(RESULTS).split())
    mean, error, papers = pooled_pairs()
    (shown,) = re.findall(
        r"DCL errs (\S+) points more on average, with a standard error of (\S+) .*?in the paper (\S+) less", text
    )
    agree(" ".join(shown), mean, error, -papers)
    numerics = " ".join((ROOT / "docs/numerics.md").read_text(encoding="utf-8").split())
    (shown,) = re.findall(r"six pairs DCL errs (.*?) points more", numerics)
    agree(shown, mean, error)
    corrected = holm(
        {
            (data, column): stats.ttest_rel(cell["errors"], TABLE_2[data, column.partition("+")[0]]["errors"]).pvalue
            for (data, column), cell in TABLE_2.items()
            if "+" in column and len(cell["seeds"]) == 3
        }
    )
    assert len(corrected) == 6
    smallest = min(corrected, key=corrected.get)
    assert smallest == ("cifar100", "lenet+dcl")
    (shown,) = re.findall(r"with three seeds, the smallest p is (\S+) \(LeNet on CIFAR-100\)", text)
    agree(shown, corrected[smallest])
    losses = {key: statistics.mean(cell["train_loss"]) for key, cell in TABLE_2.items()}
    (shown,) = re.findall(r"BigNet's training losses end alike \((.*?)\), and so do", text)
    agree(
        shown.replace("CIFAR-100", "").replace("CIFAR-10", ""),
        *(losses[data, f"bignet{dcl}"] for data in ("cifar10", "cifar100") for dcl in ("", "+dcl")),
    )
    (shown,) = re.findall(r"LeNet's on CIFAR-10 \((.*?)\) and WRN's \((.*?)\)", text)
    agree(shown[0], losses["cifar10", "lenet"], losses["cifar10", "lenet+dcl"])
    agree(shown[1], *(losses[data, f"wrn{dcl}"] for data in ("cifar10", "cifar100") for dcl in ("", "+dcl")))
    (shown,) = re.findall(r"LeNet fits less with its (.*?)\)\. SVHN", text)
    weights = [TABLE_2["cifar100", column]["weights"] for column in ("lenet+dcl", "lenet")]
    agree(shown, 100 * (1 - weights[0] / weights[1]), losses["cifar100", "lenet"], losses["cifar100", "lenet+dcl"])


@pytest.mark.parametrize(
    ("text", "values"), [("0.70 (1.2)", (0.703, 1.24)), ("−1,234.5", (-1234.46,)), ("3", (3.4,)), ("–", ())]
)
def test_numbers_are_read_with_their_rounding(text, values):
    agree(text, *values)
    for i, value in enumerate(values):
        with pytest.raises(AssertionError):
            agree(text, *values[:i], value + 0.6, *values[i + 1 :])


def test_the_reproduction_in_the_readme():
    rows = {row[0]: row[1:] for row in table_under("| experiment | paper | ours |", README)}
    assert len(rows) == 6
    for name, kind in (("two", "MNIST-II-"), ("three", "MNIST-III-")):
        paper, ours = rows[f"Table 1, {name} digits: DCL-A2 minus baseline"]
        sets = [data for data, column in TABLE_1 if column == "A2" and data.startswith(kind)]
        agree(paper, statistics.mean(TABLE_1[d, "A2"]["paper"] - TABLE_1[d, "baseline"]["paper"] for d in sets))
        low_rank = pooled("low-rank", "baseline", kind)[:2] if "low-rank" in ours else ()
        agree(ours, *pooled("A2", "baseline", kind)[:2], *low_rank, len(sets), 5)
    paper, ours = rows["Table 2, CIFAR: DCL minus plain, six pairs"]
    seeds = [len(TABLE_2["cifar10", network]["seeds"]) for network in ("bignet", "wrn")]
    agree(f"{paper} {ours}", pooled_pairs()[2], *pooled_pairs()[:2], *seeds, *pooled_pairs(without=("wrn",))[:2])
    fitted = [row for row in results("fit.csv") if row["init"] == "fit+calibration"]
    dcl, low_rank = (
        [r for r in fitted if (r["branches"], r["width"]) == kind] for kind in (("2", "100"), ("1", "200"))
    )
    shown = rows["A trained LeNet's `fc1` converted"][1]
    before = statistics.mean(float(row["error_before"]) for row in dcl)
    after = [statistics.mean(float(row["error_after_convert"]) for row in of) for of in (dcl, low_rank)]
    agree(shown, before, *after, len(dcl))
    (shown,) = re.findall(r"\*\*Accuracy:\*\* (.*?)\. Try low-rank", " ".join(" ".join(README).split()))
    gain, sets = pooled("A2", "baseline", "MNIST-III-"), 10
    less_still = pooled("low-rank", "A2", "MNIST-III-")
    assert gain[2] == less_still[2] == sets
    agree(shown, -gain[0], gain[1], sets, 5, -less_still[0], less_still[1], *pooled_pairs()[:2], len(PAIRS))


def test_the_weights_of_the_papers_networks():
    kinds = {
        "LeNet, 100 classes": models.lenet(100), "LeNet, 1000 classes": models.lenet(1000),
        "LeNet for CIFAR, 10 classes": models.lenet_cifar(), "BigNet, 10 classes": models.bignet(),
    }  # fmt: skip
    rows = {row[0]: row[1:] for row in table_under("| network | plain | DCL (A2) |", RESULTS)}
    assert rows.pop("AlexNet without groups") == ["62,367,776", "51,882,016", "−16.8 %"]  # tests/models/test_alexnet.py
    assert set(rows) == set(kinds)
    for name, (plain, dcl, change) in rows.items():
        before = models.count_weights(kinds[name])
        convert_(kinds[name], models.variant_plan(kinds[name], "A2"), init="random")
        after = models.count_weights(kinds[name])
        agree(f"{plain} {dcl} {change}", before, after, 100 * (after / before - 1))


def test_stored_pages_have_the_sentences_that_the_code_writes_today():
    """CONTRIBUTING.md has the commands that write them again."""
    table = load(ROOT / "results/table1.json")
    said = {
        "table1": [table1.effects(table)[-1], *table1.notes(table)],
        "table2": table2.verdict(load(ROOT / "results/table2.json")),
        "chart": [chart_verdict(results(f"chart/{data}/chart.json")) for data in ("cifar10", "cifar100")],
    }
    for name, sentences in said.items():
        page = html.unescape((ROOT / f"results/{name}.html").read_text(encoding="utf-8"))
        assert sentences
        for sentence in sentences:
            assert prose(sentence) in page, f"results/{name}.html is not that of the present code"


def test_the_stored_page_of_table_1_has_every_pooled_difference():
    page = (ROOT / "results/table1.html").read_text(encoding="utf-8")
    verdict = page[page.index('aria-label="Verdict"') : page.index("<h2>All errors</h2>")]
    rows = [re.findall(r"</span>([\w-]+)</th><td>(.*?)</td><td>(.*?)</td>", row) for row in verdict.split("<tr>")]
    shown = {name: pooled_differences for ((name, *pooled_differences),) in filter(None, rows)}
    expected = {
        name: [str(Effect(*pooled(*pair, kind))) for kind in ("MNIST-II-", "MNIST-III-")]
        for name, pair in {
            **{column: (column, "baseline") for column in ("A2", "A3S", "A3D", "B2", "B3S", "B3D")},
            **{column: ("A2", column) for column in ("narrow", "low-rank", "summed")},
        }.items()
    }
    assert shown == expected


def test_cifar_100_through_the_whole_path_of_imagenet():
    """The section and the file come together: the page says nothing of a run that there is no file of."""
    heads = [line for line in RESULTS if line.startswith("## ImageNet's path, on CIFAR-100")]
    found = (ROOT / "results/imagenet_cifar100.json").exists()
    assert len(heads) == found
    if not found:
        return
    run = results("imagenet_cifar100.json")
    names = {"alexnet": "AlexNet", "torchvision:resnet18": "ResNet-18"}
    rows = iter(table_under("| | weights | epochs | top-1 error", RESULTS))
    for network, its in run["networks"].items():
        assert its["complete"], f"{network} did not end; the page has no place for it"
        assert its["killed"]
        for model in its["models"]:
            name, *cells = next(rows)
            assert name == names[network] + {"plain": "", "dcl": ", DCL"}[model["model"]]
            values = (*model["top1"], *model["top5"], *model["train_loss"])
            for text, value in zip(cells, (model["weights"], its["epochs"], *values), strict=True):
                agree(text, value)
    assert not list(rows)
    text = " ".join(" ".join(RESULTS[RESULTS.index(heads[0]) :]).split())
    (counts,) = re.findall(r"([\d,]+ training and [\d,]+ test images)", text)
    agree(counts, run["images"]["train"], run["images"]["val"])
    (seconds,) = re.findall(r"(\d+) seconds from the first JPEG to the report", text)
    agree(seconds, sum(run["seconds"][name] for name in ("jpegs", "prepare", "train", "report")))
