"""The arguments of ``plan``: checked, and made into what it works with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torch_dcl.functional import check_eps
from torch_dcl.fusion import Strategy, branch_widths

__all__ = ["Wish", "check_model", "check_wish", "read_example"]


@dataclass(frozen=True)
class Wish:
    """What the caller wants of every unit."""

    branches: int
    ratio: float
    width: int | Sequence[int] | None
    round_to: int
    strategy: Strategy
    eps: float | None

    def widths(self, out_channels: int) -> tuple[int, ...]:
        """M(t) of a unit of that many output channels."""
        return branch_widths(
            out_channels, branches=self.branches, ratio=self.ratio, width=self.width, round_to=self.round_to
        )


def check_wish(wish: Wish, budget: float | None) -> None:
    """Refuse what no unit could take; what one unit cannot take is said in its row."""
    probe = 1 << 30
    widths = branch_widths(probe, branches=wish.branches, ratio=wish.ratio, width=wish.width, round_to=wish.round_to)
    if wish.strategy not in ("deterministic", "stochastic"):
        raise ValueError(f'strategy must be "deterministic" or "stochastic", got {wish.strategy!r}')
    if wish.strategy == "stochastic" and len(widths) < 3:
        raise ValueError(f"the stochastic strategy needs three or more branches, got branches = {wish.branches}")
    check_eps(wish.eps, 2 if wish.strategy == "stochastic" else wish.branches)
    if budget is not None:
        if not 0 < budget < 1:
            raise ValueError(f"budget is the fraction of the weights to keep, above 0 and below 1, got {budget!r}")
        if wish.width is not None:
            raise ValueError("budget chooses the widths itself; leave width out, or leave budget out")


def check_model(model: nn.Module) -> None:
    """Refuse what is no network, or one whose layers cannot be replaced any more."""
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("a scripted network cannot be converted; plan and convert it before torch.jit.script")
    if hasattr(model, "_orig_mod"):
        raise TypeError("a compiled network cannot be converted; plan and convert it before torch.compile")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise TypeError(f"convert the network before it is wrapped in {type(model).__name__} (it is in .module)")
    lazy = [name for name, p in model.named_parameters() if is_lazy(p)]
    if lazy:
        raise ValueError(f"{lazy[0]!r} is lazy and has no size yet; run one batch through the network first")


def read_example(
    model: nn.Module, input_size: Sequence[int] | None, example: Any, batch: int
) -> tuple[tuple[Any, ...], dict[str, Any], str]:
    """The arguments and keyword arguments to run the network with, and how to call them in the table."""
    if (input_size is None) == (example is None):
        raise ValueError("give input_size, for example (3, 224, 224), or example, an input of the network; not both")
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise ValueError(f"batch must be a whole number of at least 1, got {batch!r}")
    if example is not None:
        if batch != 1:
            raise ValueError(f"batch = {batch} goes with input_size; an example is a batch by itself")
        if isinstance(example, Mapping):
            return (), dict(example), "the example given"
        args = tuple(example) if isinstance(example, tuple) else (example,)
        shapes = ", ".join(str(tuple(a.shape)) for a in args if isinstance(a, Tensor))
        return args, {}, f"the example given ({shapes})"
    size = tuple(input_size or ())
    if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in size):
        raise ValueError(f"input_size must be whole numbers above 0, without the batch, got {input_size!r}")
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    where = torch.device("cpu") if first is None else first.device
    generator = None if where.type == "meta" else torch.Generator(where).manual_seed(0)
    tensor = torch.randn(batch, *size, device=where, dtype=None if first is None else first.dtype, generator=generator)
    return (tensor,), {}, f"{'one input' if batch == 1 else f'{batch} inputs'} of {'×'.join(map(str, size))}"
