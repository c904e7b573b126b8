"""What a person expects of torchao's ``quantize_`` on a converted network: what the guide says of it."""

import pytest
import torch
from torch import nn

import torch_dcl as dcl

torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's own


def converted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)).eval()
    dcl.convert_(model, dcl.plan(model, (64,)).only("2"), init="fit")
    return model


def quantised(model, **arguments):
    """Which parameters ``quantize_`` replaced, and how far the output moved."""
    before, x = dict(model.named_parameters()), torch.randn(32, 64)
    with torch.no_grad():
        expected = model(x)
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig(), **arguments)
        moved = (model(x) - expected).norm() / expected.norm()
    return {name for name, p in model.named_parameters() if type(p) is not type(before[name])}, float(moved)


def test_by_itself_it_quantises_the_branches_and_not_the_fusion():
    replaced, moved = quantised(converted())
    assert replaced == {"0.weight", "2.branch.weight", "4.weight"}
    assert 0 < moved < 0.02


def test_the_filter_of_the_guide_leaves_dcl_layers_whole():
    model = converted()
    layer = {name: tensor.clone() for name, tensor in model[2].state_dict().items()}
    replaced, moved = quantised(
        model, filter_fn=lambda module, name: isinstance(module, nn.Linear) and not name.endswith("branch")
    )
    assert replaced == {"0.weight", "4.weight"}
    assert 0 < moved < 0.02
    torch.testing.assert_close(model[2].state_dict(), layer, rtol=0, atol=0)


def test_a_quantised_network_is_not_saved(tmp_path):
    model = converted()
    quantised(model)
    with pytest.raises(TypeError, match="save the network before its weights are quantised"):
        dcl.save_model(model, tmp_path / "m.safetensors")
