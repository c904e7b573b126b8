"""ε in the state dict: every way to save and load a network gives the network that was saved; and norms as found."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.optim.swa_utils import AveragedModel

import torch_dcl as dcl
from torch_dcl import DCLConv2d, DCLLinear, norms

EPS = "fusion._extra_state"


def inputs(n=32):
    return torch.randn(n, 12, generator=torch.Generator().manual_seed(2))


def converted(init):
    """A small network with two DCL layers; a fit gives each of them an ε of its own."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
    plan = dcl.plan(model, example=inputs()).only("0", "2")
    dcl.convert_(model, plan, init=init, calibration=[inputs()] if init == "fit" else None)
    return model.eval()


@pytest.fixture(scope="module")
def fitted():
    return converted("fit")


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def through_lightning(state):
    """A checkpoint of a LightningModule has the network in an attribute."""
    checkpoint = {"state_dict": {f"model.{name}": value for name, value in state.items()}, "epoch": 3}
    return {n.removeprefix("model."): v for n, v in through_a_file(checkpoint)["state_dict"].items()}


WRAPPERS = {
    "plain": lambda model: model,
    "DataParallel": nn.DataParallel,
    "AveragedModel": AveragedModel,
    "compiled": lambda model: torch.compile(model, backend="eager", fullgraph=True),
    "deep copy": copy.deepcopy,
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("carry", [copy.deepcopy, through_a_file, through_lightning])
def test_the_state_of_a_fitted_network_makes_a_random_one_compute_the_same(fitted, wrap, carry):
    x, expected = inputs(), fitted(inputs())
    model = wrap(converted("random"))
    before = model(x)
    assert not torch.allclose(before, expected, rtol=0.05)
    model.load_state_dict(carry(wrap(copy.deepcopy(fitted)).state_dict()))
    assert torch.equal(model(x), expected)


def test_the_state_dicts_of_torch_distributed_carry_epsilon(fitted):
    model = converted("random")
    set_model_state_dict(model, get_model_state_dict(fitted))
    assert torch.equal(model(inputs()), fitted(inputs()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("eps", [1 / 3, 1.2345678901234567e-5, 1e-300])
def test_no_cast_rounds_epsilon(dtype, eps):
    layer = DCLConv2d(3, 8, 3, eps=eps).to(dtype)
    (state,) = (value for name, value in layer.state_dict().items() if name == EPS)
    assert (state.dtype, state.shape, state.device.type) == (torch.float64, (), "cpu")
    other = DCLConv2d(3, 8, 3).to(dtype)
    other.load_state_dict(layer.state_dict())
    assert other.eps == layer.eps == eps


def test_on_the_meta_device_epsilon_has_a_value():
    with torch.device("meta"):
        layer = DCLLinear(4, 8, eps=0.3)
    assert layer.state_dict()[EPS].item() == 0.3
    other = DCLLinear(4, 8)
    layer.load_state_dict(other.state_dict(), assign=True)
    assert layer.eps == other.eps
    assert torch.equal(layer(torch.ones(2, 4)), other(torch.ones(2, 4)))


def test_a_state_without_epsilon_loads_strictly_and_leaves_it_as_it_is(fitted):
    """As older checkpoints are."""
    state = {name: value for name, value in fitted.state_dict().items() if not name.endswith(EPS)}
    model = converted("fit")
    model[0].fusion.eps = 0.125
    assert str(model.load_state_dict(state)) == "<All keys matched successfully>"
    assert (model[0].eps, model[2].eps) == (0.125, fitted[2].eps)
    with pytest.raises(RuntimeError, match=r'Missing key.*"0\.fusion\.weight"\.'):
        model.load_state_dict({name: value for name, value in state.items() if name != "0.fusion.weight"})
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"0\.fusion\.wide"'):
        model.load_state_dict({**state, "0.fusion.wide": torch.ones(1)})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.tensor(torch.nan), "got nan"),
        (torch.tensor(torch.inf), "got inf"),
        (torch.tensor(-0.5), "got -0.5"),
        (torch.tensor(0.0), "eps = 0 leaves the gradient"),
        (torch.tensor(1e-300, dtype=torch.float64).half(), "eps = 0 leaves the gradient"),
        (torch.tensor(1), r"got a Tensor of shape \(\), torch.int64, cpu"),
        (torch.tensor(True), "torch.bool"),
        (torch.tensor(1j), "torch.complex64"),
        (torch.tensor([0.1, 0.2]), r"got a Tensor of shape \(2,\)"),
        (torch.tensor(0.1, device="meta"), "meta"),
        (0.1, "got a float"),
        ("0.1", "got a str"),
        (None, "got a NoneType"),
    ],
    ids=str,
)
def test_an_invalid_epsilon_is_refused_with_the_name_of_its_layer(value, message):
    model = nn.Sequential(DCLLinear(4, 8, eps=0.25), nn.Linear(8, 2))
    state = {**model.state_dict(), f"0.{EPS}": value}
    with pytest.raises(RuntimeError, match=rf"(?s)0\.fusion\._extra_state: .*{message}"):
        model.load_state_dict(state)
    assert model[0].eps == 0.25


def test_which_epsilon_is_valid_depends_on_how_many_branches_are_fused():
    low_rank = DCLLinear(4, 8, branches=1)
    low_rank.load_state_dict({**low_rank.state_dict(), EPS: torch.tensor(0.0)})
    assert low_rank.eps == 0
    pairs = DCLLinear(4, 8, branches=3, strategy="stochastic")
    pairs.load_state_dict({**pairs.state_dict(), EPS: torch.tensor(0.02, dtype=torch.float64)})
    assert pairs.eps == 0.02


def test_the_norm_of_a_replica_is_that_which_data_parallelism_gave_it():
    norm = DCLConv2d(3, 8, 3, width=4, norm_layer=nn.BatchNorm2d).fusion.norm
    nn.init.uniform_(norm.weight)
    replica = norm._replicate_for_data_parallel()  # without parameters: they are set as plain attributes
    for name in ("weight", "bias"):
        setattr(replica, name, getattr(norm, name).detach() + 1)
    found = norms.kernel_norm(replica)
    assert found is not None
    torch.testing.assert_close(found.gamma, norm.weight.detach() + 1, rtol=0, atol=0)
    torch.testing.assert_close(found.beta, norm.bias.detach() + 1, rtol=0, atol=0)
    assert found.mean is norm.running_mean
    assert found.variance is norm.running_var
    assert found.tracked is norm.num_batches_tracked


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("tracks", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_a_batch_norm_is_described_by_what_it_computes(training, tracks, affine):
    norm = nn.BatchNorm2d(16, eps=0.1, momentum=0.3, affine=affine, track_running_stats=tracks).train(training)
    found = norms.kernel_norm(norm)
    assert (found.gamma, found.beta) == (norm.weight, norm.bias)
    assert (found.mean, found.variance) == (norm.running_mean, norm.running_var)
    assert (found.eps, found.momentum, found.fixed) == (0.1, 0.3, tracks and not training)
    assert found.tracked is (norm.num_batches_tracked if training else None)  # fixed statistics count nothing


class OwnNorm(nn.BatchNorm2d):
    """Overrides what a batch norm computes."""

    def forward(self, input):
        return super().forward(input) + 1


@pytest.mark.parametrize(
    "make", [lambda: nn.LayerNorm(16), lambda: nn.GroupNorm(2, 16), lambda: OwnNorm(16),
             lambda: nn.utils.parametrizations.weight_norm(nn.BatchNorm2d(16), dim=None)],
    ids=["LayerNorm", "GroupNorm", "overridden", "parametrized"],
)  # fmt: skip
def test_only_a_plain_batch_norm_is_described(make):
    assert norms.kernel_norm(make()) is None


@pytest.mark.parametrize("part", ["branch", "fusion", "fusion.norm"])
def test_a_layer_with_a_hook_on_a_part_of_it_calls_its_modules(part):
    layer, seen = DCLConv2d(3, 8, 3, norm_layer=nn.BatchNorm2d), []
    assert layer._plain_stage() is not None
    layer.get_submodule(part).register_forward_hook(lambda *_: seen.append(part))
    assert layer._plain_stage() is None
    layer(torch.randn(2, 3, 5, 5))
    assert seen == [part]
