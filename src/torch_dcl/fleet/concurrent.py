"""Concurrent training of several fleets on one GPU.

A fleet of a few medium-sized networks leaves part of a GPU idle. Fleets of other architectures can use it: steps are
issued in turns, each fleet's on a stream of its own, and run at the same time where the GPU has room.
"""

from collections.abc import Callable, Sequence

import torch

from torch_dcl.fleet.fleet import Fleet

__all__ = ["train_concurrently"]


def train_concurrently(fleets: Sequence[Fleet], should_stop: Callable[[], bool] | None = None) -> None:
    """Train every unfinished fleet for one more epoch, concurrently if all are on one GPU.

    Each fleet ends with the weights that it has when trained alone. They may have any architectures, settings and
    numbers of steps, each at an epoch of its own; ``should_stop`` is as in `Fleet.train`.
    """
    unfinished = [fleet for fleet in fleets if fleet.epoch < fleet.epochs]
    devices = {fleet.device for fleet in unfinished}
    if len(unfinished) < 2 or len(devices) > 1 or unfinished[0].device.type != "cuda":
        for fleet in unfinished:
            fleet.train(1, should_stop=should_stop)
        return
    with torch.cuda.device(unfinished[0].device):
        current = torch.cuda.current_stream()
        for fleet in unfinished:
            fleet._begin_epoch()
        streams = [torch.cuda.Stream() for _ in unfinished]  # type: ignore[no-untyped-call]
        for stream in streams:
            stream.wait_stream(current)
        while any(fleet.step < fleet.steps_per_epoch for fleet in unfinished):
            if should_stop is not None and should_stop():
                break
            for fleet, stream in zip(unfinished, streams, strict=True):
                if fleet.step < fleet.steps_per_epoch:
                    with torch.cuda.stream(stream):
                        fleet._take_step()
        for stream in streams:
            current.wait_stream(stream)
        for fleet in unfinished:
            if fleet.step == fleet.steps_per_epoch:
                fleet._end_epoch()
