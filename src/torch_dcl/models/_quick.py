"""Two torch layers with a faster forward pass on a GPU, and the same results up to rounding.

Parameters and settings are those of their base classes. They run as these do on a CPU, in float64, during export, under
``torch.func`` transforms, in memory layouts other than channels_last, and with ``TORCH_DCL_KERNELS=0``.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_dcl.kernels import dispatch
from torch_dcl.models._response_norm import response_norm

__all__ = ["QuickConv2d", "QuickResponseNorm"]


class QuickResponseNorm(nn.LocalResponseNorm):
    """``nn.LocalResponseNorm`` as one kernel forward and one backward.

    It computes in float32 and returns the type of its input. Under autocast torch's own returns float32.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__module__ = nn.LocalResponseNorm.__module__  # torch.fx does not trace into torch.nn

    def forward(self, x: Tensor) -> Tensor:
        """As the base class."""
        return response_norm(x, self.size, self.alpha, self.beta, self.k)


class QuickConv2d(nn.Conv2d):
    """``nn.Conv2d`` of few channels with a stride, as a convolution of many channels without one.

    Tensor cores process channels in groups of eight, so three channels are padded with five of zeros. Here the pixels
    of each stride × stride cell become channels, and so do the weights, padded to whole cells: 3 × 11 × 11 with stride
    4 is 48 × 3 × 3.
    """

    stands_for = nn.Conv2d
    """The class that conversion treats it as."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__module__ = nn.Conv2d.__module__  # torch.fx does not trace into torch.nn

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._is_faster(input, weight):
            return conv_of_cells(input, weight, bias, self.stride)
        y: Tensor = super()._conv_forward(input, weight, bias)
        return y

    def _is_faster(self, x: Tensor, weight: Tensor) -> bool:
        if min(self.stride) == 1 or self.padding != (0, 0) or self.dilation != (1, 1) or self.in_channels >= 8:
            return False
        if self.groups != 1 or x.dim() != 4 or not dispatch.kernels_accept((x, weight), matched=False):
            return False
        (C, *image), (_, channels, *kernel) = x.shape[1:], weight.shape
        if channels != C or any(side < k for side, k in zip(image, kernel, strict=True)):
            return False  # torch raises the error
        return any(t.is_contiguous(memory_format=torch.channels_last) for t in (x, weight))


def conv_of_cells(x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, ...]) -> Tensor:
    """``F.conv2d(x, weight, bias, stride)`` as a convolution without stride of cells of ``stride`` pixels."""
    if torch.is_autocast_enabled(x.device.type):  # cast first, so that fewer bytes are moved
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    sizes = list(zip(x.shape[2:], weight.shape[2:], stride, strict=True))
    kernel = [-(-k // s) for _, k, s in sizes]
    seen = [(side - k) // s + cells for (side, k, s), cells in zip(sizes, kernel, strict=True)]
    return F.conv2d(_cells(x, seen, stride), _cells(weight, kernel, stride), bias)


def _cells(x: Tensor, count: list[int], size: tuple[int, ...]) -> Tensor:
    """``[N, C, H, W]`` as ``count`` cells of ``size`` pixels, cut or padded with zeros: ``[N, size · C, *count]``."""
    N, C, H, W = x.shape
    (rows, columns), (height, width) = count, size
    pixels = F.pad(x.permute(0, 2, 3, 1), (0, 0, 0, columns * width - W, 0, rows * height - H))
    cells = pixels.reshape(N, rows, height, columns, width, C).transpose(2, 3)
    return cells.reshape(N, rows, columns, height * width * C).permute(0, 3, 1, 2)  # channels_last
