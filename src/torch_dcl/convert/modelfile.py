"""The file of a converted network: its seal, what is wrong with one that cannot be read, and the form of what it says.

The form of a plan's JSON is here too, since both may come from elsewhere.
A network is not needed for any of this; whether the file fits one is the business of `torch_dcl.convert.checkpoint`.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["KEY", "NORMS", "PLAN", "VERSION", "CheckpointError", "digest_of", "find_flaw", "read_checked"]

VERSION = 3
"""1 had a batch norm for each branch, and knew nothing of shared ReLUs; 2 did not say which layer has which norm."""
KEY = "torch_dcl"
_MAX_HEADER = 100_000_000  # of any safetensors file, in bytes
NORMS = {kind.__name__: kind for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)}
"""The norms that a plain network can be given back."""


class CheckpointError(ValueError):
    """A file that is not, or not any more, what ``save_model`` wrote, or that is for another network."""


def digest_of(tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> str:
    """SHA-256 over the description and over the names, types, shapes and bytes of all tensors."""
    digest = hashlib.sha256(json.dumps({k: v for k, v in content.items() if k != "sha256"}, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_checked(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the description, after every check that needs no network."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        raise FileNotFoundError(f"no file {str(path)!r}; save_model(model, path) writes one")
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder; name the file that save_model wrote")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise CheckpointError(f"{str(path)!r} {_unreadable(path)} ({error}); fetch or save it again") from error
    not_ours = f"{str(path)!r} was not written by save_model"
    try:
        content = json.loads(metadata[KEY])
        version = content["version"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{not_ours}: no {KEY!r} in its metadata") from error
    if not _is_integer(version) or version < 1:
        raise CheckpointError(f"{not_ours}: its version is {version!r}")
    if version > VERSION:
        raise CheckpointError(
            f"{str(path)!r} is of version {version}, this torch-dcl reads up to {VERSION}; update torch-dcl"
        )
    try:
        digest = digest_of(tensors, content)
    except RecursionError as error:
        raise CheckpointError(f"{not_ours}: its description is nested too deep") from error
    if digest != content.get("sha256"):
        raise CheckpointError(
            f"{str(path)!r} was altered: its SHA-256 does not fit its content; fetch or save it again"
        )
    form = {1: _FIRST_FORM, 2: _SECOND_FORM}.get(version, _FORM)
    if flaw := find_flaw(content, form) or _wrong_tie(content["shared"], tensors):
        raise CheckpointError(f"{not_ours}: {flaw!r} in its description is missing or of another kind")
    return tensors, content


def _unreadable(path: Path) -> str:
    """What is wrong with a file that safetensors cannot open; it wants a length, a header of that length, and data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(9)
        length = int.from_bytes(start[:8], "little")
        begins_well = start[8:] == b"{" and length <= _MAX_HEADER
        header = start[8:] + file.read(length - 1) if begins_well else b""
    if size < 9 or (begins_well and size < 8 + length):
        return "is cut short"
    try:
        entries = json.loads(header)
        whole = 8 + length + max(entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__")
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return "is not a safetensors file"
    return "is cut short" if size < whole else "was altered"


def _wrong_tie(shared: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """The first name that has both a tensor and a tie to another name, or a tie to a missing one; empty if none has."""
    return next((f"shared.{name}" for name, other in shared.items() if name in tensors or other not in tensors), "")


def _is(*kinds: type) -> Callable[[Any], bool]:
    """A predicate: a value of one of these types; True is not a number."""
    return lambda value: type(value) in kinds


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # neither NaN nor beyond a float


def _is_time(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _each(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) is list and all(holds(item) for item in value)


def _or_none(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Whether it holds, or there is no value."""
    return lambda value: value is None or value is ... or holds(value)


def _is_timing(value: Any) -> bool:
    """Milliseconds of a forward, and of a forward with its backward, which may be None."""
    return type(value) is list and len(value) == 2 and _is_time(value[0]) and _or_none(_is_time)(value[1])


def _are_timings(*names: str) -> Callable[[Any], bool]:
    """A predicate: None, or timings by name that include these names."""

    def holds(value: Any) -> bool:
        if type(value) is not dict or not value.keys() >= {*names} or not all(map(_is_timing, value.values())):
            return False
        return ("plain, captured" in value) == ("dcl, captured" in value)

    return _or_none(holds)


def _is_optional_part(value: Any) -> bool:
    """None, or a norm or an activation: its kind and settings, which are known of batch norms alone."""
    if value is None:
        return True
    return not find_flaw(value, {"type": _is(str)}) and not (value["type"] in NORMS and find_flaw(value, _BATCH_NORM))


def _is_geometry(value: Any) -> bool:
    return any(not find_flaw(value, form) for form in (_LINEAR, _CONVOLUTION))


_is_integer, _is_text, _is_flag = _is(int), _is(str), _is(bool)
_are_sizes = _each(_is_integer)
_LINEAR = {"in_features": _is_integer}
_CONVOLUTION = {
    "in_channels": _is_integer,
    "kernel_size": _are_sizes,
    "stride": _are_sizes,
    "padding": lambda value: _is_text(value) or _are_sizes(value),
    "dilation": _are_sizes,
    "padding_mode": _is_text,
}
_BATCH_NORM = {
    "eps": _is_number,
    "momentum": lambda value: value is None or _is_number(value),
    "affine": _is_flag,
    "track_running_stats": _is_flag,
}
_LAYER = {
    "names": lambda value: bool(value) and _each(_is_text)(value),
    "type": _is_text,
    "widths": _are_sizes,
    "strategy": _is_text,
    "eps": _is_number,
    "bias": _is_flag,
    "stage1": _is_geometry,
    "activation": _is_optional_part,
    "norm": _is_optional_part,
    "marks_output": _is_flag,
}
_FORM = {
    "layers": [_LAYER],
    "absorbed": [_LAYER["names"]],
    "absorbed_by": _each(_is_text),
    "relus": [_LAYER["names"]],
    "shared_relus": [_LAYER["names"]],
    "shared": lambda value: type(value) is dict and all(_is_text(name) for name in value.values()),
}
"""What is written: a dictionary has these keys, a list items of one form, and for any other value this holds."""
_SECOND_FORM = {key: form for key, form in _FORM.items() if key != "absorbed_by"}
_FIRST_FORM = {
    **_SECOND_FORM,
    "layers": [{**_LAYER, "marks_output": _or_none(_is_flag)}],
    "shared_relus": _or_none(_each(_LAYER["names"])),
}
"""The same for versions 1 and 2, which did not write all of it."""

_are_counts, _are_texts = _each(_is_count), _each(_is_text)
_is_comparison = _or_none(lambda value: _each(_is_number)(value) and len(value) == 3 and min(value[:2]) > 0)
_ROW = {
    **dict.fromkeys(("name", "kind", "status", "reason", "strategy"), _is_text),
    **dict.fromkeys(("in_channels", "out_channels", "calls", "macs", "macs_after"), _is_count),
    **dict.fromkeys(("weights", "weights_after", "parameters", "parameters_after"), _is_count),
    **dict.fromkeys(("norm", "relu"), _or_none(_is_text)),
    **dict.fromkeys(("eps", "paying_ratio"), _or_none(_is_number)),
    "shares_relu": _or_none(_is_flag),
    "aliases": _are_texts,
    "kernel": _are_counts,
    "widths": _are_counts,
    "selected": _is_flag,
    "channels_last": _or_none(_is_flag),
    "timings": _are_timings("plain", "dcl", "low_rank"),
    "comparison": _is_comparison,
}
_CHOICE = {
    "mode": lambda value: value in ("eager", "compile", "reduce-overhead", "graph"),
    "phase": lambda value: value in ("train", "infer"),
    "network": _is_comparison,
}
PLAN = {
    "rows": [_ROW],
    "weights": _is_count,
    "parameters": _is_count,
    "example": _is_text,
    "device": _or_none(_is_text),
    "timings": _are_timings("plain", "dcl"),
    "choice": _or_none(lambda value: not find_flaw(value, _CHOICE)),
}
"""The same for a plan. What a plan of an earlier version lacks, or has as null, is None or missing."""


def find_flaw(value: Any, form: Any, place: str = "") -> str:
    """Where a description first departs from its form; empty if nowhere."""
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return place or "all"
        inner = [(key, value.get(key, ...), part) for key, part in form.items()]
    elif isinstance(form, list):
        if not isinstance(value, list):
            return place
        inner = [(str(i), item, form[0]) for i, item in enumerate(value)]
    else:
        return "" if form(value) else place
    flaws = (find_flaw(item, part, f"{place}.{key}".removeprefix(".")) for key, item, part in inner)
    return next((flaw for flaw in flaws if flaw), "")
