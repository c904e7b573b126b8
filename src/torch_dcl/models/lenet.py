"""LeNet for the multi-digit sets.

Baseline of section 4.1 of Wang et al., "Deep Collaborative Learning for Visual Recognition", 2017. The network goes
back to LeCun et al., "Handwritten Digit Recognition with a Back-Propagation Network", 1990; the layer sizes are those
of the LeNet that comes with Caffe.
"""

import math
from typing import ClassVar

from torch import Tensor, nn

from torch_dcl.models import _common

__all__ = ["LeNet", "lenet"]


class LeNet(nn.Module):
    """``C5@20-MP2S2-C5@50-MP2S2-FC500-D0.5-OUT`` on 28×28 grey images.

    Weights, without biases: 425,500 + 500 · ``num_classes``, so 475,500 for two digits (100 classes) and 925,500 for
    three (1000 classes).

    The ReLU follows each pooling. Max pooling picks the largest value and ReLU is monotonic, so
    relu(pool(x)) = pool(relu(x)): the network is the same as with the ReLU first, on a quarter of the values.

    Inferred, because the paper does not say: the ReLU after the convolutions (Caffe's LeNet has none there, and trains
    worse for it), the ReLU between ``fc1`` and its dropout, and the initialisation: Caffe's Xavier filler, weights from
    U(±√(3 / fan_in)), biases 0.

    Args:
        num_classes: Outputs of the last layer, ``fc2``.

    Raises:
        ValueError: ``num_classes`` is below 1; in the forward pass, images of another size than ``input_size``.
    """

    input_size: ClassVar[tuple[int, int, int]] = (1, 28, 28)

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        _common.check_classes(num_classes)
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.pool1 = nn.MaxPool2d(2)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.pool2 = nn.MaxPool2d(2)
        self.relu2 = nn.ReLU()
        self.fc1 = nn.Linear(50 * 4 * 4, 500)
        self.relu3 = nn.ReLU()
        self.drop1 = nn.Dropout(0.5)
        self.fc2 = nn.Linear(500, num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialise from U(±√(3 / fan_in)), biases 0."""
        for layer in (self.conv1, self.conv2, self.fc1, self.fc2):
            _common.uniform_(layer, bound=math.sqrt(3 / layer.weight[0].numel()))

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[N, 1, 28, 28]`` to logits ``[N, num_classes]``."""
        _common.check_images(x, self.input_size, "LeNet")
        x = self.relu1(self.pool1(self.conv1(x)))
        x = self.relu2(self.pool2(self.conv2(x)))
        x = self.drop1(self.relu3(self.fc1(x.flatten(1))))
        logits: Tensor = self.fc2(x)
        return logits


def lenet(num_classes: int = 10) -> LeNet:
    """Build :class:`LeNet`, the baseline of the multi-digit sets."""
    return LeNet(num_classes)
