"""The sets as the protocol uses them: nothing of the test set, and nothing to judge with, is ever trained on."""

import itertools

import pytest
import torch

from torch_dcl.data.digits import generate, segment
from torch_dcl.data.layouts import LAYOUTS, Digit, Layout
from torch_dcl.experiments import digits as digitsets
from torch_dcl.experiments.digits import Digits, make_sets, read_mnist

MNIST = read_mnist(None)


def marked(learn, judge, test):
    """Digits that are boxes of one grey for each of the three parts."""

    def boxes(greys):
        images = torch.zeros(len(greys), 28, 28, dtype=torch.uint8)
        images[:, 4:24, 4:24] = torch.tensor(greys, dtype=torch.uint8)[:, None, None]
        return images, torch.arange(len(greys)) % 10

    return Digits(boxes([learn] * 50 + [judge] * 10), boxes([test] * 10), "boxes")


def darkest(labelled):
    return labelled[0].flatten(1).amax(1)


@pytest.mark.parametrize("greys", list(itertools.permutations((80, 160, 240))))
@pytest.mark.parametrize("name", ["MNIST-II-01", "MNIST-III-04"])
def test_choosing_never_trains_on_digits_to_judge_with_nor_looks_at_the_test_set(name, greys):
    # An image is as dark as its darkest digit. Each part is once darker than each other, so no digit strays unseen.
    learn, judge, _ = greys
    sets = make_sets(marked(*greys), [name], "choose", images=(100, 100))
    for labelled, grey in ((sets.train[name], learn), (sets.judge[name], judge)):
        assert int(darkest(labelled).max()) <= 1.03 * grey  # weights of 8 bits add up to a little more or less
        assert int(darkest(labelled).min()) >= 0.95 * grey


@pytest.mark.parametrize("greys", [(80, 80, 240), (240, 240, 80)])
def test_reporting_trains_on_all_training_digits_and_judges_with_the_test_set(greys):
    sets = make_sets(marked(*greys), ["MNIST-II-01"], "report", images=(100, 100))
    for part, grey in ((sets.train, greys[0]), (sets.judge, greys[2])):
        assert all(0.95 * grey <= found <= 1.03 * grey for found in darkest(part["MNIST-II-01"]).tolist())


def test_the_first_five_sixths_are_trained_on_and_the_rest_judges():
    images, labels = MNIST.train
    assert len(images) == 6000
    sets = make_sets(MNIST, ["MNIST-III-10"], "choose", images=(30, 20))
    learn, judge = (images[:5000], labels[:5000]), (images[5000:], labels[5000:])
    for found, split, digits, count in ((sets.train, "train", learn, 30), (sets.judge, "test", judge, 20)):
        expected = generate("MNIST-III-10", split, seed=1, mnist=segment(digits, split), indices=range(count))
        assert all(torch.equal(a, b) for a, b in zip(found["MNIST-III-10"], expected, strict=True))


def test_the_sets_of_the_table_are_those_that_anyone_generates_with_seed_0():
    sets = make_sets(MNIST, LAYOUTS, "report", images=(20, 10))
    assert list(sets.train) == list(sets.judge) == list(LAYOUTS)
    for name in LAYOUTS:
        for found, split, count in ((sets.train, "train", 20), (sets.judge, "test", 10)):
            images, labels = generate(name, split, seed=0, mnist=None, indices=range(count))
            assert torch.equal(found[name][0], images)
            assert torch.equal(found[name][1], labels)


def test_images_are_the_first_ones_of_the_set():
    few, more = (make_sets(MNIST, ["MNIST-II-02"], "choose", images=count) for count in ((20, 10), (200, 100)))
    for a, b, (learn, judge) in ((few, more, (20, 10)),):
        assert torch.equal(a.train["MNIST-II-02"][0], b.train["MNIST-II-02"][0][:learn])
        assert torch.equal(a.judge["MNIST-II-02"][1], b.judge["MNIST-II-02"][1][:judge])


def test_without_a_count_the_whole_set_is_written(monkeypatch):
    asked = []
    monkeypatch.setattr(digitsets, "generate", lambda *_, indices, **__: asked.append(indices))
    make_sets(MNIST, ["MNIST-II-02"], "report")
    assert asked == [None, None]


def test_a_layout_of_ones_own_is_written_under_its_name():
    mine = Layout("mine", (Digit(0, 0),))
    sets = make_sets(MNIST, [mine], "report", images=(5, 5))
    assert list(sets.train) == ["mine"]
    assert torch.equal(sets.train["mine"][1], generate(mine, "train", indices=range(5))[1])


def test_the_excerpt_is_read_without_a_folder_and_says_so():
    assert MNIST.source == "the embedded excerpt of MNIST (6,000 training and 1,000 test digits)"
    assert (len(MNIST.train[0]), len(MNIST.test[0])) == (6000, 1000)


def test_an_unknown_set_is_an_error():
    with pytest.raises(KeyError, match="MNIST-IV-01"):
        make_sets(MNIST, ["MNIST-IV-01"], "report")


def test_digits_are_known_by_their_content_and_not_by_their_folder():
    digits = read_mnist(None)
    assert digits.sha256 == digits._replace(source="elsewhere").sha256
    images = digits.test[0].clone()
    images[3, 5, 5] ^= 1
    assert digits._replace(test=(images, digits.test[1])).sha256 != digits.sha256
