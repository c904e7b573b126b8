"""``dcl plan``: find a network by name, and print which of its units pay."""

import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch_dcl.cli.names import UsageError, in_options, nearest, split
from torch_dcl.cli.places import read_device

if TYPE_CHECKING:
    from torch import nn

    from torch_dcl.convert import Plan

__all__ = ["find_model", "plan_network", "prepared", "read_size", "read_width"]

Size = tuple[int, ...]
_OPTIONS = ("batch", "branches", "budget", "eps", "force", "input-size", "mode", "phase", "ratio", "round-to", "select",
            "strategy", "width")  # fmt: skip
_TYPES = ("float32", "bfloat16", "float16")
_FORMATS = ("auto", "channels_last", "contiguous")


def plan_network(
    name: str,
    input_size: str | None,
    *,
    device: str,
    dtype: str,
    memory: str,
    only: Sequence[str] | None,
    force: bool,
    without: Sequence[str] | None,
    batch: int,
    **wish: Any,
) -> "Plan":
    """Build a network and plan its conversion.

    Args:
        name: As for `find_model`.
        input_size: Of one input, as it was typed.
        device: As for `read_device`.
        dtype: As for `prepared`.
        memory: As for `prepared`.
        only: Names and globs of the units to select, as they were typed.
        force: Whether an exact name among them may take a layer that is left alone.
        without: Names and globs of the units to leave out.
        batch: Inputs to run with.
        **wish: Further arguments of `torch_dcl.plan`.

    Raises:
        UsageError: An argument is invalid.
        RuntimeError: The network cannot be built, or does not run.
    """
    from torch_dcl.convert import plan  # noqa: PLC0415

    if force and not only:
        raise UsageError("--force goes with --only, and says that layers named there are converted all the same")
    given = read_size(input_size) if input_size else None
    network, known = find_model(name)
    size = given or known
    if size is None:
        raise UsageError(f"the size of {name}'s input is not known; give it, such as --input-size 3,224,224")
    network = prepared(network, read_device(device), dtype, memory)
    try:
        made = plan(network, size, batch=batch, **wish)
        if only:
            made = made.only(*split(only), force=force)
        return made.without(*split(without)) if without else made
    except (ValueError, TypeError) as error:
        if (cause := error.__cause__) is not None:
            shown = "×".join(map(str, size))
            raise RuntimeError(
                f"{name} does not run on {'an input' if batch == 1 else f'{batch} inputs'} of {shown}: "
                f"{type(cause).__name__}: {cause}; check --input-size, which is without the batch"
            ) from error
        raise UsageError(in_options(str(error), _OPTIONS)) from error


def find_model(name: str) -> tuple["nn.Module", Size | None]:
    """Build the network that is meant, with random weights.

    Args:
        name: ``torchvision:NAME``, ``timm:NAME``, ``module:function``, ``file.py:function``, or a bare name, which is
            looked for in torchvision first.

    Returns:
        The network, and the size of its input where that is known.

    Raises:
        UsageError: There is no such network; the nearest is offered.
    """
    home, colon, rest = name.rpartition(":")
    if home == "torchvision":
        return _torchvision(rest)
    if home == "timm":
        return _timm(rest)
    if colon:
        return _own(home, rest)
    from torchvision.models import list_models  # noqa: PLC0415

    ours = list_models()
    if name in ours:
        return _torchvision(name)
    theirs = _timm_names()
    if name in theirs:
        return _timm(name)
    raise UsageError(f"there is no network {name!r} in torchvision{' or timm' if theirs else ''}; "
                     f"{_near(name, [*ours, *theirs])}")  # fmt: skip


def prepared(network: "nn.Module", device: str, dtype: str, memory: str) -> "nn.Module":
    """The network where and as it is to be measured.

    Args:
        network: As it was built.
        device: Where to.
        dtype: The name of its type.
        memory: How its 2-d convolutions lie there: "channels_last", "contiguous", or "auto" for the first on a GPU,
            whose kernels take that, and as they are elsewhere.

    Raises:
        UsageError: There is no such type or format.
    """
    import torch  # noqa: PLC0415

    for option, given, known in (("dtype", dtype, _TYPES), ("memory", memory, _FORMATS)):
        if given not in known:
            raise UsageError(f"--{option} is one of {', '.join(known)}, not {given!r}")
    network = network.to(device, getattr(torch, dtype))
    if memory == "auto":
        if torch.device(device).type != "cuda":
            return network
        memory = "channels_last"
    return network.to(memory_format=torch.channels_last if memory == "channels_last" else torch.contiguous_format)


def _near(name: str, known: list[str]) -> str:
    found = nearest(name, known)
    if found.startswith("did you mean"):
        return found
    return "or is it your own? Then write module:function or file.py:function"


def _torchvision(name: str) -> tuple["nn.Module", Size | None]:
    from torchvision.models import get_model, list_models  # noqa: PLC0415

    if name not in (known := list_models()):
        raise UsageError(f"torchvision has no network {name!r}; {_near(name, known)}")
    model: nn.Module = get_model(name, weights=None)
    return model, (3, 299, 299) if name == "inception_v3" else (3, 224, 224)


def _timm_names() -> list[str]:
    try:
        import timm  # noqa: PLC0415
    except ImportError:
        return []
    names: list[str] = timm.list_models()
    return names


def _timm(name: str) -> tuple["nn.Module", Size | None]:
    try:
        import timm  # noqa: PLC0415
    except ImportError:
        raise UsageError("timm is not installed; pip install timm") from None
    if name.partition(".")[0] not in (known := timm.list_models()):
        raise UsageError(f"timm has no network {name!r}; {_near(name, known)}")
    model: nn.Module = timm.create_model(name, pretrained=False)
    about: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    return model, tuple(about.get("input_size") or (3, 224, 224))


def _own(home: str, function: str) -> tuple["nn.Module", Size | None]:
    from torch import nn  # noqa: PLC0415

    module = _module(home)
    if not hasattr(module, function):
        callables = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UsageError(f"{home} has no function {function!r}; {nearest(function, callables)}")
    found = getattr(module, function)
    if callable(found) and not isinstance(found, nn.Module):
        _check_signature(f"{home}:{function}", found)
        found = _run_theirs(f"{home}:{function}", found)
    if not isinstance(found, nn.Module):
        raise UsageError(f"{home}:{function} gives {type(found).__name__}, not a torch network")
    size = getattr(found, "input_size", None)
    return found, tuple(size) if size is not None else None


def _check_signature(what: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have none
        return
    try:
        signature.bind()
    except TypeError as error:
        raise UsageError(f"{what} cannot be called without arguments ({error}); write one that can") from None


def _run_theirs(what: str, run: Callable[[], Any]) -> Any:
    """Run a user's code; an error in it says whose it is and where."""
    try:
        return run()
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
        own = [frame for frame in frames if not frame.filename.startswith(_not_theirs())] or frames
        where = f" ({own[-1].filename}, line {own[-1].lineno})" if own and not isinstance(error, SyntaxError) else ""
        raise RuntimeError(
            f"{what} raised {type(error).__name__}: {error}{where}; --debug shows the traceback"
        ) from error


def _not_theirs() -> tuple[str, ...]:
    """How the paths of files begin that a user did not write: Python's, of installed packages, and ours."""
    paths = sysconfig.get_paths()
    return "<", str(Path(__file__).parents[1]), *(paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))


def _module(home: str) -> ModuleType:
    if home.endswith(".py"):
        path = Path(home)
        if not path.is_file():
            raise UsageError(f"{home} does not exist")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise UsageError(f"{home} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(path.parent.resolve()))
        loader = spec.loader
        _run_theirs(f"the import of {home}", lambda: loader.exec_module(module))
        return module
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: ModuleType = _run_theirs(f"the import of {home}", lambda: importlib.import_module(home))
    except RuntimeError as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and f"{home}.".startswith(f"{missing.name}."):
            raise UsageError(
                f"there is no module {home!r}; write torchvision:NAME, timm:NAME, or a module that can be imported"
            ) from None
        raise
    return found


def read_size(text: str) -> Size:
    """The size of an input from ``3,224,224`` or ``3x224x224``.

    Raises:
        UsageError: It is something else.
    """
    try:
        size = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        size = ()
    if not size or min(size) < 1:
        raise UsageError(f"--input-size {text!r} is not of the form 3,224,224")
    return size


def read_width(text: str | None) -> int | Size | None:
    """The filters of a branch from ``64``, or of each branch from ``64,32``.

    Raises:
        UsageError: It is something else.
    """
    if text is None:
        return None
    try:
        widths = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--width {text!r} is not of the form 64, or 64,32 with a number for each branch") from None
    return widths if len(widths) > 1 else widths[0]
