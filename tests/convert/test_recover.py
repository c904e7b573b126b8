"""Recovery: a converted network learns the outputs of the plain one, and stops, restores and refuses as it says."""

import copy
import functools
import math
from dataclasses import dataclass
from types import FunctionType
from typing import NamedTuple

import pytest
import torch
from torch import distributed, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

import torch_dcl as dcl
from torch_dcl.convert import Recovery
from torch_dcl.data import Batches


class Small(nn.Module):
    """A convolution with a batch norm, one that shares an in-place ReLU with it, and two linear layers."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.relu = nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(inplace=True)
        self.fc1, self.drop, self.fc2 = nn.Linear(32 * 16, 64), nn.Dropout(0.5), nn.Linear(64, 10)

    def features(self, x):
        return F.max_pool2d(self.relu(self.conv2(self.relu(self.bn1(self.conv1(x))))), 2)

    def forward(self, x):
        return self.fc2(self.drop(F.relu(self.fc1(self.features(x).flatten(1)))))


class Checkpointed(Small):
    def features(self, x):
        return checkpoint(super().features, x, use_reentrant=False)


@dataclass
class Answer:
    logits: torch.Tensor
    classes: torch.Tensor


class Answering(Small):
    """An output that torch does not know as a container, and an input by name."""

    def forward(self, *, image):
        logits = super().forward(image)
        return {"answer": Answer(logits, logits.argmax(1))}


UNITS = ("conv1", "conv2", "fc1")
PLACES = {"conv1": "bn1", "conv2": "conv2", "fc1": "fc1"}  # what comes before the ReLU in the teacher


def images(count, seed=0):
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def taught(kind=Small, units=UNITS):
    """A teacher with running statistics of its own, and a converted network that starts near it."""
    return copy.deepcopy(fitted(kind, units))


@functools.cache
def fitted(kind, units):
    torch.manual_seed(0)
    teacher = kind()
    with torch.no_grad():
        for _ in range(20):
            Small.forward(teacher, images(64))
    teacher.eval()
    model = copy.deepcopy(teacher)
    plan = dcl.plan(model, example={"image": images(2)} if kind is Answering else images(2), ratio=0.5)
    dcl.convert_(model, plan.only(*units), init="fit", progress=False)
    return model, teacher


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal_states(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def with_batch_statistics(model):
    """A copy of the network in eval mode, but for the batch norm of a DCL layer."""
    model = copy.deepcopy(model).eval()
    if isinstance(model.conv1, dcl.DCLConv2d):
        model.conv1.fusion.norm.train()
    return model


@torch.no_grad()
def distance(model, teacher, x):
    """‖output − teacher's‖² / ‖teacher's‖², in float64."""
    found, wanted = model.double()(x.double()), copy.deepcopy(teacher).double().eval()(x.double())
    return float((found - wanted).square().sum() / wanted.square().sum())


def recover(model, teacher, batches=None, **settings):
    settings = {"epochs": 2, "progress": False, **settings}
    return dcl.recover_(
        model, teacher, [images(32, seed) for seed in range(3)] if batches is None else batches, **settings
    )


def test_the_outputs_come_nearer_to_the_teachers_on_images_that_were_not_seen():
    model, teacher = taught()
    before, other = distance(copy.deepcopy(model).eval(), teacher, images(256, 99)), state(teacher)
    done = recover(model, teacher, [images(64, seed) for seed in range(8)], epochs=12)
    after = distance(model.eval(), teacher, images(256, 99))
    assert after < 0.8 * before
    assert done.errors[-1] < 0.8 * done.errors[0]
    assert_equal_states(state(teacher), other)
    assert not any(module._forward_hooks for network in (model, teacher) for module in network.modules())


def test_the_error_of_an_epoch_is_the_mean_over_its_batches_before_their_steps():
    model, teacher = taught()
    expected = [distance(with_batch_statistics(model), teacher, images(16, seed)) for seed in (0, 1)]
    done = recover(copy.deepcopy(model), teacher.train(), [images(16, 0)], epochs=1)
    assert done.errors == pytest.approx(expected[:1], rel=1e-4)
    slow = recover(model, teacher, [images(16, 0), images(16, 1)], epochs=1, lr=1e-12)
    assert slow.errors == pytest.approx([sum(expected) / 2], rel=1e-4)


def first_gradients(model, teacher, x):
    """What the first step of a recovery sees, and its learning rate."""
    seen = []

    def look(optimizer, *_):
        (group,) = optimizer.param_groups
        seen.append(([p.grad.clone() for p in group["params"]], group["lr"]))

    handle = register_optimizer_step_post_hook(look)
    try:
        recover(model, teacher, [x], epochs=1, lr=1e-12)
    finally:
        handle.remove()
    return seen[0]


@torch.no_grad()
def rectified(teacher, x):
    """The outputs of the teacher's ReLUs, by a forward of its own."""
    a = F.relu(teacher.bn1(teacher.conv1(x)))
    b = F.relu(teacher.conv2(a))
    return {"conv1": a, "conv2": b, "fc1": F.relu(teacher.fc1(F.max_pool2d(b, 2).flatten(1)))}


@pytest.mark.parametrize(("kind", "units"), [(Small, UNITS), (Checkpointed, UNITS), (Small, UNITS[1:])])
def test_the_loss_is_the_error_of_the_outputs_plus_the_mean_error_of_the_layers(kind, units):
    model, teacher = taught(kind)
    if "conv1" not in units:
        model.bn1.layers = ()  # as files of earlier versions are loaded: the place of the norm is not known
    x = images(8, 5)
    found, rate = first_gradients(copy.deepcopy(model), teacher, x)
    model = with_batch_statistics(model)
    wanted, z = rectified(teacher, x), {}
    z["conv1"] = model.conv1(x)
    z["conv2"] = model.conv2(z["conv1"])
    z["fc1"] = model.fc1(F.max_pool2d(z["conv2"], 2).flatten(1))
    output, goal = model.fc2(z["fc1"]), teacher(x)
    errors = [(z[unit] - wanted[unit]).square().sum() / wanted[unit].square().sum() for unit in units]
    loss = (output - goal).square().sum() / goal.square().sum() + sum(errors) / len(units)
    expected = torch.autograd.grad(loss, list(model.parameters()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    assert loss < 1
    assert rate == pytest.approx(1e-12 * loss.sqrt().item() * 0.5 / 0.9, rel=1e-4)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(12, 12)

    def forward(self, x):
        return F.relu(self.fc(F.relu(self.fc(x))))


def test_a_layer_that_is_called_twice_is_compared_call_by_call():
    torch.manual_seed(0)
    model, teacher, x = Twice(), Twice(), torch.randn(8, 12)
    model.fc = dcl.DCLLinear(12, 12)
    found, rate = first_gradients(copy.deepcopy(model), teacher, x)
    pairs = [(model.fc(x), F.relu(teacher.fc(x))), (model(x), teacher(x))]
    errors = [(z - a.detach()).square().sum() / a.detach().square().sum() for z, a in pairs]
    loss = errors[1] + sum(errors) / 2
    torch.testing.assert_close(found, list(torch.autograd.grad(loss, list(model.parameters()))))
    assert loss > 1
    assert rate == pytest.approx(1e-12 * 0.5 / 0.9)  # at most lr


def test_sentences_without_padding_are_compared_word_by_word():
    torch.manual_seed(0)
    model, teacher, words = Twice(), Twice(), torch.randn(8, 12)
    model.fc = dcl.DCLLinear(12, 12)
    jagged = torch.nested.nested_tensor_from_jagged(words, torch.tensor([0, 3, 8]))
    errors = [recover(copy.deepcopy(model), teacher, [x]).errors for x in (words, jagged)]
    assert errors[1] == pytest.approx(errors[0], rel=1e-4)


def test_a_network_from_a_file_is_compared_in_the_same_places(tmp_path):
    model, teacher = taught()
    dcl.save_model(model, tmp_path / "model.safetensors")
    loaded = dcl.load_model(Small, tmp_path / "model.safetensors").eval()
    for a, b in zip(*(first_gradients(network, teacher, images(8))[0] for network in (loaded, model)), strict=True):
        torch.testing.assert_close(a, b)


def test_the_learning_rate_rises_for_a_tenth_of_the_training_and_falls_to_zero():
    model, teacher = taught(units=("fc1",))
    rates = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    try:
        recover(model, teacher, [images(4)] * 10, epochs=2, lr=0.018)
        recover(model, teacher, Numbered(), epochs=2, lr=0.018)  # its length is not known: the middle of each epoch
        recover(model, teacher, Understated(), epochs=1, lr=0.018)
    finally:
        handle.remove()
    assert [rate / rates[0] for rate in rates[:20]] == pytest.approx([1, 3, *(i / 9 for i in range(35, 0, -2))])
    assert rates[20] / rates[21] == pytest.approx(3)
    assert rates[23:] == [0.0, 0.0]


class Understated(list):
    """Three batches, of which the length tells one."""

    def __len__(self):
        return 1

    def __iter__(self):
        return (images(4, seed) for seed in range(3))


class Numbered:
    """Batches that differ from epoch to epoch."""

    def __init__(self):
        self.asked = []

    def __iter__(self):
        return self.epoch(0)

    def epoch(self, number):
        self.asked.append(number)
        yield images(4, number)


def test_batches_with_epochs_are_asked_for_the_next_one_each_time():
    batches = Numbered()
    recover(*taught(units=("fc1",)), batches, epochs=3)
    assert batches.asked == [0, 1, 2]
    labels = torch.arange(20) % 10
    pictures = torch.randint(0, 256, (20, 3, 8, 8), dtype=torch.uint8)
    assert len(recover(*taught(units=("fc1",)), Batches(pictures, labels, 10, flip=True)).errors) == 2


def test_batch_norms_dropout_flags_and_what_is_frozen_stay_as_they_are():
    model, teacher = taught()
    model.train()
    model.fc2.requires_grad_(False)
    model.bn1.requires_grad_(False)
    teacher.drop.train()
    before, flags = state(model), [module.training for module in model.modules()]
    recover(model, teacher)
    after = state(model)
    same = {name for name in before if torch.equal(before[name], after[name])}
    norm = {
        f"conv1.fusion.norm.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    extra = {f"{unit}.fusion._extra_state" for unit in UNITS}
    assert same - extra == norm | {"fc2.weight", "fc2.bias"}
    assert [module.training for module in model.modules()] == flags
    assert teacher.drop.training
    assert not teacher.training
    assert all(p.grad is None for p in model.parameters())


def test_the_batch_norm_of_a_dcl_layer_learns_the_statistics_of_the_batches():
    model, teacher = taught()
    x = images(64)
    with torch.no_grad():
        y = model.conv1.branch(x).split(model.conv1.widths, 1)
        pre = torch.cat(
            [
                torch.einsum("nmhw,mk->nkhw", *pair)
                for pair in zip(y, model.conv1.fusion.weight.split(model.conv1.widths), strict=True)
            ],
            1,
        )
    recover(model, teacher, [x] * 60, epochs=1, lr=1e-12)
    norm = model.conv1.fusion.norm
    torch.testing.assert_close(norm.running_mean, pre.mean((0, 2, 3)), rtol=0.02, atol=0.01)
    torch.testing.assert_close(norm.running_var, pre.var((0, 2, 3)), rtol=0.02, atol=0.01)


@pytest.mark.parametrize("affine", [False, True])
def test_a_norm_adapts_without_parameters_or_with_some_that_are_frozen(affine):
    model, teacher = taught(units=("conv1",))
    norm = model.conv1.fusion.norm
    if affine:
        norm.weight.requires_grad_(False)
    else:
        norm.affine, norm.weight, norm.bias = False, None, None
    mean = norm.running_mean.clone()
    recover(model, teacher, [images(4)], epochs=1)
    assert not torch.equal(norm.running_mean, mean)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_recurrent_layers_train_where_that_drops_nothing(dropout):
    """On a GPU torch cannot differentiate them in eval mode."""
    model, teacher = taught(units=("fc1",))
    seen = []
    for network in (model, teacher):
        network.drop = nn.Identity()
        network.fc2 = nn.RNN(64, 10, 2, dropout=dropout)
        network.fc2.register_forward_hook(lambda rnn, *_: seen.append(rnn.training))
    recover(model.eval(), teacher, [images(4)], epochs=1)
    assert seen == [False, not dropout]
    assert not model.fc2.training


def test_a_batch_norm_of_its_own_keeps_its_statistics():
    model, teacher = taught(units=("fc1",))
    mean, variance = model.bn1.running_mean.clone(), model.bn1.running_var.clone()
    recover(model, teacher)
    assert torch.equal(model.bn1.running_mean, mean)
    assert torch.equal(model.bn1.running_var, variance)


def scored(teacher, *values):
    """A function that gives the teacher 10, and the network these scores one after the other."""
    rest = iter(values)
    return lambda network: 10.0 if network is teacher else next(rest)


def test_it_stops_as_soon_as_the_score_has_recovered():
    model, teacher = taught(units=("fc1",))
    done = recover(model, teacher, held_out=scored(teacher, 5.0, 7.0, 9.5), max_drop=0.5, epochs=9)
    assert (done.scores, done.teacher, len(done.errors)) == ((5.0, 7.0, 9.5), 10.0, 2)
    assert (done.drop, done.is_recovered) == (0.5, True)


def test_nothing_is_trained_where_nothing_was_lost():
    model, teacher = taught(units=("fc1",))
    before = state(model)
    done = recover(model, teacher, held_out=scored(teacher, 9.75), max_drop=0.5)
    assert (done.errors, done.drop, done.is_recovered) == ((), 0.25, True)
    assert_equal_states(state(model), before)


def test_the_score_is_the_percentage_of_correct_classes_in_eval_mode():
    model, teacher = taught()
    model.train()
    held_out = [(images(7, seed), torch.arange(7) % 10) for seed in (11, 12)]
    expected = []
    for network in (teacher, model):
        judged = copy.deepcopy(network).eval()
        expected.append(100 * sum(int((judged(x).argmax(1) == t).sum()) for x, t in held_out) / 14)
    done = recover(model, teacher, held_out=held_out)
    assert [done.teacher, done.scores[0]] == pytest.approx(expected)
    assert done.is_recovered is None
    assert len(done.scores) == 3
    done = recover(model, teacher, held_out=lambda n: torch.is_grad_enabled() or any(m.training for m in n.modules()))
    assert (done.teacher, done.scores) == (0, (0, 0, 0))


def test_labels_that_are_no_class_do_not_count():
    model, teacher = taught(units=("fc1",))
    right = teacher(images(8)).argmax(1)
    labels = torch.where(torch.arange(8) < 4, right, torch.tensor([-100, 255]).repeat(4))
    labels[0] = (right[0] + 1) % 10
    assert recover(model, teacher, held_out=[(images(8), labels)], max_drop=100).teacher == 75


def test_any_output_and_inputs_by_name():
    model, teacher = taught(Answering)
    done = recover(model, teacher, {"image": images(16)}, epochs=30)
    assert done.errors[-1] < 0.5 * done.errors[0]


def test_autocast_is_that_of_the_caller():
    model, teacher = taught()
    seen = set()
    model.fc2.register_forward_hook(lambda *call: seen.add(call[-1].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        done = recover(model, teacher, epochs=8)
    assert seen == {torch.bfloat16}
    assert done.errors[-1] < done.errors[0]
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_networks_of_several_processes_are_refused(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, teacher = taught(units=("fc1",))
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(TypeError, match="in one of them, before it is wrapped in DistributedDataParallel"):
            recover(nn.parallel.DistributedDataParallel(model), teacher)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match=r"'conv1.weight' is sharded.* recover before fully_shard"):
            recover(model, teacher)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_it_trains_where_the_caller_has_disabled_gradients(context):
    (model, teacher), x = taught(), [images(8)]
    other = copy.deepcopy(model)
    recover(other, teacher, x)
    with context():
        recover(model, teacher, images(8))  # one tensor is one batch
    assert_equal_states(state(model), state(other))
    assert not any(p.is_inference() for p in (*model.parameters(), *model.buffers()))


def test_a_compiled_network_is_trained_as_the_network_inside():
    model, teacher = taught()
    other = copy.deepcopy(model)
    recover(other, teacher)
    model.eval().fc1.compile(backend="eager")
    model(images(32))
    recover(torch.compile(model, backend="eager"), torch.compile(teacher, backend="eager"))
    assert_equal_states(state(model), state(other))


@pytest.mark.parametrize("scores", [(5.0, math.nan), (5.0, 6.0, "no number")])
def test_after_an_error_the_network_is_as_it_was(scores):
    model, teacher = taught()
    model(images(4)).sum().backward()
    before, gradients = state(model), [p.grad.clone() for p in model.parameters()]
    with pytest.raises((ValueError, TypeError)):
        recover(model, teacher, held_out=scored(teacher, *scores))
    assert_equal_states(state(model), before)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), gradients, strict=True))


def test_a_loss_that_is_not_finite_ends_it_with_the_remedy():
    model, teacher = taught(units=("fc1",))
    before = state(model)
    with pytest.raises(ValueError, match=r"not finite in epoch 1; check the batches, or lower lr = 0\.01"):
        recover(model, teacher, [images(4), images(4) * math.inf])
    assert_equal_states(state(model), before)


def test_after_an_interruption_it_has_what_it_learned_so_far():
    model, teacher = taught(units=("fc1",))
    other, x = copy.deepcopy(model), [images(16)]
    recover(other, teacher, x, epochs=1)
    calls = iter([10.0, 5.0])

    def score(network):
        value = next(calls, None)
        if value is None:
            raise KeyboardInterrupt
        return value

    with pytest.raises(KeyboardInterrupt):
        recover(model, teacher, x, held_out=score, epochs=1)
    assert_equal_states(state(model), state(other))
    assert all(p.grad is None for p in model.parameters())


class Masked(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network(x).masked_fill(torch.arange(10) > 6, -math.inf)


def test_masked_scores_are_refused_before_the_first_step():
    model, teacher = taught(units=("fc1",))
    with pytest.raises(ValueError, match=r"return inf or NaN, as masked scores do.* Wrap both"):
        recover(Masked(model), Masked(teacher))


def test_a_layer_that_is_dead_in_the_teacher_does_not_count():
    model, teacher = taught()
    with torch.no_grad():
        teacher.fc1.bias.fill_(-1000)
    done = recover(model, teacher, [images(8)] * 4, epochs=4)
    assert done.errors[-1] < done.errors[0]


def test_a_last_step_that_spoils_a_weight_is_undone():
    model, teacher = taught(units=("fc1",))
    before = state(model)
    model.fc2.bias.register_hook(lambda grad: grad * math.nan)
    with pytest.raises(ValueError, match="weights are not finite in epoch 1"):
        recover(model, teacher, [images(4)], epochs=1)
    assert_equal_states(state(model), before)


class Given(NamedTuple):
    model: nn.Module
    teacher: nn.Module


def a_refusal(**changes):
    given = Given(*taught(units=("fc1",)))
    arguments = {**given._asdict(), "batches": [images(4)], "progress": False}
    arguments |= {name: value(given) if isinstance(value, FunctionType) else value for name, value in changes.items()}
    return dcl.recover_(**arguments)


LABELLED = [(images(4), torch.zeros(4, dtype=torch.int64))]
MODEL, TEACHER = (lambda given: given.model), (lambda given: given.teacher)
REFUSED = {
    "swapped": ({"model": TEACHER, "teacher": MODEL}, "the converted network comes first"),
    "not converted": ({"model": lambda given: copy.deepcopy(given.teacher)}, "no DCL layer; convert it first"),
    "the same": ({"teacher": MODEL}, "shares 'conv1.weight' with the network"),
    "a shallow copy": ({"teacher": lambda given: copy.copy(given.model)}, "shares 'conv1.weight' with the network"),
    "a late copy": ({"teacher": lambda given: copy.deepcopy(given.model)}, "the teacher is converted, too: it must be"),
    "another teacher": ({"teacher": nn.Linear(2, 2)}, "has no 'fc1', so it is not the network before"),
    "no network": ({"model": 3}, "recover_ takes a network, an nn.Module, first"),
    "no teacher": ({"teacher": None}, "the teacher is the network before its conversion"),
    "frozen": ({"model": lambda given: given.model.requires_grad_(False)}, "no parameter of the network requires a"),
    "half precision": ({"model": lambda given: given.model.bfloat16()}, "loses small steps; train model.float()"),
    "a generator": ({"batches": iter([images(4)])}, "batches can be iterated over only once"),
    "no batch": ({"batches": []}, "batches hold no batch"),
    "no batches": ({"batches": 4}, "batches must be a list of batches or a loader, got 4"),
    "a batch of another size": ({"batches": [torch.randn(4, 1, 8, 8)]}, "expected input"),
    "a generator to judge by": ({"held_out": iter(LABELLED)}, "held_out can be iterated over only once"),
    "nothing to judge by": ({"max_drop": 0.5}, "max_drop is a difference of scores; pass held_out"),
    "no labels": ({"held_out": [images(4)]}, "held_out must hold batches of inputs and labels"),
    "labels of another size": ({"held_out": [(images(4), torch.zeros(3, dtype=torch.int64))]}, "held_out must hold"),
    "empty": ({"held_out": []}, "held_out holds no labels"),
    "a negative drop": ({"held_out": LABELLED, "max_drop": -1}, "max_drop must be a number of at least 0"),
    "no epochs": ({"epochs": 0}, "epochs must be a whole number of at least 1, got 0"),
    "no rate": ({"lr": 0}, "lr must be a number above 0 and at most 1, got 0"),
    "no switch": ({"progress": 1}, "progress must be True, False or None, got 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_argument_is_named_with_the_remedy(case):
    changes, message = REFUSED[case]
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        a_refusal(**changes)


def test_a_copy_made_after_the_conversion_is_refused_with_absorbed_norms_too():
    model, _ = taught(units=("conv1",))
    with pytest.raises(ValueError, match="the teacher is converted, too"):
        recover(model, copy.deepcopy(model))


def test_a_second_conversion_may_be_taught_by_the_first():
    half, _ = taught(units=("fc1",))
    model = copy.deepcopy(half)
    dcl.convert_(model, dcl.plan(half, (3, 8, 8), ratio=0.5).only("conv2"), init="fit", progress=False)
    x = images(16, 7)
    before = distance(copy.deepcopy(model).eval(), half, x)
    assert recover(model, half, [x], epochs=8).errors[-1] < before


def test_outputs_of_other_shapes_are_named():
    model, teacher = taught(units=("fc1",))
    teacher.fc2 = nn.Linear(64, 11)
    with pytest.raises(
        ValueError, match=r"returns tensors of \[\(4, 10\)\], the teacher of \[\(4, 11\)\] \(batch 1 of epoch 1\)"
    ):
        recover(model, teacher, [images(4)])


class Judged(nn.Module):
    """What a detector does in eval mode: only some of the numbers are returned."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        logits = self.network(x)
        return {"scores": logits[logits > 1e6], "labels": logits.argmax(1)}


def test_outputs_without_numbers_are_refused():
    model, teacher = taught(units=("fc1",))
    with pytest.raises(ValueError, match=r"tensors of \[\(0,\)\], the teacher of \[\(0,\)\] .* Wrap both in modules"):
        recover(Judged(model), Judged(teacher), [images(4)])


def test_it_prints_a_line_an_epoch_and_a_verdict():
    text = str(Recovery((0.25, 0.125), (70.0, 80.0, 81.25), 82.0, 0.5))
    assert text.splitlines() == [
        "         output error  score   drop",
        "───────────────────────────────────",
        "before                 70.00  12.00",
        "epoch 1        0.2500  80.00   2.00",
        "epoch 2        0.1250  81.25   0.75",
        "output error: ‖output − teacher's‖² / ‖teacher's‖², before each step, on average over an epoch.",
        "The teacher's score is 82.00. A drop of at most 0.5 was not reached.",
    ]
    assert "epoch 1        0.2500  0.6250  0.1250" in str(Recovery((0.25,), (0.5, 0.625), 0.75, None))
    assert str(Recovery((0.25,), (), None, None)).splitlines()[2:3] == ["epoch 1        0.2500"]
