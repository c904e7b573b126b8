"""The columns of Table 1: the paper's networks, the controls that a reader asks for, and their learning rates.

A DCL network is always the baseline after `convert_`. The controls have DCL-A2's weights, to within half a filter, and
`MORE` has controls with the weights of B2 and of B3, and plain networks that start at the scale of the factorised ones.
The learning rates were chosen by `torch_dcl.experiments.recipes.table1_search`.
"""

import functools
import json
import math
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from torch_dcl.convert import Plan, convert_, plan
from torch_dcl.experiments.settings import SettingError
from torch_dcl.experiments.table import CONTROLS, MORE
from torch_dcl.models import _common, count_weights, lenet, variant_plan
from torch_dcl.models.controls import SummedLinear
from torch_dcl.models.variants import VARIANTS

__all__ = [
    "CONTROLS", "DECAY", "EXTRAS", "MODELS", "MORE", "Choice", "Trial", "build", "choice_as_plain", "find_choice",
    "read_choice", "stored_choice", "stored_minutes", "weights",
]  # fmt: skip

EXTRAS = ("A4S", "A5S", "A4D", "A5D", "AB2")
"""Networks outside of the table: more branches in the first layer, and both layers replaced."""

MODELS = ("baseline", "oracle", *VARIANTS, *CONTROLS)
"""The columns in the order of the table."""

_FC1, _FC1_IN, _SHARE = 500, 800, 1 / 5


def build(column: str, classes: int, seed: int, *, filters: int | None = None) -> nn.Module:
    """A LeNet of a column, one of `MODELS`, `MORE` or `EXTRAS`, started from a seed.

    The convolutions of one seed start alike in all columns, and torch's own generator is left as it was. The oracle's
    networks are the baseline with ten classes. ``filters`` of a branch may take the place of the paper's fifth, in the
    DCL columns alone.
    """
    with torch.random.fork_rng(devices=[]):
        # Before the seed is set: planning makes a network of its own, and only the first time.
        kind, _, of = column.partition("-B")
        name = column.removesuffix("-matched")
        plain = name in ("baseline", "oracle", "narrow") or kind in ("summed", "wide")
        plans = () if plain else _plans(column, classes, filters)
        resized = name == "narrow" or kind == "wide"
        filled = _plain_filters({"2": "B2", "3": "B3D"}.get(of, "A2"), classes) if resized else 0
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which seeds GPUs as well
        model = lenet(classes)
        if resized:
            model.fc1, model.fc2 = nn.Linear(_FC1_IN, filled), nn.Linear(filled, classes)
            for layer in (model.fc1, model.fc2):
                _common.uniform_(layer, bound=math.sqrt(3 / layer.in_features))
        if column.endswith("-matched"):
            model.fc1.weight.data /= math.sqrt(3)  # factorised layers start at the variance of torch's default layer
        if column == "summed":
            model.fc1 = SummedLinear.like(model.fc1, branches=2, width=_FC1 // 5)  # type: ignore[assignment]
        elif kind == "summed":
            model.fc2 = SummedLinear.like(model.fc2, branches=int(of), width=classes // 5)  # type: ignore[assignment]
        for each in plans:
            convert_(model, each, init="random")
    return model


@functools.cache
def weights(column: str, classes: int, *, filters: int | None = None) -> int:
    """How many weights a network of the column has, without biases; of the oracle, one of its networks."""
    return count_weights(build(column, 10 if column == "oracle" else classes, 0, filters=filters))


@functools.cache
def _plain_filters(column: str, classes: int) -> int:
    """Filters of a plain first fully-connected layer with which the network has the weights of another column."""
    fixed = sum(m.weight.numel() for m in lenet(classes).modules() if isinstance(m, nn.Conv2d))
    return round((weights(column, classes) - fixed) / (_FC1_IN + classes))


@functools.cache
def _plans(column: str, classes: int, filters: int | None) -> tuple[Plan, ...]:
    """The conversion of the baseline into the network of a column."""
    model = lenet(classes)
    if column == "low-rank":
        return (plan(model, model.input_size, branches=1, width=2 * _FC1 // 5, eps=0.0).only("fc1"),)
    if column.startswith("low-rank-B"):
        width = int(column[-1]) * classes // 5
        return (plan(model, model.input_size, branches=1, width=width, eps=0.0).only("fc2", force=True),)
    if column == "AB2":
        return variant_plan(model, "A2"), variant_plan(model, "B2")
    if column in EXTRAS:
        strategy = "stochastic" if column.endswith("S") else "deterministic"
        width = filters or _FC1 // 5
        planned = plan(model, model.input_size, branches=int(column[1]), width=width, strategy=strategy)  # type: ignore[arg-type]
        return (planned.only("fc1"),)
    if column in VARIANTS:
        layer = model.fc1 if column[0] == "A" else model.fc2
        share = _SHARE if filters is None else filters / layer.out_features
        return (variant_plan(model, column, fraction=share),)
    raise ValueError(f"there is no column {column!r}; the columns are {', '.join((*MODELS, *MORE, *EXTRAS))}")


# Learning rates


DECAY = 5e-4


class Trial(NamedTuple):
    """The tuned settings: learning rate, maximum norm of the gradient, and weight decay."""

    lr: float
    clip: float = math.inf
    decay: float = DECAY

    def __str__(self) -> str:
        clip = "" if math.isinf(self.clip) else f" clip {self.clip:g}"
        return f"{self.lr:g}{clip}" + ("" if self.decay == DECAY else f" decay {self.decay:g}")

    def as_plain(self) -> dict[str, float | None]:
        """The trial as JSON has it; the usual weight decay is left out."""
        plain: dict[str, float | None] = {"lr": self.lr, "clip": None if math.isinf(self.clip) else self.clip}
        return plain if self.decay == DECAY else {**plain, "weight_decay": self.decay}


Choice = dict[str, dict[int, Trial]]
"""By column and number of digits."""


def read_choice(plain: Mapping[str, Any]) -> Choice:
    """Read what `choice_as_plain` gave."""
    return {
        column: {
            int(count): Trial(t["lr"], t["clip"] or math.inf, t.get("weight_decay", DECAY))
            for count, t in by_count.items()
        }
        for column, by_count in plain.items()
    }


def choice_as_plain(choice: Choice, columns: Iterable[str]) -> dict[str, Any]:
    """The choice for some columns, as JSON has it."""
    return {column: {str(n): trial.as_plain() for n, trial in choice[column].items()} for column in columns}


def find_choice(path: str, wanted: Iterable[tuple[str, int]]) -> Choice:
    """The choice of a search, from its ``search.json`` or its run folder; of this release where none is named.

    Args:
        path: The file or the folder, or an empty text.
        wanted: Columns and numbers of digits that need a choice.

    Raises:
        SettingError: There is no choice, or it lacks a column.
    """
    place = Path(path).expanduser()
    try:
        file = place / "search.json" if place.is_dir() else place
        choice = read_choice(json.loads(file.read_text(encoding="utf-8"))["choice"]) if path else stored_choice()
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise SettingError(
            f"choice is {path!r}, which has no learning rates ({type(error).__name__}); give the search.json of a "
            "finished dcl run table1-search"
        ) from None
    if missing := sorted({column for column, count in wanted if count not in choice.get(column, {})}):
        raise SettingError(
            f"no learning rate was chosen for {', '.join(missing)}; search one with dcl run table1-search --models "
            f"{','.join(missing)}, and give its search.json with --set choice=FILE"
        )
    return choice


def stored_choice() -> Choice:
    """The choice of the last search for this release."""
    return read_choice(_stored()["choice"])


def stored_minutes() -> dict[str, float]:
    """Minutes of the ``calibration`` of the sets and of that ``search``, on the machines that their results name."""
    return dict(_stored()["minutes"])


def _stored() -> dict[str, Any]:
    text = resources.files("torch_dcl.experiments").joinpath("chosen.json").read_text(encoding="utf-8")
    return dict(json.loads(text))
