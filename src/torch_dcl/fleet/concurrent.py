"""Fleets abreast: several, of one architecture each, that share a GPU.

A fleet of a few middling networks leaves part of a GPU idle. Fleets of other architectures can have it: the steps of
all go to the GPU in turns, each on a stream of its own, and it takes from them what it has room for.
"""

from collections.abc import Callable, Sequence

import torch

from torch_dcl.fleet.fleet import Fleet

__all__ = ["train_concurrently"]


def train_concurrently(fleets: Sequence[Fleet], should_stop: Callable[[], bool] | None = None) -> None:
    """Train each fleet that is not at its end for one more epoch; at the same time, if they are on one GPU.

    Each ends with the weights that it has when it is trained alone.

    Args:
        fleets: Of any architectures, recipes and numbers of steps, each at an epoch of its own.
        should_stop: As in `Fleet.train`.
    """
    left = [fleet for fleet in fleets if fleet.epoch < fleet.epochs]
    if len(left) < 2 or any(fleet.device.type != "cuda" or fleet.device != left[0].device for fleet in left):
        for fleet in left:
            fleet.train(1, should_stop=should_stop)
        return
    with torch.cuda.device(left[0].device):
        here = torch.cuda.current_stream()
        for fleet in left:
            fleet._begin_epoch()
        streams = [torch.cuda.Stream() for _ in left]  # type: ignore[no-untyped-call]
        for stream in streams:
            stream.wait_stream(here)
        while any(fleet.step < fleet.steps_per_epoch for fleet in left):
            if should_stop is not None and should_stop():
                break
            for fleet, stream in zip(left, streams, strict=True):
                if fleet.step < fleet.steps_per_epoch:
                    with torch.cuda.stream(stream):
                        fleet._take_step()
        for stream in streams:
            here.wait_stream(stream)
        for fleet in left:
            if fleet.step == fleet.steps_per_epoch:
                fleet._end_epoch()
