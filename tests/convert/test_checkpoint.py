"""What a person expects of ``save_model`` and ``load_model``: the same network again, or a plain refusal."""

import contextlib
import copy
import hashlib
import json
import pickle
from collections import OrderedDict
from functools import partial

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn
from torchvision.models.resnet import BasicBlock
from torchvision.ops import FrozenBatchNorm2d

import torch_dcl as dcl
from torch_dcl.convert import AbsorbedNorm, AbsorbedReLU, CheckpointError

no_deadline = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here")


def network(width=32, classes=5, conv=None, norm=None, between=()):
    layers = OrderedDict(
        conv1=nn.Conv2d(3, 16, 3, padding=1),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(16, width, 3, **{"stride": (2, 1), "bias": False, **(conv or {})}),
        bn2=nn.BatchNorm2d(width, **(norm or {})),
        relu2=nn.ReLU(inplace=True),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        fc1=nn.Linear(width, 24),
        relu3=nn.ReLU(),
        **dict(between),
        fc2=nn.Linear(24, classes),
    )
    return nn.Sequential(layers)


def converted(model=None, size=(3, 8, 8), seed=0, **arguments):
    model = network() if model is None else model
    like = next(model.parameters())
    plan = dcl.plan(model, example=torch.randn(2, *size).to(like.dtype), **{"branches": 2, "width": 4, **arguments})
    units = [row.name for row in plan.rows if row.status == "pays" or "not shrink" in row.reason]
    dcl.convert_(model, plan.only(*units), init="random", seed=seed)
    return shaken(model)


@torch.no_grad()
def shaken(model):
    """Nothing is left at the value that it starts with."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.endswith(("running_var", "weight")) and tensor.is_floating_point():
            tensor.add_(torch.rand(tensor.shape) / 4)
        elif tensor.is_floating_point():
            tensor.add_(torch.randn(tensor.shape) / 8)
        elif name.endswith("num_batches_tracked"):
            tensor.add_(7)
    return model


@torch.no_grad()
def output(model, size=(3, 8, 8), dtype=torch.float32):
    x = torch.randn(2, *size, generator=torch.Generator().manual_seed(1)).to(dtype)
    return model.eval()(x)


def assert_same_network(ours, theirs):
    a, b = ours.state_dict(), theirs.state_dict()
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name
    assert [(n, type(m)) for n, m in ours.named_modules(remove_duplicate=False)] == [
        (n, type(m)) for n, m in theirs.named_modules(remove_duplicate=False)
    ]


@contextlib.contextmanager
def left_alone(model):
    """Modules, tensors, values and flags are the same before and after."""

    def look():
        modules = [(n, id(m), m.training) for n, m in model.named_modules(remove_duplicate=False)]
        tensors = [
            (n, id(t), t.dtype, t.requires_grad)
            for n, t in model.state_dict(keep_vars=True).items()
            if not n.endswith("_extra_state")  # made anew for every state dict
        ]
        return modules, tensors

    before, values = look(), copy.deepcopy(model.state_dict())
    yield
    assert look() == before
    torch.testing.assert_close(dict(model.state_dict()), dict(values), rtol=0, atol=0, equal_nan=True)


def refused(path, network, *patterns):
    with left_alone(network), pytest.raises(CheckpointError) as caught:
        dcl.load_model(network, path)
    for pattern in patterns:
        assert pattern in str(caught.value), str(caught.value)
    assert path.name in str(caught.value)
    return str(caught.value)


# What a file holds, and how to forge one


def contents(path):
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["torch_dcl"])


def sealed(tensors, content):
    """The content with the SHA-256 that belongs to it, by the description in the module's own words."""
    content = {key: value for key, value in content.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()))
    return {**content, "sha256": digest.hexdigest()}


def forge(path, tensors, content):
    text = content if isinstance(content, str) else json.dumps(content)
    safetensors.torch.save_file(tensors, path, metadata={"torch_dcl": text, "format": "pt"})
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One converted network, with everything in it, and its file."""
    torch.manual_seed(3)
    model = converted(branches=3, strategy="stochastic")
    path = tmp_path_factory.mktemp("saved") / "model.safetensors"
    dcl.save_model(model, path)
    return model, path


# The same network again

WAYS = {
    "two branches": {},
    "low-rank": {"branches": 1},
    "three branches": {"branches": 3},
    "stochastic": {"branches": 3, "strategy": "stochastic"},
    "unequal widths": {"width": (3, 7)},
    "unequal and stochastic": {"branches": 4, "width": (1, 2, 3, 4), "strategy": "stochastic", "eps": 0.02},
    "another eps": {"eps": 1.25e-4},
    "low-rank without eps": {"branches": 1, "eps": 0.0},
    "a ratio": {"width": None, "ratio": 0.3, "round_to": 1},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_converted_network_comes_back_bit_for_bit(tmp_path, way):
    model = converted(**WAYS[way])
    dcl.save_model(model, tmp_path / "m.safetensors")
    loaded = dcl.load_model(network, tmp_path / "m.safetensors")
    assert_same_network(model, loaded)
    assert isinstance(loaded.conv2, dcl.DCLConv2d)
    assert isinstance(loaded.bn2, AbsorbedNorm)
    assert type(loaded.relu2) is AbsorbedReLU
    assert isinstance(loaded.fc1, dcl.DCLLinear)
    for name in ("conv1", "conv2", "fc1"):
        ours, theirs = model.get_submodule(name), loaded.get_submodule(name)
        assert (ours.widths, ours.eps, ours.strategy) == (theirs.widths, theirs.eps, theirs.strategy)
    assert torch.equal(output(model), output(loaded))


KINDS = {nn.Linear: (12,), nn.Conv1d: (12, 9), nn.Conv2d: (12, 9, 9), nn.Conv3d: (12, 9, 9, 9)}
NORMS = {nn.Linear: nn.BatchNorm1d, nn.Conv1d: nn.BatchNorm1d, nn.Conv2d: nn.BatchNorm2d, nn.Conv3d: nn.BatchNorm3d}
GEOMETRIES = st.fixed_dictionaries(
    {
        "kernel_size": st.integers(1, 3),
        "stride": st.integers(1, 2),
        "padding": st.integers(0, 2),
        "dilation": st.integers(1, 2),
        "padding_mode": st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
    }
)
SAME = st.fixed_dictionaries({"kernel_size": st.sampled_from([1, 3]), "padding": st.sampled_from(["same", "valid"])})
NORM_SETTINGS = st.fixed_dictionaries(
    {
        "eps": st.floats(1e-7, 1.0),
        "momentum": st.none() | st.floats(0, 1),
        "affine": st.booleans(),
        "track_running_stats": st.booleans(),
    }
)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(list(KINDS)),
    geometry=GEOMETRIES | SAME,
    bias=st.booleans(),
    norm=st.none() | NORM_SETTINGS,
    widths=st.lists(st.integers(1, 10), min_size=1, max_size=4),
    eps=st.none() | st.floats(1e-6, 10),
    stochastic=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
def test_any_layer_comes_back(tmp_path_factory, kind, geometry, bias, norm, widths, eps, stochastic, dtype):
    def make():
        layer = kind(12, 10, bias=bias, **({} if kind is nn.Linear else geometry))
        norms = [] if norm is None else [NORMS[kind](10, **norm)]
        return nn.Sequential(layer, *norms, nn.ReLU()).to(dtype)

    strategy = "stochastic" if stochastic and len(widths) > 2 else "deterministic"
    model = converted(make(), KINDS[kind], branches=len(widths), width=tuple(widths), eps=eps, strategy=strategy)
    path = tmp_path_factory.mktemp("any") / "m.safetensors"
    dcl.save_model(model, path)
    loaded = dcl.load_model(make, path)
    assert_same_network(model, loaded)
    assert torch.equal(output(model, KINDS[kind], dtype), output(loaded, KINDS[kind], dtype))
    if norm is not None:
        ours, theirs = model[0].fusion.norm, loaded[0].fusion.norm
        assert ours.num_features == theirs.num_features == len(widths) * 10
        for name, value in norm.items():
            assert getattr(ours, name) == getattr(theirs, name) == value


def test_a_batch_norm_without_bias_comes_back(tmp_path):
    try:
        nn.BatchNorm2d(4, bias=False)
    except TypeError:
        pytest.skip("this torch has no batch norm with a weight and without a bias")
    make = partial(network, norm={"bias": False})
    model = converted(make())
    assert model.conv2.fusion.norm.bias is None
    dcl.save_model(model, tmp_path / "m.safetensors")
    assert_same_network(model, dcl.load_model(make, tmp_path / "m.safetensors"))


def test_the_bias_is_that_of_the_file(tmp_path):
    model = converted()
    dcl.save_model(model, tmp_path / "m.safetensors")
    loaded = dcl.load_model(partial(network, conv={"bias": True}), tmp_path / "m.safetensors")
    assert loaded.conv2.fusion.bias is None
    assert_same_network(model, loaded)


@torch.no_grad()
def frozen():
    model = network()
    model.bn2 = FrozenBatchNorm2d(32)
    for buffer in model.bn2.buffers():
        buffer.uniform_(0.5, 2)
    return model


def test_a_frozen_batch_norm_in_the_weights_comes_back(tmp_path):
    model = converted(frozen())
    assert isinstance(model.bn2, AbsorbedNorm)
    dcl.save_model(model, tmp_path / "m.safetensors")
    loaded = dcl.load_model(frozen, tmp_path / "m.safetensors")
    assert_same_network(model, loaded)
    assert torch.equal(output(model), output(loaded))


def test_the_draw_of_the_branches_goes_on_where_it_was(tmp_path):
    model = converted(branches=5, strategy="stochastic", seed=11)
    dcl.advance_branches_(model, 41)
    dcl.save_model(model, tmp_path / "m.safetensors")
    loaded = dcl.load_model(network, tmp_path / "m.safetensors")
    for _ in range(3):
        for name in ("conv1", "conv2", "fc1"):
            ours, theirs = model.get_submodule(name).fusion, loaded.get_submodule(name).fusion
            assert ours.key.tolist() == theirs.key.tolist()
            assert ours.active.tolist() == theirs.active.tolist()
        assert model.fc1.fusion.key[0] == 11
        dcl.advance_branches_(model)
        dcl.advance_branches_(loaded)
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(model.train()(x), loaded.train()(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("where", ["plain", "converted"])
def test_the_dtype_of_the_file_is_kept_whatever_the_network_has(tmp_path, dtype, where):
    model = converted().to(dtype)
    dcl.save_model(model, tmp_path / "m.safetensors")
    loaded = dcl.load_model(network() if where == "plain" else converted(), tmp_path / "m.safetensors")
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert loaded.conv2.fusion.norm.num_batches_tracked.dtype == torch.int64
    assert_same_network(model, loaded)
    assert torch.equal(output(model, dtype=dtype), output(loaded, dtype=dtype))


def test_layers_of_different_dtypes_keep_theirs(tmp_path):
    model = converted()
    model.fc1.to(torch.float64)
    dcl.save_model(model, tmp_path / "m.safetensors")
    loaded = dcl.load_model(network, tmp_path / "m.safetensors")
    assert loaded.fc1.branch.weight.dtype == torch.float64
    assert loaded.fc2.weight.dtype == torch.float32
    assert_same_network(model, loaded)


def test_a_network_is_loaded_in_place_and_a_factory_called_once(saved):
    model, path = saved
    mine = network()
    assert dcl.load_model(mine, path) is mine
    assert_same_network(model, mine)
    made = []
    loaded = dcl.load_model(lambda: made.append(network()) or made[0], path)
    assert loaded is made[0]
    assert len(made) == 1


def test_a_class_is_a_factory(tmp_path):
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

    model = Small()
    dcl.save_model(model, tmp_path / "m.safetensors")
    assert_same_network(model, dcl.load_model(Small, tmp_path / "m.safetensors"))


def test_a_network_that_has_the_layers_keeps_its_parameters_for_its_optimizer(saved):
    model, path = saved
    mine = dcl.load_model(network, path)
    shaken(mine)
    identities = [id(p) for p in mine.parameters()]
    dcl.load_model(mine, path)
    assert [id(p) for p in mine.parameters()] == identities
    assert_same_network(model, mine)


def test_a_network_without_a_dcl_layer_comes_back_too(tmp_path):
    model = shaken(network())
    dcl.save_model(model, tmp_path / "m.safetensors")
    loaded = dcl.load_model(network, tmp_path / "m.safetensors")
    assert_same_network(model, loaded)
    assert torch.equal(output(model), output(loaded))
    assert contents(tmp_path / "m.safetensors")[1]["layers"] == []


def by_hand(groups=4, slope=0.2):
    return nn.Sequential(
        dcl.DCLConv2d(
            3, 16, 3, padding="same", padding_mode="reflect", branches=3, width=(2, 3, 4), eps=1e-3,
            norm_layer=partial(nn.GroupNorm, groups), branch_activation=partial(nn.LeakyReLU, slope),
        ),
        nn.Flatten(1, 2),
        dcl.DCLConv1d(16 * 8, 6, 1, branches=4, strategy="stochastic", width=2, branch_activation=nn.PReLU),
        dcl.DCLLinear(8, 5, width=2, bias=False, norm_layer=lambda _: nn.BatchNorm1d(6)),
    )  # fmt: skip


def test_layers_built_by_hand_come_back_into_the_same_layers(tmp_path):
    model = shaken(by_hand())
    dcl.save_model(model, tmp_path / "m.safetensors")
    loaded = dcl.load_model(by_hand, tmp_path / "m.safetensors")
    assert_same_network(model, loaded)
    assert torch.equal(output(model), output(loaded))
    refused(tmp_path / "m.safetensors", by_hand(groups=8), "another architecture", "num_groups 8, the file 4")
    refused(tmp_path / "m.safetensors", by_hand(slope=0.1), "another architecture", "negative_slope 0.1, the file 0.2")


def test_a_network_that_is_one_dcl_layer_comes_back(tmp_path):
    make = partial(dcl.DCLConv2d, 3, 16, 3)
    model = make()
    dcl.save_model(model, tmp_path / "m.safetensors")
    assert_same_network(model, dcl.load_model(make, tmp_path / "m.safetensors"))
    refused(tmp_path / "m.safetensors", nn.Conv2d(3, 16, 3), "it is the network itself")


@pytest.mark.parametrize("extra", [{"norm_layer": partial(nn.GroupNorm, 2)}, {"branch_activation": nn.ReLU}])
def test_what_a_plain_network_cannot_become_is_said_with_the_remedy(tmp_path, extra):
    model = network()
    model.conv1 = dcl.DCLConv2d(3, 16, 3, padding=1, **extra)
    dcl.save_model(model, tmp_path / "m.safetensors")
    part = "GroupNorm" if "norm_layer" in extra else "ReLU"
    refused(
        tmp_path / "m.safetensors", network(), f"the {part} inside 'conv1'", "pass a network that has this DCL layer"
    )
    again = network()
    again.conv1 = dcl.DCLConv2d(3, 16, 3, padding=1, **extra)
    assert_same_network(model, dcl.load_model(again, tmp_path / "m.safetensors"))


def test_flags_and_frozen_layers_of_the_network_stay_as_they_were(saved):
    _, path = saved
    mine = network().eval()
    mine.relu1.train()
    mine.conv1.requires_grad_(False)
    dcl.load_model(mine, path)
    assert [name for name, module in mine.named_modules() if module.training] == ["relu1"]
    assert not any(p.requires_grad for p in mine.conv1.parameters())
    assert all(p.requires_grad for n, p in mine.named_parameters() if not n.startswith("conv1"))


def test_the_network_inside_a_wrapper_is_saved(tmp_path):
    model = converted()
    for wrapped in (torch.compile(model), nn.DataParallel(model), nn.DataParallel(torch.compile(model))):
        dcl.save_model(wrapped, tmp_path / "m.safetensors")
        assert_same_network(model, dcl.load_model(network, tmp_path / "m.safetensors"))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_device_of_the_network_is_kept_whatever_the_file_was_saved_from(tmp_path, device):
    model = converted(branches=3, strategy="stochastic")
    other = "cuda" if device == "cpu" else "cpu"
    dcl.save_model(copy.deepcopy(model).to(other), tmp_path / "m.safetensors")
    loaded = dcl.load_model(network().to(device), tmp_path / "m.safetensors")
    assert {t.device.type for t in (*loaded.parameters(), *loaded.buffers())} == {device}
    assert_same_network(model, loaded.cpu())


class Versioned(nn.Linear):
    """Reads its own version only, as networks do that have changed over time."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        if local_metadata.get("version") != 2:
            raise ValueError(f"version should be 2, not {local_metadata.get('version')}")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def test_modules_that_ask_for_their_version_get_it(tmp_path):
    def make():
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), Versioned(16, 2))

    model = converted(make(), (8,))
    dcl.save_model(model, tmp_path / "m.safetensors")
    assert_same_network(model, dcl.load_model(make, tmp_path / "m.safetensors"))


# Tensors of every kind


class Odd(nn.Module):
    """One of everything that a state dict may hold."""

    def __init__(self, fill=0):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        for name, value in {
            "empty": torch.empty(0, 3),
            "empty_int": torch.empty(2, 0, dtype=torch.int32),
            "scalar": torch.tensor(1.5 + fill),
            "whole": torch.tensor(3 + fill),
            "flags": torch.tensor([True, False, bool(fill)]),
            "bytes": torch.arange(5, dtype=torch.uint8) + fill,
            "small": torch.arange(5, dtype=torch.int16) - fill,
            "fine": torch.arange(5, dtype=torch.float64) / 3 + fill,
            "waves": torch.arange(4).to(torch.complex64) * 1j + fill,
            "not_a_number": torch.tensor([float("nan"), float("inf"), -0.0]),
        }.items():
            self.register_buffer(name, value)
        self.register_buffer("nothing", None)
        self.register_buffer("passing", torch.full((2,), float(fill)), persistent=False)

    def forward(self, x):
        return self.layer(x)


def test_every_kind_of_tensor_comes_back(tmp_path):
    model = Odd(fill=7)
    dcl.save_model(model, tmp_path / "m.safetensors")
    loaded = dcl.load_model(Odd, tmp_path / "m.safetensors")
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert list(ours) == list(theirs)
    for name in ours:
        torch.testing.assert_close(theirs[name], ours[name], rtol=0, atol=0, equal_nan=True)
    assert loaded.passing.tolist() == [0.0, 0.0]


def test_weights_that_are_not_contiguous_come_back(tmp_path):
    model = shaken(network())
    model.fc1.weight = nn.Parameter(torch.randn(48, 32)[::2])
    model.fc2.weight = nn.Parameter(torch.randn(24, 5).t())
    model.fc2.bias = nn.Parameter(torch.randn(1).expand(5))
    model.conv2.weight = nn.Parameter(model.conv2.weight.detach().contiguous(memory_format=torch.channels_last))
    dcl.save_model(model, tmp_path / "m.safetensors")
    loaded = dcl.load_model(network, tmp_path / "m.safetensors")
    assert_same_network(model, loaded)
    assert all(p.is_contiguous() for p in loaded.parameters())


def test_a_channels_last_network_stays_one(tmp_path):
    model = converted(network().to(memory_format=torch.channels_last))
    dcl.save_model(model, tmp_path / "m.safetensors")
    loaded = dcl.load_model(network().to(memory_format=torch.channels_last), tmp_path / "m.safetensors")
    assert_same_network(model, loaded)
    assert loaded.conv2.branch.weight.is_contiguous(memory_format=torch.channels_last)
    assert not loaded.conv2.branch.weight.is_contiguous()
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    assert torch.equal(model.eval()(x), loaded.eval()(x))


# Shared tensors and shared modules


class Tied(nn.Module):
    """An encoder and a decoder with one weight, and two buffers that overlap."""

    def __init__(self, tie=True):
        super().__init__()
        self.encoder, self.middle, self.decoder = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        if tie:
            self.decoder.weight = self.encoder.weight
        window = torch.randn(6)
        self.register_buffer("front", window[:4])
        self.register_buffer("back", window[2:])
        self.register_buffer("all", window)

    def forward(self, x):
        return self.decoder(torch.relu(self.middle(self.encoder(x))))


def test_a_tied_weight_is_written_once_and_stays_tied(tmp_path):
    model = converted(Tied(), (16,))
    path = tmp_path / "m.safetensors"
    dcl.save_model(model, path)
    tensors, content = contents(path)
    assert content["shared"] == {"decoder.weight": "encoder.weight"}
    assert "decoder.weight" not in tensors
    loaded = dcl.load_model(Tied, path)
    assert loaded.decoder.weight is loaded.encoder.weight
    assert isinstance(loaded.middle, dcl.DCLLinear)
    assert_same_network(model, loaded)
    x = torch.randn(3, 16)
    assert torch.equal(model(x), loaded(x))
    half = dcl.load_model(Tied().half(), path)
    assert half.decoder.weight is half.encoder.weight
    assert half.decoder.weight.dtype == torch.float32


def test_parameters_in_one_storage_come_back(tmp_path):
    def make():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = nn.Parameter(model[0].weight.detach())
        return model

    model = make()
    dcl.save_model(model, tmp_path / "m.safetensors")
    loaded = dcl.load_model(make, tmp_path / "m.safetensors")
    assert_same_network(model, loaded)
    assert loaded[0].weight.data_ptr() == loaded[1].weight.data_ptr()


def test_a_tied_file_fits_a_network_that_does_not_tie(tmp_path):
    model = Tied()
    dcl.save_model(model, tmp_path / "m.safetensors")
    loaded = dcl.load_model(partial(Tied, tie=False), tmp_path / "m.safetensors")
    assert_same_network(model, loaded)


def test_two_tensors_do_not_fit_a_network_that_ties_them(tmp_path):
    dcl.save_model(Tied(tie=False), tmp_path / "m.safetensors")
    refused(tmp_path / "m.safetensors", Tied(), "another architecture", "tied there", "'decoder.weight'")


class Siamese(nn.Module):
    """One unit under two names, or two units."""

    def __init__(self, share=True, third=False):
        super().__init__()
        self.left = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.right = self.left if share else copy.deepcopy(self.left)
        if third:
            self.third = self.left

    def forward(self, x):
        return self.left(x) - self.right(x.flip(-1))


def test_a_shared_module_is_rebuilt_once_and_stays_shared(tmp_path):
    model = converted(Siamese(), width=2)
    path = tmp_path / "m.safetensors"
    dcl.save_model(model, path)
    assert [entry["names"] for entry in contents(path)[1]["layers"]] == [["left.0", "right.0"]]
    loaded = dcl.load_model(Siamese, path)
    assert isinstance(loaded.left[0], dcl.DCLConv2d)
    assert loaded.left[0] is loaded.right[0]
    assert loaded.left[1] is loaded.right[1]
    assert_same_network(model, loaded)
    assert torch.equal(output(model), output(loaded))
    refused(path, Siamese(share=False), "another architecture", "'left.0'")
    refused(path, Siamese(third=True), "another architecture", "third.0")


# Writing


def test_an_interrupted_save_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "m.safetensors"
    model = converted()
    dcl.save_model(model, path)
    before = path.read_bytes()

    def break_half_way(tensors, filename, metadata=None):
        data = safetensors.torch.save(tensors, metadata)
        filename.write_bytes(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", break_half_way)
    with pytest.raises(OSError, match="No space left"):
        dcl.save_model(shaken(model), path)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.safetensors"]


def test_saving_changes_nothing_in_the_network(tmp_path):
    model = converted(branches=3, strategy="stochastic")
    model.conv1.eval()
    with left_alone(model):
        dcl.save_model(model, tmp_path / "m.safetensors")


def test_the_same_network_gives_the_same_file(tmp_path):
    model = converted()
    dcl.save_model(model, str(tmp_path / "a.safetensors"))
    dcl.save_model(copy.deepcopy(model), tmp_path / "b.safetensors")
    a, b = contents(tmp_path / "a.safetensors"), contents(tmp_path / "b.safetensors")
    assert a[1] == b[1]
    assert all(torch.equal(a[0][name], b[0][name]) for name in a[0])


def test_the_file_is_all_safetensors_and_no_pickle(saved):
    model, path = saved
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    tensors = safetensors.torch.load_file(path)
    assert set(tensors) == set(model.state_dict()) == set(header) - {"__metadata__"}
    assert all(torch.equal(tensors[name], tensor) for name, tensor in model.state_dict().items())
    assert len(data) == 8 + length + sum(t.nbytes for t in tensors.values())
    assert set(header["__metadata__"]) == {"torch_dcl", "format"}
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(data)


def test_the_description_says_what_the_layers_are(saved):
    _, path = saved
    tensors, content = contents(path)
    assert content["version"] == 3
    assert sealed(tensors, content) == content
    assert content["absorbed"] == [["bn2"]]
    assert content["absorbed_by"] == ["conv2"]
    assert content["relus"] == [["relu1"], ["relu2"], ["relu3"]]
    assert content["shared_relus"] == []
    layers = {entry["names"][0]: entry for entry in content["layers"]}
    assert list(layers) == ["conv1", "conv2", "fc1"]
    assert layers["conv2"]["stage1"] == {
        "in_channels": 16, "kernel_size": [3, 3], "stride": [2, 1], "padding": [0, 0], "dilation": [1, 1],
        "padding_mode": "zeros",
    }  # fmt: skip
    assert layers["conv2"]["norm"]["type"] == "BatchNorm2d"
    assert layers["fc1"] == {
        "names": ["fc1"], "type": "DCLLinear", "widths": [4, 4, 4], "strategy": "stochastic", "eps": 0.01, "bias": True,
        "stage1": {"in_features": 32}, "activation": None, "norm": None, "marks_output": False,
    }  # fmt: skip


def test_what_cannot_be_saved_is_named(tmp_path):
    class Counting(nn.Linear):
        def get_extra_state(self):
            return {"calls": 3}

        def set_extra_state(self, state):
            pass

    with pytest.raises(TypeError, match=r"'0\._extra_state'.* is a dict"):
        dcl.save_model(nn.Sequential(Counting(2, 2)), tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=r"'weight' is on the meta device.*to_empty"):
        dcl.save_model(nn.Linear(2, 2, device="meta"), tmp_path / "m.safetensors")
    with pytest.raises(TypeError, match="the network and then the path, got a str first"):
        dcl.save_model("m.safetensors", nn.Linear(2, 2))
    with pytest.raises(FileNotFoundError, match="create it"):
        dcl.save_model(nn.Linear(2, 2), tmp_path / "missing" / "m.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_loaded_into_is_named(saved, tmp_path):
    _, path = saved
    with pytest.raises(TypeError, match="a function that makes one, got str"):
        dcl.load_model("model.safetensors", path)
    with pytest.raises(TypeError, match="got int from it"):
        dcl.load_model(lambda: 3, path)
    with pytest.raises(ValueError, match=r"meta device.*to_empty"):
        dcl.load_model(network().to("meta"), path)
    with pytest.raises(FileNotFoundError, match=r"no file '.*gone.safetensors'; save_model\(model, path\) writes one"):
        dcl.load_model(network, tmp_path / "gone.safetensors")
    with pytest.raises(IsADirectoryError, match="is a folder; name the file"):
        dcl.load_model(network, tmp_path)


def test_a_network_that_refuses_a_layer_is_left_alone(saved):
    class Sealed(nn.Sequential):
        def __setattr__(self, name, value):
            if name == "fc1":
                raise PermissionError("sealed")
            super().__setattr__(name, value)

    _, path = saved
    mine = Sealed(OrderedDict(network().named_children()))
    with left_alone(mine), pytest.raises(PermissionError):
        dcl.load_model(mine, path)


# Files that are not whole, or not ours


@no_deadline
@given(data=st.data())
def test_a_file_cut_short_anywhere_is_called_so(saved, tmp_path, data):
    _, path = saved
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    place = data.draw(st.integers(0, header) | st.integers(0, len(whole) - 1) | st.sampled_from([0, 7, 8, 9, header]))
    (tmp_path / "cut.safetensors").write_bytes(whole[:place])
    refused(tmp_path / "cut.safetensors", network(), "is cut short", "fetch or save it again")


def test_a_longer_file_was_altered(saved, tmp_path):
    _, path = saved
    (tmp_path / "long.safetensors").write_bytes(path.read_bytes() + b"more")
    refused(tmp_path / "long.safetensors", network(), "was altered")


@no_deadline
@given(data=st.data(), mask=st.integers(1, 255))
def test_one_wrong_byte_among_the_weights_is_found(saved, tmp_path, data, mask):
    _, path = saved
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(8 + int.from_bytes(content[:8], "little"), len(content) - 1))
    content[place] ^= mask
    (tmp_path / "flipped.safetensors").write_bytes(content)
    refused(tmp_path / "flipped.safetensors", network(), "was altered", "SHA-256")


@settings(no_deadline, max_examples=200)
@given(data=st.data(), mask=st.integers(1, 255))
def test_one_wrong_byte_in_the_header_never_gives_another_network(saved, tmp_path, data, mask):
    model, path = saved
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, 7 + int.from_bytes(content[:8], "little")))] ^= mask
    (tmp_path / "flipped.safetensors").write_bytes(content)
    try:
        loaded = dcl.load_model(network, tmp_path / "flipped.safetensors")
    except CheckpointError:
        return
    assert_same_network(model, loaded)  # a blank in the padding, or the key "format", which nobody reads
    assert torch.equal(output(model), output(loaded))


def paths_into(content, prefix=()):
    """The place of every value in nested lists and dictionaries, inner ones too."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield (*prefix, key)
        yield from paths_into(value, (*prefix, key))


def put(content, place, value):
    content = copy.deepcopy(content)
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return content


OTHER_VALUES = st.sampled_from([None, True, 0, 1, -1, 0.5, "", "x", "fc2", [], {}, ["x"], [["fc2"]], [0], {"x": "y"}])


@settings(no_deadline, max_examples=100)
@given(data=st.data(), value=OTHER_VALUES)
def test_any_other_value_in_the_description_is_found(saved, tmp_path, data, value):
    _, path = saved
    tensors, content = contents(path)
    place = data.draw(st.sampled_from([p for p in paths_into(content) if p != ("version",)]))
    changed = put(content, place, value)
    if json.dumps(changed, sort_keys=True) == json.dumps(content, sort_keys=True):
        return
    refused(forge(tmp_path / "forged.safetensors", tensors, changed), network(), "was altered")


@settings(no_deadline, max_examples=300)
@given(data=st.data(), value=OTHER_VALUES)
def test_an_odd_description_under_a_right_seal_is_refused_or_fits(saved, tmp_path, data, value):
    _, path = saved
    tensors, content = contents(path)
    place = data.draw(st.sampled_from([p for p in paths_into(content) if p != ("sha256",)]))
    odd = sealed(tensors, put(content, place, value))
    mine = network()
    with contextlib.suppress(CheckpointError), left_alone_after(CheckpointError, mine):
        assert dcl.load_model(mine, forge(tmp_path / "odd.safetensors", tensors, odd)) is mine


@contextlib.contextmanager
def left_alone_after(error, model):
    check = left_alone(model)
    check.__enter__()
    try:
        yield
    except error:
        check.__exit__(None, None, None)
        raise


@pytest.mark.parametrize("key", ["version", "layers", "absorbed", "absorbed_by", "relus", "shared_relus", "shared"])
def test_a_description_without_one_of_its_parts_is_not_ours(saved, tmp_path, key):
    _, path = saved
    tensors, content = contents(path)
    part = sealed(tensors, {k: v for k, v in content.items() if k != key})
    refused(forge(tmp_path / "part.safetensors", tensors, part), network(), "was not written by save_model")


def test_a_description_without_its_seal_was_altered(saved, tmp_path):
    _, path = saved
    tensors, content = contents(path)
    del content["sha256"]
    refused(forge(tmp_path / "open.safetensors", tensors, content), network(), "was altered")


def rename(tensors):
    tensors["fc3.weight"] = tensors.pop("fc2.weight")


def swap_two(tensors):
    a, b = "conv2.fusion.norm.weight", "conv2.fusion.norm.bias"
    tensors[a], tensors[b] = tensors[b], tensors[a]


def drop(tensors):
    del tensors["fc2.bias"]


def add(tensors):
    tensors["more"] = torch.zeros(1)


def reshape(tensors):
    tensors["fc2.weight"] = tensors["fc2.weight"].reshape(24, 5)


def retype(tensors):
    tensors["fc2.weight"] = tensors["fc2.weight"].view(torch.int32)


@pytest.mark.parametrize("change", [rename, swap_two, drop, add, reshape, retype])
def test_a_file_with_other_tensors_was_altered(saved, tmp_path, change):
    _, path = saved
    tensors, content = contents(path)
    change(tensors)
    refused(forge(tmp_path / "forged.safetensors", tensors, content), network(), "was altered", "SHA-256")


@pytest.mark.parametrize("change", [rename, drop, add, reshape, retype])
def test_other_tensors_under_a_right_seal_are_for_another_network(saved, tmp_path, change):
    _, path = saved
    tensors, content = contents(path)
    change(tensors)
    path = forge(tmp_path / "sealed.safetensors", tensors, sealed(tensors, content))
    refused(path, network(), "was made for another architecture")


def test_a_newer_version_is_named_with_the_remedy(saved, tmp_path):
    _, path = saved
    tensors, content = contents(path)
    newer = {**content, "version": 4, "layers": "in a form of its own"}
    expected = ("is of version 4", "reads up to 3", "update torch-dcl")
    refused(forge(tmp_path / "newer.safetensors", tensors, sealed(tensors, newer)), network(), *expected)
    refused(forge(tmp_path / "newer.safetensors", tensors, newer), network(), *expected)


# Files of version 1, with a batch norm for each branch


def as_first_version(tensors, content):
    """A file as version 1 wrote it: a batch norm for each branch, and nothing about shared ReLUs."""
    branches = {name: len(layer["widths"]) for layer in content["layers"] if layer["norm"] for name in layer["names"]}

    def old_names(name):
        layer, found, rest = name.partition(".fusion.norm.")
        return [f"{layer}.fusion.norm.{t}.{rest}" for t in range(branches[layer])] if found else [name]

    old = {}
    for name, tensor in tensors.items():
        names = old_names(name)
        parts = tensor.chunk(len(names)) if tensor.dim() else [tensor] * len(names)
        old |= {own: part.clone() for own, part in zip(names, parts, strict=True)}
    content = copy.deepcopy(content)
    del content["shared_relus"], content["absorbed_by"]
    for layer in content["layers"]:
        del layer["marks_output"]
    ties = {}
    for name, first in content["shared"].items():
        ties |= zip(old_names(name), old_names(first), strict=True)
    return old, sealed(old, {**content, "version": 1, "shared": ties})


class Twice(nn.Module):
    """A unit in two places."""

    def __init__(self):
        super().__init__()
        self.unit = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())
        self.again, self.head = self.unit, nn.Conv2d(3, 2, 1)

    def forward(self, x):
        return self.head(self.again(self.unit(x)))


FIRST = {
    "two branches": (network, {}),
    "low-rank": (network, {"branches": 1}),
    "stochastic": (network, {"branches": 3, "strategy": "stochastic"}),
    "unequal widths": (network, {"width": (3, 7)}),
    "no shift, no statistics": (partial(network, norm={"affine": False, "track_running_stats": False}), {}),
    "a unit in two places": (Twice, {"width": 2}),
    "a shared ReLU": (lambda: BasicBlock(3, 3), {"width": 2}),
}


@pytest.mark.parametrize("case", FIRST)
def test_a_file_of_version_1_loads_into_the_same_network(tmp_path, case):
    make, arguments = FIRST[case]
    model, path = converted(make(), **arguments), tmp_path / "m.safetensors"
    dcl.save_model(model, path)
    tensors, content = contents(path)
    older = forge(tmp_path / "older.safetensors", *as_first_version(tensors, content))
    names = contents(older)[0].keys()
    if case != "no shift, no statistics":
        assert any(".fusion.norm.0.weight" in name for name in names)
    assert not any(".fusion.norm.weight" in name for name in names)
    expected = output(model)
    for into in (make(), converted(make(), seed=1, **arguments)):
        loaded = dcl.load_model(into, older)
        assert torch.equal(output(loaded), expected)
        torch.testing.assert_close(dict(loaded.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    if case == "a shared ReLU":
        assert type(dcl.load_model(make(), older).relu) is nn.ReLU, "as it was left at the time"

    # And on: the same training step, and the same file when it is saved again.
    again, x = dcl.load_model(make(), older).train(), torch.randn(4, 3, 8, 8)
    dcl.advance_branches_(model.train(), 3)
    dcl.advance_branches_(again, 3)
    for each in (model, again):
        each(x).square().sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    dcl.save_model(again, tmp_path / "again.safetensors")
    saved, description = contents(tmp_path / "again.safetensors")
    assert description["version"] == 3
    assert saved.keys() == tensors.keys()


def test_a_file_of_version_1_that_lacks_a_branch_is_for_another_network(tmp_path):
    dcl.save_model(converted(), tmp_path / "m.safetensors")
    tensors, content = as_first_version(*contents(tmp_path / "m.safetensors"))
    del tensors["conv2.fusion.norm.1.bias"]
    path = forge(tmp_path / "lacking.safetensors", tensors, sealed(tensors, content))
    refused(path, network(), "was made for another architecture", "conv2.fusion.norm")


@pytest.mark.parametrize("value", [7, "relu1", {"relu1": 1}, [7], [[]]])
def test_odd_shared_relus_in_a_file_of_version_1_are_refused(tmp_path, value):
    dcl.save_model(converted(), tmp_path / "m.safetensors")
    tensors, content = as_first_version(*contents(tmp_path / "m.safetensors"))
    path = forge(tmp_path / "odd.safetensors", tensors, sealed(tensors, {**content, "shared_relus": value}))
    refused(path, network(), "was not written by save_model", "'shared_relus'")


def with_another_epsilon(model):
    for i, layer in enumerate(module for module in model.modules() if isinstance(module, dcl.layers._DCL)):
        layer.fusion.eps = 0.0123 + i / 7
    return model


def test_a_file_of_version_2_pairs_layers_and_norms_by_their_order(saved, tmp_path):
    _, path = saved
    tensors, content = contents(path)
    del content["absorbed_by"]
    content["version"] = 2
    mine = network()
    mine.bn2.eval()
    loaded = dcl.load_model(mine, forge(tmp_path / "older.safetensors", tensors, sealed(tensors, content)))
    assert not loaded.conv2.fusion.norm.training
    loaded.bn2.train()
    assert loaded.conv2.fusion.norm.training


def test_the_tensors_of_a_file_are_a_state_dict_with_epsilon(tmp_path):
    model, path = with_another_epsilon(converted()), tmp_path / "m.safetensors"
    dcl.save_model(model, path)
    other = converted(seed=1)
    assert not torch.equal(output(other), output(model))
    other.load_state_dict(safetensors.torch.load_file(path))
    assert torch.equal(output(other), output(model))


def test_a_file_without_epsilon_among_its_tensors_takes_it_from_the_description(tmp_path):
    """As files were before the state dict had it."""
    model, path = with_another_epsilon(converted()), tmp_path / "m.safetensors"
    dcl.save_model(model, path)
    tensors, content = contents(path)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("_extra_state")}
    older = forge(tmp_path / "older.safetensors", tensors, sealed(tensors, content))
    assert_same_network(dcl.load_model(network(), older), model)
    assert_same_network(dcl.load_model(with_another_epsilon(converted(seed=1)), older), model)


@pytest.mark.parametrize("value", [0.5, torch.nan, [0.01, 0.01], 1])
def test_an_epsilon_that_contradicts_the_description_is_refused(saved, tmp_path, value):
    _, path = saved
    tensors, content = contents(path)
    tensors["fc1.fusion._extra_state"] = torch.tensor(value)
    forged = forge(tmp_path / "forged.safetensors", tensors, sealed(tensors, content))
    refused(forged, network(), "eps of 'fc1'", "0.01 in its description")


def test_a_plain_safetensors_file_is_not_ours(tmp_path):
    path = tmp_path / "plain.safetensors"
    safetensors.torch.save_file(network().state_dict(), path)
    refused(path, network(), "was not written by save_model", "metadata")
    safetensors.torch.save_file({}, path, metadata={"format": "pt"})
    refused(path, network(), "was not written by save_model")


TEXTS = ["", "x", "[]", "null", "5", '"version"', "{}", "[" * 100_000, '{"version": 1']
TEXTS += [f'{{"version": {v}}}' for v in ('"1"', "true", "null", "-1", "0", "1.0", "[1]", "NaN", "{}")]


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:20] or "empty")
def test_a_description_that_is_none_is_not_ours(tmp_path, text):
    path = forge(tmp_path / "m.safetensors", {"a": torch.zeros(1)}, text)
    refused(path, network(), "was not written by save_model")


@no_deadline
@given(data=st.binary(min_size=9, max_size=200))
def test_random_bytes_are_not_a_safetensors_file(tmp_path, data):
    path = tmp_path / "noise.safetensors"
    path.write_bytes(b"\x93" * 9 + data)
    refused(path, network(), "is not a safetensors file")
    path.write_bytes(data)
    refused(path, network())


class Trap:
    """A pickle of this runs a function when it is loaded."""

    sprung = []

    def __reduce__(self):
        return Trap.sprung.append, ("unpickled",)


@pytest.mark.parametrize("how", ["torch.save", "pickle"])
def test_a_pickle_is_refused_and_not_loaded(tmp_path, how):
    path = tmp_path / "model.pt"
    if how == "pickle":
        path.write_bytes(pickle.dumps(Trap()))
    else:
        torch.save({"weight": torch.zeros(3), "trap": Trap()}, path)
    refused(path, network(), "is not a safetensors file")
    assert Trap.sprung == []


# Files for another network


def test_other_architectures_are_refused_and_left_alone(tmp_path):
    path = tmp_path / "m.safetensors"
    dcl.save_model(converted(width=8), path)
    other = "was made for another architecture"

    def conv(**arguments):
        return network(conv=arguments)

    refused(path, network(width=64), other, "'fc1' has in_features 64, the file 32")
    refused(path, network(width=6), other, "'conv2'", "width 8 does not fit")
    refused(
        path, network(classes=7), other, "2 differ in shape (first 'fc2.weight': (5, 24) in the file, (7, 24) there)"
    )
    deeper = {"fc3": nn.Linear(24, 24), "relu4": nn.ReLU()}
    refused(path, network(between=deeper), other, "2 tensors are missing in the file (first 'fc3.bias')")
    shallow = network()
    del shallow.fc1
    refused(path, shallow, other, "the network has no 'fc1'")
    headless = network()
    del headless.fc2
    refused(path, headless, other, "2 are not in the network (first 'fc2.bias')")
    refused(path, conv(stride=1), other, "'conv2' has stride [1, 1], the file [2, 1]")
    refused(path, conv(padding=1), other, "'conv2' has padding [1, 1], the file [0, 0]")
    refused(path, conv(padding="valid"), other, "'conv2' has padding 'valid', the file [0, 0]")
    refused(path, conv(dilation=2), other, "'conv2' has dilation [2, 2], the file [1, 1]")
    refused(path, conv(padding_mode="circular"), other, "padding_mode 'circular', the file 'zeros'")
    refused(path, converted(conv(bias=True), width=8), other, "'conv2' has bias True, the file False")
    refused(path, conv(groups=2), other, "'conv2'", "grouped (2 groups)")
    refused(path, nn.Linear(3, 3), other, "the network has no 'conv1'")
    refused(path, nn.Sequential(), other, "the network has no 'conv1'")


def test_a_lazy_network_is_refused_with_the_remedy(tmp_path):
    def make():
        return nn.Sequential(nn.LazyLinear(32), nn.ReLU(), nn.LazyLinear(2))

    model, x = make(), torch.randn(4, 64)
    model(x)
    dcl.convert_(model, dcl.plan(model, (64,), width=8), init="random")
    dcl.save_model(model, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=r"'0' .* lazy, and has no size yet: run one batch through the network"):
        dcl.load_model(make, tmp_path / "m.safetensors")
    lazy = make()
    lazy(x)
    assert torch.equal(dcl.load_model(lazy, tmp_path / "m.safetensors")(x), model(x))


def test_a_layer_of_other_size_is_named_with_both_sizes(tmp_path):
    path = tmp_path / "m.safetensors"
    dcl.save_model(converted(nn.Sequential(nn.Linear(8, 16), nn.ReLU()), (8,)), path)
    other = nn.Sequential(nn.Linear(8, 24), nn.ReLU())
    refused(path, other, "2 differ in shape (first '0.fusion.weight': (8, 16) in the file, (8, 24) there)")


def with_module(name, module):
    model = network()
    setattr(model, name, module)
    return model


def test_another_module_in_the_place_of_a_layer_or_norm_is_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    dcl.save_model(converted(), path)
    other = "was made for another architecture"
    refused(path, with_module("conv2", nn.ReLU()), other, "'conv2'", "ReLU")
    refused(path, with_module("relu2", nn.GELU()), other, "'relu2'", "GELU")
    refused(path, with_module("conv2", nn.ConvTranspose2d(16, 32, 3)), other, "'conv2'", "a transposed convolution")
    refused(path, with_module("conv2", nn.Conv1d(16, 32, 3)), other, "type 'DCLConv1d', the file 'DCLConv2d'")
    refused(path, with_module("bn2", nn.Identity()), other, "'bn2'", "it is a Identity")
    refused(path, with_module("bn2", nn.GroupNorm(4, 32)), other, "'bn2'", "it is a GroupNorm")
    refused(path, with_module("bn2", nn.Conv2d(32, 32, 1)), other, "'bn2'", "it is a Conv2d")
    hooked = network()
    hooked.conv2.register_forward_hook(lambda *_: None)
    refused(path, hooked, "'conv2'", "hooks", "remove them first")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"width": 5}, "widths [5, 5], the file [4, 4]"),
        ({"branches": 3}, "widths [4, 4, 4], the file [4, 4]"),
    ],
)
def test_other_dcl_layers_are_refused(tmp_path, arguments, expected):
    dcl.save_model(converted(), tmp_path / "m.safetensors")
    refused(tmp_path / "m.safetensors", converted(**arguments), "another architecture", f"'conv1' has {expected}")


@pytest.mark.parametrize("strategy", ["deterministic", "stochastic"])
def test_dcl_layers_that_are_there_take_over_the_epsilon_of_the_file(tmp_path, strategy):
    path = tmp_path / "m.safetensors"
    model = with_another_epsilon(converted(branches=3, strategy=strategy))
    dcl.save_model(model, path)
    other = converted(branches=3, strategy=strategy, eps=0.02, seed=1)
    parameters = list(other.parameters())
    dcl.load_model(other, path)
    assert_same_network(other, model)
    assert all(a is b for a, b in zip(parameters, other.parameters(), strict=True))


@pytest.mark.parametrize("eps", [0.0, -0.5])
def test_an_epsilon_that_layers_cannot_take_is_refused(tmp_path, eps):
    path = tmp_path / "m.safetensors"
    dcl.save_model(converted(), path)
    tensors, content = contents(path)
    content["layers"][-1]["eps"] = eps
    tensors[f"{content['layers'][-1]['names'][0]}.fusion._extra_state"] = torch.tensor(eps, dtype=torch.float64)
    forged = forge(tmp_path / "forged.safetensors", tensors, sealed(tensors, content))
    refused(forged, converted(), "another architecture", "cannot take the file's: eps")


def test_another_strategy_or_norm_in_a_dcl_layer_is_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    dcl.save_model(converted(branches=3, eps=0.01), path)
    other = converted(branches=3, strategy="stochastic")
    refused(path, other, "strategy 'stochastic', the file 'deterministic'")
    other = converted(network(norm={"momentum": 0.3}), branches=3, eps=0.01)
    refused(path, other, "'conv2' has momentum 0.3, the file 0.1")


def test_a_plain_file_does_not_fit_a_converted_network(tmp_path):
    path = tmp_path / "m.safetensors"
    dcl.save_model(network(), path)
    refused(path, converted(), "another architecture")


def test_an_absorbed_norm_without_tensors_is_still_missed(tmp_path):
    make = partial(network, norm={"affine": False, "track_running_stats": False})
    model = make()
    plan = dcl.plan(model, (3, 8, 8)).only("conv1")
    dcl.convert_(model, plan, init="random")
    dcl.save_model(model, tmp_path / "m.safetensors")
    again = make()
    again.bn2 = AbsorbedNorm()
    refused(tmp_path / "m.safetensors", again, "'bn2' is in a DCL layer there, not in the file")


def test_numbers_of_another_kind_are_refused(tmp_path):
    dcl.save_model(Odd(), tmp_path / "m.safetensors")
    other = Odd()
    other.whole = other.whole.float()
    refused(
        tmp_path / "m.safetensors", other, "another architecture", "'whole': torch.int64 in the file, torch.float32"
    )
