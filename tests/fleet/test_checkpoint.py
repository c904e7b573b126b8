"""Checkpoints of a fleet that were sealed again with other content: a hash that is right does not make them right."""

import copy
import json
import math

import pytest
import torch
from tests.fleet.test_stopping import KEY, STEPS, after, make_fleet, weights

from torch_dcl.files import SealedError, read_sealed, write_sealed
from torch_dcl.fleet import checkpoint

VALUES = [
    None, True, False, -1, 0, 1, 10**30, 1.5, math.inf, math.nan, "", "x", "1", "²", [], [1], [None], [1.5] * 4, {},
    {"0": 0}, {"7": 0}, {"a": None}, [[]], [[1.0]],
]  # fmt: skip
MISSING = object()


def paths_of(value, at=()):
    """The way to every value inside of plain data."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield (*at, key)
        yield from paths_of(inner, (*at, key))


def mutated(about, path, value):
    changed = copy.deepcopy(about)
    place = changed
    for key in path[:-1]:
        place = place[key]
    if value is MISSING:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return changed


def mutations_of(about):
    """Every key without its value, and with every other value of `VALUES`."""
    for path in paths_of(about):
        for value in (MISSING, *VALUES):
            changed = mutated(about, path, value)
            if json.dumps(changed) != json.dumps(about):
                yield path, value, changed


def is_plausible(path, value):
    """Whether another run could have written this: other losses, another step, anything that a caller adds."""
    if path[0] in ("loss", "train_loss"):
        return isinstance(value, float) and math.isfinite(value)
    if path[0] == "extra":
        return len(path) > 1 or isinstance(value, dict)
    return path == ("step",) and value == 1 and not isinstance(value, bool)


def refusal_of(fleet, monkeypatch, tensors, about):
    """Why a checkpoint is refused; empty where it is not."""
    monkeypatch.setattr(checkpoint, "read_sealed", lambda *_: (tensors, about))
    try:
        fleet.load("fleet.safetensors")
    except (SealedError, ValueError) as error:
        return str(error)
    return ""


@pytest.fixture(params=["between epochs", "inside of one", "one stopped", "one stopping"])
def saved(request, tmp_path):
    """Tensors and description of a checkpoint."""
    fleet = make_fleet()
    if request.param == "one stopped":
        fleet._parameters["1.weight"].data[1, 0] = math.nan
    fleet.train(1)
    if request.param == "one stopping":
        fleet._parameters["1.weight"].data[1, 0] = math.nan
    if request.param != "between epochs":
        fleet.train(should_stop=after(2))
    fleet.save(tmp_path / "fleet.safetensors", {"seconds": 1.5})
    return read_sealed(tmp_path / "fleet.safetensors", KEY)


def test_no_value_of_another_type_is_taken(saved, monkeypatch):
    tensors, about = saved
    fleet = make_fleet()
    start = weights(fleet)
    wrong = [mutation for mutation in mutations_of(about) if not is_plausible(*mutation[:2])]
    assert len(wrong) > 1000
    assert [
        (path, value) for path, value, changed in wrong if not refusal_of(fleet, monkeypatch, tensors, changed)
    ] == []
    assert (fleet.epoch, fleet.step) == (0, 0)
    assert torch.equal(weights(fleet), start)
    assert refusal_of(fleet, monkeypatch, tensors, about) == ""


@pytest.mark.parametrize("change", ["missing", "another type", "another shape", "one more"])
def test_no_tensor_of_another_kind_is_taken(saved, monkeypatch, change):
    tensors, about = saved
    fleet = make_fleet()
    start = weights(fleet)
    for name, value in tensors.items():
        others = {key: other for key, other in tensors.items() if key != name}
        others |= {
            "missing": {},
            "another type": {name: value.to(torch.float16)},
            "another shape": {name: value[:, None]},
            "one more": {name: value, f"{name}.more": value},
        }[change]
        told = refusal_of(fleet, monkeypatch, others, about)
        assert f"belongs to another fleet: {name}" in told
        assert told.endswith(" is missing, or has another shape or type")
    assert torch.equal(weights(fleet), start)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epoch", -1), ("epoch", 99), ("epoch", "1"), ("epoch", True), ("epoch", None), ("step", STEPS + 1),
        ("step", 1.5), ("train_loss", {}), ("train_loss", [[1.0]]), ("train_loss", [["x", "y", "z"]]),
        ("stopped", {"7": 0}), ("stopped", {"0": "x"}), ("stopped", {"0": 0}), ("stopped", []), ("extra", []),
        ("members", None), ("members", [1, 2, 3]), ("surprise", 1),
    ],
)  # fmt: skip
def test_a_sealed_checkpoint_that_makes_no_sense_is_refused_by_name(tmp_path, name, value):
    path, fleet = tmp_path / "fleet.safetensors", make_fleet()
    fleet.train(1)
    fleet.save(path)
    tensors, about = read_sealed(path, KEY)
    write_sealed(path, KEY, tensors, {**about, name: value})
    with pytest.raises(SealedError, match=rf"its {name} is .*remove the file"):
        make_fleet().load(path)


@pytest.mark.parametrize(("value", "shown"), [(MISSING, "missing"), (0, "0")])
def test_a_setting_that_is_missing_or_only_equal_is_named(saved, monkeypatch, value, shown):
    tensors, about = saved
    changed = mutated(about, ("members", 1, "nesterov"), value)
    told = refusal_of(make_fleet(), monkeypatch, tensors, changed)
    assert told.endswith(f"nesterov of network 1 was {shown}, here it is False")
