"""``dcl run``: recipes."""

import dataclasses
import itertools
import json
import math
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_dcl.cli.names import UsageError
from torch_dcl.cli.recipes import Recipe, as_toml, find_recipe, read_settings, read_trials, with_settings
from torch_dcl.cli.screen import Bar, bullets, console, first_rank, say_minutes, several, world_size

if TYPE_CHECKING:
    from rich.table import Table as RichTable

    from torch_dcl.paper.digitsets import Digits
    from torch_dcl.paper.engine import Job, Outcome, Settings
    from torch_dcl.paper.table import Table
    from torch_dcl.training.runs import RunFolder

__all__ = ["Task", "make_task", "run_task"]

FEW = 4
SIGNS = "Bold: the best DCL model. ▾ clearly below the baseline, ▴ above. * fitted to the paper. † diverged."
FLEET = re.compile(r"^(?:(\d+)/(\d+) )?fleet (\d+) of (\d+), (?P<name>.*): (?P<networks>[\d,]+) networks in")


@dataclasses.dataclass(frozen=True)
class Task:
    """A recipe that is about to be run."""

    recipe: Recipe
    out: Path
    resume: bool
    smoke: bool
    seconds: float
    device: str
    digits: "Digits"
    settings: "Settings"

    @property
    def images(self) -> tuple[int, int] | None:
        """How many images to train on and to test with; None for all."""
        if "train_images" not in self.recipe.values:
            return None
        asked = self.recipe["train_images"] or 60_000, self.recipe["test_images"] or 10_000
        return None if asked == (60_000, 10_000) else asked

    @property
    def go_on(self) -> str:
        """The command that goes on with the run."""
        return f"dcl run {shlex.quote(str(self.out))} --resume"


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
        minutes: When to begin no further fleet.
        dry: Whether nothing will be written.

    Raises:
        UsageError: Something that was typed cannot be meant.
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
    from torch_dcl.paper.digitsets import read_mnist  # noqa: PLC0415
    from torch_dcl.paper.engine import Settings  # noqa: PLC0415
    from torch_dcl.training import Schedule  # noqa: PLC0415

    device = read_device(recipe["device"])
    try:
        schedule = Schedule(recipe["epochs"], recipe["warmup"], tuple(recipe["drops"]), recipe["factor"])
    except ValueError as error:
        raise UsageError(str(error)) from None
    precision = None if recipe["precision"] == "auto" else recipe["precision"]
    curves = recipe.values.get("curves") == "yes"
    made = Settings(schedule, recipe["batch"], device, precision, recipe["most"], curves)
    digits = read_mnist(find_mnist(recipe["data"]))
    seconds = math.inf if minutes is None else 60 * minutes
    return Task(recipe, out, resume, smoke, seconds, device, digits, made)


def _fresh(out: Path) -> Path:
    """A folder that is not there yet: smoke runs may be repeated."""
    count, path = 1, out
    while path.exists():
        count += 1
        path = out.with_name(f"{out.name}-{count}")
    return path


def jobs_of(task: Task) -> list["Job"]:
    """Everything that the recipe trains, for an estimate."""
    from torch_dcl.paper import table1  # noqa: PLC0415
    from torch_dcl.paper.engine import Job  # noqa: PLC0415
    from torch_dcl.paper.search import stored_choice  # noqa: PLC0415

    recipe = task.recipe
    if recipe.name == "table1":
        return table1.jobs_of(recipe["models"], recipe["sets"], recipe["seeds"], stored_choice())
    if recipe.name == "table1-search":
        trials = read_trials(recipe["trials"])
        return [
            Job(column, name, recipe["seed"], *trial)
            for column in recipe["models"] for name in recipe["sets"] for trial in trials
        ]  # fmt: skip
    first = [Job("baseline", f"{name}@{strength}", 0, recipe["lr"])
             for name in recipe["sets"] for strength in recipe["start"]]  # fmt: skip
    return first + [
        Job("baseline", f"{name}@round {number}", seed, recipe["lr"])
        for number in range(recipe["rounds"]) for name in recipe["sets"] for seed in range(recipe["seeds"])
    ]  # fmt: skip


def dry_run(task: Task) -> None:
    """Say what the run would take."""
    from rich.table import Table  # noqa: PLC0415

    from torch_dcl.cli.speed import H200, memory, speed_of  # noqa: PLC0415
    from torch_dcl.paper.engine import plan_fleets  # noqa: PLC0415
    from torch_dcl.paper.table1 import estimate  # noqa: PLC0415

    screen = console()
    jobs = jobs_of(task)
    images = task.images[0] if task.images else 60_000
    found = estimate(jobs, task.settings, images)
    largest = max(sum(job.networks for job in fleet) for fleet in plan_fleets(jobs, task.settings.most))
    speed = speed_of(task.device)
    minutes = found.minutes(speed.images)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    table.add_row("recipe", f"{task.recipe.name}: {len(task.recipe['sets'])} sets, {len(jobs):,} entries")
    table.add_row("networks", f"{found.networks:,}, in {found.fleets} fleets of up to {largest}")
    table.add_row("images", f"{found.images:,} to train on: {images:,} a network, {_epochs(task)}")
    table.add_row("digits", task.digits.source)
    table.add_row("device", task.device)
    table.add_row("memory", f"about {memory(largest, len(task.recipe['sets']), images):.1f} GiB")
    table.add_row("speed", f"{speed.images:,.0f} images/s ({speed.source})")
    table.add_row("time", f"about {say_minutes(60 * minutes)}, without writing the sets and judging")
    if task.device == "cpu":
        table.add_row("", f"about {say_minutes(found.images / H200)} on an H200")
    table.add_row("folder", str(task.out))
    screen.print(table)
    screen.print("Nothing was run or written.", style="dim")


def run_task(task: Task) -> None:
    """Run, print what came out, and say where it is."""
    screen = console()
    if first_rank() and not (task.out / "recipe.json").exists():
        from torch_dcl.files import write_text  # noqa: PLC0415

        task.out.mkdir(parents=True, exist_ok=True)
        write_text(task.out / "recipe.toml", as_toml(task.recipe))
    elif not first_rank():
        _wait_for(task.out / "recipe.json")
    start = time.perf_counter()
    work = {"table1": _table1, "table1-search": _search, "calibration": _calibration}[task.recipe.name]
    screen.print(f"[bold]{task.recipe.name}[/bold] on {task.device}, written with {task.digits.source}")
    try:
        finished = work(task)
    except KeyboardInterrupt:
        _say_stopped(task, "Interrupted.")
        raise
    if finished:
        spent = say_minutes(time.perf_counter() - start)
        screen.print(f"{spent}, in [bold]{task.out}[/bold]. A page of it: dcl report {shlex.quote(str(task.out))}"
                     if task.recipe.name == "table1" else f"{spent}, in [bold]{task.out}[/bold].")  # fmt: skip
    else:
        _say_stopped(task, "Time is up.")


def _wait_for(path: Path, seconds: float = 120) -> None:
    """Let the first rank make the folder."""
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)


def _say_stopped(task: Task, why: str) -> None:
    from torch_dcl.cli.folders import say, state_of  # noqa: PLC0415

    state = state_of(task.out)
    # This process may still be the holder of the lock.
    told = say(dataclasses.replace(state, state="incomplete") if state.state == "running" else state)
    console().print(f"{why} {task.out} is {told}; what is done is saved.\nGo on with:  {task.go_on}", soft_wrap=True)


def _listener(bar: Bar) -> Callable[[str], None]:
    """What the other rooms call with lines of progress: a fleet moves the bar, anything else is printed."""

    def report(line: str) -> None:
        if found := FLEET.match(line):
            bar.now(f"last: {found['name']}")
            bar.advance(int(found["networks"].replace(",", "")))
        else:
            bar.note(line)

    return report


def _table1(task: Task) -> bool:
    from torch_dcl.files import write_text  # noqa: PLC0415
    from torch_dcl.paper import as_html, as_text, save, verdict  # noqa: PLC0415
    from torch_dcl.paper.engine import plan_fleets  # noqa: PLC0415
    from torch_dcl.paper.table1 import run_table1  # noqa: PLC0415

    recipe, screen = task.recipe, console()
    done, jobs = _done_jobs(task), jobs_of(task)
    before = [job for job in jobs if _name(job) in done]
    # With torchrun the first rank sees its own share.
    fleets = plan_fleets([job for job in jobs if _name(job) not in done], task.settings.most)[:: world_size()]
    there, here = (sum(job.networks for job in some) for some in (before, itertools.chain(*fleets)))
    with Bar(screen, there + here, "networks, first rank" if several() else "networks") as bar:
        bar.begin_at(there)
        bar.now("writing the sets")
        table = run_table1(
            task.out, task.digits, task.settings, columns=recipe["models"], sets=recipe["sets"], seeds=recipe["seeds"],
            images=task.images, resume=task.resume, seconds=task.seconds, report=_listener(bar),
        )  # fmt: skip
    if table is None:
        return not first_rank()
    told = trial(task)
    if told:
        title = f"{table.title} (a trial, not the protocol)"
        table = dataclasses.replace(table, title=title, deviations=(*told, *table.deviations))
    save(table, task.out / "table1.json")
    write_text(task.out / "table1.html", as_html(table))
    if len(table.sets) <= FEW:
        screen.print(_long_table(table, weights=screen.width >= 92))
        screen.print(SIGNS, style="dim")
    else:
        styled = screen.is_terminal and not screen.no_color
        screen.out(as_text(table, width=screen.width, styled=styled), highlight=False)
    screen.print()
    bullets(screen, [*told, *verdict(table)])
    screen.print()
    return True


def _long_table(table: "Table", *, weights: bool) -> "RichTable":
    """Few sets: a line for every cell, with the paper's number, ours, and the difference to the baseline.

    The weights are what a narrow screen can do without; a cut number is not.
    """
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415
    from rich.markup import escape  # noqa: PLC0415
    from rich.table import Table as RichTable  # noqa: PLC0415

    from torch_dcl.paper.statistics import signed  # noqa: PLC0415
    from torch_dcl.paper.text import mark  # noqa: PLC0415

    made = RichTable(box=SIMPLE_HEAD, pad_edge=False, title=table.title, title_justify="left", title_style="bold")
    names = ("set", "model", "paper %", "ours % ± std (n)", "", "to the baseline, 95 %", "weights")
    for name in names if weights else names[:-1]:
        made.add_column(name, justify="left" if name in ("set", "model", "") else "right", no_wrap=True)
    for name in table.sets:
        cells = [cell for column in table.columns if (cell := table.cell(name, column)) is not None]
        for i, cell in enumerate(cells):
            spread = "" if cell.std is None else f" ± {cell.std:.2f}"
            gap = table.to_baseline(cell)
            told = "" if gap is None else f"{signed(gap.mean)} [{signed(gap.low)}, {signed(gap.high)}]"
            made.add_row(
                "" if i else name.removeprefix("MNIST-"), cell.column, cell.theirs,
                f"{cell.mean:.2f}{spread} ({len(cell.errors)})", mark(table, cell), escape(told),
                *([f"{cell.weights:,}"] if weights else []),
                style="bold" if cell.column in table.best(name) else "", end_section=i == len(cells) - 1,
            )  # fmt: skip
    return made


def trial(task: Task) -> list[str]:
    """Where the run is not the protocol's."""
    told = []
    if task.images:
        told.append(
            f"Only the first {task.images[0]:,} images of a set to train on and {task.images[1]:,} to test with."
        )
    if task.settings.schedule.epochs != 24:
        told.append(f"Trained for {_epochs(task)}, while the learning rates were chosen for 24.")
    if task.digits.source.startswith("the embedded"):
        told.append("Written with an excerpt of MNIST, while how hard the sets are was fitted with all of it.")
    return told


def _epochs(task: Task) -> str:
    count = task.settings.schedule.epochs
    return f"{count} epoch{'s' if count > 1 else ''}"


def _name(job: "Job") -> tuple[str, str, int]:
    return job.column, job.data, job.seed


def _done_jobs(task: Task) -> set[tuple[str, str, int]]:
    from torch_dcl.training.runs import RunFolder  # noqa: PLC0415

    if not task.resume:
        return set()
    records = RunFolder(task.out, {}).read("outcomes")
    return {(r["job"]["column"], r["job"]["data"], r["job"]["seed"]) for r in records}


def _plain(task: Task) -> dict[str, Any]:
    """The recipe as the run folder keeps it: what changes the result, and not where it is computed."""
    kept = {key: value for key, value in task.recipe.values.items() if key not in ("data", "device", "most")}
    return {"recipe": task.recipe.name, "digits": task.digits.source, **kept}


def _alone() -> None:
    if several():
        raise UsageError("this recipe runs in one process; start it without torchrun")


def _search(task: Task) -> bool:
    """The trials of `torch_dcl.paper.search`, fleet by fleet, so that what is done is kept."""
    from torch_dcl.paper.digitsets import make_sets  # noqa: PLC0415
    from torch_dcl.paper.engine import plan_fleets, run_jobs  # noqa: PLC0415
    from torch_dcl.paper.search import as_json  # noqa: PLC0415
    from torch_dcl.training.runs import RunFolder  # noqa: PLC0415

    _alone()
    start, jobs = time.perf_counter(), jobs_of(task)

    with RunFolder.open(task.out, _plain(task), resume=task.resume) as folder:

        def keep(found: "list[Outcome]") -> None:
            for row in as_json(found):
                folder.append("trials", row)

        known = {_outcome(row).job for row in folder.read("trials")}
        left = [job for job in jobs if job not in known]
        with Bar(console(), sum(job.networks for job in jobs), "networks") as bar:
            bar.begin_at(sum(job.networks for job in jobs if job in known))
            bar.now("writing the sets")
            sets = make_sets(
                task.digits, task.recipe["sets"], "choose", device=task.settings.device, images=task.images
            )
            for fleet in plan_fleets(left, task.settings.most):
                if time.perf_counter() - start > task.seconds:
                    return False
                run_jobs(fleet, sets, task.settings, _listener(bar), keep)
        _print_choice(task, folder)
    return True


def _print_choice(task: Task, folder: "RunFolder") -> None:
    from rich.table import Table  # noqa: PLC0415

    from torch_dcl.files import write_text  # noqa: PLC0415
    from torch_dcl.paper.search import choose  # noqa: PLC0415
    from torch_dcl.training.runs import environment  # noqa: PLC0415

    rows = folder.read("trials")
    choice = choose([_outcome(row) for row in rows])
    console().print("Chosen learning rates, and bounds on the gradient's norm:")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("model")
    counts = sorted({count for by_count in choice.values() for count in by_count})
    for count in counts:
        table.add_column(f"{count} digits", justify="right")
    plain: dict[str, dict[str, dict[str, float | None]]] = {}
    for column, by_count in choice.items():
        cells = [f"{t.lr:g}" + ("" if math.isinf(t.clip) else f", norm {t.clip:g}") for t in by_count.values()]
        table.add_row(column, *cells)
        plain[column] = {
            str(count): {"lr": t.lr, "clip": None if math.isinf(t.clip) else t.clip} for count, t in by_count.items()
        }
    console().print(table)
    content = {"title": "The search for learning rates behind Table 1", "recipe": folder.recipe,
               "environment": environment(), "choice": plain, "trials": rows}  # fmt: skip
    write_text(task.out / "search.json", json.dumps(content, indent=1) + "\n")


def _outcome(row: dict[str, Any]) -> "Outcome":
    from torch_dcl.paper.engine import Job, Outcome  # noqa: PLC0415

    names = {field.name for field in dataclasses.fields(Job)}
    job = {key: value for key, value in row.items() if key in names}
    job["clip"] = math.inf if job.get("clip") is None else job["clip"]
    return Outcome(Job(**job), row["error"], row["test_loss"], math.nan, row["stopped"])


def _calibration(task: Task) -> bool:
    """Round by round: each takes what was tried before it."""
    from torch_dcl.paper.calibrate import calibrate  # noqa: PLC0415
    from torch_dcl.training.runs import RunFolder  # noqa: PLC0415

    _alone()
    recipe, start = task.recipe, time.perf_counter()
    with RunFolder.open(task.out, _plain(task), resume=task.resume) as folder:
        rounds = folder.read("rounds")
        tried = _tried(rounds[-1]["tried"]) if rounds else None
        each = len(recipe["sets"]) * recipe["seeds"]
        first = len(recipe["sets"]) * len(recipe["start"])
        with Bar(console(), first + recipe["rounds"] * each, "networks") as bar:
            bar.begin_at(first + (len(rounds) - 1) * each if rounds else 0)
            for number in range(len(rounds), 1 + recipe["rounds"]):
                if time.perf_counter() - start > task.seconds:
                    return False
                bar.now(f"round {number}")
                found = calibrate(
                    task.digits, task.settings, lr=lambda _name: float(recipe["lr"]), sets=recipe["sets"],
                    start=recipe["start"], rounds=min(number, 1), seeds=recipe["seeds"], tried=tried,
                    report=_listener(bar),
                )  # fmt: skip
                tried = {name: fitted.tried for name, fitted in found.items()}
                folder.append("rounds", {"round": number, "tried": tried})
        _print_fitted(task, tried or {})
    return True


def _tried(stored: dict[str, dict[str, list[float]]]) -> dict[str, dict[float, list[float]]]:
    return {name: {float(strength): errors for strength, errors in by.items()} for name, by in stored.items()}


def _print_fitted(task: Task, tried: dict[str, dict[float, list[float]]]) -> None:
    from rich.table import Table  # noqa: PLC0415

    from torch_dcl.files import write_text  # noqa: PLC0415
    from torch_dcl.paper.calibrate import Fitted  # noqa: PLC0415
    from torch_dcl.paper.reported import TABLE1  # noqa: PLC0415
    from torch_dcl.paper.statistics import mean, signed  # noqa: PLC0415
    from torch_dcl.training.runs import environment  # noqa: PLC0415

    console().print("Strengths at which the baseline errs as the paper's does:")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("set", "strength", "error % (n)", "paper %", "off"):
        table.add_column(name, justify="left" if name == "set" else "right")
    rows = []
    for name, by_strength in tried.items():
        fitted = Fitted(name, TABLE1[name]["baseline"].mean, by_strength)
        errors = by_strength[fitted.best]
        off = f"{signed(100 * fitted.off(fitted.best), 1)} %"
        table.add_row(name, f"{fitted.best:g}", f"{mean(errors):.2f} ({len(errors)})", f"{fitted.target:.2f}", off)
        rows.append({"set": name, "paper": fitted.target, "strength": fitted.best, "errors": errors,
                     "tried": {f"{s:g}": e for s, e in by_strength.items()}})  # fmt: skip
    console().print(table)
    content = {"title": "How hard the multi-digit sets are, fitted to the paper's baseline column",
               "recipe": _plain(task), "environment": environment(), "sets": rows}  # fmt: skip
    write_text(task.out / "calibration.json", json.dumps(content, indent=1) + "\n")
