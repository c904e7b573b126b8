"""Converted networks with ``nn.SyncBatchNorm`` under ``torch.compile``: results, and where the graph breaks."""

import pytest
import torch
from tests import synchronised_cases
from tests.processes import spawn

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed"),
    pytest.mark.slow,
]


@pytest.mark.parametrize(("world", "own_group"), [(0, False), (1, False), (2, False), (2, True)])
def test_a_compiled_network_breaks_no_more_than_with_torchs_norms_and_computes_the_same(tmp_path, world, own_group):
    processes = max(1, world)
    spawn(synchronised_cases.run, (str(tmp_path), world, own_group), processes)
    for rank in range(processes):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert {name: apart for name, (_, apart) in found.items() if apart > 1e-6} == {}
        graphs = {name: count for name, (count, _) in found.items()}
        assert graphs["plain, False"] == graphs["dcl, False"] == 1
        if world < 2:
            assert graphs["plain, True"] == graphs["dcl, True"] == 1
        else:
            # Before, between and behind the layers; torch's norm has parts of its own in graphs besides.
            assert graphs["dcl, True"] == 3 < graphs["plain, True"]
