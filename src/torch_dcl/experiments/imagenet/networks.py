"""The networks of ImageNet recipes: plain, converted by a plan, or with low-rank layers of equal weights."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torch_dcl.convert import Plan, convert_, plan
from torch_dcl.data.imagenet.batches import CAFFE_MEAN
from torch_dcl.experiments.network_source import find_model
from torch_dcl.experiments.settings import SettingError
from torch_dcl.models import alexnet, variant_plan

if TYPE_CHECKING:
    from torch_dcl.experiments.recipes.imagenet import ImageNetConfig

__all__ = ["CAFFE", "build", "inputs_of"]

CAFFE = CAFFE_MEAN, (1.0, 1.0, 1.0)
"""The normalisation of Caffe's AlexNet: mean, and no standard deviation."""
AUXILIARY = "googlenet", "inception_v3"
"""Networks of torchvision with further classifiers in training, which are left out."""


def inputs_of(name: str) -> int:
    """Height and width of a network's inputs, as far as its name says; 224 otherwise."""
    if name.startswith("timm:"):
        with contextlib.suppress(ImportError, RuntimeError, AttributeError):
            import timm

            config = timm.get_pretrained_cfg(name.removeprefix("timm:"))
            return int(config.input_size[-1]) if config is not None else 224
    return {"alexnet": 227, "torchvision:inception_v3": 299}.get(name, 224)


def build(config: "ImageNetConfig", model: str, seed: int, classes: int, side: int) -> nn.Module:
    """Build one network, with the same weights on every rank.

    Args:
        config: The settings.
        model: plain, dcl or low-rank.
        seed: Of its weights.
        classes: How many there are.
        side: Height and width of the inputs.

    Raises:
        SettingError: There is no such network, or plan, network and images do not fit.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = _plain(config.network, classes, side)
        if model == "plain":
            return network
        wanted = _plan(config, network, side)
        if not wanted.selected:
            raise SettingError(f"the plan selects no unit of {config.network}; there is nothing to convert")
        try:
            if model == "dcl":
                convert_(network, wanted, init="random", seed=seed)
                return network
            for row in wanted.selected:
                one = plan(network, (3, side, side), branches=1, width=row.low_rank_width).only(row.name, force=True)
                convert_(network, one, init="random", seed=seed)
        except (ValueError, TypeError) as error:
            raise SettingError(f"{config.network} cannot be converted by this plan: {error}") from error
    return network


def _plain(name: str, classes: int, side: int) -> nn.Module:
    own = ":" in name and name.partition(":")[0] not in ("torchvision", "timm")
    options: dict[str, object] = {} if own else {"num_classes": classes}
    if name.removeprefix("torchvision:") in AUXILIARY:
        options["aux_logits"] = False
    try:
        what = "cannot be built"
        network: nn.Module = alexnet(classes) if name == "alexnet" else find_model(name, **options)[0]
        what = f"does not run on images of {side} × {side}, which --set crop=… changes"
        with torch.no_grad():
            output = network.eval()(torch.zeros(2, 3, side, side))
    except SettingError:
        raise
    except Exception as error:  # of code that may be the user's
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SettingError(f"{name} {what}: {reason}") from error
    network.train()
    if not isinstance(output, Tensor) or output.shape != (2, classes):
        shape = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise SettingError(f"{name} gives {shape} for 2 images, [2, {classes}] is needed; take another network")
    return network


def _plan(config: "ImageNetConfig", network: nn.Module, side: int) -> Plan:
    if config.plan:
        try:
            return Plan.from_json(Path(config.plan).expanduser().read_text(encoding="utf-8"))
        except OSError as error:
            raise SettingError(
                f"plan {config.plan!r} cannot be read: {error.strerror}; write one with dcl plan -o"
            ) from error
        except ValueError as error:
            raise SettingError(f"plan {config.plan!r} cannot be read: {error}") from error
    try:
        if config.budget:
            return plan(network, (3, side, side), budget=config.budget)
        return variant_plan(network, "A2") if config.network == "alexnet" else plan(network, (3, side, side))
    except ValueError as error:
        raise SettingError(f"{config.network} cannot be planned: {error}") from error
