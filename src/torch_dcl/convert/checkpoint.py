"""``save_model`` and ``load_model``: a converted network in one safetensors file, without pickle.

The file holds every parameter and buffer once, and in its metadata, under ``torch_dcl``, a JSON text: the version of
the format, the DCL layers of the network as they are, the places of absorbed batch norms, which names share a tensor,
and a SHA-256 over all of that and over every name and byte of the tensors.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torch_dcl.convert import units
from torch_dcl.convert.modelfile import KEY, NORMS, VERSION, CheckpointError, digest_of, read_checked
from torch_dcl.convert.snapshot import all_or_nothing
from torch_dcl.convert.wrappers import OwnNames, Shards, bare, is_sharded, own_class
from torch_dcl.files import replacing
from torch_dcl.functional import check_eps
from torch_dcl.module import _DCL
from torch_dcl.norms import join_norms

__all__ = ["CheckpointError", "load_model", "save_model"]

_GEOMETRY = ("in_features", "in_channels", "kernel_size", "stride", "padding", "dilation", "padding_mode")


def save_model(model: nn.Module, path: str | Path) -> None:
    """Write the network's weights and its DCL layers to one safetensors file.

    The file is written to a temporary path and renamed, so an interrupted save leaves an older file intact. A network
    without any DCL layer can be saved too.

    Args:
        model: The network, converted or not, on any device. Of one in ``torch.compile``, ``DataParallel``,
            ``DistributedDataParallel`` or ``AveragedModel``, the network inside is written, and of one with compiled
            or checkpointed parts what ``load_model`` puts into a network without. One whose parameters are sharded
            (``fully_shard``) is gathered: every process calls save_model, and the first one writes.
        path: Where to write, for example ``"vgg16-dcl.safetensors"``.

    Raises:
        TypeError: not a network, or one whose state dict contains anything but tensors.
        ValueError: the network is on the meta device, without values.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"save_model takes the network and then the path, got a {type(model).__name__} first")
    model = bare(model)
    own_name = OwnNames(model)
    state = {own_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    _check_state(state)
    shards = Shards(state)
    state = shards.gather(state)
    with shards.one_writer() as writes:
        if writes:
            _write(model, state, Path(path))


def _write(model: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    shared = _ties(state)
    # Copies: safetensors rejects tensors that share storage or are not contiguous.
    tensors = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in state.items()
        if name not in shared
    }
    content = {"version": VERSION, **_describe(model), "shared": shared}
    content["sha256"] = digest_of(tensors, content)
    with replacing(path) as aside:
        save_file(tensors, aside, metadata={KEY: json.dumps(content), "format": "pt"})


def load_model(model_or_factory: nn.Module | Callable[[], nn.Module], path: str | Path) -> nn.Module:
    """Rebuild a network that :func:`save_model` wrote.

    Args:
        model_or_factory: What makes the plain network (``torchvision.models.vgg16``), or the network itself, plain or
            with the same DCL layers, whose ε becomes that of the file. It is converted in place; a network that the
            file does not fit is left alone. A DCL layer with a ``branch_activation``, or with another norm than a batch
            norm, must be there already. Of a network in a wrapper (see :func:`save_model`) the one inside is loaded.
        path: The file.

    Returns:
        The network with the file's DCL layers, weights and dtypes, on the device where it was made.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is cut short, altered, of a newer version, not of save_model, or for another network.
        ValueError: the network is on the meta device, where it cannot hold weights, or sharded, or its layers are held
            by a wrapper and cannot be replaced.
        TypeError: neither a network nor a function that makes one.
    """
    if not callable(model_or_factory):
        raise TypeError(
            f"load_model takes a network or a function that makes one, got {type(model_or_factory).__name__}"
        )
    tensors, content = read_checked(Path(path))
    model = model_or_factory if isinstance(model_or_factory, nn.Module) else model_or_factory()
    if not isinstance(model, nn.Module):
        raise TypeError(f"load_model takes a network or a function that makes one, got {type(model).__name__} from it")
    replaceable = not any(isinstance(part, nn.parallel.DistributedDataParallel) for part in model.modules())
    _load(bare(model), tensors, content, path, replaceable=replaceable)
    return model


def _load(
    model: nn.Module, tensors: dict[str, Tensor], content: Mapping[str, Any], path: str | Path, *, replaceable: bool
) -> None:
    state = model.state_dict()
    _check_state(state)
    if sharded := [name for name, tensor in state.items() if is_sharded(tensor)]:
        raise ValueError(f"{sharded[0]!r} is sharded; call load_model first, and fully_shard on what it returns")
    tensors |= {alias: tensors[name] for alias, name in content["shared"].items()}
    own_name, places = OwnNames(model), units.names_of(model)
    changes = _rebuild(own_name, content, path)
    _reconcile_epsilon(tensors, content, path)
    for entry in content["layers"] if content["version"] == 1 else ():
        for name in entry["names"] if entry["norm"] is not None and entry["norm"]["type"] in NORMS else ():
            join_norms(tensors, f"{name}.fusion.norm.".removeprefix("."), len(entry["widths"]))
    _check_fit(model, own_name, changes, tensors, path)
    if changes and not replaceable:
        raise ValueError("DistributedDataParallel holds the layers that the file replaces; load the network before it")
    with all_or_nothing(model):
        for old, new in changes.items():
            units.swap(model, places[old], new)
        units.disable_fast_paths(model)
        state = model.state_dict(keep_vars=True)
        for name, own in state.items():
            given = tensors[own_name(name)]
            if own.dtype != given.dtype:
                own.data = own.data.to(given.dtype)
            state[name] = given  # in the network's own state dict, which holds the versions of its modules
        model.load_state_dict(state)


def _describe(model: nn.Module) -> dict[str, Any]:
    """The DCL layers and the absorbed norms and ReLUs, read off the modules themselves."""
    layers, absorbed, absorbed_by, relus, shared = [], [], [], [], []
    places = OwnNames(model).of
    for module, names in places.items():
        if isinstance(module, units.AbsorbedNorm):
            absorbed.append(names)
            absorbed_by.append(next((places[layer][0] for layer in module.layers if layer in places), ""))
        elif isinstance(module, units.AbsorbedReLU):
            relus.append(names)
        elif isinstance(module, units.SharedReLU):
            shared.append(names)
        elif isinstance(module, _DCL):
            layers.append({"names": names, **_describe_layer(module)})
    return {
        "layers": layers, "absorbed": absorbed, "absorbed_by": absorbed_by, "relus": relus, "shared_relus": shared,
    }  # fmt: skip


def _describe_layer(layer: _DCL) -> dict[str, Any]:
    return {
        "type": own_class(layer).__name__,
        "widths": list(layer.widths),
        "strategy": layer.strategy,
        "eps": layer.eps,
        "bias": layer.fusion.bias is not None,
        "stage1": {name: _as_json(getattr(layer.branch, name)) for name in _GEOMETRY if hasattr(layer.branch, name)},
        "activation": None if layer.branch_activation is None else _describe_part(layer.branch_activation),
        "norm": None if layer.fusion.norm is None else _describe_part(layer.fusion.norm),
        "marks_output": layer.marks_output,
    }


def _describe_part(module: nn.Module) -> dict[str, Any]:
    """A norm or an activation: its class and its settings."""
    kind = own_class(module)
    if kind in NORMS.values():
        return {"type": kind.__name__, **units.norm_settings(module)}
    settings = {
        name: _as_json(value)
        for name, value in vars(module).items()
        if isinstance(value, int | float | str | tuple)
        and not name.startswith("_")
        and name not in ("training", "inplace")
    }
    inner = {name: _describe_part(child) for name, child in module.named_children()}
    return {"type": kind.__name__, **settings, **inner}


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _ties(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Names of tied tensors, with the first name of the same tensor."""
    ties: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        first = seen.setdefault(place, name)
        if tensor.numel() and first != name:
            ties[name] = first
    return ties


def _check_state(state: Mapping[str, Any]) -> None:
    """Raise an error for a state dict that safetensors cannot hold."""
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise TypeError(
                f"{name!r} in the network's state dict is a {kind}, and a safetensors file holds tensors only"
            )
        if tensor.is_meta:
            raise ValueError(f"{name!r} is on the meta device and has no values; call model.to_empty(device=...) first")
        if is_traceable_wrapper_subclass(tensor) and not is_sharded(tensor):
            kind = type(tensor).__name__
            raise TypeError(
                f"{name!r} in the network's state dict is a {kind}, which keeps its values in other tensors; "
                "save the network before its weights are quantised or replaced otherwise"
            )


def _rebuild(names: OwnNames, content: Mapping[str, Any], path: str | Path) -> dict[nn.Module, nn.Module]:
    """The replacement of every module that the file replaces; the network is not changed."""
    changes: dict[nn.Module, nn.Module] = {}
    layers: dict[str, _DCL] = {}
    for entry in content["layers"]:
        module = _place(names, entry["names"], path)
        layer = module if isinstance(module, _DCL) else _layer_like(entry, module, path)
        if layer is not module:
            changes[module] = layer
        layers |= dict.fromkeys(entry["names"], layer)
        # ε is state: an existing DCL layer adopts that of the file.
        own = {**_describe_layer(layer), "eps": entry["eps"], "marks_output": entry.get("marks_output")}
        difference = _difference(own, entry)
        if difference:
            raise _misfit(path, f"{entry['names'][0]!r} has {difference}")
        try:
            check_eps(entry["eps"], layer.fusion.fused)
        except ValueError as error:
            raise _misfit(path, f"{entry['names'][0]!r} cannot take the file's: {error}") from error
    absorbed = {_place(names, places, path): places[0] for places in content["absorbed"]}
    norms = {norm: name for norm, name in absorbed.items() if not isinstance(norm, units.AbsorbedNorm)}
    for norm in norms:
        trouble = (
            units.norm_obstacle(norm)
            if isinstance(norm, _BatchNorm) or units.is_frozen_norm(norm)
            else f"it is a {type(norm).__name__}"
        )
        if trouble:
            raise _misfit(path, f"the batch norm {names.of[norm][0]!r} cannot go into a DCL layer there: {trouble}")
    changes |= _absorb(norms, _layers_of(norms, layers, changes, content), changes)
    relus = [(places, False) for places in content["relus"]]
    for places, shared in [*relus, *((places, True) for places in content.get("shared_relus") or ())]:
        relu = _place(names, places, path)
        if not isinstance(relu, nn.ReLU):
            raise _misfit(path, f"{places[0]!r} is a {type(relu).__name__} there, and a ReLU before the file was made")
        if units.is_removable(relu):
            changes[relu] = units.relu_replacement(relu, shared=shared)
    for module, places in names.of.items():
        if isinstance(module, units.AbsorbedNorm) and module not in absorbed:
            raise _misfit(path, f"the batch norm {places[0]!r} is in a DCL layer there, not in the file")
    return changes


def _absorb(
    norms: Iterable[nn.Module], layer_of: Mapping[nn.Module, _DCL], changes: Mapping[nn.Module, nn.Module]
) -> dict[nn.Module, nn.Module]:
    """The replacements of batch norms, after new layers have taken over the flags of what they replace."""
    norm_of = {layer: norm for norm, layer in layer_of.items()}
    for module, layer in changes.items():
        if isinstance(layer, _DCL):
            units.copy_flags(layer, module, norm_of.get(layer))
    return {norm: units.AbsorbedNorm(layer_of.get(norm)).train(norm.training) for norm in norms}


def _layers_of(
    norms: Mapping[nn.Module, str],
    layers: Mapping[str, _DCL],
    changes: Mapping[nn.Module, nn.Module],
    content: Mapping[str, Any],
) -> dict[nn.Module, _DCL]:
    """The DCL layer that each of these batch norms of the network goes into; of an older file, by their order."""
    if content["version"] > 2:
        into = {names[0]: layer for names, layer in zip(content["absorbed"], content["absorbed_by"], strict=False)}
        return {norm: layers[into[name]] for norm, name in norms.items() if into.get(name) in layers}
    normed = [layer for layer in changes.values() if isinstance(layer, _DCL) and layer.fusion.norm is not None]
    common = [norm for norm in norms if not units.is_frozen_norm(norm)]
    sizes = [layer.fusion.out_channels for layer in normed] == [norm.num_features for norm in common]
    return dict(zip(common, normed, strict=True)) if sizes else {}


def _layer_like(entry: Mapping[str, Any], module: nn.Module, path: str | Path) -> _DCL:
    """The DCL layer of the file, built to replace ``module``."""
    name, norm = entry["names"][0], entry["norm"]
    trouble = units.obstacle(module) or ("it is the network itself" if "" in entry["names"] else "")
    if trouble:
        raise _misfit(path, f"{name!r} cannot become a DCL layer there: {trouble}")
    if entry["activation"] is not None or (norm is not None and norm.get("type") not in NORMS):
        part = (entry["activation"] or norm).get("type")
        raise _misfit(path, f"the {part} inside {name!r} cannot be rebuilt; pass a network that has this DCL layer")
    try:
        like = None if norm is None else NORMS[norm["type"]](1, **{k: v for k, v in norm.items() if k != "type"})
        widths = tuple(entry["widths"])
        layer = units.build(
            module, widths=widths, strategy=entry["strategy"], eps=entry["eps"], norm=like, bias=entry["bias"]
        )
    except (TypeError, ValueError) as error:
        raise _misfit(path, f"{name!r} cannot become a DCL layer there: {error}") from error
    layer.marks_output = bool(entry.get("marks_output"))
    return layer


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The first difference in the keys that both descriptions have; empty if there is none."""
    for key in [key for key in wanted if key in found]:
        ours, theirs = found[key], wanted[key]
        if isinstance(ours, dict) and isinstance(theirs, dict):
            inner = _difference(ours, theirs)
            if inner:
                return inner
        elif ours != theirs:
            return f"{key} {ours!r}, the file {theirs!r}"
    return ""


def _place(names: OwnNames, places: list[str], path: str | Path) -> nn.Module:
    """The module that has these names, and no others."""
    module = names.modules.get(places[0])
    if module is None:
        raise _misfit(path, f"the network has no {places[0]!r}")
    if sorted(names.of[module]) != sorted(places):
        raise _misfit(path, f"one module has the names {names.of[module]} there, {places} in the file")
    return module


def _reconcile_epsilon(tensors: dict[str, Tensor], content: Mapping[str, Any], path: str | Path) -> None:
    """Compare ε among the tensors with the description. Add it for older files, which have it there alone."""
    for entry in content["layers"]:
        described = torch.tensor(entry["eps"], dtype=torch.float64)
        for name in entry["names"]:
            given = tensors.setdefault(f"{name}.fusion._extra_state".removeprefix("."), described)
            if not _same(given, described):
                raise _misfit(path, f"eps of {name!r} is {given} among its tensors, {entry['eps']} in its description")


def _check_fit(
    model: nn.Module,
    names: OwnNames,
    changes: Mapping[nn.Module, nn.Module],
    tensors: Mapping[str, Tensor],
    path: str | Path,
) -> None:
    """Compare names, shapes and kinds with what the network will have, before it is touched."""
    state = {names(name): tensor for name, tensor in model.state_dict().items()}
    expected = dict(state)
    for old, new in changes.items():
        for place in names.of[old]:
            for name in [name for name in expected if name.startswith(place + ".")]:
                del expected[name]
            expected.update({f"{place}.{name}": tensor for name, tensor in new.state_dict().items()})
    missing = sorted(expected.keys() - tensors.keys())
    surplus = sorted(tensors.keys() - expected.keys())
    both = [name for name in expected if name in tensors]
    shapes = [name for name in both if tensors[name].shape != expected[name].shape]
    kinds = [name for name in both if _kind(tensors[name]) != _kind(expected[name])]
    torn = [(a, b) for a, b in _ties(state).items() if {a, b} <= tensors.keys() and not _same(tensors[a], tensors[b])]
    parts = []
    if missing:
        parts.append(f"{len(missing)} tensors are missing in the file (first {missing[0]!r})")
    if surplus:
        parts.append(f"{len(surplus)} are not in the network (first {surplus[0]!r})")
    if shapes:
        sizes = f"{tuple(tensors[shapes[0]].shape)} in the file, {tuple(expected[shapes[0]].shape)} there"
        parts.append(f"{len(shapes)} differ in shape (first {shapes[0]!r}: {sizes})")
    if kinds:
        types = f"{tensors[kinds[0]].dtype} in the file, {expected[kinds[0]].dtype} there"
        parts.append(f"{len(kinds)} differ in kind (first {kinds[0]!r}: {types})")
    if torn:
        parts.append(f"{len(torn)} are tied there, not in the file (first {torn[0][0]!r} to {torn[0][1]!r})")
    if parts:
        raise _misfit(path, "; ".join(parts))


def _kind(tensor: Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.dtype == b.dtype and torch.equal(a, b))


def _misfit(path: str | Path, detail: str) -> CheckpointError:
    return CheckpointError(f"{str(path)!r} was made for another architecture: {detail}")
