"""AlexNet for ILSVRC2012.

Baseline of section 4.2.2 of Wang et al., "Deep Collaborative Learning for Visual Recognition", 2017: the AlexNet of
Krizhevsky et al., "ImageNet Classification with Deep Convolutional Neural Networks", 2012, as Caffe's ``bvlc_alexnet``
has it.
"""

from typing import ClassVar

from torch import Tensor, nn

from torch_dcl.models import _common
from torch_dcl.models._quick import QuickConv2d, QuickResponseNorm

__all__ = ["AlexNet", "alexnet"]


class AlexNet(nn.Module):
    """AlexNet on 227×227 colour images, without groups.

    The paper's abbreviation::

        C11(S4)@96-MP3(S2)-C5(S1P2)@256-MP3(S2)-
        C3(S1P1)@384-C3(S1P1)@384-C3(S1P1)@256-
        MP3(S2)-FC4096-D0.5-FC4096-D0.5-FC1000.

    Weights, without biases: 58,271,776 + 4096 · ``num_classes``, so 62,367,776 for 1000 classes. The paper says 62.35M,
    which is 0.03 % less. ``fc6`` alone holds 37,748,736.

    Inferred: no groups, since with Caffe's two groups in ``conv2``, ``conv4`` and ``conv5`` the count would be 60.95M.
        From Caffe: local response normalisation over 5 channels (α 0.0001, β 0.75) between ReLU and pooling, in the
        first two stages, which the abbreviation leaves out; and the initialisation: weights from N(0, 0.01²), in
        ``fc6`` and ``fc7`` from N(0, 0.005²), biases 0.1 in ``conv2``, ``conv4``, ``conv5``, ``fc6`` and ``fc7`` and 0
        elsewhere. The input is on the scale of 0 to 255 with the mean subtracted.

    On a GPU in channels_last (``model.to(memory_format=torch.channels_last)``) the normalisations run as kernels and
    ``conv1`` as a convolution of cells of 4 × 4 pixels, with the same weights and the same results up to rounding.
    Under autocast the normalisations return the type of their input, where torch's own return float32.

    Args:
        num_classes: Outputs of the last layer, ``fc8``.
        lrn: Keep the two normalisations.

    Raises:
        ValueError: ``num_classes`` is below 1; in the forward pass, images of another size than ``input_size``.
    """

    input_size: ClassVar[tuple[int, int, int]] = (3, 227, 227)

    def __init__(self, num_classes: int = 1000, lrn: bool = True) -> None:
        super().__init__()
        _common.check_classes(num_classes)
        self.conv1 = QuickConv2d(3, 96, 11, stride=4)
        self.relu1 = nn.ReLU()
        self.norm1 = QuickResponseNorm(5, alpha=1e-4, beta=0.75) if lrn else nn.Identity()
        self.pool1 = nn.MaxPool2d(3, stride=2)
        self.conv2 = nn.Conv2d(96, 256, 5, padding=2)
        self.relu2 = nn.ReLU()
        self.norm2 = QuickResponseNorm(5, alpha=1e-4, beta=0.75) if lrn else nn.Identity()
        self.pool2 = nn.MaxPool2d(3, stride=2)
        self.conv3 = nn.Conv2d(256, 384, 3, padding=1)
        self.relu3 = nn.ReLU()
        self.conv4 = nn.Conv2d(384, 384, 3, padding=1)
        self.relu4 = nn.ReLU()
        self.conv5 = nn.Conv2d(384, 256, 3, padding=1)
        self.relu5 = nn.ReLU()
        self.pool5 = nn.MaxPool2d(3, stride=2)
        self.fc6 = nn.Linear(256 * 6 * 6, 4096)
        self.relu6 = nn.ReLU()
        self.drop6 = nn.Dropout(0.5)
        self.fc7 = nn.Linear(4096, 4096)
        self.relu7 = nn.ReLU()
        self.drop7 = nn.Dropout(0.5)
        self.fc8 = nn.Linear(4096, num_classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialise from Caffe's gaussians, with biases of 0.1 where Caffe has them."""
        for layer in (self.conv1, self.conv3, self.fc8):
            _common.normal_(layer, std=0.01)
        for layer in (self.conv2, self.conv4, self.conv5):
            _common.normal_(layer, std=0.01, bias=0.1)
        for layer in (self.fc6, self.fc7):
            _common.normal_(layer, std=0.005, bias=0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[N, 3, 227, 227]`` to logits ``[N, num_classes]``."""
        _common.check_images(x, self.input_size, "AlexNet")
        x = self.pool1(self.norm1(self.relu1(self.conv1(x))))
        x = self.pool2(self.norm2(self.relu2(self.conv2(x))))
        x = self.relu3(self.conv3(x))
        x = self.relu4(self.conv4(x))
        x = self.pool5(self.relu5(self.conv5(x)))
        x = self.drop6(self.relu6(self.fc6(x.flatten(1))))
        x = self.drop7(self.relu7(self.fc7(x)))
        logits: Tensor = self.fc8(x)
        return logits


def alexnet(num_classes: int = 1000, lrn: bool = True) -> AlexNet:
    """Build :class:`AlexNet`, the baseline of ILSVRC2012."""
    return AlexNet(num_classes, lrn)
