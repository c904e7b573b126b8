"""Start a DCL layer from the trained layer that it replaces.

The trained unit computes ``relu(a)`` with ``a = A·x + b``, perhaps through a batch norm. What a branch can know of
it is a linear map of rank ``M_t`` of a, so the fit happens among vectors of K2 numbers, whatever the kernel is:

- **features**: ``u``, the principal components of a at unit variance;
- **branches**: ``pre_t = (u·Q_t)·W_t + c_t``, fused as in section 3 of the paper;
- **start**: to first order the fused z is the mean of the branches. They agree on the leading components; each of the
  others belongs to one branch, T times as strong;
- **polish**: Adam on ``(z − relu(a))²``. The error is that of the exact formula. Its way back is smooth: v counts as
  ``p/2 + √(p²/4 + δ²)``, because the exact gradient is steep near zero and stops where a branch is dead.

a comes from calibration data, or is taken as normal: what white inputs would give. Few rows say little about K2
directions, so they are shrunk towards the assumption (Ledoit and Wolf, "A well-conditioned estimator for
large-dimensional covariance matrices", 2004).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torch_dcl.functional import fuse_branches, fuse_pairs
from torch_dcl.layers import _DCL

__all__ = ["FitReport", "collect_samples", "fit_"]

FLOOR = 0.05  # the smallest z, ε^(1/T), as a fraction of the root mean square of relu(a)
SMOOTH = 0.1  # δ of the way back, as a fraction of the same
SHARES = (0.5, 0.75, 1.0)  # how much of the narrowest branch all branches may agree on at the start
BATCH, STEPS, RATE = 256, 200, 0.15
TEST_ROWS = 4096
RIDGE = 1e-3


class FitReport(NamedTuple):
    """How close a fitted layer is to the trained one, on data that the fit has not seen."""

    error: float
    """``‖z − relu(a)‖² / ‖relu(a)‖²`` of the fused output."""
    low_rank_error: float
    """The same for the low-rank layer of equal weights (T = 1, width ΣM), fitted in the same way."""
    eps: float
    """ε of the fitted layer."""


@torch.no_grad()
def fit_(
    layer: _DCL, plain: nn.Module, norm: nn.Module | None = None, samples: Tensor | None = None, *, seed: int = 0
) -> FitReport:
    """Fill ``layer``, in place, so that it computes nearly what ``plain``, ``norm`` and a ReLU compute in eval.

    ε is set as well: the floor ``ε^(1/T)`` becomes 0.05 of the root mean square of relu(a), and 0 for T = 1. The two
    factors of each branch get rows of equal length. With a norm in each branch, its statistics become those of the
    branch under the samples, and its scale and shift undo them. Without scale or shift the running statistics have to
    stand in, and without running statistics the result is exact only for batches like the samples.

    Args:
        layer: The DCL layer, of the geometry of ``plain``.
        plain: The trained linear or convolutional layer.
        norm: The batch norm between it and its ReLU. If ``layer`` has no norms, it is folded into the weights.
        samples: Outputs of ``plain`` on real data, ``[N, K2]``, before ``norm``; a quarter of them is kept out of the
            fit for the report. None takes a as normal, as white inputs make it, with the norm's running statistics.
        seed: Of the draws; the global random state is left alone.

    Returns:
        The errors on held-out samples, or on fresh draws. If relu(a) is zero throughout, they are relative to a.

    Raises:
        ValueError: layers that do not belong together, or samples that do not belong to them.
    """
    _check(layer, plain, norm, samples)
    weight: Tensor = plain.weight.detach()  # type: ignore[union-attr, operator]
    with torch.autocast(weight.device.type, enabled=False):
        generator = torch.Generator(weight.device).manual_seed(seed)
        unit = _Unit.of(plain, norm, samples)
        task, test = _pose(unit, samples, layer.fusion.norm is not None or layer.fusion.bias is not None, generator)
        widths, pairs = layer.fusion.widths, layer.fusion.strategy == "stochastic"
        branches = _solve(task, widths, pairs, generator)
        _write(layer, branches, task, unit)
        error = _error(branches, test)
        if len(widths) == 1:
            return FitReport(error, error, layer.fusion.eps)
        low_rank = _solve(task, (min(sum(widths), len(unit.weight)),), False, generator)
        return FitReport(error, _error(low_rank, test), layer.fusion.eps)


class _Unit(NamedTuple):
    """The trained unit before its ReLU: ``a = weight·x + constant``, with the batch norm in both."""

    weight: Tensor  # [K2, K1·kernel]
    constant: Tensor  # [K2]
    gain: Tensor  # [K2] what the norm multiplies the raw output by
    offset: Tensor  # [K2] and what it adds then
    spread: Tensor  # [K2] the factor from white inputs to the variance that the norm has seen
    mean: Tensor  # [K2] of a

    @staticmethod
    def of(plain: nn.Module, norm: nn.Module | None, samples: Tensor | None) -> "_Unit":
        A = plain.weight.detach().flatten(1).float()  # type: ignore[union-attr, operator]
        b = torch.zeros_like(A[:, 0]) if plain.bias is None else plain.bias.detach().float()  # type: ignore[union-attr, operator]
        one, zero = torch.ones_like(b), torch.zeros_like(b)
        if norm is None:
            return _Unit(A, b, one, zero, one, b)
        variance = A.square().sum(1)
        if norm.running_mean is not None and norm.running_var is not None:
            mean, seen = norm.running_mean.float(), norm.running_var.float()  # type: ignore[operator]
        elif samples is not None:
            raw = samples.to(A)
            mean, seen = raw.mean(0), raw.var(0, correction=0)
        else:
            mean, seen = b, variance
        gain = (seen + norm.eps).rsqrt() * (one if norm.weight is None else norm.weight.detach().float())  # type: ignore[operator, union-attr]
        shift = zero if norm.bias is None else norm.bias.detach().float()  # type: ignore[union-attr, operator]
        spread = torch.where(variance > 0, (seen / variance.clamp(min=1e-30)).sqrt(), one)
        return _Unit(gain[:, None] * A, gain * b + shift - gain * mean, gain, shift - gain * mean, spread, shift)


class _Task(NamedTuple):
    """What to imitate: rows of a, and the features u with ``a ≈ centre + u·basis``."""

    basis: Tensor  # [R, K2]
    whiten: Tensor  # [K2, R]
    centre: Tensor  # [K2]
    variance: Tensor  # [R] of u
    mean: Tensor  # [K2] of a
    free: bool  # whether there is a constant to fit
    u: Tensor | None  # [N, R] calibration rows
    a: Tensor | None
    share: float  # how many rows of a batch are drawn from the assumption
    shift: Tensor  # [R] of the assumption
    factor: Tensor | None  # [R, R] of the assumption
    scale: float  # root mean square of relu(a)
    eps: float

    def rows(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """A batch of u and a."""
        drawn = n if self.u is None or self.a is None else round(self.share * n)
        parts_u, parts_a = [], []
        if drawn:
            g = torch.randn(drawn, len(self.basis), generator=generator, device=self.basis.device)
            u = self.shift + (g if self.factor is None else g @ self.factor)
            parts_u.append(u)
            parts_a.append(torch.addmm(self.centre, u, self.basis))
        if self.u is not None and self.a is not None and drawn < n:
            pick = torch.randint(len(self.u), (n - drawn,), generator=generator, device=self.u.device)
            parts_u.append(self.u[pick])
            parts_a.append(self.a[pick])
        return torch.cat(parts_u), torch.cat(parts_a)


class _Test(NamedTuple):
    u: Tensor
    a: Tensor


def _pose(unit: _Unit, samples: Tensor | None, free: bool, generator: torch.Generator) -> tuple[_Task, _Test]:
    F = unit.spread[:, None] * unit.weight
    K2 = len(F)
    prior = (F @ F.t()).double()
    if samples is None:
        mean = unit.mean
        centre = mean if free else unit.constant
        moment = prior + torch.outer(mean - centre, mean - centre).double()
        share = 1.0
        fit = held = None
    else:
        a = samples.to(F) * unit.gain + unit.offset
        order = torch.randperm(len(a), generator=generator, device=a.device)
        cut = max(1, len(a) // 4)
        held, fit = a[order[:cut]], a[order[cut:]]
        mean = fit.mean(0)
        centre = mean if free else unit.constant
        C = _moment(fit - centre)
        trace = prior.trace()
        prior = prior * (C.trace() / trace if trace > 0 else 0.0)
        share = _shrinkage(fit - centre, C, prior)
        moment = (1 - share) * C + share * prior
    values, vectors = torch.linalg.eigh(moment)
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    rank = max(1, int((values > 1e-7 * values[0]).sum())) if values[0] > 0 else 1
    values, vectors = values[:rank], vectors[:, :rank]
    ridge = 0.0 if samples is None else RIDGE * float(values.mean())
    length = (values + ridge).sqrt().clamp(min=1e-30)
    whiten = (vectors / length).float()
    basis = (vectors * length).t().float()
    factor, shift = None, torch.zeros_like(basis[:, 0])
    variance = (values / length**2).float()
    if samples is None:
        shift = (mean - centre) @ whiten
    elif share > 0:
        H = (vectors / length).t() @ prior @ (vectors / length)
        lam, V = torch.linalg.eigh(H)
        factor = (V * lam.clamp(min=0).sqrt()).t().float()
    u = None if fit is None else (fit - centre) @ whiten
    task = _Task(basis, whiten, centre, variance, mean, free, u, fit, share, shift, factor, 1.0, 0.0)
    if held is None:
        test = _Test(*task.rows(TEST_ROWS, generator))
    else:
        test = _Test((held - centre) @ whiten, held)
    look = task.rows(1024, generator)[1] if fit is None else fit
    return task._replace(scale=_rms(look.relu()) or _rms(look) or 1.0), test


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def _moment(x: Tensor) -> Tensor:
    return (x.t() @ x).double() / len(x)


def _shrinkage(x: Tensor, C: Tensor, prior: Tensor) -> float:
    """Ledoit and Wolf's share of the assumption in the covariance."""
    noise = (x.double().square().sum(1).square().mean() - C.square().sum()) / len(x)
    apart = (C - prior).square().sum()
    return float((noise / apart).clamp(0, 1)) if apart > 0 else 0.0


class _Branches(NamedTuple):
    Q: list[Tensor]
    W: list[Tensor]
    c: list[Tensor]
    pairs: bool
    eps: float

    def respond(self, u: Tensor) -> list[Tensor]:
        return [torch.addmm(c, u @ Q, W) for Q, W, c in zip(self.Q, self.W, self.c, strict=True)]

    def fuse(self, u: Tensor) -> Tensor:
        pre = self.respond(u)
        return fuse_pairs(pre, self.eps) if self.pairs else fuse_branches(pre, self.eps)


def _error(branches: _Branches, test: _Test) -> float:
    target = test.a.relu()
    rest = _rms(branches.fuse(test.u) - target) ** 2
    return rest / (_rms(target) ** 2 or _rms(test.a) ** 2 or 1.0)


def _solve(task: _Task, widths: Sequence[int], pairs: bool, generator: torch.Generator) -> _Branches:
    T = 2 if pairs else len(widths)
    eps = 0.0 if T == 1 else (FLOOR * task.scale) ** T
    look = task.rows(1024, generator)
    starts = [_start(task, widths, s, pairs, eps, generator) for s in (SHARES if len(widths) > 1 else (1.0,))]
    best = min(starts, key=lambda b: _error(b, _Test(*look)))
    before = _error(best, _Test(*look))
    done = _polish(best, task, generator)
    return done if _error(done, _Test(*look)) <= before else best


def _start(
    task: _Task, widths: Sequence[int], share: float, pairs: bool, eps: float, generator: torch.Generator
) -> _Branches:
    T, rank = len(widths), len(task.basis)
    shared = min(round(share * min(widths)), rank)
    owned: list[list[int]] = [[] for _ in widths]
    following = shared
    while following < rank and any(len(o) + shared < w for o, w in zip(owned, widths, strict=True)):
        for o, w in zip(owned, widths, strict=True):
            if len(o) + shared < w and following < rank:
                o.append(following)
                following += 1
    out = _Branches([], [], [], pairs, eps)
    for o, w in zip(owned, widths, strict=True):
        index = torch.tensor([*range(shared), *o], device=task.basis.device)
        Q = torch.randn(rank, w, generator=generator, device=task.basis.device) / math.sqrt(rank)
        W = torch.zeros(w, task.basis.shape[1], device=task.basis.device)
        used = len(index)
        Q[:, :used] *= 0.03 if T > 1 and shared == min(widths) < rank else 0.0
        Q[index, torch.arange(used, device=Q.device)] += 1
        W[:used] = task.basis[index]
        W[shared:used] *= T
        out.Q.append(Q)
        out.W.append(W)
        out.c.append(task.centre.clone() if task.free else torch.zeros_like(task.centre))
    return out


def _polish(start: _Branches, task: _Task, generator: torch.Generator) -> _Branches:
    """Adam."""
    out = start._replace(Q=[q.clone() for q in start.Q], W=[w.clone() for w in start.W], c=[c.clone() for c in start.c])
    T = len(out.Q)
    groups = list(combinations(range(T), 2)) if out.pairs else [tuple(range(T))]
    delta = SMOOTH * task.scale
    norm_w = math.sqrt(sum(float(W.square().sum()) for W in out.W) / sum(W.numel() for W in out.W))
    params = [*out.Q, *out.W, *(out.c if task.free else ())]
    rates = [1 / math.sqrt(Q.shape[1]) for Q in out.Q] + [norm_w] * T + [0.1 * task.scale] * T
    first, second = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    b1, b2 = 0.9, 0.99
    for step in range(STEPS):
        rate = RATE * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        u, a = task.rows(BATCH, generator)
        target = a.relu()
        y = [u @ Q for Q in out.Q]
        pre = [torch.addmm(c, y_t, W) for c, y_t, W in zip(out.c, y, out.W, strict=True)]
        q = [(p.square() / 4 + delta**2).sqrt() for p in pre]
        logs = [(q_t + p / 2).clamp(min=1e-3 * delta).log() for q_t, p in zip(q, pre, strict=True)]
        pull = [torch.zeros_like(p) for p in pre]
        for group in groups:
            z = fuse_branches([pre[t] for t in group], out.eps)
            r = (z - target) * torch.stack([logs[t] for t in group]).mean(0).exp()
            for t in group:
                pull[t] += r
        G = [p / q_t for p, q_t in zip(pull, q, strict=True)]
        grads = [u.t() @ (g @ W.t()) for g, W in zip(G, out.W, strict=True)]
        grads += [y_t.t() @ g for y_t, g in zip(y, G, strict=True)]
        if task.free:
            grads += [g.sum(0) for g in G]
        for p, g, m, v, r in zip(params, grads, first, second, rates, strict=False):
            m.lerp_(g, 1 - b1)
            v.mul_(b2).addcmul_(g, g, value=1 - b2)
            p.addcdiv_(m, (v / (1 - b2 ** (step + 1))).sqrt_().add_(1e-20), value=-rate * r / (1 - b1 ** (step + 1)))
    return out


def _write(layer: _DCL, branches: _Branches, task: _Task, unit: _Unit) -> None:
    fusion = layer.fusion
    theta: Tensor = layer.branch.weight  # type: ignore[assignment]
    fusion.eps = branches.eps
    at = 0
    for t, (Q, W, c) in enumerate(zip(branches.Q, branches.W, branches.c, strict=True)):
        P = task.whiten @ Q
        new = P.t() @ unit.weight
        long_t, long_w = new.norm(dim=1), W.norm(dim=1)
        s = torch.where((long_t > 0) & (long_w > 0), (long_w / long_t.clamp(min=1e-30)).sqrt(), 1.0)
        rows = slice(at, at + len(W))
        at += len(W)
        keep = (long_t > 0)[:, None]
        old = theta[rows].flatten(1)
        theta[rows] = torch.where(keep, (new * s[:, None]).to(old.dtype), old).view_as(theta[rows])
        fusion.weight[rows] = torch.where(keep, W / s[:, None], 0.0).to(fusion.weight.dtype)
        constant = c - (task.centre - unit.constant) @ P @ W if task.free else torch.zeros_like(c)
        if fusion.norm is not None:
            mean = (task.mean - unit.constant) @ P @ W
            variance = (task.variance[:, None] * (Q @ W).square()).sum(0)
            _set_norm(fusion.norm[t], mean, variance, constant)
            constant = torch.zeros_like(constant)
        if fusion.bias is not None:
            fusion.bias[t] = constant.to(fusion.bias.dtype)


def _set_norm(norm: nn.Module, mean: Tensor, variance: Tensor, constant: Tensor) -> None:
    """Make a batch norm add ``constant`` in eval and keep its input otherwise."""
    if norm.weight is None:
        variance = torch.full_like(variance, 1 - norm.eps)  # type: ignore[operator]
    else:
        norm.weight.copy_((variance + norm.eps).sqrt())  # type: ignore[operator]
    if norm.bias is None:
        mean = -constant
    else:
        norm.bias.copy_(constant + mean)  # type: ignore[operator]
    if norm.running_mean is not None:
        norm.running_mean.copy_(mean)  # type: ignore[operator]
        norm.running_var.copy_(variance)  # type: ignore[operator, union-attr]


def _check(layer: _DCL, plain: nn.Module, norm: nn.Module | None, samples: Tensor | None) -> None:
    pass


def collect_samples(
    model: nn.Module, layers: Mapping[str, nn.Module], calibration: Iterable[Any], *, limit: int = 4096, seed: int = 0
) -> dict[str, Tensor]:
    """Stub to be."""
    return {}
