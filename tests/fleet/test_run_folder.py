"""Run folders: what was written is read, one run at a time, and the folder knows where it ran."""

import contextlib
import errno
import fcntl
import json
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import torch_dcl
from torch_dcl.fleet import run_folder
from torch_dcl.fleet.run_folder import FORMAT, RunError, RunFolder, environment

RECIPE = {"seeds": 5, "sets": ["MNIST-II-01"], "images": None}
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def is_locked(path):
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        return False


# Records


@settings(max_examples=30)
@given(records=st.lists(st.dictionaries(st.text(), plain, max_size=3), max_size=5))
def test_records_come_back_in_order_and_as_they_were(tmp_path_factory, records):
    folder = RunFolder(tmp_path_factory.mktemp("run"), {})
    for record in records:
        folder.append("outcomes", record)
    assert folder.read("outcomes") == records


def test_several_records_are_one_write(tmp_path, monkeypatch):
    folder, synced, real = RunFolder(tmp_path, {}), [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(1), real(descriptor)))
    folder.append("outcomes", {"seed": 0}, {"seed": 1}, {"seed": 2})
    assert folder.read("outcomes") == [{"seed": 0}, {"seed": 1}, {"seed": 2}]
    assert len(synced) == 1


def test_nothing_written_is_nothing_read(tmp_path):
    with RunFolder.open(tmp_path / "run", RECIPE) as folder:
        assert folder.read("outcomes") == []


def test_records_of_all_parts_are_read_and_of_other_names_not(tmp_path):
    folder = RunFolder(tmp_path, {})
    for name, value in (("outcomes-1", 2), ("outcomes-0", 0), ("outcomes", -1), ("minutes", 9), ("outcomes-0", 1)):
        folder.append(name, {"value": value})
    assert sorted(record["value"] for record in folder.read("outcomes")) == [-1, 0, 1, 2]
    assert folder.read("minutes") == [{"value": 9}]


def test_a_line_is_on_the_disk_before_the_next(tmp_path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(os.fstat(descriptor).st_size), real(descriptor)))
    folder = RunFolder(tmp_path, {})
    folder.append("outcomes", {"a": 1})
    folder.append("outcomes", {"a": 2})
    length = len('{"a": 1, "check": "0123456789abcdef"}\n')
    assert synced == [length, 2 * length]


@pytest.mark.parametrize("kept", [1, 5, -2])
def test_a_last_line_that_was_cut_off_is_left_out(tmp_path, kept):
    folder = RunFolder(tmp_path, {})
    folder.append("outcomes", {"error": 1.96, "name": "ü"})
    whole = (tmp_path / "outcomes.jsonl").read_text()
    (tmp_path / "outcomes.jsonl").write_text(f"{whole}{whole[:kept]}")
    assert folder.read("outcomes") == [{"error": 1.96, "name": "ü"}]


@pytest.mark.parametrize("kept", [1, 5, -2, -1])
def test_a_record_after_a_line_that_was_cut_off_is_not_lost(tmp_path, kept):
    folder = RunFolder(tmp_path, {})
    folder.append("outcomes", {"error": 1.96})
    with (tmp_path / "outcomes.jsonl").open("r+") as file:
        whole = file.read().replace("1.96", "2.50")
        file.write(whole[:kept])
    folder.append("outcomes", {"error": 3.5})
    folder.append("outcomes", {"error": 4.5})
    if kept == -1:  # whole but for its line break, and with another number than its checksum is of
        with pytest.raises(RunError, match=r"line 2, is damaged \(its checksum is wrong\)"):
            folder.read("outcomes")
    else:
        assert [record["error"] for record in folder.read("outcomes")] == [1.96, 3.5, 4.5]


@pytest.mark.parametrize("line", [0, 1])
def test_a_damaged_earlier_line_is_named_with_the_remedy(tmp_path, line):
    folder = RunFolder(tmp_path, {})
    for value in range(3):
        folder.append("outcomes", {"a": value})
    lines = (tmp_path / "outcomes.jsonl").read_text().splitlines()
    lines[line] = '{"a": '
    (tmp_path / "outcomes.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(RunError, match=rf"outcomes.jsonl, line {line + 1}, is damaged .*remove the line, or the fold"):
        folder.read("outcomes")


def test_a_last_line_that_is_whole_but_no_json_is_an_error(tmp_path):
    (tmp_path / "outcomes.jsonl").write_text('{"a": 1}\n{"a": \n')
    with pytest.raises(RunError, match="line 2"):
        RunFolder(tmp_path, {}, format=1).read("outcomes")


NESTED = '{"a": ' * 200_000 + "1" + "}" * 200_000


def test_a_record_that_is_nested_beyond_measure_is_damaged(tmp_path):
    (tmp_path / "outcomes.jsonl").write_text('{"a": 1}\n' + NESTED + "\n")
    with pytest.raises(RunError, match=r"line 2, is damaged .*remove the line, or the folder"):
        RunFolder(tmp_path, {}, format=1).read("outcomes")


@pytest.mark.parametrize(
    "look", [RunFolder.inspect, lambda path: RunFolder.open(path, RECIPE, resume=True).__enter__()]
)
def test_a_recipe_that_is_nested_beyond_measure_is_damaged(tmp_path, look):
    (tmp_path / "recipe.json").write_text(NESTED)
    with pytest.raises(RunError, match=r"recipe.json is damaged .*write the recipe again"):
        look(tmp_path)
    assert not is_locked(tmp_path / "lock")


def test_every_flipped_bit_of_a_record_is_found(tmp_path):
    folder = RunFolder(tmp_path, {})
    for error in (1.96, 2.5):
        folder.append("outcomes", {"error": error, "seed": 3})
    file = tmp_path / "outcomes.jsonl"
    whole = file.read_bytes()
    length = whole.index(b"\n")
    for bit in range(8 * length):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        with pytest.raises(RunError, match=r"line [12], is damaged"):
            folder.read("outcomes")


def test_a_folder_without_checksums_is_read(tmp_path):
    (tmp_path / "recipe.json").write_text('{"seeds": 2}')
    (tmp_path / "outcomes.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    folder = RunFolder.inspect(tmp_path)
    assert (folder.format, folder.recipe) == (1, {"seeds": 2})
    assert folder.read("outcomes") == [{"a": 1}, {"a": 2}]


def test_a_folder_of_an_earlier_form_is_not_resumed_and_the_version_that_wrote_it_is_named(tmp_path):
    (tmp_path / "recipe.json").write_text(json.dumps(RECIPE))
    (tmp_path / "environment.jsonl").write_text('{"versions": {"torch-dcl": "0.0.7"}}\n')
    with (
        pytest.raises(RunError, match=r"begun by torch-dcl 0\.0\.7 .*dcl report reads it"),
        RunFolder.open(tmp_path, RECIPE, resume=True),
    ):
        pass


@pytest.mark.parametrize("versions", [None, [], "0.0.7", {}])
def test_a_version_that_was_not_recorded_is_said_to_be_unknown(tmp_path, versions):
    (tmp_path / "recipe.json").write_text(json.dumps(RECIPE))
    (tmp_path / "environment.jsonl").write_text(json.dumps({"versions": versions}) + "\n")
    with (
        pytest.raises(RunError, match=r"begun by torch-dcl unknown .*dcl report reads it"),
        RunFolder.open(tmp_path, RECIPE, resume=True),
    ):
        pass


@pytest.mark.parametrize("form", [0, -1, FORMAT + 1, 10**30, True, None, "2", 2.0, [2], {}])
def test_a_format_that_nobody_wrote_is_not_taken_for_the_one_without_checksums(tmp_path, form):
    with RunFolder.open(tmp_path, RECIPE) as folder:
        folder.append("outcomes", {"a": 1})
    (tmp_path / "recipe.json").write_text(json.dumps({**RECIPE, "format": form}))
    with pytest.raises(RunError, match=r"its format is .*, from 1 to 3 can be read; use the version"):
        RunFolder.inspect(tmp_path)


@pytest.mark.parametrize("text", ["", "x", "²", "-1", "9" * 40, "\0", "1 2"])
def test_a_lock_with_any_text_in_it_names_nobody(tmp_path, text):
    with RunFolder.open(tmp_path, RECIPE):
        (tmp_path / "lock").write_text(text)
        assert run_folder.lock_holder(tmp_path) is None


@pytest.mark.parametrize("name", ["lock", "environment.jsonl", "outcomes.jsonl", "log.txt"])
def test_nothing_is_written_through_a_symbolic_link(tmp_path, name):
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious")
    run.mkdir()
    (run / name).symlink_to(victim)

    def write():
        with RunFolder.open(run, RECIPE) as folder:
            folder.append("outcomes", {"a": 1})
            folder.log("a line")

    with pytest.raises(RunError, match="is a symbolic link"):
        write()
    assert victim.read_text() == "precious"


def test_what_interrupted_writes_left_is_removed_once_the_lock_is_held(tmp_path):
    aside = tmp_path / "fleets" / ".writing-abc"
    aside.mkdir(parents=True)
    (aside / "half").write_text("x")
    with RunFolder.open(tmp_path, RECIPE):
        assert not aside.exists()


# The recipe


def test_the_recipe_is_kept_as_json(tmp_path):
    with RunFolder.open(tmp_path / "deep" / "run", RECIPE):
        stored = json.loads((tmp_path / "deep" / "run" / "recipe.json").read_text())
    assert stored == {**RECIPE, "format": FORMAT, "version": torch_dcl.__version__}
    assert RunFolder.inspect(tmp_path / "deep" / "run").recipe == RECIPE


def test_a_run_that_exists_is_refused_without_resume_and_resumed_with_it(tmp_path):
    with RunFolder.open(tmp_path, RECIPE) as folder:
        folder.append("outcomes", {"a": 1})
    with (
        pytest.raises(RunError, match="holds a run already; resume it with --resume"),
        RunFolder.open(tmp_path, RECIPE),
    ):
        pass
    with RunFolder.open(tmp_path, dict(reversed(RECIPE.items())), resume=True) as folder:
        assert folder.read("outcomes") == [{"a": 1}]


def test_another_recipe_is_refused_with_the_settings_that_differ(tmp_path):
    before = {**RECIPE, "schedule": {"epochs": 24, "warmup": 300}}
    with RunFolder.open(tmp_path, before):
        pass
    now = {**before, "seeds": 6, "schedule": {"epochs": 3, "warmup": 300}}
    with pytest.raises(RunError) as caught, RunFolder.open(tmp_path, now, resume=True):
        pass
    lines = str(caught.value).splitlines()
    assert lines[1:-1] == ["  schedule.epochs: 24 then, 3 now", "  seeds: 5 then, 6 now"]
    assert RunFolder.inspect(tmp_path).recipe == before


def test_data_that_moved_is_resumed_and_other_data_is_refused_with_its_place(tmp_path):
    here = {"data": {"cifar10": "from data"}, "root": "data", "sha256": {"cifar10": "12"}}
    there = {"data": {"cifar10": "from /mnt"}, "root": "/mnt", "sha256": {"cifar10": "12"}}
    for recipe in (here, there):
        with RunFolder.open(tmp_path, recipe, resume=recipe is there):
            pass
    with (
        pytest.raises(RunError, match=r'(?s)data\.cifar10: "from data" then.*sha256\.cifar10: "12" then, "34" now'),
        RunFolder.open(tmp_path, {**there, "sha256": {"cifar10": "34"}}, resume=True),
    ):
        pass


def test_long_texts_that_differ_late_are_shown_from_there():
    (told,) = run_folder.differences({"plan": "x" * 90 + "width 64"}, {"plan": "x" * 90 + "width 80"})
    assert told == f'plan: ...{"x" * 14}width 64" then, ...{"x" * 14}width 80" now'


def test_tuples_and_lists_are_the_same_recipe(tmp_path):
    with RunFolder.open(tmp_path, {"images": (200, 100)}):
        pass
    with RunFolder.open(tmp_path, {"images": [200, 100]}, resume=True):
        pass


# The lock


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_holds_runs_all_the_same(tmp_path, monkeypatch, code):
    def flock(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(run_folder.fcntl, "flock", flock)
    with RunFolder.open(tmp_path, {}) as folder:
        folder.append("outcomes", {"error": 1})
        assert run_folder.lock_holder(tmp_path) is None, "nobody can tell whether that process still runs"
    assert RunFolder.inspect(tmp_path).read("outcomes") == [{"error": 1}]


def test_the_lock_is_held_meanwhile_and_names_the_process(tmp_path):
    with RunFolder.open(tmp_path, RECIPE):
        assert is_locked(tmp_path / "lock")
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
    assert not is_locked(tmp_path / "lock")
    assert (tmp_path / "lock").read_text() == ""


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_lock_is_let_go_after_an_exception(tmp_path, error):
    with pytest.raises(error), RunFolder.open(tmp_path, RECIPE):
        raise error
    assert not is_locked(tmp_path / "lock")
    with RunFolder.open(tmp_path, RECIPE, resume=True):
        pass


def test_the_lock_is_let_go_when_the_recipe_is_refused(tmp_path):
    with RunFolder.open(tmp_path, RECIPE):
        pass
    with pytest.raises(RunError), RunFolder.open(tmp_path, RECIPE):
        pass
    assert not is_locked(tmp_path / "lock")


def test_another_process_that_holds_the_lock_is_named_and_frees_it_by_its_death(tmp_path):
    program = (
        "import fcntl, os, sys\n"
        "file = open(sys.argv[1], 'a+')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "file.write(str(os.getpid()))\n"
        "file.flush()\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=f"is in use by process {other.pid}; wait"), RunFolder.open(tmp_path, RECIPE):
            pass
        other.kill()
    with RunFolder.open(tmp_path, RECIPE):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_folder_is_not_opened_twice_but_its_parts_are(tmp_path):
    with RunFolder.open(tmp_path, RECIPE, part="-0"):
        with RunFolder.open(tmp_path, RECIPE, resume=True, part="-1"):
            pass
        refused = RunFolder.open(tmp_path, RECIPE, resume=True, part="-0")
        with pytest.raises(RunError, match=f"in use by process {os.getpid()}"), refused:
            pass


def test_a_whole_run_is_refused_while_its_parts_run(tmp_path):
    with contextlib.ExitStack() as stack:
        stack.enter_context(RunFolder.open(tmp_path, RECIPE, part="-0"))
        with pytest.raises(RunError, match="in use"):
            stack.enter_context(RunFolder.open(tmp_path, RECIPE, resume=True))


# Where it ran


def test_the_environment_has_versions_and_is_plain_data():
    found = environment()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["versions"]["torch"] == torch.__version__
    assert found["cpus"] == os.cpu_count()
    assert found["time"].endswith("+00:00")
    assert (found["gpu"] is None) == (not torch.cuda.is_available())


def test_the_environment_is_noted_at_every_start_for_each_part(tmp_path):
    with RunFolder.open(tmp_path, RECIPE) as folder:
        pass
    with RunFolder.open(tmp_path, RECIPE, resume=True, part="-3"):
        pass
    assert len(folder.read("environment")) == 2
    assert (tmp_path / "environment-3.jsonl").exists()


def test_without_git_there_is_no_commit(monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError("git")

    monkeypatch.setattr(run_folder.subprocess, "run", missing)
    assert environment()["commit"] is None


def test_a_changed_working_tree_is_said_beside_its_commit(monkeypatch):
    answers = iter(["4f00\n", " M src/x.py\n", "4f00\n", ""])
    fake = type("Answer", (), {"stdout": property(lambda _: next(answers))})
    monkeypatch.setattr(run_folder.subprocess, "run", lambda *_, **__: fake())
    assert environment()["commit"] == "4f00, changed"
    assert environment()["commit"] == "4f00"


@pytest.mark.parametrize("size", [1, 65535, 65536, 65537, 200_000])
def test_a_long_last_line_that_was_cut_off_is_taken_away_whole(tmp_path, size):
    folder = RunFolder(tmp_path, {})
    folder.append("x", {"a": 1})
    with (tmp_path / "x.jsonl").open("ab") as file:
        file.write(b"{" * size)
    folder.append("x", {"a": 2})
    assert folder.read("x") == [{"a": 1}, {"a": 2}]
    with (tmp_path / "x.jsonl").open("ab") as file:
        other = RunFolder(tmp_path / "other", {})
        other.path.mkdir()
        other.append("x", {"a": "b" * size})
        file.write((other.path / "x.jsonl").read_bytes()[:-1])  # whole, only its line break is missing
    folder.append("x", {"a": 3})
    assert [len(str(record["a"])) for record in folder.read("x")] == [1, 1, size, 1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["/usr/bin/dcl", "run", "a b"], "dcl run 'a b'"),
        (["/site/torch_dcl/__main__.py", "ls"], "python -m torch_dcl ls"),
        (["script.py"], "script.py"),
    ],
)
def test_the_command_can_be_typed_again(monkeypatch, words, told):
    monkeypatch.setattr(sys, "argv", words)
    assert environment()["command"] == told
