"""Recipes as TOML: printed, edited, run again."""

import dataclasses
import json
import shlex
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dcl.cli.config import ABOUT, as_toml, make_task, read_recipe, read_settings, recipe
from torch_dcl.cli.config import with_settings as change
from torch_dcl.cli.console import UsageError
from torch_dcl.experiments.columns import MODELS, choice_as_plain, stored_choice
from torch_dcl.experiments.paper_numbers import SETS
from torch_dcl.experiments.recipes.table1 import command_for


def with_settings(asked, settings):
    return change(asked, settings).config


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
    assert made.sets == ("MNIST-II-01", "MNIST-II-02")
    assert (made.drops, made.factor, made.seeds) == ((0.5,), 0.2, 7)


def test_a_file_with_a_byte_order_mark_is_read(tmp_path):
    (tmp_path / "x.toml").write_text('recipe = "table1"\nepochs = 3\n', encoding="utf-8-sig")
    assert read_recipe(tmp_path / "x.toml").config.epochs == 3


@pytest.mark.parametrize(
    ("name", "pair"),
    [("chart", "rates=0.03,0.01,0.03"), ("chart", "shares=0.25,0.25"), ("deep", "rates=0.1,0.1"),
     ("sort-of-clevr", "rates=0.02,0.02"), ("relations", "rates=0.04,0.04"), ("calibration", "lengths=12,12")],
)  # fmt: skip
def test_what_is_tried_twice_counts_once(name, pair):
    settings = read_settings([pair])
    key, value = next(iter(settings.items()))
    once = {key: ",".join(dict.fromkeys(value.split(",")))}
    assert change(recipe(name), settings) == change(recipe(name), once)


def test_a_text_with_quotes_survives(tmp_path):
    path = tmp_path / "recipe.toml"
    given = change(recipe("table1"), {"data": 'a "b" \\ c\n\td'})
    path.write_text(as_toml(given))
    assert read_recipe(path) == given


def some(names):
    """Some of them, at least one, in their order."""
    return st.sets(st.sampled_from(names), min_size=1).map(lambda chosen: [name for name in names if name in chosen])


runs = st.fixed_dictionaries(
    {
        "seeds": st.integers(1, 50),
        "schedule": st.fixed_dictionaries(
            {
                "epochs": st.integers(1, 100),
                "warmup": st.integers(0, 1000),
                "drops": st.lists(st.sampled_from([0.2, 0.5, 0.6, 0.9]), unique=True).map(sorted),
                "factor": st.sampled_from([0.1, 0.25]),
            }
        ),
        "batch": st.integers(1, 500),
        "precision": st.sampled_from([None, "bfloat16", "float32", "float64"]),
        "images": st.none() | st.tuples(st.integers(500, 60_000), st.integers(1, 10_000)).map(list),
        "digits": st.sampled_from(["the embedded excerpt of MNIST", "MNIST in a folder"]),
        "choice": st.sampled_from([choice_as_plain(stored_choice(), ["A2"]), {"A2": {"2": {"lr": 0.5, "clip": None}}}]),
    }
)


@given(runs, some(list(SETS)), some(list(MODELS)))
def test_the_command_of_a_table_asks_for_the_settings_of_its_run(run, sets, models):
    words = shlex.split(command_for(run, sets, models))
    assert words[:3] == ["dcl", "run", "table1"]
    options = list(zip(words[3::2], words[4::2], strict=True))
    settings = {name.removeprefix("--"): value for name, value in options if name != "--set"}
    settings |= read_settings([value for name, value in options if name == "--set"])
    made = with_settings(recipe("table1"), settings)
    assert (list(made.sets), list(made.models), made.seeds) == (sets, models, run["seeds"])
    assert dataclasses.asdict(made.schedule) == {**run["schedule"], "drops": tuple(run["schedule"]["drops"])}
    assert made.batch == run["batch"]
    assert made.precision == (run["precision"] or "auto")
    assert [made.train_images, made.test_images] == (run["images"] or [0, 0])
    assert made.data == ("excerpt" if "embedded" in run["digits"] else "auto")
    assert made.choice == ("search.json" if run["choice"]["A2"]["2"]["lr"] == 0.5 else "")


@given(st.sampled_from(list(ABOUT)), st.data())
def test_any_filters_and_layers_survive_the_file(tmp_path_factory, name, data):
    settings = {}
    if name in ("figures", "knowledge"):
        settings["filters"] = data.draw(st.lists(st.integers(1, 500), min_size=1))
    if name == "knowledge":
        settings["layers"] = data.draw(st.lists(st.from_regex(r"[a-z][a-z0-9.]{0,8}", fullmatch=True)))
        settings["mean"] = data.draw(st.lists(st.floats(-1, 1)))
    given = change(recipe(name), settings)
    path = tmp_path_factory.mktemp("toml") / "recipe.toml"
    path.write_text(as_toml(given))
    assert read_recipe(path) == given


def test_the_home_folder_in_a_setting_is_expanded_and_other_texts_are_not(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    given = ["weights=~/net.safetensors", "network=~/net.py:make", "root=./cifar10", "data=cifar10"]
    assert read_settings(given) == {
        "weights": "/home/me/net.safetensors", "network": "/home/me/net.py:make", "root": "./cifar10",
        "data": "cifar10",
    }  # fmt: skip


def test_a_setting_given_twice_as_an_option_and_by_its_name_is_refused():
    with pytest.raises(UsageError, match="--seeds and --set seeds= are the same setting; give one of them"):
        make_task("table1", {"seeds": 1, "epochs": None}, ["epochs=3", "seeds=2"], dry=True)
