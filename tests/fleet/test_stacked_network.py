"""A stack: what it gives is what its networks give one by one."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from torch_dcl import DCLConv2d, DCLLinear, advance_branches_, convert_, plan, seed_branches_
from torch_dcl.experiments import columns
from torch_dcl.fleet import Stack, StackedLayer, Unstacked, register_stacked, stacked_layers
from torch_dcl.models.controls import SummedLinear
from torch_dcl.models.rivals import GatedLinear, SortLinear

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch's own word on an even kernel

EXACT = {"rtol": 1e-10, "atol": 1e-12}


def scrambled(model):
    """The model in float64 with nothing left at its start: biases and running statistics too."""
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                buffer.copy_(torch.rand_like(buffer) + 0.5 if "var" in name else torch.randn_like(buffer))
    return model


def made(build, size=3):
    return [scrambled(build()) for _ in range(size)]


def images(networks, shape, batch=4):
    return torch.randn(len(networks), batch, *shape, dtype=torch.float64)


def without_dropout(networks):
    for network in networks:
        for module in network.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    return networks


def assert_same_outputs(networks, x):
    for network in networks:
        network.eval()
    y = Stack(networks)(x)
    expected = torch.stack([network(x_i) for network, x_i in zip(networks, x, strict=True)])
    torch.testing.assert_close(y, expected, **EXACT)


def assert_same_training(networks, x):
    """Output, gradients of weights and input, and buffers after a forward pass in training."""
    without_dropout(networks)
    for network in networks:
        network.train()
    stack = Stack(networks)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = stack(mine)
    expected = torch.stack([network(x_i) for network, x_i in zip(networks, other, strict=True)])
    torch.testing.assert_close(y, expected, **EXACT)
    incoming = torch.randn_like(y)
    y.backward(incoming)
    expected.backward(incoming)
    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-11)
    gradients = {name: parameter.grad for name, parameter in stack.named_stacked()}
    for i, network in enumerate(networks):
        for name, parameter in network.named_parameters():
            torch.testing.assert_close(gradients[name][i], parameter.grad, rtol=1e-9, atol=1e-11, msg=name)
        buffers = dict(stack.network(i).named_buffers())
        for name, buffer in network.named_buffers():
            torch.testing.assert_close(buffers[name], buffer, **EXACT)


class Small(nn.Module):
    """Every kind of layer that treats images, a shared ReLU, and a shortcut."""

    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(2, 4, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 6, 3, stride=2, padding=(1, 2), groups=2, bias=False)
        self.lrn = nn.LocalResponseNorm(3)
        self.conv3 = nn.Conv2d(6, 6, 3, padding=2, dilation=2, padding_mode="circular")
        self.norm2 = nn.BatchNorm2d(6, affine=False)
        self.mean = nn.AvgPool2d(2)
        self.all = nn.AdaptiveAvgPool2d(2)
        self.drop = nn.Dropout(0.3)
        self.norm3 = nn.BatchNorm1d(24)
        self.fc = nn.Linear(24, 5)

    def forward(self, x):
        x = self.relu(self.norm1(self.conv1(x)))
        x = self.lrn(self.relu(self.conv2(x)))
        x = x + torch.tanh(self.norm2(self.conv3(x)))
        x = self.all(self.mean(x))
        return self.fc(self.drop(self.norm3(torch.flatten(x, 1))))


def sequential(*layers):
    return lambda: nn.Sequential(*copy.deepcopy(layers))


NETWORKS = {
    "small": (Small, (2, 9, 11)),
    "conv, relu, pool": (sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.MaxPool2d(2)), (2, 9, 8)),
    "conv, pool, relu": (sequential(nn.Conv2d(2, 5, 3), nn.MaxPool2d(2), nn.ReLU()), (2, 8, 9)),
    "conv, pool, relu, pool, relu": (
        sequential(nn.Conv2d(1, 3, 2), nn.MaxPool2d(2), nn.ReLU(), nn.MaxPool2d(2), nn.ReLU()), (1, 12, 9),
    ),
    "conv in same padding": (sequential(nn.Conv2d(1, 3, 4, padding="same"), nn.ReLU()), (1, 6, 7)),
    "conv in valid padding": (sequential(nn.Conv2d(1, 3, 4, padding="valid", bias=False), nn.ReLU()), (1, 6, 7)),
    "pool that overlaps": (sequential(nn.Conv2d(1, 3, 2), nn.MaxPool2d(3, 2), nn.ReLU()), (1, 8, 8)),
    "pool that rounds up": (sequential(nn.Conv2d(1, 3, 2), nn.MaxPool2d(2, ceil_mode=True), nn.ReLU()), (1, 8, 8)),
    "pool with padding": (sequential(nn.Conv2d(1, 3, 2), nn.MaxPool2d(2, padding=1), nn.ReLU()), (1, 8, 8)),
    "adaptive maximum": (sequential(nn.Conv2d(1, 3, 2, bias=False), nn.AdaptiveMaxPool2d((2, 1))), (1, 7, 6)),
    "batch norm that averages": (
        sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3, momentum=None), nn.ReLU()), (1, 5, 5),
    ),
    "batch norm without statistics": (
        sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3, track_running_stats=False), nn.SiLU()), (1, 5, 5),
    ),
    "flatten to the middle": (sequential(nn.Flatten(1, 2), nn.Linear(5, 4), nn.GELU(), nn.Flatten()), (3, 2, 5)),
    "activations": (
        sequential(nn.Linear(6, 5), nn.LeakyReLU(0.2), nn.ReLU6(), nn.Identity(), nn.Tanh(), nn.Sigmoid()), (6,),
    ),
    "DCL linear": (sequential(DCLLinear(7, 9, branches=2, width=3), nn.Linear(9, 3, bias=False)), (7,)),
    "DCL linear of unequal widths": (sequential(DCLLinear(7, 9, branches=3, width=(2, 5, 1))), (7,)),
    "DCL linear of four branches without bias": (
        sequential(DCLLinear(7, 9, branches=4, width=3, bias=False, eps=0.3)), (7,),
    ),
    "DCL linear over more dimensions": (sequential(DCLLinear(4, 5, branches=3, width=2)), (2, 3, 4)),
    "DCL linear with norm and activation": (
        sequential(DCLLinear(7, 9, width=3, norm_layer=nn.BatchNorm1d, branch_activation=nn.ReLU)), (7,),
    ),
    "DCL linear of one branch": (sequential(DCLLinear(7, 9, branches=1, width=3, eps=0.0)), (7,)),
    "DCL conv": (sequential(DCLConv2d(2, 6, 3, branches=3, width=4, padding=1), nn.MaxPool2d(2)), (2, 7, 5)),
    "DCL conv with norm": (sequential(DCLConv2d(2, 6, 3, width=4, stride=2, norm_layer=nn.BatchNorm2d)), (2, 7, 5)),
    "DCL conv with norm, unequal": (
        sequential(DCLConv2d(2, 6, 3, width=(1, 4), norm_layer=nn.BatchNorm2d, bias=False)), (2, 7, 5),
    ),
    "DCL conv with activation": (
        sequential(DCLConv2d(2, 6, 3, width=4, dilation=2, branch_activation=nn.LeakyReLU)), (2, 7, 6),
    ),
    "averaged branches": (sequential(SummedLinear(7, 9, branches=3, width=2), nn.Linear(9, 2)), (7,)),
    "a gate": (sequential(GatedLinear(7, 9, branches=2, width=3), nn.Linear(9, 2)), (7,)),
    "the sum and the root of the product": (sequential(SortLinear(7, 9, width=2), nn.Linear(9, 2)), (7,)),
    "averaged branches without bias": (sequential(SummedLinear(7, 9, width=2, bias=False)), (7,)),
}  # fmt: skip
every_network = pytest.mark.parametrize("kind", NETWORKS)


@every_network
def test_a_stack_gives_what_its_networks_give(kind):
    build, shape = NETWORKS[kind]
    networks = made(build)
    assert_same_outputs(networks, images(networks, shape))


@every_network
def test_gradients_and_running_statistics_are_those_of_the_networks(kind):
    build, shape = NETWORKS[kind]
    networks = made(build)
    assert_same_training(networks, images(networks, shape))


@pytest.mark.parametrize("column", [*columns.MODELS[2:], "baseline", "A5S", "AB2"])
def test_the_networks_of_the_table_give_the_same_in_a_stack(column):
    networks = [scrambled(columns.build(column, 10, seed)) for seed in range(2)]
    assert_same_outputs(networks, images(networks, (1, 28, 28), batch=3))


@pytest.mark.parametrize("column", ["baseline", "A2", "A3D", "B3D", "summed"])
def test_the_networks_of_the_table_have_the_same_gradients_in_a_stack(column):
    networks = [scrambled(columns.build(column, 10, seed)) for seed in range(2)]
    assert_same_training(networks, images(networks, (1, 28, 28), batch=3))


@pytest.mark.parametrize("column", ["A3S", "B3S"])
def test_stochastic_networks_train_the_pair_of_their_own_seed(column):
    networks = without_dropout([scrambled(columns.build(column, 10, seed)) for seed in range(3)])
    stack = Stack(networks)
    x = images(networks, (1, 28, 28), batch=2)
    seeds = [4, 2**40 + 1, 2**62 + 5]
    drawn = set()
    for step in (0, 7):
        stack.advance(torch.tensor(seeds), torch.tensor([step]))
        gradients = torch.autograd.grad(stack(x).square().sum(), [p for _, p in stack.named_stacked()])
        by_name = dict(zip(dict(stack.named_stacked()), gradients, strict=True))
        for i, (network, seed) in enumerate(zip(networks, seeds, strict=True)):
            seed_branches_(network, seed)
            advance_branches_(network, step)
            network.zero_grad()
            network(x[i]).square().sum().backward()
            for name, parameter in network.named_parameters():  # small values are rounded as the large ones they sum up
                largest = float(parameter.grad.abs().max())
                torch.testing.assert_close(by_name[name][i], parameter.grad, rtol=1e-9, atol=1e-12 * largest, msg=name)
            state = network.state_dict()
            for name in (name for name in state if name.endswith(("key", "active"))):
                assert torch.equal(stack.state_of(i)[name], state[name])
                drawn.add(tuple(state[name].tolist()))
    assert len(drawn) > 7


def test_a_stack_of_one_is_the_network():
    networks = made(Small, 1)
    assert_same_outputs(networks, images(networks, (2, 9, 9)))


# Over random networks


@st.composite
def random_networks(draw):
    """A sequence of layers that fit each other, and the shape of its input."""
    channels, side = draw(st.integers(1, 3)), draw(st.integers(6, 10))
    shape = (channels, side, side)
    layers = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["conv", "dcl", "relu", "pool", "norm"]))
        wide = draw(st.integers(1, 5))
        if kind in ("conv", "dcl"):
            kernel, padding = draw(st.integers(1, 3)), draw(st.integers(0, 1))
            stride = draw(st.integers(1, 2))
            if side + 2 * padding < kernel:
                continue
            geometry = {"stride": stride, "padding": padding, "bias": draw(st.booleans())}
            if kind == "dcl":
                geometry |= {"branches": draw(st.integers(1, 4)), "width": draw(st.integers(1, wide))}
            layers.append((nn.Conv2d if kind == "conv" else DCLConv2d)(channels, wide, kernel, **geometry))
            channels, side = wide, (side + 2 * padding - kernel) // stride + 1
        elif kind == "pool" and side >= 2:
            layers.append(nn.MaxPool2d(2))
            side //= 2
        elif kind == "norm":
            layers.append(nn.BatchNorm2d(channels))
        elif kind == "relu":
            layers.append(nn.ReLU())
    layers += [nn.Flatten(), nn.Linear(channels * side * side, draw(st.integers(1, 4)))]
    return layers, shape


@settings(max_examples=60)
@given(random=random_networks(), size=st.integers(1, 4), batch=st.integers(2, 4))
def test_any_sequence_of_layers_gives_the_same_in_a_stack(random, size, batch):
    layers, shape = random
    networks = made(sequential(*layers), size)
    x = images(networks, shape, batch)
    assert_same_outputs(networks, x)
    assert_same_training(networks, x)


# Merging


class Branching(nn.Module):
    """A convolution whose output is used twice, and one that is called twice: neither may be merged."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.again = nn.Conv2d(4, 4, 3, padding=1)
        self.relu, self.pool = nn.ReLU(), nn.MaxPool2d(2)

    def forward(self, x):
        x = self.conv(x)
        x = x + self.relu(x)
        x = self.relu(self.again(x))
        return self.pool(self.again(x))


def merged(stack):
    return [(m.pool, m.relu) for m in stack.modules() if isinstance(m, stacked_layers.StackedConv2d)]


def test_what_is_used_twice_is_not_merged_away():
    networks = made(Branching)
    assert_same_training(networks, images(networks, (2, 6, 6)))
    assert merged(Stack(networks)) == [(1, False), (1, False)]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ((nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2)), (2, True)),
        ((nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.ReLU()), (2, True)),
        ((nn.Conv2d(1, 2, 3), nn.MaxPool2d(2)), (2, False)),
        ((nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True)), (1, True)),
        ((nn.Conv2d(1, 2, 3), nn.MaxPool2d(3)), (1, False)),
        ((nn.Conv2d(1, 2, 3), nn.Tanh(), nn.ReLU()), (1, False)),
        ((nn.Conv2d(1, 2, 3, stride=2), nn.ReLU()), (1, False)),
    ],
)
def test_a_convolution_takes_over_the_pooling_and_the_relu_behind_it(layers, expected):
    assert merged(Stack([nn.Sequential(*layers)])) == [expected]


class Functional(nn.Module):
    """The same without layers for what has no weights."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 2)
        self.fc = nn.Linear(48, 2)

    def forward(self, x):
        y = F.relu(self.conv(x)) * 2
        y = torch.sigmoid(y).contiguous().relu() + torch.relu(y)
        return self.fc(y.flatten(1).relu_())


def test_functions_that_work_value_by_value_may_stand_in_the_forward_pass():
    networks = made(Functional)
    assert_same_outputs(networks, images(networks, (1, 5, 5)))
    assert_same_training(networks, images(networks, (1, 5, 5)))


# Back to plain networks


@pytest.mark.parametrize("kind", ["small", "DCL conv with norm", "DCL linear with norm and activation"])
def test_weights_and_buffers_come_back_as_they_went_in(kind):
    networks = made(NETWORKS[kind][0])
    stack = Stack(networks)
    for i, network in enumerate(networks):
        back = stack.network(i)
        assert type(back) is type(network)
        state = network.state_dict()
        assert list(back.state_dict()) == list(state)
        for name, value in back.state_dict().items():
            assert torch.equal(value, state[name]), name
        assert {n for n, p in back.named_parameters() if p.requires_grad} == dict(network.named_parameters()).keys()


def test_names_in_a_stack_are_those_of_the_plain_network():
    networks = made(Small)
    stack = Stack(networks)
    plain = networks[0].state_dict()
    assert stack.state_of(0).keys() == plain.keys()
    parameters = dict(stack.named_stacked())
    assert parameters.keys() == dict(networks[0].named_parameters()).keys()
    assert all(parameters[name].shape == (3, *plain[name].shape) for name in parameters)


@pytest.mark.parametrize("kind", [Stack, Unstacked])
def test_epsilon_comes_back_as_it_went_in(kind):
    networks = [nn.Sequential(DCLLinear(5, 8, eps=0.3), nn.Linear(8, 2)) for _ in range(2)]
    stack = kind(networks)
    assert stack.network(1)[0].eps == 0.3
    state, expected = stack.state_of(1), networks[1].state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_a_stack_holds_copies():
    networks = made(Small)
    stack = Stack(networks)
    before = copy.deepcopy(networks[1].state_dict())
    with torch.no_grad():
        for _, parameter in stack.named_stacked():
            parameter.zero_()
    for name, value in networks[1].state_dict().items():
        assert torch.equal(value, before[name])
    back = stack.network(1)
    with torch.no_grad():
        back.fc.weight.fill_(1)
    assert not dict(stack.named_stacked())["fc.weight"].any()


def test_train_and_eval_reach_the_layers():
    networks = made(Small)
    assert Stack([network.eval() for network in networks]).training is False
    stack = Stack([network.train() for network in networks])
    assert stack.training
    assert all(not module.training for module in stack.eval().modules())


# A layer that nobody knows


class Scale(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.factor = nn.Parameter(torch.randn(features))
        self.register_buffer("shift", torch.randn(features))

    def forward(self, x):
        return x * self.factor + self.shift


class StackedScale(StackedLayer):
    def forward(self, x):
        return x * self.factor[:, None] + self.shift[:, None]


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 4), Scale(4))

    def forward(self, x):
        return self.body(x)


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(stacked_layers, "_BUILDERS", dict(stacked_layers._BUILDERS))


def test_torch_layers_that_cannot_be_stacked_are_named_with_the_remedy():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    with pytest.raises(TypeError, match=r"'1\.1' is a LayerNorm.*register_stacked\(LayerNorm, build\).*Conv2d"):
        Stack([model])


def test_a_registered_layer_stacks(registry):
    with pytest.raises(TypeError, match="one more dimension in front"):
        Stack(made(Outer))
    register_stacked(Scale, StackedScale)
    networks = made(Outer)
    assert_same_outputs(networks, images(networks, (5,)))
    assert_same_training(networks, images(networks, (5,)))
    stack = Stack(networks)
    assert stack.state_of(2).keys() == networks[2].state_dict().keys()
    assert torch.equal(stack.network(2).body[1].shift, networks[2].body[1].shift)


def test_a_subclass_of_a_known_layer_is_not_taken_for_it(registry):
    class Doubling(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    with pytest.raises(TypeError):
        Stack([nn.Sequential(Doubling(3, 3))])


def test_a_registered_layer_hears_of_every_step(registry):
    heard = []

    class Listening(StackedScale):
        def advance(self, seed, step):
            heard.append((seed.tolist(), int(step)))

    register_stacked(Scale, Listening)
    stack = Stack(made(Outer, 2))
    stack.advance(torch.tensor([3, 4]), torch.tensor([9]))
    assert heard == [([3, 4], 9)]


@pytest.mark.parametrize("wrong", [Scale(3), "Scale", int])
def test_only_classes_of_layers_are_registered(wrong, registry):
    with pytest.raises(TypeError, match="needs the class of a layer"):
        register_stacked(wrong, StackedScale)


# Networks that cannot be stacked


def test_no_network_is_refused():
    with pytest.raises(ValueError, match="at least one network"):
        Stack([])


@pytest.mark.parametrize(
    "other",
    [
        nn.Sequential(nn.Linear(3, 4), nn.Tanh()),
        nn.Sequential(nn.Linear(3, 5), nn.ReLU()),
        nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU()),
        nn.Linear(3, 4),
    ],
)
def test_networks_of_two_architectures_are_refused_with_their_place(other):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    with pytest.raises(ValueError, match="network 2 of the stack has another architecture"):
        Stack([model, copy.deepcopy(model), other])


def test_converted_networks_whose_norms_moved_into_layers_stack():
    def build():
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5))
        planned = plan(model, input_size=(3, 6, 6), width=4).only("0", force=True)
        convert_(model, planned, init="random")
        return model

    networks = made(build)
    assert isinstance(networks[0][0], DCLConv2d)
    assert_same_outputs(networks, images(networks, (3, 6, 6)))


def test_networks_of_two_types_are_refused():
    with pytest.raises(ValueError, match="network 1 of the stack has another architecture"):
        Stack([nn.Linear(3, 4), nn.Linear(3, 4).double()])


def test_networks_in_two_modes_are_refused():
    with pytest.raises(ValueError, match=r"network 1 of the stack is not in the mode of network 0"):
        Stack([nn.Linear(3, 4), nn.Linear(3, 4).eval()])


class Calling(nn.Module):
    """A network around one function."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.function(self.fc(x))


def test_control_flow_is_named():
    with pytest.raises(TypeError, match="Calling cannot be stacked: its forward pass depends on values"):
        Stack([Calling(lambda x: x if x.sum() > 0 else -x)])


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: torch.softmax(x, 1), "softmax"),
        (lambda x: x.view(-1, 2), "view"),
        (lambda x: F.max_pool2d(x, 2), "max_pool2d"),
        (lambda x: x.mean(0), "mean"),
        (lambda x: x.mean((1, 0)), "mean"),
        (lambda x: x.mean(-1), "mean"),
        (lambda x: x.mean(), "mean"),
        (lambda x: x[0], "getitem"),
    ],
)
def test_functions_that_look_at_dimensions_are_named(function, name):
    with pytest.raises(TypeError, match=f"'(boolean_dispatch|{name})'.*one more dimension.*register_stacked"):
        Stack([Calling(function)])


def test_a_parameter_outside_of_a_layer_is_named():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x * self.scale

    with pytest.raises(TypeError, match="'scale'"):
        Stack([Bare()])


def test_networks_of_two_inputs_are_refused():
    class Two(nn.Module):
        def forward(self, x, y):
            return x + y

    with pytest.raises(TypeError, match="Two takes 2 inputs"):
        Stack([Two()])


@pytest.mark.parametrize("function", [torch.flatten, lambda x: x.flatten(), lambda x: torch.flatten(x, 0, 1)])
def test_flatten_over_the_batch_is_refused(function):
    with pytest.raises(TypeError, match=r"over the batch.*use flatten\(1\)"):
        Stack([Calling(function)])(torch.zeros(1, 2, 4))


def test_a_flatten_layer_over_the_batch_is_refused():
    with pytest.raises(ValueError, match="use start_dim=1"):
        Stack([nn.Sequential(nn.Flatten(0))])


def test_dropout_wants_to_know_the_step():
    stack = Stack([nn.Sequential(nn.Dropout(0.5))]).train()
    with pytest.raises(RuntimeError, match=r"stack\.advance\(seed, step\) first"):
        stack(torch.ones(1, 2, 3))
    assert torch.equal(stack.eval()(torch.ones(1, 2, 3)), torch.ones(1, 2, 3))


@pytest.mark.parametrize("options", [{"width": (2, 3, 4)}, {"width": 3, "norm_layer": nn.BatchNorm1d}])
def test_stochastic_layers_that_a_stack_cannot_hold_still_are_named(options):
    model = nn.Sequential(nn.Linear(4, 4), DCLLinear(4, 6, branches=3, strategy="stochastic", **options))
    with pytest.raises(TypeError, match=r"layer '1'.*branches of one width and no norm_layer"):
        Stack([model]).branch_parameters()


# Low precision


def test_copies_in_low_precision_follow_the_weights_they_are_of():
    layers = (nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), DCLConv2d(4, 6, 3, width=3), nn.Flatten())
    networks = [model.float() for model in made(sequential(*layers, nn.Linear(150, 5)))]
    stack = Stack(networks).eval()
    stack.set_compute_dtype(torch.bfloat16)
    x = images(networks, (2, 9, 9)).float()
    y = stack(x.bfloat16()).detach()
    assert y.dtype == torch.bfloat16
    exact = torch.stack([network.eval()(x_i) for network, x_i in zip(networks, x, strict=True)]).detach()
    assert math.sqrt(F.mse_loss(y.float(), exact)) < 0.05 * exact.std()
    stack.set_compute_dtype(torch.float32)
    torch.testing.assert_close(stack(x), exact, rtol=1e-4, atol=1e-5)
