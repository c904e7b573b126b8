"""Branches that approximate the pre-activations of a layer: their initialisation and their optimisation.

To first order z is the mean of the branches. So all branches start with the leading features, and each further feature
is assigned to one branch, with T times the strength. Then Adam minimises ``(z - relu(a))²``. The residual is exact; the
gradient replaces relu(p) by ``p/2 + √(p²/4 + δ²)``, because the exact slope is steep near zero and vanishes where a
branch is dead.
"""

import math
from collections.abc import Sequence
from itertools import combinations
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dcl.convert.assumption import TINY
from torch_dcl.functional import fuse_branches

__all__ = ["BATCH", "STEPS", "Branches", "Rows", "Task", "is_polished", "relative_error", "solve"]

FLOOR = 0.05  # the smallest z, ε^(1/T), in units of the root mean square of relu(a)
SMOOTH = 0.1  # δ, in the same unit
SHARES = (0.5, 0.75, 1.0)  # shared features at the start, as fractions of the narrowest branch
STRENGTHS = (0.8, 0.6)  # further strengths of the features of one branch, in units of T; the start has 1
NUDGE = 0.01  # the perturbation that separates branches with equal features
STEPS, BATCH, RATE, BETAS = 200, 256, 0.2, (0.9, 0.99)  # of Adam
WORK = 2**28  # the most weight updates of all steps together; larger layers are not optimised

Rows = tuple[Tensor, Tensor]
"""Features u and their pre-activations a, row by row."""


class Task(NamedTuple):
    """The target of a fit: rows of a, and their features u with ``a = centre + u·basis``."""

    basis: Tensor  # [R, K2]
    whiten: Tensor  # [K2, R], back to u
    centre: Tensor  # [K2]
    free: bool  # whether a branch can have a constant
    learns: bool  # whether the data suffice to train that constant
    data: Rows | None = None  # samples to fit
    assumed: float = 1.0  # the part of a batch that is drawn from the assumption
    factor: Tensor | None = None  # white noise times this is a - centre under the assumption; with data only

    def rows(self, n: int, generator: torch.Generator) -> Rows:
        """A batch to fit."""
        drawn, device = round(self.assumed * n), self.basis.device
        directions = len(self.basis if self.factor is None else self.factor)
        noise = torch.randn(drawn, directions, generator=generator, device=device, dtype=self.basis.dtype)
        if self.data is None or self.factor is None:
            return noise, torch.addmm(self.centre, noise, self.basis)
        deviation = noise @ self.factor
        pick = torch.randint(len(self.data[0]), (n - drawn,), generator=generator, device=device)
        u = torch.cat((deviation @ self.whiten, self.data[0][pick]))
        return u, torch.cat((self.centre + deviation, self.data[1][pick]))


class Branches(NamedTuple):
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


def relative_error(branches: Branches, rows: Rows, *, each: bool = False) -> float:
    """The relative error of the mean over the groups, or with ``each`` the mean of the errors of the groups."""
    u, a = rows
    target, z = a.relu(), branches.fuse(u)
    outputs = z if each else [torch.stack(z).mean(0)]
    rest = sum(_mean_square(output - target) for output in outputs) / len(outputs)
    return rest / (_mean_square(target) or _mean_square(a) or 1.0)


def _mean_square(x: Tensor) -> float:
    return float(x.double().square().mean())


def solve(task: Task, probe: Rows, widths: Sequence[int], pairs: bool, generator: torch.Generator) -> Branches:
    """The best start, weakened or optimised if that is better on held-out rows.

    A large layer is not optimised: in the available steps it sees too few rows for its many directions, which adds
    noise.
    """

    def measured(branches: Branches) -> tuple[float, Branches]:
        return relative_error(branches, probe, each=True), branches

    T = len(widths)
    groups = list(combinations(range(T), 2 if pairs else T))
    shares = sorted({min(round(share * min(widths)), len(task.basis)) for share in (SHARES if T > 1 else SHARES[-1:])})
    starts = ((*measured(_start(task, widths, s, groups, generator)), s) for s in shares)
    error, start, shared = min(starts, key=itemgetter(0))
    candidates = [(error, start)]
    # The product of the branches adds an error that grows with the strength of the features of single branches.
    for strength in STRENGTHS if T > 1 else ():
        weaker = [torch.cat((W[:shared], strength * W[shared:])) for W in start.W]
        candidates.append(measured(start._replace(W=weaker)))
    if is_polished(widths, start.W[0].shape[1]):
        candidates.append(measured(_polish(start, math.sqrt(error), task, generator)))
    return min(candidates, key=itemgetter(0))[1]


def is_polished(widths: Sequence[int], out_channels: int) -> bool:
    """Whether a layer is small enough to be optimised."""
    return STEPS * sum(widths) * out_channels <= WORK


def _start(
    task: Task, widths: Sequence[int], shared: int, groups: Sequence[tuple[int, ...]], generator: torch.Generator
) -> Branches:
    """The first ``shared`` features in every branch; the others are distributed one by one to branches with room."""
    rank, device = len(task.basis), task.basis.device
    owned: list[list[int]] = [list(range(shared)) for _ in widths]
    rest = iter(range(shared, rank))
    while dealt := [*zip((own for own, M in zip(owned, widths, strict=True) if len(own) < M), rest, strict=False)]:
        for own, feature in dealt:
            own.append(feature)
    start = Branches([], [], [], groups)
    for own, M in zip(owned, widths, strict=True):
        # A column without a feature is random and has no weight. Branches with equal features need a perturbation.
        Q = torch.randn(rank, M, generator=generator, device=device, dtype=task.basis.dtype) / math.sqrt(rank)
        Q[:, : len(own)] *= NUDGE if len(own) == shared < rank and len(widths) > 1 else 0.0
        Q[own, range(len(own))] += 1
        W = task.basis.new_zeros(M, task.basis.shape[1])
        W[: len(own)] = task.basis[own]
        W[shared : len(own)] *= len(groups[0])
        start.Q.append(Q)
        start.W.append(W)
        start.c.append(task.centre.clone() if task.free else torch.zeros_like(task.centre))
    return start


def _polish(start: Branches, error: float, task: Task, generator: torch.Generator) -> Branches:
    """Adam with a cosine schedule and steps proportional to the ``error`` of the start, so that none destroys it."""
    Q, W, c = ([p.clone() for p in part] for part in start[:3])
    out = start._replace(Q=Q, W=W, c=c)
    strength = task.basis.square().sum(1)
    sizes = [strength.new_tensor(error / math.sqrt(len(W_t))) for W_t in W]
    rates = []
    for W_t, size in zip(W, sizes, strict=True):
        # A step of Q moves the output in proportion to W, and a weak feature explains only a small part of it.
        weigh = (strength / strength[: len(W_t)][-1].clamp(min=TINY)).clamp(max=1.0)
        lever = W_t.square().mean(1).sqrt().maximum(size).clamp(min=TINY)
        rates.append(size * (weigh / weigh.norm().clamp(min=TINY))[:, None] / lever)
    rates += sizes + [strength.new_tensor(0.2 * error)] * len(c)
    state = [(p, rate, torch.zeros_like(p), torch.zeros_like(p)) for p, rate in zip([*Q, *W, *c], rates, strict=True)]
    state = state if task.learns else state[: -len(c)]
    for step in range(1, STEPS + 1):
        pace = RATE * (1 + math.cos(math.pi * (step - 1) / STEPS)) / 2 / (1 - BETAS[0] ** step)
        gradients = _gradients(out, *task.rows(BATCH, generator))
        for (p, rate, first, second), gradient in zip(state, gradients, strict=False):
            first.lerp_(gradient, 1 - BETAS[0])
            second.lerp_(gradient.square(), 1 - BETAS[1])
            p.sub_(first / (second / (1 - BETAS[1] ** step)).sqrt_().add_(1e-20) * rate, alpha=pace)
    return out


def _gradients(branches: Branches, u: Tensor, a: Tensor) -> list[Tensor]:
    """Gradients of the squared error by all Q, all W and all c, up to a constant factor, to which Adam is invariant.

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
