"""What ``dcl run`` was asked for, put together and checked."""

import dataclasses
import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_dcl.cli.names import UsageError
from torch_dcl.cli.naturals import refuse_without_data
from torch_dcl.cli.recipes import RUN, Recipe, config_of, find_recipe, read_settings, read_trials, with_settings
from torch_dcl.cli.screen import several

if TYPE_CHECKING:
    from torch_dcl.experiments.digitsets import Digits
    from torch_dcl.experiments.engine import Job, Settings
    from torch_dcl.experiments.protocol import Recipe as Running

__all__ = ["Sweep", "Task", "Training", "as_kept", "jobs_of", "make_task"]


@dataclasses.dataclass(frozen=True)
class Task:
    """A recipe that is about to be run."""

    recipe: Recipe
    out: Path
    resume: bool
    smoke: bool
    seconds: float
    device: str

    @property
    def go_on(self) -> str:
        """The command that resumes the run."""
        return f"dcl run {shlex.quote(str(self.out))} --resume"


@dataclasses.dataclass(frozen=True)
class Training(Task):
    """A recipe that trains networks on multi-digit sets."""

    digits: "Digits"
    settings: "Settings"

    @property
    def images(self) -> tuple[int, int] | None:
        """How many images to train on and to test with; None for all."""
        asked = self.recipe["train_images"] or 60_000, self.recipe["test_images"] or 10_000
        return None if asked == (60_000, 10_000) else asked

    @property
    def epochs(self) -> str:
        """How many epochs, in words."""
        count = self.settings.schedule.epochs
        return f"{count} epoch{'s' if count > 1 else ''}"


@dataclasses.dataclass(frozen=True)
class Sweep(Task):
    """A recipe that the runner runs."""

    running: "Running[Any]"


def make_task(
    given: str,
    settings: dict[str, Any],
    pairs: list[str],
    *,
    out: Path | None,
    smoke: bool,
    resume: bool,
    minutes: float | None,
    dry: bool = False,
) -> Task:
    """Put together what was asked for.

    Args:
        given: A recipe's name, a file, or a run folder.
        settings: Values of the named options, None where they were not given.
        pairs: The texts of ``--set``.
        out: The run folder, or None.
        smoke: Whether to make it tiny.
        resume: Whether to go on.
        minutes: When to stop, at the end of an epoch.
        dry: Whether nothing will be written.

    Raises:
        UsageError: An argument is invalid.
    """
    recipe, folder = find_recipe(given, smoke=smoke)
    chosen = read_settings(pairs) | {key: value for key, value in settings.items() if value is not None}
    recipe = with_settings(recipe, chosen)
    if minutes is not None and not minutes > 0:
        raise UsageError(f"--minutes must be above 0, not {minutes:g}")
    if out is None:
        out = folder if folder is not None else Path("runs", recipe.name + ("-smoke" if smoke else ""))
        if smoke and not resume and not dry and folder is None and not several():
            out = _fresh(out)
    if resume and not (out / "recipe.json").exists():
        raise UsageError(f"there is no run in {out} to go on with; leave --resume out to begin one")
    from torch_dcl.cli.places import find_mnist, read_device  # noqa: PLC0415

    device = read_device(recipe["device"])
    task = Task(recipe, out, resume, smoke, math.inf if minutes is None else 60 * minutes, device)
    if recipe.name == "knowledge":
        for key in ("network", "weights", "data"):
            if not recipe[key]:
                raise UsageError(f"the recipe knowledge needs {key}; give --set {key}=… ({_example(key)})")
        return task
    if recipe.name in RUN:
        from torch_dcl.experiments.natural.sets import NaturalConfig  # noqa: PLC0415
        from torch_dcl.experiments.recipes import find_recipe_type  # noqa: PLC0415

        config = config_of(recipe)
        if isinstance(config, NaturalConfig):
            refuse_without_data(config, recipe.name, dry=dry)
        return Sweep(**vars(task), running=find_recipe_type(recipe.name)(config, device))
    from torch_dcl.experiments.digitsets import read_mnist  # noqa: PLC0415
    from torch_dcl.experiments.engine import Settings  # noqa: PLC0415
    from torch_dcl.fleet import Schedule  # noqa: PLC0415

    try:
        schedule = Schedule(recipe["epochs"], recipe["warmup"], tuple(recipe["drops"]), recipe["factor"])
    except ValueError as error:
        raise UsageError(str(error)) from None
    precision = None if recipe["precision"] == "auto" else recipe["precision"]
    curves = recipe.values.get("curves") == "yes"
    made = Settings(schedule, recipe["batch"], device, precision, recipe["most"], curves)
    digits = read_mnist(find_mnist(recipe["data"]))
    return Training(**vars(task), digits=digits, settings=made)


def _example(key: str) -> str:
    return {
        "network": "such as torchvision:vgg16 or mine.py:make",
        "weights": "the file that torch_dcl.save_model wrote",
        "data": "such as folder:images or prepared:data/digits/MNIST-II-05.safetensors",
    }[key]


def _fresh(out: Path) -> Path:
    """A folder that is not there yet: smoke runs may be repeated."""
    count, path = 1, out
    while path.exists():
        count += 1
        path = out.with_name(f"{out.name}-{count}")
    return path


def jobs_of(task: Training) -> list["Job"]:
    """Everything that the recipe trains, for an estimate."""
    recipe = task.recipe
    if recipe.name == "table1":
        from torch_dcl.experiments import table1  # noqa: PLC0415
        from torch_dcl.experiments.search import stored_choice  # noqa: PLC0415

        return table1.jobs_of(recipe["models"], recipe["sets"], recipe["seeds"], stored_choice())
    if recipe.name == "table1-search":
        from torch_dcl.experiments.search_run import jobs_of_search  # noqa: PLC0415

        return jobs_of_search(recipe["models"], recipe["sets"], read_trials(recipe["trials"]), recipe["seed"])
    if recipe.name == "figures":
        from torch_dcl.experiments.parts import jobs_of_parts  # noqa: PLC0415

        return [job for jobs in jobs_of_parts(recipe.values).values() for job in jobs]
    from torch_dcl.experiments.calibration_run import jobs_of_calibration  # noqa: PLC0415

    return jobs_of_calibration(recipe["sets"], recipe["start"], recipe["rounds"], recipe["seeds"], recipe["lr"])


def as_kept(task: Task) -> dict[str, Any]:
    """The recipe as the run folder keeps it: what changes the result, and not where it is computed."""
    kept = {key: value for key, value in task.recipe.values.items() if key not in ("device", "most")}
    if isinstance(task, Training):
        del kept["data"]
        if task.recipe.name == "calibration" and task.images is None:
            del kept["train_images"], kept["test_images"]
        known = {"digits": task.digits.source, "sha256": task.digits.sha256}
        return {"recipe": task.recipe.name, **known, **kept}
    return {"recipe": task.recipe.name, **kept}
