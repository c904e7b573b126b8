"""Recipes: what ``dcl run`` can run, with every setting, as TOML to copy, edit and run again."""

import ast
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_dcl.cli.names import UsageError, nearest, read_names, read_sets, split

if TYPE_CHECKING:
    from torch_dcl.experiments.protocol import Config

__all__ = [
    "ABOUT",
    "RUN",
    "Key",
    "Recipe",
    "as_toml",
    "config_of",
    "find_recipe",
    "read_recipe",
    "recipe",
    "with_settings",
]

Value = str | int | float | list[str] | list[float] | list[int]


def _run_by_the_runner() -> dict[str, str]:
    """What each recipe of `torch_dcl.experiments.recipes` runs: the first line of its file. None is loaded for it."""
    found = {}
    for file in sorted(Path(__file__).parents[1].glob("experiments/recipes/[a-z]*.py")):
        first = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").splitlines()[0]
        found[file.stem.replace("_", "-")] = first.removesuffix(".")
    return found


RUN = _run_by_the_runner()
ABOUT = {
    "table1": "Table 1: every network on the fifteen multi-digit sets, beside the paper's numbers",
    "table1-search": "the learning rates behind Table 1, chosen on digits that are not the test set's",
    "calibration": "how hard the sets are, fitted to the paper's baseline column",
    "figures": "what is beside Table 1: filters of a branch, loss curves, what filters answer to, what else was tried",
    **RUN,
    "knowledge": "what the filters of your own converted network answer to, on your own labelled images",
}


_LARGEST = 1_000_000  # bytes of a recipe


class Key(NamedTuple):
    """One setting of a recipe."""

    default: Value
    about: str
    smoke: Value | None = None
    """What takes its place in a smoke run."""


@dataclass(frozen=True)
class Recipe:
    """A recipe with values for all its settings."""

    name: str
    values: Mapping[str, Any]

    def __getitem__(self, key: str) -> Any:
        return self.values[key]


def keys_of(name: str) -> dict[str, Key]:
    """The settings of a recipe, in the order in which they are printed."""
    if name in RUN:
        from torch_dcl.experiments.protocol import settings_of  # noqa: PLC0415
        from torch_dcl.experiments.recipes import find_recipe_type  # noqa: PLC0415

        found = settings_of(find_recipe_type(name).config_type)
        return {key: Key(_plain(default), rules.help, _plain(rules.smoke)) for key, (default, rules) in found.items()}
    from torch_dcl.experiments.columns import MODELS  # noqa: PLC0415
    from torch_dcl.experiments.engine import BATCH, SCHEDULE  # noqa: PLC0415
    from torch_dcl.experiments.experiments import FILTERS  # noqa: PLC0415
    from torch_dcl.experiments.reading import PARTS  # noqa: PLC0415
    from torch_dcl.experiments.reported import SETS  # noqa: PLC0415
    from torch_dcl.experiments.search import SEARCHED_ON, TRIALS  # noqa: PLC0415

    two = ["MNIST-II-01", "MNIST-III-01"]
    few = ["baseline", "A2", "low-rank"]
    training = {
        "data": Key("auto", 'a folder with the idx files of MNIST; "auto" looks for it, "excerpt" is the embedded one'),
        "epochs": Key(SCHEDULE.epochs, "passes over a set", 1),
        "warmup": Key(SCHEDULE.warmup, "steps until the learning rate is reached", 2),
        "drops": Key(list(SCHEDULE.drops), "parts of the training after which the rate is multiplied by factor"),
        "factor": Key(SCHEDULE.factor, "see drops"),
        "batch": Key(BATCH, "images of a step", 50),
        "device": Key("auto", 'cpu, cuda, or "auto"'),
        "precision": Key("auto", 'bfloat16, float32, float64; "auto" is bfloat16 on a GPU and float32 on a CPU'),
        "most": Key(160, "networks of a fleet at most"),
    }
    images = {
        "train_images": Key(0, "the first images of a set to train on; 0 for all 60,000", 100),
        "test_images": Key(0, "the first images of a set to test with; 0 for all 10,000", 50),
    }
    if name == "table1":
        return {
            "sets": Key(list(SETS), "which of the fifteen", two),
            "models": Key(list(MODELS), "which columns; the last three are controls, not in the paper", few),
            "seeds": Key(5, "networks of each column on each set", 2),
            **training,
            **images,
            "curves": Key("no", 'judge after every epoch, for the figure of losses: "yes" or "no"'),
        }
    if name == "table1-search":
        trials = [f"{t.lr:g}" + ("" if math.isinf(t.clip) else f" clip {t.clip:g}") for t in TRIALS]
        return {
            "sets": Key(list(SEARCHED_ON), "on which sets", two),
            "models": Key(list(MODELS), "which columns", few),
            "trials": Key(trials, "learning rates, and where it is bounded the gradient's norm", trials[:1]),
            "seed": Key(100, "one that the table does not use"),
            **training,
            **images,
        }
    if name == "figures":
        return {
            "parts": Key(list(PARTS), "which; each is kept when it is done"),
            "set": Key("MNIST-III-10", "the set of filters, curves and tried", two[0]),
            "knowledge_set": Key("MNIST-II-05", "the set of knowledge", two[0]),
            "filters": Key(list(FILTERS), "how many filters a branch has, one after the other", [10, 25, 50]),
            "seeds": Key(5, "networks of each kind; knowledge looks at one", 2),
            **training,
            "epochs": training["epochs"]._replace(smoke=2),  # of one epoch there is no curve to draw
            **images,
        }
    if name == "knowledge":
        return {
            "network": Key("", "the plain network: torchvision:NAME, timm:NAME, module:function or file.py:function"),
            "weights": Key("", "the file that torch_dcl.save_model wrote"),
            "data": Key("", "labelled images: mnist, cifar10, folder:PATH, prepared:PATH, ..."),
            "layers": Key(list[str](), "DCL layers by name; none for all"),
            "filters": Key(list[int](), "filters, counted from 0; none for one a layer, chosen by a rule"),
            "images": Key(0, "the first test images alone; 0 for all", 50),
            "size": Key(0, "for folder:PATH, height and width to resize to; 0 for as they are"),
            "mean": Key(list[float](), "what to take from each channel, in units of 255; none for nothing"),
            "std": Key(list[float](), "what to divide each channel by; none for nothing"),
            "device": Key("auto", 'cpu, cuda, or "auto"'),
        }
    return {
        "sets": Key(list(SETS), "which of the fifteen", two[:1]),
        "seeds": Key(3, "networks of a further round for each set", 1),
        "rounds": Key(3, "further rounds, each at the strength that the points so far suggest", 0),
        "start": Key([0.0, 0.5, 1.0, 1.5, 2.0], "strengths of the first round", [1.0]),
        "lr": Key(0.07, "the baseline's learning rate"),
        **training,
        **images,
    }


def recipe(name: str, *, smoke: bool = False) -> Recipe:
    """A recipe as it is.

    Args:
        name: One of `ABOUT`.
        smoke: Whether to make it tiny.
    """
    keys = keys_of(name)
    return Recipe(name, {k: v.smoke if smoke and v.smoke is not None else v.default for k, v in keys.items()})


def find_recipe(given: str, *, smoke: bool = False) -> tuple[Recipe, Path | None]:
    """What is meant by the word after ``dcl run``: a recipe's name, a file, or the folder of a run.

    Args:
        given: The word.
        smoke: Whether to make it tiny.

    Returns:
        The recipe, and the run folder where that was named.

    Raises:
        UsageError: There is no such thing.
    """
    if given in ABOUT:
        return recipe(given, smoke=smoke), None
    path = Path(given)
    if path.is_dir():
        file = path / "recipe.toml"
        if not file.is_file():
            raise UsageError(f"{path} is no run folder: it has no recipe.toml; name a recipe, {', '.join(ABOUT)}")
        return read_recipe(file, smoke=smoke), path
    if path.is_file():
        return read_recipe(path, smoke=smoke), None
    if path.suffix == ".toml" or "/" in given:
        raise UsageError(f"{given} does not exist; `dcl ls NAME > FILE.toml` writes a recipe to edit")
    raise UsageError(f"there is no recipe {given!r}; {nearest(given, ABOUT)} `dcl ls` lists them")


def read_recipe(path: Path, *, smoke: bool = False) -> Recipe:
    """Read a recipe as `as_toml` writes it; what it leaves out has its default.

    Raises:
        UsageError: It is no recipe; the message says what is wrong.
    """
    if path.stat().st_size > _LARGEST:
        raise UsageError(f"{path} has {path.stat().st_size:,} bytes; a recipe has some thousands")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise UsageError(f"{path} is nested too deeply for a recipe; dcl ls NAME prints one") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    name = data.pop("recipe", None)
    if name not in ABOUT:
        what = "has no line such as" if name is None else f"asks for the recipe {name!r}, which there is not:"
        raise UsageError(f'{path} {what} recipe = "{next(iter(ABOUT))}"; there are {", ".join(ABOUT)}')
    made = with_settings(recipe(name), data, where=f"{path}: ")
    if smoke:
        made = Recipe(name, {**made.values, **{k: v.smoke for k, v in keys_of(name).items() if v.smoke is not None}})
    return made


def with_settings(base: Recipe, settings: Mapping[str, Any], where: str = "") -> Recipe:
    """A recipe with some settings changed, after checking them.

    Args:
        base: The recipe.
        settings: Values, or the texts that were typed for them.
        where: What a message begins with.

    Raises:
        UsageError: There is no such setting, or it cannot have this value.
    """
    keys = keys_of(base.name)
    values = dict(base.values)
    for key, value in settings.items():
        if key not in keys:
            raise UsageError(f"{where}{base.name} has no setting {key!r}; {nearest(key, keys)}")
        if base.name in RUN:
            continue
        try:
            values[key] = _value(key, value, keys[key].default)
        except UsageError as error:
            raise UsageError(f"{where}{error}") from None
        except (TypeError, ValueError):
            kind = {int: "a whole number", float: "a number", list: "a list"}.get(type(keys[key].default), "a text")
            raise UsageError(f"{where}{key} must be {kind}, not {value!r}") from None
    return _changed(base, settings, where) if base.name in RUN else Recipe(base.name, values)


def config_of(given: Recipe) -> "Config":
    """The config of a recipe that the runner runs."""
    from torch_dcl.experiments.recipes import find_recipe_type  # noqa: PLC0415

    return find_recipe_type(given.name).config_type(**given.values)


def _changed(base: Recipe, settings: Mapping[str, Any], where: str) -> Recipe:
    from torch_dcl.experiments import protocol  # noqa: PLC0415

    try:
        config = protocol.with_settings(config_of(base), settings)
    except protocol.SettingError as error:
        remedy = f"; {nearest(error.given, error.known)}" if error.known else ""
        raise UsageError(f"{where}{error.message}{remedy}") from None
    return Recipe(base.name, {field.name: _plain(getattr(config, field.name)) for field in fields(config)})


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def read_settings(pairs: Sequence[str]) -> dict[str, str]:
    """The texts of ``--set key=value``.

    Raises:
        UsageError: One has no ``=``.
    """
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--set {pair!r} is not of the form key=value, such as --set epochs=4")
        found[key.strip()] = value.strip()
    return found


_LEAST = {
    "seeds": 1, "epochs": 1, "batch": 1, "most": 1, "warmup": 0, "rounds": 0, "train_images": 0, "test_images": 0,
    "images": 0, "size": 0,
}  # fmt: skip
_MOST = {"seeds": 10_000, "epochs": 1_000_000, "batch": 100_000, "most": 100_000, "rounds": 10_000}
"""Beyond these nobody can mean it, and a list of jobs would take all memory."""
_WORDS = {"precision": ("auto", "bfloat16", "float32", "float64"), "curves": ("yes", "no")}


def _value(key: str, value: Any, default: Value) -> Value:
    """A value of the kind that a setting has."""
    from torch_dcl.experiments.columns import MODELS  # noqa: PLC0415
    from torch_dcl.experiments.reading import PARTS  # noqa: PLC0415

    named: dict[str, Callable[[Any], Value]] = {
        "sets": read_sets,
        "set": lambda given: _one_set(key, given),
        "knowledge_set": lambda given: _one_set(key, given),
        "models": lambda given: read_names(given, MODELS, "model"),
        "parts": lambda given: read_names(given, PARTS, "part"),
        "filters": lambda given: _counts(key, given, 1 if default else 0),
        "layers": split,
        "trials": _trials,
    }
    if key in named:
        return named[key](value)
    if isinstance(default, list):
        parts = split(value) if isinstance(value, str) else list(value)
        return [float(part) for part in parts]
    if isinstance(value, bool):
        value = "yes" if value else "no"
    if isinstance(default, int):
        return _whole(key, value, default)
    if isinstance(default, float):
        return float(value)
    if key in _WORDS and value not in _WORDS[key]:
        raise UsageError(f"{key} is {value!r}; {nearest(str(value), _WORDS[key])}")
    if not isinstance(value, str):
        raise TypeError
    return value


def _whole(key: str, value: Any, default: int) -> int:
    if isinstance(value, float):
        raise TypeError
    number = int(value)
    least = min(_LEAST.get(key, number), default)  # where 0 stands for something, it is allowed
    if number < least and key in _LEAST:
        raise UsageError(f"{key} must be at least {least}, not {number}")
    if number > _MOST.get(key, number):
        raise UsageError(f"{key} must be at most {_MOST[key]:,}, not {number:,}")
    return number


def _one_set(key: str, value: Any) -> str:
    found = read_sets(value)
    if len(found) > 1:
        raise UsageError(f"{key} is one set, not {', '.join(found)}")
    return found[0]


def _trials(value: Any) -> list[str]:
    read_trials(split(value))
    return split(value)


def _counts(key: str, value: Any, least: int) -> list[int]:
    """Whole numbers, each once and in order."""
    parts = split(value) if isinstance(value, str) else list(value)
    if any(isinstance(part, float | bool) for part in parts):
        raise TypeError
    numbers = sorted({int(part) for part in parts})
    if numbers and numbers[0] < least:
        raise UsageError(f"{key} must be at least {least}, not {numbers[0]}")
    if least and not numbers:
        raise UsageError(f"{key} is empty; give some numbers, such as --set {key}=10,50,100")
    return numbers


def read_trials(texts: Sequence[str]) -> list[tuple[float, float]]:
    """Learning rates and bounds from texts such as ``0.07`` and ``0.07 clip 3``.

    Raises:
        UsageError: A text says something else.
    """
    found = []
    for text in texts:
        words = text.split()
        try:
            lr, clip = float(words[0]), float(words[2]) if len(words) == 3 and words[1] == "clip" else math.inf
        except (ValueError, IndexError):
            lr, clip = 0.0, 0.0
        if len(words) not in (1, 3) or not lr > 0 or not clip > 0:
            raise UsageError(f"the trial {text!r} is not of the form '0.07' or '0.07 clip 3'")
        found.append((lr, clip))
    return found


def as_toml(given: Recipe) -> str:
    """A recipe as TOML, with a word on every setting."""
    lines = [f"# {ABOUT[given.name]}.", "# Copy, edit, and run it: dcl run FILE.toml", "", f'recipe = "{given.name}"']
    for key, what in keys_of(given.name).items():
        lines += ["", f"# {what.about}", f"{key} = {_toml(given[key])}"]
    return "\n".join(lines) + "\n"


def _toml(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        entries = [_toml(entry) for entry in value]
        line = f"[{', '.join(entries)}]"
        if len(line) <= 100:
            return line
        rows = [", ".join(entries[i : i + 5]) for i in range(0, len(entries), 5)]
        return "[\n" + "".join(f"  {row},\n" for row in rows) + "]"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return repr(value)
