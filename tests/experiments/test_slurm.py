"""The Slurm script of docs/cluster.md, run as it stands by shell stubs in the place of Slurm's commands."""

import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.experiments.test_imagenet_ranks import NET, environment, same_bits, together, words

STUBS = {
    # A job that is requeued starts again, with a count that the job sees.
    "sbatch": """
export SLURM_JOB_ID=7 SLURM_JOB_NODELIST='node[1-4]' SLURM_NTASKS=2
bash "$1"; code=$?
while [ -e requeued ]; do
  rm requeued
  export SLURM_RESTART_COUNT=$((${SLURM_RESTART_COUNT:-0} + 1))
  bash "$1"; code=$?
done
exit $code
""",
    # Every task is a process of its own; srun ends with the highest of their codes.
    "srun": """
[ "$1" = --kill-on-bad-exit=0 ] && shift
for number in $(seq 0 $((SLURM_NTASKS - 1))); do
  SLURM_PROCID=$number SLURM_LOCALID=$number "$@" &
  tasks="$tasks $!"
done
highest=0
for task in $tasks; do wait "$task"; code=$?; [ $code -gt $highest ] && highest=$code; done
exit $highest
""",
    "scontrol": """
case "$1" in
  show) [ "$2 $3" = "hostnames node[1-4]" ] && printf '127.0.0.1\\nnode2\\n' ;;
  requeue) echo "$2" | tee requeued >> requeues ;;
esac
""",
}


@pytest.fixture
def submit(tmp_path, monkeypatch):
    """Submit the script; the code that the job ends with, and what it printed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET.replace("NORM", "nn.Identity()"))
    page = (Path(__file__).parents[2] / "docs/cluster.md").read_text()
    (script,) = re.findall(r"```text\n(#!/bin/bash\n.*?)```", page, re.DOTALL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        script = script.replace("MASTER_PORT=29500", f"MASTER_PORT={free.getsockname()[1]}")
    (tmp_path / "job.sh").write_text(script)
    small = " ".join(f"'{word}'" for word in words("job")[4:])
    stubs = {**STUBS, "dcl": f'\nexec {sys.executable} -m torch_dcl "$@" {small}\n'}
    (tmp_path / "bin").mkdir()
    for name, text in stubs.items():
        file = tmp_path / "bin" / name
        file.write_text(f"#!/bin/bash{text}")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    def submitted(event):
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["sbatch", "job.sh"], env=environment(PATH=path, EVENT=event), capture_output=True, text=True, timeout=300,
            check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    return submitted


@pytest.mark.slow
def test_a_job_that_is_told_to_end_is_requeued_and_resumes_by_itself(submit):
    code, said = submit("1,7,term")
    assert code == 0, said
    assert Path("happened").exists()
    assert Path("requeues").read_text() == "7\n", said
    together(2, "whole")
    same_bits("whole", "job")


@pytest.mark.slow
def test_a_job_whose_rank_is_killed_is_not_requeued(submit):
    code, said = submit("1,7,kill")
    assert code == 137, said
    assert not Path("requeues").exists()
    assert "rank 0 of 2" in said
