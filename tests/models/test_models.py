"""What holds for every baseline network."""

import importlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

from torch_dcl import models
from torch_dcl.models._quick import QuickConv2d, QuickResponseNorm

BUILDERS: dict[str, Callable[[int], nn.Module]] = {
    "lenet": models.lenet,
    "lenet_cifar": models.lenet_cifar,
    "bignet": models.bignet,
    "wide_resnet": lambda classes: models.wide_resnet(10, 1, classes),
    "alexnet": models.alexnet,
}
SMALL = [name for name in BUILDERS if name != "alexnet"]


def build(name: str, classes: int = 7) -> nn.Module:
    torch.manual_seed(0)
    return BUILDERS[name](classes).eval()


def images(model: nn.Module, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, *model.input_size, generator=torch.Generator().manual_seed(1))


def test_every_public_name_is_there() -> None:
    assert all(hasattr(models, name) for name in models.__all__)
    assert len(models.__all__) == len(set(models.__all__))


@pytest.mark.parametrize("name", BUILDERS)
def test_images_become_logits(name: str) -> None:
    model = build(name)
    logits = model(images(model))
    assert logits.shape == (2, 7)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("name", SMALL)
def test_one_seed_gives_one_start(name: str) -> None:
    first, second = build(name).state_dict(), build(name).state_dict()
    for key, value in first.items():
        assert torch.equal(value, second[key]), key
    torch.manual_seed(1)
    other = BUILDERS[name](7).state_dict()
    assert not all(torch.equal(value, other[key]) for key, value in first.items())


@pytest.mark.parametrize("name", SMALL)
def test_reset_parameters_leaves_nothing_of_before(name: str) -> None:
    model, starts = build(name), []
    for before in (9.0, -9.0):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(before)
        torch.manual_seed(0)
        model.reset_parameters()
        starts.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*starts, strict=True))


@pytest.mark.parametrize("name", SMALL)
def test_a_training_step_reaches_every_parameter(name: str) -> None:
    model = build(name).train()
    torch.nn.functional.cross_entropy(model(images(model, 4)), torch.arange(4)).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key
        assert parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("classes", [0, -3])
def test_no_classes_are_refused(name: str, classes: int) -> None:
    with pytest.raises(ValueError, match=rf"num_classes must be at least 1, got {classes}; pass the number"):
        BUILDERS[name](classes)


@pytest.mark.parametrize("name", ["lenet", "lenet_cifar", "bignet"])
@pytest.mark.parametrize("change", [(0, -1), (1, 0), (4, 4)])
def test_another_image_size_is_refused(name: str, change: tuple[int, int]) -> None:
    model = build(name)
    channels, height, width = model.input_size
    got = (2, channels, height + change[0], width + change[1])
    with pytest.raises(ValueError, match="takes images of size") as error:
        model(torch.zeros(got))
    message = str(error.value)
    assert type(model).__name__ in message
    assert f"[N, {channels}, {height}, {width}]" in message
    assert str(list(got)) in message
    assert f"crop or resize the images to {height}x{width}" in message


@pytest.mark.parametrize("name", SMALL)
def test_other_channels_are_refused(name: str) -> None:
    model = build(name)
    channels, height, width = model.input_size
    with pytest.raises(ValueError, match=rf"pass images with {channels} channels?, channels before height"):
        model(torch.zeros(2, channels + 1, height, width))
    with pytest.raises(ValueError, match=rf"pass images with {channels} channels?, channels before height"):
        model(torch.zeros(2, height, width, channels))


@pytest.mark.parametrize("name", SMALL)
def test_a_single_image_wants_its_batch_dimension(name: str) -> None:
    model = build(name)
    with pytest.raises(ValueError, match=r"add the batch dimension with x\.unsqueeze\(0\)"):
        model(torch.zeros(model.input_size))
    with pytest.raises(ValueError, match="pass a batch of images with the channels second"):
        model(torch.zeros(2, 3))


@pytest.mark.parametrize("name", SMALL)
def test_compiles_in_one_graph(name: str) -> None:
    torch.compiler.reset()
    model = build(name)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    x = images(model)
    torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("name", SMALL)
def test_exports_with_any_batch(name: str) -> None:
    model = build(name)
    exported = torch.export.export(model, (images(model),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    x = images(model, 5)
    torch.testing.assert_close(exported.module()(x), model(x))


@pytest.mark.parametrize("name", SMALL)
def test_torch_fx_traces_it(name: str) -> None:
    model = build(name)
    traced = torch.fx.symbolic_trace(model)
    x = images(model)
    torch.testing.assert_close(traced(x), model(x))
    with pytest.raises(ValueError, match="add the batch dimension"):
        traced(x[0])


@pytest.mark.parametrize("name", ["lenet", "lenet_cifar"])
def test_a_stack_of_networks_runs_under_vmap(name: str) -> None:
    networks = [BUILDERS[name](7).eval() for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(networks)
    x = images(networks[0])

    def run(p: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(networks[0], (p, b), (x,))

    together = torch.func.vmap(run)(parameters, buffers)
    torch.testing.assert_close(together, torch.stack([network(x) for network in networks]), rtol=1e-4, atol=1e-6)


ORDER = {
    "lenet": "conv1 pool1 relu1 conv2 pool2 relu2 fc1 relu3 drop1 fc2",
    "lenet_cifar": "conv1 pool1 relu1 conv2 pool2 relu2 conv3 pool3 relu3 fc1 relu4 drop1 fc2",
    "bignet": "conv1 relu1 conv2 relu2 pool1 drop1 conv3 relu3 conv4 relu4 pool2 drop2 "
    "conv5 relu5 conv6 relu6 conv7 relu7 conv8 relu8 pool3 drop3 fc1 relu9 drop4 fc2 relu10 drop5 fc3",
    "alexnet": "conv1 relu1 norm1 pool1 conv2 relu2 norm2 pool2 conv3 relu3 conv4 relu4 conv5 relu5 pool5 "
    "fc6 relu6 drop6 fc7 relu7 drop7 fc8",
}
KINDS = {
    "conv": nn.Conv2d,
    "pool": nn.MaxPool2d,
    "relu": nn.ReLU,
    "norm": nn.LocalResponseNorm,
    "drop": nn.Dropout,
    "fc": nn.Linear,
}
QUICK = {
    ("alexnet", "conv1"): QuickConv2d, ("alexnet", "norm1"): QuickResponseNorm, ("alexnet", "norm2"): QuickResponseNorm,
}  # fmt: skip


@pytest.mark.parametrize("name", ORDER)
def test_layers_run_in_the_order_of_the_paper(name: str) -> None:
    with torch.device("meta"):
        model = BUILDERS[name](10)
    called = [node.target for node in torch.fx.symbolic_trace(model).graph.nodes if node.op == "call_module"]
    assert called == ORDER[name].split()
    for layer in called:
        expected = QUICK.get((name, layer), KINDS[layer.rstrip("0123456789")])
        assert type(model.get_submodule(layer)) is expected, layer


@pytest.mark.parametrize("name", [*BUILDERS, "counting"])
def test_the_networks_know_nothing_of_dcl(name: str) -> None:
    module = importlib.import_module(f"torch_dcl.models.{name}")
    named = {name: value for name, value in vars(module).items() if not name.startswith("__import_")}  # by a compiler
    own = {getattr(value, "__module__", None) or getattr(value, "__name__", "") for value in named.values()}
    outside = {m for m in own if str(m).startswith("torch_dcl") and not str(m).startswith("torch_dcl.models")}
    assert outside == set()
