"""The figures about speed on README and pages are those of the files in results/, as far as they are rounded."""

import itertools
import re

from tests.docs.numbers import README, RESULTS, SPEED, agree, results, table_under
from tests.docs.pages import ROOT

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


def test_the_speed_of_layers():
    ratios = {
        (row["case"], row["contender"]): (float(row["full_ratio"]), float(row["forward_ratio"]))
        for row in results("layers.csv")
        if row["precision"] == "bfloat16"
    }
    shown, above = [], ""
    for name, full, forward, low_rank, reference in table_under("| layer | DCL, forward + backward", SPEED):
        if name.startswith("the same, "):
            case = dict(zip(LAYERS[above][1::2], LAYERS[above][2::2], strict=True))[name.removeprefix("the same, ")]
        else:
            above, case = name, LAYERS[name][0]
        shown.append(case)
        agree(full, ratios[case, "dcl"][0])
        agree(forward, ratios[case, "dcl"][1])
        for text, contender in ((low_rank, "low-rank"), (reference, "dcl-reference")):
            agree(text, *([ratios[case, contender][0]] if text != "–" else []))
    assert sorted(shown) == sorted({case for case, _ in ratios})
    # What does not pay is marked.
    does_not_pay = {case for case, contender in ratios if contender == "dcl" and ratios[case, contender][0] > 1}
    section = SPEED[SPEED.index("## Layers") :]
    assert sum(bool(re.match(r"\| .*\| \*\*1\.\d\d\*\* \|", line)) for line in section) == len(does_not_pay)


def test_what_the_readme_says_of_the_speed_of_layers():
    ratios = {
        (row["case"], row["contender"]): float(row["full_ratio"])
        for row in results("layers.csv")
        if row["precision"] == "bfloat16"
    }
    text = " ".join(README)
    large = [ratios[case, "dcl"] for case in ("conv512", "conv256", "fc-b1024")]
    rivals = [ratios[case, "low-rank"] for case in ("conv512", "conv256", "fc-b1024")]
    (shown,) = re.findall(r"large layers take (.*? of the plain layer's time, low-rank ones .*?)\. ", text)
    agree(shown, min(large), max(large), min(rivals), max(rivals))
    for case in ("conv512", "conv256", "conv512-contiguous", "conv256-contiguous"):
        assert ratios[case, "dcl"] < min(1, ratios[case, "low-rank"])
    (shown,) = re.findall(r"low-rank: (.*?) \|", text)
    agree(shown, ratios["fc-b1024", "low-rank"], ratios["fc-b1024", "dcl"])
    assert min(ratios["conv512-1x1", "dcl"], ratios["conv512-b1", "dcl"]) > 1


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


NETWORKS = {
    "AlexNet": "alexnet", "VGG16": "vgg16", "ResNet-18": "resnet18", "ResNet-50": "resnet50",
    "DenseNet-121": "densenet121",
}  # fmt: skip
MODES = ("eager", "compile", "reduce-overhead")


def check_networks(page, header, phase_of):
    """The rows of a table of whole networks are those of the file, bold where DCL is slower. Gives what it shows."""
    rows = {(r["network"], r["phase"], r["mode"]): r for r in results("networks.csv") if r["selection"] == "all"}
    shown = set()
    for name, *cells in table_under(header, page):
        network, _, kind = name.partition(", ")
        (line,) = [line for line in page if line.startswith(f"| {name} |") and line.count("|") == len(cells) + 2]
        for mode, cell, raw in zip(MODES, cells, line.strip("|").split("|")[1:], strict=True):
            key = NETWORKS[network], phase_of[kind], mode
            agree(cell, *((float(rows[key][what]) for what in ("ratio", "spread")) if key in rows else ()))
            assert raw.strip().startswith("**") == (key in rows and round(float(rows[key]["ratio"]), 2) > 1), line
            shown.add(key)
    return rows, shown


def test_networks_as_people_run_them():
    rows, shown = check_networks(
        SPEED[: SPEED.index("## On a CPU")], "| | eager |", {"training step": "train", "inference": "infer"}
    )
    assert set(rows) <= shown


def test_the_networks_of_the_readme():
    rows, shown = check_networks(README, "| training step | eager |", {"": "train"})
    assert {key for key in rows if key[1] == "train"} <= shown


def test_networks_of_units_that_are_faster():
    found = [row for row in results("networks.csv") if row["selection"] == "faster"]
    rows = {(row["network"], row["mode"], row["phase"]): row for row in found if row["mode"] != "eager"}
    every = {row["network"]: row["units"] for row in results("networks.csv") if row["selection"] == "all"}
    kinds = {
        "compiled training step": ("compile", "train"), "compiled inference": ("compile", "infer"),
        "training step in CUDA graphs": ("reduce-overhead", "train"),
        "inference in CUDA graphs": ("reduce-overhead", "infer"),
    }  # fmt: skip
    shown = []
    for name, units, weights, time in table_under('| `select="faster"` |', SPEED):
        network, kind = name.split(", ")
        key = NETWORKS[network], *kinds[kind]
        row = rows[key]
        assert units == f"{row['units']} of {every[key[0]]}"
        agree(weights, float(row["weights_ratio"]))
        agree(time, float(row["ratio"]), float(row["spread"]))
        shown.append(key)
    assert sorted(shown) == sorted(rows)
    assert all(row["units"] == every[row["network"]] for row in found if row["mode"] == "eager")


def test_networks_on_a_cpu():
    kinds = [
        ("float32", "channels_last", "eager"), ("float32", "contiguous", "eager"),
        ("bfloat16", "channels_last", "eager"), ("float32", "channels_last", "compile"),
    ]  # fmt: skip
    columns = ("network", "phase", "dtype", "layout", "mode")
    rows = {tuple(row[name] for name in columns): row for row in results("networks-cpu.csv")}
    assert {(r["batch"], r["device"]) for r in rows.values()} == {("8", "CPU, 2 threads")}
    page = SPEED[SPEED.index("## On a CPU") : SPEED.index("## Layers")]
    shown = set()
    for name, *cells in table_under("| on a CPU |", page):
        network, _, kind = name.partition(", ")
        phase = {"training step": "train", "inference": "infer"}[kind]
        (line,) = [line for line in page if line.startswith(f"| {name} |")]
        for of, cell, raw in zip(kinds, cells, line.strip("|").split("|")[1:], strict=True):
            key = NETWORKS[network], phase, *of
            agree(cell, *((float(rows[key][what]) for what in ("ratio", "spread")) if key in rows else ()))
            assert raw.strip().startswith("**") == (key in rows and round(float(rows[key]["ratio"]), 2) > 1), line
            shown.add(key)
    assert set(rows) <= shown


def test_the_host_time_of_a_unit():
    rows = {row["unit"]: row for row in results("host.csv") if row["contender"] == "dcl"}
    units = ("conv + ReLU", "conv + BN + ReLU", "conv + ReLU, contiguous", "linear + ReLU")
    for unit, (_, forward, full) in zip(units, table_under("| | forward, no gradients |", SPEED), strict=True):
        for text, column in ((forward, "forward_ratio"), (full, "ratio")):
            agree(text, float(rows[unit][column]))


def test_the_time_of_guards():
    rows = {(r["network"], r["torch"][:4], r["phase"]): r for r in results("guards.csv") if r["between"] == "0"}
    shown = table_under("| guards, converted / plain |", SPEED)
    assert [NETWORKS[name] for name, *_ in shown] == list(dict.fromkeys(network for network, *_ in rows))
    for name, *cells in shown:
        columns = itertools.product(("2.11", "2.15"), ("train", "infer"))
        for column, cell in zip(columns, cells, strict=True):
            agree(cell, *(float(rows[NETWORKS[name], *column][what]) for what in ("ratio", "spread")))


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


SOURCES = {
    "the same batches again and again": "ready", "synthetic": "synthetic",
    "prepared shards, kept on the GPU": "resident",
    "prepared shards, mapped into memory": "prepared", "JPEGs decoded on the GPU (nvJPEG)": "gpu",
    "JPEGs decoded by Pillow, 16 workers": "pillow", "JPEGs in tar files, likewise": "tar",
}  # fmt: skip


def sources_of_imagenet():
    return {(row["network"], row["source"], row["model"]): row for row in results("imagenet.csv")}


def test_the_sources_of_imagenet():
    rows = sources_of_imagenet()
    shown = table_under("| source | AlexNet | of synthetic |", SPEED)
    assert [row[0] for row in shown] == list(SOURCES)
    for name, *cells in shown:
        for network, pair in (("alexnet", cells[:2]), ("resnet50", cells[2:])):
            found = rows.get((network, SOURCES[name], "plain"))
            for cell, what in zip(pair, ("images_per_s", "of_synthetic"), strict=True):
                agree(cell, *([float(found[what])] if found else []))
    said = r"as in the paper\) takes (.*?) of the plain step's time .*? \(paper: .*?\), (.*?)\. Here"
    ((ready, others),) = re.findall(said, " ".join(SPEED))
    ratios = {key[:2]: float(row["dcl_ratio"]) for key, row in rows.items() if key[2] == "dcl"}
    agree(ready, ratios["alexnet", "ready"])
    wanted = [("alexnet", "resident"), ("alexnet", "prepared"), ("resnet50", "ready"), ("resnet50", "prepared")]
    agree(others.replace("ResNet-50", ""), *(ratios[key] for key in wanted))


def test_the_hours_of_imagenet():
    speeds = {key[:2]: float(row["images_per_s"]) for key, row in sources_of_imagenet().items() if key[2] == "plain"}
    images, bytes_of = 450_000 * 256, 3 * 256**2
    cluster = (ROOT / "docs/cluster.md").read_text().splitlines()
    for name, alexnet, resnet in table_under("| source | AlexNet | ResNet-50 |", cluster):
        agree(alexnet, images / speeds["alexnet", SOURCES[name]] / 3600)
        agree(resnet, images / speeds["resnet50", SOURCES[name]] / 3600)
    assert round(speeds["resnet50", "prepared"] * bytes_of / 1e9, 1) == 0.9
    assert round(speeds["alexnet", "prepared"] * bytes_of / 1e9, 1) == 5.7


def test_the_speed_of_a_fleet():
    of = {row["method"]: row for row in results("fleet.csv") if row["networks"] in ("75", "1")}
    kinds = {
        "fleet": "fleet", "`torch.func.vmap` + `torch.compile`": "vmap", "one network, CUDA graph": "cuda-graph",
        "one network, eager": "plain",
    }  # fmt: skip
    rows = table_under("| | images a second | ratio", SPEED)
    assert {row[0] for row in rows} == set(kinds)
    for name, speed, ratio in rows:
        found = of[kinds[name]]
        shown = int(speed.replace(",", ""))
        assert abs(shown / float(found["images_per_s"]) - 1) < 2e-3
        agree(ratio, float(found["ratio_to_plain"]))
    (shown,) = re.findall(r"That is ([\d.]+ times .*?) GiB", " ".join(SPEED))
    agree(shown, float(of["fleet"]["ratio_to_strongest"]), float(of["fleet"]["peak_gib"]))
    (shown,) = re.findall(r"75 LeNets see (.*?) `torch.func.vmap`", " ".join(README))
    shown = shown.replace("one H200", "")
    agree(shown, float(of["fleet"]["images_per_s"]) / 1e6, float(of["fleet"]["ratio_to_strongest"]))


def test_the_speed_of_table_2():
    """Its paragraph: minutes of a recipe, times a DataLoader loop, times the plain network's step."""
    rows = {(row["column"], row["method"], row["compile"] == "True"): row for row in results("cifar.csv")}
    big, wide = rows["bignet", "fleet", True], rows["wrn", "fleet", True]
    three = rows["bignet bignet+dcl bignet+dcl3s", "concurrent", True]
    text = " ".join(RESULTS)
    (shown,) = re.findall(r"At the speeds measured on one H200(.*?)\(bfloat16", text)
    shown = shown.replace("200 epochs", "").replace("16 workers", "")
    ratios = [rows[f"{name}+dcl", "fleet", how] for how in (False, True) for name in ("lenet", "bignet", "wrn")]
    agree(
        shown, *(float(row["minutes_full_recipe"]) for row in (big, wide, three)),
        *(float(row["ratio_to_loader"]) for row in (big, wide)),
        *(float(row["ratio_to_plain"]) for row in ratios),
    )  # fmt: skip
    (shown,) = re.findall(r"three BigNets (.*?) minutes, a pair of WRNs at the same time (\d\.\d)\.", text)
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
            column, method = " ".join(c for c in above if c.startswith(list(above)[-1].partition("+")[0])), "concurrent"
        for compiled, speed, ratio in zip((False, True), cells[:2], cells[2:], strict=True):
            if speed:
                row = rows[column, method, compiled]
                shown.append((column, method, compiled))
                assert abs(int(speed.replace(",", "")) / float(row["images_per_s"]) - 1) < 5e-3
            if ratio:
                agree(ratio, *(float(row[key]) for key in ("ratio_to_plain", "ratio_low", "ratio_high")))
    assert sorted(shown) == sorted(rows)
