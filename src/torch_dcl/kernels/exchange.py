"""Batch norm after the projection with the statistics of several processes, as ``nn.SyncBatchNorm`` defines them.

The messages and their order are those of ``nn.SyncBatchNorm``: forward sends the mean and the inverse standard
deviation of every response and the number of positions, backward ``h`` and ``s``. Processes that run plain torch can
therefore take part.

In the notation of `moments`, where a subscript r marks the values of one process and all others are global,

    s_r = W · D_r - mean · h_r        s = Σ s_r        h = Σ h_r        P = Σ P_r
    grad γ = s_r · rstd               grad β = h_r     A = U + 2 V · (mean_r - mean)
    grad W = scale · D_r + P_r / P · (A · μ_r + 2 V · C_r · W)          grad bias = scale · h_r + P_r / P · A

Gradients of parameters are those of a process's own positions; reducing them is left to the caller, as with DDP. The
gradient of a product x is that of `moments`, with the sums over all processes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, distributed

from torch_dcl.kernels.arithmetic import OPTIONS, as_float32, store_norm, track_
from torch_dcl.kernels.launch import Norm
from torch_dcl.kernels.launcher import Launch, cdiv
from torch_dcl.kernels.moments import Statistics

__all__ = ["SharedStatistics"]

_OUTPUTS = 128
"""Outputs per program."""
_FILTERS = 32
"""Filters per program of the kernel that completes the gradient of the weights."""


@triton.jit
def _combine(
    gathered, bias, gamma, beta, running_mean, running_var, tracked, stats, ranks, epsilon, momentum,
    N: tl.constexpr, T: tl.constexpr, BIAS: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr, TRACK: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Write scale, shift, mean and inverse standard deviation of a block of responses, from those of all processes.

    Overwrite this process's mean and variance, stored after them, with the difference of its mean to the global mean
    and with the inverse of the global number of positions. TRACK 0 leaves running statistics alone; 1 and 2 are those
    of `moments`.
    """
    epsilon, momentum = as_float32(epsilon), as_float32(momentum)
    t = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside, at = n < N, t * N + n
    positions = tl.zeros((), tl.float32)
    mean = tl.zeros((BN,), tl.float32)
    squares = tl.zeros((BN,), tl.float32)  # sums of squared deviations
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
    to = stats + 4 * T * N + at
    tl.store(to, tl.load(to, mask=inside, other=0.0) - mean, mask=inside)
    tl.store(to + T * N, tl.zeros((BN,), tl.float32) + 1.0 / positions, mask=inside)
    if TRACK:
        unbiased = variance * (positions / tl.maximum(positions - 1.0, 1.0))
        track_(running_mean, running_var, tracked, mean, unbiased, momentum, n, t, N, TRACK)
    if BIAS:
        mean -= tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    store_norm(stats, mean, 1.0 / tl.sqrt_rn(variance + epsilon), gamma, beta, n, t, N, T, GAMMA, BETA)


@triton.jit
def _complete(
    sums, direct, stats, dw, numbers, P, N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, CENTRED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write gradients of weights and biases, and the slopes of `rows`, from the sums of all processes.

    ``sums`` holds h and s, ``direct`` the gradient of the weights without the part through the statistics. With
    CENTRED the slopes are for `rows.add_statistics_gradient_`, which centres y at the means of this process.
    """
    t = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    inside, of = n < N, stats + t * N + n
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
        if CENTRED:
            tl.store(to + 4 * T * N, (A - V2 * mean) * each, mask=inside)
        else:
            tl.store(to + 4 * T * N, (U - V2 * mean) * each, mask=inside)
    at = (t * M + m)[:, None] * N + n[None, :]
    both = (m < M)[:, None] & inside[None, :]
    means = tl.load(stats + 6 * T * N + t * M + m, mask=m < M, other=0.0)
    product = tl.load(stats + (6 * T * N + T * M) + at, mask=both, other=0.0)
    gradient = means[:, None] * (share * A)[None, :] + product * (share * V2)[None, :]
    gradient += tl.load(direct + at, mask=both, other=0.0)
    tl.store(dw + at, gradient.to(dw.dtype.element_ty), mask=both)


class SharedStatistics:
    """`moments.Statistics` for a norm in training that shares its statistics with other processes.

    Args:
        P: Positions of this process, possibly 0.
        M: Filters of a branch.
        T: Branches.
        N: Outputs.
        device: The device of the tensors.
        norm: The settings of the norm; of its tensors only whether they exist.
        bias: Whether a bias precedes the norm.
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
        """As `moments.Statistics`, after an exchange; `_combine` replaces two of its rows."""
        M, T, N, device = self.M, self.T, self.N, y.device
        outputs = T * N
        if self._own is None:
            stats = torch.zeros(6 * outputs + T * M + T * M * N, dtype=torch.float32, device=device)
            low = weight.to(y.dtype)
            message = torch.zeros(2 * outputs + 1, dtype=torch.float32, device=device)
        else:
            stats, low = self._own(y, weight, bias, norm)
            count = torch.full((1,), float(self.P), dtype=torch.float32, device=device)
            message = torch.cat((stats[4 * outputs : 5 * outputs], stats[3 * outputs : 4 * outputs], count))
        gathered = _gather(message, self.ranks, norm.group)
        tensors = norm[:5] if self.tracks else (*norm[:2], None, None, None)
        bias_pointer = low if bias is None else bias
        self._combine(gathered, bias_pointer, *(stats if t is None else t for t in tensors), stats)
        if self.cumulative and norm.tracked is not None:
            norm.tracked.add_(1)
        return stats, low

    def gradients(
        self, stats: Tensor, low: Tensor, sums: Tensor, dws: Tensor, dtype: torch.dtype, group: Any, *, centred: bool
    ) -> tuple[Tensor, Tensor]:
        """As `moments.Statistics`, after an exchange.

        Args:
            stats: From the forward pass.
            low: From the forward pass.
            sums: Partial sums of h of this process.
            dws: Partial sums of D of this process.
            dtype: The dtype of the weight gradient.
            group: The process group; None to skip the exchange if only γ and β require gradients.
            centred: Whether the gradient of y comes from `rows.add_statistics_gradient_`.
        """
        outputs = self.T * self.N
        direct, numbers = self._sums.gradients(stats, low, sums, dws, torch.float32)
        totals = torch.cat((numbers[1], numbers[0] / stats[3 * outputs : 4 * outputs]))
        if group is not None:
            distributed.all_reduce(totals, group=group)
        if self._complete is None:
            values = {"P": self.P, "N": self.N, "M": self.M, "T": self.T, "CENTRED": centred}
            values |= {"BM": _FILTERS, "BN": _OUTPUTS}
            grid = (cdiv(self.N, _OUTPUTS), self.T, cdiv(self.M, _FILTERS))
            self._complete = Launch(_complete, grid, values, {"num_warps": 4, **OPTIONS})
        dw = direct if dtype is torch.float32 else torch.empty(low.shape, dtype=dtype, device=low.device)
        self._complete(totals, direct, stats, dw, numbers)
        return dw, numbers


def _gather(message: Tensor, ranks: int, group: Any) -> Tensor:
    """The concatenated messages of all processes."""
    messages = torch.empty(ranks * message.numel(), dtype=message.dtype, device=message.device)
    if distributed.get_backend(group) == "gloo":  # has no all_gather_into_tensor
        distributed.all_gather(list(messages.chunk(ranks)), message, group)
    else:
        distributed.all_gather_into_tensor(messages, message, group)
    return messages
