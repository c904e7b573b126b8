"""Where a run of Table 1 is not the protocol's: a trial, and its page says so."""

from torch_dcl.experiments.engine import SCHEDULE
from torch_dcl.fleet import Schedule

__all__ = ["departures"]


def departures(source: str, schedule: Schedule, images: tuple[int, int] | None) -> list[str]:
    """What a run does otherwise than the protocol, in sentences; none where it follows it.

    Args:
        source: What the sets are written with.
        schedule: How networks are trained.
        images: How many images of a set to train on and to test with; None for all.
    """
    told = []
    if images:
        told.append(f"Only the first {images[0]:,} images of a set to train on and {images[1]:,} to test with.")
    if schedule.epochs != SCHEDULE.epochs:
        count = f"{schedule.epochs} epoch{'s' if schedule.epochs > 1 else ''}"
        told.append(f"Trained for {count}, while the learning rates were chosen for {SCHEDULE.epochs}.")
    if source.startswith("the embedded"):
        told.append("Written with an excerpt of MNIST, while how hard the sets are was fitted with all of it.")
    return told
