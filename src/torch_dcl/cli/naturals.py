"""Whether the sets of Table 2 and of the chart are there, by a look at the files' names."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch_dcl.cli.names import UsageError

if TYPE_CHECKING:
    from torch_dcl.experiments.natural.sets import NaturalConfig

__all__ = ["found_of", "refuse_without_data", "sets_of"]


def sets_of(config: "NaturalConfig") -> list[str]:
    """The sets that are asked for."""
    return [config.data] if isinstance(config.data, str) else list(config.data)


def found_of(names: Sequence[str], root: str | None) -> dict[str, str | None]:
    """Which sets are there; of the others what to put where.

    Args:
        names: The sets.
        root: Where to look; None for the usual places.

    Returns:
        By name None, or the remedy.
    """
    from torch_dcl.cli.datasets import is_here  # noqa: PLC0415
    from torch_dcl.data import load  # noqa: PLC0415
    from torch_dcl.experiments.natural.sets import MADE_UP, remedy  # noqa: PLC0415

    told: dict[str, str | None] = {}
    for name in names:
        told[name] = None
        if root != MADE_UP and not is_here(name, root):
            try:
                load(name, root=root)
            except FileNotFoundError as error:
                told[name] = remedy(error)
    return told


def refuse_without_data(config: "NaturalConfig", recipe: str, *, dry: bool) -> None:
    """Refuse a folder that does not exist, and a run of which no set is there.

    Args:
        config: The recipe's settings.
        recipe: Its name.
        dry: Whether nothing will be run, so that sets may be missing.

    Raises:
        UsageError: With which files to put where.
    """
    from torch_dcl.experiments.natural.sets import AUTO, MADE_UP  # noqa: PLC0415

    if config.place not in (None, MADE_UP) and not Path(config.root).expanduser().is_dir():
        raise UsageError(f"root is {config.root!r}, and there is no such folder; name one, {AUTO} or {MADE_UP}")
    if dry:
        return
    told = found_of(sets_of(config), config.place)
    if all(told.values()):
        words = "; ".join(filter(None, told.values()))
        raise UsageError(
            f"{words}; or name their folder with --data. Without any, dcl run {recipe} --smoke tries the path"
        )
