"""Prefetching of image batches: threads prepare them ahead of the caller, in order."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["AHEAD", "NAME", "Made", "Numbers", "Wanted", "copied", "for_this_stream", "in_order"]

NAME = "images"  # of these threads, before their numbers
AHEAD = 2  # batches that are made before they are needed, by each thread
Numbers = Sequence[int] | npt.NDArray[np.int64]
Wanted = Sequence[Numbers]
S = TypeVar("S")
T = TypeVar("T")


class Made(NamedTuple):
    """The images of a batch."""

    images: Tensor
    """uint8 `[B, 3, size, size]`."""
    numbers: Numbers
    """Their numbers: those that were asked for, unless some were skipped."""
    corrupt: tuple[str, ...] = ()
    """The names of those that were skipped."""


def in_order(make: Callable[[S], T], wanted: Iterable[S], threads: int) -> Generator[T]:
    """Prefetch batches in threads, and yield them in order. Closing it ends the threads.

    Args:
        make: Makes a batch, in a thread.
        wanted: What to make; the caller's thread iterates over it.
        threads: How many; 0 makes batches in the caller's thread.
    """
    if not threads:
        yield from map(make, wanted)
        return
    # Each batch on one core: torch's own threads would wait for each other in every operation.
    with ThreadPoolExecutor(threads, NAME, torch.set_num_threads, (1,)) as pool:
        left, running = iter(wanted), deque[Future[T]]()
        try:
            while True:
                for one in islice(left, AHEAD * threads - len(running)):
                    running.append(pool.submit(make, one))
                if not running:
                    return
                yield running.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            torch.set_num_threads(torch.get_num_threads())  # so that later threads start with the caller's setting


def copied(batches: Iterable[Made], device: torch.device) -> Generator[Made]:
    """Copy batches from pinned memory to a GPU asynchronously, one ahead of the caller.

    The caller's thread starts the copies into memory of its own stream. CUDA calls of other threads would delay its
    launches, and so would memory of another stream, which torch checks in every allocation.
    """
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    ahead = deque[tuple[Made, torch.cuda.Event]]()

    def ready() -> Made:
        batch, done = ahead.popleft()
        torch.cuda.current_stream(device).wait_event(done)
        return batch

    try:
        for batch in batches:
            there = torch.empty_like(batch.images, device=device, pin_memory=False)
            copies.wait_stream(torch.cuda.current_stream(device))  # which may still use this memory
            with torch.cuda.stream(copies):
                there.copy_(batch.images, non_blocking=True)
            ahead.append((batch._replace(images=there), copies.record_event()))
            if len(ahead) > 1:
                yield ready()
        while ahead:
            yield ready()
    finally:
        torch.cuda.current_stream(device).wait_stream(copies)  # before the memory of those not taken is used again


def for_this_stream(batches: Iterable[Made], device: torch.device) -> Generator[Made]:
    """Batches that were made on other streams, whose memory those must not reuse before this one is done with it."""
    for batch in batches:
        if device.type == "cuda":
            batch.images.record_stream(torch.cuda.current_stream(device))
        yield batch
