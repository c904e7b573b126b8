"""The fusion of section 3 once more, for the tests to compare with: one number at a time, in 60 digits."""

import math
from collections.abc import Sequence
from decimal import Decimal, localcontext
from itertools import combinations, pairwise

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

DIGITS = 60


def exact_fusion(pre: Sequence[float], eps: float, largest: float) -> tuple[Decimal, list[Decimal]]:
    """z = (Π v + ε)^(1/T) at one position, and ∂z/∂pre_i = z^(1-T)/T · Π_{j≠i} v_j for every i.

    Args:
        pre: The T pre-activations; an infinite one counts as ``largest``.
        eps: ε.
        largest: The largest number of the type that is computed in.
    """
    with localcontext(prec=DIGITS):
        v = [Decimal(min(p, largest)) if p > 0 else Decimal(0) for p in pre]
        inside = Decimal(eps)
        z_to_T = _product(v) + inside
        z = z_to_T if len(v) == 1 else ((z_to_T.ln() / len(v)).exp() if z_to_T else Decimal(0))
        slopes = []
        for i, v_i in enumerate(v):
            others = _product(v[:i] + v[i + 1 :])
            slopes.append(others * z / (z_to_T * len(v)) if v_i and others else Decimal(0))
        return z, slopes


def exact_pair_fusion(pre: Sequence[float], eps: float, largest: float) -> tuple[Decimal, list[Decimal]]:
    """The mean over all pairs of the T = 2 formula at one position, and its gradient."""
    with localcontext(prec=DIGITS):
        pairs = list(combinations(range(len(pre)), 2))
        z, slopes = Decimal(0), [Decimal(0)] * len(pre)
        for i, j in pairs:
            z_ij, (slope_i, slope_j) = exact_fusion((pre[i], pre[j]), eps, largest)
            z += z_ij / len(pairs)
            slopes[i] += slope_i / len(pairs)
            slopes[j] += slope_j / len(pairs)
        return z, slopes


def exact_over(pre: Tensor, eps: float, *, pairs: bool = False) -> tuple[list[Decimal], list[Decimal]]:
    """The exact z of every position of ``[T, n]`` pre-activations, and the exact gradient of Σz, flat."""
    wide = torch.float64 if pre.dtype == torch.float64 else torch.float32
    fuse = exact_pair_fusion if pairs else exact_fusion
    columns = [fuse(column, eps, torch.finfo(wide).max) for column in pre.detach().double().t().tolist()]
    return [z for z, _ in columns], [slopes[t] for t in range(pre.shape[0]) for _, slopes in columns]


def worst_error(actual: Tensor, exact: Sequence[Decimal]) -> float:
    """The largest error in units of the type's eps, relative to the exact value.

    An exact value beyond the range of the type is expected as the largest number of it; below its normal numbers
    the error is relative to the smallest normal one. NaN counts as an infinite error.
    """
    info = torch.finfo(actual.dtype)
    largest, tiny, eps = Decimal(info.max), Decimal(info.tiny), Decimal(info.eps)
    worst = 0.0
    for a, e in zip(actual.detach().double().flatten().tolist(), exact, strict=True):
        if not math.isfinite(a):
            return math.inf
        expected = min(e, largest)
        worst = max(worst, float(abs(Decimal(a) - expected) / max(expected, tiny) / eps))
    return worst


def plain_fusion(pre: Sequence[Tensor], eps: float) -> Tensor:
    """The formula as it stands in the paper, for moderate values in float64, with autograd's own gradient."""
    return (torch.stack([p.relu() for p in pre]).prod(0) + eps) ** (1 / len(pre))


def plain_pair_fusion(pre: Sequence[Tensor], eps: float) -> Tensor:
    """The mean of the T = 2 formula over all pairs as it stands in the paper."""
    return torch.stack([plain_fusion(pair, eps) for pair in combinations(pre, 2)]).mean(0)


def starts_of(widths: Sequence[int]) -> list[tuple[int, int]]:
    """First and last-plus-one row of every branch in a parameter that holds all branches one after another."""
    edges = [0]
    for width in widths:
        edges.append(edges[-1] + width)
    return list(pairwise(edges))


def _product(values: Sequence[Decimal]) -> Decimal:
    result = Decimal(1)
    for value in values:
        result *= value
    return result


def norms_of_branches(norm: _BatchNorm, branches: int) -> nn.ModuleList:
    """The batch norm of all branches as one plain batch norm for each, with the rows of its branch."""
    K2 = norm.num_features // branches
    settings = {name: getattr(norm, name) for name in ("eps", "momentum", "affine", "track_running_stats")}
    norms = nn.ModuleList(type(norm)(K2, **settings) for _ in range(branches))
    for t, own in enumerate(norms):
        rows = slice(t * K2, (t + 1) * K2)
        state = norm.state_dict()
        if state:
            own.to(next(iter(state.values())).dtype)
        own.load_state_dict({name: value[rows] if value.dim() else value for name, value in state.items()})
        own.train(norm.training)
    return norms
