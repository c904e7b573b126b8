import math

import pytest
import torch
from torch.nn import functional as F

from torch_dcl.models import lenet_cifar


def caffe_max_pool(x: torch.Tensor) -> torch.Tensor:
    """3×3 windows at stride 2, as many as it takes to cover the image, the last one cut at the border."""
    count = math.ceil((x.shape[-1] - 3) / 2) + 1
    rows = [[x[..., 2 * i : 2 * i + 3, 2 * j : 2 * j + 3].amax((-2, -1)) for j in range(count)] for i in range(count)]
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def test_pools_like_caffe() -> None:
    model = lenet_cifar(10).double().eval()
    p = model.state_dict()
    y = x = 60 * torch.randn(2, 3, 32, 32, dtype=torch.float64)
    sizes = []
    for i in (1, 2, 3):
        y = caffe_max_pool(F.relu(F.conv2d(y, p[f"conv{i}.weight"], p[f"conv{i}.bias"], padding=2)))
        sizes.append(tuple(y.shape[1:]))
    assert sizes == [(32, 16, 16), (64, 8, 8), (128, 4, 4)]
    y = F.relu(F.linear(y.reshape(2, 2048), p["fc1.weight"], p["fc1.bias"]))
    torch.testing.assert_close(model(x), F.linear(y, p["fc2.weight"], p["fc2.bias"]), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("layer", "std"), [("conv1", 1e-4), ("conv2", 0.01), ("conv3", 0.01), ("fc1", 0.01), ("fc2", 0.01)]
)
def test_starts_from_the_gaussians_of_caffe(layer: str, std: float) -> None:
    torch.manual_seed(0)
    module = lenet_cifar(10).get_submodule(layer)
    weight = module.weight.detach()
    assert weight.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * weight.numel()))
    assert abs(weight.mean().item()) < 5 * std / math.sqrt(weight.numel())
    assert (module.bias == 0).all()
