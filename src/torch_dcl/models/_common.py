"""Shared by the networks: checks of their arguments, and two initialisers."""

import torch.fx
from torch import Tensor, nn

__all__ = ["check_classes", "check_images", "normal_", "uniform_"]

# A trace by torch.fx keeps the check as one call; tracing into it would fail on its branches. The networks reach it
# through this module, because that is where torch.fx looks for the name.
torch.fx.wrap("check_images")


def check_images(x: Tensor, expected: tuple[int, int | None, int | None], network: str) -> None:
    """Refuse a batch of images of a shape that the network does not accept.

    Only the shape is read, so the check costs nothing on the device and adds nothing to a compiled graph.

    Args:
        x: The batch.
        expected: Channels, height and width; None where any size is accepted.
        network: The name of the network, for the message.

    Raises:
        ValueError: ``x`` is not ``[N, channels, height, width]``.
    """
    if x.dim() == 4 and all(want is None or have == want for have, want in zip(x.shape[1:], expected, strict=True)):
        return
    got = ", ".join(str(size) for size in x.shape)
    channels, height, width = expected
    want = f"[N, {channels}, {'H' if height is None else height}, {'W' if width is None else width}]"
    if x.dim() == 3:
        remedy = "add the batch dimension with x.unsqueeze(0)"
    elif x.dim() != 4:
        remedy = "pass a batch of images with the channels second"
    elif x.shape[1] != channels:
        remedy = f"pass images with {channels} channel{'' if channels == 1 else 's'}, channels before height and width"
    else:
        remedy = f"crop or resize the images to {height}x{width}; the first fully-connected layer fits no other size"
    raise ValueError(f"{network} takes images of size {want}, got [{got}]; {remedy}")


def check_classes(num_classes: int) -> None:
    """Raise ValueError unless ``num_classes`` is at least 1."""
    if num_classes < 1:
        raise ValueError(f"num_classes must be at least 1, got {num_classes}; pass the number of categories")


def normal_(layer: nn.Conv2d | nn.Linear, std: float, bias: float = 0.0) -> None:
    """Caffe's ``gaussian`` and ``constant`` fillers: weights from N(0, std²), every bias set to ``bias``."""
    nn.init.normal_(layer.weight, std=std)
    if layer.bias is not None:
        nn.init.constant_(layer.bias, bias)


def uniform_(layer: nn.Conv2d | nn.Linear, bound: float) -> None:
    """Weights from U(±bound), every bias 0."""
    nn.init.uniform_(layer.weight, -bound, bound)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
