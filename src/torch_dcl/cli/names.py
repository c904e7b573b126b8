"""Names as people type them: the nearest one for a wrong one, sets with or without ``MNIST-``, options."""

import difflib
import re
from collections.abc import Iterable, Sequence

__all__ = ["UsageError", "in_options", "nearest", "read_names", "read_sets", "split"]


class UsageError(ValueError):
    """An invalid argument; the message says what to type instead. Exit code 2."""


def in_options(message: str, options: Iterable[str]) -> str:
    """A message of the library with options of the command in place of Python's arguments.

    Args:
        message: For example ``ratio must be above 0, or pass force=True``.
        options: Those that the command has, such as ``round-to``.

    Returns:
        The message with ``--ratio must be above 0, or pass --force``.
    """
    for option in options:
        name = option.replace("-", "_")
        message = re.sub(rf"\b{name}(=True\b|=(?!\w))", f"--{option}", message)
        message = re.sub(rf"\b{name}( = |=)", f"--{option} ", message)
        # A name of one word may be a plain word as well, except where a sentence begins with it.
        before = "()" if "_" in name else "(^|; |leave )"
        message = re.sub(rf"{before}\b{name}\b", rf"\g<1>--{option}", message)
    return message


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest one, or all of them where none is near.

    Args:
        name: What was typed.
        known: What there is.
    """
    known = list(known)
    low = {entry.lower(): entry for entry in known}
    near = difflib.get_close_matches(name.lower(), low, 1, 0.55)
    if near:
        return f"did you mean {low[near[0]]}?"
    listed = ", ".join(known[:20]) + (", …" if len(known) > 20 else "")
    return f"there are {listed}" if known else "there are none"


def split(text: str | Sequence[str]) -> list[str]:
    """Parts between commas, in one text or in several."""
    texts = [text] if isinstance(text, str) else text
    return [part.strip() for entry in texts for part in str(entry).split(",") if part.strip()]


def read_sets(given: str | Sequence[str]) -> list[str]:
    """Names of multi-digit sets: ``II-01`` or ``MNIST-II-01``, or ``all``, each once and in the paper's order.

    Raises:
        UsageError: There is no such set.
    """
    from torch_dcl.experiments.reported import SETS  # noqa: PLC0415

    chosen: set[str] = set()
    for name in split(given):
        full = name.upper() if name.upper().startswith("MNIST-") else f"MNIST-{name.upper()}"
        if name.lower() == "all":
            chosen.update(SETS)
        elif full in SETS:
            chosen.add(full)
        else:
            raise UsageError(f"there is no multi-digit set {name!r}; {nearest(full, SETS)}")
    if not chosen:
        raise UsageError("no set is named; give some, such as II-01,III-10, or all")
    return [name for name in SETS if name in chosen]


def read_names(given: str | Sequence[str], known: Sequence[str], what: str) -> list[str]:
    """Names out of a list, or ``all``, each once and in the order of the list.

    Args:
        given: What was typed.
        known: What there is.
        what: What a name is a name of, in the singular.

    Raises:
        UsageError: There is no such name.
    """
    chosen: set[str] = set()
    by_low = {name.lower(): name for name in known}
    for name in split(given):
        # The paper writes DCL-A2, the columns are called A2.
        plain = name.lower().removeprefix("dcl-")
        if plain == "all":
            chosen.update(known)
        elif plain in by_low:
            chosen.add(by_low[plain])
        else:
            raise UsageError(f"there is no {what} {name!r}; {nearest(name, known)}")
    if not chosen:
        raise UsageError(f"no {what} is named; give some of {', '.join(known)}, or all")
    return [name for name in known if name in chosen]
