"""A stack: E networks of one architecture as one module.

The first network is traced, and every layer in the trace is replaced by the stacked layer of all networks. The input is
``[E, B, C, H, W]``, one batch for each network; the output is ``[E, B, classes]``.
"""

import operator
import zlib
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn import functional as F

from torch_dcl.fleet import operations
from torch_dcl.fleet.operations import cross_entropy, keep_low_copy, leaf
from torch_dcl.fleet.stacked_layers import StackedConv2d, StackedDropout, StackedFusion, build_stacked, is_registered
from torch_dcl.models import _common

__all__ = ["Stack"]

_EXTRA_STATE = "_extra_state"


class Stack(nn.Module):
    """E networks of one architecture as one module.

    Parameters and buffers have the names of a plain network's and one more dimension in front; ``stack.network(i)``
    returns network i as a plain module.

    Args:
        networks: At least one; all of one architecture, each with its own weights.

    Raises:
        TypeError: A layer of a class that is not registered, or a call in the forward pass that cannot be stacked.
        ValueError: No network, or networks that differ in more than their weights.
    """

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        _check_alike(networks)
        first = networks[0]
        graph = _trace(first)
        layers: dict[str, nn.Module] = {}
        for node in graph.nodes:
            if node.op == "call_module" and node.target not in layers:
                same = [network.get_submodule(node.target) for network in networks]
                layers[node.target] = build_stacked(same, node.target)
        _rewrite(graph)
        _merge(graph, layers)
        self.size = len(networks)
        self.body = torch.fx.GraphModule(layers, graph, "Stack")
        for name, module in self.body.named_modules():
            if isinstance(module, StackedDropout):
                module.layer = zlib.crc32(name.encode())
            if isinstance(module, StackedFusion):  # by the name of the DCL layer, as in torch_dcl.stochastic
                module.layer = zlib.crc32(name.removesuffix(".fusion").encode())
        object.__setattr__(self, "_template", deepcopy(first).cpu())  # not a submodule
        known = self.body.state_dict().keys()
        self._unused = [
            {
                name: tensor.detach().cpu().clone()
                for name, tensor in {**dict(network.named_buffers()), **network.state_dict()}.items()
                if name not in known
            }
            for network in networks
        ]  # state that the forward pass does not use, non-persistent buffers included
        self.train(first.training)

    _template: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[E, B, ...]`` to ``[E, B, classes]``."""
        y: Tensor = self.body(x)
        return y

    def gradients(self, images: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """Mean losses ``[E]``, and the gradient of each trainable parameter, in the order of `named_stacked`."""
        losses = cross_entropy(self(images), labels).mean(1)
        leaves = [leaf(parameter) for _, parameter in self.named_stacked() if parameter.requires_grad]
        return losses, list(torch.autograd.grad(losses.sum(), leaves))

    def advance(self, seed: Tensor, step: Tensor) -> None:
        """Draw dropout masks and active branches for a step, from seeds ``[E]`` and the step's number."""
        for module in self.body.modules():
            advance = getattr(module, "advance", None)
            if callable(advance):
                advance(seed, step)

    def set_compute_dtype(self, dtype: torch.dtype) -> None:
        """Keep low-precision copies of float32 parameters, which products read."""
        for module in self.body.modules():
            if getattr(module, "lowers", False):
                for parameter in module.parameters(recurse=False):
                    keep_low_copy(parameter, dtype if dtype != parameter.dtype else None)

    def branch_parameters(self) -> dict[str, tuple[StackedFusion, int]]:
        """Parameters of which a step updates only the active branches, with the layer that draws these."""
        drawn = [
            (name.removesuffix(".fusion"), module, module.plain)
            for name, module in self.body.named_modules()
            if isinstance(module, StackedFusion) and module.plain.strategy == "stochastic"
        ]
        return operations.branch_parameters(drawn, "stack")

    def step_buffers(self) -> list[Tensor]:
        """The buffers that a step may write to, ``[E, ...]`` each."""
        return list(self.body.buffers())

    def state_of(self, index: int) -> dict[str, Tensor]:
        """The state dict of one network."""
        known = self._template.state_dict()
        rows = {name: value[index] for name, value in stacked_state(self.body).items() if name in known}
        return {**rows, **common_state(self._template)}

    def network(self, index: int) -> nn.Module:
        """A copy of one network as a plain module on the CPU."""
        model: nn.Module = deepcopy(self._template)
        state = {name: value.detach().cpu().clone() for name, value in self.state_of(index).items()}
        unused = self._unused[index]
        needed = model.state_dict().keys()
        model.load_state_dict({**{n: t for n, t in unused.items() if n in needed}, **state}, assign=True)
        for name, buffer in model.named_buffers():
            if name in unused:
                buffer.copy_(unused[name])
        return model

    def named_stacked(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Stacked parameters, by their names in a plain network."""
        return self.body.named_parameters()


class _Tracer(torch.fx.Tracer):
    """Treats layers that can be stacked and torch's own as leaves, and traces into everything else."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return is_registered(m) or super().is_leaf_module(m, module_qualified_name)


def _trace(network: nn.Module) -> torch.fx.Graph:
    try:
        graph = _Tracer().trace(network)
    except torch.fx.proxy.TraceError as error:
        raise TypeError(
            f"{type(network).__name__} cannot be stacked: its forward pass depends on values ({error}); "
            "write it without branches on tensors, or pass stacked=False"
        ) from error
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    if len(inputs) != 1:
        raise TypeError(f"{type(network).__name__} takes {len(inputs)} inputs; a stack takes networks of one input")
    return graph


_ELEMENTWISE = {torch.relu, F.relu, torch.add, operator.add, operator.mul, operator.iadd, torch.sigmoid, torch.tanh}


def _flatten(x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """`torch.flatten` of a plain network, with one more dimension in front."""
    if start_dim < 1:
        raise TypeError("flatten over the batch cannot be stacked; use flatten(1)")
    return x.flatten(start_dim + 1, end_dim if end_dim < 0 else end_dim + 1)


def _mean(x: Tensor, dim: int | tuple[int, ...], keepdim: bool = False) -> Tensor:
    """`Tensor.mean` of a plain network, with one more dimension in front."""
    return x.mean([d + 1 for d in ((dim,) if isinstance(dim, int) else dim)], keepdim)


def _is_mean_of_an_image(node: torch.fx.Node) -> bool:
    """Whether a node is a mean over dimensions counted from the front, and none of them is the batch."""
    dims: Any = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0)
    dims = (dims,) if isinstance(dims, int) else dims
    return (node.op, node.target) == ("call_method", "mean") and all(isinstance(d, int) and d > 0 for d in dims)


def _rewrite(graph: torch.fx.Graph) -> None:
    """Replace calls that are not layers by their equivalents with one more dimension in front."""
    for node in list(graph.nodes):
        if node.op in ("placeholder", "output", "call_module"):
            continue
        name = getattr(node.target, "__name__", str(node.target))
        if node.target is _common.check_images:
            graph.erase_node(node)
        elif node.target is torch.flatten or (node.op, node.target) == ("call_method", "flatten"):
            node.op, node.target = "call_function", _flatten
        elif _is_mean_of_an_image(node):
            node.op, node.target = "call_function", _mean
        elif node.target not in _ELEMENTWISE and (node.op, node.target) not in (
            ("call_method", "relu"), ("call_method", "relu_"), ("call_method", "contiguous"),
        ):  # fmt: skip
            raise TypeError(
                f"the forward pass calls {name!r}, and it is not known what to call with one more dimension in front; "
                "use a layer for it (nn.Flatten, nn.MaxPool2d, …), or register_stacked a layer of your own"
            )
    graph.lint()


def _merge(graph: torch.fx.Graph, layers: dict[str, nn.Module]) -> None:
    """Merge 2 × 2 max pooling and ReLU, in either order, into the convolution before them."""
    for node in list(graph.nodes):
        layer = layers.get(node.target) if node.op == "call_module" else None
        if not isinstance(layer, StackedConv2d) or not layer.simple:
            continue
        if sum(other.target == node.target for other in graph.nodes) > 1:
            continue
        while len(node.users) == 1:
            (user,) = node.users
            if _is_relu(user, layers) and not layer.relu:
                layer.relu = True
            elif _is_pool(user, layers) and layer.pool == 1:
                layer.pool = 2
            else:
                break
            user.replace_all_uses_with(node)
            graph.erase_node(user)
    graph.lint()


def _is_relu(node: torch.fx.Node, layers: dict[str, nn.Module]) -> bool:
    if node.op == "call_module":  # the exact class: a subclass may compute something else
        return type(getattr(layers[str(node.target)], "plain", None)) is nn.ReLU
    return node.target in (torch.relu, F.relu, "relu", "relu_")


def _is_pool(node: torch.fx.Node, layers: dict[str, nn.Module]) -> bool:
    plain: Any = getattr(layers[str(node.target)], "plain", None) if node.op == "call_module" else None
    return (
        type(plain) is nn.MaxPool2d
        and all(_both(n) == (2, 2) for n in (plain.kernel_size, plain.stride))
        and _both(plain.padding) == (0, 0)
        and _both(plain.dilation) == (1, 1)
        and not plain.ceil_mode
        and not plain.return_indices
    )


def _both(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)  # type: ignore[return-value]


def stacked_state(body: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a state dict, ``[E, ...]`` each."""
    return {name: value for name, value in body.state_dict().items() if not name.endswith(_EXTRA_STATE)}


def common_state(network: nn.Module) -> dict[str, Tensor]:
    """The extra state of a state dict, equal in all networks: ε of DCL layers."""
    return {name: value for name, value in network.state_dict().items() if name.endswith(_EXTRA_STATE)}


def _settings(network: nn.Module) -> list[tuple[str, type, dict[str, object]]]:
    """What networks of a stack must agree in: the class of every module, its numbers, strings and tuples of these."""
    return [
        (name, type(module), {k: v for k, v in vars(module).items() if _is_setting(v) and k != "advanced"})
        for name, module in network.named_modules()
    ]


def _is_setting(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_setting, value))  # not where a tuple holds modules, as that of an `AbsorbedNorm`
    return isinstance(value, (int, float, str, type(None)))


def _check_alike(networks: Sequence[nn.Module]) -> None:
    if not networks:
        raise ValueError("a stack needs at least one network")
    first = networks[0]
    names: dict[int, str] = {}
    for name, parameter in first.named_parameters(remove_duplicate=False):
        if id(parameter) in names:
            raise TypeError(f"{names[id(parameter)]!r} and {name!r} are tied; a stack does not support tied parameters")
        names[id(parameter)] = name
    shapes = {name: (value.shape, value.dtype) for name, value in first.state_dict().items()}
    wanted = _settings(first)
    for i, network in enumerate(networks[1:], 1):
        if network.training != first.training:
            raise ValueError(f"network {i} of the stack is not in the mode of network 0; call train() or eval() on all")
        settings = _settings(network)
        if settings != wanted:
            where = next((a[0] for a, b in zip(settings, wanted, strict=False) if a != b), "")
            raise ValueError(
                f"network {i} of the stack has another architecture than network 0"
                f"{f' (layer {where!r})' if where else ''}; use one stack for each architecture"
            )
        if {name: (value.shape, value.dtype) for name, value in network.state_dict().items()} != shapes:
            raise ValueError(
                f"network {i} of the stack has another architecture than network 0 (other parameters); "
                "use one stack for each architecture"
            )
