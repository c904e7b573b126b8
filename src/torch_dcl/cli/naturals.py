"""The recipes on natural images, Table 2 and the deciding chart: their settings, and what ``--data`` means there."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_dcl.cli.names import UsageError, nearest, split

__all__ = ["NATURAL", "found_of", "images_of", "keys_of_natural", "read_data", "refuse_without_data", "root_of"]

NATURAL = ("table2", "chart")
"""The recipes whose ``--data`` names sets."""
AUTO = "auto"


def keys_of_natural(name: str) -> dict[str, Any]:
    """The settings of a recipe, in the order in which they are printed."""
    from torch_dcl.cli.recipes import Key  # noqa: PLC0415
    from torch_dcl.experiments.natural.deciding import RATES  # noqa: PLC0415
    from torch_dcl.experiments.natural.recipes import DATA, NETWORKS  # noqa: PLC0415
    from torch_dcl.experiments.natural.sets import MADE_UP  # noqa: PLC0415
    from torch_dcl.experiments.natural.units import UNITS  # noqa: PLC0415

    root = Key(
        AUTO, f'the folder with the sets; "{AUTO}" for the usual places, "{MADE_UP}" for generated images', MADE_UP
    )
    shared = {
        "scale": Key(1.0, "what part of each recipe's epochs to train; a shortened run is marked so", 0.005),
        "train_images": Key(0, "the first images of a set to train on; 0 for all", 20),
        "test_images": Key(0, "the first images of a set to test with; 0 for all", 10),
        "batch": Key(0, "images of a step; 0 for the recipe's", 10),
        "device": Key("auto", 'cpu, cuda, or "auto"'),
        "precision": Key("auto", 'bfloat16, float32, float64; "auto" is bfloat16 on a GPU and float32 on a CPU'),
        "most": Key(12, "networks that train at a time: seeds of a column, on a GPU several columns"),
        "compile": Key("no", 'compile the networks: "yes" or "no"'),
        "streams": Key(8, "how many networks of a fleet run at a time on a GPU"),
        "deterministic": Key("no", 'the same bits every time, also on a GPU and in slices: "yes" or "no"'),
        "average": Key("no", 'test with the mean over an image and its mirror image: "yes" or "no"'),
    }
    if name == "table2":
        return {
            "networks": Key(list(NETWORKS), "which networks, each without and with DCL", ["lenet", "bignet"]),
            "models": Key(list[str](), "which columns exactly, such as bignet,bignet+dcl; none for the networks'"),
            "data": Key(list(DATA), "which sets; one that is not found is noted as not run", ["cifar10"]),
            "root": root,
            "seeds": Key(3, "networks of each column on each set", 2),
            **shared,
        }  # fmt: skip
    few = ["plain", "low-rank", "dcl", "star"]
    return {
        "data": Key("cifar10", "cifar10 or cifar100"),
        "root": root,
        "units": Key(list(UNITS), "what stands in place of BigNet's first fully-connected layer", few),
        "shares": Key([0.25], "budgets: filters of one of DCL's two branches, as a part of the layer's"),
        "rates": Key(list(RATES), "learning rates to try, the same for every unit", [0.01]),
        "seeds": Key(3, "networks of each unit", 2),
        "search_scale": Key(0.2, "what part of the recipe's epochs to train to choose a learning rate", 0.005),
        "rounds": Key(5, "rounds whose median is the time of a step", 1),
        **shared,
    }


def read_data(given: str | Sequence[str], recipe: str) -> tuple[list[str], str | None]:
    """What ``--data`` says: names of sets, a folder to look for them in, or both, between commas.

    A word that is a set's name is that set, also where a folder is called so; ``./cifar10`` is the folder.

    Args:
        given: What was typed.
        recipe: One of `NATURAL`.

    Returns:
        The sets, none where only a folder was named; and the folder.

    Raises:
        UsageError: A word is neither, or there are two folders, or sets that the recipe does not have.
    """
    from torch_dcl.experiments.natural import deciding, recipes  # noqa: PLC0415

    known = recipes.DATA if recipe == "table2" else deciding.DATA
    names: set[str] = set()
    folders: list[str] = []
    for word in split(given):
        plain = word.lower().replace("-", "").replace("_", "")
        if plain == "all" and recipe == "table2":
            names.update(known)
        elif plain in known:
            names.add(plain)
        elif Path(word).expanduser().is_dir():
            folders.append(word)
        else:
            what = "no folder either" if "/" in word or "\\" in word else "no folder of that name"
            raise UsageError(f"{recipe} has no set {word!r}, and there is {what}; {nearest(plain, known)}")
    if len(folders) > 1:
        raise UsageError(f"--data names {len(folders)} folders, {', '.join(folders)}; name one")
    if recipe != "table2" and len(names) > 1:
        raise UsageError(f"{recipe} is of one set, not of {', '.join(sorted(names))}; run it once for each")
    if not names and not folders:
        raise UsageError(f"no data is named; give some of {', '.join(known)}, or a folder")
    return [name for name in known if name in names], folders[0] if folders else None


def root_of(recipe: Any) -> str | None:
    """Where a recipe looks for its sets; None for the usual places.

    Raises:
        UsageError: There is no such folder.
    """
    from torch_dcl.experiments.natural.sets import MADE_UP  # noqa: PLC0415

    root = str(recipe["root"])
    if root in ("", AUTO):
        return None
    if root != MADE_UP and not Path(root).expanduser().is_dir():
        raise UsageError(f"root is {root!r}, and there is no such folder; name one, {AUTO} or {MADE_UP}")
    return root


def found_of(names: Sequence[str], root: str | None) -> dict[str, str | None]:
    """Which sets are there, by a look at the files' names; of the others what to put where.

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


def refuse_without_data(names: Sequence[str], root: str | None, recipe: str) -> None:
    """Refuse a run of which no set is there.

    Raises:
        UsageError: With which files to put where.
    """
    told = found_of(names, root)
    if all(told.values()):
        words = "; ".join(filter(None, told.values()))
        raise UsageError(
            f"{words}; or name their folder with --data. Without any, dcl run {recipe} --smoke tries the path"
        )


def images_of(recipe: Any) -> tuple[int | None, int | None] | None:
    """How many images to train on and to test with; None for all."""
    train, test = recipe["train_images"] or None, recipe["test_images"] or None
    return None if train is None and test is None else (train, test)
