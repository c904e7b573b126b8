"""Responses of fused filters by class, and of their branches by digit: section 4.1.4 of the paper.

Labelled images go through a converted network. The responses of one DCL layer, z and every v(t), are averaged over the
images of each class, and, when the classes are numbers, over the images with each digit at each position.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from torch_dcl.convert.trace import evaluating
from torch_dcl.fleet.checkpoint import finite, with_nan
from torch_dcl.module import _DCL

__all__ = [
    "ClassResponses", "Complementary", "as_plain", "class_responses", "complementary", "dcl_layers", "from_plain",
    "pick_filter", "pick_rule", "shares",
]  # fmt: skip


@dataclass(frozen=True)
class ClassResponses:
    """Mean responses of all filters of one layer, by class. A class without images has NaN."""

    layer: str
    """The layer's name in the network."""
    names: tuple[str, ...]
    """What the C classes are called."""
    digits: int
    """How many digits a class has as a number; 1 when classes are just classes."""
    count: Tensor
    """Images of each class, int64 ``[C]``."""
    z: Tensor
    """Mean fused response, float64 ``[C, K2]``."""
    v: Tensor
    """Mean response of each branch, float64 ``[T, C, K2]``."""

    def by_digit(self) -> Tensor:
        """Mean response of each branch over the images with a digit at a position: float64 ``[T, digits, 10, K2]``.

        Positions are in reading order: the first is the most significant. With ``digits`` 1 the only position is the
        class itself: ``[T, 1, C, K2]``.
        """
        if self.digits == 1:
            return self.v[:, None]
        branches, _, filters = self.v.shape
        places = (10,) * self.digits
        total = (self.v.nan_to_num(0) * self.count[:, None]).view(branches, *places, filters)
        count = self.count.view(places)
        means = []
        for position in range(self.digits):
            others = [axis for axis in range(self.digits) if axis != position]
            means.append(total.sum([1 + axis for axis in others]) / count.sum(others)[:, None])
        return torch.stack(means, 1)

    def of_class(self, index: int) -> tuple[int, ...]:
        """The digits of a class in reading order, or the class itself with ``digits`` 1."""
        if self.digits == 1:
            return (index,)
        return tuple(index // 10**place % 10 for place in reversed(range(self.digits)))


@dataclass(frozen=True)
class Complementary:
    """One filter of a DCL layer: the responses of its fusion by class, and of its branches by digit."""

    layer: str
    """The layer's name in the network."""
    filter: int
    """Which filter, counted from 0."""
    picked: bool
    """Whether :func:`pick_filter` chose it."""
    names: tuple[str, ...]
    """What the C classes are called."""
    digits: int
    """How many digits a class has as a number; 1 when classes are just classes."""
    images: int
    """How many images the means are over."""
    fused: Tensor
    """Mean of z by class, float64 ``[C]``; NaN for a class without images."""
    branches: Tensor
    """Mean of each v(t) by class, float64 ``[T, C]``."""
    by_digit: Tensor
    """Mean of each v(t) by the digit at each position, float64 ``[T, digits, 10]``; with ``digits`` 1, by class."""
    highest: int
    """The class with the highest fused response."""
    parts: tuple[int, ...]
    """Its digits in reading order; with ``digits`` 1, the class itself. What contributes to the fused maximum."""
    own: tuple[tuple[int, ...], ...]
    """For each branch and position, the digit with the branch's own highest response."""


@torch.no_grad()
def class_responses(
    model: nn.Module,
    layer_name: str,
    images: Tensor,
    labels: Tensor,
    *,
    digits: int = 2,
    classes: int | Sequence[str] | None = None,
    batch: int = 500,
) -> ClassResponses:
    """Average the responses of a DCL layer over the images of each class.

    The network runs in eval mode and is not changed. A convolutional layer, or a linear one on a sequence, is first
    averaged over its positions. With the stochastic strategy z is what eval computes: the mean over all pairs.

    Args:
        model: A network with DCL layers.
        layer_name: The name of one, for example ``"fc1"``; it must be called once a pass.
        images: As the network takes them, ``[N, ...]``.
        labels: Whole numbers ``[N]``.
        digits: How many digits a label has as a number. 1 takes labels as plain classes.
        classes: How many, or their names; None takes ``10**digits``, or with ``digits`` 1 as many as the labels need.
        batch: Images a forward pass. It changes memory and speed, not the result.
    """
    layer = _find_layer(model, layer_name)
    names = _check_data(images, labels, digits, classes)
    if batch < 1:
        raise ValueError(f"batch must be at least 1, not {batch}")
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    labels = labels.cpu().long()
    seen: list[Tensor] = []
    channel = -1 - (layer.branch.weight.dim() - 2)
    sums: Tensor | None = None
    handle = layer.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    try:
        with evaluating(model):
            for start in range(0, len(images), batch):
                model(images[start : start + batch].to(device))
                if len(seen) != 1:
                    raise ValueError(
                        f"layer {layer_name!r} was called {len(seen)} times in one pass, so its responses belong to "
                        "no single place; choose a layer that is called once"
                    )
                responses = layer.responses(seen.pop())
                stack = torch.stack([responses.z, *responses.v]).movedim(channel, -1)
                part = labels[start : start + batch]
                rows = stack.reshape(len(stack), len(part), -1, stack.shape[-1]).cpu().double().mean(2)
                if sums is None:
                    sums = rows.new_zeros(len(rows), len(names), rows.shape[2])
                sums.index_add_(1, part, rows)
    finally:
        handle.remove()
    if sums is None:
        raise ValueError("there are no images; pass at least one")
    count = labels.bincount(minlength=len(names))
    means = sums / count[:, None]
    return ClassResponses(layer_name, names, digits, count, means[0], means[1:])


def pick_filter(responses: ClassResponses) -> int:
    """Choose an instructive filter by a rule, not by hand.

    A filter responds to the class with its highest fused response. In this order, the filter is taken

    1. for which every digit of that class is the highest of some branch, so that the branches together know it,
    2. for which the most branches have their highest response elsewhere, at some position, so that none knows it alone,
    3. whose highest fused response is the largest multiple of its average over the classes,
    4. that comes first.

    Raises:
        ValueError: every filter has a branch that never fires; such filters are left out.
    """
    alive, covered, missing = _knowing(responses)
    selectivity = responses.z.nan_to_num(0).amax(0) / responses.z.nanmean(0)
    ranks = [
        (bool(c), int(m), float(s), -k) if a else None
        for k, (a, c, m, s) in enumerate(zip(alive, covered, missing, selectivity, strict=True))
    ]
    best = max((rank for rank in ranks if rank), default=None)
    if best is None:
        raise ValueError(
            f"every filter of {responses.layer!r} has a branch that never fires on these images; train the network "
            "first, or pass images as it was trained on"
        )
    return -best[3]


def _knowing(responses: ClassResponses) -> tuple[Tensor, Tensor, Tensor]:
    """Of each filter: whether all branches fire, whether they know its class together, and how many do not alone."""
    highest = _argmax(responses.z, 0)
    own = _argmax(responses.by_digit(), 2)  # [T, positions, K2]
    wanted = torch.tensor([responses.of_class(int(c)) for c in highest]).T  # [positions, K2]
    hit = own == wanted
    alive = (responses.v.nan_to_num(0).amax(1) > 0).all(0)
    return alive, hit.any(0).all(0), (~hit.all(1)).sum(0)


def shares(responses: ClassResponses) -> dict[str, float]:
    """How many filters have branches that all fire, and the shares of these that satisfy the rule of `pick_filter`.

    ``together`` is the share whose branches together know every digit of the class that the filter responds to,
    ``complementary`` the share for which, besides, no branch knows the class alone.
    """
    alive, covered, missing = _knowing(responses)
    count = int(alive.sum())
    apart = covered & (missing == len(responses.v))
    return {
        "filters": count,
        "together": float((covered & alive).sum()) / max(count, 1),
        "complementary": float((apart & alive).sum()) / max(count, 1),
    }


def pick_rule(digits: int) -> str:
    """The rule of :func:`pick_filter` for a caption, for classes of this many digits."""
    known = "every digit of the class that it responds to is" if digits > 1 else "the class that it responds to is"
    return (
        f"of all filters, those where {known} the highest of some branch, if there are any; of these, those where the "
        "most branches have their highest response elsewhere; of these, the one whose highest fused response is the "
        "largest multiple of its average"
    )


def complementary(
    model: nn.Module,
    layer_name: str,
    filter: int | None,
    images: Tensor,
    labels: Tensor,
    digits: int = 2,
    classes: int | Sequence[str] | None = None,
    *,
    batch: int = 500,
) -> Complementary:
    """The responses of one filter of a DCL layer: of its fusion by class, and of its branches by digit.

    ::

        responses = complementary(model, "fc1", None, images[:, None] / 255, labels)
        complementary_figure(responses)

    The filter is counted from 0; None lets :func:`pick_filter` choose. The other arguments and errors are those of
    :func:`class_responses`.

    Raises:
        IndexError: the layer has no such filter.
    """
    responses = class_responses(model, layer_name, images, labels, digits=digits, classes=classes, batch=batch)
    filters = responses.z.shape[1]
    chosen = pick_filter(responses) if filter is None else filter
    if not 0 <= chosen < filters:
        raise IndexError(f"layer {layer_name!r} has filters 0 to {filters - 1}, not {chosen}")
    by_digit = responses.by_digit()[..., chosen]
    highest = int(_argmax(responses.z[:, chosen], 0))
    return Complementary(
        layer=layer_name,
        filter=chosen,
        picked=filter is None,
        names=responses.names,
        digits=digits,
        images=int(responses.count.sum()),
        fused=responses.z[:, chosen],
        branches=responses.v[..., chosen],
        by_digit=by_digit,
        highest=highest,
        parts=responses.of_class(highest),
        own=tuple(tuple(int(d) for d in branch) for branch in _argmax(by_digit, 2)),
    )


_TENSORS = ("fused", "branches", "by_digit")


def as_plain(response: Complementary, title: str) -> dict[str, Any]:
    """The responses of a filter and its branches as JSON, with the title of the figure."""
    plain = {f.name: getattr(response, f.name) for f in fields(response)}
    plain |= {name: plain[name].tolist() for name in _TENSORS}
    return {"title": title, **finite(plain)}


def from_plain(stored: Mapping[str, Any]) -> Complementary:
    """Read what `as_plain` gave."""
    names = [f.name for f in fields(Complementary)]
    if missing := [name for name in names if name not in stored]:
        raise ValueError(f"the responses of a filter lack {', '.join(missing)}; run it again")
    read = {name: stored[name] for name in names}
    read |= {name: torch.tensor(with_nan(stored[name]), dtype=torch.float64) for name in _TENSORS}
    read["names"], read["parts"] = tuple(read["names"]), tuple(read["parts"])
    read["own"] = tuple(map(tuple, read["own"]))
    return Complementary(**read)


def _argmax(values: Tensor, axis: int) -> Tensor:
    """The first highest along an axis; NaN is never the highest."""
    return values.nan_to_num(nan=-torch.inf).argmax(axis)


def dcl_layers(model: nn.Module) -> dict[str, _DCL]:
    """The DCL layers of a network by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, _DCL)}


def _find_layer(model: nn.Module, name: str) -> _DCL:
    layers = dcl_layers(model)
    if name in layers:
        return layers[name]
    kind = type(model).__name__
    if not layers:
        raise KeyError(f"{kind} has no DCL layer; convert it first, with torch_dcl.convert_")
    near = difflib.get_close_matches(name, layers, 1, 0.4) or list(layers)[:1]
    raise KeyError(f"{kind} has no DCL layer {name!r}; did you mean {near[0]!r}? It has {', '.join(layers)}")


def _check_data(images: Tensor, labels: Tensor, digits: int, classes: int | Sequence[str] | None) -> tuple[str, ...]:
    """Check images and labels against the classes, and name the classes."""
    if not images.is_floating_point():
        raise TypeError(f"images are {images.dtype}; pass them as the network takes them, for example images / 255")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"labels must be whole numbers, they are {labels.dtype}")
    if labels.shape != images.shape[:1]:
        raise ValueError(f"labels of shape {tuple(labels.shape)} do not fit {len(images)} images; pass one an image")
    if not len(images):
        raise ValueError("there are no images; pass at least one")
    if not 1 <= digits <= 4:
        raise ValueError(f"digits must be from 1 to 4, not {digits}; 1 takes labels as plain classes")
    low, high = int(labels.min()), int(labels.max())
    if classes is None:
        classes = 10**digits if digits > 1 else high + 1
    size = classes if isinstance(classes, int) else len(classes)
    if digits > 1 and size != 10**digits:
        raise ValueError(f"numbers of {digits} digits are {10**digits} classes, not {size}; use digits=1 for others")
    if low < 0 or high >= size:
        raise ValueError(f"label {low if low < 0 else high} is not one of {size} classes, 0 to {size - 1}")
    if isinstance(classes, int):
        return tuple(f"{c:0{digits}d}" for c in range(size))
    return tuple(str(name) for name in classes)
