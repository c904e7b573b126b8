"""Datasets of the size of ILSVRC2012: image folders, tar shards, prepared shards, and batches of any of them."""

from torch_dcl.data.imagenet.batches import ImageNetBatches
from torch_dcl.data.imagenet.prepare import prepare_imagenet
from torch_dcl.data.imagenet.sources import open_images

__all__ = ["ImageNetBatches", "open_images", "prepare_imagenet"]
