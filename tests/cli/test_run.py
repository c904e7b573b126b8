"""`dcl run` and `dcl ls`, `dcl report`, `dcl doctor` on what it leaves: the whole way, tiny, on the CPU."""

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from rich.text import Text

from torch_dcl.cli import main
from torch_dcl.cli.run import _as_text

TINY = (
    "--set",
    "train_images=50",
    "--set",
    "test_images=50",
    "--set",
    "epochs=1",
    "--set",
    "batch=50",
    "--set",
    "warmup=0",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished smoke run of Table 1, and what was printed."""
    from typer.testing import CliRunner

    from torch_dcl.cli.app import app

    out = tmp_path_factory.mktemp("finished") / "smoke"
    done = CliRunner(env={"NO_COLOR": "1"}).invoke(app, ["run", "table1", "--smoke", "--out", str(out)])
    assert done.exit_code == 0, done.output
    return out, done.output


@pytest.fixture
def run(finished, folder):
    """A copy of it at runs/smoke."""
    shutil.copytree(finished[0], folder / "runs" / "smoke")
    return folder / "runs" / "smoke"


def test_smoke_prints_the_table_and_leaves_files(finished):
    from torch_dcl.experiments import load

    out, shown = finished
    table = load(out / "table1.json")
    assert table.sets == ("MNIST-II-01", "MNIST-III-01")
    assert {cell.column for cell in table.cells} == {"baseline", "A2", "low-rank"}
    assert "a trial, not the protocol" in table.title
    assert any("first 100 images" in line for line in table.deviations)
    assert "1.96(03)" in shown
    assert "…" not in shown  # eighty columns, and no number is cut
    assert "129 of 135 cells were not run" in shown
    assert (out / "table1.html").read_text().startswith("<!doctype html>")
    assert {"recipe.toml", "recipe.json", "outcomes.jsonl", "environment.jsonl"} <= {p.name for p in out.iterdir()}


def test_what_is_written_of_a_result_is_plain_text_whatever_the_terminal_shows(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    written = _as_text([Text("a table", style="bold red"), "A sentence."])
    assert "\x1b" not in written
    assert "a table" in written
    assert "A sentence." in written


def test_a_second_smoke_takes_another_folder(dcl, folder, run):
    (folder / "runs" / "table1-smoke").mkdir()
    shown = dcl("run", "table1", "--smoke", "--sets", "II-01", "--models", "baseline", "--seeds", "1", *TINY)
    assert "runs/table1-smoke-2" in shown


def test_a_finished_run_is_not_overwritten(dcl, run):
    assert "--resume" in dcl("run", "table1", "--smoke", "--out", "runs/smoke", code=2)


def test_resume_of_a_finished_run_trains_nothing(dcl, run):
    before = (run / "outcomes.jsonl").read_text()
    shown = dcl("run", "runs/smoke", "--resume")
    assert "12 of 12 entries are done already" in shown
    assert (run / "outcomes.jsonl").read_text() == before


def test_a_changed_recipe_is_refused_with_the_difference(dcl, run):
    shown = dcl("run", "runs/smoke", "--resume", "--seeds", "3", code=2)
    assert "other settings" in shown
    assert "seeds: 2 then, 3 now" in shown


def test_resume_goes_on_where_it_was_left(dcl, run):
    lines = (run / "outcomes.jsonl").read_text().splitlines(keepends=True)
    (run / "outcomes.jsonl").write_text("".join(lines[:-1]))
    (run / "table1.json").unlink()
    assert "incomplete, 10 of 12 entries" in dcl("ls")
    dcl("run", "runs/smoke", "--resume")
    assert len((run / "outcomes.jsonl").read_text().splitlines()) == len(lines) == 6  # a line is a fleet
    assert "finished, 12 entries" in dcl("ls")


def test_time_that_is_up_says_how_to_go_on(dcl, folder):
    words = ("run", "table1", "--sets", "II-01", "--models", "baseline,A2", "--seeds", "1", *TINY)
    shown = dcl(*words, "--minutes", "1e-9")
    assert "Time is up" in shown
    assert "dcl run runs/table1 --resume" in shown
    assert "1 of 2 entries" in shown  # every call trains an epoch at least
    dcl("run", "runs/table1", "--resume")
    assert "finished, 2 entries" in dcl("ls")


def test_a_folder_in_use_is_refused_with_the_pid(dcl, run):
    with (run / "lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        assert f"running (pid {os.getpid()}), 12 of 12" in dcl("ls")
        assert str(os.getpid()) in dcl("run", "runs/smoke", "--resume", code=1)
    (run / "lock").write_text("999999999\n")
    assert "finished" in dcl("ls")


def test_ls_without_runs_says_what_to_try(dcl):
    assert "No runs in runs/ yet" in dcl("ls")


def test_ls_json_has_recipes_and_states(dcl, run):
    shown = json.loads(dcl("ls", "--json"))
    assert "table1" in shown["recipes"]
    state = shown["runs"][0]
    assert (state["path"], state["state"], state["done"], state["total"]) == ("runs/smoke", "finished", 12, 12)


def test_ls_of_a_run_prints_its_recipe(dcl, run):
    assert "train_images = 100" in dcl("ls", "runs/smoke")
    assert dcl("ls", "smoke") == dcl("ls", "runs/smoke")


def test_a_damaged_run_is_named(dcl, run):
    lines = (run / "outcomes.jsonl").read_text().splitlines()
    (run / "outcomes.jsonl").write_text("\n".join([lines[0][:20], *lines[1:]]) + "\n")
    assert "damaged" in dcl("ls")
    assert "1 problem." in dcl("doctor", code=1)


def test_the_dry_run_counts_and_writes_nothing(dcl, folder):
    shown = " ".join(dcl("run", "table1", "--dry-run").split())
    assert "15 sets, 825 entries" in shown
    # 10 columns of one network, and the oracle with one for each digit: 75 times 10, and 5 · (5 · 2 + 10 · 3).
    assert "networks 950" in shown
    assert "1,368,000,000 to train on" in shown
    assert "measured just now on this CPU" in shown
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("name", "networks"), [("table1-search", "networks 2,472"), ("calibration", "networks 210")])
def test_the_dry_run_of_the_other_recipes(dcl, name, networks):
    shown = " ".join(dcl("run", name, "--dry-run").split())
    assert networks in shown


@pytest.mark.parametrize("name", ["table1", "table2"])
def test_the_dry_run_of_a_smoke_run_takes_less_than_a_second_on_a_gpu(dcl, name):
    shown = " ".join(dcl("run", name, "--smoke", "--dry-run", "--device", "cpu").split())
    assert "on a GPU less than a second on an H200" in shown


def test_search_smoke(dcl, folder):
    shown = dcl("run", "table1-search", "--smoke", "--out", "runs/s", "--sets", "II-01", "--models", "baseline,A2")
    assert "Chosen learning rates" in shown
    found = json.loads((folder / "runs/s/search.json").read_text())
    assert found["minutes"] > 0
    assert found["choice"]["A2"] == {"2": {"lr": 0.02, "clip": None}}
    assert "finished, 2 entries" in dcl("ls")
    before = (folder / "runs/s/outcomes.jsonl").read_text()
    dcl("run", "runs/s", "--resume")
    assert (folder / "runs/s/outcomes.jsonl").read_text() == before


def test_a_table_of_a_search_resumes_elsewhere_without_the_folder_of_the_search(dcl, folder):
    dcl("run", "table1-search", "--smoke", "--out", "runs/s", "--sets", "II-01", "--models", "baseline,wide-B2")
    words = ("run", "table1", "--smoke", "--sets", "II-01", "--models", "baseline,wide-B2", "--seeds", "1", *TINY)
    words = (*words, "--set", "fresh=yes", "--set", "choice=runs/s")
    dcl(*words, "--out", "runs/straight")
    shown = dcl(*words, "--out", "runs/slices", "--minutes", "1e-9", "--set", "whole=yes")
    assert "1 of 2 entries" in shown
    (folder / "other").mkdir()
    (folder / "runs/slices").rename(folder / "other/slices")
    (folder / "runs/s").rename(folder / "runs/away")
    dcl("run", "other/slices", "--resume")
    found, expected = (
        json.loads((folder / path / "table1.json").read_text()) for path in ("other/slices", "runs/straight")
    )
    assert [cell["errors"] for cell in found["cells"]] == [cell["errors"] for cell in expected["cells"]]
    (folder / "runs/s").mkdir()
    (folder / "runs/s/search.json").write_text("{}")
    assert "has no learning rates" in dcl("run", "other/slices", "--resume", code=2)


def test_a_start_in_a_folder_that_is_in_use_writes_nothing(dcl, folder):
    from torch_dcl.fleet.run_folder import RunFolder

    words = ("run", "table1", "--sets", "II-01", "--models", "baseline", "--seeds", "1", "--out", "runs/r", *TINY)
    with RunFolder.open("runs/r", {}):
        (folder / "runs/r/recipe.json").unlink()
        (folder / "runs/r/recipe.toml").write_text("of the winner")
        assert "is in use by process" in dcl(*words, code=1)
    assert (folder / "runs/r/recipe.toml").read_text() == "of the winner"


@pytest.mark.slow
def test_an_interrupt_keeps_what_is_done_and_says_how_to_go_on(dcl, folder, environment):
    words = ["run", "table1", "--sets", "II-01", "--models", "baseline,A2", "--seeds", "1", "--out", "runs/r", *TINY]
    # So many epochs that the second fleet is still at it when the interrupt comes.
    words[-1:] = ["warmup=1", "--set", "most=1", "--set", "train_images=200", "--set", "epochs=12"]
    command = [sys.executable, "-m", "torch_dcl", *words]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process inherits that they are ignored
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=folder
    )
    signal.signal(signal.SIGINT, before)
    file = folder / "runs/r/metrics.jsonl"
    for _ in range(600):
        # Twelve epochs of the first fleet, and one of the second.
        if (file.exists() and file.read_text().count("\n") > 12) or process.poll() is not None:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 130, shown
    assert "runs/r is incomplete, 1 of 2 entries" in shown
    assert "dcl run runs/r --resume" in shown
    assert shown.count("Stopped by SIGINT") == 1
    assert "Traceback" not in shown
    # The fleet was kept at the end of an epoch, and that is where it goes on.
    assert re.search(r"resumed after epoch \d+ of 12", dcl("run", "runs/r", "--resume"))


def test_the_report_is_one_page_that_asks_for_nothing(dcl, run, folder):
    dcl("report", "runs/smoke", "-o", "report.html")
    page = (folder / "report.html").read_text()
    assert page.count("<html") == 1
    assert "data:image/png;base64," in page
    assert page.count('id="run1-differences-') > 2
    assert "Losses by epoch: not run." in page
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert not re.search(r"url\((?!#)", page)


def test_several_runs_stand_on_one_page_with_ids_of_their_own(dcl, run, folder):
    other = folder / "runs" / "<b>other"
    shutil.copytree(run, other)
    dcl("report", "runs/smoke", str(other), "-o", "both.html")
    page = (folder / "both.html").read_text()
    assert "Report of 2 runs" in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert "&lt;b&gt;other" in page
    assert "<b>other" not in page


def test_a_run_that_has_not_ended_is_reported_as_far_as_it_is(dcl, run, folder):
    lines = (run / "outcomes.jsonl").read_text().splitlines(keepends=True)
    (run / "outcomes.jsonl").write_text("".join(lines[:1]))
    (run / "table1.json").unlink()
    dcl("report", "runs/smoke")
    assert "not run" in (folder / "report.html").read_text()


def test_a_report_of_a_damaged_table_says_where(dcl, run):
    (run / "table1.json").write_text("{}")
    assert "table1.json: cells is missing" in dcl("report", "runs/smoke", code=1)
    assert "cells is missing" in dcl("doctor", code=1)


def test_doctor_names_versions_devices_data_and_hashes(dcl, run):
    shown = json.loads(dcl("doctor", "--json"))
    assert shown["ok"]
    checks = {check["name"]: check for check in shown["checks"]}
    assert {"torch-dcl", "Python", "torch", "Triton", "embedded digits", "mnist", "runs/smoke"} <= set(checks)
    assert re.fullmatch("[0-9a-f]{64}", checks["runs/smoke"]["sha256"]["table1.json"])
    assert all(check["remedy"] for check in shown["checks"] if check["state"] == "note" and check["name"] != "Triton")
    assert "All is well." in dcl("doctor")


def test_other_ranks_of_torchrun_are_silent(dcl, run, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert dcl("ls") == ""


@pytest.mark.slow
def test_with_torchrun_the_ranks_share_the_work_and_one_speaks(folder, environment):
    words = ["run", "table1", "--sets", "II-01", "--models", "baseline,A2", "--seeds", "1", "--out", "runs/two", *TINY]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "torch_dcl",
    ]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(a trial, not the protocol)") == 1
    ranks = [(folder / f"runs/two/outcomes-{rank}.jsonl").read_text().count("\n") for rank in (0, 1)]
    assert ranks == [1, 1]


def test_the_report_draws_what_experiments_left_in_the_folder(dcl, run, folder):
    points = [{"filters": n, "errors": [100 / n, 101 / n]} for n in (10, 50, 100)]
    filters = {"set": "MNIST-III-10", "baseline": {"errors": [1.5, 1.6]}, "points": points}
    losses = {"train_loss": [[2.0, 1.0]], "test_loss": [[2.1, 1.2]]}
    (run / "filters.json").write_text(json.dumps(filters))
    (run / "curves.json").write_text(json.dumps({"set": "MNIST-III-10", "series": {"baseline": losses, "A2": losses}}))
    dcl("report", "runs/smoke")
    page = (folder / "report.html").read_text()
    assert "A large filter bank does not help much." in page
    assert 'id="run1-filters-' in page
    assert 'id="run1-curves-' in page
    (run / "filters.json").write_text("{")
    assert "filters.json is not JSON" in dcl("report", "runs/smoke", code=1)


def test_the_dry_run_for_machines(dcl, folder):
    shown = json.loads(dcl("run", "table1", "--dry-run", "--json"))
    assert (shown["recipe"], shown["entries"], shown["networks"]) == ("table1", 825, 950)
    assert shown["minutes"] == pytest.approx(shown["images"] / shown["images_per_s"]["LeNet"] / 60)
    assert list(folder.iterdir()) == []


def test_a_run_for_machines_ends_with_its_state_alone_on_stdout(dcl_for_machines):
    words = ("run", "table1", "--sets", "II-01", "--models", "baseline", "--seeds", "1", *TINY, "--json")
    state, told = dcl_for_machines(*words)
    assert (state["path"], state["state"], state["done"], state["total"]) == ("runs/table1", "finished", 1, 1)
    assert "1.96(03)" in told


def test_the_report_takes_the_name_of_a_run_and_answers_machines(dcl, run, folder):
    shown = json.loads(dcl("report", "smoke", "--json"))
    assert shown == {"page": str(folder / "report.html"), "runs": ["smoke"]}


def test_every_command_on_the_page_asks_for_what_was_run(dcl, run, folder):
    """The command that stands under a set makes a run with the recipe of this one, for that set."""
    import html
    import shlex

    dcl("report", "smoke")
    commands = re.findall(r"<code>(dcl run table1 .*?)</code>", (folder / "report.html").read_text())
    words = shlex.split(html.unescape(commands[0]))
    assert len(commands) == 2  # one a set
    dcl(*words[1:], "--out", "runs/again", "--minutes", "1e-9")
    then, now = (json.loads((path / "recipe.json").read_text()) for path in (run, folder / "runs/again"))
    assert now["sets"] == ["MNIST-II-01"]
    for recipe in (then, now):
        del recipe["sets"], recipe["strengths"], recipe["total"]
    assert now == then


def test_a_full_disk_is_named_with_the_command_that_resumes(dcl, run, monkeypatch):
    def write(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr("torch_dcl.files.write_text", write)
        told = dcl("run", "runs/smoke", "--resume", code=1)
    assert "Error: runs/smoke cannot be written: No space left on device; free space, then resume: dcl run runs" in told
    dcl("run", "runs/smoke", "--resume")


def test_a_run_without_its_toml_says_how_it_is_resumed(dcl, run):
    (run / "recipe.toml").unlink()
    assert "resume it with the command that began it, and --resume" in dcl("run", "runs/smoke", "--resume", code=2)
    dcl("run", "table1", "--smoke", "--out", "runs/smoke", "--resume")
    assert (run / "recipe.toml").exists()


@pytest.mark.parametrize(("code", "ignored"), [(75, [(signal.SIGTERM, signal.SIG_IGN)]), (130, []), (0, [])])
def test_a_second_sigterm_leaves_the_code_that_asks_for_another_try(code, ignored, monkeypatch):
    """Python takes a while to end, and the second signal would make the code 143, which requeues nothing."""
    asked = []
    monkeypatch.setattr("torch_dcl.cli.app.app", lambda **_: sys.exit(code))
    monkeypatch.setattr(signal, "signal", lambda *given: asked.append(given))
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == code
    assert asked == ignored


def test_the_command_that_resumes_a_folder_with_the_name_of_a_recipe_can_be_typed(dcl, folder):
    said = dcl("run", "table1", "--smoke", "--minutes", "0.0001", "--out", "table2")
    command = said.partition("Resume with:  dcl ")[2].splitlines()[0]
    assert "table2 is incomplete, 4 of 12 entries" in dcl(*command.split(), "--minutes", "0.0001")
    assert not (folder / "runs").exists()
