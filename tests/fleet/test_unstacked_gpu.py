"""Unstacked networks on a GPU: captured, on several streams, compiled, resumed; against the CPU and each other."""

import importlib.util

import pytest
import torch
import torch._inductor.utils
from tests.fleet.test_fleet import same_bits
from tests.fleet.test_unstacked import SMALL, learnt_otherwise, three_sets
from torch import nn

from torch_dcl.data.svhn import preprocess
from torch_dcl.fleet import Fleet, Inputs, Member, Schedule
from torch_dcl.fleet.concurrent import train_concurrently

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none here"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
]


@pytest.fixture(autouse=True)
def full_float32():
    allowed = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = allowed


def some(kind, *, epochs=2, networks=3, device="cuda", normalise=None, **changes):
    """A fleet of one kind; the same networks and images at every call."""
    torch.manual_seed(0)
    build, size, options = SMALL[kind]
    data = three_sets(size)
    made = [build() for _ in range(networks)]
    members = [Member(str(i), ("one", "two")[i % 2], i, 0.01, Schedule(epochs), 1e-3) for i in range(networks)]
    settings = {
        "batch": 8,
        "inputs": Inputs(normalise, pad=2, flip=True),
        "stacked": False,
        "deterministic": True,
        **options,
        **changes,
    }
    return Fleet(made, members, data, device=device, **settings), made


@pytest.mark.parametrize(("precision", "worst"), [("float32", 1e-3), ("float64", 1e-9)])
@pytest.mark.parametrize("kind", SMALL)
def test_they_train_as_on_the_cpu(kind, precision, worst):
    (here, start), (there, _) = (some(kind, device=device, precision=precision) for device in ("cuda", "cpu"))
    here.train()
    there.train()
    assert here._graph is not None
    for i, network in enumerate(start):
        ends = [fleet.network(i).double() for fleet in (here, there)]
        assert learnt_otherwise(*ends, network.double()) < worst


@pytest.mark.parametrize("kind", SMALL)
def test_in_bfloat16_their_losses_are_those_of_float32_on_the_cpu(kind):
    here, there = some(kind, precision="bfloat16")[0], some(kind, precision="float32", device="cpu")[0]
    here.train()
    there.train()
    for mine, theirs in zip(here.history.train_loss, there.history.train_loss, strict=True):
        assert mine == pytest.approx(theirs, rel=0.03)


def test_the_preprocessing_of_svhn_is_captured_as_well():
    (here, start), (there, _) = (
        some("wide residual", device=device, precision="float32", normalise=preprocess) for device in ("cuda", "cpu")
    )
    here.train()
    there.train()
    ends = [fleet.network(0).double() for fleet in (here, there)]
    assert learnt_otherwise(*ends, start[0].double()) < 1e-2


@pytest.mark.parametrize("kind", ["tiny", "overlapping pools", "wide residual"])
@pytest.mark.parametrize("streams", [2, 3])
def test_several_at_a_time_end_with_the_same_bits_as_one_after_another(kind, streams):
    (together, _), (apart, _) = some(kind, streams=streams, epochs=4), some(kind, epochs=4)
    together.train()
    apart.train()
    assert all(same_bits(together.network(i), apart.network(i)) for i in range(3))


def test_concurrent_fleets_of_several_architectures_end_with_the_same_bits_as_alone():
    kinds = {"tiny": 4, "overlapping pools": 2, "wide residual": 3}  # epochs
    concurrent, alone = ([some(kind, epochs=epochs)[0] for kind, epochs in kinds.items()] for _ in range(2))
    while any(fleet.epoch < fleet.epochs for fleet in concurrent):
        train_concurrently(concurrent)
    for one, other in zip(concurrent, alone, strict=True):
        other.train()
        assert one.history == other.history
        assert all(same_bits(one.network(i), other.network(i)) for i in range(3))


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_concurrent_fleets_do_not_share_the_partial_sums_of_their_products(precision):
    """Products over thousands of values are parted among processors, which leave their sums in cuBLAS's scratch."""

    def fleets():
        torch.manual_seed(0)
        data = {"one": (torch.randint(256, (512, 3, 40, 40), dtype=torch.uint8), torch.randint(10, (512,)))}
        for seed, width in enumerate((16, 24, 32, 40)):
            network = nn.Sequential(nn.Flatten(), nn.Linear(4800, width), nn.ReLU(), nn.Linear(width, 10))
            yield Fleet(
                [network], [Member("one", "one", seed, 1e-3, Schedule(8))], data, batch=16, device="cuda",
                precision=precision, stacked=False, deterministic=True,
            )  # fmt: skip

    concurrent, alone = list(fleets()), list(fleets())
    for _ in range(8):
        train_concurrently(concurrent)
    for one, other in zip(concurrent, alone, strict=True):
        assert one.history == other.train()
        assert same_bits(one.network(0), other.network(0))


@pytest.mark.parametrize("kind", ["tiny", "overlapping pools", "wide residual"])
def test_a_checkpoint_goes_on_bit_for_bit(kind, tmp_path):
    whole, before, after = (some(kind, epochs=4)[0] for _ in range(3))
    whole.train()
    before.train(2)
    before.save(tmp_path / "fleet")
    after.load(tmp_path / "fleet")
    after.train()
    assert all(same_bits(whole.network(i), after.network(i)) for i in range(3))


def test_compiled_networks_are_captured_and_train_to_much_the_same():
    (compiled, start), (plain, _) = (some("tiny", precision="float32", compile=c) for c in (True, False))
    compiled.train()
    plain.train()
    for i, network in enumerate(start):
        ends = [fleet.network(i).double() for fleet in (compiled, plain)]
        assert learnt_otherwise(*ends, network.double()) < 1e-3


def test_a_checkpoint_of_compiled_networks_goes_on_bit_for_bit_though_they_are_compiled_anew(tmp_path):
    def made():
        torch.compiler.reset()
        torch._inductor.utils.clear_caches()
        with torch._inductor.config.patch(autotune_local_cache=False):
            fleet = some("wide residual", epochs=4, compile=True)[0]
            fleet.train(2)
        return fleet

    whole, before = made(), made()
    whole.train()
    before.save(tmp_path / "fleet")
    torch.compiler.reset()
    torch._inductor.utils.clear_caches()
    after = some("wide residual", epochs=4, compile=True)[0]
    after.load(tmp_path / "fleet")
    after.train()
    assert all(same_bits(whole.network(i), after.network(i)) for i in range(3))
