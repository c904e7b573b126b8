"""Data: embedded digits, multi-digit sets, dataset sources, prepared files, and batches on the device."""

from torch_dcl.data import digits, layouts
from torch_dcl.data.batches import Batches
from torch_dcl.data.dataset import DataError, Dataset, read_prepared, write_prepared
from torch_dcl.data.imagenet import ImageNetBatches, open_images, prepare_imagenet
from torch_dcl.data.mnist import mnist_excerpt
from torch_dcl.data.sources import load

__all__ = [
    "Batches", "DataError", "Dataset", "ImageNetBatches", "digits", "layouts", "load", "mnist_excerpt", "open_images",
    "prepare_imagenet", "read_prepared", "write_prepared",
]  # fmt: skip
