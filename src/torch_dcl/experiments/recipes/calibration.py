"""How difficult the multi-digit sets are, fitted to the paper's baseline column.

The paper shows its layouts in a figure and gives no numbers. The layouts of `torch_dcl.data.layouts` follow the
figure's description, and one number a set, its strength, scales every random variation and the noise. This finds the
strengths with which the *baseline* LeNet errs as often as the paper's, on digits of MNIST's training set alone. No DCL
network is involved, and the baseline column of every table says that it was fitted.

A first round tries a few strengths with one seed. Each further round tries, with all seeds, the strength that the
points so far suggest.

With ``--models baseline,oracle`` the strengths are fitted to both columns: to the geometric mean of their errors. With
``lengths`` this is done for several numbers of epochs, the same for all sets, and the one is taken with which both
columns are nearest to the paper's over all sets.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from torch_dcl.data.layouts import LAYOUTS, Layout
from torch_dcl.experiments.digits import SETS_RULES, TWO, DigitConfig, DigitRecipe
from torch_dcl.experiments.paper_numbers import SETS, TABLE1
from torch_dcl.experiments.protocol import Job, Outcome, RunFolder, Shown, Workload
from torch_dcl.experiments.runner import minutes_of, outcomes_of
from torch_dcl.experiments.settings import setting
from torch_dcl.experiments.stats import signed
from torch_dcl.experiments.table import Grid, Line
from torch_dcl.fleet.run_folder import environment

__all__ = ["Calibration", "CalibrationConfig", "Fitted", "largest_strength", "next_strength"]


@dataclasses.dataclass(frozen=True)
class CalibrationConfig(DigitConfig):
    """The settings of the calibration."""

    sets: tuple[str, ...] = setting(SETS, "which of the fifteen", smoke=TWO[:1], **SETS_RULES)
    seeds: int = setting(3, "networks of a further round for each set", smoke=1, least=1, most=100)
    rounds: int = setting(
        3, "further rounds, each at the strength that the points so far suggest", smoke=0, least=0, most=100
    )
    start: tuple[float, ...] = setting(
        (0.0, 0.5, 1.0, 1.5, 2.0), "strengths of the first round", smoke=(1.0,), least=0, most=100
    )
    lr: float = setting(0.07, "the learning rate of the networks", above=0, most=1e6)
    models: tuple[str, ...] = setting(
        ("baseline",), "which of the paper's columns to fit to", choices=("baseline", "oracle"), what="model"
    )
    lengths: tuple[int, ...] = setting((), "numbers of epochs to try; none for epochs", of=int, least=1, most=1_000_000)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "lengths", tuple(dict.fromkeys(self.lengths)))


@dataclasses.dataclass
class Fitted:
    """The strengths that were tried on a set, and the errors at each."""

    name: str
    target: float
    """The paper's error, per cent; of several columns the geometric mean."""
    tried: dict[float, list[float]] = dataclasses.field(default_factory=dict)
    """Errors by strength, one for each seed; of several columns the geometric mean."""
    columns: dict[str, dict[float, list[float]]] = dataclasses.field(default_factory=dict)
    """The same for each column."""

    def off(self, strength: float, column: str | None = None) -> float:
        """How far the mean error at a strength is from the target, or from a column's own, as a fraction of it."""
        if column is None:
            return mean(self.tried[strength]) / self.target - 1
        return mean(self.columns[column][strength]) / TABLE1[self.name][column].mean - 1

    def misfit(self) -> float:
        """How far the columns are from the paper's at the best strength, as a fraction: root mean square."""
        return math.sqrt(mean(self.off(self.best, column) ** 2 for column in self.columns))

    @property
    def best(self) -> float:
        """The strength whose mean error is nearest to the target."""
        return min(self.tried, key=lambda strength: abs(self.off(strength)))


class Calibration(DigitRecipe[CalibrationConfig]):
    """The baseline on every set at several strengths, round by round."""

    name = "calibration"
    config_type = CalibrationConfig
    purpose = "choose"

    def jobs(self, outcomes: Mapping[Job, Outcome]) -> list[Job]:
        """All rounds up to the first that is not done, whose strengths depend on the rounds before it."""
        return [job for epochs in self._lengths for job in self.fit(outcomes, epochs)[0]]

    @property
    def _lengths(self) -> Sequence[int]:
        """Numbers of epochs to try; 0 for the config's."""
        return self.config.lengths or (0,)

    def fit(self, outcomes: Mapping[Job, Outcome], epochs: int = 0) -> tuple[list[Job], dict[str, Fitted]]:
        """The jobs that can be named with these outcomes, and the errors by set and strength so far."""
        config = self.config
        targets = {name: _middle([TABLE1[name][column].mean for column in config.models]) for name in config.sets}
        fitted = {name: Fitted(name, target) for name, target in targets.items()}
        most = {name: largest_strength(LAYOUTS[name]) for name in config.sets}
        jobs: list[Job] = []
        for number in range(1 + config.rounds):
            wanted = {
                name: [next_strength(fit, most[name])] if number else sorted({min(s, most[name]) for s in config.start})
                for name, fit in fitted.items()
            }
            these = [
                [self._job(column, f"{name}@{strength}", seed, number, epochs) for column in config.models]
                for name, strengths in wanted.items()
                for strength in strengths
                for seed in range(config.seeds if number else 1)
            ]
            jobs += [job for of_seed in these for job in of_seed]
            if any(job not in outcomes for of_seed in these for job in of_seed):
                break
            for of_seed in these:
                name, _, strength = of_seed[0].data.partition("@")
                errors = [outcomes[job].error for job in of_seed]
                fitted[name].tried.setdefault(float(strength), []).append(_middle(errors))
                for job, error in zip(of_seed, errors, strict=True):
                    fitted[name].columns.setdefault(job.network, {}).setdefault(float(strength), []).append(error)
        return jobs, fitted

    def _job(self, column: str, data: str, seed: int, number: int, epochs: int) -> Job:
        options = (("epochs", float(epochs)),) if epochs else ()
        return Job(column, data, seed, self.config.lr, f"round {number}", options)

    def planned(self) -> list[Job]:
        """The first round, and as many jobs as further rounds have; their strengths are not known before."""
        config = self.config
        return self.jobs({}) + [
            self._job(column, name, seed, number, epochs)
            for epochs in self._lengths
            for number in range(1, 1 + config.rounds)
            for name in config.sets
            for seed in range(config.seeds)
            for column in config.models
        ]

    def workloads(self) -> list[Workload]:
        """The networks of each number of epochs."""
        load = super().workloads()[0]
        each = load.networks // len(self._lengths)
        return [load._replace(networks=each, epochs=epochs or load.epochs) for epochs in self._lengths]

    def result(self, folder: RunFolder) -> list[Fitted]:
        """The strengths at the number of epochs with the least misfit, and everything that was tried, as JSON."""
        outcomes = outcomes_of(folder)
        by_length = {epochs: list(self.fit(outcomes, epochs)[1].values()) for epochs in self._lengths}
        misfits = {epochs: math.sqrt(mean(fit.misfit() ** 2 for fit in fits)) for epochs, fits in by_length.items()}
        epochs = min(misfits, key=lambda each: misfits[each])
        content = {
            "title": "How difficult the multi-digit sets are, fitted to the paper's "
            f"{' and '.join(self.config.models)} column{'s' if len(self.config.models) > 1 else ''}",
            "recipe": folder.recipe, "environment": environment(), "minutes": minutes_of(folder),
            "sets": [_row(fit) for fit in by_length[epochs]],
        }  # fmt: skip
        if self.config.lengths:
            tried = {str(each): {"misfit": misfits[each], "sets": list(map(_row, by_length[each]))} for each in misfits}
            content |= {"epochs": epochs, "lengths": tried}
        folder.write_json("calibration", content)
        return by_length[epochs]

    def shown(self, result: list[Fitted], width: int) -> Shown:
        lines = []
        for fit in result:
            errors, off = fit.tried[fit.best], f"{signed(100 * fit.off(fit.best), 1)} %"
            texts = (fit.name, f"{fit.best:g}", f"{mean(errors):.2f} ({len(errors)})", f"{fit.target:.2f}", off)
            own = [f"{signed(100 * fit.off(fit.best, column), 1)} %" for column in fit.columns]
            lines.append(Line((*texts, *(own if len(own) > 1 else ()))))
        own = list(result[0].columns) if len(result[0].columns) > 1 else []
        grid = Grid(("<set", "strength", "error % (n)", "paper %", "off", *own), lines, ("paper %", "off"))
        if not own:
            return ["Strengths at which the baseline errs as the paper's does:", grid.as_rich(width)]
        words = "Strengths at which baseline and oracle err as the paper's do, by the geometric mean of both errors"
        return [f"{words}; how far each is off by itself:", grid.as_rich(width)]


def _middle(values: Sequence[float]) -> float:
    """The geometric mean; one value as it is."""
    return values[0] if len(values) == 1 else math.exp(mean(math.log(max(value, 1e-3)) for value in values))


def _row(fit: Fitted) -> dict[str, Any]:
    row: dict[str, Any] = {
        "set": fit.name, "paper": fit.target, "strength": fit.best, "errors": fit.tried[fit.best],
        "tried": {f"{strength:g}": errors for strength, errors in fit.tried.items()},
    }  # fmt: skip
    if len(fit.columns) > 1:
        of = fit.columns.items()
        row["columns"] = {column: {f"{s:g}": errors for s, errors in tried.items()} for column, tried in of}
    return row


def largest_strength(layout: Layout) -> float:
    """The largest strength that the layout's ranges allow, down to two decimals, and at most 4."""
    declared = dataclasses.replace(layout, strength=1.0)
    limits = {"shift": 4, "scale": 0.75, "rotation": 180, "noise": 128}
    most = min(high / declared.effective(name) for name, high in limits.items() if declared.effective(name) > 0)
    return min(4.0, math.floor(most * 100) / 100)


def next_strength(fitted: Fitted, most: float) -> float:
    """Where to look next: between the nearest neighbours of the target, linear in the error's logarithm."""
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
