"""Unstacked networks with the kernels of a GPU, run as Python by Triton's interpreter, against plain torch."""

import importlib.util

import pytest
import torch
from tests.fleet.test_unstacked import SMALL, learnt_otherwise, three_sets
from tests.halves import slow_where

from torch_dcl import kernels
from torch_dcl.fleet import Fleet, Inputs, Member, Schedule

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def trained(kind):
    """Two networks of a kind after six steps in float32, and where they started."""
    torch.manual_seed(0)
    build, size, options = SMALL[kind]
    networks = [build() for _ in range(2)]
    members = [Member(str(i), "one", i, 0.01, Schedule(2), 1e-3, clip=0.5 + i) for i in range(2)]
    fleet = Fleet(
        networks, members, three_sets(size), batch=8, precision="float32", stacked=False,
        inputs=Inputs(pad=2, flip=True), **options,
    )  # fmt: skip
    fleet.train()
    return [fleet.network(i) for i in range(2)], networks


def interpreted(kind):
    """The same with kernels: the values of both networks by name."""
    assert kernels.usable(torch.zeros(1))
    return [{name: value.numpy() for name, value in each.state_dict().items()} for each in trained(kind)[0]]


@pytest.mark.parametrize("kind", slow_where(SMALL, "tiny|deterministic|residual"))
def test_they_train_as_with_plain_torch(interpreter, kind):
    ends, starts = trained(kind)
    for values, end, start in zip(interpreter(interpreted, kind), ends, starts, strict=True):
        found = SMALL[kind][0]()
        found.load_state_dict({name: torch.from_numpy(value) for name, value in values.items()})
        assert learnt_otherwise(found, end, start) < 1e-5
