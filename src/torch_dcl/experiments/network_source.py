"""Networks by name: of torchvision, of timm, or from a function of the user."""

import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch_dcl.experiments.settings import SettingError
from torch_dcl.files import sha256_bytes

if TYPE_CHECKING:
    from torch import nn

__all__ = ["code_hash", "find_model"]

Size = tuple[int, ...]
_OWN = "or is it your own? Then write module:function or file.py:function"


def find_model(name: str, **options: Any) -> tuple["nn.Module", Size | None]:
    """Build a network by name, with random weights; return it and the size of its input, where that is known.

    The name is ``torchvision:NAME``, ``timm:NAME``, ``module:function``, ``file.py:function``, or a bare name, which is
    looked for in torchvision first. Options such as ``num_classes`` are for torchvision and timm. An unknown name is a
    SettingError with the nearest one.
    """
    home, colon, rest = name.rpartition(":")
    if home == "torchvision":
        return _torchvision(rest, **options)
    if home == "timm":
        return _timm(rest, **options)
    if colon:
        return _own(home, rest)
    from torchvision.models import list_models

    ours = list_models()
    if name in ours:
        return _torchvision(name, **options)
    theirs = _timm_names()
    if name in theirs:
        return _timm(name, **options)
    where = f"torchvision{' or timm' if theirs else ''}"
    raise SettingError(f"there is no network {name!r} in {where}", name, [*ours, *theirs], _OWN)


def code_hash(name: str, network: "nn.Module") -> str:
    """The SHA-256 of the user's files that a network comes from: the one that its name gives, and those of its layers.

    Where they are makes no difference. It is empty for a network of an installed package.
    """
    home = name.rpartition(":")[0]
    files = {home if home.endswith(".py") else getattr(sys.modules.get(home), "__file__", None)}
    files |= {
        getattr(getattr(type(layer).forward, "__code__", None), "co_filename", None) for layer in network.modules()
    }
    theirs = {Path(file) for file in files if file and not file.startswith(_not_theirs())}
    contents = {file.read_bytes() for file in theirs if file.is_file()}
    return sha256_bytes(*sorted(contents)) if contents else ""


def _torchvision(name: str, **options: Any) -> tuple["nn.Module", Size | None]:
    from torchvision.models import get_model, list_models

    if name not in (known := list_models()):
        raise SettingError(f"torchvision has no network {name!r}", name, known, _OWN)
    model: nn.Module = get_model(name, weights=None, **options)
    return model, (3, 299, 299) if name == "inception_v3" else (3, 224, 224)


def _timm_names() -> list[str]:
    try:
        import timm
    except ImportError:
        return []
    names: list[str] = timm.list_models()
    return names


def _timm(name: str, **options: Any) -> tuple["nn.Module", Size | None]:
    try:
        import timm
    except ImportError:
        raise SettingError("timm is not installed; pip install timm") from None
    if name.partition(".")[0] not in (known := timm.list_models()):
        raise SettingError(f"timm has no network {name!r}", name, known, _OWN)
    model: nn.Module = timm.create_model(name, pretrained=False, **options)
    about: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    return model, tuple(about.get("input_size") or (3, 224, 224))


def _own(home: str, function: str) -> tuple["nn.Module", Size | None]:
    from torch import nn

    module = _module(home)
    if not hasattr(module, function):
        callables = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise SettingError(f"{home} has no function {function!r}", function, callables)
    network = getattr(module, function)
    if callable(network) and not isinstance(network, nn.Module):
        _check_signature(f"{home}:{function}", network)
        network = _run_theirs(f"{home}:{function}", network)
    if not isinstance(network, nn.Module):
        raise SettingError(f"{home}:{function} gives {type(network).__name__}, not a torch network")
    size = getattr(network, "input_size", None)
    return network, tuple(size) if size is not None else None


def _check_signature(what: str, function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have none
        return
    try:
        signature.bind()
    except TypeError as error:
        raise SettingError(f"{what} cannot be called without arguments ({error}); write one that can") from None


def _run_theirs(what: str, run: Callable[[], Any]) -> Any:
    """Run user code; an error in it names its file and line."""
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
    """Path prefixes of code that is not the user's: Python's, installed packages', and ours."""
    paths = sysconfig.get_paths()
    return "<", str(Path(__file__).parents[1]), *(paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))


def _module(home: str) -> ModuleType:
    if home.endswith(".py"):
        path = Path(home)
        if not path.is_file():
            raise SettingError(f"{home} does not exist")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise SettingError(f"{home} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(path.parent.resolve()))
        loader = spec.loader
        _run_theirs(f"the import of {home}", lambda: loader.exec_module(module))
        return module
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        imported: ModuleType = _run_theirs(f"the import of {home}", lambda: importlib.import_module(home))
    except RuntimeError as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and f"{home}.".startswith(f"{missing.name}."):
            raise SettingError(
                f"there is no module {home!r}; write torchvision:NAME, timm:NAME, or a module that can be imported"
            ) from None
        raise
    return imported
