"""What a person expects of a ReLU that a converted layer shares with other places: z passes, all else is rectified."""

import copy
import io
import json

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torchvision.models import resnet18
from torchvision.models.resnet import BasicBlock, Bottleneck

import torch_dcl as dcl
from torch_dcl.convert import AbsorbedReLU, SharedReLU
from torch_dcl.kernels import dispatch
from torch_dcl.module import _DCL

BLOCKS = {"BasicBlock": (BasicBlock, 32, ["conv1"]), "Bottleneck": (Bottleneck, 128, ["conv1", "conv2"])}
every_block = pytest.mark.parametrize("name", BLOCKS)


class CountReLUs(TorchDispatchMode):
    """Counts the ReLUs that run."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.relu, torch.ops.aten.relu_)
        return func(*args, **(kwargs or {}))


def relus_run(model, *args):
    with torch.no_grad(), CountReLUs() as mode:
        model(*args)
    return mode.count


def block(name):
    kind, channels, _ = BLOCKS[name]
    return kind(channels, 32)


def images(name="Bottleneck", n=4):
    return torch.randn(n, BLOCKS[name][1], 8, 8, generator=torch.Generator().manual_seed(3))


def converted(model, size, **arguments):
    dcl.convert_(model, dcl.plan(model, size, **{"width": 4, **arguments}), init="random")
    return model


def converted_block(name="Bottleneck", **arguments):
    torch.manual_seed(1)
    model = converted(block(name), images(name).shape[1:], **arguments)
    assert [n for n, m in model.named_modules() if isinstance(m, _DCL)] == BLOCKS[name][2]
    return model


def with_plain_relus(model):
    """A copy in which every ReLU runs, as in the network before."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, SharedReLU | AbsorbedReLU):
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], nn.ReLU(getattr(module, "inplace", False)))
        if isinstance(module, _DCL):
            module.marks_output = False
    return model


def assert_as_with_plain_relus(model, x, *, reference=None):
    """Output and gradients, in both modes."""
    reference = with_plain_relus(model) if reference is None else reference
    assert not any(isinstance(m, SharedReLU | AbsorbedReLU) for m in reference.modules())
    for training in (True, False):
        ours, theirs = model.train(training)(x), reference.train(training)(x)
        assert torch.equal(ours, theirs)
        ours.square().sum().backward()
        theirs.square().sum().backward()
        for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), name
            if a.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0, msg=name)
        model.zero_grad()
        reference.zero_grad()


# Residual blocks


@every_block
@pytest.mark.parametrize("strategy", ["deterministic", "stochastic"])
def test_a_block_runs_the_relu_of_its_sum_alone(name, strategy):
    model, x = converted_block(name, branches=3, strategy=strategy), images(name)
    dcl.advance_branches_(model, 0)
    assert type(model.relu) is SharedReLU
    assert model.relu.inplace
    for training in (True, False):
        model.train(training)
        assert relus_run(with_plain_relus(model), x) == 1 + len(BLOCKS[name][2])
        assert relus_run(model, x) == 1
    assert_as_with_plain_relus(model, x)


@every_block
def test_the_plan_names_the_shared_relu(name):
    plan = dcl.plan(block(name), images(name).shape[1:], width=4)
    assert [(row.name, row.relu, row.shares_relu) for row in plan.selected] == [
        (unit, "relu", True) for unit in BLOCKS[name][2]
    ]
    assert dcl.Plan.from_json(plan.to_json()) == plan


def test_a_whole_network_runs_one_relu_a_block():
    torch.manual_seed(0)
    model = converted(resnet18(num_classes=4), (3, 32, 32))
    x = torch.randn(2, 3, 32, 32)
    assert relus_run(with_plain_relus(model), x) == 17
    assert relus_run(model, x) == 8
    assert type(model.relu) is AbsorbedReLU
    assert_as_with_plain_relus(model, x)


@pytest.mark.parametrize("training", [True, False])
@every_block
def test_a_compiled_block_is_one_graph_with_one_relu(name, training):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(sum("relu" in str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    model, x = converted_block(name).train(training), images(name)
    reference = with_plain_relus(model)
    run = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):
        ours = run(x)
        with dispatch.disabled():  # as a compiler sees it
            theirs = reference(x)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        ours.square().mean().backward()
        theirs.square().mean().backward()
    assert graphs == [1]
    for (own, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6, msg=own)


def test_a_layer_that_is_compiled_by_itself_in_a_network_that_is_not():
    torch._dynamo.reset()
    model, x = converted_block().eval(), images()
    expected = with_plain_relus(model)(x)
    model.conv1 = torch.compile(model.conv1, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_block_has_one_relu(strict):
    model, x = converted_block().eval(), images()
    program = torch.export.export(model, (x,), strict=strict)
    assert sum("aten.relu" in str(node.target) for node in program.graph.nodes) == 1
    torch.testing.assert_close(program.module()(x), with_plain_relus(model)(x), rtol=1e-5, atol=1e-5)


def test_a_block_traced_symbolically_with_its_layers_as_leaves():
    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return isinstance(module, _DCL) or super().is_leaf_module(module, name)

    model, x = converted_block().eval(), images()
    graph = torch.fx.GraphModule(model, Tracer().trace(model))
    assert torch.equal(graph(x), with_plain_relus(model)(x))


def test_a_block_under_vmap():
    model, x = converted_block().eval(), images()
    found = torch.vmap(lambda image: model(image[None])[0])(x)
    torch.testing.assert_close(found, with_plain_relus(model)(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("context", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_a_block_in_inference_mode_and_under_autocast(context):
    model, x = converted_block().eval(), images()
    with context():
        assert torch.equal(model(x), with_plain_relus(model)(x))
        with CountReLUs() as mode:
            model(x)
    assert mode.count == 1


@pytest.mark.parametrize("use_reentrant", [False, True])
@every_block
def test_activation_checkpointing(name, use_reentrant):
    model, x = converted_block(name).eval(), images(name)  # running statistics would move twice in training
    reference = with_plain_relus(model)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    z, expected = checkpoint(model, ours, use_reentrant=use_reentrant), reference(theirs)
    assert torch.equal(z, expected)
    z.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(ours.grad, theirs.grad)
    for (own, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), own


# Copies, files, and conversion in steps


def through_pickle(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle])
@every_block
def test_a_copy_does_the_same(name, copied):
    model, x = converted_block(name), images(name)
    twin = copied(model)
    assert type(twin.relu) is SharedReLU
    assert relus_run(twin.eval(), x) == 1
    assert torch.equal(twin(x), model.eval()(x))
    assert_as_with_plain_relus(twin, x)


@every_block
def test_a_saved_block_comes_back_with_its_shared_relu(name, tmp_path):
    model, x, path = converted_block(name), images(name), tmp_path / "m.safetensors"
    dcl.save_model(model, path)
    with safe_open(path, framework="pt") as file:
        description = json.loads(file.metadata()["torch_dcl"])
    assert description["shared_relus"] == [["relu"]]
    assert description["relus"] == []
    assert [entry["marks_output"] for entry in description["layers"]] == [True] * len(BLOCKS[name][2])
    plain, there = block(name), converted_block(name)
    hooked = block(name)
    hooked.relu.register_forward_hook(lambda *_: None)
    for into, kind in ((plain, SharedReLU), (there, SharedReLU), (hooked, nn.ReLU)):
        loaded = dcl.load_model(into, path)
        assert type(loaded.relu) is kind
        assert loaded.relu.inplace
        assert relus_run(loaded.eval(), x) == (1 if kind is SharedReLU else 1 + len(BLOCKS[name][2]))
        assert torch.equal(loaded(x), model.eval()(x))
    again = tmp_path / "again.safetensors"
    dcl.save_model(plain, again)
    with safe_open(again, framework="pt") as file:
        assert json.loads(file.metadata()["torch_dcl"]) == description
    assert_as_with_plain_relus(plain, x)


def test_the_training_flag_of_the_relu_is_carried_over(tmp_path):
    model = block("Bottleneck").train()
    model.relu.eval()
    converted(model, (128, 8, 8))
    assert not model.relu.training
    dcl.save_model(model, tmp_path / "m.safetensors")
    other = block("Bottleneck").train()
    other.relu.eval()
    assert not dcl.load_model(other, tmp_path / "m.safetensors").relu.training


@pytest.mark.parametrize("order", [("conv1", "conv2"), ("conv2", "conv1")])
def test_conversion_in_two_steps(order, tmp_path):
    torch.manual_seed(1)
    model, x = block("Bottleneck"), images()
    for i, unit in enumerate(order):
        plan = dcl.plan(model, (128, 8, 8), width=4)
        assert {row.name for row in plan.selected} == set(order[i:])
        assert all((row.relu, row.shares_relu) == ("relu", True) for row in plan.selected)
        before = model.relu
        dcl.convert_(model, plan.only(unit), init="random")
        assert type(model.relu) is SharedReLU
        assert i == 0 or model.relu is before
        assert relus_run(model, x) == 2 - i
        assert_as_with_plain_relus(model, x)
    assert dcl.plan(model, (128, 8, 8), width=4).selected == ()
    dcl.save_model(model, tmp_path / "m.safetensors")
    loaded = dcl.load_model(block("Bottleneck"), tmp_path / "m.safetensors")
    assert relus_run(loaded.eval(), x) == 1
    assert torch.equal(loaded.eval()(x), model.eval()(x))


def test_a_plan_from_before_shared_relus_leaves_them_alone():
    model = block("Bottleneck")
    data = json.loads(dcl.plan(model, (128, 8, 8), width=4).to_json())
    for row in data["rows"]:
        del row["shares_relu"]
        row["relu"] = None
    dcl.convert_(model, dcl.Plan.from_json(json.dumps(data)), init="random")
    assert type(model.relu) is nn.ReLU
    assert relus_run(model, images()) == 3


@pytest.mark.parametrize("when", ["before the plan", "after it"])
def test_a_shared_relu_that_somebody_hooked_into_stays(when):
    model, seen = block("Bottleneck"), []

    def hook():
        model.relu.register_forward_hook(lambda *_: seen.append(1))

    if when == "before the plan":
        hook()
    plan = dcl.plan(model, (128, 8, 8), width=4)
    if when == "after it":
        hook()
    dcl.convert_(model, plan, init="random")
    assert type(model.relu) is nn.ReLU
    seen.clear()
    assert relus_run(model, images()) == 3
    assert seen == [1] * 3


# What is not z, or not z any more


def test_what_a_hook_makes_of_z_is_rectified():
    model, x = converted_block().eval(), images()
    seen = []
    model.conv1.register_forward_hook(lambda _, __, z: z - 5)
    model.conv2.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    with torch.no_grad():
        model(x)
        assert torch.equal(seen[0], F.relu(model.conv1._compute(x) - 5))
    assert relus_run(model, x) == 2


def test_what_a_hook_makes_of_z_in_place_is_rectified():
    model, x = converted_block().eval(), images()
    seen = []

    def lower(_, __, z):
        z -= 5

    model.conv1.register_forward_hook(lower)
    model.conv2.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    with torch.no_grad():
        model(x)
        assert torch.equal(seen[0], F.relu(model.conv1._compute(x) - 5))
    assert relus_run(model, x) == 2


def test_the_mark_of_z_is_for_one_relu():
    layer, relu = nn.Linear(32, 32), nn.ReLU()

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.relu, self.head = layer, relu, nn.Linear(32, 2)

        def forward(self, x):
            return self.head(self.relu(self.relu(self.layer(x)) - 5))

    model = converted(Twice(), (32,))
    with torch.no_grad():
        z = model.layer(torch.randn(3, 32))
        assert model.relu(z) is z
        z -= 5
        assert z.min() < 0
        assert torch.equal(model.relu(z), z.clamp(min=0))
        assert torch.equal(model.relu(torch.tensor([-1.0, 2.0])), torch.tensor([0.0, 2.0]))


class Changed(nn.Module):
    """Changes in place what its ReLU gave, and rectifies it again."""

    def __init__(self, inplace):
        super().__init__()
        self.conv, self.relu, self.head = nn.Conv2d(16, 32, 3), nn.ReLU(inplace), nn.Conv2d(32, 2, 1)

    def forward(self, x):
        out = self.relu(self.conv(x))
        out += -5
        return self.head(self.relu(out))


@pytest.mark.parametrize("inplace", [True, False])
def test_z_changed_in_place_behind_its_relu_is_rectified(inplace):
    torch.manual_seed(0)
    model = converted(Changed(inplace), (16, 8, 8))
    assert type(model.relu) is SharedReLU
    x = 10 * torch.randn(4, 16, 8, 8)
    with torch.no_grad():
        z = model.conv(x)
        assert (z > 5).any()
        assert (z < 5).any()
        assert torch.equal(model(x), model.head(F.relu(z - 5)))
        assert relus_run(model, x) == 1
        torch._dynamo.reset()
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)


class Moved(nn.Module):
    """One ReLU behind a layer, behind a layer whose output is moved first, and behind a sum."""

    def __init__(self, move):
        super().__init__()
        self.conv, self.moved, self.head = nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 32, 3), nn.LazyLinear(2)
        self.relu, self.move = nn.ReLU(), move

    def forward(self, x):
        y = self.relu(self.move(self.moved(self.relu(self.conv(x)))))
        return self.head(self.relu(y - 1).flatten(1))


MOVES = {
    "flatten": lambda t: t.flatten(1), "max pooling": lambda t: F.max_pool2d(t, 2), "slice": lambda t: t[:, ::2],
    "transpose": lambda t: t.transpose(1, 3), "format": lambda t: t.to(memory_format=torch.channels_last),
}  # fmt: skip


@pytest.mark.parametrize("move", MOVES)
def test_a_layer_whose_output_is_moved_before_a_shared_relu(move):
    torch.manual_seed(0)
    model, x = Moved(MOVES[move]), torch.randn(4, 16, 8, 8)
    model(x)
    plan = dcl.plan(model, (16, 8, 8), width=4)
    rows = {row.name: row for row in plan.selected}
    assert rows.keys() == {"conv", "moved"}
    assert (rows["conv"].relu, rows["conv"].shares_relu) == ("relu", True)
    assert (rows["moved"].relu, rows["moved"].shares_relu) == (None, False)
    dcl.convert_(model, plan, init="random")
    assert type(model.relu) is SharedReLU
    assert_as_with_plain_relus(model, x)
    with torch.no_grad():
        z = model.move(model.moved(model.conv(x)))
        torch.testing.assert_close(model(x), model.head(F.relu(z - 1).flatten(1)), rtol=1e-6, atol=1e-6)


def test_a_layer_called_twice_behind_a_relu_that_serves_a_sum_too():
    class Repeated(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.relu, self.head = nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Linear(32, 2)

        def forward(self, x):
            y = self.relu(self.layer(self.relu(self.layer(x))))
            return self.head(self.relu(y - x))

    torch.manual_seed(0)
    model, x = converted(Repeated(), (32,)), torch.randn(8, 32)
    assert type(model.relu) is SharedReLU
    assert relus_run(model, x) == 1
    assert_as_with_plain_relus(model, x)


def test_a_relu_of_several_names_is_replaced_under_all_of_them():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.first, self.head = nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)
            self.second = self.first

        def forward(self, x):
            return self.head(self.second(self.first(self.layer(x)) - x))

    torch.manual_seed(0)
    model, x = converted(Named(), (32,)), torch.randn(8, 32)
    assert model.first is model.second
    assert type(model.first) is SharedReLU
    assert relus_run(model, x) == 1
    with torch.no_grad():
        assert torch.equal(model(x), model.head(F.relu(model.layer(x) - x)))
