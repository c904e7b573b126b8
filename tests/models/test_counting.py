import pytest
import torch
from torch import nn

from torch_dcl import models
from torch_dcl.models import count_weights


@pytest.mark.parametrize(
    ("builder", "classes", "weights"),
    [
        (models.lenet, 10, 430_500),
        (models.lenet, 100, 475_500),
        (models.lenet, 1000, 925_500),
        (models.lenet_cifar, 10, 1_312_096),
        (models.lenet_cifar, 100, 1_358_176),
        (models.bignet, 10, 5_742_272),
        (models.bignet, 100, 5_834_432),
        (models.alexnet, 1000, 62_367_776),
    ],
)
def test_baselines_have_the_weights_of_the_paper(builder, classes: int, weights: int) -> None:
    with torch.device("meta"):
        assert count_weights(builder(classes)) == weights


def test_biases_are_left_out_and_scales_are_not() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(20, 7))
    assert count_weights(model) == 3 * 5 * 9 + 5 + 20 * 7
    assert count_weights(nn.MultiheadAttention(4, 1)) == 4 * 12 + 4 * 4


def test_a_shared_weight_counts_once() -> None:
    layer = nn.Linear(4, 4)
    assert count_weights(nn.Sequential(layer, nn.ReLU(), layer)) == 16


def test_a_network_without_parameters_has_none() -> None:
    assert count_weights(nn.ReLU()) == 0


def test_a_lazy_layer_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'1\.weight' has no shape yet; run one batch"):
        count_weights(nn.Sequential(nn.ReLU(), nn.LazyLinear(3)))
