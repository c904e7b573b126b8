"""The paper's baseline networks as plain modules, and the bilinear layers that it compares with.

The networks contain no DCL layers: a DCL network is one of these, or any other network, after conversion, and
:func:`variant_plan` builds the plans of the paper's variants. Layers have the paper's names (``conv1``, ``fc1``, ...;
in AlexNet ``fc6`` to ``fc8``), so that a plan can refer to them. Every network has its image size as ``input_size``,
channels first.
"""

from torch_dcl.models.alexnet import AlexNet, alexnet
from torch_dcl.models.bignet import BigNet, bignet
from torch_dcl.models.bilinear import BilinearFusion, BilinearPool
from torch_dcl.models.counting import count_weights
from torch_dcl.models.lenet import LeNet, lenet
from torch_dcl.models.lenet_cifar import LeNetCifar, lenet_cifar
from torch_dcl.models.variants import VARIANTS, variant_plan
from torch_dcl.models.wide_resnet import WideResNet, wide_resnet

__all__ = [
    "VARIANTS", "AlexNet", "BigNet", "BilinearFusion", "BilinearPool", "LeNet", "LeNetCifar", "WideResNet", "alexnet",
    "bignet", "count_weights", "lenet", "lenet_cifar", "variant_plan", "wide_resnet",
]  # fmt: skip
