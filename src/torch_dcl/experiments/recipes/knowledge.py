"""What the filters of your own converted network respond to, on your own labelled images.

Section 4.1.4 for any network and data, without training; a job is one filter of one DCL layer.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_dcl.convert.checkpoint import load_model
from torch_dcl.data import Dataset, load
from torch_dcl.experiments.complementary import as_plain, complementary, dcl_layers
from torch_dcl.experiments.network_source import find_model
from torch_dcl.experiments.protocol import Estimate, Job, Outcome, Recipe, RunFolder, Shown, Workload, content_hash
from torch_dcl.experiments.runner import outcomes_of
from torch_dcl.experiments.settings import Config, SettingError, reading_data, setting
from torch_dcl.files import sha256_file

__all__ = ["Knowledge", "KnowledgeConfig", "as_inputs", "digits_of_classes"]

CHOSEN = -1.0
"""In place of a filter: the one that `complementary.pick_filter` chooses."""
NEEDED = {
    "network": "such as torchvision:vgg16 or mine.py:make",
    "weights": "the file that torch_dcl.save_model wrote",
    "data": "such as folder:images or prepared:data/digits/MNIST-II-05.safetensors",
}


@dataclasses.dataclass(frozen=True)
class KnowledgeConfig(Config):
    """The settings of the responses of a network's filters."""

    network: str = setting(
        "", "the plain network: torchvision:NAME, timm:NAME, module:function or file.py:function", code=True
    )
    weights: str = setting("", "the file that torch_dcl.save_model wrote")
    data: str = setting("", "labelled images: mnist, cifar10, folder:PATH, prepared:PATH, ...")
    layers: tuple[str, ...] = setting((), "DCL layers by name; none for all")
    filters: tuple[int, ...] = setting(
        (), "filters, counted from 0; none for one a layer, chosen by a rule", of=int, least=0, longest=10_000
    )
    images: int = setting(0, "the first test images alone; 0 for all", smoke=50, least=0)
    size: int = setting(0, "for folder:PATH, height and width to resize to; 0 for as they are", least=0, most=100_000)
    mean: tuple[float, ...] = setting((), "what to subtract from each channel, in units of 255; none for 0", of=float)
    std: tuple[float, ...] = setting((), "what to divide each channel by; none for 1", of=float, above=0)
    device: str = setting("auto", 'cpu, cuda, or "auto"', machine=True)


class Knowledge(Recipe[KnowledgeConfig]):
    """One filter of each DCL layer, or those that are named."""

    name = "knowledge"
    unit = "filters"
    config_type = KnowledgeConfig
    model: nn.Module
    data: Dataset

    def about(self, loads: Sequence[Workload]) -> Estimate:
        """What is measured; it takes one pass over the images for each filter."""
        self.prepare(lambda _: None)
        return super().about(loads)

    def prepare(self, report: Callable[[str], None]) -> None:
        """Load network and images, and check that they fit each other and the settings."""
        config = self.config
        for key, example in NEEDED.items():
            if not getattr(config, key):
                raise SettingError(f"the recipe knowledge needs {key}; give --set {key}=… ({example})")
        network, _ = find_model(config.network)
        size: dict[str, Any] = {"size": config.size} if config.size else {}
        with reading_data():
            self.model = load_model(network, config.weights).to(self.device)
            self.data = load(config.data, **size)
        report(f"Shown: {self.data}")
        kind, layers = type(self.model).__name__, dcl_layers(self.model)
        if not layers:
            raise SettingError(f"{kind} has no DCL layer; convert it first, with torch_dcl.convert_")
        self.layers = list(config.layers or layers)
        for name in self.layers:
            if name not in layers:
                raise SettingError(f"{kind} has no DCL layer {name!r}", name, list(layers))
            count = layers[name].fusion.weight.shape[1]
            for number in config.filters:
                if number >= count:
                    raise SettingError(f"layer {name!r} has filters 0 to {count - 1}, not {number}")
        try:
            with torch.no_grad():
                self.model.eval()(self._inputs(1).to(self.device))
        except RuntimeError as error:
            message = f"{kind} does not take images of {self.data.name} ({str(error).splitlines()[0]})"
            raise SettingError(f"{message}; give data of its size") from error

    def _inputs(self, count: int | None = None) -> Tensor:
        dtype = next((p.dtype for p in self.model.parameters()), torch.float32)
        count = count or self.config.images or None
        return as_inputs(self.data.test_images[:count], self.config.mean, self.config.std).to(dtype)

    def asked(self) -> dict[str, Any]:
        """The settings, and the content of weights and images."""
        shown = content_hash([self.data.test_images, self.data.test_labels])
        weights = sha256_file(self.config.weights)
        return {**super().asked(), "data": self.data.source, "sha256": {"weights": weights, "images": shown}}

    def jobs(self, outcomes: Mapping[Job, Outcome]) -> list[Job]:
        filters = sorted(set(map(float, self.config.filters))) or [CHOSEN]
        return [
            Job(layer, self.data.name, 0, 0.0, options=(("filter", number),))
            for layer in self.layers
            for number in filters
        ]

    def compute(self, jobs: Sequence[Job]) -> list[Outcome]:
        """The mean responses of each filter and its branches."""
        data, outcomes = self.data, []
        labels, inputs = data.test_labels[: self.config.images or None], self._inputs()
        for job in jobs:
            number = None if job.option("filter") == CHOSEN else int(job.option("filter"))
            digits = digits_of_classes(data.classes)
            response = complementary(self.model, job.network, number, inputs, labels, digits, data.classes)
            title = f"{type(self.model).__name__} on {data.name}, {job.network}, filter {response.filter}"
            outcomes.append(
                Outcome(job, math.nan, math.nan, math.nan, None, extra={"knowledge": as_plain(response, title)})
            )
        return outcomes

    def result(self, folder: RunFolder) -> dict[str, Any]:
        """The responses of all filters, as JSON."""
        known = outcomes_of(folder)
        responses = [known[job].extra["knowledge"] for job in self.jobs({})]
        networks = {re.sub(r"[^\w-]+", "-", f"{each['layer']}-{each['filter']}"): each for each in responses}
        content = {"set": self.data.name, "source": self.data.source, "networks": networks}
        folder.write_json("knowledge", content)
        return content

    def shown(self, result: dict[str, Any], width: int) -> Shown:
        return [f"Filters: {', '.join(result['networks'])}."]


def digits_of_classes(classes: Sequence[str]) -> int:
    """How many digits the classes have as numbers: 2 for ``00`` to ``99``; 1 where they are plain classes."""
    length = len(classes[0])
    if 2 <= length <= 4 and list(classes) == [f"{number:0{length}d}" for number in range(10**length)]:
        return length
    return 1


def as_inputs(images: Tensor, mean: Sequence[float] = (), std: Sequence[float] = ()) -> Tensor:
    """Images of bytes as a network takes them: from 0 to 1, normalised by channel where mean and std are given."""
    inputs = images.to(torch.get_default_dtype()) / 255
    for what, values in (("mean", mean), ("std", std)):
        if values and len(values) not in (1, images.shape[1]):
            raise SettingError(
                f"{what} has {len(values)} numbers, the images have {images.shape[1]} channels; give one each"
            )
    if mean:
        inputs -= torch.tensor(mean).view(-1, 1, 1)
    if std:
        inputs /= torch.tensor(std).view(-1, 1, 1)
    return inputs
