"""BigNet for SVHN and CIFAR.

Second baseline of section 4.2.1 of Wang et al., "Deep Collaborative Learning for Visual Recognition", 2017, which
takes it from nagadomi's entry to the CIFAR-10 contest on Kaggle, 2014 (``kaggle-cifar10-torch7``).
"""

import math
from typing import ClassVar

from torch import Tensor, nn

from torch_dcl.models import _common

__all__ = ["BigNet", "bignet"]


class BigNet(nn.Module):
    """Eight convolutions and three fully-connected layers on 24×24 crops, without batch norm.

    The paper gives no abbreviation. In its notation, from nagadomi's code::

        C3(P1)@64-C3(P1)@64-MP2S2-D0.25-
        C3(P1)@128-C3(P1)@128-MP2S2-D0.25-
        C3(P1)@256-C3(P1)@256-C3(P1)@256-C3(P1)@256-MP2S2-D0.25-
        FC1024-D0.5-FC1024-D0.5-OUT

    Weights, without biases: 5,732,032 + 1024 · ``num_classes``, so 5,742,272 for 10 classes; the paper's 5.74M.

    Inferred, because the paper does not say: the 24×24 input (``fc1`` sees 256 · 3 · 3 = 2304 values, and only this
    meets the 5.74M), and the initialisation. The default of Torch7, U(±1/√fan_in), shrinks the signal in each of the
    eleven layers, for which the original compensates with a learning rate of 1.0. The paper trains at 0.01, so this
    network starts from He's N(0, 2 / fan_in), which preserves the signal, with biases 0, and from N(0, 0.01²) in the
    last layer, where no ReLU follows.

    Args:
        num_classes: Outputs of the last layer, ``fc3``.

    Raises:
        ValueError: ``num_classes`` is below 1; in the forward pass, images of another size than ``input_size``.
    """

    input_size: ClassVar[tuple[int, int, int]] = (3, 24, 24)

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        _common.check_classes(num_classes)
        self.conv1 = nn.Conv2d(3, 64, 3, padding=1)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(64, 64, 3, padding=1)
        self.relu2 = nn.ReLU()
        self.pool1 = nn.MaxPool2d(2)
        self.drop1 = nn.Dropout(0.25)
        self.conv3 = nn.Conv2d(64, 128, 3, padding=1)
        self.relu3 = nn.ReLU()
        self.conv4 = nn.Conv2d(128, 128, 3, padding=1)
        self.relu4 = nn.ReLU()
        self.pool2 = nn.MaxPool2d(2)
        self.drop2 = nn.Dropout(0.25)
        self.conv5 = nn.Conv2d(128, 256, 3, padding=1)
        self.relu5 = nn.ReLU()
        self.conv6 = nn.Conv2d(256, 256, 3, padding=1)
        self.relu6 = nn.ReLU()
        self.conv7 = nn.Conv2d(256, 256, 3, padding=1)
        self.relu7 = nn.ReLU()
        self.conv8 = nn.Conv2d(256, 256, 3, padding=1)
        self.relu8 = nn.ReLU()
        self.pool3 = nn.MaxPool2d(2)
        self.drop3 = nn.Dropout(0.25)
        self.fc1 = nn.Linear(256 * 3 * 3, 1024)
        self.relu9 = nn.ReLU()
        self.drop4 = nn.Dropout(0.5)
        self.fc2 = nn.Linear(1024, 1024)
        self.relu10 = nn.ReLU()
        self.drop5 = nn.Dropout(0.5)
        self.fc3 = nn.Linear(1024, num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialise from He's N(0, 2 / fan_in), and N(0, 0.01²) in ``fc3``; biases 0."""
        for layer in self.children():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                _common.normal_(layer, std=math.sqrt(2 / layer.weight[0].numel()))
        _common.normal_(self.fc3, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[N, 3, 24, 24]`` to logits ``[N, num_classes]``."""
        _common.check_images(x, self.input_size, "BigNet")
        x = self.relu1(self.conv1(x))
        x = self.relu2(self.conv2(x))
        x = self.drop1(self.pool1(x))
        x = self.relu3(self.conv3(x))
        x = self.relu4(self.conv4(x))
        x = self.drop2(self.pool2(x))
        x = self.relu5(self.conv5(x))
        x = self.relu6(self.conv6(x))
        x = self.relu7(self.conv7(x))
        x = self.relu8(self.conv8(x))
        x = self.drop3(self.pool3(x))
        x = self.drop4(self.relu9(self.fc1(x.flatten(1))))
        x = self.drop5(self.relu10(self.fc2(x)))
        logits: Tensor = self.fc3(x)
        return logits


def bignet(num_classes: int = 10) -> BigNet:
    """Build :class:`BigNet`, the middle baseline for SVHN and CIFAR."""
    return BigNet(num_classes)
