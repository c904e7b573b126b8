"""The step of the stochastic strategy: how it advances, and how idle branches are held still.

A layer with ``strategy="stochastic"`` trains one pair of branches a step. The pair is a function of (seed, layer,
step), which the layer keeps in its state dict; its forward only reads it, so running a forward twice (activation
checkpointing), several times a step (gradient accumulation) or as a pure function (``torch.func``) changes nothing.
The training loop advances the step, in one of two ways::

    for step, (x, target) in enumerate(batches):
        dcl.advance_branches_(model, step)       # at the start of every step, or
        ...
    dcl.follow_optimizer(model, optimizer)       # once: every optimizer.step() advances it

The paper trains only the active branches in an iteration. A zero gradient alone does not do that: momentum and
weight decay still move the idle ones. ``follow_optimizer`` therefore holds them still, unless told otherwise.
"""

import zlib
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from torch_dcl.functional import draw_pair
from torch_dcl.fusion import ConceptFusion
from torch_dcl.module import _DCL

__all__ = ["advance_branches_", "follow_optimizer", "seed_branches_"]


def seed_branches_(model: nn.Module, seed: int) -> None:
    """Set the key of every stochastic layer: the seed, its own name, and step 0.

    ``convert_`` does this for the layers that it creates. Call it once for a network with hand-built layers, which
    all start with the same key.

    Args:
        model: The network.
        seed: Any whole number; the same on every rank.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be a whole number, got {seed!r}")
    for name, fusion in _stochastic(model):
        key = (seed & 0x7FFFFFFFFFFFFFFF, zlib.crc32(name.encode()), 0)
        fusion.key.copy_(torch.tensor(key, dtype=torch.int64))
        fusion.active.copy_(draw_pair(fusion.key, fusion.branches))


def advance_branches_(model: nn.Module, step: int | Tensor | None = None) -> None:
    """Draw the branches of a training step in every stochastic layer.

    The draw does not synchronise the device, so it may run inside or outside a captured CUDA graph.

    Args:
        model: The network; without a stochastic layer this does nothing.
        step: The number of the step, as an int or a tensor on the device; None takes the next one.
    """
    _advance([fusion for _, fusion in _stochastic(model)], step)


@torch.no_grad()
def _advance(fusions: Iterable[ConceptFusion], step: int | Tensor | None = None) -> None:
    if not isinstance(step, int | Tensor | None):
        raise TypeError(f"step must be a whole number, or a tensor that holds one, got {step!r}")
    for fusion in fusions:
        if step is None:
            fusion.key[2] += 1
        else:
            fusion.key[2] = step
        fusion.active.copy_(draw_pair(fusion.key, fusion.branches))
        fusion.advanced = True


class Following:
    """The handle of :func:`follow_optimizer`."""

    def __init__(self, layers: Iterable[_DCL], optimizer: torch.optim.Optimizer, *, hold_idle: bool) -> None:
        self._held = set(layers) if hold_idle else set()
        self._advanced = set(layers)
        self._saved: list[tuple[Tensor, Tensor, Tensor]] = []
        self._fresh: list[tuple[Tensor, set[Any], Tensor]] = []
        for other, followings in list(_FOLLOWINGS.items()):
            for following in tuple(followings):
                following._advanced -= self._advanced
                if other is optimizer:
                    following._held -= self._advanced
                if not following._advanced and not following._held:
                    following.remove()
        _FOLLOWINGS.setdefault(optimizer, []).append(self)
        self._hooks = (
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        )

    def remove(self) -> None:
        """Remove the hooks from the optimiser."""
        for hook in self._hooks:
            hook.remove()
        for followings in _FOLLOWINGS.values():
            if self in followings:
                followings.remove(self)

    @torch.no_grad()
    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Save the rows of idle branches and their moments."""
        held = _held_by(optimizer)
        self._saved, self._fresh = [], []
        for parameter, idle in _idle_rows(self._held):
            if id(parameter) not in held or not parameter.requires_grad:  # a gradient may still come, from a closure
                continue
            moments = _moments(optimizer, parameter)
            own = [_local(tensor) for tensor in (parameter, *moments.values())]
            self._saved.extend((tensor, tensor.clone(), idle) for tensor in own)
            self._fresh.append((parameter, set(moments), idle))

    @torch.no_grad()
    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Restore them, and draw the next pair."""
        for tensor, old, idle in self._saved:
            tensor.copy_(torch.where(idle, old, tensor))
        for parameter, known, idle in self._fresh:  # moments that this step created: an idle branch has none yet
            for name, moment in _moments(optimizer, parameter).items():
                if name not in known:
                    _local(moment).masked_fill_(idle, 0)
        self._saved, self._fresh = [], []
        _advance(layer.fusion for layer in self._advanced)


_FOLLOWINGS: WeakKeyDictionary[torch.optim.Optimizer, list[Following]] = WeakKeyDictionary()


def follow_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, *, hold_idle: bool = True) -> Following:
    """Advance the branches of ``model`` after every ``optimizer.step()``.

    Call it after creating the optimiser, which must come after ``convert_``. A second call for the same optimiser
    replaces the first. If several optimisers share the layers, call it for each: all of them hold idle branches still,
    and the one of the last call advances the step, so it must step last.

    Args:
        model: The network; without a stochastic layer this does nothing.
        optimizer: Any torch optimiser that holds its parameters, or a wrapper of one, such as accelerate's.
        hold_idle: Whether branches that were not drawn stay unchanged, as in the paper: no momentum, no weight decay,
            no change of their moments. With False the optimiser treats them as parameters with a zero gradient.

    Returns:
        A handle whose ``remove()`` ends it.

    Raises:
        TypeError: not a network and an optimiser with hooks around its steps.
        ValueError: the optimiser holds no parameter of the stochastic layers, or ``hold_idle`` is set for layers whose
            parameters do not have their own shape, as under FSDP1. The first step raises it for ``hold_idle`` with an
            optimiser whose moments are quantised.
    """
    layers = {name: layer for name, layer in _layers(model) if layer.strategy == "stochastic"}
    optimizer = _unwrap(optimizer)
    _check_held(layers, optimizer)
    for name, layer in layers.items():
        fusion = layer.fusion
        if hold_idle and (other := _other_shape(layer)):
            raise ValueError(
                f"hold_idle=True needs the parameters of {name!r} in their own shape, and {other} is flattened, pruned "
                "or parametrized, or of an adapter; shard with fully_shard instead of FSDP1, or pass hold_idle=False"
            )
        fusion.active.copy_(draw_pair(fusion.key, fusion.branches))  # averaging buffers may have corrupted it
        fusion.advanced = True
    return Following(layers.values(), optimizer, hold_idle=hold_idle)


def _other_shape(layer: _DCL) -> str:
    """The name of a parameter whose rows are not those of the branches; empty if there is none."""
    for name, value in (("weight", layer.fusion.weight), ("bias", layer.fusion.bias)):
        if value is not None and not (isinstance(value, nn.Parameter) and value.dim() == 2):
            return f"fusion.{name}"
    rows = sum(layer.widths)
    others = (name for name, p in layer.branch.named_parameters() if p.requires_grad and p.shape[:1] != (rows,))
    return next((f"branch.{name}" for name in others), "")


def _check_held(layers: Mapping[str, _DCL], optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if the optimiser holds no parameter of trainable layers."""
    held = _held_by(optimizer)
    parameters = [p for layer in layers.values() for p in layer.parameters()]
    if any(p.requires_grad for p in parameters) and not any(id(p) in held for p in parameters):
        raise ValueError(
            f"the {type(optimizer).__name__} holds no parameter of the stochastic layers (the first is "
            f"{next(iter(layers))!r}); an optimiser made before convert_ or fully_shard holds the old parameters: "
            "make it afterwards"
        )


def _unwrap(optimizer: Any) -> torch.optim.Optimizer:
    """The optimiser that runs the hooks of a step: the one inside a wrapper that holds no other parameters.

    Accelerate's wrapper and timm's Lookahead run no hooks of their own, and SAM's steps are not called ``step``.
    """
    kind = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"follow_optimizer takes the network and then its torch.optim optimiser, got a {kind.__name__}")
    held = _held_by(optimizer)
    for inner in _inside(optimizer):
        if held <= _held_by(inner):
            return _unwrap(inner)
    if not getattr(kind.step, "hooked", False):  # torch's mark of a step that runs hooks
        raise TypeError(
            f"the step of a {kind.__name__} runs no hooks; call advance_branches_(model, step) at every step instead"
        )
    return optimizer


def _held_by(optimizer: torch.optim.Optimizer) -> set[int]:
    """The identities of an optimiser's parameters."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _inside(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimisers that are attributes of another."""
    return [value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)]


def _moments(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[Any, Tensor]:
    """The tensors of a parameter's shape in an optimiser's state, or in that of one inside, as in ZeRO's.

    Raises:
        ValueError: moments that are quantised in blocks, whose rows cannot be restored alone.
    """
    moments = {}
    for part in (optimizer, *_inside(optimizer)):
        for name, state in part.state.get(parameter, {}).items():
            if isinstance(state, Tensor) and state.shape == parameter.shape:
                if type(_local(state)) not in (Tensor, nn.Parameter) or not state.is_floating_point():
                    raise ValueError(
                        f"hold_idle=True cannot hold the moments of a {type(part).__name__}, since {name!r} is "
                        "quantised; call follow_optimizer with hold_idle=False"
                    )
                moments[id(part), name] = state
    return moments


def _idle_rows(layers: Iterable[_DCL]) -> list[tuple[Tensor, Tensor]]:
    """Every parameter of stochastic layers with a mask of the idle branches' rows, broadcast over its shard."""
    rows: list[tuple[Tensor, Tensor]] = []
    for layer in layers:
        fusion = layer.fusion
        branch = torch.arange(fusion.branches, device=fusion.active.device)
        idle = (branch[:, None] != fusion.active).all(-1)
        sizes = torch.tensor(fusion.widths, device=idle.device)
        by_row = idle.repeat_interleave(sizes, output_size=sum(fusion.widths))
        parameters = [*(p for p in layer.branch.parameters() if p.shape[:1] == by_row.shape), fusion.weight]
        rows += [(p, by_row.view(-1, *(1,) * (p.dim() - 1))) for p in parameters]
        if fusion.bias is not None:
            rows.append((fusion.bias, idle[:, None]))
        if fusion.norm is not None:
            by_channel = idle.repeat_interleave(fusion.out_channels)
            rows += [(p, by_channel) for p in fusion.norm.parameters() if p.shape == by_channel.shape]
    return [(parameter, _shard_like(parameter, mask)) for parameter, mask in rows]


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor sharded by FSDP2, as a view; any other tensor itself."""
    shard: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return shard


def _shard_like(parameter: Tensor, mask: Tensor) -> Tensor:
    """The part of the mask that belongs to this rank's shard of the parameter."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return mask
    from torch.distributed.tensor import DTensor, Replicate

    whole = DTensor.from_local(mask.expand(parameter.shape), mesh, [Replicate()] * mesh.ndim, run_check=False)
    shard = whole.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return _local(shard).to(_local(parameter).device)  # the CPU for offloaded parameters


def _own_name(name: str) -> str:
    """The name of a layer without the prefixes of data parallelism, activation checkpointing and ``torch.compile``."""
    parts = [part for part in name.split(".") if part not in _WRAPPED]
    return ".".join(parts).removeprefix("module.")


_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""The attributes in which wrappers of a layer store it."""


def _layers(model: nn.Module) -> list[tuple[str, _DCL]]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"the network with the stochastic layers comes first; got a {type(model).__name__}")
    return [(_own_name(name), module) for name, module in model.named_modules() if isinstance(module, _DCL)]


def _stochastic(model: nn.Module) -> list[tuple[str, ConceptFusion]]:
    return [(name, layer.fusion) for name, layer in _layers(model) if layer.strategy == "stochastic"]
