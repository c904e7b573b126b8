"""Networks as people have them: planned, converted, trained a step, saved, loaded, equal; and rebuilt exactly.

A few run always; the large zoo is behind the marker ``zoo`` (``make test-zoo``). Nothing is downloaded.
"""

import copy
import gc
import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

import pytest
import torch
from tests.convert.families import FAMILIES
from tests.convert.families import TIMM as TIMM_FAMILIES
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchvision import models
from torchvision.models import detection, segmentation, video

import torch_dcl as dcl
from torch_dcl.convert import AbsorbedNorm

NOTHING = "Nothing here is worth converting"
LAYERS = (dcl.DCLLinear, dcl.DCLConv1d, dcl.DCLConv2d, dcl.DCLConv3d)


def timm_network(name):
    timm = pytest.importorskip("timm", reason="needs timm, of the extra of that name")
    return timm.create_model(name, pretrained=False, num_classes=10)


def retinanet():
    """Small images stay small, and what an untrained head is unsure of is reported too."""
    return detection.retinanet_resnet50_fpn(
        weights=None, weights_backbone=None, num_classes=4, min_size=64, max_size=96, score_thresh=0.0
    )


@dataclass(frozen=True)
class Entry:
    """A network of the zoo: how to make it, the side of its images, and why nothing in it is worth converting."""

    make: object
    side: int = 64
    nothing: str = ""
    frames: tuple[int, ...] = ()

    def images(self):
        return torch.randn(2, 3, *self.frames, self.side, self.side)


TORCHVISION = {
    "alexnet": Entry(partial(models.alexnet, weights=None)),
    "vgg16": Entry(partial(models.vgg16, weights=None), 32),
    "googlenet": Entry(partial(models.googlenet, weights=None, init_weights=False)),
    "resnet50": Entry(partial(models.resnet50, weights=None)),
    "densenet121": Entry(partial(models.densenet121, weights=None)),
    "mobilenet_v3_small": Entry(partial(models.mobilenet_v3_small, weights=None)),
    "mnasnet0_5": Entry(partial(models.mnasnet0_5, weights=None), 64, "another layer follows without ReLU"),
    "squeezenet1_1": Entry(partial(models.squeezenet1_1, weights=None)),
    "fcn_resnet50": Entry(partial(segmentation.fcn_resnet50, weights=None, weights_backbone=None)),
    "retinanet_resnet50_fpn": Entry(retinanet),
    "r3d_18": Entry(partial(video.r3d_18, weights=None), 32, frames=(8,)),
}
TIMM = {
    "resnet18": Entry(partial(timm_network, "resnet18")),
    "resnext50_32x4d": Entry(partial(timm_network, "resnext50_32x4d")),
    "regnety_002": Entry(partial(timm_network, "regnety_002")),
    "res2net50_26w_4s": Entry(partial(timm_network, "res2net50_26w_4s")),
    "resnetv2_50": Entry(partial(timm_network, "resnetv2_50")),
    "skresnet18": Entry(partial(timm_network, "skresnet18")),
    "dla34": Entry(partial(timm_network, "dla34")),
    "hrnet_w18_small": Entry(partial(timm_network, "hrnet_w18_small")),
    "inception_v3": Entry(partial(timm_network, "inception_v3"), 96),
    "selecsls42b": Entry(partial(timm_network, "selecsls42b")),
    "vgg11_bn": Entry(partial(timm_network, "vgg11_bn"), 32),
    "hardcorenas_a": Entry(partial(timm_network, "hardcorenas_a")),
    "botnet26t_256": Entry(partial(timm_network, "botnet26t_256"), 256),
    "vit_tiny_patch16_224": Entry(partial(timm_network, "vit_tiny_patch16_224"), 224, "GELU, attention, residual sums"),
    "convnext_atto": Entry(partial(timm_network, "convnext_atto"), 64, "GELU follows"),
    "efficientnet_b0": Entry(partial(timm_network, "efficientnet_b0"), 64, "SiLU follows"),
    "mobilenetv2_100": Entry(partial(timm_network, "mobilenetv2_100"), 64, "ReLU6 or a clipped activation follows"),
    "repvgg_a0": Entry(partial(timm_network, "repvgg_a0"), 64, "feeds a residual sum"),
}
ZOO = {f"torchvision:{name}": entry for name, entry in TORCHVISION.items()}
ZOO |= {f"timm:{name}": entry for name, entry in TIMM.items()}
ALWAYS = ("torchvision:mobilenet_v3_small", "torchvision:googlenet", "timm:resnet18", "timm:vit_tiny_patch16_224")
NAMES = [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.zoo) for name in ZOO]


@pytest.fixture(autouse=True)
def room():
    """Networks refer to themselves; the next one wants the memory."""
    yield
    gc.collect()


def example(name, images):
    return list(images) if "retinanet" in name else images


@torch.no_grad()
def awake(model):
    """Residual branches that end in a norm of weight 0 would let no gradient through in the first step."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and not module.weight.any():
            module.weight.fill_(0.5)
    return model


@torch.no_grad()
def output(name, model, images):
    return [t for t in tree_leaves(model.eval()(example(name, images))) if isinstance(t, Tensor)]


def train_one_step(name, model, images):
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    if "retinanet" in name:
        boxes = torch.tensor([[5.0, 5.0, 40.0, 50.0]])
        targets = [{"boxes": boxes, "labels": torch.tensor([1 + i])} for i in range(len(images))]
        loss = sum(model(list(images), targets).values())
    else:
        leaves = tree_leaves(model(images))
        loss = sum((t.float() - 1).square().mean() for t in leaves if isinstance(t, Tensor) and t.is_floating_point())
    loss.backward()
    gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    # Two images at a random start make steep gradients, the more so the deeper the network.
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach(), gradients


@pytest.mark.parametrize("name", NAMES)
def test_plan_convert_train_save_load_equal(name, tmp_path):
    entry = ZOO[name]
    model, images = awake(entry.make()), entry.images()
    plan = dcl.plan(model, example=(example(name, images),))
    assert plan.parameters == sum(p.numel() for p in model.parameters())
    if entry.nothing:
        assert plan.selected == ()
        assert str(plan).startswith(NOTHING)
        assert entry.nothing.split(",")[0] in str(plan)
        assert plan.weights_after == plan.weights
    else:
        assert len(plan.selected) >= 1
        assert plan.weights_after < plan.weights
        assert all(row.weights_after < row.weights for row in plan.selected)

    dcl.convert_(model, plan, init="random")
    layers = {n: m for n, m in model.named_modules() if isinstance(m, LAYERS)}
    assert set(layers) == {row.name for row in plan.selected}
    absorbed = {n for n, m in model.named_modules() if isinstance(m, AbsorbedNorm)}
    assert absorbed == {row.norm for row in plan.selected if row.norm}
    sizes = {n: p.numel() for n, p in model.named_parameters()}
    assert plan.parameters_after == sum(sizes.values())
    assert plan.weights_after == sum(size for n, size in sizes.items() if not n.endswith("bias"))

    loss, gradients = train_one_step(name, model, images)
    assert loss.isfinite()
    assert all(g.isfinite().all() for g in gradients.values() if g is not None)
    for layer in layers:
        own = {n: g for n, g in gradients.items() if n.startswith(f"{layer}.")}
        assert all(g is not None for g in own.values()), layer
        assert any(g.count_nonzero() for g in own.values()), layer

    path = tmp_path / "model.safetensors"
    dcl.save_model(model, path)
    loaded = dcl.load_model(entry.make, path)
    path.unlink()  # some are large
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)
    before, after = output(name, model, images), output(name, loaded, images)
    assert len(before) == len(after) > 0
    assert any(t.numel() for t in before)
    assert all(t.isfinite().all() for t in before)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# Exactly: every unit with the weights that it had


@torch.no_grad()
def wide_awake(model):
    """A fresh network in which every unit shows: batch norms do something, and no branch is multiplied with zero.

    In eval mode a fresh batch norm is the identity, and residual branches often start with a scale of nearly zero.
    """
    for name, parameter in model.named_parameters():
        if not name.endswith("bias") and parameter.abs().max() < 1e-3:
            parameter.normal_(0, 0.1)
    for module in model.modules():
        if isinstance(getattr(module, "running_var", None), Tensor):
            module.running_var.uniform_(0.5, 1.5)
            module.running_mean.normal_(0, 0.1)
            if module.weight is not None:
                module.weight.uniform_(0.5, 1.5)
            if module.bias is not None:
                module.bias.normal_(0, 0.1)
    return model


@torch.no_grad()
def rebuild_(model, plan):
    """Convert, and give every layer the weights of the layer and of the batch norm that it replaces.

    At T = 1, ε = 0 and full width a DCL layer is ``relu(norm(W·θ·x + b))``. With the layer's weights as θ and the
    identity as W the network computes what it did before.
    """
    old = [(row.name, *(model.get_submodule(n) if n else None for n in (row.name, row.norm))) for row in plan.selected]
    dcl.convert_(model, plan, init="random")
    for name, layer, norm in old:
        new, weight, bias = model.get_submodule(name), layer.weight, layer.bias
        if norm is not None and new.fusion.norm is None:  # a frozen one, which goes into the weights
            scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
            bias = norm.bias + (0 if bias is None else bias * scale) - norm.running_mean * scale
            weight = weight * scale.view(-1, *(1,) * (weight.dim() - 1))
        new.branch.weight.copy_(weight)
        new.fusion.weight.copy_(torch.eye(len(weight)))
        if bias is not None:
            new.fusion.bias.copy_(bias[None])
        if new.fusion.norm is not None:
            new.fusion.norm.load_state_dict(norm.state_dict())


def full_width(model, args, kwargs):
    """The plan of low-rank layers as wide as what they replace."""
    return dcl.plan(model, example=kwargs or args, branches=1, ratio=1.0, round_to=1, eps=0.0)


@torch.no_grad()
def returned(model, args, kwargs):
    """The floating tensors of the output in eval mode."""
    torch.manual_seed(0)
    result = model.eval()(*args, **kwargs)
    leaves = tree_leaves(dict(result) if hasattr(result, "keys") else result)
    return [t.clone() for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]


def difference(ours, theirs):
    """The largest difference of two lists of tensors, each relative to the largest value of its tensor."""
    assert any(t.numel() for t in theirs)
    if [t.shape for t in ours] != [t.shape for t in theirs]:  # other boxes were found
        return math.inf
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if b.numel()]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)


def in_double(value):
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return type(value)(map(in_double, value)) if isinstance(value, list | tuple) else value


QUICK = ("torchvision:squeezenet1_1", "torchvision:shufflenet_v2_x0_5", "timm:skresnet18", "timm:swinv2_cr_tiny_224")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.zoo) for n in FAMILIES])
def test_every_unit_with_its_own_weights_gives_the_same_output(name):
    """What the plan takes for a unit is one: nothing else reads the layer's output before its norm and ReLU."""
    family = FAMILIES[name]
    model, args, kwargs = wide_awake(family.make()), family.args(), family.kwargs()
    if family.double:
        model, args = model.double(), in_double(args)
    expected = returned(model, args, kwargs)
    plan = full_width(model, args, kwargs)
    units = [row.name for row in plan.rows if row.is_unit]
    if not units:
        assert all(row.reason for row in plan.rows)
        return
    rebuild_(model, plan.only(units))
    assert difference(returned(model, args, kwargs), expected) <= family.tolerance

    with torch.no_grad():
        for unit in units:
            weight = model.get_submodule(unit).fusion.weight
            weight.mul_(1 + 0.05 * torch.randn(weight.shape[1]))
    assert difference(returned(model, args, kwargs), expected) > family.tolerance, "no unit matters"


def test_the_exact_check_notices_a_layer_that_is_no_unit():
    model = wide_awake(timm_network("resnet18"))
    args = (torch.randn(2, 3, 64, 64),)
    expected = returned(model, args, {})
    rebuild_(model, full_width(model, args, {}).only("layer1.0.conv2", force=True))
    assert difference(returned(model, args, {}), expected) > 1e-2


@pytest.mark.zoo
def test_every_family_of_timm_is_in_the_zoo():
    timm = pytest.importorskip("timm", reason="needs timm, of the extra of that name")
    missing = sorted(set(timm.list_modules()) - set(TIMM_FAMILIES))
    assert not missing, f"timm {timm.__version__} has families that the zoo does not: {', '.join(missing)}"


# What a person who knows these networks expects to read


def planned(make, side=64, **arguments):
    return dcl.plan(make(), input_size=(3, side, side), **arguments)


def named(plan, *patterns):
    return [row for row in plan.rows if any(fnmatchcase(row.name, pattern) for pattern in patterns)]


def is_unit(row):
    """A unit of the paper's, whether or not it shrinks at the given width."""
    return row.status == "pays" or row.reason.startswith("would not shrink")


def test_resnet50_units_are_the_stem_and_the_first_two_convolutions_of_a_block():
    plan = planned(partial(models.resnet50, weights=None))
    units = named(plan, "conv1", "layer?.*.conv[12]")
    assert len(units) == 1 + 2 * 16
    assert [row for row in plan.rows if is_unit(row)] == units
    for row in units:
        assert row.norm == row.name.replace("conv", "bn")
        assert row.calls == 1
    sums = named(plan, "layer?.*.conv3", "layer?.*.downsample.0")
    assert len(sums) == 16 + 4
    assert {(row.status, row.reason) for row in sums} == {("left", "feeds a residual sum")}
    assert [(row.status, row.reason) for row in named(plan, "fc")] == [("left", "head of the network")]
    assert len(plan.rows) == len(units) + len(sums) + 1


def test_resnet50_units_hold_most_weights_and_shrink_to_a_good_half():
    plan = planned(partial(models.resnet50, weights=None))
    units = [row for row in plan.rows if is_unit(row)]
    before, after = sum(row.weights for row in units), sum(row.weights_after for row in units)
    assert before / plan.weights == pytest.approx(0.61, abs=0.005)
    assert after / before == pytest.approx(0.58, abs=0.005)


def test_mobilenet_v3_grouped_convolutions_are_refused_and_squeezes_converted():
    model = models.mobilenet_v3_small(weights=None)
    plan = dcl.plan(model, (3, 64, 64))
    grouped = {name: m.groups for name, m in model.named_modules() if getattr(m, "groups", 1) > 1}
    assert len(grouped) == 11
    for row in plan.rows:
        if row.name in grouped:
            assert (row.status, row.reason) == ("refused", f"grouped ({grouped[row.name]} groups)")
        else:
            assert row.status != "refused"
    assert "features.4.block.2.fc1" in {row.name for row in plan.selected}
    assert {row.reason for row in named(plan, "*.fc2")} == {"Hardsigmoid follows"}
    with pytest.raises(ValueError, match=r"'features\.1\.block\.0\.0' cannot be converted: grouped \(16 groups\)"):
        plan.only("features.1.block.0.0")


def test_retinanet_heads_are_counted_over_all_five_levels():
    model = retinanet().eval()
    heads = {n: m for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and n.startswith("head.")}
    sizes = {name: [] for name in heads}
    for name, module in heads.items():
        module.register_forward_hook(lambda _m, _x, y, name=name: sizes[name].append(y.shape[2] * y.shape[3]))
    images = list(torch.rand(2, 3, 64, 96))
    model(images)
    bare = retinanet()
    plan = dcl.plan(bare, example=(images,))
    rows = {row.name: row for row in plan.rows if row.name in heads}
    assert rows.keys() == heads.keys()
    for name, row in rows.items():
        assert row.calls == len(sizes[name]) == 5
        positions = 2 * sum(sizes[name])
        assert row.macs == positions * row.in_channels * row.out_channels * 9
        if row.selected:
            assert row.macs_after == positions * sum(row.widths) * (9 * row.in_channels + row.out_channels)
    units = named(plan, "head.*.conv.?.0")
    assert len(units) == 8
    assert all(row.selected for row in units)
    last = named(plan, "head.classification_head.cls_logits", "head.regression_head.bbox_reg")
    assert {row.reason for row in last} == {"head of the network"}


def test_vgg16_every_layer_but_the_last_is_a_unit():
    plan = planned(partial(models.vgg16, weights=None), 32)
    assert all(is_unit(row) for row in plan.rows[:-1])
    assert [row.name for row in plan.rows if not row.selected] == ["features.0", "classifier.3", "classifier.6"]
    assert plan.rows[-2].reason == "would not shrink (16,777,216 → 16,777,216 weights)"
    assert plan.rows[-1].reason == "head of the network"
    assert plan.weights == 138_344_128  # as the literature counts it: 138M


def test_densenet121_units_are_what_its_second_norm_follows():
    plan = planned(partial(models.densenet121, weights=None))
    inner = named(plan, "features.denseblock?.denselayer*.conv1")
    assert len(inner) == 58
    assert all(is_unit(row) and row.norm == row.name.replace("conv1", "norm2") for row in inner)
    outer = named(plan, "features.denseblock?.denselayer*.conv2")
    assert {row.reason for row in outer} == {"feeds a concatenation"}
    assert {row.reason for row in named(plan, "features.transition?.conv")} == {"avg_pool2d follows, not ReLU"}


def test_googlenet_auxiliary_classifiers_do_not_run_in_eval_mode():
    plan = planned(partial(models.googlenet, weights=None, init_weights=False))
    aux = named(plan, "aux?.*")
    assert len(aux) == 6
    assert {row.reason for row in aux} == {"not called in the run (in eval mode)"}
    assert all(is_unit(row) for row in plan.rows if row not in aux and row.name != "fc")


def test_a_vision_transformer_has_nothing_and_says_why():
    plan = planned(partial(timm_network, "vit_tiny_patch16_224"), 224)
    assert str(plan).startswith(NOTHING)
    reasons = {
        "blocks.*.attn.qkv": "feeds attention",
        "blocks.*.attn.proj": "feeds a residual sum",
        "blocks.*.mlp.fc1": "GELU follows",
        "blocks.*.mlp.fc2": "feeds a residual sum",
        "head": "head of the network",
    }
    for pattern, reason in reasons.items():
        assert {row.reason for row in named(plan, pattern)} == {reason}
        assert all(row.status == "left" for row in named(plan, pattern))


def test_a_swin_transformer_feeds_attention_whatever_lies_between():
    plan = planned(partial(timm_network, "swin_tiny_patch4_window7_224"), 224)
    assert str(plan).startswith(NOTHING)
    assert {row.reason for row in named(plan, "*.attn.qkv")} == {"feeds attention"}
    assert {row.reason for row in named(plan, "*.attn.proj", "*.mlp.fc2")} == {"feeds a residual sum"}


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


@pytest.mark.parametrize("name", ["torchvision:mobilenet_v3_small", "torchvision:googlenet", "timm:resnet18"])
def test_planning_leaves_no_trace(name):
    model, images = ZOO[name].make(), ZOO[name].images()
    expected = output(name, model, images)
    model.train()
    for module in list(model.modules())[3::7]:
        module.eval()
    flags = [module.training for module in model.modules()]
    modules = [id(module) for module in model.modules()]
    tensors = {n: (id(t), t._version) for n, t in model.state_dict(keep_vars=True).items()}
    values = copy.deepcopy(model.state_dict())
    hooks = [len(getattr(module, kind)) for module in model.modules() for kind in HOOKS]
    attributes = [sorted(vars(module)) for module in model.modules()]
    random = torch.get_rng_state()

    dcl.plan(model, example=images)

    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == flags
    assert [id(module) for module in model.modules()] == modules
    assert {n: (id(t), t._version) for n, t in model.state_dict(keep_vars=True).items()} == tensors
    assert all(torch.equal(values[n], t) for n, t in model.state_dict().items())
    assert [len(getattr(module, kind)) for module in model.modules() for kind in HOOKS] == hooks
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(output(name, model, images), expected, strict=True))


class Counting(nn.Module):
    """Counts its calls in two ways, one in place, and calls its layer by keyword."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(16, 16), nn.Linear(16, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        self.calls += 1
        self.mean = self.mean * 0.9 + x.mean(0) * 0.1
        return self.last(torch.relu(self.layer(input=x)))


def test_planning_restores_buffers_and_sees_layers_called_by_keyword():
    model = Counting()
    calls, mean = model.calls, model.mean
    plan = dcl.plan(model, (16,), width=2)
    assert [row.name for row in plan.selected] == ["layer"]
    assert plan.selected[0].calls == 1
    assert model.calls is calls
    assert model.mean is mean
    assert model.calls == 0
    assert torch.equal(model.mean, torch.zeros(16))


class Unused(nn.Module):
    """One layer reaches a ReLU, one is only looked at."""

    def __init__(self):
        super().__init__()
        self.used, self.seen, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 2)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        self.norm(self.seen(x)).view(-1)
        return self.last(torch.relu(self.used(x)))


def test_a_layer_that_meets_no_relu_is_no_unit():
    plan = dcl.plan(Unused(), (16,), width=2)
    assert [row.name for row in plan.selected] == ["used"]
    reason = next(row.reason for row in plan.rows if row.name == "seen")
    assert reason in ("its output is not used", "head of the network")


class Scaled(nn.Module):
    """What attention is made of, written out, and a ReLU behind a number."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.scaled, self.last = (nn.Linear(16, 16) for _ in range(5))

    def forward(self, x):
        weights = (self.query(x) * 0.25 @ self.key(x).mT).softmax(-1)
        return self.last(weights @ self.value(x) + torch.relu(self.scaled(x) / -2))


def test_a_layer_behind_a_number_is_followed_to_its_reason():
    plan = dcl.plan(Scaled(), (5, 16), width=2)
    reasons = {row.name: row.reason for row in plan.rows}
    assert {reasons[name] for name in ("query", "key", "value")} == {"feeds attention"}
    assert reasons["scaled"] == "is multiplied with a number"
    assert plan.selected == ()
