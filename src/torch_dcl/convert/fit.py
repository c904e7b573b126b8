"""Fit a DCL layer to the trained layer that it replaces (`fit_`), or match its scale at random weights (`match_`).

The trained unit computes ``relu(a)`` with ``a = A·x + b``, possibly with a batch norm. A branch is a linear map of a of
rank ``M_t``, so the fit only involves vectors of K2 numbers, whatever the kernel:

- features: the principal components u of a, at unit variance;
- branches: ``pre_t = u·Q_t·W_t + c_t``, fused as in section 3 of the paper, found by `torch_dcl.convert.branches`.

a comes from calibration data, or is assumed normal, with the covariance of `torch_dcl.convert.assumption`. A few
hundred rows say little about hundreds of directions, so the covariance of the data is shrunk towards the assumed one,
the more the fewer rows there are (Ledoit and Wolf, "A well-conditioned estimator for large-dimensional covariance
matrices", 2004).
"""

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from torch_dcl.convert.assumption import TINY, assume, decompose
from torch_dcl.convert.branches import BATCH, STEPS, Branches, Rows, Task, is_polished, relative_error, solve
from torch_dcl.module import _DCL

__all__ = ["FitReport", "check_values", "estimate_seconds", "fit_", "match_", "measure_pace"]

MIN_SAMPLES = 8
BEYOND = 1e6  # the maximum of a trained value in units of the median, and of 1
SHARE = 0.2  # the floor of z in units of its root mean square, as with the paper's ε at torch's default scale
LARGEST = 1e30  # the maximum of a trained value: sums of squares and products of branches must stay finite


class FitReport(NamedTuple):
    """The error of a fitted layer, on held-out data."""

    error: float
    """``‖z - relu(a)‖² / ‖relu(a)‖²`` of the fused output."""
    low_rank_error: float
    """The same for the low-rank layer of equal weights (T = 1, width ΣM), fitted in the same way."""
    eps: float
    """ε of the fitted layer."""


@torch.no_grad()
def fit_(
    layer: _DCL, plain: nn.Module, norm: nn.Module | None = None, samples: Tensor | None = None, *, seed: int = 0
) -> FitReport:
    """Fit ``layer``, in place, to ``plain``, ``norm`` and a ReLU in eval mode.

    ε is set too: the floor ``ε^(1/T)`` becomes 0.05 of the root mean square of relu(a), and ε = 0 for T = 1. Both
    factors of a branch get rows of equal length. A norm in ``layer`` gets the statistics of the branches, and a scale
    and shift that undo them, so that it has no effect in eval and little in training. Without scale or shift the
    running statistics compensate; without running statistics it is exact for batches like the samples.

    Args:
        layer: The DCL layer, of the geometry of ``plain``.
        plain: The trained linear or convolutional layer.
        norm: The batch norm between it and its ReLU. If ``layer`` has no norms, it is folded into the weights.
        samples: Outputs of ``plain`` on real data, ``[N, K2]``, before ``norm``. A quarter of them is held out for the
            report. With None, a is assumed normal, with the running statistics of ``norm``; without a norm the scale of
            the inputs is unknown, so the branches keep the trained bias and the fit holds at any scale.
        seed: The seed of the fit. The global random state is not used.

    Returns:
        The errors on held-out samples, or on fresh draws. If relu(a) is zero throughout, they are relative to a.

    Raises:
        TypeError: a layer or a norm of a kind that cannot be fitted.
        ValueError: layers or samples that do not match, or values that are not finite.
    """
    plain, norm = _check(layer, plain, norm, samples)
    fusion = layer.fusion
    device = _device_of(plain)
    with torch.autocast(device.type, enabled=False):
        generator = torch.Generator(device).manual_seed(seed)
        unit = _Unit.of(plain, norm, samples, device)
        free = fusion.norm is not None or fusion.bias is not None
        scaled = norm is not None and norm.running_var is not None
        task, probe, held = _make_task(unit, samples, generator, free=free, scaled=scaled)
        branches = solve(task, probe, fusion.widths, fusion.strategy == "stochastic", generator)
        _write(layer, branches, task, unit)
        error = low_rank_error = relative_error(branches, held)
        if fusion.branches > 1:
            width = min(sum(fusion.widths), fusion.out_channels)
            low_rank_error = relative_error(solve(task, probe, (width,), False, generator), held)
    return FitReport(error, low_rank_error, fusion.eps)


@torch.no_grad()
def match_(
    layer: _DCL,
    plain: nn.Module,
    norm: nn.Module | None = None,
    samples: Tensor | None = None,
    incoming: Sequence[float] | None = None,
    *,
    keep_eps: bool = False,
) -> None:
    """Rescale a freshly initialised ``layer``, in place: z gets the mean square of the output of ``plain`` and ReLU.

    The random draws are kept; weights, biases and the scales of norms are multiplied by factors. Four or more branches
    fused at once start with the responses of three, and z is smaller (`torch_dcl.fusion.response_spread`). Norms
    without a scale are not changed.

    Args:
        layer: The DCL layer, as initialised.
        plain: The layer that it replaces, trained or not.
        norm: The batch norm between that and its ReLU. If ``layer`` has norms, it alone determines the scale.
        samples: Outputs of ``plain`` on real data, ``[N, K2]``, before ``norm``; None assumes that its inputs are white
            noise of unit mean square.
        incoming: The mean square of every branch's output on the same data; None for 1.
        keep_eps: Whether to keep ε. Otherwise its floor is lowered to a fifth of z's scale if it is above that.

    Raises:
        ValueError: ε is kept, and its floor is above the target root mean square of z.
    """
    fusion = layer.fusion
    seen = samples if fusion.norm is None else None  # a norm undoes the scale of its inputs
    scale = _Unit.of(plain, norm if isinstance(norm, _BatchNorm) else None, seen, _device_of(plain)).scale  # type: ignore[arg-type]
    _, before = fusion.start()
    floor = fusion.eps ** (1 / fusion.fused)
    if keep_eps and floor >= scale:
        raise ValueError(
            f"eps = {fusion.eps:g} keeps z above {floor:.3g}, and the layer replaced has a scale of {scale:.3g}; "
            "plan without eps, and it is chosen to fit"
        )
    if not keep_eps and floor > SHARE * scale:
        fusion.eps = (SHARE * scale) ** fusion.fused
    lean, spread = fusion.start(scale**2)
    if fusion.norm is None:
        squares = incoming or [1.0] * fusion.branches
        for W, square in zip(torch.split(fusion.weight, list(fusion.widths)), squares, strict=True):
            W.mul_(spread / before / math.sqrt(square or 1.0))
        if fusion.bias is not None:
            fusion.bias.fill_(lean * spread)
        return
    for value, parameter in ((spread, fusion.norm.weight), (lean * spread, fusion.norm.bias)):
        if isinstance(parameter, Tensor):
            parameter.fill_(value)


def measure_pace(layer: _DCL) -> float:
    """Seconds per float32 operation on the device that fits this layer, measured with one matrix product."""
    square = torch.ones(1024, 1024, device=_device_of(layer.branch), dtype=torch.float32)
    square @ square  # the first product of a device takes longer
    begin = time.perf_counter()
    float((square @ square)[0, 0])
    return (time.perf_counter() - begin) / 2**31


def estimate_seconds(layer: _DCL, pace: float, *, calibrated: bool, normed: bool) -> float:
    """An estimate of the time of `fit_` at the pace of `measure_pace`, with or without samples and a batch norm.

    The factors were fitted to layers of 512 and 4096 channels on two cores.
    """
    fusion = layer.fusion
    K2, width, inputs = fusion.out_channels, sum(fusion.widths), layer.branch.weight[0].numel()
    rank, solutions = min(K2, inputs), min(fusion.branches, 2)
    # An operation in float64 counts as two.
    operations = 2 * inputs * K2 * (rank + width) + (26 + 26 * calibrated + 120 * normed) * rank**3
    operations += 2 * 8192 * solutions * (K2 * rank + (K2 + rank) * width)
    if not is_polished(fusion.widths, K2):
        return pace * operations
    operations += 4 * STEPS * BATCH * solutions * (K2 * rank + (2 * rank + 3 * K2) * width)
    return pace * operations + 1e-3 * STEPS * solutions  # a step has about sixty calls


def _device_of(plain: nn.Module) -> torch.device:
    """The device of the fit: eigenvectors need float64, which not every device supports."""
    weight: Tensor = plain.weight  # type: ignore[assignment]
    return weight.device if weight.is_cuda else torch.device("cpu")


class _Unit(NamedTuple):
    """The trained unit before its ReLU, including the norm: ``a = weight·x + constant``, in units of ``scale``."""

    weight: Tensor  # [K2, K1·kernel]
    constant: Tensor  # [K2]
    gain: Tensor  # [K2]: a = gain · (output of the plain layer) + offset
    offset: Tensor  # [K2]
    mean: Tensor  # [K2]: of a, without samples
    deviation: Tensor  # [K2]: of a, without samples
    scale: float  # the root mean square of relu(a)

    @staticmethod
    def of(
        plain: nn.Linear | _ConvNd, norm: _BatchNorm | None, samples: Tensor | None, device: torch.device
    ) -> "_Unit":
        A = plain.weight.flatten(1).to(device, torch.float32)
        length = torch.linalg.vector_norm(A, dim=1, dtype=torch.float64)
        zero, one = torch.zeros_like(length), torch.ones_like(length)
        b = zero if plain.bias is None else plain.bias.to(zero)
        mean, deviation, gain, offset = b, length, one, zero
        if norm is not None:
            if norm.running_mean is not None and norm.running_var is not None:
                mean, deviation = norm.running_mean.to(zero), norm.running_var.to(zero).sqrt()
            elif samples is not None:
                mean, deviation = samples.to(zero).mean(0), samples.to(zero).std(0, correction=0)
            gain = (one if norm.weight is None else norm.weight.to(zero)) / (deviation.square() + norm.eps).sqrt()
            offset = (zero if norm.bias is None else norm.bias.to(zero)) - gain * mean
        if samples is None:
            second, alive = _normal_moments(gain * mean + offset, (gain * deviation).abs())
        else:
            a = samples.to(zero) * gain + offset
            second, alive = a.square(), a.relu().square()
        scale = float(alive.mean().sqrt()) or float(second.mean().sqrt()) or 1.0
        values = (gain * b + offset, gain, offset, gain * mean + offset, (gain * deviation).abs())
        constant, gain, offset, mean, deviation = ((value / scale).float() for value in values)
        return _Unit(gain[:, None] * A, constant, gain, offset, mean, deviation, scale)


def _normal_moments(mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
    """The mean squares of n and of relu(n) for normal n."""
    ratio, second = mean / deviation.clamp(min=TINY), mean.square() + deviation.square()
    density = torch.exp(-ratio.square() / 2) / math.sqrt(2 * math.pi)
    return second, second * torch.special.ndtr(ratio) + mean * deviation * density


def _make_task(
    unit: _Unit, samples: Tensor | None, generator: torch.Generator, *, free: bool, scaled: bool
) -> tuple[Task, Rows, Rows]:
    """The task, rows for model selection, and rows for the report; the fit uses neither of the latter two."""
    basis, whiten = assume(unit.weight, unit.deviation, by_channel=scaled)
    if samples is None:
        # Project the mean onto those that some input can produce.
        centre = unit.constant + (unit.mean - unit.constant) @ whiten @ basis
        task = Task(basis, whiten, centre, free, free and scaled)
        return task, task.rows(1024, generator), task.rows(2048, generator)
    a = samples.to(basis) * unit.gain + unit.offset
    a = a[torch.randperm(len(a), generator=generator, device=a.device)]
    probe, held = min(len(a) // 8, 1024), min(len(a) // 4, 4096)
    fit = a[probe + held :]
    centre = fit.mean(0) if free else unit.constant
    x = (fit - centre).double()
    covariance = x.t() @ x / len(x)
    prior = (basis.t() @ basis).double()
    strength = covariance.trace() / prior.trace().clamp(min=TINY)
    prior *= strength
    noise = (x.square().sum(1).square().mean() - covariance.square().sum()) / len(x)
    assumed = float((noise / (covariance - prior).square().sum().clamp(min=TINY)).clamp(0, 1))
    factor = strength.sqrt().float() * basis
    basis, whiten = decompose((1 - assumed) * covariance + assumed * prior)
    choose, report, data = (((part - centre) @ whiten, part) for part in (a[:probe], a[probe : probe + held], fit))
    return Task(basis, whiten, centre, free, free, data, assumed, factor), choose, report


def _write(layer: _DCL, branches: Branches, task: Task, unit: _Unit) -> None:
    """Write the branches to the layer: ``θ_t = (whiten·Q_t)ᵀ·A``, and constants to biases or norms."""
    fusion = layer.fusion
    fusion.eps = branches.floor and max(branches.floor * unit.scale ** len(branches.groups[0]), 1e-300)
    for t in range(fusion.branches):
        rows = slice(sum(fusion.widths[:t]), sum(fusion.widths[: t + 1]))
        theta, weight = layer.branch.weight[rows], fusion.weight[rows]
        Q, W, root = branches.Q[t], branches.W[t], math.sqrt(unit.scale)
        P = task.whiten @ Q
        filters = P.t() @ unit.weight
        # Rows of equal length. A filter of zeros could not train: it keeps its initial values, with weight 0.
        long, wide = filters.norm(dim=1, keepdim=True), W.norm(dim=1, keepdim=True)
        ratio = torch.where((long > 0) & (wide > 0), (wide / long.clamp(min=TINY)).sqrt(), 1.0)
        theta.copy_(torch.where(long > 0, filters * ratio * root, theta.flatten(1).to(filters)).view(theta.shape))
        weight.copy_(torch.where(long > 0, W / ratio * root, 0.0))
        mean = (task.centre - unit.constant) @ P @ W
        constant = branches.c[t] - mean if task.free else torch.zeros_like(mean)
        if fusion.norm is not None:
            seen = Q if task.data is None else task.data[0] @ Q / math.sqrt(len(task.data[0]))
            statistics = (unit.scale * mean, unit.scale**2 * (seen @ W).double().square().sum(0))
            _set_norm(fusion.norm, t, *statistics, unit.scale * constant)  # type: ignore[arg-type]
            constant = torch.zeros_like(constant)
        if fusion.bias is not None:
            fusion.bias[t].copy_(unit.scale * constant)
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"the fitted {name} leaves the range of {tensor.dtype}; convert the network in float32")


def _set_norm(norm: _BatchNorm, t: int, mean: Tensor, variance: Tensor, constant: Tensor) -> None:
    """Let the batch norm of branch t, with these statistics, add ``constant`` in eval, and do nothing else."""
    own = slice(t * len(mean), (t + 1) * len(mean))
    if norm.affine:
        norm.weight[own].copy_((variance + norm.eps).sqrt())
    else:
        variance = torch.full_like(variance, 1 - norm.eps)
    if norm.bias is None:
        mean = -constant
    else:
        norm.bias[own].copy_(constant + mean)
    if norm.running_mean is not None and norm.running_var is not None:
        norm.running_mean[own].copy_(mean)
        norm.running_var[own].copy_(variance)


def _check(
    layer: _DCL, plain: nn.Module, norm: nn.Module | None, samples: Tensor | None
) -> tuple[nn.Linear | _ConvNd, _BatchNorm | None]:
    """Raise an error with the remedy for arguments that cannot be fitted."""
    if not isinstance(plain, nn.Linear | _ConvNd) or isinstance(plain, _ConvTransposeNd):
        raise TypeError(f"a {type(plain).__name__} has no DCL layer to start; use Linear, Conv1d, Conv2d or Conv3d")
    for each in (norm, layer.fusion.norm):
        if each is not None and not isinstance(each, _BatchNorm):
            raise TypeError(f"a {type(each).__name__} cannot be fitted; use a batch norm or none")
    if layer.branch_activation is not None:
        raise ValueError("an activation after stage 1 leaves nothing linear to fit; build without branch_activation")
    K2, theta = layer.fusion.out_channels, layer.branch.weight
    have, want = tuple(plain.weight.shape), (K2, *theta.shape[1:])
    if have != want:
        raise ValueError(f"the weight is {have}, the DCL layer stands for one of {want}; build it with like(plain)")
    if isinstance(norm, _BatchNorm) and norm.num_features != K2:
        raise ValueError(f"the batch norm has {norm.num_features} channels, the layer {K2}; pass the one behind it")
    if norm is not None and layer.fusion.norm is None and layer.fusion.bias is None:
        raise ValueError("a batch norm that is folded in needs a bias for its constant; build with bias=True")
    if samples is not None and (samples.dim() != 2 or samples.shape[1] != K2):
        raise ValueError(f"samples must be [N, {K2}], got {list(samples.shape)}; pass outputs of this layer")
    check_values(plain, norm, samples)
    return plain, norm  # type: ignore[return-value]


def check_values(
    plain: nn.Module,
    norm: nn.Module | None = None,
    samples: Tensor | None = None,
    *,
    name: str = "the layer",
    fewest: int = MIN_SAMPLES,
) -> None:
    """Check the values of a unit that is to be fitted: of a layer, its batch norm, and the layer's outputs.

    Raises:
        ValueError: a value that is not finite, a negative variance, one value that dominates all others, or fewer than
            the ``fewest`` samples.
    """
    if samples is not None and len(samples) < fewest:
        raise ValueError(
            f"{name} cannot be fitted: the calibration data give {len(samples)} of its outputs, and a fit needs at "
            f"least {fewest}; use more calibration data, or none"
        )
    tensors = {part: getattr(plain, part, None) for part in ("weight", "bias")}
    parts = ("weight", "bias", "running_mean", "running_var")
    tensors |= {f"{part} of the batch norm": getattr(norm, part, None) for part in parts}
    for what, tensor in {**tensors, "samples": samples}.items():
        if tensor is not None and tensor.numel() and (trouble := _trouble(what, tensor.detach())):
            raise ValueError(f"{name} cannot be fitted: {what} {trouble}; check the network")


def _trouble(what: str, tensor: Tensor) -> str:
    """What is wrong with the values of a tensor; empty if nothing is."""
    low, high = (float(end) for end in tensor.aminmax())  # NaN if any value is NaN
    if not math.isfinite(low + high):
        return f"holds {low if math.isfinite(high) else high}"
    if what.startswith("running_var"):
        if low < 0:
            return f"holds the negative variance {low:.3g}"
        tensor, high = tensor.sqrt(), math.sqrt(high)
    if what.startswith("bias"):
        tensor, low = tensor.clamp(min=0), 0.0  # a large negative bias only disables a channel
    largest = max(-low, high)
    if largest > LARGEST:
        return f"holds {largest:.3g}, and a fit can start from values up to {LARGEST:g}"
    if largest > BEYOND and what != "samples":
        median = float(tensor[tensor != 0].abs().median())
        if largest > BEYOND * median:
            return f"holds {largest:.3g} where the median is {median:.3g}, so that nothing else would count"
    return ""
