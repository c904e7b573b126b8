"""What filters of any network answer to, on any labelled images."""

import json

import pytest
import torch
from torch import nn

import torch_dcl as dcl
from torch_dcl.data import Dataset
from torch_dcl.experiments.complementary import complementary
from torch_dcl.experiments.looking import as_taken, digits_of, look_at
from torch_dcl.experiments.run_reader import read_run
from torch_dcl.report.page import report


class Net(nn.Module):
    """A convolution and a linear layer, both converted."""

    def __init__(self):
        super().__init__()
        self.conv, self.relu = nn.Conv2d(3, 24, 3), nn.ReLU()
        self.flat, self.fc, self.last = nn.Flatten(), nn.Linear(24 * 36, 64), nn.Linear(64, 3)

    def forward(self, x):
        return self.last(self.relu(self.fc(self.flat(self.relu(self.conv(x))))))


@pytest.fixture
def network():
    torch.manual_seed(0)
    model = Net()
    dcl.convert_(model, dcl.plan(model, (3, 8, 8)).only("conv", "fc"), init="random")
    return model


@pytest.fixture
def data():
    made = torch.Generator().manual_seed(1)
    images = torch.randint(256, (40, 3, 8, 8), dtype=torch.uint8, generator=made)
    labels = torch.randint(3, (40,), generator=made)
    return Dataset("shapes", images, labels, images, labels, ("disc", "square <b>", "star"), "made up")


RECIPE = {"recipe": "knowledge", "network": "Net"}


def test_it_looks_at_every_dcl_layer_and_draws_what_complementary_finds(network, data, tmp_path):
    layers = []
    names = look_at(tmp_path / "run", RECIPE, network, data, mean=(0.5,), std=(0.25,), on_layer=layers.append)
    assert layers == ["conv", "fc"]
    stored = json.loads((tmp_path / "run" / "knowledge.json").read_text())["networks"]
    assert names == [f"knowledge-{name}.svg" for name in stored]
    shown = (data.test_images.float() / 255 - 0.5) / 0.25
    for layer, entry in zip(layers, stored.values(), strict=True):
        expected = complementary(network, layer, None, shown, data.test_labels, 1, data.classes)
        assert (entry["layer"], entry["filter"], entry["picked"]) == (layer, expected.filter, True)
        assert entry["fused"] == pytest.approx(expected.fused.tolist(), rel=1e-6)
    assert list(stored) == [f"{entry['layer']}-{entry['filter']}" for entry in stored.values()]


def test_filters_can_be_named_and_only_some_images_shown(network, data, tmp_path):
    look_at(tmp_path / "run", RECIPE, network, data, layers=["fc"], filters=[3, 63], images=7)
    stored = json.loads((tmp_path / "run" / "knowledge.json").read_text())["networks"]
    assert list(stored) == ["fc-3", "fc-63"]
    assert {entry["images"] for entry in stored.values()} == {7}
    assert not any(entry["picked"] for entry in stored.values())


def test_a_run_of_it_is_finished_and_has_a_report(network, data, tmp_path):
    path = tmp_path / "run"
    look_at(path, RECIPE, network, data, layers=["fc"], filters=[0])
    assert look_at(path, RECIPE, network, data, resume=True) == []
    assert read_run(path).state.state == "finished"
    page = report([path])
    assert "Net on shapes, fc, filter 0" in page
    assert "square &lt;b&gt;" in page
    assert "<b>" not in page.split("<main>")[1].replace("<b>0", "")


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"layers": ["fc1"]}, KeyError, "did you mean 'fc'"),
        ({"layers": ["fc"], "filters": [64]}, IndexError, "filters 0 to 63, not 64"),
        ({"mean": (0.1, 0.2)}, ValueError, "mean has 2 numbers, the images have 3 channels"),
        ({"std": (0.0,)}, ValueError, "std must be above 0"),
    ],
)
def test_what_cannot_be_meant_is_refused(network, data, tmp_path, options, error, told):
    with pytest.raises(error) as caught:
        look_at(tmp_path / "run", RECIPE, network, data, **options)
    assert told in str(caught.value.args[0])


def test_images_of_another_size_and_networks_without_dcl_are_refused(network, data, tmp_path):
    small = Dataset("small", data.train_images[:, :, :5], data.train_labels, data.test_images[:, :, :5],
                    data.test_labels, data.classes, "made up")  # fmt: skip
    with pytest.raises(ValueError, match="Net does not take images of small"):
        look_at(tmp_path / "run", RECIPE, network, small, layers=["fc"])
    with pytest.raises(ValueError, match="has no DCL layer; convert it first"):
        look_at(tmp_path / "other", RECIPE, Net(), data)


@pytest.mark.parametrize(
    ("classes", "digits"),
    [
        ([f"{n:02d}" for n in range(100)], 2),
        ([f"{n:03d}" for n in range(1000)], 3),
        ([str(n) for n in range(10)], 1),
        ([f"{n:02d}" for n in range(99)], 1),
        ([f"{n:02d}" for n in reversed(range(100))], 1),
        (["cat", "dog"], 1),
    ],
)
def test_numbers_are_known_by_the_names_of_their_classes(classes, digits):
    assert digits_of(classes) == digits


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_normalised_channel_by_channel(channels):
    images = torch.arange(2 * channels * 4, dtype=torch.uint8).view(2, channels, 2, 2) * 9
    mean, std = [0.1, 0.2, 0.3][:channels], [0.5, 0.25, 2.0][:channels]
    made = as_taken(images, mean, std)
    for c in range(channels):
        slow = (images[:, c].double() / 255 - mean[c]) / std[c]
        torch.testing.assert_close(made[:, c].double(), slow, rtol=1e-5, atol=1e-6)
    assert torch.equal(as_taken(images), images.float() / 255)
