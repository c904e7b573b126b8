import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_dcl.models import WideResNet, count_weights, wide_resnet
from torch_dcl.models.wide_resnet import WideBlock


def expected_weights(depth: int, widen: int, classes: int) -> tuple[int, int]:
    """Convolutions and classifier, and scales of the batch norms, in closed form.

    A group that goes from a to b channels in n blocks has 9ab + (2n - 1)·9b² weights in its 3×3 convolutions, ab in
    its shortcut where a ≠ b, and a + (2n - 1)·b scales.
    """
    n = (depth - 4) // 6
    steps = [(16, 16 * widen), (16 * widen, 32 * widen), (32 * widen, 64 * widen)]
    convolutions = 3 * 16 * 9 + sum(9 * a * b + (2 * n - 1) * 9 * b * b + (a * b if a != b else 0) for a, b in steps)
    scales = sum(a + (2 * n - 1) * b for a, b in steps) + 64 * widen
    return convolutions + 64 * widen * classes, scales


@pytest.mark.parametrize(
    ("depth", "widen", "classes"), [(16, 4, 10), (16, 4, 100), (28, 10, 10), (10, 1, 3), (40, 2, 10)]
)
def test_weights_follow_the_formula(depth: int, widen: int, classes: int) -> None:
    weights, scales = expected_weights(depth, widen, classes)
    with torch.device("meta"):
        model = wide_resnet(depth, widen, classes)
    assert count_weights(model) == weights + scales
    # Every scale of a batch norm has a shift; beside these only the classifier has biases.
    assert sum(p.numel() for p in model.parameters()) == weights + 2 * scales + classes


def test_the_network_of_the_paper_to_the_digit() -> None:
    with torch.device("meta"):
        model = wide_resnet()
    assert count_weights(model) == 2_747_072
    assert sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.BatchNorm2d)) == 1_808
    # The depth counts every convolution, those of the shortcuts too, and not the classifier.
    assert sum(isinstance(m, nn.Conv2d) for m in model.modules()) == 16


@pytest.mark.parametrize(("depth", "widen", "shortcuts"), [(10, 2, 3), (16, 1, 2)])
def test_is_the_network_written_out(depth: int, widen: int, shortcuts: int) -> None:
    torch.manual_seed(0)
    model = wide_resnet(depth, widen, 5).double().eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                    tensor.uniform_(0.5, 1.5)
    p = model.state_dict()
    assert sum(key.endswith("shortcut.weight") for key in p) == shortcuts

    def norm_relu(y: Tensor, key: str) -> Tensor:
        shape = (1, -1, 1, 1)
        mean, variance = p[f"{key}.running_mean"].view(shape), p[f"{key}.running_var"].view(shape)
        y = (y - mean) / (variance + 1e-5).sqrt()
        return F.relu(y * p[f"{key}.weight"].view(shape) + p[f"{key}.bias"].view(shape))

    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    y = F.conv2d(x, p["conv1.weight"], padding=1)
    for group, stride in ((1, 1), (2, 2), (3, 2)):
        for block in range((depth - 4) // 6):
            key, step = f"group{group}.{block}", stride if block == 0 else 1
            active = norm_relu(y, f"{key}.bn1")
            inner = F.conv2d(active, p[f"{key}.conv1.weight"], stride=step, padding=1)
            inner = F.conv2d(norm_relu(inner, f"{key}.bn2"), p[f"{key}.conv2.weight"], padding=1)
            if f"{key}.shortcut.weight" in p:
                y = inner + F.conv2d(active, p[f"{key}.shortcut.weight"], stride=step)
            else:
                y = inner + y
        assert y.shape == (2, 16 * widen * 2 ** (group - 1), 32 >> (group - 1), 32 >> (group - 1))
    y = F.avg_pool2d(norm_relu(y, "bn"), 8).reshape(2, -1)
    torch.testing.assert_close(model(x), F.linear(y, p["fc.weight"], p["fc.bias"]), rtol=1e-11, atol=1e-11)


def test_start() -> None:
    torch.manual_seed(0)
    model = wide_resnet(10, 4, 100)
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            weight = module.weight.detach()
            std = math.sqrt(2 / (weight.shape[0] * weight[0, 0].numel()))
            assert weight.std().item() == pytest.approx(std, rel=5 / math.sqrt(2 * weight.numel())), name
            assert module.bias is None, name
        elif isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all(), name
            assert (module.bias == 0).all(), name
    assert 0.98 / 16 < model.fc.weight.abs().max() <= 1 / 16
    assert (model.fc.bias == 0).all()


def test_takes_images_of_any_size() -> None:
    model = wide_resnet(10, 1).eval()
    assert WideResNet.input_size == (3, 32, 32)
    assert model(torch.randn(2, 3, 24, 40)).shape == (2, 10)


def test_dropout_stands_between_the_convolutions() -> None:
    model = wide_resnet(10, 1, dropout=0.4)
    blocks = [m for m in model.modules() if isinstance(m, WideBlock)]
    assert len(blocks) == 3
    assert [type(b.drop) for b in blocks] == [nn.Dropout] * 3
    assert all(b.drop.p == 0.4 for b in blocks)
    assert [type(m.drop) for m in wide_resnet(10, 1).modules() if isinstance(m, WideBlock)] == [nn.Identity] * 3
    order = [n.target for n in torch.fx.symbolic_trace(blocks[0].eval()).graph.nodes if n.op == "call_module"]
    assert order == ["bn1", "relu1", "conv1", "bn2", "relu2", "drop", "conv2"]


@pytest.mark.parametrize("depth", [4, 15, 17, -2])
def test_a_depth_that_is_not_6n_plus_4_is_refused(depth: int) -> None:
    with pytest.raises(ValueError, match=rf"depth must be 6n \+ 4, got {depth}; use one of 10, 16, 22"):
        wide_resnet(depth)


def test_bad_width_and_dropout_are_refused() -> None:
    with pytest.raises(ValueError, match="widen must be at least 1, got 0"):
        wide_resnet(widen=0)
    for dropout in (-0.1, 1.0, math.nan):
        with pytest.raises(ValueError, match=f"dropout must be at least 0 and below 1, got {dropout}"):
            wide_resnet(dropout=dropout)
    with pytest.raises(ValueError, match="stride 2 needs the channels to change, got 8 in and out"):
        WideBlock(8, 8, 2, 0.0)
