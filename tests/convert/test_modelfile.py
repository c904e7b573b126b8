"""What a person expects of a file whose description was changed and sealed again: a plain refusal, nothing else."""

import copy
import hashlib
import json
import math
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from tests.convert.test_checkpoint import contents, converted, network, paths_into, put
from torch import nn
from torchvision.models.resnet import BasicBlock

import torch_dcl as dcl
from torch_dcl.convert import CheckpointError, Choice, Comparison, Timing

OTHERS = [None, True, 7, 0.5, "x", [], {}]
"""One value of every kind that JSON has."""


def kind(value):
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return "number" if number else type(value).__name__


class Sealer:
    """Writes files with other descriptions of the same tensors, under the SHA-256 that belongs to them."""

    def __init__(self, model, folder):
        dcl.save_model(model, folder / "model.safetensors")
        self.path = folder / "sealed.safetensors"
        self.tensors, self.content = contents(folder / "model.safetensors")
        self.bytes = b""
        for name, tensor in sorted(self.tensors.items()):
            self.bytes += json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode()
            self.bytes += tensor.reshape(-1).view(torch.uint8).numpy().tobytes()

    def write(self, content):
        content = {key: value for key, value in content.items() if key != "sha256"}
        content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode() + self.bytes).hexdigest()
        safetensors.torch.save_file(self.tensors, self.path, metadata={"torch_dcl": json.dumps(content)})
        return self.path

    def places(self):
        return [place for place in paths_into(self.content) if place != ("sha256",)]


def value_at(content, place):
    for key in place:
        content = content[key]
    return content


def without(content, place):
    content = copy.deepcopy(content)
    del value_at(content, place[:-1])[place[-1]]
    return content


class Tied(nn.Module):
    """A unit in two places, with its batch norm, and two weights that are one."""

    def __init__(self):
        super().__init__()
        self.unit = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU())
        self.again, self.head, self.tail = self.unit, nn.Linear(12, 12, bias=False), nn.Linear(12, 12)
        self.head.weight = self.tail.weight

    def forward(self, x):
        return self.tail(self.head(self.again(self.unit(x))))


def by_hand():
    """Layers with parts that no plain network has."""
    conv = dcl.DCLConv2d(3, 6, 3, width=2, padding="same", branch_activation=lambda: nn.LeakyReLU(0.2))
    return nn.Sequential(conv, dcl.DCLConv2d(6, 6, 1, width=2, norm_layer=lambda n: nn.GroupNorm(2, n)))


def residual_block():
    """One ReLU behind a convolution and behind the sum."""
    return BasicBlock(3, 3)


MODELS = {
    "stochastic": (lambda: converted(branches=3, strategy="stochastic"), network),
    "tied": (lambda: converted(Tied(), size=(12,)), Tied),
    "by hand": (by_hand, by_hand),
    "shared ReLU": (lambda: converted(residual_block(), width=2), residual_block),
}


@pytest.fixture(params=MODELS)
def sealer(request, tmp_path):
    make, into = MODELS[request.param]
    sealer = Sealer(make(), tmp_path)
    sealer.into = into
    assert refusal(sealer, sealer.content) is None
    return sealer


def refusal(sealer, content):
    """The message of the refusal, after which the network is as it was; None if the file was taken."""
    path, mine = sealer.write(content), sealer.into()
    modules, tensors = list(mine.modules()), [(tensor, tensor.clone()) for tensor in mine.state_dict().values()]
    try:
        dcl.load_model(mine, path)
    except CheckpointError as error:
        message = str(error)
    else:
        return None
    assert path.name in message
    assert all(a is b for a, b in zip(mine.modules(), modules, strict=True))
    assert all(torch.equal(a, b) for a, b in tensors)
    return message


def is_free(content, place):
    """Whether a key is a setting of a norm or activation that torch-dcl knows nothing of."""
    part = value_at(content, place[:-1])
    inside = len(place) == 4 and place[2] in ("activation", "norm")
    return inside and place[-1] != "type" and not part["type"].startswith("BatchNorm")


def test_a_description_without_any_one_of_its_keys_is_refused(sealer):
    for place in sealer.places():
        message = refusal(sealer, without(sealer.content, place))
        if isinstance(place[-1], str) and not is_free(sealer.content, place):
            assert message is not None, place


def test_a_value_of_another_kind_anywhere_in_a_description_is_refused(sealer):
    free = {("momentum", "NoneType")}  # a batch norm may have none
    for place in sealer.places():
        for other in OTHERS:
            if kind(other) != kind(value_at(sealer.content, place)) and (place[-1], kind(other)) not in free:
                assert refusal(sealer, put(sealer.content, place, other)) is not None, (place, other)


def test_a_refusal_names_what_is_missing_or_of_another_kind(tmp_path):
    sealer = Sealer(converted(), tmp_path)
    sealer.into = network
    layer = next(i for i, entry in enumerate(sealer.content["layers"]) if entry["norm"] is not None)
    wanted = {
        ("layers", layer, "norm"): f"'layers.{layer}.norm'",
        ("layers", layer, "norm", "eps"): f"'layers.{layer}.norm'",
        ("layers", 0, "stage1", "stride"): "'layers.0.stage1'",
        ("relus",): "'relus'",
    }
    for place, name in wanted.items():
        message = refusal(sealer, without(sealer.content, place))
        assert f"{name} in its description is missing or of another kind" in message
    tie = refusal(sealer, {**sealer.content, "shared": {"fc2.bias": "fc2.weight"}})
    assert "'shared.fc2.bias' in its description" in tie


def test_a_description_of_any_depth_is_refused(tmp_path):
    """Python gives up at some depth, in reading or in hashing; which, depends on its version and on the caller."""
    dcl.save_model(nn.Linear(2, 2), tmp_path / "m.safetensors")
    tensors, content = contents(tmp_path / "m.safetensors")
    for depth in [*range(800, 1000), 5_000, 20_000, 100_000]:
        nested = "[" * depth + "]" * depth
        text = json.dumps(content)[:-1] + f', "more": {nested}}}'
        safetensors.torch.save_file(tensors, tmp_path / "deep.safetensors", metadata={"torch_dcl": text})
        with pytest.raises(CheckpointError, match=r"was altered|was not written by save_model"):
            dcl.load_model(nn.Linear(2, 2), tmp_path / "deep.safetensors")


def test_a_plan_of_any_depth_is_refused():
    for depth in (1_000, 100_000):
        with pytest.raises(ValueError, match="not a plan"):
            dcl.Plan.from_json("[" * depth + "]" * depth)


def planned():
    """A network and a plan that says all that a plan can say."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(1152, 10))
    times = {"plain": Timing(1.0, 2.0), "dcl": Timing(0.5, None), "low_rank": Timing(0.5, 1.0)}
    plan = dcl.plan(model, (3, 8, 8))
    rows = tuple(replace(row, timings=times, comparison=Comparison(1.0, 0.5, 0.1)) for row in plan.rows)
    choice = Choice("compile", "infer", Comparison(2.0, 1.0, 0.1))
    return model, replace(plan, rows=rows, timings=times, device="a GPU", choice=choice)


def test_a_plan_that_says_all_comes_back():
    _, plan = planned()
    assert dcl.Plan.from_json(plan.to_json()) == plan


def test_a_plan_with_any_one_value_of_another_kind_is_refused_or_can_be_used():
    model, plan = planned()
    data = json.loads(plan.to_json())
    refusals = 0
    for place in paths_into(data):
        for value in [*OTHERS, 0, -1, [1], ["x"], [[1]], math.nan, 10**400]:
            altered = copy.deepcopy(data)
            value_at(altered, place[:-1])[place[-1]] = value
            try:
                read = dcl.Plan.from_json(json.dumps(altered))
                str(read), read.to_json(), read.only("0")
                dcl.convert_(copy.deepcopy(model), read, init="random")
            except ValueError:
                refusals += 1
    assert refusals > 500


def test_a_refused_plan_names_what_is_of_another_kind():
    data = json.loads(planned()[1].to_json())
    data["rows"][1]["widths"] = ["a"]
    with pytest.raises(ValueError, match=r"not a plan: 'rows.1.widths' is missing or of another kind"):
        dcl.Plan.from_json(json.dumps(data))
