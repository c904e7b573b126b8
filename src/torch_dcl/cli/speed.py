"""How fast this machine trains, from a table or by a short trial, for an estimate in minutes."""

import time
from typing import NamedTuple

__all__ = ["Speed", "memory", "speed_of"]

H200 = 3.0e6  # images a second over the whole of Table 1, judging included: results/table1.json, 950 networks, 7.6 min
PER_NETWORK = 1.03 / 75  # GiB: results/fleet.csv, 75 networks, batch 100, 1,000 classes, DCL-A2, bfloat16


class Speed(NamedTuple):
    """Images a second over all networks of a fleet, and where the number is from."""

    images: float
    source: str


def speed_of(device: str) -> Speed:
    """The speed of a device: as measured for this release on an H200, by a trial of a few seconds elsewhere."""
    import torch  # noqa: PLC0415

    if device.startswith("cuda"):
        name = torch.cuda.get_device_name(device)
        if "H200" in name:
            return Speed(H200, "as measured on an H200, results/table1.json")
        return Speed(_trial(device, 64, 2000), f"measured just now on {name}")
    threads = torch.get_num_threads()
    words = f"measured just now on this CPU, {threads} thread{'s' if threads > 1 else ''}"
    return Speed(_trial(device, 6, 200), words)


def _trial(device: str, networks: int, images: int) -> float:
    """Train a fleet for two epochs on noise, and time the second."""
    import torch  # noqa: PLC0415

    from torch_dcl.experiments.columns import build  # noqa: PLC0415
    from torch_dcl.fleet import Fleet, Member, Schedule  # noqa: PLC0415

    made = torch.Generator().manual_seed(0)
    data = (
        torch.randint(256, (images, 28, 28), dtype=torch.uint8, generator=made),
        torch.randint(100, (images,), generator=made),
    )
    members = [Member("trial", "noise", seed, 0.01, Schedule(2)) for seed in range(networks)]
    fleet = Fleet([build("A2", 100, seed) for seed in range(networks)], members, {"noise": data}, device=device)
    fleet.train(1)
    start = time.perf_counter()
    fleet.train(1)
    return networks * images / (time.perf_counter() - start)


def memory(networks: int, sets: int, images: int) -> float:
    """GiB that a fleet takes, about: its networks and the images of all sets."""
    return networks * PER_NETWORK + sets * images * 28 * 28 / 2**30
