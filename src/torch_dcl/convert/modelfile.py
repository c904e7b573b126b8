"""The file of a converted network: its seal, what is wrong with one that cannot be read, and the form of what it says.

A network is not needed for any of this; whether the file fits one is the business of `torch_dcl.convert.checkpoint`.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["KEY", "VERSION", "CheckpointError", "digest_of", "read_checked"]

VERSION = 1
KEY = "torch_dcl"
_MAX_HEADER = 100_000_000  # of any safetensors file, in bytes
_LAYER_FORM: dict[str, Any] = {
    "names": list,
    "type": str,
    "widths": list,
    "strategy": str,
    "eps": int | float,
    "bias": bool,
    "stage1": dict,
    "activation": dict | None,
    "norm": dict | None,
}


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
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    if not path.exists():
        raise FileNotFoundError(f"no file {str(path)!r}; save_model(model, path) writes one")
    if path.is_dir():
        raise IsADirectoryError(f"{str(path)!r} is a folder; name the file that save_model wrote")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(f"{str(path)!r} {_unreadable(path)} ({error}); fetch or save it again") from error
    try:
        content = json.loads(metadata[KEY])
        version = content["version"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} was not written by save_model: no {KEY!r} in its metadata") from error
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise CheckpointError(f"{str(path)!r} was not written by save_model: its version is {version!r}")
    if version > VERSION:
        raise CheckpointError(
            f"{str(path)!r} is of version {version}, this torch-dcl reads up to {VERSION}; update torch-dcl"
        )
    if digest_of(tensors, content) != content.get("sha256"):
        raise CheckpointError(
            f"{str(path)!r} was altered: its SHA-256 does not fit its content; fetch or save it again"
        )
    if not _is_sound(content, tensors):
        raise CheckpointError(f"{str(path)!r} was not written by save_model: its description is incomplete")
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


def _is_sound(content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
    """Whether the description has the form that this version writes."""
    shared, layers = content.get("shared"), content.get("layers")
    parts = [content.get(key) for key in ("absorbed", "relus")]
    if not (isinstance(shared, dict) and isinstance(layers, list) and all(isinstance(part, list) for part in parts)):
        return False
    if not all(isinstance(name, str) and name in tensors for name in shared.values()):
        return False
    for entry in layers:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(k), form) for k, form in _LAYER_FORM.items()):
            return False
        if not all(
            isinstance(part.get("type"), str) for part in (entry["activation"], entry["norm"]) if part is not None
        ):
            return False
    places = [entry["names"] for entry in layers] + [names for part in parts for names in part or ()]
    return all(isinstance(names, list) and names and all(isinstance(n, str) for n in names) for names in places)
