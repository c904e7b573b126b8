"""Estimates of a training on large images: hours, shards and bytes, from a few steps on synthetic images."""

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from torch_dcl.data.imagenet.prepare import shard_bytes
from torch_dcl.data.imagenet.sources import Mapped
from torch_dcl.experiments.imagenet.team import Team
from torch_dcl.experiments.protocol import Estimate, Job
from torch_dcl.experiments.ranks import Rank

if TYPE_CHECKING:
    from torch_dcl.experiments.recipes.imagenet import ImageNet

__all__ = ["estimate"]


def estimate(recipe: "ImageNet", say_time: Callable[[float], str]) -> Estimate:
    """Hours from some steps on synthetic images, and the bytes of the images.

    Args:
        recipe: The recipe to estimate.
        say_time: Seconds in words.
    """
    config = recipe.config
    train, val = _counts(recipe)
    steps = config.steps_on(train[0])
    batch = min(config.batch, 256 if recipe.device.startswith("cuda") else 4)
    few = dataclasses.replace(
        config, batch=batch, accumulate=1, mix="none", data="synthetic", classes=train[1], images=2 * batch, warmup=0
    )
    speeds = {model: _images_per_second(type(recipe)(few, recipe.device), model) for model in config.models}
    seconds = {model: config.seeds * steps * config.batch / speed for model, speed in speeds.items()}
    size = shard_bytes(train[0] + val[0], config.resize)
    shards = train[2] + val[2] or -(-train[0] // 1024) - (-val[0] // 1024)
    is_there = "prepared" if train[2] else "of 1,024 images"
    epochs = steps * config.batch / max(1, train[0])
    words = {
        "recipe": recipe.name,
        "networks": ", ".join(f"{config.network} {model} × {config.seeds}" for model in config.models),
        "images": f"{train[0]:,} + {val[0]:,}, {train[1]:,} classes",
        "shards": f"{shards:,} {is_there} at {config.resize}²: {size / 2**30:,.2f} GiB",
        "training": f"{steps:,} steps of {config.batch:,} images, {epochs:,.1f} epochs",
        "speed": ", ".join(f"{model} {speed:,.0f} images/s" for model, speed in speeds.items())
        + f" on one {recipe.device}, batch {few.batch}, if images are ready",
        "time": f"{say_time(sum(seconds.values()))} on one device",
        "device": recipe.device,
    }
    plain = {"images": [train[0], val[0]], "classes": train[1], "bytes": size, "shards": shards,
             "steps": steps, "seconds": seconds, "images_per_second": speeds}  # fmt: skip
    return Estimate(words, plain)


def _counts(recipe: "ImageNet") -> list[tuple[int, int, int]]:
    """Images, classes and prepared shards of both splits; those of ILSVRC2012 where no data is named."""
    if not recipe.config.data:
        return [(1_281_167, 1000, 0), (50_000, 1000, 0)]
    return [
        (len(images.labels), len(images.classes), len(images.shards) if isinstance(images, Mapped) else 0)
        for images in recipe.open_splits(ready=False).values()
    ]


def _images_per_second(recipe: "ImageNet", model: str) -> float:
    """The throughput of training steps on images that are ready."""
    recipe.team = Team(Rank())
    recipe.splits = recipe.open_splits()
    training = recipe.build(Job(model, "synthetic", 0, recipe.config.lr))
    pieces = [piece for piece, _ in zip(training.batches.pieces(0), range(2), strict=False)]

    def steps(count: int) -> float:
        for number in range(count):
            training.take_step(pieces[number % len(pieces)])
        if training.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    start, count = steps(2), 20 if training.device.type == "cuda" else 1
    return count * recipe.config.batch / (steps(count) - start)
