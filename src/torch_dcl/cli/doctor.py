"""``dcl doctor``: the state of the installation, data and runs, with remedies."""

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import typer

from torch_dcl.cli.console import UsageError, console, nearest, print_json, say_state, table_of

Check = dict[str, Any]


def examine(runs: list[Path]) -> list[Check]:
    """All checks, also of some run folders: name, state (ok, note, problem), what was found, and what to do."""
    return [*_versions(), *_devices(), *_data(), *(_run(path) for path in runs)]


def _check(name: str, state: str, words: str, remedy: str = "") -> Check:
    return {"name": name, "state": state, "found": words, "remedy": remedy}


def _package(name: str, state: str, remedy: str) -> Check:
    """Whether a package is installed, and the state and the remedy if it is not."""
    try:
        return _check(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return _check(name, state, "not installed", remedy)


def _versions() -> list[Check]:
    import torch

    from torch_dcl import __version__

    rows = [
        _check("torch-dcl", "ok", f"{__version__}, in {Path(__file__).parents[1]}"),
        _check("Python", "ok", f"{platform.python_version()}, {sys.executable}"),
        _check("torch", "ok", f"{torch.__version__}, threads: {torch.get_num_threads()}, cores: {os.cpu_count()}"),
    ]
    needed = [_package(n, "problem", f"pip install {n}") for n in ("torchvision", "matplotlib", "safetensors")]
    extras = (("timm", "dcl plan timm:NAME"), ("onnx", "export to ONNX"))
    return [*rows, *needed, *(_package(n, "note", f"only for {use}: pip install {n}") for n, use in extras)]


def _devices() -> list[Check]:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        why = "torch is built for CUDA, but sees no device" if built else "torch is built for the CPU alone"
        remedy = (
            "look at nvidia-smi and CUDA_VISIBLE_DEVICES" if built else "for a GPU, install torch as pytorch.org says"
        )
        return [_check("GPU", "note", why, f"everything runs on the CPU; {remedy}"),
                _check("Triton", "note", "not used without a GPU")]  # fmt: skip
    from torch_dcl.kernels import runs_on

    rows = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        words = f"{about.name}, {about.total_memory / 2**30:.0f} GiB, compute capability {about.major}.{about.minor}"
        known = runs_on(torch.device("cuda", index))
        remedy = "" if known else "layers run in plain torch: kernels need compute capability 8.0 or newer"
        rows.append(_check(f"GPU {index}", "ok" if known else "note", words, remedy))
    triton = _package("triton", "problem", "pip install triton; without it a GPU computes in plain torch")
    return [*rows, {**triton, "name": "Triton"}, _host()]


def _host() -> Check:
    """The library that replays the host's work of units; asking for it compiles it, once a machine."""
    from torch_dcl.kernels import host

    ready = host.wait() is not None
    return _check("host", "ok" if ready else "note", host.state(),
                  "" if ready else "small layers run slower on a GPU; see docs/speed.md")  # fmt: skip


def _data() -> list[Check]:
    from torch_dcl.cli.data import available_data
    from torch_dcl.data import mnist_excerpt

    rows = []
    for row in available_data():
        if row["name"] == "mnist-excerpt":
            try:
                mnist_excerpt("test")
                rows.append(_check("embedded digits", "ok", f"{row['about']}, SHA-256 verified"))
            except (OSError, ValueError) as error:
                rows.append(_check("embedded digits", "problem", str(error), "install torch-dcl again"))
        else:
            words = f"{row['about']}, {row['found']}" if row["found"] else "not found"
            rows.append(_check(row["name"], "ok" if row["found"] else "note", words, row["remedy"] or ""))
    return rows


def _run(path: Path) -> Check:
    from torch_dcl.experiments.run_reader import as_argument, state_of
    from torch_dcl.files import sha256_file

    state = state_of(path)
    files = [file for file in sorted(path.iterdir()) if file.is_file() and not file.name.startswith("lock")]
    hashes = {file.name: sha256_file(file) for file in files}
    words = say_state(state)
    kind = {"damaged": "problem", "incomplete": "note"}.get(state.state, "ok")
    remedy = f"dcl run {as_argument(path)} --resume" if state.state == "incomplete" else ""
    if state.state == "damaged":
        remedy = "repair what the message names, or remove the folder"
    if (path / "table1.json").exists():
        from torch_dcl.experiments import TableError, load

        try:
            load(path / "table1.json")
        except TableError as error:
            kind, words, remedy = "problem", str(error), f"dcl run {as_argument(path)} --resume writes it again"
    return {**_check(str(path), kind, words, remedy), "sha256": hashes}


def print_checks(runs: list[Path], *, as_json: bool) -> None:
    """Print all checks, of all runs in ``runs/`` where none is named; the exit code is 1 where one is a problem."""
    from rich.text import Text

    from torch_dcl.experiments.run_reader import find_runs

    known = [Path(state.path) for state in find_runs(Path("runs"))]
    for path in runs:
        if not path.is_dir():
            near = nearest(str(path), map(str, known))
            raise UsageError(f"{path} is not a run folder; {near}" + ("" if known else " in runs/"))
    checks = examine(runs or known)
    bad = [check for check in checks if check["state"] == "problem"]
    if as_json:
        print_json({"ok": not bad, "checks": checks})
    else:
        table = table_of("", "", "")
        signs = {"ok": Text("ok", "green"), "note": Text("–", "yellow"), "problem": Text("problem", "red")}
        for check in checks:
            words = Text(check["found"])
            if check["remedy"]:
                words.append(f"\n→ {check['remedy']}", "dim")
            # All hashes of all runs would bury the rest.
            for name, digest in check.get("sha256", {}).items() if runs else ():
                words.append(f"\n{digest[:16]}  {name}", "dim")
            table.add_row(signs[check["state"]], Text(check["name"]), words)
        console().print(table)
        console().print(f"\n{len(bad)} {'problem' if len(bad) == 1 else 'problems'}." if bad else "\nAll is well.")
    if bad:
        raise typer.Exit(1)
