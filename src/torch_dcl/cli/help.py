"""What every command has in common in its help: short names, and flags that show as flags."""

from typing import Any

from typer.core import TyperCommand, TyperGroup

__all__ = ["SETTINGS", "PlainGroup"]


class _PlainFlags:
    """A command whose flags show without a type: ``--json``, where Typer writes ``--json <bool>``."""

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters, with an empty type for flags."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False) and param.metavar is None:
                param.metavar = ""
        return params


class PlainCommand(_PlainFlags, TyperCommand):
    """A command with plain flags."""


class PlainGroup(_PlainFlags, TyperGroup):
    """A group of commands with plain flags."""


HELP = {"help_option_names": ["-h", "--help"]}
SETTINGS: dict[str, Any] = {"cls": PlainCommand, "context_settings": HELP}
"""For every command."""
