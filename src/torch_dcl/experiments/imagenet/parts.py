"""Components of a training loop: rates, groups of parameters, dropout, mixed images, averaged weights.

Everything random is a function of (seed, step, number of the image), so it does not depend on how many ranks share a
batch.
"""

import contextlib
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_dcl.data.draws import draw, draw_key, mix

if TYPE_CHECKING:
    from torch_dcl.experiments.recipes.imagenet import ImageNetConfig

__all__ = [
    "Averaged",
    "KeyedDropout",
    "Mixed",
    "dropout_keys",
    "key_dropouts_",
    "mix_images",
    "optimizer_of",
    "parameter_groups",
    "rate_at",
]


def rate_at(step: int, total: int, rates: "ImageNetConfig") -> float:
    """The learning rate of a step: linear warm-up, then drops in steps, or half a cosine down to 0.

    Args:
        step: Counted from 0.
        total: All steps of the training.
        rates: The settings.
    """
    if step < rates.warmup:
        return rates.lr * (step + 1) / rates.warmup
    if rates.schedule == "cosine":
        done = (step - rates.warmup) / max(1, total - rates.warmup)
        return rates.lr * 0.5 * (1 + math.cos(math.pi * done))
    return rates.lr * rates.drop ** (step // rates.drop_every)


def parameter_groups(network: nn.Module, decay: float, bias_rate: float) -> list[dict[str, object]]:
    """Weights with decay; biases, norms and other scales without. Biases have a multiple of the rate (Caffe's is 2).

    Args:
        network: The network.
        decay: Weight decay.
        bias_rate: The factor on the rate of biases.

    Returns:
        Groups for an optimiser; `factor` multiplies the rate.
    """
    norms = {
        id(parameter)
        for module in network.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm | nn.LayerNorm | nn.GroupNorm)
        for parameter in module.parameters()
    }
    weights: list[nn.Parameter] = []
    biases: list[nn.Parameter] = []
    scales: list[nn.Parameter] = []
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            is_bias = name.endswith("bias")
            is_scale = id(parameter) in norms or (parameter.ndim < 2 and not is_bias)
            (scales if is_scale else biases if is_bias else weights).append(parameter)
    groups = [
        {"params": weights, "weight_decay": decay, "factor": 1.0},
        {"params": biases, "weight_decay": 0.0, "factor": bias_rate},
        {"params": scales, "weight_decay": 0.0, "factor": 1.0},
    ]
    return [group for group in groups if group["params"]]


def optimizer_of(network: nn.Module, settings: "ImageNetConfig") -> torch.optim.Optimizer:
    """SGD with momentum or AdamW, with all of its state from the start, so that every checkpoint has the same tensors.

    Args:
        network: The network, on its device.
        settings: The settings.
    """
    groups = parameter_groups(network, settings.weight_decay, settings.bias_lr)
    fused = any(parameter.is_cuda for parameter in network.parameters())
    optimizer: torch.optim.Optimizer
    if settings.optimizer == "adamw":
        first, second = settings.betas
        optimizer = torch.optim.AdamW(groups, settings.lr, (first, second), settings.eps, fused=fused)
        moments: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    else:
        optimizer = torch.optim.SGD(groups, settings.lr, settings.momentum, nesterov=settings.nesterov, fused=fused)
        moments = ("momentum_buffer",)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            state.update({name: torch.zeros_like(parameter) for name in moments})
            if settings.optimizer == "adamw":
                state["step"] = torch.zeros((), device=parameter.device if fused else "cpu")
    return optimizer


@functools.cache
def _hash_features(layer: int, count: int, device: torch.device) -> Tensor:
    """A hash of (layer, feature) for every feature of a layer, made once."""
    return mix(torch.arange(count, device=device) + layer)


class KeyedDropout(nn.Module):
    """Dropout whose mask is a hash of (key of the image, layer, feature) and not of a generator's state.

    Args:
        p: The probability to drop.
        layer: The number of the layer.
    """

    keys: Tensor

    def __init__(self, p: float, layer: int) -> None:
        super().__init__()
        self.p, self._layer = p, draw_key(layer, "dropout", 0)
        self.keys = torch.zeros(1, dtype=torch.int64)
        self._limit = int((1 - p) * 2**32)

    def forward(self, x: Tensor) -> Tensor:
        """Drop values in training, and scale the others."""
        if not self.training or self.p == 0:
            return x
        keys = self.keys.view(-1, *(1,) * (x.dim() - 1))
        count = math.prod(x.shape[1:])
        if torch.compiler.is_compiling():
            # Torch 2.11 compiles the sum of a count and a number for a GPU in int32, too narrow for the 64 bits of a
            # layer. With a tensor of keys in it, it is a sum of tensors, in int64.
            counted = torch.arange(count, device=x.device).view(1, *x.shape[1:]) + (keys - keys)
            features = mix(counted + self._layer)
        else:
            features = _hash_features(self._layer, count, x.device).view(1, *x.shape[1:])
        kept = (mix(keys + features) & 0xFFFFFFFF) < self._limit
        return x * (kept.to(x.dtype) / (1 - self.p) if self.p < 1 else 0)


def key_dropouts_(network: nn.Module) -> list[KeyedDropout]:
    """Replace every `nn.Dropout` of a network, in place.

    Args:
        network: The network.

    Returns:
        The new layers, whose `keys` a training loop sets before every forward pass.
    """
    layers: list[KeyedDropout] = []
    for parent in list(network.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Dropout:
                layers.append(KeyedDropout(child.p, len(layers)))
                setattr(parent, name, layers[-1].train(child.training))
    return layers


class Mixed(NamedTuple):
    """Images mixed in pairs, and the labels of both."""

    images: Tensor
    labels: Tensor
    others: Tensor
    weight: float
    """Of the first label."""

    def loss(self, logits: Tensor, smoothing: float) -> Tensor:
        """The cross-entropy, summed over the images."""
        own = F.cross_entropy(logits, self.labels, reduction="sum", label_smoothing=smoothing)
        if self.weight == 1:
            return own
        other = F.cross_entropy(logits, self.others, reduction="sum", label_smoothing=smoothing)
        return self.weight * own + (1 - self.weight) * other


def mix_images(images: Tensor, labels: Tensor, kind: str, alpha: float, seed: int, step: int) -> Mixed:
    """Mix every image with its neighbour: mixup adds them, cutmix puts a box of one into the other.

    The weight is drawn from Beta(α, α) once for a step, and the box is the same for all its images.

    Args:
        images: `[B, C, H, W]`, B even unless the kind is "none".
        labels: `[B]`.
        kind: "none", "mixup" or "cutmix".
        alpha: α.
        seed: The seed of the run.
        step: The number of the step.
    """
    if kind == "none":
        return Mixed(images, labels, labels, 1.0)
    random = np.random.default_rng([seed & 0x7FFFFFFFFFFFFFFF, step, 0x6D6978])
    weight = float(random.beta(alpha, alpha))
    swapped = images.view(-1, 2, *images.shape[1:]).flip(1).flatten(0, 1)
    others = labels.view(-1, 2).flip(1).flatten()
    if kind == "mixup":
        return Mixed(images * weight + swapped * (1 - weight), labels, others, weight)
    sides, box = images.shape[2:], []
    for side in sides:
        half, centre = side * math.sqrt(1 - weight) / 2, random.uniform(0, side)
        box.append(slice(max(0, round(centre - half)), min(side, round(centre + half))))
    mixed = images.clone()
    mixed[:, :, box[0], box[1]] = swapped[:, :, box[0], box[1]]
    covered = (box[0].stop - box[0].start) * (box[1].stop - box[1].start)
    return Mixed(mixed, labels, others, 1 - covered / (sides[0] * sides[1]))


class Averaged:
    """An exponential moving average of a network's parameters.

    Args:
        parameters: The parameters.
        decay: The share of the old average that a step keeps.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        self.parameters: Sequence[nn.Parameter] = list(parameters)
        self.decay = decay
        self.means = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages with the parameters of a step."""
        torch._foreach_lerp_(self.means, [p.detach() for p in self.parameters], 1 - self.decay)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the parameters by their averages inside the block."""
        own = [parameter.detach().clone() for parameter in self.parameters]
        with torch.no_grad():
            torch._foreach_copy_(list(self.parameters), self.means)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(list(self.parameters), own)


def dropout_keys(seed: int, step: int, index: Tensor) -> Tensor:
    """The key of each image for `KeyedDropout`.

    Args:
        seed: The seed of the run.
        step: The number of the step.
        index: The numbers of the images.
    """
    return draw(seed, "dropout", step, index)
