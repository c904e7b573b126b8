"""E networks of one architecture that are not stacked: each runs as the plain module that it is.

Where one network fills a GPU, stacking the layers of many gains nothing. A fleet needs the same of these networks as of
a `Stack`: their state in one place, with one more dimension in front, and randomness that is a function of each
network's own (seed, layer, step).
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
from torch_dcl.fleet.stacked_layers import StackedDropout
from torch_dcl.fleet.stacked_network import _check_alike, common_state, stacked_state
from torch_dcl.fusion import ConceptFusion
from torch_dcl.module import _DCL

__all__ = ["Unstacked"]

_ARCHITECTURES = 64
"""How many architectures of one class are compiled in a process. Torch's own limit is 8."""


_COMPILE: dict[str, Any] = {"shape_padding": False}
"""A batch of 100 is not a multiple of 8, and torch pads it where a few timed runs during compilation say that this is
faster: rounding would depend on what else the GPU did at that moment. Nothing is lost without padding: on an H200 the
LeNet variant's columns were 1 to 5 % faster, BigNet's within 1 %, both against eager runs."""


class Unstacked(nn.Module):
    """E plain networks, with the interface of a `Stack`.

    ``body`` holds the state of all networks under the names of a plain one, with the networks as a first dimension.
    Weights of convolutions are stored channels last, ``[E, N, KH, KW, C]``. The networks that run are views of this
    state; in a low precision, of the copies that the optimiser maintains. Batch norms stay in float32.

    Any network is accepted whose only randomness is `nn.Dropout` and the stochastic strategy of DCL layers.

    Args:
        networks: At least one; all of one architecture, each with its own weights. They are copied.
        compile: Whether to compile each forward pass with `torch.compile`.
        streams: On a GPU, how many networks run concurrently, each on a stream of its own. Results do not depend on it;
            memory grows with it.
        deterministic: Whether compiled code must be deterministic. Otherwise torch times several ways to form sums on a
            GPU and takes the fastest.

    Raises:
        ValueError: No network, or networks that differ in more than their weights.
        TypeError: Tied weights, or a stochastic layer whose idle branches cannot be excluded from the update.
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
        self._streams: list[torch.cuda.Stream] = []
        self._flat: list[Tensor] = []
        self.body = deepcopy(networks[0])
        for name, module in self.body.named_modules():
            same = [network.get_submodule(name) for network in networks]
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    rows = [_to_channels_last(getattr(part, key).detach()).contiguous() for part in same]
                    values = torch.stack(rows)
                    module._parameters[key] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = torch.stack([getattr(part, key) for part in same])
        # Not submodules: these are views of the state above.
        object.__setattr__(self, "_template", deepcopy(networks[0]).cpu())
        object.__setattr__(self, "_networks", [])
        object.__setattr__(self, "_run", [])
        self.train(networks[0].training)

    def train(self, mode: bool = True) -> "Unstacked":
        """Set the mode (train or eval) of all networks."""
        super().train(mode)
        for network in self.__dict__.get("_networks", ()):
            network.train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[E, B, ...]`` to ``[E, B, classes]``."""
        return torch.stack([self._logits_of(i, x[i]) for i in range(self.size)])

    def gradients(self, images: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """Mean losses ``[E]``, and the gradient of each trainable parameter, in the order of `named_stacked`.

        Networks run one after another, so that at most ``streams`` of them hold activations for the backward pass. None
        stands for a parameter that the forward pass does not use.
        """
        losses, by_network = [], []
        for i, network in enumerate(self._networks):
            with self._stream_of(i, images):
                loss = operations.cross_entropy(self._logits_of(i, images[i])[None], labels[i : i + 1]).mean()
                leaves = [parameter for parameter in network.parameters() if parameter.requires_grad]
                by_network.append(torch.autograd.grad(loss, leaves, allow_unused=True))
                losses.append(loss.detach())
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)
        gradients: list[Tensor | None] = []
        for by_parameter in zip(*by_network, strict=True):
            used = [_to_channels_last(g) for g in by_parameter if g is not None]
            gradients.append(None if not used else used[0][None] if self.size == 1 else torch.stack(used))
        return torch.stack(losses), gradients

    def advance(self, seed: Tensor, step: Tensor) -> None:
        """Draw dropout masks and active branches for a step, from seeds ``[E]`` and the step's number."""
        for i, network in enumerate(self._networks):
            for module in network.modules():
                if isinstance(module, _Dropout):
                    module.advance(seed[i : i + 1], step)
        for name, fusion in _stochastic(self.body):
            operations.advance_(fusion, seed, zlib.crc32(name.encode()), step, fusion.branches)

    def set_compute_dtype(self, dtype: torch.dtype) -> None:
        """Build the networks that run, as views of the state where it is now, with products in the given type."""
        for module in self.body.modules():
            for parameter in module.parameters(recurse=False):
                lowers = dtype != parameter.dtype and not isinstance(module, _BatchNorm)
                keep_low_copy(parameter, dtype if lowers else None)
        self._flat[:] = _join_buffers(self.body)
        self._networks[:] = [self._views(i) for i in range(self.size)]
        options = _COMPILE | {"deterministic": self.deterministic}
        self._run[:] = [
            torch.compile(network, options=options) if self.compiles else network for network in self._networks
        ]

    def step_buffers(self) -> list[Tensor]:
        """The buffers that a step may write to, ``[E, ...]`` each."""
        return self._flat

    def branch_parameters(self) -> dict[str, tuple[Any, int]]:
        """Parameters of which a step updates only the active branches, with the layer that draws these."""
        return operations.branch_parameters(((n, fusion, fusion) for n, fusion in _stochastic(self.body)), "fleet")

    def state_of(self, index: int) -> dict[str, Tensor]:
        """The state dict of one network."""
        parameters = {name for name, _ in self.body.named_parameters()}
        state = stacked_state(self.body)
        rows = {name: _to_channels_first(v[index]) if name in parameters else v[index] for name, v in state.items()}
        return {**rows, **common_state(self._template)}

    def network(self, index: int) -> nn.Module:
        """A copy of one network as a plain module on the CPU."""
        model: nn.Module = deepcopy(self._template)
        state = {
            n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in self.state_of(index).items()
        }
        model.load_state_dict(state, assign=True)
        buffers = dict(self.body.named_buffers())
        for name, buffer in model.named_buffers():
            if name not in state:  # not persistent
                buffer.copy_(buffers[name][index])
        return model

    def named_stacked(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Stacked parameters, by their names in a plain network."""
        return self.body.named_parameters()

    def check_randomness(self, size: Sequence[int]) -> None:
        """Refuse networks that use torch's random number generator, found by running two images ``[C, H, W]``."""
        trial = _with_drawn_dropout(self.network(0)).train()
        for module in trial.modules():
            if isinstance(module, _Dropout):
                module.plain.p = 0.0
            if isinstance(module, _DCL):
                module.fusion.advanced = True
        like = next(trial.parameters())
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            before = torch.get_rng_state()
            trial(torch.zeros(2, *size, dtype=like.dtype))
            if not torch.equal(before, torch.get_rng_state()):
                raise TypeError(
                    f"{type(trial).__name__} uses torch's random number generator in its forward pass, so its results "
                    "would depend on what ran before; use nn.Dropout, which a fleet draws from each network's seed"
                )

    def _stream_of(self, index: int, images: Tensor) -> contextlib.AbstractContextManager[Any]:
        """The stream that a network runs on, after all work issued so far. Its allocations stay on that stream."""
        if self.streams == 1 or not images.is_cuda:
            return contextlib.nullcontext()
        if not self._streams:
            self._streams.extend(torch.cuda.Stream(images.device) for _ in range(self.streams))  # type: ignore[no-untyped-call]
        stream = self._streams[index % self.streams]
        if index < self.streams:
            stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    def _logits_of(self, index: int, x: Tensor) -> Tensor:
        if x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        # Only training is compiled: evaluation has batches of other sizes.
        logits: Tensor
        if self.compiles and self.training:
            # Many architectures may share one forward method; none may silently run uncompiled.
            with torch._dynamo.config.patch(recompile_limit=_ARCHITECTURES, fail_on_recompile_limit_hit=True):
                logits = self._run[index](x)
        else:
            logits = self._networks[index](x)
        return logits

    def _views(self, index: int) -> nn.Module:
        """A network whose parameters and buffers are views of one row of the state."""
        network = _with_drawn_dropout(deepcopy(self._template)).train(self.training)
        for name, module in network.named_modules():
            if isinstance(module, _Dropout):
                continue
            stacked = self.body.get_submodule(name)
            for key, parameter in stacked._parameters.items():
                if parameter is not None:
                    row = _to_channels_first(leaf(parameter).detach()[index])
                    module._parameters[key] = nn.Parameter(row, requires_grad=parameter.requires_grad)
            for key, buffer in stacked._buffers.items():
                if buffer is not None:
                    module._buffers[key] = buffer[index]
            if isinstance(module, _DCL):
                module.fusion.advanced = True
        return network


class _Dropout(StackedDropout):
    """The dropout of a single network, drawn as in a stack."""

    def __init__(self, plain: nn.Dropout, name: str) -> None:
        super().__init__([plain])
        self.layer = zlib.crc32(name.encode())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[None])[0] if self.training else x


def _with_drawn_dropout(network: nn.Module) -> nn.Module:
    """Replace every `nn.Dropout` in place. Subclasses are kept: they may compute something else."""
    for name, module in list(network.named_modules()):
        for key, child in module._modules.items():
            if type(child) is nn.Dropout:
                module._modules[key] = _Dropout(child, f"{name}.{key}" if name else key)
    return network


def _stochastic(body: nn.Module) -> list[tuple[str, Any]]:
    return [
        (name, module.fusion)
        for name, module in body.named_modules()
        if isinstance(module, _DCL) and module.strategy == "stochastic"
    ]


def _join_buffers(body: nn.Module) -> list[Tensor]:
    """Make all buffers of one type views of one tensor, in place, so that a step copies and restores them at once.

    The draws of stochastic layers stay separate: kernels read them row by row.
    """
    flat = []
    by_type: dict[torch.dtype, list[tuple[nn.Module, str, Tensor]]] = {}
    for module in body.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and isinstance(module, ConceptFusion):
                flat.append(buffer)
            elif buffer is not None:
                by_type.setdefault(buffer.dtype, []).append((module, key, buffer))
    for buffers in by_type.values():
        joined = torch.cat([buffer.reshape(len(buffer), -1) for _, _, buffer in buffers], 1)
        flat.append(joined)
        sizes = [buffer[0].numel() for _, _, buffer in buffers]
        for (module, key, buffer), part in zip(buffers, torch.split(joined, sizes, 1), strict=True):
            module._buffers[key] = part.view(buffer.shape)
    return flat


def _to_channels_last(values: Tensor) -> Tensor:
    """A view of the weights of a convolution with the channels last; other values as they are."""
    return values.permute(0, 2, 3, 1) if values.dim() == 4 else values


def _to_channels_first(values: Tensor) -> Tensor:
    return values.permute(0, 3, 1, 2) if values.dim() == 4 else values
