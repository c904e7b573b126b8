"""Unstacked networks, against a stack of them, one alone, and a plain loop with torch's own optimiser."""

import copy
import dataclasses
import functools
import math

import pytest
import torch
from tests.fleet.test_fleet import (
    all_different,
    clip_plainly,
    plain_training,
    same_bits,
    some_data,
    worst_difference,
)
from tests.halves import slow, slow_where
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from torch_dcl import DCLLinear, convert_
from torch_dcl.files import read_sealed
from torch_dcl.fleet import Fleet, Inputs, Member, Schedule, Unstacked
from torch_dcl.fleet.cuda_graph import cudnn_algorithms
from torch_dcl.fleet.operations import low_copy
from torch_dcl.models import bignet, lenet_cifar, variant_plan, wide_resnet
from torch_dcl.models.bilinear import BilinearFusion

CLASSES = 4
STATISTICS = ((0.4, 0.5, 0.6), (0.2, 0.3, 0.25))


def tiny(*, dropout=0.4, strategy="stochastic", norm=True):
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, bias=not norm),
        *([nn.BatchNorm2d(3)] if norm else []),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.MaxPool2d(2),
        nn.Flatten(),
        DCLLinear(12, 8, branches=3, width=3, strategy=strategy),
        nn.Dropout(dropout),
        nn.Linear(8, CLASSES),
    )


def overlapping():
    return nn.Sequential(
        nn.Conv2d(3, 4, 5, padding=2), nn.MaxPool2d(3, stride=2, ceil_mode=True), nn.ReLU(), nn.Flatten(),
        nn.Linear(64, CLASSES),
    )  # fmt: skip


def converted(network, variant):
    convert_(network, variant_plan(network, variant), init="random")
    return network


def caffe(name):
    return (2.0, 0.0) if name.endswith("bias") else (1.0, 1.0)


def three_sets(size=(6, 6)):
    count = 40 if len(size) == 2 else 24  # fewer of the larger ones
    return {name: some_data(count, size) for name in ("one", "two", "three")}


SMALL = {
    "tiny": (tiny, (6, 6), {}),
    "tiny, nesterov and Caffe's factors": (tiny, (6, 6), {"nesterov": True, "factors": caffe}),
    "deterministic": (lambda: tiny(strategy="deterministic"), (6, 6), {}),
    "overlapping pools": (overlapping, (3, 8, 8), {}),
    "wide residual": (lambda: wide_resnet(10, 1, CLASSES, dropout=0.3), (3, 8, 8), {"nesterov": True}),
    "wide residual A3S": (lambda: converted(wide_resnet(10, 1, CLASSES), "A3S"), (3, 8, 8), {"nesterov": True}),
}


@pytest.mark.parametrize("kind", slow_where(SMALL, "residual$|nesterov"))
def test_they_train_as_a_stack_of_them_does(kind):
    build, size, options = SMALL[kind]
    data, members, networks = three_sets(size), all_different(3), [build() for _ in range(3)]
    options = {"batch": 4, "precision": "float64", **options}
    stack = Fleet(networks, members, data, **options)
    unstacked = Fleet(networks, members, data, stacked=False, **options)
    stack.train()
    unstacked.train()
    for i in range(3):
        assert worst_difference(unstacked.network(i), stack.network(i)) < 1e-11
        assert worst_difference(unstacked.network(i), networks[i].double()) > 1e-3  # something was learnt
    for mine, theirs in zip(unstacked.history.train_loss, stack.history.train_loss, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-10)
    one, other = (fleet.evaluate(data) for fleet in (unstacked, stack))
    assert torch.equal(one.predictions, other.predictions)
    torch.testing.assert_close(one.losses, other.losses, rtol=1e-10, atol=0)


@pytest.mark.parametrize("variant", [None, "A2", "A3S"])
@pytest.mark.parametrize("build", [lenet_cifar, slow(bignet)])
def test_the_networks_of_the_table_train_as_a_stack_of_them_does(build, variant):
    networks = [build(CLASSES) if variant is None else converted(build(CLASSES), variant) for _ in range(2)]
    data = {"one": some_data(8, (3, 32, 32))}
    members = [Member(str(seed), "one", seed, 1e-3, Schedule(1), 4e-3) for seed in (1, 2)]
    inputs = Inputs(STATISTICS, crop=networks[0].input_size[1], flip=True)
    ends = []
    for stacked in (True, False):
        fleet = Fleet(
            networks, members, data, batch=4, precision="float64", inputs=inputs, factors=caffe, stacked=stacked
        )
        fleet.train()
        ends.append([fleet.network(i) for i in range(2)])
    for one, other in zip(*ends, strict=True):
        assert worst_difference(one, other) < 1e-11


@pytest.mark.parametrize("nesterov", [False, True])
def test_they_do_what_a_plain_loop_with_torchs_optimiser_does(nesterov):
    data, members = three_sets(), all_different(3)
    networks = [tiny(dropout=0.0) for _ in members]
    fleet = Fleet(
        networks, members, data, batch=4, precision="float64", nesterov=nesterov, factors=caffe, stacked=False
    )
    fleet.train()
    for i, member in enumerate(members):
        model, losses, _ = plain_training(networks[i], member, data, 4, nesterov=nesterov, factors=caffe)
        assert worst_difference(fleet.network(i), model) < 1e-11
        found = [epoch[i] for epoch in fleet.history.train_loss][: len(losses)]
        assert found == pytest.approx(losses, rel=1e-10)


@pytest.mark.parametrize("clipped", [False, True])
def test_a_network_ends_with_the_same_weights_alone_and_among_others(clipped):
    data, members = three_sets(), all_different(5)
    if not clipped:
        members = [dataclasses.replace(member, clip=math.inf) for member in members]
    networks = [tiny() for _ in members]
    settings = {"batch": 4, "stacked": False, "precision": "float64" if clipped else "float32"}
    among = Fleet(networks, members, data, **settings)
    among.train()
    for i, member in enumerate(members):
        alone = Fleet([networks[i]], [member], data, **settings)
        alone.train()
        if clipped:  # the norm of a gradient is summed in another order
            assert worst_difference(alone.network(0), among.network(i)) < 1e-12
        else:
            assert same_bits(alone.network(0), among.network(i))


def test_a_network_that_diverges_stops_and_leaves_the_others_alone():
    data = three_sets()
    calm = [Member(str(i), "one", i, 0.02, Schedule(3)) for i in range(3)]
    wild = [*calm[:1], Member("wild", "one", 1, 1e30, Schedule(3)), *calm[2:]]
    networks = [tiny() for _ in calm]
    together = Fleet(networks, wild, data, batch=4, stacked=False)
    without = Fleet(networks, calm, data, batch=4, stacked=False)
    together.train()
    without.train()
    assert together.history.stopped == {1: 0}
    for i in (0, 2):
        assert same_bits(together.network(i), without.network(i))
    assert all(
        value.isfinite().all() for value in together.network(1).state_dict().values() if value.is_floating_point()
    )


class Unknown(nn.Module):
    """Layers that nobody registered, control flow, a sum, and a branch that is not used."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(6, 4, 3)
        self.norm = nn.GroupNorm(2, 4)
        self.product = BilinearFusion(4, 4, 5)
        self.out = nn.Linear(20, CLASSES)
        self.unused = nn.Linear(3, 3)

    def forward(self, x):
        y = self.norm(self.first(x[:, 0]))
        if y.shape[-1] > 3:
            y = self.product(y, y) + y.mean(1, keepdim=True)
        return self.out(y.flatten(1))


def test_any_layers_will_do_and_what_is_not_used_stays():
    data, members = three_sets(), all_different(3)
    networks = [Unknown() for _ in members]
    fleet = Fleet(networks, members, data, batch=4, precision="float64", stacked=False)
    fleet.train()
    for i, member in enumerate(members):
        model, _, _ = plain_training(networks[i], member, data, 4, clip=clip_what_has_a_gradient)
        assert worst_difference(fleet.network(i), model) < 1e-11
        assert torch.equal(fleet.network(i).unused.weight, networks[i].unused.weight.double())


def clip_what_has_a_gradient(parameters, largest):
    clip_plainly([p for p in parameters if p.grad is not None], largest)


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(36, CLASSES)

    def forward(self, x):
        return self.out(F.dropout(x.flatten(1), 0.5, self.training))


@pytest.mark.parametrize("network", [Functional(), nn.Sequential(nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(36, 4))])
def test_randomness_of_torchs_own_is_refused(network):
    data = three_sets()
    before = torch.get_rng_state()
    with pytest.raises(TypeError, match=r"uses torch's random number generator in its forward pass.*use nn\.Dropout"):
        Fleet([network], all_different(1), data, batch=4, stacked=False)
    assert torch.equal(torch.get_rng_state(), before)


def test_training_draws_nothing_from_torch():
    fleet = Fleet([tiny()], all_different(1), three_sets(), batch=4, stacked=False)
    before = torch.get_rng_state()
    fleet.train(1)
    assert torch.equal(torch.get_rng_state(), before)


def learnt_otherwise(found, exact, start):
    """How far apart two networks are, as a share of how far one has come from its start."""
    ends = [nn.utils.parameters_to_vector(network.parameters()) for network in (found, exact, start)]
    return float(((ends[0] - ends[1]).norm() / (ends[1] - ends[2]).norm()).detach())


WORST = {"float32": 1e-5, "bfloat16": 0.3}


@pytest.mark.parametrize("precision", WORST)
def test_other_precisions_train_to_much_the_same(precision):
    data = {"one": some_data(40, (3, 8, 8))}
    members = [Member(str(seed), "one", seed, 0.01, Schedule(2)) for seed in range(2)]
    networks = [wide_resnet(10, 1, CLASSES) for _ in members]
    exact, other = (
        Fleet(networks, members, data, batch=10, precision=p, stacked=False) for p in ("float64", precision)
    )
    exact.train()
    other.train()
    for i in range(2):
        found = other.network(i)
        assert {value.dtype for value in (*found.parameters(), *found.buffers())} == {torch.float32, torch.int64}
        assert learnt_otherwise(found.double(), exact.network(i), networks[i].double()) < WORST[precision]
    if precision == "bfloat16":
        for name, parameter in other.stack.named_stacked():
            copied = low_copy(parameter)
            assert (copied is None) == (".bn" in f".{name}")
            assert copied is None or torch.equal(copied, parameter.bfloat16())


def test_convolutions_see_their_weights_and_inputs_channels_last():
    fleet = Fleet([wide_resnet(10, 1, CLASSES)], all_different(1), three_sets((3, 8, 8)), batch=4, stacked=False)
    seen = []
    for network in fleet.stack._networks:
        for module in network.modules():
            if isinstance(module, nn.Conv2d) and module.in_channels > 1 and module.kernel_size != (1, 1):
                assert module.weight.is_contiguous(memory_format=torch.channels_last)
                module.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    fleet.train(1)
    assert seen
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x in seen)


def test_networks_come_back_as_they_went_in():
    networks = [tiny().double() for _ in range(3)]
    unstacked = Unstacked(networks)
    for i, network in enumerate(networks):
        assert same_bits(unstacked.network(i), network)
        assert unstacked.network(i).state_dict().keys() == network.state_dict().keys()
        assert all(value.is_contiguous() for value in unstacked.network(i).state_dict().values())


def test_a_checkpoint_holds_parameters_and_buffers_so_that_older_ones_still_fit(tmp_path):
    """ε is the network's own; a checkpoint from before the state dict had it must load."""
    network = nn.Sequential(nn.Flatten(), DCLLinear(36, 8, eps=0.3), nn.Linear(8, CLASSES))
    fleet = Fleet([network], all_different(1), three_sets((1, 6, 6)), batch=4, stacked=False)
    fleet.save(tmp_path / "fleet.safetensors")
    tensors, _ = read_sealed(tmp_path / "fleet.safetensors", "torch_dcl_fleet")
    held = {name.removeprefix("state.") for name in tensors if name.startswith("state.")}
    assert held == dict(network.named_parameters()).keys()
    fleet.load(tmp_path / "fleet.safetensors")
    assert fleet.network(0)[1].eps == 0.3


def test_the_networks_given_are_left_as_they_were():
    networks = [tiny() for _ in range(2)]
    before = [copy.deepcopy(network) for network in networks]
    Fleet(networks, all_different(2), three_sets(), batch=4, stacked=False).train(1)
    assert all(map(same_bits, networks, before))


@pytest.mark.parametrize("break_at", [slow(1), 2, slow(4)])
@pytest.mark.parametrize("kind", ["tiny", "wide residual"])
def test_a_checkpoint_goes_on_bit_for_bit(kind, break_at, tmp_path):
    build, size, options = SMALL[kind]
    data, members, networks = three_sets(size), all_different(3), [build() for _ in range(3)]
    inputs = Inputs(pad=2, flip=True)

    def fleet():
        return Fleet(networks, members, data, batch=4, inputs=inputs, stacked=False, **options)

    whole, before, after = fleet(), fleet(), fleet()
    whole.train()
    before.train(break_at)
    before.save(tmp_path / "fleet.safetensors")
    after.load(tmp_path / "fleet.safetensors")
    after.train()
    assert all(same_bits(whole.network(i), after.network(i)) for i in range(3))
    assert whole.history == after.history


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("step", [slow(0), slow(1), 13, slow(29), 49])
def test_a_run_killed_at_any_step_and_resumed_ends_with_the_same_bits(step, stacked, tmp_path, killed_at):
    data, members, networks = three_sets(), all_different(2), [tiny() for _ in range(2)]
    path = tmp_path / "fleet.safetensors"

    def fleet():
        return Fleet(networks, members, data, batch=4, inputs=Inputs(pad=2, flip=True), stacked=stacked)

    whole, killed, resumed = fleet(), fleet(), fleet()
    whole.train()
    with killed_at(step):
        killed.train(on_epoch=lambda f: f.save(path))
    if path.exists():
        resumed.load(path)
    assert resumed.epoch == step // 10
    resumed.train()
    assert all(same_bits(whole.network(i), resumed.network(i)) for i in range(2))


def test_a_checkpoint_of_a_stack_is_refused(tmp_path):
    data, members, networks = three_sets(), all_different(2), [tiny() for _ in range(2)]
    Fleet(networks, members, data, batch=4).save(tmp_path / "fleet")
    with pytest.raises(ValueError, match="another fleet: stacked of network 0 was missing, here it is False"):
        Fleet(networks, members, data, batch=4, stacked=False).load(tmp_path / "fleet")


@pytest.mark.parametrize("kind", ["tiny", slow("wide residual")])
def test_compiled_networks_train_to_the_same_weights(kind, monkeypatch):
    # Without the machine code, which takes a minute to make; a GPU test has it.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    build, size, options = SMALL[kind]
    data, members = three_sets(size), [Member(str(i), "one", i, 0.02, Schedule(2)) for i in range(2)]
    networks = [build() for _ in members]
    options = {"batch": 8, "precision": "float64", "stacked": False, **options}
    plain, compiled = (Fleet(networks, members, data, compile=c, **options) for c in (False, True))
    plain.train()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled.train()
    for i in range(2):
        assert worst_difference(compiled.network(i), plain.network(i)) < 1e-11
    counted = torch._dynamo.utils.counters
    assert counted["stats"]["unique_graphs"] == 1  # one for both networks and all steps
    assert not counted["graph_break"]


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("by_torch", [True, False])
def test_cudnn_may_choose_unless_the_same_bits_are_asked_for(asked, by_torch, monkeypatch):
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "deterministic", by_torch)
    with cudnn_algorithms(deterministic=asked):
        assert cudnn.deterministic == (asked or by_torch)
        assert cudnn.benchmark == (not (asked or by_torch))
    assert (cudnn.benchmark, cudnn.deterministic) == (False, by_torch)


@pytest.mark.parametrize("asked", ["not", "of the fleet", "of cuDNN", "of torch"])
def test_who_asks_for_the_same_bits_gets_them_of_what_is_compiled_too(asked, monkeypatch):
    """Torch tries on a GPU how a sum is formed fastest, and its bits are not the same then."""
    found = []
    monkeypatch.setattr(torch, "compile", lambda network, options: found.append(options) or network)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", asked == "of cuDNN")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: asked == "of torch")
    Fleet(
        [tiny()], [Member("one", "one", 0, 0.1, Schedule(1))], three_sets(), batch=4, stacked=False, compile=True,
        deterministic=asked == "of the fleet",
    )  # fmt: skip
    assert [options["deterministic"] for options in found] == [asked != "not"]
    assert set(found[0]) <= set(torch._inductor.config.get_config_copy())


def test_every_architecture_of_a_process_is_compiled(monkeypatch):
    """Torch runs a forward pass uncompiled, with a warning, when it has compiled the same code eight times."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()

    class Through(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.through = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 7))

        def forward(self, x):
            return self.through(x)

    for width in range(3, 15):
        torch._dynamo.utils.counters.clear()
        networks, members = [Through(width)], [Member("one", "one", 0, 0.01, Schedule(1))]
        Fleet(networks, members, three_sets((1, 8, 8)), batch=8, stacked=False, compile=True).train()
        counted = torch._dynamo.utils.counters
        assert counted["frames"]["total"] == counted["frames"]["ok"]
        assert counted["unimplemented"] == counted["graph_break"] == {}


@pytest.mark.parametrize("options", [{"compile": True}, {"streams": 2}])
def test_compile_and_streams_are_for_networks_as_they_are(options):
    with pytest.raises(ValueError, match="pass stacked=False"):
        Fleet([tiny()], all_different(1), three_sets(), batch=4, **options)
    with pytest.raises(ValueError, match="streams must be at least 1, got 0"):
        Unstacked([tiny()], streams=0)


@pytest.mark.parametrize("options", [{"width": (3, 2, 3)}, {"width": 3, "norm_layer": nn.BatchNorm1d}])
def test_a_stochastic_layer_that_cannot_be_held_still_is_named(options):
    network = nn.Sequential(nn.Flatten(), DCLLinear(36, 4, branches=3, strategy="stochastic", **options))
    with pytest.raises(TypeError, match="layer '1': the stochastic strategy in a fleet needs branches of one width"):
        Fleet([network], all_different(1), three_sets(), batch=4, stacked=False)


class Watch(TorchDispatchMode):
    """Notes every operation, and refuses those that a host waits for, or whose shape depends on values."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "item", "unique", "equal", "_unique2")

    def __init__(self):
        super().__init__()
        self.ran = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        assert name not in self.WAITS, f"{name} waits for the device"
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        assert all(index is None or index.dtype != torch.bool for index in indices), "a mask as an index waits"
        self.ran.add(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("kind", SMALL)
def test_a_step_never_waits_for_the_device_so_that_a_graph_can_hold_it(kind, stacked):
    build, size, options = SMALL[kind]
    if len(size) == 2:
        size = (1, *size)
    channels = size[0]
    inputs = Inputs(((0.5,) * channels, (0.25,) * channels), pad=2, flip=True)
    fleet = Fleet(
        [build() for _ in range(2)], all_different(2), three_sets(size), batch=4, inputs=inputs, stacked=stacked,
        **options,
    )  # fmt: skip
    fleet.data.begin_epoch([1, 2], 0)
    with Watch() as watch:
        fleet._one_step()
    assert {"convolution", "gather"} & watch.ran == {"convolution", "gather"}
