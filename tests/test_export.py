"""Layers and small networks outside of eager torch: torch.export, and ONNX checked with onnxruntime."""

import copy

import pytest
import torch
from tests.halves import slow
from torch import nn
from torch.export import Dim

from torch_dcl import DCLConv1d, DCLConv2d, DCLConv3d, DCLLinear, advance_branches_

CONV2D = [
    pytest.param({"branches": 2}, id="T2"),
    pytest.param({"branches": 3}, id="T3", marks=pytest.mark.slow),
    pytest.param({"branches": 3, "strategy": "stochastic"}, id="stochastic"),
    pytest.param({"branches": 4, "strategy": "stochastic", "norm_layer": nn.BatchNorm2d}, id="stochastic with norm"),
    pytest.param(
        {"branches": 2, "width": (3, 5), "branch_activation": nn.ReLU}, id="unequal with activation",
        marks=pytest.mark.slow,
    ),
    pytest.param({"branches": 1, "eps": 0}, id="low rank", marks=pytest.mark.slow),
]  # fmt: skip


def network(**options):
    """A network with a DCL layer of each kind that images meet, for any image size."""
    torch.manual_seed(1)
    linear = {k: v for k, v in options.items() if k != "norm_layer"}
    return nn.Sequential(
        DCLConv2d(3, 12, 3, padding=1, stride=2, **options),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        DCLLinear(48, 10, **linear),
    ).eval()


def assert_same_everywhere(run, module, shapes, *, rtol=1e-4, atol=1e-5):
    for shape in shapes:
        x = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(run(x), module(x), rtol=rtol, atol=atol)


@pytest.mark.parametrize("strict", [False, slow(True)])
@pytest.mark.parametrize("options", CONV2D[:3])
def test_export_with_a_dynamic_batch_and_image_size(options, strict):
    model = network(**options)
    dynamic = ({0: Dim("batch"), 2: Dim("height", min=4), 3: Dim("width", min=4)},)
    program = torch.export.export(model, (torch.randn(2, 3, 9, 8),), dynamic_shapes=dynamic, strict=strict)
    assert_same_everywhere(program.module(), model, [(2, 3, 9, 8), (5, 3, 12, 7), (1, 3, 16, 16)])


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (DCLLinear(6, 10, branches=3), (2, 6)),
        (DCLConv1d(3, 10, 3, branches=3), (2, 3, 8)),
        (DCLConv3d(3, 10, 3, branches=3, strategy="stochastic").eval(), (2, 3, 5, 6, 4)),
    ],
)
def test_export_of_the_other_layers(layer, shape):
    program = torch.export.export(layer, (torch.randn(shape),), dynamic_shapes=({0: Dim("batch")},))
    assert_same_everywhere(program.module(), layer, [shape, (7, *shape[1:])])


def test_an_exported_program_goes_through_a_file(tmp_path):
    model = network(branches=3)
    program = torch.export.export(model, (torch.randn(2, 3, 8, 8),), dynamic_shapes=({0: Dim("batch")},))
    torch.export.save(program, tmp_path / "network.pt2")
    loaded = torch.export.load(tmp_path / "network.pt2")
    assert_same_everywhere(loaded.module(), model, [(2, 3, 8, 8), (4, 3, 8, 8)])


def test_an_exported_stochastic_layer_in_training_follows_the_step():
    """The drawn pair is data of the exported program, not frozen into it."""
    layer = DCLConv2d(3, 8, 3, branches=4, strategy="stochastic")
    advance_branches_(layer, 0)
    x = torch.randn(2, 3, 6, 6)
    exported = torch.export.export(layer, (x,)).module()
    drawn = set()
    for step in range(5):
        advance_branches_(layer, step)
        state = copy.deepcopy(layer.state_dict())
        del state["fusion._extra_state"]  # ε is a constant of the program
        exported.load_state_dict(state)
        torch.testing.assert_close(exported(x), layer(x), rtol=1e-5, atol=1e-6)
        drawn.add(tuple(layer.fusion.active.tolist()))
    assert len(drawn) > 1


def onnx_runner(model, x, dynamic_shapes, folder):
    pytest.importorskip("onnx", reason="needs the extra torch-dcl[onnx]")
    pytest.importorskip("onnxscript", reason="needs the extra torch-dcl[onnx]")
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra torch-dcl[onnx]")
    program = torch.onnx.export(model, (x,), dynamo=True, dynamic_shapes=dynamic_shapes, verbose=False)
    path = folder / "model.onnx"
    program.save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (name,) = (entry.name for entry in session.get_inputs())
    return lambda value: torch.from_numpy(session.run(None, {name: value.numpy()})[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("options", CONV2D)
def test_onnx_with_a_dynamic_batch_and_image_size(options, tmp_path):
    layer = DCLConv2d(3, 12, 3, padding=1, **options).eval()
    dynamic = ({0: Dim("batch"), 2: Dim("height"), 3: Dim("width")},)
    run = onnx_runner(layer, torch.randn(2, 3, 9, 8), dynamic, tmp_path)
    assert_same_everywhere(run, layer, [(2, 3, 9, 8), (5, 3, 12, 7), (1, 3, 16, 16)])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_onnx_of_a_linear_layer_with_a_dynamic_batch(tmp_path):
    layer = DCLLinear(6, 20, branches=3).eval()
    run = onnx_runner(layer, torch.randn(2, 6), ({0: Dim("batch")},), tmp_path)
    assert_same_everywhere(run, layer, [(2, 6), (1, 6), (9, 6)])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_onnx_keeps_the_extremes(tmp_path):
    """Dead branches and products beyond float32 come out of onnxruntime as they come out of torch."""
    layer = DCLLinear(4, 4, branches=3, width=4).eval()
    with torch.no_grad():
        layer.branch.weight.copy_(torch.eye(4).repeat(3, 1))
        layer.fusion.weight.copy_(torch.eye(4).repeat(3, 1))
        layer.fusion.bias.zero_()
    run = onnx_runner(layer, torch.randn(2, 4), ({0: Dim("batch")},), tmp_path)
    x = torch.tensor([[0.0, -1.0, 1e30, 1e-30], [3e38, 1e38, 1.0, 1e-45], [1e20, 5.0, -3e38, 0.1]])
    with torch.no_grad():
        z = layer(x)
    torch.testing.assert_close(run(x), z, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(z, x.double().clamp(min=0).pow(3).add(1e-3).pow(1 / 3).float(), rtol=1e-5, atol=0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("options", CONV2D)
def test_onnx_by_tracing_too(options, tmp_path):
    """``dynamo=False``, as many scripts still call it."""
    pytest.importorskip("onnx", reason="needs the extra torch-dcl[onnx]")
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra torch-dcl[onnx]")
    model, path = network(**options), tmp_path / "model.onnx"
    names = {"input_names": ["x"], "dynamic_axes": {"x": {0: "batch"}}}
    torch.onnx.export(model, (torch.randn(2, 3, 8, 8),), path, dynamo=False, **names)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert_same_everywhere(
        lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0]), model, [(2, 3, 8, 8), (5, 3, 8, 8)]
    )


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated")
def test_scripting_says_what_to_do_instead():
    for model in (network(branches=2), DCLLinear(6, 10)):
        with pytest.raises(TypeError, match=r"cannot be scripted; export the network with torch\.export"):
            torch.jit.script(model)
