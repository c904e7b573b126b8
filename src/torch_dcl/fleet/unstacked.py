"""Networks side by side: E networks of one architecture, each run by itself as the plain module that it is.

Where one network fills a GPU there is nothing to win by computing layers of many as one. What a fleet wants of them is
the same as of a `Stack`: their state in one place, one more dimension in front, and randomness that is a function of
each network's own (seed, layer, step).
"""

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torch_dcl.fleet import operations
from torch_dcl.fleet.operations import keep_low_copy, leaf
from torch_dcl.fleet.stacked_network import _check_alike, common_state, stacked_state
from torch_dcl.fusion import ConceptFusion
from torch_dcl.layers import _DCL

__all__ = ["Unstacked"]

_ARCHITECTURES = 64
"""How many architectures of one class are compiled in a process; torch stops at 8 by itself."""


_COMPILE: dict[str, Any] = {"shape_padding": False}
"""A batch of a hundred is no multiple of eight, and torch would pad it wherever a trial of a few runs while it compiles
says that this is faster: how a product is rounded would depend on what else the GPU did just then. Nothing is lost: the
LeNet variant's columns were 1 to 5 % faster without on an H200, BigNet's within 1 %, both against eager runs."""


class Unstacked(nn.Module):
    """E plain networks, with the interface of a `Stack`.

    ``body`` holds the state of all under the names of a plain network, with the networks as a first dimension. Weights
    of convolutions lie channels last there, ``[E, N, KH, KW, C]``. The networks that run read it through views: in a
    low precision the copy that the optimiser keeps, batch norms apart, which stay in float32.

    Any network will do whose randomness is `nn.Dropout` and the stochastic strategy of DCL layers.

    Args:
        networks: At least one; of one architecture, each with its own weights. They are copied.
        compile: Whether `torch.compile` makes each forward pass.
        streams: On a GPU, how many networks run at a time, each on a stream of its own. It does not change what is
            computed, and takes the memory of so many.
        deterministic: Whether what is compiled must give the same bits every time. Otherwise torch tries on a GPU how
            sums are formed fastest.

    Raises:
        ValueError: No network, or networks that differ in more than their weights.
        TypeError: Tied weights, or a stochastic layer whose idle branches cannot be held still.
    """

    _template: nn.Module
    _networks: list[nn.Module]
    _run: list[Any]

    def __init__(
        self, networks: Sequence[nn.Module], *, compile: bool = False, streams: int = 1, deterministic: bool = False
    ) -> None:
        super().__init__()
        _check_alike(networks)
        if streams < 1:
            raise ValueError(f"streams must be at least 1, got {streams}")
        self.size, self.compiles, self.streams = len(networks), compile, min(streams, len(networks))
        self.deterministic = deterministic
        self._side: list[torch.cuda.Stream] = []
        self._flat: list[Tensor] = []
        self.body = deepcopy(networks[0])
        for name, module in self.body.named_modules():
            same = [network.get_submodule(name) for network in networks]
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    values = torch.stack([_laid_out(getattr(part, key).detach()) for part in same])
                    module._parameters[key] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = torch.stack([getattr(part, key) for part in same])
        # Not parts of this module: what runs are views of its state.
        object.__setattr__(self, "_template", deepcopy(networks[0]).cpu())
        object.__setattr__(self, "_networks", [])
        object.__setattr__(self, "_run", [])
        self.train(networks[0].training)

    def train(self, mode: bool = True) -> "Unstacked":
        """Set the mode of all networks."""
        super().train(mode)
        for network in self.__dict__.get("_networks", ()):
            network.train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[E, B, ...]`` to ``[E, B, classes]``."""
        return torch.stack([self._one(i, x[i]) for i in range(self.size)])

    def gradients(self, images: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """Mean losses ``[E]``, and the gradient of each parameter that learns, in the order of `named_stacked`.

        One network after another, so that only ``streams`` keep what their backward pass needs. None stands for a
        parameter that the forward pass does not use.
        """
        losses, found = [], []
        for i, network in enumerate(self._networks):
            with self._beside(i, images):
                loss = operations.cross_entropy(self._one(i, images[i])[None], labels[i : i + 1]).mean()
                leaves = [parameter for parameter in network.parameters() if parameter.requires_grad]
                found.append(torch.autograd.grad(loss, leaves, allow_unused=True))
                losses.append(loss.detach())
        for stream in self._side:
            torch.cuda.current_stream().wait_stream(stream)
        gradients: list[Tensor | None] = []
        for of_all in zip(*found, strict=True):
            there = [_in_memory(g) for g in of_all if g is not None]
            gradients.append(None if not there else there[0][None] if self.size == 1 else torch.stack(there))
        return torch.stack(losses), gradients

    def advance(self, seed: Tensor, step: Tensor) -> None:
        """Draw what is drawn once a step, dropout masks and branches, for seeds ``[E]`` and a count."""
        for i, network in enumerate(self._networks):
            for module in network.modules():
                if isinstance(module, _Dropout):
                    module.drawn_from = (seed[i : i + 1], step)
        for name, fusion in _stochastic(self.body):
            layer = zlib.crc32(name.encode())
            fusion.key[:, 0].copy_(seed)
            fusion.key[:, 1].fill_(layer)
            fusion.key[:, 2].copy_(step.expand_as(seed))
            operations.draw_pairs_(fusion.active, seed, layer, step, fusion.branches)

    def set_compute_dtype(self, dtype: torch.dtype) -> None:
        """Make the networks that run, from the state where it lies now, with products in a type."""
        for module in self.body.modules():
            for parameter in module.parameters(recurse=False):
                lowers = dtype != parameter.dtype and not isinstance(module, _BatchNorm)
                keep_low_copy(parameter, dtype if lowers else None)
        self._flat[:] = _side_by_side_in_memory(self.body)
        self._networks[:] = [self._views(i) for i in range(self.size)]
        options = _COMPILE | {"deterministic": self.deterministic}
        self._run[:] = [
            torch.compile(network, options=options) if self.compiles else network for network in self._networks
        ]

    def step_buffers(self) -> list[Tensor]:
        """Everything that a step may write to beside the parameters, ``[E, ...]`` each."""
        return self._flat

    def branch_parameters(self) -> dict[str, tuple[Any, int]]:
        """Parameters of which only the active branches move in a step, with the layer that knows which."""
        found = {}
        for name, fusion in _stochastic(self.body):
            if len(set(fusion.widths)) > 1 or fusion.norm is not None:
                raise TypeError(
                    f"layer {name!r}: the stochastic strategy in a fleet wants branches of one width and no "
                    "norm_layer; give the layer one width, or train it outside of a fleet"
                )
            for part in ("branch.weight", "branch.bias", "fusion.weight", "fusion.bias"):
                found[f"{name}.{part}"] = (fusion, fusion.branches)
        return found

    def state_of(self, index: int) -> dict[str, Tensor]:
        """The state dict of one network."""
        laid_out = {name for name, _ in self.body.named_parameters()}
        state = stacked_state(self.body)
        rows = {name: _natural(v[index]) if name in laid_out else v[index] for name, v in state.items()}
        return {**rows, **common_state(self._template)}

    def network(self, index: int) -> nn.Module:
        """One network by itself, on the CPU, with its weights copied."""
        model: nn.Module = deepcopy(self._template)
        state = {
            n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in self.state_of(index).items()
        }
        model.load_state_dict(state, assign=True)
        buffers = dict(self.body.named_buffers())
        for name, buffer in model.named_buffers():
            if name not in state:  # one that a state dict leaves out
                buffer.copy_(buffers[name][index])
        return model

    def named_stacked(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by the names that they have in a plain network."""
        return self.body.named_parameters()

    def check_randomness(self, size: Sequence[int]) -> None:
        """Run two images ``[C, H, W]`` through a copy, and refuse a network that draws random numbers of torch's own.

        Raises:
            TypeError: It does. Its results would depend on what ran before.
        """
        trial = _with_drawn_dropout(self.network(0)).train()
        for module in trial.modules():
            if isinstance(module, _Dropout):
                module.p = 0.0
            if isinstance(module, _DCL):
                module.fusion.advanced = True
        like = next(trial.parameters())
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            before = torch.get_rng_state()
            trial(torch.zeros(2, *size, dtype=like.dtype))
            if not torch.equal(before, torch.get_rng_state()):
                raise TypeError(
                    f"{type(trial).__name__} draws random numbers of torch's own in its forward pass, which depend on "
                    "what ran before; use nn.Dropout for that, which a fleet draws from each network's seed"
                )

    def _beside(self, index: int, images: Tensor) -> contextlib.AbstractContextManager[Any]:
        """The stream that a network runs on, behind what was asked for so far; what is allocated there stays there."""
        if self.streams == 1 or not images.is_cuda:
            return contextlib.nullcontext()
        if not self._side:
            self._side.extend(torch.cuda.Stream(images.device) for _ in range(self.streams))  # type: ignore[no-untyped-call]
        stream = self._side[index % self.streams]
        if index < self.streams:
            stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    def _one(self, index: int, x: Tensor) -> Tensor:
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        # What is compiled is the training step's; evaluation has batches of other sizes.
        logits: Tensor
        if self.compiles and self.training:
            # Fleets of many architectures may share the code of a forward pass; none may run uncompiled unnoticed.
            with torch._dynamo.config.patch(recompile_limit=_ARCHITECTURES, fail_on_recompile_limit_hit=True):
                logits = self._run[index](x)
        else:
            logits = self._networks[index](x)
        return logits

    def _views(self, index: int) -> nn.Module:
        """A network whose parameters and buffers are a row of the state."""
        network = _with_drawn_dropout(deepcopy(self._template)).train(self.training)
        for name, module in network.named_modules():
            if isinstance(module, _Dropout):
                continue
            of_all = self.body.get_submodule(name)
            for key, parameter in of_all._parameters.items():
                if parameter is not None:
                    row = _natural(leaf(parameter).detach()[index])
                    module._parameters[key] = nn.Parameter(row, requires_grad=parameter.requires_grad)
            for key, buffer in of_all._buffers.items():
                if buffer is not None:
                    module._buffers[key] = buffer[index]
            if isinstance(module, _DCL):
                module.fusion.advanced = True
        return network


class _Dropout(nn.Module):
    """Dropout whose mask is a function of the network's seed, the layer and the step, as `StackedDropout`'s is."""

    def __init__(self, p: float, name: str) -> None:
        super().__init__()
        self.p, self.layer = p, zlib.crc32(name.encode())
        self.drawn_from: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Drop and scale in training; in evaluation do nothing."""
        if not self.training or self.p == 0:
            return x
        if self.drawn_from is None:
            raise RuntimeError("dropout of a fleet wants seeds and a step: call advance(seed, step) first")
        seed, step = self.drawn_from
        return operations.dropout(x[None], seed, self.layer, step, self.p)[0]


def _with_drawn_dropout(network: nn.Module) -> nn.Module:
    """The network with every `nn.Dropout` replaced, in place; a subclass may do something else and stays."""
    for name, module in list(network.named_modules()):
        for key, child in module._modules.items():
            if type(child) is nn.Dropout:
                module._modules[key] = _Dropout(child.p, f"{name}.{key}" if name else key)
    return network


def _stochastic(body: nn.Module) -> list[tuple[str, Any]]:
    return [
        (name, module.fusion)
        for name, module in body.named_modules()
        if isinstance(module, _DCL) and module.strategy == "stochastic"
    ]


def _side_by_side_in_memory(body: nn.Module) -> list[Tensor]:
    """Make all buffers of one type views of one tensor, in place, so that a step keeps and restores them at once.

    The draws of stochastic layers stay by themselves: kernels read them row by row.
    """
    flat = []
    by_type: dict[torch.dtype, list[tuple[nn.Module, str, Tensor]]] = {}
    for module in body.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and isinstance(module, ConceptFusion):
                flat.append(buffer)
            elif buffer is not None:
                by_type.setdefault(buffer.dtype, []).append((module, key, buffer))
    for found in by_type.values():
        together = torch.cat([buffer.reshape(len(buffer), -1) for _, _, buffer in found], 1)
        flat.append(together)
        sizes = [buffer[0].numel() for _, _, buffer in found]
        for (module, key, buffer), part in zip(found, torch.split(together, sizes, 1), strict=True):
            module._buffers[key] = part.view(buffer.shape)
    return flat


def _laid_out(values: Tensor) -> Tensor:
    """Weights of a convolution channels last in memory and in shape, everything else as it is."""
    return _in_memory(values).contiguous()


def _in_memory(values: Tensor) -> Tensor:
    return values.permute(0, 2, 3, 1) if values.dim() == 4 else values


def _natural(values: Tensor) -> Tensor:
    return values.permute(0, 3, 1, 2) if values.dim() == 4 else values
