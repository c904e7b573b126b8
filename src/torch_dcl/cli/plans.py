"""``dcl plan``: find a network by name, and print which of its units pay."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from torch_dcl.cli.names import UsageError, nearest

if TYPE_CHECKING:
    from torch import nn

__all__ = ["find_model", "prepared", "read_size"]

Size = tuple[int, ...]
_TYPES = ("float32", "bfloat16", "float16")
_FORMATS = ("auto", "channels_last", "contiguous")


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
    if not isinstance(found, nn.Module):
        try:
            found = found()
        except TypeError as error:
            raise UsageError(
                f"{home}:{function} cannot be called without arguments ({error}); write one that can"
            ) from None
    if not isinstance(found, nn.Module):
        raise UsageError(f"{home}:{function} gives {type(found).__name__}, not a torch network")
    size = getattr(found, "input_size", None)
    return found, tuple(size) if size is not None else None


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
        spec.loader.exec_module(module)
        return module
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(home)
    except ModuleNotFoundError as error:
        if error.name and home.partition(".")[0] != error.name.partition(".")[0]:
            raise
        raise UsageError(
            f"there is no module {home!r}; write torchvision:NAME, timm:NAME, or a module that can be imported"
        ) from None


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
