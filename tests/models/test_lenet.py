import math

import pytest
import torch
from torch.nn import functional as F

from torch_dcl.models import lenet


def test_relu_after_pooling_is_relu_before_pooling() -> None:
    model = lenet(10).double().eval()
    p = model.state_dict()
    x = torch.randn(3, 1, 28, 28, dtype=torch.float64)
    y = F.max_pool2d(F.relu(F.conv2d(x, p["conv1.weight"], p["conv1.bias"])), 2, 2)
    assert y.shape == (3, 20, 12, 12)
    y = F.max_pool2d(F.relu(F.conv2d(y, p["conv2.weight"], p["conv2.bias"])), 2, 2)
    assert y.shape == (3, 50, 4, 4)
    y = F.relu(F.linear(y.reshape(3, 800), p["fc1.weight"], p["fc1.bias"]))
    torch.testing.assert_close(model(x), F.linear(y, p["fc2.weight"], p["fc2.bias"]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("layer", "fan_in"), [("conv1", 25), ("conv2", 500), ("fc1", 800), ("fc2", 500)])
def test_starts_from_the_xavier_filler_of_caffe(layer: str, fan_in: int) -> None:
    torch.manual_seed(0)
    module = lenet(1000).get_submodule(layer)
    bound = math.sqrt(3 / fan_in)
    weight = module.weight.detach()
    assert weight.abs().max() <= bound
    assert weight.abs().max() > 0.98 * bound
    # The spread of U(±b) is b/√3 = 1/√fan_in; five standard errors of its estimate (a uniform has kurtosis 1.8).
    tolerance = 5 * math.sqrt(0.8 / (4 * weight.numel()))
    assert weight.std().item() * math.sqrt(fan_in) == pytest.approx(1, rel=tolerance)
    assert (module.bias == 0).all()


def test_dropout_acts_in_training_alone() -> None:
    model = lenet(10)
    x = torch.randn(4, 1, 28, 28)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))
    assert model.drop1.p == 0.5
