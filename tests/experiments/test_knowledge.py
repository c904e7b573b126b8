"""What filters of any network answer to, on any labelled images."""

import dataclasses
import json
import math

import pytest
import torch
from torch import nn

import torch_dcl as dcl
from torch_dcl.data import Dataset
from torch_dcl.experiments.complementary import complementary
from torch_dcl.experiments.recipes import knowledge
from torch_dcl.experiments.recipes.knowledge import Knowledge, KnowledgeConfig, as_inputs, digits_of_classes
from torch_dcl.experiments.run_reader import read_run
from torch_dcl.experiments.runner import run
from torch_dcl.experiments.settings import SettingError
from torch_dcl.fleet.run_folder import RunError
from torch_dcl.report import draw_run, report


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


@pytest.fixture
def look(network, data, tmp_path, monkeypatch):
    """Run the recipe on the network and the images: `look(layers=("fc",))` gives its result."""
    (tmp_path / "net.safetensors").write_bytes(b"the weights")
    monkeypatch.setattr(knowledge, "find_model", lambda _: (network, None))
    monkeypatch.setattr(knowledge, "load_model", lambda model, _: model)
    shown = [data]
    monkeypatch.setattr(knowledge, "load", lambda _, **__: shown[0])

    def go(resume=False, images_of=None, **settings):
        shown[0] = images_of or data
        config = KnowledgeConfig(network="Net", weights=str(tmp_path / "net.safetensors"), data="shapes", **settings)
        return run(Knowledge(config), tmp_path / "run", resume=resume)

    return go


def test_it_looks_at_every_dcl_layer_and_draws_what_complementary_finds(look, network, data, tmp_path):
    stored = look(mean=(0.5,), std=(0.25,)).result["networks"]
    assert [entry["layer"] for entry in stored.values()] == ["conv", "fc"]
    shown = (data.test_images.float() / 255 - 0.5) / 0.25
    for entry in stored.values():
        expected = complementary(network, entry["layer"], None, shown, data.test_labels, 1, data.classes)
        assert (entry["filter"], entry["picked"]) == (expected.filter, True)
        assert entry["fused"] == pytest.approx(expected.fused.tolist(), rel=1e-6)
    assert list(stored) == [f"{entry['layer']}-{entry['filter']}" for entry in stored.values()]
    assert json.loads((tmp_path / "run" / "knowledge.json").read_text())["networks"] == stored
    assert draw_run(tmp_path / "run") == [f"knowledge-{name}.svg" for name in stored]


def test_filters_can_be_named_and_only_some_images_shown(look):
    stored = look(layers=("fc",), filters=(63, 3), images=7).result["networks"]
    assert list(stored) == ["fc-3", "fc-63"]
    assert {entry["images"] for entry in stored.values()} == {7}
    assert not any(entry["picked"] for entry in stored.values())


def test_a_run_of_it_is_finished_and_has_a_report(look, monkeypatch, tmp_path):
    look(layers=("fc",), filters=(0,))
    monkeypatch.setattr(knowledge, "complementary", lambda *_: pytest.fail("computed again"))
    assert look(layers=("fc",), filters=(0,), resume=True).complete
    found = read_run(tmp_path / "run")
    assert (found.state.state, found.state.unit, found.state.total) == ("finished", "filters", 1)
    assert math.isnan(found.outcomes[0].error)  # nothing was judged
    page = report([found])
    assert "Net on shapes, fc, filter 0" in page
    assert "square &lt;b&gt;" in page
    assert "<b>" not in page.split("<main>")[1].replace("<b>0", "")


def test_other_images_or_weights_are_refused(look, data, tmp_path):
    look(layers=("fc",), filters=(0,))
    images = data.test_images.clone()
    images[0, 0, 0, 0] ^= 1
    with pytest.raises(RunError, match=r"sha256\.images: .* then, .* now"):
        look(resume=True, layers=("fc",), filters=(0,), images_of=dataclasses.replace(data, test_images=images))
    (tmp_path / "net.safetensors").write_bytes(b"other weights")
    with pytest.raises(RunError, match=r"sha256\.weights: .* then, .* now"):
        look(resume=True, layers=("fc",), filters=(0,))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"layers": ("fc1",)}, "Net has no DCL layer 'fc1'; known are conv, fc"),
        ({"layers": ("fc",), "filters": (64,)}, "filters 0 to 63, not 64"),
        ({"mean": (0.1, 0.2)}, "mean has 2 numbers, the images have 3 channels"),
    ],
)
def test_an_invalid_setting_is_refused_before_anything_is_written(look, tmp_path, settings, told):
    with pytest.raises(SettingError, match=told):
        look(**settings)
    assert not (tmp_path / "run").exists()


def test_a_divisor_of_zero_is_refused():
    with pytest.raises(SettingError, match="std must be above 0, not 0"):
        KnowledgeConfig(std=(0.0,))


def test_images_of_another_size_and_networks_without_dcl_are_refused(look, data, monkeypatch):
    cut = {"train_images": data.train_images[:, :, :5], "test_images": data.test_images[:, :, :5]}
    small = dataclasses.replace(data, name="small", **cut)
    with pytest.raises(SettingError, match="Net does not take images of small"):
        look(layers=("fc",), images_of=small)
    monkeypatch.setattr(knowledge, "find_model", lambda _: (Net(), None))
    with pytest.raises(SettingError, match="has no DCL layer; convert it first"):
        look()


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
    assert digits_of_classes(classes) == digits


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_normalised_channel_by_channel(channels):
    images = torch.arange(2 * channels * 4, dtype=torch.uint8).view(2, channels, 2, 2) * 9
    mean, std = [0.1, 0.2, 0.3][:channels], [0.5, 0.25, 2.0][:channels]
    made = as_inputs(images, mean, std)
    for c in range(channels):
        slow = (images[:, c].double() / 255 - mean[c]) / std[c]
        torch.testing.assert_close(made[:, c].double(), slow, rtol=1e-5, atol=1e-6)
    assert torch.equal(as_inputs(images), images.float() / 255)
