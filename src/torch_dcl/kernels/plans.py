"""Which kernels compute stage 2 of one size, decided once: see `Plan`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_dcl.kernels import launch
from torch_dcl.kernels.launch import Norm
from torch_dcl.kernels.launcher import Launch, kept

if TYPE_CHECKING:
    from torch_dcl.kernels import exchange, moments

__all__ = ["Known", "Plan", "plan_for", "statistics_for"]

Known = tuple[Tensor | None, ...]
"""What a forward pass leaves for the backward pass: the weights as they were computed with, and two more."""


class Plan:
    """Stage 2 for branch outputs of one shape, type and layout, with one set of settings: what runs, and where to.

    Args:
        shape: Of the branch outputs.
        stride: Theirs.
        dtype: Theirs, which is that of z.
        device: Where.
        N: Outputs.
        of_weight: The type of the weights.
        of_bias: That of the biases, or None.
        channels: The dimension of the channels.
        T: Branches.
        eps: ε.
        pairs: Whether to take the mean over pairs instead of fusing all.
        keep: Whether to keep the responses for the backward pass; not behind a norm.
        norm: With types in the place of tensors, or None.
        tf32: Whether products of float32 may be of TF32.
    """

    def __init__(
        self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device, N: int,
        of_weight: torch.dtype, of_bias: torch.dtype | None, channels: int, T: int, eps: float, pairs: bool, keep: bool,
        norm: Norm | None, tf32: bool,
    ) -> None:  # fmt: skip
        from torch_dcl.kernels import project  # noqa: PLC0415

        self.channels, self.T, self.eps, self.pairs, self.keep, self.dtype = channels, T, eps, pairs, keep, dtype
        width = shape[channels]
        P = 1
        for size in (*shape[:channels], *shape[channels + 1 :]):
            P *= size
        self.P, self.width, self.M = P, width, width // T
        self.rounds = of_weight is not dtype
        """Whether weights are of another type, as they are under autocast; that of the norm's tensors is a part of what
        tells plans apart."""
        self.last = channels == len(shape) - 1
        """Whether the channels are the last dimension, as in a linear layer, so that there is one layout."""
        self.rows = launch.room_for(shape, channels)
        """The strides of branch outputs that have their channels last in memory, as kernels want them."""
        self.turned = P > 0 and not launch.lies_as(shape, stride, self.rows)
        """Whether the branch outputs lie otherwise, so that they are transposed, and z back."""
        self.z_shape = (*shape[:channels], N, *shape[channels + 1 :])
        self.z_stride = launch.room_for(self.z_shape, channels)
        self.statistics = None
        kind = 0
        if norm is not None:
            self.statistics = _statistics(P, self.M, T, N, dtype, device, of_weight, of_bias, norm)
            kind, of_bias = 2 - norm.fixed, torch.float32
        self._inference: Launch | None = None
        self.projection = project.projection(P, self.M, T, N, dtype, device, eps, pairs, of_bias, kind, tf32)

    def forward(
        self, y: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm | None, *, learns: bool = True
    ) -> tuple[Tensor, Known]:
        """z, and what backward wants if anything learns; the device of y must be the current one."""
        rows = launch.turn(y, self.channels, True, y.dtype) if self.turned else y
        z = torch.empty_strided(self.z_shape, self.z_stride, dtype=y.dtype, device=y.device)
        known: Known
        if norm is not None and norm.fixed and not learns:
            known = self._infer(rows, weight.contiguous(), None if bias is None else bias.contiguous(), z, norm)
        elif self.statistics is not None and norm is not None:
            about, low = self.statistics(rows, weight.contiguous(), None if bias is None else bias.contiguous(), norm)
            self.projection(rows, low, about, z)
            known = (low, about)
        else:
            known = self._project(rows, weight.contiguous(), bias, z, learns)
        if self.turned and not self.last:
            z = launch.turn(z, self.channels, False, z.dtype)
        return z, known

    def _infer(self, y: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, norm: Norm) -> Known:
        """Write z behind a norm of fixed statistics; there is nothing to know, for nothing learns."""
        if self._inference is None:
            self._inference = self.projection.launch_inference(norm, bias=bias is not None)
        if self.P:
            self._inference(y, weight, y if bias is None else bias, z, *(y if t is None else t for t in norm[:4]))
        return None, None

    def _project(self, y: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, learns: bool) -> Known:
        """Write z; give the weights in the type of y, and the responses if they are kept."""
        from torch_dcl.kernels import kept as responses  # noqa: PLC0415
        from torch_dcl.kernels import project  # noqa: PLC0415

        hopper = None if self.keep else launch.takes_hopper(self, y, weight)
        low: Tensor | None = weight
        rounded = None
        if self.rounds:
            if hopper is not None or not self.P or (self.keep and not responses.in_one(self.P, self.T, self.dtype)):
                weight = low = weight.to(y.dtype)
            else:  # a kernel rounds them on its way
                low = rounded = torch.empty_like(weight, dtype=y.dtype) if learns else None
        if self.keep:
            rows, into = project.as_rows(y, self.width), project.as_rows(z, weight.shape[1])
            pre = responses.kept_forward(rows, weight, bias, into, self.T, self.eps, self.pairs, rounded)
            return low, pre
        if hopper is not None:
            hopper.project_forward(project.as_rows(y, self.width), weight, bias, z, self.eps)
        else:
            self.projection(y, weight, bias, z, rounded)
        return low, None

    def backward(
        self, grad: Tensor, y: Tensor, bias: Tensor | None, known: Sequence[Tensor | None], dtype: torch.dtype,
        group: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """The gradients of branch outputs, weights and biases; behind a norm all that `moments` gives instead of these.

        Args:
            grad: Of z.
            y: The branch outputs.
            bias: As given to the forward pass.
            known: From the forward pass.
            dtype: What gradients of weights and biases are computed in.
            group: The processes whose gradients go through the same statistics, if there are several.
        """
        if grad.stride() != self.z_stride:
            grad = grad.contiguous() if self.last else launch.turn(grad, self.channels, True, grad.dtype)
        rows = launch.turn(y, self.channels, True, y.dtype) if self.turned else y
        low, other = known
        assert low is not None
        numbers = dbias = None
        if self.statistics is not None:
            dy, dweight, numbers = self._normed(grad, rows, low, other, dtype, group)
        else:
            dy, dweight, dbias = self._gradients(grad, rows, low, bias, other, dtype)
        if self.turned and not self.last:
            dy = launch.turn(dy, self.channels, False, dy.dtype)
        return dy, dweight, dbias, numbers

    def _normed(
        self, grad: Tensor, y: Tensor, low: Tensor, about: Tensor | None, dtype: torch.dtype, group: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        from torch_dcl.kernels import exchange, project  # noqa: PLC0415

        projection, statistics = self.projection, self.statistics
        assert statistics is not None
        assert about is not None
        dpre, parts, dy = projection.response_gradients(grad, y, low, about)
        dws = (
            parts
            if projection.inside
            else project.weight_gradient(project.as_rows(y, self.width), dpre, torch.float32)[None]
        )
        if isinstance(statistics, exchange.SharedStatistics):
            around = dy is not None
            dweight, numbers = statistics.gradients(about, low, parts, dws, dtype, group, around=around)
        else:
            dweight, numbers = statistics.gradients(about, low, parts, dws, dtype)
        if dy is None:
            dy = projection.by_rows(grad, y, low, about, numbers)
        elif not statistics.fixed:
            projection.add_through_statistics(dy, y, low, about, numbers)
        return dy, dweight, numbers

    def _gradients(
        self, grad: Tensor, y: Tensor, low: Tensor, bias: Tensor | None, pre: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        hopper = None if self.keep else launch.takes_hopper(self, y, low)
        if pre is None and hopper is None:
            return self.projection.gradients(grad, y, low, bias, dtype)
        from torch_dcl.kernels import project  # noqa: PLC0415

        matrix, flat = project.as_rows(y, self.width), project.as_rows(grad, low.shape[1])
        if pre is not None:
            from torch_dcl.kernels import kept as responses  # noqa: PLC0415

            found = responses.kept_backward(flat, matrix, low, bias, pre, self.T, self.eps, self.pairs, dtype)
        else:
            found = hopper.project_backward(flat, matrix, low, bias, self.eps, dtype)  # type: ignore[union-attr]
        dy, dweight, dbias = found
        return dy if matrix is y else dy.as_strided(y.shape, y.stride()), dweight, dbias


_plan = kept(Plan)


def plan_for(
    y: Tensor, weight: Tensor, bias: Tensor | None, channels: int, T: int, eps: float, pairs: bool, keep: bool,
    norm: Norm | None,
) -> Plan:  # fmt: skip
    """The plan for these, made once for all that have their sizes, types, layouts and settings."""
    tf32 = y.dtype is not torch.float32 or torch.backends.cuda.matmul.allow_tf32
    return _plan(
        y.shape, y.stride(), y.dtype, y.device, weight.shape[1], weight.dtype, None if bias is None else bias.dtype,
        channels, T, eps, pairs, keep, None if norm is None else _kind_of(norm), tf32,
    )  # fmt: skip


def statistics_for(
    y: Tensor, weight: Tensor, bias: Tensor | None, T: int, norm: Norm
) -> "moments.Statistics | exchange.SharedStatistics":
    """The part of a plan that computes the statistics of a norm, made once as well, for y ``[P, T·M]``."""
    return _statistics(
        y.shape[0], y.shape[1] // T, T, weight.shape[1], y.dtype, y.device, weight.dtype,
        None if bias is None else bias.dtype, _kind_of(norm),
    )  # fmt: skip


def _kind_of(norm: Norm) -> Norm:
    """A norm with types in the place of its tensors, and without the processes: how many there are is enough."""
    return Norm(*(None if t is None else t.dtype for t in norm[:5]), *norm[5:9])  # type: ignore[arg-type, call-arg]


@kept
def _statistics(
    P: int, M: int, T: int, N: int, dtype: torch.dtype, device: torch.device, of_weight: torch.dtype,
    of_bias: torch.dtype | None, norm: Norm,
) -> "moments.Statistics | exchange.SharedStatistics":  # fmt: skip
    from torch_dcl.kernels import exchange, moments  # noqa: PLC0415

    del dtype, of_weight  # a part of what tells launches apart
    make = moments.Statistics if norm.ranks == 1 or norm.fixed else exchange.SharedStatistics
    return make(P, M, T, N, device, norm, bias=of_bias is not None)
