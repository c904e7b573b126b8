"""The figures of the README and of the page on speed are those of the files in results/, as far as they are rounded."""

import csv
import json
import re
import statistics

import pytest
from tests.docs.pages import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
SPEED = (ROOT / "docs/speed.md").read_text(encoding="utf-8").splitlines()
NUMBER = re.compile(r"[+−-]?\d[\d,]*(?:\.\d+)?")
T_95 = {3: 4.3027, 5: 2.7764}  # of Student's distribution, by the number of seeds


def table_under(header, page=README):
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


LAYERS = {
    "3×3 conv 512 → 512, 28×28, batch 64": ("conv512", "batch 8", "conv512-b8"),
    "3×3 conv 256 → 256, 56×56, batch 64": ("conv256",),
    "linear 9216 → 4096, batch 1024": ("fc-b1024", "batch 256", "fc-b256", "batch 32", "fc-b32", "batch 1", "fc-b1"),
    "AlexNet with DCL in fc6, batch 256, a training step": (
        "alexnet-b256",
        "batch 32",
        "alexnet-b32",
        "batch 256, all in bfloat16",
        "alexnet-b256-pure",
        "batch 32, all in bfloat16",
        "alexnet-b32-pure",
    ),
    "3×3 conv 512, three branches of 80, stochastic": ("conv512-t3s",),
    "3×3 conv 512, three branches of 80, deterministic": ("conv512-t3",),
    "3×3 conv 512, batch 64, not in channels_last": ("conv512-contiguous",),
    "3×3 conv 256, batch 64, not in channels_last": ("conv256-contiguous",),
    "3×3 conv 512, batch 1": ("conv512-b1",),
    "1×1 conv 512 → 512, batch 64": ("conv512-1x1",),
}


@pytest.mark.parametrize("page", [README, SPEED], ids=["README", "speed"])
def test_the_speed_of_layers(page):
    ratios = {
        (row["case"], row["contender"]): (float(row["full_ratio"]), float(row["forward_ratio"]))
        for row in results("layers.csv")
        if row["precision"] == "bfloat16"
    }
    shown, above = [], ""
    for name, full, forward, low_rank, reference in table_under("| layer | DCL, forward + backward", page):
        if name.startswith("the same, "):
            case = dict(zip(LAYERS[above][1::2], LAYERS[above][2::2], strict=True))[name.removeprefix("the same, ")]
        else:
            above, case = name, LAYERS[name][0]
        shown.append(case)
        agree(full, ratios[case, "dcl"][0])
        agree(forward, ratios[case, "dcl"][1])
        for text, contender in ((low_rank, "low-rank"), (reference, "dcl-reference")):
            agree(text, *([ratios[case, contender][0]] if text != "–" else []))
    does_not_pay = {case for case, contender in ratios if contender == "dcl" and ratios[case, contender][0] > 1}
    assert does_not_pay <= set(shown)
    if page is SPEED:
        assert sorted(shown) == sorted({case for case, _ in ratios})
    # What does not pay is marked.
    marked = [line for line in page if re.match(r"\| .*\| \*\*1\.\d\d\*\* \|", line)]
    assert len(marked) == len(does_not_pay)


def test_the_speed_of_layers_in_float32():
    rows = {
        (row["case"], row["contender"]): float(row["full_ratio"])
        for row in results("layers.csv")
        if row["precision"] == "float32"
    }
    (text,) = re.findall(r"In float32 with TF32: (.*?)\. - The arithmetic", " ".join(" ".join(SPEED).split()))
    text = text.replace("at batch 1024 and 256", "")
    agree(text, *(rows[c, who] for who in ("dcl", "low-rank") for c in ("conv512", "conv256", "fc-b1024", "fc-b256")))


def test_where_it_does_not_pay():
    rows = {
        (row["case"], row["contender"]): float(row["full_ratio"])
        for row in results("layers.csv")
        if row["precision"] == "bfloat16"
    }
    page = " ".join((ROOT / "docs/numerics.md").read_text(encoding="utf-8").split())
    (text,) = re.findall(r"1×1 convolutions, (.*?)\. Networks of small layers", page)
    for name in ("at batch 64", "3×3"):
        text = text.replace(name, "")
    agree(text, *(rows[case, "dcl"] for case in ("conv512-1x1", "conv512-t3", "conv512-b1")))
    (text,) = re.findall(r"without them a layer takes (.*?) times as long", page)
    without = [ratio for (_, contender), ratio in rows.items() if contender == "dcl-reference"]
    agree(text, min(without), max(without))


def test_the_two_layouts():
    rows = {row["case"]: {} for row in results("layers.csv")}
    for row in results("layers.csv"):
        if row["precision"] == "bfloat16" and row["contender"].startswith(("plain", "dcl")):
            rows[row["case"]][row["contender"]] = float(row["full_ms"])
    (text,) = re.findall(r"where the first one takes (.*?)\. Torch's compiler", " ".join(" ".join(SPEED).split()))
    cases = rows["conv512"], rows["conv512-contiguous"]
    fastest = [min(times["plain"], times["plain-compiled"]) for times in cases]
    agree(text, *(times["dcl"] for times in cases), *fastest)


def test_the_bandwidth_of_the_fusion():
    rows = [row for row in results("kernels.csv") if (row["precision"], row["mib"]) == ("bfloat16", "64")]
    shares = [100 * float(row[key]) for row in rows for key in ("forward_share", "full_share")]
    (text,) = re.findall(r"The fusion by itself moves (.*?) of the bytes a second", " ".join(SPEED))
    agree(text, min(shares), max(shares))


def test_the_speed_of_layers_at_the_power_limit():
    rows = {(row["precision"], row["case"]): row for row in results("layers.csv") if row["contender"] == "dcl"}
    (text,) = re.findall(r"replayed for a quarter of a second: (.*?) for AlexNet", " ".join(SPEED))
    cases = ("conv512", "conv256", "fc-b1024", "fc-b256", "alexnet-b256", "alexnet-b32")
    agree(
        text.replace("at batch 1024 and 256", ""),
        *(float(rows["bfloat16", case]["sustained_ratio"]) for case in cases),
    )


def test_what_plan_measures_beside_what_the_benchmark_does():
    times = {(row["precision"], row["case"], row["contender"]): row for row in results("layers.csv")}
    planned = [case for *case, contender in times if contender == "plan"]
    assert len(planned) >= 16

    def apart(what, cases):
        """How far the plan's ratio is from that of the two eager layers, at most."""
        return max(
            abs(float(times[*case, "plan"][f"{what}_ratio"]) - float(dcl[f"{what}_ms"]) / float(plain[f"{what}_ms"]))
            for case in cases
            for dcl, plain in [[times[*case, name] for name in ("dcl", "plain")]]
        )

    (shown,) = re.findall(r"its ratios \(rows `plan` of the file\) are (.*?) elsewhere", " ".join(SPEED))
    alone = ["bfloat16", "conv512-b1"]
    others = [case for case in planned if case != alone]
    forward = apart("forward", [alone]), apart("forward", others)
    assert forward[0] > forward[1]
    agree(shown.replace("batch 1,", ""), apart("full", planned), *forward)


def test_the_units_of_torchvisions_networks():
    of = [row for row in results("plan.csv") if row["memory"] == "channels_last"]
    rows = {(row["network"], row["unit"], row["contender"]): row for row in of}

    def units(network, contender, what):
        return [float(r[what]) for (n, unit, c), r in rows.items() if (n, c) == (network, contender) and unit]

    vgg, alexnet, resnet = (units(name, "dcl", "full_ratio") for name in ("vgg16", "alexnet", "resnet50"))
    forward = units("resnet50", "dcl", "forward_ratio")
    assert max(vgg) < 1 < min(resnet)
    low_rank = units("resnet50", "low_rank", "full_ratio")
    assert all(rival < own for rival, own in zip(low_rank, resnet, strict=True))
    rivals = units("resnet50", "low_rank", "forward_ratio")
    assert all(own < min(1, rival) for own, rival in zip(forward, rivals, strict=True))
    (text,) = re.findall(r"In torchvision's networks at batch 64.*?Whole networks", " ".join(SPEED))
    for name in ("batch 64", "VGG16", "ResNet-50"):
        text = text.replace(name, "")
    agree(
        text, len(vgg), min(vgg), max(vgg), sum(r < 1 for r in alexnet), len(alexnet), *[len(resnet)] * 3,
        min(forward), max(forward),
    )  # fmt: skip


def test_networks_as_people_run_them():
    rows = {(row["network"], row["phase"], row["mode"]): row for row in results("networks.csv")}
    shown = table_under('| | eager | `torch.compile` | `mode="reduce-overhead"` |', SPEED)
    kinds = [(network, phase) for network in ("alexnet", "resnet18") for phase in ("train", "infer")]
    assert len(shown) == len(kinds)
    modes = ("eager", "compile", "reduce-overhead")
    for kind, (_, *cells) in zip(kinds, shown, strict=True):
        for mode, cell in zip(modes, cells, strict=True):
            row = rows.get((*kind, mode))
            agree(cell, *((float(row["ratio"]), float(row["spread"])) if row else ()))
    (text,) = re.findall(r"in the same mode: AlexNet (.*?)`plan\(select", " ".join(README))
    agree(
        text.replace("ResNet-18", ""),
        *(float(rows[n, "train", m]["ratio"]) for n in ("alexnet", "resnet18") for m in modes),
    )


def test_the_host_time_of_a_unit():
    ratios = {row["unit"]: float(row["ratio"]) for row in results("host.csv") if row["contender"] == "dcl"}
    (text,) = re.findall(r"is the host's time: (.*?)\(forward and backward", " ".join(SPEED))
    units = ("conv + ReLU", "conv + BN + ReLU", "conv + ReLU, contiguous", "linear + ReLU")
    agree(text, *(ratios[unit] for unit in units))


def test_whole_networks():
    last = "channels_last"
    rows = {(row["network"], row["memory"], row["contender"]): row for row in results("plan.csv") if not row["unit"]}
    ways = {
        "as it runs, neither compiled nor captured": (last, "dcl", "full_ratio"),
        "as a CUDA graph": (last, "dcl, captured", "full_ratio"),
        "forward, as it runs": (last, "dcl", "forward_ratio"),
        "forward, as a CUDA graph": (last, "dcl, captured", "forward_ratio"),
        "not in channels_last, as it runs": ("contiguous", "dcl", "full_ratio"),
        "not in channels_last, as a CUDA graph": ("contiguous", "dcl, captured", "full_ratio"),
    }
    shown = table_under("| | VGG16 | AlexNet | ResNet-50 |", SPEED)
    assert [row[0] for row in shown] == list(ways)
    for name, *cells in shown:
        *whose, what = ways[name]
        for network, cell in zip(("vgg16", "alexnet", "resnet50"), cells, strict=True):
            found = rows.get((network, *whose))
            agree(cell, *([float(found[what])] if found else []))


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
    rows = table_under("| `fc1` becomes | weights")
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


def test_the_speed_of_a_fleet():
    of = {row["method"]: row for row in results("fleet.csv") if row["networks"] in ("75", "1")}
    kinds = {
        "fleet": "fleet", "`torch.func.vmap` + `torch.compile`": "vmap", "one network, CUDA graph": "cuda-graph",
        "one network, eager": "plain",
    }  # fmt: skip
    rows = table_under("| | images a second | ratio")
    assert {row[0] for row in rows} == set(kinds)
    for name, speed, ratio in rows:
        found = of[kinds[name]]
        shown = int(speed.replace(",", ""))
        assert abs(shown / float(found["images_per_s"]) - 1) < 2e-3
        agree(ratio, float(found["ratio_to_plain"]))


COLUMNS = {
    "baseline (fitted)": "baseline", "narrowed, A2's weights": "narrow", "low-rank, A2's weights": "low-rank",
    "branches summed, A2's weights": "summed", "oracle": "oracle",
    **{f"DCL-{name}": name for name in ("A2", "A3S", "A3D", "B2", "B3S", "B3D")},
}  # fmt: skip


def test_table_1():
    cells = {(cell["set"], cell["column"]): cell for cell in results("table1.json")["cells"]}
    rows = table_under("| | weights (1000 classes) | two digits")
    assert {COLUMNS[row[0]] for row in rows} == {column for _, column in cells}
    for name, weights, *by_digits in rows:
        for kind, error, clear in (("MNIST-II-", *by_digits[:2]), ("MNIST-III-", *by_digits[2:])):
            of = {data: cell for (data, column), cell in cells.items() if column == COLUMNS[name] and kind in data}
            papers = [cell["paper"] for cell in of.values() if cell["paper"] is not None]
            mean = statistics.mean(statistics.mean(cell["errors"]) for cell in of.values())
            agree(error, mean, *([statistics.mean(papers)] if papers else []))
            if clear:
                apart = [paired(cell, cells[data, "baseline"]) for data, cell in of.items()]
                agree(clear, sum(high < 0 for _, _, high in apart), sum(low > 0 for _, low, _ in apart))
        agree(weights, cells["MNIST-III-01", COLUMNS[name]]["weights"])


def test_table_2():
    cells = {(cell["set"], cell["column"]): cell for cell in results("table2.json")["cells"]}
    rows = table_under("| | | weights | error | difference")
    endings = {"": "", ", DCL": "+dcl", ", three stochastic branches": "+dcl3s"}
    shown = []
    for data, name, weights, error, difference in rows:
        network, comma, rest = name.partition(",")
        key = data.replace("-", "").lower(), network.lower() + endings[comma + rest]
        shown.append(key)
        cell, plain = cells[key], cells[key[0], network.lower()]
        papers = [cell["paper"]] if cell["paper"] is not None else []
        agree(weights, cell["weights"])
        spread = [statistics.stdev(cell["errors"])] if len(cell["errors"]) > 1 else []
        agree(error, statistics.mean(cell["errors"]), *spread, *papers)
        if cell is not plain:
            papers = [cell["paper"] - plain["paper"]] if papers else []
            # The minus of a difference is written, the interval's comma and brackets are not numbers.
            agree(difference, *paired(cell, plain), *papers)
    assert sorted(shown) == sorted(cells)


def test_the_speed_of_table_2():
    """Its paragraph: minutes of a recipe, times a DataLoader loop, times the plain network's step."""
    rows = {(row["column"], row["method"], row["compile"] == "True"): row for row in results("cifar.csv")}
    big, wide = rows["bignet", "fleet", True], rows["wrn", "fleet", True]
    three = rows["bignet bignet+dcl bignet+dcl3s", "abreast", True]
    text = " ".join(README)
    (shown,) = re.findall(r"At the speeds measured on one H200(.*?)\(bfloat16", text)
    shown = shown.replace("200 epochs", "").replace("16 workers", "")
    ratios = [rows[f"{name}+dcl", "fleet", how] for how in (False, True) for name in ("lenet", "bignet", "wrn")]
    agree(
        shown, *(float(row["minutes_full_recipe"]) for row in (big, wide, three)),
        *(float(row["ratio_to_loader"]) for row in (big, wide)),
        *(float(row["ratio_to_plain"]) for row in ratios),
    )  # fmt: skip
    (shown,) = re.findall(r"three BigNets (.*?) minutes, a pair of WRNs abreast (\d\.\d)\.", text)
    minutes = {(c["set"], c["column"]): c["minutes"] for c in results("table2.json")["cells"]}
    of_bignet = [value for (_, column), value in minutes.items() if column.startswith("bignet")]
    agree(shown[0], min(of_bignet), max(of_bignet))
    for data in ("cifar10", "cifar100"):
        agree(shown[1], minutes[data, "wrn"] + minutes[data, "wrn+dcl"])
    (shown,) = re.findall(r"One BigNet keeps the GPU(.*?): these networks", " ".join(SPEED))
    shown = shown.replace("(989 TFLOP/s of dense products in bfloat16)", "")
    agree(shown, *(100 * float(r["share_of_peak"]) for r in (big, three, wide)))


def test_the_training_of_table_2s_networks():
    rows = {(row["column"], row["method"], row["compile"] == "True"): row for row in results("cifar.csv")}
    shown = []
    for name, *cells in table_under("| | images a second | compiled |", SPEED):
        network, *variant = re.split(r", | by ", name)
        ending = {"DCL": "+dcl", "three stochastic branches": "+dcl3s"}.get("".join(variant), "")
        column, method = network.lower() + ending, "loader" if "by" in name.split() else "fleet"
        if name.startswith("these"):
            above = dict.fromkeys(column for column, method, _ in shown if method == "fleet")
            column, method = " ".join(c for c in above if c.startswith(list(above)[-1].partition("+")[0])), "abreast"
        for compiled, speed, ratio in zip((False, True), cells[:2], cells[2:], strict=True):
            if speed:
                row = rows[column, method, compiled]
                shown.append((column, method, compiled))
                assert abs(int(speed.replace(",", "")) / float(row["images_per_s"]) - 1) < 5e-3
            if ratio:
                agree(ratio, *(float(row[key]) for key in ("ratio_to_plain", "ratio_low", "ratio_high")))
    assert sorted(shown) == sorted(rows)


@pytest.mark.parametrize(
    ("text", "values"), [("0.70 (1.2)", (0.703, 1.24)), ("−1,234.5", (-1234.46,)), ("3", (3.4,)), ("–", ())]
)
def test_numbers_are_read_with_their_rounding(text, values):
    agree(text, *values)
    for i, value in enumerate(values):
        with pytest.raises(AssertionError):
            agree(text, *values[:i], value + 0.6, *values[i + 1 :])


CHARTS = {
    name: {point["unit"]: point for point in results(f"chart/{name}/chart.json")["points"]}
    for name in ("cifar10", "cifar100")
}


def mean_error(point):
    return statistics.mean(point["errors"])


def test_the_deciding_chart():
    names = {
        "plain": "plain", "narrowed": "narrow", "low-rank": "low-rank", "branches summed": "summed",
        "DCL, two branches": "dcl", "DCL, three stochastic branches": "dcl3s",
        "product without the root (star)": "star", "gated (GLU)": "glu", "bilinear": "bilinear",
    }  # fmt: skip
    rows = table_under("| layer | weights | step, ms")
    ten, hundred = CHARTS.values()
    assert [names[row[0]] for row in rows] == sorted(ten, key=lambda unit: mean_error(ten[unit]))
    for name, weights, step, *shown in rows:
        unit = names[name]
        agree(weights, ten[unit]["weights"])
        agree(step, hundred[unit]["step_ms"])
        for points, error, less in zip(CHARTS.values(), shown[::2], shown[1::2], strict=True):
            agree(error, mean_error(points[unit]), statistics.stdev(points[unit]["errors"]))
            if unit != "dcl":
                apart, low, high = paired(points[unit], points["dcl"])
                agree(less, apart, low, high)
                bold = less.replace(" [", "** [") in " ".join(README)
                assert bold == (low > 0 or high < 0), f"{name}: bold says that the difference is clear"
    (text,) = re.findall(r"54 trainings in (.*?), in part beside", " ".join(README))
    for name, minutes in zip(CHARTS, re.findall(r"\d+\.\d", text), strict=True):
        taken = (ROOT / f"results/chart/{name}/minutes.jsonl").read_text().splitlines()
        agree(minutes, sum(json.loads(line)["training"] for line in taken))


def test_what_is_said_of_the_chart():
    """No difference to DCL is clear on CIFAR-10; on CIFAR-100 narrowed is lower, star higher, and DCL seventh."""
    clear = {
        name: {
            unit: (low > 0) - (high < 0)
            for unit, point in points.items()
            for _, low, high in [paired(point, points["dcl"])]
            if unit != "dcl" and (low > 0 or high < 0)
        }
        for name, points in CHARTS.items()
    }
    assert clear == {"cifar10": {}, "cifar100": {"narrow": -1, "star": 1, "bilinear": 1}}
    hundred = CHARTS["cifar100"]
    assert sorted(hundred, key=lambda unit: mean_error(hundred[unit])).index("dcl") == 6
    assert hundred["bilinear"]["errors"] == [99.0] * 3
    assert hundred["bilinear"]["trials"]["0.03"] < 50


def test_what_the_page_on_numerics_says_of_the_chart():
    page = " ".join((ROOT / "docs/numerics.md").read_text(encoding="utf-8").split())
    (text,) = re.findall(r"the low-rank layer errs in (.*?) \(\[results/chart", page)
    values = [mean_error(points[unit]) for points in CHARTS.values() for unit in ("low-rank", "dcl")]
    agree(text.replace("CIFAR-100", "").replace("CIFAR-10", ""), *values, mean_error(CHARTS["cifar100"]["narrow"]))


def test_what_is_said_of_the_rates_of_the_chart():
    at_the_end = {
        name: {unit for unit, p in points.items() if p["lr"] == max(map(float, p["trials"]))}
        for name, points in CHARTS.items()
    }
    for point in [point for points in CHARTS.values() for point in points.values()]:
        assert point["lr"] == float(min(point["trials"], key=point["trials"].get))
    assert at_the_end["cifar10"] == {"low-rank", "summed", "dcl", "dcl3s", "glu"}
    assert at_the_end["cifar100"] == set(CHARTS["cifar100"]) - {"star"}
    assert {unit for unit, p in CHARTS["cifar10"].items() if p["trials"]["0.03"] >= 90} == {
        "narrow",
        "star",
        "bilinear",
    }
