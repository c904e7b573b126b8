"""The base class of all DCL layers: stage 1 in ``branch``, stage 2 in ``fusion``, and the dispatch of a call."""

import functools
import math
import warnings
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F

from torch_dcl.functional import constant, exporting, transforms
from torch_dcl.fusion import ConceptFusion, Strategy, reset
from torch_dcl.kernels import dispatch
from torch_dcl.kernels.dispatch import Stage, closed_settings, fuse_branches, fuse_pairs, may_run, transpose
from torch_dcl.kernels.unit_ops import Closed, Operand, run_closed
from torch_dcl.norms import called_plainly, exchanges, kernel_norm, norm_tensors
from torch_dcl.programs import recorded, replayed

__all__ = ["Responses", "passes_relu"]

CHANNELS_LAST = torch.channels_last


class Responses(NamedTuple):
    """The intermediate results of a DCL layer, for inspection."""

    y: tuple[Tensor, ...]
    """The T branches, ``M_t`` channels each."""
    v: tuple[Tensor, ...]
    """The T responses after ReLU, ``K2`` channels each."""
    z: Tensor
    """Their fusion: over all branches (deterministic), or the mean over all pairs (stochastic)."""


class _DCL(nn.Module):
    """Base class of linear and convolutional DCL layers: stage 1 in ``branch``, stage 2 in ``fusion``."""

    branch: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d
    fusion: ConceptFusion
    branch_activation: nn.Module | None
    marks_output = False
    """Whether to mark z as positive, for a ReLU after the layer that other layers share; see `passes_relu`."""

    def reset_parameters(self) -> None:
        """Initialise both stages; see :meth:`ConceptFusion.reset_parameters`."""
        weight, bias = self.branch.weight, self.branch.bias
        bound = math.sqrt(3 / weight[0].numel())
        nn.init.uniform_(weight, -bound, bound)
        if bias is not None:
            nn.init.zeros_(bias)
        reset(self.branch_activation)
        self.fusion.reset_parameters(_mean_square(self.branch_activation))

    def forward(self, x: Tensor) -> Tensor:
        """Map the input to z, in the memory layout of the plain layer's output."""
        # No super(): a compiler would guard the class and the modules around it in every call.
        if x.is_nested:
            return self._map_jagged(x)
        compiling = is_compiling()
        if compiling:
            if (z := self._run_closed(x)) is not None:
                return z
            if exchanges(self.fusion.norm) and not exporting():
                out: Tensor = _uncompiled(self, x)
                return out
        transposes = self._should_transpose(x)
        if transposes:
            x = transpose(x, last=True, cast=True)
        z = self._run_closed(x) if compiling and transposes else None
        if z is None:
            z = self._compute(x)
        if transposes:
            z = transpose(z, last=False)
        if self.marks_output:
            z._dcl_positive = _version(z)  # type: ignore[attr-defined]
        return z

    def _map_jagged(self, x: Any) -> Tensor:
        """z of a jagged tensor, computed on the positions of all its sequences at once."""
        if self.fusion.spatial or x.layout is not torch.jagged:
            raise TypeError(
                f"a {type(self).__name__} does not take this nested tensor; a DCLLinear takes those with "
                "layout=torch.jagged, any other layer a padded tensor (x.to_padded_tensor(0.0))"
            )
        z = self.forward(x.values())
        return torch.nested.nested_tensor_from_jagged(z, x.offsets(), x.lengths(), jagged_dim=x._ragged_idx)

    def _run_closed(self, x: Tensor) -> Tensor | None:
        """z of a compiled network by one operation that the compiler does not look into; None if there is none for x.

        A compiler guards every name and attribute that is looked up here, and checks these guards in every call. So a
        method decides whose result is a constant to it, and what may change between calls is an argument of it.
        """
        if not dispatch.enabled or transforms():
            return None  # in a transform, torch.vmap cannot tell the layout
        branch, fusion = self.branch, self.fusion
        spatial = fusion.spatial
        norm: Any = fusion.norm
        if spatial and not (spatial == 2 and x.is_contiguous(memory_format=CHANNELS_LAST)):
            return None
        pair = self.training and fusion.strategy == "stochastic"
        theta: Tensor = branch.weight
        weight: Tensor = fusion.weight
        bias: Tensor | None = fusion.bias
        settings = self._closed_settings(
            [(type(t), t.dtype, t.device, t.requires_grad) for t in (x, theta, weight)], x.dim(), pair,
            norm is not None and norm.training, self.branch_activation is None and branch.bias is None,
            (branch.stride, branch.padding, branch.dilation, branch.padding_mode) if spatial else None,
        )  # fmt: skip
        if settings is None or (norm is not None and x.shape[0] == 0):
            return None
        if pair:
            _warn_if_nobody_advances(fusion)
            theta, weight, bias = fusion.gather(theta), fusion.gather(weight), fusion.active_bias()
        if norm is None:
            z = run_closed(x, theta, weight, bias, (None,) * 5, fusion.eps, 0.0, 0.0, settings)
        else:
            tensors = norm_tensors(norm, bool(settings[4]))
            z = run_closed(x, theta, weight, bias, tensors, fusion.eps, norm.eps, norm.momentum, settings)
        if self.marks_output:
            z._dcl_positive = 0  # type: ignore[attr-defined]
        return z

    @constant
    def _closed_settings(
        self, operands: list[tuple[Any, ...]], dim: int, pair: bool, by_batch: bool, plain: bool,
        geometry: tuple[Any, ...] | None,
    ) -> Closed | None:  # fmt: skip
        """The settings of the operation; None if it does not support the layer or the input.

        Args:
            operands: The input, the filters and the weights as `Operand`: not always those of the layer
                (``torch.func.functional_call``).
            dim: The number of dimensions of the input.
            pair: Whether the layer fuses its two active branches.
            by_batch: Whether there is a norm in training mode.
            plain: Whether nothing stands between stage 1, without biases, and stage 2.
            geometry: Of the convolution. Like ``by_batch`` it is read from the layer; as an argument it is guarded.
        """
        del by_batch, geometry
        fusion, stage = self.fusion, self._plain_stage() if plain else None
        norm = None if fusion.norm is None else kernel_norm(fusion.norm)
        if stage is None or (pair and not fusion.gathers) or (fusion.norm is not None and norm is None):
            return None
        if isinstance(fusion.norm, nn.SyncBatchNorm) and fusion.norm.training:
            return None  # whether it exchanges is asked again in each call
        widths, fixed = fusion.widths[: 2 if pair else None], None if norm is None else norm.fixed
        pairs = fusion.strategy == "stochastic" and not pair
        x, theta, weight = (Operand(*each) for each in operands)
        return closed_settings(x, theta, weight, dim, stage, widths, fixed, pairs=pairs)

    def _should_transpose(self, x: Tensor) -> bool:
        """Whether to transpose the input to channels_last, and z back."""
        del x
        return False

    def _compute(self, x: Tensor) -> Tensor:
        compiling = is_compiling()
        if not compiling and (z := replayed(self, x)) is not None:
            return z
        fusion = self.fusion
        pair = fusion.strategy == "stochastic" and self.training
        if pair:
            _warn_if_nobody_advances(fusion)
            pair = fusion.gathers and self._called_plainly()
        stage = self._plain_stage() if may_run(x) else None
        if stage is not None and (pair or fusion.strategy == "deterministic" or not self.training):
            theta = fusion.gather(self.branch.weight) if pair else self.branch.weight
            if compiling or pair:
                z = fusion.with_stage(x, theta, stage)
            else:
                z = recorded(self, x, functools.partial(fusion.with_stage, x, theta, stage))
            if z is not None:
                return z
        if pair:
            weight, bias = self.branch.weight, self.branch.bias
            y = self._run_branch(x, fusion.gather(weight), None if bias is None else fusion.gather(bias))
            return fusion.forward_pair(self._activate(y))
        return fusion(self._activate(self._construct(x)))  # type: ignore[no-any-return]

    def _plain_stage(self) -> Stage | None:
        """The geometry of stage 1; None if calling the modules of both stages may do more than their arithmetic."""
        branch, spatial = self.branch, self.fusion.spatial
        if self.branch_activation is not None or branch.bias is not None or not self._called_plainly():
            return None
        if not spatial:
            return Stage(0)
        stride, padding, dilation = branch.stride, branch.padding, branch.dilation
        if branch.padding_mode != "zeros" or isinstance(padding, str):
            return None
        return Stage(spatial, stride, padding, dilation)

    @constant
    def _called_plainly(self) -> bool:
        """Whether the submodules are of torch's and this package's classes, without hooks.

        A constant for compilers, which check hooks only once too.
        """
        branch, fusion, norm = self.branch, self.fusion, self.fusion.norm
        if type(fusion) is not ConceptFusion or type(branch) not in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d):
            return False
        return called_plainly(branch) and called_plainly(fusion) and (norm is None or called_plainly(norm))

    def responses(self, x: Tensor) -> Responses:
        """All branches y, their responses v and the fusion z, in training and in evaluation mode."""
        y = self._activate(self.branch(x))
        pre = self.fusion.respond(y)
        fuse = fuse_branches if self.fusion.strategy == "deterministic" else fuse_pairs
        return Responses(self.fusion.split(y), tuple(F.relu(p) for p in pre), fuse(pre, self.fusion.eps))

    def __prepare_scriptable__(self) -> Self:
        """Raise a TypeError with the remedy in torch.jit.script, which cannot compile the layer."""
        raise TypeError(
            f"a {type(self).__name__} cannot be scripted; export the network with torch.export or torch.onnx.export, "
            "or trace it with torch.jit.trace"
        )

    @property
    def branches(self) -> int:
        """T."""
        return self.fusion.branches

    @property
    def widths(self) -> tuple[int, ...]:
        """M(t)."""
        return self.fusion.widths

    @property
    def strategy(self) -> Strategy:
        """How more than two branches are trained."""
        return self.fusion.strategy

    @property
    def eps(self) -> float:
        """ε."""
        return self.fusion.eps

    @property
    def weight(self) -> Tensor:
        """θ, which is ``branch.weight``: as the plain layer's weight, with ΣM filters instead of K2."""
        return self.branch.weight

    @property
    def bias(self) -> Tensor | None:
        """``fusion.bias``, one bias a branch; None where the layer has no bias."""
        return self.fusion.bias

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As in torch, but refuse to replace θ or the biases, as pruning would."""
        if name.startswith(("weight", "bias")):
            raise ValueError(
                f"{name!r} cannot become a parameter of a {type(self).__name__}: its weights are the submodules' "
                "branch.weight (θ) and fusion.weight (W), its biases fusion.bias; prune or parametrize those instead"
            )
        super().register_parameter(name, param)

    def _activate(self, y: Tensor) -> Tensor:
        return y if self.branch_activation is None else self.branch_activation(y)

    def _construct(self, x: Tensor) -> Tensor:
        """Stage 1: a plain linear branch by `linear`, any other by a call of ``branch``."""
        branch = self.branch
        if type(branch) is nn.Linear and called_plainly(branch):
            return dispatch.linear(x, branch.weight, branch.bias, otherwise=branch)
        y: Tensor = branch(x)
        return y

    def _run_branch(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Stage 1 with these filters instead of its own."""
        if isinstance(self.branch, nn.Linear):
            return dispatch.linear(x, weight, bias)
        y: Tensor = self.branch._conv_forward(x, weight, bias)
        return y


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _uncompiled(layer: _DCL, x: Tensor) -> Tensor:
    """Run a layer whose norm exchanges messages outside of the graph, which torch's own such norm breaks too.

    So it breaks here, not in each of the functions on the way to the norm, and kernels run.
    """
    return layer.forward(x)


def passes_relu(z: Tensor) -> bool:
    """Whether z is the unmodified output of a layer that marked it as positive. The mark is removed on reading."""
    mark = getattr(z, "_dcl_positive", None)
    if type(mark) is not int:
        return False
    z._dcl_positive = None  # type: ignore[attr-defined]
    return mark == _version(z)


def _version(z: Tensor) -> int:
    """The version counter, which detects changes in place, for example by a hook; 0 if torch does not count."""
    return 0 if torch.compiler.is_compiling() or z.is_inference() else z._version


def _warn_if_nobody_advances(fusion: ConceptFusion) -> None:
    # The order matters: if a compiled forward depended on `advanced`, the first advance would recompile it.
    if torch.compiler.is_compiling() or fusion.advanced or not torch.is_grad_enabled():
        return  # without gradients nothing is trained, for example in update_bn
    fusion.advanced = True
    warnings.warn(
        "a DCL layer with the stochastic strategy is in training, but nobody advances its step, so it would train "
        "the same pair of branches for ever: call advance_branches_(model, step) at every step, or "
        "follow_optimizer(model, optimizer) once",
        stacklevel=6,  # the caller of the layer, above forward and torch's own calls
    )


def _mean_square(activation: nn.Module | None) -> float:
    """E[a(n)²] of an activation a for n ~ N(0, 1), over a grid of quantiles; 1 without one."""
    if activation is None:
        return 1.0
    like: Tensor = next(activation.parameters(), torch.empty(0, device="cpu", dtype=torch.float32))
    if like.is_meta:
        return 1.0  # measured in reset_parameters() after materialising
    with torch.no_grad():
        quantiles = torch.linspace(0.5 / 1024, 1 - 0.5 / 1024, 1024, device="cpu", dtype=torch.float32)
        response = activation((math.sqrt(2) * torch.erfinv(2 * quantiles - 1)).to(like))
        return max(float(response.float().square().mean()), 1e-6)
