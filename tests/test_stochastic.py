"""The stochastic strategy: which pair is drawn, who moves the step on, and what idle branches do meanwhile."""

import copy
import gc
import itertools
import warnings
import weakref
from functools import partial

import pytest
import torch
from tests.processes import spawn
from tests.reference import plain_fusion, starts_of
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.func import functional_call
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import torch_dcl as dcl
from torch_dcl import (
    DCLConv1d,
    DCLConv2d,
    DCLConv3d,
    DCLLinear,
    advance_branches_,
    follow_optimizer,
    fuse_branches,
    seed_branches_,
)
from torch_dcl.functional import draw_pair
from torch_dcl.fusion import ConceptFusion

KINDS = {
    "gathering": {},
    "gathering, with activation": {"branch_activation": nn.ReLU},
    "unequal widths": {"width": (2, 3, 4, 5)},
    "with norm": {"norm_layer": nn.BatchNorm2d},
    "with norm, no bias": {"norm_layer": nn.BatchNorm2d, "bias": False},
    "with a group for each branch": {"norm_layer": partial(nn.GroupNorm, 4)},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def stochastic_conv(kind="gathering", **arguments):
    return DCLConv2d(3, 8, 3, branches=4, strategy="stochastic", **{"width": 4, **KINDS[kind], **arguments})


def network(branches=4):
    """Three stochastic layers among others."""
    return nn.Sequential(
        DCLConv2d(3, 8, 3, branches=branches, width=4, strategy="stochastic"),
        nn.MaxPool2d(2),
        DCLConv2d(8, 8, 3, branches=branches, width=(2, 3, 4, 5)[:branches], strategy="stochastic"),
        nn.Flatten(),
        DCLLinear(8, 6, branches=branches, width=3, strategy="stochastic"),
        nn.Linear(6, 5),
    )


def images(n=4, dtype=None):
    return torch.randn(n, 3, 8, 8, dtype=dtype)


def fusions(model):
    return [module for module in model.modules() if isinstance(module, ConceptFusion)]


def drawn(model):
    return [tuple(fusion.active.tolist()) for fusion in fusions(model)]


def trajectory(model, steps):
    """The pairs of all layers over the steps."""
    pairs = []
    for step in steps:
        advance_branches_(model, step)
        pairs.append(drawn(model))
    return pairs


def gradients(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


# What is drawn


def test_the_draw_is_a_function_of_seed_layer_and_step():
    """Two modules with different weights and a different past, as two ranks or a resumed run, draw the same."""
    one, other = network(), network()
    trajectory(other, range(20))
    other(images())
    seed_branches_(one, 11)
    seed_branches_(other, 11)
    assert trajectory(one, range(50)) == trajectory(other, range(50))
    assert trajectory(one, [7]) == trajectory(other, [3, 9, 7])[-1:]
    for name, layer in one.named_children():
        if hasattr(layer, "fusion"):
            key = layer.fusion.key
            assert tuple(layer.fusion.active.tolist()) == tuple(draw_pair(key, 4).tolist())
            assert key[0] == 11
            assert key[2] == 7
            assert torch.equal(key, other.get_submodule(name).fusion.key)


def test_layers_and_seeds_draw_differently():
    model = network()
    by_seed = {}
    for seed in (0, 1, 2):
        seed_branches_(model, seed)
        by_seed[seed] = trajectory(model, range(60))
    for first, second in itertools.combinations(range(3), 2):
        same = sum(pairs[first] == pairs[second] for pairs in by_seed[0])
        assert same < 25, "two layers should meet in one of six draws"
        same = sum(a == b for a, b in zip(by_seed[first], by_seed[second], strict=True))
        assert same < 5, "three layers at once should meet in one of 216 draws"


def test_all_pairs_are_drawn_equally_often_in_every_layer():
    model = network()
    seed_branches_(model, 5)
    steps = 3000
    pairs = trajectory(model, range(steps))
    for layer in range(3):
        counts = [sum(p[layer] == pair for p in pairs) for pair in itertools.combinations(range(4), 2)]
        assert sum(counts) == steps
        statistic = sum((count - steps / 6) ** 2 / (steps / 6) for count in counts)
        assert statistic < 20.52, "the 99.9 % point of chi-square with 5 degrees of freedom"


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**63 - 1, 2**63, 2**80 + 3])
def test_any_whole_number_is_a_seed(seed):
    model = network()
    seed_branches_(model, seed)
    pairs = trajectory(model, range(30))
    assert len({step[0] for step in pairs}) == 6
    assert all(0 <= a < b < 4 for step in pairs for a, b in step)


@pytest.mark.parametrize("seed", [1.5, "1", None, True])
def test_a_wrong_seed_is_named(seed):
    with pytest.raises(TypeError, match=f"seed must be a whole number, got {seed!r}"):
        seed_branches_(network(), seed)


@pytest.mark.parametrize("step", [1.5, "1"])
def test_a_wrong_step_is_named(step):
    model = network()
    with pytest.raises(TypeError, match=f"step must be a whole number, .*, got {step!r}"):
        advance_branches_(model, step)


def test_arguments_in_the_wrong_order_are_named():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="the network with the stochastic layers comes first; got a SGD"):
        follow_optimizer(optimizer, model)
    with pytest.raises(TypeError, match=r"takes the network and then its torch\.optim optimiser, got a StepLR"):
        follow_optimizer(model, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    for act in (advance_branches_, partial(seed_branches_, seed=1)):
        with pytest.raises(TypeError, match="the network with the stochastic layers comes first; got a SGD"):
            act(optimizer)


def test_counting_on_is_the_same_as_naming_the_step():
    one, other = network(), network()
    for model in (one, other):
        seed_branches_(model, 2)
    named = trajectory(one, range(1, 20))
    counted = trajectory(other, [None] * 19)
    assert named == counted
    assert trajectory(one, [torch.tensor(5)]) == named[4:5]


def test_the_draw_goes_through_a_state_dict():
    model, resumed = network(), network()
    seed_branches_(model, 9)
    trajectory(model, range(7))
    advance_branches_(resumed)
    resumed.load_state_dict(model.state_dict())
    assert drawn(resumed) == drawn(model)
    x = images()
    assert torch.equal(resumed(x), model(x))
    assert trajectory(resumed, [None] * 10) == trajectory(model, [None] * 10)


def test_layers_inside_checkpoint_wrappers_draw_as_without():
    plain, wrapped = network(), network()
    for i in (0, 2, 4):
        wrapped[i] = checkpoint_wrapper(wrapped[i])
    for model in (plain, wrapped):
        seed_branches_(model, 3)
    assert trajectory(wrapped, range(5)) == trajectory(plain, range(5))


def test_a_new_layer_starts_at_step_zero_of_seed_zero():
    layer = stochastic_conv()
    assert layer.fusion.key.tolist() == [0, 0, 0]
    assert drawn(layer) == [tuple(draw_pair(torch.tensor([0, 0, 0]), 4).tolist())]


def test_a_network_without_stochastic_layers_is_left_alone():
    model = nn.Sequential(DCLConv2d(3, 8, 3, branches=3), nn.Linear(4, 4))
    before = copy.deepcopy(model.state_dict())
    advance_branches_(model, 4)
    seed_branches_(model, 4)
    handle = follow_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    handle.remove()
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


# What is computed


@every_kind
def test_training_is_the_formula_for_two_on_the_drawn_pair(kind):
    layer = stochastic_conv(kind, dtype=torch.float64)
    for bias in (layer.branch.bias, layer.fusion.bias):
        if bias is not None:
            nn.init.normal_(bias)
    x = images(dtype=torch.float64)
    seen = set()
    for step in range(12):
        advance_branches_(layer, step)
        z = layer(x)
        pair = drawn(layer)[0]
        v = copy.deepcopy(layer).responses(x).v
        torch.testing.assert_close(z, plain_fusion([v[t] for t in pair], 1e-2), rtol=1e-11, atol=1e-12)
        seen.add(pair)
    assert len(seen) >= 4


@every_kind
def test_eval_is_the_mean_over_all_pairs_and_ignores_the_step(kind):
    layer = stochastic_conv(kind, dtype=torch.float64).eval()
    x = images(dtype=torch.float64)
    pre = layer.fusion.respond(layer._activate(layer.branch(x)))
    expected = sum(plain_fusion(pair, 1e-2) for pair in itertools.combinations(pre, 2)) / 6
    for step in range(3):
        advance_branches_(layer, step)
        torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


def test_eval_is_the_expectation_of_training():
    """The mean of the training output over all pairs, each once, is the output in eval."""
    layer = stochastic_conv(dtype=torch.float64)
    x = images(dtype=torch.float64)
    outputs = []
    for pair in itertools.combinations(range(4), 2):
        layer.fusion.active.copy_(torch.tensor(pair))
        layer.fusion.advanced = True
        outputs.append(layer(x))
    torch.testing.assert_close(torch.stack(outputs).mean(0), layer.eval()(x), rtol=1e-12, atol=1e-12)


def test_the_path_that_computes_the_pair_alone_agrees_with_the_one_that_computes_all():
    gathering = stochastic_conv(dtype=torch.float64)
    all_branches = stochastic_conv("with norm", norm_layer=lambda _: nn.Identity(), dtype=torch.float64)
    all_branches.load_state_dict(gathering.state_dict())
    assert gathering.fusion.gathers
    assert not all_branches.fusion.gathers
    x = images(dtype=torch.float64)
    for step in range(8):
        for layer in (gathering, all_branches):
            advance_branches_(layer, step)
        torch.testing.assert_close(gathering(x), all_branches(x), rtol=1e-12, atol=1e-13)
        mine, other = gradients(gathering, x), gradients(all_branches, x)
        for name in mine:
            torch.testing.assert_close(mine[name], other[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("layer_type", [DCLConv1d, DCLConv2d, DCLConv3d])
def test_every_geometry_is_kept_where_the_pair_is_computed_alone(layer_type):
    spatial = layer_type._spatial
    geometry = {"stride": 2, "padding": 2, "dilation": 2, "padding_mode": "circular"}
    layer = layer_type(3, 8, 3, branches=3, width=4, strategy="stochastic", dtype=torch.float64, **geometry)
    advance_branches_(layer, 1)
    x = torch.randn(2, 3, *(7,) * spatial, dtype=torch.float64)
    v = layer.responses(x).v
    torch.testing.assert_close(layer(x), fuse_branches([v[t] for t in drawn(layer)[0]], 1e-2), rtol=1e-12, atol=1e-12)


@every_kind
def test_idle_branches_get_an_exactly_zero_gradient(kind):
    layer = stochastic_conv(kind)
    x = images()
    for step in range(6):
        advance_branches_(layer, step)
        found = gradients(layer, x)
        for t, (start, end) in enumerate(starts_of(layer.widths)):
            own = [found["branch.weight"][start:end], found["fusion.weight"][start:end]]
            if layer.branch.bias is not None:
                own.append(found["branch.bias"][start:end])
            if layer.fusion.bias is not None and layer.fusion.norm is None:
                own.append(found["fusion.bias"][t])
            if layer.fusion.norm is not None:
                own += [found[f"fusion.norm.{name}"].view(4, -1)[t] for name in ("weight", "bias")]
            active = t in drawn(layer)[0]
            for gradient in own:
                assert gradient.any().item() == active


def test_an_idle_branch_that_diverged_does_not_reach_the_output():
    for kind in ("gathering", "unequal widths"):
        layer = stochastic_conv(kind)
        advance_branches_(layer, 0)
        idle = next(t for t in range(4) if t not in drawn(layer)[0])
        start, end = starts_of(layer.widths)[idle]
        with torch.no_grad():
            layer.fusion.weight[start:end] = torch.nan
        assert layer(images()).isfinite().all()
        assert layer.eval()(images()).isnan().any()


# A forward changes nothing


@every_kind
def test_forward_and_backward_do_not_move_the_draw(kind):
    layer = stochastic_conv(kind)
    advance_branches_(layer, 3)
    before = copy.deepcopy(layer.state_dict())
    random_state = torch.get_rng_state()
    for _ in range(3):
        gradients(layer, images())
        layer.eval()(images())
        layer.train()
    for name in ("fusion.key", "fusion.active"):
        assert torch.equal(layer.state_dict()[name], before[name])
    torch.set_rng_state(random_state)
    expected = torch.rand(3)
    torch.set_rng_state(random_state)
    layer(torch.ones(2, 3, 8, 8))
    advance_branches_(layer, 9)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_the_same_gradient(reentrant):
    model = network()
    seed_branches_(model, 1)
    for step in range(4):
        advance_branches_(model, step)
        x = images().requires_grad_()
        plain = gradients(model, x)
        plain_input = x.grad.clone()
        model.zero_grad()
        x.grad = None
        checkpoint_sequential(model, 3, x, use_reentrant=reentrant).square().sum().backward()
        assert torch.equal(x.grad, plain_input)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.grad, plain[name]), name
        x.grad = None
        model.zero_grad()
        checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
        assert torch.equal(x.grad, plain_input)


def test_gradient_accumulation_uses_one_pair_for_the_whole_step():
    model = network().double()
    seed_branches_(model, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    follow_optimizer(model, optimizer)
    x = images(8, dtype=torch.float64)
    for _ in range(4):
        whole = gradients(model, x)
        pairs = drawn(model)
        model.zero_grad()
        for part in x.split(2):
            model(part).square().sum().backward()
            assert drawn(model) == pairs
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, whole[name], rtol=1e-10, atol=1e-12)
        optimizer.step()


@pytest.mark.parametrize("part", ["branch", "fusion"])
def test_a_part_whose_hook_makes_its_weight_trains(part):
    """Pruning, and torch's older weight_norm and spectral_norm, make the weight before each forward of the module."""
    layer, x = stochastic_conv(), images()
    reference = copy.deepcopy(layer)
    pruned, plain = layer.get_submodule(part), reference.get_submodule(part)
    prune.l1_unstructured(pruned, "weight", 0.3)
    for _ in range(2):
        with torch.no_grad():
            plain.weight.copy_(pruned.weight_orig * pruned.weight_mask)
        expected = gradients(reference, x)[f"{part}.weight"] * pruned.weight_mask
        torch.testing.assert_close(gradients(layer, x)[f"{part}.weight_orig"], expected)
        with torch.no_grad():
            pruned.weight_orig -= 0.1 * pruned.weight_orig.grad


def test_hooks_of_both_stages_are_called_in_training():
    layer, called = stochastic_conv(), []
    for name in ("branch", "fusion"):
        layer.get_submodule(name).register_forward_hook(lambda *_, name=name: called.append(name))
    layer(images())
    assert called == ["branch", "fusion"]


def test_functional_call_and_func_grad():
    layer = stochastic_conv(dtype=torch.float64)
    advance_branches_(layer, 2)
    x = images(dtype=torch.float64)
    parameters, buffers = dict(layer.named_parameters()), dict(layer.named_buffers())
    expected = gradients(layer, x)
    found = torch.func.grad(lambda p: functional_call(layer, (p, buffers), (x,)).square().sum())(parameters)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-13)
    other_pair = next(p for p in itertools.combinations(range(4), 2) if p != drawn(layer)[0])
    elsewhere = {**buffers, "fusion.active": torch.tensor(other_pair)}
    v = layer.responses(x).v
    torch.testing.assert_close(
        functional_call(layer, (parameters, elsewhere), (x,)), plain_fusion([v[t] for t in other_pair], 1e-2),
        rtol=1e-12, atol=1e-12,
    )  # fmt: skip


# torch.compile and CUDA graphs


@pytest.mark.parametrize("who", ["named before the step", "counted after the step", "optimizer"])
def test_compiled_training_does_not_recompile_from_step_to_step(who):
    torch._dynamo.reset()
    model = network()
    seed_branches_(model, 3)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, eager)]
    if who == "optimizer":
        for m, optimizer in zip((model, eager), optimizers, strict=True):
            follow_optimizer(m, optimizer)
    else:
        for fusion in fusions(eager):
            fusion.advanced = True
    pairs = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(6):
            x = images()
            for run, m, optimizer in zip((compiled, eager), (model, eager), optimizers, strict=True):
                if who == "named before the step":
                    advance_branches_(m, step)
                optimizer.zero_grad()
                run(x).square().sum().backward()
                optimizer.step()
                if who == "counted after the step":
                    advance_branches_(m)
            pairs.append(drawn(model)[0])
            for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    assert len(set(pairs)) > 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_captured_cuda_graph_follows_the_step():
    model = network().cuda()
    seed_branches_(model, 3)
    eager = copy.deepcopy(model)
    x = images().cuda()

    def train(m):
        loss = m(x).square().sum()
        loss.backward()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    advance_branches_(model, 0)
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            train(model)
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = train(model)
    pairs = []
    for step in range(6):
        x.copy_(images())
        advance_branches_(model, step)
        advance_branches_(eager, step)
        model.zero_grad(set_to_none=False)
        eager.zero_grad()
        graph.replay()
        torch.testing.assert_close(loss, train(eager), rtol=1e-4, atol=1e-5)
        for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-4)
        pairs.append(drawn(model)[0])
    assert len(set(pairs)) > 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_cuda_graphs_of_a_compiled_network_follow_the_step():
    torch._dynamo.reset()
    model = network().cuda()
    seed_branches_(model, 3)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    pairs = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(8):
            x = images().cuda()
            for m in (model, eager):
                advance_branches_(m, step)
                m.zero_grad()
            torch.compiler.cudagraph_mark_step_begin()
            compiled(x).square().sum().backward()
            eager(x).square().sum().backward()
            for mine, other in zip(model.parameters(), eager.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-4)
            pairs.append(drawn(model)[0])
    assert len(set(pairs)) > 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_advancing_inside_a_captured_cuda_graph():
    model = network().cuda()
    eager = network().cuda()
    for m in (model, eager):
        seed_branches_(m, 3)
    advance_branches_(model, 0)
    advance_branches_(eager, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        advance_branches_(model)
    for _ in range(5):
        graph.replay()
        advance_branches_(eager)
        assert drawn(model) == drawn(eager)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_draw_is_the_same_on_a_gpu():
    cpu, gpu = network(), network().cuda()
    for model in (cpu, gpu):
        seed_branches_(model, 2**40 + 1)
    assert trajectory(cpu, range(40)) == trajectory(gpu, range(40))


# Several processes


def train_on_one_rank(rank, world_size, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world_size
    )
    torch.manual_seed(0)
    model = network()
    seed_branches_(model, 4)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    follow_optimizer(model, optimizer)
    torch.manual_seed(100 + rank)
    pairs = []
    for _ in range(4):
        x = images()
        pairs.append(drawn(model))
        optimizer.zero_grad()
        parallel(x).square().sum().backward()
        optimizer.step()
    torch.save({"pairs": pairs, "state": model.state_dict()}, f"{folder}/rank{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_two_ranks_draw_the_same_pairs_and_keep_equal_weights(tmp_path):
    spawn(train_on_one_rank, (2, str(tmp_path)), 2)
    one, other = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    assert one["pairs"] == other["pairs"]
    assert len({tuple(pairs) for pairs in one["pairs"]}) > 1
    torch.manual_seed(0)
    untrained = network().state_dict()
    for name, tensor in one["state"].items():
        assert torch.equal(tensor, other["state"][name]), name
        assert not torch.equal(tensor, untrained[name]) or name.endswith(("active", "_extra_state")), name


# Following an optimiser

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9, weight_decay=0.1),
    "SGD nesterov, foreach": lambda p: torch.optim.SGD(
        p, lr=1e-4, momentum=0.9, weight_decay=0.1, nesterov=True, foreach=True
    ),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "Adam amsgrad, foreach": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01, amsgrad=True, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, weight_decay=0.1, momentum=0.9),
}


def idle_part(layer, name, tensor):
    """The part of a parameter, or of a moment of it, that belongs to branches that are not drawn."""
    idle = [t for t in range(layer.branches) if t not in drawn(layer)[0]]
    if name == "fusion.bias":
        return tensor[idle]
    if name.startswith("fusion.norm."):
        return tensor.view(layer.branches, -1)[idle]
    starts = starts_of(layer.widths)
    return torch.cat([tensor[slice(*starts[t])] for t in idle])


def active_part(layer, name, tensor):
    pair = drawn(layer)[0]
    if name == "fusion.bias":
        return tensor[list(pair)]
    if name.startswith("fusion.norm."):
        return tensor.view(layer.branches, -1)[list(pair)]
    starts = starts_of(layer.widths)
    return torch.cat([tensor[slice(*starts[t])] for t in pair])


def parameters_and_moments(layer, optimizer):
    found = {}
    for name, parameter in layer.named_parameters():
        found[name, "value"] = parameter.detach().clone()
        for moment, tensor in optimizer.state.get(parameter, {}).items():
            if torch.is_tensor(tensor) and tensor.shape == parameter.shape:
                found[name, moment] = tensor.clone()
    return found


@every_kind
@pytest.mark.parametrize("kind_of_optimizer", OPTIMIZERS)
def test_held_branches_and_their_moments_do_not_move(kind_of_optimizer, kind):
    layer = stochastic_conv(kind)
    optimizer = OPTIMIZERS[kind_of_optimizer](layer.parameters())
    follow_optimizer(layer, optimizer)
    advance_branches_(layer, 0)
    pairs = []
    for step in range(8):
        gradients(layer, images())
        before = parameters_and_moments(layer, optimizer)
        at_this_step = copy.deepcopy(layer)
        optimizer.step()
        after = parameters_and_moments(layer, optimizer)
        pairs.append(drawn(at_this_step)[0])
        assert layer.fusion.key[2] == step + 1
        for (name, what), old in before.items():
            new = after[name, what]
            assert torch.equal(idle_part(at_this_step, name, old), idle_part(at_this_step, name, new)), (name, what)
            active = active_part(at_this_step, name, new)
            if what == "value" and active.numel() and at_this_step.get_parameter(name).grad is not None:
                moved = not torch.equal(active_part(at_this_step, name, old), active)
                assert moved or (name == "fusion.bias" and layer.fusion.norm is not None), name
        for key in after.keys() - before.keys():
            assert not idle_part(at_this_step, key[0], after[key]).any(), "a branch that never trained has no moment"
    assert len(set(pairs)) > 2


@pytest.mark.parametrize("kind_of_optimizer", ["SGD", "Adam", "AdamW"])
def test_branches_are_held_where_a_closure_computes_the_gradients(kind_of_optimizer):
    layer = stochastic_conv()
    optimizer = OPTIMIZERS[kind_of_optimizer](layer.parameters())
    follow_optimizer(layer, optimizer)
    for _ in range(3):

        def closure():
            optimizer.zero_grad()
            loss = layer(images()).square().mean()
            loss.backward()
            return loss

        optimizer.zero_grad()
        before = parameters_and_moments(layer, optimizer)
        at_this_step = copy.deepcopy(layer)
        optimizer.step(closure)
        after = parameters_and_moments(layer, optimizer)
        for (name, what), old in before.items():
            new = after[name, what]
            assert torch.equal(idle_part(at_this_step, name, old), idle_part(at_this_step, name, new)), (name, what)
        assert not torch.equal(before["fusion.weight", "value"], after["fusion.weight", "value"])


class Wrapper(torch.optim.Optimizer):
    """An optimiser around another, as accelerate's and timm's Lookahead: its step runs no hooks."""

    def __init__(self, inner):
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self):
        self.inner.step()


class Perturbing(torch.optim.Optimizer):
    """An optimiser around another whose own step is never called, as SAM's."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def second_step(self):
        self.inner.step()


@pytest.mark.parametrize("wrap", [Wrapper, Perturbing])
def test_a_wrapper_of_an_optimiser_is_followed_by_the_steps_of_the_one_inside(wrap):
    one, other = network(), network()
    other.load_state_dict(one.state_dict())
    optimizer, inside = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (one, other))
    wrapper = wrap(inside)
    follow_optimizer(one, optimizer)
    follow_optimizer(other, wrapper)
    for _ in range(4):
        x = images()
        for model, step in ((one, optimizer.step), (other, getattr(wrapper, "second_step", wrapper.step))):
            gradients(model, x)
            step()
    assert steps_of(other) == [4] * 3
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_an_optimiser_whose_step_runs_no_hooks_is_refused():
    class Bare(torch.optim.Optimizer):
        def __init__(self, parameters):
            self.param_groups = [{"params": list(parameters)}]

        def step(self):
            pass

    model = network()
    with pytest.raises(TypeError, match=r"the step of a Bare runs no hooks; call advance_branches_\(model, step\)"):
        follow_optimizer(model, Bare(model.parameters()))


def test_moments_that_are_quantised_cannot_be_held():
    class Quantised(torch.optim.SGD):
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["moment"] = torch.zeros_like(parameter, dtype=torch.uint8)

    layer = stochastic_conv()
    optimizer = Quantised(layer.parameters())
    follow_optimizer(layer, optimizer)
    with pytest.raises(ValueError, match=r"the moments of a Quantised, since 'moment' is quantised.*hold_idle=False"):
        optimizer.step()
    follow_optimizer(layer, optimizer, hold_idle=False)
    optimizer.step()
    assert steps_of(layer) == [1]


def test_moments_of_an_optimiser_inside_are_held():
    """As in ZeroRedundancyOptimizer, where the optimiser inside holds some of the parameters."""

    class Sharded(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(list(parameters), {})
            self.inner = torch.optim.SGD(self.param_groups[0]["params"][:1], 0.1, momentum=0.9)

        def step(self):
            self.inner.step()

    layer = stochastic_conv()
    optimizer = Sharded(layer.parameters())
    first = optimizer.param_groups[0]["params"][0]
    follow_optimizer(layer, optimizer)
    for _ in range(6):
        gradients(layer, images())
        name = next(name for name, p in layer.named_parameters() if p is first)
        state = optimizer.inner.state[first]
        old, at_this_step = copy.deepcopy(state.get("momentum_buffer")), copy.deepcopy(layer)
        optimizer.step()
        new = state["momentum_buffer"]
        old = torch.zeros_like(new) if old is None else old
        assert torch.equal(idle_part(at_this_step, name, old), idle_part(at_this_step, name, new))


def test_a_copy_of_a_network_and_its_optimizer_warns_that_nobody_advances_it():
    """torch copies no hooks of an optimiser, so the copy does not follow it."""
    model, x = stochastic_conv("with norm"), images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    follow_optimizer(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gradients(model, x)
        optimizer.step()
        model(x)
    copied, its_optimizer = copy.deepcopy((model, optimizer))
    with pytest.warns(UserWarning, match="nobody advances its step"):
        gradients(copied, x)
    follow_optimizer(copied, its_optimizer)
    its_optimizer.step()
    assert copied.fusion.key[2] == model.fusion.key[2] + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied(x)
        copy.deepcopy(model).eval()(x)
        torch.optim.swa_utils.update_bn([x], AveragedModel(model))  # in training mode, but it trains nothing


@pytest.mark.parametrize("kind_of_optimizer", ["SGD", "Adam", "AdamW"])
def test_without_holding_decay_and_momentum_move_idle_branches(kind_of_optimizer):
    layer = stochastic_conv()
    optimizer = OPTIMIZERS[kind_of_optimizer](layer.parameters())
    twin = copy.deepcopy(layer)
    plain_optimizer = OPTIMIZERS[kind_of_optimizer](twin.parameters())
    follow_optimizer(layer, optimizer, hold_idle=False)
    for step in range(4):
        x = images()
        advance_branches_(twin, step)
        assert drawn(layer) == drawn(twin)
        for m, o in ((layer, optimizer), (twin, plain_optimizer)):
            gradients(m, x)
            before = m.fusion.weight.detach().clone()
            at_this_step = copy.deepcopy(m)
            o.step()
            old, new = (idle_part(at_this_step, "fusion.weight", W) for W in (before, m.fusion.weight))
            assert (old != new).float().mean() > 0.9
    for mine, other in zip(layer.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_holding_is_training_each_branch_with_an_optimiser_of_its_own():
    """The paper's wording: only the active branches train. T small layers, each with its own momentum, say the same."""
    layer = DCLLinear(5, 6, branches=3, width=2, strategy="stochastic", dtype=torch.float64)
    seed_branches_(layer, 8)
    names = ["branch.weight", "fusion.weight", "fusion.bias"]
    branches = []
    for t, (start, end) in enumerate(starts_of(layer.widths)):
        rows = {"branch.weight": slice(start, end), "fusion.weight": slice(start, end), "fusion.bias": t}
        branches.append([layer.get_parameter(name).detach()[rows[name]].clone().requires_grad_() for name in names])

    def make(parameters):
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.02)

    own = [make(branch) for branch in branches]
    optimizer = make(layer.parameters())
    follow_optimizer(layer, optimizer)
    for _ in range(12):
        x = torch.randn(7, 5, dtype=torch.float64)
        pair = drawn(layer)[0]
        gradients(layer, x)
        optimizer.step()
        theta_and_W = [branches[t] for t in pair]
        z = plain_fusion([x @ theta.t() @ W + bias for theta, W, bias in theta_and_W], 1e-2)
        for t in pair:
            own[t].zero_grad()
        z.square().sum().backward()
        for t in pair:
            own[t].step()
    for position, name in enumerate(names):
        expected = [branch[position] for branch in branches]
        joined = torch.stack(expected) if name == "fusion.bias" else torch.cat(expected)
        torch.testing.assert_close(layer.get_parameter(name), joined, rtol=1e-9, atol=1e-11)


def test_parameters_of_other_optimisers_and_layers_are_left_alone():
    model = network()
    follow_optimizer(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    other = torch.optim.SGD(model[5].parameters(), lr=0.1, weight_decay=0.1)
    gradients(model, images())
    before = copy.deepcopy(model.state_dict())
    other.step()
    assert not torch.equal(model[5].weight, before["5.weight"])
    assert torch.equal(model[0].branch.weight, before["0.branch.weight"])
    assert torch.equal(model[0].fusion.key, before["0.fusion.key"])


def test_frozen_layers_stay_frozen():
    model = network()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    follow_optimizer(model, optimizer)
    before = copy.deepcopy(model[0].state_dict())
    for _ in range(3):
        optimizer.zero_grad()
        model(images()).sum().backward()
        optimizer.step()
    for name, parameter in model[0].named_parameters():
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize("hold_idle", [True, False])
def test_a_removed_handle_follows_no_more(hold_idle):
    layer = stochastic_conv()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3, momentum=0.9, weight_decay=0.1)
    handle = follow_optimizer(layer, optimizer, hold_idle=hold_idle)
    gradients(layer, images())
    optimizer.step()
    assert layer.fusion.key[2] == 1
    handle.remove()
    handle.remove()
    gradients(layer, images())
    at_this_step = copy.deepcopy(layer)
    optimizer.step()
    assert layer.fusion.key[2] == 1
    new, old = (idle_part(at_this_step, "fusion.weight", m.fusion.weight) for m in (layer, at_this_step))
    assert not torch.equal(new, old)


def steps_of(model):
    return [fusion.key[2].item() for fusion in fusions(model)]


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel], ids=["the same", "wrapped"])
@pytest.mark.parametrize("hold_idle", [True, False])
def test_following_the_same_optimiser_twice_advances_once_a_step(hold_idle, wrap):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)
    first = follow_optimizer(model, optimizer, hold_idle=not hold_idle)
    for _ in range(3):
        second = follow_optimizer(wrap(model), optimizer, hold_idle=hold_idle)
    assert len(optimizer._optimizer_step_post_hooks) == 1
    for step in range(1, 4):
        gradients(model, images())
        before = copy.deepcopy(model)
        optimizer.step()
        assert steps_of(model) == [step] * 3
    idle = [idle_part(before[0], "fusion.weight", m[0].fusion.weight) for m in (before, model)]
    assert torch.equal(*idle) == hold_idle
    first.remove()
    gradients(model, images())
    optimizer.step()
    assert steps_of(model) == [4] * 3
    second.remove()
    optimizer.step()
    assert steps_of(model) == [4] * 3


def test_a_part_that_follows_again_leaves_the_rest_with_the_first_call():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    follow_optimizer(model, optimizer)
    part = follow_optimizer(model[0], optimizer)
    gradients(model, images())
    optimizer.step()
    assert steps_of(model) == [1] * 3
    part.remove()
    optimizer.step()
    assert steps_of(model) == [1, 2, 2]


def test_a_new_optimiser_takes_over_from_one_that_is_not_used_any_more():
    model = network()
    old = torch.optim.SGD(model.parameters(), lr=0.01)
    follow_optimizer(model, old)
    new = torch.optim.SGD(model.parameters(), lr=0.01)
    follow_optimizer(model, new)
    gradients(model, images())
    new.step()
    assert steps_of(model) == [1] * 3


def test_two_optimisers_of_one_layer_hold_its_idle_branches_and_advance_once():
    """Matrices in one, biases in another, as with Muon and AdamW."""
    layer = stochastic_conv()
    twin = copy.deepcopy(layer)

    def make(parameters):
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)

    weights = [p for p in layer.parameters() if p.dim() > 2 or p is layer.fusion.weight]
    two = [make(weights), make([layer.fusion.bias])]
    one = [make(twin.parameters())]
    for model, optimizers in ((layer, two), (twin, one)):
        for optimizer in optimizers:
            follow_optimizer(model, optimizer)
    for step in range(1, 6):
        x = images()
        for model, optimizers in ((layer, two), (twin, one)):
            gradients(model, x)
            for optimizer in optimizers:
                optimizer.step()
        assert steps_of(layer) == steps_of(twin) == [step]
        for mine, other in zip(layer.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine, other)


def test_an_optimiser_is_not_kept_alive_by_being_followed():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    follow_optimizer(model, optimizer)
    seen = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize("hold_idle", [True, False])
def test_an_optimiser_made_before_the_conversion_is_refused(hold_idle):
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    plan = dcl.plan(model, example=torch.randn(2, 6), branches=3, strategy="stochastic", width=2)
    dcl.convert_(model, plan.only("0"), init="random")
    message = r"the AdamW holds no parameter of the stochastic layers \(the first is '0'\).*make it afterwards"
    with pytest.raises(ValueError, match=message):
        follow_optimizer(model, optimizer, hold_idle=hold_idle)
    follow_optimizer(model, torch.optim.AdamW(model.parameters()), hold_idle=hold_idle)


def test_an_optimiser_without_frozen_stochastic_layers_is_followed():
    model = network()
    for layer in (model[0], model[2], model[4]):
        layer.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    follow_optimizer(model, optimizer)
    model(images()).sum().backward()
    optimizer.step()
    assert steps_of(model) == [1] * 3


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_idle_branches_of_a_pruned_second_stage_cannot_be_held(name):
    layer = stochastic_conv()
    prune.l1_unstructured(layer.fusion, name, 0.5)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=rf"fusion\.{name} is flattened, pruned or parametrized.*hold_idle=False"):
        follow_optimizer(nn.Sequential(layer), optimizer)
    follow_optimizer(nn.Sequential(layer), optimizer, hold_idle=False)


def test_idle_branches_of_a_layer_with_an_adapter_cannot_be_held():
    """A low-rank adapter, as peft's, has parameters that all branches share."""
    layer = stochastic_conv()
    layer.branch.down = nn.Conv2d(3, 2, 3, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"branch\.down\.weight is .* of an adapter.*hold_idle=False"):
        follow_optimizer(nn.Sequential(layer), optimizer)
    layer.branch.down.requires_grad_(False)
    follow_optimizer(nn.Sequential(layer), optimizer)
    layer(images()).sum().backward()
    optimizer.step()
    assert steps_of(layer) == [1]


# Averaging


AVERAGES = {
    "mean": {},
    "moving": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "moving, one by one": {"avg_fn": get_ema_avg_fn(0.9)},
}


@pytest.mark.parametrize("arguments", AVERAGES.values(), ids=AVERAGES)
def test_an_average_with_buffers_computes_saves_loads_and_trains_on(arguments, tmp_path):
    """Torch averages the integers of the draw as well, which eval does not look at."""
    torch.manual_seed(0)
    model = stochastic_conv("with norm")
    seed_branches_(model, 2**40 + 3)
    averaged = AveragedModel(model, use_buffers=True, **arguments)
    expected, share = None, 1.0
    for step in range(5):
        advance_branches_(model, step)
        model(images())
        with torch.no_grad():
            model.fusion.weight.add_(torch.randn_like(model.fusion.weight))
        averaged.update_parameters(model)
        now = {n: t.clone() for n, t in model.state_dict().items() if t.is_floating_point()}
        share = 1 / (step + 1) if not arguments else 0.1 if step else 1.0
        expected = now if expected is None else {n: (1 - share) * t + share * now[n] for n, t in expected.items()}
    by_hand = stochastic_conv("with norm").eval()
    by_hand.load_state_dict(expected, strict=False)
    x = images()
    torch.testing.assert_close(averaged.eval()(x), by_hand(x), rtol=1e-4, atol=1e-5)

    dcl.save_model(averaged, tmp_path / "averaged.safetensors")
    loaded = dcl.load_model(stochastic_conv("with norm"), tmp_path / "averaged.safetensors").eval()
    assert torch.equal(loaded(x), averaged(x))

    follow_optimizer(loaded, torch.optim.SGD(loaded.parameters(), lr=0.1))
    assert drawn(loaded) == [tuple(draw_pair(loaded.fusion.key, 4).tolist())]
    seed_branches_(loaded, 2**40 + 3)
    assert trajectory(loaded, range(9)) == trajectory(model, range(9))


def test_following_goes_on_after_a_resume():
    """Weights, moments and draws after 3 + 3 steps with a save and load between are those after 6."""

    def start():
        torch.manual_seed(0)
        model = network().double()
        seed_branches_(model, 6)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        follow_optimizer(model, optimizer)
        return model, optimizer

    batches = [images(dtype=torch.float64) for _ in range(6)]

    def train(model, optimizer, part):
        for x in part:
            gradients(model, x)
            optimizer.step()

    model, optimizer = start()
    train(model, optimizer, batches)
    first, first_optimizer = start()
    train(first, first_optimizer, batches[:3])
    second, second_optimizer = start()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    second_optimizer.load_state_dict(copy.deepcopy(first_optimizer.state_dict()))
    train(second, second_optimizer, batches[3:])
    for (name, tensor), expected in zip(second.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(tensor, expected), name


# The warning


def test_training_without_anybody_advancing_warns_once():
    model = network()
    with pytest.warns(UserWarning, match="advance_branches_.*follow_optimizer") as record:
        model(images())
    assert len(record) == 3, "one for each of the three layers"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(images())


@pytest.mark.parametrize("how", ["advance", "named step", "optimizer", "eval", "deterministic"])
def test_no_warning_where_none_is_due(how):
    model = network() if how != "deterministic" else nn.Sequential(DCLConv2d(3, 8, 3, branches=3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if how == "advance":
            advance_branches_(model)
        elif how == "named step":
            advance_branches_(model, 0)
        elif how == "optimizer":
            follow_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
        elif how == "eval":
            model.eval()
        model(images())
