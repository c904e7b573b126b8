import math

import pytest
import torch
from torch.nn import functional as F

from torch_dcl.models import bignet


def test_is_the_network_written_out() -> None:
    model = bignet(10).double().eval()
    p = model.state_dict()
    y = x = torch.randn(2, 3, 24, 24, dtype=torch.float64)
    sizes = []
    for stage in ((1, 2), (3, 4), (5, 6, 7, 8)):
        for i in stage:
            y = F.relu(F.conv2d(y, p[f"conv{i}.weight"], p[f"conv{i}.bias"], padding=1))
        y = F.max_pool2d(y, 2)
        sizes.append(tuple(y.shape[1:]))
    assert sizes == [(64, 12, 12), (128, 6, 6), (256, 3, 3)]
    y = y.reshape(2, 2304)
    for i in (1, 2):
        y = F.relu(F.linear(y, p[f"fc{i}.weight"], p[f"fc{i}.bias"]))
    torch.testing.assert_close(model(x), F.linear(y, p["fc3.weight"], p["fc3.bias"]), rtol=1e-12, atol=1e-12)


def test_dropout_rates() -> None:
    model = bignet(10)
    assert [model.get_submodule(f"drop{i}").p for i in range(1, 6)] == [0.25, 0.25, 0.25, 0.5, 0.5]


def test_starts_from_he_and_keeps_the_signal() -> None:
    torch.manual_seed(0)
    model = bignet(10).eval()
    for name, module in model.named_children():
        if not hasattr(module, "weight"):
            continue
        weight = module.weight.detach()
        std = 0.01 if name == "fc3" else math.sqrt(2 / weight[0].numel())
        assert weight.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * weight.numel())), name
        assert (module.bias == 0).all(), name
    inner = {}
    model.relu10.register_forward_hook(lambda _m, _i, out: inner.update(last=out))
    model(torch.randn(8, 3, 24, 24))
    assert 0.1 < inner["last"].square().mean().sqrt() < 10
