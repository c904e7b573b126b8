"""Corners that a fleet must not cut: shared storage, rest, freezing, unused layers, checkpoints."""

import pytest
import torch
from torch import nn

from torch_dcl import DCLLinear
from torch_dcl.experiments.columns import build
from torch_dcl.files import SealedError
from torch_dcl.fleet import Fleet, Member, Schedule, Stack, operations

IMAGES = torch.randint(0, 256, (40, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(40) % 5


def network(seed, *extra):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.ReLU(), *extra, nn.Linear(12, 5))


def fleet(networks, schedules=None, *, data=None, names=None, **settings):
    count = len(networks)
    schedules = schedules or [Schedule(2)] * count
    names = names or ["digits"] * count
    members = [Member(f"n{i}", names[i], i, 0.1, schedules[i]) for i in range(count)]
    return Fleet(networks, members, data or {"digits": (IMAGES, LABELS)}, batch=10, precision="float64", **settings)


def state(made, index):
    return made.network(index).state_dict()


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def test_views_of_one_storage_are_told_apart():
    data = {"first": (IMAGES[:20], LABELS[:20]), "even": (IMAGES[::2], LABELS[:20])}
    both = fleet([network(0), network(0)], data=data, names=["first", "even"])
    index = torch.arange(20).expand(2, -1)
    images, _ = both.data.gather(index, torch.float64)
    assert torch.equal(images[0, :, 0], IMAGES[:20].double() / 255)
    assert torch.equal(images[1, :, 0], IMAGES[::2].double() / 255)


def test_the_same_images_are_kept_once():
    data = {"a": (IMAGES, LABELS), "b": (IMAGES, LABELS.flip(0))}
    assert len(fleet([network(0), network(1)], data=data, names=["a", "b"]).data.images) == 1


def test_a_network_at_rest_keeps_its_batch_norm():
    long = fleet([network(0, nn.BatchNorm1d(12)), network(1, nn.BatchNorm1d(12))], [Schedule(1), Schedule(4)])
    long.train()
    alone = fleet([network(0, nn.BatchNorm1d(12))], [Schedule(1)])
    alone.train()
    together, expected = state(long, 0), state(alone, 0)
    for name, value in expected.items():
        torch.testing.assert_close(together[name], value, rtol=1e-12, atol=1e-14)


def test_a_frozen_parameter_stays():
    start = network(0)
    start[1].weight.requires_grad_(False)
    made = fleet([start])
    made.train()
    assert torch.equal(state(made, 0)["1.weight"], start[1].weight.double())
    assert not torch.equal(state(made, 0)["4.weight" if "4.weight" in state(made, 0) else "3.weight"], start[-1].weight)


def test_a_layer_that_the_forward_pass_does_not_use_comes_back_as_it_was():
    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(36, 5), nn.Linear(3, 2)
            self.register_buffer("note", torch.randn(2), persistent=False)

        def forward(self, x):
            return self.used(x.flatten(1))

    networks = [Spare(), Spare()]
    made = Stack(networks)
    for i, plain in enumerate(networks):
        assert torch.equal(made.network(i).spare.weight, plain.spare.weight)
        assert torch.equal(made.network(i).note, plain.note)


def test_tied_weights_are_refused():
    tied = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Linear(4, 4))
    tied[2].weight = tied[1].weight
    with pytest.raises(TypeError, match=r"'1.weight' and '2.weight' are tied"):
        Stack([tied])


def test_a_small_difference_of_a_setting_is_seen():
    networks = [nn.Sequential(nn.Flatten(), DCLLinear(4, 8, width=2, eps=eps)) for eps in (0.01, 0.010001)]
    with pytest.raises(ValueError, match=r"another architecture than network 0 \(layer '1.fusion'\)"):
        Stack(networks)


def test_dropout_of_everything_gives_zeros_and_no_gradient():
    x = torch.randn(2, 3, 4, requires_grad=True)
    y = operations.dropout(x, torch.tensor([1, 2]), 7, torch.tensor([0]), 1.0)
    assert torch.equal(y, torch.zeros_like(x))
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.zeros_like(x))


def test_dropout_of_images_drops_whole_values_channels_last():
    x = torch.ones(2, 3, 4, 5, 6)
    y = operations.dropout(x, torch.tensor([1, 2]), 7, torch.tensor([0]), 0.5)
    flat = operations.dropout(x.permute(0, 1, 3, 4, 2).flatten(2), torch.tensor([1, 2]), 7, torch.tensor([0]), 0.5)
    assert torch.equal(y.permute(0, 1, 3, 4, 2).flatten(2), flat)
    assert 0.4 < (y == 0).double().mean() < 0.6


@pytest.mark.parametrize("column", ["baseline", "A3S"])
def test_a_checkpoint_goes_on_bit_for_bit(column, tmp_path):
    images = torch.randint(0, 256, (40, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    data = {"digits": (images, torch.arange(40) % 100)}
    networks = [build(column, 100, seed) for seed in range(2)]
    whole = fleet(networks, [Schedule(3, warmup=3)] * 2, data=data)
    whole.train()
    half = fleet(networks, [Schedule(3, warmup=3)] * 2, data=data)
    half.train(1)
    half.save(tmp_path / "fleet.safetensors")
    again = fleet(networks, [Schedule(3, warmup=3)] * 2, data=data)
    again.load(tmp_path / "fleet.safetensors")
    again.train()
    assert all(same(state(whole, i), state(again, i)) for i in range(2))
    assert again.history == whole.history


def test_a_checkpoint_of_a_diverged_network_remembers_that(tmp_path):
    networks = [network(0), network(1)]
    with torch.no_grad():
        networks[1][1].weight.fill_(torch.nan)
    made = fleet(networks)
    made.train(1)
    made.save(tmp_path / "fleet.safetensors")
    again = fleet(networks)
    again.load(tmp_path / "fleet.safetensors")
    assert again.history.stopped == {1: 0}
    again.train()
    assert again.history.stopped == {1: 0}


def test_a_checkpoint_of_another_fleet_is_refused(tmp_path):
    made = fleet([network(0), network(1)])
    made.save(tmp_path / "fleet.safetensors")
    with pytest.raises(ValueError, match="is of 2 networks, this fleet has 1"):
        fleet([network(0)]).load(tmp_path / "fleet.safetensors")
    with pytest.raises(ValueError, match="schedule of network 0 was"):
        fleet([network(0), network(1)], [Schedule(3), Schedule(2)]).load(tmp_path / "fleet.safetensors")
    with pytest.raises(ValueError, match=r"belongs to another fleet: moment.3.bias is missing"):
        fleet([network(0, nn.Identity()), network(1, nn.Identity())]).load(tmp_path / "fleet.safetensors")


def test_a_flipped_byte_of_a_checkpoint_is_found(tmp_path):
    path = tmp_path / "fleet.safetensors"
    fleet([network(0)]).save(path)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(SealedError, match="damaged or was altered"):
        fleet([network(0)]).load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": LABELS.int()}, "must be int64"),
        ({"labels": LABELS + 1}, "the label 5, but the networks have 5 classes"),
        ({"labels": LABELS[:3]}, "40 images and 3 labels"),
        ({"images": IMAGES.float()}, "must be uint8"),
    ],
)
def test_data_that_cannot_be_used_is_refused_before_training_and_before_evaluation(change, message):
    wrong = (change.get("images", IMAGES), change.get("labels", LABELS))
    with pytest.raises(ValueError, match=message):
        fleet([network(0)], data={"digits": wrong})
    with pytest.raises(ValueError, match=message):
        fleet([network(0)]).evaluate({"digits": wrong})
