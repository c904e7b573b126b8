"""The command that gives a part of a table again, with every setting in which its run was not the protocol's."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from torch_dcl.experiments.engine import BATCH, SCHEDULE

__all__ = ["command_for"]


def command_for(
    recipe: Mapping[str, Any], sets: Sequence[str], columns: Sequence[str], seeds: int | None = None
) -> str:
    """The command for some sets and columns of Table 1.

    Args:
        recipe: What the run folder keeps; empty for the protocol.
        sets: Which.
        columns: Which.
        seeds: How many; None for as many as the run asked for.
    """
    words = ["dcl", "run", "table1", "--sets", ",".join(name.removeprefix("MNIST-") for name in sets)]
    words += ["--models", ",".join(columns)]
    words += ["--seeds", str(recipe.get("seeds", 5) if seeds is None else seeds)]
    settings: dict[str, str] = {}
    if recipe:
        schedule = recipe["schedule"]
        if schedule["epochs"] != SCHEDULE.epochs:
            words += ["--epochs", str(schedule["epochs"])]
        if str(recipe["digits"]).startswith("the embedded"):
            words += ["--data", "excerpt"]
        if schedule["warmup"] != SCHEDULE.warmup:
            settings["warmup"] = str(schedule["warmup"])
        if tuple(schedule["drops"]) != SCHEDULE.drops:
            settings["drops"] = ",".join(f"{drop:g}" for drop in schedule["drops"])
        if schedule["factor"] != SCHEDULE.factor:
            settings["factor"] = f"{schedule['factor']:g}"
        if recipe["batch"] != BATCH:
            settings["batch"] = str(recipe["batch"])
        if recipe["precision"] is not None:
            settings["precision"] = recipe["precision"]
        if recipe["images"]:
            settings["train_images"], settings["test_images"] = map(str, recipe["images"])
    for key, value in settings.items():
        words += ["--set", f"{key}={value}"]
    return shlex.join(words)
