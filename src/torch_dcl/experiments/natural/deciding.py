"""The deciding chart: test error against weights and against the time of a step, for DCL and for its rivals on BigNet.

The order of things is the protocol. Every unit goes through the same trials, learning rates with one seed that the
chart does not use, on training images alone: a tenth of them is kept apart to judge with. Each takes the rate with the
lowest error there. Then it is trained on all training images with the chart's seeds, and the test set is looked at
once.
"""

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_dcl.data import Dataset
from torch_dcl.data.draws import draw
from torch_dcl.experiments.engine import Settings
from torch_dcl.experiments.natural.recipes import TITLES, Recipe, inputs_of, recipe_of
from torch_dcl.experiments.natural.sets import Images, departures, read_sets
from torch_dcl.experiments.natural.slices import How, Report, Slice, Tell, abreast
from torch_dcl.experiments.natural.units import UNITS, build_unit, unit_weights
from torch_dcl.experiments.ranks import Rank
from torch_dcl.experiments.telling import telling
from torch_dcl.experiments.trial import MARK
from torch_dcl.training import Fleet, Member
from torch_dcl.training.runs import RunFolder

__all__ = ["DATA", "RATES", "Trial", "hold_out", "points_of", "run_deciding", "step_times"]

DATA = ("cifar10", "cifar100")
"""What the chart is of."""

RATES = (0.003, 0.01, 0.03)
SEARCH_SEED = 100
Labelled = tuple[Tensor, Tensor]


class Trial(NamedTuple):
    """One training: to choose a learning rate by, or for the chart."""

    purpose: str
    """``choose`` or ``report``."""
    unit: str
    share: float
    lr: float
    seed: int


def hold_out(data: Dataset) -> tuple[Labelled, Labelled]:
    """Part the training images: nine tenths of each class to train on, a tenth to judge with.

    The hash of an image's place decides, so that it is the same for everybody. The test set is not looked at. Of so few
    images that no class has ten, as in a trial, it is a tenth of all.

    Raises:
        ValueError: There is one image, or none.
    """
    order = draw(0, "deciding validation", 0, torch.arange(len(data.train_labels))).argsort(stable=True)
    judged = torch.zeros(len(order), dtype=torch.bool)
    for label in range(len(data.classes)):
        of_class = order[data.train_labels[order] == label]
        judged[of_class[: len(of_class) // 10]] = True
    if not judged.any():
        if len(order) < 2:
            raise ValueError(f"{data.name} has no training image to spare; at least 2 are needed, one to judge with")
        judged[order[: max(1, len(order) // 10)]] = True
    images, labels = data.train_images, data.train_labels
    return (images[~judged], labels[~judged]), (images[judged], labels[judged])


def run_deciding(
    path: str | os.PathLike[str],
    *,
    data: str = "cifar10",
    units: Sequence[str] = tuple(UNITS),
    shares: Sequence[float] = (1 / 4,),
    rates: Sequence[float] = RATES,
    seeds: int = 3,
    scale: float = 1.0,
    search_scale: float = 0.2,
    root: str | os.PathLike[str] | None = None,
    images: Images | None = None,
    batch: int | None = None,
    rounds: int = 5,
    how: How | None = None,
    resume: bool = False,
    seconds: float = math.inf,
    report: Report = print,
    begin: Callable[[int, int], None] | None = None,
    on_epoch: Tell | None = None,
) -> dict[str, Any] | None:
    """Search, train and test, or go on with it.

    Started by ``torchrun``, every rank takes a share of the fleets of each phase.

    Args:
        path: The run folder.
        data: ``cifar10`` or ``cifar100``.
        units: Which of `UNITS`.
        shares: Budgets: filters of one of DCL's two branches as a fraction of the layer's.
        rates: Learning rates to try, the same for every unit.
        seeds: Of the chart, from 0.
        scale: What part of BigNet's recipe to train for the chart.
        search_scale: What part of it to train for a trial.
        root: Where the data is; None for the usual places, `MADE_UP` for generated images.
        images: How many images to train on and to test with; None for all. For trying things out.
        batch: Images of a step, in place of the recipe's. For trying things out.
        rounds: Of which the time of a step is the median.
        how: Device, precision and the like.
        resume: Whether to go on with what the folder holds.
        seconds: Stop at the next end of an epoch when so much time has gone, and leave the rest to a later call.
        report: Called with lines of progress.
        begin: Called once, with the networks that were done before and those that this process has in all.
        on_epoch: Called before a fleet begins and after each of its epochs. When it raises KeyboardInterrupt the fleet
            is kept first.

    Returns:
        The chart as plain data: a point for each unit and budget with its errors, weights, time of a step and trials;
        or None where something is missing: time was up, or this is not the first rank.
    """
    how, start = how or How(), time.perf_counter()
    rank = Rank.here()
    how = dataclasses.replace(how, device=rank.device(how.device))
    sets, _ = read_sets([data], root, images, report if not rank.number else lambda _: None)
    found = sets[data]
    whole = recipe_of("bignet", data)
    whole = dataclasses.replace(whole, batch=batch or whole.batch)
    points = points_of(units, shares)
    asked = {
        "chart": "deciding", "data": found.source, "points": [list(point) for point in points], "rates": list(rates),
        "seeds": seeds, "scale": scale, "search_scale": search_scale, "images": images,
        "recipe": dataclasses.asdict(whole), "precision": how.precision, "compile": how.compile, "most": how.most,
        "rounds": rounds, "deterministic": how.deterministic,
    }  # fmt: skip
    with rank.open(path, asked, resume=resume) as folder:
        told, report = telling(folder, Settings(on_epoch=on_epoch), report, rank.part)
        phases = _Phases(found, whole, how, folder, rank.part, start + seconds, report, told.on_epoch)
        tried = [[Trial("choose", *point, lr, SEARCH_SEED) for lr in rates] for point in points]
        if begin is not None:
            of_mine = set(rank.share(points))
            before = sum((trial.unit, trial.share) in of_mine for trial in phases.errors())
            begin(before, len(of_mine) * (len(rates) + seeds))
        phases.run(rank.share(tried), search_scale)
        rank.wait()
        errors = phases.errors()
        chart: dict[str, Any] | None = None
        if all(trial in errors for trials in tried for trial in trials):
            chosen = {trials[0][1:3]: min(trials, key=lambda t: errors[t]).lr for trials in tried}
            reported = [[Trial("report", *p, chosen[p], seed) for seed in range(seeds)] for p in points]
            phases.run(rank.share(reported), scale)
            rank.wait()
            errors = phases.errors()
            if not rank.number and all(trial in errors for trials in reported for trial in trials):
                report("measuring the time of a step")
                times = step_times(points, found, whole, how, rounds=rounds)
                rows = [
                    {
                        "unit": unit, "share": share, "weights": unit_weights(unit, len(found.classes), share),
                        "lr": chosen[unit, share], "errors": [errors[t] for t in trials], "seeds": list(range(seeds)),
                        "step_ms": times[unit, share],
                        "trials": {f"{t.lr:g}": errors[t] for t in tried[i]}, "what": UNITS[unit],
                    }
                    for i, ((unit, share), trials) in enumerate(zip(points, reported, strict=True))
                ]  # fmt: skip
                chart = {"set": data, "points": rows, **_described(asked, data, whole, folder)}
        folder.append(f"minutes{rank.part}", {"training": (time.perf_counter() - start) / 60})
        return chart


def points_of(units: Sequence[str], shares: Sequence[float]) -> list[tuple[str, float]]:
    """Units and budgets; the plain layer is there once, since it has no budget."""
    return [(unit, share) for unit in units for share in (shares if unit != "plain" else shares[:1])]


def _described(asked: Mapping[str, Any], data: str, whole: Recipe, folder: RunFolder) -> dict[str, Any]:
    """What a reader has to know of a chart beside its points."""
    scale = asked["scale"]
    batches = [whole.batch] if whole.batch != recipe_of("bignet", data).batch else []
    told = departures([asked["data"]], asked["images"], batches)
    title = f"BigNet on {TITLES[data]}: error against weights and time of a step{MARK if told else ''}"
    if scale < 1:
        told.append(f"Shortened: the recipe was trained for {scale:g} of its epochs.")
    return {
        "title": title, "told": told, "scale": scale,
        "search_scale": asked["search_scale"], "recipe": str(whole.scaled(scale)), "data": asked["data"],
        "environment": folder.read("environment")[-1],
    }  # fmt: skip


class _Phases:
    """Trials as fleets, one after another, with their errors written down."""

    def __init__(
        self, data: Dataset, recipe: Recipe, how: How, folder: RunFolder, part: str, until: float, report: Report,
        tell: Tell | None,
    ) -> None:  # fmt: skip
        self.data, self.recipe, self.how = data, recipe, how
        self.folder, self.part, self.until, self.report, self.tell = folder, part, until, report, tell
        self.began = False
        self.parted = hold_out(data)

    def errors(self) -> dict[Trial, float]:
        """What is known; a network that diverged erred always."""
        found = {}
        for record in self.folder.read("outcomes"):
            error = 100.0 if record["stopped"] is not None else record["error"]
            found[Trial(*(record[name] for name in Trial._fields))] = error
        return found

    def run(self, fleets: Sequence[Sequence[Trial]], scale: float) -> None:
        """Train what is not known yet, as far as time allows; the first fleet goes on by an epoch in any case."""
        known = self.errors()
        left = [trials for trials in fleets if any(trial not in known for trial in trials)]
        groups = abreast(left, self.how, lambda trial: trial.purpose)
        for number, group in enumerate(groups, 1):
            if self.began and time.perf_counter() > self.until:
                count = sum(map(len, groups[number - 1 :]))
                self.report(f"time is up: {count} fleets of this phase are left; go on with --resume")
                return
            self.began = True
            which = (number, len(groups))
            slice_ = Slice(self.folder, self.part, self.until, self.how.every, which, self.report, self.tell)
            self._train(group, known, scale, slice_)

    def _train(self, group: Sequence[Sequence[Trial]], known: dict[Trial, float], scale: float, slice_: Slice) -> None:
        data, purpose = self.data, group[0][0].purpose
        train, judge = self.parted
        if purpose == "report":
            train, judge = (data.train_images, data.train_labels), (data.test_images, data.test_labels)
        named = {f"{purpose}-{trials[0].unit}-{trials[0].share:g}": trials for trials in group}
        recipe = self.recipe.scaled(scale)
        fleets = {file: _fleet(trials, train, data, recipe, self.how) for file, trials in named.items()}
        aim = "learning rates of" if purpose == "choose" else "seeds of"
        if slice_.train(fleets, f"{aim} {', '.join(f'{t[0].unit} at {t[0].share:g}' for t in group)}") is None:
            return
        for file, trials in named.items():
            seen = fleets[file].evaluate({data.name: judge})
            for row, trial in enumerate(trials):
                if trial not in known:
                    stopped = fleets[file].history.stopped.get(row)
                    record = {**trial._asdict(), "error": float(seen.errors[row]), "stopped": stopped}
                    self.folder.append(f"outcomes{self.part}", record)
            slice_.checkpoint(file).unlink()


def _fleet(trials: Sequence[Trial], train: Labelled, data: Dataset, recipe: Recipe, how: How) -> Fleet:
    networks = [build_unit(t.unit, len(data.classes), t.seed, share=t.share) for t in trials]
    members = [
        Member(f"{t.unit} {t.lr:g} {t.seed}", data.name, t.seed, t.lr, recipe.schedule, recipe.weight_decay)
        for t in trials
    ]
    return Fleet(
        networks, members, {data.name: train}, batch=recipe.batch, momentum=recipe.momentum, precision=how.precision,
        device=how.device, inputs=inputs_of("bignet", data, average=how.average), stacked=False, compile=how.compile,
        streams=how.streams, deterministic=how.deterministic,
    )  # fmt: skip


def step_times(
    points: Sequence[tuple[str, float]], data: Dataset, recipe: Recipe, how: How, *, rounds: int = 5
) -> dict[tuple[str, float], float]:
    """Milliseconds of a training step of one network of each unit: the median of rounds taken in turns.

    Args:
        points: Units and budgets.
        data: What to train on meanwhile.
        recipe: Its batch counts.
        how: Device, precision, and whether networks are compiled.
        rounds: How many.
    """
    steps = min(len(data.train_labels) // recipe.batch, 100)
    some = (data.train_images[: steps * recipe.batch], data.train_labels[: steps * recipe.batch])
    schedule = dataclasses.replace(recipe.schedule, epochs=rounds + 1)
    short = dataclasses.replace(recipe, schedule=schedule)
    fleets = {
        point: _fleet([Trial("time", *point, recipe.lr, SEARCH_SEED)], some, data, short, how) for point in points
    }
    times: dict[tuple[str, float], list[float]] = {point: [] for point in points}
    for turn in range(rounds + 1):
        for point, fleet in fleets.items():
            _settle(how.device)
            start = time.perf_counter()
            fleet.train(1)
            _settle(how.device)
            if turn:  # the first one captures, or compiles
                times[point].append(1000 * (time.perf_counter() - start) / steps)
    return {point: statistics.median(values) for point, values in times.items()}


def _settle(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
