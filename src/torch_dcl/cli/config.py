"""The arguments of ``dcl run``: a recipe with its settings, from names, files and options."""

import ast
import dataclasses
import hashlib
import hmac
import json
import math
import os
import secrets
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch_dcl.cli.console import (
    UsageError,
    check_folder,
    expand_home,
    explain_setting,
    nearest,
    read_device,
    several,
    was_restarted,
)
from torch_dcl.files import user_cache

if TYPE_CHECKING:
    from torch_dcl.experiments.protocol import Recipe
    from torch_dcl.experiments.settings import Config

_LARGEST = 1_000_000  # bytes of a recipe


def _first_lines() -> dict[str, str]:
    """The first line of each recipe's docstring, read without importing the recipe."""
    lines = {}
    for file in sorted(Path(__file__).parents[1].glob("experiments/recipes/[a-z]*.py")):
        first = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").splitlines()[0]
        lines[file.stem.replace("_", "-")] = first.removesuffix(".")
    return lines


ABOUT = _first_lines()
"""The recipes, and what each runs."""


class Asked(NamedTuple):
    """A recipe's name, and its settings."""

    name: str
    config: "Config"


def recipe(name: str, *, smoke: bool = False) -> Asked:
    """A recipe with its defaults, or with the values of a smoke run."""
    from torch_dcl.experiments.protocol import find_recipe_type

    kind = find_recipe_type(name).config_type
    return Asked(name, dataclasses.replace(kind(), **(_smoke(kind) if smoke else {})))


def _smoke(kind: "type[Config]") -> dict[str, Any]:
    from torch_dcl.experiments.settings import settings_of

    return {name: rules.smoke for name, (_, rules) in settings_of(kind).items() if rules.smoke is not None}


def find_recipe(given: str, *, smoke: bool = False) -> tuple[Asked, Path | None]:
    """A recipe by what follows ``dcl run``: its name, a file, or the folder of a run; and the file it was read from."""
    if given in ABOUT:
        return recipe(given, smoke=smoke), None
    path = Path(given)
    if path.is_dir():
        file = path / "recipe.toml"
        if not file.is_file() and (path / "recipe.json").is_file():
            raise UsageError(f"{path} has no recipe.toml; resume it with the command that began it, and --resume")
        if not file.is_file():
            raise UsageError(f"{path} is not a run folder: it has no recipe.toml; name a recipe, {', '.join(ABOUT)}")
        return read_recipe(file, smoke=smoke), file
    if path.is_file():
        return read_recipe(path, smoke=smoke), path
    if path.suffix == ".toml" or "/" in given:
        raise UsageError(f"{given} does not exist; `dcl ls NAME > FILE.toml` writes a recipe to edit")
    raise UsageError(f"there is no recipe {given!r}; {nearest(given, ABOUT)} `dcl ls` lists them")


def read_recipe(path: Path, *, smoke: bool = False) -> Asked:
    """Read a recipe as `as_toml` writes it; what it leaves out has its default."""
    if path.stat().st_size > _LARGEST:
        raise UsageError(f"{path} has {path.stat().st_size:,} bytes; a recipe has some thousands")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except RecursionError:
        raise UsageError(f"{path} is nested too deeply for a recipe; dcl ls NAME prints one") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    name = data.pop("recipe", None)
    if not isinstance(name, str) or name not in ABOUT:
        what = "has no line such as" if name is None else f"names the unknown recipe {name!r}; write"
        raise UsageError(f'{path} {what} recipe = "table1"; there are {", ".join(ABOUT)}')
    asked = with_settings(recipe(name), data, where=f"{path}: ")
    return Asked(name, dataclasses.replace(asked.config, **_smoke(type(asked.config)))) if smoke else asked


def with_settings(asked: Asked, settings: Mapping[str, Any], where: str = "") -> Asked:
    """A recipe with some settings changed, given as values or as typed; ``where`` is what a message begins with."""
    from torch_dcl.experiments import settings as rules

    known = list(rules.settings_of(type(asked.config)))
    for key in settings:
        if key not in known:
            raise UsageError(f"{where}{asked.name} has no setting {key!r}; {nearest(key, known)}")
    try:
        return Asked(asked.name, rules.with_settings(asked.config, settings))
    except rules.SettingError as error:
        raise UsageError(f"{where}{explain_setting(error)}") from None


def read_settings(pairs: Sequence[str]) -> dict[str, str]:
    """The texts of ``--set key=value``; a home folder is expanded, as no shell does behind the equals sign."""
    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--set {pair!r} is not of the form key=value, such as --set epochs=4")
        settings[key.strip()] = expand_home(value.strip())
    return settings


def plain_settings(config: "Config") -> dict[str, Any]:
    """Settings as plain data, in the order in which they are printed."""
    from torch_dcl.experiments.settings import settings_of

    values = {name: getattr(config, name) for name in settings_of(type(config))}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def as_toml(asked: Asked) -> str:
    """A recipe as TOML, with a comment on every setting."""
    from torch_dcl.experiments.settings import settings_of

    lines = [f"# {ABOUT[asked.name]}.", "# Copy, edit, and run it: dcl run FILE.toml", "", f'recipe = "{asked.name}"']
    values = plain_settings(asked.config)
    for key, (_, rules) in settings_of(type(asked.config)).items():
        lines += ["", f"# {rules.help}", f"{key} = {_toml(values[key])}"]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """A value as TOML, which writes texts and truth values as JSON does, and infinite numbers as Python."""
    if isinstance(value, list):
        entries = [_toml(entry) for entry in value]
        line = f"[{', '.join(entries)}]"
        if len(line) <= 100:
            return line
        rows = [", ".join(entries[i : i + 5]) for i in range(0, len(entries), 5)]
        return "[\n" + "".join(f"  {row},\n" for row in rows) + "]"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


@dataclasses.dataclass(frozen=True)
class Task:
    """A recipe that is about to be run."""

    asked: Asked
    recipe: "Recipe[Any]"
    out: Path
    resume: bool = False
    seconds: float = math.inf
    join: bool = False
    """Whether the run is shared with other processes that were started with the same command."""

    def files(self) -> dict[str, bytes]:
        """Further files of the run folder: the settings to edit, and a seal of the code that they name."""
        seal = {"code.seal": _seal(self.asked)} if _code_of(self.asked) else {}
        return {"recipe.toml": as_toml(self.asked).encode(), **seal}

    @property
    def resume_command(self) -> str:
        """The command that resumes the run; several ranks are started as before, however many."""
        from torch_dcl.experiments.run_reader import as_argument

        begin = "torchrun … -m torch_dcl" if several() and not self.join else "dcl"
        return f"{begin} run {as_argument(self.out)} --{'join' if self.join else 'resume'}"


def make_task(
    given: str,
    settings: Mapping[str, Any],
    pairs: Sequence[str] = (),
    *,
    out: Path | None = None,
    smoke: bool = False,
    resume: bool = False,
    minutes: float | None = None,
    dry: bool = False,
    trust: bool = False,
    join: bool = False,
) -> Task:
    """Build a task from the arguments of ``dcl run``."""
    asked, file = find_recipe(given, smoke=smoke)
    options, by_name = {key: value for key, value in settings.items() if value is not None}, read_settings(pairs)
    if both := sorted(options.keys() & by_name.keys()):
        raise UsageError(f"--{both[0]} and --set {both[0]}= are the same setting; give one of them")
    typed = by_name | options
    if file is not None and not trust:
        _refuse_code(asked, file, typed)
    asked = with_settings(asked, typed)
    if minutes is not None and not minutes > 0:
        raise UsageError(f"--minutes must be above 0, not {minutes:g}")
    folder = file.parent if file is not None and Path(given).is_dir() else None
    if out is None:
        out = folder or Path("runs", asked.name + ("-smoke" if smoke else ""))
        if (smoke or asked.name == "demo") and not resume and not dry and folder is None and not several() and not join:
            out = _fresh(out)
    if not dry:
        check_folder(out)
    if join and resume:
        raise UsageError("--join begins a run or takes part in it, so leave --resume out")
    resume = resume or was_restarted(out)
    if resume and not (out / "recipe.json").exists():
        raise UsageError(f"there is no run in {out} to resume; leave --resume out to begin one")
    from torch_dcl.experiments.protocol import find_recipe_type

    device = read_device(getattr(asked.config, "device", "cpu"))
    seconds, kind = math.inf if minutes is None else 60 * minutes, find_recipe_type(asked.name)
    config = kind.resumed(asked.config, out) if resume else asked.config
    return Task(asked, kind(config, device), out, resume, seconds, join)


def _fresh(out: Path) -> Path:
    """A folder that does not exist yet, so that smoke runs can be repeated."""
    count, path = 1, out
    while path.exists():
        count += 1
        path = out.with_name(f"{out.name}-{count}")
    return path


# Code that a file names


def _code_of(asked: Asked) -> dict[str, str]:
    """The settings that name code to run."""
    from torch_dcl.experiments.settings import names_code, settings_of

    named = {key: str(getattr(asked.config, key)) for key, (_, r) in settings_of(type(asked.config)).items() if r.code}
    return {key: value for key, value in named.items() if names_code(value)}


def _refuse_code(asked: Asked, file: Path, typed: Mapping[str, Any]) -> None:
    """Reject a file that names code to run, unless a run of this user wrote it."""
    code = {key: value for key, value in _code_of(asked).items() if key not in typed}
    if not code:
        return
    seal = file.with_name("code.seal")
    if seal.is_file() and hmac.compare_digest(seal.read_bytes(), _seal(asked)):
        return
    key, value = next(iter(code.items()))
    raise UsageError(f"{file} names code to run, {key} = {value!r}; look at it, and add --trust if you trust it")


def _seal(asked: Asked) -> bytes:
    """The code's names, authenticated with a key that only this user can read."""
    file = user_cache() / "key"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as opened:
            opened.write(secrets.token_bytes(32))
    named = {key: (value, str(Path(value.rpartition(":")[0]).resolve())) for key, value in _code_of(asked).items()}
    text = repr(sorted(named.items()))  # with the place of a file, which another folder does not share
    return hmac.new(file.read_bytes(), text.encode(), hashlib.sha256).digest()
