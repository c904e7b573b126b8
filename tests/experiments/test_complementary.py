"""Mean responses by class and by digit, against a loop over single images written out from the paper's formulas."""

import math

import pytest
import torch
from torch import nn

import torch_dcl as dcl
from torch_dcl.data import mnist_excerpt
from torch_dcl.data.digits import generate
from torch_dcl.experiments.complementary import ClassResponses, class_responses, complementary, pick_filter, shares
from torch_dcl.models import lenet, variant_plan


def numbers(count=200):
    images, labels = generate("MNIST-II-05", "test", indices=range(count))
    return images[:, None] / 255, labels


def converted(variant, classes=100):
    model = lenet(classes)
    dcl.convert_(model, variant_plan(model, variant), init="random")
    for layer in model.modules():
        if isinstance(layer, dcl.DCLLinear):
            nn.init.uniform_(layer.fusion.bias, -0.2, 0.2)
    return model.double()


@torch.no_grad()
def reference(model, name, filter, image):
    """z and the v(t) of one filter for one image: dot products, ReLU, product, root."""
    seen = []
    handle = getattr(model, name).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    model.eval()(image[None])
    handle.remove()
    layer, x = getattr(model, name), seen[0]
    responses, row = [], 0
    for t, width in enumerate(layer.widths):
        rows = slice(row, row + width)
        y = layer.branch.weight[rows] @ x
        total = layer.fusion.bias[t, filter].item() + torch.dot(layer.fusion.weight[rows, filter], y).item()
        row += width
        responses.append(max(total, 0.0))
    if layer.strategy == "stochastic":
        pairs = [(i, j) for i in range(3) for j in range(i)]
        return sum(math.sqrt(responses[i] * responses[j] + 1e-2) for i, j in pairs) / 3, responses
    return (math.prod(responses) + 10.0 ** -len(responses)) ** (1 / len(responses)), responses


def mean(values):
    return sum(values) / len(values) if values else math.nan


@pytest.mark.parametrize(("variant", "layer"), [("A2", "fc1"), ("B2", "fc2"), ("A3S", "fc1")])
def test_means_are_those_of_a_loop_over_the_images(variant, layer):
    model, (images, labels) = converted(variant), numbers(60)
    images = images.double()
    found = complementary(model, layer, 3, images, labels, batch=17)
    slow = [reference(model, layer, 3, image) for image in images]
    branches = int(variant[1])
    for c in range(100):
        here = [slow[i] for i in range(60) if labels[i] == c]
        assert found.fused[c].item() == pytest.approx(mean([z for z, _ in here]), rel=1e-9, nan_ok=True)
        for t in range(branches):
            expected = mean([v[t] for _, v in here])
            assert found.branches[t, c].item() == pytest.approx(expected, rel=1e-9, abs=1e-12, nan_ok=True)
    for position, place in ((0, 10), (1, 1)):
        for d in range(10):
            here = [slow[i][1] for i in range(60) if labels[i].item() // place % 10 == d]
            for t in range(branches):
                expected = mean([v[t] for v in here])
                assert found.by_digit[t, position, d].item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    fused = {c: found.fused[c].item() for c in range(100) if (labels == c).any()}
    top = max(fused, key=fused.get)
    assert (found.highest, found.parts, found.images, found.picked) == (top, (top // 10, top % 10), 60, False)
    for t in range(branches):
        assert found.own[t] == tuple(max(range(10), key=found.by_digit[t, p].tolist().__getitem__) for p in (0, 1))


def test_the_size_of_a_batch_and_the_mode_of_the_network_change_nothing():
    model, (images, labels) = converted("A2").float(), numbers()
    model.train()
    model.conv1.eval()
    one = class_responses(model, "fc1", images, labels, batch=1000)
    assert model.training
    assert model.fc1.training
    assert not model.conv1.training
    assert not model.fc1._forward_pre_hooks
    other = class_responses(model.eval(), "fc1", images, labels, batch=7)
    torch.testing.assert_close(one.z, other.z, equal_nan=True, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one.v, other.v, equal_nan=True, rtol=1e-5, atol=1e-6)
    assert one.count.tolist() == labels.bincount(minlength=100).tolist()


def test_labels_that_are_no_numbers_are_averaged_by_class_only():
    images, labels = mnist_excerpt("test")
    images, labels = images[:50, None] / 255, labels[:50]
    names = [f"digit {d}" for d in range(10)]
    found = complementary(converted("A2", 10).float(), "fc1", 0, images, labels, digits=1, classes=names)
    assert found.names == tuple(names)
    assert found.by_digit.shape == (2, 1, 10)
    torch.testing.assert_close(found.by_digit[:, 0], found.branches, equal_nan=True)
    assert found.parts == (found.highest,)


def test_three_digits():
    images, labels = generate("MNIST-III-01", "test", indices=range(40))
    found = class_responses(converted("A2", 1000).float(), "fc1", images[:, None] / 255, labels, digits=3)
    middle = found.by_digit()[:, 1]
    for d in range(10):
        here = (labels // 10 % 10 == d).nonzero()[:, 0]
        weights = found.v[:, labels[here]].mean(1)
        torch.testing.assert_close(middle[:, d], weights, equal_nan=True)
    assert found.of_class(68) == (0, 6, 8)


def test_a_convolution_is_averaged_over_its_positions():
    model = nn.Sequential(dcl.DCLConv2d(1, 6, 3, branches=2, width=3), nn.Flatten(), nn.LazyLinear(10))
    images, labels = torch.rand(11, 1, 5, 7), torch.arange(11) % 4
    model(images)
    found = class_responses(model, "0", images, labels, digits=1, batch=3)
    z = model[0](images).mean((2, 3)).double()
    for c in range(4):
        torch.testing.assert_close(found.z[c], z[labels == c].mean(0).detach(), rtol=1e-5, atol=1e-6)


def hand_made(*filters):
    """Class responses whose branch means are products of digit weights: one (tens, units) pair a branch and filter."""
    columns = []
    for branches in filters:
        means = [torch.outer(torch.tensor(tens), torch.tensor(units)).flatten() for tens, units in branches]
        columns.append(torch.stack(means).double())
    v = torch.stack(columns, 2)
    names = tuple(f"{c:02d}" for c in range(100))
    return ClassResponses("fc1", names, 2, torch.full((100,), 3), (v.prod(0) + 1e-2).sqrt(), v)


def peak(digit, height=3.0, second=None):
    weights = [1.0] * 10
    weights[digit] = height
    if second is not None:
        weights[second] = 2.0
    return weights


def test_the_rule_picks_branches_that_share_the_work():
    alone = [(peak(6), peak(8)), (peak(6), peak(8))]
    shared = [(peak(6, 9.0), peak(1, 3.0, 8)), (peak(2, 3.0, 6), peak(8, 9.0))]
    lost = [(peak(1, 3.0, 6), peak(8, 9.0)), (peak(2, 3.0, 6), peak(8, 9.0))]
    silent = [([0.0] * 10, peak(8)), (peak(6), peak(8))]
    assert pick_filter(hand_made(silent, alone, lost, shared)) == 3
    assert pick_filter(hand_made(silent, alone, shared, lost, shared)) == 2
    assert pick_filter(hand_made(silent, alone)) == 1
    with pytest.raises(ValueError, match="never fires"):
        pick_filter(hand_made(silent))


def test_the_filters_that_satisfy_the_rule_are_counted():
    alone = [(peak(6), peak(8)), (peak(6), peak(8))]
    shared = [(peak(6, 9.0), peak(1, 3.0, 8)), (peak(2, 3.0, 6), peak(8, 9.0))]
    lost = [(peak(1, 3.0, 6), peak(8, 9.0)), (peak(2, 3.0, 6), peak(8, 9.0))]
    silent = [([0.0] * 10, peak(8)), (peak(6), peak(8))]
    found = shares(hand_made(silent, alone, lost, shared, shared))
    assert found == {"filters": 4, "together": 3 / 4, "complementary": 2 / 4}
    assert shares(hand_made(silent)) == {"filters": 0, "together": 0.0, "complementary": 0.0}


def test_of_equal_filters_the_more_selective_one_is_picked():
    def shared(height):
        return [(peak(6, height), peak(1, 3.0, 8)), (peak(2, 3.0, 6), peak(8, height))]

    assert pick_filter(hand_made(shared(8.0), shared(9.0), shared(8.5))) == 1


def test_without_a_filter_the_rule_picks_one():
    model, (images, labels) = converted("A2").float(), numbers()
    found = complementary(model, "fc1", None, images, labels)
    assert found.picked
    assert found.filter == pick_filter(class_responses(model, "fc1", images, labels))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"layer_name": "fc2"}, KeyError, "did you mean 'fc1'"),
        ({"filter": 500}, IndexError, "filters 0 to 499, not 500"),
        ({"images": torch.zeros(4, 1, 28, 28, dtype=torch.uint8)}, TypeError, "images / 255"),
        ({"labels": torch.zeros(4)}, TypeError, "whole numbers"),
        ({"labels": torch.zeros(3, dtype=torch.long)}, ValueError, "do not fit 4 images"),
        ({"labels": torch.tensor([0, 1, 2, 100])}, ValueError, "label 100 is not one of 100 classes"),
        ({"labels": torch.tensor([0, 1, 2, -1])}, ValueError, "label -1"),
        ({"digits": 0}, ValueError, "from 1 to 4, not 0"),
        ({"classes": 10}, ValueError, "100 classes, not 10; use digits=1"),
        ({"batch": 0}, ValueError, "batch must be at least 1"),
        ({"images": torch.zeros(0, 1, 28, 28), "labels": torch.zeros(0, dtype=torch.long)}, ValueError, "no images"),
        ({"model": lenet(100)}, KeyError, "convert it first"),
    ],
)
def test_a_wrong_argument_is_named_with_its_remedy(changes, error, words):
    given = {
        "model": converted("A2").float(), "layer_name": "fc1", "filter": 0, "images": torch.rand(4, 1, 28, 28),
        "labels": torch.tensor([0, 1, 2, 3]),
    }  # fmt: skip
    with pytest.raises(error, match=words):
        complementary(**{**given, **changes})


def test_a_layer_that_is_called_twice_is_refused():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = dcl.DCLLinear(4, 4, width=2)

        def forward(self, x):
            return self.layer(self.layer(x))

    with pytest.raises(ValueError, match="called 2 times"):
        class_responses(Twice(), "layer", torch.rand(3, 4), torch.arange(3), digits=1)
