import pytest
import torch
import torchvision
from torch import nn
from torchvision.models import _api
from torchvision.models.vgg import VGG, make_layers
from torchvision.utils import save_image

import torch_dcl
from torch_dcl.convert import measure
from torch_dcl.data import mnist_excerpt

NETS = """
from torch import nn

def make():
    return nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(64, 10),
    )
"""
CFG = [8, 8, "M", 16, 16, "M", 32, 32, 32, "M", 64, 64, 64, "M", 64, 64, 64, "M"]


def narrow_vgg16(*, weights=None, **_):
    """VGG-16 with an eighth of its channels, and the names of its layers: the whole one has 138 million weights."""
    del weights
    model = VGG(make_layers(CFG, batch_norm=False), init_weights=False)
    model.classifier = nn.Sequential(
        nn.Linear(64 * 7 * 7, 256), nn.ReLU(True), nn.Dropout(),
        nn.Linear(256, 256), nn.ReLU(True), nn.Dropout(), nn.Linear(256, 1000),
    )  # fmt: skip
    return model


def made_up_weights(weights, **_):
    """In place of what torchvision would download: the weights of a freshly made network of that kind."""
    models = torchvision.models
    name = next(name for name in models.list_models() if models.get_model_weights(name) is type(weights))
    return models.get_model(name, weights=None).state_dict()


@pytest.fixture
def without_downloads(monkeypatch):
    """No snippet reaches the network: torchvision's weights are made up. Its VGG-16 is narrow, timings short."""

    def refuse(*_, **__):
        raise AssertionError("a snippet tried to download")

    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    monkeypatch.setattr(_api.WeightsEnum, "get_state_dict", made_up_weights)
    monkeypatch.setattr(torchvision.models, "vgg16", narrow_vgg16)
    monkeypatch.setitem(_api.BUILTIN_MODELS, "vgg16", narrow_vgg16)
    monkeypatch.setattr(measure, "SECONDS", 1e-4)  # latencies may be rough here, and need not take long


def write_idx(path, values):
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    path.write_bytes(bytes([0, 0, 8, values.dim()]) + sizes + values.to(torch.uint8).numpy().tobytes())


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder to stand in, with what a reader is told to have: images, a network, MNIST. No colours, no other data."""
    monkeypatch.chdir(tmp_path)
    for name in ("TORCH_DCL_DATA", "RANK", "WORLD_SIZE", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_COLOR", "1")
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "net.py").write_text("from torch_dcl.models import lenet\n\ndef make():\n    return lenet(10)\n")
    model = torch_dcl.models.lenet(10)
    torch_dcl.convert_(model, torch_dcl.plan(model, (1, 28, 28)).only("fc1"), init="random")
    torch_dcl.save_model(model, tmp_path / "net.safetensors")
    (tmp_path / "mnist").mkdir()
    for split, file in (("train", "train"), ("test", "t10k")):
        images, labels = mnist_excerpt(split)
        write_idx(tmp_path / "mnist" / f"{file}-images-idx3-ubyte", images)
        write_idx(tmp_path / "mnist" / f"{file}-labels-idx1-ubyte", labels)
    images, labels = mnist_excerpt("train")
    for split, first, count in (("train", 0, 10), ("val", 10, 5), ("test", 15, 5)):
        for digit in range(10):
            folder = tmp_path / "my-images" / split / f"digit {digit}"
            folder.mkdir(parents=True)
            for i, image in enumerate(images[labels == digit][first : first + count]):
                save_image(image / 255, folder / f"{i}.png")
    return tmp_path
