"""A fleet: each network ends as it would alone, and as a plain loop with torch's own optimiser leaves it."""

import copy
import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from torch_dcl import DCLConv2d, DCLLinear, follow_optimizer, seed_branches_
from torch_dcl.data import digits
from torch_dcl.data.draws import draw
from torch_dcl.experiments import columns
from torch_dcl.fleet import Fleet, Member, Schedule, Stack
from torch_dcl.fleet.operations import low_copy

CLASSES = 4


def some_data(count=40, shape=(6, 6)):
    return torch.randint(0, 256, (count, *shape), dtype=torch.uint8), torch.randint(0, CLASSES, (count,))


def some_sets(**arguments):
    return {name: some_data(**arguments) for name in ("one", "two", "three")}


def tiny(*, dropout=0.4, strategy="stochastic", norm=False):
    """A convolution, a DCL layer, dropout and a classifier: 6 × 6 images in, four classes out."""
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        *([nn.BatchNorm2d(3)] if norm else []),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        DCLLinear(12, 8, branches=3, width=3, strategy=strategy),
        nn.Dropout(dropout),
        nn.Linear(8, CLASSES),
    )


def all_different(count, sets=("one", "two", "three")):
    """Members that agree in nothing."""
    schedules = [
        Schedule(5), Schedule(5, warmup=7), Schedule(4, drops=(0.5,)),
        Schedule(3, warmup=3, drops=(0.3, 0.7), factor=0.3),
    ]  # fmt: skip
    return [
        Member(
            f"network {i}", sets[i % len(sets)], seed=1000 * i + 7, lr=0.02 + 0.001 * i, schedule=schedules[i % 4],
            weight_decay=1e-3 * (i % 5), clip=math.inf if i % 2 else 0.5 + 0.1 * i,
        )
        for i in range(count)
    ]  # fmt: skip


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def worst_difference(model, other):
    """The largest relative difference of a parameter or a statistic, by its norm."""
    mine, others = model.state_dict(), other.state_dict()
    assert mine.keys() == others.keys()
    worst = 0.0
    for name, value in mine.items():
        if value.is_floating_point():
            difference = (value - others[name]).norm() / others[name].norm().clamp(min=1e-30)
            worst = max(worst, float(difference) if difference.isfinite() else math.inf)
    return worst


def same_bits(model, other):
    mine, others = model.state_dict(), other.state_dict()
    return all(torch.equal(mine[name], others[name]) for name in mine)


def plain_training(network, member, data, batch, *, momentum=0.9, nesterov=False, factors=None, clip=None):
    """The same training as a loop of one network with torch's own optimiser.

    Returns the model, the mean loss of every epoch, and the epoch of the first loss or weight that was not finite. A
    parameter with such weights keeps its last finite ones.
    """
    model = copy.deepcopy(network).double().train()
    images, labels = data[member.data]
    images = images[:, None] if images.dim() == 3 else images
    groups = []
    for name, parameter in model.named_parameters():
        lr_factor, wd_factor = factors(name) if factors else (1.0, 1.0)
        groups.append({"params": [parameter], "weight_decay": member.weight_decay * wd_factor, "factor": lr_factor})
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=momentum, nesterov=nesterov)
    seed_branches_(model, member.seed)
    follow_optimizer(model, optimizer)
    per_epoch = len(images) // batch
    rates = member.schedule.rates(member.lr, per_epoch).tolist()
    losses = []
    for epoch in range(member.schedule.epochs):
        order = draw(member.seed, "order", epoch, torch.arange(len(images))).argsort(stable=True)
        losses.append(0.0)
        for step in range(per_epoch):
            chosen = order[step * batch : (step + 1) * batch]
            loss = F.cross_entropy(model(images[chosen].double() / 255), labels[chosen])
            if not loss.isfinite():
                return model, losses, epoch
            optimizer.zero_grad()
            loss.backward()
            (clip or clip_plainly)(list(model.parameters()), member.clip)
            for group in optimizer.param_groups:
                group["lr"] = rates[epoch * per_epoch + step] * group["factor"]
            before = copy.deepcopy(list(model.parameters()))
            optimizer.step()
            finite = [bool(parameter.isfinite().all()) for parameter in model.parameters()]
            if not all(finite):
                for parameter, old, is_finite in zip(model.parameters(), before, finite, strict=True):
                    parameter.data = parameter.data if is_finite else old.data
                return model, losses, epoch
            losses[-1] += loss.item() / per_epoch
    return model, losses, None


def clip_plainly(parameters, largest):
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in parameters))
    if norm > largest:
        for parameter in parameters:
            parameter.grad *= largest / norm


# Alone and among others


def test_a_network_ends_with_the_same_weights_alone_among_5_and_among_75():
    data = some_sets()
    members = all_different(75)
    networks = [tiny() for _ in members]
    chosen = [3, 17, 30, 44, 74]
    settings = {"batch": 4, "precision": "float64"}
    large = Fleet(networks, members, data, **settings)
    large.train()
    five = Fleet([networks[i] for i in chosen], [members[i] for i in chosen], data, **settings)
    five.train()
    for place, i in enumerate(chosen):
        alone = Fleet([networks[i]], [members[i]], data, **settings)
        alone.train()
        assert alone.epoch == members[i].schedule.epochs
        assert worst_difference(large.network(i), alone.network(0)) < 1e-12
        assert worst_difference(five.network(place), alone.network(0)) < 1e-12
        assert worst_difference(networks[i].double(), alone.network(0)) > 1e-3


def test_lenets_on_digits_end_with_the_same_weights_alone_and_among_others():
    data = {name: digits.generate(name, "train", indices=range(200)) for name in ("MNIST-II-01", "MNIST-II-03")}
    members = [
        Member(f"lenet {i}", name, i, 0.01 * (i + 1), Schedule(1, warmup=10 * i, drops=(0.8,)), clip=5.0)
        for i, name in enumerate(("MNIST-II-01", "MNIST-II-03", "MNIST-II-01"))
    ]
    networks = [columns.build("A3S", 100, seed) for seed in range(3)]
    # In fifty steps of four images a difference of one part in four million grows to a few percent, and what two ways
    # to add up a product leave in the last bits grows with it. In 25 of eight it grows a hundredfold.
    settings = {"batch": 8, "precision": "float64"}
    fleet = Fleet(networks, members, data, **settings)
    fleet.train()
    for i in range(3):
        alone = Fleet([networks[i]], [members[i]], data, **settings)
        alone.train()
        assert worst_difference(fleet.network(i), alone.network(0)) < 1e-12
        assert worst_difference(networks[i].double(), alone.network(0)) > 1e-3


@settings(max_examples=12)
@given(data=st.data())
def test_a_network_does_not_mind_where_in_a_fleet_it_stands(data):
    torch.manual_seed(data.draw(st.integers(0, 100)))
    sets = some_sets(count=12)
    members = all_different(4)
    networks = [tiny(norm=True) for _ in members]
    places = data.draw(st.permutations(range(4)))[: data.draw(st.integers(1, 4))]
    batch = data.draw(st.integers(2, 5))
    options = {"batch": batch, "precision": "float64", "nesterov": data.draw(st.booleans())}
    straight = Fleet(networks, members, sets, **options)
    mixed = Fleet([networks[i] for i in places], [members[i] for i in places], sets, **options)
    straight.train(2)
    mixed.train(2)
    for place, i in enumerate(places):
        assert worst_difference(mixed.network(place), straight.network(i)) < 1e-11


def test_networks_of_one_seed_and_one_start_stay_alike():
    data = {"one": some_data()}
    network = tiny()
    twins = [Member(name, "one", seed=3, lr=0.1, schedule=Schedule(2)) for name in "ab"]
    stranger = Member("c", "one", seed=4, lr=0.1, schedule=Schedule(2))
    fleet = Fleet([network] * 3, [*twins, stranger], data, batch=4)
    fleet.train()
    assert same_bits(fleet.network(0), fleet.network(1))
    assert not same_bits(fleet.network(0), fleet.network(2))


# Against a plain loop


PLAIN = {
    "plain": {"momentum": 0.0},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.8, "nesterov": True},
    "factors for biases": {"factors": lambda name: (2.0, 0.0) if name.endswith("bias") else (1.0, 1.0)},
}


@pytest.mark.parametrize("strategy", ["deterministic", "stochastic"])
@pytest.mark.parametrize("kind", PLAIN)
def test_a_fleet_does_what_a_plain_loop_with_torchs_optimiser_does(kind, strategy):
    data = some_sets()
    members = all_different(4)
    networks = [tiny(dropout=0.0, strategy=strategy) for _ in members]
    fleet = Fleet(networks, members, data, batch=6, precision="float64", **PLAIN[kind])
    history = fleet.train()
    assert history.stopped == {}
    assert len(history.train_loss) == 5
    for i, (network, member) in enumerate(zip(networks, members, strict=True)):
        model, losses, _ = plain_training(network, member, data, 6, **PLAIN[kind])
        found = fleet.network(i).state_dict()
        for name, value in model.named_parameters():
            torch.testing.assert_close(found[name], value.detach(), rtol=1e-10, atol=1e-12, msg=name)
        for epoch, loss in enumerate(losses):
            assert math.isclose(history.train_loss[epoch][i], loss, rel_tol=1e-10)


def test_a_fleet_keeps_the_running_statistics_of_a_plain_loop():
    data = some_sets(shape=(2, 6, 7))
    members = [dataclasses.replace(member, schedule=Schedule(3, warmup=4)) for member in all_different(3)]
    networks = [
        nn.Sequential(
            DCLConv2d(2, 4, 3, width=2, norm_layer=nn.BatchNorm2d, bias=False), nn.BatchNorm2d(4, momentum=0.3),
            nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES),
        )
        for _ in members
    ]  # fmt: skip
    fleet = Fleet(networks, members, data, batch=7, precision="float64")
    fleet.train()
    for i, (network, member) in enumerate(zip(networks, members, strict=True)):
        model, _, _ = plain_training(network, member, data, 7)
        assert worst_difference(fleet.network(i), model) < 1e-10


def test_clipping_is_torchs():
    """Torch adds 1e-6 to the norm, so the two agree to that."""
    data = some_sets()
    member = Member("clipped", "one", seed=1, lr=0.1, schedule=Schedule(3), clip=0.05)
    network = tiny(dropout=0.0)
    fleet = Fleet([network], [member], data, batch=8, precision="float64")
    fleet.train()
    model, _, _ = plain_training(network, member, data, 8, clip=nn.utils.clip_grad_norm_)
    free, _, _ = plain_training(network, member, data, 8, clip=lambda *_: None)
    parameters = dict(fleet.network(0).named_parameters())
    for name, value in model.named_parameters():
        assert (parameters[name] - value).norm() < 1e-3 * (dict(free.named_parameters())[name] - value).norm()
        torch.testing.assert_close(parameters[name], value, rtol=1e-4, atol=1e-6)


def test_every_image_is_seen_once_an_epoch_but_for_the_rest_that_fills_no_batch():
    seen = []
    images = torch.arange(23, dtype=torch.uint8)[:, None, None].expand(23, 2, 2).contiguous()
    data = {"one": (images, torch.zeros(23, dtype=torch.int64))}
    fleet = Fleet(
        [nn.Sequential(nn.Flatten(), nn.Linear(4, 2))],
        [Member("a", "one", seed=5, lr=0.1, schedule=Schedule(2))], data, batch=5,
    )  # fmt: skip
    fleet.stack.register_forward_pre_hook(lambda _, inputs: seen.append((inputs[0][0, :, 0, 0, 0] * 255).round().int()))
    fleet.train()
    assert len(seen) == 8
    epochs = [torch.cat(seen[:4]).tolist(), torch.cat(seen[4:]).tolist()]
    for epoch, order in enumerate(epochs):
        assert len(set(order)) == 20
        assert order == draw(5, "order", epoch, torch.arange(23)).argsort(stable=True)[:20].tolist()
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("seed", [0, -1, 2**31, 2**63, 2**80 + 3])
def test_any_whole_number_is_a_seed(seed):
    data = some_sets()
    member = Member("a", "one", seed=seed, lr=0.1, schedule=Schedule(1))
    network = tiny(dropout=0.0)
    fleet = Fleet([network], [member], data, batch=8, precision="float64")
    fleet.train()
    model, _, _ = plain_training(network, member, data, 8)
    assert worst_difference(fleet.network(0), model) < 1e-10


def test_the_networks_given_are_left_as_they_were():
    data = some_sets()
    networks = [tiny(norm=True) for _ in range(2)]
    before = [weights(network) for network in networks]
    Fleet(networks, all_different(2), data, batch=8).train(1)
    for network, old in zip(networks, before, strict=True):
        assert all(torch.equal(value, old[name]) for name, value in network.state_dict().items())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_other_precisions_train_to_much_the_same(precision):
    data = some_sets()
    members = [Member(name, "one", seed=i, lr=0.05, schedule=Schedule(3)) for i, name in enumerate("abc")]
    networks = [tiny() for _ in members]
    exact = Fleet(networks, members, data, batch=8, precision="float64").train()
    fleet = Fleet(networks, members, data, batch=8, precision=precision)
    history = fleet.train()
    close = {"float32": 1e-4, "bfloat16": 2e-2}[precision]
    torch.testing.assert_close(torch.tensor(history.train_loss), torch.tensor(exact.train_loss), rtol=close, atol=0)
    copies = {name: low_copy(parameter) for name, parameter in fleet.stack.named_stacked()}
    for name, parameter in fleet.stack.named_stacked():
        assert parameter.dtype == torch.float32
        if precision == "float32":
            assert copies[name] is None
        else:
            assert torch.equal(copies[name], parameter.bfloat16())
    assert all(p.dtype == torch.float32 for p in fleet.network(0).parameters())


# Networks that stop


def three(middle, networks, **arguments):
    """A fleet of three members, the middle one as given."""
    torch.manual_seed(1)
    data = some_sets()
    outer = [Member(name, name, seed, 0.05, Schedule(3), clip=2.0) for seed, name in enumerate(("one", "two"))]
    return Fleet(networks, [outer[0], middle, outer[1]], data, batch=4, **arguments)


HEALTHY = Member("middle", "three", seed=9, lr=0.05, schedule=Schedule(3))


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("how", ["a huge rate", "weights that are not numbers"])
def test_a_network_that_diverges_stops_and_leaves_the_others_alone(how, precision):
    networks = [tiny(norm=True) for _ in range(3)]
    expected = three(HEALTHY, networks, precision=precision)
    expected.train()
    assert expected.history.stopped == {}
    networks = copy.deepcopy(networks)
    middle = HEALTHY
    if how == "a huge rate":
        middle = dataclasses.replace(HEALTHY, lr=1e6, weight_decay=1.0)
    else:
        networks[1][-1].weight.data[0, 0] = torch.nan
    fleet = three(middle, networks, precision=precision)
    history = fleet.train()
    assert list(history.stopped) == [1]
    for i in (0, 2):
        assert same_bits(fleet.network(i), expected.network(i))
        assert [losses[i] for losses in history.train_loss] == [losses[i] for losses in expected.history.train_loss]
    assert [math.isnan(losses[1]) for losses in history.train_loss] == [e >= history.stopped[1] for e in range(3)]


def test_a_network_that_diverges_is_reported_with_its_epoch_and_left_where_it_was():
    network = nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES))
    members = [dataclasses.replace(HEALTHY, lr=lr, weight_decay=1.0, schedule=Schedule(4)) for lr in (1e12, 1e40, 0.1)]
    data = some_sets()
    fleet = Fleet([network] * 3, members, data, batch=4, precision="float64")
    history = fleet.train()
    epochs = set()
    for i, member in enumerate(members):
        model, _, stopped = plain_training(network, member, data, 4)
        assert history.stopped.get(i) == stopped
        for name, value in fleet.network(i).state_dict().items():
            assert value.isfinite().all()
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-8, atol=0)
        epochs.add(stopped)
    assert len(epochs) == 3, "the three should stop in three epochs, one of them never"


def test_a_network_that_stopped_stays_stopped():
    networks = [tiny() for _ in range(3)]
    networks[1][-1].bias.data[0] = torch.inf
    fleet = three(HEALTHY, networks)
    fleet.train(1)
    before = fleet.network(1)
    fleet.train()
    for name, parameter in fleet.network(1).named_parameters():
        assert torch.equal(parameter, dict(before.named_parameters())[name])
    assert fleet.history.stopped == {1: 0}


def test_a_member_with_a_shorter_schedule_rests():
    data = some_sets()
    members = [Member(f"{n} epochs", "one", seed=n, lr=0.05, schedule=Schedule(n, warmup=3)) for n in (2, 4, 1)]
    networks = [tiny() for _ in members]
    fleet = Fleet(networks, members, data, batch=4, precision="float64")
    assert fleet.epochs == 4
    states = []
    fleet.train(on_epoch=lambda fleet: states.append([fleet.network(i) for i in range(3)]))
    for i, member in enumerate(members):
        end = member.schedule.epochs
        for later in states[end:]:
            for name, value in later[i].named_parameters():
                assert torch.equal(value, dict(states[end - 1][i].named_parameters())[name])
        if end > 1:
            assert worst_difference(states[end - 1][i], states[end - 2][i]) > 1e-4


# Piece by piece


def test_training_in_two_slices_is_training_in_one():
    data = some_sets()
    members = all_different(3)
    networks = [tiny(norm=True) for _ in members]
    whole, sliced = (Fleet(networks, members, data, batch=4, precision="float64") for _ in range(2))
    whole.train(2)
    sliced.train(1)
    sliced.evaluate(data)
    sliced.train(1)
    assert whole.epoch == sliced.epoch == 2
    assert whole.history == sliced.history
    for i in range(3):
        assert same_bits(whole.network(i), sliced.network(i))


def test_training_ends_with_the_longest_schedule():
    called = []
    fleet = Fleet([tiny()], all_different(1), some_sets(), batch=4)
    fleet.train(3, on_epoch=lambda fleet: called.append(fleet.epoch))
    assert fleet.train(100, on_epoch=lambda fleet: called.append(fleet.epoch)) is fleet.history
    assert called == [1, 2, 3, 4, 5]
    fleet.train()
    assert len(fleet.history.train_loss) == fleet.epoch == 5
    assert len(fleet) == 1


# Dropout


def mask_of(seeds, step, p=0.4, shape=(100, 50), layer=0):
    """What is left of ones after the dropout of a stack, ``[E, ...]``."""
    stack = Stack([nn.Sequential(*(nn.Identity() for _ in range(layer)), nn.Dropout(p)) for _ in seeds])
    stack.advance(torch.tensor(seeds), torch.tensor([step]))
    return stack(torch.ones(len(seeds), *shape, dtype=torch.float64))


@pytest.mark.parametrize("p", [0.02, 0.25, 0.5, 0.9])
def test_dropout_drops_the_share_that_it_should_and_scales_the_rest(p):
    left = mask_of(list(range(40)), step=12, p=p)
    kept = left != 0
    torch.testing.assert_close(left[kept], torch.full_like(left[kept], 1 / (1 - p)))
    for part in (kept, kept[3], kept[:, 0], kept[:, :, 0]):
        n = part.numel()
        assert abs(part.sum().item() - n * (1 - p)) < 5 * math.sqrt(n * p * (1 - p))
    assert abs(left.mean().item() - 1) < 5 * math.sqrt(p / (1 - p) / left.numel())


def test_other_seeds_steps_and_layers_draw_masks_that_know_nothing_of_each_other():
    masks = {
        "here": mask_of([7], 3), "seed": mask_of([8], 3), "step": mask_of([7], 4), "layer": mask_of([7], 3, layer=1),
        "far seed": mask_of([7 + 2**32], 3), "far step": mask_of([7], 3 + 2**20),
    }  # fmt: skip
    p, n = 0.4, masks["here"].numel()
    alike = p * p + (1 - p) * (1 - p)
    for first, second in itertools.combinations(masks, 2):
        met = ((masks[first] != 0) == (masks[second] != 0)).sum().item()
        assert abs(met - n * alike) < 5 * math.sqrt(n * alike * (1 - alike)), f"{first} and {second}"


@settings(max_examples=30)
@given(
    seeds=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=5, unique=True),
    others=st.lists(st.integers(0, 2**63 - 1), max_size=5),
    step=st.integers(0, 2**31),
)
def test_a_seed_draws_the_same_mask_wherever_it_stands(seeds, others, step):
    among = mask_of([*others, *reversed(seeds)], step, shape=(5, 31))
    for i, seed in enumerate(seeds):
        assert torch.equal(mask_of([seed], step, shape=(5, 31))[0], among[-1 - i])


def test_the_gradient_goes_through_the_same_mask():
    stack = Stack([nn.Sequential(nn.Dropout(0.3)) for _ in range(2)])
    stack.advance(torch.tensor([1, 2]), torch.tensor([3]))
    x = torch.randn(2, 4, 9, requires_grad=True)
    y = stack(x)
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(x.grad, mask_of([1, 2], 3, p=0.3, shape=(4, 9)).float())
    assert (y == 0).any()
    assert (y != 0).any()


# Evaluation


@pytest.mark.parametrize("batch", [1, 7, 500])
def test_evaluation_is_that_of_the_networks_one_by_one(batch):
    data, test = some_sets(), some_sets(count=23)
    members = all_different(5)
    fleet = Fleet([tiny(norm=True) for _ in members], members, data, batch=4, precision="float64")
    fleet.train(2)
    found = fleet.evaluate(test, batch=batch)
    assert found.predictions.shape == (5, 23)
    for i, member in enumerate(members):
        images, labels = test[member.data]
        model = fleet.network(i)
        assert not model.training
        with torch.no_grad():
            logits = model(images[:, None].double() / 255)
        assert torch.equal(found.predictions[i], logits.argmax(1))
        assert math.isclose(found.errors[i], 100 * (logits.argmax(1) != labels).double().mean(), rel_tol=1e-12)
        assert math.isclose(found.losses[i], F.cross_entropy(logits, labels), rel_tol=1e-12)


def test_evaluation_changes_nothing():
    data = some_sets()
    fleet = Fleet([tiny(norm=True) for _ in range(2)], all_different(2), data, batch=4)
    fleet.train(1)
    before = weights(fleet.stack)
    first = fleet.evaluate(data)
    assert fleet.stack.training
    assert all(torch.equal(value, before[name]) for name, value in fleet.stack.state_dict().items())
    assert torch.equal(fleet.evaluate(data).losses, first.losses)


def test_a_fleet_learns():
    images = torch.zeros(40, 6, 6, dtype=torch.uint8)
    labels = torch.arange(40) % CLASSES
    for i, label in enumerate(labels.tolist()):
        images[i, :, label] = 255
    members = [Member(str(i), "bars", seed=i, lr=0.02 * (i + 1), schedule=Schedule(30)) for i in range(3)]
    networks = [
        nn.Sequential(nn.Flatten(), DCLLinear(36, 16, width=8), nn.Dropout(0.1), nn.Linear(16, CLASSES))
        for _ in members
    ]
    fleet = Fleet(networks, members, {"bars": (images, labels)}, batch=8)
    fleet.train()
    assert fleet.evaluate({"bars": (images, labels)}).errors.tolist() == [0.0, 0.0, 0.0]


# Data


def test_images_under_several_names_are_kept_once_with_their_own_labels():
    images, labels = some_data()
    data = {"one": (images, labels), "two": (images, (labels + 1) % CLASSES), "three": some_data()}
    members = [Member(name, name, seed=3, lr=0.05, schedule=Schedule(2)) for name in ("one", "two", "three", "one")]
    network = tiny()
    fleet = Fleet([network] * 4, members, data, batch=4, precision="float64")
    assert len(fleet.data.images) == 2
    fleet.train()
    for i, member in enumerate(members):
        alone = Fleet([network], [member], data, batch=4, precision="float64")
        alone.train()
        assert worst_difference(fleet.network(i), alone.network(0)) < 1e-12


# Mistakes


def member(**arguments):
    return Member(**{"name": "mine", "data": "one", "seed": 0, "lr": 0.1, "schedule": Schedule(1), **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0.0}, "learning rate of 'mine' must be a positive number, got 0.0"),
        ({"lr": -1.0}, "learning rate of 'mine' must be a positive number"),
        ({"lr": math.inf}, "learning rate of 'mine' must be a positive number, got inf"),
        ({"lr": math.nan}, "learning rate of 'mine' must be a positive number, got nan"),
        ({"weight_decay": -1e-4}, "weight decay of 'mine' must not be negative"),
        ({"weight_decay": math.nan}, "weight decay of 'mine' must not be negative"),
        ({"clip": 0.0}, "clip of 'mine' must be positive, got 0.0"),
        ({"clip": math.nan}, "clip of 'mine' must be positive"),
    ],
)
def test_a_member_with_a_wrong_number_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        member(**arguments)


IMAGES, LABELS = torch.zeros(9, 6, 6, dtype=torch.uint8), torch.zeros(9, dtype=torch.int64)


@pytest.mark.parametrize(
    ("members", "data", "batch", "message"),
    [
        ([member()], {"two": (IMAGES, LABELS)}, 3, "there is no data 'one' for 'mine'; given: 'two'"),
        ([member()], {"one": (IMAGES.float(), LABELS)}, 3, r"'one' must be uint8.*got torch.float32 \[9, 6, 6\]"),
        ([member()], {"one": (IMAGES[0], LABELS)}, 3, r"must be uint8 \[N, H, W\].*\[6, 6\]"),
        ([member()], {"one": (IMAGES, LABELS[:5])}, 3, "'one' has 9 images and 5 labels"),
        ([member()], {"one": (IMAGES, LABELS)}, 10, "batch must be from 1 to 9, the number of images, got 10"),
        ([member()], {"one": (IMAGES, LABELS)}, 0, "batch must be from 1 to 9, the number of images, got 0"),
        ([member(), member()], {"one": (IMAGES, LABELS)}, 3, "a member for each network, got 1 and 2"),
        ([], {"one": (IMAGES, LABELS)}, 3, "a member for each network, got 1 and 0"),
    ],
)
def test_what_does_not_fit_together_is_named(members, data, batch, message):
    with pytest.raises(ValueError, match=message):
        Fleet([tiny()], members, data, batch=batch)


def test_a_fleet_of_none_is_refused():
    with pytest.raises(ValueError, match="at least one network"):
        Fleet([], [], {})


@pytest.mark.parametrize("other", [IMAGES[:8], IMAGES[:, :5], IMAGES[:, None]])
def test_data_of_two_sizes_are_refused(other):
    data = {"one": (IMAGES, LABELS), "two": (other, LABELS[: len(other)])}
    with pytest.raises(ValueError, match=r"all data of a fleet must have one size.*use one fleet for each size"):
        Fleet([tiny(), tiny()], [member(), member(data="two")], data, batch=3)


def test_networks_of_two_architectures_are_refused():
    with pytest.raises(ValueError, match="network 1 of the stack has another architecture"):
        Fleet([tiny(), tiny(norm=True)], [member(), member()], {"one": (IMAGES, LABELS)}, batch=3)


@pytest.mark.parametrize("stacked", [True, False])
def test_a_fleet_of_frozen_networks_evaluates_and_says_why_it_does_not_train(stacked):
    networks = [tiny().requires_grad_(False) for _ in range(2)]
    fleet = Fleet(networks, [member(), member()], {"one": (IMAGES, LABELS)}, batch=3, stacked=stacked)
    assert fleet.evaluate({"one": (IMAGES, LABELS)}).errors.shape == (2,)
    with pytest.raises(ValueError, match=r"every parameter of the networks is frozen.* call requires_grad_\(\)"):
        fleet.train()


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_parameter_frozen_in_one_network_of_two_is_named(frozen):
    networks = [tiny(), tiny()]
    name, parameter = list(networks[frozen].named_parameters())[-1]
    parameter.requires_grad_(False)
    names = ["first", "second"]
    told = f"'{name}' is frozen in the network of '{names[frozen]}' and not in that of '{names[1 - frozen]}'"
    with pytest.raises(ValueError, match=told):
        Fleet(networks, [member(name=name) for name in names], {"one": (IMAGES, LABELS)}, batch=3)


def test_what_is_no_network_that_learns_is_named():
    with pytest.raises(ValueError, match="the network of 'mine' has no parameters"):
        Fleet([nn.Flatten()], [member()], {"one": (IMAGES, LABELS)}, batch=3)
    with pytest.raises(TypeError, match="the network of 'mine' must be a torch module, got function"):
        Fleet([tiny], [member()], {"one": (IMAGES, LABELS)}, batch=3)


def test_a_stochastic_layer_that_a_fleet_cannot_train_is_named():
    network = nn.Sequential(nn.Flatten(), DCLLinear(36, 4, branches=3, width=(1, 2, 3), strategy="stochastic"))
    with pytest.raises(TypeError, match=r"layer '1'.*branches of one width"):
        Fleet([network], [member()], {"one": (IMAGES, LABELS)}, batch=3)
