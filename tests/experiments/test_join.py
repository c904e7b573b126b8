"""A run folder as a queue: claims, stale claims, and processes that share a run to the outcomes of one."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.experiments.test_runner import Told, Toy, ToyConfig, toy
from tests.processes import Process, importing
from typer.testing import CliRunner

from torch_dcl.cli.app import app
from torch_dcl.experiments import ranks
from torch_dcl.experiments.ranks import Claims
from torch_dcl.experiments.recipes.imagenet import ImageNet, ImageNetConfig
from torch_dcl.experiments.recipes.table1 import Table1, Table1Config
from torch_dcl.experiments.run_reader import state_of
from torch_dcl.experiments.runner import key_of, outcomes_of, plan_fleets, run
from torch_dcl.experiments.settings import SettingError
from torch_dcl.fleet.run_folder import RunError, RunFolder


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(ranks.time, "monotonic", lambda: Clock.now)
    monkeypatch.setattr(ranks.time, "sleep", lambda seconds: setattr(Clock, "now", Clock.now + seconds))
    return Clock


def found_in(path):
    return sorted(outcomes_of(RunFolder.inspect(path)).values(), key=lambda outcome: str(outcome.job))


def test_one_of_many_gets_a_claim_that_all_of_them_saw_free(tmp_path, monkeypatch):
    together, really = threading.Barrier(16), os.open

    def open_together(*args):
        together.wait(60)
        return really(*args)

    monkeypatch.setattr(ranks.os, "open", open_together)
    workers = [Claims(tmp_path, f"-{number}", 60) for number in range(16)]
    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(lambda claims: claims.take("fleet"), workers)) == 1


def test_a_claim_is_stale_when_its_counter_stands_still_and_not_before(tmp_path, clock):
    holder, other, third = (Claims(tmp_path, name, 60) for name in ("-a", "-b", "-c"))
    assert holder.take("x")
    assert not other.take("x")
    for _ in range(5):
        clock.now += 50
        holder.beat()
        assert not other.take("x")
    clock.now += 59
    assert not other.take("x")
    clock.now += 1
    assert not third.take("x"), "it has not looked at it for long enough itself"
    assert other.take("x")
    assert not third.take("x")
    assert sorted(path.name for path in (tmp_path / "claims").iterdir()) == ["x.1", "x.2"]


def test_what_is_given_back_is_free_at_once(tmp_path):
    holder, other = (Claims(tmp_path, name, 60) for name in ("-a", "-b"))
    assert holder.take("x")
    assert not other.take("x")
    holder.give_back()
    assert other.take("x")


def test_a_process_that_joins_alone_does_all(tmp_path):
    whole = run(toy(), tmp_path / "whole").result
    told = Told()
    done = run(toy(), tmp_path / "run", listener=told, files={"recipe.toml": b"seeds = 2\n"}, join=True)
    assert done.complete
    assert done.result == whole
    assert told.began == (0, 8)
    assert (tmp_path / "run/recipe.toml").read_bytes() == b"seeds = 2\n"
    assert run(toy(), tmp_path / "run", join=True).complete


def test_what_a_dead_process_held_is_taken_up_at_its_checkpoint(tmp_path, clock, monkeypatch):
    monkeypatch.setenv("TORCH_DCL_TIMEOUT", "60")
    whole = run(toy(), tmp_path / "whole").result
    asked = iter(range(1000))
    run(toy(), tmp_path / "run", should_stop=lambda: next(asked) >= 9, join=True)
    kept = list((tmp_path / "run/fleets").iterdir())
    assert kept, "it was stopped inside of a fleet"
    dead = Claims(tmp_path / "run", "-dead", 60)
    known = outcomes_of(RunFolder.inspect(tmp_path / "run"))
    recipe = toy()
    recipe.prepare(lambda _: None)
    for fleet in plan_fleets(recipe.jobs(known), recipe.group, recipe.at_once):
        assert dead.take(key_of(fleet))
    trained = []
    real = Toy.fleet
    monkeypatch.setattr(Toy, "fleet", lambda self, jobs: trained.append(jobs) or real(self, jobs))
    told = Told()
    before = clock.now
    done = run(toy(), tmp_path / "run", listener=told, join=True)
    assert done.complete
    assert clock.now - before >= 60
    assert any("resumed after" in line for line in told.lines)
    assert done.result == whole


def test_a_result_whose_maker_died_is_made_by_the_next_process(tmp_path, clock, monkeypatch):
    monkeypatch.setenv("TORCH_DCL_TIMEOUT", "60")
    whole = run(toy(), tmp_path / "run", join=True).result
    (done,) = (tmp_path / "run/claims").iterdir()
    again, before = run(toy(), tmp_path / "run", join=True), clock.now
    assert (again.complete, again.result, clock.now) == (True, None, before), "it is there, and nobody waits"
    done.unlink()
    assert Claims(tmp_path / "run", "-dead", 60).take("result")
    assert run(toy(), tmp_path / "run", join=True).result == whole
    assert clock.now - before >= 60


def test_a_folder_that_processes_share_is_running_and_no_other_run_is_let_in(tmp_path):
    def resume_meanwhile():
        assert (state_of(tmp_path).state, state_of(tmp_path).pid) == ("running", os.getpid())
        with pytest.raises(RunError, match=f"in use by process {os.getpid()}"):
            run(toy(), tmp_path, resume=True)
        return True

    run(toy(), tmp_path, join=True, should_stop=resume_meanwhile)
    assert state_of(tmp_path).state == "incomplete"
    assert not list(tmp_path.glob("lock-*"))
    recipe = RunFolder.inspect(tmp_path).recipe
    with RunFolder.open(tmp_path, recipe, resume=True), pytest.raises(RunError, match="in use"):
        run(toy(), tmp_path, join=True)
    assert run(toy(), tmp_path, resume=True).complete


def test_a_fleet_that_fails_does_not_end_the_others_and_is_said_so(tmp_path, monkeypatch):
    real = Toy.fleet

    def failing(self, jobs):
        if jobs[0].network == "wide":
            raise RuntimeError("no room")
        return real(self, jobs)

    monkeypatch.setattr(Toy, "fleet", failing)
    done = run(toy(), tmp_path / "run", join=True)
    assert not done.complete
    assert [failure.error for failure in done.failures] == ["RuntimeError: no room"]
    monkeypatch.setattr(Toy, "fleet", real)
    assert run(toy(), tmp_path / "run", join=True).complete


def test_other_settings_and_a_recipe_of_shared_ranks_are_refused(tmp_path):
    run(toy(), tmp_path / "run", join=True)
    with pytest.raises(RunError, match="begun with other settings"):
        run(Toy(ToyConfig(seeds=3)), tmp_path / "run", join=True)
    with pytest.raises(SettingError, match="start it with torchrun"):
        run(ImageNet(ImageNetConfig(data="synthetic")), tmp_path / "other", join=True)
    done = CliRunner().invoke(app, ["run", "demo", "--join", "--resume"], prog_name="dcl")
    assert (done.exit_code, "leave --resume out" in done.output) == (2, True)


def test_a_process_whose_time_is_up_takes_no_further_fleet_and_waits_for_nobody(tmp_path):
    told = Told()
    assert not run(toy(), tmp_path / "run", join=True, seconds=0, listener=told).complete
    assert len([line for line in told.lines if line.startswith("time is up")]) == 1
    assert not list((tmp_path / "run/claims").iterdir()), "others may take at once what it had"


def test_a_link_in_the_folder_is_refused_by_a_process_that_joins(tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/outcomes.jsonl").symlink_to(tmp_path / "mine")
    with pytest.raises(RunError, match="symbolic link"):
        run(toy(), tmp_path / "run", join=True)
    assert (tmp_path / "mine").read_text() == "precious"


@pytest.mark.slow
def test_processes_that_join_share_the_work_and_give_the_numbers_of_one(tmp_path):
    command = ["-m", "torch_dcl", "run", "demo", "--set", "train_images=200", "--set", "test_images=50",
               "--set", "epochs=2", "--set", "seeds=2", "--set", "batch=50"]  # fmt: skip

    def start(*words):
        return Process([*command, *words], cwd=tmp_path, env=importing())

    assert start("--out", "one").wait(300) == 0
    workers = [start("--out", "many", "--join") for _ in range(3)]
    assert [worker.wait(300) for worker in workers] == [0, 0, 0]
    assert [(a.job, a.error, a.test_loss) for a in found_in(tmp_path / "many")] == [
        (b.job, b.error, b.test_loss) for b in found_in(tmp_path / "one")
    ]
    fleets = [record["fleet"] for record in RunFolder.inspect(tmp_path / "many").read("outcomes")]
    assert len(fleets) == len(set(fleets)), "no fleet was trained twice"
    one, many = (json.loads((tmp_path / name / "demo.json").read_text())["verdict"] for name in ("one", "many"))
    assert one == many


WORKER = """
import os, signal, sys
from torch_dcl.experiments.protocol import Listener
from torch_dcl.experiments.recipes.table1 import Table1, Table1Config
from torch_dcl.experiments.runner import run

class Dying(Listener):
    '''Kills its process after the second epoch of its second fleet.'''
    begun = 0

    def on_epoch(self, at):
        self.begun += at.epoch == 0
        if self.begun == 2 and at.epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)

config = Table1Config(
    sets=("MNIST-II-01",), models=("baseline", "A2"), seeds=12, data="excerpt", device="cpu", epochs=3, warmup=1,
    train_images=50, test_images=20, batch=25, most=4)
Table1.every = 0
run(Table1(config, "cpu"), "many", listener=Dying() if sys.argv[1] == "dies" else None, join=True)
"""


@pytest.mark.slow
def test_what_a_killed_process_held_is_finished_by_others_to_the_numbers_of_one(tmp_path):
    def start(word):
        return Process(["-c", WORKER, word], cwd=tmp_path, env=importing(TORCH_DCL_TIMEOUT="2"))

    assert start("dies").wait(300) == -9
    assert len(found_in(tmp_path / "many")) == 4
    assert list((tmp_path / "many/fleets").iterdir()), "its second fleet has a checkpoint"
    workers = [start("lives") for _ in range(2)]
    assert [worker.wait(300) for worker in workers] == [0, 0]
    config = Table1Config(
        sets=("MNIST-II-01",), models=("baseline", "A2"), seeds=12, data="excerpt", device="cpu", epochs=3, warmup=1,
        train_images=50, test_images=20, batch=25, most=4,
    )  # fmt: skip
    assert run(Table1(config, "cpu"), tmp_path / "one").complete
    one, many = ([(o.job, o.error, o.test_loss) for o in found_in(tmp_path / name)] for name in ("one", "many"))
    assert one == many
    assert len(many) == 24
