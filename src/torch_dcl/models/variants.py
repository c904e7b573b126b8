"""The paper's names for its DCL networks: A2, A3S, A3D, B2, B3S, B3D."""

import math

from torch import nn

from torch_dcl.convert import Plan, plan
from torch_dcl.models.lenet import LeNet

__all__ = ["VARIANTS", "variant_plan"]

VARIANTS = ("A2", "A3S", "A3D", "B2", "B3S", "B3D")


def variant_plan(model: nn.Module, name: str, *, fraction: float | None = None) -> Plan:
    """The plan that converts one of the paper's baselines into a DCL variant.

    ::

        model = lenet(100)
        convert_(model, variant_plan(model, "A2"), init="random")

    Args:
        model: A network of this package (it knows its ``input_size``).
        name: A for the first fully-connected layer, B for the second; 2 or 3 branches; for three, S for the
            stochastic and D for the deterministic strategy. In a Wide ResNet the only such layer is the classifier.
        fraction: Filters of one branch as a fraction of the layer's, rounded up. None takes the paper's: 1/5 for
            LeNet on the multi-digit sets, 1/4 for the others.

    Raises:
        ValueError: A name that is not in ``VARIANTS``, or a layer that the network does not have.
    """
    if name not in VARIANTS:
        raise ValueError(f"the paper has no variant {name!r}; choose from {', '.join(VARIANTS)}")
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    position = "AB".index(name[0])
    if position >= len(layers):
        raise ValueError(f"{type(model).__name__} has {len(layers)} fully-connected layer(s), so no variant {name}")
    layer, module = layers[position]
    if fraction is None:
        fraction = 1 / 5 if isinstance(model, LeNet) else 1 / 4
    # A product such as 500 · 1/5 may be rounded to slightly above a whole number.
    width = math.ceil(module.out_features * fraction - 1e-9)
    planned = plan(
        model,
        model.input_size,  # type: ignore[arg-type]
        branches=int(name[1]),
        width=width,
        strategy="stochastic" if name.endswith("S") else "deterministic",
    )
    return planned.only(layer, force=True)  # the paper replaces classifiers too
