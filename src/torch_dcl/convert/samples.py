"""Collect outputs of layers while calibration data runs through a network."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from torch_dcl.convert.snapshot import restored, uncompiled, undone
from torch_dcl.convert.trace import evaluating, without_fast_paths
from torch_dcl.module import _DCL
from torch_dcl.progress import Bar, error_console

__all__ = ["QUICK", "Incoming", "collect_samples", "length", "output_tensors", "run_batch"]

QUICK = 2.0  # seconds that a conversion may take without showing its progress


@torch.no_grad()
def collect_samples(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    calibration: Iterable[Any],
    *,
    limit: int = 4096,
    seed: int = 0,
    on_input: Callable[[str, Tensor], None] | None = None,
    progress: bool | None = False,
) -> dict[str, Tensor]:
    """Outputs of the ``layers`` on calibration data, at positions sampled uniformly from all batches.

    The model runs in eval mode. Its flags, and what its forward changes in it, are restored.

    Args:
        model: The network.
        layers: The linear and convolutional layers to sample, by name.
        calibration: Batches: tensors, tuples or lists that begin with the input, or dictionaries of keyword arguments.
            They are moved to the device of the model. One tensor or dictionary is one batch.
        limit: The maximum number of rows per layer, over all batches.
        seed: The seed of the sampling. The global random state is not used.
        on_input: Called with the name and the input of a layer whenever it runs.
        progress: Whether to show progress; None shows it if it is expected to take two seconds or more.

    Returns:
        For each name a float32 tensor ``[rows, K2]``.

    Raises:
        ValueError: there is no batch, or a layer is never called.
    """
    kept: dict[str, tuple[Tensor, Tensor]] = {}
    generator = torch.Generator().manual_seed(seed)

    def add_hook(name: str, layer: nn.Module) -> Any:
        def hook(module: nn.Module, inputs: Any, named: dict[str, Any], output: Tensor) -> None:
            if on_input is not None:
                x = inputs[0] if inputs else named["input"]
                on_input(name, x.values() if x.is_nested else x)
            output = output.values() if output.is_nested else output
            spatial = module.weight.dim() - 2  # type: ignore[operator]
            spots = output.movedim(-1 - spatial, -1).unsqueeze(0)
            size = math.prod(spots.shape[:-1])
            # Every row draws a number, and the rows with the largest numbers are kept: a uniform sample.
            number, pick = torch.rand(size, generator=generator, dtype=torch.float32).topk(min(limit, size))
            rows = spots[torch.unravel_index(pick.to(spots.device), spots.shape[:-1])].float()
            if name in kept:
                number, rows = torch.cat((kept[name][0], number)), torch.cat((kept[name][1], rows))
                number, pick = number.topk(min(limit, len(rows)))
                rows = rows[pick.to(rows.device)]
            kept[name] = number, rows

        return layer.register_forward_hook(hook, with_kwargs=True)

    handles = [add_hook(name, layer) for name, layer in layers.items()]
    batches = 0
    try:
        with restored(model, {}), evaluating(model), uncompiled(), without_fast_paths():
            batched = [calibration] if isinstance(calibration, Tensor | Mapping) else calibration
            for batch in _with_bar(batched, progress):
                batches += 1
                with undone(model):
                    run_batch(model, batch, f"calibration batch {batches}")
    finally:
        for handle in handles:
            handle.remove()
    if not batches:
        raise ValueError("calibration holds no batch; pass a list of batches, or a loader that is not used up")
    if silent := ", ".join(repr(name) for name in layers if name not in kept):
        raise ValueError(f"{silent} took no part in the {batches} calibration batches; leave it out of the plan")
    return {name: rows for name, (_, rows) in kept.items()}


def run_batch(model: nn.Module, batch: Any, name: str) -> Any:
    """The output of a network for a batch: a tensor, a tuple or list that begins with the input, or keyword arguments.

    The network gets copies of the tensors, on its device. An error gets a note with the name of the batch.
    """
    device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    inputs = batch[0] if isinstance(batch, tuple | list) else batch
    inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
    inputs = tree_map_only(Tensor, lambda t: t.to(device, copy=True), inputs)
    try:
        return model(**inputs) if isinstance(inputs, dict) else model(inputs)
    except Exception as error:
        kinds = "a tensor, a tuple that begins with the input, or a dictionary of keyword arguments"
        if isinstance(inputs, dict):
            kinds += "; for a network that takes the dictionary itself, map its argument: {'name': batch}"
        error.add_note(f"This was {name}. A batch is {kinds}.")
        raise


def output_tensors(given: object) -> list[Tensor]:
    """The floating-point tensors of any output, also in a dataclass, which torch sees as one leaf."""
    leaves = tree_leaves(given)
    parts = [
        output_tensors(vars(leaf)) for leaf in leaves if dataclasses.is_dataclass(leaf) and hasattr(leaf, "__dict__")
    ]
    return sum(parts, [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()])


def length(batches: Any) -> int | None:
    """The number of batches; None if it is unknown, as that of a ``DataLoader`` of an iterable dataset may be."""
    try:
        return len(batches)
    except (TypeError, NotImplementedError):
        return None


class Incoming:
    """The mean square of every DCL layer's branch outputs y, on the inputs of the layers that it replaces."""

    def __init__(self, layers: Mapping[str, _DCL]) -> None:
        self._layers = layers
        self._sums: dict[str, Tensor] = {}
        self._rows: dict[str, int] = {}

    def add(self, name: str, x: Tensor) -> None:
        """Add a batch of inputs of a layer."""
        layer = self._layers[name]
        squares = [y.double().square() for y in layer.fusion.split(layer.branch(x))]
        rows = squares[0].numel() // layer.fusion.widths[0]
        sums = torch.stack([square.sum() for square in squares]) / torch.tensor(layer.fusion.widths, device=x.device)
        self._sums[name] = self._sums.get(name, 0) + sums
        self._rows[name] = self._rows.get(name, 0) + rows

    def of(self, name: str) -> list[float] | None:
        """The mean squares of a layer's branches; None without inputs."""
        return [float(s) / self._rows[name] for s in self._sums[name]] if name in self._sums else None


def _with_bar(batches: Iterable[Any], progress: bool | None) -> Iterator[Any]:
    """Iterate over the batches, with a progress bar as soon as they are expected to take long."""
    total = length(batches)
    start = time.monotonic()
    with ExitStack() as open_bar:
        bar = None
        for done, batch in enumerate(batches):
            expected = (time.monotonic() - start) * max(total or 0, done) / max(done, 1)
            if bar is None and progress is not False and (progress or expected >= QUICK):
                steps, unit = (
                    (1, "passes over the calibration data") if total is None else (total, "calibration batches")
                )
                bar = open_bar.enter_context(Bar(error_console(), steps, unit))
            if bar is not None and total is not None:
                bar.reach(done)
            elif bar is not None:
                bar.now(f"batch {done + 1}")
            yield batch
