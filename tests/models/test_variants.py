"""The paper's variants have the paper's weights, to the digit."""

import pytest
import torch
from tests.halves import slow

import torch_dcl as dcl
from torch_dcl import models
from torch_dcl.data import mnist_excerpt

COUNTS = [
    (models.lenet, 100, {"A2": 335_500, "A3S": 465_500, "A3D": 465_500, "B2": 449_500, "B3S": 461_500, "B3D": 461_500}),
    (models.lenet, 1000, {"A2": 785_500, "A3S": 915_500, "A3D": 915_500, "B2": 1_025_500, "B3S": 1_325_500}),
    (models.lenet_cifar, 10, {"A2": 918_880}),
    (models.bignet, 10, {"A2": 5_086_912}),
    (models.alexnet, 1000, {"A2": 51_882_016}),
]
CASES = [(build, classes, name, n) for build, classes, counts in COUNTS for name, n in counts.items()]


@pytest.mark.parametrize(("build", "classes", "name", "weights"), CASES)
def test_a_variant_has_exactly_the_weights_that_the_plan_says_and_the_paper_counts(build, classes, name, weights):
    model = build(classes)
    plan = models.variant_plan(model, name)
    assert plan.weights_after == weights
    dcl.convert_(model, plan, init="random")
    assert models.count_weights(model) == weights
    assert sum(p.numel() for p in model.parameters()) == plan.parameters_after


@pytest.mark.parametrize("name", models.VARIANTS)
def test_a_variant_replaces_the_layer_with_the_branches_and_the_strategy_of_its_name(name):
    model = models.lenet(100)
    dcl.convert_(model, models.variant_plan(model, name), init="random")
    layer = model.fc1 if name[0] == "A" else model.fc2
    other = model.fc2 if name[0] == "A" else model.fc1
    assert isinstance(layer, dcl.DCLLinear)
    assert isinstance(other, torch.nn.Linear)
    assert layer.widths == ((100 if name[0] == "A" else 20),) * int(name[1])
    assert layer.strategy == ("stochastic" if name.endswith("S") else "deterministic")
    assert model.eval()(torch.randn(2, 1, 28, 28)).shape == (2, 100)


def test_wide_resnet_has_only_its_classifier_with_a_quarter_rounded_up():
    model = models.wide_resnet(num_classes=10)
    dcl.convert_(model, models.variant_plan(model, "A2"), init="random")
    assert model.fc.widths == (3, 3)
    with pytest.raises(ValueError, match="no variant B2"):
        models.variant_plan(models.wide_resnet(num_classes=10), "B2")


def test_an_unknown_variant_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=r"'A4'.*A2, A3S"):
        models.variant_plan(models.lenet(100), "A4")


@pytest.mark.parametrize("name", [slow("A2"), "A3S"])  # the paper calls B unstable, and so it is
def test_a_variant_learns(name):
    torch.manual_seed(0)
    model = models.lenet(10)
    dcl.convert_(model, models.variant_plan(model, name), init="random")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    dcl.follow_optimizer(model, optimizer)
    model.eval()  # no dropout; the stochastic layer alone stays in training
    for module in model.modules():
        if isinstance(module, dcl.DCLLinear):
            module.train()
    images, labels = mnist_excerpt("train")
    images, labels = images[:100, None] / 255, labels[:100]
    losses = []
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
