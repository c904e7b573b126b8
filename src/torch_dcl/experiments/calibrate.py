"""How hard the multi-digit sets are, fitted to the paper's baseline column.

The paper shows its layouts in a figure and gives no numbers. The layouts of `torch_dcl.data.layouts` follow the
figure's description, and one number a set, its strength, scales every random variation and the noise. This finds the
strengths with which the *baseline* LeNet errs as often as the paper's, on digits of MNIST's training set alone. No DCL
network is involved, and the baseline column of every table says that it was fitted.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from statistics import mean

from torch_dcl.data.layouts import LAYOUTS, Layout
from torch_dcl.experiments.digitsets import Digits, Sets, make_sets
from torch_dcl.experiments.engine import Job, Settings, run_jobs
from torch_dcl.experiments.reported import TABLE1

__all__ = ["Fitted", "calibrate", "largest_strength", "next_strength"]


@dataclasses.dataclass
class Fitted:
    """What was tried on a set, and what came of it."""

    name: str
    target: float
    """The paper's baseline error, per cent."""
    tried: dict[float, list[float]] = dataclasses.field(default_factory=dict)
    """Errors by strength, one for each seed."""

    def off(self, strength: float) -> float:
        """How far the mean error at a strength is from the target, as a part of it."""
        return mean(self.tried[strength]) / self.target - 1

    def __str__(self) -> str:
        points = "  ".join(f"{s:g}: {mean(e):.2f} ({len(e)})" for s, e in sorted(self.tried.items()))
        best = f"best {self.best:g}, {100 * self.off(self.best):+.1f} % of {self.target:.2f}"
        return f"{self.name}  {best}  tried {points}"

    @property
    def best(self) -> float:
        """The strength whose mean error is nearest to the target."""
        return min(self.tried, key=lambda strength: abs(self.off(strength)))


def largest_strength(layout: Layout) -> float:
    """The largest strength that the layout's ranges allow, down to two decimals, and at most 4."""
    declared = dataclasses.replace(layout, strength=1.0)
    limits = {"shift": 4, "scale": 0.75, "rotation": 180, "noise": 128}
    most = min(high / declared.effective(name) for name, high in limits.items() if declared.effective(name) > 0)
    return min(4.0, math.floor(most * 100) / 100)


def next_strength(fitted: Fitted, most: float) -> float:
    """Where to look next: between the nearest neighbours of the target, on a straight line of the error's logarithm."""
    points = sorted((strength, max(mean(errors), 1e-3)) for strength, errors in fitted.tried.items())
    below = [point for point in points if point[1] <= fitted.target]
    above = [point for point in points if point[1] > fitted.target]
    if not above:
        return min(most, points[-1][0] * 1.5 + 0.25)
    if not below:
        return max(0.0, points[0][0] / 2 if points[0][0] > 0.1 else 0.0)
    # Noise may put a lower error above a higher one; the innermost pair that brackets the target is taken.
    low = max(below)
    higher = [point for point in above if point[0] > low[0]]
    if not higher:
        low = max((point for point in below if point[0] < min(above)[0]), default=min(below))
        higher = above
    high = min(higher)
    share = math.log(fitted.target / low[1]) / math.log(high[1] / low[1])
    return round(low[0] + min(max(share, 0.05), 0.95) * (high[0] - low[0]), 2)


def calibrate(
    digits: Digits,
    settings: Settings,
    *,
    lr: Callable[[str], float],
    sets: Sequence[str] = tuple(LAYOUTS),
    start: Iterable[float] = (0.0, 0.5, 1.0, 1.5, 2.0),
    rounds: int = 3,
    seeds: int = 3,
    weight_decay: float = 5e-4,
    tried: dict[str, dict[float, list[float]]] | None = None,
    report: Callable[[str], None] = print,
    images: tuple[int, int] | None = None,
) -> dict[str, Fitted]:
    """Fit the strengths.

    A first round tries a few strengths with one seed. Each further round tries, with all seeds, the strength that the
    points so far suggest.

    Args:
        digits: MNIST; its test part is not looked at.
        settings: How the baseline is trained.
        lr: The baseline's learning rate for a set.
        sets: Which.
        start: Strengths of the first round, those that a layout allows.
        rounds: Further rounds.
        seeds: Seeds of a further round.
        weight_decay: Of the baseline.
        tried: Errors by set and strength that are known already, in place of the first round.
        report: Called with lines of progress.
        images: How many images of a set to train on and to judge with; None for all.
    """
    fitted = {name: Fitted(name, TABLE1[name]["baseline"].mean) for name in sets}
    most = {name: largest_strength(LAYOUTS[name]) for name in sets}

    def attempt(wanted: dict[str, list[float]], seeds: range) -> None:
        jobs = [
            Job("baseline", f"{name}@{strength}", seed, lr(name), weight_decay=weight_decay)
            for name, strengths in wanted.items()
            for strength in strengths
            for seed in seeds
        ]
        for outcome in run_jobs(jobs, _write(digits, wanted, settings.device, images), settings, report):
            name, strength = outcome.job.data.split("@")
            fitted[name].tried.setdefault(float(strength), []).append(outcome.error)
        for found in fitted.values():
            report(str(found))

    if tried is None:
        attempt({name: sorted({min(strength, most[name]) for strength in start}) for name in sets}, range(1))
    else:
        for name in sets:
            fitted[name].tried.update(tried[name])
    for _ in range(rounds):
        attempt({name: [next_strength(found, most[name])] for name, found in fitted.items()}, range(seeds))
    return fitted


def _write(digits: Digits, wanted: dict[str, list[float]], device: str, images: tuple[int, int] | None = None) -> Sets:
    """The sets at several strengths, by name and strength."""
    sets = Sets({}, {})
    for name, strengths in wanted.items():
        for strength in strengths:
            # The name stays: it is what the random numbers are drawn from.
            layout = dataclasses.replace(LAYOUTS[name], strength=strength)
            made = make_sets(digits, [layout], "choose", device=device, images=images)
            sets.train[f"{name}@{strength}"], sets.judge[f"{name}@{strength}"] = made.train[name], made.judge[name]
    return sets
