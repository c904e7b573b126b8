"""Batch norm behind the projection with the statistics of several processes, as ``nn.SyncBatchNorm`` defines them.

What processes send each other, and when, is what torch's own norm sends: in the forward pass the mean and the inverse
deviation of every response and the number of positions, in the backward pass ``h`` and ``s``. So a process on which
plain torch runs, for whatever reason, is understood by the others.

In the notation of `moments`, with an r behind what one process has of its own and all else of all processes,

    s_r = W · D_r - mean · h_r        s = Σ s_r        h = Σ h_r        P = Σ P_r
    grad γ = s_r · rstd               grad β = h_r     A = U + 2 V · (mean_r - mean)
    grad W = scale · D_r + P_r / P · (A · μ_r + 2 V · C_r · W)          grad bias = scale · h_r + P_r / P · A

Gradients of parameters are those of a process's own positions, whose sum or mean is for others to take. The gradient of
a product x is that of `moments`, with the sums over all processes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, distributed

from torch_dcl.kernels.arithmetic import OPTIONS, know, single, track_
from torch_dcl.kernels.launch import Norm
from torch_dcl.kernels.launcher import Launch, cdiv
from torch_dcl.kernels.moments import Statistics

__all__ = ["SharedStatistics"]

_OUTPUTS = 128
"""Outputs of a program."""
_FILTERS = 32
"""Filters of a program that completes the gradient of the weights."""


@triton.jit
def _combine(
    gathered, bias, gamma, beta, running_mean, running_var, tracked, known, ranks, epsilon, momentum,
    N: tl.constexpr, T: tl.constexpr, BIAS: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr, TRACK: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Scale, shift, mean and inverse deviation of a few responses, from those of all processes.

    Behind them, where the mean and the variance of this process were, how much its mean is above that of all, and the
    inverse of the number of all positions. TRACK is 0 to leave running statistics alone, else as in `moments`.
    """
    epsilon, momentum = single(epsilon), single(momentum)
    t = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside, at = n < N, t * N + n
    positions = tl.zeros((), tl.float32)
    mean = tl.zeros((BN,), tl.float32)
    squares = tl.zeros((BN,), tl.float32)  # of what is around the mean
    for rank in range(ranks):
        own = gathered + rank * (2 * T * N + 1)
        more = tl.load(own + 2 * T * N)
        apart = tl.load(own + at, mask=inside, other=0.0) - mean
        rstd = tl.load(own + T * N + at, mask=inside, other=1.0)
        rstd = tl.where(more > 0, rstd, 1.0)  # a process without positions sends zeros
        share = more / tl.maximum(positions + more, 1.0)
        variance = tl.maximum(1.0 / (rstd * rstd) - epsilon, 0.0)
        squares += more * variance + apart * apart * (positions * share)
        mean += apart * share
        positions += more
    positions = tl.maximum(positions, 1.0)
    variance = squares / positions
    to = known + 4 * T * N + at
    tl.store(to, tl.load(to, mask=inside, other=0.0) - mean, mask=inside)
    tl.store(to + T * N, tl.zeros((BN,), tl.float32) + 1.0 / positions, mask=inside)
    if TRACK:
        unbiased = variance * (positions / tl.maximum(positions - 1.0, 1.0))
        track_(running_mean, running_var, tracked, mean, unbiased, momentum, n, t, N, TRACK)
    if BIAS:
        mean -= tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    know(known, mean, 1.0 / tl.sqrt_rn(variance + epsilon), gamma, beta, n, t, N, T, GAMMA, BETA)


@triton.jit
def _complete(
    sums, direct, known, dw, numbers, P, N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, AROUND: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradients of weights and biases, and the slopes of `rows`, from the sums of all processes.

    ``sums`` has h and s, ``direct`` the gradient of the weights without what comes through the statistics. AROUND
    says that slopes are for `rows.add_through_statistics_`, which takes them around the means of this process.
    """
    t = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    inside, of = n < N, known + t * N + n
    scale = tl.load(of, mask=inside, other=0.0)
    mean = tl.load(of + 2 * T * N, mask=inside, other=0.0)
    rstd = tl.load(of + 3 * T * N, mask=inside, other=0.0)
    above = tl.load(of + 4 * T * N, mask=inside, other=0.0)
    each = tl.load(of + 5 * T * N, mask=inside, other=0.0)
    U = -scale * tl.load(sums + t * N + n, mask=inside, other=0.0)
    V2 = -scale * rstd * rstd * tl.load(sums + (T + t) * N + n, mask=inside, other=0.0)
    A = U + V2 * above
    share = (tl.zeros((), tl.float32) + P) * each
    if tl.program_id(2) == 0:
        to = numbers + t * N + n
        h = tl.load(to + T * N, mask=inside, other=0.0)
        tl.store(to + 2 * T * N, scale * h + share * A, mask=inside)
        tl.store(to + 3 * T * N, V2 * each, mask=inside)
        if AROUND:
            tl.store(to + 4 * T * N, (A - V2 * mean) * each, mask=inside)
        else:
            tl.store(to + 4 * T * N, (U - V2 * mean) * each, mask=inside)
    at = (t * M + m)[:, None] * N + n[None, :]
    both = (m < M)[:, None] & inside[None, :]
    means = tl.load(known + 6 * T * N + t * M + m, mask=m < M, other=0.0)
    product = tl.load(known + (6 * T * N + T * M) + at, mask=both, other=0.0)
    gradient = means[:, None] * (share * A)[None, :] + product * (share * V2)[None, :]
    gradient += tl.load(direct + at, mask=both, other=0.0)
    tl.store(dw + at, gradient.to(dw.dtype.element_ty), mask=both)


class SharedStatistics:
    """What `moments.Statistics` is for a norm of one process, for one of several in training.

    Args:
        P: Positions of this process; there may be none.
        M: Filters of a branch.
        T: Branches.
        N: Outputs.
        device: Where.
        norm: Its settings; of its tensors only which there are.
        bias: Whether there are biases before it.
    """

    fixed = False

    def __init__(self, P: int, M: int, T: int, N: int, device: torch.device, norm: Norm, *, bias: bool) -> None:
        self.P, self.M, self.T, self.N, self.ranks = P, M, T, N, norm.ranks
        self.tracks = norm.mean is not None
        self.cumulative = self.tracks and norm.momentum is None
        untracked = norm._replace(mean=None, variance=None, tracked=None)
        self._own = Statistics(P, M, T, N, device, untracked, bias=bias) if P else None
        self._sums = Statistics(P, M, T, N, device, untracked._replace(fixed=True), bias=bias)
        values = {
            "ranks": norm.ranks, "epsilon": norm.eps, "momentum": norm.momentum or 0.0, "N": N, "T": T, "BIAS": bias,
            "GAMMA": norm.gamma is not None, "BETA": norm.beta is not None,
            "TRACK": (2 if self.cumulative else 1) if self.tracks else 0, "BN": _OUTPUTS,
        }  # fmt: skip
        self._combine = Launch(_combine, (cdiv(N, _OUTPUTS), T), values, {"num_warps": 4, **OPTIONS})
        self._complete: Launch | None = None

    def __call__(self, y: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """As `moments.Statistics`, but for the two numbers of a response that `_combine` writes; after an exchange."""
        M, T, N, device = self.M, self.T, self.N, y.device
        outputs = T * N
        if self._own is None:
            known = torch.zeros(6 * outputs + T * M + T * M * N, dtype=torch.float32, device=device)
            low = weight.to(y.dtype)
            message = torch.zeros(2 * outputs + 1, dtype=torch.float32, device=device)
        else:
            known, low = self._own(y, weight, bias, norm)
            count = torch.full((1,), float(self.P), dtype=torch.float32, device=device)
            message = torch.cat((known[4 * outputs : 5 * outputs], known[3 * outputs : 4 * outputs], count))
        gathered = _gather(message, self.ranks, norm.group)
        tensors = norm[:5] if self.tracks else (*norm[:2], None, None, None)
        of_bias = low if bias is None else bias
        self._combine(gathered, of_bias, *(known if t is None else t for t in tensors), known)
        if self.cumulative and norm.tracked is not None:
            norm.tracked.add_(1)
        return known, low

    def gradients(
        self, known: Tensor, low: Tensor, sums: Tensor, dws: Tensor, dtype: torch.dtype, group: Any, *, around: bool
    ) -> tuple[Tensor, Tensor]:
        """As `moments.Statistics`, after an exchange.

        Args:
            known: From the forward pass.
            low: Likewise.
            sums: h of this process in parts.
            dws: D, likewise.
            dtype: Of the weights' gradient.
            group: The processes; None to exchange nothing, if γ and β are all that learns.
            around: Whether the gradient of y comes from `rows.add_through_statistics_`.
        """
        outputs = self.T * self.N
        direct, numbers = self._sums.gradients(known, low, sums, dws, torch.float32)
        totals = torch.cat((numbers[1], numbers[0] / known[3 * outputs : 4 * outputs]))
        if group is not None:
            distributed.all_reduce(totals, group=group)
        if self._complete is None:
            values = {"P": self.P, "N": self.N, "M": self.M, "T": self.T, "AROUND": around}
            values |= {"BM": _FILTERS, "BN": _OUTPUTS}
            grid = (cdiv(self.N, _OUTPUTS), self.T, cdiv(self.M, _FILTERS))
            self._complete = Launch(_complete, grid, values, {"num_warps": 4, **OPTIONS})
        dw = direct if dtype is torch.float32 else torch.empty(low.shape, dtype=dtype, device=low.device)
        self._complete(totals, direct, known, dw, numbers)
        return dw, numbers


def _gather(message: Tensor, ranks: int, group: Any) -> Tensor:
    """The messages of all processes, one behind the other."""
    found = torch.empty(ranks * message.numel(), dtype=message.dtype, device=message.device)
    if distributed.get_backend(group) == "gloo":  # which is told where each of them goes
        distributed.all_gather(list(found.chunk(ranks)), message, group)
    else:
        distributed.all_gather_into_tensor(found, message, group)
    return found
