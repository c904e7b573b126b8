"""The LeNet variant for SVHN and CIFAR.

First baseline of section 4.2.1 of Wang et al., "Deep Collaborative Learning for Visual Recognition", 2017. It widens
the ``cifar10_full`` network that comes with Caffe and adds a hidden fully-connected layer.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_dcl.models import _common

__all__ = ["LeNetCifar", "WithinChannelNorm", "lenet_cifar"]


class WithinChannelNorm(nn.Module):
    """Caffe's local response norm within channels: ``x · (1 + α·mean(x²))^-β``, the mean over 3 × 3 pixels.

    Pixels beyond the border count as 0. It computes in float32 or wider and returns the type of its input.
    """

    def __init__(self, alpha: float = 5e-5, beta: float = 0.75) -> None:
        super().__init__()
        self.alpha, self.beta = alpha, beta

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[N, C, H, W]``."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        around = F.avg_pool2d(wide.square(), 3, stride=1, padding=1)
        return (wide * (1 + self.alpha * around) ** -self.beta).to(x.dtype)


class LeNetCifar(nn.Module):
    """``C5(P2)@32-MP3(S2)-C5(P2)@64-MP3(S2)-C5(P2)@128-MP3(S2)-FC512-D0.5-OUT`` on 32×32 colour images.

    Weights, without biases: 1,306,976 + 512 · ``num_classes``, so 1,312,096 for 10 classes.

    Poolings round up, as Caffe's do: 32 → 16 → 8 → 4, and ``fc1`` sees 128 · 4 · 4 = 2048 values. The ReLU follows each
    pooling; max pooling and ReLU commute, so this is the network with the ReLU first.

    The initialisation is that of ``cifar10_full``: weights from N(0, 0.0001²) in ``conv1`` and N(0, 0.01²) elsewhere,
    biases 0. The small first value is made for its input, **raw values of 0 to 255 with the mean image subtracted**.
    For images that are scaled down, scale ``conv1`` up by the same factor, or almost no signal reaches ``fc2``.

    Inferred, because the paper does not say: rounding up, ReLU after the convolutions and ``fc1``, and the
    initialisation. ``cifar10_full`` also has local response norms; whether the paper's network has them is not said.

    Args:
        num_classes: Outputs of the last layer, ``fc2``.
        norms: Whether a `WithinChannelNorm` follows each of the first two poolings, as in ``cifar10_full``.

    Raises:
        ValueError: ``num_classes`` is below 1; in the forward pass, images of another size than ``input_size``.
    """

    input_size: ClassVar[tuple[int, int, int]] = (3, 32, 32)

    def __init__(self, num_classes: int = 10, *, norms: bool = False) -> None:
        super().__init__()
        _common.check_classes(num_classes)
        self.norm1 = WithinChannelNorm() if norms else None
        self.norm2 = WithinChannelNorm() if norms else None
        self.conv1 = nn.Conv2d(3, 32, 5, padding=2)
        self.pool1 = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.pool2 = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.relu2 = nn.ReLU()
        self.conv3 = nn.Conv2d(64, 128, 5, padding=2)
        self.pool3 = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.relu3 = nn.ReLU()
        self.fc1 = nn.Linear(128 * 4 * 4, 512)
        self.relu4 = nn.ReLU()
        self.drop1 = nn.Dropout(0.5)
        self.fc2 = nn.Linear(512, num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialise from N(0, 0.0001²) in ``conv1`` and N(0, 0.01²) elsewhere, biases 0."""
        _common.normal_(self.conv1, std=1e-4)
        for layer in (self.conv2, self.conv3, self.fc1, self.fc2):
            _common.normal_(layer, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[N, 3, 32, 32]`` to logits ``[N, num_classes]``."""
        _common.check_images(x, self.input_size, "LeNetCifar")
        x = self.relu1(self.pool1(self.conv1(x)))
        x = x if self.norm1 is None else self.norm1(x)
        x = self.relu2(self.pool2(self.conv2(x)))
        x = x if self.norm2 is None else self.norm2(x)
        x = self.relu3(self.pool3(self.conv3(x)))
        x = self.drop1(self.relu4(self.fc1(x.flatten(1))))
        logits: Tensor = self.fc2(x)
        return logits


def lenet_cifar(num_classes: int = 10, *, norms: bool = False) -> LeNetCifar:
    """Build :class:`LeNetCifar`, the smallest baseline for SVHN and CIFAR."""
    return LeNetCifar(num_classes, norms=norms)
