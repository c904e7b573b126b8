"""The runner, on a recipe of tiny networks: stopped, killed, damaged or failing, it gives the same outcomes."""

import dataclasses
import itertools
import json
import os
import signal
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torch_dcl.experiments import runner
from torch_dcl.experiments.protocol import Job, Listener, Outcome, Recipe, content_hash
from torch_dcl.experiments.ranks import StopRequest
from torch_dcl.experiments.runner import concurrent_groups, minutes_of, outcomes_of, plan_fleets, run
from torch_dcl.experiments.settings import Config, SettingError, setting, with_settings
from torch_dcl.fleet import Fleet, Member, Schedule
from torch_dcl.fleet.run_folder import RunError, RunFolder

STEPS, EPOCHS = 4, 2


@dataclasses.dataclass(frozen=True)
class ToyConfig(Config):
    units: tuple[str, ...] = setting(("wide", "narrow"), "which", choices=("wide", "narrow", "deep"), what="unit")
    rates: tuple[float, ...] = setting((0.05, 0.1), "to try", above=0, most=1)
    seeds: int = setting(2, "how many", least=1, most=100)
    careful: bool = setting(False, "whether")


class Toy(Recipe[ToyConfig]):
    """A trial for every rate, then every seed at the best one."""

    name = "toy"
    config_type = ToyConfig
    salt = 0

    def prepare(self, report):
        drawn = torch.Generator().manual_seed(self.salt)
        self.data = torch.randint(0, 256, (20, 6, 6), dtype=torch.uint8, generator=drawn), torch.arange(20) % 4
        report("20 images")

    def asked(self):
        return {**dataclasses.asdict(self.config), "sha256": content_hash(self.data)}

    def jobs(self, outcomes):
        trials = {u: [Job(u, "toy", 100, lr, "choose") for lr in self.config.rates] for u in self.config.units}
        named = list(itertools.chain(*trials.values()))
        if any(job not in outcomes for job in named):
            return named
        best = {unit: min(jobs, key=lambda job: outcomes[job].test_loss).lr for unit, jobs in trials.items()}
        return named + [Job(u, "toy", seed, best[u]) for u in self.config.units for seed in range(self.config.seeds)]

    def total(self):
        return len(self.config.units) * (len(self.config.rates) + self.config.seeds)

    at_once = 12

    def fleet(self, jobs):
        torch.manual_seed(jobs[0].seed)
        width = {"wide": 9, "narrow": 5, "deep": 7}[jobs[0].network]
        networks = [nn.Sequential(nn.Flatten(), nn.Linear(36, width), nn.ReLU(), nn.Linear(width, 4)) for _ in jobs]
        members = [Member(job.network, "toy", job.seed, job.lr, Schedule(EPOCHS)) for job in jobs]
        return Fleet(networks, members, {"toy": self.data}, batch=5, stacked=False)

    def judge(self, _jobs):
        return {"toy": self.data}

    def result(self, folder):
        return sorted(outcomes_of(folder).values(), key=lambda outcome: str(outcome.job))

    def shown(self, _result, _width):
        return []


class Told(Listener):
    """A listener that remembers."""

    def __init__(self):
        self.lines, self.epochs, self.began = [], [], None

    def begin(self, before, total):
        self.began = before, total

    def on_epoch(self, at):
        self.epochs.append((at.name, at.epoch))

    def report(self, line):
        self.lines.append(line)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The outcomes of a run without a break."""
    return run(Toy(ToyConfig()), tmp_path_factory.mktemp("whole") / "run").result


def toy(**settings):
    return Toy(ToyConfig(**settings))


# One run


def test_later_jobs_depend_on_earlier_outcomes_and_everything_is_told(whole, tmp_path):
    told = Told()
    summary = run(toy(), tmp_path / "run", listener=told, files={"recipe.toml": b"seeds = 2\n"})
    assert summary.complete
    assert summary.result == whole
    assert [outcome.job.phase for outcome in whole].count("report") == 4
    assert told.began == (0, 8)
    assert told.epochs[:3] == [("wide on toy", 0), ("wide on toy", 1), ("wide on toy", 2)]
    assert (tmp_path / "run" / "recipe.toml").read_text() == "seeds = 2\n"
    assert "20 images" in told.lines
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "environment.jsonl", "lock", "log.txt", "metrics.jsonl", "minutes.jsonl", "outcomes.jsonl", "recipe.json",
        "recipe.toml",
    ]  # fmt: skip


def test_a_finished_run_trains_nothing_again(whole, tmp_path, monkeypatch):
    run(toy(), tmp_path)
    monkeypatch.setattr(Fleet, "_one_step", lambda _: pytest.fail("trained"))
    told = Told()
    assert run(toy(), tmp_path, resume=True, listener=told).result == whole
    assert "8 of 8 entries are done already" in told.lines


def test_the_outcomes_of_a_fleet_are_one_line(tmp_path):
    run(toy(), tmp_path)
    lines = RunFolder.inspect(tmp_path).read("outcomes")
    assert [len(line["outcomes"]) for line in lines] == [2, 2, 2, 2]


# Breaks


@pytest.mark.parametrize("step", range(0, 4 * STEPS * EPOCHS, 5))
@pytest.mark.parametrize("every", [0.0, 1e9])
def test_a_run_killed_at_any_step_gives_the_same_outcomes(whole, tmp_path, killed_at, step, every):
    with killed_at(step):
        run(toy(), tmp_path, every=every)
    assert run(toy(), tmp_path, resume=True).result == whole


@pytest.fixture
def steps(monkeypatch):
    """The steps that are taken, and whether there were so many of them."""

    class Steps(list):
        def reach(self, count):
            return lambda: len(self) >= count

    real, taken = Fleet._one_step, Steps()
    monkeypatch.setattr(Fleet, "_one_step", lambda fleet: (taken.append(fleet), real(fleet)))
    return taken


@pytest.mark.parametrize("stop", [1, STEPS, STEPS + 2, 3 * STEPS, 5 * STEPS + 1])
def test_a_run_that_is_asked_to_stop_saves_between_two_steps_and_trains_none_twice(whole, tmp_path, steps, stop):
    assert not run(toy(), tmp_path, should_stop=steps.reach(stop)).complete
    assert len(steps) == stop
    assert run(toy(), tmp_path, resume=True).result == whole
    assert len(steps) == 4 * STEPS * EPOCHS


@pytest.mark.parametrize("ends", [True, False])
def test_fleets_that_would_not_end_in_time_are_not_begun_where_that_is_asked(tmp_path, monkeypatch, ends):
    clock, train = [0.0], runner.train_concurrently

    def train_slowly(*given):  # ten seconds an epoch, so twenty a fleet
        train(*given)
        clock[0] += 10.0

    monkeypatch.setattr(runner, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(runner, "train_concurrently", train_slowly)
    monkeypatch.setattr(Toy, "ends_fleets", ends)
    assert not run(toy(), tmp_path, seconds=25.0).complete
    assert len(outcomes_of(RunFolder.inspect(tmp_path))) == 2  # one fleet
    assert [file.name[13:] for file in tmp_path.glob("fleets/*")] == ([] if ends else ["00001-000000.safetensors"])
    assert clock == [20.0 if ends else 30.0]


def test_a_run_whose_time_is_up_goes_on_by_an_epoch_a_call(whole, tmp_path):
    calls, summary = 0, runner.Summary(False)
    while not summary.complete:
        summary = run(toy(), tmp_path, seconds=0.0, resume=calls > 0)
        calls += 1
        assert calls < 20
    assert calls == 4 * EPOCHS
    assert summary.result == whole


def test_the_minutes_before_an_interruption_count(tmp_path, killed_at, monkeypatch):
    clock = [0.0]  # a minute a step
    real = Fleet._one_step
    monkeypatch.setattr(Fleet, "_one_step", lambda fleet: (clock.__setitem__(0, clock[0] + 60.0), real(fleet)))
    monkeypatch.setattr(runner, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    with killed_at(3):
        run(toy(), tmp_path)
    assert minutes_of(RunFolder.inspect(tmp_path)) == 3
    clock[0] += 1e6  # until somebody resumes it
    run(toy(), tmp_path, resume=True)
    assert minutes_of(RunFolder.inspect(tmp_path)) == 3 + 4 * STEPS * EPOCHS


def test_a_kill_that_nothing_survives_loses_the_minutes_since_the_last_checkpoint_alone(
    tmp_path, killed_at, monkeypatch
):
    """As SIGKILL does: what runs at the end of a call does not run."""
    monkeypatch.setattr(runner.time, "perf_counter", itertools.count(step=60.0).__next__)
    real, notes = RunFolder.append, []

    def append(folder, name, *records):
        if name == "minutes":
            notes.append(records[0]["training"])
        real(folder, name, *records)

    monkeypatch.setattr(RunFolder, "append", append)
    with killed_at(STEPS + 1):
        run(toy(), tmp_path, every=0.0)
    assert len(notes) == 2  # with the checkpoint of the first epoch, and at the end
    assert all(note > 0 for note in notes)


@pytest.fixture
def interrupts():
    """Whatever runs the tests may ignore them, as a shell does for what it runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_to_stop_and_a_second_interrupt_does_not_wait(number):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    told = []
    with StopRequest(told.append) as stop:
        assert not stop()
        os.kill(os.getpid(), number)
        assert stop()
        assert stop.signal == number
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert len(told) == 1
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_an_ignored_signal_stays_ignored(monkeypatch):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop()
    finally:
        signal.signal(signal.SIGINT, before)


# Checkpoints


@pytest.fixture
def stopped(tmp_path, steps):
    """The checkpoints of a run that was stopped in the second epoch of its first fleet."""
    run(toy(), tmp_path, every=0.0, should_stop=steps.reach(STEPS + 2))
    return sorted((tmp_path / "fleets").iterdir())


def test_the_last_two_checkpoints_are_kept(stopped):
    first, second = stopped
    assert first.name.endswith("-00001-000000.safetensors")
    assert second.name.endswith("-00001-000002.safetensors")


@pytest.mark.parametrize("damaged", [1, 2])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(whole, tmp_path, stopped, damaged):
    for file in stopped[::-1][:damaged]:
        content = bytearray(file.read_bytes())
        content[-5] ^= 1
        file.write_bytes(content)
    told = Told()
    assert run(toy(), tmp_path, resume=True, listener=told).result == whole
    named = [line for line in told.lines if "is damaged or was altered" in line]
    assert len(named) == damaged
    assert f"the earlier {stopped[0].name} is used" in named[0]
    assert damaged == 1 or "the fleet starts from the beginning" in named[1]
    assert any("resumed after epoch 1 of 2" in line for line in told.lines) == (damaged == 1)


def test_fleets_of_another_size_leave_the_checkpoints_aside_and_say_so(tmp_path, stopped):
    other, told = toy(), Told()
    other.at_once = 1
    assert run(other, tmp_path, resume=True, listener=told).complete
    unused = [line.split()[0] for line in told.lines if "belongs to no fleet of this run" in line]
    assert unused == [file.name for file in stopped]
    assert not (tmp_path / "fleets").exists()


def test_checkpoints_are_gone_when_the_run_is_done(tmp_path, stopped):
    run(toy(), tmp_path, resume=True)
    assert not (tmp_path / "fleets").exists()


# What must not be mixed or lost


def test_a_resume_on_other_data_is_refused(tmp_path, stopped):
    other = toy()
    other.salt = 1
    with pytest.raises(RunError, match=r"other settings or data:\n  sha256: "):
        run(other, tmp_path, resume=True)


def test_the_loser_of_two_starts_writes_nothing(tmp_path):
    run(toy(), tmp_path, files={"recipe.toml": b"first"})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with RunFolder.open(tmp_path, RunFolder.inspect(tmp_path).recipe, resume=True):
        pass
    with pytest.raises(RunError, match="holds a run already"):
        run(toy(seeds=3), tmp_path, files={"recipe.toml": b"second"})
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert {name for name in before if before[name] != after[name]} == {
        "environment.jsonl"
    }  # of the one that opened it


def test_a_fleet_that_fails_is_named_and_the_others_are_trained(whole, tmp_path, monkeypatch):
    real = Toy.fleet

    def broken(recipe, jobs):
        if jobs[0].network == "wide" and jobs[0].phase == "report":
            raise torch.OutOfMemoryError("no memory\nsecond line")
        return real(recipe, jobs)

    told = Told()
    with monkeypatch.context() as patched:
        patched.setattr(Toy, "fleet", broken)
        summary = run(toy(), tmp_path, listener=told)
    assert not summary.complete
    ((jobs, error),) = summary.failures
    assert [(job.network, job.seed) for job in jobs] == [("wide", 0), ("wide", 1)]
    assert error == "OutOfMemoryError: no memory"
    assert len(outcomes_of(RunFolder.inspect(tmp_path))) == 6
    assert json.loads((tmp_path / "failures.jsonl").read_text())["error"] == error
    assert run(toy(), tmp_path, resume=True).result == whole


def test_a_full_disk_ends_the_run(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Fleet, "save", full)
    with pytest.raises(OSError, match="No space left"):
        run(toy(), tmp_path, seconds=0.0)


@pytest.mark.parametrize("name", ["outcomes.jsonl", "recipe.toml", "table1.json", "log.txt", "fleets"])
def test_a_symbolic_link_in_a_stranger_s_folder_is_not_written_through(tmp_path, name):
    target, folder = tmp_path / "precious", tmp_path / "run"
    if name == "fleets":
        target.mkdir()
    else:
        target.write_text("mine")
    run(toy(), folder, seconds=0.0)
    (folder / name).unlink(missing_ok=True) if name != "fleets" else [f.unlink() for f in (folder / name).iterdir()]
    if name == "fleets":
        (folder / name).rmdir()
    (folder / name).symlink_to(target)
    with pytest.raises(RunError, match=r"is a symbolic link, which a run does not write through; remove it"):
        run(toy(), folder, resume=True, files={"recipe.toml": b"x"})
    assert list(target.iterdir()) == [] if name == "fleets" else target.read_text() == "mine"


# Jobs that train nothing


class Counting(Toy):
    """A recipe whose jobs are computed."""

    name = "counting"

    def jobs(self, _outcomes):
        return [Job(unit, "toy", 0, 0.0) for unit in self.config.units]

    def total(self):
        return len(self.config.units)

    def compute(self, jobs):
        if jobs[0].network == "deep":
            raise ValueError("too deep")
        return [Outcome(job, float("nan"), 0.0, 0.0, None, extra={"length": len(job.network)}) for job in jobs]


def test_jobs_that_train_nothing_are_computed_kept_and_may_fail(tmp_path):
    config = ToyConfig(units=("wide", "narrow", "deep"))
    told = Told()
    summary = run(Counting(config), tmp_path, listener=told)
    assert told.epochs == [("wide on toy", 0), ("wide on toy", 1), ("narrow on toy", 0), ("narrow on toy", 1)]
    assert [failure.error for failure in summary.failures] == ["ValueError: too deep"]
    known = outcomes_of(RunFolder.inspect(tmp_path))
    assert {job.network: outcome.extra["length"] for job, outcome in known.items()} == {"wide": 4, "narrow": 6}
    assert all(outcome.error != outcome.error for outcome in known.values())  # NaN, through JSON and back


# Jobs to fleets


def test_jobs_of_a_group_are_fleets_of_at_most_so_many_in_their_order():
    jobs = [Job(network, "set", seed, 0.1) for seed in range(3) for network in "ab"]
    fleets = plan_fleets([*jobs, jobs[0]], lambda job: job.network, 2)
    assert [[f"{job.network}{job.seed}" for job in fleet] for fleet in fleets] == [
        ["a0", "a1"],
        ["a2"],
        ["b0", "b1"],
        ["b2"],
    ]


def test_jobs_of_several_networks_count_as_so_many():
    jobs = [Job("a", "set", seed, 0.1) for seed in (3, 1, 2, 5, 1)]
    fleets = plan_fleets(jobs, lambda job: job.network, 4, lambda job: job.seed)
    assert [[job.seed for job in fleet] for fleet in fleets] == [[3, 1], [2], [5]]
    on_gpu = concurrent_groups(fleets, lambda job: job.network, 6, "cuda", lambda job: job.seed)
    assert on_gpu == [fleets[:2], fleets[2:]]


def test_which_fleets_train_concurrently():
    """Neighbours of one kind, on a GPU, as far as there is room."""
    sizes = [("a", 2), ("a", 2), ("a", 1), ("b", 1), ("b", 6), ("b", 1)]
    fleets = [[Job(kind, "set", seed, 0.1) for seed in range(size)] for kind, size in sizes]
    on_gpu = concurrent_groups(fleets, lambda job: job.network, 5, "cuda")
    assert on_gpu == [fleets[:3], fleets[3:4], fleets[4:5], fleets[5:]]
    assert concurrent_groups(fleets, lambda job: job.network, 4, "cuda:1")[0] == fleets[:2]
    assert concurrent_groups(fleets, lambda job: job.network, 5, "cpu") == [[fleet] for fleet in fleets]
    assert concurrent_groups([], lambda job: job.network, 5, "cuda") == []


def test_fleets_that_train_concurrently_give_the_outcomes_of_fleets_one_by_one(whole, tmp_path, monkeypatch, killed_at):
    real = concurrent_groups
    monkeypatch.setattr(
        runner, "concurrent_groups", lambda fleets, _, most, *__: real(fleets, lambda _: 0, most, "cuda")
    )
    with killed_at(11):
        run(toy(), tmp_path, every=0.0)
    told = Told()
    assert run(toy(), tmp_path, resume=True, listener=told).result == whole
    assert any("wide, narrow on toy, 4 networks" in line for line in told.lines)


# Settings


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"seeds": "5"}, ("seeds", 5)),
        ({"rates": "0.1, 0.2"}, ("rates", (0.1, 0.2))),
        ({"rates": [1]}, ("rates", (1.0,))),
        ({"units": "DEEP,wide"}, ("units", ("wide", "deep"))),
        ({"units": "all"}, ("units", ("wide", "narrow", "deep"))),
        ({"careful": "yes"}, ("careful", True)),
        ({"careful": False}, ("careful", False)),
    ],
)
def test_settings_are_read_as_what_they_are(settings, found):
    assert getattr(with_settings(ToyConfig(), settings), found[0]) == found[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": 1}, "there is no setting 'seed'; known are units, rates, seeds, careful"),
        ({"seeds": 0}, "seeds must be at least 1 and at most 100, not 0"),
        ({"seeds": 2.5}, "seeds must be a whole number, not 2.5"),
        ({"seeds": True}, "seeds must be a whole number, not True"),
        ({"rates": "0"}, "rates must be above 0 and at most 1, not 0"),
        ({"rates": "nan"}, "rates must be above 0 and at most 1, not nan"),
        ({"rates": ""}, "rates is empty; give some, such as --set rates=0.05,0.1"),
        ({"rates": 3}, "rates must be a list, not 3"),
        ({"units": "wde"}, "there is no unit 'wde'; known are wide, narrow, deep"),
        ({"careful": "maybe"}, 'careful must be "yes" or "no", not \'maybe\''),
    ],
)
def test_an_invalid_setting_is_refused_with_the_value_and_the_remedy(settings, message):
    with pytest.raises(SettingError) as caught:
        with_settings(ToyConfig(), settings)
    assert str(caught.value) == message


def test_data_is_known_by_its_content():
    one = torch.arange(6, dtype=torch.uint8)
    assert content_hash([one]) == content_hash([one.clone()])
    changed = one.clone()
    changed[3] ^= 1
    assert len({content_hash(t) for t in ([one], [changed], [one.view(2, 3)], [one.long()], [one, one])}) == 5
    assert content_hash([one.view(2, 3).t()]) == content_hash([one.view(2, 3).t().contiguous()])
