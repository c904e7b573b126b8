"""Bilinear layers, for comparison with DCL.

Section 3.3 of Wang et al., "Deep Collaborative Learning for Visual Recognition", 2017, compares DCL with the bilinear
CNN of Lin et al., "Bilinear CNN Models for Fine-grained Visual Recognition", 2015. The two texts describe different
layers, so both are here: the paper's, with a weight for every pair of channels at every position, and that of Lin
et al., which pools the products over all positions and has no weights.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["BilinearFusion", "BilinearPool"]


class BilinearFusion(nn.Module):
    """The paper's bilinear form, position by position: ``z_k = Σ_ij U_ijk · y1_i · y2_j``.

    There is no root, no activation and no bias. With ``U_ijk = W1_ik · W2_jk`` it is the product of two linear maps,
    of which DCL with T = 2 takes the root: DCL needs m1 + m2 weights for each output, this layer m1 · m2.

    All orders of summation cost about out · m1 · m2 multiply-adds at each position. The one with the smallest
    intermediate result is used: the outer product (m1 · m2 values), or U contracted with one input (out · m1 or
    out · m2 values). Half types and autocast are computed in float32.

    Starts from N(0, 1 / (m1 · m2)): two independent inputs of variance 1 give an output of variance 1.

    Args:
        m1: Channels of the first input.
        m2: Channels of the second input.
        out: Channels of the output.

    Raises:
        ValueError: a size is below 1; in the forward pass, inputs that do not fit the layer or each other.
    """

    def __init__(self, m1: int, m2: int, out: int) -> None:
        super().__init__()
        for name, size in (("m1", m1), ("m2", m2), ("out", out)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}; pass the number of channels")
        self.m1, self.m2, self.out = m1, m2, out
        self.weight = nn.Parameter(torch.empty(out, m1, m2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialise from N(0, 1 / (m1 · m2))."""
        nn.init.normal_(self.weight, std=1 / math.sqrt(self.m1 * self.m2))

    def extra_repr(self) -> str:
        """The three sizes, for printing."""
        return f"m1={self.m1}, m2={self.m2}, out={self.out}"

    def forward(self, y1: Tensor, y2: Tensor) -> Tensor:
        """Map ``[N, m1, ...]`` and ``[N, m2, ...]``, with the same positions, to ``[N, out, ...]``."""
        _check_pair(y1, y2)
        if (y1.shape[1], y2.shape[1]) != (self.m1, self.m2):
            raise ValueError(
                f"inputs have {y1.shape[1]} and {y2.shape[1]} channels, the layer was built for {self.m1} and "
                f"{self.m2}; build it with BilinearFusion({y1.shape[1]}, {y2.shape[1]}, {self.out})"
            )
        result = torch.promote_types(y1.dtype, y2.dtype)
        wide = torch.promote_types(torch.promote_types(result, self.weight.dtype), torch.float32)
        with torch.autocast(y1.device.type, enabled=False):
            a, b, U = y1.movedim(1, -1).to(wide), y2.movedim(1, -1).to(wide), self.weight.to(wide)
            smallest = min(self.m1 * self.m2, self.out * self.m1, self.out * self.m2)
            if smallest == self.m1 * self.m2:
                products = (a.unsqueeze(-1) * b.unsqueeze(-2)).flatten(-2)
                z = F.linear(products, U.flatten(1))
            elif smallest == self.out * self.m1:
                z = _contract(U, b, a)
            else:
                z = _contract(U.transpose(1, 2), a, b)
            return z.movedim(-1, 1).to(result)


class BilinearPool(nn.Module):
    """The pooling of Lin et al.: outer products, mean over all positions, signed root, length 1.

    ``z = mean_p y1_p ⊗ y2_p``, then ``sign(z) · √(|z| + 1e-5)``, then division by the L2 norm. The mean in place of
    their sum only changes the weight of the 1e-5: the division removes every other factor, and the result depends less
    on the size of the image. Half types and autocast are computed in float32.

    Args:
        eps: The constant inside the root, which bounds its gradient.

    Raises:
        ValueError: ``eps`` is not a positive number; in the forward pass, inputs that do not fit each other.
    """

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        if not (math.isfinite(eps) and eps > 0):
            raise ValueError(f"eps must be a finite positive number, got {eps!r}; Lin et al. use 1e-5")
        self.eps = eps

    def extra_repr(self) -> str:
        """The constant, for printing."""
        return f"eps={self.eps}"

    def forward(self, y1: Tensor, y2: Tensor) -> Tensor:
        """Map ``[N, m1, ...]`` and ``[N, m2, ...]``, with the same positions, to ``[N, m1 · m2]``."""
        _check_pair(y1, y2)
        result = torch.promote_types(y1.dtype, y2.dtype)
        wide = torch.promote_types(result, torch.float32)
        with torch.autocast(y1.device.type, enabled=False):
            a = y1.reshape(*y1.shape[:2], -1).to(wide)
            b = y2.reshape(*y2.shape[:2], -1).to(wide)
            z = torch.bmm(a, b.transpose(1, 2) / b.shape[2]).flatten(1)
            z = z.sign() * (z.abs() + self.eps).sqrt()
            return F.normalize(z, dim=1).to(result)


def _contract(U: Tensor, first: Tensor, then: Tensor) -> Tensor:
    """``z_k = Σ_i then_i · (Σ_j U_kij · first_j)``, the inner sum first; channels are last."""
    inner = F.linear(first, U.flatten(0, 1))
    inner = inner.reshape(*inner.shape[:-1], *U.shape[:2])
    return torch.matmul(inner, then.unsqueeze(-1)).squeeze(-1)


def _check_pair(y1: Tensor, y2: Tensor) -> None:
    if min(y1.dim(), y2.dim()) < 2 or (y1.shape[0], y1.shape[2:]) != (y2.shape[0], y2.shape[2:]):
        raise ValueError(
            f"the two inputs must be [N, channels, ...] with the same N and positions, got {tuple(y1.shape)} and "
            f"{tuple(y2.shape)}; bring them to one size first"
        )
