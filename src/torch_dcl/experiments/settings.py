"""Validation of user input: the settings of a recipe, and the content of JSON files.

Settings are a frozen dataclass whose fields carry help, the value of a smoke run, and bounds.
"""

import contextlib
import dataclasses
import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

__all__ = [
    "Config", "Reader", "Setting", "SettingError", "are_percents", "check_batch", "choose_names", "is_count",
    "is_list_of", "is_number", "is_text", "join_texts", "names_code", "reading_data", "setting", "settings_of",
    "with_settings",
]  # fmt: skip


class SettingError(ValueError):
    """A setting that a recipe does not have, or a value that it cannot take.

    Where a name is unknown it has the ``given`` one, the ``known`` ones, and what to do ``otherwise``, if none is near.
    """

    def __init__(self, message: str, given: str = "", known: Sequence[str] = (), otherwise: str = "") -> None:
        super().__init__(message + (f"; known are {', '.join(known)}" if known else ""))
        self.message, self.given, self.known, self.otherwise = message, given, tuple(known), otherwise


class Setting(NamedTuple):
    """Metadata of a config field."""

    help: str
    smoke: Any = None
    """The value in a smoke run; None for the default."""
    choices: tuple[str, ...] = ()
    what: str = ""
    """The name of a choice, in the singular."""
    prefix: str = ""
    """What may be typed before a choice, or left out of it."""
    of: type = str
    """The type of the elements of a list whose default is empty."""
    longest: int = 100
    """How many elements a list has at most."""
    may_be_empty: bool = False
    """Whether a list may be empty though its default is not."""
    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    code: bool = False
    """Whether it may name code to run, such as ``net.py:make``."""
    machine: bool = False
    """Whether it says where and how fast to compute, and changes no result."""


def setting(default: Any, help: str, **rules: Any) -> Any:
    """A field of a config: its default, a line of help, and the rules of `Setting`."""
    return dataclasses.field(default=default, metadata={"setting": Setting(help, **rules)})


@dataclasses.dataclass(frozen=True)
class Config:
    """The settings of a recipe. Lists are tuples, and a choice of yes and no is a bool."""

    @classmethod
    def typed(cls, key: str, value: Any) -> dict[str, Any] | None:
        """The fields that a setting stands for, where these are several; otherwise None."""
        return None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _read(field, getattr(self, field.name)))


@contextlib.contextmanager
def reading_data() -> Iterator[None]:
    """Turn an error of files that a setting names, which are missing or damaged, into one of the setting."""
    try:
        yield
    except SettingError:
        raise
    except (FileNotFoundError, ValueError) as error:
        raise SettingError(str(error)) from error


def check_batch(batch: int, images: int) -> None:
    """Refuse a batch that is larger than the set."""
    if batch > images:
        raise SettingError(
            f"batch is {batch:,}, more than the {images:,} images to train on; give at most that, such as --set "
            f"batch={images}"
        )


def settings_of(config: type[Config]) -> dict[str, tuple[Any, Setting]]:
    """The settings of a config by name: default and rules, the recipe's own before those that it shares with others."""
    own = config.__annotations__
    fields = sorted(dataclasses.fields(config), key=lambda field: field.name not in own)
    return {field.name: (field.default, field.metadata["setting"]) for field in fields}


C = TypeVar("C", bound=Config)


def with_settings(config: C, settings: Mapping[str, Any]) -> C:
    """A config with some settings changed; strings are parsed to the type of the setting.

    Raises:
        SettingError: There is no such setting, or it cannot have this value.
    """
    known = [field.name for field in dataclasses.fields(config)]
    changes: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in known:
            raise SettingError(f"there is no setting {key!r}", key, known)
        changes |= type(config).typed(key, value) or {key: value}
    return dataclasses.replace(config, **changes)


_KINDS = {bool: '"yes" or "no"', int: "a whole number", float: "a number", tuple: "a list", str: "a text"}


def _read(field: "dataclasses.Field[Any]", value: Any) -> Any:
    """Parse a value to the type of its field, and check its bounds."""
    name, rules = field.name, field.metadata["setting"]
    default: Any = field.default
    kind = type(default)
    try:
        if kind is not tuple:
            return _one(name, rules, kind, value)
        parts = value.split(",") if isinstance(value, str) else list(value)
        parts = [part.strip() if isinstance(part, str) else part for part in parts]
        parts = [part for part in parts if part != ""]
        if len(parts) > rules.longest:
            raise SettingError(f"{name} has {len(parts):,} elements; give at most {rules.longest}")
        if rules.choices:
            return choose_names(rules, parts) if parts or default else ()
        inner = type(default[0]) if default else rules.of
        if not parts and default and not rules.may_be_empty:
            shown = ",".join(f"{part:g}" if inner is float else str(part) for part in default)
            raise SettingError(f"{name} is empty; give some, such as --set {name}={shown}")
        return tuple(_one(name, rules, inner, part) for part in parts)
    except (TypeError, ValueError) as error:
        if isinstance(error, SettingError):
            raise
        raise SettingError(f"{name} must be {_KINDS[kind]}, not {value!r}") from None


def _one(name: str, rules: Setting, kind: type, value: Any) -> Any:
    if kind is bool:
        answer = {"yes": True, "no": False}.get(value, value) if isinstance(value, str) else value
        if not isinstance(answer, bool):
            raise TypeError
        return answer
    if kind is str:
        if not isinstance(value, str):
            raise TypeError
        if rules.choices and ("," in value or value.lower() == "all"):
            raise SettingError(f"{name} is one {rules.what}, not {value!r}")
        return choose_names(rules, [value])[0] if rules.choices else value
    if isinstance(value, bool) or (kind is int and isinstance(value, float)):
        raise TypeError
    number = kind(value)
    if not rules.least <= number <= rules.most or not number > rules.above or math.isnan(number):
        least = f"at least {rules.least:g}" if rules.least > -math.inf else "a number"
        low = f"above {rules.above:g}" if rules.above > -math.inf else least
        high = f" and at most {rules.most:,.10g}" if rules.most < math.inf else ""
        raise SettingError(f"{name} must be {low}{high}, not {number:,.10g}")
    return number


def choose_names(rules: Setting, given: Sequence[Any]) -> tuple[str, ...]:
    """Names out of the choices, or ``all``, each once and in the order of the choices."""
    prefix = rules.prefix.lower()
    by_low = {name.lower().removeprefix(prefix): name for name in rules.choices}
    chosen: set[str] = set()
    for name in map(str, given):
        low = name.lower().removeprefix(prefix)
        if low == "all":
            chosen.update(rules.choices)
        elif low in by_low:
            chosen.add(by_low[low])
        else:
            is_short = bool(prefix) and rules.choices[0].startswith(rules.prefix)
            near = rules.prefix + low.upper() if is_short else name
            raise SettingError(f"there is no {rules.what} {name!r}", near, rules.choices)
    if not chosen:
        raise SettingError(f"no {rules.what} is named", "", rules.choices)
    return tuple(name for name in rules.choices if name in chosen)


def names_code(network: str) -> bool:
    """Whether building the network of this name runs user code, as ``net.py:make`` does."""
    home, colon, _ = network.rpartition(":")
    return bool(colon) and home not in ("torchvision", "timm")


# JSON


class Reader:
    """Takes named values out of a JSON object, and says where one is wrong; messages begin with its place."""

    def __init__(self, place: str, data: object, error: type[ValueError] = ValueError) -> None:
        self.place, self.error = place, error
        if not isinstance(data, dict):
            self.refuse(f"an object with names is needed, not {_short(data)}")
        self.data: dict[str, Any] = data

    def get(self, key: str, right: Callable[[Any], bool], what: str, *default: object) -> Any:
        """A value that is right, or the default; anything else is refused."""
        if key not in self.data:
            if default:
                return default[0]
            self.refuse(f"{key} is missing; give {what}")
        value = self.data[key]
        if not right(value):
            self.refuse(f"{key} is {_short(value)}; give {what}")
        return value

    def name(self, key: str, known: Sequence[str]) -> str:
        """A name out of those that are known."""
        value: str = self.get(key, is_text, "a name")
        if value not in known:
            near = difflib.get_close_matches(value, known, 1, 0)
            self.refuse(f"{key} {value!r} is unknown; did you mean {near[0]!r}? Known: {', '.join(known)}")
        return value

    def named(
        self, key: str, right: Callable[[Any], bool], what: str, kind: Callable[[Any], Any] = float
    ) -> dict[str, Any]:
        """An object whose values are right, each as a kind; empty where it is missing."""
        given = self.get(key, lambda v: isinstance(v, dict) and all(map(right, v.values())), what, {})
        return {name: kind(value) for name, value in given.items()}

    def refuse(self, why: str) -> NoReturn:
        """Raise an error that names the place."""
        raise self.error(f"{self.place}: {why}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def is_number(value: object) -> bool:
    """Whether JSON has a finite number here."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def is_text(value: object) -> bool:
    """Whether it is a text."""
    return isinstance(value, str)


def is_count(value: object) -> bool:
    """Whether it is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_list_of(right: Callable[[object], bool]) -> Callable[[object], bool]:
    """A predicate: a list whose elements are all right."""
    return lambda value: isinstance(value, list) and all(map(right, value))


def are_percents(value: object) -> bool:
    """Whether it is a list of at least one number from 0 to 100."""
    return isinstance(value, list) and bool(value) and all(is_number(v) and 0 <= v <= 100 for v in value)


def join_texts(parts: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The texts of all parts by key, without repetitions."""
    texts: dict[str, dict[str, None]] = {}
    for key, text in (item for part in parts for item in part.items()):
        texts.setdefault(key, {})[text] = None
    return {key: "; ".join(by_key) for key, by_key in texts.items()}
