"""``dcl plan``: which units of a network are worth converting."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch_dcl.cli.console import UsageError, in_options, read_device, split

if TYPE_CHECKING:
    from torch import nn

    from torch_dcl.convert import Plan

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
    """Build a network and plan its conversion: options as typed, and further arguments of `torch_dcl.plan`."""
    from torch_dcl.convert import plan
    from torch_dcl.experiments.network_source import find_model

    if force and not only:
        raise UsageError("--force goes with --only, and says that layers named there are converted all the same")
    given = read_size(input_size) if input_size else None
    network, known = find_model(name)
    size = given or known
    if size is None:
        raise UsageError(f"the size of {name}'s input is not known; give it, such as --input-size 3,224,224")
    network = prepared(network, read_device(device), dtype, memory)
    try:
        planned = plan(network, size, batch=batch, **wish)
        if only:
            planned = planned.only(*split(only), force=force)
        return planned.without(*split(without)) if without else planned
    except (ValueError, TypeError) as error:
        if (cause := error.__cause__) is not None:
            shown = "×".join(map(str, size))
            raise RuntimeError(
                f"{name} does not run on {'an input' if batch == 1 else f'{batch} inputs'} of {shown}: "
                f"{type(cause).__name__}: {cause}; check --input-size, which is without the batch; "
                "an input of whole numbers, or several inputs, need a plan in Python"
            ) from error
        raise UsageError(in_options(str(error), _OPTIONS)) from error


def prepared(network: "nn.Module", device: str, dtype: str, memory: str) -> "nn.Module":
    """Move a network to the device, type and memory format to measure it in; "auto" is channels_last on a GPU."""
    import torch

    for option, given, known in (("dtype", dtype, _TYPES), ("memory", memory, _FORMATS)):
        if given not in known:
            raise UsageError(f"--{option} is one of {', '.join(known)}, not {given!r}")
    network = network.to(device, getattr(torch, dtype))
    if memory == "auto":
        if torch.device(device).type != "cuda":
            return network
        memory = "channels_last"
    return network.to(memory_format=torch.channels_last if memory == "channels_last" else torch.contiguous_format)


def read_size(text: str) -> Size:
    """The size of an input from ``3,224,224`` or ``3x224x224``."""
    parts = text.replace("x", ",").split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise UsageError(f"--input-size {text!r} is not of the form 3,224,224")
    return tuple(map(int, parts))


def read_width(text: str | None) -> int | Size | None:
    """The filters of a branch from ``64``, or of each branch from ``64,32``."""
    if text is None:
        return None
    try:
        widths = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--width {text!r} is not of the form 64, or 64,32 with a number for each branch") from None
    return widths if len(widths) > 1 else widths[0]
