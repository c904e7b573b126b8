"""Recipes as TOML: printed, edited, run again."""

import json
import tomllib

import pytest

from torch_dcl.cli.recipes import ABOUT, as_toml, read_recipe, recipe, with_settings


@pytest.mark.parametrize("name", ABOUT)
@pytest.mark.parametrize("smoke", [False, True])
def test_what_is_printed_can_be_read_again(tmp_path, name, smoke):
    given = recipe(name, smoke=smoke)
    path = tmp_path / "recipe.toml"
    path.write_text(as_toml(given))
    assert tomllib.loads(path.read_text())["recipe"] == name
    assert read_recipe(path) == given


def test_ls_prints_a_recipe_that_can_be_edited(dcl, folder):
    text = dcl("ls", "table1")
    assert "# passes over a set\nepochs = 24" in text
    (folder / "mine.toml").write_text(text.replace("epochs = 24", "epochs = 3"))
    shown = json.loads(dcl("ls", "mine.toml", "--json"))
    assert (shown["recipe"], shown["epochs"], shown["seeds"]) == ("table1", 3, 5)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("epochs = 3", 'recipe = "table1"'),
        ('recipe = "tabel"', "'tabel'"),
        ('recipe = "table1"\nepoch = 3', "did you mean epochs?"),
        ('recipe = "table1"\nepochs = "many"', "a whole number"),
        ('recipe = "table1"\nepochs = 2.5', "a whole number"),
        ('recipe = "table1"\nsets = ["II-99"]', "did you mean"),
        ('recipe = "table1"\nepochs = ', "not TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(dcl, folder, text, told):
    (folder / "mine.toml").write_text(text)
    shown = dcl("run", "mine.toml", "--dry-run", code=2)
    assert "mine.toml" in shown
    assert told in shown


def test_settings_take_the_type_of_the_default():
    made = with_settings(recipe("table1"), {"sets": "II-02,II-01", "drops": "0.5", "factor": "0.2", "seeds": "7"})
    assert made["sets"] == ["MNIST-II-01", "MNIST-II-02"]
    assert (made["drops"], made["factor"], made["seeds"]) == ([0.5], 0.2, 7)


def test_a_text_with_quotes_survives(tmp_path):
    path = tmp_path / "recipe.toml"
    given = with_settings(recipe("table1"), {"data": 'a "b" \\ c'})
    path.write_text(as_toml(given))
    assert read_recipe(path) == given
