"""Unstacked networks with the kernels of a GPU, run as Python by Triton's interpreter, against plain torch.

Triton looks at TRITON_INTERPRET when it is imported, so all cases run in one process of their own.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.fleet.test_unstacked import SMALL, learnt_otherwise, three_sets

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


def save_all(folder):
    assert kernels.usable(torch.zeros(1))
    for number, kind in enumerate(SMALL):
        for i, network in enumerate(trained(kind)[0]):
            state = network.state_dict()
            values = {name: value.tolist() for name, value in state.items()}
            (Path(folder) / f"{number}-{i}.json").write_text(json.dumps(values))


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("interpreted")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, __file__, folder], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("kind", SMALL)
def test_they_train_as_with_plain_torch(interpreted, kind):
    ends, starts = trained(kind)
    for i, (end, start) in enumerate(zip(ends, starts, strict=True)):
        values = json.loads((interpreted / f"{list(SMALL).index(kind)}-{i}.json").read_text())
        state = {name: torch.tensor(values[name], dtype=value.dtype) for name, value in end.state_dict().items()}
        found = SMALL[kind][0]()
        found.load_state_dict(state)
        assert learnt_otherwise(found, end, start) < 1e-5


if __name__ == "__main__":
    save_all(sys.argv[1])
