"""What the filters of any converted network answer to: section 4.1.4 for one's own network and one's own data."""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_dcl.data.dataset import Dataset
from torch_dcl.experiments.complementary import complementary
from torch_dcl.experiments.drawings import knowledge_of
from torch_dcl.experiments.parts import keep_part
from torch_dcl.fleet.run_folder import RunFolder
from torch_dcl.layers import DCLConv1d, DCLConv2d, DCLConv3d, DCLLinear

__all__ = ["as_taken", "digits_of", "look_at"]


def digits_of(classes: Sequence[str]) -> int:
    """How many digits the classes have as numbers: 2 for ``00`` to ``99``; 1 where they are mere classes."""
    length = len(classes[0])
    if 2 <= length <= 4 and list(classes) == [f"{number:0{length}d}" for number in range(10**length)]:
        return length
    return 1


def as_taken(images: Tensor, mean: Sequence[float] = (), std: Sequence[float] = ()) -> Tensor:
    """Images of bytes as a network takes them: from 0 to 1, and with ``mean`` and ``std`` normalised by channel.

    Args:
        images: uint8 ``[N, C, H, W]``.
        mean: What to take away from each channel, in units of 255; nothing where it is empty.
        std: What to divide each channel by; nothing where it is empty.

    Raises:
        ValueError: Neither one number nor one for each channel, or a divisor that is not above 0.
    """
    made = images.to(torch.get_default_dtype()) / 255
    for what, values in (("mean", mean), ("std", std)):
        if values and len(values) not in (1, images.shape[1]):
            raise ValueError(
                f"{what} has {len(values)} numbers, the images have {images.shape[1]} channels; give one each"
            )
    if any(not value > 0 for value in std):
        raise ValueError(f"std must be above 0, not {', '.join(f'{value:g}' for value in std)}")
    if mean:
        made -= torch.tensor(mean).view(-1, 1, 1)
    if std:
        made /= torch.tensor(std).view(-1, 1, 1)
    return made


def look_at(
    path: str | os.PathLike[str],
    recipe: Mapping[str, Any],
    network: nn.Module,
    data: Dataset,
    *,
    layers: Sequence[str] = (),
    filters: Sequence[int] = (),
    images: int = 0,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    resume: bool = False,
    on_layer: Callable[[str], None] | None = None,
) -> list[str]:
    """Draw what filters and their branches answer to, into a run folder.

    Args:
        path: The run folder.
        recipe: What was asked for, as the folder keeps it.
        network: A converted network, trained.
        data: Its test images are shown to the network.
        layers: DCL layers by name; without any, all of them.
        filters: Filters, counted from 0; without any, one a layer, by the rule of `complementary.pick_filter`.
        images: Only the first ones; 0 for all.
        mean: See `as_taken`.
        std: See `as_taken`.
        resume: Whether to go on with what the folder holds.
        on_layer: Called with the name of each layer before it is looked at.

    Returns:
        The names of the figures that were written; none where they were there.

    Raises:
        KeyError: The network has no such layer.
        IndexError: The layer has no such filter.
        ValueError: The network has no DCL layer, or does not take the images.
        RunError: The folder is in use, or belongs to another recipe.
    """
    kinds = (DCLLinear, DCLConv1d, DCLConv2d, DCLConv3d)
    names = list(layers) or [name for name, module in network.named_modules() if isinstance(module, kinds)]
    if not names:
        raise ValueError(f"{type(network).__name__} has no DCL layer; convert it first, with torch_dcl.convert_")
    count = images or len(data.test_images)
    labels, digits = data.test_labels[:count], digits_of(data.classes)
    with RunFolder.open(path, recipe, resume=resume) as folder:
        if any(record["part"] == "knowledge" for record in folder.read("parts")):
            return []
        start, found = time.perf_counter(), {}
        shown = as_taken(data.test_images[:count], mean, std)
        dtype = next((p.dtype for p in network.parameters()), shown.dtype)
        for layer in names:
            if on_layer is not None:
                on_layer(layer)
            for chosen in filters or (None,):
                try:
                    part = complementary(network, layer, chosen, shown.to(dtype), labels, digits, data.classes)
                except RuntimeError as error:
                    first = str(error).splitlines()[0]
                    raise ValueError(
                        f"{type(network).__name__} does not take images of {data.name} ({first}); give data of its size"
                    ) from error
                found[_word(f"{layer}-{part.filter}")] = knowledge_of(
                    part, f"{type(network).__name__} on {data.name}, {layer}, filter {part.filter}"
                )
        content = {"set": data.name, "source": data.source, "networks": found}
        return keep_part(folder, "knowledge", content, (time.perf_counter() - start) / 60)


def _word(text: str) -> str:
    return re.sub(r"[^\w-]+", "-", text)
