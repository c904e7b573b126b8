"""Start a DCL layer from the trained layer that it replaces.

The trained unit computes ``relu(a)`` with ``a = A·x + b``, perhaps through a batch norm. A branch sees a linear map of
rank ``M_t`` of a, so the fit happens among vectors of K2 numbers, whatever the kernel is:

- features: the principal components u of a, at unit variance;
- branches: ``pre_t = u·Q_t·W_t + c_t``, fused as in section 3 of the paper;
- start: to first order z is the mean of the branches. They agree on the leading components, and each of the others
  belongs to one branch, with T times the strength;
- polish: Adam on ``(z - relu(a))²``. The residual is exact. Its way back takes relu(p) for ``p/2 + √(p²/4 + δ²)``,
  because the exact slope is steep near zero and vanishes where a branch is dead.

a comes from calibration data, or is taken as normal. Half of its assumed covariance is what white inputs with a common
offset give, as behind a ReLU; half is steeper, because training puts weights where the inputs are. A few hundred rows
say little about hundreds of directions, so data are mixed with the assumption, the more of it the fewer they are (the
share is that of Ledoit and Wolf, "A well-conditioned estimator for large-dimensional covariance matrices", 2004).
"""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from torch_dcl.functional import fuse_branches
from torch_dcl.layers import _DCL

__all__ = ["FitReport", "fit_"]

FLOOR = 0.05  # the smallest z, ε^(1/T), in units of the root mean square of relu(a)
SMOOTH = 0.1  # δ, in the same unit
SHARES = (0.5, 0.75, 1.0)  # how much of the narrowest branch the branches may agree on at the start
OFFSET = 0.1  # the assumed variance of what inputs have in common, in units of the variance of one
NUDGE = 0.01  # how far branches that start alike are pushed apart
STEPS, BATCH, RATE, BETAS = 200, 256, 0.2, (0.9, 0.99)  # of Adam
MIN_STEPS, WORK = 64, 2**28  # fewer steps where all of them together would touch more than so many weights
MIN_SAMPLES = 8
TINY = 1e-30


class FitReport(NamedTuple):
    """How close a fitted layer is to the trained one, on data that the fit has not seen."""

    error: float
    """``‖z - relu(a)‖² / ‖relu(a)‖²`` of the fused output."""
    low_rank_error: float
    """The same for the low-rank layer of equal weights (T = 1, width ΣM), fitted in the same way."""
    eps: float
    """ε of the fitted layer."""


@torch.no_grad()
def fit_(
    layer: _DCL, plain: nn.Module, norm: nn.Module | None = None, samples: Tensor | None = None, *, seed: int = 0
) -> FitReport:
    """Fill ``layer``, in place, so that it computes nearly what ``plain``, ``norm`` and a ReLU compute in eval.

    ε is set too: the floor ``ε^(1/T)`` becomes 0.05 of the root mean square of relu(a), and ε = 0 for T = 1. Both
    factors of a branch get rows of equal length. A norm in a branch gets the statistics of the branch, and a scale and
    shift that undo them, so that it changes nothing in eval and little in training. Where it has no scale or shift the
    running statistics make up for them. Where it has no running statistics it is exact for batches like the samples.

    Args:
        layer: The DCL layer, of the geometry of ``plain``.
        plain: The trained linear or convolutional layer.
        norm: The batch norm between it and its ReLU. If ``layer`` has no norms, it is folded into the weights.
        samples: Outputs of ``plain`` on real data, ``[N, K2]``, before ``norm``. A quarter of them is kept for the
            report. None takes a as normal, with the running statistics of ``norm``; without a norm the scale of the
            inputs is unknown, so the branches keep the trained bias and the fit holds at any scale.
        seed: Of the draws. The global random state is left alone.

    Returns:
        The errors on held-out samples, or on fresh draws. If relu(a) is zero throughout, they are relative to a.

    Raises:
        TypeError: a layer or a norm of a kind that cannot be fitted.
        ValueError: layers or samples that do not belong together, or values that are not finite.
    """
    plain, norm = _check(layer, plain, norm, samples)
    fusion = layer.fusion
    # Eigenvectors want float64, which not every device has.
    device = plain.weight.device if plain.weight.is_cuda else torch.device("cpu")
    with torch.autocast(device.type, enabled=False):
        generator = torch.Generator(device).manual_seed(seed)
        unit = _Unit.of(plain, norm, samples, device)
        free = fusion.norm is not None or fusion.bias is not None
        scaled = norm is not None and norm.running_var is not None
        task, probe, held = _pose(unit, samples, generator, free=free, scaled=scaled)
        branches = _solve(task, probe, fusion.widths, fusion.strategy == "stochastic", generator)
        _write(layer, branches, task, unit)
        error = low_rank_error = _error(branches, held)
        if fusion.branches > 1:
            width = min(sum(fusion.widths), fusion.out_channels)
            low_rank_error = _error(_solve(task, probe, (width,), False, generator), held)
    return FitReport(error, low_rank_error, fusion.eps)


class _Unit(NamedTuple):
    """The trained unit before its ReLU, with the norm in it: ``a = weight·x + constant``, in units of ``scale``."""

    weight: Tensor  # [K2, K1·kernel]
    constant: Tensor  # [K2]
    gain: Tensor  # [K2]: a = gain · (output of the plain layer) + offset
    offset: Tensor  # [K2]
    mean: Tensor  # [K2]: of a, where no sample tells
    deviation: Tensor  # [K2]: of a, likewise
    scale: float  # the root mean square of relu(a)

    @staticmethod
    def of(
        plain: nn.Linear | _ConvNd, norm: _BatchNorm | None, samples: Tensor | None, device: torch.device
    ) -> "_Unit":
        A = plain.weight.flatten(1).to(device, torch.float32)
        length = torch.linalg.vector_norm(A, dim=1, dtype=torch.float64)
        zero, one = torch.zeros_like(length), torch.ones_like(length)
        b = zero if plain.bias is None else plain.bias.to(zero)
        mean, deviation, gain, offset = b, length, one, zero
        if norm is not None:
            if norm.running_mean is not None and norm.running_var is not None:
                mean, deviation = norm.running_mean.to(zero), norm.running_var.to(zero).sqrt()
            elif samples is not None:
                mean, deviation = samples.to(zero).mean(0), samples.to(zero).std(0, correction=0)
            gain = (one if norm.weight is None else norm.weight.to(zero)) / (deviation.square() + norm.eps).sqrt()
            offset = (zero if norm.bias is None else norm.bias.to(zero)) - gain * mean
        if samples is None:
            second, alive = _normal_moments(gain * mean + offset, (gain * deviation).abs())
        else:
            a = samples.to(zero) * gain + offset
            second, alive = a.square(), a.relu().square()
        scale = float(alive.mean().sqrt()) or float(second.mean().sqrt()) or 1.0
        parts = (gain * b + offset, gain, offset, gain * mean + offset, (gain * deviation).abs())
        constant, gain, offset, mean, deviation = ((part / scale).float() for part in parts)
        return _Unit(gain[:, None] * A, constant, gain, offset, mean, deviation, scale)


def _normal_moments(mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
    """The mean squares of n and of relu(n) for normal n."""
    ratio, second = mean / deviation.clamp(min=TINY), mean.square() + deviation.square()
    density = torch.exp(-ratio.square() / 2) / math.sqrt(2 * math.pi)
    return second, second * torch.special.ndtr(ratio) + mean * deviation * density


Rows = tuple[Tensor, Tensor]
"""Features u and the pre-activations a that belong to them, row by row."""


class _Task(NamedTuple):
    """What to imitate: rows of a, and their features u with ``a = centre + u·basis``."""

    basis: Tensor  # [R, K2]
    whiten: Tensor  # [K2, R], back to u
    centre: Tensor  # [K2]
    free: bool  # whether a branch can have a constant
    learns: bool  # and whether the data tell enough to change it
    data: Rows | None = None  # samples to fit
    assumed: float = 1.0  # the part of a batch that is drawn from the assumption
    factor: Tensor | None = None  # white noise times this is a - centre under the assumption; with data only

    def rows(self, n: int, generator: torch.Generator) -> Rows:
        """A batch to fit."""
        drawn, device = round(self.assumed * n), self.basis.device
        directions = len(self.basis if self.factor is None else self.factor)
        noise = torch.randn(drawn, directions, generator=generator, device=device)
        if self.data is None or self.factor is None:
            return noise, torch.addmm(self.centre, noise, self.basis)
        deviation = noise @ self.factor
        pick = torch.randint(len(self.data[0]), (n - drawn,), generator=generator, device=device)
        u = torch.cat((deviation @ self.whiten, self.data[0][pick]))
        return u, torch.cat((self.centre + deviation, self.data[1][pick]))


def _pose(
    unit: _Unit, samples: Tensor | None, generator: torch.Generator, *, free: bool, scaled: bool
) -> tuple[_Task, Rows, Rows]:
    """The task, rows to choose by, and rows for the report; the fit sees neither of the two."""
    F = _assume(unit, scaled)
    prior = (F @ F.t()).double()
    if samples is None:
        task = _Task(*_features(prior), unit.mean, free, free and scaled)
        return task, task.rows(1024, generator), task.rows(2048, generator)
    a = samples.to(F) * unit.gain + unit.offset
    a = a[torch.randperm(len(a), generator=generator, device=a.device)]
    probe, held = min(len(a) // 8, 1024), min(len(a) // 4, 4096)
    fit = a[probe + held :]
    centre = fit.mean(0) if free else unit.constant
    x = (fit - centre).double()
    found = x.t() @ x / len(x)
    strength = found.trace() / prior.trace().clamp(min=TINY)
    prior *= strength
    noise = (x.square().sum(1).square().mean() - found.square().sum()) / len(x)
    assumed = float((noise / (found - prior).square().sum().clamp(min=TINY)).clamp(0, 1))
    basis, whiten = _features((1 - assumed) * found + assumed * prior)
    choose, report, data = (((part - centre) @ whiten, part) for part in (a[:probe], a[probe : probe + held], fit))
    return _Task(basis, whiten, centre, free, free, data, assumed, strength.sqrt().float() * F.t()), choose, report


def _assume(unit: _Unit, scaled: bool) -> Tensor:
    """F of the assumed covariance F·Fᵀ of a."""
    F = torch.cat((unit.weight, math.sqrt(OFFSET) * unit.weight.sum(1, keepdim=True)), 1)
    G = F @ F.t()
    F = torch.cat((F / F.norm().clamp(min=TINY), G / G.norm().clamp(min=TINY)), 1)
    have, want = F.square().sum(1).sqrt(), unit.deviation
    if not scaled:
        have, want = have.norm(), want.norm()
    F *= (want / have.clamp(min=TINY)).view(-1, 1)
    return F


def _features(moment: Tensor) -> tuple[Tensor, Tensor]:
    """The maps from principal components of unit variance to a, and back."""
    values, vectors = torch.linalg.eigh(moment)
    values, vectors = values.flip(0), vectors.flip(1)
    rank = max(1, int((values > max(1e-7 * float(values[0]), 1e-12)).sum()))
    length = values[:rank].clamp(min=0).sqrt()
    back = torch.where(length > 1e-6, 1 / length, 0.0)
    return (vectors[:, :rank] * length).t().float(), (vectors[:, :rank] * back).float()


class _Branches(NamedTuple):
    """T branches that look at the features u."""

    Q: list[Tensor]  # [R, M]
    W: list[Tensor]  # [M, K2]
    c: list[Tensor]  # [K2]
    groups: Sequence[tuple[int, ...]]  # which branches are fused with each other: all, or all pairs

    @property
    def floor(self) -> float:
        """ε, for responses in units of their scale."""
        T = len(self.groups[0])
        return 0.0 if T == 1 else FLOOR**T

    def fuse(self, u: Tensor) -> list[Tensor]:
        """The z of each group."""
        pre = [torch.addmm(c, u @ Q, W) for Q, W, c in zip(*self[:3], strict=True)]
        return [fuse_branches([pre[t] for t in group], self.floor) for group in self.groups]


def _error(branches: _Branches, rows: Rows, *, each: bool = False) -> float:
    """The relative error of the mean over the groups, or with ``each`` the mean of the errors of the groups."""
    u, a = rows
    target, z = a.relu(), branches.fuse(u)
    outputs = z if each else [torch.stack(z).mean(0)]
    rest = sum(_mean_square(output - target) for output in outputs) / len(outputs)
    return rest / (_mean_square(target) or _mean_square(a) or 1.0)


def _mean_square(x: Tensor) -> float:
    return float(x.double().square().mean())


def _solve(task: _Task, probe: Rows, widths: Sequence[int], pairs: bool, generator: torch.Generator) -> _Branches:
    """The best start, polished, unless that made it worse on rows that took no part."""

    def loss(branches: _Branches) -> float:
        return _error(branches, probe, each=True)

    T = len(widths)
    groups = list(combinations(range(T), 2 if pairs else T))
    shared = sorted({min(round(share * min(widths)), len(task.basis)) for share in (SHARES if T > 1 else SHARES[-1:])})
    start = min((_start(task, widths, s, groups, generator) for s in shared), key=loss)
    return min(start, _polish(start, math.sqrt(loss(start)), task, generator), key=loss)


def _start(
    task: _Task, widths: Sequence[int], shared: int, groups: Sequence[tuple[int, ...]], generator: torch.Generator
) -> _Branches:
    """The first ``shared`` features in every branch, the others dealt out one by one to those with room."""
    rank, device = len(task.basis), task.basis.device
    owned: list[list[int]] = [list(range(shared)) for _ in widths]
    rest = iter(range(shared, rank))
    while dealt := [*zip((own for own, M in zip(owned, widths, strict=True) if len(own) < M), rest, strict=False)]:
        for own, feature in dealt:
            own.append(feature)
    start = _Branches([], [], [], groups)
    for own, M in zip(owned, widths, strict=True):
        # A column without a feature looks somewhere and says nothing. Branches that are alike need a nudge to part.
        Q = torch.randn(rank, M, generator=generator, device=device) / math.sqrt(rank)
        Q[:, : len(own)] *= NUDGE if len(own) == shared < rank and len(widths) > 1 else 0.0
        Q[own, range(len(own))] += 1
        W = torch.zeros(M, task.basis.shape[1], device=device)
        W[: len(own)] = task.basis[own]
        W[shared : len(own)] *= len(groups[0])
        start.Q.append(Q)
        start.W.append(W)
        start.c.append(task.centre.clone() if task.free else torch.zeros_like(task.centre))
    return start


def _polish(start: _Branches, error: float, task: _Task, generator: torch.Generator) -> _Branches:
    """Adam with a cosine schedule and steps in proportion to the ``error`` of the start, so that none undoes it."""
    Q, W, c = ([p.clone() for p in part] for part in start[:3])
    out = start._replace(Q=Q, W=W, c=c)
    strength = task.basis.square().sum(1)
    sizes = [strength.new_tensor(error / math.sqrt(len(W_t))) for W_t in W]
    rates = []
    for W_t, size in zip(W, sizes, strict=True):
        # A step of Q moves the output in proportion to W. A weak feature cannot explain more than it holds.
        weigh = (strength / strength[: len(W_t)][-1].clamp(min=TINY)).clamp(max=1.0)
        lever = W_t.square().mean(1).sqrt().maximum(size).clamp(min=TINY)
        rates.append(size * (weigh / weigh.norm().clamp(min=TINY))[:, None] / lever)
    rates += sizes + [strength.new_tensor(0.2 * error)] * len(c)
    state = [(p, rate, torch.zeros_like(p), torch.zeros_like(p)) for p, rate in zip([*Q, *W, *c], rates, strict=True)]
    state = state if task.learns else state[: -len(c)]
    steps = max(MIN_STEPS, min(STEPS, WORK // sum(W_t.numel() for W_t in W)))
    for step in range(1, steps + 1):
        pace = RATE * (1 + math.cos(math.pi * (step - 1) / steps)) / 2 / (1 - BETAS[0] ** step)
        gradients = _gradients(out, *task.rows(BATCH, generator))
        for (p, rate, first, second), gradient in zip(state, gradients, strict=False):
            first.lerp_(gradient, 1 - BETAS[0])
            second.lerp_(gradient.square(), 1 - BETAS[1])
            p.sub_(first / (second / (1 - BETAS[1] ** step)).sqrt_().add_(1e-20) * rate, alpha=pace)
    return out


def _gradients(branches: _Branches, u: Tensor, a: Tensor) -> list[Tensor]:
    """Of the squared error by all Q, all W and all c, up to a constant factor, which Adam does not see.

    With ``h = √(p²/4 + δ²)`` the smooth response is ``s = p/2 + h`` and its slope ``s / 2h``. So the slope of the
    geometric mean of T of them is that mean over ``2·T·h``.
    """
    y = [u @ Q for Q in branches.Q]
    pre = [torch.addmm(c, y_t, W) for c, y_t, W in zip(branches.c, y, branches.W, strict=True)]
    h = [(p.square() / 4 + SMOOTH**2).sqrt_() for p in pre]
    log = [(p / 2 + h_t).clamp_(min=1e-3 * SMOOTH).log_() for p, h_t in zip(pre, h, strict=True)]
    pull = [torch.zeros_like(p) for p in pre]
    target = a.relu()
    for group in branches.groups:
        residual = fuse_branches([pre[t] for t in group], branches.floor).sub_(target)
        mean = torch.stack([log[t] for t in group]).mean(0).exp_()
        for t in group:
            pull[t].addcmul_(residual, mean)
    pull = [p / h_t for p, h_t in zip(pull, h, strict=True)]
    by_Q = [u.t() @ (p @ W.t()) for p, W in zip(pull, branches.W, strict=True)]
    by_W = [y_t.t() @ p for y_t, p in zip(y, pull, strict=True)]
    return [*by_Q, *by_W, *(p.sum(0) for p in pull)]


def _write(layer: _DCL, branches: _Branches, task: _Task, unit: _Unit) -> None:
    """Put the branches into the layer: ``θ_t = (whiten·Q_t)ᵀ·A``, and what is constant into biases or norms."""
    fusion = layer.fusion
    fusion.eps = branches.floor and max(branches.floor * unit.scale ** len(branches.groups[0]), 1e-300)
    for t in range(fusion.branches):
        rows = slice(sum(fusion.widths[:t]), sum(fusion.widths[: t + 1]))
        theta, weight = layer.branch.weight[rows], fusion.weight[rows]
        Q, W = branches.Q[t], unit.scale * branches.W[t]
        P = task.whiten @ Q
        filters = P.t() @ unit.weight
        # Rows of equal length. A filter of zeros could not learn: it stays as it was drawn, without a say.
        long, wide = filters.norm(dim=1, keepdim=True), W.norm(dim=1, keepdim=True)
        ratio = torch.where((long > 0) & (wide > 0), (wide / long.clamp(min=TINY)).sqrt(), 1.0)
        theta.copy_(torch.where(long > 0, filters * ratio, theta.flatten(1).to(filters)).view(theta.shape))
        weight.copy_(torch.where(long > 0, W / ratio, 0.0))
        mean = (task.centre - unit.constant) @ P @ W
        constant = unit.scale * branches.c[t] - mean if task.free else torch.zeros_like(mean)
        if fusion.norm is not None:
            seen = Q if task.data is None else task.data[0] @ Q / math.sqrt(len(task.data[0]))
            _settle(fusion.norm[t], mean, (seen @ W).square().sum(0), constant)  # type: ignore[arg-type]
            constant = torch.zeros_like(constant)
        if fusion.bias is not None:
            fusion.bias[t].copy_(constant)


def _settle(norm: _BatchNorm, mean: Tensor, variance: Tensor, constant: Tensor) -> None:
    """Let the batch norm of a response with these statistics add ``constant`` in eval, and do nothing else."""
    if norm.affine:
        norm.weight.copy_((variance + norm.eps).sqrt())
    else:
        variance = torch.full_like(variance, 1 - norm.eps)
    if norm.bias is None:
        mean = -constant
    else:
        norm.bias.copy_(constant + mean)
    if norm.running_mean is not None and norm.running_var is not None:
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)


def _check(
    layer: _DCL, plain: nn.Module, norm: nn.Module | None, samples: Tensor | None
) -> tuple[nn.Linear | _ConvNd, _BatchNorm | None]:
    """Refuse what cannot be fitted, with the remedy."""
    if not isinstance(plain, nn.Linear | _ConvNd) or isinstance(plain, _ConvTransposeNd):
        raise TypeError(f"a {type(plain).__name__} has no DCL layer to start; use Linear, Conv1d, Conv2d or Conv3d")
    for each in (norm, *(layer.fusion.norm or ())):
        if each is not None and not isinstance(each, _BatchNorm):
            raise TypeError(f"a {type(each).__name__} cannot be fitted; use a batch norm or none")
    if layer.branch_activation is not None:
        raise ValueError("an activation after stage 1 leaves nothing linear to fit; build without branch_activation")
    K2, theta = layer.fusion.out_channels, layer.branch.weight
    have, want = tuple(plain.weight.shape), (K2, *theta.shape[1:])
    if have != want:
        raise ValueError(f"the weight is {have}, the DCL layer stands for one of {want}; build it with like(plain)")
    if isinstance(norm, _BatchNorm) and norm.num_features != K2:
        raise ValueError(f"the batch norm has {norm.num_features} channels, the layer {K2}; pass the one behind it")
    if norm is not None and layer.fusion.norm is None and layer.fusion.bias is None:
        raise ValueError("a batch norm that is folded in needs a bias for its constant; build with bias=True")
    if samples is not None and (samples.dim() != 2 or samples.shape[1] != K2 or len(samples) < MIN_SAMPLES):
        need = f"[N, {K2}] with N of at least {MIN_SAMPLES}"
        raise ValueError(f"samples must be {need}, got {list(samples.shape)}; use more calibration data of this layer")
    for what, tensor in (("weight", plain.weight), ("bias", plain.bias), ("samples", samples)):
        if tensor is not None and not bool(tensor.isfinite().all()):
            raise ValueError(f"{what}: not all values are finite, so there is nothing to fit; check the network")
    return plain, norm  # type: ignore[return-value]
