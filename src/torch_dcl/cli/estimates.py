"""``dcl run --dry-run``: what a run would take, without running it."""

from typing import Any

from torch_dcl.cli.screen import console, print_json, say_minutes
from torch_dcl.cli.tasks import Sweep, Task, Training, jobs_of

__all__ = ["dry_run"]


def dry_run(task: Task, *, as_json: bool = False) -> None:
    """Say what the run would take.

    Args:
        task: The run.
        as_json: Whether to say it to a machine.
    """
    if isinstance(task, Sweep):
        from torch_dcl.cli.natural_estimates import estimate  # noqa: PLC0415

        rows, plain = estimate(task)
    else:
        rows, plain = _training(task) if isinstance(task, Training) else _looking(task)
    rows.append(("folder", str(task.out)))
    if as_json:
        print_json({"recipe": task.recipe.name, **plain, "device": task.device, "folder": str(task.out)})
        return
    from rich.markup import escape  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    for name, words in rows:
        table.add_row(name, escape(words))
    console().print(table)
    console().print("Nothing was run or written.", style="dim")


def _training(task: Training) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    from torch_dcl.cli.speed import H200, memory, speed_of  # noqa: PLC0415
    from torch_dcl.experiments.engine import plan_fleets  # noqa: PLC0415
    from torch_dcl.experiments.table1 import estimate  # noqa: PLC0415

    jobs = jobs_of(task)
    images = task.images[0] if task.images else 60_000
    found = estimate(jobs, task.settings, images)
    largest = max(sum(job.networks for job in fleet) for fleet in plan_fleets(jobs, task.settings.most))
    sets = len({job.data.split("@")[0] for job in jobs})
    gib = memory(largest, sets, images)
    speed = speed_of(task.device)
    minutes = found.minutes(speed.images)
    rows = [
        ("recipe", f"{task.recipe.name}: {sets} set{'s' if sets > 1 else ''}, {len(jobs):,} entries"),
        ("networks", f"{found.networks:,}, in {found.fleets} fleets of up to {largest}"),
        ("images", f"{found.images:,} to train on: {images:,} a network, {task.epochs}"),
        ("digits", task.digits.source),
        ("device", task.device),
        ("memory", f"about {gib:.1f} GiB"),
        ("speed", f"{speed.images:,.0f} images/s ({speed.source})"),
        ("time", f"about {say_minutes(60 * minutes)}, without writing the sets and judging"),
    ]
    if task.device == "cpu":
        rows.append(("", f"about {say_minutes(found.images / H200)} on an H200"))
    plain = {"entries": len(jobs), "networks": found.networks, "fleets": found.fleets, "images": found.images,
             "digits": task.digits.source, "memory_gib": gib, "images_per_s": speed.images, "speed": speed.source,
             "minutes": minutes}  # fmt: skip
    return rows, plain


def _looking(task: Task) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    recipe = task.recipe
    rows = [
        ("recipe", "knowledge: one pass over the images for each filter"),
        ("network", f"{recipe['network']}, {recipe['weights']}"),
        ("layers", ", ".join(recipe["layers"]) or "all DCL layers"),
        ("filters", ", ".join(map(str, recipe["filters"])) or "one a layer, chosen by a rule"),
        ("images", f"{recipe['data']}, {recipe['images'] or 'all'} of its test images"),
        ("device", task.device),
    ]
    return rows, {key: recipe[key] for key in ("network", "weights", "data", "layers", "filters", "images")}
