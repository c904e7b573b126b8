"""Train one network on all ranks: the loop of ImageNet recipes, from the first step to the evaluation.

`Training` has the interface of a fleet of one network: it trains until the end of an epoch or until a pause, saves and
loads its state between any two steps, and evaluates. On the first rank each of these first sends a command to the other
ranks, which then run the same code (`obey`).

A step is a function of the state and of (seed, epoch, step): order, crops and flips, dropout, mixed images and drawn
branches are hashes. So a resumed run continues as if it had not been interrupted, bit for bit on the same number of
ranks on a CPU. On another number of ranks sums are rounded differently, and nothing else changes, unless batch norms
see fewer images (``sync_bn=yes`` gives them those of all ranks).
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from torch_dcl.data import DataError
from torch_dcl.data.draws import draw_key
from torch_dcl.data.imagenet.batches import ImageNetBatches, Piece, share
from torch_dcl.experiments.imagenet import team as ranks
from torch_dcl.experiments.imagenet.parts import (
    Averaged,
    dropout_keys,
    key_dropouts_,
    mix_images,
    optimizer_of,
    rate_at,
)
from torch_dcl.experiments.protocol import finite
from torch_dcl.files import SealedError, read_sealed, write_sealed
from torch_dcl.fleet import Evaluation
from torch_dcl.fleet.member import History
from torch_dcl.fleet.run_folder import differences
from torch_dcl.stochastic import follow_optimizer

if TYPE_CHECKING:
    from torch_dcl.experiments.recipes.imagenet import ImageNetConfig

__all__ = ["Training"]

KEY = "torch_dcl_training"
Stop = Callable[[], bool] | None


class Training:
    """The training of one network.

    Args:
        network: Built with the same weights on every rank.
        batches: This rank's shares of the training images.
        held_out: This rank's shares of the images to evaluate on.
        config: The settings.
        seed: The seed of everything random.
        team: The ranks.
        describe: The settings that a checkpoint must agree with.
    """

    def __init__(
        self, network: nn.Module, batches: ImageNetBatches, held_out: ImageNetBatches, config: "ImageNetConfig",
        seed: int, team: ranks.Team, describe: Mapping[str, Any],
    ) -> None:  # fmt: skip
        start = time.perf_counter()
        self.batches, self.held_out, self.config, self.seed, self.team = batches, held_out, config, seed, team
        self.describe, self.device = dict(describe), batches.device
        self.steps_per_epoch = len(batches)
        self.total = config.steps_on(len(batches.labels))
        self.epochs = -(-self.total // self.steps_per_epoch)
        self.epoch = self.step = 0

        # The network as it is trained: dropout by hashes, on the device, in the layout of the settings.
        self.dropouts = key_dropouts_(network)
        layout = torch.channels_last if config.channels_last else torch.contiguous_format
        network = network.to(self.device).to(memory_format=layout).train()
        if config.sync_bn and team.world > 1:
            network = nn.SyncBatchNorm.convert_sync_batchnorm(network)  # type: ignore[no-untyped-call]
        self.network, self.layout = network, layout
        self.optimizer = optimizer_of(network, config)
        follow_optimizer(network, self.optimizer)
        self.average = Averaged(network.parameters(), config.ema) if config.ema else None
        self.module: nn.Module = torch.compile(network) if config.compile else network  # type: ignore[assignment]
        if team.world > 1:
            places = [self.device] if self.device.type == "cuda" else None
            self.module = DistributedDataParallel(self.module, device_ids=places, gradient_as_bucket_view=True)
            self._fix_buckets()

        # What is known of the training so far.
        self.losses: list[float] = []
        self.stopped: int | None = None
        self.curve: list[dict[str, float]] = []
        self.skipped: set[str] = set()  # corrupt images
        self.waited = self.busy = 0.0
        # Sums of whole numbers: the same however steps are divided among ranks and calls.
        self._tally = torch.zeros(2, dtype=torch.int64, device=self.device)
        self._pieces: Generator[Piece] | None = None
        self.setup_seconds = time.perf_counter() - start

    def __len__(self) -> int:
        return 1

    @property
    def history(self) -> History:
        """The losses by epoch, the one that is under way included."""
        now = [_mean_loss(self._tally.tolist(), self.step)] if self.step else []
        return History([[loss] for loss in self.losses + now], {} if self.stopped is None else {0: self.stopped})

    def _fix_buckets(self) -> None:
        """Run a step without an update: the order of the sum of gradients is fixed only after the first one.

        Otherwise the first step of a resumed run would sum in another order than an uninterrupted run.
        """
        before = [buffer.clone() for buffer in self.network.buffers()]
        side = self.batches.crop
        images = torch.zeros(2, 3, side, side, device=self.device).to(memory_format=self.layout)
        for _ in range(2):
            self._set_keys(torch.arange(2, device=self.device), 0)
            with self._precision():
                logits = self.module(images)
            logits.float().sum().backward()
            self.optimizer.zero_grad()
        with torch.no_grad():
            for buffer, old in zip(self.network.buffers(), before, strict=True):
                buffer.copy_(old)

    # Training

    def train(self, epochs: int | None = None, *, should_stop: Stop = None) -> History:
        """Train until the end of the epoch, or until a pause or a stop; one step at least."""
        del epochs  # the runner asks for one at a time
        self.team.tell(do="train")
        self.run_steps(should_stop)
        return self.history

    def run_steps(self, should_stop: Stop) -> None:
        """What all ranks do in `train`."""
        with self.team.ending(lambda: f"in step {self.at}"):
            self._run_steps(should_stop)

    def _run_steps(self, should_stop: Stop) -> None:
        pieces, self._pieces = self._pieces or self.batches.pieces(self.epoch, self.step), None
        try:
            self._take_steps(pieces, should_stop)
        finally:
            if self._pieces is None:
                pieces.close()

    def _take_steps(self, pieces: Generator[Piece], should_stop: Stop) -> None:
        pause_at = time.monotonic() + min(ranks.PAUSE, 60 * self.config.save_minutes)
        before = time.perf_counter()
        for piece in pieces:
            ready = time.perf_counter()
            self.take_step(piece)
            self.skipped.update(piece.corrupt)
            self.step += 1
            if self.step == self.steps_per_epoch or self.at == self.total:
                break
            said = self.team.stops(should_stop, pause_at)
            self.waited, self.busy = self.waited + ready - before, self.busy + time.perf_counter() - before
            if said:
                # A pause keeps the images that are being decoded; a stop throws them away.
                self._pieces = pieces if said == ranks.PAUSED else None
                self._collect()
                return
            before = time.perf_counter()
        self.team.settle()
        self._end_epoch()

    @property
    def at(self) -> int:
        """The number of the next step, counted from 0 over all epochs."""
        return self.epoch * self.steps_per_epoch + self.step

    def take_step(self, piece: Piece) -> None:
        """One step of the optimiser on one batch, of which every rank has a share, in one or several parts."""
        config, at = self.config, self.at
        rate = rate_at(at, self.total, config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        # For randomness other than dropout; each rank draws for its own images.
        torch.manual_seed(draw_key(self.seed, f"step, rank {self.team.rank}", at))
        unit = 1 if config.mix == "none" else 2
        for number in range(config.accumulate):
            part = share(len(piece.labels), number, config.accumulate, unit)
            chosen = slice(part.start, part.stop)
            images = piece.images[chosen].to(memory_format=self.layout)
            mixed = mix_images(images, piece.labels[chosen], config.mix, config.mix_alpha, self.seed, at)
            self._set_keys(piece.index[chosen], at)
            is_last = number == config.accumulate - 1
            with self._synchronising(is_last):
                with self._precision():
                    logits = self.module(mixed.images)
                loss = mixed.loss(logits.float(), config.smoothing)
                # The mean over the whole batch: ranks are averaged over, and may have shares of different sizes.
                (loss * (self.team.world / config.batch)).backward()  # type: ignore[no-untyped-call]
            self._tally += _tally(loss.detach() / config.batch)
        if config.clip:
            nn.utils.clip_grad_norm_(self.network.parameters(), config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.team.world == 1)
        if self.average is not None:
            self.average.update()

    def _set_keys(self, index: Tensor, at: int) -> None:
        keys = dropout_keys(self.seed, at, index) if self.dropouts else index
        for dropout in self.dropouts:
            dropout.keys = keys

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bfloat16")

    def _synchronising(self, is_last: bool) -> contextlib.AbstractContextManager[object]:
        """Sum gradients over the ranks in the last part of a batch alone."""
        if isinstance(self.module, DistributedDataParallel) and not is_last:
            return self.module.no_sync()
        return contextlib.nullcontext()

    def _end_epoch(self) -> None:
        """Record the loss of the epoch, and evaluate if requested."""
        loss = _mean_loss(self._collect(), self.step)
        self._tally.zero_()
        self.losses.append(loss)
        self.epoch, self.step = self.epoch + 1, 0
        if not math.isfinite(loss):
            self.stopped, self.epoch = self.epoch - 1, self.epochs
        every = self.config.evaluate_every
        if every and self.epoch % every == 0 and self.epoch < self.epochs:
            self.curve.append({"epoch": self.epoch, "train_loss": loss, **self.judge()})

    def _collect(self) -> list[float]:
        """Reduce the counters of all ranks to the first one, which saves them."""
        self._share_skipped()
        total = self.team.sum(self._tally.tolist())
        self._tally.copy_(torch.tensor([0, 0] if self.team.rank else [int(value) for value in total]))
        return total

    def _share_skipped(self) -> None:
        """Tell all ranks which images each has skipped."""
        self.skipped.update(*(json.loads(text) for text in self.team.gather(json.dumps(sorted(self.skipped)))))

    # Evaluation

    def evaluate(self, data: Mapping[str, Any]) -> Evaluation:
        """The top-1 error and the loss on the held-out images; `curve` has the top-5 error too."""
        del data  # every rank has its share
        self.team.tell(do="evaluate")
        found = self.judge()
        loss = self.losses[-1] if self.losses else math.nan
        self.curve.append({"epoch": self.epoch, "train_loss": loss, **found})
        nothing = torch.empty(1, 0, dtype=torch.int64)
        return Evaluation(nothing, torch.tensor([found["top1"]]), torch.tensor([found["loss"]]))

    @torch.no_grad()
    def judge(self) -> dict[str, float]:
        """Errors in percent and the mean loss over all ranks; every image counts once."""
        with self.team.ending(lambda: f"in step {self.at}"):
            return self._judge()

    def _judge(self) -> dict[str, float]:
        self.team.spread(list(self.network.buffers()))  # local batch norms: those of the first rank, as in its files
        self.network.eval()
        sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        averaged = self.average.in_place() if self.average is not None else contextlib.nullcontext()
        with averaged, contextlib.closing(self.held_out.pieces(0)) as pieces:
            for piece in pieces:
                self.skipped.update(piece.corrupt)
                if len(piece.labels):
                    with self._precision():
                        logits = self.network(piece.images.to(memory_format=self.layout)).float()
                    sums += _sums(logits, piece.labels)
        self.network.train()
        self._share_skipped()
        count, top1, top5, loss = self.team.sum(sums.tolist())
        if not count:
            raise DataError("no validation image can be decoded; copy the images again")
        return {"top1": 100 * top1 / count, "top5": 100 * top5 / count, "loss": loss / count, "images": count}

    # Checkpoints

    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> str:
        """Write the state to one sealed file; the first rank has all of it."""
        about = {
            "describe": self.describe, "epoch": self.epoch, "step": self.step, "losses": self.losses,
            "tally": self._tally.tolist(), "stopped": self.stopped, "curve": self.curve,
            "skipped": sorted(self.skipped), "extra": dict(extra or {}),
        }  # fmt: skip
        return write_sealed(path, KEY, self._state(), finite(about))

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Load a state, on all ranks; it may have been saved by another number of them.

        Raises:
            SealedError: The file is damaged or something else.
            ValueError: It belongs to another training.
        """
        tensors, about = read_sealed(path, KEY)
        if changes := list(differences(about.get("describe"), self.describe)):
            raise ValueError(f"{path} belongs to another training: {changes[0]}")
        state = self._state()
        kinds, wanted = ({name: (t.shape, t.dtype) for name, t in given.items()} for given in (tensors, state))
        if kinds != wanted:
            first = min(name for name, _ in kinds.items() ^ wanted.items())
            raise ValueError(f"{path} belongs to another training: {first} is missing, or has another shape or type")
        try:
            where = self._where(about)
        except (TypeError, ValueError, LookupError) as error:
            raise SealedError(f"{path} is not a checkpoint of a training ({error}); remove the file") from error
        with torch.no_grad():
            for name, value in state.items():
                value.copy_(tensors[name])
        self.team.tell(do="load", where=where)
        self.resume_at(where)
        return dict(about["extra"])

    def _where(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """The place in the training, checked."""
        epoch, step = int(about["epoch"]), int(about["step"])
        losses = [math.nan if loss is None else float(loss) for loss in about["losses"]]
        if not 0 <= epoch <= self.epochs or not 0 <= step < self.steps_per_epoch or len(losses) > epoch:
            raise ValueError(f"epoch {epoch}, step {step}, {len(losses)} losses")
        tally = [int(value) for value in about["tally"]]
        return {"epoch": epoch, "step": step, "losses": losses, "tally": tally, "stopped": about["stopped"],
                "curve": list(about["curve"]), "skipped": [str(name) for name in about.get("skipped", [])]}  # fmt: skip

    def resume_at(self, where: Mapping[str, Any]) -> None:
        """What all ranks do in `load`: take the first rank's tensors and its place."""
        self.team.spread(list(self._state().values()))
        self.epoch, self.step, self.losses = where["epoch"], where["step"], list(where["losses"])
        self.stopped, self.curve = where["stopped"], list(where["curve"])
        if self._pieces is not None:
            self._pieces.close()
            self._pieces = None
        self.skipped = set(where["skipped"])
        self._tally.copy_(torch.tensor([0, 0] if self.team.rank else where["tally"]))

    def _state(self) -> dict[str, Tensor]:
        state = {f"parameter.{name}": value.detach() for name, value in self.network.named_parameters()}
        state |= {f"buffer.{name}": value for name, value in self.network.named_buffers()}
        for name, parameter in self.network.named_parameters():
            for kind, value in self.optimizer.state.get(parameter, {}).items():
                state[f"{kind.removesuffix('_buffer')}.{name}"] = value
        if self.average is not None:
            names = (name for name, _ in self.network.named_parameters())
            state |= {f"average.{name}": mean for name, mean in zip(names, self.average.means, strict=True)}
        return state

    # The other ranks

    def obey(self, command: Mapping[str, Any], should_stop: Stop) -> None:
        """Run a command of the first rank on another."""
        match command["do"]:
            case "train":
                self.run_steps(should_stop)
            case "evaluate":
                self.judge()
            case "load":
                self.resume_at(command["where"])


def _tally(loss: Tensor) -> Tensor:
    """A loss as a whole number of 2⁻²⁴, and whether it was not finite."""
    usual = loss.double().nan_to_num(0, 0, 0).clamp(-1e6, 1e6)
    return torch.stack([(usual * 2**24).round().long(), (~loss.isfinite()).long()])


def _mean_loss(tally: Sequence[float], steps: int) -> float:
    total, wrong = tally
    return math.nan if wrong else total / 2**24 / steps


def _sums(logits: Tensor, labels: Tensor) -> Tensor:
    """The number of images, those outside of the first and of the first five classes, and the sum of losses."""
    best = logits.topk(min(5, logits.shape[1]), 1).indices == labels[:, None]
    top1, top5 = (~best[:, :1].any(1)).sum(), (~best.any(1)).sum()
    loss = F.cross_entropy(logits, labels, reduction="sum")
    return torch.stack([torch.tensor(len(labels), device=logits.device), top1, top5, loss]).double()
