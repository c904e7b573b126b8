"""Figures: well-formed, labelled, the same bytes twice, and clear about bad input."""

import dataclasses
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch

import torch_dcl
from torch_dcl.experiments.complementary import Complementary
from torch_dcl.experiments.stats import interval
from torch_dcl.report import canvas, figures

FILTERS = {
    "set": "MNIST-III-10",
    "baseline": {"errors": [10.1, 10.4, 9.9]},
    "points": [
        {"filters": 100, "errors": [9.1, 9.3, 9.2], "weights": 905_000},
        {"filters": 25, "errors": [9.9, 9.8, 10.2], "weights": 565_000},
        {"filters": 400, "errors": [9.0, 9.1, 8.9], "weights": 1_540_000},
    ],
}
CURVES = {
    "set": "MNIST-III-10",
    "series": {
        name: {
            "train_loss": [[5.0, 1.0 * k, 0.2], [5.1, 1.1 * k, 0.25]],
            "test_loss": [[4.0, 1.2 * k, 0.5], [4.2, 1.1 * k, 0.6]],
        }
        for k, name in enumerate(("baseline", "A2", "A3D", "A3S"), start=1)
    },
}
CELLS = [
    {
        "set": f"MNIST-{size}",
        "column": column,
        "difference": d,
        "low": d - 0.2,
        "high": d + 0.2,
        "paper_difference": -0.3,
    }
    for size in ("II-01", "II-02", "III-10")
    for column, d in (("A2", -0.4), ("A3S", -0.1), ("B2", 0.5))
]


def found(digits=2, picked=True):
    fused = torch.full((10**digits,), 0.2, dtype=torch.float64)
    fused[68 % len(fused)] = 2.0
    fused[3] = torch.nan
    by_digit = torch.full((2, digits, 10), 0.3, dtype=torch.float64)
    by_digit[0, 0, 6], by_digit[1, 0, 1], by_digit[1, 0, 6] = 1.0, 1.0, 0.8
    by_digit[:, -1, 8] = 1.2
    names = tuple(f"{c:0{digits}d}" for c in range(10**digits))
    parts = (6, 8) if digits == 2 else (8,)
    own = tuple(tuple(int(d) for d in branch.argmax(1)) for branch in by_digit)
    branches = torch.ones(2, 10**digits, dtype=torch.float64)
    return Complementary(
        "fc1", 37, picked, names, digits, 10_000, fused, branches, by_digit, 68 % len(fused), parts, own
    )


DRAW = {
    "filters": lambda **options: figures.filters_figure(FILTERS, **options),
    "curves": lambda **options: figures.curves_figure(CURVES, **options),
    "complementary": lambda **options: figures.complementary_figure(found(), title="DCL-A2", **options),
    "differences": lambda **options: figures.differences_figure(CELLS, **options),
}
LABELS = {
    "filters": ["filters per branch", "test accuracy (%)", "baseline", "DCL-A2", "100", "0.91", "1.54"],
    "curves": ["epoch", "loss (log scale)", "baseline", "DCL-A2", "DCL-A3D", "DCL-A3S", "training", "test"],
    "complementary": ["DCL-A2", "fused response z, filter 37 of fc1", "68", "branch 1, v⁽¹⁾, tens digit", "number"],
    "differences": ["DCL-A2", "DCL-A3S", "DCL-B2", "MNIST-II-01", "MNIST-III-10", "paper", "measured, 95 % interval"],
}


def words(root):
    return ["".join(element.itertext()).strip() for element in root.iter() if element.tag.endswith("text")]


def element(root, name):
    return next(e for e in root.iter() if e.get("id") == name)


@pytest.mark.parametrize("kind", DRAW)
def test_a_figure_is_an_svg_with_its_labels_and_the_same_bytes_twice(kind, tmp_path):
    for name in ("one.svg", "two.svg"):
        figures.save(DRAW[kind](), tmp_path / name)
    data = (tmp_path / "one.svg").read_bytes()
    assert data == (tmp_path / "two.svg").read_bytes()
    assert b"<dc:date>" not in data
    root = ET.fromstring(data)
    missing = [label for label in LABELS[kind] if label not in words(root)]
    assert missing == []
    ids = [e.get("id") for e in root.iter() if e.get("id")]
    assert len(ids) == len(set(ids))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("suffix", ["pdf", "png"])
def test_pdf_and_png_have_the_same_bytes_twice(suffix, tmp_path):
    for name in ("one", "two"):
        figures.save(DRAW["curves"](), tmp_path / f"{name}.{suffix}")
    data = (tmp_path / f"one.{suffix}").read_bytes()
    assert data == (tmp_path / f"two.{suffix}").read_bytes()
    assert data.startswith(b"%PDF" if suffix == "pdf" else b"\x89PNG")
    assert b"CreationDate" not in data


@pytest.mark.parametrize("kind", DRAW)
def test_no_figure_hides_text_outside_of_its_page(kind):
    figure = DRAW[kind]()
    with canvas.style():
        figure.draw_without_rendering()
        box = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert box.x0 >= -0.01
    assert box.y0 >= -0.01
    assert box.x1 <= width + 0.01
    assert box.y1 <= height + 0.01


@pytest.mark.parametrize("kind", DRAW)
def test_dark_and_light_differ_in_colour_only(kind):
    light, dark = (ET.fromstring(figures.svg(DRAW[kind](dark=dark))) for dark in (False, True))
    assert words(light) == words(dark)
    assert ET.tostring(light) != ET.tostring(dark)


def test_two_figures_share_no_id_in_one_page_and_every_reference_has_its_target():
    texts = [figures.svg(DRAW["filters"](dark=dark), name=name) for dark, name in ((False, "a"), (True, "b"))]
    page = ET.fromstring(f"<div>{''.join(texts)}</div>")
    ids = [e.get("id") for e in page.iter() if e.get("id")]
    assert len(ids) == len(set(ids))
    used = re.findall(r'(?:url\(#|href="#)([^")]+)', "".join(texts))
    assert used
    assert set(used) <= set(ids)
    assert 'role="img"' in texts[0]
    assert texts[0].startswith("<svg ")
    with pytest.raises(ValueError, match="cannot begin ids"):
        figures.svg(DRAW["filters"](), name="two words")


def test_the_baseline_is_dashed_and_stands_at_its_mean():
    figure = figures.filters_figure(FILTERS)
    root = ET.fromstring(figures.svg(figure, name="f"))
    style = next(element(root, "f-baseline").iter("{http://www.w3.org/2000/svg}path")).get("style")
    assert "stroke-dasharray" in style
    line = next(line for line in figure.axes[0].lines if line.get_gid() == "baseline")
    assert list(line.get_ydata()) == pytest.approx([100 - 30.4 / 3] * 2)


def test_points_stand_in_order_with_their_seeds_and_intervals():
    axes = figures.filters_figure(FILTERS).axes[0]
    means = next(line for line in axes.lines if len(line.get_xdata()) == 3 and line.get_marker() == "None")
    assert list(means.get_ydata()) == pytest.approx([100 - 29.9 / 3, 100 - 9.2, 91.0])
    assert [label.get_text().split("\n")[0] for label in axes.get_xticklabels()] == ["25", "100", "400"]
    bars = [container.lines[2][0].get_segments()[0] for container in axes.containers]
    low, high = interval([100 - e for e in FILTERS["points"][0]["errors"]])
    assert bars[1][:, 1].tolist() == pytest.approx([low, high])
    dots = sorted(y for line in axes.lines if line.get_markersize() < 3 for y in line.get_ydata())
    assert dots == pytest.approx(sorted(100 - e for point in FILTERS["points"] for e in point["errors"]))


def test_a_single_seed_and_missing_weights_are_drawn_without_interval():
    data = {**FILTERS, "baseline": {"errors": [10.0]}, "points": [{"filters": 50, "errors": [9.0]}]}
    figure = figures.filters_figure(data)
    assert "1 seed," in figure.get_label()
    assert "weights of the network" not in figure.axes[0].get_xlabel()
    assert not figure.axes[0].containers


def test_training_is_dashed_and_test_is_solid_in_one_colour():
    axes = figures.curves_figure(CURVES).axes[0]
    lines = {line.get_gid(): line for line in axes.lines if line.get_gid()}
    for name in CURVES["series"]:
        train, test = lines[f"{name}-train_loss"], lines[f"{name}-test_loss"]
        assert train.get_color() == test.get_color()
        assert train.is_dashed()
        assert not test.is_dashed()
        assert train.get_linewidth() < test.get_linewidth()
    assert len({lines[f"{name}-test_loss"].get_color() for name in CURVES["series"]}) == 4
    assert list(lines["A2-test_loss"].get_ydata()) == pytest.approx([4.1, 2.3, 0.55])


def test_losses_that_reach_zero_are_drawn_on_a_linear_axis():
    runs = {"train_loss": [[1.0, 0.0]], "test_loss": [[1.0, 0.5]]}
    axes = figures.curves_figure({"set": "s", "series": {"baseline": runs, "my network": runs}}).axes[0]
    assert axes.get_yscale() == "linear"
    assert axes.get_ylabel() == "loss"


def test_names_of_lines_that_end_together_do_not_overlap():
    runs = {"train_loss": [[1.0, 0.1]], "test_loss": [[1.0, 0.5]]}
    figure = figures.curves_figure({"set": "s", "series": dict.fromkeys(("baseline", "A2", "A3D", "A3S"), runs)})
    with canvas.style():
        figure.draw_without_rendering()
        boxes = sorted((text.get_window_extent() for text in figure.axes[0].texts), key=lambda box: box.y0)
    assert len(boxes) == 4
    assert all(a.y1 <= b.y0 for a, b in itertools.pairwise(boxes))


def test_red_is_the_highest_and_green_what_contributes_where_it_is_another():
    theme = canvas.LIGHT
    root = ET.fromstring(figures.svg(figures.complementary_figure(found()), name="c"))
    ids = {e.get("id") for e in root.iter() if e.get("id")}
    marked = {name.removeprefix("c-") for name in ids if "highest" in name or "contributes" in name}
    assert marked == {
        "fused-highest-68", "branch-1-1-highest-6", "branch-1-2-highest-8", "branch-2-1-highest-1",
        "branch-2-1-contributes-6", "branch-2-2-highest-8",
    }  # fmt: skip
    for name, colour in (("fused-highest-68", theme.red), ("branch-2-1-contributes-6", theme.green)):
        assert colour in next(element(root, f"c-{name}").iter("{http://www.w3.org/2000/svg}path")).get("style")


def test_the_caption_says_how_the_filter_was_chosen_only_when_a_rule_chose_it():
    assert "chosen by a rule" in figures.complementary_figure(found()).get_label()
    assert "rule" not in figures.complementary_figure(found(picked=False)).get_label()


def test_classes_that_are_no_numbers_have_one_plot_a_branch():
    names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    figure = figures.complementary_figure(dataclasses.replace(found(digits=1), names=names))
    assert len(figure.axes) == 3
    assert "ship" in words(ET.fromstring(figures.svg(figure)))


def test_a_difference_is_filled_where_its_interval_leaves_out_zero():
    figure = figures.differences_figure(CELLS)
    panel = next(axes for axes in figure.axes if axes.get_title() == "DCL-A3S")
    dots = [line for line in panel.lines if line.get_marker() == "o"]
    assert {line.get_markerfacecolor() for line in dots} == {canvas.LIGHT.page}
    panel = next(axes for axes in figure.axes if axes.get_title() == "DCL-A2")
    assert {line.get_markerfacecolor() for line in panel.lines if line.get_marker() == "o"} == {canvas.LIGHT.blue}
    papers = [line for line in panel.lines if line.get_marker() == "D"]
    assert [line.get_xdata()[0] for line in papers] == [-0.3] * 3
    assert {line.get_markerfacecolor() for line in papers} == {"none"}
    assert any(line.get_gid() == "zero-A2" for line in panel.lines)


def test_a_difference_without_interval_or_paper_is_a_hollow_dot():
    cell = {**CELLS[0], "low": None, "high": None, "paper_difference": None}
    axes = figures.differences_figure([cell]).axes[0]
    assert [line.get_marker() for line in axes.lines] == ["None", "o"]


def without(data, key):
    return {k: v for k, v in data.items() if k != key}


@pytest.mark.parametrize(
    ("draw", "words"),
    [
        (lambda: figures.filters_figure(without(FILTERS, "baseline")), "baseline is missing; give its errors"),
        (lambda: figures.filters_figure({**FILTERS, "points": []}), r"points is \[\]; give at least one point"),
        (lambda: figures.filters_figure({**FILTERS, "points": FILTERS["points"] * 2}), "must be different"),
        (
            lambda: figures.filters_figure({**FILTERS, "baseline": {"errors": [101]}}),
            r"baseline: errors is \[101\]; give at least one number, each from 0 to 100",
        ),
        (lambda: figures.filters_figure({**FILTERS, "baseline": {"errors": [None]}}), r"errors is \[None\]; give"),
        (
            lambda: figures.curves_figure({"set": "s", "series": {}}),
            "series is {}; give the losses of at least one network",
        ),
        (
            lambda: figures.curves_figure({"set": "s", "series": {"A2": {"train_loss": [[1.0]]}}}),
            "A2: test_loss is missing",
        ),
        (
            lambda: figures.curves_figure({"set": "s", "series": {"A2": {"train_loss": [[1.0, float("nan")]]}}}),
            "give a list of finite numbers for each seed",
        ),
        (
            lambda: figures.curves_figure({"set": "s", "series": {"A2": {"train_loss": [[1.0], [1.0, 2.0]]}}}),
            "seeds of 1 and 2 epochs",
        ),
        (lambda: figures.differences_figure([]), "no cells"),
        (lambda: figures.differences_figure([CELLS[0], CELLS[0]]), "II-01 A2: the cell is there twice"),
        (lambda: figures.differences_figure([{**CELLS[0], "low": None}]), "give both, or None for both"),
        (lambda: figures.differences_figure([{**CELLS[0], "low": 0.0}]), "outside of its interval"),
        (lambda: figures.differences_figure([without(CELLS[0], "high")]), "II-01 A2: high is missing"),
    ],
)
def test_bad_input_is_named_with_its_place(draw, words):
    with pytest.raises(ValueError, match=words):
        draw()


def test_another_ending_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"\.svg, \.pdf or \.png"):
        figures.save(DRAW["filters"](), tmp_path / "figure.jpg")
    with pytest.raises(FileNotFoundError, match="create it"):
        figures.save(DRAW["filters"](), tmp_path / "none" / "figure.svg")


def test_drawing_leaves_the_settings_of_matplotlib_alone():
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    figures.svg(DRAW["curves"]())
    assert dict(mpl.rcParams) == before


@pytest.mark.slow
def test_the_import_loads_no_matplotlib():
    program = (
        f"import json, sys; sys.path[:0] = [{str(Path(torch_dcl.__file__).parent.parent)!r}]; "
        "import torch_dcl.report.figures; "
        "print(json.dumps([m for m in sys.modules if m.startswith('matplotlib')]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
