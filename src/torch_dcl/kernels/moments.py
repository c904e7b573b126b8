"""Batch norm after the projection, in training, without storing the responses.

Before the norm, the response of output k is linear in the branch outputs y, so its statistics follow from those of y,
which has few channels: ``mean_k = W_k · μ`` and ``var_k = W_k · C · W_k`` with the mean μ and the covariance C of y.
The norm thus becomes a scale and a shift, which the projection's kernels apply.

With ``d`` the gradient of the normalised response, backward needs two sums over positions, ``h = Σ d`` and
``D = Σ y · d``, which the projection's backward kernel computes anyway. Then, for P positions,

    s = W · D - mean · h        grad γ = s · rstd        grad β = h
    V = -s · scale · rstd² / 2  U = -scale · h           grad W = scale · D + U · μ + 2 · V · C · W

and the gradient of a product x is ``scale · d + (2 V · (x - mean) + U) / P``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_dcl.kernels.arithmetic import OPTIONS, as_float32, fixed_statistics, store_norm, track_
from torch_dcl.kernels.launch import MAX_FILTERS_IN_REGISTERS, Norm
from torch_dcl.kernels.launcher import Launch, cdiv, has_large_shared_memory, multiprocessors, next_power_of_2
from torch_dcl.kernels.project import sum_of_partials

__all__ = ["Statistics"]

_SIDE = 64
"""Filters per tile of the covariance."""
_TILE = 16
"""Outputs per program of the kernels that compute scales from moments."""
_IN_FLIGHT = 16_384
"""Numbers that a program loads at once, to hide the latency of memory."""


@triton.jit
def _centred(rows, columns, first, there, WIDTH: tl.constexpr):
    """Values minus those of the first row, in float32; zero beyond the last row."""
    inside = there[:, None] & (columns < WIDTH)[None, :]
    return tl.where(there[:, None], tl.load(rows + columns[None, :], mask=inside, other=0.0) - first[None, :], 0.0)


@triton.jit
def _moments(
    y, parts, P, share, M: tl.constexpr, T: tl.constexpr, WIDTH: tl.constexpr, BK: tl.constexpr, TILES: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Write sums of y and of its products over a share of the positions, shifted by the first row: means may be large.

    A program handles all branches (WIDTH T·M) or one (WIDTH M). Up to its last bits the difference of two
    half-precision numbers is the sum of two such numbers, so their products on tensor cores suffice.
    """
    i = tl.program_id(1) // TILES * BK + tl.arange(0, BK)
    j = tl.program_id(1) % TILES * BK + tl.arange(0, BK)
    own = y + tl.program_id(2) * M
    kind = y.dtype.element_ty
    first_i = tl.load(own + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    first_j = tl.load(own + j, mask=j < WIDTH, other=0.0).to(tl.float32)
    products = tl.zeros((BK, BK), tl.float32)
    mixed = tl.zeros((BK, BK), tl.float32)
    sums = tl.zeros((BK,), tl.float32)
    start = tl.program_id(0).to(tl.int64) * share
    for step in range(0, share, BM):
        p = start + step + tl.arange(0, BM)
        there = (p < P) & (step + tl.arange(0, BM) < share)
        rows = own + p[:, None] * (T * M)
        b = _centred(rows, j, first_j, there, WIDTH)
        a = b
        if TILES > 1:
            a = _centred(rows, i, first_i, there, WIDTH)
        sums += tl.sum(b, 0)
        if kind == tl.float32:
            products = tl.dot(tl.trans(a), b, products, input_precision="tf32x3")
        else:
            high_b = b.to(kind)
            low_b = (b - high_b).to(kind)
            high_a = a.to(kind)
            products = tl.dot(tl.trans(high_a), high_b, products)
            mixed = tl.dot(tl.trans(high_a), low_b, mixed)
            if TILES > 1:
                mixed = tl.dot(tl.trans((a - high_a).to(kind)), high_b, mixed)
    if TILES == 1:  # the other mixed products are the transpose
        mixed += tl.trans(mixed)
    products += mixed
    to = parts + (tl.program_id(0).to(tl.int64) * T + tl.program_id(2) + j // M) * ((M + 1) * M) + j % M
    tl.store(to, sums, mask=j < WIDTH)  # every row of tiles writes the same
    same = (i // M)[:, None] == (j // M)[None, :]
    inside = (i < WIDTH)[:, None] & (j < WIDTH)[None, :]
    tl.store(to[None, :] + (i % M + 1)[:, None] * M, products, mask=same & inside)


@triton.jit
def _finish(
    stats, bias, gamma, beta, running_mean, running_var, tracked, mean, variance, positions, epsilon, momentum, n, t,
    N: tl.constexpr, T: tl.constexpr, BIAS: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr, TRACK: tl.constexpr,
):  # fmt: skip
    """Write the results that follow from mean and variance of a block of products; TRACK as in `_statistics`."""
    inside = n < N
    store_norm(stats, mean, 1.0 / tl.sqrt_rn(variance + epsilon), gamma, beta, n, t, N, T, GAMMA, BETA)
    if BIAS:
        mean += tl.load(bias + t * N + n, mask=inside, other=0.0).to(tl.float32)
    variance *= positions / tl.maximum(positions - 1.0, 1.0)
    if TRACK == 0:
        tl.store(stats + (4 * T + t) * N + n, mean, mask=inside)
        tl.store(stats + (5 * T + t) * N + n, variance, mask=inside)
    else:
        track_(running_mean, running_var, tracked, mean, variance, momentum, n, t, N, TRACK)


@triton.jit
def _statistics(
    moments, y, w, bias, gamma, beta, running_mean, running_var, tracked, stats, low, P, epsilon, momentum,
    N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, BIAS: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr,
    TRACK: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write scale, shift, mean and inverse standard deviation of a block of responses, from the moments of y.

    With TRACK 0 the batch's mean and variance are written after them; with 1 they update the running statistics by
    ``momentum``, with 2 by the cumulative average.
    """
    epsilon, momentum = as_float32(epsilon), as_float32(momentum)
    t = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    inside = n < N
    square = (k < M)[:, None] & (k < M)[None, :]
    own = moments + t * ((M + 1) * M)
    sums = tl.load(own + k, mask=k < M, other=0.0)
    C = tl.load(own + (k + 1)[:, None] * M + k[None, :], mask=square, other=0.0)
    positions = tl.zeros((), tl.float32) + P
    sums /= positions
    C = C / positions - sums[:, None] * sums[None, :]
    means = tl.load(y + t * M + k, mask=k < M, other=0.0).to(tl.float32) + sums
    at = (t * M + k)[:, None] * N + n[None, :]
    both = (k < M)[:, None] & inside[None, :]
    rounded = tl.load(w + at, mask=both, other=0.0).to(low.dtype.element_ty)
    W = rounded.to(tl.float32)
    product = tl.dot(C, W, input_precision="tf32x3")
    tl.store(low + at, rounded, mask=both)
    tl.store(stats + (6 * T * N + T * M) + at, product, mask=both)
    tl.store(stats + 6 * T * N + t * M + k, means, mask=k < M)  # every program writes the same
    variance = tl.maximum(tl.sum(W * product, 0), 0.0)
    mean = tl.sum(W * means[:, None], 0)
    _finish(
        stats, bias, gamma, beta, running_mean, running_var, tracked, mean, variance, positions, epsilon, momentum,
        n, t, N, T, BIAS, GAMMA, BETA, TRACK,
    )  # fmt: skip


@triton.jit
def _wide_statistics(
    moments, y, w, bias, gamma, beta, running_mean, running_var, tracked, stats, low, P, epsilon, momentum,
    N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, BIAS: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr,
    TRACK: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """`_statistics` for more filters than fit into a program: BK at a time."""
    epsilon, momentum = as_float32(epsilon), as_float32(momentum)
    t = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = n < N
    own = moments + t * ((M + 1) * M)
    positions = tl.zeros((), tl.float32) + P
    variance = tl.zeros((BN,), tl.float32)
    mean = tl.zeros((BN,), tl.float32)
    for first in range(0, M, BK):
        i = first + tl.arange(0, BK)
        sums_i = tl.load(own + i, mask=i < M, other=0.0) / positions
        product = tl.zeros((BK, BN), tl.float32)
        for other in range(0, M, BK):
            j = other + tl.arange(0, BK)
            sums_j = tl.load(own + j, mask=j < M, other=0.0) / positions
            square = (i < M)[:, None] & (j < M)[None, :]
            C = tl.load(own + (i + 1)[:, None] * M + j[None, :], mask=square, other=0.0)
            C = C / positions - sums_i[:, None] * sums_j[None, :]
            both = (j < M)[:, None] & inside[None, :]
            rounded = tl.load(w + (t * M + j)[:, None] * N + n[None, :], mask=both, other=0.0)
            rounded = rounded.to(low.dtype.element_ty)
            product = tl.dot(C, rounded.to(tl.float32), product, input_precision="tf32x3")
        at = (t * M + i)[:, None] * N + n[None, :]
        both = (i < M)[:, None] & inside[None, :]
        rounded = tl.load(w + at, mask=both, other=0.0).to(low.dtype.element_ty)
        W = rounded.to(tl.float32)
        means = tl.load(y + t * M + i, mask=i < M, other=0.0).to(tl.float32) + sums_i
        tl.store(low + at, rounded, mask=both)
        tl.store(stats + (6 * T * N + T * M) + at, product, mask=both)
        tl.store(stats + 6 * T * N + t * M + i, means, mask=i < M)  # every program writes the same
        variance += tl.sum(W * product, 0)
        mean += tl.sum(W * means[:, None], 0)
    variance = tl.maximum(variance, 0.0)
    _finish(
        stats, bias, gamma, beta, running_mean, running_var, tracked, mean, variance, positions, epsilon, momentum,
        n, t, N, T, BIAS, GAMMA, BETA, TRACK,
    )  # fmt: skip


@triton.jit
def _fixed(
    w, bias, gamma, beta, running_mean, running_var, stats, low, epsilon,
    N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, BIAS: tl.constexpr, GAMMA: tl.constexpr, BETA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write scale, shift, mean (minus the bias) and inverse deviation of fixed statistics, and the rounded weights."""
    epsilon, t = as_float32(epsilon), tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    at = (t * M + m)[:, None] * N + n[None, :]
    both = (m < M)[:, None] & (n < N)[None, :]
    tl.store(low + at, tl.load(w + at, mask=both, other=0.0).to(low.dtype.element_ty), mask=both)
    if tl.program_id(2) == 0:
        mean, rstd = fixed_statistics(running_mean, running_var, bias, epsilon, n, t, N, BIAS)
        store_norm(stats, mean, rstd, gamma, beta, n, t, N, T, GAMMA, BETA)


@triton.jit
def _gradients(
    sums, dws, stats, w, dw, numbers, P, of_sums, sums_stride, of_dws, dws_stride, dws_first,
    N: tl.constexpr, M: tl.constexpr, T: tl.constexpr, FIXED: tl.constexpr, AT_ONCE: tl.constexpr, BK: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Write gradients of weights, γ, β and biases for a block of outputs, and the slopes of `rows.backward_rows`.

    ``sums`` ``[of_sums, sums_stride]`` holds partial sums of h in its first T·N columns, ``dws``
    ``[of_dws, dws_stride]`` those of D in T·M·N columns from ``dws_first`` on.
    """
    t = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    part = tl.arange(0, AT_ONCE)
    inside = n < N
    both = (k < M)[:, None] & inside[None, :]
    at = (t * M + k)[:, None] * N + n[None, :]
    hs = tl.zeros((AT_ONCE, BN), tl.float32)
    Ds = tl.zeros((AT_ONCE, BK, BN), tl.float32)
    for first in range(0, of_sums, AT_ONCE):  # several at once, to overlap their loads
        own = sums + (first + part).to(tl.int64)[:, None] * sums_stride + (t * N + n)[None, :]
        hs += tl.load(own, mask=(first + part < of_sums)[:, None] & inside[None, :], other=0.0)
    for first in range(0, of_dws, AT_ONCE):
        own = dws + dws_first + (first + part).to(tl.int64)[:, None, None] * dws_stride + at[None, :, :]
        Ds += tl.load(own, mask=(first + part < of_dws)[:, None, None] & both[None, :, :], other=0.0)
    h = tl.sum(hs, 0)  # after the loop, since it exchanges data between threads
    D = tl.sum(Ds, 0)
    of = stats + t * N + n
    scale = tl.load(of, mask=inside, other=0.0)
    mean = tl.load(of + 2 * T * N, mask=inside, other=0.0)
    rstd = tl.load(of + 3 * T * N, mask=inside, other=0.0)
    W = tl.load(w + at, mask=both, other=0.0).to(tl.float32)
    s = tl.sum(W * D, 0) - mean * h
    gradient = D * scale[None, :]
    to = numbers + t * N + n
    tl.store(to, s * rstd, mask=inside)
    tl.store(to + T * N, h, mask=inside)
    if FIXED:
        tl.store(to + 2 * T * N, scale * h, mask=inside)
    else:
        U = -scale * h
        V = -0.5 * s * scale * rstd * rstd
        means = tl.load(stats + 6 * T * N + t * M + k, mask=k < M, other=0.0)
        product = tl.load(stats + (6 * T * N + T * M) + at, mask=both, other=0.0)
        gradient += means[:, None] * U[None, :] + product * (2.0 * V)[None, :]
        positions = tl.zeros((), tl.float32) + P
        tl.store(to + 2 * T * N, tl.zeros((BN,), tl.float32), mask=inside)  # a bias before a norm has no effect
        tl.store(to + 3 * T * N, 2.0 * V / positions, mask=inside)
        tl.store(to + 4 * T * N, (U - 2.0 * V * mean) / positions, mask=inside)
    tl.store(dw + at, gradient.to(dw.dtype.element_ty), mask=both)


class Statistics:
    """The launches for a norm of one size: its statistics, of the batch or fixed, and its gradients.

    Args:
        P: Positions.
        M: Filters of a branch.
        T: Branches.
        N: Outputs.
        device: The device of the tensors.
        norm: The settings of the norm; of its tensors only whether they exist.
        bias: Whether a bias precedes the norm.
    """

    def __init__(self, P: int, M: int, T: int, N: int, device: torch.device, norm: Norm, *, bias: bool) -> None:
        self.P, self.M, self.T, self.N, self.fixed = P, M, T, N, norm.fixed
        self.tracks = norm.mean is not None and not norm.fixed
        self.cumulative = self.tracks and norm.momentum is None
        self._gradients_launch: Launch | None = None
        BK = max(16, next_power_of_2(M))
        flags = {"BIAS": bias, "GAMMA": norm.gamma is not None, "BETA": norm.beta is not None}
        sizes = {"N": N, "M": M, "T": T, **flags, "epsilon": norm.eps}
        if self.fixed:
            values = {**sizes, "BM": 32, "BN": 128}
            self._statistics_launch = Launch(
                _fixed, (cdiv(N, 128), T, cdiv(M, 32)), values, {"num_warps": 4, **OPTIONS}
            )
            return
        self._moments_launch = self._launch_moments(device)
        self.parts = self._moments_launch.grid[0]
        track = (2 if self.cumulative else 1) if self.tracks else 0
        at_once = MAX_FILTERS_IN_REGISTERS if has_large_shared_memory(device) else _SIDE
        wide = at_once < M
        values = {**sizes, "P": P, "momentum": norm.momentum or 0.0, "TRACK": track, "BN": _TILE}
        values["BK"] = _SIDE if wide else BK
        options = {"num_warps": 4 if wide else 8, "num_stages": 3, **OPTIONS}
        self._statistics_launch = Launch(
            _wide_statistics if wide else _statistics, (cdiv(N, _TILE), T), values, options
        )

    def _launch_moments(self, device: torch.device) -> Launch:
        P, M, T = self.P, self.M, self.T
        together = T * M <= _SIDE  # reads whole rows; products across branches are dropped at the end
        width = T * M if together else M
        side = min(_SIDE, max(16, next_power_of_2(width)))
        tiles, BM = cdiv(width, side), 4096 // side
        programs = tiles * tiles * (1 if together else T)
        # Enough positions per partial sum that reading them costs more than writing and reading the sum.
        parts = max(1, min(cdiv(P, 4 * max(BM, M)), 2 * multiprocessors(device) // programs))
        share = cdiv(cdiv(P, parts), BM) * BM
        values = {"P": P, "share": share, "M": M, "T": T, "WIDTH": width, "BK": side, "TILES": tiles, "BM": BM}
        grid = (cdiv(P, share), tiles * tiles, 1 if together else T)
        return Launch(_moments, grid, values, {"num_warps": 4, "num_stages": 3, **OPTIONS})

    def __call__(self, y: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        """The statistics that the projection and its backward need, and the weights in the dtype of y.

        Args:
            y: ``[P, T·M]``.
            weight: ``[T·M, N]``, contiguous.
            bias: ``[T, N]``, contiguous, or None.
            norm: The tensors of the norm; tracked running statistics are updated in place.

        Returns:
            One buffer of scale, shift, mean and inverse deviation, and of the batch's mean and variance if they are
            not tracked, each ``[T, N]``, followed by the means of y ``[T, M]`` and its covariances times the weights
            ``[T·M, N]``; and the weights.
        """
        M, T, N, device = self.M, self.T, self.N, y.device
        low = torch.empty(T * M, N, dtype=y.dtype, device=device)
        bias_pointer = low if bias is None else bias
        if self.fixed:
            stats = torch.empty(4 * T * N, dtype=torch.float32, device=device)
            self._statistics_launch(weight, bias_pointer, *(stats if t is None else t for t in norm[:4]), stats, low)
            return stats, low
        parts = torch.empty(self.parts * T * (M + 1) * M, dtype=torch.float32, device=device)
        stats = torch.empty(6 * T * N + T * M + T * M * N, dtype=torch.float32, device=device)
        self._moments_launch(y, parts)
        moments = parts if self.parts == 1 else sum_of_partials(parts, self.parts)
        tensors = norm[:5] if self.tracks else (*norm[:2], None, None, None)
        self._statistics_launch(
            moments, y, weight, bias_pointer, *(stats if t is None else t for t in tensors), stats, low
        )
        if self.cumulative and norm.tracked is not None:
            torch._foreach_add_([norm.tracked], 1)  # can be recorded: unlike add_ it accepts a number
        return stats, low

    def gradients(
        self, stats: Tensor, low: Tensor, sums: Tensor, dws: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Complete the gradients of the parameters.

        Args:
            stats: From the forward pass.
            low: From the forward pass.
            sums: Partial sums of h, ``[parts, T or more, N]``.
            dws: Partial sums of D, ``[parts, T·M, N]``, possibly after other rows: it may be the same tensor.
            dtype: The dtype of the weight gradient.

        Returns:
            The gradient of the weights ``[T·M, N]``; and in float32 ``[5, T·N]`` the gradients of γ, β and biases,
            and the two slopes of `rows.backward_rows`.
        """
        dw = torch.empty(low.shape, dtype=dtype, device=low.device)
        numbers = torch.empty(5, self.T * self.N, dtype=torch.float32, device=low.device)
        if self._gradients_launch is None:
            self._gradients_launch = self._launch_gradients(*sums.shape[:2], *dws.shape[:2])
        self._gradients_launch(sums, dws, stats, low, dw, numbers)
        return dw, numbers

    def _launch_gradients(self, of_sums: int, sums_rows: int, of_dws: int, dws_rows: int) -> Launch:
        M, T, N, BK = self.M, self.T, self.N, max(16, next_power_of_2(self.M))
        tile = _TILE if N > 256 else _TILE // 2  # more programs where there are few outputs
        values = {
            "P": self.P, "of_sums": of_sums, "sums_stride": sums_rows * N, "of_dws": of_dws, "dws_stride": dws_rows * N,
            "dws_first": (dws_rows - T * M) * N, "N": N, "M": M, "T": T, "FIXED": self.fixed,
            "AT_ONCE": _IN_FLIGHT // (BK * tile), "BK": BK, "BN": tile,
        }  # fmt: skip
        return Launch(_gradients, (cdiv(N, tile), T), values, {"num_warps": 8, "num_stages": 2, **OPTIONS})
