"""The arguments of ``plan``, checked and converted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torch_dcl.convert.rows import Mode, Phase
from torch_dcl.functional import check_eps
from torch_dcl.fusion import Strategy, branch_widths

__all__ = ["Select", "UnitOptions", "check_choice", "check_layers", "check_model", "check_unit_options", "read_example"]

Select = Literal["smaller", "faster"]


@dataclass(frozen=True)
class UnitOptions:
    """The options that apply to every unit."""

    branches: int
    ratio: float
    width: int | Sequence[int] | None
    round_to: int
    strategy: Strategy
    eps: float | None

    def widths(self, out_channels: int) -> tuple[int, ...]:
        """M(t) of a unit with this number of output channels."""
        return branch_widths(
            out_channels, branches=self.branches, ratio=self.ratio, width=self.width, round_to=self.round_to
        )


def check_unit_options(options: UnitOptions, budget: float | None) -> None:
    """Raise an error for options that fit no unit. If they do not fit a single unit, its row has the reason."""
    requested = options.width if isinstance(options.width, Sequence) else (options.width,)
    numbers = [w for w in requested if isinstance(w, int)]
    if min(numbers, default=1) < 1:
        raise ValueError(f"width {min(numbers)} does not fit any layer; a branch has one filter or more")
    widths = options.widths(max(numbers, default=1))
    if options.strategy not in ("deterministic", "stochastic"):
        raise ValueError(f'strategy must be "deterministic" or "stochastic", got {options.strategy!r}')
    if options.strategy == "stochastic" and len(widths) < 3:
        raise ValueError(f"the stochastic strategy needs three or more branches, got branches = {options.branches}")
    check_eps(options.eps, 2 if options.strategy == "stochastic" else options.branches)
    if budget is not None:
        meaning = "budget is the fraction of the weights to keep, a number above 0 and below 1, for example 0.8"
        if isinstance(budget, bool) or not isinstance(budget, (int, float)):
            raise TypeError(f"{meaning}; got {budget!r}")
        if not 0 < budget < 1:
            raise ValueError(f"{meaning}; got {budget!r}")
        if options.width is not None:
            raise ValueError("budget chooses the widths itself; leave width out, or leave budget out")


def check_choice(model: nn.Module, select: Select, mode: Mode, phase: Phase, budget: float | None) -> None:
    """Refuse a rule for the selection that does not exist, or that cannot be followed here."""
    for name, value, known in (("select", select, Select), ("mode", mode, Mode), ("phase", phase, Phase)):
        *most, last = (f'"{entry}"' for entry in get_args(known))
        if value not in get_args(known):
            raise ValueError(f"{name} must be {', '.join(most)} or {last}, got {value!r}")
    if select == "smaller":
        for name, value, default in (("mode", mode, "eager"), ("phase", phase, "train")):
            if value != default:
                raise ValueError(f'{name} = "{value}" is for a choice by time; add select = "faster", or leave it out')
        return
    if budget is not None:
        raise ValueError(f'budget = {budget} chooses units by their weights, select = "faster" by time; leave one out')
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "meta":
        raise ValueError('select = "faster" needs a network with values to time, and this one is on the meta device')
    if mode in ("reduce-overhead", "graph") and device.type != "cuda":
        raise ValueError(
            f'mode = "{mode}" times CUDA graphs, and the network is on {device.type}; move it to a GPU, or take '
            'mode = "eager" or mode = "compile"'
        )


def check_layers(model: nn.Module, verb: str) -> None:
    """Raise TypeError unless this is a network whose layers can be accessed."""
    if isinstance(model, torch.export.ExportedProgram) or _is_exported(model):
        raise TypeError(
            "an exported network has no layers to convert any more; plan and convert the network itself, and export "
            "it after that"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"{verb} takes a network, an nn.Module, first; got {_described(model)}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            "a scripted or traced network has no layers to convert any more; plan and convert the network itself. "
            "What is converted can be exported with torch.export or torch.onnx.export, or traced, but not scripted"
        )
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise TypeError(f"convert the network before it is wrapped in {type(model).__name__} (it is in .module)")


def check_model(model: nn.Module) -> None:
    """Raise an error unless this is a network whose layers can be replaced."""
    check_layers(model, "plan")
    if hasattr(model, "_orig_mod"):
        raise TypeError("a compiled network cannot be converted; plan and convert it before torch.compile")
    lazy = [name for name, p in model.named_parameters() if is_lazy(p)]
    if lazy:
        raise ValueError(f"{lazy[0]!r} is lazy and has no size yet; run one batch through the network first")


def _is_exported(model: object) -> bool:
    """Whether this is a graph of operations without layers, as torch.export returns it."""
    nodes = model.graph.nodes if isinstance(model, torch.fx.GraphModule) else ()
    return any(isinstance(node.target, torch._ops.OpOverload) for node in nodes)


def _described(model: object) -> str:
    if isinstance(model, type):
        is_network = issubclass(model, nn.Module)
        return f"the class {model.__name__}" + (f"; make one: plan({model.__name__}(...), ...)" if is_network else "")
    name = getattr(model, "__name__", None)
    if callable(model) and name is not None:
        return f"the function {name}; call it: plan({name}(), ...)"
    return repr(model) if model is None else f"a {type(model).__name__}"


def read_example(
    model: nn.Module, input_size: Sequence[int] | None, example: Any, batch: int
) -> tuple[tuple[Any, ...], dict[str, Any], str]:
    """The arguments and keyword arguments for the run, and their description in the table."""
    if (input_size is None) == (example is None):
        raise ValueError("give input_size, for example (3, 224, 224), or example, an input of the network; not both")
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise ValueError(f"batch must be a whole number of at least 1, got {batch!r}")
    if example is not None:
        if batch != 1:
            raise ValueError(f"batch = {batch} goes with input_size; an example is a batch by itself")
        if isinstance(example, Mapping):
            return (), dict(example), "the example given"
        is_plain = isinstance(example, tuple) and not hasattr(example, "_fields")  # a NamedTuple is one argument
        args = tuple(example) if is_plain else (example,)
        shapes = ", ".join(str(tuple(a.shape)) if isinstance(a, Tensor) else type(a).__name__ for a in args)
        return args, {}, f"the example given ({shapes})"
    if isinstance(input_size, Tensor):
        raise TypeError(
            f"input_size is the size of one input, without the batch; got a tensor of {tuple(input_size.shape)}. "
            "Pass it as example=, or give its size"
        )
    if isinstance(input_size, int):
        raise TypeError(f"input_size is a tuple, without the batch; got {input_size}. Write ({input_size},)")
    size = tuple(input_size or ())
    if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in size):
        raise ValueError(f"input_size must be whole numbers above 0, without the batch, got {input_size!r}")
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    where = torch.device("cpu") if first is None else first.device
    generator = None if where.type == "meta" else torch.Generator(where).manual_seed(0)
    tensor = torch.randn(batch, *size, device=where, dtype=None if first is None else first.dtype, generator=generator)
    return (tensor,), {}, f"{'one input' if batch == 1 else f'{batch} inputs'} of {'×'.join(map(str, size))}"
