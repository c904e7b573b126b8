"""``save_model`` and ``load_model``: a converted network in one safetensors file, without pickle.

The file holds every parameter and buffer once, and in its metadata, under ``torch_dcl``, a JSON text: the version of
the format, the DCL layers of the network as they are, the places of absorbed batch norms, which names share a tensor,
and a SHA-256 over all of that and over every name and byte of the tensors.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_dcl.convert.units import AbsorbedNorm, build, names_of, obstacle, swap
from torch_dcl.files import replacing
from torch_dcl.layers import _DCL

__all__ = ["CheckpointError", "load_model", "save_model"]

VERSION = 1
_KEY = "torch_dcl"
_NORM_SETTINGS = ("eps", "momentum", "affine", "track_running_stats")
_NORMS = {n.__name__: n for n in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)}


class CheckpointError(ValueError):
    """A file that is not, or not any more, what ``save_model`` wrote, or that is for another network."""


def save_model(model: nn.Module, path: str | Path) -> None:
    """Write the network's weights and its DCL layers to one safetensors file.

    The file is written aside and renamed, so an interrupted save leaves an older file whole. A network without any
    DCL layer can be saved too.

    Args:
        model: The network, converted or not, on any device.
        path: Where to write, for example ``"vgg16-dcl.safetensors"``.
    """
    from safetensors.torch import save_file  # noqa: PLC0415  (import torch_dcl loads torch and nothing heavier)

    tensors, shared = _unique(model.state_dict())
    content = {"version": VERSION, **_describe(model), "shared": shared}
    content["sha256"] = _digest(tensors, content)
    with replacing(path) as aside:
        save_file(tensors, aside, metadata={_KEY: json.dumps(content), "format": "pt"})


def load_model(model_or_factory: nn.Module | Callable[[], nn.Module], path: str | Path) -> nn.Module:
    """Rebuild a network that :func:`save_model` wrote.

    Args:
        model_or_factory: What makes the plain network (``torchvision.models.vgg16``), or the network itself, plain or
            with the same DCL layers. It is converted in place; a network that the file does not fit is left alone.
        path: The file.

    Returns:
        The network with the file's DCL layers, weights and dtypes, on the device where it was made.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is cut short, altered, not of this library, of a newer version, or for another network.
    """
    tensors, content = _read(Path(path))
    model = model_or_factory if isinstance(model_or_factory, nn.Module) else model_or_factory()
    if not isinstance(model, nn.Module):
        raise TypeError(f"load_model takes a network or a function that makes one, got {type(model).__name__} from it")
    for alias, name in content["shared"].items():
        tensors[alias] = tensors[name]
    changes = _rebuild(model, content, path)
    _check_fit(model, changes, tensors, path)
    for names, new in changes:
        swap(model, names, new)
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    for name, tensor in tensors.items():
        if own[name].dtype != tensor.dtype:
            own[name].data = own[name].data.to(tensor.dtype)
    model.load_state_dict(tensors)
    return model


def _describe(model: nn.Module) -> dict[str, Any]:
    """The DCL layers and the absorbed norms, read off the modules themselves."""
    layers, absorbed = [], []
    for module, names in names_of(model).items():
        if isinstance(module, AbsorbedNorm):
            absorbed.append(names)
        elif isinstance(module, _DCL):
            layers.append({"names": names, **_describe_layer(module)})
    return {"layers": layers, "absorbed": absorbed}


def _describe_layer(layer: _DCL) -> dict[str, Any]:
    norm = None
    if layer.fusion.norm is not None:
        first = layer.fusion.norm[0]
        settings = {name: getattr(first, name) for name in _NORM_SETTINGS if hasattr(first, name)}
        norm = {"type": type(first).__name__, **settings}
    return {
        "type": type(layer).__name__,
        "widths": list(layer.widths),
        "strategy": layer.strategy,
        "eps": layer.eps,
        "stage1": layer.branch.extra_repr(),
        "activation": None if layer.branch_activation is None else type(layer.branch_activation).__name__,
        "norm": norm,
    }


def _unique(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Every tensor once, contiguous and on the CPU, and the names that share it."""
    tensors: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and place in seen:
            shared[name] = seen[place]
        else:
            seen[place] = name
            # A copy of its own: safetensors refuses two tensors in one storage.
            tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    return tensors, shared


def _digest(tensors: Mapping[str, Tensor], content: Mapping[str, Any]) -> str:
    """SHA-256 over the description and over the names, types, shapes and bytes of all tensors."""
    digest = hashlib.sha256(json.dumps({k: v for k, v in content.items() if k != "sha256"}, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the description, after every check that needs no network."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    if not path.exists():
        raise FileNotFoundError(f"no file {str(path)!r}; save_model(model, path) writes one")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(
            f"{str(path)!r} is cut short or not a safetensors file ({error}); fetch or save it again"
        ) from error
    try:
        content = json.loads(metadata[_KEY])
        version = content["version"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} was not written by save_model: no {_KEY!r} in its metadata") from error
    if version > VERSION:
        raise CheckpointError(
            f"{str(path)!r} is of version {version}, this torch-dcl reads up to {VERSION}; update torch-dcl"
        )
    if _digest(tensors, content) != content.get("sha256"):
        raise CheckpointError(f"{str(path)!r} was altered: its SHA-256 does not fit its content; fetch or save it again")
    return tensors, content


def _rebuild(model: nn.Module, content: Mapping[str, Any], path: str | Path) -> list[tuple[list[str], nn.Module]]:
    """The modules to put into the network, with the names of their places; the network is not touched."""
    changes: list[tuple[list[str], nn.Module]] = []
    for entry in content["layers"]:
        name = entry["names"][0]
        module = _place(model, entry["names"], path)
        wanted = {key: value for key, value in entry.items() if key != "names"}
        if not isinstance(module, _DCL):
            trouble = obstacle(module)
            if trouble:
                raise _misfit(path, f"{name!r} cannot be a DCL layer there: {trouble}")
            layer = build(
                module,
                widths=tuple(entry["widths"]),
                strategy=entry["strategy"],
                eps=entry["eps"],
                norm=_norm_like(entry["norm"], path),
            )
            changes.append((entry["names"], layer))
            module = layer
        found = _describe_layer(module)
        if found != wanted:
            key = next(key for key in wanted if found.get(key) != wanted[key])
            raise _misfit(path, f"{name!r} has {key} {found.get(key)!r}, the file {wanted[key]!r}")
    for names in content["absorbed"]:
        norm = _place(model, names, path)
        if not isinstance(norm, AbsorbedNorm):
            changes.append((names, AbsorbedNorm().train(norm.training)))
    return changes


def _norm_like(entry: Mapping[str, Any] | None, path: str | Path) -> nn.Module | None:
    """A batch norm with the settings of the file, for ``build`` to take them from."""
    if entry is None:
        return None
    kind = _NORMS.get(entry["type"])
    if kind is None:
        raise _misfit(path, f"a {entry['type']} inside a DCL layer cannot be rebuilt; pass a network that has the layer")
    return kind(1, **{name: entry[name] for name in _NORM_SETTINGS})


def _place(model: nn.Module, names: list[str], path: str | Path) -> nn.Module:
    try:
        return model.get_submodule(names[0])
    except AttributeError as error:
        raise _misfit(path, f"the network has no {names[0]!r}") from error


def _check_fit(
    model: nn.Module, changes: list[tuple[list[str], nn.Module]], tensors: Mapping[str, Tensor], path: str | Path
) -> None:
    """Compare names and shapes with what the network will have, before it is touched."""
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for names, new in changes:
        for place in names:
            for name in [name for name in expected if name.startswith(place + ".")]:
                del expected[name]
            expected.update({f"{place}.{name}": tuple(t.shape) for name, t in new.state_dict().items()})
    missing = sorted(expected.keys() - tensors.keys())
    surplus = sorted(tensors.keys() - expected.keys())
    shapes = [n for n in expected if n in tensors and tuple(tensors[n].shape) != expected[n]]
    parts = []
    if missing:
        parts.append(f"{len(missing)} tensors are missing in the file (first {missing[0]!r})")
    if surplus:
        parts.append(f"{len(surplus)} are not in the network (first {surplus[0]!r})")
    if shapes:
        name = shapes[0]
        parts.append(f"{len(shapes)} differ in shape (first {name!r}: {tuple(tensors[name].shape)} in the file, {expected[name]} there)")
    if parts:
        raise _misfit(path, "; ".join(parts))


def _misfit(path: str | Path, detail: str) -> CheckpointError:
    return CheckpointError(f"{str(path)!r} was made for another architecture: {detail}")
