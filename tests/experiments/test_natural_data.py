"""The images of Table 2: found, absent, cut short, or generated."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.data.test_sources import write_cifar

from torch_dcl.data import load
from torch_dcl.experiments.natural_data import (
    MADE_UP,
    NOT_AVAILABLE,
    NaturalConfig,
    departures,
    generate_images,
    read_sets,
)
from torch_dcl.experiments.natural_networks import DATA
from torch_dcl.experiments.recipes.chart import hold_out


@given(st.sampled_from(DATA), st.integers(1, 60), st.integers(1, 30))
def test_generated_images_are_the_same_every_time_and_of_the_right_form(name, train, test):
    found, again = generate_images(name, train, test), generate_images(name, train, test)
    assert torch.equal(found.train_images, again.train_images)
    assert found.train_images.shape == (train, 3, 32, 32)
    assert found.test_images.shape == (test, 3, 32, 32)
    assert len(found.classes) == (100 if name == "cifar100" else 10)
    assert f"synthetic images, {train} + {test}" in found.source


def test_images_of_a_class_resemble_each_other_more_than_those_of_others():
    data = generate_images("cifar10", 100, 10)
    images = data.train_images.double().flatten(1)
    apart = torch.cdist(images, images)
    same = data.train_labels[:, None] == data.train_labels
    assert apart[same & ~torch.eye(100, dtype=torch.bool)].max() < apart[~same].min()


def test_of_few_generated_images_a_tenth_can_be_kept_apart():
    (train, _), (judge, _) = hold_out(generate_images("cifar100", 20, 10))
    assert (len(train), len(judge)) == (18, 2)


def test_a_word_in_place_of_a_folder_asks_for_generated_images():
    lines = []
    config = NaturalConfig(root=MADE_UP, train_images=12, test_images=4)
    found, absent = read_sets(["cifar10", "svhn"], config, lines.append)
    assert absent == {}
    assert {name: len(data.train_labels) for name, data in found.items()} == {"cifar10": 12, "svhn": 12}
    assert all(line.startswith("synthetic images, 12 + 4") for line in lines)


@pytest.mark.parametrize(("images", "counts"), [((3, 2), (3, 2)), ((None, 2), (20, 2)), ((7, None), (7, 4))])
def test_the_first_images_are_taken_and_counted(tmp_path, images, counts):
    write_cifar(tmp_path / "cifar-10-batches-bin", "cifar10")
    whole = load("cifar10", root=tmp_path)
    lines = []
    config = NaturalConfig(root=str(tmp_path), train_images=images[0] or 0, test_images=images[1] or 0)
    found, absent = read_sets(["cifar10", "svhn"], config, lines.append)
    data = found["cifar10"]
    assert (len(data.train_labels), len(data.test_labels)) == counts
    assert torch.equal(data.train_images, whole.train_images[: counts[0]])
    assert data.source.endswith(f"of which the first {counts[0]} and {counts[1]}")
    assert absent == {"svhn": NOT_AVAILABLE}
    assert lines[1].startswith(f"svhn: {NOT_AVAILABLE}; svhn was not found in {tmp_path}; put train_32x32.mat")
    assert "download" not in lines[1]


def test_what_departs_from_the_protocol_is_said():
    assert departures(["CIFAR-10 in a folder"], None, []) == []
    for source in ("synthetic images, 4 + 2", "made-up images, 4 + 2"):  # the second by an earlier version
        assert "The images are synthetic" in departures([source], (4, 2), [])[0]
    assert departures(["CIFAR-10"], (100, None), [5, 7, 5]) == [
        "Of each set the first 100 images were trained on, and all tested with.",
        "Batches of 5, 7 images instead of the recipe's.",
    ]
