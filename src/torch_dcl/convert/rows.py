"""The plan as data: a row for every layer, with its numbers before and after a conversion."""

import difflib
import json
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from torch import nn

from torch_dcl.convert.modelfile import PLAN, find_flaw
from torch_dcl.convert.table import render
from torch_dcl.fusion import Strategy

__all__ = ["Choice", "Comparison", "Plan", "Row", "Timing"]

VERSION = 1
Status = Literal["pays", "left", "refused"]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments and keyword arguments of a network."""
GROWS = "would not shrink"
"""The prefix of the reason for a unit that has no fewer weights as a DCL layer."""
SLOWER = "slower"
"""The prefix of the reason for a unit that is slower as a DCL layer."""
UNCAPTURED = "cannot be captured as a CUDA graph"
Mode = Literal["eager", "compile", "reduce-overhead", "graph"]
Phase = Literal["train", "infer"]
Pattern = str | Callable[[str, nn.Module], bool]


class Modules(weakref.WeakValueDictionary[str, nn.Module]):
    """The layers of a plan by name. A copy keeps them, a pickle does not: they belong to one process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Modules, ()


class Timing(NamedTuple):
    """Milliseconds of a forward pass, and of forward and backward (None if nothing can be differentiated)."""

    forward: float
    full: float | None


class Comparison(NamedTuple):
    """Median milliseconds of a plain and of a converted unit or network, and the spread of their ratio.

    Ratio ± spread holds the 95 % interval of the median of the rounds' ratios, from their order alone; with fewer than
    nine rounds it holds all of them.
    """

    plain: float
    dcl: float
    spread: float

    @property
    def ratio(self) -> float:
        """Converted over plain."""
        return self.dcl / self.plain

    @property
    def is_slower(self) -> bool:
        """Whether the converted one is slower by more than the spread, or by more than 5 % where that is wider."""
        return self.ratio > 1 + min(self.spread, 0.05)

    def __str__(self) -> str:
        """The ratio with its spread."""
        digits = 2 if self.spread >= 0.005 else 3
        return f"{self.ratio:.{digits}f} ± {self.spread:.{digits}f}"


class Choice(NamedTuple):
    """The settings and the result of a selection by time."""

    mode: Mode
    phase: Phase
    network: Comparison | None
    """The comparison of the whole network with the selected units, or the best one if none is left. None if every
    unit is slower by itself, and after the selection has changed."""

    @property
    def step(self) -> str:
        """The timed step in words."""
        what = "training step" if self.phase == "train" else "forward"
        return {
            "eager": f"eager {what}", "compile": f"compiled {what}", "graph": f"{what} as a CUDA graph",
            "reduce-overhead": f"{what} compiled to CUDA graphs",
        }[self.mode]  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One Conv or Linear of the network."""

    name: str
    aliases: tuple[str, ...]
    """Further names of the same module."""
    kind: str
    """The class of the layer."""
    in_channels: int
    out_channels: int
    kernel: tuple[int, ...]
    norm: str | None
    """The batch norm that moves into the DCL layer."""
    calls: int
    status: Status
    """"pays": a unit that shrinks; "left": not converted for a reason; "refused": cannot be converted."""
    reason: str
    """Why the layer is not or cannot be converted."""
    selected: bool
    widths: tuple[int, ...]
    """M(t)."""
    strategy: Strategy
    eps: float | None
    weights: int
    """All parameters but biases, of the layer and of its batch norm."""
    weights_after: int
    parameters: int
    parameters_after: int
    macs: int
    """Multiply-adds of all calls on the example."""
    macs_after: int
    timings: Mapping[str, Timing] | None = None
    """Measured "plain", "dcl" and "low_rank"."""
    channels_last: bool = True
    """Whether its output is in channels_last, the layout of the GPU kernels."""
    relu: str | None = None
    """The ReLU after this layer, which is a no-op after conversion."""
    shares_relu: bool = False
    """Whether other layers share that ReLU."""
    paying_ratio: float | None = None
    """For a unit that would not shrink: the largest ratio at which it would, if there is one."""
    comparison: Comparison | None = None
    """The times of the unit in a selection by time."""

    @property
    def is_unit(self) -> bool:
        """Whether DCL can replace it: a layer with its ReLU, even if it would not shrink or is slower."""
        without_gain = self.status == "left" and self.reason.startswith((GROWS, SLOWER, UNCAPTURED))
        return self.status == "pays" or without_gain

    @property
    def branches(self) -> int:
        """T."""
        return len(self.widths)

    @property
    def low_rank_width(self) -> int:
        """The width of the low-rank layer (T = 1) of equal weights: ΣM."""
        return sum(self.widths)

    @property
    def smaller(self) -> bool:
        """The paper's inequality: u²·K1·ΣM + K2·ΣM ≤ u²·K1·K2."""
        filter_size = self.in_channels * math.prod(self.kernel)
        return (filter_size + self.out_channels) * sum(self.widths) <= filter_size * self.out_channels

    @property
    def within_half(self) -> bool:
        """The paper's rule of thumb: ΣM ≤ K2/2 (which its own three branches of K2/5 break)."""
        return 2 * sum(self.widths) <= self.out_channels

    @property
    def saved(self) -> int:
        """Weights saved by converting."""
        return self.weights - self.weights_after


@dataclass(frozen=True)
class Plan:
    """The layers of a network to convert, the savings, and the reasons for all other layers.

    Print it, narrow it with :meth:`only` and :meth:`without`, and pass it to ``convert_``.
    """

    rows: tuple[Row, ...]
    weights: int
    """All parameters of the network but biases."""
    parameters: int
    """All parameters of the network."""
    example: str
    """A description of the input of the run."""
    device: str | None = None
    """The device of the timings."""
    timings: Mapping[str, Timing] | None = None
    """Timings of the whole network, "plain" and "dcl", and on a GPU "plain, captured" and "dcl, captured", as CUDA
    graphs. None after the selection has changed."""
    choice: Choice | None = None
    """The selection by time, if there was one."""
    modules: weakref.WeakValueDictionary[str, nn.Module] | None = field(default=None, repr=False, compare=False)
    """The layers of the rows, for predicates; not part of the JSON, nor of a pickle."""
    inputs: Inputs | None = field(default=None, repr=False, compare=False)
    """The input of the run, a single one if a size was given, for the check of ``convert_``; not part of the JSON."""

    @property
    def selected(self) -> tuple[Row, ...]:
        """The rows that ``convert_`` will convert."""
        return tuple(row for row in self.rows if row.selected)

    @property
    def weights_after(self) -> int:
        """All parameters but biases after the conversion."""
        return self.weights - sum(row.saved for row in self.selected)

    @property
    def parameters_after(self) -> int:
        """All parameters after the conversion."""
        return self.parameters - sum(row.parameters - row.parameters_after for row in self.selected)

    @property
    def macs(self) -> int:
        """Multiply-adds of all Conv and Linear layers on the example."""
        return sum(row.macs for row in self.rows)

    @property
    def macs_after(self) -> int:
        """The same after the conversion."""
        return sum(row.macs_after if row.selected else row.macs for row in self.rows)

    def only(self, *patterns: Pattern | Iterable[Pattern], force: bool = False) -> "Plan":
        """Select these units and no others.

        Args:
            *patterns: Names, globs (``"features.2*"``), a predicate on (name, module), or a list of these. Globs and
                predicates choose among the units that pay. An exact name also takes a unit that would not shrink or
                is slower.
            force: Whether an exact name also selects a layer that is not a unit. Such a layer is not followed by a ReLU
                alone, so a DCL layer in its place computes something else.

        Raises:
            ValueError: a pattern matches nothing, or a named layer is not a unit or cannot be converted.
            TypeError: a pattern of the wrong kind.
        """
        chosen = self._match(patterns, among=lambda row: row.status == "pays", force=force)
        return self._select(chosen)

    def without(self, *patterns: Pattern | Iterable[Pattern]) -> "Plan":
        """Deselect these units.

        Args:
            *patterns: As in :meth:`only`, matched against the units that are selected.

        Raises:
            ValueError: a pattern matches nothing.
            TypeError: a pattern of the wrong kind.
        """
        dropped = self._match(patterns, among=lambda row: row.selected)
        return self._select({row.name for row in self.selected} - dropped)

    def to_json(self) -> str:
        """The plan as text, with the version of the format; :meth:`from_json` reads it."""
        fields = {name: getattr(self, name) for name in ("weights", "parameters", "example", "device")}
        times = {"timings": self.timings, "choice": self.choice and self.choice._asdict()}
        rows = [asdict(row) for row in self.rows]
        return json.dumps({"torch_dcl_plan": VERSION, **fields, **times, "rows": rows}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: the text is not a plan, or one of a newer version.
        """
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, RecursionError, TypeError) as error:
            given = "the text is not JSON" if isinstance(text, str) else f"a {type(text).__name__} is not a text"
            raise ValueError(
                f"not a plan: {given} ({error}); from_json takes what a file holds, as in Path(file).read_text()"
            ) from error
        version = data.pop("torch_dcl_plan", None) if isinstance(data, dict) else None
        if not isinstance(version, int):
            raise ValueError('not a plan: the key "torch_dcl_plan" is missing; write plans with Plan.to_json()')
        if version > VERSION:
            raise ValueError(
                f"the plan is of version {version}, this torch-dcl reads up to {VERSION}; update torch-dcl"
            )
        if flaw := find_flaw(data, PLAN):
            raise ValueError(f"not a plan: {flaw!r} is missing or of another kind; write plans with Plan.to_json()")
        try:
            rows = tuple(_read_row(row) for row in data.pop("rows"))
            times = {"timings": _read_timings(data["timings"]), "choice": _read_choice(data.get("choice"))}
            return cls(rows=rows, **{**data, **times})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a complete plan: {error!r}; write plans with Plan.to_json()") from error

    def table(self, width: int | None = None) -> str:
        """The table as ``print`` shows it.

        Args:
            width: The number of characters per line: what does not fit is shortened or left out, the least important
                first. None uses the width of the terminal, or no limit if the output is not a terminal.
        """
        return render(self, width)

    def __str__(self) -> str:
        """The table."""
        return self.table()

    def _select(self, names: set[str]) -> "Plan":
        rows = tuple(replace(row, selected=row.name in names) for row in self.rows)
        if rows == self.rows:
            return self
        return replace(self, rows=rows, timings=None, choice=self.choice and self.choice._replace(network=None))

    def _match(
        self, patterns: tuple[Pattern | Iterable[Pattern], ...], among: Callable[[Row], bool], force: bool | None = None
    ) -> set[str]:
        """The names of the rows that match; with ``force`` None, an exact name too must be in ``among``."""
        flat = list(_flat(patterns))
        if not flat:
            raise ValueError("no pattern given; name units, globs or a predicate on (name, module)")
        chosen: set[str] = set()
        for pattern in flat:
            if isinstance(pattern, str):
                found = self._named(pattern, among, force)
            elif callable(pattern) and not isinstance(pattern, nn.Module):
                found = [row for row in self.rows if among(row) and pattern(row.name, self._module(row.name))]
                if not found:
                    raise ValueError(
                        f"the predicate {getattr(pattern, '__name__', pattern)!r} holds for no unit of the plan"
                    )
            else:
                raise TypeError(
                    f"a pattern is a name, a glob or a predicate on (name, module), got {type(pattern).__name__}; "
                    f"the names of units are in plan.rows, for example {[row.name for row in self.rows][:3]}"
                )
            chosen.update(row.name for row in found)
        return chosen

    def _named(self, pattern: str, among: Callable[[Row], bool], force: bool | None) -> list[Row]:
        """The rows of an exact name or a glob, checked."""
        exact = [row for row in self.rows if pattern in (row.name, *row.aliases)]
        for row in exact if force is not None else ():
            if row.status == "refused":
                raise ValueError(f"{pattern!r} cannot be converted: {row.reason}")
            if not row.widths:
                raise ValueError(f"{pattern!r} has {row.out_channels} outputs, less than the width; plan a smaller one")
            if not (row.is_unit or force):
                raise ValueError(f"{pattern!r} is left alone: {row.reason}; force=True converts it all the same")
        found = [row for row in exact if force is not None or among(row)] or [
            row for row in self.rows if among(row) and any(fnmatchcase(n, pattern) for n in (row.name, *row.aliases))
        ]
        if not found:
            raise ValueError(self._unmatched(pattern, among, naming=force is not None))
        return found

    def _module(self, name: str) -> nn.Module:
        module = None if self.modules is None else self.modules.get(name)
        if module is None:
            raise ValueError(
                "a predicate needs the network that was planned, and it is gone; name units or globs instead"
            )
        return module

    def _unmatched(self, pattern: str, among: Callable[[Row], bool], *, naming: bool) -> str:
        others = [row for row in self.rows if any(fnmatchcase(n, pattern) for n in (row.name, *row.aliases))]
        if others:
            row = others[0]
            if row.status == "pays":
                return f"{pattern!r} matches {row.name!r}, but it is not selected"
            remedy = "name it exactly" + ("" if row.is_unit else ", with force=True")
            message = f"{pattern!r} matches {row.name!r}, but it is left alone ({row.reason})"
            return f"{message}; {remedy}" if naming and row.status == "left" else message
        names = [n for row in self.rows if among(row) for n in (row.name, *row.aliases)]
        names += [row.name for row in self.rows if row.name not in names]
        if any(n.startswith(pattern + ".") for n in names):
            return f"{pattern!r} is no unit, but units lie below it; use {pattern + '.*'!r}"
        near = difflib.get_close_matches(pattern, names, 3, 0.4) or names[:3]
        return f"{pattern!r} matches no unit; nearest: {', '.join(map(repr, near)) or 'none, the network has no layer'}"


def _flat(patterns: Iterable[Pattern | Iterable[Pattern]]) -> Iterator[Pattern]:
    """The patterns one by one, also out of a list of them."""
    for pattern in patterns:
        if isinstance(pattern, Iterable) and not isinstance(pattern, (str, nn.Module)):
            yield from pattern
        else:
            yield pattern


def _read_row(data: dict[str, Any]) -> Row:
    tuples = {name: tuple(data[name]) for name in ("aliases", "kernel", "widths")}
    times = {"timings": _read_timings(data["timings"]), "comparison": _read_comparison(data.get("comparison"))}
    return Row(**{**data, **tuples, **times})


def _read_timings(data: dict[str, list[float]] | None) -> dict[str, Timing] | None:
    return None if data is None else {name: Timing(*values) for name, values in data.items()}


def _read_choice(data: dict[str, Any] | None) -> Choice | None:
    return None if data is None else Choice(**{**data, "network": _read_comparison(data["network"])})


def _read_comparison(data: list[float] | None) -> Comparison | None:
    return None if data is None else Comparison(*data)
