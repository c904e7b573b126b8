"""Plain layers, the DCL layers that replace them, and the obstacles to a replacement."""

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from torch_dcl.fusion import Strategy
from torch_dcl.layers import DCLConv1d, DCLConv2d, DCLConv3d, DCLLinear
from torch_dcl.module import _DCL, passes_relu

__all__ = [
    "AbsorbedNorm",
    "AbsorbedReLU",
    "SharedReLU",
    "build",
    "copy_flags",
    "disable_fast_paths",
    "is_removable",
    "kind_of",
    "names_of",
    "norm_obstacle",
    "norm_settings",
    "obstacle",
    "relu_replacement",
    "swap",
]

REPLACEMENTS: dict[type[nn.Module], type[DCLLinear | DCLConv1d | DCLConv2d | DCLConv3d]] = {
    nn.Linear: DCLLinear,
    nn.Conv1d: DCLConv1d,
    nn.Conv2d: DCLConv2d,
    nn.Conv3d: DCLConv3d,
}
_NORMS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: nn.BatchNorm1d,
    nn.Conv1d: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    nn.Conv3d: nn.BatchNorm3d,
}
_FAST_PATHS = {"activation_relu_or_gelu": 0, "use_nested_tensor": False}
"""The attributes that enable the inference path of torch's transformers and of their copies, with the value for off."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class AbsorbedNorm(nn.Identity):
    """Replaces a batch norm that was moved into the DCL layer before it.

    It passes ``train()``, ``eval()`` and ``requires_grad_()`` on to that norm, ``fusion.norm``, which has its tensors.
    """

    # The layer, in a tuple, because it is not a part of this module; empty if it is not known.
    layers: tuple[_DCL, ...] = ()

    def __init__(self, layer: _DCL | None = None) -> None:
        super().__init__()
        self.layers = () if layer is None else (layer,)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the norm in the layer, too."""
        for norm in self._norms():
            norm.train(mode)
        return super().train(mode)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze the norm in the layer, or train it again."""
        for norm in self._norms():
            norm.requires_grad_(requires_grad)
        return self

    def _norms(self) -> list[nn.Module]:
        """The norm; looked up in every call, since ``nn.SyncBatchNorm.convert_sync_batchnorm`` replaces it."""
        return [layer.fusion.norm for layer in self.layers if layer.fusion.norm is not None]


class AbsorbedReLU(nn.ReLU):
    """Replaces a ReLU after a DCL layer, whose output is positive already. For code that asks, it is a ReLU still."""

    def forward(self, input: Tensor) -> Tensor:
        """The input itself."""
        return input


class SharedReLU(nn.ReLU):
    """Replaces a ReLU that DCL layers share with other layers, for example in a residual block.

    The unmodified output of such a DCL layer is positive and passes through; any other input is rectified.
    """

    def forward(self, input: Tensor) -> Tensor:
        """The input itself if a DCL layer marked it as positive, else its ReLU."""
        return input if passes_relu(input) else F.relu(input, self.inplace)


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks, or a forward of this instance alone, which a replacement would lose."""
    return "forward" in vars(module) or any(getattr(module, hooks) for hooks in _HOOKS)


def is_removable(module: nn.Module | None) -> bool:
    """Whether this is a ReLU without hooks, which is a no-op after conversion."""
    return type(module) in RELUS and not has_hooks(module)  # type: ignore[arg-type]


RELUS = (nn.ReLU, SharedReLU)


def relu_replacement(relu: nn.ReLU, *, shared: bool) -> nn.Module:
    """The module that replaces a ReLU after a DCL layer; the ReLU itself if it is a replacement already."""
    if isinstance(relu, SharedReLU):
        return relu
    return (SharedReLU if shared else AbsorbedReLU)(relu.inplace).train(relu.training)


def plain_type(module: nn.Module) -> type[nn.Module] | None:
    """The torch class whose forward ``module`` runs, if it is one that can be replaced."""
    if (stands_for := _stands_for(module)) is not None:
        return stands_for
    for plain in REPLACEMENTS:
        if isinstance(module, plain):
            same = type(module).forward is plain.forward
            convolves = getattr(type(module), "_conv_forward", None) is getattr(plain, "_conv_forward", None)
            return plain if same and convolves else None
    return None


def _stands_for(module: nn.Module) -> type[nn.Module] | None:
    """The torch class that a layer of this library declares to be equivalent to, without inheritance."""
    equivalent: type[nn.Module] | None = vars(type(module)).get("stands_for")
    return equivalent


def kind_of(module: nn.Module) -> str:
    """The name of a layer's class in a plan."""
    return (_stands_for(module) or type(module)).__name__


def obstacle(module: nn.Module) -> str:
    """Why this layer cannot be replaced, whatever follows it; empty if it can."""
    kind = type(module).__name__
    if isinstance(module, _DCL):
        return "already a DCL layer"
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return "a transposed convolution"
    if parametrize.is_parametrized(module):
        return "parametrized: remove the parametrization first"
    if any(map(is_lazy, module.parameters())):
        return "lazy, and has no size yet: run one batch through the network first"
    if plain_type(module) is None:
        return f"a {kind} with a forward of its own"
    if getattr(module, "groups", 1) != 1:
        return f"grouped ({module.groups} groups)"
    is_parameter = module._parameters.get("weight") is not None
    return _hook_obstacle(module) or ("" if is_parameter else "its weight is not a parameter")


def is_frozen_norm(module: nn.Module) -> bool:
    """Whether this is the batch norm with fixed statistics of torchvision's detection networks."""
    return type(module).__name__ == "FrozenBatchNorm2d" and "running_var" in dict(module.named_buffers(recurse=False))


def unfreeze_norm(norm: nn.Module) -> nn.Module:
    """A frozen batch norm as an ordinary one that computes the same in eval; any other norm itself."""
    if not is_frozen_norm(norm):
        return norm
    state = dict(norm.named_buffers(recurse=False))
    common = nn.BatchNorm2d(len(state["weight"]), eps=float(norm.eps)).to(state["weight"])  # type: ignore[arg-type]
    common.load_state_dict(state, strict=False)
    return common.eval()


def is_plain_norm(module: nn.Module) -> bool:
    """Whether this is a batch norm with torch's own forward, or a frozen one."""
    forward = type(module).forward
    is_torch = isinstance(module, _BatchNorm) and forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    return is_torch or is_frozen_norm(module)


def norm_obstacle(norm: nn.Module) -> str:
    """Why a batch norm cannot be moved into a DCL layer; empty if it can."""
    fused = hasattr(norm, "act") and isinstance(getattr(norm, "drop", None), nn.Identity)
    if not is_plain_norm(norm) and not fused:
        return f"its batch norm is a {type(norm).__name__} with a forward of its own"
    if parametrize.is_parametrized(norm):
        return "its batch norm is parametrized: remove the parametrization first"
    hooks = _hook_obstacle(norm)
    return f"its batch norm {hooks}" if hooks else ""


def _hook_obstacle(module: nn.Module) -> str:
    if type(module).train is not nn.Module.train or "train" in vars(module):
        return "has a train() of its own, which would be lost"
    if "forward" in vars(module):
        return "carries a replaced forward, which would be lost: remove it first"
    return "carries hooks, which would be lost: remove them first" if has_hooks(module) else ""


@torch.inference_mode(False)  # parameters made in it could never be trained
def build(
    module: nn.Module,
    *,
    widths: tuple[int, ...],
    strategy: Strategy = "deterministic",
    eps: float | None = None,
    norm: nn.Module | None = None,
    bias: bool | None = None,
    device: str | None = None,
) -> _DCL:
    """The DCL layer that replaces ``module`` and, with ``norm``, the batch norm after it.

    A frozen batch norm has no parameters to train: it is folded into weights and bias.
    """
    plain = plain_type(module)
    if plain is None:
        raise TypeError(f"a {type(module).__name__} cannot be replaced by a DCL layer: {obstacle(module)}")
    options = {"device": device, "bias": bias}
    changed: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    if norm is not None and is_frozen_norm(norm):
        norm, changed = None, {**changed, "bias": True}
    layer = REPLACEMENTS[plain].like(
        module,  # type: ignore[arg-type]
        branches=len(widths),
        width=widths,
        strategy=strategy,
        eps=eps,
        norm_layer=None if norm is None else norm_factory(plain, norm),
        **changed,
    )
    if norm is not None and layer.fusion.norm is not None:  # often float32 in a network of half precision
        floating = (t.dtype for t in (*norm.parameters(), *norm.buffers()) if t.is_floating_point())
        layer.fusion.norm.to(dtype=next(floating, None))
    weight = layer_weight(module)
    last = torch.channels_last_3d if weight.dim() == 5 else torch.channels_last
    is_last = weight.dim() > 3 and weight.is_contiguous(memory_format=last) and not weight.is_contiguous()
    return layer.to(memory_format=last) if is_last else layer


def layer_weight(module: nn.Module) -> Tensor:
    """The weight of a plain layer, typed as a tensor."""
    weight = module.weight
    if not isinstance(weight, Tensor):
        raise TypeError(f"a {type(module).__name__} has no weight")
    return weight


def is_channels_last(tensor: Tensor) -> bool:
    """Whether a batch of images, or the filters of a Conv2d, is in channels_last and no other memory format."""
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def norm_factory(plain: type[nn.Module], norm: nn.Module) -> Callable[[int], nn.Module]:
    """A factory of batch norms with the settings of ``norm``, for the output of a ``plain`` layer."""
    kind = nn.SyncBatchNorm if isinstance(norm, nn.SyncBatchNorm) else _NORMS[plain]
    return partial(kind, **norm_settings(norm))


def norm_settings(norm: nn.Module) -> dict[str, Any]:
    """The arguments of a batch norm like ``norm``, without its size."""
    settings = {name: getattr(norm, name) for name in ("eps", "momentum", "affine", "track_running_stats")}
    if norm.affine and norm.bias is None:  # possible since torch 2.15
        settings["bias"] = False
    return settings


def names_of(model: nn.Module) -> dict[nn.Module, list[str]]:
    """All names of every module; a module shared by two parents has two."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def swap(model: nn.Module, names: list[str], new: nn.Module) -> None:
    """Replace the modules of these names by ``new``.

    Raises:
        ValueError: a layer that is compiled by itself.
    """
    for name in names:
        parent, _, child = name.rpartition(".")
        if child == "_orig_mod":
            raise ValueError(
                f"{name!r} is compiled by itself, and its compiled forward would still call the old layer; convert or "
                "load the network before torch.compile"
            )
        setattr(model.get_submodule(parent), child, new)


def copy_flags(layer: _DCL, module: nn.Module, norm: nn.Module | None) -> None:
    """Copy ``requires_grad`` of the old parameters, and ``training`` of the old batch norm."""
    weight = layer_weight(module)
    for name, parameter in layer.named_parameters():
        if name.startswith("fusion.norm"):
            old = getattr(norm, name.rpartition(".")[2], None)
        else:
            old = module.bias if name.endswith("bias") else weight
        parameter.requires_grad_(weight.requires_grad if old is None else old.requires_grad)
    if layer.fusion.norm is not None:
        layer.fusion.norm.train(layer.training if norm is None else norm.training)


def disable_fast_paths(model: nn.Module) -> None:
    """Disable the inference path of every transformer layer and encoder that contains a DCL layer.

    That path passes the weights of its layers to one fused operation and does not call the layers.
    """
    for module in model.modules():
        flags = _FAST_PATHS.keys() & vars(module).keys()
        if flags and any(isinstance(part, _DCL) for part in module.modules()):
            for flag in flags:
                setattr(module, flag, _FAST_PATHS[flag])
