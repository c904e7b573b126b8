"""The selection of kernels for stage 2, once for each size: see `Plan`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_dcl.kernels import launch
from torch_dcl.kernels.launch import Norm
from torch_dcl.kernels.launcher import Launch, cached

if TYPE_CHECKING:
    from torch_dcl.kernels import exchange, moments

__all__ = ["Plan", "Saved", "plan_for", "statistics_for"]

Saved = tuple[Tensor | None, ...]
"""What forward saves for backward: the weights in the compute dtype, and the responses or the norm's statistics."""


class Plan:
    """Stage 2 for branch outputs of one shape, dtype and layout, with one set of settings: kernels and layouts.

    Args:
        shape: The shape of the branch outputs.
        stride: Their strides.
        dtype: Their dtype, which is also that of z.
        device: Their device.
        N: Outputs.
        weight_dtype: The dtype of the weights.
        bias_dtype: The dtype of the biases, or None.
        channels: The channel dimension.
        T: Branches.
        eps: ε.
        pairs: Whether to average over pairs instead of fusing all branches.
        keep: Whether to save the responses for backward; False with a norm.
        norm: The norm with dtypes in place of its tensors, or None.
        tf32: Whether float32 products may use TF32.
    """

    def __init__(
        self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device, N: int,
        weight_dtype: torch.dtype, bias_dtype: torch.dtype | None, channels: int, T: int, eps: float, pairs: bool,
        keep: bool, norm: Norm | None, tf32: bool,
    ) -> None:  # fmt: skip
        from torch_dcl.kernels import project  # noqa: PLC0415

        self.channels, self.T, self.eps, self.pairs, self.keep, self.dtype = channels, T, eps, pairs, keep, dtype
        width = shape[channels]
        P = 1
        for size in (*shape[:channels], *shape[channels + 1 :]):
            P *= size
        self.P, self.width, self.M = P, width, width // T
        self.rounds = weight_dtype is not dtype
        """Whether the weights have another dtype, as under autocast."""
        self.last = channels == len(shape) - 1
        """Whether the channels are the last dimension, as in a linear layer, which has only one layout."""
        self.rows = launch.channels_last_strides(shape, channels)
        """The strides of the branch outputs in channels_last, which the kernels require."""
        self.needs_transpose = P > 0 and not launch.strides_match(shape, stride, self.rows)
        """Whether the branch outputs have another layout: they are transposed, and z is transposed back."""
        self.z_shape = (*shape[:channels], N, *shape[channels + 1 :])
        self.z_stride = launch.channels_last_strides(self.z_shape, channels)
        self.statistics = None
        kind = 0
        if norm is not None:
            self.statistics = _statistics(P, self.M, T, N, dtype, device, weight_dtype, bias_dtype, norm)
            kind, bias_dtype = 2 - norm.fixed, torch.float32
        self._inference: Launch | None = None
        self.projection = project.projection(P, self.M, T, N, dtype, device, eps, pairs, bias_dtype, kind, tf32)

    def forward(
        self, y: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm | None, *, learns: bool = True
    ) -> tuple[Tensor, Saved]:
        """z, and what backward needs if ``learns``; the device of y must be the current one."""
        rows = launch.transpose(y, self.channels, True, y.dtype) if self.needs_transpose else y
        z = torch.empty_strided(self.z_shape, self.z_stride, dtype=y.dtype, device=y.device)
        saved: Saved
        if norm is not None and norm.fixed and not learns:
            saved = self._infer(rows, weight.contiguous(), None if bias is None else bias.contiguous(), z, norm)
        elif self.statistics is not None and norm is not None:
            stats, low = self.statistics(rows, weight.contiguous(), None if bias is None else bias.contiguous(), norm)
            self.projection(rows, low, stats, z)
            saved = (low, stats)
        else:
            saved = self._project(rows, weight.contiguous(), bias, z, learns)
        if self.needs_transpose and not self.last:
            z = launch.transpose(z, self.channels, False, z.dtype)
        return z, saved

    def _infer(self, y: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, norm: Norm) -> Saved:
        """Write z with a norm of fixed statistics. Without gradients nothing is saved."""
        if self._inference is None:
            self._inference = self.projection.launch_inference(norm, bias=bias is not None)
        if self.P:
            self._inference(y, weight, y if bias is None else bias, z, *(y if t is None else t for t in norm[:4]))
        return None, None

    def _project(self, y: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, learns: bool) -> Saved:
        """Write z; return the weights in the dtype of y, and the responses if they are saved."""
        from torch_dcl.kernels import project  # noqa: PLC0415
        from torch_dcl.kernels import saved_responses as responses  # noqa: PLC0415

        hopper = None if self.keep else launch.hopper_kernels_for(self, y, weight)
        low: Tensor | None = weight
        rounded = None
        if self.rounds:
            products = self.keep and not responses.uses_one_kernel(self.P, self.T, self.dtype)
            if not self.P or products or (hopper is not None and learns):
                weight = low = weight.to(y.dtype)
            else:  # the kernel rounds them
                low = rounded = torch.empty_like(weight, dtype=y.dtype) if learns else None
        if self.keep:
            rows, into = project.as_rows(y, self.width), project.as_rows(z, weight.shape[1])
            pre = responses.forward(rows, weight, bias, into, self.T, self.eps, self.pairs, rounded)
            return low, pre
        if hopper is not None:
            hopper.project_forward(project.as_rows(y, self.width), weight, bias, z, self.eps)
        else:
            self.projection(y, weight, bias, z, rounded)
        return low, None

    def backward(
        self, grad: Tensor, y: Tensor, bias: Tensor | None, saved: Sequence[Tensor | None], dtype: torch.dtype,
        group: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """The gradients of branch outputs, weights and biases; with a norm, the results of `moments` for the latter.

        Args:
            grad: The gradient of z.
            y: The branch outputs.
            bias: As given to `forward`.
            saved: The second result of `forward`.
            dtype: The dtype of the gradients of weights and biases.
            group: The process group that shares the norm's statistics, if there are several processes.
        """
        if grad.stride() != self.z_stride:
            grad = grad.contiguous() if self.last else launch.transpose(grad, self.channels, True, grad.dtype)
        rows = launch.transpose(y, self.channels, True, y.dtype) if self.needs_transpose else y
        low, other = saved
        assert low is not None
        numbers = dbias = None
        if self.statistics is not None:
            dy, dweight, numbers = self._normed(grad, rows, low, other, dtype, group)
        else:
            dy, dweight, dbias = self._gradients(grad, rows, low, bias, other, dtype)
        if self.needs_transpose and not self.last:
            dy = launch.transpose(dy, self.channels, False, dy.dtype)
        return dy, dweight, dbias, numbers

    def _normed(
        self, grad: Tensor, y: Tensor, low: Tensor, stats: Tensor | None, dtype: torch.dtype, group: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        from torch_dcl.kernels import exchange, project  # noqa: PLC0415

        projection, statistics = self.projection, self.statistics
        assert statistics is not None
        assert stats is not None
        dpre, parts, dy = projection.response_gradients(grad, y, low, stats)
        dws = (
            parts
            if projection.accumulates
            else project.weight_gradient(project.as_rows(y, self.width), dpre, torch.float32)[None]
        )
        if isinstance(statistics, exchange.SharedStatistics):
            centred = dy is not None
            dweight, numbers = statistics.gradients(stats, low, parts, dws, dtype, group, centred=centred)
        else:
            dweight, numbers = statistics.gradients(stats, low, parts, dws, dtype)
        if dy is None:
            dy = projection.branch_gradient(grad, y, low, stats, numbers)
        elif not statistics.fixed:
            projection.add_statistics_gradient(dy, y, low, stats, numbers)
        return dy, dweight, numbers

    def _gradients(
        self, grad: Tensor, y: Tensor, low: Tensor, bias: Tensor | None, pre: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        hopper = None if self.keep else launch.hopper_kernels_for(self, y, low, backward=True)
        if pre is None and hopper is None:
            return self.projection.gradients(grad, y, low, bias, dtype)
        from torch_dcl.kernels import project  # noqa: PLC0415

        matrix, flat = project.as_rows(y, self.width), project.as_rows(grad, low.shape[1])
        if pre is not None:
            from torch_dcl.kernels import saved_responses as responses  # noqa: PLC0415

            found = responses.backward(flat, matrix, low, bias, pre, self.T, self.eps, self.pairs, dtype)
        else:
            found = hopper.project_backward(flat, matrix, low, bias, self.eps, dtype)  # type: ignore[union-attr]
        dy, dweight, dbias = found
        return dy if matrix is y else dy.as_strided(y.shape, y.stride()), dweight, dbias


_plan = cached(Plan)


def plan_for(
    y: Tensor, weight: Tensor, bias: Tensor | None, channels: int, T: int, eps: float, pairs: bool, keep: bool,
    norm: Norm | None,
) -> Plan:  # fmt: skip
    """The plan for these arguments, cached by their sizes, dtypes, layouts and settings."""
    tf32 = y.dtype is not torch.float32 or torch.backends.cuda.matmul.allow_tf32
    return _plan(
        y.shape, y.stride(), y.dtype, y.device, weight.shape[1], weight.dtype, None if bias is None else bias.dtype,
        channels, T, eps, pairs, keep, None if norm is None else _kind_of(norm), tf32,
    )  # fmt: skip


def statistics_for(
    y: Tensor, weight: Tensor, bias: Tensor | None, T: int, norm: Norm
) -> "moments.Statistics | exchange.SharedStatistics":
    """The part of a plan that computes the statistics of a norm, for y ``[P, T·M]``; cached too."""
    return _statistics(
        y.shape[0], y.shape[1] // T, T, weight.shape[1], y.dtype, y.device, weight.dtype,
        None if bias is None else bias.dtype, _kind_of(norm),
    )  # fmt: skip


def _kind_of(norm: Norm) -> Norm:
    """The norm with dtypes in place of its tensors, and without its process group: the number of ranks suffices."""
    return Norm(*(None if t is None else t.dtype for t in norm[:5]), *norm[5:9])  # type: ignore[arg-type, call-arg]


@cached
def _statistics(
    P: int, M: int, T: int, N: int, dtype: torch.dtype, device: torch.device, weight_dtype: torch.dtype,
    bias_dtype: torch.dtype | None, norm: Norm,
) -> "moments.Statistics | exchange.SharedStatistics":  # fmt: skip
    from torch_dcl.kernels import exchange, moments  # noqa: PLC0415

    del dtype, weight_dtype  # part of the cache key
    make = moments.Statistics if norm.ranks == 1 or norm.fixed else exchange.SharedStatistics
    return make(P, M, T, N, device, norm, bias=bias_dtype is not None)
