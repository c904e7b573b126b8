"""Processes that share a run: who they are, what each takes, and that they open one folder in turn."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from torch_dcl.experiments.ranks import Rank, agree
from torch_dcl.fleet.run_folder import RunError, RunFolder


def test_a_process_by_itself_is_the_first_of_one_and_waits_for_nobody(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    alone = Rank.here()
    alone.wait()
    assert (alone, alone.part) == ((0, 1), "")


def test_torchrun_says_who_a_process_is(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (Rank.here(), Rank.here().part) == ((2, 8), "-2")


@given(things=st.lists(st.integers(), max_size=20), world=st.integers(1, 9))
def test_every_thing_is_in_one_share_and_shares_are_alike(things, world):
    shares = [Rank(number, world).share(things) for number in range(world)]
    assert sorted(thing for share in shares for thing in share) == sorted(things)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_only_cuda_without_a_number_becomes_the_processs_own_gpu(monkeypatch):
    taken = []
    monkeypatch.setattr("torch.cuda.set_device", taken.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert [Rank(11, 16).device(asked) for asked in ("cpu", "cuda:1", "cuda")] == ["cpu", "cuda:1", "cuda:3"]
    assert taken == ["cuda:3"]


def test_the_first_one_makes_the_folder_and_the_others_follow(tmp_path, monkeypatch):
    path, told = tmp_path / "run", []
    monkeypatch.setattr(Rank, "wait", lambda rank: told.append((rank.number, (path / "recipe.json").exists())))
    with Rank(0, 2).open(path, {"table": 1}, resume=False) as first, Rank(1, 2).open(path, {"table": 1}, resume=False):
        assert first.path == path
    # The first waits when it is there; the other waits before it looks, and goes on in it.
    assert told == [(0, True), (1, True)]
    assert RunFolder.inspect(path).recipe == {"table": 1}
    with pytest.raises(RunError, match="--resume"), Rank(0, 2).open(path, {"table": 1}, resume=False):
        pass


def test_a_rank_waits_for_weeks_unless_the_environment_sets_a_limit(monkeypatch):
    from torch_dcl.experiments import ranks

    waited = []
    monkeypatch.setattr(ranks, "join_group", lambda backend, seconds: waited.append((backend, seconds)))
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.delenv("TORCH_DCL_TIMEOUT", raising=False)
    Rank(0, 2).wait()
    monkeypatch.setenv("TORCH_DCL_TIMEOUT", "90")
    Rank(0, 2).wait()
    assert waited == [("gloo", 30 * 24 * 3600), ("gloo", 90.0)]


@pytest.mark.parametrize("world", [1, 2, 5])
def test_ranks_agree_on_a_new_name_at_every_start_though_the_store_is_the_old_one(world):
    store, names = dist.HashStore(), []
    store.set("asks 1", "a rank that ended")
    with ThreadPoolExecutor(world) as pool:
        for first in (0, world - 1):  # which asks first
            order = sorted(range(world), key=lambda rank: rank != first)
            names.append(set(pool.map(lambda rank: agree(store, rank, world, 60), order)))
    assert [len(name) for name in names] == [1, 1]
    assert names[0] != names[1]


def test_a_first_rank_that_no_other_asks_says_which_one_is_missing():
    with pytest.raises(RuntimeError, match="no sign of rank 1"):
        agree(dist.HashStore(), 0, 3, 0)
