"""What a person expects of a matched start: the scale of the layer replaced, and nothing else changed."""

import copy
import math

import pytest
import torch
from torch import nn

import torch_dcl as dcl
from torch_dcl.models import bignet, lenet_cifar


def network(scale=1.0, norm=False, bias=True):
    torch.manual_seed(0)
    parts = [nn.Linear(300, 512, bias=bias), nn.ReLU()]
    if norm:
        parts = [nn.Conv2d(64, 256, 3, bias=False), nn.BatchNorm2d(256), nn.ReLU()]
        nn.init.constant_(parts[1].weight, scale)
        nn.init.constant_(parts[1].bias, -scale / 2)
    with torch.no_grad():
        parts[0].weight.mul_(1 if norm else scale)
        if parts[0].bias is not None:
            parts[0].bias.mul_(scale)
    return nn.Sequential(*parts)


@torch.no_grad()
def rms(model, x, name="0", *, train=False):
    """The root mean square of a unit's output: z, or what the plain layer's ReLU gives."""
    outputs = []
    handle = model.get_submodule(name).register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    model.train(train)(x)
    handle.remove()
    return float(outputs[0].relu().double().square().mean().sqrt())


def converted(model, size, *, seed=3, names=("0",), planned=None, **arguments):
    new = copy.deepcopy(model)
    torch.manual_seed(seed)
    plan = dcl.plan(new, size, **(planned or {})).only(*names, force=True)
    dcl.convert_(new, plan, init="random", **arguments)
    return new


@pytest.mark.parametrize("planned", [
    {"branches": 1, "eps": 0.0}, {"branches": 1}, {"branches": 2}, {"branches": 3},
    {"branches": 3, "strategy": "stochastic"}, {"branches": 2, "width": (40, 90)},
])  # fmt: skip
@pytest.mark.parametrize("scale", [0.02, 1.0, 5.0])
def test_on_white_noise_z_has_the_mean_square_of_the_layer_replaced(planned, scale):
    model, x = network(scale), torch.randn(500, 300)
    new = converted(model, (300,), planned=planned, match=True)
    is_drawn = planned.get("strategy") == "stochastic"  # one pair a step has the scale; the mean of all pairs less
    # One draw of 512 outputs: the mean square of z varies by about 8 % from draw to draw, its root by half of it.
    if is_drawn:
        dcl.advance_branches_(new, 0)
    assert rms(new, x, train=is_drawn) == pytest.approx(rms(model, x), rel=0.2 if is_drawn else 0.1)


@pytest.mark.parametrize("make", [bignet, lenet_cifar])
def test_on_real_inputs_z_has_the_mean_square_of_the_layer_replaced(make):
    torch.manual_seed(1)
    model = make(10)
    x = (64 if make is lenet_cifar else 1) * torch.randn(40, *model.input_size)
    by_weights = converted(model, model.input_size, names=("fc1",), match=True)
    by_data = converted(model, model.input_size, names=("fc1",), match=True, calibration=x.split(8))
    wanted = rms(model, x, "fc1")
    assert rms(by_data, x, "fc1") == pytest.approx(wanted, rel=0.1)
    assert abs(rms(by_weights, x, "fc1") / wanted - 1) > 0.15  # its inputs are not of unit mean square


def test_a_norm_says_the_scale_whatever_comes_in():
    model, x = network(3.0, norm=True), 100 * torch.randn(8, 64, 10, 10)
    wanted = rms(model, x, "1", train=True)
    for data in (None, [x]):
        new = converted(model, (64, 10, 10), match=True, calibration=data)
        assert rms(new, x, train=True) == pytest.approx(wanted, rel=0.05)


def test_the_draws_are_those_of_the_other_start():
    plain = network(4.0)
    old, new = (converted(plain, (300,), match=match)[0] for match in (False, True))
    assert torch.equal(old.branch.weight, new.branch.weight)
    ratio = (new.fusion.weight / old.fusion.weight).detach()
    torch.testing.assert_close(ratio, ratio[:1, :1].expand_as(ratio))
    assert float(ratio[0, 0]) > 3  # the layer replaced has four times the scale of torch's default


def test_the_floor_of_z_is_lowered_where_it_would_drown_the_layer():
    small, large = (converted(network(scale), (300,), match=True)[0].fusion for scale in (0.02, 5.0))
    rms_of_relu = 0.02 / math.sqrt(6)
    assert small.eps == pytest.approx((0.2 * rms_of_relu) ** 2, rel=0.05)
    assert large.eps == 0.01
    told = "eps = 0.04 keeps z above 0.2, and the layer replaced has a scale of 0.008.*; plan without eps"
    with pytest.raises(ValueError, match=told):
        converted(network(0.02), (300,), planned={"eps": 0.04}, match=True)
    assert converted(network(5.0), (300,), planned={"eps": 0.04}, match=True)[0].fusion.eps == 0.04


def test_without_a_word_the_start_is_that_of_torchs_default_layer():
    x = torch.randn(500, 300)
    assert rms(converted(network(1.0), (300,)), x) == rms(converted(network(50.0), (300,)), x)


def test_a_start_that_fails_leaves_the_network_as_it_was():
    model = network(1.0)
    with torch.no_grad():
        model[0].weight[3, 4] = math.nan
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"'0' .* weight holds nan"):
        dcl.convert_(model, dcl.plan(model, (300,)).only("0", force=True), init="random", match=True)
    assert type(model[0]) is nn.Linear
    assert all(torch.equal(value.nan_to_num(), before[key].nan_to_num()) for key, value in model.state_dict().items())
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(300, 512), nn.ReLU())
    plan = dcl.plan(empty, (300,)).only("0", force=True)
    with pytest.raises(ValueError, match="'0' is on the meta device and has no scale to match; leave match out"):
        dcl.convert_(empty, plan, init="random", match=True)
    with pytest.raises(ValueError, match=r"'0' is on the meta device and has no weights to fit; .* init=\"random\""):
        dcl.convert_(empty, plan, init="fit", calibration=[torch.zeros(16, 300)])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"init": "fit", "match": True}, 'match is for init="random"'),
        ({"init": "random", "calibration": [torch.zeros(2, 300)]}, 'calibration is for init="fit" or match=True'),
    ],
)
def test_arguments_that_say_nothing_are_refused(arguments, told):
    model = network()
    with pytest.raises(ValueError, match=told):
        dcl.convert_(model, dcl.plan(model, (300,)).only("0", force=True), **arguments)
    with pytest.raises(TypeError, match="match must be True or False, got 2"):
        dcl.convert_(model, dcl.plan(model, (300,)).only("0", force=True), init="random", match=2)


# The pass over calibration data


def unsized(batches):
    yield from batches


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def streamed(batches):
    """A loader with a length that raises a TypeError."""
    return torch.utils.data.DataLoader(Stream(batches), batch_size=None)


@pytest.mark.parametrize("give", [list, unsized, streamed])
def test_a_pass_over_calibration_data_shows_how_far_it_is(give, monkeypatch, capfd):
    said = []

    class Bar:
        def __init__(self, _console, total, unit):
            said.append((total, unit))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            said.append("closed")

        def reach(self, done):
            said.append(done)

        def now(self, text):
            said.append(text)

    monkeypatch.setattr("torch_dcl.convert.samples.Bar", Bar)
    batches = [torch.randn(4, 300) for _ in range(3)]
    converted(network(), (300,), match=True, calibration=give(batches), progress=True)
    if give is list:
        assert said == [(3, "calibration batches"), 0, 1, 2, "closed"]
    else:
        assert said == [(1, "passes over the calibration data"), "batch 1", "batch 2", "batch 3", "closed"]
    said.clear()
    for progress in (None, False):  # three small batches are done before anybody could ask
        converted(network(), (300,), match=True, calibration=give(batches), progress=progress)
    assert not said
    assert capfd.readouterr().err == ""


def test_a_slow_pass_shows_itself_without_being_asked(monkeypatch, capfd):
    clock = iter(range(1000))
    monkeypatch.setattr("torch_dcl.convert.samples.time.monotonic", lambda: float(next(clock)))
    batches = [torch.randn(4, 300) for _ in range(30)]
    converted(network(), (300,), match=True, calibration=batches)
    assert "of 30 calibration batches" in capfd.readouterr().err
