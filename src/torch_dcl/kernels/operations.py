"""How functions that launch kernels become operations of torch: open to compilers, closed to them, or both."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_dcl import kernels
from torch_dcl.kernels import host, record
from torch_dcl.kernels.launcher import recording

__all__ = ["LIBRARY", "call_of", "closed_operation", "operation", "prefix_of_operations"]

LIBRARY = torch.library.Library("torch_dcl", "FRAGMENT")
_closed: dict[str, Callable[..., Any]] = {}
"""What closed operations compute, by name."""


def operation(name: str, *, closed: bool = False, mutates: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Make an operation of a function that launches kernels: open to a compiler, unless kernels are interpreted.

    Args:
        name: Of the operation.
        closed: Whether to have it closed to compilers as well, by another name.
        mutates: Arguments that it writes into.
    """

    def register(function: Callable[..., Any]) -> Any:
        if kernels.INTERPRETED:
            made = torch.library.custom_op(f"torch_dcl::{name}", mutates_args=mutates)(function)
            made.register_fake(function)
        else:
            made = torch.library.triton_op(f"torch_dcl::{name}", mutates_args=mutates)(function)
        if closed:
            closed_operation(name, fake=_shapes_of(function), mutates=mutates)(function)
        return made

    return register


def closed_operation(
    name: str, *, fake: Callable[..., Any], mutates: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """Make an operation of a function that a compiler cannot look into, ``closed_`` before its name.

    Args:
        name: Of the operation.
        fake: What it gives for fake tensors.
        mutates: Arguments that it writes into.
    """

    def register(function: Callable[..., Any]) -> Any:
        LIBRARY.define(f"closed_{name}{torch.library.infer_schema(function, mutates_args=mutates)}")
        torch.library.register_fake(f"torch_dcl::closed_{name}", fake)
        LIBRARY.impl(f"closed_{name}", torch.library.fallthrough_kernel, "Autograd")
        _closed[f"closed_{name}"] = function
        return function

    return register


def _shapes_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on fake tensors, without its launches."""

    @functools.wraps(function)
    def fake(*given: Any) -> Any:
        before, recording.silent = recording.silent, True
        try:
            return function(*given)
        finally:
            recording.silent = before

    return fake


@torch.compiler.assume_constant_result
def prefix_of_operations() -> str:
    """Which operations a compiler is to call: the closed ones where they can be replayed."""
    library = host.wait()
    if library is None:
        return ""
    for name in list(_closed):
        record.serve(library, name, _closed.pop(name))
    return "closed_"


def call_of(name: str, prefix: str) -> Any:
    """The open operation, or the closed one."""
    return getattr(torch.ops.torch_dcl, prefix + name)
