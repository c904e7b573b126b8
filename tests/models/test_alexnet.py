import copy
import math
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_dcl as dcl
from torch_dcl.models import AlexNet, alexnet, count_weights


@pytest.fixture(scope="module")
def model() -> AlexNet:
    torch.manual_seed(0)
    return alexnet().eval()


def caffe_lrn(x: Tensor) -> Tensor:
    """x / (1 + (α / 5) Σ x²)^0.75, the sum over two channels to either side."""
    square = F.pad(x.square(), (0, 0, 0, 0, 2, 2))
    total = sum(square[:, i : i + x.shape[1]] for i in range(5))
    return x / (1 + 1e-4 / 5 * total) ** 0.75


def test_is_the_network_written_out(model: AlexNet) -> None:
    p = model.state_dict()
    y = x = 60 * torch.randn(2, 3, 227, 227)
    sizes = []
    for i, stride, padding in ((1, 4, 0), (2, 1, 2), (3, 1, 1), (4, 1, 1), (5, 1, 1)):
        y = F.relu(F.conv2d(y, p[f"conv{i}.weight"], p[f"conv{i}.bias"], stride=stride, padding=padding))
        if i in (1, 2):
            y = caffe_lrn(y)
        if i in (1, 2, 5):
            y = F.max_pool2d(y, 3, 2)
        sizes.append(tuple(y.shape[1:]))
    assert sizes == [(96, 27, 27), (256, 13, 13), (384, 13, 13), (384, 13, 13), (256, 6, 6)]
    y = y.reshape(2, 9216)
    for i in (6, 7):
        y = F.relu(F.linear(y, p[f"fc{i}.weight"], p[f"fc{i}.bias"]))
    with torch.no_grad():
        torch.testing.assert_close(model(x), F.linear(y, p["fc8.weight"], p["fc8.bias"]), rtol=1e-3, atol=1e-4)


def test_normalisation_can_be_left_out() -> None:
    with torch.device("meta"):
        plain, normed = alexnet(lrn=False), alexnet()
    assert not any(isinstance(m, nn.LocalResponseNorm) for m in plain.modules())
    assert sum(isinstance(m, nn.LocalResponseNorm) for m in normed.modules()) == 2
    assert count_weights(plain) == count_weights(normed)
    assert plain.state_dict().keys() == normed.state_dict().keys()


@pytest.mark.parametrize(
    ("layer", "std", "bias"),
    [
        ("conv1", 0.01, 0.0),
        ("conv2", 0.01, 0.1),
        ("conv3", 0.01, 0.0),
        ("conv4", 0.01, 0.1),
        ("conv5", 0.01, 0.1),
        ("fc6", 0.005, 0.1),
        ("fc7", 0.005, 0.1),
        ("fc8", 0.01, 0.0),
    ],
)
def test_starts_from_the_fillers_of_caffe(model: AlexNet, layer: str, std: float, bias: float) -> None:
    module = model.get_submodule(layer)
    weight = module.weight.detach()
    assert weight.std().item() == pytest.approx(std, rel=max(1e-3, 5 / math.sqrt(2 * weight.numel())))
    torch.testing.assert_close(module.bias.detach(), torch.full_like(module.bias, bias))


def test_no_convolution_is_grouped(model: AlexNet) -> None:
    assert {m.groups for m in model.modules() if isinstance(m, nn.Conv2d)} == {1}
    assert model.fc6.weight.numel() == 37_748_736


def test_a_training_step_reaches_every_parameter() -> None:
    torch.manual_seed(0)
    model = alexnet(10)
    F.cross_entropy(model(60 * torch.randn(2, 3, 227, 227)), torch.tensor([3, 4])).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_its_state_is_that_of_torchs_own_layers(model: AlexNet) -> None:
    first = nn.Conv2d(3, 96, 11, stride=4)
    first.load_state_dict({name: value.clone() for name, value in model.conv1.state_dict().items()})
    x = 60 * torch.randn(1, 3, 227, 227)
    norm = nn.LocalResponseNorm(5, alpha=1e-4, beta=0.75)
    with torch.no_grad():
        found, expected = (n(c(x).relu()) for n, c in ((model.norm1, model.conv1), (norm, first)))
    assert found.equal(expected)
    assert model.norm1.state_dict() == {}
    assert [layer.extra_repr() for layer in (model.conv1, model.norm1)] == [first.extra_repr(), norm.extra_repr()]


def test_a_copy_and_a_pickle_are_the_same_network(model: AlexNet) -> None:
    again = pickle.loads(pickle.dumps(copy.deepcopy(model.conv1)))
    assert type(again) is type(model.conv1)
    assert again.weight.equal(model.conv1.weight)


def test_every_convolution_can_be_converted_and_is_a_conv2d_in_the_plan() -> None:
    model = alexnet(10)
    plan = dcl.plan(model, input_size=(3, 227, 227)).only("conv*")
    rows = [row for row in plan.rows if row.name.startswith("conv")]
    assert [(row.name, row.kind, row.reason) for row in rows] == [(f"conv{i}", "Conv2d", "") for i in range(1, 6)]
    dcl.convert_(model, plan, init="random")
    assert isinstance(model.conv1, dcl.DCLConv2d)
    assert (model.conv1.branch.kernel_size, model.conv1.branch.stride) == ((11, 11), (4, 4))
    assert type(model.conv1.branch) is nn.Conv2d
    assert model(torch.zeros(1, 3, 227, 227)).shape == (1, 10)


def test_images_of_224_are_refused(model: AlexNet) -> None:
    with pytest.raises(ValueError, match=r"AlexNet takes images of size \[N, 3, 227, 227\], got \[1, 3, 224, 224\]"):
        model(torch.zeros(1, 3, 224, 224))
