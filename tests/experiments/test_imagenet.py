"""Large networks on large images: the loop against one in plain torch, interruptions, results."""

import dataclasses
import itertools
import json
import math
import runpy
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tests.halves import slow
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

from torch_dcl import DCLLinear, load_model, plan
from torch_dcl.cli.app import app
from torch_dcl.cli.run import Listener
from torch_dcl.data import ImageNetBatches, open_images
from torch_dcl.data.imagenet import ahead
from torch_dcl.data.imagenet.prepare import prepare_imagenet
from torch_dcl.experiments.imagenet import team as ranks
from torch_dcl.experiments.imagenet.team import Team
from torch_dcl.experiments.imagenet.training import Training
from torch_dcl.experiments.network_source import code_hash
from torch_dcl.experiments.protocol import Job
from torch_dcl.experiments.ranks import Rank
from torch_dcl.experiments.recipes.imagenet import ImageNet, ImageNetConfig
from torch_dcl.experiments.runner import outcomes_of, run
from torch_dcl.files import SealedError
from torch_dcl.fleet.run_folder import RunError, RunFolder

SMALL = {
    "network": "net.py:make", "data": "synthetic", "classes": 6, "images": 22, "batch": 5, "steps": 10, "resize": 16,
    "crop": 12, "workers": 0, "lr": 0.05, "device": "cpu",
}  # fmt: skip
NET = """
from torch import nn

def make():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(200, 32), nn.ReLU(),
        nn.Dropout(0.5), nn.Linear(32, 6))
"""


OPTIONS = [
    {}, {"schedule": "cosine", "warmup": 3, "smoothing": 0.1, "ema": 0.9},
    {"mix": "mixup", "batch": 6, "accumulate": 2},
    {"mix": "cutmix", "batch": 6, "mix_alpha": 1.0, "evaluate_every": 1, "clip": 0.5, "nesterov": True},
    {"precision": "bfloat16", "channels_last": True},
    {"optimizer": "adamw", "betas": (0.8, 0.95), "eps": 1e-6, "lr": 0.01, "weight_decay": 0.05, "bias_lr": 1.0},
]  # fmt: skip


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "net.py").write_text(NET)


def config(**changes):
    return ImageNetConfig(**{**SMALL, **changes})


def training_of(recipe, model="plain", seed=0):
    recipe.prepare(lambda _: None)
    return recipe.build(Job(model, "synthetic", seed, recipe.config.lr))


def train_plainly(settings, seed=0, steps=None):
    """The same training in plain torch, without averages and mixes, for a network without dropout; its weights."""
    torch.manual_seed(seed)
    scope = {}
    exec((NET if settings.network == "net.py:make" else Path("other.py").read_text()), scope)
    network = key_free(scope["make"]())
    images = open_images("synthetic", "train", size=16, classes=6, images=22)
    batches = ImageNetBatches(
        images, "train", settings.batch, seed, resize=16, crop=12, mean=(123.675, 116.28, 103.53),
        std=(58.395, 57.12, 57.375),
    )  # fmt: skip
    bias = [p for name, p in network.named_parameters() if name.endswith("bias") and name != "1.bias"]
    norm = [p for name, p in network.named_parameters() if name.startswith("1.")]
    rest = [p for name, p in network.named_parameters() if not name.endswith("bias") and not name.startswith("1.")]
    groups = [
        {"params": rest, "weight_decay": settings.weight_decay}, {"params": bias, "lr": settings.bias_lr * settings.lr},
        {"params": norm},
    ]  # fmt: skip
    optimizer = torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum)
    if settings.optimizer == "adamw":
        groups = [{"weight_decay": 0, **group} for group in groups]
        optimizer = torch.optim.AdamW(groups, settings.lr, settings.betas, settings.eps)
    step, losses = 0, []
    while step < (steps or settings.steps):
        for x, y in batches.epoch(step // len(batches), step % len(batches)):
            loss = F.cross_entropy(network(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            step += 1
            if step == (steps or settings.steps):
                break
    return network, losses


def key_free(network):
    return nn.Sequential(*(nn.Identity() if isinstance(layer, nn.Dropout) else layer for layer in network))


def without_dropout():
    Path("other.py").write_text(NET.replace("nn.Dropout(0.5)", "nn.Identity()"))
    return "other.py:make"


def weights(network):
    return torch.cat([p.detach().flatten() for p in network.parameters()])


def after(count):
    """A request to stop that comes after so many questions."""
    questions = itertools.count()
    return lambda: next(questions) >= count


def run_all(training, should_stop=None):
    while training.epoch < training.epochs:
        training.train(should_stop=should_stop)
    return training


# The loop


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[-1]])
def test_training_is_what_a_loop_in_plain_torch_does(options):
    settings = config(network=without_dropout(), **options)
    training = run_all(training_of(ImageNet(settings)))
    network, losses = train_plainly(settings)
    torch.testing.assert_close(weights(training.network), weights(network), rtol=1e-4, atol=1e-6)
    by_epoch = [losses[0:4], losses[4:8], losses[8:10]]
    assert training.epochs == 3
    assert training.losses == pytest.approx([sum(part) / len(part) for part in by_epoch], rel=1e-5)


def test_parts_of_a_batch_add_up_to_the_batch():
    name = without_dropout()
    text = Path("other.py").read_text()
    Path("other.py").write_text(text.replace("nn.BatchNorm2d(8)", "nn.Identity()"))  # it would see parts of a batch
    whole, parts = (run_all(training_of(ImageNet(config(network=name, accumulate=n)))) for n in (1, 3))
    torch.testing.assert_close(weights(whole.network), weights(parts.network), rtol=1e-4, atol=1e-6)
    assert whole.losses == pytest.approx(parts.losses, rel=1e-5)


def test_evaluation_counts_every_image_once_and_knows_the_first_five():
    training = training_of(ImageNet(config()))
    found = training.judge()
    network = training.network.eval()
    images, labels = next(iter(ImageNetBatches(
        open_images("synthetic", "val", size=16, classes=6, images=22), "val", 22, resize=16, crop=12,
        mean=(123.675, 116.28, 103.53), std=(58.395, 57.12, 57.375),
    ).epoch(0)))  # fmt: skip
    with torch.no_grad():
        logits = network(images)
    order = logits.argsort(1, descending=True)
    assert found["images"] == 22
    assert found["top1"] == pytest.approx(100 * (order[:, 0] != labels).double().mean().item())
    assert found["top5"] == pytest.approx(100 * (order[:, :5] != labels[:, None]).all(1).double().mean().item())
    assert found["loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-5)


CASES = [("plain", OPTIONS[0]), ("dcl", OPTIONS[3]), ("dcl", OPTIONS[-1])]
CASES += [
    slow(model, options) for model in ("plain", "dcl") for options in OPTIONS[1:] if (model, options) not in CASES
]


@pytest.mark.parametrize(("model", "options"), CASES)
def test_a_run_that_is_stopped_after_every_step_ends_as_one_that_is_not(options, model, tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "PAUSE", 0.0)
    settings = config(models=(model,), save_minutes=0.0, **options)
    whole = run(ImageNet(settings), tmp_path / "whole")
    assert whole.complete, whole.failures
    calls = 0
    while not run(ImageNet(settings), tmp_path / "parts", resume=bool(calls), should_stop=after(1)).complete:
        calls += 1
        assert len(list((tmp_path / "parts/fleets").iterdir())) <= 2
    assert calls >= 7
    outcomes = [list(outcomes_of(RunFolder.inspect(tmp_path / name)).values()) for name in ("whole", "parts")]
    for a, b in zip(*outcomes, strict=True):
        assert (a.error, a.test_loss, a.train_loss) == (b.error, b.test_loss, b.train_loss)
        assert a.extra["curve"] == b.extra["curve"]
    one, other = (load_file(tmp_path / name / f"{model}-0.safetensors") for name in ("whole", "parts"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_pause_saves_in_the_middle_of_an_epoch_and_a_damaged_checkpoint_gives_way_to_the_one_before(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(ranks, "PAUSE", 0.0)
    settings = config(models=("plain",), save_minutes=0.0)
    whole = run(ImageNet(settings), tmp_path / "whole")
    assert not run(ImageNet(settings), tmp_path / "run", should_stop=after(15)).complete
    kept = sorted((tmp_path / "run/fleets").iterdir())
    assert len(kept) == 2
    assert not kept[0].name.endswith("-000000.safetensors") or not kept[1].name.endswith("-000000.safetensors")
    kept[1].write_bytes(kept[1].read_bytes()[:-1])
    again = run(ImageNet(settings), tmp_path / "run", resume=True)
    assert again.result["models"][0]["top1"] == whole.result["models"][0]["top1"]
    assert again.result["models"][0]["train_loss"] == whole.result["models"][0]["train_loss"]


def test_a_checkpoint_of_another_training_and_one_that_makes_no_sense_are_refused(tmp_path):
    training = training_of(ImageNet(config()))
    training.train()
    training.save(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="belongs to another training: seed: 0 then, 1 now"):
        training_of(ImageNet(config()), seed=1).load(tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="belongs to another training: average"):
        training_of(ImageNet(config(ema=0.5))).load(tmp_path / "a.safetensors")
    training.step = 400
    training.save(tmp_path / "b.safetensors")
    with pytest.raises(SealedError, match="not a checkpoint of a training"):
        training_of(ImageNet(config())).load(tmp_path / "b.safetensors")


def test_a_training_that_diverges_ends_and_says_when(tmp_path):
    settings = config(models=("plain",), lr=1e30, steps=40)
    done = run(ImageNet(settings), tmp_path / "run")
    (outcome,) = outcomes_of(RunFolder.inspect(tmp_path / "run")).values()
    assert done.complete
    assert outcome.stopped == 0
    assert math.isnan(outcome.train_loss)


# The recipe


def test_the_paper_s_networks_have_the_papers_weights():
    recipe = ImageNet(ImageNetConfig(data="synthetic", images=256, resize=256))
    recipe.team = Team(Rank())
    from torch_dcl.experiments.imagenet.networks import build

    counts = {}
    for model in ("plain", "dcl", "low-rank"):
        network = build(recipe.config, model, 0, 1000, recipe.crop)
        counts[model] = sum(p.numel() for name, p in network.named_parameters() if not name.endswith("bias"))
        assert isinstance(network.fc6, DCLLinear) == (model != "plain")
    assert counts == {"plain": 62_367_776, "dcl": 51_882_016, "low-rank": 51_882_016}


def invoke(*words):
    return CliRunner().invoke(app, ["run", "imagenet", *words], prog_name="dcl")


def small(*words, **changes):
    settings = {**{key: value for key, value in SMALL.items() if key not in ("network", "data", "device")}, **changes}
    return ("--network", "net.py:make", "--data", "synthetic", "--device", "cpu",
            *(part for key, value in settings.items() for part in ("--set", f"{key}={value}")), *words)  # fmt: skip


def test_a_run_from_the_command_line_leaves_a_table_a_page_and_the_networks():
    done = invoke(*small("--models", "plain,dcl,low-rank", "--out", "run"))
    assert done.exit_code == 0, done.output
    result = json.loads(Path("run/imagenet.json").read_text())
    assert [row["model"] for row in result["models"]] == ["plain", "dcl", "low-rank"]
    assert result["models"][1]["weights"] == result["models"][2]["weights"] < result["models"][0]["weights"]
    scope = {}
    exec(NET, scope)
    network = load_model(scope["make"], "run/dcl-0.safetensors")
    assert any(isinstance(module, DCLLinear) for module in network.modules())
    page = CliRunner().invoke(app, ["report", "run", "-o", "page.html"], prog_name="dcl")
    assert page.exit_code == 0, page.output
    assert "low-rank" in Path("page.html").read_text()
    assert not list(Path("run").glob("fleets/*"))


def test_a_training_that_diverged_is_said_so_in_a_file_that_any_program_reads():
    done = invoke(*small("--models", "plain,dcl", "--out", "run", lr="1e30"))
    assert done.exit_code == 0, done.output
    assert "The training diverged of plain and dcl" in " ".join(done.output.split())
    text = Path("run/imagenet.json").read_text()
    rows = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["models"]
    assert [row["stopped"] for row in rows] == [[0], [0]]


def test_a_plan_or_a_budget_says_what_is_converted(monkeypatch):
    monkeypatch.setenv("HOME", str(Path.cwd()))
    scope = {}
    exec(NET, scope)
    made = plan(scope["make"](), (3, 12, 12), width=4).only("5")
    Path("plan.json").write_text(made.to_json())
    done = invoke(*small("--models", "dcl", "--set", "plan=~/plan.json", "--out", "run"))
    assert done.exit_code == 0, done.output
    assert load_model(scope["make"], "run/dcl-0.safetensors")[5].fusion.weight.shape == (8, 32)
    done = invoke(*small("--models", "dcl", "--budget", "0.7", "--out", "less"))
    assert done.exit_code == 0, done.output
    found = json.loads(Path("less/imagenet.json").read_text())["models"][0]["weights"]
    assert found <= 0.7 * sum(p.numel() for name, p in scope["make"]().named_parameters() if not name.endswith("bias"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data", "gone"), "gone/train does not exist"),
        (("--plan", "plan.json", "--budget", "0.5"), "plan and budget exclude each other"),
        (("--set", "crop=300"), "crop 300, resize 16"),
        (("--set", "batch=23"), "22 images do not fill one batch of 23"),
        (("--set", "mix=mixup"), "take at least 2, and an even one"),
        (("--set", "accumulate=6"), "a batch of 5 cannot be shared by 1 ranks in 6 parts"),
        (("--set", "classes=7"), "[2, 7] is needed"),
        (("--network", "torchvision:resnet19"), "did you mean resnet1"),
        (("--network", "alexnet"), "alexnet does not run on images of 12 × 12"),
        (("--models", "dlc"), "did you mean dcl?"),
        (("--plan", "gone.json"), "'gone.json' cannot be read: No such file or directory; write one with dcl plan -o"),
        (("--plan", "."), "'.' cannot be read: Is a directory; write one with dcl plan -o"),
        (("--budget", "1.5"), "budget must be at least 0 and at most 1"),
        (("--set", "betas=0.9"), "betas are two numbers below 1"),
        (("--set", "ema=1"), "ema must be below 1"),
        (("--set", "optimizer=adam"), "did you mean adamw?"),
        (("--set", "warmup=3", "--set", "steps=2"), "warmup is 3, more than the 2 steps of the training"),
        (("--set", "warmup=5", "--set", "epochs=1"), "warmup is 5, more than the 4 steps of the training"),
    ],
)
def test_what_cannot_run_is_named_by_a_run_and_by_its_dry_run(words, message):
    for more in ((), ("--dry-run",)):
        done = invoke(*small("--out", "run"), *words, *more)
        assert done.exit_code == 2, done.output
        assert not Path("run").exists()
        assert message in " ".join(done.output.split()), done.output


def test_a_run_needs_images_and_its_estimate_does_not():
    done = invoke("--network", "net.py:make", "--device", "cpu", "--set", "crop=12", "--out", "run")
    assert done.exit_code == 2, done.output
    assert "needs images; give --data FOLDER" in " ".join(done.output.split())
    assert not Path("run").exists()


def test_a_dry_run_prints_hours_shards_and_bytes_and_writes_nothing(tmp_path):
    done = invoke(*small("--dry-run"))
    assert done.exit_code == 0, done.output
    assert "GiB" in done.output
    assert "images/s" in done.output
    assert "Nothing was run or written" in done.output
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["net.py"]
    plain = json.loads(
        CliRunner().invoke(app, ["run", "imagenet", *small("--dry-run", "--json")], prog_name="dcl").stdout
    )
    assert plain["bytes"] == 44 * (3 * 16 * 16 + 8)
    assert plain["shards"] == 2


def write_images(root):
    rng = np.random.default_rng(1)
    for split, count in (("train", 4), ("val", 2)):
        for name in "abcdef":
            place = root / split / name
            place.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(rng.integers(0, 256, (20, 18, 3), np.uint8)).save(place / f"{number}.png")


def test_a_dry_run_counts_the_shards_that_are_there(tmp_path):
    write_images(tmp_path / "images")
    prepare_imagenet(tmp_path / "images", tmp_path / "shards", size=16, images_per_shard=5)
    done = invoke(*small("--data", "shards", "--dry-run"))
    assert done.exit_code == 0, done.output
    assert "8 prepared at 16²" in " ".join(done.output.split())


def test_a_pause_keeps_the_threads_that_read_and_every_other_end_of_a_step_ends_them(tmp_path, monkeypatch):
    write_images(tmp_path / "images")
    prepare_imagenet(tmp_path / "images", tmp_path / "shards", size=16, images_per_shard=5)
    training = training_of(ImageNet(config(data="shards", workers=2, save_minutes=0.0)))
    training.save("start.safetensors")

    def readers():
        return [thread for thread in threading.enumerate() if thread.name.startswith(f"{ahead.NAME}_")]

    def fail(*_):
        raise RuntimeError("a failed step")

    training.train()  # until the first pause
    assert training.step == 1
    assert readers() != []
    training.train(should_stop=lambda: True)
    assert (training.step, readers()) == (2, [])
    training.train()
    training.load("start.safetensors")
    assert (training.step, readers()) == (0, [])
    training.train()
    monkeypatch.setattr(training.network, "forward", fail)
    with pytest.raises(RuntimeError, match="a failed step") as kept:
        training.train()
    assert readers() == []
    with pytest.raises(RuntimeError, match="a failed step") as kept_too:
        training.judge()
    assert readers() == []
    del kept, kept_too  # whose tracebacks had the frames of both loops


@pytest.mark.parametrize("error", [RuntimeError("gone"), KeyError("gone"), AttributeError("gone")])
def test_any_error_of_a_rank_ends_the_run_since_the_others_wait_for_it(error, monkeypatch):
    def fail(*_):
        raise error

    recipe = ImageNet(config())
    training = training_of(recipe)
    monkeypatch.setattr(training.team, "world", 2)
    monkeypatch.setattr(training.team, "tell", lambda **_: None)
    monkeypatch.setattr(training.team, "spread", lambda _: None)
    monkeypatch.setattr(training.network, "forward", fail)
    for part in (training.judge, lambda: training.run_steps(None)):
        with pytest.raises(RunError, match=r"rank 0 of 2 failed in step 0: .*gone.* the run can be resumed"):
            part()
    monkeypatch.setattr(recipe, "_batches", fail)
    with pytest.raises(RunError, match=r"rank 0 of 2 failed while it built its network: .*gone"):
        recipe.fleet([Job("plain", "synthetic", 0, 0.05)])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[/a/tcp/pair.cc:545] Read error: Connection reset. This is typically", "Read error: Connection reset"),
        ("[/a/unbound_buffer.cc:78] Timed out waiting 6000ms", "Timed out waiting 6000ms"),
        ("CUDA out of memory. Tried to allocate 2 GiB\nmore", "CUDA out of memory. Tried to allocate 2 GiB"),
        ("[1, 2] is no size", "[1, 2] is no size"),
        ("", "RuntimeError"),
    ],
)
def test_the_reason_of_an_error_has_no_place_in_the_source_of_gloo(text, reason):
    assert ranks.reason_of(RuntimeError(text)) == reason


def test_a_dry_run_behind_torchrun_needs_no_other_rank(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    done = invoke(*small("--dry-run"))
    assert done.exit_code == 0, done.output


def test_images_from_a_folder_are_trained_on_as_from_its_shards(tmp_path):
    write_images(tmp_path / "images")
    made = CliRunner().invoke(
        app, ["data", "prepare", "imagenet", "images", "shards", "--size", "16", "--workers", "1"]
    )
    assert made.exit_code == 0, made.output
    results = []
    for data, keep in (("images", "disk"), ("shards", "disk"), ("shards", "device")):
        out = f"{data}-{keep}"
        done = invoke(*small("--models", "plain", "--out", f"run-{out}", keep=keep), "--data", data)
        assert done.exit_code == 0, done.output
        rows = json.loads(Path(f"run-{out}/imagenet.json").read_text())["models"]
        results.append([{key: row[key] for key in ("top1", "top5", "loss", "train_loss")} for row in rows])
    assert results[0] == results[1] == results[2]
    shard = tmp_path / "shards/train-00000.safetensors"
    changed = bytearray(shard.read_bytes())
    changed[-1] ^= 1
    shard.write_bytes(changed)
    done = invoke(*small("--out", "again"), "--data", "shards")
    assert (done.exit_code, "train-00000.safetensors is damaged or was altered" in done.output) == (2, True), (
        done.output
    )


def test_a_restart_by_torchrun_or_slurm_resumes_by_itself(monkeypatch):
    assert invoke(*small("--models", "plain", "--out", "run", "--minutes", "1e-9")).exit_code == 0
    assert "holds a run already" in invoke(*small("--models", "plain", "--out", "run")).output
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    done = invoke(*small("--models", "plain", "--out", "run"))
    assert done.exit_code == 0, done.output
    assert invoke(*small("--models", "plain", "--out", "new")).exit_code == 0


def test_a_job_of_torchrun_that_counts_no_restart_resumes_its_own_run_and_no_others(monkeypatch):
    for out, job in (("run", "a"), ("none", "none")):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        assert invoke(*small("--models", "plain", "--out", out, "--minutes", "1e-9")).exit_code == 0
    for out, job, code in (("run", "b", 2), ("none", "none", 2), ("run", "a", 0)):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        done = invoke(*small("--models", "plain", "--out", out))
        assert done.exit_code == code, done.output
        assert ("holds a run already" in done.output) == bool(code)


def test_data_that_changed_is_not_resumed(tmp_path):
    settings = config(models=("plain",))
    run(ImageNet(settings), tmp_path / "run", seconds=0)
    with pytest.raises(RunError, match="begun with other settings"):
        run(ImageNet(dataclasses.replace(settings, images=23)), tmp_path / "run", resume=True)


def test_a_network_whose_code_changed_is_not_resumed(tmp_path):
    run(ImageNet(config()), tmp_path / "run", seconds=0)
    Path("net.py").write_text(NET.replace("0.5", "0.4"))
    with pytest.raises(RunError, match=r"sha256\.network"):
        run(ImageNet(config()), tmp_path / "run", resume=True)


def test_the_code_of_a_network_is_its_file_and_those_of_its_layers_wherever_they_are(tmp_path):
    def code(folder, layer):
        (tmp_path / folder).mkdir()
        shutil.copy("net.py", tmp_path / folder)
        (tmp_path / folder / "layers.py").write_text(layer)
        scope = runpy.run_path(str(tmp_path / folder / "layers.py"))
        return code_hash(f"{folder}/net.py:make", nn.Sequential(nn.ReLU(), scope["Own"]()))

    own = "from torch import nn\nclass Own(nn.Module):\n    def forward(self, x):\n        return x\n"
    assert code("a", own) == code("b", own) != code("c", own.replace("x\n", "2 * x\n"))
    assert code_hash("torchvision:alexnet", nn.ReLU()) == code_hash("alexnet", nn.ReLU()) == ""


def test_settings_of_the_machine_may_change_in_between(tmp_path):
    settings = config(models=("plain",), steps=12)
    run(ImageNet(settings), tmp_path / "run", seconds=0)
    assert run(ImageNet(dataclasses.replace(settings, workers=1, timeout=60)), tmp_path / "run", resume=True).complete


def test_the_training_says_what_part_of_its_time_it_waited_for_images():
    training = run_all(training_of(ImageNet(config())))
    assert isinstance(training, Training)
    assert 0 < training.waited < training.busy


def test_a_pause_inside_of_an_epoch_moves_the_bar_by_a_part_of_it(tmp_path):
    class Bar:
        def __init__(self):
            self.reached = []

        def reach(self, done):
            self.reached.append(done)

        def begin_at(self, done, total):
            pass

        def inside(self, done, total, unit):
            pass

        def note(self, line):
            pass

        def now(self, line):
            pass

    bar = Bar()
    assert run(ImageNet(config(save_minutes=0.0)), tmp_path / "run", listener=Listener(bar)).complete
    assert bar.reached == sorted(bar.reached)
    assert bar.reached[-1] == 2
    assert any(0 < done < 1 / 3 for done in bar.reached)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_trains_as_a_cpu_does():
    settings = config(network=without_dropout(), steps=4)
    here, there = (run_all(training_of(ImageNet(settings, device))) for device in ("cpu", "cuda"))
    torch.testing.assert_close(weights(there.network).cpu(), weights(here.network), rtol=1e-2, atol=1e-3)
    assert there.losses == pytest.approx(here.losses, rel=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("model", ["plain", "dcl"])
def test_every_option_runs_on_a_gpu(model, optimizer, tmp_path):
    settings = config(
        precision="bfloat16", channels_last=True, compile=optimizer == "sgd", mix="cutmix", batch=6, accumulate=2,
        ema=0.9, smoothing=0.1, optimizer=optimizer, clip=1.0,
    )  # fmt: skip
    training = run_all(training_of(ImageNet(settings, "cuda"), model))
    assert all(math.isfinite(loss) for loss in training.losses)
    training.save(tmp_path / "state.safetensors")
    other = training_of(ImageNet(settings, "cuda"), model)
    other.load(tmp_path / "state.safetensors")
    assert other.judge() == training.judge()
