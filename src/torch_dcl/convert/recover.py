"""``recover_``: train a converted network until it gives the outputs of the plain one again."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from torch_dcl.convert.arguments import check_layers
from torch_dcl.convert.samples import length, output_tensors, run_batch
from torch_dcl.convert.snapshot import Snapshot, restore_content, uncompiled
from torch_dcl.convert.table import tabulate
from torch_dcl.convert.trace import evaluating, without_fast_paths
from torch_dcl.convert.units import AbsorbedNorm
from torch_dcl.convert.wrappers import OwnNames, bare, is_sharded
from torch_dcl.module import _DCL
from torch_dcl.progress import Bar, error_console

__all__ = ["Recovery", "recover_"]

WARM_UP = 0.1  # the fraction of the training in which the learning rate rises
TINY = 1e-30  # sums of squares up to here are 0, and nothing is relative to them
HeldOut = Iterable[Any] | Callable[[nn.Module], float]
_Pair = tuple[_DCL, nn.Module]
"""A DCL layer, and the teacher's module before the ReLU in its place."""


@dataclass(frozen=True)
class Recovery:
    """The result of ``recover_``. It prints as a table."""

    errors: tuple[float, ...]
    """The relative squared error of the network's outputs in every epoch: the mean over batches, before their steps."""
    scores: tuple[float, ...]
    """The scores of the network on the held-out data, before the first epoch and after each; empty without them."""
    teacher: float | None
    """The score of the teacher."""
    max_drop: float | None
    """The drop to stop at."""

    @property
    def drop(self) -> float | None:
        """The score of the teacher minus that of the network; None without held-out data."""
        return None if self.teacher is None else self.teacher - self.scores[-1]

    @property
    def is_recovered(self) -> bool | None:
        """Whether the drop is at most ``max_drop``; None if none was asked for."""
        return None if self.drop is None or self.max_drop is None else self.drop <= self.max_drop

    def __str__(self) -> str:
        """One line an epoch."""
        lines = [["", "output error"]] + [[f"epoch {i}", f"{error:.4f}"] for i, error in enumerate(self.errors, 1)]
        notes = ["output error: ‖output − teacher's‖² / ‖teacher's‖², before each step, on average over an epoch."]
        if self.teacher is not None:
            lines.insert(1, ["before", ""])
            form = f".{2 if abs(self.teacher) > 1 else 4}f"  # percent, or a fraction
            columns = [("score", "drop"), *((f"{s:{form}}", f"{self.teacher - s:{form}}") for s in self.scores)]
            lines = [[*line, *column] for line, column in zip(lines, columns, strict=True)]
            notes.append(f"The teacher's score is {self.teacher:{form}}.")
        if self.max_drop is not None:
            reached = "reached" if self.is_recovered else "not reached"
            notes[-1] += f" A drop of at most {self.max_drop:g} was {reached}."
        return "\n".join((tabulate(lines, left=1), *notes))


@torch.inference_mode(False)  # also enables gradients, where the caller has disabled them
def recover_(
    model: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Any],
    *,
    held_out: HeldOut | None = None,
    max_drop: float | None = None,
    epochs: int = 10,
    lr: float = 0.01,
    progress: bool | None = None,
) -> Recovery:
    """Train a converted network, in place, to give the outputs of the plain one. No labels are needed.

    The loss is the relative squared error of the network's outputs, plus the mean of those of its DCL layers, each
    compared with the teacher's output after the ReLU there. Both networks run in eval mode, so without dropout, except
    for the batch norms in DCL layers: they use and track the statistics of the batches, unless they are frozen (none of
    their parameters requires a gradient).

    Adafactor trains all parameters that require a gradient, with steps relative to their size. The rate rises to ``lr``
    times the root of the loss at the start, so that little is changed where little is wrong, in the first tenth of the
    training, and then falls to 0, both linearly. Mixed precision is that of your ``torch.autocast``, preferably in
    bfloat16. After an error the network is as it was before; after an interruption it is as trained so far.

    Args:
        model: The converted network.
        teacher: The network before its conversion: ``copy.deepcopy(model)``, made before ``convert_``.
        batches: Batches of inputs, in the forms that ``convert_`` takes for calibration. They are iterated over in
            every epoch; if they have a method ``epoch``, as :class:`torch_dcl.data.Batches` has, it is called with the
            epoch, from 0.
        held_out: Batches of inputs and labels, for a score in percent of correct classes, without labels that are no
            class, such as -100; or a function of a network that returns its score, the higher the better. They decide
            when training stops, so take other data for the result that you report.
        max_drop: Stop when the score is at most this far below the teacher's, without training if it is at the start.
            None trains all epochs.
        epochs: The largest number of passes over the batches.
        lr: The change of a parameter in a step, relative to its root mean square, for a loss of 1 at the start; at most
            1.
        progress: Whether to show progress on stderr: a bar in a terminal, periodic lines elsewhere. None is True.

    Returns:
        Errors and scores of all epochs.

    Raises:
        ValueError: an argument out of its range, a teacher that is not the network before its conversion, batches that
            are used up, outputs that cannot be compared, or an error that is not finite.
        TypeError: an argument of the wrong kind.
    """
    _check(model, teacher, batches, held_out, max_drop, epochs, lr, progress)
    model, teacher = bare(model), bare(teacher)
    parameters = _trainable(model, teacher)
    pairs = _pairs(model, teacher)
    optimizer = torch.optim.Adafactor(parameters, lr)
    errors: list[float] = []
    scores: list[float] = []
    goal = scale = None
    total: Tensor | float
    with (
        _undone_by_errors(model, parameters), evaluating(teacher), evaluating(model),
        uncompiled(), without_fast_paths(),
    ):  # fmt: skip
        if held_out is not None:
            goal, scores = _score(teacher, held_out), [_score(model, held_out)]
        _train_parts(model)
        with Bar(error_console(quiet=progress is False), epochs, "epochs") as bar:
            for epoch in range(epochs):
                if goal is not None and max_drop is not None and goal - scores[-1] <= max_drop:
                    break
                bar.now(f"score {scores[-1]:.4g}, the teacher's {goal:.4g}" if scores else "")
                total, count = 0.0, 0
                for count, done, batch in _steps(batches, epoch):
                    loss, error = _compare(model, teacher, pairs, batch, f"batch {count} of epoch {epoch + 1}")
                    scale = _scale(loss.detach()) if scale is None else scale
                    optimizer.param_groups[0]["lr"] = lr * scale * _rate((epoch + done) / epochs)
                    optimizer.zero_grad()
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()  # type: ignore[no-untyped-call]
                    total = total + error.detach()
                    bar.reach(epoch + done)
                errors.append(float(total) / count)
                if not math.isfinite(errors[-1]) or not all(p.isfinite().all() for p in parameters):
                    raise ValueError(
                        f"the outputs or weights are not finite in epoch {epoch + 1}; check the batches, or lower "
                        f"lr = {lr:g}"
                    )
                if held_out is not None:
                    scores.append(_score(model, held_out))
    return Recovery(tuple(errors), tuple(scores), goal, max_drop)


def _check(
    model: nn.Module, teacher: nn.Module, batches: object, held_out: object, max_drop: float | None, epochs: int,
    lr: float, progress: bool | None,
) -> None:  # fmt: skip
    """Refuse wrong arguments."""
    if isinstance(model, nn.Module) and any(isinstance(m, DistributedDataParallel) for m in model.modules()):
        raise TypeError(
            "recover_ trains in one process and averages no gradients; recover the network in one of them, before it "
            "is wrapped in DistributedDataParallel (it is in .module)"
        )
    check_layers(bare(model) if isinstance(model, nn.Module) else model, "recover_")
    if not isinstance(teacher, nn.Module):
        raise TypeError(f"the teacher is the network before its conversion, an nn.Module; got {teacher!r}")
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise ValueError(f"epochs must be a whole number of at least 1, got {epochs!r}")
    for name, data, passes in (("batches", batches, epochs), ("held_out", held_out, 2)):
        if name == "held_out" and (data is None or callable(data)):
            continue
        if not isinstance(data, Iterable):
            raise TypeError(f"{name} must be a list of batches or a loader, got {data!r}")
        if isinstance(data, Iterator) and passes > 1:
            raise ValueError(f"{name} can be iterated over only once, and is needed several times; pass a list")
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 < lr <= 1:
        raise ValueError(f"lr must be a number above 0 and at most 1, got {lr!r}")
    if max_drop is not None and (
        isinstance(max_drop, bool) or not isinstance(max_drop, int | float) or not 0 <= max_drop < math.inf
    ):
        raise ValueError(f"max_drop must be a number of at least 0, in units of the score, got {max_drop!r}")
    if max_drop is not None and held_out is None:
        raise ValueError("max_drop is a difference of scores; pass held_out to measure them on, or leave max_drop out")
    if not isinstance(progress, bool | None):
        raise TypeError(f"progress must be True, False or None, got {progress!r}")


def _pairs(model: nn.Module, teacher: nn.Module) -> list[_Pair]:
    """Every DCL layer and the teacher's module before the ReLU in its place."""
    ours, theirs = OwnNames(model), OwnNames(teacher).modules
    layers = {module: names[0] for module, names in ours.of.items() if isinstance(module, _DCL)}
    if not layers:
        is_swapped = any(isinstance(module, _DCL) for module in theirs.values())
        remedy = "the converted network comes first, then the teacher" if is_swapped else "convert it first"
        raise ValueError(f"the network has no DCL layer; {remedy}")
    norms = {m.layers[0]: name for name, m in ours.modules.items() if isinstance(m, AbsorbedNorm) and m.layers}
    pairs: list[_Pair] = []
    for layer, name in layers.items():
        if layer.fusion.norm is not None and layer not in norms:
            continue  # model files of earlier versions may not say where the norm was
        place = norms.get(layer, name)
        if place not in theirs:
            raise ValueError(
                f"the teacher has no {place!r}, so it is not the network before its conversion: keep "
                "copy.deepcopy(model) before convert_, or load the plain network"
            )
        pairs.append((layer, theirs[place]))
    if pairs and all(isinstance(plain, _DCL | AbsorbedNorm) for _, plain in pairs):
        raise ValueError("the teacher is converted, too: it must be a copy.deepcopy(model), made before convert_")
    return pairs


def _trainable(model: nn.Module, teacher: nn.Module) -> list[nn.Parameter]:
    """The parameters that require a gradient."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise ValueError("no parameter of the network requires a gradient; unfreeze those to train")
    shared = {id(p) for p in teacher.parameters()}
    for name, parameter in parameters.items():
        if id(parameter) in shared:
            raise ValueError(
                f"the teacher shares {name!r} with the network, and would change with it: it must be a "
                "copy.deepcopy(model), made before convert_"
            )
        if is_sharded(parameter):
            raise ValueError(f"{name!r} is sharded, and recover_ trains in one process; recover before fully_shard")
        if parameter.dtype in {torch.float16, torch.bfloat16}:
            raise ValueError(
                f"{name!r} is {parameter.dtype}, which loses small steps; train model.float() under torch.autocast, "
                "and cast it afterwards"
            )
    return list(parameters.values())


def _steps(batches: Iterable[Any], epoch: int) -> Iterator[tuple[int, float, Any]]:
    """The batches of an epoch, numbered from 1, with the fraction of the epoch at each; 0.5 where it is unknown."""
    batched: Any = _as_batches(batches)
    total, count = length(batched), 0
    for count, batch in enumerate(batched.epoch(epoch) if hasattr(batched, "epoch") else batched, 1):
        yield count, min(1.0, (count - 0.5) / total) if total else 0.5, batch
    if not count:
        raise ValueError("batches hold no batch; pass a list of batches, or a loader that is not used up")


def _as_batches(given: Iterable[Any]) -> Iterable[Any]:
    """One tensor or dictionary is one batch."""
    return [given] if isinstance(given, Tensor | Mapping) else given


def _train_parts(model: nn.Module) -> None:
    """Set to training mode batch norms of DCL layers, except frozen ones, and what is the same in both modes."""
    for module in model.modules():
        if type(module) in {nn.RNN, nn.LSTM, nn.GRU} and not module.dropout:
            module.training = True  # cuDNN has no backward of its eval mode
        if isinstance(module, _DCL) and isinstance(norm := module.fusion.norm, _BatchNorm):
            own = list(norm.parameters())
            norm.training = not own or any(p.requires_grad for p in own)


def _scale(loss: Tensor) -> float:
    """The largest learning rate in units of ``lr``, from the loss at the start."""
    if not loss.isfinite():
        raise ValueError(
            "the loss is not finite before the first step: the networks return inf or NaN, as masked scores do, or "
            "overflow. Wrap both in modules that return what to compare, and prefer bfloat16 to float16"
        )
    return min(1.0, float(loss.sqrt()))


def _rate(done: float) -> float:
    """The learning rate in units of the largest, at a fraction of the training."""
    return min(done / WARM_UP, (1 - done) / (1 - WARM_UP))


def _compare(
    model: nn.Module, teacher: nn.Module, pairs: Sequence[_Pair], batch: Any, name: str
) -> tuple[Tensor, Tensor]:
    """The loss of a batch, and the relative squared error of the outputs in it."""
    targets: dict[nn.Module, list[Tensor]] = {layer: [] for layer, _ in pairs}
    units: list[tuple[Tensor, Tensor]] = []

    def keep(layer: nn.Module, module: nn.Module, inputs: object, a: Tensor) -> None:
        del module, inputs
        targets[layer].append(F.relu(a))

    def judge(layer: nn.Module, inputs: object, z: Tensor) -> None:
        del inputs
        if targets[layer]:
            # Now, because what follows may work in place; and no more, because a checkpointed forward must save the
            # same tensors when it is repeated without this hook.
            units.append(_difference(z, targets[layer].pop(0)))

    with ExitStack() as hooks:
        for layer, plain in pairs:
            hooks.callback(plain.register_forward_hook(partial(keep, layer)).remove)
            hooks.callback(layer.register_forward_hook(judge).remove)
        with torch.no_grad():
            wanted = output_tensors(run_batch(teacher, batch, name))
        found = output_tensors(run_batch(model, batch, name))
    shapes = [[tuple(t.shape) for t in outputs] for outputs in (found, wanted)]
    if shapes[0] != shapes[1] or not any(t.numel() for t in found):
        raise ValueError(
            f"the outputs cannot be compared: the network returns tensors of {shapes[0]}, the teacher of {shapes[1]} "
            f"({name}). Wrap both in modules that return what to compare, floating-point tensors of the same shapes"
        )
    error = _relative_error([_difference(*both) for both in zip(found, wanted, strict=True)])
    of_units = [_relative_error([unit]).to(error.device) for unit in units]
    return error + sum(of_units, torch.zeros_like(error)) / max(len(units), 1), error


def _difference(found: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """``found − wanted`` and ``wanted``, in float32 and without nesting."""
    found, wanted = (t.values() if t.is_nested else t for t in (found, wanted.to(found.device)))
    return found.float() - wanted.float(), wanted.float()


def _relative_error(differences: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """‖found − wanted‖² / ‖wanted‖² over all tensors; 0 where only zeros are wanted, as of a layer that is dead."""
    squares = [torch.stack([t.square().sum() for t in pair]).to(differences[0][0].device) for pair in differences]
    sums = torch.stack(squares).sum(0)
    return torch.where(sums[1] <= TINY, 0.0, sums[0] / sums[1].clamp(min=TINY))


@torch.no_grad()
def _score(network: nn.Module, held_out: HeldOut) -> float:
    """The score of a network on held-out data."""
    with evaluating(network):
        score = float(held_out(network)) if callable(held_out) else _accuracy(network, held_out)
    if not math.isfinite(score):
        raise ValueError(f"the score must be a finite number, and held_out gave {score}")
    return score


def _accuracy(network: nn.Module, batches: Iterable[Any]) -> float:
    """The percentage of correct classes."""
    correct: Tensor | int = 0
    count: Tensor | int = 0
    for number, batch in enumerate(_as_batches(batches), 1):
        outputs = output_tensors(run_batch(network, batch, f"held-out batch {number}"))
        labels = batch[1] if isinstance(batch, tuple | list) and len(batch) > 1 else None
        classes = outputs[0].argmax(1) if outputs and outputs[0].dim() > 1 else torch.empty(0)
        if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.shape != classes.shape:
            raise ValueError(
                "held_out must hold batches of inputs and labels, and the network return class scores [N, classes, …] "
                "of these; for another score pass a function: held_out=lambda network: …"
            )
        labels = labels.to(classes.device)
        is_class = (labels >= 0) & (labels < outputs[0].shape[1])  # not where a loss would ignore it: −100, 255
        correct, count = correct + (classes == labels).sum(), count + is_class.sum()
    if not count:
        raise ValueError("held_out holds no labels; pass a list of batches, or a loader that is not used up")
    return 100 * int(correct) / int(count)


@contextmanager
def _undone_by_errors(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Clear the gradients. After an error, but not after an interruption, restore the network and them."""
    before, content = Snapshot(model), {p: p.detach().clone() for p in parameters}
    try:
        try:
            yield
        finally:
            for parameter in parameters:
                parameter.grad = None
    except Exception:
        before.restore()
        restore_content(content)
        raise
