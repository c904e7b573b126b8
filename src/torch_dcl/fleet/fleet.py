"""The training loop of a fleet: E networks of one architecture, one program a step. One network is a fleet of one.

What differs between networks (data, order, dropout, branches, learning rate) is looked up by a network's index in the
fleet, and every random number is a function of the network's own (seed, epoch, step). So a network ends with the same
weights alone and in any fleet. On a GPU a step is captured once as a CUDA graph and replayed.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from torch_dcl.data.draws import draw
from torch_dcl.fleet import checkpoint, operations
from torch_dcl.fleet.augmentation import Inputs
from torch_dcl.fleet.cuda_graph import cudnn_algorithms, is_deterministic, private_workspaces
from torch_dcl.fleet.device_data import DeviceData, Labelled, check_data, check_fleet, check_labels
from torch_dcl.fleet.member import Evaluation, History, Member
from torch_dcl.fleet.operations import low_copy
from torch_dcl.fleet.sgd import Update, sgd_, squared_norms
from torch_dcl.fleet.stacked_network import Stack, stacked_state
from torch_dcl.fleet.unstacked import Unstacked

__all__ = ["Evaluation", "Fleet", "Member", "Precision"]

Precision = Literal["bfloat16", "float32", "float64"]


class Fleet:
    """E networks of one architecture, trained together.

    ::

        fleet = Fleet(networks, members, {"MNIST-II-01": (images, labels)}, device="cuda")
        fleet.train()
        fleet.evaluate({"MNIST-II-01": (test_images, test_labels)}).errors

    ``setup_seconds`` is the time that compilation and capture took on a GPU; 0 before, and on a CPU.

    Args:
        networks: One for each member, with initial weights. They are copied.
        members: Each network's own settings.
        data: Training data by name: uint8 images ``[N, H, W]`` or ``[N, C, H, W]`` and int64 labels ``[N]``, all of one
            size. Images that occur under several names are stored once.
        batch: Images of a step, for each network.
        momentum: Momentum of SGD.
        nesterov: Whether to use Nesterov momentum.
        factors: Maps a parameter's name in the plain network to its factors on learning rate and weight decay. None for
            1 and 1.
        precision: Type of products and activations. Parameters are float32, or float64.
        device: The device to train on.
        inputs: How images become inputs. None only divides them by 255.
        stacked: Whether to compute the layers of all networks as one, which is fastest for networks that are small for
            the device. Otherwise each network runs as the plain module that it is, with any layers, in channels_last.
        compile: Whether to compile the forward passes of unstacked networks with `torch.compile`.
        streams: How many unstacked networks run concurrently on a GPU.
        deterministic: Whether cuDNN's convolutions and compiled code must be deterministic, as an exact resume needs on
            a GPU. Otherwise they time several algorithms and take the fastest. Torch's own setting
            (``torch.backends.cudnn.deterministic``) has the same effect.

    Raises:
        ValueError: Members, networks and data do not match.
    """

    def __init__(
        self,
        networks: Sequence[nn.Module],
        members: Sequence[Member],
        data: Mapping[str, Labelled],
        *,
        batch: int = 100,
        momentum: float = 0.9,
        nesterov: bool = False,
        factors: Callable[[str], tuple[float, float]] | None = None,
        precision: Precision | None = None,
        device: torch.device | str = "cpu",
        inputs: Inputs | None = None,
        stacked: bool = True,
        compile: bool = False,
        streams: int = 1,
        deterministic: bool = False,
    ) -> None:
        check_fleet(networks, members, data, batch)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be from 0 to below 1, got {momentum}")
        if precision not in (None, *get_args(Precision)):
            raise ValueError(f"precision must be one of {', '.join(get_args(Precision))}, got {precision!r}")
        if stacked and (compile or streams != 1):
            raise ValueError("compile and streams are for unstacked networks; pass stacked=False with them")
        self.members, self.batch, self.momentum, self.nesterov = tuple(members), batch, momentum, nesterov
        self.deterministic = is_deterministic(deterministic)
        self.device = torch.device(device)
        if precision is None:
            precision = "bfloat16" if self.device.type == "cuda" else "float32"
        self.precision: Precision = precision
        self.compute = getattr(torch, precision)
        wide = torch.float64 if precision == "float64" else torch.float32
        stack = (
            Stack(networks)
            if stacked
            else Unstacked(networks, compile=compile, streams=streams, deterministic=self.deterministic)
        )
        self.stack: Stack | Unstacked = stack.to(self.device, wide).train()
        self.stack.set_compute_dtype(self.compute)
        self.inputs, self.stacked = inputs, stacked
        self.data = DeviceData(data, [member.data for member in members], self.device, inputs, train=True)
        self.steps_per_epoch = self.data.count // batch
        self.epochs = max(member.schedule.epochs for member in members)
        self.history = History()
        self.epoch = self.step = 0
        with self._on_device():
            self.classes = self._count_classes()
        check_labels({member.data: data[member.data] for member in members}, self.classes)
        self._parameters = {name: p for name, p in self.stack.named_stacked() if p.requires_grad}
        self._moments = {name: torch.zeros_like(p) for name, p in self._parameters.items()}
        self._factors = {name: (1.0, 1.0) if factors is None else factors(name) for name in self._parameters}
        self._branch_parameters = self.stack.branch_parameters()
        self._rates = self._rate_table().to(self.device, wide)
        self._decay = torch.tensor([member.weight_decay for member in members], device=self.device, dtype=wide)
        clips = [member.clip for member in members]
        self._clip = None if all(map(math.isinf, clips)) else torch.tensor(clips, device=self.device, dtype=wide)
        self._seed = torch.tensor([m.seed & 0x7FFFFFFFFFFFFFFF for m in members], device=self.device)
        self._step = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._alive = torch.ones(len(members), dtype=torch.bool, device=self.device)
        self._loss = torch.zeros(len(members), device=self.device, dtype=wide)
        self._order = torch.zeros(len(members), self.data.count, dtype=torch.int64, device=self.device)
        self._was_alive = [True] * len(members)
        self._begun_epoch: int | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self.setup_seconds = 0.0

    def __len__(self) -> int:
        return len(self.members)

    def train(
        self,
        epochs: int | None = None,
        *,
        on_epoch: Callable[["Fleet"], None] | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> History:
        """Train to the end of the schedules, or for some epochs only.

        Args:
            epochs: Number of epochs; None for all that are left.
            on_epoch: Called after every epoch.
            should_stop: Called before every step. When it returns True, training stops there, also inside an epoch
                (``step`` says where). `save` stores that state, and another call of `train` resumes with the next step.

        Returns:
            The history since the first epoch.
        """
        last = self.epochs if epochs is None else min(self.epochs, self.epoch + epochs)
        while self.epoch < last:
            with self._on_device():
                self._begin_epoch()
                while self.step < self.steps_per_epoch:
                    if should_stop is not None and should_stop():
                        return self.history
                    self._take_step()
                self._end_epoch()
            if on_epoch is not None:
                on_epoch(self)
        return self.history

    def _on_device(self) -> contextlib.AbstractContextManager[object]:
        """Make the fleet's GPU the current one, which graphs and kernels run on."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def network(self, index: int) -> nn.Module:
        """A copy of one network on the CPU, in float32 or float64 and in evaluation mode."""
        return self.stack.network(index).eval()

    @torch.no_grad()
    def evaluate(self, data: Mapping[str, Labelled], *, batch: int = 500) -> Evaluation:
        """Evaluate every network on the images of its own data, by name; the batch does not change the result."""
        check_data(data, [(member.name, member.data) for member in self.members])
        check_labels({member.data: data[member.data] for member in self.members}, self.classes)
        test = DeviceData(data, [member.data for member in self.members], self.device, self.inputs)
        predictions = torch.empty(len(self), test.count, dtype=torch.int64, device=self.device)
        losses = torch.zeros(len(self), dtype=torch.float64, device=self.device)
        wrong = torch.zeros_like(losses)
        self.stack.eval()
        with self._on_device():
            for start in range(0, test.count, batch):
                index = torch.arange(start, min(start + batch, test.count), device=self.device)
                images, labels = test.gather(index.expand(len(self), -1), self.compute)
                logits = self._predict_logits(images)
                predictions[:, start : start + batch] = chosen = logits.argmax(-1)
                losses += operations.cross_entropy(logits, labels).double().sum(1)
                wrong += (chosen != labels).sum(1)
        self.stack.train()
        return Evaluation(predictions, 100 * wrong / test.count, losses / test.count)

    def save(self, path: str | os.PathLike[str], extra: Mapping[str, Any] | None = None) -> str:
        """Write a checkpoint to one file, between two epochs or inside of one; return the SHA-256 that it carries.

        ``extra`` is plain data to store with it, which `load` returns. The folder must exist.
        """
        about = {
            "epoch": self.epoch,
            "train_loss": self.history.train_loss,
            "stopped": {str(row): epoch for row, epoch in self.history.stopped.items()},
            "members": self._describe(),
            "extra": dict(extra or {}),
        }
        if self.step:
            about |= {"step": self.step, "loss": self._loss.tolist(), "was_alive": self._was_alive}
        return checkpoint.write(path, self._state(), about)

    @torch.no_grad()
    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Load a checkpoint, and return the ``extra`` that `save` was given.

        Training resumes from it and ends with the same weights as without the interruption. The file must be from a
        fleet of the same members; the data itself is not compared.

        Raises:
            FileNotFoundError: There is no such file.
            SealedError: The file is damaged, or is not a checkpoint of a fleet.
            ValueError: It belongs to another fleet; the message names the first difference.
        """
        about = checkpoint.read(path, self._state(), self._describe(), self.epochs, self.steps_per_epoch)
        for parameter in self._parameters.values():
            copy = low_copy(parameter)
            if copy is not None:
                copy.copy_(parameter)
        self.epoch, self.step, self._begun_epoch = about["epoch"], about["step"], None
        self._loss.copy_(torch.tensor(about["loss"]))
        self._was_alive = about["was_alive"]
        self.history = History(about["train_loss"], {int(row): epoch for row, epoch in about["stopped"].items()})
        return dict(about["extra"])

    def _state(self) -> dict[str, Tensor]:
        state = {f"state.{name}": value for name, value in stacked_state(self.stack.body).items()}
        state |= {f"moment.{name}": value for name, value in self._moments.items()}
        return {**state, checkpoint.ALIVE: self._alive}

    def _describe(self) -> list[dict[str, Any]]:
        """The settings that a checkpoint must agree with, for each member."""
        common: dict[str, Any] = {
            "batch": self.batch, "momentum": self.momentum, "nesterov": self.nesterov, "precision": self.precision,
            "images": self.data.count,
        }  # fmt: skip
        if self.inputs is not None:
            common["inputs"] = self.inputs.describe()
        if not self.stacked:
            common["stacked"] = False
        return [{**asdict(member), **common} for member in self.members]

    def _count_classes(self) -> int:
        """The number of classes, found by running one image through a network."""
        with torch.no_grad():
            network = self.stack.network(0).eval()
            like = next(iter(network.parameters()))
            image = torch.zeros(1, *self.data.size, dtype=like.dtype)
            if isinstance(self.stack, Unstacked):
                self.stack.check_randomness(self.data.size)
            return int(network(image).shape[-1])

    def _predict_logits(self, images: Tensor) -> Tensor:
        """Logits; with `Inputs.average`, the logarithm of the mean probability of an image and its flip."""
        logits: Tensor = self.stack(images)
        if self.inputs is None or not self.inputs.average:
            return logits
        wide = torch.promote_types(logits.dtype, torch.float32)
        views = torch.stack([logits, self.stack(images.flip(-1))]).to(wide).log_softmax(-1)
        return views.logsumexp(0) - math.log(2)

    def _rate_table(self) -> Tensor:
        """Learning rates by step and network; the last row, of zeros, is for a trial step before the capture."""
        table = torch.zeros(self.epochs * self.steps_per_epoch + 1, len(self.members), dtype=torch.float64)
        for column, member in enumerate(self.members):
            rates = member.schedule.rates(member.lr, self.steps_per_epoch)
            table[: len(rates), column] = rates
        return table

    def _begin_epoch(self) -> None:
        """Draw the order, crops and flips of an epoch; before the first one on a GPU, capture a step."""
        if self._begun_epoch == self.epoch:
            return
        self._begun_epoch = self.epoch
        if not self._parameters:
            raise ValueError(
                "every parameter of the networks is frozen, so nothing would be trained; call requires_grad_() on some "
                "before you create the fleet, or only evaluate it"
            )
        if self.device.type == "cuda" and self._graph is None:
            start = time.perf_counter()
            self._capture()
            torch.cuda.synchronize()
            self.setup_seconds = time.perf_counter() - start
        orders: dict[int, Tensor] = {}
        places = torch.arange(self.data.count, device=self.device)
        for row, member in enumerate(self.members):
            if member.seed not in orders:
                orders[member.seed] = draw(member.seed, "order", self.epoch, places).argsort(stable=True)
            self._order[row] = orders[member.seed]
        self.data.begin_epoch([member.seed for member in self.members], self.epoch)
        self._step.fill_(self.epoch * self.steps_per_epoch + self.step)
        if not self.step:
            self._loss.zero_()
            self._was_alive = self._alive.tolist()

    def _take_step(self) -> None:
        """Run one step of an epoch that has begun."""
        if self._graph is None:
            self._one_step()
        else:
            self._graph.replay()
        self.step += 1

    def _end_epoch(self) -> None:
        """Record the losses of the epoch and the networks that stopped in it."""
        losses = torch.where(self._alive, self._loss / self.steps_per_epoch, torch.nan)
        self.history.train_loss.append(losses.tolist())
        for i, (before, now) in enumerate(zip(self._was_alive, self._alive.tolist(), strict=True)):
            if before and not now:
                self.history.stopped[i] = self.epoch
        self.epoch, self.step = self.epoch + 1, 0

    def _one_step(self) -> None:
        """One step, entirely on the device."""
        place = self._step % self.steps_per_epoch * self.batch + torch.arange(self.batch, device=self.device)
        images, labels = self.data.gather(self._order.index_select(1, place), self.compute)
        before = [(buffer, buffer.clone()) for buffer in self.stack.step_buffers()]
        self.stack.advance(self._seed, self._step)
        losses, gradients = self.stack.gradients(images, labels)
        with torch.no_grad():
            updates = self._updates(gradients)
            squares = squared_norms(updates, losses.dtype) if updates else torch.zeros_like(losses)
            self._alive &= (losses + squares) * 0 == 0  # both are finite
            rate = self._rates.index_select(0, self._step)[0] * self._alive
            self._loss += losses
            scale = None
            if self._clip is not None:
                scale = (self._clip / squares.sqrt().clamp(min=torch.finfo(squares.dtype).tiny)).clamp(max=1)
            if updates:
                sgd_(updates, rate, self._decay, scale, self.momentum, self.nesterov, self._alive)
            for buffer, old in before:  # a network that is not updated keeps its statistics as well
                buffer.copy_(torch.where((rate != 0).view(-1, *(1,) * (old.dim() - 1)), buffer, old))
            self._step += 1

    def _updates(self, gradients: Sequence[Tensor | None]) -> list[Update]:
        updates = []
        for (name, parameter), gradient in zip(self._parameters.items(), gradients, strict=True):
            if gradient is not None:
                fusion, branches = self._branch_parameters.get(name, (None, 1))
                active = None if fusion is None else fusion.active
                moment, factors = self._moments[name], self._factors[name]
                updates.append(Update(parameter, moment, gradient.contiguous(), factors, active, branches))
        return updates

    def _capture(self) -> None:
        """Capture a step as a CUDA graph, after two trial steps with learning rates of 0, and restore the state."""
        before = {name: buffer.clone() for name, buffer in self.stack.named_buffers()}
        alive, loss, step = self._alive.clone(), self._loss.clone(), self._step.clone()

        def restore() -> None:
            for name, buffer in self.stack.named_buffers():
                buffer.copy_(before[name])
            self._alive.copy_(alive)
            self._loss.copy_(loss)
            self._step.copy_(step)

        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), cudnn_algorithms(deterministic=self.deterministic):
            for _ in range(2):
                self._step.fill_(len(self._rates) - 1)
                self._one_step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        self._step.fill_(len(self._rates) - 1)
        with private_workspaces(), torch.cuda.graph(graph), cudnn_algorithms(deterministic=self.deterministic):
            self._one_step()
        restore()
        self._graph = graph
