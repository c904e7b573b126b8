"""The assumed distribution of a layer's outputs without data: their principal components.

Half of the assumed covariance is that of white inputs with a common offset, as after a ReLU. Half is steeper, because
training aligns weights with inputs. A batch norm also has the variance of every channel; the inputs are then assumed to
be as close to the first guess as these variances allow, by the Kullback-Leibler divergence, so the outputs stay in the
column space of the weight. Scaling each channel to its variance would leave that space, and a fit to such outputs would
hold for no input.
"""

import math

import torch
from torch import Tensor

__all__ = ["TINY", "Components", "assume", "decompose"]

OFFSET = 0.1  # the assumed variance of the inputs' common offset, in units of the variance of one input
DOUBT = 0.05  # the relative error of a known variance at which it outweighs the first guess
NEWTON_STEPS = 30
BLOCK = 512  # the size of the blocks of a product
TINY = 1e-30

Components = tuple[Tensor, Tensor]
"""The maps from principal components of unit variance to a, ``[R, K2]``, and back, ``[K2, R]``."""


def assume(weight: Tensor, deviation: Tensor, *, by_channel: bool) -> Components:
    """The principal components of ``weight·x`` for unknown x, from weights ``[K2, K1·kernel]``.

    ``deviation`` has the standard deviations of the outputs, ``[K2]``. Unless each is known (``by_channel``), only
    their total counts.
    """
    offset = math.sqrt(OFFSET) * weight.sum(1, keepdim=True, dtype=torch.float64)
    frame = None
    if weight.shape[1] + 1 < weight.shape[0]:
        frame, F = torch.linalg.qr(torch.cat((weight.double(), offset), 1))
        moment = F @ F.t()
    else:
        moment = _square(weight).addmm_(offset, offset.t())
    values, vectors = _eigen(moment)
    vectors = vectors if frame is None else frame @ vectors
    values = values / values.sum().clamp(min=TINY) + values.square() / values.square().sum().clamp(min=TINY)
    variance = deviation.double().square()
    values *= variance.sum() / values.sum().clamp(min=TINY)
    if by_channel:
        values, rotation = _eigen(_match(values.sqrt(), vectors, variance))
        vectors = vectors @ rotation
    return _scale(values, vectors)


def decompose(moment: Tensor) -> Components:
    """The principal components of outputs with this covariance."""
    return _scale(*_eigen(moment))


def _square(weight: Tensor) -> Tensor:
    """``weight·weightᵀ`` in float64, in blocks of its lower half: it is symmetric, and a float64 copy is large."""
    size = len(weight)
    lower = torch.zeros(size, size, dtype=torch.float64, device=weight.device)
    for column in range(0, weight.shape[1], BLOCK):
        wide = weight[:, column : column + BLOCK].double()
        for row in range(0, size, BLOCK):
            rows = slice(row, row + BLOCK)
            lower[rows, : rows.stop].addmm_(wide[rows], wide[: rows.stop].t())
    return lower.tril_().add_(lower.tril(-1).t())


def _eigen(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues in descending order and eigenvectors, as many as differ from zero within the precision."""
    values, vectors = torch.linalg.eigh(moment)
    values, vectors = values.flip(0), vectors.flip(1)
    rank = max(1, int((values > 1e-12 * values[0]).sum()))
    return values[:rank].clamp(min=0), vectors[:, :rank]


def _scale(values: Tensor, vectors: Tensor) -> Components:
    length = values.sqrt()
    back = torch.where(length > 1e-6, 1 / length, 0.0)
    return (vectors * length).t().float(), (vectors * back).float()


def _match(length: Tensor, vectors: Tensor, variance: Tensor) -> Tensor:
    """A covariance in the frame of ``vectors``, near ``diag(length²)``, whose channels have about this ``variance``.

    The covariance C of least divergence from C0 with given variances is ``(C0⁻¹ + diag(λ))⁻¹``. λ minimises a convex
    function, here by Newton's method, with a square penalty on λ for variances that no inputs could give.
    """
    unit = (variance + 1e-3 * variance.mean()).clamp(min=TINY)
    variance, L = variance / unit, vectors * length / unit.sqrt()[:, None]
    eye = torch.eye(len(length), dtype=L.dtype, device=L.device)

    def evaluate(at: Tensor) -> tuple[float, Tensor]:
        root, failed = torch.linalg.cholesky_ex(eye + L.t() @ (at[:, None] * L))
        value = at @ variance + DOUBT * at.square().sum() / 2 - 2 * root.diagonal().log().sum()
        return math.inf if int(failed) else float(value), root

    at = torch.zeros_like(variance)
    value, root = evaluate(at)
    for _ in range(NEWTON_STEPS):
        half = torch.linalg.solve_triangular(root, L.t(), upper=False)
        C = half.t() @ half
        slope = variance - C.diagonal() + DOUBT * at
        curvature = C.square_()
        curvature.diagonal().add_(DOUBT)
        step = torch.linalg.solve(curvature, slope)
        gain, share = float(slope @ step), 1.0
        if gain < 1e-6 * len(variance):
            break
        while (found := evaluate(at - share * step))[0] > value - 0.1 * share * gain and share > 1e-6:
            share /= 2
        at, (value, root) = at - share * step, found
    half = torch.linalg.solve_triangular(root, length.diag(), upper=False)
    matched: Tensor = half.t() @ half
    return matched
