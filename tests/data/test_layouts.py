"""The declarations of the multi-digit sets, and the contact sheet that shows them."""

import dataclasses
import subprocess
import sys

import pytest

from torch_dcl.data.layouts import LAYOUTS, STRENGTHS, Digit, Layout, find_layout
from torch_dcl.data.sheet import contact_sheet


def test_there_are_the_fifteen_sets_of_the_paper():
    two, three = (f"MNIST-II-{k:02}" for k in range(1, 6)), (f"MNIST-III-{k:02}" for k in range(1, 11))
    assert list(LAYOUTS) == [*two, *three] == list(STRENGTHS)
    for name, layout in LAYOUTS.items():
        assert layout.name == name
        assert layout.classes == (100 if name.startswith("MNIST-II-") else 1000)
        assert layout.strength == STRENGTHS[name]
    assert len({layout.digits for layout in LAYOUTS.values()}) == 15


def test_random_variation_never_shrinks_with_the_id():
    for family in ("MNIST-II-", "MNIST-III-"):
        layouts = [layout for name, layout in LAYOUTS.items() if name.startswith(family)]
        for name in ("shift", "scale", "rotation", "noise"):
            declared = [getattr(layout, name) for layout in layouts]
            assert declared == sorted(declared)


def test_the_first_sets_are_plain_and_the_last_have_everything():
    assert LAYOUTS["MNIST-II-01"].upright
    last = LAYOUTS["MNIST-III-10"]
    assert not last.upright
    assert last.noise > 0
    assert any(digit.mirror for digit in last.digits)
    assert any(digit.scale != 1 for digit in last.digits)


def test_strength_multiplies_every_range():
    layout = Layout("x", (Digit(0, 0),), shift=0.1, scale=0.2, rotation=10, noise=40, strength=1.5)
    assert [layout.effective(name) for name in ("shift", "scale", "rotation", "noise")] == pytest.approx(
        [0.15, 0.3, 15, 60]
    )
    still = dataclasses.replace(layout, strength=0)
    assert [still.effective(name) for name in ("shift", "scale", "rotation", "noise")] == [0, 0, 0, 0]
    assert still.upright


@pytest.mark.parametrize(
    ("digit", "upright"),
    [(Digit(0, 0), True), (Digit(0, 0, rotation=360), True), (Digit(0, 0, rotation=1), False),
     (Digit(0, 0, mirror=True), False)],
)  # fmt: skip
def test_upright(digit, upright):
    assert Layout("x", (Digit(0, 0), digit)).upright is upright


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("MNIST-III-6", "did you mean 'MNIST-III-06'"),
        ("mnist-ii-05", "did you mean 'MNIST-II-05'"),
        ("II-03", "did you mean 'MNIST-II-03'"),
        ("cifar", "the sets are MNIST-II-01, "),
        (7, "the sets are MNIST-II-01, "),
    ],
)
def test_a_wrong_name_offers_the_nearest(name, hint):
    with pytest.raises(ValueError, match=f"there is no multi-digit set {name!r}; {hint}"):
        find_layout(name)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Digit(5, 0), "x of a digit must be between -4 and 4, not 5"),
        (lambda: Digit(0, float("nan")), "y of a digit must be between -4 and 4, not nan"),
        (lambda: Digit(0, 0, scale=0), "scale of a digit must be between 0.25 and 4, not 0"),
        (lambda: Digit(0, 0, rotation=400), "rotation of a digit must be between -360 and 360 degrees, not 400"),
        (lambda: Layout("x", ()), "layout 'x' has 0 digits, it needs one to three"),
        (lambda: Layout("x", (Digit(0, 0),), strength=-1), "strength of layout 'x' must not be negative, it is -1"),
        (
            lambda: Layout("x", (Digit(0, 0),), noise=100, strength=2),
            "noise of layout 'x' times its strength must be between 0 and 128, it is 200; lower noise or the strength",
        ),
        (lambda: Layout("x", (Digit(0, 0),)).effective("size"), "'size' is no range of a layout; the ranges are shift"),
    ],
)
def test_a_wrong_declaration_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.slow
def test_importing_loads_neither_matplotlib_nor_torchvision():
    program = (
        "import sys, torch_dcl.data.sheet, torch_dcl.data.digits\n"
        "print([name for name in ('matplotlib', 'torchvision', 'PIL', 'scipy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# The contact sheet


def test_a_sheet_shows_every_set(tmp_path):
    contact_sheet(tmp_path / "sheet.svg", samples=1)
    text = (tmp_path / "sheet.svg").read_text()
    for name in LAYOUTS:
        assert f"<!-- {name} -->" in text
    assert "embedded excerpt of MNIST" in text


def test_a_picture_is_the_same_every_time(tmp_path):
    layouts = [LAYOUTS["MNIST-II-05"]]
    for name in ("a.png", "b.png"):
        contact_sheet(tmp_path / name, samples=3, layouts=layouts)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png"]


@pytest.mark.parametrize(
    ("name", "samples", "error", "message"),
    [
        ("sheet.txt", 3, ValueError, r"must end in \.png, \.svg or \.pdf, got .*sheet\.txt"),
        ("sheet.png", 0, ValueError, "samples must be at least 1, not 0"),
        ("missing/sheet.png", 1, FileNotFoundError, r"the folder .*missing does not exist; create it"),
    ],
)
def test_wrong_arguments_are_named(tmp_path, name, samples, error, message):
    with pytest.raises(error, match=message):
        contact_sheet(tmp_path / name, samples=samples, layouts=[LAYOUTS["MNIST-II-01"]])
    assert list(tmp_path.iterdir()) == []
