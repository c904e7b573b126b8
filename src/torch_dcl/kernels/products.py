"""Matrix products of half types whose result may be float32, which is what they are added up in anyway."""

import torch
from torch import Tensor

from torch_dcl.kernels.launcher import is_traced

__all__ = ["product_", "products"]


def product_(out: Tensor, a: Tensor, b: Tensor) -> None:
    """``a · b`` of two matrices of one type, written into a matrix of that type or of float32."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:  # only a GPU has such a product
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def products(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a_t · b_t`` of every t, of ``[T, M, P]`` and ``[T, P, N]``, in their type or in float32."""
    if a.dtype == dtype:
        return torch.bmm(a, b)
    if is_traced(a):
        if not a.is_cuda:
            return torch.bmm(a.to(dtype), b.to(dtype))
        return torch.stack([torch.mm(a[t], b[t], out_dtype=dtype) for t in range(len(a))])
    out = torch.empty(len(a), a.shape[1], b.shape[2], dtype=dtype, device=a.device)
    for t in range(len(a)):  # up to torch 2.11 FlopCounterMode stumbles over one bmm of two types
        product_(out[t], a[t], b[t])
    return out
