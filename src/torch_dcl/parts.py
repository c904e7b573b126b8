"""Stage 2 on a CPU, in plain torch: parts of the positions, whose responses stay in the processor's cache.

The responses of all positions are T times as large as z, and no tensor of their size exists here: a part is projected,
normalised and fused before the next one, and backward projects it again. A batch norm in training takes its statistics
from those of the branch outputs; `kernels.moments` has the formulas. Half precision is computed in float32, products
included.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_dcl import functional

__all__ = ["CPUPlan", "Norm", "channels_last_strides"]

_LEAST_EPS = 1e-30
"""Below, the product of two responses could vanish where z is not yet √ε."""


class Norm(NamedTuple):
    """The batch norm of all branches: its tensors ``[T·K2]`` or None, and its settings."""

    gamma: Tensor | None
    beta: Tensor | None
    mean: Tensor | None
    variance: Tensor | None
    tracked: Tensor | None
    eps: float
    momentum: float | None
    fixed: bool
    """Whether it normalises by running statistics; otherwise by those of the batch, which update the running ones."""
    ranks: int = 1
    """The number of processes that share the batch."""
    group: Any = None
    """Their process group if there are several."""

    def check(self, positions: int, shape: Sequence[int]) -> None:
        """Raise torch's error for a batch of one position, which has no variance."""
        if positions == 1 and self.ranks == 1 and not self.fixed:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(shape)}")


def channels_last_strides(shape: Sequence[int], channels: int) -> tuple[int, ...]:
    """The strides of ``[..., C, ...]`` with the channels last in memory."""
    strides, size = [0] * len(shape), shape[channels]
    strides[channels] = 1
    for d in reversed(range(len(shape))):
        if d != channels:
            strides[d], size = size, size * max(shape[d], 1)
    return tuple(strides)


class CPUPlan:
    """Stage 2 for branch outputs of one shape and layout: the interface of `kernels.plans.Plan`.

    Args:
        y: Branch outputs, dense in channels_last or in torch's default layout.
        N: Outputs.
        channels: The channel dimension.
        T: Branches.
        eps: ε.
        pairs: Whether to average over pairs instead of fusing all branches.
        norm: The norm, of whose tensors none is kept, or None.
    """

    def __init__(self, y: Tensor, N: int, channels: int, T: int, eps: float, pairs: bool, norm: Norm | None) -> None:
        shape = y.shape
        self.channels, self.T, self.N, self.eps = channels, T, N, eps
        self.M = shape[channels] // T
        self.groups = tuple(combinations(range(T), 2)) if pairs else (tuple(range(T)),)
        self.images, self.positions = math.prod(shape[:channels]), math.prod(shape[channels + 1 :])
        self.P = self.images * self.positions
        self.z_shape = (*shape[:channels], N, *shape[channels + 1 :])
        self.last = y.movedim(channels, -1).is_contiguous()
        self.fixed = norm is not None and norm.fixed
        self.dtype = functional.compute_dtype(y.dtype)
        self.statistics_size = T * (4 * N + self.M + self.M**2)

    def forward(
        self, y: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm | None, *, learns: bool = True
    ) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
        """z, and what backward needs."""
        del learns
        weight = weight.to(self.dtype).contiguous()
        with torch.autocast("cpu", enabled=False):
            stats = None if norm is None else self._statistics(y, weight, bias, norm)
            z = self.empty(self.z_shape, y.dtype)
            mean, weights, shifts = self._affine(weight, bias, stats)
            for part, into in zip(self._parts(y), self._parts(z), strict=True):
                self._fuse(self._respond(self._branches(part, mean), weights, shifts), into)
        return z, (weight, stats)

    def backward(
        self, grad: Tensor, y: Tensor, bias: Tensor | None, saved: Sequence[Tensor | None], dtype: torch.dtype,
        group: object = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """The gradients of branch outputs, weights and biases; with a norm, those of γ, β and biases instead.

        The names are those of `kernels.moments`: d is the gradient of a normalised response, D and h are sums.
        """
        del group  # there is one process
        weight, stats = saved
        assert weight is not None
        with torch.autocast("cpu", enabled=False):
            dy, dweight, dbias, numbers = self._gradients(grad, y, weight, bias, stats)
        return dy.to(y.dtype), dweight.to(dtype), None if dbias is None else dbias.to(dtype), numbers

    def _gradients(
        self, grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None, stats: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The results of `backward` in the compute dtype."""
        mean, weights, shifts = self._affine(weight, bias, stats)
        dy = self.empty(y.shape, self.dtype)
        D, h = weight.new_zeros(self.T, self.M, self.N), weight.new_zeros(self.T, self.N)
        for part, g, into in zip(self._parts(y), self._parts(grad), self._parts(dy), strict=True):
            branches = self._branches(part, mean)
            gradients, sums = self._fused_gradients(g, self._respond(branches, weights, shifts))
            for t, d in enumerate(gradients):
                h[t] += sums[t]
                self._add_products(D[t], branches[t], d)
                self._write_times(into[..., t * self.M : (t + 1) * self.M], d, weights[t].t())
        if stats is None:
            return dy, D.view_as(weight), None if bias is None else h, None
        scale, _, rstd, centre, _, covariance = self._unpack(stats)
        W = weight.view_as(D)
        s = (W * D).sum(1)
        if self.fixed:
            s += h * (-centre if bias is None else bias - centre)
            dweight, dbias = scale[:, None] * D, scale * h
        else:
            V = scale * rstd.square() * s
            dweight, dbias = scale[:, None] * D - V[:, None] * (covariance @ W), torch.zeros_like(h)
            self._add_through_statistics(dy, y, mean, W, scale * h / self.P, V / self.P)
        return dy, dweight.view_as(weight), None, torch.stack([s * rstd, h, dbias]).flatten(1)

    def _affine(
        self, weight: Tensor, bias: Tensor | None, stats: Tensor | None
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """What to subtract from the branch outputs, and the map from them to normalised responses."""
        weights = weight.view(self.T, self.M, self.N)
        if stats is None:
            return None, weights, None if bias is None else bias.to(self.dtype)
        scale, shift, _, _, mean, _ = self._unpack(stats)
        return None if self.fixed else mean, scale[:, None] * weights, shift

    def _parts(self, x: Tensor) -> Iterator[Tensor]:
        """Views ``[positions, C]`` of a tensor in channels_last, or ``[images, positions, C]`` in torch's layout."""
        rows, channels = max(1, functional.part_size() // self.N), x.shape[self.channels]
        if self.last:
            yield from torch.split(x.movedim(self.channels, -1).reshape(self.P, channels), rows)
            return
        images = x.reshape(self.images, channels, self.positions).mT
        for some in torch.split(images, max(1, rows // self.positions)):
            yield from torch.split(some, rows, 1)

    def _branches(self, part: Tensor, mean: Tensor | None) -> tuple[Tensor, ...]:
        """The branch outputs of a part, minus their mean."""
        return torch.split(part.to(self.dtype) if mean is None else part - mean, self.M, -1)

    def _respond(self, branches: Sequence[Tensor], weights: Tensor, shifts: Tensor | None) -> list[Tensor]:
        """The normalised responses of all branches."""
        return [self._times(y, weights[t], None if shifts is None else shifts[t]) for t, y in enumerate(branches)]

    def _fuse(self, pre: list[Tensor], into: Tensor) -> None:
        """Write z of a part; the responses are overwritten."""
        square = self._square(pre, 1.0)
        if square is not None and into.dtype == square.dtype:
            torch.reciprocal(square.rsqrt_(), out=into)
            return
        z = functional.fused(pre, self.groups, self.eps) if square is None else square.rsqrt_().reciprocal_()
        into.copy_(z.clamp_(max=torch.finfo(into.dtype).max))

    def _fused_gradients(self, grad: Tensor, pre: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients of the responses of a part, which are overwritten, and their sums over the positions."""
        square = self._square(pre, 4.0)
        if square is not None:
            unit = square.rsqrt_().mul_(grad)  # ∂z/∂v = w / 2z
            gradients = [self._where_alive(unit * pre[1 - t], pre[t]) for t in range(2)]
            sums = [self._sum(d) for d in gradients]
            if all(bool(h.isfinite().all()) for h in sums):
                return gradients, sums
        gradients = functional.fused_gradients(grad, pre, self.groups, self.eps)
        return gradients, [self._sum(d) for d in gradients]

    def _where_alive(self, grad: Tensor, v: Tensor) -> Tensor:
        """The gradient of a ReLU with the response v, in place."""
        alive: Tensor = torch.ops.aten.threshold_backward.grad_input(grad, v, 0, grad_input=grad)
        return alive

    def _square(self, pre: list[Tensor], factor: float) -> Tensor | None:
        """A multiple of z² of two branches, whose negative responses become zero; None where the range is too small."""
        if len(pre) != 2 or self.eps < _LEAST_EPS:
            return None
        v, w = (p.clamp_(min=0.0) for p in pre)
        square = torch.addcmul(torch.full((), factor * self.eps, dtype=v.dtype), v, w, value=factor)
        return square if float(square.amax()) < math.inf else None

    def _sum(self, x: Tensor) -> Tensor:
        """The sum over the positions of a part."""
        return x.sum(tuple(range(x.dim() - 1)))

    def _times(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A linear map at every position, in the layout of x."""
        if self.last:
            return x @ weight if bias is None else torch.addmm(bias, x, weight)
        matrices = weight.t().expand(len(x), -1, -1)
        product = torch.bmm(matrices, x.mT) if bias is None else torch.baddbmm(bias[:, None], matrices, x.mT)
        return product.mT

    def _write_times(self, into: Tensor, x: Tensor, weight: Tensor) -> None:
        """Write a linear map at every position."""
        if self.last:
            torch.mm(x, weight, out=into)
        else:
            into.copy_(self._times(x, weight, None))

    def _add_products(self, to: Tensor, a: Tensor, b: Tensor) -> None:
        """Add ``Σ a · bᵀ`` over the positions of a part."""
        if self.last:
            to.addmm_(a.t(), b)
        else:
            to.add_(torch.bmm(a.mT, b).sum(0))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A new tensor in the layout of the branch outputs."""
        strides = channels_last_strides(shape, self.channels)
        return torch.empty_strided(shape, strides, dtype=dtype) if self.last else torch.empty(shape, dtype=dtype)

    def _statistics(self, y: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> Tensor:
        """Scale, shift, inverse standard deviation and centre of the responses; mean and covariance of the branches."""
        W = weight.view(self.T, self.M, self.N)
        mean, covariance = weight.new_zeros(self.T * self.M), weight.new_zeros(self.T, self.M, self.M)
        if norm.fixed:
            assert norm.mean is not None
            assert norm.variance is not None
            centre, variance = (t.view(self.T, self.N).to(self.dtype) for t in (norm.mean, norm.variance))
        else:
            for part in self._parts(y):
                mean += self._sum(part.to(self.dtype))
            mean /= self.P
            for part in self._parts(y):
                for t, centred in enumerate(self._branches(part, mean)):
                    self._add_products(covariance[t], centred, centred)
            covariance /= self.P
            centre = (mean.view(self.T, 1, self.M) @ W).squeeze(1)
            variance = (W * (covariance @ W)).sum(1).clamp(min=0.0)
            self._track(norm, centre if bias is None else centre + bias, variance)
        rstd = (variance + norm.eps).rsqrt()
        scale = rstd if norm.gamma is None else rstd * norm.gamma.view_as(rstd)
        shift = torch.zeros_like(rstd) if norm.beta is None else norm.beta.view_as(rstd)
        if norm.fixed:
            shift = shift + scale * (-centre if bias is None else bias - centre)
        return torch.cat([t.flatten().to(self.dtype) for t in (scale, shift, rstd, centre, mean, covariance)])

    def _unpack(self, stats: Tensor) -> tuple[Tensor, ...]:
        """The results of `_statistics`."""
        outputs, width = self.T * self.N, self.T * self.M
        *vectors, mean, covariance = torch.split(stats, [outputs] * 4 + [width, width * self.M])
        return *(v.view(self.T, self.N) for v in vectors), mean, covariance.view(self.T, self.M, self.M)

    def _track(self, norm: Norm, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics as torch does: autograd must not count it as a change in place."""
        if norm.mean is None or norm.variance is None:
            return
        momentum = norm.momentum
        if norm.tracked is not None:
            norm.tracked.add_(1)
            momentum = 1.0 / float(norm.tracked) if momentum is None else momentum
        assert momentum is not None
        unbiased = variance * (self.P / (self.P - 1))
        for running, new in ((norm.mean, mean), (norm.variance, unbiased)):
            running.data.mul_(1.0 - momentum).add_(new.flatten(), alpha=momentum)

    def _add_through_statistics(
        self, dy: Tensor, y: Tensor, mean: Tensor | None, W: Tensor, of_mean: Tensor, of_variance: Tensor
    ) -> None:
        """Subtract from the gradients of the branch outputs what comes through the statistics of the batch."""
        assert mean is not None
        through_mean = (W @ of_mean[:, :, None]).flatten()
        through_variance = (W * of_variance[:, None]) @ W.mT
        for part, into in zip(self._parts(y), self._parts(dy), strict=True):
            for t, centred in enumerate(self._branches(part, mean)):
                own = slice(t * self.M, (t + 1) * self.M)
                into[..., own].sub_(self._times(centred, through_variance[t], through_mean[own]))
