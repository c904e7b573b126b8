"""ImageNet, section 4.2.2: AlexNet or any other network, plain and converted, on one process or many ranks.

The defaults are the paper's: AlexNet, batch 256 over all ranks, 450,000 steps, rate 0.01 divided by 10 every 100,000,
momentum 0.9, decay 5e-4 (biases: twice the rate, no decay), 256 × 256 images, random crops and flips, centre crop at
test. The training loop is `torch_dcl.experiments.imagenet.training`.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from torch_dcl.convert.checkpoint import save_model
from torch_dcl.data.imagenet.batches import ImageNetBatches
from torch_dcl.data.imagenet.prepare import check_classes, say_skipped
from torch_dcl.data.imagenet.sources import Decoded, Images, Mapped, Resident, open_images
from torch_dcl.experiments.imagenet.estimate import estimate
from torch_dcl.experiments.imagenet.networks import CAFFE, build, inputs_of
from torch_dcl.experiments.imagenet.team import Team
from torch_dcl.experiments.imagenet.training import Training
from torch_dcl.experiments.network_source import code_hash
from torch_dcl.experiments.paper_numbers import IMAGENET, WEIGHTS
from torch_dcl.experiments.protocol import Estimate, Job, Outcome, Recipe, Trained, finite
from torch_dcl.experiments.ranks import Rank, StopRequest, leave_group
from torch_dcl.experiments.runner import minutes_of, outcomes_of
from torch_dcl.experiments.settings import Config, SettingError, reading_data, setting
from torch_dcl.experiments.stats import mean, mean_std_n
from torch_dcl.experiments.table import Grid, Line
from torch_dcl.fleet.run_folder import environment
from torch_dcl.progress import say_minutes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from torch_dcl.fleet import Fleet
    from torch_dcl.fleet.run_folder import RunFolder

__all__ = ["ImageNet", "ImageNetConfig"]

MODELS = {"plain": "as it is", "dcl": "converted", "low-rank": "one branch of equal weights"}


@dataclasses.dataclass(frozen=True)
class ImageNetConfig(Config):
    """The settings of a training on large images."""

    network: str = setting(
        "alexnet", "alexnet (the paper's), torchvision:NAME, timm:NAME, module:function or file.py:function", code=True
    )
    models: tuple[str, ...] = setting(("plain", "dcl"), "what to train", choices=tuple(MODELS), what="model")
    plan: str = setting("", "a plan of dcl plan -o for the converted network; none for the paper's, or what is smaller")
    budget: float = setting(
        0.0, "the part of the weights to keep at most, in place of a plan; 0 for none", least=0, most=1
    )
    seeds: int = setting(1, "networks of each kind", least=1, most=1000)
    data: str = setting(
        "", "a folder of train/ and val/, of tar shards, or of dcl data prepare; or synthetic", smoke="synthetic",
        machine=True,
    )  # fmt: skip
    resize: int = setting(256, "height and width that images are resized to", least=1, most=4096)
    shape: str = setting(
        "squash", "squash ignores the aspect ratio; crop keeps it", choices=("squash", "crop"), what="shape"
    )
    crop: int = setting(0, "height and width of the inputs; 0 for the network's", least=0, most=4096)
    decoder: str = setting(
        "auto", "of JPEGs: pillow in worker processes, gpu, or the second on a GPU", choices=("auto", "pillow", "gpu"),
        what="decoder",
    )  # fmt: skip
    skip_corrupt: bool = setting(
        False, "whether images that cannot be decoded on the fly are skipped and counted, in place of an error",
        machine=True,  # without it a corrupt image ends the run, which can be resumed with it
    )  # fmt: skip
    classes: int = setting(1000, "classes of synthetic images", smoke=10, least=1, most=1_000_000)
    images: int = setting(512, "synthetic images of each split", smoke=16, least=1, most=10_000_000)
    batch: int = setting(256, "images of a step, of all ranks together", smoke=4, least=1, most=1_000_000)
    steps: int = setting(450_000, "steps of the training", smoke=3, least=1, most=1_000_000_000)
    epochs: int = setting(0, "passes over the images, in place of steps; 0 for steps", least=0, most=1_000_000)
    lr: float = setting(0.01, "learning rate", above=0)
    schedule: str = setting("step", "step, or cosine", choices=("step", "cosine"), what="schedule")
    drop_every: int = setting(100_000, "steps between two drops of the rate", least=1)
    drop: float = setting(0.1, "what the rate is multiplied by then", above=0, most=1)
    warmup: int = setting(0, "steps of linear warm-up", least=0)
    optimizer: str = setting("sgd", "sgd, or adamw", choices=("sgd", "adamw"), what="optimiser")
    momentum: float = setting(0.9, "momentum of SGD", least=0, most=1)
    nesterov: bool = setting(False, "Nesterov's momentum")
    betas: tuple[float, ...] = setting((0.9, 0.999), "decays of AdamW's two averages", least=0, most=1, longest=2)
    eps: float = setting(1e-8, "what AdamW adds to the root", above=0)
    weight_decay: float = setting(5e-4, "weight decay; biases and norms have none", least=0)
    bias_lr: float = setting(2.0, "the rate of biases, as a multiple", least=0)
    clip: float = setting(0.0, "the largest norm of the gradient; 0 for none", least=0)
    smoothing: float = setting(0.0, "label smoothing", least=0, most=1)
    mix: str = setting("none", "none, mixup or cutmix", choices=("none", "mixup", "cutmix"), what="mix")
    mix_alpha: float = setting(0.2, "α of the mix", above=0)
    ema: float = setting(0.0, "decay of averaged weights, such as 0.9999; 0 for none", least=0, most=1)
    accumulate: int = setting(1, "parts that a rank's share of a batch is divided into", least=1, most=10_000)
    precision: str = setting(
        "float32", "float32, or bfloat16 by autocast", choices=("float32", "bfloat16"), what="precision"
    )
    sync_bn: bool = setting(False, "whether batch norms see the images of all ranks")
    evaluate_every: int = setting(0, "epochs between two evaluations; 0 for the end alone", least=0)
    channels_last: bool = setting(False, "whether images lie in memory channel by channel", machine=True)
    compile: bool = setting(False, "whether torch.compile compiles the network", machine=True)
    keep: str = setting(
        "disk", "where prepared shards are: disk, or device for all images on the GPU", choices=("disk", "device"),
        what="place", machine=True,
    )  # fmt: skip
    verify: bool = setting(True, "whether all prepared shards are hashed at the start", machine=True)
    workers: int = setting(
        4, "processes or threads of each rank that read images", smoke=0, least=0, most=1024, machine=True
    )
    save_minutes: float = setting(10.0, "minutes between two checkpoints", least=0, machine=True)
    backend: str = setting(
        "auto", "of several ranks: auto for NCCL on GPUs, or gloo", choices=("auto", "gloo"), what="backend",
        machine=True,
    )  # fmt: skip
    timeout: float = setting(600.0, "seconds after which a rank that hangs ends the run", above=0, machine=True)
    device: str = setting("auto", 'cpu, cuda, or "auto"', machine=True)

    def steps_on(self, images: int) -> int:
        """The steps of a training on this many images, which its warm-up must not outlast."""
        steps = self.epochs * (images // self.batch) or self.steps
        if self.warmup > steps:
            raise SettingError(
                f"warmup is {self.warmup:,}, more than the {steps:,} steps of the training; give at most that, or "
                "train longer"
            )
        return steps


class ImageNet(Recipe[ImageNetConfig]):
    """One network after the other, each trained by all ranks."""

    name = "imagenet"
    unit = "networks"
    config_type = ImageNetConfig
    is_shared = True
    team: Team
    splits: dict[str, Images]
    code: str
    path: Path | None = None

    def __init__(self, config: ImageNetConfig, device: str = "cpu") -> None:
        super().__init__(config, device)
        self.every = 60 * config.save_minutes
        self.crop = config.crop or inputs_of(config.network)

    # Data

    def prepare(self, report: Callable[[str], None]) -> None:
        """Open the images on every rank, and check that all ranks have the same settings and images."""
        self.team = Team(Rank.here(), self.config.timeout, self.config.backend)
        with self.team.together():
            if not self.config.data:
                raise SettingError(
                    "the recipe imagenet needs images; give --data FOLDER with train/ and val/, or --data synthetic"
                )
            self._check()
            self.splits = self.open_splits()
            for split, images in self.splits.items():
                report(f"{'Training' if split == 'train' else 'Validation'}: {images.about}")
            # Errors of a network or a plan are raised before anything is written.
            for model in self.config.models:
                network = build(self.config, model, 0, len(self.splits["train"].classes), self.crop)
            self.code = code_hash(self.config.network, network)
        # Ranks on another device, or of another program, would wait for each other in the first step.
        alike = {name: getattr(self.config, name) for name in ("backend", "channels_last", "compile")}
        self.team.compare({**self.asked(), **alike, "device": torch.device(self.device).type})

    def _check(self) -> None:
        config, world = self.config, self.team.world
        if config.plan and config.budget:
            raise SettingError("plan and budget exclude each other; give one of them")
        if config.sync_bn and world > 1 and not self.device.startswith("cuda"):
            raise SettingError("sync_bn needs GPUs: torch has no synchronised batch norm for the CPU; leave it out")
        if len(config.betas) != 2 or max(config.betas) >= 1:
            raise SettingError(f"betas are two numbers below 1, such as 0.9,0.999, not {config.betas}")
        if config.ema >= 1:
            raise SettingError("ema must be below 1, such as 0.9999: with 1 the average stays at the random start")
        if config.resize < self.crop:
            raise SettingError(f"a crop must lie within the image: crop {self.crop}, resize {config.resize}")
        unit = 1 if config.mix == "none" else 2
        least = world * config.accumulate * unit
        if config.batch < least or config.batch % unit:
            even = ", and an even one" if unit == 2 else ""
            raise SettingError(
                f"a batch of {config.batch} cannot be shared by {world} ranks in {config.accumulate} parts; take at "
                f"least {least}{even}"
            )

    def open_splits(self, *, ready: bool = True) -> dict[str, Images]:
        """The images of both splits; unless `ready`, they are not hashed, and are not moved to the device.

        Raises:
            SettingError: They are missing or damaged, have other classes than each other, or do not fill a batch.
        """
        config = self.config
        with reading_data():
            splits = {
                split: open_images(
                    config.data, split, size=config.resize, shape=config.shape, decoder=config.decoder,
                    classes=config.classes, images=config.images, skip_corrupt=config.skip_corrupt,
                ) for split in ("train", "val")
            }  # fmt: skip
            check_classes({split: images.classes for split, images in splits.items()})
            if config.keep == "device" and any(isinstance(images, Decoded) for images in splits.values()):
                raise SettingError(
                    f"keep=device is for prepared shards, and {config.data} has images to decode; make shards of "
                    f"them with dcl data prepare imagenet {config.data} FOLDER, or leave it out"
                )
            if (count := len(splits["train"].labels)) < config.batch:
                raise SettingError(f"{count:,} images do not fill one batch of {config.batch:,}; use a smaller batch")
            config.steps_on(count)
            return {split: self._ready(images) for split, images in splits.items()} if ready else splits

    def _ready(self, images: Images) -> Images:
        """The images, hashed and moved to the device where the settings say so."""
        config, device = self.config, torch.device(self.device)
        if isinstance(images, Decoded):
            images.decoder_on(device)  # raises an error where there is none
        if isinstance(images, Mapped):
            if config.verify:
                images.check(self.team.rank, self.team.world)
            return images.resident(device) if config.keep == "device" else images
        return dataclasses.replace(images, images=images.images.to(device)) if isinstance(images, Resident) else images

    def asked(self) -> dict[str, Any]:
        """The settings, with the images and the code of the user's own network by their hashes."""
        hashes = {split: images.content() for split, images in self.splits.items()} | {"network": self.code}
        plan = Path(self.config.plan).expanduser().read_text(encoding="utf-8") if self.config.plan else ""
        train = self.splits["train"]
        decoder = train.decoder_on(torch.device(self.device)) if isinstance(train, Decoded) else "none"
        return {**super().asked(), "plan": plan, "decoder": decoder, "sha256": hashes}

    def _batches(self, split: str, seed: int) -> ImageNetBatches:
        config = self.config
        mean_of, std = CAFFE if config.network == "alexnet" else _TORCHVISION
        return ImageNetBatches(
            self.splits[split], split, config.batch, seed, resize=config.resize, crop=self.crop, mean=mean_of, std=std,
            device=self.device, workers=config.workers, rank=self.team.rank, world=self.team.world,
            unit=1 if config.mix == "none" else 2,
        )  # fmt: skip

    # Jobs

    def jobs(self, outcomes: Mapping[Job, Outcome]) -> list[Job]:
        """Every model with every seed; none depends on another."""
        del outcomes
        config = self.config
        name = "synthetic" if config.data == "synthetic" else "images"
        return [Job(model, name, seed, config.lr) for seed in range(config.seeds) for model in config.models]

    def total(self) -> int:
        """All of them."""
        return len(self.jobs({}))

    def group(self, job: Job) -> Job:
        """Each network by itself."""
        return job

    def describe(self, fleets: Sequence[Sequence[Job]]) -> str:
        """The network."""
        job = fleets[0][0]
        return f"{self.config.network} {job.network}, seed {job.seed}"

    def fleet(self, jobs: Sequence[Job]) -> "Fleet":
        """The training of one network, on all ranks."""
        self.team.tell(do="build", job=dataclasses.asdict(jobs[0]))
        return cast("Fleet", self.build(jobs[0]))  # it has what the runner asks of a fleet

    def build(self, job: Job) -> Training:
        """What all ranks do in `fleet`."""
        config = self.config
        describe = {"network": config.network, "model": job.network, "seed": job.seed, "batch": config.batch}
        with self.team.ending(lambda: "while it built its network"):
            network = build(config, job.network, job.seed, len(self.splits["train"].classes), self.crop)
            data = self._batches("train", job.seed), self._batches("val", job.seed)
            return Training(network, *data, config, job.seed, self.team, describe)

    def judge(self, jobs: Sequence[Job]) -> dict[str, Any]:
        """Nothing: a training has its own share of the images."""
        del jobs
        return {}

    def outcomes(self, jobs: Sequence[Job], trained: Trained) -> list[Outcome]:
        """Errors, the curve, speed; the network itself goes to the run folder."""
        training = cast("Training", trained.fleet)
        job, last = jobs[0], training.curve[-1]
        if self.path is not None:
            with training.average.in_place() if training.average is not None else contextlib.nullcontext():
                save_model(training.network, self.path / f"{job.network}-{job.seed}.safetensors")
        extra = {
            "top5": last["top5"], "images": last["images"], "curve": training.curve, "ranks": self.team.world,
            "weights": sum(p.numel() for name, p in training.network.named_parameters() if not name.endswith("bias")),
            "waiting": training.waited / training.busy if training.busy else None,
            "skipped": sorted(training.skipped),
        }  # fmt: skip
        return [
            Outcome(
                job, last["top1"], last["loss"], training.losses[-1], training.stopped, trained.seconds,
                training.setup_seconds, extra,
            )
        ]  # fmt: skip

    # Ranks

    @contextlib.contextmanager
    def leading(self, path: str | os.PathLike[str], should_stop: Callable[[], bool]) -> Iterator[None]:
        """Tell the other ranks when the run ends; where it fails they notice that this process is gone."""
        self.path = Path(path)
        yield
        self.team.tell(do="end", signal=int(getattr(should_stop, "signal", None) or 0))
        leave_group()

    def follow(self, should_stop: Callable[[], bool]) -> bool:
        """Do what the first rank says."""
        command = self._obey_all(should_stop)
        if command["signal"] and isinstance(should_stop, StopRequest):
            should_stop.take(command["signal"])
        leave_group()
        return not command["signal"]

    def _obey_all(self, should_stop: Callable[[], bool]) -> dict[str, Any]:
        """Run commands; the one that ends the run."""
        training: Training | None = None
        while (command := self.team.hear())["do"] != "end":
            if command["do"] == "build":
                training = None  # its memory is needed
                training = self.build(Job.read(command["job"]))
            elif training is not None:
                training.obey(command, should_stop)
        return command

    # Results

    def estimate(self, say_time: Callable[[float], str]) -> Estimate:
        """Hours from some steps on synthetic images, and the bytes of the images."""
        self.team = Team(Rank(), self.config.timeout)
        self._check()
        return estimate(self, say_time)

    def result(self, folder: "RunFolder") -> dict[str, Any]:
        """Errors, weights and time of every model, as JSON."""
        known = outcomes_of(folder)
        rows = []
        for model in self.config.models:
            group = [known[job] for job in self.jobs({}) if job.network == model]
            rows.append({
                "model": model, "weights": group[0].extra["weights"], "top1": [outcome.error for outcome in group],
                "top5": [outcome.extra["top5"] for outcome in group], "loss": [outcome.test_loss for outcome in group],
                "train_loss": [outcome.train_loss for outcome in group], "seconds": [o.seconds for o in group],
                "images": group[0].extra["images"], "curves": [outcome.extra["curve"] for outcome in group],
                "waiting": [outcome.extra["waiting"] for outcome in group],
                "stopped": [outcome.stopped for outcome in group],
            })  # fmt: skip
        content = {
            "network": self.config.network, "data": {name: images.about for name, images in self.splits.items()},
            "recipe": folder.recipe, "environment": environment(), "minutes": minutes_of(folder), "models": rows,
            "skipped": sorted({name for outcome in known.values() for name in outcome.extra.get("skipped", [])}),
        }  # fmt: skip
        folder.write_json("imagenet", finite(content))
        return content

    def shown(self, result: dict[str, Any], width: int) -> "list[RenderableType]":
        """A line for each model, and the paper's beside those of AlexNet."""
        lines = []
        for row in result["models"]:
            paper = ""
            if result["network"] == "alexnet" and row["model"] in ("plain", "dcl"):
                key = "baseline" if row["model"] == "plain" else "dcl"
                paper = f"{IMAGENET[key].top1:.2f} / {IMAGENET[key].top5:.2f}"
            texts = (
                f"{row['weights']:,}", mean_std_n(row["top1"]), mean_std_n(row["top5"]),
                f"{mean(row['train_loss']):.3f}", paper, say_minutes(sum(row["seconds"])),
            )  # fmt: skip
            lines.append(Line((row["model"], MODELS[row["model"]], *texts)))
        heads = ("<model", "<", "weights", "top-1 error % (n)", "top-5 error % (n)", "train loss", "paper", "time")
        table = Grid(heads, lines, ("", "time", "train loss", "paper")).as_rich(width)
        words = f"{result['network']} on {result['data']['val']}."
        if skipped := result.get("skipped"):
            more = ", …" if len(skipped) > 5 else ""
            words += f" {say_skipped(len(skipped))}: {', '.join(skipped[:5])}{more}."
        if diverged := [row["model"] for row in result["models"] if any(end is not None for end in row["stopped"])]:
            words += f" The training diverged of {' and '.join(diverged)}: the errors there mean nothing."
        if result["network"] == "alexnet":
            plain, dcl, _ = WEIGHTS["AlexNet"]
            words += f" The paper's errors are of ILSVRC2012, 450,000 steps, {plain:.2f}M and {dcl:.2f}M weights."
        return [table, words]


_TORCHVISION = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
"""Mean and deviation that torchvision and timm take, from 0 to 255."""
