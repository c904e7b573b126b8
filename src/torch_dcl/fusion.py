"""The second stage of a DCL module, concept fusion: its widths and its initialisation."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from torch_dcl.functional import check_eps, draw_pair
from torch_dcl.kernels import dispatch
from torch_dcl.kernels.dispatch import Norm, Stage, fuse_branches, fuse_pairs, project_and_fuse
from torch_dcl.norms import called_plainly, join_norms, kernel_norm, make_part, normalise

__all__ = ["MAX_BRANCHES", "ConceptFusion", "Strategy", "branch_widths", "response_spread"]

MAX_BRANCHES = 8
LEAN = 0.5
"""Initial mean of a pre-activation in units of its standard deviation, for two or more fused branches."""
Strategy = Literal["deterministic", "stochastic"]


def branch_widths(
    out_channels: int,
    *,
    branches: int = 2,
    ratio: float = 0.25,
    width: int | Sequence[int] | None = None,
    round_to: int = 8,
) -> tuple[int, ...]:
    """The number of filters M(t) of each branch.

    Args:
        out_channels: K2 of the layer.
        branches: T, from 1 to 8.
        ratio: Filters of one branch as a fraction of ``out_channels``, used when ``width`` is None.
        width: The exact number of filters: one for all branches, or one for each.
        round_to: ``ratio`` is rounded to a multiple of this, at least one multiple, never above ``out_channels``.

    Raises:
        TypeError: a number of the wrong kind.
        ValueError: a number out of its range.
    """
    if isinstance(branches, bool) or not isinstance(branches, int):
        raise TypeError(f"branches must be a whole number, got {branches!r}")
    if not 1 <= branches <= MAX_BRANCHES:
        raise ValueError(f"branches must be from 1 to {MAX_BRANCHES}, got {branches}")
    if width is not None:
        if isinstance(width, str) or not isinstance(width, (int, Sequence)):
            raise TypeError(f"width must be a whole number, or one for each branch, got {width!r}")
        widths = (width,) * branches if isinstance(width, int) else tuple(width)
        if len(widths) != branches:
            raise ValueError(
                f"width names {len(widths)} branches, but branches = {branches}; give one number or {branches}"
            )
        for w in widths:
            if isinstance(w, bool) or not isinstance(w, int):
                raise TypeError(f"width must be whole numbers, got {w!r}")
            if not 1 <= w <= out_channels:
                raise ValueError(
                    f"width {w} does not fit a layer of {out_channels} output channels; choose from 1 to {out_channels}"
                )
        return widths
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)):
        raise TypeError(f"ratio must be a number above 0 and at most 1, got {ratio!r}")
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio must be above 0 and at most 1, got {ratio!r}; the paper uses 1/5 and 1/4")
    if isinstance(round_to, bool) or not isinstance(round_to, int) or round_to < 1:
        raise ValueError(f"round_to must be a whole number of at least 1, got {round_to!r}")
    rounded = max(1, math.floor(ratio * out_channels / round_to + 0.5)) * round_to
    return (min(rounded, out_channels),) * branches


class ConceptFusion(nn.Module):
    """The second stage: every branch is projected to K2 channels, rectified, and the branches are fused.

    Args:
        widths: M(t), the channels of each branch.
        out_channels: K2.
        spatial: The number of spatial dimensions after the channels; with 0 the channels are last, as in ``nn.Linear``.
        strategy: "deterministic" fuses all branches; "stochastic" one drawn pair in training, all pairs in eval.
        eps: ε of the fusion; None takes the paper's.
        norm_layer: Called with T·K2, returns the norm of the pre-activations, whose channels are ordered by branch. Its
            scale holds the initial standard deviation; a norm without a scale starts at unit variance.
        bias: Whether each branch has a bias.
        device: Where the parameters live.
        dtype: Of which type they are.
    """

    def __init__(
        self,
        widths: tuple[int, ...],
        out_channels: int,
        *,
        spatial: int,
        strategy: Strategy = "deterministic",
        eps: float | None = None,
        norm_layer: Callable[[int], nn.Module] | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        T = len(widths)
        if strategy not in get_args(Strategy):
            raise ValueError(f'strategy must be "deterministic" or "stochastic", got {strategy!r}')
        if strategy == "stochastic" and T < 3:
            raise ValueError(f"the stochastic strategy draws a pair from three or more branches, got branches = {T}")
        self.widths, self.out_channels, self.spatial, self.strategy = widths, out_channels, spatial, strategy
        self.eps = check_eps(eps, self.fused)
        self.weight = nn.Parameter(torch.empty(sum(widths), out_channels, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(T, out_channels, device=device, dtype=dtype)) if bias else None
        self.norm = make_part("norm_layer", norm_layer, "nn.BatchNorm2d", T * out_channels, device=device, dtype=dtype)
        self.advanced = False  # whether the step has been advanced, see torch_dcl.stochastic
        if strategy == "stochastic":
            self.register_buffer("key", torch.zeros(3, dtype=torch.int64, device=device))
            self.register_buffer("active", torch.zeros(2, dtype=torch.int64, device=device))
        self.reset_parameters()

    key: Tensor
    active: Tensor

    @property
    def branches(self) -> int:
        """T."""
        return len(self.widths)

    @property
    def fused(self) -> int:
        """The number of branches fused at once: all of them, or the two of a pair."""
        return 2 if self.strategy == "stochastic" else self.branches

    def __getstate__(self) -> dict[str, Any]:
        """As in torch, but whoever advances the step does not advance that of a copy."""
        return {**self.__dict__, "advanced": False}

    def get_extra_state(self) -> Tensor:
        """ε for the state dict: float64 on the CPU whatever the parameters are, so that no cast rounds it."""
        return torch.tensor(self.eps, dtype=torch.float64, device="cpu")

    def set_extra_state(self, state: Any) -> None:
        """Adopt the ε of a state dict.

        Raises:
            TypeError: not a tensor of one real number.
            ValueError: a number that ε cannot be.
        """
        if not isinstance(state, Tensor) or state.numel() != 1 or not state.is_floating_point() or state.is_meta:
            got = type(state).__name__
            if isinstance(state, Tensor):
                got += f" of shape {tuple(state.shape)}, {state.dtype}, {state.device}"
            raise TypeError(f"eps in a state dict must be a tensor of one real number, got a {got}")
        self.eps = check_eps(state.item(), self.fused)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """As in torch, but a state dict without ε (an older one) leaves ε unchanged, and errors name an invalid ε."""
        name = f"{prefix}_extra_state"
        if isinstance(self.norm, _BatchNorm):
            join_norms(state_dict, f"{prefix}norm.", self.branches)
        try:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
        except (TypeError, ValueError) as error:
            error_msgs.append(f"{name}: {error}")
        if name in missing_keys:
            missing_keys.remove(name)

    def reset_parameters(self, incoming: float = 1.0) -> None:
        """Initialise so that z has the variance of the ReLU layer that the module replaces, for unit inputs.

        With a bias or a norm, the mean of the pre-activations is `LEAN` standard deviations above zero: more branches
        are active together, and less of the gradient comes from the steep region near zero.

        Args:
            incoming: The mean square of a branch's output y; 1 without an activation.
        """
        lean, spread = self.start()
        for W, M in zip(torch.split(self.weight, list(self.widths)), self.widths, strict=True):
            bound = math.sqrt(3 / (M * incoming)) * (spread if self.norm is None else 1.0)
            nn.init.uniform_(W.detach(), -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        reset(self.norm)
        gamma = getattr(self.norm, "weight", None)
        if isinstance(gamma, Tensor):
            nn.init.constant_(gamma, spread)
        if lean and isinstance(self._shift, Tensor):
            nn.init.constant_(self._shift, lean * spread)
        if self.strategy == "stochastic":
            self.key.zero_()
            self.active.copy_(draw_pair(self.key, self.branches))

    @property
    def _shift(self) -> Tensor | None:
        """The biases of the pre-activations: the fusion's own, or the norm's."""
        return self.bias if self.norm is None else getattr(self.norm, "bias", None)

    def start(self, mean_square: float | None = None) -> tuple[float, float]:
        """The initial distribution of the pre-activations: mean in units of the standard deviation, and the latter.

        Args:
            mean_square: The mean square that z should have; None matches the variance of a ReLU layer.
        """
        lean = LEAN if self.fused > 1 and isinstance(self._shift, Tensor) else 0.0
        # torch's default layer keeps a third of its input's mean square; a normalised one has unit variance.
        return lean, response_spread(self.fused, self.eps, 1 / 3 if self.norm is None else 1.0, lean, mean_square)

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """Split the output of stage 1 into branches."""
        return torch.split(y, list(self.widths), dim=-1 - self.spatial)

    def respond(self, y: Tensor) -> list[Tensor]:
        """All T pre-activations, from the output of stage 1."""
        pre = self._project(y, self.weight, self.bias, self.widths)
        return pre if self.norm is None else normalise(self.norm, pre, y.dim() - 1 - self.spatial)

    def _project(self, y: Tensor, weight: Tensor, bias: Tensor | None, widths: Sequence[int]) -> list[Tensor]:
        """The pre-activations of some branches, before the norm."""
        biases = (None,) * len(widths) if bias is None else bias.unbind(0)
        ys = torch.split(y, list(widths), y.dim() - 1 - self.spatial)
        branches = zip(ys, torch.split(weight, list(widths)), biases, widths, strict=True)
        return [_project(y_t, W_t, b_t, M, self.spatial) for y_t, W_t, b_t, M in branches]

    def forward(self, y: Tensor) -> Tensor:
        """Fuse all branches in the output of stage 1."""
        stochastic = self.strategy == "stochastic"
        if stochastic and self.training:
            pre = self.respond(y)
            return fuse_branches([_pick(pre, index) for index in self.active.unbind(0)], self.eps)
        norm = None
        if self.norm is None or (norm := self._norm_of_parts(y)) is not None:
            return self._project_and_fuse(y, self.weight, self.bias, self.widths, norm, pairs=stochastic)
        pre = self.respond(y)
        return fuse_pairs(pre, self.eps) if stochastic else fuse_branches(pre, self.eps)

    def _norm_of_parts(self, y: Tensor) -> Norm | None:
        """The norm for `dispatch.runs_in_parts`; None if it has to be called."""
        if not dispatch.runs_in_parts(y, self.weight, self.widths, 1) or y.dim() != self.spatial + 2:
            return None
        norm = kernel_norm(self.norm) if self.norm is not None and called_plainly(self.norm) else None
        return norm if norm is not None and norm.ranks == 1 else None

    def _project_and_fuse(
        self, y: Tensor, weight: Tensor, bias: Tensor | None, widths: Sequence[int], norm: Norm | None = None,
        *, pairs: bool,
    ) -> Tensor:  # fmt: skip
        """Stage 2, as one operation if the positions are the rows of a matrix, else projection and fusion in turn."""
        channels = y.dim() - 1 - self.spatial
        if self._is_matrix(y, weight, widths, pairs=pairs) or dispatch.runs_in_parts(y, weight, widths, channels):
            keep = self.spatial == 0
            return project_and_fuse(y, weight, bias, widths, self.eps, channels, pairs=pairs, keep=keep, norm=norm)
        pre = self._project(y, weight, bias, widths)
        return fuse_pairs(pre, self.eps) if pairs else fuse_branches(pre, self.eps)

    def _is_matrix(self, y: Tensor, weight: Tensor, widths: Sequence[int], *, pairs: bool) -> bool:
        """Whether the positions of y are the rows of a matrix, or a kernel transposes y to such a layout."""
        channels = y.dim() - 1 - self.spatial
        if self.spatial == 0 or (y.stride(channels) == 1 and sum(widths) > 1):
            return True
        return dispatch.should_transpose(y, channels) and dispatch.can_project(y, weight, widths, pairs=pairs)

    def with_stage(self, x: Tensor, theta: Tensor, stage: Stage) -> Tensor | None:
        """Both stages as one operation, for a plain stage 1 with these filters; None if the kernels do not support it.

        In training with the stochastic strategy the filters are those of the two active branches.
        """
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        widths, stochastic = self.widths, self.strategy == "stochastic"
        if stochastic and self.training:
            weight, bias, widths = self.gather(weight), self.active_bias(), widths[:2]
        norm = None
        if self.norm is not None and (norm := kernel_norm(self.norm)) is None:
            return None
        pairs = stochastic and not self.training
        return dispatch.unit(x, theta, stage, weight, bias, widths, self.eps, norm, pairs=pairs)

    def active_bias(self) -> Tensor | None:
        """The biases of the two active branches."""
        return None if self.bias is None else self.bias.index_select(0, self.active)

    @property
    def in_kernels(self) -> bool:
        """Whether kernels support the fused branches: two or three of one width."""
        fused = 2 if self.strategy == "stochastic" and self.training else self.branches
        return fused in (2, 3) and len(set(self.widths)) == 1

    @property
    def gathers(self) -> bool:
        """Whether the drawn pair can be computed alone: branches of one width, and no norm over all branches."""
        return len(set(self.widths)) == 1 and self.norm is None

    def gather(self, parameter: Tensor) -> Tensor:
        """The rows of a stage 1 or stage 2 parameter that belong to the two active branches."""
        return parameter.view(self.branches, -1, *parameter.shape[1:]).index_select(0, self.active).flatten(0, 1)

    def forward_pair(self, y: Tensor) -> Tensor:
        """Fuse the output of a stage 1 that computed the two active branches alone."""
        return self._project_and_fuse(y, self.gather(self.weight), self.active_bias(), self.widths[:2], pairs=False)

    def extra_repr(self) -> str:
        """The arguments, for printing."""
        widths = str(self.widths[0]) if len(set(self.widths)) == 1 else str(self.widths)
        arguments = [f"{self.branches} x {widths} -> {self.out_channels}", f"eps={self.eps:.3g}"]
        if self.strategy != "deterministic":
            arguments.append(f"strategy={self.strategy}")
        if self.bias is None:
            arguments.append("bias=False")
        return ", ".join(arguments)


def _project(y: Tensor, W: Tensor, bias: Tensor | None, M: int, spatial: int) -> Tensor:
    """W^T·y at every position: a linear map of the M channels, in the memory format of y."""
    weight, channels = W.t(), y.dim() - 1 - spatial
    if spatial == 0:
        return F.linear(y, weight, bias)
    if y.stride(channels) == 1 and M > 1:  # channels_last: the positions are the rows of one matrix product
        by_position = y.movedim(channels, -1)
        v = F.linear(by_position.reshape(-1, M), weight, bias)
        return v.view(*by_position.shape[:-1], -1).movedim(-1, channels)
    conv: Callable[..., Tensor] = (F.conv1d, F.conv2d, F.conv3d)[spatial - 1]
    return conv(y, weight.reshape(*weight.shape, *(1,) * spatial), bias)


def _pick(responses: Sequence[Tensor], index: Tensor) -> Tensor:
    """``responses[index]`` for an index on the device, without a copy that would lose channels_last."""
    picked = responses[0]
    for t, response in enumerate(responses[1:], 1):
        picked = torch.where(index == t, response, picked)
    return picked


def reset(module: nn.Module | None) -> None:
    """Reset the parameters of a norm or an activation, if it has any."""
    reset_parameters = getattr(module, "reset_parameters", None)
    if callable(reset_parameters):
        reset_parameters()


@lru_cache(maxsize=64)
def response_spread(T: int, eps: float, variance: float, lean: float = 0.0, mean_square: float | None = None) -> float:
    """The standard deviation of the T pre-activations for which z has the variance of a ReLU layer's output.

    The pre-activations are assumed independent and normal. For more than three branches the result for three is used:
    all T are active so rarely that only rare, large responses could reach the variance. z then varies less (0.66, 0.45
    and 0.30 of the variance for T = 4, 5 and 6 at the default lean).

    Args:
        T: The number of branches fused at once.
        eps: ε of the fusion.
        variance: The variance of the pre-activations of the ReLU layer that is replaced.
        lean: The mean of the pre-activations, in units of their standard deviation.
        mean_square: The mean square of z to match instead of a variance; above its minimum ``eps ** (2 / T)``.
    """
    if mean_square is not None:
        variance = 2 * mean_square  # the mean square of relu(n), n ~ N(0, variance), is half of it
    if T == 1:
        extra = 0.0 if mean_square is None else eps * math.sqrt(2 / math.pi)  # z = relu(n) + ε
        return math.sqrt(extra**2 + variance - (0.0 if mean_square is None else 2 * eps**2)) - extra
    if T > 3:
        return response_spread(3, eps ** (3 / T), variance, lean, mean_square)
    target = variance * (1 - 1 / math.pi) / 2  # the variance of relu(n), n ~ N(0, variance)
    t = np.linspace(-9.0, 2.0, 48)  # log of a positive response: the integrand is smooth, so few points suffice
    one = np.exp(t - (np.exp(t) - lean) ** 2 / 2)
    density, product = one / one.sum(), np.exp(t)
    joint = density
    for _ in range(T - 1):
        joint, product = np.multiply.outer(joint, density), np.multiply.outer(product, np.exp(t))
    alive = (0.5 * math.erfc(-lean / math.sqrt(2))) ** T
    dead: float = eps ** (1 / T)

    def excess(spread: float) -> float:
        z = (product * spread**T + eps) ** (1 / T)
        mean = alive * float((joint * z).sum()) + (1 - alive) * dead
        square = alive * float((joint * z * z).sum()) + (1 - alive) * dead**2
        return square - mean**2 - target if mean_square is None else square - mean_square

    low, high = 0.0, 64.0 * math.sqrt(variance)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) < 0 else (low, middle)
    return (low + high) / 2
