"""Start a DCL layer at random, at the scale of the layer that it replaces."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torch_dcl.convert.fit import _device_of, _Unit
from torch_dcl.layers import _DCL

__all__ = ["Incoming", "match_"]

SHARE = 0.2  # the floor of z in units of its root mean square: the paper's ε has it at torch's default scale


class Incoming:
    """The mean square of every branch's output y, on the inputs that the layers replaced see.

    Args:
        layers: The DCL layers, by name.
    """

    def __init__(self, layers: Mapping[str, _DCL]) -> None:
        self._layers = layers
        self._sums: dict[str, Tensor] = {}
        self._rows: dict[str, int] = {}

    def hear(self, name: str, x: Tensor) -> None:
        """Take in a batch of inputs of a layer."""
        layer = self._layers[name]
        parts = [y.double().square() for y in layer.fusion.split(layer.branch(x))]
        rows = parts[0].numel() // layer.fusion.widths[0]
        sums = torch.stack([part.sum() for part in parts]) / torch.tensor(layer.fusion.widths, device=x.device)
        self._sums[name] = self._sums.get(name, 0) + sums
        self._rows[name] = self._rows.get(name, 0) + rows

    def of(self, name: str) -> list[float] | None:
        """The mean squares of a layer's branches; None where no input was heard."""
        return [float(s) / self._rows[name] for s in self._sums[name]] if name in self._sums else None


@torch.no_grad()
def match_(
    layer: _DCL,
    plain: nn.Module,
    norm: nn.Module | None = None,
    samples: Tensor | None = None,
    incoming: Sequence[float] | None = None,
    *,
    keep_eps: bool = False,
) -> float:
    """Scale the start of a fresh ``layer``, in place: z has the mean square of what ``plain`` and its ReLU put out.

    The draws stay; weights, biases and the scales of norms change by factors. Four or more branches that are fused at
    once start with the responses of three, and z is smaller (`torch_dcl.fusion.response_spread`). Norms in the branches
    that have no scale keep theirs.

    Args:
        layer: The DCL layer, as it was made.
        plain: The layer that it replaces, trained or not.
        norm: The batch norm between that and its ReLU. Where ``layer`` has norms, it alone says the scale.
        samples: Outputs of ``plain`` on real data, ``[N, K2]``, before ``norm``; None takes its inputs as white noise
            of unit mean square.
        incoming: The mean square of every branch's output on the same data; None for 1.
        keep_eps: Whether ε stays. Otherwise its floor is lowered to a fifth of z's scale where it is above that.

    Returns:
        The root mean square that z is to have.

    Raises:
        ValueError: ε stays, and its floor is above that.
    """
    fusion = layer.fusion
    seen = samples if fusion.norm is None else None  # a norm undoes the scale of its inputs
    scale = _Unit.of(plain, norm if isinstance(norm, _BatchNorm) else None, seen, _device_of(plain)).scale  # type: ignore[arg-type]
    _, before = fusion.start()
    floor = fusion.eps ** (1 / fusion.fused)
    if keep_eps and floor >= scale:
        raise ValueError(
            f"eps = {fusion.eps:g} keeps z above {floor:.3g}, and the layer replaced has a scale of {scale:.3g}; "
            "plan without eps, and it is chosen to fit"
        )
    if not keep_eps and floor > SHARE * scale:
        fusion.eps = (SHARE * scale) ** fusion.fused
    lean, spread = fusion.start(scale**2)
    if fusion.norm is None:
        squares = incoming or [1.0] * fusion.branches
        for W, square in zip(torch.split(fusion.weight, list(fusion.widths)), squares, strict=True):
            W.mul_(spread / before / math.sqrt(square or 1.0))
        if fusion.bias is not None:
            fusion.bias.fill_(lean * spread)
        return scale
    for each in fusion.norm:
        for value, parameter in ((spread, each.weight), (lean * spread, each.bias)):
            if isinstance(parameter, Tensor):
                parameter.fill_(value)
    return scale
