"""Batch norms that are fixed to their statistics, as part of the weights and biases in front of them: in one launch."""

from collections.abc import Iterable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from torch_dcl.kernels.arithmetic import OPTIONS
from torch_dcl.kernels.sizes import cdiv

__all__ = ["fold"]

_ROWS, _COLUMNS = 32, 128


@triton.jit
def _value(at, n, inside, otherwise):
    """A number for each output in float32; ``otherwise`` where there are none."""
    if at is not None:
        value = tl.load(at + n, mask=inside, other=1.0).to(tl.float32)
    else:
        value = tl.zeros(n.shape, tl.float32) + otherwise
    return value


@triton.jit
def _fold(
    weight, bias, gammas, betas, means, variances, epsilons, out, out_bias, N, M, BM: tl.constexpr, BN: tl.constexpr
):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    t = tl.program_id(1)
    inside = n < N
    for k in tl.static_range(len(means)):
        if t == k:
            scale = _value(gammas[k], n, inside, 1.0)
            scale /= tl.sqrt_rn(_value(variances[k], n, inside, 1.0) + epsilons[k])
            if tl.program_id(2) == 0:
                own = tl.zeros((BN,), tl.float32)
                if bias is not None:
                    own = tl.load(bias + k * N + n, mask=inside, other=0.0).to(tl.float32)
                shift = _value(betas[k], n, inside, 0.0) + (own - _value(means[k], n, inside, 0.0)) * scale
                tl.store(out_bias + k * N + n, shift.to(out_bias.dtype.element_ty), mask=inside)
            at = (k * M + m)[:, None].to(tl.int64) * N + n[None, :]
            both = (m < M)[:, None] & inside[None, :]
            scaled = tl.load(weight + at, mask=both, other=0.0).to(tl.float32) * scale[None, :]
            tl.store(out + at, scaled.to(out.dtype.element_ty), mask=both)


def fold(weight: Tensor, bias: Tensor | None, norms: Sequence[_BatchNorm], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weights ``[T·M, N]`` and biases ``[T, N]`` of a type, with the norms of the T branches in them."""
    T, N = len(norms), weight.shape[1]
    M = len(weight) // T
    out = torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
    out_bias = torch.empty(T, N, dtype=dtype, device=weight.device)
    _fold[(cdiv(N, _COLUMNS), T, cdiv(M, _ROWS))](
        weight.contiguous(), None if bias is None else bias.contiguous(),
        _dense(norm.weight for norm in norms), _dense(norm.bias for norm in norms),
        _dense(norm.running_mean for norm in norms), _dense(norm.running_var for norm in norms),
        tuple(norm.eps for norm in norms), out, out_bias, N, M, BM=_ROWS, BN=_COLUMNS, **OPTIONS,
    )  # fmt: skip
    return out, out_bias


def _dense(values: Iterable[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(None if value is None else value.contiguous() for value in values)
