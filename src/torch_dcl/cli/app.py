"""The verbs of ``dcl``, with their options and examples."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from torch_dcl.cli.config import ABOUT
from torch_dcl.cli.console import HELP, SETTINGS, PlainGroup, check_output, command, console, for_machines, print_json
from torch_dcl.cli.data import AsJson, AsJsonEnd, data_app

app = typer.Typer(
    name="dcl",
    cls=PlainGroup,
    context_settings=HELP,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Deep Collaborative Learning for PyTorch: large layers replaced by small multiplied branches.",
    epilog="New here? [bold]dcl demo[/bold] takes two minutes.",
)
app.add_typer(data_app, name="data")

DATA_HELP = (
    "MNIST's folder. For table2, chart: sets (cifar10,cifar100,svhn), their folder, or both. For knowledge: any data. "
    "For imagenet: a folder of images, tar or prepared shards, or synthetic."
)


def _version(asked: bool) -> None:
    if asked:
        from torch_dcl import __version__

        sys.stdout.write(f"torch-dcl {__version__}\n")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Deep Collaborative Learning for PyTorch: large layers replaced by small multiplied branches."""
    del version


@app.command(**SETTINGS)
@command("dcl demo", "dcl demo --epochs 8 --seeds 5 --out my-demo")
def demo(
    out: Annotated[
        Path | None, typer.Option("--out", help="The run folder.  [dim]\\[default: runs/demo, or the next][/dim]")
    ] = None,
    images: Annotated[int | None, typer.Option(help="Images to train on.  [dim]\\[default: 5000][/dim]")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over them.  [dim]\\[default: 6][/dim]")] = None,
    seeds: Annotated[int | None, typer.Option(help="Networks of each kind.  [dim]\\[default: 3][/dim]")] = None,
    as_json: AsJsonEnd = False,
) -> None:
    """The idea in two minutes on a laptop: three networks, a verdict, a report."""
    from torch_dcl.cli.run import run_demo

    for_machines(as_json)
    run_demo(out, {"train_images": images, "epochs": epochs, "seeds": seeds}, as_json=as_json)


@app.command(**SETTINGS)
@command(
    "dcl plan vgg16",
    "dcl plan torchvision:vgg16 --measure --only 'classifier.*'",
    "dcl plan vgg16 --budget 0.5",
    "dcl plan vgg16 --ratio 0.125 --without 'features.*'",
    "dcl plan vgg16 --measure --device cuda --batch 64 --dtype bfloat16",
    "dcl plan vgg16 --select faster --mode compile --phase infer --device cuda --batch 64",
    "dcl plan timm:resnet50 --branches 3 --strategy stochastic -o plan.json",
    "dcl plan my_package.nets:make --input-size 1,28,28",
)
def plan(
    model: Annotated[
        str, typer.Argument(help="torchvision:NAME, timm:NAME, a bare name, module:function or file.py:function.")
    ],
    measure: Annotated[bool, typer.Option("--measure", help="Time every unit, plain and converted.")] = False,
    select: Annotated[
        str,
        typer.Option(
            help="smaller: units with fewer weights; faster: without those that are measured to slow the network down."
        ),
    ] = "smaller",
    mode: Annotated[
        str, typer.Option(help="With faster: how the network will run, eager, compile, reduce-overhead, graph.")
    ] = "eager",
    phase: Annotated[str, typer.Option(help="With faster: which phase, train or infer.")] = "train",
    only: Annotated[
        list[str] | None, typer.Option(help="Units or globs: 'classifier.*'. May be repeated.", metavar="NAMES")
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(help="Units or globs to leave out. May be repeated.", metavar="NAMES")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --only convert layers that are left alone.")] = False,
    branches: Annotated[int, typer.Option(help="Branches per unit.")] = 2,
    ratio: Annotated[float, typer.Option(help="Filters of a branch, as a fraction of the unit's.")] = 0.25,
    width: Annotated[
        str | None, typer.Option(help="Filters of a branch instead: 64, or 64,32 for each.", metavar="M[,M…]")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="Fraction of the weights to keep at most: 0.5. Chooses units and widths.")
    ] = None,
    round_to: Annotated[int, typer.Option(help="Round the widths of --ratio and --budget to a multiple of this.")] = 8,
    strategy: Annotated[
        str, typer.Option(help="deterministic, or stochastic for 3 or more branches.")
    ] = "deterministic",
    eps: Annotated[float | None, typer.Option(help="ε.  [dim]\\[default: the paper's, 10^-T][/dim]")] = None,
    input_size: Annotated[str | None, typer.Option(help="Size of one input: 3,224,224.", metavar="C,H,W")] = None,
    batch: Annotated[int, typer.Option(help="Inputs to run and measure with.")] = 1,
    device: Annotated[str, typer.Option(help="Where to run and measure: cpu, cuda, auto.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Type of weights and inputs: float32, bfloat16, float16.")] = "float32",
    memory: Annotated[
        str, typer.Option(help="Memory format: channels_last, contiguous; auto is channels_last on a GPU.")
    ] = "auto",
    as_json: AsJson = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan as JSON to a file.")] = None,
) -> None:
    """Say which layers of a network are worth converting, which are not, and why."""
    from torch_dcl.cli.plan import plan_network, read_width
    from torch_dcl.files import write_text

    if output is not None:
        check_output(output)
    planned = plan_network(
        model, input_size, device=device, dtype=dtype, memory=memory, only=only, force=force, without=without,
        batch=batch, branches=branches, ratio=ratio, width=read_width(width), budget=budget, round_to=round_to,
        strategy=strategy, eps=eps, measure=measure, select=select, mode=mode, phase=phase,
    )  # fmt: skip
    if output is not None:
        write_text(output, planned.to_json() + "\n")
    if as_json:
        print_json(planned.to_json())
    else:
        screen = console()
        screen.print(str(planned), markup=False, soft_wrap=True)
        if output is not None:
            screen.print(f"\nWritten to {output}", markup=False)


def _complete_recipe(incomplete: str) -> list[str]:
    return [name for name in ABOUT if name.startswith(incomplete)]


def _complete_run(incomplete: str) -> list[str]:
    """Run folders by their recipe.json, without loading anything."""
    folders = (str(path.parent) for pattern in ("*", "*/*") for path in Path("runs").glob(f"{pattern}/recipe.json"))
    return sorted(name for name in folders if name.startswith(incomplete))


def _complete_recipe_or_run(incomplete: str) -> list[str]:
    return _complete_recipe(incomplete) + _complete_run(incomplete)


@app.command(**SETTINGS)
@command(
    "dcl run table1 --dry-run",
    "dcl run table1 --smoke",
    "dcl run table1 --sets II-01,III-10 --models baseline,A2 --seeds 5 --data mnist/",
    "dcl run runs/table1 --resume",
    "dcl run table2 --networks bignet --data cifar10 --seeds 3 --minutes 9",
    "dcl run chart --data cifar10 --smoke",
    "dcl run figures --set parts=filters,curves",
    "dcl run knowledge --set network=net.py:make --set weights=net.safetensors --data mnist",
    "dcl ls table1 > mine.toml  &&  dcl run mine.toml --out runs/mine",
    "dcl run imagenet --network torchvision:resnet50 --budget 0.7 --data data/imagenet --dry-run",
    "torchrun --nproc-per-node 8 -m torch_dcl run table1 --data mnist/",
    "torchrun --nproc-per-node 8 --max-restarts 3 -m torch_dcl run imagenet --data data/imagenet",
)
def run(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A recipe, a TOML file, or a run folder.", metavar="NAME|FILE", autocompletion=_complete_recipe_or_run
        ),
    ],
    sets: Annotated[str | None, typer.Option(help="Which sets: II-01,III-10 or all.", metavar="NAMES")] = None,
    models: Annotated[
        str | None,
        typer.Option(
            help="Which columns: baseline,A2,low-rank or all; for table2: bignet,bignet+dcl.", metavar="NAMES"
        ),
    ] = None,
    networks: Annotated[
        str | None,
        typer.Option(help="For table2: lenet,bignet,wrn or all, each without and with DCL.", metavar="NAMES"),
    ] = None,
    network: Annotated[
        str | None, typer.Option(help="For imagenet: alexnet, torchvision:NAME, timm:NAME, file.py:function.")
    ] = None,
    plan: Annotated[str | None, typer.Option(help="For imagenet: a plan of dcl plan -o.", metavar="FILE")] = None,
    budget: Annotated[
        float | None, typer.Option(help="For imagenet: the fraction of the weights to keep at most, instead of a plan.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Networks of each kind.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training set.")] = None,
    scale: Annotated[
        float | None, typer.Option(help="For table2, chart: the fraction of each recipe's epochs to train, up to 1.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, auto.")] = None,
    data: Annotated[str | None, typer.Option(help=DATA_HELP, metavar="FOLDER|NAMES")] = None,
    pairs: Annotated[
        list[str] | None, typer.Option("--set", help="Any setting of the recipe. May be repeated.", metavar="KEY=VALUE")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The run folder.  [dim]\\[default: runs/NAME][/dim]")
    ] = None,
    dry: Annotated[bool, typer.Option("--dry-run", help="Estimate time and memory, and run nothing.")] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="Run a tiny version of the recipe, in seconds.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run that the folder holds.")] = False,
    join: Annotated[
        bool,
        typer.Option("--join", help="Share the run with other processes that are started with --join."),
    ] = False,
    minutes: Annotated[float | None, typer.Option(help="Stop after about this many minutes; resume later.")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Allow code that a file or a run folder names.")] = False,
    log: Annotated[
        # torchrun takes --log, also behind the module, for a short form of its own options (Python before 3.12.8).
        str | None,
        typer.Option("--tracker", "--log", help="Send losses and errors to a tracker while it runs: tensorboard."),
    ] = None,
    as_json: AsJsonEnd = False,
) -> None:
    """Run a recipe: the paper's tables and figures, on your machine."""
    from torch_dcl.cli.config import make_task
    from torch_dcl.cli.run import dry_run, run_task

    for_machines(as_json)
    named: dict[str, Any] = {
        "sets": sets, "models": models, "networks": networks, "seeds": seeds, "epochs": epochs, "scale": scale,
        "device": device, "data": data, "network": network, "plan": plan, "budget": budget,
    }  # fmt: skip
    task = make_task(
        recipe,
        named,
        pairs or [],
        out=out,
        smoke=smoke,
        resume=resume,
        minutes=minutes,
        dry=dry,
        trust=trust,
        join=join,
    )
    if dry:
        dry_run(task, as_json=as_json)
    else:
        run_task(task, as_json=as_json, log=log)


@app.command("ls", **SETTINGS)
@command("dcl ls", "dcl ls table1 > mine.toml", "dcl ls runs/table1")
def list_runs(
    name: Annotated[
        str | None,
        typer.Argument(help="A recipe or a run folder to print as TOML.", autocompletion=_complete_recipe_or_run),
    ] = None,
    runs: Annotated[Path, typer.Option(help="The folder with the runs.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List recipes, and runs with their state. With a name: print the recipe as TOML, to copy and edit."""
    from torch_dcl.cli.report import list_all, print_recipe

    if name is not None:
        print_recipe(name, runs, as_json=as_json)
    else:
        list_all(runs, as_json=as_json)


@app.command(**SETTINGS)
@command(
    "dcl report runs/table1", "dcl report table1 figures -o both.html", "dcl report runs/lenet runs/wrn -o table2.json"
)
def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="Run folders, names of runs in runs/, or files table1.json, table2.json and relations.json.",
            metavar="RUN…",
            autocompletion=_complete_run,
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The page to write; x.json for parts of Table 2 as one table.")
    ] = Path("report.html"),
    as_json: AsJson = False,
) -> None:
    """Write a page of one or several runs: the verdict, the paper's numbers beside yours, figures."""
    from torch_dcl.cli.report import write_report

    path = write_report(runs, output)
    if as_json:
        print_json({"page": str(path), "runs": list(runs)})
    else:
        console().print(f"Written to {path}", markup=False, soft_wrap=True)


@app.command(**SETTINGS)
@command("dcl doctor", "dcl doctor runs/table1 --json")
def doctor(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run folders; without any, all in runs/.", autocompletion=_complete_run)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the installation, GPUs, data and runs, and say how to fix what is wrong."""
    from torch_dcl.cli.doctor import print_checks

    print_checks(runs or [], as_json=as_json)
