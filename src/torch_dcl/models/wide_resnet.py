"""Wide residual networks for SVHN and CIFAR.

Third baseline of section 4.2.1 of Wang et al., "Deep Collaborative Learning for Visual Recognition", 2017. The network
is that of Zagoruyko and Komodakis, "Wide Residual Networks", 2016.
"""

import math
from typing import ClassVar

from torch import Tensor, nn

from torch_dcl.models import _common

__all__ = ["WideBlock", "WideResNet", "wide_resnet"]


class WideBlock(nn.Module):
    """Two 3×3 convolutions, each after batch norm and ReLU, added to a shortcut.

    The shortcut is the input itself where the channels stay the same. Where they change it is a 1×1 convolution of the
    input after the first batch norm and ReLU. Dropout follows the second ReLU.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        stride: Stride of the first convolution and of the shortcut.
        dropout: Fraction of values to drop between the convolutions.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int, dropout: float) -> None:
        super().__init__()
        if in_channels == out_channels and stride != 1:
            raise ValueError(
                f"stride {stride} needs the channels to change, got {in_channels} in and out; use stride 1"
            )
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.relu2 = nn.ReLU()
        self.drop = nn.Dropout(dropout) if dropout > 0 else nn.Identity()
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        same = in_channels == out_channels
        self.shortcut = None if same else nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[N, in_channels, H, W]`` to ``[N, out_channels, ceil(H / stride), ceil(W / stride)]``."""
        active: Tensor = self.relu1(self.bn1(x))
        residual: Tensor = self.conv2(self.drop(self.relu2(self.bn2(self.conv1(active)))))
        shortcut: Tensor = x if self.shortcut is None else self.shortcut(active)
        return residual + shortcut


class WideResNet(nn.Module):
    """WRN-``depth``-``widen``: three groups of (depth − 4) / 6 blocks with 16, 32 and 64 times ``widen`` channels.

    Weights of WRN-16-4 with 10 classes, without biases: 2,747,072, of which 1,808 are scales of batch norms.

    Inferred: the paper says "16-layer WRN" and no width; its error rates fit WRN-16-4. The classifier ``fc`` is the
    only fully-connected layer, so what the paper calls the first one is the output layer here.

    The initialisation follows the authors' code: convolutions from He's N(0, 2 / fan_out), batch norms at scale 1 and
    shift 0, ``fc`` from U(±1/√fan_in) with biases 0. The mean over all positions in front of ``fc`` lets the network
    take images of any height and width; the paper's are 32×32.

    Args:
        depth: Number of layers, 6n + 4.
        widen: Factor on the channels of the thin network.
        num_classes: Outputs of ``fc``.
        dropout: Fraction of values to drop inside each block; the authors use 0.4 for SVHN.

    Raises:
        ValueError: an argument is out of range; in the forward pass, images that do not have 3 channels.
    """

    input_size: ClassVar[tuple[int, int, int]] = (3, 32, 32)

    def __init__(self, depth: int = 16, widen: int = 4, num_classes: int = 10, dropout: float = 0.0) -> None:
        super().__init__()
        _common.check_classes(num_classes)
        if depth < 10 or (depth - 4) % 6 != 0:
            raise ValueError(f"depth must be 6n + 4, got {depth}; use one of 10, 16, 22, 28, 34, 40, ...")
        if widen < 1:
            raise ValueError(f"widen must be at least 1, got {widen}; the paper's network has 4")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {dropout!r}; 0 switches it off")
        blocks = (depth - 4) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.group1 = _group(16, 16 * widen, 1, blocks, dropout)
        self.group2 = _group(16 * widen, 32 * widen, 2, blocks, dropout)
        self.group3 = _group(32 * widen, 64 * widen, 2, blocks, dropout)
        self.bn = nn.BatchNorm2d(64 * widen)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(64 * widen, num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialise: He's N(0, 2 / fan_out) in the convolutions, U(±1/√fan_in) in ``fc``, no shift anywhere."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()
        _common.uniform_(self.fc, bound=1 / math.sqrt(self.fc.in_features))

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[N, 3, H, W]`` to logits ``[N, num_classes]``."""
        _common.check_images(x, (3, None, None), "WideResNet")
        x = self.group3(self.group2(self.group1(self.conv1(x))))
        x = self.relu(self.bn(x))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def _group(in_channels: int, out_channels: int, stride: int, blocks: int, dropout: float) -> nn.Sequential:
    first = WideBlock(in_channels, out_channels, stride, dropout)
    return nn.Sequential(first, *(WideBlock(out_channels, out_channels, 1, dropout) for _ in range(blocks - 1)))


def wide_resnet(depth: int = 16, widen: int = 4, num_classes: int = 10, dropout: float = 0.0) -> WideResNet:
    """Build :class:`WideResNet`, the deepest baseline for SVHN and CIFAR."""
    return WideResNet(depth, widen, num_classes, dropout)
