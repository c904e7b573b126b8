"""Ranks that train one network together: the first runs the recipe, the others follow its commands.

Only the first rank writes. A command is a line of JSON, sent through gloo, after which all ranks run the same code. So
every decision is made once: when to pause for a checkpoint, when to stop, which network comes next.
"""

import contextlib
import datetime
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_dcl.experiments.ranks import Rank, StopRequest, join_group
from torch_dcl.experiments.settings import SettingError
from torch_dcl.fleet.run_folder import RunError, differences

__all__ = ["Team", "reason_of"]

PAUSE = 15.0  # seconds between two returns to the runner, which then saves, or stops when its time is up
GRACE = 60.0  # additional seconds that NCCL waits after a step has given up
CONTINUE, PAUSED, STOPPED = 0, 1, 2  # larger ones are the number of a signal


def reason_of(error: Exception) -> str:
    """The first line of an error, with an unusual kind; without the place in gloo's source, and its advice."""
    first = (str(error).splitlines() or [type(error).__name__])[0]
    if not isinstance(error, RuntimeError | ValueError | OSError):
        first = f"{type(error).__name__}: {first}"
    if place := re.match(r"\[[^]]*\.(cc|cpp|h):\d+\] *", first):
        first = first[place.end() :].partition(". ")[0]
    return first


class Team:
    """All ranks of a run.

    Args:
        rank: The number of this rank.
        timeout: Seconds after which a rank that waits for another gives up.
        backend: "gloo" for gradients through the CPU's memory too; otherwise through NCCL where there are GPUs.
    """

    def __init__(self, rank: Rank, timeout: float = 600.0, backend: str = "auto") -> None:
        self.rank, self.world, self.timeout = rank.number, rank.world, timeout
        self._flags: Tensor | None = None
        self._pending: Any = None
        if self.world > 1 and not dist.is_initialized():
            with self._patience("the start of all ranks"):
                # "cpu:gloo,cuda:nccl": commands go through gloo, gradients through the device's own.
                if backend != "gloo" and torch.cuda.is_available():
                    # NCCL ends a process that it gives up on; a step waits less long, and says why (`settle`).
                    join_group("cpu:gloo,cuda:nccl", timeout + GRACE)
                else:
                    join_group("gloo", timeout)

    @contextlib.contextmanager
    def _patience(self, what: str) -> Iterator[None]:
        """Reword torch's errors about a rank that is gone or hangs."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RunError):
                raise
            raise RunError(
                f"rank {self.rank} of {self.world} gave up at {what}: another rank ended or hung "
                f"for {self.timeout:g} s ({reason_of(error)}); resume the run; --set timeout=SECONDS gives ranks longer"
            ) from error

    # Commands

    def tell(self, **command: Any) -> None:
        """Send a command from the first rank to the others."""
        if self.world > 1:
            self._broadcast_text(json.dumps(command))

    def hear(self) -> dict[str, Any]:
        """Wait for a command of the first rank."""
        command: dict[str, Any] = json.loads(self._broadcast_text(""))
        return command

    def _broadcast_text(self, text: str) -> str:
        with self._patience("a command"):
            data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.empty(0).byte()
            length = torch.tensor([len(data)])
            dist.broadcast(length, 0)
            data = data if not self.rank else torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(data, 0)
        return bytes(data.tolist()).decode()

    # Agreement

    def stops(self, should_stop: Callable[[], bool] | None, pause_at: float) -> int:
        """Whether all ranks leave the loop here. All ranks call it after every step.

        With several ranks the answer is the one of the previous step, so that no step waits for it.

        Args:
            should_stop: Whether this rank received a request to stop.
            pause_at: The time on the first rank's clock at which it returns to the runner.

        Returns:
            `CONTINUE`, `PAUSED`, or the signal that caused the stop.
        """
        flag = CONTINUE
        if should_stop is not None and should_stop():
            flag = max(STOPPED, int(getattr(should_stop, "signal", None) or STOPPED))
        elif not self.rank and time.monotonic() >= pause_at:
            flag = PAUSED
        if self.world == 1:
            return flag
        agreed = self.settle()
        if agreed == CONTINUE:
            self._flags = torch.tensor([flag])
            self._pending = dist.all_reduce(self._flags, dist.ReduceOp.MAX, async_op=True)
        elif agreed >= STOPPED and isinstance(should_stop, StopRequest) and not should_stop():
            should_stop.take(agreed)
        return agreed

    def settle(self) -> int:
        """Wait for the flags that are under way; what they say."""
        if self._pending is None or self._flags is None:
            return CONTINUE
        with self._patience("a step"):
            self._pending.wait(datetime.timedelta(seconds=self.timeout))
        agreed, self._pending = int(self._flags), None
        return agreed

    def sum(self, values: Sequence[float]) -> list[float]:
        """Numbers summed over all ranks."""
        total = torch.tensor(list(values), dtype=torch.float64)
        if self.world > 1:
            with self._patience("a sum"):
                dist.all_reduce(total)
        return [float(value) for value in total]

    @torch.no_grad()
    def spread(self, tensors: Sequence[Tensor]) -> None:
        """Copy the first rank's tensors to the others, in place."""
        if self.world > 1:
            with self._patience("a copy of the state"):
                for tensor in tensors:
                    dist.broadcast(tensor, 0)

    def gather(self, text: str) -> list[str]:
        """The texts of all ranks, on each."""
        if self.world == 1:
            return [text]
        data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        with self._patience("a comparison"):
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
            dist.all_gather(lengths, torch.tensor([len(data)]))
            longest = max(map(int, lengths))
            texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world)]
            dist.all_gather(texts, torch.nn.functional.pad(data, (0, longest - len(data))))
        return [bytes(t[: int(n)].tolist()).decode().strip() for t, n in zip(texts, lengths, strict=True)]

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Run a block on all ranks; if one fails, all do, and the first one reports the reason.

        Raises:
            SettingError: Something is wrong on another rank, which the message names.
        """
        problem: Exception | None = None
        try:
            yield
        except Exception as error:
            problem = error
        if self.world == 1:
            if problem is not None:
                raise problem
            return
        problems = self.gather(reason_of(problem) if problem is not None else "")
        for number, text in enumerate(problems):
            if text:
                if number == self.rank and problem is not None:
                    raise problem
                raise SettingError(f"rank {number} of {self.world}: {text}")

    @contextlib.contextmanager
    def ending(self, where: Callable[[], str]) -> Iterator[None]:
        """End the run if this rank fails, since the others wait for it; one process by itself may go on."""
        try:
            yield
        except Exception as error:
            if self.world == 1 or isinstance(error, RunError):
                raise
            longer = f"if it hung for {self.timeout:g} s, --set timeout=SECONDS gives it longer"
            others = f"; if another rank ended, its own message says why; {longer}"
            hint = others if isinstance(error, RuntimeError) else ""
            raise RunError(
                f"rank {self.rank} of {self.world} failed {where()}: {reason_of(error)}{hint}; the run can be resumed"
            ) from error

    def compare(self, asked: dict[str, Any]) -> None:
        """Refuse ranks that were asked for different things.

        Raises:
            SettingError: The settings or the data of some rank differ; the message names the first differences.
        """
        everyone = [json.loads(text) for text in self.gather(json.dumps(asked, sort_keys=True))]
        for number, other in enumerate(everyone):
            if found := list(differences(everyone[0], other, words=("on rank 0", f"on rank {number}"))):
                raise SettingError(
                    f"rank {number} has other settings or data than rank 0: {'; '.join(found[:3])}; start all ranks "
                    "with the same command on the same files"
                )
