"""A recipe that compares layers of equal weights in one network: learning rates first, then seeds."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from torch_dcl.experiments.protocol import Job, Outcome, Recipe
from torch_dcl.experiments.settings import Config, SettingError

__all__ = ["UnitRecipe", "check_units"]

C = TypeVar("C", bound=Config)


def check_units(given: Sequence[str], known: Sequence[str]) -> None:
    """Refuse units without DCL, which the others are compared with, or without a control of its weights."""
    controls = [unit for unit in known if unit not in ("dcl", "plain")]
    if "dcl" not in given:
        needed, why = "dcl", "lacks dcl, which the others are compared with"
    elif not any(unit in controls for unit in given):
        needed, why = "low-rank", f"has no control of dcl's weights ({', '.join(controls)})"
    else:
        return
    raise SettingError(f"units {why}; give --set units={','.join((*given, needed))}")


class UnitRecipe(Recipe[C]):
    """Layers of equal weights in one network: trials of learning rates with one seed, then all seeds at the best rate.

    Its config has ``units``, ``rates`` and ``seeds``. A trial is a job of the phase "choose".
    """

    unit = "trainings"
    search_seed: ClassVar[int] = 100

    @property
    def points(self) -> Sequence[Any]:
        """The units."""
        units: Sequence[str] = self.config.units  # type: ignore[attr-defined]
        return units

    def job(self, point: Any, seed: int, lr: float, phase: str = "report") -> Job:
        """The training of a point."""
        return Job(point, self.name, seed, lr, phase)

    def jobs(self, outcomes: Mapping[Job, Outcome]) -> list[Job]:
        """The trials; and when they are done, the seeds of each point at the rate that it takes."""
        trials = [job for point in self.points for job in self.trials(point)]
        if any(job not in outcomes for job in trials):
            return trials
        return trials + [job for point in self.points for job in self.reports(point, outcomes)]

    def trials(self, point: Any) -> list[Job]:
        """A job for each learning rate."""
        rates: Sequence[float] = self.config.rates  # type: ignore[attr-defined]
        return [self.job(point, self.search_seed, lr, "choose") for lr in rates]

    def reports(self, point: Any, outcomes: Mapping[Job, Outcome]) -> list[Job]:
        """A job for each seed, at the rate with the lowest error of the trials."""
        lr = min(self.trials(point), key=lambda job: outcomes[job].judged_error).lr
        return [self.job(point, seed, lr) for seed in range(self.config.seeds)]  # type: ignore[attr-defined]

    def total(self) -> int:
        """Trials and seeds of all points."""
        config: Any = self.config
        return int(len(self.points) * (len(config.rates) + config.seeds))

    def concurrent(self, job: Job) -> Hashable:
        """Fleets of one phase."""
        return job.phase

    def describe(self, fleets: Sequence[Sequence[Job]]) -> str:
        """Trials or seeds, and of which units."""
        aim = "learning rates of" if fleets[0][0].phase == "choose" else "seeds of"
        return f"{aim} {', '.join(dict.fromkeys(self.named(jobs[0]) for jobs in fleets))}"

    def named(self, job: Job) -> str:
        """The display name of a point."""
        return job.network

    def diverged(self, outcomes: Mapping[Job, Outcome]) -> list[str]:
        """Which points have networks that diverged, in a sentence; none where none has."""
        points = [self.reports(point, outcomes) for point in self.points]
        counts = {self.named(jobs[0]): sum(outcomes[job].stopped is not None for job in jobs) for jobs in points}
        parts = [f"{name} ({count} of {self.config.seeds})" for name, count in counts.items() if count]  # type: ignore[attr-defined]
        return [f"Networks that diverged count with an error of 100 %: {', '.join(parts)}."] if parts else []

    def rows(self, outcomes: Mapping[Job, Outcome], sorts: Sequence[str] = ("all",)) -> list[dict[str, Any]]:
        """Chosen rate, trials and errors of each unit; of several sorts of questions, by what ``extra`` calls them."""
        config: Any = self.config
        found = []
        for unit in config.units:
            jobs = self.reports(unit, outcomes)
            tried = {f"{job.lr:g}": outcomes[job].judged_error for job in self.trials(unit)}
            at_edge = len(tried) > 1 and jobs[0].lr in (min(config.rates), max(config.rates))
            errors = {
                sort: [
                    float(done.extra.get(sort, done.error)) if done.stopped is None else 100.0
                    for done in (outcomes[job] for job in jobs)
                ]
                for sort in sorts
            }
            found.append({"unit": unit, "chosen": jobs[0].lr, "at_edge": at_edge, "trials": tried, "errors": errors})
        return found
