"""Several ranks that train one network: the same losses as one process, killed, hung, stopped and mismatched ranks.

Every test starts real processes that talk through gloo. What happens to a rank is done by the network itself, in a
forward pass of its choice, so no test waits for a moment to come.
"""

import contextlib
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tests.halves import slow
from tests.processes import Process, importing

import torch_dcl
from torch_dcl.experiments.protocol import Job
from torch_dcl.experiments.ranks import join_group, leave_group
from torch_dcl.experiments.recipes.imagenet import ImageNet, ImageNetConfig
from torch_dcl.fleet.run_folder import RunFolder

NET = """
import multiprocessing, os, pathlib, signal, subprocess, threading
from torch import nn

class Event(nn.Module):
    '''Does something in one forward pass in training, on one rank, once.'''
    passes = 0

    def forward(self, x):
        if self.training:
            Event.passes += 1
            flag = pathlib.Path("happened")
            rank, at, what = os.environ.get("EVENT", "-1,0,none").split(",")
            if os.environ.get("RANK", "0") == rank and Event.passes == int(at) and not flag.exists():
                flag.touch()
                if what == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif what == "term":  # to every process, as Slurm sends it: those that decode too
                    processes = [os.getpid(), *(process.pid for process in multiprocessing.active_children())]
                    subprocess.run(["kill", "-TERM", *map(str, processes)], check=True)
                elif what == "hang":
                    threading.Event().wait()
        return x

def make():
    return nn.Sequential(
        Event(), nn.Conv2d(3, 8, 3), NORM, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(200, 32), nn.ReLU(),
        nn.Dropout(0.5), nn.Linear(32, 6))
"""
SETTINGS = {"classes": 6, "images": 23, "batch": 5, "steps": 11, "resize": 16, "crop": 12, "workers": 0, "lr": 0.05,
            "save_minutes": 0, "evaluate_every": 1, "timeout": 60}  # fmt: skip


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET.replace("NORM", "nn.Identity()"))
    return tmp_path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run by two ranks that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    with contextlib.chdir(folder):
        (folder / "net.py").write_text(NET.replace("NORM", "nn.Identity()"))
        together(2, "whole")
    return folder / "whole"


def words(out, *more, data="synthetic", **changes):
    pairs = {**SETTINGS, **changes}
    return [
        "-m", "torch_dcl", "run", "imagenet", "--network", "net.py:make", "--data", data, "--device", "cpu",
        "--out", out, *(part for key, value in pairs.items() for part in ("--set", f"{key}={value}")), *more,
    ]  # fmt: skip


def environment(**more):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {key: value for key, value in importing().items() if key not in names} | more


def alone(*args, code=0, **event):
    process = Process(args, env=environment(**event))
    said = "".join(process.communicate(timeout=300))
    assert process.returncode == code, said
    return said


def torchrun(ranks, *args, restarts=0, **event):
    launcher = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "--max-restarts",
        str(restarts),
    ]
    done = subprocess.run(
        [sys.executable, *launcher, *args], capture_output=True, text=True, env=environment(**event), timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def started_by_hand(commands, each=(), **event):
    """One process for each command, as ranks of one run; their exit codes and what they print."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": str(len(commands)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        Process(command, env=environment(**{"RANK": str(rank), "LOCAL_RANK": str(rank), **common, **event, **more}))
        for rank, (command, more) in enumerate(zip(commands, each or [{}] * len(commands), strict=True))
    ]
    texts = ["".join(process.communicate(timeout=300)) for process in processes]
    return [process.returncode for process in processes], texts


def together(ranks, out, *more, **options):
    """A run by some ranks that nothing disturbs."""
    codes, texts = started_by_hand([words(out, *more, **options)] * ranks)
    assert codes == [0] * ranks, texts


def rows(out):
    found = json.loads(Path(out, "imagenet.json").read_text())["models"]
    return [{key: row[key] for key in ("model", "weights", "top1", "top5", "loss", "train_loss", "images", "curves")}
            for row in found]  # fmt: skip


def same_bits(one, other):
    assert rows(one) == rows(other)
    for file in sorted(Path(one).glob("*-0.safetensors")):
        a, b = load_file(file), load_file(Path(other, file.name))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


def nearly(one, other, rtol=1e-5, images=23):
    """Losses follow each other to the rounding of sums, and every image is counted."""
    for a, b in zip(rows(one), rows(other), strict=True):
        assert a["images"] == b["images"] == images
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=rtol)
        assert a["loss"] == pytest.approx(b["loss"], rel=rtol)
        for here, there in zip(a["curves"][0], b["curves"][0], strict=True):
            assert here == pytest.approx(there, rel=rtol)
    for file in sorted(Path(one).glob("*-0.safetensors")):
        a, b = load_file(file), load_file(Path(other, file.name))
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("options", [slow({}), {"mix": "cutmix", "batch": 8, "accumulate": 2, "ema": 0.9, "clip": 1}])
def test_two_and_three_ranks_follow_one_process(options, request):
    if options:
        options = {**options, "smoothing": 0.1, "schedule": "cosine"}
    alone(*words("one", **options))
    if options:
        torchrun(2, *words("2", **options))
    else:
        shutil.copytree(request.getfixturevalue("whole"), "2")
        together(3, "3")
    for ranks in ("2",) if options else ("2", "3"):
        nearly("one", ranks)
        assert not list(Path(ranks).glob("*-1.jsonl")), "only the first rank writes"


@pytest.mark.slow
def test_ranks_draw_the_same_pairs_of_branches(place):
    scope = {}
    exec(NET.replace("NORM", "nn.Identity()"), scope)
    made = torch_dcl.plan(scope["make"](), (3, 12, 12), branches=3, width=8, strategy="stochastic").only("6")
    (place / "plan.json").write_text(made.to_json())
    more = ("--models", "dcl", "--plan", "plan.json")
    alone(*words("one", *more))
    together(2, "two", *more)
    nearly("one", "two")


@pytest.mark.slow
def test_a_rank_that_is_killed_comes_back_and_the_result_is_that_of_an_undisturbed_run(place, whole):
    said = torchrun(2, *words("killed"), restarts=1, EVENT="1,9,kill")
    assert (place / "happened").exists()
    assert "exitcode: -9" in said
    assert len(RunFolder.inspect("killed").read("environment")) == 2
    same_bits(whole, "killed")


@pytest.mark.slow
def test_the_first_rank_that_is_killed_comes_back_too(place):
    (place / "net.py").write_text(NET.replace("NORM", "nn.BatchNorm2d(8)"))
    together(2, "whole")
    torchrun(2, *words("killed"), restarts=1, EVENT="0,10,kill")
    assert (place / "happened").exists()
    same_bits("whole", "killed")


@pytest.mark.slow
def test_ranks_of_two_machines_meet_though_each_machine_counts_restarts_for_itself():
    counts = [{"TORCHELASTIC_RESTART_COUNT": count} for count in ("0", "1")]
    codes, texts = started_by_hand([words("run")] * 2, counts)
    assert codes == [0, 0], texts


@pytest.mark.slow
def test_sigterm_to_one_rank_stops_all_with_the_code_that_requeues_and_any_number_goes_on(place, whole):
    codes, texts = started_by_hand([words("again")] * 2, EVENT="1,7,term")
    assert codes == [75, 75], texts
    assert "Resume with:  torchrun … -m torch_dcl run" in texts[0]
    assert len(list((place / "again" / "fleets").iterdir())) <= 2
    shutil.copytree("again", "fewer")
    together(2, "again", "--resume")
    same_bits(whole, "again")
    alone(*words("fewer", "--resume"))
    nearly(whole, "fewer")


@pytest.mark.slow
def test_sigterm_to_the_processes_that_decode_does_not_end_the_run_before_it_is_saved(place):
    write_images(place / "images")
    alone(*words("whole", data="images"))
    said = alone(*words("run", data="images", workers=2), code=75, EVENT="0,7,term")
    assert "killed by signal" not in said
    assert said.count("stopping after this step") <= 1, "no other process says so"
    alone(*words("run", "--resume", data="images"))
    same_bits("whole", "run")


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run_within_the_time_that_was_set(place):
    codes, texts = started_by_hand_until_hung([words("hung", timeout=3)] * 2, EVENT="1,6,hang")
    assert codes[0] == 1
    assert "rank 0 of 2" in texts[0]
    assert "3 s" in texts[0]
    assert "resume" in texts[0]
    alone(*words("hung", "--resume", timeout=3))


def started_by_hand_until_hung(commands, **event):
    """As `started_by_hand`; when the first has ended the others are killed, as torchrun does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"WORLD_SIZE": str(len(commands)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **event}
    processes = [
        Process(command, env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **common))
        for rank, command in enumerate(commands)
    ]
    first = "".join(processes[0].communicate(timeout=300))
    for process in processes[1:]:
        process.kill()
    rest = ["".join(process.communicate(timeout=300)) for process in processes[1:]]
    return [process.returncode for process in processes], [first, *rest]


def write_images(root, extra=0):
    rng = np.random.default_rng(1)
    for split, count in (("train", 4), ("val", 2)):
        for name in "abcdef":
            (root / split / name).mkdir(parents=True)
            for number in range(count + (extra if name == "f" else 0)):
                Image.fromarray(rng.integers(0, 256, (20, 18, 3), np.uint8)).save(root / split / name / f"{number}.png")


@pytest.mark.slow
def test_a_corrupt_image_that_another_rank_reads_is_named(place):
    write_images(place / "images")
    for path in sorted((place / "images/train").rglob("*.png")):
        path.write_bytes(path.read_bytes()[:-40])
    codes, texts = started_by_hand([words("run", data="images")] * 2)
    assert 0 not in codes
    assert any(".png cannot be read as an image" in text for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["settings", "images", "missing"])
def test_ranks_with_other_settings_or_images_are_found_at_the_start(place, kind):
    write_images(place / "images")
    write_images(place / "others", 1)
    other = {
        "settings": words("run", data="images", lr=0.06),
        "images": words("run", data="others"),
        "missing": words("run", data="gone"),
    }[kind]
    codes, texts = started_by_hand([words("run", data="images"), other])
    assert codes == [2, 2], texts
    message = {
        "settings": "rank 1 has other settings or data than rank 0: lr: 0.05 on rank 0, 0.06 on rank 1",
        "images": "rank 1 has other settings or data than rank 0: sha256.train",
        "missing": "rank 1 of 2: gone/train does not exist",
    }[kind]
    assert message in " ".join(texts[0].split())
    assert "Error" not in texts[1], "one message, from the first rank"
    assert not (place / "run").exists()


# On a GPU. NCCL needs a GPU for each rank, so with one of them two ranks meet through gloo, and NCCL has a rank alone.

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.gpu
@on_a_gpu
def test_two_ranks_on_one_gpu_share_their_batch_norms(place):
    (place / "net.py").write_text(NET.replace("NORM", "nn.BatchNorm2d(8)"))
    more = ("--device", "cuda", "--models", "plain,dcl")
    alone(*words("one", *more, lr=0.005))
    pair = [words("two", *more, lr=0.005, sync_bn="yes", backend="gloo")] * 2
    codes, texts = started_by_hand(pair, LOCAL_RANK="0")
    assert codes == [0, 0], texts
    for a, b in zip(rows("one"), rows("two"), strict=True):  # convolutions round to TF32
        assert a["images"] == b["images"] == 23
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=0.02)
        assert a["loss"] == pytest.approx(b["loss"], rel=0.05)


def train_as_one_of_two(device, backend, **changes):
    """Train, save, load and evaluate as the first of two ranks in a group that has no other; the losses."""
    settings = {**SETTINGS, "network": "net.py:make", "data": "synthetic", "device": device, "lr": 0.005, **changes}
    recipe = ImageNet(ImageNetConfig(**settings), device)
    recipe.prepare(lambda _: None)
    join_group(backend, 60)
    try:
        recipe.team.world = 2
        recipe.team.gather = lambda text: [text]  # torch wants a list as long as the group
        training = recipe.build(Job("plain", "synthetic", 0, 0.05))
        while training.epoch < training.epochs:
            training.train()
            training.save("state.safetensors")
            training.load("state.safetensors")
        assert training.judge()["images"] == 9  # its share of 23
        return training.losses
    finally:
        leave_group()


@pytest.mark.gpu
@on_a_gpu
def test_nccl_and_gloo_serve_one_group(place, monkeypatch):
    (place / "net.py").write_text(NET.replace("NORM", "nn.BatchNorm2d(8)"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    there = train_as_one_of_two("cuda:0", "cpu:gloo,cuda:nccl", sync_bn=True)
    here = train_as_one_of_two("cpu", "gloo")
    assert there == pytest.approx(here, rel=0.02)
