"""Data at hand: real digits shipped with the package."""

from torch_dcl.data.excerpt import mnist_excerpt

__all__ = ["mnist_excerpt"]
