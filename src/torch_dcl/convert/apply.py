"""``convert_``: replace the units that a plan selects by DCL layers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor, nn

from torch_dcl.convert.arguments import check_layers
from torch_dcl.convert.fit import MIN_SAMPLES, FitReport, check_values, estimate_seconds, fit_, match_, measure_pace
from torch_dcl.convert.rows import Plan, Row
from torch_dcl.convert.samples import QUICK, Incoming, collect_samples
from torch_dcl.convert.snapshot import all_or_nothing
from torch_dcl.convert.table import count, tabulate
from torch_dcl.convert.trial import Trial
from torch_dcl.convert.units import (
    AbsorbedNorm,
    build,
    copy_flags,
    disable_fast_paths,
    is_removable,
    kind_of,
    layer_weight,
    names_of,
    norm_obstacle,
    obstacle,
    relu_replacement,
    swap,
    unfreeze_norm,
)
from torch_dcl.module import _DCL
from torch_dcl.progress import Bar, error_console
from torch_dcl.stochastic import seed_branches_

__all__ = ["Conversion", "convert_"]

Init = Literal["random", "fit"]
_Unit = tuple[Row, nn.Module, nn.Module | None, nn.Module | None]
"""A row, its layer, its batch norm, and its ReLU if it is removable."""


@dataclass(frozen=True)
class Conversion:
    """The result of ``convert_``. It prints as a table."""

    rows: tuple[Row, ...]
    """The rows of the plan that were converted."""
    fits: dict[str, FitReport]
    """The errors of the fitted layers, by name; empty after a random initialisation."""

    def __str__(self) -> str:
        """One line a layer."""
        if not self.rows:
            return "Nothing was converted: the plan selects no unit."
        head = ["converted", "weights", "after"] + (["error", "low-rank's"] if self.fits else [])
        lines = [head]
        for row in self.rows:
            lines.append([row.name, count(row.weights), count(row.weights_after)])
            if self.fits:
                fit = self.fits[row.name]
                lines[-1] += [f"{fit.error:.4f}", f"{fit.low_rank_error:.4f}"]
        note = "\nerror: ‖z − relu(a)‖² / ‖relu(a)‖² of the layer's output, beside the low-rank layer of equal weights."
        return tabulate(lines, left=1) + (note if self.fits else "")


def convert_(
    model: nn.Module,
    plan: Plan,
    *,
    init: Init,
    match: bool = False,
    calibration: Iterable[Any] | None = None,
    seed: int = 0,
    check: bool = True,
    progress: bool | None = None,
) -> Conversion:
    """Replace the selected units of ``plan`` in ``model``, in place.

    After an error or an interruption no unit is replaced. A DCL layer keeps geometry, dtype, device, memory format,
    training flag and ``requires_grad`` of the old layer. A batch norm after the layer moves into it, as one norm for
    all branches with its own flags (a ``FrozenBatchNorm2d`` into the weights), and an :class:`AbsorbedNorm` replaces
    it. z is positive, so a ReLU after it is a no-op: a ReLU of this layer alone becomes an :class:`AbsorbedReLU`, a
    shared one a :class:`SharedReLU`. A module with several names is replaced once and stays shared. A
    ``nn.TransformerEncoderLayer`` that contains a replaced layer, and its ``nn.TransformerEncoder``, lose their fused
    inference path, which would not call the layer. Create the optimiser after the conversion: an older one holds the
    old parameters.

    Args:
        model: The planned network, or one of the same architecture.
        plan: The plan.
        init: "random" to train from scratch, "fit" to start from the trained weights. There is no default, since
            either is wrong for the other purpose.
        match: Whether "random" uses the scale of the replaced layer, so that z has the mean square of its ReLU's
            output; otherwise the scale of torch's default layer. The draws are the same. If the plan sets no ε, it is
            lowered where the floor of the paper's would be above a fifth of that scale.
        calibration: Batches of inputs for "fit" and ``match``: tensors, tuples that begin with the input, or
            dictionaries of keyword arguments. A few hundred images are enough. Without them the inputs are assumed to
            be white noise, for ``match`` of unit mean square.
        seed: The seed of the fit, and of the branch pairs of the stochastic strategy.
        check: Whether to run the plan's example before and after: once in training mode, once in eval mode without
            gradients. If only the converted network fails, if it still calls a replaced layer, which it holds in a list
            for example, or if it no longer calls the layers of a class, nothing is converted. Flags, buffers and the
            random state are restored. A plan from JSON has no example, and a network on the meta device cannot run:
            neither is checked.
        progress: Whether the passes over calibration data and the fit show their progress on stderr: a bar in a
            terminal, periodic lines elsewhere. None shows it if two seconds or more are expected.

    Returns:
        The converted rows, with the errors of the fit.

    Raises:
        ValueError: an argument out of its range, a plan that does not fit the network, a unit that cannot be
            converted, values that cannot be fitted, or a network that would fail afterwards.
        TypeError: an argument of the wrong kind.
    """
    _check(model, plan, init, match, calibration, seed, progress)
    units = [(row, *_find(model, row)) for row in plan.selected]
    if empty := [row.name for row, module, *_ in units if layer_weight(module).is_meta and (match or init == "fit")]:
        raise ValueError(
            f"{empty[0]!r} is on the meta device and has "
            + ("no scale to match; leave match out" if match else 'no weights to fit; load them, or use init="random"')
        )
    trial = Trial(model, plan.inputs if check and units else None, [module for _, module, *_ in units])
    layers = [_build(row, module, norm) for row, module, norm, _ in units]
    incoming = Incoming({row.name: layer for (row, *_), layer in zip(units, layers, strict=True)})
    samples = {}
    if calibration is not None and units:
        plain = {row.name: module for row, module, _, _ in units}
        on_input = incoming.add if match else None
        samples = collect_samples(model, plain, calibration, seed=seed, on_input=on_input, progress=progress)
    if init == "fit" or match:
        for row, module, norm, _ in units:
            check_values(module, norm, samples.get(row.name), name=repr(row.name), fewest=1 if match else MIN_SAMPLES)
    fits = {}
    with all_or_nothing(model):
        if match:
            for (row, module, norm, _), layer in zip(units, layers, strict=True):
                trained = None if norm is None else unfreeze_norm(norm)
                match_(
                    layer, module, trained, samples.get(row.name), incoming.of(row.name), keep_eps=row.eps is not None
                )
        _swap_units(model, units, layers)
        if layers:
            disable_fast_paths(model)
            seed_branches_(model, seed)
        replaced = {module: row.name for row, module, _, _ in units}
        replaced |= {norm: str(row.norm) for row, _, norm, _ in units if norm is not None}
        new = {module: layer for (_, module, *_), layer in zip(units, layers, strict=True)}
        trial.verify(model, replaced, new)  # before the fit, which may take minutes
        if init == "fit":
            fits = _fit_units(units, layers, samples, seed, progress)
        for (_, module, norm, _), layer in zip(units, layers, strict=True):
            copy_flags(layer, module, norm)
    return Conversion(tuple(row for row, *_ in units), fits)


def _check(
    model: nn.Module, plan: Plan, init: Init, match: bool, calibration: Iterable[Any] | None, seed: int,
    progress: bool | None,
) -> None:  # fmt: skip
    """Refuse wrong arguments."""
    if init not in get_args(Init):
        raise ValueError(f'init must be "random" (train from scratch) or "fit" (start from the weights), got {init!r}')
    if not isinstance(match, bool):
        raise TypeError(f"match must be True or False, got {match!r}")
    if match and init == "fit":
        raise ValueError('match is for init="random"; a fit has the scale of the layer anyway: leave match out')
    if calibration is not None and init != "fit" and not match:
        raise ValueError(
            'calibration is for init="fit" or match=True; a random start at torch\'s own scale looks at no data'
        )
    check_layers(model, "convert_")
    if not isinstance(plan, Plan):
        raise TypeError(
            f"convert_ takes the network and then a Plan, got {type(plan).__name__}; make one with plan(model)"
        )
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be a whole number, got {seed!r}")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must be at least -2**63 and below 2**64, got {seed}")
    if not isinstance(progress, bool | None):
        raise TypeError(f"progress must be True, False or None (where the fit takes long), got {progress!r}")


def _find(model: nn.Module, row: Row) -> tuple[nn.Module, nn.Module | None, nn.Module | None]:
    """The layer and the batch norm of a row, checked against the plan; and the ReLU, if it is removable."""
    other = "the plan was made for another network: plan this one"
    try:
        module = model.get_submodule(row.name)
        norm = None if row.norm is None else model.get_submodule(row.norm)
    except AttributeError as error:
        normed = f" with batch norm {row.norm!r}" if row.norm else ""
        raise ValueError(f"the network has no {row.name!r}{normed}; {other}") from error
    trouble = obstacle(module) or ("" if norm is None else norm_obstacle(norm))
    trouble = trouble or (row.reason if row.status == "refused" else "")
    if trouble:
        raise ValueError(f"{row.name!r} cannot be converted: {trouble}")
    weight: Tensor = module.weight  # type: ignore[assignment]
    shape = (row.out_channels, row.in_channels, *row.kernel)
    if kind_of(module) != row.kind or tuple(weight.shape) != shape:
        actual = f"{kind_of(module)} of {tuple(weight.shape)}"
        raise ValueError(f"{row.name!r} is a {actual}, the plan has a {row.kind} of {shape}; {other}")
    relu = dict(model.named_modules(remove_duplicate=False)).get(row.relu or "")
    return module, norm, relu if is_removable(relu) else None


def _build(row: Row, module: nn.Module, norm: nn.Module | None) -> _DCL:
    """The DCL layer of a row; an error names the row, since a plan may have been edited."""
    try:
        return build(module, widths=row.widths, strategy=row.strategy, eps=row.eps, norm=norm)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{row.name!r} cannot be converted: {error}") from error


def _swap_units(model: nn.Module, units: Sequence[_Unit], layers: Sequence[_DCL]) -> None:
    """Replace every unit by its layer."""
    names = names_of(model)
    relus: dict[nn.Module, nn.Module] = {}
    for (row, module, norm, relu), layer in zip(units, layers, strict=True):
        swap(model, names[module], layer)
        if norm is not None:
            swap(model, names[norm], AbsorbedNorm(layer).train(norm.training))
        if isinstance(relu, nn.ReLU):
            layer.marks_output = bool(row.shares_relu)  # None in a plan that was edited
            relus[relu] = relu_replacement(relu, shared=row.shares_relu)
    for relu, new in relus.items():
        swap(model, names[relu], new)


def _fit_units(
    units: Sequence[_Unit], layers: Sequence[_DCL], samples: Mapping[str, Tensor], seed: int, progress: bool | None
) -> dict[str, FitReport]:
    """Fit every layer to its unit."""
    fits: dict[str, FitReport] = {}
    times = []
    if progress is not False and layers:
        pace = measure_pace(layers[0])
        for (row, _, norm, _), layer in zip(units, layers, strict=True):
            times.append(estimate_seconds(layer, pace, calibrated=row.name in samples, normed=norm is not None))
    is_shown = sum(times) >= QUICK if progress is None else progress
    with Bar(error_console(quiet=not is_shown), len(layers), "layers fitted", expected=sum(times)) as bar:
        for i, ((row, module, norm, _), layer) in enumerate(zip(units, layers, strict=True), 1):
            bar.now(row.name)
            trained = None if norm is None else unfreeze_norm(norm)
            fits[row.name] = fit_(layer, module, trained, samples.get(row.name), seed=seed)
            bar.advance()
            if is_shown:
                bar.expect(sum(times[:i]) / sum(times))
    return fits
