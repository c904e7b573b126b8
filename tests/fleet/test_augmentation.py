"""A fleet's images are those of `Batches`, whatever is cut, mirrored or subtracted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torch_dcl.data.batches import Batches, mean_image
from torch_dcl.data.svhn import preprocess
from torch_dcl.fleet import Fleet, Inputs, Member, Schedule
from torch_dcl.fleet.device_data import DeviceData

SIZE = (3, 9, 11)
STATISTICS = ((0.4, 0.5, 0.6), (0.2, 0.3, 0.25))


def some_data(count=30, size=SIZE, classes=4):
    return torch.randint(0, 256, (count, *size), dtype=torch.uint8), torch.randint(0, classes, (count,))


def as_batches(how):
    """`normalise` of `Inputs` as `Batches` takes it."""
    return (lambda images: images.float() - how) if isinstance(how, torch.Tensor) else how


@settings(max_examples=40)
@given(data=st.data())
def test_training_images_are_those_of_batches_for_the_seed_and_the_epoch(data):
    torch.manual_seed(data.draw(st.integers(0, 99)))
    sets = {"one": some_data(), "two": some_data()}
    normalise = data.draw(st.sampled_from([None, STATISTICS, mean_image(sets["one"][0]), preprocess]))
    crop, pad = data.draw(st.sampled_from([None, 1, 7, 9])), data.draw(st.integers(0, 8))
    flip = data.draw(st.booleans())
    seeds = data.draw(st.lists(st.integers(-5, 2**70), min_size=1, max_size=3))
    names = [data.draw(st.sampled_from(["one", "two"])) for _ in seeds]
    epoch, number = data.draw(st.integers(0, 300)), data.draw(st.integers(0, 2))
    inputs = Inputs(normalise, crop=crop, pad=pad, flip=flip)
    on_device = DeviceData(sets, names, torch.device("cpu"), inputs, train=True)
    on_device.begin_epoch(seeds, epoch)
    expected = [
        Batches(*sets[name], 10, seed, flip=flip, pad=pad, crop=crop, normalise=as_batches(normalise))
        for name, seed in zip(names, seeds, strict=True)
    ]
    index = torch.stack([batches.order(epoch)[number * 10 : number * 10 + 10] for batches in expected])
    images, labels = on_device.gather(index, torch.float32)
    for i, batches in enumerate(expected):
        wanted, theirs = list(batches.epoch(epoch))[number]
        assert torch.equal(images[i], wanted)
        assert torch.equal(labels[i], theirs)


@pytest.mark.parametrize("normalise", [None, STATISTICS, "mean", preprocess])
@pytest.mark.parametrize("crop", [None, 6, 9])
def test_evaluation_images_come_from_the_middle_and_unmirrored(normalise, crop):
    images, labels = some_data()
    how = mean_image(images) if normalise == "mean" else normalise
    on_device = DeviceData(
        {"one": (images, labels)}, ["one"], torch.device("cpu"), Inputs(how, crop=crop, pad=3, flip=True)
    )
    found, theirs = on_device.gather(torch.arange(30)[None], torch.float32)
    wanted, labels = next(iter(Batches(images, labels, 30, train=False, crop=crop, normalise=as_batches(how))))
    assert torch.equal(found[0], wanted)
    assert torch.equal(theirs[0], labels)


@pytest.mark.parametrize("stacked", [True, False])
def test_a_fleet_trains_on_the_batches_of_each_epoch(stacked, monkeypatch):
    data = {"one": some_data(count=25)}
    inputs = Inputs(STATISTICS, crop=7, pad=2, flip=True)
    seeds = [3, 2**40]
    shown = []
    gather = DeviceData.gather

    def watched(on_device, index, dtype):
        given = gather(on_device, index, dtype)
        shown.append(given)
        return given

    monkeypatch.setattr(DeviceData, "gather", watched)
    members = [Member(str(seed), "one", seed, 0.01, Schedule(2)) for seed in seeds]
    networks = [nn.Sequential(nn.Flatten(), nn.Linear(3 * 49, 4)) for _ in seeds]
    Fleet(networks, members, data, batch=8, inputs=inputs, stacked=stacked).train()
    assert len(shown) == 6  # two epochs of three batches
    for row, seed in enumerate(seeds):
        batches = Batches(*data["one"], 8, seed, flip=True, pad=2, crop=7, normalise=STATISTICS)
        wanted = [pair for epoch in range(2) for pair in batches.epoch(epoch)]
        for (images, labels), (theirs, of_theirs) in zip(shown, wanted, strict=True):
            assert torch.equal(images[row], theirs)
            assert torch.equal(labels[row], of_theirs)


@pytest.mark.parametrize("stacked", [True, False])
def test_evaluation_averages_the_probabilities_of_an_image_and_its_mirror_image(stacked):
    images, labels = some_data()
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 25, 4))
    member = Member("one", "one", 0, 0.1, Schedule(1))
    fleet = Fleet(
        [network], [member], {"one": (images, labels)}, batch=5, precision="float64", stacked=stacked,
        inputs=Inputs(STATISTICS, crop=5, average=True),
    )  # fmt: skip
    found = fleet.evaluate({"one": (images, labels)}, batch=7)
    views = next(iter(Batches(images, labels, 30, train=False, flip=True, crop=5, normalise=STATISTICS)))[0]
    with torch.no_grad():
        mean = torch.stack([network.double()(view.double()).softmax(-1) for view in views]).mean(0)
    assert torch.equal(found.predictions[0], mean.argmax(-1))
    loss = -mean.gather(1, labels[:, None]).log().mean()
    torch.testing.assert_close(found.losses[0], loss.double(), rtol=1e-12, atol=0)
    assert float(found.errors[0]) == pytest.approx(100 * float((mean.argmax(-1) != labels).double().mean()))


def fleet_of_one(inputs):
    network = nn.Sequential(nn.Flatten(), nn.LazyLinear(4))
    channels, height, width = inputs.size(SIZE)
    network(torch.zeros(1, channels, height, width))
    return Fleet([network], [Member("one", "one", 0, 0.1, Schedule(2))], {"one": some_data()}, batch=5, inputs=inputs)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (Inputs(crop=10), "crop must be from 1 to 9 for images of 9 x 11, got 10"),
        (Inputs(pad=9), "pad must be from 0 to 8 for images of 9 x 11, got 9"),
        (Inputs(((0.5,), (0.5,))), "1 means and 1 deviations for 3 channels"),
        (Inputs(torch.zeros(3, 9, 9)), r"must have the shape of an image, \[3, 9, 11\], got \[3, 9, 9\]"),
    ],
)
def test_inputs_that_do_not_fit_the_images_are_refused(inputs, message):
    with pytest.raises(ValueError, match=message):
        DeviceData({"one": some_data()}, ["one"], torch.device("cpu"), inputs)


@pytest.mark.parametrize(("arguments", "message"), [({"crop": 0}, "crop must be at"), ({"pad": -1}, "not be negative")])
def test_sizes_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Inputs(**arguments)


def test_a_checkpoint_of_other_inputs_is_refused(tmp_path):
    fleet_of_one(Inputs(crop=7)).save(tmp_path / "fleet")
    fleet_of_one(Inputs(crop=7)).load(tmp_path / "fleet")
    with pytest.raises(ValueError, match=r"another fleet: inputs of network 0 was .*'flip': False"):
        fleet_of_one(Inputs(crop=7, flip=True)).load(tmp_path / "fleet")
    mean = mean_image(some_data()[0])
    fleet_of_one(Inputs(mean)).save(tmp_path / "mean")
    fleet_of_one(Inputs(mean.clone())).load(tmp_path / "mean")
    with pytest.raises(ValueError, match="another fleet: inputs"):
        fleet_of_one(Inputs(mean + 1)).load(tmp_path / "mean")
