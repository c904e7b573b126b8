"""Batches of images, made in threads ahead of the caller and given in order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

__all__ = ["AHEAD", "Made", "Wanted", "for_this_stream", "in_order"]

AHEAD = 2  # batches that are made before they are needed, by each thread
Wanted = Sequence[Sequence[int]]
S = TypeVar("S")
T = TypeVar("T")


class Made(NamedTuple):
    """The images of a batch."""

    images: Tensor
    """uint8 `[B, 3, size, size]`."""
    numbers: Sequence[int]
    """Their numbers: those that were asked for, unless some were skipped."""
    corrupt: tuple[str, ...] = ()
    """The names of those that were skipped."""


def in_order(make: Callable[[S], T], wanted: Iterable[S], threads: int) -> Iterator[T]:
    """Make batches in threads, some ahead of the caller, and give them in order.

    Args:
        make: Makes a batch, in a thread.
        wanted: What to make; the caller's thread iterates over it.
        threads: How many; 0 makes batches in the caller's thread.
    """
    if not threads:
        yield from map(make, wanted)
        return
    # Each batch on one core: torch's own threads would wait for each other in every operation.
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
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


def for_this_stream(batches: Iterator[Made], device: torch.device) -> Iterator[Made]:
    """Batches that were made on other streams, whose memory those must not reuse before this one is done with it."""
    for batch in batches:
        if device.type == "cuda":
            batch.images.record_stream(torch.cuda.current_stream(device))
        yield batch
