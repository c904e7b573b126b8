"""Counting weights as the paper does."""

from torch import nn
from torch.nn.parameter import is_lazy

__all__ = ["count_weights"]


def count_weights(model: nn.Module) -> int:
    """The number of weights of a network, without its biases.

    Counts every parameter whose name does not end in ``bias``, each shared parameter once. The scale of a batch norm
    is a weight; its shift is a bias. The paper's 5.74M (BigNet) and 62.35M (AlexNet) are counts of this kind.

    Args:
        model: Any module.

    Returns:
        The count.

    Raises:
        ValueError: a parameter of a lazy layer has no shape yet.
    """
    total = 0
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"parameter {name!r} has no shape yet; run one batch through the model, then count")
        if not name.endswith("bias"):
            total += parameter.numel()
    return total
